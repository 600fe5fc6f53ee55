"""The measurements of validate. Each takes a Subject and returns plain figures; `tell(fraction, what)` moves the bar."""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
import warnings
from collections.abc import Callable
from typing import Optional

import torch
from torch.nn import functional as F

import flash_attn_mx as famx
from flash_attn_mx.demo.accuracy import GRADS
from flash_attn_mx.demo.capture import Call, Recorder
from flash_attn_mx.demo.training import tally
from flash_attn_mx.quantize import dequantize, quantize_mxfp8
from flash_attn_mx.validate.subjects import BF16, FP32, MXFP8, Subject, Unsuitable

Tensor = torch.Tensor
Tell = Callable[[float, str], None]
POLICY = "mxfp8 + policy"


# --- outputs --------------------------------------------------------------------------------------------------


def _compare(subject: Subject, wanted: Tensor, got: Tensor, ids: Tensor) -> dict[str, float]:
    """How far an output is from the fp32 one; smaller `damage` is better for both kinds of model."""
    if subject.kind == "encoder":
        cosine = (wanted * got).sum(-1)
        return {
            "cosine_min": cosine.min().item(),
            "cosine_mean": cosine.mean().item(),
            "damage": 1 - cosine.mean().item(),
        }
    p, q = wanted.log_softmax(-1), got.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean().item()
    loss = F.cross_entropy(got[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()
    same = (wanted.argmax(-1) == got.argmax(-1)).float().mean().item()
    return {"kl": kl, "loss": loss, "same_top": same, "damage": kl}


@torch.no_grad()
def outputs(
    subject: Subject, schemes: dict, tell: Tell, batch: int = 2
) -> dict[str, dict[str, float]]:
    """schemes: name -> (scheme, policy). Means over the held-out pieces; cosine_min is the lowest."""
    found: dict[str, list[dict]] = {name: [] for name in (FP32, *schemes)}
    batches = subject.held_out.split(batch)
    for i, ids in enumerate(batches):
        with subject.attention(FP32):
            wanted = subject.output(ids).float()
        found[FP32].append(_compare(subject, wanted, wanted, ids))
        for name, (scheme, policy) in schemes.items():
            tell(
                (i + 0.5) / len(batches),
                f"{name}, piece {i * batch + 1} of {len(subject.held_out)}",
            )
            with subject.attention(scheme, policy):
                found[name].append(_compare(subject, wanted, subject.output(ids).float(), ids))
    return {name: _mean(rows) for name, rows in found.items()}


def _mean(rows: list[dict[str, float]]) -> dict[str, float]:
    mean = {key: statistics.fmean(row[key] for row in rows) for key in rows[0]}
    if "cosine_min" in mean:
        mean["cosine_min"] = min(row["cosine_min"] for row in rows)
    if "loss" in mean:
        mean["perplexity"] = math.exp(min(mean["loss"], 700.0))
    return mean


@torch.no_grad()
def alone(subject: Subject, names: list[str], tell: Tell) -> dict[str, float]:
    """Damage to the output, by layer, when that layer alone attends in MXFP8."""
    ids = subject.held_out[:2]
    with subject.attention(FP32):
        wanted = subject.output(ids).float()
    damage = {}
    for i, name in enumerate(names):
        tell(i / len(names), f"{name} alone in MXFP8")
        others = tuple(famx.LayerRule(other) for other in names if other != name)
        with subject.attention(MXFP8, famx.Policy(layers=others)):
            damage[name] = _compare(subject, wanted, subject.output(ids).float(), ids)["damage"]
    return damage


def served(subject: Subject) -> tuple[dict[str, list[str]], list[str]]:
    """(layers that MXFP8 computes in "inference" and in "training", why not the others).

    What MXFP8 does not take (softcap, sinks, relative positions, dropout in training) runs in high precision, and says
    nothing about MXFP8. Raises: Unsuitable, where flash_attn_mx refuses the model.
    """
    ran, notices = {}, {}
    for mode in ("inference", "training"):
        subject.model.train(mode == "training")
        try:
            with warnings.catch_warnings(record=True) as caught, torch.no_grad():
                warnings.simplefilter("always")
                with subject.attention(MXFP8, fallback="warn"), famx.monitor(subject.model) as seen:
                    subject.output(subject.held_out[:1])
        except (NotImplementedError, ValueError) as error:
            raise Unsuitable(f"{subject.name}: flash_attn_mx refuses it: {error}") from error
        finally:
            subject.model.eval()
        ran[mode] = list(seen.as_dict()["layers"])
        texts = (str(w.message) for w in caught if issubclass(w.category, famx.FallbackWarning))
        for text in texts:
            if "high_precision path: " in text:
                notices[text.split("path: ")[1].split(". flash_attn_mx.explain")[0]] = None
    return ran, list(notices)


# --- single layers --------------------------------------------------------------------------------------------


def capture(subject: Subject, pieces: int = 2) -> dict[str, Call]:
    """The attention calls of one fp32 forward and backward pass; an encoder's loss makes two passes, the last one stays."""
    subject.model.zero_grad(set_to_none=True)
    with torch.enable_grad(), Recorder(subject.model) as recorder:
        subject.loss(subject.training[:pieces]).backward()
    subject.model.zero_grad(set_to_none=True)
    return recorder.calls


def call_options(call: Call) -> dict:
    """What flash_attn_func must be told to attend as the call did; transformers counts the token itself as part of a window."""
    options = {"softmax_scale": call.scaling, "causal": bool(call.causal)}
    window = call.options.get("sliding_window")
    if window:
        options["window_size"] = (window - 1, -1 if call.causal else window - 1)
    return options


def layer_figures(call: Call) -> dict:
    """One layer by itself, on its own fp32 inputs: relative errors of O and gradients, extremes, by head."""
    q, k, v = (x.transpose(1, 2).contiguous().float() for x in (call.q, call.k, call.v))
    dout = None if call.out.grad is None else call.out.grad.float()
    options = call_options(call)
    got = _run(lambda *x: famx.flash_attn_func(*x, backend="portable", **options), q, k, v, dout)
    wanted = _run(_exact(options, q.shape[2] // k.shape[2]), *(x.double() for x in (q, k, v)), dout)
    parts = {t: _by_head(a, b) for t, a, b in zip(GRADS, got, wanted)}
    whole = {t: ((a - b).norm() / b.norm()).item() for t, a, b in zip(GRADS, got, wanted)}
    axes = {"Q": (q, "rowwise"), "K": (k, "rowwise"), "V": (v, "colwise")}
    if dout is not None:
        axes["dO"] = (dout, "colwise")
    return {
        "index": call.index,
        "heads": q.shape[2],
        "heads_k": k.shape[2],
        "head_dim": q.shape[3],
        "errors": whole,
        "errors_by_head": {
            t: [(e / max(n, 1e-300)) ** 0.5 for e, n in p] for t, p in parts.items()
        },
        "parts_by_head": parts,
        "extremes": {name: extremes(x, axis) for name, (x, axis) in axes.items()},
        "largest_logit": _largest_logit(q, k, call.scaling),
    }


def _run(function: Callable, q, k, v, dout: Optional[Tensor]) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_(dout is not None) for x in (q, k, v)]
    out = function(*leaves)
    grads = () if dout is None else torch.autograd.grad(out, leaves, dout.to(out.dtype))
    return tuple(x.detach().double() for x in (out, *grads))


def _exact(options: dict, group: int) -> Callable:
    """Attention as flash_attn_func means it, from torch's operations, for float64."""

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        x = q @ k.mT * options["softmax_scale"]
        distance = torch.arange(x.shape[-2], device=x.device)[:, None] - torch.arange(
            x.shape[-1], device=x.device
        )
        left, right = options.get("window_size", (-1, -1))
        right = 0 if options["causal"] else right
        if left >= 0:
            x = x.masked_fill(distance > left, -torch.inf)
        if right >= 0:
            x = x.masked_fill(-distance > right, -torch.inf)
        return (x.softmax(-1) @ v).transpose(1, 2)

    return attend


def _by_head(got: Tensor, wanted: Tensor) -> list[tuple[float, float]]:
    """(squared error, squared norm) of each head of (B, S, H, D)."""
    sums = (x.square().sum((0, 1, 3)).tolist() for x in (got - wanted, wanted))
    return list(zip(*sums))


def extremes(x: Tensor, axis: str) -> dict[str, list[float]]:
    """By head of (B, S, H, D): amax / rms, share of nonzero values that MXFP8 turns into 0, share clipped, scale exponents, NaN and Inf."""
    columns: dict[str, list[float]] = {
        key: [] for key in ("outlier", "to_zero", "clipped", "scale_min", "scale_max", "not_finite")
    }
    for head in x.unbind(2):
        mx = quantize_mxfp8(head.unsqueeze(2), axis)
        count = tally(head, mx.data.squeeze(2).float(), dequantize(mx).squeeze(2))
        scale = mx.scale.view(torch.uint8).int() - 127
        rms = head.square().mean().sqrt().clamp_min(1e-30)
        columns["outlier"].append((head.abs().amax() / rms).item())
        columns["to_zero"].append(count["to_zero"] / max(1, count["elements"]))
        columns["clipped"].append(count["clipped"] / max(1, count["elements"]))
        columns["scale_min"].append(scale.min().item())
        columns["scale_max"].append(scale.max().item())
        columns["not_finite"].append((~head.isfinite()).sum().item())
    return columns


def _largest_logit(q: Tensor, k: Tensor, scaling: float) -> list[float]:
    """By query head, the largest |q · k| scaling over all pairs, hidden ones included."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * scaling
    return logits.abs().amax((0, 2, 3)).tolist()


# --- training -------------------------------------------------------------------------------------------------


def _group(name: str) -> str:
    """The block a parameter belongs to: its name up to the first number."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return parts[0] if len(parts) == 1 else ".".join(parts[:-1])


def gradients(
    subject: Subject, schemes: dict, tell: Tell, pieces: int = 4
) -> tuple[dict[str, dict[str, dict[str, float]]], dict[str, dict]]:
    """(scheme -> block of parameters -> norm ratio and cosine of its gradient against fp32, on the same weights and text;
    what famx.monitor saw in each layer while all of them ran in MXFP8)."""
    ids, seen = subject.training[:pieces], {}

    def gradient(scheme, policy=None) -> dict[str, Tensor]:
        subject.model.zero_grad(set_to_none=True)
        with subject.attention(scheme, policy):
            if scheme == MXFP8 and policy is None:
                with famx.monitor(subject.model) as monitor:
                    subject.loss(ids).backward()
                seen.update(monitor.as_dict()["layers"])
            else:
                subject.loss(ids).backward()
        blocks: dict[str, list[Tensor]] = {}
        for name, parameter in subject.model.named_parameters():
            if parameter.grad is not None:
                blocks.setdefault(_group(name), []).append(parameter.grad.flatten().double())
        subject.model.zero_grad(set_to_none=True)
        flat = {name: torch.cat(parts) for name, parts in blocks.items()}
        return {**flat, "all parameters": torch.cat(list(flat.values()))}

    tell(0.0, "fp32 gradient")
    wanted = gradient(FP32)
    found = {}
    for i, (name, (scheme, policy)) in enumerate(schemes.items()):
        tell((i + 1) / (len(schemes) + 1), f"{name} gradient")
        got = gradient(scheme, policy)
        found[name] = {
            block: {
                "norm_ratio": (got[block].norm() / w.norm().clamp_min(1e-300)).item(),
                "cosine": F.cosine_similarity(got[block], w, dim=0, eps=1e-300).item(),
            }
            for block, w in wanted.items()
            if w.norm() > 0
        }
    return found, seen


def fine_tune(
    subject: Subject, schemes: dict, steps: int, tell: Tell, batch: int = 4
) -> dict[str, dict]:
    """Trains from the same weights on the same batches: losses by step and the held-out loss at the end. Weights come back."""
    weights = copy.deepcopy(subject.model.state_dict())
    found = {}
    for i, (name, (scheme, policy)) in enumerate(schemes.items()):
        optimiser = torch.optim.AdamW(
            subject.model.parameters(), subject.learning_rate, weight_decay=0.0
        )
        losses = []
        for step in range(steps):
            rows = torch.arange(batch * step, batch * (step + 1)) % len(subject.training)
            optimiser.zero_grad(set_to_none=True)
            with subject.attention(scheme, policy):
                loss = subject.loss(subject.training[rows])
                loss.backward()
            torch.nn.utils.clip_grad_norm_(subject.model.parameters(), 1.0)
            optimiser.step()
            losses.append(loss.item())
            tell(
                (i + (step + 1) / steps) / len(schemes),
                f"{name} step {step + 1} of {steps}, loss {losses[-1]:.3f}",
            )
        with torch.no_grad(), subject.attention(scheme, policy):
            held_out = subject.loss(subject.held_out[:8]).item()
        found[name] = {"losses": losses, "held_out": held_out}
        subject.model.load_state_dict(weights)
    subject.model.zero_grad(set_to_none=True)
    return found


def scheme_table(policy: Optional[famx.Policy] = None) -> dict:
    """What is compared with fp32: bf16 as a yardstick, MXFP8 everywhere, and MXFP8 with the policy if there is one."""
    table = {BF16: (BF16, None), MXFP8: (MXFP8, None)}
    if policy is not None and policy.layers:
        table[POLICY] = (MXFP8, policy)
    return table


@dataclasses.dataclass
class Figures:
    """Everything that was measured; the report and the JSON file are made of it."""

    outputs: dict
    alone: dict[str, float]
    layers: dict[str, dict]
    gradients: dict
    fine_tune: dict
    seen: dict[str, dict]
    notes: list[str] = dataclasses.field(default_factory=list)
