"""Which alternatives of which rows of isa.def an instruction spells; and which of them a run of tests has executed.

As a pytest plugin (`-p emulator.isa_forms`, with `ISA_FORMS=out.json`) it writes, per test file, the instructions that launches
executed to the end, or that raised.
"""

import json
import os
import pathlib
import re


def groups(pattern):
    """Parts of a pattern: ("", text) or (kind, alternatives) with kind "{" (or nothing) or "(" (exactly one)."""
    out = []
    for text, kind, choice in re.findall(r"([^({]+)|([({])([^)}]+)[)}]", pattern):
        out.append((kind, choice.split("|")) if kind else ("", text))
    return out


def alternatives(pattern):
    """Every alternative that a row lists, as (index of the group, text); "" is an optional group left out."""
    out = set()
    for i, (kind, choice) in enumerate(groups(pattern)):
        if kind:
            out |= {(i, c) for c in choice}
        if kind == "{":
            out.add((i, ""))
    return out


def spelled(pattern, op):
    """The alternatives that op takes in the first way that matches, or None. The emulator's own matcher, once more."""
    parts = groups(pattern)

    def match(i, rest):
        if i == len(parts):
            return [] if not rest else None
        kind, choice = parts[i]
        if not kind:
            return match(i + 1, rest[len(choice) :]) if rest.startswith(choice) else None
        for c in [*choice, *([""] if kind == "{" else [])]:
            if rest.startswith(c):
                more = match(i + 1, rest[len(c) :])
                if more is not None:
                    return [(i, c), *more]
        return None

    return match(0, op)


# ---- plugin ----------------------------------------------------------------------------------------------------------
_executed = {}


def pytest_runtest_call(item):
    _executed["now"] = _executed.setdefault(pathlib.Path(str(item.fspath)).name, set())


def pytest_configure(config):
    from flash_attn_mx import emulator

    launch = emulator.Kernel.launch

    def recorded(self, *args, **options):
        try:
            report = launch(self, *args, **options)
        except emulator.EmulatorError as e:
            _executed["now"].update(re.findall(r": line \d+: (\S+): \[", str(e)))
            raise
        _executed["now"].update(report.opcodes)
        return report

    emulator.Kernel.launch = recorded


def pytest_unconfigure(config):
    _executed.pop("now", None)
    out = {name: sorted(ops) for name, ops in _executed.items()}
    pathlib.Path(os.environ["ISA_FORMS"]).write_text(json.dumps(out))
