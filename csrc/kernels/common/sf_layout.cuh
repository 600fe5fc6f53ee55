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

// Byte of a block whose largest magnitude has these fp32 bits (docs/numerics.md §1): 127 for 0, 255 for NaN, Inf.
// kEmax: exponent of the format's largest value.   round_up: RCEIL, the smallest power of two that keeps it in range; else FLOOR.
template <int kEmax = 8>
FAMX_DEVICE int scale_byte(uint32_t amax, bool round_up) {
  const int exponent = amax >> 23;
  int byte = exponent - kEmax + (round_up && (amax & 0x7FFFFF) > 0x600000);
  byte = max(byte, 0);  // at most 254 - 8 + 1
  byte = amax == 0 ? 127 : byte;
  return exponent == 255 ? 255 : byte;
}

FAMX_DEVICE int rceil_byte(float amax) {
  return scale_byte(__float_as_uint(amax) & 0x7FFFFFFF, true);
}

}  // namespace flash_attn_mx
