"""The contract of docs/numerics.md: the public path against reference.py (tight) and against exact
attention (the quality figures)."""

import math

import compare
import pytest
import tolerances as tol
import torch
from problems import Problem, Result, attend, attend_packed, exact, normal_problem, oracle, pack

import flash_attn_mx as famx
from flash_attn_mx import reference
from flash_attn_mx.reference import TILE

NAN, INF = float("nan"), float("inf")


def assert_contract(got, want, out_ulp=0.0):
    """got: Result under test; want: Result of the oracle; out_ulp: rounding of the outputs."""
    finite = torch.isfinite(want.lse)
    largest = float(want.lse[finite].abs().max()) if finite.any() else 0.0
    growth = max(1.0, largest / 16)  # of the error of x, and so of the number of flips
    compare.assert_close(
        got.out,
        want.out,
        "out",
        row=tol.CONTRACT_O_ROW + out_ulp,
        median=tol.CONTRACT_O_MEDIAN * growth + out_ulp,
        slack=want.slack,
    )
    compare.assert_close(got.lse, want.lse, "lse", atol=tol.CONTRACT_LSE * max(1.0, largest))
    for name in ("dq", "dk", "dv"):
        bound = tol.CONTRACT_GRAD * growth + out_ulp
        compare.assert_close(getattr(got, name), getattr(want, name), name, frobenius=bound)


CAUSAL = {"causal": True}
SHAPES = [
    # seqlen_q, seqlen_k, batch, heads, heads_k, head_dim, options
    (128, 128, 1, 1, 1, 64, {}),
    (128, 128, 1, 1, 1, 64, CAUSAL),
    (256, 256, 1, 1, 1, 128, CAUSAL),
    (129, 257, 1, 2, 1, 128, {}),
    (257, 129, 1, 2, 2, 64, CAUSAL),
    (70, 300, 2, 2, 1, 32, CAUSAL),
    (300, 70, 1, 2, 2, 32, {}),
    (1, 300, 2, 4, 2, 128, CAUSAL),
    (200, 200, 1, 3, 1, 72, CAUSAL),
    (131, 131, 1, 1, 1, 16, {}),
    (131, 131, 1, 1, 1, 16, {"window_size": (-1, 17)}),
    (300, 300, 1, 1, 1, 64, {"window_size": (40, 0)}),
    (300, 300, 1, 1, 1, 32, {"window_size": (150, 30)}),
    (150, 390, 1, 1, 1, 32, {"window_size": (140, -1)}),
    (390, 150, 1, 1, 1, 32, {"window_size": (-1, 140)}),
    (260, 260, 1, 1, 1, 72, {"causal": True, "window_size": (130, -1), "softmax_scale": 0.3}),
    (40, 40, 1, 1, 1, 256, CAUSAL),
    (1, 1, 3, 2, 1, 128, {}),
]


def shape_id(case):
    seqlen_q, seqlen_k, batch, heads, heads_k, head_dim, options = case
    text = f"d{head_dim}-b{batch}-h{heads}x{heads_k}-q{seqlen_q}-k{seqlen_k}"
    return "-".join([text, *(f"{k}={v}".replace(" ", "") for k, v in options.items())])


@pytest.mark.parametrize("case", SHAPES, ids=shape_id)
def test_contract_dense(device, case):
    """numerics §3, §4 on normal data, every mask and ragged shape."""
    seqlen_q, seqlen_k, batch, heads, heads_k, head_dim, options = case
    problem = normal_problem(
        seqlen_q,
        seqlen_k,
        batch=batch,
        heads=heads,
        heads_k=heads_k,
        head_dim=head_dim,
        device=device,
    )
    assert_contract(attend(problem, **options), oracle(problem, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_contract_dtypes(device, dtype):
    """Inputs are exact in float64; outputs round once, and delta uses the rounded O."""
    problem = normal_problem(140, 200, heads=2, heads_k=1, dtype=dtype, device=device)
    got, want = attend(problem, causal=True), oracle(problem, out_dtype=dtype, causal=True)
    assert {t.dtype for t in (got.out, got.dq, got.dk, got.dv)} == {dtype}
    assert got.lse.dtype == torch.float32
    assert_contract(got, want, out_ulp=tol.HALF_ULP[str(dtype).removeprefix("torch.")])


@pytest.mark.parametrize("options", [{}, CAUSAL, {"window_size": (50, 9)}], ids=str)
def test_contract_varlen(device, options):
    """Each packed sequence is a dense call of its own, its blocks aligned to its own start."""
    sizes = [(37, 37), (130, 150), (1, 40), (60, 5)]
    problems = [
        normal_problem(q, k, heads=2, heads_k=1, head_dim=32, seed=i, device=device)
        for i, (q, k) in enumerate(sizes)
    ]
    packed, cu_q, cu_k = pack(problems)
    got = attend_packed(packed, cu_q, cu_k, **options)
    for i, problem in enumerate(problems):
        at_q, at_k = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        part = (got.out[at_q], got.lse[:, at_q], got.dq[at_q], got.dk[at_k], got.dv[at_k])
        assert_contract(Result(*(t[None] for t in part)), oracle(problem, **options))


def add_logits(problem, per_key, scale=None):
    """Adds per_key[k] to the logit of key k in every row, through channel 0 (q there is 8)."""
    scale = problem.q.shape[-1] ** -0.5 if scale is None else scale
    q, k = problem.q.clone(), problem.k.clone()
    q[..., 0] = 8.0
    k[..., 0] = per_key.to(k).view(1, -1, 1) / (8.0 * scale)
    return problem._replace(q=q, k=k)


def _key_values(kind, count):
    position = torch.arange(count, dtype=torch.float32)
    if kind == "sink":
        return 12.0 * (position == 0)
    if kind == "hot_key":
        return 10.0 * (position == 143)
    if kind == "ramp_up":
        return 19.7 * position / count
    if kind == "ramp_down":
        return 19.7 * (1 - position / count)
    if kind == "jumps":  # n > 60 twice: the tiles stand 95 nats apart, the last visited highest
        return 95.0 * (2 - position // 128)
    if kind == "drop":  # n far below 0, then clamped at -119
        return -95.0 * (2 - position // 128)
    if kind == "one_jump_inside":
        return 80.0 * (position == 60)
    raise ValueError(kind)


@pytest.mark.parametrize("options", [{}, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize(
    "kind", ["sink", "hot_key", "ramp_up", "ramp_down", "jumps", "drop", "one_jump_inside"]
)
def test_contract_logits(device, kind, options):
    """§3.3: the integer tile exponent, its clamp and the slow path, on full and on cut tiles."""
    problem = normal_problem(150, 300, device=device)
    problem = add_logits(problem, _key_values(kind, 300))
    assert_contract(attend(problem, **options), oracle(problem, **options))


def _scale_tokens(x, powers):
    return x * torch.exp2(powers.to(x)).view(1, -1, 1, 1)


@pytest.mark.parametrize(
    "options", [{}, CAUSAL, {"window_size": (70, 20)}], ids=["full", "causal", "window"]
)
@pytest.mark.parametrize("kind", ["tokens", "channels", "tiny", "huge", "zeros", "weights"])
def test_contract_values(device, kind, options):
    """V and dO of widely different magnitudes: token scales folded into P, scale bytes at both ends."""
    problem = normal_problem(140, 260, head_dim=32, device=device)
    generator = torch.Generator().manual_seed(5)
    if kind == "tokens":
        powers = torch.randint(-20, 20, (260,), generator=generator)
        problem = problem._replace(
            v=_scale_tokens(problem.v, powers), dout=_scale_tokens(problem.dout, powers[:140])
        )
    elif kind == "channels":
        powers = torch.randint(-9, 9, (32,), generator=generator).to(device)
        problem = problem._replace(
            v=problem.v * torch.exp2(powers), k=problem.k * torch.exp2(powers / 4)
        )
    elif kind == "tiny":
        problem = problem._replace(v=problem.v * 2.0**-110, dout=problem.dout * 2.0**-60)
    elif kind == "huge":
        problem = problem._replace(v=problem.v * 2.0**60, dout=problem.dout * 2.0**40)
    elif kind == "weights":  # tiny P on huge V: n = -86 and -43 carry as much of O as n = 0
        tile = torch.arange(260) // TILE
        problem = add_logits(problem, (tile - 2) * 43 * math.log(2))
        problem = problem._replace(v=_scale_tokens(problem.v, (2 - tile) * 43 - 43))
    else:
        v, k, q = problem.v.clone(), problem.k.clone(), problem.q.clone()
        v[:, 32:80], k[:, 100:140], q[:, 7] = 0.0, 0.0, 0.0
        problem = problem._replace(q=q, k=k, v=v)
    assert_contract(attend(problem, **options), oracle(problem, **options))


@pytest.mark.parametrize("options", [{}, CAUSAL], ids=["full", "causal"])
def test_contract_scale_blocks_along_the_channels(device, options):
    """§4: which copy of Q, K, V and dO enters a product: rowwise scales lose small channels, colwise do not.

    Power-of-two scales hardly change a rounding, so only channels that differ by more than E4M3's
    range tell the copies apart; each channel is compared in its own units.
    """
    problem = normal_problem(140, 260, heads=2, heads_k=1, head_dim=32, device=device)
    unit = torch.exp2(torch.randint(-10, 11, (32,), generator=torch.Generator().manual_seed(5)))
    up, down = unit.to(device), 1 / unit.to(device)
    problem = Problem(problem.q * up, problem.k * down, problem.v * up, problem.dout * down)
    got, want = attend(problem, **options), oracle(problem, **options)
    units = {"out": down, "lse": torch.ones(1), "dq": up, "dk": down, "dv": up, "slack": down}
    got, want = (
        Result(*(None if t is None else t * units[name] for name, t in result._asdict().items()))
        for result in (got, want)
    )
    assert_contract(got, want)


@pytest.mark.parametrize("options", [{}, CAUSAL], ids=["full", "causal"])
def test_contract_scale_blocks_of_p_and_ds(device, options):
    """§4: P has a scale per key, so dV of unlikely keys is precise; dS one for 32 keys, so dK of them is 0."""
    problem = normal_problem(150, 300, head_dim=32, device=device)
    unlikely = torch.arange(300) % 2 == 1
    problem = add_logits(problem, -16.0 * unlikely)
    got, want = attend(problem, **options), oracle(problem, **options)
    assert_contract(got, want)
    compare.assert_close(got.dv, want.dv, "dv", row=tol.FLIP_ROW)
    assert (want.dv[:, unlikely] != 0).any(-1).all()
    assert (want.dk[:, unlikely] == 0).all() and (got.dk[:, unlikely] == 0).all()


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("options", [CAUSAL, {"window_size": (60, 0)}], ids=["causal", "window"])
def test_contract_poisoned_tokens(device, value, options):
    """§1, §3: NaN stands in exactly the rows and channels that the oracle says, O and LSE apart."""
    problem = normal_problem(300, head_dim=32, device=device)
    k, v = problem.k.clone(), problem.v.clone()
    v[0, 70, 0, 3], k[0, 200, 0, 9] = value, value
    problem = problem._replace(k=k, v=v)
    got = famx.flash_attn_func(*problem[:3], return_lse=True, **options)
    want = reference.attention_forward(
        *problem.to("cpu")[:3],
        causal=options.get("causal", False),
        window=options.get("window_size", (-1, -1)),
    )
    assert want.out.isnan().any() and not want.out.isnan().all()
    compare.assert_close(
        got[0],
        want.out,
        "out",
        row=tol.CONTRACT_O_ROW,
        median=tol.CONTRACT_O_MEDIAN,
        slack=want.slack,
    )
    compare.assert_close(got[1], want.lse, "lse", atol=tol.CONTRACT_LSE)


# ---- stored bytes ------------------------------------------------------------------------------


def _operand(kind, dtype):
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(2, 77, 3, 72, generator=generator)
    if kind == "wide":
        x = x * torch.exp2(torch.randint(-30, 30, x.shape, generator=generator))
    elif kind == "bits":  # every fp32 pattern alike: subnormals, NaN, Inf
        bits = torch.randint(-(2**31), 2**31, x.shape, generator=generator)
        x = bits.to(torch.int32).view(torch.float32)
        x[:, ::5] = torch.where(torch.isfinite(x[:, ::5]), x[:, ::5], 1.0)
    elif kind == "zeros":
        x[:, 10:50] = 0.0
        x[:, 60:, :, 32:] = -0.0
    elif kind == "ties":  # on the midpoints of E4M3 and on the edges of the scale rule
        x = torch.randint(-256, 257, x.shape, generator=generator) * 1.75
    elif kind == "poison":
        x[0, 5, 1, 40], x[1, 70, 2, 3], x[1, 20, 0, 0] = NAN, INF, -INF
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("axis", ["rowwise", "colwise", "tokenwise"])
@pytest.mark.parametrize("kind", ["normal", "wide", "bits", "zeros", "ties", "poison"])
def test_contract_bytes(device, kind, axis, dtype):
    """§1: payload and scale bytes of Q, K, V and dO are those of the oracle, on every axis."""
    x = _operand(kind, dtype)
    got, want = famx.quantize_mxfp8(x.to(device), axis=axis), reference.quantise(x, axis)
    compare.assert_equal_bits(got.scale.view(torch.uint8), want.scale, f"{axis} scale")
    compare.assert_equal_bits(got.data.view(torch.uint8), want.payload, f"{axis} payload")


def test_contract_bytes_packed(device):
    """§1: colwise blocks of a packed batch are those of each sequence; unused rows hold 127."""
    cu = [0, 37, 37, 69, 70, 200]
    x = torch.randn(200, 2, 40, generator=torch.Generator().manual_seed(3))
    offsets = torch.tensor(cu, dtype=torch.int32, device=device)
    got = famx.quantize_mxfp8(x.to(device), axis="colwise", cu_seqlens=offsets)
    scale = torch.full((200 // 32 + 5, 2, 40), 127, dtype=torch.uint8)
    payload = torch.zeros(200, 2, 40, dtype=torch.uint8)
    for b, (start, stop) in enumerate(zip(cu, cu[1:], strict=False)):
        want = reference.quantise(x[None, start:stop], "colwise")
        payload[start:stop] = want.payload[0]
        row = start // 32 + b
        scale[row : row + want.scale.shape[1]] = want.scale[0]
    compare.assert_equal_bits(got.scale.view(torch.uint8), scale, "scale")
    compare.assert_equal_bits(got.data.view(torch.uint8), payload, "payload")


# ---- quality -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, CAUSAL], ids=["full", "causal"])
def test_quality_normal_data(device, options):
    """O, dQ, dK, dV against float64 on standard normal data, D=128, S=2048."""
    problem = normal_problem(2048, head_dim=128, device=device)
    got, want = attend(problem, **options), exact(problem, **options)
    compare.assert_close(got.out, want.out, "out", frobenius=tol.QUALITY_O)
    compare.assert_close(got.dq, want.dq, "dq", frobenius=tol.QUALITY_DQ)
    compare.assert_close(got.dk, want.dk, "dk", frobenius=tol.QUALITY_DK)
    compare.assert_close(got.dv, want.dv, "dv", frobenius=tol.QUALITY_DV)


def backward_op(problem, out, lse, softmax_scale):
    """torch.ops.flash_attn_mx.bwd on freshly quantised operands, no mask. Returns dq, dk, dv."""

    def operand(x, axis):
        mx = famx.quantize_mxfp8(x, axis=axis)
        return mx.data, mx.scale

    q, k, v, dout = problem
    return torch.ops.flash_attn_mx.bwd(
        dout, out, lse,
        *operand(dout, "rowwise"), *operand(dout, "colwise"),
        *operand(q, "rowwise"), *operand(q, "colwise"),
        *operand(k, "rowwise"), *operand(k, "colwise"),
        *operand(v, "tokenwise"),
        None, None, q.shape[1], k.shape[1], softmax_scale, -1, -1, True, [True, True, True],
    )  # fmt: skip


@pytest.mark.parametrize("bits", [0, 6, 40])
def test_quality_dv_where_every_p_is_small(device, bits):
    """Long context: with every P 2^6 (2^40) smaller, dV keeps its relative precision.

    A context 2^6 times longer raises LSE by 6·ln 2 and leaves everything else; a constant scale of P
    gives .19 here.
    """
    problem = normal_problem(2048, head_dim=128, device=device)
    out, lse = famx.flash_attn_func(*problem[:3], return_lse=True)
    shift = bits * torch.log(torch.tensor(2.0, dtype=torch.float64))
    raised = (lse.double() + shift.to(lse.device)).float()
    _, _, dv = backward_op(problem, out, raised, 128**-0.5)
    want = exact(problem).dv * 2.0**-bits
    compare.assert_close(dv, want, "dv", frobenius=tol.QUALITY_DV)


def _dequantised(problem):
    """The problem that the products see: q, k rowwise, v colwise, rounded to MXFP8."""
    axes = ("rowwise", "rowwise", "colwise")
    q, k, v = (
        famx.dequantize(famx.quantize_mxfp8(t, axis=axis))
        for t, axis in zip(problem[:3], axes, strict=True)
    )
    return Problem(q, k, v, problem.dout)


@pytest.mark.parametrize(
    "kind, bound",
    [
        ("normal", tol.P_ONLY_NORMAL),
        ("sink 12", tol.P_ONLY_SINK_12),
        ("sink 16", tol.P_ONLY_SINK_16),
        ("one key 10", tol.P_ONLY_ONE_KEY_10),
        ("ramp 20", tol.P_ONLY_RAMP_20),
    ],
)
def test_quality_of_p_under_uneven_logits(device, kind, bound):
    """P's own error with S=4096 keys: sinks and hot keys may not cost more than the contract says."""
    count = 4096
    problem = normal_problem(256, count, head_dim=128, device=device)
    position = torch.arange(count)
    per_key = {
        "normal": torch.zeros(count),
        "sink 12": 12.0 * (position == 0),
        "sink 16": 16.0 * (position == 0),
        "one key 10": 10.0 * (position == 1234),
        "ramp 20": 20.0 * position / count,
    }[kind]
    problem = add_logits(problem, per_key)
    out = famx.flash_attn_func(*problem[:3])
    want, _ = reference.attention_fp64(*_dequantised(problem).to("cpu")[:3])
    compare.assert_close(out, want, "out", frobenius=bound)
