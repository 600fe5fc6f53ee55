// tcgen05: tensor memory allocation, ld/st, cp, mma and commit. Descriptors and tiles are in
// mma.cpp.
#include "mbarrier.h"
#include "mma.h"
#include "scheduler.h"

namespace flash_attn_mx::emu {

bool converge(Exec& x, uint32_t members);

namespace {

void need_columns(const Cta& c, uint32_t col, uint32_t n, const char* what) {
  if (!c.tmem.allocated(col, n))
    throw Fault("tmem", std::string(what) + " touches columns " + std::to_string(col) + ".." +
                            std::to_string(col + n - 1) + " of CTA " + std::to_string(c.rank) +
                            ", which are not all allocated");
}

constexpr uint32_t kAllHalves = 0xFF;  // of 16 lanes each

void note_tmem(Exec& x, Cta& c, uint32_t col, uint32_t n, uint32_t halves, Agent a, bool write) {
  if (x.cl->race)
    x.cl->race->tensor(c, col, n, halves, x.cl->race->who(*x.w, a, x.in->line, x.in->text), write);
}

// The CTAs that a cta_group names: this CTA, or its pair (ranks that differ in bit 0).
uint32_t group(Exec& x, uint32_t n, Cta** out) {
  if (n == 1) {
    out[0] = x.cta;
    return 1;
  }
  uint32_t r = x.cta->rank & ~1u;
  if (r + 1 >= x.cl->ctas.size())
    throw Fault("cta_group", "cta_group::2 in a cluster of " + std::to_string(x.cl->ctas.size()) +
                                 ": CTA " + std::to_string(x.cta->rank) + " has no peer");
  out[0] = x.cl->ctas[r].get();
  out[1] = x.cl->ctas[r + 1].get();
  return 2;
}

// With cta_group::2 a warp of each CTA of the pair allocates, frees or relinquishes, and both do so
// together: the first waits for the other.
void meet(Exec& x, uint32_t n, Tmem::Step s) {
  if (n == 1) return;
  Cta* pair[2];
  group(x, n, pair);
  const Cta& peer = *pair[~x.cta->rank & 1];
  if (!x.g->arrived) x.g->arrived = true, x.g->want = ++x.cta->tmem.steps[s], ++x.cl->events;
  const uint64_t& theirs = peer.tmem.steps[s];
  if (theirs < x.g->want) return x.block(Why::TmemPair, peer.rank, x.g->want, &theirs);
  x.g->arrived = false;
}

void do_alloc(Exec& x, const Instr& in, uint32_t mask) {
  if (!converge(x, kFull)) return;
  if (x.g->arrived) return meet(x, in.aux[0], Tmem::Alloc);
  int l = first_lane(mask);
  uint32_t n = (uint32_t)src_lane(x, in.op[1], l);
  Tmem& t = x.cta->tmem;
  if (n < 32 || n > 512 || (n & (n - 1)))
    throw Fault("tmem",
                "tcgen05.alloc of " + std::to_string(n) + " columns (power of two, 32..512)");
  if (t.relinquished) throw Fault("tmem", "tcgen05.alloc after relinquish_alloc_permit");
  int c = t.alloc(n, in.line);
  if (c < 0) return x.block(Why::TmemAlloc, n, 0, &t.gen);
  if (x.cl->race) x.cl->race->tensor_freed(*x.cta, (uint32_t)c, n);
  Ref r = resolve(x, Space::Shared, shared_addr(x, in.op[0], l), 4, Access::Write, l);
  uint32_t v = (uint32_t)c;
  std::memcpy(r.p, &v, 4);
  ++x.cl->events;
  meet(x, in.aux[0], Tmem::Alloc);
}

void do_dealloc(Exec& x, const Instr& in, uint32_t mask) {
  if (!converge(x, kFull)) return;
  if (x.g->arrived) return meet(x, in.aux[0], Tmem::Dealloc);
  uint32_t a = (uint32_t)src_lane(x, in.op[0], first_lane(mask)) & kTmemAddrMask,
           n = (uint32_t)src_lane(x, in.op[1], first_lane(mask));
  if (!x.cta->tmem.dealloc(a & 511, n))
    throw Fault("tmem", "tcgen05.dealloc of columns " + std::to_string(a & 511) + " + " +
                            std::to_string(n) + ": no such allocation");
  note_tmem(x, *x.cta, a & 511, n, kAllHalves, Agent::Generic, true);
  ++x.cl->events;
  meet(x, in.aux[0], Tmem::Dealloc);
}

void do_relinquish(Exec& x, const Instr& in, uint32_t) {
  if (!converge(x, kFull)) return;
  x.cta->tmem.relinquished = true;
  meet(x, in.aux[0], Tmem::Relinquish);
}

// Where register j of thread t lives: lane offset and column offset. One row of the table in
// blackwell-isa §4.1.
struct Cell {
  uint32_t lane, col;
};
template <int S>
inline Cell cell(uint32_t t, uint32_t j, uint32_t half) {
  if constexpr (S == 0)
    return {t, j};  // 32x32b
  else if constexpr (S == 1)
    return {t / 4 + 8 * (t & 1), 2 * j + (t >> 1 & 1)};  // 16x64b
  else if constexpr (S == 2)
    return {t / 4 + 8 * (j & 1), 4 * (j >> 1) + (t & 3)};  // 16x128b
  else if constexpr (S == 3)
    return {t / 4 + 8 * (j >> 1 & 1), 8 * (j >> 2) + 2 * (t & 3) + (j & 1)};  // 16x256b
  else
    return {t % 16, j + (t >= 16 ? half : 0)};  // 16x32bx2
}

struct Access2 {
  uint32_t lane0, col0, half;
  uint32_t cols, second;  // columns from col0, and of 16x32bx2 from second
};

void note_access(Exec& x, const Access2& a, uint32_t shape, Agent agent, bool write) {
  const uint32_t halves = (shape == 0 ? 3u : 1u) << a.lane0 / 16;
  note_tmem(x, *x.cta, a.col0, a.cols, halves, agent, write);
  if (shape == 4) note_tmem(x, *x.cta, a.second, a.cols, halves, agent, write);
}

// aux: shape, registers, 16-bit packing. Checks the address and that every column which will be
// touched is allocated.
Access2 tmem_access(Exec& x, const Instr& in, const Operand& mem, const Operand* imm,
                    uint32_t mask) {
  uint32_t a = (uint32_t)address_of(x, mem, first_lane(mask));
  for (uint32_t m = mask; m; m &= m - 1)
    if ((uint32_t)address_of(x, mem, first_lane(m)) != a)
      throw Fault("tmem",
                  "tensor memory address differs between lanes: " + hex(a) + " and " +
                      hex(address_of(x, mem, first_lane(m))),
                  first_lane(m));
  a &= kTmemAddrMask;
  uint32_t lane = a >> 16, quarter = x.w->id % 4;
  if (lane / 32 != 0 && lane / 32 != quarter)
    throw Fault("tmem", "warp " + std::to_string(x.w->id) + " accesses lane " +
                            std::to_string(lane) + "; it reaches lanes " +
                            std::to_string(32 * quarter) + ".." +
                            std::to_string(32 * quarter + 31));
  uint32_t sub = lane & 31, shape = in.aux[0];
  if (shape == 0 ? sub != 0 : (sub != 0 && sub != 16))
    throw Fault("tmem", "lane " + std::to_string(lane) + " is not a legal base for this shape");
  Access2 r{32 * quarter + sub, a & 511, imm ? (uint32_t)imm->imm : 0, 0, 0};
  static const uint32_t kRegsPerRow[] = {1, 1, 2, 4, 1}, kColsPerRow[] = {1, 2, 4, 8, 1};
  uint32_t cols = in.aux[1] / kRegsPerRow[shape] * kColsPerRow[shape];
  if (r.half > kTmemCols)
    throw Fault("tmem", "split offset " + std::to_string(r.half) + " exceeds tensor memory");
  const uint32_t words = in.aux[2] ? 2 : 1;  // 16-bit packing: two columns per register
  need_columns(*x.cta, r.col0, words * cols, in.text);
  if (shape == 4) need_columns(*x.cta, r.col0 + words * r.half, words * cols, in.text);
  r.cols = words * cols, r.second = r.col0 + words * r.half;
  return r;
}

template <int S>
void do_ld(Exec& x, const Instr& in, uint32_t mask) {
  if (!converge(x, kFull)) return;
  Access2 a = tmem_access(x, in, in.op[1], in.nops > 2 ? &in.op[2] : nullptr, mask);
  Tmem& t = x.cta->tmem;
  const Operand* regs = in.op[0].kind == Operand::Vec ? in.op[0].sub : &in.op[0];
  const bool check = x.m->opt.checks.uninit;
  auto word = [&](uint32_t lane, uint32_t col) {
    if (check && !(t.written(col)[lane / 32] >> lane % 32 & 1))
      throw Fault("uninit", "tcgen05.ld of lane " + std::to_string(lane) + ", column " +
                                std::to_string(col) + ", which was never written");
    return t.col(col)[lane];
  };
  for (uint32_t j = 0; j < in.aux[1]; ++j) {
    uint32_t v[32];
    if (S == 0 && !in.aux[2]) {
      uint32_t col = a.col0 + j;
      if (check && t.written(col)[a.lane0 / 32] != kFull)
        word(a.lane0 + (uint32_t)__builtin_ctz(~t.written(col)[a.lane0 / 32]), col);
      std::memcpy(v, t.col(col) + a.lane0, sizeof v);
    } else {
      for (uint32_t i = 0; i < 32; ++i) {
        Cell c = cell<S>(i, j, a.half);
        uint32_t lane = a.lane0 + c.lane;
        v[i] = in.aux[2] ? (word(lane, a.col0 + 2 * c.col) & 0xFFFF) |
                               word(lane, a.col0 + 2 * c.col + 1) << 16
                         : word(lane, a.col0 + c.col);
      }
    }
    put(x, regs[j], v, kFull);
  }
  if (!x.cl->race) return;
  note_access(x, a, S, Agent::TmemLd, false);
  x.cl->race->tmem_loaded(*x.w, x.m->prog->ld_regs[in.ld_regs]);
}

// A store's values are taken now; it reaches tensor memory at the latest when the warp waits for
// it.
template <int S>
void do_st(Exec& x, const Instr& in, uint32_t mask) {
  if (!converge(x, kFull)) return;
  Access2 a = tmem_access(x, in, in.op[0], in.nops > 2 ? &in.op[1] : nullptr, mask);
  const Operand& vals = in.op[in.nops - 1];
  const Operand* regs = vals.kind == Operand::Vec ? vals.sub : &vals;
  const uint32_t n = in.aux[1], unpack = in.aux[2];
  std::vector<uint32_t> v(32 * n);
  for (uint32_t j = 0; j < n; ++j) {
    uint32_t tmp[32];
    std::memcpy(&v[32 * j], src(x, regs[j], tmp), 128);
  }
  if (x.cl->race) {
    note_access(x, a, S, Agent::TmemSt, true);
    x.cl->race->tick(*x.w, Agent::TmemSt);
  }
  AsyncOp op;
  op.kind = AsyncOp::TmemSt;
  op.origin = x.m->opt.order == Order::Eager ? std::string() : where(x);
  op.run = [cta = x.cta, a, n, unpack, v = std::move(v)] {
    Tmem& t = cta->tmem;
    auto set = [&](uint32_t lane, uint32_t col, uint32_t w) {
      t.col(col)[lane] = w;
      t.written(col)[lane / 32] |= 1u << lane % 32;
    };
    for (uint32_t j = 0; j < n; ++j)
      for (uint32_t i = 0; i < 32; ++i) {
        Cell c = cell<S>(i, j, a.half);
        uint32_t lane = a.lane0 + c.lane, w = v[32 * j + i];
        if (unpack) {
          set(lane, a.col0 + 2 * c.col, w & 0xFFFF);
          set(lane, a.col0 + 2 * c.col + 1, w >> 16);
        } else {
          set(lane, a.col0 + c.col, w);
        }
      }
  };
  submit(x, std::move(op));
}

void do_wait(Exec& x, const Instr& in, uint32_t) {
  if (!converge(x, kFull)) return;
  if (x.cl->race) {
    const Agent a = in.aux[0] ? Agent::TmemSt : Agent::TmemLd;
    x.cl->race->complete(*x.w, a, x.cl->race->own(*x.w, a) - 1);
  }
  if (!in.aux[0]) return;  // ld: results were delivered at issue
  while (!x.w->tmem_st.empty()) {
    perform(*x.cl, x.w->tmem_st.front());
    x.w->tmem_st.pop_front();
  }
}

void do_commit(Exec& x, const Instr& in, uint32_t mask) {  // aux: multicast
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = first_lane(m);
    uint32_t a = shared_addr(x, in.op[0], l);
    std::vector<Ref> refs;
    if (in.aux[0]) {
      uint32_t ctas = (uint32_t)src_lane(x, in.op[1], l) & 0xFFFF;
      if (ctas >> x.cl->ctas.size())
        throw Fault("bounds",
                    "commit mask " + hex(ctas) + " names CTAs outside a cluster of " +
                        std::to_string(x.cl->ctas.size()),
                    l);
      for (uint32_t r = 0; r < x.cl->ctas.size(); ++r)
        if (ctas >> r & 1)
          refs.push_back(shared_ref(*x.cl, (a & 0xFFFFFF) | r << 24, 8, "tcgen05.commit"));
    } else {
      refs.push_back(shared_ref(*x.cl, a, 8, "tcgen05.commit"));
    }
    AsyncOp op;
    op.kind = AsyncOp::Tc;
    op.origin = where(x);
    op.may_outlive = true;
    Snapshot from = x.cl->race ? x.cl->race->snapshot(*x.w, true) : nullptr;
    op.run = [cl = x.cl, refs, from] {
      for (auto& r : refs) {
        MbarChange c;
        c.arrive = 1;
        mbar_apply(*cl, r, c, from.get());
      }
    };
    submit(x, std::move(op));
  }
}

void add_read(AsyncOp& op, uint32_t cta, uint32_t lo, uint32_t n) {
  if (!op.reads.empty() && op.reads.back().cta == cta && op.reads.back().hi == lo)
    op.reads.back().hi = lo + n;
  else
    op.reads.push_back({cta, lo, lo + n});
}

// aux: shape 0 128x256b, 1 128x128b, 2 4x256b, 3 64x128b 02_13, 4 64x128b 01_23, 5 32x128b; cta
// group
void do_cp(Exec& x, const Instr& in, uint32_t mask) {
  static const uint32_t kRows[] = {128, 128, 4, 64, 64, 32}, kBytes[] = {32, 16, 32, 16, 16, 16};
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = first_lane(m);
    uint32_t a = (uint32_t)address_of(x, in.op[0], l) & kTmemAddrMask, col = a & 511,
             shape = in.aux[0];
    SmemDesc s = decode_smem_desc(src_lane(x, in.op[1], l), "tcgen05.cp source");
    Cta* g[2];
    uint32_t n = group(x, in.aux[1], g), rows = kRows[shape], bytes = kBytes[shape];
    AsyncOp op;
    op.kind = AsyncOp::Tc;
    op.origin = where(x);
    for (uint32_t c = 0; c < n; ++c) {
      need_columns(*g[c], col, bytes / 4, "tcgen05.cp");
      for (uint32_t r = 0; r < rows; ++r)
        for (uint32_t b = 0; b < bytes; b += 16) {
          uint32_t off = s.k_major(r, b);
          shared_ref(*x.cl, g[c]->rank << 24 | off, 16, "tcgen05.cp source");
          check_async_read(x, Agent::Tensor, *g[c], off, 16, "tcgen05.cp");
          add_read(op, g[c]->rank, off, 16);
        }
      note_tmem(x, *g[c], col, bytes / 4, shape == 2 ? 0x55 : kAllHalves, Agent::Tensor, true);
    }
    std::vector<Cta*> ctas(g, g + n);
    op.run = [ctas, s, rows, bytes, col, shape] {
      for (Cta* c : ctas)
        for (uint32_t r = 0; r < rows; ++r)
          for (uint32_t b = 0; b < bytes; b += 16) {
            uint32_t w[4], lanes[4], k = 1;
            std::memcpy(w, c->smem.data() + s.k_major(r, b), 16);
            lanes[0] = r;
            if (shape == 2) lanes[0] = 32 * r;
            if (shape == 3) lanes[1] = r + 64, k = 2;
            if (shape == 4) lanes[0] = r % 32 + 64 * (r / 32), lanes[1] = lanes[0] + 32, k = 2;
            if (shape == 5) lanes[1] = r + 32, lanes[2] = r + 64, lanes[3] = r + 96, k = 4;
            for (uint32_t j = 0; j < k; ++j)
              for (uint32_t i = 0; i < 4; ++i) {
                c->tmem.col(col + b / 4 + i)[lanes[j]] = w[i];
                c->tmem.written(col + b / 4 + i)[lanes[j] / 32] |= 1u << lanes[j] % 32;
              }
          }
    };
    submit(x, std::move(op));
  }
}

// aux: kind, cta group, scales per row (0: not block scaled), index of the disable vector (0 none)
// or, block scaled, whether it is mxf4nvf4. aux[3] >> 8: index of the scale-input immediate.
MmaOp read_mma(Exec& x, const Instr& in, int l) {
  MmaOp o;
  o.kind = (Kind)in.aux[0];
  o.ctas = in.aux[1];
  o.line = in.line;
  o.d_addr = (uint32_t)address_of(x, in.op[0], l) & kTmemAddrMask;
  o.a_tmem = in.op[1].kind == Operand::Mem;
  if (o.a_tmem)
    o.a_addr = (uint32_t)address_of(x, in.op[1], l) & kTmemAddrMask;
  else
    o.a = decode_smem_desc(src_lane(x, in.op[1], l), "A");
  o.b = decode_smem_desc(src_lane(x, in.op[2], l), "B");
  o.scale_vec = in.aux[2];
  o.nvf4 = in.aux[2] && in.aux[3];
  decode_idesc((uint32_t)src_lane(x, in.op[3], l), &o);
  uint32_t p = 4;
  if (in.aux[2]) {
    o.sfa = (uint32_t)address_of(x, in.op[4], l) & kTmemAddrMask;
    o.sfb = (uint32_t)address_of(x, in.op[5], l) & kTmemAddrMask;
    p = 6;
  } else if (in.aux[3] & 255) {
    const Operand& v = in.op[4];
    for (uint32_t i = 0; i < v.count; ++i)
      o.disable[i] = (uint32_t)src_lane(x, v.sub[i], l), o.any_disabled |= o.disable[i] != 0;
    p = 5;
  }
  o.accumulate = pred(x, in.op[p]) >> l & 1;
  if (in.aux[3] >> 8) o.scale_shift = (uint32_t)in.op[in.aux[3] >> 8].imm;
  if (o.a_tmem && o.a_mn) throw Fault("idesc", "A from tensor memory cannot be MN-major");
  return o;
}

void check_written_tmem(Cta& c, uint32_t col, uint32_t cols, uint32_t lanes, const char* what) {
  for (uint32_t k = 0; k < cols; ++k)
    for (uint32_t q = 0; q < lanes / 32; ++q)
      if (c.tmem.written(col + k)[q] != kFull)
        throw Fault(
            "uninit",
            std::string(what) + " in column " + std::to_string(col + k) + " of CTA " +
                std::to_string(c.rank) + ": lane " +
                std::to_string(32 * q + (uint32_t)__builtin_ctz(~c.tmem.written(col + k)[q])) +
                " was never written");
}

void check_mma_tmem(const MmaOp& o, Cta& c, const Options& opt) {
  const bool split = o.ctas == 2 && o.m == 128;
  if (!opt.checks.uninit) return;
  const uint32_t lanes =
      o.ctas == 1 && o.m == 64 ? 0 : 128;  // layout F uses half the lanes of each quarter
  if (o.accumulate)
    check_written_tmem(c, o.d_addr & 511, split ? o.n / 2 : o.n, lanes, "accumulation onto D");
  if (o.a_tmem) check_written_tmem(c, o.a_addr & 511, 8, split ? 64 : lanes, "A operand");
  if (o.scale_vec) {
    check_written_tmem(c, o.sfa & 511, (o.m / o.ctas + 31) / 32, 128, "scale factors of A");
    check_written_tmem(c, o.sfb & 511, ((split ? o.n / 2 : o.n) + 31) / 32, 128,
                       "scale factors of B");
  }
}

// What an MMA touches in the tensor memory of CTA `which` of its group.
void note_mma(Exec& x, const MmaOp& o, uint32_t which, Cta& c) {
  if (!x.cl->race) return;
  const bool split = o.ctas == 2 && o.m == 128, rows64 = o.ctas == 1 && o.m == 64;
  auto odd = [&](uint32_t addr) { return rows64 ? 0x55u << (addr >> 20 & 1) : kAllHalves; };
  auto read = [&](uint32_t addr, uint32_t cols, uint32_t halves) {
    note_tmem(x, c, addr & 511, cols, halves, Agent::Tensor, false);
  };
  if (o.a_tmem) read(o.a_addr, 8, split ? 0x0F : odd(o.a_addr));
  if (o.scale_vec) {
    read(o.sfa, (o.m / o.ctas + 31) / 32, kAllHalves);
    read(o.sfb, ((split ? o.n / 2 : o.n) + 31) / 32, kAllHalves);
  }
  uint32_t d = odd(o.d_addr);
  for (uint32_t h = 0; h < 8 && o.any_disabled; ++h)
    if ((o.disable[which * 4 + h / 2] >> h % 2 * 16 & 0xFFFF) == 0xFFFF) d &= ~(1u << h);
  note_tmem(x, c, o.d_addr & 511, split ? o.n / 2 : o.n, d, Agent::Tensor, true);
}

void do_mma(Exec& x, const Instr& in, uint32_t mask) {
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = first_lane(m);
    MmaOp o = read_mma(x, in, l);
    Cta* g[2] = {nullptr, nullptr};
    group(x, o.ctas, g);
    const bool split = o.ctas == 2 && o.m == 128;
    AsyncOp op;
    op.kind = AsyncOp::Tc;
    op.origin = where(x);
    for (uint32_t c = 0; c < o.ctas; ++c) {
      need_columns(*g[c], o.d_addr & 511, split ? o.n / 2 : o.n, "D of tcgen05.mma");
      if (o.a_tmem) need_columns(*g[c], o.a_addr & 511, 8, "A of tcgen05.mma");
      if (in.aux[2]) {
        need_columns(*g[c], o.sfa & 511, (o.m / o.ctas + 31) / 32, "SFA of tcgen05.mma");
        need_columns(*g[c], o.sfb & 511, (o.n + 31) / 32, "SFB of tcgen05.mma");
      }
      note_mma(x, o, c, *g[c]);
      const bool track = x.m->opt.order != Order::Eager;
      for_smem_chunks(o, c, [&](uint32_t off) {
        if (off < kSmemBase || off + 16 > kSmemBase + g[c]->smem_bytes)
          shared_ref(*x.cl, g[c]->rank << 24 | off, 16, "tcgen05.mma operand");
        check_async_read(x, Agent::Tensor, *g[c], off, 16, "tcgen05.mma");
        if (track) add_read(op, g[c]->rank, off, 16);
      });
    }
    ++x.cl->stat_mma;
    x.cl->stat_mma_flop += 2ull * o.m * o.n * o.k;
    Cta *c0 = g[0], *c1 = g[1];
    op.run = [o, c0, c1, opt = &x.m->opt] {
      Cta* c[2] = {c0, c1};
      for (uint32_t i = 0; i < o.ctas; ++i) check_mma_tmem(o, *c[i], *opt);
      run_mma(o, c, *opt);
    };
    submit(x, std::move(op));
  }
}

uint32_t cta_group(const Decode& d) { return d.has("cta_group::2") ? 2 : 1; }

ExecFn ldst(Decode& d, bool ld) {
  size_t r = ld ? 0 : d.ops.size() - 1;
  static const char* const kShape[] = {"32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"};
  static const uint32_t kRegs[] = {1, 1, 2, 4, 1};
  for (uint32_t i = 0; i < 5; ++i)
    if (d.has(kShape[i])) d.in.aux[0] = i;
  uint32_t n = 0;
  for (auto& m : d.mods)
    if (m[0] == 'x' && m.size() <= 4) n = (uint32_t)std::stoul(m.substr(1));
  d.in.aux[1] = n * kRegs[d.in.aux[0]];
  if (d.in.aux[1] > 128) d.fail("more than 128 registers");
  d.in.aux[2] = d.has("pack::16b") || d.has("unpack::16b");
  bool imm = d.in.aux[0] == 4;
  d.want(imm ? 3 : 2, imm ? 3 : 2);
  if (d.in.aux[1] == 1 && d.ops[r].kind != Operand::Vec)
    ld ? d.dst(r) : d.data(r);
  else
    d.vec(r, d.in.aux[1], d.in.aux[1]);
  d.mem(ld ? 1 : 0);
  if (imm && d.ops[ld ? 2 : 1].kind != Operand::Const)
    d.fail("the split offset must be a constant");
  static const ExecFn kLd[] = {&do_ld<0>, &do_ld<1>, &do_ld<2>, &do_ld<3>, &do_ld<4>};
  static const ExecFn kSt[] = {&do_st<0>, &do_st<1>, &do_st<2>, &do_st<3>, &do_st<4>};
  return ld ? kLd[d.in.aux[0]] : kSt[d.in.aux[0]];
}

}  // namespace

ExecFn tc_alloc(Decode& d) {
  d.want(2, 2), d.mem(0), d.data(1);
  d.in.aux[0] = cta_group(d);
  return &do_alloc;
}
ExecFn tc_dealloc(Decode& d) {
  d.want(2, 2), d.values(0, 2);
  d.in.aux[0] = cta_group(d);
  return &do_dealloc;
}
ExecFn tc_relinquish(Decode& d) {
  d.in.aux[0] = cta_group(d);
  return &do_relinquish;
}
ExecFn tc_ld(Decode& d) { return ldst(d, true); }
ExecFn tc_st(Decode& d) { return ldst(d, false); }
ExecFn tc_wait(Decode& d) {
  d.in.aux[0] = d.has("wait::st");
  return &do_wait;
}
ExecFn tc_commit(Decode& d) {
  d.in.aux[0] = d.has("multicast::cluster");
  d.want(1 + d.in.aux[0], 1 + d.in.aux[0]), d.mem(0);
  if (d.in.aux[0]) d.data(1);
  return &do_commit;
}
ExecFn tc_cp(Decode& d) {
  d.want(2, 2), d.mem(0), d.data(1);
  static const char* const k[] = {"128x256b", "128x128b", "4x256b", "02_13", "01_23", "32x128b"};
  for (uint32_t i = 0; i < 6; ++i)
    if (d.has(k[i]) || d.has((std::string("warpx2::") + k[i]).c_str())) d.in.aux[0] = i;
  d.in.aux[1] = cta_group(d);
  return &do_cp;
}
ExecFn tc_mma(Decode& d) {
  d.in.aux[0] = (uint32_t)(d.has("kind::f16")        ? Kind::F16
                           : d.has("kind::tf32")     ? Kind::TF32
                           : d.has("kind::f8f6f4")   ? Kind::F8
                           : d.has("kind::mxf8f6f4") ? Kind::MXF8
                                                     : Kind::MXF4);
  d.in.aux[1] = cta_group(d);
  if (d.has("block_scale"))
    d.in.aux[2] = d.has("kind::mxf8f6f4") ? 1 : d.has("scale_vec::4X") || d.has("block16") ? 4 : 2;
  d.want(5, 7), d.mem(0);
  if (d.ops[1].kind == Operand::Mem)
    d.mem(1);
  else
    d.data(1);
  d.data(2), d.data(3);
  if (d.in.aux[2]) {
    d.want(7, 7), d.mem(4), d.mem(5), d.pred_op(6);
    d.in.aux[3] = d.has("kind::mxf4nvf4");
    return &do_mma;
  }
  size_t p = 4;
  if (d.ops[4].kind == Operand::Vec) {
    size_t n = d.in.aux[1] == 1 ? 4 : 8;
    d.vec(4, n, n);
    d.in.aux[3] = 4;
    p = 5;
  }
  d.pred_op(p);
  if (d.ops.size() > p + 1) {
    if (d.ops[p + 1].kind != Operand::Const || d.ops[p + 1].imm < 0 || d.ops[p + 1].imm > 15 ||
        d.has("kind::f8f6f4"))
      d.fail("scale-input-d must be a constant 0..15, for f16 and tf32");
    d.in.aux[3] |= (uint32_t)(p + 1) << 8;
  }
  return &do_mma;
}

}  // namespace flash_attn_mx::emu
