"""Every case of the list C01–C67 is a test, or stands in cases_pending.md with what it waits for."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
CASES = {f"{n:02d}" for n in range(1, 68)}


def _tested():
    """{case number: files} of the functions named test_cNN_…"""
    found = {}
    for path in TESTS.rglob("test_*.py"):
        for number in re.findall(
            r"^def test_c(\d\d)_", path.read_text("utf-8"), flags=re.MULTILINE
        ):
            found.setdefault(number, set()).add(path.name)
    return found


def _pending():
    rows = (TESTS / "cases_pending.md").read_text("utf-8").splitlines()
    return {
        n
        for row in rows
        if row.startswith("| C")
        for n in re.findall(r"\bC(\d\d)\b", row.split("|")[1])
    }


def test_every_case_is_tested_or_pending():
    """A case that nobody looks at would be forgotten."""
    assert CASES - set(_tested()) - _pending() == set()


def test_no_unknown_case_number():
    """A typo in a number hides a missing case."""
    assert set(_tested()) | _pending() <= CASES
