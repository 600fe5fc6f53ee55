// The load role: one thread fills q and the kv ring, in the order in which the mma role consumes them:
// K(0), then K(n), V(n-1) for every step, at last V(N-1). V is the colwise copy, the tokenwise one, or both.
#pragma once

#include "attn_fwd/config.cuh"

namespace flash_attn_mx::fwd {

template <class C>
struct Loader {
  const AttnFwdParams& p;
  uint32_t smem;
  RingState<C::kKVStages> kv;
  RingState<C::kQStages> q;

  FAMX_DEVICE void run() {
    for (int item = blockIdx.x; item < work_items(p); item += gridDim.x) {
      const Work work(p, item);
      const int steps = work.steps();
      if (steps == 0) continue;
      load_q(work);
      load_k(work, work.key_tile(0));
      for (int n = 1; n < steps; ++n) {
        load_k(work, work.key_tile(n));
        load_v(work, work.key_tile(n - 1));
      }
      load_v(work, work.key_tile(steps - 1));
    }
    drain();
  }

  // Every buffer released: no commit may arrive at a barrier of a CTA that has gone.
  FAMX_DEVICE void drain() {
    for (int i = 0; i < C::kKVStages; ++i, kv.advance())
      ptx::mbarrier_wait(barrier_at(smem + C::kKVEmpty, kv.stage), kv.parity ^ 1);
    for (int i = 0; i < C::kQStages; ++i, q.advance())
      ptx::mbarrier_wait(barrier_at(smem + C::kQEmpty, q.stage), q.parity ^ 1);
  }

  // q_empty -> Q, SFQ of the query tiles that see a key -> q_full
  FAMX_DEVICE void load_q(const Work& work) {
    const uint32_t full = barrier_at(smem + C::kQFull, q.stage);
    ptx::mbarrier_wait(barrier_at(smem + C::kQEmpty, q.stage), q.parity ^ 1);
    const int tiles = !work.range0.empty() + !work.range1.empty();
    ptx::mbarrier_arrive_expect_tx(full, tiles * (C::kTileBytes + kScaleAtomBytes));
    for (int i = 0; i < kTiles; ++i) {
      if (work.range(i).empty()) continue;
      const int slot = q.stage * kTiles + i;
      ptx::tma_load_4d(smem + C::kQ + slot * C::kTileBytes, &p.q, full, 0,
                       work.q_start + work.row + i * kTile, work.head,
                       p.cu_seqlens_q ? 0 : work.batch);
      const int64_t atom = work.q_atom + work.row / kTile + i;
      ptx::bulk_load(smem + C::kQScale + slot * kScaleAtomBytes, p.q_scale + atom * kScaleAtomBytes,
                     kScaleAtomBytes, full);
    }
    q.advance();
  }

  FAMX_DEVICE void load_k(const Work& work, int key_tile) {
    load_keys(work, key_tile, &p.k, p.k_scale);
  }

  FAMX_DEVICE void load_v(const Work& work, int key_tile) {
    if (work.wants_col(key_tile)) load_keys(work, key_tile, &p.v, p.v_scale);
    // The scales of tokenwise V are not block scales: the softmax role reads them and folds them into P.
    if (work.wants_token(key_tile)) load_keys(work, key_tile, &p.v_tok, nullptr);
  }

  // kv_empty -> one tile of 128 keys, and its scale atom if it has one -> kv_full
  FAMX_DEVICE void load_keys(const Work& work, int key_tile, const void* map,
                             const uint8_t* scale) {
    const uint32_t full = barrier_at(smem + C::kKVFull, kv.stage);
    ptx::mbarrier_wait(barrier_at(smem + C::kKVEmpty, kv.stage), kv.parity ^ 1);
    ptx::mbarrier_arrive_expect_tx(full, C::kTileBytes + (scale ? kScaleAtomBytes : 0));
    ptx::tma_load_4d(smem + C::kKV + kv.stage * C::kTileBytes, map, full, 0,
                     work.k_start + key_tile * kTile, work.head / p.heads_per_kv,
                     p.cu_seqlens_k ? 0 : work.batch);
    if (scale) {
      const int64_t atom = work.k_atom + key_tile;
      ptx::bulk_load(smem + C::kKVScale + kv.stage * kScaleAtomBytes,
                     scale + atom * kScaleAtomBytes, kScaleAtomBytes, full);
    }
    kv.advance();
  }
};

}  // namespace flash_attn_mx::fwd
