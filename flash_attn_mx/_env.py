"""Every environment variable of flash_attn_mx, each read once, here.

Standard library only: setup.py loads this file by path, where neither torch nor the package is there.
The build also honours other people's variables with their usual meaning: MAX_JOBS, CUDA_HOME,
CUDA_PATH, CXX, CXXFLAGS, LDFLAGS.
"""

import os
from typing import NamedTuple


class Variable(NamedTuple):
    """A variable, whether it is read by the build or at run time, and what it does."""

    name: str
    when: str
    meaning: str


VARIABLES = (
    Variable(
        "FAMX_NVCC", "build", "path of the nvcc to use; otherwise CUDA_HOME, pip wheels, PATH"
    ),
    Variable("FAMX_CUTLASS", "build", "CUTLASS checkout (the folder that holds include/cute)"),
    Variable(
        "FAMX_CUDA_ARCHS",
        "build",
        "device archs, such as '100f' or '100a 103a'; 'none' builds none",
    ),
    Variable("FAMX_NATIVE", "build, run", "'0': do not build, or do not load, the C++ operators"),
)

_values = {variable.name: os.environ.get(variable.name, "").strip() for variable in VARIABLES}

nvcc = _values["FAMX_NVCC"]
cutlass = _values["FAMX_CUTLASS"]
cuda_archs = _values["FAMX_CUDA_ARCHS"]
native = _values["FAMX_NATIVE"].lower() not in ("0", "off", "false", "no")
