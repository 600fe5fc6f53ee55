"""Does an sm_90 GPU finish bulk stores that nobody waited for, before a finished CTA's shared memory serves the next?

    python tests/emulator/probe_exit_stores.py        # needs numpy, libcuda.so.1 and a Hopper GPU

CUTLASS's sm_100 epilogue and FlashAttention-4's backward exit so (docs/notes/emulator.md). Each CTA takes nearly all shared memory,
fills it with its number, stores it to global memory with cp.async.bulk and exits at once; the next CTA on that SM fills the same bytes.
The control overwrites them before it exits, instead: if that shows nothing, the probe could not have seen anything either.
"""

import ctypes
import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from record_probes import Driver, driver_version  # noqa: E402

BYTES, CHUNK, CTAS = 192 << 10, 16 << 10, 132 * 64
PTX = f"""
.version 8.0
.target sm_90
.address_size 64
.extern .shared .align 128 .b8 sm[];
.visible .entry k(.param .u64 out, .param .u32 over)
{{
.reg .b32 %t, %c, %i, %s, %a, %o, %v; .reg .b64 %p, %d, %q; .reg .pred %x, %y;
mov.u32 %t, %tid.x; mov.u32 %c, %ctaid.x; mov.u32 %s, sm;
ld.param.u64 %p, [out]; ld.param.u32 %o, [over]; cvta.to.global.u64 %p, %p;
mul.wide.u32 %d, %c, {BYTES}; add.s64 %p, %p, %d;
shl.b32 %i, %t, 2;
FILL: add.u32 %a, %s, %i; st.shared.u32 [%a], %c; add.u32 %i, %i, 4096; setp.lt.u32 %x, %i, {BYTES}; @%x bra FILL;
fence.proxy.async.shared::cta; bar.sync 0;
setp.ne.u32 %y, %t, 0; @%y bra REST;
mov.u32 %i, 0;
COPY: add.u32 %a, %s, %i; cvt.u64.u32 %q, %i; add.s64 %q, %q, %p;
cp.async.bulk.global.shared::cta.bulk_group [%q], [%a], {CHUNK};
add.u32 %i, %i, {CHUNK}; setp.lt.u32 %x, %i, {BYTES}; @%x bra COPY;
cp.async.bulk.commit_group;
REST: setp.eq.u32 %x, %o, 0; @%x bra END;
bar.sync 0; mov.u32 %v, 0xffffffff; shl.b32 %i, %t, 2;
OVER: add.u32 %a, %s, %i; st.shared.u32 [%a], %v; add.u32 %i, %i, 4096; setp.lt.u32 %x, %i, {BYTES}; @%x bra OVER;
END: ret;
}}
"""


def wrong_words(d, fn, overwrite):
    out = ctypes.c_uint64()
    total = ctypes.c_size_t(BYTES * CTAS)
    d("cuMemAlloc_v2", ctypes.byref(out), total)
    d("cuMemsetD8_v2", out, 0xEE, total)
    over = ctypes.c_uint32(overwrite)
    params = (ctypes.c_void_p * 2)(ctypes.addressof(out), ctypes.addressof(over))
    d("cuLaunchKernel", fn, CTAS, 1, 1, 1024, 1, 1, BYTES, None, params, None)
    d("cuCtxSynchronize")
    host = np.empty((CTAS, BYTES // 4), np.uint32)
    d("cuMemcpyDtoH_v2", host.ctypes.data_as(ctypes.c_void_p), out, total)
    d("cuMemFree_v2", out)
    return int((host != np.arange(CTAS, dtype=np.uint32)[:, None]).sum())


def main():
    d = Driver()
    fn = ctypes.c_void_p()
    d("cuModuleGetFunction", ctypes.byref(fn), d.load(PTX), b"k")
    d("cuFuncSetAttribute", fn, 8, BYTES)  # dynamic shared memory
    control = wrong_words(d, fn, 1)
    runs = [wrong_words(d, fn, 0) for _ in range(5)]
    print(f"{d.name}, driver {driver_version()}: {CTAS} CTAs of {BYTES} bytes; wrong words of {CTAS * BYTES // 4}: "
          f"overwritten before exit {control}, left at exit {runs}")  # fmt: skip
    return 0 if control and not any(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
