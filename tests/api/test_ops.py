"""The operators as torch.library sees them: fakes, autograd, compile, export, checkpointing, sharding, autocast."""

import functools

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F

import flash_attn_mx as famx

OPS = torch.ops.flash_attn_mx
E4M3 = torch.float8_e4m3fn
# test_schema of opcheck cannot compare fp8 inputs (torch has no fp8 kernel for its checksum), so it is left out where they occur.
FP8_SAFE = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def make_qkv(
    batch=2,
    seqlen_q=33,
    seqlen_k=49,
    nheads=4,
    nheads_k=2,
    head_dim=64,
    dtype=torch.float32,
    grad=True,
):
    torch.manual_seed(0)
    shapes = [(batch, seqlen_q, nheads, head_dim)] + [(batch, seqlen_k, nheads_k, head_dim)] * 2
    return [torch.randn(s).to(dtype).requires_grad_(grad) for s in shapes]


def forward_arguments(q, k, v, window=(-1, 0)):
    quantised = [
        OPS.quantize(x.detach(), axis, "rceil", E4M3, None)
        for x, axis in ((q, "rowwise"), (k, "rowwise"), (v, "colwise"), (v, "tokenwise"))
    ]
    flat = [t for pair in quantised for t in pair]
    return (*flat, None, None, q.shape[1], k.shape[1], 0.125, *window, torch.float32)


def backward_arguments(q, k, v, needs=(True, True, True)):
    fwd = forward_arguments(q, k, v)
    out, lse = OPS.fwd(*fwd)
    dout = torch.randn_like(out)

    def both(x):
        return [
            t
            for axis in ("rowwise", "colwise")
            for t in OPS.quantize(x.detach(), axis, "rceil", E4M3, None)
        ]

    return (
        dout,
        out,
        lse,
        *both(dout),
        *both(q),
        *both(k),
        *fwd[6:8],
        *fwd[8:15],
        False,
        list(needs),
    )


@pytest.mark.parametrize("axis", ["rowwise", "colwise", "tokenwise"])
@pytest.mark.parametrize(
    "shape", [(2, 33, 4, 64), (70, 3, 40), (33, 64)], ids=["dense", "packed", "matrix"]
)
def test_c30_opcheck_quantize(axis, shape):
    """The fake of quantize promises the real shapes, dtypes and strides."""
    torch.library.opcheck(OPS.quantize.default, (torch.randn(shape), axis, "rceil", E4M3, None))


def test_c30_opcheck_quantize_packed_and_strided():
    """Packed sequences and a transposed view."""
    cu = torch.tensor([0, 5, 5, 70], dtype=torch.int32)
    torch.library.opcheck(
        OPS.quantize.default, (torch.randn(70, 3, 40), "colwise", "rceil", E4M3, cu)
    )
    view = torch.randn(2, 4, 33, 64).transpose(1, 2)
    for axis in ("rowwise", "colwise", "tokenwise"):
        torch.library.opcheck(OPS.quantize.default, (view, axis, "floor", torch.float8_e5m2, None))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 3)])
def test_c30_opcheck_fwd(window):
    """fwd: fake equals real; fp8 operands."""
    arguments = forward_arguments(*make_qkv(), window=window)
    torch.library.opcheck(OPS.fwd.default, arguments, test_utils=FP8_SAFE)


@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, True, True)])
def test_c30_opcheck_bwd(needs):
    """bwd: fake equals real, gradients that nobody wants are empty."""
    arguments = backward_arguments(*make_qkv(), needs=needs)
    torch.library.opcheck(OPS.bwd.default, arguments, test_utils=FP8_SAFE)


def test_c30_fake_and_real_agree_on_strides():
    """Shape, dtype and stride of every output, for transposed inputs with grouped heads."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    q, k, v = make_qkv(grad=False)
    views = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    real = famx.flash_attn_func(*views, causal=True, return_lse=True)
    with FakeTensorMode() as mode:
        fake = famx.flash_attn_func(
            *(mode.from_tensor(x) for x in views), causal=True, return_lse=True
        )
    for a, b in zip(real, fake):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_c33_outputs_alias_nothing():
    """No output shares memory with another output or an input."""
    arguments = forward_arguments(*make_qkv())
    tensors = list(OPS.fwd(*arguments)) + [a for a in arguments if isinstance(a, torch.Tensor)]
    grads = list(OPS.bwd(*backward_arguments(*make_qkv())))
    for group in (tensors, grads):
        pointers = [t.untyped_storage().data_ptr() for t in group]
        assert len(set(pointers)) == len(pointers)


def gradients(function, *inputs):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    out.backward(torch.ones_like(out) * 0.5)
    return [out.detach(), *(x.grad for x in leaves)]


def assert_same(got, expected):
    for a, b in zip(got, expected):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert torch.equal(a, b)


def test_c31_compile_fullgraph_dense():
    """Forward and backward compile to one graph and give eager's bits."""
    torch._dynamo.reset()
    inputs = make_qkv()

    def attention(q, k, v):
        return famx.flash_attn_func(q, k, v, causal=True)

    explanation = torch._dynamo.explain(attention)(*inputs)
    assert explanation.graph_break_count == 0
    assert_same(
        gradients(torch.compile(attention, fullgraph=True), *inputs), gradients(attention, *inputs)
    )


def test_c31_compile_fullgraph_varlen_does_not_recompile_for_new_offsets():
    """Packed sequences: offsets are data, so changing them reuses the compiled graph."""
    torch._dynamo.reset()
    q, k, v = (torch.randn(70, 2, 32) for _ in range(3))
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def attention(q, k, v, cu):
        return famx.flash_attn_varlen_func(q, k, v, cu, cu, 64, 64, causal=True)

    compiled = torch.compile(attention, fullgraph=True, backend=counter)
    for offsets in ([0, 10, 70], [0, 37, 60], [0, 64, 70]):
        cu = torch.tensor(offsets, dtype=torch.int32)
        got = gradients(functools.partial(compiled, cu=cu), q, k, v)
        assert_same(got, gradients(functools.partial(attention, cu=cu), q, k, v))
    assert counter.frame_count == 1


def test_c31_compile_self_attention_on_one_tensor():
    """One tensor as q, k and v."""
    torch._dynamo.reset()

    def attention(x):
        return famx.flash_attn_func(x, x, x)

    x = torch.randn(1, 40, 2, 32)
    assert_same(
        gradients(torch.compile(attention, fullgraph=True, backend="aot_eager"), x),
        gradients(attention, x),
    )


def test_c32_compile_dynamic_lengths():
    """Symbolic lengths: 128, 129, 257, 64, 1, 0 all equal eager with few recompiles."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def attention(q, k, v):
        return famx.flash_attn_func(q, k, v, causal=True)

    compiled = torch.compile(attention, dynamic=True, fullgraph=True, backend=counter)
    for seqlen in (128, 129, 257, 64, 1, 0):
        inputs = make_qkv(1, seqlen, seqlen, 2, 2, 32)
        assert_same(gradients(compiled, *inputs), gradients(attention, *inputs))
    assert counter.frame_count <= 4  # general, and torch specialises sizes 0 and 1


def test_export_keeps_the_operators():
    """torch.export with a dynamic length holds our operators and runs."""

    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return famx.flash_attn_func(q, k, v, causal=True)

    q, k, v = make_qkv(1, 64, 64, 2, 2, 32, grad=False)
    seqlen = torch.export.Dim("seqlen", min=33, max=4096)  # torch specialises one-block scales
    program = torch.export.export(
        Module(), (q, k, v), dynamic_shapes=[{1: seqlen}] * 3, strict=False
    )
    names = {str(node.target) for node in program.graph.nodes}
    assert "flash_attn_mx.fwd.default" in names
    longer = make_qkv(1, 200, 200, 2, 2, 32, grad=False)
    assert torch.equal(program.module()(*longer), famx.flash_attn_func(*longer, causal=True))


def test_activation_checkpointing_runs_fwd_once_if_selective():
    """Plain checkpointing recomputes fwd; the selective form saves it."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    class Count(TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Count.calls += func is OPS.fwd.default
            return func(*args, **(kwargs or {}))

    def attention(q, k, v):
        return famx.flash_attn_func(q * 1.0, k, v)

    expected = gradients(attention, *make_qkv())
    for contexts, calls in (
        (None, 2),
        (lambda: create_selective_checkpoint_contexts([OPS.fwd.default]), 1),
    ):
        extra = {} if contexts is None else {"context_fn": contexts}
        Count.calls = 0
        with Count():
            function = functools.partial(checkpoint, attention, use_reentrant=False, **extra)
            got = gradients(function, *make_qkv())
        assert Count.calls == calls
        assert_same(got, expected)


def test_c45_autocast_casts_and_mixed_dtypes_are_refused():
    """Inside autocast: one dtype, fp32 leaves get fp32 gradients. Outside: TypeError that names the three dtypes."""
    q, k, v = make_qkv()
    mixed = (q, k, v.detach().bfloat16().requires_grad_())
    with pytest.raises(TypeError, match="float32/float32/bfloat16"):
        famx.flash_attn_func(*mixed)
    with torch.autocast("cpu", torch.bfloat16):
        out = famx.flash_attn_func(*mixed)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32 and mixed[2].grad.dtype == torch.bfloat16
    expected = famx.flash_attn_func(*(x.detach().bfloat16() for x in mixed))
    assert torch.equal(out.detach(), expected)
    with pytest.raises(TypeError, match="float64"):
        famx.flash_attn_func(*(x.detach().double() for x in (q, k, v)))
    assert famx.flash_attn_func(*(x.detach().half() for x in (q, k, v))).dtype == torch.float16


def test_autocast_does_not_reach_into_the_operators():
    """The operators compute in fp32 whatever autocast says."""
    arguments = forward_arguments(*make_qkv())
    expected = OPS.fwd(*arguments)
    with torch.autocast("cpu", torch.bfloat16):
        got = OPS.fwd(*arguments)
        grads = OPS.bwd(*backward_arguments(*make_qkv()))
    assert_same(got, expected)
    assert_same(grads, OPS.bwd(*backward_arguments(*make_qkv())))


def test_operators_without_gradient_say_so():
    """quantize and a second backward raise instead of returning None."""
    x = torch.randn(32, 32, requires_grad=True)
    data, _ = OPS.quantize(x, "rowwise", "rceil", E4M3, None)
    with pytest.raises(NotImplementedError, match="quantize has no gradient"):
        data.float().sum().backward()
    q, k, v = make_qkv()
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(famx.flash_attn_func(q, k, v).sum(), q, create_graph=True)


@pytest.fixture
def mesh():
    """A device mesh of two ranks without a second process."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("placement", ["heads", "batch", "replicated"])
def test_c46_dtensor_keeps_placement(mesh, placement):
    """Sharded on heads or batch, or replicated: output and gradients keep the placement, local results are right."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    spec = {"heads": Shard(2), "batch": Shard(0), "replicated": Replicate()}[placement]
    inputs = make_qkv(2, 33, 33, 4, 2, 64)
    locals_ = [
        distribute_tensor(x.detach(), mesh, [spec], src_data_rank=None).requires_grad_()
        for x in inputs
    ]
    out = famx.flash_attn_func(*locals_, causal=True)
    assert tuple(out.placements) == (spec,)
    out.backward(torch.ones_like(out) * 0.5)
    assert all(tuple(x.grad.placements) == (spec,) for x in locals_)
    mine = [x.to_local().detach() for x in locals_]
    expected = gradients(lambda *x: famx.flash_attn_func(*x, causal=True), *mine)
    assert_same([out.to_local().detach(), *(x.grad.to_local() for x in locals_)], expected)


def test_c46_dtensor_sharded_sequence_is_refused(mesh):
    """Sequence sharding would need communication inside attention: refused with guidance."""
    from torch.distributed.tensor import Shard, distribute_tensor

    inputs = [
        distribute_tensor(x.detach(), mesh, [Shard(1)], src_data_rank=None)
        for x in make_qkv(2, 64, 64, 4, 2, 64)
    ]
    with pytest.raises(ValueError, match="batch .0. or heads .2."):
        famx.flash_attn_func(*inputs)


def test_function_agrees_with_sdpa_roughly():
    """Guard of this file: what it compares is attention."""
    q, k, v = make_qkv(grad=False, nheads_k=4)
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(
        1, 2
    )
    error = (famx.flash_attn_func(q, k, v) - expected).norm() / expected.norm()
    assert error < 0.06
