"""The sm_100 forward kernel's PTX in the emulator, with strict checks, against the portable path.

Bounds, relative to the largest |O| of the row: S is summed in another order here, and exp2 errs by 3e-6, so about one
payload of P in 10^5 rounds the other way, by up to 2^-3 of it. A row without such a key agrees to fp32 sums; with one,
to 2^-4 (a key that is not the largest has at most half of the weight). LSE within 1e-5, relative beyond 1.
"""

import math

import pytest
import torch
from kernels.attn_fwd import OUT_NAMES, Operands, expected, quantise, run

from flash_attn_mx import _native

O_ROW = 2.0**-4
O_ROW_SAME_P = 2e-5
ROWS_WITH_ANOTHER_P = 0.03
LSE = 1e-5
CAUSAL = (-1, 0)
NONE = (-1, -1)
ORDERS = [("eager", 0), ("delayed", 0), *(("random", seed) for seed in range(8))]


def kernel_ptx(head_dim, out_dtype=torch.float32):
    name = f"attn_fwd_d{64 if head_dim <= 64 else 128}_{OUT_NAMES[out_dtype]}.sm_100f.ptx"
    path = _native.DEVICE / name
    if not path.is_file():
        pytest.skip(f"{name} is not built")
    return path


def draw(seqlen_q, seqlen_k, head_dim, *, batch=1, heads=1, heads_k=1, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    q = normal(batch, seqlen_q, heads, head_dim)
    return q, normal(batch, seqlen_k, heads_k, head_dim), normal(batch, seqlen_k, heads_k, head_dim)


def check(ops: Operands, *, softmax_scale=None, window=NONE, out_dtype=torch.float32, **options):
    """Runs the kernel, compares with the portable path; returns out, lse."""
    ptx = kernel_ptx(ops.q[0].shape[-1], out_dtype)
    out, lse, _ = run(
        ptx, ops, softmax_scale=softmax_scale, window=window, out_dtype=out_dtype, **options
    )
    want, want_lse = expected(ops, softmax_scale=softmax_scale, window=window, out_dtype=out_dtype)
    assert torch.equal(torch.isnan(out), torch.isnan(want))
    assert torch.equal(torch.isnan(lse), torch.isnan(want_lse))
    assert torch.equal(torch.isinf(lse), torch.isinf(want_lse))
    finite = torch.isfinite(want_lse)
    error = (lse - want_lse).abs()[finite] / want_lse.abs()[finite].clamp(min=1.0)
    assert error.numel() == 0 or error.max() <= LSE
    out64, want64 = out.double().nan_to_num(), want.double().nan_to_num()
    row = want64.abs().amax(-1, keepdim=True)
    assert (out64[(row == 0).expand_as(out64)] == 0).all()
    ratio = (out64 - want64).abs() / row.clamp(min=1e-300)
    if ratio.numel():
        step = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}[out_dtype]
        assert ratio.max() <= O_ROW + step, float(ratio.max())
        other = int((ratio.amax(-1) > O_ROW_SAME_P + step).sum())
        assert other <= max(2, ROWS_WITH_ANOTHER_P * row.numel()), other
    return out, lse


SHAPES = [
    (1, 1), (1, 640), (31, 33), (33, 31), (64, 64), (127, 129), (128, 128), (129, 127), (255, 257), (257, 640),
    (640, 255), (640, 640),
]  # fmt: skip


@pytest.mark.parametrize("window", [NONE, CAUSAL, (100, 20), (-1, 10), (40, -1), (0, 0)], ids=str)
@pytest.mark.parametrize("seqlen_q,seqlen_k", SHAPES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths_and_masks(head_dim, seqlen_q, seqlen_k, window):
    """Every tile kind (full, ragged, cut, unseen) in every order that these lengths give."""
    check(quantise(*draw(seqlen_q, seqlen_k, head_dim)), window=window)


@pytest.mark.parametrize("head_dim", [16, 32, 40, 72, 96, 104, 128])
@pytest.mark.parametrize("window", [NONE, CAUSAL], ids=str)
def test_head_dims_are_zero_filled(head_dim, window):
    """Scale bytes of blocks that do not exist are 0xFF here and must not be used."""
    check(quantise(*draw(130, 257, head_dim, heads=2, heads_k=1)), window=window)


@pytest.mark.parametrize("heads,heads_k", [(1, 1), (4, 1), (8, 1), (6, 2)])
def test_grouped_heads(heads, heads_k):
    """Query head h uses key head h // (heads / heads_k); several items per CTA."""
    check(
        quantise(*draw(140, 200, 64, batch=2, heads=heads, heads_k=heads_k)), window=CAUSAL, grid=3
    )


@pytest.mark.parametrize("order,seed", ORDERS)
@pytest.mark.parametrize(
    "head_dim,seqlen_q,seqlen_k,window",
    [
        (128, 640, 640, CAUSAL),
        (64, 256, 640, NONE),
        (128, 255, 640, (100, 20)),
        (64, 640, 300, CAUSAL),
    ],
)
def test_asynchronous_orders(head_dim, seqlen_q, seqlen_k, window, order, seed):
    """Copies and products that complete at any legal time give the same bits as eager ones."""
    ops = quantise(*draw(seqlen_q, seqlen_k, head_dim, heads=2))
    out, lse = check(ops, window=window, order=order, seed=seed, grid=2)
    eager, eager_lse, _ = run(kernel_ptx(head_dim), ops, window=window, grid=2)
    assert torch.equal(out, eager) and torch.equal(lse, eager_lse)


@pytest.mark.parametrize("out_dtype", list(OUT_NAMES))
@pytest.mark.parametrize("head_dim", [64, 72, 128])
def test_output_types(head_dim, out_dtype):
    check(quantise(*draw(130, 130, head_dim)), window=CAUSAL, out_dtype=out_dtype)


# --- row reference and tile exponents ---------------------------------------------------------------------------


@pytest.mark.parametrize("window", [NONE, CAUSAL], ids=str)
@pytest.mark.parametrize("order,seed", [("eager", 0), ("delayed", 0), ("random", 1), ("random", 2)])
def test_reference_moves(window, order, seed):
    """The slow path: logits jump up by thousands from tile to tile, for some rows of a warp and not for others."""
    q, k, v = draw(200, 640, 64)
    steps = torch.arange(640) // 128
    k = k * (1 + 60.0 * (4 - steps)).view(1, -1, 1, 1)
    q[:, ::3] *= 0.01
    check(quantise(q, k, v), window=window, softmax_scale=1.0, order=order, seed=seed)


def test_large_logit_met_after_zero():
    """C04: logit 2048 in key 0, visited last; and within one tile."""
    for keys in (64, 300):
        q = torch.full((1, 3, 1, 64), 16.0)
        k = torch.zeros(1, keys, 1, 64)
        k[:, 0] = 16.0
        v = torch.arange(keys).float().view(1, -1, 1, 1).expand(1, keys, 1, 64).contiguous() + 1
        out, lse = check(quantise(q, k, v))
        assert torch.equal(out, torch.ones_like(out))
        assert torch.allclose(lse, torch.tensor(2048.0))


def test_logits_far_below_zero():
    """C03: no finite sentinel hides rows whose logits are -61952."""
    q, k = torch.full((1, 4, 1, 32), 44.0), torch.full((1, 64, 1, 32), -44.0)
    v = torch.randn(1, 64, 1, 32, generator=torch.Generator().manual_seed(0))
    check(quantise(q, k, v), softmax_scale=1.0)


def test_tile_exponent_is_clamped():
    """Tiles 2^-119 and less below the reference: scale byte 0, nothing left of them."""
    q, k, v = draw(130, 512, 64)
    k = k * (1 + 40.0 * (torch.arange(512) // 128)).view(1, -1, 1, 1)
    check(quantise(q, k, v), softmax_scale=1.0)
    check(quantise(q, k, v), softmax_scale=1.0, window=(300, 5))


@pytest.mark.parametrize("scale", [-0.125, 0.0, 1e-3, 3.0])
def test_softmax_scales(scale):
    """A negative scale negates S in the MMA, zero gives the mean."""
    check(quantise(*draw(140, 300, 64)), softmax_scale=scale, window=CAUSAL)


def test_uniform_rows():
    """C10, C13: exact counts. LSE = ln(visible keys), natural logarithm."""
    v = torch.tensor([1.0, 2.0, 4.0, 8.0]).view(1, 4, 1, 1).expand(1, 4, 1, 64).contiguous()
    zero = torch.zeros(1, 4, 1, 64)
    out, lse = check(quantise(zero, zero, v), window=(1, 0))
    assert torch.equal(out[0, :, 0, 0], torch.tensor([1.0, 1.5, 3.0, 6.0]))
    assert torch.allclose(lse[0, 0], torch.tensor([1.0, 2.0, 2.0, 2.0]).log())


def test_rows_without_keys():
    """C01: bottom-right alignment leaves rows that see nothing: O = 0, LSE = -inf."""
    v = torch.tensor([1.0, 3.0]).view(1, 2, 1, 1).expand(1, 2, 1, 64).contiguous()
    ops = quantise(torch.zeros(1, 5, 1, 64), torch.zeros(1, 2, 1, 64), v)
    out, lse = check(ops, window=CAUSAL)
    assert torch.equal(out[0, :, 0, 0], torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0]))
    assert lse[0, 0, :3].eq(-math.inf).all()
    check(quantise(*draw(700, 100, 64)), window=CAUSAL)  # whole query tiles see nothing


def test_window_sides():
    """C12: bottom-right alignment. C14: a right side beyond the keys cuts nothing."""

    def rows(values, seqlen_q, window):
        n = len(values)
        v = torch.tensor(values).view(1, n, 1, 1).expand(1, n, 1, 64).contiguous()
        ops = quantise(torch.zeros(1, seqlen_q, 1, 64), torch.zeros(1, n, 1, 64), v)
        return check(ops, window=window)[0][0, :, 0, 0]

    assert torch.allclose(rows([1.0, 2.0, 4.0, 8.0, 16.0], 2, CAUSAL), torch.tensor([3.75, 6.2]))
    assert torch.equal(rows([1.0, 3.0], 4, (-1, 10)), torch.full((4,), 2.0))


def test_query_heads_use_their_key_head():
    """C22: six query heads over two key heads."""
    v = torch.tensor([1.0, 2.0]).view(1, 1, 2, 1).expand(1, 40, 2, 64).contiguous()
    out, _ = check(quantise(torch.zeros(1, 3, 6, 64), torch.zeros(1, 40, 2, 64), v))
    assert torch.equal(out[0, 0, :, 0], torch.tensor([1.0, 1.0, 1.0, 2.0, 2.0, 2.0]))


def test_huge_queries_and_keys():
    """C05: logits near 1e19 stay finite."""
    sign = torch.randn(1, 4, 1, 64, generator=torch.Generator().manual_seed(1)).sign()
    v = torch.randn(1, 4, 1, 64, generator=torch.Generator().manual_seed(2))
    for window in (NONE, CAUSAL):
        out, lse = check(quantise(5e8 * sign, 5e8 * sign, v), window=window)
        assert torch.isfinite(out).all() and torch.isfinite(lse).all()


@pytest.mark.parametrize("out_dtype", list(OUT_NAMES))
def test_ones_stay_ones(out_dtype):
    """C65: every output type, many key tiles. C66: weights of 2^-10 beside a large one still count."""
    ones = torch.ones(1, 2048, 1, 128)
    zero = torch.zeros(1, 64, 1, 128)
    out, _ = check(quantise(zero, torch.zeros_like(ones), ones), out_dtype=out_dtype)
    assert torch.equal(out, torch.ones_like(out))
    k = torch.zeros(1, 2048, 1, 128)
    k[:, 1:] = -7 / 128
    out, _ = check(quantise(zero + 1, k, ones), softmax_scale=1.0, out_dtype=out_dtype)
    assert (out - 1).abs().max() <= 0.05


def test_large_values_accumulate_in_fp32():
    """C67: V = 3e4, also with alternating signs."""
    zero = torch.zeros(1, 3, 1, 64), torch.zeros(1, 1024, 1, 64)
    for v in (
        torch.full((1, 1024, 1, 64), 3e4),
        3e4 * (1 - 2 * (torch.arange(64) % 2)).expand(1, 1024, 1, 64),
    ):
        out, _ = check(quantise(*zero, v.contiguous().float()))
        assert ((out - v[:, :3]).abs() <= 0.0625 * 3e4).all()


def test_later_values_do_not_leak():
    """C50: one huge value of V in the future changes no earlier row."""
    zero, v = torch.zeros(1, 32, 1, 32), torch.full((1, 32, 1, 32), 0.3)
    clean, _ = check(quantise(zero, zero, v), window=CAUSAL)
    for value in (2.0**20, math.inf, math.nan):
        v[:, 31] = value
        out, _ = check(quantise(zero, zero, v), window=CAUSAL)
        assert torch.equal(out[:, :31], clean[:, :31])


@pytest.mark.parametrize("window", [NONE, CAUSAL], ids=str)
def test_padding_of_scales_is_not_used(window):
    """C58: the same bits with padding bytes 0xFF and 0x00."""
    ops = quantise(*draw(33, 161, 40))
    first = check(ops, window=window, scale_padding=0xFF)
    second = check(ops, window=window, scale_padding=0x00)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


# --- NaN, Inf and neighbours ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e30])
@pytest.mark.parametrize("window", [CAUSAL, (50, 0)], ids=str)
def test_no_row_depends_on_a_key_it_does_not_see(value, window):
    """Rows before a changed token, or behind it by more than the window, keep their bits."""
    q, k, v = draw(400, 400, 64)
    clean, clean_lse = check(quantise(q, k, v), window=window)
    for token in (0, 200, 399):
        bad_k, bad_v = k.clone(), v.clone()
        bad_k[:, token] = value
        bad_v[:, token] = value
        out, lse = check(quantise(q, bad_k, bad_v), window=window)
        unseen = torch.ones(400, dtype=torch.bool)
        unseen[token : token + (401 if window[0] < 0 else window[0] + 1)] = False
        assert torch.equal(out[:, unseen], clean[:, unseen])
        assert torch.equal(lse[..., unseen], clean_lse[..., unseen])


@pytest.mark.parametrize("window", [NONE, CAUSAL], ids=str)
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_nan_reaches_who_sees_it(which, window):
    q, k, v = draw(200, 300, 64)
    {"q": q, "k": k, "v": v}[which][:, 150, :, 7] = math.nan
    check(quantise(q, k, v), window=window)


def test_garbage_behind_the_end():
    """C06: rows behind the last sequence hold NaN; scales of the padding are 0xFF already."""
    q, k, v = (x[0] for x in draw(200, 200, 64))
    for x in (q, k, v):
        x[137:] = math.nan
    cu = torch.tensor([0, 37, 137], dtype=torch.int32)
    for window in (NONE, CAUSAL):
        dirty = quantise(q, k, v, cu, cu)
        out, lse, _ = run(kernel_ptx(64), dirty, window=window, max_q=100)
        clean = quantise(*(x[:137] for x in (q, k, v)), cu, cu)
        want, want_lse = check(clean, window=window)
        assert torch.equal(out[:137], want) and torch.equal(lse[:, :137], want_lse)


LENGTHS = [
    ([37, 130, 5], [37, 130, 5]),
    ([0, 200, 1], [5, 0, 300]),
    ([129, 0, 256, 3], [257, 64, 100, 640]),
]


@pytest.mark.parametrize("lengths_q,lengths_k", LENGTHS, ids=str)
@pytest.mark.parametrize("window", [NONE, CAUSAL, (50, 10)], ids=str)
@pytest.mark.parametrize("order,seed", [("eager", 0), ("random", 3)])
def test_packed_sequences(lengths_q, lengths_k, window, order, seed):
    """Sequences of any length in one launch, zero included; each equals its dense run bit for bit (C29)."""
    q, k, v = draw(sum(lengths_q), sum(lengths_k), 128, heads=2)
    cu_q, cu_k = (
        torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for n in (lengths_q, lengths_k)
    )
    ops = quantise(q[0], k[0], v[0], cu_q, cu_k)
    out, lse = check(ops, window=window, max_q=max(lengths_q), order=order, seed=seed, grid=2)
    for b in range(len(lengths_q)):
        tq, tk = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        if lengths_q[b] and lengths_k[b]:
            alone = quantise(q[:, tq], k[:, tk], v[:, tk])
            want, want_lse, _ = run(kernel_ptx(128), alone, window=window)
            assert torch.equal(out[tq], want[0]) and torch.equal(lse[:, tq], want_lse[0])
