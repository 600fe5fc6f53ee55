"""cvt: every rounding and saturation rule of the formats that the kernels use; 8-bit formats against torch, all codes."""

import numpy as np
import pytest
import torch
from conftest import lanes

F = np.float32


def one(line, *ins, out=np.uint32):
    return int(lanes(line, [np.asarray(x) for x in ins], [out])[0][7])


@pytest.mark.parametrize("op,a,want", [
    ("cvt.rni.s32.f32", 2.5, 2), ("cvt.rzi.s32.f32", -2.7, -2), ("cvt.rmi.s32.f32", -2.1, -3), ("cvt.rpi.s32.f32", 2.1, 3), ("cvt.rzi.s32.f32", 1e20, 2**31 - 1), ("cvt.rzi.s32.f32", np.nan, 0), ("cvt.rzi.u32.f32", -5, 0), ("cvt.rzi.u32.f32", 3e9, 3000000000),
])  # fmt: skip
def test_float_to_int(op, a, want):
    assert one(f"{op} %o0, %a0;", F(a)) == want & 0xFFFFFFFF


def test_int_to_float_and_between_ints():
    assert one("cvt.rn.f32.s32 %o0, %a0;", np.uint32(2**24 + 1)) == int(F(2**24).view(np.uint32))
    assert one("cvt.rp.f32.u32 %o0, %a0;", np.uint32(2**24 + 1)) == int(F(2**24 + 2).view(np.uint32))
    assert one("cvt.s32.s8 %o0, %a0;", np.uint32(0x1FF)) == 0xFFFFFFFF
    assert one("cvt.u32.u16 %o0, %a0;", np.uint16(0xFFFF)) == 0xFFFF
    assert one("cvt.s64.s32 %o0, %a0;", np.uint32(0x80000000), out=np.uint64) == 0xFFFFFFFF80000000
    assert one("cvt.sat.u8.s32 %o0, %a0;", np.uint32(300)) == 255
    assert one("cvt.sat.s8.s32 %o0, %a0;", np.int32(-300)) == 0xFFFFFF80
    assert one("cvt.pack.sat.s16.s32 %o0, %a0, %a1;", np.uint32(70000), np.int32(-70000)) == 0x7FFF8000


def test_f16_bf16_tf32():
    assert one("cvt.rn.bf16x2.f32 %o0, %a0, %a1;", F(1.00390625), F(-2)) == 0x3F80C000  # tie to even; first operand is the high half
    assert one("cvt.rn.f16x2.f32 %o0, %a0, %a1;", F(65520), F(2.0**-25)) == 0x7C000000
    assert one("cvt.rz.f16x2.f32 %o0, %a0, %a1;", F(65520), F(1)) == 0x7BFF3C00
    assert one("cvt.rn.relu.bf16x2.f32 %o0, %a0, %a1;", F(-3), F(3)) == 0x00004040
    assert one("cvt.rn.bf16.f32 %o0, %a0;", F(np.nan), out=np.uint16) == 0x7FFF
    assert one("cvt.f32.bf16 %o0, %a0;", np.uint16(0xC000)) == int(F(-2).view(np.uint32))
    assert one("cvt.rna.tf32.f32 %o0, %a0;", F(1 + 2.0**-11)) == int(F(1 + 2.0**-10).view(np.uint32))
    assert one("cvt.rn.f32.f64 %o0, %a0;", np.float64(1 + 2.0**-25)) == int(F(1).view(np.uint32))


@pytest.mark.parametrize("name,dtype,top", [("e4m3x2", torch.float8_e4m3fn, 448.0), ("e5m2x2", torch.float8_e5m2, 57344.0)])
def test_fp8_both_ways(name, dtype, top):
    g = torch.Generator().manual_seed(0)
    for _ in range(8):
        x = torch.randn(64, generator=g) * torch.exp2(torch.randint(-12, 9, (64,), generator=g).float())
        x[0], x[1], x[2], x[3] = 1e6, -1e6, 0.0, -0.0
        hi, lo = x[:32].numpy(), x[32:].numpy()
        (o,) = lanes(f"cvt.rn.satfinite.{name}.f32 %o0, %a0, %a1;", [hi, lo], [np.uint16])
        want = x.clamp(-top, top).to(dtype).view(torch.uint8).numpy().astype(np.uint16)
        assert (o == (want[:32] << 8 | want[32:])).all()
    for base in range(0, 256, 32):
        code = np.arange(base, base + 32, dtype=np.uint16)
        (o,) = lanes(f"cvt.rn.f16x2.{name} %o0, %a0;", [code], [np.uint32])
        want = torch.from_numpy(code.astype(np.uint8)).view(dtype).to(torch.float16).numpy()
        got = (o & 0xFFFF).astype(np.uint16).view(np.float16)
        assert ((got == want) | (np.isnan(got) & np.isnan(want))).all()


@pytest.mark.parametrize("x,rz,rp", [(1.0, 127, 127), (1.5, 127, 128), (2.0**-127, 0, 0), (3.0, 128, 129), (0.0, 0, 0), (np.nan, 255, 255), (3e38, 254, 254)])
def test_ue8m0(x, rz, rp):
    assert one("cvt.rz.satfinite.ue8m0x2.f32 %o0, %a0, %a1;", F(x), F(1), out=np.uint16) == rz << 8 | 127
    assert one("cvt.rp.satfinite.ue8m0x2.f32 %o0, %a0, %a1;", F(1), F(x), out=np.uint16) == 127 << 8 | rp


def test_ue8m0_to_bf16():
    assert one("cvt.rn.bf16x2.ue8m0x2 %o0, %a0;", np.uint16(127 << 8 | 128)) == 0x3F804000
