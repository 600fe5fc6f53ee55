"""Fixtures of the packaging tests: setup.py as a module, copies of the tree, Python in a subprocess."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(command, **options):
    """A finished subprocess with its output as text, stderr in stdout's stream where not asked for."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **options}
    return subprocess.run([str(word) for word in command], timeout=900, **options)


def clean_environment(**extra):
    """This process's environment without what steers the build, plus extra."""
    steers = ("FAMX_", "CUDA_HOME", "CUDA_PATH", "MAX_JOBS", "CXX", "PYTHONPATH")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(steers)}
    return {**kept, **extra}


@pytest.fixture
def root():
    return ROOT


@pytest.fixture
def setup_py(monkeypatch):
    """setup.py as a module, with nothing of the environment steering it."""
    for name in [n for n in os.environ if n not in clean_environment()]:
        monkeypatch.delenv(name)
    spec = importlib.util.spec_from_file_location("famx_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def package(tmp_path):
    """A copy of the Python package without anything built, importable from the returned folder."""
    ignored = shutil.ignore_patterns("*.so", "_device", "__pycache__")
    shutil.copytree(ROOT / "flash_attn_mx", tmp_path / "flash_attn_mx", ignore=ignored)
    shutil.copy(ROOT / "csrc/ops/schemas.def", tmp_path / "flash_attn_mx")
    return tmp_path


@pytest.fixture
def tree(tmp_path):
    """A copy of what a build reads; csrc/ops holds one trivial source, so that building it is quick."""
    ignored = shutil.ignore_patterns("*.so", "_device", "__pycache__")
    shutil.copytree(ROOT / "flash_attn_mx", tmp_path / "flash_attn_mx", ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "README.md").write_text("A copy for tests.\n")
    shutil.copytree(ROOT / "csrc/kernels", tmp_path / "csrc/kernels")
    (tmp_path / "csrc/ops").mkdir()
    shutil.copy(ROOT / "csrc/ops/schemas.def", tmp_path / "csrc/ops")
    (tmp_path / "csrc/ops/one.cpp").write_text("int one() { return 1; }\n")
    return tmp_path


@pytest.fixture
def python():
    """python(code, folder, **environment): runs code with folder first on the path."""

    def call(code, folder=ROOT, **environment):
        environment = clean_environment(PYTHONPATH=str(folder), **environment)
        return run([sys.executable, "-c", code], cwd=folder, env=environment)

    return call


@pytest.fixture
def build():
    """build(tree, *arguments, **environment): setup.py in a copy, without device code unless asked for."""

    def call(tree, *arguments, **environment):
        environment = clean_environment(**{"FAMX_CUDA_ARCHS": "none", **environment})
        return run([sys.executable, "setup.py", *arguments], cwd=tree, env=environment)

    return call


@pytest.fixture
def fake_nvcc(tmp_path):
    """fake_nvcc(version, codes): a program that answers like nvcc of that version."""

    def make(version, codes="sm_90 sm_100 sm_103", folder="fake"):
        path = tmp_path / folder / "bin" / "nvcc"
        path.parent.mkdir(parents=True)
        path.write_text(
            "#!/bin/sh\n"
            f'[ "$1" = --list-gpu-code ] && echo "{codes}" && exit\n'
            f'echo "Cuda compilation tools, release {version.rsplit(".", 1)[0]}, V{version}"\n'
        )
        path.chmod(0o755)
        return str(path)

    return make


@pytest.fixture
def venv(tmp_path):
    """venv(*arguments, **environment): the Python of a fresh environment."""
    folder = tmp_path / "venv"
    result = run([sys.executable, "-m", "venv", folder])
    assert result.returncode == 0, result.stdout

    def call(*arguments, **environment):
        command = [folder / "bin/python", *arguments]
        return run(command, cwd=folder, env=clean_environment(**environment))

    return call


@pytest.fixture
def install(venv):
    """install(*arguments, **environment): pip install in that environment; returns what it printed."""

    def call(*arguments, **environment):
        result = venv("-m", "pip", "install", *arguments, **environment)
        assert result.returncode == 0, result.stdout
        return result.stdout

    return call
