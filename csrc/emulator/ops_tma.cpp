// Bulk and tensor copies between global and shared memory, their reductions and bulk groups.
#include <algorithm>

#include "mbarrier.h"
#include "numerics.h"
#include "scheduler.h"
#include "tensormap.h"

namespace flash_attn_mx::emu {

uint64_t atomic_value(uint32_t op, Ty t, uint64_t old, uint64_t b, uint64_t c);
uint32_t atomic_op(const Decode& d);

namespace {

// What the issuer of a copy knows; it travels with the copy to its mbarrier.
Snapshot issuer(Exec& x) { return x.cl->race ? x.cl->race->snapshot(*x.w, false) : nullptr; }

struct Target {  // one destination CTA of a load: where the data goes and which barrier counts it
  Ref data, bar;
};

TensorMap read_map(Exec& x, const Operand& mem, int lane) {
  uint64_t a = address_of(x, mem, lane);
  if (a & 63)
    throw Fault("align", "tensor map address " + hex(a) + " is not 64-byte aligned", lane);
  uint8_t bytes[128];
  std::memcpy(bytes, resolve(x, Space::Generic, a, 128, Access::Read, lane, 64).p, 128);
  TensorMap t;
  std::string why;
  if (!decode_map(bytes, &t, &why))
    throw Fault("tensormap", "no valid tensor map at " + hex(a) + ": " + why, lane);
  if (t.box_bytes() > x.cta->smem_bytes)
    throw Fault("tensormap",
                "a box of " + std::to_string(t.box_bytes()) + " bytes; the CTA has " +
                    std::to_string(x.cta->smem_bytes) + " of shared memory",
                lane);
  return t;
}

// A 16-byte chunk of a box at `off` after swizzling. A swizzle moves it within its 128 bytes, which
// can lie beyond a box of narrow rows.
uint8_t* chunk_at(Cta& c, uint32_t off, uint32_t swizzle) {
  const uint32_t a = swizzle_address(off, swizzle);
  if (a + 16 > kSmemBase + c.smem_bytes)
    throw Fault("bounds", "the swizzle moves a tensor copy's bytes to " + hex(a) +
                              ", behind the CTA's shared memory");
  return c.smem.data() + a;
}

// Calls f(shared offset of 16-byte chunk before swizzling, coordinates of its first element) over
// the box. Chunks of 16 bytes are the unit that swizzling moves.
template <class F>
void for_chunks(const TensorMap& t, const int32_t* c, F f) {
  const uint32_t n0 = t.box_elems(0), per = t.chunk_elems();
  uint32_t n[5];
  for (int d = 0; d < 5; ++d) n[d] = d < (int)t.rank ? t.box_elems(d) : 1;
  uint32_t off = 0;
  for (uint32_t i4 = 0; i4 < n[4]; ++i4)
    for (uint32_t i3 = 0; i3 < n[3]; ++i3)
      for (uint32_t i2 = 0; i2 < n[2]; ++i2)
        for (uint32_t i1 = 0; i1 < n[1]; ++i1) {
          const uint32_t idx[5] = {0, i1, i2, i3, i4};
          int64_t at = 0;
          bool in = true;
          for (uint32_t d = 1; d < t.rank; ++d) {
            int64_t k = (int64_t)c[d] + (int64_t)idx[d] * t.estride[d];
            in &= k >= 0 && k < (int64_t)t.dims[d];
            at += k * (int64_t)t.strides[d];
          }
          for (uint32_t i0 = 0; i0 < n0; i0 += per, off += 16)
            f(off, at, in, (int64_t)c[0] + (int64_t)i0 * t.estride[0], std::min(per, n0 - i0));
        }
}

// The pattern 0x7FF7 in every 16 bits, whatever the element: as recorded on an H200.
void nan_fill(uint8_t* p, const TensorMap& t, uint32_t n) {
  const uint16_t v = 0x7FF7;
  for (uint32_t i = 0; i < n * t.elem_bytes(); i += sizeof v) std::memcpy(p + i, &v, sizeof v);
}

void run_tensor_load(Machine& m, const TensorMap& t, const int32_t* c,
                     const std::vector<Target>& to) {
  const uint32_t es = t.elem_bytes();
  for_chunks(t, c, [&](uint32_t off, int64_t at, bool in, int64_t x0, uint32_t n) {
    uint8_t buf[16] = {};
    if (t.padded())  // nothing defines the padding
      std::memset(buf + t.global_bytes(n), 0xCB, 16 - t.global_bytes(n));
    if (t.oob) nan_fill(buf, t, n);
    if (in && t.estride[0] == 1) {
      int64_t lo = std::max<int64_t>(0, -x0), hi = std::min<int64_t>(n, (int64_t)t.dims[0] - x0);
      if (lo < hi) {
        const uint64_t bytes = t.global_bytes(hi - lo);
        uint64_t g = t.address + at + t.global_bytes(x0 + lo);
        const uint8_t* p = global_at(m, g, bytes, false);
        global_check_written(m, g, bytes);
        std::memcpy(buf + t.global_bytes(lo), p, bytes);
      }
    } else if (in) {
      for (uint32_t k = 0; k < n; ++k) {
        int64_t e = x0 + (int64_t)k * t.estride[0];
        if (e >= 0 && e < (int64_t)t.dims[0])
          std::memcpy(buf + k * es, global_at(m, t.address + at + e * es, es, false), es);
      }
    }
    for (auto& d : to) std::memcpy(chunk_at(*d.data.cta, d.data.off + off, t.swizzle), buf, 16);
  });
}

void complete(Cluster& cl, const std::vector<Target>& to, uint32_t bytes, uint32_t tx,
              const Snapshot& from) {
  for (auto& d : to) {
    mark_written(*d.data.cta, d.data.off, bytes);
    MbarChange c;
    c.complete_tx = tx;
    mbar_apply(cl, d.bar, c, from.get());
  }
}

// Destinations of a load. dst/bar are shared addresses; with a mask, the same offsets in every CTA
// that it names.
std::vector<Target> targets(Exec& x, uint32_t dst, uint32_t bar, bool multicast, uint32_t ctas,
                            bool pair, uint32_t bytes, int lane) {
  std::vector<Target> to;
  auto add = [&](uint32_t rank, uint32_t bar_rank) {
    Target t;
    t.data = shared_ref(*x.cl, (dst & 0xFFFFFF) | rank << 24, bytes, "async copy destination");
    t.bar = shared_ref(*x.cl, (bar & 0xFFFFFF) | bar_rank << 24, 8, "async copy mbarrier");
    if (!Mbar::load(t.bar.p).valid)
      throw Fault("mbarrier",
                  "async copy signals " + hex(t.bar.off) + " of CTA " + std::to_string(bar_rank) +
                      ", which is no initialised mbarrier",
                  lane);
    if (x.cl->pending_reads)
      check_no_pending_read(*x.cl, *t.data.cta, t.data.off, bytes, "async copy");
    if (!t.data.cta->live_warps || !t.bar.cta->live_warps)
      throw Fault("exited", "async copy to CTA " + std::to_string(rank) + ", which has exited",
                  lane);
    if (Race* race = x.cl->race.get())
      race->shared(*t.data.cta, t.data.off, bytes,
                   race->copy(*x.w, *t.bar.cta, t.bar.off, x.in->line, "async copy"), true);
    to.push_back(t);
  };
  uint32_t parity = bar >> 24 & 1;
  if (bar & 7)
    throw Fault("align", "mbarrier address " + hex(bar) + " is not 8-byte aligned", lane);
  if (multicast) {
    if (ctas >> x.cl->ctas.size())
      throw Fault("bounds",
                  "multicast mask " + hex(ctas) + " names CTAs outside a cluster of " +
                      std::to_string(x.cl->ctas.size()),
                  lane);
    for (uint32_t r = 0; r < x.cl->ctas.size(); ++r)
      if (ctas >> r & 1) add(r, pair ? (r & ~1u) | parity : r);
  } else {
    uint32_t r = dst >> 24;
    uint32_t b = bar >> 24;
    if (pair ? (b >> 1) != (r >> 1) : b != r)
      throw Fault("mbarrier",
                  "async copy to CTA " + std::to_string(r) + " signals a barrier of CTA " +
                      std::to_string(b),
                  lane);
    add(r, b);
  }
  return to;
}

// The two rules are not in the PTX ISA: an H200 raises an illegal-instruction error for every probe
// that breaks one, and for no other (tests/emulator/test_recorded.py).
void coordinates(Exec& x, const Operand& mem, const TensorMap& t, int lane, bool store,
                 int32_t* c) {
  for (uint32_t d = 0; d < 5; ++d)
    c[d] = d < t.rank ? (int32_t)src_lane(x, mem.sub[1].sub[d], lane) : 0;
  const int64_t bytes = (int64_t)c[0] * t.elem_bits() / 8;
  if (t.dtype > 12 && c[0] % (t.padded() ? 128 : 64))
    throw Fault("tma",
                "coordinate 0 = " + std::to_string(c[0]) + " is not a multiple of " +
                    (t.padded() ? "128, as padded types need" : "64, as 4-bit elements need"),
                lane);
  if (bytes & 15)
    throw Fault("tma",
                "coordinate 0 = " + std::to_string(c[0]) + " is " + std::to_string(bytes) +
                    " bytes, not a multiple of 16: an H200 takes it for an illegal instruction",
                lane);
  for (uint32_t d = 0; store && d < t.rank; ++d)
    if (c[d] < 0)
      throw Fault("tma",
                  "tensor store at coordinate " + std::to_string(d) + " = " + std::to_string(c[d]) +
                      " < 0: an H200 takes it for an illegal instruction",
                  lane);
}

void do_tma_load(Exec& x, const Instr& in, uint32_t mask) {  // aux: rank, cta_group::2, multicast
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = first_lane(m);
    TensorMap t = read_map(x, in.op[1], l);
    if (t.rank != in.aux[0])
      throw Fault("tensormap",
                  "rank " + std::to_string(t.rank) + " tensor map in a " +
                      std::to_string(in.aux[0]) + "d copy",
                  l);
    int32_t c[5];
    coordinates(x, in.op[1], t, l, false, c);
    uint32_t dst = shared_addr(x, in.op[0], l), bytes = (uint32_t)t.box_bytes();
    if (dst & 127)
      throw Fault("align", "tensor copy destination " + hex(dst) + " is not 128-byte aligned", l);
    uint32_t ctas = in.aux[2] ? (uint32_t)src_lane(x, in.op[3], l) & 0xFFFF : 0;
    auto to = targets(x, dst, shared_addr(x, in.op[2], l), in.aux[2], ctas, in.aux[1], bytes, l);
    AsyncOp op;
    op.origin = where(x);
    std::vector<int32_t> cc(c, c + 5);
    op.run = [cl = x.cl, t, cc, to, bytes, from = issuer(x)] {
      run_tensor_load(*cl->m, t, cc.data(), to);
      complete(*cl, to, bytes, (uint32_t)t.tx_bytes(), from);
    };
    op.bytes = bytes;
    x.cl->stat_tma_load += bytes;
    submit(x, std::move(op));
  }
}

BulkGroups& bulk_of(Exec& x, int lane) { return x.w->bulk[lane]; }

Ty reduce_type(uint32_t dtype) {
  switch (dtype) {
    case 2:
      return Ty::U32;
    case 3:
      return Ty::S32;
    case 4:
      return Ty::U64;
    case 5:
      return Ty::S64;
    case 6:
      return Ty::F16;
    case 9:
      return Ty::BF16;
    case 8:
      return Ty::F64;
    default:
      return Ty::F32;
  }
}

void reduce_bytes(Machine& m, uint8_t* g, const uint8_t* s, uint32_t n, Ty t, uint32_t op) {
  uint32_t eb = type_bytes(t);
  std::lock_guard<std::mutex> lock(m.atomics);
  for (uint32_t i = 0; i < n; i += eb) {
    uint64_t old = 0, v = 0;
    std::memcpy(&old, g + i, eb);
    std::memcpy(&v, s + i, eb);
    v = atomic_value(op, t, old, v, 0);
    std::memcpy(g + i, &v, eb);
  }
}

void do_tma_store(Exec& x, const Instr& in, uint32_t mask) {  // aux: rank, reduce, operation
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = first_lane(m);
    TensorMap t = read_map(x, in.op[0], l);
    if (t.rank != in.aux[0])
      throw Fault("tensormap",
                  "rank " + std::to_string(t.rank) + " tensor map in a " +
                      std::to_string(in.aux[0]) + "d copy",
                  l);
    int32_t c[5];
    coordinates(x, in.op[0], t, l, true, c);
    if (t.padded())
      throw Fault("tensormap", "stores of padded 4- and 6-bit types are not supported", l);
    if (in.aux[1] && t.dtype > 12)
      throw Fault("tensormap", "a packed 4-bit type cannot be reduced", l);
    uint32_t s = shared_addr(x, in.op[1], l), bytes = (uint32_t)t.box_bytes();
    if (s & 127)
      throw Fault("align", "tensor copy source " + hex(s) + " is not 128-byte aligned", l);
    if (s >> 24 != x.cta->rank)
      throw Fault("bounds", "tensor store from another CTA's shared memory", l);
    Ref r = shared_ref(*x.cl, s, bytes, "tensor store source");
    check_async_read(x, Agent::BulkRead, *r.cta, r.off, bytes, "TMA store");
    auto& g = bulk_of(x, l);
    g.any_open = true;
    ++*g.open;
    AsyncOp op;
    op.may_outlive = true;
    op.origin = where(x);
    op.reads.push_back({r.cta->rank, r.off, r.off + bytes});
    std::vector<int32_t> cc(c, c + 5);
    const bool reduce = in.aux[1];
    op.run = [cl = x.cl, t, cc, r, count = g.open, reduce, what = in.aux[2]] {
      for_chunks(t, cc.data(), [&](uint32_t off, int64_t at, bool inside, int64_t x0, uint32_t n) {
        if (!inside) return;
        const uint8_t* p = chunk_at(*r.cta, r.off + off, t.swizzle);
        int64_t lo = std::max<int64_t>(0, -x0), hi = std::min<int64_t>(n, (int64_t)t.dims[0] - x0);
        if (lo >= hi) return;
        const uint32_t bytes = (uint32_t)t.global_bytes(hi - lo);
        uint8_t* d = global_at(*cl->m, t.address + at + t.global_bytes(x0 + lo), bytes, true);
        if (reduce)
          reduce_bytes(*cl->m, d, p + t.global_bytes(lo), bytes, reduce_type(t.dtype), what);
        else
          std::memcpy(d, p + t.global_bytes(lo), bytes);
      });
      --*count;
    };
    op.bytes = bytes;
    x.cl->stat_tma_store += bytes;
    submit(x, std::move(op));
  }
}

uint32_t bulk_size(Exec& x, const Operand& o, int l) {
  uint32_t n = (uint32_t)src_lane(x, o, l);
  if (n & 15)
    throw Fault("align", "bulk copy of " + std::to_string(n) + " bytes is not a multiple of 16", l);
  return n;
}
void bulk_align(uint64_t a, const char* what, int l) {
  if (a & 15)
    throw Fault("align",
                std::string("bulk copy ") + what + " " + hex(a) + " is not 16-byte aligned", l);
}

void do_bulk_load(Exec& x, const Instr& in, uint32_t mask) {  // aux: multicast
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = first_lane(m);
    uint32_t dst = shared_addr(x, in.op[0], l), n = bulk_size(x, in.op[2], l);
    uint64_t s = address_of(x, in.op[1], l);
    bulk_align(dst, "destination", l), bulk_align(s, "source", l);
    if (!n) continue;
    const uint8_t* p = global_at(*x.m, s, n, false);
    global_check_written(*x.m, s, n);
    uint32_t ctas = in.aux[0] ? (uint32_t)src_lane(x, in.op[4], l) & 0xFFFF : 0;
    auto to = targets(x, dst, shared_addr(x, in.op[3], l), in.aux[0], ctas, false, n, l);
    AsyncOp op;
    op.origin = where(x);
    op.run = [cl = x.cl, p, n, to, from = issuer(x)] {
      for (auto& d : to) std::memcpy(d.data.p, p, n);
      complete(*cl, to, n, n, from);
    };
    op.bytes = n;
    x.cl->stat_tma_load += n;
    submit(x, std::move(op));
  }
}

void do_bulk_s2s(Exec& x, const Instr& in, uint32_t mask) {
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = first_lane(m);
    uint32_t dst = shared_addr(x, in.op[0], l), s = shared_addr(x, in.op[1], l),
             n = bulk_size(x, in.op[2], l);
    bulk_align(dst, "destination", l), bulk_align(s, "source", l);
    if (!n) continue;
    Ref r = shared_ref(*x.cl, s, n, "bulk copy source");
    check_written(*r.cta, r.off, n, "bulk copy");
    auto to = targets(x, dst, shared_addr(x, in.op[3], l), false, 0, false, n, l);
    AsyncOp op;
    op.origin = where(x);
    op.reads.push_back({r.cta->rank, r.off, r.off + n});
    op.bytes = n;
    if (Race* race = x.cl->race.get()) {
      Race::Who who = race->copy(*x.w, *to[0].bar.cta, to[0].bar.off, in.line, "bulk copy");
      who.async = true;
      race->shared(*r.cta, r.off, n, who, false);
    }
    op.run = [cl = x.cl, r, n, to, from = issuer(x)] {
      std::memmove(to[0].data.p, r.p, n);
      complete(*cl, to, n, n, from);
    };
    submit(x, std::move(op));
  }
}

void do_bulk_store(Exec& x, const Instr& in, uint32_t mask) {  // aux: reduce, operation, type
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = first_lane(m);
    uint64_t d = address_of(x, in.op[0], l);
    uint32_t s = shared_addr(x, in.op[1], l), n = bulk_size(x, in.op[2], l);
    bulk_align(d, "destination", l), bulk_align(s, "source", l);
    if (!n) continue;
    Ref r = shared_ref(*x.cl, s, n, "bulk copy source");
    check_async_read(x, Agent::BulkRead, *r.cta, r.off, n, "bulk store");
    uint8_t* p = global_at(*x.m, d, n, true);
    auto& g = bulk_of(x, l);
    ++*g.open;
    AsyncOp op;
    op.may_outlive = true;
    op.origin = where(x);
    op.reads.push_back({r.cta->rank, r.off, r.off + n});
    op.run = [cl = x.cl, r, p, n, count = g.open, red = in.aux[0], what = in.aux[1],
              t = (Ty)in.aux[2]] {
      if (red)
        reduce_bytes(*cl->m, p, r.p, n, t, what);
      else
        std::memcpy(p, r.p, n);
      --*count;
    };
    op.bytes = n;
    x.cl->stat_tma_store += n;
    submit(x, std::move(op));
  }
}

void do_bulk_group(Exec& x, const Instr& in, uint32_t mask) {  // aux: wait, N
  Race* const race = x.cl->race.get();
  const uint32_t stamp = race ? race->own(*x.w, Agent::BulkRead) : 0;
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = first_lane(m);
    auto& g = bulk_of(x, l);
    while (!g.committed.empty() && *g.committed.front() == 0) g.committed.pop_front();
    if (!in.aux[0]) {
      g.committed.push_back(g.open);
      if (race) g.stamp(stamp);
      g.open = std::make_shared<int>(0);
      continue;
    }
    if (g.committed.size() > in.aux[1]) return x.block(Why::BulkGroup, (uint64_t)l, in.aux[1]);
    const uint32_t over = g.covered(in.aux[1]);
    if (race) race->complete(*x.w, Agent::BulkRead, over);
  }
  if (race && !in.aux[0]) race->tick(*x.w, Agent::BulkRead);
}

void tensor_operand(const Decode& d, size_t i, uint32_t rank) {
  d.mem(i, 2);
  auto& c = d.ops[i].sub[1];
  if (c.kind != Operand::Vec || c.count != rank)
    d.fail("needs " + std::to_string(rank) + " coordinates");
  for (uint32_t k = 0; k < rank; ++k)
    if (c.sub[k].kind != Operand::Reg && c.sub[k].kind != Operand::Const)
      d.fail("coordinates must be registers or constants");
}
uint32_t rank_of(const Decode& d) {
  for (auto& m : d.mods)
    if (m.size() == 2 && m[1] == 'd' && m[0] >= '1' && m[0] <= '5') return (uint32_t)(m[0] - '0');
  d.fail("no dimension");
}

}  // namespace

ExecFn tma_load(Decode& d) {
  d.in.aux[0] = rank_of(d);
  d.in.aux[1] = d.has("cta_group::2");
  d.in.aux[2] = d.has("multicast::cluster");
  size_t n = 3 + d.in.aux[2] + d.has("L2::cache_hint");
  d.want(n, n), d.mem(0), tensor_operand(d, 1, d.in.aux[0]), d.mem(2), d.values(3, n);
  return &do_tma_load;
}
ExecFn tma_store(Decode& d) {
  d.in.aux[0] = rank_of(d);
  d.in.aux[1] = d.mods[1] == "reduce";
  if (d.in.aux[1]) d.in.aux[2] = atomic_op(d);
  size_t n = 2 + d.has("L2::cache_hint");
  d.want(n, n), tensor_operand(d, 0, d.in.aux[0]), d.mem(1), d.values(2, n);
  return &do_tma_store;
}
ExecFn bulk_load(Decode& d) {
  d.in.aux[0] = d.has("multicast::cluster");
  size_t n = 4 + d.in.aux[0] + d.has("L2::cache_hint");
  d.want(n, n), d.mem(0), d.mem(1), d.data(2), d.mem(3), d.values(4, n);
  return &do_bulk_load;
}
ExecFn bulk_s2s(Decode& d) {
  d.want(4, 4), d.mem(0), d.mem(1), d.data(2), d.mem(3);
  return &do_bulk_s2s;
}
ExecFn bulk_store(Decode& d) {
  size_t n = 3 + d.has("L2::cache_hint");
  d.want(n, n), d.mem(0), d.mem(1), d.data(2);
  d.in.aux[0] = d.mods[1] == "reduce";
  if (d.in.aux[0]) d.in.aux[1] = atomic_op(d), d.in.aux[2] = (uint32_t)d.type();
  return &do_bulk_store;
}
ExecFn bulk_group(Decode& d) {
  d.in.aux[0] = d.has("wait_group");
  d.want(d.in.aux[0], d.in.aux[0]);
  if (d.in.aux[0]) {
    if (d.ops[0].kind != Operand::Const) d.fail("N must be a constant");
    d.in.aux[1] = (uint32_t)d.ops[0].imm;
  }
  return &do_bulk_group;
}

}  // namespace flash_attn_mx::emu
