"""The runner of PyTorch's own attention tests: it counts right, and can fail."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.slow
def test_runner_tells_outcomes_apart():
    """Served and widened, handed on, skipped, torch's own failure, and one that only MXFP8 has."""
    command = [sys.executable, str(HERE / "run.py"), "--source", str(HERE / "stand_in.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert "8 tests with MXFP8 active" in lines, done.stdout + done.stderr
    for start in (
        "1 passed; no call", "3 passed on MXFP8 within torch's", "1 passed on MXFP8 within MXFP8's",
        "1 skipped:", "1 needs another kernel", "1 fail without MXFP8 too", "1 fail with MXFP8 only",
    ):  # fmt: skip
        assert any(line.replace("  ", " ").startswith(start) for line in lines), (
            start,
            done.stdout,
        )
    assert any("test_error_is_torchs" in line for line in lines)
    assert done.returncode == 1


def test_runner_refuses_a_wrong_source(tmp_path):
    """The error names the argument."""
    command = [sys.executable, str(HERE / "run.py"), "--source", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "--source: expected a PyTorch checkout" in done.stderr
