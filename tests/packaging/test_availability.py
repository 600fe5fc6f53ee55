"""is_available, is_installed, the table of capabilities, and `info`, under devices that are not here."""

import pytest
import torch

import flash_attn_mx as famx
from flash_attn_mx import _native, info


@pytest.fixture
def machine(monkeypatch):
    """machine(capability, archs, ...): pretends a device and an installation with attention kernels."""

    def pretend(capability=None, archs=("100f",), cuda="13.0", hip=None, loaded=True):
        rows = [
            {"name": "attn_fwd_test", "arch": arch, "ptx": "a.ptx", "fatbin": "a.fatbin"}
            for arch in archs
        ]
        manifest = {"host": {}, "device": {"reason": "no nvcc found"}, "kernels": rows}
        monkeypatch.setattr(_native, "manifest", lambda: manifest)
        monkeypatch.setattr(_native, "status", lambda: _native.Status(loaded, "test"))
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "pretended")

    return pretend


@pytest.mark.parametrize(
    "capability, archs, expected",
    [
        ((10, 0), ["100f"], True),
        ((10, 3), ["100f"], True),
        ((10, 3), ["100a"], False),
        ((10, 0), ["103a"], False),
        ((10, 0), ["103f"], False),
        ((10, 0), [], False),
        ((8, 0), ["100f"], False),
        ((9, 0), ["100f"], False),
        ((12, 0), ["100f"], False),
        ((11, 0), ["100f"], False),
        (None, ["100f"], False),
    ],
)
def test_c47_is_available_only_where_kernels_run(machine, capability, archs, expected):
    machine(capability, archs)
    assert famx.is_available() is expected
    assert famx.is_installed() is True
    reason = info.collect()["backends"]["sm100"]
    assert (reason == "") is expected
    if archs and capability and not expected:
        assert f"{capability[0]}.{capability[1]}" in reason


def test_c39_kernels_are_chosen_by_the_list_of_capabilities(machine):
    """Never "no kernel image": other devices find no kernel, and the exact chip's comes first."""
    machine(archs=["100f", "100a", "103a"])
    for capability in ((8, 0), (9, 0), (11, 0), (12, 0), (12, 1)):
        assert _native.kernels(capability) == []
        assert _native.find_kernel("attn_fwd_test", capability) is None
    assert [k.arch for k in _native.kernels((10, 3))] == ["100f", "103a"]
    assert _native.find_kernel("attn_fwd_test", (10, 3)).arch == "103a"
    assert _native.find_kernel("attn_fwd_test", (10, 0)).arch == "100a"
    assert _native.find_kernel("another", (10, 0)) is None


def test_c39_probe_is_no_attention_kernel(machine, monkeypatch):
    machine((10, 0))
    row = {"name": "toolchain_probe", "arch": "100f", "ptx": "p.ptx", "fatbin": "p.fatbin"}
    content = {"host": {}, "device": {}, "kernels": [row]}
    monkeypatch.setattr(_native, "manifest", lambda: content)
    assert _native.attention_capabilities() == [] and not famx.is_available()


def test_c38_rocm_device_is_no_blackwell(machine):
    """A gfx10 device reports capability (10, 3) through torch.cuda."""
    machine((10, 3), cuda=None, hip="6.4")
    assert not famx.is_available()
    assert info.collect()["backends"]["sm100"] == "no NVIDIA device"


def test_c47_never_raises(machine, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("driver trouble")

    machine((10, 0))
    monkeypatch.setattr(torch.cuda, "is_available", broken)
    assert famx.is_available() is False
    report = info.collect()
    assert "driver trouble" in report["backends"]["sm100"]
    assert "driver trouble" in info.render(report)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", broken)
    assert famx.is_available() is False


@pytest.mark.parametrize(
    "version, parsed",
    [("0.1.0.dev0+g123", (0, 1)), ("2.14.0a0+git12", (2, 14)), ("unknown", None), ("", None)],
)
def test_c47_odd_torch_versions(monkeypatch, version, parsed):
    monkeypatch.setattr(torch, "__version__", version)
    assert _native._torch_version() == parsed
    assert info.collect()["versions"]["torch"] == version


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"kernels": [{"name": "x"}]}', '{"host": 3}', '{"kernels": 5}']
)
def test_c47_broken_build_record_is_an_empty_one(monkeypatch, tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    monkeypatch.setattr(_native, "DEVICE", tmp_path)
    monkeypatch.setattr(_native, "manifest", _native.manifest.__wrapped__)
    assert _native.manifest() == {"host": {}, "device": {}, "kernels": []}
    assert famx.is_available() is False
    assert "no build record found" in info.render(info.collect())
