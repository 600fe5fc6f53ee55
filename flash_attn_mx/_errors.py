"""Checks of user input: every message names the argument, what was expected and what came."""

from typing import Optional, Sequence

import torch
from torch import Tensor

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_HEAD_DIM = 256


def expect(condition: bool, error: type, argument: str, expected: str, got: object) -> None:
    if not condition:
        raise error(f"{argument}: expected {expected}, got {got}")


def check_tensor(name: str, x: object, ndim: int, layout: str) -> None:
    expect(isinstance(x, Tensor), TypeError, name, f"a tensor {layout}", type(x).__name__)
    expect(x.dim() == ndim, ValueError, name, f"{ndim} dimensions {layout}", f"shape {tuple(x.shape)}")


def check_qkv(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> None:
    """Shapes, dtypes and devices of q (.., Sq, H, D) and k, v (.., Sk, Hkv, D)."""
    layout = "(total_tokens, heads, head_dim)" if packed else "(batch, seqlen, heads, head_dim)"
    ndim = 3 if packed else 4
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, ndim, layout)
    dtypes = "/".join(str(x.dtype).removeprefix("torch.") for x in (q, k, v))
    expect(
        q.dtype in INPUT_DTYPES and q.dtype == k.dtype == v.dtype,
        TypeError,
        "q, k, v",
        "one dtype out of bfloat16, float16, float32 (fp8 operands go to flash_attn_mx_func)",
        dtypes,
    )
    devices = [str(x.device) for x in (q, k, v)]
    expect(len(set(devices)) == 1, ValueError, "q, k, v", "one device", ", ".join(devices))
    check_head_shapes(q.shape, k.shape, v.shape, packed)


def check_head_shapes(q: Sequence[int], k: Sequence[int], v: Sequence[int], packed: bool) -> None:
    if not packed:
        expect(k[0] == q[0], ValueError, "k", f"the batch size of q, {q[0]}", k[0])
    expect(tuple(k[:-2]) == tuple(v[:-2]), ValueError, "v", f"the batch and length of k, {tuple(k[:-2])}", tuple(v[:-2]))
    expect(k[-2] == v[-2], ValueError, "v", f"as many heads as k, {k[-2]}", v[-2])
    expect(
        (k[-2] > 0 and q[-2] % k[-2] == 0) or q[-2] == k[-2],
        ValueError,
        "q",
        f"heads divisible by those of k and v, {k[-2]}",
        q[-2],
    )
    for name, x in (("k", k), ("v", v)):
        expect(x[-1] == q[-1], ValueError, name, f"the head_dim of q, {q[-1]}", x[-1])
    expect(
        1 <= q[-1] <= MAX_HEAD_DIM,
        ValueError,
        "head_dim",
        f"1 to {MAX_HEAD_DIM} (larger heads: torch.nn.functional.scaled_dot_product_attention)",
        q[-1],
    )


def check_window(window_size: object) -> tuple[int, int]:
    good = (
        isinstance(window_size, (tuple, list))
        and len(window_size) == 2
        and all(isinstance(w, (int, torch.SymInt)) and not isinstance(w, bool) for w in window_size)
    )
    expect(good, TypeError, "window_size", "(left, right), two ints", repr(window_size))
    left, right = window_size
    expect(left >= -1 and right >= -1, ValueError, "window_size", "sizes >= 0, or -1 for unlimited", tuple(window_size))
    return left, right


def check_cu_seqlens(name: str, cu: object, q: Tensor, total: int, max_name: str, max_seqlen: object) -> None:
    """Checks what needs no look at the data; see check_cu_values for the rest."""
    expect(isinstance(cu, Tensor), TypeError, name, "an int32 tensor", type(cu).__name__)
    expect(cu.dtype == torch.int32, TypeError, name, "dtype torch.int32", cu.dtype)
    expect(cu.dim() == 1 and cu.shape[0] >= 1, ValueError, name, "shape (sequences + 1,)", tuple(cu.shape))
    expect(cu.device == q.device, ValueError, name, f"device {q.device}, as q", cu.device)
    good = isinstance(max_seqlen, (int, torch.SymInt)) and not isinstance(max_seqlen, bool)
    expect(good, TypeError, max_name, "an int", type(max_seqlen).__name__)
    expect(max_seqlen >= 0, ValueError, max_name, ">= 0", max_seqlen)


def check_cu_values(name: str, cu: Sequence[int], total: int, max_name: str, max_seqlen: int) -> None:
    """Checks the offsets themselves (host values)."""
    expect(cu[0] == 0, ValueError, name, "0 as the first offset", cu[0])
    lengths = [b - a for a, b in zip(cu, cu[1:])]
    expect(all(n >= 0 for n in lengths), ValueError, name, "offsets that do not decrease", list(cu))
    expect(cu[-1] <= total, ValueError, name, f"a last offset of at most {total}, the number of tokens", cu[-1])
    longest = max(lengths, default=0)
    expect(longest <= max_seqlen, ValueError, max_name, f"at least {longest}, the longest sequence", max_seqlen)


def check_softmax_scale(softmax_scale: Optional[float], head_dim: int) -> float:
    if softmax_scale is None:
        return head_dim**-0.5
    good = isinstance(softmax_scale, (int, float, torch.SymFloat)) and not isinstance(softmax_scale, bool)
    expect(good, TypeError, "softmax_scale", "a float or None", type(softmax_scale).__name__)
    finite = softmax_scale == softmax_scale and abs(softmax_scale) != float("inf")
    expect(finite, ValueError, "softmax_scale", "a finite number", softmax_scale)
    return float(softmax_scale)
