"""Which backend serves a call, what is said about it, and the option table (C39, C43, C49)."""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F

import flash_attn_mx as famx
from flash_attn_mx import dispatch, sm100


@pytest.fixture(autouse=True)
def fresh_settings():
    """Each test starts from the defaults and leaves them."""
    famx.set_backend("auto")
    famx.set_fallback("warn")
    famx.set_policy()
    yield
    famx.set_backend("auto")
    famx.set_fallback("silent")
    famx.set_policy()


def qkv(seqlen=40, nheads=4, nheads_k=2, head_dim=32, batch=1):
    torch.manual_seed(0)
    return [torch.randn(batch, seqlen, heads, head_dim) for heads in (nheads, nheads_k, nheads_k)]


def warned(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(w.message) for w in caught if issubclass(w.category, famx.FallbackWarning)]


def test_c43_one_warning_per_reason():
    """Each reason is named once, then not again."""
    q, k, v = qkv()
    mask = torch.ones(40, 40, dtype=torch.bool)
    assert len(warned(lambda: famx.flash_attn_func(q, k, v))) == 1
    assert warned(lambda: famx.flash_attn_func(q, k, v, causal=True)) == []
    messages = warned(lambda: famx.flash_attn_func(q, k, v, attn_mask=mask))
    assert len(messages) == 1 and "attn_mask" in messages[0]
    assert warned(lambda: famx.flash_attn_func(q, k, v, attn_mask=mask)) == []


def test_c43_explain_names_path_and_reason_without_warning():
    """explain() tells what a call would do and stays silent."""
    q, k, v = qkv()
    plans = []
    assert warned(lambda: plans.append(famx.explain(q, k, v))) == []
    assert plans[0].backend == "portable" and [r.code for r in plans[0].reasons] == ["device"]
    assert "cpu" in str(plans[0])
    with_dropout = famx.explain(q, k, v, dropout_p=0.1)
    assert with_dropout.backend == "high_precision" and [r.code for r in with_dropout.reasons] == [
        "dropout"
    ]
    assert famx.explain(q, k, v, backend="portable").reasons == ()


def test_c43_strict_switch_raises_and_silent_is_silent():
    """set_fallback: error raises before any work, silent says nothing."""
    q, k, v = qkv()
    famx.set_fallback("error")
    with pytest.raises(RuntimeError, match="fall back to portable.*cpu"):
        famx.flash_attn_func(q, k, v)
    famx.flash_attn_func(q, k, v, backend="portable")  # asked for by name: no fallback
    famx.set_fallback("silent")
    assert warned(lambda: famx.flash_attn_func(q, k, v)) == []


def test_c43_large_head_dim_raises():
    """D = 512 is refused with the way out, not computed slowly."""
    q, k, v = qkv(head_dim=512)
    with pytest.raises(
        ValueError, match="head_dim: expected 1 to 256.*scaled_dot_product_attention.*got 512"
    ):
        famx.flash_attn_func(q, k, v)


@pytest.mark.parametrize("device", ["cpu"])
def test_c39_unsupported_device_falls_back_with_right_results(device):
    """A device without sm_100 kernels gets the portable path's results."""
    q, k, v = (x.to(device) for x in qkv())
    assert torch.equal(
        famx.flash_attn_func(q, k, v), famx.flash_attn_func(q, k, v, backend="portable")
    )


# What built kernels take.
FITTING = dispatch._Operands(64, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fn)


@pytest.fixture
def cuda_device(monkeypatch):
    """A CUDA device of a made-up capability, and kernels as if they were built for 10.0 and 10.3."""

    def make(capability, built=("attn_fwd_d64_bf16",), backward=True):
        instances = tuple(sm100.Instance(name, 64, torch.bfloat16) for name in built)
        names = (
            f"{kernel}_d64_bf16" for kernel in ("bwd_preprocess", "attn_bwd", "bwd_postprocess")
        )
        row = sm100.BackwardInstance(*names, 64, torch.bfloat16, torch.bfloat16)
        monkeypatch.setattr(sm100, "BACKWARD_INSTANCES", (row,) if backward else ())
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(sm100, "INSTANCES", instances)
        monkeypatch.setattr(sm100, "CAPABILITIES", ((10, 0), (10, 3)) if built else ())
        monkeypatch.setattr(sm100, "WHY_NO_HOST", "")
        return torch.device("cuda", 0)

    return make


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 1), (12, 0)])
def test_c39_reason_for_each_capability(cuda_device, capability):
    """Only the capabilities that kernels are built for are served by them."""
    reason = dispatch._no_kernel_reason(cuda_device(capability), FITTING)
    assert reason.code == "capability" and f"{capability[0]}.{capability[1]}" in reason.text


@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_c39_kernels_serve_what_they_are_built_for(cuda_device, capability):
    """On 10.x a missing instance is the reason, and names what there is."""
    device = cuda_device(capability)
    assert dispatch._no_kernel_reason(device, FITTING) is None
    for change in (
        {"head_dim": 65},
        {"out_dtype": torch.float16},
        {"payload": torch.float8_e5m2},
        {"dout_dtype": torch.float8_e5m2},
    ):
        reason = dispatch._no_kernel_reason(device, FITTING._replace(**change))
        assert reason.code == "not_built" and "built: head_dim <= 64, output bf16" in reason.text
    without = cuda_device(capability, backward=False)
    assert "no sm_100 backward" in dispatch._no_kernel_reason(without, FITTING).text
    assert dispatch._no_kernel_reason(without, FITTING._replace(dout_dtype=None)) is None
    without = cuda_device(capability, built=())
    assert dispatch._no_kernel_reason(without, FITTING).code == "not_built"


@pytest.mark.parametrize("backend,head_dim", [("sm100", 32), ("emulator", 192)])
def test_backend_that_cannot_serve_raises(backend, head_dim):
    """A backend asked for by name is not replaced by another."""
    q, k, v = qkv(head_dim=head_dim)
    with pytest.raises(NotImplementedError, match=f"backend '{backend}': "):
        famx.flash_attn_func(q, k, v, backend=backend)
    famx.set_backend(backend)
    with pytest.raises(NotImplementedError, match=f"backend '{backend}': "):
        famx.flash_attn_func(q, k, v)


def test_unknown_settings_are_refused():
    """Typos do not become defaults."""
    for call in (
        lambda: famx.set_backend("fast"),
        lambda: famx.set_fallback("never"),
        lambda: famx.set_policy(min_seqlen_k=-1),
        lambda: famx.set_policy(max_outlier=0.5),
        lambda: famx.flash_attn_func(*qkv(), backend="cuda"),
    ):
        with pytest.raises(ValueError, match="expected .* got"):
            call()


def expected_sdpa(q, k, v, **kwargs):
    out = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), enable_gqa=True, **kwargs
    )
    return out.transpose(1, 2)


def test_c42_attn_mask_is_never_dropped():
    """Bool and float masks give torch SDPA's result, also on top of causal."""
    q, k, v = qkv()
    lower = torch.ones(40, 40, dtype=torch.bool).tril()
    bias = torch.randn(1, 4, 40, 40)
    torch.testing.assert_close(
        famx.flash_attn_func(q, k, v, attn_mask=lower), expected_sdpa(q, k, v, attn_mask=lower)
    )
    torch.testing.assert_close(
        famx.flash_attn_func(q, k, v, attn_mask=bias), expected_sdpa(q, k, v, attn_mask=bias)
    )
    both = bias.masked_fill(~lower, float("-inf"))
    got = famx.flash_attn_func(q, k, v, attn_mask=bias, causal=True)
    torch.testing.assert_close(got, expected_sdpa(q, k, v, attn_mask=both))
    with pytest.raises(NotImplementedError, match="attn_mask"):
        famx.flash_attn_func(q, k, v, attn_mask=lower, backend="portable")


def test_c48_dropout_is_applied_as_given():
    """dropout_p scales by 1/(1-p): with V = 1 the mean stays 1 within 1 %; eval calls without it are untouched."""
    q, k, _ = qkv(seqlen=64)
    v = torch.ones(1, 64, 2, 32)
    torch.manual_seed(0)
    famx.set_fallback("silent")
    mean = torch.stack(
        [famx.flash_attn_func(q, k, v, dropout_p=0.1).mean() for _ in range(200)]
    ).mean()
    assert abs(mean - 1) < 0.01
    without = [famx.flash_attn_func(q, k, v) for _ in range(2)]
    assert (
        torch.equal(*without) and (without[0] - 1).abs().max() < 0.03
    )  # rounding of P, averaged over 64 keys
    with pytest.raises(NotImplementedError, match="dropout"):
        famx.flash_attn_func(q, k, v, dropout_p=0.1, backend="portable")
    with pytest.raises(ValueError, match=r"dropout_p: expected a probability in \[0, 1\), got 1.0"):
        famx.flash_attn_func(q, k, v, dropout_p=1.0)


def test_policy_short_sequences_and_outliers():
    """The policy's bounds send a call to high precision and are named."""
    q, k, v = qkv()
    famx.set_policy(min_seqlen_k=64)
    assert [r.code for r in famx.explain(q, k, v).reasons] == ["short"]
    torch.testing.assert_close(famx.flash_attn_func(q, k, v), expected_sdpa(q, k, v))
    famx.set_policy(max_outlier=50.0)
    assert famx.explain(q, k, v).backend == "portable"
    k[0, 3, 1, 5] = 1e4
    plan = famx.explain(q, k, v)
    assert plan.backend == "high_precision" and "amax/rms of k" in plan.reasons[0].text


OPTIONS = list(
    itertools.product(
        [False, True], [(-1, -1), (7, 2)], [1, 2], [False, True], [False, True], [False, True]
    )
)


@pytest.mark.parametrize("causal,window,groups,varlen,deterministic,return_lse", OPTIONS)
def test_c49_every_option_combination_works(
    causal, window, groups, varlen, deterministic, return_lse
):
    """causal x window x GQA x varlen x deterministic x return_lse: forward and backward run and agree with the plain call."""
    q, k, v = (x.requires_grad_() for x in qkv(seqlen=40, nheads=2 * groups, nheads_k=2))
    options = dict(
        causal=causal, window_size=window, deterministic=deterministic, return_lse=return_lse
    )
    dense = famx.flash_attn_func(q, k, v, **options)
    if varlen:
        cu = torch.tensor([0, 40], dtype=torch.int32)
        got = famx.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 40, 40, **options)
    else:
        got = famx.flash_attn_func(q, k, v, **options)
    if return_lse:
        (dense, lse_dense), (got, lse) = dense, got
        assert lse.dtype == torch.float32 and torch.equal(lse.view(lse_dense.shape), lse_dense)
    assert torch.equal(got.view(dense.shape), dense)
    got.sum().backward()
    assert all(torch.isfinite(x.grad).all() and x.grad.abs().sum() > 0 for x in (q, k, v))


@pytest.mark.parametrize("axis", ["rowwise", "colwise", "tokenwise"])
@pytest.mark.parametrize("causal", [False, True])
def test_c49_prequantised_operands(axis, causal):
    """Every V axis works without a mask; with one, a scale that mixes tokens is refused."""
    q, k, v = qkv()
    mx = [famx.quantize_mxfp8(x) for x in (q, k)] + [famx.quantize_mxfp8(v, axis=axis)]
    if causal and axis == "colwise":
        with pytest.raises(ValueError, match="v: expected axis 'rowwise' or 'tokenwise'"):
            famx.flash_attn_mx_func(*mx, causal=True)
        return
    out, lse = famx.flash_attn_mx_func(*mx, causal=causal, return_lse=True, out_dtype=torch.float32)
    expected, expected_lse = famx.flash_attn_func(q, k, v, causal=causal, return_lse=True)
    assert torch.equal(lse, expected_lse)
    torch.testing.assert_close(out, expected, atol=0.05, rtol=0.05)


def test_prequantised_swizzled_equals_plain():
    """Scales in the tensor core's tile order give the same bits."""
    q, k, v = qkv(seqlen=70)
    mx = [famx.quantize_mxfp8(x) for x in (q, k)] + [famx.quantize_mxfp8(v, axis="colwise")]
    swizzled = [x.to_layout("swizzled128x4") for x in mx]
    assert torch.equal(famx.flash_attn_mx_func(*mx), famx.flash_attn_mx_func(*swizzled))


def test_policy_holds_for_packed_sequences_and_not_for_quantised_operands():
    """Packed: each sequence as dense SDPA, empty ones and the tail zero. Quantised operands stay MXFP8. Both raised once."""
    famx.set_policy(min_seqlen_k=64)
    q, k, v = (x[0].requires_grad_() for x in qkv())
    cu_q = torch.tensor([0, 7, 7, 30, 38], dtype=torch.int32)
    cu_k = torch.tensor([0, 9, 12, 35, 35], dtype=torch.int32)
    out = famx.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 23, 23)
    out.sum().backward()
    for rows, keys in ((slice(0, 7), slice(0, 9)), (slice(7, 30), slice(12, 35))):
        dense = expected_sdpa(q[None, rows], k[None, keys], v[None, keys])
        torch.testing.assert_close(out[rows], dense[0])
    assert not out[30:].any() and q.grad.isfinite().all() and v.grad[:9].any()
    mx = [
        famx.quantize_mxfp8(x.detach()[None], axis=a)
        for x, a in zip((q, k, v), ("rowwise", "rowwise", "colwise"))
    ]
    with_policy = famx.flash_attn_mx_func(*mx)
    famx.set_policy()
    assert torch.equal(with_policy, famx.flash_attn_mx_func(*mx))
