"""README's support matrix is what the code does."""

import re
from pathlib import Path

import pytest
import torch

import flash_attn_mx as famx
from flash_attn_mx import sm100, support

ROOT = Path(__file__).parents[2]


def shown(page, name):
    """The table between the markers of that name."""
    text = (ROOT / page).read_text()
    table = re.search(rf"<!-- {name}:begin -->\n(.*?)\n<!-- {name}:end -->", text, flags=re.DOTALL)
    assert table, f"{page} has no table {name}"
    return table[1]


@pytest.mark.skipif(
    not sm100.INSTANCES or bool(sm100.WHY_NO_EMULATOR or sm100.WHY_NO_HOST),
    reason="README shows a build with device code, emulator and C++ operators",
)
def test_readme_support_matrix_is_generated_from_code():
    """Every cell comes from a call; after a change run `python -m flash_attn_mx support` and paste its output."""
    assert shown("README.md", "support") == support.matrix()


def test_c49_drop_in_matrix_is_generated_from_code():
    """C42, C49: each cell of the drop-ins is the outcome of a call, forward and backward."""
    assert shown("docs/integrations.md", "drop-ins") == support.drop_ins()


@pytest.mark.parametrize(
    "mutate, cell",
    [
        (lambda f: lambda *t, **options: f(*t), "wrong"),  # the option is lost
        (lambda f: lambda *t, **options: f(*t, **options) * float("nan"), "wrong"),
    ],
)
def test_drop_in_probe_sees_a_wrong_result(monkeypatch, mutate, cell):
    """The probe can fail: an option that is dropped while active, and NaN, are not a yes."""
    row = support.DropIn("broken", {"is_causal": True})
    plain = torch.nn.functional.scaled_dot_product_attention

    def function(*tensors, **options):
        return (mutate(plain) if famx.sdpa.is_active() else plain)(*tensors, **options)

    monkeypatch.setattr(support.F, "scaled_dot_product_attention", function)
    assert support.try_drop_in(row, function, row.sdpa) == cell


def test_support_probe_sees_a_wrong_result():
    """The probe can fail: NaN output is not a yes."""
    feature = support.Feature(
        "broken", call=lambda q, k, v, **options: q * float("nan"), grad=False
    )
    assert support.try_feature(feature, "auto") == "wrong"


def test_c42_transformers_matrix_is_generated_from_code():
    """C12, C13, C42, C44: masks, windows and options of transformers, forward and backward, against its own mask."""
    pytest.importorskip("transformers", minversion="5")
    assert shown("docs/integrations.md", "transformers") == support.hugging_face()


@pytest.mark.parametrize("lost", ["attention_mask", "local_size"])
def test_transformers_probe_sees_a_mask_that_is_lost(monkeypatch, lost):
    """The probe can fail: padding or a window that does not arrive is not a yes."""
    pytest.importorskip("transformers", minversion="5")
    from flash_attn_mx.integrations import transformers as ours

    make_mask = ours.make_mask
    monkeypatch.setattr(ours, "make_mask", lambda *a, **k: make_mask(*a, **{**k, lost: None}))
    rows = {row.name: row for row in support._hugging_face_rows()}
    name = (
        "padding on the left"
        if lost == "attention_mask"
        else "sliding window that only the mask knows"
    )
    assert support.try_hugging_face(rows[name]) == "wrong"
