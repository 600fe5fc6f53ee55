"""A tiny GPT trained for three steps whose attention runs entirely as emulated kernels, forward and backward, follows the
losses of the same model on the portable path."""

import pytest
import torch
from kernels import attn_bwd, attn_fwd
from torch import nn

from flash_attn_mx import _native

CAUSAL = (-1, 0)
SEQLEN, HEADS, HEAD_DIM, VOCABULARY = 128, 2, 64, 61


def needed(*kernels):
    for kernel in kernels:
        if not (_native.DEVICE / f"{kernel}.sm_100f.ptx").is_file():
            pytest.skip(f"{kernel} is not built")


class Attention(torch.autograd.Function):
    """Causal MXFP8 attention of (B, S, H, D) by emulated kernels, or on the portable path."""

    @staticmethod
    def forward(ctx, q, k, v, emulated):
        ops = attn_fwd.quantise(q, k, v)
        if emulated:
            ptx = _native.DEVICE / "attn_fwd_d64_fp32.sm_100f.ptx"
            out, lse, _ = attn_fwd.run(ptx, ops, window=CAUSAL)
        else:
            out, lse = attn_fwd.expected(ops, window=CAUSAL)
        ctx.save_for_backward(q, k, v)
        ctx.result, ctx.emulated = (out, lse), emulated
        return out

    @staticmethod
    def backward(ctx, dout):
        out, lse = ctx.result
        ops = attn_bwd.quantise(*ctx.saved_tensors, dout)._replace(out=out, lse=lse)
        if ctx.emulated:
            *grads, _ = attn_bwd.run(_native.DEVICE, ops, window=CAUSAL)
        else:
            grads = attn_bwd.expected(ops, window=CAUSAL)
        return *grads, None


class TinyGPT(nn.Module):
    def __init__(self, emulated):
        super().__init__()
        width = HEADS * HEAD_DIM
        self.emulated = emulated
        self.token, self.position = nn.Embedding(VOCABULARY, width), nn.Embedding(SEQLEN, width)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(width) for _ in range(3))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)
        x = x + self.proj(Attention.apply(q, k, v, self.emulated).flatten(2))
        x = x + self.mlp(self.norm2(x))
        return self.head(self.norm3(x))


def losses(emulated, steps=3):
    torch.manual_seed(0)
    model = TinyGPT(emulated)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # Each token follows from the one before, and from the one 7 before.
    text = torch.arange(SEQLEN + 1).cumsum(0) % VOCABULARY
    tokens = torch.stack([(text * 7 + 3) % VOCABULARY, (text * 11 + 5) % VOCABULARY])
    seen = []
    for _ in range(steps + 1):
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        seen.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return seen


def test_training_follows_the_portable_path():
    needed(
        "attn_fwd_d64_fp32",
        "bwd_preprocess_d64_fp32",
        "attn_bwd_d64_fp32",
        "bwd_postprocess_d64_fp32",
    )
    emulated, portable = losses(True), losses(False)
    assert portable[-1] < 0.8 * portable[0]
    for a, b in zip(emulated, portable, strict=True):
        assert abs(a - b) <= 1e-3 * b
