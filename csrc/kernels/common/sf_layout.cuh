// The swizzled128x4 atom of scale bytes: 128 rows x 4 blocks in 512 bytes (flash_attn_mx/layouts.py has the same formula).
//   byte(row, block) = (row % 32) * 16 + (row / 32) * 4 + block
// The four blocks of a row are one aligned 32-bit word, which tcgen05.cp puts into lane row % 32, column row / 32.
#pragma once

#include "common/ptx.cuh"

namespace flash_attn_mx {

FAMX_DEVICE uint32_t scale_word_offset(int row) { return (row & 31) * 16 + (row >> 5) * 4; }

constexpr uint32_t kScaleOnes = 0x7F7F7F7Fu;  // four times 2^0

// E8M0 byte -> factor: 2^(byte - 127), 0 -> the subnormal 2^-127, 255 -> NaN.
FAMX_DEVICE float scale_factor(uint32_t byte) {
  uint32_t bits = byte == 0 ? 0x00400000u : byte == 255 ? 0x7FC00000u : byte << 23;
  return __uint_as_float(bits);
}

// RCEIL byte of a block with this largest magnitude: smallest power of two >= amax / 448; 127 for 0, 255 for NaN, Inf.
FAMX_DEVICE int rceil_byte(float amax) {
  int bits = __float_as_int(amax) & 0x7FFFFFFF;
  int exponent = bits >> 23;
  int byte = exponent - 8 + ((bits & 0x7FFFFF) > 0x600000);
  byte = max(byte, 0);  // at most 254 - 8 + 1
  byte = bits == 0 ? 127 : byte;
  return exponent == 255 ? 255 : byte;
}

}  // namespace flash_attn_mx
