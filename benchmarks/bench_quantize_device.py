"""Speed of the quantiser's kernel on the GPU at hand, beside the PyTorch operators that it replaces.

The kernel is compiled for that GPU (tools/build_instance.py). Bytes are those that must move: x once, each payload and
its scales once; the limit is a share of what torch's copy of a large tensor reaches in the same run. L2 is flushed between
runs by writing 512 MB; the time is CUDA events' median.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from common import Rows

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flash_attn_mx import device_quantize  # noqa: E402
from flash_attn_mx.quantize import quantize_pytorch  # noqa: E402
from tools import build_instance  # noqa: E402

E4M3 = torch.float8_e4m3fn
AXES = (["rowwise"], ["colwise"], ["colwise", "tokenwise"], ["rowwise", "colwise"])
SHAPES = ((4, 8192, 16, 128), (4, 8192, 16, 64))
SHARE = 0.7  # of the copy's bytes per second


def milliseconds(function, rounds=20):
    """Median and spread (slowest over fastest) of one call, L2 cold."""
    flush = torch.empty(512 << 20, dtype=torch.int8, device="cuda")
    for _ in range(3):
        function()
    times = []
    for _ in range(rounds):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times), max(times) / min(times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="also write the rows to this file")
    arguments = parser.parse_args()
    major, minor = torch.cuda.get_device_capability()
    rows = Rows()
    source = torch.empty(1 << 28, device="cuda")
    copied, _ = milliseconds(lambda: source[: 1 << 27].copy_(source[1 << 27 :]))
    limit = SHARE * 2 * 4 * (1 << 27) / copied / 1e6
    with tempfile.TemporaryDirectory() as folder:
        for dtype in (torch.bfloat16, torch.float32):
            for shape in SHAPES:
                x = torch.randn(shape, dtype=dtype, device="cuda")
                name = device_quantize.kernel_name(x)
                image = build_instance.build(
                    name, f"sm_{major}{minor}", Path(folder) / f"{name}.fatbin"
                )
                for axes in AXES:
                    outputs = device_quantize.prepare(x, axes, "rceil", E4M3, None, atoms=True)
                    time, spread = milliseconds(lambda: device_quantize.launch(outputs, image))  # noqa: B023
                    torch_time, _ = milliseconds(
                        lambda: [quantize_pytorch(x, axis) for axis in axes],  # noqa: B023
                        rounds=5,
                    )
                    moved = sum(t.numel() * t.element_size() for t in outputs.tensors)
                    figures = {
                        "time": f"{time * 1e3:.1f} us",
                        "spread": f"{spread:.2f}x",
                        "PyTorch": f"{torch_time / time:.0f}x slower",
                    }
                    what = f"{name} {'+'.join(axes)} {'x'.join(map(str, shape))}"
                    rows.add(what, figures, moved / time / 1e6, limit, " GB/s", at_least=True)
    return rows.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
