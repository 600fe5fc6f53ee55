"""CUTLASS's Blackwell tutorials and other projects' attention kernels in the emulator: `make test-peers ARGS="..."`.

    run_peers.py --peer-python P [--out build/peers] [--orders eager,delayed,random] [--seed N] [item ...]

An item is tutorial_01 .. tutorial_05 or a name of `peer_ptx.py --list`; a trailing * matches a prefix; none: all.
Tutorials are compiled from the CUTLASS package by the nvcc of this venv and run unmodified on cudart_shim.cpp. Peers' PTX is
made by peer_ptx.py under P, the interpreter of a venv that has their packages; it stays in OUT. Writes OUT.md.
"""

import argparse
import datetime
import fnmatch
import importlib.util
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

from flash_attn_mx import emulator  # noqa: E402

TUTORIALS = {
    "tutorial_01": "01_mma_sm100",
    "tutorial_02": "02_mma_tma_sm100",
    "tutorial_03": "03_mma_tma_multicast_sm100",
    "tutorial_04": "04_mma_tma_2sm_sm100",
    "tutorial_05": "05_mma_tma_epi_sm100",
}
NO_HARNESS = {
    "*varlen*": "no harness for varlen",
    "cudnn_bwd*": "no harness for cuDNN's backward",
}
# Explained in docs/notes/emulator.md, or listed there as not explained; they do not fail the run, and neither does success.
KNOWN = {
    ("cudnn_fwd_mxfp8_d256", "delayed"): "race in the kernel: K stage refilled without a wait for the MMA",
    ("cudnn_fwd_mxfp8_d256", "random"): "race in the kernel: K stage refilled without a wait for the MMA",
    ("cudnn_fwd_mxfp8_d192_dv128", "delayed"): "not explained",
    ("fa4_bwd_bf16_d128_gqa", "*"): "recorder gives dq the PTX of dk's postprocess",
    ("fa4_bwd_bf16_d128_1cta", "*"): "exits with TMA stores that nobody waited for",
    ("fa4_bwd_bf16_d128_causal_1cta", "*"): "exits with TMA stores that nobody waited for",
    ("fa4_bwd_bf16_d64", "*"): "exits with TMA stores that nobody waited for",
}  # fmt: skip
# Relative error (Frobenius) of out, or of the worst of dq, dk, dv; absolute error of lse.
LSE = {"cudnn_fwd_mxfp8_d256": 5e-2, "cudnn_fwd_mxfp8_d192_dv128": 5e-3}


def bound(item):
    return 2e-2 if "mxfp8" in item else 4e-2 if "fp8" in item else 5e-3


def package(name):
    return Path(list(importlib.util.find_spec(name).submodule_search_locations)[0])


def call(command, **kw):
    r = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **kw)  # fmt: skip
    return r.returncode, r.stdout


def must(command, **kw):
    rc, text = call(command, **kw)
    if rc:
        raise RuntimeError(f"{command[0]} failed:\n{text[-3000:]}")


def newer(target, *sources):
    return target.exists() and all(target.stat().st_mtime >= s.stat().st_mtime for s in sources)


class Tutorials:
    def __init__(self, out):
        self.folder = out / "tutorials"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.source = package("cutlass_library") / "source"
        self.cuda = next(p for p in package("nvidia").glob("cu1*") if (p / "bin" / "nvcc").exists())
        self.shim = self.folder / "libcudart_shim.so"
        sources = [
            HERE / "cudart_shim.cpp",
            *(p for p in (ROOT / "csrc" / "emulator").glob("*.cpp") if p.stem != "bindings"),
        ]
        headers = [*(ROOT / "csrc" / "emulator").glob("*.h")]
        if not newer(self.shim, *sources, *headers):
            flags = (
                "-O2 -std=c++20 -march=x86-64-v3 -fPIC -shared -fvisibility=hidden -pthread".split()
            )
            objects = []
            for cpp in sources:  # one by one: a single command would compile everything again
                o = self.folder / (cpp.stem + ".o")
                if not newer(o, cpp, *headers):
                    must(["g++", *flags[:-3], "-pthread", f"-I{self.cuda / 'include'}", "-c", cpp, "-o", o])  # fmt: skip
                objects.append(o)
            must(["g++", *flags, *objects, "-o", self.shim])

    def run(self, item, order, seed):
        name = TUTORIALS[item]
        exe = self.folder / (name + ".exe")
        if not newer(exe, self.shim):
            o, s = self.folder / (name + "_cu.o"), self.source
            cu = s / "examples" / "cute" / "tutorial" / "blackwell" / (name + ".cu")
            if not o.exists():
                must([self.cuda / "bin" / "nvcc", "-c", "--no-compress", "-gencode", "arch=compute_100a,code=compute_100a",
                      "-std=c++17", "-O1", "--expt-relaxed-constexpr", "-I", s / "include", "-I", s / "tools/util/include",
                      "-I", s / "examples/common", "-o", o, cu])  # fmt: skip
            must(["g++", o, "-o", exe, self.shim, f"-Wl,-rpath,{self.folder}"])
        env = {**os.environ, "SHIM_ORDER": order, "SHIM_SEED": str(seed)}
        if item == "tutorial_01":
            env["SHIM_PROXY"] = "0"  # it lacks a fence.proxy.async (docs/notes/emulator.md)
        t0 = time.time()
        rc, text = call([exe, 512, 1024, 256], env=env, timeout=600)
        error = re.search(r"[Rr]elative error: *([-+.\deE]+)", text)
        good = rc == 0 and error is not None and float(error.group(1)) == 0
        detail = f"relative error {error.group(1)}" if error else text.strip()[-300:]
        return good, detail, time.time() - t0


class Peers:
    def __init__(self, out, python, items):
        self.folder = out / "ptx"
        missing = [i for i in items if not (self.folder / i / "item.json").exists()]
        if missing:
            must([python, HERE / "peer_ptx.py", "--out", self.folder, *missing])

    def run(self, item, order, seed):
        import peers

        run = peers.runner(item)
        t0 = time.time()
        try:
            error, lse, dt, _ = run(str(self.folder / item), order=order, seed=seed, checks=True, threads=2)  # fmt: skip
        except (emulator.EmulatorError, ValueError, KeyError, RuntimeError) as e:
            return False, f"{type(e).__name__}: {e}".replace("\n", " ")[:300], time.time() - t0
        good = error <= bound(item) and lse <= LSE.get(item, 1e-3)
        return good, f"{error:.1e}" + ("" if "_bwd_" in item else f", lse {lse:.0e}"), dt


def lookup(table, *key):
    for pattern, value in table.items():
        pattern = (pattern,) if isinstance(pattern, str) else pattern
        if all(fnmatch.fnmatch(k, p) for k, p in zip(key, pattern)):
            return value
    return ""


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("items", nargs="*")
    ap.add_argument("--peer-python", default=sys.executable)
    ap.add_argument("--out", type=Path, default=ROOT / "build" / "peers")
    ap.add_argument("--orders", default="eager,delayed,random")
    ap.add_argument("--seed", type=int, default=0)
    a = ap.parse_args()
    _, listed = call([a.peer_python, HERE / "peer_ptx.py", "--list"])
    known = [*TUTORIALS, *listed.split()]
    wanted = a.items or known
    unknown = [w for w in wanted if not fnmatch.filter(known, w)]
    if unknown:
        ap.error(f"no such item: {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [k for k in known if any(fnmatch.fnmatch(k, w) for w in wanted)]
    runnable = [i for i in chosen if not lookup(NO_HARNESS, i)]
    a.out.mkdir(parents=True, exist_ok=True)
    tutorials = Tutorials(a.out) if any(i in TUTORIALS for i in runnable) else None
    others = [i for i in runnable if i not in TUTORIALS]
    peers = Peers(a.out, a.peer_python, others) if others else None

    orders, bad, ran = a.orders.split(","), 0, 0
    with open(a.out.with_suffix(".md"), "w") as f:

        def emit(line):
            print(line, flush=True)
            f.write(line + "\n")

        emit(f"{datetime.date.today()}, {platform.machine()} with {os.cpu_count()} cores, seed {a.seed}. Error of out (relative) and lse (absolute), or of the worst gradient.\n")  # fmt: skip
        emit(f"| item | {' | '.join(orders)} |\n|---|{'---|' * len(orders)}")
        for item in chosen:
            cells = []
            for order in orders if item in runnable else ():
                good, detail, dt = (tutorials if item in TUTORIALS else peers).run(item, order, a.seed)  # fmt: skip
                reason = lookup(KNOWN, item, order)
                ran += 1
                bad += not good and not reason
                mark = "ok" if good else f"known ({reason})" if reason else "FAIL"
                cells.append(f"{mark}: {detail.replace('|', '/')} ({dt:.1f} s)")
            emit(f"| {item} | {' | '.join(cells or [lookup(NO_HARNESS, item)])} |")
        emit(f"\n{ran} runs, {bad} unexpected failures.")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
