"""The sm_100 kernels from Python: which instance serves a call, operands in the kernel's form, and its launch.

    tensors -> instance -> payloads for TMA, scale atoms -> attn_fwd (csrc/ops) -> launch record -> driver | emulator

docs/host.md has the whole picture. Nothing here waits for a device.
"""

import functools
import json
import re
from pathlib import Path
from typing import NamedTuple, Optional

import torch
from torch import Tensor

from . import _native, emulator, info, layouts
from ._errors import check_cu_values

OUT_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
ALIGNMENT = 16  # of addresses and strides in bytes, for the bulk-copy engine
EMULATED_CTAS = (
    2  # of a launch in the emulator: more than one, and few, so that each serves several work items
)


class Instance(NamedTuple):
    """A built forward kernel: serves head_dim up to the one of its tiles, and one dtype of the output."""

    name: str
    head_dim: int
    out_dtype: torch.dtype


def _read_instances() -> tuple[Instance, ...]:
    names = {kernel.name for kernel in _native.kernels()}
    found = (re.fullmatch(r"attn_fwd_d(\d+)_(bf16|fp16|fp32)", name) for name in names)
    rows = [Instance(m[0], int(m[1]), OUT_DTYPES[m[2]]) for m in found if m]
    return tuple(sorted(rows, key=lambda row: (row.head_dim, row.name)))


# Read at import, as the native library is: torch.compile must not meet a file.
INSTANCES = _read_instances()
CAPABILITIES = tuple(_native.attention_capabilities())
WHY_NO_HOST = (
    ""
    if _native.load()
    else f"the C++ operators that launch kernels are not loaded ({_native.status().reason})"
)
WHY_NO_EMULATOR = info.why_not_emulator()


def find_instance(head_dim: int, out_dtype: torch.dtype) -> Optional[Instance]:
    """The instance with the smallest tiles that hold head_dim."""
    fitting = [row for row in INSTANCES if head_dim <= row.head_dim and row.out_dtype == out_dtype]
    return fitting[0] if fitting else None


def why_not_built(head_dim: int, out_dtype: torch.dtype, payload: torch.dtype) -> str:
    """Why no built kernel serves such operands; "" if one does."""
    if not INSTANCES:
        return "this installation contains no sm_100 attention kernel"
    sizes = " and ".join(f"<= {d}" for d in sorted({row.head_dim for row in INSTANCES}))
    outs = ", ".join(
        name
        for name, dtype in OUT_DTYPES.items()
        if any(row.out_dtype == dtype for row in INSTANCES)
    )
    built = f"built: head_dim {sizes}, output {outs}, float8_e4m3fn operands"
    if payload != torch.float8_e4m3fn:
        return f"no sm_100 kernel takes {payload} operands; {built}"
    if find_instance(head_dim, out_dtype) is None:
        return f"no sm_100 kernel has head_dim {head_dim} with output {out_dtype}; {built}"
    return ""


def why_no_device(device: torch.device) -> str:
    """Why kernels cannot be launched on a device; "" if they can."""
    if device.type != "cuda" or torch.version.cuda is None:
        return f"the tensors are on {device.type}; the sm_100 kernels need a CUDA device of capability 10.x"
    capability = torch.cuda.get_device_capability(device)
    if capability[0] != 10 or (CAPABILITIES and capability not in CAPABILITIES):
        needed = info.dotted(CAPABILITIES) if CAPABILITIES else "10.x"
        return (
            f"{device} has capability {info.dotted([capability])}; the sm_100 kernels need {needed}"
        )
    return WHY_NO_HOST


def why_not_emulated(device: torch.device) -> str:
    """Why the emulator cannot serve tensors on a device; "" if it can."""
    if device.type != "cpu":
        return f"the tensors are on {device.type}; the emulator takes CPU tensors"
    return WHY_NO_EMULATOR or WHY_NO_HOST


def serves(
    device: torch.device, head_dim: int, out_dtype: torch.dtype, payload: torch.dtype
) -> bool:
    """Whether a kernel can be launched for such operands."""
    return not (why_no_device(device) or why_not_built(head_dim, out_dtype, payload))


# --- operands -------------------------------------------------------------------------------------------------


def tma_payload(x: Tensor) -> Tensor:
    """x, or a copy of it where the bulk-copy engine could not read it in place.

    In place: unit stride along head_dim, other strides positive multiples of 16 bytes, address a multiple of 16.
    """
    rows = all(
        n <= 1 or (s > 0 and s % ALIGNMENT == 0) for n, s in zip(x.shape[:-1], x.stride()[:-1])
    )
    unit = x.shape[-1] == 1 or x.stride(-1) == 1
    if x.numel() == 0 or (rows and unit and x.data_ptr() % ALIGNMENT == 0):
        return x
    head_dim = x.shape[-1]
    padded = x.new_empty((*x.shape[:-1], -(-head_dim // ALIGNMENT) * ALIGNMENT))
    copy = padded[..., :head_dim]  # the columns behind are never read: the map ends at head_dim
    copy.view(torch.uint8).copy_(x.view(torch.uint8))
    return copy


def scale_atoms(
    scale: Tensor, axis: str, ndim: int, cu_seqlens: Optional[Tensor], total: int
) -> Tensor:
    """Scales of an operand with ndim dimensions as the atoms of csrc/params.h; those that are atoms already as they are."""
    if scale.dim() != ndim:
        return scale.contiguous()
    if cu_seqlens is not None:
        return layouts.packed_atoms(scale, axis, cu_seqlens, total)
    return layouts.to_swizzled128x4(layouts.operand_matrix(scale, axis))


# --- launch ---------------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """The arguments of the attn_fwd operator up to the instance, and among them the outputs."""

    arguments: tuple
    out: Tensor
    lse: Tensor
    filled: bool  # out and lse hold the results of rows that the kernel does not write

    @property
    def tensors(self) -> list[Tensor]:
        """What the kernel reaches through pointers."""
        return [x for x in self.arguments if isinstance(x, Tensor)]

    @property
    def undefined(self) -> list[Tensor]:
        """Those of them whose contents mean nothing before the launch."""
        return [] if self.filled else [self.out, self.lse]


def prepare(
    q, q_scale, k, k_scale, v, v_scale, v_tok, v_tok_scale,
    cu_q, cu_k, max_q, max_k, softmax_scale, window_left, window_right, out_dtype,
) -> Problem:  # fmt: skip
    """Operands of `fwd` in the kernel's form, and its outputs."""
    packed = cu_q is not None
    if packed and q.device.type == "cpu":
        check_cu_values("cu_seqlens_q", cu_q.tolist(), q.shape[0], "max_seqlen_q", max_q)
        check_cu_values("cu_seqlens_k", cu_k.tolist(), k.shape[0], "max_seqlen_k", max_k)
    lse_shape = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    out, lse = q.new_empty(q.shape, dtype=out_dtype), q.new_empty(lse_shape, dtype=torch.float32)
    if packed:  # tokens behind the last sequence; where it ends only the device knows
        out.zero_()
        lse.fill_(-torch.inf)
        cu_q, cu_k = cu_q.contiguous(), cu_k.contiguous()
    arguments = (
        tma_payload(q), scale_atoms(q_scale, "rowwise", q.dim(), cu_q, q.shape[0]),
        tma_payload(k), scale_atoms(k_scale, "rowwise", k.dim(), cu_k, k.shape[0]),
        tma_payload(v), scale_atoms(v_scale, "colwise", v.dim(), cu_k, v.shape[0]),
        None if v_tok is None else tma_payload(v_tok), v_tok_scale,
        out, lse, cu_q, cu_k, max_q, max_k, softmax_scale, window_left, window_right,
    )  # fmt: skip
    return Problem(arguments, out, lse, filled=packed)


def record_of(
    problem: Problem, instance: Instance, ctas: int = EMULATED_CTAS, executor: str = "record"
) -> dict:
    """The launch record (csrc/ops/launch.h) as a dict; params as bytes.

    executor: "record", or "encode": the tensor maps inside params are encoded by the CUDA driver, which must be there.
    """
    text = torch.ops.flash_attn_mx.attn_fwd(
        *problem.arguments, instance.name, instance.head_dim, ctas, executor, ""
    )
    record = json.loads(text)
    return {**record, "params": bytes.fromhex(record["params"])}


@functools.lru_cache(maxsize=None)
def _image(name: str, capability: tuple[int, int]) -> str:
    kernel = _native.find_kernel(name, capability)
    if kernel is None:
        raise RuntimeError(
            f"flash_attn_mx: {name} is not built for capability {capability[0]}.{capability[1]}"
        )
    return str(kernel.fatbin)


def launch(problem: Problem, instance: Instance, image: Optional[str] = None) -> None:
    """Launches on the current stream of the tensors' device. image: a fat binary instead of the installed one."""
    if image is None:
        image = _image(instance.name, torch.cuda.get_device_capability(problem.out.device))
    torch.ops.flash_attn_mx.attn_fwd(
        *problem.arguments, instance.name, instance.head_dim, 0, "driver", image
    )


@functools.lru_cache(maxsize=None)
def _emulated_kernel(ptx: Path, name: str) -> "emulator.Kernel":
    return emulator.Module.from_ptx(ptx).kernels[name]


def _encoded_params(record: dict) -> bytes:
    """The record's parameters with its tensor maps encoded for the emulator."""
    params = bytearray(record["params"])
    for m in record["maps"]:
        shape = dict(dims=m["sizes"], strides=m["strides_bytes"], dtype="uint8")
        swizzle = f"{m['swizzle_bytes']}B"
        tiled = emulator.TensorMap.tiled(m["address"], m["box"], swizzle=swizzle, **shape)
        params[m["offset"] : m["offset"] + len(tiled.encoded)] = tiled.encoded
    return bytes(params)


def emulate(
    problem: Problem,
    instance: Instance,
    ctas: int = EMULATED_CTAS,
    ptx: Optional[Path] = None,
    **options,
) -> Optional["emulator.Report"]:
    """Runs the instance's PTX on the CPU; None where there is nothing to do.

    ptx: a file instead of the installed one.   options: of emulator.Kernel.launch, such as order.
    """
    return emulate_record(record_of(problem, instance, ctas), problem, ptx, **options)


def emulate_record(
    record: dict, problem: Problem, ptx: Optional[Path] = None, **options
) -> Optional["emulator.Report"]:
    """emulate() of a record of the problem that record_of gave."""
    if record["grid"] == 0:
        return None
    name = record["kernel"]
    if ptx is None:
        ptx = next(row.ptx for row in _native.kernels() if row.name == name)
    return _emulated_kernel(ptx, name).launch(
        grid=record["grid"],
        cluster=record["cluster"],
        block=record["block"],
        smem_bytes=record["smem_bytes"],
        args=_encoded_params(record),
        buffers=problem.tensors,
        undefined=problem.undefined,
        **options,
    )


def forward(executor: str, *arguments) -> tuple[Tensor, Tensor]:
    """`fwd` by a kernel: executor "sm100" launches it, "emulator" runs its PTX on the CPU."""
    q, out_dtype = arguments[0], arguments[-1]
    blocked = why_no_device(q.device) if executor == "sm100" else why_not_emulated(q.device)
    payloads = {x.dtype for x in arguments[:8:2] if x is not None} - {torch.float8_e4m3fn}
    blocked = blocked or why_not_built(
        q.shape[-1], out_dtype, next(iter(payloads), torch.float8_e4m3fn)
    )
    if blocked:
        raise NotImplementedError(f"backend {executor!r}: {blocked}")
    instance = find_instance(q.shape[-1], out_dtype)
    problem = prepare(*arguments)
    if problem.out.numel():
        (launch if executor == "sm100" else emulate)(problem, instance)
    return problem.out, problem.lse
