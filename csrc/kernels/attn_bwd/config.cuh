// attn_bwd: sm_100f, MXFP8 -> bf16/fp16/fp32. One CTA: 128 keys of one key head; it walks the 128-query tiles that see
// them, of all query heads that share the key head, and adds dK, dV in tensor memory and dQ in global memory.
//
// FLOW      K,K',V and per step Q,Q',dO,dO' and their scale atoms -TMA-> SMEM; scales -tcgen05.cp-> TMEM   (' = colwise copy)
//           S^T  = K · Q^T   (D)        TMEM -ld-> registers: P^T = min(1, 2^(c S - LSE)), one scale per (key, 32 queries)
//           dP^T = V · dO^T  (D)        TMEM -ld-> registers: dS^T = P^T ∘ (dP^T - delta), one scale per 32 x 32
//           dV  += P^T · dO' (queries)  P^T -st-> TMEM; SFP -> SMEM -cp-> TMEM
//           dK  += dS^T · Q' (queries)  dS^T -st-> TMEM; SFdS by key -> SMEM -cp-> TMEM
//           dQ   = dS · K'   (keys)     dS^T -> SMEM, read MN-major; SFdS by query (the same bytes) -> SMEM -cp-> TMEM
//           dQ -ld-> registers -> SMEM -bulk add-> dq_acc;  at the end dK · softmax_scale, dV -> GMEM
//
// ROLES     warps | role    | regs | does
//           0-3   | compute0|  168 | one thread per key, queries 0-63 of the tile: S^T -> P^T, dP^T -> dS^T; dV at the end
//           4-7   | compute1|  168 | the same for queries 64-127; dK at the end
//           8-11  | reduce  |   88 | one thread per query: dQ -> dq_acc
//           12    | mma     |   88 | TMEM allocation, every tcgen05.cp and tcgen05.mma; clears what lies behind an end
//           13    | load    |   88 | every TMA and bulk copy                                     (14, 15 idle)
//
// TMEM      cols     | tensor | shape x type  | written by | read by | aliases
//           0-127    | S^T    | 128x128 f32   | mma        | compute | -
//           0-15     | P^T    | 128x64 e4m3   | compute0   | mma     | S^T, once compute0 has it in registers; 64-79: compute1
//           128-255  | dP^T   | 128x128 f32   | mma        | compute | -
//           128-143  | dS^T   | 128x64 e4m3   | compute0   | mma     | dP^T likewise; 192-207: compute1
//           128-255  | dQ     | 128xD f32     | mma        | reduce  | dP^T and dS^T, once dK has been issued
//           256-     | dV     | 128xD f32     | mma        | compute0| -
//           384-     | dK     | 128xD f32     | mma        | compute1| -
//           +16..47  | scales | 4 columns each| mma (cp)   | mma     | of S and dK: in dP^T; of dP, dV and dQ: in S^T
//           Scales lie in whichever of the two regions has been read by then; P^T and dS^T stay clear of columns 16-63.
//
// SMEM      buffer     | shape x type                       | stages | bytes each   | swizzle
//           keys       | 128 x D e4m3: K, K', V             | 3      | 128·D        | D bytes
//           ring       | 128 x D e4m3: Q, Q', dO or dO'     | 8 / 12 | 128·D        | D bytes   (D=128 / D=64)
//           ds         | 128 keys x 128 queries e4m3        | 1      | 16384        | 128 bytes
//           scales     | atoms of 512 bytes: K, K'; 1 per ring slot; P; dS by key; dS by query; ones (SFV)
//           stats      | 128 x {bias, -delta} f32           | 2      | 1024         | none
//           dq_stage   | 4 warps x 32 channels x 32 rows f32| 1 / 2  | 16384        | none
//
// BARRIERS  name          | arrives: who x count              | waits           | per step      | guards
//           keys_full     | load x 1 + tx                     | mma             | once          | keys, their scales
//           ring_full[s]  | load x 1 + tx                     | mma             | 4             | ring[s], its scales
//           ring_empty[s] | mma commit x 1                    | load            | 4             | ring[s], its scales
//           stats_full[s] | load x 1 + tx                     | compute         | 1             | stats[s]
//           stats_empty[s]| compute: lane 0 of each warp, 8   | load            | 1             | stats[s]
//           s_full        | mma commit x 1                    | compute         | 1             | S^T written
//           s_loaded      | compute x 8                       | mma             | 1             | S^T read: its columns are free
//           p_full        | compute x 8                       | mma             | 1             | P^T, SFP
//           dp_full       | mma commit x 1                    | compute         | 1             | dP^T written; dQ, dK before are done: ds, SFdS
//           dp_loaded     | compute x 8                       | mma             | 1             | dP^T read: its columns are free
//           ds_full       | compute x 8                       | mma             | 1             | dS^T, ds, SFdS
//           dq_full       | mma commit x 1                    | reduce          | 1             | dQ written
//           dq_loaded     | reduce x 4                        | mma             | 1             | dQ read: its columns are free
//           sums_full     | mma commit x 1                    | compute         | once          | dK, dV complete
//
// TIME      step  mma                                 compute                            reduce
//           0     S(0) · dP(0) · dV(0)                 S(0) → P(0) · dP(0) → dS(0)        -
//           j     S(j+1) · dK(j) dQ(j) · dP(j+1) · dV(j+1)   S(j+1) → P(j+1) · dP(j+1) → dS(j+1)   dQ(j) → dq_acc
//           N-1   dK(N-1) dQ(N-1)                      dV, dK → GMEM                      dQ(N-1) → dq_acc
//           S(j+1) waits until dP(j) is in registers (its scales go there), dQ(j) and dP(j+1) until S(j+1) is.
#pragma once

#include "attn_bwd/launch.h"
#include "common/mask.cuh"
#include "common/mma_mxf8.cuh"
#include "common/pipeline.cuh"
#include "common/ragged.cuh"
#include "common/sf_layout.cuh"
#include "params.h"

namespace flash_attn_mx::bwd {

constexpr int kBlock = 32;  // queries, and keys, that share a scale
constexpr int kHalves = 2;  // compute warpgroups: halves of the queries of a tile
constexpr int kHalfQueries = kTile / kHalves;
constexpr int kHalfBlocks = kHalfQueries / kBlock;
constexpr int kComputeWarps = 8;
constexpr int kReduceWarp = kComputeWarps;  // the first of
constexpr int kReduceWarps = 4;
constexpr int kMmaWarp = kReduceWarp + kReduceWarps;
constexpr int kLoadWarp = kMmaWarp + 1;
constexpr int kWarps = 16;  // whole warpgroups: setmaxnreg works on four warps
constexpr int kThreads = 32 * kWarps;
static_assert(kThreads == kLaunchThreads && kTile == kLaunchRows, "launch.h");
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
  // Channels of dQ that a warp stages at once. H200, 2026-11, benchmarks/bench_dq_reduction.cu: 64 KB take 4190 cycles in
  // copies of 4 KB with one buffer, 3980 with two, 4000 from registers; beside busy shared memory 4300, 4240, 3980, and
  // 5880 in copies of 2 KB with two buffers.
  static constexpr int kChunk = 32;
  static constexpr int kDQStages = launch_dq_stages(kHeadDim);
  using Tile = SwizzledTile<kHeadDim>;
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
  static constexpr uint32_t kSFP = kS + 24, kSFdOt = kS + 28;     // dV
  static constexpr uint32_t kSFdSq = kS + 32, kSFKt = kS + 36;    // dQ
  static_assert(kHalfBlocks * kBlock / 4 <= 16 && 36 + kScaleAtomColumns <= kHalfQueries,
                "payloads beside scales");

  // Shared memory, as offsets from a 1024-byte boundary.
  static constexpr uint32_t kTileBytes = kTile * kHeadDim;
  static constexpr uint32_t kKeys = 0;
  static constexpr uint32_t kK = kKeys, kKt = kKeys + kTileBytes, kV = kKeys + 2 * kTileBytes;
  static constexpr uint32_t kRing = kKeys + 3 * kTileBytes;
  static constexpr uint32_t kDs = kRing + kRingStages * kTileBytes;
  static constexpr uint32_t kKScale = kDs + kTile * kTile, kKtScale = kKScale + kScaleAtomBytes;
  static constexpr uint32_t kRingScale = kKtScale + kScaleAtomBytes;
  static constexpr uint32_t kPScale = kRingScale + kRingStages * kScaleAtomBytes;
  static constexpr uint32_t kDsScaleByKey = kPScale + kScaleAtomBytes;
  static constexpr uint32_t kDsScaleByQuery = kDsScaleByKey + kScaleAtomBytes;
  static constexpr uint32_t kOnes = kDsScaleByQuery + kScaleAtomBytes;
  static constexpr uint32_t kStats = kOnes + kScaleAtomBytes;
  static constexpr uint32_t kStatBytes = kTile * sizeof(float);  // bias, then -delta
  static constexpr uint32_t kDQStage = kStats + kStatsStages * 2 * kStatBytes;
  static constexpr uint32_t kBarriers = kDQStage + kDQStages * kTile * kChunk * sizeof(float);
  static_assert(kTileBytes % 1024 == 0, "swizzle patterns start on their natural boundary");

  static constexpr uint32_t kKeysFull = kBarriers;
  static constexpr uint32_t kRingFull = kKeysFull + 8, kRingEmpty = kRingFull + 8 * kRingStages;
  static constexpr uint32_t kStatsFull = kRingEmpty + 8 * kRingStages;
  static constexpr uint32_t kStatsEmpty = kStatsFull + 8 * kStatsStages;
  static constexpr uint32_t kSFull = kStatsEmpty + 8 * kStatsStages, kSLoaded = kSFull + 8,
                            kPFull = kSLoaded + 8;
  static constexpr uint32_t kDPFull = kPFull + 8, kDPLoaded = kDPFull + 8, kDSFull = kDPLoaded + 8;
  static constexpr uint32_t kDQFull = kDSFull + 8, kDQLoaded = kDQFull + 8,
                            kSumsFull = kDQLoaded + 8;
  static constexpr uint32_t kTmemAddress = kSumsFull + 8;
  static constexpr uint32_t kSmemBytes = kTmemAddress + 16 + 1024;  // 1024: alignment of the start
  static_assert(kSmemBytes <= 227 * 1024, "shared memory of a CTA");
  static_assert(kSmemBytes == launch_smem_bytes(kHeadDim), "launch.h");
};

// A step: one query tile of one query head.
struct Step {
  int head;  // of the group
  int tile;
};

// What a CTA does: 128 keys of one key head. Every role derives it from the CTA's number.
struct Work {
  int batch, key_head, key_tile;
  int seqlen_q, seqlen_k;
  int q_start, k_start;   // packed: first token of the sequence; dense: 0
  int k_atom;             // scale atom of the key tile
  int group;              // query heads that share the key head
  int first_tile, tiles;  // query tiles that see a key of the tile
  QueryWindow window;

  FAMX_DEVICE int steps() const { return group * tiles; }
  FAMX_DEVICE Step first() const { return {0, first_tile}; }
  FAMX_DEVICE Step next(Step s) const {
    return s.tile + 1 < first_tile + tiles ? Step{s.head, s.tile + 1}
                                           : Step{s.head + 1, first_tile};
  }
  FAMX_DEVICE int head(Step s) const { return key_head * group + s.head; }
  FAMX_DEVICE int rows(Step s) const { return min(seqlen_q - s.tile * kTile, kTile); }
  FAMX_DEVICE int keys() const { return min(seqlen_k - key_tile * kTile, kTile); }
  FAMX_DEVICE int64_t row_tile(const AttnBwdParams& p, Step s) const {
    const int first = p.cu_seqlens_q ? head(s) * p.row_tiles + q_start / kTile + batch
                                     : (batch * p.heads_k * group + head(s)) * p.row_tiles;
    return int64_t(first) + s.tile;
  }

  FAMX_DEVICE Work(const AttnBwdParams& p, int item) {
    // The same key tile of all heads, then the next tile: with causal masks long ones come first; and a CTA that waits
    // for its turn at dQ waits for CTAs with smaller numbers.
    const int rest = item % (p.heads_k * p.batch);
    key_tile = item / (p.heads_k * p.batch);
    batch = rest / p.heads_k;
    key_head = rest % p.heads_k;
    group = p.heads_per_kv;
    seqlen_q = p.seqlen_q, seqlen_k = p.seqlen_k;
    q_start = k_start = 0;
    if (p.cu_seqlens_q) {
      q_start = p.cu_seqlens_q[batch], k_start = p.cu_seqlens_k[batch];
      seqlen_q = p.cu_seqlens_q[batch + 1] - q_start;
      seqlen_k = p.cu_seqlens_k[batch + 1] - k_start;
      k_atom = key_head * p.k_scale_tiles + k_start / kTile + batch + key_tile;
    } else {
      k_atom = (batch * p.heads_k + key_head) * p.k_scale_tiles + key_tile;
    }
    window = {{p.window_left, p.window_right, seqlen_k - seqlen_q, seqlen_k}, seqlen_q};
    first_tile = window.first_tile(key_tile);
    tiles = max(0, window.end_tile(key_tile) - first_tile);
  }
};

}  // namespace flash_attn_mx::bwd
