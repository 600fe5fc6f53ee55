"""Loads, stores, atomics, shuffles, barriers and the faults that they must raise."""

import numpy as np
import pytest
from emulator.harness import kernel, lanes, launch

from flash_attn_mx import emulator

U = np.uint32
LANE = np.arange(32, dtype=np.uint32)


def test_vector_and_narrow_accesses():
    x = np.zeros(96, np.uint32)
    x = x[-x.ctypes.data % 32 // 4 :][:64]  # 256-bit accesses need 32-byte alignment
    x[:] = np.arange(64)
    y = np.zeros(64, np.uint32)
    body = """ld.global.v8.b32 {%r0,%r1,%r2,%r3,%r4,%r5,%r6,%r7}, [%p0+32]; st.global.v4.b32 [%p1], {%r7,%r6,%r5,%r4};
    ld.global.s8 %r0, [%p0+4]; st.global.b16 [%p1+16], %r0; ld.global.v2.b64 {%d0,%d1}, [%p0]; st.global.b64 [%p1+24], %d1;"""
    x[1] = 0xFF
    launch(kernel(body, 2, ".reg .b32 %r<8>; .reg .b64 %d<2>;"), [x, y], block=1)
    assert y[:4].tolist() == [15, 14, 13, 12] and y[4] == 0xFFFF and y[6:8].tolist() == [2, 3]


@pytest.mark.parametrize(
    "op,b,want",
    [
        ("add.u32", 1, 32 + 7),
        ("max.u32", None, 31),
        ("min.u32", None, 0),
        ("or.b32", None, 31),
        ("inc.u32", 5, (7 + 32 - 2) % 6),
    ],
)
def test_reductions(op, b, want):
    y = np.array([7], np.uint32)
    if op == "min.u32":
        y[0] = 99
    src = "%l" if b is None else str(b)
    launch(kernel(f"mov.u32 %l, %laneid; red.global.{op} [%p0], {src};", 1, ".reg .b32 %l;"), [y])
    if op != "inc.u32":
        assert y[0] == want
    else:
        v = 7
        for _ in range(32):
            v = 0 if v >= 5 else v + 1
        assert y[0] == v


def test_atomics_return_the_old_value():
    y = np.array([0], np.uint32)
    z = np.zeros(32, np.uint32)
    body = "mov.u32 %l, %laneid; atom.global.add.u32 %r, [%p0], 3; mad.wide.u32 %d, %l, 4, %p1; st.global.u32 [%d], %r; atom.global.cas.b32 %r, [%p0], 96, 5;"
    launch(kernel(body, 2, ".reg .b32 %l, %r; .reg .b64 %d;"), [y, z])
    assert sorted(z.tolist()) == list(range(0, 96, 3)) and y[0] == 5


@pytest.mark.parametrize(
    "mode,arg,clamp,want",
    [
        ("idx", 5, 31, lambda i: 5),
        ("up", 1, 0, lambda i: max(i - 1, 0)),
        ("down", 2, 31, lambda i: i + 2 if i < 30 else i),
        ("bfly", 16, 31, lambda i: i ^ 16),
        ("idx", 1, 0x181F, lambda i: i // 8 * 8 + 1),
    ],
)
def test_shfl(mode, arg, clamp, want):
    (o,) = lanes(
        f"shfl.sync.{mode}.b32 %o0|%q, %a0, {arg}, {clamp}, -1;", [LANE], decls=".reg .pred %q;\n"
    )
    assert o.tolist() == [want(i) for i in range(32)]


def test_votes_match_redux_elect():
    body = """setp.lt.u32 %q, %a0, 3; vote.sync.ballot.b32 %o0, %q, -1; vote.sync.any.pred %r, %q, -1; selp.u32 %o1, 1, 0, %r;
    and.b32 %t, %a0, 1; match.any.sync.b32 %o2, %t, -1; redux.sync.add.u32 %o3, %a0, -1; elect.sync _|%r, -1; selp.u32 %o4, 1, 0, %r;"""
    o = lanes(body, [LANE], [np.uint32] * 5, ".reg .pred %q, %r; .reg .b32 %t;\n")
    assert (
        (o[0] == 7).all()
        and (o[1] == 1).all()
        and o[2][:2].tolist() == [0x55555555, 0xAAAAAAAA]
        and (o[3] == 496).all()
    )
    assert o[4].tolist() == [1] + [0] * 31


def test_divergence_reconverges_and_loops_finish():
    body = """mov.u32 %o0, 0; mov.u32 %t, %a0;
    L: setp.eq.u32 %q, %t, 0; @%q bra D; add.u32 %o0, %o0, %t; sub.u32 %t, %t, 1; bra L;
    D: bar.warp.sync -1; shfl.sync.bfly.b32 %o1, %o0, 1, 31, -1;"""
    o = lanes(body, [LANE], [np.uint32] * 2, ".reg .pred %q; .reg .b32 %t;\n")
    tri = [i * (i + 1) // 2 for i in range(32)]
    assert o[0].tolist() == tri and o[1].tolist() == [tri[i ^ 1] for i in range(32)]


SMEM = ".shared .align 16 .b8 buf[1024];\n.shared .align 8 .b64 bar;\n"


def test_shared_memory_between_warps_needs_its_barrier_and_has_it():
    y = np.zeros(64, np.uint32)
    body = """mov.u32 %t, %tid.x; mov.u32 %s, buf; mad.lo.u32 %a, %t, 4, %s; st.shared.u32 [%a], %t; bar.sync 0;
    xor.b32 %u, %t, 63; mad.lo.u32 %a, %u, 4, %s; ld.shared.u32 %r, [%a]; mad.wide.u32 %d, %t, 4, %p0; st.global.u32 [%d], %r;"""
    launch(kernel(body, 1, SMEM + ".reg .b32 %t,%s,%a,%u,%r; .reg .b64 %d;"), [y], block=64)
    assert y.tolist() == list(range(63, -1, -1))


@pytest.mark.parametrize("body,check,detail", [
    ("ld.global.u32 %r, [%p0+4096];", "bounds", "nearest buffer"),
    ("ld.global.u32 %r, [%p0+2];", "align", "aligned to 4"),
    ("mov.u32 %a, buf; ld.shared.u32 %r, [%a+4];", "uninit", "never written"),
    ("mov.u32 %a, buf; ld.shared.u32 %r, [%a+2048];", "bounds", "shared access"),
    ("mov.u32 %a, bar; mbarrier.arrive.shared.b64 _, [%a];", "mbarrier", "not initialised"),
    ("mov.u32 %a, bar; mbarrier.init.shared.b64 [%a], 1; mbarrier.arrive.shared.b64 _, [%a], 2;", "mbarrier", "with 1 pending"),
    ("mov.u32 %a, bar; mbarrier.init.shared.b64 [%a], 1; W: mbarrier.try_wait.parity.shared.b64 %q, [%a], 0; @!%q bra W;", "deadlock", "pending 1 of 1"),
    ("bar.sync 1, 64;", "deadlock", "32 of 64 threads"),
    ("trap;", "trap", "trap"),
])  # fmt: skip
def test_faults_name_check_line_and_place(body, check, detail):
    """Each fault is planted; the report must say which check, where, and the values."""
    y = np.zeros(4, np.uint32)
    elected = "setp.ne.u32 %e, %laneid, 0;\n@%e bra X;\n" if check == "mbarrier" else ""
    text = kernel(f"{elected}{body}\nX:", 1, SMEM + ".reg .b32 %r, %a; .reg .pred %q, %e;")
    with pytest.raises(emulator.EmulatorError) as e:
        launch(text, [y])
    msg = str(e.value)
    assert f"[{check}]" in msg and detail in msg and "line " in msg and "warp 0" in msg


def test_unknown_form_fails_at_load_with_its_line():
    text = kernel("add.f32.bogus %r, %r, %r;", 0, ".reg .b32 %r;")
    with pytest.raises(ValueError, match=r"line \d+: unknown instruction form add.f32.bogus"):
        emulator.Module.from_ptx(text)


@pytest.mark.parametrize("order", ["eager", "delayed", "random"])
def test_mbarrier_and_bulk_copy(order):
    x = np.arange(64, dtype=np.uint32)
    y = np.zeros(64, np.uint32)
    body = """mov.u32 %t, %tid.x; mov.u32 %s, buf; mov.u32 %a, bar; setp.ne.u32 %q, %t, 0; @%q bra W;
    mbarrier.init.shared.b64 [%a], 1; mbarrier.arrive.expect_tx.shared.b64 _, [%a], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%p0], 256, [%a];
    W: bar.sync 0; V: mbarrier.try_wait.parity.shared.b64 %q, [%a], 0; @!%q bra V;
    mad.lo.u32 %a, %t, 8, %s; ld.shared.v2.u32 {%r, %u}, [%a]; add.u32 %r, %r, 100; st.shared.v2.u32 [%a], {%r, %u};
    fence.proxy.async.shared::cta; bar.sync 0; setp.ne.u32 %q, %t, 0; @%q bra E;
    cp.async.bulk.global.shared::cta.bulk_group [%p1], [%s], 256; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    E:"""
    text = kernel(body, 2, SMEM + ".reg .b32 %t,%s,%a,%u,%r; .reg .pred %q;")
    launch(text, [x, y], order=order)
    want = x.copy()
    want[::2] += 100
    assert y.tolist() == want.tolist()
    with pytest.raises(emulator.EmulatorError, match=r"\[proxy\]"):
        launch(text.replace("fence.proxy.async.shared::cta;", ""), [x, y], order=order)
    if order == "delayed":  # nobody waits for the copy: its data is not there
        with pytest.raises(emulator.EmulatorError, match=r"\[uninit\]"):
            launch(
                text.replace("V: mbarrier.try_wait.parity.shared.b64 %q, [%a], 0; @!%q bra V;", ""),
                [x, y],
                order=order,
            )


@pytest.mark.parametrize("order", ["eager", "delayed", "random"])
def test_a_bulk_store_left_at_exit_still_happens(order):
    """CUTLASS's epilogue exits so; an H200 finishes it (probe_exit_stores.py)."""
    y = np.zeros(64, np.uint32)
    y = y[-y.ctypes.data % 16 // 4 :][:8]
    body = """mov.u32 %l, %laneid; mov.u32 %a, buf; mad.lo.u32 %r, %l, 4, %a; setp.lt.u32 %q, %l, 8;
    @%q st.shared.u32 [%r], %l; fence.proxy.async.shared::cta; bar.warp.sync -1; setp.ne.u32 %q, %l, 0; @%q bra Z;
    cp.async.bulk.global.shared::cta.bulk_group [%p0], [%a], 32; cp.async.bulk.commit_group;
    Z:"""
    launch(kernel(body, 1, ".shared .align 16 .b8 buf[32]; .reg .b32 %l, %a, %r; .reg .pred %q;"), [y], order=order)  # fmt: skip
    assert y.tolist() == list(range(8))


def test_a_bulk_load_left_at_exit_is_a_leak():
    x = np.zeros(64, np.uint32)
    x = x[-x.ctypes.data % 16 // 4 :][:8]
    body = """mbarrier.init.shared.b64 [bar], 1; mbarrier.arrive.expect_tx.shared.b64 _, [bar], 32; mov.u32 %a, buf;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%a], [%p0], 32, [bar];"""
    text = kernel(body, 1, ".shared .align 16 .b8 buf[32]; .shared .align 8 .b8 bar[8]; .reg .b32 %a;")  # fmt: skip
    with pytest.raises(emulator.EmulatorError, match=r"\[leak\].*cp.async.bulk"):
        launch(text, [x], block=1, order="delayed")
    launch(text, [x], block=1, order="delayed", checks=["uninit", "proxy"])
