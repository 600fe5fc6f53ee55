"""Forms of copies, barriers, clusters and tensor memory that no other test and no recorded probe executes.

test_isa_coverage.py says which alternative of which row lacks a test. Copies run in all three asynchronous orders.
"""

import itertools

import numpy as np
import pytest
from emulator.harness import kernel, launch
from emulator.test_forms import aligned, dots

from flash_attn_mx import emulator

ORDERS = ["eager", "delayed", "random"]
REGS = """.shared .align 1024 .b8 buf[8192]; .shared .align 8 .b64 bar, bar2; .reg .b32 %s, %b, %b2, %t, %c, %o, %r<12>;
.reg .b64 %d<6>, %pol; .reg .pred %q, %p, %w;"""
START = """mov.u32 %s, buf; mov.u32 %b, bar; mov.u32 %b2, bar2; mov.u32 %t, %tid.x; mov.u32 %c, %cluster_ctarank; xor.b32 %o, %c, 1; mov.b64 %pol, 0;
setp.eq.u32 %p, %t, 0; setp.ne.u32 %q, %t, 0;
"""
READY = (
    "bar.sync 0; barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;\n"
)
WAIT = "V{0}: mbarrier.try_wait.parity.shared::cta.b64 %w, [%b], {1}; @!%w bra V{0};\n"
GROUP = "cp.async.bulk.commit_group; cp.async.bulk.wait_group{} 0;\n"


def init(count=1, tx=0):
    expect = f"@%p mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%b], {tx};\n" if tx else ""
    return f"@%p mbarrier.init.shared::cta.b64 [%b], {count};\n@%p fence.mbarrier_init.release.cluster;\n{expect}"


def dump(words, at=0):
    """Shared words, written out by thread 0 of each CTA behind those of lower ranks."""
    out = "".join(f"@%p ld.shared.b32 %r0, [%s+{at + 4 * i}]; @%p st.global.b32 [%d0+{4 * i}], %r0;\n" for i in range(words))  # fmt: skip
    return f"mad.wide.u32 %d0, %c, {4 * words}, %p1;\n{out}"


def run(body, args, ctas=1, **options):
    text = kernel(START + body, len(args), REGS)
    return launch(text, args, grid=ctas, cluster=ctas, **options)


# ---- cp.async --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("how", ["ca.shared", "ca.shared::cta", "cg.shared", "ca", *(f"{c}.shared.global.L2::{k}" for c in ("ca", "cg") for k in ("64B", "128B", "256B")), "cg.shared.global.L2::cache_hint"])  # fmt: skip
@pytest.mark.parametrize("wait", ["wait_all", "wait_group 0"])
def test_cp_async(how, wait, order):
    x, y = aligned(np.arange(128, dtype=np.uint32) + 1), np.zeros(128, np.uint32)
    form = f"cp.async.{how}" + ("" if "global" in how else ".global")
    hint = ", %pol" if "cache_hint" in how else ""
    commit = "cp.async.commit_group;" if "group" in wait else ""
    body = f"mad.lo.u32 %r1, %t, 16, %s; mad.wide.u32 %d1, %t, 16, %p0; {form} [%r1], [%d1], 16{hint}; {commit} cp.async.{wait}; bar.sync 0;\n{dump(128)}"
    run(body, [x, y], order=order)
    assert (x == y).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("space", ["", "shared", "shared::cta"])
@pytest.mark.parametrize("noinc", ["", "noinc"])
def test_cp_async_arrives_at_an_mbarrier(space, noinc, order):
    """With .noinc the arrival was counted at init; without it, the instruction adds one to the pending count first."""
    x, y = aligned(np.arange(128, dtype=np.uint32) + 1), np.zeros(128, np.uint32)
    arrive = "mbarrier.arrive.shared::cta.b64 _, [%b];" if not noinc else ""
    form = dots("cp.async.mbarrier.arrive", noinc, space, "b64")
    body = f"{init(32)}bar.sync 0; mad.lo.u32 %r1, %t, 16, %s; mad.wide.u32 %d1, %t, 16, %p0; cp.async.ca.shared.global [%r1], [%d1], 16; {form} [%b]; {arrive}\n{WAIT.format(0, 0)}{dump(128)}"  # fmt: skip
    run(body, [x, y], order=order)
    assert (x == y).all()
    if order == "delayed":  # the wait is what makes the data visible
        with pytest.raises(emulator.EmulatorError, match="uninit"):
            run(body.replace(WAIT.format(0, 0), "bar.sync 0;"), [x, y], order=order)


# ---- bulk copies -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("to", ["shared::cluster", "shared::cta"])
@pytest.mark.parametrize("hint", ["", "L2::cache_hint"])
def test_bulk_load(to, hint, order):
    x, y = aligned(np.arange(64, dtype=np.uint32) + 1), np.zeros(64, np.uint32)
    form = dots(f"cp.async.bulk.{to}.global.mbarrier::complete_tx::bytes", hint)
    body = f"{init(1, 256)}bar.sync 0; @%p {form} [%s], [%p0], 256, [%b]{', %pol' if hint else ''}; @%p mbarrier.arrive.shared::cta.b64 _, [%b];\n{WAIT.format(0, 0)}{dump(64)}"  # fmt: skip
    run(body, [x, y], order=order)
    assert (x == y).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("hint", ["", "L2::cache_hint"])
@pytest.mark.parametrize("mask", [1, 2, 6, 15])
def test_bulk_load_multicast(mask, hint, order):
    """CTA 1 loads for those of the mask: the same offset, and the barrier at the same offset, in each of them."""
    x, y = aligned(np.arange(16, dtype=np.uint32) + 1), np.zeros((4, 16), np.uint32)
    form = dots("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster", hint)  # fmt: skip
    zero = "".join(f"@%p st.shared.b32 [%s+{4 * i}], 0;\n" for i in range(16))
    body = f"""{zero}{init(1)} shr.u32 %r1, {mask}, %c; and.b32 %r1, %r1, 1; shl.b32 %r1, %r1, 6; @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%b], %r1;
    fence.proxy.async; {READY} setp.eq.u32 %w, %c, 1; and.pred %w, %w, %p; mov.b16 %m, {mask}; @%w {form} [%s], [%p0], 64, [%b], %m{", %pol" if hint else ""};
    {WAIT.format(0, 0)}{dump(16)}{READY}"""
    text = kernel(START + body, 2, REGS + ".reg .b16 %m;")
    launch(text, [x, y], grid=4, cluster=4, order=order)
    assert (y == np.where((mask >> np.arange(4) & 1)[:, None] == 1, x, 0)).all()
    with pytest.raises(emulator.EmulatorError, match="names CTAs outside"):
        launch(text.replace(f"mov.b16 %m, {mask}", "mov.b16 %m, 16"), [x, y], grid=4, cluster=4)


@pytest.mark.parametrize("order", ORDERS)
def test_bulk_copy_to_the_other_cta(order):
    y = np.zeros((2, 16), np.uint32)
    fill = "".join(f"mad.lo.u32 %r1, %c, 100, {i}; @%p st.shared.b32 [%s+{4 * i}], %r1;\n" for i in range(16))  # fmt: skip
    body = f"""{fill}{init(1)} @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%b], 64; fence.proxy.async; {READY}
    mapa.shared::cluster.u32 %r2, %s, %o; mapa.shared::cluster.u32 %r3, %b, %o;
    @%p cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r2+1024], [%s], 64, [%r3];
    {WAIT.format(0, 0)}{dump(16, 1024)}{READY}"""
    run(body, [y, y], 2, order=order)
    assert y.tolist() == [[100 + i for i in range(16)], list(range(16))]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("hint", ["", "L2::cache_hint"])
@pytest.mark.parametrize("read", ["", ".read"])
def test_bulk_store_and_reduction(hint, read, order):
    x, y = aligned(np.arange(64, dtype=np.uint32)), aligned(np.full(64, 7, np.uint32))
    fill = "".join(f"@%p st.shared.b32 [%s+{4 * i}], {i};\n" for i in range(64))
    policy = ", %pol" if hint else ""
    body = f"{fill}fence.proxy.async; bar.sync 0;\n@%q bra E;\n{dots('cp.async.bulk.global.shared::cta.bulk_group', hint)} [%p0], [%s], 256{policy};\n{dots('cp.reduce.async.bulk.global.shared::cta.bulk_group', hint, 'add.u32')} [%p1], [%s], 256{policy};\n{GROUP.format(read)}E:"  # fmt: skip
    run(body, [x, y], order=order)
    assert (x == np.arange(64)).all() and (y == np.arange(64) + 7).all()


# ---- tensor copies ---------------------------------------------------------------------------------------------------
def box_of(rank):
    dims = (16, 3, 3, 2, 2)[:rank]
    x = aligned(np.arange(int(np.prod(dims)) + 64, dtype=np.uint32) + 1)[: int(np.prod(dims))]
    x = x.reshape(dims[::-1])
    return x, emulator.TensorMap.tiled(x, (8, 2, 2, 2, 1)[:rank])


def tensor_kernel(body):
    """Parameters m, p0, p1."""
    text = kernel(START + body, 2, REGS + ".reg .b64 %m; .reg .b16 %k;")
    text = text.replace("k(.param", "k(.param .align 64 .b8 m[128], .param").replace("mov.u32 %s, buf;", "mov.b64 %m, m; cvta.param.u64 %m, %m; mov.u32 %s, buf;")  # fmt: skip
    return text


LOADS = [  # the three orders in which CUTLASS, the manual and peers write the modifiers
    ("{r}d.{g}.{to}.global.{tile}.mbarrier::complete_tx::bytes.{m}.{h}"), ("{r}d.{to}.global.{tile}.mbarrier::complete_tx::bytes.{g}.{m}.{h}"), ("{r}d.{to}.global.{tile}.mbarrier::complete_tx::bytes.{m}.{g}.{h}"),
    ("{r}d.{to}.global.{tile}.mbarrier::complete_tx::bytes.{m}.{h}.{g}"),
]  # fmt: skip


@pytest.mark.parametrize("spelling", range(4))
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("g", ["", "cta_group::1", "cta_group::2"])
@pytest.mark.parametrize("m,to,tile,h", [("", "shared::cta", "tile", ""), ("", "shared::cluster", "", "L2::cache_hint"), ("multicast::cluster", "shared::cluster", "tile", "L2::cache_hint"), ("multicast::cluster", "shared::cluster", "", "")])  # fmt: skip
def test_tensor_load(spelling, rank, g, m, to, tile, h):
    """CTA 0 of a pair loads a box for itself or for both; with cta_group::2 every signal goes to the barrier of CTA 0."""
    if not g and spelling:
        return  # without a CTA group there is one spelling
    x, t = box_of(rank)
    box = (8, 2, 2, 2, 1)[:rank]
    words = int(np.prod(box))
    at = (4, 1, 0, 0, 1)[:rank]
    op = "cp.async.bulk.tensor." + dots(*[p for p in LOADS[spelling].format(r=rank, g=g, to=to, tile=tile, m=m, h=h).split(".") if p])  # fmt: skip
    tx = 4 * words * (2 if m and g == "cta_group::2" else 1)
    both = m and g != "cta_group::2"
    y = np.zeros((2, words), np.uint32)
    zero = "".join(f"@%p st.shared.b32 [%s+{4 * i}], 0;\n" for i in range(words))
    args = (", %k" if m else "") + (", %pol" if h else "")
    waits = "" if both else "setp.ne.u32 %w, %c, 0; @%w bra D;\n"
    body = f"""{zero}{init(1)} @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%b], {tx}; fence.proxy.async; {READY}
    mov.b16 %k, 3; setp.eq.u32 %w, %c, 0; and.pred %w, %w, %p; @%w {op} [%s], [%m, {{{", ".join(map(str, at))}}}], [%b]{args};
    {waits}{WAIT.format(0, 0)}D: {READY}{dump(words)}"""
    launch(tensor_kernel(body), [t, y, y], grid=2, cluster=2, order=ORDERS[(rank + spelling) % 3])
    index = tuple(slice(a, a + b) for a, b in zip(at, box))[::-1]
    padded = np.zeros([n + 8 for n in x.shape], np.uint32)
    padded[tuple(slice(0, n) for n in x.shape)] = x
    want = padded[index].reshape(-1)
    assert (y[0] == want).all() and (y[1] == (want if m else 0)).all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("tile,h", [("", ""), ("tile", "L2::cache_hint")])
def test_tensor_store_and_prefetch(rank, tile, h, order):
    x, t = box_of(rank)
    before, box, at = x.copy(), (8, 2, 2, 2, 1)[:rank], (12, 2, 1, 0, 1)[:rank]
    words = int(np.prod(box))
    policy, xyz = ", %pol" if h else "", ", ".join(map(str, at))
    fill = "".join(f"@%p st.shared.b32 [%s+{4 * i}], {1000 + i};\n" for i in range(words))
    op = dots(f"cp.async.bulk.tensor.{rank}d.global.shared::cta", tile, "bulk_group", h)
    pre = dots(f"cp.async.bulk.prefetch.tensor.{rank}d.L2.global", tile, h)
    body = f"{fill}fence.proxy.async; bar.sync 0;\n@%q bra E;\n{pre} [%m, {{{xyz}}}]{policy};\n{op} [%m, {{{xyz}}}], [%s]{policy};\n{GROUP.format('')}E:"  # fmt: skip
    launch(tensor_kernel(body), [t, np.zeros(1, np.uint32), np.zeros(1, np.uint32)], order=order)
    put = np.arange(1000, 1000 + words, dtype=np.uint32).reshape(box[::-1])
    index = tuple(slice(a, min(a + b, n)) for a, b, n in zip(at[::-1], box[::-1], x.shape))
    before[index] = put[
        tuple(slice(0, i.stop - i.start) for i in index)
    ]  # what lies outside is dropped
    assert (x == before).all()


@pytest.mark.parametrize("op", ["add", "min", "max", "and", "or", "xor", "inc", "dec"])
@pytest.mark.parametrize("rank,tile,h", [(1, "", ""), (2, "tile", ""), (3, "tile", "L2::cache_hint"), (4, "", "L2::cache_hint"), (5, "tile", "")])  # fmt: skip
def test_tensor_reduction(op, rank, tile, h):
    x, t = box_of(rank)
    before, box = x.copy(), (8, 2, 2, 2, 1)[:rank]
    words = int(np.prod(box))
    at = ", ".join("0" * rank)
    fill = "".join(f"@%p st.shared.b32 [%s+{4 * i}], {3 * i + 1};\n" for i in range(words))
    form = dots(f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta", op, tile, "bulk_group", h)  # fmt: skip
    body = f"{fill}fence.proxy.async; bar.sync 0;\n@%q bra E;\n{form} [%m, {{{at}}}], [%s]{', %pol' if h else ''};\n{GROUP.format('')}E:"
    launch(tensor_kernel(body), [t, np.zeros(1, np.uint32), np.zeros(1, np.uint32)], order="delayed")  # fmt: skip
    index = tuple(slice(0, n) for n in box[::-1])
    a, b = before[index], (3 * np.arange(words, dtype=np.uint32) + 1).reshape(box[::-1])
    f = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
         "inc": lambda a, b: np.where(a >= b, 0, a + 1), "dec": lambda a, b: np.where((a == 0) | (a > b), b, a - 1)}[op]  # fmt: skip
    before[index] = f(a, b)
    assert (x == before).all()


# ---- mbarriers -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("space", ["", "shared", "shared::cta"])
def test_mbarrier_init_inval_and_generic_addresses(space):
    y = np.zeros(4, np.uint32)
    at = "[%b]" if space else "[%d1]"
    s = dots("", space) if space else ""
    body = f"""@%q bra E; cvt.u64.u32 %d1, %b; cvta.shared.u64 %d1, %d1;
    mbarrier.init{"." + space if space else ""}.b64 {at}, 2; mbarrier.arrive{"." + space if space else ""}.b64 %d2, {at}; mbarrier.pending_count.b64 %r0, %d2;
    mbarrier.test_wait{"." + space if space else ""}.b64 %w, {at}, %d2; selp.u32 %r1, 1, 0, %w; mbarrier.arrive_drop{"." + space if space else ""}.b64 _, {at};
    mbarrier.try_wait{"." + space if space else ""}.b64 %w, {at}, %d2; selp.u32 %r2, 1, 0, %w;
    mbarrier.inval{"." + space if space else ""}.b64 {at}; mbarrier.init.shared::cta.b64 [%b], 5; mbarrier.arrive.shared::cta.b64 %d2, [%b]; mbarrier.pending_count.b64 %r3, %d2;
    st.global.v4.u32 [%p0], {{%r0, %r1, %r2, %r3}}; E:"""
    assert not s or s == space
    run(body, [y], block=1)
    assert y.tolist() == [2, 0, 1, 5]


@pytest.mark.parametrize("sem", ["", "relaxed.cta", "relaxed.cluster"])
@pytest.mark.parametrize("space", ["", "shared", "shared::cta", "shared::cluster"])
def test_mbarrier_tx_counts(sem, space):
    y = np.zeros(2, np.uint32)
    at = "[%b]" if space else "[%d1]"
    probe = "mbarrier.test_wait.parity.shared::cta.b64 %w, [%b], 0; selp.u32 {}, 1, 0, %w;"
    body = f"""@%q bra E; cvt.u64.u32 %d1, %b; cvta.shared.u64 %d1, %d1; mbarrier.init.shared::cta.b64 [%b], 1; {dots("mbarrier.expect_tx", sem, space, "b64")} {at}, 100;
    mbarrier.arrive.shared::cta.b64 _, [%b]; {dots("mbarrier.complete_tx", sem, space, "b64")} {at}, 60; {probe.format("%r0")} {dots("mbarrier.complete_tx", sem, space, "b64")} {at}, 40; {probe.format("%r1")}
    st.global.v2.u32 [%p0], {{%r0, %r1}}; E:"""
    run(body, [y], block=1)
    assert y.tolist() == [0, 1]


ARRIVE = ["mbarrier.arrive", "mbarrier.arrive.expect_tx", "mbarrier.arrive.noComplete", "mbarrier.arrive_drop", "mbarrier.arrive_drop.expect_tx"]  # fmt: skip


@pytest.mark.parametrize("op", ARRIVE)
@pytest.mark.parametrize("sem", ["", "release.cta", "release.cluster", "relaxed.cta", "relaxed.cluster"])  # fmt: skip
@pytest.mark.parametrize("space", ["", "shared", "shared::cta", "shared::cluster"])
def test_mbarrier_arrivals(op, sem, space):
    """Count 3 minus this arrival leaves 2 to complete the phase; after a drop, two complete the next one as well."""
    y = np.zeros(3, np.uint32)
    at = "[%b]" if space else "[%d1]"
    value = ", 32" if "expect_tx" in op else ", 1" if "noComplete" in op else ""
    dst = "%d2" if "noComplete" in op else "_"
    paid = "mbarrier.complete_tx.shared::cta.b64 [%b], 32;" if "expect_tx" in op else ""
    arrive = "mbarrier.arrive.shared::cta.b64 _, [%b];"
    note = "mbarrier.test_wait.parity.shared::cta.b64 %w, [%b], {}; selp.u32 {}, 1, 0, %w;"
    body = f"""@%q bra E; cvt.u64.u32 %d1, %b; cvta.shared.u64 %d1, %d1; mbarrier.init.shared::cta.b64 [%b], 3; {dots(op, sem, space, "b64")} {dst}, {at}{value};
    {arrive} {paid} {note.format(0, "%r0")} {arrive} {note.format(0, "%r1")} {arrive} {arrive} {note.format(1, "%r2")} st.global.v2.u32 [%p0], {{%r0, %r1}}; st.global.u32 [%p0+8], %r2; E:"""
    run(body, [y], block=1)
    assert y.tolist() == [0, 1, "drop" in op]


@pytest.mark.parametrize("op", ["test_wait", "try_wait"])
@pytest.mark.parametrize("sem", ["", "acquire.cta", "acquire.cluster", "relaxed.cta", "relaxed.cluster"])  # fmt: skip
@pytest.mark.parametrize("parity", ["", "parity"])
@pytest.mark.parametrize("space", ["", "shared", "shared::cta"])
def test_mbarrier_waits(op, sem, parity, space):
    y = np.zeros(2, np.uint32)
    at = "[%b]" if space else "[%d1]"
    form = f"{dots('mbarrier', op, parity, sem, space, 'b64')} %w, {at}, {'0' if parity else '%d2'}"
    body = f"""@%q bra E; cvt.u64.u32 %d1, %b; cvta.shared.u64 %d1, %d1; mbarrier.init.shared::cta.b64 [%b], 1; mbarrier.init.shared::cta.b64 [%b2], 2; mbarrier.arrive.shared::cta.b64 %d2, [%b];
    {form}; selp.u32 %r0, 1, 0, %w; mbarrier.arrive.shared::cta.b64 %d2, [%b2]; {form.replace('%b]', '%b2]').replace('%d1', '%d3')}; selp.u32 %r1, 1, 0, %w;
    st.global.v2.u32 [%p0], {{%r0, %r1}}; E:""".replace("mbarrier.init.shared::cta.b64 [%b], 1;", "cvt.u64.u32 %d3, %b2; cvta.shared.u64 %d3, %d3; mbarrier.init.shared::cta.b64 [%b], 1;")  # fmt: skip
    run(body, [y], block=1)
    assert y.tolist() == [1, 0], "the finished phase, and one that lacks an arrival"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("how", ["", "weak", "relaxed.cluster"])
@pytest.mark.parametrize("where", [(".shared::cluster", ""), ("", ".shared::cluster")])
@pytest.mark.parametrize("v,t", [("", "b32"), ("", "u32"), ("", "s32"), ("", "f32"), ("", "b64"), ("", "u64"), ("", "s64"), ("", "f64"), ("v2", "b32"), ("v4", "u32"), ("v2", "b64")])  # fmt: skip
def test_st_async(how, where, v, t, order):
    """Lane 0 of each CTA stores into the other's memory; the other's barrier counts the bytes."""
    n, size = int(v[1:] or 1), int(t[1:]) // 8
    y = np.zeros((2, 4), np.uint32)
    regs = [f"%{'r' if size == 4 else 'd'}{i + 1}" for i in range(n)]
    setup = "".join(f"mad.lo.u32 %r9, %c, 100, {i + 1}; {'mov.b32' if size == 4 else 'cvt.u64.u32'} {r}, %r9; " for i, r in enumerate(regs))  # fmt: skip
    value = regs[0] if n == 1 else "{" + ", ".join(regs) + "}"
    zero = "".join(f"@%p st.shared.b32 [%s+{4 * i}], 0;\n" for i in range(4))
    form = "st.async" + ("." + how if how else "") + where[0] + ".mbarrier::complete_tx::bytes" + where[1] + "." + dots(v, t)  # fmt: skip
    body = f"""{zero}{init(1)} @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%b], {n * size}; {READY} {setup}
    mapa.shared::cluster.u32 %r10, %s, %o; mapa.shared::cluster.u32 %r11, %b, %o; @%p {form} [%r10], {value}, [%r11];
    {WAIT.format(0, 0)}{dump(4)}{READY}"""
    run(body, [y, y], 2, order=order)
    for c in range(2):
        want = np.array([100 * (1 - c) + i + 1 for i in range(n)], f"u{size}").view(np.uint32)
        assert y[c].tolist() == want.tolist() + [0] * (4 - len(want))


@pytest.mark.parametrize("arrive,wait", [*itertools.product(["", "release", "relaxed", "aligned", "release.aligned", "relaxed.aligned"], ["", "acquire", "aligned", "acquire.aligned"])])  # fmt: skip
def test_cluster_barrier(arrive, wait):
    """Three rounds: every CTA reads what the one before it wrote in the round."""
    y = np.zeros((4, 4), np.uint32)
    barrier = f"{dots('barrier.cluster.arrive', arrive)}; {dots('barrier.cluster.wait', wait)};\n"
    rounds = "".join(f"@%p st.shared::cluster.u32 [%r2], {10 * (i + 1)}; {barrier} @%p ld.shared.u32 %r4, [%s]; mad.wide.u32 %d0, %c, 16, %p0; @%p st.global.u32 [%d0+{4 * i}], %r4; {barrier}" for i in range(3))  # fmt: skip
    body = f"add.u32 %r1, %c, 1; and.b32 %r1, %r1, 3; mapa.shared::cluster.u32 %r2, %s, %r1; {barrier}{rounds}"
    run(body, [y], 4, block=64)
    assert (y[:, :3] == [10, 20, 30]).all()


# ---- cluster launch control ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("space", ["", "shared::cta"])
@pytest.mark.parametrize("multicast,ctas", [("", 1), ("multicast::cluster::all", 2)])
def test_cluster_launch_control(space, multicast, ctas, order):
    """One cluster takes over every other one of a 2 x 2 x 3 grid of clusters: each coordinate comes up once."""
    grid = (2 * ctas, 2, 3)
    y = np.zeros((grid[2], grid[1], grid[0]), np.uint32)
    form = dots("clusterlaunchcontrol.try_cancel.async", space, "mbarrier::complete_tx::bytes", multicast, "b128")  # fmt: skip
    query = "clusterlaunchcontrol.query_cancel"
    body = f"""{init(1)}{READY} mov.u32 %x, %ctaid.x; mov.u32 %y, %ctaid.y; mov.u32 %z, %ctaid.z; mov.u32 %n, 0;
    L: mad.lo.u32 %r0, %z, {grid[1]}, %y; mad.lo.u32 %r0, %r0, {grid[0]}, %x; mad.wide.u32 %d1, %r0, 4, %p0; @%p red.global.add.u32 [%d1], 1;
    @%p mbarrier.arrive.expect_tx.shared::cta.b64 _, [%b], 16; {READY} setp.eq.u32 %w, %c, 0; and.pred %w, %w, %p; @%w {form} [%s], [%b];
    and.b32 %r1, %n, 1; W: mbarrier.try_wait.parity.shared::cta.b64 %w, [%b], %r1; @!%w bra W; add.u32 %n, %n, 1;
    ld.shared.b128 %v, [%s]; fence.proxy.async; {query}.is_canceled.pred.b128 %w, %v; @!%w bra E;
    {query}.get_first_ctaid.v4.b32.b128 {{%x, %y, %z, _}}, %v; {query}.get_first_ctaid::x.b32.b128 %r2, %v; {query}.get_first_ctaid::y.b32.b128 %r3, %v; {query}.get_first_ctaid::z.b32.b128 %r4, %v;
    setp.ne.u32 %w, %r2, %x; @%w trap; setp.ne.u32 %w, %r3, %y; @%w trap; setp.ne.u32 %w, %r4, %z; @%w trap; add.u32 %x, %x, %c; bra L; E: {READY}"""
    text = kernel(START + body, 1, REGS + ".reg .b32 %x, %y, %z, %n; .reg .b128 %v;")
    launch(text, [y], grid=grid, cluster=ctas, order=order)
    assert (y == 1).all()


# ---- tensor memory ---------------------------------------------------------------------------------------------------
ALLOC = ".shared .align 16 .b8 slot[64];\n.reg .b32 %a, %l, %t, %r<130>; .reg .b64 %d, %e; .reg .pred %q;\n"
SHAPES = {"32x32b": (1, 1), "16x64b": (1, 2), "16x128b": (2, 4), "16x256b": (4, 8), "16x32bx2": (1, 1)}  # registers and columns of x1  # fmt: skip


def cell(shape, t, j, half):
    """(lane, column) of register j of thread t: the figures of the PTX ISA."""
    return {
        "32x32b": (t, j), "16x64b": (t // 4 + 8 * (t & 1), 2 * j + (t >> 1 & 1)), "16x128b": (t // 4 + 8 * (j & 1), 4 * (j >> 1) + (t & 3)),
        "16x256b": (t // 4 + 8 * (j >> 1 & 1), 8 * (j >> 2) + 2 * (t & 3) + (j & 1)), "16x32bx2": (t % 16, j + (half if t >= 16 else 0)),
    }[shape]  # fmt: skip


@pytest.mark.parametrize("order", ["eager", "delayed"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape,n", [(s, n) for s, (r, c) in SHAPES.items() for n in (1, 2, 4, 8, 16, 32, 64, 128) if r * n <= 128 and c * n <= 256])  # fmt: skip
def test_tensor_memory_store_and_load(shape, n, packed, order):
    """Stored in this shape and read column by column in 32x32b; then the other way round."""
    regs, cols = SHAPES[shape][0] * n, SHAPES[shape][1] * n
    half = cols if shape == "16x32bx2" else 0
    total = (cols + half) * (2 if packed else 1)
    if total > 512:
        return
    alloc = max(32, 1 << (total - 1).bit_length())
    lanes_used = 32 if shape == "32x32b" else 16
    y, z = np.zeros((32, regs), np.uint32), np.zeros((total, 32), np.uint32)
    vec = "{" + ", ".join(f"%r{i}" for i in range(regs)) + "}"
    split = f", {half}" if half else ""
    pack, unpack = (".pack::16b", ".unpack::16b") if packed else ("", "")
    value = "".join(f"mad.lo.u32 %r{j}, %l, {regs}, {j}; mad.lo.u32 %r{j}, %r{j}, {65537 if packed else 1}, 5;\n" for j in range(regs))  # fmt: skip
    read = "".join(f"tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%t}}, [%a+{c}]; mad.wide.u32 %d, %l, 4, %p1; st.global.u32 [%d+{128 * c}], %t;\n" for c in range(total))  # fmt: skip
    out = "".join(f"st.global.u32 [%e+{4 * j}], %r{j};\n" for j in range(regs))
    zero = "".join(f"tcgen05.st.sync.aligned.32x32b.x1.b32 [%a+{c}], {{%t}};\n" for c in range(total))  # fmt: skip
    body = f"""mov.u32 %l, %laneid; mov.u32 %a, slot; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%a], {alloc}; ld.shared.u32 %a, [%a]; mov.u32 %t, 0;
    {zero}{value} tcgen05.st.sync.aligned.{shape}.x{n}{unpack}.b32 [%a]{split}, {vec}; tcgen05.wait::st.sync.aligned;
    {read} tcgen05.ld.sync.aligned.{shape}.x{n}{pack}.b32 {vec}, [%a]{split}; tcgen05.wait::ld.sync.aligned; mad.wide.u32 %e, %l, {4 * regs}, %p0; {out}
    tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %a, {alloc};"""
    launch(kernel(body, 2, ALLOC), [y, z], order=order)
    t, j = np.meshgrid(np.arange(32), np.arange(regs), indexing="ij")
    stored = ((t * regs + j) * (65537 if packed else 1) + 5).astype(np.uint32)
    assert (y == stored).all(), "what was stored comes back"
    want = np.zeros((total, 32), np.uint32)
    for a in range(32):
        for b in range(regs):
            lane, col = cell(shape, a, b, half)
            v = int(stored[a, b])
            if packed:
                want[2 * col, lane], want[2 * col + 1, lane] = v & 0xFFFF, v >> 16
            else:
                want[col, lane] = v
    assert (z[:, :lanes_used] == want[:, :lanes_used]).all()


CP = {  # rows and bytes of what is copied, and where row r goes
    "128x256b": (128, 32, lambda r: [r]), "128x128b": (128, 16, lambda r: [r]), "4x256b": (4, 32, lambda r: [32 * r]), "64x128b.warpx2::02_13": (64, 16, lambda r: [r, r + 64]),
    "64x128b.warpx2::01_23": (64, 16, lambda r: [r % 32 + 64 * (r // 32), r % 32 + 64 * (r // 32) + 32]), "32x128b.warpx4": (32, 16, lambda r: [r, r + 32, r + 64, r + 96]),
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("shape", CP)
def test_tcgen05_cp(shape, group, order):
    """Core matrices of 8 rows of 16 bytes, LBO between the halves of a row, SBO between groups of rows; each CTA copies its own."""
    rows, width, to = CP[shape]
    y = np.zeros((group, 128, 8), np.uint32)
    lbo, sbo = 128 * (rows // 8 or 1), 128
    desc = 1 << 46 | (lbo >> 4) << 16 | (sbo >> 4) << 32
    words = width // 4
    fill = f"""mov.u32 %t, %tid.x; mov.u32 %l, 0;
    F: mad.lo.u32 %r0, %t, {words}, %l; mad.lo.u32 %r0, %c, 10000, %r0; shr.u32 %r1, %t, 3; and.b32 %r2, %t, 7; mad.lo.u32 %r1, %r1, {sbo}, %s; mad.lo.u32 %r1, %r2, 16, %r1;
    shr.u32 %r2, %l, 2; mad.lo.u32 %r1, %r2, {lbo}, %r1; and.b32 %r2, %l, 3; mad.lo.u32 %r1, %r2, 4, %r1; setp.lt.u32 %q, %t, {rows}; @%q st.shared.u32 [%r1], %r0; add.u32 %l, %l, 1; setp.lt.u32 %q, %l, {words}; @%q bra F;"""  # fmt: skip
    read = "".join(f"tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r0}}, [%a+{c}]; st.global.u32 [%d+{4 * c}], %r0;\n" for c in range(words))  # fmt: skip
    g = f"cta_group::{group}"
    zero = "".join(f"tcgen05.st.sync.aligned.32x32b.x1.b32 [%a+{c}], {{%r0}};\n" for c in range(words))  # fmt: skip
    body = f"""mov.u32 %c, %cluster_ctarank; mov.u32 %s, buf; mov.u32 %b, bar; mov.u32 %t, %tid.x; setp.ge.u32 %q, %t, 32; @%q bra A; mov.u32 %a, slot; tcgen05.alloc.{g}.sync.aligned.shared::cta.b32 [%a], 32;
    A: setp.ne.u32 %q, %t, 0; @%q bra B; mbarrier.init.shared.b64 [%b], 1; fence.mbarrier_init.release.cluster; B: bar.sync 0; ld.shared.u32 %a, [slot]; mov.u32 %r0, 0; {zero} tcgen05.wait::st.sync.aligned; {fill}
    fence.proxy.async; {READY} setp.ne.u32 %q, %t, 0; @%q bra C; setp.ne.u32 %q, %c, 0; @%q bra C; shr.u32 %r1, %s, 4; cvt.u64.u32 %d, %r1; or.b64 %d, %d, {desc};
    tcgen05.cp.{g}.{shape} [%a], %d; mov.b16 %h, {2**group - 1}; {f"tcgen05.commit.{g}.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%b], %h" if group == 2 else f"tcgen05.commit.{g}.mbarrier::arrive::one.b64 [%b]"};
    C: mbarrier.try_wait.parity.shared.b64 %q, [%b], 0; @!%q bra C; bar.warp.sync -1; mad.lo.u32 %r1, %c, 128, %t; mad.wide.u32 %d, %r1, 32, %p0; {read} {READY}
    setp.ge.u32 %q, %t, 32; @%q bra Z; tcgen05.relinquish_alloc_permit.{g}.sync.aligned; tcgen05.dealloc.{g}.sync.aligned.b32 %a, 32; Z:"""
    decls = (
        ALLOC
        + ".shared .align 1024 .b8 buf[8192]; .shared .align 8 .b64 bar; .reg .b32 %s, %b, %c; .reg .b16 %h;"
    )
    launch(kernel(body, 1, decls), [y], grid=group, cluster=group, block=128, order=order)
    want = np.zeros((group, 128, 8), np.uint32)
    for c in range(group):
        for r in range(rows):
            for lane in to(r):
                want[c, lane, :words] = 10000 * c + r * words + np.arange(words)
    assert (y[..., :words] == want[..., :words]).all()
