"""Tensor memory, descriptors and MMA, each through PTX: one CTA of 128 threads, operands by TMA, result by tcgen05.ld."""

import numpy as np
import pytest
import torch
from emulator.harness import HEADER, kernel, launch

from flash_attn_mx import emulator

# One MMA of M = 128 rows: A at smem, B behind it, scales by tcgen05.cp when scaled; D to global memory, row-major.
MMA = (
    HEADER
    + """
.extern .shared .align 1024 .b8 smem[];
.visible .entry k(.param .align 64 .b8 ma[128], .param .align 64 .b8 mb[128], .param .u64 pd, .param .u64 psf)
{
.reg .b32 %t, %w, %s, %bar, %tm, %sf, %r<80>; .reg .b64 %p, %d, %da, %db, %ds, %a, %b; .reg .pred %q, %e;
mov.u32 %t, %tid.x; shr.u32 %w, %t, 5; mov.u32 %s, smem; add.u32 %bar, %s, 65536; add.u32 %sf, %s, 61440;
setp.ne.u32 %q, %w, 0; @%q bra A;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%bar+32], 512;
A: setp.ne.u32 %q, %t, 0; @%q bra B;
mbarrier.init.shared.b64 [%bar], 1; mbarrier.init.shared.b64 [%bar+8], 1;
mov.b64 %a, ma; cvta.param.u64 %a, %a; mov.b64 %b, mb; cvta.param.u64 %b, %b;
mbarrier.arrive.expect_tx.shared.b64 _, [%bar], BYTES;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%s], [%a, {0, 0}], [%bar];
add.u32 %r0, %s, 32768;
cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r0], [%b, {0, 0}], [%bar];
SFLOAD
B: bar.sync 0; ld.shared.u32 %tm, [%bar+32];
setp.ne.u32 %q, %t, 0; @%q bra C;
V: mbarrier.try_wait.parity.shared.b64 %e, [%bar], 0; @!%e bra V;
shr.u32 %r1, %s, 4; cvt.u64.u32 %da, %r1; or.b64 %da, %da, DESC; add.s64 %db, %da, 2048;
KSTEPS
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bar+8];
C: mbarrier.try_wait.parity.shared.b64 %e, [%bar+8], 0; @!%e bra C;
bar.warp.sync -1;
ld.param.u64 %p, [pd]; mad.wide.u32 %d, %t, 256, %p;
tcgen05.ld.sync.aligned.32x32b.x64.b32 {LIST}, [%tm]; tcgen05.wait::ld.sync.aligned;
STORES
bar.sync 0; setp.ne.u32 %q, %w, 0; @%q bra Z;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %tm, 512;
Z: ret;
}
"""
)


def run_mma(
    kind, idesc, a, b, k_steps, sfa=None, sfb=None, scale_vec=1, maps=None, tx=192 * 128, **options
):
    """a: (128, k), b: (64, k) tensors, k * size = 128 bytes, or their tensor maps. Returns D (128, 64) fp32.

    sfa, sfb: scale bytes (128, blocks), of which each of the k_steps MMAs takes the next scale_vec.
    """  # fmt: skip
    desc = 2 << 61 | 64 << 32 | 1 << 46  # swizzle 128B
    steps, sf, atoms = [], "", 0 if sfa is None else sfa.shape[1] // 4
    for i in range(k_steps):
        p = "0" if i == 0 else "1"
        adv = f"add.s64 %a, %da, {2 * i}; add.s64 %b, %db, {2 * i};"
        if sfa is None:
            steps.append(
                f"{adv} tcgen05.mma.cta_group::1.kind::{kind} [%tm], %a, %b, {idesc}, {p};"
            )
        else:
            col, ident = 256 + i * scale_vec // 4 * 4, i * scale_vec % 4
            steps.append(
                f"{adv} tcgen05.mma.cta_group::1.kind::{kind} [%tm], %a, %b, {idesc | ident << 29 | ident << 4}, "
                f"[%tm+{col}], [%tm+{col + 4 * atoms}], {p};"
            )
    if sfa is not None:
        sf = f"""mbarrier.init.shared.b64 [%bar+16], 1;
        ld.param.u64 %p, [psf]; mbarrier.arrive.expect_tx.shared.b64 _, [%bar+16], {1024 * atoms};
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%sf], [%p], {1024 * atoms}, [%bar+16];
        W: mbarrier.try_wait.parity.shared.b64 %e, [%bar+16], 0; @!%e bra W;"""
        cp = f"shr.u32 %r1, %sf, 4; cvt.u64.u32 %ds, %r1; or.b64 %ds, %ds, {1 << 46 | 8 << 32};"
        for i in range(2 * atoms):
            cp += f"tcgen05.cp.cta_group::1.32x128b.warpx4 [%tm+{256 + 4 * i}], %ds; add.s64 %ds, %ds, 32;"
        steps.insert(0, cp)
    text = (
        MMA.replace("SFLOAD", sf)
        .replace("KSTEPS", "\n".join(steps))
        .replace("DESC", str(desc))
        .replace("BYTES", str(tx))
    )
    text = text.replace("LIST", ",".join(f"%r{i + 10}" for i in range(64))).replace(
        "STORES", "\n".join(f"st.global.b32 [%d+{4 * i}], %r{i + 10};" for i in range(64))
    )
    d = torch.zeros(128, 64)
    scales = torch.zeros(1024 * max(atoms, 1), dtype=torch.uint8)
    if sfa is not None:
        scales.copy_(torch.cat([atom(s[:, i : i + 4]) for s in (sfa, sfb) for i in range(0, s.shape[1], 4)]))  # fmt: skip
    if maps is None:
        raw = [x.view(torch.uint8) if x.element_size() == 1 else x for x in (a, b)]
        maps = [emulator.TensorMap.tiled(x, [x.shape[1], x.shape[0]], swizzle="128B") for x in raw]
    launch(text, [*maps, d, scales], block=128, smem_bytes=65536 + 64, **options)
    return d


def atom(sf):
    """(128, 4) scale bytes -> the 512-byte atom (blackwell-isa 3.2), written out element by element."""
    out = torch.zeros(512, dtype=torch.uint8)
    for i in range(128):
        for kb in range(4):
            out[i % 32 * 16 + i // 32 * 4 + kb] = sf[i, kb]
    return out


@pytest.mark.parametrize("order", ["eager", "delayed", "random"])
def test_bf16_mma(order):
    g = torch.Generator().manual_seed(1)
    a, b = (torch.randn(n, 64, generator=g).bfloat16() for n in (128, 64))
    idesc = 1 << 4 | 1 << 7 | 1 << 10 | 64 // 8 << 17 | 128 // 16 << 24
    d = run_mma("f16", idesc, a, b, 4, order=order)
    want = a.double() @ b.double().T
    assert (d - want).abs().max() < 4e-5
    d64 = run_mma("f16", idesc, a, b, 4, order=order, mma="fp64")
    assert (d64 - want).abs().max() < 8e-6


def test_fp8_mma_is_exact_for_small_integers():
    g = torch.Generator().manual_seed(2)
    a, b = (
        torch.randint(-8, 9, (n, 128), generator=g).float().to(torch.float8_e4m3fn)
        for n in (128, 64)
    )
    d = run_mma("f8f6f4", 1 << 4 | 64 // 8 << 17 | 128 // 16 << 24, a, b, 4)
    assert torch.equal(d, a.float() @ b.float().T)


def test_mxfp8_mma_applies_each_scale_once():
    """Random scales per row and 32-block: a wrong id, column or replica changes the result."""
    g = torch.Generator().manual_seed(3)
    a, b = (
        torch.randint(-4, 5, (n, 128), generator=g).float().to(torch.float8_e4m3fn)
        for n in (128, 64)
    )
    sfa, sfb = (
        torch.randint(124, 131, (128, 4), generator=g, dtype=torch.int32).to(torch.uint8)
        for _ in range(2)
    )
    d = run_mma(
        "mxf8f6f4.block_scale", 1 << 23 | 64 // 8 << 17 | 128 // 16 << 24, a, b, 4, sfa=sfa, sfb=sfb
    )
    fa, fb = (torch.exp2(s.double() - 127).repeat_interleave(32, 1) for s in (sfa, sfb[:64]))
    assert torch.equal(d.double(), (a.double() * fa) @ (b.double() * fb).T)


def test_truncation_model():
    """1 + 2^-25 * many: terms below 25 fraction bits of the largest are dropped; fp64 keeps them."""
    a, b = torch.zeros(128, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bfloat16)
    a[:, 0], a[:, 1:16] = 1, 2.0**-26
    idesc = 1 << 4 | 1 << 7 | 1 << 10 | 64 // 8 << 17 | 128 // 16 << 24
    assert (run_mma("f16", idesc, a, b, 1) == 1).all()
    assert (run_mma("f16", idesc, a, b, 1, mma="fp64") == np.float32(1 + 15 * 2.0**-26)).all()


@pytest.mark.parametrize(
    "idesc,detail",
    [
        (1 << 4 | 1 << 7 | 1 << 10 | 8 << 17 | 3 << 24, "M = 48"),
        (1 << 4 | 1 << 7 | 1 << 10 | 8 << 24, "N = 0"),
        (3 << 4 | 8 << 17 | 8 << 24, "D type"),
        (1 << 2 | 8 << 17 | 8 << 24, "sparse"),
    ],
)
def test_illegal_instruction_descriptors(idesc, detail):
    a, b = torch.zeros(128, 64, dtype=torch.bfloat16), torch.zeros(64, 64, dtype=torch.bfloat16)
    with pytest.raises(emulator.EmulatorError, match=rf"\[idesc\].*{detail}"):
        run_mma("f16", idesc, a, b, 1)


ALLOC = ".shared .align 16 .b8 slot[16];\n.reg .b32 %a, %r<8>;\n"


@pytest.mark.parametrize("body,check", [
    ("mov.u32 %a, slot; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%a], 32;", "leak"),
    ("mov.u32 %a, slot; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%a], 48;", "tmem"),
    ("mov.u32 %a, 0; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r0}, [%a];", "tmem"),
    ("mov.u32 %a, slot; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%a], 32; mov.u32 %a, 0; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r0}, [%a];", "uninit"),
    ("mov.u32 %a, 0x400000; tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r0}, [%a];", "tmem"),
])  # fmt: skip
def test_tensor_memory_misuse(body, check):
    with pytest.raises(emulator.EmulatorError, match=rf"\[{check}\]"):
        launch(kernel(body, 0, ALLOC), [])


@pytest.mark.parametrize(
    "shape,n,regs,unit", [("16x64b", 2, 2, 2), ("16x128b", 1, 2, 4), ("16x256b", 1, 4, 8)]
)
def test_ld_shapes_place_registers(shape, n, regs, unit):
    """Stores lane*256+column with 32x32b, reads with the other shape: every register must come from its cell."""
    y = np.zeros(32 * regs, np.uint32)
    cols = n * unit
    body = "mov.u32 %l, %laneid; mov.u32 %a, slot; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%a], 32; ld.shared.u32 %a, [%a];\n"
    for c in range(cols):
        body += f"mad.lo.u32 %r0, %l, 256, {c}; tcgen05.st.sync.aligned.32x32b.x1.b32 [%a+{c}], {{%r0}};\n"
    body += "tcgen05.wait::st.sync.aligned;\n"
    body += f"tcgen05.ld.sync.aligned.{shape}.x{n}.b32 {{{','.join(f'%r{i}' for i in range(regs))}}}, [%a];\n"
    body += "".join(
        f"mad.lo.u32 %l, %laneid, {regs}, {i}; mad.wide.u32 %d, %l, 4, %p0; st.global.u32 [%d], %r{i};\n"
        for i in range(regs)
    )
    body += "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %a, 32;"
    launch(kernel(body, 1, ALLOC + ".reg .b32 %l; .reg .b64 %d;"), [y])
    cell = {
        "16x64b": lambda t, j: (t // 4 + 8 * (t & 1), 2 * j + (t >> 1 & 1)),
        "16x128b": lambda t, j: (t // 4 + 8 * (j & 1), 4 * (j >> 1) + (t & 3)),
        "16x256b": lambda t, j: (t // 4 + 8 * (j >> 1 & 1), 8 * (j >> 2) + 2 * (t & 3) + (j & 1)),
    }[shape]
    want = [[cell(t, j)[0] * 256 + cell(t, j)[1] for j in range(regs)] for t in range(32)]
    assert y.reshape(32, regs).tolist() == want
