#include "scheduler.h"

#include <algorithm>
#include <thread>

#include "mbarrier.h"

namespace flash_attn_mx::emu {

void finish_named_barriers(Cta& c);
void finish_cluster_barrier(Cluster& cl);

std::string where(const Exec& x) {
  return "line " + std::to_string(x.in->line) + " " + x.in->text + " (CTA " +
         std::to_string(x.cta->rank) + " warp " + std::to_string(x.w->id) + ")";
}

namespace {

constexpr uint32_t kMaxThreads = 256;
constexpr uint64_t kIdlePasses =
    256;  // passes without an event before another cluster gets the thread

std::string mask_text(uint32_t m) { return m == kFull ? "all lanes" : "lanes " + hex(m); }

class Runner {
 public:
  Runner(Machine& m, uint32_t id);
  enum Result { Done, Idle };
  Result run();  // until the cluster ends, or has spun without an event for a while
  Cluster& cluster() { return cl_; }

 private:
  void start_warp(Cta& c, int id);
  void set_special(Cta& c, Warp& w, const std::string& n, const Operand& o);
  bool slice(Warp& w, int budget);
  bool pick(Warp& w);
  void split_or_move(Warp& w, Group& g, uint32_t taken, uint32_t target, bool stay);
  void merge(Warp& w);
  void leave(Warp& w, uint32_t lanes);
  bool run_async();
  bool time_out_waits();
  uint64_t state(const Warp& w) const;
  bool going_round();
  [[noreturn]] void time_is_up();
  void check_end();
  std::string deadlock();
  std::string blocked();
  std::string fault_text(const Fault& f, const Exec& x);
  std::string who(const Warp& w) const;

  Machine& m_;
  const Program& p_;
  Cluster cl_;
  std::vector<Warp*> order_;
  int live_warps_ = 0;
};

Runner::Runner(Machine& m, uint32_t id) : m_(m), p_(*m.prog) {
  const Options& o = m.opt;
  cl_.m = &m;
  cl_.id = id;
  uint32_t nx = o.grid[0] / o.cluster[0], ny = o.grid[1] / o.cluster[1];
  cl_.cid[0] = id % nx, cl_.cid[1] = id / nx % ny, cl_.cid[2] = id / nx / ny;
  cl_.rng = o.seed * 0x9E3779B97F4A7C15ull + id;
  cl_.executed.resize(p_.code.size());
  cl_.tracing = o.trace_events > 0;
  const uint32_t n_ctas = o.cluster[0] * o.cluster[1] * o.cluster[2],
                 threads = o.block[0] * o.block[1] * o.block[2];
  for (uint32_t r = 0; r < n_ctas; ++r) {
    auto c = std::make_unique<Cta>();
    c->cluster = &cl_;
    c->rank = r;
    uint32_t in[3] = {r % o.cluster[0], r / o.cluster[0] % o.cluster[1],
                      r / o.cluster[0] / o.cluster[1]};
    for (int d = 0; d < 3; ++d) c->ctaid[d] = cl_.cid[d] * o.cluster[d] + in[d];
    c->smem_bytes = p_.static_smem + o.dynamic_smem;
    c->smem.resize(kSmemBase + c->smem_bytes);
    if (o.checks.uninit) c->written.resize((kSmemBase + c->smem_bytes) / 64 + 1);
    if (o.order != Order::Eager) c->read_count.resize((kSmemBase + c->smem_bytes) / 16 + 2);
    cl_.ctas.push_back(std::move(c));
  }
  for (auto& c : cl_.ctas) {
    for (uint32_t w = 0; w * 32 < threads; ++w) start_warp(*c, (int)w);
    c->live_warps = (int)c->warps.size();
    c->tc.resize(c->warps.size());
    live_warps_ += c->live_warps;
  }
  cl_.cpasync.resize(order_.size());
  const Checks& k = o.checks;
  if (k.race || k.proxy || k.lap || k.ptx)
    cl_.race = std::make_unique<Race>(cl_, Race::Rules{k.race, k.proxy, k.lap, k.ptx},
                                      (threads + 31) / 32);
}

void Runner::start_warp(Cta& c, int id) {
  const Options& o = m_.opt;
  auto w = std::make_unique<Warp>();
  w->cta = &c;
  w->id = id;
  w->registers = o.registers;
  uint32_t threads = o.block[0] * o.block[1] * o.block[2],
           n = std::min(32u, threads - 32u * (uint32_t)id);
  w->live = n == 32 ? kFull : (1u << n) - 1;
  // calloc gives untouched pages: a warp pays only for the registers of its own role. Behind the last
  // register is room for 32 lanes of the widest type, whatever width an operand is read with.
  size_t bytes = (((size_t)p_.reg_bytes + 31) & ~(size_t)31) + 32 * sizeof(U128);
  w->regs.reset(static_cast<uint8_t*>(std::calloc(bytes, 1)));
  if (!w->regs) throw std::bad_alloc();
  if (p_.local_bytes) w->local.resize((size_t)p_.local_bytes * 32);
  for (auto& g : w->cluster_gen) g = ~0ull;
  Group g;
  g.mask = w->live;
  w->groups.push_back(g);
  for (auto& s : p_.specials) set_special(c, *w, s.first, s.second);
  order_.push_back(w.get());
  c.warps.push_back(std::move(w));
}

void Runner::set_special(Cta& c, Warp& w, const std::string& n, const Operand& o) {
  const Options& op = m_.opt;
  uint8_t* p = w.regs.get() + o.off;
  auto all = [&](uint64_t v) {
    for (int i = 0; i < 32; ++i) std::memcpy(p + i * o.width, &v, o.width);
  };
  auto lane = [&](auto f) {
    for (uint32_t i = 0; i < 32; ++i) reinterpret_cast<uint32_t*>(p)[i] = f(i);
  };
  const uint32_t bx = op.block[0], by = op.block[1];
  auto dim = [&](const uint32_t* v, const char* base) {
    std::string b = base;
    for (int d = 0; d < 3; ++d)
      if (n == b + "." + "xyz"[d]) return all(v[d]), true;
    return false;
  };
  uint32_t ncl[3], in[3];
  for (int d = 0; d < 3; ++d)
    ncl[d] = op.grid[d] / op.cluster[d], in[d] = c.ctaid[d] - cl_.cid[d] * op.cluster[d];
  uint32_t t0 = 32 * (uint32_t)w.id;
  if (n.rfind("shared+", 0) == 0) return all(c.rank << 24 | (uint32_t)std::stoul(n.substr(7)));
  if (n == "%tid.x") return lane([&](uint32_t i) { return (t0 + i) % bx; });
  if (n == "%tid.y") return lane([&](uint32_t i) { return (t0 + i) / bx % by; });
  if (n == "%tid.z") return lane([&](uint32_t i) { return (t0 + i) / bx / by; });
  if (dim(op.block, "%ntid") || dim(c.ctaid, "%ctaid") || dim(op.grid, "%nctaid") ||
      dim(in, "%cluster_ctaid") || dim(op.cluster, "%cluster_nctaid") ||
      dim(cl_.cid, "%clusterid") || dim(ncl, "%nclusterid"))
    return;
  if (n == "%laneid") return lane([](uint32_t i) { return i; });
  if (n == "%lanemask_eq") return lane([](uint32_t i) { return 1u << i; });
  if (n == "%lanemask_lt") return lane([](uint32_t i) { return (1u << i) - 1; });
  if (n == "%lanemask_le") return lane([](uint32_t i) { return (2u << i) - 1; });
  if (n == "%lanemask_gt") return lane([](uint32_t i) { return ~((2u << i) - 1); });
  if (n == "%lanemask_ge") return lane([](uint32_t i) { return ~((1u << i) - 1); });
  if (n == "%warpid") return all((uint64_t)w.id);
  if (n == "%nwarpid") return all((bx * by * op.block[2] + 31) / 32);
  if (n == "%cluster_ctarank") return all(c.rank);
  if (n == "%cluster_nctarank") return all(cl_.ctas.size());
  if (n == "%smid") return all((cl_.id * cl_.ctas.size() + c.rank) % 148);
  if (n == "%nsmid") return all(148);
  if (n == "%dynamic_smem_size") return all(op.dynamic_smem);
  if (n == "%total_smem_size") return all(c.smem_bytes);
  if (n == "%is_explicit_cluster") {
    uint32_t v = op.cluster[0] * op.cluster[1] * op.cluster[2] > 1 ? kFull : 0;
    std::memcpy(p, &v, 4);
  }
}

// Groups run lowest pc first. A blocked group is skipped until what it polls has changed.
bool Runner::pick(Warp& w) {
  int best = -1;
  for (size_t i = 0; i < w.groups.size(); ++i) {
    Group& g = w.groups[i];
    if (g.why != Why::Run && g.poll && (*g.poll & g.poll_mask) == g.poll_val && !g.timed_out)
      continue;
    if (g.why == Why::Converge && ((uint32_t)g.key & w.live & ~g.mask))
      continue;  // others must reach this pc first
    if (best < 0 || g.pc < w.groups[best].pc) best = (int)i;
  }
  if (best < 0) return false;
  w.cur = (size_t)best;
  return true;
}

void Runner::merge(Warp& w) {
  Group& g = w.groups[w.cur];
  for (size_t i = 0; i < w.groups.size(); ++i) {
    Group& o = w.groups[i];
    if (i == w.cur || o.pc != g.pc || o.arrived || g.arrived) continue;
    if (o.waits.since) trace_wait(cl_, w, o, p_.code[o.pc]);
    g.mask |= o.mask;
    g.why = Why::Run;
    g.timed_out = false;
    w.groups.erase(w.groups.begin() + i);
    if (i < w.cur) --w.cur;
    return merge(w);
  }
}

// The lanes `taken` go to the target, the others of the group to the next instruction, or nowhere.
void Runner::split_or_move(Warp& w, Group& g, uint32_t taken, uint32_t target, bool stay) {
  if (taken == g.mask) {
    g.pc = target;
  } else {
    Group other;
    other.mask = taken;
    other.pc = target;
    g.mask &= ~taken;
    if (!stay) ++g.pc;
    w.groups.push_back(other);  // invalidates g
    size_t last = w.groups.size() - 1;
    size_t keep = w.cur;
    w.cur = last;
    size_t before = w.groups.size();
    merge(w);
    if (w.groups.size() == before) w.cur = keep;
  }
}

void Runner::leave(Warp& w, uint32_t lanes) {
  if (w.live == lanes && w.cta->live_warps == 1 && cl_.race) cl_.race->check_exit(*w.cta);
  w.live &= ~lanes;
  Group& g = w.groups[w.cur];
  g.mask &= ~lanes;
  if (g.mask)
    ++g.pc;
  else
    w.groups.erase(w.groups.begin() + w.cur);
  w.cta->exited_lanes += (uint64_t)__builtin_popcount(lanes);
  ++cl_.events;
  if (!w.live) {
    --w.cta->live_warps;
    --live_warps_;
    finish_named_barriers(*w.cta);
  }
  finish_cluster_barrier(cl_);
}

// Runs one warp for up to `budget` instructions. True if at least one completed.
bool Runner::slice(Warp& w, int budget) {
  if (!w.live || !pick(w)) return false;
  // A group that spins at a low pc must not starve its siblings: after many split slices, one of
  // them runs alone.
  w.split_slices = w.groups.size() > 1 ? w.split_slices + 1 : 0;
  const bool pinned = w.split_slices > 64 && cl_.random() % 2;
  if (pinned) {
    size_t i = cl_.random() % w.groups.size();
    if (w.groups[i].why == Why::Run) w.cur = i;
  }
  Exec x;
  x.m = &m_, x.cl = &cl_, x.cta = w.cta, x.w = &w;
  const Instr* code = p_.code.data();
  const uint64_t flips = cl_.phase_flips;
  bool did = false;
  try {
    // A phase that ended wakes others: they run before this warp can end the next one, as work
    // takes time on hardware.
    while (budget-- > 0 && cl_.phase_flips == flips) {
      Group* g = &w.groups[w.cur];
      const Instr& in = code[g->pc];
      uint32_t mask = g->mask;
      if (in.guarded) {
        uint32_t p = *reinterpret_cast<const uint32_t*>(w.regs.get() + in.guard_off);
        mask &= in.guard_neg ? ~p : p;
      }
      x.ctl = Exec::Next;
      x.in = &in;
      x.g = g;
      g->why = Why::Run;
      if (in.flags & kReadsClock) {
        for (auto& s : p_.specials)
          if (s.first.rfind("%clock", 0) == 0 || s.first.rfind("%globaltimer", 0) == 0)
            for (int i = 0; i < 32; ++i) {
              uint64_t v = cl_.stat_insn;
              std::memcpy(w.regs.get() + s.second.off + i * s.second.width, &v, s.second.width);
            }
      }
      if (in.ld_regs && cl_.race && mask && !(in.flags & kTmemLd))
        cl_.race->registers_used(w, p_.ld_regs[in.ld_regs]);
      if (in.fn && mask) in.fn(x, in, mask);
      if (x.ctl == Exec::Block) {
        if (cl_.tracing && !g->waits.since) g->waits = {cl_.stat_insn + 1, g->key, g->want, g->why};
        const bool slept = g->why == Why::Yield;
        if (!pinned && w.groups.size() > 1 && pick(w) && &w.groups[w.cur] != g) continue;
        return did || slept;
      }
      if (cl_.tracing && g->waits.since) trace_wait(cl_, w, *g, in);
      did = true;
      ++cl_.executed[g->pc];
      ++w.executed;
      ++cl_.stat_insn;
      if (x.ctl == Exec::Next) {
        ++g->pc;
      } else if (x.ctl == Exec::Branch) {
        split_or_move(w, *g, x.taken, x.stay ? x.to : (uint32_t)in.target, x.stay);
        x.stay = false;
      } else {
        leave(w, x.taken);
        if (!w.live || pinned || !pick(w)) return true;
        continue;
      }
      if (w.groups.size() > 1) {
        merge(w);
        if (w.groups.size() > 1 && !pinned && !pick(w)) return true;
      }
    }
  } catch (const Fault& f) {
    throw std::runtime_error(fault_text(f, x));
  }
  return did;
}

// Lets one queued operation happen. Which one is random, so that nothing can rely on an order; the
// seed also says which kind is in a hurry, because a uniform choice among dozens of copies rarely
// lets an MMA overtake the one copy that it should have waited for.
bool Runner::run_async() {
  std::vector<std::deque<AsyncOp>*> queues;
  for (auto& c : cl_.ctas) {
    for (auto& q : c->tc)
      if (!q.empty()) queues.push_back(&q);
  }
  for (auto& q : cl_.cpasync)
    if (!q.empty()) queues.push_back(&q);
  // Nobody waits for a tcgen05.st but its own wait::st, which performs it: late means last.
  if (m_.opt.order != Order::Delayed || (queues.empty() && cl_.dma.empty()))
    for (auto& c : cl_.ctas)
      for (auto& w : c->warps)
        if (!w->tmem_st.empty()) queues.push_back(&w->tmem_st);
  size_t n = queues.size() + cl_.dma.size();
  if (!n) return false;
  // 0: none, 1: tcgen05, then newest copies, 2: copies, 3: tcgen05, then oldest copies
  const uint64_t hurry = m_.opt.seed % 4;
  const bool tc = hurry == 2 ? cl_.dma.empty() : !queues.empty();
  size_t k = cl_.random() % n;
  if (hurry && tc)
    k = cl_.random() % queues.size();
  else if (hurry)
    k = hurry == 3 ? queues.size() : hurry == 1 ? n - 1 : n - 1 - k % cl_.dma.size();
  AsyncOp op;
  if (k < queues.size()) {
    op = std::move(queues[k]->front());
    queues[k]->pop_front();
  } else {
    k -= queues.size();
    op = std::move(cl_.dma[k]);
    cl_.dma.erase(cl_.dma.begin() + (long)k);
  }
  count_reads(cl_, op, -1);
  ++cl_.events;
  try {
    perform(cl_, op);
  } catch (const Fault& f) {
    throw std::runtime_error(p_.name + ": cluster " + std::to_string(cl_.id) + ": asynchronous " +
                             op.origin + ": [" + f.check + "] " + f.what());
  }
  return true;
}

bool Runner::time_out_waits() {
  bool any = false;
  for (Warp* w : order_)
    for (auto& g : w->groups)
      if (g.why == Why::Mbarrier && !g.timed_out) g.timed_out = true, any = true;
  return any;
}

// What a warp does next depends on this alone, as long as nothing happens in memory.
uint64_t Runner::state(const Warp& w) const {
  auto mix = [](uint64_t h, uint64_t v) {
    h = (h ^ v) * 0x9E3779B97F4A7C15ull;
    return h ^ h >> 32;
  };
  uint64_t h = w.cc;
  for (auto& g : w.groups) h += mix(1, (uint64_t)g.pc << 32 | g.mask);  // in any order
  for (size_t i = 0; i < p_.reg_bytes; i += 8) {
    uint64_t v;
    std::memcpy(&v, w.regs.get() + i, 8);
    h = mix(h, v);
  }
  return h;
}

// After rounds in which nothing happened but that every try_wait returned false: has every warp come
// back to a state that it was in? Then it always will. A loop that counts its tries or reads a clock
// does not; it ends by itself, or at the time limit.
bool Runner::going_round() {
  constexpr uint64_t kCompared = 8;
  uint64_t since = cl_.stuck_rounds, power = 1;
  while (power * 2 <= since) power *= 2;
  since -= power;
  if (power < 2 * kCompared || since > kCompared) return false;
  bool all = since > 0;
  for (Warp* w : order_) {
    if (!w->live) continue;
    if (std::chrono::steady_clock::now() > m_.deadline)
      return false;  // a million registers take long
    const uint64_t now = state(*w);
    if (!since)
      w->stuck_state = now, w->came_back = false;
    else
      w->came_back |= now == w->stuck_state;
    all &= w->came_back;
  }
  return all;
}

void Runner::time_is_up() {
  char limit[32];
  std::snprintf(limit, sizeof limit, "%g", m_.opt.timeout_s);
  throw std::runtime_error(p_.name + ": [timeout] time limit of " + limit + " s reached (seed " +
                           std::to_string(m_.opt.seed) + ")" + blocked());
}

Runner::Result Runner::run() {
  cl_.idle_passes = 0;
  std::vector<Warp*> order = order_;
  // Half of the seeds of `random` hold one warp back, for a time, until no other can go on.
  const bool hold = m_.opt.order == Order::Random && m_.opt.seed / 4 % 2;
  Warp* late = nullptr;
  uint64_t late_until = 0;
  auto turn = [&](Warp& w) {
    int budget = 64 + (int)(cl_.random() % 192);
    if (hold) budget = &w == late ? 1 + budget % 8 : 16 * budget;
    bool did = slice(w, budget);
    if (m_.opt.order == Order::Random)
      while (cl_.random() % 2 && run_async()) did = true;
    return did;
  };
  for (uint64_t pass = 0;; ++pass) {
    if (m_.stop) return Done;
    if (!live_warps_) break;
    if (std::chrono::steady_clock::now() > m_.deadline) time_is_up();
    if (m_.opt.interrupted && std::this_thread::get_id() == m_.caller && m_.opt.interrupted()) {
      m_.stop = true;
      return Done;
    }
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[cl_.random() % i]);
    uint64_t before = cl_.events;
    bool did = false;
    if (hold && pass >= late_until)
      late = order[cl_.random() % order.size()], late_until = pass + 8 + cl_.random() % 128;
    for (Warp* w : order)
      if (w->live && w != late) did |= turn(*w);
    if (!did && late && late->live) did = turn(*late);
    if (!did && run_async()) did = true;
    if (cl_.events == before)
      ++cl_.idle_passes;
    else
      cl_.idle_passes = 0, cl_.stuck_rounds = 0;
    if (!did) {
      ++cl_.stuck_rounds;
      if (!time_out_waits() || going_round()) throw std::runtime_error(deadlock());
    }
    if (cl_.idle_passes > kIdlePasses) {
      if (run_async()) continue;  // a spinning warp may wait for what only this delivers
      return Idle;
    }
  }
  check_end();
  return Done;
}

void Runner::check_end() {
  std::string bad;
  for (auto& c : cl_.ctas) {
    if (m_.opt.checks.leaks && !c->tmem.leaks().empty())
      bad += "CTA " + std::to_string(c->rank) +
             " exits with tensor memory allocated: " + c->tmem.leaks() + "\n";
  }
  if (m_.opt.checks.leaks) {
    for (auto& op : cl_.dma)
      if (!op.may_outlive) bad += "exit with pending " + op.origin + "\n";
    for (auto& c : cl_.ctas) {
      for (auto& q : c->tc)
        for (auto& op : q)
          if (!op.may_outlive) bad += "exit with pending " + op.origin + "\n";
      for (auto& w : c->warps)
        for (auto& op : w->tmem_st) bad += "exit with pending " + op.origin + "\n";
    }
  }
  if (bad.empty() && m_.opt.checks.leaks && cl_.race) bad = cl_.race->unfinished();
  if (!bad.empty() && bad.size() > 4000) bad.resize(4000);
  // What was waited for by nobody still happens, unless it is reported.
  if (bad.empty())
    while (run_async()) {
    }
  if (!bad.empty())
    throw std::runtime_error(p_.name + ": cluster " + std::to_string(cl_.id) + ": [leak] " + bad);
}

std::string Runner::who(const Warp& w) const {
  const Cta& c = *w.cta;
  return "cluster " + std::to_string(cl_.id) + " CTA " + std::to_string(c.rank) + " (" +
         std::to_string(c.ctaid[0]) + "," + std::to_string(c.ctaid[1]) + "," +
         std::to_string(c.ctaid[2]) + ") warp " + std::to_string(w.id);
}

std::string Runner::deadlock() {
  return p_.name + ": [deadlock] no warp can go on and no asynchronous work is left (seed " +
         std::to_string(m_.opt.seed) + ")" + blocked();
}

// Where every warp stands, a line for each.
std::string Runner::blocked() {
  std::string s;
  int shown = 0;
  for (auto& c : cl_.ctas)
    for (auto& w : c->warps)
      for (auto& g : w->groups) {
        if (++shown > 200) continue;
        const Instr& in = p_.code[g.pc];
        s += "\n  " + who(*w) + " " + mask_text(g.mask) + ", line " + std::to_string(in.line) +
             " " + in.text + ": ";
        switch (g.why) {
          case Why::Run:
            s += "running";
            break;
          case Why::Mbarrier: {
            Mbar b = Mbar::load(cl_.ctas[g.key >> 24]->smem.data() + (g.key & 0xFFFFFF));
            s += "mbarrier at " + hex(g.key & 0xFFFFFF) + ", waits for the end of phase " +
                 std::to_string(g.want) + "; now phase " + std::to_string(b.phase) + ", pending " +
                 std::to_string(b.pending) + " of " + std::to_string(b.expected) + ", tx " +
                 std::to_string(b.tx);
            break;
          }
          case Why::NamedBarrier:
            s += "named barrier " + std::to_string(g.key) + ", " +
                 std::to_string(c->bars[g.key].arrived) + " of " + std::to_string(g.want) +
                 " threads arrived";
            break;
          case Why::ClusterBarrier:
            s += "cluster barrier, " + std::to_string(cl_.barrier_arrived) + " threads arrived";
            break;
          case Why::Converge:
            s += "needs " + mask_text((uint32_t)g.key) + " together, has " +
                 mask_text((uint32_t)g.want);
            break;
          case Why::BulkGroup:
            s += "bulk groups of lane " + std::to_string(g.key);
            break;
          case Why::CpAsync:
            s += "cp.async groups of lane " + std::to_string(g.key);
            break;
          case Why::Registers:
            s += std::to_string(g.key) + " registers, has " + std::to_string(g.want) + "; " +
                 std::to_string(c->free_registers) + " are free (times 32 lanes)";
            break;
          case Why::TmemAlloc:
            s += std::to_string(g.key) + " columns of tensor memory";
            break;
          case Why::TmemPair:
            s += "the same of a warp of CTA " + std::to_string(g.key);
            break;
          default:
            s += "sleeping";
            break;
        }
      }
  return s;
}

std::string operand_text(const Exec& x, const Operand& o, int lane) {
  switch (o.kind) {
    case Operand::Reg:
      if (o.width == 0)
        return std::string(o.neg ? "!" : "") + o.name + "=" +
               ((pred(x, o) ^ (o.neg ? kFull : 0)) >> lane & 1 ? "true" : "false");
      return std::string(o.name) + "=" + hex(src_lane(x, o, lane));
    case Operand::Const:
      return *o.name ? std::string(o.name) + "=" + hex((uint64_t)o.imm) : hex((uint64_t)o.imm);
    case Operand::Mem:
      return "[" + operand_text(x, o.sub[0], lane) + (o.imm ? "+" + std::to_string(o.imm) : "") +
             (o.count > 1 ? ", " + operand_text(x, o.sub[1], lane) : "") + "]";
    case Operand::Vec:
    case Operand::Pair: {
      std::string s = "{";
      for (int i = 0; i < std::min<int>(o.count, 8); ++i)
        s += (i ? ", " : "") + operand_text(x, o.sub[i], lane);
      return s + (o.count > 8 ? ", …}" : "}");
    }
    default:
      return o.name && *o.name ? o.name : "_";
  }
}

std::string Runner::fault_text(const Fault& f, const Exec& x) {
  int lane = f.lane >= 0 ? f.lane : x.g->mask ? first_lane(x.g->mask) : 0;
  std::string ops;
  for (int i = 0; i < x.in->nops; ++i) ops += (i ? ", " : "") + operand_text(x, x.in->op[i], lane);
  return p_.name + ": line " + std::to_string(x.in->line) + ": " + x.in->text + ": [" + f.check +
         "] " + f.what() + "\n  " + who(*x.w) + " lane " + std::to_string(lane) + " of " +
         mask_text(x.g->mask) + ", seed " + std::to_string(m_.opt.seed) + "\n  operands: " + ops;
}

void collect(RunResult* r, Cluster& c) {
  r->executed.resize(c.executed.size());
  for (size_t i = 0; i < c.executed.size(); ++i) r->executed[i] += c.executed[i];
  // The buffer is the launch's: what does not fit behind other clusters' lines is dropped as well.
  for (auto& o : c.output) {
    if (r->output_bytes + o.size() + 64 > c.m->opt.printf_bytes) {
      ++r->output_dropped;
      continue;
    }
    r->output_bytes += o.size() + 64;
    r->output.push_back(std::move(o));
  }
  r->output_dropped += c.output_dropped;
  r->trace.insert(r->trace.end(), c.trace.begin(), c.trace.end());
  r->trace_dropped += c.trace_dropped;
  r->insns += c.stat_insn, r->mma += c.stat_mma, r->mma_flop += c.stat_mma_flop,
      r->tma_load += c.stat_tma_load, r->tma_store += c.stat_tma_store;
  r->global_ld += c.stat_global_ld, r->global_st += c.stat_global_st, r->waits += c.stat_waits;
  if (c.id == 0)
    for (auto& a : c.ctas)
      for (auto& w : a->warps) r->warp_insns.push_back(w->executed);
}

// One worker: runs clusters to their end; a cluster that only spins goes to the back of the
// worker's queue.
void work(Machine& m, RunResult* r, std::mutex& lock) {
  std::deque<std::unique_ptr<Runner>> waiting;
  for (;;) {
    std::unique_ptr<Runner> cur;
    if (!m.stop && waiting.size() < m.resident) {
      uint32_t id = m.next_cluster.fetch_add(1);
      if (id < m.num_clusters) cur = std::make_unique<Runner>(m, id);
    }
    if (!cur) {
      if (waiting.empty()) return;
      cur = std::move(waiting.front());
      waiting.pop_front();
    }
    if (cur->run() == Runner::Idle) {
      waiting.push_back(std::move(cur));
      continue;
    }
    std::lock_guard<std::mutex> g(lock);
    collect(r, cur->cluster());
  }
}

// Registers per thread that a launch gives. What ptxas does for a kernel that uses setmaxnreg: all
// that its launch bounds leave.
uint32_t launch_registers(const Program& p, const Options& o) {
  if (o.registers) return o.registers;
  if (p.maxnreg) return (uint32_t)p.maxnreg;
  auto product = [](auto* v) {
    return (uint32_t)(std::max<int64_t>(1, v[0]) * std::max<int64_t>(1, v[1]) *
                      std::max<int64_t>(1, v[2]));
  };
  uint32_t threads = product(p.reqntid[0] ? p.reqntid : p.maxntid);
  if (threads == 1) threads = product(o.block);
  threads = (threads + 127) / 128 * 128 * (uint32_t)std::max(1, p.minnctapersm);
  return std::min(256u, 65536 / threads / 8 * 8);
}

}  // namespace

uint64_t cluster_bytes(const Program& p, const Options& o) {
  const uint64_t ctas = (uint64_t)o.cluster[0] * o.cluster[1] * o.cluster[2],
                 warps = ((uint64_t)o.block[0] * o.block[1] * o.block[2] + 31) / 32,
                 smem = kSmemBase + p.static_smem + (uint64_t)o.dynamic_smem;
  // per 16 shared bytes: 2 of written bits, 2 of queued readers, the last accesses
  const uint64_t shadow = smem / 16 * (4 + sizeof(Cell));
  const uint64_t tmem =
      p.uses_tmem ? kTmemCols * ((kTmemLanes + 4) * 4 + kTmemLanes / 16 * sizeof(Cell)) : 0;
  const uint64_t clocks = warps * ctas * kAgents * sizeof(uint32_t) * 4;
  // Of its registers a warp touches those of its own role only.
  const uint64_t warp = 32ull * p.local_bytes + p.reg_bytes / 4 + sizeof(Warp) + clocks;
  return ctas * (smem + shadow + tmem + sizeof(Cta) + warps * warp);
}

RunResult run_machine(Machine& m) {
  RunResult r;
  const Options& o = m.opt;
  m.opt.registers = launch_registers(*m.prog, o);
  m.num_clusters =
      (o.grid[0] / o.cluster[0]) * (o.grid[1] / o.cluster[1]) * (o.grid[2] / o.cluster[2]);
  m.deadline =
      std::chrono::steady_clock::now() + std::chrono::milliseconds((int64_t)(o.timeout_s * 1000));
  m.caller = std::this_thread::get_id();
  int n = std::max(1, std::min<int>(o.threads, (int)std::min(m.num_clusters, kMaxThreads)));
  // As many as a B200 has SMs, if the memory limit holds them.
  const uint64_t fit = o.memory / std::max<uint64_t>(1, cluster_bytes(*m.prog, o)) / (uint64_t)n;
  m.resident = (uint32_t)std::clamp<uint64_t>(fit, 1, 148);
  std::mutex lock;
  auto guarded = [&] {
    try {
      work(m, &r, lock);
    } catch (const std::bad_alloc&) {
      std::lock_guard<std::mutex> g(m.error_lock);
      if (m.error.empty()) m.error = m.prog->name + ": [memory] the host has no more memory";
      m.stop = true;
    } catch (const std::exception& e) {
      std::lock_guard<std::mutex> g(m.error_lock);
      if (m.error.empty()) m.error = e.what();
      m.stop = true;
    }
  };
  std::vector<std::thread> pool;
  try {
    for (int i = 1; i < n; ++i) pool.emplace_back(guarded);
  } catch (
      const std::system_error&) {  // the system gives no more threads: those there are do the work
  }
  guarded();
  for (auto& t : pool) t.join();
  r.error = m.error;
  return r;
}

}  // namespace flash_attn_mx::emu
