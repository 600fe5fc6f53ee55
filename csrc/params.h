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

// Backward. A row tile is 128 query rows of one head and sequence; its number is that of q's scale atom above, so that
// arrays "by row tile" hold 128 rows for every tile, whatever the sequence's length.
//   bias          [row tile][128] fp32
//   delta         [row tile][128 · 16 + 512] bytes: -delta as an operand of the MMA and its atom of scales (attn_bwd/delta.cuh)
//   dq_acc        [row tile][4][kHeadDim / 4][32][4] fp32: lots of 4 channels of 32 rows; sums of dS · K, not yet scaled
//   dq_turn       [row tile]: how many warps have added to it, four for each pair of key tiles
// bwd_preprocess writes all of them; attn_bwd reads bias and delta and adds to dq_acc; bwd_postprocess reads dq_acc.

struct BwdPreprocessParams {
  const uint8_t* dout;        // payload, rowwise; rows start at multiples of 4 bytes
  const uint8_t* dout_scale;  // atoms of 512 bytes
  const void* out;            // O as the forward returned it
  const float* lse;
  float* bias;       // -LSE · log2(e); -inf for rows that see no key or do not exist
  uint8_t* delta;    // of -rowsum(dO ∘ O) with the dequantised dO; 0 for rows that do not exist
  float* dq_acc;     // becomes 0; may be null
  int32_t* dq_turn;  // becomes 0; may be null
  const int32_t* cu_seqlens_q;
  int64_t dout_stride_batch, dout_stride_token, dout_stride_head;
  int64_t out_stride_batch, out_stride_token, out_stride_head;
  int64_t lse_stride_batch, lse_stride_head;
  int32_t batch, heads, head_dim;
  int32_t seqlen_q, row_tiles;  // row_tiles: per head, as q_scale_tiles
};

struct AttnBwdParams {
  // Payloads, dimensions as in AttnFwdParams, boxes as attn_bwd/launch.h says. *_col: blocks along the tokens; v_tok: one scale per token.
  TensorMapBytes q, q_col, dout, dout_col, k, k_col, v_tok;
  const uint8_t *q_scale, *q_col_scale, *dout_scale, *dout_col_scale, *k_scale,
      *k_col_scale;            // atoms
  const uint8_t* v_tok_scale;  // plain bytes
  const float* bias;
  const uint8_t* delta;
  float* dq_acc;  // null: dQ is not wanted
  int32_t*
      dq_turn;  // null: pairs of key tiles add to dQ in any order; else in ascending order, the same bits every time
  void *dk, *dv;  // (batch, seqlen_k, heads_k, head_dim); null: not wanted
  const int32_t *cu_seqlens_q, *cu_seqlens_k;
  int64_t v_tok_scale_stride_batch, v_tok_scale_stride_token, v_tok_scale_stride_head;
  int64_t dk_stride_batch, dk_stride_token, dk_stride_head;
  int64_t dv_stride_batch, dv_stride_token, dv_stride_head;
  int32_t batch, heads_k, heads_per_kv, head_dim;
  int32_t seqlen_q, seqlen_k;        // packed: the longest ones
  int32_t row_tiles, k_scale_tiles;  // atoms per head, of q and dout and of k
  int32_t window_left, window_right;
  float scale_log2, softmax_scale;  // scale_log2 = softmax_scale · log2(e); may be negative or 0
  int32_t grads_aligned;            // rows of dk and dv start at 16-byte boundaries
};

struct BwdPostprocessParams {
  const float* dq_acc;
  void* dq;  // (batch, seqlen_q, heads, head_dim)
  const int32_t* cu_seqlens_q;
  int64_t dq_stride_batch, dq_stride_token, dq_stride_head;
  int32_t batch, heads, head_dim;
  int32_t seqlen_q, row_tiles;
  float softmax_scale;
};

// Rowwise and colwise scales are plain bytes, contiguous, or with `atoms` the atoms described above (head_dim <= 128). Payloads are
// contiguous (batch, tokens, heads, head_dim). An axis whose payload is null is not wanted.
struct QuantizeParams {
  const void* x;
  uint8_t *row, *row_scale, *col, *col_scale, *tok, *tok_scale;
  const int32_t* cu_seqlens;  // null: dense
  int64_t x_stride_batch, x_stride_token, x_stride_head;
  int32_t sequences,
      tokens;  // dense: batch and seqlen; packed: tokens of all sequences and behind them
  int32_t heads, head_dim;
  int32_t tiles;     // atoms per head
  int32_t round_up;  // RCEIL; else FLOOR
  int32_t e5m2, atoms;
};

}  // namespace flash_attn_mx
