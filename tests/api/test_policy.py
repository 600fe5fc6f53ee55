"""Policies for layers and heads: the rules, the file, and what a call then computes."""

import json
import re
from pathlib import Path

import pytest
import torch

import flash_attn_mx as famx
from flash_attn_mx import policy


@pytest.fixture(autouse=True)
def default_policy():
    famx.set_policy()
    yield
    famx.set_policy()
    famx.set_fallback("silent")


def qkv(nheads=4, nheads_k=2):
    torch.manual_seed(0)
    return [
        torch.randn(2, 40, heads, 32, requires_grad=True) for heads in (nheads, nheads_k, nheads_k)
    ]


def high_precision(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True
    ).transpose(1, 2)


def file_with(tmp_path, **entries):
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"format": policy.FORMAT, "version": 1, **entries}))
    return path


@pytest.mark.parametrize(
    "rule, layer, expected",
    [
        (3, 3, True),
        (3, 13, False),
        (3, "model.layers.3.self_attn", True),
        (3, "model.layers.13.self_attn", False),
        (3, "stages.3.blocks.3.attn", False),  # two numbers: an index says too little
        ("encoder.*.attn", "encoder.layer.0.attn", True),
        ("encoder.*.attn", "decoder.layer.0.attn", False),
        ("encoder.*.attn", "encoder.layer.0.attn.self", False),
        ("*.attn", "attn", False),
        ("a*a", "a", False),  # the star is text between two different a's
        ("a*b*c", "a1b2b3c", True),
        ("3", 3, True),
        ("encoder.0", "encoder.0", True),
    ],
)
def test_rule_fits_layer(rule, layer, expected):
    """Indices, names and patterns."""
    assert policy.LayerRule(rule).fits(layer) is expected


def test_whole_layer_runs_in_high_precision():
    """A rule changes its own layer, forward and backward, and no other."""
    q, k, v = qkv()
    plain = famx.flash_attn_func(q, k, v, layer=2)
    famx.set_policy(layers=[famx.LayerRule(2, reason="outliers")])
    exact = high_precision(q, k, v)
    out = famx.flash_attn_func(q, k, v, layer=2)
    assert torch.equal(out, exact) and not torch.equal(out, plain)
    assert torch.equal(famx.flash_attn_func(q, k, v, layer=1), plain)
    grads = [torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (out, exact)]
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    plan = famx.explain(q, k, v, layer=2)
    assert plan.backend == "high_precision" and "outliers" in str(plan)


@pytest.mark.parametrize("causal", [False, True])
def test_some_heads_run_in_high_precision(causal):
    """Heads of a rule are exact, the others keep their MXFP8 values, also where heads are grouped."""
    q, k, v = qkv()
    plain = famx.flash_attn_func(q, k, v, causal=causal)
    famx.set_policy(layers=[famx.LayerRule(2)])
    exact = famx.flash_attn_func(q, k, v, causal=causal, layer=2)
    famx.set_policy(layers=[famx.LayerRule("blocks.2.*", heads=(1, 2))])
    out = famx.flash_attn_func(q, k, v, causal=causal, layer="blocks.2.attn")
    assert torch.equal(out[:, :, 1:3], exact[:, :, 1:3])
    torch.testing.assert_close(out[:, :, ::3], plain[:, :, ::3], rtol=1e-6, atol=1e-6)
    assert famx.explain(q, k, v, layer="blocks.2.attn").high_precision_heads == (1, 2)
    out.sum().backward()
    assert all(torch.isfinite(x.grad).all() and x.grad.abs().max() > 0 for x in (q, k, v))


def test_some_heads_of_packed_sequences():
    """The same through flash_attn_varlen_func."""
    q, k, v = (x.detach()[0] for x in qkv())
    cu = torch.tensor([0, 11, 40], dtype=torch.int32)
    plain = famx.flash_attn_varlen_func(q, k, v, cu, cu, 40, 40)
    famx.set_policy(layers=[famx.LayerRule(0, heads=(3,))])
    out = famx.flash_attn_varlen_func(q, k, v, cu, cu, 40, 40, layer=0)
    exact = torch.cat([high_precision(*(x[None, a:b] for x in (q, k, v)))[0] for a, b in ((0, 11), (11, 40))])  # fmt: skip
    torch.testing.assert_close(out[:, 3], exact[:, 3])
    torch.testing.assert_close(out[:, :3], plain[:, :3], rtol=1e-6, atol=1e-6)


def test_all_heads_are_the_layer():
    """A rule that lists every head leaves nothing to MXFP8."""
    famx.set_policy(layers=[famx.LayerRule(0, heads=(0, 1, 2, 3))])
    assert famx.explain(*qkv(), layer=0).backend == "high_precision"


def test_rule_with_missing_head_raises():
    """A head that the layer does not have is an error, not a rule without effect."""
    famx.set_policy(layers=[famx.LayerRule(0, heads=(4,))])
    with pytest.raises(ValueError, match="policy: expected heads below 4, as the call for layer 0"):
        famx.flash_attn_func(*qkv(), layer=0)


def test_call_without_layer_is_told():
    """Rules for layers cannot act on a call that does not say its layer: a notice, not silence."""
    famx.set_policy(layers=[famx.LayerRule(0)])
    famx.set_fallback("warn")
    with pytest.warns(famx.FallbackWarning, match="does not say its layer"):
        famx.flash_attn_func(*qkv())
    with pytest.raises(TypeError, match="layer: expected an index, a name or None, got float"):
        famx.flash_attn_func(*qkv(), layer=1.0)


def test_policy_under_compile_fullgraph():
    """Rules are obeyed in a compiled call, and a changed policy is noticed."""
    famx.set_policy(layers=[famx.LayerRule("blocks.*", heads=(1,))])
    q, k, v = (x.detach() for x in qkv())
    compiled = torch.compile(famx.flash_attn_func, fullgraph=True, backend="aot_eager")
    assert torch.equal(
        compiled(q, k, v, layer="blocks.7"), famx.flash_attn_func(q, k, v, layer="blocks.7")
    )
    famx.set_policy(layers=[famx.LayerRule("blocks.*")])
    assert torch.equal(compiled(q, k, v, layer="blocks.7"), high_precision(q, k, v))


def test_load_policy_applies_and_restores(tmp_path):
    """For good, or for a block; written files read back equal."""
    rules = (famx.LayerRule(3, (0, 5), "why"), famx.LayerRule("encoder.*"))
    wanted = famx.Policy(64, 200.0, rules)
    policy.write(wanted, tmp_path / "p.json")
    with famx.load_policy(tmp_path / "p.json") as active:
        assert active == wanted == famx.get_policy()
    assert famx.get_policy() == famx.Policy()
    famx.load_policy(str(tmp_path / "p.json"))
    assert famx.get_policy() == wanted
    famx.keep_high_precision(7, heads=[2, 1], reason="saturates")
    assert famx.get_policy().layers[-1] == famx.LayerRule(7, (1, 2), "saturates")


@pytest.mark.parametrize(
    "entries, message",
    [
        ({"format": "other"}, "\"format\": expected 'flash_attn_mx.policy', got 'other'"),
        ({"version": 2}, '"version": expected 1, got 2'),
        ({"layer": []}, "keys out of .*got \\['layer'\\]"),
        ({"layers": {}}, '"layers": expected a list, got dict'),
        ({"layers": [3]}, "layers\\[0\\]: expected an object, got int"),
        ({"layers": [{"layer": 0}, {"layer": -1}]}, "layers\\[1\\]: \"layer\": .*got -1"),
        ({"layers": [{"layer": True}]}, '"layer": .*got True'),
        ({"layers": [{"layer": 0, "heads": []}]}, '"heads": .*got \\[\\]'),
        ({"layers": [{"layer": 0, "head": [1]}]}, "layers\\[0\\]: expected keys out of"),
        ({"layers": [{"layer": 0, "reason": 1}]}, '"reason": expected a string, got 1'),
        ({"min_seqlen_k": -1}, "min_seqlen_k: expected an int >= 0, got -1"),
        ({"max_outlier": "big"}, "max_outlier: expected None or a ratio > 1, got 'big'"),
    ],
)  # fmt: skip
def test_bad_policy_file_raises_and_changes_nothing(tmp_path, entries, message):
    """Every wrong entry is named, with the file."""
    famx.set_policy(min_seqlen_k=5)
    path = file_with(tmp_path, **entries)
    with pytest.raises(ValueError, match=message) as caught:
        famx.load_policy(path)
    assert "policy.json" in str(caught.value)
    assert famx.get_policy() == famx.Policy(5)


def test_policy_file_that_is_not_json_raises(tmp_path):
    """Truncated, binary, a list, or not there."""
    path = tmp_path / "p.json"
    for content, message in ((b'{"format": ', "JSON"), (b"\xff\xfe", "JSON"), (b"[]", "object")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            famx.load_policy(path)
    with pytest.raises(FileNotFoundError):
        famx.load_policy(tmp_path / "missing.json")


def test_documented_file_and_snippet_work(tmp_path, monkeypatch):
    """docs/validate.md: the JSON is a policy, the Python runs and leaves none."""
    text = (Path(__file__).parents[2] / "docs" / "validate.md").read_text()
    (example,) = re.findall(r"```json\n(.*?)```", text, flags=re.DOTALL)
    rules = policy.from_dict(json.loads(example)).layers
    assert rules[0].heads == (0, 5) and rules[1].fits("encoder.layer.3.attention")
    monkeypatch.chdir(tmp_path)
    (snippet,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(compile(snippet, "validate.md", "exec"), {})
    assert policy.read("policy.json").layers[0].heads == (0, 5)
    assert famx.get_policy() == famx.Policy()
