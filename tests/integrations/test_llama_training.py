"""An unmodified 4-layer Llama trains 50 steps and generates 32 tokens in every way of calling MXFP8 attention.

The direct call of flash_attn_func is what the others are held against: attn_implementation="flash_attn_mx", and torch's
attention with famx.sdpa.activate(); eager, and under torch.compile.

Training must be well conditioned for that: inductor rounds fp32 in another order, MXFP8 turns a last bit of fp32 into a
step of 2^-4 now and then, and a large learning rate amplifies it until two correct runs are different models. LR
is small enough that it stays below LOSS (docs/integrations.md has the figures). No word has a letter twice, so that each
letter decides the next one.
"""

import contextlib

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5")

import flash_attn_mx as famx  # noqa: E402
from flash_attn_mx.integrations import transformers as ours  # noqa: E402

STEPS, NEW, LENGTH, PERIOD, LR = 50, 32, 48, 6, 7e-4
# Losses of the same arithmetic in another order of fp32 operations, as training goes on: bf16's half ulp; its ulp where
# inductor orders them, as weights that are one fp32 rounding away give up to 0.006 in eager (at 1e-3).
LOSS, LOSS_INDUCTOR = 2.0**-8, 2.0**-7


def direct(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return famx.flash_attn_func(q, k, v, softmax_scale=scaling, causal=True), None


def llama(implementation):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, attn_implementation=implementation,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def batches():
    """Sequences that each repeat one of eight words."""
    source = torch.Generator().manual_seed(1)
    words = torch.stack([torch.randperm(30, generator=source)[:PERIOD] + 2 for _ in range(8)])
    for _ in range(STEPS):
        yield words[torch.randint(0, 8, (8,), generator=source)].repeat(1, LENGTH // PERIOD)


def training_step(implementation, run, ids):
    """The loss. With a cache sdpa gets no mask from transformers under torch.compile, which MXFP8 would hand on."""
    return run(input_ids=ids, labels=ids, use_cache=implementation == "sdpa").loss


def train_and_generate(implementation, compile_backend=None):
    """(losses, generated tokens)"""
    model = llama(implementation)
    run = model if compile_backend is None else torch.compile(model, backend=compile_backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    for ids in batches():
        optimizer.zero_grad()
        loss = training_step(implementation, run, ids)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    prompt = next(batches())[:1, : 3 * PERIOD]
    options = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    model.eval()
    if compile_backend is not None:
        torch._dynamo.reset()
        model.forward = torch.compile(model.forward, backend=compile_backend)
        options["cache_implementation"] = "static"
    return torch.tensor(losses), model.generate(prompt, **options)[0, prompt.shape[1] :]


@pytest.fixture(scope="module")
def reference():
    famx.set_fallback("silent")
    transformers.AttentionInterface.register("famx_direct", direct)
    transformers.AttentionMaskInterface.register("famx_direct", lambda *args, **kwargs: None)
    ours.register()
    yield train_and_generate("famx_direct")
    famx.set_fallback("warn")


def check(reference, losses, tokens, tolerance=LOSS):
    word = next(batches())[0, :PERIOD]
    assert tokens.tolist() == word.repeat(NEW)[:NEW].tolist() == reference[1].tolist()
    assert float((losses / reference[0] - 1).abs().max()) < tolerance
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.slow
def test_attn_implementation_equals_the_direct_call_bit_for_bit(reference):
    losses, tokens = train_and_generate(ours.NAME)
    assert losses.tolist() == reference[0].tolist()
    check(reference, losses, tokens)


@pytest.mark.slow
def test_sdpa_backend_equals_the_direct_call(reference):
    with famx.sdpa.enabled():
        check(reference, *train_and_generate("sdpa"))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("implementation", [ours.NAME, "sdpa"])
def test_compiled_equals_the_direct_call(reference, implementation, backend):
    """Training, and decoding with a static cache."""
    torch._dynamo.reset()
    with famx.sdpa.enabled() if implementation == "sdpa" else contextlib.nullcontext():
        tolerance = LOSS_INDUCTOR if backend == "inductor" else LOSS
        check(reference, *train_and_generate(implementation, backend), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", [ours.NAME, "sdpa"])
def test_inductor_gives_the_gradients_of_eager(reference, implementation):
    """One step from the same weights, where nothing is amplified yet."""
    torch._dynamo.reset()
    ids, gradients = next(batches()), []
    with famx.sdpa.enabled() if implementation == "sdpa" else contextlib.nullcontext():
        for compiled in (False, True):
            model = llama(implementation)
            run = torch.compile(model, backend="inductor") if compiled else model
            training_step(implementation, run, ids).backward()
            gradients.append({name: x.grad for name, x in model.named_parameters()})
    for name, expected in gradients[0].items():
        assert expected.norm() > 0, name
        assert (gradients[1][name] - expected).norm() < 2.0**-8 * expected.norm(), name
