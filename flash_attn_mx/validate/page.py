"""The HTML report: one file, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import html
import io
import json
import math

import flash_attn_mx as famx
from flash_attn_mx import policy as policy_file
from flash_attn_mx.demo import report
from flash_attn_mx.demo.accuracy import GRADS
from flash_attn_mx.validate.recommend import Finding, Limits
from flash_attn_mx.validate.steps import Figures

COLOURS = {"O": report.BLACK, "dQ": report.ORANGE, "dK": report.SKY, "dV": report.GREEN}
MARKERS = {"O": "o", "dQ": "s", "dK": "^", "dV": "D"}
LINES = {
    "fp32": (report.ORANGE, 3.5, "-"),
    "mxfp8": (report.BLUE, 1.4, "-"),
    "mxfp8 + policy": (report.GREEN, 1.4, "--"),
}
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 66rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; margin-bottom: 0.2rem; } h2 { font-size: 1.25rem; margin-top: 2.4rem; border-bottom: 1px solid #ddd; }
.origin { color: #555; margin-top: 0; }
.verdict { border-left: 0.5rem solid; padding: 0.8rem 1.2rem; margin: 1.2rem 0; background: #f6f6f6; }
.verdict strong { font-size: 1.25rem; } .good { border-color: #009E73; } .partly { border-color: #E69F00; } .bad { border-color: #D55E00; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.92rem; margin: 0.8rem 0; }
th, td { padding: 0.25rem 0.6rem; vertical-align: bottom; border-bottom: 1px solid #e5e5e5; text-align: right; } td { white-space: nowrap; } th:first-child, td:first-child { text-align: left; }
.prose td { white-space: normal; text-align: left; } tr.found td { background: #fdf0e6; font-weight: 600; } .pass { color: #00704f; } .fail { color: #b84300; font-weight: 600; }
img { max-width: 100%; height: auto; } pre { background: #f6f6f6; padding: 0.8rem; overflow-x: auto; font-size: 0.88rem; } dt { font-weight: 600; } dd { margin: 0 0 0.5rem 1.2rem; }
"""  # fmt: skip


# --- plots ----------------------------------------------------------------------------------------------------


def _png(figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    report.pyplot().close(figure)
    return buffer.getvalue()


def short(name: str) -> str:
    """The part of a module's name that tells layers apart: up to its last number."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[max(0, numbers[-1] - 1) : numbers[-1] + 1]) if numbers else name


def plot_layers(figures: Figures, limits: Limits) -> bytes:
    """Errors of every layer against their limits, and the damage that each layer does alone."""
    plt = report.pyplot()
    names = list(figures.layers)
    figure, (errors, damage) = plt.subplots(
        1,
        2,
        figsize=(12, 1.9 + 0.3 * len(names)),
        sharey=True,
        layout="constrained",
        width_ratios=(1.7, 1),
    )
    for lane, tensor in enumerate(GRADS):
        values = [100 * figures.layers[n]["errors"].get(tensor, math.nan) for n in names]
        places = [y + 0.15 * (lane - 1.5) for y in range(len(names))]
        errors.scatter(
            values, places, s=36, color=COLOURS[tensor], marker=MARKERS[tensor], label=tensor
        )
    errors.axvline(
        100 * limits.forward, color=report.BLACK, linestyle="--", linewidth=1, label="limit for O"
    )
    errors.axvline(
        100 * limits.backward,
        color=report.RED,
        linestyle="--",
        linewidth=1,
        label="limit for gradients",
    )
    errors.set(
        title="Error of each layer by itself, on fp32 inputs",
        xlabel="relative error, %",
        xscale="log",
    )
    ticks = (1, 2, 5, 10, 20, 50, 100)
    errors.set_xticks(ticks, [str(t) for t in ticks])
    errors.minorticks_off()
    errors.set_yticks(range(len(names)), [short(n) for n in names])
    errors.invert_yaxis()
    damage.barh(
        range(len(names)),
        [max(figures.alone[n], 0.0) for n in names],
        color=report.BLUE,
        height=0.6,
    )
    damage.set(
        title="Change of the model's output by this layer alone", xlabel=damage_name(figures)
    )
    damage.ticklabel_format(axis="x", style="sci", scilimits=(-2, 3))
    figure.legend(*errors.get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return _png(figure)


def damage_name(figures: Figures) -> str:
    encoder = "cosine_min" in figures.outputs["fp32"]
    return "1 - mean cosine to fp32" if encoder else "KL divergence from fp32, nats per token"


def plot_heads(figures: Figures, limits: Limits) -> bytes:
    """Maps of layers and heads: error of O, outliers of K, largest logit."""
    plt = report.pyplot()
    layers = list(figures.layers.values())
    maps = (
        (
            "Error of O, %",
            [[100 * e for e in x["errors_by_head"]["O"]] for x in layers],
            100 * limits.forward,
        ),
        (
            "Outliers of K: largest value / rms",
            [x["extremes"]["K"]["outlier"] for x in layers],
            None,
        ),
        ("Largest |logit|", [x["largest_logit"] for x in layers], None),
    )
    figure, axes = plt.subplots(1, 3, figsize=(12, 1.7 + 0.28 * len(layers)), layout="constrained")
    for axis, (title, rows, limit) in zip(axes, maps):
        width = max(map(len, rows))
        filled = [list(row) + [math.nan] * (width - len(row)) for row in rows]
        top = max(value for row in rows for value in row)
        image = axis.imshow(
            filled, aspect="auto", cmap="cividis", vmin=0, vmax=max(top, limit or 0)
        )
        axis.set(title=title, xlabel="key head" if "K" in title else "head")
        axis.set_yticks(
            range(len(layers)),
            [short(n) for n in figures.layers] if axis is axes[0] else [""] * len(layers),
        )
        axis.set_xticks(range(0, width, max(1, width // 8)))
        axis.grid(visible=False)
        figure.colorbar(image, ax=axis)
    return _png(figure)


def plot_training(figures: Figures) -> bytes:
    """Loss curves, and the direction of the gradient block by block."""
    plt = report.pyplot()
    figure, (loss, cosine) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    for name, run in figures.fine_tune.items():
        colour, width, style = LINES[name]
        loss.plot(
            range(1, len(run["losses"]) + 1),
            run["losses"],
            color=colour,
            linewidth=width,
            linestyle=style,
            label=name,
        )
    loss.set(title="Fine-tuning from the same weights, same batches", xlabel="step", ylabel="loss")
    loss.legend()
    loss.xaxis.get_major_locator().set_params(integer=True)
    for lane, (name, blocks) in enumerate(figures.gradients.items()):
        names = [n for n in blocks if n != "all parameters"]
        colour = {"bf16": report.GREY}.get(name) or LINES[name][0]
        cosine.plot(
            [max(1 - blocks[n]["cosine"], 1e-9) for n in names], range(len(names)), marker="|os"[lane],
            color=colour, linestyle="none", markersize=9, markerfacecolor="none", label=name,
        )  # fmt: skip
    cosine.set_yticks(range(len(names)), [short(n) for n in names], fontsize=8)
    cosine.invert_yaxis()
    cosine.set(
        title="Gradient by block of parameters: smaller is better",
        xscale="log",
        xlabel="1 - cosine to the fp32 gradient",
    )
    # Outside, since its marks look like data.
    cosine.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=len(figures.gradients))
    return _png(figure)


# --- text -----------------------------------------------------------------------------------------------------


def _table(
    head: list[str], rows: list[list], found: list[bool] | None = None, prose: bool = False
) -> str:
    cells = "".join(f"<th>{html.escape(h)}</th>" for h in head)
    lines = [f"<div class=wide><table{' class=prose' if prose else ''}><tr>{cells}</tr>"]
    for i, row in enumerate(rows):
        mark = " class=found" if found and found[i] else ""
        lines.append(
            f"<tr{mark}>" + "".join(f"<td>{html.escape(str(c))}</td>" for c in row) + "</tr>"
        )
    return "\n".join([*lines, "</table></div>"])


def _image(png: bytes, alternative: str) -> str:
    data = base64.b64encode(png).decode()
    return f'<p><img alt="{html.escape(alternative)}" src="data:image/png;base64,{data}"></p>'


def output_table(figures: Figures) -> tuple[list[str], list[list[str]]]:
    """Head and rows of scheme against output figures, for the page and the terminal."""
    if "cosine_min" in figures.outputs["fp32"]:
        rows = [
            [n, f"{r['cosine_min']:.5f}", f"{r['cosine_mean']:.5f}"]
            for n, r in figures.outputs.items()
        ]
        return ["attention", "lowest cosine to fp32", "mean cosine"], rows
    base = figures.outputs["fp32"]["perplexity"]
    rows = [
        [
            n,
            f"{r['perplexity']:.4f}",
            f"{r['perplexity'] / base - 1:+.3%}",
            f"{r['kl']:.2e}",
            f"{r['same_top']:.2%}",
        ]
        for n, r in figures.outputs.items()
    ]
    return ["attention", "perplexity", "change", "KL, nats per token", "same first choice"], rows


def _layer_table(figures: Figures, findings: list[Finding]) -> str:
    head = [
        "layer",
        *(f"{t}\u00a0%" for t in GRADS),
        "outliers Q / K / V / dO",
        "turned into 0",
        "scales 2^",
        "largest |logit|",
        "P / dS flushed",
    ]
    rows, found = [], []
    for name, layer in figures.layers.items():
        ends = layer["extremes"]
        low, high = (
            min(min(e["scale_min"]) for e in ends.values()),
            max(max(e["scale_max"]) for e in ends.values()),
        )
        rows.append(
            [
                name,
                *(
                    f"{100 * layer['errors'][t]:.1f}" if t in layer["errors"] else "-"
                    for t in GRADS
                ),
                " / ".join(f"{max(e['outlier']):.0f}" for e in ends.values()),
                f"{max(max(e['to_zero']) for e in ends.values()):.2%}",
                f"{low} to {high}",
                f"{max(layer['largest_logit']):.0f}",
                _flushed(figures.seen.get(name, {})),
            ]
        )
        found.append(any(f.name == name for f in findings))
    return _table(head, rows, found)


def _flushed(seen: dict) -> str:
    """Mass of P and share of dS that rounding turned into 0, as famx.monitor saw it."""
    shares = (seen.get("p", {}).get("flushed_mass_share"), seen.get("ds", {}).get("flushed_share"))
    return " / ".join("-" if share is None else f"{share:.2%}" for share in shares)


GLOSSARY = {
    "MXFP8": "8-bit floats (E4M3) in which 32 values share one power-of-two scale. Three fraction bits: an error of about 5 % "
    "in a layer's output is normal and averages out; what counts is the change of the model's output and of its training.",
    "Error of a layer by itself": "the layer's attention on the inputs that it gets in fp32, against float64: norm of the "
    "difference over norm. dQ, dK, dV: gradients, for the gradient that arrives there in fp32.",
    "bf16": "the yardstick: attention on operands rounded to bf16, the usual choice in practice.",
    "KL divergence": "how much information, in nats per token, the changed next-token distribution loses. 0 is no change.",
    "Outliers": "largest value over root mean square, in the worst head.",
    "Turned into 0": "share of the nonzero values of Q, K, V or dO that rounding turns into 0, in the worst head.",
    "Scales": "exponents of the power-of-two block scales, smallest to largest.",
    "P / dS flushed": "share of the softmax weights' mass, and of dS's values, that rounding turned into 0 while the whole model ran "
    "in MXFP8 (famx.monitor, on a sample).",
    "High precision": "the layer's attention is computed by torch's SDPA on the unrounded operands.",
}


def page(title: str, headline: tuple[str, str, str], facts: list[str], figures: Figures, findings: list[Finding],
         verdicts: list[report.Verdict], policy: famx.Policy, limits: Limits) -> str:  # fmt: skip
    """The whole report. headline: (class, short verdict, what it means)."""
    escape = html.escape
    kind, word, meaning = headline
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        '<meta name=viewport content="width=device-width, initial-scale=1">',
        f"<title>MXFP8 attention in {escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>MXFP8 attention in {escape(title)}</h1>",
        *(f"<p class=origin>{escape(fact)}</p>" for fact in facts),
        f"<div class='verdict {kind}'><strong>{escape(word)}</strong><br>{escape(meaning)}</div>",
        *(f"<p>{escape(note)}</p>" for note in figures.notes),
        "<h2>Checks</h2>",
        "<div class=wide><table><tr><th>check</th><th>value</th><th>limit</th><th></th></tr>",
    ]
    for v in verdicts:
        mark = "<td class=pass>passed</td>" if v.passed else "<td class=fail>FAILED</td>"
        sign = {"<=": "at most", ">=": "at least", "==": "exactly"}[v.relation]
        parts.append(
            f"<tr><td>{escape(v.claim)}</td><td>{v.value:.4g}</td><td>{sign} {v.limit:.4g}</td>{mark}</tr>"
        )
    parts += [
        "</table></div>",
        "<h2>Forward: the model's output</h2>",
        _table(*output_table(figures)),
    ]
    parts += [
        "<h2>Layers</h2>",
        _image(plot_layers(figures, limits), "errors by layer, and damage of each layer alone"),
    ]
    parts.append(_layer_table(figures, findings))
    parts += ["<h2>Heads</h2>", _image(plot_heads(figures, limits), "maps of layers and heads")]
    parts += [
        "<h2>Backward: gradients and fine-tuning</h2>",
        _image(plot_training(figures), "loss curves and gradient cosines"),
    ]
    parts += ["<h2>Recommendation</h2>", *_recommendation(findings, policy)]
    terms = "".join(
        f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in GLOSSARY.items()
    )
    parts += ["<h2>How to read this</h2>", f"<dl>{terms}</dl>", "</body></html>"]
    return "\n".join(parts)


def _recommendation(findings: list[Finding], policy: famx.Policy) -> list[str]:
    if not findings:
        return [
            "<p>No layer needs high precision. The policy file is empty and may be left out.</p>"
        ]
    rows = [
        [f.name, "all" if f.heads is None else ", ".join(map(str, f.heads)), f.reason]
        for f in findings
    ]
    code = (
        "import flash_attn_mx as famx\n"
        "from flash_attn_mx.integrations import transformers as famx_transformers\n\n"
        "famx_transformers.register()\n"
        "famx_transformers.name_layers(model)\n"
        'model.set_attn_implementation("flash_attn_mx")\n'
        'famx.load_policy("policy.json")'
    )
    body = json.dumps(policy_file.as_dict(policy), indent=1)
    return [
        "<p>Keep these in high precision, and run the rest in MXFP8:</p>",
        _table(["layer", "query heads", "why"], rows, prose=True),
        f"<p>The policy file:</p><pre>{html.escape(body)}</pre><p>How to apply it:</p><pre>{html.escape(code)}</pre>",
    ]
