"""torch's own attention functions with MXFP8 behind them (flash_attn_mx.integrations.sdpa)."""

import warnings

import compare
import pytest
import tolerances as tol
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn_mx as famx

TORCH_DEFAULT = F.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def settings():
    famx.set_backend("auto")
    famx.set_fallback("silent")
    yield
    famx.sdpa.deactivate()
    assert not famx.sdpa.is_active()
    famx.set_policy()


def heads_first(batch=2, seqlen_q=33, seqlen_k=None, heads=4, heads_k=None, head_dim=64, dtype=torch.float32):  # fmt: skip
    """q, k, v, dout in SDPA's layout (B, H, S, D)."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(heads, seqlen_q), (heads_k or heads, seqlen_k or seqlen_q)]
    shapes = [*shapes, shapes[1], shapes[0]]
    return [torch.randn(batch, h, s, head_dim, generator=generator).to(dtype) for h, s in shapes]


def run(q, k, v, dout, **options):
    """(out, dq, dk, dv) of SDPA as it is now."""
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in (q, k, v)]  # fmt: skip
    out = F.scaled_dot_product_attention(*leaves, **options)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves)]


def run_direct(q, k, v, dout, **options):
    """The same through flash_attn_func, in SDPA's layout."""
    leaves = [x.detach().transpose(1, 2).clone().requires_grad_() for x in (q, k, v)]
    out = famx.flash_attn_func(*leaves, **options)
    out.backward(dout.transpose(1, 2))
    return [x.transpose(1, 2) for x in (out.detach(), *(x.grad for x in leaves))]


def assert_same_bits(got, expected):
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, expected, strict=True):
        compare.assert_equal_bits(a.contiguous(), b.contiguous(), name)


def exact(q, k, v, dout, **options):
    return run(*(x.double() for x in (q, k, v, dout)), **options)


def warned(function, *args, **kwargs):
    famx.set_fallback("warn")  # forgets what was said before
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args, **kwargs)
    return [w for w in caught if issubclass(w.category, famx.FallbackWarning)]


# ---- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_is_the_direct_api(dtype, causal):
    """Values and gradients are those of flash_attn_func, bit for bit, and not torch's."""
    problem = heads_first(dtype=dtype)
    with famx.sdpa.enabled():
        got = run(*problem, is_causal=causal)
    assert_same_bits(got, run_direct(*problem, causal=causal))
    assert not torch.equal(got[0], run(*problem, is_causal=causal)[0])


@pytest.mark.parametrize("scale", [0.3, -0.2])
def test_sdpa_scale_is_not_dropped(scale):
    """scale, also negative."""
    problem = heads_first(seqlen_q=20)
    with famx.sdpa.enabled():
        got = run(*problem, scale=scale)
    assert_same_bits(got, run_direct(*problem, softmax_scale=scale))


def test_sdpa_scale_of_zero_is_not_the_default():
    """scale=0.0 is torch's to give: every query gets the mean of the values."""
    problem = heads_first(seqlen_q=20)
    with famx.sdpa.enabled():
        got = run(*problem, scale=0.0)
    want = problem[2].mean(2, keepdim=True).expand_as(got[0])
    compare.assert_close(got[0], want, frobenius=tol.QUALITY_SMALL)
    assert not got[1].any()


def test_c12_sdpa_causal_is_top_left():
    """C12: two queries, five keys: the drop-in aligns top-left as torch, the direct API bottom-right."""
    v = torch.tensor([1.0, 2, 4, 8, 16]).view(1, 1, 5, 1).expand(1, 1, 5, 32)
    q, k = torch.zeros(1, 1, 2, 32), torch.zeros(1, 1, 5, 32)
    with famx.sdpa.enabled():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert out[0, 0, :, 0].tolist() == [1.0, 1.5]
    direct = famx.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
    assert torch.allclose(direct[0, :, 0, 0], torch.tensor([3.75, 6.2]), rtol=2**-4)


@pytest.mark.parametrize("seqlens", [(5, 2), (2, 5), (33, 1), (1, 33), (200, 130), (130, 200), (129, 129)], ids=str)  # fmt: skip
def test_c12_sdpa_causal_with_other_lengths(seqlens):
    """C12: top-left with Sq != Sk, values and gradients; keys that no query sees get zero gradients."""
    problem = heads_first(1, *seqlens, heads=2)
    with famx.sdpa.enabled():
        got = run(*problem, is_causal=True)
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, exact(*problem, is_causal=True)):
        noise = b.abs().max() < 1e-12  # one visible key: dQ and dK are zero
        bound = {"atol": 1e-6} if noise else {"frobenius": tol.QUALITY_SMALL}
        compare.assert_close(a, b, name, **bound)
    unseen = got[2][:, :, seqlens[0] :], got[3][:, :, seqlens[0] :]
    assert not any(x.any() for x in unseen)


def test_c44_sdpa_hidden_token_changes_no_bit():
    """C44: SDPA, causal: changing token 7 leaves the outputs 0..6 as they were, NaN included."""
    q, k, v, _ = heads_first(1, 10)
    with famx.sdpa.enabled():
        before = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        for value in (3e4, float("nan")):
            k2, v2 = k.clone(), v.clone()
            k2[:, :, 7], v2[:, :, 7] = value, value
            after = F.scaled_dot_product_attention(q, k2, v2, is_causal=True)
            compare.assert_equal_bits(after[:, :, :7], before[:, :, :7])
            assert not torch.equal(after[:, :, 7:], before[:, :, 7:])


@pytest.mark.parametrize("heads_k", [1, 2, 4])
def test_c22_sdpa_grouped_heads(heads_k):
    """C22: enable_gqa maps query head h to h // group; dK and dV sum over the group."""
    problem = heads_first(heads=4, heads_k=heads_k, seqlen_k=40)
    with famx.sdpa.enabled():
        got = run(*problem, enable_gqa=True)
    assert_same_bits(got, run_direct(*problem))


def test_c22_sdpa_other_head_counts_need_enable_gqa():
    """C22: without enable_gqa, and for 6 heads over 4, the error is the one that torch gives."""
    for options, heads_k in (({}, 2), ({"enable_gqa": True}, 4)):
        q, k, v, _ = heads_first(heads=6, heads_k=heads_k)
        messages = []
        for activated in (False, True):
            if activated:
                famx.sdpa.activate()
            with pytest.raises((RuntimeError, ValueError)) as error:
                F.scaled_dot_product_attention(q, k, v, **options)
            messages.append((error.type, str(error.value)))
        famx.sdpa.deactivate()
        assert messages[0] == messages[1]


def test_sdpa_broadcast_batch_is_as_torch():
    """Batches of one that torch broadcasts come out right, on whichever kernel."""
    q, k, v, _ = heads_first(batch=2)
    want = F.scaled_dot_product_attention(q, k[:1], v[:1])
    with famx.sdpa.enabled():
        got = F.scaled_dot_product_attention(q, k[:1], v[:1])
    compare.assert_close(got, want, frobenius=tol.QUALITY_SMALL)


@pytest.mark.parametrize("head_dim", [1, 5, 16, 33, 72, 80, 96, 128, 192, 256])
def test_c08_sdpa_head_sizes(head_dim):
    """C08: every head size up to 256, with the default scale of the true size."""
    problem = heads_first(1, 20, heads=2, head_dim=head_dim)
    with famx.sdpa.enabled():
        got = run(*problem)
    assert_same_bits(got, run_direct(*problem))


def test_c13_sdpa_window_as_a_mask():
    """C13: SDPA has no window; a model passes it as a mask, of which nothing is lost (left = W - 1 = 1)."""
    v = torch.tensor([1.0, 2, 4, 8]).view(1, 1, 4, 1).expand(1, 1, 4, 32)
    q = torch.zeros(1, 1, 4, 32)
    i = torch.arange(4)
    mask = (i <= i[:, None]) & (i > i[:, None] - 2)
    with famx.sdpa.enabled():
        out = F.scaled_dot_product_attention(q, q, v, attn_mask=mask)
    assert out[0, 0, :, 0].tolist() == [1, 1.5, 3, 6]


# ---- what MXFP8 does not take goes to torch's kernel --------------------------------------------

LOWER = torch.ones(33, 33, dtype=torch.bool).tril()
HANDED_ON = {
    "bool mask": ("attn_mask", {}, {"attn_mask": LOWER}),
    "float mask": ("attn_mask", {}, {"attn_mask": torch.zeros(33, 33).masked_fill(~LOWER, -9.0)}),
    "mask per head": ("attn_mask", {}, {"attn_mask": LOWER.expand(2, 4, 33, 33)}),
    "float64": ("float64", {"dtype": torch.float64}, {}),
    "head_dim 257": ("head sizes", {"head_dim": 257}, {}),
    "infinite scale": ("scale = inf", {}, {"scale": float("inf")}),
}  # fmt: skip


@pytest.mark.parametrize("case", HANDED_ON)
def test_c42_sdpa_hands_on_what_it_cannot_serve(case):
    """C42, C43: bit-equal to torch, gradients too, with one warning that names the reason and the caller's line."""
    reason, shape, options = HANDED_ON[case]
    problem = heads_first(**shape)
    want = run(*problem, **options)
    got = []
    with famx.sdpa.enabled():
        caught = warned(lambda: got.extend(run(*problem, **options)))
        assert not [w for w in warned_again(lambda: run(*problem, **options))]
        famx.set_fallback("error")
        with pytest.raises(RuntimeError, match=f"would fall back to torch.*{reason}"):
            run(*problem, **options)
    assert_same_bits(got, want)
    assert len(caught) == 1 and reason in str(caught[0].message)
    assert caught[0].filename == __file__


def warned_again(function):
    """What is said in a further call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [w for w in caught if issubclass(w.category, famx.FallbackWarning)]


@pytest.mark.parametrize(
    "kernel", ["three dimensions", "value size", "mask with gradient", "last stride"]
)
def test_c43_sdpa_tells_of_calls_that_torch_gives_elsewhere(kernel):
    """C43: shapes that torch sends to its math kernel never reach ours: told all the same, results torch's."""
    q, k, v, _ = heads_first()
    options = {}
    if kernel == "three dimensions":
        q, k, v = q[0], k[0], v[0]
    elif kernel == "value size":
        v = v[..., :40]
    elif kernel == "last stride":
        q = q.transpose(2, 3).contiguous().transpose(2, 3)
    else:
        options["attn_mask"] = torch.zeros(33, 33, requires_grad=True)
    want = F.scaled_dot_product_attention(q, k, v, **options)
    got = []
    with famx.sdpa.enabled():
        call = lambda: got.append(F.scaled_dot_product_attention(q, k, v, **options))  # noqa: E731
        assert len(warned(call)) == 1
        with sdpa_kernel(SDPBackend.MATH):  # asked for by name
            assert not warned(call)
    compare.assert_equal_bits(got[0], want)


def test_c42_sdpa_mask_with_causal_is_as_torch():
    """C42: both given: torch's kernel decides (its CPU flash kernel applies both, its math kernel refuses)."""
    problem = heads_first()
    upper = {"attn_mask": LOWER.T.clone().fill_diagonal_(True), "is_causal": True}
    want = run(*problem, **upper)
    assert torch.equal(want[0], problem[2])  # every query sees its own key alone
    with famx.sdpa.enabled():
        assert_same_bits(run(*problem, **upper), want)
        with sdpa_kernel(SDPBackend.MATH), pytest.raises(RuntimeError, match="attn_mask"):
            run(*problem, **upper)


def test_c48_sdpa_dropout_is_applied():
    """C48: with V = 1 the mean over many draws is 1; half the weight is dropped in each; told once."""
    q, k, _, _ = heads_first(1, 8, 64, heads=2)
    v = torch.ones(1, 2, 64, 64)
    torch.manual_seed(0)
    with famx.sdpa.enabled():
        outs = []
        said = warned(lambda: outs.append(F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)))
        assert len(said) == 1 and "dropout_p = 0.1" in str(said[0].message)
        for _ in range(1999):
            outs.append(F.scaled_dot_product_attention(q, k, v, dropout_p=0.1))
    mean = torch.stack(outs).mean()
    assert abs(float(mean) - 1) < 0.01
    assert outs[0].std() > 0.01


def test_c48_sdpa_train_eval_train():
    """C48: a module's mode decides each time: dropout in training, MXFP8 in evaluation, dropout again."""
    layer = torch.nn.MultiheadAttention(64, 4, dropout=0.5, batch_first=True)
    x = torch.randn(2, 16, 64)

    def run_twice():
        with torch.no_grad():
            return [layer(x, x, x, need_weights=False)[0] for _ in range(2)]

    def is_random():
        a, b = run_twice()
        return not torch.equal(a, b)

    with famx.sdpa.enabled():
        assert layer.train() and is_random()
        assert layer.eval() and not is_random()
        assert layer.train() and is_random()


def test_sdpa_policy_of_the_process_holds():
    """set_policy sends short calls to torch's kernel, forward and backward."""
    problem = heads_first()
    want = run(*problem)
    famx.set_policy(min_seqlen_k=64)
    with famx.sdpa.enabled():
        assert_same_bits(run(*problem), want)
        famx.set_policy(min_seqlen_k=33)
        assert not torch.equal(run(*problem)[0], want[0])


def test_sdpa_high_precision_of_the_direct_api_stays_so():
    """flash_attn_func's own way to torch's SDPA does not come back to MXFP8."""
    q, k, v, _ = (x.transpose(1, 2) for x in heads_first())
    famx.set_policy(min_seqlen_k=64)
    want = famx.flash_attn_func(q, k, v, causal=True)
    with famx.sdpa.enabled():
        compare.assert_equal_bits(famx.flash_attn_func(q, k, v, causal=True), want)
        famx.set_policy()
        assert not torch.equal(famx.flash_attn_func(q, k, v, causal=True), want)


def test_sdpa_backend_by_name_is_used():
    """set_backend reaches the drop-in: the portable path without a notice; one that cannot serve raises."""
    problem = heads_first()
    with famx.sdpa.enabled():
        famx.set_backend("portable")
        assert not warned(run, *problem)
        famx.set_backend("sm100")
        with pytest.raises(NotImplementedError, match="sm100"):
            run(*problem)
