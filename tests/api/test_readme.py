"""What README and docs say can be run is run; files that they name exist."""

import re
from pathlib import Path

import pytest

import flash_attn_mx as famx

ROOT = Path(__file__).parents[2]
SNIPPETS = [
    pytest.param(snippet, id=f"{page}-{number}")
    for page in ("README.md", "docs/integrations.md", "docs/monitor.md")
    for number, snippet in enumerate(
        re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    )
]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(autouse=True)
def settings():
    yield
    famx.sdpa.deactivate()
    famx.set_backend("auto")
    famx.set_fallback("silent")
    famx.set_policy()


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_readme_snippet_runs(snippet, capsys, tmp_path, monkeypatch):
    """Each Python block stands alone."""
    monkeypatch.chdir(tmp_path)
    if "transformers" in snippet:
        pytest.importorskip("transformers", minversion="5.10")
    exec(compile(snippet, "snippet", "exec"), {"__name__": "snippet"})


def test_readme_has_snippets():
    """The pattern above finds them."""
    assert len(SNIPPETS) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_pages_name_files_that_exist(page):
    """Relative links, and paths in backticks that begin with a folder of this repository."""
    text = page.read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    paths = re.findall(
        r"`((?:csrc|flash_attn_mx|tests|benchmarks|docs|third_party)/[\w./-]+)`", text
    )
    missing = [p for p in links if not (page.parent / p).exists()]
    missing += [p for p in paths if not (ROOT / p).exists()]
    assert not missing
