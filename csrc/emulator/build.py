"""Builds the emulator extension on its own, for work on the emulator: `python csrc/emulator/build.py`.

The package's build does the same: every csrc/emulator/*.cpp into flash_attn_mx/_emulator. Only changed files are compiled.
"""

import os
import pathlib
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor

FLAGS = [
    "-O3",
    "-std=c++20",
    "-march=x86-64-v3",
    "-fPIC",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-pthread",
]


def stale(obj):
    """Whether an object is missing or older than a file that the compiler read for it."""
    dep = obj.with_suffix(".d")
    if not obj.exists() or not dep.exists():
        return True
    used = dep.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    return any(not os.path.exists(f) or os.path.getmtime(f) > obj.stat().st_mtime for f in used)


def objects(jobs=2, out=None, flags=FLAGS, own_flags=(), more=()):
    """Compiles what changed into `out` (build/emulator); returns the object files and whether any is new.

    own_flags: of the emulator's files only.  more: further sources. (The fuzzers build with sanitizers.)
    """
    import pybind11

    src = pathlib.Path(__file__).resolve().parent
    out = out or src.parent.parent / "build" / "emulator"
    out.mkdir(parents=True, exist_ok=True)
    inc = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]

    def compile_one(cpp):
        obj = out / (cpp.stem + ".o")
        if not stale(obj):
            return obj, False
        extra = () if cpp in more else own_flags
        command = ["g++", *flags, *extra, *inc, "-MMD", "-c", str(cpp), "-o", str(obj)]
        subprocess.run(command, check=True)
        return obj, True

    with ThreadPoolExecutor(jobs) as pool:
        done = list(pool.map(compile_one, [*sorted(src.glob("*.cpp")), *more]))
    return [o for o, _ in done], any(new for _, new in done)


def link(target, done, new, flags=()):
    """Links objects into an extension, if any is new."""
    if new or not target.exists():
        target.parent.mkdir(exist_ok=True)
        command = ["g++", "-shared", "-pthread", *flags, *map(str, done), "-o", str(target)]
        subprocess.run(command, check=True)
    return target


def build(jobs=2):
    """Compiles what changed and links; returns the path of the extension."""
    root = pathlib.Path(__file__).resolve().parents[2]
    target = root / "flash_attn_mx" / ("_emulator" + sysconfig.get_config_var("EXT_SUFFIX"))
    return link(target, *objects(jobs))


if __name__ == "__main__":
    print(build(int(sys.argv[1]) if len(sys.argv) > 1 else 2))
