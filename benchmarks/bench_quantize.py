"""Speed of the CPU quantiser: bytes of input per second of one core, against 1 GB/s of fp32.

A row counts the input as fp32 whatever its dtype (values * 4 bytes), so that dtypes compare.
Seconds are processor time of the one thread, which other processes disturb less than the clock.
"""

import argparse
import functools
import statistics
import sys
import time

import torch
from common import Rows

from flash_attn_mx import _native
from flash_attn_mx.quantize import quantize_pytorch

SHAPE = (2, 1024, 16, 128)  # B, S, H, D: 16 MiB of fp32
AXES = ("rowwise", "colwise", "tokenwise")
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LIMIT = 1.0  # GB/s


def seconds(function, rounds=15):
    """Processor seconds of one call: median, and the spread (slowest over fastest)."""
    function()
    times = []
    for _ in range(rounds):
        start = time.thread_time()
        function()
        times.append(time.thread_time() - start)
    return statistics.median(times), max(times) / min(times)


def cases():
    """(name, input, axis, format) of every row."""
    x = torch.randn(SHAPE)
    for axis in AXES:
        yield f"fp32 {axis} e4m3", x, axis, "e4m3"
    for axis in AXES:
        yield (
            f"fp32 {axis} e4m3 BHSD strides",
            x.transpose(1, 2).contiguous().transpose(1, 2),
            axis,
            "e4m3",
        )
    for axis in AXES:
        yield f"fp32 {axis} e5m2", x, axis, "e5m2"
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        for axis in AXES:
            yield f"{name} {axis} e4m3", x.to(dtype), axis, "e4m3"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="also write the rows to this file")
    parser.add_argument("--pytorch", action="store_true", help="also time the PyTorch path (slow)")
    arguments = parser.parse_args()
    if not _native.load():
        print(f"the C++ operator is not in use: {_native.status().reason}", file=sys.stderr)
        return 1
    torch.set_num_threads(1)
    rows = Rows()
    shape = "b={} s={} h={} d={}".format(*SHAPE)
    for name, x, axis, fmt in cases():
        call = (x, axis, "rceil", FORMATS[fmt], None)
        median, spread = seconds(functools.partial(torch.ops.flash_attn_mx.quantize, *call))
        figures = {"": shape, "time": f"{median * 1e3:.2f} ms", "spread": f"{spread:.2f}x"}
        if arguments.pytorch:
            slow, _ = seconds(functools.partial(quantize_pytorch, *call), rounds=3)
            figures["PyTorch"] = f"{slow / median:.0f}x slower"
        speed = x.numel() * 4 / median / 1e9
        rows.add(f"quantize {name}", figures, speed, LIMIT, " GB/s", at_least=True)
    return rows.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
