"""Real installations into fresh environments, by pip, as a user does it."""

import re

import pytest

pytestmark = pytest.mark.slow

USE = """
import torch, flash_attn_mx as famx
from flash_attn_mx import _native, info
q = torch.randn(1, 40, 2, 32, requires_grad=True)
famx.flash_attn_func(q, q, q, causal=True).sum().backward()
info.main([])
print("native", _native.status().loaded, "cuda", torch.cuda.is_initialized())
"""


def test_c37_isolated_install_without_torch_and_nvcc(tree, venv, install):
    """Nothing is there at build time: the portable package is installed and says so."""
    text = install("-v", "--no-deps", tree, FAMX_CUDA_ARCHS="none")
    assert "C++ operators: NOT built: torch is not installed" in text
    assert "Blackwell kernels: NOT included" in text
    assert "flash_attn_mx-0.1.0-py3-none-any.whl" in text
    shown = venv("-m", "pip", "show", "flash_attn_mx").stdout
    assert "Version: 0.1.0" in shown and "Requires: torch" in shown


def test_c37_isolated_install_beside_torch_builds_the_operators(tree, venv, install, root):
    """An isolated build hides the environment's packages; torch's headers are found all the same."""
    for path in [*(root / "csrc/ops").iterdir()]:
        (tree / "csrc/ops" / path.name).write_bytes(path.read_bytes())
    (tree / "csrc/ops/one.cpp").unlink()
    pin = re.search(r"^torch==\S+", (root / "requirements-dev.txt").read_text(), re.M).group()
    install(pin)
    text = install("-v", "--no-deps", tree, FAMX_CUDA_ARCHS="none")
    assert "C++ operators: built" in text
    result = venv("-c", USE)
    assert "native True cuda False" in result.stdout, result.stdout


def test_sdist_builds(tree, build, venv, install):
    """The source archive holds everything that a build reads."""
    result = build(tree, "sdist", "--dist-dir", "dist")
    assert result.returncode == 0, result.stdout
    (archive,) = (tree / "dist").iterdir()
    install("--no-deps", archive, FAMX_CUDA_ARCHS="none")
