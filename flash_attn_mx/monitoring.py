"""famx.monitor(): what quantisation does to a model, layer by layer, while it runs.

    with famx.monitor(model, limits=famx.Limits(ds_flushed=0.5)) as seen:
        for batch in data:
            train_step(batch)
            seen.step()
    seen.to_json("monitor.json"); seen.to_tensorboard(SummaryWriter(), step)

It stands at the operators (quantize, fwd, bwd), so it sees eager and compiled code, every backend and recomputed forwards
alike, and costs nothing when it is not there. Scale bytes, amax and NaN/Inf are looked at whole; elements, P and dS on a
sample that moves on with every call: some heads, and of them 32 rows of P and dS, recomputed by the contract's rules.
"""

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import NamedTuple, Optional, Union

import torch
from torch import Tensor

from . import _statistics as statistics
from . import dispatch, ops, portable
from ._errors import fail
from .mx_tensor import decode_e8m0
from .policy import Layer

_KEEP = 64  # observations of a layer that wait before they are merged


@dataclasses.dataclass(frozen=True)
class Limits:
    """Shares above which a layer leaves MXFP8 for high precision, per step; None = no limit.

    saturated, underflowed: elements of q, k, v or dout (the worst of them).
    p_flushed_mass: what rounding to zero takes from the softmax weights.   p_flushed: of the visible weights, by number.
    ds_flushed: of the dS that are not zero.   nonfinite: whether one NaN or Inf in q, k, v or dout is enough.
    """

    saturated: Optional[float] = None
    underflowed: Optional[float] = None
    p_flushed: Optional[float] = None
    p_flushed_mass: Optional[float] = None
    ds_flushed: Optional[float] = None
    nonfinite: bool = False

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if field.name == "nonfinite":
                if not isinstance(value, bool):
                    fail(TypeError, "nonfinite", "a bool", type(value).__name__)
            elif value is not None and not (number and 0 <= value <= 1):
                fail(ValueError, field.name, "None or a share in [0, 1]", repr(value))


def _merge(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Observations of one kind as one: largest *_max and amax, smallest *_min, sums of the rest."""
    merged = {}
    for name in rows[0]:
        values = torch.stack([row[name] for row in rows])
        if name.endswith(("_max", "amax")):
            merged[name] = values.amax(0)
        else:
            merged[name] = values.amin(0) if name.endswith("_min") else values.sum(0)
    return merged


class _Layer:
    """What was seen of one layer: observations by kind ("q", "k", "v", "p", "dout", "ds")."""

    def __init__(self, name: Layer):
        self.name, self.calls, self.backward_calls = name, 0, 0
        self._rows: dict[str, list[dict[str, Tensor]]] = {}
        self._step: dict[str, list[dict[str, Tensor]]] = {}

    def add(self, kind: str, values: dict[str, Tensor]) -> None:
        for rows in (self._rows.setdefault(kind, []), self._step.setdefault(kind, [])):
            rows.append(values)
            if len(rows) > _KEEP:
                rows[:] = [_merge(rows)]

    def figures(self, step: bool = False) -> dict[str, dict[str, float]]:
        """Numbers by kind: of everything, or since the last step."""
        rows = self._step if step else self._rows
        return {kind: _figures(kind, _merge(values)) for kind, values in rows.items() if values}

    def end_step(self) -> None:
        self._step = {}


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _figures(kind: str, merged: dict[str, Tensor]) -> dict[str, float]:
    """Merged tensors as numbers, with the shares that they are looked at for."""
    f = {name: value.item() for name, value in merged.items()}
    for name in ("scale_min", "scale_max"):  # exponents; infinite where no block was seen
        if name in f:
            f[name] = int(f[name]) if math.isfinite(f[name]) else None
    counts = (
        "elements",
        "sampled",
        "saturated",
        "underflowed",
        "nonfinite",
        "visible",
        "flushed",
        "nonzero",
    )
    f |= {name: int(f[name]) for name in counts if name in f}
    if kind == "p":
        f["flushed_share"] = _share(f["flushed"], f["visible"])
        f["flushed_mass_share"] = _share(f.pop("flushed_mass"), f.pop("mass"))
    elif kind == "ds":
        f["flushed_share"] = _share(f["flushed"], f["nonzero"])
    else:
        f["saturated_share"] = _share(f["saturated"], f["sampled"])
        f["underflowed_share"] = _share(f["underflowed"], f["sampled"])
    return f


class monitor:
    """Counts, per layer, what quantisation does to the attention calls inside the block.

    Args:
      model: gives calls the dotted name of the module that makes them. Without it a layer is what the call says
        (argument `layer`, which integrations.transformers passes), or else "call i", counted from the last step().
      sample: share of the heads whose elements, P and dS are counted in a call, in (0, 1]; at least one head.
      limits: a layer beyond them goes to high precision from the next step on, by a rule of the policy (set_policy()
        takes it back), with one FallbackWarning.
    The figures: as_dict, to_json, to_tensorboard. Under torch.compile a graph says no layers ("call i") and keeps its
    paths, so limits act on eager code only. A recomputed forward (checkpointing) counts as a call.
    Raises: RuntimeError where another monitor is at work.
    """

    def __init__(
        self,
        model: Optional[torch.nn.Module] = None,
        *,
        sample: float = 0.125,
        limits: Optional[Limits] = None,
    ):
        if not (model is None or isinstance(model, torch.nn.Module)):
            fail(TypeError, "model", "a torch.nn.Module or None", type(model).__name__)
        number = isinstance(sample, (int, float)) and not isinstance(sample, bool)
        if not (number and 0 < sample <= 1):
            fail(ValueError, "sample", "a share in (0, 1]", repr(sample))
        if not (limits is None or isinstance(limits, Limits)):
            fail(TypeError, "limits", "famx.Limits or None", type(limits).__name__)
        self.sample, self.limits, self.steps = float(sample), limits, 0
        self.layers: dict[str, _Layer] = {}
        self.kept: dict[str, str] = {}  # layers that went to high precision, and why
        self._model, self._hooks, self._modules = model, [], []
        self._next: Optional[Layer] = None  # layer of the eager call that is about to run
        self._calls = 0
        self._quantised: dict[int, Tensor] = {}  # what a payload was made of
        self._forward_of: dict[int, _Layer] = {}  # by the address of lse

    # --- life ---

    def __enter__(self) -> "monitor":
        if ops.observer is not None:
            raise RuntimeError("famx.monitor: another monitor is at work")
        self._library = ops.watch_quantize(self._saw_quantize)
        ops.observer = self
        if self._model is not None:
            for name, module in self._model.named_modules():
                self._hooks += [
                    module.register_forward_pre_hook(self._entering(name)),
                    module.register_forward_hook(self._leaving, always_call=True),
                ]
        return self

    def __exit__(self, *unused) -> None:
        ops.observer = None
        self._library._destroy()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._modules.clear()
        self._quantised.clear()
        self._forward_of.clear()
        self.step()

    def _entering(self, name: str):
        def enter(module, inputs):
            self._modules.append(name)

        return enter

    def _leaving(self, module, inputs, output) -> None:
        self._modules.pop()

    def step(self) -> None:
        """Ends a step: "call i" counts from 0 again, and the limits are looked at."""
        self.steps += bool(self._calls)
        self._calls = 0
        for layer in self.layers.values():
            if self.limits is not None and str(layer.name) not in self.kept:
                self._check_limits(layer)
            layer.end_step()

    # --- what the operators say ---

    def layer_of_call(self, layer: Optional[Layer]) -> Optional[Layer]:
        """The layer that an eager call is: what it says by name, else the module that is running, else its index."""
        if self._modules and not isinstance(layer, str):
            layer = self._modules[-1]
        self._next = layer
        return layer

    def _saw_quantize(self, x: Tensor, data: Tensor, axis: str) -> None:
        if axis != "tokenwise":
            self._quantised[data.data_ptr()] = x

    def saw_forward(self, operands: tuple, lse: Tensor) -> None:
        """Called by `fwd` after its work, with its operands and lse."""
        name, self._next = self._next, None
        if name is None:
            name = f"call {self._calls}"
        self._calls += 1
        layer = self.layers.setdefault(str(name), _Layer(name))
        layer.calls += 1
        self._forward_of[lse.data_ptr()] = layer
        q, q_scale, k, k_scale, v, v_scale, v_tok, v_tok_scale, cu_q, cu_k = operands[:10]
        problem = _Problem.of(q, k, cu_q, cu_k, self.sample, layer.calls - 1)
        for kind, data, scale, axis in (
            ("q", q, q_scale, "rowwise"),
            ("k", k, k_scale, "rowwise"),
            ("v", v, v_scale, "colwise"),
        ):
            x = self._quantised.get(data.data_ptr())
            if x is not None:  # not given as MXTensor
                layer.add(kind, problem.operand(x, data, scale, axis, kind != "q"))
        self._quantised.clear()
        if problem.sample is not None:
            token = None if v_tok is None else problem.token_factor(v_tok_scale)
            rows, keys = problem.rows(q, q_scale), problem.keys(k, k_scale)
            layer.add(
                "p",
                statistics.forward_p(
                    rows, keys, token, *problem.place(operands[13:15]), operands[12]
                ),
            )

    def saw_backward(self, operands: tuple) -> None:
        """Called by `bwd` after its work, with its operands."""
        dout, out, lse, do_row, do_row_scale = operands[:5]
        q, q_scale, _, _, k, k_scale, _, _, v_tok, v_tok_scale, cu_q, cu_k = operands[7:19]
        layer = self._forward_of.get(lse.data_ptr())
        if layer is None:  # the forward ran before the monitor began
            layer = self.layers.setdefault("before the monitor", _Layer("before the monitor"))
        layer.backward_calls += 1
        self._quantised.clear()
        problem = _Problem.of(q, k, cu_q, cu_k, self.sample, layer.backward_calls - 1)
        layer.add("dout", problem.operand(dout, do_row, do_row_scale, "rowwise", False))
        if problem.sample is None:
            return
        token = problem.token_factor(v_tok_scale).unsqueeze(-1)
        v = problem.payload(v_tok) * token
        rows, _, window = problem.place(operands[22:24])
        counts = statistics.backward_ds(
            problem.rows(q, q_scale), problem.keys(k, k_scale), v, problem.rows(do_row, do_row_scale),
            problem.raw_rows(out), problem.lse_rows(lse), rows, window, operands[21],
        )  # fmt: skip
        layer.add("ds", counts)

    # --- limits ---

    def _check_limits(self, layer: _Layer) -> None:
        reasons = _beyond(self.limits, layer.figures(step=True))
        if not reasons:
            return
        text = f"monitor: {'; '.join(reasons)}"
        self.kept[str(layer.name)] = text
        if isinstance(layer.name, str) and layer.name.startswith("call "):
            text += "; but the calls do not say their layer (argument layer, or monitor(model)), so they stay in MXFP8"
        else:
            dispatch.keep_high_precision(layer.name, reason=text)
        dispatch.notify(f"monitor {layer.name}", f"layer {layer.name}: {text}")

    # --- figures ---

    def as_dict(self) -> dict:
        """Everything seen so far, as numbers; a scale is given as its exponent, shares as fractions."""
        layers = {
            name: {"calls": layer.calls, "backward_calls": layer.backward_calls, **layer.figures()}
            for name, layer in self.layers.items()
        }
        return {"format": "flash_attn_mx.monitor", "version": 1, "sample": self.sample, "steps": self.steps,
                "layers": layers, "kept": dict(self.kept)}  # fmt: skip

    def to_json(self, path: Union[str, os.PathLike]) -> None:
        """Writes as_dict() as JSON; an infinite amax becomes the string "inf"."""
        Path(path).write_text(
            json.dumps(_plain_numbers(self.as_dict()), indent=1) + "\n", encoding="utf-8"
        )

    def to_tensorboard(self, writer, step: Optional[int] = None) -> None:
        """Adds every figure as a scalar flash_attn_mx/<layer>/<kind>/<figure>.

        writer: torch.utils.tensorboard.SummaryWriter, or what has add_scalar(tag, value, step).   step: default, the
        steps counted here.
        """
        if not hasattr(writer, "add_scalar"):
            fail(TypeError, "writer", "a SummaryWriter (add_scalar)", type(writer).__name__)
        step = self.steps if step is None else step
        for name, layer in self.layers.items():
            for kind, figures in layer.figures().items():
                for figure, value in figures.items():
                    if value is not None:
                        writer.add_scalar(f"flash_attn_mx/{name}/{kind}/{figure}", value, step)


def _beyond(limits: Limits, figures: dict[str, dict[str, float]]) -> list[str]:
    """What is above its limit, as text."""
    operands = ("q", "k", "v", "dout")
    shares = [
        *(("saturated", kind, "saturated_share") for kind in operands),
        *(("underflowed", kind, "underflowed_share") for kind in operands),
        ("p_flushed", "p", "flushed_share"),
        ("p_flushed_mass", "p", "flushed_mass_share"),
        ("ds_flushed", "ds", "flushed_share"),
    ]
    reasons = []
    for name, kind, figure in shares:
        limit, value = getattr(limits, name), figures.get(kind, {}).get(figure, 0.0)
        if limit is not None and value > limit:
            reasons.append(f"{name} of {kind} {value:.3g} > {limit:g}")
    if limits.nonfinite:
        reasons += [
            f"NaN or Inf in {kind}" for kind in operands if figures.get(kind, {}).get("nonfinite")
        ]
    return reasons


def _plain_numbers(value):
    if isinstance(value, dict):
        return {key: _plain_numbers(entry) for key, entry in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class _Problem(NamedTuple):
    """One dense problem of a call: the call itself, or one of its packed sequences; and its sample."""

    sequence: Optional[int]
    tokens_q: slice
    tokens_k: slice
    sizes: tuple[int, int]
    sample: Optional[statistics.Sample]  # None where there is nothing to look at

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        cu_q: Optional[Tensor],
        cu_k: Optional[Tensor],
        share: float,
        turn: int,
    ) -> "_Problem":
        if cu_q is None:
            batch, seqlen_q, nheads, _ = q.shape
            part, sizes = (None, slice(None), slice(None)), (seqlen_q, k.shape[1])
        else:
            batch, nheads = 1, q.shape[1]
            offsets_q, offsets_k = cu_q.tolist(), cu_k.tolist()
            full = [i for i in range(len(offsets_q) - 1)
                    if offsets_q[i] < offsets_q[i + 1] and offsets_k[i] < offsets_k[i + 1]]  # fmt: skip
            turn, i = divmod(turn, len(full)) if full else (turn, 0)
            i = full[i] if full else 0
            tokens = (
                [slice(*offsets[i : i + 2]) for offsets in (offsets_q, offsets_k)]
                if full
                else [slice(0)] * 2
            )
            part, sizes = (i, *tokens), tuple(t.stop - (t.start or 0) for t in tokens)
        nheads_k = k.shape[-2]
        if not (batch and nheads and all(sizes) and q.shape[-1]):
            return _Problem(*part, sizes, None)
        return _Problem(
            *part, sizes, statistics.choose(batch, nheads, nheads_k, sizes[0], share, turn)
        )

    def _dense(self, x: Tensor, of_keys: bool, colwise: bool = False) -> Tensor:
        """x as (B, S, H, ..), the sequence alone if packed; a colwise scale by its block rows."""
        if self.sequence is None:
            return x
        tokens = self.tokens_k if of_keys else self.tokens_q
        return x[ops._scale_rows(tokens, self.sequence) if colwise else tokens].unsqueeze(0)

    def place(self, window: tuple[int, int]) -> tuple[range, int, portable.Window]:
        """(sampled rows, number of rows, visible keys)."""
        seqlen_q, seqlen_k = self.sizes
        return self.sample.rows, seqlen_q, portable.Window(*window, offset=seqlen_k - seqlen_q)

    def operand(
        self, x: Tensor, data: Tensor, scale: Tensor, axis: str, of_keys: bool
    ) -> statistics.Counts:
        counts = statistics.whole(x, scale)
        if self.sample is None:
            nothing = torch.tensor(math.nan)
            zero = torch.zeros((), dtype=torch.int64, device=x.device)
            return (
                counts
                | {"sampled": zero, "saturated": zero, "underflowed": zero}
                | statistics.range_of(nothing)
            )
        data, scale = ops._plain((data, scale), axis)
        parts = [
            self._dense(t, of_keys, axis == "colwise" and t is scale) for t in (x, data, scale)
        ]
        return counts | statistics.operand(*(self.sample.of(t, of_keys) for t in parts), axis)

    def rows(self, data: Tensor, scale: Tensor) -> Tensor:
        """Sampled rows of a rowwise operand of the query side, dequantised (n, rows, D)."""
        data, scale = ops._plain((data, scale), "rowwise")
        return statistics.values(
            *(self.sample.rows_of(self._dense(t, False)) for t in (data, scale))
        )

    def keys(self, data: Tensor, scale: Tensor) -> Tensor:
        """A rowwise operand of the key side, dequantised (n, Sk, D)."""
        data, scale = ops._plain((data, scale), "rowwise")
        return statistics.values(
            *(self.sample.of(self._dense(t, True), True) for t in (data, scale))
        )

    def payload(self, data: Tensor) -> Tensor:
        return self.sample.of(self._dense(data, True), True).float()

    def token_factor(self, scale: Tensor) -> Tensor:
        """(n, Sk) fp32."""
        return decode_e8m0(self.sample.of(self._dense(scale, True), True)).squeeze(-1)

    def raw_rows(self, x: Tensor) -> Tensor:
        return self.sample.rows_of(self._dense(x, False)).float()

    def lse_rows(self, lse: Tensor) -> Tensor:
        """(n, rows) of lse (B, H, Sq), or (H, T) if packed."""
        return self.raw_rows((lse.transpose(-1, -2)).unsqueeze(-1)).squeeze(-1)
