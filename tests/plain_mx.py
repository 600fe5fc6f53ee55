"""Attention in plain PyTorch, in fp32 or with every operand rounded to MXFP8, and the rule that compares with it.

The rule is flash-attention's and torch's: the largest error may be twice that of a plain implementation of the same
precision. MXFP8's errors are few and large: where one weight dominates a row, the largest of a tensor is that of one product
that stood at a rounding boundary, and an implementation that multiplies it by something else before it is rounded errs by
half as much, or twice. So "a plain implementation" is several of them here, which differ in what the contract of the format
leaves open (EVERY_VARIANT), and the largest error is that of the worst one; a grid tries three of them first (VARIANTS), and
all where these are not enough. The root mean square error of the three, which hardly
knows luck, is the measure besides, without a factor of two. Some luck is left in it where rows are few, since the
values of a row share their errors: over n of them it fluctuates by 1 / sqrt(2 n), and the ratio of two by 1 / sqrt(n).
"""

import contextlib
import itertools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

TILE = 128  # keys


def rms_factor(x):
    """How much larger than the worst plain implementation's the RMS error of x (B, S, H, D) may be.

    dO in E5M2 instead of E4M3 gives 1.15, with 678 rows (test_grid_rule_can_fail); one query in six heads gave 1.14.
    """
    return 1.1 + (x.numel() // x.shape[-1]) ** -0.5


def visible(seqlen_q, seqlen_k, causal, window):
    """(Sq, Sk) bool, aligned bottom-right."""
    row = torch.arange(seqlen_q).unsqueeze(1) + seqlen_k - seqlen_q
    key = torch.arange(seqlen_k)
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if window[0] >= 0:
        seen &= key >= row - window[0]
    right = 0 if causal else window[1]
    if right >= 0:
        seen &= key <= row + right
    return seen


def mx_round(x, dim):
    """x rounded to E4M3 with one power-of-two scale (rounded up) per 32 values along dim."""
    x = x.movedim(dim, -1)
    size = x.shape[-1]
    blocks = F.pad(x, (0, -size % 32)).unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    rounded = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(-2)[..., :size].movedim(-1, dim)


class Variant(NamedTuple):
    """What an implementation in MXFP8 may choose; power-of-two factors would change nothing.

    order: in which the key tiles are visited, each with the running maximum as reference; None = the whole row at once.
    factor: of P and dS while they are rounded: 448 fills E4M3's range.   fold: the softmax scale goes into dS before it is
    rounded, and delta is taken from the unrounded dO.   nudge: if not 0, seed of relative noise of at most 1e-6 on what is
    rounded, as another order of fp32 sums makes it: a value at a rounding boundary may fall to either side.
    """

    order: str | None = None
    factor: float = 1.0
    fold: bool = False
    nudge: int = 0

    def rounding(self):
        """mx_round, after the noise."""
        if not self.nudge:
            return mx_round
        generator = torch.Generator().manual_seed(self.nudge)

        def noisy(x, dim):
            return mx_round(x * (1 + (torch.rand(x.shape, generator=generator) - 0.5) * 2e-6), dim)

        return noisy


VARIANTS = (Variant(), Variant("first to last", fold=True), Variant("last to first", factor=448.0))
_CHOICES = itertools.product((None, "first to last", "last to first"), (1.0, 448.0), (False, True))
_NUDGED = tuple(Variant(nudge=seed) for seed in range(1, 9))
# VARIANTS first, and each once.
EVERY_VARIANT = tuple(dict.fromkeys((*VARIANTS, *itertools.starmap(Variant, _CHOICES), *_NUDGED)))
_variants = VARIANTS


@contextlib.contextmanager
def every_variant():
    """attentions() with all of them: seven times the work, and never less to compare with."""
    global _variants
    _variants = EVERY_VARIANT
    try:
        yield
    finally:
        _variants = VARIANTS


def _reference(s, order):
    """The value that is subtracted from each score before exp: (.., Sq, 1) or (.., Sq, Sk)."""
    if order is None:
        return s.amax(-1, keepdim=True)
    tiles = F.pad(s, (0, -s.shape[-1] % TILE), value=-math.inf).unflatten(-1, (-1, TILE)).amax(-1)
    if order == "last to first":
        running = tiles.flip(-1).cummax(-1).values.flip(-1)
    else:
        running = tiles.cummax(-1).values
    return running.repeat_interleave(TILE, -1)[..., : s.shape[-1]]


def _finite(x):
    """Rows that see nothing have a reference of -inf."""
    return x.masked_fill(x == -math.inf, 0.0)


def attention(q, k, v, dout, seen, scale=None, variant=None):
    """(out, dq, dk, dv), (B, S, H, D) fp32, written out.

    seen: (Sq, Sk) bool.   variant: every operand of every product goes through mx_round, in that way; None: nothing does.
    """
    r = (lambda x, dim: x) if variant is None else variant.rounding()
    variant = variant or Variant()
    group = q.shape[2] // k.shape[2]
    q, dout = (x.float().transpose(1, 2) for x in (q, dout))
    k, v = (x.float().transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = (r(q, -1) @ r(k, -1).mT * scale).masked_fill(~seen, -math.inf)
    # Weights of at most 1, divided by their sum at the end, as flash attention does. Normalised first, weights near 2^-n
    # (uniform attention over 2^n keys) would round without error by luck.
    reference = _reference(s, variant.order)
    final = _finite(s.amax(-1, keepdim=True))
    total = torch.exp(s - final).sum(-1, keepdim=True).clamp(min=1e-30)
    p = torch.exp(s - final) / total
    e = r(torch.exp(s - _finite(reference)) * variant.factor, -1)
    out = e * torch.exp(reference - final) / variant.factor @ r(v, -2) / total
    dp = r(dout, -1) @ r(v, -1).mT
    delta = ((dout if variant.fold else r(dout, -1)) * out).sum(-1, keepdim=True)
    before = scale if variant.fold else variant.factor
    ds = p * (dp - delta) * before
    dq = r(ds, -1) @ r(k, -2) * (scale / before)
    dk = r(ds, -2).mT @ r(q, -2) * (scale / before)
    dv = r(p * variant.factor, -2).mT @ r(dout, -2) / variant.factor
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    return [x.transpose(1, 2) for x in (out, dq, dk, dv)]


def attentions(*tensors_and_mask, scale=None):
    """(fp32 results, [results of each variant]) for check_rule."""
    exact = attention(*tensors_and_mask, scale)
    return exact, [attention(*tensors_and_mask, scale, variant) for variant in _variants]


class Errors(NamedTuple):
    """Of one tensor, and the most that the plain implementations have; both without the rounding to the results' dtype."""

    largest: float
    largest_plain: float
    rms: float
    rms_plain: float


def errors(x, reference, plain, dtype):
    """Errors of x against reference. plain: results of the variants, which are rounded to dtype too, as x is."""
    of_plain = [pt.to(dtype).float() - reference for pt in plain]
    error = x.float() - reference
    # What is left where nothing else errs is the rounding to dtype, which may fall on the other side: an ulp; in the RMS, a
    # fifth of one.
    eps = torch.finfo(dtype).eps
    return Errors(
        float(error.abs().max()) - 2 * eps * float(reference.abs().max()),
        max(float(pt.abs().max()) for pt in of_plain),
        float(error.norm()) - eps / 4 * float(reference.norm()),
        max(float(pt.norm()) for pt in of_plain[: len(VARIANTS)]),
    )


def check_rule(got, exact, plain, dtype):
    """The rule, for out and each gradient that is given. exact, plain: of attentions()."""
    for i, x in enumerate(got):
        name = ("out", "dq", "dk", "dv")[i]
        assert torch.isfinite(x).all(), name
        found = errors(x, exact[i], [results[i] for results in plain], dtype)
        for kind, ours, theirs, factor in (
            ("largest", found.largest, found.largest_plain, 2.0),
            ("RMS", found.rms, found.rms_plain, rms_factor(x)),
        ):
            assert ours <= factor * theirs, (
                f"{name}: {kind} error {ours / max(theirs, 1e-30):.3f} times that of plain MXFP8, at most {factor:.3f}"
            )


def run_cases(run, cases, name):
    """Runs all, and names all that break the rule."""
    failed = []
    for case in cases:
        try:
            with contextlib.suppress(AssertionError):
                run(case)
                continue
            with every_variant():
                run(case)
        except AssertionError as error:
            failed.append(f"{name(case)}: {error}")
    assert not failed, "\n".join(failed)
