// -delta as an operand of the MMA: dP^T - delta is one more block of 32 in the contraction of dP^T = V · dO^T. Its left rows,
// one per key, all hold the same weights; its right row of a query holds -delta in pieces of falling size, so that
//   sum of weight[i] · piece[i] · 2^(byte - 127) = -delta, all 24 bits of it (beyond 2^-127 · 2^-17).
// The compute warps would otherwise read every delta as a broadcast from shared memory: 256 cycles per tile (docs/backward.md).
#pragma once

#include "attn_bwd/launch.h"
#include "common/ptx.cuh"
#include "common/sf_layout.cuh"

namespace flash_attn_mx::bwd {

// Of the 32 bytes of a row 16 are stored, those behind them are zeros. Rows lie 16 bytes apart: no swizzle. The scale of a
// query is block 0 of an atom behind the rows of a row tile.
constexpr int kDeltaRowBytes = kLaunchDeltaRowBytes;
constexpr int kDeltaPieces = 6;
// E4M3: pieces 0-3 have the weight 1, 4 and 5 the weight 2^-8.
constexpr uint32_t kDeltaWeights0 = 0x38383838u, kDeltaWeights4 = 0x00000202u;
constexpr float delta_weight(int piece) { return piece < 4 ? 1.0f : 0x1p-8f; }

// The pieces of x; their scale byte. NaN and Inf become NaN.
FAMX_DEVICE uint32_t delta_pieces(float x, uint32_t (&words)[2]) {
  const int exponent = __float_as_uint(x) >> 23 & 0xFF;
  words[0] = words[1] = 0;
  if (exponent == 0xFF) {
    words[0] = 0x7F;
    return 127;
  }
  const int byte = max(exponent - 7, 0);
  float rest = x * scale_factor(254 - byte);  // in [128, 256), unless x is tiny
#pragma unroll
  for (int i = 0; i < kDeltaPieces; ++i) {
    const float weight = delta_weight(i);
    const uint32_t piece = ptx::pack_e4m3(rest / weight, 0.0f, 0.0f, 0.0f) & 0xFF;
    rest = __fmaf_rn(-weight, ptx::unpack_e4m3(piece).x, rest);  // exact
    words[i / 4] |= piece << (8 * (i % 4));
  }
  return byte;
}

}  // namespace flash_attn_mx::bwd
