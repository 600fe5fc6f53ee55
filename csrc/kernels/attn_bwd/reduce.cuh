// The reduce role: 128 threads, one query row each: dQ of a step -> dq_acc. A thread adds 16 bytes at a time, a warp 512 in a
// row, straight from registers: through shared memory and a bulk reduction every byte of dQ would pass through it twice.
#pragma once

#include "attn_bwd/config.cuh"

namespace flash_attn_mx::bwd {

template <class C>
struct Reduce {
  static constexpr int kColumns = 32;  // in registers at once
  static constexpr int kNamedBarrier = 1;

  const AttnBwdParams& p;
  const Work& work;
  uint32_t smem;
  uint32_t tmem;  // of the warp's lanes
  int row;

  FAMX_DEVICE void run() {
    const int steps = work.steps();
    Step now = work.first();
    for (int j = 0; j < steps; ++j, now = work.next(now)) {
      ptx::mbarrier_wait(smem + C::kDQFull, j & 1);
      ptx::tcgen05_fence_after();  // written by the mma
      if (p.dq_acc && p.dq_turn) wait_turn(now);
      float* acc = p.dq_acc + work.row_tile(p, now) * (kTile * C::kHeadDim) + 4 * row;
#pragma unroll 1
      for (int column = 0; column < C::kHeadDim; column += kColumns) {
        uint32_t x[kColumns];
        if (p.dq_acc) {
          ptx::tmem_load_32(x, tmem + C::kDQ + column);
          ptx::tmem_wait_load();
          ptx::pin(x);
        }
        if (column + kColumns == C::kHeadDim) {
          ptx::tcgen05_fence_before();  // dP may overwrite dQ after this arrival
          __syncwarp();
          if ((threadIdx.x & 31) == 0) ptx::mbarrier_arrive(smem + C::kDQLoaded);
        }
        if (p.dq_acc) {
#pragma unroll
          for (int i = 0; i < kColumns; i += 4)
            ptx::add_global_v4(acc + (column + i) * kTile, __uint_as_float(x[i]), __uint_as_float(x[i + 1]),
                               __uint_as_float(x[i + 2]), __uint_as_float(x[i + 3]));
        }
      }
      if (p.dq_acc && p.dq_turn) pass_turn(now);
    }
  }

  // Key tiles add in ascending order, from the first one that the query tile sees.
  FAMX_DEVICE void wait_turn(Step s) {
    if (row == 0) {
      const int turn = work.key_tile - work.window.window.first(s.tile * kTile) / kTile;
      while (ptx::load_acquire(p.dq_turn + work.row_tile(p, s)) != turn) {
      }
    }
    ptx::named_barrier(kNamedBarrier, kReduceThreads);
  }
  FAMX_DEVICE void pass_turn(Step s) {
    __threadfence();  // this thread's sums, before the turn passes
    ptx::named_barrier(kNamedBarrier, kReduceThreads);
    if (row == 0) ptx::add_release(p.dq_turn + work.row_tile(p, s), 1);
  }
};

}  // namespace flash_attn_mx::bwd
