"""Inputs for attention tests, and one call that returns everything there is to compare."""

from typing import NamedTuple, Optional

import tolerances as tol
import torch

import flash_attn_mx as famx
from flash_attn_mx import reference


class Problem(NamedTuple):
    """q, dout (B, Sq, H, D); k, v (B, Sk, Hkv, D); or packed, without B."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    def to(self, *args):
        return Problem(*(t.to(*args) for t in self))


class Result(NamedTuple):
    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    slack: Optional[torch.Tensor] = None  # of out, where the oracle made it


def normal_problem(
    seqlen_q, seqlen_k=None, *, batch=1, heads=1, heads_k=None, head_dim=64,
    dtype=torch.float32, device="cpu", seed=0,
):  # fmt: skip
    """Standard normal q, k, v, dout; the same values on every device."""
    generator = torch.Generator().manual_seed(seed)
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    heads_k = heads if heads_k is None else heads_k

    def draw(seqlen, count):
        return torch.randn(batch, seqlen, count, head_dim, generator=generator)

    q, k = draw(seqlen_q, heads), draw(seqlen_k, heads_k)
    v, dout = draw(seqlen_k, heads_k), draw(seqlen_q, heads)
    return Problem(q, k, v, dout).to(device, dtype)


def uniform_problem(seqlen_q, values, *, batch=1, head_dim=32, dtype=torch.float32, device="cpu"):
    """q = k = 0, so that a row's output is the mean of the visible values; dout = 1.

    values: the value of each key, the same in every channel.
    """
    values = torch.as_tensor(values, dtype=torch.float32)
    v = values.view(1, -1, 1, 1).expand(batch, -1, 1, head_dim).contiguous()
    q = torch.zeros(batch, seqlen_q, 1, head_dim)
    return Problem(q, torch.zeros_like(v), v, torch.ones_like(q)).to(device, dtype)


def attend(problem, **options):
    """Forward and backward through flash_attn_func. Returns Result."""
    leaves = [t.detach().clone().requires_grad_() for t in problem[:3]]
    out, lse = famx.flash_attn_func(*leaves, return_lse=True, **options)
    out.backward(problem.dout)
    return Result(out.detach(), lse.detach(), *(t.grad for t in leaves))


def attend_packed(problem, cu_q, cu_k=None, max_q=None, max_k=None, **options):
    """Forward and backward through flash_attn_varlen_func. cu_q, cu_k: lists of offsets."""
    cu_k = cu_q if cu_k is None else cu_k
    longest = [
        max((b - a for a, b in zip(cu, cu[1:], strict=False)), default=0) for cu in (cu_q, cu_k)
    ]
    offsets = [torch.tensor(cu, dtype=torch.int32, device=problem.q.device) for cu in (cu_q, cu_k)]
    leaves = [t.detach().clone().requires_grad_() for t in problem[:3]]
    out, lse = famx.flash_attn_varlen_func(
        *leaves,
        *offsets,
        longest[0] if max_q is None else max_q,
        longest[1] if max_k is None else max_k,
        return_lse=True,
        **options,
    )
    out.backward(problem.dout)
    return Result(out.detach(), lse.detach(), *(t.grad for t in leaves))


def pack(problems):
    """Packs problems of batch 1 along the tokens. Returns (Problem, cu_q, cu_k)."""
    packed = Problem(*(torch.cat([p[i][0] for p in problems]) for i in range(4)))
    cu_q, cu_k = [0], [0]
    for p in problems:
        cu_q.append(cu_q[-1] + p.q.shape[1])
        cu_k.append(cu_k[-1] + p.k.shape[1])
    return packed, cu_q, cu_k


def exact(problem, **options):
    """Result of float64 attention. options: softmax_scale, causal, window_size."""
    options = _reference_options(options)
    leaves = [t.detach().double().cpu().requires_grad_() for t in problem[:3]]
    out, lse = reference.attention_fp64(*leaves, **options)
    out.backward(problem.dout.double().cpu())
    return Result(out.detach(), lse.detach(), *(t.grad for t in leaves))


def oracle(problem, out_dtype=torch.float64, **options):
    """Result of reference.py; O is rounded to out_dtype before the backward."""
    problem = problem.to("cpu")
    forward = reference.attention_forward(
        *problem[:3], exp2_error=tol.exp2_error(), **_reference_options(options)
    )
    gradients = reference.attention_backward(problem.dout, forward, out=forward.out.to(out_dtype))
    return Result(forward.out, forward.lse, gradients.dq, gradients.dk, gradients.dv, forward.slack)


def _reference_options(options):
    options = dict(options)
    if "window_size" in options:
        options["window"] = options.pop("window_size")
    return options
