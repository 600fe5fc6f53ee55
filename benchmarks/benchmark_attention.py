"""Time, speed and error of attention over a grid of shapes, on a CPU, a CUDA GPU, or by the model of sm_100.

    python benchmarks/benchmark_attention.py --dtype mxfp8 bf16 --seqlen 1024 4096 --head-dim 64 128 --causal --backward
    python benchmarks/benchmark_attention.py --backend emulator --model --seqlen 8192

Every list sweeps. Times are medians; on a GPU by CUDA events, with the L2 flushed before each call. The backward is timed by
itself and includes what autograd does in it (for mxfp8: quantising dO). TFLOPS count visible pairs only: 4 D per pair and
head forward, 2.5 times that backward. Errors are relative (Frobenius) against float64 attention on the same inputs, for the
query heads of key head 0 in the first sequence. fp8 is a simulation of per-head E4M3 as FlashAttention-3 rounds: errors, no time.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Optional

import torch
import torch.nn.functional as F
from common import header
from model import LABEL, Problem, predict

import flash_attn_mx as famx
from flash_attn_mx.demo import accuracy

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = (*DTYPES, "fp8", "mxfp8")
FLUSH_BYTES = 256 << 20  # more than any L2
SIMULATED_PAIRS = 1 << 26  # of Sq x Sk x heads that the simulation of fp8 may hold
EMULATED_PAIRS = 1 << 21  # of visible pairs x heads; the emulator takes minutes beyond


@dataclass(frozen=True)
class Case:
    """One point of the grid."""

    kind: str
    problem: Problem
    varlen: bool

    @property
    def name(self) -> str:
        p = self.problem
        lengths = sorted({q for q, _ in p.seqlens})
        mask = "causal " if p.causal else "full "
        mask += f"window={p.window[0]},{p.window[1]} " if p.window != (-1, -1) else ""
        seqlen = f"{lengths[0]}..{lengths[-1]} packed" if self.varlen else str(lengths[0])
        heads = f"{p.heads}/{p.heads_k}" if p.heads != p.heads_k else str(p.heads)
        return f"{self.kind} d={p.head_dim} {mask}b={len(p.seqlens)} h={heads} s={seqlen}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dtype", nargs="+", choices=KINDS, default=["mxfp8"])
    add("--batch-size", nargs="+", type=int, default=[1])
    add("--seqlen", nargs="+", type=int, default=[1024])
    add("--num-heads", nargs="+", type=int, default=[8])
    add("--num-kv-heads", nargs="+", type=int, help="default: as --num-heads")
    add("--head-dim", nargs="+", type=int, default=[128])
    add("--backward", action="store_true", help="also the backward")
    add("--causal", action="store_true")
    add(
        "--window",
        nargs=2,
        type=int,
        metavar=("LEFT", "RIGHT"),
        default=(-1, -1),
        help="-1 = unlimited",
    )
    add("--varlen", action="store_true", help="packed sequences of seqlen/2 to seqlen tokens")
    add("--warmup", type=int, default=2)
    add("--iters", type=int, default=5)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add(
        "--backend",
        choices=("auto", "sm100", "portable", "emulator"),
        default="auto",
        help="of mxfp8",
    )
    add(
        "--model",
        action="store_true",
        help=f"with --backend emulator: speed from benchmarks/model.py ({LABEL})",
    )
    add("--no-errors", action="store_true", help="leave out the comparison with float64")
    add("--no-baseline", action="store_true", help="leave out bf16 SDPA")
    add("--json", type=Path, help="also write the rows to this file")
    return parser  # fmt: skip


def _lengths(batch: int, seqlen: int, varlen: bool) -> tuple[int, ...]:
    if not varlen:
        return (seqlen,) * batch
    return tuple(max(1, round(seqlen * (0.5 + 0.5 * (i + 1) / batch))) for i in range(batch))


def cases(options: argparse.Namespace) -> list[Case]:
    """The grid, checked. Raises: ValueError."""
    found = []
    for kind in options.dtype:
        for dim in options.head_dim:
            for heads in options.num_heads:
                for heads_k in options.num_kv_heads or [heads]:
                    if heads_k < 1 or heads % heads_k:
                        raise ValueError(
                            f"--num-kv-heads: expected a divisor of --num-heads {heads}, got {heads_k}"
                        )
                    for batch in options.batch_size:
                        for seqlen in options.seqlen:
                            lengths = _lengths(batch, seqlen, options.varlen)
                            pairs = tuple((n, n) for n in lengths)
                            window = tuple(options.window)
                            problem = Problem(pairs, heads, heads_k, dim, options.causal, window)
                            found.append(Case(kind, problem, options.varlen))
    return found


# --- what is timed --------------------------------------------------------------------------------------------


def inputs(case: Case, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and dout on the packed token axis, (T, H, D); the same numbers whatever the dtype."""
    generator = torch.Generator().manual_seed(0)
    p, tokens = case.problem, sum(q for q, _ in case.problem.seqlens)
    heads = (p.heads, p.heads_k, p.heads_k, p.heads)
    return [
        torch.randn(tokens, h, p.head_dim, generator=generator).to(torch.bfloat16).to(device, dtype)
        for h in heads
    ]


def _sdpa(q, k, v, problem: Problem, mask: Optional[torch.Tensor]):
    out = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        attn_mask=mask,
        is_causal=problem.causal and mask is None,
        enable_gqa=problem.heads != problem.heads_k,
    )
    return out.transpose(1, 2)


def sdpa_of(case: Case, device: str) -> Callable:
    """torch SDPA on packed tokens: one call if all sequences are equally long, else one for each."""
    p, lengths = case.problem, [q for q, _ in case.problem.seqlens]
    masks = {}
    if p.window != (-1, -1):
        for n in set(lengths):
            distance = torch.arange(n)[:, None] - torch.arange(n)
            left, right = p.sides
            seen = (distance <= left) if left >= 0 else torch.ones(n, n, dtype=torch.bool)
            masks[n] = (seen & (distance >= -right) if right >= 0 else seen).to(device)

    def run(q, k, v):
        if len(set(lengths)) == 1:
            dense = (x.unflatten(0, (len(lengths), -1)) for x in (q, k, v))
            return _sdpa(*dense, p, masks.get(lengths[0])).flatten(0, 1)
        parts = zip(*(x.split(lengths) for x in (q, k, v)))
        return torch.cat(
            [_sdpa(*(x[None] for x in part), p, masks.get(len(part[0])))[0] for part in parts]
        )

    return run


def mxfp8_of(case: Case, device: str, backend: str) -> Callable:
    """flash_attn_func, or flash_attn_varlen_func where sequences are packed."""
    p, lengths = case.problem, [q for q, _ in case.problem.seqlens]
    options = {"causal": p.causal, "window_size": p.window}
    options["backend"] = None if backend == "auto" else backend
    starts = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)

    def run(q, k, v):
        if case.varlen:
            bounds = (starts, starts, max(lengths), max(lengths))
            return famx.flash_attn_varlen_func(q, k, v, *bounds, **options)
        dense = (x.unflatten(0, (len(lengths), -1)) for x in (q, k, v))
        return famx.flash_attn_func(*dense, **options).flatten(0, 1)

    return run


def timed(function: Callable, device: str, warmup: int, iters: int) -> dict[str, float]:
    """Median, fastest and slowest seconds of a call."""
    for _ in range(warmup):
        function()
    seconds = []
    if device.startswith("cuda"):
        flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(iters)]
        for start, end in events:
            flush.zero_()
            start.record()
            function()
            end.record()
        torch.cuda.synchronize()
        seconds = [start.elapsed_time(end) / 1e3 for start, end in events]
    else:
        for _ in range(iters):
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
    return {"median": statistics.median(seconds), "min": min(seconds), "max": max(seconds)}


def _run_times(attention, tensors, backward: bool, options) -> dict[str, dict[str, float]]:
    *qkv, dout = tensors
    measure = (options.device, options.warmup, options.iters)
    if not backward:
        with torch.no_grad():
            return {"fwd": timed(lambda: attention(*qkv), *measure)}
    leaves = [x.detach().requires_grad_() for x in qkv]
    times = {"fwd": timed(lambda: attention(*leaves), *measure)}
    out = attention(*leaves)
    times["bwd"] = timed(
        lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), *measure
    )
    return times


# --- errors ---------------------------------------------------------------------------------------------------


def _sample(case: Case, tensors) -> list[torch.Tensor]:
    """q, k, v, dout of the first sequence and the heads of key head 0."""
    p = case.problem
    group, length = p.heads // p.heads_k, p.seqlens[0][0]
    return [x[:length, :n] for x, n in zip(tensors, (group, 1, 1, group))]


def exact(problem: Problem, q, k, v, dout, rows: int = 512) -> tuple[torch.Tensor, ...]:
    """(O, dQ, dK, dV) in float64 for one key head: q, dout (S, G, D), k, v (S, 1, D); some rows at a time."""
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    key, value, scale = k[:, 0], v[:, 0], q.shape[-1] ** -0.5
    left, right = problem.sides
    columns = torch.arange(len(key), device=q.device)
    out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, key, value))
    for head in range(q.shape[1]):
        for start in range(0, len(q), rows):
            part = slice(start, start + rows)
            x = q[part, head] @ key.T * scale
            row = torch.arange(start, start + len(x), device=q.device)[:, None]
            if left >= 0:
                x = x.masked_fill(columns < row - left, -torch.inf)
            if right >= 0:
                x = x.masked_fill(columns > row + right, -torch.inf)
            p = x.softmax(-1)
            do = dout[part, head]
            out[part, head] = p @ value
            ds = p * (do @ value.T - (out[part, head] * do).sum(-1, keepdim=True))
            dq[part, head] = ds @ key * scale
            dk += ds.T @ q[part, head] * scale
            dv += p.T @ do
    return out, dq, dk[:, None], dv[:, None]


def _relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((got.double() - wanted).norm() / wanted.norm()).item()


def measured_errors(case: Case, attention: Callable, tensors, backward: bool) -> dict[str, float]:
    """Relative errors of what `attention` returned for the sample."""
    *qkv, dout = tensors
    leaves = [x.detach().requires_grad_(backward) for x in qkv]
    out = attention(*leaves)
    grads = torch.autograd.grad(out, leaves, dout) if backward else ()
    dq, dk, dv = grads or (None,) * 3
    sample = _sample(case, tensors)
    got = [out.detach(), dq, dk, dv]
    wanted = exact(case.problem, *sample)
    group, length = sample[0].shape[1], len(sample[0])
    heads = (group, group, 1, 1)
    pairs = zip(accuracy.GRADS, got, wanted, heads)
    return {t: _relative(a[:length, :n], b) for t, a, b, n in pairs if a is not None}


def simulated_errors(case: Case, tensors, backward: bool) -> dict[str, float]:
    """The same for per-head E4M3, simulated (flash_attn_mx/demo/accuracy.py). Raises ValueError where it would not fit."""
    p = case.problem
    if p.window != (-1, -1):
        raise ValueError("--dtype fp8: expected no --window, which the simulation does not have")
    sample = _sample(case, [x.float() for x in tensors])
    q, k, v, dout = (x.transpose(0, 1) for x in sample)
    if q.shape[0] * q.shape[1] * k.shape[1] > SIMULATED_PAIRS:
        raise ValueError(
            f"--dtype fp8: expected at most {SIMULATED_PAIRS} pairs, got --seqlen {q.shape[1]}"
        )
    group = q.shape[0]
    k, v = (x.expand(group, -1, -1) for x in (k, v))
    out, dq, dk, dv = accuracy.simulate(accuracy.PER_TENSOR, q, k, v, dout, causal=p.causal)
    got = (out, dq, dk.sum(0, keepdim=True), dv.sum(0, keepdim=True))
    wanted = exact(p, *sample)
    names = accuracy.GRADS if backward else accuracy.GRADS[:1]
    return {t: _relative(a.transpose(0, 1), b) for t, a, b in zip(names, got, wanted)}


# --- rows -----------------------------------------------------------------------------------------------------


def _backend_note(case: Case, tensors, options) -> str:
    if case.kind != "mxfp8":
        return "torch SDPA" if case.kind in DTYPES else "simulated"
    *qkv, _ = (x[None] for x in tensors)
    backend = None if options.backend == "auto" else options.backend
    return str(famx.explain(*qkv, backend=backend).backend)


def _modelled(case: Case, backward: bool) -> dict[str, dict]:
    return {
        name: predict(case.problem, backward=name == "bwd")
        for name in (("fwd", "bwd") if backward else ("fwd",))
    }


def run_case(case: Case, options, baselines: dict) -> list[dict]:
    """The rows of one case: "fwd", and "bwd" with --backward."""
    modelled = options.model and case.kind == "mxfp8"
    emulated = options.backend == "emulator" and case.kind == "mxfp8"
    tensors = inputs(case, options.device, DTYPES.get(case.kind, torch.bfloat16))
    too_long = emulated and case.problem.pairs() * case.problem.heads > EMULATED_PAIRS
    if case.kind == "mxfp8":
        attention = mxfp8_of(case, options.device, options.backend)
    else:
        attention = sdpa_of(case, options.device)
    errors, times, models = {}, {}, {}
    if not options.no_errors and not too_long:
        if case.kind == "fp8":
            errors = simulated_errors(case, tensors, options.backward)
        else:
            errors = measured_errors(case, attention, tensors, options.backward)
    if modelled:
        models = _modelled(case, options.backward)
    if case.kind == "bf16" and case.problem in baselines:
        times = baselines[case.problem]
    elif case.kind != "fp8" and not emulated:  # the wall time of an emulator says nothing
        times = _run_times(attention, tensors, options.backward, options)
    if case.kind == "bf16":
        baselines[case.problem] = times
    elif times and not options.no_baseline and case.problem not in baselines:
        plain = [x.bfloat16() for x in tensors]
        function = sdpa_of(case, options.device)
        baselines[case.problem] = _run_times(function, plain, options.backward, options)
    only_modelled = modelled and (too_long or options.no_errors)  # needs no emulator
    note = "emulator" if only_modelled else _backend_note(case, tensors, options)
    if too_long and not options.no_errors:
        note += ", too long to emulate"
    rows = []
    for name in ("fwd", "bwd") if options.backward else ("fwd",):
        row = {"pass": name, "case": case.name, "backend": note}
        keys = ("O",) if name == "fwd" else ("dQ", "dK", "dV")
        row["errors"] = {key: errors[key] for key in keys if key in errors}
        flops = case.problem.flops(name == "bwd")
        if name in times:
            seconds = times[name]["median"]
            row |= {"seconds": times[name], "tflops": flops / seconds / 1e12}
            if case.problem in baselines:
                row["speedup_over_bf16_sdpa"] = baselines[case.problem][name]["median"] / seconds
        if name in models:
            row["model"] = models[name]
        rows.append(row)
    return rows


def _cells(row: dict) -> list[str]:
    errors = " ".join(f"{key} {value:.2%}" for key, value in row["errors"].items()) or "-"
    if "model" in row:
        m = row["model"]
        us, tflops = m["us"]["base"], m["tflops"]
        time_cell = f"{us:.1f} us MODELLED ({m['cycles']} cycles)"
        speed = f"{tflops['low']:.0f}/{tflops['base']:.0f}/{tflops['high']:.0f} MODELLED"
        return [time_cell, speed, "-", errors]
    if "seconds" not in row:
        return ["-", "-", "-", errors]
    speedup = row.get("speedup_over_bf16_sdpa")
    return [
        f"{row['seconds']['median'] * 1e6:.1f} us ({row['seconds']['min'] * 1e6:.1f}..{row['seconds']['max'] * 1e6:.1f})",
        f"{row['tflops']:.3g}",
        f"{speedup:.3g}x" if speedup else "-",
        errors,
    ]


def main(argv=None) -> int:
    options = _parser().parse_args(argv)
    if options.model and options.backend != "emulator":
        print(
            "--model: expected with --backend emulator, the kernels that it models", file=sys.stderr
        )
        return 2
    famx.set_fallback("silent")
    environment = header()
    print("  ".join(f"{key}={value}" for key, value in environment.items()))
    if options.model:
        print(
            f"speeds: {LABEL}; TFLOPS at 1.755/1.85/1.965 GHz, time at 1.85 GHz. benchmarks/model.py has the calibration."
        )
    head = ("time", "TFLOPS", "x bf16 SDPA", "relative error, sample")
    print(f"{'pass and case':58s} | " + " | ".join(head))
    rows, baselines = [], {}
    try:
        for case in cases(options):
            for row in run_case(case, options, baselines):
                rows.append(row)
                name = f"{row['pass']} {row['case']}"
                print(f"{name:58s} | {' | '.join(_cells(row))} | {row['backend']}", flush=True)
    except (ValueError, NotImplementedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json:
        options.json.write_text(
            json.dumps({"environment": environment, "rows": rows}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
