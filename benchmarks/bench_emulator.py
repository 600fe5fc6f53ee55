"""Speed of the emulator on others' kernels, each against its limit.

    python benchmarks/bench_emulator.py --peer-python P [--out build/peers] [--json FILE] [--seed N]

P: interpreter of the venv that `make test-peers` makes; OUT keeps the PTX and the programs made by it. FlashAttention-4 forward BF16,
B = H = 1, S = 1024, D = 128, from parsing the PTX to the result; CUTLASS example 77 backward fp16, S = 512, D = 128: its three kernels.
"""

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "emulator")]

import cutlass_examples as ce  # noqa: E402
import peers  # noqa: E402
from run_peers import curand_headers  # noqa: E402

LIMITS = {"fa4_fwd, checks off": 3.0, "fa4_fwd, checks on": 10.0, "ex77_bwd, checks on": 20.0}


def forward(a, checks):
    folder = a.out / "bench"
    item = "fa4_fwd_bf16_d128"
    if not (folder / item / "item.json").exists():
        recorder = ROOT / "tests" / "emulator" / "peer_ptx.py"
        ce.must([a.peer_python, recorder, "--out", folder, "--shape", "1,1,1,1024,1024", item])
    error, lse, seconds, reports = peers.run_forward(str(folder / item), checks=checks, threads=2, seed=a.seed)  # fmt: skip
    assert error < 5e-3 and lse < 1e-3, (error, lse)
    return seconds, sum(r.instructions for r in reports)


def backward(a):
    examples = ce.Examples(a.out, curand_headers(a.peer_python))
    item = ce.EXAMPLES["ex77_bwd_fp16"]
    ce.EXAMPLES["bench"] = ce.dataclasses.replace(
        item, options={**item.options, "q": 512, "k": 512}
    )
    env = {"SHIM_OFF": "", **item.late}  # mended, so that no check has to be off
    good, detail, _, text = examples.run("bench", "eager", a.seed, verify=False, **env)
    assert good, detail
    kernels = ("FmhaKernelBwdSumOdO", "Sm100FmhaBwdKernel", "FmhaKernelBwdConvert")
    return sum(ce.kernel_seconds(text, k) for k in kernels), sum(ce.kernel_instructions(text, k) for k in kernels)  # fmt: skip


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--peer-python", required=True)
    ap.add_argument("--out", type=Path, default=ROOT / "build" / "peers")
    ap.add_argument("--json", type=Path)
    ap.add_argument("--seed", type=int, default=0)
    a = ap.parse_args()
    runs = {
        "fa4_fwd, checks off": lambda: forward(a, False),
        "fa4_fwd, checks on": lambda: forward(a, True),
        "ex77_bwd, checks on": lambda: backward(a),
    }
    record = {"machine": platform.machine(), "date": time.strftime("%Y-%m-%d"), "load": os.getloadavg()[0]}  # fmt: skip
    missed = 0
    print(f"{os.cpu_count()} cores, load {record['load']:.1f}")
    for name, run in runs.items():
        seconds, instructions = run()
        missed += seconds > LIMITS[name]
        record[name] = {"seconds": seconds, "limit": LIMITS[name], "warp_instructions": instructions}  # fmt: skip
        print(f"{name:22s} {seconds:6.2f} s (limit {LIMITS[name]:.0f} s), {instructions} warp instructions, "
              f"{instructions / seconds / 1e6:.2f} M per second", flush=True)  # fmt: skip
    if a.json:
        a.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
