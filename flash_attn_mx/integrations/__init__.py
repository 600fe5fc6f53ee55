"""How other libraries call flash_attn_mx: sdpa (torch's own attention functions), transformers (Hugging Face).

Each module is imported where it is used, `famx.integrations.transformers` on first sight; the packages that they serve
are no dependencies of this one.
"""

import importlib

_MODULES = ("transformers",)


def __getattr__(name: str):
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
