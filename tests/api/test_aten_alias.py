"""torch.ops.aten.flash_attn_mxfp8_forward after register_aten_alias()."""

import subprocess
import sys

import compare
import pytest
import torch

import flash_attn_mx as famx


@pytest.fixture(autouse=True)
def alias():
    famx.register_aten_alias()
    famx.register_aten_alias()
    return torch.ops.aten.flash_attn_mxfp8_forward


def operands(seqlen_q=40, seqlen_k=70, heads=4, heads_k=2, head_dim=64, dtype=torch.float8_e4m3fn):
    torch.manual_seed(0)
    shapes = [(2, seqlen_q, heads, head_dim)] + [(2, seqlen_k, heads_k, head_dim)] * 2
    quantised = [famx.quantize_mxfp8(torch.randn(s), dtype=dtype) for s in shapes]
    return [mx.data for mx in quantised], [mx.scale for mx in quantised], quantised


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 72, 128])
def test_alias_is_flash_attn_mx_func(alias, device, head_dim, causal):
    """Same bits as the function on MXTensors whose V is rowwise; close to V quantised once along the keys."""
    data, scales, mx = operands(head_dim=head_dim)
    out = alias(*data, *scales, softmax_scale=0.2, causal=causal)
    want = famx.flash_attn_mx_func(*mx, 0.2, causal)
    assert out.dtype == torch.bfloat16
    compare.assert_equal_bits(out, want)
    compare.assert_equal_bits(alias(*data, *scales, 0.2, causal), want)
    once = famx.flash_attn_func(*(famx.dequantize(x) for x in mx), 0.2, causal)
    compare.assert_close(out, once, frobenius=0.03)  # V's second rounding: 2^-4/sqrt(12) at most
    assert not torch.equal(alias(*data, *scales, causal=causal), want)


def test_alias_e5m2(alias, device):
    """E5M2 payloads are taken too, on the portable path."""
    if famx.get_backend() == "emulator":
        pytest.skip("no sm_100 kernel takes E5M2")
    data, scales, mx = operands(dtype=torch.float8_e5m2)
    compare.assert_equal_bits(alias(*data, *scales), famx.flash_attn_mx_func(*mx))


def test_alias_compiles_and_knows_its_shape(alias, device):
    """Under torch.compile without graph break; the meta kernel promises the real shape, dtype and strides."""
    data, scales, _ = operands()
    compiled = torch.compile(lambda *x: alias(*x, causal=True), fullgraph=True, backend="aot_eager")
    want = alias(*data, *scales, causal=True)
    compare.assert_equal_bits(compiled(*data, *scales), want)
    meta = alias(*(x.to("meta") for x in (*data, *scales)))
    assert (meta.shape, meta.dtype, meta.stride()) == (want.shape, want.dtype, want.stride())


BAD = {
    "bf16 data": (TypeError, "q: expected float8.*bfloat16", lambda d, s: d.__setitem__(0, d[0].bfloat16())),
    "fp32 scale": (TypeError, "scale_k: expected float8_e8m0fnu.*float32", lambda d, s: s.__setitem__(1, s[1].float())),
    "colwise scale": (ValueError, r"scale_v: expected shape \(2, 70, 2, 2\)", lambda d, s: s.__setitem__(2, s[2][:, :3].repeat(1, 1, 1, 32))),
    "value length": (ValueError, "v: expected the batch and length of k", lambda d, s: (d.__setitem__(2, d[2][:, :9]), s.__setitem__(2, s[2][:, :9]))),
    "three dimensions": (ValueError, "q: expected 4 dimensions", lambda d, s: d.__setitem__(0, d[0][0])),
    "another device": (ValueError, "scale_k: expected the device of q", lambda d, s: s.__setitem__(1, s[1].to("meta"))),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_alias_bad_input_raises(alias, case):
    """Each error names the argument, what was expected and what came; the meta kernel raises the same."""
    error, text, spoil = BAD[case]
    data, scales, _ = operands()
    spoil(data, scales)
    with pytest.raises(error, match=text):
        alias(*data, *scales)
    if case != "another device":
        with pytest.raises(error, match=text):
            alias(*(x.to("meta") for x in (*data, *scales)))


def test_alias_heads_and_gradients_raise(alias):
    """Heads that do not divide, a non-finite scale, and data that wants a gradient."""
    data, scales, _ = operands(heads=3)
    with pytest.raises(ValueError, match="q: expected heads divisible"):
        alias(*data, *scales)
    data, scales, _ = operands()
    with pytest.raises(ValueError, match="softmax_scale: expected a finite number"):
        alias(*data, *scales, softmax_scale=float("nan"))
    data[1].requires_grad_()
    with pytest.raises(ValueError, match="k: expected data that needs no gradient"):
        alias(*data, *scales)
    with torch.no_grad():
        alias(*data, *scales)


def test_alias_exists_only_after_registration():
    """Importing the package defines nothing in torch's namespace; a foreign operator of that name is not replaced."""
    code = """
import torch, flash_attn_mx as famx
assert not hasattr(torch.ops.aten, "flash_attn_mxfp8_forward")
other = torch.library.Library("aten", "FRAGMENT")
other.define("flash_attn_mxfp8_forward(Tensor q) -> Tensor")
try:
    famx.register_aten_alias()
except RuntimeError as error:
    print(error)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "exists already" in run.stdout, run.stderr
