"""CUTLASS's own Blackwell examples, out of its PyPI package, unmodified on cudart_shim.cpp; part of run_peers.py.

They are compiled to PTX by the nvcc of this venv when they are first run: minutes for example 77. Besides its own verification an
example is compared with PyTorch on the device memory that the shim wrote to files, numbered in the order of the allocations.
"""

import dataclasses
import importlib.util
import math
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Callable

import torch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
F8 = torch.float8_e4m3fn
FLAGS = "-c --no-compress -gencode arch=compute_100a,code=compute_100a -std=c++17 -O1 --expt-relaxed-constexpr".split()
EX77 = "77_blackwell_fmha/77_blackwell_fmha"


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


def kernel_seconds(text, part):
    """Time in the emulator of the kernels whose names hold `part`, from the shim's log."""
    return sum(float(s) for s in re.findall(rf"cudart_shim: \S*{part}\S*: .* MMAs, ([\d.]+) s", text))  # fmt: skip


def kernel_instructions(text, part):
    """Warp instructions of the same kernels."""
    return sum(int(n) for n in re.findall(rf"cudart_shim: \S*{part}\S*: (\d+) warp", text))


def distance(got, want):
    return ((got.double() - want).norm() / want.norm()).item()


class Memory:
    def __init__(self, folder):
        self.folder = folder

    def __call__(self, number, dtype, *shape):
        raw = torch.frombuffer(bytearray((self.folder / str(number)).read_bytes()), dtype=dtype)
        return raw[: math.prod(shape)].reshape(shape)


def check_tutorial(text, memory, o):
    error = re.search(r"[Rr]elative error: *([-+.\deE]+)", text)
    if error is None:
        return False, text.strip()[-300:]
    return float(error.group(1)) == 0, f"relative error {error.group(1)}"


def unpack_scales(atoms, rows, blocks):
    """512-byte atoms of 128 rows by 4 blocks, blocks fastest -> (rows, blocks) bytes."""
    x = atoms.reshape(rows // 128, blocks // 4, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return x.reshape(rows, blocks)


def e2m1(memory, number, rows, k):
    codes = memory(number, torch.uint8, rows, k // 2).long()
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.double)
    x = torch.stack([codes & 15, codes >> 4], -1).reshape(rows, k)
    return torch.where(x < 8, 1, -1) * values[x & 7]


def check_gemm(text, memory, o, operand_a, vector, decode):
    """A @ B^T -> bf16 with an e2m1 B and a scale per `vector` of K; its own verification compares every bit."""
    m, n, k = o["m"], o["n"], o["k"]

    def scaled(x, number):
        bytes_ = memory(number, torch.uint8, len(x) * k // vector)
        scales = decode(unpack_scales(bytes_, len(x), k // vector))
        return x * scales.repeat_interleave(vector, 1)

    a, b = scaled(operand_a(memory, 0, m, k), 5), scaled(e2m1(memory, 1, n, k), 6)
    error = distance(memory(3, torch.bfloat16, m, n), a @ b.T)
    return "Disposition: Passed" in text and error < 3e-3, f"out {error:.1e}"


def check_mixed_gemm(*a):
    """72c: e4m3 x e2m1, UE8M0 scales of 32."""
    return check_gemm(*a, lambda memory, i, *shape: memory(i, F8, *shape).double(), 32, lambda x: torch.exp2(x.double() - 127))  # fmt: skip


def check_nvfp4_gemm(*a):
    """72a: e2m1 x e2m1, UE4M3 scales of 16."""
    return check_gemm(*a, e2m1, 16, lambda x: x.view(F8).double())


def attention(o, memory, dtype, layout):
    b, h, hk, d = o["b"], o["h"], o.get("h_k", o["h"]), o["d"]
    q, k, v = (layout(memory, i, dtype, b, hh, s, d).double() for i, hh, s in ((0, h, o["q"]), (1, hk, o["k"]), (2, hk, o["k"])))  # fmt: skip
    k, v = k.repeat_interleave(h // hk, 1), v.repeat_interleave(h // hk, 1)
    s = q @ k.mT / math.sqrt(d)
    if o.get("mask") == "causal":
        s = s.masked_fill(torch.ones(s.shape[-2:]).triu(1).bool(), -math.inf)
    return q, k, v, s


def verified(text, o):
    return ("[OK]" if o["verify"] else "[--]") in text


def check_forward(text, memory, o, dtype):
    def layout(memory, i, t, b, h, s, d):
        return memory(i, t, b, s, h, d).transpose(1, 2)

    _, _, v, s = attention(o, memory, dtype, layout)
    out = distance(layout(memory, 3, torch.float16, o["b"], o["h"], o["q"], o["d"]), s.softmax(-1) @ v)  # fmt: skip
    lse = (memory(4, torch.float32, *s.shape[:3]) - s.logsumexp(-1)).abs().max().item()
    good = out < (4e-2 if dtype == F8 else 1e-3) and lse < 1e-3
    return good and verified(text, o), f"out {out:.1e}, lse {lse:.0e}"


def check_backward(text, memory, o, dtype):
    """P and dS as the kernel multiplies them, in the type of the inputs, without scales."""

    def layout(memory, i, t, b, h, s, d):
        return memory(i, t, b, h, s, d)

    q, k, v, s = attention(o, memory, dtype, layout)
    shape = o["b"], o["h"], o["q"], o["d"]
    out, do = memory(3, dtype, *shape).double(), memory(8, dtype, *shape).double()
    p = s.softmax(-1)
    ds = p * (do @ v.mT - (out * do).sum(-1, keepdim=True))
    p, ds = (x.to(dtype).double() for x in (p, ds))
    scale = 1 / math.sqrt(o["d"])
    want = {5: ds @ k * scale, 6: ds.mT @ q * scale, 7: p.mT @ do}
    error = max(distance(layout(memory, i, dtype, *w.shape), w) for i, w in want.items())
    return error < (5e-2 if dtype == F8 else 2e-3) and verified(text, o), f"{error:.1e}"


@dataclasses.dataclass
class Example:
    source: str  # below the package's examples, without .cu
    check: Callable
    options: dict = dataclasses.field(default_factory=dict)
    flags: tuple = ()
    env: dict = dataclasses.field(default_factory=dict)  # of the shim
    late: dict | None = None  # the same in the asynchronous orders, if it differs

    @property
    def name(self):
        return "_".join([Path(self.source).name, *(f[2:].lower() for f in self.flags if f.startswith("-D"))])  # fmt: skip

    def arguments(self):
        if "verify" not in self.options:
            return [f"--{k}={v}" if isinstance(k, str) else v for k, v in self.options.items()]
        o = {**self.options}
        return [*(["--verify"] if o.pop("verify") else []), *(f"--{k}={v}" for k, v in o.items())]


def ex77(kind, fp8=False, **options):
    dtype = F8 if fp8 else torch.float16
    check = check_forward if kind == "" else check_backward
    options = {"b": 1, "h": 1, "q": 256, "k": 256, "d": 128, "iterations": 0, "warmup_iterations": 1, "verify": True, **options}  # fmt: skip
    # A race of each (docs/notes/emulator.md): harmless in eager order, which runs the example as it is; the others run it mended.
    mended = {"SHIM_EDIT": "wait_st" if kind == "" else "no_dealloc"}
    return Example(EX77 + kind, lambda *a: check(*a, dtype), options, ("-DFP8" if fp8 else "-DFP16", "--use_fast_math"), {"SHIM_OFF": "race"}, mended)  # fmt: skip


def tutorial(source, off):
    return Example("cute/tutorial/blackwell/" + source, check_tutorial, {1: 512, 2: 1024, 3: 256}, env={"SHIM_OFF": off})  # fmt: skip


def gemm(source, check):
    return Example("72_blackwell_narrow_precision_gemm/" + source, check, dict(m=512, n=1024, k=512, iterations=0))  # fmt: skip


EXAMPLES = {
    # 01 has no fence.proxy.async. In the others warps 1 to 3 wait on barriers that warp 0 alone drives on.
    "tutorial_01": tutorial("01_mma_sm100", "proxy"),
    "tutorial_02": tutorial("02_mma_tma_sm100", "lap"),
    "tutorial_03": tutorial("03_mma_tma_multicast_sm100", "lap"),
    "tutorial_04": tutorial("04_mma_tma_2sm_sm100", "lap"),
    "tutorial_05": tutorial("05_mma_tma_epi_sm100", "lap"),
    "ex72a": gemm("72a_blackwell_nvfp4_bf16_gemm", check_nvfp4_gemm),
    "ex72c": gemm("72c_blackwell_mixed_mxfp8_bf16_gemm", check_mixed_gemm),
    "ex77_fwd_fp16": ex77("", h=2, k=384),
    "ex77_fwd_fp16_causal": ex77("", mask="causal"),
    "ex77_fwd_fp16_d64_gqa": ex77("", h=4, h_k=2, d=64),
    "ex77_fwd_fp8": ex77("", True, h=2, k=384),
    "ex77_fwd_fp8_causal": ex77("", True, mask="causal"),
    "ex77_bwd_fp16": ex77("_bwd"),
    "ex77_bwd_fp16_causal": ex77("_bwd", mask="causal"),
    "ex77_bwd_fp8": ex77("_bwd", True),
    "ex77_bwd_fp8_causal": ex77("_bwd", True, mask="causal"),
}  # fmt: skip


class Examples:
    """Builds the shim and the examples in a folder, and runs them there."""

    def __init__(self, out, curand):
        self.folder, self.curand = out / "examples", curand
        self.folder.mkdir(parents=True, exist_ok=True)
        self.source = package("cutlass_library") / "source"
        self.cuda = next(p for p in package("nvidia").glob("cu1*") if (p / "bin" / "nvcc").exists())
        self.shim = self.folder / "libcudart_shim.so"
        spec = importlib.util.spec_from_file_location("emulator_build", ROOT / "csrc" / "emulator" / "build.py")  # fmt: skip
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        objects = [o for o in build.objects()[0] if o.stem != "bindings"]
        o, cpp = self.folder / "cudart_shim.o", HERE / "cudart_shim.cpp"
        if not newer(self.shim, cpp, *objects):
            must(["g++", *build.FLAGS, f"-I{self.cuda / 'include'}", "-c", cpp, "-o", o])
            must(["g++", "-shared", "-pthread", o, *objects, "-o", self.shim])

    def compile(self, example):
        """The example as a program; nvcc runs once for each source and set of flags."""
        o, exe = self.folder / (example.name + ".o"), self.folder / (example.name + ".exe")
        cu = self.source / "examples" / (example.source + ".cu")
        if not o.exists():
            include = [self.source / "include", self.source / "tools/util/include", self.source / "examples/common", cu.parent]  # fmt: skip
            if self.curand:  # a folder with these headers alone: another toolkit's would come first
                only = self.folder / "curand"
                only.mkdir(exist_ok=True)
                for h in self.curand.glob("curand*.h"):
                    shutil.copy(h, only)
                include.append(only)
            part = o.with_suffix(".part.o")
            must([self.cuda / "bin" / "nvcc", *FLAGS, *example.flags, *(f"-I{i}" for i in include), "-o", part, cu])  # fmt: skip
            part.rename(o)
        if not newer(exe, self.shim, o):
            must(["g++", o, "-o", exe, self.shim, f"-Wl,-rpath,{self.folder}"])
        return exe

    def run(self, item, order, seed, verify=None, **env):
        """(good, what was measured, seconds, log). verify: whether the example verifies itself, too; default: only in eager order."""
        example = EXAMPLES[item]
        if "verify" in example.options:
            verify = order == "eager" if verify is None else verify
            example = dataclasses.replace(example, options={**example.options, "verify": verify})
        exe, memory = self.compile(example), self.folder / "memory"
        shutil.rmtree(memory, ignore_errors=True)
        memory.mkdir()
        shim = example.env if order == "eager" or example.late is None else example.late
        env = {**os.environ, "SHIM_ORDER": order, "SHIM_SEED": str(seed), "SHIM_DUMP": str(memory), **shim, **env}  # fmt: skip
        t0 = time.time()
        rc, text = call([exe, *example.arguments()], env=env, timeout=1800)
        dt = time.time() - t0
        if rc:
            return False, text.strip()[-300:], dt, text
        good, detail = example.check(text, Memory(memory), example.options)
        return good, detail + "".join(f", {k}={v}" for k, v in shim.items()), dt, text
