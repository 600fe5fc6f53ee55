"""CUTLASS's Blackwell examples and other projects' attention kernels in the emulator: `make test-peers ARGS="..."`.

    run_peers.py --peer-python P [--out build/peers] [--orders eager,delayed,random] [--seed N] [item ...]

An item is a name of cutlass_examples.EXAMPLES or of `peer_ptx.py --list`; a trailing * matches a prefix; none: all.
Peers' PTX is made by peer_ptx.py under P, the interpreter of a venv that has their packages; it stays in OUT. Writes OUT.md.
"""

import argparse
import datetime
import fnmatch
import os
import platform
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(HERE)]

from cutlass_examples import EXAMPLES, Examples, call, must  # noqa: E402

from flash_attn_mx import emulator  # noqa: E402

# Each is explained and proved in docs/notes/emulator.md; they do not fail the run, and neither does success.
KNOWN = {
    ("cudnn_fwd_mxfp8_d256", "*"): "race in the kernel: K and V stages refilled without a wait for the MMA",
    ("cudnn_fwd_mxfp8_d192_dv128", "*"): "race in the kernel: last P stored without a wait for the MMA that reads P",
}  # fmt: skip
# Checks that an item runs without, for reasons in docs/notes/emulator.md.
OFF = {"cudnn_fwd_mxfp8_*": ("proxy",)}
# Absolute error of lse where the kernel takes exp2 from a polynomial of degree 1 or 2.
LSE = {"cudnn_fwd_mxfp8_d256": 4e-2, "cudnn_fwd_mxfp8_d192_dv128": 2.1e-3}


# Relative error (Frobenius) of out, or of the worst of dq, dk, dv.
def bound(item):
    return 2e-2 if "mxfp8" in item else 4e-2 if "fp8" in item else 5e-3


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
            checks = [c for c in emulator.CHECKS if c not in lookup(OFF, item)]
            error, lse, dt, _ = run(str(self.folder / item), order=order, seed=seed, checks=checks, threads=2)  # fmt: skip
        except (emulator.EmulatorError, ValueError, KeyError, RuntimeError) as e:
            return False, f"{type(e).__name__}: {e}".replace("\n", " ")[:300], time.time() - t0
        good = error <= bound(item) and lse <= LSE.get(item, 1e-3)
        return good, f"{error:.1e}" + ("" if "_bwd_" in item else f", lse {lse:.0e}"), dt


def curand_headers(python):
    """The folder of curand_kernel.h in that interpreter's packages, or None."""
    where = "import importlib.util as u; s = u.find_spec('nvidia'); print(*(s.submodule_search_locations if s else ()))"
    folders = call([python, "-c", where])[1].split()
    found = [h.parent for f in folders for h in Path(f).glob("cu1*/include/curand_kernel.h")]
    return found[0] if found else None


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
    known = [*EXAMPLES, *listed.split()]
    wanted = a.items or known
    unknown = [w for w in wanted if not fnmatch.filter(known, w)]
    if unknown:
        ap.error(f"no such item: {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [k for k in known if any(fnmatch.fnmatch(k, w) for w in wanted)]
    a.out.mkdir(parents=True, exist_ok=True)
    others = [i for i in chosen if i not in EXAMPLES]
    examples = Examples(a.out, curand_headers(a.peer_python)) if len(others) < len(chosen) else None
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
            for order in orders:
                good, detail, dt, *_ = (examples if item in EXAMPLES else peers).run(item, order, a.seed)  # fmt: skip
                reason = lookup(KNOWN, item, order)
                ran += 1
                bad += not good and not reason
                mark = "ok" if good else f"known ({reason})" if reason else "FAIL"
                cells.append(f"{mark}: {detail.replace('|', '/')} ({dt:.1f} s)")
            emit(f"| {item} | {' | '.join(cells)} |")
        emit(f"\n{ran} runs, {bad} unexpected failures.")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
