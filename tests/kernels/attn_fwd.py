"""Runs the sm_100 forward kernel's PTX in the emulator on quantised operands, as the host path will.

Params mirrors AttnFwdParams of csrc/params.h field by field; the tests check its size against the kernel's.
"""

import ctypes
import math
from pathlib import Path
from typing import NamedTuple, Optional

import torch

from flash_attn_mx import emulator, portable
from flash_attn_mx.layouts import operand_matrix, to_swizzled128x4
from flash_attn_mx.quantize import quantize_mxfp8

TILE = 128
THREADS = 384
OUT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Params(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint8 * 128) for name in ("q", "k", "v", "v_tok")),
        *((name, ctypes.c_uint64) for name in ("q_scale", "k_scale", "v_scale", "v_tok_scale")),
        *((name, ctypes.c_uint64) for name in ("out", "lse", "cu_seqlens_q", "cu_seqlens_k")),
        *((f"v_tok_scale_stride_{d}", ctypes.c_int64) for d in ("batch", "token", "head")),
        *((f"out_stride_{d}", ctypes.c_int64) for d in ("batch", "token", "head")),
        *((f"lse_stride_{d}", ctypes.c_int64) for d in ("batch", "head")),
        *((name, ctypes.c_int32) for name in ("batch", "heads", "heads_per_kv", "head_dim")),
        *(
            (name, ctypes.c_int32)
            for name in ("seqlen_q", "seqlen_k", "q_scale_tiles", "k_scale_tiles")
        ),
        *((name, ctypes.c_int32) for name in ("window_left", "window_right", "q_blocks")),
        ("scale_log2", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("negate", "out_aligned", "heads_at_once")),
        ("padding", ctypes.c_int32 * 1),  # the struct is a multiple of its alignment, 64
    ]


class Operands(NamedTuple):
    """Quantised q (rowwise), k (rowwise), v (colwise), v_tok (tokenwise): pairs (payload, plain scale)."""

    q: tuple
    k: tuple
    v: tuple
    v_tok: tuple
    cu_q: Optional[torch.Tensor] = None
    cu_k: Optional[torch.Tensor] = None


def quantise(q, k, v, cu_q=None, cu_k=None):
    def pair(x, axis, cu=None):
        mx = quantize_mxfp8(x, axis, cu_seqlens=cu)
        return mx.data, mx.scale

    return Operands(
        pair(q, "rowwise"),
        pair(k, "rowwise"),
        pair(v, "colwise", cu_k),
        pair(v, "tokenwise"),
        cu_q,
        cu_k,
    )


def _padded(x):
    """Payload bytes with head_dim padded to 16, which tensor maps need of strides."""
    d = x.shape[-1]
    return torch.nn.functional.pad(x.contiguous().view(torch.uint8), (0, -d % 16)).contiguous()


def _map(payload, head_dim, box_dim):
    """Payload (B, S, H, padded D) -> tensor map with dimensions (D, S, H, B)."""
    b, s, h, _ = payload.shape
    st = payload.stride()
    sizes = (head_dim, max(s, 1), h, b)
    strides = tuple(max(16, n) for n in (st[1], st[2], st[0]))
    return emulator.TensorMap.tiled(
        payload,
        (box_dim, TILE, 1, 1),
        dims=sizes,
        strides=strides,
        dtype="uint8",
        swizzle=f"{box_dim}B",
    )


def _atoms(scale, axis, cu, padding):
    """Plain scales -> swizzled atoms (heads, tiles, 512) per batch, or packed by sequence; and tiles per head."""
    if cu is None:
        swizzled = to_swizzled128x4(operand_matrix(scale, axis), padding).view(torch.uint8)
        tokens = swizzled.shape[-1] // 512
        return swizzled.reshape(-1, 512).contiguous(), tokens
    cu = cu.tolist()
    heads = scale.shape[1]
    total, nseq = cu[-1], len(cu) - 1
    tiles = total // TILE + nseq
    out = torch.full((heads, tiles, 512), padding, dtype=torch.uint8)
    for b, (start, stop) in enumerate(zip(cu, cu[1:], strict=False)):
        if start == stop:
            continue
        if axis == "rowwise":
            rows = scale[start:stop]
        else:
            first = start // 32 + b
            rows = scale[first : first + -(-(stop - start) // 32)]
        s = (
            to_swizzled128x4(operand_matrix(rows, axis), padding)
            .view(torch.uint8)
            .view(heads, -1, 512)
        )
        first = start // TILE + b
        out[:, first : first + s.shape[1]] = s
    return out.view(-1, 512).contiguous(), tiles


def run(
    ptx: Path, ops: Operands, *, softmax_scale=None, window=(-1, -1), out_dtype=torch.float32, grid=1,
    scale_padding=0xFF, heads_at_once=2, max_q=None, max_k=None, **options,
):  # fmt: skip
    """Returns out, lse, emulator report."""
    packed = ops.cu_q is not None
    dim4 = (lambda x: x.unsqueeze(0)) if packed else (lambda x: x)
    payloads = [_padded(dim4(x[0])) for x in (ops.q, ops.k, ops.v, ops.v_tok)]
    batch, seqlen_q, heads, head_dim = dim4(ops.q[0]).shape
    seqlen_k, heads_k = dim4(ops.k[0]).shape[1:3]
    box = 64 if head_dim <= 64 else 128
    maps = [_map(x, head_dim, box) for x in payloads]
    (q_scale, q_tiles), (k_scale, k_tiles), (v_scale, v_tiles) = (
        _atoms(x[1], axis, cu, scale_padding)
        for x, axis, cu in (
            (ops.q, "rowwise", ops.cu_q),
            (ops.k, "rowwise", ops.cu_k),
            (ops.v, "colwise", ops.cu_k),
        )
    )
    assert k_tiles == v_tiles
    v_tok_scale = dim4(ops.v_tok[1]).view(torch.uint8).contiguous()
    out = torch.full((batch, seqlen_q, heads, head_dim), 77.0, dtype=out_dtype)
    lse = torch.full((batch, heads, seqlen_q), 77.0)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    longest_q = seqlen_q if max_q is None else max_q
    p = Params(
        q_scale=q_scale.data_ptr(), k_scale=k_scale.data_ptr(), v_scale=v_scale.data_ptr(),
        v_tok_scale=v_tok_scale.data_ptr(), out=out.data_ptr(), lse=lse.data_ptr(),
        v_tok_scale_stride_batch=v_tok_scale.stride(0), v_tok_scale_stride_token=v_tok_scale.stride(1),
        v_tok_scale_stride_head=v_tok_scale.stride(2),
        out_stride_batch=out.stride(0), out_stride_token=out.stride(1), out_stride_head=out.stride(2),
        lse_stride_batch=lse.stride(0), lse_stride_head=lse.stride(1),
        batch=len(ops.cu_q) - 1 if packed else batch, heads=heads, heads_per_kv=heads // heads_k, head_dim=head_dim,
        seqlen_q=longest_q, seqlen_k=seqlen_k if max_k is None else max_k,
        q_scale_tiles=q_tiles, k_scale_tiles=k_tiles, window_left=window[0], window_right=window[1],
        q_blocks=-(-longest_q // (2 * TILE)),
        scale_log2=max(abs(scale) * math.log2(math.e), 2.0**-126), negate=scale < 0,
        heads_at_once=heads_at_once,
        out_aligned=head_dim * out.element_size() % 16 == 0,
    )  # fmt: skip
    for name, m in zip(("q", "k", "v", "v_tok"), maps, strict=True):
        setattr(p, name, (ctypes.c_uint8 * 128).from_buffer_copy(m.encoded))
    buffers = [*payloads, q_scale, k_scale, v_scale, v_tok_scale, out, lse]
    if packed:
        p.cu_seqlens_q, p.cu_seqlens_k = ops.cu_q.data_ptr(), ops.cu_k.data_ptr()
        buffers += [ops.cu_q, ops.cu_k]
    kernel = emulator.Module.from_ptx(ptx).kernels[f"attn_fwd_d{box}_{OUT_NAMES[out_dtype]}"]
    assert kernel.param_bytes == ctypes.sizeof(Params), (kernel.param_bytes, ctypes.sizeof(Params))
    report = kernel.launch(
        grid=grid,
        block=THREADS,
        args=bytes(p),
        smem_bytes=_smem_bytes(box),
        buffers=buffers,
        **options,
    )
    if packed:
        out, lse = out[0], lse[0]
    return out, lse, report


def _smem_bytes(box):
    """Config::kSmemBytes of attn_fwd/config.cuh."""
    q_stages, kv_stages = 2, 9 if box == 128 else 16
    tiles = (2 * q_stages + kv_stages) * (TILE * box + 512)
    barriers = 8 * (2 * q_stages + 2 * kv_stages + 8)
    return tiles + 2 * 512 + 512 + 2 * TILE * 4 + barriers + 16 + 1024


def expected(ops: Operands, *, softmax_scale=None, window=(-1, -1), out_dtype=torch.float32):
    """The portable path on the same operands."""
    scale = ops.q[0].shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if ops.cu_q is None:
        return portable.forward(ops.q, ops.k, ops.v, ops.v_tok, scale, window, out_dtype)
    outs, lses = [], []
    cu_q, cu_k = ops.cu_q.tolist(), ops.cu_k.tolist()
    for b in range(len(cu_q) - 1):
        tq, tk = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        first = cu_k[b] // 32 + b
        blocks = slice(first, first + -(-(tk.stop - tk.start) // 32))

        def one(pair, tokens, scales=None):
            return pair[0][tokens].unsqueeze(0), pair[1][
                tokens if scales is None else scales
            ].unsqueeze(0)

        out, lse = portable.forward(
            one(ops.q, tq),
            one(ops.k, tk),
            one(ops.v, tk, blocks),
            one(ops.v_tok, tk),
            scale,
            window,
            out_dtype,
        )
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, -1)
