// What the host must know to launch the backward: plain C++, no CUDA. The kernels check these figures against their own.
// Order: bwd_preprocess, attn_bwd, bwd_postprocess (unless dQ is not wanted), on one stream. Tiles as for attn_fwd.
#pragma once

#include <cstdint>

namespace flash_attn_mx::bwd {

constexpr int kLaunchThreads = 512;  // attn_bwd
constexpr int kLaunchPassThreads =
    256;                           // bwd_preprocess, bwd_postprocess; no dynamic shared memory
constexpr int kLaunchRows = 128;   // rows of a row tile, keys of a CTA
constexpr int kLaunchCluster = 2;  // CTAs of a cluster of attn_bwd, which share a pair of key tiles

// Box {columns, rows, 1, 1} of a payload's tensor map; the swizzle spans the columns.
struct LaunchBox {
  int columns, rows;
};
constexpr LaunchBox launch_key_box(int tile) { return {tile, kLaunchRows}; }  // k, v_tok
// A CTA holds half of the rows of a tile of q and dout, and half of the channels of the colwise copies.
constexpr LaunchBox launch_row_box(int tile) { return {tile, kLaunchRows / kLaunchCluster}; }
constexpr LaunchBox launch_col_box(int tile) { return {tile / kLaunchCluster, kLaunchRows}; }

constexpr int launch_ring_stages(int tile) { return tile == 128 ? 6 : 16; }
constexpr int kLaunchDQStages = 2;

// -delta of a row tile: 16 bytes per row and an atom of scales (attn_bwd/delta.cuh). A stage holds half of the rows. There are as
// many stages as steps whose dO the ring may hold.
constexpr int kLaunchDeltaRowBytes = 16;
constexpr int kLaunchDeltaBytes = kLaunchRows * kLaunchDeltaRowBytes + 512;
constexpr int launch_delta_stages(int tile) { return (launch_ring_stages(tile) + 3) / 4; }

// Dynamic shared memory of attn_bwd. Keys and ring, dS; scale atoms; bias; delta; dQ; barriers, poison, alignment.
constexpr uint32_t launch_smem_bytes(int tile) {
  const uint32_t ring = launch_ring_stages(tile);
  const uint32_t payloads = (3 * 128 + ring * 64) * tile + 5 * 128 * 128;
  const uint32_t scales = (3 + ring + 9) * 512;
  const uint32_t rows = kLaunchRows * kLaunchDeltaRowBytes;
  const uint32_t delta = launch_delta_stages(tile) * (rows / kLaunchCluster + 512) + 2 * rows;
  const uint32_t dq = kLaunchDQStages * 128 * 32 * 4;
  const uint32_t barriers = 1 + 2 * ring + 2 * 2 + 13;
  return payloads + scales + 2 * 128 * 4 + delta + dq + 8 * barriers + 32 + 16 + 1024;
}

// Grid of attn_bwd, a multiple of the cluster: a cluster per pair of key tiles and key head. All of them: a CTA may wait
// for ones with smaller numbers only.
constexpr int64_t launch_items(int64_t longest_k, int64_t heads_k, int64_t batch) {
  const int64_t pair = kLaunchCluster * kLaunchRows;
  return (longest_k + pair - 1) / pair * heads_k * batch * kLaunchCluster;
}
// Grid of the other two: one CTA per row tile, those of a head together, then the heads of a sequence.
constexpr int64_t launch_pass_items(int64_t longest_q, int64_t heads, int64_t batch) {
  return (longest_q + kLaunchRows - 1) / kLaunchRows * heads * batch;
}

// Elements of scratch: bias (fp32, rows), delta (bytes, kLaunchDeltaBytes per row tile), dq_acc (fp32, rows * tile), dq_turn
// (int32, rows / 128).
// row_tiles: tiles of 128 rows per head, as q_scale_tiles; batch 1 if packed.
constexpr int64_t launch_rows(int64_t row_tiles, int64_t heads, int64_t batch) {
  return row_tiles * heads * batch * kLaunchRows;
}

}  // namespace flash_attn_mx::bwd
