"""Floating point: rounding directions, NaN and signed-zero rules, flushing, packed forms."""

import numpy as np
import pytest
from conftest import lanes

F = np.float32
QNAN = 0x7FFFFFFF
BITS = lambda x: int(np.float32(x).view(np.uint32))  # noqa: E731


def run(line, *ins, out=np.uint32):
    return int(lanes(line, [np.asarray(x) for x in ins], [out])[0][5])


@pytest.mark.parametrize("op,a,b,want", [
    ("add.f32", 1.0, 2.0**-24, 1.0), ("add.rp.f32", 1.0, 2.0**-24, 1.0 + 2.0**-23), ("add.rm.f32", -1.0, -(2.0**-24), -1.0 - 2.0**-23), ("add.rz.f32", 1.0, -(2.0**-25), 1.0 - 2.0**-24),
    ("sub.f32", 5.0, 3.0, 2.0), ("mul.rn.f32", 3.0, 7.0, 21.0), ("mul.rp.f32", 1.0 + 2.0**-23, 1.0 + 2.0**-23, 1.0 + 2.0**-22 + 2.0**-23), ("add.sat.f32", 1.0, 1.0, 1.0), ("add.sat.f32", -1.0, 0.5, 0.0),
    ("add.ftz.f32", 2.0**-130, 0.0, 0.0), ("add.f32", 2.0**-130, 0.0, 2.0**-130), ("div.rn.f32", 1.0, 3.0, F(1) / F(3)), ("div.rp.f32", 1.0, 3.0, 0.33333334), ("div.rz.f32", 1.0, 3.0, 0.3333333),
    ("min.f32", -0.0, 0.0, -0.0), ("max.f32", -0.0, 0.0, 0.0), ("max.f32", np.nan, 2.0, 2.0), ("copysign.f32", -1.0, 3.0, -3.0), ("max.xorsign.abs.f32", -3.0, 2.0, -3.0),
])  # fmt: skip
def test_f32_binary(op, a, b, want):
    assert run(f"{op} %o0, %a0, %a1;", F(a), F(b)) == BITS(want)


def test_nan_is_canonical_and_propagates_only_where_asked():
    assert run("add.f32 %o0, %a0, %a1;", np.uint32(0x7FC12345), F(1)) == QNAN
    assert run("max.NaN.f32 %o0, %a0, %a1;", F(np.nan), F(1)) == QNAN
    assert run("min.f32 %o0, %a0, %a1;", F(np.nan), F(np.nan)) == QNAN
    assert run("add.f32 %o0, %a0, %a1;", F(np.inf), F(-np.inf)) == QNAN


def test_fma_rounds_once():
    a = F(1 + 2.0**-12)
    assert run("fma.rn.f32 %o0, %a0, %a0, %a1;", a, F(-(1 + 2.0**-11))) == BITS(2.0**-24)
    assert run("fma.rm.f32 %o0, %a0, %a1, %a2;", F(1), F(1), F(-(2.0**-30))) == BITS(1 - 2.0**-24)


def test_three_input_max_and_abs():
    assert run("max.f32 %o0, %a0, %a1, %a2;", F(1), F(5), F(3)) == BITS(5)
    assert run("min.abs.f32 %o0, %a0, %a1, %a2;", F(-1), F(5), F(-3)) == BITS(1)


@pytest.mark.parametrize("op,a,want", [
    ("ex2.approx.ftz.f32", 3.0, 8.0), ("ex2.approx.f32", -np.inf, 0.0), ("lg2.approx.f32", 8.0, 3.0), ("lg2.approx.f32", 0.0, -np.inf), ("rcp.rn.f32", 4.0, 0.25), ("rsqrt.approx.f32", 4.0, 0.5), ("sqrt.rn.f32", 9.0, 3.0),
    ("abs.f32", -2.0, 2.0), ("neg.f32", 2.0, -2.0), ("tanh.approx.f32", 0.0, 0.0), ("cos.approx.f32", 0.0, 1.0),
])  # fmt: skip
def test_f32_unary(op, a, want):
    assert run(f"{op} %o0, %a0;", F(a)) == BITS(want)


def test_f32x2_keeps_the_halves_apart():
    two = np.array([1.5, -2.0], F).view(np.uint64)[0]
    got = np.array([run("fma.rn.f32x2 %o0, %a0, %a1, %a0;", two, np.array([2.0, 3.0], F).view(np.uint64)[0], out=np.uint64)], np.uint64).view(F)
    assert got.tolist() == [4.5, -8.0]
    got = np.array([run("add.rm.ftz.f32x2 %o0, %a0, %a1;", two, np.array([2.0**-30, 2.0**-130], F).view(np.uint64)[0], out=np.uint64)], np.uint64).view(F)
    assert got.tolist() == [1.5, -2.0]


def test_half_and_bf16_arithmetic():
    h = lambda x: np.float16(x).view(np.uint16)  # noqa: E731
    assert run("add.f16 %o0, %a0, %a1;", h(2048), h(1), out=np.uint16) == int(h(2048))  # tie to even
    assert run("fma.rn.f16 %o0, %a0, %a1, %a2;", h(3), h(5), h(0.5), out=np.uint16) == int(h(15.5))
    assert run("mul.bf16x2 %o0, %a0, %a1;", np.uint32(0x3F804000), np.uint32(0x40003FC0)) == 0x40004040  # 1*2, 2*1.5
    assert run("add.rn.f32.bf16 %o0, %a0, %a1;", np.uint16(0x3F80), F(2)) == BITS(3)
    assert run("fma.rn.f32.bf16 %o0, %a0, %a1, %a2;", np.uint16(0x4000), np.uint16(0x4040), F(1)) == BITS(7)


@pytest.mark.parametrize("cmp,a,b,want", [("lt", 1, 2, 1), ("ltu", np.nan, 2, 1), ("eq", np.nan, np.nan, 0), ("ne", np.nan, 1, 0), ("neu", np.nan, 1, 1), ("num", 1, 2, 1), ("nan", np.nan, 1, 1), ("ge", 2, 2, 1)])
def test_setp_float(cmp, a, b, want):
    (o,) = lanes(f"setp.{cmp}.f32 %q, %a0, %a1; selp.u32 %o0, 1, 0, %q;", [F(a), F(b)], decls=".reg .pred %q;\n")
    assert (o == want).all()


def test_testp_and_f64():
    (o,) = lanes("testp.subnormal.f32 %q, %a0; selp.u32 %o0, 1, 0, %q;", [F(2.0**-130)], decls=".reg .pred %q;\n")
    assert o[0] == 1
    got = run("fma.rn.f64 %o0, %a0, %a0, %a0;", np.float64(1.1), out=np.uint64)
    assert np.uint64(got).view(np.float64) == pytest.approx(1.1 * 1.1 + 1.1, rel=1e-15)
