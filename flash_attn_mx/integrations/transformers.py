"""Hugging Face transformers: attn_implementation="flash_attn_mx".

    import flash_attn_mx as famx
    famx.integrations.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="flash_attn_mx")

register() makes two functions known: `make_mask`, called once per forward pass, which says what is hidden, and
`attention`, called by every layer. What make_mask hands over (None where only causality hides anything):

    bool  (B, q + k, 1 + W)  which queries, then which keys, are real; (B, 0, 1 + W) where all are
    int32 (n + 1, 1 + W)     starts of the sequences that are packed in the rows, over the B * S tokens
    int8  (B, S, 1 + W)      torch.compile only: 1 where a packed sequence seems to begin
    bool  (B, 1, q, k)       any other pattern, whole; served in high precision

W is the sliding window (0 = none): a size, because the only thing that a model hands on is a tensor, and some models
have their window in the mask alone. The last dimension is expanded and takes no memory. Padding is never computed:
real tokens are gathered to the front and run as packed sequences, with sizes that do not depend on the data, so nothing
waits for the device and torch.compile makes one graph.
"""

import importlib.metadata
import inspect
from typing import Callable, NamedTuple, Optional, Union

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import dispatch
from .._errors import MAX_HEAD_DIM, fail
from ..interface import flash_attn_func, flash_attn_varlen_func

NAME = "flash_attn_mx"
LAYER_ATTRIBUTE = "_flash_attn_mx_layer"
_HINT = "pip install 'transformers>=5.10'"
_NEEDS = "flash_attn_mx.integrations.transformers needs transformers >= 5.10"

# Arguments of attention functions that change the result and that are not served here.
_REFUSED = (
    "alibi_slopes",
    "attention_similarity",
    "block_indices",
    "block_table",
    "head_mask",
    "indices",
    "k_cache",
    "sinks",
    "v_cache",
)


# --- registration ---------------------------------------------------------------------------------------------


def register() -> None:
    """Makes attn_implementation="flash_attn_mx" known to transformers: attention and mask function. Idempotent.

    Raises: ImportError (transformers missing, or of a version without the interfaces).
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
        from transformers import modeling_flash_attention_utils as flash_utils
    except ImportError as error:
        raise ImportError(f"{_NEEDS}: {_HINT} ({error})") from error
    load = getattr(flash_utils, "_lazy_imports", None)
    # Before 5.10 or so mask functions got the positions of the queries instead of their number.
    if "q_length" not in inspect.signature(masking_utils.sdpa_mask).parameters or load is None:
        version = importlib.metadata.version("transformers")
        raise ImportError(f"{_NEEDS}, got {version}: {_HINT}")
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, make_mask)
    # A name with "flash" in it makes transformers load functions of that name, from its hub if need be.
    if getattr(load, "serves", None) == NAME:
        return

    def load_ours(implementation, *args, **kwargs):
        if implementation == NAME:
            return _refuse_direct, _refuse_direct, None, _refuse_direct, _refuse_direct
        return load(implementation, *args, **kwargs)

    load_ours.serves = NAME
    flash_utils._lazy_imports = load_ours


def name_layers(model: torch.nn.Module) -> None:
    """Lets every attention call of the model say its dotted module name as its layer, for policies and monitor().

    Without it a call says the module's `layer_idx`, which an encoder and a decoder both count from 0.
    """
    for name, module in model.named_modules():
        setattr(module, LAYER_ATTRIBUTE, name)


def _refuse_direct(*args, **kwargs):
    raise NotImplementedError(
        'this model calls transformers\' flash attention functions itself, which attn_implementation="flash_attn_mx" '
        "does not replace; use sdpa with famx.sdpa.activate()"
    )


# --- the mask, once per forward pass --------------------------------------------------------------------------


class _Pattern(NamedTuple):
    """What a mask function of transformers hides, besides padding and what a window cuts."""

    causal: bool = False
    packed: Optional[Tensor] = None  # (B, S): number of the sequence in its row


def _pattern(function: Callable) -> Optional[_Pattern]:
    """The pattern, read from the closures that transformers builds; None for one that is not known here."""
    if function.__module__ != "transformers.masking_utils":
        return None
    name = function.__qualname__.split(".")[0]
    closure = function.__closure__ or ()
    inside = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in closure)))
    if name == "causal_mask_function":
        return _Pattern(causal=True)
    if name in ("bidirectional_mask_function", "sliding_window_overlay", "chunked_overlay"):
        return _Pattern()  # transformers refuses "flash" names where a chunk would cut
    if name == "sliding_window_bidirectional_overlay":
        return _Pattern()
    if name == "packed_sequence_mask_function":
        return _Pattern(packed=inside["packed_sequence_mask"])
    if name == "remap_positions_for_packed_sequence":
        return _pattern(inside["mask_function"])
    if name == "and_masks":
        parts = [_pattern(part) for part in inside["mask_functions"]]
        if None in parts:
            return None
        packed = [part.packed for part in parts if part.packed is not None]
        return _Pattern(any(part.causal for part in parts), packed[0] if packed else None)
    return None


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Union[int, Tensor] = 0,
    kv_offset: int = 0,
    mask_function: Optional[Callable] = None,
    attention_mask: Optional[Tensor] = None,
    local_size: Optional[int] = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: Union[str, torch.device] = "cpu",
    config=None,
    **kwargs,
) -> Optional[Tensor]:
    """The mask function for transformers' AttentionMaskInterface; the module's docstring has the forms of the result.

    Query i stands at position q_offset + i, key j at kv_offset + j; attention_mask (B, positions) marks real tokens.
    """
    from transformers import masking_utils as utils

    if attention_mask is not None and attention_mask.dim() == 3:
        return attention_mask  # generate() makes the mask, and the model asks for it again
    mask_function = mask_function or utils.causal_mask_function
    tracing = torch.compiler.is_compiling()
    # Without leave to skip the mask, something was laid over it, or the model wants to see it, or compiled decoding.
    plain = allow_is_causal_skip or allow_is_bidirectional_skip or q_length == 1

    def whole() -> Tensor:
        return utils.sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            local_size, allow_is_causal_skip=False, use_vmap=use_vmap, device=device,
        )  # fmt: skip

    if use_vmap:
        return whole()
    if not tracing:
        pattern = _pattern(mask_function)
    elif plain:
        pattern = _Pattern(
            not allow_is_bidirectional_skip
            and mask_function is not utils.bidirectional_mask_function
        )
    else:
        pattern = None
    window = _window(local_size, kv_length, pattern is None or pattern.causal)
    if tracing and not plain:
        named = (utils.causal_mask_function, utils.bidirectional_mask_function)
        if mask_function in named or attention_mask is not None or q_length != kv_length:
            return whole()
        return _widen(_probe_starts(mask_function, batch_size, q_length, device), window)
    if pattern is None or not (plain or pattern.packed is not None):
        return whole()
    if pattern.packed is not None:
        return _widen(_starts(pattern.packed), window)
    real = _real_tokens(
        batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask, pattern.causal, config, device
    )  # fmt: skip
    if real is not None and window and not _in_one_run(real[:, q_length:], tracing):
        return whole()
    if real is not None and not tracing and bool(real.all()):
        real = None
    if real is None and not window:
        return None
    return _widen(
        torch.ones(batch_size, 0, dtype=torch.bool, device=device) if real is None else real, window
    )


def _window(local_size: Optional[int], kv_length: int, causal: bool) -> int:
    """1 + the number of tokens seen to the left (and right); 0 if that cuts nothing.

    transformers counts a causal window with the current token, a bidirectional one without.
    """
    if local_size is None:
        return 0
    size = local_size if causal else local_size + 1
    return size if kv_length > size else 0


def _widen(flags: Tensor, window: int) -> Tensor:
    """flags (...) as (..., 1 + window), without memory."""
    return flags.unsqueeze(-1).expand(*flags.shape, 1 + window)


def _real_tokens(
    batch_size, q_length, kv_length, q_offset, kv_offset, attention_mask, causal, config, device
) -> Optional[Tensor]:
    """(B, q + k) bool: the queries, then the keys, that are tokens; None where all must be."""
    # A static cache has room for tokens to come, and says its fill as a tensor.
    room = causal and (isinstance(q_offset, Tensor) or q_offset + q_length < kv_offset + kv_length)
    if attention_mask is None and not room:
        return None
    queries = torch.ones(batch_size, q_length, dtype=torch.bool, device=device)
    keys = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    if room:
        keys = keys & (torch.arange(kv_length, device=device) + kv_offset < q_offset + q_length)
    if attention_mask is not None:
        missing = max(0, kv_offset + kv_length - attention_mask.shape[-1])
        marks = F.pad(attention_mask, (0, missing))
        keys = keys & marks[:, kv_offset : kv_offset + kv_length]
        if causal:
            queries = marks.index_select(1, torch.arange(q_length, device=device) + q_offset)
        elif q_length == kv_length and not _may_attend_across(config):
            queries = keys
    return torch.cat([queries, keys], dim=1)


def _may_attend_across(config) -> bool:
    """Whether queries and keys may be different tokens, so that padding of the keys says nothing about the queries."""
    names = (
        "is_encoder_decoder",
        "add_cross_attention",
        "encoder_hidden_size",
        "cross_attention_frequency",
    )
    return config is None or any(getattr(config, name, None) for name in names)


def _in_one_run(keys: Tensor, tracing: bool) -> bool:
    """Whether no row has padding between its keys, which a window of transformers would count and ours would not."""
    runs = keys[:, 0].int() + (keys[:, 1:] & ~keys[:, :-1]).sum(-1)
    if not tracing:
        return bool((runs <= 1).all())
    torch._assert_async(
        (runs <= 1).all(),
        "flash_attn_mx: padding between tokens and a sliding window, under torch.compile",
    )
    return True


def _starts(packed: Tensor) -> Tensor:
    """(1, n + 1) int32: where the sequences of the rows begin, among all B * S tokens; and the end."""
    first = torch.ones_like(packed[:, :1], dtype=torch.bool)
    begins = torch.cat([first, packed[:, 1:] != packed[:, :-1]], dim=1).flatten()
    offsets = F.pad(begins.nonzero().flatten(), (0, 1), value=begins.numel())
    return offsets.to(torch.int32).unsqueeze(0)


def _probe_starts(mask_function: Callable, batch_size: int, length: int, device) -> Tensor:
    """(B, S) int8: 1 where a token does not see the one before it. The data decide, so a graph can only ask here."""
    row = torch.arange(batch_size, device=device).unsqueeze(1)
    token = torch.arange(1, length, device=device).unsqueeze(0)
    head = torch.zeros((), dtype=torch.long, device=device)
    ahead = mask_function(row, head, token - 1, token)
    torch._assert_async(
        ~ahead.any(), "flash_attn_mx: a mask that is not causal, under torch.compile: not served"
    )
    before = mask_function(row, head, token, token - 1).expand(batch_size, length - 1)
    return F.pad((~before).to(torch.int8), (1, 0))


# --- the attention, in every layer ----------------------------------------------------------------------------


class _Packing(NamedTuple):
    """Tokens as packed sequences. order: real tokens first, (B * S,); place: its inverse; None = as they stand."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    order_q: Optional[Tensor] = None
    place_q: Optional[Tensor] = None
    order_k: Optional[Tensor] = None
    place_k: Optional[Tensor] = None


class _Hidden(NamedTuple):
    """What a mask says: packed sequences, or a whole mask; and the window (0 = none)."""

    packing: Optional[_Packing] = None
    mask: Optional[Tensor] = None
    window: int = 0


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Optional[Tensor],
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    is_causal: Optional[bool] = None,
    sliding_window: Optional[int] = None,
    softcap: Optional[float] = None,
    s_aux: Optional[Tensor] = None,
    position_bias: Optional[Tensor] = None,
    output_attentions: bool = False,
    deterministic: Optional[bool] = None,
    cu_seq_lens_q: Optional[Tensor] = None,
    cu_seq_lens_k: Optional[Tensor] = None,
    max_length_q: Optional[int] = None,
    max_length_k: Optional[int] = None,
    **kwargs,
) -> tuple[Tensor, Optional[Tensor]]:
    """The attention function for transformers' AttentionInterface.

    Args: query (B, H, Sq, D), key (B, Hkv, Sk, D), value (B, Hkv, Sk, Dv); attention_mask: what make_mask gave, a
      (B, Sk) padding mask, or a (B, 1 or H, Sq, Sk) mask; the others as transformers means them.
    Returns: out (B, Sq, H, Dv), and the weights (B, H, Sq, Sk) if output_attentions.
      softcap, s_aux (sinks), position_bias, output_attentions, D > 256: computed in fp32, dropout and whole masks by
      torch's SDPA, each with a FallbackWarning.
    Raises: NotImplementedError (an argument that is not served), ValueError, TypeError as flash_attn_func.
    """
    _refuse(kwargs)
    if query.shape[0] == 1 != key.shape[0]:  # learned queries
        query = query.expand(key.shape[0], -1, -1, -1)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    lengths = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    hidden = _read_mask(attention_mask, q, k, causal, lengths)
    window = hidden.window or sliding_window or 0
    window_size = (window - 1, window - 1) if window else (-1, -1)
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    special = {
        "softcap": softcap is not None,
        "sinks": s_aux is not None,
        "position_bias": position_bias is not None,
        "output_attentions": bool(output_attentions),
        f"head_dim above {MAX_HEAD_DIM}": max(q.shape[-1], v.shape[-1]) > MAX_HEAD_DIM,
    }
    if any(special.values()):
        names = ", ".join(name for name, given in special.items() if given)
        text = f"{names}: not computed by the MXFP8 paths"
        dispatch.announce(dispatch.plan_high_precision(names, text))
        seen = _visible(hidden, q, k, causal, window_size)
        out, weights = _in_fp32(q, k, v, seen, scale, dropout, softcap, s_aux, position_bias)
        return out, weights if output_attentions else None
    if hidden.mask is not None or (dropout and hidden.packing is not None):
        mask = _visible(hidden, q, k, causal, window_size)
        causal, window_size, packing = False, (-1, -1), None
    else:
        mask, packing = None, hidden.packing
    width = v.shape[-1]
    q, k, v = _equal_widths(q, k, v)
    options = {
        "softmax_scale": scale,
        "causal": causal,
        "window_size": window_size,
        "deterministic": bool(deterministic),
        "layer": getattr(module, LAYER_ATTRIBUTE, getattr(module, "layer_idx", None)),
    }
    if packing is None:
        out = flash_attn_func(q, k, v, attn_mask=mask, dropout_p=dropout, **options)
    else:
        out = _run_packed(q, k, v, packing, options)
    return out[..., :width], None


def _refuse(kwargs: dict) -> None:
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{name}: attn_implementation={NAME!r} does not serve it")
    if type(kwargs.get("cache")).__name__ == "PagedAttentionCache":
        raise NotImplementedError(
            f"continuous batching: attn_implementation={NAME!r} has no paged cache"
        )


def _equal_widths(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with one head size, padded by zeros, which change neither scores nor output."""
    width = max(q.shape[-1], v.shape[-1])
    return tuple(
        x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v)
    )


def _read_mask(
    mask: Optional[Tensor], q: Tensor, k: Tensor, causal: bool, lengths: tuple
) -> _Hidden:
    """Understands the forms of the module's docstring, and transformers' arguments cu_seq_lens and max_length."""
    batch, sq, sk = q.shape[0], q.shape[1], k.shape[1]
    given = lengths[0] is not None
    if given != (lengths[1] is not None):
        fail(ValueError, "cu_seq_lens_q, cu_seq_lens_k", "both or neither", "one")
    packing = _given_packing(lengths, sq, sk) if given else None
    if mask is None:
        return _Hidden(packing)
    if mask.dim() == 4:
        if given:
            fail(
                ValueError,
                "attention_mask",
                "no whole mask beside cu_seq_lens_q",
                tuple(mask.shape),
            )
        return _Hidden(mask=mask)
    if mask.dim() == 2 and mask.shape == (batch, sk):  # a model that hands on the user's own mask
        keys = mask.bool()
        queries = keys[:, sk - sq :] if causal else keys.new_ones(batch, sq)
        mask = _widen(torch.cat([queries, keys], dim=1), 0)
    if mask.dim() != 3 or mask.dtype not in (torch.bool, torch.int32, torch.int8):
        fail(
            ValueError,
            "attention_mask",
            f"None, ({batch}, {sk}) or 4 dimensions",
            tuple(mask.shape),
        )
    flags, window = mask[..., 0], mask.shape[-1] - 1
    if mask.dtype == torch.int32:
        cu = flags[0]
        return _Hidden(packing or _Packing(cu, cu, sq, sk), None, window)
    if mask.dtype == torch.int8:
        if not given:
            torch._assert_async(
                (flags == 0).all(),
                "flash_attn_mx: position_ids of packed sequences under torch.compile; pass cu_seq_lens_q, "
                "cu_seq_lens_k, max_length_q and max_length_k to the model",
            )
        return _Hidden(packing, None, window)
    if flags.shape[1] == 0:
        return _Hidden(packing, None, window)
    if given:
        fail(ValueError, "attention_mask", "no padding beside cu_seq_lens_q", "some")
    if flags.shape[1] != sq + sk:
        expected = f"flags of {sq} queries and {sk} keys"
        fail(ValueError, "attention_mask", expected, f"{flags.shape[1]} flags")
    return _Hidden(_gathered(flags[:, :sq], flags[:, sq:]), None, window)


def _given_packing(lengths: tuple, sq: int, sk: int) -> _Packing:
    cu_q, cu_k, max_q, max_k = lengths
    return _Packing(
        cu_q.to(torch.int32), cu_k.to(torch.int32), sq if max_q is None else int(max_q), sk if max_k is None else int(max_k)
    )  # fmt: skip


def _gathered(real_q: Tensor, real_k: Tensor) -> _Packing:
    """The packing of padded rows (B, S): one sequence a row, of its real tokens."""
    cu_q, order_q, place_q = _gather(real_q)
    cu_k, order_k, place_k = _gather(real_k)
    return _Packing(
        cu_q, cu_k, real_q.shape[1], real_k.shape[1], order_q, place_q, order_k, place_k
    )


def _gather(real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(cu_seqlens, order, place): x[order] has the real tokens in front, and [place] takes that back."""
    cu = F.pad(real.sum(-1).cumsum(0), (1, 0))
    flat = real.flatten()
    place = torch.where(flat, flat.cumsum(0) - 1, cu[-1] + (~flat).cumsum(0) - 1)
    order = torch.empty_like(place).scatter_(
        0, place, torch.arange(flat.numel(), device=flat.device)
    )
    return cu.to(torch.int32), order, place


def _run_packed(q: Tensor, k: Tensor, v: Tensor, packing: _Packing, options: dict) -> Tensor:
    """MXFP8 attention on packed sequences; rows of padding come back as 0."""

    def packed(x: Tensor, order: Optional[Tensor]) -> Tensor:
        x = x.reshape(-1, *x.shape[2:])
        return x if order is None else x.index_select(0, order)

    out = flash_attn_varlen_func(
        packed(q, packing.order_q), packed(k, packing.order_k), packed(v, packing.order_k),
        packing.cu_q, packing.cu_k, packing.max_q, packing.max_k, **options,
    )  # fmt: skip
    out = out if packing.place_q is None else out.index_select(0, packing.place_q)
    return out.view(q.shape)


# --- high precision -------------------------------------------------------------------------------------------


def _visible(
    hidden: _Hidden, q: Tensor, k: Tensor, causal: bool, window: tuple[int, int]
) -> Optional[Tensor]:
    """The whole mask (B or 1, 1, Sq, Sk), True where the key is seen, or the given one; None where all are seen."""
    if hidden.mask is not None:
        return hidden.mask
    if hidden.packing is None and not causal and window == (-1, -1):
        return None
    cu_q, cu_k, _, _, _, place_q, _, place_k = hidden.packing or (None,) * 8
    sequence_q, behind_q = _positions(q, cu_q, place_q)
    sequence_k, behind_k = _positions(k, cu_k, place_k)
    ahead = behind_q.unsqueeze(2) - behind_k.unsqueeze(1)  # of the query, where the key stands
    seen = (sequence_q.unsqueeze(2) == sequence_k.unsqueeze(1)) & (sequence_q >= 0).unsqueeze(2)
    if causal:
        seen = seen & (ahead <= 0)
    if window[0] >= 0:
        seen = seen & (ahead >= -window[0]) & (ahead <= window[1])
    return seen.unsqueeze(1)


def _positions(x: Tensor, cu: Optional[Tensor], place: Optional[Tensor]) -> tuple[Tensor, Tensor]:
    """Of the tokens of x (B, S, ..): number of its sequence, -1 for padding, and how many of it stand behind the token."""
    batch, length = x.shape[:2]
    if cu is None:
        token = torch.arange(length, device=x.device).unsqueeze(0)
        return torch.zeros_like(token), length - 1 - token
    if place is None:
        place = torch.arange(batch * length, device=x.device)
    sequence = torch.searchsorted(cu[1:].to(place.dtype), place, right=True)
    behind = cu[(sequence + 1).clamp(max=cu.shape[0] - 1)] - 1 - place
    sequence = torch.where(place < cu[-1], sequence, -1)
    return sequence.view(batch, length), behind.view(batch, length)


def _in_fp32(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Optional[Tensor],
    scale: float,
    dropout: float,
    softcap: Optional[float],
    sinks: Optional[Tensor],
    bias: Optional[Tensor],
) -> tuple[Tensor, Tensor]:
    """(out (B, Sq, H, Dv), weights (B, H, Sq, Sk)) as formulas, with a whole score matrix; for what torch's SDPA lacks."""
    device = q.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else q.dtype
    with torch.autocast(device, enabled=False):
        q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
        batch, heads, length, _ = q.shape
        q = q.reshape(batch, k.shape[1], -1, length, q.shape[-1])
        scores = (q @ k.unsqueeze(2).transpose(-1, -2) * scale).view(batch, heads, length, -1)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            scores = scores + bias
        boolean = mask is not None and mask.dtype == torch.bool
        if (
            boolean
        ):  # a finite number, so that a row that sees nothing has no NaN, in the backward neither
            scores = scores.masked_fill(~mask, torch.finfo(torch.float32).min)
        elif mask is not None:
            scores = scores + mask
        if sinks is not None:
            sink = sinks.float().view(1, -1, 1, 1).expand(batch, heads, length, 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(-1)[..., : k.shape[2]]
        weights = weights * mask if boolean else weights
        weights = F.dropout(weights, dropout) if dropout else weights
        grouped = weights.view(batch, k.shape[1], -1, length, weights.shape[-1])
        out = (grouped @ v.unsqueeze(2)).reshape(batch, heads, length, -1)
        return out.transpose(1, 2).to(dtype), weights.to(dtype)
