"""The launch record of the forward kernel: its contents, that it carries a kernel, and that wrong input makes none."""

import ctypes

import pytest
import torch
from kernels import stand_in
from kernels.attn_fwd import Params
from kernels.test_host_forward import draw, misaligned

from flash_attn_mx import sm100

OPS = torch.ops.flash_attn_mx
SMEM_LIMIT = 227 * 1024

pytestmark = pytest.mark.skipif(bool(sm100.WHY_NO_HOST), reason=sm100.WHY_NO_HOST or "loaded")


def problem_of(
    q, k, v, window=(-1, -1), out_dtype=torch.bfloat16, cu_q=None, cu_k=None, max_q=None, max_k=None
):
    e4m3 = torch.float8_e4m3fn
    token = (
        OPS.quantize(v, "tokenwise", "rceil", e4m3, None) if window != (-1, -1) else (None, None)
    )
    operands = (
        *OPS.quantize(q, "rowwise", "rceil", e4m3, None),
        *OPS.quantize(k, "rowwise", "rceil", e4m3, None),
        *OPS.quantize(v, "colwise", "rceil", e4m3, cu_k),
        *token,
    )
    lengths = (q.shape[1], k.shape[1]) if cu_q is None else (max_q, max_k)
    return sm100.prepare(*operands, cu_q, cu_k, *lengths, q.shape[-1] ** -0.5, *window, out_dtype)


def check_tensor_map(m, tile_dim):
    """The rules of cuTensorMapEncodeTiled for an uint8 map without interleaving."""
    assert m["address"] % 16 == 0 and m["address"] != 0
    assert len(m["sizes"]) == len(m["box"]) == 4 and len(m["strides_bytes"]) == 3
    assert all(1 <= n <= 2**32 for n in m["sizes"]) and all(1 <= n <= 256 for n in m["box"])
    assert all(s > 0 and s % 16 == 0 and s < 2**40 for s in m["strides_bytes"])
    assert m["box"][0] % 16 == 0 and m["box"][0] <= m["swizzle_bytes"] == tile_dim
    assert m["offset"] % 64 == 0


SWEEP = [
    (1, 1, 1, 1, 1, 1), (2, 257, 640, 8, 2, 64), (1, 64, 0, 2, 2, 72), (3, 31, 33, 3, 1, 96), (1, 1000, 129, 2, 1, 128),
    (1, 3, 5, 1, 1, 17),
]  # fmt: skip


@pytest.mark.parametrize("batch,seqlen_q,seqlen_k,heads,heads_k,head_dim", SWEEP)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)], ids=str)
def test_record_contents(batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, window):
    """Grid, block, shared memory, tensor maps and scalars of dense launches."""
    problem = problem_of(
        *draw((batch, seqlen_q, heads, head_dim), (batch, seqlen_k, heads_k, head_dim)), window
    )
    instance = sm100.find_instance(head_dim, torch.bfloat16)
    items = batch * heads * -(-seqlen_q // 256)
    for ctas in (1, 3, 148):
        assert sm100.record_of(problem, instance, ctas)["grid"] == min(items, ctas)
    record = sm100.record_of(problem, instance)
    assert (record["kernel"], record["cluster"], record["block"]) == (instance.name, 1, 384)
    assert 0 < record["smem_bytes"] <= SMEM_LIMIT
    maps = {m["name"]: m for m in record["maps"]}
    assert list(maps) == ["q", "k", "v", "v_tok"]
    for m in maps.values():
        check_tensor_map(m, instance.head_dim)
        assert m["box"] == [instance.head_dim, 128, 1, 1]
    assert maps["q"]["sizes"] == [head_dim, seqlen_q, heads, batch]
    for name in ("k", "v", "v_tok"):
        assert maps[name]["sizes"] == (
            [head_dim, seqlen_k, heads_k, batch] if seqlen_k else maps["q"]["sizes"]
        )
    assert (maps["v"]["address"] == maps["v_tok"]["address"]) == (
        window == (-1, -1) or seqlen_k == 0
    )
    p = Params.from_buffer_copy(record["params"])
    assert ctypes.sizeof(Params) == len(record["params"])
    for m in maps.values():
        assert m["offset"] == getattr(Params, m["name"]).offset and not any(getattr(p, m["name"]))
    assert (p.out, p.lse) == (problem.out.data_ptr(), problem.lse.data_ptr())
    assert (p.batch, p.heads, p.heads_per_kv, p.head_dim) == (
        batch,
        heads,
        heads // heads_k,
        head_dim,
    )
    assert (p.seqlen_q, p.seqlen_k, p.window_left, p.window_right) == (seqlen_q, seqlen_k, *window)
    assert (p.q_scale_tiles, p.k_scale_tiles) == (-(-seqlen_q // 128), -(-seqlen_k // 128))
    assert p.cu_seqlens_q is None or p.cu_seqlens_q == 0
    assert p.heads_at_once == batch * heads  # far below what fits L2
    assert p.out_aligned == (head_dim * 2 % 16 == 0)


def test_record_of_packed_sequences():
    """Batch counts sequences in the grid and the scalars, but is one in the maps."""
    cu = torch.tensor([0, 5, 300, 300], dtype=torch.int32)
    q, k, v = draw((310, 4, 64), (310, 2, 64))
    problem = problem_of(q, k, v, (-1, 0), cu_q=cu, cu_k=cu, max_q=295, max_k=295)
    record = sm100.record_of(problem, sm100.find_instance(64, torch.bfloat16), ctas=1000)
    p = Params.from_buffer_copy(record["params"])
    assert record["grid"] == 2 * 4 * 3
    assert (p.batch, p.q_blocks, p.seqlen_q, p.q_scale_tiles, p.k_scale_tiles) == (
        3,
        2,
        295,
        310 // 128 + 3,
        310 // 128 + 3,
    )
    assert p.cu_seqlens_q == cu.data_ptr() and p.cu_seqlens_k == cu.data_ptr()
    for m in record["maps"]:
        check_tensor_map(m, 64)
        assert m["sizes"] == [64, 310, 4 if m["name"] == "q" else 2, 1]


def test_huge_windows_and_scales():
    """Window sides beyond 32 bits are as good as unlimited; a zero scale becomes the smallest normal factor."""
    x = draw((1, 4, 1, 64), (1, 4, 1, 64))
    problem = problem_of(*x, (2**40, 3))
    record = sm100.record_of(
        problem._replace(arguments=(*problem.arguments[:14], 0.0, 2**40, 3)), sm100.INSTANCES[0]
    )
    p = Params.from_buffer_copy(record["params"])
    assert (p.window_left, p.window_right, p.negate) == (2**30, 3, 0) and p.scale_log2 == 2.0**-126


@pytest.mark.skipif(bool(sm100.WHY_NO_EMULATOR), reason=sm100.WHY_NO_EMULATOR or "built")
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("tile_dim,head_dim", [(64, 64), (64, 48), (128, 128), (128, 72)])
def test_record_carries_a_kernel(tile_dim, head_dim, packed, tmp_path):
    """The stand-in finds what was meant for it; tests/gpu/test_driver.py runs the same on a GPU."""
    path = tmp_path / "stand_in.ptx"
    path.write_text(stand_in.ptx(stand_in.Loaded(columns=tile_dim)))
    problem = stand_in.problem(head_dim, packed=packed)
    sm100.emulate(problem, stand_in.instance(tile_dim), place=path)
    stand_in.check(problem, tile_dim)


# --- wrong input of the operator: a RuntimeError that names the argument, never a wrong launch ------------------------

ARGUMENTS = [
    "q",
    "q_scale",
    "k",
    "k_scale",
    "v",
    "v_scale",
    "v_tok",
    "v_tok_scale",
    "out",
    "lse",
    "cu_seqlens_q",
    "cu_seqlens_k",
]
FAULTS = {
    "q": [lambda x: x.view(torch.float8_e5m2), misaligned, lambda x: x[0], lambda x: x[..., ::2]],
    "k": [
        lambda x: x[:, :-1],
        lambda x: x[:, :, :1].expand(-1, -1, 2, -1),
        lambda x: x.transpose(1, 3),
    ],
    "v": [lambda x: x[..., :48]],
    "q_scale": [lambda x: x[..., :-512], lambda x: x.repeat(1, 1, 2)[..., ::2], misaligned],
    "v_scale": [lambda x: x.repeat(2, 1, 1)],
    "v_tok": [lambda x: None, lambda x: x[:, :-1]],
    "v_tok_scale": [lambda x: None, lambda x: x.expand(-1, -1, -1, 2), lambda x: x[:, :-1]],
    "out": [lambda x: x[..., :32], lambda x: x[:, :5]],
    "lse": [lambda x: x.double(), lambda x: x[..., :5]],
    "cu_seqlens_k": [lambda x: torch.tensor([0, 4], dtype=torch.int32)],
}


@pytest.mark.parametrize(
    "argument,fault", [(a, i) for a, faults in FAULTS.items() for i in range(len(faults))]
)
def test_operator_refuses_wrong_tensors(argument, fault):
    problem = problem_of(*draw((2, 70, 4, 64), (2, 90, 2, 64)), (-1, 0))
    arguments = list(problem.arguments)
    at = ARGUMENTS.index(argument)
    sm100.record_of(problem, sm100.INSTANCES[0])
    arguments[at] = FAULTS[argument][fault](arguments[at])
    with pytest.raises(RuntimeError, match="expected .*, got "):
        sm100.record_of(problem._replace(arguments=tuple(arguments)), sm100.INSTANCES[0])


def test_operator_refuses_wrong_instances_and_executors():
    problem = problem_of(*draw((1, 4, 1, 96), (1, 4, 1, 96)))
    for tile_dim in (64, 96, 256):
        with pytest.raises(RuntimeError, match="tile_dim: expected 64 or 128, at least head_dim"):
            OPS.attn_fwd(*problem.arguments, "attn_fwd_d64_bf16", tile_dim, 1, "record", "")
    with pytest.raises(RuntimeError, match="executor: expected driver, record or encode, got cuda"):
        OPS.attn_fwd(*problem.arguments, "attn_fwd_d128_bf16", 128, 1, "cuda", "")
    with pytest.raises(ValueError, match="executor: expected one of"):
        OPS.fwd(*problem.arguments[:8], None, None, 4, 4, 1.0, -1, -1, torch.float32, "gpu")
    with pytest.raises(NotImplementedError, match="backend 'sm100': the tensors are on cpu"):
        OPS.fwd(*problem.arguments[:8], None, None, 4, 4, 1.0, -1, -1, torch.float32, "sm100")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_driver_executor_without_a_driver():
    """Without libcuda the driver executor says so."""
    problem = problem_of(*draw((1, 4, 1, 64), (1, 4, 1, 64)))
    with pytest.raises(RuntimeError, match="flash_attn_mx: no CUDA driver: .*libcuda"):
        sm100.launch(problem, sm100.INSTANCES[0], image="none")
