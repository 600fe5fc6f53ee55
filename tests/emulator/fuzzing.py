"""What the fuzzers share: a build of the emulator with AddressSanitizer and UBSan, mutation of PTX, and a parent that survives.

`fuzz_parser.py` and `fuzz_launch.py` run cases in a child process, which writes each to a file before it tries it: when the
child dies, hangs or is told off by a sanitizer, the parent keeps that file under build/fuzz/crashes and goes on. The build
counts the edges that a case takes (gcc's trace-pc); a case that takes a new one joins the pool that later cases grow from.
"""

import argparse
import ctypes
import importlib.util
import os
import pathlib
import pickle
import random
import re
import subprocess
import sys
import sysconfig
import time
import types

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUT = ROOT / "build" / "fuzz"
FLAGS = "-O1 -g1 -std=c++20 -march=x86-64-v3 -fPIC -pthread -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer".split()  # fmt: skip
EDGES = """
#include <cstdint>
#include <cstring>
static uint8_t seen[1 << 18];
static uint64_t fresh;
extern "C" void __sanitizer_cov_trace_pc() {
  uint64_t a = reinterpret_cast<uint64_t>(__builtin_return_address(0));
  a ^= a >> 17;
  uint8_t& s = seen[a & (sizeof seen - 1)];
  if (!s) s = 1, ++fresh;
}
extern "C" __attribute__((visibility("default"))) uint64_t fuzz_edges() { return fresh; }
"""


def build(jobs=2):
    """Compiles what changed; returns the path of the extension."""
    spec = importlib.util.spec_from_file_location("b", ROOT / "csrc" / "emulator" / "build.py")
    b = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(b)
    OUT.mkdir(parents=True, exist_ok=True)
    edges = OUT / "edges.cpp"
    if not edges.exists() or edges.read_text() != EDGES:
        edges.write_text(EDGES)
    target = OUT / ("_emulator" + sysconfig.get_config_var("EXT_SUFFIX"))
    done, new = b.objects(jobs, OUT / "obj", FLAGS, ["-fsanitize-coverage=trace-pc"], [edges])
    return b.link(target, done, new, ["-fsanitize=address,undefined"])


def load(path):
    """flash_attn_mx.emulator on the extension at path, without the package's own imports (torch is slow under a sanitizer)."""
    package = types.ModuleType("flash_attn_mx")
    package.__path__ = [str(ROOT / "flash_attn_mx")]
    sys.modules["flash_attn_mx"] = package
    spec = importlib.util.spec_from_file_location("flash_attn_mx._emulator", path)
    package._emulator = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = package._emulator
    spec.loader.exec_module(package._emulator)
    from flash_attn_mx import emulator

    edges = ctypes.CDLL(str(path)).fuzz_edges
    edges.restype = ctypes.c_uint64
    return emulator, edges


# ---- mutation of PTX -------------------------------------------------------------------------------------------------
TOKEN = re.compile(r"\s+|//[^\n]*|[%$\w]+|::|.", re.S)
NUMBERS = [0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 255, 256, 1000, 1024, 4096, 65535, 65536, 2**20, 2**24, 2**31 - 1, 2**31, 2**32 - 16, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30]  # fmt: skip
JUNK = ["{", "}", "(", ")", "[", "]", ",", ";", ":", "@", "!", "-", "+", "|", "<", ">", "=", ".", "::", "_", "\0", "\xff", "/*", "*/", "//", '"', "\n", "WARP_SZ", "%clock", "%tid.x", "0f", "0x", "0b", "1e999"]  # fmt: skip


def corpus():
    """Seeds: the package's own kernels and every probe that the tests compare with a GPU."""
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
    import probes

    seeds = [probes.module([p]) for p in probes.PROBES.values() if p.name[2:6] not in ("cvt_", "setp")]  # fmt: skip
    device = ROOT / "flash_attn_mx" / "_device"
    small = [p for p in sorted(device.glob("*.ptx")) if p.stat().st_size < 60_000]
    return seeds, [p.read_text() for p in small], sorted(device.glob("attn_*_bf16*.ptx"))


def mutate(rng, text, other):
    """One to a few changes of text: tokens deleted, doubled, swapped, taken from `other`, numbers and bytes changed."""
    tokens = TOKEN.findall(text)
    donor = TOKEN.findall(other) or [";"]
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        if not tokens:
            break
        i = rng.randrange(len(tokens))
        n = rng.choice((1, 1, 1, 2, 5, 20))
        match rng.randrange(9):
            case 0:
                del tokens[i : i + n]
            case 1:
                tokens[i:i] = tokens[i : i + n] * rng.choice((1, 1, 2, 50))
            case 2:
                j = rng.randrange(len(tokens))
                tokens[i], tokens[j] = tokens[j], tokens[i]
            case 3 | 4:  # a number: to an edge, or a little off
                at = [k for k in range(len(tokens)) if tokens[k][:1].isdigit()]
                if at:
                    k = rng.choice(at)
                    old = int(tokens[k]) if tokens[k].isdigit() else 0
                    tokens[k] = str(rng.choice([*NUMBERS, old + 1, old - 1, old * 2, -old]))
            case 5:
                j = rng.randrange(len(donor))
                tokens[i:i] = donor[j : j + n]
            case 6:
                tokens.insert(i, rng.choice(JUNK))
            case 7:  # a name for another: registers, modifiers, opcodes
                names = [k for k in range(len(tokens)) if tokens[k][0].isalpha() or tokens[k][0] == "%"]  # fmt: skip
                if len(names) > 1:
                    tokens[rng.choice(names)] = tokens[rng.choice(names)]
            case 8:
                tokens = tokens[: rng.randrange(len(tokens)) + 1]
    return "".join(tokens)


# ---- parent and child ------------------------------------------------------------------------------------------------
def child(case, seeds, seed, seconds):
    """Runs `case(emulator, rng, item)` until the time is over. `seeds()` gives the first items; a case returns an item or None."""
    emulator, edges = load(next(OUT.glob("_emulator*.so")))
    rng = random.Random(seed)
    pool = seeds()
    first = len(pool)
    path = OUT / f"case-{os.getppid()}.pickle"
    end, n, errors = time.monotonic() + seconds, 0, {}
    while time.monotonic() < end:
        # half of the cases grow from those that found something
        grown = len(pool) > first and rng.random() < 0.5
        item = case.make(rng, rng.choice(pool[first:] if grown else pool[:first]), rng.choice(pool))
        path.write_bytes(pickle.dumps(item))
        before = edges()
        said = case.run(emulator, item)
        errors[said] = errors.get(said, 0) + 1
        if edges() > before:
            pool.append(item)
        n += 1
        if n % 50 == 0:
            print(f"cases {n} pool {len(pool) - first} edges {edges()}", flush=True)
    print(f"cases {n} pool {len(pool) - first} edges {edges()} outcomes {dict(sorted(errors.items(), key=lambda kv: -kv[1])[:12])}", flush=True)  # fmt: skip


def replay(case, path):
    """Runs one kept case in this process."""
    emulator, _ = load(next(OUT.glob("_emulator*.so")))
    print(case.run(emulator, pickle.loads(pathlib.Path(path).read_bytes())))


def main(case, seeds):
    """Command line of a fuzzer. Returns the number of crashes and hangs that it found."""
    a = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    a.add_argument("--seconds", type=float, default=60)
    a.add_argument("--seed", type=int, default=0)
    a.add_argument(
        "--limit",
        type=float,
        default=60,
        help="seconds that one case may take before it counts as a hang",
    )
    a.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    a.add_argument("--replay", metavar="FILE", help="run one kept case")
    a = a.parse_args()
    if a.child:
        return child(case, seeds, a.seed, a.seconds)
    build()
    asan = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
    stdcxx = subprocess.run(["g++", "-print-file-name=libstdc++.so.6"], capture_output=True, text=True, check=True).stdout.strip()  # fmt: skip
    env = os.environ | {
        "LD_PRELOAD": f"{asan} {stdcxx}",  # so that the interceptor of throw finds the real one
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=16384:handle_abort=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    }
    command = [sys.executable, sys.modules["__main__"].__file__]
    if a.replay:
        return subprocess.run([*command, "--child-replay", a.replay], env=env).returncode
    crashes = OUT / "crashes"
    crashes.mkdir(parents=True, exist_ok=True)
    end, found, round_, name = time.monotonic() + a.seconds, 0, 0, pathlib.Path(command[1]).stem
    while (left := end - time.monotonic()) > 1:
        log = open(OUT / f"{name}.log", "w+")  # noqa: SIM115
        p = subprocess.Popen([*command, "--child", "--seed", str(a.seed + 1000 * round_), "--seconds", str(left)], env=env, stdout=log, stderr=subprocess.STDOUT)  # fmt: skip
        path, hung = OUT / f"case-{os.getpid()}.pickle", False
        started = time.time()
        while p.poll() is None:
            time.sleep(0.5)
            last = path.stat().st_mtime if path.exists() else 0
            if time.time() - max(last, started) > a.limit:
                hung = True
                p.kill()
        log.seek(0)
        text = log.read()
        lines = [line for line in text.splitlines() if line.startswith("cases ")]
        print(f"{name}: {lines[-1] if lines else text[-2000:]}", flush=True)
        if p.returncode:
            keep = crashes / f"{name}-{int(time.time())}.pickle"
            if path.exists():
                keep.write_bytes(path.read_bytes())
            keep.with_suffix(".log").write_text(text)
            reason = "hang" if hung else next((x for x in text.splitlines() if "ERROR: AddressSanitizer" in x or "runtime error" in x), f"exit code {p.returncode}")  # fmt: skip
            print(f"{name}: FOUND {keep}: {reason}", flush=True)
            found += 1
        round_ += 1
        path.unlink(missing_ok=True)
    print(f"{name}: {found} crashes and hangs")
    return found
