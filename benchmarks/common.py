"""Timing, environment header and row printing shared by the benchmarks."""

import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path

import torch


def interleaved(functions: dict, rounds: int = 5) -> dict[str, float]:
    """Median seconds of each function, called in turns so that a noisy moment hits all of them."""
    for function in functions.values():
        function()
    times = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def header() -> dict:
    """What the figures were measured on."""
    root = Path(__file__).parents[1]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True
    ).stdout.strip()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "torch": torch.__version__,
        "commit": commit or "unknown",
        "load": os.getloadavg()[0],
    }


class Rows:
    """Collects and prints results: name, figures, and a verdict against a limit where there is one."""

    def __init__(self) -> None:
        self.environment, self.rows = header(), []
        print("  ".join(f"{key}={value}" for key, value in self.environment.items()))

    def add(
        self,
        name: str,
        figures: dict[str, str],
        value: float,
        limit: float,
        unit: str,
        at_least: bool = False,
    ) -> None:
        good = value >= limit if at_least else value <= limit
        bound = f"{'>=' if at_least else '<='} {limit:g}{unit}"
        self.rows.append(
            {"name": name, **figures, "value": value, "unit": unit, "limit": bound, "ok": good}
        )
        columns = "  ".join(f"{key} {text}" for key, text in figures.items())
        print(
            f"{name:44s} | {columns:48s} | {value:8.3g}{unit} | {bound:10s} {'ok' if good else 'MISSED'}"
        )

    def finish(self, path: str | None) -> int:
        """Writes JSON where asked; returns the exit status."""
        if path:
            Path(path).write_text(
                json.dumps({"environment": self.environment, "rows": self.rows}, indent=1) + "\n"
            )
        return 0 if all(row["ok"] for row in self.rows) else 1
