"""Speed of the quantiser's kernel on the GPU at hand, beside the PyTorch operators that it replaces.

The kernel is compiled for that GPU (tools/build_instance.py). Bytes are those that must move: x once, each payload and
its scales once; the limit is a share of what torch's copy of a large tensor reaches in the same run. L2 is flushed between
runs by writing 512 MB; the time is CUDA events' median.

    python benchmarks/bench_quantize_device.py --resident shipped 1280 1536

also compiles the kernel for so many resident threads per multiprocessor, and so fewer registers each, compares the bytes with
the shipped kernel's and times all of them in turn.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
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
TYPES = (torch.bfloat16, torch.float16, torch.float32)
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


def compiled(residents: list[str], folder: str) -> dict:
    """(kernel, resident) -> path of its code, compiled side by side."""
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    names = [
        device_quantize.kernel_name(torch.empty(1, d, dtype=t)) for t in TYPES for d in (64, 128)
    ]
    keys = list(itertools.product(names, residents))

    def build(key):
        name, resident = key
        out = Path(folder) / f"{name}_{resident}.fatbin"
        if resident == "shipped":
            return build_instance.build(name, arch, out)
        definition = f"FAMX_DEFINE_QUANTIZE({{name}}, {{arguments}}, {int(resident)})"
        return build_instance.build(name, arch, out, definition)

    with ThreadPoolExecutor() as pool:
        return dict(zip(keys, pool.map(build, keys)))


def same_bytes(x, axes, image, other) -> bool:
    """Whether two images write the same payloads and scales."""
    written = []
    for path in (image, other):
        outputs = device_quantize.prepare(x, axes, "rceil", E4M3, None, atoms=True)
        device_quantize.launch(outputs, path)
        written.append([t.view(torch.uint8) for pair in outputs.results.values() for t in pair])
    return all(torch.equal(a, b) for a, b in zip(*written))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="also write the rows to this file")
    parser.add_argument(
        "--resident", nargs="+", default=["shipped"], help="threads per multiprocessor, or shipped"
    )
    arguments = parser.parse_args()
    rows = Rows()
    source = torch.empty(1 << 28, device="cuda")
    copied, _ = milliseconds(lambda: source[: 1 << 27].copy_(source[1 << 27 :]))
    copy = 2 * 4 * (1 << 27) / copied / 1e6
    with tempfile.TemporaryDirectory() as folder:
        images = compiled(arguments.resident, folder)
        for dtype, shape, axes in itertools.product(TYPES, SHAPES, AXES):
            x = torch.randn(shape, dtype=dtype, device="cuda")
            name = device_quantize.kernel_name(x)
            outputs = device_quantize.prepare(x, axes, "rceil", E4M3, None, atoms=True)
            moved = sum(t.numel() * t.element_size() for t in outputs.tensors)
            torch_time, _ = milliseconds(
                lambda: [quantize_pytorch(x, axis) for axis in axes],  # noqa: B023
                rounds=5,
            )
            for resident in arguments.resident:
                image = images[name, resident]
                if not same_bytes(x, axes, image, images[name, arguments.resident[0]]):
                    raise SystemExit(f"{name} {resident}: other bytes")
                time, spread = milliseconds(lambda: device_quantize.launch(outputs, image))  # noqa: B023
                speed = moved / time / 1e6
                figures = {
                    "time": f"{time * 1e3:.1f} us",
                    "spread": f"{spread:.2f}x",
                    "of copy": f"{speed / copy:.0%}",
                    "PyTorch": f"{torch_time / time:.0f}x slower",
                }
                what = f"{name} {'+'.join(axes)} {'x'.join(map(str, shape))} {resident}"
                rows.add(what, figures, speed, SHARE * copy, " GB/s", at_least=True)
    return rows.finish(arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
