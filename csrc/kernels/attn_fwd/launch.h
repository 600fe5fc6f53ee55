// What the host must know to launch attn_fwd: plain C++, no CUDA. config.cuh checks these figures against its own.
#pragma once

#include <cstdint>

namespace flash_attn_mx::fwd {

constexpr int kLaunchThreads = 384;
constexpr int kLaunchRows = 256;  // query rows of a work item

// Head dim of the tiles that serve this head_dim (zero-filled up to it), 0 if none does. Also the innermost box size of
// the payloads' tensor maps {tile, 128, 1, 1}, and their swizzle: 64B or 128B.
constexpr int launch_tile(int head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 0; }

constexpr int launch_kv_stages(int tile) { return tile == 128 ? 9 : 16; }
constexpr int kLaunchQStages = 2;

// Dynamic shared memory. Payload tiles and their scale atoms; P's scales, ones, factors; barriers, alignment.
constexpr uint32_t launch_smem_bytes(int tile) {
  const uint32_t slots = 2 * kLaunchQStages + launch_kv_stages(tile);
  const uint32_t barriers = 2 * kLaunchQStages + 2 * launch_kv_stages(tile) + 8;
  return slots * (128 * tile + 512) + 2 * 512 + 512 + 2 * 128 * 4 + 8 * barriers + 16 + 1024;
}

// Work items; the grid is as many CTAs, but not more than there are SMs.
constexpr int64_t launch_items(int64_t longest_q, int64_t heads, int64_t batch) {
  return (longest_q + kLaunchRows - 1) / kLaunchRows * heads * batch;
}

}  // namespace flash_attn_mx::fwd
