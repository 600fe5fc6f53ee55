// The mma role: one warp, one issuing thread. Order per step: QK0(n), PV0(n-1), QK1(n), PV1(n-1).
// tcgen05.cp and tcgen05.mma of one thread run in issue order, so that scales and P may be overwritten by what is issued
// later (PTX ISA 9.7.16.6.2; for mma -> cp and mma -> mma of another shape this is what CUTLASS relies on too).
#pragma once

#include "attn_fwd/config.cuh"
#include "common/ragged.cuh"

namespace flash_attn_mx::fwd {

template <class C>
struct Mma {
  const AttnFwdParams& p;
  uint32_t smem;
  uint32_t tmem;
  bool leader;  // the issuing thread: commits cover what this thread issued
  RingState<C::kKVStages> kv;
  RingState<C::kQStages> q;
  uint32_t step = 0;  // of all items: gives the parities of the per-step barriers

  FAMX_DEVICE void run() {
    for (int item = blockIdx.x; item < work_items(p); item += gridDim.x) {
      const Work work(p, item);
      const int steps = work.steps();
      if (steps == 0) continue;
      ptx::mbarrier_wait(barrier_at(smem + C::kQFull, q.stage), q.parity);
      bool live0 = false, live1 = false;  // O_i holds a product
      for (int n = 0; n <= steps; ++n) {
        __syncwarp();  // a lane left behind could miss a phase
        const bool has_qk = n < steps, has_pv = n > 0;
        const int qk_tile = work.key_tile(n), pv_tile = qk_tile + 1;
        VStages v;
        uint32_t k_stage = kv.stage;
        if (has_qk) {
          wait_kv();
          // Scales of QK0 go where S1(n-1) was.
          if (has_pv) ptx::mbarrier_wait(barrier_at(smem + C::kSLoaded, 1), (step - 1) & 1);
          issue_qk(work, 0, qk_tile, k_stage);
        }
        if (has_pv) {
          v = wait_v(work, pv_tile);
          issue_pv(work, 0, pv_tile, v, live0);
        }
        if (has_qk) {
          // Scales of QK1 go where S0(n) was.
          ptx::mbarrier_wait(barrier_at(smem + C::kSLoaded, 0), step & 1);
          issue_qk(work, 1, qk_tile, k_stage);
          release(barrier_at(smem + C::kKVEmpty, k_stage));
          if (n == steps - 1) release(barrier_at(smem + C::kQEmpty, q.stage));
        }
        if (has_pv) {
          issue_pv(work, 1, pv_tile, v, live1);
          if (v.has_col) release(barrier_at(smem + C::kKVEmpty, v.col));
          if (v.has_token) release(barrier_at(smem + C::kKVEmpty, v.token));
        }
        step += has_qk;
      }
      q.advance();
    }
  }

  struct VStages {
    uint32_t col = 0, token = 0;
    bool has_col = false, has_token = false;
  };

  // Everything issued so far -> one arrival.
  FAMX_DEVICE void release(uint32_t barrier) {
    if (leader) ptx::tcgen05_commit(barrier);
  }

  FAMX_DEVICE uint32_t wait_kv() {
    const uint32_t stage = kv.stage;
    ptx::mbarrier_wait(barrier_at(smem + C::kKVFull, stage), kv.parity);
    kv.advance();
    return stage;
  }

  FAMX_DEVICE VStages wait_v(const Work& work, int key_tile) {
    VStages v;
    v.has_col = work.wants_col(key_tile), v.has_token = work.wants_token(key_tile);
    if (v.has_col) v.col = wait_kv();
    if (v.has_token) v.token = wait_kv();
    const int keys = work.keys(key_tile);
    if (keys < kTile) {  // the sequence ends in this tile
      if (v.has_col) clear_behind_end(v.col, keys, true);
      if (v.has_token) clear_behind_end(v.token, keys, false);
      ptx::fence_proxy_async();  // the zeros, before tcgen05.mma and cp read them
      __syncwarp();
    }
    return v;
  }

  // Rows of V behind the end of the sequence become 0, scale bytes of blocks behind it 127: P is 0 there, and 0 * NaN
  // must not reach the tensor core. Rows are whole swizzle spans, so that the swizzle does not matter.
  FAMX_DEVICE void clear_behind_end(uint32_t stage, int keys, bool scales) {
    clear_payload_behind<C::kHeadDim>(smem + C::kKV + stage * C::kTileBytes, keys);
    if (scales) clear_scales_behind(smem + C::kKVScale + stage * kScaleAtomBytes, keys);
  }

  // S_i = Q_i · K^T -> s_full[i]
  FAMX_DEVICE void issue_qk(const Work& work, int i, int key_tile, uint32_t k_stage) {
    if (!leader) return;
    if (work.range(i).active(key_tile)) {
      ptx::tcgen05_fence_after();
      const uint32_t slot = q.stage * kTiles + i;
      const uint32_t sfq = tmem + C::region(i) + C::kSFQ, sfk = tmem + C::region(i) + C::kSFK;
      ptx::tcgen05_cp_scales(sfq,
                             scale_atom_descriptor(smem + C::kQScale + slot * kScaleAtomBytes));
      ptx::tcgen05_cp_scales(sfk,
                             scale_atom_descriptor(smem + C::kKVScale + k_stage * kScaleAtomBytes));
      uint64_t a = C::Tile::descriptor(smem + C::kQ + slot * C::kTileBytes);
      uint64_t b = C::Tile::descriptor(smem + C::kKV + k_stage * C::kTileBytes);
      const uint32_t d = tmem + C::s_column(i);
      constexpr auto kMajor = cute::UMMA::Major::K;
      const uint32_t negate = p.negate ? mxf8_instruction<kTile, kMajor>(0, true) ^
                                             mxf8_instruction<kTile, kMajor>(0, false)
                                       : 0;
      // Blocks of 32 behind head_dim are not multiplied: their scale bytes may hold anything.
      const int blocks = (p.head_dim + 31) / 32;
#pragma unroll
      for (int k = 0; k < C::kHeadDim / 32; ++k) {
        if (k >= blocks) break;
        MmaMxf8SS::fma(d, a + k * C::Tile::kStepAlongRow, b + k * C::Tile::kStepAlongRow,
                       mxf8_instruction<kTile, kMajor>(k) ^ negate, sfq, sfk, k > 0);
      }
    }
    ptx::tcgen05_commit(barrier_at(smem + C::kSFull, i));
  }

  // p_full[i] -> O_i += P_i · V -> pv_done[i]. The step of P is the one before the current.
  FAMX_DEVICE void issue_pv(const Work& work, int i, int key_tile, const VStages& v, bool& live) {
    ptx::mbarrier_wait(barrier_at(smem + C::kPFull, i), (step - 1) & 1);
    const bool active = work.range(i).active(key_tile);
    if (leader) {
      if (active) {
        ptx::tcgen05_fence_after();
        const bool full = work.range(i).full(key_tile);
        const uint32_t stage = full ? v.col : v.token;
        const uint32_t region = tmem + C::region(i);
        const uint32_t sfp = region + C::kSFP, sfv = region + C::kSFV;
        const uint32_t v_scale = full ? C::kKVScale + stage * kScaleAtomBytes : C::kOnes;
        ptx::tcgen05_cp_scales(sfp, scale_atom_descriptor(smem + C::kPScale + i * kScaleAtomBytes));
        ptx::tcgen05_cp_scales(sfv, scale_atom_descriptor(smem + v_scale));
        const uint64_t b = C::Tile::descriptor(smem + C::kKV + stage * C::kTileBytes);
        const uint32_t d = tmem + C::o_column(i);
#pragma unroll
        for (int k = 0; k < kTile / kMmaK; ++k)
          MmaMxf8TS::fma(
              d, region + C::kP + k * MmaMxf8TS::kStepColumns, b + k * C::Tile::kStepAlongRows,
              mxf8_instruction<C::kHeadDim, cute::UMMA::Major::MN>(k), sfp, sfv, live || k > 0);
      }
      ptx::tcgen05_commit(barrier_at(smem + C::kPVDone, i));
    }
    live |= active;
  }
};

}  // namespace flash_attn_mx::fwd
