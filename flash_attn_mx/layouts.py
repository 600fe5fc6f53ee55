"""Orders of MX scale bytes in memory: `plain` (one byte per block, row-major) and `swizzled128x4`.

`swizzled128x4` is the order that the block-scaled tensor-core MMA loads (cuBLAS, cuDNN F8_128x4,
torch SWIZZLE_32_4_4, torchao to_blocked, CUTLASS Sm1xxBlockScaledConfig): rows are padded to 128,
columns to 4, and byte (r, c) lies at

    ((r/128)*(W/4) + c/4)*512 + (r%32)*16 + ((r/32)%4)*4 + c%4        with W = columns padded to 4

A row is an index that the MMA does not contract, a column is one block of 32 contracted values.
For attention operands every (batch, head) has its own buffer, padded on its own, so that a 128-row
tile never mixes two heads:

    axis     | plain scale of x (B,S,H,D) | rows | columns     | swizzled scale
    rowwise  | (B, S, H, ceil(D/32))      | S    | ceil(D/32)  | (B, H, bytes)
    colwise  | (B, ceil(S/32), H, D)      | D    | ceil(S/32)  | (B, H, bytes)

(T,H,D) tensors give (H, bytes), (rows, cols) tensors give (bytes,). Bytes of the padding may hold
anything: a kernel must not use them. Here they are 127 (a factor of one) unless told otherwise;
byte 0 would be 2^-127, not zero.
"""

import functools

import torch

BLOCK = 32
TILE_ROWS = 128
TILE_COLS = 4
TILE_BYTES = TILE_ROWS * TILE_COLS

_library = torch.library.Library("flash_attn_mx", "FRAGMENT")


def opaque_when_compiled(schema, fake):
    """Decorator: torch.compile sees the function as one operator; eager code calls it directly.

    Inductor's C++ backend has no float8_e8m0fnu (torch 2.13: KeyError), so code that computes on
    scale bytes must stay out of its kernels.
    """

    def decorate(function):
        name = schema.split("(")[0]
        _library.define(schema)
        _library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"flash_attn_mx::{name}", fake, lib=_library)
        operator = getattr(torch.ops.flash_attn_mx, name)

        @functools.wraps(function)
        def call(*args):
            return operator(*args) if torch.compiler.is_compiling() else function(*args)

        return call

    return decorate


def swizzled_bytes(rows, cols):
    """Bytes of the swizzled128x4 buffer of (rows, cols) scales: whole 128x4 tiles of 512 bytes."""
    return _tiles(rows, TILE_ROWS) * _tiles(cols, TILE_COLS) * TILE_BYTES


def to_swizzled128x4(scale, padding=127):
    """Reorders scale bytes from plain to swizzled128x4.

    Args:
      scale: (..., rows, cols) float8_e8m0fnu or uint8; leading dimensions are independent matrices.
      padding: 0..255, the byte of rows and columns that the padding to 128 and 4 adds.
    Returns: (..., swizzled_bytes(rows, cols)), the dtype of scale, contiguous.
    Raises: TypeError (dtype), ValueError (fewer than 2 dimensions, padding).
    Source: module docstring; equals torchao to_blocked for each matrix.
    """
    _check_byte_dtype("scale", scale)
    if scale.dim() < 2:
        raise ValueError(f"scale: expected (..., rows, cols), got shape {tuple(scale.shape)}")
    if not 0 <= padding <= 255:
        raise ValueError(f"padding: expected a byte in 0..255, got {padding}")
    return _swizzle(scale, padding)


@opaque_when_compiled(
    "to_swizzled128x4(Tensor scale, int padding) -> Tensor",
    lambda scale, padding: scale.new_empty((*scale.shape[:-2], swizzled_bytes(*scale.shape[-2:]))),
)
def _swizzle(scale, padding):
    *lead, rows, cols = scale.shape
    tiles_r, tiles_c = _tiles(rows, TILE_ROWS), _tiles(cols, TILE_COLS)
    padded = torch.full(
        (*lead, tiles_r * TILE_ROWS, tiles_c * TILE_COLS),
        padding,
        dtype=torch.uint8,
        device=scale.device,
    )
    padded[..., :rows, :cols] = scale.view(torch.uint8)
    # (..., tile row, row/32, row%32, tile column, column%4)
    # -> (..., tile row, tile column, row%32, row/32, column%4)
    tiled = padded.view(*lead, tiles_r, 4, 32, tiles_c, TILE_COLS).movedim((-2, -3), (-4, -3))
    return tiled.reshape(*lead, swizzled_bytes(rows, cols)).view(scale.dtype)


def from_swizzled128x4(buf, rows, cols):
    """Reorders scale bytes from swizzled128x4 to plain; the padding is dropped.

    Args:
      buf: (..., bytes) float8_e8m0fnu or uint8, bytes >= swizzled_bytes(rows, cols); the rest is
        not read.
      rows, cols: shape of the plain scale matrix.
    Returns: (..., rows, cols), the dtype of buf, contiguous.
    Raises: TypeError (dtype), ValueError (shape, buffer too short: names the needed size).
    """
    _check_byte_dtype("buf", buf)
    if rows < 0 or cols < 0:
        raise ValueError(f"rows, cols: expected sizes >= 0, got {rows}, {cols}")
    need = swizzled_bytes(rows, cols)
    if buf.dim() < 1 or buf.shape[-1] < need:
        raise ValueError(
            f"buf: expected at least {need} bytes in the last dimension, the swizzled128x4 size of "
            f"{rows}x{cols} scales, got shape {tuple(buf.shape)}"
        )
    return _unswizzle(buf, rows, cols)


@opaque_when_compiled(
    "from_swizzled128x4(Tensor buf, SymInt rows, SymInt cols) -> Tensor",
    lambda buf, rows, cols: buf.new_empty((*buf.shape[:-1], rows, cols)),
)
def _unswizzle(buf, rows, cols):
    lead, need = buf.shape[:-1], swizzled_bytes(rows, cols)
    tiles_r, tiles_c = _tiles(rows, TILE_ROWS), _tiles(cols, TILE_COLS)
    tiled = buf.view(torch.uint8)[..., :need].reshape(*lead, tiles_r, tiles_c, 32, 4, TILE_COLS)
    padded = tiled.movedim((-4, -3), (-2, -3))
    padded = padded.reshape(*lead, tiles_r * TILE_ROWS, tiles_c * TILE_COLS)
    cut = padded[..., :rows, :cols].clone(memory_format=torch.contiguous_format)
    return cut.view(buf.dtype)


def operand_matrix(scale, axis):
    """A plain rowwise or colwise scale as (..., rows, cols) MMA operand matrices (a view).

    (B,S,H,C) gives (B,H,S,C) rowwise and (B,H,C,S) colwise; S counts tokens, or blocks of tokens.
    """
    if scale.dim() >= 3:
        scale = scale.transpose(-3, -2)
    return scale if axis == "rowwise" else scale.transpose(-2, -1)


def packed_atoms(scale, axis, cu_seqlens, total):
    """Plain rowwise or colwise scales of packed sequences as swizzled128x4 atoms: one of 512 bytes per
    head and tile of 128 tokens, (H, tiles*512), tiles = total//128 + nseq.

    Tile t of sequence b is at cu[b]//128 + b + t; bytes that no block uses are arbitrary. head_dim
    is at most 128. Never waits for the device.
    """
    num_seqs = cu_seqlens.shape[0] - 1
    tiles = total // TILE_ROWS + num_seqs
    if num_seqs == 0 or scale.shape[0] == 0:
        return scale.new_empty((scale.shape[1], tiles * TILE_BYTES))
    first_tile, first_row, rows_per_tile = _packed_places(cu_seqlens, axis)
    tile = torch.arange(tiles, device=scale.device)
    seq = torch.searchsorted(first_tile, tile, right=True) - 1
    row = first_row[seq] + rows_per_tile * (tile - first_tile[seq])
    rows = row[:, None] + torch.arange(rows_per_tile, device=scale.device)
    rows = rows.clamp_(
        max=scale.shape[0] - 1
    ).flatten()  # the last tile of a sequence may end behind it
    tiled = scale.view(torch.uint8).index_select(0, rows).view(scale.dtype)
    return to_swizzled128x4(operand_matrix(tiled, axis))


def from_packed_atoms(atoms, axis, cu_seqlens, shape):
    """Inverse of packed_atoms for a tensor of this shape (T,H,D): plain scale, 127 in rows of no sequence."""
    total, heads, channels = shape
    num_seqs = cu_seqlens.shape[0] - 1
    rows = total if axis == "rowwise" else packed_scale_rows(total, num_seqs)
    columns = blocks(channels) if axis == "rowwise" else channels
    if num_seqs == 0 or rows == 0 or heads == 0:
        plain = atoms.new_empty((rows, heads, columns), dtype=torch.uint8)
        return plain.fill_(127).view(atoms.dtype)
    first_tile, first_row, rows_per_tile = _packed_places(cu_seqlens, axis)
    row = torch.arange(rows, device=atoms.device)
    seq = torch.searchsorted(first_row, row, right=True) - 1
    within = row - first_row[seq]
    length = (cu_seqlens[1:] - cu_seqlens[:-1]).long()[seq]
    exists = within < (length if axis == "rowwise" else blocks(length))
    tile = (first_tile[seq] + within // rows_per_tile).where(exists, 0)
    matrices = from_swizzled128x4(atoms.unflatten(-1, (-1, TILE_BYTES)), TILE_ROWS, TILE_COLS)
    matrices = matrices.view(torch.uint8)
    if axis == "colwise":
        matrices = matrices.transpose(-2, -1)
    plain = matrices[:, tile, within % rows_per_tile, :columns].transpose(0, 1)
    return plain.where(exists[:, None, None], 127).contiguous().view(atoms.dtype)


def _packed_places(cu_seqlens, axis):
    """Of each packed sequence the first tile and the first row of its plain scale; and rows per tile."""
    start = cu_seqlens[:-1].long()
    index = torch.arange(start.shape[0], device=start.device)
    first_tile = start // TILE_ROWS + index
    if axis == "rowwise":
        return first_tile, start, TILE_ROWS
    return first_tile, start // BLOCK + index, TILE_ROWS // BLOCK


def atoms_shape(shape, cu_seqlens=None):
    """Shape of the scale atoms of a (B,S,H,D), (T,H,D) or (rows,cols) tensor, D <= 128, along either axis: one atom per head
    and tile of 128 tokens."""
    if cu_seqlens is not None:
        tiles = shape[0] // TILE_ROWS + cu_seqlens.shape[0] - 1
        return (shape[1], tiles * TILE_BYTES)
    lead, tokens, _ = operand_size(shape, "rowwise")
    return (*lead, _tiles(tokens, TILE_ROWS) * TILE_BYTES)


@opaque_when_compiled(
    "operand_scale(Tensor matrix, str axis) -> Tensor",
    lambda matrix, axis: matrix.new_empty(_operand_view(matrix, axis).shape),
)
def operand_scale(matrix, axis):
    """Inverse of operand_matrix: (..., rows, cols) matrices -> plain scale, a contiguous copy."""
    return _operand_view(matrix, axis).clone(memory_format=torch.contiguous_format)


def _operand_view(matrix, axis):
    matrix = matrix if axis == "rowwise" else matrix.transpose(-2, -1)
    return matrix.transpose(-3, -2) if matrix.dim() >= 3 else matrix


def operand_size(shape, axis):
    """(leading sizes, rows, cols) of the scale matrices of a tensor of this logical shape."""
    tokens, channels = (shape[0], shape[1]) if len(shape) == 2 else (shape[-3], shape[-1])
    lead = () if len(shape) == 2 else (*shape[:-3], shape[-2])
    if axis == "rowwise":
        return lead, tokens, _tiles(channels, 32)
    return lead, channels, _tiles(tokens, 32)


def scale_shape(shape, axis, cu_seqlens=None):
    """Shape of the plain scale of a tensor of shape (B,S,H,D), (T,H,D) or (rows,cols)."""
    if axis == "rowwise":
        return (*shape[:-1], blocks(shape[-1]))
    if axis == "tokenwise":
        return (*shape[:-1], 1)
    if cu_seqlens is not None:
        return (packed_scale_rows(shape[0], cu_seqlens.shape[0] - 1), *shape[1:])
    dim = token_dim(len(shape))
    return (*shape[:dim], blocks(shape[dim]), *shape[dim + 1 :])


def packed_scale_rows(total_tokens, num_seqs):
    """Rows of the colwise scale of packed sequences; those of sequence b start at cu[b]//32 + b."""
    return total_tokens // BLOCK + num_seqs


def blocks(n):
    return (n + BLOCK - 1) // BLOCK


def token_dim(ndim):
    return 1 if ndim == 4 else 0


def block_dim(axis, ndim):
    return token_dim(ndim) if axis == "colwise" else ndim - 1


def _tiles(n, size):
    return (n + size - 1) // size


def _check_byte_dtype(name, t):
    if t.dtype not in (torch.float8_e8m0fnu, torch.uint8):
        raise TypeError(f"{name}: expected float8_e8m0fnu or uint8, got {t.dtype}")
