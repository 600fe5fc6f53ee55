"""-delta as bwd_preprocess writes it for the MMA (csrc/kernels/attn_bwd/delta.cuh)."""

import pytest
import torch
from kernels.attn_bwd import problem_of, quantise
from kernels.test_attn_bwd import folder

from flash_attn_mx import layouts, sm100

WEIGHTS = torch.tensor([1.0] * 4 + [2.0**-8] * 2, dtype=torch.float64)
SMALLEST = 2.0**-144  # the last place of the last piece


def decoded(delta, rows):
    """(row tiles, 2560) bytes -> values of the first rows, float64; what they hold besides."""
    payload = delta[:, : 128 * 16].reshape(-1, 16)
    scale = torch.stack(
        [layouts.from_swizzled128x4(x, 128, 1) for x in delta[:, 128 * 16 :]]
    ).flatten()
    pieces = payload[:, :6].contiguous().view(torch.float8_e4m3fn).double()
    values = (pieces * WEIGHTS).sum(-1) * torch.exp2(scale.double() - 127)
    return values[:rows], payload[:, 6:], values[rows:]


def values():
    """Floats of every exponent with random and with full mantissas, both signs; 0, Inf, NaN."""
    generator = torch.Generator().manual_seed(0)
    exponent = torch.arange(255).repeat(4)
    mantissa = torch.randint(0, 1 << 23, exponent.shape, generator=generator)
    mantissa[:255], mantissa[255:510] = (1 << 23) - 1, 1 << 22 | 1
    sign = torch.randint(0, 2, exponent.shape, generator=generator)
    bits = sign << 31 | exponent << 23 | mantissa
    x = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
    return torch.cat([x, torch.tensor([0.0, torch.inf, -torch.inf, torch.nan])])


@pytest.mark.parametrize("head_dim", [64, 128])
def test_pieces_hold_every_bit(head_dim):
    """dO is 1 in one channel and 0 in the others, so that delta is O there."""
    x = values()
    rows = len(x)
    dout = torch.zeros(1, rows, 1, head_dim)
    dout[..., 5] = 1.0
    out = torch.ones_like(dout)
    out[0, :, 0, 5] = x
    keys = torch.ones(1, 3, 1, head_dim)
    ops = quantise(torch.ones_like(dout), keys, keys, dout)
    problem = problem_of(ops._replace(out=out, lse=torch.zeros(1, 1, rows)))
    instance = sm100.find_backward(head_dim, torch.float32, torch.float32)
    records = sm100.backward_records(problem, instance)
    for t in problem.scratch:
        t.view(torch.uint8).fill_(0xFF)
    sm100.emulate_records(records[:1], problem, folder(head_dim), checks="all")
    got, padding, behind = decoded(problem.scratch[1], rows)
    assert (padding == 0).all() and (behind == 0).all()
    want = -x.double()
    finite = torch.isfinite(x)
    assert torch.isnan(got[~finite]).all()
    error = (got - want).abs()[finite]
    assert (error[want[finite].abs() >= SMALLEST * 2.0**23] == 0).all()
    assert (error <= SMALLEST / 2).all()
