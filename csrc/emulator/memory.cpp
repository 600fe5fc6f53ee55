#include "memory.h"

#include <algorithm>

namespace flash_attn_mx::emu {

std::string hex(uint64_t v) {
  char b[24];
  std::snprintf(b, sizeof b, "0x%llx", (unsigned long long)v);
  return b;
}

Space space_of(const Decode& d) {
  for (auto& m : d.mods) {
    if (m == "global") return Space::Global;
    if (m == "shared" || m == "shared::cta") return Space::Shared;
    if (m == "shared::cluster") return Space::SharedCluster;
    if (m == "local") return Space::Local;
    if (m == "param") return Space::Param;
    if (m == "const") return Space::Const;
  }
  return Space::Generic;
}

namespace {
const Buffer* find_buffer(const Machine& m, uint64_t addr) {
  auto it = std::upper_bound(m.buffers.begin(), m.buffers.end(), addr,
                             [](uint64_t a, const Buffer& b) { return a < b.base; });
  if (it == m.buffers.begin()) return nullptr;
  --it;
  return addr < it->base + it->size ? &*it : nullptr;
}

bool bits_all_set(const std::vector<uint64_t>& w, uint64_t off, uint64_t n) {
  while (n) {
    uint64_t b = off & 63, take = std::min<uint64_t>(64 - b, n);
    uint64_t mask = (take == 64 ? ~0ull : ((1ull << take) - 1)) << b;
    if ((w[off >> 6] & mask) != mask) return false;
    off += take;
    n -= take;
  }
  return true;
}

void set_bits(std::vector<uint64_t>& w, uint64_t off, uint64_t n, bool shared_between_threads) {
  while (n) {
    uint64_t b = off & 63, take = std::min<uint64_t>(64 - b, n);
    uint64_t mask = (take == 64 ? ~0ull : ((1ull << take) - 1)) << b;
    if (shared_between_threads)
      __atomic_fetch_or(&w[off >> 6], mask, __ATOMIC_RELAXED);
    else
      w[off >> 6] |= mask;
    off += take;
    n -= take;
  }
}

[[noreturn]] void out_of_bounds(const Machine& m, uint64_t addr, uint64_t bytes, int lane) {
  std::string near;
  for (auto& b : m.buffers)
    if (addr + bytes > b.base && addr < b.base + b.size)
      near = "; it overlaps buffer " + b.name + " [" + hex(b.base) + ", +" +
             std::to_string(b.size) + ")";
  if (near.empty()) {
    uint64_t best = ~0ull;
    for (auto& b : m.buffers) {
      uint64_t d = addr >= b.base + b.size ? addr - (b.base + b.size)
                   : b.base > addr         ? b.base - addr
                                           : 0;
      if (d < best)
        best = d, near = "; nearest buffer " + b.name + " [" + hex(b.base) + ", +" +
                         std::to_string(b.size) + "), " + std::to_string(d) + " bytes away";
    }
  }
  throw Fault("bounds",
              "global access of " + std::to_string(bytes) + " bytes at " + hex(addr) +
                  " is in no registered buffer" + near,
              lane);
}

Ref resolve_global(Exec& x, uint64_t addr, uint32_t bytes, Access a, int lane) {
  const Buffer* b = find_buffer(*x.m, addr);
  if (!b || addr + bytes > b->base + b->size) out_of_bounds(*x.m, addr, bytes, lane);
  if (a != Access::Read && b->readonly)
    throw Fault("bounds", "write to read-only buffer " + b->name + " at " + hex(addr), lane);
  if (!b->written.empty()) {
    if (a != Access::Write && x.m->opt.checks.uninit &&
        !bits_all_set(b->written, addr - b->base, bytes))
      throw Fault("uninit",
                  "read of never-written bytes of output buffer " + b->name + " at offset " +
                      std::to_string(addr - b->base),
                  lane);
    if (a != Access::Read) set_bits(const_cast<Buffer*>(b)->written, addr - b->base, bytes, true);
  }
  Ref r;
  r.p = reinterpret_cast<uint8_t*>(addr);
  return r;
}

Ref resolve_shared(Exec& x, Space space, uint64_t addr, uint32_t bytes, Access a, int lane) {
  uint32_t a32 = (uint32_t)addr, rank = a32 >> 24, off = a32 & 0xFFFFFF;
  if (rank >= x.cl->ctas.size())
    throw Fault("bounds",
                "shared address " + hex(addr) + " names CTA rank " + std::to_string(rank) +
                    " of a cluster of " + std::to_string(x.cl->ctas.size()),
                lane);
  if (space == Space::Shared && rank != x.cta->rank)
    throw Fault("bounds",
                "shared::cta access to " + hex(addr) + ", which belongs to CTA rank " +
                    std::to_string(rank),
                lane);
  Cta& c = *x.cl->ctas[rank];
  if (off < kSmemBase || off + bytes > kSmemBase + c.smem_bytes)
    throw Fault("bounds",
                "shared access of " + std::to_string(bytes) + " bytes at " + hex(addr) +
                    ", the CTA has [" + hex(kSmemBase) + ", " + hex(kSmemBase + c.smem_bytes) + ")",
                lane);
  if (&c != x.cta && !c.live_warps)
    throw Fault("exited", "shared access at " + hex(addr) + ", whose CTA has exited", lane);
  if (a != Access::Write) check_written(c, off, bytes, "read");
  if (a != Access::Read) mark_written(c, off, bytes);
  if (x.cl->race) {
    if (&c != x.cta) x.cl->race->remote(*x.w, c, x.in->line);
    Race::Who who = x.cl->race->who(*x.w, Agent::Generic, x.in->line, x.in->text);
    who.strong = a == Access::Atomic || (x.in->flags & kStrong);
    x.cl->race->shared(c, off, bytes, who, a != Access::Read);
  }
  Ref r;
  r.p = c.smem.data() + off;
  r.cta = &c;
  r.off = off;
  return r;
}
}  // namespace

Ref resolve(Exec& x, Space space, uint64_t addr, uint32_t bytes, Access a, int lane,
            uint32_t align) {
  if (!align) align = bytes;
  if (addr & (align - 1))
    throw Fault("align",
                "address " + hex(addr) + " is not aligned to " + std::to_string(align) + " bytes",
                lane);
  if (space == Space::Generic) {
    switch (addr & kWinMask) {
      case kWinShared:
        space = Space::SharedCluster;
        break;
      case kWinLocal:
        space = Space::Local;
        break;
      case kWinParam:
        space = Space::Param;
        break;
      default:
        space = Space::Global;
    }
  }
  switch (space) {
    case Space::Shared:
    case Space::SharedCluster:
      return resolve_shared(x, space, addr, bytes, a, lane);
    case Space::Local: {
      uint64_t off = addr & 0xFFFFFFFF, n = x.w->local.size() / 32;
      if (off + bytes > n)
        throw Fault("bounds",
                    "local access of " + std::to_string(bytes) + " bytes at " + hex(off) +
                        ", the thread has " + std::to_string(n),
                    lane);
      Ref r;
      r.p = x.w->local.data() + lane * n + off;
      return r;
    }
    case Space::Param: {
      uint64_t off = addr & 0xFFFFFFFF;
      if (a != Access::Read) throw Fault("bounds", "write to kernel parameters", lane);
      if (off + bytes > x.m->params.size())
        throw Fault("bounds",
                    "parameter access of " + std::to_string(bytes) + " bytes at offset " +
                        std::to_string(off) + " of " + std::to_string(x.m->params.size()),
                    lane);
      Ref r;
      r.p = x.m->params.data() + off;
      return r;
    }
    default:
      return resolve_global(x, addr, bytes, a, lane);
  }
}

uint8_t* global_at(Machine& m, uint64_t addr, uint64_t bytes, bool write) {
  const Buffer* b = find_buffer(m, addr);
  if (!b || addr + bytes > b->base + b->size) out_of_bounds(m, addr, bytes, -1);
  if (write) {
    if (b->readonly) throw Fault("bounds", "write to read-only buffer " + b->name);
    if (!b->written.empty()) set_bits(const_cast<Buffer*>(b)->written, addr - b->base, bytes, true);
  }
  return reinterpret_cast<uint8_t*>(addr);
}

void global_check_written(Machine& m, uint64_t addr, uint64_t bytes) {
  const Buffer* b = find_buffer(m, addr);
  if (b && !b->written.empty() && m.opt.checks.uninit &&
      !bits_all_set(b->written, addr - b->base, bytes))
    throw Fault("uninit", "async read of never-written bytes of output buffer " + b->name +
                              " at offset " + std::to_string(addr - b->base));
}

Ref shared_ref(Cluster& cl, uint32_t addr, uint32_t bytes, const char* what) {
  uint32_t rank = addr >> 24, off = addr & 0xFFFFFF;
  if (rank >= cl.ctas.size())
    throw Fault("bounds", std::string(what) + ": shared address " + hex(addr) + " names CTA rank " +
                              std::to_string(rank) + " of a cluster of " +
                              std::to_string(cl.ctas.size()));
  Cta& c = *cl.ctas[rank];
  if (off < kSmemBase || (uint64_t)off + bytes > kSmemBase + c.smem_bytes)
    throw Fault("bounds", std::string(what) + ": " + std::to_string(bytes) +
                              " bytes at shared address " + hex(addr) + ", the CTA has [" +
                              hex(kSmemBase) + ", " + hex(kSmemBase + c.smem_bytes) + ")");
  Ref r;
  r.p = c.smem.data() + off;
  r.cta = &c;
  r.off = off;
  return r;
}

void mark_written(Cta& c, uint32_t off, uint32_t bytes) {
  if (!c.written.empty()) set_bits(c.written, off, bytes, false);
}

void check_written(const Cta& c, uint32_t off, uint32_t bytes, const char* what) {
  if (c.written.empty() || bits_all_set(c.written, off, bytes)) return;
  uint32_t bad = off;
  while (c.written[bad >> 6] >> (bad & 63) & 1) ++bad;
  throw Fault("uninit", std::string(what) + " of shared bytes [" + hex(off) + ", +" +
                            std::to_string(bytes) + ") of CTA " + std::to_string(c.rank) +
                            ": byte " + hex(bad) + " was never written");
}

void check_async_read(Exec& x, Agent agent, Cta& c, uint32_t off, uint32_t bytes,
                      const char* what) {
  check_written(c, off, bytes, what);
  if (x.cl->race)
    x.cl->race->shared(c, off, bytes, x.cl->race->who(*x.w, agent, x.in->line, what), false);
}

void check_no_pending_read(Cluster& cl, const Cta& c, uint32_t off, uint32_t bytes,
                           const char* what) {
  if (!cl.m->opt.checks.async_overlap || c.read_count.empty() || !bytes) return;
  bool hit = false;
  for (uint32_t g = off >> 4; g <= (off + bytes - 1) >> 4; ++g) hit |= c.read_count[g] != 0;
  if (!hit) return;
  auto scan = [&](const AsyncOp& op) {
    for (auto& r : op.reads)
      if (r.cta == c.rank && off < r.hi && r.lo < off + bytes)
        throw Fault("async-overlap", std::string(what) + " to shared bytes [" + hex(off) + ", +" +
                                         std::to_string(bytes) + ") of CTA " +
                                         std::to_string(c.rank) + " that " + op.origin +
                                         " still reads and nobody waited for");
  };
  for (auto& op : cl.dma) scan(op);
  for (auto& o : cl.ctas)
    for (auto& q : o->tc)
      for (auto& op : q) scan(op);
}

void addresses(const Exec& x, const Operand& mem, uint64_t* out) {
  const Operand& b = mem.sub[0];
  if (b.kind == Operand::Reg && b.width == 4) {
    const uint32_t* p = reinterpret_cast<const uint32_t*>(x.w->regs.get() + b.off);
    for (int i = 0; i < 32; ++i) out[i] = (uint32_t)(p[i] + (uint32_t)mem.imm);
  } else {
    uint64_t t[32];
    const uint64_t* p = src<uint64_t>(x, b, t);
    for (int i = 0; i < 32; ++i) out[i] = p[i] + mem.imm;
  }
}

uint64_t address_of(const Exec& x, const Operand& mem, int lane) {
  const Operand& b = mem.sub[0];
  uint64_t v = src_lane(x, b, lane);
  return b.kind == Operand::Reg && b.width == 4 ? (uint32_t)(v + mem.imm) : v + mem.imm;
}

uint32_t shared_addr(const Exec& x, const Operand& mem, int lane) {
  return (uint32_t)address_of(x, mem, lane);
}

}  // namespace flash_attn_mx::emu
