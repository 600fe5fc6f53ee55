"""A pytest plugin: runs PyTorch's own test files with the MXFP8 kernels active.

torch's tests compare with tolerances of fp32, bf16 or fp16. Where such a comparison fails and MXFP8 has served a call in the
same test, it is judged again with the bound that this project's tests have for MXFP8 against exact attention; the test is
then marked as passed within MXFP8's accuracy. Every other failure stays one.
"""

import pytest
import torch
from torch.testing._internal.common_utils import TestCase

import flash_attn_mx as famx
from flash_attn_mx.integrations import _aten

BOUND = 0.12  # tolerances.QUALITY_SMALL

_strict = TestCase.assertEqual
_forward = _aten.Problem.forward
served, widened = [], []


def _counting_forward(self, executor):
    served.append(self.q.shape)
    return _forward(self, executor)


def _within_mxfp8(x, y):
    """Whether float tensors agree in shape, dtype, NaN and Inf, and within BOUND in the Frobenius norm."""
    if not (isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)):
        return False
    if x.shape != y.shape or not (x.is_floating_point() and y.is_floating_point()):
        return False
    x, y = x.detach().double(), y.detach().double()
    finite = torch.isfinite(y)
    if not torch.equal(torch.isfinite(x), finite) or not torch.equal(
        torch.isnan(x), torch.isnan(y)
    ):
        return False
    return bool((x - y)[finite].norm() <= BOUND * y[finite].norm() + 1e-6)


def _assert_equal(self, x, y, *args, **kwargs):
    try:
        _strict(self, x, y, *args, **kwargs)
    except AssertionError:
        if not (served and _within_mxfp8(x, y)):
            raise
        widened.append(tuple(x.shape))


def pytest_configure(config):
    famx.set_fallback("silent")
    famx.sdpa.activate()
    TestCase.assertEqual = _assert_equal
    _aten.Problem.forward = _counting_forward


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    served.clear()
    widened.clear()


def pytest_runtest_teardown(item):
    if served:
        item.user_properties.append(("mxfp8", "widened" if widened else "served"))
