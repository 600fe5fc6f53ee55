"""Which backend serves a call, and why: set_backend, set_fallback, set_policy, explain.

auto = the sm_100 kernels where the device is an sm_100 one and a kernel for the shape is built; high precision (torch SDPA
on the unquantised inputs) where the policy or an option asks for it; else the portable path. Every reason for not taking
the fastest way is reported once as a FallbackWarning, or raised, and is in explain()'s answer.
"""

import dataclasses
import os
import sys
import warnings
from typing import Iterable, NamedTuple, Optional, Sequence, Union

import torch
from torch import Tensor

from . import sm100
from ._errors import fail
from .policy import Layer, LayerRule, Policy, check_layer, read

BACKENDS = ("auto", "sm100", "portable", "emulator")
FALLBACKS = ("warn", "silent", "error")


class FallbackWarning(UserWarning):
    """A call was served by a slower or less MXFP8 path than the sm_100 kernels; given once per reason."""


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a faster path does not serve a call. `code` is stable, `text` is for people."""

    code: str
    text: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """What would run: backend ("sm100", "portable", "emulator", "high_precision"), kernel name, reasons.

    high_precision_heads: query heads that the policy takes out of it, for torch's SDPA.
    backward: the kernel of the gradients, where some are wanted and a kernel computes them.
    """

    backend: str
    kernel: str
    reasons: tuple[Reason, ...] = ()
    high_precision_heads: tuple[int, ...] = ()
    backward: str = ""

    def __str__(self) -> str:
        kernels = f"{self.kernel}, {self.backward}" if self.backward else self.kernel
        lines = [f"backend: {self.backend} ({kernels})"]
        if self.high_precision_heads:
            lines.append(f"  but heads {list(self.high_precision_heads)} in high precision")
        lines += [f"  because {reason.text} [{reason.code}]" for reason in self.reasons]
        return "\n".join(lines)


@dataclasses.dataclass
class _Settings:
    backend: str = "auto"
    fallback: str = "warn"
    policy: Policy = Policy()


_settings = _Settings()
_warned: set[str] = set()

_KERNELS = {
    "portable": "PyTorch, MXFP8 numerics",
    "high_precision": "torch.nn.functional.scaled_dot_product_attention",
}
_NO_LAYER = "the policy has rules for layers, which do not apply to a call that does not say its layer (argument layer)"


def set_backend(backend: str) -> None:
    """Chooses who computes: "auto", "sm100", "portable" or "emulator". Process-wide; a call's backend= wins over it."""
    if backend not in BACKENDS:
        fail(ValueError, "backend", f"one of {BACKENDS}", repr(backend))
    _settings.backend = backend


def get_backend() -> str:
    """The backend that set_backend chose."""
    return _settings.backend


def set_fallback(fallback: str) -> None:
    """What happens when `auto` cannot take the sm_100 kernels: "warn" (once per reason), "silent" or "error"."""
    if fallback not in FALLBACKS:
        fail(ValueError, "fallback", f"one of {FALLBACKS}", repr(fallback))
    _settings.fallback = fallback
    forget_warnings()


def get_fallback() -> str:
    """What set_fallback chose."""
    return _settings.fallback


def forget_warnings() -> None:
    """Lets every reason be announced once more."""
    _warned.clear()


def set_policy(
    min_seqlen_k: int = 0,
    max_outlier: Optional[float] = None,
    layers: Iterable[LayerRule] = (),
) -> None:
    """Sets when `auto` leaves MXFP8 for high precision; see Policy. Called without arguments it restores the default."""
    _settings.policy = Policy(min_seqlen_k, max_outlier, tuple(layers))


def get_policy() -> Policy:
    """The policy in force."""
    return _settings.policy


def keep_high_precision(
    layer: Layer, heads: Optional[Sequence[int]] = None, reason: str = ""
) -> None:
    """Adds a rule for one layer, or for some query heads of it, to the policy in force."""
    check_layer(layer)
    rule = LayerRule(layer, None if heads is None else tuple(sorted(heads)), reason)
    if rule not in _settings.policy.layers:
        layers = (*_settings.policy.layers, rule)
        _settings.policy = dataclasses.replace(_settings.policy, layers=layers)


class load_policy:
    """Applies a policy file (policy.py has its format) to the whole process; as a context manager, until the block ends.

    famx.load_policy("policy.json")          with famx.load_policy("policy.json") as policy: ...

    Rules for layers act on calls that say which layer they are: the argument `layer` of the attention functions, which
    the transformers integration passes. Raises: OSError, ValueError (file, entry, expected, got); then nothing changed.
    """

    def __init__(self, path: Union[str, os.PathLike]):
        self.policy, self._before = read(path), _settings.policy
        _settings.policy = self.policy

    def __enter__(self) -> Policy:
        return self.policy

    def __exit__(self, *unused) -> None:
        _settings.policy = self._before


def _outlier(x: Tensor) -> float:
    if x.numel() == 0:
        return 0.0
    x = x.detach().float()
    return float(x.abs().amax() / x.square().mean().sqrt().clamp_(min=1e-30))


def option_reasons(attn_mask: bool, dropout_p: float) -> list[Reason]:
    """The options of a call that no MXFP8 path takes."""
    reasons = []
    if attn_mask:
        reasons.append(
            Reason("attn_mask", "attn_mask was given, which the MXFP8 paths do not take")
        )
    if dropout_p:
        reasons.append(
            Reason("dropout", f"dropout_p = {dropout_p}, which the MXFP8 paths do not apply")
        )
    return reasons


def _high_precision_reasons(
    tensors: dict[str, Tensor],
    max_seqlen_k: int,
    attn_mask: bool,
    dropout_p: float,
    rules: tuple[LayerRule, ...],
) -> list[Reason]:
    """Why the whole call leaves MXFP8."""
    policy, reasons = _settings.policy, option_reasons(attn_mask, dropout_p)
    if max_seqlen_k < policy.min_seqlen_k:
        bound = f"the policy's min_seqlen_k = {policy.min_seqlen_k}"
        reasons.append(Reason("short", f"{max_seqlen_k} keys are fewer than {bound}"))
    for rule in rules:
        if rule.heads is None:
            reasons.append(Reason("layer_policy", _rule_text(rule)))
    if policy.max_outlier is not None:
        for name, x in tensors.items():
            ratio = _outlier(x)
            if ratio > policy.max_outlier:
                bound = f"the policy's max_outlier = {policy.max_outlier:g}"
                reasons.append(
                    Reason("outlier", f"amax/rms of {name} is {ratio:.4g}, above {bound}")
                )
    return reasons


def _rule_text(rule: LayerRule) -> str:
    heads = "" if rule.heads is None else f" heads {', '.join(map(str, rule.heads))} of"
    what = f"{heads.strip()} layer {rule.layer}".strip()
    why = f": {rule.reason}" if rule.reason else ""
    return f"the policy keeps {what} in high precision{why}"


def _head_reasons(
    rules: tuple[LayerRule, ...], nheads: int
) -> tuple[tuple[int, ...], list[Reason]]:
    """(query heads that leave MXFP8, why); raises where a rule names a head that is not there."""
    heads, reasons = set(), []
    for rule in rules:
        if rule.heads is None:
            continue
        if rule.heads[-1] >= nheads:
            expected = f"heads below {nheads}, as the call for layer {rule.layer} has"
            fail(ValueError, "policy", expected, rule.heads)
        heads.update(rule.heads)
        reasons.append(Reason("head_policy", _rule_text(rule)))
    return tuple(sorted(heads)), reasons


class _Operands(NamedTuple):
    """What decides whether a kernel is built. dout_dtype: FP8 type of the incoming gradient; None: no gradients wanted."""

    head_dim: int
    out_dtype: torch.dtype
    payload: torch.dtype
    dout_dtype: Optional[torch.dtype]

    def why_not_built(self) -> str:
        text = sm100.why_not_built(self.head_dim, self.out_dtype, self.payload)
        if text or self.dout_dtype is None:
            return text
        return sm100.why_no_backward(self.head_dim, self.out_dtype, self.out_dtype, self.dout_dtype)

    def plan(self, backend: str, notes=(), heads=()) -> Plan:
        """The plan of the kernels that are built for them."""
        kernel = sm100.find_instance(self.head_dim, self.out_dtype).name
        backward = ""
        if self.dout_dtype is not None:
            backward = sm100.find_backward(self.head_dim, self.out_dtype, self.out_dtype).main
        return Plan(backend, kernel, tuple(notes), heads, backward)


def _no_kernel_reason(device: torch.device, operands: _Operands) -> Optional[Reason]:
    """Why the sm_100 kernels do not serve such tensors; None if they do."""
    text = sm100.why_no_device(device)
    if text:
        return Reason(
            "device" if device.type != "cuda" or torch.version.cuda is None else "capability", text
        )
    text = operands.why_not_built()
    return Reason("not_built", text) if text else None


def plan(
    tensors: dict[str, Tensor],
    max_seqlen_k: int,
    attn_mask: bool = False,
    dropout_p: float = 0.0,
    backend: Optional[str] = None,
    out_dtype: Optional[torch.dtype] = None,
    layer: Optional[Layer] = None,
    dout_dtype: Optional[torch.dtype] = None,
) -> Plan:
    """Chooses the backend of one call; raises NotImplementedError where a backend was asked for that cannot serve it.

    tensors: q, k and v, in high precision or as payloads; the latter need out_dtype.   layer: who calls, for the policy.
    dout_dtype: FP8 type of the incoming gradient where gradients are wanted.
    """
    check_layer(layer)
    if backend is not None and backend not in BACKENDS:
        fail(ValueError, "backend", f"one of {BACKENDS} or None", repr(backend))
    requested = backend or _settings.backend
    q = next(iter(tensors.values()))
    quantised = q.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    rules = _settings.policy.rules_for(layer) if requested == "auto" and not quantised else ()
    high_precision = (
        []
        if quantised
        else _high_precision_reasons(tensors, max_seqlen_k, attn_mask, dropout_p, rules)
    )
    heads, notes = _head_reasons(rules, q.shape[-2])
    if len(heads) == q.shape[-2] > 0:
        high_precision += notes
    if _settings.policy.layers and layer is None and requested == "auto" and not quantised:
        notes.append(Reason("no_layer", _NO_LAYER))
    out_dtype = out_dtype or q.dtype
    payloads = [x.dtype for x in tensors.values() if x.dtype == torch.float8_e5m2]
    payload = payloads[0] if payloads else torch.float8_e4m3fn
    operands = _Operands(q.shape[-1], out_dtype, payload, dout_dtype)
    if requested == "auto" and high_precision:
        return Plan("high_precision", _KERNELS["high_precision"], tuple(high_precision))
    hard = [reason for reason in high_precision if reason.code in ("attn_mask", "dropout")]
    if hard:
        raise NotImplementedError(
            f"backend {requested!r}: {'; '.join(reason.text for reason in hard)}"
        )
    if requested == "portable":
        return Plan("portable", _KERNELS["portable"])
    if requested == "emulator":
        reason = sm100.why_not_emulated(q.device) or operands.why_not_built()
        if reason:
            raise NotImplementedError(f"backend 'emulator': {reason}")
        return operands.plan("emulator")
    missing = _no_kernel_reason(q.device, operands)
    if missing is None:
        return operands.plan("sm100", notes, heads)
    if requested == "auto":
        return Plan("portable", _KERNELS["portable"], (missing, *notes), heads)
    raise NotImplementedError(f"backend 'sm100': {missing.text}")


def plan_high_precision(code: str, text: str, backend: Optional[str] = None) -> Plan:
    """The plan of a call that MXFP8 cannot serve for a reason which only its caller knows (an integration).

    Raises: NotImplementedError where a backend was asked for by name.
    """
    requested = backend or _settings.backend
    if requested != "auto":
        raise NotImplementedError(f"backend {requested!r}: {text}")
    return Plan("high_precision", "softmax(q kᵀ) v in fp32", (Reason(code, text),))


def _frames_of_package() -> int:
    """The stacklevel with which its caller's warning names the first line outside this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(f"{__package__}."):
        frame, level = frame.f_back, level + 1
    return level


def notify(code: str, text: str) -> None:
    """Warns once, or raises, of a change to the policy that later calls obey without a word."""
    announce(Plan("high_precision", _KERNELS["high_precision"], (Reason(code, text),)))
    _warned.add("layer_policy")


def announce(chosen: Plan) -> None:
    """Warns once per reason, or raises, as set_fallback says. Silent while torch.compile traces."""
    if not chosen.reasons or _settings.fallback == "silent":
        return
    if _settings.fallback == "error":
        text = "; ".join(reason.text for reason in chosen.reasons)
        raise RuntimeError(
            f"flash_attn_mx would fall back to {chosen.backend}: {text} (set_fallback is 'error')"
        )
    if torch.compiler.is_compiling():
        return
    for reason in chosen.reasons:
        if reason.code not in _warned:
            _warned.add(reason.code)
            warnings.warn(
                f"flash_attn_mx uses the {chosen.backend} path: {reason.text}. "
                "flash_attn_mx.explain() tells what would run, set_fallback() silences or forbids this.",
                FallbackWarning,
                stacklevel=_frames_of_package(),
            )
