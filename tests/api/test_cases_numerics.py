"""Cases of wrong numbers seen elsewhere: masked rows, extreme logits, poison, leaks, underflow.

Each test has the number of its case; q = k = 0 makes a row's output the mean of its visible values.
"""

import math

import compare
import pytest
import tolerances as tol
import torch
from problems import (
    Problem,
    attend,
    attend_packed,
    exact,
    normal_problem,
    oracle,
    pack,
    uniform_problem,
)

import flash_attn_mx as famx

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


# ---- masked rows, extreme logits ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_c01_rows_that_see_no_key_are_empty(device, packed, dtype):
    """C01: O = 0 and LSE = -inf exactly, no finite LSE, no leftovers of an earlier tile."""
    problem = uniform_problem(5, [1.0, 3.0], batch=2, dtype=dtype, device=device)
    if packed:
        flat = Problem(*(t.flatten(0, 1) for t in problem))
        result = attend_packed(flat, [0, 5, 10], [0, 2, 4], causal=True)
        out, lse = result.out.unflatten(0, (2, 5)), result.lse.unflatten(1, (2, 5)).transpose(0, 1)
    else:
        out, lse, *_ = attend(problem, causal=True)
    rows = torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0]).view(1, 5, 1, 1).expand(2, 5, 1, 32)
    compare.assert_close(out, rows, "out", atol=0.0)
    want = torch.tensor([-INF, -INF, -INF, 0.0, math.log(2)]).view(1, 1, 5).expand(2, 1, 5)
    compare.assert_close(lse, want, "lse", atol=tol.FP32_EXACT)


def test_c01_last_tile_of_queries_sees_keys_first_does_not(device):
    """C01: 300 queries on 40 keys: two whole query tiles that see nothing, and one that is cut."""
    problem = normal_problem(300, 40, batch=2, heads=2, device=device)
    result = attend(problem, causal=True)
    assert (result.out[:, :260] == 0).all() and (result.lse[..., :260] == -INF).all()
    assert (result.dq[:, :260] == 0).all()
    assert torch.isfinite(result.lse[..., 260:]).all() and (result.out[:, 260:] != 0).any(-1).all()


def test_c02_masked_rows_add_nothing_to_gradients(device):
    """C02: dQ of an empty row is 0, and dK, dV do not move with that row's dO."""
    problem = uniform_problem(5, [1.0, 3.0], batch=2, device=device)
    result = attend(problem, causal=True)
    assert (result.dq[:, :3] == 0).all()
    for grad in (result.dq, result.dk, result.dv):
        assert torch.isfinite(grad).all()
    want = torch.tensor([1.5, 0.5]).view(1, 2, 1, 1).expand(2, 2, 1, 32)
    compare.assert_close(result.dv, want, "dv", atol=tol.FP32_EXACT)
    dout = problem.dout.clone()
    dout[:, :3] = -2.0
    other = attend(problem._replace(dout=dout), causal=True)
    for name in ("dq", "dk", "dv"):
        compare.assert_equal_bits(getattr(other, name), getattr(result, name), name)


@pytest.mark.parametrize("causal", [False, True])
def test_c03_logits_far_below_zero(device, causal):
    """C03: no finite stand-in for minus infinity: every logit is -61952."""
    problem = uniform_problem(64, torch.arange(64.0) % 16, device=device)
    problem = problem._replace(q=problem.q + 44, k=problem.k - 44)
    result = attend(problem, softmax_scale=1.0, causal=causal)
    count = torch.arange(1.0, 65.0) if causal else torch.full((64,), 64.0)
    compare.assert_close(result.lse[0, 0], -61952 + count.log(), "lse", atol=2.0**-8)
    want = (torch.arange(64.0) % 16).cumsum(0) / count if causal else torch.full((64,), 7.5)
    want = want.view(1, 64, 1, 1).expand(1, 64, 1, 32)
    compare.assert_close(result.out, want, "out", row=tol.FP32_EXACT)
    for grad in (result.dq, result.dk, result.dv):
        assert torch.isfinite(grad).all()


def test_c03_values_that_are_not_exact(device):
    """C03 as reported: V[j] = j, so the mean is 31.5 within E4M3's rounding."""
    problem = uniform_problem(3, torch.arange(64.0), device=device)
    problem = problem._replace(q=problem.q + 44, k=problem.k - 44)
    out, lse = famx.flash_attn_func(*problem[:3], softmax_scale=1.0, return_lse=True)
    compare.assert_close(out, torch.full_like(out, 31.5), "out", row=tol.E4M3_STEP / 2)
    compare.assert_close(lse, torch.full_like(lse, -61947.84), "lse", atol=2.0**-7)


@pytest.mark.parametrize("first", [0.0, 1.0])
@pytest.mark.parametrize("hot", [0, 63])
@pytest.mark.parametrize("causal", [False, True])
def test_c04_one_logit_far_above_the_others(device, first, hot, causal):
    """C04: 2048 against 0: the row maximum is subtracted before the exponential."""
    problem = uniform_problem(64, torch.arange(64.0) + first, head_dim=64, device=device)
    k = problem.k.clone()
    k[:, hot] = 16.0
    problem = problem._replace(q=problem.q + 16, k=k)
    result = attend(problem, causal=causal)
    assert float(result.lse[0, 0, 63]) == 2048.0
    exact_v = problem.v[0, hot].to(torch.float8_e4m3fn).float()
    compare.assert_close(result.out[0, 63], exact_v, "out", row=tol.E4M3_STEP)
    if hot == 0:
        compare.assert_close(result.lse, torch.full_like(result.lse, 2048.0), "lse", atol=0.0)
    for grad in (result.dq, result.dk, result.dv):
        assert torch.isfinite(grad).all()


@pytest.mark.parametrize("softmax_scale", [None, 0.15, 0.16, 0.18, 0.19])
@pytest.mark.parametrize("causal", [False, True])
def test_c05_diverged_model(device, causal, softmax_scale):
    """C05: |q|, |k| = 5e8: everything stays finite, since fp32 attention does not overflow there.

    Logits of 1e18 differ from their LSE by rounding alone, up to 2^37; these scales round it down.
    """
    problem = normal_problem(4, head_dim=64, device=device)
    generator = torch.Generator().manual_seed(0)

    def signs():
        return torch.randint(0, 2, (1, 4, 1, 64), generator=generator).to(device) * 2.0 - 1

    q, k = 5e8 * signs(), 5e8 * signs()
    for p in (problem._replace(q=q, k=k), problem._replace(q=q, k=q)):
        p = p._replace(dout=torch.ones_like(q))
        result = attend(p, causal=causal, softmax_scale=softmax_scale)
        for name in ("out", "lse", "dq", "dk", "dv"):
            assert torch.isfinite(getattr(result, name)).all(), name


@pytest.mark.parametrize("causal", [False, True])
def test_c06_rows_past_the_packed_total_are_never_read(device, causal):
    """C06: 37 tokens in buffers of 128 rows: NaN in the rest changes no bit of O, LSE, dQ, dK, dV."""
    clean = normal_problem(128, heads=2, heads_k=1, device=device)
    clean = Problem(*(t[0].clone() for t in clean))
    for t in clean:
        t[37:] = 0.0
    dirty = Problem(*(t.clone() for t in clean))
    for t in dirty:
        t[37:] = NAN
    cu = [0, 20, 37]
    want, got = attend_packed(clean, cu, causal=causal), attend_packed(dirty, cu, causal=causal)
    for name in ("out", "dq", "dk", "dv"):
        compare.assert_equal_bits(getattr(got, name)[:37], getattr(want, name)[:37], name)
        assert torch.isfinite(getattr(got, name)[:37]).all() and getattr(got, name)[:37].any()
    compare.assert_equal_bits(got.lse[:, :37], want.lse[:, :37], "lse")


# ---- log-sum-exp -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_c10_lse_is_natural_and_fp32(device, dtype):
    """C10: ln 8 = 2.07944, not log2 8 = 3."""
    problem = uniform_problem(2, torch.ones(8), dtype=dtype, device=device)
    _, lse = famx.flash_attn_func(*problem[:3], return_lse=True)
    assert lse.dtype == torch.float32 and lse.shape == (1, 1, 2)
    compare.assert_close(lse, torch.full_like(lse, 2.0794415), "lse", atol=tol.FP32_EXACT)


def test_c10_partial_results_merge_by_the_natural_log_rule(device):
    """C10: two unequal parts weighted by exp(LSE) give the unsplit row; another base does not."""
    values = torch.cat([torch.full((40,), 1.0), torch.full((88,), 4.0)])
    whole = uniform_problem(3, values, device=device)
    out, lse = famx.flash_attn_func(*whole[:3], return_lse=True)
    parts = []
    for keys in (slice(0, 40), slice(40, 128)):
        part = famx.flash_attn_func(whole.q, whole.k[:, keys], whole.v[:, keys], return_lse=True)
        parts.append(part)
    merged_lse = torch.logaddexp(parts[0][1], parts[1][1])
    weights = [torch.exp(p[1] - merged_lse).transpose(1, 2).unsqueeze(-1) for p in parts]
    merged = sum(w * p[0] for w, p in zip(weights, parts, strict=True))
    compare.assert_close(merged_lse, lse, "lse", atol=tol.FP32_EXACT)
    compare.assert_close(merged, out, "out", row=tol.FP32_EXACT)


def test_c10_merge_on_normal_data(device):
    """C10: LSE is the true softmax sum, so merged halves err no more than the unsplit result."""
    problem = normal_problem(40, 300, head_dim=64, device=device)
    parts = [
        famx.flash_attn_func(problem.q, problem.k[:, at], problem.v[:, at], return_lse=True)
        for at in (slice(0, 170), slice(170, 300))
    ]
    merged_lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(p[0] * torch.exp(p[1] - merged_lse).transpose(1, 2).unsqueeze(-1) for p in parts)
    want = exact(problem)
    compare.assert_close(merged, want.out, "out", frobenius=0.06)
    _, lse = famx.flash_attn_func(*problem[:3], return_lse=True)
    compare.assert_close(merged_lse, lse, "lse", atol=tol.CONTRACT_LSE)


# ---- leaks and poison --------------------------------------------------------------------------


@pytest.mark.parametrize("last", [2.0**20, NAN, INF, -INF], ids=str)
def test_c50_last_value_does_not_reach_earlier_rows(device, last):
    """C50 as reported: a scale shared by 32 keys turns row 0 from 0.3125 into 0."""
    clean = uniform_problem(32, torch.full((32,), 0.3), device=device)
    v = clean.v.clone()
    v[0, 31] = last
    want = famx.flash_attn_func(*clean[:3], causal=True, return_lse=True)
    got = famx.flash_attn_func(clean.q, clean.k, v, causal=True, return_lse=True)
    compare.assert_equal_bits(got[0][:, :31], want[0][:, :31], "out")
    compare.assert_equal_bits(got[1][..., :31], want[1][..., :31], "lse")
    compare.assert_close(want[0], torch.full_like(want[0], 0.3), "out", row=tol.E4M3_STEP)
    assert not torch.equal(got[0][:, 31], want[0][:, 31])


@pytest.mark.parametrize("value", [2.0**20, NAN, INF], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("seqlen_q, seqlen_k", [(300, 300), (140, 300)])
def test_c50_future_tokens_change_no_bit(device, seqlen_q, seqlen_k, packed, value):
    """C50 on normal data: everything after token t replaced, K and V; rows up to t stay as they are."""
    problem = normal_problem(
        seqlen_q, seqlen_k, heads=2, heads_k=1, dtype=torch.bfloat16, device=device
    )

    def run(p):
        if not packed:
            return famx.flash_attn_func(*p[:3], causal=True, return_lse=True)
        cu = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (seqlen_q, seqlen_k)]
        flat = (t[0] for t in p[:3])
        out, lse = famx.flash_attn_varlen_func(
            *flat, *cu, seqlen_q, seqlen_k, causal=True, return_lse=True
        )
        return out[None], lse[None]

    want = run(problem)
    for t in (seqlen_k - seqlen_q + 1, 170, 191, 192, 255, 256, 299):
        k, v = problem.k.clone(), problem.v.clone()
        k[:, t:], v[:, t:] = value, value
        got = run(problem._replace(k=k, v=v))
        rows = t - (seqlen_k - seqlen_q)
        compare.assert_equal_bits(got[0][:, :rows], want[0][:, :rows], f"out, t={t}")
        compare.assert_equal_bits(got[1][..., :rows], want[1][..., :rows], f"lse, t={t}")


@pytest.mark.parametrize("value", [2.0**20, NAN, -INF], ids=str)
@pytest.mark.parametrize("window", [(50, 0), (129, 20), (0, 0), (10, -1)], ids=str)
def test_c50_evicted_tokens_change_no_bit(device, window, value):
    """C50 for windows: a token left or right of the window is as if it were not there."""
    problem = normal_problem(300, head_dim=32, device=device)
    want = famx.flash_attn_func(*problem[:3], window_size=window, return_lse=True)
    evicted = 0
    for t in (0, 31, 140, 299):
        k, v = problem.k.clone(), problem.v.clone()
        k[:, t], v[:, t] = value, value
        got = famx.flash_attn_func(problem.q, k, v, window_size=window, return_lse=True)
        rows = torch.arange(300)
        sees = (t >= rows - window[0]) & ((t <= rows + window[1]) | (window[1] < 0))
        hidden = ~sees
        evicted += int(hidden.sum())
        compare.assert_equal_bits(got[0][:, hidden], want[0][:, hidden], f"out, t={t}")
        compare.assert_equal_bits(got[1][..., hidden], want[1][..., hidden], f"lse, t={t}")
        assert sees.any() and not torch.equal(got[0][:, sees], want[0][:, sees])
    assert evicted > 300


def test_c50_other_sequences_and_heads_change_no_bit(device):
    """C50: poison in one sequence or head stays there, in the gradients too."""
    problems = [normal_problem(n, heads=2, device=device, seed=n) for n in (40, 50, 33)]
    packed, cu, _ = pack(problems)
    want = attend_packed(packed, cu, causal=True)
    v = packed.v.clone()
    v[cu[1] : cu[2], 0] = NAN
    got = attend_packed(packed._replace(v=v), cu, causal=True)
    untouched = torch.ones_like(want.out, dtype=torch.bool)
    untouched[cu[1] : cu[2], 0] = False
    for name in ("out", "dq", "dk", "dv"):
        left, right = getattr(got, name)[untouched], getattr(want, name)[untouched]
        compare.assert_equal_bits(left, right, name)
    assert got.out[~untouched].isnan().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("what", ["q row", "all of k", "half a row of q", "half of k", "v", "dout"])
def test_c52_zero_blocks(device, what, causal):
    """C52: a zero block has payload 0 and a finite scale; O is the mean of V, gradients finite."""
    problem = normal_problem(2, head_dim=64, device=device)
    problem = problem._replace(
        v=torch.tensor([1.0, 3.0], device=device).view(1, 2, 1, 1).expand(1, 2, 1, 64)
    )
    q, k, v, dout = (t.clone() for t in problem)
    if what == "q row":
        q[0, 0] = 0.0
    elif what == "all of k":
        k.zero_()
    elif what == "half a row of q":
        q[0, 0, :, :32] = 0.0
    elif what == "half of k":
        k[..., 32:] = 0.0
    elif what == "v":
        v.zero_()
    else:
        dout.zero_()
    problem = Problem(q, k, v, dout)
    for x in problem:
        for axis in ("rowwise", "colwise", "tokenwise"):
            mx = famx.quantize_mxfp8(x, axis=axis)
            assert (mx.scale.view(torch.uint8) != 255).all()
            assert (mx.data.view(torch.uint8)[x == 0] == 0).all()
    result = attend(problem, causal=causal)
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert torch.isfinite(getattr(result, name)).all(), name
    if what == "q row" and not causal or what == "all of k":
        row = 1 if causal else 0
        compare.assert_close(
            result.out[0, row], torch.full((1, 64), 2.0), "out", atol=tol.FP32_EXACT
        )
        want = torch.tensor(math.log(2.0))
        compare.assert_close(result.lse[0, 0, row], want, "lse", atol=tol.FP32_EXACT)
    if what in ("v", "dout"):
        assert (result.dq == 0).all() and (result.dk == 0).all()


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_c55_nan_in_q_poisons_its_row_only(device, value, causal):
    """C55: the NaN is never lost, and row 1 does not notice."""
    problem = normal_problem(2, head_dim=64, device=device)
    want = famx.flash_attn_func(*problem[:3], causal=causal, return_lse=True)
    q = problem.q.clone()
    q[0, 0, 0, 5] = value
    scale = famx.quantize_mxfp8(q, axis="rowwise").scale.view(torch.uint8)
    assert (scale == 255).flatten().tolist() == [True, False, False, False]
    out, lse = famx.flash_attn_func(q, *problem[1:3], causal=causal, return_lse=True)
    assert out[0, 0].isnan().all() and lse[0, 0, 0].isnan()
    compare.assert_equal_bits(out[0, 1], want[0][0, 1], "out")
    compare.assert_equal_bits(lse[0, 0, 1], want[1][0, 0, 1], "lse")


@pytest.mark.parametrize("where", ["k", "v", "dout"])
@pytest.mark.parametrize("causal", [False, True])
def test_c55_nan_is_never_lost(device, where, causal):
    """C55: a NaN that a row sees shows in that row's O, or in the gradients that dO reaches."""
    problem = normal_problem(40, head_dim=64, device=device)
    poisoned = {name: t.clone() for name, t in problem._asdict().items()}
    poisoned[where][0, 20, 0, 5] = NAN
    result = attend(Problem(**poisoned), causal=causal)
    first = 20 if causal else 0
    if where == "dout":
        assert torch.isfinite(result.out).all()
        assert result.dq[0, 20].isnan().all() and result.dv[0, :20, :, 5].isnan().all()
    else:
        assert result.out[0, first:, :, 5].isnan().all()
        assert torch.isfinite(result.out[0, :first]).all()
        assert result.dq[0, first:].isnan().all()


# ---- underflow and overflow --------------------------------------------------------------------


@pytest.mark.parametrize("hot", [0, 100, 4095])
def test_c66_many_small_weights(device, hot):
    """C66: one key at 0, 4095 at -7: the small ones hold 79 % of the sum and may not vanish."""
    q = torch.zeros(1, 3, 1, 64, device=device)
    k = torch.zeros(1, 4096, 1, 64, device=device)
    q[..., 0], k[..., 0] = 1.0, -7.0
    k[:, hot] = 0.0
    v = torch.ones_like(k)
    out, lse = famx.flash_attn_func(q, k, v, softmax_scale=1.0, return_lse=True)
    compare.assert_close(out, torch.ones_like(out), "out", atol=tol.ONES_V)
    want = torch.full_like(lse, math.log(1 + 4095 * math.exp(-7)))
    compare.assert_close(lse, want, "lse", atol=tol.FP32_EXACT + tol.exp2_error())


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (300, 40)}], ids=str)
@pytest.mark.parametrize("kind", ["normal", "sink", "last", "ramp up", "ramp down", "peaked"])
def test_c66_ones_return_ones(device, kind, options):
    """C66, the standing test: the weights of a row add up to 1, whatever the logits."""
    problem = normal_problem(500, head_dim=64, device=device)
    k = problem.k.clone()
    position = torch.arange(500.0, device=device)
    if kind == "peaked":
        k = k * 3
    else:
        offset = {
            "normal": 0 * position,
            "sink": 12.0 * (position == 0),
            "last": 9.0 * (position == 499),
            "ramp up": position / 25,
            "ramp down": -position / 25,
        }[kind]
        k[..., 0] = offset.view(1, -1, 1)
    q = problem.q.clone()
    q[..., 0] = 8.0
    out = famx.flash_attn_func(q, k, torch.ones_like(problem.v), **options)
    # A row with few comparable keys has no averaging: its p may all err the same way.
    compare.assert_close(out, torch.ones_like(out), "out", atol=tol.E4M3_STEP)
    assert float((out - 1).abs().mean()) <= tol.ONES_V
    if kind == "normal" and not options:
        compare.assert_close(out, torch.ones_like(out), "out", atol=tol.ONES_V)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("alternating", [False, True])
def test_c67_large_values_accumulate_in_fp32(device, alternating, causal, dtype):
    """C67: 1024 keys of V = ±3e4: no half-precision sum on the way."""
    v = torch.full((1, 1024, 1, 64), 3e4)
    if alternating:
        v[..., 1::2] *= -1
    v = v.to(device, dtype)
    q = torch.zeros(1, 140, 1, 64, device=device, dtype=dtype)
    out = famx.flash_attn_func(q, torch.zeros_like(v), v, causal=causal)
    compare.assert_close(out, v[:, :140], "out", row=tol.E4M3_STEP)


# ---- large heads, long rows --------------------------------------------------------------------


def test_c64_head_dim_256(device):
    """C64: D=256 with 16 query heads per kv head is served correctly, every element."""
    problem = normal_problem(
        512, heads=32, heads_k=2, head_dim=256, dtype=torch.bfloat16, device=device
    )
    out, lse = famx.flash_attn_func(*problem[:3], causal=True, return_lse=True)
    want = exact(Problem(problem.q, problem.k, problem.v, problem.dout), causal=True)
    compare.assert_close(out, want.out, "out", row=0.35, frobenius=tol.QUALITY_O)
    compare.assert_close(lse, want.lse, "lse", atol=0.2)


@pytest.mark.parametrize("heads, heads_k", [(2, 1), (3, 3)])
def test_c64_head_dim_256_contract(device, heads, heads_k):
    """C64 against the oracle, forward and backward."""
    problem = normal_problem(40, 140, heads=heads, heads_k=heads_k, head_dim=256, device=device)
    got, want = attend(problem, causal=True), oracle(problem, causal=True)
    compare.assert_close(got.out, want.out, "out", row=tol.CONTRACT_O_ROW, slack=want.slack)
    for name in ("dq", "dk", "dv"):
        compare.assert_close(
            getattr(got, name), getattr(want, name), name, frobenius=tol.CONTRACT_GRAD
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_c65_long_rows_in_every_output_dtype(device, dtype):
    """C65: 65536 keys, V = 1: O = 1 in the output's own format."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 64, 1, 128, generator=generator).to(device, dtype)
    k = torch.randn(1, 65536, 1, 128, generator=generator).to(device, dtype)
    out, lse = famx.flash_attn_func(q, k, torch.ones_like(k), return_lse=True)
    assert out.dtype == dtype
    compare.assert_close(out, torch.ones_like(out), "out", atol=tol.ONES_V)
    # ln 65536 plus half the variance of the logits, which is 1 for a row of average |q|
    assert ((lse - math.log(65536)).abs() < 1.5).all()
