"""torch.ops.flash_attn_mx: who implements each operator, their fakes, and their behaviour under autograd and sharding.

Schemas come from csrc/ops/schemas.def. The native library defines them and serves `quantize` on CPU; without it the same
file is read here. The portable implementations below serve every device for which nothing faster is registered.
"""

import functools
import re
import warnings
from pathlib import Path
from typing import Optional

import torch
from torch import Tensor

from . import _native, device_quantize, layouts, portable, sm100
from ._errors import check_cu_values, fail
from .quantize import quantize_pytorch, scale_shape

EXECUTORS = ("auto", "sm100", "portable", "emulator")
# Arguments of fwd and bwd before executor, which torch leaves out where it is the default.
_FWD_OPERANDS, _BWD_OPERANDS = 16, 26

NAMESPACE = "flash_attn_mx"


def _read_schemas() -> list[str]:
    for folder in (Path(__file__).parent, Path(__file__).parents[1] / "csrc" / "ops"):
        if (folder / "schemas.def").is_file():
            return re.findall(
                r'^FAMX_SCHEMA\("(.*)"\)', (folder / "schemas.def").read_text(), flags=re.MULTILINE
            )
    raise ImportError(
        "flash_attn_mx: schemas.def is missing from the installed package; reinstall it"
    )


if not _native.load():
    _definitions = torch.library.Library(NAMESPACE, "DEF")
    for _schema in _read_schemas():
        _definitions.define(_schema)
_implementations = torch.library.Library(NAMESPACE, "IMPL")
_OPS = torch.ops.flash_attn_mx


# --- implementations ------------------------------------------------------------------------------------------


def _sequences(
    cu_q: Tensor, cu_k: Tensor, q: Tensor, k: Tensor, max_q: int, max_k: int
) -> list[tuple[slice, slice]]:
    """(tokens of q, tokens of k) of each packed sequence. Reads the offsets on the host."""
    offsets_q, offsets_k = cu_q.tolist(), cu_k.tolist()
    check_cu_values("cu_seqlens_q", offsets_q, q.shape[0], "max_seqlen_q", max_q)
    check_cu_values("cu_seqlens_k", offsets_k, k.shape[0], "max_seqlen_k", max_k)
    pairs = zip(zip(offsets_q, offsets_q[1:]), zip(offsets_k, offsets_k[1:]))
    return [(slice(*tokens_q), slice(*tokens_k)) for tokens_q, tokens_k in pairs]


def _scale_rows(tokens: slice, sequence: int) -> slice:
    """Rows of a packed colwise scale tensor that belong to one sequence (docs/numerics.md §1)."""
    start = tokens.start // portable.BLOCK + sequence
    return slice(start, start - (-(tokens.stop - tokens.start) // portable.BLOCK))


def _take(
    operand: portable.Operand, tokens: slice, rows: Optional[slice] = None
) -> portable.Operand:
    """One sequence of a packed operand as a dense batch of one."""
    data, scale = operand
    return data[tokens].unsqueeze(0), scale[rows or tokens].unsqueeze(0)


def _plain(
    operand: portable.Operand, axis: str, cu_seqlens: Optional[Tensor] = None
) -> portable.Operand:
    """The operand with its scale in plain layout; one in MMA order is recognised by its dimensions."""
    data, scale = operand
    if scale.dim() == data.dim():
        return operand
    if cu_seqlens is not None:
        return data, layouts.from_packed_atoms(scale, axis, cu_seqlens, data.shape)
    _, rows, cols = layouts.operand_size(data.shape, axis)
    return data, layouts.operand_scale(layouts.from_swizzled128x4(scale, rows, cols), axis)


# (axis of the blocks, offsets of q or k) of the leading operands of fwd, and of bwd from its fourth on.
_FWD_AXES = (("rowwise", 8), ("rowwise", 9), ("colwise", 9))
_BWD_AXES = (*(("rowwise", 17), ("colwise", 17)) * 2, ("rowwise", 18), ("colwise", 18))


def _with_plain_scales(operands: tuple, first: int, axes: tuple) -> tuple:
    """The operands of fwd or bwd with every scale in plain layout."""
    operands = list(operands)
    for i, (axis, offsets) in enumerate(axes):
        at = first + 2 * i
        operands[at : at + 2] = _plain((operands[at], operands[at + 1]), axis, operands[offsets])
    return tuple(operands)


def _quantize(x, axis, rounding, dtype, cu_seqlens):
    """`quantize` where csrc/ops/quantize.cpp does not serve the device."""
    if device_quantize.serves(x):
        return device_quantize.quantize(x, [axis], rounding, dtype, cu_seqlens)
    return quantize_pytorch(x, axis, rounding, dtype, cu_seqlens)


def _quantize_axes(x, axes, rounding, dtype, cu_seqlens, atoms):
    """Several `quantize` of one tensor, in one launch where there is a kernel for its device."""
    if observer is None and device_quantize.serves(x):  # an observer hears of each `quantize`
        return device_quantize.quantize(x, axes, rounding, dtype, cu_seqlens, atoms)
    return quantize_one_by_one(x, axes, rounding, dtype, cu_seqlens, atoms)


def quantize_one_by_one(x, axes, rounding, dtype, cu_seqlens, atoms=False):
    """quantize_axes by the operator with one axis, which has sharding rules and may be watched."""
    flat = []
    for axis in axes:
        offsets = cu_seqlens if axis == "colwise" else None
        data, scale = _OPS.quantize(x, axis, rounding, dtype, offsets)
        if atoms and axis != "tokenwise":
            scale = sm100.scale_atoms(scale, axis, x.dim(), cu_seqlens, x.shape[0])
        flat += [data, scale]
    return flat


def _chosen(executor: str, device: torch.device, why_not_built, *operands) -> str:
    """The executor, or for "auto" the kernels where the device has them for such operands, else the portable path."""
    if executor not in EXECUTORS:
        fail(ValueError, "executor", f"one of {EXECUTORS}", repr(executor))
    if executor != "auto":
        return executor
    return "portable" if sm100.why_no_device(device) or why_not_built(*operands) else "sm100"


def _fwd(*arguments):
    """`fwd` on any device: by the kernel of the executor, or by the portable path."""
    operands, executor = arguments[:_FWD_OPERANDS], (*arguments[_FWD_OPERANDS:], "auto")[0]
    q, out_dtype = operands[0], operands[-1]
    chosen = _chosen(executor, q.device, sm100.why_not_built, q.shape[-1], out_dtype, q.dtype)
    if chosen == "portable" or observer is not None:
        operands = _with_plain_scales(operands, 0, _FWD_AXES)
    if chosen == "portable":
        out, lse = _portable_fwd(*operands)
    else:
        out, lse = sm100.forward(chosen, *operands)
    if observer is not None:
        observer.saw_forward(operands, lse)
    return out, lse


def _portable_fwd(
    q, q_scale, k, k_scale, v, v_scale, v_tok, v_tok_scale,
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    softmax_scale, window_left, window_right, out_dtype,
):  # fmt: skip
    window = (window_left, window_right)
    token = None if v_tok is None else (v_tok, v_tok_scale)
    if cu_seqlens_q is None:
        operands = (q, q_scale), (k, k_scale), (v, v_scale)
        return portable.forward(*operands, token, softmax_scale, window, out_dtype)
    out = q.new_zeros(q.shape, dtype=out_dtype)
    lse = torch.full((q.shape[1], q.shape[0]), -torch.inf, device=q.device)
    sequences = _sequences(cu_seqlens_q, cu_seqlens_k, q, k, max_seqlen_q, max_seqlen_k)
    for b, (tokens_q, tokens_k) in enumerate(sequences):
        out_b, lse_b = portable.forward(
            _take((q, q_scale), tokens_q),
            _take((k, k_scale), tokens_k),
            _take((v, v_scale), tokens_k, _scale_rows(tokens_k, b)),
            None if token is None else _take(token, tokens_k),
            softmax_scale,
            window,
            out_dtype,
        )
        out[tokens_q], lse[:, tokens_q] = out_b[0], lse_b[0]
    return out, lse


def _bwd(*arguments):
    """`bwd` on any device, as _fwd."""
    operands, executor = arguments[:_BWD_OPERANDS], (*arguments[_BWD_OPERANDS:], "auto")[0]
    dout, out, do_row, q = operands[0], operands[1], operands[3], operands[7]
    dtypes = out.dtype, dout.dtype, do_row.dtype
    chosen = _chosen(executor, q.device, sm100.why_no_backward, q.shape[-1], *dtypes)
    if chosen == "portable" or observer is not None:
        operands = _with_plain_scales(operands, 3, _BWD_AXES)
    if chosen == "portable":
        grads = _portable_bwd(*operands)
    else:
        grads = sm100.backward(chosen, *operands)
    if observer is not None:
        observer.saw_backward(operands)
    return grads


def _portable_bwd(
    dout, out, lse, do_row, do_row_scale, do_col, do_col_scale,
    q, q_scale, q_col, q_col_scale, k, k_scale, k_col, k_col_scale, v_tok, v_tok_scale,
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    softmax_scale, window_left, window_right, deterministic, needs,
):  # fmt: skip
    window = (window_left, window_right)
    do = _plain((do_row, do_row_scale), "rowwise"), _plain((do_col, do_col_scale), "colwise")
    q_pair = _plain((q, q_scale), "rowwise"), _plain((q_col, q_col_scale), "colwise")
    k_pair = _plain((k, k_scale), "rowwise"), _plain((k_col, k_col_scale), "colwise")
    token = (v_tok, v_tok_scale)
    if cu_seqlens_q is None:
        return portable.backward(
            dout, out, lse, do, q_pair, k_pair, token, softmax_scale, window, needs
        )
    grads = [dout.new_zeros(x.shape if needed else 0) for x, needed in zip((q, k, v_tok), needs)]
    sequences = _sequences(cu_seqlens_q, cu_seqlens_k, q, k, max_seqlen_q, max_seqlen_k)
    for b, (tokens_q, tokens_k) in enumerate(sequences):
        rows_q, rows_k = _scale_rows(tokens_q, b), _scale_rows(tokens_k, b)
        part = portable.backward(
            dout[tokens_q].unsqueeze(0),
            out[tokens_q].unsqueeze(0),
            lse[:, tokens_q].unsqueeze(0),
            (_take(do[0], tokens_q), _take(do[1], tokens_q, rows_q)),
            (_take(q_pair[0], tokens_q), _take(q_pair[1], tokens_q, rows_q)),
            (_take(k_pair[0], tokens_k), _take(k_pair[1], tokens_k, rows_k)),
            _take(token, tokens_k),
            softmax_scale,
            window,
            needs,
        )
        for grad, grad_b, tokens, needed in zip(grads, part, (tokens_q, tokens_k, tokens_k), needs):
            if needed:
                grad[tokens] = grad_b[0]
    return tuple(grads)


def _in_fp32(function):
    """Shields an implementation from autocast, which would run its matrix products in bf16."""

    @functools.wraps(function)
    def run(*arguments):
        device = arguments[0].device.type
        if not torch.is_autocast_enabled(device):
            return function(*arguments)
        with torch.autocast(device, enabled=False):
            return function(*arguments)

    return run


# What famx.monitor() puts here hears of every call, compiled ones too.
observer = None


def layer_of_call(layer):
    """The layer of an eager call, as the observer knows it. Graphs do not ask, so that none is retraced for it."""
    if torch.compiler.is_compiling() or observer is None:
        return layer
    return observer.layer_of_call(layer)


def watch_quantize(callback) -> torch.library.Library:
    """Calls callback(x, data, axis) after every `quantize`, until the library that is returned is destroyed."""
    watch = torch.library.Library(NAMESPACE, "IMPL")
    for key in ("CPU", "CUDA"):
        try:
            kernel = torch.library.get_kernel(f"{NAMESPACE}::quantize", key)
        except RuntimeError:  # a build of torch without that device
            continue

        def quantize(keys, x, axis, rounding, dtype, cu_seqlens, kernel=kernel):
            data, scale = kernel.call_boxed(keys, x, axis, rounding, dtype, cu_seqlens)
            callback(x, data, axis)
            return data, scale

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            watch.impl("quantize", quantize, key, with_keyset=True, allow_override=True)
    return watch


for _name, _function in (
    ("quantize", _quantize),
    ("quantize_axes", _quantize_axes),
    ("fwd", _fwd),
    ("bwd", _bwd),
):
    _implementations.impl(_name, _in_fp32(_function), "CompositeExplicitAutograd")


# --- fakes ----------------------------------------------------------------------------------------------------


@torch.library.register_fake(f"{NAMESPACE}::quantize")
def _(x, axis, rounding, dtype, cu_seqlens):
    data = x.new_empty(x.shape, dtype=dtype)
    return data, x.new_empty(scale_shape(x.shape, axis, cu_seqlens), dtype=torch.float8_e8m0fnu)


@torch.library.register_fake(f"{NAMESPACE}::quantize_axes")
def _(x, axes, rounding, dtype, cu_seqlens, atoms):
    flat = []
    for axis in axes:
        if atoms and axis != "tokenwise":
            shape = layouts.atoms_shape(x.shape, cu_seqlens)
        else:
            shape = scale_shape(x.shape, axis, cu_seqlens)
        flat += [
            x.new_empty(x.shape, dtype=dtype),
            x.new_empty(shape, dtype=torch.float8_e8m0fnu),
        ]
    return flat


@torch.library.register_fake(f"{NAMESPACE}::fwd")
def _(
    q, q_scale, k, k_scale, v, v_scale, v_tok, v_tok_scale,
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    softmax_scale, window_left, window_right, out_dtype, executor="auto",
):  # fmt: skip
    lse_shape = (
        (q.shape[0], q.shape[2], q.shape[1]) if cu_seqlens_q is None else (q.shape[1], q.shape[0])
    )
    return q.new_empty(q.shape, dtype=out_dtype), q.new_empty(lse_shape, dtype=torch.float32)


@torch.library.register_fake(f"{NAMESPACE}::bwd")
def _(dout, *operands):
    q, k, needs = operands[6], operands[10], operands[_BWD_OPERANDS - 2]
    return tuple(dout.new_empty(x.shape if needed else 0) for x, needed in zip((q, k, k), needs))


# --- autograd -------------------------------------------------------------------------------------------------


def _no_gradient(name: str, reason: str):
    def backward(ctx, *grads):
        raise NotImplementedError(f"flash_attn_mx::{name} has no gradient: {reason}")

    return backward


for _name in ("quantize", "quantize_axes"):
    torch.library.register_autograd(
        f"{NAMESPACE}::{_name}",
        _no_gradient(
            _name, "rounding to MXFP8 is not differentiable; differentiate flash_attn_func instead"
        ),
    )
torch.library.register_autograd(
    f"{NAMESPACE}::bwd", _no_gradient("bwd", "second derivatives are not implemented")
)
# fwd takes fp8 operands, which carry no gradient: no autograd kernel, whose Python would cost 10 us a call.
_implementations.impl("fwd", torch.library.fallthrough_kernel, "Autograd")


# --- sharding (DTensor) ---------------------------------------------------------------------------------------

_sharding_registered = False


def prepare_dtensors(*tensors: Tensor) -> None:
    """Where the tensors are DTensors: registers the sharding rules (once; the import is slow) and checks placements."""
    global _sharding_registered
    if not any("DTensor" in (cls.__name__ for cls in type(x).__mro__) for x in tensors):
        return
    from . import _sharding

    if not _sharding_registered:
        _sharding.register()
        _sharding_registered = True
    _sharding.check_placements(*tensors)
