// What the host must know to launch the backward: plain C++, no CUDA. The kernels check these figures against their own.
// Order: bwd_preprocess, attn_bwd, bwd_postprocess (unless dQ is not wanted), on one stream. Tiles as for attn_fwd.
#pragma once

#include <cstdint>

namespace flash_attn_mx::bwd {

constexpr int kLaunchThreads = 512;  // attn_bwd
constexpr int kLaunchPassThreads =
    256;  // bwd_preprocess, bwd_postprocess; no dynamic shared memory
constexpr int kLaunchRows =
    128;  // rows of a row tile, keys of a CTA; rows of the tensor maps' boxes
constexpr int kLaunchCluster = 1;  // CTAs of a cluster of attn_bwd

constexpr int launch_ring_stages(int tile) { return tile == 128 ? 8 : 12; }
constexpr int launch_dq_stages(int tile) { return tile == 128 ? 1 : 2; }

// Dynamic shared memory of attn_bwd. Keys and ring, ds; scale atoms; bias and delta; dQ; barriers, alignment.
constexpr uint32_t launch_smem_bytes(int tile) {
  const uint32_t ring = launch_ring_stages(tile);
  const uint32_t payloads = (3 + ring) * 128 * tile + 128 * 128;
  const uint32_t scales = (2 + ring + 4) * 512;
  const uint32_t dq = launch_dq_stages(tile) * 128 * 32 * 4;
  const uint32_t barriers = 1 + 2 * ring + 2 * 2 + 9;
  return payloads + scales + 2 * 2 * 128 * 4 + dq + 8 * barriers + 16 + 1024;
}

// Grid of attn_bwd, a multiple of the cluster: one CTA per key tile and key head. All of them: a CTA may wait for ones
// with smaller numbers only.
constexpr int64_t launch_items(int64_t longest_k, int64_t heads_k, int64_t batch) {
  return (longest_k + kLaunchRows - 1) / kLaunchRows * heads_k * batch;
}
// Grid of the other two: one CTA per row tile, those of a head together, then the heads of a sequence.
constexpr int64_t launch_pass_items(int64_t longest_q, int64_t heads, int64_t batch) {
  return (longest_q + kLaunchRows - 1) / kLaunchRows * heads * batch;
}

// Elements of scratch: bias and minus_delta (fp32, rows each), dq_acc (fp32, rows * tile), dq_turn (int32, rows / 128).
// row_tiles: tiles of 128 rows per head, as q_scale_tiles; batch 1 if packed.
constexpr int64_t launch_rows(int64_t row_tiles, int64_t heads, int64_t batch) {
  return row_tiles * heads * batch * kLaunchRows;
}

}  // namespace flash_attn_mx::bwd
