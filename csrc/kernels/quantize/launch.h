// What the host needs to launch the quantiser. Plain C++.
#pragma once

#include <cstdint>

namespace flash_attn_mx::quantize {

constexpr int kLaunchTile = 128;  // tokens of a CTA

// head_dim that one instance serves in one pass; a larger one takes several passes of 128.
constexpr int launch_tile(int head_dim) { return head_dim <= 64 ? 64 : 128; }

constexpr int kLaunchLanes = 8;  // that share a token, 16 bytes each

// A warp for every 32 tokens of kLaunchLanes lanes.   size: bytes of an element of x
constexpr int launch_threads(int tile_dim, int size) {
  return kLaunchTile / 32 * (tile_dim * size / (16 * kLaunchLanes)) * 32;
}

}  // namespace flash_attn_mx::quantize
