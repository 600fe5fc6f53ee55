"""A kernel with the parameters of an attention kernel that also runs on Hopper: it shows what the host handed over.

Cluster i loads one box through a tensor map, head i from token FIRST_TOKEN of batch 0, and dumps the bytes that arrive
in shared memory to one output + i * box; it writes (scale_log2, CTAs, dynamic shared memory, threads) to another, [4 i].
"""

import ctypes
from typing import NamedTuple

import torch
from kernels.attn_fwd import Params

from flash_attn_mx import sm100

NAME = "stand_in"
FIRST_TOKEN = 100


class Loaded(NamedTuple):
    """What the kernel loads, and the parameters that it finds its addresses in."""

    params: type = Params
    tensor_map: str = "q"
    dump: str = "out"
    scalars: str = "lse"
    columns: int = 64  # of the box, and the span of its swizzle
    rows: int = 128
    ctas: int = 1  # of a cluster

    @property
    def bytes(self) -> int:
        return self.columns * self.rows


def ptx(loaded: Loaded, more: str = "") -> str:
    """PTX of the kernel. more: a block that all threads run at the end; %r1 is tid.x, %r4 the cluster, %r8 ntid.x."""
    box = loaded.bytes
    fields = {
        "map": loaded.tensor_map,
        "out": loaded.dump,
        "lse": loaded.scalars,
        "scale_log2": "scale_log2",
    }
    field = {name: getattr(loaded.params, x).offset for name, x in fields.items()}
    return f"""
.version 8.0
.target sm_90
.address_size 64
.extern .shared .align 16 .b8 smem[];
.visible .entry {NAME}(.param .align 64 .b8 params[{ctypes.sizeof(loaded.params)}])
{{
  .reg .pred %p<3>;
  .reg .b32 %r<16>;
  .reg .b16 %h<6>;
  .reg .f32 %f<5>;
  .reg .b64 %rd<10>;
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, smem;
  add.u32 %r2, %r2, 1023;
  and.b32 %r2, %r2, -1024;                      // the box, on the boundary of its swizzle
  add.u32 %r3, %r2, {box};                      // the barrier behind it
  mov.u32 %r4, %ctaid.x;
  div.u32 %r4, %r4, {loaded.ctas};
  setp.ne.u32 %p1, %r1, 0;
  @%p1 bra initialised;
  mbarrier.init.shared::cta.b64 [%r3], 1;
  fence.proxy.async;
initialised:
  bar.sync 0;
  @%p1 bra wait;
  mov.b64 %rd1, params;
  cvta.param.u64 %rd2, %rd1;
  add.u64 %rd2, %rd2, {field["map"]};
  mov.u32 %r5, 0;
  mov.u32 %r6, {FIRST_TOKEN};
  mbarrier.arrive.expect_tx.shared::cta.b64 %rd3, [%r3], {box};
  cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
      [%r2], [%rd2, {{%r5, %r6, %r4, %r5}}], [%r3];
wait:
  mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r3], 0;
  @!%p2 bra wait;
  ld.param.u64 %rd4, [params+{field["out"]}];
  cvta.to.global.u64 %rd4, %rd4;
  mul.wide.u32 %rd5, %r4, {box};
  add.u64 %rd4, %rd4, %rd5;
  shl.b32 %r7, %r1, 4;
  mov.u32 %r8, %ntid.x;
  shl.b32 %r9, %r8, 4;
copy:
  setp.ge.u32 %p2, %r7, {box};
  @%p2 bra copied;
  add.u32 %r10, %r2, %r7;
  ld.shared.v4.b32 {{%r11, %r12, %r13, %r14}}, [%r10];
  cvt.u64.u32 %rd6, %r7;
  add.u64 %rd6, %rd4, %rd6;
  st.global.v4.b32 [%rd6], {{%r11, %r12, %r13, %r14}};
  add.u32 %r7, %r7, %r9;
  bra copy;
copied:
{more}
  @%p1 bra done;
  ld.param.u64 %rd7, [params+{field["lse"]}];
  cvta.to.global.u64 %rd7, %rd7;
  mul.wide.u32 %rd8, %r4, 16;
  add.u64 %rd7, %rd7, %rd8;
  ld.param.f32 %f1, [params+{field["scale_log2"]}];
  mov.u32 %r10, %nctaid.x;
  cvt.rn.f32.u32 %f2, %r10;
  mov.u32 %r11, %dynamic_smem_size;
  cvt.rn.f32.u32 %f3, %r11;
  cvt.rn.f32.u32 %f4, %r8;
  st.global.v4.f32 [%rd7], {{%f1, %f2, %f3, %f4}};
done:
  ret;
}}
"""


def problem(head_dim: int, device="cpu", packed=False) -> sm100.Problem:
    """Two heads of 200 tokens: two CTAs, and a box that ends behind the tensor."""
    generator = torch.Generator().manual_seed(0)
    shape = (200, 2, head_dim) if packed else (1, 200, 2, head_dim)
    x = torch.randn(shape, generator=generator).to(device)
    cu = torch.tensor([0, 200], dtype=torch.int32, device=device) if packed else None
    quantise = torch.ops.flash_attn_mx.quantize
    row = quantise(x, "rowwise", "rceil", torch.float8_e4m3fn, None)
    col = quantise(x, "colwise", "rceil", torch.float8_e4m3fn, cu)
    return sm100.prepare(
        *row, *row, *col, None, None, cu, cu, 200, 200, 0.25, -1, -1, torch.float32
    )  # fmt: skip


def instance(tile_dim: int) -> sm100.Instance:
    return sm100.Instance(NAME, tile_dim, torch.float32)


def check(p: sm100.Problem, tile_dim: int) -> None:
    """out and lse hold what the kernel should have found."""
    record = sm100.record_of(p, instance(tile_dim))
    check_found(Loaded(columns=tile_dim), record, p.arguments[0], p.out, p.lse)


def check_found(loaded: Loaded, record: dict, payload, dump, scalars) -> None:
    """What the launch of the record left in two outputs, of two heads of a payload."""
    payload = payload.cpu().view(torch.uint8)
    payload = payload if payload.dim() == 4 else payload.unsqueeze(0)
    tokens = min(payload.shape[1] - FIRST_TOKEN, loaded.rows)
    channels = min(payload.shape[3], loaded.columns)
    dump = dump.cpu().flatten().view(torch.uint8)
    for head in range(2):
        box = torch.zeros(loaded.rows, loaded.columns, dtype=torch.uint8)
        seen = payload[0, FIRST_TOKEN : FIRST_TOKEN + tokens, head, :channels]
        box[:tokens, :channels] = seen
        chunks = box.view(loaded.rows, loaded.columns // 16, 16)
        row, chunk = torch.arange(loaded.rows).view(-1, 1), torch.arange(loaded.columns // 16)
        # The span of the swizzle: 128 bytes give each of 8 rows its own order of chunks, 64 bytes each pair of them, ...
        order = chunk ^ (row >> {32: 2, 64: 1, 128: 0}[loaded.columns]) % (loaded.columns // 16)
        swizzled = chunks[row, order].reshape(-1)
        assert torch.equal(dump[head * box.numel() : (head + 1) * box.numel()], swizzled)
        found = scalars.cpu().flatten()[4 * head : 4 * head + 4]
        launch = record["grid"], record["smem_bytes"], record["block"]
        assert torch.allclose(found, torch.tensor([0.25 * 1.442695041, *map(float, launch)]))
