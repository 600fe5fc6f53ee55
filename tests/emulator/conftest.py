"""Fixtures of the emulator's tests: the extension (built on demand) and a one-warp kernel around a few lines of PTX."""

import importlib.util
import pathlib

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = ".version 9.0\n.target sm_100a\n.address_size 64\n"


@pytest.fixture(scope="session", autouse=True)
def extension():
    """Builds csrc/emulator when the package came without it."""
    if importlib.util.find_spec("flash_attn_mx._emulator") is None:
        spec = importlib.util.spec_from_file_location("emulator_build", ROOT / "csrc" / "emulator" / "build.py")
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        build.build()


def kernel(body, n_params, decls="", threads=32, module=""):
    """Text of `.entry k` with pointer parameters p0.., whose addresses are in %p0.."""
    params = ", ".join(f".param .u64 p{i}" for i in range(n_params))
    loads = "\n".join(f"ld.param.u64 %p{i}, [p{i}];" for i in range(n_params))
    return f"{HEADER}{module}\n.visible .entry k({params}) {{\n.reg .b64 %p<{n_params + 1}>;\n{decls}\n{loads}\n{body}\nret;\n}}\n"


def lanes(body, ins=(), outs=(np.uint32,), decls="", **launch):
    """Runs body on one warp. Lane i has ins[j][i] in %a<j> and leaves %o<j>; returns the outputs, 32 values each."""
    from flash_attn_mx import emulator

    ins = [np.ascontiguousarray(np.broadcast_to(x, 32)) for x in ins]
    outs = [np.zeros(32, t) for t in outs]
    n = len(ins)
    regs = "".join(f".reg .b{8 * x.itemsize} %a{i};\n" for i, x in enumerate(ins))
    regs += "".join(f".reg .b{8 * x.itemsize} %o{i};\n" for i, x in enumerate(outs))
    regs += ".reg .b32 %lane;\n.reg .b64 %at;\n"
    text = ["mov.u32 %lane, %laneid;"]
    for i, x in enumerate(ins):
        text.append(f"mad.wide.u32 %at, %lane, {x.itemsize}, %p{i};\nld.global.b{8 * x.itemsize} %a{i}, [%at];")
    text.append(body)
    for i, x in enumerate(outs):
        text.append(f"mad.wide.u32 %at, %lane, {x.itemsize}, %p{n + i};\nst.global.b{8 * x.itemsize} [%at], %o{i};")
    m = emulator.Module.from_ptx(kernel("\n".join(text), n + len(outs), regs + decls))
    m.kernels["k"].launch(1, 32, [*ins, *outs], **launch)
    return outs


def launch(text, args, grid=1, block=32, **options):
    from flash_attn_mx import emulator

    return emulator.Module.from_ptx(text).kernels["k"].launch(grid, block, args, **options)
