"""A tiny GPT trained for three steps through the public API, its attention running entirely as emulated kernels, forward and
backward, follows the losses of the same model on the portable path."""

import pytest
import torch
from torch import nn

import flash_attn_mx as famx
from flash_attn_mx import portable, sm100

SEQLEN, HEADS, HEAD_DIM, VOCABULARY = 128, 2, 64, 61


class TinyGPT(nn.Module):
    def __init__(self, backend):
        super().__init__()
        width = HEADS * HEAD_DIM
        self.backend = backend
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
        attention = famx.flash_attn_func(q, k, v, causal=True, backend=self.backend)
        x = x + self.proj(attention.flatten(2))
        x = x + self.mlp(self.norm2(x))
        return self.head(self.norm3(x))


def losses(backend, steps=3):
    torch.manual_seed(0)
    model = TinyGPT(backend)
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


@pytest.mark.skipif(
    bool(sm100.WHY_NO_EMULATOR or sm100.WHY_NO_HOST or not sm100.BACKWARD_INSTANCES),
    reason=sm100.WHY_NO_EMULATOR or sm100.WHY_NO_HOST or "no backward kernel is built",
)
def test_training_follows_the_portable_path(monkeypatch):
    reference = losses("portable")
    for name in ("forward", "backward"):  # none of it computes the emulated losses
        monkeypatch.setattr(portable, name, None)
    emulated = losses("emulator")
    assert reference[-1] < 0.8 * reference[0]
    for a, b in zip(emulated, reference, strict=True):
        assert abs(a - b) <= 1e-3 * b
