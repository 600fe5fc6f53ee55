"""README's support matrix is what the code does."""

import re
from pathlib import Path

from flash_attn_mx import support

README = Path(__file__).parents[2] / "README.md"


def test_readme_support_matrix_is_generated_from_code():
    """Every cell comes from a call; after a change run `python -m flash_attn_mx support` and paste its output."""
    shown = re.search(
        r"<!-- support:begin -->\n(.*?)\n<!-- support:end -->", README.read_text(), flags=re.DOTALL
    )
    assert shown, "README.md has no support matrix"
    assert shown[1] == support.matrix()


def test_support_probe_sees_a_wrong_result():
    """The probe can fail: NaN output is not a yes."""
    feature = support.Feature(
        "broken", call=lambda q, k, v, **options: q * float("nan"), grad=False
    )
    assert support.try_feature(feature, "auto") == "wrong"
