"""What to do: layers or heads for high precision, the verdicts, and the policy."""

from __future__ import annotations

import dataclasses
from typing import Optional

import flash_attn_mx as famx
from flash_attn_mx.demo.accuracy import GRADS
from flash_attn_mx.demo.report import Verdict
from flash_attn_mx.validate.steps import Figures


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds beyond which MXFP8 is called harmful. docs/validate.md has those of healthy models: 5 % (O) and 17 % (gradients) at most."""

    forward: float = 0.10  # relative error of a layer's O
    backward: float = 0.25  # of its dQ, dK or dV
    perplexity: float = 0.01  # relative change
    cosine: float = 0.99  # lowest, of an encoder's vectors
    gradient_cosine: float = 0.98  # of all parameters' gradient
    gradient_norm: float = 0.1  # how far its norm ratio may be from 1
    loss: float = 0.02  # how much higher than fp32's the loss of fine-tuning may be


@dataclasses.dataclass(frozen=True)
class Finding:
    """One layer beyond a limit. heads: the few that cause it, None for the whole layer."""

    name: str
    index: Optional[int]
    heads: Optional[tuple[int, ...]]
    reason: str


def find(figures: Figures, limits: Limits) -> list[Finding]:
    """Layers whose own error exceeds a limit, or whose values overflow."""
    findings = []
    for name, layer in figures.layers.items():
        reasons, culprits = [], set()
        for tensor, error in layer["errors"].items():
            limit = limits.forward if tensor == "O" else limits.backward
            if not error <= limit:  # NaN too
                reasons.append(f"error of {tensor} {error:.0%}, limit {limit:.0%}")
                culprits.add(_culprits(layer, tensor, limit))
        for tensor, counts in layer["extremes"].items():
            lost = sum(counts["not_finite"])
            if lost:
                reasons.append(f"{lost} values of {tensor} are NaN or Inf")
                culprits.add(None)
        if reasons:
            heads = None if None in culprits else tuple(sorted({h for c in culprits for h in c}))
            if heads is not None and 2 * len(heads) > layer["heads"]:
                heads = None
            findings.append(Finding(name, layer["index"], heads, "; ".join(reasons)))
    return findings


def _culprits(layer: dict, tensor: str, limit: float) -> Optional[tuple[int, ...]]:
    """The worst query heads, so many that the rest is within the limit; None if that is most of them, or cannot be told."""
    parts = layer["parts_by_head"].get(tensor)
    if parts is None:
        return None
    group = layer["heads"] // len(parts)  # gradients of K and V are by key head
    worst = sorted(range(len(parts)), key=lambda h: -parts[h][0])
    for count in range(1, len(parts) // 2 + 1):
        error, norm = (sum(parts[h][i] for h in worst[count:]) for i in (0, 1))
        if error <= limit**2 * norm:
            return tuple(h * group + i for h in worst[:count] for i in range(group))
    return None


def layer_rules(findings: list[Finding], figures: Figures) -> tuple[famx.LayerRule, ...]:
    """Rules by index where indices are unique, else by name."""
    indices = [layer["index"] for layer in figures.layers.values()]
    unique = None not in indices and len(set(indices)) == len(indices)
    return tuple(famx.LayerRule(f.index if unique else f.name, f.heads, f.reason) for f in findings)


def within_budget(result: dict, baseline: dict, limits: Limits) -> bool:
    """Whether the output of a scheme is close enough to the fp32 one."""
    if "cosine_min" in result:
        return result["cosine_min"] >= limits.cosine
    change = result["perplexity"] / baseline["perplexity"] - 1
    return abs(change) <= limits.perplexity


def next_layer(findings: list[Finding], figures: Figures) -> Optional[Finding]:
    """The layer not yet found whose MXFP8 alone damages the output most."""
    found = {f.name for f in findings if f.heads is None}
    left = {name: damage for name, damage in figures.alone.items() if name not in found}
    if not left:
        return None
    name = max(left, key=left.get)
    reason = f"most damage to the output by one layer, {left[name]:.2g}"
    return Finding(name, figures.layers[name]["index"], None, reason)


def output_verdicts(scheme: str, result: dict, baseline: dict, limits: Limits) -> list[Verdict]:
    """Of one scheme's output against fp32."""
    if "cosine_min" in result:
        return [
            Verdict(f"{scheme}: lowest cosine to fp32", result["cosine_min"], ">=", limits.cosine)
        ]
    change = abs(result["perplexity"] / baseline["perplexity"] - 1)
    return [Verdict(f"{scheme}: relative change of perplexity", change, "<=", limits.perplexity)]


def training_verdicts(scheme: str, figures: Figures, limits: Limits) -> list[Verdict]:
    """Of one scheme's gradient and fine-tuning against fp32."""
    whole = figures.gradients[scheme]["all parameters"]
    late = max(1, len(figures.fine_tune["fp32"]["losses"]) // 2)
    losses, wanted = (sum(figures.fine_tune[s]["losses"][-late:]) for s in (scheme, "fp32"))
    return [
        Verdict(f"{scheme}: cosine of the gradient", whole["cosine"], ">=", limits.gradient_cosine),
        Verdict(f"{scheme}: |norm ratio of the gradient - 1|", abs(whole["norm_ratio"] - 1), "<=", limits.gradient_norm),
        Verdict(f"{scheme}: loss over fp32's in the last half, minus 1", losses / wanted - 1, "<=", limits.loss),
    ]  # fmt: skip


def without(figures: Figures, findings: list[Finding]) -> Figures:
    """The figures of the layers that stay in MXFP8 altogether."""
    found = {f.name for f in findings}
    layers = {name: layer for name, layer in figures.layers.items() if name not in found}
    return dataclasses.replace(figures, layers=layers)


def share_in_mxfp8(figures: Figures, findings: list[Finding]) -> float:
    """Share of the model's query heads that no finding takes out of MXFP8."""
    heads = {name: layer["heads"] for name, layer in figures.layers.items()}
    out = sum(heads[f.name] if f.heads is None else len(f.heads) for f in findings)
    return 1 - out / sum(heads.values())


def layer_verdicts(figures: Figures, limits: Limits) -> list[Verdict]:
    """The worst layer for each tensor."""
    verdicts = []
    for tensor in GRADS:
        errors = {
            name: layer["errors"][tensor]
            for name, layer in figures.layers.items()
            if tensor in layer["errors"]
        }
        if errors:
            worst = max(
                errors,
                key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"),
            )
            limit = limits.forward if tensor == "O" else limits.backward
            verdicts.append(
                Verdict(
                    f"largest error of {tensor} in a layer ({worst})", errors[worst], "<=", limit
                )
            )
    lost = sum(
        sum(c["not_finite"])
        for layer in figures.layers.values()
        for c in layer["extremes"].values()
    )
    return [*verdicts, Verdict("NaN or Inf in Q, K, V, dO", lost, "==", 0)]
