"""The stand-in for attn_bwd between the two real passes: it loads a box through one of the seven tensor maps (stand_in.py),
copies bias to dv and puts -delta, put together from its pieces, into every channel of dq_acc, so that it comes out of
bwd_postprocess as dQ.
"""

import ctypes
import math

import torch
from kernels import stand_in

from flash_attn_mx import _native, sm100
from flash_attn_mx.quantize import dequantize, quantize_mxfp8

MAPS = ("q", "q_col", "dout", "dout_col", "k", "k_col", "v_tok")
SCALARS = 64  # floats of dv before bias begins
TOKENS_Q, TOKENS_K, HEADS, SCALE = 200, 126, 2, 0.25


def _fields(kind, *names):
    return [(name, kind) for name in names]


class Params(ctypes.Structure):
    """AttnBwdParams of csrc/params.h, field by field."""

    _fields_ = [
        *((name, ctypes.c_uint8 * 128) for name in MAPS),
        *_fields(
            ctypes.c_uint64,
            "q_scale", "q_col_scale", "dout_scale", "dout_col_scale", "k_scale", "k_col_scale", "v_tok_scale",
            "bias", "delta", "dq_acc", "dq_turn", "dk", "dv", "cu_seqlens_q", "cu_seqlens_k",
        ),
        *_fields(
            ctypes.c_int64,
            *(f"{t}_stride_{d}" for t in ("v_tok_scale", "dk", "dv") for d in ("batch", "token", "head")),
        ),
        *_fields(
            ctypes.c_int32,
            "batch", "heads_k", "heads_per_kv", "head_dim", "seqlen_q", "seqlen_k", "row_tiles", "k_scale_tiles",
            "window_left", "window_right",
        ),
        *_fields(ctypes.c_float, "scale_log2", "softmax_scale"),
        *_fields(ctypes.c_int32, "grads_aligned"),
        ("padding", ctypes.c_int32 * 3),  # the struct is a multiple of its alignment, 64
    ]  # fmt: skip


def _copies(rows: int, tile_dim: int) -> str:
    """PTX: cluster 0 copies bias and -delta of all rows."""
    field = {x: getattr(Params, x).offset for x in ("bias", "delta", "dq_acc", "dv")}
    return f"""
  setp.ne.u32 %p2, %r4, 0;
  @%p2 bra rows_done;
  ld.param.u64 %rd4, [params+{field["bias"]}];
  ld.param.u64 %rd5, [params+{field["delta"]}];
  ld.param.u64 %rd6, [params+{field["dq_acc"]}];
  ld.param.u64 %rd7, [params+{field["dv"]}];
  mov.u32 %r7, %r1;
next_row:
  setp.ge.u32 %p2, %r7, {rows};
  @%p2 bra rows_done;
  mul.wide.u32 %rd8, %r7, 4;
  add.u64 %rd1, %rd4, %rd8;
  ld.global.f32 %f1, [%rd1];
  add.u64 %rd1, %rd7, %rd8;
  st.global.f32 [%rd1+{4 * SCALARS}], %f1;
{_minus_delta()}
  shr.u32 %r9, %r7, 5;
  mul.lo.u32 %r9, %r9, {32 * tile_dim * 4};
  and.b32 %r10, %r7, 31;
  shl.b32 %r10, %r10, 4;
  add.u32 %r9, %r9, %r10;
  cvt.u64.u32 %rd8, %r9;
  add.u64 %rd1, %rd6, %rd8;
  mov.u32 %r10, 0;
next_channels:
  st.global.v4.f32 [%rd1], {{%f1, %f1, %f1, %f1}};
  add.u64 %rd1, %rd1, 512;
  add.u32 %r10, %r10, 4;
  setp.lt.u32 %p2, %r10, {tile_dim};
  @%p2 bra next_channels;
  add.u32 %r7, %r7, %r8;
  bra next_row;
rows_done:"""


def _minus_delta() -> str:
    """PTX: %f1 = -delta of row %r7 of the scratch at %rd5 (csrc/kernels/attn_bwd/delta.cuh)."""
    pieces = "".join(
        f"""
  cvt.rn.f16x2.e4m3x2 %r10, %h{i};
  mov.b32 {{%h4, %h5}}, %r10;
  cvt.f32.f16 %f2, %h4;
  fma.rn.f32 %f1, %f2, {weight}, %f1;
  cvt.f32.f16 %f2, %h5;
  fma.rn.f32 %f1, %f2, {weight}, %f1;"""
        for i, weight in (
            (2, "0f3B800000"),
            (1, "0f3F800000"),
            (0, "0f3F800000"),
        )  # the small first
    )
    return f"""  shr.u32 %r9, %r7, 7;
  mul.wide.u32 %rd1, %r9, {sm100.DELTA_BYTES};
  add.u64 %rd1, %rd1, %rd5;
  and.b32 %r9, %r7, 127;
  mul.wide.u32 %rd9, %r9, 16;
  add.u64 %rd9, %rd9, %rd1;
  ld.global.v2.b32 {{%r10, %r11}}, [%rd9];
  mov.b32 {{%h0, %h1}}, %r10;
  mov.b32 {{%h2, %h3}}, %r11;
  and.b32 %r10, %r9, 31;
  shl.b32 %r10, %r10, 4;
  shr.u32 %r9, %r9, 5;
  shl.b32 %r9, %r9, 2;
  add.u32 %r9, %r9, %r10;
  cvt.u64.u32 %rd9, %r9;
  add.u64 %rd9, %rd9, %rd1;
  ld.global.u8 %r11, [%rd9+2048];
  mov.f32 %f1, 0f00000000;{pieces}
  shl.b32 %r11, %r11, 23;
  mov.b32 %f2, %r11;
  mul.f32 %f1, %f1, %f2;"""


def tensors(head_dim: int, device="cpu"):
    """q or dout, k or v, O (fp32), LSE."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, n, HEADS, head_dim) for n in (TOKENS_Q, TOKENS_K, TOKENS_Q))
    x, y, out = (torch.randn(s, generator=generator).to(device) for s in shapes)
    lse = torch.randn(1, HEADS, TOKENS_Q, generator=generator).to(device)
    lse[:, :, 7] = -torch.inf  # a row that sees no key
    return x, y, out, lse


def problem(head_dim: int, tile_dim: int, device="cpu", packed=False) -> sm100.BackwardProblem:
    """Two heads; the keys fit one tile, so that there are as many clusters as heads."""
    return prepared(inputs(head_dim, device, packed), tile_dim)


def inputs(head_dim: int, device="cpu", packed=False):
    """What tensors() gives, packed if wanted, and the offsets."""
    x, y, out, lse = tensors(head_dim, device)
    if not packed:
        return x, y, out, lse, None, None
    offsets = ([0, n] for n in (TOKENS_Q, TOKENS_K))
    cu = [torch.tensor(n, dtype=torch.int32, device=device) for n in offsets]
    return *(t[0] for t in (x, y, out, lse)), *cu


def prepared(given, tile_dim: int) -> sm100.BackwardProblem:
    """Quantised, in the kernels' form; scratch and gradients."""
    x, y, out, lse, cu_q, cu_k = given

    def pair(t, axis, cu):
        return torch.ops.flash_attn_mx.quantize(t, axis, "rceil", torch.float8_e4m3fn, cu)

    queries = (*pair(x, "rowwise", None), *pair(x, "colwise", cu_q))
    keys = (*pair(y, "rowwise", None), *pair(y, "colwise", cu_k), *pair(y, "tokenwise", None))
    return sm100.prepare_backward(
        out, out, lse, *(t.clone() for t in queries), *queries, *keys, cu_q, cu_k, TOKENS_Q, TOKENS_K,
        SCALE, -1, -1, True, [True] * 3, tile_dim,
    )  # fmt: skip


def instance(tile_dim: int) -> sm100.BackwardInstance:
    """The passes that are built for fp32 around the stand-in."""
    names = f"bwd_preprocess_d{tile_dim}_fp32", stand_in.NAME, f"bwd_postprocess_d{tile_dim}_fp32"
    return sm100.BackwardInstance(*names, tile_dim, torch.float32, torch.float32)


def loaded(p: sm100.BackwardProblem, tile_dim: int, tensor_map: str) -> stand_in.Loaded:
    """The stand-in's load through a map, as the launch record describes it."""
    record = sm100.backward_records(p, instance(tile_dim))[1]
    box = next(m["box"] for m in record["maps"] if m["name"] == tensor_map)
    return stand_in.Loaded(Params, tensor_map, "dk", "dv", box[0], box[1], record["cluster"])


def write(
    folder, p: sm100.BackwardProblem, tile_dim: int, tensor_map: str, target=None
) -> list[str]:
    """Puts the PTX of the three kernels into a folder; returns the paths. target: of the two passes instead of sm_100f."""
    rows = p.scratch[0].numel()
    main = stand_in.ptx(loaded(p, tile_dim, tensor_map), _copies(rows, tile_dim))
    paths = [folder / f"{name}.ptx" for name in instance(tile_dim).names]
    paths[1].write_text(main)
    for path in (paths[0], paths[2]):
        text = (_native.DEVICE / f"{path.stem}.sm_100f.ptx").read_text()
        path.write_text(
            text if target is None else text.replace(".target sm_100f", f".target {target}")
        )
    return [str(path) for path in paths]


def check(p: sm100.BackwardProblem, tile_dim: int, tensor_map: str) -> None:
    """The gradients hold what the stand-in should have found, and what the passes should have made."""
    names = ("dout", "dout_col", "q", "q_col", "k", "k_col", "v_tok")
    payload = dict(zip(names, p.arguments[0:14:2], strict=True))[tensor_map]
    record = sm100.backward_records(p, instance(tile_dim))[1]
    dq, dk, dv = (x.cpu() for x in p.grads)
    stand_in.check_found(loaded(p, tile_dim, tensor_map), record, payload, dk, dv)
    x, _, out, lse = tensors(dq.shape[-1])
    tiles = -(-TOKENS_Q // 128) * 128
    bias = torch.full((HEADS, p.scratch[0].shape[0] // HEADS * 128), -torch.inf)
    bias[:, :TOKENS_Q] = torch.where(lse == -torch.inf, lse, -lse * math.log2(math.e))[0]
    found = dv.flatten()[SCALARS:][: bias.numel()].view(bias.shape)
    assert torch.allclose(found[:, :tiles], bias[:, :tiles], rtol=1e-6)
    delta = (dequantize(quantize_mxfp8(x)) * out).sum(-1, keepdim=True)
    assert torch.allclose(
        dq, (-SCALE * delta).expand(out.shape).reshape(dq.shape), rtol=1e-5, atol=1e-5
    )
