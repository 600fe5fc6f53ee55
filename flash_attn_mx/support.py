"""The support matrix, found by trying: every cell is the outcome of a call on small inputs.

`python -m flash_attn_mx support` prints it as Markdown; README holds a copy that tests/api/test_support.py compares.
"""

import warnings
from dataclasses import dataclass, field
from typing import Callable, Optional

import torch

from . import dispatch
from .interface import explain, flash_attn_func, flash_attn_mx_func, flash_attn_varlen_func
from .quantize import quantize_mxfp8

BACKENDS = ("portable", "emulator", "sm100")
ANYTHING = "auto"  # the column that says what a user gets without asking for a backend


@dataclass(frozen=True)
class Feature:
    """One row: a call with options on q (1, Sq, H, D) and k, v (1, Sk, Hkv, D)."""

    name: str
    options: dict = field(default_factory=dict)
    seqlens: tuple[int, int] = (40, 40)
    heads: tuple[int, int] = (2, 2)
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    grad: bool = True
    call: Optional[Callable] = None  # (q, k, v, **options) -> out


def _varlen(q, k, v, **options):
    cu = torch.tensor([0, 7, 7, q.shape[1]], dtype=torch.int32)
    return flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, q.shape[1], k.shape[1], **options)


def _prequantised(q, k, v, **options):
    layout = options.pop("layout", "plain")
    operands = [
        quantize_mxfp8(x, axis=axis, layout=layout)
        for x, axis in ((q, "rowwise"), (k, "rowwise"), (v, "colwise"))
    ]
    return flash_attn_mx_func(*operands, **options)


def _autocast(q, k, v, **options):
    with torch.autocast("cpu", torch.bfloat16):
        return flash_attn_func(q, k, v.bfloat16(), **options)


def _compiled(q, k, v, **options):
    explain(
        q, k, v, backend=options["backend"]
    )  # raises what the call would, before dynamo wraps it
    torch._dynamo.reset()
    return torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")(q, k, v, **options)


def _second_derivative(q, k, v, **options):
    out = flash_attn_func(q, k, v, **options)
    return torch.autograd.grad(out.sum(), q, create_graph=True)[0]


FEATURES = (
    *(
        Feature(f"{name} inputs", dtype=dtype)
        for name, dtype in (
            ("bf16", torch.bfloat16),
            ("fp16", torch.float16),
            ("fp32", torch.float32),
        )
    ),
    *(Feature(f"head_dim {d}", head_dim=d) for d in (16, 64, 72, 128, 192, 256, 512)),
    Feature("causal", {"causal": True}),
    Feature("sliding window", {"window_size": (8, 2)}),
    Feature("grouped heads (GQA)", heads=(4, 2)),
    Feature("one key head (MQA)", heads=(4, 1)),
    Feature("Sq != Sk, any length", {"causal": True}, seqlens=(33, 47)),
    Feature("length 0", seqlens=(3, 0)),
    Feature("packed sequences (varlen)", {"causal": True}, call=_varlen),
    Feature("deterministic", {"deterministic": True}),
    Feature("e5m2 gradients", {"dout_dtype": torch.float8_e5m2}),
    Feature("pre-quantised operands, plain scales", call=_prequantised, grad=False),
    Feature(
        "pre-quantised operands, swizzled scales",
        {"layout": "swizzled128x4"},
        call=_prequantised,
        grad=False,
    ),
    Feature("autocast", dtype=torch.float32, call=_autocast),
    Feature("torch.compile, fullgraph", call=_compiled),
    Feature("attn_mask", {"attn_mask": torch.ones(40, 40, dtype=torch.bool).tril()}),
    Feature("dropout", {"dropout_p": 0.1}),
    Feature("second derivatives", call=_second_derivative),
)


def try_feature(feature: Feature, backend: str) -> str:
    """ "yes" (forward, and backward where the row has one), "high precision", or "no" with the error's class."""
    torch.manual_seed(0)
    lengths = (feature.seqlens[0], feature.seqlens[1], feature.seqlens[1])
    heads = (feature.heads[0], feature.heads[1], feature.heads[1])
    q, k, v = (
        torch.randn(1, s, h, feature.head_dim, dtype=feature.dtype, requires_grad=feature.grad)
        for s, h in zip(lengths, heads)
    )
    options = dict(feature.options)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dispatch.forget_warnings()
            out = (feature.call or flash_attn_func)(
                q, k, v, backend=None if backend == ANYTHING else backend, **options
            )
            if feature.grad:
                out.float().sum().backward()
    except (NotImplementedError, ValueError, TypeError) as error:
        return f"no ({type(error).__name__})"
    if not torch.isfinite(out.float()).all():
        return "wrong"
    return (
        "high precision, with notice"
        if any("high_precision" in str(w.message) for w in caught)
        else "yes"
    )


def matrix() -> str:
    """The matrix as a Markdown table."""
    columns = (ANYTHING, *BACKENDS)
    lines = [f"| feature | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    saved = dispatch.get_fallback()
    dispatch.set_fallback("warn")
    try:
        for feature in FEATURES:
            cells = [try_feature(feature, backend) for backend in columns]
            lines.append(f"| {feature.name} | {' | '.join(cells)} |")
    finally:
        dispatch.set_fallback(saved)
    return "\n".join(lines)


def main(argv: Optional[list[str]] = None) -> int:
    """Prints the matrix for CPU tensors on this machine."""
    print(matrix())
    return 0
