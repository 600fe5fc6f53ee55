// What the host needs to launch the quantiser. Plain C++.
#pragma once

#include <cstdint>

namespace flash_attn_mx::quantize {

constexpr uint32_t kLaunchThreads = 128;
constexpr int kLaunchTile = 128;  // tokens of a CTA

// head_dim that one instance serves in one pass; a larger one takes several passes of 128.
constexpr int launch_tile(int head_dim) { return head_dim <= 64 ? 64 : 128; }

}  // namespace flash_attn_mx::quantize
