"""torch's attention functions on MXFP8 on a CUDA GPU (run on a Hopper GPU; not part of make test).

The portable path computes here; what is tested is that calls arrive at all, past cuDNN, and come back as torch promises.
"""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, bias, sdpa_kernel

import flash_attn_mx as famx

pytestmark = [
    pytest.mark.gpu_sm90,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(autouse=True)
def settings():
    famx.set_fallback("silent")
    torch.zeros(1, device="cuda")
    yield
    assert not famx.sdpa.is_active()


def heads_first(seqlen_q=257, seqlen_k=None, heads=4, heads_k=None, head_dim=64, dtype=torch.bfloat16):  # fmt: skip
    """q, k, v, dout in SDPA's layout, as models make it: transposed views of (B, S, H, D)."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(seqlen_q, heads), (seqlen_k or seqlen_q, heads_k or heads)]
    shapes = [*shapes, shapes[1], shapes[0]]
    return [
        torch.randn(2, s, h, head_dim, generator=generator).to("cuda", dtype).transpose(1, 2)
        for s, h in shapes
    ]


def run(q, k, v, dout, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def run_direct(q, k, v, dout, **options):
    leaves = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    out = famx.flash_attn_func(*leaves, **options)
    grads = torch.autograd.grad(out, leaves, dout.transpose(1, 2))
    return [x.transpose(1, 2) for x in (out.detach(), *grads)]


def assert_equal(got, want):
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert torch.equal(a, b), (name, float((a - b).abs().max()))


BEFORE_CUDA = """
import torch, torch.nn.functional as F, flash_attn_mx as famx
famx.set_fallback("silent")
if {early}:
    famx.sdpa.activate()
    assert not torch.cuda.is_initialized()
q, k, v = (torch.randn(1, 2, 300, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
if not {early}:
    famx.sdpa.activate()
want = famx.flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
assert torch.equal(F.scaled_dot_product_attention(q, k, v), want), "not MXFP8"
famx.sdpa.deactivate()
assert torch.backends.cuda.cudnn_sdp_enabled()
assert not torch.equal(F.scaled_dot_product_attention(q, k, v), want), "still MXFP8"
print("arrived")
"""


@pytest.mark.parametrize("early", [True, False], ids=["before CUDA is up", "after"])
def test_sdpa_arrives_before_cudnn(early):
    """In a fresh process, whatever comes first, the default call reaches MXFP8 and not cuDNN; deactivation undoes it."""
    code = BEFORE_CUDA.format(early=early)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "arrived", result.stderr


def test_sdpa_arrives_where_cudnn_is_allowed_too():
    """sdpa_kernel([FLASH, CUDNN]) prefers ours while active."""
    problem = heads_first()
    with famx.sdpa.enabled():
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
            got = run(*problem)
    assert_equal(got, run_direct(*problem))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [33, 64, 80, 128, 256])
def test_sdpa_is_the_direct_api(head_dim, causal, dtype):
    """Values and gradients, also of a head size that torch pads to a multiple of 8."""
    problem = heads_first(head_dim=head_dim, dtype=dtype)
    with famx.sdpa.enabled():
        got = run(*problem, is_causal=causal)
    want = run_direct(*problem, causal=causal)
    assert [x.shape for x in got] == [x.shape for x in want]
    if head_dim % 8 == 0:
        assert_equal(got, want)
    for a, b in zip(got, want):  # zeros up to a multiple of 8 may change the order of fp32 sums
        assert (a - b).float().norm() < 2e-3 * b.float().norm()


def test_sdpa_grouped_heads_and_scale():
    """enable_gqa and scale arrive."""
    problem = heads_first(heads=8, heads_k=2, seqlen_k=300)
    with famx.sdpa.enabled():
        got = run(*problem, enable_gqa=True, scale=0.3)
    assert_equal(got, run_direct(*problem, softmax_scale=0.3))


@pytest.mark.parametrize("seqlens", [(100, 300), (300, 100)], ids=str)
def test_c12_sdpa_causal_with_other_lengths(seqlens):
    """C12: top-left through torch's kernel; causal_lower_right is ours."""
    q, k, v, dout = heads_first(*seqlens)
    want = run(q, k, v, dout, is_causal=True)
    with famx.sdpa.enabled():
        got = run(q, k, v, dout, is_causal=True)
        lower = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.causal_lower_right(*seqlens))
    for a, b in zip(got, want):
        assert (a - b).abs().max() <= 0.02 * b.abs().max()
    assert torch.equal(lower, run_direct(q, k, v, dout, causal=True)[0])


@pytest.mark.parametrize("case", ["mask", "float32", "dropout", "head_dim 264"])
def test_c42_sdpa_hands_on(case):
    """C42: what MXFP8 does not take gives torch's result, with one notice."""
    options, shape = {}, {}
    if case == "mask":
        options["attn_mask"] = torch.ones(257, 257, dtype=torch.bool, device="cuda").tril()
    elif case == "float32":
        shape["dtype"] = torch.float32
    elif case == "dropout":
        options["dropout_p"] = 0.3
    else:
        shape["head_dim"] = 264
    q, k, v, _ = heads_first(**shape)
    torch.backends.cuda.enable_cudnn_sdp(False)  # the same torch kernel both times
    try:
        torch.manual_seed(0)
        want = F.scaled_dot_product_attention(q, k, v, **options)
        with famx.sdpa.enabled():
            famx.set_fallback("warn")
            torch.manual_seed(0)
            with pytest.warns(famx.FallbackWarning, match="torch|efficient|math"):
                got = F.scaled_dot_product_attention(q, k, v, **options)
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)
    assert torch.equal(got, want)


def test_sdpa_backward_after_the_block_is_ours():
    """The backward of an MXFP8 forward is MXFP8 after the block too."""
    q, k, v, dout = heads_first()
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with famx.sdpa.enabled():
        out = F.scaled_dot_product_attention(*leaves)
    got = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
    assert_equal(got, run_direct(q, k, v, dout))


def test_c31_sdpa_compiles():
    """C31: inductor, fullgraph, forward and backward, with views as inputs."""
    problem = heads_first()
    compiled = torch.compile(run_compiled, fullgraph=True)
    with famx.sdpa.enabled():
        leaves = [x.detach().requires_grad_() for x in problem[:3]]
        out = compiled(*leaves)
        got = [out.detach(), *torch.autograd.grad(out, leaves, problem[3])]
    assert_equal(got, run_direct(*problem, causal=True))


def run_compiled(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def test_c26_sdpa_in_a_cuda_graph():
    """C26: forward and backward captured, replayed on new values, equal eager bit for bit."""
    problem = heads_first()
    leaves = [x.detach().clone().requires_grad_() for x in problem[:3]]

    def step():
        out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        return [out, *torch.autograd.grad(out, leaves, problem[3])]

    with famx.sdpa.enabled():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        fresh = [torch.randn_like(x) for x in leaves]
        with torch.no_grad():
            for leaf, value in zip(leaves, fresh):
                leaf.copy_(value)
        graph.replay()
        want = step()
    assert_equal([x.detach() for x in captured], [x.detach() for x in want])


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (20, 0)], ids=str)
def test_varlen_attn_is_the_direct_api(window):
    """torch.nn.attention.varlen.varlen_attn, forward and backward."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    torch.manual_seed(0)
    leaves = [
        torch.randn(300, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    cu = torch.tensor([0, 120, 120, 300], dtype=torch.int32, device="cuda")
    options = {} if window == (-1, -1) else {"window_size": window}
    with famx.sdpa.enabled():
        out = varlen.varlen_attn(*leaves, cu, cu, 180, 180, **options)
        got = [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]
    want = famx.flash_attn_varlen_func(*leaves, cu, cu, 180, 180, window_size=window)
    assert_equal(got, [want.detach(), *torch.autograd.grad(want.square().sum(), leaves)])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_c25_sdpa_on_another_device():
    """C25: tensors on cuda:1 with cuda:0 current."""
    problem = [x.to("cuda:1") for x in heads_first()]
    with famx.sdpa.enabled():
        got = run(*problem)
    assert torch.cuda.current_device() == 0 and got[0].device.index == 1
    assert_equal(got, run_direct(*problem))
