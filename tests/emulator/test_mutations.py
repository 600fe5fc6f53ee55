"""Every defect of mutations.py is noticed, and the kernel without one is not."""

import pytest
from emulator import mutations

for ptx in (mutations.PTX, mutations.BACKWARD_PTX):
    if not ptx.is_file():
        pytest.skip(f"{ptx.name} is not built", allow_module_level=True)


def order_of(text):
    order, _, seed = text.partition("/")
    return order, int(seed or 0)


@pytest.mark.parametrize("order,seed", mutations.ORDERS)
@pytest.mark.parametrize("problem", ["plain", "causal", "square", "backward"])
def test_without_defect(problem, order, seed):
    p = mutations.Problem.get(problem)
    assert p.verdict(p.ptx.read_text(), order, seed) == ""


@pytest.mark.parametrize("m", mutations.MUTATIONS, ids=lambda m: f"{m.kind}, {m.name}")
def test_defect_is_caught(m):
    """In the order that catches it; `python tests/emulator/mutations.py` prints what all of them say."""
    assert mutations.verdict(m, *order_of(m.caught)) != ""


def test_number_of_kinds():
    assert len({m.kind for m in mutations.MUTATIONS}) >= 15
