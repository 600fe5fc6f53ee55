"""The emulator backend through the public API: values, empty inputs, strides, scale layouts.

Bounds against the portable path: O within 2^-7 of the largest |O| of its row plus the rounding of the output, LSE within
1e-5, relative beyond 1. A payload of P that stands at a rounding boundary may round the other way, one step of 2^-3 of
its key's weight: where one of few keys dominates that is more than 2^-7, so one row in 100 may differ by 2^-4.
"""

import itertools

import pytest
import torch

import flash_attn_mx as famx
from flash_attn_mx import layouts, reference, sm100
from flash_attn_mx.mx_tensor import MXTensor
from flash_attn_mx.quantize import quantize_mxfp8

O_ROW = 2.0**-7
O_FLIP, FLIPPED_ROWS = 2.0**-4, 0.01
LSE = 1e-5
HALF_ULP = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
OPS = torch.ops.flash_attn_mx

pytestmark = pytest.mark.skipif(
    bool(sm100.WHY_NO_EMULATOR or sm100.WHY_NO_HOST),
    reason=sm100.WHY_NO_EMULATOR or sm100.WHY_NO_HOST,
)


def draw(shape_q, shape_k, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(dtype) for s in (shape_q, shape_k, shape_k)]


def assert_near(got, want):
    """(out, lse) of the emulator against those of the portable path."""
    (out, lse), (want_out, want_lse) = got, want
    assert (out.dtype, out.shape, lse.shape) == (want_out.dtype, want_out.shape, want_lse.shape)
    for x in (out, lse):  # what the fake promises
        assert x.stride() == torch.empty(x.shape).stride()
    assert torch.equal(lse.isinf(), want_lse.isinf()) and not lse.isnan().any()
    seen = want_lse.isfinite()
    assert ((lse - want_lse).abs()[seen] <= LSE * want_lse.abs()[seen].clamp(min=1)).all()
    out, want_out = out.double(), want_out.double()
    slack = 2 * HALF_ULP[got[0].dtype]
    row, error = want_out.abs().amax(-1), (out - want_out).abs().amax(-1)
    assert (error <= row * (O_FLIP + slack)).all()
    assert (error > row * (O_ROW + slack)).sum() <= FLIPPED_ROWS * row.numel()


def both(function, *args, **options):
    """The call's (out, lse) by the emulator and by the portable path."""
    return [
        function(*args, return_lse=True, backend=b, **options) for b in ("emulator", "portable")
    ]


# --- the public API ----------------------------------------------------------------------------------------------

DENSE = {
    "d64": ((1, 64, 1, 64), (1, 64, 1, 64), {}),
    "d64-causal-gqa-q130-k257": ((1, 130, 4, 64), (1, 257, 2, 64), {"causal": True}),
    "d128-batch2-q257-k129": ((2, 257, 1, 128), (2, 129, 1, 128), {}),
    "d128-causal-mqa": ((1, 200, 3, 128), (1, 200, 1, 128), {"causal": True}),
    "d72-window": ((1, 140, 2, 72), (1, 200, 2, 72), {"window_size": (60, 5)}),
    "d72-causal-window": (
        (1, 130, 1, 72),
        (1, 130, 1, 72),
        {"window_size": (40, 7), "causal": True},
    ),
    "d5-scale": ((1, 70, 1, 5), (1, 66, 1, 5), {"softmax_scale": -0.7}),
    "no-keys": ((1, 65, 2, 64), (1, 0, 2, 64), {"causal": True}),
    "no-queries": ((1, 0, 2, 64), (1, 64, 2, 64), {}),
    "no-batch": ((0, 64, 2, 64), (0, 64, 2, 64), {}),
    "unseen-rows": ((1, 140, 1, 64), (1, 65, 1, 64), {"causal": True}),
}


@pytest.mark.parametrize("case", DENSE)
def test_dense_equals_portable(case):
    """flash_attn_func(backend="emulator") on every kind of shape and mask, empty ones included."""
    shape_q, shape_k, options = DENSE[case]
    assert_near(*both(famx.flash_attn_func, *draw(shape_q, shape_k), **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_output_has_the_dtype_of_the_input(dtype):
    assert_near(*both(famx.flash_attn_func, *draw((1, 64, 1, 64), (1, 100, 1, 64), dtype)))


PACKED = [
    ([65, 0, 130], [65, 0, 130], 0),
    ([1, 200], [129, 64], 7),
    ([0, 0], [3, 0], 0),
    ([], [], 5),
]


@pytest.mark.parametrize("lengths_q,lengths_k,tail", PACKED, ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_size": (30, 9)}], ids=["full", "causal", "window"]
)
def test_packed_equals_portable(lengths_q, lengths_k, tail, options):
    """Sequences of any length, and tokens that belong to none: O = 0, LSE = -inf there."""
    q, k, v = draw((sum(lengths_q) + tail, 4, 72), (sum(lengths_k) + tail, 2, 72))
    cu_q, cu_k = (
        torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32)
        for n in (lengths_q, lengths_k)
    )
    longest = max(lengths_q, default=0), max(lengths_k, default=0)
    got, want = both(famx.flash_attn_varlen_func, q, k, v, cu_q, cu_k, *longest, **options)
    assert_near(got, want)
    used = sum(lengths_q)
    assert (got[0][used:] == 0).all() and (got[1][:, used:] == -torch.inf).all()


def test_wrong_offsets_are_refused_before_the_launch():
    """The kernel trusts offsets; on the CPU they are looked at first, for the operator too."""
    q, k, v = draw((64, 2, 64), (64, 2, 64))
    cu, bad = (torch.tensor(x, dtype=torch.int32) for x in ([0, 64], [0, 65]))
    with pytest.raises(ValueError, match="cu_seqlens_k: expected a last offset of at most 64"):
        famx.flash_attn_varlen_func(q, k, v, cu, bad, 64, 65, backend="emulator")
    pairs = [OPS.quantize(x, "rowwise", "rceil", torch.float8_e4m3fn, None) for x in (q, k)]
    v_pair = OPS.quantize(v, "colwise", "rceil", torch.float8_e4m3fn, cu)
    operands = (*pairs[0], *pairs[1], *v_pair, None, None)
    with pytest.raises(ValueError, match="cu_seqlens_q: expected a last offset"):
        OPS.fwd(*operands, bad, cu, 65, 64, 0.125, -1, -1, torch.float32, "emulator")


@pytest.mark.parametrize("layout", ["plain", "swizzled128x4"])
@pytest.mark.parametrize(
    "axis,causal", [("colwise", False), ("rowwise", True), ("tokenwise", True)]
)
def test_prequantised_operands(layout, axis, causal):
    """MXTensors of both scale layouts; swizzled ones are passed on as they are, padded with bytes that mean NaN."""
    q, k, v = draw((1, 130, 2, 72), (1, 100, 1, 72))
    mx = [quantize_mxfp8(q), quantize_mxfp8(k), quantize_mxfp8(v, axis=axis)]
    if layout != "plain":
        mx = [x if x.axis == "tokenwise" else x.to_layout(layout, padding=255) for x in mx]
    got, want = both(famx.flash_attn_mx_func, *mx, causal=causal, out_dtype=torch.float32)
    assert_near(got, want)


def test_explain_names_the_instance():
    """plan and explain tell the kernel; what is not built is refused with what is."""
    for head_dim, dtype, name in (
        (5, torch.float32, "d64_fp32"),
        (64, torch.float16, "d64_fp16"),
        (65, torch.bfloat16, "d128_bf16"),
    ):
        x = torch.zeros(1, 4, 1, head_dim, dtype=dtype)
        plan = famx.explain(x, x, x, backend="emulator")
        assert (plan.backend, plan.kernel, plan.reasons) == ("emulator", f"attn_fwd_{name}", ())
    x = torch.zeros(1, 4, 1, 192)
    with pytest.raises(
        NotImplementedError,
        match="head_dim 192 .*built: head_dim <= 64 and <= 128, output bf16, fp16, fp32",
    ):
        famx.flash_attn_func(x, x, x, backend="emulator")
    mx = quantize_mxfp8(torch.zeros(1, 4, 1, 64), dtype=torch.float8_e5m2)
    with pytest.raises(NotImplementedError, match="float8_e5m2 operands"):
        famx.flash_attn_mx_func(mx, mx, mx, backend="emulator")


# --- strides and alignment (C19, C24) ----------------------------------------------------------------------------


def test_c19_transposed_inputs():
    """(B,H,S,D) tensors seen as (B,S,H,D), as inputs and as payloads that are read in place."""
    q, k, v = (
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw((2, 70, 2, 64), (2, 90, 2, 64))
    )
    assert not q.is_contiguous()
    assert_near(*both(famx.flash_attn_func, q, k, v, causal=True))
    plain = [quantize_mxfp8(q), quantize_mxfp8(k), quantize_mxfp8(v, axis="colwise")]
    views = [
        famx.MXTensor(x.data.transpose(1, 2).contiguous().transpose(1, 2), x.scale, x.axis)
        for x in plain
    ]
    assert all(sm100.tma_payload(x.data) is x.data for x in views)
    got, want = (
        famx.flash_attn_mx_func(*mx, return_lse=True, backend="emulator") for mx in (views, plain)
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("backend", ["portable", "emulator"])
@pytest.mark.parametrize("axis", ["rowwise", "colwise"])
def test_c58_padding_bytes_of_scale_buffers(backend, axis):
    """S = 33: whatever stands in the padding of the tiled scale buffers, every bit stays (the forward's part)."""
    inputs = draw((1, 33, 2, 64), (1, 33, 2, 64))
    axes = ("rowwise", "rowwise", axis)
    results = []
    for padding in (0xFF, 0x00):
        operands = []
        for x, a in zip(inputs, axes, strict=True):
            mx = quantize_mxfp8(x, axis=a)
            buffer = layouts.to_swizzled128x4(layouts.operand_matrix(mx.scale, a), padding)
            assert (buffer.view(torch.uint8) == padding).any()
            operands.append(MXTensor.from_parts(mx.data, buffer, a, "swizzled128x4"))
        options = {"return_lse": True, "out_dtype": torch.float32, "backend": backend}
        results.append(famx.flash_attn_mx_func(*operands, **options))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b) and a.isfinite().all()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_quality_is_that_of_the_portable_path(head_dim, causal):
    """Error against float64 attention within 5 % of the portable path's; normal data: no row off by more than 2^-7."""
    q, k, v = draw((1, 384, 2, head_dim), (1, 384, 2, head_dim), seed=1)
    exact, _ = reference.attention_fp64(q.double(), k.double(), v.double(), causal=causal)
    emulated, portable = (
        famx.flash_attn_func(q, k, v, causal=causal, backend=backend)
        for backend in ("emulator", "portable")
    )
    errors = [(out - exact).norm() / exact.norm() for out in (emulated, portable)]
    assert errors[1] < 0.06 and abs(errors[0] / errors[1] - 1) < 0.05
    row = portable.abs().amax(-1, keepdim=True)
    assert ((emulated - portable).abs() / row).max() < 2**-7


def misaligned(x):
    """The same values at an address that is not a multiple of 16."""
    room = torch.empty(x.numel() + 16, dtype=torch.uint8)
    at = (8 - room.data_ptr()) % 16
    moved = room[at : at + x.numel()].view(x.shape)
    moved.copy_(x.view(torch.uint8))
    return moved.view(x.dtype)


def test_c24_payloads_that_tma_cannot_read_are_copied():
    """A misaligned base, rows that are no multiple of 16 bytes, broadcast heads: copied, with the same result."""
    q, k, v = draw((1, 70, 2, 64), (1, 90, 2, 64))
    k[:, :, 1], v[:, :, 1] = k[:, :, 0], v[:, :, 0]
    plain = [quantize_mxfp8(q), quantize_mxfp8(k), quantize_mxfp8(v, axis="colwise")]
    wide = torch.zeros(1, 90, 2, 72, dtype=torch.uint8).view(torch.float8_e4m3fn)
    wide[..., :64] = plain[2].data
    odd = [misaligned(plain[0].data), plain[1].data[:, :, :1].expand(-1, -1, 2, -1), wide[..., :64]]
    for x in odd:
        ready = sm100.tma_payload(x)
        assert (
            ready is not x
            and ready.data_ptr() % 16 == 0
            and all(s % 16 == 0 and s > 0 for s in ready.stride()[:-1])
        )
        assert torch.equal(ready.view(torch.uint8), x.view(torch.uint8))
    views = [famx.MXTensor(x, mx.scale, mx.axis) for x, mx in zip(odd, plain)]
    got, want = (
        famx.flash_attn_mx_func(*mx, return_lse=True, backend="emulator") for mx in (views, plain)
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize("axis", ["rowwise", "colwise"])
def test_packed_atoms_hold_every_scale(axis):
    """Each scale byte is where csrc/params.h says, for sequences of awkward lengths."""
    lengths = [0, 130, 1, 31, 257, 0, 128]
    total, heads, width = sum(lengths) + 9, 3, 72
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    rows = total if axis == "rowwise" else layouts.packed_scale_rows(total, len(lengths))
    generator = torch.Generator().manual_seed(0)
    shape = (rows, heads, 3 if axis == "rowwise" else width)
    scale = torch.randint(0, 255, shape, dtype=torch.uint8, generator=generator)
    atoms = layouts.packed_atoms(scale.view(torch.float8_e8m0fnu), axis, cu, total).view(
        torch.uint8
    )
    tiles = total // 128 + len(lengths)
    assert atoms.shape == (heads, tiles * 512)
    for b, n in enumerate(lengths):
        start = int(cu[b])
        first = start if axis == "rowwise" else start // 32 + b
        mine = scale[first : first + (n if axis == "rowwise" else -(-n // 32))]
        for head in range(heads):
            for i, j in itertools.product(
                range(mine.shape[0]), range(0, shape[2], 1 if axis == "rowwise" else 13)
            ):
                token, row, column = (i, i % 128, j) if axis == "rowwise" else (i * 32, j, i % 4)
                atom = start // 128 + b + token // 128
                assert (
                    atoms[head, atom * 512 + row % 32 * 16 + row // 32 * 4 + column]
                    == mine[i, head, j]
                )


def test_overwritten_operands_are_refused():
    """An MXTensor that was written to after quantisation, its swizzled scale included, is not launched."""
    mx = [quantize_mxfp8(x).to_layout("swizzled128x4") for x in draw((1, 4, 1, 64), (1, 4, 1, 64))]
    mx[1].scale.view(torch.uint8).zero_()
    with pytest.raises(RuntimeError, match="modified in place"):
        famx.flash_attn_mx_func(*mx, backend="emulator")
