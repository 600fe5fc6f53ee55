"""torch.ops.aten.flash_attn_mxfp8_forward: the published calling form, on operands that are quantised already."""

from typing import Optional

import torch
from torch import Tensor

from .._errors import check_head_shapes, check_softmax_scale, check_tensor, fail
from ..interface import flash_attn_mx_func
from ..layouts import scale_shape
from ..mx_tensor import EMAX, MXTensor

NAME = "flash_attn_mxfp8_forward"
_SCHEMA = (
    f"{NAME}(Tensor q, Tensor k, Tensor v, Tensor scale_q, Tensor scale_k, Tensor scale_v, "
    "float? softmax_scale=None, bool causal=False) -> Tensor"
)
_library: Optional[torch.library.Library] = None


def register_aten_alias() -> None:
    """Makes torch.ops.aten.flash_attn_mxfp8_forward callable; calling it again changes nothing.

        out = torch.ops.aten.flash_attn_mxfp8_forward(
            q, k, v, scale_q, scale_k, scale_v, softmax_scale=None, causal=False)

    The operator:
      q: (B, Sq, H, D) float8_e4m3fn or float8_e5m2; k, v: (B, Sk, Hkv, D); D 1 to 256, H a multiple of Hkv.
      scale_q, scale_k, scale_v: (B, S, H, ceil(D/32)) float8_e8m0fnu, one per 32 values along D, V's too: V is
        dequantised and quantised again along the keys, as its product needs it, which rounds it a second time.
      softmax_scale: None means D ** -0.5.   causal: aligned bottom-right.
      Returns: out (B, Sq, H, D) bf16. Not differentiable. Works under torch.compile.
      Raises: TypeError (dtypes), ValueError (shapes, devices, requires_grad), NotImplementedError (a backend asked for
        by set_backend that cannot serve), each naming the argument, what was expected and what came.
    Raises: RuntimeError if torch has an operator of that name already.
    """
    global _library
    if _library is not None:
        return
    if hasattr(torch.ops.aten, NAME):
        raise RuntimeError(f"torch.ops.aten.{NAME} exists already, defined by somebody else")
    library = torch.library.Library("aten", "FRAGMENT")
    library.define(_SCHEMA)
    library.impl(NAME, _forward, "CompositeExplicitAutograd")
    library.impl(NAME, _meta, "Meta")
    library.impl(NAME, torch.library.fallthrough_kernel, "Autograd")
    _library = library


def _check(q, k, v, scale_q, scale_k, scale_v, softmax_scale) -> None:
    for name, x, scale in (("q", q, scale_q), ("k", k, scale_k), ("v", v, scale_v)):
        check_tensor(name, x, 4, "(batch, seqlen, heads, head_dim)")
        if x.dtype not in EMAX:
            fail(TypeError, name, "float8_e4m3fn or float8_e5m2", x.dtype)
        if x.requires_grad and torch.is_grad_enabled():
            fail(ValueError, name, "data that needs no gradient", "requires_grad=True")
        if scale.dtype != torch.float8_e8m0fnu:
            fail(TypeError, f"scale_{name}", "float8_e8m0fnu", scale.dtype)
        shape = scale_shape(tuple(x.shape), "rowwise")
        if tuple(scale.shape) != tuple(shape):
            fail(ValueError, f"scale_{name}", f"shape {tuple(shape)}", tuple(scale.shape))
        for label, tensor in ((name, x), (f"scale_{name}", scale)):
            if tensor.device != q.device:
                fail(ValueError, label, f"the device of q, {q.device}", tensor.device)
    check_head_shapes(q.shape, k.shape, v.shape, packed=False)
    check_softmax_scale(softmax_scale, q.shape[-1])


def _forward(q, k, v, scale_q, scale_k, scale_v, softmax_scale=None, causal=False) -> Tensor:
    _check(q, k, v, scale_q, scale_k, scale_v, softmax_scale)
    operands = [
        MXTensor(x.detach(), scale, "rowwise")
        for x, scale in ((q, scale_q), (k, scale_k), (v, scale_v))
    ]
    return flash_attn_mx_func(*operands, softmax_scale, causal)


def _meta(q, k, v, scale_q, scale_k, scale_v, softmax_scale=None, causal=False) -> Tensor:
    _check(q, k, v, scale_q, scale_k, scale_v, softmax_scale)
    return q.new_empty(q.shape, dtype=torch.bfloat16)
