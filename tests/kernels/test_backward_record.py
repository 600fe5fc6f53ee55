"""The launch records of the backward: their contents, that they carry kernels, and that wrong input makes none."""

import ctypes

import pytest
import torch
from kernels import stand_in_bwd
from kernels.test_host_backward import draw, operands_of
from kernels.test_host_record import SMEM_LIMIT, SWEEP, check_tensor_map, misaligned

from flash_attn_mx import sm100

pytestmark = pytest.mark.skipif(bool(sm100.WHY_NO_HOST), reason=sm100.WHY_NO_HOST or "loaded")

ARGUMENTS = [
    "dout", "dout_scale", "dout_col", "dout_col_scale", "q", "q_scale", "q_col", "q_col_scale",
    "k", "k_scale", "k_col", "k_col_scale", "v_tok", "v_tok_scale", "out", "lse",
    "bias", "delta", "dq_acc", "dq_turn", "dq", "dk", "dv", "cu_seqlens_q", "cu_seqlens_k",
]  # fmt: skip


def instance_for(head_dim):
    """An instance by its tiles; nothing looks for its kernels before a launch."""
    tile = 64 if head_dim <= 64 else 128
    return sm100.BackwardInstance("pre", "main", "post", tile, torch.float32, torch.float32)


def problem_of(tensors, deterministic=True, needs=(True, True, True), **options):
    *operands, _ = operands_of(tensors, **options)
    tile_dim = instance_for(tensors[0].shape[-1]).head_dim
    return sm100.prepare_backward(*operands, deterministic, list(needs), tile_dim)


def packed_problem(lengths_q, lengths_k, tail=0, head_dim=64):
    """Two query heads, one key head."""
    q, k, v, dout = draw((sum(lengths_q) + tail, 2, head_dim), (sum(lengths_k) + tail, 1, head_dim))
    cu_q, cu_k = (
        torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        for n in (lengths_q, lengths_k)
    )

    def both(x, cu):
        quantise = torch.ops.flash_attn_mx.quantize
        kinds = ("rowwise", None), ("colwise", cu)
        return [t for kind, c in kinds for t in quantise(x, kind, "rceil", torch.float8_e4m3fn, c)]

    token = torch.ops.flash_attn_mx.quantize(v, "tokenwise", "rceil", torch.float8_e4m3fn, None)
    lse = torch.zeros(2, q.shape[0])
    return sm100.prepare_backward(
        dout, torch.zeros_like(q), lse, *both(dout, cu_q), *both(q, cu_q), *both(k, cu_k), *token,
        cu_q, cu_k, max(lengths_q), max(lengths_k), 0.125, -1, 0, True, [True] * 3, 64,
    )  # fmt: skip


@pytest.mark.parametrize("batch,seqlen_q,seqlen_k,heads,heads_k,head_dim", SWEEP)
@pytest.mark.parametrize("causal", [False, True])
def test_record_contents(batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, causal):
    """Grids, blocks, shared memory, tensor maps and scalars of the three launches of dense problems."""
    tensors = draw((batch, seqlen_q, heads, head_dim), (batch, seqlen_k, heads_k, head_dim))
    problem = problem_of(tensors, causal=causal)
    instance = instance_for(head_dim)
    records = sm100.backward_records(problem, instance)
    pre, main, post = records
    assert [r["kernel"] for r in records] == ["pre", "main", "post"]
    if seqlen_k == 0:
        assert all(r["grid"] == 0 and not r["maps"] for r in records)
        assert not problem.grads[0].any()
        return
    cluster = main["cluster"]
    key_tiles = -(-seqlen_k // (128 * cluster)) * cluster
    assert main["grid"] == key_tiles * heads_k * batch and main["block"] == 512
    assert 0 < main["smem_bytes"] <= SMEM_LIMIT
    row_tiles = -(-seqlen_q // 128)
    for r in (pre, post):
        assert (r["grid"], r["cluster"], r["block"], r["smem_bytes"]) == (
            row_tiles * heads * batch, 1, 256, 0,
        )  # fmt: skip
        assert not r["maps"]
    maps = {m["name"]: m for m in main["maps"]}
    assert sorted(maps) == sorted(stand_in_bwd.MAPS)
    given = dict(zip(ARGUMENTS, problem.arguments, strict=False))
    for name, m in maps.items():
        check_tensor_map(m, m["box"][0])
        of_key = name[0] in "kv"
        assert m["sizes"] == [
            head_dim, seqlen_k if of_key else seqlen_q, heads_k if of_key else heads, batch,
        ]  # fmt: skip
        assert m["address"] == given[name].data_ptr()
        assert m["offset"] == getattr(stand_in_bwd.Params, name).offset
        assert m["box"][0] * m["box"][1] * cluster >= 128 * instance.head_dim
    p = stand_in_bwd.Params.from_buffer_copy(main["params"])
    assert ctypes.sizeof(p) == len(main["params"])
    pointers = [
        x for x in ARGUMENTS if x.endswith("_scale") or x in ARGUMENTS[16:20] + ["dk", "dv"]
    ]
    for name in pointers:
        assert getattr(p, name) == given[name].data_ptr(), name
    assert (p.batch, p.heads_k, p.heads_per_kv, p.head_dim) == (
        batch, heads_k, heads // heads_k, head_dim,
    )  # fmt: skip
    assert (p.seqlen_q, p.seqlen_k, p.row_tiles, p.k_scale_tiles) == (
        seqlen_q, seqlen_k, row_tiles, -(-seqlen_k // 128),
    )  # fmt: skip
    assert (p.window_left, p.window_right) == (-1, 0 if causal else -1)
    assert p.softmax_scale == pytest.approx(head_dim**-0.5)
    assert p.scale_log2 == pytest.approx(head_dim**-0.5 * 1.4426950408889634)
    assert p.grads_aligned == (head_dim * 4 % 16 == 0)
    assert not (p.cu_seqlens_q or p.cu_seqlens_k)


def test_record_of_packed_sequences():
    """Batch counts sequences in grids and scalars, but is one in the maps; scratch has a row tile for every atom."""
    problem = packed_problem([5, 295, 0], [5, 295, 7], tail=10)
    pre, main, post = sm100.backward_records(problem, instance_for(64))
    p = stand_in_bwd.Params.from_buffer_copy(main["params"])
    assert pre["grid"] == post["grid"] == 3 * 2 * 3
    assert main["grid"] == -(-3 // main["cluster"]) * main["cluster"] * 3
    assert (p.batch, p.seqlen_q, p.seqlen_k, p.row_tiles, p.k_scale_tiles) == (
        3, 295, 295, 310 // 128 + 3, 317 // 128 + 3,
    )  # fmt: skip
    assert p.cu_seqlens_q and p.cu_seqlens_k and p.cu_seqlens_q != p.cu_seqlens_k
    bias, delta, dq_acc, dq_turn = problem.scratch
    assert bias.shape == (2 * p.row_tiles, 128) and delta.shape == (2 * p.row_tiles, 128 * 16 + 512)
    assert dq_acc.shape == (2 * p.row_tiles, 128, 64) and dq_turn.shape == (2 * p.row_tiles,)
    for m in main["maps"]:
        assert m["sizes"] == ([64, 317, 1, 1] if m["name"][0] in "kv" else [64, 310, 2, 1])


def test_only_what_is_needed_is_passed():
    """No postprocess and no sums without dQ, no counters unless their order matters, null for unwanted dK and dV."""
    tensors = draw((1, 40, 1, 64), (1, 40, 1, 64))
    for needs in ((True, False, True), (False, True, False)):
        for deterministic in (False, True):
            problem = problem_of(tensors, deterministic, needs)
            records = sm100.backward_records(problem, instance_for(64))
            p = stand_in_bwd.Params.from_buffer_copy(records[1]["params"])
            assert len(records) == 2 + needs[0]
            assert bool(p.dq_acc) == needs[0] and bool(p.dq_turn) == (needs[0] and deterministic)
            assert (bool(p.dk), bool(p.dv)) == needs[1:]


@pytest.mark.skipif(bool(sm100.WHY_NO_EMULATOR), reason=sm100.WHY_NO_EMULATOR or "built")
@pytest.mark.parametrize("tensor_map", stand_in_bwd.MAPS)
@pytest.mark.parametrize("tile_dim,head_dim,packed", [(64, 48, False), (128, 128, True)])
def test_records_carry_kernels(tile_dim, head_dim, packed, tensor_map, tmp_path):
    """The stand-in finds what was meant for it, between the two real passes; tests/gpu/test_driver.py does so on a GPU."""
    problem = stand_in_bwd.problem(head_dim, tile_dim, packed=packed)
    stand_in_bwd.write(tmp_path, problem, tile_dim, tensor_map)
    sm100.emulate_backward(problem, stand_in_bwd.instance(tile_dim), tmp_path)
    stand_in_bwd.check(problem, tile_dim, tensor_map)


# --- wrong input of the operator: a RuntimeError that names the argument, never a wrong launch ------------------------

FAULTS = {
    "dout": [lambda x: x.view(torch.float8_e5m2), misaligned, lambda x: x[0], lambda x: x[:, :5]],
    "dout_col": [lambda x: x[..., ::2], lambda x: x[:, :, :2]],
    "q": [misaligned, lambda x: x[..., :48]],
    "q_col": [lambda x: x.view(torch.float8_e5m2), lambda x: x[:1]],
    "k": [lambda x: x[:, :-1], lambda x: x.transpose(1, 3)],
    "k_col": [misaligned, lambda x: x[:, :-1]],
    "v_tok": [lambda x: x[:, :-1], lambda x: x.view(torch.float8_e5m2)],
    "v_tok_scale": [lambda x: x.expand(-1, -1, -1, 2), lambda x: x[:, :-1]],
    "dout_scale": [lambda x: x[..., :-512]],
    "dout_col_scale": [lambda x: x.repeat(1, 1, 2)[..., ::2]],
    "q_scale": [lambda x: x.repeat(2, 1, 1)],
    "q_col_scale": [misaligned],
    "k_scale": [lambda x: x[..., :-512]],
    "k_col_scale": [lambda x: x[..., :-512]],
    "out": [lambda x: x[..., :32], lambda x: x[:, :5]],
    "lse": [lambda x: x.double(), lambda x: x[..., :5]],
    "bias": [lambda x: x[1:], lambda x: x.double()],
    "delta": [lambda x: x[1:], lambda x: x.view(torch.int8)],
    "dq_acc": [lambda x: None, lambda x: x[..., :32], lambda x: x.half()],
    "dq_turn": [lambda x: x[1:], lambda x: x.float()],
    "dq": [lambda x: None, lambda x: x[:, :5], lambda x: x[..., ::2]],
    "dk": [lambda x: x[:, :5]],
    "dv": [lambda x: x[:1]],
    "cu_seqlens_k": [lambda x: torch.tensor([0, 4], dtype=torch.int32)],
}


@pytest.mark.parametrize(
    "argument,fault", [(a, i) for a, faults in FAULTS.items() for i in range(len(faults))]
)
def test_operator_refuses_wrong_tensors(argument, fault):
    problem = problem_of(draw((2, 70, 4, 64), (2, 90, 2, 64)), causal=True)
    arguments = list(problem.arguments)
    at = ARGUMENTS.index(argument)
    sm100.backward_records(problem, instance_for(64))
    arguments[at] = FAULTS[argument][fault](arguments[at])
    with pytest.raises(RuntimeError, match="expected .*, got "):
        sm100.backward_records(problem._replace(arguments=tuple(arguments)), instance_for(64))


def test_operator_refuses_wrong_instances_and_executors():
    problem = problem_of(draw((1, 4, 1, 96), (1, 4, 1, 96)))
    call = torch.ops.flash_attn_mx.attn_bwd
    names = ["pre", "main", "post"]
    for tile_dim in (64, 96, 256):
        with pytest.raises(RuntimeError, match="tile_dim: expected 64 or 128, at least head_dim"):
            call(*problem.arguments, names, tile_dim, "record", [])
    with pytest.raises(RuntimeError, match="executor: expected driver, record or encode, got cuda"):
        call(*problem.arguments, names, 128, "cuda", [])
    with pytest.raises(RuntimeError, match="kernels: expected three names, got 2"):
        call(*problem.arguments, names[:2], 128, "record", [])
    with pytest.raises(RuntimeError, match="images: expected 3, got 1"):
        call(*problem.arguments, names, 128, "driver", ["one"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_driver_executor_without_a_driver():
    """Without libcuda the driver executor says so."""
    problem = problem_of(draw((1, 4, 1, 64), (1, 4, 1, 64)))
    with pytest.raises(
        RuntimeError, match="flash_attn_mx: .*(no CUDA driver|this torch has no CUDA)"
    ):
        sm100.launch_backward(problem, instance_for(64), images=["none"] * 3)


def test_strided_out_and_lse_of_a_direct_call():
    """O whose channels are not neighbours and a transposed LSE are copied, any other strides of O read in place."""
    tensors = draw((1, 70, 2, 64), (1, 70, 1, 64))
    operands = operands_of(tensors, causal=True)
    want = torch.ops.flash_attn_mx.bwd(*operands, [True] * 3, "portable")
    for change in (
        lambda out: out.transpose(1, 2).contiguous().transpose(1, 2),
        lambda out: out.transpose(2, 3).contiguous().transpose(2, 3),
    ):
        moved = list(operands)
        moved[1] = change(operands[1])
        moved[2] = operands[2].transpose(1, 2).contiguous().transpose(1, 2)
        got = torch.ops.flash_attn_mx.bwd(*moved, [True] * 3, "emulator")
        for a, b in zip(got, want, strict=True):
            assert (a - b).norm() <= 1e-3 * b.norm()
