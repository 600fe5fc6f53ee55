"""The sm_100 kernels from Python: which instance serves a call, operands in the kernel's form, and its launch.

    tensors -> instance -> payloads for TMA, scale atoms -> attn_fwd, attn_bwd (csrc/ops) -> launch records -> driver | emulator

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
DELTA_BYTES = 128 * 16 + 512  # of a row tile: kLaunchDeltaBytes of csrc/kernels/attn_bwd/launch.h
EMULATED_CTAS = (
    2  # of a launch in the emulator: more than one, and few, so that each serves several work items
)


class Instance(NamedTuple):
    """A built forward kernel: serves head_dim up to the one of its tiles, and one dtype of the output."""

    name: str
    head_dim: int
    out_dtype: torch.dtype


class BackwardInstance(NamedTuple):
    """The built kernels of one backward: serve head_dim up to the one of their tiles, O and gradients of one dtype each."""

    preprocess: str
    main: str
    postprocess: str
    head_dim: int
    out_dtype: torch.dtype
    grad_dtype: torch.dtype

    @property
    def names(self) -> list[str]:
        return list(self[:3])


# Read at import, as the native library is: torch.compile must not meet a file.
_BUILT = frozenset(kernel.name for kernel in _native.kernels())


def _built_with(kernel: str) -> list[tuple[str, int, str]]:
    """(name, head_dim of the tiles, dtype) of the kernel's instances, the smallest first."""
    found = (re.fullmatch(rf"{kernel}_d(\d+)_(bf16|fp16|fp32)", name) for name in _BUILT)
    return sorted(((m[0], int(m[1]), m[2]) for m in found if m), key=lambda row: (row[1], row[0]))


def _read_backward_instances() -> tuple[BackwardInstance, ...]:
    rows = []
    for main, head_dim, grad in _built_with("attn_bwd"):
        post = f"bwd_postprocess_d{head_dim}_{grad}"
        for out in OUT_DTYPES:
            pre = f"bwd_preprocess_d{head_dim}_{out}"
            if {pre, post} <= _BUILT:
                dtypes = OUT_DTYPES[out], OUT_DTYPES[grad]
                rows.append(BackwardInstance(pre, main, post, head_dim, *dtypes))
    return tuple(rows)


INSTANCES = tuple(
    Instance(name, head_dim, OUT_DTYPES[out]) for name, head_dim, out in _built_with("attn_fwd")
)
BACKWARD_INSTANCES = _read_backward_instances()
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


def find_backward(
    head_dim: int, out_dtype: torch.dtype, grad_dtype: torch.dtype
) -> Optional[BackwardInstance]:
    """The backward instance with the smallest tiles that hold head_dim."""
    fitting = (
        row
        for row in BACKWARD_INSTANCES
        if head_dim <= row.head_dim and row[4:] == (out_dtype, grad_dtype)
    )
    return next(fitting, None)


def _built(instances, dtypes) -> str:
    """What is built, for people."""
    sizes = " and ".join(f"<= {d}" for d in sorted({row.head_dim for row in instances}))
    outs = ", ".join(name for name, dtype in OUT_DTYPES.items() if dtype in dtypes)
    return f"built: head_dim {sizes}, output {outs}, float8_e4m3fn operands"


def why_not_built(head_dim: int, out_dtype: torch.dtype, payload: torch.dtype) -> str:
    """Why no built forward kernel serves such operands; "" if one does."""
    if not INSTANCES:
        return "this installation contains no sm_100 attention kernel"
    built = _built(INSTANCES, [row.out_dtype for row in INSTANCES])
    if payload != torch.float8_e4m3fn:
        return f"no sm_100 kernel takes {payload} operands; {built}"
    if find_instance(head_dim, out_dtype) is None:
        return f"no sm_100 kernel has head_dim {head_dim} with output {out_dtype}; {built}"
    return ""


def why_no_backward(
    head_dim: int, out_dtype: torch.dtype, grad_dtype: torch.dtype, payload: torch.dtype
) -> str:
    """Why no built backward kernel serves operands and gradients with such payloads; "" if one does."""
    if not BACKWARD_INSTANCES:
        return "this installation contains no sm_100 backward kernel"
    built = _built(BACKWARD_INSTANCES, [row.grad_dtype for row in BACKWARD_INSTANCES])
    if payload != torch.float8_e4m3fn:
        return f"no sm_100 backward kernel takes {payload} operands or gradients; {built}"
    if find_backward(head_dim, out_dtype, grad_dtype) is None:
        dtypes = f"output {out_dtype} and gradients {grad_dtype}"
        return f"no sm_100 backward kernel has head_dim {head_dim} with {dtypes}; {built}"
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
        return _tensors(self.arguments)

    @property
    def undefined(self) -> list[list[Tensor]]:
        """Those of them whose contents mean nothing before the launch; one list per launch."""
        return [[] if self.filled else [self.out, self.lse]]


class BackwardProblem(NamedTuple):
    """The arguments of the attn_bwd operator up to the instance, and among them scratch and gradients."""

    arguments: tuple
    scratch: tuple[Tensor, ...]
    grads: tuple[Optional[Tensor], Optional[Tensor], Optional[Tensor]]
    filled: bool  # as in Problem, of the gradients

    @property
    def tensors(self) -> list[Tensor]:
        return _tensors(self.arguments)

    @property
    def undefined(self) -> list[list[Tensor]]:
        dq, *others = ([x] if x is not None and not self.filled else [] for x in self.grads)
        keys = [x for grad in others for x in grad]
        return [[*self.scratch, *dq, *keys], [*dq, *keys], dq]


def _tensors(arguments: tuple) -> list[Tensor]:
    return [x for x in arguments if isinstance(x, Tensor)]


def _check_offsets(q: Tensor, k: Tensor, cu_q, cu_k, max_q: int, max_k: int) -> None:
    """Kernels trust the offsets; on the CPU they are looked at."""
    if cu_q is not None and q.device.type == "cpu":
        check_cu_values("cu_seqlens_q", cu_q.tolist(), q.shape[0], "max_seqlen_q", max_q)
        check_cu_values("cu_seqlens_k", cu_k.tolist(), k.shape[0], "max_seqlen_k", max_k)


def _contiguous(x: Optional[Tensor]) -> Optional[Tensor]:
    return None if x is None else x.contiguous()


def prepare(
    q, q_scale, k, k_scale, v, v_scale, v_tok, v_tok_scale,
    cu_q, cu_k, max_q, max_k, softmax_scale, window_left, window_right, out_dtype,
) -> Problem:  # fmt: skip
    """Operands of `fwd` in the kernel's form, and its outputs."""
    packed = cu_q is not None
    _check_offsets(q, k, cu_q, cu_k, max_q, max_k)
    lse_shape = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    out, lse = q.new_empty(q.shape, dtype=out_dtype), q.new_empty(lse_shape, dtype=torch.float32)
    if packed:  # tokens behind the last sequence; where it ends only the device knows
        out.zero_()
        lse.fill_(-torch.inf)
    arguments = (
        tma_payload(q), scale_atoms(q_scale, "rowwise", q.dim(), cu_q, q.shape[0]),
        tma_payload(k), scale_atoms(k_scale, "rowwise", k.dim(), cu_k, k.shape[0]),
        tma_payload(v), scale_atoms(v_scale, "colwise", v.dim(), cu_k, v.shape[0]),
        None if v_tok is None else tma_payload(v_tok), v_tok_scale, out, lse,
        _contiguous(cu_q), _contiguous(cu_k), max_q, max_k, softmax_scale, window_left, window_right,
    )  # fmt: skip
    return Problem(arguments, out, lse, filled=packed)


def prepare_backward(
    dout, out, lse, do_row, do_row_scale, do_col, do_col_scale,
    q, q_scale, q_col, q_col_scale, k, k_scale, k_col, k_col_scale, v_tok, v_tok_scale,
    cu_q, cu_k, max_q, max_k, softmax_scale, window_left, window_right, deterministic, needs, tile_dim,
) -> BackwardProblem:  # fmt: skip
    """Operands of `bwd` in the kernels' form, scratch for tiles of tile_dim channels, and the gradients."""
    packed = cu_q is not None
    _check_offsets(q, k, cu_q, cu_k, max_q, max_k)
    # Packed: tokens behind the last sequence. Without queries or keys no kernel runs.
    filled = packed or q.numel() == 0 or k.numel() == 0
    new = dout.new_zeros if filled else dout.new_empty
    grads = tuple(new(x.shape) if needed else None for x, needed in zip((q, k, v_tok), needs))

    def pair(payload, scale, axis, cu):
        atoms = scale_atoms(scale, axis, payload.dim(), cu, payload.shape[0])
        return tma_payload(payload), atoms

    operands = (
        *pair(do_row, do_row_scale, "rowwise", cu_q), *pair(do_col, do_col_scale, "colwise", cu_q),
        *pair(q, q_scale, "rowwise", cu_q), *pair(q_col, q_col_scale, "colwise", cu_q),
        *pair(k, k_scale, "rowwise", cu_k), *pair(k_col, k_col_scale, "colwise", cu_k),
        tma_payload(v_tok), v_tok_scale, out if out.stride(-1) == 1 else out.contiguous(), lse.contiguous(),
    )  # fmt: skip
    row_tiles = operands[5].numel() // layouts.TILE_BYTES  # one for every atom of q's scales
    bias = lse.new_empty((row_tiles, layouts.TILE_ROWS))
    delta = lse.new_empty((row_tiles, DELTA_BYTES), dtype=torch.uint8)
    dq_acc = lse.new_empty((row_tiles, layouts.TILE_ROWS, tile_dim)) if needs[0] else None
    ordered = needs[0] and deterministic
    dq_turn = lse.new_empty(row_tiles, dtype=torch.int32) if ordered else None
    scratch = (bias, delta, dq_acc, dq_turn)
    arguments = (
        *operands, *scratch, *grads, _contiguous(cu_q), _contiguous(cu_k),
        max_q, max_k, softmax_scale, window_left, window_right,
    )  # fmt: skip
    return BackwardProblem(arguments, tuple(_tensors(scratch)), grads, filled)


def decoded(text: str) -> list[dict]:
    """The launch records in an operator's JSON, params as bytes."""
    return [{**x, "params": bytes.fromhex(x["params"])} for x in json.loads(text)]


def record_of(
    problem: Problem, instance: Instance, ctas: int = EMULATED_CTAS, executor: str = "record"
) -> dict:
    """The launch record (csrc/ops/launch.h) as a dict; params as bytes.

    executor: "record", or "encode": the tensor maps inside params are encoded by the CUDA driver, which must be there.
    """
    text = torch.ops.flash_attn_mx.attn_fwd(
        *problem.arguments, instance.name, instance.head_dim, ctas, executor, ""
    )
    return decoded(text)[0]


def backward_records(
    problem: BackwardProblem, instance: BackwardInstance, executor: str = "record"
) -> list[dict]:
    """record_of for the backward: two launches, and a third where dQ is wanted."""
    text = torch.ops.flash_attn_mx.attn_bwd(
        *problem.arguments, instance.names, instance.head_dim, executor, []
    )
    return decoded(text)


@functools.lru_cache(maxsize=None)
def image_of(name: str, capability: tuple[int, int]) -> str:
    """Path of a kernel's fat binary."""
    kernel = _native.find_kernel(name, capability)
    if kernel is None:
        raise RuntimeError(
            f"flash_attn_mx: {name} is not built for capability {capability[0]}.{capability[1]}"
        )
    return str(kernel.fatbin)


def launch(problem: Problem, instance: Instance, image: Optional[str] = None) -> None:
    """Launches on the current stream of the tensors' device. image: a fat binary instead of the installed one."""
    if image is None:
        image = image_of(instance.name, torch.cuda.get_device_capability(problem.out.device))
    torch.ops.flash_attn_mx.attn_fwd(
        *problem.arguments, instance.name, instance.head_dim, 0, "driver", image
    )


def launch_backward(
    problem: BackwardProblem, instance: BackwardInstance, images: Optional[list[str]] = None
) -> None:
    """launch for the backward; images: one for each of instance.names."""
    if images is None:
        capability = torch.cuda.get_device_capability(problem.arguments[0].device)
        images = [image_of(name, capability) for name in instance.names]
    torch.ops.flash_attn_mx.attn_bwd(
        *problem.arguments, instance.names, instance.head_dim, "driver", images
    )


def _ptx_of(name: str, place: Optional[Path]) -> Path:
    """The kernel's PTX: a file, or the one in a folder, or the installed one."""
    if place is not None and not place.is_dir():
        return place
    found = [] if place is None else sorted(place.glob(f"{name}.*ptx"))
    return found[0] if found else next(row.ptx for row in _native.kernels() if row.name == name)


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


def emulate_records(
    records: list[dict], problem, place: Optional[Path] = None, **options
) -> list[Optional["emulator.Report"]]:
    """Runs the PTX of the problem's launch records on the CPU; a report for each, None where there is nothing to do.

    place: of PTX instead of the installed one, a file or a folder that may lack some.   options: of emulator.Kernel.launch, such as order.
    """
    reports = []
    for record, undefined in zip(records, problem.undefined):
        if record["grid"] == 0:
            reports.append(None)
            continue
        kernel = _emulated_kernel(_ptx_of(record["kernel"], place), record["kernel"])
        report = kernel.launch(
            grid=record["grid"],
            cluster=record["cluster"],
            block=record["block"],
            smem_bytes=record["smem_bytes"],
            args=_encoded_params(record),
            buffers=problem.tensors,
            undefined=undefined,
            **options,
        )
        reports.append(report)
    return reports


def emulate(
    problem: Problem,
    instance: Instance,
    ctas: int = EMULATED_CTAS,
    place: Optional[Path] = None,
    **options,
) -> Optional["emulator.Report"]:
    """emulate_records of the forward."""
    return emulate_records([record_of(problem, instance, ctas)], problem, place, **options)[0]


def emulate_backward(
    problem: BackwardProblem, instance: BackwardInstance, place: Optional[Path] = None, **options
) -> list[Optional["emulator.Report"]]:
    """emulate_records of the backward. Scratch holds NaN at first: what no kernel writes must not matter."""
    for x in problem.scratch:
        x.view(torch.uint8).fill_(0xFF)
    return emulate_records(backward_records(problem, instance), problem, place, **options)


def _refuse(executor: str, device: torch.device, payloads, why_not) -> None:
    """Raises NotImplementedError where the executor cannot serve tensors with these payloads."""
    blocked = why_no_device(device) if executor == "sm100" else why_not_emulated(device)
    odd = {x.dtype for x in payloads if x is not None} - {torch.float8_e4m3fn}
    blocked = blocked or why_not(next(iter(odd), torch.float8_e4m3fn))
    if blocked:
        raise NotImplementedError(f"backend {executor!r}: {blocked}")


def forward(executor: str, *arguments) -> tuple[Tensor, Tensor]:
    """`fwd` by a kernel: executor "sm100" launches it, "emulator" runs its PTX on the CPU."""
    q, out_dtype = arguments[0], arguments[-1]
    operands = q.shape[-1], out_dtype
    _refuse(executor, q.device, arguments[:8:2], lambda x: why_not_built(*operands, x))
    instance = find_instance(*operands)
    problem = prepare(*arguments)
    if problem.out.numel():
        (launch if executor == "sm100" else emulate)(problem, instance)
    return problem.out, problem.lse


def backward(executor: str, *arguments) -> tuple[Tensor, Tensor, Tensor]:
    """`bwd` by the kernels, as forward()."""
    dout, out, q, needs = arguments[0], arguments[1], arguments[7], arguments[-1]
    operands = q.shape[-1], out.dtype, dout.dtype
    _refuse(executor, q.device, arguments[3:17:2], lambda x: why_no_backward(*operands, x))
    instance = find_backward(*operands)
    problem = prepare_backward(*arguments, instance.head_dim)
    if any(needs):
        (launch_backward if executor == "sm100" else emulate_backward)(problem, instance)
    return tuple(dout.new_empty(0) if grad is None else grad for grad in problem.grads)
