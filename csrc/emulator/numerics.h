// Number formats and rounding, independent of any instruction.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace flash_attn_mx::emu {

enum class Round : uint8_t { RN, RZ, RM, RP, RNA };

inline float as_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
inline uint32_t as_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}
inline uint64_t as_bits(double f) {
  uint64_t u;
  std::memcpy(&u, &f, 8);
  return u;
}
inline double as_double(uint64_t u) {
  double f;
  std::memcpy(&f, &u, 8);
  return f;
}

constexpr uint32_t kNan32 = 0x7FFFFFFFu;  // what PTX arithmetic returns for f32

// A binary format of at most 32 bits. `max` is the largest finite magnitude's code.
struct FloatFormat {
  int ebits, mbits, bias;
  uint32_t max, inf, nan;  // inf == 0: the format has none
};
extern const FloatFormat kF16, kBF16, kF32, kTF32, kE4M3, kE5M2, kE2M3, kE3M2, kE2M1;

// Rounds v once to the format. satfinite: magnitudes above max, and infinities, become max.
// Without it overflow gives inf (or max where the rounding direction says so); NaN gives the
// format's NaN.
uint32_t encode(double v, const FloatFormat& f, Round r, bool satfinite);
double decode(uint32_t bits, const FloatFormat& f);

inline double f16_value(uint16_t h) { return decode(h, kF16); }
inline double bf16_value(uint16_t h) { return as_float((uint32_t)h << 16); }
inline double e4m3_value(uint8_t b) { return decode(b, kE4M3); }

inline uint16_t bf16_rn(float f) {
  uint32_t u = as_bits(f);
  if (f != f) return 0x7FFF;
  return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

// UE8M0: 2^(x-127), 0xFF = NaN. up: smallest power of two >= |v|, else largest <= |v|.
uint8_t encode_ue8m0(double v, bool up, bool satfinite);
inline double ue8m0_value(uint8_t x) { return x == 0xFF ? NAN : std::ldexp(1.0, (int)x - 127); }

// a + b with the discarded part folded into the last bit, so that a second rounding to fewer bits
// is right.
double add_round_odd(double a, double b);

// Truncates toward zero to f32 (overflow gives infinity).
float truncate_f32(double v);

}  // namespace flash_attn_mx::emu
