"""Speed and memory of the portable path on a CPU, each against its limit: `python benchmarks/bench_portable.py [--json FILE]`.

Ratios are against torch's fp32 scaled_dot_product_attention, timed in turns in the same process.
"""

import argparse
import functools
import multiprocessing
import re
import sys
import timeit
from pathlib import Path

import torch
import torch.nn.functional as F
from common import Rows, interleaved

import flash_attn_mx as famx
from flash_attn_mx import portable


def attention_inputs(batch, seqlen, heads, head_dim, grad):
    torch.manual_seed(0)
    return [torch.randn(batch, seqlen, heads, head_dim).requires_grad_(grad) for _ in range(3)]


def sdpa(q, k, v, causal):
    return F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal
    ).transpose(1, 2)


def _step(function, inputs, causal, dout):
    out = function(*inputs, causal=causal)
    if dout is not None:
        out.backward(dout)


def bench_against_sdpa(rows: Rows) -> None:
    for backward, limit in ((False, 4.0), (True, 5.0)):
        inputs = attention_inputs(1, 2048, 8, 128, backward)
        dout = torch.randn(1, 2048, 8, 128) if backward else None
        for causal in (False, True):
            functions = {"sdpa": sdpa, "ours": famx.flash_attn_func}
            times = interleaved(
                {k: functools.partial(_step, f, inputs, causal, dout) for k, f in functions.items()}
            )
            passes = "fwd+bwd" if backward else "fwd"
            name = f"{passes} b=1 h=8 s=2048 d=128 {'causal' if causal else 'full'}"
            figures = {key: f"{seconds * 1e3:.0f} ms" for key, seconds in times.items()}
            rows.add(name, figures, times["ours"] / times["sdpa"], limit, "x")


def bench_monitor(rows: Rows) -> None:
    """famx.monitor() with its default sample against the same calls without it."""
    for batch, seqlen, backward in ((2, 512, False), (2, 512, True), (1, 2048, True)):
        inputs = attention_inputs(batch, seqlen, 8, 64, backward)
        dout = torch.randn_like(inputs[0]) if backward else None
        plain = functools.partial(_step, famx.flash_attn_func, inputs, True, dout)

        def watched(plain=plain):
            with famx.monitor():
                plain()

        times = interleaved({"plain": plain, "watched": watched})
        passes = "fwd+bwd" if backward else "fwd"
        name = f"monitor: {passes} b={batch} h=8 s={seqlen} d=64 causal"
        figures = {key: f"{seconds * 1e3:.0f} ms" for key, seconds in times.items()}
        rows.add(name, figures, times["watched"] / times["plain"], 1.15, "x")


def bench_overhead(rows: Rows) -> None:
    """The operator against the function that it runs, on an empty batch, where nothing but the call costs time."""
    x = torch.randn(0, 1, 1, 32)
    q, k, v = (famx.quantize_mxfp8(x, axis=axis) for axis in ("rowwise", "rowwise", "colwise"))
    pairs = [t for mx in (q, k, v) for t in (mx.data, mx.scale)]

    def operator():
        torch.ops.flash_attn_mx.fwd(
            *pairs, None, None, None, None, 1, 1, 1.0, -1, -1, torch.float32
        )

    def bare():
        portable.forward(pairs[0:2], pairs[2:4], pairs[4:6], None, 1.0, (-1, -1), torch.float32)

    # The minimum: a call of some ten microseconds has no better witness on a shared machine.
    times = {
        name: min(timeit.repeat(f, number=50, repeat=100)) / 50
        for name, f in (("op", operator), ("bare", bare))
    }
    figures = {key: f"{seconds * 1e6:.1f} us" for key, seconds in times.items()}
    rows.add(
        "operator overhead, empty batch", figures, (times["op"] - times["bare"]) * 1e6, 15.0, " us"
    )


def _peak_rss_mb() -> float:
    """VmHWM, which unlike getrusage starts anew when a process is spawned."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024


def _peak_growth(seqlen: int, head_dim: int, connection) -> None:
    famx.set_fallback("silent")
    q, k, v = attention_inputs(1, seqlen, 1, head_dim, True)
    small = attention_inputs(1, 256, 1, head_dim, True)
    famx.flash_attn_func(*small, causal=True).sum().backward()  # loads what is loaded once
    before = _peak_rss_mb()
    famx.flash_attn_func(q, k, v, causal=True).sum().backward()
    connection.send(_peak_rss_mb() - before)


def bench_memory(rows: Rows) -> None:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    process = context.Process(target=_peak_growth, args=(16384, 64, sender))
    process.start()
    megabytes = receiver.recv()
    process.join()
    rows.add("peak memory, fwd+bwd h=1 s=16384 d=64 causal", {}, megabytes, 300.0, " MB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="also write the rows to this file")
    arguments = parser.parse_args()
    famx.set_fallback("silent")
    rows = Rows()
    bench_against_sdpa(rows)
    bench_overhead(rows)
    bench_monitor(rows)
    bench_memory(rows)
    return rows.finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main())
