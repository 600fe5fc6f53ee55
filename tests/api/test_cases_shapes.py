"""Cases of shapes, masks, layouts and sizes that went wrong elsewhere."""

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
    uniform_problem,
)

import flash_attn_mx as famx

INF = float("inf")


def assert_near_oracle(got, want):
    """All five results within the contract."""
    compare.assert_close(got.out, want.out, "out", row=tol.CONTRACT_O_ROW, slack=want.slack)
    compare.assert_close(got.lse, want.lse, "lse", atol=tol.CONTRACT_LSE)
    for name in ("dq", "dk", "dv"):
        bound = tol.CONTRACT_GRAD
        compare.assert_close(getattr(got, name), getattr(want, name), name, frobenius=bound)


def assert_same(got, want, names=("out", "lse", "dq", "dk", "dv")):
    for name in names:
        compare.assert_equal_bits(getattr(got, name), getattr(want, name), name)


# ---- head sizes and lengths --------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [72, 104])
def test_c07_every_column_of_dq(device, head_dim):
    """C07: a head size between two paddings: the last columns hold gradients, not stale data."""
    problem = normal_problem(512, heads=8, head_dim=head_dim, device=device)
    flat = Problem(*(t[0] for t in problem))
    got, want = attend_packed(flat, [0, 512], causal=True), exact(problem, causal=True)
    for name in ("dq", "dk", "dv"):
        error = getattr(got, name).double().cpu() - getattr(want, name)[0]
        ratio = error.flatten(0, 1).norm(dim=0) / getattr(want, name)[0].flatten(0, 1).norm(dim=0)
        assert ratio.shape == (head_dim,) and ratio.max() < tol.QUALITY_SMALL, f"{name}: {ratio}"
    compare.assert_close(got.out, want.out[0], "out", frobenius=tol.QUALITY_O)


@pytest.mark.parametrize("head_dim", [72, 104])
def test_c07_default_scale_uses_the_true_head_dim(device, head_dim):
    """C07: 72^-0.5 and not 96^-0.5."""
    problem = normal_problem(65, head_dim=head_dim, device=device)
    given = attend(problem, causal=True, softmax_scale=head_dim**-0.5)
    assert_same(attend(problem, causal=True), given)


@pytest.mark.parametrize("head_dim", [1, 5, 20, 33, 40, 80, 255])
def test_c08_any_head_dim_in_both_layers(device, head_dim):
    """C08: the function and the registered operator serve the same head sizes, alike."""
    problem = normal_problem(40, 70, heads=2, heads_k=1, head_dim=head_dim, device=device)
    got = attend(problem, causal=True)
    assert_near_oracle(got, oracle(problem, causal=True))

    def operand(x, axis):
        mx = famx.quantize_mxfp8(x, axis=axis)
        return mx.data, mx.scale

    out, lse = torch.ops.flash_attn_mx.fwd(
        *operand(problem.q, "rowwise"), *operand(problem.k, "rowwise"),
        *operand(problem.v, "colwise"), *operand(problem.v, "tokenwise"),
        None, None, 40, 70, head_dim**-0.5, -1, 0, torch.float32,
    )  # fmt: skip
    compare.assert_equal_bits(out, got.out, "out")
    compare.assert_equal_bits(lse, got.lse, "lse")


@pytest.mark.parametrize("head_dim", [0, 257, 512])
def test_c08_head_dim_out_of_range_raises(device, head_dim):
    """C08: above 256 both entries refuse before any work, with the rule in the message."""
    problem = normal_problem(3, head_dim=head_dim, device=device)
    with pytest.raises(ValueError, match=rf"head_dim.*256.*{head_dim}"):
        famx.flash_attn_func(*problem[:3])
    cu = torch.tensor([0, 3], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=rf"head_dim.*256.*{head_dim}"):
        famx.flash_attn_varlen_func(*(t[0] for t in problem[:3]), cu, cu, 3, 3)


LENGTHS = [1, 2, 31, 32, 33, 63, 65, 127, 129, 255, 257]


@pytest.mark.parametrize("seqlen_k", LENGTHS)
@pytest.mark.parametrize("seqlen_q", LENGTHS)
def test_c09_any_pair_of_lengths(device, seqlen_q, seqlen_k):
    """C09: no length needs a mask or padding from the caller."""
    causal = (LENGTHS.index(seqlen_q) + LENGTHS.index(seqlen_k)) % 2 == 0
    problem = normal_problem(seqlen_q, seqlen_k, head_dim=32, device=device, seed=seqlen_q)
    got, want = attend(problem, causal=causal), oracle(problem, causal=causal)
    if min(seqlen_q, seqlen_k) == 1:  # dS is a difference of equals there: compare with dO's size
        for name in ("dq", "dk"):
            compare.assert_close(getattr(got, name), getattr(want, name), name, atol=1e-5)
        names = ("dv",)
    else:
        names = ("dq", "dk", "dv")
    compare.assert_close(got.out, want.out, "out", row=tol.CONTRACT_O_ROW, slack=want.slack)
    compare.assert_close(got.lse, want.lse, "lse", atol=tol.CONTRACT_LSE)
    for name in names:
        bound = tol.CONTRACT_GRAD
        compare.assert_close(getattr(got, name), getattr(want, name), name, frobenius=bound)


# ---- mask corners ------------------------------------------------------------------------------


def rows_of(result):
    """Channel 0 of each row of a (1, Sq, 1, D) output; all channels must agree."""
    assert (result == result[..., :1]).all()
    return result[0, :, 0, 0]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_c12_causal_is_aligned_bottom_right(device, packed):
    """C12: two queries on five keys see four and five of them; the docstrings say so."""
    problem = uniform_problem(2, [1.0, 2.0, 4.0, 8.0, 16.0], device=device)
    if packed:
        out = attend_packed(Problem(*(t[0] for t in problem)), [0, 2], [0, 5], causal=True).out[
            None
        ]
    else:
        out = famx.flash_attn_func(*problem[:3], causal=True)
    compare.assert_close(rows_of(out), torch.tensor([3.75, 6.2]), "out", atol=8 * tol.FP32_EXACT)
    assert "bottom-right" in famx.flash_attn_func.__doc__
    assert "bottom-right" in famx.flash_attn_varlen_func.__doc__


def test_c13_window_does_not_count_the_current_token(device):
    """C13: left=1 with causal sees two tokens."""
    problem = uniform_problem(4, [1.0, 2.0, 4.0, 8.0], device=device)
    for options in ({"causal": True, "window_size": (1, -1)}, {"window_size": (1, 0)}):
        out = famx.flash_attn_func(*problem[:3], **options)
        want = torch.tensor([1.0, 1.5, 3.0, 6.0])
        compare.assert_close(rows_of(out), want, "out", atol=8 * tol.FP32_EXACT)
    out = famx.flash_attn_func(*problem[:3], window_size=(1, 1))
    want = torch.tensor([1.5, 7 / 3, 14 / 3, 6.0])
    compare.assert_close(rows_of(out), want, "out", atol=8 * tol.FP32_EXACT)
    out = famx.flash_attn_func(*problem[:3], window_size=(0, 0))
    compare.assert_close(rows_of(out), torch.tensor([1.0, 2.0, 4.0, 8.0]), "out", atol=0.0)


@pytest.mark.parametrize("seqlen", [4, 129, 300])
def test_c13_window_of_the_whole_past_is_causal(device, seqlen):
    """C13: left = S - 1 equals full causal bit for bit, and a window on both sides no mask at all."""
    problem = normal_problem(seqlen, heads=2, heads_k=1, head_dim=32, device=device)
    want = attend(problem, causal=True)
    assert_same(attend(problem, causal=True, window_size=(seqlen - 1, -1)), want)
    assert_same(attend(problem, window_size=(seqlen - 1, 0)), want)
    assert_same(attend(problem, window_size=(-1, 0)), want)
    assert_same(attend(problem, window_size=(10**9, 10**9)), attend(problem))


def test_c14_right_window_beyond_the_keys(device):
    """C14: a right window of 10 on two keys hides nothing from the first of four rows."""
    problem = uniform_problem(4, [1.0, 3.0], device=device)
    out = famx.flash_attn_func(*problem[:3], window_size=(-1, 10))
    compare.assert_close(rows_of(out), torch.full((4,), 2.0), "out", atol=tol.FP32_EXACT)
    out = famx.flash_attn_func(*problem[:3], window_size=(-1, 1))
    want = torch.tensor([0.0, 1.0, 2.0, 2.0])
    compare.assert_close(rows_of(out), want, "out", atol=tol.FP32_EXACT)


@pytest.mark.parametrize("window", [(-2, 0), (0, -2), (-1, -5)], ids=str)
def test_c13_negative_window_raises(device, window):
    """C13: only -1 means unlimited."""
    problem = uniform_problem(4, [1.0, 2.0, 4.0, 8.0], device=device)
    with pytest.raises(ValueError, match="window_size.*-1"):
        famx.flash_attn_func(*problem[:3], window_size=window)


@pytest.mark.parametrize("window", [3, (1,), (1, 2, 3), (1.5, 0), None, (True, 0)], ids=str)
def test_c13_malformed_window_raises(device, window):
    """C13: two ints, nothing else."""
    problem = uniform_problem(4, [1.0, 2.0, 4.0, 8.0], device=device)
    with pytest.raises(TypeError, match="window_size"):
        famx.flash_attn_func(*problem[:3], window_size=window)


# ---- empty inputs ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_c15_empty_batch(device, dtype):
    """C15: B = 0 gives empty results of the right shape, dtype and device, and empty gradients."""
    problem = normal_problem(16, 9, batch=0, heads=2, device=device, dtype=dtype)
    result = attend(problem, causal=True)
    assert result.out.shape == (0, 16, 2, 64) and result.out.dtype == dtype
    assert result.lse.shape == (0, 2, 16) and result.lse.dtype == torch.float32
    assert result.out.device == result.lse.device == problem.q.device
    assert [g.shape for g in (result.dq, result.dk, result.dv)] == [t.shape for t in problem[:3]]


def test_c15_packed_without_sequences(device):
    """C15: cu = [0]: no sequence at all, with and without tokens in the buffers."""
    for tokens in (0, 7):
        problem = Problem(*(t[0] for t in normal_problem(tokens, heads=2, device=device)))
        result = attend_packed(problem, [0])
        assert result.out.shape == (tokens, 2, 64) and result.lse.shape == (2, tokens)
        assert (result.out == 0).all() and (result.lse == -INF).all()
        assert all((g == 0).all() for g in (result.dq, result.dk, result.dv))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_c16_no_keys_or_no_queries(device, packed, causal):
    """C16: Sk = 0 gives O = 0, LSE = -inf, dQ = 0; Sq = 0 gives dK = dV = 0."""
    for seqlen_q, seqlen_k in ((3, 0), (0, 3), (0, 0)):
        problem = normal_problem(seqlen_q, seqlen_k, batch=2, heads=2, device=device)
        if packed:
            cu_q, cu_k = ([0, n, 2 * n] for n in (seqlen_q, seqlen_k))
            flat = Problem(*(t.flatten(0, 1) for t in problem))
            result = attend_packed(flat, cu_q, cu_k, causal=causal)
            assert result.lse.shape == (2, 2 * seqlen_q)
        else:
            result = attend(problem, causal=causal)
            flat = problem
            assert result.lse.shape == (2, 2, seqlen_q)
        assert result.out.shape == flat.q.shape and (result.out == 0).all()
        assert (result.lse == -INF).all()
        for grad, x in zip((result.dq, result.dk, result.dv), flat[:3], strict=True):
            assert grad.shape == x.shape and (grad == 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_c17_segment_without_queries(device, causal):
    """C17: keys that no query belongs to get zero gradients; the rest is the dense result."""
    problem = normal_problem(3, 5, heads=2, device=device)
    problem = problem._replace(dout=torch.ones_like(problem.dout))
    flat = Problem(*(t[0] for t in problem))
    result = attend_packed(flat, [0, 3, 3], [0, 2, 5], causal=causal)
    assert (result.dk[2:] == 0).all() and (result.dv[2:] == 0).all()
    dense = Problem(problem.q, problem.k[:, :2], problem.v[:, :2], problem.dout)
    want = attend(dense, causal=causal)
    compare.assert_equal_bits(result.out, want.out[0], "out")
    compare.assert_equal_bits(result.lse, want.lse[0], "lse")
    compare.assert_equal_bits(result.dq, want.dq[0], "dq")
    compare.assert_equal_bits(result.dk[:2], want.dk[0], "dk")
    compare.assert_equal_bits(result.dv[:2], want.dv[0], "dv")


# ---- cu_seqlens --------------------------------------------------------------------------------


def _offsets(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


BAD_OFFSETS = {
    # name: (cu_q, cu_k, max_q, max_k, error, pattern)
    "int64": (
        _offsets([0, 5, 10], torch.int64),
        None,
        5,
        5,
        TypeError,
        "cu_seqlens_q.*int32.*int64",
    ),
    "float": (None, _offsets([0, 5, 10], torch.float32), 5, 5, TypeError, "cu_seqlens_k.*int32"),
    "list": ([0, 5, 10], None, 5, 5, TypeError, "cu_seqlens_q.*list"),
    "two_dim": (_offsets([[0, 5, 10]]), None, 5, 5, ValueError, "cu_seqlens_q"),
    "no_entry": (_offsets([]), _offsets([]), 5, 5, ValueError, "cu_seqlens_q"),
    "unequal": (None, _offsets([0, 10]), 5, 10, ValueError, "cu_seqlens_k.*3.*2"),
    "decreasing": (_offsets([0, 7, 5]), None, 7, 5, ValueError, "cu_seqlens_q.*decrease"),
    "past_end": (None, _offsets([0, 5, 11]), 5, 6, ValueError, "cu_seqlens_k.*10.*11"),
    "first": (_offsets([1, 5, 10]), None, 5, 5, ValueError, "cu_seqlens_q.*0"),
    "negative": (_offsets([0, -1, 10]), None, 11, 5, ValueError, "cu_seqlens_q"),
    "max_q": (None, None, 4, 5, ValueError, "max_seqlen_q.*5.*4"),
    "max_k": (None, None, 5, 4, ValueError, "max_seqlen_k.*5.*4"),
    "max_type": (None, None, 5.0, 5, TypeError, "max_seqlen_q"),
    "max_tensor": (None, None, 5, torch.tensor(5), TypeError, "max_seqlen_k"),
}


@pytest.mark.parametrize("name", BAD_OFFSETS)
def test_c18_bad_offsets_raise(device, name):
    """C18: each fault is refused before any work, with the argument's name."""
    cu_q, cu_k, max_q, max_k, error, pattern = BAD_OFFSETS[name]
    good = _offsets([0, 5, 10])
    cu_q, cu_k = (good if cu is None else cu for cu in (cu_q, cu_k))
    cu_q, cu_k = (cu.to(device) if isinstance(cu, torch.Tensor) else cu for cu in (cu_q, cu_k))
    problem = Problem(*(t[0] for t in normal_problem(10, heads=2, device=device)))
    with pytest.raises(error, match=pattern):
        famx.flash_attn_varlen_func(*problem[:3], cu_q, cu_k, max_q, max_k)


def test_c18_offsets_on_another_device_raise(device):
    """C18: offsets of another device than q are refused and never read."""
    problem = Problem(*(t[0] for t in normal_problem(10, device=device)))
    cu = torch.tensor([0, 10], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="cu_seqlens_k.*device"):
        famx.flash_attn_varlen_func(*problem[:3], cu, cu.to("meta"), 10, 10)


def test_c18_generous_max_seqlen_changes_nothing(device):
    """C18: max_seqlen is a bound, not a length."""
    problem = Problem(*(t[0] for t in normal_problem(50, heads=2, device=device)))
    want = attend_packed(problem, [0, 20, 50], causal=True)
    assert_same(attend_packed(problem, [0, 20, 50], max_q=4096, max_k=999, causal=True), want)


# ---- strides, alignment, sizes -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["transposed", "packed qkv", "channel step", "reversed batch"])
def test_c19_views_equal_contiguous(device, layout, dtype):
    """C19: strides come from the tensor, not from its shape: bit for bit, forward and backward."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    if layout == "transposed":
        views = [draw(1, 2, 33, 64).transpose(1, 2) for _ in range(4)]
    elif layout == "packed qkv":
        views = [*draw(2, 33, 3, 2, 64).unbind(2), draw(33, 2, 2, 64).transpose(0, 1)]
    elif layout == "channel step":
        views = [draw(1, 33, 2, 128)[..., ::2] for _ in range(4)]
    else:
        views = [draw(33, 3, 2, 64).transpose(0, 1)[1:] for _ in range(4)]
    views = Problem(*views)
    assert not any(t.is_contiguous() for t in views)
    copies = Problem(*(t.contiguous() for t in views))
    for causal in (False, True):
        leaves = [t.detach().requires_grad_() for t in views[:3]]
        out, lse = famx.flash_attn_func(*leaves, causal=causal, return_lse=True)
        gradients = torch.autograd.grad(out, leaves, views.dout)
        want = attend(copies, causal=causal)
        names = ("out", "lse", "dq", "dk", "dv")
        for name, got in zip(names, (out, lse, *gradients), strict=True):
            compare.assert_equal_bits(got, getattr(want, name), f"{name}, causal={causal}")


def test_c19_packed_views_equal_contiguous(device):
    """C19 for varlen: slices of one (T, 3, H, D) buffer."""
    qkv = normal_problem(60, heads=6, head_dim=32, device=device).q[0].unflatten(1, (3, 2))
    dout = normal_problem(60, heads=2, head_dim=32, device=device, seed=1).q[0]
    views = Problem(*qkv.unbind(1), dout)
    cu = torch.tensor([0, 23, 60], dtype=torch.int32, device=device)
    leaves = [t.detach().requires_grad_() for t in views[:3]]
    out = famx.flash_attn_varlen_func(*leaves, cu, cu, 37, 37, causal=True)
    gradients = torch.autograd.grad(out, leaves, dout)
    want = attend_packed(Problem(*(t.contiguous() for t in views)), [0, 23, 60], causal=True)
    for name, got in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True):
        compare.assert_equal_bits(got, getattr(want, name), name)


def _free_gib():
    try:
        with open("/proc/meminfo") as file:
            values = dict(line.split(":") for line in file)
        return int(values["MemAvailable"].split()[0]) / 2**20
    except (OSError, KeyError):
        return 0.0


@pytest.mark.slow  # 17 million elements in five tensors: a minute and several GiB on a small machine
@pytest.mark.skipif(_free_gib() < 8, reason="needs 8 GiB of free memory")
def test_c21_many_short_sequences(device):
    """C21: B=8400, S=1: rows padded to a tile pass 2^31 elements; equal to a run in chunks."""
    problem = normal_problem(
        1, batch=8400, heads=16, head_dim=128, dtype=torch.bfloat16, device=device
    )
    got = attend(problem)
    for at in (slice(0, 100), slice(4100, 4200), slice(8300, 8400)):
        want = attend(Problem(*(t[at] for t in problem)))
        for name in ("out", "lse", "dq", "dk", "dv"):
            compare.assert_equal_bits(getattr(got, name)[at], getattr(want, name), name)
    compare.assert_close(got.out, problem.v, "out", row=2 * tol.E4M3_STEP)


@pytest.mark.slow  # 2^31 elements take 4 GiB of input and 2 GiB of payload
@pytest.mark.skipif(_free_gib() < 12, reason="needs 12 GiB of free memory")
@pytest.mark.parametrize("axis", ["rowwise", "colwise"])
def test_c21_quantise_more_than_2_to_31_elements(device, axis):
    """C21: offsets of the quantiser are 64 bits wide: the last rows equal a run of their own."""
    rows = 2**24 + 1
    x = torch.zeros(rows, 128, dtype=torch.bfloat16, device=device)
    x[-40:] = torch.randn(40, 128, generator=torch.Generator().manual_seed(0)).to(x)
    mx = famx.quantize_mxfp8(x, axis=axis)
    first = (rows - 40) // 32 * 32
    want = famx.quantize_mxfp8(x[first:].contiguous(), axis=axis)
    compare.assert_equal_bits(
        mx.data[first:].view(torch.uint8), want.data.view(torch.uint8), "payload"
    )
    count = want.scale.shape[0]
    compare.assert_equal_bits(
        mx.scale[-count:].view(torch.uint8), want.scale.view(torch.uint8), "scale"
    )


# ---- heads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize(
    "heads, heads_k", [(6, 2), (32, 1), (4, 4), (3, 1), (7, 1), (16, 2), (16, 1)]
)
def test_c22_query_heads_share_kv_heads_in_order(device, heads, heads_k, packed):
    """C22: query head h uses kv head h // ratio; dK, dV add up over the group."""
    problem = uniform_problem(4, torch.ones(5), device=device)
    q = problem.q.expand(1, 4, heads, 32).contiguous()
    k = problem.k.expand(1, 5, heads_k, 32).contiguous()
    value = torch.arange(float(heads_k), device=device).view(1, 1, heads_k, 1)
    problem = Problem(q, k, value.expand_as(k).contiguous(), torch.ones_like(q))
    if packed:
        result = attend_packed(Problem(*(t[0] for t in problem)), [0, 4], [0, 5])
        out, dv = result.out[None], result.dv[None]
    else:
        result = attend(problem)
        out, dv = result.out, result.dv
    want = (torch.arange(heads) // (heads // heads_k)).view(1, 1, heads, 1).expand(1, 4, heads, 32)
    compare.assert_close(out, want.float(), "out", atol=tol.FP32_EXACT * heads_k)
    # 4 rows of weight 1/5 from each head of the group; 1/5 itself is not exact in E4M3.
    share = torch.full_like(dv, 0.8 * heads / heads_k)
    compare.assert_close(dv, share, "dv", row=tol.E4M3_STEP)


@pytest.mark.parametrize("ratio", [1, 2, 3, 7, 8, 16])
def test_c22_group_gradients_are_sums(device, ratio):
    """C22: dK, dV of a group equal the sum over runs of its heads one by one, O and dQ bit for bit."""
    problem = normal_problem(40, 50, heads=2 * ratio, heads_k=2, head_dim=32, device=device)
    got = attend(problem, causal=True)
    dk, dv = torch.zeros_like(got.dk), torch.zeros_like(got.dv)
    for head in range(2 * ratio):
        at_q, at_k = slice(head, head + 1), slice(head // ratio, head // ratio + 1)
        single = Problem(
            problem.q[:, :, at_q],
            problem.k[:, :, at_k],
            problem.v[:, :, at_k],
            problem.dout[:, :, at_q],
        )
        part = attend(single, causal=True)
        compare.assert_close(got.out[:, :, at_q], part.out, "out", row=tol.CONTRACT_O_ROW)
        compare.assert_close(got.dq[:, :, at_q], part.dq, "dq", frobenius=tol.CONTRACT_GRAD)
        dk[:, :, at_k] += part.dk
        dv[:, :, at_k] += part.dv
    compare.assert_close(got.dk, dk, "dk", frobenius=tol.CONTRACT_GRAD)
    compare.assert_close(got.dv, dv, "dv", frobenius=tol.CONTRACT_GRAD)


@pytest.mark.parametrize("heads, heads_k", [(6, 4), (2, 4), (4, 0)])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_c22_indivisible_heads_raise(device, heads, heads_k, packed):
    """C22: 6 query heads on 4 kv heads are refused with both numbers."""
    problem = normal_problem(4, heads=heads, heads_k=heads_k, device=device)
    with pytest.raises(ValueError, match=rf"\b{heads_k}\b.*\b{heads}\b"):
        if packed:
            attend_packed(Problem(*(t[0] for t in problem)), [0, 4])
        else:
            famx.flash_attn_func(*problem[:3])


def test_c23_k_and_v_heads_must_agree(device):
    """C23: Hk = 4, Hv = 2 is refused with both numbers, never broadcast."""
    problem = normal_problem(4, heads=8, heads_k=4, device=device)
    v = problem.v[:, :, :2]
    with pytest.raises(ValueError, match="v: .*4.*2"):
        famx.flash_attn_func(problem.q, problem.k, v)
    cu = torch.tensor([0, 4], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="v: .*4.*2"):
        famx.flash_attn_varlen_func(problem.q[0], problem.k[0], v[0], cu, cu, 4, 4)


MISMATCHES = {
    "batch of k": (1, (2, 4, 2, 64), (2, 4, 2, 64), "k: .*1.*2"),
    "length of v": (1, (1, 4, 2, 64), (1, 5, 2, 64), "v: .*4.*5"),
    "head_dim of k": (1, (1, 4, 2, 32), (1, 4, 2, 64), "k: .*64.*32"),
    "head_dim of v": (1, (1, 4, 2, 64), (1, 4, 2, 32), "v: .*64.*32"),
    "dimensions of k": (1, (4, 2, 64), (1, 4, 2, 64), r"k: .*\(4, 2, 64\)"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_c23_shape_mismatch_raises(device, name):
    """C23 for the other sizes: the message names the argument, the size expected and the size given."""
    batch, k_shape, v_shape, pattern = MISMATCHES[name]
    q, k, v = (torch.zeros(s, device=device) for s in ((batch, 4, 2, 64), k_shape, v_shape))
    with pytest.raises(ValueError, match=pattern):
        famx.flash_attn_func(q, k, v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("offset", [1, 3])
def test_c24_unaligned_base_pointer(device, offset, dtype):
    """C24: a storage offset of one element works, with the bits of an aligned copy."""
    aligned = normal_problem(32, head_dim=64, dtype=dtype, device=device)

    def shifted(t):
        flat = torch.empty(t.numel() + offset, dtype=dtype, device=device)
        flat[offset:] = t.flatten()
        return flat[offset:].view(t.shape)

    moved = Problem(*(shifted(t) for t in aligned))
    assert moved.q.storage_offset() == offset
    leaves = [t.requires_grad_() for t in moved[:3]]
    out, lse = famx.flash_attn_func(*leaves, causal=True, return_lse=True)
    gradients = torch.autograd.grad(out, leaves, moved.dout)
    want = attend(aligned, causal=True)
    for name, got in zip(want._fields, (out, lse, *gradients), strict=False):
        compare.assert_equal_bits(got, getattr(want, name), name)
