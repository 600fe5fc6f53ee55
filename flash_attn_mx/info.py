"""What is installed and what can run here: is_installed, is_available, `python -m flash_attn_mx info`."""

import argparse
import importlib.machinery
import importlib.util
import json
import platform
import sys
from typing import Iterable, Optional

import torch

from . import _env, _native
from ._version import __version__


def is_installed() -> bool:
    """True: the package is there. Whether native kernels can run is is_available()."""
    return True


def is_available() -> bool:
    """Whether native sm_100 attention kernels can run here; the portable path needs no asking.

    Never raises. May initialise CUDA, but only where the installation contains such kernels.
    """
    try:
        return not _why_not_sm100()
    except Exception:
        return False


def _cuda_capabilities() -> list[tuple[int, int]]:
    """Capabilities of the NVIDIA devices. ROCm's are left out: its gfx10 reports itself as (10, x) too."""
    if torch.version.cuda is None or torch.version.hip or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]


def _why_not_sm100() -> str:
    """Why the sm_100 kernels cannot run here; "" if they can."""
    built = _native.attention_capabilities()
    if not built:
        reason = _native.manifest()["device"].get("reason")
        missing = "this installation contains no sm_100 attention kernel"
        return f"{missing} ({reason})" if reason else missing
    if not _native.load():
        return f"the C++ operators that launch them are not loaded ({_native.status().reason})"
    present = _cuda_capabilities()
    if not present:
        return "no NVIDIA device"
    if not set(present) & set(built):
        return f"device capabilities {dotted(present)}; kernels are built for {dotted(built)}"
    return ""


def why_not_emulator() -> str:
    """Why the emulator cannot run the kernels here; "" if it can."""
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    if not any((_native.FOLDER / f"_emulator{suffix}").is_file() for suffix in suffixes):
        reason = _native.manifest()["host"].get("emulator_reason")
        return f"not built for this Python{f' ({reason})' if reason else ''}"
    if not _native.attention_capabilities():
        return "this installation contains no sm_100 attention kernel to emulate"
    return ""


def dotted(capabilities: Iterable[tuple[int, int]]) -> str:
    """Capabilities for people: \"10.0, 10.3\"."""
    return ", ".join(f"{major}.{minor}" for major, minor in sorted(set(capabilities)))


def _said(function) -> str:
    """function()'s answer, or what it raised: a report must not die of what it reports on."""
    try:
        return function()
    except Exception as error:
        return f"cannot be told: {type(error).__name__}: {error}"


def _devices() -> list[str]:
    found = [f"cpu: {platform.machine()}, {torch.get_num_threads()} threads"]
    if torch.version.cuda is not None and torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            major, minor = torch.cuda.get_device_capability(i)
            found.append(f"cuda:{i}: {torch.cuda.get_device_name(i)}, capability {major}.{minor}")
    elif torch.version.cuda is not None:
        found.append("cuda: torch has CUDA, but no device or driver was found")
    return found


def collect() -> dict:
    """Everything `info` prints, as plain data. Never raises."""
    native, manifest = _native.status(), _native.manifest()
    devices = _said(_devices)
    return {
        "versions": {
            "flash_attn_mx": __version__,
            "torch": str(torch.__version__),
            "torch_cuda": torch.version.cuda,
            "python": platform.python_version(),
            "system": platform.platform(),
        },
        "devices": devices if isinstance(devices, list) else [devices],
        "backends": {  # "" = usable
            "sm100": _said(_why_not_sm100),
            "portable": "",
            "emulator": _said(why_not_emulator),
        },
        "native": {"loaded": native.loaded, "reason": native.reason, "detail": native.detail},
        "build": {"host": manifest["host"], "device": manifest["device"]},
        "kernels": [{"name": k.name, "arch": k.arch} for k in _native.kernels()],
        "environment": {v.name: v.meaning for v in _env.VARIABLES},
    }


def _build_lines(report: dict) -> list[str]:
    host, device = report["build"]["host"], report["build"]["device"]
    native = report["native"]
    loaded = "in use" if native["loaded"] else f"not in use: {native['reason']}"
    lines = [f"  C++ operators  {loaded}"]
    if host.get("torch_headers"):
        built = f"headers of torch {host['torch_headers']}, runs on torch >= {host['torch_min']}"
        lines.append(f"                 {built}; {host['compiler']}")
    if device.get("archs"):
        tools = f"nvcc {device['nvcc']}, CUTLASS {device['cutlass']}"
        lines.append(f"  device code    sm_{', sm_'.join(device['archs'])}; {tools}")
    else:
        lines.append(f"  device code    none: {device.get('reason') or 'no build record found'}")
    if not device.get("archs"):
        lines.append("                 to include it, see third_party/README.md")
    lines += [f"  kernel         {k['name']} (sm_{k['arch']})" for k in report["kernels"]]
    return lines


def render(report: dict, verbose: bool = False) -> str:
    """The report as text."""
    lines = ["versions"]
    lines += [f"  {name:14} {value}" for name, value in report["versions"].items()]
    lines += ["devices", *(f"  {device}" for device in report["devices"]), "backends"]
    for name, reason in report["backends"].items():
        lines.append(f"  {name:14} {f'no: {reason}' if reason else 'usable'}")
    lines += ["build", *_build_lines(report)]
    if verbose:
        detail = report["native"]["detail"] or "nothing to add"
        lines += ["details", f"  loader         {detail}", "environment variables"]
        lines += [f"  {name:16} {meaning}" for name, meaning in report["environment"].items()]
    return "\n".join(lines)


def main(argv: Optional[list[str]] = None) -> int:
    """`python -m flash_attn_mx info`."""
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn_mx info",
        description="Versions, devices, which backends are usable and why not, what was built.",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument(
        "--verbose", action="store_true", help="with the loader's words and variables"
    )
    options = parser.parse_args(argv)
    report = collect()
    print(json.dumps(report, indent=1) if options.json else render(report, options.verbose))
    return 0


if __name__ == "__main__":
    sys.exit(main())
