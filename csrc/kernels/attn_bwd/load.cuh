// The load role: one thread fills keys once, then the ring in the order in which the mma role consumes it:
// Q(0), dO(0), dO'(0), then Q(j+1), Q'(j), dO(j+1), dO'(j+1) for every step, at last Q'(N-1).
#pragma once

#include "attn_bwd/config.cuh"

namespace flash_attn_mx::bwd {

template <class C>
struct Loader {
  const AttnBwdParams& p;
  const Work& work;
  uint32_t smem;
  RingState<C::kRingStages> ring;
  RingState<C::kStatsStages> stats;

  FAMX_DEVICE void run() {
    const int steps = work.steps();
    if (steps == 0) return;
    Step now = work.first();
    load_keys();
    load_rows(p.q, p.q_scale, now);
    load_stats(now);
    load_rows(p.dout, p.dout_scale, now);
    load_rows(p.dout_col, p.dout_col_scale, now);
    for (int j = 1; j < steps; ++j) {
      const Step next = work.next(now);
      load_rows(p.q, p.q_scale, next);
      load_stats(next);
      load_rows(p.q_col, p.q_col_scale, now);
      load_rows(p.dout, p.dout_scale, next);
      load_rows(p.dout_col, p.dout_col_scale, next);
      now = next;
    }
    load_rows(p.q_col, p.q_col_scale, now);
    // Every buffer released: no commit may arrive at a barrier of a CTA that has gone.
    for (int i = 0; i < C::kRingStages; ++i, ring.advance())
      ptx::mbarrier_wait(barrier_at(smem + C::kRingEmpty, ring.stage), ring.parity ^ 1);
  }

  // K, SFK, K', SFK', V -> keys_full
  FAMX_DEVICE void load_keys() {
    const uint32_t full = smem + C::kKeysFull;
    ptx::mbarrier_arrive_expect_tx(full, 3 * C::kTileBytes + 2 * kScaleAtomBytes);
    const auto tile = [&](uint32_t to, const TensorMapBytes& map) {
      ptx::tma_load_4d(smem + to, &map, full, 0, work.k_start + work.key_tile * kTile,
                       work.key_head, p.cu_seqlens_k ? 0 : work.batch);
    };
    const auto atom = [&](uint32_t to, const uint8_t* scale) {
      ptx::bulk_load(smem + to, scale + int64_t(work.k_atom) * kScaleAtomBytes, kScaleAtomBytes,
                     full);
    };
    tile(C::kK, p.k);
    atom(C::kKScale, p.k_scale);
    tile(C::kV, p.v_tok);
    tile(C::kKt, p.k_col);
    atom(C::kKtScale, p.k_col_scale);
  }

  // ring_empty -> one tile of 128 rows and its scale atom -> ring_full
  FAMX_DEVICE void load_rows(const TensorMapBytes& map, const uint8_t* scale, Step s) {
    const uint32_t full = barrier_at(smem + C::kRingFull, ring.stage);
    ptx::mbarrier_wait(barrier_at(smem + C::kRingEmpty, ring.stage), ring.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, C::kTileBytes + kScaleAtomBytes);
    ptx::tma_load_4d(smem + C::kRing + ring.stage * C::kTileBytes, &map, full, 0,
                     work.q_start + s.tile * kTile, work.head(s), p.cu_seqlens_q ? 0 : work.batch);
    ptx::bulk_load(smem + C::kRingScale + ring.stage * kScaleAtomBytes,
                   scale + work.row_tile(p, s) * kScaleAtomBytes, kScaleAtomBytes, full);
    ring.advance();
  }

  // stats_empty -> bias, -delta of 128 rows -> stats_full
  FAMX_DEVICE void load_stats(Step s) {
    const uint32_t full = barrier_at(smem + C::kStatsFull, stats.stage);
    ptx::mbarrier_wait(barrier_at(smem + C::kStatsEmpty, stats.stage), stats.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, 2 * C::kStatBytes);
    const uint32_t to = smem + C::kStats + stats.stage * 2 * C::kStatBytes;
    const int64_t row = work.row_tile(p, s) * kTile;
    ptx::bulk_load(to, p.bias + row, C::kStatBytes, full);
    ptx::bulk_load(to + C::kStatBytes, p.minus_delta + row, C::kStatBytes, full);
    stats.advance();
  }
};

}  // namespace flash_attn_mx::bwd
