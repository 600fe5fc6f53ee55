"""Scale layouts, and scales made by other libraries: layouts.py, MXTensor.from_parts, to_layout."""

import itertools

import pytest
import torch

import flash_attn_mx as famx
from flash_attn_mx import layouts
from flash_attn_mx.layouts import from_swizzled128x4, swizzled_bytes, to_swizzled128x4

SIZES = list(itertools.product((0, 1, 31, 33, 127, 128, 129, 300), (0, 1, 2, 3, 4, 5, 9)))


def place(r, c, cols):
    """Byte of scale (r, c): the formula of layouts.py, written out once more."""
    width = (cols + 3) // 4 * 4
    tile = (r // 128) * (width // 4) + c // 4
    return tile * 512 + (r % 32) * 16 + ((r // 32) % 4) * 4 + c % 4


def to_blocked(scale):
    """The reordering as torchao writes it, for one (rows, cols) matrix."""
    rows, cols = (scale.shape[0] + 127) // 128, (scale.shape[1] + 3) // 4
    padded = torch.full((rows * 128, cols * 4), 127, dtype=torch.uint8)
    padded[: scale.shape[0], : scale.shape[1]] = scale
    tiles = padded.view(rows, 128, cols, 4).permute(0, 2, 1, 3)
    return tiles.reshape(-1, 4, 32, 4).transpose(1, 2).reshape(-1)


@pytest.mark.parametrize("rows,cols", SIZES)
def test_swizzle_follows_the_formula(rows, cols):
    scale = torch.randint(0, 256, (2, rows, cols), dtype=torch.uint8)
    buf = to_swizzled128x4(scale, padding=0xFF)
    assert buf.shape == (2, swizzled_bytes(rows, cols)) and buf.is_contiguous()
    want = torch.full_like(buf, 0xFF)
    for r, c in itertools.product(range(rows), range(cols)):
        want[:, place(r, c, cols)] = scale[:, r, c]
    assert torch.equal(buf, want)
    assert torch.equal(from_swizzled128x4(buf, rows, cols), scale)


@pytest.mark.parametrize("rows,cols", [(96, 2), (200, 5), (128, 4)])
def test_swizzle_equals_to_blocked(rows, cols):
    scale = torch.randint(0, 256, (rows, cols), dtype=torch.uint8)
    assert torch.equal(to_swizzled128x4(scale), to_blocked(scale))


def test_swizzle_keeps_e8m0_and_reads_views():
    scale = torch.randint(0, 256, (3, 40), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    buf = to_swizzled128x4(scale.T)
    assert buf.dtype == torch.float8_e8m0fnu
    back = from_swizzled128x4(buf, 40, 3)
    assert torch.equal(back.view(torch.uint8), scale.T.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    "call,error,message",
    [
        (lambda: to_swizzled128x4(torch.zeros(4, 4)), TypeError, "scale: expected float8_e8m0fnu"),
        (
            lambda: to_swizzled128x4(torch.zeros(4).byte()),
            ValueError,
            "scale: expected .*rows, cols",
        ),
        (lambda: to_swizzled128x4(torch.zeros(4, 4).byte(), 256), ValueError, "padding: expected"),
        (
            lambda: from_swizzled128x4(torch.zeros(512), 1, 1),
            TypeError,
            "buf: expected float8_e8m0",
        ),
        (lambda: from_swizzled128x4(torch.zeros(512).byte(), -1, 1), ValueError, "sizes >= 0"),
        (
            lambda: from_swizzled128x4(torch.zeros(()).byte(), 1, 1),
            ValueError,
            "at least 512 bytes",
        ),
    ],
)
def test_layout_bad_input_raises(call, error, message):
    with pytest.raises(error, match=message):
        call()


SHAPES = [(2, 70, 3, 40), (1, 300, 2, 128), (70, 3, 40), (96, 64), (0, 4, 2, 32), (2, 4, 0, 32)]


@pytest.mark.parametrize("axis", ["rowwise", "colwise"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_to_layout_makes_one_buffer_per_head(shape, axis):
    """An operand's rows are what the MMA does not contract: tokens rowwise, channels colwise."""
    x = torch.randn(shape)
    plain, swizzled = (
        famx.quantize_mxfp8(x, axis),
        famx.quantize_mxfp8(x, axis, layout="swizzled128x4"),
    )
    assert swizzled.layout == "swizzled128x4" and swizzled.shape == shape
    scale = plain.scale.view(torch.uint8)
    if len(shape) == 2:
        scale = scale[None, :, None]
    if len(shape) == 3:
        scale = scale[None]
    scale = scale.transpose(1, 2)  # (batch, head, S or S/32, D/32 or D)
    if axis == "colwise":
        scale = scale.transpose(-2, -1)
    heads = [to_blocked(matrix) for matrix in scale.flatten(0, 1)]
    got = (
        swizzled.scale.view(torch.uint8).flatten(0, -2) if len(shape) > 2 else swizzled.scale[None]
    )
    assert got.shape[0] == len(heads)
    for buf, want in zip(got, heads, strict=True):
        assert torch.equal(buf.view(torch.uint8), want)
    back = swizzled.to_layout("plain")
    assert back.scale.is_contiguous()
    assert torch.equal(back.scale.view(torch.uint8), plain.scale.view(torch.uint8))
    assert torch.equal(swizzled.dequantize(), plain.dequantize())


def test_padding_never_reaches_a_result():
    mx = famx.quantize_mxfp8(torch.randn(1, 33, 2, 64))
    for padding in (0, 127, 255):
        other = mx.to_layout("swizzled128x4", padding=padding)
        assert (other.scale.view(torch.uint8) == padding).sum() >= 512 * 2 - 33 * 2 * 2
        assert torch.equal(other.dequantize(), mx.dequantize())


def parts(shape, axis="rowwise"):
    mx = famx.quantize_mxfp8(torch.randn(shape), axis)
    return mx, mx.data, mx.scale


@pytest.mark.parametrize("axis", ["rowwise", "colwise", "tokenwise"])
@pytest.mark.parametrize("shape", [(2, 70, 3, 40), (70, 3, 40), (96, 64)], ids=str)
def test_from_parts_plain_and_uint8(shape, axis):
    mx, data, scale = parts(shape, axis)
    for d, s in [(data, scale), (data.view(torch.uint8), scale.view(torch.uint8))]:
        assert torch.equal(famx.MXTensor.from_parts(d, s, axis).dequantize(), mx.dequantize())


def test_from_parts_attention_form_padded_per_head():
    """(B,H,pad128(S),pad4(D/32)) and (B,H,pad4(S/32),pad128(D)), swizzled, as cuDNN has them."""
    for axis, shape in (("rowwise", (2, 3, 128, 4)), ("colwise", (2, 3, 4, 128))):
        mx, data, _ = parts((2, 70, 3, 40), axis)
        buf = mx.to_layout("swizzled128x4").scale.view(shape)
        got = famx.MXTensor.from_parts(data, buf.view(torch.uint8), axis, "swizzled128x4")
        assert torch.equal(got.dequantize(), mx.dequantize())


@pytest.mark.parametrize("form", ["flat", "padded", "torchao"])
def test_from_parts_scaled_mm_swizzle_32_4_4(form):
    """A (M, K) GEMM operand; torchao shapes its buffer (32*ceil(M/128), 16*ceil(K/128))."""
    mx, data, scale = parts((200, 160))
    buf = to_blocked(scale.view(torch.uint8))
    buf = {"flat": buf, "padded": buf.view(256, 8), "torchao": buf.view(64, 32)}[form]
    got = famx.MXTensor.from_parts(data, buf, "rowwise", "swizzled128x4")
    assert torch.equal(got.dequantize(), mx.dequantize())


@pytest.mark.parametrize("axis", ["rowwise", "colwise"])
def test_from_parts_plain_padded_matrix(axis):
    mx, data, scale = parts((200, 160), axis)
    padded = torch.full((256, 8) if axis == "rowwise" else (8, 256), 3, dtype=torch.uint8)
    padded[: scale.shape[0], : scale.shape[1]] = scale.view(torch.uint8)
    assert torch.equal(famx.MXTensor.from_parts(data, padded, axis).dequantize(), mx.dequantize())


@pytest.mark.parametrize("layout", ["plain", "swizzled128x4"])
@pytest.mark.parametrize("matrix", [(2 * 70 * 3, 64), (2 * 70, 3 * 64)], ids=["bsh-d", "bs-hd"])
def test_from_parts_matrix_with_logical_shape(matrix, layout):
    """torchao flattens before it swizzles: the buffer of the matrix is reordered for the heads."""
    mx, data, scale = parts((2, 70, 3, 64))
    flat = scale.view(torch.uint8).reshape(matrix[0], -1)
    buf = flat if layout == "plain" else to_blocked(flat)
    got = famx.MXTensor.from_parts(data.view(matrix), buf, "rowwise", layout, shape=(2, 70, 3, 64))
    assert got.shape == (2, 70, 3, 64)
    assert torch.equal(got.dequantize(), mx.dequantize())
    assert torch.equal(got.to_layout("swizzled128x4").dequantize(), mx.dequantize())


BAD_PARTS = [
    (dict(data=torch.zeros(4, 64)), TypeError, "data: expected float8_e4m3fn or float8_e5m2, got torch.float32"),
    (dict(data=[1]), TypeError, "data: expected a tensor, got list"),
    (dict(scale=torch.zeros(4, 2)), TypeError, "scale: expected float8_e8m0fnu, got torch.float32"),
    (dict(scale=torch.zeros(4, 3).byte()), ValueError, r"scale: expected shape \(4, 2\).*got \(4, 3\)"),
    (dict(axis="colwise"), ValueError, r"scale: expected shape \(1, 64\) \(colwise, plain\).*got \(4, 2\)"),
    (dict(axis="x"), ValueError, "axis: expected one of"),
    (dict(layout="x"), ValueError, "layout: expected one of"),
    (dict(layout="swizzled128x4"), ValueError, r"scale: expected swizzled128x4 of 4x2 blocks, 512 bytes"),
    (dict(axis="tokenwise", layout="swizzled128x4"), ValueError, "layout: expected 'plain' for a tokenwise"),
    (dict(shape=(4, 2, 32, 1)), ValueError, "shape: expected 256 values"),
    (dict(shape=(8, 64)), ValueError, "shape: expected the shape of data"),
    (dict(shape=(5, 1, 64)), ValueError, r"shape: expected 256 values.*got \(5, 1, 64\)"),
    (dict(data=torch.zeros(64).byte()), ValueError, r"data: expected \(B,S,H,D\).*got shape \(64,\)"),
    (dict(cu_seqlens=torch.tensor([0, 4]).int()), ValueError, "cu_seqlens: expected None for axis 'rowwise'"),
    (dict(scale=torch.empty(4, 2, dtype=torch.uint8, device="meta")), ValueError, "scale: expected device cpu"),
]  # fmt: skip


@pytest.mark.parametrize("change,error,message", BAD_PARTS, ids=[m[2][:40] for m in BAD_PARTS])
def test_from_parts_bad_input_raises(change, error, message):
    good = dict(data=torch.zeros(4, 64).byte(), scale=torch.zeros(4, 2).byte(), axis="rowwise")
    with pytest.raises(error, match=message):
        famx.MXTensor.from_parts(**{**good, **change})


def test_from_parts_that_require_grad_raises():
    data = torch.zeros(4, 64).to(torch.float8_e4m3fn).requires_grad_()
    with pytest.raises(ValueError, match="data: expected a tensor without gradient"):
        famx.MXTensor.from_parts(data, torch.zeros(4, 2).byte(), "rowwise")


def test_packed_tensors_stay_plain_raises():
    cu = torch.tensor([0, 20, 70], dtype=torch.int32)
    mx = famx.quantize_mxfp8(torch.randn(70, 2, 40), "colwise", cu_seqlens=cu)
    with pytest.raises(ValueError, match="layout: expected 'plain' for a packed"):
        mx.to_layout("swizzled128x4")


@pytest.mark.parametrize("axis", ["rowwise", "colwise"])
@pytest.mark.parametrize("layout", ["plain", "swizzled128x4"])
def test_layouts_under_compile(axis, layout):
    """torch 2.13's Inductor has no C++ type for e8m0: scale bytes must stay out of its kernels."""
    x = torch.randn(2, 50, 2, 40)

    def round_trip(x):
        mx = famx.quantize_mxfp8(x, axis, layout=layout)
        return mx.to_layout("swizzled128x4").to_layout("plain").dequantize()

    assert torch.equal(torch.compile(round_trip, fullgraph=True)(x), round_trip(x))
    mx = famx.quantize_mxfp8(x, axis, layout=layout)
    compiled = torch.compile(famx.dequantize, fullgraph=True)
    assert torch.equal(compiled(mx), mx.dequantize())


def test_helper_operators_pass_opcheck():
    """On uint8 twins: opcheck itself cannot multiply e8m0 tensors."""
    scale = torch.randint(0, 255, (2, 50, 2, 3), dtype=torch.uint8)
    ops = torch.ops.flash_attn_mx
    torch.library.opcheck(ops.decode_e8m0.default, (scale,))
    torch.library.opcheck(ops.to_swizzled128x4.default, (scale, 127))
    torch.library.opcheck(ops.from_swizzled128x4.default, (to_swizzled128x4(scale), 2, 3))
    torch.library.opcheck(ops.operand_scale.default, (scale, "colwise"))


@pytest.mark.parametrize("axis", ["rowwise", "colwise"])
@pytest.mark.parametrize(
    "lengths,behind", [([5, 0, 130, 33], 0), ([0, 300, 0], 7), ([], 9), ([1] * 5, 0)]
)
def test_packed_atoms_round_trip(axis, lengths, behind):
    """Rows of the plain scale that a sequence uses come back; the others are 127."""
    cu = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    total = sum(lengths) + behind
    x = torch.randn(total, 3, 72, generator=torch.Generator().manual_seed(0))
    scale = famx.quantize_mxfp8(
        x, axis=axis, cu_seqlens=cu if axis == "colwise" else None
    ).scale.view(torch.uint8)
    atoms = layouts.packed_atoms(scale.view(torch.float8_e8m0fnu), axis, cu, total)
    assert tuple(atoms.shape) == layouts.atoms_shape(x.shape, cu)
    back = layouts.from_packed_atoms(atoms, axis, cu, x.shape).view(torch.uint8)
    want = scale.clone()
    if axis == "rowwise":
        want[sum(lengths) :] = 127
    assert torch.equal(back, want)
