"""Making MXFP8 tensors: FP8 data with one power-of-two scale byte (E8M0) per block.

The rules are docs/numerics.md section 1. quantize_pytorch is the quantize operator in PyTorch, for
any device; the CPU operator in csrc/ops/quantize.cpp gives the same bytes
(tests/api/test_quantize.py).
"""

from typing import Optional

import torch

from . import layouts
from .layouts import BLOCK, packed_scale_rows, scale_shape
from .mx_tensor import (
    AXES,
    EMAX,
    FLOAT_DTYPES,
    LAYOUTS,
    NAN_SCALE,
    MXTensor,
    check_choice,
    check_cu_seqlens,
    check_shape,
    decode_e8m0,
    dequantize,
    expand_blocks,
    expand_packed_blocks,
)

__all__ = [
    "MXTensor",
    "decode_e8m0",
    "dequantize",
    "encode_scale",
    "packed_scale_rows",
    "quantize_mxfp8",
    "quantize_pytorch",
    "scale_shape",
]

ROUNDINGS = ("rceil", "floor")
_NAN_PAYLOAD = 0x7F


def quantize_mxfp8(
    x: torch.Tensor,
    axis: str = "rowwise",
    rounding: str = "rceil",
    dtype: torch.dtype = torch.float8_e4m3fn,
    layout: str = "plain",
    cu_seqlens: Optional[torch.Tensor] = None,
) -> MXTensor:
    """Quantises x to MXFP8: one power-of-two scale per block of 32 values along an axis.

    Args:
      x: (B,S,H,D), (T,H,D) or (rows,cols) fp32, bf16 or fp16; any strides, any size including 0.
      axis: what shares a scale: "rowwise" 32 values along D, "colwise" 32 tokens, "tokenwise" all
        D values of one token and head.
      rounding: "rceil" (smallest scale that keeps the block maximum in range) or "floor" (OCP MX
        1.0: the maximum may saturate).
      dtype: torch.float8_e4m3fn (largest value 448) or torch.float8_e5m2 (57344).
      layout: of the scale bytes, "plain" or "swizzled128x4" (layouts.py).
      cu_seqlens: (nseq+1,) int32, starts of packed sequences from 0 to at most T; x is then (T,H,D)
        and a colwise block ends with its sequence. Tokens after the last sequence become zeros.
    Returns: MXTensor. A block that is all zero has scale byte 127; one that holds NaN or Inf has
      255 and reads as NaN.
    Raises: TypeError (dtypes), ValueError (shape, axis, rounding, layout, cu_seqlens; x needs a
      gradient, which rounding does not have).
    Source: docs/numerics.md section 1.
    """
    _check_input(x, axis, rounding, dtype, cu_seqlens)
    check_choice("layout", layout, LAYOUTS)
    data, scale = torch.ops.flash_attn_mx.quantize(x, axis, rounding, dtype, cu_seqlens)
    packed = cu_seqlens if axis == "colwise" else None
    return MXTensor(data, scale, axis, cu_seqlens=packed).to_layout(layout)


def encode_scale(amax, rounding="rceil", dtype=torch.float8_e4m3fn):
    """Scale byte (uint8) of blocks whose largest magnitude is amax (fp32, >= 0).

    rceil: smallest power of two >= amax/448 (amax/57344 for e5m2). floor: 2^(exponent of amax - 8),
    or - 15. 127 for amax 0, 255 for NaN and Inf.
    """
    bits = amax.view(torch.int32)
    exponent = bits >> 23
    byte = exponent - EMAX[dtype]
    if rounding == "rceil":
        byte = byte + ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)
    byte = byte.clamp(0, 254).where(bits != 0, 127).where(exponent != 255, NAN_SCALE)
    return byte.to(torch.uint8)


def quantize_pytorch(x, axis, rounding="rceil", dtype=torch.float8_e4m3fn, cu_seqlens=None):
    """The quantize operator: checked arguments of quantize_mxfp8 -> (data, plain scale).

    Both contiguous. PyTorch operators on the device of x; never waits for it.
    """
    with torch.no_grad():
        x = x.to(torch.float32)
        if axis == "colwise" and cu_seqlens is not None:
            scale = encode_scale(_packed_amax(x, cu_seqlens), rounding, dtype)
            byte, covered = expand_packed_blocks(scale, cu_seqlens, x.shape[0])
            x = x.where(covered, 0.0)
            byte = byte.where(covered, 127)
        else:
            scale = encode_scale(_block_amax(x, axis), rounding, dtype)
            byte = expand_blocks(scale, axis, x.shape)
        # 2^(127 - byte); byte <= 247 here, 255 is replaced below
        factor = ((254 - byte.to(torch.int32)) << 23).view(torch.float32)
        limit = 1.75 * 2.0 ** EMAX[dtype]
        data = (x * factor).clamp(-limit, limit).to(dtype).view(torch.uint8)
        data = data.where(byte != NAN_SCALE, 0 if axis == "tokenwise" else _NAN_PAYLOAD)
        return _dense(data).view(dtype), _dense(scale).view(torch.float8_e8m0fnu)


def _dense(t):
    """t with the strides of a new tensor, those of sizes 0 and 1 too, as fake tensors promise."""
    return t.flatten().view(t.shape) if t.numel() else t.new_empty(t.shape)


def _max_bits(x, dim):
    """Largest magnitude of fp32 x along dim. As integers: NaN is then the largest on any device."""
    return (x.view(torch.int32) & 0x7FFFFFFF).amax(dim).view(torch.float32)


def _block_amax(x, axis):
    dim = layouts.block_dim(axis, x.dim())
    size = x.shape[dim]
    block = max(size, 1) if axis == "tokenwise" else BLOCK
    count = 1 if axis == "tokenwise" else layouts.blocks(size)
    pad = [0, 0] * (x.dim() - 1 - dim) + [0, count * block - size]
    x = torch.nn.functional.pad(x, pad)
    return _max_bits(x.unflatten(dim, (count, block)), dim + 1)


def _packed_amax(x, cu_seqlens):
    """Largest magnitude of each block of packed sequences; 0 for rows that no block uses."""
    total, num_seqs = x.shape[0], cu_seqlens.shape[0] - 1
    rows = packed_scale_rows(total, num_seqs)
    if x.numel() == 0 or num_seqs == 0:
        return x.new_zeros((rows, *x.shape[1:]))
    start, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    first_row = start // BLOCK + torch.arange(num_seqs, device=x.device)
    row = torch.arange(rows, device=x.device)
    seq = (torch.searchsorted(first_row, row, right=True) - 1).clamp_min(0)
    block_start = start[seq] + BLOCK * (row - first_row[seq])
    token = block_start[:, None] + torch.arange(BLOCK, device=x.device)
    inside = (token < end[seq][:, None])[:, :, None, None]
    values = x.index_select(0, token.clamp(0, total - 1).flatten()).unflatten(0, (rows, BLOCK))
    return _max_bits(values.where(inside, 0.0), 1)


def _check_input(x, axis, rounding, dtype, cu_seqlens):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
    if x.dtype not in FLOAT_DTYPES:
        raise TypeError(f"x: expected fp32, bf16 or fp16, got {x.dtype}")
    if dtype not in EMAX:
        raise TypeError(f"dtype: expected float8_e4m3fn or float8_e5m2, got {dtype}")
    check_choice("axis", axis, AXES)
    check_choice("rounding", rounding, ROUNDINGS)
    check_shape("x", x.shape)
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "x: expected a tensor without gradient, because rounding has none (x.detach(), or "
            "flash_attn_func, which quantises inside), got requires_grad=True"
        )
    check_cu_seqlens(cu_seqlens, x)
