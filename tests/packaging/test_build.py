"""setup.py run on small copies of the tree: what it makes, what stops it, what it says."""

import json
import subprocess
import sys
import zipfile

import pytest


def test_c37_metadata_needs_neither_torch_nor_git(tree, python):
    """A build front end asks for metadata in an environment where nothing is installed."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from setuptools import build_meta\n"
        "print(build_meta.get_requires_for_build_wheel())\n"
        "print(build_meta.prepare_metadata_for_build_wheel('.'))"
    )
    result = python(code, tree, PATH="/nowhere")
    assert result.returncode == 0, result.stdout
    text = (tree / "flash_attn_mx-0.1.0.dist-info/METADATA").read_text()
    assert "\nVersion: 0.1.0\n" in text and "\nLicense-Expression: BSD-3-Clause\n" in text
    required = [line for line in text.splitlines() if line.startswith("Requires-Dist")]
    assert [line for line in required if "extra ==" not in line] == ["Requires-Dist: torch>=2.11"]


def test_c37_portable_wheel_says_what_it_lacks_and_works(tree, build, python):
    """No compiler, no CUDA: one wheel for every machine, whose calls work."""
    result = build(tree, "bdist_wheel", "--dist-dir", "dist", FAMX_NATIVE="0")
    assert result.returncode == 0, result.stdout
    assert "Blackwell kernels: NOT included: FAMX_CUDA_ARCHS=none" in result.stdout
    assert "C++ operators: NOT built: FAMX_NATIVE=0" in result.stdout
    (wheel,) = (tree / "dist").iterdir()
    assert wheel.name == "flash_attn_mx-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tree / "installed")
    code = (
        "import torch, flash_attn_mx as famx\n"
        "famx.set_fallback('silent')\n"
        "q = torch.randn(1, 40, 2, 32, requires_grad=True)\n"
        "famx.flash_attn_func(q, q, q, causal=True).sum().backward()\n"
        "print(famx.__file__, q.grad.isfinite().all().item(), famx.is_available())"
    )
    result = python(code, tree / "installed")
    expected = f"{tree}/installed/flash_attn_mx/__init__.py True False"
    assert result.stdout.strip() == expected, result.stdout


def test_build_is_incremental_and_shows_progress(tree, build):
    """Only what changed is compiled again; C36: the steps are counted while they run."""
    (tree / "csrc/ops/two.cpp").write_text("int two() { return 2; }\n")
    first = build(tree, "build_ext", "--inplace", MAX_JOBS="3")
    assert first.returncode == 0, first.stdout
    assert "[3/3 " in first.stdout and "3 jobs" in first.stdout
    library = tree / "flash_attn_mx/_C.so"
    stamp = library.stat().st_mtime_ns
    second = build(tree, "build_ext", "--inplace")
    assert "no work to do" in second.stdout and library.stat().st_mtime_ns == stamp
    (tree / "csrc/ops/two.cpp").write_text("int three() { return 3; }\n")
    third = build(tree, "build_ext", "--inplace")
    assert "[2/2 " in third.stdout and "two.o" in third.stdout and "one.o" not in third.stdout
    assert library.stat().st_mtime_ns != stamp


def test_build_drops_what_is_no_longer_built(tree, build):
    """A library of an earlier build must not be loaded beside newer Python code."""
    assert build(tree, "build_ext", "--inplace").returncode == 0
    assert (tree / "flash_attn_mx/_C.so").is_file()
    assert build(tree, "build_ext", "--inplace", FAMX_NATIVE="0").returncode == 0
    assert not (tree / "flash_attn_mx/_C.so").exists()
    host = json.loads((tree / "flash_attn_mx/_device/manifest.json").read_text())["host"]
    assert host["native"] is False and host["reason"] == "FAMX_NATIVE=0"


def test_native_wheel_serves_every_python(tree, build):
    """No Python symbol inside, hence py3-none; the source tree's own leftovers stay out."""
    (tree / "flash_attn_mx/_device").mkdir()
    (tree / "flash_attn_mx/_device/stale.ptx").write_text("left over")
    result = build(tree, "bdist_wheel", "--dist-dir", "dist")
    assert result.returncode == 0, result.stdout
    (wheel,) = (tree / "dist").iterdir()
    assert wheel.name.startswith("flash_attn_mx-0.1.0-py3-none-") and "any" not in wheel.name
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in ("_C.so", "schemas.def", "_device/manifest.json", "__init__.py"):
        assert f"flash_attn_mx/{name}" in names
    assert not [name for name in names if "stale" in name or name.startswith(("tests", "csrc"))]


def test_host_code_that_does_not_compile_stops_the_build_raises(tree, build):
    (tree / "csrc/ops/one.cpp").write_text("this is no C++\n")
    for arguments in (["build_ext", "--inplace"], ["bdist_wheel"]):
        result = build(tree, *arguments)
        assert result.returncode != 0 and "a compile step failed" in result.stdout


def test_undefined_symbol_stops_the_build_raises(tree, build):
    """C35 at its root: such a library would only fail at a user's import."""
    if sys.platform != "linux":
        pytest.skip("the linker option is Linux's")
    (tree / "csrc/ops/one.cpp").write_text("void gone(); void use() { gone(); }\n")
    result = build(tree, "build_ext", "--inplace")
    assert result.returncode != 0 and "gone" in result.stdout


def test_emulator_is_optional_for_users_not_for_developers(tree, build, python):
    """A broken emulator fails `make`, and an installation goes on without it and says so."""
    (tree / "csrc/emulator").mkdir()
    bindings = tree / "csrc/emulator/bindings.cpp"
    bindings.write_text("this is no C++\n")
    assert build(tree, "build_ext", "--inplace").returncode != 0
    result = build(tree, "bdist_wheel", "--dist-dir", "dist")
    assert result.returncode == 0, result.stdout
    assert "PTX emulator: NOT built: it did not compile" in result.stdout
    bindings.write_text(
        "#include <pybind11/pybind11.h>\n"
        'PYBIND11_MODULE(_emulator, m) { m.def("two", [] { return 2; }); }\n'
    )
    result = build(tree, "build_ext", "--inplace")
    assert result.returncode == 0, result.stdout
    path = next((tree / "flash_attn_mx").glob("_emulator*.so"))
    code = (
        "import importlib.util as u\n"
        f"spec = u.spec_from_file_location('_emulator', {str(path)!r})\n"
        "module = u.module_from_spec(spec); spec.loader.exec_module(module); print(module.two())"
    )
    assert python(code, tree).stdout.strip() == "2"


WRITER = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("famx_setup", sys.argv[1])
setup = importlib.util.module_from_spec(spec); spec.loader.exec_module(setup)
setup.WORK = setup.Path(sys.argv[2])
for _ in range(20):
    for byte in b"ab":
        setup.write_if_changed(setup.WORK / "product", bytes([byte]) * 300_000)
with setup.build_lock():
    (setup.WORK / "inside").mkdir()  # fails where another process is inside
    (setup.WORK / "inside").rmdir()
"""


def test_c41_concurrent_builds_do_not_corrupt_each_other(root, tmp_path):
    """Nothing is compiled at run time, so ranks share no cache; builds that run at once take turns,
    and a reader sees a product whole or not at all."""
    command = [sys.executable, "-c", WRITER, str(root / "setup.py"), str(tmp_path)]
    writers = [subprocess.Popen(command) for _ in range(8)]
    while any(writer.poll() is None for writer in writers):
        if (tmp_path / "product").exists():
            data = (tmp_path / "product").read_bytes()
            assert len(data) == 300_000 and data == data[:1] * len(data)
    assert [writer.returncode for writer in writers] == [0] * 8
