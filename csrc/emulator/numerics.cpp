#include "numerics.h"

namespace flash_attn_mx::emu {

const FloatFormat kF16{5, 10, 15, 0x7BFF, 0x7C00, 0x7FFF};
const FloatFormat kBF16{8, 7, 127, 0x7F7F, 0x7F80, 0x7FFF};
const FloatFormat kF32{8, 23, 127, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF};
const FloatFormat kTF32{8, 10, 127, 0x3FBFF, 0x3FC00, 0x3FFFF};
const FloatFormat kE4M3{4, 3, 7, 0x7E, 0, 0x7F};
const FloatFormat kE5M2{5, 2, 15, 0x7B, 0x7C, 0x7F};
const FloatFormat kE2M3{2, 3, 1, 0x1F, 0, 0};
const FloatFormat kE3M2{3, 2, 3, 0x1F, 0, 0};
const FloatFormat kE2M1{2, 1, 1, 0x7, 0, 0};

uint32_t encode(double v, const FloatFormat& f, Round r, bool satfinite) {
  if (v != v) return f.nan ? f.nan : f.max;
  uint32_t sign = std::signbit(v) ? 1u << (f.ebits + f.mbits) : 0;
  double a = std::fabs(v);
  if (a == 0) return sign;
  const bool neg = sign != 0;
  uint32_t over = satfinite || !f.inf ? f.max : f.inf;
  if (std::isinf(a)) return sign | over;
  int e;
  std::frexp(a, &e);  // a = m * 2^e, m in [0.5, 1)
  int emin = 1 - f.bias;
  int q = (e - 1 < emin ? emin : e - 1) - f.mbits;  // unit in the last place = 2^q
  double n = std::ldexp(a, -q), fl = std::floor(n), frac = n - fl;
  bool up = false;
  switch (r) {
    case Round::RN:
      up = frac > 0.5 || (frac == 0.5 && std::fmod(fl, 2) == 1);
      break;
    case Round::RNA:
      up = frac >= 0.5;
      break;
    case Round::RZ:
      break;
    case Round::RM:
      up = neg && frac > 0;
      break;
    case Round::RP:
      up = !neg && frac > 0;
      break;
  }
  uint64_t m = (uint64_t)fl +
               up;  // significand with its hidden bit; a carry into the exponent just works below
  uint64_t code = e - 1 < emin ? m : m + ((uint64_t)(e - 1 + f.bias - 1) << f.mbits);
  if (code > f.max) {
    if (!satfinite && f.inf &&
        (r == Round::RZ || (r == Round::RM && !neg) || (r == Round::RP && neg)))
      over = f.max;
    return sign | over;
  }
  return sign | (uint32_t)code;
}

double decode(uint32_t bits, const FloatFormat& f) {
  uint32_t mag = bits & ((1u << (f.ebits + f.mbits)) - 1);
  bool neg = bits >> (f.ebits + f.mbits) & 1;
  double v;
  if (mag > f.max) {
    v = f.inf && mag == f.inf ? INFINITY : NAN;
  } else {
    int e = (int)(mag >> f.mbits);
    uint32_t m = mag & ((1u << f.mbits) - 1);
    v = e ? std::ldexp((double)(m | 1u << f.mbits), e - f.bias - f.mbits)
          : std::ldexp((double)m, 1 - f.bias - f.mbits);
  }
  return neg ? -v : v;
}

uint8_t encode_ue8m0(double v, bool up, bool satfinite) {
  if (v != v) return 0xFF;
  double a = std::fabs(v);
  if (a == 0) return 0;
  if (std::isinf(a)) return satfinite ? 0xFE : 0xFF;
  int e;
  double m = std::frexp(a, &e);  // a = m * 2^e
  int x = e - 1 + 127;
  if (up && m != 0.5) ++x;
  if (x < 0) x = 0;
  if (x > 0xFE) return satfinite ? 0xFE : 0xFF;
  return (uint8_t)x;
}

double add_round_odd(double a, double b) {
  double s = a + b;
  if (!std::isfinite(s)) return s;
  double bb = s - a, err = (a - (s - bb)) + (b - bb);
  if (err == 0) return s;
  uint64_t u = as_bits(s);
  if (u & 1) return s;
  // the exact sum lies between s and its neighbour on err's side; that neighbour has an odd last
  // bit
  return (err > 0) == (s > 0) ? as_double(u + 1) : as_double(u - 1);
}

float truncate_f32(double v) {
  if (v != v) return as_float(kNan32);
  float f = (float)v;
  if (std::isinf(f) || f == 0) {
    if (std::isinf(f)) return f;
  }
  if (std::fabs((double)f) > std::fabs(v)) f = as_float(as_bits(f) - 1);
  return f;
}

}  // namespace flash_attn_mx::emu
