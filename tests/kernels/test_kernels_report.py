"""What the built forward kernels are made of: no spills, block-scaled MMAs, and the instruction budget of the loop."""

import sys
from pathlib import Path

import pytest

from flash_attn_mx import _native

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import kernels_report

SLOTS = 660  # of a softmax warp per 128x128 tile: what leaves 806 cycles per tile in reach
XU_CYCLES = 700
CYCLES_PER_MUFU = 8


@pytest.mark.parametrize("kernel", ["attn_fwd_d64_bf16", "attn_fwd_d128_bf16"])
def test_forward_kernel_keeps_its_budget(kernel):
    ptx = _native.DEVICE / f"{kernel}.sm_100f.ptx"
    if not ptx.is_file():
        pytest.skip(f"{kernel} is not built")
    try:
        kernels_report.find_tool("ptxas"), kernels_report.find_tool("nvdisasm")
    except SystemExit as missing:
        pytest.skip(str(missing))
    row = kernels_report.report(ptx)
    assert (row["stack"], row["spills"], row["local"]) == (0, 0, 0)
    assert row["umma"] > 0 and row["other_mma"] == 0
    # setmaxnreg only moves registers that the launch gave; waiting for more never ends.
    assert 256 * row["softmax"] + 128 * row["others"] <= 384 * row["launch"]
    assert sum(row["loop"].values()) <= SLOTS
    assert row["loop"]["MUFU"] * CYCLES_PER_MUFU <= XU_CYCLES
    # The committed report is of this code.
    committed = kernels_report.REPORT.read_text()
    assert all(
        line in committed for line in kernels_report.render([row]).splitlines() if kernel in line
    )
