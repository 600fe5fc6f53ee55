"""MXFP8 tensors: FP8 data with one power-of-two scale byte (E8M0) per block. Rules: docs/numerics.md section 1.

quantize_mxfp8 and dequantize are the public entries. quantize_pytorch is the same arithmetic in PyTorch operators, for
any device; the CPU operator in csrc/ops/quantize.cpp gives the same bytes (tests/api/test_quantize.py).
"""

import dataclasses

import torch

from flash_attn_mx import layouts

BLOCK = 32
AXES = ("rowwise", "colwise", "tokenwise")
ROUNDINGS = ("rceil", "floor")
LAYOUTS = ("plain", "swizzled128x4")
INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# exponent of the largest finite value, which is 1.75 * 2^EMAX
EMAX = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
_NAN_SCALE = 255
_NAN_PAYLOAD = 0x7F


def quantize_mxfp8(
    x, axis="rowwise", rounding="rceil", dtype=torch.float8_e4m3fn, layout="plain", cu_seqlens=None
):
    """Quantises x to MXFP8: one power-of-two scale per block of 32 values along an axis.

    Args:
      x: (B,S,H,D), (T,H,D) or (rows,cols) fp32, bf16 or fp16; any strides, any size including 0.
      axis: "rowwise" (32 values along D), "colwise" (32 tokens) or "tokenwise" (all D values of a token and head).
      rounding: "rceil" (smallest scale that keeps the block maximum in range) or "floor" (OCP MX 1.0: may saturate).
      dtype: torch.float8_e4m3fn (largest value 448) or torch.float8_e5m2 (57344).
      layout: of the scale bytes, "plain" or "swizzled128x4" (layouts.py).
      cu_seqlens: (nseq+1,) int32, starts of packed sequences, x then (T,H,D): colwise blocks end with their sequence.
    Returns: MXTensor. A block that is all zero has scale byte 127; one that holds NaN or Inf has 255 and reads as NaN.
    Raises: TypeError (dtypes), ValueError (shape, axis, rounding, layout, cu_seqlens).
    Source: docs/numerics.md section 1.
    """
    _check_input(x, axis, rounding, dtype, cu_seqlens)
    _check_choice("layout", layout, LAYOUTS)
    data, scale = _quantize_op(x, axis, rounding, dtype, cu_seqlens)
    packed = cu_seqlens if axis == "colwise" else None
    return MXTensor(data, scale, axis, cu_seqlens=packed).to_layout(layout)


def dequantize(mx, dtype=torch.float32):
    """Returns data * scale of an MXTensor in dtype (fp32, bf16, fp16 or fp64), shape mx.shape, contiguous.

    Exact in fp32 for every pair of bytes: scale byte 0 is 2^-127, byte 255 gives NaN. Products above fp32 are Inf.
    Tokens past the end of the last packed sequence have no block and read as 0.
    Raises: TypeError (dtype), RuntimeError (mx was overwritten since it was made).
    """
    if dtype not in (*INPUT_DTYPES, torch.float64):
        raise TypeError(f"dtype: expected fp32, bf16, fp16 or fp64, got {dtype}")
    mx = mx.to_layout("plain")
    factor = decode_e8m0(mx.scale)
    if mx.cu_seqlens is None:
        factor = _expand_blocks(factor, mx.axis, mx.shape)
    else:
        row, covered = _packed_rows(mx.cu_seqlens, mx.shape[0], mx.scale.shape[0])
        factor = factor.index_select(0, row).where(covered[:, None, None], 0.0)
    return (mx.data.to(torch.float32) * factor).to(dtype).contiguous()


def decode_e8m0(scale):
    """fp32 value of E8M0 scale bytes (float8_e8m0fnu or uint8): 2^(byte-127), NaN for byte 255."""
    byte = scale.view(torch.uint8).to(torch.int32)
    bits = (byte << 23).where(byte != 0, 0x00400000).where(byte != _NAN_SCALE, 0x7FC00000)
    return bits.view(torch.float32)


def encode_scale(amax, rounding="rceil", dtype=torch.float8_e4m3fn):
    """Scale byte (uint8) of blocks whose largest magnitude is amax (fp32, >= 0): 127 for 0, 255 for NaN and Inf.

    rceil: smallest power of two >= amax/448 (amax/57344 for e5m2). floor: 2^(exponent of amax - 8) (- 15).
    """
    bits = amax.view(torch.int32)
    exponent = bits >> 23
    byte = exponent - EMAX[dtype]
    if rounding == "rceil":
        byte = byte + ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)
    byte = byte.clamp(0, 254).where(bits != 0, 127).where(exponent != 255, _NAN_SCALE)
    return byte.to(torch.uint8)


def quantize_pytorch(x, axis, rounding="rceil", dtype=torch.float8_e4m3fn, cu_seqlens=None):
    """The quantize operator in PyTorch: x as for quantize_mxfp8 -> (data, plain scale), no host synchronisation."""
    with torch.no_grad():
        x = x.to(torch.float32)
        if axis == "colwise" and cu_seqlens is not None:
            scale = encode_scale(_packed_amax(x, cu_seqlens), rounding, dtype)
            row, covered = _packed_rows(cu_seqlens, x.shape[0], scale.shape[0])
            byte = scale.index_select(0, row)
            x = x.where(covered[:, None, None], 0.0)
        else:
            scale = encode_scale(_block_amax(x, axis), rounding, dtype)
            byte = _expand_blocks(scale, axis, x.shape)
        # 2^(127 - byte); byte <= 247 here, 255 is replaced below
        factor = ((254 - byte.to(torch.int32)) << 23).view(torch.float32)
        limit = 1.75 * 2.0 ** EMAX[dtype]
        data = (x * factor).clamp(-limit, limit).to(dtype).view(torch.uint8)
        data = data.where(byte != _NAN_SCALE, 0 if axis == "tokenwise" else _NAN_PAYLOAD)
        return data.contiguous().view(dtype), scale.contiguous().view(torch.float8_e8m0fnu)


def packed_scale_rows(total_tokens, num_seqs):
    """Rows of the colwise scale tensor of packed sequences; the blocks of sequence b start at cu[b]//32 + b."""
    return total_tokens // BLOCK + num_seqs


def scale_shape(shape, axis, cu_seqlens=None):
    """Shape of the plain scale tensor of a tensor of logical shape (B,S,H,D), (T,H,D) or (rows,cols)."""
    if axis == "rowwise":
        return (*shape[:-1], _blocks(shape[-1]))
    if axis == "tokenwise":
        return (*shape[:-1], 1)
    if cu_seqlens is not None:
        return (packed_scale_rows(shape[0], cu_seqlens.shape[0] - 1), *shape[1:])
    dim = _token_dim(len(shape))
    return (*shape[:dim], _blocks(shape[dim]), *shape[dim + 1 :])


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class MXTensor:
    """An MXFP8 tensor: x ≈ data * scale. Made by quantize_mxfp8 or MXTensor.from_parts.

    Attributes:
      data: (B,S,H,D), (T,H,D) or (rows,cols) float8_e4m3fn or float8_e5m2; its shape is the logical shape.
      scale: float8_e8m0fnu; plain: scale_shape(shape, axis); swizzled128x4: (B,H,bytes), (H,bytes) or (bytes,).
      axis: "rowwise", "colwise" or "tokenwise".   layout: "plain" or "swizzled128x4".
      cu_seqlens: (nseq+1,) int32 for colwise packed sequences, else None.
    data and scale must not be written to afterwards: another axis of the same values would go stale. Use notices and
    raises RuntimeError.
    Raises: TypeError (dtypes), ValueError (shapes, devices, requires_grad).
    """

    data: torch.Tensor
    scale: torch.Tensor
    axis: str
    layout: str = "plain"
    cu_seqlens: torch.Tensor | None = None
    _versions: tuple | None = dataclasses.field(init=False, default=None)

    def __post_init__(self):
        _check_parts(self.data, self.scale, self.axis, self.layout, self.cu_seqlens)
        object.__setattr__(self, "_versions", self._current_versions())

    @classmethod
    def from_parts(cls, data, scale, axis, layout="plain", shape=None, cu_seqlens=None):
        """Makes an MXTensor of FP8 data and E8M0 scales quantised elsewhere; nothing is copied where a view will do.

        Args:
          data: (B,S,H,D), (T,H,D) or (rows,cols) float8_e4m3fn, float8_e5m2, or uint8 holding e4m3 bytes.
          scale: float8_e8m0fnu or uint8. layout="plain": scale_shape(data.shape, axis) as torchao and
            torch scaled_mm BlockWise1x32 hold it; for 2-D data also padded to multiples of (128, 4).
            layout="swizzled128x4": one buffer per (batch, head), in any shape (B,H,...), (H,...) or, for 2-D data,
            flattened or padded 2-D (SWIZZLE_32_4_4); the (B,H,pad128(S),pad4(D/32)) of cuDNN/TransformerEngine fits.
          shape: logical shape if data is a flattened 2-D rowwise or tokenwise matrix, e.g. (B*S*H, D) of a (B,S,H,D)
            tensor. A swizzled buffer of such a matrix is reordered.
          cu_seqlens: (nseq+1,) int32 for colwise packed sequences.
        Raises: TypeError, ValueError: "argument: expected ..., got ...".
        """
        _check_choice("axis", axis, AXES)
        _check_choice("layout", layout, LAYOUTS)
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
        """The same tensor with its scale bytes in layout "plain" or "swizzled128x4" (padding bytes: padding).

        Raises ValueError for swizzled128x4 of tokenwise or packed tensors: the MMA takes neither (layouts.py).
        """
        _check_choice("layout", layout, LAYOUTS)
        self.check_unchanged()
        if layout == self.layout:
            return self
        if layout == "plain":
            _, rows, cols = layouts.operand_size(self.shape, self.axis)
            matrix = layouts.from_swizzled128x4(self.scale, rows, cols)
            scale = layouts.operand_scale(matrix, self.axis).contiguous()
        else:
            _check_swizzle(self.axis, self.cu_seqlens)
            matrix = layouts.operand_matrix(self.scale, self.axis)
            scale = layouts.to_swizzled128x4(matrix, padding)
        return MXTensor(self.data, scale, self.axis, layout, self.cu_seqlens)

    def check_unchanged(self):
        """Raises RuntimeError if data or scale was written to in place since this tensor was made."""
        if self._versions is not None and self._versions != self._current_versions():
            raise RuntimeError(
                "MXTensor: data or scale was modified in place after quantisation; quantise again instead"
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


def _quantize_op(x, axis, rounding, dtype, cu_seqlens):
    if hasattr(torch.ops.flash_attn_mx, "quantize"):
        return torch.ops.flash_attn_mx.quantize(x, axis, rounding, dtype, cu_seqlens)
    return quantize_pytorch(x, axis, rounding, dtype, cu_seqlens)


def _blocks(n):
    return (n + BLOCK - 1) // BLOCK


def _token_dim(ndim):
    return 1 if ndim == 4 else 0


def _block_dim(axis, ndim):
    return _token_dim(ndim) if axis == "colwise" else ndim - 1


def _max_bits(x, dim):
    """Largest magnitude of fp32 x along dim. As integers, because NaN then counts as the largest on any device."""
    return (x.view(torch.int32) & 0x7FFFFFFF).amax(dim).view(torch.float32)


def _block_amax(x, axis):
    dim = _block_dim(axis, x.dim())
    size = x.shape[dim]
    block = max(size, 1) if axis == "tokenwise" else BLOCK
    count = (size + block - 1) // block if axis != "tokenwise" else 1
    pad = [0, 0] * (x.dim() - 1 - dim) + [0, count * block - size]
    x = torch.nn.functional.pad(x, pad)
    return _max_bits(x.unflatten(dim, (count, block)), dim + 1)


def _expand_blocks(scale, axis, shape):
    """Repeats each block's entry over the block: plain scale-shaped -> shape (tokenwise: broadcasts)."""
    if axis == "tokenwise":
        return scale
    dim = _block_dim(axis, len(shape))
    return scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, shape[dim])


def _packed_amax(x, cu_seqlens):
    """Magnitude of each colwise block of packed sequences; 0 (hence byte 127) for rows that no block uses."""
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


def _packed_rows(cu_seqlens, total, rows):
    """(scale row of each of total tokens, whether a sequence covers it)."""
    token = torch.arange(total, device=cu_seqlens.device)
    if cu_seqlens.shape[0] < 2:
        return torch.zeros_like(token), torch.zeros_like(token, dtype=torch.bool)
    cu = cu_seqlens.long()
    seq = torch.searchsorted(cu, token, right=True) - 1
    covered = (seq >= 0) & (seq < cu.shape[0] - 1)
    seq = seq.clamp(0, cu.shape[0] - 2)
    row = cu[seq] // BLOCK + seq + (token - cu[seq]) // BLOCK
    return row.clamp(0, max(rows - 1, 0)), covered


def _normal_swizzled(scale, shape, axis):
    """Views a swizzled buffer of any shape as (lead..., bytes)."""
    if axis == "tokenwise" or len(shape) not in (2, 3, 4):
        return scale  # _check_parts names the fault
    lead, rows, cols = layouts.operand_size(shape, axis)
    need = layouts.swizzled_bytes(rows, cols)
    n = len(lead)
    if tuple(scale.shape[:n]) != lead or scale.shape[n:].numel() != need:
        raise ValueError(
            f"scale: expected swizzled128x4 of {rows}x{cols} blocks, shape {(*lead, need)} ({need} bytes per matrix), "
            f"got shape {tuple(scale.shape)}"
        )
    return scale.reshape(*lead, need)


def _cut_padding(scale, shape, axis):
    """Drops the padding of a plain 2-D scale matrix padded to (128, 4) rowwise or (4, 128) colwise."""
    want = scale_shape(shape, axis)
    step = {"rowwise": (128, 4), "colwise": (4, 128), "tokenwise": (1, 1)}[axis]
    padded = tuple((n + s - 1) // s * s for n, s in zip(want, step, strict=True))
    return scale[: want[0], : want[1]].contiguous() if tuple(scale.shape) == padded else scale


def _reshape_matrix(mx, shape):
    """Gives a 2-D rowwise or tokenwise tensor the logical shape `shape`."""
    if mx.shape == shape:
        return mx
    if mx.data.dim() != 2 or mx.axis == "colwise" or len(shape) not in (3, 4):
        raise ValueError(
            f"shape: expected the shape of data, or 3 or 4 sizes for 2-D {mx.axis} data (not colwise), "
            f"got {shape} for data {tuple(mx.shape)}"
        )
    mx = mx.to_layout("plain")
    whole = mx.data.shape[1] == shape[-1]
    if torch.Size(shape).numel() != mx.data.numel() or not (
        whole or (mx.axis == "rowwise" and shape[-1] % BLOCK == 0 and mx.shape[1] % shape[-1] == 0)
    ):
        raise ValueError(
            f"shape: expected rows of {mx.shape[1]} values to split into whole blocks, {mx.data.numel()} values in "
            f"all, got {shape}"
        )
    return MXTensor(
        mx.data.reshape(shape), mx.scale.reshape(scale_shape(shape, mx.axis)), mx.axis
    )


def _check_choice(name, value, allowed):
    if value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}")


def _check_shape(name, shape):
    if len(shape) not in (2, 3, 4):
        raise ValueError(
            f"{name}: expected (B,S,H,D), (T,H,D) or (rows,cols), got {len(shape)} dimensions {tuple(shape)}"
        )


def _check_input(x, axis, rounding, dtype, cu_seqlens):
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: expected a tensor, got {type(x).__name__}")
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"x: expected fp32, bf16 or fp16, got {x.dtype}")
    if dtype not in EMAX:
        raise TypeError(f"dtype: expected float8_e4m3fn or float8_e5m2, got {dtype}")
    _check_choice("axis", axis, AXES)
    _check_choice("rounding", rounding, ROUNDINGS)
    _check_shape("x", x.shape)
    _check_cu_seqlens(cu_seqlens, x)


def _check_cu_seqlens(cu, x):
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
    if cu.device.type != "cpu" or torch.compiler.is_compiling():
        return  # looking at the values would wait for the device
    if cu[0] != 0 or (cu.diff() < 0).any() or cu[-1] > x.shape[0]:
        raise ValueError(
            f"cu_seqlens: expected values rising from 0 to at most T={x.shape[0]}, got "
            f"{cu[0].item()}..{cu[-1].item()}"
        )


def _check_swizzle(axis, cu_seqlens):
    if axis == "tokenwise" or cu_seqlens is not None:
        what = "tokenwise" if axis == "tokenwise" else "packed (cu_seqlens)"
        raise ValueError(f"layout: expected 'plain' for a {what} tensor, got 'swizzled128x4'")


def _check_parts(data, scale, axis, layout, cu_seqlens):
    _check_choice("axis", axis, AXES)
    _check_choice("layout", layout, LAYOUTS)
    if data.dtype not in EMAX:
        raise TypeError(f"data: expected float8_e4m3fn or float8_e5m2, got {data.dtype}")
    if scale.dtype != torch.float8_e8m0fnu:
        raise TypeError(f"scale: expected float8_e8m0fnu, got {scale.dtype}")
    _check_shape("data", data.shape)
    for name, tensor in (("data", data), ("scale", scale)):
        if tensor.requires_grad:
            raise ValueError(f"{name}: expected a tensor without gradient, got requires_grad=True")
    if scale.device != data.device:
        raise ValueError(f"scale: expected device {data.device} of data, got {scale.device}")
    if cu_seqlens is not None and axis != "colwise":
        raise ValueError(f"cu_seqlens: expected None for axis {axis!r}: its blocks are the same")
    _check_cu_seqlens(cu_seqlens, data)
    if layout == "plain":
        want = scale_shape(data.shape, axis, cu_seqlens)
    else:
        _check_swizzle(axis, cu_seqlens)
        lead, rows, cols = layouts.operand_size(data.shape, axis)
        want = (*lead, layouts.swizzled_bytes(rows, cols))
    if tuple(scale.shape) != want:
        raise ValueError(
            f"scale: expected shape {want} ({axis}, {layout}) for data {tuple(data.shape)}, "
            f"got {tuple(scale.shape)}"
        )
