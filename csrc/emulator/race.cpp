#include "race.h"

#include <algorithm>

#include "memory.h"

namespace flash_attn_mx::emu {

namespace {
constexpr uint32_t kHalves = 8;      // groups of 16 lanes
constexpr size_t kMaxFlags = 4096;   // addresses with a clock of their own; the rest share one
constexpr uint16_t kWhole = 0xFFFF;  // every byte of a cell

uint32_t get(const Clocks& c, uint32_t i) { return i < c.size() ? c[i] : 0; }
void raise(Clocks& c, uint32_t i, uint32_t v) {
  if (i >= c.size()) c.resize(i + 1);
  c[i] = std::max(c[i], v);
}
void join_into(Clocks& a, const Clocks& b) {
  if (a.size() < b.size()) a.resize(b.size());
  uint32_t* p = a.data();
  const uint32_t* q = b.data();
  for (size_t i = 0; i < b.size(); ++i) p[i] = std::max(p[i], q[i]);
}
}  // namespace

void Known::join(const Known& o) {
  join_into(seen, o.seen);
  join_into(fenced, o.fenced);
  join_into(ordered, o.ordered);
}

Race::Race(Cluster& cl, Rules rules, uint32_t warps_per_cta)
    : cl_(cl),
      rules_(rules),
      per_cta_(warps_per_cta),
      warps_(warps_per_cta * (uint32_t)cl.ctas.size()),
      warp_(warps_),
      more_(1) {
  for (uint32_t i = 0; i < warps_; ++i) {
    Known& k = warp_[i].k;
    k.seen.resize(warps_ * kAgents);
    if (rules.proxy) k.fenced.resize(warps_ * kAgents);
    if (rules.ptx) k.ordered.resize(warps_ * kAgents);
    k.seen[i * kAgents] = 1;
  }
  for (auto& c : cl.ctas) {
    smem_.emplace_back((kSmemBase + c->smem_bytes) / 16 + 2);
    tmem_.emplace_back();
    remote_.emplace_back();
  }
}

WarpKnows& Race::of(const Warp& w) { return warp_[w.cta->rank * per_cta_ + (uint32_t)w.id]; }
uint32_t& Race::own(const Warp& w, Agent a) { return of(w).own[(int)a]; }
uint16_t Race::comp(const Warp& w, Agent a) const {
  return (uint16_t)((w.cta->rank * per_cta_ + (uint32_t)w.id) * kAgents + (uint32_t)a);
}

// ---- who did what
// -----------------------------------------------------------------------------------------------------
Race::Who Race::who(const Warp& w, Agent a, int line, const char* what) const {
  Who r;
  r.knows = &warp_[w.cta->rank * per_cta_ + (uint32_t)w.id];
  r.comp = comp(w, a);
  r.clock = r.knows->own[(int)a];
  r.async = a == Agent::Tensor || a == Agent::BulkRead;
  r.line = line;
  r.what = what;
  return r;
}

Race::Who Race::copy(const Warp& w, const Cta& bar_cta, uint32_t bar, int line, const char* what) {
  Who r = who(w, Agent::Generic, line, what);
  Mbar& b = mbar(bar_cta, bar);
  r.comp = b.comp;
  r.clock = b.phases + 1;  // known to those who see the running phase end
  r.in_order = false;
  return r;
}

std::string Race::name(uint16_t comp) const {
  if (comp >= warps_ * kAgents) {
    uint32_t at = mbar_at_[comp - warps_ * kAgents];
    return "a copy that completes on the mbarrier at " + hex(at & 0xFFFFFF) + " of CTA " +
           std::to_string(at >> 24);
  }
  static const char* const kWhat[] = {"warp ",
                                      "tcgen05 work of warp ",
                                      "tcgen05.st of warp ",
                                      "tcgen05.ld of warp ",
                                      "bulk store of warp ",
                                      "cp.async of warp "};
  uint32_t w = comp / kAgents;
  return kWhat[comp % kAgents] + std::to_string(w % per_cta_) + " of CTA " +
         std::to_string(w / per_cta_);
}

std::string Race::place(bool tmem, const Cta& c, uint32_t at) const {
  std::string s = tmem ? "tensor memory column " + std::to_string(at / kHalves) + ", lanes " +
                             std::to_string(at % kHalves * 16) + ".." +
                             std::to_string(at % kHalves * 16 + 15)
                       : "shared bytes " + hex(at << 4) + "..";
  return s + " of CTA " + std::to_string(c.rank);
}

// ---- accesses
// ---------------------------------------------------------------------------------------------------------
bool Race::knows(const Who& who, const Mark& m) const {
  return (m.comp == who.comp && who.in_order) || m.clock <= get(who.knows->k.seen, m.comp);
}

void Race::check(const Who& who, const Mark& m, uint16_t mask, bool m_writes, bool writes,
                 bool tmem, const Cta& c, uint32_t at) const {
  if (!(m.mask & mask) || (m.strong && who.strong)) return;
  auto earlier = [&] {
    return std::string(m_writes ? "write" : "read") + " by " + name(m.comp) + " (line " +
           std::to_string(m.line) + ")";
  };
  if (rules_.race && !knows(who, m))
    throw Fault("race", std::string(who.what) + (writes ? " writes " : " reads ") +
                            place(tmem, c, at) + " with no wait that orders it after the " +
                            earlier());
  if (m.comp >= warps_ * kAgents) return;
  const Agent a = (Agent)(m.comp % kAgents);
  if (rules_.proxy && who.async && !tmem && !writes && m_writes &&
      (a == Agent::Generic || a == Agent::CpAsync) && m.clock > get(who.knows->k.fenced, m.comp) &&
      m.clock > get(who.knows->self_fenced, m.comp))
    throw Fault("proxy", std::string(who.what) + " of " + place(tmem, c, at) +
                             ": no fence.proxy.async between the " + earlier() +
                             " and this, by the writer or by the reader");
  if (rules_.ptx && tmem && m.comp != who.comp &&
      (a == Agent::Tensor || m.comp / kAgents != who.comp / kAgents) &&
      m.clock > get(who.knows->after, m.comp))
    throw Fault("ptx", std::string(who.what) + (writes ? " writes " : " reads ") +
                           place(tmem, c, at) + ": no tcgen05.fence pair between the " + earlier() +
                           " and this");
}

void Race::touch(Cell& cell, const Who& who, uint16_t mask, bool write, bool tmem, const Cta& c,
                 uint32_t at) {
  if (cell.w.mask) check(who, cell.w, mask, true, write, tmem, c, at);
  if (write && cell.r.mask) check(who, cell.r, mask, false, true, tmem, c, at);
  if (cell.more) return touch_more(cell, who, mask, write, tmem, c, at);
  Mark& m = write ? cell.w : cell.r;
  const bool same = m.mask && m.comp == who.comp && m.clock == who.clock;
  // A write makes older marks needless; a read only those that it knows of.
  if (same || (!(m.mask & ~mask) && (write || !m.mask || knows(who, m)))) {
    m = {who.clock, who.comp, (uint16_t)(same ? m.mask | mask : mask), who.line, who.strong};
    if (write) cell.r.mask &= (uint16_t)~mask;
    return;
  }
  touch_more(cell, who, mask, write, tmem, c, at);
}

// Several unordered readers, or writers of different bytes.
void Race::touch_more(Cell& cell, const Who& who, uint16_t mask, bool write, bool tmem,
                      const Cta& c, uint32_t at) {
  if (!cell.more) {
    if (free_more_.empty()) free_more_.push_back((uint32_t)more_.size()), more_.emplace_back();
    cell.more = free_more_.back();
    free_more_.pop_back();
  }
  More& more = more_[cell.more];
  for (auto& m : more.w) check(who, m, mask, true, write, tmem, c, at);
  if (write)
    for (auto& m : more.r) check(who, m, mask, false, true, tmem, c, at);
  auto cover = [&](Mark& m, bool all) {  // what a newer access that knows of m makes needless
    if (all || knows(who, m)) m.mask &= (uint16_t)~mask;
  };
  auto sweep = [&](Mark& first, std::vector<Mark>& rest, bool all) {
    cover(first, all);
    for (auto& m : rest) cover(m, all);
    rest.erase(std::remove_if(rest.begin(), rest.end(), [](const Mark& m) { return !m.mask; }),
               rest.end());
  };
  if (write) sweep(cell.w, more.w, true);
  sweep(cell.r, more.r, write);
  Mark& first = write ? cell.w : cell.r;
  std::vector<Mark>& rest = write ? more.w : more.r;
  const Mark now{who.clock, who.comp, mask, who.line, who.strong};
  auto same = [&](const Mark& m) { return m.mask && m.comp == now.comp && m.clock == now.clock; };
  auto it = std::find_if(rest.begin(), rest.end(), same);
  if (same(first))
    first.mask |= mask;
  else if (it != rest.end())
    it->mask |= mask;
  else if (!first.mask)
    first = now;
  else
    rest.push_back(now);
  if (more.w.empty() && more.r.empty()) free_more_.push_back(cell.more), cell.more = 0;
}

void Race::shared(Cta& c, uint32_t off, uint32_t bytes, const Who& who, bool write) {
  if (!bytes) return;
  std::vector<Cell>& cells = smem_[c.rank];
  for (uint32_t end = off + bytes; off < end;) {
    const uint32_t lo = off & 15, n = std::min(16 - lo, end - off);
    touch(cells[off >> 4], who, (uint16_t)((kWhole >> (16 - n)) << lo), write, false, c, off >> 4);
    off += n;
  }
}

void Race::tensor(Cta& c, uint32_t col, uint32_t n, uint32_t halves, const Who& who, bool write) {
  std::vector<Cell>& cells = tmem_[c.rank];
  if (cells.empty()) cells.resize(kTmemCols * kHalves);
  for (uint32_t k = col * kHalves; k < (col + n) * kHalves; ++k)
    if (halves >> k % kHalves & 1) touch(cells[k], who, kWhole, write, true, c, k);
}

void Race::tensor_freed(Cta& c, uint32_t col, uint32_t n) {
  std::vector<Cell>& cells = tmem_[c.rank];
  for (uint32_t k = col * kHalves; k < (col + n) * kHalves && k < cells.size(); ++k) {
    if (cells[k].more) {
      more_[cells[k].more] = More();
      free_more_.push_back(cells[k].more);
    }
    cells[k] = Cell();
  }
}

// ---- edges
// ------------------------------------------------------------------------------------------------------------
void Race::tick(Warp& w, Agent a) {
  uint32_t t = ++own(w, a);
  if (a == Agent::Generic) of(w).k.seen[comp(w, a)] = t;
}

Snapshot Race::snapshot(const Warp& w, bool tensor) {
  WarpKnows& k = of(w);
  auto s = std::make_shared<Known>(k.k);
  if (tensor) {
    const uint16_t t = comp(w, Agent::Tensor);
    s->seen[t] = k.own[(int)Agent::Tensor]++;
    if (rules_.ptx) s->ordered[t] = s->seen[t];
  }
  k.k.seen[comp(w, Agent::Generic)] = ++k.own[0];
  return s;
}

void Race::release(Warp& w, Known& to) {
  to.join(of(w).k);
  tick(w, Agent::Generic);
}

void Race::acquire(Warp& w, const Known& from) { of(w).k.join(from); }

void Race::complete(Warp& w, Agent a, uint32_t clock) { raise(of(w).k.seen, comp(w, a), clock); }

void Race::registers_used(Warp& w, const std::vector<uint32_t>& slots) {
  WarpKnows& k = of(w);
  uint32_t stamp = 0;
  for (uint32_t s : slots)
    if (s < k.ld_stamp.size()) stamp = std::max(stamp, k.ld_stamp[s]);
  if (stamp <= get(k.k.seen, comp(w, Agent::TmemLd))) return;
  if (rules_.ptx)
    throw Fault("ptx", "uses a register of a tcgen05.ld that no tcgen05.wait::ld has followed");
  complete(w, Agent::TmemLd, stamp);
}

void Race::tmem_loaded(Warp& w, const std::vector<uint32_t>& slots) {
  WarpKnows& k = of(w);
  for (uint32_t s : slots) {
    if (s >= k.ld_stamp.size()) k.ld_stamp.resize(s + 1);
    k.ld_stamp[s] = own(w, Agent::TmemLd);
  }
  tick(w, Agent::TmemLd);
}

void Race::know(Known& k, Warp& w, Agent a) {
  raise(k.seen, comp(w, a), own(w, a));
  tick(w, a);
}

void Race::fence_proxy(Warp& w) {
  if (!rules_.proxy) return;
  WarpKnows& k = of(w);
  for (Agent a : {Agent::Generic, Agent::CpAsync}) k.k.fenced[comp(w, a)] = k.k.seen[comp(w, a)];
  k.self_fenced = k.k.seen;
  tick(w, Agent::Generic);  // later stores are not covered
}

void Race::fence_before(Warp& w) {
  if (!rules_.ptx) return;
  WarpKnows& k = of(w);
  for (Agent a : {Agent::TmemSt, Agent::TmemLd}) k.k.ordered[comp(w, a)] = k.k.seen[comp(w, a)];
}
void Race::fence_after(Warp& w) {
  if (rules_.ptx) of(w).after = of(w).k.ordered;
}

void Race::flag_released(Warp& w, uint64_t address) {
  const bool full = flags_.size() >= kMaxFlags && !flags_.count(address);
  release(w, full ? many_flags_ : flags_[address]);
}
void Race::flag_read(Warp& w, uint64_t address) {
  auto it = flags_.find(address);
  if (it != flags_.end()) acquire(w, it->second);
  if (!many_flags_.seen.empty()) acquire(w, many_flags_);
}

void Race::put(std::vector<Stamp>& list, Stamp s) {
  for (auto& o : list)
    if (o.comp == s.comp) return (void)(o = s);
  list.push_back(s);
}

void Race::remote(const Warp& w, const Cta& c, int line) {
  put(remote_[c.rank], {comp(w, Agent::Generic), own(w, Agent::Generic), line});
}

void Race::check_exit(const Cta& c) const {
  if (!rules_.race || remote_[c.rank].empty()) return;
  Known all;
  for (uint32_t i = 0; i < per_cta_; ++i) all.join(warp_[c.rank * per_cta_ + i].k);
  for (auto& s : remote_[c.rank])
    if (s.clock > get(all.seen, s.comp))
      throw Fault("exited", "CTA " + std::to_string(c.rank) +
                                " exits, and nothing orders that after the access to its shared "
                                "memory by " +
                                name(s.comp) + " (line " + std::to_string(s.line) + ")");
}

std::string Race::unfinished() const {
  Known all;
  for (auto& w : warp_) all.join(w.k);
  std::string bad;
  auto look = [&](const Mark& m, bool tmem, const Cta& c, uint32_t at) {
    const Agent a = m.comp < warps_ * kAgents ? (Agent)(m.comp % kAgents) : Agent::CpAsync;
    if (!m.mask || a == Agent::Generic || a == Agent::TmemLd || !bad.empty()) return;
    if (a == Agent::BulkRead && !rules_.ptx) return;  // CUTLASS and FlashAttention-4 exit so
    if (m.clock <= get(all.seen, m.comp)) return;
    bad = "exit with pending " + name(m.comp) + " (line " + std::to_string(m.line) + ") on " +
          place(tmem, c, at) + ": nobody waited for it\n";
  };
  for (auto& c : cl_.ctas)
    for (bool tmem : {false, true}) {
      auto& cells = (tmem ? tmem_ : smem_)[c->rank];
      for (uint32_t i = 0; i < cells.size(); ++i)
        look(cells[i].w, tmem, *c, i), look(cells[i].r, tmem, *c, i);
    }
  return bad;
}

// ---- mbarriers
// --------------------------------------------------------------------------------------------------------
Race::Mbar& Race::mbar(const Cta& c, uint32_t off) {
  const uint32_t key = c.rank << 24 | off;
  auto it = mbars_.find(key);
  if (it != mbars_.end()) return it->second;
  Mbar& b = mbars_[key];
  b.comp = (uint16_t)(warps_ * kAgents + mbar_at_.size());
  mbar_at_.push_back(key);
  return b;
}

void Race::mbar_init(Warp& w, Cta& c, uint32_t off, int line) {
  Mbar& b = mbar(c, off);
  b.acc.clear(), b.done.clear(), b.observers.clear();
  shared(c, off, 8, who(w, Agent::Generic, line, "mbarrier.init"), true);
}

void Race::mbar_arrive(const Cta& c, uint32_t off, const Known& from) {
  mbar(c, off).acc.join(from);
}

// A phase may end only after everybody who waited for the one before has seen that one end; else
// a late waiter takes the new phase for the old one.
void Race::mbar_phase(const Cta& c, uint32_t off) {
  Mbar& b = mbar(c, off);
  raise(b.acc.seen, b.comp, ++b.phases);
  b.done = b.acc;
  if (rules_.lap)
    for (auto& o : b.observers)
      if (get(b.acc.seen, o.comp) < o.clock)
        throw Fault("lap", "the mbarrier at " + hex(off) + " of CTA " + std::to_string(c.rank) +
                               " ends phase " + std::to_string(b.phases) +
                               ", and nothing orders that after the wait for the phase before by " +
                               name(o.comp) + " (line " + std::to_string(o.line) + ")");
  b.observers.clear();
}

void Race::mbar_used(Warp& w, Cta& c, uint32_t off, int line) {
  Who me = who(w, Agent::Generic, line, "use of an mbarrier");
  me.strong = true;
  shared(c, off, 8, me, false);
}

void Race::mbar_observed(Warp& w, Cta& c, uint32_t off, int line) {
  mbar_used(w, c, off, line);
  Mbar& b = mbar(c, off);
  acquire(w, b.done);
  put(b.observers, {comp(w, Agent::Generic), own(w, Agent::Generic), line});
}

}  // namespace flash_attn_mx::emu
