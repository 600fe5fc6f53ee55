// attn_bwd: sm_100f, MXFP8 -> bf16/fp16/fp32. A pair of CTAs: 256 keys of one key head, 128 each; they walk the 128-query
// tiles that see them, of all query heads that share the key head, and add dK, dV in tensor memory and dQ in global memory.
//
// FLOW      K,K',V and per step Q,Q',dO,dO' and their scale atoms -TMA-> SMEM; scales -tcgen05.cp-> TMEM   (' = colwise copy)
//           S^T  = K · Q^T   (D)        TMEM -ld-> registers: P^T = min(1, 2^(c S - LSE)), one scale per (key, 32 queries)
//           dP^T = V · dO^T - delta (D) TMEM -ld-> registers: dS^T = P^T ∘ dP^T, one scale per 32 x 32. -delta: delta.cuh
//           dV  += P^T · dO' (queries)  P^T -st-> TMEM; SFP -> SMEM -cp-> TMEM
//           dK  += dS^T · Q' (queries)  dS^T -st-> TMEM; SFdS by key -> SMEM -cp-> TMEM
//           dQ   = dS · K'   (keys)     of two steps at once: dS^T of 256 keys in SMEM, read MN-major; SFdS by query (the same
//                                       bytes) -> SMEM -cp-> TMEM. dQ -ld-> registers -> SMEM -bulk add-> dq_acc
//           at the end dK · softmax_scale, dV -> GMEM
//           Every product is one instruction stream for both CTAs (cta_group::2, M = 256): keys 128 r .. are rows of CTA r in
//           the first four; in dQ the queries of slot r are. Of the right operands each CTA holds a half: 64 of 128 rows of Q
//           and dO, D/2 of the channels of Q', dO' and K' (all 256 keys). So dS goes to the CTA of its slot: the other
//           one's by a bulk copy between shared memories.
//           A step has slot 0 or 1. dQ is due after a step with slot 1, and one with slot 0 if the next tile is seen by another
//           set of the two key tiles, or is of another head (Work::closes): only keys of tiles that see it enter a dQ. It is
//           issued a step later, so that nothing waits for the copy.
//
// ROLES     warps | role    | regs | does
//           0-3   | compute0|  168 | one thread per key, queries 0-63 of the tile: S^T -> P^T, dP^T -> dS^T; dV at the end
//           4-7   | compute1|  168 | the same for queries 64-127; dK at the end
//           8-11  | reduce  |   88 | one thread per query of the CTA's slot: dQ -> dq_acc
//           12    | mma     |   88 | TMEM allocation; clears what lies behind an end. CTA 0: every tcgen05.cp, mma, commit.
//                                  | CTA 1: tells CTA 0 what its own TMA has brought
//           13    | load    |   88 | every TMA and bulk copy from GMEM
//           14    | exchange|   88 | dS to the other CTA, and word to CTA 0 when the other's has come           (15 idles)
//
// TMEM      cols     | tensor | shape x type  | written by | read by | aliases                       (the same in both CTAs)
//           0-127    | S^T    | 128x128 f32   | mma        | compute | -
//           0-15     | P^T    | 128x64 e4m3   | compute0   | mma     | S^T, once compute0 has it in registers; 64-79: compute1
//           128-255  | dP^T   | 128x128 f32   | mma        | compute | -
//           128-143  | dS^T   | 128x64 e4m3   | compute0   | mma     | dP^T likewise; 192-207: compute1
//           128-255  | dQ     | 128xD f32     | mma        | reduce  | dP^T and dS^T, once dK has been issued
//           256-     | dV     | 128xD f32     | mma        | compute0| -
//           384-     | dK     | 128xD f32     | mma        | compute1| -
//           +16..55  | scales | 4 columns each| mma (cp)   | mma     | of S and dK: in dP^T; of dP, delta, dV and dQ: in S^T (dQ: 8)
//           Scales lie in whichever of the two regions has been read by then; P^T and dS^T stay clear of columns 16-63.
//
// SMEM      buffer     | shape x type                       | stages | bytes each   | swizzle          (the same in both CTAs)
//           keys       | 128 x D e4m3: K, V                 | 2      | 128·D        | D bytes
//           K'         | 256 keys x D/2 e4m3                | 1      | 128·D        | D/2 bytes
//           ring       | 64 x D e4m3: Q or dO;              | 6 / 16 | 64·D         | D bytes   (D=128 / D=64)
//                      | 128 x D/2: Q' or dO'               |        |              | D/2 bytes
//           ds         | 256 keys x 128 queries e4m3        | 2      | 32768        | 128 bytes
//           ds_out     | 128 keys x 128 queries e4m3        | 1      | 16384        | 128 bytes
//           scales     | atoms of 512 bytes: K, 2 K', V (written by compute); 1 per ring slot; P; dS by key; dS by query: 2 x 2
//                      | and 1 to go out; ones
//           stats      | 128 x bias f32                     | 2      | 512          | none
//           delta      | 64 x 16 e4m3; an atom of scales    | 2 / 4  | 1024; 512    | none
//           weights    | 128 x 16 e4m3, 128 x 16 zeros      | 1      | 4096         | none
//           dq_stage   | 4 warps x 32 channels x 32 rows f32| 2      | 16384        | none
//           poison     | a bit per channel: dV, dK          | 1      | 32           | none
//
// BARRIERS  in both CTAs. "0": only CTA 0 waits, both CTAs arrive there; commits arrive in both.
//           name          | arrives: who x count              | waits           | per step      | guards
//           keys_full   0 | load x 1 + tx; mma of CTA 1 x 1   | mma             | once          | keys, their scales
//           ring_full[s]0 | load x 1 + tx; mma of CTA 1 x 1   | mma             | 4             | ring[s], its scales; with dO: delta
//                           (CTA 1's own: load x 1 + tx; its mma warp waits)
//           ring_empty[s] | mma commit x 1                    | load            | 4             | ring[s], its scales
//           stats_full[s] | load x 1 + tx                     | compute         | 1             | stats[s]
//           stats_empty[s]| compute: lane 0 of each warp, 8   | load            | 1             | stats[s]
//           s_full        | mma commit x 1                    | compute         | 1             | S^T written
//           s_loaded    0 | compute x 16                      | mma             | 1             | S^T read: its columns are free; V's scales
//           p_full      0 | compute x 16                      | mma             | 1             | P^T, SFP
//           dp_full       | mma commit x 1                    | compute         | 1             | dP^T written; dQ, dK before are done: ds, ds_out, SFdS
//           dp_loaded   0 | compute x 16                      | mma             | 1             | dP^T read: its columns are free
//           ds_full     0 | compute x 16                      | mma             | 1             | dS^T, own part of ds, SFdS
//           out_full      | compute x 8                       | exchange        | 1 if not own slot | ds_out
//           in_full       | exchange x 1 + tx                 | exchange        | 1 if own slot | the other's part of ds
//           exchanged[t]0 | exchange of CTA t x 1             | mma             | per dQ        | the same, of slot t
//           dq_full       | mma commit x 1                    | reduce          | per dQ        | dQ written
//           dq_loaded   0 | reduce x 8                        | mma             | per dQ        | dQ read: its columns are free
//           sums_full     | mma commit x 1; own mma warp x 1  | compute         | once          | dK, dV complete; poison
//
// TIME      step  mma                                 compute                            reduce
//           0     S(0) · dP(0) · dV(0)                 S(0) → P(0) · dP(0) → dS(0)        -
//           j     S(j+1) · dK(j) [dQ, due before j] · dP(j+1) · dV(j+1)   S(j+1) → P(j+1) · dP(j+1) → dS(j+1)   [dQ → dq_acc]
//           N-1   dK(N-1) [dQ] dQ                      dV, dK → GMEM                      dQ → dq_acc
//           S(j+1) waits until dP(j) is in registers (its scales go there), dQ and dP(j+1) until S(j+1) is.
#pragma once

#include "attn_bwd/delta.cuh"
#include "attn_bwd/launch.h"
#include "common/mask.cuh"
#include "common/mma_mxf8.cuh"
#include "common/pipeline.cuh"
#include "common/ragged.cuh"
#include "common/sf_layout.cuh"
#include "params.h"

namespace flash_attn_mx::bwd {

constexpr int kPair = 2;    // CTAs of a cluster, key tiles of it, steps of a dQ
constexpr int kBlock = 32;  // queries, and keys, that share a scale
constexpr int kHalves = 2;  // compute warpgroups: halves of the queries of a tile
constexpr int kHalfQueries = kTile / kHalves;
constexpr int kHalfBlocks = kHalfQueries / kBlock;
constexpr int kComputeWarps = 8;
constexpr int kReduceWarp = kComputeWarps;  // the first of
constexpr int kReduceWarps = 4;
constexpr int kMmaWarp = kReduceWarp + kReduceWarps;
constexpr int kLoadWarp = kMmaWarp + 1;
constexpr int kExchangeWarp = kLoadWarp + 1;
constexpr int kWarps = 16;  // whole warpgroups: setmaxnreg works on four warps
constexpr int kThreads = 32 * kWarps;
static_assert(kThreads == kLaunchThreads && kTile == kLaunchRows && kPair == kLaunchCluster,
              "launch.h");
constexpr int kComputeRegisters = 168;
constexpr int kOtherRegisters = 88;
static_assert(32 * (kComputeWarps * kComputeRegisters +
                    (kWarps - kComputeWarps) * kOtherRegisters) <=
                  64 * 1024,
              "register file");

// The same in the whole warp, and the compiler knows it. Asked for anew where it is needed: what is kept across a role's
// loop may be spilled.
FAMX_DEVICE uint32_t uniform(uint32_t x) { return __shfl_sync(0xFFFFFFFFu, x, 0); }
FAMX_DEVICE int warp_index() { return uniform(threadIdx.x / 32); }
FAMX_DEVICE uint32_t lanes_of_warp() {
  return (warp_index() % 4 * 32) << 16;
}  // as part of a TMEM address

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;
  static_assert(kHeadDim == 64 || kHeadDim == 128, "row of a payload tile = span of the swizzle");
  static constexpr int kRingStages = launch_ring_stages(kHeadDim);
  static constexpr int kStatsStages = 2;
  // A step's delta goes with its dO. With four loads per step the ring's release of an old dO covers the delta it came with.
  static constexpr int kDeltaStages = launch_delta_stages(kHeadDim);
  static_assert(4 * kDeltaStages >= kRingStages, "delta(j) is loaded when dP(j - stages) is done");
  // Channels of dQ that a warp stages at once. H200, 2026-11, benchmarks/bench_dq_reduction.cu: 64 KB take 4190 cycles in
  // copies of 4 KB with one buffer, 3980 with two, 4000 from registers; beside busy shared memory 4300, 4240, 3980, and
  // 5880 in copies of 2 KB with two buffers.
  static constexpr int kChunk = 32;
  static constexpr int kDQStages = kLaunchDQStages;
  static constexpr int kHalfRows = launch_row_box(kHeadDim).rows;
  static constexpr int kHalfColumns = launch_col_box(kHeadDim).columns;
  using Tile = SwizzledTile<kHeadDim>;         // contracted along its rows' bytes: K, V, Q, dO
  using ColTile = SwizzledTile<kHalfColumns>;  // contracted along its rows: Q', dO', K'
  using DsTile = SwizzledTile<kTile>;

  // Tensor memory.
  static constexpr uint32_t kTmemColumns = 512;
  static constexpr uint32_t kS = 0, kDP = 128, kDQ = 128, kDV = 256, kDK = 384;
  // Payload of 32 queries in the S^T or dP^T region: behind those of the same warpgroup.
  static FAMX_DEVICE constexpr uint32_t payload_column(int block) {
    return block / kHalfBlocks * kHalfQueries + block % kHalfBlocks * (kBlock / 4);
  }
  // Scales of the left and right operand of each product.
  static constexpr uint32_t kSFK = kDP + 16, kSFQ = kDP + 20;     // S
  static constexpr uint32_t kSFdSk = kDP + 24, kSFQt = kDP + 28;  // dK
  static constexpr uint32_t kSFV = kS + 16, kSFdO = kS + 20;      // dP
  static constexpr uint32_t kSFOnes = kS + 48, kSFDelta = kS + 52;
  static constexpr uint32_t kSFP = kS + 24, kSFdOt = kS + 28;   // dV
  static constexpr uint32_t kSFdSq = kS + 32, kSFKt = kS + 40;  // dQ: two atoms each
  static_assert(kHalfBlocks * kBlock / 4 <= 16 && 52 + kScaleAtomColumns <= kHalfQueries,
                "payloads beside scales");

  // Shared memory, as offsets from a 1024-byte boundary.
  static constexpr uint32_t kTileBytes = kTile * kHeadDim;
  static constexpr uint32_t kHalfBytes = kTileBytes / kPair;
  static constexpr uint32_t kDsBytes = kTile * kTile, kDsBuffers = 2;
  static constexpr uint32_t kK = 0, kV = kK + kTileBytes;
  static constexpr uint32_t kKt = kV + kTileBytes;
  static constexpr uint32_t kRing = kKt + kPair * kHalfBytes;
  static constexpr uint32_t kDs = kRing + kRingStages * kHalfBytes;
  static constexpr uint32_t kDsOut = kDs + kDsBuffers * kPair * kDsBytes;
  static constexpr uint32_t kKScale = kDsOut + kDsBytes, kKtScale = kKScale + kScaleAtomBytes;
  static constexpr uint32_t kRingScale = kKtScale + kPair * kScaleAtomBytes;
  static constexpr uint32_t kPScale = kRingScale + kRingStages * kScaleAtomBytes;
  static constexpr uint32_t kDsScaleByKey = kPScale + kScaleAtomBytes;
  static constexpr uint32_t kDsScaleByQuery = kDsScaleByKey + kScaleAtomBytes;
  static constexpr uint32_t kDsScaleOut = kDsScaleByQuery + kDsBuffers * kPair * kScaleAtomBytes;
  static constexpr uint32_t kOnes = kDsScaleOut + kScaleAtomBytes;
  static constexpr uint32_t kVScale = kOnes + kScaleAtomBytes;
  static constexpr uint32_t kDeltaScale = kVScale + kScaleAtomBytes;
  static constexpr uint32_t kDeltaHalfBytes = kHalfRows * kDeltaRowBytes;
  static constexpr uint32_t kDelta = kDeltaScale + kDeltaStages * kScaleAtomBytes;
  static constexpr uint32_t kWeights = kDelta + kDeltaStages * kDeltaHalfBytes;
  static constexpr uint32_t kZeros = kWeights + kTile * kDeltaRowBytes;
  static constexpr uint32_t kStats = kZeros + kTile * kDeltaRowBytes;
  static constexpr uint32_t kStatBytes = kTile * sizeof(float);
  static constexpr uint32_t kDQStage = kStats + kStatsStages * kStatBytes;
  static constexpr uint32_t kBarriers = kDQStage + kDQStages * kTile * kChunk * sizeof(float);
  static_assert(kHalfBytes % 1024 == 0, "swizzle patterns start on their natural boundary");

  // Part r of a CTA's dS: keys of CTA r; and their scales. The buffers take turns from dQ to dQ.
  static FAMX_DEVICE constexpr uint32_t ds(uint32_t buffer, uint32_t r) {
    return kDs + (kPair * buffer + r) * kDsBytes;
  }
  static FAMX_DEVICE constexpr uint32_t ds_scale(uint32_t buffer, uint32_t r) {
    return kDsScaleByQuery + (kPair * buffer + r) * kScaleAtomBytes;
  }

  static constexpr uint32_t kKeysFull = kBarriers;
  static constexpr uint32_t kRingFull = kKeysFull + 8, kRingEmpty = kRingFull + 8 * kRingStages;
  static constexpr uint32_t kStatsFull = kRingEmpty + 8 * kRingStages;
  static constexpr uint32_t kStatsEmpty = kStatsFull + 8 * kStatsStages;
  static constexpr uint32_t kSFull = kStatsEmpty + 8 * kStatsStages, kSLoaded = kSFull + 8,
                            kPFull = kSLoaded + 8;
  static constexpr uint32_t kDPFull = kPFull + 8, kDPLoaded = kDPFull + 8, kDSFull = kDPLoaded + 8;
  static constexpr uint32_t kOutFull = kDSFull + 8, kInFull = kOutFull + 8,
                            kExchanged = kInFull + 8;
  static constexpr uint32_t kDQFull = kExchanged + 8 * kPair, kDQLoaded = kDQFull + 8,
                            kSumsFull = kDQLoaded + 8;
  static constexpr uint32_t kPoison = kSumsFull + 8;  // bits of channels: of dV, of dK
  static constexpr uint32_t kTmemAddress = kPoison + 2 * kTile / 8;
  static constexpr uint32_t kSmemBytes = kTmemAddress + 16 + 1024;  // 1024: alignment of the start
  static_assert(kSmemBytes <= 227 * 1024, "shared memory of a CTA");
  static_assert(kSmemBytes == launch_smem_bytes(kHeadDim), "launch.h");
};

// A step: one query tile of one query head.
struct Step {
  int head;  // of the group
  int tile;
};

// What a CTA does: 128 keys of one key head, with its peer 256. Every role derives it from the CTA's number.
struct Work {
  int rank;  // in the pair
  int batch, key_head, key_tile;
  int seqlen_q, seqlen_k;
  int q_start, k_start;  // packed: first token of the sequence; dense: 0
  int first_k_atom;      // scale atom of the head's and sequence's first key tile
  int group;             // query heads that share the key head
  int first_tile,
      tiles;  // query tiles that see a key of the pair: [first_tile, first_tile + tiles)
  int both_first,
      both_end;  // those that see keys of both; before them key tile 0 only, behind them 1 only
  QueryWindow window;

  FAMX_DEVICE int steps() const { return group * tiles; }
  FAMX_DEVICE Step first() const { return {0, first_tile}; }
  FAMX_DEVICE Step next(Step s) const {
    return s.tile + 1 < end_tile() ? Step{s.head, s.tile + 1} : Step{s.head + 1, first_tile};
  }
  FAMX_DEVICE int end_tile() const { return first_tile + tiles; }
  // Tiles that the same key tiles see: runs [run_first, run_end). Slots start anew in each.
  FAMX_DEVICE int run_first(int tile) const {
    return tile < both_first ? first_tile : tile < both_end ? both_first : both_end;
  }
  FAMX_DEVICE int run_end(int tile) const {
    return tile < both_first ? both_first : tile < both_end ? both_end : end_tile();
  }
  // The CTA that has the tile's rows of dQ.
  FAMX_DEVICE int slot(int tile) const { return (tile - run_first(tile)) & 1; }
  // dQ of this tile, and of the one before if this one has slot 1, is due.
  FAMX_DEVICE bool closes(int tile) const { return slot(tile) == 1 || tile + 1 == run_end(tile); }
  // Bit r: key tile r of the pair is seen by this query tile.
  FAMX_DEVICE int key_tiles(int tile) const {
    return tile < both_first ? 1 : tile < both_end ? 3 : 2;
  }

  FAMX_DEVICE int head(Step s) const { return key_head * group + s.head; }
  FAMX_DEVICE int rows(Step s) const { return min(seqlen_q - s.tile * kTile, kTile); }
  FAMX_DEVICE int pair_tile(int r) const { return key_tile - rank + r; }
  // Of the CTA, and of CTA r of the pair; 0 if the sequence ends before.
  FAMX_DEVICE int keys() const { return keys(rank); }
  FAMX_DEVICE int keys(int r) const { return max(0, min(seqlen_k - pair_tile(r) * kTile, kTile)); }
  FAMX_DEVICE int k_atom(int r) const {
    return first_k_atom +
           (keys(r) > 0 ? pair_tile(r) : pair_tile(0));  // any one, to be read but not used
  }
  FAMX_DEVICE int64_t row_tile(const AttnBwdParams& p, Step s) const {
    const int first = p.cu_seqlens_q ? head(s) * p.row_tiles + q_start / kTile + batch
                                     : (batch * p.heads_k * group + head(s)) * p.row_tiles;
    return int64_t(first) + s.tile;
  }

  FAMX_DEVICE Work(const AttnBwdParams& p, int cta) {
    // The same key tiles of all heads, then the next ones: with causal masks long ones come first; and a CTA that waits
    // for its turn at dQ waits for CTAs with smaller numbers.
    rank = cta % kPair;
    const int item = cta / kPair, rest = item % (p.heads_k * p.batch);
    key_tile = item / (p.heads_k * p.batch) * kPair + rank;
    batch = rest / p.heads_k;
    key_head = rest % p.heads_k;
    group = p.heads_per_kv;
    seqlen_q = p.seqlen_q, seqlen_k = p.seqlen_k;
    q_start = k_start = 0;
    if (p.cu_seqlens_q) {
      q_start = p.cu_seqlens_q[batch], k_start = p.cu_seqlens_k[batch];
      seqlen_q = p.cu_seqlens_q[batch + 1] - q_start;
      seqlen_k = p.cu_seqlens_k[batch + 1] - k_start;
      first_k_atom = key_head * p.k_scale_tiles + k_start / kTile + batch;
    } else {
      first_k_atom = (batch * p.heads_k + key_head) * p.k_scale_tiles;
    }
    window = {{p.window_left, p.window_right, seqlen_k - seqlen_q, seqlen_k}, seqlen_q};
    set_tiles();
  }

 private:
  // The query tiles of the two key tiles are neighbours or overlap, as their keys are neighbours.
  FAMX_DEVICE void set_tiles() {
    const int first0 = window.first_tile(pair_tile(0)), end0 = window.end_tile(pair_tile(0));
    const int first1 = window.first_tile(pair_tile(1)), end1 = window.end_tile(pair_tile(1));
    if (first1 >= end1) {
      first_tile = first0, both_first = both_end = max(first0, end0);
    } else if (first0 >= end0) {
      first_tile = both_first = both_end = first1;
    } else {
      first_tile = first0, both_first = first1, both_end = end0;
    }
    tiles = max(both_end, first1 < end1 ? end1 : 0) - first_tile;
  }
};

}  // namespace flash_attn_mx::bwd
