"""MXTensor: FP8 data with one power-of-two scale byte (E8M0) per block, and how to read it.

quantize.py makes such tensors; MXTensor.from_parts takes those that other libraries made.
"""

import dataclasses
from typing import Optional

import torch

from . import layouts
from .layouts import BLOCK

AXES = ("rowwise", "colwise", "tokenwise")
LAYOUTS = ("plain", "swizzled128x4")
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# FP8 type -> exponent of its largest finite value, which is 1.75 * 2^EMAX
EMAX = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
NAN_SCALE = 255


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MXTensor:
    """An MXFP8 tensor: x ≈ data * scale. Made by quantize_mxfp8 or MXTensor.from_parts.

    Attributes:
      data: (B,S,H,D), (T,H,D) or (rows,cols) float8_e4m3fn or float8_e5m2; the logical shape.
      scale: float8_e8m0fnu. plain: layouts.scale_shape(shape, axis); swizzled128x4: (B,H,bytes),
        (H,bytes) or (bytes,).
      axis: "rowwise", "colwise" or "tokenwise".   layout: "plain" or "swizzled128x4".
      cu_seqlens: (nseq+1,) int32 for colwise packed sequences, else None.
    data and scale must not be written to afterwards: the same values quantised along another axis
    would go stale. Every later use raises RuntimeError.
    Raises: TypeError (dtypes), ValueError (shapes, devices, requires_grad).
    """

    data: torch.Tensor
    scale: torch.Tensor
    axis: str
    layout: str = "plain"
    cu_seqlens: Optional[torch.Tensor] = None
    _versions: Optional[tuple] = dataclasses.field(init=False, default=None)

    def __post_init__(self):
        _check_parts(self.data, self.scale, self.axis, self.layout, self.cu_seqlens)
        object.__setattr__(self, "_versions", self._current_versions())

    @classmethod
    def from_parts(cls, data, scale, axis, layout="plain", shape=None, cu_seqlens=None):
        """Makes an MXTensor of FP8 data and E8M0 scales made elsewhere; copies only to reorder.

        Args:
          data: (B,S,H,D), (T,H,D) or (rows,cols) float8_e4m3fn, float8_e5m2, or uint8 (e4m3 bytes).
          scale: float8_e8m0fnu or uint8.
            layout="plain": layouts.scale_shape(data.shape, axis), as torchao MXTensor and torch
            scaled_mm BlockWise1x32 hold it; for 2-D data also padded to (128, 4), colwise (4, 128).
            layout="swizzled128x4": one buffer per (batch, head), of any shape (B,H,...) or (H,...),
            such as (B,H,pad128(S),pad4(D/32)) of cuDNN and TransformerEngine; for 2-D data a buffer
            of any shape, flattened or padded (torch SWIZZLE_32_4_4).
          shape: logical shape where data is a 2-D matrix that lists it row by row, such as
            (B*S*H, D) or (B*S, H*D) of (B,S,H,D); rowwise or tokenwise. Its scales, swizzled too,
            are those of the matrix.
          cu_seqlens: (nseq+1,) int32 for colwise packed sequences.
        Raises: TypeError, ValueError: "argument: expected ..., got ...".
        """
        check_choice("axis", axis, AXES)
        check_choice("layout", layout, LAYOUTS)
        for name, tensor in (("data", data), ("scale", scale)):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name}: expected a tensor, got {type(tensor).__name__}")
        if data.dtype == torch.uint8:
            data = data.view(torch.float8_e4m3fn)
        if scale.dtype == torch.uint8:
            scale = scale.view(torch.float8_e8m0fnu)
        if layout == "swizzled128x4":
            scale = _normal_swizzled(scale, data.shape, axis)
        elif data.dim() == 2:
            scale = _cut_padding(scale, data.shape, axis)
        mx = cls(data, scale, axis, layout, cu_seqlens)
        return mx if shape is None else _reshape_matrix(mx, tuple(shape))

    @property
    def shape(self):
        return self.data.shape

    @property
    def device(self):
        return self.data.device

    @property
    def dtype(self):
        return self.data.dtype

    def dequantize(self, dtype=torch.float32):
        """Same as flash_attn_mx.dequantize(self, dtype)."""
        return dequantize(self, dtype)

    def to_layout(self, layout, padding=127):
        """The same tensor with its scale bytes in layout "plain" or "swizzled128x4".

        padding: byte 0..255 for what "swizzled128x4" pads to whole tiles.
        Raises: ValueError for swizzled128x4 of tokenwise or packed tensors, which no MMA takes.
        """
        check_choice("layout", layout, LAYOUTS)
        self.check_unchanged()
        if layout == self.layout:
            return self
        if layout == "plain":
            _, rows, cols = layouts.operand_size(self.shape, self.axis)
            matrix = layouts.from_swizzled128x4(self.scale, rows, cols)
            scale = layouts.operand_scale(matrix, self.axis)
        else:
            _check_swizzle(self.axis, self.cu_seqlens)
            matrix = layouts.operand_matrix(self.scale, self.axis)
            scale = layouts.to_swizzled128x4(matrix, padding)
        return MXTensor(self.data, scale, self.axis, layout, self.cu_seqlens)

    def check_unchanged(self):
        """Raises RuntimeError if data or scale was written to in place after construction."""
        now = self._current_versions()
        if None not in (now, self._versions) and now != self._versions:
            raise RuntimeError(
                "MXTensor: data or scale was modified in place after quantisation; "
                "quantise again instead"
            )

    def _current_versions(self):
        if torch.compiler.is_compiling() or self.data.is_inference() or self.scale.is_inference():
            return None  # no version counter to compare
        return self.data._version, self.scale._version

    def __repr__(self):
        packed = "" if self.cu_seqlens is None else f", nseq={self.cu_seqlens.shape[0] - 1}"
        return (
            f"MXTensor(shape={tuple(self.shape)}, dtype={self.dtype}, axis={self.axis!r}, "
            f"scale={tuple(self.scale.shape)} {self.layout}{packed}, device={self.device})"
        )


def dequantize(mx, dtype=torch.float32):
    """Returns data * scale of an MXTensor: mx.shape, contiguous, dtype fp32, bf16, fp16 or fp64.

    Exact in fp32 for every pair of bytes: scale byte 0 is 2^-127, byte 255 gives NaN; products
    beyond the range of fp32 are Inf there. Tokens past the end of the last packed sequence have no
    block and read as 0.
    Raises: TypeError (dtype), RuntimeError (mx was overwritten since it was made).
    """
    if dtype not in (*FLOAT_DTYPES, torch.float64):
        raise TypeError(f"dtype: expected fp32, bf16, fp16 or fp64, got {dtype}")
    mx = mx.to_layout("plain")
    factor = decode_e8m0(mx.scale)
    if mx.cu_seqlens is None:
        factor = expand_blocks(factor, mx.axis, mx.shape)
    else:
        factor, covered = expand_packed_blocks(factor, mx.cu_seqlens, mx.shape[0])
        factor = factor.where(covered, 0.0)
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    return (mx.data.to(exact) * factor).to(dtype).contiguous()


@layouts.opaque_when_compiled(
    "decode_e8m0(Tensor scale) -> Tensor",
    lambda scale: torch.empty_like(scale, dtype=torch.float32),
)
def decode_e8m0(scale):
    """fp32 value of E8M0 scale bytes (float8_e8m0fnu or uint8): 2^(byte-127), NaN for byte 255."""
    byte = scale.view(torch.uint8).to(torch.int32)
    bits = (byte << 23).where(byte != 0, 0x00400000).where(byte != NAN_SCALE, 0x7FC00000)
    return bits.view(torch.float32)


def expand_blocks(scale, axis, shape):
    """Repeats each block's entry over its values: plain scale -> shape (tokenwise: broadcasts)."""
    if axis == "tokenwise":
        return scale
    # not repeat_interleave and narrow: Inductor (CPU, torch 2.13) then misreads ragged sizes
    dim = layouts.block_dim(axis, len(shape))
    block = torch.arange(shape[dim], device=scale.device) // BLOCK
    return scale[(slice(None),) * dim + (block,)]


def expand_packed_blocks(scale, cu_seqlens, total):
    """Entry of each packed token's block (total,H,D); whether a sequence has it (total,1,1)."""
    token = torch.arange(total, device=scale.device)
    if scale.shape[0] == 0:  # no sequence
        return scale.new_zeros((total, *scale.shape[1:])), (token < 0)[:, None, None]
    cu = cu_seqlens.long()
    seq = torch.searchsorted(cu, token, right=True) - 1
    covered = (seq >= 0) & (seq < cu.shape[0] - 1)
    seq = seq.clamp(0, max(cu.shape[0] - 2, 0))
    row = cu[seq] // BLOCK + seq + (token - cu[seq]) // BLOCK
    return scale.index_select(0, row.clamp(0, scale.shape[0] - 1)), covered[:, None, None]


def _normal_swizzled(scale, shape, axis):
    """Views a swizzled buffer of any shape as (lead..., bytes)."""
    if axis == "tokenwise" or len(shape) not in (2, 3, 4):
        return scale  # _check_parts names the fault
    lead, rows, cols = layouts.operand_size(shape, axis)
    need = layouts.swizzled_bytes(rows, cols)
    n = len(lead)
    if tuple(scale.shape[:n]) != lead or scale.shape[n:].numel() != need:
        raise ValueError(
            f"scale: expected swizzled128x4 of {rows}x{cols} blocks, {need} bytes per matrix, "
            f"shape {(*lead, need)}, got {tuple(scale.shape)}"
        )
    return scale.reshape(*lead, need)


def _cut_padding(scale, shape, axis):
    """Drops the padding of a plain 2-D scale matrix, to (128, 4) rowwise or (4, 128) colwise."""
    want = layouts.scale_shape(shape, axis)
    step = {"rowwise": (128, 4), "colwise": (4, 128), "tokenwise": (1, 1)}[axis]
    padded = tuple((n + s - 1) // s * s for n, s in zip(want, step, strict=True))
    return scale[: want[0], : want[1]].contiguous() if tuple(scale.shape) == padded else scale


def _reshape_matrix(mx, shape):
    """Gives a 2-D rowwise or tokenwise tensor the logical shape `shape`."""
    if mx.shape == shape:
        return mx
    if mx.data.dim() != 2 or mx.axis == "colwise" or len(shape) not in (3, 4):
        raise ValueError(
            "shape: expected the shape of data, or 3 or 4 sizes for 2-D rowwise or tokenwise data, "
            f"got {shape} for {mx.axis} data {tuple(mx.shape)}"
        )
    mx = mx.to_layout("plain")
    whole = mx.data.shape[1] == shape[-1]
    if torch.Size(shape).numel() != mx.data.numel() or not (
        whole or (mx.axis == "rowwise" and shape[-1] % BLOCK == 0 and mx.shape[1] % shape[-1] == 0)
    ):
        raise ValueError(
            f"shape: expected {mx.data.numel()} values, whose rows of {mx.shape[1]} end where "
            f"a block ends, got {shape}"
        )
    return MXTensor(
        mx.data.reshape(shape), mx.scale.reshape(layouts.scale_shape(shape, mx.axis)), mx.axis
    )


def check_choice(name, value, allowed):
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_shape(name, shape):
    if len(shape) not in (2, 3, 4):
        raise ValueError(
            f"{name}: expected (B,S,H,D), (T,H,D) or (rows,cols), got shape {tuple(shape)}"
        )


def check_cu_seqlens(cu, x):
    if cu is None:
        return
    if not isinstance(cu, torch.Tensor) or cu.dtype != torch.int32:
        got = cu.dtype if isinstance(cu, torch.Tensor) else type(cu).__name__
        raise TypeError(f"cu_seqlens: expected an int32 tensor, got {got}")
    if cu.dim() != 1 or cu.shape[0] < 1:
        raise ValueError(f"cu_seqlens: expected shape (nseq+1,), got {tuple(cu.shape)}")
    if x.dim() != 3:
        raise ValueError(f"cu_seqlens: expected None unless x is (T,H,D), got x {tuple(x.shape)}")
    if cu.device != x.device:
        raise ValueError(f"cu_seqlens: expected device {x.device}, got {cu.device}")
    if cu.device.type != "cpu" or type(cu) is not torch.Tensor or torch.compiler.is_compiling():
        return  # looking at the values would wait for the device, or there are none
    if cu[0] != 0 or (cu.diff() < 0).any() or cu[-1] > x.shape[0]:
        raise ValueError(
            f"cu_seqlens: expected values rising from 0 to at most T={x.shape[0]}, "
            f"got {cu[0].item()}..{cu[-1].item()}"
        )


def _check_swizzle(axis, cu_seqlens):
    if axis == "tokenwise" or cu_seqlens is not None:
        what = "tokenwise" if axis == "tokenwise" else "packed (cu_seqlens)"
        raise ValueError(f"layout: expected 'plain' for a {what} tensor, got 'swizzled128x4'")


def _check_parts(data, scale, axis, layout, cu_seqlens):
    check_choice("axis", axis, AXES)
    check_choice("layout", layout, LAYOUTS)
    if data.dtype not in EMAX:
        raise TypeError(f"data: expected float8_e4m3fn or float8_e5m2, got {data.dtype}")
    if scale.dtype != torch.float8_e8m0fnu:
        raise TypeError(f"scale: expected float8_e8m0fnu, got {scale.dtype}")
    check_shape("data", data.shape)
    for name, tensor in (("data", data), ("scale", scale)):
        if tensor.requires_grad:
            raise ValueError(f"{name}: expected a tensor without gradient, got requires_grad=True")
    if scale.device != data.device:
        raise ValueError(f"scale: expected device {data.device} of data, got {scale.device}")
    if cu_seqlens is not None and axis != "colwise":
        raise ValueError(f"cu_seqlens: expected None for axis {axis!r}: its blocks are the same")
    check_cu_seqlens(cu_seqlens, data)
    if layout == "plain":
        want = layouts.scale_shape(data.shape, axis, cu_seqlens)
    else:
        _check_swizzle(axis, cu_seqlens)
        lead, rows, cols = layouts.operand_size(data.shape, axis)
        want = (*lead, layouts.swizzled_bytes(rows, cols))
    if tuple(scale.shape) != want:
        raise ValueError(
            f"scale: expected shape {want} ({axis}, {layout}) for data {tuple(data.shape)}, "
            f"got {tuple(scale.shape)}"
        )
