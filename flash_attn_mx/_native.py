"""The native part of the package: loading _C.so, and finding what the build put into _device/.

A library that does not fit the running torch must not break `import`: it is reported in one warning
that names both versions, and the PyTorch implementations of the same operators serve instead.
"""

import functools
import json
import re
import warnings
from pathlib import Path
from typing import NamedTuple, Optional

import torch

from . import _env
from ._version import __version__

FOLDER = Path(__file__).resolve().parent
LIBRARY = FOLDER / "_C.so"
DEVICE = FOLDER / "_device"
TORCH_MIN = (2, 11)

# Capabilities that code built for an arch runs on: "a" only on its own chip, "f" on its family.
CAPABILITIES = {
    "100f": ((10, 0), (10, 3)),
    "100a": ((10, 0),),
    "103a": ((10, 3),),
    "103f": ((10, 3),),
}
# Tests of the build itself, which serve no user call.
PROBES = ("toolchain_probe",)

_ROW = ("name", "arch", "ptx", "fatbin")


class Status(NamedTuple):
    """Whether the C++ operators are in use; reason (for people) and detail (the loader's words) if not."""

    loaded: bool
    reason: str = ""
    detail: str = ""


class Kernel(NamedTuple):
    """A built device kernel: name is its symbol, arch such as "100f", the files are in _device/."""

    name: str
    arch: str
    ptx: Path
    fatbin: Path

    @property
    def capabilities(self) -> tuple[tuple[int, int], ...]:
        """Compute capabilities that this code runs on."""
        return CAPABILITIES.get(self.arch, ())


def _torch_version() -> Optional[tuple[int, int]]:
    """(2, 13), or None where torch's version says nothing ("unknown")."""
    match = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    return (int(match.group(1)), int(match.group(2))) if match else None


@functools.lru_cache(maxsize=None)
def manifest() -> dict:
    """What the build made: {"host": {...}, "device": {...}, "kernels": [...]}; all empty where unknown."""
    empty = {"host": {}, "device": {}, "kernels": []}
    try:
        content = {**empty, **json.loads((DEVICE / "manifest.json").read_text())}
        rows = all(isinstance(row[key], str) for row in content["kernels"] for key in _ROW)
        return content if rows and isinstance(content["host"], dict) else empty
    except (OSError, ValueError, TypeError, KeyError):
        return empty


def _try_load() -> Status:
    if not _env.native:
        return Status(False, "FAMX_NATIVE=0")
    if not LIBRARY.is_file():
        return Status(
            False, f"not built: {manifest()['host'].get('reason') or 'run setup.py or make'}"
        )
    version = _torch_version()
    if version is not None and version < TORCH_MIN:
        needed = ".".join(map(str, TORCH_MIN))
        return Status(False, f"needs torch >= {needed}, found {torch.__version__}")
    try:
        torch.ops.load_library(str(LIBRARY))
    except (OSError, RuntimeError, ImportError) as error:
        built = manifest()["host"].get("torch_headers", "unknown")
        reason = f"built against torch {built}, does not load under torch {torch.__version__}"
        # torch's own words hide the dynamic loader's, which name the symbol or library.
        return Status(
            False, reason, f"{error}: {error.__cause__}" if error.__cause__ else str(error)
        )
    return Status(True)


@functools.lru_cache(maxsize=None)
def status() -> Status:
    """Loads the C++ operators on the first call; warns if they are there but unusable. Never raises."""
    result = _try_load()
    if not result.loaded and LIBRARY.is_file() and _env.native:
        warnings.warn(
            f"flash_attn_mx {__version__}: the C++ operators are not used: {result.reason}. "
            "The PyTorch path serves instead: same numbers, slower. Reinstall flash_attn_mx under "
            "this torch to have them; `python -m flash_attn_mx info --verbose` shows the details.",
            RuntimeWarning,
            stacklevel=2,
        )
    return result


def load() -> bool:
    """Whether the C++ operators are registered, after trying to load them once."""
    return status().loaded


def kernels(capability: Optional[tuple[int, int]] = None) -> list[Kernel]:
    """Built device kernels, or those that run on a compute capability such as (10, 0)."""
    found = [
        Kernel(row["name"], row["arch"], DEVICE / row["ptx"], DEVICE / row["fatbin"])
        for row in manifest()["kernels"]
    ]
    return [k for k in found if capability is None or tuple(capability) in k.capabilities]


def find_kernel(name: str, capability: tuple[int, int]) -> Optional[Kernel]:
    """The kernel called name for a device: code for exactly that chip ("a") before its family ("f")."""
    found = [kernel for kernel in kernels(capability) if kernel.name == name]
    return min(found, key=lambda kernel: kernel.arch[-1], default=None)


def attention_capabilities() -> list[tuple[int, int]]:
    """Compute capabilities for which this installation contains attention kernels."""
    found = [c for k in kernels() if k.name not in PROBES for c in k.capabilities]
    return sorted(set(found))
