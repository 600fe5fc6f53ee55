"""A bad kernel or bad PTX ends in an exception that says what and where: never in a dead process, a hang or a full memory."""

import os
import pathlib
import resource
import signal
import threading
import time

import numpy as np
import pytest
from emulator.harness import HEADER, kernel, launch

from flash_attn_mx import emulator

DEVICE = pathlib.Path(emulator.__file__).parent / "_device"
GOOD = kernel("mov.u32 %r, 1;\nst.global.u32 [%p0], %r;", 1, ".reg .b32 %r;")


# ---- text ------------------------------------------------------------------------------------------------------------
def body(text, decls=".reg .b32 %r<4>; .reg .pred %q;"):
    return kernel(text, 0, decls)


BAD_TEXT = {
    "NUL byte": (GOOD.replace("mov", "\0mov"), "NUL byte|expected"),
    "not UTF-8": (GOOD.encode().replace(b"mov", b"\xff\xfemov"), "expected an instruction"),
    "lone surrogate": (GOOD.replace("mov", "\udc80"), "expected"),
    "number above 64 bits": (body("mov.u32 %r0, 99999999999999999999999;"), "exceeds 64 bits"),
    "hexadecimal above 64 bits": (body("mov.u64 %r0, 0x10000000000000000;"), "exceeds 64 bits"),
    "octal": (body("mov.u32 %r0, 018;"), "octal"),
    "decimal": (body("mov.f32 %r0, 1.5e5e5;"), "malformed number"),
    "scopes": (body("{" * 100 + "}" * 100), "nested too deep"),
    "negations": (body("@%q bra " + "!" * 100000 + "%q;"), "nesting too deep"),
    "brackets": (body("ld.u32 %r0, " + "[" * 100000), "nesting too deep"),
    "initialiser": (HEADER + ".global .u32 x[] = " + "{" * 100000, "nesting too deep"),
    "comment": (GOOD + "/*", "unterminated comment"),
    "registers": (body("", ".reg .b32 %r<2000000>;"), "bad register count"),
    "registers in all": (body("", ".reg .b128 %a<900000>; .reg .b128 %b<900000>;"), "too many registers"),
    "array": (HEADER + ".global .b8 x[1000000000000];", "array size"),
    "negative array": (HEADER + ".global .b8 x[-1];", "array size"),
    "array of arrays": (HEADER + ".global .b8 x[100000][100000];", "array size"),
    "module variables": (HEADER + "".join(f".global .align 4 .b8 x{i}[200000000];\n" for i in range(9)), "module-scope variables take"),
    "local variables": (body("", ".local .b8 x[9000000]; .local .b8 y[9000000];"), "too much local memory"),
    "parameters": (HEADER + ".entry k(.param .b8 p[65536], .param .b8 q[65536]) {}", "too many parameters"),
    "dimension 0": (HEADER + ".entry k() .reqntid 0, 1, 1 {}", "dimension 0"),
    "dimension 2^31": (HEADER + ".entry k() .maxntid 2147483648 {}", "dimension 2147483648"),
    "alignment": (HEADER + ".global .align 3 .b8 x[4];", "bad .align"),
    "arguments": (body("call f, (" + "%r0, " * 300 + "%r0);"), "more than 256 arguments"),
    "label twice": (body("A:\nA:"), "defined twice"),
    "unknown label": (body("bra NOWHERE;"), "unknown label NOWHERE"),
    "unclosed kernel": (GOOD.rstrip()[:-1], "end of file inside k"),
    **{f".{d} in the module": (f"{HEADER}.{d} .b32 x;", f".{d} outside of a function") for d in ("reg", "local", "param")},
    "no version": (".target sm_100a\n", "no .version"),
    "predicate in a vector": (body("mov.b64 %d, {%q, %r0};", ".reg .b32 %r<4>; .reg .pred %q; .reg .b64 %d;"), "must not be predicates"),
    "address as a value": (body("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r0], [%r1];"), "operand 2"),
    "label as a value": (body("X: add.u32 %r0, X, 1;"), "undeclared name X"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_TEXT)
def test_bad_text_is_an_error_with_its_line(name):
    text, detail = BAD_TEXT[name]
    with pytest.raises(emulator.PtxError, match=rf"^PTX line \d+: .*({detail})"):
        for k in emulator.Module.from_ptx(text).kernels.values():
            k.launch(1, 32, [])


def test_line_numbers_count_lines():
    lines = GOOD.split("\n")
    at = next(i for i, line in enumerate(lines) if line.startswith("mov"))
    lines[at] = "mov.u33 %r, 1;"
    with pytest.raises(emulator.PtxError, match=rf"^PTX line {at + 1}: unknown instruction form mov.u33"):  # fmt: skip
        emulator.Module.from_ptx("\n".join(lines))


def test_every_truncation_is_an_error_or_a_module():
    """The text may end anywhere: what a full disk or a broken download leaves."""
    text = (DEVICE / "toolchain_probe.sm_100f.ptx").read_bytes() if DEVICE.is_dir() else GOOD.encode()  # fmt: skip
    loaded = 0
    for n in range(0, len(text), 3):
        try:
            emulator.Module.from_ptx(text[:n])
            loaded += 1
        except emulator.PtxError as e:
            assert str(e).startswith("PTX line ")
    assert 0 < loaded < len(text) // 12  # a prefix loads only where it ends between two functions


def test_text_may_end_in_nul_and_be_one_line(tmp_path):
    one = GOOD.replace("\n", " ")
    for text in (GOOD + "\0", GOOD.encode() + b"\0\0", one, one.encode()):
        assert "k" in emulator.Module.from_ptx(text).kernels
    path = tmp_path / "k.ptx"
    path.write_text(GOOD)
    assert "k" in emulator.Module.from_ptx(path).kernels and emulator.Module.from_ptx(str(path))
    with pytest.raises(TypeError, match="path, str or bytes, got int"):
        emulator.Module.from_ptx(3)


def test_many_register_ranges_do_not_slow_the_parser():
    decls = "".join(f".reg .b32 %r{i}_<2>;\n" for i in range(20000))
    text = kernel("".join(f"mov.u32 %r{i}_0, %r{i}_1;\n" for i in range(20000)), 0, decls)
    start = time.perf_counter()
    emulator.Module.from_ptx(text)
    assert time.perf_counter() - start < 5  # 0.1 s; it took 15 s when it was quadratic


# ---- launch arguments ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("change,error,detail", [
    (dict(block=(2**31 - 1, 2**31 - 1, 2**31 - 1)), ValueError, "more than 1024 threads"), (dict(block=(2**31,)), ValueError, "block"), (dict(block=0), ValueError, "block"),
    (dict(cluster=(2**31 - 1, 2**31 - 1, 8)), ValueError, "16 CTAs"), (dict(grid=(3, 1, 1), cluster=(2, 1, 1)), ValueError, "multiple of the cluster"),
    (dict(grid=(2**31 - 1, 2**31 - 1, 2**31 - 1)), ValueError, "2\\^31 CTAs"),
    (dict(smem_bytes=-1), ValueError, "smem_bytes"), (dict(smem_bytes=2**32), ValueError, "smem_bytes"), (dict(smem_bytes=1.5), TypeError, "smem_bytes"),
    (dict(threads=10**9), ValueError, "threads"), (dict(threads=0), ValueError, "threads"), (dict(timeout=float("nan")), ValueError, "timeout"), (dict(timeout=-1), ValueError, "timeout"),
    (dict(timeout=float("inf")), ValueError, "timeout"), (dict(seed=2**70), ValueError, "seed"), (dict(order="never"), ValueError, "order"), (dict(checks=["all"]), ValueError, "check"),
    (dict(memory=10), ValueError, "memory= allows 10"), (dict(memory=-1), ValueError, "memory"), (dict(args=[2**64]), ValueError, "does not fit"), (dict(args=[-(2**63) - 1]), ValueError, "does not fit"),
    (dict(args=[]), TypeError, "takes 1 arguments"), (dict(args=[None]), TypeError, "NoneType"), (dict(args=[b"x"]), ValueError, "1 bytes for a parameter of 8"),
    (dict(args=[np.array([None] * 4)]), TypeError, "Python objects"), (dict(args=b"xx"), ValueError, "2 bytes of parameters"),
])  # fmt: skip
def test_bad_launch_arguments(change, error, detail):
    options = dict(grid=1, block=32, args=[np.zeros(4, np.uint32)]) | change
    with pytest.raises(error, match=detail):
        emulator.Module.from_ptx(GOOD).kernels["k"].launch(**options)


# ---- limits while running --------------------------------------------------------------------------------------------
SPIN = kernel("X: add.u32 %r, %r, 1;\nst.global.u32 [%p0], %r;\nbra X;", 1, ".reg .b32 %r;")


@pytest.mark.parametrize("threads", [1, 2])
def test_time_limit(threads):
    start = time.perf_counter()
    with pytest.raises(emulator.EmulatorError, match=r"\[timeout\] time limit of 0.25 s reached \(seed 0\)\n  cluster \d .*line \d+"):  # fmt: skip
        launch(SPIN, [np.zeros(1, np.uint32)], grid=4, block=1024, timeout=0.25, threads=threads)
    assert time.perf_counter() - start < 3


def test_keyboard_interrupt_ends_a_launch():
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        launch(SPIN, [np.zeros(1, np.uint32)], timeout=60)
    assert time.perf_counter() - start < 10


def test_stack_limit():
    text = kernel("st.local.u32 [x], 1;", 0, ".local .align 4 .b8 x[4096];")
    launch(text, [])
    launch(text, [], stack=4096)
    with pytest.raises(ValueError, match="needs 4096 bytes of local memory, stack= allows 4095"):
        launch(text, [], stack=4095)


def test_memory_limit_counts_local_memory_of_every_thread():
    text = kernel("st.local.u32 [x], 1;", 0, ".local .align 4 .b8 x[400000];")
    with pytest.raises(ValueError, match="one cluster takes 4[01]\\d{7} bytes"):
        launch(text, [], block=1024, memory=100 << 20)
    launch(text, [], grid=64, memory=100 << 20)  # clusters that are done make room for others


def growth(f):
    """MB of resident memory that f takes at its height."""

    def resident():
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    done = threading.Event()
    before = most = resident()

    def watch():
        nonlocal most
        while not done.wait(0.01):
            most = max(most, resident())

    thread = threading.Thread(target=watch)
    thread.start()
    f()
    done.set()
    thread.join()
    return (most - before) / 2**20


WAIT = ".shared .align 8 .b64 bar, other; .reg .b32 %a, %b, %n, %t; .reg .pred %q, %first;"
BARS = """mov.u32 %a, bar; mov.u32 %b, other; mov.u32 %n, 0; mov.u32 %t, %tid.x; setp.lt.u32 %first, %t, 32; setp.eq.u32 %q, %t, 0;
@%q mbarrier.init.shared.b64 [%a], 1; @%q mbarrier.init.shared.b64 [%b], 1; bar.sync 0;\n"""


def test_a_wait_that_counts_its_tries_ends_by_itself():
    """It looks like a deadlock for a thousand rounds, but the kernel has another way out."""
    body = "W: add.u32 %n, %n, 1; mbarrier.try_wait.parity.shared.b64 %q, [%a], 0; @%q bra X; setp.lt.u32 %q, %n, 1000; @%q bra W;\nst.global.u32 [%p0], %n;\nX:"
    for order in ("eager", "random"):
        tries = np.zeros(1, np.uint32)
        launch(kernel(BARS + body, 1, WAIT), [tries], order=order)
        assert tries == 1000


@pytest.mark.parametrize("order", ["eager", "delayed", "random"])
def test_waits_that_come_back_to_the_same_state_are_a_deadlock(order):
    """One warp polls one barrier, another two in turn."""
    body = "V: mbarrier.try_wait.parity.shared.b64 %q, [%a], 0; @%q bra X; @%first bra V; mbarrier.try_wait.parity.shared.b64 %q, [%b], 0; @!%q bra V;\nX:"
    with pytest.raises(emulator.EmulatorError, match=r"\[deadlock\] no warp can go on(?s:.*)warp 0.*pending 1 of 1(?s:.*)warp 1.*pending 1 of 1"):  # fmt: skip
        launch(kernel(BARS + body, 0, WAIT), [], block=64, order=order)


@pytest.mark.parametrize("spin", ["nanosleep.u32 100;", "add.u32 %n, %n, 1;"])
def test_a_warp_that_spins_is_no_deadlock(spin):
    """Nothing shows that it spins for ever: the time limit ends it, with what each warp did."""
    body = f"@!%first bra W;\nV: {spin} bra V;\nW: mbarrier.try_wait.parity.shared.b64 %q, [%a], 0; @!%q bra W;"
    with pytest.raises(emulator.EmulatorError, match=r"\[timeout\].*\n.*warp 0.*line 1\d.*(running|sleeping)\n.*warp 1.*mbarrier at .*pending 1 of 1"):  # fmt: skip
        launch(kernel(BARS + body, 0, WAIT), [], block=64, timeout=0.5)


def test_time_limit_while_a_deadlock_is_proved():
    """To compare a gigabyte of registers takes longer than the limit."""
    body = "W: mbarrier.try_wait.parity.shared.b64 %q, [%a], 0; @!%q bra W;"
    start = time.perf_counter()
    with pytest.raises(emulator.EmulatorError, match=r"\[timeout\]"):
        launch(
            kernel(BARS + body, 0, WAIT + ".reg .b128 %big<250000>;"), [], block=256, timeout=0.3
        )
    assert time.perf_counter() - start < 3


COPY = """.shared .align 128 .b8 buf[1024];
.reg .b32 %s; .reg .pred %q;"""


@pytest.mark.parametrize("order", ["eager", "delayed"])
@pytest.mark.parametrize("line", [
    "cp.async.bulk.global.shared::cta.bulk_group [%p0], [%s], 16;", "cp.async.bulk.commit_group;", "cp.async.commit_group;", "cp.async.ca.shared.global [%s], [%p0], 4;",
])  # fmt: skip
def test_asynchronous_work_that_nobody_waits_for_takes_no_memory(line, order):
    text = kernel(f"mov.u32 %s, buf;\nst.shared.u32 [%s], 1;\nst.shared.u32 [%s+4], 1;\nst.shared.u32 [%s+8], 1;\nst.shared.u32 [%s+12], 1;\nfence.proxy.async;\nX: {line}\nbra X;", 1, COPY)  # fmt: skip

    def run():
        with pytest.raises(emulator.EmulatorError, match=r"\[timeout\]"):
            launch(text, [np.zeros(8, np.uint32)], order=order, timeout=1.0)

    assert growth(run) < 20


def printer(fmt, loop=""):
    data = ", ".join(str(b) for b in fmt + b"\0")
    return kernel(
        f"""{loop}
        mov.u64 %d, fmt; cvta.global.u64 %d, %d; st.param.b64 [a0], %d;
        st.param.b64 [a1], 0; call.uni (r0), vprintf, (a0, a1);
        {"bra X;" if loop else ""}""",
        0,
        ".reg .b64 %d; .param .b64 a0; .param .b64 a1; .param .b32 r0;",
        module=f".global .align 1 .b8 fmt[{len(fmt) + 1}] = {{{data}}};",
    )


def test_printf_buffer_is_bounded_and_says_what_it_lost():
    r = launch(printer(b"0123456789" * 10), [], grid=100, printf_bytes=16400)
    assert len(r.output) == 101 and r.output[0] == "0123456789" * 10
    assert r.output[-1].startswith("[3100 further printf calls dropped: the 16400 bytes")
    assert len(launch(printer(b"x"), [], grid=100).output) == 3200


@pytest.mark.parametrize("fmt,want", [
    (b"\xff\xfe", "\ufffd\ufffd"), (b"100%%", "100%"), (b"%5$s", "<printf: unsupported format>"), (b"%*d", "<printf: unsupported format>"), (b"%.99999999f", "<printf: unsupported format>"),
    (b"%9999d", "<printf: unsupported format>"), (b"%", ""), (b"%l", ""),
])  # fmt: skip
def test_printf_formats_that_would_harm_the_host(fmt, want):
    assert launch(printer(fmt), [], block=1).output == [want]


# ---- memory safety: each of these wrote or read outside its memory ---------------------------------------------------
RUN = ".shared .align 1024 .b8 buf[1024]; .shared .align 8 .b64 bar; .reg .b32 %s, %b, %r<8>; .reg .b64 %d; .reg .pred %q;\n"
ONE = "mov.u32 %s, buf; mov.u32 %b, bar; mov.u32 %r0, %tid.x; setp.ne.u32 %q, %r0, 0; @%q bra X;\nmbarrier.init.shared.b64 [%b], 1;\n"


@pytest.mark.parametrize("body,check", [
    ("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%p0], 0xFFFFFFF0, [%b];", "bounds"),
    ("cp.async.bulk.global.shared::cta.bulk_group [%p0], [%s], 0xFFFFFFF0;", "bounds"),
    ("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%s], [%s], 0xFFFFFFF0, [%b];", "bounds"),
    ("ld.global.u32 %r0, [0xFFFFFFFFFFFFFFFC];", "bounds"), ("ld.local.u32 %r0, [0xFFFFFFFC];", "bounds"), ("st.shared.v4.u32 [%s+1040], {%r0, %r0, %r0, %r0};", "bounds"),
    ("ld.param.u64 %d, [0xFFFFFFF8];", "bounds"), ("mapa.shared::cluster.u32 %r0, %s, 77;", "bounds"), ("bar.sync 16;", "barrier"),
])  # fmt: skip
def test_sizes_that_wrap_are_out_of_bounds(body, check):
    with pytest.raises(emulator.EmulatorError, match=rf"\[{check}\]"):
        launch(kernel(f"{ONE}{body}\nX:", 1, RUN), [np.zeros(64, np.uint32)])


MAP = """.version 9.0
.target sm_100a
.address_size 64
.shared .align 128 .b8 buf[SIZE];
.shared .align 8 .b64 bar;
.entry k(.param .align 64 .b8 m[128]) { .reg .b32 %s, %b; .reg .b64 %m;
mov.b64 %m, m; cvta.param.u64 %m, %m; mov.u32 %s, buf; mov.u32 %b, bar; mbarrier.init.shared.b64 [%b], 1;
cp.async.bulk.tensor.RANKd.shared::cta.global.tile.mbarrier::complete_tx::bytes [%s], [%m, {AT}], [%b]; ret; }
"""


def map_kernel(size, rank):
    at = ", ".join("0" * rank)
    return MAP.replace("SIZE", str(size)).replace("RANK", str(rank)).replace("AT", at)


def test_box_that_overflows_32_bits():
    x = np.zeros((256,) * 2, np.uint64)
    t = emulator.TensorMap.tiled(x, [256] * 5, dims=[256] * 5, strides=[2048] * 4)
    with pytest.raises(emulator.EmulatorError, match=r"\[tensormap\] a box of 8796093022208 bytes"):
        launch(map_kernel(1024, 5), [t], block=1)


def test_swizzle_beyond_the_end_of_shared_memory():
    """Rows of 16 bytes in a 128-byte swizzle: row 8 goes to the second chunk of its line, which may not exist."""
    x = np.zeros((32, 128), np.uint8)
    t = emulator.TensorMap.tiled(x, [16, 9], swizzle="128B")
    with pytest.raises(emulator.EmulatorError, match=r"\[bounds\] the swizzle moves"):
        launch(map_kernel(144, 2).replace(".shared .align 8 .b64 bar;\n", "").replace("mov.u32 %b, bar", "add.u32 %b, %s, 136"), [t], block=1)  # fmt: skip


def test_split_offset_of_a_tensor_memory_load():
    body = """mov.u32 %s, buf; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%s], 512; ld.shared.u32 %r0, [%s];
    tcgen05.ld.sync.aligned.16x32bx2.x1.pack::16b.b32 {%r1}, [%r0], OFFSET;"""
    for offset, detail in (
        ("0xFFFFFFF0", "split offset"),
        ("400", "touches columns 800..801|columns"),
    ):
        with pytest.raises(emulator.EmulatorError, match=rf"\[tmem\].*{detail}"):
            launch(kernel(body.replace("OFFSET", offset), 0, RUN), [])
