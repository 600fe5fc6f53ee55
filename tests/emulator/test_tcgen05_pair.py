"""MMA of a CTA pair (cta_group::2) for every kind, with every spelling of scale vectors and collector hints.

M = 256: CTA c has rows 128 c.. of A and half of B's rows; D's rows lie as A's. Rank 0 issues, both wait for its commit.
"""

import numpy as np
import pytest
import torch
from emulator.harness import kernel, launch
from emulator.test_fp4 import pack
from emulator.test_tcgen05 import MMA, atom

from flash_attn_mx import emulator

N = 64
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
BARRIER = "barrier.cluster.arrive.release; barrier.cluster.wait.acquire;"
# kind, bits of an element, K of a step, scales per step, instruction descriptor without shape
KINDS = {
    "f16": ("f16", 16, 16, 0, 1 << 4 | 1 << 7 | 1 << 10), "tf32": ("tf32", 32, 8, 0, 1 << 4 | 2 << 7 | 2 << 10), "f8f6f4": ("f8f6f4", 8, 32, 0, 1 << 4),
    **{f"mxf8f6f4{v}": (f"mxf8f6f4.block_scale{v}", 8, 32, 1, 1 << 23) for v in ("", ".scale_vec::1X", ".block32")},
    **{f"mxf4{v}": (f"mxf4.block_scale{v}", 4, 64, 2, 1 << 23 | 1 << 7 | 1 << 10) for v in ("", ".scale_vec::2X", ".block32")},
    **{f"mxf4nvf4{v}": (f"mxf4nvf4.block_scale{v}", 4, 64, n, 1 << 23 | 1 << 7 | 1 << 10) for v, n in ((".scale_vec::2X", 2), (".block32", 2), (".scale_vec::4X", 4), (".block16", 4))},
}  # fmt: skip


def operand(g, rows, bits, per_cta):
    """Values (rows, 128 bytes of elements), and a tensor map whose box is one CTA's rows."""
    k = 1024 // bits
    if bits == 4:
        codes = g.integers(0, 16, (rows, k))
        values = E2M1[codes & 7] * np.where(codes & 8, -1, 1)
        x = pack(codes, 4)
        return values, emulator.TensorMap.tiled(x, [k, per_cta], dims=[k, rows], strides=[128], dtype="u4x16", swizzle="128B")  # fmt: skip
    values = g.integers(-4, 5, (rows, k)).astype(float)
    dtype = {8: torch.float8_e4m3fn, 16: torch.bfloat16, 32: torch.float32}[bits]
    x = torch.from_numpy(values).float().to(dtype)
    x = x.view(torch.uint8) if bits == 8 else x
    return values, emulator.TensorMap.tiled(x, [k, per_cta], swizzle="128B")


def kernel_text(kind, idesc, collector, vec, atoms):
    mma = f"tcgen05.mma.cta_group::2.kind::{kind}{'.collector::a::' + collector if collector else ''}"  # fmt: skip
    steps, sf = [], ""
    if vec:
        sf = f"""mbarrier.init.shared.b64 [%bar+16], 1; ld.param.u64 %p, [psf]; mad.wide.u32 %p, %c, {1024 * atoms}, %p;
        mbarrier.arrive.expect_tx.shared.b64 _, [%bar+16], {1024 * atoms}; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%sf], [%p], {1024 * atoms}, [%bar+16];
        W: mbarrier.try_wait.parity.shared.b64 %e, [%bar+16], 0; @!%e bra W;"""
        cp = f"shr.u32 %r1, %sf, 4; cvt.u64.u32 %ds, %r1; or.b64 %ds, %ds, {1 << 46 | 8 << 32};"
        for i in range(2 * atoms):
            cp += f"tcgen05.cp.cta_group::2.32x128b.warpx4 [%tm+{256 + 4 * i}], %ds; add.s64 %ds, %ds, 32;"
        steps.append(cp)
    for i in range(4):
        col, ident = 256 + i * vec // 4 * 4, i * vec % 4
        scales = f"[%tm+{col}], [%tm+{col + 4 * atoms}], " if vec else ""
        steps.append(f"add.s64 %a, %da, {2 * i}; add.s64 %b, %db, {2 * i}; {mma} [%tm], %a, %b, {idesc | ident << 29 | ident << 4}, {scales}{int(i > 0)};")  # fmt: skip
    text = MMA.replace("SFLOAD", sf).replace("KSTEPS", "\n".join(steps)).replace("DESC", str(2 << 61 | 64 << 32 | 1 << 46)).replace("BYTES", "20480")  # fmt: skip
    text = text.replace("LIST", ",".join(f"%r{i + 10}" for i in range(N))).replace("STORES", "\n".join(f"st.global.b32 [%d+{4 * i}], %r{i + 10};" for i in range(N)))  # fmt: skip
    changes = [
        (".reg .b32 %t,", ".reg .b16 %k; .reg .b32 %c, %y, %t,"), ("mov.u32 %t, %tid.x;", "mov.u32 %t, %tid.x; mov.u32 %c, %cluster_ctarank; mov.b16 %k, 3;"),
        ("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%bar+32]", "cvt.u64.u32 %p, %bar; cvta.shared.u64 %p, %p; tcgen05.alloc.cta_group::2.sync.aligned.b32 [%p+32]"),
        ("[%a, {0, 0}]", "[%a, {0, %y}]"), ("add.u32 %r0, %s, 32768;", f"add.u32 %r0, %s, 32768; mul.lo.u32 %y, %c, {N // 2};"), ("cvta.param.u64 %b, %b;", "cvta.param.u64 %b, %b; mul.lo.u32 %y, %c, 128;"), ("[%b, {0, 0}]", "[%b, {0, %y}]"),
        ("setp.ne.u32 %q, %t, 0; @%q bra C;\nV: mbarrier.try_wait.parity.shared.b64 %e, [%bar], 0; @!%e bra V;",
         f"V: mbarrier.try_wait.parity.shared.b64 %e, [%bar], 0; @!%e bra V; {BARRIER} setp.ne.u32 %q, %t, 0; @%q bra C; setp.ne.u32 %q, %c, 0; @%q bra C;"),
        ("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bar+8];", "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%bar+8], %k;"),
        ("mad.wide.u32 %d, %t, 256, %p;", "mad.lo.u32 %y, %c, 128, %t; mad.wide.u32 %d, %y, 256, %p;"), ("bar.sync 0; setp.ne.u32 %q, %w, 0; @%q bra Z;", f"bar.sync 0; {BARRIER} setp.ne.u32 %q, %w, 0; @%q bra Z;"),
        ("tcgen05.dealloc.cta_group::1", "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned; tcgen05.dealloc.cta_group::2"),
    ]  # fmt: skip
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


@pytest.mark.parametrize("name,collector", [*((k, "") for k in KINDS), *((k, c) for k in ("f16", "tf32", "f8f6f4", "mxf8f6f4", "mxf4", "mxf4nvf4.block16") for c in ("fill", "use", "lastuse", "discard"))])  # fmt: skip
@pytest.mark.parametrize("order", ["eager", "delayed", "random"])
def test_mma_of_a_pair(name, collector, order):
    """Small integers (or 4-bit values) and powers of two: the sum is exact, and every row and scale counts."""
    if collector and order != "delayed":
        return
    kind, bits, step, vec, idesc = KINDS[name]
    g = np.random.default_rng(len(name))
    (a, ma), (b, mb) = operand(g, 256, bits, 128), operand(g, N, bits, N // 2)
    atoms = vec  # 4 steps of vec scales each
    blob = torch.zeros(4096 * max(atoms, 1), dtype=torch.uint8)
    if vec:
        code = [g.integers(124, 131, (rows, 4 * vec)) for rows in (256, 128)]
        sfa, sfb = (torch.from_numpy(c.astype(np.uint8)) for c in code)
        parts = [atom(s[:, i : i + 4]) for c in range(2) for s in (sfa[128 * c : 128 * c + 128], sfb) for i in range(0, 4 * vec, 4)]  # fmt: skip
        blob[: 2048 * atoms].copy_(torch.cat(parts))
        a = a * (2.0 ** (code[0] - 127)).repeat(step // vec, 1)
        b = b * (2.0 ** (code[1][:N] - 127)).repeat(step // vec, 1)
    text = kernel_text(kind, idesc | N // 8 << 17 | 256 // 16 << 24, collector, vec, atoms)
    d = torch.zeros(256, N)
    launch(text, [ma, mb, d, blob], grid=2, cluster=2, block=128, smem_bytes=65536 + 64, order=order)  # fmt: skip
    assert np.array_equal(d.double().numpy(), a @ b.T)


DECLS = ".shared .align 8 .b32 at; .reg .b32 %s, %c, %n, %tm; .reg .b64 %t; .reg .pred %p, %q;"
ALLOC = "tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%s], 32; ld.shared.b32 %tm, [%s];"
FREE = "tcgen05.dealloc.cta_group::2.sync.aligned.b32 %tm, 32;"
GIVE = "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;"
LATE = "@!%q bra GO; L: add.u32 %n, %n, 1; setp.lt.u32 %p, %n, 3000; @%p bra L; GO:"  # CTA 1


@pytest.mark.parametrize("before,step,after", [("", ALLOC, GIVE + FREE), (ALLOC, GIVE, FREE), (ALLOC + GIVE, FREE, "")])  # fmt: skip
def test_a_pair_allocates_and_frees_together(before, step, after):
    """CTA 0 may not go on before CTA 1, which is late, has come to the same instruction."""
    body = f"""mov.u32 %s, at; mov.u32 %c, %cluster_ctarank; setp.eq.u32 %q, %c, 1; mov.u32 %n, 0;
    {before} {LATE}
    mov.u64 %t, %clock64; @%q st.global.u64 [%p0+8], %t;
    {step}
    mov.u64 %t, %clock64; @!%q st.global.u64 [%p0], %t;
    {after}"""
    times = np.zeros(2, np.uint64)
    launch(kernel(body, 1, DECLS), [times], grid=2, cluster=2)
    assert times[0] > times[1] > 3000


def test_half_a_pair_allocates():
    body = f"mov.u32 %s, at; mov.u32 %c, %cluster_ctarank; setp.eq.u32 %q, %c, 1; @%q bra X; {ALLOC} X:"
    with pytest.raises(emulator.EmulatorError, match=r"\[deadlock\](?s:.*)CTA 0 .*tcgen05.alloc.*the same of a warp of CTA 1"):  # fmt: skip
        launch(kernel(body, 0, DECLS), [], grid=2, cluster=2)
