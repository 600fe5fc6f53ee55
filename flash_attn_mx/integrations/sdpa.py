"""torch's own attention functions on MXFP8: F.scaled_dot_product_attention and torch.nn.attention.varlen.varlen_attn.

    famx.sdpa.activate()              # from now on, in the whole process
    with famx.sdpa.enabled(): ...     # for a block

Registered with torch.nn.attention as the flash attention implementation "MXFP8". Calls that MXFP8 does not take (a mask,
dropout, float64, head_dim above 256 and what set_policy excludes) run on torch's own kernel; each reason is told once
(FallbackWarning), or raised under set_fallback("error"). Masks are torch's: is_causal aligns top-left, varlen_attn's window
bottom-right. docs/integrations.md says more.
"""

import contextlib
import threading
from typing import Iterator, Optional

import torch.nn.attention

from . import _aten

NAME = "MXFP8"

_lock = threading.RLock()


class _State:
    """What the functions below were asked for; whether MXFP8 is in force is the registry's to say."""

    wanted = False  # by activate()
    blocks = 0  # enabled() blocks that are open, in any thread
    handle: Optional[_aten.Handle] = None
    replaced: Optional[str] = None  # the implementation that was active before


def _register() -> _aten.Handle:
    _State.handle = _aten.Handle()
    return _State.handle


# torch has the registry from 2.11 on; without it the handle is kept here alone.
_registry = torch.nn.attention
_HAS_REGISTRY = hasattr(_registry, "register_flash_attention_impl")
if _HAS_REGISTRY:
    _registry.register_flash_attention_impl(NAME, register_fn=_register)


def is_active() -> bool:
    """Whether torch's attention functions go to MXFP8 now."""
    return _aten.is_installed()


def activate() -> None:
    """Serves torch's attention functions with MXFP8, in every thread of the process, until deactivate().

    Another registered implementation (FA3, FA4) that is active is replaced, and comes back at deactivation. Calling it
    again changes nothing. Where CUDA is in use already, torch asks MXFP8 before cuDNN; before that, torch's cuDNN attention
    is switched off while MXFP8 is active, so call it after the model is on the GPU.
    """
    with _lock:
        _State.wanted = True
        _switch_on()


def deactivate() -> None:
    """Ends activate(): torch's own kernels serve again, unless an enabled() block is open. Without activate(), does nothing.

    Results that were computed in MXFP8 before keep their MXFP8 backward.
    """
    with _lock:
        _State.wanted = False
        _switch_off()


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """activate() for a block. Blocks nest; open blocks of any thread keep MXFP8 active in all of them.

    Enter it outside of torch.compile: a compiled function calls whatever is active when it runs.
    """
    with _lock:
        # Through torch's own activate_flash_attention_impl: then it is not ours to end.
        _State.wanted = _State.wanted or (is_active() and not _State.blocks)
        _switch_on()
        _State.blocks += 1
    try:
        yield
    finally:
        with _lock:
            _State.blocks -= 1
            _switch_off()


def _switch_on() -> None:
    if is_active():
        return
    if not _HAS_REGISTRY:
        _register()
        return
    _State.replaced = _registry.current_flash_attention_impl()
    _registry.activate_flash_attention_impl(NAME)


def _switch_off() -> None:
    if _State.wanted or _State.blocks or not is_active():
        return
    if not _HAS_REGISTRY:
        _State.handle.remove()
        return
    _registry.restore_flash_attention_impl()
    if _State.replaced is not None:
        _registry.activate_flash_attention_impl(_State.replaced)
