// Floating point: f32 and f32x2 vectorised, f16/bf16/f64 scalar. Results follow IEEE except where
// PTX says approx.
#include <immintrin.h>

#include "isa.h"
#include "numerics.h"

namespace flash_attn_mx::emu {
namespace {

enum Flags : uint32_t { kFtz = 1, kSat = 2, kRelu = 4, kNanProp = 8, kXorSign = 16, kAbs = 32 };
enum Op { kAdd, kSub, kMul, kFma };

inline float ftz(float f) { return std::fabs(f) < 0x1p-126f ? std::copysign(0.0f, f) : f; }
template <class T>
inline T ftz16(T f) {
  return std::fabs(f) < (T)0x1p-14 ? std::copysign((T)0, f) : f;
}
inline float canon(float f) { return f != f ? as_float(kNan32) : f; }

// Runs f under another rounding mode. The asm statements keep the arithmetic between the two
// control-word writes.
template <class F>
float rounded(Round r, float a, float b, float c, F f) {
  static const unsigned kMode[] = {0x0000, 0x6000, 0x2000, 0x4000};
  unsigned old = _mm_getcsr();
  _mm_setcsr((old & ~0x6000u) | kMode[(int)r]);
  asm volatile("" : "+x"(a), "+x"(b), "+x"(c)::"memory");
  float y = f(a, b, c);
  asm volatile("" : "+x"(y)::"memory");
  _mm_setcsr(old);
  return y;
}
template <class F>
double rounded(Round r, double a, double b, double c, F f) {
  static const unsigned kMode[] = {0x0000, 0x6000, 0x2000, 0x4000};
  unsigned old = _mm_getcsr();
  _mm_setcsr((old & ~0x6000u) | kMode[(int)r]);
  asm volatile("" : "+x"(a), "+x"(b), "+x"(c)::"memory");
  double y = f(a, b, c);
  asm volatile("" : "+x"(y)::"memory");
  _mm_setcsr(old);
  return y;
}

template <int K, class T>
inline T apply(T a, T b, T c) {
  if constexpr (K == kAdd)
    return a + b;
  else if constexpr (K == kSub)
    return a - b;
  else if constexpr (K == kMul)
    return a * b;
  else
    return std::fma(a, b, c);
}

// N = 32 (f32) or 64 (f32x2: two floats per lane, low word first).
template <int K, int N>
void arith_f32(Exec& x, const Instr& in, uint32_t mask) {
  using L = std::conditional_t<N == 32, uint32_t, uint64_t>;
  alignas(32) L t[3][32];
  alignas(32) float v[3][N];
  alignas(32) float out[N];
  const float* p[3] = {nullptr, nullptr, nullptr};
  constexpr int n_in = K == kFma ? 3 : 2;
  for (int i = 0; i < n_in; ++i)
    p[i] = reinterpret_cast<const float*>(src<L>(x, in.op[1 + i], t[i]));
  const uint32_t fl = in.aux[0];
  if (fl & kFtz) {
    for (int i = 0; i < n_in; ++i) {
      for (int j = 0; j < N; ++j) v[i][j] = ftz(p[i][j]);
      p[i] = v[i];
    }
  }
  const Round r = (Round)in.aux[1];
  const float* c = K == kFma ? p[2] : p[0];
  if (r == Round::RN) {
    for (int j = 0; j < N; ++j) out[j] = canon(apply<K>(p[0][j], p[1][j], c[j]));
  } else {
    for (int j = 0; j < N; ++j) out[j] = canon(rounded(r, p[0][j], p[1][j], c[j], apply<K, float>));
  }
  if (fl & kFtz)
    for (int j = 0; j < N; ++j) out[j] = ftz(out[j]);
  if (fl & kSat)
    for (int j = 0; j < N; ++j) out[j] = out[j] > 0 ? (out[j] < 1 ? out[j] : 1.0f) : 0.0f;
  put(x, in.op[0], reinterpret_cast<L*>(out), mask);
}

template <int K>
void arith_f64(Exec& x, const Instr& in, uint32_t mask) {
  double ta[32], tb[32], tc[32], out[32];
  const double *a = src(x, in.op[1], ta), *b = src(x, in.op[2], tb),
               *c = K == kFma ? src(x, in.op[3], tc) : a;
  const Round r = (Round)in.aux[1];
  for (int i = 0; i < 32; ++i) {
    double y = r == Round::RN ? apply<K>(a[i], b[i], c[i])
                              : rounded(r, a[i], b[i], c[i], apply<K, double>);
    out[i] = y;  // NaN payloads pass and 0 * inf is 0xFFF8000000000000, on sm_90 as on x86
  }
  put(x, in.op[0], out, mask);
}

// f16/bf16, one or two per lane: computed exactly (or rounded to odd) in f64, then rounded once.
template <int K, bool kBf, int N>
void arith_half(Exec& x, const Instr& in, uint32_t mask) {
  using L = std::conditional_t<N == 1, uint16_t, uint32_t>;
  L t[3][32], out[32];
  const L* p[3];
  constexpr int n_in = K == kFma ? 3 : 2;
  for (int i = 0; i < n_in; ++i) p[i] = src<L>(x, in.op[1 + i], t[i]);
  const FloatFormat& f = kBf ? kBF16 : kF16;
  for (int i = 0; i < 32; ++i) {
    L o = 0;
    for (int h = 0; h < N; ++h) {
      double v[3] = {0, 0, 0};
      for (int k = 0; k < n_in; ++k) {
        v[k] = decode((uint16_t)(p[k][i] >> (16 * h)), f);
        if ((in.aux[0] & kFtz) && !kBf) v[k] = ftz16(v[k]);
      }
      double y = K == kAdd   ? add_round_odd(v[0], v[1])
                 : K == kSub ? add_round_odd(v[0], -v[1])
                 : K == kMul ? v[0] * v[1]
                             : add_round_odd(v[0] * v[1], v[2]);
      if ((in.aux[0] & kRelu) && y <= 0) y = 0;  // -0 too
      if (in.aux[0] & kSat) y = y > 0 ? (y < 1 ? y : 1.0) : 0.0;
      uint32_t b = encode(y, f, (Round)in.aux[1], false);
      if ((in.aux[0] & kFtz) && !kBf && (b & 0x7C00) == 0) b &= 0x8000;
      o |= (L)((L)b << (16 * h));
    }
    out[i] = o;
  }
  put(x, in.op[0], out, mask);
}

// d.f32 = a.f16 (*|+) … with f32 addend: fma.f32.bf16 d, a, b, c takes 16-bit a and b; add.f32.bf16
// d, a, c 16-bit a.
template <int K>
void mixed(Exec& x, const Instr& in, uint32_t mask) {
  uint16_t ta[32], tb[32];
  float tc[32], out[32];
  const FloatFormat& f = in.aux[2] ? kBF16 : kF16;
  const uint16_t *a = src(x, in.op[1], ta), *b = K == kFma ? src(x, in.op[2], tb) : nullptr;
  const float* c = src(x, in.op[K == kFma ? 3 : 2], tc);
  for (int i = 0; i < 32; ++i) {
    float p = (float)decode(a[i], f), q = K == kFma ? (float)decode(b[i], f) : 1.0f;
    float y = rounded((Round)in.aux[1], p, q, c[i], [](float s, float t, float u) {
      return K == kFma ? std::fma(s, t, u) : K == kAdd ? s + u : s - u;
    });
    y = canon(y);
    if (in.aux[0] & kSat) y = y > 0 ? (y < 1 ? y : 1.0f) : 0.0f;
    out[i] = y;
  }
  put(x, in.op[0], out, mask);
}

template <bool kMax>
inline float minmax1(float a, float b, bool nan) {
  if (a != a || b != b) {
    if (nan || (a != a && b != b)) return as_float(kNan32);
    return a != a ? b : a;
  }
  if (a == 0 && b == 0) return kMax ? (std::signbit(a) ? b : a) : (std::signbit(a) ? a : b);
  return kMax ? (a > b ? a : b) : (a < b ? a : b);
}

template <bool kMax>
void minmax_f32(Exec& x, const Instr& in, uint32_t mask) {
  float t[3][32], v[3][32], out[32];
  const uint32_t fl = in.aux[0];
  const int n = in.nops - 1;
  for (int k = 0; k < n; ++k) {
    const float* p = src(x, in.op[1 + k], t[k]);
    for (int i = 0; i < 32; ++i) {
      float f = fl & kFtz ? ftz(p[i]) : p[i];
      v[k][i] = fl & kAbs ? std::fabs(f) : f;
    }
  }
  const bool nan = fl & kNanProp;
  for (int i = 0; i < 32; ++i) {
    if (fl & kXorSign) {
      float r = minmax1<kMax>(std::fabs(v[0][i]), std::fabs(v[1][i]), nan);
      bool s = std::signbit(v[0][i]) ^ std::signbit(v[1][i]);
      out[i] = r != r ? r : s ? -r : r;
    } else {
      float r = minmax1<kMax>(v[0][i], v[1][i], nan);
      out[i] = n == 3 ? minmax1<kMax>(r, v[2][i], nan) : r;
    }
  }
  put(x, in.op[0], out, mask);
}

template <bool kMax>
void minmax_f64(Exec& x, const Instr& in, uint32_t mask) {
  double ta[32], tb[32], out[32];
  const double *a = src(x, in.op[1], ta), *b = src(x, in.op[2], tb);
  for (int i = 0; i < 32; ++i) {
    double p = a[i], q = b[i];
    if (p != p || q != q)
      out[i] = p != p ? q : p;
    else if (p == q)
      out[i] = std::signbit(p) == kMax ? q : p;  // -0 < +0
    else
      out[i] = (p > q) == kMax ? p : q;
  }
  put(x, in.op[0], out, mask);
}

template <bool kMax, int N>
void minmax_half(Exec& x, const Instr& in, uint32_t mask) {
  using L = std::conditional_t<N == 1, uint16_t, uint32_t>;
  L ta[32], tb[32], out[32];
  const L *a = src(x, in.op[1], ta), *b = src(x, in.op[2], tb);
  const FloatFormat& f = in.aux[2] ? kBF16 : kF16;
  for (int i = 0; i < 32; ++i) {
    L o = 0;
    for (int h = 0; h < N; ++h) {
      float p = (float)decode((uint16_t)(a[i] >> 16 * h), f),
            q = (float)decode((uint16_t)(b[i] >> 16 * h), f), r;
      if ((in.aux[0] & kFtz) && !in.aux[2]) p = ftz16(p), q = ftz16(q);
      if (in.aux[0] & kXorSign) {
        r = minmax1<kMax>(std::fabs(p), std::fabs(q), in.aux[0] & kNanProp);
        if (r == r && (std::signbit(p) ^ std::signbit(q))) r = -r;
      } else {
        r = minmax1<kMax>(p, q, in.aux[0] & kNanProp);
      }
      o |= (L)((L)encode(r, f, Round::RN, false) << 16 * h);
    }
    out[i] = o;
  }
  put(x, in.op[0], out, mask);
}

// abs and neg of one number as sm_90 does them: NaN becomes the canonical one (f64: quiet, sign kept).
uint64_t absneg1(uint64_t v, Ty t, bool neg, bool fz) {
  const int bits = t == Ty::F64 ? 64 : t == Ty::F32 ? 32 : 16;
  const int mant = t == Ty::F64 ? 52 : t == Ty::F32 ? 23 : t == Ty::F16 ? 10 : 7;
  const uint64_t sign = 1ull << (bits - 1), inf = sign - (1ull << mant);
  if ((v & ~sign) > inf) return t == Ty::F64 ? v | 1ull << (mant - 1) : sign - 1;
  if (fz && !(v & inf)) v &= sign;
  return neg ? v ^ sign : v & ~sign;
}
template <class L>
void absneg(Exec& x, const Instr& in, uint32_t mask) {
  L ta[32], out[32];
  const L* a = src(x, in.op[1], ta);
  const Ty t = (Ty)in.aux[2];
  const bool neg = in.aux[1], fz = in.aux[0] & kFtz, two = in.aux[3];
  for (int i = 0; i < 32; ++i) {
    if (two)
      out[i] = (L)(absneg1((uint64_t)a[i] & 0xFFFF, t, neg, fz) |
                   absneg1((uint64_t)a[i] >> 16 & 0xFFFF, t, neg, fz) << 16);
    else
      out[i] = (L)absneg1(a[i], t, neg, fz);
  }
  put(x, in.op[0], out, mask);
}

template <class T>
void do_copysign(Exec& x, const Instr& in, uint32_t mask) {  // d = b with the sign of a
  T ta[32], tb[32], out[32];
  const T *a = src(x, in.op[1], ta), *b = src(x, in.op[2], tb);
  for (int i = 0; i < 32; ++i) out[i] = std::copysign(b[i], a[i]);
  put(x, in.op[0], out, mask);
}

template <class T>
void do_testp(Exec& x, const Instr& in, uint32_t mask) {
  T ta[32];
  const T* a = src(x, in.op[1], ta);
  uint32_t r = 0;
  for (int i = 0; i < 32; ++i) {
    int c = std::fpclassify(a[i]);
    bool b = false;
    switch (in.aux[0]) {
      case 0:
        b = c != FP_NAN && c != FP_INFINITE;
        break;
      case 1:
        b = c == FP_INFINITE;
        break;
      case 2:
        b = c != FP_NAN;
        break;
      case 3:
        b = c == FP_NAN;
        break;
      case 4:
        b = c == FP_NORMAL || c == FP_ZERO;
        break;
      case 5:
        b = c == FP_SUBNORMAL;
        break;
    }
    r |= (uint32_t)b << i;
  }
  put_pred(x, in.op[0], r, mask);
}

enum Func { kRcp, kSqrt, kRsqrt, kLg2, kSin, kCos, kTanh, kEx2, kDiv };
template <int F, class T>
inline T func(T a, T b, T) {
  if constexpr (F == kRcp)
    return (T)1 / a;
  else if constexpr (F == kSqrt)
    return std::sqrt(a);
  else if constexpr (F == kRsqrt)
    return (T)(1 / std::sqrt((double)a));
  else if constexpr (F == kLg2)
    return std::log2(a);
  else if constexpr (F == kSin)
    return std::sin(a);
  else if constexpr (F == kCos)
    return std::cos(a);
  else if constexpr (F == kTanh)
    return std::tanh(a);
  else if constexpr (F == kEx2)
    return std::exp2(a);
  else
    return a / b;
}

template <int F>
void func_f32(Exec& x, const Instr& in, uint32_t mask) {
  float ta[32], tb[32], out[32];
  const float *a = src(x, in.op[1], ta), *b = F == kDiv ? src(x, in.op[2], tb) : a;
  const bool fz = in.aux[0] & kFtz;
  const Round r = (Round)in.aux[1];
  for (int i = 0; i < 32; ++i) {
    if (!(mask >> i & 1)) continue;
    float p = fz ? ftz(a[i]) : a[i], q = fz ? ftz(b[i]) : b[i];
    float y = r == Round::RN ? func<F>(p, q, p) : rounded(r, p, q, p, func<F, float>);
    y = canon(y);
    out[i] = fz ? ftz(y) : y;
  }
  put(x, in.op[0], out, mask);
}
template <int F>
void func_f64(Exec& x, const Instr& in, uint32_t mask) {
  double ta[32], tb[32], out[32];
  const double *a = src(x, in.op[1], ta), *b = F == kDiv ? src(x, in.op[2], tb) : a;
  const Round r = (Round)in.aux[1];
  for (int i = 0; i < 32; ++i)
    out[i] = mask >> i & 1 ? (r == Round::RN ? func<F>(a[i], b[i], a[i])
                                             : rounded(r, a[i], b[i], a[i], func<F, double>))
                           : 0;
  put(x, in.op[0], out, mask);
}
template <int F>
ExecFn pick_func(Decode& d) {
  if (d.type() == Ty::F64) return &func_f64<F>;
  if (d.type() == Ty::F32) return &func_f32<F>;
  d.fail("unsupported type");
}

template <int N>
void ex2_half(Exec& x, const Instr& in, uint32_t mask) {
  using L = std::conditional_t<N == 1, uint16_t, uint32_t>;
  L ta[32], out[32];
  const L* a = src(x, in.op[1], ta);
  const FloatFormat& f = in.aux[2] ? kBF16 : kF16;
  for (int i = 0; i < 32; ++i) {
    L o = 0;
    for (int h = 0; h < N; ++h)
      o |= (L)((L)encode(std::exp2(decode((uint16_t)(a[i] >> 16 * h), f)), f, Round::RN, false)
               << 16 * h);
    out[i] = o;
  }
  put(x, in.op[0], out, mask);
}

template <class T>
bool fcmp(int c, T a, T b) {
  bool nan = a != a || b != b;
  switch (c) {
    case 0:
      return a == b;
    case 1:
      return !nan && a != b;
    case 2:
      return a < b;
    case 3:
      return a <= b;
    case 4:
      return a > b;
    case 5:
      return a >= b;
    case 6:
      return nan || a == b;
    case 7:
      return a != b;
    case 8:
      return nan || a < b;
    case 9:
      return nan || a <= b;
    case 10:
      return nan || a > b;
    case 11:
      return nan || a >= b;
    case 12:
      return !nan;
    default:
      return nan;
  }
}

void do_setp_float(Exec& x, const Instr& in, uint32_t mask) {  // aux: 0 flags, 1 comparison, 2 type
  uint32_t r = 0;
  if (in.aux[2] == 0) {
    float ta[32], tb[32];
    const float *a = src(x, in.op[1], ta), *b = src(x, in.op[2], tb);
    bool fz = in.aux[0] & kFtz;
    for (int i = 0; i < 32; ++i)
      r |= (uint32_t)fcmp<float>(in.aux[1], fz ? ftz(a[i]) : a[i], fz ? ftz(b[i]) : b[i]) << i;
  } else {
    for (int i = 0; i < 32; ++i) {
      uint64_t p = src_lane(x, in.op[1], i), q = src_lane(x, in.op[2], i);
      double a = in.aux[2] == 1 ? as_double(p) : decode((uint16_t)p, in.aux[2] == 2 ? kF16 : kBF16);
      double b = in.aux[2] == 1 ? as_double(q) : decode((uint16_t)q, in.aux[2] == 2 ? kF16 : kBF16);
      if ((in.aux[0] & kFtz) && in.aux[2] == 2) a = ftz16(a), b = ftz16(b);
      r |= (uint32_t)fcmp<double>(in.aux[1], a, b) << i;
    }
  }
  put_setp(x, in, r, ~r, mask);
}

uint32_t rounding(const Decode& d) {
  if (d.has("rz")) return (uint32_t)Round::RZ;
  if (d.has("rm")) return (uint32_t)Round::RM;
  if (d.has("rp")) return (uint32_t)Round::RP;
  return (uint32_t)Round::RN;
}
uint32_t flags(const Decode& d) {
  return (d.has("ftz") ? (uint32_t)kFtz : 0u) | (d.has("sat") ? (uint32_t)kSat : 0u) |
         (d.has("relu") ? (uint32_t)kRelu : 0u) | (d.has("NaN") ? (uint32_t)kNanProp : 0u) |
         (d.has("xorsign") ? (uint32_t)kXorSign : 0u) |
         (d.has("abs") && d.mods[0] != "abs" && !d.has("xorsign") ? (uint32_t)kAbs : 0u);
}

template <int K>
ExecFn pick_arith(Decode& d) {
  switch (d.type()) {
    case Ty::F32:
      return &arith_f32<K, 32>;
    case Ty::F32x2:
      return &arith_f32<K, 64>;
    case Ty::F64:
      return &arith_f64<K>;
    case Ty::F16:
      return &arith_half<K, false, 1>;
    case Ty::F16x2:
      return &arith_half<K, false, 2>;
    case Ty::BF16:
      return &arith_half<K, true, 1>;
    case Ty::BF16x2:
      return &arith_half<K, true, 2>;
    default:
      d.fail("unsupported type");
  }
}

}  // namespace

ExecFn float_arith(Decode& d) {
  size_t n = d.mods[0] == "fma" || d.mods[0] == "mad" ? 4 : 3;
  d.want(n, n), d.dst(0), d.values(1, n);
  d.in.aux[0] = flags(d);
  d.in.aux[1] = rounding(d);
  auto& o = d.mods[0];
  if (o == "add") return pick_arith<kAdd>(d);
  if (o == "sub") return pick_arith<kSub>(d);
  if (o == "mul") return pick_arith<kMul>(d);
  return pick_arith<kFma>(d);
}
ExecFn float_mixed(Decode& d) {
  size_t n = d.mods[0] == "fma" ? 4 : 3;
  d.want(n, n), d.dst(0), d.values(1, n);
  d.in.aux[0] = flags(d);
  d.in.aux[1] = rounding(d);
  d.in.aux[2] = d.type() == Ty::BF16;
  return d.mods[0] == "fma" ? &mixed<kFma> : d.mods[0] == "add" ? &mixed<kAdd> : &mixed<kSub>;
}
ExecFn float_minmax(Decode& d) {
  d.want(3, d.type() == Ty::F32 && !d.has("xorsign") ? 4 : 3), d.dst(0), d.values(1, d.ops.size());
  d.in.aux[0] = flags(d);
  d.in.aux[2] = d.type() == Ty::BF16 || d.type() == Ty::BF16x2;
  bool mx = d.mods[0] == "max";
  switch (d.type()) {
    case Ty::F32:
      return mx ? &minmax_f32<true> : &minmax_f32<false>;
    case Ty::F64:
      return mx ? &minmax_f64<true> : &minmax_f64<false>;
    case Ty::F16:
    case Ty::BF16:
      return mx ? &minmax_half<true, 1> : &minmax_half<false, 1>;
    default:
      return mx ? &minmax_half<true, 2> : &minmax_half<false, 2>;
  }
}
ExecFn float_unary(Decode& d) {
  d.want(2, 2), d.dst(0), d.data(1);
  d.in.aux[0] = flags(d);
  d.in.aux[1] = d.mods[0] == "neg";
  d.in.aux[3] = d.type() == Ty::F16x2 || d.type() == Ty::BF16x2;
  d.in.aux[2] = (uint32_t)(d.type() == Ty::F16x2    ? Ty::F16
                           : d.type() == Ty::BF16x2 ? Ty::BF16
                                                    : d.type());
  switch (d.type()) {
    case Ty::F64:
      return &absneg<uint64_t>;
    case Ty::F16:
    case Ty::BF16:
      return &absneg<uint16_t>;
    default:
      return &absneg<uint32_t>;
  }
}
ExecFn float_copysign(Decode& d) {
  d.want(3, 3), d.dst(0), d.values(1, 3);
  return d.type() == Ty::F32 ? &do_copysign<float> : &do_copysign<double>;
}
ExecFn testp(Decode& d) {
  d.want(2, 2), d.pred_op(0), d.data(1);
  static const char* const k[] = {"finite",     "infinite", "number",
                                  "notanumber", "normal",   "subnormal"};
  for (uint32_t i = 0; i < 6; ++i)
    if (d.mods[1] == k[i]) d.in.aux[0] = i;
  return d.type() == Ty::F32 ? &do_testp<float> : &do_testp<double>;
}
ExecFn float_func2(Decode& d) {
  d.want(3, 3), d.dst(0), d.values(1, 3);
  d.in.aux[0] = flags(d);
  d.in.aux[1] = rounding(d);
  return pick_func<kDiv>(d);
}
ExecFn float_func1(Decode& d) {
  d.want(2, 2), d.dst(0), d.data(1);
  d.in.aux[0] = flags(d);
  d.in.aux[1] = rounding(d);
  auto& o = d.mods[0];
  if (o == "rcp") return pick_func<kRcp>(d);
  if (o == "sqrt") return pick_func<kSqrt>(d);
  if (o == "rsqrt") return pick_func<kRsqrt>(d);
  if (o == "lg2") return pick_func<kLg2>(d);
  if (o == "sin") return pick_func<kSin>(d);
  if (o == "cos") return pick_func<kCos>(d);
  if (o == "tanh") return pick_func<kTanh>(d);
  d.in.aux[2] = d.type() == Ty::BF16 || d.type() == Ty::BF16x2;
  if (d.type() == Ty::F16 || d.type() == Ty::BF16) return &ex2_half<1>;
  if (d.type() == Ty::F16x2 || d.type() == Ty::BF16x2) return &ex2_half<2>;
  return pick_func<kEx2>(d);
}
ExecFn setp_float(Decode& d) {
  decode_setp(d);
  static const char* const k[] = {"eq",  "ne",  "lt",  "le",  "gt",  "ge",  "equ",
                                  "neu", "ltu", "leu", "gtu", "geu", "num", "nan"};
  for (uint32_t i = 0; i < 14; ++i)
    if (d.mods[1] == k[i]) d.in.aux[1] = i;
  d.in.aux[0] = flags(d);
  d.in.aux[2] = d.type() == Ty::F32 ? 0 : d.type() == Ty::F64 ? 1 : d.type() == Ty::F16 ? 2 : 3;
  return &do_setp_float;
}

}  // namespace flash_attn_mx::emu
