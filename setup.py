"""The build: host operators by the C++ compiler, device code by nvcc, both driven by ninja.

What is missing here only narrows the result: without torch's headers the package is pure Python, without
nvcc or CUTLASS it has no Blackwell kernels, and the build says which and why. What was asked for by name
(FAMX_NVCC, FAMX_CUDA_ARCHS) and cannot be had stops it. torch is never imported: its headers are found
as files. Outputs go to flash_attn_mx/: _C.so, _emulator.*.so, _device/{manifest.json,*.ptx,*.fatbin}.
"""

import contextlib
import glob
import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple, Optional

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
PACKAGE = "flash_attn_mx"
WORK = ROOT / "build" / "native"

TORCH_MIN = (2, 11)  # first stable ABI that knows float8_e8m0fnu
# Hides what is newer than TORCH_MIN, so that one binary serves every later torch.
TORCH_TARGET = f"0x{TORCH_MIN[0]:02x}{TORCH_MIN[1]:02x}000000000000"
NVCC_MIN = (12, 9)  # first with the family target sm_100f
# Built archs and the first toolkit that knows each. 100f runs on sm_100 and sm_103.
ARCHS = {"100f": (12, 9), "100a": (12, 8), "103a": (12, 9), "103f": (12, 9)}
DEFAULT_ARCHS = "100f"
GIB_PER_JOB = 4  # nvcc on CuTe kernels; host files stay far below
MEMORY_SHARE = 0.8  # leave the rest to whoever else is on the machine

CXX_FLAGS = [
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    # Numbers must not depend on which CPU fuses a*b+c: they are compared bit for bit.
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
]
NVCC_FLAGS = ["-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr"]


def load_env():
    """flash_attn_mx/_env.py by path: importing the package would import torch."""
    spec = importlib.util.spec_from_file_location("famx_env", ROOT / PACKAGE / "_env.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ENV = load_env()


def say(*lines: str) -> None:
    for line in lines:
        print(f"[{PACKAGE}] {line}", flush=True)


class BuildError(SystemExit):
    """Stops the build with a message that names what to change."""

    def __init__(self, message: str):
        super().__init__(f"[{PACKAGE}] error: {message}")


# --- how many jobs --------------------------------------------------------------------------------


def free_bytes() -> Optional[int]:
    """Memory that this process may still take: the machine's, or its control group's if less."""
    found = []
    with contextlib.suppress(OSError, ValueError, AttributeError):
        text = Path("/proc/meminfo").read_text()
        found.append(int(re.search(r"^MemAvailable:\s+(\d+) kB", text, re.M).group(1)) * 1024)
    with contextlib.suppress(OSError, ValueError):  # "max" is a ValueError: no limit
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        found.append(limit - int((group / "memory.current").read_text()))
    if not found and hasattr(os, "sysconf"):
        with contextlib.suppress(OSError, ValueError):
            found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return min(found) if found else None


def job_count(cores: int, free: Optional[int], max_jobs: str = "") -> int:
    """MAX_JOBS if set, else as many jobs as cores, and as fit in 80 % of the free memory."""
    if max_jobs:
        if not max_jobs.isdigit() or int(max_jobs) < 1:
            raise BuildError(f"MAX_JOBS must be a positive integer, got {max_jobs!r}")
        return int(max_jobs)
    if free is None:
        return max(1, min(cores, 2))
    return max(1, min(cores, int(free * MEMORY_SHARE / (GIB_PER_JOB * 2**30))))


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# --- what is installed ----------------------------------------------------------------------------


def package_dirs(name: str) -> list[Path]:
    """Folders of an installed package, never imported. An isolated build hides the environment that it
    installs into from sys.path, so that one's site-packages are looked at too."""
    found = []
    with contextlib.suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
        found += list(spec.submodule_search_locations or []) if spec else []
    sites = [sysconfig.get_paths()[key] for key in ("platlib", "purelib")]
    if site.ENABLE_USER_SITE:
        sites.append(site.getusersitepackages())
    found += [os.path.join(folder, name) for folder in sys.path + sites]
    return [Path(p) for p in dict.fromkeys(found) if os.path.isdir(p)]


def numbers(text: str, count: int = 2) -> tuple[int, ...]:
    """The leading numbers of a version: '2.13.0+cpu' -> (2, 13)."""
    return tuple(int(n) for n in re.findall(r"\d+", text)[:count])


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(n) for n in version)


class Torch(NamedTuple):
    root: Path
    version: str


def find_torch() -> tuple[Optional[Torch], str]:
    """torch's headers and library, or None and why."""
    reason = "torch is not installed where this build can see it"
    for root in package_dirs("torch"):
        text = (root / "version.py").read_text() if (root / "version.py").is_file() else ""
        match = re.search(r"__version__ = '([^']+)'", text)
        version = match.group(1) if match else "0"
        if numbers(version) < TORCH_MIN:
            reason = f"torch {version} is older than {dotted(TORCH_MIN)}"
        elif not (root / "include/torch/csrc/stable/library.h").is_file():
            reason = f"torch {version} has no stable-ABI headers"
        else:
            return Torch(root, version), ""
    return None, reason


def find_cxx() -> Optional[list[str]]:
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    return next(([cxx] for cxx in ("g++", "clang++", "c++") if shutil.which(cxx)), None)


def find_ninja() -> Optional[str]:
    with contextlib.suppress(ImportError):
        import ninja

        return os.path.join(ninja.BIN_DIR, "ninja")
    return shutil.which("ninja")


class Nvcc(NamedTuple):
    path: str
    source: str
    version: tuple[int, ...]


def nvcc_candidates() -> list[tuple[str, str]]:
    """(where it was named, path) in the order of preference, existing or not."""
    found = [(name, os.environ.get(name)) for name in ("CUDA_HOME", "CUDA_PATH")]
    found = [(name, os.path.join(home, "bin", "nvcc")) for name, home in found if home]
    for root in package_dirs("nvidia"):
        wheels = sorted(glob.glob(str(root / "cu1*" / "bin" / "nvcc")), reverse=True)
        found += [("pip wheels", path) for path in wheels]
    found += [("PATH", shutil.which("nvcc") or ""), ("/usr/local/cuda", "/usr/local/cuda/bin/nvcc")]
    return [(source, path) for source, path in found if path]


def nvcc_version(path: str) -> tuple[int, ...]:
    """(13, 0, 88), or () where it does not run."""
    try:
        text = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    except OSError:
        return ()
    match = re.search(r"release [\d.]+, V([\d.]+)", text)
    return numbers(match.group(1), 3) if match else ()


def find_nvcc() -> tuple[Optional[Nvcc], str]:
    """The first nvcc that is new enough, or None and why. FAMX_NVCC is not second-guessed."""
    if ENV.nvcc:
        version = nvcc_version(ENV.nvcc)
        if not version:
            raise BuildError(f"FAMX_NVCC={ENV.nvcc} is not an nvcc that runs")
        return Nvcc(ENV.nvcc, "FAMX_NVCC", version), ""
    reason = "no nvcc found in CUDA_HOME, pip wheels, PATH or /usr/local/cuda"
    for source, path in nvcc_candidates():
        version = nvcc_version(path) if os.path.isfile(path) else ()
        if version[:2] >= NVCC_MIN:
            return Nvcc(path, source, version), ""
        if version:
            reason = f"nvcc {dotted(version)} ({source}) is older than {dotted(NVCC_MIN)}"
            say(f"passed over: {reason}: {path}")
    return None, reason


def find_cutlass() -> tuple[list[Path], str]:
    """CUTLASS's include folders and its version, or [] and ''."""
    roots = [Path(ENV.cutlass)] if ENV.cutlass else []
    roots += [root / "source" for root in package_dirs("cutlass_library")]
    for root in roots:
        version = root / "include/cutlass/version.h"
        if (root / "include/cute/tensor.hpp").is_file() and version.is_file():
            parts = re.findall(r"#define CUTLASS_(?:MAJOR|MINOR|PATCH) (\d+)", version.read_text())
            return [root / "include", root / "tools/util/include"], ".".join(parts)
        if ENV.cutlass:
            raise BuildError(f"FAMX_CUTLASS={ENV.cutlass} has no include/cute/tensor.hpp")
    return [], ""


# --- what to build --------------------------------------------------------------------------------


def parse_archs(text: str) -> list[str]:
    """'100f, sm_103a 10.3a' -> ['100f', '103a']. An unknown arch stops the build: never dropped."""
    archs = []
    for word in re.split(r"[\s,;]+", (text or DEFAULT_ARCHS).strip()):
        arch = re.sub(r"^(sm|compute)_", "", word)
        arch = re.sub(r"^(\d+)\.(\d)", r"\1\2", arch)
        if arch not in ARCHS:
            known = ", ".join(f"{a} (CUDA >= {dotted(v)})" for a, v in ARCHS.items())
            raise BuildError(f"FAMX_CUDA_ARCHS names the unknown arch {word!r}; known: {known}")
        archs.append(arch)
    return list(dict.fromkeys(archs))


def check_archs(archs: list[str], nvcc: Nvcc) -> None:
    """Stops where this toolkit cannot build an arch, naming the arch and the toolkit that can."""
    listed = subprocess.run([nvcc.path, "--list-gpu-code"], capture_output=True, text=True).stdout
    for arch in archs:
        needed = max(ARCHS[arch], NVCC_MIN)
        if nvcc.version[:2] < needed or f"sm_{arch[:-1]}" not in listed.split():
            raise BuildError(
                f"arch {arch} needs the CUDA toolkit >= {dotted(needed)}, but {nvcc.path} is "
                f"{dotted(nvcc.version)}; pip install 'cuda-toolkit[nvcc,cccl]==13.0.3'"
            )


class Kernel(NamedTuple):
    name: str
    header: str
    arguments: str

    def unit(self) -> str:
        """The translation unit of this row of instances.def."""
        arguments = f", {self.arguments}" if self.arguments else ""
        define = f"FAMX_DEFINE_KERNEL({self.name}{arguments})"
        return (
            f'// Generated from csrc/kernels/instances.def.\n#include "{self.header}"\n{define}\n'
        )


KERNEL_ROW = re.compile(r'FAMX_KERNEL\(\s*(\w+)\s*,\s*"([^"]+)"\s*(?:,\s*(.*?))?\s*\)')


def read_kernels(path: Path) -> list[Kernel]:
    """Rows of instances.def; a line that is neither row, comment nor blank stops the build."""
    kernels = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("//"):
            continue
        match = KERNEL_ROW.fullmatch(text)
        if not match:
            raise BuildError(f"{path.name}:{number}: not a FAMX_KERNEL row: {text}")
        kernels.append(Kernel(match.group(1), match.group(2), match.group(3) or ""))
    names = [kernel.name for kernel in kernels]
    for name in names:
        if names.count(name) > 1:
            raise BuildError(f"{path.name}: kernel {name} is listed twice")
    return kernels


# --- build.ninja ----------------------------------------------------------------------------------


def shell(words) -> str:
    """Words as one shell command, escaped for ninja."""
    return " ".join(shlex.quote(str(word)) for word in words).replace("$", "$$")


def ninja_path(path) -> str:
    """Escaped for ninja; relative to the build folder for what is in it, so that progress reads well."""
    path = Path(path)
    path = path.relative_to(WORK) if path.is_relative_to(WORK) else path
    return re.sub(r"([$ :])", r"$\1", str(path))


class Ninja:
    """The text of a build.ninja. Every command line is part of a target's identity: new flags rebuild."""

    def __init__(self):
        self.lines = ["ninja_required_version = 1.8"]
        self.outputs = []

    def rule(self, name: str, command: str, description: str, depfile: str = "") -> None:
        self.lines += [
            f"rule {name}",
            f"  command = {command}",
            f"  description = {description} $out",
        ]
        if depfile:
            self.lines.append(f"  depfile = {depfile}")

    def build(self, output: Path, rule: str, inputs, implicit=(), **variables) -> Path:
        implied = f" | {' '.join(map(ninja_path, implicit))}" if implicit else ""
        sources = " ".join(map(ninja_path, inputs))
        self.lines.append(f"build {ninja_path(output)}: {rule} {sources}{implied}")
        self.lines += [f"  {key} = {value}" for key, value in variables.items()]
        self.outputs.append(output)
        return output

    def text(self) -> str:
        return "\n".join(self.lines) + "\n"


def plan_library(graph: Ninja, name: str, cxx: list[str], sources, flags, link) -> Path:
    """Compiles sources and links them to one shared library, loaded with dlopen."""
    user_flags = shlex.split(os.environ.get("CXXFLAGS", ""))
    user_link = shlex.split(os.environ.get("LDFLAGS", ""))
    compile_words = [*cxx, *CXX_FLAGS, *flags, "-I", ROOT / "csrc", *user_flags]
    command = f"{shell(compile_words)} -MD -MF $out.d -c $in -o $out"
    graph.rule(f"cxx{name}", command, "C++ ", "$out.d")
    shared = ["-dynamiclib"] if sys.platform == "darwin" else ["-shared"]
    graph.rule(
        f"link{name}", f"{shell([*cxx, *shared])} $in -o $out {shell([*link, *user_link])}", "link"
    )
    compiler = [path for path in [shutil.which(cxx[0])] if path]
    objects = [
        graph.build(WORK / name / f"{source.stem}.o", f"cxx{name}", [source], compiler)
        for source in sources
    ]
    return graph.build(WORK / f"{name}.so", f"link{name}", objects)


def plan_device(graph: Ninja, nvcc: Nvcc, includes, kernels, archs) -> None:
    """PTX first, then the fat binary from that very PTX: what the emulator runs is what the GPU runs."""
    words = [nvcc.path, *NVCC_FLAGS]
    for folder in [ROOT / "csrc" / "kernels", ROOT / "csrc", *includes]:
        words += ["-I", folder]
    if os.environ.get("CXX"):
        words += ["-ccbin", shlex.split(os.environ["CXX"])[0]]
    # Never -arch=sm_100a: it also compiles plain compute_100, where tcgen05 does not exist.
    to_ptx = (
        "-ptx -gencode arch=compute_$arch,code=compute_$arch -MD -MF $out.d -MT $out $in -o $out"
    )
    graph.rule("ptx", f"{shell(words)} {to_ptx}", "nvcc", "$out.d")
    to_fat = "-fatbin -gencode 'arch=compute_$arch,code=[sm_$arch,compute_$arch]' $in -o $out"
    graph.rule("fatbin", f"{shell([nvcc.path])} {to_fat}", "ptxas")
    for kernel in kernels:
        unit = WORK / "device" / f"{kernel.name}.cu"
        write_if_changed(unit, kernel.unit().encode())
        for arch in archs:
            stem = f"{kernel.name}.sm_{arch}"
            ptx = graph.build(WORK / f"{stem}.ptx", "ptx", [unit], [nvcc.path], arch=arch)
            graph.build(WORK / f"{stem}.fatbin", "fatbin", [ptx], [nvcc.path], arch=arch)


def write_if_changed(path: Path, data: bytes) -> None:
    """Keeps the time stamp of unchanged files, and never shows a reader half a file."""
    if path.is_file() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    os.replace(temporary, path)


@contextlib.contextmanager
def build_lock():
    """One build at a time in this tree: two ninjas in one folder corrupt each other's log."""
    WORK.mkdir(parents=True, exist_ok=True)
    with open(WORK / ".lock", "w") as handle:
        with contextlib.suppress(ImportError):
            import fcntl

            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                say("another build is running in this tree; waiting for it")
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield


# --- the build ------------------------------------------------------------------------------------


class Build:
    """One run: plans, runs ninja, puts the products into the package folder, writes the manifest."""

    def __init__(self, target: Path, strict: bool):
        self.target = target  # the package folder that receives the products
        self.strict = strict  # developers' builds fail where an installation goes on with a notice
        self.graph = Ninja()
        self.products = {}  # path in self.target -> path in WORK
        self.optional = []  # members of self.products that an installation can do without
        self.host = {
            "native": False,
            "reason": "",
            "emulator": False,
            "machine": platform.machine(),
        }
        self.device = {"archs": [], "reason": ""}
        self.kernels = []

    def run(self) -> list[Path]:
        """Builds; returns the files that were put into the package."""
        with build_lock():
            ninja, cxx = find_ninja(), find_cxx()
            missing = "" if ninja else "ninja is not installed (pip install ninja)"
            if sys.platform == "win32":
                missing = "Windows is not supported by the native build"
            self.plan_host(cxx, missing)
            self.plan_emulator(cxx, missing)
            self.plan_kernels(missing)
            if self.products:
                self.run_ninja(ninja)
            files = self.install()
        self.summarise()
        return files

    def plan_host(self, cxx, missing: str) -> None:
        torch, reason = find_torch()
        sources = sorted((ROOT / "csrc" / "ops").glob("*.cpp"))
        if not ENV.native:
            reason = "FAMX_NATIVE=0"
        elif missing or not sources or not cxx:
            reason = missing or ("no C++ compiler found" if sources else "csrc/ops has no sources")
        self.host["reason"] = reason
        if reason:
            return
        include = torch.root / "include"
        flags = ["-std=c++17", f"-DTORCH_TARGET_VERSION={TORCH_TARGET}", "-isystem", include]
        link = ["-L", torch.root / "lib", "-ltorch_cpu"]
        if sys.platform == "linux":
            link += ["-Wl,-z,defs"]  # an undefined symbol fails here, not at a user's import
        say(f"C++ operators: {shlex.join(cxx)}, headers of torch {torch.version} in {torch.root}")
        self.products["_C.so"] = plan_library(self.graph, "_C", cxx, sources, flags, link)
        self.host.update(
            native=True,
            torch_headers=torch.version,
            torch_min=dotted(TORCH_MIN),
            compiler=cxx_name(cxx),
        )

    def plan_emulator(self, cxx, missing: str) -> None:
        """The PTX emulator, a pybind11 module; serves testing, so an installation can do without."""
        folder = ROOT / "csrc" / "emulator"
        if not (folder / "bindings.cpp").is_file():
            return
        pybind11 = next((d / "include" for d in package_dirs("pybind11")), None)
        python = Path(sysconfig.get_paths()["include"])
        if missing or not cxx:
            self.host["emulator_reason"] = missing or "no C++ compiler found"
        elif not pybind11:
            self.host["emulator_reason"] = "pybind11 is not installed"
        elif not (python / "Python.h").is_file():
            self.host["emulator_reason"] = f"Python.h is missing in {python} (python3-dev)"
        else:
            flags = ["-std=c++20", "-isystem", pybind11, "-isystem", python]
            if platform.machine() in ("x86_64", "AMD64"):
                flags.append("-march=x86-64-v3")  # mma.cpp has AVX2 intrinsics
            link = ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
            sources = sorted(folder.glob("*.cpp"))
            name = "_emulator" + sysconfig.get_config_var("EXT_SUFFIX")
            self.products[name] = plan_library(self.graph, "_emulator", cxx, sources, flags, link)
            self.optional.append(name)
            self.host["emulator"] = True

    def plan_kernels(self, missing: str) -> None:
        if ENV.cuda_archs.lower() == "none":
            self.device["reason"] = "FAMX_CUDA_ARCHS=none"
            return
        archs = parse_archs(ENV.cuda_archs)
        nvcc, reason = find_nvcc()
        cutlass, cutlass_version = find_cutlass() if nvcc else ([], "")
        if nvcc and not cutlass:
            reason = "CUTLASS not found (pip install --no-deps nvidia-cutlass==4.2.0.0)"
        reason = missing or reason
        if reason:
            if ENV.cuda_archs or ENV.nvcc:
                raise BuildError(f"device code for {', '.join(archs)} was asked for, but {reason}")
            self.device["reason"] = reason
            return
        check_archs(archs, nvcc)
        say(f"device code: nvcc {dotted(nvcc.version)} from {nvcc.source}: {nvcc.path}")
        say(f"device code: CUTLASS {cutlass_version} in {cutlass[0]}; archs {', '.join(archs)}")
        self.kernels = read_kernels(ROOT / "csrc" / "kernels" / "instances.def")
        plan_device(self.graph, nvcc, cutlass, self.kernels, archs)
        for kernel in self.kernels:
            for arch in archs:
                for ending in ("ptx", "fatbin"):
                    name = f"{kernel.name}.sm_{arch}.{ending}"
                    self.products[f"_device/{name}"] = WORK / name
        self.device.update(
            archs=archs, nvcc=dotted(nvcc.version), nvcc_from=nvcc.source, cutlass=cutlass_version
        )

    def run_ninja(self, ninja: str) -> None:
        write_if_changed(WORK / "build.ninja", self.graph.text().encode())
        free = free_bytes()
        jobs = job_count(usable_cores(), free, os.environ.get("MAX_JOBS", ""))
        memory = f"{free / 2**30:.1f} GiB free" if free else "free memory unknown"
        say(f"{jobs} jobs ({usable_cores()} cores, {memory}; set MAX_JOBS to change)")
        environment = {**os.environ, "NINJA_STATUS": "[%f/%t %es] "}
        command = [ninja, "-C", str(WORK), "-j", str(jobs)]
        # An optional target must not take the required ones down with it.
        keep_going = [] if self.strict or not self.optional else ["-k", "0"]
        if subprocess.run([*command, *keep_going], env=environment).returncode == 0:
            return
        required = [
            str(path.relative_to(WORK))
            for name, path in self.products.items()
            if name not in self.optional
        ]
        done = keep_going and required
        if not done or subprocess.run([*command, *required], env=environment).returncode:
            raise BuildError("a compile step failed; its output is above")
        for name in self.optional:
            del self.products[name]
        self.host.update(emulator=False, emulator_reason="it did not compile; see the build output")

    def install(self) -> list[Path]:
        """Copies products that changed, drops those of earlier builds that are no longer made."""
        for name, path in self.products.items():
            write_if_changed(self.target / name, path.read_bytes())
        write_if_changed(self.target / "_device" / "manifest.json", self.manifest())
        files = [self.target / name for name in self.products]
        files.append(self.target / "_device" / "manifest.json")
        suffix = sysconfig.get_config_var("EXT_SUFFIX") or ".so"
        mine = ["_C.so", f"_emulator{suffix}", "_device/*.ptx", "_device/*.fatbin"]
        for path in (path for pattern in mine for path in self.target.glob(pattern)):
            if path not in files:
                path.unlink()
        return files

    def manifest(self) -> bytes:
        """What the package contains, read by flash_attn_mx._native. Holds no path of this machine."""
        rows = []
        for kernel in self.kernels:
            for arch in self.device["archs"]:
                stem = f"{kernel.name}.sm_{arch}"
                ptx = WORK / f"{stem}.ptx"
                rows.append(
                    {
                        "name": kernel.name,
                        "arch": arch,
                        "ptx": f"{stem}.ptx",
                        "fatbin": f"{stem}.fatbin",
                        "entries": re.findall(r"\.entry (\w+)", ptx.read_text()),
                        "ptx_sha256": hashlib.sha256(ptx.read_bytes()).hexdigest(),
                        "source_sha256": source_hash(kernel, ptx),
                    }
                )
        content = {"host": self.host, "device": self.device, "kernels": rows}
        return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()

    def summarise(self) -> None:
        if self.host["native"]:
            say("C++ operators: built")
        else:
            say(
                f"C++ operators: NOT built: {self.host['reason']}.",
                "  The same operators run in PyTorch instead, slower. To have them: install torch "
                f">= {dotted(TORCH_MIN)} first,",
                "  then reinstall with: pip install --no-build-isolation --force-reinstall --no-deps .",
            )
        if self.host.get("emulator_reason"):
            say(f"PTX emulator: NOT built: {self.host['emulator_reason']}.")
        if self.kernels:
            names = ", ".join(kernel.name for kernel in self.kernels)
            say(f"device code: built {names} for {', '.join(self.device['archs'])}")
        else:
            say(
                f"Blackwell kernels: NOT included: {self.device['reason']}.",
                "  The portable path gives the same numbers on any device. To include them:",
                "  pip install 'cuda-toolkit[nvcc,cccl]==13.0.3'; pip install --no-deps "
                "nvidia-cutlass==4.2.0.0; then reinstall.",
            )


def cxx_name(cxx: list[str]) -> str:
    text = subprocess.run([*cxx, "--version"], capture_output=True, text=True).stdout
    return text.splitlines()[0] if text else shlex.join(cxx)


def source_hash(kernel: Kernel, ptx: Path) -> str:
    """Of the unit and every file of csrc/ that it includes, in the order of their names."""
    words = Path(f"{ptx}.d").read_text().replace("\\\n", " ").split()
    own = sorted({path for path in words if path.startswith(str(ROOT / "csrc"))})
    digest = hashlib.sha256(kernel.unit().encode())
    for path in own:
        digest.update(Path(path).read_bytes())
    return digest.hexdigest()


# --- setuptools -----------------------------------------------------------------------------------


class BuildNative(build_ext):
    """Replaces setuptools' compiler driver, which knows neither nvcc nor parallel builds."""

    def run(self):
        in_tree = self.inplace or self.editable_mode
        target = ROOT / PACKAGE if in_tree else Path(self.build_lib).resolve() / PACKAGE
        self.built = Build(target, strict=bool(self.inplace and not self.editable_mode)).run()
        if not in_tree:  # the operators' schemas, which the Python operators read without _C.so
            data = (ROOT / "csrc/ops/schemas.def").read_bytes()
            write_if_changed(target / "schemas.def", data)
            self.built.append(target / "schemas.def")

    def get_outputs(self):
        return [str(path) for path in getattr(self, "built", [])]

    def get_output_mapping(self):
        return {}

    def get_source_files(self):
        return []  # MANIFEST.in lists them


class AnyPythonWheel(bdist_wheel):
    """py3-none: _C.so has no Python symbol, so one wheel serves every Python (and free-threaded ones).
    Only the emulator depends on the Python it was built for; others simply do not find it."""

    def get_tag(self):
        libraries = list(Path(self.bdist_dir).glob(f"{PACKAGE}/*.so"))
        return "py3", "none", super().get_tag()[2] if libraries else "any"


if __name__ == "__main__":
    setup(
        ext_modules=[Extension(f"{PACKAGE}._C", sources=[])],
        cmdclass={"build_ext": BuildNative, "bdist_wheel": AnyPythonWheel},
    )
