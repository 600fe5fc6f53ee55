"""What the demo shows: progress bar, verdicts, terminal summary, JSON files, look of plots."""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import pathlib
import platform
import sys
import textwrap
import time

import torch

WIDTH = 110  # columns of the terminal summary

# Okabe-Ito, a palette that colour-blind readers can tell apart; every series also has its own
# marker or dash.
BLACK, ORANGE, SKY, GREEN, BLUE, RED, GREY = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#0072B2",
    "#D55E00",
    "#777777",
)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One claim of the demo that can fail: `value` `relation` `limit`."""

    claim: str
    value: float
    relation: str  # "<=", ">=" or "=="
    limit: float

    @property
    def passed(self) -> bool:
        """False for NaN, whatever the relation."""
        compare = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}[self.relation]
        return bool(compare(self.value, self.limit))

    def line(self) -> str:
        word = {"<=": "at most", ">=": "at least", "==": "exactly"}[self.relation]
        mark = "PASS" if self.passed else "FAIL"
        return f"{mark}  {self.claim}: {_number(self.value)} (must be {word} {_number(self.limit)})"

    def as_dict(self) -> dict:
        return {**dataclasses.asdict(self), "passed": self.passed}


@dataclasses.dataclass
class Section:
    """The outcome of one part: prose for the terminal, JSON figures, verdicts for the status."""

    name: str
    title: str
    text: list[
        str
    ]  # paragraphs (wrapped), or lines that begin with two spaces (printed as they are)
    figures: dict
    verdicts: list[Verdict]
    files: list[str]
    seconds: float = 0.0


def _number(value: float) -> str:
    return f"{value:d}" if isinstance(value, int) else f"{value:.4g}"


class Progress:
    """One bar over all parts, on stderr; prints a line every 10 s where stderr is not a terminal.

    A part of weight w moves the bar by w; inside it, `update` takes the fraction that is done.
    """

    def __init__(self, weights: dict[str, float], stream=None):
        self._weights = weights
        self._stream = stream or sys.stderr
        self._tty = self._stream.isatty()
        self._start = self._last_print = time.monotonic()
        self._done = 0.0
        self._part = ""

    def begin(self, part: str) -> None:
        self._part = part
        self.update(0.0, "starting", force=True)

    def end(self) -> None:
        self._done += self._weights[self._part]
        self.update(0.0, "done", fraction_of=0.0, force=True)

    def update(self, fraction: float, what: str, fraction_of=None, force: bool = False) -> None:
        """Draws the bar with `fraction` (0 to 1) of the part done; `what` says what is going on."""
        now = time.monotonic()
        if not force and now - self._last_print < (0.1 if self._tty else 10.0):
            return
        self._last_print = now
        weight = self._weights[self._part] if fraction_of is None else fraction_of
        share = min((self._done + fraction * weight) / sum(self._weights.values()), 1.0)
        elapsed = int(now - self._start)
        bar = ("#" * round(share * 24)).ljust(24, ".")
        text = f"[{bar}] {share:4.0%} {elapsed // 60}:{elapsed % 60:02d}  {self._part}: {what}"
        if self._tty:
            self._stream.write("\r" + text[: WIDTH - 1].ljust(WIDTH - 1))
        else:
            self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        if self._tty:
            self._stream.write("\r" + " " * (WIDTH - 1) + "\r")
            self._stream.flush()


def environment() -> dict:
    """What ran where, for the JSON files and the head of the summary."""
    return {
        "backend": "portable PyTorch path",
        "device": "cpu",
        "threads": torch.get_num_threads(),
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sm_100 kernels": "not run on sm_100",
    }


def write_json(path: pathlib.Path, section: Section) -> None:
    body = {
        "what": section.title,
        "environment": environment(),
        "figures": section.figures,
        "verdicts": [v.as_dict() for v in section.verdicts],
        "seconds": round(section.seconds, 1),
    }
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def _wrapped(paragraph: str, indent: str = "   ") -> str:
    if paragraph.startswith("  "):
        return indent + paragraph.rstrip()
    return textwrap.fill(paragraph, WIDTH, initial_indent=indent, subsequent_indent=indent)


def summary(sections: list[Section], out: pathlib.Path, quick: bool = False) -> str:
    """The text that the demo ends with, for a reader who has not read anything else."""
    env = environment()
    lines = [
        "",
        "=" * WIDTH,
        "flash_attn_mx demo: attention in MXFP8, 8-bit floats in which 32 values share one "
        "power-of-two scale",
        "=" * WIDTH,
        _wrapped(
            f"What ran: the portable PyTorch path, on this CPU (threads: {env['threads']}, torch "
            f"{env['torch']}). It rounds where the Blackwell kernels round, so what you see below "
            "is accuracy, not speed. The Blackwell kernels themselves: not run on sm_100.",
            "",
        ),
    ]
    if quick:
        lines += ["", "--quick: tiny sizes, to see that everything runs; the figures mean nothing."]
    for number, section in enumerate(sections, 1):
        lines += ["", f"{number}. {section.title}  ({section.seconds:.0f} s)"]
        lines += [_wrapped(paragraph) for paragraph in section.text]
        lines += ["   " + verdict.line() for verdict in section.verdicts]
        lines += ["   see " + ", ".join(os.path.join(out, name) for name in section.files)]
    verdicts = [v for section in sections for v in section.verdicts]
    failed = [v for v in verdicts if not v.passed]
    total = sum(section.seconds for section in sections)
    lines += ["", "-" * WIDTH]
    if failed:
        lines += [f"{len(failed)} of {len(verdicts)} checks FAILED, in {total:.0f} s:"]
        lines += ["   " + verdict.line() for verdict in failed]
    else:
        lines += [f"All {len(verdicts)} checks passed, in {total:.0f} s."]
    return "\n".join(lines)


def pyplot():
    """matplotlib.pyplot, drawing to files only, in the look of all plots of the demo."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "figure.dpi": 110,
            "font.size": 10,
            "axes.titlesize": 11,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "grid.color": "#DDDDDD",
            "grid.linewidth": 0.6,
            "axes.axisbelow": True,
            "legend.framealpha": 0.85,
            "legend.edgecolor": "none",
        }
    )
    return plt
