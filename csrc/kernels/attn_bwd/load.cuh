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
  RingState<C::kDeltaStages> delta;

  FAMX_DEVICE void run() {
    const int steps = work.steps();
    if (steps == 0) return;
    Step now = work.first();
    load_keys();
    load_rows(p.q, p.q_scale, now);
    load_stats(now);
    load_dout(now);
    load_columns(p.dout_col, p.dout_col_scale, now);
    for (int j = 1; j < steps; ++j) {
      const Step next = work.next(now);
      load_rows(p.q, p.q_scale, next);
      load_stats(next);
      load_columns(p.q_col, p.q_col_scale, now);
      load_dout(next);
      load_columns(p.dout_col, p.dout_col_scale, next);
      now = next;
    }
    load_columns(p.q_col, p.q_col_scale, now);
    // Every buffer released: no commit may arrive at a barrier of a CTA that has gone.
    for (int i = 0; i < C::kRingStages; ++i, ring.advance())
      ptx::mbarrier_wait(barrier_at(smem + C::kRingEmpty, ring.stage), ring.parity ^ 1);
  }

  // K, SFK, V of the own key tile; half of the channels of K', SFK' of both -> keys_full
  FAMX_DEVICE void load_keys() {
    const uint32_t full = smem + C::kKeysFull;
    ptx::mbarrier_arrive_expect_tx(full, 3 * C::kTileBytes + (1 + kPair) * kScaleAtomBytes);
    const auto tile = [&](uint32_t to, const TensorMapBytes& map, int column, int r) {
      ptx::tma_load_4d(smem + to, &map, full, column, work.k_start + work.pair_tile(r) * kTile,
                       work.key_head, p.cu_seqlens_k ? 0 : work.batch);
    };
    const auto atom = [&](uint32_t to, const uint8_t* scale, int r) {
      ptx::bulk_load(smem + to, scale + int64_t(work.k_atom(r)) * kScaleAtomBytes, kScaleAtomBytes,
                     full);
    };
    tile(C::kK, p.k, 0, work.rank);
    atom(C::kKScale, p.k_scale, work.rank);
    tile(C::kV, p.v_tok, 0, work.rank);
    for (int r = 0; r < kPair; ++r) {
      tile(C::kKt + r * C::kHalfBytes, p.k_col, work.rank * C::kHalfColumns, r);
      atom(C::kKtScale + r * kScaleAtomBytes, p.k_col_scale, r);
    }
  }

  // The CTA's half of the rows of a tile.
  FAMX_DEVICE uint32_t load_rows(const TensorMapBytes& map, const uint8_t* scale, Step s,
                                 uint32_t more = 0) {
    return load(map, scale, s, 0, work.rank * C::kHalfRows, more);
  }
  // The same of dO, and -delta of these rows.
  FAMX_DEVICE void load_dout(Step s) {
    const uint32_t full = load_rows(p.dout, p.dout_scale, s, C::kDeltaHalfBytes + kScaleAtomBytes);
    const uint8_t* from = p.delta + work.row_tile(p, s) * kLaunchDeltaBytes;
    ptx::bulk_load(smem + C::kDelta + delta.stage * C::kDeltaHalfBytes,
                   from + work.rank * C::kDeltaHalfBytes, C::kDeltaHalfBytes, full);
    ptx::bulk_load(smem + C::kDeltaScale + delta.stage * kScaleAtomBytes,
                   from + kPair * C::kDeltaHalfBytes, kScaleAtomBytes, full);
    delta.advance();
  }
  // Its half of the channels.
  FAMX_DEVICE void load_columns(const TensorMapBytes& map, const uint8_t* scale, Step s) {
    load(map, scale, s, work.rank * C::kHalfColumns, 0);
  }
  // ring_empty -> half a tile of 128 rows and the tile's scale atom -> ring_full, which is returned and expects more bytes
  FAMX_DEVICE uint32_t load(const TensorMapBytes& map, const uint8_t* scale, Step s, int column,
                            int row, uint32_t more = 0) {
    const uint32_t full = barrier_at(smem + C::kRingFull, ring.stage);
    ptx::mbarrier_wait(barrier_at(smem + C::kRingEmpty, ring.stage), ring.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, C::kHalfBytes + kScaleAtomBytes + more);
    ptx::tma_load_4d(smem + C::kRing + ring.stage * C::kHalfBytes, &map, full, column,
                     work.q_start + s.tile * kTile + row, work.head(s),
                     p.cu_seqlens_q ? 0 : work.batch);
    ptx::bulk_load(smem + C::kRingScale + ring.stage * kScaleAtomBytes,
                   scale + work.row_tile(p, s) * kScaleAtomBytes, kScaleAtomBytes, full);
    ring.advance();
    return full;
  }

  // stats_empty -> bias of 128 rows -> stats_full
  FAMX_DEVICE void load_stats(Step s) {
    const uint32_t full = barrier_at(smem + C::kStatsFull, stats.stage);
    ptx::mbarrier_wait(barrier_at(smem + C::kStatsEmpty, stats.stage), stats.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, C::kStatBytes);
    ptx::bulk_load(smem + C::kStats + stats.stage * C::kStatBytes,
                   p.bias + work.row_tile(p, s) * kTile, C::kStatBytes, full);
    stats.advance();
  }
};

}  // namespace flash_attn_mx::bwd
