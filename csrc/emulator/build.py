"""Builds the emulator extension on its own, for work on the emulator: `python csrc/emulator/build.py`.

The package's build does the same: every csrc/emulator/*.cpp into flash_attn_mx/_emulator. Only changed files are compiled.
"""

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


def build(jobs=2):
    """Compiles what changed and links; returns the path of the extension."""
    import pybind11

    src = pathlib.Path(__file__).resolve().parent
    root = src.parent.parent
    out = root / "build" / "emulator"
    out.mkdir(parents=True, exist_ok=True)
    inc = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    newest_header = max(p.stat().st_mtime for p in [*src.glob("*.h"), *src.glob("*.def")])
    target = root / "flash_attn_mx" / ("_emulator" + sysconfig.get_config_var("EXT_SUFFIX"))

    def compile_one(cpp):
        obj = out / (cpp.stem + ".o")
        if obj.exists() and obj.stat().st_mtime > max(cpp.stat().st_mtime, newest_header):
            return obj, False
        subprocess.run(["g++", *FLAGS, *inc, "-c", str(cpp), "-o", str(obj)], check=True)
        return obj, True

    with ThreadPoolExecutor(jobs) as pool:
        done = list(pool.map(compile_one, sorted(src.glob("*.cpp"))))
    if any(new for _, new in done) or not target.exists():
        target.parent.mkdir(exist_ok=True)
        subprocess.run(
            ["g++", "-shared", "-pthread", *[str(o) for o, _ in done], "-o", str(target)],
            check=True,
        )
    return target


if __name__ == "__main__":
    print(build(int(sys.argv[1]) if len(sys.argv) > 1 else 2))
