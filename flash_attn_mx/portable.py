"""MXFP8 attention in plain PyTorch: the numerics of docs/numerics.md on any device, without an Sq x Sk matrix.

The operands arrive quantised. Payloads and scales are expanded to fp32, where every E4M3 x 2^e value is exact, the
five (two in the forward) matrix products run in fp32, and P and dS are rounded to the E4M3 grid in between at the
places that the contract names. One group of heads, one span of keys and one tile of queries are in flight at a time.

FLOW forward   for each head group, query rows, key span (last to first):
                 x = c q k^T -> row reference r, tile exponents n -> p -> rounded P -> acc += P V, sums l, l_q
     backward  for each head group, query rows, key span:
                 x, P = 2^(x - lse), dP = dO V^T, dS -> rounded P, dS -> dV += P^T dO, dK += dS^T Q, dQ += dS K
"""

import math
from dataclasses import dataclass
from typing import Iterator, NamedTuple, Optional, Sequence

import torch
from torch import Tensor

from .quantize import decode_e8m0, encode_scale

TILE = (
    128  # rows of a query tile and keys of a key tile; part of the contract, not a tuning constant
)
BLOCK = 32  # values that share one scale
CHUNK_ELEMENTS = (
    1 << 20
)  # of x in flight; 2^18..2^21 were within 10 % of each other on a 2-core x86-64 machine
MIN_TILE_EXPONENT = -119  # the scale byte 127 + n - 8 stays >= 0
MAX_TILE_EXPONENT = 60  # above it the row reference moves

Operand = tuple[Tensor, Tensor]  # payload, e8m0 scale in plain layout


@dataclass(frozen=True)
class Window:
    """Visible keys of query i: i + offset - left <= k <= i + offset + right; a negative side is unlimited."""

    left: int
    right: int
    offset: int

    def first(self, row: int) -> int:
        return 0 if self.left < 0 else max(0, row + self.offset - self.left)

    def end(self, row: int, seqlen_k: int) -> int:
        return (
            seqlen_k
            if self.right < 0
            else max(0, min(seqlen_k, row + self.offset + self.right + 1))
        )

    def mask(self, rows: range, keys: range, seqlen_k: int, device: torch.device) -> Tensor:
        """(rows, keys) bool, True where the key is visible."""
        row = torch.arange(rows.start, rows.stop, device=device).unsqueeze(1) + self.offset
        key = torch.arange(keys.start, keys.stop, device=device)
        seen = (key < seqlen_k).expand(len(rows), len(keys))
        if self.left >= 0:
            seen = seen & (key >= row - self.left)
        if self.right >= 0:
            seen = seen & (key <= row + self.right)
        return seen


class Span(NamedTuple):
    """A run of keys that is handled at once; `cut` if some row of the query tile does not see all of it."""

    keys: range
    cut: bool


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def key_spans(
    window: Window, rows: range, seqlen_k: int, padded_k: int, max_keys: int
) -> Iterator[Span]:
    """The key spans that a tile of query rows visits, last to first; spans are whole tiles."""
    first, end = window.first(rows.start), window.end(rows.stop - 1, seqlen_k)
    if first >= end:
        return
    first_tile, end_tile = first // TILE, -(-end // TILE)
    # A tile is full if it ends before the first row's right limit and begins behind the last row's left limit.
    right_limit = window.end(rows.start, seqlen_k)
    full_end = end_tile if right_limit == seqlen_k else right_limit // TILE
    full_first = min(max(-(-window.first(rows.stop - 1) // TILE), first_tile), end_tile)
    full_end = max(full_end, full_first)
    step = max(1, max_keys // TILE)
    for begin, stop, cut in (
        (full_end, end_tile, True),
        (full_first, full_end, False),
        (first_tile, full_first, True),
    ):
        for tile_end in range(stop, begin, -step):
            tile_begin = max(begin, tile_end - step)
            yield Span(range(tile_begin * TILE, min(tile_end * TILE, padded_k)), cut)


def round_e4m3_(y: Tensor) -> Tensor:
    """Rounds payload values, |y| <= 448, to the E4M3 grid in place (nearest even, subnormals included).

    Adding and subtracting 1.5 * 2^20 * 2^exponent(y) leaves three fraction bits; the clamp makes 2^-9 the finest step.
    """
    magic = y.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    magic.clamp_(min=2.0**-6).mul_(1.5 * 2.0**20)
    return y.add_(magic).sub_(magic)


def _block_amax(x: Tensor) -> Tensor:
    """(..., br, C, bc) -> amax |x| over br and bc."""
    # The sign of a NaN would end up in the exponent.
    return torch.maximum(x.amax((-3, -1)), x.amin((-3, -1)).neg_()).abs_()


def round_blocks_(x: Tensor, block_rows: int, block_cols: int) -> Tensor:
    """Rounds x (n, R, C) to MXFP8 in place: one RCEIL scale per block_rows x block_cols block."""
    n, rows, cols = x.shape
    blocks = x.view(n, rows // block_rows, block_rows, cols // block_cols, block_cols)
    scale_byte = encode_scale(_block_amax(blocks), "rceil", torch.float8_e4m3fn)
    up, down = _scale_pair(scale_byte.unsqueeze(2).unsqueeze(-1))
    round_e4m3_(blocks.mul_(up)).mul_(down)
    return x


def _scale_pair(scale_byte: Tensor) -> tuple[Tensor, Tensor]:
    """Factors that take a value to its payload and back, 2^(127 - byte) and 2^(byte - 127); byte 255 gives NaN."""
    up = decode_e8m0((254 - scale_byte.to(torch.int16)).clamp_(min=0).to(torch.uint8))
    return up, decode_e8m0(scale_byte)


# --- operands -------------------------------------------------------------------------------------------------


def _float_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device=device).view(dtype).to(torch.float32)


def _heads_first(x: Tensor, nheads_k: int) -> Tensor:
    """(B, S, H, W) -> (B * Hkv, G, S, W)."""
    batch, seqlen, nheads, width = x.shape
    x = x.view(batch, seqlen, nheads_k, nheads // max(nheads_k, 1), width)
    return x.permute(0, 2, 3, 1, 4).reshape(batch * nheads_k, nheads // nheads_k, seqlen, width)


class _Expanded:
    """One quantised operand, as bytes with heads first; `group` gives some heads of it in fp32, padded with zero rows."""

    def __init__(self, operand: Operand, axis: str, nheads_k: int, pad_to: int):
        data, scale = operand
        self.axis, self.pad_to = axis, pad_to
        self.table = _float_table(data.dtype, data.device)
        self.data, self.scale = (_heads_first(x.view(torch.uint8), nheads_k) for x in (data, scale))

    def payload(self, heads: slice) -> Tensor:
        data = self.data[heads]
        flat = self.table.index_select(0, data.reshape(-1).to(torch.int32))
        return flat.view(data.shape)

    def factor(self, heads: slice) -> Tensor:
        """Scales in fp32, shaped to broadcast over the payload."""
        scale = decode_e8m0(self.scale[heads])
        _, _, seqlen, width = self.data.shape
        if self.axis == "rowwise":
            return scale.repeat_interleave(BLOCK, dim=-1)[..., :width]
        if self.axis == "colwise":
            return scale.repeat_interleave(BLOCK, dim=-2)[..., :seqlen, :]
        return scale

    def pad(self, x: Tensor) -> Tensor:
        missing = self.pad_to - x.shape[2]
        x = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x
        return x

    def group(self, heads: slice) -> Tensor:
        """(n, G, padded S, D) fp32."""
        return self.pad(self.payload(heads).mul_(self.factor(heads)))


@dataclass(frozen=True)
class _Shape:
    """Sizes of one dense problem and the chunking that follows from them."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    nheads: int
    nheads_k: int
    head_dim: int

    @staticmethod
    def of(q: Tensor, k: Tensor) -> "_Shape":
        batch, seqlen_q, nheads, head_dim = q.shape
        return _Shape(batch, seqlen_q, k.shape[1], nheads, k.shape[2], head_dim)

    @property
    def groups(self) -> int:
        return self.nheads // max(self.nheads_k, 1)  # no heads: empty results

    @property
    def padded_q(self) -> int:
        return _round_up(self.seqlen_q, BLOCK)

    @property
    def padded_k(self) -> int:
        """Whole tiles, or whole blocks where there is only one tile."""
        return _round_up(self.seqlen_k, TILE if self.seqlen_k > TILE else BLOCK)

    def head_groups(self) -> Iterator[slice]:
        """Slices of the B * Hkv key heads, so that operands and chunks of one group stay small."""
        chunk = self.groups * min(self.padded_q, TILE) * min(self.padded_k, 8 * TILE)
        operand = self.head_dim * max(self.groups * self.padded_q, self.padded_k)
        step = max(1, CHUNK_ELEMENTS // max(chunk, operand // 4))
        for start in range(0, self.batch * self.nheads_k, step):
            yield slice(start, min(start + step, self.batch * self.nheads_k))

    def keys_per_span(self, heads: slice) -> int:
        rows = (heads.stop - heads.start) * self.groups * min(self.padded_q, TILE)
        return max(TILE, min(8 * TILE, CHUNK_ELEMENTS // rows // TILE * TILE))

    def query_rows(self, heads: slice, window: Window) -> Iterator[range]:
        """Runs of query rows: one tile where a mask cuts tiles, else as many tiles as fit a chunk."""
        step = TILE
        if window.left < 0 and window.right < 0:
            per_tile = (heads.stop - heads.start) * self.groups * TILE * self.keys_per_span(heads)
            step *= max(1, CHUNK_ELEMENTS // per_tile)
        for start in range(0, self.seqlen_q, step):
            yield range(start, min(start + step, self.seqlen_q))

    def heads_last(self, x: Tensor, seqlen: int, dtype: torch.dtype) -> Tensor:
        """(B * Hkv, G, S, D) -> (B, S, H, D), contiguous."""
        x = x.view(self.batch, self.nheads_k * x.shape[1], *x.shape[2:]).transpose(1, 2)
        return x[:, :seqlen].to(dtype).contiguous()


def _rows(x: Tensor, rows: range) -> Tensor:
    """(n, G, S, D) -> (n, G * len(rows), D)."""
    x = x[:, :, rows.start : rows.stop]
    return x.reshape(x.shape[0], -1, x.shape[-1])


def _hide(x: Tensor, seen: Tensor, value: float) -> None:
    """x (n, G * R, C) := value where `seen` (R, C) is False."""
    view = x.view(x.shape[0], -1, *seen.shape)
    view.masked_fill_(~seen, value)


# --- forward --------------------------------------------------------------------------------------------------


class _RowState:
    """Running state of some query rows: reference r, sums l and l_q, accumulator of O."""

    def __init__(self, like: Tensor, head_dim: int):
        n, rows, _ = like.shape
        self.reference = like.new_full((n, rows), -math.inf)
        self.sum = like.new_zeros((n, rows))
        self.sum_quantised = like.new_zeros((n, rows))
        self.acc = like.new_zeros((n, rows, head_dim))

    def visit(self, tile_max: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Moves the reference over a span of tiles, last to first, and rescales what was summed so far.

        Args: tile_max (n, rows, tiles), -inf where a row sees nothing.
        Returns (each (n, rows, tiles)): the reference in force at each tile, 0 where there is none yet; n, the
          tile's integer exponent; weight, which takes the tile's products from that reference to the last one.
        """
        before, current, references = self.reference, self.reference, []
        for tile in reversed(range(tile_max.shape[-1])):
            m = tile_max[..., tile]
            # True also for the first visible tile, where current is -inf.
            current = torch.where(m - current > MAX_TILE_EXPONENT, m, current)
            references.append(current)
        self.reference = current
        reference = torch.stack(references[::-1], dim=-1)
        weight = _power_ratio(reference, current.unsqueeze(-1))
        moved = _power_ratio(before, current)
        self.sum.mul_(moved)
        self.sum_quantised.mul_(moved)
        self.acc.mul_(moved.unsqueeze(-1))
        exponent = (tile_max - reference).ceil_().clamp_(min=MIN_TILE_EXPONENT)
        exponent = torch.where(tile_max == -math.inf, float(MIN_TILE_EXPONENT), exponent)
        return torch.where(reference == -math.inf, 0.0, reference), exponent, weight

    def finish(self) -> tuple[Tensor, Tensor]:
        """(O, LSE) in fp32; a row that saw no key gives 0 and -inf."""
        empty = self.sum == 0
        out = self.acc / torch.where(empty, 1.0, self.sum + self.sum_quantised).unsqueeze(-1)
        lse = (self.sum.log2() + self.reference).mul_(math.log(2.0))
        return out, torch.where(empty, -math.inf, lse)


def _power_ratio(a: Tensor, b: Tensor) -> Tensor:
    """2^(a - b), and 1 where a is -inf (nothing was summed under that reference)."""
    return torch.where(a == -math.inf, 0.0, a - b).exp2_()


def _forward_span(
    state: _RowState,
    q: Tensor,
    kv: "_GroupKV",
    span: Span,
    seen: Optional[Tensor],
    scale_log2: float,
):
    """One key span for some query rows q (n, rows, D)."""
    a, b = span.keys.start, span.keys.stop
    x = torch.bmm(q, kv.k[:, a:b].transpose(1, 2)).mul_(scale_log2)
    if seen is not None:
        _hide(x, seen, -math.inf)
    elif kv.seqlen_k < b:
        x[..., kv.seqlen_k - a :] = -math.inf
    n, rows, cols = x.shape
    width = min(TILE, cols)
    tiles = x.view(n, rows, cols // width, width)
    tile_max = tiles.amax(-1)
    reference, exponent, weight = state.visit(tile_max)
    # e = 2^(x - r) = 2^n p. The sums take it as it is; the payload is 2^8 p.
    e = tiles.sub_(reference.unsqueeze(-1)).exp2_()
    state.sum.add_(e.sum(-1).mul_(weight).sum(-1))
    up, down = (8.0 - exponent).exp2_(), (exponent - 8.0).exp2_()
    e_max = (tile_max - reference).exp2_()
    rounded_max = round_e4m3_(e_max * up).mul_(down)
    state.sum_quantised.add_(rounded_max.sub_(e_max).mul_(weight).sum(-1))
    if not span.cut:
        round_e4m3_(e.mul_(up.unsqueeze(-1))).mul_((down * weight).unsqueeze(-1))
        torch.baddbmm(state.acc, e.view(n, rows, cols), kv.v[:, a:b], out=state.acc)
    else:
        p = _token_scaled_p(e, exponent, kv.token_factor[:, a:b], seen)
        p.view(n, rows, cols // width, width).mul_(weight.unsqueeze(-1))
        torch.baddbmm(state.acc, p, kv.v_token[:, a:b], out=state.acc)


def _token_scaled_p(e: Tensor, exponent: Tensor, factor: Tensor, seen: Tensor) -> Tensor:
    """P of a cut tile: V's token scales folded in, then one scale per 32 keys of a row.

    Args: e (n, rows, tiles, width) = 2^n p; exponent (n, rows, tiles); factor (n, cols), NaN for a poisoned token.
    Returns: (n, rows, cols), rounded, in units of 1.
    """
    n, rows, tiles, width = e.shape
    p = (
        e.mul_(exponent.neg().exp2_().unsqueeze(-1))
        .view(n, rows, tiles * width)
        .mul_(factor.unsqueeze(1))
    )
    _hide(p, seen, 0.0)
    blocks = p.view(n, rows, tiles, width // BLOCK, BLOCK)
    tile_exponent = exponent.to(torch.int32).unsqueeze(-1)
    amax = blocks.amax(-1)
    byte = encode_scale(amax, "rceil", torch.float8_e4m3fn).to(torch.int32)
    poisoned = byte == 255
    low, high = (-tile_exponent).clamp(min=0), (254 - tile_exponent).clamp(max=254)
    byte = torch.minimum(torch.maximum(byte, low), high)
    up = decode_e8m0((254 - byte).to(torch.uint8)).unsqueeze(-1)
    down = decode_e8m0((byte + tile_exponent).clamp_(0, 254).to(torch.uint8))
    down = torch.where(poisoned, math.nan, down).unsqueeze(-1)
    # Saturates only where 2^n times V's scale lies outside the range of a scale byte.
    round_e4m3_(blocks.mul_(up).clamp_(max=448.0)).mul_(down)
    return p


class _GroupKV(NamedTuple):
    """K and V of a head group in fp32: k, v (n, padded Sk, D); v_token without its factor (n, padded Sk)."""

    k: Tensor
    v: Tensor
    v_token: Optional[Tensor]
    token_factor: Optional[Tensor]
    seqlen_k: int


def forward(
    q: Operand,
    k: Operand,
    v: Operand,
    v_tok: Optional[Operand],
    softmax_scale: float,
    window: tuple[int, int],
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Dense forward.

    Args:
      q, k: rowwise payload (B, Sq, H, D) / (B, Sk, Hkv, D) and scale (…, ceil(D/32)).
      v: colwise; v_tok: tokenwise, may be None when window is (-1, -1).
    Returns: out (B, Sq, H, D) in out_dtype; lse (B, H, Sq) fp32, natural log.
    """
    shape = _Shape.of(q[0], k[0])
    limits = Window(*window, offset=shape.seqlen_k - shape.seqlen_q)
    heads_total, groups = shape.batch * shape.nheads_k, shape.groups
    device = q[0].device
    out = torch.zeros(
        heads_total, groups, shape.seqlen_q, shape.head_dim, dtype=out_dtype, device=device
    )
    lse = torch.full((heads_total, groups, shape.seqlen_q), -math.inf, device=device)
    if out.numel() and shape.seqlen_k:
        eq = _Expanded(q, "rowwise", shape.nheads_k, shape.seqlen_q)
        ek = _Expanded(k, "rowwise", shape.nheads_k, shape.padded_k)
        ev = _Expanded(v, "colwise", shape.nheads_k, shape.padded_k)
        et = (
            _Expanded(v_tok, "tokenwise", shape.nheads_k, shape.padded_k)
            if v_tok is not None
            else None
        )
        for heads in shape.head_groups():
            token = (
                (et.pad(et.payload(heads))[:, 0], et.pad(et.factor(heads))[:, 0, :, 0])
                if et
                else (None, None)
            )
            kv = _GroupKV(ek.group(heads)[:, 0], ev.group(heads)[:, 0], *token, shape.seqlen_k)
            _forward_heads(
                shape, limits, heads, eq.group(heads), kv, softmax_scale, out[heads], lse[heads]
            )
    return (
        shape.heads_last(out, shape.seqlen_q, out_dtype),
        lse.view(shape.batch, shape.nheads, shape.seqlen_q),
    )


def _forward_heads(
    shape: _Shape,
    window: Window,
    heads: slice,
    q: Tensor,
    kv: _GroupKV,
    softmax_scale: float,
    out: Tensor,
    lse: Tensor,
):
    for rows in shape.query_rows(heads, window):
        q_rows = _rows(q, rows)
        state = _RowState(q_rows, shape.head_dim)
        for span in key_spans(
            window, rows, shape.seqlen_k, shape.padded_k, shape.keys_per_span(heads)
        ):
            seen = window.mask(rows, span.keys, shape.seqlen_k, q.device) if span.cut else None
            _forward_span(state, q_rows, kv, span, seen, softmax_scale * math.log2(math.e))
        out_rows, lse_rows = state.finish()
        part = (q.shape[0], shape.groups, len(rows))
        out[:, :, rows.start : rows.stop] = out_rows.view(*part, shape.head_dim)
        lse[:, :, rows.start : rows.stop] = lse_rows.view(part)


# --- backward -------------------------------------------------------------------------------------------------


class _GroupQ(NamedTuple):
    """Query-side tensors of a head group, fp32, (n, G, padded Sq, D) and (n, G, padded Sq)."""

    q: Tensor
    q_col: Tensor
    do_row: Tensor
    do_col: Tensor
    lse_log2: Tensor  # +inf where the row sees no key, or is padding: P = 0
    delta: Tensor


class _GroupK(NamedTuple):
    """Key-side tensors of a head group, fp32, (n, padded Sk, D), and the sums that they receive."""

    k: Tensor
    k_col: Tensor
    v: Tensor
    dk: Optional[Tensor]
    dv: Optional[Tensor]


def _lse_log2(shape: _Shape, lse: Tensor) -> Tensor:
    """LSE in log2 units, (B * Hkv, G, padded Sq); +inf, so that P = 0, for rows that see no key and for padding."""
    lse = torch.where(lse == -math.inf, math.inf, lse * math.log2(math.e))
    lse = lse.reshape(shape.batch * shape.nheads_k, shape.groups, shape.seqlen_q)
    return torch.nn.functional.pad(lse, (0, shape.padded_q - shape.seqlen_q), value=math.inf)


def backward(
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    do: tuple[Operand, Operand],
    q: tuple[Operand, Operand],
    k: tuple[Operand, Operand],
    v_tok: Operand,
    softmax_scale: float,
    window: tuple[int, int],
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Dense backward.

    Args:
      dout, out: (B, Sq, H, D); lse: (B, H, Sq).   do, q, k: (rowwise, colwise) copies.   v_tok: tokenwise.
      needs: which of dq, dk, dv to compute; the others come back with zero elements.
    Returns: dq, dk, dv in the dtype of dout.
    """
    shape = _Shape.of(q[0][0], k[0][0])
    window_ = Window(*window, offset=shape.seqlen_k - shape.seqlen_q)
    total, groups, device = shape.batch * shape.nheads_k, shape.groups, dout.device
    dtype = dout.dtype

    def result(needed, heads, seqlen):
        return (
            torch.zeros(total, heads, seqlen, shape.head_dim, dtype=dtype, device=device)
            if needed
            else None
        )

    dq = result(needs[0], groups, shape.seqlen_q)
    dk, dv = result(needs[1], 1, shape.seqlen_k), result(needs[2], 1, shape.seqlen_k)
    if shape.seqlen_q and shape.seqlen_k and total and any(needs):
        sides_q = [
            _Expanded(operand, axis, shape.nheads_k, shape.padded_q)
            for pair in (q, do)
            for operand, axis in zip(pair, ("rowwise", "colwise"))
        ]
        sides_k = [
            _Expanded(operand, axis, shape.nheads_k, shape.padded_k)
            for operand, axis in ((k[0], "rowwise"), (k[1], "colwise"), (v_tok, "tokenwise"))
        ]
        lse_log2, out = _lse_log2(shape, lse), _heads_first(out, shape.nheads_k)
        for heads in shape.head_groups():
            expanded_q = [side.group(heads) for side in sides_q]
            # delta from the quantised dO, so that its rounding cancels in dP - delta.
            delta = (expanded_q[2][:, :, : shape.seqlen_q] * out[heads]).sum(-1)
            delta = torch.nn.functional.pad(delta, (0, shape.padded_q - shape.seqlen_q))
            group_q = _GroupQ(*expanded_q, lse_log2[heads], delta)
            expanded_k = [side.group(heads)[:, 0] for side in sides_k]
            sums = [
                torch.zeros_like(expanded_k[0]) if grad is not None else None for grad in (dk, dv)
            ]
            group_k = _GroupK(*expanded_k, *sums)
            dq_heads = _backward_heads(
                shape, window_, heads, group_q, group_k, softmax_scale, needs[0]
            )
            if dq is not None:
                dq[heads] = dq_heads[:, :, : shape.seqlen_q].mul_(softmax_scale)
            if dk is not None:
                dk[heads, 0] = group_k.dk[:, : shape.seqlen_k].mul_(softmax_scale)
            if dv is not None:
                dv[heads, 0] = group_k.dv[:, : shape.seqlen_k]
    seqlens = (shape.seqlen_q, shape.seqlen_k, shape.seqlen_k)
    return tuple(
        shape.heads_last(grad, seqlen, dtype) if grad is not None else dout.new_empty(0)
        for grad, seqlen in zip((dq, dk, dv), seqlens)
    )


def _backward_heads(
    shape: _Shape,
    window: Window,
    heads: slice,
    gq: _GroupQ,
    gk: _GroupK,
    softmax_scale: float,
    needs_dq: bool,
) -> Optional[Tensor]:
    dq = torch.zeros_like(gq.q) if needs_dq else None
    for rows in shape.query_rows(heads, window):
        padded = range(rows.start, min(_round_up(rows.stop, BLOCK), shape.padded_q))
        q_rows = _GroupQ(*(_rows(t if t.dim() == 4 else t.unsqueeze(-1), padded) for t in gq))
        dq_rows = torch.zeros_like(q_rows.q) if needs_dq else None
        for span in key_spans(
            window, rows, shape.seqlen_k, shape.padded_k, shape.keys_per_span(heads)
        ):
            seen = (
                window.mask(padded, span.keys, shape.seqlen_k, q_rows.q.device)
                if span.cut
                else None
            )
            _backward_span(q_rows, gk, span, seen, shape.seqlen_k, softmax_scale, dq_rows)
        if needs_dq:
            dq[:, :, padded.start : padded.stop] = dq_rows.view(
                dq.shape[0], shape.groups, len(padded), -1
            )
    return dq


def _backward_span(
    q: _GroupQ,
    kv: _GroupK,
    span: Span,
    seen: Optional[Tensor],
    seqlen_k: int,
    softmax_scale: float,
    dq: Optional[Tensor],
):
    """One key span for some query rows; adds to dq (n, rows, D), kv.dk and kv.dv (n, padded Sk, D)."""
    keys = slice(span.keys.start, span.keys.stop)
    p = torch.bmm(q.q, kv.k[:, keys].transpose(1, 2)).mul_(softmax_scale * math.log2(math.e))
    p.sub_(q.lse_log2).clamp_(max=0.0).exp2_()
    ds = (
        torch.bmm(q.do_row, kv.v[:, keys].transpose(1, 2)).sub_(q.delta)
        if kv.dk is not None or dq is not None
        else None
    )
    if ds is not None:
        ds.mul_(p)
    for t in (p, ds):
        if t is not None and seen is not None:
            _hide(t, seen, 0.0)
        elif t is not None and seqlen_k < keys.stop:
            t[..., seqlen_k - keys.start :] = 0.0
    if ds is not None:
        round_blocks_(ds, BLOCK, BLOCK)
    if kv.dv is not None:
        round_blocks_(p, BLOCK, 1)
        kv.dv[:, keys].baddbmm_(p.transpose(1, 2), q.do_col)
    if kv.dk is not None:
        kv.dk[:, keys].baddbmm_(ds.transpose(1, 2), q.q_col)
    if dq is not None:
        dq.baddbmm_(ds, kv.k_col[:, keys])
