"""What the built attention kernels are made of: no spills, block-scaled MMAs, and the instruction budget of the loop."""

import sys
from pathlib import Path

import pytest

from flash_attn_mx import _native

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import kernels_report

SLOTS = 660  # of a softmax warp per 128x128 tile: what leaves 806 cycles per tile in reach
XU_CYCLES = 700
CYCLES_PER_MUFU = 8


# Of a compute warp per half tile, two of them per sub-partition: 1264 of 2871 cycles.
BACKWARD_SLOTS = 632
# Bytes per 128x128 tile at D = 128, of 2871 cycles that 2.0 PFLOPS leave. docs/backward.md says what would save more.
BACKWARD_SMEM = 2240 * 128


def checked_report(kernel):
    """The figures of one kernel; skips without kernel or tools, fails where the committed report is not of this code."""
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
    committed = kernels_report.REPORT.read_text()
    lines = kernels_report.render([row]).splitlines()
    assert all(line in committed for line in lines if kernel in line)
    return row


# setmaxnreg only moves registers that the launch gave; waiting for more never ends.


@pytest.mark.parametrize("kernel", ["attn_fwd_d64_bf16", "attn_fwd_d128_bf16"])
def test_forward_kernel_keeps_its_budget(kernel):
    row = checked_report(kernel)
    assert 256 * row["softmax"] + 128 * row["others"] <= 384 * row["launch"]
    assert sum(row["loop"].values()) <= SLOTS
    assert row["loop"]["MUFU"] * CYCLES_PER_MUFU <= XU_CYCLES


@pytest.mark.parametrize("kernel", ["attn_bwd_d64_bf16", "attn_bwd_d128_bf16"])
def test_backward_kernel_keeps_its_budget(kernel):
    row = checked_report(kernel)
    assert 256 * row["softmax"] + 256 * row["others"] <= 512 * row["launch"]
    assert sum(row["loop"].values()) <= BACKWARD_SLOTS
    assert sum(row["smem"].values()) <= BACKWARD_SMEM
    assert row["smem"]["compute: bias"] > 0 and row["smem"]["compute: scales"] > 0
    assert (
        row["loop"]["FADD2"] == 32
    )  # S·c is rounded before LSE is subtracted: ptxas has not fused the two
