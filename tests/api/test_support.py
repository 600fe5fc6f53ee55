"""The support matrices of README and docs are what the code does, and their probe sees what is wrong.

A cell says yes only where that backend computed forward and backward and both agree with exact attention (support.py).
The mutations below break one thing at a time and ask for another cell in every row that the thing serves.
"""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch.nn.attention import varlen

import flash_attn_mx as famx
from flash_attn_mx import interface, ops, portable, sm100, support

ROOT = Path(__file__).parents[2]
BUILT = pytest.mark.skipif(
    not sm100.INSTANCES or bool(sm100.WHY_NO_EMULATOR or sm100.WHY_NO_HOST),
    reason="README shows a build with device code, emulator and C++ operators",
)
FEATURES = {row.name: row for row in support.FEATURES}
DROP_INS = {row.name: row for row in support.DROP_INS}
SAME_NUMBERS = ("deterministic", "pre-quantised operands, swizzled scales")
# Rows of transformers that part of their mask does not change, since causality or an option of the attention says it too.
INDIFFERENT = {
    "attention_mask": ("padding on the right",),
    "local_size": ("sliding window",),
    "q_offset": (),
    "mask_function": (
        "bidirectional",
        "padding, bidirectional",
        "sliding window",
        "sliding window that only the mask knows",
        "padding inside a row, with a window",
        "packed rows (cu_seq_lens)",
    ),
}
SLOW = ("torch.compile, fullgraph",)  # a second each, and their values come the way of the others


def shown(page, name):
    """The table between the markers of that name."""
    text = (ROOT / page).read_text()
    table = re.search(rf"<!-- {name}:begin -->\n(.*?)\n<!-- {name}:end -->", text, flags=re.DOTALL)
    assert table, f"{page} has no table {name}"
    return table[1]


@BUILT
def test_readme_support_matrix_is_generated_from_code():
    """Every cell comes from a call; after a change run `python -m flash_attn_mx support` and paste its output."""
    assert shown("README.md", "support") == support.matrix()


def test_c49_drop_in_matrix_is_generated_from_code():
    """C42, C49: each cell of the drop-ins is the outcome of a call, forward and backward.

    Older torch's varlen_attn lacks arguments, which is its own TypeError; the other cells are the same.
    """
    known = inspect.signature(varlen.varlen_attn).parameters
    expected, rows = shown("docs/integrations.md", "drop-ins").splitlines(), support.DROP_INS
    for i, row in enumerate(rows, start=2):
        if set(row.varlen or ()) - set(known):
            expected[i] = f"{expected[i].rsplit('|', 2)[0]}| no (TypeError) |"
    assert expected == support.drop_ins().splitlines()


def test_c42_transformers_matrix_is_generated_from_code():
    """C12, C13, C42, C44: masks, windows and options of transformers, forward and backward, against its own mask."""
    pytest.importorskip("transformers", minversion="5.10")
    assert shown("docs/integrations.md", "transformers") == support.hugging_face()


# ---- the probe can fail: every row, one thing broken at a time -----------------------------------


def features(backend="portable"):
    """{row: cell} of README's matrix, without what takes long."""
    return {
        name: support.try_feature(row, backend)
        for name, row in FEATURES.items()
        if name not in SLOW and (backend == "portable" or row.head_dim == 64)
    }


def drop_ins():
    return {
        (name, kind): support.try_drop_in(row, function, getattr(row, kind))
        for function, kind in support.FUNCTIONS
        for name, row in DROP_INS.items()
        if name not in SLOW
    }


def transformers_rows():
    pytest.importorskip("transformers", minversion="5.10")
    rows = {row.name: row for row in support._hugging_face_rows()}
    return {name: support.try_hugging_face(row) for name, row in rows.items() if name not in SLOW}


MATRICES = {"features": features, "drop-ins": drop_ins, "transformers": transformers_rows}


@pytest.fixture(scope="module")
def sound():
    """The cells as they are."""
    return {name: cells() for name, cells in MATRICES.items()}


def scaled(function, place, factor):
    """function with one of its results multiplied."""

    def call(*args):
        results = list(function(*args))
        results[place] = results[place] * factor
        return tuple(results)

    return call


@pytest.mark.parametrize("matrix", MATRICES)
@pytest.mark.parametrize(
    "direction, place, name",
    [("forward", 0, "out"), ("backward", 0, "dq"), ("backward", 1, "dk"), ("backward", 2, "dv")],
)
def test_every_cell_sees_a_wrong_result(sound, monkeypatch, matrix, direction, place, name):
    """Output or one gradient a quarter too large: no row that MXFP8 serves stays as it was, and no other changes."""
    monkeypatch.setattr(portable, direction, scaled(getattr(portable, direction), place, 1.25))
    broken = MATRICES[matrix]()
    for row, cell in sound[matrix].items():
        served = cell.startswith(("yes", "MXFP8", "no effect"))
        without_keys = row == "length 0"  # everything is 0
        feature = FEATURES.get(row)
        forward_only = direction == "backward" and feature is not None and not feature.grad
        if served and not without_keys and not forward_only:
            assert broken[row].startswith("wrong: "), (row, broken[row])
            if direction == "backward":
                assert f"{name} off by" in broken[row], (row, broken[row])
        else:
            assert broken[row] == cell, row


@pytest.mark.parametrize("matrix", MATRICES)
def test_every_cell_sees_not_a_number(sound, monkeypatch, matrix):
    monkeypatch.setattr(portable, "forward", scaled(portable.forward, 0, float("nan")))
    broken = MATRICES[matrix]()
    for row, cell in sound[matrix].items():
        if cell.startswith(("yes", "MXFP8", "no effect")):
            assert broken[row] == "wrong: not finite", row


def test_length_0_is_seen(monkeypatch):
    """The row whose right results are all 0."""

    def ones(*args):
        out, lse = forward(*args)
        return torch.ones_like(out), lse

    forward = portable.forward
    monkeypatch.setattr(portable, "forward", ones)
    assert support.try_feature(FEATURES["length 0"], "portable").startswith("wrong: out")


@pytest.mark.parametrize(
    "name",
    [name for name, row in FEATURES.items() if row.options and name not in SAME_NUMBERS],
)
def test_every_option_that_is_lost_is_seen(name):
    """The row's options do not arrive."""
    row = FEATURES[name]
    lost = dataclasses.replace(
        row, call=lambda q, k, v, backend, **_: row.call(q, k, v, backend=backend)
    )
    for column in ("auto", "portable"):
        assert support.try_feature(lost, column).startswith("wrong: "), column


@pytest.mark.parametrize("kind", ["sdpa", "varlen"])
def test_every_option_of_a_drop_in_that_is_lost_is_seen(kind):
    """While MXFP8 is active the row's options do not arrive."""
    plain = dict((name, function) for function, name in support.FUNCTIONS)[kind]
    for name, row in DROP_INS.items():
        options = getattr(row, kind)
        if not options or "enable_gqa" in options:  # torch refuses unequal heads without it
            continue
        if kind == "varlen" and set(options) - set(
            inspect.signature(varlen.varlen_attn).parameters
        ):
            continue

        def lossy(*tensors, **given):
            return plain(*tensors, **({} if famx.sdpa.is_active() else given))

        row = dataclasses.replace(
            row, wrap=lambda function, lossy=lossy: lossy if function is plain else function
        )
        assert support.try_drop_in(row, plain, options).startswith("wrong: "), name


@pytest.mark.parametrize("lost", ["attention_mask", "local_size", "mask_function", "q_offset"])
def test_transformers_probe_sees_a_mask_that_is_lost(monkeypatch, lost):
    """Padding, a window, a pattern or an offset that does not arrive."""
    pytest.importorskip("transformers", minversion="5.10")
    from flash_attn_mx.integrations import transformers as ours

    make_mask = ours.make_mask
    nothing = {"q_offset": 0}.get(lost)
    monkeypatch.setattr(ours, "make_mask", lambda *a, **k: make_mask(*a, **{**k, lost: nothing}))
    checked = 0
    for row in support._hugging_face_rows():
        if lost in row.mask and row.name not in SLOW + INDIFFERENT[lost]:
            assert support.try_hugging_face(row).startswith("wrong: "), row.name
            checked += 1
    assert checked


@pytest.mark.parametrize("lost", ["dropout", "softcap", "s_aux", "position_bias"])
def test_transformers_probe_sees_an_option_that_is_lost(monkeypatch, lost):
    pytest.importorskip("transformers", minversion="5.10")
    from flash_attn_mx.integrations import transformers as ours

    attention = ours.attention
    options = {"output_attentions": True}  # so that what is left is still high precision

    def lossy(*args, **given):
        given.pop(lost)
        return attention(*args, **given, **options)

    monkeypatch.setattr(ours, "attention", lossy)
    (row,) = [row for row in support._hugging_face_rows() if lost in row.options]
    assert support.try_hugging_face(row).startswith("wrong: ")


@BUILT
def test_emulator_column_sees_another_backend(monkeypatch):
    """What the portable path computed is not a yes of the emulator."""
    monkeypatch.setattr(ops, "_chosen", lambda *args: "portable")
    for name, cell in features("emulator").items():
        assert cell.startswith(("no (", "wrong: ")), (name, cell)
    assert (
        support.try_feature(FEATURES["causal"], "emulator")
        == "wrong: computed by portable backward, portable forward"
    )


@pytest.mark.parametrize(
    "name, column",
    [(name, "auto") for name in FEATURES if name.startswith("policy")]
    + [("attn_mask", "auto"), ("dropout", "auto")],
)
def test_notice_that_is_not_given_is_seen(monkeypatch, name, column):
    monkeypatch.setattr(interface.dispatch, "announce", lambda chosen: None)
    assert support.try_feature(FEATURES[name], column).endswith("silently")


def test_policy_that_takes_another_head_is_seen():
    row = dataclasses.replace(
        FEATURES["policy that keeps one head in high precision"], call=support._with_policy((0,))
    )
    assert support.try_feature(row, "auto") == "wrong: heads [0] in high precision"


def test_high_precision_that_is_off_is_seen(monkeypatch):
    """By 2 %, which MXFP8 might be."""
    exact = interface._high_precision
    monkeypatch.setattr(interface, "_high_precision", lambda *args: 1.02 * exact(*args))
    assert support.try_feature(FEATURES["attn_mask"], "auto") == "wrong: not high precision"


def test_results_of_another_dtype_or_run_are_seen(monkeypatch):
    row = FEATURES["bf16 inputs"]
    wide = dataclasses.replace(row, call=lambda *a, **k: row.call(*a, **k).float())
    assert support.try_feature(wide, "auto") == "wrong: torch.float32 instead of torch.bfloat16"
    backward, runs = portable.backward, []

    def drifting(*args):
        runs.append(1)
        return tuple(x * (1 + 0.01 * len(runs)) for x in backward(*args))

    monkeypatch.setattr(portable, "backward", drifting)
    assert support.try_feature(FEATURES["deterministic"], "auto") == "wrong: a second run differs"


def test_error_of_somebody_else_is_not_a_refusal():
    """A NotImplementedError that torch raises, or one that comes after work was done."""
    row = FEATURES["bf16 inputs"]

    def torch_refuses(q, k, v, backend):
        return torch.empty(2, device="meta").cpu()

    def late(q, k, v, backend):
        row.call(q, k, v, backend=backend)
        return row.call(q, k, v, attn_mask=torch.ones(40, 40), backend="portable")

    for call in (torch_refuses, late):
        cell = support.try_feature(dataclasses.replace(row, call=call), "auto")
        assert cell.startswith("wrong: "), cell
