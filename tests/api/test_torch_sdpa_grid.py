"""The parameter grid of PyTorch's own attention tests (test/test_transformers.py), with the MXFP8 kernels active.

Values are judged by torch's rule for its low-precision kernels: the error against attention in high precision is at most
twice that of a plain implementation of the same precision (here MXFP8; plain_mx.py has the rule). What MXFP8 hands on must equal torch's
own result bit for bit. PyTorch's file itself can be run too, where it is at hand: `make test-torch`.

Not rebuilt: cuDNN, memory-efficient, ROCm and xpu kernels (not ours), the philox state of dropout and debug masks (handed on),
memory and stream checks on a GPU (tests/gpu).
"""

import itertools

import compare
import pytest
import torch
import torch.nn.functional as F
from plain_mx import attentions, check_rule, run_cases
from torch.nn.attention import SDPBackend, bias, sdpa_kernel

import flash_attn_mx as famx

SEQLENS = (4, 8, 64, 103, 128, 256, 512, 1024, 2048)
HEAD_DIMS = (8, 16, 21, 32, 64, 72, 96, 128, 160, 192, 203, 256)
GQA = ((16, 8), (10, 2))


@pytest.fixture(autouse=True)
def settings():
    """The grid's tensors are on the CPU, and its head sizes are more than the kernels have; nothing stays active."""
    before = famx.get_backend()
    famx.set_backend("portable")
    yield
    famx.set_backend(before)
    assert not famx.sdpa.is_active()


def leaves(*tensors):
    return [x.detach().clone().requires_grad_() for x in tensors]


def assert_handed_on(call):
    """call() gives (tensors) the same bits with MXFP8 active as without, from the same seed."""
    torch.manual_seed(0)
    want = call()
    torch.manual_seed(0)
    with famx.sdpa.enabled():
        got = call()
    for a, b in zip(got, want, strict=True):
        if a is not None or b is not None:
            compare.assert_equal_bits(a.contiguous(), b.contiguous())


def attend_and_differentiate(q, k, v, **options):
    tensors = leaves(q, k, v)
    out = F.scaled_dot_product_attention(*tensors, **options)
    return (out.detach(), *torch.autograd.grad(out.float().sum(), tensors))


# ---- flash against math, with gradients ---------------------------------------------------------


def flash_cases():
    """Every length pair, head size and causal; dtype, scale, heads and batch turn over, so that all values meet."""
    turn = itertools.cycle(
        itertools.product((torch.bfloat16, torch.float16, torch.float32), (None, "l1"), (None, *GQA), (1, 2))
    )  # fmt: skip
    for seqlens in itertools.product(SEQLENS, SEQLENS):
        for head_dim, causal in itertools.product(HEAD_DIMS, (False, True)):
            yield (*seqlens, head_dim, causal, *next(turn))


def run_flash(case):
    """torch draws uniform numbers: all values positive, so that dQ and dK are differences of large terms."""
    seqlen_q, seqlen_k, head_dim, causal, dtype, scale, gqa, batch = case
    nheads, nheads_k = gqa or (4, 4)
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, nheads, seqlen_q, head_dim)] + [(batch, nheads_k, seqlen_k, head_dim)] * 2
    q, k, v = leaves(*(torch.rand(shape, generator=generator).to(dtype) for shape in shapes))
    factor = 1 / head_dim if scale == "l1" else None
    dout = torch.rand(shapes[0], generator=generator).to(dtype)
    with famx.sdpa.enabled():
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=factor, enable_gqa=gqa is not None
        )
        got = (out, *torch.autograd.grad(out, (q, k, v), dout))
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    tensors = [x.detach().transpose(1, 2) for x in (q, k, v, dout)]
    both = attentions(*tensors, seen, scale=factor)
    check_rule([x.detach().transpose(1, 2) for x in got], *both, dtype)


def flash_id(case):
    *sizes, causal, dtype, scale, gqa, batch = case
    heads = f"h{gqa[0]}-{gqa[1]}" if gqa else "h4"
    mask = "causal" if causal else "full"
    return f"q{sizes[0]}-k{sizes[1]}-d{sizes[2]}-{mask}-{str(dtype)[6:]}-{scale}-{heads}-b{batch}"


SMALL = [case for case in flash_cases() if case[0] * case[1] <= 20_000 and max(case[:2]) < 1024]


@pytest.mark.parametrize("case", SMALL[::29], ids=flash_id)
def test_flash_attention_vs_math_ref_grads(case):
    """A part of torch's grid."""
    run_flash(case)


@pytest.mark.slow
@pytest.mark.parametrize("seqlens", list(itertools.product(SEQLENS, SEQLENS)), ids=str)
def test_flash_attention_vs_math_ref_grads_full(seqlens):
    """Every length pair with every head size, causal and not."""
    run_cases(run_flash, [case for case in flash_cases() if case[:2] == seqlens], flash_id)


# ---- packed projections: fused against math on a CPU --------------------------------------------

PACKED = list(itertools.product(
    (torch.float32, torch.bfloat16, torch.float16), (2, 12), (267, 1030), (1, 3), (8, 16), (False, True), (False, True)
))  # fmt: skip


def run_packed(dtype, batch, seqlen, nheads, head_dim, causal, train):
    """q, k, v are views of one tensor (B, S, 3·H·D), which gets their gradients."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch, seqlen, 3 * nheads * head_dim, generator=generator).to(dtype)
    (x,) = leaves(x) if train else (x,)

    def split(x):
        parts = (t.view(batch, seqlen, nheads, head_dim) for t in x.chunk(3, dim=-1))
        return [t.transpose(1, 2) for t in parts]

    with famx.sdpa.enabled(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(*split(x), is_causal=causal)
        grad = torch.autograd.grad(out.sum(), x)[0] if train else torch.zeros_like(x)
    assert out.dtype == dtype and out.stride() == torch.empty_like(split(x)[0]).stride()
    seen = torch.ones(seqlen, seqlen, dtype=torch.bool)
    seen = seen.tril() if causal else seen
    tensors = [t.detach().transpose(1, 2) for t in split(x)]
    dout = torch.ones_like(tensors[0])
    got = [out.detach().transpose(1, 2), *(t.transpose(1, 2) for t in split(grad))]
    check_rule(got if train else got[:1], *attentions(*tensors, dout, seen), dtype)


@pytest.mark.parametrize("case", [c for c in PACKED if c[1:3] == (2, 267)][::5], ids=str)
def test_fused_attention_vs_math_cpu(case):
    """A part of torch's grid of packed projections."""
    run_packed(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", PACKED, ids=str)
def test_fused_attention_vs_math_cpu_full(case):
    """The whole of it."""
    run_packed(*case)


# ---- handed on: masks, dropout, float64 ---------------------------------------------------------

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
@pytest.mark.parametrize("bool_mask", [False, True])
@pytest.mark.parametrize("mask_dim", [2, 4])
def test_c42_fused_attention_mask_vs_math_cpu(dtype, bool_mask, mask_dim):
    """C42: masks of every broadcast shape, boolean and additive, values and gradients: torch's, bit for bit."""
    batch, seqlen_q, seqlen_k, nheads, head_dim = 2, 67, 130, 3, 8
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(batch, s, nheads, head_dim, generator=generator).to(dtype).transpose(1, 2)
        for s in (seqlen_q, seqlen_k, seqlen_k)
    )
    sizes = ((batch, nheads) if mask_dim == 4 else ()) + (seqlen_q, seqlen_k)
    for shape in itertools.product(*((size, 1) for size in sizes)):
        noise = torch.randn(shape, generator=generator)
        mask = noise > -0.3 if bool_mask else noise.to(dtype)
        assert_handed_on(lambda mask=mask: attend_and_differentiate(q, k, v, attn_mask=mask))


@pytest.mark.parametrize("dropout_p", [0.22, 0.48])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_c48_dropout_is_torchs(dropout_p, dtype):
    """C48: from the same seed the same elements are dropped, values and gradients bit for bit."""
    q, k, v = (torch.rand(2, 4, 103, 64).to(dtype) for _ in range(3))
    assert_handed_on(lambda: attend_and_differentiate(q, k, v, dropout_p=dropout_p))


def test_mask_of_infinities():
    """torch issue 127055: rows whose additive mask is -inf everywhere."""
    full = torch.full((600, 600), float("-inf"))
    mask = torch.triu(full, diagonal=1) + torch.tril(full, diagonal=-10)
    q, k, v = (torch.rand(1, 2, 600, 8) for _ in range(3))
    assert_handed_on(lambda: (F.scaled_dot_product_attention(q, k, v, attn_mask=mask),))


@pytest.mark.parametrize("contiguous", [True, False])
def test_math_gradcheck(contiguous):
    """float64 stays exact enough for gradcheck."""
    x = torch.rand(2, 3, 3 * 2 * 4, dtype=F64, requires_grad=True)
    parts = [t.view(2, -1, 2, 4).transpose(1, 2) for t in x.chunk(3, dim=-1)]
    parts = [t.contiguous() if contiguous else t for t in parts]
    with famx.sdpa.enabled(), sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradcheck(F.scaled_dot_product_attention, parts)


# ---- shapes at the edge -------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [bias.causal_upper_left, bias.causal_lower_right])
@pytest.mark.parametrize("seqlens", [(8, 8), (5, 9), (9, 5)], ids=str)
def test_c12_causal_bias_variants(variant, seqlens):
    """C12: torch.nn.attention.bias says the corner; the result is that of the mask written out."""
    q, k, v = (torch.randn(2, 2, seqlens[i], 32) for i in (0, 1, 1))
    mask = torch.ones(seqlens, dtype=torch.bool).tril(
        seqlens[1] - seqlens[0] if variant is bias.causal_lower_right else 0
    )
    with famx.sdpa.enabled():
        got = F.scaled_dot_product_attention(q, k, v, attn_mask=variant(*seqlens))
    tensors = [x.transpose(1, 2) for x in (q, k, v)]
    both = attentions(*tensors, torch.zeros_like(tensors[0]), mask)
    check_rule([got.transpose(1, 2).nan_to_num(0.0)], *both, F32)


@pytest.mark.parametrize("seqlen", [0, 1])
def test_lengths_0_and_1(seqlen):
    """Length 1 is served, length 0 gives torch's empty or zero result."""
    q = torch.randn(4, 3, 8, 64)
    k = torch.randn(4, 3, seqlen, 64)
    for a, b in ((q, k), (k, q), (k, k)):
        want = F.scaled_dot_product_attention(a, b, b)
        with famx.sdpa.enabled():
            got = F.scaled_dot_product_attention(a, b, b)
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        compare.assert_close(got, want, frobenius=0.12)


@pytest.mark.parametrize("shape", [(2, 3, 8, 16), (1, 3, 8, 16), (2, 1, 8, 16), (1, 1, 8, 16)], ids=str)  # fmt: skip
def test_broadcast_batches_and_heads(shape):
    """Batches and heads of one, which torch broadcasts."""
    q, k = torch.randn(2, 3, 8, 16), torch.randn(shape)
    want = F.scaled_dot_product_attention(q, k, k)
    with famx.sdpa.enabled():
        got = F.scaled_dot_product_attention(q, k, k)
    compare.assert_close(got, want, frobenius=0.12)


def test_head_size_of_one_with_another_stride():
    """A last dimension of one may have any stride."""
    base = torch.randn(1, 4, 10, 8)
    q = k = v = base[..., :1].transpose(2, 3).transpose(2, 3)
    q = q.as_strided(q.shape, (*q.stride()[:3], 8))
    want = F.scaled_dot_product_attention(q, k, v)
    with famx.sdpa.enabled():
        got = F.scaled_dot_product_attention(q, k, v)
    compare.assert_close(got, want, frobenius=0.12)


def test_value_size_of_its_own():
    """dk != dv goes to torch's kernel."""
    q, v = torch.randn(2, 4, 20, 32), torch.randn(2, 4, 20, 48)
    assert_handed_on(lambda: attend_and_differentiate(q, q, v))


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors(layout):
    """Nested tensors are torch's on a CPU."""
    parts = [torch.randn(n, 2, 16) for n in (3, 7)]
    if layout == torch.strided:
        parts = [part.transpose(0, 1).contiguous() for part in parts]

    def call():
        x = torch.nested.nested_tensor(parts, layout=layout)
        x = x.transpose(1, 2) if layout == torch.jagged else x
        out = F.scaled_dot_product_attention(x, x, x)
        return [t.contiguous() for t in out.unbind()]

    assert_handed_on(call)


def test_kernel_by_name_without_ours():
    """sdpa_kernel(MATH) is torch's math kernel, exactly."""
    q, k, v = (torch.randn(2, 4, 33, 64) for _ in range(3))

    def call():
        with sdpa_kernel(SDPBackend.MATH):
            return attend_and_differentiate(q, k, v)

    assert_handed_on(call)
