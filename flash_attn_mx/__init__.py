"""MXFP8 flash attention for PyTorch. See flash_attn_func; docs/numerics.md has the arithmetic."""

from ._version import __version__
from .dispatch import (
    FallbackWarning,
    Plan,
    get_backend,
    get_policy,
    keep_high_precision,
    load_policy,
    set_backend,
    set_fallback,
    set_policy,
)
from .info import is_available, is_installed
from .integrations import sdpa
from .integrations.aten_alias import register_aten_alias
from .interface import explain, flash_attn_func, flash_attn_mx_func, flash_attn_varlen_func
from .monitoring import Limits, monitor
from .policy import LayerRule, Policy
from .quantize import MXTensor, dequantize, quantize_mxfp8

__all__ = [
    "FallbackWarning",
    "LayerRule",
    "Limits",
    "MXTensor",
    "Plan",
    "Policy",
    "__version__",
    "dequantize",
    "explain",
    "flash_attn_func",
    "flash_attn_mx_func",
    "flash_attn_varlen_func",
    "get_backend",
    "get_policy",
    "is_available",
    "is_installed",
    "keep_high_precision",
    "load_policy",
    "monitor",
    "quantize_mxfp8",
    "register_aten_alias",
    "sdpa",
    "set_backend",
    "set_fallback",
    "set_policy",
]
