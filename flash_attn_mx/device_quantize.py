"""The quantiser's kernel from Python: one read of x, any of the three axes, scales plain or as MMA atoms.

    x -> outputs -> quantize_device (csrc/ops) -> launch record -> driver | emulator

The bytes are those of quantize.quantize_pytorch. Nothing here waits for a device.
"""

from collections.abc import Sequence
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from . import _native, layouts, sm100

_AXES = ("rowwise", "colwise", "tokenwise")  # order of the operator's outputs
MAX_HEAD_DIM = 128
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
BUILT = frozenset(kernel.name for kernel in _native.kernels())  # read once, as in sm100.py


class Outputs(NamedTuple):
    """The operator's arguments, and what it will write."""

    arguments: tuple
    results: dict  # axis -> (data, scale)
    tensors: list
    undefined: list  # per launch: tensors that mean nothing before it


def kernel_name(x: Tensor) -> str:
    return f"quantize_d{64 if x.shape[-1] <= 64 else 128}_{_TYPES[x.dtype]}"


def serves(x: Tensor) -> bool:
    """Whether the kernel is built for x and can be launched on its device."""
    return x.device.type == "cuda" and can_serve(x) and not sm100.why_no_device(x.device)


def can_serve(x: Tensor) -> bool:
    """Whether there is a kernel for the type and the head_dim of x."""
    return x.shape[-1] <= MAX_HEAD_DIM and x.shape[-1] % 4 == 0 and kernel_name(x) in BUILT


def _four_at_once(x: Tensor) -> bool:
    """Whether any four channels of x from a multiple of four on lie at a multiple of their size."""
    strides = (s for n, s in zip(x.shape, x.stride()) if n > 1)
    *outer, last = strides if x.shape[-1] > 1 else (*strides, 1)
    return (
        last == 1 and all(s % 4 == 0 for s in outer) and x.data_ptr() % (4 * x.element_size()) == 0
    )


def prepare(
    x: Tensor,
    axes: Sequence[str],
    rounding: str,
    dtype: torch.dtype,
    cu_seqlens: Optional[Tensor] = None,
    atoms: bool = False,
) -> Outputs:
    """Allocates the outputs. atoms: scales of rowwise and colwise as csrc/params.h lays them out."""
    if x.numel() and not _four_at_once(x):
        x = x.clone(memory_format=torch.contiguous_format)
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.contiguous()
    results = {}
    for axis in axes:
        data = x.new_empty(x.shape, dtype=dtype)
        if atoms and axis != "tokenwise":
            scale = x.new_empty(layouts.atoms_shape(x.shape, cu_seqlens), dtype=torch.uint8)
        else:
            shape = layouts.scale_shape(x.shape, axis, cu_seqlens)
            scale = x.new_empty(shape, dtype=torch.uint8)
            if x.numel() == 0 or (axis == "colwise" and cu_seqlens is not None):
                scale.fill_(127)  # what belongs to no block
        results[axis] = (data, scale.view(torch.float8_e8m0fnu))
    outputs = [tensor for axis in _AXES for tensor in results.get(axis, (None, None))]
    tensors = [t for t in (x, *outputs, cu_seqlens) if t is not None]
    # Packed: bytes of scales that belong to no block are left as they are.
    undefined = [] if cu_seqlens is not None else [t for t in outputs if t is not None]
    return Outputs((x, rounding, *outputs, cu_seqlens, atoms), results, tensors, [undefined])


def launch(outputs: Outputs, image: Optional[str] = None) -> None:
    """Launches on the current stream of the tensors' device. image: a fat binary instead of the installed one."""
    x = outputs.arguments[0]
    name = kernel_name(x)
    if image is None:
        image = sm100.image_of(name, torch.cuda.get_device_capability(x.device))
    torch.ops.flash_attn_mx.quantize_device(*outputs.arguments, name, "driver", image)


def emulate(outputs: Outputs, **options):
    """Runs the kernel's PTX on the CPU; returns the emulator's report, None where there is nothing to do."""
    name = kernel_name(outputs.arguments[0])
    text = torch.ops.flash_attn_mx.quantize_device(*outputs.arguments, name, "record", "")
    return sm100.emulate_records(sm100.decoded(text), outputs, **options)[0]


def quantize(x, axes, rounding, dtype, cu_seqlens, atoms=False):
    """The quantize_axes operator by the kernel: data and scale of each axis, one after the other."""
    packed = cu_seqlens if atoms or "colwise" in axes else None
    outputs = prepare(x, axes, rounding, dtype, packed, atoms)
    launch(outputs)
    return [tensor for axis in axes for tensor in outputs.results[axis]]
