"""The support matrix, found by trying: every cell is the outcome of a call on small inputs.

`python -m flash_attn_mx support` prints it as Markdown; README holds a copy that tests/api/test_support.py compares.
"""

import contextlib
import importlib.util
from dataclasses import dataclass, field
from functools import partial
from typing import Callable, Iterator, Optional

import torch
import torch.nn.functional as F

from . import dispatch
from ._probe import EXACT_ERROR, Trial, Wrong, attempt, errors
from .integrations import sdpa
from .interface import explain, flash_attn_func, flash_attn_mx_func, flash_attn_varlen_func
from .policy import LayerRule
from .quantize import quantize_mxfp8
from .reference import attention_fp64

BACKENDS = ("portable", "emulator", "sm100")
ANYTHING = "auto"  # the column that says what a user gets without asking for a backend
_REFUSALS = (NotImplementedError, ValueError, TypeError)


def _exact(q, k, v, window_size=(-1, -1), **options):
    """float64 attention."""
    out = attention_fp64(q, k, v, window=window_size, **options)[0]
    return out if k.shape[1] else out + k.sum() + v.sum()  # without keys: their (empty) gradients


def _torchs_own(q, k, v, **options):
    """torch's attention in the dtype of the tensors: for dropout, whose pattern hangs on dtype and seed."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


@dataclass(frozen=True)
class Feature:
    """One row: a call with options on q (1, Sq, H, D) and k, v (1, Sk, Hkv, D).

    call, exact: (q, k, v, **options) -> out, and what it should be, to be differentiated too.   out_dtype: of the result;
    None is that of the inputs.   acts: without the options the results must be others.   repeats: two runs must be equal
    bit for bit.   keeps: heads that a policy takes out of MXFP8.   late: what is refused is the backward.
    """

    name: str
    options: dict = field(default_factory=dict)
    seqlens: tuple[int, int] = (40, 40)
    heads: tuple[int, int] = (2, 2)
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    grad: bool = True
    call: Callable = flash_attn_func
    exact: Callable = _exact
    out_dtype: Optional[torch.dtype] = None
    acts: bool = False
    repeats: bool = False
    keeps: tuple[int, ...] = ()
    late: bool = False


_STARTS = [0, 7, 7, 40]


def _varlen(q, k, v, **options):
    cu = torch.tensor(_STARTS, dtype=torch.int32)
    packed = flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, q.shape[1], k.shape[1], **options)
    return packed.unsqueeze(0)


def _varlen_exact(q, k, v, starts_q=_STARTS, starts_k=_STARTS, seqused_k=None, **options):
    """Each sequence alone."""
    ends_k = starts_k[1:]
    if seqused_k is not None:
        ends_k = [begin + used for begin, used in zip(starts_k, seqused_k.tolist())]
    pieces = [
        _exact(q[:, begin:end], *(x[:, begin_k:end_k] for x in (k, v)), **options)
        for begin, end, begin_k, end_k in zip(starts_q, starts_q[1:], starts_k, ends_k)
        if end > begin
    ]
    return torch.cat(pieces, dim=1)


def _prequantised(q, k, v, **options):
    layout = options.pop("layout", "plain")
    operands = [
        quantize_mxfp8(x, axis=axis, layout=layout)
        for x, axis in ((q, "rowwise"), (k, "rowwise"), (v, "colwise"))
    ]
    return flash_attn_mx_func(*operands, **options)


def _without(*names):
    """_exact without options that only say how to compute."""

    def call(q, k, v, **options):
        return _exact(q, k, v, **{n: x for n, x in options.items() if n not in names})

    return call


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


def _second_derivative(function):
    def call(q, k, v, **options):
        out = function(q, k, v, **options)
        return torch.autograd.grad(out.square().sum(), q, create_graph=True)[0]

    return call


FEATURES = (
    *(
        Feature(f"{name} inputs", dtype=dtype)
        for name, dtype in (
            ("bf16", torch.bfloat16),
            ("fp16", torch.float16),
            ("fp32", torch.float32),
            ("fp64", torch.float64),
        )
    ),
    *(Feature(f"head_dim {d}", head_dim=d) for d in (16, 64, 72, 128, 192, 256, 512)),
    Feature("causal", {"causal": True}),
    Feature("sliding window", {"window_size": (8, 2)}),
    Feature("grouped heads (GQA)", heads=(4, 2)),
    Feature("one key head (MQA)", heads=(4, 1)),
    Feature("Sq != Sk, any length", {"causal": True}, seqlens=(33, 47)),
    Feature("length 0", seqlens=(3, 0)),
    Feature("packed sequences (varlen)", {"causal": True}, call=_varlen, exact=_varlen_exact),
    Feature(
        "deterministic", {"deterministic": True}, exact=_without("deterministic"), repeats=True
    ),
    Feature(
        "e5m2 gradients",
        {"dout_dtype": torch.float8_e5m2},
        exact=_without("dout_dtype"),
        acts=True,
    ),
    Feature("pre-quantised operands, plain scales", call=_prequantised, grad=False),
    Feature(
        "pre-quantised operands, swizzled scales",
        {"layout": "swizzled128x4"},
        call=_prequantised,
        exact=_without("layout"),
        grad=False,
    ),
    Feature("autocast", dtype=torch.float32, call=_autocast, out_dtype=torch.bfloat16),
    Feature("torch.compile, fullgraph", call=_compiled),
    Feature(
        "attn_mask",
        {"attn_mask": torch.ones(40, 40, dtype=torch.bool).tril()},
        exact=_torchs_own,
    ),
    Feature("dropout", {"dropout_p": 0.1}, exact=_torchs_own),
    Feature("policy that keeps the layer in high precision", call=_with_policy(None), keeps=(0, 1)),
    Feature("policy that keeps one head in high precision", call=_with_policy((1,)), keeps=(1,)),
    Feature(
        "second derivatives",
        call=_second_derivative(flash_attn_func),
        exact=_second_derivative(_exact),
        late=True,
    ),
)


def _tensors(shapes, dtype, grad: bool = True) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


def _differentiated(function, tensors, dout) -> list[torch.Tensor]:
    """[out, and the gradients of the tensors that want one]; dout: gradient of out, or a function of it, or None."""
    out = function(*tensors)
    if dout is None:
        return [out]
    grads = torch.autograd.grad(out, tensors, dout.to(out.dtype))
    return [out.detach(), *grads]


def try_feature(feature: Feature, backend: str) -> str:
    """The cell: the call is made, forward and backward, and held against float64 attention.

    "yes" (computed by that backend); "high precision, with notice"; "no" with the error's class, if this package refused
    before any work; "no effect" of a policy; "wrong: ..." for anything else, such as a value, dtype, backend or notice.
    """
    try:
        return _try_feature(feature, backend)
    except Wrong as error:
        return f"wrong: {error}"


def _try_feature(feature: Feature, backend: str) -> str:
    sq, sk = feature.seqlens
    (h, hk), d = feature.heads, feature.head_dim
    tensors = _tensors([(1, sq, h, d), *[(1, sk, hk, d)] * 2], feature.dtype, feature.grad)
    dout = torch.randn(1, sq, h, d) if feature.grad else None
    asked = None if backend == ANYTHING else backend

    def call(**options):
        run = partial(feature.call, backend=asked, **options)
        return _differentiated(run, tensors, dout)

    trial = attempt(lambda: call(**feature.options), _REFUSALS)
    if trial.error is not None:
        return trial.refusal(feature.late)
    torch.manual_seed(1)
    want = _differentiated(partial(feature.exact, **feature.options), tensors, dout)
    by_head = errors(trial.results, want)[0]
    dtypes = [feature.out_dtype or feature.dtype, *[feature.dtype] * 3]
    for x, dtype in zip(trial.results, dtypes):
        if x.dtype != dtype:
            raise Wrong(f"{x.dtype} instead of {dtype}")
    if feature.acts and _same(trial.results, call()):
        raise Wrong(f"{', '.join(feature.options)} without effect")
    if feature.repeats and not _same(trial.results, call(**feature.options)):
        raise Wrong("a second run differs")
    if trial.ran:
        trial.check_served_by("portable" if asked is None else backend, feature.grad)
    return _cell(
        feature, trial, [head for head, error in enumerate(by_head) if error < EXACT_ERROR]
    )


def _same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _cell(feature: Feature, trial: Trial, exact_heads: list[int]) -> str:
    """What the heads that are exact, and the notices, make of a call that was served."""
    if not trial.ran and len(exact_heads) < feature.heads[0]:
        raise Wrong("not high precision")
    if not trial.ran or 0 in feature.seqlens or not feature.keeps:
        return trial.verdict("yes", "high precision")
    if exact_heads == list(feature.keeps):
        return f"yes, that head in high precision, {trial.manner}"
    if exact_heads or trial.told:
        raise Wrong(f"heads {exact_heads} in high precision")
    return "no effect (policies act on auto)"


@contextlib.contextmanager
def _notices() -> Iterator[None]:
    saved = dispatch.get_fallback()
    dispatch.set_fallback("warn")
    try:
        yield
    finally:
        dispatch.set_fallback(saved)


def matrix() -> str:
    """The matrix as a Markdown table."""
    columns = (ANYTHING, *BACKENDS)
    lines = [f"| feature | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    with _notices():
        for feature in FEATURES:
            cells = [try_feature(feature, backend) for backend in columns]
            lines.append(f"| {feature.name} | {' | '.join(cells)} |")
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
    DropIn("boolean mask", {"attn_mask": _LOWER}, None),
    DropIn("additive mask", {"attn_mask": _LOWER.log().bfloat16()}, None),
    DropIn("dropout", {"dropout_p": 0.1}, None),
    DropIn("keys in use (seqused_k)", None, {"seqused_k": _USED}),
    DropIn("autocast", dtype=torch.float32, wrap=_under_autocast),
    DropIn("torch.compile, fullgraph", wrap=_compile),
    DropIn("second derivatives", wrap=_twice_differentiated),
)


def _starts(length: int) -> list[int]:
    return [0, 10, 10, length]


def _call_varlen(q, k, v, **options):
    """The tensors (1, H, S, D) packed as three sequences, the second of them empty."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
    cu_q, cu_k = (torch.tensor(_starts(x.shape[0]), dtype=torch.int32) for x in (q, k))
    out = varlen_attn(q, k, v, cu_q, cu_k, q.shape[0], k.shape[0], **options)
    return out.transpose(0, 1).unsqueeze(0)


def _call_varlen_exact(q, k, v, scale=None, enable_gqa=False, **options):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    options["softmax_scale"] = scale
    out = _varlen_exact(q, k, v, _starts(q.shape[1]), _starts(k.shape[1]), **options)
    return out.transpose(1, 2)


def try_drop_in(row: DropIn, function: Callable, options: Optional[dict]) -> str:
    """ "MXFP8", "torch's kernel, with notice", "no" with the error's class, or "-" where there is no such option.

    function: F.scaled_dot_product_attention, whose own result without us is the reference, or _call_varlen, for which
    float64 attention is. Forward and backward are run. "wrong: ..." for anything that is not as it should be.
    """
    if options is None:
        return "-"
    try:
        return _try_drop_in(row, function, options)
    except Wrong as error:
        return f"wrong: {error}"


def _try_drop_in(row: DropIn, function: Callable, options: dict) -> str:
    (sq, sk), (h, hk), d = row.seqlens, row.heads, row.head_dim
    tensors = _tensors([(1, h, sq, d), *[(1, hk, sk, d)] * 2], row.dtype)
    dout = torch.randn(1, h, sq, d)
    wrap = row.wrap or (lambda f: f)

    def call(function=function):
        torch.manual_seed(1)
        results = _differentiated(partial(wrap(function), **options), tensors, dout)
        return [x.transpose(1, 2) for x in results]

    with sdpa.enabled():
        trial = attempt(call, (*_REFUSALS, RuntimeError))
    if trial.error is not None:
        return trial.refusal(late=row.wrap is _twice_differentiated)
    own = function is F.scaled_dot_product_attention
    want = call() if own else call(_call_varlen_exact)
    errors(trial.results, want)
    if own and [x.dtype for x in trial.results] != [x.dtype for x in want]:
        raise Wrong("dtypes are not torch's")
    if trial.ran:
        trial.check_served_by("portable", backward=True)
    elif not own or not _same(trial.results, want):
        raise Wrong("neither MXFP8 nor torch's own result")
    return trial.verdict("MXFP8", "torch's kernel")


FUNCTIONS = ((F.scaled_dot_product_attention, "sdpa"), (_call_varlen, "varlen"))


def drop_ins() -> str:
    """The matrix of the drop-ins as a Markdown table."""
    lines = ["| feature | F.scaled_dot_product_attention | varlen_attn |", "|---|---|---|"]
    with _notices():
        for row in DROP_INS:
            cells = [try_drop_in(row, f, getattr(row, name)) for f, name in FUNCTIONS]
            lines.append(f"| {row.name} | {' | '.join(cells)} |")
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
        # Newer versions count a window's tokens from where their sequence begins.
        getattr(utils, "remap_positions_for_packed_sequence", lambda function, _: function)(
            utils.causal_mask_function, positions
        ),
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


def _hugging_face_exact(row: HuggingFace, seen: torch.Tensor, q, k, v) -> list[torch.Tensor]:
    """[out (B, S, H, D), weights] in float64, written out. seen: (B or 1, 1, Sq, Sk), transformers' own mask."""
    options = row.options
    if "dropout" in options:  # the pattern is torch's, from the same seed
        p = options["dropout"]
        out = F.scaled_dot_product_attention(q, k, v, seen, dropout_p=p, enable_gqa=True)
        return [out.transpose(1, 2), None]
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if "softcap" in options:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    scores = scores + options.get("position_bias", 0.0)
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    if "s_aux" in options:
        sink = options["s_aux"].double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return [(weights @ v).transpose(1, 2), weights]


def try_hugging_face(row: HuggingFace) -> str:
    """ "MXFP8", "high precision, with notice", "no" with the error's class, or "wrong: ..."; forward and backward are run."""
    try:
        return _try_hugging_face(row)
    except Wrong as error:
        return f"wrong: {error}"


def _try_hugging_face(row: HuggingFace) -> str:
    from transformers.masking_utils import sdpa_mask

    from .integrations import transformers as ours

    sq, sk = row.seqlens
    d, d_v = row.head_dims
    tensors = _tensors([(2, 4, sq, d), (2, 2, sk, d), (2, 2, sk, d_v)], torch.float32)
    real = row.mask.get("attention_mask", torch.ones(2, sq, dtype=torch.bool))
    dout = torch.randn(2, sq, 4, d_v) * real[..., None, None]
    module, weights = torch.nn.Module(), []

    def attend(q, k, v):
        mask = ours.make_mask(2, sq, sk, **row.mask)
        return ours.attention(module, q, k, v, mask, **row.options)

    if row.compiled:
        torch._dynamo.reset()
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")

    def call(function):
        def out_of(*tensors):
            out, given = function(*tensors)
            weights.append(given)
            return out

        out, *grads = _differentiated(out_of, tensors, dout)
        return [out * real[..., None, None], *(x.transpose(1, 2) for x in grads)]

    trial = attempt(lambda: call(attend), _REFUSALS)
    if trial.error is not None:
        return trial.refusal()
    no_skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    seen = sdpa_mask(2, sq, sk, **{**row.mask, **no_skip})
    torch.manual_seed(1)
    by_head = errors(trial.results, call(partial(_hugging_face_exact, row, seen)))
    if row.options.get("output_attentions") and (weights[0] - weights[1]).abs().max() > 1e-5:
        raise Wrong("attention weights")
    if trial.ran:
        trial.check_served_by("portable", backward=True)
    elif max(max(heads) for heads in by_head) > 1e-5:
        raise Wrong("not high precision")
    return trial.verdict("MXFP8", "high precision")


def hugging_face() -> str:
    """The matrix of the transformers integration as a Markdown table."""
    lines = ['| feature | attn_implementation="flash_attn_mx" |', "|---|---|"]
    with _notices():
        lines += [f"| {row.name} | {try_hugging_face(row)} |" for row in _hugging_face_rows()]
    return "\n".join(lines)


def main(argv: Optional[list[str]] = None) -> int:
    """Prints the matrices for CPU tensors on this machine."""
    print(matrix())
    print(f"\ntorch's own functions while flash_attn_mx.sdpa is active:\n\n{drop_ins()}")
    if importlib.util.find_spec("transformers") is not None:
        print(f"\nHugging Face transformers:\n\n{hugging_face()}")
    return 0
