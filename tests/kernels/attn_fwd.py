"""Runs the sm_100 forward kernel's PTX in the emulator on quantised operands, through the host path of the package.

Params mirrors AttnFwdParams of csrc/params.h field by field, to look into launch records.
"""

import ctypes
from pathlib import Path
from typing import NamedTuple, Optional

import torch

from flash_attn_mx import portable, sm100
from flash_attn_mx.layouts import operand_matrix, to_swizzled128x4
from flash_attn_mx.quantize import quantize_mxfp8

TILE = 128
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


def _atoms(scale, axis, cu, total, padding):
    """Plain scales -> swizzled atoms of params.h, with this byte wherever no element has one."""
    if cu is None:
        return to_swizzled128x4(operand_matrix(scale, axis), padding)
    cu = cu.tolist()
    heads = scale.shape[1]
    tiles = total // TILE + len(cu) - 1
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
    return out.view(heads, -1).view(torch.float8_e8m0fnu)


def run(
    ptx: Path, ops: Operands, *, softmax_scale=None, window=(-1, -1), out_dtype=torch.float32, grid=1,
    scale_padding=0xFF, heads_at_once=2, max_q=None, max_k=None, **options,
):  # fmt: skip
    """Returns out, lse, emulator report."""
    head_dim = ops.q[0].shape[-1]
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    atoms = [
        _atoms(x[1], axis, cu, x[0].shape[0], scale_padding)
        for x, axis, cu in (
            (ops.q, "rowwise", ops.cu_q),
            (ops.k, "rowwise", ops.cu_k),
            (ops.v, "colwise", ops.cu_k),
        )  # fmt: skip
    ]
    tokens = 0 if ops.cu_q is not None else 1
    problem = sm100.prepare(
        ops.q[0], atoms[0], ops.k[0], atoms[1], ops.v[0], atoms[2], *ops.v_tok, ops.cu_q, ops.cu_k,
        ops.q[0].shape[tokens] if max_q is None else max_q, ops.k[0].shape[tokens] if max_k is None else max_k,
        scale, *window, out_dtype,
    )  # fmt: skip
    instance = sm100.find_instance(head_dim, out_dtype)
    record = sm100.record_of(problem, instance, grid)
    params = Params.from_buffer_copy(record["params"])
    params.heads_at_once = heads_at_once  # fewer than fit L2, so that there are several groups
    record["params"] = bytes(params)
    reports = sm100.emulate_records([record], problem, ptx, **{"checks": "all", **options})
    return problem.out, problem.lse, reports[0]


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

        o, lse = portable.forward(
            one(ops.q, tq),
            one(ops.k, tk),
            one(ops.v, tk, blocks),
            one(ops.v_tok, tk),
            scale,
            window,
            out_dtype,
        )
        outs.append(o[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, -1)
