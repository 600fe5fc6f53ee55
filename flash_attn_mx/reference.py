"""The slow oracle: docs/numerics.md in float64, one row at a time, and plain float64 attention.

Nothing here is shared with quantize.py or portable.py: two readings of the contract that agree byte
by byte are the evidence that either is right. Speed is no aim; S around 300 takes seconds.

Sources: docs/numerics.md (its section numbers are cited as §), OCP MX 1.0 for the E4M3 code table.
"""

import math
from typing import NamedTuple

import torch

BLOCK = 32  # values that share one scale
TILE = 128  # rows of a query tile, keys of a key tile
NAN = float("nan")
INF = float("inf")


# ---- §1: E4M3, E8M0, blocks -------------------------------------------------------------------


def _e4m3_magnitude(code):
    """Value of a positive E4M3 code 0..0x7E: 4 exponent bits (bias 7), 3 fraction bits, no Inf."""
    exponent, fraction = code >> 3, code & 7
    if exponent == 0:
        return fraction * 2.0**-9
    return (8 + fraction) * 2.0 ** (exponent - 10)


_MAGNITUDES = torch.tensor([_e4m3_magnitude(code) for code in range(0x7F)], dtype=torch.float64)
_MIDPOINTS = (_MAGNITUDES[:-1] + _MAGNITUDES[1:]) / 2  # exact in float64
_NAN_CODE = torch.full((1,), NAN, dtype=torch.float64)
_E4M3_VALUES = torch.cat([_MAGNITUDES, _NAN_CODE, -_MAGNITUDES, _NAN_CODE])  # by payload byte
_E8M0_VALUES = torch.tensor([2.0 ** (b - 127) for b in range(255)] + [NAN], dtype=torch.float64)
_E8M0_INVERSES = torch.tensor([2.0 ** (127 - b) for b in range(255)] + [NAN], dtype=torch.float64)


def decode_e4m3(payload):
    """float64 values of E4M3 bytes (uint8)."""
    return _E4M3_VALUES[payload.long()]


def decode_e8m0(scale):
    """float64 values of E8M0 bytes (uint8): 2^(byte - 127), NaN for 255."""
    return _E8M0_VALUES[scale.long()]


def encode_e4m3(x):
    """E4M3 bytes of float64 values: clamp to ±448, then nearest, ties to the even code."""
    magnitude = x.abs().clamp(max=448.0).contiguous()
    below = torch.searchsorted(_MIDPOINTS, magnitude)  # midpoints < |x|
    upto = torch.searchsorted(_MIDPOINTS, magnitude, right=True)  # midpoints <= |x|
    # The two differ only on a tie, by one; an even code has an even fraction.
    code = torch.where(below % 2 == 0, below, upto)
    code = torch.where(torch.isnan(x), torch.full_like(code, 0x7F), code)
    return (code + 0x80 * torch.signbit(x)).to(torch.uint8)


def rceil_byte(amax):
    """E8M0 byte of the smallest power of two >= amax / 448, for blocks of largest magnitude amax."""
    mantissa, exponent = torch.frexp(amax)  # amax = mantissa · 2^exponent, 1/2 <= mantissa < 1
    byte = (exponent - 1) - 8 + 127 + (2 * mantissa > 1.75).int()
    byte = byte.clamp(0, 254)
    byte = torch.where(amax == 0, torch.full_like(byte, 127), byte)
    byte = torch.where(torch.isfinite(amax), byte, torch.full_like(byte, 255))
    return byte.to(torch.uint8)


def _quantise_block(x, dims):
    """(payload, scale) of one block: dims are the dimensions of x which share a scale."""
    scale = rceil_byte(x.abs().amax(dim=dims, keepdim=True))
    payload = encode_e4m3(x * _E8M0_INVERSES[scale.long()])  # all 0x7F where the scale is 255
    return torch.where(scale == 255, torch.full_like(payload, 0x7F), payload), scale


class Quantised(NamedTuple):
    """payload (B, S, H, D) uint8 E4M3; scale uint8 E8M0, shape as §1; axis."""

    payload: torch.Tensor
    scale: torch.Tensor
    axis: str

    def dequantise(self):
        """float64 values, NaN wherever the scale byte is 255."""
        return decode_e4m3(self.payload) * decode_e8m0(self.per_element_scale())

    def per_element_scale(self):
        if self.axis == "tokenwise":
            return self.scale.expand_as(self.payload)
        dim = 3 if self.axis == "rowwise" else 1
        scale = self.scale.repeat_interleave(BLOCK, dim=dim)
        return scale.narrow(dim, 0, self.payload.shape[dim])


def quantise(x, axis):
    """Quantises x to MXFP8 (E4M3, RCEIL).

    Args:
      x: (B, S, H, D), any float dtype that float64 holds exactly.
      axis: "rowwise" (32 along D), "colwise" (32 along S), "tokenwise" (all of D).
    Returns: Quantised.
    """
    x = x.detach().double()
    dim = {"rowwise": 3, "colwise": 1, "tokenwise": 3}[axis]
    if x.shape[dim] == 0:
        empty = torch.zeros(x.shape, dtype=torch.uint8)
        return Quantised(empty, empty, axis)
    size = x.shape[dim] if axis == "tokenwise" else BLOCK
    blocks = [_quantise_block(block, dim) for block in x.split(size, dim=dim)]
    payload = torch.cat([payload for payload, _ in blocks], dim=dim)
    scale = torch.cat([scale for _, scale in blocks], dim=dim)
    if axis == "tokenwise":  # the scale becomes a factor of P; the payload itself stays finite
        payload = torch.where(scale == 255, torch.zeros_like(payload), payload)
    return Quantised(payload, scale, axis)


# ---- §2: visible keys -------------------------------------------------------------------------


def _limits(causal, window):
    left, right = window
    return left, 0 if causal else right


def visible_keys(i, seqlen_q, seqlen_k, left, right):
    """range of the keys which query i sees (bottom-right alignment, -1 = unlimited)."""
    diagonal = i + seqlen_k - seqlen_q
    first = 0 if left < 0 else max(0, diagonal - left)
    last = seqlen_k - 1 if right < 0 else min(seqlen_k - 1, diagonal + right)
    return range(first, max(first, last + 1))


def _is_full(query_tile, key_tile, seqlen_q, seqlen_k, left, right):
    """Whether every row of the query tile sees every key of the key tile."""
    return all(
        seen.start <= key_tile.start and key_tile.stop <= seen.stop
        for seen in (visible_keys(i, seqlen_q, seqlen_k, left, right) for i in query_tile)
    )


def _tiles(length, size):
    return [range(start, min(start + size, length)) for start in range(0, length, size)]


# ---- §3: forward ------------------------------------------------------------------------------


class ReferenceForward(NamedTuple):
    """out (B, Sq, Hq, D) and lse (B, Hq, Sq) in float64; the operands as bytes; the options.

    slack (B, Sq, Hq, D) says how far an fp32 implementation of the same contract may be from out:
    a P that stands at a rounding boundary may become either neighbour there.
    """

    out: torch.Tensor
    lse: torch.Tensor
    slack: torch.Tensor
    q_row: Quantised
    q_col: Quantised
    k_row: Quantised
    k_col: Quantised
    v_col: Quantised
    v_tok: Quantised
    softmax_scale: float
    left: int
    right: int


def _quantise_p_full(p, n):
    """P of a full tile as the product sees it: one scale per row and tile. p (..., keys)."""
    return decode_e4m3(encode_e4m3(256 * p)) * 2.0 ** (n - 8)


def _quantise_p_cut(p, seen, n, v_factor):
    """P of a cut tile: the token scales go into it, 32 keys of the row share one scale.

    p (..., keys); seen (keys,) bool; v_factor (keys,). The right operand is V's payload.
    """
    folded = torch.where(seen, p * v_factor, torch.zeros_like(p))
    blocks = []
    for block in folded.split(BLOCK, dim=-1):
        byte = rceil_byte(block.abs().amax(dim=-1, keepdim=True)).int()
        moved = byte.clamp(max(0, -n), min(254, 254 - n))
        byte = torch.where(byte == 255, byte, moved)
        payload = encode_e4m3(block * _E8M0_INVERSES[byte])
        blocks.append(decode_e4m3(payload) * decode_e8m0(byte) * 2.0**n)  # NaN where byte is 255
    return torch.cat(blocks, dim=-1)


def _times(p, v):
    """(keys,) times (keys, D). No BLAS: 0 · NaN must be NaN."""
    return (p[:, None] * v).sum(dim=0)


def _forward_row(x, doubt, seen, is_full, v_col, v_payload, v_factor):
    """One query row of one head.

    Args:
      x: (Sk,) logits in bits.   doubt: relative error of p that fp32 logits may cause.
      seen: range of the visible keys.   is_full: per key tile.
      v_col: (Sk, D); v_payload: (Sk, D), v_factor: (Sk,) tokenwise.
    Returns: O (D,), LSE (float), slack (D,) of O.
    """
    acc = torch.zeros(v_col.shape[1], dtype=torch.float64)
    slack = torch.zeros_like(acc)
    row_sum = torch.zeros(3, dtype=torch.float64)  # l, l_q, and the slack of l_q
    reference = None  # r
    for index, tile in reversed(list(enumerate(_tiles(len(x), TILE)))):
        first, stop = max(tile.start, seen.start), min(tile.stop, seen.stop)
        if first >= stop:
            continue  # n = -119 with nothing to add
        maximum = float(x[first:stop].amax())
        if math.isnan(maximum):
            return torch.full_like(acc, NAN), NAN, slack
        if reference is None:
            reference = maximum
        n = max(math.ceil(maximum - reference), -119)
        if n > 60:
            shrink = 2.0 ** (reference - maximum)
            acc, slack, row_sum = acc * shrink, slack * shrink, row_sum * shrink
            reference, n = maximum, 0

        p = torch.zeros(len(tile), dtype=torch.float64)
        p[first - tile.start : stop - tile.start] = torch.exp2(x[first:stop] - reference - n)
        row_sum[0] += 2.0**n * p.sum()
        p = torch.stack([p, p * (1 - doubt), p * (1 + doubt)])
        p_max = p.amax(dim=-1)
        p_max_rounded = decode_e4m3(encode_e4m3(256 * p_max)) / 256
        row_sum[1] += 2.0**n * (p_max_rounded[0] - p_max[0])
        row_sum[2] += 2.0**n * (p_max_rounded[2] - p_max_rounded[1])

        keys = slice(tile.start, tile.stop)
        if is_full[index]:
            v = v_col[keys]
            rounded, lowest, highest = _quantise_p_full(p, n)
        else:
            v = v_payload[keys]
            is_seen = torch.tensor([k in seen for k in tile])
            rounded, lowest, highest = _quantise_p_cut(p, is_seen, n, v_factor[keys])
        acc = acc + _times(rounded, v)
        slack = slack + _times(highest - lowest + doubt * rounded, v.abs())
    if reference is None:
        return acc, -INF, slack
    total = row_sum[0] + row_sum[1]
    out = acc / total
    slack = (slack + out.abs() * (row_sum[2] + doubt * total)) / total
    return out, (math.log2(row_sum[0]) + reference) * math.log(2), slack


def attention_forward(q, k, v, softmax_scale=None, causal=False, window=(-1, -1), exp2_error=0.0):
    """MXFP8 attention by docs/numerics.md §3 in float64.

    Args:
      q: (B, Sq, Hq, D); k, v: (B, Sk, Hkv, D), Hq a multiple of Hkv.
      softmax_scale: D^-0.5 by default.   causal, window: §2.
      exp2_error: relative error of exp2 in the implementation that `slack` is to hold for.
    Returns: ReferenceForward. A packed batch is one call per sequence.
    """
    batch, seqlen_q, nheads, head_dim = q.shape
    seqlen_k, nheads_k = k.shape[1:3]
    left, right = _limits(causal, window)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    result = ReferenceForward(
        out=torch.zeros(q.shape, dtype=torch.float64),
        lse=torch.full((batch, nheads, seqlen_q), -INF, dtype=torch.float64),
        slack=torch.zeros(q.shape, dtype=torch.float64),
        q_row=quantise(q, "rowwise"),
        q_col=quantise(q, "colwise"),
        k_row=quantise(k, "rowwise"),
        k_col=quantise(k, "colwise"),
        v_col=quantise(v, "colwise"),
        v_tok=quantise(v, "tokenwise"),
        softmax_scale=scale,
        left=left,
        right=right,
    )
    q_values, k_values, v_values = (
        t.dequantise() for t in (result.q_row, result.k_row, result.v_col)
    )
    v_payload, v_factor = decode_e4m3(result.v_tok.payload), decode_e8m0(result.v_tok.scale)
    key_tiles = _tiles(seqlen_k, TILE)
    to_bits = scale * math.log2(math.e)
    for query_tile in _tiles(seqlen_q, TILE):
        is_full = [_is_full(query_tile, t, seqlen_q, seqlen_k, left, right) for t in key_tiles]
        for b in range(batch):
            for h in range(nheads):
                hk = h // (nheads // nheads_k)
                x = q_values[b, :, h] @ k_values[b, :, hk].T * to_bits
                # fp32 sums err by a few 2^-24 of the sum of magnitudes, and 2^error is 1 + ln2·error.
                magnitude = q_values[b, :, h].abs() @ k_values[b, :, hk].abs().T * abs(to_bits)
                for i in query_tile:
                    keys = visible_keys(i, seqlen_q, seqlen_k, left, right)
                    largest = magnitude[i, keys.start : keys.stop].max() if len(keys) else 0.0
                    row = _forward_row(
                        x[i],
                        float(2.0**-22 * max(largest, 1.0)) + exp2_error,
                        keys,
                        is_full,
                        v_values[b, :, hk],
                        v_payload[b, :, hk],
                        v_factor[b, :, hk, 0],
                    )
                    result.out[b, i, h], result.lse[b, h, i], result.slack[b, i, h] = row
    return result


# ---- §4: backward -----------------------------------------------------------------------------


class ReferenceBackward(NamedTuple):
    """dq, dk, dv in float64, shaped as q, k, v; the bytes of dO."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    do_row: Quantised
    do_col: Quantised


def _p_and_ds(q, k, v, do, delta, lse, scale, seen):
    """P (Sq, Sk) and dS (Sq, Sk) of one head before they are quantised; 0 where not seen.

    q, do (Sq, D), k, v (Sk, D) dequantised; delta, lse (Sq,); seen: range of keys per row.
    """
    logits = q @ k.T * (scale * math.log2(math.e))
    dp = do @ v.T
    p, ds = torch.zeros_like(logits), torch.zeros_like(logits)
    for i, keys in enumerate(seen):
        if len(keys) == 0 or lse[i] == -INF:
            continue
        at = slice(keys.start, keys.stop)
        # P <= 1, also where |x| is so large that the difference is nothing but rounding.
        exponent = (logits[i, at] - lse[i] * math.log2(math.e)).clamp(max=0.0)
        p[i, at] = torch.exp2(exponent)
        ds[i, at] = p[i, at] * (dp[i, at] - delta[i])
    return p, ds


def _quantised_values(x, dims):
    payload, scale = _quantise_block(x, dims)
    return decode_e4m3(payload) * decode_e8m0(scale)


def attention_backward(dout, forward, out=None, lse=None):
    """Gradients by docs/numerics.md §4 in float64.

    Args:
      dout: (B, Sq, Hq, D).   forward: what attention_forward returned.
      out: O as the forward handed it to the user (any dtype); default forward.out.
      lse: (B, Hq, Sq) natural log; default forward.lse.
    Returns: ReferenceBackward.
    """
    out = forward.out if out is None else out
    lse = forward.lse if lse is None else lse.double()
    dout = dout.detach().double()
    batch, seqlen_q, nheads, _ = dout.shape
    seqlen_k, nheads_k = forward.k_row.payload.shape[1:3]
    do_row, do_col = quantise(dout, "rowwise"), quantise(dout, "colwise")
    result = ReferenceBackward(
        dq=torch.zeros(dout.shape, dtype=torch.float64),
        dk=torch.zeros(forward.k_row.payload.shape, dtype=torch.float64),
        dv=torch.zeros(forward.v_col.payload.shape, dtype=torch.float64),
        do_row=do_row,
        do_col=do_col,
    )
    q_row, k_row, v_tok = (t.dequantise() for t in (forward.q_row, forward.k_row, forward.v_tok))
    q_col, k_col = forward.q_col.dequantise(), forward.k_col.dequantise()
    do_row_values, do_col_values = do_row.dequantise(), do_col.dequantise()
    delta = (do_row_values * out.detach().double()).sum(dim=-1)  # (B, Sq, Hq)
    seen = [
        visible_keys(i, seqlen_q, seqlen_k, forward.left, forward.right) for i in range(seqlen_q)
    ]
    scale = forward.softmax_scale
    for b in range(batch):
        for h in range(nheads):
            hk = h // (nheads // nheads_k)
            p, ds = _p_and_ds(
                q_row[b, :, h],
                k_row[b, :, hk],
                v_tok[b, :, hk],
                do_row_values[b, :, h],
                delta[b, :, h],
                lse[b, h],
                scale,
                seen,
            )
            for queries in _tiles(seqlen_q, BLOCK):
                for keys in _tiles(seqlen_k, BLOCK):
                    if all(
                        max(seen[i].start, keys.start) >= min(seen[i].stop, keys.stop)
                        for i in queries
                    ):
                        continue  # no visible pair: nothing to add
                    at_q, at_k = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
                    p_values = _quantised_values(p[at_q, at_k], 0)  # per key, over the queries
                    ds_values = _quantised_values(ds[at_q, at_k], (0, 1))  # one scale for the block
                    result.dv[b, at_k, hk] += p_values.T @ do_col_values[b, at_q, h]
                    result.dk[b, at_k, hk] += scale * (ds_values.T @ q_col[b, at_q, h])
                    result.dq[b, at_q, h] += scale * (ds_values @ k_col[b, at_k, hk])
    return result


# ---- attention with no quantisation -----------------------------------------------------------


def attention_fp64(q, k, v, softmax_scale=None, causal=False, window=(-1, -1)):
    """Plain float64 attention with the same masks; differentiable, so autograd gives exact gradients.

    Args: as attention_forward.
    Returns: out (B, Sq, Hq, D), lse (B, Hq, Sq). A row that sees no key: 0, -inf, zero gradients.
    """
    seqlen_q, nheads, head_dim = q.shape[1:]
    seqlen_k, nheads_k = k.shape[1:3]
    left, right = _limits(causal, window)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    group = nheads // nheads_k if nheads_k else 1
    q = q.double()
    k, v = (t.double().repeat_interleave(group, dim=2) for t in (k, v))

    visible = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)
    for i in range(seqlen_q):
        keys = visible_keys(i, seqlen_q, seqlen_k, left, right)
        visible[i, keys.start : keys.stop] = True
    if seqlen_k == 0:  # amax has no value over no keys
        return q * 0, torch.full((q.shape[0], nheads, seqlen_q), -INF, dtype=torch.float64)

    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    scores = scores.masked_fill(~visible, -INF)
    maximum = scores.detach().amax(dim=-1, keepdim=True)
    maximum = maximum.masked_fill(maximum == -INF, 0.0)
    weights = torch.exp(scores - maximum)
    total = weights.sum(dim=-1, keepdim=True)
    sees_none = total == 0
    total = total.masked_fill(sees_none, 1.0)
    out = torch.einsum("bhqk,bkhd->bqhd", weights / total, v)
    lse = (maximum + torch.log(total)).masked_fill(sees_none, -INF)
    return out, lse.squeeze(-1)
