"""Loading the native library and importing the package where something does not fit."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch

import flash_attn_mx as famx
from flash_attn_mx import __main__, _native, info

CALL = """
import flash_attn_mx as famx
import torch
famx.set_fallback("silent")
torch.manual_seed(0)
q = torch.randn(1, 40, 2, 32)
print("sum", famx.flash_attn_func(q, q, q).double().sum().item())
"""
IMPORT = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import flash_attn_mx
    import json, decimal
for w in caught:
    print("warning", w.category.__name__, w.message)
"""


def compile_library(path, source, *link):
    """A shared library that loads nowhere; undefined symbols are allowed, as at the time of C35."""
    if not shutil.which("g++"):
        pytest.skip("needs g++")
    unit = path.with_suffix(".cpp")
    unit.write_text(source)
    subprocess.run(["g++", "-shared", "-fPIC", unit, "-o", path, *link], check=True)


def old_abi(path):
    """What a binary for an older torch looks like: a C++ symbol that no torch of today exports."""
    source = "namespace c10 { struct Error { Error(int); }; }\nc10::Error* e = new c10::Error(1);\n"
    compile_library(path, source)


def missing_library(path):
    """Needs a CUDA run time that is not there."""
    stub = path.parent / "libcudart_of_another_cuda.so.1"
    compile_library(stub, "int stub() { return 0; }", "-Wl,-soname,libcudart_of_another_cuda.so.1")
    source = "int stub(); int use() { return stub(); }"
    compile_library(path, source, f"-L{stub.parent}", f"-l:{stub.name}")
    stub.unlink()


def not_a_library(path):
    path.write_text("downloaded by halves")


@pytest.mark.parametrize(
    "make, first",
    [(old_abi, ""), (old_abi, "import torch\n"), (missing_library, ""), (not_a_library, "")],
    ids=["old-abi", "old-abi-after-torch", "missing-library", "not-a-library"],
)
def test_c35_library_that_does_not_fit_gives_one_warning(package, python, make, first):
    """Import goes on in PyTorch; built-for and found versions are named, mangled symbols are not."""
    make(package / "flash_attn_mx/_C.so")
    (package / "flash_attn_mx/_device").mkdir()
    manifest = {"host": {"native": True, "torch_headers": "2.19.3+cu150"}}
    (package / "flash_attn_mx/_device/manifest.json").write_text(json.dumps(manifest))
    result = python(first + IMPORT + CALL, package)
    assert result.returncode == 0, result.stdout
    (warning,) = [line for line in result.stdout.splitlines() if line.startswith("warning")]
    assert "RuntimeWarning" in warning
    assert "built against torch 2.19.3+cu150" in warning
    assert f"under torch {torch.__version__}" in warning
    assert not re.search(r"_ZN|undefined symbol|c10", result.stdout)
    torch.manual_seed(0)
    q = torch.randn(1, 40, 2, 32)
    here = famx.flash_attn_func(q, q, q, backend="portable").double().sum().item()
    there = float(result.stdout.splitlines()[-1].split()[-1])
    assert there == pytest.approx(here, rel=1e-4)  # thread counts differ, hence not to the bit


def test_c35_details_are_told_on_request(package, python):
    old_abi(package / "flash_attn_mx/_C.so")
    code = "from flash_attn_mx import info; info.main(['--verbose'])"
    assert "undefined symbol" in python(code, package).stdout


def test_c35_torch_too_old_is_not_tried(monkeypatch, tmp_path):
    """dlopen against an older torch may do anything; the version alone says no."""
    monkeypatch.setattr(_native, "LIBRARY", tmp_path / "_C.so")
    (tmp_path / "_C.so").write_text("")
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    monkeypatch.setattr(torch.ops, "load_library", lambda path: pytest.fail("was loaded"))
    assert _native._try_load() == (False, "needs torch >= 2.11, found 2.9.1+cu128", "")


def test_c35_built_library_needs_only_the_stable_abi():
    """No C++ symbol of torch and no Python symbol: this is what lets one binary serve many."""
    if not _native.LIBRARY.is_file() or not shutil.which("nm"):
        pytest.skip("no library, or no nm")
    command = ["nm", "-D", "--undefined-only", str(_native.LIBRARY)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    symbols = {line.split()[-1] for line in text.splitlines()}
    assert any(symbol.startswith(("aoti_torch_", "torch_")) for symbol in symbols)
    wrong = re.compile(r"_?Py[A-Z_]|_ZNK?(3c10|2at|5torch)|cuda", re.ASCII)
    assert not [symbol for symbol in symbols if wrong.match(symbol)]


def test_c35_development_build_is_loaded():
    """Without this, every other test could pass on the PyTorch path alone, unnoticed."""
    if not _native.manifest()["host"].get("native"):
        pytest.skip(f"not built: {_native.manifest()['host'].get('reason')}")
    assert _native.status() == (True, "", "")


def test_c38_import_touches_no_device(python):
    """Neither CUDA nor NVML is asked, so a process can fork after the import."""
    code = (
        "import torch\n"
        "def touched(*a, **k): raise AssertionError('a device was touched')\n"
        "for name in ('_lazy_init', 'is_available', 'device_count', 'get_device_capability'):\n"
        "    setattr(torch.cuda, name, touched)\n"
        "import flash_attn_mx\n"
        "print('initialised', torch.cuda.is_initialized())"
    )
    assert python(code).stdout.strip() == "initialised False"


def test_import_brings_nothing_heavy(python):
    """Import adds at most 0.3 s to torch's; CPU time is compared, with room for a busy machine."""
    code = (
        "import sys, time, torch\n"
        "before, start = set(sys.modules), time.process_time()\n"
        "import flash_attn_mx\n"
        "seconds = time.process_time() - start\n"
        "new = set(sys.modules) - before\n"
        "print(seconds, *sorted(n for n in new if not n.startswith('flash_attn_mx')))"
    )
    seconds, *foreign = python(code).stdout.split()
    heavy = ("numpy", "scipy", "transformers", "matplotlib", "pybind11", "setuptools", "triton")
    heavy += ("torch._inductor", "torch._dynamo", "torch.utils.cpp_extension")
    assert not [name for name in foreign if name.startswith(heavy)]
    assert len(foreign) <= 40
    assert float(seconds) <= 0.9


def test_module_runs_without_distribution_metadata(package, python):
    """C47: a copied folder has no dist-info; the version is the package's own."""
    result = python("import flash_attn_mx; print(flash_attn_mx.__version__)", package)
    assert result.stdout.strip() == _native.__version__


def test_command_line(package):
    """`python -m` reaches the commands, and its exit status is theirs."""
    command = [sys.executable, "-m", "flash_attn_mx"]
    result = subprocess.run([*command, "info"], cwd=package, capture_output=True, text=True)
    assert result.returncode == 0 and "backends" in result.stdout, result.stderr


def test_commands_are_found_refused_or_explained(capsys, monkeypatch):
    """--json is JSON; an unknown command is refused; a missing extra is named with its remedy."""
    assert info.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["backends"]["portable"] == ""
    assert __main__.main([]) == 0 and "commands:" in capsys.readouterr().out
    assert __main__.main(["nonsense"]) == 2 and "nonsense" in capsys.readouterr().err

    def missing(name):
        raise ModuleNotFoundError(f"No module named {extra!r}", name=extra)

    monkeypatch.setattr(__main__.importlib, "import_module", missing)
    extra = "matplotlib.pyplot"
    assert __main__.main(["info"]) == 2
    assert "pip install 'flash_attn_mx[demo]'" in capsys.readouterr().err
    extra = "flash_attn_mx.gone"  # a fault of the package: not explained away
    with pytest.raises(ModuleNotFoundError):
        __main__.main(["info"])
