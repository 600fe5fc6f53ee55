"""The portable path on a CUDA GPU: same bytes as the CPU, streams, graphs, devices (run on a Hopper GPU; not part of make test)."""

import pytest
import torch

import flash_attn_mx as famx
from flash_attn_mx.quantize import quantize_pytorch

pytestmark = [
    pytest.mark.gpu_sm90,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
AXES = ("rowwise", "colwise", "tokenwise")


@pytest.fixture(autouse=True)
def quiet():
    famx.set_fallback("silent")


def qkv(
    batch=2, seqlen_q=257, seqlen_k=300, nheads=4, nheads_k=2, head_dim=64, dtype=torch.float32
):
    torch.manual_seed(0)
    shapes = [(batch, seqlen_q, nheads, head_dim)] + [(batch, seqlen_k, nheads_k, head_dim)] * 2
    return [torch.randn(s).to(dtype) for s in shapes]


def run(inputs, dout, function=famx.flash_attn_func, **options):
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out, lse = function(*leaves, return_lse=True, **options)
    out.backward(dout)
    return [out.detach(), lse, *(x.grad for x in leaves)]


def assert_near(got, expected):
    """fp32 summation order is all that may differ, and a P or dS byte that stands at a rounding boundary."""
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, expected):
        a, b = a.cpu().double(), b.double()
        assert torch.equal(torch.isfinite(a), torch.isfinite(b)), name
        finite = torch.isfinite(b)
        error = (a - b)[finite].norm() / b[finite].norm()
        assert error < (1e-6 if name == "lse" else 2e-3), (name, error)


@pytest.mark.parametrize("rounding", ["rceil", "floor"])
@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_c51_quantise_gives_the_cpu_bytes(axis, rounding, dtype):
    """GPU and CPU paths store equal payload and scale bytes, for every bf16 pattern and for fp32 of all magnitudes."""
    patterns = (
        torch.arange(65536, dtype=torch.int32)
        .to(torch.int16)
        .view(torch.bfloat16)
        .view(1, 1024, 1, 64)
    )
    wide = torch.randn(2, 96, 3, 64) * torch.exp2(torch.randint(-140, 120, (2, 96, 3, 64)).float())
    for x in (patterns, wide):
        for op in (torch.ops.flash_attn_mx.quantize, quantize_pytorch):
            cpu = op(x, axis, rounding, dtype, None)
            gpu = op(x.cuda(), axis, rounding, dtype, None)
            for a, b in zip(cpu, gpu):
                assert torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8))


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window_size": (70, 5)}], ids=["full", "causal", "window"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c39_gpu_without_kernels_gives_the_cpu_results(options, dtype):
    """Forward and backward of the portable path agree with the CPU."""
    inputs = qkv(dtype=dtype)
    dout = torch.randn(2, 257, 4, 64).to(dtype)
    expected = run(inputs, dout, **options)
    got = run([x.cuda() for x in inputs], dout.cuda(), **options)
    if dtype == torch.float32:
        assert_near(got, expected)
    else:
        for a, b in zip(got, expected):
            torch.testing.assert_close(a.cpu(), b, atol=2e-2, rtol=2e-2)


def test_c29_packed_sequences_on_gpu():
    """Packed sequences equal dense calls, one by one."""
    q, k, v = (x[0].cuda() for x in qkv(1, 300, 300, 4, 2))
    cu = torch.tensor([0, 37, 37, 300], dtype=torch.int32, device="cuda")
    out = famx.flash_attn_varlen_func(q, k, v, cu, cu, 263, 263, causal=True)
    for a, b in ((0, 37), (37, 300)):
        dense = famx.flash_attn_func(*(x[a:b].unsqueeze(0) for x in (q, k, v)), causal=True)
        torch.testing.assert_close(out[a:b], dense[0], atol=1e-5, rtol=1e-5)


def test_c50_no_leak_on_gpu():
    """Future tokens, NaN and Inf included, leave earlier rows bit-identical."""
    q, k, v = (x.cuda() for x in qkv(1, 300, 300, 2, 2))
    expected = famx.flash_attn_func(q, k, v, causal=True)
    for value in (2.0**20, float("nan"), float("inf")):
        k2, v2 = k.clone(), v.clone()
        k2[:, 150:], v2[:, 150:] = value, value
        assert torch.equal(famx.flash_attn_func(q, k2, v2, causal=True)[:, :150], expected[:, :150])


def test_c28_deterministic_gradients_on_gpu():
    """20 backward runs give the same bits."""
    inputs = [x.cuda() for x in qkv(2, 512, 512, 8, 2, 128)]
    dout = torch.randn(2, 512, 8, 128, device="cuda")
    first = run(inputs, dout, causal=True, deterministic=True)
    for _ in range(20):
        assert all(
            torch.equal(a, b)
            for a, b in zip(run(inputs, dout, causal=True, deterministic=True), first)
        )


def test_c26_current_stream_and_graph_replay():
    """Work runs on the current stream, and a captured forward and backward replays with new inputs."""
    static = [x.cuda().requires_grad_() for x in qkv()]
    dout = torch.randn(2, 257, 4, 64, device="cuda")

    def step():
        out = famx.flash_attn_func(*static, causal=True)
        return [out, *torch.autograd.grad(out, static, dout)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x in static:
            x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, step()))


def test_c31_dense_call_does_not_synchronise():
    """No device-to-host copy in forward and backward of the dense path."""
    inputs = [x.cuda().requires_grad_() for x in qkv()]
    dout = torch.randn(2, 257, 4, 64, device="cuda")
    famx.flash_attn_func(*inputs, causal=True).backward(dout)
    torch.cuda.set_sync_debug_mode("error")
    try:
        famx.flash_attn_func(*inputs, causal=True).backward(dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_c25_tensors_on_another_device():
    """The tensors' device computes, the current one stays current, mixed devices are refused."""
    inputs = qkv()
    dout = torch.randn(2, 257, 4, 64)
    on_0 = run([x.to("cuda:0") for x in inputs], dout.to("cuda:0"), causal=True)
    on_1 = run([x.to("cuda:1") for x in inputs], dout.to("cuda:1"), causal=True)
    assert torch.cuda.current_device() == 0
    assert all(x.device == torch.device("cuda:1") for x in on_1)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(on_0, on_1))
    with pytest.raises(ValueError, match="one device"):
        famx.flash_attn_func(inputs[0].to("cuda:0"), *(x.to("cuda:1") for x in inputs[1:]))


def test_c43_explain_on_gpu():
    """The reason names the capability."""
    plan = famx.explain(*(x.cuda() for x in qkv()))
    major, minor = torch.cuda.get_device_capability()
    assert plan.backend == "portable" and f"{major}.{minor}" in str(plan)
    assert not famx.is_available()
