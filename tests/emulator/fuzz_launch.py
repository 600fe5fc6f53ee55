"""Fuzzes launching: any kernel with any arguments gives a Report or one of the documented errors, within its limits.

`python tests/emulator/fuzz_launch.py --seconds 300`. Kernels are probes and the package's own small ones with one to a few changes;
arguments are right, wrong or odd.
"""

import sys
from types import SimpleNamespace

import fuzzing
import numpy as np

ODD = [0, 1, -1, 2**31, 2**63, 2**64 - 1, 2**65, 1.5, float("nan"), True, None, "x", b"", b"12345678", b"\xff" * 128, [], ()]  # fmt: skip


def launch_of(rng):
    """Arguments of a launch, as data: how many tensors of what size, which are replaced, which options."""
    block = rng.choice(
        (32, 32, 32, 64, 96, 128, 1, 33, 1024, 1025, (16, 2, 2), (0,), (2**31 - 1,) * 3)
    )
    grid = rng.choice((1, 1, 2, 8, (2, 2, 2), 10**6, (2**31 - 1,) * 3))
    return {
        "block": block, "grid": grid, "cluster": rng.choice((1, 1, 1, 2, 4, 16, 17, (2, 2, 1))), "smem": rng.choice((0, 0, 1024, 65536, 232448, 232449, -1)),
        "order": rng.choice(("eager", "delayed", "random")), "seed": rng.randrange(8), "threads": rng.choice((1, 2)), "mma": rng.choice(("model", "fp64")), "checks": rng.choice((True, True, False, ("uninit",), ("async", "leaks"))),
        "sizes": [rng.choice((16, 4096, 16384, 65536)) for _ in range(4)], "odd": {rng.randrange(6): rng.choice(ODD) for _ in range(rng.choice((0, 0, 0, 1, 2)))},
        "map": (rng.randrange(1, 6), rng.choice(("uint8", "float16", "bfloat16", "float32", "uint64")), rng.choice(("none", "32B", "64B", "128B", "128B_ATOM_32B")), [rng.choice((1, 2, 3, 4, 8, 16, 32, 64, 256)) for _ in range(10)], rng.choice(("zero", "nan"))),
        "noise": rng.randrange(256), "stack": rng.choice((512 << 10, 512 << 10, 64)), "trace": rng.random() < 0.1,
    }  # fmt: skip


def make(rng, item, other):
    text, options = item
    if rng.random() < 0.85:
        text = fuzzing.mutate(rng, text, other[0])[:200_000]
    if options is None or rng.random() < 0.5:
        options = launch_of(rng)
    return text, options


def tensor_map(emulator, x, spec):
    rank, dtype, swizzle, n, fill = spec
    es = {"uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "uint64": 8}[dtype]
    dims, box = n[:rank], [max(16 // es, n[5])] + n[6 : 5 + rank]
    strides = [max(16, (dims[0] * es + 15) // 16 * 16) * (i + 1) for i in range(rank - 1)]
    return emulator.TensorMap.tiled(emulator.address_of(x), box, dims=dims, strides=strides, dtype=dtype, swizzle=swizzle, oob_fill=fill)  # fmt: skip


def aligned(n, noise):
    x = np.full(n + 256, noise, np.uint8)
    return x[-x.ctypes.data % 256 :][:n]


def run(emulator, item):
    text, o = item
    try:
        m = emulator.Module.from_ptx(text.encode("latin-1", "replace"))
    except emulator.PtxError:
        return "does not load"
    said = "no kernel"
    for k in list(m.kernels.values())[:2]:
        tensors = [aligned(n, o["noise"]) for n in o["sizes"]]
        args = []
        try:
            for i, p in enumerate(k.params):
                args.append(tensor_map(emulator, tensors[i % 4], o["map"]) if p["size"] == 128 else tensors[i % 4] if p["size"] == 8 else o["noise"] if p["size"] < 8 else bytes([o["noise"]]) * p["size"])  # fmt: skip
                if i in o["odd"]:
                    args[-1] = o["odd"][i]
            k.launch(o["grid"], o["block"], args, o["cluster"], o["smem"], order=o["order"], seed=o["seed"], threads=o["threads"], mma=o["mma"],
                     checks=o["checks"], timeout=0.3, memory=1 << 30, stack=o["stack"], buffers=tensors, trace="/dev/null" if o["trace"] else None)  # fmt: skip
            said = "runs"
        except emulator.EmulatorError as e:
            said = str(e).split("[", 1)[-1].split("]")[0][:20]
            assert said, str(e)
        except (emulator.PtxError, ValueError, TypeError) as e:
            said = type(e).__name__
    return said


def seeds():
    probes, small, _ = fuzzing.corpus()
    return [(t, None) for t in [*probes, *small]]


CASE = SimpleNamespace(make=make, run=run)

if __name__ == "__main__":
    if "--child-replay" in sys.argv:
        sys.exit(fuzzing.replay(CASE, sys.argv[-1]))
    sys.exit(1 if fuzzing.main(CASE, seeds) else 0)
