"""The support matrix, found by trying: every cell is the outcome of a call on small inputs.

`python -m flash_attn_mx support` prints it as Markdown; README holds a copy that tests/api/test_support.py compares.
"""

import importlib.util
import warnings
from dataclasses import dataclass, field
from typing import Callable, Optional

import torch
import torch.nn.functional as F

from . import dispatch
from .integrations import sdpa
from .interface import explain, flash_attn_func, flash_attn_mx_func, flash_attn_varlen_func
from .policy import LayerRule
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


def _with_policy(heads):
    """A call of layer 0 under a policy that keeps layer 0, or some heads of it, in high precision."""

    def call(q, k, v, **options):
        before = dispatch.get_policy()
        dispatch.set_policy(layers=[LayerRule(0, heads)])
        try:
            return flash_attn_func(q, k, v, layer=0, **options)
        finally:
            dispatch.set_policy(before.min_seqlen_k, before.max_outlier, before.layers)

    return call


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
    Feature("policy that keeps the layer in high precision", call=_with_policy(None)),
    Feature("policy that keeps one head in high precision", call=_with_policy((1,))),
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


# --- drop-ins: torch's own functions with flash_attn_mx.sdpa active -------------------------------------------


@dataclass(frozen=True)
class DropIn:
    """One row: options of F.scaled_dot_product_attention and of varlen_attn; None where the function has no such thing."""

    name: str
    sdpa: Optional[dict] = field(default_factory=dict)
    varlen: Optional[dict] = field(default_factory=dict)
    seqlens: tuple[int, int] = (40, 40)
    heads: tuple[int, int] = (2, 2)
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    wrap: Optional[Callable] = None  # function -> function that is called instead


def _under_autocast(function):
    def call(*tensors, **options):
        with torch.autocast("cpu", torch.bfloat16):
            return function(*tensors, **options)

    return call


def _compile(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def _twice_differentiated(function):
    def call(*tensors, **options):
        out = function(*tensors, **options)
        return torch.autograd.grad(out.float().square().sum(), tensors[0], create_graph=True)[0]

    return call


_LOWER = torch.ones(40, 40, dtype=torch.bool).tril()
_USED = torch.tensor([5, 0, 20], dtype=torch.int32)
DROP_INS = (
    *(
        DropIn(f"{str(dtype).removeprefix('torch.')} inputs", dtype=dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    ),
    *(DropIn(f"head_dim {d}", head_dim=d) for d in (72, 128, 256, 264)),
    DropIn("causal", {"is_causal": True}, {"window_size": (-1, 0)}),
    DropIn("causal, Sq != Sk", {"is_causal": True}, {"window_size": (-1, 0)}, seqlens=(30, 40)),
    DropIn("sliding window", {"attn_mask": _LOWER.triu(-8)}, {"window_size": (8, 0)}),
    DropIn("grouped heads (GQA)", {"enable_gqa": True}, {"enable_gqa": True}, heads=(4, 2)),
    DropIn("scale", {"scale": 0.3}, {"scale": 0.3}),
    DropIn("boolean or additive mask", {"attn_mask": _LOWER}, None),
    DropIn("dropout", {"dropout_p": 0.1}, None),
    DropIn("keys in use (seqused_k)", None, {"seqused_k": _USED}),
    DropIn("autocast", dtype=torch.float32, wrap=_under_autocast),
    DropIn("torch.compile, fullgraph", wrap=_compile),
    DropIn("second derivatives", wrap=_twice_differentiated),
)


def _call_varlen(q, k, v, **options):
    """The tensors (1, H, S, D) packed as three sequences, the second of them empty."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    cu_q, cu_k = (torch.tensor([0, 10, 10, x.shape[0]], dtype=torch.int32) for x in (q, k))
    return varlen_attn(q, k, v, cu_q, cu_k, q.shape[0], k.shape[0], **options)


def try_drop_in(row: DropIn, function: Callable, options: Optional[dict]) -> str:
    """ "MXFP8", "torch's kernel, with notice", "no" with the error's class, or "-" where there is no such option.

    function: F.scaled_dot_product_attention or _call_varlen. Forward and backward are run.
    """
    if options is None:
        return "-"
    torch.manual_seed(0)
    lengths = (row.seqlens[0], row.seqlens[1], row.seqlens[1])
    heads = (row.heads[0], row.heads[1], row.heads[1])
    tensors = [
        torch.randn(1, h, s, row.head_dim, dtype=row.dtype, requires_grad=True)
        for s, h in zip(lengths, heads)
    ]

    def call():
        torch.manual_seed(1)
        out = (row.wrap or (lambda f: f))(function)(*tensors, **options)
        grads = torch.autograd.grad(out.float().square().sum(), tensors)
        return [out.detach(), *grads]

    try:
        with warnings.catch_warnings(record=True) as caught, sdpa.enabled():
            warnings.simplefilter("always")
            dispatch.forget_warnings()
            got = call()
    except (NotImplementedError, RuntimeError, ValueError, TypeError) as error:
        return f"no ({type(error).__name__})"
    if not all(torch.isfinite(x).all() for x in got):
        return "wrong"
    if function is not F.scaled_dot_product_attention:
        return "MXFP8"  # torch has no kernel of its own for a CPU
    own = call()
    if any((a - b).float().norm() > 0.15 * b.float().norm() for a, b in zip(got, own)):
        return "wrong"
    if not torch.equal(got[0], own[0]):
        return "MXFP8"
    told = any("uses the torch path" in str(w.message) for w in caught)
    return "torch's kernel, with notice" if told else "torch's kernel, silently"


def drop_ins() -> str:
    """The matrix of the drop-ins as a Markdown table."""
    functions = ((F.scaled_dot_product_attention, "sdpa"), (_call_varlen, "varlen"))
    lines = ["| feature | F.scaled_dot_product_attention | varlen_attn |", "|---|---|---|"]
    saved = dispatch.get_fallback()
    dispatch.set_fallback("warn")
    try:
        for row in DROP_INS:
            cells = [try_drop_in(row, f, getattr(row, name)) for f, name in functions]
            lines.append(f"| {row.name} | {' | '.join(cells)} |")
    finally:
        dispatch.set_fallback(saved)
    return "\n".join(lines)


# --- transformers: attn_implementation="flash_attn_mx" --------------------------------------------------------


@dataclass(frozen=True)
class HuggingFace:
    """One row: what transformers says to the mask function and to the attention, in a batch of two."""

    name: str
    mask: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    seqlens: tuple[int, int] = (40, 40)
    head_dims: tuple[int, int] = (64, 64)
    compiled: bool = False


def _hugging_face_rows() -> tuple[HuggingFace, ...]:
    from transformers import masking_utils as utils

    def window(size):
        return {
            "mask_function": utils.sliding_window_causal_mask_function(size),
            "local_size": size,
        }

    marks = torch.arange(40).expand(2, 40)
    left, right, hole = marks >= 9, marks < 31, (marks < 15) | (marks > 25)
    positions = torch.cat([torch.arange(13), torch.arange(27)]).expand(2, 40)
    packed = utils.and_masks(
        utils.remap_positions_for_packed_sequence(utils.causal_mask_function, positions),
        utils.packed_sequence_mask_function((torch.arange(40) >= 13).int().expand(2, 40)),
    )
    cu = torch.tensor([0, 13, 40, 53, 80])
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": 27, "max_length_k": 27}
    both = {"mask_function": utils.bidirectional_mask_function, "allow_is_causal_skip": False}
    both["allow_is_bidirectional_skip"] = True
    no_skip, x = {"allow_is_causal_skip": False}, torch.ones(4)
    return (
        HuggingFace("causal, grouped heads"),
        HuggingFace("bidirectional", both, {"is_causal": False}),
        HuggingFace("padding on the left", {"attention_mask": left}),
        HuggingFace("padding on the right", {"attention_mask": right}),
        HuggingFace(
            "padding, bidirectional", {**both, "attention_mask": right}, {"is_causal": False}
        ),
        HuggingFace("sliding window", window(7), {"sliding_window": 7}),
        HuggingFace("sliding window that only the mask knows", window(7)),
        HuggingFace("packed rows (position_ids)", {"mask_function": packed, **no_skip}),
        HuggingFace("packed rows (cu_seq_lens)", {"mask_function": packed, **no_skip}, lengths),
        HuggingFace("one-token step with a cache", {"q_offset": 39}, seqlens=(1, 40)),
        HuggingFace("chunk of a prefill with a cache", {"q_offset": 30}, seqlens=(10, 40)),
        HuggingFace("static cache", {"q_offset": torch.tensor(20)}, seqlens=(10, 40)),
        HuggingFace("head_dim 256", head_dims=(256, 256)),
        HuggingFace("head_dim 320", head_dims=(320, 320)),
        HuggingFace("value heads of another size", head_dims=(64, 32)),
        HuggingFace("torch.compile, fullgraph", {"attention_mask": left}, compiled=True),
        HuggingFace(
            "a mask of the model's own", {"mask_function": lambda b, h, q, k: (q + k) % 3 > 0}
        ),
        HuggingFace("padding inside a row, with a window", {"attention_mask": hole, **window(7)}),
        HuggingFace("dropout", options={"dropout": 0.1}),
        HuggingFace("softcap", options={"softcap": 2.0}),
        HuggingFace("sinks", options={"s_aux": x}),
        HuggingFace("relative position bias", options={"position_bias": torch.eye(40)[None, None]}),
        HuggingFace("output_attentions", options={"output_attentions": True}),
        HuggingFace("head_mask", options={"head_mask": x}),
        HuggingFace("paged cache", options={"block_table": x}),
        HuggingFace("ALiBi", options={"alibi_slopes": x}),
    )


# These change the result, so that transformers' mask alone is no reference for it.
_CHANGES = ("dropout", "softcap", "s_aux", "position_bias")


def try_hugging_face(row: HuggingFace) -> str:
    """ "MXFP8", "high precision, with notice", "no" with the error's class, or "wrong"; forward and backward are run."""
    from transformers.masking_utils import sdpa_mask

    from .integrations import transformers as ours

    torch.manual_seed(0)
    shapes = zip(
        (4, 2, 2), (row.seqlens[0], *row.seqlens[1:] * 2), (row.head_dims[0], *row.head_dims)
    )
    tensors = [torch.randn(2, h, s, d, requires_grad=True) for h, s, d in shapes]
    module = torch.nn.Module()

    def call(options):
        mask = ours.make_mask(2, *row.seqlens, **row.mask)
        return ours.attention(module, *tensors, mask, **options)[0]

    if row.compiled:
        torch._dynamo.reset()
        call = torch.compile(call, fullgraph=True, backend="aot_eager")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dispatch.forget_warnings()
            out = call(row.options)
            out.float().square().sum().backward()
    except (NotImplementedError, ValueError, TypeError) as error:
        return f"no ({type(error).__name__})"
    if not all(x.grad.isfinite().all() for x in tensors):
        return "wrong"
    told = any("high_precision" in str(w.message) for w in caught)
    seen = sdpa_mask(
        2,
        *row.seqlens,
        **{**row.mask, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
    )
    exact = F.scaled_dot_product_attention(*tensors, attn_mask=seen, enable_gqa=True).transpose(
        1, 2
    )
    real = _real_queries(row)
    error = float((out - exact)[real].detach().norm() / exact[real].detach().norm())
    if any(name in row.options for name in _CHANGES):
        return "high precision, with notice" if told and error > 0.01 else "wrong"
    if error < 1e-5:
        return "high precision, with notice" if told else "high precision, silently"
    return "MXFP8" if error < 0.15 and not told else "wrong"


def _real_queries(row: HuggingFace) -> torch.Tensor:
    marks = row.mask.get("attention_mask")
    return torch.ones(2, row.seqlens[0], dtype=torch.bool) if marks is None else marks


def hugging_face() -> str:
    """The matrix of the transformers integration as a Markdown table."""
    lines = ['| feature | attn_implementation="flash_attn_mx" |', "|---|---|"]
    saved = dispatch.get_fallback()
    dispatch.set_fallback("warn")
    try:
        lines += [f"| {row.name} | {try_hugging_face(row)} |" for row in _hugging_face_rows()]
    finally:
        dispatch.set_fallback(saved)
    return "\n".join(lines)


def main(argv: Optional[list[str]] = None) -> int:
    """Prints the matrices for CPU tensors on this machine."""
    print(matrix())
    print(f"\ntorch's own functions while flash_attn_mx.sdpa is active:\n\n{drop_ins()}")
    if importlib.util.find_spec("transformers") is not None:
        print(f"\nHugging Face transformers:\n\n{hugging_face()}")
    return 0
