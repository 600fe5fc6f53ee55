"""Fixtures that every test shares."""

import pytest
import torch

import flash_attn_mx as famx


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        default="cpu",
        help="where the tests that take the device fixture put their tensors (default: cpu)",
    )
    parser.addoption(
        "--backend",
        default="portable",
        help="set_backend() of the tests that take the device fixture (default: portable)",
    )


def pytest_configure(config):
    # The oracle works on single rows: with more threads it waits for the thread pool, not for arithmetic.
    torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Where kernels are under test, what they are not built for is skipped with their own words."""
    try:
        return (yield)
    except NotImplementedError as error:
        if item.config.getoption("--backend") in ("portable", "auto") or not (
            "device" in item.fixturenames and "no sm_100 kernel has" in str(error)
        ):
            raise
        pytest.skip(str(error))


@pytest.fixture
def device(request):
    """Device of the inputs; the attention calls inside the test run on the backend under test."""
    before = famx.get_backend()
    famx.set_backend(request.config.getoption("--backend"))
    yield torch.device(request.config.getoption("--device"))
    famx.set_backend(before)
