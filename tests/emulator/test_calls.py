"""Calls of functions of the same module, as nvcc writes them for __noinline__ functions; and the calls that are refused."""

import numpy as np
import pytest
from emulator.harness import HEADER, launch

from flash_attn_mx import emulator

# twice(x) = 2 x, but 7 where x > 100, by a guarded return; f(x, y) = twice(x) + local array element
FUNCTIONS = """
.func (.param .b32 func_retval0) twice(.param .b32 p0)
{
.reg .b32 %r<4>; .reg .pred %q;
ld.param.u32 %r1, [p0];
setp.gt.u32 %q, %r1, 100;
mov.u32 %r2, 7;
st.param.b32 [func_retval0], %r2;
@%q ret;
shl.b32 %r2, %r1, 1;
st.param.b32 [func_retval0+0], %r2;
}
.func (.param .align 8 .b8 result[16]) f(.param .b32 px, .param .b64 py)
{
.local .align 4 .b8 depot[16];
.reg .b32 %r<6>; .reg .b64 %rd<3>;
ld.param.u32 %r1, [px];
ld.param.u64 %rd1, [py];
mov.u64 %rd2, depot;
st.local.u32 [%rd2+4], %r1;
{ .param .b32 a; st.param.b32 [a], %r1; .param .b32 b; call.uni (b), twice, (a); ld.param.b32 %r2, [b]; }
ld.local.u32 %r3, [depot+4];
add.u32 %r2, %r2, %r3;
st.param.b32 [result], %r2;
st.param.b64 [result+8], %rd1;
ret;
}
"""
KERNEL = """
.visible .entry k(.param .u64 p)
{
.reg .b32 %r<8>; .reg .b64 %rd<6>; .reg .pred %q;
ld.param.u64 %rd1, [p];
mov.u32 %r1, %laneid;
mul.lo.u32 %r2, %r1, 5;
and.b32 %r3, %r1, 1;
setp.ne.u32 %q, %r3, 0;
mov.u64 %rd2, 1000;
@%q bra ODD;
{ .param .b32 a; .param .b64 b; .param .align 8 .b8 c[16]; st.param.b32 [a], %r2; st.param.b64 [b], %rd2; call (c), f, (a, b); ld.param.b32 %r4, [c]; ld.param.b64 %rd3, [c+8]; }
bra.uni DONE;
ODD:
{ .param .b32 a; st.param.b32 [a], %r1; .param .b32 b; call (b), twice, (a); ld.param.b32 %r4, [b]; }
{ .param .b32 a; .param .b64 b; .param .align 8 .b8 c[16]; st.param.b32 [a], %r4; st.param.b64 [b], 5; call (c), f, (a, b); ld.param.b32 %r4, [c]; ld.param.b64 %rd3, [c+8]; }
DONE:
bar.warp.sync -1;
cvt.u32.u64 %r5, %rd3;
add.u32 %r4, %r4, %r5;
mad.wide.u32 %rd4, %r1, 4, %rd1;
st.global.u32 [%rd4], %r4;
}
"""


@pytest.mark.parametrize("seed", range(4))
def test_calls_from_diverged_lanes(seed):
    y = np.zeros(32, np.uint32)
    launch(HEADER + FUNCTIONS + KERNEL, [y], seed=seed)

    def twice(x):
        return np.where(x > 100, 7, 2 * x)

    lane = np.arange(32)
    even, odd = 5 * lane, twice(lane)
    want = np.where(lane % 2 == 0, twice(even) + even + 1000, twice(odd) + odd + 5)
    assert (y == want).all()


def test_functions_cost_local_memory_and_count_their_instructions():
    m = emulator.Module.from_ptx(HEADER + FUNCTIONS + KERNEL)
    r = m.kernels["k"].launch(1, 32, [np.zeros(32, np.uint32)])
    assert r.forms["call{.uni}"] >= 5 and m.kernels["k"].info["opcodes"]["call.uni"] == 1
    with pytest.raises(ValueError, match="bytes of local memory, stack= allows 64"):
        m.kernels["k"].launch(1, 32, [np.zeros(32, np.uint32)], stack=64)


def test_a_fault_inside_a_function_has_its_line():
    text = HEADER + FUNCTIONS.replace("st.local.u32 [%rd2+4]", "st.local.u32 [%rd2+4000]") + KERNEL
    line = next(i for i, s in enumerate(text.split("\n"), 1) if "+4000" in s)
    with pytest.raises(emulator.EmulatorError, match=rf"line {line}: st.local.u32: \[bounds\]"):
        launch(text, [np.zeros(32, np.uint32)])


def call(line, functions=FUNCTIONS, decls=""):
    return f"{HEADER}{functions}\n.entry k()\n{{\n.reg .b64 %f; .param .b32 a; .param .b32 b; .param .b64 w;\n{decls}\n{line}\n}}\n"


@pytest.mark.parametrize("line,detail", [
    ("call (b), g, (a);", "call of g, which is no function of this module"), ("call (b), %f, (a);", "through a register"),
    ("call (b), twice, (a, a);", "with 2 arguments, it has 1"), ("call twice, (a);", "with 0 results, it has 1"), ("call (b), twice, (w);", "w has 8 bytes, p0 4"),
    ("call (b), twice, (5);", "must be .param variables"),
])  # fmt: skip
def test_calls_that_are_refused_at_load(line, detail):
    text = call(line)
    at = text.split("\n").index(line) + 1
    with pytest.raises(emulator.PtxError, match=rf"^PTX line {at}: .*{detail}"):
        emulator.Module.from_ptx(text)


def test_recursion_is_refused_at_load():
    two = """.func second();
    .func first() { call second; ret; }
    .func second() { call first; ret; }"""
    with pytest.raises(emulator.PtxError, match=r"recursive call of first is not supported"):
        emulator.Module.from_ptx(call("call first;", two))
    deep = "\n".join(f".func f{i}() {{ call f{i + 1}; }}" for i in range(300)) + "\n.func f300() {}"
    with pytest.raises(emulator.PtxError, match="more than 256 deep"):
        emulator.Module.from_ptx(call("call f0;", deep))
    emulator.Module.from_ptx(call("", two))  # that nobody calls it is no fault


def test_exit_inside_a_function_ends_the_thread():
    y = np.zeros(32, np.uint32)
    text = HEADER + """.func stop() { .reg .b32 %r; .reg .pred %q; mov.u32 %r, %laneid; setp.lt.u32 %q, %r, 8; @%q exit; ret; }
    .entry k(.param .u64 p) { .reg .b64 %d; .reg .b32 %r; ld.param.u64 %d, [p]; call stop; mov.u32 %r, %laneid; mad.wide.u32 %d, %r, 4, %d; st.global.u32 [%d], 1; }"""  # fmt: skip
    launch(text, [y])
    assert (y == (np.arange(32) >= 8)).all()
