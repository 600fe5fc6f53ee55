"""The device code of this build: pip's nvcc and CUTLASS make sm_100 code, PTX and fat binary alike."""

import hashlib
import importlib.metadata
import json
import shutil
import struct

import pytest

ELF, PTX = 2, 1  # kinds of entry in a fat binary
FATBIN_MAGIC = 0xBA55ED50


def fatbin_entries(data):
    """(kind, sm) of each entry of a fat binary."""
    magic, _, header, size = struct.unpack_from("<IHHQ", data)
    assert magic == FATBIN_MAGIC and header + size == len(data)
    found, offset = [], header
    while offset < len(data):
        kind, _, header, size = struct.unpack_from("<HHIQ", data, offset)
        found.append((kind, struct.unpack_from("<I", data, offset + 28)[0]))
        offset += header + size
    return found


def has_toolkit():
    """Whether the development environment's own nvcc was installed: then device code must be here."""
    try:
        return bool(importlib.metadata.version("nvidia-cuda-nvcc"))
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def device():
    """flash_attn_mx/_device and its manifest, skipped only where there is no toolkit."""
    from flash_attn_mx import _native

    manifest = _native.manifest()
    if not has_toolkit() and not manifest["kernels"]:
        pytest.skip(f"no device code: {manifest['device'].get('reason')}")
    assert manifest["kernels"], manifest["device"]
    return _native.DEVICE, manifest


def test_every_listed_kernel_is_built_for_every_arch(device, setup_py, root):
    folder, manifest = device
    listed = {kernel.name for kernel in setup_py.read_kernels(root / "csrc/kernels/instances.def")}
    built = {(row["name"], row["arch"]) for row in manifest["kernels"]}
    assert built == {(name, arch) for name in listed for arch in manifest["device"]["archs"]}
    shipped = {path.name for path in folder.iterdir()} - {"manifest.json"}
    assert shipped == {row[kind] for row in manifest["kernels"] for kind in ("ptx", "fatbin")}


def test_ptx_is_what_the_manifest_says(device):
    folder, manifest = device
    for row in manifest["kernels"]:
        ptx = (folder / row["ptx"]).read_bytes()
        assert hashlib.sha256(ptx).hexdigest() == row["ptx_sha256"]
        assert f".target sm_{row['arch']}".encode() in ptx
        assert row["entries"] == [row["name"]]  # unmangled: found by name at run time
        assert str(folder.parents[1]).encode() not in ptx  # no path of the build machine


def test_probe_uses_tensor_memory(device):
    """Forms that plain sm_100, or any older target, would refuse."""
    folder, manifest = device
    row = next(row for row in manifest["kernels"] if row["name"] == "toolchain_probe")
    ptx = (folder / row["ptx"]).read_text()
    for form in (
        "alloc.cta_group::1",
        "st.sync.aligned.32x32b",
        "ld.sync.aligned.32x32b",
        "dealloc",
    ):
        assert f"tcgen05.{form}" in ptx


def test_fat_binary_holds_machine_code_and_ptx(device):
    folder, manifest = device
    for row in manifest["kernels"]:
        data = (folder / row["fatbin"]).read_bytes()
        sm = int(row["arch"][:-1])
        assert sorted(fatbin_entries(data)) == [(PTX, sm), (ELF, sm)]
        assert f"arch sm_{row['arch']}".encode() in data  # ptxas's own note


@pytest.mark.slow
def test_100a_and_103a_are_built_when_asked_for(device, tree, build):
    """C40: archs given by name are built, and reported by the package."""
    shutil.rmtree(tree / "csrc/ops")
    (tree / "csrc/ops").mkdir()
    result = build(tree, "build_ext", "--inplace", FAMX_CUDA_ARCHS="100a, 10.3a")
    assert result.returncode == 0, result.stdout
    manifest = json.loads((tree / "flash_attn_mx/_device/manifest.json").read_text())
    assert manifest["device"]["archs"] == ["100a", "103a"]
    for row in manifest["kernels"]:
        data = (tree / "flash_attn_mx/_device" / row["fatbin"]).read_bytes()
        assert f"arch sm_{row['arch']}".encode() in data
