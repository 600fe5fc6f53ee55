"""The MXFP8 kernels behind torch's flash attention operators, and what is handed on to torch's own.

torch decides on shapes and flags which of its kernels a call of scaled_dot_product_attention goes to. The overrides here
stand in for the flash ones (CPU and CUDA). What they cannot serve goes to the kernel that was there before; the other
kernels get an override that computes nothing but says why the call is not MXFP8.

FLOW forward   aten op -> reasons against? -> torch's kernel
                       -> quantise, flash_attn_mx::fwd -> out laid out as empty_like(query), lse marked
     backward  aten op -> lse not marked? -> torch's kernel
                       -> quantise q, k, v anew (autograd saved them unquantised), flash_attn_mx::bwd
"""

import math
import threading
import warnings
from typing import Callable, NamedTuple, NoReturn, Optional, Sequence

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .. import dispatch
from .._errors import INPUT_DTYPES, MAX_HEAD_DIM, check_cu_seqlens
from ..dispatch import Plan, Reason
from ..interface import fold_causal, gradients, quantise_backward, quantise_forward, wanted

_OPS = torch.ops.flash_attn_mx
_ROUNDING, _DOUT_DTYPE = "rceil", torch.float8_e4m3fn
# Floats that our lse has behind its end: autograd and compiled graphs hand the backward nothing else of ours.
_MARK = 29


class Problem(NamedTuple):
    """One call in this library's terms: q (B, Sq, H, D), k, v (B, Sk, Hkv, D), or packed (T, H, D) with offsets."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_q: Optional[Tensor]
    cu_k: Optional[Tensor]
    max_q: int
    max_k: int
    scale: float
    window: tuple[int, int]

    def forward(self, executor: str) -> tuple[Tensor, Tensor]:
        q, k, v, cu_q, cu_k, max_q, max_k, scale, window = self
        operands = quantise_forward(q, k, v, cu_q, cu_k, window, _ROUNDING, executor)
        return _OPS.fwd(*operands, cu_q, cu_k, max_q, max_k, scale, *window, q.dtype, executor)

    def backward(self, dout: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, cu_q, cu_k, max_q, max_k, scale, window = self
        chosen = dispatch.plan({"q": q, "k": k, "v": v}, max_k, dout_dtype=_DOUT_DTYPE)
        dispatch.announce(chosen)
        # The policy may have changed since the forward, which was ours.
        executor = "auto" if chosen.backend == "high_precision" else chosen.backend
        operands = quantise_backward(q, k, v, cu_q, cu_k, _ROUNDING, executor)
        deterministic = torch.are_deterministic_algorithms_enabled()
        return gradients(
            dout, out, lse.contiguous(), operands, cu_q, cu_k, max_q, max_k, scale, *window,
            deterministic, _ROUNDING, _DOUT_DTYPE, [True] * 3, executor,
        )  # fmt: skip


def _scale(scale: Optional[float], q: Tensor) -> float:
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def _top_left(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: Optional[float]) -> Problem:
    """q (B, H, Sq, D), k, v (B, Hkv, Sk, D) with SDPA's causal mask: query i sees key j only if j <= i."""
    q, k, v = _heads_last(q, k, v)
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    window = (-1, -1)
    if is_causal and seqlen_k > seqlen_q:  # no query sees the keys from seqlen_q on
        k, v, window = k[:, :seqlen_q], v[:, :seqlen_q], (-1, 0)
    elif is_causal:
        window = (-1, seqlen_q - seqlen_k)
    return Problem(
        q, k, v, None, None, seqlen_q, min(k.shape[1], seqlen_k), _scale(scale, q), window
    )


def _lower_right(q, k, v, is_causal: bool, scale: Optional[float]) -> Problem:
    """_top_left with the other alignment, which torch's CUDA operator has: SDPA sends it square causal calls only,
    torch.nn.attention.bias.causal_lower_right the others."""
    q, k, v = _heads_last(q, k, v)
    return _bottom_right(q, k, v, None, None, 0, 0, is_causal, scale, None, None)


def _bottom_right(
    q, k, v, cu_q, cu_k, max_q, max_k, is_causal, scale, window_size_left, window_size_right
) -> Problem:
    """_flash_attention_forward's layout, masks aligned as flash-attention does."""
    if cu_q is not None:
        check_cu_seqlens("cum_seq_q", cu_q, q, "max_q", max_q)
        check_cu_seqlens("cum_seq_k", cu_k, q, "max_k", max_k)
    else:
        max_q, max_k = q.shape[1], k.shape[1]
    sides = tuple(
        -1 if side is None or side < 0 else side for side in (window_size_left, window_size_right)
    )
    window = fold_causal(is_causal, sides, max_q, max_k)
    return Problem(q, k, v, cu_q, cu_k, max_q, max_k, _scale(scale, q), window)


# --- serve, or hand on ----------------------------------------------------------------------------------------


class _HandOn(Exception):
    """torch's kernel has to serve this call."""

    def __init__(self, reasons: Sequence[Reason] = ()):
        super().__init__()
        self.reasons = tuple(reasons)


def _reasons(q, k, v, ndim: int, attn_mask=None, dropout_p=0.0, scale=None, **options):
    """Why the MXFP8 kernels do not take a call. options: by name, None or False where not given."""
    if q.is_nested or k.is_nested or v.is_nested:
        return [Reason("nested", "the tensors are nested")]
    reasons = dispatch.option_reasons(attn_mask is not None, dropout_p)
    for name, value in options.items():
        if value is not None and value is not False:
            reasons.append(Reason(name, f"{name} was given, which the MXFP8 paths do not take"))
    if q.dtype not in INPUT_DTYPES:
        reasons.append(Reason("dtype", f"inputs are {q.dtype}"))
    if q.dim() != ndim or k.dim() != ndim or v.dim() != ndim:
        reasons.append(Reason("rank", f"q, k, v have {q.dim()}, {k.dim()}, {v.dim()} dimensions"))
    elif not 1 <= q.shape[-1] <= MAX_HEAD_DIM or v.shape[-1] != q.shape[-1]:
        sizes = f"{q.shape[-1]} (q, k) and {v.shape[-1]} (v)"
        text = f"head sizes are {sizes}, not one size up to {MAX_HEAD_DIM}"
        reasons.append(Reason("head_dim", text))
    if scale is not None and not math.isfinite(scale):
        reasons.append(Reason("scale", f"scale = {scale}"))
    return reasons


def _choose(q: Tensor, k: Tensor, v: Tensor, reasons: list[Reason]) -> Plan:
    """Who serves the call; backend "torch" where it is handed on. q, k, v: heads next to last."""
    if not reasons:
        dout_dtype = wanted(_DOUT_DTYPE, q, k, v)
        chosen = dispatch.plan({"q": q, "k": k, "v": v}, k.shape[-3], dout_dtype=dout_dtype)
        if chosen.backend != "high_precision":
            return chosen
        reasons = chosen.reasons
    return Plan("torch", "torch's own attention kernel", tuple(reasons))


def _announced(chosen: Plan) -> Plan:
    """Says once why a faster path was not taken; raises _HandOn where torch's kernel serves."""
    dispatch.announce(chosen)
    if chosen.backend == "torch":
        raise _HandOn(chosen.reasons)
    return chosen


def _heads_last(*tensors: Tensor) -> list[Tensor]:
    return [x.transpose(-3, -2) if x.dim() >= 3 else x for x in tensors]


def _laid_out(x: Tensor, like: Tensor) -> Tensor:
    """x with the strides of empty_like(like), which is what compiled callers were promised."""
    target = torch.empty_like(like)
    return x if x.stride() == target.stride() else target.copy_(x)


def _whole(grad: Tensor, seqlen: int) -> Tensor:
    """grad (B, Sk', Hkv, D) with zeros for the keys that no query could see."""
    missing = seqlen - grad.shape[1]
    return torch.nn.functional.pad(grad, (0, 0, 0, 0, 0, missing)) if missing else grad


class _Graphs:
    """The marked lse that somebody still holds, so that their backward finds us after deactivation."""

    PRUNE_FROM = 256

    def __init__(self):
        self._lock, self._held, self._prune_at = threading.Lock(), [], 0

    def mark(self, lse: Tensor) -> Tensor:
        """A contiguous copy of lse in a storage by which is_ours knows it."""
        buffer = lse.new_empty(lse.numel() + _MARK)
        with self._lock:
            if len(self._held) >= self._prune_at:
                self._prune()
            self._held.append(StorageWeakRef(buffer.untyped_storage()))
        return buffer[: lse.numel()].view(lse.shape).copy_(lse)

    @staticmethod
    def is_ours(lse: Tensor) -> bool:
        return lse.untyped_storage().nbytes() == (lse.numel() + _MARK) * lse.element_size()

    def alive(self) -> bool:
        with self._lock:
            self._prune()
            return bool(self._held)

    def _prune(self) -> None:
        self._held = [ref for ref in self._held if not ref.expired()]
        self._prune_at = max(self.PRUNE_FROM, 2 * len(self._held))


_graphs = _Graphs()


# --- the operators --------------------------------------------------------------------------------------------


def _sdpa(
    align, q, k, v, dropout_p, is_causal, attn_mask, scale, **options
) -> tuple[Tensor, Tensor]:
    """(out (B, H, Sq, D), lse (B, H, Sq)). align: _top_left or _lower_right."""
    reasons = _reasons(q, k, v, 4, attn_mask, dropout_p, scale, **options)
    chosen = _announced(_choose(*_heads_last(q, k, v), reasons))
    out, lse = align(q, k, v, is_causal, scale).forward(chosen.backend)
    return _laid_out(out.transpose(1, 2), q), lse


def _sdpa_backward(align, dout, q, k, v, out, lse, dropout_p, is_causal, attn_mask, scale):
    """Gradients (B, H, S, D) in memory as (B, S, H, D)."""
    if not _graphs.is_ours(lse):
        reasons = _reasons(q, k, v, 4, attn_mask, dropout_p, scale)
        _check_unmarked(*_heads_last(q, k, v), reasons)
    problem = align(q, k, v, is_causal, scale)
    dq, dk, dv = problem.backward(*_heads_last(dout, out), lse)
    return _heads_last(dq, _whole(dk, k.shape[2]), _whole(dv, v.shape[2]))


def _check_unmarked(q, k, v, reasons: list[Reason]) -> None:
    """For an lse without mark, torch's own or a copy (offloaded tensors): would the forward have been ours?"""
    if _installed is None or _choose(q, k, v, reasons).backend == "torch":
        raise _HandOn(reasons)


def _sdpa_cpu(q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    out, lse = _sdpa(_top_left, q, k, v, dropout_p, is_causal, attn_mask, scale)
    # torch's CPU kernels lay lse and gradients out as (B, S, H, ...), the latter being ours already.
    return out, _graphs.mark(lse.transpose(1, 2)).transpose(1, 2)


def _sdpa_cpu_backward(
    dout, q, k, v, out, lse, dropout_p, is_causal, *, attn_mask=None, scale=None
):
    options = (dropout_p, is_causal, attn_mask, scale)
    return tuple(_sdpa_backward(_top_left, dout, q, k, v, out, lse, *options))


def _sdpa_cuda(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    debug = {"return_debug_mask": return_debug_mask}
    out, lse = _sdpa(_lower_right, q, k, v, dropout_p, is_causal, None, scale, **debug)
    sizes = (None, None, q.shape[2], k.shape[2])
    return out, _graphs.mark(lse), *sizes, *_no_randomness(q)


def _sdpa_cuda_backward(
    dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, seed, offset,
    *, scale=None,
):  # fmt: skip
    options = (dropout_p, is_causal, None, scale)
    grads = _sdpa_backward(_lower_right, dout, q, k, v, out, lse, *options)
    return tuple(_laid_out(grad, x) for grad, x in zip(grads, (q, k, v)))


def _no_randomness(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """rng_state, unused and debug_mask of torch's flash operators; nobody reads them without dropout."""
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    return state, torch.empty((), dtype=torch.uint64, device=q.device), q.new_empty(0)


def _flash(
    q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, return_debug_mask,
    *, scale=None, window_size_left=None, window_size_right=None, num_splits=None, **options,
):  # fmt: skip
    """(out, lse) of _flash_attention_forward. num_splits, a hint for speed, changes nothing here."""
    options["return_debug_mask"] = return_debug_mask
    reasons = _reasons(q, k, v, 4 if cu_q is None else 3, None, dropout_p, scale, **options)
    chosen = _announced(_choose(q, k, v, reasons))
    problem = _bottom_right(
        q, k, v, cu_q, cu_k, max_q, max_k, is_causal, scale, window_size_left, window_size_right
    )
    out, lse = problem.forward(chosen.backend)
    return out, _graphs.mark(lse)


def _flash_forward(q, *args, **options):
    out, lse = _flash(q, *args, **options)
    return _laid_out(out, q), lse, *_no_randomness(q)


def _flash_forward_inplace(target, *args, **options):
    out, lse = _flash(*args, **options)
    target.copy_(out)
    return lse


def _flash_backward(
    dout, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, rng_state, unused,
    *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    if not _graphs.is_ours(lse):
        ndim = 4 if cu_q is None else 3
        _check_unmarked(q, k, v, _reasons(q, k, v, ndim, None, dropout_p, scale))
    problem = _bottom_right(
        q, k, v, cu_q, cu_k, max_q, max_k, is_causal, scale, window_size_left, window_size_right
    )
    grads = problem.backward(dout, out, lse)
    return tuple(_laid_out(grad, x) for grad, x in zip(grads, (q, k, v)))


def _other_kernel(name: str, dropout_at: int) -> Callable:
    """An override of a kernel that torch takes for some calls: says why the call is not MXFP8, computes nothing."""

    def look(q, k, v, *args, **kwargs) -> NoReturn:
        if not torch.backends.cuda.flash_sdp_enabled():
            raise _HandOn()  # the caller excluded the flash kernels
        mask = args[0] if args else None
        dropout_p = args[dropout_at - 3] if len(args) > dropout_at - 3 else 0.0
        reasons = _reasons(q, k, v, 4, mask, dropout_p, kwargs.get("scale"))
        if not reasons:
            why = "by its priorities, or since its flash kernel refuses the shape or strides"
            reasons = [Reason(f"torch_{name}", f"torch chose its {name} kernel, {why}")]
        raise _HandOn(_announced(Plan("torch", name, tuple(reasons))).reasons)

    return look


_FORWARDS = (
    ("_scaled_dot_product_flash_attention_for_cpu", "CPU", _sdpa_cpu),
    ("_scaled_dot_product_flash_attention", "CUDA", _sdpa_cuda),
    ("_flash_attention_forward", "CPU", _flash_forward),
    ("_flash_attention_forward", "CUDA", _flash_forward),
    ("_flash_attention_forward_no_dropout_inplace", "CPU", _flash_forward_inplace),
    ("_flash_attention_forward_no_dropout_inplace", "CUDA", _flash_forward_inplace),
    ("_scaled_dot_product_attention_math", "CompositeImplicitAutograd", _other_kernel("math", 4)),
    ("_scaled_dot_product_efficient_attention", "CUDA", _other_kernel("efficient", 5)),
    ("_scaled_dot_product_cudnn_attention", "CUDA", _other_kernel("cuDNN", 5)),
)
_BACKWARDS = (
    ("_scaled_dot_product_flash_attention_for_cpu_backward", "CPU", _sdpa_cpu_backward),
    ("_scaled_dot_product_flash_attention_backward", "CUDA", _sdpa_cuda_backward),
    ("_flash_attention_backward", "CPU", _flash_backward),
    ("_flash_attention_backward", "CUDA", _flash_backward),
)


# --- installing -----------------------------------------------------------------------------------------------


def _override(library: torch.library.Library, name: str, key: str, serve: Callable) -> None:
    """Registers serve for an operator, with the kernel that is there now for the calls that serve hands on."""
    op = getattr(getattr(torch.ops.aten, name, None), "default", None)
    if op is None or (key == "CUDA" and torch.version.cuda is None):
        return
    try:
        original = torch.library.get_kernel(op, "CPU" if key.startswith("Composite") else key)
    except RuntimeError:
        original = None  # torch has _flash_attention_forward for GPUs only

    def kernel(keyset, *args, **kwargs):
        try:
            return serve(*args, **kwargs)
        except _HandOn as hand_on:
            reasons = hand_on.reasons
        if original is None:
            why = "; ".join(reason.text for reason in reasons) or "the forward was not MXFP8"
            raise NotImplementedError(f"{op}: torch has no {key} kernel, nor has MXFP8: {why}")
        return original.call_boxed(keyset, *args, **kwargs)

    library.impl(op, kernel, key, with_keyset=True)


def _override_all(rows: Sequence[tuple]) -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        for row in rows:
            _override(library, *row)
    return library


class Handle:
    """Keeps the overrides in force until remove(); what torch.nn.attention's registry holds."""

    def __init__(self):
        global _installed, _backwards
        self._library = _override_all(_FORWARDS)
        if _backwards is None:
            _backwards = _override_all(_BACKWARDS)
        self._undo_order = _flash_before_cudnn()
        _installed = self

    def remove(self) -> None:
        """Restores torch's kernels. Graphs that hold MXFP8 results keep their MXFP8 backward until they are freed."""
        global _installed, _backwards
        if _installed is not self:
            return
        _installed = None
        self._library._destroy()
        self._undo_order()
        if not _graphs.alive():
            _backwards._destroy()
            _backwards = None


_installed: Optional[Handle] = None
_backwards: Optional[torch.library.Library] = None


def is_installed() -> bool:
    """Whether the overrides of the forward operators are in force."""
    return _installed is not None


def _flash_before_cudnn() -> Callable[[], None]:
    """Lets torch ask its flash kernel before cuDNN's, which comes first on sm_90 and sm_100. Returns what undoes it.

    torch sets its order in the first CUDA call of the process, over whatever was set before. So the order is changed
    where CUDA is up; else cuDNN's kernel is switched off, which needs no CUDA context.
    """
    if torch.version.cuda is None or not torch.cuda.is_available():
        return lambda: None
    if not (torch.cuda.is_initialized() and hasattr(torch._C, "_set_sdp_priority_order")):
        before = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)
        return lambda: torch.backends.cuda.enable_cudnn_sdp(before)
    x = torch.zeros(1, 1, 8, 8, dtype=torch.float16, device="cuda")
    torch._fused_sdp_choice(x, x, x)
    before = torch._C._get_sdp_priority_order()
    flash = int(torch.nn.attention.SDPBackend.FLASH_ATTENTION)
    ours = [flash, *(kernel for kernel in before if kernel != flash)]
    torch._C._set_sdp_priority_order(ours)

    def undo():
        if torch._C._get_sdp_priority_order() == ours:
            torch._C._set_sdp_priority_order(before)

    return undo
