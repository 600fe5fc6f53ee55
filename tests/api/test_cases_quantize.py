"""Cases of wrong quantisation seen elsewhere: scale rules, zero and NaN blocks, layouts.

Each test has the number of its case. C50 is in test_cases_numerics.py, C58 needs a kernel.
"""

import math

import pytest
import torch
from problems import Problem, attend, attend_packed, normal_problem, uniform_problem

import flash_attn_mx as famx
from flash_attn_mx.layouts import from_swizzled128x4, swizzled_bytes, to_swizzled128x4
from flash_attn_mx.quantize import quantize_pytorch

NAN = float("nan")
E4M3 = torch.float8_e4m3fn


def operator(x, axis="rowwise", rounding="rceil", dtype=E4M3):
    return torch.ops.flash_attn_mx.quantize(x, axis, rounding, dtype, None)


# the registered operator (C++ on CPU where built) and the PyTorch path of every other device
PATHS = [pytest.param(operator, id="operator"), pytest.param(quantize_pytorch, id="pytorch")]


def raw(t):
    return t.view(torch.uint8)


def block_with(value, others=1.0):
    """One block of 32: value, then others."""
    x = torch.full((1, 32), others)
    x[0, 0] = value
    return x


# ---- scale rules -------------------------------------------------------------------------------

AMAX = [150.0, 224.0, 225.0, 448.0, 449.0, 500.0, 512.0]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "rounding,expected",
    [
        ("rceil", [126, 126, 127, 127, 128, 128, 128]),
        ("floor", [126, 126, 126, 127, 127, 127, 128]),
    ],
)
def test_c51_scale_rules_give_these_bytes(path, rounding, expected):
    """C51: the rule is explicit and the same on every path; 150 must not give 127 ("ceil")."""
    assert [raw(path(block_with(a), "rowwise", rounding)[1]).item() for a in AMAX] == expected


@pytest.mark.parametrize("rounding,expected", [("rceil", 512.0), ("floor", 448.0)])
def test_c51_block_maximum_saturates_only_with_floor(rounding, expected):
    got = famx.quantize_mxfp8(block_with(500.0), rounding=rounding).dequantize()
    assert got[0, 0].item() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_c51_rceil_is_the_default_for_every_dtype(dtype):
    assert raw(famx.quantize_mxfp8(block_with(225.0).to(dtype)).scale).item() == 127


# ---- zero blocks -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("axis", ["rowwise", "colwise", "tokenwise"])
def test_c52_zero_block_is_finite(path, axis):
    """C52: no 0/0, no log2(0): payload 0, byte 127; the block beside it keeps its own scale."""
    x = torch.zeros(64, 2, 64)
    x[32:, :, 32:] = 3.0
    data, scale = path(x, axis)
    assert (raw(data)[:32] == 0).all() and (raw(data)[:, :, :32] == 0).all()
    assert set(raw(scale).unique().tolist()) == {120, 127}


@pytest.mark.parametrize("zero", ["q-row", "k"])
def test_c52_attention_with_zero_operands(device, zero):
    """C52: uniform softmax: O = mean of V, LSE = ln(Sk), every gradient finite."""
    p = normal_problem(2, 2, head_dim=64, device=device)
    v = torch.tensor([1.0, 3.0], device=device).view(1, 2, 1, 1).expand_as(p.v).contiguous()
    q, k = p.q.clone(), p.k.clone()
    (q[0, 0] if zero == "q-row" else k).zero_()
    result = attend(Problem(q, k, v, p.dout))
    rows = slice(0, 1) if zero == "q-row" else slice(None)
    assert torch.equal(result.out[:, rows], torch.full_like(result.out[:, rows], 2.0))
    lse = result.lse[..., rows]
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(2)), rtol=0, atol=1e-6)
    for grad in result[2:5]:
        assert grad.isfinite().all()


def test_c52_zero_block_beside_another(device):
    """C52: a zero 32-block in q adds nothing to the logits."""
    p = normal_problem(5, 40, head_dim=64, device=device)
    p.q[..., :32] = 0
    result = attend(p)
    other = attend(p._replace(k=torch.cat([p.k[..., :32] * 7, p.k[..., 32:]], -1)))
    assert torch.equal(result.out, other.out) and torch.equal(result.lse, other.lse)
    for grad in result[2:5]:
        assert grad.isfinite().all()


# ---- ends of the range -------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("axis", ["rowwise", "tokenwise"])
def test_c53_bottom_of_the_range_keeps_its_factor(path, axis):
    """C53: byte 0 is 2^-127 both ways, not 2^-126 one way."""
    data, scale = path(torch.full((1, 32), 1e-38), axis)
    assert raw(scale).item() == 0
    got = famx.MXTensor(data, scale, axis).dequantize()
    assert torch.equal(got, torch.full((1, 32), 1.75 * 2.0**-127))
    assert abs(got[0, 0].item() / 1e-38 - 1) < 0.0625


def ones_under(*scale_bytes):
    scale = torch.tensor(scale_bytes, dtype=torch.uint8).view(-1, 1)
    return famx.MXTensor.from_parts(torch.full_like(scale, 0x38), scale, "tokenwise")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compile"])
def test_c54_scale_bytes_at_both_ends(compiled):
    """C54: byte 0 is not 0.0 and byte 255 is NaN, not Inf, under torch.compile too."""
    function = torch.compile(famx.dequantize, fullgraph=True) if compiled else famx.dequantize
    got = function(ones_under(0, 1, 127, 254, 255)).flatten()
    want = torch.tensor([2.0**-127, 2.0**-126, 1.0, 2.0**127, NAN])
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_c54_scale_byte_255_in_attention(device):
    """C54: the portable path decodes the same: a poisoned query is NaN, the other is not."""
    p = normal_problem(2, 2, head_dim=64, device=device)
    q, k, v = (famx.quantize_mxfp8(t) for t in p[:3])
    scale = raw(q.scale).clone()
    scale[0, 0, 0, 1] = 255
    out = famx.flash_attn_mx_func(famx.MXTensor.from_parts(q.data, scale, "rowwise"), k, v)
    assert out[0, 0].isnan().all() and out[0, 1].isfinite().all()


# ---- NaN, saturation, negative zero ------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bad", [NAN, -NAN, float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("axis", ["rowwise", "colwise"])
def test_c55_nan_poisons_its_block_only(path, axis, bad):
    x = torch.ones(64, 2, 64)
    x[3, 0, 5] = bad
    data, scale = path(x, axis)
    poisoned = famx.MXTensor(data, scale, axis).dequantize().isnan()
    want = torch.zeros_like(poisoned)
    want[(3, 0, slice(0, 32)) if axis == "rowwise" else (slice(0, 32), 0, 5)] = True
    assert torch.equal(poisoned, want)
    assert (raw(scale) == 255).sum() == 1 and (raw(data)[want] == 0x7F).all()


@pytest.mark.parametrize("path", PATHS)
def test_c55_poisoned_token_has_finite_payload(path):
    """C55, C50: tokenwise, the NaN is in the factor alone, so no product sees a masked token's."""
    x = torch.ones(4, 2, 40)
    x[1, 1, 7] = NAN
    data, scale = path(x, "tokenwise")
    assert raw(scale)[1, 1, 0] == 255 and (raw(scale) == 255).sum() == 1
    assert data.float().isfinite().all() and (raw(data)[1, 1] == 0).all()


def test_c55_nan_in_q_is_never_lost(device):
    p = normal_problem(2, 2, head_dim=64, device=device)
    clean = attend(p)
    p.q[0, 0, 0, 5] = NAN
    result = attend(p)
    assert result.out[0, 0].isnan().all()
    assert torch.equal(result.out[0, 1], clean.out[0, 1])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype,largest", [(E4M3, 448.0), (torch.float8_e5m2, 57344.0)], ids=str)
@pytest.mark.parametrize("factor", [470 / 448, 511 / 448])
def test_c56_saturates_before_the_cast(path, dtype, largest, factor):
    """C56: torch's cast gave NaN or Inf above the range in some versions; it never gets there."""
    x = torch.tensor([[largest * factor, -largest * factor, *[1.0] * 30]])
    data, scale = path(x, "rowwise", "floor", dtype)
    assert raw(scale).item() == 127
    assert data.float()[0, :2].tolist() == [largest, -largest]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("axis", ["rowwise", "colwise", "tokenwise"])
def test_c57_negative_zero_is_no_nan(path, axis):
    """C57: -0.0 stays -0.0 (0x80), alone and beside the largest value."""
    zeros = torch.full((32, 32), -0.0)
    mixed = zeros.clone()
    mixed.fill_diagonal_(448.0)
    for x in (zeros, mixed):
        data, scale = path(x, axis)
        assert (raw(data)[x == 0] == 0x80).all()
        assert torch.equal(famx.MXTensor(data, scale, axis).dequantize(), x)


# ---- layouts -----------------------------------------------------------------------------------


def test_c59_buffer_has_whole_tiles_and_a_short_one_raises():
    """C59: 96x64 has 192 scales in a buffer of 512 bytes."""
    mx = famx.quantize_mxfp8(torch.randn(96, 64))
    assert mx.scale.shape == (96, 2) and swizzled_bytes(96, 2) == 512
    buf = mx.to_layout("swizzled128x4").scale
    assert buf.shape == (512,)
    assert (raw(buf) == 127).sum() >= 512 - 192  # a factor of one; byte 0 would not be zero
    with pytest.raises(ValueError, match=r"at least 512 bytes.*96x2 scales, got shape \(192,\)"):
        from_swizzled128x4(raw(mx.scale).flatten(), 96, 2)
    with pytest.raises(ValueError, match=r"96x2 blocks, 512 bytes.*got \(192,\)"):
        famx.MXTensor.from_parts(mx.data, mx.scale.flatten(), "rowwise", "swizzled128x4")


def test_c60_what_the_quantiser_returns_is_accepted(device):
    """C60: public defaults and compact scales by hand both work; other shapes name both."""
    p = normal_problem(96, head_dim=64, device=device)
    q, k, v = (famx.quantize_mxfp8(t) for t in p[:3])
    out = famx.flash_attn_mx_func(q, k, v)
    by_hand = famx.MXTensor.from_parts(
        q.data.view(96, 64), q.scale.view(96, 2), "rowwise", shape=(1, 96, 1, 64)
    )
    assert torch.equal(famx.flash_attn_mx_func(by_hand, k, v), out)
    swizzled = [t.to_layout("swizzled128x4") for t in (q, k, v)]
    assert torch.equal(famx.flash_attn_mx_func(*swizzled), out)
    with pytest.raises(ValueError, match=r"expected shape \(1, 96, 1, 2\).*got \(96, 2\)"):
        famx.MXTensor.from_parts(q.data, q.scale.view(96, 2), "rowwise")


@pytest.mark.parametrize("rows", [1, 33, 127, 128, 129])
@pytest.mark.parametrize("cols", [1, 2, 4, 5])
def test_c61_layout_round_trip_and_known_places(rows, cols):
    """C61: row 33, block 1 on byte 21 of its tile; row 128, block 0 on byte 512."""
    scale = (torch.arange(rows * cols) % 251).to(torch.uint8).view(rows, cols)
    buf = to_swizzled128x4(scale, padding=255)
    assert buf.numel() == 512 * math.ceil(rows / 128) * math.ceil(cols / 4)
    assert torch.equal(from_swizzled128x4(buf, rows, cols), scale)
    if rows > 33 and cols > 1:
        assert buf[21] == scale[33, 1]
    if rows > 128 and cols <= 4:
        assert buf[512] == scale[128, 0]
    assert (buf == 255).sum() == buf.numel() - rows * cols


# ---- in-place updates, odd sizes ---------------------------------------------------------------


@pytest.mark.parametrize("part", ["data", "scale"])
def test_c62_in_place_update_is_refused(device, part):
    """C62: the other axes' copies would go stale, so every later use raises."""
    zeros = torch.zeros(1, 40, 1, 64, device=device)
    q, k, v = (famx.quantize_mxfp8(zeros) for _ in range(3))
    fresh = famx.quantize_mxfp8(torch.ones_like(zeros) * 3)
    getattr(q, part).copy_(getattr(fresh, part))
    for use in (
        q.dequantize,
        lambda: q.to_layout("swizzled128x4"),
        lambda: famx.flash_attn_mx_func(q, k, v),
    ):
        with pytest.raises(RuntimeError, match="modified in place after quantisation"):
            use()


def test_c62_source_may_change_afterwards(device):
    """C62: the quantised copy does not follow its source, in any axis; gradients neither."""
    p = normal_problem(40, device=device)
    want = attend(p)
    leaves = [t.clone().requires_grad_() for t in p[:3]]
    out = famx.flash_attn_func(*leaves)
    with torch.no_grad():
        for leaf in leaves:
            leaf.zero_()
    out.backward(p.dout)
    for leaf, grad in zip(leaves, want[2:5], strict=True):
        assert torch.equal(leaf.grad, grad)


def test_c63_tokens_that_are_no_multiple_of_32(device):
    """C63: 7984 + 15 packed tokens; padding is visible nowhere."""
    lengths, window = (7984, 15), (64, 0)
    p = normal_problem(sum(lengths), head_dim=16, device=device)
    flat = Problem(*(t[0] for t in p))
    packed = attend_packed(flat, [0, 7984, 7999], causal=True, window_size=window)
    assert packed.out.shape == flat.q.shape and packed.lse.shape == (1, 7999)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone = attend(Problem(*(t[:, part] for t in p)), causal=True, window_size=window)
        assert torch.equal(packed.out[part], alone.out[0])
        for got, want in zip(packed[2:5], alone[2:5], strict=True):
            assert torch.equal(got[part], want[0])
        start += length


@pytest.mark.parametrize("seqlen,head_dim", [(1, 64), (1, 16), (15, 16), (33, 17)], ids=str)
def test_c63_odd_sizes(device, seqlen, head_dim):
    """C63: S = 1 and D = 16 work by padding inside; saved shapes are the logical ones."""
    problem = uniform_problem(seqlen, [2.0] * seqlen, head_dim=head_dim, device=device)
    result = attend(problem)
    assert torch.equal(result.out, torch.full_like(problem.v, 2.0))
    assert result.lse.shape == (1, 1, seqlen)
    for axis in ("rowwise", "colwise", "tokenwise"):
        mx = famx.quantize_mxfp8(problem.v, axis)
        assert mx.shape == problem.v.shape and torch.equal(mx.dequantize(), problem.v)
