"""docs/emulator-isa.md: every row of isa.def with its evidence, made from isa.def and the H200 record.

`python tests/emulator/isa_table.py` writes it; test_isa_coverage.py compares.
"""

import pathlib
import sys

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[i]) for i in (1, 2)]
from emulator import isa_forms, probes, record_probes  # noqa: E402

from flash_attn_mx import _emulator, emulator  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATH = ROOT / "docs" / "emulator-isa.md"
RECORD = ROOT / "tests" / "emulator" / "data" / "h200.json"
HEAD = """# Instruction forms of the emulator

Made by `python tests/emulator/isa_table.py` from `csrc/emulator/isa.def` and `tests/emulator/data/h200.json`; do not edit.
In a form, `{{.a|.b}}` is one of these or nothing, `(.a|.b)` exactly one. Every alternative of every form is executed by the
tests named in the last column (`tests/emulator/test_isa_coverage.py` fails otherwise).

Evidence: **hw:sm_90**: probes of the form ran on an {gpu} (driver {driver}) and gave the emulator's bits, but for what
`tests/emulator/test_recorded.py` lists; "not" names alternatives that no such probe has. **cutlass**, **peers**: kernels of
CUTLASS's tutorials or of other projects that use the form give right results. **spec**: the PTX ISA's text only. *ignored*: accepted,
without effect. No form has been compared with an sm_100 GPU.

{counts}

| form | PTX ISA | evidence | recorded on the {gpu} | tests |
|---|---|---|---|---|
"""


def recorded():
    """Row index -> (number of recorded probes that are evidence for it, instructions that they probe)."""
    record = record_probes.load(RECORD)
    rows = {}
    for p in probes.PROBES.values():
        if p.name in record["probes"]:
            for i in {_emulator.match(op) for op in p.ops}:
                n, ops = rows.get(i, (0, set()))
                rows[i] = n + 1, ops | {op for op in p.ops if _emulator.match(op) == i}
    return record, rows


def text():
    record, rows = recorded()
    lines, counts = [], {}
    for i, (form, decoder, section, evidence, tests) in enumerate(emulator.isa_table()):
        n, ops = rows.get(i, (0, ()))
        have = set().union(*(isa_forms.spelled(form, op) for op in ops))
        lack = sorted({c for _, c in isa_forms.alternatives(form) - have if c}) if ops else []
        there = f"{n} probes" + (f"; not {' '.join(lack)}" if lack else "") if n else ""
        how = f"{evidence}, *ignored*" if decoder == "ignored" else evidence
        counts[evidence] = counts.get(evidence, 0) + 1
        cell = form.replace("|", "\\|")
        lines.append(f"| `{cell}` | {section} | {how} | {there} | {tests.replace('.py', '')} |")
    said = ", ".join(f"{n} {k}" for k, n in sorted(counts.items()))
    head = HEAD.format(gpu=record["gpu"].removeprefix("NVIDIA "), driver=record["driver"], counts=f"{len(lines)} forms: {said}.")  # fmt: skip
    return head + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PATH.write_text(text())
    print(PATH)
