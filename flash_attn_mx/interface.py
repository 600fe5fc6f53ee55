"""The public attention functions: checks, quantisation, dispatch and autograd."""

from typing import Callable, Optional, Union

import torch
from torch import Tensor

from . import dispatch, ops
from ._errors import (
    INPUT_DTYPES,
    check_cu_seqlens,
    check_cu_values,
    check_foreign_options,
    check_head_shapes,
    check_qkv,
    check_softmax_scale,
    check_window,
    fail,
)
from .mx_tensor import MXTensor
from .policy import Layer
from .quantize import EMAX, ROUNDINGS, dequantize, quantize_mxfp8

_OPS = torch.ops.flash_attn_mx
_E4M3 = torch.float8_e4m3fn


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
    return_lse: bool = False,
    *,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    rounding: str = "rceil",
    dout_dtype: torch.dtype = _E4M3,
    backend: Optional[str] = None,
    layer: Optional[Layer] = None,
    **options: object,
) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """softmax(softmax_scale * q kᵀ) v with all matrix products in MXFP8; differentiable once.

    Args:
      q: (B, Sq, H, D) bf16, fp16 or fp32, any strides; D 1 to 256.
      k, v: (B, Sk, Hkv, D), dtype and device of q; H a multiple of Hkv (grouped heads: query head h uses h // (H/Hkv)).
      softmax_scale: factor on q kᵀ; None means D ** -0.5.
      causal: query i sees key j only if j <= i + Sk - Sq (bottom-right alignment; torch's SDPA aligns top-left).
      window_size: (left, right): query i sees keys from i + Sk - Sq - left to i + Sk - Sq + right; -1 means unlimited.
      deterministic: gradients equal bit for bit from run to run; also on under torch.use_deterministic_algorithms.
      return_lse: also return the log-sum-exp of the scaled scores.
      attn_mask, dropout_p: as torch's scaled_dot_product_attention (mask broadcastable to (B, H, Sq, Sk)); served in high
        precision, with a FallbackWarning.
      rounding: of the scale bytes of q, k, v and dout, "rceil" or "floor" (quantize_mxfp8).
      dout_dtype: FP8 type of the incoming gradient, torch.float8_e4m3fn or torch.float8_e5m2 (no sm_100 kernel takes the latter).
      backend: "auto", "sm100", "portable" or "emulator" for this call; None takes set_backend's choice.
      layer: index or dotted name of the model's layer that calls, for the policy's rules (load_policy).
      options: flash-attention's other arguments (softcap, alibi_slopes, block_table, ...), by name and at their defaults;
        another value raises NotImplementedError. num_splits, pack_gqa and sm_margin, hints for speed, have no effect.
        The fourth positional argument is softmax_scale, as in flash-attention 3 and 4; in version 2 it is dropout_p.
    Returns: out (B, Sq, H, D) in the dtype of q (under autocast: the autocast dtype); with return_lse also lse (B, H, Sq) fp32,
      natural log, not differentiable. A query that sees no key gives out 0, lse -inf and zero gradients.
      An output row depends only on keys that its query sees, bit for bit.
    Raises: TypeError (dtypes), ValueError (shapes, devices, values), NotImplementedError (backend that cannot serve the call).
    Source: docs/numerics.md; argument names as flash-attention.
    """
    check_foreign_options("flash_attn_func", options)
    q, k, v = _autocast(q, k, v)
    check_qkv(q, k, v, packed=False)
    window = fold_causal(causal, window_size, q.shape[1], k.shape[1])
    scale = check_softmax_scale(softmax_scale, q.shape[-1])
    _check_options(deterministic, return_lse, rounding, dout_dtype, dropout_p, attn_mask)
    layer = ops.layer_of_call(layer)
    chosen = dispatch.plan(
        {"q": q, "k": k, "v": v}, k.shape[1], attn_mask is not None, dropout_p, backend,
        layer=layer, dout_dtype=wanted(dout_dtype, q, k, v),
    )  # fmt: skip
    dispatch.announce(chosen)

    def exact(q, k, v):
        return _high_precision(q, k, v, scale, window, attn_mask, dropout_p)

    def quantised(q, k, v):
        return _attention(
            q, k, v, None, None, q.shape[1], k.shape[1],
            scale, window, deterministic, rounding, dout_dtype, chosen.backend,
        )  # fmt: skip

    return _run(chosen, exact, quantised, q, k, v, return_lse)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
    return_lse: bool = False,
    *,
    rounding: str = "rceil",
    dout_dtype: torch.dtype = _E4M3,
    backend: Optional[str] = None,
    layer: Optional[Layer] = None,
    **options: object,
) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """flash_attn_func on sequences packed along the token axis, without padding between them.

    Args:
      q: (Tq, H, D); k, v: (Tk, Hkv, D); dtypes as flash_attn_func.
      cu_seqlens_q, cu_seqlens_k: (sequences + 1,) int32 on the device of q: where each sequence starts, first 0; tokens at or
        past the last offset belong to no sequence, are never read, and get out 0, lse -inf and zero gradients.
      max_seqlen_q, max_seqlen_k: ints, at least the longest sequence.
      The others as in flash_attn_func; masks are aligned bottom-right in each sequence.
    Returns: out (Tq, H, D); with return_lse also lse (H, Tq).
    Raises: as flash_attn_func. Offsets are looked at on the CPU and on the portable path; kernels on a GPU trust them.
    """
    check_foreign_options("flash_attn_varlen_func", options)
    q, k, v = _autocast(q, k, v)
    check_qkv(q, k, v, packed=True)
    check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q, "max_seqlen_q", max_seqlen_q)
    check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, q, "max_seqlen_k", max_seqlen_k)
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        expected = f"{cu_seqlens_q.shape[0]} offsets, as cu_seqlens_q"
        fail(ValueError, "cu_seqlens_k", expected, f"{cu_seqlens_k.shape[0]} offsets")
    if (
        type(cu_seqlens_q) is Tensor
        and q.device.type == "cpu"
        and not torch.compiler.is_compiling()
    ):
        check_cu_values(
            "cu_seqlens_q", cu_seqlens_q.tolist(), q.shape[0], "max_seqlen_q", max_seqlen_q
        )
        check_cu_values(
            "cu_seqlens_k", cu_seqlens_k.tolist(), k.shape[0], "max_seqlen_k", max_seqlen_k
        )
    window = fold_causal(causal, window_size, max_seqlen_q, max_seqlen_k)
    scale = check_softmax_scale(softmax_scale, q.shape[-1])
    _check_options(deterministic, return_lse, rounding, dout_dtype)
    layer = ops.layer_of_call(layer)
    chosen = dispatch.plan(
        {"q": q, "k": k, "v": v}, max_seqlen_k,
        backend=backend, layer=layer, dout_dtype=wanted(dout_dtype, q, k, v),
    )  # fmt: skip
    dispatch.announce(chosen)

    def exact(q, k, v):
        return _high_precision_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, window)

    def quantised(q, k, v):
        return _attention(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            scale, window, deterministic, rounding, dout_dtype, chosen.backend,
        )  # fmt: skip

    return _run(chosen, exact, quantised, q, k, v, return_lse)


def flash_attn_mx_func(
    q: MXTensor,
    k: MXTensor,
    v: MXTensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    return_lse: bool = False,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: Optional[str] = None,
) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """Forward attention on operands that are quantised already; not differentiable.

    Args:
      q: MXTensor (B, Sq, H, D), axis "rowwise", layout plain or swizzled128x4.   k: likewise (B, Sk, Hkv, D).
      v: MXTensor (B, Sk, Hkv, D), any axis; another axis than the product needs is dequantised and quantised anew.
        With causal or window_size it must be "rowwise" or "tokenwise": "colwise" scales mix 32 tokens, and so hidden ones.
      The others as in flash_attn_func.   out_dtype: bf16, fp16 or fp32.
    Returns: out (B, Sq, H, D) in out_dtype; with return_lse also lse (B, H, Sq).
    Raises: TypeError, ValueError, NotImplementedError as flash_attn_func.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, MXTensor):
            fail(TypeError, name, "an MXTensor (see quantize_mxfp8)", type(x).__name__)
        if len(x.shape) != 4:
            fail(ValueError, name, "shape (batch, seqlen, heads, head_dim)", tuple(x.shape))
        if x.data.requires_grad:
            fail(ValueError, name, "data that needs no gradient", "requires_grad=True")
        if name != "v" and x.axis != "rowwise":
            fail(ValueError, name, "axis 'rowwise'", repr(x.axis))
        if x.data.device != q.data.device:
            fail(ValueError, name, f"the device of q, {q.data.device}", x.data.device)
    check_head_shapes(q.shape, k.shape, v.shape, packed=False)
    window = fold_causal(causal, window_size, q.shape[1], k.shape[1])
    masked = window != (-1, -1)
    if masked and v.axis == "colwise":
        expected = "axis 'rowwise' or 'tokenwise' with causal or window_size, since colwise scales mix tokens"
        fail(ValueError, "v", expected, "'colwise'")
    if out_dtype not in INPUT_DTYPES:
        fail(TypeError, "out_dtype", "bfloat16, float16 or float32", out_dtype)
    scale = check_softmax_scale(softmax_scale, q.shape[-1])
    tensors = {"q": q.data, "k": k.data, "v": v.data}
    chosen = dispatch.plan(tensors, k.shape[1], backend=backend, out_dtype=out_dtype)
    dispatch.announce(chosen)
    for x in (q, k, v):
        x.check_unchanged()
    v_col = _requantised(v, "colwise")
    v_tok = _requantised(v, "tokenwise") if masked else None
    out, lse = _OPS.fwd(
        q.data, q.scale, k.data, k.scale, v_col.data, v_col.scale,
        v_tok.data if masked else None, v_tok.scale if masked else None,
        None, None, q.shape[1], k.shape[1], scale, *window, out_dtype, chosen.backend,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    max_seqlen_k: Optional[int] = None,
    backend: Optional[str] = None,
    layer: Optional[Layer] = None,
    dout_dtype: torch.dtype = _E4M3,
) -> dispatch.Plan:
    """Tells which backend and kernel flash_attn_func (4-D) or flash_attn_varlen_func (3-D) would use, and why not a faster one.

    Nothing is computed and no warning is given. Where q, k or v requires gradients, their kernel is told too.
    Args: as the attention functions.   Returns: dispatch.Plan; print it.
    Raises: what the call itself would raise.
    """
    q, k, v = _autocast(q, k, v)
    check_qkv(q, k, v, packed=q.dim() == 3)
    check_window(window_size)
    keys = k.shape[-3] if max_seqlen_k is None else max_seqlen_k
    tensors = {"q": q, "k": k, "v": v}
    return dispatch.plan(
        tensors, keys, attn_mask is not None, dropout_p, backend,
        layer=layer, dout_dtype=wanted(dout_dtype, q, k, v),
    )  # fmt: skip


def _run(
    chosen: dispatch.Plan, exact: Callable, quantised: Callable, q, k, v, return_lse: bool
) -> Union[Tensor, tuple[Tensor, Tensor]]:
    """The call as planned: `exact` for all heads, `quantised` for all heads, or each for its own."""
    if chosen.backend == "high_precision":
        _refuse_lse(return_lse)
        return exact(q, k, v)
    kept = chosen.high_precision_heads
    if not kept:
        out, lse = quantised(q, k, v)
        return (out, lse) if return_lse else out
    _refuse_lse(return_lse)
    group = q.shape[-2] // k.shape[-2]
    others = [head for head in range(q.shape[-2]) if head not in kept]

    def take(x: Tensor, heads: list[int]) -> Tensor:
        return x.index_select(-2, torch.tensor(heads, device=x.device))

    # Any set of query heads: each takes its key head along, so the parts are not grouped any more.
    parts = [
        function(*(take(x, of) for x, of in ((q, heads), (k, keys), (v, keys))))
        for function, heads, keys in (
            (exact, list(kept), [h // group for h in kept]),
            (lambda *x: quantised(*x)[0], others, [h // group for h in others]),
        )
    ]
    order = sorted(range(q.shape[-2]), key=[*kept, *others].__getitem__)
    return take(torch.cat(parts, dim=-2), order)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts to the autocast dtype where autocast is on."""
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if isinstance(x, Tensor) and x.dtype in INPUT_DTYPES else x for x in tensors
    )


def fold_causal(
    causal: bool, window_size: tuple[int, int], seqlen_q: int, seqlen_k: int
) -> tuple[int, int]:
    """(left, right) with causal folded in, and -1 for a side that no row of that many queries and keys is cut by."""
    left, right = check_window(window_size)
    if left >= 0 and left >= seqlen_k - 1:
        left = -1
    if causal:
        return left, 0
    return left, -1 if right >= 0 and right >= seqlen_q - 1 else right


def _check_options(
    deterministic, return_lse, rounding, dout_dtype, dropout_p=0.0, attn_mask=None
) -> None:
    if rounding not in ROUNDINGS:
        fail(ValueError, "rounding", f"one of {ROUNDINGS}", repr(rounding))
    if dout_dtype not in EMAX:
        fail(TypeError, "dout_dtype", "torch.float8_e4m3fn or torch.float8_e5m2", dout_dtype)
    for name, value in (("deterministic", deterministic), ("return_lse", return_lse)):
        if not isinstance(value, bool):
            fail(TypeError, name, "a bool", type(value).__name__)
    number = isinstance(dropout_p, (int, float)) and not isinstance(dropout_p, bool)
    if not (number and 0.0 <= dropout_p < 1.0):
        fail(ValueError, "dropout_p", "a probability in [0, 1)", repr(dropout_p))
    if not (attn_mask is None or isinstance(attn_mask, Tensor)):
        fail(TypeError, "attn_mask", "a tensor or None", type(attn_mask).__name__)


def _requantised(x: MXTensor, axis: str) -> MXTensor:
    return x if x.axis == axis else quantize_mxfp8(dequantize(x), axis=axis)


# --- autograd -------------------------------------------------------------------------------------------------


def _attention(
    q, k, v, cu_q, cu_k, max_q, max_k, scale, window, deterministic, rounding, dout_dtype, executor
):
    """(out, lse) through the MXFP8 operators, with a graph where one is wanted."""
    if not (type(q) is type(k) is type(v) is Tensor):
        ops.prepare_dtensors(q, k, v)
    if wanted(dout_dtype, q, k, v) is None:
        operands = quantise_forward(q, k, v, cu_q, cu_k, window, rounding, executor)
        return _OPS.fwd(*operands, cu_q, cu_k, max_q, max_k, scale, *window, q.dtype, executor)
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    # Dynamo refuses one tensor in two places of an autograd.Function.
    k, v = _distinct(k, q), _distinct(v, q, k)
    cu_k = _distinct(cu_k, cu_q) if cu_k is not None else None
    result = _Attention.apply(
        q, k, v, cu_q, cu_k, max_q, max_k, scale, *window, deterministic, rounding, dout_dtype, executor
    )  # fmt: skip
    return result[0], result[1]


def wanted(dout_dtype: torch.dtype, *tensors: Tensor) -> Optional[torch.dtype]:
    """dout_dtype where a gradient of the tensors is wanted, else None."""
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return dout_dtype if recorded else None


def _distinct(x: Tensor, *others: Tensor) -> Tensor:
    return x.view_as(x) if any(x is other for other in others) else x


def quantise(x, axes, cu_seqlens, rounding, dtype, executor):
    """{axis: (data, scale)} of one tensor; scales in the order that the executor reads."""
    if type(x) is Tensor:
        kernels = executor in ("sm100", "emulator")
        flat = _OPS.quantize_axes(x, axes, rounding, dtype, cu_seqlens, kernels)
    else:  # a DTensor
        flat = ops.quantize_one_by_one(x, axes, rounding, dtype, cu_seqlens)
    return {axis: (flat[2 * i], flat[2 * i + 1]) for i, axis in enumerate(axes)}


def _quantise_qkv(q, k, v, cu_q, cu_k, qk_axes, v_axes, rounding, executor):
    return (
        quantise(q, qk_axes, cu_q, rounding, _E4M3, executor),
        quantise(k, qk_axes, cu_k, rounding, _E4M3, executor),
        quantise(v, v_axes, cu_k, rounding, _E4M3, executor),
    )


def _operands_of_fwd(q, k, v):
    return (*q["rowwise"], *k["rowwise"], *v["colwise"], *v.get("tokenwise", (None, None)))


def _operands_of_bwd(q, k, v):
    return (*q["rowwise"], *q["colwise"], *k["rowwise"], *k["colwise"], *v["tokenwise"])


def quantise_forward(q, k, v, cu_q, cu_k, window, rounding, executor):
    """The operands of `fwd`: q, k rowwise, v colwise, and v tokenwise where a mask cuts tiles."""
    v_axes = ["colwise"] if window == (-1, -1) else ["colwise", "tokenwise"]
    return _operands_of_fwd(
        *_quantise_qkv(q, k, v, cu_q, cu_k, ["rowwise"], v_axes, rounding, executor)
    )


def quantise_backward(q, k, v, cu_q, cu_k, rounding, executor):
    """The operands of `bwd` that come from q, k and v."""
    axes = ["rowwise", "colwise"]
    return _operands_of_bwd(
        *_quantise_qkv(q, k, v, cu_q, cu_k, axes, ["tokenwise"], rounding, executor)
    )


def quantise_both(q, k, v, cu_q, cu_k, window, rounding, executor):
    """The operands of `fwd` and those of `bwd`, from one read of each tensor."""
    axes = ["rowwise", "colwise"]
    parts = _quantise_qkv(q, k, v, cu_q, cu_k, axes, ["colwise", "tokenwise"], rounding, executor)
    forward = _operands_of_fwd(*parts)
    return forward if window != (-1, -1) else (*forward[:6], None, None), _operands_of_bwd(*parts)


def gradients(
    dout, out, lse, operands, cu_q, cu_k, max_q, max_k, scale, left, right,
    deterministic, rounding, dout_dtype, needs, executor,
):  # fmt: skip
    """(dq, dk, dv) through `bwd`; operands: quantise_backward's; needs: which of the three."""
    do = quantise(dout, ["rowwise", "colwise"], cu_q, rounding, dout_dtype, executor)
    return _OPS.bwd(
        dout, out, lse, *do["rowwise"], *do["colwise"],
        *operands, cu_q, cu_k, max_q, max_k, scale, left, right, deterministic, needs, executor,
    )  # fmt: skip


class _Attention(torch.autograd.Function):
    """Saves the quantised operands, out and lse; the incoming gradient is quantised in backward."""

    @staticmethod
    def forward(
        q,
        k,
        v,
        cu_q,
        cu_k,
        max_q,
        max_k,
        scale,
        left,
        right,
        deterministic,
        rounding,
        dout_dtype,
        executor,
    ):
        operands, saved = quantise_both(q, k, v, cu_q, cu_k, (left, right), rounding, executor)
        out, lse = _OPS.fwd(
            *operands, cu_q, cu_k, max_q, max_k, scale, left, right, q.dtype, executor
        )
        return (out, lse, *saved)

    @staticmethod
    def setup_context(ctx, inputs, output):
        cu_q, cu_k = inputs[3:5]
        ctx.arguments = inputs[5:]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output, cu_q, cu_k)

    @staticmethod
    def backward(ctx, dout, *unused):
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                "flash_attn_mx: second derivatives are not implemented (backward ran with create_graph=True)"
            )
        *shape_and_mask, deterministic, rounding, dout_dtype, executor = ctx.arguments
        nothing = (None,) * 14
        if dout is None:
            return nothing
        out, lse, *operands, cu_q, cu_k = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:3])
        grads = gradients(
            dout, out, lse, operands, cu_q, cu_k, *shape_and_mask,
            deterministic, rounding, dout_dtype, needs, executor,
        )  # fmt: skip
        return tuple(g if needed else None for g, needed in zip(grads, needs)) + nothing[3:]


# --- high precision -------------------------------------------------------------------------------------------


def _refuse_lse(return_lse):
    if return_lse:
        raise NotImplementedError(
            "return_lse is not available on the high-precision path; pass backend='portable'"
        )


def _high_precision(q, k, v, scale, window, attn_mask, dropout_p):
    """torch SDPA on the unquantised inputs, with this library's masks."""
    batch, seqlen_q, nheads, _ = q.shape
    seqlen_k = k.shape[1]
    mask = attn_mask
    if window != (-1, -1):
        row = torch.arange(seqlen_q, device=q.device).unsqueeze(1) + seqlen_k - seqlen_q
        key = torch.arange(seqlen_k, device=q.device)
        seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
        seen = seen & (key >= row - window[0]) if window[0] >= 0 else seen
        seen = seen & (key <= row + window[1]) if window[1] >= 0 else seen
        if mask is None:
            mask = seen
        else:
            mask = (
                mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))
            )
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        attn_mask=mask, dropout_p=dropout_p, scale=scale, enable_gqa=nheads != k.shape[2],
    )  # fmt: skip
    return out.transpose(1, 2).contiguous()


def _high_precision_packed(q, k, v, cu_q, cu_k, scale, window):
    """_high_precision for each packed sequence; reads the offsets on the host."""
    offsets_q, offsets_k = cu_q.tolist(), cu_k.tolist()
    pieces = []
    for sequence in range(len(offsets_q) - 1):
        tokens_q = slice(*offsets_q[sequence : sequence + 2])
        tokens_k = slice(*offsets_k[sequence : sequence + 2])
        operands = (q[tokens_q].unsqueeze(0), k[tokens_k].unsqueeze(0), v[tokens_k].unsqueeze(0))
        if tokens_k.start == tokens_k.stop:
            pieces.append(torch.zeros_like(q[tokens_q]))
        elif tokens_q.start < tokens_q.stop:
            pieces.append(_high_precision(*operands, scale, window, None, 0.0).squeeze(0))
    return torch.cat([*pieces, torch.zeros_like(q[offsets_q[-1] :])])
