"""The quantiser's kernel in the emulator: the bytes of the CPU operator, on every axis, layout and input."""

import pytest
import torch
from compare import assert_equal_bits

from flash_attn_mx import device_quantize, layouts, sm100

AXES = ("rowwise", "colwise", "tokenwise")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAN, INF = float("nan"), float("inf")

pytestmark = pytest.mark.skipif(
    not device_quantize.BUILT or bool(sm100.WHY_NO_EMULATOR),
    reason="needs device code and the emulator",
)


def draw(shape, dtype=torch.bfloat16, seed=0):
    """Magnitudes from 2^-30 to 2^30, with zero blocks, NaN and Inf strewn in."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g) * torch.exp2(
        torch.randint(-30, 30, shape[:-1], generator=g)
    ).unsqueeze(-1)
    flat = x.view(-1, shape[-1])
    if flat.shape[0] > 40:
        flat[3] = 0.0
        flat[5, 0], flat[40, -1], flat[39, 0] = NAN, -INF, -0.0
    return x.to(dtype)


def emulated(x, axes, rounding="rceil", dtype=E4M3, cu=None, atoms=False, **options):
    outputs = device_quantize.prepare(x, axes, rounding, dtype, cu, atoms)
    device_quantize.emulate(outputs, **options)
    return outputs.results


def assert_same(x, axes=AXES, rounding="rceil", dtype=E4M3, cu=None, **options):
    """Plain scales and payloads are those of the operator on the CPU."""
    got = emulated(x, axes, rounding, dtype, cu, **options)
    for axis in axes:
        packed = cu if axis == "colwise" else None
        want = torch.ops.flash_attn_mx.quantize(x, axis, rounding, dtype, packed)
        for have, expected, part in zip(got[axis], want, ("payload", "scale")):
            assert_equal_bits(have, expected, f"{axis} {part}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "shape",
    [(2, 130, 3, 64), (1, 31, 2, 128), (1, 129, 1, 72), (2, 33, 2, 4), (40, 1, 100), (70, 128)],
    ids=str,
)
def test_bytes_are_those_of_the_cpu_operator(shape, dtype):
    """Lengths and head sizes beside tiles and blocks."""
    assert_same(draw(shape, dtype))


@pytest.mark.parametrize("rounding,dtype", [("floor", E4M3), ("rceil", E5M2), ("floor", E5M2)])
def test_roundings_and_formats(rounding, dtype):
    assert_same(draw((1, 70, 2, 40), torch.float32), rounding=rounding, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("first", range(0, 65536, 16384))
def test_every_16_bit_pattern(first, dtype):
    bits = torch.arange(first, first + 16384, dtype=torch.int32).to(torch.int16)
    assert_same(bits.view(dtype).view(1, 256, 1, 64), ("rowwise", "colwise"))


@pytest.mark.parametrize(
    "axes", [("rowwise",), ("colwise",), ("tokenwise",), ("colwise", "tokenwise")]
)
def test_some_axes_only(axes):
    assert_same(draw((1, 70, 2, 64)), axes)


def test_strides():
    """Transposed heads, a batch of stride 0; rows that start at odd elements and channels of another stride are copied."""
    x = draw((2, 3, 70, 64))
    assert_same(x.transpose(1, 2))
    assert_same(x[..., 1:33])
    assert_same(x[:1].expand(3, 3, 70, 64))
    assert_same(x[:, :, :40].transpose(2, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("atoms", [False, True])
def test_eight_channels_that_start_at_a_multiple_of_four(dtype, atoms):
    """Read as two halves, because of the address, a stride or head_dim: the bytes of the same values that lie well."""
    wide = draw((1, 70, 2, 72), dtype)
    for x in (wide[..., 4:68], wide[..., :68].contiguous()[..., :64], wide[..., :68]):
        assert (
            x.data_ptr() % 8 == 0
            and device_quantize.prepare(x, AXES, "rceil", E4M3).arguments[0] is x
        )
        if not atoms:
            assert_same(x)
        want = emulated(x.contiguous(), AXES, atoms=atoms)
        for axis, results in emulated(x, AXES, atoms=atoms).items():
            for have, expected in zip(results, want[axis]):
                assert_equal_bits(have, expected, axis)


@pytest.mark.parametrize("head_dim", [6, 132])
def test_operator_refuses_other_head_dims(head_dim):
    x = torch.zeros(1, 3, 1, head_dim)
    assert not device_quantize.can_serve(x)
    with pytest.raises(RuntimeError, match="x: expected head_dim that is a multiple of 4"):
        emulated(x, AXES)


def test_operator_refuses_odd_strides():
    outputs = device_quantize.prepare(torch.zeros(1, 3, 1, 8), AXES, "rceil", E4M3)
    odd = torch.zeros(1, 3, 1, 9)[..., 1:]
    outputs = outputs._replace(arguments=(odd, *outputs.arguments[1:]))
    with pytest.raises(RuntimeError, match="x: expected an address and strides"):
        device_quantize.emulate(outputs)


@pytest.mark.parametrize(
    "lengths,behind", [([5, 0, 130, 33], 0), ([300], 7), ([0, 0, 128], 140), ([1] * 9, 0), ([], 20)]
)
def test_packed_sequences(lengths, behind):
    """Blocks start with their sequence; rows without a block hold 127; tokens behind the last sequence become zeros."""
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    assert_same(draw((sum(lengths) + behind, 2, 64)), cu=cu)


def test_nothing_to_do():
    for shape in [(0, 5, 2, 64), (2, 0, 2, 64), (2, 5, 0, 64), (2, 5, 2, 0)]:
        assert_same(torch.zeros(shape))


@pytest.mark.parametrize(
    "shape", [(2, 300, 2, 64), (1, 128, 3, 128), (1, 90, 1, 72), (1, 33, 1, 20)], ids=str
)
def test_atoms(shape):
    """Scales in the order of the MMA: those of to_swizzled128x4 where a row and a column exist."""
    x = draw(shape)
    got = emulated(x, AXES, atoms=True)
    for axis in ("rowwise", "colwise"):
        data, scale = torch.ops.flash_attn_mx.quantize(x, axis, "rceil", E4M3, None)
        assert_equal_bits(got[axis][0], data, axis)
        _, rows, cols = layouts.operand_size(x.shape, axis)
        plain = layouts.from_swizzled128x4(got[axis][1], rows, cols)
        assert_equal_bits(layouts.operand_scale(plain, axis), scale, axis)


@pytest.mark.parametrize("lengths,behind", [([5, 0, 130, 33], 0), ([300, 128], 7), ([64], 140)])
def test_packed_atoms(lengths, behind):
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    x = draw((sum(lengths) + behind, 2, 64))
    got = emulated(x, ("rowwise", "colwise"), cu=cu, atoms=True)
    for axis in ("rowwise", "colwise"):
        packed = cu if axis == "colwise" else None
        _, scale = torch.ops.flash_attn_mx.quantize(x, axis, "rceil", E4M3, packed)
        want = layouts.packed_atoms(scale, axis, cu, x.shape[0]).view(torch.uint8)
        have = got[axis][1].view(torch.uint8)
        for b, length in enumerate(lengths):
            for tile in range(-(-length // 128)):
                at = (int(cu[b]) // 128 + b + tile) * 512
                rows = min(128, length - 128 * tile)
                mask = used(rows, 64, axis)
                assert torch.equal(have[:, at : at + 512][:, mask], want[:, at : at + 512][:, mask])


def used(tokens, channels, axis):
    """Which bytes of an atom belong to a row and a block that exist."""
    blocks = torch.zeros(128, 4, dtype=torch.bool)
    if axis == "rowwise":
        blocks[:tokens, : -(-channels // 32)] = True
    else:
        blocks[:channels, : -(-tokens // 32)] = True
    return layouts.to_swizzled128x4(blocks.to(torch.uint8), padding=0).bool()


@pytest.mark.parametrize("order,seed", [("delayed", 0), ("random", 1)])
def test_orders(order, seed):
    """Warps in another order: the atoms pass through shared memory behind a barrier."""
    x = draw((1, 200, 2, 64))
    want = emulated(x, AXES, atoms=True)
    got = emulated(x, AXES, atoms=True, order=order, seed=seed)
    for axis in AXES:
        for a, b in zip(got[axis], want[axis]):
            assert_equal_bits(a, b, axis)
