"""attn_implementation="flash_attn_mx": every architecture family, every form of mask, every option."""

import inspect
import sys

import pytest
import torch
from compare import assert_close, assert_equal_bits, relative_error
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers", minversion="5.10")

import flash_attn_mx as famx  # noqa: E402
from flash_attn_mx import dispatch  # noqa: E402
from flash_attn_mx.integrations import transformers as ours  # noqa: E402

OURS = ours.NAME
# Two or three layers of MXFP8 attention on random weights, against fp32 attention: the attention's error of some 5 %
# is damped by the residual stream. A wrong mask, window or head gives errors near 1.
QUALITY_MODEL = 0.08
HIGH_PRECISION = 2e-5


@pytest.fixture(autouse=True)
def registered():
    """Registered, silent, and without leftovers of the policy or the warnings."""
    ours.register()
    famx.set_fallback("silent")
    dispatch.forget_warnings()
    yield
    famx.set_fallback("warn")
    famx.set_policy()


SIZES = dict(
    vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=128,
)  # fmt: skip
GQA = dict(SIZES, num_key_value_heads=2)
# What makes attention sharp enough that wrong keys show: weights of this size.
SPREAD = dict(initializer_range=0.1)


def build(architecture, **options):
    """A random model of a transformers architecture in eval mode, attention in fp32."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{architecture}Config")
    name = {"Bert": "BertModel", "T5": "T5Model", "ViT": "ViTModel", "GPT2": "GPT2LMHeadModel"}
    model = getattr(transformers, name.get(architecture, f"{architecture}ForCausalLM"))
    return model(config(**{**SPREAD, **options})).eval()


def output(model, implementation, **inputs):
    """Logits, or the last hidden state, with an attention implementation."""
    model.set_attn_implementation(implementation)
    with torch.no_grad():
        out = model(**inputs)
    return out.logits if "logits" in out else out.last_hidden_state


def tokens(batch=2, length=40, seed=1, high=99):
    return torch.randint(3, high, (batch, length), generator=torch.Generator().manual_seed(seed))


def padding(length, left=0, right=0):
    """(2, length) marks: the first row padded, the second full."""
    marks = torch.ones(2, length, dtype=torch.long)
    marks[0, :left] = 0
    marks[0, length - right :] = 0
    return marks


class Operators(TorchDispatchMode):
    """Names of the flash_attn_mx operators that ran, with the shape of their first argument."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "flash_attn_mx":
            self.calls.append((function._schema.name.split("::")[1], tuple(args[0].shape)))
        return function(*args, **(kwargs or {}))

    def forwards(self):
        return [shape for name, shape in self.calls if name == "fwd"]


MODELS = {
    "llama-gqa": ("Llama", GQA),
    "qwen2": ("Qwen2", GQA),
    "qwen3": ("Qwen3", dict(GQA, head_dim=24)),
    "mistral-window": ("Mistral", dict(GQA, sliding_window=7)),
    "gemma3-alternating": (
        "Gemma3",
        dict(
            GQA, head_dim=16, sliding_window=5, layer_types=["sliding_attention", "full_attention"]
        ),
    ),
    "phimoe-window-in-mask": (
        "Phimoe",
        dict(GQA, sliding_window=6, num_local_experts=2, num_experts_per_tok=1),
    ),
    "gpt2": ("GPT2", dict(vocab_size=99, n_positions=128, n_embd=64, n_layer=2, n_head=4)),
    "bert": ("Bert", SIZES),
}


def text_model(name):
    architecture, options = MODELS[name]
    if architecture == "Gemma3":
        torch.manual_seed(0)
        config = transformers.Gemma3TextConfig(**SPREAD, **options)
        return transformers.Gemma3ForCausalLM(config).eval()
    return build(architecture, **options)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("marks", ["none", "left", "right"])
def test_model_agrees_with_sdpa(name, marks):
    """Real tokens give what torch's attention gives, up to MXFP8, and MXFP8 operators made it in every layer."""
    model, ids = text_model(name), tokens()
    mask = {"none": None, "left": padding(40, left=11), "right": padding(40, right=11)}[marks]
    expected = output(model, "sdpa", input_ids=ids, attention_mask=mask)
    with Operators() as operators:
        actual = output(model, OURS, input_ids=ids, attention_mask=mask)
    real = torch.ones_like(ids) if mask is None else mask
    error = relative_error(actual[real.bool()], expected[real.bool()])
    assert 1e-4 < error < QUALITY_MODEL
    packed = (2 * 40, 4, actual.shape[-1])[:2]
    shapes = operators.forwards()
    assert len(shapes) == 2
    assert all(shape[:2] == (packed if mask is not None else (2, 40)) for shape in shapes)


def test_grouped_heads_are_not_repeated():
    """Guards K and V being expanded to the query heads before the call."""
    model = build("Llama", **GQA)
    with Operators() as operators:
        output(model, OURS, input_ids=tokens())
    quantised = [shape[2] for name, shape in operators.calls if "quantize" in name]
    assert sorted(set(quantised)) == [2, 4]


def test_vision_model_agrees_with_sdpa():
    model = build(
        "ViT", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        image_size=32, patch_size=8,
    )  # fmt: skip
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    expected = output(model, "sdpa", pixel_values=pixels)
    error = relative_error(output(model, OURS, pixel_values=pixels), expected)
    assert 1e-4 < error < QUALITY_MODEL


# --- C44: causality, padding, decoding ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "gpt2"])
def test_c44_changing_the_last_token_leaves_earlier_logits_bit_identical(name):
    model, ids = text_model(name), tokens(2, 8)
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 99
    before, after = (output(model, OURS, input_ids=x) for x in (ids, changed))
    assert_equal_bits(after[:, :7], before[:, :7])
    assert (after[:, 7] != before[:, 7]).any()


@pytest.mark.parametrize("left,right", [(3, 0), (0, 3)])
def test_c44_padding_tokens_change_no_bit(left, right):
    model, ids, marks = build("Llama", **GQA), tokens(2, 8), padding(8, left, right)
    other = torch.where(marks.bool(), ids, (ids + 5) % 99)
    before, after = (output(model, OURS, input_ids=x, attention_mask=marks) for x in (ids, other))
    assert_equal_bits(after[marks.bool()], before[marks.bool()])


# transformers renamed the argument after 5.20.
_FORWARD = inspect.signature(transformers.LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in _FORWARD else "past_key_values"


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "gpt2"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("left", [0, 3])
def test_c44_decoding_with_a_cache_sees_all_past_keys(name, cache, left):
    """One-token steps give the logits of the whole sequence at once."""
    model, ids, marks = text_model(name), tokens(2, 12), padding(12, left=left)
    model.set_attn_implementation(OURS)
    positions = (marks.cumsum(-1) - 1).clamp(min=0)
    kept = transformers.DynamicCache(config=model.config)
    if cache == "static":
        kept = transformers.StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        mask = marks if left else None
        whole = model(ids, attention_mask=mask, position_ids=positions if left else None).logits
        for begin, end in [(0, 5), *((i, i + 1) for i in range(5, 12))]:
            step = model(
                ids[:, begin:end],
                attention_mask=marks[:, :end] if left else None,
                position_ids=positions[:, begin:end],
                **{CACHE: kept},
            ).logits
            real = marks[:, begin:end].bool()
            # K and V are quantised per 32 tokens of what there is: one step's blocks are shorter than the whole's.
            assert_close(step[real], whole[:, begin:end][real], frobenius=0.05)


def test_decode_steps_take_the_path_that_explain_names():
    """A policy that changes the path in mid-sequence: the operators that run are those that explain() announces."""
    model, ids = build("Llama", **GQA), tokens(1, 12)
    model.set_attn_implementation(OURS)
    famx.set_policy(min_seqlen_k=16)
    with Operators() as operators:
        model.generate(ids, max_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=None)
    q, kv = torch.zeros(1, 1, 4, 16), torch.zeros(1, 20, 2, 16)
    named = [famx.explain(q, kv[:, :n], kv[:, :n], causal=True).backend for n in range(12, 21)]
    assert named == ["high_precision"] * 4 + ["portable"] * 5
    assert operators.forwards() == [(1, 1, 4, 16)] * (2 * named.count("portable"))


# --- masks, straight at the two functions ---------------------------------------------------------------------


class Layer(torch.nn.Module):
    is_causal = True
    layer_idx = 0


def heads_first(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_c13_model_window_counts_the_current_token():
    """sliding_window = 2 is left = 1."""
    q = k = torch.zeros(1, 1, 4, 16)
    v = torch.tensor([1.0, 2, 4, 8]).view(1, 1, 4, 1).expand(1, 1, 4, 16)
    out, _ = ours.attention(Layer(), q, k, v, None, sliding_window=2)
    assert out[0, :, 0, 0].tolist() == [1, 1.5, 3, 6]


@pytest.mark.parametrize("length", [4, 40])
def test_window_of_the_mask_is_honoured_where_the_model_does_not_pass_it(length):
    from transformers import masking_utils

    q, k, v = (heads_first(1, 2, length, 16, seed=s) for s in range(3))
    mask = ours.make_mask(
        1, length, length, local_size=3,
        mask_function=masking_utils.sliding_window_causal_mask_function(3),
    )  # fmt: skip
    actual, _ = ours.attention(Layer(), q, k, v, mask)
    expected, _ = ours.attention(Layer(), q, k, v, None, sliding_window=3)
    assert_equal_bits(actual, expected)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_rows_alone(side, window):
    """Bit for bit, values and gradients: padding is left out, not masked; its rows are 0 with gradient 0."""
    from transformers import masking_utils

    lengths, size = (70, 33, 0), 70
    inputs = [
        heads_first(3, h, size, 32, seed=s).requires_grad_() for s, h in ((0, 4), (1, 2), (2, 2))
    ]
    marks = torch.zeros(3, size, dtype=torch.bool)
    for row, n in enumerate(lengths):
        marks[row, slice(0, n) if side == "right" else slice(size - n, size)] = True
    function = masking_utils.causal_mask_function
    if window:
        function = masking_utils.sliding_window_causal_mask_function(window)
    mask = ours.make_mask(
        3, size, size, mask_function=function, attention_mask=marks, local_size=window
    )
    out, _ = ours.attention(Layer(), *inputs, mask, sliding_window=window)
    dout = heads_first(*out.shape, seed=3)
    grads = torch.autograd.grad(out, inputs, dout)
    assert not out[~marks].any()
    for row in range(2):
        alone = [x[row : row + 1, :, marks[row]].detach().requires_grad_() for x in inputs]
        expected = famx.flash_attn_func(
            *(x.transpose(1, 2) for x in alone), causal=True, window_size=((window or 0) - 1, -1)
        )
        assert_equal_bits(out[row, marks[row]], expected[0])
        wanted = torch.autograd.grad(expected, alone, dout[row : row + 1, marks[row]])
        for grad, want in zip(grads, wanted):
            assert_equal_bits(grad[row, :, marks[row]], want[0])
            assert not grad[row, :, ~marks[row]].any()


def test_packed_position_ids_keep_sequences_apart():
    """Several rows, each with sequences of its own, as torch's attention treats them; MXFP8 in one packed call."""
    model, ids = build("Llama", **GQA), tokens(2, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1], list(range(9))])
    expected = output(model, "sdpa", input_ids=ids, position_ids=positions, use_cache=False)
    with Operators() as operators:
        actual = output(model, OURS, input_ids=ids, position_ids=positions, use_cache=False)
    assert operators.forwards() == [(18, 4, 16)] * 2
    assert relative_error(actual, expected) < QUALITY_MODEL
    alone = output(model, OURS, input_ids=ids[:1, 4:7])
    assert_close(actual[:1, 4:7], alone, frobenius=1e-5)


def test_given_sequence_lengths_equal_position_ids():
    model, ids = build("Llama", **GQA), tokens(1, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])
    cu = torch.tensor([0, 4, 7, 9])
    lengths = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=4, max_length_k=4)
    actual = output(model, OURS, input_ids=ids, position_ids=positions, use_cache=False, **lengths)
    assert_equal_bits(
        actual, output(model, OURS, input_ids=ids, position_ids=positions, use_cache=False)
    )
    with pytest.raises(ValueError, match="cu_seq_lens"):
        output(
            model, OURS, input_ids=ids, position_ids=positions, use_cache=False, cu_seq_lens_q=cu
        )


def test_padding_between_tokens_under_a_window_is_counted_as_transformers_counts_it():
    """A hole in a row is no packed sequence: served with the whole mask, in high precision."""
    model, ids = build("Mistral", **GQA, sliding_window=4), tokens(2, 12)
    marks = padding(12)
    marks[0, 5:8] = 0
    actual = output(model, OURS, input_ids=ids, attention_mask=marks)
    expected = output(model, "sdpa", input_ids=ids, attention_mask=marks)
    assert_close(actual[marks.bool()], expected[marks.bool()], frobenius=HIGH_PRECISION)


def test_c42_a_models_own_mask_is_obeyed_with_notice():
    """A 4-D mask, and a pattern that is laid over the causal one (image tokens that see each other)."""
    from transformers import masking_utils

    famx.set_fallback("warn")
    model, ids = build("Llama", **GQA), tokens(2, 8)
    own = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    own |= torch.eye(8, dtype=torch.bool)
    with pytest.warns(famx.FallbackWarning, match="attn_mask"):
        actual = output(model, OURS, input_ids=ids, attention_mask=own)
    expected = output(model, "sdpa", input_ids=ids, attention_mask=own)
    assert_close(actual, expected, frobenius=HIGH_PRECISION)
    blocks = torch.tensor([[-1, 0, 0, -1, -1, 1, 1, 1]] * 2)
    made = [
        masking_utils.create_causal_mask(
            model.config, torch.zeros(2, 8, 64), None, None, block_sequence_ids=blocks
        )
        for model.config._attn_implementation in (OURS, "sdpa")
    ]
    assert torch.equal(*made) and made[0][0, 0, 5, 7] and not made[0][0, 0, 4, 5]


def test_unknown_mask_function_is_materialised():
    mask = ours.make_mask(1, 4, 4, mask_function=lambda b, h, q, k: (k <= q) & (k != 1))
    assert mask.shape == (1, 1, 4, 4) and not mask[..., 1].any() and mask[0, 0, 3].sum() == 3


def test_encoder_decoder_cross_attention_of_equal_length_keeps_all_queries():
    """Padding of the encoder says nothing about decoder tokens, even where both have one length."""
    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=99, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
        init_std=0.1,
    )  # fmt: skip
    model = transformers.BartModel(config).eval()
    inputs = dict(
        input_ids=tokens(2, 16),
        attention_mask=padding(16, right=7),
        decoder_input_ids=tokens(2, 16, 5),
    )
    expected = output(model, "sdpa", **inputs)
    assert 1e-4 < relative_error(output(model, OURS, **inputs), expected) < QUALITY_MODEL


# --- options that MXFP8 does not serve ------------------------------------------------------------------------


def test_softcap_is_served_with_notice():
    famx.set_fallback("warn")
    options = dict(GQA, head_dim=16, sliding_window=6, attn_logit_softcapping=2.0)
    model, ids = build("Gemma2", **options), tokens()
    marks = padding(40, left=5)
    with pytest.warns(famx.FallbackWarning, match="softcap"):
        actual = output(model, OURS, input_ids=ids, attention_mask=marks)
    expected = output(model, "eager", input_ids=ids, attention_mask=marks)
    assert_close(actual[marks.bool()], expected[marks.bool()], frobenius=HIGH_PRECISION)


def test_rows_of_padding_are_zero_in_high_precision_too():
    q, k, v = (heads_first(2, 2, 9, 16, seed=s) for s in range(3))
    marks = padding(9, left=4).bool()
    mask = ours.make_mask(2, 9, 9, attention_mask=marks)
    for options in ({"softcap": 2.0}, {"dropout": 0.1}):
        out, _ = ours.attention(Layer(), q, k, v, mask, **options)
        assert not out[~marks].any() and out[marks].any()


def test_sinks_are_served_with_notice():
    famx.set_fallback("warn")
    options = dict(
        GQA, head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model, ids = build("GptOss", **options), tokens()
    with torch.no_grad():
        for block in model.model.layers:
            block.self_attn.sinks.normal_()
    expected = output(model, "eager", input_ids=ids)
    allowed = type(model)._compatible_flash_implementations
    allowed.append(OURS)
    try:
        with pytest.warns(famx.FallbackWarning, match="sinks"):
            actual = output(model, OURS, input_ids=ids)
    finally:
        allowed.remove(OURS)
    assert_close(actual, expected, frobenius=HIGH_PRECISION)


def test_relative_position_bias_is_served_with_notice():
    from transformers.models.t5 import modeling_t5

    if not hasattr(modeling_t5, "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip(f"T5 of transformers {transformers.__version__} computes its attention itself")
    famx.set_fallback("warn")
    model = build("T5", vocab_size=99, d_model=64, d_kv=16, d_ff=64, num_layers=2, num_heads=4)
    inputs = dict(
        input_ids=tokens(), decoder_input_ids=tokens(2, 9), attention_mask=padding(40, right=9)
    )
    with pytest.warns(famx.FallbackWarning, match="position_bias"):
        actual = output(model, OURS, **inputs)
    error = relative_error(actual, output(model, "eager", **inputs))
    assert error < QUALITY_MODEL  # cross attention has no bias and runs in MXFP8


def test_c48_dropout_is_applied_in_training_only():
    """train -> eval -> train; the mean over many draws is the value without dropout."""
    famx.set_fallback("warn")
    model, ids = build("Llama", **GQA, attention_dropout=0.5), tokens(2, 8)
    model.set_attn_implementation(OURS)
    expected = output(model, OURS, input_ids=ids)
    model.train()
    with pytest.warns(famx.FallbackWarning, match="dropout"):
        first, second = (model(ids).logits for _ in range(2))
    assert (first != second).any()
    assert_equal_bits(output(model.eval(), OURS, input_ids=ids), expected)
    assert (model.train()(ids).logits != expected).any()
    v = torch.ones(32, 2, 16, 16)
    mask = ours.make_mask(32, 16, 16, attention_mask=(torch.arange(16) > 2).expand(32, 16))
    draws = torch.stack(
        [ours.attention(Layer(), v, v, v, mask, dropout=0.1)[0][:, 10:] for _ in range(60)]
    )
    assert abs(float(draws.mean()) - 1) < 0.01
    assert draws.std() > 0.05  # applied to padded rows too


def test_output_attentions_gives_weights_with_notice():
    famx.set_fallback("warn")
    q, k, v = (
        heads_first(2, 4, 9, 16),
        heads_first(2, 2, 9, 16, seed=1),
        heads_first(2, 2, 9, 16, seed=2),
    )
    with pytest.warns(famx.FallbackWarning, match="output_attentions"):
        out, weights = ours.attention(Layer(), q, k, v, None, output_attentions=True)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    assert_close(out, expected.transpose(1, 2), frobenius=HIGH_PRECISION)
    assert_close(weights.sum(-1), torch.ones(2, 4, 9), atol=1e-6)


@pytest.mark.parametrize("width", [(320, 320), (48, 32)])
def test_head_sizes_beyond_the_kernels(width):
    """Above 256 in high precision; a value head of another size is padded."""
    d, dv = width
    q, k, v = (heads_first(1, 2, 20, n, seed=n) for n in (d, d, dv))
    out, _ = ours.attention(Layer(), q, k, v, None)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    bound = HIGH_PRECISION if d > 256 else 0.12
    assert out.shape == (1, 20, 2, dv)
    assert_close(out, expected.transpose(1, 2), frobenius=bound)


@pytest.mark.parametrize("name", ["head_mask", "block_table", "alibi_slopes"])
def test_argument_that_is_not_served_is_refused(name):
    x = torch.zeros(1, 2, 4, 16)
    with pytest.raises(NotImplementedError, match=name):
        ours.attention(Layer(), x, x, x, None, **{name: torch.ones(2)})


def test_error_instead_of_notice():
    famx.set_fallback("error")
    x = torch.zeros(1, 2, 4, 16)
    with pytest.raises(RuntimeError, match="softcap"):
        ours.attention(Layer(), x, x, x, None, softcap=3.0)


def test_named_backend_refuses_what_it_cannot_do():
    x = torch.zeros(1, 2, 4, 16)
    famx.set_backend("portable")
    try:
        with pytest.raises(NotImplementedError, match="softcap"):
            ours.attention(Layer(), x, x, x, None, softcap=3.0)
    finally:
        famx.set_backend("auto")


def test_mask_of_another_shape_is_refused():
    x = torch.zeros(1, 2, 4, 16)
    with pytest.raises(ValueError, match="attention_mask"):
        ours.attention(Layer(), x, x, x, torch.ones(1, 3))


# --- layers, autograd, autocast, compile ----------------------------------------------------------------------


def test_policy_finds_layers_by_name_and_by_index():
    model, ids = build("Llama", **GQA), tokens()
    for rule in ("model.layers.1.*", 1):
        famx.set_policy()
        ours.name_layers(model)
        famx.keep_high_precision(rule)
        with Operators() as operators:
            output(model, OURS, input_ids=ids)
        assert len(operators.forwards()) == 1


def test_gradient_checkpointing_changes_no_bit():
    gradients = []
    for checkpointing in (False, True):
        model, ids = build("Llama", **GQA).train(), tokens()
        model.set_attn_implementation(OURS)
        if checkpointing:
            names = (
                "activation_checkpointing_enable",
                "gradient_checkpointing_enable",
            )  # 5.24, 5.20
            next(getattr(model, name) for name in names if hasattr(model, name))()
        with Operators() as operators:
            model(ids, attention_mask=padding(40, left=5), labels=ids).loss.backward()
        assert len(operators.forwards()) == (4 if checkpointing else 2)
        gradients.append([p.grad for p in model.parameters()])
    for plain, checkpointed in zip(*gradients):
        assert_equal_bits(checkpointed, plain)


def test_c45_autocast_gives_its_dtype_and_fp32_gradients():
    model, ids = build("Qwen3", **GQA, head_dim=16).train(), tokens()
    model.set_attn_implementation(OURS)
    seen = []
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0].dtype)
    )
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, labels=ids).loss.backward()
    assert seen == [torch.bfloat16]
    assert all(
        p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters()
    )


@pytest.mark.parametrize("marks", [pytest.param("none", marks=pytest.mark.slow), "left"])
def test_compiled_training_step_is_one_graph_and_equals_eager(marks):
    model, ids = build("Llama", **dict(GQA, num_hidden_layers=1)).train(), tokens()
    model.set_attn_implementation(OURS)
    inputs = dict(attention_mask=padding(40, left=5)) if marks == "left" else {}
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for run in (model, compiled):
        model.zero_grad()
        out = run(ids, labels=ids, **inputs)
        out.loss.backward()
        results.append((out.logits.detach(), model.model.layers[0].self_attn.k_proj.weight.grad))
    real = padding(40, left=5).bool() if inputs else torch.ones(2, 40, dtype=torch.bool)
    assert_close(results[1][0][real], results[0][0][real], frobenius=1e-2)
    assert_close(results[1][1], results[0][1], frobenius=1e-2)


def test_compiled_graph_refuses_packed_position_ids_that_it_would_ignore():
    """What a graph cannot decide it asks at run time; the lengths, given, work."""
    model, ids = build("Llama", **dict(GQA, num_hidden_layers=1)), tokens(1, 9)
    model.set_attn_implementation(OURS)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    positions, cu = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]]), torch.tensor([0, 4, 7, 9])
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="cu_seq_lens_q"):
            compiled(ids, position_ids=positions, use_cache=False)
        lengths = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=4, max_length_k=4)
        actual = compiled(ids, position_ids=positions, use_cache=False, **lengths).logits
        expected = model(ids, position_ids=positions, use_cache=False).logits
    assert_close(actual, expected, frobenius=1e-2)


# --- registration ---------------------------------------------------------------------------------------------


def test_version_without_our_mask_interface_is_refused(monkeypatch):
    """transformers 5.0 hands mask functions something else: an error at once instead of one in the first forward pass."""
    from transformers import masking_utils

    monkeypatch.setattr(masking_utils, "sdpa_mask", lambda batch_size, cache_position: None)
    with pytest.raises(ImportError, match=r"needs transformers >= 5.10, got 5\..*pip install"):
        ours.register()


def test_c44_registers_attention_and_mask():
    from transformers import AttentionInterface, AttentionMaskInterface

    ours.register()
    assert AttentionInterface()[OURS] is ours.attention
    assert AttentionMaskInterface()[OURS] is ours.make_mask


def test_models_that_call_flash_functions_themselves_are_refused():
    from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

    functions, _ = lazy_import_flash_attention(OURS)
    with pytest.raises(NotImplementedError, match="sdpa"):
        functions[0](1, 2, 3)


def test_missing_transformers_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install 'transformers"):
        ours.register()


def test_module_is_reached_without_an_import_of_its_own():
    assert famx.integrations.transformers is ours
    with pytest.raises(AttributeError, match="jax"):
        famx.integrations.jax  # noqa: B018
