"""famx.monitor(): its counts are right, its layers are the model's, its limits act, and it leaves nothing behind."""

import json
import math
import warnings

import pytest
import torch
import torch._dynamo.testing
from compare import assert_equal_bits

import flash_attn_mx as famx
from flash_attn_mx import dispatch, ops, sm100

EMPTY = 2.0**-10  # largest scaled value that rounds to an E4M3 payload of 0


@pytest.fixture(autouse=True)
def clean():
    famx.set_fallback("silent")
    dispatch.forget_warnings()
    yield
    famx.set_policy()
    famx.set_fallback("warn")


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def qkv(seqlen_q=70, seqlen_k=70, heads=2, heads_k=2, dim=40, grad=False):
    sizes = ((seqlen_q, heads), (seqlen_k, heads_k), (seqlen_k, heads_k))
    return [normal(2, s, h, dim, seed=i).requires_grad_(grad) for i, (s, h) in enumerate(sizes)]


def seen_of(call, **options):
    """The figures of the only layer."""
    with famx.monitor(sample=1.0, **options) as seen:
        call()
    (figures,) = seen.as_dict()["layers"].values()
    return figures


# --- the counts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounding", ["rceil", "floor"])
def test_operand_counts_equal_brute_force(rounding):
    """Saturation exists with floor only; underflow where one value dwarfs its block; ragged S and D."""
    q, k, v = qkv()
    q[:, ::7, :, 3] *= 3e4
    v[:, 5::32, :, :] *= 1e5
    k[0, 3] = 0
    figures = seen_of(lambda: famx.flash_attn_func(q, k, v, rounding=rounding))
    for kind, x, axis in (("q", q, "rowwise"), ("k", k, "rowwise"), ("v", v, "colwise")):
        mx = famx.quantize_mxfp8(x, axis=axis, rounding=rounding)
        scale = famx.MXTensor(torch.ones_like(x).to(mx.data.dtype), mx.scale, axis)
        scaled = x.abs() / famx.dequantize(scale)
        got = figures[kind]
        assert got["elements"] == got["sampled"] == x.numel()
        assert got["saturated"] == int((scaled > 448).sum())
        assert got["underflowed"] == int(((famx.dequantize(mx) == 0) & (x != 0)).sum())
        assert got["amax"] == x.abs().max()
        assert got["nonfinite"] == 0
    assert figures["q"]["underflowed"] > 0 and figures["v"]["underflowed"] > 0
    assert (figures["q"]["saturated"] > 0) == (rounding == "floor")
    exponents = famx.quantize_mxfp8(k, rounding=rounding).scale.view(torch.uint8).int() - 127
    used = exponents[famx.quantize_mxfp8(k).scale.float() != 1]  # the zero rows have byte 127
    assert (figures["k"]["scale_min"], figures["k"]["scale_max"]) == (used.min(), used.max())


def test_nan_and_inf_are_counted_in_every_head_whatever_the_sample():
    q, k, v = qkv(heads=4, heads_k=4)
    k[1, 69, 3, 7], v[1, 3, 3, 0] = math.nan, math.inf
    with famx.monitor(sample=0.01) as seen:
        famx.flash_attn_func(q, k, v)
    figures = seen.as_dict()["layers"]["call 0"]
    assert [figures[kind]["nonfinite"] for kind in "qkv"] == [0, 1, 1]
    assert figures["k"]["amax"] == math.inf and figures["q"]["sampled"] == 70 * 40


def test_elements_of_poisoned_blocks_are_no_underflow():
    x = torch.ones(1, 40, 1, 40)
    x[0, 0, 0, :4] = torch.tensor([math.nan, 0.0, 0.0, 1e-30])
    x[0, 1, 0, :2] = torch.tensor([2.0**10, 1e-9])
    x[0, :, 0, 36] = 0
    x[0, 39, 0, 35:] = math.nan
    figures = seen_of(lambda: famx.flash_attn_func(x, x, x))
    assert figures["q"]["underflowed"] == 1
    tokens = famx.quantize_mxfp8(x, axis="colwise")
    poisoned = tokens.data.view(torch.uint8) == 0x7F
    wanted = ((tokens.data.float() == 0) & (x != 0) & ~poisoned).sum()
    assert figures["v"]["underflowed"] == wanted


def contract_p(q, k, scale):
    """(256 p as the payload has it before rounding, weights) of a mask-free head in float64: docs/numerics.md §3."""
    q, k = (famx.dequantize(famx.quantize_mxfp8(x)).double() for x in (q, k))
    x = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale / math.log(2)
    tiles = x.split(128, dim=-1)
    reference = tiles[-1].amax(-1, keepdim=True)
    p = [256 * 2 ** (t - reference - (t.amax(-1, keepdim=True) - reference).ceil()) for t in tiles]
    return torch.cat(p, -1), (x * math.log(2)).softmax(-1)


@pytest.mark.parametrize("seqlen_k", [20, 300])
def test_flushed_p_equals_brute_force_without_mask(seqlen_k):
    """Tiles take their own exponent: a small tile is not flushed because another is large."""
    q, k, v = qkv(seqlen_q=32, seqlen_k=seqlen_k)
    scale = 3.0
    figures = seen_of(lambda: famx.flash_attn_func(q, k, v, softmax_scale=scale))["p"]
    payload, weights = contract_p(q, k, scale)
    lost = payload <= EMPTY
    assert figures["visible"] == payload.numel()
    assert abs(figures["flushed"] - int(lost.sum())) <= 2  # fp32 against float64 at the boundary
    assert figures["flushed"] > 100
    assert figures["flushed_mass_share"] == pytest.approx(
        float((weights * lost).sum(-1).mean()), rel=0.05
    )


def test_flushed_p_of_cut_tiles_counts_visible_keys_only():
    """Causal: a row of the mask's triangle; each 32 keys have their own scale, after V's token scales."""
    q, k, v = qkv(seqlen_q=32, seqlen_k=32)
    v[:, ::3] *= 64
    scale = 6.0
    figures = seen_of(lambda: famx.flash_attn_func(q, k, v, softmax_scale=scale, causal=True))["p"]
    qd, kd = (famx.dequantize(famx.quantize_mxfp8(x)).double() for x in (q, k))
    x = torch.einsum("bqhd,bkhd->bhqk", qd, kd) * scale / math.log(2)
    token = famx.quantize_mxfp8(v, axis="tokenwise").scale.double().permute(0, 2, 3, 1)
    visible = torch.ones(32, 32, dtype=torch.bool).tril()
    p = torch.where(visible, 2**x * token, 0.0)
    byte = (p.amax(-1, keepdim=True) / 448).log2().ceil()
    lost = (p * 2**-byte <= EMPTY) & visible
    assert figures["visible"] == 4 * int(visible.sum())
    assert abs(figures["flushed"] - int(lost.sum())) <= 2 and figures["flushed"] > 20


@pytest.mark.parametrize("causal", [False, True])
def test_ds_figures_equal_brute_force(causal):
    q, k, v = qkv(seqlen_q=32, seqlen_k=70, grad=True)
    dout, scale = normal(2, 32, 2, 40, seed=9), 2.0

    def call():
        out = famx.flash_attn_func(q, k, v, softmax_scale=scale, causal=causal)
        torch.autograd.backward(out, dout)
        call.out = out.detach()

    figures = seen_of(call)
    values = [famx.quantize_mxfp8(x.detach(), axis=axis)
              for x, axis in ((q, "rowwise"), (k, "rowwise"), (v, "tokenwise"), (dout, "rowwise"))]  # fmt: skip
    qd, kd, vd, do = (famx.dequantize(x).double() for x in values)
    s = torch.einsum("bqhd,bkhd->bhqk", qd, kd) * scale
    visible = torch.ones(32, 70, dtype=torch.bool).tril(38) if causal else torch.ones(32, 70).bool()
    p = s.masked_fill(~visible, -math.inf).softmax(-1)
    delta = (do * call.out.double()).sum(-1).transpose(1, 2).unsqueeze(-1)
    ds = p * (torch.einsum("bqhd,bkhd->bhqk", do, vd) - delta)
    blocks = torch.nn.functional.pad(ds, (0, 26)).unflatten(-1, (3, 32))
    amax = blocks.abs().amax((-3, -1), keepdim=True)
    exponent = (amax / 448).log2().ceil()
    lost = (blocks.abs() * 2**-exponent <= EMPTY) & (blocks != 0)
    got = figures["ds"]
    assert got["amax"] == pytest.approx(float(ds.abs().max()), rel=1e-4)
    assert (got["scale_min"], got["scale_max"]) == (exponent.min(), exponent.max())
    assert got["nonzero"] == pytest.approx(int((ds != 0).sum()), abs=2)
    assert got["flushed"] == pytest.approx(int(lost.sum()), abs=3) and got["flushed"] > 0
    assert figures["dout"]["amax"] == dout.abs().max() and got["nonfinite"] == 0


def test_packed_sequences_and_grouped_heads_take_turns():
    """Every sequence and every head is looked at, one after the other; the counts of P are those of that sequence."""
    lengths = [33, 0, 64]
    cu = torch.tensor([0, 33, 33, 97], dtype=torch.int32)
    q, k = normal(100, 4, 32).requires_grad_(), normal(100, 2, 32, seed=1)
    with famx.monitor(sample=0.5) as seen:
        for _ in range(8):
            out = famx.flash_attn_varlen_func(q, k, k, cu, cu, 64, 64, causal=True)
            out.backward(torch.ones_like(out))
            seen.step()
    figures = seen.as_dict()["layers"]["call 0"]
    assert (figures["calls"], figures["backward_calls"]) == (8, 8)
    # 4 turns each: rows 0..31 or row 32 of the first, rows 0..31 or 32..63 of the last; one head of two.
    first, last = [sum(range(1, 33)), 33], [sum(range(1, 33)), sum(range(33, 65))]
    possible = {sum(a) + sum(b) for a in _draws(first, 4) for b in _draws(last, 4)}
    assert figures["p"]["visible"] in possible
    assert figures["q"]["sampled"] == 4 * (lengths[0] + lengths[2]) * 32


def _draws(values, count):
    return [[values[0]] * n + [values[1]] * (count - n) for n in range(1, count)]


def test_rows_and_heads_are_all_reached():
    from flash_attn_mx import _statistics

    samples = [_statistics.choose(2, 6, 3, 200, 0.2, turn) for turn in range(84)]
    assert {s.rows.start for s in samples} == set(range(0, 200, 32))
    assert {(b, h) for s in samples for b, h in zip(s.batches, s.heads_k)} == {
        (b, h) for b in range(2) for h in range(3)
    }
    assert all(h // 2 == hk for s in samples for h, hk in zip(s.heads, s.heads_k))
    assert {h for s in samples for h in s.heads} == set(range(6))


def test_empty_and_prequantised_operands():
    q, k, v = qkv()
    mx = [
        famx.quantize_mxfp8(x, axis) for x, axis in ((q, "rowwise"), (k, "rowwise"), (v, "colwise"))
    ]
    with famx.monitor() as seen:
        famx.flash_attn_func(q[:, :0], k, v)
        famx.flash_attn_func(q[:0], k[:0], v[:0])
        famx.flash_attn_mx_func(*mx)
    layers = seen.as_dict()["layers"]
    assert layers["call 0"]["q"]["elements"] == 0 and layers["call 0"]["k"]["elements"] == k.numel()
    assert set(layers["call 2"]) == {"calls", "backward_calls", "p"}


# --- layers ---------------------------------------------------------------------------------------------------


class Attention(torch.nn.Module):
    def __init__(self, gain=1.0):
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)
        self.gain = gain

    def forward(self, x):
        q, k, v = (self.qkv(x) * self.gain).unflatten(-1, (3, 2, 16)).unbind(-3)
        return x + famx.flash_attn_func(q, k, v, causal=True).flatten(-2)


class Model(torch.nn.Module):
    def __init__(self, gains=(1.0, 1.0)):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Attention(gain) for gain in gains)

    def forward(self, x, checkpoint=False):
        for block in self.blocks:
            if checkpoint:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x


def test_layers_have_the_names_of_their_modules_in_both_directions():
    model, x = Model((1.0, 8.0)), normal(1, 40, 32)
    with famx.monitor(model, sample=1.0) as seen:
        for _ in range(2):
            model(x).sum().backward()
    layers = seen.as_dict()["layers"]
    assert list(layers) == ["blocks.0", "blocks.1"]
    assert all((f["calls"], f["backward_calls"]) == (2, 2) for f in layers.values())
    assert layers["blocks.1"]["q"]["amax"] > 4 * layers["blocks.0"]["q"]["amax"]
    # The last layer's incoming gradient is the ones of sum().
    assert layers["blocks.1"]["dout"]["amax"] == 1 != layers["blocks.0"]["dout"]["amax"]
    assert not any(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_recomputed_forward_counts_as_a_call_of_the_same_layer():
    model, x = Model(), normal(1, 40, 32)
    with famx.monitor(model) as seen:
        model(x, checkpoint=True).sum().backward()
    layers = seen.as_dict()["layers"]
    assert {n: (f["calls"], f["backward_calls"]) for n, f in layers.items()} == {
        "blocks.0": (2, 1), "blocks.1": (2, 1)
    }  # fmt: skip


def test_call_says_its_layer_or_has_its_index():
    q, k, v = qkv()
    with famx.monitor() as seen:
        for _ in range(2):
            famx.flash_attn_func(q, k, v, layer="decoder.3")
            famx.flash_attn_func(q, k, v)
            seen.step()
    assert list(seen.as_dict()["layers"]) == ["decoder.3", "call 1"]
    assert seen.as_dict()["steps"] == 2


def test_compiled_graph_is_seen_and_not_retraced():
    model, x = Model(), normal(1, 40, 32)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    plain = compiled(x)
    plain.sum().backward()
    wanted = model.blocks[0].qkv.weight.grad.clone()
    model.zero_grad()
    with famx.monitor(sample=1.0) as seen:
        out = compiled(x)
        out.sum().backward()
    assert counter.frame_count == 1
    layers = seen.as_dict()["layers"]
    assert list(layers) == ["call 0", "call 1"]
    assert layers["call 1"]["dout"]["amax"] == 1 and layers["call 0"]["backward_calls"] == 1
    assert layers["call 0"]["q"]["sampled"] == 40 * 32 and "ds" in layers["call 0"]
    assert_equal_bits(out, plain)
    assert_equal_bits(model.blocks[0].qkv.weight.grad, wanted)


def test_monitor_changes_no_bit_and_leaves_nothing_behind(monkeypatch):
    q, k, v = qkv(grad=True)

    def run():
        out = famx.flash_attn_func(q, k, v, causal=True)
        return out, *torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    before = run()
    with famx.monitor() as seen:
        during = run()
    calls = seen.as_dict()["layers"]["call 0"]["calls"]
    monkeypatch.setattr(famx.monitor, "_saw_quantize", lambda *a: pytest.fail("still watching"))
    after = run()
    for a, b, c in zip(before, during, after):
        assert_equal_bits(b, a)
        assert_equal_bits(c, a)
    assert ops.observer is None and seen.as_dict()["layers"]["call 0"]["calls"] == calls == 1


# --- limits ---------------------------------------------------------------------------------------------------


def test_limit_sends_the_layer_that_is_beyond_it_to_high_precision_with_one_notice():
    model, x = Model((1.0, 1.0, 12.0)), normal(1, 40, 32)
    famx.set_fallback("warn")
    dispatch._warned.update({"device", "capability"})
    limits = famx.Limits(p_flushed=0.3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with famx.monitor(model, limits=limits, sample=1.0) as seen:
            for _ in range(3):
                model(x)
                seen.step()
    figures = seen.as_dict()
    assert list(figures["kept"]) == ["blocks.2"]
    assert [f["calls"] for f in figures["layers"].values()] == [3, 3, 1]
    assert [rule.layer for rule in famx.get_policy().layers] == ["blocks.2"]
    assert len(caught) == 1 and "blocks.2" in str(caught[0].message)
    assert issubclass(caught[0].category, famx.FallbackWarning)
    assert "p_flushed of p" in str(caught[0].message)


def test_limit_on_a_call_without_a_layer_is_told_but_cannot_act():
    q, k, v = qkv()
    q[0, 0, 0, 0] = math.nan
    famx.set_fallback("warn")
    dispatch._warned.update({"device", "capability"})
    with famx.monitor(limits=famx.Limits(nonfinite=True)) as seen:
        famx.flash_attn_func(q, k, v)
        with pytest.warns(famx.FallbackWarning, match="do not say their layer"):
            seen.step()
    assert not famx.get_policy().layers and list(seen.kept) == ["call 0"]


def test_limit_raises_where_fallback_is_forbidden():
    model = Model((12.0,))
    with famx.monitor(model, limits=famx.Limits(p_flushed=0.3), sample=1.0) as seen:
        model(normal(1, 40, 32))
        famx.set_fallback("error")
        with pytest.raises(RuntimeError, match="blocks.0"):
            seen.step()


# --- exports, errors ------------------------------------------------------------------------------------------


def test_exports_agree(tmp_path):
    q, k, v = qkv(grad=True)
    with torch.no_grad():
        k[0, 0, 0, 0] = math.inf
    with famx.monitor() as seen:
        famx.flash_attn_func(q, k, v, layer="a.b").sum().backward()
    seen.to_json(tmp_path / "m.json")
    text = (tmp_path / "m.json").read_text()
    body = json.loads(text, parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))
    assert body["layers"]["a.b"]["k"]["amax"] == "inf"
    assert body["layers"]["a.b"]["q"] == seen.as_dict()["layers"]["a.b"]["q"]

    class Writer:
        scalars = {}

        def add_scalar(self, tag, value, step):
            self.scalars[tag] = (value, step)

    seen.to_tensorboard(Writer(), 17)
    amax = seen.as_dict()["layers"]["a.b"]["q"]["amax"]
    assert Writer.scalars["flash_attn_mx/a.b/q/amax"] == (amax, 17)
    assert "flash_attn_mx/a.b/ds/flushed_share" in Writer.scalars


@pytest.mark.parametrize(
    "options,error,name",
    [
        ({"model": 3}, TypeError, "model"),
        ({"sample": 0}, ValueError, "sample"),
        ({"sample": True}, ValueError, "sample"),
        ({"limits": {"ds_flushed": 1}}, TypeError, "limits"),
    ],
)
def test_bad_argument_is_named(options, error, name):
    with pytest.raises(error, match=name):
        famx.monitor(**options)


def test_bad_limit_and_second_monitor_are_refused():
    with pytest.raises(ValueError, match="ds_flushed"):
        famx.Limits(ds_flushed=2)
    with pytest.raises(TypeError, match="nonfinite"):
        famx.Limits(nonfinite=1)
    with famx.monitor():
        with pytest.raises(RuntimeError, match="another monitor"):
            famx.monitor().__enter__()
    with pytest.raises(TypeError, match="writer"):
        famx.monitor().to_tensorboard(None)


@pytest.mark.skipif(bool(sm100.WHY_NO_EMULATOR) or not sm100.INSTANCES, reason="needs the emulator")
@pytest.mark.parametrize("packed", [False, True])
def test_kernels_backends_give_the_figures_of_the_portable_path(packed):
    """Their operands carry scales in the order of the MMA."""
    q, k, v = qkv(dim=64)
    cu = torch.tensor([0, 70, 70, 140], dtype=torch.int32)

    def call(backend):
        if not packed:
            return famx.flash_attn_func(q, k, v, causal=True, backend=backend)
        flat = (x.flatten(0, 1) for x in (q, k, v))
        return famx.flash_attn_varlen_func(*flat, cu, cu, 70, 70, causal=True, backend=backend)

    assert seen_of(lambda: call("emulator")) == seen_of(lambda: call("portable"))
