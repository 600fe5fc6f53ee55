// The mma role: one warp of each CTA; one thread of CTA 0 issues for both. Order: S(0), dP(0), dV(0); per step S(j+1),
// dK(j), dQ of the steps before if that is due, dP(j+1), dV(j+1); at the end the last dQ. tcgen05.cp and tcgen05.mma of one thread run in issue order, so that scales, P^T
// and dS^T may be overwritten by what is issued later (PTX ISA 9.7.16.6.2; for mma -> cp and mma -> mma of another shape
// this is what CUTLASS relies on too). In CTA 1 the same code only passes on that its buffers are full.
#pragma once

#include "attn_bwd/config.cuh"

namespace flash_attn_mx::bwd {

template <class C>
struct Mma {
  static constexpr auto kK = cute::UMMA::Major::K;
  static constexpr auto kMN = cute::UMMA::Major::MN;
  static constexpr int kM = kPair * kMmaM;

  const AttnBwdParams& p;
  const Work& work;
  uint32_t smem;
  uint32_t tmem;
  bool elected;  // one thread of the warp
  bool issues;   // the issuing thread: commits cover what this thread issued
  RingState<C::kRingStages> ring{};
  uint32_t closed = 0, dqs = 0,
           dqs_of_two = 0;  // dQ whose steps are done, issued ones, those of two steps

  FAMX_DEVICE Mma(const AttnBwdParams& p, const Work& work, uint32_t smem, uint32_t tmem)
      : p(p),
        work(work),
        smem(smem),
        tmem(tmem),
        elected(ptx::elect_one()),
        issues(elected && work.rank == 0) {}

  FAMX_DEVICE void run() {
    const int steps = work.steps();
    if (steps == 0) return;
    wait_keys();
    Step now = work.first();
    make_s(now);
    make_dp(now, 0);
    add_dv(now, 0);
    int ready = -1;  // the last tile of a dQ that has not been issued
    for (int j = 0; j < steps; ++j) {
      const bool more = j + 1 < steps, dq = ready >= 0;
      const Step next = work.next(now);
      if (more) {
        wait(C::kDPLoaded, j);
        make_s(next);
      }
      add_dk(now, j);
      if (dq) {
        if (more) wait(C::kSLoaded, j + 1);
        make_dq(ready);
        ready = -1;
      }
      if (p.dq_acc && work.closes(now.tile)) {
        wait(C::kExchanged, closed++);  // of the step before; if this one has slot 0, of this
        ready = now.tile;
      }
      if (more) {
        if (dq) wait(C::kDQLoaded, dqs - 1);
        make_dp(next, j + 1);
        add_dv(next, j + 1);
      }
      now = next;
    }
    commit(C::kSumsFull);
    if (elected) ptx::mbarrier_arrive(smem + C::kSumsFull);  // poison is written
    if (ready >= 0) {
      if (dqs > 0) wait(C::kDQLoaded, dqs - 1);
      make_dq(ready);
    }
  }

  // All lanes together: one left behind could miss a phase. The fence: every tcgen05 instruction after it, the copies of
  // scales too, comes after what the arrivals stand for.
  FAMX_DEVICE void wait(uint32_t barrier, uint32_t parity) {
    if (work.rank != 0) return;
    ptx::mbarrier_wait(smem + barrier, parity & 1);
    __syncwarp();
    ptx::tcgen05_fence_after();
  }

  // Everything issued so far -> one arrival in both CTAs.
  FAMX_DEVICE void commit(uint32_t barrier) {
    if (issues) ptx::tcgen05_commit_pair(smem + barrier);
  }

  // A barrier of this CTA's loads; CTA 0's completes when CTA 1 has said the same. `clear` is done in between.
  template <class Clear>
  FAMX_DEVICE void wait_loaded(uint32_t barrier, uint32_t parity, Clear clear) {
    ptx::mbarrier_wait(smem + barrier, parity);
    __syncwarp();
    clear();
    if (elected && work.rank != 0) ptx::mbarrier_arrive_cluster(ptx::of_cta(smem + barrier, 0));
  }

  FAMX_DEVICE void wait_keys() {
    wait_loaded(C::kKeysFull, 0, [&] {
      for (int r = 0; r < kPair; ++r)
        if (work.keys(r) < kTile)
          clear_rows_behind<C::kHalfColumns>(smem + C::kKt + r * C::kHalfBytes,
                                             smem + C::kKtScale + r * kScaleAtomBytes,
                                             work.keys(r));
    });
  }

  // A filled slot of the ring.
  struct Slot {
    uint32_t stage, tile, scale;
  };
  // contracted: of a product that adds to dV (0) or dK (1) along the rows; none: -1. Rows that do not exist are cleared,
  // and if only one key tile sees the queries, NaN are kept from the other.
  FAMX_DEVICE Slot wait_slot(Step s, int contracted) {
    const uint32_t stage = ring.stage;
    const Slot slot{stage, smem + C::kRing + stage * C::kHalfBytes,
                    smem + C::kRingScale + stage * kScaleAtomBytes};
    wait_loaded(barrier_at(C::kRingFull, stage), ring.parity, [&] {
      if (contracted < 0) return;
      if (work.rows(s) < kTile)
        clear_rows_behind<C::kHalfColumns>(slot.tile, slot.scale, work.rows(s));
      if (const int seen = work.key_tiles(s.tile); seen != 3) {
        const int first = work.rank * C::kHalfColumns;
        uint32_t poison[kTile / 32];
        if (take_poison<C::kHalfColumns>(slot.tile, slot.scale, first, p.head_dim, poison) &&
            seen >> work.rank & 1)
          keep_poison(contracted, poison);
      }
    });
    ring.advance();
    return slot;
  }
  // Channels of dV or dK that are NaN in this CTA, as its keys see the queries.
  FAMX_DEVICE void keep_poison(int sum, const uint32_t (&poison)[kTile / 32]) {
    if (!elected) return;
#pragma unroll
    for (int i = 0; i < kTile / 32; ++i)
      asm volatile("red.shared.or.b32 [%0], %1;" ::"r"(smem + C::kPoison + sum * kTile / 8 + 4 * i),
                   "r"(poison[i])
                   : "memory");
  }
  FAMX_DEVICE void release(const Slot& slot) { commit(C::kRingEmpty + 8 * slot.stage); }

  FAMX_DEVICE void copy_scales(uint32_t column, uint32_t atom) {
    ptx::tcgen05_cp_scales<kPair>(tmem + column, scale_atom_descriptor(atom));
  }

  // Q -> S^T = K · Q^T -> s_full
  FAMX_DEVICE void make_s(Step s) {
    const Slot q = wait_slot(s, -1);
    if (issues) {
      copy_scales(C::kSFK, smem + C::kKScale);
      copy_scales(C::kSFQ, q.scale);
      multiply_along_head(C::kS, smem + C::kK, q.tile, C::kSFK, C::kSFQ);
    }
    release(q);
    commit(C::kSFull);
  }

  // dO, delta, s_loaded -> dP^T = V · dO^T - delta -> dp_full
  FAMX_DEVICE void make_dp(Step s, int step) {
    const Slot dout = wait_slot(s, -1);
    wait(C::kSLoaded, step);
    if (issues) {
      const uint32_t stage = step % C::kDeltaStages;
      copy_scales(C::kSFV, smem + C::kVScale);
      copy_scales(C::kSFdO, dout.scale);
      copy_scales(C::kSFOnes, smem + C::kOnes);
      copy_scales(C::kSFDelta, smem + C::kDeltaScale + stage * kScaleAtomBytes);
      multiply_along_head(C::kDP, smem + C::kV, dout.tile, C::kSFV, C::kSFdO);
      const auto rows = [&](uint32_t first) {
        return plain_tile_descriptor(first, smem + C::kZeros - first);
      };
      MmaMxf8SS::fma<kPair>(tmem + C::kDP, rows(smem + C::kWeights),
                            rows(smem + C::kDelta + stage * C::kDeltaHalfBytes),
                            mxf8_instruction<kTile, kK, kK, kM>(0), tmem + C::kSFOnes,
                            tmem + C::kSFDelta, true);
    }
    release(dout);
    commit(C::kDPFull);
  }

  FAMX_DEVICE void multiply_along_head(uint32_t d, uint32_t a, uint32_t b, uint32_t sfa,
                                       uint32_t sfb) {
    const uint64_t da = C::Tile::descriptor(a), db = C::Tile::descriptor(b);
    // Blocks of 32 behind head_dim are not multiplied: their scale bytes may hold anything.
    const int blocks = (p.head_dim + kMmaK - 1) / kMmaK;
#pragma unroll
    for (int k = 0; k < C::kHeadDim / kMmaK; ++k) {
      if (k >= blocks) break;
      MmaMxf8SS::fma<kPair>(tmem + d, da + k * C::Tile::kStepAlongRow,
                            db + k * C::Tile::kStepAlongRow, mxf8_instruction<kTile, kK, kK, kM>(k),
                            tmem + sfa, tmem + sfb, k > 0);
    }
  }

  // dO', p_full -> dV += P^T · dO'
  FAMX_DEVICE void add_dv(Step s, int step) {
    const Slot dout = wait_slot(s, 0);
    wait(C::kPFull, step);
    if (issues) {
      copy_scales(C::kSFP, smem + C::kPScale);
      copy_scales(C::kSFdOt, dout.scale);
      multiply_along_queries(C::kDV, C::kS, dout.tile, C::kSFP, C::kSFdOt, step > 0);
    }
    release(dout);
  }

  // Q', ds_full -> dK += dS^T · Q'
  FAMX_DEVICE void add_dk(Step s, int step) {
    const Slot q = wait_slot(s, 1);
    wait(C::kDSFull, step);
    if (issues) {
      copy_scales(C::kSFdSk, smem + C::kDsScaleByKey);
      copy_scales(C::kSFQt, q.scale);
      multiply_along_queries(C::kDK, C::kDP, q.tile, C::kSFdSk, C::kSFQt, step > 0);
    }
    release(q);
  }

  FAMX_DEVICE void multiply_along_queries(uint32_t d, uint32_t a, uint32_t b, uint32_t sfa,
                                          uint32_t sfb, bool add) {
    const uint64_t db = C::ColTile::descriptor(b);
#pragma unroll
    for (int k = 0; k < kTile / kMmaK; ++k)
      MmaMxf8TS::fma<kPair>(
          tmem + d, tmem + a + C::payload_column(k), db + k * C::ColTile::kStepAlongRows,
          mxf8_instruction<C::kHeadDim, kMN, kK, kM>(k), tmem + sfa, tmem + sfb, add || k > 0);
  }

  // exchanged, ds_full (waited for by add_dk) -> dQ = dS · K' of one or two steps -> dq_full. Both operands lie with the
  // keys as rows. Only key tiles that the queries see: what is poisoned in the other stays there.
  FAMX_DEVICE void make_dq(int tile) {
    if (work.slot(tile) == 1) wait(C::kExchanged + 8, dqs_of_two++);
    const uint32_t buffer = dqs & 1;
    ++dqs;
    if (issues) {
      for (int r = 0; r < kPair; ++r) {
        copy_scales(C::kSFdSq + r * kScaleAtomColumns, smem + C::ds_scale(buffer, r));
        copy_scales(C::kSFKt + r * kScaleAtomColumns, smem + C::kKtScale + r * kScaleAtomBytes);
      }
      const uint64_t da = C::DsTile::descriptor(smem + C::ds(buffer, 0)),
                     db = C::ColTile::descriptor(smem + C::kKt);
      const int key_tiles = work.key_tiles(tile);
      constexpr int kBlocks = kTile / kBlock;
#pragma unroll
      for (int k = 0; k < kPair * kBlocks; ++k) {
        const uint32_t r = k / kBlocks, scales = tmem + r * kScaleAtomColumns;
        if (key_tiles >> r & 1)
          MmaMxf8SS::fma<kPair>(tmem + C::kDQ, da + k * C::DsTile::kStepAlongRows,
                                db + k * C::ColTile::kStepAlongRows,
                                mxf8_instruction<C::kHeadDim, kMN, kMN, kM>(k % kBlocks),
                                scales + C::kSFdSq, scales + C::kSFKt,
                                k % kBlocks > 0 || (r == 1 && key_tiles == 3));
      }
    }
    commit(C::kDQFull);
  }
};

}  // namespace flash_attn_mx::bwd
