// The reduce role: four warps, each with 32 query rows of its own: dQ of a step -> SMEM -> dq_acc, 32 channels at a time.
// The copies add in the L2. Adding straight from registers (red.global.add.v4.f32) is as fast but takes 1400 instead of
// 1215 cycles of the shared-memory pipe per 64 KB (H200, 2026-11, benchmarks/bench_dq_reduction.cu).
#pragma once

#include "attn_bwd/config.cuh"

namespace flash_attn_mx::bwd {

template <class C>
struct Reduce {
  static constexpr uint32_t kChunkBytes = C::kChunk * 32 * sizeof(float);
  static_assert(C::kChunk == 32, "one tcgen05.ld");

  const AttnBwdParams& p;
  const Work& work;
  uint32_t smem;
  uint32_t tmem;  // of the warp's lanes
  int warp;       // of the role: 0..3
  uint32_t stage = 0;

  FAMX_DEVICE void run() {
    if (!p.dq_acc) return;
    const int steps = work.steps();
    Step now = work.first(), mine{};
    bool have = false;  // a step whose slot is this CTA's since the last dQ
    uint32_t parity = 0;
    for (int j = 0; j < steps; ++j, now = work.next(now)) {
      if (work.slot(now.tile) == work.rank) mine = now, have = true;
      if (!work.closes(now.tile)) continue;
      ptx::mbarrier_wait(smem + C::kDQFull, parity);
      parity ^= 1;
      if (have) {
        reduce(mine);
      } else {
        loaded();
      }
      have = false;
    }
    if (leader()) ptx::bulk_wait_written();
  }

  // dQ -> dq_loaded, dq_acc. What the staging buffers do not hold waits in registers: the products that need the columns do
  // not wait for the L2, which takes 64 KB in 4000 cycles.
  FAMX_DEVICE void reduce(Step s) {
    constexpr int kChunks = C::kHeadDim / C::kChunk,
                  kStaged = kChunks < C::kDQStages ? kChunks : C::kDQStages;
    constexpr int kHeld = kChunks - kStaged;
    ptx::tcgen05_fence_after();  // written by the mma
    const int64_t row_tile = work.row_tile(p, s);
    if (p.dq_turn) wait_turn(row_tile, s);
    float* sums = p.dq_acc + (row_tile * kTile + warp * 32) * C::kHeadDim;
#pragma unroll
    for (int c = 0; c < kStaged; ++c) {
      uint32_t x[1][C::kChunk];
      load(x, c, kHeld == 0 && c + 1 == kStaged);
      add(sums + c * C::kChunk * 32, x[0]);
    }
    if constexpr (kHeld > 0) {
      uint32_t x[kHeld][C::kChunk];
      load(x, kStaged, true);
#pragma unroll
      for (int h = 0; h < kHeld; ++h) add(sums + (kStaged + h) * C::kChunk * 32, x[h]);
    }
    if (p.dq_turn) pass_turn(row_tile);
  }

  // Lots of channels from `first` on; last: -> dq_loaded
  template <int kCount>
  FAMX_DEVICE void load(uint32_t (&x)[kCount][C::kChunk], int first, bool last) {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      ptx::tmem_load_32(x[i], tmem + C::kDQ + (first + i) * C::kChunk);
    ptx::tmem_wait_load();
#pragma unroll
    for (int i = 0; i < kCount; ++i) ptx::pin(x[i]);
    if (!last) return;
    ptx::tcgen05_fence_before();  // dP may overwrite dQ after this arrival
    loaded();
  }

  FAMX_DEVICE void loaded() {
    __syncwarp();
    if (leader()) ptx::mbarrier_arrive_cluster(ptx::of_cta(smem + C::kDQLoaded, 0));
  }

  FAMX_DEVICE bool leader() const { return (threadIdx.x & 31) == 0; }

  // 32 channels of the warp's rows, in SMEM as in dq_acc: [channel / 4][row][4]
  FAMX_DEVICE void add(float* sums, const uint32_t (&x)[C::kChunk]) {
    const uint32_t buffer = smem + C::kDQStage + (warp * C::kDQStages + stage) * kChunkBytes;
    if (leader()) ptx::bulk_wait_read<C::kDQStages - 1>();
    __syncwarp();  // the copy that used this buffer has read it
#pragma unroll
    for (int i = 0; i < C::kChunk; i += 4)
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(
                       buffer + (i / 4 * 32 + (threadIdx.x & 31)) * 16),
                   "r"(x[i]), "r"(x[i + 1]), "r"(x[i + 2]), "r"(x[i + 3])
                   : "memory");
    ptx::fence_proxy_async();  // the copy reads what the warp wrote
    __syncwarp();
    if (leader()) {
      ptx::bulk_add_f32(sums, buffer, kChunkBytes);
      ptx::bulk_commit_group();
    }
    stage = (stage + 1) % C::kDQStages;
  }

  // Pairs of key tiles add in ascending order, from the first one that the query tile sees; each of the four warps counts.
  FAMX_DEVICE void wait_turn(int64_t row_tile, Step s) {
    if (leader()) {
      const int first_key = work.window.window.first(s.tile * kTile);
      const int turn = work.key_tile / kPair - first_key / (kPair * kTile);
      while (ptx::load_acquire(p.dq_turn + row_tile) < turn * kReduceWarps) {
      }
    }
    __syncwarp();
  }
  FAMX_DEVICE void pass_turn(int64_t row_tile) {
    if (leader()) {
      ptx::bulk_wait_written();
      __threadfence();  // the sums, before the turn passes
      ptx::add_release(p.dq_turn + row_tile, 1);
    }
  }
};

}  // namespace flash_attn_mx::bwd
