// Control flow, warp-wide operations, CTA and cluster barriers, fences, cluster launch control,
// printf.
#include "mbarrier.h"
#include "numerics.h"
#include "scheduler.h"

namespace flash_attn_mx::emu {

// Lanes that have arrived at an instruction which all of `members` must execute together. False:
// wait for the others.
bool converge(Exec& x, uint32_t members) {
  uint32_t need = members & x.w->live;
  if ((x.g->mask & need) == need) return true;
  x.block(Why::Converge, need, x.g->mask);
  return false;
}

namespace {
void finish(NamedBarrier& b) {
  ++b.gen;
  b.whole = 0;
  b.done = std::move(b.acc);
  b.acc.clear();
}
}  // namespace

void finish_named_barriers(
    Cta& c) {  // after an exit: barriers that wait for all remaining threads may be complete
  for (auto& b : c.bars) {
    if (b.arrived && b.expected == 0 && b.arrived >= 32u * c.live_warps) {
      b.arrived = 0;
      finish(b);
      ++c.cluster->events;
    }
  }
}

void finish_cluster_barrier(Cluster& cl) {
  uint64_t exited = 0;
  for (auto& c : cl.ctas) exited += c->exited_lanes;
  const uint64_t total =
      (uint64_t)cl.m->opt.block[0] * cl.m->opt.block[1] * cl.m->opt.block[2] * cl.ctas.size();
  if (cl.barrier_arrived && cl.barrier_arrived + exited >= total) {
    cl.barrier_arrived = 0;
    ++cl.barrier_gen;
    if (cl.race) {
      cl.race->cluster_done = std::move(cl.race->cluster_acc);
      cl.race->cluster_acc.clear();
    }
    ++cl.events;
  }
}

namespace {

uint32_t members(Exec& x, const Operand& o, uint32_t mask) {
  return (uint32_t)src_lane(x, o, first_lane(mask));
}

void do_bra(Exec& x, const Instr&, uint32_t mask) {
  x.ctl = Exec::Branch;
  x.taken = mask;
}
void do_exit(Exec& x, const Instr&, uint32_t mask) {
  x.ctl = Exec::Exit;
  x.taken = mask;
}
// Copies per lane within local memory: {from, to, bytes, from, …}.
void copy_arguments(Exec& x, const Operand& list, uint32_t lanes) {
  const size_t n = x.w->local.size() / 32;
  for (uint32_t m = lanes; m; m &= m - 1) {
    uint8_t* p = x.w->local.data() + first_lane(m) * n;
    for (uint32_t i = 0; i + 2 < list.count; i += 3)
      std::memcpy(p + list.sub[i + 1].imm, p + list.sub[i].imm, (size_t)list.sub[i + 2].imm);
  }
}

// A call of a function of the module (link.cpp): arguments, results, "is inside" predicate, the
// function's return address, its first instruction. A lane comes here twice: to go in, and back.
void do_call(Exec& x, const Instr& in, uint32_t mask) {
  const uint32_t back = pred(x, in.op[2]) & mask, fresh = mask & ~back;
  if (!fresh) {
    copy_arguments(x, in.op[1], back);
    return put_pred(x, in.op[2], 0, back);
  }
  copy_arguments(x, in.op[0], fresh);
  put_pred(x, in.op[2], kFull, fresh);
  uint32_t pc[32];
  for (auto& p : pc) p = x.g->pc;
  put(x, in.op[3], pc, fresh);
  x.ctl = Exec::Branch, x.taken = fresh, x.stay = true, x.to = (uint32_t)in.op[4].imm;
}

void do_ret(Exec& x, const Instr& in, uint32_t mask) {  // lanes of one call site at a time
  const uint32_t* pc = reinterpret_cast<const uint32_t*>(x.w->regs.get() + in.op[0].off);
  x.ctl = Exec::Branch, x.taken = 0, x.stay = true, x.to = pc[first_lane(mask)];
  for (uint32_t m = mask; m; m &= m - 1)
    if (pc[first_lane(m)] == x.to) x.taken |= m & -m;
}

void do_trap(Exec&, const Instr& in, uint32_t) {
  throw Fault("trap", std::string(in.text) + " executed");
}

void do_nanosleep(Exec& x, const Instr&, uint32_t) {
  if (x.g->arrived) {
    x.g->arrived = false;
    return;
  }
  x.g->arrived = true;
  x.block(Why::Yield, 0, 0);
}

// The CTA has the registers that its launch gave it. An increase waits until others gave up enough.
void do_setmaxnreg(Exec& x, const Instr& in, uint32_t) {  // aux: count, increase
  if (!converge(x, kFull)) return;
  const uint32_t want = in.aux[0], has = x.w->registers;
  if (in.aux[1] ? want <= has : want >= has) return;
  if (in.aux[1] && want - has > x.cta->free_registers)
    return x.block(Why::Registers, want, has, &x.cta->registers_gen);
  x.cta->free_registers += has - want;
  ++x.cta->registers_gen;
  ++x.cl->events;
  x.w->registers = want;
}

// ---- calls
// -------------------------------------------------------------------------------------------------------------
std::string c_string(Exec& x, uint64_t addr, int lane) {  // at most 4096 bytes
  std::string s;
  for (; s.size() < 4096; ++addr) {
    char c = (char)*resolve(x, Space::Generic, addr, 1, Access::Read, lane).p;
    if (!c) break;
    s += c;
  }
  return s;
}

std::string format(Exec& x, const std::string& f, uint64_t args, int lane) {
  std::string out;
  for (size_t i = 0; i < f.size(); ++i) {
    if (f[i] != '%') {
      out += f[i];
      continue;
    }
    size_t e = i + 1;
    bool wide = false;
    while (e < f.size() && !std::isalpha((unsigned char)f[e]) && f[e] != '%') ++e;
    while (e < f.size() && (f[e] == 'l' || f[e] == 'z' || f[e] == 'h' || f[e] == 'j'))
      wide |= f[e] == 'l' || f[e] == 'z' || f[e] == 'j', ++e;
    if (e >= f.size()) break;
    char c = f[e];
    std::string flags = f.substr(i, e - i);
    while (!flags.empty() && std::isalpha((unsigned char)flags.back())) flags.pop_back();
    i = e;
    if (c == '%') {
      out += '%';
      continue;
    }
    // The host's printf gets no more than flags, a width and a precision below 1000 each.
    size_t digits = 0;
    bool plain = flags.find_first_not_of("-+ #.0123456789", 1) == std::string::npos;
    for (char k : flags) plain &= (digits = std::isdigit((unsigned char)k) ? digits + 1 : 0) <= 3;
    if (!plain) {
      out += "<printf: unsupported format>";
      break;
    }
    bool dbl = std::strchr("fFeEgGaA", c), ptr = c == 'p' || c == 's';
    uint32_t n = dbl || ptr || wide ? 8 : 4;
    args = (args + n - 1) & ~(uint64_t)(n - 1);
    uint64_t v = 0;
    std::memcpy(&v, resolve(x, Space::Generic, args, n, Access::Read, lane).p, n);
    args += n;
    char b[512];
    if (dbl)
      std::snprintf(b, sizeof b, (flags + c).c_str(), as_double(v));
    else if (c == 's')
      std::snprintf(b, sizeof b, (flags + c).c_str(), c_string(x, v, lane).c_str());
    else if (c == 'c')
      std::snprintf(b, sizeof b, (flags + c).c_str(), (int)v);
    else if (c == 'p')
      std::snprintf(b, sizeof b, "%s", hex(v).c_str());
    else if (std::strchr("di", c))
      std::snprintf(b, sizeof b, (flags + "ll" + c).c_str(),
                    n == 4 ? (long long)(int32_t)v : (long long)v);
    else if (std::strchr("uoxX", c))
      std::snprintf(b, sizeof b, (flags + "ll" + c).c_str(), (unsigned long long)v);
    else
      std::snprintf(b, sizeof b, "<printf: %%%c>", c);
    out += b;
  }
  return out;
}

void do_printf(Exec& x, const Instr& in, uint32_t mask) {
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = first_lane(m);
    uint64_t p[2];
    for (int k = 0; k < 2; ++k)
      std::memcpy(&p[k],
                  resolve(x, Space::Local, (uint64_t)in.op[2].sub[k].imm, 8, Access::Read, l).p, 8);
    std::string text = format(x, c_string(x, p[0], l), p[1], l);
    // What does not fit is counted; the report says so. The vector entry itself takes memory too.
    if (x.cl->output_bytes + text.size() + 64 > x.m->opt.printf_bytes) {
      ++x.cl->output_dropped;
      continue;
    }
    x.cl->output_bytes += text.size() + 64;
    x.cl->output.push_back(std::move(text));
  }
}

void do_assertfail(Exec& x, const Instr& in, uint32_t mask) {
  int l = first_lane(mask);
  std::string msg = "device assertion failed";
  uint64_t p = 0;
  if (in.op[2].count >= 3) {
    std::memcpy(&p, resolve(x, Space::Local, (uint64_t)in.op[2].sub[0].imm, 8, Access::Read, l).p,
                8);
    msg += ": " + c_string(x, p, l);
  }
  throw Fault("assert", msg, l);
}

// ---- warp-wide
// --------------------------------------------------------------------------------------------------------
void do_elect(Exec& x, const Instr& in, uint32_t mask) {
  uint32_t mm = members(x, in.op[1], mask);
  if (!converge(x, mm)) return;
  uint32_t active = mm & x.w->live;
  uint32_t leader = (uint32_t)first_lane(active ? active : 1u), lanes[32];
  for (auto& l : lanes) l = leader;
  put(x, in.op[0].sub[0], lanes, mask);
  put_pred(x, in.op[0].sub[1], 1u << leader, mask);
}

void do_shfl(Exec& x, const Instr& in, uint32_t mask) {  // aux: 0 up, 1 down, 2 bfly, 3 idx
  if (!converge(x, members(x, in.op[4], mask))) return;
  uint32_t ta[32], tb[32], tc[32], out[32], ok = 0;
  const uint32_t *a = src(x, in.op[1], ta), *b = src(x, in.op[2], tb), *c = src(x, in.op[3], tc);
  for (int i = 0; i < 32; ++i) {
    int seg = c[i] >> 8 & 31, clamp = c[i] & 31, n = b[i] & 31;
    int hi = (i & seg) | (clamp & ~seg), lo = i & seg, j;
    bool p;
    switch (in.aux[0]) {
      case 0:
        j = i - n;
        p = j >= hi;
        break;
      case 1:
        j = i + n;
        p = j <= hi;
        break;
      case 2:
        j = i ^ n;
        p = j <= hi;
        break;
      default:
        j = lo | (n & ~seg);
        p = j <= hi;
    }
    out[i] = a[p ? j & 31 : i];
    ok |= (uint32_t)p << i;
  }
  const Operand& d = in.op[0];
  if (d.kind == Operand::Pair) {
    put(x, d.sub[0], out, mask);
    put_pred(x, d.sub[1], ok, mask);
  } else {
    put(x, d, out, mask);
  }
}

void do_vote(Exec& x, const Instr& in, uint32_t mask) {  // aux: 0 all, 1 any, 2 uni, 3 ballot
  uint32_t mm = members(x, in.op[2], mask);
  if (!converge(x, mm)) return;
  uint32_t act = mm & x.w->live, p = pred(x, in.op[1]) & act;
  if (in.aux[0] == 3) {
    uint32_t out[32];
    for (auto& o : out) o = p;
    return put(x, in.op[0], out, mask);
  }
  bool r = in.aux[0] == 0 ? p == act : in.aux[0] == 1 ? p != 0 : (p == act || p == 0);
  put_pred(x, in.op[0], r ? kFull : 0, mask);
}

void do_match(Exec& x, const Instr& in, uint32_t mask) {  // aux: all
  uint32_t mm = members(x, in.op[2], mask);
  if (!converge(x, mm)) return;
  uint32_t act = mm & x.w->live, out[32] = {}, all = kFull;
  for (int i = 0; i < 32; ++i) {
    for (int j = 0; j < 32; ++j)
      if (act >> j & 1 && src_lane(x, in.op[1], i) == src_lane(x, in.op[1], j)) out[i] |= 1u << j;
    if (act >> i & 1 && out[i] != act) all = 0;
  }
  const Operand& d = in.op[0];
  if (in.aux[0])
    for (auto& o : out) o = all ? act : 0;
  put(x, d.kind == Operand::Pair ? d.sub[0] : d, out, mask);
  if (d.kind == Operand::Pair) put_pred(x, d.sub[1], all, mask);
}

void do_activemask(Exec& x, const Instr& in, uint32_t mask) {
  uint32_t out[32];
  for (auto& o : out) o = mask;
  put(x, in.op[0], out, mask);
}

void do_redux(Exec& x, const Instr& in, uint32_t mask) {  // aux: operation, signed
  uint32_t mm = members(x, in.op[2], mask);
  if (!converge(x, mm)) return;
  uint32_t act = mm & x.w->live, r = 0;
  bool first = true;
  for (uint32_t m = act; m; m &= m - 1) {
    uint32_t v = (uint32_t)src_lane(x, in.op[1], first_lane(m));
    if (first) {
      r = v;
      first = false;
      continue;
    }
    bool less = in.aux[1] ? (int32_t)v < (int32_t)r : v < r;
    switch (in.aux[0]) {
      case 0:
        r += v;
        break;
      case 1:
        r = less ? v : r;
        break;
      case 2:
        r = less ? r : v;
        break;
      case 3:
        r &= v;
        break;
      case 4:
        r |= v;
        break;
      default:
        r ^= v;
    }
  }
  uint32_t out[32];
  for (auto& o : out) o = r;
  put(x, in.op[0], out, mask);
}

void do_redux_f32(Exec& x, const Instr& in, uint32_t mask) {  // aux: max, abs, NaN
  uint32_t mm = members(x, in.op[2], mask);
  if (!converge(x, mm)) return;
  float r = NAN;
  bool nan = false;
  for (uint32_t m = mm & x.w->live; m; m &= m - 1) {
    float v = as_float((uint32_t)src_lane(x, in.op[1], first_lane(m)));
    if (in.aux[1]) v = std::fabs(v);
    if (v != v)
      nan = true;
    else if (r != r)
      r = v;
    else if (v == r)
      r = in.aux[0] ? (std::signbit(r) ? v : r) : (std::signbit(r) ? r : v);
    else
      r = in.aux[0] ? std::fmax(r, v) : std::fmin(r, v);
  }
  uint32_t out[32];
  for (auto& o : out) o = r != r || (nan && in.aux[2]) ? kNan32 : as_bits(r);
  put(x, in.op[0], out, mask);
}

// ---- barriers
// ---------------------------------------------------------------------------------------------------------
// aux: bit 0 waits, bit 1 aligned, bits 8.. reduction (0 none, 1 and, 2 or, 3 popc); index of the
// id operand.
void do_barrier(Exec& x, const Instr& in, uint32_t mask) {
  const bool waits = in.aux[0] & 1, aligned = in.aux[0] & 2;
  const uint32_t red = in.aux[0] >> 8, at = in.aux[1], n_ops = in.aux[2];
  if (!x.g->arrived && aligned && !converge(x, kFull)) return;
  int l = first_lane(mask);
  uint64_t id = src_lane(x, in.op[at], l), want = n_ops > 1 ? src_lane(x, in.op[at + 1], l) : 0;
  if (id > 15)
    throw Fault("barrier", "named barrier " + std::to_string(id) + " does not exist (0..15)", l);
  if (want % 32)
    throw Fault("barrier",
                "barrier thread count " + std::to_string(want) + " is not a multiple of 32", l);
  NamedBarrier& b = x.cta->bars[id];
  if (!x.g->arrived) {
    // A barrier counts warps: a warp whose other lanes have exited still counts in full.
    uint32_t n = mask == x.w->live ? 32 : (uint32_t)__builtin_popcount(mask);
    if (b.arrived && b.expected != want)
      throw Fault("barrier",
                  "named barrier " + std::to_string(id) + ": arrival for " + std::to_string(want) +
                      " threads while others wait for " + std::to_string(b.expected),
                  l);
    // An arrival and a wait of one warp may both count: FlashAttention-4's backward ends a store so.
    if (!waits && mask == x.w->live) {
      const uint32_t bit = 1u << x.w->id;
      if (x.m->opt.checks.lap && (b.whole & bit))
        throw Fault("lap",
                    "warp " + std::to_string(x.w->id) + " arrives a second time at named barrier " +
                        std::to_string(id) +
                        " before its phase has ended: " + std::to_string(b.arrived) + " of " +
                        std::to_string(want) + " threads had arrived",
                    l);
      b.whole |= bit;
    }
    if (!b.arrived) b.red_and = 1, b.red_or = 0, b.red_pop = 0;
    if (x.cl->race) x.cl->race->release(*x.w, b.acc);
    b.expected = (uint32_t)want;
    b.arrived += n;
    if (red) {
      uint32_t p = pred(x, in.op[in.nops - 1]) & mask;
      b.red_and &= p == mask, b.red_or |= p != 0, b.red_pop += (uint32_t)__builtin_popcount(p);
    }
    uint64_t need = want ? want : 32u * (uint64_t)x.cta->live_warps;
    if (b.arrived > need)
      throw Fault("barrier",
                  "named barrier " + std::to_string(id) + ": " + std::to_string(b.arrived) +
                      " threads arrived, " + std::to_string(need) + " expected",
                  l);
    ++x.cl->events;
    if (b.arrived == need) {
      b.arrived = 0;
      b.out_and = b.red_and, b.out_or = b.red_or, b.out_pop = b.red_pop;
      finish(b);
    } else if (waits) {
      x.g->arrived = true;
      return x.block(Why::NamedBarrier, id, need, &b.gen);
    }
  }
  x.g->arrived = false;
  if (waits && x.cl->race) x.cl->race->acquire(*x.w, b.done);
  if (red == 3) {
    uint32_t out[32];
    for (auto& o : out) o = b.out_pop;
    put(x, in.op[0], out, mask);
  } else if (red) {
    put_pred(x, in.op[0], (red == 1 ? b.out_and : b.out_or) ? kFull : 0, mask);
  }
}

void do_warp_sync(Exec& x, const Instr& in, uint32_t mask) {
  converge(x, members(x, in.op[0], mask));
}

void do_cluster_arrive(Exec& x, const Instr& in, uint32_t mask) {  // aux: aligned
  if (in.aux[0] && !converge(x, kFull)) return;
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = first_lane(m);
    if (x.w->cluster_gen[l] != ~0ull)
      throw Fault("barrier", "barrier.cluster.arrive twice without a wait", l);
    x.w->cluster_gen[l] = x.cl->barrier_gen;
  }
  x.cl->barrier_arrived += (uint32_t)__builtin_popcount(mask);
  if (x.cl->race) x.cl->race->release(*x.w, x.cl->race->cluster_acc);
  ++x.cl->events;
  finish_cluster_barrier(*x.cl);
}

void do_cluster_wait(Exec& x, const Instr& in, uint32_t mask) {
  if (in.aux[0] && !converge(x, kFull)) return;
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = first_lane(m);
    if (x.w->cluster_gen[l] == ~0ull)
      throw Fault("barrier", "barrier.cluster.wait without an arrive", l);
    if (x.w->cluster_gen[l] == x.cl->barrier_gen)
      return x.block(Why::ClusterBarrier, x.cl->barrier_gen, x.cl->barrier_arrived,
                     &x.cl->barrier_gen);
  }
  for (uint32_t m = mask; m; m &= m - 1) x.w->cluster_gen[first_lane(m)] = ~0ull;
  if (x.cl->race) x.cl->race->acquire(*x.w, x.cl->race->cluster_done);
}

void do_fence_proxy(Exec& x, const Instr&, uint32_t) {
  if (x.cl->race) x.cl->race->fence_proxy(*x.w);
}

void do_tensor_fence(Exec& x, const Instr& in, uint32_t) {  // aux: after
  if (!x.cl->race) return;
  in.aux[0] ? x.cl->race->fence_after(*x.w) : x.cl->race->fence_before(*x.w);
}

// ---- cluster launch control
// -------------------------------------------------------------------------------------------
void do_clc_try(Exec& x, const Instr& in,
                uint32_t mask) {  // aux: multicast to every CTA of the cluster
  int l = first_lane(mask);
  uint32_t dst = shared_addr(x, in.op[0], l), bar = shared_addr(x, in.op[1], l);
  if (dst & 15)
    throw Fault("align", "try_cancel response address " + hex(dst) + " is not 16-byte aligned", l);
  if (x.cl->clc_failed)
    throw Fault("clc", "try_cancel after a try_cancel that found no more clusters", l);
  std::vector<std::pair<Ref, Ref>> to;
  for (auto& c : x.cl->ctas) {
    if (!in.aux[0] && c->rank != dst >> 24) continue;
    uint32_t r = c->rank << 24;
    to.emplace_back(shared_ref(*x.cl, (dst & 0xFFFFFF) | r, 16, "try_cancel"),
                    shared_ref(*x.cl, (bar & 0xFFFFFF) | r, 8, "try_cancel mbarrier"));
  }
  AsyncOp op;
  op.origin = where(x);
  Snapshot from;
  if (Race* race = x.cl->race.get()) {
    for (auto& t : to)
      race->shared(*t.first.cta, t.first.off, 16,
                   race->copy(*x.w, *t.second.cta, t.second.off, in.line, "try_cancel"), true);
    from = race->snapshot(*x.w, false);
  }
  op.run = [cl = x.cl, to, from] {
    Machine& m = *cl->m;
    uint32_t id = m.next_cluster.fetch_add(1), resp[4] = {0, 0, 0, 0};
    if (id < m.num_clusters) {
      uint32_t nx = m.opt.grid[0] / m.opt.cluster[0], ny = m.opt.grid[1] / m.opt.cluster[1];
      // cuDNN's kernels read the "opaque" response themselves: x, y | z << 16, and bit 0 of the
      // third word.
      resp[0] = id % nx * m.opt.cluster[0];
      resp[1] = id / nx % ny * m.opt.cluster[1] | id / nx / ny * m.opt.cluster[2] << 16;
      resp[2] = 1;
    } else {
      cl->clc_failed = true;
    }
    for (auto& t : to) {
      std::memcpy(t.first.p, resp, 16);
      mark_written(*t.first.cta, t.first.off, 16);
      MbarChange c;
      c.complete_tx = 16;
      mbar_apply(*cl, t.second, c, from.get());
    }
  };
  submit(x, std::move(op));
}

void do_clc_query(Exec& x, const Instr& in,
                  uint32_t mask) {  // aux: 0 is_canceled, 1..3 x y z, 4 v4
  U128 ta[32];
  const U128* a = src(x, in.op[1], ta);
  uint32_t v[4][32], p = 0;
  for (int i = 0; i < 32; ++i) {
    v[0][i] = (uint32_t)a[i].lo, v[1][i] = (uint32_t)(a[i].lo >> 32) & 0xFFFF,
    v[2][i] = (uint32_t)(a[i].lo >> 48), v[3][i] = 0;
    p |= (uint32_t)(a[i].hi & 1) << i;
  }
  if (in.aux[0] == 0) return put_pred(x, in.op[0], p, mask);
  if (in.aux[0] < 4) return put(x, in.op[0], v[in.aux[0] - 1], mask);
  for (int k = 0; k < 4; ++k) put(x, in.op[0].sub[k], v[k], mask);
}

}  // namespace

ExecFn bra(Decode& d) {
  d.want(1, 1);
  if (d.ops[0].kind != Operand::Label || d.ops[0].imm < 0)
    d.fail(std::string("unknown label ") + d.ops[0].name);
  d.in.target = (int32_t)d.ops[0].imm;
  return &do_bra;
}
ExecFn exit_(Decode& d) {
  if (d.in.flags & kLinked) return &do_ret;
  d.want(0, 0);
  return &do_exit;
}
ExecFn trap(Decode&) { return &do_trap; }
ExecFn nanosleep(Decode& d) {
  d.want(1, 1), d.data(0);
  return &do_nanosleep;
}
ExecFn call(Decode& d) {
  if (d.in.flags & kLinked) return &do_call;
  std::string n = d.ops[1].name;
  auto addresses = [&](size_t k) {
    for (size_t i = 0; i < k; ++i)
      if (i >= d.ops[2].count || d.ops[2].sub[i].kind != Operand::Const)
        d.fail("arguments must be .param variables");
  };
  if (n == "vprintf") return addresses(2), &do_printf;
  if (n == "__assertfail" || n == "__assert_fail") return addresses(1), &do_assertfail;
  d.fail("call of " + n + ", which is no function of this module");
}
ExecFn setmaxnreg(Decode& d) {
  d.want(1, 1);
  int64_t n = d.ops[0].imm;
  if (d.ops[0].kind != Operand::Const || n < 24 || n > 256 || n % 8)
    d.fail("register count must be a constant, 24..256 in steps of 8");
  d.in.aux[0] = (uint32_t)n;
  d.in.aux[1] = d.has("inc");
  return &do_setmaxnreg;
}
ExecFn elect(Decode& d) {
  d.want(2, 2), d.data(1);
  if (d.ops[0].kind != Operand::Pair) d.fail("destination must be d|p");
  return &do_elect;
}
ExecFn shfl(Decode& d) {
  d.want(5, 5), d.values(1, 5);
  d.in.aux[0] = d.has("up") ? 0 : d.has("down") ? 1 : d.has("bfly") ? 2 : 3;
  return &do_shfl;
}
ExecFn vote(Decode& d) {
  d.want(3, 3), d.pred_op(1), d.data(2);
  d.in.aux[0] = d.has("all") ? 0 : d.has("any") ? 1 : d.has("uni") ? 2 : 3;
  return &do_vote;
}
ExecFn match(Decode& d) {
  d.want(3, 3), d.values(1, 3);
  d.in.aux[0] = d.has("all");
  return &do_match;
}
ExecFn activemask(Decode& d) {
  d.want(1, 1), d.dst(0);
  return &do_activemask;
}
ExecFn redux(Decode& d) {
  d.want(3, 3), d.dst(0), d.values(1, 3);
  static const char* const k[] = {"add", "min", "max", "and", "or", "xor"};
  for (uint32_t i = 0; i < 6; ++i)
    if (d.has(k[i])) d.in.aux[0] = i;
  d.in.aux[1] = d.type() == Ty::S32;
  return &do_redux;
}
ExecFn redux_f32(Decode& d) {
  d.want(3, 3), d.dst(0), d.values(1, 3);
  d.in.aux[0] = d.has("max"), d.in.aux[1] = d.has("abs"), d.in.aux[2] = d.has("NaN");
  return &do_redux_f32;
}
ExecFn barrier(Decode& d) {
  d.want(1, 2), d.values(0, d.ops.size());
  bool arrive = d.has("arrive");
  if (arrive && d.ops.size() != 2) d.fail("arrive needs a thread count");
  d.in.aux[0] = (arrive ? 0 : 1) | (d.mods[0] == "bar" || d.has("aligned") ? 2 : 0);
  d.in.aux[2] = (uint32_t)d.ops.size();
  return &do_barrier;
}
ExecFn barrier_red(Decode& d) {
  d.want(3, 4);
  uint32_t red = d.has("and") ? 1 : d.has("or") ? 2 : 3;
  red == 3 ? d.dst(0) : d.pred_op(0);
  d.values(1, d.ops.size() - 1), d.pred_op(d.ops.size() - 1);
  d.in.aux[0] = 1 | (d.mods[0] == "bar" || d.has("aligned") ? 2 : 0) | red << 8;
  d.in.aux[1] = 1;
  d.in.aux[2] = (uint32_t)d.ops.size() - 2;
  return &do_barrier;
}
ExecFn warp_sync(Decode& d) {
  d.want(1, 1), d.data(0);
  return &do_warp_sync;
}
ExecFn cluster_arrive(Decode& d) {
  d.in.aux[0] = d.has("aligned");
  return &do_cluster_arrive;
}
ExecFn cluster_wait(Decode& d) {
  d.in.aux[0] = d.has("aligned");
  return &do_cluster_wait;
}
ExecFn fence(Decode&) { return nullptr; }
ExecFn tc_fence(Decode& d) {
  d.in.aux[0] = d.has("fence::after_thread_sync");
  return &do_tensor_fence;
}
ExecFn fence_proxy(Decode& d) {
  return d.has("async") && !d.has("global") ? &do_fence_proxy : nullptr;
}
ExecFn clc_try(Decode& d) {
  d.want(2, 2), d.mem(0), d.mem(1);
  d.in.aux[0] = d.has("multicast::cluster::all");
  return &do_clc_try;
}
ExecFn clc_query(Decode& d) {
  d.want(2, 2), d.data(1);
  d.in.aux[0] = d.has("is_canceled")          ? 0
                : d.has("get_first_ctaid::x") ? 1
                : d.has("get_first_ctaid::y") ? 2
                : d.has("get_first_ctaid::z") ? 3
                                              : 4;
  if (d.in.aux[0] == 4)
    d.vec(0, 4, 4);
  else if (d.in.aux[0] == 0)
    d.pred_op(0);
  else
    d.dst(0);
  return &do_clc_query;
}

}  // namespace flash_attn_mx::emu
