"""Runs the sm_100 backward kernels' PTX in the emulator (preprocess, main, postprocess), as the host path will.

The structs mirror those of csrc/params.h field by field; every launch checks their size against the kernel's.
"""

import ctypes
import math
from pathlib import Path
from typing import NamedTuple, Optional

import torch
from kernels import attn_fwd
from kernels.attn_fwd import OUT_NAMES, TILE

from flash_attn_mx import emulator, portable
from flash_attn_mx.quantize import quantize_mxfp8

THREADS = {"bwd_preprocess": 256, "attn_bwd": 512, "bwd_postprocess": 256}
MAPS = ("q", "q_col", "dout", "dout_col", "k", "k_col", "v_tok")
AXES = {
    "q": "rowwise",
    "q_col": "colwise",
    "dout": "rowwise",
    "dout_col": "colwise",
    "k": "rowwise",
    "k_col": "colwise",
}


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


def _atoms(operand, axis, cu, padding):
    """Swizzled atoms (heads and tiles, 512) of an operand's plain scales, and tiles per head."""
    data, scale = operand
    atoms = attn_fwd._atoms(scale, axis, cu, data.shape[0], padding).view(torch.uint8)
    return atoms.reshape(-1, 512).contiguous(), atoms.shape[-1] // 512


def _strides(*tensors, dims=("batch", "token", "head")):
    return [(f"{t}_stride_{d}", ctypes.c_int64) for t in tensors for d in dims]


def _fields(kind, *names):
    return [(name, kind) for name in names]


class PreprocessParams(ctypes.Structure):
    _fields_ = [
        *_fields(
            ctypes.c_uint64,
            "dout",
            "dout_scale",
            "out",
            "lse",
            "bias",
            "minus_delta",
            "dq_acc",
            "dq_turn",
            "cu_seqlens_q",
        ),
        *_strides("dout", "out"),
        *_strides("lse", dims=("batch", "head")),
        *_fields(ctypes.c_int32, "batch", "heads", "head_dim", "seqlen_q", "row_tiles"),
    ]


class Params(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint8 * 128) for name in MAPS),
        *_fields(
            ctypes.c_uint64,
            "q_scale",
            "q_col_scale",
            "dout_scale",
            "dout_col_scale",
            "k_scale",
            "k_col_scale",
        ),
        *_fields(
            ctypes.c_uint64, "v_tok_scale", "bias", "minus_delta", "dq_acc", "dq_turn", "dk", "dv"
        ),
        *_fields(ctypes.c_uint64, "cu_seqlens_q", "cu_seqlens_k"),
        *_strides("v_tok_scale", "dk", "dv"),
        *_fields(
            ctypes.c_int32, "batch", "heads_k", "heads_per_kv", "head_dim", "seqlen_q", "seqlen_k"
        ),
        *_fields(ctypes.c_int32, "row_tiles", "k_scale_tiles", "window_left", "window_right"),
        *_fields(ctypes.c_float, "scale_log2", "softmax_scale"),
        *_fields(ctypes.c_int32, "grads_aligned"),
        ("padding", ctypes.c_int32 * 3),  # the struct is a multiple of its alignment, 64
    ]


class PostprocessParams(ctypes.Structure):
    _fields_ = [
        *_fields(ctypes.c_uint64, "dq_acc", "dq", "cu_seqlens_q"),
        *_strides("dq"),
        *_fields(ctypes.c_int32, "batch", "heads", "head_dim", "seqlen_q", "row_tiles"),
        *_fields(ctypes.c_float, "softmax_scale"),
    ]


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
    needs=(True, True, True), scale_padding=0xFF, max_q=None, max_k=None, arch="100f", **options,
):  # fmt: skip
    """Returns dq, dk, dv (None where not needed) and the main kernel's report."""
    packed = ops.cu_q is not None
    dim4 = (lambda x: x.unsqueeze(0)) if packed else (lambda x: x)
    payloads = {name: _padded(dim4(getattr(ops, name)[0])) for name in MAPS}
    batch, seqlen_q, heads, head_dim = dim4(ops.q[0]).shape
    seqlen_k, heads_k = dim4(ops.k[0]).shape[1:3]
    box = 64 if head_dim <= 64 else 128
    maps = {name: _map(x, head_dim, box) for name, x in payloads.items()}
    atoms, tiles = {}, {}
    for name, axis in AXES.items():
        cu = ops.cu_k if name[0] == "k" else ops.cu_q
        atoms[name], tiles[name] = _atoms(getattr(ops, name), axis, cu, scale_padding)
    row_tiles, key_tiles = tiles["q"], tiles["k"]
    assert set(tiles.values()) <= {row_tiles, key_tiles}
    longest_q, longest_k = (
        n if m is None else m for n, m in ((seqlen_q, max_q), (seqlen_k, max_k))
    )
    count = len(ops.cu_q) - 1 if packed else batch
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    out, lse = dim4(ops.out).contiguous(), dim4(ops.lse).contiguous()
    v_tok_scale = dim4(ops.v_tok[1]).view(torch.uint8).contiguous()

    all_rows = (1 if packed else batch) * heads * row_tiles * TILE
    bias, delta = torch.full((2, all_rows), 77.0).unbind(0)
    dq_acc = torch.full((all_rows * box,), 77.0)
    dq_turn = torch.full((all_rows // TILE,), 77, dtype=torch.int32)
    dq = torch.full((dim4(ops.q[0])).shape, 77.0, dtype=dtype)
    dk, dv = (torch.full(dim4(ops.k[0]).shape, 77.0, dtype=dtype) for _ in range(2))
    cu = (
        {"cu_seqlens_q": ops.cu_q.data_ptr(), "cu_seqlens_k": ops.cu_k.data_ptr()} if packed else {}
    )
    cu_q = {"cu_seqlens_q": ops.cu_q.data_ptr()} if packed else {}
    cus = [ops.cu_q, ops.cu_k] if packed else []

    def address(x, wanted=True):
        return x.data_ptr() if wanted else 0

    def strides(name, x, dims=("batch", "token", "head")):
        return {f"{name}_stride_{d}": x.stride(i) for i, d in enumerate(dims)}

    def launch(name, params, grid, smem, buffers, out_dtype, **more):
        kernel_name = f"{name}_d{box}_{OUT_NAMES[out_dtype]}"
        kernel = emulator.Module.from_ptx(folder / f"{kernel_name}.sm_{arch}.ptx").kernels[
            kernel_name
        ]
        size = ctypes.sizeof(params)
        assert kernel.param_bytes == size, (kernel_name, kernel.param_bytes, size)
        return kernel.launch(
            grid=grid,
            block=THREADS[name],
            args=bytes(params),
            smem_bytes=smem,
            buffers=[*buffers, *cus],
            **more,
        )

    q_tiles, k_tiles = -(-longest_q // TILE), -(-longest_k // TILE)
    sizes = dict(head_dim=head_dim, seqlen_q=longest_q, row_tiles=row_tiles, batch=count)
    dout = payloads["dout"]
    launch(
        "bwd_preprocess",
        PreprocessParams(
            dout=address(dout), dout_scale=address(atoms["dout"]), out=address(out), lse=address(lse), bias=address(bias),
            minus_delta=address(delta), dq_acc=address(dq_acc, needs[0]), dq_turn=address(dq_turn, deterministic),
            **strides("dout", dout), **strides("out", out), **strides("lse", lse, ("batch", "head")), heads=heads, **sizes, **cu_q,
        ),
        (q_tiles, heads, count), 0, [dout, atoms["dout"], out, lse, bias, delta, dq_acc, dq_turn], out.dtype,
    )  # fmt: skip
    p = Params(
        **{f"{name}_scale": address(x) for name, x in atoms.items()}, v_tok_scale=address(v_tok_scale),
        bias=address(bias), minus_delta=address(delta), dq_acc=address(dq_acc, needs[0]), dq_turn=address(dq_turn, deterministic),
        dk=address(dk, needs[1]), dv=address(dv, needs[2]), **cu,
        **strides("v_tok_scale", v_tok_scale), **strides("dk", dk), **strides("dv", dv),
        heads_k=heads_k, heads_per_kv=heads // heads_k, seqlen_k=longest_k, k_scale_tiles=key_tiles,
        window_left=window[0], window_right=window[1], scale_log2=scale * math.log2(math.e), softmax_scale=scale,
        grads_aligned=head_dim * dk.element_size() % 16 == 0, **sizes,
    )  # fmt: skip
    for name, m in maps.items():
        setattr(p, name, (ctypes.c_uint8 * 128).from_buffer_copy(m.encoded))
    buffers = [
        *payloads.values(),
        *atoms.values(),
        v_tok_scale,
        bias,
        delta,
        dq_acc,
        dq_turn,
        dk,
        dv,
    ]
    report = launch(
        "attn_bwd", p, (k_tiles * heads_k * count,), _smem_bytes(box), buffers, dtype, **options
    )
    if needs[0]:
        launch(
            "bwd_postprocess",
            PostprocessParams(
                dq_acc=address(dq_acc), dq=address(dq), **strides("dq", dq), softmax_scale=scale, heads=heads, **sizes, **cu_q
            ),
            (q_tiles, heads, count), 0, [dq_acc, dq], dtype,
        )  # fmt: skip
    grads = (x[0] if packed else x for x in (dq, dk, dv))
    return *(x if need else None for x, need in zip(grads, needs, strict=True)), report


def _smem_bytes(box):
    """Config::kSmemBytes of attn_bwd/config.cuh."""
    ring = 8 if box == 128 else 12
    payloads = (3 + ring) * TILE * box + TILE * TILE
    scales = (2 + ring + 4) * 512
    barriers = 8 * (1 + 2 * ring + 4 + 9)
    stats, dq_stages = 2 * 2 * TILE * 4, (1 if box == 128 else 2) * TILE * 32 * 4
    return payloads + scales + stats + dq_stages + barriers + 16 + 1024


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
