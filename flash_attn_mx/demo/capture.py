"""Looks at the attention of a transformers model from outside: q, k, v, the output and its gradient, layer by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Optional

import torch

Tensor = torch.Tensor
NAME = "famx_record"  # transformers would look for functions of its own behind a name with "flash" in it


@dataclasses.dataclass
class Call:
    """One attention call: q (B, H, S, D); k, v (B, Hkv, S, D); out (B, S, H, D), whose .grad is dO after a backward."""

    module: torch.nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    mask: Optional[Tensor]
    scaling: float
    causal: bool
    options: dict

    @property
    def index(self) -> Optional[int]:
        return getattr(self.module, "layer_idx", None)


class Recorder:
    """While open, every attention call of the model is served by `base` and kept in `calls`, by module name.

    base: a name known to transformers, with which the model computes as it would alone.
    edit: f(name, call arguments q, k, v) -> q, k, v, to change what the layer attends with.
    """

    def __init__(
        self, model, base: str = "sdpa", keep: bool = True, edit: Optional[Callable] = None
    ):
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self.model, self.keep, self.edit = model, keep, edit
        self.names = {id(module): name for name, module in model.named_modules()}
        self.calls: dict[str, Call] = {}
        self._function = ALL_ATTENTION_FUNCTIONS[base]
        self._before = model.config._attn_implementation
        AttentionInterface.register(NAME, self._attention)
        AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[base])

    def __enter__(self) -> Recorder:
        self.model.set_attn_implementation(NAME)
        return self

    def __exit__(self, *unused) -> None:
        self.model.set_attn_implementation(self._before)

    def _attention(self, module, query, key, value, attention_mask, **options):
        name = self.names[id(module)]
        if self.edit is not None:
            query, key, value = self.edit(name, query, key, value)
        out, weights = self._function(module, query, key, value, attention_mask, **options)
        if self.keep:
            if out.requires_grad:
                out.retain_grad()
            causal = options.get("is_causal")
            causal = getattr(module, "is_causal", False) if causal is None else causal
            scaling = options.get("scaling") or query.shape[-1] ** -0.5
            self.calls[name] = Call(
                module, query.detach(), key.detach(), value.detach(), out, attention_mask, scaling, causal, options
            )  # fmt: skip
        return out, weights
