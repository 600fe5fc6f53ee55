// mbarrier, cp.async and their meeting point.
#include "mbarrier.h"
#include "scheduler.h"

namespace flash_attn_mx::emu {

namespace {
constexpr uint64_t kReleased =
    2;  // in Group::want: the phase that this suspended wait asked for has ended

// The end of a phase wakes every wait that is suspended on it, even if the next phase ends before
// that warp runs again.
void wake_waiters(Cluster& cl, const Ref& ref) {
  const uint64_t key = (uint64_t)ref.cta->rank << 24 | ref.off;
  for (auto& w : ref.cta->warps)
    for (auto& g : w->groups)
      if (g.why == Why::Mbarrier && g.key == key) {
        if (g.want & kReleased && cl.m->opt.checks.lap)
          throw Fault("lap", "the mbarrier at " + hex(ref.off) + " of CTA " +
                                 std::to_string(ref.cta->rank) +
                                 " ends a second phase while warp " + std::to_string(w->id) +
                                 " has not yet seen the one that it waits for end");
        g.want |= kReleased, g.poll = nullptr;
      }
  ++cl.phase_flips;
  ++cl.events;
}
}  // namespace

uint64_t mbar_apply(Cluster& cl, const Ref& ref, const MbarChange& c, const Known* from) {
  Mbar b = Mbar::load(ref.p);
  auto at = [&] {
    return "mbarrier at " + hex(ref.off) + " of CTA " + std::to_string(ref.cta->rank);
  };
  if (!b.valid) throw Fault("mbarrier", at() + " is not initialised");
  const uint64_t before = b.word();
  int64_t tx = b.tx + c.expect_tx - c.complete_tx;
  if (tx > kMbarMax || tx < -kMbarMax)
    throw Fault("mbarrier", at() + ": tx-count " + std::to_string(tx) + " out of range");
  uint32_t n = c.arrive + c.drop;
  if (n > b.pending)
    throw Fault("mbarrier", at() + ": arrival of " + std::to_string(n) + " with " +
                                std::to_string(b.pending) + " pending of " +
                                std::to_string(b.expected) + " in phase " +
                                std::to_string(b.phase));
  if (cl.race && from) cl.race->mbar_arrive(*ref.cta, ref.off, *from);
  b.tx = (int32_t)tx;
  b.pending -= n;
  b.expected -= c.drop;
  if (b.pending == 0 && b.tx == 0) {
    b.phase = !b.phase;
    b.pending = b.expected;
    if (cl.race) cl.race->mbar_phase(*ref.cta, ref.off);
    wake_waiters(cl, ref);
  }
  b.store(ref.p);
  ++cl.events;
  return before;
}

namespace {

// What a warp's arrival on a barrier passes on; the lanes of an instruction share it.
Snapshot arrival(Exec& x, const Ref& ref) {
  if (!x.cl->race) return nullptr;
  x.cl->race->mbar_used(*x.w, *ref.cta, ref.off, x.in->line);
  if (ref.cta != x.cta) x.cl->race->remote(*x.w, *ref.cta, x.in->line);
  return x.cl->race->snapshot(*x.w, false);
}

Ref barrier_ref(Exec& x, const Operand& mem, int lane, Space s) {
  uint32_t a = shared_addr(x, mem, lane);
  if (a & 7) throw Fault("align", "mbarrier address " + hex(a) + " is not 8-byte aligned", lane);
  if (s != Space::SharedCluster && (a >> 24) != x.cta->rank)
    throw Fault("bounds",
                "mbarrier at " + hex(a) + " belongs to CTA rank " + std::to_string(a >> 24), lane);
  Ref r = shared_ref(*x.cl, a, 8, "mbarrier");
  if (r.cta != x.cta && !r.cta->live_warps)
    throw Fault("exited", "mbarrier at " + hex(a) + ", whose CTA has exited", lane);
  return r;
}

void do_init(Exec& x, const Instr& in, uint32_t mask) {
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = first_lane(m);
    Ref r = barrier_ref(x, in.op[0], l, Space::Shared);
    uint64_t n = src_lane(x, in.op[1], l);
    if (n < 1 || n > (uint64_t)kMbarMax)
      throw Fault("mbarrier", "mbarrier.init with count " + std::to_string(n), l);
    Mbar old = Mbar::load(r.p), b;
    if (r.cta->mbars.count(r.off) && old.valid && (old.pending != old.expected || old.tx))
      throw Fault("mbarrier",
                  "mbarrier.init of a barrier in use at " + hex(r.off) + ": pending " +
                      std::to_string(old.pending) + " of " + std::to_string(old.expected) +
                      ", tx " + std::to_string(old.tx),
                  l);
    b.pending = b.expected = (uint32_t)n;
    b.valid = true;
    b.store(r.p);
    mark_written(*r.cta, r.off, 8);
    if (x.cl->race) x.cl->race->mbar_init(*x.w, *r.cta, r.off, in.line);
    r.cta->mbars[r.off] = {in.line};
    ++x.cl->events;
  }
}

void do_inval(Exec& x, const Instr& in, uint32_t mask) {
  for (uint32_t m = mask; m; m &= m - 1) {
    Ref r = barrier_ref(x, in.op[0], first_lane(m), Space::Shared);
    std::memset(r.p, 0, 8);
    r.cta->mbars.erase(r.off);
  }
}

void do_tx(Exec& x, const Instr& in, uint32_t mask) {  // aux: space, complete
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = first_lane(m);
    MbarChange c;
    (in.aux[1] ? c.complete_tx : c.expect_tx) = (int64_t)(uint32_t)src_lane(x, in.op[1], l);
    Ref r = barrier_ref(x, in.op[0], l, (Space)in.aux[0]);
    mbar_apply(*x.cl, r, c, arrival(x, r).get());
  }
}

void do_arrive(Exec& x, const Instr& in,
               uint32_t mask) {  // aux: space, 1 expect_tx | 2 drop, has destination, has count
  const Operand& mem = in.op[in.aux[2]];
  uint64_t out[32] = {};
  Snapshot from;
  const uint8_t* last = nullptr;
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = first_lane(m);
    MbarChange c;
    uint32_t v = in.aux[3] ? (uint32_t)src_lane(x, in.op[in.aux[2] + 1], l) : 1, n = 1;
    if (in.aux[1] & 1)
      c.expect_tx = v;
    else
      n = v;
    if (n == 0) throw Fault("mbarrier", "arrival with count 0", l);
    (in.aux[1] & 2 ? c.drop : c.arrive) = n;
    Ref r = barrier_ref(x, mem, l, (Space)in.aux[0]);
    const bool again = r.p == last;
    if (!again) from = arrival(x, r), last = r.p;
    out[l] = mbar_apply(*x.cl, r, c, again ? nullptr : from.get());
  }
  if (in.aux[2]) put(x, in.op[0], out, mask);
}

// aux: parity form, space. A wait that cannot succeed yet suspends the warp; the scheduler lets it
// return false when nothing else can run, or at random, since try_wait and test_wait may both
// report "not yet".
void do_wait(Exec& x, const Instr& in, uint32_t mask) {
  uint32_t done = 0;
  const Ref* blocked = nullptr;
  std::vector<Ref> seen;
  Ref r;
  uint64_t want = 0;
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = first_lane(m);
    Ref q = barrier_ref(x, in.op[1], l, Space::Shared);
    Mbar b = Mbar::load(q.p);
    if (!b.valid)
      throw Fault("mbarrier",
                  "wait on the mbarrier at " + hex(q.off) + ", which is not initialised", l);
    uint64_t v = src_lane(x, in.op[2], l);
    bool old_phase = in.aux[0] ? (v & 1) : (v >> 63);
    const bool released =
        (x.g->want & kReleased) && x.g->key == ((uint64_t)q.cta->rank << 24 | q.off);
    if (b.phase != old_phase || released) {
      done |= 1u << l;
      if (seen.empty() || seen.back().p != q.p) seen.push_back(q);
    } else {
      r = q, blocked = &r, want = old_phase;
    }
  }
  if (blocked && !x.g->timed_out && !(x.m->opt.order == Order::Random && x.cl->random() % 4 == 0)) {
    x.block(Why::Mbarrier, (uint64_t)blocked->cta->rank << 24 | blocked->off, want,
            reinterpret_cast<const uint64_t*>(blocked->p), kMbarPhaseBit);
    return;
  }
  if (x.cl->race)
    for (auto& s : seen) x.cl->race->mbar_observed(*x.w, *s.cta, s.off, in.line);
  x.g->timed_out = false;
  x.g->want = 0;
  ++x.cl->stat_waits;
  put_pred(x, in.op[0], done, mask);
}

void do_pending(Exec& x, const Instr& in, uint32_t mask) {
  uint32_t out[32];
  for (int i = 0; i < 32; ++i) out[i] = (uint32_t)(src_lane(x, in.op[1], i) & kMbarMax);
  put(x, in.op[0], out, mask);
}

// ---- cp.async
// ---------------------------------------------------------------------------------------------------------
void do_cp_async(
    Exec& x, const Instr& in,
    uint32_t mask) {  // aux: bytes, index of src-size or ignore-src operand (0 none), is predicate
  struct Copy {
    Ref dst;
    const uint8_t* src;
    uint32_t n;
  };
  std::vector<Copy> copies;
  std::vector<std::shared_ptr<int>> counts;
  const uint32_t bytes = in.aux[0];
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = first_lane(m);
    Copy c;
    uint64_t d = address_of(x, in.op[0], l), s = address_of(x, in.op[1], l);
    if (d & (bytes - 1) || s & (bytes - 1))
      throw Fault("align",
                  "cp.async addresses " + hex(d) + ", " + hex(s) + " are not aligned to " +
                      std::to_string(bytes),
                  l);
    c.dst = shared_ref(*x.cl, (uint32_t)d, bytes, "cp.async");
    c.n = bytes;
    if (in.aux[1]) {
      if (in.aux[2])
        c.n = pred(x, in.op[in.aux[1]]) >> l & 1 ? 0 : bytes;
      else
        c.n = (uint32_t)src_lane(x, in.op[in.aux[1]], l);
      if (c.n > bytes)
        throw Fault("bounds",
                    "cp.async src-size " + std::to_string(c.n) + " exceeds cp-size " +
                        std::to_string(bytes),
                    l);
    }
    c.src = c.n ? resolve(x, Space::Global, s, c.n, Access::Read, l, 1).p : nullptr;
    if (x.cl->pending_reads) check_no_pending_read(*x.cl, *c.dst.cta, c.dst.off, bytes, "cp.async");
    if (x.cl->race)
      x.cl->race->shared(*c.dst.cta, c.dst.off, bytes,
                         x.cl->race->who(*x.w, Agent::CpAsync, in.line, "cp.async"), true);
    copies.push_back(c);
    auto& g = x.w->cpasync[l];
    ++*g.open;
    counts.push_back(g.open);
  }
  AsyncOp op;
  op.kind = AsyncOp::CpAsync;
  op.origin = where(x);
  op.bytes = (uint32_t)copies.size() * bytes;
  op.run = [copies, counts, bytes] {
    for (auto& c : copies) {
      std::memset(c.dst.p, 0, bytes);
      if (c.n) std::memcpy(c.dst.p, c.src, c.n);
      mark_written(*c.dst.cta, c.dst.off, bytes);
    }
    for (auto& n : counts) --*n;
  };
  submit(x, std::move(op));
}

void do_cp_async_group(Exec& x, const Instr& in,
                       uint32_t mask) {  // aux: 0 commit, 1 wait_group, 2 wait_all; N
  Race* const race = x.cl->race.get();
  const uint32_t stamp = race ? race->own(*x.w, Agent::CpAsync) : 0;
  for (uint32_t m = mask; m; m &= m - 1) {
    int l = first_lane(m);
    auto& g = x.w->cpasync[l];
    while (!g.committed.empty() && *g.committed.front() == 0) g.committed.pop_front();
    if (in.aux[0] == 0) {
      g.committed.push_back(g.open);
      if (race) g.stamp(stamp);
      g.open = std::make_shared<int>(0);
      continue;
    }
    size_t keep = in.aux[0] == 2 ? 0 : in.aux[1];
    if (g.committed.size() > keep || (in.aux[0] == 2 && *g.open))
      return x.block(Why::CpAsync, (uint64_t)l, keep);
    const uint32_t over = g.covered(keep);
    if (race) race->complete(*x.w, Agent::CpAsync, in.aux[0] == 2 ? stamp : over);
  }
  if (race && in.aux[0] != 1) race->tick(*x.w, Agent::CpAsync);
}

void do_cp_async_mbarrier(Exec& x, const Instr& in, uint32_t mask) {  // aux: noinc
  std::vector<Ref> refs;
  for (uint32_t m = mask; m; m &= m - 1) {
    Ref r = barrier_ref(x, in.op[0], first_lane(m), Space::Shared);
    if (!in.aux[0]) {
      Mbar b = Mbar::load(r.p);
      if (!b.valid)
        throw Fault("mbarrier",
                    "cp.async.mbarrier.arrive on an uninitialised barrier at " + hex(r.off));
      if (++b.pending > kMbarMax)
        throw Fault("mbarrier", "pending count of the barrier at " + hex(r.off) + " overflows");
      b.store(r.p);
    }
    refs.push_back(r);
  }
  Snapshot from;
  if (Race* race = x.cl->race.get()) {
    auto k = std::make_shared<Known>(*race->snapshot(*x.w, false));
    race->know(*k, *x.w, Agent::CpAsync);  // every copy so far
    from = k;
  }
  AsyncOp op;
  op.kind = AsyncOp::CpAsync;
  op.origin = where(x);
  op.run = [cl = x.cl, refs, from] {
    for (auto& r : refs) {
      MbarChange c;
      c.arrive = 1;
      mbar_apply(*cl, r, c, from.get());
    }
  };
  submit(x, std::move(op));
}

}  // namespace

ExecFn mbar_init(Decode& d) {
  d.want(2, 2), d.mem(0), d.data(1);
  return &do_init;
}
ExecFn mbar_inval(Decode& d) {
  d.want(1, 1), d.mem(0);
  return &do_inval;
}
ExecFn mbar_tx(Decode& d) {
  d.want(2, 2), d.mem(0), d.data(1);
  d.in.aux[0] = (uint32_t)space_of(d);
  d.in.aux[1] = d.has("complete_tx");
  return &do_tx;
}
ExecFn mbar_arrive(Decode& d) {
  d.want(1, 3);
  bool dst = d.ops[0].kind != Operand::Mem;
  if (dst) d.dst(0);
  d.mem(dst ? 1 : 0);
  size_t n = dst ? 2 : 1;
  d.in.aux[0] = (uint32_t)space_of(d);
  d.in.aux[1] = (d.has("expect_tx") ? 1 : 0) | (d.mods[1] == "arrive_drop" ? 2 : 0);
  d.in.aux[2] = dst;
  d.in.aux[3] = d.ops.size() > n;
  if (d.ops.size() > n) d.data(n);
  if ((d.in.aux[1] & 1) && !d.in.aux[3]) d.fail("expect_tx needs a byte count");
  return &do_arrive;
}
ExecFn mbar_wait(Decode& d) {
  d.want(3, 4), d.pred_op(0), d.mem(1), d.data(2);
  d.in.aux[0] = d.has("parity");
  return &do_wait;
}
ExecFn mbar_pending(Decode& d) {
  d.want(2, 2), d.dst(0), d.data(1);
  return &do_pending;
}
ExecFn cp_async(Decode& d) {
  d.want(3, 5), d.mem(0), d.mem(1);
  if (d.ops[2].kind != Operand::Const) d.fail("cp-size must be a constant");
  uint32_t n = (uint32_t)d.ops[2].imm;
  if (n != 16 && !(d.has("ca") && (n == 4 || n == 8)))
    d.fail("cp-size must be 16, or 4 or 8 with .ca");
  d.in.aux[0] = n;
  bool policy = d.has("L2::cache_hint");
  if (d.ops.size() > (policy ? 4u : 3u)) {
    d.value(3);
    d.in.aux[1] = 3;
    d.in.aux[2] = d.ops[3].kind == Operand::Reg && d.ops[3].width == 0;
  }
  return &do_cp_async;
}
ExecFn cp_async_group(Decode& d) {
  d.in.aux[0] = d.has("commit_group") ? 0 : d.has("wait_group") ? 1 : 2;
  d.want(d.in.aux[0] == 1, d.in.aux[0] == 1);
  if (d.in.aux[0] == 1) {
    if (d.ops[0].kind != Operand::Const) d.fail("N must be a constant");
    d.in.aux[1] = (uint32_t)d.ops[0].imm;
  }
  return &do_cp_async_group;
}
ExecFn cp_async_mbarrier(Decode& d) {
  d.want(1, 1), d.mem(0);
  d.in.aux[0] = d.has("noinc");
  return &do_cp_async_mbarrier;
}

}  // namespace flash_attn_mx::emu
