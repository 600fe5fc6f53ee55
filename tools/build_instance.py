"""Compiles one kernel of csrc/kernels/instances.def for another architecture than the shipped ones.

    python tools/build_instance.py quantize_d128_bf16 sm_90 OUT.fatbin

For kernels that use nothing that only sm_100 has (quantize, bwd_preprocess, bwd_postprocess): they can be run and timed on the GPU at hand.
nvcc: FAMX_NVCC, CUDA_HOME or PATH.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "csrc" / "kernels"


def find_nvcc() -> str:
    """Path of nvcc, "" if there is none."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return (
        os.environ.get("FAMX_NVCC")
        or shutil.which("nvcc")
        or shutil.which(f"{home}/bin/nvcc")
        or ""
    )


SHIPPED = "FAMX_DEFINE_KERNEL({name}, {arguments})"


def build(name: str, arch: str, out: Path, definition: str = SHIPPED) -> str:
    """Compiles the instance `name` for `arch`, such as sm_90, into the fat binary `out`; returns its path.

    definition: another way to define it, for benchmarks of variants.

    Raises: KeyError (no such instance), RuntimeError (no nvcc, or what it says).
    """
    rows = re.findall(
        r'^FAMX_KERNEL\((\w+), "([^"]+)", (.*)\)$',
        (KERNELS / "instances.def").read_text(),
        flags=re.MULTILINE,
    )
    header, arguments = {row[0]: row[1:] for row in rows}[name]
    nvcc = find_nvcc()
    if not nvcc:
        raise RuntimeError("nvcc not found (FAMX_NVCC, CUDA_HOME, PATH)")
    source = out.with_suffix(".cu")
    defined = definition.format(name=name, arguments=arguments)
    source.write_text(f'#include "{header}"\n{defined}\n')
    flags = ["-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", f"-arch={arch}"]
    includes = [f"-I{KERNELS}", f"-I{KERNELS.parent}"]
    done = subprocess.run(
        [nvcc, *flags, *includes, "-fatbin", str(source), "-o", str(out)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return str(out)


if __name__ == "__main__":
    print(build(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
