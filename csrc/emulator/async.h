// Asynchronous operations between issue and effect: their queues, and what a trace tells of them.
#pragma once

#include "memory.h"

namespace flash_attn_mx::emu {

// Hands an asynchronous operation over. Eager: it happens now. Otherwise it waits in its queue
// until the scheduler runs it: in `delayed` order only when no warp can go on without it, in
// `random` order at any time.
void submit(Exec& x, AsyncOp&& op);
void perform(Cluster& cl, AsyncOp& op);  // runs it now
// Shared memory that operations in the queues still read: by is 1 for a new one, -1 for one that leaves.
void count_reads(Cluster& cl, const AsyncOp& op, int by);
void trace_wait(Cluster& cl, const Warp& w, Group& g, const Instr& in);  // one that is over

}  // namespace flash_attn_mx::emu
