// The seam between host and device: plain structs, no torch, no CuTe. A kernel receives one of them by value.
#pragma once

#include <cstdint>

namespace flash_attn_mx {

// The opaque 128 bytes that cuTensorMapEncodeTiled fills.
struct alignas(64) TensorMapBytes {
  uint8_t bytes[128];
};

// Strides are in elements of the tensor. Tensor maps have the dimensions (head_dim, tokens, heads, batch), innermost
// first, uint8, boxes of kHeadDim x 128 x 1 x 1, zero fill; the swizzle spans kHeadDim bytes. Packed sequences have batch 1.
//
// q_scale, k_scale and v_scale are swizzled128x4 atoms of 512 bytes, one per head and tile of 128 tokens:
//   atom = (b * heads + h) * tiles + tile, where tiles = ceil(seqlen / 128)                        dense
//   atom = h * tiles + cu[b] / 128 + b + tile, where tiles = total / 128 + number of sequences      packed
// Rows of an atom: tokens (q, k) or channels (v); columns: blocks of 32 along head_dim (q, k) or tokens (v).
// Bytes of rows and columns that no element uses may hold anything. Atoms start at 16-byte boundaries.
struct AttnFwdParams {
  // Payloads: q, k rowwise; v colwise; v_tok tokenwise, read on cut tiles only: without a window any valid map will do.
  TensorMapBytes q, k, v, v_tok;
  const uint8_t* q_scale;
  const uint8_t* k_scale;
  const uint8_t* v_scale;
  const uint8_t* v_tok_scale;   // plain bytes, one per token and head
  void* out;                    // (batch, seqlen_q, heads, head_dim)
  float* lse;                   // natural log; the stride of a token is 1
  const int32_t* cu_seqlens_q;  // null: dense
  const int32_t* cu_seqlens_k;
  int64_t v_tok_scale_stride_batch, v_tok_scale_stride_token, v_tok_scale_stride_head;
  int64_t out_stride_batch, out_stride_token, out_stride_head;
  int64_t lse_stride_batch, lse_stride_head;
  int32_t batch, heads, heads_per_kv,
      head_dim;                          // heads_per_kv: query heads that share one key head
  int32_t seqlen_q, seqlen_k;            // packed: the longest ones
  int32_t q_scale_tiles, k_scale_tiles;  // atoms per head, of q and of k and v
  int32_t window_left, window_right;     // -1: unlimited
  int32_t q_blocks;                      // work items per head: ceil(seqlen_q / 256)
  float scale_log2;     // |softmax_scale| * log2(e), at least the smallest normal float
  int32_t negate;       // softmax_scale < 0
  int32_t out_aligned;  // rows of out start at 16-byte boundaries
  // Heads (of all batches, counted through) that are worked on at the same time: as many as have K and V in L2 together,
  // at least 1. Inside such a group the last query blocks come first, the longest ones under a causal mask.
  int32_t heads_at_once;
};

}  // namespace flash_attn_mx
