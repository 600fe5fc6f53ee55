// The mma role: one warp, one issuing thread. Order: S(0), dP(0), dV(0); per step S(j+1), dK(j), dQ(j), dP(j+1), dV(j+1).
// tcgen05.cp and tcgen05.mma of one thread run in issue order, so that scales, P^T and dS^T may be overwritten by what is
// issued later (PTX ISA 9.7.16.6.2; for mma -> cp and mma -> mma of another shape this is what CUTLASS relies on too).
#pragma once

#include "attn_bwd/config.cuh"

namespace flash_attn_mx::bwd {

template <class C>
struct Mma {
  static constexpr auto kK = cute::UMMA::Major::K;
  static constexpr auto kMN = cute::UMMA::Major::MN;

  const AttnBwdParams& p;
  const Work& work;
  uint32_t smem;
  uint32_t tmem;
  bool leader;  // the issuing thread: commits cover what this thread issued
  RingState<C::kRingStages> ring;

  FAMX_DEVICE void run() {
    const int steps = work.steps();
    if (steps == 0) return;
    wait(C::kKeysFull, 0);
    if (work.keys() < kTile)
      clear_rows_behind<C::kHeadDim>(smem + C::kKt, smem + C::kKtScale, work.keys());
    Step now = work.first();
    make_s();
    make_dp(0);
    add_dv(now, 0);
    for (int j = 0; j < steps; ++j) {
      const bool more = j + 1 < steps;
      const Step next = work.next(now);
      if (more) {
        wait(C::kDPLoaded, j);
        make_s();
      }
      add_dk(now, j);
      if (more) wait(C::kSLoaded, j + 1);
      make_dq();
      if (more) {
        wait(C::kDQLoaded, j);
        make_dp(j + 1);
        add_dv(next, j + 1);
      }
      now = next;
    }
    commit(C::kSumsFull);
  }

  // All lanes together: one left behind could miss a phase.
  FAMX_DEVICE void wait(uint32_t barrier, uint32_t parity) {
    ptx::mbarrier_wait(smem + barrier, parity & 1);
    __syncwarp();
  }

  // Everything issued so far -> one arrival.
  FAMX_DEVICE void commit(uint32_t barrier) {
    if (leader) ptx::tcgen05_commit(smem + barrier);
  }

  // A filled slot of the ring.
  struct Slot {
    uint32_t stage, tile, scale;
  };
  FAMX_DEVICE Slot wait_slot() {
    const uint32_t stage = ring.stage;
    wait(barrier_at(C::kRingFull, stage), ring.parity);
    ring.advance();
    return {stage, smem + C::kRing + stage * C::kTileBytes,
            smem + C::kRingScale + stage * kScaleAtomBytes};
  }
  // The same, of a tile that is contracted along its rows.
  FAMX_DEVICE Slot wait_contracted_slot(Step s) {
    const Slot slot = wait_slot();
    if (work.rows(s) < kTile) clear_rows_behind<C::kHeadDim>(slot.tile, slot.scale, work.rows(s));
    return slot;
  }
  FAMX_DEVICE void release(const Slot& slot) { commit(C::kRingEmpty + 8 * slot.stage); }

  FAMX_DEVICE void copy_scales(uint32_t column, uint32_t atom) {
    ptx::tcgen05_cp_scales(tmem + column, scale_atom_descriptor(atom));
  }

  // Q -> S^T = K · Q^T -> s_full
  FAMX_DEVICE void make_s() {
    const Slot q = wait_slot();
    if (leader) {
      copy_scales(C::kSFK, smem + C::kKScale);
      copy_scales(C::kSFQ, q.scale);
      multiply_along_head(C::kS, smem + C::kK, q.tile, C::kSFK, C::kSFQ);
    }
    release(q);
    commit(C::kSFull);
  }

  // dO, s_loaded -> dP^T = V · dO^T -> dp_full. V's token scales are left to the compute role.
  FAMX_DEVICE void make_dp(int step) {
    const Slot dout = wait_slot();
    wait(C::kSLoaded, step);
    if (leader) {
      copy_scales(C::kSFV, smem + C::kOnes);
      copy_scales(C::kSFdO, dout.scale);
      multiply_along_head(C::kDP, smem + C::kV, dout.tile, C::kSFV, C::kSFdO);
    }
    release(dout);
    commit(C::kDPFull);
  }

  FAMX_DEVICE void multiply_along_head(uint32_t d, uint32_t a, uint32_t b, uint32_t sfa,
                                       uint32_t sfb) {
    ptx::tcgen05_fence_after();
    const uint64_t da = C::Tile::descriptor(a), db = C::Tile::descriptor(b);
    // Blocks of 32 behind head_dim are not multiplied: their scale bytes may hold anything.
    const int blocks = (p.head_dim + kMmaK - 1) / kMmaK;
#pragma unroll
    for (int k = 0; k < C::kHeadDim / kMmaK; ++k) {
      if (k >= blocks) break;
      MmaMxf8SS::fma(tmem + d, da + k * C::Tile::kStepAlongRow, db + k * C::Tile::kStepAlongRow,
                     mxf8_instruction<kTile, kK>(k), tmem + sfa, tmem + sfb, k > 0);
    }
  }

  // dO', p_full -> dV += P^T · dO'
  FAMX_DEVICE void add_dv(Step s, int step) {
    const Slot dout = wait_contracted_slot(s);
    wait(C::kPFull, step);
    if (leader) {
      copy_scales(C::kSFP, smem + C::kPScale);
      copy_scales(C::kSFdOt, dout.scale);
      multiply_along_queries(C::kDV, C::kS, dout.tile, C::kSFP, C::kSFdOt, step > 0);
    }
    release(dout);
  }

  // Q', ds_full -> dK += dS^T · Q'
  FAMX_DEVICE void add_dk(Step s, int step) {
    const Slot q = wait_contracted_slot(s);
    wait(C::kDSFull, step);
    if (leader) {
      copy_scales(C::kSFdSk, smem + C::kDsScaleByKey);
      copy_scales(C::kSFQt, q.scale);
      multiply_along_queries(C::kDK, C::kDP, q.tile, C::kSFdSk, C::kSFQt, step > 0);
    }
    release(q);
  }

  FAMX_DEVICE void multiply_along_queries(uint32_t d, uint32_t a, uint32_t b, uint32_t sfa,
                                          uint32_t sfb, bool add) {
    ptx::tcgen05_fence_after();
    const uint64_t db = C::Tile::descriptor(b);
#pragma unroll
    for (int k = 0; k < kTile / kMmaK; ++k)
      MmaMxf8TS::fma(tmem + d, tmem + a + C::payload_column(k), db + k * C::Tile::kStepAlongRows,
                     mxf8_instruction<C::kHeadDim, kMN>(k), tmem + sfa, tmem + sfb, add || k > 0);
  }

  // ds_full (waited for by add_dk) -> dQ = dS · K' -> dq_full. Both operands lie with the keys as rows.
  FAMX_DEVICE void make_dq() {
    if (leader && p.dq_acc) {
      ptx::tcgen05_fence_after();
      copy_scales(C::kSFdSq, smem + C::kDsScaleByQuery);
      copy_scales(C::kSFKt, smem + C::kKtScale);
      const uint64_t da = C::DsTile::descriptor(smem + C::kDs),
                     db = C::Tile::descriptor(smem + C::kKt);
#pragma unroll
      for (int k = 0; k < kTile / kMmaK; ++k)
        MmaMxf8SS::fma(tmem + C::kDQ, da + k * C::DsTile::kStepAlongRows,
                       db + k * C::Tile::kStepAlongRows, mxf8_instruction<C::kHeadDim, kMN, kMN>(k),
                       tmem + C::kSFdSq, tmem + C::kSFKt, k > 0);
    }
    commit(C::kDQFull);
  }
};

}  // namespace flash_attn_mx::bwd
