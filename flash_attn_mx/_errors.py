"""Checks of user input: every message names the argument, what was expected and what came."""

from typing import NoReturn, Optional, Sequence

import torch
from torch import Tensor

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256


def fail(error: type, argument: str, expected: str, got: object) -> NoReturn:
    """Raises; callers test first, so that torch.compile never has to format a symbolic size."""
    raise error(f"{argument}: expected {expected}, got {got}")


def _is_int(x: object) -> bool:
    return isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool)


def check_tensor(name: str, x: object, ndim: int, layout: str) -> None:
    if not isinstance(x, Tensor):
        fail(TypeError, name, f"a tensor {layout}", type(x).__name__)
    if x.dim() != ndim:
        fail(ValueError, name, f"{ndim} dimensions {layout}", f"shape {tuple(x.shape)}")


def check_qkv(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    """Shapes, dtypes and devices of q (.., Sq, H, D) and k, v (.., Sk, Hkv, D)."""
    layout = "(total_tokens, heads, head_dim)" if packed else "(batch, seqlen, heads, head_dim)"
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, 3 if packed else 4, layout)
    if q.dtype not in INPUT_DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        expected = (
            "one dtype out of bfloat16, float16, float32 (fp8 operands go to flash_attn_mx_func)"
        )
        fail(
            TypeError,
            "q, k, v",
            expected,
            "/".join(str(x.dtype).removeprefix("torch.") for x in (q, k, v)),
        )
    if k.device != q.device or v.device != q.device:
        fail(ValueError, "q, k, v", "one device", ", ".join(str(x.device) for x in (q, k, v)))
    check_head_shapes(q.shape, k.shape, v.shape, packed)


def check_head_shapes(q: Sequence[int], k: Sequence[int], v: Sequence[int], packed: bool) -> None:
    if not packed and k[0] != q[0]:
        fail(ValueError, "k", f"the batch size of q, {q[0]}", k[0])
    if tuple(k[:-2]) != tuple(v[:-2]):
        fail(ValueError, "v", f"the batch and length of k, {tuple(k[:-2])}", tuple(v[:-2]))
    if k[-2] != v[-2]:
        fail(ValueError, "v", f"as many heads as k, {k[-2]}", v[-2])
    if q[-2] != k[-2] and (k[-2] == 0 or q[-2] % k[-2] != 0):
        fail(ValueError, "q", f"heads divisible by those of k and v, {k[-2]}", q[-2])
    for name, x in (("k", k), ("v", v)):
        if x[-1] != q[-1]:
            fail(ValueError, name, f"the head_dim of q, {q[-1]}", x[-1])
    if not 1 <= q[-1] <= MAX_HEAD_DIM:
        expected = (
            f"1 to {MAX_HEAD_DIM} (larger heads: torch.nn.functional.scaled_dot_product_attention)"
        )
        fail(ValueError, "head_dim", expected, q[-1])


def check_window(window_size: object) -> tuple[int, int]:
    if not (
        isinstance(window_size, (tuple, list))
        and len(window_size) == 2
        and all(map(_is_int, window_size))
    ):
        fail(TypeError, "window_size", "(left, right), two ints", repr(window_size))
    left, right = window_size
    if left < -1 or right < -1:
        fail(ValueError, "window_size", "sizes >= 0, or -1 for unlimited", tuple(window_size))
    return left, right


def check_cu_seqlens(name: str, cu: object, q: Tensor, max_name: str, max_seqlen: object) -> None:
    """Checks what needs no look at the data; see check_cu_values for the rest."""
    if not isinstance(cu, Tensor):
        fail(TypeError, name, "an int32 tensor", type(cu).__name__)
    if cu.dtype != torch.int32:
        fail(TypeError, name, "dtype torch.int32", cu.dtype)
    if cu.dim() != 1 or cu.shape[0] < 1:
        fail(ValueError, name, "shape (sequences + 1,)", tuple(cu.shape))
    if cu.device != q.device:
        fail(ValueError, name, f"device {q.device}, as q", cu.device)
    if not _is_int(max_seqlen):
        fail(TypeError, max_name, "an int", type(max_seqlen).__name__)
    if max_seqlen < 0:
        fail(ValueError, max_name, ">= 0", max_seqlen)


def check_cu_values(
    name: str, cu: Sequence[int], total: int, max_name: str, max_seqlen: int
) -> None:
    """Checks the offsets themselves (host values)."""
    if cu[0] != 0:
        fail(ValueError, name, "0 as the first offset", cu[0])
    lengths = [b - a for a, b in zip(cu, cu[1:])]
    if any(n < 0 for n in lengths):
        fail(ValueError, name, "offsets that do not decrease", list(cu))
    if cu[-1] > total:
        fail(ValueError, name, f"a last offset of at most {total}, the number of tokens", cu[-1])
    longest = max(lengths, default=0)
    if longest > max_seqlen:
        fail(ValueError, max_name, f"at least {longest}, the longest sequence", max_seqlen)


def check_softmax_scale(softmax_scale: Optional[float], head_dim: int) -> float:
    if softmax_scale is None:
        return head_dim**-0.5
    if not isinstance(softmax_scale, (int, float, torch.SymFloat)) or isinstance(
        softmax_scale, bool
    ):
        fail(TypeError, "softmax_scale", "a float or None", type(softmax_scale).__name__)
    if softmax_scale != softmax_scale or abs(softmax_scale) == float("inf"):
        fail(ValueError, "softmax_scale", "a finite number", softmax_scale)
    if softmax_scale == 0:
        # Such a call is a caller of flash-attention 2 who gives dropout_p by position; equal weights are not what he wants.
        expected = "a number other than 0 (flash-attention 2 has dropout_p in its place: give that by name)"
        fail(ValueError, "softmax_scale", expected, softmax_scale)
    return float(softmax_scale)


# Arguments of flash-attention's functions (2.x and later) that this library does not have, with the values that ask for
# nothing. They are taken so that its callers need no change, and refused by name where they ask for something.
_NEUTRAL = {
    "dropout_p": (0.0,),
    "softcap": (0.0, None),
    "alibi_slopes": (None,),
    "return_attn_probs": (False,),
    "block_table": (None,),
    "page_table": (None,),
    "seqused_q": (None,),
    "seqused_k": (None,),
    "leftpad_k": (None,),
    "attention_chunk": (0,),
    "learnable_sink": (None,),
    "score_mod": (None,),
    "mask_mod": (None,),
    "aux_tensors": (None,),
    "qv": (None,),
    "q_descale": (None,),
    "k_descale": (None,),
    "v_descale": (None,),
}
# These change how fast something is computed, not what.
_HINTS = ("num_splits", "pack_gqa", "sm_margin")
_INSTEAD = {
    "dropout_p": "flash_attn_func serves dropout in high precision",
    "return_attn_probs": "return_lse=True gives out and lse",
    "q_descale": "flash_attn_mx_func takes operands that are quantised already",
    "k_descale": "flash_attn_mx_func takes operands that are quantised already",
    "v_descale": "flash_attn_mx_func takes operands that are quantised already",
}


def check_foreign_options(function: str, options: dict[str, object]) -> None:
    """Refuses options of flash-attention that ask for something which is not served here, and unknown ones."""
    for name, value in options.items():
        if name in _HINTS:
            continue
        if name not in _NEUTRAL:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        neutral = _NEUTRAL[name]
        if isinstance(value, Tensor) or not any(value is x or value == x for x in neutral):
            shown = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
            instead = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise NotImplementedError(
                f"{name}: expected {neutral[0]!r}, got {shown}: {function} does not have this option{instead}"
            )
