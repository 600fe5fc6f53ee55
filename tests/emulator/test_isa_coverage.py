"""isa.def keeps its word: the tests that a row names execute every alternative that it lists, and its evidence is what it says."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from emulator import isa_forms, isa_table

from flash_attn_mx import _emulator, emulator

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROWS = emulator.isa_table()
FILES = sorted({f for row in ROWS for f in row[4].split()})


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """File -> instructions that its tests execute: they run once more, in one process that watches launches."""
    out = tmp_path_factory.mktemp("isa") / "forms.json"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "emulator.isa_forms", "-p", "no:xdist", "-p", "no:cacheprovider", *(f"tests/emulator/{f}" for f in FILES)]  # fmt: skip
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"ISA_FORMS": str(out), "PYTHONPATH": path}, capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    return json.loads(out.read_text())


def missing(row, executed):
    """Alternatives of the row that its tests do not execute, and tests that execute none of its forms."""
    form, _, _, _, tests = row
    left, idle = isa_forms.alternatives(form), []
    for f in tests.split():
        own = [op for op in executed[f] if _emulator.match(op) >= 0 and ROWS[_emulator.match(op)] == row]  # fmt: skip
        if not own:
            idle.append(f)
        for op in own:
            left -= set(isa_forms.spelled(form, op))
    return sorted(c or f"group {g} left out" for g, c in left), idle


def test_every_alternative_of_every_row_is_executed_by_its_tests(executed):
    wrong = {row[0]: missing(row, executed) for row in ROWS}
    wrong = {k: v for k, v in wrong.items() if v[0] or v[1]}
    assert not wrong, "\n".join(f"{k}: not executed {a}, idle tests {b}" for k, (a, b) in wrong.items())  # fmt: skip


def test_what_nobody_executes_is_noticed():
    row = next(r for r in ROWS if r[0].startswith("popc"))
    none, half = {f: [] for f in FILES}, {f: ["popc.b32"] for f in FILES}
    assert missing(row, none) == ([".b32", ".b64"], row[4].split())
    assert missing(row, half) == ([".b64"], [])
    assert missing(row, {f: ["popc.b32", "popc.b64"] for f in FILES}) == ([], [])


def test_evidence_is_hw_exactly_where_a_recorded_probe_is():
    _, recorded = isa_table.recorded()
    says = {i for i, row in enumerate(ROWS) if row[3] == "hw:sm_90"}
    assert says == set(recorded), [ROWS[i][0] for i in says ^ set(recorded)]


def test_the_table_in_the_documentation_is_up_to_date():
    assert isa_table.PATH.read_text() == isa_table.text(), "run: python tests/emulator/isa_table.py"


def test_the_matcher_here_is_the_emulators():
    """What the plugin takes for a spelling, and which row it counts for, is what the loader says."""
    for row in ROWS:
        ops = [op for op in ("add.s32", "ld.global.v2.b32", "popc.b64", "cvt.rn.bf16x2.f32", "mbarrier.try_wait.parity.shared::cta.b64") if isa_forms.spelled(row[0], op)]  # fmt: skip
        for op in ops:
            assert ROWS[_emulator.match(op)][0] == row[0]
