"""Cases of autograd, determinism, autocast and operator hygiene."""

import itertools

import compare
import pytest
import tolerances as tol
import torch
from problems import Problem, attend, attend_packed, exact, normal_problem, pack

import flash_attn_mx as famx

NAMES = ("out", "lse", "dq", "dk", "dv")


def forward(problem, wanted=(True, True, True), **options):
    """(leaves, out) of a call in which only the wanted inputs require gradients."""
    leaves = [
        t.detach().clone().requires_grad_(w) for t, w in zip(problem[:3], wanted, strict=True)
    ]
    return leaves, famx.flash_attn_func(*leaves, **options)


# ---- upstream gradients ------------------------------------------------------------------------

UPSTREAM = {
    "sum": lambda out: out.sum(),
    "mean of a slice": lambda out: out[:, 3:, :, ::2].mean(),
    "transpose": lambda out: (out.transpose(1, 2).reshape(out.shape[0], -1) ** 2).sum(),
    "expand": lambda out: (out * torch.full((1,), 0.7).to(out).expand_as(out)).sum(),
    "permuted weight": lambda out: (
        out.permute(3, 2, 1, 0)
        * torch.arange(out[0].numel()).to(out).view(out[0].shape).permute(2, 1, 0)[..., None]
    ).sum(),
}


@pytest.mark.parametrize("kind", UPSTREAM)
@pytest.mark.parametrize("causal", [False, True])
def test_c20_strided_upstream_gradient(device, kind, causal):
    """C20: dO with stride 0 or permuted strides gives the bits of a contiguous dO."""
    problem = normal_problem(33, 40, batch=2, heads=2, device=device)
    leaves, out = forward(problem, causal=causal)
    UPSTREAM[kind](out).backward()
    seen = out.detach().clone().requires_grad_()
    (dout,) = torch.autograd.grad(UPSTREAM[kind](seen), seen)
    want = attend(problem._replace(dout=dout.contiguous()), causal=causal)
    for leaf, name in zip(leaves, ("dq", "dk", "dv"), strict=True):
        compare.assert_equal_bits(leaf.grad, getattr(want, name), name)
        assert leaf.grad.any()


def test_c20_expanded_gradient_handed_over_directly(device):
    """C20: torch.ones(1).expand as the gradient argument itself, dense and packed."""
    problem = normal_problem(33, batch=1, heads=2, device=device)
    ones = torch.ones(1, device=device)
    problem = problem._replace(dout=torch.ones_like(problem.dout))
    want = attend(problem, causal=True)
    leaves, out = forward(problem, causal=True)
    gradients = torch.autograd.grad(out, leaves, ones.expand(out.shape))
    for name, got in zip(("dq", "dk", "dv"), gradients, strict=True):
        compare.assert_equal_bits(got, getattr(want, name), name)
    flat = Problem(*(t[0] for t in problem))
    got = attend_packed(flat._replace(dout=ones.expand(flat.q.shape)), [0, 33], causal=True)
    for name in ("dq", "dk", "dv"):
        compare.assert_equal_bits(getattr(got, name), getattr(want, name)[0], name)


# ---- determinism, independence -----------------------------------------------------------------


@pytest.mark.parametrize("how", ["argument", "global flag"])
@pytest.mark.parametrize("window", [(-1, -1), (100, -1)], ids=str)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_c28_deterministic_gradients(device, packed, window, how):
    """C28: the same bits from run to run, by the argument and by torch's global flag.

    50 runs where threads race; a CPU repeats itself at once or not.
    """
    runs = 50 if device.type == "cuda" else 2
    seqlen = 1024 if device.type == "cuda" else 200
    problem = normal_problem(seqlen, batch=2, heads=8, heads_k=2, head_dim=128, device=device)
    options = {"causal": True, "window_size": window, "deterministic": how == "argument"}
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(how == "global flag")
    torch.set_num_threads(max(2, threads))
    try:
        if packed:
            flat = Problem(*(t.flatten(0, 1) for t in problem))
            results = [attend_packed(flat, [0, seqlen, 2 * seqlen], **options) for _ in range(runs)]
        else:
            results = [attend(problem, **options) for _ in range(runs)]
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
    for result in results[1:]:
        for name in NAMES:
            compare.assert_equal_bits(getattr(result, name), getattr(results[0], name), name)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (40, 7)}], ids=str)
def test_c29_neighbours_in_the_pack_do_not_matter(device, options):
    """C29: sequences of 37, 130 and 5 tokens in every order: the same bits for each, as if alone."""
    problems = [
        normal_problem(n, heads=4, heads_k=2, seed=n, dtype=torch.bfloat16, device=device)
        for n in (37, 130, 5)
    ]
    alone = [attend(p, deterministic=True, **options) for p in problems]
    for order in itertools.permutations(range(3)):
        packed, cu, _ = pack([problems[i] for i in order])
        result = attend_packed(packed, cu, deterministic=True, **options)
        for place, i in enumerate(order):
            at = slice(cu[place], cu[place + 1])
            for name in ("out", "dq", "dk", "dv"):
                got = getattr(result, name)[at].unsqueeze(0)
                compare.assert_equal_bits(got, getattr(alone[i], name), f"{name} in {order}")
            compare.assert_equal_bits(result.lse[:, at].unsqueeze(0), alone[i].lse, "lse")


def test_c29_batch_entries_do_not_matter(device):
    """C29 for dense batches: the neighbours of a batch entry change no bit of it."""
    problem = normal_problem(70, batch=3, heads=2, device=device)
    together = attend(problem, causal=True)
    for b in range(3):
        alone = attend(Problem(*(t[b : b + 1] for t in problem)), causal=True)
        for name in NAMES:
            got = getattr(together, name)[b : b + 1]
            compare.assert_equal_bits(got, getattr(alone, name), f"{name} of entry {b}")


# ---- outputs and saved state -------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True])
def test_c33_outputs_share_no_memory(device, grad):
    """C33: neither out, lse nor a gradient is an input or another output."""
    problem = normal_problem(20, heads=2, device=device)
    leaves = [t.detach().clone().requires_grad_(grad) for t in problem[:3]]
    before = [t.detach().clone() for t in leaves]
    out, lse = famx.flash_attn_func(*leaves, return_lse=True)
    tensors = [*leaves, out, lse]
    if grad:
        tensors += torch.autograd.grad(out, leaves, problem.dout)
    storages = [t.untyped_storage().data_ptr() for t in tensors]
    assert len(set(storages)) == len(tensors)
    for leaf, copy in zip(leaves, before, strict=True):
        compare.assert_equal_bits(leaf, copy, "input")


def test_c33_same_tensor_for_q_k_and_v(device):
    """C33: one tensor as three arguments; its gradient is the sum of the three."""
    problem = normal_problem(20, heads=2, device=device)
    x = problem.q.clone().requires_grad_()
    famx.flash_attn_func(x, x, x, causal=True).backward(problem.dout)
    want = attend(Problem(problem.q, problem.q, problem.q, problem.dout), causal=True)
    compare.assert_close(x.grad, want.dq + want.dk + want.dv, "dx", row=tol.FP32_EXACT)


@pytest.mark.parametrize(
    "wanted", [w for w in itertools.product((True, False), repeat=3) if any(w)]
)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_c34_only_the_wanted_gradients(device, packed, wanted):
    """C34: every subset of q, k, v: the wanted gradients are those of the full run, the others None."""
    problem = normal_problem(40, 50, heads=2, heads_k=1, device=device)
    full = attend(problem, causal=True)
    if packed:
        leaves = [
            t[0].detach().clone().requires_grad_(w)
            for t, w in zip(problem[:3], wanted, strict=True)
        ]
        cu = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (40, 50)]
        out = famx.flash_attn_varlen_func(*leaves, *cu, 40, 50, causal=True)
        out.backward(problem.dout[0])
    else:
        leaves, out = forward(problem, wanted, causal=True)
        out.backward(problem.dout)
    for leaf, want, name in zip(leaves, wanted, ("dq", "dk", "dv"), strict=True):
        assert (leaf.grad is not None) == want, name
        if want:
            got = leaf.grad.unsqueeze(0) if packed else leaf.grad
            compare.assert_equal_bits(got, getattr(full, name), name)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "nothing requires grad"])
def test_c34_no_state_without_gradients(device, mode):
    """C34: nothing is saved, the output has no graph, and the values are those of training."""
    problem = normal_problem(40, heads=2, device=device)
    requires = mode != "nothing requires grad"
    leaves = [t.detach().clone().requires_grad_(requires) for t in problem[:3]]
    saved = []

    def pack_hook(t):
        saved.append(t)
        return t

    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(mode)
    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda t: t):
        if context is None:
            out, lse = famx.flash_attn_func(*leaves, causal=True, return_lse=True)
        else:
            with context():
                out, lse = famx.flash_attn_func(*leaves, causal=True, return_lse=True)
    assert not saved and not out.requires_grad and not lse.requires_grad
    want = attend(problem, causal=True)
    compare.assert_equal_bits(out.clone(), want.out, "out")
    compare.assert_equal_bits(lse.clone(), want.lse, "lse")


def test_c34_saves_no_unquantised_operand(device):
    """C34: what a layer keeps for its backward is FP8 apart from O and the statistics."""
    problem = normal_problem(256, heads=2, dtype=torch.bfloat16, device=device)
    saved = []

    def pack_hook(t):
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack_hook, lambda t: t):
        _, out = forward(problem, causal=True)
    wide = [t for t in saved if t.element_size() > 1 and t.numel() >= out.numel()]
    assert len(wide) == 1 and torch.equal(wide[0], out)


def test_c34_retained_graph_gives_the_same_again(device):
    """C34: two backward passes through one graph; a third after release is torch's own error."""
    problem = normal_problem(40, heads=2, device=device)
    leaves, out = forward(problem, causal=True)
    first = torch.autograd.grad(out, leaves, problem.dout, retain_graph=True)
    second = torch.autograd.grad(out, leaves, problem.dout)
    for a, b in zip(first, second, strict=True):
        compare.assert_equal_bits(a, b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaves, problem.dout)


def test_c34_second_derivative_raises(device):
    """C34: a clear error instead of a wrong or zero second derivative."""
    problem = normal_problem(20, device=device)
    leaves, out = forward(problem)
    with pytest.raises(NotImplementedError, match="flash_attn_mx.*second derivative"):
        (dq,) = torch.autograd.grad(out.sum(), leaves[:1], create_graph=True)
        torch.autograd.grad(dq.sum(), leaves[:1])


def test_c34_lse_is_not_differentiable(device):
    """C34: a gradient into LSE is refused by autograd, not dropped in silence."""
    problem = normal_problem(20, device=device)
    leaves = [t.clone().requires_grad_() for t in problem[:3]]
    _, lse = famx.flash_attn_func(*leaves, return_lse=True)
    assert not lse.requires_grad


# ---- dtypes ------------------------------------------------------------------------------------


def test_c45_autocast_casts_mixed_inputs(device):
    """C45: fp32 q, k from a norm and bf16 v: bf16 out, gradients in the leaves' own dtypes."""
    problem = normal_problem(40, heads=2, device=device)
    leaves = [t.clone().requires_grad_() for t in problem[:2]]
    v = problem.v.bfloat16().requires_grad_()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = famx.flash_attn_func(*leaves, v, causal=True)
    assert out.dtype == torch.bfloat16
    out.backward(problem.dout.bfloat16())
    assert [t.grad.dtype for t in (*leaves, v)] == [torch.float32, torch.float32, torch.bfloat16]
    want = attend(problem.to(torch.bfloat16), causal=True)
    compare.assert_equal_bits(out, want.out, "out")
    for leaf, name in zip((*leaves, v), ("dq", "dk", "dv"), strict=True):
        compare.assert_equal_bits(leaf.grad.bfloat16(), getattr(want, name), name)


def test_c45_autocast_varlen(device):
    """C45 for packed input."""
    problem = normal_problem(40, heads=2, device=device)
    flat = Problem(*(t[0] for t in problem))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        result = attend_packed(flat._replace(dout=flat.dout.bfloat16()), [0, 40])
    assert result.out.dtype == torch.bfloat16 and result.dq.dtype == torch.float32
    compare.assert_equal_bits(result.out[None], attend(problem.to(torch.bfloat16)).out, "out")


F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    "dtypes", [(F32, F32, BF16), (BF16, F16, BF16), (F64, F64, F64), (E4M3, E4M3, E4M3)], ids=str
)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_c45_mixed_or_unsupported_dtypes_raise(device, packed, dtypes):
    """C45: outside autocast a TypeError that names the three dtypes."""
    problem = normal_problem(20, device=device)
    q, k, v = (t.to(d) for t, d in zip(problem[:3], dtypes, strict=True))
    pattern = ".*".join(str(d).removeprefix("torch.") for d in dtypes)
    with pytest.raises(TypeError, match=pattern):
        if packed:
            cu = torch.tensor([0, 20], dtype=torch.int32, device=device)
            famx.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 20, 20)
        else:
            famx.flash_attn_func(q, k, v)


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_c45_supported_dtypes_keep_theirs(device, dtype):
    """C45: fp16, bf16, fp32 each give out and gradients in their own dtype, near exact attention."""
    problem = normal_problem(100, heads=2, dtype=dtype, device=device)
    got, want = attend(problem, causal=True), exact(problem, causal=True)
    for name in ("out", "dq", "dk", "dv"):
        assert getattr(got, name).dtype == dtype
        bound = tol.QUALITY_SMALL
        compare.assert_close(getattr(got, name), getattr(want, name), name, frobenius=bound)


@pytest.mark.parametrize("bits", [0x7FC00000, -0x00400000], ids=["nan", "-nan"])
def test_c55_nan_of_either_sign_is_never_lost_in_backward(device, bits):
    """NaN in dO reaches the gradients whatever its sign bit, which once passed for a scale exponent."""
    nan = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    assert torch.isnan(nan)
    problem = normal_problem(64, device=device)
    problem.dout[0, 7, 0, 3] = nan
    result = attend(problem)
    assert torch.isnan(result.dq[0, 7]).all()
    assert torch.isnan(result.dk).any() and torch.isnan(result.dv[..., 3]).all()
