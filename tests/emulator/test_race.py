"""Happens-before: accesses that a wait orders pass, and without it they do not, in every order. Also what else needs several warps:
proxy fences, laps, exits, registers, and a warp that is held back."""

import numpy as np
import pytest
from emulator.harness import HEADER, kernel

from flash_attn_mx import emulator

DECLS = """.reg .pred p, q, w0, w1, w2;
.reg .b32 warp, lane, r<8>, s;
.reg .b64 st, g;
.shared .align 128 .b8 mem[4096];
.shared .align 8 .b64 bar, bar2;
"""
START = """mov.u32 warp, %tid.x; shr.u32 warp, warp, 5; mov.u32 lane, %laneid; mov.u32 s, mem;
setp.eq.u32 w0, warp, 0; setp.eq.u32 w1, warp, 1; setp.eq.u32 w2, warp, 2; setp.eq.u32 q, lane, 0;
@!w0 bra READY;
@q mbarrier.init.shared::cta.b64 [bar], 1;
@q mbarrier.init.shared::cta.b64 [bar2], 1;
READY: bar.sync 15;
"""
ORDERS = [("eager", 0), ("delayed", 0), ("random", 1), ("random", 5)]


def wait(bar, parity, label):
    return f"{label}: mbarrier.try_wait.parity.shared::cta.b64 p, [{bar}], {parity}; @!p bra {label};\n"


def roles(*bodies):
    """Warp i runs bodies[i]."""
    text = START
    for i, body in enumerate(bodies):
        text += f"setp.ne.u32 p, warp, {i}; @p bra NEXT{i};\n{body}\nbra END;\nNEXT{i}:\n"
    return text + "END:\n"


def run(*bodies, cluster=1, warps=None, out=None, **options):
    out = np.zeros(1024, np.uint32) if out is None else out
    m = emulator.Module.from_ptx(kernel(roles(*bodies), 1, DECLS))
    m.kernels["k"].launch(cluster, 32 * (warps or len(bodies)), [out], cluster, **options)
    return out


def check(name, *bodies, **options):
    """Every order reports it (name), or none does (None)."""
    for order, seed in ORDERS:
        if name:
            with pytest.raises(emulator.EmulatorError, match=rf"\[{name}\]"):
                run(*bodies, order=order, seed=seed, timeout=20, **options)
        else:
            run(*bodies, order=order, seed=seed, timeout=20, **options)


STORE = "st.shared.b32 [mem], lane;\n"
LOAD = "ld.shared.b32 r0, [mem];\n"
ARRIVE = "@q mbarrier.arrive.shared::cta.b64 st, [bar];\n"
EDGES = {
    "bar.sync": ("bar.sync 0;\n", "bar.sync 0;\n"),
    "bar.arrive": ("bar.arrive 1, 64;\n", "bar.sync 1, 64;\n"),
    "mbarrier": (ARRIVE, wait("bar", 0, "W")),
    "shared flag": (
        "@q st.release.cta.shared.b32 [mem+512], 1;\n",
        "W: ld.acquire.cta.shared.b32 r1, [mem+512]; setp.eq.u32 p, r1, 0; @p bra W;\n",
    ),
    "global flag": (
        "@q red.release.gpu.global.add.u32 [%p0], 1;\n",
        "W: ld.volatile.global.b32 r1, [%p0]; setp.eq.u32 p, r1, 0; @p bra W;\n",
    ),
    "cluster barrier": (
        "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n",
        "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n",
    ),
}


@pytest.mark.parametrize("edge", EDGES)
def test_edge_orders_accesses(edge):
    release, acquire = EDGES[edge]
    checks = ("race",)  # the flag in shared memory starts undefined, as zero
    check(None, STORE + release, acquire + LOAD, checks=checks)
    check(None, LOAD + release, acquire + STORE, checks=checks)
    check("race", release + STORE, acquire + LOAD, checks=checks)
    check("race", release + LOAD, acquire + STORE, checks=checks)


def test_no_edge():
    check("race", STORE, LOAD, checks=("race",))
    check("race", STORE, STORE)
    check(None, LOAD, LOAD, checks=("race",))


def test_message():
    with pytest.raises(emulator.EmulatorError, match=r"shared bytes 0x\w+\.\. of CTA 0 with no wait.*warp \d of CTA 0 \(line \d+\)"):  # fmt: skip
        run(STORE, STORE)


@pytest.mark.parametrize("width,step", [("b32", 4), ("b16", 2), ("b8", 1)])
def test_neighbours_do_not_race(width, step):
    at = [f"add.u32 r1, s, {i * step}; @q st.shared.{width} [r1], 1;\n" for i in range(4)]
    check(None, *at)
    check("race", *at[:3], at[1])


def test_edge_is_transitive():
    hop = wait("bar", 0, "W") + "@q mbarrier.arrive.shared::cta.b64 st, [bar2];\n"
    check(None, STORE + ARRIVE, hop, wait("bar2", 0, "V") + LOAD)
    check("race", STORE, ARRIVE + hop, wait("bar2", 0, "V") + LOAD, checks=("race",))


def test_atomics_do_not_race():
    add = "atom.shared.add.u32 r0, [mem+16], 1;\n"
    check(None, add, add, checks=("race",))
    check("race", add, "st.shared.b32 [mem+16], 1;\n", checks=("race",))


# ---- asynchronous agents --------------------------------------------------------------------------------------------

BULK = "@q cp.async.bulk.global.shared::cta.bulk_group [%p0], [s], 128;\n@q cp.async.bulk.commit_group;\n"
FENCE = "fence.proxy.async.shared::cta;\n"
FILL = "shl.b32 r0, lane, 2; add.u32 r0, s, r0; st.shared.b32 [r0], lane;\n"
SYNC = "bar.sync 0;\n"
WAIT_READ = "@q cp.async.bulk.wait_group.read 0;\n"


def test_bulk_store_is_waited_for():
    check(None, FILL + FENCE + BULK + WAIT_READ + FILL)
    check("race", FILL + FENCE + BULK + FILL + WAIT_READ, checks=("race",))
    check("race", FILL + FENCE + BULK + SYNC + WAIT_READ, SYNC + FILL, checks=("race",))
    other = BULK.replace("[s]", "[mem+256]")
    two = FILL + "st.shared.b32 [r0+256], lane;\n" + FENCE + BULK + other
    one_left = "@q cp.async.bulk.wait_group.read 1;\n"
    check(None, two + one_left + FILL + WAIT_READ)
    check("race", two + one_left + "st.shared.b32 [r0+256], lane;\n" + WAIT_READ, checks=("race",))


def test_exit_without_wait_for_bulk_store():
    check("leak", FILL + FENCE + BULK, checks="all")


def test_proxy_fence():
    """By the writer, or by the reader once it knows of the write; a third warp's does not count."""
    store = SYNC + SYNC + BULK + WAIT_READ
    check(None, FILL + FENCE + SYNC + SYNC, SYNC + SYNC, store)
    check("proxy", FILL + SYNC + SYNC, SYNC + SYNC, store)
    check("proxy", FILL + SYNC + SYNC, SYNC + FENCE + SYNC, store)
    check("proxy", FENCE + FILL + SYNC + SYNC, SYNC + SYNC, store)
    check(None, FILL + SYNC + SYNC, SYNC + SYNC, SYNC + FENCE + SYNC + BULK + WAIT_READ)
    check("proxy", FILL + SYNC + SYNC, SYNC + SYNC, FENCE + store)
    check("proxy", (FILL + FENCE + SYNC + SYNC).replace("::cta", "::global").replace("shared::global", "global"), SYNC + SYNC, store)  # fmt: skip


LOAD_BULK = """@q mbarrier.arrive.expect_tx.shared::cta.b64 st, [bar], 128;
@q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [s], [%p0], 128, [bar];
"""


def test_bulk_load_is_waited_for():
    check(None, LOAD_BULK + wait("bar", 0, "W") + LOAD)
    check(None, LOAD_BULK, wait("bar", 0, "W") + LOAD)
    check("race", LOAD_BULK + LOAD + wait("bar", 0, "W"), checks=("race",))
    check("race", LOAD_BULK + wait("bar", 0, "W"), LOAD, checks=("race",))
    check("race", LOAD_BULK + wait("bar", 0, "W"), FILL, checks=("race",))
    twice = LOAD_BULK.replace(", 128;", ", 256;", 1) + LOAD_BULK.split("\n")[1] + "\n"
    check("race", twice + wait("bar", 0, "W"))


def test_cp_async_is_waited_for():
    copy = "shl.b32 r0, lane, 4; add.u32 r0, s, r0; mul.wide.u32 g, lane, 16; add.u64 g, g, %p0; cp.async.cg.shared.global [r0], [g], 16;\n"  # fmt: skip
    done = "cp.async.commit_group; cp.async.wait_group 0;\n"
    check(None, copy + done + LOAD)
    check(None, copy + done + SYNC, SYNC + LOAD)
    check("race", copy + SYNC + done, SYNC + LOAD, checks=("race",))
    check("race", copy + "cp.async.commit_group; cp.async.wait_group 1;\n" + SYNC + done, SYNC + LOAD, checks=("race",))  # fmt: skip
    arrive = "cp.async.mbarrier.arrive.noinc.shared::cta.b64 [bar];\n"
    init = "@q mbarrier.init.shared::cta.b64 [mem+2048], 32; bar.sync 0;\n"
    check(None, init + copy + arrive.replace("bar]", "mem+2048]"), SYNC + wait("mem+2048", 0, "W") + LOAD)  # fmt: skip


# ---- tensor memory: warps 0 and 4 reach the same lanes ---------------------------------------------------------------

TMEM = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [mem+1024], 32; bar.sync 0; ld.shared.b32 r7, [mem+1024];\n"
GET = SYNC + "ld.shared.b32 r7, [mem+1024];\n"
FREE = "bar.sync 2; tcgen05.dealloc.cta_group::1.sync.aligned.b32 r7, 32;\n"
LD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {r1}, [r7];\n"
ST = "tcgen05.st.sync.aligned.32x32b.x1.b32 [r7], {lane};\n"
WAIT_LD, WAIT_ST = "tcgen05.wait::ld.sync.aligned;\n", "tcgen05.wait::st.sync.aligned;\n"
BEFORE, AFTER = "tcgen05.fence::before_thread_sync;\n", "tcgen05.fence::after_thread_sync;\n"
USE = "add.u32 r2, r1, 1;\n"
NEXT = "bar.sync 1, 64;\n"


def tmem(name, first, second, **options):
    idle = SYNC + "bar.sync 2;\n"
    check(name, TMEM + first + FREE, idle, idle, idle, GET + second + "bar.sync 2;\n", **options)


def test_tmem_store_is_waited_for():
    tmem(None, ST + WAIT_ST + NEXT, NEXT + LD + WAIT_LD)
    tmem("race", ST + NEXT + WAIT_ST, NEXT + LD + WAIT_LD, checks=("race",))
    tmem("race", ST + LD + WAIT_LD + WAIT_ST, "", checks=("race",))


def test_tmem_load_is_waited_for():
    """wait::ld says that it is over, and so does a use of its registers, for which hardware stalls."""
    start = ST + WAIT_ST
    tmem(None, start + LD + WAIT_LD + NEXT, NEXT + ST + WAIT_ST)
    tmem("race", start + LD + NEXT + WAIT_LD, NEXT + ST + WAIT_ST)
    tmem(None, start + LD + USE + NEXT, NEXT + ST + WAIT_ST)
    tmem("race", start + LD + USE + LD + NEXT, NEXT + ST + WAIT_ST)


def test_strict_tmem_rules():
    """What `ptx` adds: wait::ld before the registers are used, and a pair of fences around each hand-over."""
    all_ = dict(checks="all")
    pair = (ST + WAIT_ST + BEFORE + NEXT, NEXT + AFTER + LD + WAIT_LD + BEFORE)
    free = AFTER  # before the dealloc
    tmem(None, pair[0] + "bar.sync 3, 64;\n" + free, pair[1] + "bar.sync 3, 64;\n", **all_)
    tmem("ptx", ST + WAIT_ST + NEXT, NEXT + AFTER + LD + WAIT_LD, **all_)
    tmem("ptx", ST + WAIT_ST + BEFORE + NEXT, NEXT + LD + WAIT_LD, **all_)
    tmem("ptx", ST + WAIT_ST + LD + USE + WAIT_LD, "", **all_)
    tmem(None, ST + WAIT_ST + LD + WAIT_LD + USE, "", **all_)


# ---- mbarriers ------------------------------------------------------------------------------------------------------


def test_barrier_used_before_its_initialisation_is_known():
    init = "@q mbarrier.init.shared::cta.b64 [mem+2048], 1;\n"
    arrive = "@q mbarrier.arrive.shared::cta.b64 st, [mem+2048];\n"
    check(None, init + SYNC, SYNC + arrive)
    spin = "W: ld.shared.b64 st, [mem+2048]; setp.eq.u64 p, st, 0; @p bra W;\n"
    check("race", init, spin + arrive, checks=("race",))


def test_lap():
    """Warp 1 waits for phase 0; warp 0 may end phase 1 before warp 1 has looked."""
    ends = ARRIVE + wait("bar", 0, "W")
    check("lap", ends + ARRIVE, wait("bar", 0, "V"))
    check(None, ends + SYNC + ARRIVE, wait("bar", 0, "V") + SYNC)
    check(None, ends + ARRIVE, wait("bar", 0, "V"), checks=("race",))


def test_lap_of_a_named_barrier():
    """Warp 0's second arrival ends the phase in place of a third warp's first."""
    check("lap", "bar.arrive 1, 96; bar.arrive 1, 96;\n", "bar.sync 1, 96;\n")
    check(None, "bar.arrive 1, 96; bar.arrive 1, 96;\n", "bar.sync 1, 96;\n", checks=("race",))
    check(None, "bar.arrive 1, 96; bar.sync 1, 96;\n", "bar.sync 1, 96;\n")
    once = "bar.arrive 1, 64;\n"
    check(None, once + SYNC + once, "bar.sync 1, 64;\n" + SYNC + "bar.sync 1, 64;\n")


def test_exited_cta():
    """CTA 1 arrives on a barrier of CTA 0, which does not wait for it."""
    start = "mov.u32 r0, %cluster_ctarank; setp.eq.u32 p, r0, 0; barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
    far = "mov.u32 r1, bar; mapa.shared::cluster.u32 r1, r1, 0;\n"
    arrive = "@q mbarrier.arrive.release.cluster.shared::cluster.b64 _, [r1];\n"
    busy = "mov.u32 r2, 0; L: add.u32 r2, r2, 1; setp.lt.u32 w2, r2, 3000; @w2 bra L;\n"
    stay = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n"
    check("exited", start + "@p bra END;\n" + far + busy + arrive, cluster=2)
    check(None, start + "@p bra DONE;\n" + far + busy + arrive + "DONE:\n" + stay, cluster=2)


# ---- registers and scheduling ---------------------------------------------------------------------------------------


def registers(body, threads=256, directive=".reqntid 256, 1, 1", **options):
    text = f"{HEADER}.visible .entry k() {directive} {{ .reg .pred p; .reg .b32 warp; mov.u32 warp, %tid.x; setp.ge.u32 p, warp, 128;\n{body}\nret; }}\n"
    emulator.Module.from_ptx(text).kernels["k"].launch(1, threads, [], **options)


def split(up, down):
    return f"@p bra DOWN; setmaxnreg.inc.sync.aligned.u32 {up}; ret; DOWN: setmaxnreg.dec.sync.aligned.u32 {down};"


def test_register_pool():
    two = dict(directive=".reqntid 256, 1, 1 .minnctapersm 2", timeout=20)  # 128 per thread
    registers(split(232, 24), **two)
    with pytest.raises(
        emulator.EmulatorError, match=r"deadlock(?s:.*)240 registers, has 128; 80 are free"
    ):
        registers(split(240, 24), **two)
    registers(split(240, 24), registers=136, **two)
    with pytest.raises(emulator.EmulatorError, match=r"240 registers, has 128; 80 are free"):
        registers(split(240, 24), directive=".maxnreg 120", registers=128, timeout=20)
    with pytest.raises(emulator.EmulatorError, match=r"232 registers, has 120; 48 are free"):
        registers(split(232, 24), directive=".maxnreg 120", timeout=20)
    with pytest.raises(ValueError, match="registers must be 0..255"):
        registers(split(232, 24), registers=300)


def test_random_order_holds_a_warp_back():
    """Seeds 4..7 of 8 let other warps run thousands of instructions first; the rest never do."""
    slow = "mov.u32 r0, 0; L: add.u32 r0, r0, 1; setp.lt.u32 p, r0, 1000; @p bra L; st.volatile.global.b32 [%p0+8], 1;\n"
    look = "ld.volatile.global.b32 r1, [%p0+8]; st.global.b32 [%p0], r1;\n"
    seen = [run(slow, look, order="random", seed=s)[0] for s in range(16)]
    assert not any(seen[0:4]) and not any(seen[8:12]) and any(seen[4:8] + seen[12:16])
