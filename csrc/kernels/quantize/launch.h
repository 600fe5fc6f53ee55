// What the host needs to launch the quantiser. Plain C++.
#pragma once

#include <cstdint>

namespace flash_attn_mx::quantize {

constexpr int kLaunchTile = 128;  // tokens of a CTA

// head_dim that one instance serves in one pass; a larger one takes several passes of 128.
constexpr int launch_tile(int head_dim) { return head_dim <= 64 ? 64 : 128; }

// A warp for every block of 32 tokens x 32 channels.
constexpr int launch_threads(int tile_dim) { return kLaunchTile / 32 * (tile_dim / 32) * 32; }

}  // namespace flash_attn_mx::quantize
