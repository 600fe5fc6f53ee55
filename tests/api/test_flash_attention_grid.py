"""flash-attention's test grid for flash_attn_func and flash_attn_varlen_func, with the calls that its users write.

Its rule: the error against attention in high precision is at most twice that of a plain PyTorch implementation of the same
precision. Same precision means MXFP8 here: the same tensors rounded to MXFP8 blocks of 32, softmax and products in fp32
(plain_mx.py has the rule).
The batch is 1 instead of 4, since the portable path on a CPU is what runs; heads, lengths, head sizes, masks and dtypes are
the grid's. Options that this library does not have are refused by name.
"""

import itertools

import pytest
import torch
from plain_mx import attentions, check_rule, every_variant, run_cases, visible

import flash_attn_mx as famx
from flash_attn_mx import flash_attn_func, flash_attn_varlen_func

SEQLENS = (
    (113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256),
    (1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048),
)  # fmt: skip
VARLEN_SEQLENS = ((1, 147), *SEQLENS)
HEAD_DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
GRID = tuple(
    itertools.product(
        SEQLENS,
        HEAD_DIMS,
        (False, True),  # causal
        (False, True),  # local window
        ("mha", "mqa", "gqa"),
        (torch.float16, torch.bfloat16),
    )
)
VARLEN_GRID = tuple(
    itertools.product(
        VARLEN_SEQLENS, HEAD_DIMS, (False, True), (False, True), ("mha", "mqa", "gqa"),
        (torch.float16, torch.bfloat16),
    )
)  # fmt: skip
NHEADS = 6


def short(grid, step, most):
    """Every step-th case of those with at most `most` scores per head: each value of each parameter occurs."""
    return [case for case in grid if case[0][0] * case[0][1] <= most][::step]


def case_id(case):
    (seqlen_q, seqlen_k), d, causal, local, mha_type, dtype = case
    mask = "-".join(name for name, on in (("causal", causal), ("local", local)) if on) or "full"
    return f"q{seqlen_q}-k{seqlen_k}-d{d}-{mask}-{mha_type}-{str(dtype).removeprefix('torch.')}"


# ---- the grid ----------------------------------------------------------------------------------


def grid_attentions(q, k, v, dout, causal, window):
    """attentions() with flash-attention's masks."""
    return attentions(q, k, v, dout, visible(q.shape[1], k.shape[1], causal, window))


def make_inputs(seqlen_q, seqlen_k, d, mha_type, dtype, local):
    """q, k, v, dout and a window, drawn as the grid's tests do."""
    torch.random.manual_seed(0)
    nheads_k = {"mha": NHEADS, "mqa": 1, "gqa": 2}[mha_type]
    window_size = tuple(torch.randint(0, seqlen_k, (2,)).tolist()) if local else (-1, -1)
    q = torch.randn(1, seqlen_q, NHEADS, d, dtype=dtype, requires_grad=True)
    k = torch.randn(1, seqlen_k, nheads_k, d, dtype=dtype, requires_grad=True)
    v = torch.randn(1, seqlen_k, nheads_k, d, dtype=dtype, requires_grad=True)
    return q, k, v, torch.randn(1, seqlen_q, NHEADS, d, dtype=dtype), window_size


def run_dense(case):
    (seqlen_q, seqlen_k), d, causal, local, mha_type, dtype = case
    q, k, v, g, window_size = make_inputs(seqlen_q, seqlen_k, d, mha_type, dtype, local)
    out = flash_attn_func(
        q,
        k,
        v,
        dropout_p=0.0,
        causal=causal,
        window_size=window_size,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
    )
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), g)
    tensors = [x.detach() for x in (q, k, v, g)]
    check_rule((out.detach(), dq, dk, dv), *grid_attentions(*tensors, causal, window_size), dtype)


def run_varlen(case):
    """Three sequences: the full length, a random shorter one, and a random one for q with all keys."""
    (seqlen_q, seqlen_k), d, causal, local, mha_type, dtype = case
    lengths_q = [seqlen_q, max(1, seqlen_q - 20), max(1, seqlen_q // 3)]
    lengths_k = [seqlen_k, max(1, seqlen_k - 7), seqlen_k]
    parts = [make_inputs(sq, sk, d, mha_type, dtype, local) for sq, sk in zip(lengths_q, lengths_k)]
    window_size = parts[0][4]
    q, k, v, g = (
        torch.cat([part[i].detach()[0] for part in parts]).requires_grad_() for i in range(4)
    )
    cu_seqlens_q, cu_seqlens_k = (
        torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        for lengths in (lengths_q, lengths_k)
    )
    out = flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max(lengths_q),
        max(lengths_k),
        dropout_p=0.0,
        causal=causal,
        window_size=window_size,
        softcap=0.0,
        alibi_slopes=None,
        deterministic=False,
        return_attn_probs=False,
    )
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), g)
    pieces = []  # of each sequence: the exact results, and those of each plain implementation
    for part in parts:
        exact, plain = grid_attentions(*(x.detach() for x in part[:4]), causal, window_size)
        pieces.append((exact, *plain))
    exact, *plain = (
        [torch.cat([results[i][0] for results in way]) for i in range(4)] for way in zip(*pieces)
    )
    check_rule((out.detach(), dq, dk, dv), exact, plain, dtype)


@pytest.fixture(autouse=True)
def settings():
    """The grid's tensors are on the CPU, and its head sizes are more than the kernels have."""
    before = famx.get_backend()
    famx.set_backend("portable")
    yield
    famx.set_backend(before)


@pytest.mark.parametrize("case", short(GRID, 41, 60_000), ids=case_id)
def test_flash_attn_output(case):
    """A part of the grid: out and gradients within twice the error of plain MXFP8 PyTorch."""
    run_dense(case)


@pytest.mark.parametrize("case", short(VARLEN_GRID, 67, 40_000), ids=case_id)
def test_flash_attn_varlen_output(case):
    """A part of the packed grid."""
    run_varlen(case)


def group(grid, seqlens, d):
    return [case for case in grid if case[:2] == (seqlens, d)]


@pytest.mark.slow
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("seqlens", SEQLENS, ids=str)
def test_flash_attn_output_full(seqlens, d):
    """The whole grid."""
    run_cases(run_dense, group(GRID, seqlens, d), case_id)


@pytest.mark.slow
@pytest.mark.parametrize("d", HEAD_DIMS)
@pytest.mark.parametrize("seqlens", VARLEN_SEQLENS, ids=str)
def test_flash_attn_varlen_output_full(seqlens, d):
    """The whole packed grid."""
    run_cases(run_varlen, group(VARLEN_GRID, seqlens, d), case_id)


@pytest.mark.parametrize(
    "options, broken",
    [
        ({"causal": False}, "out: largest error"),
        ({"causal": True, "softmax_scale": 1.3 * 64**-0.5}, "out: largest error"),
        ({"causal": True, "dout_dtype": torch.float8_e5m2}, "dq: RMS error 1.1.* at most 1.138"),
    ],
    ids=["mask", "scale", "a bit less"],
)
def test_grid_rule_can_fail(options, broken):
    """A causal mask that is dropped, a scale that is off by 1.3, and gradients of one bit less break the rule."""
    q, k, v, g, _ = make_inputs(113, 203, 64, "mha", torch.bfloat16, False)
    with every_variant():
        both = grid_attentions(*(x.detach() for x in (q, k, v, g)), True, (-1, -1))
    out = flash_attn_func(q, k, v, **options)
    grads = torch.autograd.grad(out, (q, k, v), g)
    with pytest.raises(AssertionError, match=broken):
        check_rule((out.detach(), *grads), *both, torch.bfloat16)


# ---- options -----------------------------------------------------------------------------------

REFUSED = {
    "softcap": 50.0,
    "alibi_slopes": torch.ones(6),
    "return_attn_probs": True,
    "block_table": torch.zeros(1, 1, dtype=torch.int32),
    "page_table": torch.zeros(1, 1, dtype=torch.int32),
    "seqused_k": torch.ones(1, dtype=torch.int32),
    "leftpad_k": torch.ones(1, dtype=torch.int32),
    "attention_chunk": 64,
    "learnable_sink": torch.ones(6),
    "score_mod": lambda *x: x,
    "qv": torch.ones(1),
    "q_descale": torch.ones(1, 6),
}


def call(varlen, **options):
    q, k, v, _, _ = make_inputs(20, 20, 32, "mha", torch.float32, False)
    if not varlen:
        return flash_attn_func(q, k, v, **options)
    cu = torch.tensor([0, 20], dtype=torch.int32)
    return flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 20, 20, **options)


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
@pytest.mark.parametrize("name", REFUSED)
def test_option_of_flash_attention_is_refused_by_name(name, varlen):
    """An option that asks for something we do not have: NotImplementedError that names it, the value and the function."""
    with pytest.raises(NotImplementedError, match=f"^{name}: expected .*, got .*flash_attn_"):
        call(varlen, **{name: REFUSED[name]})


def test_dropout_of_flash_attention():
    """Dense: served in high precision; packed: refused by name."""
    famx.set_backend("auto")
    dropped = call(False, dropout_p=0.5)
    assert (dropped - call(False)).norm() > 0.5 * dropped.norm()
    with pytest.raises(NotImplementedError, match="^dropout_p: expected 0.0, got 0.5"):
        call(True, dropout_p=0.5)


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_dropout_by_position_is_not_taken_for_a_scale(varlen):
    """flash_attn_func(q, k, v, 0.0): in flash-attention 2 the fourth argument is dropout_p; equal weights would be silent."""
    with pytest.raises(ValueError, match="softmax_scale.*dropout_p.*got 0.0"):
        call(varlen, softmax_scale=0.0)


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_neutral_options_and_hints_change_nothing(varlen):
    """Defaults of flash-attention 2, 3 and 4, and hints for speed, give the result of a call without them."""
    neutral = {
        "dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None, "return_attn_probs": False, "block_table": None,
        "attention_chunk": 0, "qv": None, "q_descale": None, "learnable_sink": None, "num_splits": 4,
        "pack_gqa": None, "sm_margin": 0,
    }  # fmt: skip
    assert torch.equal(call(varlen, **neutral), call(varlen))


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "varlen"])
def test_unknown_option_raises(varlen):
    """A misspelt argument is Python's own error."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'casual'"):
        call(varlen, casual=True)
