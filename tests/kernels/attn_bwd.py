"""Runs the sm_100 backward kernels' PTX in the emulator on quantised operands, through the host path of the package."""

from pathlib import Path
from typing import NamedTuple, Optional

import torch
from kernels import attn_fwd

from flash_attn_mx import portable, sm100
from flash_attn_mx.quantize import quantize_mxfp8

MAPS = ("q", "q_col", "dout", "dout_col", "k", "k_col", "v_tok")
AXES = {
    "q": "rowwise",
    "q_col": "colwise",
    "dout": "rowwise",
    "dout_col": "colwise",
    "k": "rowwise",
    "k_col": "colwise",
}


class Operands(NamedTuple):
    """Pairs (payload, plain scale): q, dout, k rowwise and colwise, v tokenwise; O and LSE of the forward."""

    q: tuple
    q_col: tuple
    dout: tuple
    dout_col: tuple
    k: tuple
    k_col: tuple
    v_tok: tuple
    out: torch.Tensor
    lse: torch.Tensor
    cu_q: Optional[torch.Tensor] = None
    cu_k: Optional[torch.Tensor] = None


def quantise(q, k, v, dout, cu_q=None, cu_k=None):
    """Operands without O and LSE."""

    def pair(x, axis, cu=None):
        mx = quantize_mxfp8(x, axis, cu_seqlens=cu)
        return mx.data, mx.scale

    both = [
        pair(x, axis, cu)
        for x, cu in ((q, cu_q), (dout, cu_q), (k, cu_k))
        for axis in ("rowwise", "colwise")
    ]
    return Operands(*both, pair(v, "tokenwise", cu_k), None, None, cu_q, cu_k)


def prepare(
    q,
    k,
    v,
    dout,
    *,
    softmax_scale=None,
    window=(-1, -1),
    cu_q=None,
    cu_k=None,
    out_dtype=torch.float32,
):
    """Quantises, and runs the portable forward for O and LSE."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    ops = quantise(q, k, v, dout, cu_q, cu_k)
    v_mx = quantize_mxfp8(v, "colwise", cu_seqlens=cu_k)
    v_col = v_mx.data, v_mx.scale

    def forward(part, col):
        return portable.forward(part.q, part.k, col, part.v_tok, scale, window, out_dtype)

    if cu_q is None:
        out, lse = forward(ops, v_col)
    else:
        parts = [
            forward(part, _dense(v_col, "colwise", cu_k, b))
            for b, part in enumerate(sequences(ops))
        ]
        out, lse = torch.cat([x[0][0] for x in parts]), torch.cat([x[1][0] for x in parts], -1)
    return ops._replace(out=out, lse=lse)


def _dense(pair, axis, cu, b):
    """Sequence b of a packed operand, with a batch dimension."""
    start, stop = cu[b].item(), cu[b + 1].item()
    first = start // 32 + b
    scales = (
        slice(first, first + -(-(stop - start) // 32)) if axis == "colwise" else slice(start, stop)
    )
    return pair[0][start:stop].unsqueeze(0), pair[1][scales].unsqueeze(0)


def sequences(ops: Operands):
    """The sequences of packed operands, each as dense operands of batch 1."""
    for b in range(len(ops.cu_q) - 1):
        tokens = slice(ops.cu_q[b].item(), ops.cu_q[b + 1].item())
        pairs = [
            _dense(
                getattr(ops, name),
                AXES.get(name, "tokenwise"),
                ops.cu_k if name[0] in "kv" else ops.cu_q,
                b,
            )
            for name in MAPS
        ]
        out = ops.out[tokens].unsqueeze(0) if ops.out is not None else None
        lse = ops.lse[:, tokens].unsqueeze(0) if ops.lse is not None else None
        yield Operands(*pairs, out, lse)


def run(
    folder: Path, ops: Operands, *, softmax_scale=None, window=(-1, -1), dtype=torch.float32, deterministic=False,
    needs=(True, True, True), scale_padding=0xFF, max_q=None, max_k=None, **options,
):  # fmt: skip
    """Returns dq, dk, dv (None where not needed) and the main kernel's report."""
    problem = problem_of(
        ops, softmax_scale=softmax_scale, window=window, dtype=dtype, deterministic=deterministic,
        needs=needs, scale_padding=scale_padding, max_q=max_q, max_k=max_k,
    )  # fmt: skip
    instance = sm100.find_backward(ops.q[0].shape[-1], ops.out.dtype, dtype)
    reports = sm100.emulate_backward(problem, instance, folder, **{"checks": "all", **options})
    return *problem.grads, reports[1]


def problem_of(
    ops: Operands, *, softmax_scale=None, window=(-1, -1), dtype=torch.float32, deterministic=False,
    needs=(True, True, True), scale_padding=0xFF, max_q=None, max_k=None,
):  # fmt: skip
    """sm100.prepare_backward of the operands; scale bytes that no element has are scale_padding."""
    head_dim = ops.q[0].shape[-1]

    def pair(name):
        payload, scale = getattr(ops, name)
        cu = ops.cu_k if name[0] == "k" else ops.cu_q
        return payload, attn_fwd._atoms(scale, AXES[name], cu, payload.shape[0], scale_padding)

    tokens = 0 if ops.cu_q is not None else 1
    return sm100.prepare_backward(
        torch.empty(ops.q[0].shape, dtype=dtype), ops.out, ops.lse,  # of dO only its type is used
        *pair("dout"), *pair("dout_col"), *pair("q"), *pair("q_col"), *pair("k"), *pair("k_col"), *ops.v_tok,
        ops.cu_q, ops.cu_k,
        ops.q[0].shape[tokens] if max_q is None else max_q, ops.k[0].shape[tokens] if max_k is None else max_k,
        head_dim**-0.5 if softmax_scale is None else softmax_scale, *window,
        deterministic, list(needs), 64 if head_dim <= 64 else 128,
    )  # fmt: skip


def expected(ops: Operands, *, softmax_scale=None, window=(-1, -1), dtype=torch.float32):
    """The portable path on the same operands: dq, dk, dv."""
    if ops.cu_q is not None:
        parts = [
            expected(part, softmax_scale=softmax_scale, window=window, dtype=dtype)
            for part in sequences(ops)
        ]
        return tuple(torch.cat([x[0] for x in grads]) for grads in zip(*parts, strict=True))
    scale = ops.q[0].shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    dout = torch.empty(ops.q[0].shape, dtype=dtype)  # only its type is used
    return portable.backward(
        dout, ops.out.float(), ops.lse, (ops.dout, ops.dout_col), (ops.q, ops.q_col), (ops.k, ops.k_col), ops.v_tok,
        scale, window, (True, True, True),
    )  # fmt: skip
