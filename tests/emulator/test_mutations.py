"""Every defect of mutations.py is noticed, and the kernel without one is not."""

import pytest
from emulator import mutations

if not mutations.PTX.is_file():
    pytest.skip(f"{mutations.PTX.name} is not built", allow_module_level=True)


def order_of(text):
    order, _, seed = text.partition("/")
    return order, int(seed or 0)


@pytest.mark.parametrize("order,seed", mutations.ORDERS)
@pytest.mark.parametrize("problem", ["plain", "causal"])
def test_without_defect(problem, order, seed):
    assert mutations.Problem.get(problem).verdict(mutations.PTX.read_text(), order, seed) == ""


@pytest.mark.parametrize("m", mutations.MUTATIONS, ids=lambda m: f"{m.kind}, {m.name}")
def test_defect_is_caught(m):
    """In the order that catches it; `python tests/emulator/mutations.py` prints what all of them say."""
    assert mutations.verdict(m, *order_of(m.caught)) != ""


def test_number_of_kinds():
    assert len({m.kind for m in mutations.MUTATIONS}) >= 15


@pytest.mark.slow
@pytest.mark.parametrize("m", mutations.MISSED, ids=lambda m: f"{m.kind}, {m.name}")
def test_defect_is_missed(m):
    """docs/emulator.md says that these are not seen: whoever makes the emulator see one changes that text too."""
    assert all(mutations.verdict(m, *o) == "" for o in mutations.ORDERS)
