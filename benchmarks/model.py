"""A model of the kernels' time on sm_100 from counts and published rates: `python benchmarks/model.py`.

Nothing here ran on sm_100: every figure is *modelled*. Three steps, each with its inputs in sight:

1. Bounds of one 128x128 tile, in cycles of one SM: tensor core, issue slots, XU, FMA, ALU, shared memory, tensor memory,
   and in the backward the additions of dQ in the L2. Instruction counts are read from docs/kernels-report.md.
2. Cycles per tile. Forward: the largest bound, but not less than KAPPA * (issue + XU): a softmax warp overlaps these two
   only in part. KAPPA is fitted to FlashAttention-4's published pipe utilisation (four kernels; fit within 6 %), then checked
   on kernels that it was not fitted to. Backward: the largest bound / ETA, fitted likewise to two kernels, within 17 %.
3. The launch: work items in the kernel's order on 148 SMs, tiles per item as its masks skip them, prologue and epilogue.

Rates and published speeds are other people's (sources at each entry). What is assumed, not published, says so.
"""

import argparse
import heapq
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "docs" / "kernels-report.md"
LABEL = "modelled, not run on sm_100"
TILE = 128
SMS = 148
CLOCKS = {
    "low": 1.755,
    "base": 1.85,
    "high": 1.965,
}  # GHz: benchmark lock, dense peak / 148 SMs, boost
SMEM_BYTES = 128  # per cycle and SM; microbench-blackwell, QuickRunCUDA (B300)
XU_CYCLES = {"b200": 8, "b300": 4}  # per MUFU.EX2 warp instruction; cudnn-frontend PR 1178
L2_BYTES = (
    63 << 20
)  # kL2Bytes of csrc/ops/attn_fwd.cpp: heads whose K and V fit are worked on together
L2_ADD_BYTES = (
    16.4  # fp32 adds per cycle and SM: measured on an H200 (docs/backward.md); assumed for sm_100
)

# Assumptions. No source gives them; `python benchmarks/model.py` shows what they are worth.
PROLOGUE = (
    4000  # cycles of a CTA before its first tile: barriers, tensor memory, descriptors, first loads
)
ITEM = 1500  # cycles of an item that no tile hides: first loads and product, last product, epilogue
CUT = 1.3  # a tile that a mask cuts, against a full one
LONE = 1.5  # a step in which only one of a CTA's two query tiles works, against half a step of two
BANDWIDTH = (
    7.1e12 * 0.54
)  # bytes/s of the backward's passes: HBM as seen by others, times the share reached on an H200


# --- 1: bounds of a tile --------------------------------------------------------------------------------------


def _read_table(mark: str, path: Path) -> dict[str, dict[str, int]]:
    """Rows by kernel of the tables of docs/kernels-report.md that have a column of this name."""
    rows, columns = {}, []
    for line in path.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        if cells[0] == "kernel":
            columns = cells[1:] if mark in cells else []
        elif columns and re.match(r"attn_\w+$", cells[0]) and len(cells) == len(columns) + 1:
            rows[cells[0]] = dict(zip(columns, map(int, cells[1:])))
    return rows


def read_counts(path: Path = REPORT) -> dict[str, dict[str, int]]:
    """Instructions of one warp in the hot loop, by kernel, from the tables that tools/kernels_report.py writes."""
    return _read_table("MUFU.EX2", path)


def read_shared_memory(path: Path = REPORT) -> dict[str, dict[str, int]]:
    """Bytes of shared memory per tile by role, and cycles, of the backward kernels: likewise."""
    return _read_table("cycles", path)


def _pipes(counts: dict[str, int], warps: int, chip: str) -> dict[str, float]:
    """Cycles of a sub-partition's pipes for `warps` warps that each run the counted instructions."""
    packed = counts["FFMA2"] + counts["FADD2"]
    single = counts["FFMA"] + counts["FADD"] + counts["FMUL"]  # IMAD is in the table's rest
    alu = counts["F2FP"] + counts["FMNMX3"] + counts["FMNMX"]
    cycles = {
        "issue": counts["all"],
        "XU": counts["MUFU.EX2"] * XU_CYCLES[chip],
        "FMA": packed * 2 + single,
        "ALU": alu * 2,
    }
    return {name: warps * value for name, value in cycles.items()}


def _mma(steps: int, columns: int, from_tmem: bool) -> float:
    """Cycles of `steps` MXFP8 instructions of 128 rows, K = 32: published initiation intervals (microbench-blackwell)."""
    return steps * max(columns / 2, 0 if from_tmem else (128 + columns) * 32 / SMEM_BYTES)


def forward_bounds(counts: dict[str, int], head_dim: int, chip: str = "b200") -> dict[str, float]:
    """Cycles per 128x128 tile of attn_fwd (docs/forward.md); head_dim as built, 64 or 128."""
    operands = 3 * TILE * head_dim  # Q and K for S, V for O; P comes from tensor memory
    fill = TILE * head_dim  # K and V for two query tiles
    scales = 5 * 512
    return {
        "tensor": _mma(head_dim // 32, TILE, False) + _mma(TILE // 32, head_dim, True),
        **_pipes(counts, 1, chip),
        "SMEM": (operands + fill + scales) / SMEM_BYTES,
        "TMEM": 128 + 32,  # columns read and written, one per cycle (assumed)
    }


def backward_bounds(
    counts: dict[str, int], smem_cycles: float, head_dim: int, chip: str = "b200"
) -> dict[str, float]:
    """Cycles per 128x128 tile of attn_bwd (docs/backward.md) in one CTA of a pair."""
    # Of 256 rows the products read half a right operand from each CTA: none waits for shared memory.
    # One block more than 2 · D: delta.
    products = _mma(2 * (head_dim // 32) + 1, TILE, True) + 3 * _mma(4, head_dim, True)
    return {
        "tensor": products,
        **_pipes(counts, 2, chip),
        "SMEM": smem_cycles,
        "TMEM": 2 * 128 + 2 * 32 + head_dim / 2,
        "dQ in L2": TILE * head_dim * 4 / 2 / L2_ADD_BYTES,
    }


# --- 2: cycles of a tile --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """A kernel of others whose cycles per tile are published or follow from its speed, for fit or check."""

    name: str
    bounds: dict[str, float]
    cycles: float
    source: str
    fitted: bool = False


def _speed_to_cycles(tflops: float, ghz: float, head_dim: int = 128, factor: float = 1.0) -> float:
    return SMS * ghz * 1e9 * 4 * TILE * TILE * head_dim * factor / (tflops * 1e12)


_FA4 = "NCU pipe percentages, flash-attention issue 2701"
_CUDNN = "cudnn-frontend 9.22 table, B=2 H=64/8; clocks assumed, 2.062 and 1.92 GHz"
FORWARD_KNOWN = (
    Known("FA4 BF16, B200", {"tensor": 1024, "XU": 840, "issue": 575}, 1168, _FA4, True),
    Known("FA4 FP8, B200", {"tensor": 512, "XU": 840, "issue": 610}, 1174, _FA4, True),
    Known("FA4 BF16, B300", {"tensor": 1024, "XU": 516, "issue": 475}, 1025, _FA4, True),
    Known("FA4 FP8, B300", {"tensor": 512, "XU": 516, "issue": 507}, 928, _FA4, True),
    # Issue slots of cuDNN's kernels: 414 + 514 * (share of emulated exponentials) + 55, counted for such loops.
    Known("cuDNN MXFP8, GB200", {"tensor": 512, "XU": 776, "issue": 598}, _speed_to_cycles(2103, 2.062), _CUDNN),
    Known("cuDNN FP8, GB200", {"tensor": 512, "XU": 776, "issue": 598}, _speed_to_cycles(2263, 2.062), _CUDNN),
    Known("cuDNN MXFP8, GB300", {"tensor": 512, "XU": 516, "issue": 469}, _speed_to_cycles(2889, 1.92), _CUDNN),
    Known("cuDNN FP8, GB300", {"tensor": 512, "XU": 516, "issue": 469}, _speed_to_cycles(3182, 1.92), _CUDNN),
    Known("FA4 FP8 D=64, B200, no emulation", {"tensor": 256, "XU": 1032, "issue": 475},
          _speed_to_cycles(903, 1.85, 64), "flash-attention PR 2109"),
)  # fmt: skip
BACKWARD_KNOWN = (
    Known("FA4 BF16 1-CTA, B200", {"tensor": 2560, "XU": 1024, "SMEM": 3840, "dQ in L2": 65536 / L2_ADD_BYTES},
          _speed_to_cycles(1248, 1.85, factor=2.5), "flash-attention PR 2280", True),
    Known("FA4 BF16 2-CTA, B200", {"tensor": 2560, "XU": 1024, "SMEM": 2688, "dQ in L2": 32768 / L2_ADD_BYTES},
          _speed_to_cycles(1360, 1.85, factor=2.5), "flash-attention PR 2280", True),
)  # fmt: skip


def _middle(ratios: list[float]) -> float:
    """The factor whose largest relative error over the ratios is smallest."""
    return (min(ratios) * max(ratios)) ** 0.5


# A kernel that another bound holds up says nothing about KAPPA.
KAPPA = _middle(
    [
        k.cycles / (k.bounds["issue"] + k.bounds["XU"])
        for k in FORWARD_KNOWN
        if k.fitted and k.cycles > 1.05 * max(k.bounds.values())
    ]
)
ETA = _middle([max(k.bounds.values()) / k.cycles for k in BACKWARD_KNOWN if k.fitted])


def forward_tile_cycles(bounds: dict[str, float]) -> float:
    """Modelled cycles of a full tile."""
    return max(*bounds.values(), KAPPA * (bounds["issue"] + bounds["XU"]))


def backward_tile_cycles(bounds: dict[str, float]) -> float:
    """Modelled cycles of a tile."""
    return max(bounds.values()) / ETA


def calibration() -> list[dict]:
    """Every known kernel: modelled against published cycles per tile."""
    rows = []
    for known, cycles in (
        *((k, forward_tile_cycles(k.bounds)) for k in FORWARD_KNOWN),
        *((k, backward_tile_cycles(k.bounds)) for k in BACKWARD_KNOWN),
    ):
        rows.append(
            {
                "kernel": known.name,
                "largest_bound": round(max(known.bounds.values())),
                "published": round(known.cycles),
                "modelled": round(cycles),
                "error": cycles / known.cycles - 1,
                "role": "fit" if known.fitted else "check",
                "source": known.source,
            }
        )
    return rows


# Whole launches: cuDNN MXFP8 (GB200, 2.062 GHz assumed), B=2 H=64/8 D=128: seqlen -> TFLOPS (full, causal).
LAUNCH_KNOWN = {
    2048: (1754, 1330),
    4096: (1944, 1685),
    8192: (2080, 1902),
    16384: (2103, 1999),
    32768: (2070, 2046),
}


def launch_calibration() -> list[dict]:
    """The launch model with cuDNN's modelled tile against its published speeds: what step 3 is worth."""
    known = next(k for k in FORWARD_KNOWN if k.name == "cuDNN MXFP8, GB200")
    tile, rows = forward_tile_cycles(known.bounds), []
    for seqlen, published in LAUNCH_KNOWN.items():
        for causal, tflops in zip((False, True), published):
            problem = Problem(((seqlen, seqlen),) * 2, 64, 8, 128, causal)
            cycles = makespan(forward_items(problem, tile), persistent=True)
            modelled = problem.flops(False) / cycles * 2.062 / 1e3
            rows.append(
                {
                    "seqlen": seqlen,
                    "causal": causal,
                    "published": tflops,
                    "modelled": round(modelled),
                }
                | {"error": modelled / tflops - 1}
            )
    return rows


# --- 3: the launch --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """One attention call; `seqlens` are (queries, keys) of each sequence of the batch."""

    seqlens: tuple[tuple[int, int], ...]
    heads: int
    heads_k: int
    head_dim: int
    causal: bool = False
    window: tuple[int, int] = (-1, -1)

    @property
    def sides(self) -> tuple[int, int]:
        """(left, right) with causal folded in; -1 = unlimited."""
        return (self.window[0], 0) if self.causal else self.window

    @property
    def built_dim(self) -> int:
        if self.head_dim > 128:
            raise ValueError(f"head_dim: expected at most 128, as built, got {self.head_dim}")
        return 64 if self.head_dim <= 64 else 128

    def keys_seen(self, row: int, sequence: int) -> tuple[int, int]:
        """[first, end) of the keys that a query row sees; first >= end if none."""
        queries, keys = self.seqlens[sequence]
        at, (left, right) = row + keys - queries, self.sides
        first = 0 if left < 0 else max(0, at - left)
        return first, keys if right < 0 else max(0, min(keys, at + right + 1))

    def pairs(self) -> int:
        """Visible (query, key) pairs of one head, over the batch."""
        total = 0
        for sequence, (queries, keys) in enumerate(self.seqlens):
            if self.sides == (-1, -1):
                total += queries * keys
                continue
            for row in range(queries):
                first, end = self.keys_seen(row, sequence)
                total += max(0, end - first)
        return total

    def flops(self, backward: bool) -> float:
        """Credited floating point operations: 4 D per pair and head forward, 2.5 times that backward."""
        return 4.0 * self.pairs() * self.heads * self.head_dim * (2.5 if backward else 1.0)


def _tiles(problem: Problem, sequence: int, row: int) -> tuple[int, int, int]:
    """(first, end, cut) key tiles of 128 query rows; cut = how many of them a mask cuts."""
    queries, keys = problem.seqlens[sequence]
    last = min(row + TILE, queries) - 1
    if row > last:
        return 0, 0, 0
    first, end = problem.keys_seen(row, sequence)[0], problem.keys_seen(last, sequence)[1]
    if first >= end:
        return 0, 0, 0
    first_tile, end_tile = first // TILE, -(-end // TILE)
    full_first = -(-problem.keys_seen(last, sequence)[0] // TILE)
    limit = problem.keys_seen(row, sequence)[1]
    full_end = end_tile if limit == keys else limit // TILE
    return first_tile, end_tile, end_tile - first_tile - max(0, full_end - full_first)


def forward_items(problem: Problem, tile_cycles: float) -> list[float]:
    """Cycles of attn_fwd's work items (256 query rows of a head), in the kernel's order (attn_fwd/config.cuh, Work)."""
    blocks = -(-max((queries for queries, _ in problem.seqlens), default=0) // (2 * TILE))
    cycles = {}
    for sequence in range(len(problem.seqlens)):
        for block in range(blocks):
            ranges = [_tiles(problem, sequence, (2 * block + i) * TILE) for i in (0, 1)]
            sizes = [end - first + (CUT - 1) * cut for first, end, cut in ranges]
            both, alone = min(sizes), max(sizes) - min(sizes)
            work = tile_cycles * (2 * both + LONE * alone)
            cycles[sequence, block] = work + ITEM if work else 0.0
    longest_k = max((keys for _, keys in problem.seqlens), default=0)
    fitting = max(1, L2_BYTES // max(1, 2 * longest_k * problem.head_dim))
    total = problem.heads * len(problem.seqlens)
    at_once = min(total, fitting * (problem.heads // problem.heads_k))
    return [
        cycles[head // problem.heads, block]
        for group in range(0, total, at_once)
        for block in reversed(range(blocks))
        for head in range(group, min(group + at_once, total))
    ]


def backward_items(problem: Problem, tile_cycles: float) -> list[float]:
    """Cycles of attn_bwd's CTAs (pairs of 128 keys of a key head each), first keys of every head first."""
    longest = max((keys for _, keys in problem.seqlens), default=0)
    steps = {}  # (sequence, pair of key tiles) -> query tiles that see one of them, cut ones weighted
    for sequence, (queries, _) in enumerate(problem.seqlens):
        for row in range(0, queries, TILE):
            first, end, cut = _tiles(problem, sequence, row)
            pairs = range(first // 2, -(-end // 2))
            for pair in pairs:
                weight = 1 + (CUT - 1) * min(1, cut / len(pairs))  # the two CTAs keep step
                steps[sequence, pair] = steps.get((sequence, pair), 0.0) + weight
    group = problem.heads // problem.heads_k
    items = []
    for pair in range(-(-longest // (2 * TILE))):
        for sequence in range(len(problem.seqlens)):
            cycles = steps.get((sequence, pair), 0.0) * group * tile_cycles
            items += [PROLOGUE + ITEM + cycles] * (2 * problem.heads_k)
    return items


def makespan(items: list[float], persistent: bool) -> float:
    """Cycles until 148 SMs have done the items in order: dealt out in turn, or each to the SM that is free first."""
    if persistent:
        loads = [sum(items[sm::SMS]) for sm in range(SMS)]
        return PROLOGUE + max(loads)
    free = [0.0] * SMS
    for cycles in items:
        heapq.heapreplace(free, free[0] + cycles)
    return max(free)


def predict(problem: Problem, backward: bool = False, chip: str = "b200") -> dict:
    """Modelled cycles and speed of one pass of our kernels, with the bounds they come from.

    Returns: bounds and cycles per tile; the largest bound's name; cycles of the launch; microseconds and TFLOPS at each
    clock; `bound_tflops`, what the largest bound alone would allow at the base clock; microseconds of the backward's passes over
    memory, which are not in the others.
    """
    dim = problem.built_dim
    kernel = f"attn_{'bwd' if backward else 'fwd'}_d{dim}_bf16"
    counts = read_counts()
    if kernel not in counts:
        raise ValueError(
            f"docs/kernels-report.md: expected counts of {kernel}, got {sorted(counts)}"
        )
    if backward:
        smem = read_shared_memory()[kernel]["cycles"]
        bounds = backward_bounds(counts[kernel], smem, dim, chip)
        tile = backward_tile_cycles(bounds)
        cycles = makespan(backward_items(problem, tile), persistent=False)
    else:
        bounds = forward_bounds(counts[kernel], dim, chip)
        tile = forward_tile_cycles(bounds)
        cycles = makespan(forward_items(problem, tile), persistent=True)
    flops = problem.flops(backward)
    tokens = sum(queries for queries, _ in problem.seqlens) * problem.heads
    passes = tokens * dim * (2 + 33 / 32 + 4 + 4 + 2) / BANDWIDTH * 1e6 if backward else 0.0
    return {
        "label": LABEL,
        "kernel": kernel,
        "bounds": {name: round(value) for name, value in bounds.items()},
        "largest_bound": max(bounds, key=bounds.get),
        "cycles_per_tile": round(tile),
        "cycles": round(cycles),
        "us": {name: cycles / ghz / 1e3 for name, ghz in CLOCKS.items()},
        "tflops": {name: flops / cycles * ghz / 1e3 for name, ghz in CLOCKS.items()},
        "bound_tflops": flops / cycles * CLOCKS["base"] / 1e3 * tile / max(bounds.values()),
        "passes_us": passes,
    }  # fmt: skip


def _print_calibration() -> None:
    print(
        "| kernel | largest bound | published cycles/tile | modelled | error | used for | source |"
    )
    print("|---|---:|---:|---:|---:|---|---|")
    for r in calibration():
        figures = f"{r['largest_bound']} | {r['published']} | {r['modelled']} | {r['error']:+.1%}"
        print(f"| {r['kernel']} | {figures} | {r['role']} | {r['source']} |")
    print("\nWhole launches of cuDNN MXFP8, GB200, D=128, TFLOPS (check of step 3)\n")
    print("| S | causal | published | modelled | error |\n|---:|---|---:|---:|---:|")
    for r in launch_calibration():
        figures = f"{r['published']} | {r['modelled']} | {r['error']:+.1%}"
        print(f"| {r['seqlen']} | {r['causal']} | {figures} |")


def _print_sweep(backward: bool) -> None:
    print(f"\n{'backward' if backward else 'forward'}, B=2 H=64/8, {LABEL}\n")
    print(
        "| D | causal | S | bounds, cycles per tile | modelled per tile | TFLOPS low / base / high clock |"
    )
    print("|---|---|---:|---|---:|---|")
    for dim in (64, 128):
        for causal in (False, True):
            for seqlen in (2048, 8192, 32768):
                r = predict(Problem(((seqlen, seqlen),) * 2, 64, 8, dim, causal), backward)
                bounds = ", ".join(f"{name} {value}" for name, value in r["bounds"].items())
                speeds = " / ".join(f"{value:.0f}" for value in r["tflops"].values())
                tile = f"{bounds} | {r['cycles_per_tile']}"
                print(f"| {dim} | {causal} | {seqlen} | {tile} | {speeds} |")


def main(argv=None) -> int:
    """Prints the calibration, the bounds of the built kernels, and a sweep."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args(argv)
    print(f"{LABEL}. KAPPA = {KAPPA:.3f}, ETA = {ETA:.3f}\n")
    _print_calibration()
    for backward in (False, True):
        _print_sweep(backward)
    return 0


if __name__ == "__main__":
    sys.exit(main())
