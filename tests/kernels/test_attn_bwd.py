"""The sm_100 backward kernels' PTX in the emulator, with strict checks, against the portable path.

Bounds: each row of dQ, dK, dV within 2^-6 of the row's largest value, the whole within 1 % (Frobenius); both paths round P
and dS at the same places, so that only payloads whose fp32 value lies at a rounding boundary differ. Where dS cancels to
rounding noise, as in rows that see one key, the noise counts against the size of what cancels.
"""

import math

import pytest
import torch
from kernels.attn_bwd import Operands, expected, prepare, run
from kernels.attn_fwd import OUT_NAMES

from flash_attn_mx import _native

ROW, FROBENIUS = 2.0**-6, 0.01
NOISE = 1e-5  # of scale · |dO| · |V| · |K| · sqrt(D)
CAUSAL = (-1, 0)
NONE = (-1, -1)
ORDERS = [("eager", 0), ("delayed", 0), *(("random", seed) for seed in range(8))]


def folder(head_dim, dtype=torch.float32, out_dtype=torch.float32):
    """Where the kernels lie; skips if one of them is not built."""
    box = 64 if head_dim <= 64 else 128
    types = {"bwd_preprocess": out_dtype, "attn_bwd": dtype, "bwd_postprocess": dtype}
    for kernel, t in types.items():
        name = f"{kernel}_d{box}_{OUT_NAMES[t]}.sm_100f.ptx"
        if not (_native.DEVICE / name).is_file():
            pytest.skip(f"{name} is not built")
    return _native.DEVICE


def draw(seqlen_q, seqlen_k, head_dim, *, batch=1, heads=1, heads_k=1, seed=0):
    """q, k, v, dout"""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    query, key = (batch, seqlen_q, heads, head_dim), (batch, seqlen_k, heads_k, head_dim)
    return normal(*query), normal(*key), normal(*key), normal(*query)


def assert_close(got, want, noise=0.0, row_bound=ROW):
    assert torch.equal(torch.isnan(got), torch.isnan(want))
    got, want = got.double().nan_to_num(), want.double().nan_to_num()
    row = want.abs().amax(-1, keepdim=True)
    error = ((got - want).abs() - noise).clamp(min=0)
    assert (error <= row_bound * row).all(), float((error / row.clamp(min=1e-300)).max())
    distance = (got - want).norm() - noise * got.numel() ** 0.5
    assert distance <= FROBENIUS * want.norm(), float(distance / want.norm())


def check(
    ops: Operands,
    *,
    softmax_scale=None,
    window=NONE,
    dtype=torch.float32,
    noise=0.0,
    row_bound=ROW,
    **options,
):
    """Runs the kernels, compares with the portable path; returns dq, dk, dv."""
    path = folder(ops.q[0].shape[-1], dtype, ops.out.dtype)
    *got, _ = run(path, ops, softmax_scale=softmax_scale, window=window, dtype=dtype, **options)
    want = expected(ops, softmax_scale=softmax_scale, window=window, dtype=dtype)
    for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=True):
        if a is None:
            continue
        try:
            assert_close(a, b, noise if name != "dv" else 0.0, row_bound)
        except AssertionError as e:
            raise AssertionError(f"{name}: {e}") from None
    return got


def noise_of(q, k, v, dout):
    largest = [x.abs().max().item() if x.numel() else 0.0 for x in (q, k, v, dout)]
    return NOISE * max(largest[0], largest[1]) * largest[2] * largest[3]


def draw_and_check(
    *args, softmax_scale=None, window=NONE, out_dtype=torch.float32, options=None, **shape
):
    tensors = draw(*args, **shape)
    ops = prepare(*tensors, softmax_scale=softmax_scale, window=window, out_dtype=out_dtype)
    return check(
        ops, softmax_scale=softmax_scale, window=window, noise=noise_of(*tensors), **(options or {})
    )


SHAPES = [
    (1, 1), (1, 640), (31, 33), (63, 65), (127, 129), (128, 128), (129, 127), (255, 257), (257, 640), (640, 255),
]  # fmt: skip


@pytest.mark.parametrize("window", [NONE, CAUSAL, (100, 20), (-1, 10), (40, -1), (0, 0)], ids=str)
@pytest.mark.parametrize("seqlen_q,seqlen_k", SHAPES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths_and_masks(head_dim, seqlen_q, seqlen_k, window):
    """Full, ragged, cut and unseen pairs of tiles."""
    draw_and_check(seqlen_q, seqlen_k, head_dim, window=window)


@pytest.mark.parametrize("head_dim", [16, 32, 40, 72, 104])
@pytest.mark.parametrize("window", [NONE, CAUSAL], ids=str)
def test_head_dims_are_zero_filled(head_dim, window):
    """Scale bytes of blocks that do not exist are 0xFF here and must not be used."""
    draw_and_check(130, 257, head_dim, heads=2, window=window)


@pytest.mark.parametrize("heads,heads_k", [(4, 1), (6, 2)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_grouped_heads(heads, heads_k, head_dim):
    """dK and dV are summed over the query heads of a group, in tensor memory."""
    draw_and_check(140, 200, head_dim, batch=2, heads=heads, heads_k=heads_k, window=CAUSAL)


@pytest.mark.parametrize("order,seed", ORDERS)
@pytest.mark.parametrize(
    "head_dim,seqlen_q,seqlen_k,window",
    [(128, 300, 500, CAUSAL), (64, 500, 300, NONE), (128, 255, 520, (100, 20))],
)
def test_asynchronous_orders(head_dim, seqlen_q, seqlen_k, window, order, seed):
    """Copies and products that complete at any legal time: dK and dV have the bits of eager ones, dQ too where its sums
    are in order."""
    ops = prepare(*draw(seqlen_q, seqlen_k, head_dim, heads=2), window=window)
    path = folder(head_dim)
    eager = run(path, ops, window=window, deterministic=True)[:3]
    check(ops, window=window, order=order, seed=seed)
    ordered = run(path, ops, window=window, order=order, seed=seed, deterministic=True)[:3]
    for a, b in zip(ordered, eager, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", list(OUT_NAMES))
@pytest.mark.parametrize("head_dim", [64, 72, 128])
def test_gradient_types(head_dim, dtype):
    ops = prepare(*draw(130, 130, head_dim), window=CAUSAL, out_dtype=dtype)
    check(ops, window=CAUSAL, dtype=dtype, noise=1e-3, row_bound=ROW + 2.0**-8)


@pytest.mark.parametrize(
    "needs", [(True, False, False), (False, True, False), (False, False, True)]
)
def test_only_what_is_needed(needs):
    ops = prepare(*draw(130, 260, 64), window=CAUSAL)
    got = check(ops, window=CAUSAL, needs=needs, deterministic=True)
    assert [x is not None for x in got] == list(needs)


# --- numerics ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [-0.125, 0.0, 1e-3, 2.0])
def test_softmax_scales(scale):
    draw_and_check(140, 300, 64, softmax_scale=scale, window=CAUSAL)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_outlier_channels(head_dim):
    """Two channels of K offset by 30: logits at +-100 and beyond, LSE far from 0."""
    q, k, v, dout = draw(200, 300, head_dim, batch=2, heads=2, heads_k=2)
    k[..., :2] += 30
    ops = prepare(q, k, v, dout, window=CAUSAL)
    check(ops, window=CAUSAL, noise=noise_of(q, k, v, dout))
    q, k = (
        q * 0 + 4,
        k * 0 - 4 + 0.5 * torch.randn(k.shape, generator=torch.Generator().manual_seed(1)),
    )
    ops = prepare(q, k, v, dout)
    assert ops.lse.max() < -88
    check(ops, noise=0.005)  # all rows of Q are equal: sums of dS cancel


def test_large_logits():
    """Logits of thousands, whose fp32 resolution is 1e-4; then of millions, where fp32 cannot resolve x - LSE: P <= 1."""
    q, k, v, dout = draw(64, 128, 64)
    ops = prepare(q * 20, k * 20, v, dout, softmax_scale=1.0)
    check(ops, softmax_scale=1.0, noise=noise_of(q * 20, k * 20, v, dout))
    ops = prepare(q * 600, k * 600, v, dout, softmax_scale=1.0)
    _, _, dv, _ = run(folder(64), ops, softmax_scale=1.0)
    assert torch.isfinite(dv).all()
    assert (dv.sum(1).abs() <= 1.1 * dout.abs().sum(1)).all()


def test_long_context_keeps_dv():
    """LSE shifted by 18 ln 2 makes every P 2^18 times smaller, as in a context 2^18 times longer."""
    ops = prepare(*draw(256, 256, 64))
    near = run(folder(64), ops)[2]
    far = run(folder(64), ops._replace(lse=ops.lse + 18 * math.log(2.0)))[2] * 2.0**18
    assert (near - far).norm() <= 2e-3 * near.norm()


def test_rows_without_keys():
    """C01: bottom-right alignment leaves rows that see nothing: their dQ is 0, and they give nothing to dK and dV."""
    for seqlen_q, seqlen_k in ((5, 2), (300, 100), (700, 100)):
        dq, _, _ = draw_and_check(seqlen_q, seqlen_k, 64, window=CAUSAL)
        assert (dq[:, : seqlen_q - seqlen_k] == 0).all()
    _, dk, dv = draw_and_check(100, 500, 64, window=(30, 0))
    assert (dk[:, :300] == 0).all() and (dv[:, :300] == 0).all()


# --- NaN and neighbours -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [CAUSAL, (50, 0)], ids=str)
def test_masked_keys_give_nothing(window):
    """A NaN token among keys and values reaches the gradients of queries that see it and its own, no others."""
    q, k, v, dout = draw(256, 256, 64)
    clean = check(prepare(q, k, v, dout, window=window), window=window, deterministic=True)
    bad_v = v.clone()
    bad_v[:, 200] = math.nan
    dq, _, dv = check(prepare(q, k, bad_v, dout, window=window), window=window, deterministic=True)
    assert torch.equal(dq[:, :128], clean[0][:, :128])
    assert torch.equal(dv[:, :128], clean[2][:, :128]) or window == CAUSAL


def assert_nan_as_portable(tensors, which, token, window):
    tensors[which][:, token, :, 7] = math.nan
    ops = prepare(*tensors.values(), window=window)
    *got, _ = run(folder(64), ops, window=window)
    for a, b in zip(got, expected(ops, window=window), strict=True):
        assert torch.equal(torch.isnan(a), torch.isnan(b))


NAMES = ("q", "k", "v", "dout")


@pytest.mark.parametrize("which", NAMES)
@pytest.mark.parametrize("window", [NONE, CAUSAL], ids=str)
def test_nan_stays_in_its_tiles(which, window):
    """Gradients that the portable path keeps finite stay finite, and no NaN is lost."""
    assert_nan_as_portable(dict(zip(NAMES, draw(128, 128, 64), strict=True)), which, 70, window)


@pytest.mark.parametrize("token", [70, 200])
@pytest.mark.parametrize("which", NAMES)
@pytest.mark.parametrize("window", [CAUSAL, (60, 0)], ids=str)
def test_nan_stays_in_its_half_of_a_pair(which, window, token):
    """Query tiles that only one of two key tiles sees: both CTAs multiply, one by zeros, and 0 * NaN is NaN."""
    assert_nan_as_portable(dict(zip(NAMES, draw(384, 384, 64), strict=True)), which, token, window)


def test_garbage_behind_the_end():
    """C06: rows behind the last sequence hold NaN; scales of the padding are 0xFF already."""
    q, k, v, dout = (x[0] for x in draw(200, 200, 64))
    cu = torch.tensor([0, 37, 137], dtype=torch.int32)
    for window in (NONE, CAUSAL):
        clean = prepare(*(x[:137] for x in (q, k, v, dout)), window=window, cu_q=cu, cu_k=cu)
        want = check(clean, window=window, max_q=100, max_k=100, deterministic=True, noise=1e-4)
        for x in (q, k, v, dout):
            x[137:] = math.nan
        dirty = prepare(q, k, v, dout, window=window, cu_q=cu, cu_k=cu)
        out = torch.full(q.shape, math.nan)
        out[:137] = clean.out
        lse = torch.full((1, 200), math.nan)
        lse[:, :137] = clean.lse
        dirty = dirty._replace(out=out, lse=lse)
        *got, _ = run(folder(64), dirty, window=window, max_q=100, max_k=100, deterministic=True)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a[:137], b)


LENGTHS = [
    ([37, 130, 5], [37, 130, 5]),
    ([0, 200, 1], [5, 0, 300]),
    ([129, 0, 256, 3], [257, 64, 100, 400]),
]


@pytest.mark.parametrize("lengths_q,lengths_k", LENGTHS, ids=str)
@pytest.mark.parametrize("window", [NONE, CAUSAL, (50, 10)], ids=str)
@pytest.mark.parametrize("order,seed", [("eager", 0), ("random", 3)])
def test_packed_sequences(lengths_q, lengths_k, window, order, seed):
    """Sequences of any length in one launch, zero included; each equals its dense run bit for bit (C29)."""
    q, k, v, dout = (x[0] for x in draw(sum(lengths_q), sum(lengths_k), 128, heads=2, heads_k=1))
    cu_q, cu_k = (
        torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for n in (lengths_q, lengths_k)
    )
    ops = prepare(q, k, v, dout, window=window, cu_q=cu_q, cu_k=cu_k)
    options = dict(window=window, deterministic=True)
    dq, dk, dv = check(
        ops,
        noise=1e-4,
        max_q=max(lengths_q),
        max_k=max(lengths_k),
        order=order,
        seed=seed,
        **options,
    )
    for b in range(len(lengths_q)):
        tq, tk = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        if lengths_q[b] and lengths_k[b]:
            alone = prepare(
                *(x[None, t] for x, t in ((q, tq), (k, tk), (v, tk), (dout, tq))), window=window
            )
            want = run(folder(128), alone, **options)[:3]
            for got, one in zip((dq[tq], dk[tk], dv[tk]), want, strict=True):
                assert torch.equal(got, one[0])
