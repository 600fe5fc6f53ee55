"""Integer, logic, comparison and move forms: values that tell the variants apart."""

import numpy as np
import pytest
from conftest import lanes

U = np.uint32
M = 0xFFFFFFFF
BINARY = [
    ("add.s32", M, 1, 0), ("add.sat.s32", 0x7FFFFFFF, 1, 0x7FFFFFFF), ("sub.u32", 0, 1, M), ("sub.sat.s32", 0x80000000, 1, 0x80000000),
    ("mul.lo.s32", 0x10001, 0x10001, 0x20001), ("mul.hi.u32", M, M, 0xFFFFFFFE), ("mul.hi.s32", M, M, 0), ("mul24.lo.u32", 0x1000002, 3, 6),
    ("div.s32", (-7) & M, 2, (-3) & M), ("div.u32", 7, 0, M), ("rem.s32", (-7) & M, 2, M), ("rem.u32", 7, 4, 3),
    ("min.s32", M, 1, M), ("min.u32", M, 1, 1), ("max.s32", M, 1, 1), ("max.u32", M, 1, M), ("min.relu.s32", M, 5, 0), ("max.relu.s32", M, (-2) & M, 0),
    ("and.b32", 0xF0F0, 0xFF00, 0xF000), ("or.b32", 0xF0F0, 0x0F00, 0xFFF0), ("xor.b32", 0xFF, 0x0F, 0xF0),
    ("shl.b32", 1, 31, 0x80000000), ("shl.b32", 1, 32, 0), ("shr.u32", 0x80000000, 31, 1), ("shr.s32", 0x80000000, 40, M), ("shr.u32", 5, 32, 0),
]  # fmt: skip


@pytest.mark.parametrize("op,a,b,want", BINARY)
def test_int_binary(op, a, b, want):
    (o,) = lanes(f"{op} %o0, %a0, %a1;", [U(a), U(b)])
    assert (o == want).all()


@pytest.mark.parametrize("op,a,want", [
    ("abs.s32", (-5) & M, 5), ("neg.s32", 5, (-5) & M), ("not.b32", 0, M), ("cnot.b32", 0, 1), ("brev.b32", 1, 0x80000000),
    ("popc.b32", 0xF0F, 8), ("clz.b32", 1, 31), ("clz.b32", 0, 32), ("bfind.u32", 0x100, 8), ("bfind.s32", M, M), ("bfind.shiftamt.u32", 0x100, 23),
])  # fmt: skip
def test_int_unary(op, a, want):
    (o,) = lanes(f"{op} %o0, %a0;", [U(a)])
    assert (o == want).all()


@pytest.mark.parametrize("line,ins,want", [
    ("mad.lo.s32 %o0, %a0, %a1, %a2;", (3, 4, 5), 17), ("mad.hi.u32 %o0, %a0, %a1, %a2;", (M, M, 1), M), ("sad.u32 %o0, %a0, %a1, %a2;", (2, 9, 1), 8),
    ("bfe.u32 %o0, %a0, %a1, %a2;", (0xABCD, 4, 8), 0xBC), ("bfe.s32 %o0, %a0, %a1, %a2;", (0x80, 4, 4), 0xFFFFFFF8),
    ("bfi.b32 %o0, %a0, %a1, 8, 4;", (0xF, 0, 0), 0xF00), ("dp4a.s32.s32 %o0, %a0, %a1, %a2;", (0xFF01FF01, 0x02020202, 10), 10),
    ("lop3.b32 %o0, %a0, %a1, %a2, 0x96;", (0xF0, 0xCC, 0xAA), 0x96), ("lop3.b32 %o0, %a0, %a1, %a2, 0xE8;", (12, 10, 6), 14),
    ("shf.l.wrap.b32 %o0, %a0, %a1, %a2;", (0x80000000, 1, 1), 3), ("shf.r.clamp.b32 %o0, %a0, %a1, %a2;", (1, 7, 40), 7),
    ("prmt.b32 %o0, %a0, %a1, %a2;", (0x33221100, 0x77665544, 0x7410), 0x77441100), ("prmt.b32 %o0, %a0, %a1, 0x8888;", (0x80, 0, 0), M),
    ("prmt.b32.rc8 %o0, %a0, %a1, %a2;", (0x33221100, 0, 2), 0x22222222),
])  # fmt: skip
def test_int_ternary(line, ins, want):
    (o,) = lanes(line, [U(x) for x in ins])
    assert (o == want).all()


def test_carry_chain_adds_128_bits():
    body = "add.cc.u32 %o0, %a0, %a1; addc.cc.u32 %o1, %a0, %a1; addc.u32 %o2, 0, 0; sub.cc.u32 %o3, %a1, %a0; subc.u32 %o4, 0, 0;"
    o = lanes(body, [U(M), U(1)], [np.uint32] * 5)
    assert [int(x[0]) for x in o] == [0, 1, 1, 2, M]


def test_wide_and_64_bit_forms():
    body = """mul.wide.u32 %o0, %a0, %a1; mul.wide.s32 %o1, %a0, %a1; mad.wide.u32 %o2, %a0, %a1, %o0; mul.hi.u64 %o3, %o1, %o1;
    shl.b64 %o4, %o0, 4; popc.b64 %o5, %o1;"""
    o = lanes(body, [U(M), U(M)], [np.uint64] * 5 + [np.uint32])
    assert [int(x[3]) for x in o] == [0xFFFFFFFE00000001, 1, 0xFFFFFFFC00000002, 0, 0xFFFFFFE000000010, 1]


@pytest.mark.parametrize("cmp,ty,a,b,want", [
    ("lt", "s32", M, 0, 1), ("lt", "u32", M, 0, 0), ("lo", "u32", 1, 2, 1), ("hs", "u32", 2, 2, 1), ("eq", "b32", 5, 5, 1), ("ne", "b32", 5, 5, 0), ("ge", "s32", M, M, 1), ("gt", "u32", M, 1, 1), ("le", "s32", 1, M, 0),
])  # fmt: skip
def test_setp_int(cmp, ty, a, b, want):
    body = f"setp.{cmp}.{ty} %q|%r, %a0, %a1; selp.u32 %o0, 1, 0, %q; selp.u32 %o1, 1, 0, %r;"
    o = lanes(body, [U(a), U(b)], [np.uint32] * 2, ".reg .pred %q, %r;\n")
    assert (o[0] == want).all() and (o[1] == 1 - want).all()


def test_setp_combines_and_pred_logic_per_lane():
    lane = np.arange(32, dtype=np.uint32)
    body = "setp.lt.u32 %q, %a0, 16; setp.ge.and.u32 %r, %a0, 8, %q; xor.pred %q, %q, %r; not.pred %r, %q; selp.u32 %o0, 1, 0, %q; selp.u32 %o1, 1, 0, !%r;"
    o = lanes(body, [lane], [np.uint32] * 2, ".reg .pred %q, %r;\n")
    assert (o[0] == (lane < 8)).all() and (o[1] == o[0]).all()


def test_mov_packs_low_element_first_and_unpacks():
    body = "mov.b64 %w, {%a0, %a1}; mov.b64 {_, %o0}, %w; mov.b32 {%h, %g}, %a0; mov.b32 %o1, {%g, %h}; mov.b128 %v, {%w, %w}; mov.b128 {%w, %x}, %v; mov.b64 {%o2, %o3}, %x;"
    o = lanes(body, [U(0x11112222), U(7)], [np.uint32] * 4, ".reg .b64 %w, %x; .reg .b16 %h, %g; .reg .b128 %v;\n")
    assert [int(x[0]) for x in o] == [7, 0x22221111, 0x11112222, 7]


def test_inactive_lanes_keep_their_value():
    lane = np.arange(32, dtype=np.uint32)
    (o,) = lanes("setp.eq.u32 %q, %a0, 3; mov.u32 %o0, 5; @%q mov.u32 %o0, 9; @!%q add.u32 %o0, %o0, 1;", [lane], decls=".reg .pred %q;\n")
    assert (o == np.where(lane == 3, 9, 6)).all()
