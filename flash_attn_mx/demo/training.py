"""Part 2 of the demo: a small GPT learns English twice, with fp32 and with MXFP8 attention.

Both runs start from the same weights and read the same batches in the same order; only the
attention differs, forward and backward. The text is the documentation that every Python ships
(`pydoc_data.topics`), read as bytes.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from flash_attn_mx.demo import report
from flash_attn_mx.quantize import dequantize, quantize_mxfp8

Tensor = torch.Tensor
Attention = Callable[
    [Tensor, Tensor, Tensor], Tensor
]  # causal, (B, S, H, D) -> (B, S, H, D), with autograd


@dataclasses.dataclass(frozen=True)
class Settings:
    steps: int = 200
    batch: int = 4
    context: int = 256
    layers: int = 4
    width: int = 128
    heads: int = 2
    learning_rate: float = 3e-3
    warm_up: int = 10
    probe_every: int = 25  # steps between two looks at Q, K, V and at the gradient's direction
    last: int = 50  # steps over which the final loss is averaged
    seed: int = 0


QUICK = Settings(
    steps=4, batch=2, context=64, layers=1, width=64, heads=1, warm_up=2, probe_every=2, last=2
)


def rotation(positions: int, dim: int) -> Tensor:
    """Angles of rotary position embeddings: (positions, 1, dim / 2)."""
    frequency = 1000.0 ** -(torch.arange(dim // 2) / (dim // 2))
    return torch.arange(positions)[:, None, None] * frequency


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Unit-RMS x (B, S, H, D), turned by its position."""
    a, b = F.rms_norm(x, x.shape[-1:]).chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)


class Block(nn.Module):
    """Pre-norm block with rotary positions and normalised Q and K, as in current models.

    `attention` is a plain attribute, so that the same weights can use another one.
    """

    def __init__(self, width: int, heads: int, attention: Attention):
        super().__init__()
        self.heads, self.attention = heads, attention
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, angle: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        o = self.attention(rotate(q, angle), rotate(k, angle), v)
        x = x + self.project(o.flatten(-2))
        return x + self.narrow(F.gelu(self.widen(self.norm_mlp(x))))


class GPT(nn.Module):
    def __init__(self, settings: Settings, attention: Attention):
        super().__init__()
        self.tokens = nn.Embedding(256, settings.width)
        blocks = (Block(settings.width, settings.heads, attention) for _ in range(settings.layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(settings.width)
        self.angle = rotation(settings.context, settings.width // settings.heads)
        nn.init.normal_(self.tokens.weight, std=0.02)
        for block in self.blocks:
            for layer in (block.qkv, block.widen):
                nn.init.normal_(layer.weight, std=0.5 * layer.in_features**-0.5)
            for layer in (block.project, block.narrow):  # every block begins as the identity
                nn.init.zeros_(layer.weight)

    def loss(self, batch: Tensor) -> Tensor:
        """Mean cross entropy, nats per byte, of (B, context + 1) bytes; embedding is shared."""
        x = self.tokens(batch[:, :-1])
        for block in self.blocks:
            x = block(x, self.angle)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def use(self, attention: Attention) -> None:
        for block in self.blocks:
            block.attention = attention


def fp32_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def english_text() -> Tensor:
    """All topics of Python's own help text, in order, as one tensor of bytes."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def _batches(text: Tensor, settings: Settings, seed: int) -> Callable[[], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    window = torch.arange(settings.context + 1)

    def draw() -> Tensor:
        start = torch.randint(
            len(text) - settings.context - 1, (settings.batch, 1), generator=generator
        )
        return text[start + window]

    return draw


# --------------------------------------------------------------------------------------------------
# Looks inside


def tally(x: Tensor, payload: Tensor, value: Tensor) -> dict[str, int]:
    """Counts what happened at the ends of the range as x became `payload`, which means `value`.

    At ±448 is no loss by itself: the largest value of a block may round to it. Clipped means that x
    is more than half a step (16 scales) beyond what ±448 stands for, i.e. that the scale was too
    small.
    """
    at_limit = payload.abs() == 448.0
    half_step = (value / payload * 16.0).abs()
    return {
        "elements": x.numel(),
        "at_448": at_limit.sum().item(),
        "clipped": (at_limit & ((x - value).abs() > half_step)).sum().item(),
        "to_zero": ((x != 0) & (payload == 0)).sum().item(),
    }


def count_extremes(x: Tensor, axis: str) -> dict[str, int]:
    """`tally` of x (B, S, H, D) quantised to MXFP8 along `axis`."""
    mx = quantize_mxfp8(x, axis)
    return tally(x.float(), mx.data.float(), dequantize(mx))


class Probe:
    """Wraps an attention; while `on`, counts the extremes of every Q, K and V that pass."""

    def __init__(self, attention: Attention):
        self.attention, self.on = attention, False
        self.counts = {
            name: dict.fromkeys(("elements", "at_448", "clipped", "to_zero"), 0) for name in "QKV"
        }

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.on:
            for name, x, axis in (("Q", q, "rowwise"), ("K", k, "rowwise"), ("V", v, "colwise")):
                for what, number in count_extremes(x.detach(), axis).items():
                    self.counts[name][what] += number
        return self.attention(q, k, v)


def _gradient(model: GPT, batch: Tensor) -> Tensor:
    grads = torch.autograd.grad(model.loss(batch), list(model.parameters()))
    return torch.cat([g.flatten() for g in grads])


def compare_gradients(model: GPT, batch: Tensor, attention: Attention) -> dict[str, float]:
    """Gradient with `attention` against that with fp32, at the model's weights of now."""
    model.use(fp32_attention)
    wanted = _gradient(model, batch)
    model.use(attention)
    got = _gradient(model, batch)
    return {
        "cosine": F.cosine_similarity(got, wanted, dim=0).item(),
        "norm_ratio": (got.norm() / wanted.norm()).item(),
    }


# --------------------------------------------------------------------------------------------------
# Training


def train(
    attention: Attention,
    text: Tensor,
    settings: Settings,
    on_step: Callable[[int, float], None],
    probe=None,
):
    """Trains one model: (losses, gradient norms, held-out loss, gradient comparisons by step)."""
    torch.manual_seed(settings.seed)
    model = GPT(settings, attention)
    held_out = len(text) // 20
    draw = _batches(text[:-held_out], settings, settings.seed + 1)
    optimiser = torch.optim.AdamW(
        model.parameters(), settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    losses, norms, comparisons = [], [], {}
    for step in range(settings.steps):
        warm = min(1.0, (step + 1) / settings.warm_up)
        cool = min(1.0, 2.0 * (1.0 - step / settings.steps))
        for group in optimiser.param_groups:
            group["lr"] = settings.learning_rate * warm * cool
        batch = draw()
        if probe is not None:
            probe.on = step % settings.probe_every == 0 or step == settings.steps - 1
            if probe.on:
                comparisons[step] = compare_gradients(model, batch, probe.attention)
                model.use(probe)
        optimiser.zero_grad(set_to_none=True)
        loss = model.loss(batch)
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimiser.step()
        losses.append(loss.item())
        on_step(step, losses[-1])
    with torch.no_grad():
        draw = _batches(text[-held_out:], settings, settings.seed + 2)
        held_out_loss = statistics.fmean(model.loss(draw()).item() for _ in range(4))
    return losses, norms, held_out_loss, comparisons


def _figures(settings: Settings, fp32, mxfp8, probe: Probe) -> dict:
    last = settings.last
    final = {
        name: statistics.fmean(run[0][-last:]) for name, run in (("fp32", fp32), ("mxfp8", mxfp8))
    }
    ratios = [b / a for a, b in zip(fp32[1], mxfp8[1])]
    values = [x for run in (fp32, mxfp8) for x in run[0] + run[1]]
    return {
        "settings": dataclasses.asdict(settings),
        "loss_start": fp32[0][0],
        "loss_final": final,
        "loss_final_gap": (final["mxfp8"] - final["fp32"]) / final["fp32"],
        "loss_held_out": {"fp32": fp32[2], "mxfp8": mxfp8[2]},
        "gradient_norm_ratio": {
            "median": statistics.median(ratios),
            "min": min(ratios),
            "max": max(ratios),
        },
        "same_weights": {str(step): c for step, c in mxfp8[3].items()},
        "extremes": probe.counts,
        "not_finite": sum(not math.isfinite(x) for x in values),
        "losses": {"fp32": fp32[0], "mxfp8": mxfp8[0]},
        "gradient_norms": {"fp32": fp32[1], "mxfp8": mxfp8[1]},
    }


def _text(f: dict) -> list[str]:
    s, final, held = f["settings"], f["loss_final"], f["loss_held_out"]
    cosines = [c["cosine"] for c in f["same_weights"].values()]
    ratios = [c["norm_ratio"] for c in f["same_weights"].values()]
    lines = [
        f"A byte-level GPT ({s['layers']} layers, width {s['width']}, {s['heads']} heads, context "
        f"{s['context']}) learns from Python's help text, {s['steps']} steps of "
        f"{s['batch'] * s['context']} bytes. Run 1: attention in fp32. Run 2: the same weights, "
        "batches and order, attention in MXFP8 forward and backward, everything else fp32.",
        f"  loss, nats per byte          fp32     MXFP8       (begins at {f['loss_start']:.2f})",
        f"  mean of last {s['last']:3d} steps     {final['fp32']:.4f}   {final['mxfp8']:.4f}     "
        f"gap {100 * f['loss_final_gap']:+.2f} %",
        f"  text kept out of training  {held['fp32']:.4f}   {held['mxfp8']:.4f}",
        f"On the same weights and batch ({len(cosines)} times during run 2) the gradient of all "
        f"parameters by MXFP8 has cosine {min(cosines):.4f} or more to the fp32 one, and "
        f"{min(ratios):.3f} to {max(ratios):.3f} of its length.",
        "What the 8-bit format does to the ends of its range in Q, K and V, all layers:",
        "  tensor    elements   at the largest value (448)   clipped   nonzero turned into zero",
    ]
    for name, c in f["extremes"].items():
        lines.append(
            f"  {name:6} {c['elements']:11,}   {c['at_448']:13,} "
            f"({c['at_448'] / c['elements']:6.2%})      {c['clipped']:9,}   {c['to_zero']:9,} "
            f"({c['to_zero'] / c['elements']:.4%})"
        )
    return lines


def _verdicts(f: dict, quick: bool) -> list[report.Verdict]:
    extremes = f["extremes"].values()
    lost = sum(c["to_zero"] for c in extremes) / sum(c["elements"] for c in extremes)
    cosines = [c["cosine"] for c in f["same_weights"].values()]
    verdicts = [
        report.Verdict(
            "final loss, MXFP8 against fp32, relative gap", abs(f["loss_final_gap"]), "<=", 0.02
        ),
        report.Verdict("lowest gradient cosine on the same weights", min(cosines), ">=", 0.98),
        report.Verdict(
            "median gradient norm ratio of the two runs",
            f["gradient_norm_ratio"]["median"],
            ">=",
            0.9,
        ),
        report.Verdict(
            "median gradient norm ratio of the two runs",
            f["gradient_norm_ratio"]["median"],
            "<=",
            1.1,
        ),
        report.Verdict("clipped elements of Q, K, V", sum(c["clipped"] for c in extremes), "==", 0),
        report.Verdict("share of nonzero Q, K, V turned into zero", lost, "<=", 0.001),
        report.Verdict("losses and gradient norms that are NaN or Inf", f["not_finite"], "==", 0),
    ]
    if not quick:
        drop = f["loss_final"]["mxfp8"] / f["loss_start"]
        verdicts.insert(
            1, report.Verdict("MXFP8: final loss over first loss (it learns)", drop, "<=", 0.5)
        )
    return verdicts


def _smooth(values: list[float], width: int = 9) -> list[float]:
    half = width // 2
    return [statistics.fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def _plot(f: dict, path: pathlib.Path) -> None:
    plt = report.pyplot()
    figure, (loss, gap, norm) = plt.subplots(
        1, 3, figsize=(14, 4.4), layout="constrained", width_ratios=(1.5, 1, 1)
    )
    fp32, mxfp8 = f["losses"]["fp32"], f["losses"]["mxfp8"]
    steps = range(1, len(fp32) + 1)
    loss.plot(steps, fp32, color=report.ORANGE, linewidth=3.5, label="fp32 attention")
    loss.plot(
        steps,
        mxfp8,
        color=report.BLUE,
        linewidth=1.2,
        label="MXFP8 attention, forward and backward",
    )
    loss.set(
        title="Training loss of a small GPT on English text",
        xlabel="step",
        ylabel="loss, nats per byte",
    )
    loss.legend()

    relative = [100 * (b - a) / a for a, b in zip(fp32, mxfp8)]
    gap.axhspan(-2, 2, color=report.SKY, alpha=0.18, label="±2 %, the limit for the final loss")
    gap.axhline(0, color=report.BLACK, linewidth=0.8)
    gap.plot(steps, relative, color=report.GREY, linewidth=0.7, label="each step")
    gap.plot(steps, _smooth(relative), color=report.BLUE, linewidth=1.8, label="mean over 9 steps")
    gap.set(
        title="Loss with MXFP8 minus loss with fp32",
        xlabel="step",
        ylabel="% of the fp32 loss",
        ylim=(-6, 6),
    )
    gap.legend(loc="lower center")

    ratios = [b / a for a, b in zip(f["gradient_norms"]["fp32"], f["gradient_norms"]["mxfp8"])]
    norm.axhline(1, color=report.BLACK, linewidth=0.8)
    norm.plot(steps, ratios, color=report.GREY, linewidth=0.7, label="two runs, each step")
    norm.plot(
        steps,
        _smooth(ratios),
        color=report.BLUE,
        linewidth=1.8,
        label="two runs, mean over 9 steps",
    )
    points = {int(step) + 1: c["norm_ratio"] for step, c in f["same_weights"].items()}
    norm.scatter(
        list(points),
        list(points.values()),
        color=report.RED,
        marker="D",
        s=36,
        zorder=3,
        label="same weights",
    )
    norm.set(title="Gradient norm: MXFP8 over fp32", xlabel="step", ylabel="ratio", ylim=(0.5, 1.5))
    norm.legend(loc="lower center")
    figure.savefig(path)
    plt.close(figure)


def run(
    attention: Attention, out: pathlib.Path, progress: report.Progress, quick: bool = False
) -> report.Section:
    """Trains twice and writes training.png to `out`.

    Args:
      attention: causal attention on (B, S, H, D) with autograd, for the second run.
      out: an existing folder.   progress: the bar.   quick: a few steps of a tiny model, for tests.
    """
    settings = QUICK if quick else Settings()
    text = english_text()

    def shown(name, begin, share):
        return lambda step, loss: progress.update(
            begin + share * (step + 1) / settings.steps,
            f"{name} step {step + 1} of {settings.steps}, loss {loss:.3f}",
        )

    fp32 = train(fp32_attention, text, settings, shown("fp32", 0.0, 0.35))
    probe = Probe(attention)
    mxfp8 = train(probe, text, settings, shown("MXFP8", 0.35, 0.65), probe)
    figures = _figures(settings, fp32, mxfp8, probe)
    _plot(figures, out / "training.png")
    return report.Section(
        name="training",
        title="Training a small GPT on English text, with fp32 and with MXFP8 attention",
        text=_text(figures),
        figures=figures,
        verdicts=_verdicts(figures, quick),
        files=["training.png"],
    )
