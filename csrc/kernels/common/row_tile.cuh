// The row tile of a CTA in the passes before and after attn_bwd: a one-dimensional grid over query tiles, heads, sequences.
#pragma once

#include "common/mask.cuh"

namespace flash_attn_mx {

struct RowTile {
  int head, batch;  // batch: index along the tensors' batch dimension, 0 if packed
  int first;        // row of the sequence at which the tile starts
  int start;        // token at which the sequence starts
  int seqlen;
  int64_t index;  // among all row tiles (params.h)

  // p: BwdPreprocessParams or BwdPostprocessParams
  template <class Params>
  FAMX_DEVICE RowTile(const Params& p, int item) {
    const int tiles = (p.seqlen_q + kTile - 1) / kTile;
    const int tile = item % tiles;
    const int sequence = item / tiles / p.heads;
    head = item / tiles % p.heads;
    first = tile * kTile;
    if (p.cu_seqlens_q) {
      batch = 0;
      start = p.cu_seqlens_q[sequence];
      seqlen = p.cu_seqlens_q[sequence + 1] - start;
      index = int64_t(head) * p.row_tiles + start / kTile + sequence + tile;
    } else {
      batch = sequence;
      start = 0;
      seqlen = p.seqlen_q;
      index = (int64_t(sequence) * p.heads + head) * p.row_tiles + tile;
    }
  }

  FAMX_DEVICE int rows() const { return min(seqlen - first, kTile); }
};

}  // namespace flash_attn_mx
