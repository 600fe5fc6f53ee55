"""Fixture of the emulator's tests: the extension, built on demand."""

import importlib.util
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session", autouse=True)
def extension():
    """Builds csrc/emulator when the package came without it."""
    if importlib.util.find_spec("flash_attn_mx._emulator") is None:
        spec = importlib.util.spec_from_file_location(
            "emulator_build", ROOT / "csrc" / "emulator" / "build.py"
        )
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        build.build()
