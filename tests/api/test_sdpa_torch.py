"""The MXFP8 kernels behind torch's attention functions: switching them on and off, and the rest of torch around them."""

import gc
import inspect
import threading
import warnings

import compare
import pytest
import tolerances as tol
import torch
import torch.nn.functional as F
from torch.nn import attention as registry
from torch.nn.attention import varlen

import flash_attn_mx as famx
from flash_attn_mx import sm100
from flash_attn_mx.integrations import _aten
from flash_attn_mx.integrations import sdpa as sdpa_module

OPERATORS = sorted({name for name, _, _ in (*_aten._FORWARDS, *_aten._BACKWARDS)})


@pytest.fixture(autouse=True)
def settings():
    famx.set_backend("auto")
    famx.set_fallback("silent")
    yield
    famx.sdpa.deactivate()
    assert not famx.sdpa.is_active()


def qkv(batch=2, heads=4, seqlen=33, head_dim=64, dtype=torch.float32, requires_grad=True):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(batch, heads, seqlen, head_dim, generator=generator)
        .to(dtype)
        .requires_grad_(requires_grad)
        for _ in range(3)
    ]


def dispatch_tables():
    """torch's kernels of all operators concerned, with no graph of an earlier test alive."""
    if not famx.sdpa.is_active():
        gc.collect()
        famx.sdpa.activate()
        famx.sdpa.deactivate()
        assert _aten._backwards is None
    return [torch._C._dispatch_dump(f"aten::{name}") for name in OPERATORS]


# ---- on and off --------------------------------------------------------------------------------


def test_sdpa_deactivation_restores_exactly():
    """After activate and deactivate torch's dispatch tables, flags and results are what they were."""
    q, k, v = qkv(requires_grad=False)
    tables, want = dispatch_tables(), F.scaled_dot_product_attention(q, k, v)
    flags = torch._C._get_sdp_priority_order(), torch.backends.cuda.cudnn_sdp_enabled()
    famx.sdpa.activate()
    famx.sdpa.activate()
    assert famx.sdpa.is_active() and registry.current_flash_attention_impl() == "MXFP8"
    assert dispatch_tables() != tables
    out = F.scaled_dot_product_attention(q, k, v)
    assert not torch.equal(out, want)
    del out
    famx.sdpa.deactivate()
    famx.sdpa.deactivate()
    assert _aten._backwards is None
    assert registry.current_flash_attention_impl() is None
    assert dispatch_tables() == tables
    assert (torch._C._get_sdp_priority_order(), torch.backends.cuda.cudnn_sdp_enabled()) == flags
    compare.assert_equal_bits(F.scaled_dot_product_attention(q, k, v), want)


def test_sdpa_blocks_nest_and_survive_exceptions():
    """Inner blocks do not end outer ones; activate() outlives a block; an exception ends its block."""
    for outer in (False, True):
        if outer:
            famx.sdpa.activate()
        with pytest.raises(KeyError), famx.sdpa.enabled():
            with famx.sdpa.enabled():
                assert famx.sdpa.is_active()
            assert famx.sdpa.is_active()
            raise KeyError
        assert famx.sdpa.is_active() == outer
    with famx.sdpa.enabled():
        famx.sdpa.deactivate()
        assert famx.sdpa.is_active()  # the block is still open
    assert not famx.sdpa.is_active()


def test_sdpa_through_torchs_registry():
    """torch.nn.attention lists, activates and restores "MXFP8"; a block inside leaves it active."""
    assert "MXFP8" in registry.list_flash_attention_impls()
    registry.activate_flash_attention_impl("MXFP8")
    assert famx.sdpa.is_active()
    with famx.sdpa.enabled():
        pass
    assert famx.sdpa.is_active()
    registry.restore_flash_attention_impl()
    assert not famx.sdpa.is_active()
    famx.sdpa.deactivate()


def test_sdpa_another_implementation_comes_back():
    """An implementation that was active is replaced for the block and active again after it."""
    calls = []

    class Other:
        def __init__(self):
            calls.append("on")

        def remove(self):
            calls.append("off")

    registry.register_flash_attention_impl("other", register_fn=Other)
    registry.activate_flash_attention_impl("other")
    try:
        with famx.sdpa.enabled():
            assert registry.current_flash_attention_impl() == "MXFP8"
        assert registry.current_flash_attention_impl() == "other" and calls == ["on", "off", "on"]
        famx.sdpa.activate()
        registry.activate_flash_attention_impl("other")  # takes over from ours
        assert not famx.sdpa.is_active()
        famx.sdpa.deactivate()
        assert registry.current_flash_attention_impl() == "other"
    finally:
        registry.restore_flash_attention_impl()
        registry._registry._FLASH_ATTENTION_IMPLS.pop("other")


def test_sdpa_without_torchs_registry(monkeypatch):
    """A torch without the registry: the same functions, without it."""
    q, k, v = qkv(requires_grad=False)
    want, tables = F.scaled_dot_product_attention(q, k, v), dispatch_tables()
    monkeypatch.setattr(sdpa_module, "_HAS_REGISTRY", False)
    with famx.sdpa.enabled():
        assert registry.current_flash_attention_impl() is None
        assert not torch.equal(F.scaled_dot_product_attention(q, k, v), want)
    assert dispatch_tables() == tables


def test_sdpa_blocks_of_several_threads():
    """Blocks that overlap in several threads: on while any is open, off after the last, right results throughout."""
    q, k, v = qkv(requires_grad=False, seqlen=16)
    plain = F.scaled_dot_product_attention(q, k, v)
    with famx.sdpa.enabled():
        mx = F.scaled_dot_product_attention(q, k, v)
    wrong, barrier = [], threading.Barrier(4)

    def work():
        barrier.wait()
        for _ in range(20):
            with famx.sdpa.enabled():
                if not torch.equal(F.scaled_dot_product_attention(q, k, v), mx):
                    wrong.append("not MXFP8 inside a block")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not famx.sdpa.is_active()
    compare.assert_equal_bits(F.scaled_dot_product_attention(q, k, v), plain)


def test_sdpa_activation_says_nothing():
    """torch's notice of overridden kernels does not reach the user."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        famx.sdpa.activate()
    assert not caught


# ---- which backward ----------------------------------------------------------------------------


def test_sdpa_backward_after_the_block_is_ours():
    """with enabled(): loss = model(x); then loss.backward() outside gives the gradients of inside."""
    q, k, v = qkv()
    with famx.sdpa.enabled():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        inside = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    outside = torch.autograd.grad(out.sum(), (q, k, v))
    for a, b in zip(inside, outside):
        compare.assert_equal_bits(a, b)
    want = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert not torch.equal(torch.autograd.grad(want.sum(), q)[0], inside[0])


def test_sdpa_backward_of_torchs_forward_is_torchs():
    """A graph from before activation, or of a call that was handed on, has torch's backward bit for bit."""
    q, k, v = qkv()
    mask = torch.rand(33, 33) > 0.3
    mask.fill_diagonal_(True)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    want = torch.autograd.grad(out.sum(), (q, k, v), retain_graph=True)
    with famx.sdpa.enabled():
        for x in (out, F.scaled_dot_product_attention(q, k, v, attn_mask=mask)):
            for a, b in zip(torch.autograd.grad(x.sum(), (q, k, v)), want):
                compare.assert_equal_bits(a, b)


def test_sdpa_backward_of_offloaded_tensors_is_ours():
    """save_on_cpu copies what autograd saved: the backward is ours all the same while active."""
    q, k, v = qkv()
    with famx.sdpa.enabled():
        plain = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).sum(), (q, k, v))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            out = F.scaled_dot_product_attention(q, k, v)
        for a, b in zip(torch.autograd.grad(out.sum(), (q, k, v)), plain):
            compare.assert_equal_bits(a, b)


def test_sdpa_freed_graphs_are_forgotten(monkeypatch):
    """The list of graphs does not grow with the number of calls."""
    dispatch_tables()
    monkeypatch.setattr(_aten._Graphs, "PRUNE_FROM", 8)
    monkeypatch.setattr(_aten._graphs, "_prune_at", 0)
    q, k, v = qkv(1, 1, 1, 32, requires_grad=False)
    with famx.sdpa.enabled():
        for _ in range(30):
            F.scaled_dot_product_attention(q, k, v)
        assert len(_aten._graphs._held) <= 9
    assert not _aten._graphs.alive() and _aten._backwards is None


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)], ids=str)  # fmt: skip
def test_c34_sdpa_only_the_wanted_gradients(wanted):
    """C34: gradients for the inputs that ask, None for the others."""
    q, k, v = qkv()
    with famx.sdpa.enabled():
        full = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).sum(), (q, k, v))
        leaves = [x.detach().requires_grad_(w) for x, w in zip((q, k, v), wanted)]
        F.scaled_dot_product_attention(*leaves).sum().backward()
    for leaf, grad, wants in zip(leaves, full, wanted):
        assert (leaf.grad is not None) == wants
        if wants:
            compare.assert_equal_bits(leaf.grad, grad)


def test_c34_sdpa_second_derivative_raises():
    """C34: a second derivative is refused as torch refuses it for its own flash kernels."""
    q, k, v = qkv()
    with famx.sdpa.enabled():
        out = F.scaled_dot_product_attention(q, k, v)
        (dq,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="derivative.*not implemented"):
            torch.autograd.grad(dq.sum(), q)


def test_c28_sdpa_deterministic_algorithms():
    """C28: under torch.use_deterministic_algorithms the gradients repeat bit for bit."""
    q, k, v = qkv(seqlen=200)
    torch.use_deterministic_algorithms(True)
    try:
        with famx.sdpa.enabled():
            runs = [
                torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).sum(), (q, k, v))
                for _ in range(3)
            ]
    finally:
        torch.use_deterministic_algorithms(False)
    for other in runs[1:]:
        for a, b in zip(other, runs[0]):
            compare.assert_equal_bits(a, b)


@pytest.mark.skipif(
    not sm100.INSTANCES or bool(sm100.WHY_NO_EMULATOR or sm100.WHY_NO_HOST),
    reason="needs device code, the emulator and the C++ operators",
)
def test_sdpa_on_the_emulated_kernels():
    """set_backend("emulator"): forward and backward of the drop-in run the sm_100 PTX; causal top-left, Sk > Sq."""
    q, k, v = (torch.randn(1, 1, s, 64).bfloat16().requires_grad_() for s in (40, 48, 48))
    direct = [x.detach()[:, :, :40].transpose(1, 2).clone().requires_grad_() for x in (q, k, v)]
    famx.set_backend("emulator")
    want = famx.flash_attn_func(*direct, causal=True)
    want_grads = torch.autograd.grad(want.float().square().sum(), direct)
    with famx.sdpa.enabled():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    compare.assert_equal_bits(out.transpose(1, 2).contiguous(), want)
    for got, expected in zip(grads, want_grads):
        compare.assert_equal_bits(got[:, :, :40].transpose(1, 2).contiguous(), expected)
        assert not got[:, :, 40:].any()


# ---- layout ------------------------------------------------------------------------------------


def layouts(x):
    """x (B, H, S, D) as contiguous, from (B, S, H, D), as a slice of something larger, and expanded."""
    wide = torch.cat([x, x], dim=-1)
    return {
        "contiguous": x.contiguous(),
        "bshd": x.transpose(1, 2).contiguous().transpose(1, 2),
        "slice": wide[..., : x.shape[-1]],
        "shbd": x.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3),
    }


@pytest.mark.parametrize("layout", ["contiguous", "bshd", "slice", "shbd"])
def test_c30_sdpa_strides_are_those_that_torch_promises(layout):
    """C30: strides of out, lse and gradients are those of torch's meta kernels; C19, C20: values do not depend on them."""
    tensors = [layouts(x.detach())[layout] for x in qkv()]
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    with famx.sdpa.enabled():
        out, lse = op(*tensors)
        want_out, want_lse = op(*(x.contiguous() for x in tensors))
        dout = torch.ones(()).expand(out.shape)  # stride 0
        grads = backward(dout, *tensors, out, lse, 0.0, False)
        want = backward(torch.ones_like(want_out), *(x.contiguous() for x in tensors), want_out, want_lse, 0.0, False)  # fmt: skip
    meta = [x.to("meta").as_strided(x.shape, x.stride()) for x in (dout, *tensors, out, lse)]
    promised = [*op(*meta[1:4]), *backward(*meta, 0.0, False)]
    for got, want_tensor, shape in zip((out, lse, *grads), (want_out, want_lse, *want), promised):
        assert (got.shape, got.stride(), got.dtype) == (shape.shape, shape.stride(), shape.dtype)
        compare.assert_equal_bits(got.contiguous(), want_tensor.contiguous())


# ---- compile, autocast, func, modules ----------------------------------------------------------


def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_c31_sdpa_compiles_without_graph_break(backend):
    """C31: fullgraph, forward and backward, views as inputs; a compiled function follows the activation."""
    tensors = [layouts(x.detach())["bshd"].requires_grad_() for x in qkv()]
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    plain = attend(*tensors)
    with famx.sdpa.enabled():
        want, out = attend(*tensors), compiled(*tensors)
        assert not torch.equal(want, plain)
        compare.assert_equal_bits(out, want)
        want = torch.autograd.grad(want.square().sum(), tensors)
        for a, b in zip(torch.autograd.grad(out.square().sum(), tensors), want):
            compare.assert_equal_bits(a, b)
    compare.assert_equal_bits(compiled(*tensors), plain)


def test_c32_sdpa_dynamic_shapes():
    """C32: one compiled function for several lengths, each equal to eager, few compilations."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, fullgraph=True, backend=counter, dynamic=True)
    with famx.sdpa.enabled():
        for seqlen in (128, 129, 257, 64, 1):
            tensors = qkv(1, 2, seqlen, 32)
            compare.assert_equal_bits(compiled(*tensors), attend(*tensors))
    assert counter.frame_count <= 2


def test_c42_sdpa_compiled_mask_is_not_dropped():
    """C42 under compile: a mask reaches torch's kernel."""
    q, k, v = qkv(requires_grad=False)
    mask = torch.ones(33, 33, dtype=torch.bool).tril()
    compiled = torch.compile(F.scaled_dot_product_attention, fullgraph=True, backend="aot_eager")
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with famx.sdpa.enabled():
        compare.assert_equal_bits(compiled(q, k, v, attn_mask=mask), want)


def test_c45_sdpa_autocast():
    """C45: under autocast fp32 inputs are attended in bf16, and the leaves get fp32 gradients."""
    q, k, v = qkv()
    with famx.sdpa.enabled(), torch.autocast("cpu", torch.bfloat16):
        out = F.scaled_dot_product_attention(q, k, v.bfloat16())
        want = F.scaled_dot_product_attention(*(x.bfloat16() for x in (q, k, v)))
    assert out.dtype == torch.bfloat16
    compare.assert_equal_bits(out, want)
    assert torch.autograd.grad(out.sum(), q)[0].dtype == torch.float32


def test_sdpa_inference_mode():
    """The values of inference mode are those of training."""
    tensors = qkv()
    with famx.sdpa.enabled():
        want = F.scaled_dot_product_attention(*tensors)
        with torch.inference_mode():
            got = F.scaled_dot_product_attention(*tensors)
    compare.assert_equal_bits(got.clone(), want)


def test_sdpa_func_transforms():
    """torch.func.grad and vmap, as far as torch's own kernel takes them, are MXFP8."""
    q, k, v = (x.detach() for x in qkv())

    def loss(q, k, v):
        return F.scaled_dot_product_attention(q, k, v).square().sum()

    with famx.sdpa.enabled():
        leaf = q.clone().requires_grad_()
        want = torch.autograd.grad(loss(leaf, k, v), leaf)[0]
        compare.assert_equal_bits(torch.func.grad(loss)(q, k, v), want)
        per_batch = torch.func.vmap(torch.func.grad(loss))(*(x.unsqueeze(1) for x in (q, k, v)))
        compare.assert_close(per_batch.squeeze(1), want, row=tol.FP32_EXACT)


@pytest.mark.parametrize("reentrant", [False, True])
def test_sdpa_checkpoint(reentrant):
    """Activation checkpointing recomputes to the same gradients."""
    tensors = qkv()
    with famx.sdpa.enabled():
        want = torch.autograd.grad(attend(*tensors).square().sum(), tensors)
        leaves = [x.detach().requires_grad_() for x in tensors]
        out = torch.utils.checkpoint.checkpoint(attend, *leaves, use_reentrant=reentrant)
        out.square().sum().backward()
    for leaf, grad in zip(leaves, want):
        compare.assert_equal_bits(leaf.grad, grad)


def test_sdpa_under_modules():
    """nn.MultiheadAttention and a Transformer layer train through it, near torch's own result."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    x = torch.randn(2, 33, 64)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(33)

    def gradients(**options):
        layer.zero_grad()
        layer(x, **options).square().mean().backward()
        return torch.cat([p.grad.flatten() for p in layer.parameters()])

    plain, masked = gradients(), gradients(src_mask=causal)
    with famx.sdpa.enabled():
        mx, mx_masked = gradients(), gradients(src_mask=causal)
    assert not torch.equal(mx, plain)
    compare.assert_close(mx, plain, frobenius=tol.QUALITY_SMALL)
    compare.assert_equal_bits(mx_masked, masked)


# ---- the order of torch's kernels on a GPU ------------------------------------------------------


@pytest.fixture
def made_up_cuda(monkeypatch):
    """torch's switches as on a machine with cuDNN first; nothing of CUDA itself."""
    order = [3, 1, 2, 0, 4]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *shape, **options: torch.empty(0))
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *tensors: order.clear() or order.extend([3, 1, 2, 0, 4]))  # fmt: skip
    monkeypatch.setattr(torch._C, "_get_sdp_priority_order", lambda: list(order))
    monkeypatch.setattr(torch._C, "_set_sdp_priority_order", lambda new: order.clear() or order.extend(new))  # fmt: skip
    return order


def test_sdpa_comes_before_cudnn_where_cuda_is_up(made_up_cuda, monkeypatch):
    """Flash first, cuDNN behind it and not switched off; undone, unless somebody changed the order since."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    undo = _aten._flash_before_cudnn()
    assert made_up_cuda == [1, 3, 2, 0, 4] and torch.backends.cuda.cudnn_sdp_enabled()
    undo()
    assert made_up_cuda == [3, 1, 2, 0, 4]
    undo = _aten._flash_before_cudnn()
    made_up_cuda[:] = [0, 1, 2, 3, 4]
    undo()
    assert made_up_cuda == [0, 1, 2, 3, 4]


def test_sdpa_switches_cudnn_off_before_cuda_is_up(made_up_cuda, monkeypatch):
    """Without a CUDA context torch's order would be overwritten later, so cuDNN's kernel is off while active."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for before in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(before)
        undo = _aten._flash_before_cudnn()
        assert not torch.backends.cuda.cudnn_sdp_enabled() and made_up_cuda == [3, 1, 2, 0, 4]
        undo()
        assert torch.backends.cuda.cudnn_sdp_enabled() == before
    torch.backends.cuda.enable_cudnn_sdp(True)


# ---- varlen_attn -------------------------------------------------------------------------------


KNOWN = inspect.signature(varlen.varlen_attn).parameters
# torch 2.11's varlen_attn knows neither; grouped heads are then left out of the tests.
GROUPED = {"enable_gqa": True} if "enable_gqa" in KNOWN else {}


def varlen_needs(name):
    """Skips where this torch's varlen_attn lacks an argument that the test gives."""
    reason = f"varlen_attn of torch {torch.__version__} has no argument {name}"
    return pytest.mark.skipif(name not in KNOWN, reason=reason)


def packed(
    lengths=(7, 0, 20, 5), heads=4, heads_k=2 if GROUPED else 4, head_dim=64, dtype=torch.float32
):
    """Leaves q (T, H, D), k, v (T, Hkv, D), and offsets."""
    generator = torch.Generator().manual_seed(2)
    total = sum(lengths)
    leaves = [
        torch.randn(total, h, head_dim, generator=generator).to(dtype).requires_grad_()
        for h in (heads, heads_k, heads_k)
    ]
    return leaves, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), max(lengths)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (3, 2)], ids=str)
def test_varlen_attn_is_the_direct_api(window):
    """torch.nn.attention.varlen.varlen_attn: out, lse and gradients of flash_attn_varlen_func bit for bit."""
    leaves, cu, longest = packed()
    want, want_lse = famx.flash_attn_varlen_func(
        *leaves, cu, cu, longest, longest, window_size=window, return_lse=True
    )
    options = {"window_size": window, **GROUPED, "return_aux": varlen.AuxRequest(lse=True)}
    with famx.sdpa.enabled():
        out, lse = varlen.varlen_attn(*leaves, cu, cu, longest, longest, **options)
        grads = torch.autograd.grad(out.square().sum(), leaves)
    compare.assert_equal_bits(out, want)
    compare.assert_equal_bits(lse, want_lse)
    for a, b in zip(grads, torch.autograd.grad(want.square().sum(), leaves)):
        compare.assert_equal_bits(a, b)


@varlen_needs("num_splits")
def test_varlen_attn_scale_and_hints():
    """scale is obeyed; num_splits, a hint for speed, changes nothing."""
    leaves, cu, longest = packed(heads_k=4)
    want = famx.flash_attn_varlen_func(*leaves, cu, cu, longest, longest, softmax_scale=0.3)
    with famx.sdpa.enabled():
        out = varlen.varlen_attn(*leaves, cu, cu, longest, longest, scale=0.3, num_splits=1)
    compare.assert_equal_bits(out, want)


@pytest.mark.skipif(
    not hasattr(varlen, "varlen_attn_out"), reason="this torch has no varlen_attn_out"
)
def test_varlen_attn_out_writes_where_it_is_told():
    """varlen_attn_out fills the given tensor."""
    leaves, cu, longest = packed(heads_k=4)
    q, k, v = (x.detach() for x in leaves)
    want = famx.flash_attn_varlen_func(q, k, v, cu, cu, longest, longest)
    target = torch.full((32, 8, 64), 7.0)[:, ::2]
    with famx.sdpa.enabled():
        out = varlen.varlen_attn_out(target, q, k, v, cu, cu, longest, longest)
    assert out is target
    compare.assert_equal_bits(target.contiguous(), want)


@varlen_needs("seqused_k")
def test_varlen_attn_refuses_what_it_cannot_serve():
    """On a CPU torch has no kernel to hand on to: the error names the option."""
    leaves, cu, longest = packed(heads_k=4)
    q, k, v = (x.detach() for x in leaves)
    used = torch.tensor([3, 0, 4, 5], dtype=torch.int32)
    with famx.sdpa.enabled():
        with pytest.raises(NotImplementedError, match="no CPU kernel.*seqused_k"):
            varlen.varlen_attn(q, k, v, cu, cu, longest, longest, seqused_k=used)
        with pytest.raises(NotImplementedError, match="no CPU kernel.*float64"):
            varlen.varlen_attn(*(x.double() for x in (q, k, v)), cu, cu, longest, longest)
        with pytest.raises(TypeError, match="cum_seq_q.*int32.*int64"):
            varlen.varlen_attn(q, k, v, cu.long(), cu.long(), longest, longest)
        with pytest.raises(ValueError, match="at least 20.*got 19"):
            varlen.varlen_attn(q, k, v, cu, cu, 19, 19)
    with pytest.raises(NotImplementedError):
        varlen.varlen_attn(q, k, v, cu, cu, longest, longest)  # torch's own error again


def test_c31_varlen_attn_compiles():
    """C31: fullgraph, forward and backward."""
    leaves, cu, longest = packed()

    def call(*tensors):
        return varlen.varlen_attn(*tensors, cu, cu, longest, longest, **GROUPED)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with famx.sdpa.enabled():
        out, want = compiled(*leaves), call(*leaves)
        compare.assert_equal_bits(out, want)
        want = torch.autograd.grad(want.square().sum(), leaves)
        for a, b in zip(torch.autograd.grad(out.square().sum(), leaves), want):
            compare.assert_equal_bits(a, b)


# ---- the CUDA operators' functions, on CPU tensors ----------------------------------------------


@pytest.mark.parametrize("seqlens", [(33, 33), (20, 33), (33, 20)], ids=str)
def test_c12_sdpa_cuda_operator_aligns_lower_right(seqlens):
    """C12: torch's CUDA operator aligns bottom-right (causal_lower_right calls it so): values, layouts and gradients."""
    q, k, v, dout = (torch.randn(2, 2, seqlens[i], 64) for i in (0, 1, 1, 0))
    leaves = [x.transpose(1, 2).detach().clone().requires_grad_() for x in (q, k, v)]
    want, want_lse = famx.flash_attn_func(*leaves, causal=True, return_lse=True)
    want.backward(dout.transpose(1, 2))
    out, lse, *rest = _aten._sdpa_cuda(q, k, v, 0.0, True)
    compare.assert_equal_bits(out, want.transpose(1, 2).contiguous())
    compare.assert_equal_bits(lse, want_lse)
    meta = [x.to("meta") for x in (q, k, v)]
    promised = torch.ops.aten._scaled_dot_product_flash_attention(*meta, 0.0, True)
    for got, shape in zip((out, lse, *rest), promised, strict=True):
        if isinstance(shape, torch.Tensor):
            assert (got.shape, got.stride(), got.dtype) == (
                shape.shape,
                shape.stride(),
                shape.dtype,
            )
        else:
            assert got == shape
    seed, offset = rest[4], rest[5]
    args = (dout, q, k, v, out, lse, None, None, *seqlens, 0.0, True, seed, offset)
    for got, leaf, like in zip(_aten._sdpa_cuda_backward(*args), leaves, (q, k, v)):
        assert got.stride() == like.stride()
        compare.assert_equal_bits(got, leaf.grad.transpose(1, 2).contiguous())


def test_sdpa_cuda_operator_hands_on():
    """Dropout and a debug mask are torch's."""
    q, k, v = qkv()
    for args in ((0.1, False, False), (0.0, False, True)):
        with pytest.raises(_aten._HandOn):
            _aten._sdpa_cuda(q, k, v, *args)
