// exp2 of pairs on two pipes, row maxima, the exponent of a tile, and what a row keeps between tiles.
// docs/numerics.md section 3 is the specification.
#pragma once

#include "common/ptx.cuh"

namespace flash_attn_mx {

constexpr int kMinTileExponent = -119;     // the scale byte 127 + n - 8 stays >= 0
constexpr float kMaxTileExponent = 60.0f;  // above it the row reference moves
// x = S * c is rounded before the reference is subtracted only where |x| is this large; elsewhere one fma does both. The
// reference is a rounded x, so that its distance to the exact product is half an ulp of it: 2^-14 here, but without
// bound for large logits (the largest p would not be 1).
constexpr float kFarLogit = 1024.0f;
constexpr float kInfinity = __builtin_huge_valf();
// Adding 1.5 * 2^23 leaves an integer in the low mantissa bits.
constexpr float kRoundToInteger = 12582912.0f;

// Spreads `chosen` of 64 pairs evenly, so that the two pipes work side by side.
constexpr bool on_fma_pipe(int pair, int chosen) {
  return (pair + 1) * chosen / 64 != pair * chosen / 64;
}

// 2^(s * scale + bias) for s * scale + bias <= 8; below -120 it is 2^-120 on the FMA pipe.
struct Exp2 {
  ptx::Float2 scale, bias;
  float scale_128, bias_128;

  FAMX_DEVICE Exp2(float scale_log2, float b)
      : scale(ptx::pack(scale_log2, scale_log2)),
        bias(ptx::pack(b, b)),
        scale_128(scale_log2 * (1.0f / 128)),
        bias_128(__fmaf_rn(b, 1.0f / 128, 120.0f / 128)) {}

  FAMX_DEVICE ptx::Float2 mufu(float s0, float s1) const {
    const ptx::Float2 y = ptx::fma(ptx::pack(s0, s1), scale, bias);
    return ptx::pack(ptx::exp2_approx(ptx::low(y)), ptx::exp2_approx(ptx::high(y)));
  }

  // y = 128 z - 120 with z clamped to [0, 1]; 2^y = 2^floor(y) * 2^frac(y), the second factor by a polynomial whose
  // relative error is at most 2.9e-6 and 0 at integers. (Degree 3 would save an instruction per pair and err by 8.6e-5:
  // more payloads of P would round differently from the portable path's, and LSE would err by more than 1e-5.)
  FAMX_DEVICE ptx::Float2 polynomial(float s0, float s1) const {
    using namespace ptx;
    const Float2 z =
        pack(fma_saturate(s0, scale_128, bias_128), fma_saturate(s1, scale_128, bias_128));
    const Float2 k128 = pack(128.0f, 128.0f);
    const Float2 magic = pack(kRoundToInteger - 120, kRoundToInteger - 120);
    const Float2 t = fma_down(z, k128, magic);  // low bits: floor(y)
    const Float2 minus_floor = fma(t, pack(-1.0f, -1.0f), magic);
    const Float2 f = fma(z, k128, minus_floor);
    Float2 q = fma(f, pack(0.0134266838f, 0.0134266838f), pack(0.0522424728f, 0.0522424728f));
    q = fma(q, f, pack(0.241280198f, 0.241280198f));
    q = fma(q, f, pack(0.693044841f, 0.693044841f));
    q = fma(q, f, pack(1.0f, 1.0f));
    return pack(add_exponent(low(q), low(t)), add_exponent(high(q), high(t)));
  }

 private:
  static FAMX_DEVICE float add_exponent(float q, float t) {
    return __int_as_float(__float_as_int(q) + (__float_as_int(t) << 23));
  }
};

// Largest of the 128 values, NaN if one is NaN.
FAMX_DEVICE float row_max(const uint32_t (&s)[4][32]) {
  float m[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    m[k] = ptx::max_nan(__uint_as_float(s[k][0]), __uint_as_float(s[k][1]));
#pragma unroll
    for (int j = 2; j < 32; j += 2)
      m[k] = ptx::max_nan(m[k], __uint_as_float(s[k][j]), __uint_as_float(s[k][j + 1]));
  }
  return ptx::max_nan(ptx::max_nan(m[0], m[1], m[2]), m[3]);
}

// What a row carries from tile to tile.
struct RowState {
  float reference = -kInfinity;
  float sum = 0.0f;            // sum of 2^(x - reference)
  float sum_quantised = 0.0f;  // what rounding P adds to the largest term of each tile

  FAMX_DEVICE void rescale(float factor) {
    sum *= factor;
    sum_quantised *= factor;
  }
};

// n = max(ceil(m - r), -119) of a tile. NaN goes through: the sums of the row become NaN.
struct TileExponent {
  float value;  // n
  uint32_t
      byte;  // low byte: n + 119, which is also the scale byte 127 + n - 8; the bits above hold something else

  explicit FAMX_DEVICE TileExponent(float distance) {
    constexpr float kMagic = kRoundToInteger - kMinTileExponent;
    const float t = ptx::add_up(ptx::max_nan(distance, float(kMinTileExponent)), kMagic);
    value = t - kMagic;
    byte = __float_as_uint(t);
  }
  FAMX_DEVICE uint32_t bytes() const {
    return __byte_perm(byte, 0, 0x0000);
  }  // four times the scale byte
  FAMX_DEVICE float weight_256() const {
    return __uint_as_float(byte << 23);
  }  // 2^(n - 8), 0 for n = -119
};

// q(p) - p: what rounding to three fraction bits adds to p in (kTop / 2, kTop].
template <int kTop>
FAMX_DEVICE float rounding_of_largest(float p) {
  constexpr float kMagic = kRoundToInteger * kTop / 16;
  return ((p + kMagic) - kMagic) - p;
}

}  // namespace flash_attn_mx
