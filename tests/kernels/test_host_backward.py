"""Gradients on the emulator backend through the public API: values, orders, quality, saved state.

Bounds against the portable path: each row of dQ, dK, dV within 2^-6 of its largest value, the whole within 1 % (Frobenius).
Both round at the same places; what differs is payloads of P and dS whose value lies at a rounding boundary, and O of the
forward. Where dS cancels to rounding noise the noise counts against the size of what cancels.
"""

import itertools
import math

import compare
import pytest
import torch

import flash_attn_mx as famx
from flash_attn_mx import emulator, layouts, reference, sm100

ROW, FROBENIUS = 2.0**-6, 0.01
NOISE = 1e-5  # of the largest |q|, |k| times |v| times |dout|
HALF_ULP = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
NAMES = ("dq", "dk", "dv")
E4M3 = torch.float8_e4m3fn
OPS = torch.ops.flash_attn_mx
ORDERS = [("eager", 0), ("delayed", 0), *(("random", seed) for seed in range(8))]

pytestmark = pytest.mark.skipif(
    bool(sm100.WHY_NO_EMULATOR or sm100.WHY_NO_HOST or not sm100.BACKWARD_INSTANCES),
    reason=sm100.WHY_NO_EMULATOR or sm100.WHY_NO_HOST or "no backward kernel is built",
)


def draw(shape_q, shape_k, dtype=torch.float32, seed=0):
    """q, k, v, dout"""
    generator = torch.Generator().manual_seed(seed)
    shapes = shape_q, shape_k, shape_k, shape_q
    return [torch.randn(s, generator=generator).to(dtype) for s in shapes]


def outliers(tensors):
    """Two channels of K offset by 30, as trained models have them."""
    tensors[1][..., :2] += 30
    return tensors


def opposite(tensors):
    """Logits at +-100: rows and keys that agree or disagree in every channel."""
    q, k, v, dout = tensors
    size = 100.0**0.5 * q.shape[-1] ** -0.25
    sign = (
        torch.randint(0, 2, (*q.shape[:-1], 1), generator=torch.Generator().manual_seed(1)) * 2 - 1
    )
    keys = torch.arange(k.shape[1]).view(1, -1, 1, 1) % 2 * 2 - 1
    return [sign * (size + 0.05 * q), keys * (size + 0.05 * k), v, dout]


def far_below(tensors):
    """Every logit of every row below -88, where exp underflows."""
    q, k, v, dout = tensors
    return [4 + 0.1 * q, -4 + 0.1 * k, v, dout]


def leaves(tensors):
    return [x.detach().clone().requires_grad_() for x in tensors[:3]]


def gradients(tensors, backend, function=famx.flash_attn_func, arguments=(), **options):
    """(dq, dk, dv), whose forward and backward ran on a backend."""
    inputs = leaves(tensors)
    function(*inputs, *arguments, backend=backend, **options).backward(tensors[3])
    return [x.grad for x in inputs]


def noise_of(change):
    """In opposite() and far_below() all rows of Q, or of K, point the same way: sums of dS cancel in all channels."""
    return 5e-4 if change in (opposite, far_below) else NOISE


def assert_near(got, want, tensors, noise=NOISE, row=ROW):
    """row: bound on single rows; None: only on the whole."""
    largest = [float(x.detach().abs().max()) if x.numel() else 0.0 for x in tensors]
    slack = noise * max(largest[:2]) * largest[2] * largest[3]
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert (a.dtype, a.stride()) == (b.dtype, torch.empty(b.shape).stride()), name
        compare.assert_close(a, b, name, frobenius=FROBENIUS)
        if row is not None:
            allowed = torch.full(b.shape, slack if name != "dv" else 0.0)
            compare.assert_close(a, b, name, row=row + 2 * HALF_ULP[a.dtype], slack=allowed)


def check(tensors, noise=NOISE, row=ROW, **options):
    got, want = (gradients(tensors, backend, **options) for backend in ("emulator", "portable"))
    assert_near(got, want, tensors, noise, row)
    return got


# --- values: lengths with every remainder by 128 of {1, 63, 64, 65, 127}, batches, outliers, extreme logits ------------

CAUSAL = {"causal": True}
DENSE = {
    "d64-129-causal": ((2, 129, 1, 64), (2, 129, 1, 64), CAUSAL, None),
    "d128-191": ((2, 191, 1, 128), (2, 191, 1, 128), {}, None),
    "d64-192-gqa-causal-outliers": ((2, 192, 4, 64), (2, 192, 2, 64), CAUSAL, outliers),
    "d128-193-mqa-outliers": ((2, 193, 3, 128), (2, 193, 1, 128), {}, outliers),
    "d64-255-k640-causal": ((2, 255, 1, 64), (2, 640, 1, 64), CAUSAL, None),
    "d128-q640-k257-window": ((1, 640, 1, 128), (1, 257, 1, 128), {"window_size": (100, 20)}, None),
    "d128-640-causal-outliers": ((2, 640, 1, 128), (2, 640, 1, 128), CAUSAL, outliers),
    "d64-319-window-causal": (
        (2, 319, 2, 64), (2, 321, 1, 64), {"window_size": (60, 5), "causal": True}, outliers,
    ),
    "d64-opposite": ((2, 127, 1, 64), (2, 191, 1, 64), {}, opposite),
    "d128-opposite-causal": ((2, 193, 1, 128), (2, 193, 1, 128), CAUSAL, opposite),
    "d64-below-88": ((2, 128, 1, 64), (2, 65, 1, 64), {}, far_below),
    "d72-63": ((1, 63, 2, 72), (1, 65, 1, 72), CAUSAL, None),
    "d5-scale": ((1, 70, 1, 5), (1, 66, 1, 5), {"softmax_scale": -0.7}, None),
    "unseen-rows": ((1, 140, 1, 64), (1, 65, 1, 64), CAUSAL, None),
    "unseen-keys": ((1, 60, 1, 64), (1, 300, 1, 64), {"window_size": (30, 0)}, None),
    "no-keys": ((1, 65, 2, 64), (1, 0, 2, 64), CAUSAL, None),
    "no-queries": ((1, 0, 2, 64), (1, 64, 2, 64), {}, None),
    "no-batch": ((0, 64, 2, 64), (0, 64, 2, 64), {}, None),
}  # fmt: skip


@pytest.mark.parametrize("case", DENSE)
def test_dense_equals_portable(case):
    """The backward alone, on the same O and LSE; then with a forward of its own.

    A payload of P that rounds the other way in the forward moves delta of its row by a step, and dQ of that row by the
    step times what K has in common across keys. With offset channels that is a large part of a row that otherwise
    cancels, so that single rows are only compared where O is the same.
    """
    shape_q, shape_k, options, change = DENSE[case]
    tensors = draw(shape_q, shape_k)
    tensors = tensors if change is None else change(tensors)
    if change is far_below:
        _, lse = famx.flash_attn_func(*tensors[:3], return_lse=True, backend="portable")
        assert lse.max() < -88
    noise = noise_of(change)
    operands = operands_of(tensors, **options)
    alone = [OPS.bwd(*operands, [True] * 3, executor) for executor in ("emulator", "portable")]
    assert_near(*alone, tensors, noise)
    check(tensors, noise, None if change is outliers else ROW, **options)


@pytest.mark.parametrize("heads,heads_k", [(2, 2), (3, 1), (8, 1), (6, 2)])
@pytest.mark.parametrize("head_dim", [1, 16, 33, 64, 80, 96, 128])
def test_c64_head_dims_and_ratios(head_dim, heads, heads_k):
    """C64: tiles of either size, filled or not, and every kind of group: forward and gradients are right."""
    check(draw((1, 40, heads, head_dim), (1, 50, heads_k, head_dim)), causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_have_the_dtype_of_the_inputs(head_dim, dtype):
    check(draw((1, 130, 2, head_dim), (1, 100, 1, head_dim), dtype), noise=1e-3, causal=True)


PACKED = [
    ([65, 0, 130], [65, 0, 130], 0),
    ([1, 200, 31], [129, 64, 0], 7),
    ([0, 0], [3, 0], 0),
    ([], [], 5),
]


@pytest.mark.parametrize("lengths_q,lengths_k,tail", PACKED, ids=str)
@pytest.mark.parametrize("options", [{}, CAUSAL, {"window_size": (30, 9)}], ids=str)
def test_packed_equals_portable(lengths_q, lengths_k, tail, options):
    """Sequences of any length; tokens that belong to none get zero gradients, whatever stands in them."""
    tensors = draw((sum(lengths_q) + tail, 4, 72), (sum(lengths_k) + tail, 2, 72))
    cu = [
        torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32)
        for n in (lengths_q, lengths_k)
    ]
    longest = [max(n, default=0) for n in (lengths_q, lengths_k)]
    options = {"function": famx.flash_attn_varlen_func, "arguments": (*cu, *longest), **options}
    got = check(tensors, **options)
    for x, used in zip(got, (sum(lengths_q), sum(lengths_k), sum(lengths_k)), strict=True):
        assert (x[used:] == 0).all()


# --- orders and determinism ---------------------------------------------------------------------------------------


@pytest.fixture
def in_order(monkeypatch):
    """in_order("random", 3): launches in the emulator from here on take this asynchronous order; returns their kernels."""
    launch = emulator.Kernel.launch

    def choose(order, seed):
        launched = []

        def ordered(self, *arguments, **options):
            launched.append(self.name)
            return launch(self, *arguments, **options, order=order, seed=seed)

        monkeypatch.setattr(emulator.Kernel, "launch", ordered)
        return launched

    return choose


ORDERED = {
    "d128-causal-gqa": ((1, 300, 2, 128), (1, 257, 1, 128), CAUSAL),
    "d64-window": ((2, 257, 1, 64), (2, 400, 1, 64), {"window_size": (150, 20)}),
}


@pytest.mark.parametrize("case", ORDERED)
def test_c28_orders_of_asynchronous_work(case, in_order):
    """C28: eager, delayed and eight random orders, strict: within the bounds of the portable path. deterministic=True gives
    the same bits in all of them, without it dQ may differ in the order of its fp32 sums, dK and dV not."""
    shape_q, shape_k, options = ORDERED[case]
    tensors = draw(shape_q, shape_k)
    want = gradients(tensors, "portable", **options)
    first = None
    for order, seed in ORDERS:
        launched = in_order(order, seed)
        fixed = gradients(tensors, "emulator", deterministic=True, **options)
        loose = gradients(tensors, "emulator", **options)
        passes = ["attn_fwd", "bwd_preprocess", "attn_bwd", "bwd_postprocess"] * 2
        assert [name.rsplit("_d", 1)[0] for name in launched] == passes
        assert_near(fixed, want, tensors)
        first = first or fixed
        for name, a, b, c in zip(NAMES, first, fixed, loose, strict=True):
            compare.assert_equal_bits(b, a, f"{name}, {order} {seed}, deterministic")
            if name != "dq":
                compare.assert_equal_bits(c, a, f"{name}, {order} {seed}")
        compare.assert_close(loose[0], first[0], f"dq, {order} {seed}", row=1e-6)


@pytest.mark.slow  # a minute
@pytest.mark.parametrize("order,seed", ORDERS)
@pytest.mark.parametrize("case", DENSE)
def test_every_problem_in_every_order(case, order, seed, in_order):
    """The bounds of test_dense_equals_portable hold for the backward in each asynchronous order, without a report."""
    shape_q, shape_k, options, change = DENSE[case]
    tensors = draw(shape_q, shape_k, seed=seed + 1)
    tensors = tensors if change is None else change(tensors)
    operands = operands_of(tensors, **options)
    in_order(order, seed)
    alone = [OPS.bwd(*operands, [True] * 3, executor) for executor in ("emulator", "portable")]
    assert_near(*alone, tensors, noise_of(change))


# --- quality ------------------------------------------------------------------------------------------------------


def errors(got, want):
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]


@pytest.mark.parametrize("change", [None, outliers], ids=["normal", "outliers"])
@pytest.mark.parametrize("options", [{}, CAUSAL], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_quality_is_that_of_the_portable_path(head_dim, options, change):
    """Error of dQ, dK, dV against float64 attention within 5 % of the portable path's."""
    tensors = draw((2, 320, 2, head_dim), (2, 320, 1, head_dim), seed=1)
    tensors = tensors if change is None else change(tensors)
    inputs = leaves([x.double() for x in tensors])
    reference.attention_fp64(*inputs, **options)[0].backward(tensors[3].double())
    exact = [x.grad for x in inputs]
    found = (errors(gradients(tensors, b, **options), exact) for b in ("emulator", "portable"))
    for name, emulated, portable in zip(NAMES, *found, strict=True):
        assert portable < (0.08 if change is None else 0.3), name
        assert abs(emulated / portable - 1) < 0.05, name


# --- the operator ---------------------------------------------------------------------------------------------------


def operands_of(
    tensors, causal=False, window_size=(-1, -1), softmax_scale=None, swizzled_with=None
):
    """Arguments of `bwd` up to needs, with O and LSE of the portable forward. swizzled_with: scales come in tiled buffers
    whose padding holds this byte."""
    window = (window_size[0], 0 if causal else window_size[1])

    def pair(x, axis):
        data, scale = OPS.quantize(x, axis, "rceil", E4M3, None)
        if swizzled_with is not None and axis != "tokenwise":
            scale = layouts.to_swizzled128x4(layouts.operand_matrix(scale, axis), swizzled_with)
        return data, scale

    q, k, v, dout = tensors
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    lengths = q.shape[1], k.shape[1]
    out, lse = OPS.fwd(
        *pair(q, "rowwise"), *pair(k, "rowwise"), *pair(v, "colwise"), *pair(v, "tokenwise"),
        None, None, *lengths, scale, *window, torch.float32, "portable",
    )  # fmt: skip
    return [
        dout, out, lse, *pair(dout, "rowwise"), *pair(dout, "colwise"), *pair(q, "rowwise"), *pair(q, "colwise"),
        *pair(k, "rowwise"), *pair(k, "colwise"), *pair(v, "tokenwise"), None, None, *lengths, scale, *window, True,
    ]  # fmt: skip


def test_long_context_keeps_dv():
    """LSE shifted by 18 ln 2, as in a context 2^18 times longer: dV's relative error changes by less than 10 %."""
    tensors = draw((1, 256, 1, 64), (1, 256, 1, 64))
    inputs = leaves([x.double() for x in tensors])
    reference.attention_fp64(*inputs)[0].backward(tensors[3].double())
    operands = operands_of(tensors)
    found = []
    for shift in (0, 18):
        operands[2] = operands[2] + shift * math.log(2.0)
        _, _, dv = OPS.bwd(*operands, [False, False, True], "emulator")
        found.append(errors([dv.double() * 2.0**shift], [inputs[2].grad])[0])
    assert found[0] < 0.06 and abs(found[1] / found[0] - 1) < 0.1, found


@pytest.mark.parametrize("executor", ["portable", "emulator"])
def test_c58_padding_bytes_of_scale_buffers(executor):
    """C58, backward: S = 33 in buffers of 128 rows: whatever stands in their padding, every bit stays; plain scales too."""
    tensors = draw((1, 33, 2, 72), (1, 33, 1, 72))
    want = OPS.bwd(*operands_of(tensors, True), [True] * 3, executor)
    for padding in (0xFF, 0x00):
        operands = operands_of(tensors, True, swizzled_with=padding)
        assert (operands[4].view(torch.uint8) == padding).any()
        for name, a, b in zip(NAMES, OPS.bwd(*operands, [True] * 3, executor), want, strict=True):
            compare.assert_equal_bits(a, b, name)
            assert a.isfinite().all() and a.any()


@pytest.mark.parametrize("needs", list(itertools.product([False, True], repeat=3)), ids=str)
def test_only_what_is_needed(needs):
    """Every subset: what is wanted has the bits of the full run, the rest no elements."""
    tensors = draw((1, 130, 2, 64), (1, 140, 1, 64))
    operands = operands_of(tensors, True)
    full = OPS.bwd(*operands, [True] * 3, "emulator")
    for a, b, needed in zip(OPS.bwd(*operands, list(needs), "emulator"), full, needs, strict=True):
        assert torch.equal(a, b) if needed else a.numel() == 0


def test_operator_refuses_what_no_kernel_serves():
    """Typed errors before any launch."""
    tensors = draw((1, 4, 1, 64), (1, 4, 1, 64))
    operands = operands_of(tensors)
    with pytest.raises(ValueError, match="executor: expected one of"):
        OPS.bwd(*operands, [True] * 3, "gpu")
    with pytest.raises(NotImplementedError, match="backend 'sm100': the tensors are on cpu"):
        OPS.bwd(*operands, [True] * 3, "sm100")
    for at in (5, 15):  # dout colwise, v tokenwise
        changed = list(operands)
        changed[at] = changed[at].view(torch.float8_e5m2)
        with pytest.raises(
            NotImplementedError, match="no sm_100 backward kernel takes torch.float8_e5m2"
        ):
            OPS.bwd(*changed, [True] * 3, "emulator")
    wide = operands_of(draw((1, 4, 1, 136), (1, 4, 1, 136)))
    with pytest.raises(
        NotImplementedError, match="no sm_100 backward kernel has head_dim 136 .*built:"
    ):
        OPS.bwd(*wide, [True] * 3, "emulator")


def test_offsets_are_checked_before_the_launch():
    """The kernels trust offsets; the operator looks at them on the CPU."""
    tensors = draw((1, 40, 1, 64), (1, 40, 1, 64))
    operands = [x[0] if isinstance(x, torch.Tensor) else x for x in operands_of(tensors)]
    cu, bad = (torch.tensor(x, dtype=torch.int32) for x in ([0, 40], [0, 41]))
    columns = [5, 9, 13]  # colwise operands: blocks of sequences
    for at, x in zip(columns, (tensors[3], tensors[0], tensors[1]), strict=True):
        operands[at : at + 2] = OPS.quantize(x[0], "colwise", "rceil", E4M3, cu)
    operands[17:19] = cu, bad
    with pytest.raises(ValueError, match="cu_seqlens_k: expected a last offset of at most 40"):
        OPS.bwd(*operands, [True] * 3, "emulator")
    operands[17:19] = cu, cu
    assert all(x.isfinite().all() for x in OPS.bwd(*operands, [True] * 3, "emulator"))


# --- the plan and the saved state -----------------------------------------------------------------------------------


def test_explain_names_the_backward_kernel():
    """Where a gradient is wanted, and only there."""
    x = torch.zeros(1, 4, 1, 72, dtype=torch.bfloat16, requires_grad=True)
    plan = famx.explain(x, x, x, backend="emulator")
    assert (plan.kernel, plan.backward) == ("attn_fwd_d128_bf16", "attn_bwd_d128_bf16")
    assert str(plan) == "backend: emulator (attn_fwd_d128_bf16, attn_bwd_d128_bf16)"
    assert famx.explain(x.detach(), x.detach(), x.detach(), backend="emulator").backward == ""
    with torch.no_grad():
        assert famx.explain(x, x, x, backend="emulator").backward == ""
    assert famx.explain(x, x, x, backend="portable").backward == ""
    options = {"backend": "emulator", "dout_dtype": torch.float8_e5m2}
    with pytest.raises(NotImplementedError, match="backward kernel takes torch.float8_e5m2"):
        famx.explain(x, x, x, **options)
    with pytest.raises(NotImplementedError, match="backward kernel takes torch.float8_e5m2"):
        famx.flash_attn_func(x, x, x, **options)
    assert famx.flash_attn_func(x.detach(), x.detach(), x.detach(), **options).shape == x.shape


def test_calls_on_one_backend_do_not_touch_another(monkeypatch):
    """Forward and backward of a call run where the plan says: the emulator backend never computes on the portable path."""
    monkeypatch.setattr("flash_attn_mx.portable.forward", None)
    monkeypatch.setattr("flash_attn_mx.portable.backward", None)
    tensors = draw((1, 40, 1, 64), (1, 40, 1, 64))
    assert all(x.any() for x in gradients(tensors, "emulator", causal=True))


@pytest.mark.parametrize("causal", [False, True])
def test_compiled_gradients_are_those_of_eager(causal):
    """torch.compile sees one operator for the three launches; the executor is a constant of the graph."""
    tensors = draw((1, 70, 4, 64), (1, 90, 2, 64))
    compiled = torch.compile(famx.flash_attn_func, fullgraph=True, backend="aot_eager")
    options = {"causal": causal, "deterministic": True}
    want = gradients(tensors, "emulator", **options)
    for a, b in zip(gradients(tensors, "emulator", compiled, **options), want, strict=True):
        assert torch.equal(a, b)


def saved_bytes(tensors, **options):
    saved = []

    def pack(x):
        saved.append(x.untyped_storage().nbytes())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        famx.flash_attn_func(*leaves(tensors), **options)
    return sum(saved)


@pytest.mark.parametrize("backend", ["portable", "emulator"])
def test_saved_state_is_what_the_documents_say(backend):
    """docs/host.md: q, k both ways and v once in one byte and 1/32 of a scale, O in the dtype of q, LSE."""
    heads, heads_k, tokens = 4, 2, 256
    for head_dim in (64, 128):
        tensors = draw((1, tokens, heads, head_dim), (1, tokens, heads_k, head_dim), torch.bfloat16)
        # one scale per 32 values, in either direction; as atoms, four bytes per token at least
        both = 2 * (head_dim + (4 if backend == "emulator" else head_dim // 32))
        per_token = heads * (both + 2 * head_dim + 4) + heads_k * (both + head_dim + 1)
        assert saved_bytes(tensors, causal=True, backend=backend) == tokens * per_token
