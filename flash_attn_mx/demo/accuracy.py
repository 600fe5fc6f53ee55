"""Part 3 of the demo: how far four ways of attention are from float64, on seven kinds of input.

Ours runs through the public API, forward and backward. The other three are simulated here in
PyTorch with fp32 products and sums, rounding where their documents or open sources say that they
round; a `Scheme` states each choice. All take the same fp32 inputs and return fp32, so that only
the rounding inside differs.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import textwrap
from collections.abc import Callable
from typing import Optional

import torch

from flash_attn_mx.demo import report

Tensor = torch.Tensor
LOG2_E = math.log2(math.e)
E4M3_MAX = 448.0
TILE = 128  # keys per tile: the running maximum is known for one tile after the other
GRADS = ("O", "dQ", "dK", "dV")

# --------------------------------------------------------------------------------------------------
# Roundings. Every function takes fp32 and returns the fp32 values that the rounded operand stands
# for.


def to_bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def to_e4m3(x: Tensor) -> Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def per_head(x: Tensor) -> Tensor:
    """E4M3 with one fp32 scale for each head of (H, S, D)."""
    scale = x.abs().amax(dim=(1, 2), keepdim=True).clamp_min(1e-30) / E4M3_MAX
    return to_e4m3(x / scale) * scale


SCALES = {  # from amax / 448 to the scale; all but "fp32" give powers of two
    "rceil": lambda ratio: torch.exp2(torch.ceil(torch.log2(ratio))),
    "floor": lambda ratio: torch.exp2(torch.floor(torch.log2(ratio * 1.75))),  # 448 = 1.75 * 2^8
    "nearest": lambda ratio: torch.exp2(torch.round(torch.log2(ratio))),
    "fp32": lambda ratio: ratio,
}


def _scaled(y: Tensor, dims: tuple[int, ...], rounding: str) -> Tensor:
    """E4M3 of y with one scale for all values along `dims`."""
    ratio = y.abs().amax(dims, keepdim=True).double() / E4M3_MAX
    scale = SCALES[rounding](ratio.clamp_min(2.0**-127)).float()
    return to_e4m3(y / scale) * scale


def mx(dim: int, size: int = 32, rounding: str = "rceil") -> Callable[[Tensor], Tensor]:
    """E4M3, one scale per `size` values along `dim`; "rceil" takes the smallest power of two that clips nothing."""

    def quantise(x: Tensor) -> Tensor:
        length = x.shape[dim]
        y = x.movedim(dim, -1)
        y = torch.nn.functional.pad(y, (0, -length % size)).unflatten(-1, (-1, size))
        return _scaled(y, (-1,), rounding).flatten(-2)[..., :length].movedim(-1, dim)

    return quantise


def square(size: int = 32, rounding: str = "rceil") -> Callable[[Tensor], Tensor]:
    """E4M3, one scale per `size` x `size` values of (H, rows, columns)."""

    def quantise(x: Tensor) -> Tensor:
        rows, columns = x.shape[-2:]
        y = torch.nn.functional.pad(x, (0, -columns % size, 0, -rows % size))
        y = y.unflatten(-2, (-1, size)).unflatten(-1, (-1, size))
        return _scaled(y, (-1, -3), rounding).flatten(-2).flatten(-3, -2)[..., :rows, :columns]

    return quantise


def per_token(x: Tensor) -> Tensor:
    """E4M3, one power-of-two scale for each row."""
    return _scaled(x, (-1,), "rceil")


def constant(offset: int) -> Callable[[Tensor], Tensor]:
    """E4M3 of x * 2^offset: the same scale everywhere, chosen before any data is seen."""
    return lambda x: to_e4m3(x * 2.0**offset) * 2.0**-offset


# --------------------------------------------------------------------------------------------------
# The schemes that are compared with ours.


@dataclasses.dataclass(frozen=True)
class Scheme:
    """Where a flash attention rounds. Tensors are (H, S, D), probabilities and dS (H, Sq, Sk)."""

    qk: Callable  # Q and K in S = Q Kᵀ
    v: Callable  # V in O = P V
    p: Callable  # P in O = P V; P = 2^(x - reference)
    threshold: float  # how far, in powers of two, the row maximum may exceed the reference
    q_dk: Callable  # Q in dK = dSᵀ Q
    k_dq: Callable  # K in dQ = dS K
    v_dp: Callable  # V in dP = dO Vᵀ
    do_dp: Callable  # dO in dP = dO Vᵀ
    do_dv: Callable  # dO in dV = Pᵀ dO
    p_dv: Callable  # P in dV = Pᵀ dO
    ds_dk: Callable  # dS in dK
    ds_dq: Callable  # dS in dQ
    # What our contract does otherwise (docs/numerics.md):
    tile_exponent: bool = (
        False  # a tile's reference is a whole power of two from the first tile's, up or down
    )
    dominant: bool = False  # O is divided by a sum in which each tile's largest P counts as rounded
    delta_do: Optional[Callable] = (
        None  # delta from fp32 O and this dO; None: from O and dO in bf16
    )


# FlashAttention-2 and -3 in bf16: all operands, P and dS are bf16; sums are fp32.
BF16 = Scheme(*(to_bf16,) * 3, 0.0, *(to_bf16,) * 8)

# FlashAttention-3's FP8 forward: Q, K, V in E4M3 with one fp32 scale per head (its descale_q,
# descale_k, descale_v); P in E4M3 with constant scale 2^8 against the running maximum (its
# Max_offset = 8), threshold 0. It takes the scales from its caller; here they come from the data,
# which is the best case. It has no FP8 backward: we take the usual one for per-tensor FP8, with a
# constant scale for P, which is at most 1, and one scale per head for dO and dS.
PER_TENSOR = Scheme(
    qk=per_head,
    v=per_head,
    p=constant(8),
    threshold=0.0,
    q_dk=per_head,
    k_dq=per_head,
    v_dp=per_head,
    do_dp=per_head,
    do_dv=per_head,
    p_dv=constant(8),
    ds_dk=per_head,
    ds_dq=per_head,
)

# MXFP8 with constant P scales, as cuDNN's MXFP8 attention: forward 2^4 and a lazy reference that
# moves only when the maximum has grown by more than 2^4; backward 2^8; Q, K, V, dO and dS in
# 32-blocks along whatever each product sums over (two quantisations of each). cuDNN's backward for
# D <= 128 is closed; this follows the reference in its published tests. Other open MXFP8 kernels use
# the same constant 2^8 in the backward.
FIXED_MX = Scheme(
    qk=mx(-1),
    v=mx(-2),
    p=constant(4),
    threshold=4.0,
    q_dk=mx(-2),
    k_dq=mx(-2),
    v_dp=mx(-1),
    do_dp=mx(-1),
    do_dv=mx(-2),
    p_dv=constant(8),
    ds_dk=mx(-2),
    ds_dq=mx(-1),
)


# Our own rounding places, for one-at-a-time changes (flash_attn_mx/study.py). Tiles that a mask cuts are not told apart: V has
# 32-token scales throughout, so with a mask the public function is the better witness.
CONTRACT = Scheme(
    qk=mx(-1),
    v=mx(-2),
    p=constant(8),
    threshold=0.0,
    q_dk=mx(-2),
    k_dq=mx(-2),
    v_dp=per_token,
    do_dp=mx(-1),
    do_dv=mx(-2),
    p_dv=mx(-2),
    ds_dk=square(),
    ds_dq=square(),
    tile_exponent=True,
    dominant=True,
    delta_do=mx(-1),
)


def _tiles(x: Tensor, value: float) -> Tensor:
    """(H, Sq, Sk) -> (H, Sq, tiles, 128), padded with `value`."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % TILE), value=value).unflatten(
        -1, (-1, TILE)
    )


def _reference(scheme: Scheme, x: Tensor, last_to_first: bool) -> Tensor:
    """The reference of each row at each key tile: (H, Sq, tiles), in the order of the keys."""
    tiles = _tiles(x, -math.inf).amax(-1)
    tiles = tiles.flip(-1) if last_to_first else tiles
    if scheme.tile_exponent:
        seen = ~tiles.isneginf()
        first = tiles.gather(-1, seen.int().argmax(-1, keepdim=True))
        stacked = torch.where(seen, first + (tiles - first).ceil(), first)
        return stacked.flip(-1) if last_to_first else stacked
    threshold = scheme.threshold
    reference = torch.full_like(tiles[..., 0], -math.inf)
    steps = []
    for maximum in tiles.unbind(-1):
        moves = (maximum > reference + threshold) | reference.isneginf()
        reference = torch.where(moves, maximum, reference)
        steps.append(reference)
    stacked = torch.stack(steps, -1)
    return stacked.flip(-1) if last_to_first else stacked


def _logits(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    x = q @ k.mT * scale
    if causal:
        hidden = torch.ones(x.shape[-2:], dtype=torch.bool).triu_(1 + x.shape[-1] - x.shape[-2])
        x.masked_fill_(hidden, -math.inf)
    return x


def simulate(scheme: Scheme, q, k, v, dout, causal: bool = False, last_to_first: bool = True):
    """(O, dQ, dK, dV) of one scheme, all (H, S, D) fp32. Every query must see a key.

    Key tiles are visited last to first as FlashAttention does: the kinder order for lazy references
    when key 0 is a sink.
    """
    scale = q.shape[-1] ** -0.5
    x = _logits(scheme.qk(q), scheme.qk(k), scale * LOG2_E, causal)

    # Forward. A tile's P is rounded against the reference of its time; later moves of the reference
    # rescale exactly.
    reference = _reference(scheme, x, last_to_first)
    final = reference[..., :1] if last_to_first else reference[..., -1:]
    tile_of_key = torch.arange(x.shape[-1]) // TILE
    at_key = reference.nan_to_num(neginf=0.0)[..., tile_of_key]
    p = torch.exp2(x - at_key)
    rescale = torch.exp2(reference - final)[..., tile_of_key]
    row_sum = (p * rescale).sum(-1, keepdim=True)
    divisor = row_sum
    if scheme.dominant:
        largest = _tiles(p, 0.0).amax(-1)
        gained = (scheme.p(largest) - largest) * torch.exp2(reference - final)
        divisor = row_sum + gained.sum(-1, keepdim=True)
    out = (scheme.p(p) * rescale) @ scheme.v(v) / divisor
    lse = torch.log2(row_sum) + final

    # Backward, from the same logits and the row statistics. delta comes from O and dO in bf16, as in
    # FlashAttention's preprocessing, cuDNN's test reference and the open MXFP8 kernels.
    p = torch.exp2(x - lse)
    if scheme.delta_do is None:
        delta = (to_bf16(out) * to_bf16(dout)).sum(-1, keepdim=True)
    else:
        delta = (out * scheme.delta_do(dout)).sum(-1, keepdim=True)
    ds = p * (scheme.do_dp(dout) @ scheme.v_dp(v).mT - delta)
    dv = scheme.p_dv(p).mT @ scheme.do_dv(dout)
    dk = scheme.ds_dk(ds).mT @ scheme.q_dk(q) * scale
    dq = scheme.ds_dq(ds) @ scheme.k_dq(k) * scale
    return out, dq, dk, dv


def exact(q, k, v, dout, causal: bool = False):
    """(O, dQ, dK, dV) in float64, from the formulas."""
    q, k, v, dout = (t.double() for t in (q, k, v, dout))
    scale = q.shape[-1] ** -0.5
    p = _logits(q, k, scale, causal).softmax(-1)
    out = p @ v
    ds = p * (dout @ v.mT - (out * dout).sum(-1, keepdim=True))
    return out, ds @ k * scale, ds.mT @ q * scale, p.mT @ dout


def through_api(attention: Callable, q, k, v, dout, causal: bool = False):
    """(O, dQ, dK, dV) of `attention(q, k, v, causal=...)` on (B, S, H, D), by autograd."""
    leaves = [t.transpose(0, 1)[None].contiguous().requires_grad_() for t in (q, k, v)]
    out = attention(*leaves, causal=causal)
    grads = torch.autograd.grad(out, leaves, dout.transpose(0, 1)[None])
    return tuple(t.detach()[0].transpose(0, 1).float() for t in (out, *grads))


# --------------------------------------------------------------------------------------------------
# Inputs


@dataclasses.dataclass(frozen=True)
class Case:
    """One kind of input; `make(generator, small)` gives q, k, v, dO of shape (H, S, D) in fp32."""

    title: str
    what: str
    make: Callable
    causal: bool = False


def _normal(g: torch.Generator, small: bool, queries: int = 1024, keys: int = 1024, dim: int = 128):
    if small:
        queries, keys, dim = min(queries, 192), min(keys // 4, 1024), 64
    shapes = (queries, keys, keys, queries)
    return [torch.randn((1, rows, dim), generator=g) for rows in shapes]


def _outlier_channel(g, small):
    q, k, v, dout = _normal(g, small)
    k[..., [3, 17, 40]] += 30.0
    q[..., [9, 50]] += 30.0
    return q, k, v, dout


def _outlier_token(g, small):
    q, k, v, dout = _normal(g, small)
    tokens = torch.tensor([5, 70, 71, 200]) % k.shape[1]
    k[:, tokens] *= 4.0
    v[:, tokens] *= 50.0
    return q, k, v, dout


def _sink(g, small):
    q, k, v, dout = _normal(g, small)
    dim = q.shape[-1]
    direction = torch.randn(dim, generator=g)
    q += direction
    k[:, 0] = direction * (
        12.0 * math.sqrt(dim) / direction.square().sum()
    )  # q · k[0] / sqrt(dim) = 12 + noise
    return q, k, v, dout


def _long_context(g, small):
    q, k, v, dout = _normal(g, small, queries=64, keys=65536)
    return q * 0.5, k, v, dout


def _uneven_gradient(g, small):
    q, k, v, dout = _normal(g, small)
    return q, k, v, dout * torch.exp2(torch.rand((1, q.shape[1], 1), generator=g) * -16.0)


CASES = {
    "normal": Case("normal", "standard normal Q, K, V, dO; 1024 tokens", _normal),
    "causal": Case("causal", "the same with a causal mask", _normal, causal=True),
    "outlier_channel": Case(
        "outlier channels", "3 channels of K and 2 others of Q are offset by 30", _outlier_channel
    ),
    "outlier_token": Case(
        "outlier tokens", "V of 4 tokens is 50 times larger and their K 4 times", _outlier_token
    ),
    "sink": Case("attention sink", "every query gives key 0 a logit of about +12", _sink),
    "long_context": Case(
        "long context", "64 queries over 65536 keys, every P is tiny", _long_context
    ),
    "uneven_gradient": Case(
        "uneven gradients", "dO of each token is 2^-16 to 1 times normal", _uneven_gradient
    ),
}

# --------------------------------------------------------------------------------------------------
# Measuring

SIMULATED = {"bf16": BF16, "fp8": PER_TENSOR, "mx_fixed": FIXED_MX}
NAMES = {  # in the order of tables and plots: column head, what it is
    "bf16": ("BF16", "bfloat16 attention, 16 bits"),
    "fp8": ("FP8", "one fp32 scale per tensor and head, as FlashAttention-3; P times 2^8"),
    "mx_fixed": ("fixed", "MXFP8 with constant scales for P (2^4 forward, 2^8 backward), as peers"),
    "ours": (
        "ours",
        "flash_attn_mx: MXFP8, a scale for each block of P, delta from the rounded dO",
    ),
}


def errors(got: Tensor, wanted: Tensor) -> dict[str, float]:
    """Relative errors: whole tensor (Frobenius), median row, 95th percentile of rows."""
    difference = got.double() - wanted
    rows = difference.norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-300)
    middle, bad = rows.flatten().quantile(torch.tensor([0.5, 0.95], dtype=torch.float64)).tolist()
    return {
        "whole": (difference.norm() / wanted.norm()).item(),
        "median_row": middle,
        "row_95": bad,
    }


def future_leak(forward: Callable, tokens: int = 320, cut: int = 200) -> dict[str, float]:
    """Changes V from token `cut` on; counts earlier rows of causal attention that change."""
    g = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn((1, tokens, 64), generator=g) for _ in range(3))
    changed = v.clone()
    changed[:, cut:] = 1000.0 * torch.randn((1, tokens - cut, 64), generator=g)
    before, after = (forward(q, k, value)[:, :cut] for value in (v, changed))
    change = (after - before).norm(dim=-1) / before.norm(dim=-1)
    return {
        "rows": cut,
        "rows_changed": (before != after).any(-1).sum().item(),
        "largest_change": change.max().item(),
    }


def _measure(attention: Callable, progress: report.Progress, quick: bool) -> dict:
    cases, steps, done = {}, len(CASES) * (len(NAMES) + 1), 0
    for name, case in CASES.items():
        inputs = case.make(torch.Generator().manual_seed(0), quick)
        progress.update(done / steps, f"{case.title}, float64")
        wanted = exact(*inputs, causal=case.causal)
        cases[name] = {}
        for scheme in NAMES:
            done += 1
            progress.update(done / steps, f"{case.title}, {NAMES[scheme][0]}")
            if scheme == "ours":
                got = through_api(attention, *inputs, causal=case.causal)
            else:
                got = simulate(SIMULATED[scheme], *inputs, causal=case.causal)
            cases[name][scheme] = {t: errors(a, b) for t, a, b in zip(GRADS, got, wanted)}
        done += 1
    return cases


def _measure_leaks(attention: Callable) -> dict:
    def of_scheme(scheme):
        return lambda q, k, v: simulate(scheme, q, k, v, torch.zeros_like(q), causal=True)[0]

    def ours(q, k, v):
        return attention(*(t.transpose(0, 1)[None] for t in (q, k, v)), causal=True)[0].transpose(
            0, 1
        )

    forwards = {name: of_scheme(scheme) for name, scheme in SIMULATED.items()} | {"ours": ours}
    return {name: future_leak(forwards[name]) for name in NAMES}


# --------------------------------------------------------------------------------------------------
# Showing


def _percent(value: float) -> str:
    if value >= 99.995:
        return ">9999"[:5]
    return (
        f"{100 * value:.1f}"
        if 0.0005 <= value < 0.9995 or value == 0
        else f"{100 * value:.{0 if value > 0.5 else 2}f}"
    )


def _table(cases: dict, kind: str) -> list[str]:
    widths = dict(zip(NAMES, (4, 5, 6, 5)))
    head = "".join(f"{NAMES[scheme][0]:>{width}}" for scheme, width in widths.items())
    lines = [
        f"  {'':17}" + "".join(f"|{tensor:^21}" for tensor in GRADS),
        f"  {'input':17}" + f"|{head} " * len(GRADS),
        f"  {'-' * 17}" + f"+{'-' * 21}" * len(GRADS),
    ]
    for name, by in cases.items():
        groups = (
            "".join(
                f"{_percent(by[scheme][tensor][kind]):>{width}}" for scheme, width in widths.items()
            )
            for tensor in GRADS
        )
        lines.append(f"  {CASES[name].title:17}" + "".join(f"|{group} " for group in groups))
    return lines


def findings(cases: dict) -> dict[str, list[str]]:
    """Where ours and the better of the other 8-bit schemes differ by 30 %, and where all fail."""
    found = {"better": [], "worse": [], "bad": []}
    for name, by in cases.items():
        for tensor in GRADS:
            for kind, suffix in (("whole", ""), ("row_95", " (worst rows)")):
                ours = by["ours"][tensor][kind]
                other = min(by[scheme][tensor][kind] for scheme in ("fp8", "mx_fixed"))
                place = f"{CASES[name].title}, {tensor}{suffix}"
                if min(ours, other) > 0.25:
                    if kind == "whole":
                        found["bad"].append(f"{place} ({_percent(min(ours, other))} %)")
                elif not 1 / 1.3 <= ours / other <= 1.3:
                    where = "better" if ours < other else "worse"
                    found[where].append(f"{place} ({_percent(ours)} % against {_percent(other)} %)")
    return found


def _finding_lines(cases: dict) -> list[str]:
    titles = {
        "better": "Ours is clearly better than both other 8-bit ways",
        "worse": "Ours is clearly worse than the better of them",
        "bad": "No 8-bit way is good, BF16 is the right choice",
    }
    return [
        f"{titles[key]}: {'; '.join(places)}." for key, places in findings(cases).items() if places
    ]


def _leak_line(leaks: dict) -> str:
    def say(name):
        leak = leaks[name]
        if not leak["rows_changed"]:
            return f"{NAMES[name][0]} none"
        change = _percent(leak["largest_change"])
        return f"{NAMES[name][0]} {leak['rows_changed']} rows (by up to {change} %)"

    return ", ".join(say(name) for name in NAMES)


def _text(cases: dict, leaks: dict) -> list[str]:
    return [
        "Errors of the output O and of the three gradients against float64, in % of the exact "
        "tensor's norm. An 8-bit float with 3 fraction bits cannot go below about 5 % on "
        "noise-like data, whoever does it; the ways differ where data is not noise-like. BF16, "
        "FP8 and 'fixed' are simulations of what others do; 'ours' is the real thing.",
        *(f"  {head:6} {what}" for head, what in NAMES.values()),
        "",
        *_table(cases, "whole"),
        "",
        "The same for each row (token) by itself: one row in twenty is worse than this. Rows "
        "whose exact value nearly vanishes can exceed 100 %.",
        "",
        *_table(cases, "row_95"),
        "",
        *_finding_lines(cases),
        "Does a causal model see the future? V from token 200 on was made 1000 times larger. "
        "Outputs of tokens 0 to 199 that "
        "changed: " + _leak_line(leaks) + ".",
    ]


def _verdicts(cases: dict, leaks: dict) -> list[report.Verdict]:
    def worst(tensors, *names):
        return max(cases[name]["ours"][tensor]["whole"] for name in names for tensor in tensors)

    return [
        report.Verdict(
            "ours, normal and causal, error of O", worst(["O"], "normal", "causal"), "<=", 0.055
        ),
        report.Verdict(
            "ours, normal and causal, error of dQ and dK",
            worst(["dQ", "dK"], "normal", "causal"),
            "<=",
            0.070,
        ),
        report.Verdict(
            "ours, normal and causal, error of dV", worst(["dV"], "normal", "causal"), "<=", 0.058
        ),
        report.Verdict(
            "ours, long context, error of dV", worst(["dV"], "long_context"), "<=", 0.058
        ),
        report.Verdict(
            "ours, attention sink, error of dQ and dK", worst(["dQ", "dK"], "sink"), "<=", 0.15
        ),
        report.Verdict(
            "ours, earlier rows that see a changed future V", leaks["ours"]["rows_changed"], "==", 0
        ),
    ]


def _plot(cases: dict, path: pathlib.Path) -> None:
    plt = report.pyplot()
    styles = {
        "bf16": (report.GREY, "|"),
        "fp8": (report.ORANGE, "s"),
        "mx_fixed": (report.SKY, "^"),
        "ours": (report.BLACK, "o"),
    }
    figure, axes = plt.subplots(
        2, 4, figsize=(14, 7.2), sharex=True, sharey=True, layout="constrained"
    )
    for row, (kind, label) in enumerate(
        (("whole", "whole tensor"), ("row_95", "95th percentile of rows"))
    ):
        for axis, tensor in zip(axes[row], GRADS):
            for lane, (scheme, (colour, marker)) in enumerate(styles.items()):
                values = [
                    min(100 * by_scheme[scheme][tensor][kind], 200.0)
                    for by_scheme in cases.values()
                ]
                hollow = scheme != "ours" and marker != "|"
                axis.scatter(
                    values,
                    [y + 0.17 * (lane - 1.5) for y in range(len(values))],
                    s=90 if marker == "|" else 52,
                    marker=marker,
                    facecolors="none" if hollow else colour,
                    edgecolors=None if marker == "|" else colour,
                    linewidths=1.8,
                    label=f"{NAMES[scheme][0]}: {NAMES[scheme][1]}",
                    zorder=2 if scheme == "ours" else 3,
                )
            axis.set_xscale("log")
            axis.set_title(f"{tensor}, {label}")
    axes[0][0].set_yticks(range(len(cases)), [CASES[name].title for name in cases])
    axes[0][0].invert_yaxis()
    axes[0][0].set_xlim(0.15, 260)
    axes[0][0].set_xticks([0.2, 1, 5, 20, 100], ["0.2", "1", "5", "20", "100"])
    for axis in axes[1]:
        axis.set_xlabel("relative error, % (capped at 200)")
    figure.suptitle("Error of attention against float64: smaller is better", fontsize=13)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    figure.savefig(path)
    plt.close(figure)


def markdown(cases: dict, leaks: dict) -> str:
    """docs/accuracy.md."""
    lines = [
        "# Accuracy table",
        "",
        *textwrap.wrap(
            "Made by `python -m flash_attn_mx demo --only accuracy`, which writes "
            "`demo_out/accuracy.md`. Relative errors in % against float64 of the same fp32 inputs. "
            "*Ours* ran through `flash_attn_func`, forward and backward, on the portable path on a "
            "CPU (not run on sm_100). The others are simulations in "
            "`flash_attn_mx/demo/accuracy.py`, which states each rounding; cuDNN's backward for "
            "D <= 128 is closed, so *fixed* follows the reference in its published tests.",
            100,
        ),
        "",
        *(f"* **{head}**: {what}." for head, what in NAMES.values()),
        "",
    ]
    kinds = {
        "whole": "Whole tensor (Frobenius norm)",
        "median_row": "Median row",
        "row_95": "95th percentile of rows (one row in twenty is worse)",
    }
    for kind, title in kinds.items():
        lines += [f"## {title}", ""]
        lines += [
            "| input | " + " | ".join(f"{t} {NAMES[s][0]}" for t in GRADS for s in NAMES) + " |",
            "|---|" + "---:|" * (len(GRADS) * len(NAMES)),
        ]
        for name, by in cases.items():
            cells = (_percent(by[s][t][kind]) for t in GRADS for s in NAMES)
            lines.append(f"| {CASES[name].title} | " + " | ".join(cells) + " |")
        lines.append("")
    lines += ["## What differs", "", *(f"* {line}" for line in _finding_lines(cases)), ""]
    lines += [
        "## Inputs",
        "",
        *(f"* **{case.title}**: {case.what}." for case in CASES.values()),
        "",
    ]
    lines += [
        "D = 128, one head, not causal unless said.",
        "",
        "## Causality",
        "",
        "V of tokens 200 to 319 was replaced by values 1000 times larger; outputs of tokens 0 to "
        "199 whose bits changed:",
        "",
        "| scheme | rows changed of 200 | largest change of a row, % |",
        "|---|---:|---:|",
        *(
            f"| {NAMES[name][0]} | {leak['rows_changed']} | "
            f"{_percent(leak['largest_change']) if leak['rows_changed'] else 0} |"
            for name, leak in leaks.items()
        ),
        "",
    ]
    return "\n".join(lines)


def run(
    attention: Callable, out: pathlib.Path, progress: report.Progress, quick: bool = False
) -> report.Section:
    """Measures all cases and writes accuracy.png and accuracy.md to `out`.

    Args:
      attention: f(q, k, v, causal=...) on (B, S, H, D) with autograd: what is called "ours".
      out: an existing folder.   progress: the bar.   quick: small inputs, for tests.
    """
    cases = _measure(attention, progress, quick)
    leaks = _measure_leaks(attention)
    _plot(cases, out / "accuracy.png")
    (out / "accuracy.md").write_text(markdown(cases, leaks), encoding="utf-8")
    return report.Section(
        name="accuracy",
        title="Accuracy of four kinds of attention on seven kinds of input",
        text=_text(cases, leaks),
        figures={"relative_errors": cases, "future_leak": leaks},
        verdicts=_verdicts(cases, leaks),
        files=["accuracy.png", "accuracy.md"],
    )
