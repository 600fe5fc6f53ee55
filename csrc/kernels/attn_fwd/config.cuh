// attn_fwd: sm_100f, MXFP8 -> bf16/fp16/fp32. One CTA: 256 query rows as two tiles, loop over 128-key tiles, last to first.
//
// FLOW      Q,K,V -TMA-> SMEM; SFQ,SFK,SFV -bulk-> SMEM -tcgen05.cp-> TMEM
//           Q,K -MMA-> S (TMEM) -ld-> registers: max, exp2 -> P -st-> TMEM; SFP -> SMEM -tcgen05.cp-> TMEM
//           P,V -MMA-> O (TMEM), never rescaled but in the slow path; at the end O -ld-> registers / l -> GMEM
//
// ROLES     warps | role     | regs | does
//           0-3   | softmax0 |  224 | query tile 0, one thread per row: S -> P, SFP, row sums; O / l and LSE at the end
//           4-7   | softmax1 |  224 | query tile 1
//           8     | mma      |   56 | TMEM allocation, every tcgen05.cp and tcgen05.mma; clears V behind a sequence's end
//           9     | load     |   56 | every TMA and bulk copy                       (10, 11 idle)
//
// TMEM      cols (D=128) | tensor | shape x type   | written by         | read by  | aliases
//           0-127        | S0     | 128x128 f32    | mma                | softmax0 | -
//           128-255      | S1     | 128x128 f32    | mma                | softmax1 | -
//           256-383      | O0     | 128xD f32      | mma (softmax0: slow path) | softmax0 | -          (D=64: 256-319)
//           384-511      | O1     | 128xD f32      | mma (softmax1)     | softmax1 | -                 (D=64: 320-383)
//           128-159      | P0     | 128x128 e4m3   | softmax0           | mma      | S1, once S1 is in registers
//           0-31         | P1     | 128x128 e4m3   | softmax1           | mma      | S0, once S0 is in registers
//           +32,36,40,44 | SFP,SFV,SFQ,SFK | 4 columns each | mma (cp)  | mma      | of tile 0: in S1, of tile 1: in S0
//           P of one tile lies in the S of the other, so that QK of the next key tile can run before PV of this one.
//
// SMEM      buffer   | shape x type                   | stages | bytes each   | swizzle
//           q        | 2 tiles x 128 x D e4m3         | 2      | 256·D        | D bytes
//           kv       | 128 x D e4m3: K, V or V_tok    | 9 / 16 | 128·D        | D bytes
//           q_scale  | 2 atoms; kv_scale: 1 atom per stage (K, V); 512 bytes each, no swizzle
//           p_scale  | 1 atom per tile; ones: 1 atom of byte 127 (SFV of cut tiles); factors: 128 floats per tile
//
// BARRIERS  name         | arrives: who x count              | waits          | per item / key step | guards
//           q_full[2]    | load x 1 + tx                     | mma            | item      | q, q_scale
//           q_empty[2]   | mma commit x 1                    | load           | item      | q, q_scale
//           kv_full[s]   | load x 1 + tx                     | mma            | K and each V | kv, kv_scale
//           kv_empty[s]  | mma commit x 1                    | load           | K and each V | kv, kv_scale
//           s_full[i]    | mma commit x 1                    | softmax i      | step      | S_i written
//           s_loaded[i]  | softmax i: lane 0 of each warp, 4 | mma, softmax 1-i | step    | S_i read: its columns are free
//           p_full[i]    | softmax i: lane 0 of each warp, 4 | mma            | step      | P_i, p_scale[i]
//           pv_done[i]   | mma commit x 1                    | softmax i      | step      | O_i (slow path, end of item)
//           A step is one key tile for both query tiles; a query tile that does not see the key tile takes part in the
//           barriers all the same. So every barrier of the second half counts steps, and one counter gives all parities.
//
// TIME      step  mma                                         softmax0                  softmax1
//           0     QK0(0) · QK1(0)                              S0(0) → P0(0)             -
//           n     QK0(n) PV0(n-1) · QK1(n) PV1(n-1)            S0(n) → P0(n)             S1(n-1) → P1(n-1), half a step behind
//           N     PV0(N-1) · PV1(N-1)                          O0 → GMEM                 S1(N-1) → P1(N-1), O1 → GMEM
//           QK1(n) waits until softmax0 has read S0(n) (its scales go there), QK0(n) until softmax1 has read S1(n-1).
#pragma once

#include "attn_fwd/launch.h"
#include "common/mask.cuh"
#include "common/mma_mxf8.cuh"
#include "common/pipeline.cuh"
#include "common/sf_layout.cuh"
#include "params.h"

namespace flash_attn_mx::fwd {

constexpr int kTiles = 2;  // query tiles of a CTA
constexpr int kWarpsPerTile = 4;
constexpr int kRowThreads = 32 * kWarpsPerTile;
constexpr int kMmaWarp = kTiles * kWarpsPerTile;
constexpr int kLoadWarp = kMmaWarp + 1;
constexpr int kWarps = 12;  // whole warpgroups: setmaxnreg works on four warps
constexpr int kThreads = 32 * kWarps;
constexpr int kSoftmaxRegisters = 224;
constexpr int kOtherRegisters = 56;
static_assert(kTile == kRowThreads, "one thread per row");
static_assert(kThreads == kLaunchThreads && kTiles * kTile == kLaunchRows, "launch.h");
// setmaxnreg moves registers inside what the CTA got at its launch, where every thread gets the same multiple of 8:
// an increase beyond that sum would wait for ever (PTX ISA 9.7.19.5).
constexpr int kLaunchRegisters = 64 * 1024 / kThreads / 8 * 8;
static_assert(kTiles * kRowThreads * kSoftmaxRegisters +
                      (kThreads - kTiles * kRowThreads) * kOtherRegisters <=
                  kThreads * kLaunchRegisters,
              "register file");

// Pairs of keys, of the 64 pairs of a row, whose exp2 runs on the FMA pipe instead of the MUFU. Untuned: chosen so that
// the MUFU (86 keys and one maximum, 8 cycles each: 696) and the issue slots (docs/forward.md) come out close.
constexpr int kPolynomialPairs = 21;

template <int kHeadDim_>
struct Config {
  static constexpr int kHeadDim = kHeadDim_;
  static_assert(kHeadDim == 64 || kHeadDim == 128, "row of a payload tile = span of the swizzle");
  static constexpr int kQStages = kLaunchQStages;
  static constexpr int kKVStages = launch_kv_stages(kHeadDim);
  using Tile = SwizzledTile<kHeadDim>;

  // Tensor memory. region(i): the columns that hold P and all scales of tile i.
  static constexpr uint32_t kTmemColumns = 512;
  static FAMX_DEVICE constexpr uint32_t s_column(int tile) { return tile * kTile; }
  static FAMX_DEVICE constexpr uint32_t region(int tile) { return s_column(1 - tile); }
  static constexpr uint32_t kP = 0;
  static constexpr uint32_t kSFP = 32, kSFV = 36, kSFQ = 40, kSFK = 44;  // relative to region(i)
  static FAMX_DEVICE constexpr uint32_t o_column(int tile) {
    return kTiles * kTile + tile * kHeadDim;
  }
  static_assert(kTiles * (kTile + kHeadDim) <= kTmemColumns, "TMEM");
  static_assert(kP + kTile / 4 <= kSFP && kSFK + kScaleAtomColumns <= kTile,
                "P and scales fit beside each other");

  // Shared memory, as offsets from a 1024-byte boundary.
  static constexpr uint32_t kTileBytes = kTile * kHeadDim;
  static constexpr uint32_t kQ = 0;
  static constexpr uint32_t kKV = kQ + kQStages * kTiles * kTileBytes;
  static constexpr uint32_t kQScale = kKV + kKVStages * kTileBytes;
  static constexpr uint32_t kKVScale = kQScale + kQStages * kTiles * kScaleAtomBytes;
  static constexpr uint32_t kPScale = kKVScale + kKVStages * kScaleAtomBytes;
  static constexpr uint32_t kOnes = kPScale + kTiles * kScaleAtomBytes;
  static constexpr uint32_t kFactors = kOnes + kScaleAtomBytes;
  static constexpr uint32_t kBarriers = kFactors + kTiles * kTile * sizeof(float);
  static_assert(kTileBytes % 1024 == 0, "swizzle patterns start on their natural boundary");

  static constexpr uint32_t kQFull = kBarriers, kQEmpty = kQFull + 8 * kQStages;
  static constexpr uint32_t kKVFull = kQEmpty + 8 * kQStages, kKVEmpty = kKVFull + 8 * kKVStages;
  static constexpr uint32_t kSFull = kKVEmpty + 8 * kKVStages, kSLoaded = kSFull + 8 * kTiles;
  static constexpr uint32_t kPFull = kSLoaded + 8 * kTiles, kPVDone = kPFull + 8 * kTiles;
  static constexpr uint32_t kTmemAddress = kPVDone + 8 * kTiles;
  static constexpr uint32_t kSmemBytes = kTmemAddress + 16 + 1024;  // 1024: alignment of the start
  static_assert(kSmemBytes == launch_smem_bytes(kHeadDim) && kSmemBytes <= 227 * 1024, "SMEM");
};

struct Span {
  int first, end;
};

// One work item: 256 query rows of one head. Every role derives it from the item's number.
struct Work {
  int batch, head, row;  // row: first query row, in the sequence
  int seqlen_q, seqlen_k;
  int q_start, k_start;  // packed: first token of the sequence; dense: 0
  int q_atom, k_atom;    // index of the scale atom of tile 0 of the sequence and head
  Window window;
  TileRange range0, range1;  // of the two query tiles
  int first, end;            // key tiles that at least one of them visits

  FAMX_DEVICE Span span() const { return {first, end}; }
  FAMX_DEVICE int steps() const { return end - first; }
  FAMX_DEVICE int key_tile(int step) const { return end - 1 - step; }
  FAMX_DEVICE int rows(int tile) const { return min(seqlen_q - row - tile * kTile, kTile); }
  FAMX_DEVICE TileRange range(int tile) const { return tile == 0 ? range0 : range1; }
  FAMX_DEVICE bool wants_col(int key_tile) const {
    return range0.full(key_tile) || range1.full(key_tile);
  }
  FAMX_DEVICE bool wants_token(int key_tile) const {
    return range0.cut(key_tile) || range1.cut(key_tile);
  }
  // Keys of the tile that exist; less than kTile on a sequence's last tile only.
  FAMX_DEVICE int keys(int key_tile) const { return min(seqlen_k - key_tile * kTile, kTile); }

  FAMX_DEVICE Work(const AttnFwdParams& p, int item) {
    const int total = p.heads * p.batch;
    const int group = item / (p.q_blocks * p.heads_at_once) * p.heads_at_once;  // its first head
    const int in_group = min(p.heads_at_once, total - group);
    const int rest = item - group * p.q_blocks;
    const int block = p.q_blocks - 1 - rest / in_group;
    const int global_head = group + rest % in_group;
    batch = global_head / p.heads;
    head = global_head % p.heads;
    row = block * kTiles * kTile;
    seqlen_q = p.seqlen_q, seqlen_k = p.seqlen_k;
    q_start = k_start = 0;
    int key_head = head / p.heads_per_kv;
    if (p.cu_seqlens_q) {
      q_start = p.cu_seqlens_q[batch], k_start = p.cu_seqlens_k[batch];
      seqlen_q = p.cu_seqlens_q[batch + 1] - q_start;
      seqlen_k = p.cu_seqlens_k[batch + 1] - k_start;
      q_atom = head * p.q_scale_tiles + q_start / kTile + batch;
      k_atom = key_head * p.k_scale_tiles + k_start / kTile + batch;
    } else {
      q_atom = (batch * p.heads + head) * p.q_scale_tiles;
      k_atom = (batch * (p.heads / p.heads_per_kv) + key_head) * p.k_scale_tiles;
    }
    window = {p.window_left, p.window_right, seqlen_k - seqlen_q, seqlen_k};
    range0 = TileRange::of(window, row, min(row + kTile, seqlen_q));
    range1 = TileRange::of(window, row + kTile, min(row + 2 * kTile, seqlen_q));
    first = range0.empty()   ? range1.first
            : range1.empty() ? range0.first
                             : min(range0.first, range1.first);
    end = max(range0.end, range1.end);
  }
};

FAMX_DEVICE int work_items(const AttnFwdParams& p) { return p.q_blocks * p.heads * p.batch; }

}  // namespace flash_attn_mx::fwd
