"""What monitor() measures: counts over one operand, and P and dS of a few rows by the rules of docs/numerics.md."""

import math
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from . import portable
from .layouts import BLOCK
from .mx_tensor import EMAX, NAN_SCALE, decode_e8m0
from .quantize import encode_scale

TILE = portable.TILE
Counts = dict[str, Tensor]


TOKENS = 256  # of a sampled head, whose elements are counted


class Sample(NamedTuple):
    """Some heads of a dense problem (B, S, H, D), and a block of query rows of them; lists are of equal length."""

    batches: list[int]
    heads: list[int]
    heads_k: list[int]
    rows: range
    turn: int

    def of(self, x: Tensor, of_keys: bool, tokens: slice = slice(None)) -> Tensor:
        """(n, tokens, D) of x (B, S, H, D)."""
        heads = self.heads_k if of_keys else self.heads
        return torch.stack([x[b, tokens, h] for b, h in zip(self.batches, heads)])

    def rows_of(self, x: Tensor) -> Tensor:
        """(n, rows, D) of a query-side x (B, S, H, D)."""
        return self.of(x, False, slice(self.rows.start, self.rows.stop))

    def tokens(self, seqlen: int) -> tuple[slice, slice]:
        """(tokens whose elements are counted, their colwise blocks): TOKENS of them, further on each turn."""
        start = self.turn % -(-seqlen // TOKENS) * TOKENS
        stop = min(start + TOKENS, seqlen)
        return slice(start, stop), slice(start // BLOCK, -(-stop // BLOCK))


def choose(
    batch: int, nheads: int, nheads_k: int, seqlen_q: int, share: float, turn: int
) -> Sample:
    """The sample of the turn-th call: share of the key heads, at least one, and 32 rows; turns go through all of them."""
    total, group = batch * nheads_k, nheads // nheads_k
    count = min(total, max(1, round(share * total)))
    pairs = [divmod((turn * count + i) % total, nheads_k) for i in range(count)]
    # Rows must not be in step with the heads, or each head would show the same rows for ever.
    cycle, place = divmod(turn, -(-total // count))
    turn = cycle + place
    blocks = -(-seqlen_q // BLOCK)
    # 5/8 of the blocks further each time, made coprime: low and high rows take turns.
    step = next(
        n for n in range(max(1, blocks * 5 // 8), 2 * blocks + 2) if math.gcd(n, blocks) == 1
    )
    start = turn * step % blocks * BLOCK
    rows = range(start, min(start + BLOCK, seqlen_q))
    heads = [h * group + cycle % group for _, h in pairs]
    return Sample([b for b, _ in pairs], heads, [h for _, h in pairs], rows, turn)


def whole(x: Tensor, scale: Tensor) -> Counts:
    """What is looked at in all of an operand: elements, amax (inf if there is a NaN), NaN and Inf."""
    if x.is_cpu and not bool((scale.view(torch.uint8) == NAN_SCALE).any()):
        nonfinite = torch.zeros((), dtype=torch.int64)
    else:
        nonfinite = x.numel() - torch.isfinite(x).sum()
    # Both ends in one pass; the infinity norm takes ten times as long on a CPU.
    largest = torch.stack(torch.aminmax(x.detach())).abs().amax() if x.numel() else x.new_zeros(())
    return {
        "elements": torch.tensor(x.numel(), device=x.device),
        "nonfinite": nonfinite,
        "amax": largest.double().nan_to_num(nan=math.inf, posinf=math.inf),
    }


def operand(x: Tensor, data: Tensor, scale: Tensor, axis: str) -> Counts:
    """Elements of the sample: x and payload (n, S, D); scale (n, S, blocks) of 32 along D, or (n, blocks, D) "colwise"."""
    dim = 1 if axis == "colwise" else 2
    magnitude = x.detach().float().abs()
    short = -x.shape[dim] % BLOCK
    if short:
        magnitude = torch.nn.functional.pad(magnitude, (0, 0, 0, short) if dim == 1 else (0, short))
    blocks = magnitude.unflatten(dim, (-1, BLOCK))
    byte = scale.view(torch.uint8).to(torch.int32)
    amax, poisoned = blocks.amax(dim + 1), byte == NAN_SCALE
    up = decode_e8m0((254 - byte).clamp_(min=0).to(torch.uint8))
    limit = 1.75 * 2.0 ** EMAX[data.dtype]
    saturated = torch.zeros((), dtype=torch.int64, device=x.device)
    if not x.is_cpu or bool((amax * up > limit).any()):
        above = blocks * torch.where(poisoned, 0.0, up).unsqueeze(dim + 1) > limit
        saturated = torch.count_nonzero(above)
    underflowed = torch.count_nonzero(x) - torch.count_nonzero(data.view(torch.uint8) & 0x7F)
    if not x.is_cpu or bool(poisoned.any()):  # their payload is never 0
        zeros = (BLOCK - torch.count_nonzero(blocks, dim + 1)) * poisoned
        underflowed = underflowed + zeros.sum() - _padding_in(poisoned, dim, short)
    used = torch.where((amax > 0) & ~poisoned, byte.double() - 127, math.nan)
    return {
        "sampled": torch.tensor(x.numel(), device=x.device),
        "saturated": saturated,
        "underflowed": underflowed,
        **range_of(used),
    }


def _padding_in(poisoned: Tensor, dim: int, short: int) -> Tensor:
    """Padding elements in the poisoned blocks among the last ones along dim."""
    return poisoned.select(dim, poisoned.shape[dim] - 1).sum() * short


def range_of(exponents: Tensor) -> Counts:
    """Smallest and largest; ±inf if all are NaN."""
    return {
        "scale_min": exponents.nan_to_num(nan=math.inf).amin()
        if exponents.numel()
        else torch.tensor(math.inf),
        "scale_max": exponents.nan_to_num(nan=-math.inf).amax()
        if exponents.numel()
        else torch.tensor(-math.inf),
    }


def values(data: Tensor, scale: Tensor) -> Tensor:
    """A rowwise operand in fp32: payload (n, S, D), scale (n, S, ceil(D/32))."""
    factor = decode_e8m0(scale).repeat_interleave(BLOCK, dim=-1)
    return data.float() * factor[..., : data.shape[-1]]


def _pad_keys(x: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, size - x.shape[1]))


def forward_p(
    q: Tensor, k: Tensor, token: Optional[Tensor], rows: range, seqlen_q: int, window: portable.Window, scale: float
) -> Counts:  # fmt: skip
    """P of some rows: visible weights, those whose payload is 0, and the weight that is lost with them.

    Args: q (n, rows, D), k (n, Sk, D) dequantised; token (n, Sk): V's tokenwise scales, None without a mask.
    """
    seqlen_k = k.shape[1]
    padded = portable._round_up(seqlen_k, TILE if seqlen_k > TILE else BLOCK)
    k = _pad_keys(k, padded)
    token = None if token is None else torch.nn.functional.pad(token, (0, padded - seqlen_k))
    start = rows.start // TILE * TILE
    tile = range(start, min(start + TILE, seqlen_q))
    state = portable._RowState(q, 0)
    visible, flushed = torch.zeros((), dtype=torch.int64, device=q.device), 0
    for span in portable.key_spans(window, tile, seqlen_k, padded, padded):
        keys = slice(span.keys.start, span.keys.stop)
        seen = window.mask(rows, span.keys, seqlen_k, q.device)
        x = torch.bmm(q, k[:, keys].transpose(1, 2)).mul_(scale * math.log2(math.e))
        x.masked_fill_(~seen, -math.inf)
        tiles = x.unflatten(-1, (-1, min(TILE, x.shape[-1])))
        tile_max = tiles.amax(-1)
        reference, exponent, weight = state.visit(tile_max)
        e = (tiles - reference.unsqueeze(-1)).exp2_()
        mass = e * weight.unsqueeze(-1)
        if span.cut:
            payload = portable._token_scaled_p(e, exponent, token[:, keys], seen).view_as(tiles)
        else:
            payload = portable.round_e4m3_(e.mul_((8.0 - exponent).exp2_().unsqueeze(-1)))
        lost = (payload == 0) & seen.view(len(rows), -1, tiles.shape[-1])
        state.sum.add_(mass.sum((-2, -1)))
        state.sum_quantised.add_((mass * lost).sum((-2, -1)))
        visible, flushed = visible + seen.sum() * q.shape[0], flushed + lost.sum()
    share = (state.sum_quantised / state.sum).nan_to_num(nan=0.0)
    return {
        "visible": visible,
        "flushed": flushed + torch.zeros_like(visible),
        "mass": (state.sum > 0).sum().double(),
        "flushed_mass": share.sum().double(),
    }


def backward_ds(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, out: Tensor, lse: Tensor, rows: range, window: portable.Window, scale: float
) -> Counts:  # fmt: skip
    """dS of some rows as 32 x 32 blocks round it: amax, range of the scales, what becomes 0, NaN and Inf.

    Args: q, do, out (n, rows, D); k, v (n, Sk, D), dequantised; lse (n, rows).
    """
    seqlen_k = k.shape[1]
    padded = portable._round_up(seqlen_k, BLOCK)
    k, v = _pad_keys(k, padded), _pad_keys(v, padded)
    lse_log2 = torch.where(lse == -math.inf, math.inf, lse * math.log2(math.e)).unsqueeze(-1)
    p = torch.bmm(q, k.transpose(1, 2)).mul_(scale * math.log2(math.e))
    p = p.sub_(lse_log2).clamp_(max=0.0).exp2_()
    delta = (do * out.float()).sum(-1, keepdim=True)
    ds = torch.bmm(do, v.transpose(1, 2)).sub_(delta).mul_(p)
    ds = ds.masked_fill_(~window.mask(rows, range(padded), seqlen_k, q.device), 0.0)
    ds = torch.nn.functional.pad(ds, (0, 0, 0, BLOCK - ds.shape[1]))
    blocks = ds.view(ds.shape[0], 1, BLOCK, padded // BLOCK, BLOCK)
    amax = portable._block_amax(blocks)
    byte = encode_scale(amax, "rceil", torch.float8_e4m3fn)
    up, _ = portable._scale_pair(byte.unsqueeze(2).unsqueeze(-1))
    payload = portable.round_e4m3_(blocks * up)
    ordinary = amax.isfinite() & (amax > 0)
    return {
        "amax": amax.amax().double().nan_to_num(nan=math.inf, posinf=math.inf) if amax.numel() else torch.tensor(0.0),
        "nonzero": (blocks != 0).sum(),
        "flushed": ((payload == 0) & (blocks != 0)).sum(),
        "nonfinite": ds.numel() - ds.isfinite().sum(),
        **range_of(torch.where(ordinary, byte.double() - 127, math.nan)),
    }  # fmt: skip
