"""What support.py's cells rest on: who computed a call, and whether its values and gradients are right."""

import contextlib
import warnings
from typing import Callable, Iterator, NamedTuple, Optional

import torch
from torch import Tensor

from . import dispatch, portable, sm100
from .dispatch import FallbackWarning

# Relative errors of one head, in the Frobenius norm. MXFP8's three fraction bits give 3 to 8 % on these inputs, bf16 and
# fp16 results at most 0.3 %; a mask, a scale or a head that is lost gives more than 20 %.
MXFP8_ERROR = 0.15
EXACT_ERROR = 0.01


class Wrong(Exception):
    """A call that gave something else than it should; the text goes into the cell."""


class Trial(NamedTuple):
    """A call that was made. ran: ("portable" | "emulator" | "sm100", "forward" | "backward") for each MXFP8 computation."""

    results: Optional[list[Tensor]]
    error: Optional[Exception]
    ran: list[tuple[str, str]]
    told: bool

    def check_served_by(self, backend: str, backward: bool) -> None:
        """Raises Wrong unless that backend, and no other, computed the forward, and the backward where one was asked for."""
        expected = {(backend, "forward")} | ({(backend, "backward")} if backward else set())
        if set(self.ran) != expected:
            names = ", ".join(sorted({" ".join(entry) for entry in self.ran}))
            raise Wrong(f"computed by {names}")

    @property
    def manner(self) -> str:
        return "with notice" if self.told else "silently"

    def verdict(self, served: str, path: str) -> str:
        """The cell of a call with the right results: `served` if MXFP8 computed them, else the path that did, and its notice."""
        if not self.ran:
            return f"{path}, {self.manner}"
        if self.told:
            raise Wrong(f"a notice of {path}, which did not serve")
        return served

    def refusal(self, late: bool = False) -> str:
        """The cell of a call that raised, which this package does itself before any work. late: in the backward, or torch does."""
        frame = self.error.__traceback__
        while frame.tb_next:
            frame = frame.tb_next
        ours = frame.tb_frame.f_globals.get("__name__", "").startswith(f"{__package__}.")
        if not late and (self.ran or not ours):
            raise Wrong(f"{type(self.error).__name__}: {self.error}")
        return f"no ({type(self.error).__name__})"


@contextlib.contextmanager
def _who_runs() -> Iterator[list]:
    ran, before = [], []

    def watch(module, direction: str, named: bool) -> None:
        function = getattr(module, direction)

        def call(*args):
            ran.append((args[0] if named else "portable", direction))
            return function(*args)

        before.append((module, direction, function))
        setattr(module, direction, call)

    for direction in ("forward", "backward"):
        watch(portable, direction, named=False)
        watch(sm100, direction, named=True)
    try:
        yield ran
    finally:
        for module, direction, function in before:
            setattr(module, direction, function)


def attempt(call: Callable[[], list[Tensor]], refusals: tuple) -> Trial:
    """Makes the call from a fixed seed, with every notice given anew. refusals: classes of errors that mean no."""
    results, problem = None, None
    with warnings.catch_warnings(record=True) as caught, _who_runs() as ran:
        warnings.simplefilter("always")
        dispatch.forget_warnings()
        torch.manual_seed(1)
        try:
            results = call()
        except refusals as error:
            problem = error
    notices = [str(w.message) for w in caught if issubclass(w.category, FallbackWarning)]
    left = ("high_precision path", "in high precision", "torch path")
    told = any(words in notice for notice in notices for words in left)
    return Trial(results, problem, ran, told)


def errors(got: list[Tensor], want: list[Tensor]) -> list[list[float]]:
    """For each tensor the relative error of each head (next to last dimension), in the Frobenius norm. Raises Wrong."""
    table = []
    for x, exact in zip(got, want, strict=True):
        if x.shape != exact.shape:
            raise Wrong(f"shape {tuple(x.shape)} for {tuple(exact.shape)}")
        x, exact = (t.detach().double().movedim(-2, 0).flatten(1) for t in (x, exact))
        if not x.isfinite().all():
            raise Wrong("not finite")
        # All zero (no keys): then anything else is infinitely wrong.
        table.append(((x - exact).norm(dim=1) / exact.norm(dim=1)).nan_to_num(0.0).tolist())
    if max(max(row) for row in table) > MXFP8_ERROR:
        worst = max(range(len(table)), key=lambda i: max(table[i]))
        raise Wrong(f"{('out', 'dq', 'dk', 'dv')[worst]} off by {max(table[worst]):.0%}")
    return table
