"""DTensor sharding rules of the operators: batch and heads may be sharded, sequence and head_dim may not.

Imported only when a DTensor arrives: torch.distributed.tensor takes longer to import than this package.
"""

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

_OPS = torch.ops.flash_attn_mx
_TENSORS_FWD, _TENSORS_BWD = 8, 17  # leading tensor arguments of fwd and bwd before cu_seqlens


def _dense(args, cu_index: int) -> bool:
    return args[cu_index] is None


def _spread(placement, args, present: int):
    """The placement for each of the leading tensor arguments that is given, None for every other argument."""
    return [placement if i < present and arg is not None else None for i, arg in enumerate(args)]


def _quantize(x, axis, rounding, dtype, cu_seqlens):
    rules = [
        (
            [Replicate(), Replicate()],
            [Replicate(), None, None, None, None if cu_seqlens is None else Replicate()],
        )
    ]
    if cu_seqlens is None:
        # (B, S, H, D), (T, H, D) or (rows, cols): heads are the last dimension but one, batch is the first of four.
        ndim = len(x.shape)
        for dim in {4: (0, 2), 3: (1,), 2: ()}[ndim]:
            rules.append(([Shard(dim), Shard(dim)], [Shard(dim), None, None, None, None]))
    return rules


def _fwd(*args):
    rules = [([Replicate(), Replicate()], _spread(Replicate(), args, _TENSORS_FWD + 2))]
    if _dense(args, _TENSORS_FWD):
        rules.append(([Shard(0), Shard(0)], _spread(Shard(0), args, _TENSORS_FWD)))
        rules.append(([Shard(2), Shard(1)], _spread(Shard(2), args, _TENSORS_FWD)))
    return rules


def _bwd(*args):
    rules = [([Replicate()] * 3, _spread(Replicate(), args, _TENSORS_BWD + 2))]
    if _dense(args, _TENSORS_BWD):
        heads = _spread(Shard(2), args, _TENSORS_BWD)
        heads[2] = Shard(1)  # lse is (B, H, Sq)
        rules.append(([Shard(0)] * 3, _spread(Shard(0), args, _TENSORS_BWD)))
        rules.append(([Shard(2)] * 3, heads))
    return rules


def register() -> None:
    """Registers the rules with DTensor."""
    register_sharding(_OPS.quantize.default)(_quantize)
    register_sharding(_OPS.fwd.default)(_fwd)
    register_sharding(_OPS.bwd.default)(_bwd)


def check_placements(*tensors) -> None:
    """Refuses sequence and head_dim sharding with guidance, before DTensor would silently gather."""
    for name, x in zip("qkv", tensors):
        for placement in getattr(x, "placements", ()):
            if isinstance(placement, Shard) and placement.dim % x.dim() not in (
                (0, 2) if x.dim() == 4 else ()
            ):
                raise ValueError(
                    f"{name}: expected a DTensor that is replicated or sharded on batch (0) or heads (2), got {x.placements}; "
                    "for a sharded sequence gather k and v first (ring attention can merge partial results by the lse)"
                )
