"""4- and 6-bit elements: packed TMA types, kinds f8f6f4, mxf8f6f4, mxf4 and mxf4nvf4, against values decoded here."""

import numpy as np
import pytest
import torch
from emulator.harness import kernel, launch
from emulator.test_tcgen05 import run_mma

from flash_attn_mx import emulator

# Type code in instruction descriptors, exponent bits, mantissa bits, bias, TMA type.
FORMATS = {
    "e4m3": (0, 4, 3, 7, None),
    "e2m3": (3, 2, 3, 1, "u6x16_p32"),
    "e3m2": (4, 3, 2, 3, "u6x16_p32"),
    "e2m1": (5, 2, 1, 1, "u4x16_p64"),
}
SHAPE = 64 // 8 << 17 | 128 // 16 << 24


def values(name):
    """Value of every code of a format, from its definition."""
    _, e, m, bias, _ = FORMATS[name]
    out = []
    for code in range(1 << (1 + e + m)):
        exponent, fraction = code >> m & (1 << e) - 1, code & (1 << m) - 1
        v = (fraction / 2**m) * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction / 2**m) * 2.0 ** (exponent - bias)  # fmt: skip
        out.append(-v if code >> (e + m) else v)
    return np.array(out)


def pack(codes, bits):
    """(rows, n) codes -> (rows, n * bits / 8) bytes at a multiple of 64, element 0 in the lowest bits."""
    planes = (codes[..., None] >> np.arange(bits)) & 1
    x = np.packbits(planes.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")
    room = np.zeros(x.size + 64, np.uint8)
    out = room[-room.ctypes.data % 64 :][: x.size].reshape(x.shape)
    out[:] = x
    return out


def operand(name, rows, g, k=128, dtype=None):
    """Random codes of a format: (values, tensor map of the packed bytes, bytes that a load counts)."""
    _, e, m, _, padded = FORMATS[name]
    bits = 1 + e + m
    codes = g.integers(0, 1 << bits, (rows, k))
    if name == "e4m3":  # no NaN, and nothing so large that it hides the rest
        codes &= 0xBF
    data = pack(codes, bits)
    dtype = dtype or padded or "uint8"
    tmap = emulator.TensorMap.tiled(data, [k, rows], dims=[k, rows], strides=[data.shape[1]], dtype=dtype, swizzle="128B")  # fmt: skip
    return values(name)[codes], tmap, data.size


def scales(g, blocks, e4m3=False):
    if e4m3:
        code = g.integers(0x28, 0x48, (128, blocks)).astype(np.uint8)
        return torch.from_numpy(code), values("e4m3")[code]
    code = g.integers(124, 131, (128, blocks)).astype(np.uint8)
    return torch.from_numpy(code), 2.0 ** (code.astype(float) - 127)


def close(d, a, b):
    """Every element within the rounding that the bit model allows: 2^-20 of the sum of magnitudes."""
    want = a @ b.T
    assert np.abs(d.double().numpy() - want).max() <= 2**-20 * (np.abs(a) @ np.abs(b).T).max()
    assert np.abs(want).max() > 1


@pytest.mark.parametrize("ta", list(FORMATS))
@pytest.mark.parametrize("tb", list(FORMATS))
def test_mixed_types_in_f8f6f4(ta, tb):
    g = np.random.default_rng(1)
    (a, ma, na), (b, mb, nb) = operand(ta, 128, g), operand(tb, 64, g)
    types = FORMATS[ta][0] << 7 | FORMATS[tb][0] << 10
    close(run_mma("f8f6f4", 1 << 4 | SHAPE | types, None, None, 4, maps=(ma, mb), tx=na + nb), a, b)
    (sfa, fa), (sfb, fb) = scales(g, 4), scales(g, 4)
    d = run_mma("mxf8f6f4.block_scale", 1 << 23 | SHAPE | types, None, None, 4, sfa, sfb, maps=(ma, mb), tx=na + nb)  # fmt: skip
    close(d, a * fa.repeat(32, 1), b * fb[:64].repeat(32, 1))


@pytest.mark.parametrize("kind,vec,e4m3", [
    ("mxf4.block_scale", 2, False), ("mxf4.block_scale.block32", 2, False),
    ("mxf4nvf4.block_scale.scale_vec::2X", 2, False), ("mxf4nvf4.block_scale.scale_vec::4X", 4, False),
    ("mxf4nvf4.block_scale.block16", 4, True),
    ("mxf4.block_scale.scale_vec::2X.collector::a::fill", 2, False), ("mxf4.block_scale.collector::a::use", 2, False),
    ("mxf4.block_scale.collector::a::lastuse", 2, False), ("mxf4.block_scale.collector::a::discard", 2, False),
    ("mxf4nvf4.block_scale.block32.collector::a::fill", 2, False), ("mxf4nvf4.block_scale.block16.collector::a::use", 4, True),
    ("mxf4nvf4.block_scale.block16.collector::a::lastuse", 4, True), ("mxf4nvf4.block_scale.block16.collector::a::discard", 4, True),
])  # fmt: skip
@pytest.mark.parametrize("order", ["eager", "delayed", "random"])
def test_fp4_kinds(kind, vec, e4m3, order):
    """256 elements along K: the scales of step i are at byte i * vec of the row."""
    g = np.random.default_rng(2)
    (a, ma, na), (b, mb, nb) = (operand("e2m1", n, g, 256, "u4x16") for n in (128, 64))
    (sfa, fa), (sfb, fb) = scales(g, 4 * vec, e4m3), scales(g, 4 * vec, e4m3)
    idesc = SHAPE | 1 << 7 | 1 << 10 | (0 if e4m3 else 1 << 23)
    d = run_mma(kind, idesc, None, None, 4, sfa, sfb, vec, maps=(ma, mb), tx=na + nb, order=order)
    close(d, a * fa.repeat(64 // vec, 1), b * fb[:64].repeat(64 // vec, 1))


@pytest.mark.parametrize("exponent,kept", [(-35, True), (-36, False)])
def test_fp4_truncation_model(exponent, kept):
    """D = -1, then + 1 + 2^exponent: a term more than 35 bits below the largest scale is dropped."""
    codes = [np.zeros((n, 128), np.int64) for n in (128, 64)]
    codes[0][:, 0], codes[0][:, 64], codes[0][:, 80] = 10, 2, 2  # -1, 1, 1
    codes[1][:, :] = 2
    data = [pack(np.pad(c, ((0, 0), (0, 128))), 4) for c in codes]
    maps = [emulator.TensorMap.tiled(x, [256, len(x)], dims=[256, len(x)], strides=[128], dtype="u4x16", swizzle="128B") for x in data]  # fmt: skip
    sfa = torch.full((128, 8), 127, dtype=torch.uint8)
    sfa[:, 5] += exponent
    sfb = torch.full((128, 8), 127, dtype=torch.uint8)
    d = run_mma("mxf4nvf4.block_scale.block16", SHAPE | 1 << 7 | 1 << 10 | 1 << 23, None, None, 2, sfa, sfb, 4,
                maps=maps, tx=192 * 128)  # fmt: skip
    assert (d == (2.0**exponent if kept else 0)).all()


@pytest.mark.parametrize("kind,idesc,detail", [
    ("f8f6f4", 1 << 4 | SHAPE | 5 << 7 | 1 << 15, "K-major"), ("f8f6f4", 1 << 4 | SHAPE | 6 << 10, "unknown type 6"),
    ("mxf4.block_scale", SHAPE | 1 << 23 | 5 << 7 | 1 << 10, "e2m1"), ("mxf4.block_scale", SHAPE | 1 << 7 | 1 << 10, "UE4M3"),
    ("mxf4.block_scale", SHAPE | 1 << 23 | 1 << 7 | 1 << 10 | 1 << 29, "scale id 1"),
    ("mxf4.block_scale", SHAPE | 1 << 23 | 1 << 7 | 1 << 10 | 1 << 31, "K = 96"),
])  # fmt: skip
def test_illegal_instruction_descriptors(kind, idesc, detail):
    a, b = torch.zeros(128, 128, dtype=torch.uint8), torch.zeros(64, 128, dtype=torch.uint8)
    sf = None if kind == "f8f6f4" else torch.full((128, 4), 127, dtype=torch.uint8)
    with pytest.raises(emulator.EmulatorError, match=rf"\[idesc\].*{detail}"):
        run_mma(kind, idesc, a, b, 1, sf, sf)


@pytest.mark.parametrize("dtype,bits,swizzle", [("u4x16", 4, "none"), ("u4x16_p64", 4, "none"), ("u4x16_p64", 4, "128B"), ("u6x16_p32", 6, "128B_ATOM_32B")])  # fmt: skip
def test_tma_places_packed_elements(dtype, bits, swizzle):
    """Rows 1..6 of 4 with two beyond the edge: each 16 elements in 8 or 16 bytes, swizzled as bytes are."""
    g = np.random.default_rng(3)
    data = pack(g.integers(0, 1 << bits, (4, 128)), bits)
    tmap = emulator.TensorMap.tiled(data, [128, 6], dims=[128, 4], strides=[data.shape[1]], dtype=dtype, swizzle=swizzle)  # fmt: skip
    pitch = 64 if dtype == "u4x16" else 128
    out = np.zeros(6 * pitch, np.uint8)
    body = f"""mov.u32 %l, %laneid; mov.u32 %a, buf; setp.ne.u32 %q, %l, 0; @%q bra W;
    mbarrier.init.shared.b64 [bar], 1; cvta.param.u64 %d, tm; mbarrier.arrive.expect_tx.shared.b64 _, [bar], {6 * data.shape[1]};
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%a], [%d, {{0, 1}}], [bar];
    W: bar.warp.sync -1;
    V: mbarrier.try_wait.parity.shared.b64 %q, [bar], 0; @!%q bra V;
    L: add.u32 %r, %a, %l; ld.shared.u8 %r, [%r]; cvt.u64.u32 %d, %l; add.s64 %d, %d, %p0; st.global.u8 [%d], %r;
    add.u32 %l, %l, 32; setp.lt.u32 %q, %l, {6 * pitch}; @%q bra L;"""
    text = kernel(body, 1, ".shared .align 1024 .b8 buf[1024]; .shared .align 8 .b8 bar[8]; .reg .b32 %l, %a, %r; .reg .b64 %d; .reg .pred %q;")  # fmt: skip
    text = text.replace("(.param .u64 p0", "(.param .align 64 .b8 tm[128], .param .u64 p0")
    launch(text, [tmap, out])
    size = data.shape[1] // 8  # bytes of 16 elements
    step = 8 if dtype == "u4x16" else 16
    for row in range(6):
        for c in range(8):
            at = row * pitch + c * step
            if swizzle == "128B":
                at ^= (at >> 7 & 7) << 4
            elif swizzle == "128B_ATOM_32B":
                at ^= (at >> 7 & 3) << 5
            want = data[row + 1, c * size : (c + 1) * size] if row < 3 else np.zeros(size, np.uint8)
            assert (out[at : at + size] == want).all(), (row, c)


@pytest.mark.parametrize("change,detail", [
    (dict(box=[64, 8]), "box 0 = 64 is not 128"), (dict(dims=[64, 8]), "not a multiple of 128"), (dict(strides=[80]), "multiple of 32"),
    (dict(swizzle="64B"), "128 bytes"), (dict(oob_fill="nan"), "NaN fill"), (dict(offset=16), "multiple of 32"),
    (dict(element_strides=[1, 2]), "element strides"), (dict(dtype="u4x16", dims=[129, 8]), "odd"),
])  # fmt: skip
def test_illegal_packed_tensor_maps(change, detail):
    x = torch.zeros(4096, dtype=torch.uint8)
    base = -x.data_ptr() % 64
    good = dict(box=[128, 8], dims=[256, 8], strides=[128], dtype="u4x16_p64", swizzle="128B", offset=base)  # fmt: skip
    emulator.TensorMap.tiled(x, **good)
    if "offset" in change:
        change = dict(offset=base + change["offset"])
    with pytest.raises(ValueError, match=detail):
        emulator.TensorMap.tiled(x, **{**good, **change})
