"""The quantiser's kernel on a GPU: compiled for it, launched by the driver executor, the bytes of the CPU operator.

The kernel uses nothing that only sm_100 has. Run on a Hopper GPU with nvcc; not part of make test.
"""

import pytest
import torch
from compare import assert_equal_bits
from kernels.test_quantize_kernel import AXES, E4M3, E5M2, draw

from flash_attn_mx import device_quantize, layouts, sm100
from tools import build_instance

pytestmark = [
    pytest.mark.gpu_sm90,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(not build_instance.find_nvcc(), reason="needs nvcc"),
    pytest.mark.skipif(bool(sm100.WHY_NO_HOST), reason=sm100.WHY_NO_HOST or "loaded"),
]


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    """Path of the code of the instance that serves x, built once."""
    folder, built = tmp_path_factory.mktemp("images"), {}

    def of(x):
        name = device_quantize.kernel_name(x)
        if name not in built:
            major, minor = torch.cuda.get_device_capability()
            built[name] = build_instance.build(
                name, f"sm_{major}{minor}", folder / f"{name}.fatbin"
            )
        return built[name]

    return of


def launched(image, x, axes, rounding="rceil", dtype=E4M3, cu=None, atoms=False):
    outputs = device_quantize.prepare(x, axes, rounding, dtype, cu, atoms)
    device_quantize.launch(outputs, image(x))
    return outputs.results


def assert_same(image, x, axes=AXES, rounding="rceil", dtype=E4M3, cu=None):
    got = launched(image, x.cuda(), axes, rounding, dtype, None if cu is None else cu.cuda())
    for axis in axes:
        packed = cu if axis == "colwise" else None
        want = torch.ops.flash_attn_mx.quantize(x, axis, rounding, dtype, packed)
        for have, expected, part in zip(got[axis], want, ("payload", "scale")):
            assert_equal_bits(have.cpu(), expected, f"{axis} {part}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(2, 1000, 3, 64), (1, 31, 2, 128), (3, 4097, 8, 128), (1, 129, 1, 72), (2, 33, 2, 4), (400, 2, 100), (700, 128)],
    ids=str,
)  # fmt: skip
def test_bytes_are_those_of_the_cpu(image, shape, dtype):
    assert_same(image, draw(shape, dtype))


@pytest.mark.parametrize("rounding,dtype", [("floor", E4M3), ("rceil", E5M2), ("floor", E5M2)])
def test_roundings_and_formats(image, rounding, dtype):
    assert_same(image, draw((2, 700, 2, 40), torch.float32), rounding=rounding, dtype=dtype)


def test_every_16_bit_pattern(image):
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        assert_same(image, bits.view(dtype).view(1, 1024, 1, 64))
        assert_same(image, bits.view(dtype).view(1, 1024, 1, 64).flip(1), dtype=E5M2)


def test_strides(image):
    x = draw((2, 3, 700, 64))
    assert_same(image, x.transpose(1, 2))
    assert_same(image, x[..., 1:33])
    assert_same(image, x[:1].expand(3, 3, 700, 64))


@pytest.mark.parametrize(
    "lengths,behind", [([5, 0, 1300, 33], 0), ([3000], 7), ([0, 0, 128], 140), ([1] * 900, 5), ([], 20)]
)  # fmt: skip
def test_packed(image, lengths, behind):
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    x = draw((sum(lengths) + behind, 2, 64))
    assert_same(image, x, cu=cu)
    got = launched(image, x.cuda(), ("rowwise", "colwise"), cu=cu.cuda(), atoms=True)
    for axis in ("rowwise", "colwise"):
        packed = cu if axis == "colwise" else None
        _, scale = torch.ops.flash_attn_mx.quantize(x, axis, "rceil", E4M3, packed)
        plain = layouts.from_packed_atoms(got[axis][1].cpu(), axis, cu, x.shape)
        rows = sum(lengths) if axis == "rowwise" else None
        assert_equal_bits(plain[:rows], scale[:rows], axis)


def test_atoms(image):
    x = draw((2, 3000, 4, 128))
    got = launched(image, x.cuda(), AXES, atoms=True)
    for axis in ("rowwise", "colwise"):
        _, scale = torch.ops.flash_attn_mx.quantize(x, axis, "rceil", E4M3, None)
        _, rows, cols = layouts.operand_size(x.shape, axis)
        plain = layouts.from_swizzled128x4(got[axis][1].cpu(), rows, cols)
        assert_equal_bits(layouts.operand_scale(plain, axis), scale, axis)


def test_nothing_waits_for_the_device(image):
    x = torch.randn(200, 2, 64, device="cuda")
    cu = torch.tensor([0, 200], dtype=torch.int32, device="cuda")
    launched(image, x, AXES, cu=cu)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        launched(image, x, AXES, cu=cu, atoms=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
