"""quantize_mxfp8, dequantize, MXTensor: docs/numerics.md section 1, C++ and PyTorch path."""

import itertools
from fractions import Fraction

import pytest
import torch

import flash_attn_mx as famx
from flash_attn_mx import _native
from flash_attn_mx.quantize import encode_scale, quantize_pytorch, scale_shape

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
AXES = ("rowwise", "colwise", "tokenwise")
RULES = list(itertools.product(("rceil", "floor"), (E4M3, E5M2)))
# format: exponent of the largest value, mantissa bits, smallest normal exponent
FORMATS = {E4M3: (8, 3, -6), E5M2: (15, 2, -14)}

needs_native = pytest.mark.skipif(
    not _native.load(), reason="the C++ operator is not built: there is nothing to compare"
)


def native(x, axis, rounding="rceil", dtype=E4M3, cu_seqlens=None):
    return torch.ops.flash_attn_mx.quantize(x, axis, rounding, dtype, cu_seqlens)


def raw(t):
    return t.view(torch.uint8)


def oracle(blocks, rounding, dtype):
    """Scale bytes and payload values of blocks (n, values), in float64 with frexp: no bit tricks."""
    emax, mantissa, emin = FORMATS[dtype]
    largest = 1.75 * 2.0**emax
    x = blocks.double()
    amax = x.abs().amax(1)
    finite = amax.isfinite()
    safe = amax.where(finite & (amax > 0), 1.0)
    if rounding == "floor":
        byte = safe.frexp().exponent - 1 - emax + 127
    else:
        fraction, exponent = (safe / largest).frexp()  # in [0.5, 1): a power of two has 0.5
        byte = exponent - (fraction == 0.5).int() + 127
    byte = byte.clamp(0, 254).where(amax != 0, 127).where(finite, 255)
    y = x * torch.exp2(127.0 - byte.double())[:, None]
    step = torch.exp2((y.abs().frexp().exponent - 1).clamp_min(emin).double() - mantissa)
    value = (y / step).round() * step  # round is to nearest, ties to even
    return byte, value.clamp(-largest, largest)


def as_blocks(t, axis):
    """(rows, cols) of whole blocks -> (blocks, values)."""
    if axis == "colwise":
        t = t.T
    return t.reshape(-1, t.shape[1] if axis == "tokenwise" else 32)


def hard_values(rows, cols, seed):
    """Random fp32 bit patterns and normal data at scales from subnormal to the largest exponent."""
    g = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (rows, cols), generator=g, dtype=torch.int64)
    x = bits.int().view(torch.float32).clone()
    scale = torch.exp2(torch.randint(-150, 127, (rows, 1), generator=g).float())
    x[rows // 4 :] = (torch.randn(rows, cols, generator=g) * scale)[rows // 4 :]
    x[rows // 2 : rows // 2 + 32] = 0.0
    x[-1] = -0.0
    return x


@pytest.mark.parametrize("rounding,dtype", RULES)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("path", ["native", "pytorch"])
def test_quantize_against_float64_oracle(path, axis, rounding, dtype):
    """Every scale byte and payload of both paths equals an oracle that shares no code with them."""
    function = native if path == "native" else quantize_pytorch
    x = hard_values(256, 256, seed=1)
    data, scale = function(x, axis, rounding, dtype)
    byte, value = oracle(as_blocks(x, axis), rounding, dtype)
    got = as_blocks(data.float(), axis)
    scale = raw(scale.T if axis == "colwise" else scale).flatten()
    assert torch.equal(scale.int(), byte.int())
    nan = byte == 255
    assert torch.equal(got[~nan].double(), value[~nan])
    assert (as_blocks(raw(data), axis)[nan] == (0 if axis == "tokenwise" else 0x7F)).all()
    assert 0 < nan.sum() < nan.numel()


@needs_native
@pytest.mark.parametrize("rounding,dtype", RULES)
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
def test_native_equals_pytorch_for_every_16_bit_pattern(source, axis, rounding, dtype):
    """All 65536 values, alone and beside a value that sets the scale."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(source)
    inputs = [every.view(2048, 32), every.view(32, 2048), every.view(-1, 1)]
    finite = every.where(every.isfinite(), 0.0)
    for largest in (2e-7, 1e-3, 1.0, 300.0, 6e4):
        pair = torch.full((65536, 2), largest, dtype=source)
        pair[:, 0] = finite.clamp(-largest, largest)
        inputs.append(pair if axis != "colwise" else pair.T.contiguous())
    for x in inputs:
        assert_same(native(x, axis, rounding, dtype), quantize_pytorch(x, axis, rounding, dtype))


def assert_same(got, want):
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        assert torch.equal(raw(a), raw(b))


@needs_native
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_native_equals_pytorch_for_any_strides(source, axis):
    """Transposed, sliced, expanded, empty and ragged inputs, read in place or copied."""
    x = hard_values(2 * 70, 3 * 100, seed=2).to(source)
    dense = x.view(2, 70, 3, 100)
    inputs = [
        dense,
        dense.transpose(1, 2),
        dense[:, ::3],
        dense[..., 5:38],
        dense[..., ::2],
        dense.transpose(1, 3),
        dense[:, :, :1].expand(2, 70, 4, 100),
        dense[:1].transpose(0, 1),
        x,
        x.T,
        x[3:, 7:],
        dense[0],
        dense.flip(1),
        *(torch.zeros(s, dtype=source) for s in [(0, 4, 2, 8), (2, 0, 2, 8), (2, 4, 0, 8), (2, 4, 2, 0)]),
        *(torch.zeros(s, dtype=source) for s in [(0, 5), (5, 0), (0, 3, 5), (3, 0, 5), (1, 1, 1, 1)]),
    ]  # fmt: skip
    for x in inputs:
        assert_same(native(x, axis), quantize_pytorch(x, axis))
        assert native(x, axis)[1].shape == scale_shape(x.shape, axis)


@needs_native
@pytest.mark.parametrize("axis", AXES)
def test_native_in_several_threads(axis):
    """Rows and blocks are divided among threads; heads that do not divide evenly."""
    x = torch.randn(3, 333, 5, 96)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        got = native(x, axis)
    finally:
        torch.set_num_threads(before)
    assert_same(got, quantize_pytorch(x, axis))


CU_SEQLENS = [[0, 5, 5, 70, 101, 101], [0, 103], [0, 32, 64, 96], [0, 1, 2, 3, 103], [0, 0], [0]]


@pytest.mark.parametrize("cu", CU_SEQLENS, ids=str)
@pytest.mark.parametrize("path", ["native", "pytorch"])
def test_packed_colwise_equals_each_sequence_alone(path, cu):
    """Blocks end with their sequence and start at row cu[b]//32 + b; unused rows hold 127."""
    function = native if path == "native" else quantize_pytorch
    x = torch.randn(3, 103, 40).transpose(0, 1)
    data, scale = function(x, "colwise", cu_seqlens=torch.tensor(cu, dtype=torch.int32))
    want_scale = torch.full((103 // 32 + len(cu) - 1, 3, 40), 127, dtype=torch.uint8)
    want_data = torch.zeros(103, 3, 40, dtype=torch.uint8)
    for b, (start, end) in enumerate(itertools.pairwise(cu)):
        part, part_scale = quantize_pytorch(x[start:end], "colwise")
        want_data[start:end] = raw(part)
        row = start // 32 + b
        want_scale[row : row + part_scale.shape[0]] = raw(part_scale)
    assert torch.equal(raw(data), want_data)
    assert torch.equal(raw(scale), want_scale)


@pytest.mark.parametrize("cu", CU_SEQLENS, ids=str)
def test_packed_colwise_dequantises_per_sequence(cu):
    x = torch.randn(103, 3, 40)
    got = famx.quantize_mxfp8(x, "colwise", cu_seqlens=torch.tensor(cu, dtype=torch.int32))
    want = torch.zeros(103, 3, 40)
    for start, end in itertools.pairwise(cu):
        want[start:end] = famx.quantize_mxfp8(x[start:end], "colwise").dequantize()
    assert torch.equal(got.dequantize(), want)


def test_packed_rowwise_needs_no_sequences():
    x, cu = torch.randn(70, 2, 40), torch.tensor([0, 20, 70], dtype=torch.int32)
    got, want = famx.quantize_mxfp8(x, cu_seqlens=cu), famx.quantize_mxfp8(x)
    assert_same((got.data, got.scale), (want.data, want.scale))
    assert got.cu_seqlens is None


@pytest.mark.parametrize("axis", AXES)
def test_pytorch_path_never_waits_for_the_device(axis):
    """On meta tensors anything that looks at a value raises."""
    x = torch.empty(70, 2, 40, device="meta")
    cu = torch.empty(4, dtype=torch.int32, device="meta")
    data, scale = quantize_pytorch(x, axis, "rceil", E4M3, cu)
    assert data.shape == x.shape and scale.shape == scale_shape(x.shape, axis, cu)


def exact_value(byte, dtype):
    """Value of an FP8 byte as a Fraction, or None for NaN, or an infinity as float."""
    emax, mantissa, emin = FORMATS[dtype]
    sign = -1 if byte & 0x80 else 1
    field, fraction = (byte & 0x7F) >> mantissa, byte & (2**mantissa - 1)
    if dtype == E4M3 and byte & 0x7F == 0x7F:
        return None
    if dtype == E5M2 and field == 31:
        return None if fraction else sign * float("inf")
    if field == 0:
        return sign * Fraction(fraction, 2**mantissa) * Fraction(2) ** emin
    return sign * (1 + Fraction(fraction, 2**mantissa)) * Fraction(2) ** (field - 1 + emin)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_dequantize_every_pair_of_bytes(dtype):
    """65536 (data, scale) pairs against exact fractions; only products beyond fp32 become Inf."""
    byte = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    data, scale = torch.meshgrid(byte, byte, indexing="ij")
    mx = famx.MXTensor(
        data.reshape(-1, 1).contiguous().view(dtype),
        scale.reshape(-1, 1).contiguous().view(torch.float8_e8m0fnu),
        "tokenwise",
    )
    values = [exact_value(b, dtype) for b in range(256)]
    want = torch.empty(256, 256, dtype=torch.float64)
    for d, s in itertools.product(range(256), range(256)):
        if values[d] is None or s == 255:
            want[d, s] = float("nan")
        elif isinstance(values[d], float):
            want[d, s] = values[d]
        else:
            magnitude = float(abs(values[d]) * Fraction(2) ** (s - 127))
            want[d, s] = -magnitude if d & 0x80 else magnitude
    torch.testing.assert_close(
        mx.dequantize(torch.float64).view(256, 256), want, rtol=0, atol=0, equal_nan=True
    )
    got = mx.dequantize().view(256, 256)
    torch.testing.assert_close(got, want.float(), rtol=0, atol=0, equal_nan=True)
    fits = want.isfinite() & (want.abs() <= torch.finfo(torch.float32).max)
    assert torch.equal(got[fits].double(), want[fits])
    assert torch.equal(got.signbit()[fits], want.signbit()[fits])  # -0.0 too


@pytest.mark.parametrize("axis", AXES)
def test_dequantize_error_is_half_a_step(axis):
    """Values in the normal range of their block come back within 2^-4."""
    x = torch.rand(2, 70, 3, 40) + 0.5
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got = famx.quantize_mxfp8(x.to(dtype), axis).dequantize(dtype)
        assert got.dtype == dtype and got.shape == x.shape
        assert ((got.double() - x).abs() <= x * 2**-3.9).all()


def test_encode_scale_is_the_smallest_power_of_two():
    """RCEIL keeps the maximum in range and the next smaller scale would not."""
    amax = hard_values(64, 64, 3).abs().flatten()
    amax = amax[amax.isfinite() & (amax > 2.0**-110)]
    scale = torch.exp2(encode_scale(amax).double() - 127)
    assert (amax.double() <= 448 * scale).all() and (amax.double() > 224 * scale).all()


def test_mxtensor_repr_states_layout_and_hides_data():
    x = torch.full((1, 40, 2, 64), 123.0)
    text = repr(famx.quantize_mxfp8(x, layout="swizzled128x4"))
    assert text == (
        "MXTensor(shape=(1, 40, 2, 64), dtype=torch.float8_e4m3fn, axis='rowwise', "
        "scale=(1, 2, 512) swizzled128x4, device=cpu)"
    )


def test_mxtensor_is_frozen_and_keeps_its_inputs():
    mx = famx.quantize_mxfp8(torch.randn(4, 64))
    with pytest.raises(AttributeError):
        mx.data = mx.data
    again = famx.MXTensor.from_parts(raw(mx.data), raw(mx.scale), "rowwise")
    assert again.data.data_ptr() == mx.data.data_ptr() and again.dtype == E4M3
    assert again.shape == (4, 64) and again.device == mx.device


def test_mxtensor_in_inference_mode_and_out_of_it():
    with torch.inference_mode():
        mx = famx.quantize_mxfp8(torch.ones(2, 32))
    assert torch.equal(mx.dequantize(), torch.ones(2, 32))


BAD_INPUT = [
    (dict(x=torch.zeros(2, 3).double()), TypeError, "x: expected fp32, bf16 or fp16, got torch.float64"),
    (dict(x=torch.zeros(2, 3).int()), TypeError, "x: expected fp32"),
    (dict(x=[1.0]), TypeError, "x: expected a tensor, got list"),
    (dict(x=torch.zeros(3)), ValueError, r"x: expected \(B,S,H,D\).*got shape \(3,\)"),
    (dict(axis="row"), ValueError, "axis: expected one of 'rowwise', 'colwise', 'tokenwise', got 'row'"),
    (dict(rounding="ceil"), ValueError, "rounding: expected one of 'rceil', 'floor', got 'ceil'"),
    (dict(layout="tiled"), ValueError, "layout: expected one of 'plain', 'swizzled128x4', got 'tiled'"),
    (dict(dtype=torch.int8), TypeError, "dtype: expected float8_e4m3fn or float8_e5m2, got torch.int8"),
    (dict(axis="tokenwise", layout="swizzled128x4"), ValueError, "layout: expected 'plain' for a tokenwise"),
    (dict(cu_seqlens=[0, 2]), TypeError, "cu_seqlens: expected an int32 tensor, got list"),
    (dict(cu_seqlens=torch.tensor([0, 4])), TypeError, "cu_seqlens: expected an int32 tensor, got torch.int64"),
    (dict(cu_seqlens=torch.tensor([0, 4]).int(), x=torch.zeros(4, 3)), ValueError, "cu_seqlens: expected None"),
    (dict(cu_seqlens=torch.tensor([1, 4]).int()), ValueError, "cu_seqlens: expected values rising from 0"),
    (dict(cu_seqlens=torch.tensor([0, 3, 2]).int()), ValueError, "cu_seqlens: expected values rising from 0"),
    (dict(cu_seqlens=torch.tensor([0, 5]).int()), ValueError, "at most T=4, got 0..5"),
    (dict(x=torch.zeros(4, 2, 8, requires_grad=True)), ValueError, "x: expected a tensor without gradient"),
]  # fmt: skip


@pytest.mark.parametrize("change,error,message", BAD_INPUT, ids=[m[2][:40] for m in BAD_INPUT])
def test_quantize_bad_input_raises(change, error, message):
    with pytest.raises(error, match=message):
        famx.quantize_mxfp8(**{"x": torch.zeros(4, 2, 8), **change})


@needs_native
@pytest.mark.parametrize("cu", [[1, 4], [0, 3, 2], [0, 5], [0, -1, 4]], ids=str)
def test_native_refuses_bad_cu_seqlens_raises(cu):
    """The operator itself never reads outside x, even when called without the Python checks."""
    with pytest.raises(RuntimeError, match="cu_seqlens: expected values rising from 0"):
        native(torch.zeros(4, 2, 8), "colwise", cu_seqlens=torch.tensor(cu, dtype=torch.int32))


@needs_native
@pytest.mark.parametrize(
    "args,message",
    [
        ((torch.zeros(2, 3).double(), "rowwise"), "x: expected fp32"),
        ((torch.zeros(3), "rowwise"), "x: expected 2, 3 or 4 dimensions"),
        ((torch.zeros(2, 3), "row"), "axis: expected"),
        ((torch.zeros(2, 3), "rowwise", "ceil"), "rounding: expected"),
        ((torch.zeros(2, 3), "rowwise", "rceil", torch.int8), "dtype: expected"),
    ],
)
def test_native_bad_input_raises(args, message):
    with pytest.raises(RuntimeError, match=message):
        native(*args)
