#include "async.h"

namespace flash_attn_mx::emu {

namespace {

constexpr size_t kMaxQueued = 4096;  // operations in one queue

void trace_event(Cluster& cl, TraceEvent e, const Warp& w) {
  if (cl.trace.size() >= cl.m->opt.trace_events) return void(++cl.trace_dropped);
  e.cluster = cl.id, e.cta = w.cta->rank, e.warp = (uint16_t)w.id;
  e.end = cl.stat_insn;
  cl.trace.push_back(e);
}

void trace_async(Cluster& cl, const AsyncOp& op, TraceEvent::Kind kind) {
  TraceEvent e;
  e.kind = kind, e.agent = op.kind, e.in = op.in, e.begin = op.issued, e.bytes = op.bytes;
  trace_event(cl, e, *op.warp);
}

// What a kernel issues without ever waiting must not fill the host's memory: the oldest operation of
// a full queue happens, as hardware's queues are short as well.
template <class Queue>
void make_room(Cluster& cl, Queue& q) {
  if (q.size() < kMaxQueued) return;
  AsyncOp op = std::move(q.front());
  q.erase(q.begin());
  count_reads(cl, op, -1);
  try {
    perform(cl, op);
  } catch (const Fault& f) {
    throw Fault(f.check, "asynchronous " + op.origin + ": " + f.what());
  }
}

}  // namespace

size_t Cluster::pending() const {
  size_t n = dma.size();
  for (auto& c : ctas) {
    for (auto& q : c->tc) n += q.size();
    for (auto& w : c->warps) n += w->tmem_st.size();
  }
  for (auto& q : cpasync) n += q.size();
  return n;
}

void count_reads(Cluster& cl, const AsyncOp& op, int by) {
  if (op.reads.empty()) return;
  cl.pending_reads += by;
  for (auto& r : op.reads) {
    auto& n = cl.ctas[r.cta]->read_count;
    for (uint32_t g = r.lo >> 4; g < (r.hi + 15) >> 4; ++g) n[g] = (uint16_t)(n[g] + by);
  }
}

void trace_wait(Cluster& cl, const Warp& w, Group& g, const Instr& in) {
  TraceEvent e;
  e.why = g.waits.why, e.in = &in, e.begin = g.waits.since - 1, e.key = g.waits.key,
  e.want = g.waits.want;
  g.waits.since = 0;
  trace_event(cl, e, w);
}

void perform(Cluster& cl, AsyncOp& op) {
  op.run();
  if (cl.tracing) trace_async(cl, op, TraceEvent::Async);
}

void submit(Exec& x, AsyncOp&& op) {
  ++x.cl->events;
  op.in = x.in, op.warp = x.w, op.issued = x.cl->stat_insn;
  if (x.cl->tracing) trace_async(*x.cl, op, TraceEvent::Issue);
  if (x.m->opt.order == Order::Eager) return perform(*x.cl, op);
  count_reads(*x.cl, op, 1);
  switch (op.kind) {
    case AsyncOp::Tc:
      make_room(*x.cl, x.cta->tc[x.w->id]);
      x.cta->tc[x.w->id].push_back(std::move(op));
      break;
    case AsyncOp::Dma:
      make_room(*x.cl, x.cl->dma);
      x.cl->dma.push_back(std::move(op));
      break;
    case AsyncOp::CpAsync:
      make_room(*x.cl, x.cl->cpasync[x.cta->rank * x.cta->warps.size() + x.w->id]);
      x.cl->cpasync[x.cta->rank * x.cta->warps.size() + x.w->id].push_back(std::move(op));
      break;
    case AsyncOp::TmemSt:
      make_room(*x.cl, x.w->tmem_st);
      x.w->tmem_st.push_back(std::move(op));
      break;
  }
}

}  // namespace flash_attn_mx::emu
