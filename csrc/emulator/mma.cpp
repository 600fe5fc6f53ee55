// The MMA itself. Numerics: blackwell-isa §1.6 (25 fraction bits below the largest exponent,
// truncated, one sum), or fp64.
#include "mma.h"

#include <immintrin.h>

#include <array>

#include "numerics.h"

namespace flash_attn_mx::emu {

uint32_t SmemDesc::k_major(uint32_t r, uint32_t c) const {
  if (layout == 0) return (start + (r % 8) * 16 + (r / 8) * sbo + (c / 16) * lbo) & 0x3FFFF;
  uint32_t a = start + (r % 8) * span() + (r / 8) * sbo + c;
  uint32_t m = layout == 2 ? 7 : layout == 4 ? 3 : 1;
  if (layout == 1) return (a ^ ((a >> 7 & 3) << 5)) & 0x3FFFF;
  return (a ^ ((a >> 7 & m) << 4)) & 0x3FFFF;
}
uint32_t SmemDesc::mn_major(uint32_t b, uint32_t k) const {
  if (layout == 0) return (start + (b / 16) * sbo + (k % 8) * 16 + (k / 8) * lbo) & 0x3FFFF;
  uint32_t w = span(), a = start + b % w + (b / w) * lbo + (k % 8) * w + (k / 8) * sbo;
  uint32_t m = layout == 2 ? 7 : layout == 4 ? 3 : 1;
  if (layout == 1) return (a ^ ((a >> 7 & 3) << 5)) & 0x3FFFF;
  return (a ^ ((a >> 7 & m) << 4)) & 0x3FFFF;
}

SmemDesc decode_smem_desc(uint64_t d, const char* which) {
  auto bad = [&](const std::string& w) {
    throw Fault("descriptor", std::string(which) + " descriptor " + hex(d) + ": " + w);
  };
  SmemDesc s;
  s.start = (uint32_t)(d & 0x3FFF) << 4;
  s.lbo = (uint32_t)(d >> 16 & 0x3FFF) << 4;
  s.sbo = (uint32_t)(d >> 32 & 0x3FFF) << 4;
  s.layout = (uint32_t)(d >> 61);
  if ((d >> 46 & 7) != 1) bad("bits 46-48 must be 0b001");
  if (s.layout == 3 || s.layout == 5 || s.layout == 7)
    bad("layout " + std::to_string(s.layout) + " does not exist");
  if (d >> 52 & 0x1FF) bad("bits 52-60 must be zero on sm_100");
  if (d >> 49 & 7) bad("a matrix base offset is not supported by this emulator");
  return s;
}

void decode_idesc(uint32_t v, MmaOp* op) {
  auto bad = [&](const std::string& w) {
    throw Fault("idesc", "instruction descriptor " + hex(v) + ": " + w);
  };
  const bool fp4 = op->kind == Kind::MXF4, mx = op->kind == Kind::MXF8 || fp4;
  op->a_type = v >> 7 & 7, op->b_type = v >> 10 & 7;
  op->a_neg = v >> 13 & 1, op->b_neg = v >> 14 & 1;
  op->a_mn = v >> 15 & 1, op->b_mn = v >> 16 & 1;
  op->n = (v >> 17 & 63) << 3;
  op->m = (v >> 24 & 31) << 4;
  if (v >> 2 & 1) bad("sparse MMA is not supported");
  if (mx) {
    op->sfb_id = v >> 4 & 3, op->sfa_id = v >> 29 & 3;
    op->scale_e4m3 = !(v >> 23 & 1);
    if (op->scale_e4m3 && !(op->nvf4 && op->scale_vec == 4))
      bad("scale type must be UE8M0; UE4M3 is for mxf4nvf4 with 4X");
    if (v >> 31) bad(fp4 ? "K = 96 does not exist on sm_100" : "K-size bit is for fp4 only");
    for (uint32_t id : {op->sfa_id, op->sfb_id})
      if (id % op->scale_vec) bad("scale id " + std::to_string(id) + " is not legal here");
    op->d_type = 1;
  } else {
    op->d_type = v >> 4 & 3;
    if (v & 0x800048u) bad("bits 3, 6 and 23 must be zero");
    if (v >> 30) bad("maximum shift is for .ws only");
    if (op->d_type > 1) bad("D type must be f16 or f32");
  }
  if (op->kind == Kind::F16 && (op->a_type > 1 || op->b_type > 1))
    bad("A and B types must be f16 or bf16");
  if (op->kind == Kind::F16 && op->d_type == 0 && (op->a_type || op->b_type))
    bad("an f16 D needs f16 A and B");
  if (op->kind == Kind::TF32 && (op->a_type != 2 || op->b_type != 2))
    bad("A and B types must be tf32");
  if (fp4) {
    if (op->a_type != 1 || op->b_type != 1) bad("A and B types must be e2m1 (code 1)");
    if (op->a_mn || op->b_mn) bad("4-bit operands must be K-major");
  } else if (op->kind == Kind::F8 || mx) {
    for (bool a : {true, false}) {
      const uint32_t t = a ? op->a_type : op->b_type;
      if (t == 2 || t > 5) bad("unknown type " + std::to_string(t));
      if (t > 2 && (a ? op->a_mn : op->b_mn)) bad("4- and 6-bit operands must be K-major");
      if (t > 2 && a && op->a_tmem)
        bad("4- and 6-bit A from tensor memory is not supported by this emulator");
    }
  }
  op->k = fp4 ? 64 : 32 / op->elem_bytes();
  const uint32_t m = op->m, n = op->n;
  bool m_ok = op->ctas == 1 ? (m == 128 || (m == 64 && !mx)) : (m == 128 || m == 256);
  if (!m_ok) bad("M = " + std::to_string(m) + " is not legal here");
  uint32_t step = op->ctas == 1 ? 8 : 16;
  if (op->elem_bytes() == 1 && op->b_mn) step = op->ctas == 1 ? 16 : 32;
  if (n < step || n > 256 || n % step)
    bad("N = " + std::to_string(n) + " is not legal here (multiple of " + std::to_string(step) +
        " up to 256)");
}

namespace {

void matrix_chunks(const SmemDesc& s, bool mn_major, uint32_t rows, const MmaOp& op,
                   const std::function<void(uint32_t)>& f) {
  if (mn_major) {
    for (uint32_t k = 0; k < op.k; ++k)
      for (uint32_t b = 0; b < rows * op.elem_bytes(); b += 16) f(s.mn_major(b, k));
  } else {
    for (uint32_t r = 0; r < rows; ++r)
      for (uint32_t c = 0; c < 32; c += 16) f(s.k_major(r, c));
  }
}

struct Parts {
  float sig;
  int32_t exp;
};

// Significand and exponent as the bit model wants them: subnormals keep the smallest exponent, zero
// has -126.
Parts split(double v, int min_exp) {
  if (v == 0 || v != v || std::isinf(v)) return {(float)v, v == 0 ? -126 : 0};
  int e;
  std::frexp(v, &e);
  e = std::max(e - 1, min_exp);
  return {(float)std::ldexp(v, -e), e};
}

template <size_t N>
struct LutSmall {
  Parts v[N];
  explicit LutSmall(const FloatFormat& f) {
    for (size_t i = 0; i < N; ++i) v[i] = split(decode((uint32_t)i, f), 1 - f.bias);
  }
};
const Parts* lut8(uint32_t type) {
  static const LutSmall<256> e4m3(kE4M3), e5m2(kE5M2);
  return type == 0 ? e4m3.v : e5m2.v;
}
struct Lut16 {
  std::vector<Parts> v{65536};
  explicit Lut16(const FloatFormat& f) {
    for (int i = 0; i < 65536; ++i) v[i] = split(decode((uint32_t)i, f), 1 - f.bias);
  }
};
const Parts* lut16(uint32_t type) {
  static const Lut16 f16(kF16), bf16(kBF16);
  return type == 0 ? f16.v.data() : bf16.v.data();
}

// A decoded operand: element (row, k) at [k * ld + row] for A and [row * K + k] for B.
struct Tile {
  std::vector<float> sig;
  std::vector<int32_t> exp;
  std::vector<uint8_t> special;  // per row: holds an infinity or NaN
  uint32_t row_stride, k_stride;
  Tile(uint32_t rows, uint32_t k, uint32_t rs, uint32_t ks)
      : sig(rows * k), exp(rows * k), special(rows), row_stride(rs), k_stride(ks) {}
  void set(uint32_t row, uint32_t k, Parts p, bool neg) {
    uint32_t i = row * row_stride + k * k_stride;
    if (!(std::fabs(p.sig) < 8)) special[row] = 1;
    sig[i] = neg ? -p.sig : p.sig;
    exp[i] = p.exp;
  }
};

Parts element(const MmaOp& op, const uint8_t* p, uint32_t type) {
  switch (op.kind) {
    case Kind::F16: {
      uint16_t h;
      std::memcpy(&h, p, 2);
      return lut16(type)[h];
    }
    case Kind::TF32: {
      uint32_t u;
      std::memcpy(&u, p, 4);
      return split(as_float(u & 0xFFFFE000u), -126);
    }
    default:
      return lut8(type)[*p];
  }
}

// The k / 2 elements of 16 bytes along K. Packed elements lie in order from the lowest bit of the
// first byte on.
void chunk(const MmaOp& op, const uint8_t* p, uint32_t type, Parts* out) {
  static const LutSmall<16> e2m1(kE2M1);
  static const LutSmall<64> e2m3(kE2M3), e3m2(kE3M2);
  const uint32_t n = op.k / 2, es = op.elem_bytes();
  const bool bits4 = op.kind == Kind::MXF4 || (op.kind >= Kind::F8 && type == 5);
  if (bits4) {
    for (uint32_t i = 0; i < n; ++i) out[i] = e2m1.v[p[i / 2] >> (4 * (i % 2)) & 15];
  } else if (op.kind >= Kind::F8 && type > 2) {
    const Parts* lut = type == 3 ? e2m3.v : e3m2.v;
    for (uint32_t i = 0; i < n; ++i) {
      uint16_t two;
      std::memcpy(&two, p + 6 * i / 8, 2);
      out[i] = lut[two >> (6 * i % 8) & 63];
    }
  } else {
    for (uint32_t i = 0; i < n; ++i) out[i] = element(op, p + i * es, type);
  }
}

void decode_smem(const MmaOp& op, const Cta& c, const SmemDesc& s, bool mn, uint32_t type, bool neg,
                 uint32_t rows, uint32_t row0, Tile* t) {
  const uint32_t es = op.elem_bytes(), per = 16 / es;
  const uint8_t* mem = c.smem.data();
  if (mn) {
    for (uint32_t k = 0; k < op.k; ++k)
      for (uint32_t b = 0; b < rows * es; b += 16) {
        const uint8_t* p = mem + s.mn_major(b, k);
        for (uint32_t i = 0; i < per && b / es + i < rows; ++i)
          t->set(row0 + b / es + i, k, element(op, p + i * es, type), neg);
      }
  } else {
    Parts v[32];
    for (uint32_t r = 0; r < rows; ++r)
      for (uint32_t half = 0; half < 2; ++half) {
        chunk(op, mem + s.k_major(r, 16 * half), type, v);
        for (uint32_t i = 0; i < op.k / 2; ++i) t->set(row0 + r, half * op.k / 2 + i, v[i], neg);
      }
  }
}

// Lane of row m (within its CTA) of D, and of A in tensor memory.
uint32_t d_lane(const MmaOp& op, uint32_t m) {
  if (op.ctas == 1 && op.m == 64) return (m / 16) * 32 + m % 16 + (op.d_addr >> 16 & 16);
  return m;
}

void decode_tmem_a(const MmaOp& op, Cta& c, uint32_t rows, Tile* t) {
  const uint32_t col = op.a_addr & 511;
  for (uint32_t m = 0; m < rows; ++m) {
    const uint32_t lane =
        op.ctas == 1 && op.m == 64 ? (m / 16) * 32 + m % 16 + (op.a_addr >> 16 & 16) : m;
    for (uint32_t half = 0; half < 2; ++half) {
      uint32_t words[4];
      Parts v[32];
      for (uint32_t w = 0; w < 4; ++w) words[w] = c.tmem.col(col + 4 * half + w)[lane];
      chunk(op, reinterpret_cast<const uint8_t*>(words), op.a_type, v);
      for (uint32_t i = 0; i < op.k / 2; ++i) t->set(m, half * op.k / 2 + i, v[i], op.a_neg);
    }
  }
}

// Byte `id` of the scale word for row i. `part`: which of the four 32-lane copies is read; with
// `check`, those named by `copies` must agree.
uint8_t scale_byte(Cta& c, uint32_t addr, uint32_t i, uint32_t part, uint32_t id, bool check,
                   uint32_t copies, const char* which) {
  uint32_t col = (addr & 511) + i / 32;
  const uint32_t* p = c.tmem.col(col & 511);
  uint8_t v = (uint8_t)(p[i % 32 + 32 * part] >> (8 * id));
  for (uint32_t r = 0; r < 4 && check; ++r) {
    uint8_t o = (uint8_t)(p[i % 32 + 32 * r] >> (8 * id));
    if (copies >> r & 1 && o != v)
      throw Fault("replicas",
                  std::string(which) + " scale of row " + std::to_string(i) + " (column " +
                      std::to_string(col) + ", byte " + std::to_string(id) +
                      ") differs between lane partitions: " + std::to_string(v) + " in " +
                      std::to_string(part) + ", " + std::to_string(o) + " in " + std::to_string(r));
  }
  return v;
}

void apply_scale(Tile* t, uint32_t row, uint32_t k_count, uint8_t s) {
  if (s == 0xFF) t->special[row] = 1, t->sig[row * t->row_stride] = NAN;
  for (uint32_t k = 0; k < k_count; ++k)
    t->exp[row * t->row_stride + k * t->k_stride] += (int)s - 127;
}

// One element without vectorising: special values, f16 D, the fp64 mode.
double element_sum(const Tile& a, const Tile& b, uint32_t m, uint32_t n, uint32_t k_count, double c,
                   bool fp64) {
  bool special = a.special[m] || b.special[n] || !(std::fabs(c) <= 3.5e38);
  if (special || fp64) {
    double s = c;
    for (uint32_t k = 0; k < k_count; ++k) {
      uint32_t i = m * a.row_stride + k * a.k_stride, j = n * b.row_stride + k * b.k_stride;
      s += std::ldexp((double)a.sig[i] * b.sig[j], a.exp[i] + b.exp[j]);
    }
    return s;
  }
  Parts pc = split(c, -126);
  int emax = pc.exp;
  for (uint32_t k = 0; k < k_count; ++k)
    emax = std::max(
        emax, a.exp[m * a.row_stride + k * a.k_stride] + b.exp[n * b.row_stride + k * b.k_stride]);
  double s = std::trunc(std::ldexp((double)pc.sig, pc.exp - emax + 25));
  for (uint32_t k = 0; k < k_count; ++k) {
    uint32_t i = m * a.row_stride + k * a.k_stride, j = n * b.row_stride + k * b.k_stride;
    s += std::trunc(std::ldexp((double)a.sig[i] * b.sig[j], a.exp[i] + b.exp[j] - emax + 25));
  }
  return std::ldexp(s, emax - 25);
}

inline __m256 pow2_ps(__m256i e) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(
      _mm256_add_epi32(_mm256_max_epi32(e, _mm256_set1_epi32(-100)), _mm256_set1_epi32(127)), 23));
}

inline __m128 finish4(__m128i s0, __m128i s1, __m128i sc, __m128i emax) {
  __m256d s = _mm256_add_pd(_mm256_add_pd(_mm256_cvtepi32_pd(s0), _mm256_cvtepi32_pd(s1)),
                            _mm256_cvtepi32_pd(sc));
  __m256i e = _mm256_slli_epi64(
      _mm256_add_epi64(_mm256_cvtepi32_epi64(emax), _mm256_set1_epi64x(1023 - 25)), 52);
  __m256d r = _mm256_mul_pd(s, _mm256_castsi256_pd(e));
  __m256d big =
      _mm256_cmp_pd(_mm256_andnot_pd(_mm256_set1_pd(-0.0), r), _mm256_set1_pd(0x1p128), _CMP_GE_OQ);
  __m256d inf = _mm256_or_pd(_mm256_and_pd(r, _mm256_set1_pd(-0.0)), _mm256_set1_pd(INFINITY));
  return _mm256_cvtpd_ps(
      _mm256_blendv_pd(r, inf, big));  // rounds toward zero: the caller set the mode
}

// Eight rows of one column. Products of significands are exact in f32; 16 of them fit an int32 at
// 25 fraction bits.
template <int K>
__attribute__((noinline)) void rows8(const float* sa, const int32_t* ea, uint32_t ld,
                                     const float* sb, const int32_t* eb, float* d, bool acc) {
  __m256 c = acc ? _mm256_loadu_ps(d) : _mm256_setzero_ps();
  __m256i cb = _mm256_castps_si256(c);
  __m256i ce = _mm256_and_si256(_mm256_srli_epi32(cb, 23), _mm256_set1_epi32(255));
  // subnormal and zero C keep exponent -126; scaling by 2^126 or 2^-e makes the significand either
  // way
  __m256i e_c =
      _mm256_sub_epi32(_mm256_max_epi32(ce, _mm256_set1_epi32(1)), _mm256_set1_epi32(127));
  __m256i emax = e_c;
  for (int k = 0; k < K; ++k)
    emax =
        _mm256_max_epi32(emax, _mm256_add_epi32(_mm256_loadu_si256((const __m256i*)(ea + k * ld)),
                                                _mm256_set1_epi32(eb[k])));
  const __m256i base = _mm256_sub_epi32(_mm256_set1_epi32(25), emax);
  __m256i sum[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  for (int k = 0; k < K; ++k) {
    __m256i e = _mm256_add_epi32(_mm256_add_epi32(_mm256_loadu_si256((const __m256i*)(ea + k * ld)),
                                                  _mm256_set1_epi32(eb[k])),
                                 base);
    __m256 p = _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(sa + k * ld), _mm256_set1_ps(sb[k])),
                             pow2_ps(e));
    sum[k / 16] = _mm256_add_epi32(sum[k / 16], _mm256_cvttps_epi32(p));
  }
  // significand of C: exponent field replaced by 0 (normal); subnormal: mantissa * 2^-23
  __m256i mant = _mm256_and_si256(cb, _mm256_set1_epi32(0x7FFFFF)),
          normal = _mm256_cmpgt_epi32(ce, _mm256_setzero_si256());
  __m256 sig = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_or_si256(
                                 mant, _mm256_and_si256(normal, _mm256_set1_epi32(0x800000)))),
                             _mm256_set1_ps(0x1p-23f));
  sig = _mm256_or_ps(sig, _mm256_and_ps(c, _mm256_set1_ps(-0.0f)));
  __m256i tc = _mm256_cvttps_epi32(_mm256_mul_ps(sig, pow2_ps(_mm256_add_epi32(e_c, base))));
  __m128 lo = finish4(_mm256_castsi256_si128(sum[0]), _mm256_castsi256_si128(sum[1]),
                      _mm256_castsi256_si128(tc), _mm256_castsi256_si128(emax));
  __m128 hi = finish4(_mm256_extracti128_si256(sum[0], 1), _mm256_extracti128_si256(sum[1], 1),
                      _mm256_extracti128_si256(tc, 1), _mm256_extracti128_si256(emax, 1));
  _mm256_storeu_ps(d, _mm256_set_m128(hi, lo));
}

void rows8_k(uint32_t k, const float* sa, const int32_t* ea, uint32_t ld, const float* sb,
             const int32_t* eb, float* d, bool acc) {
  if (k == 16)
    rows8<16>(sa, ea, ld, sb, eb, d, acc);
  else if (k == 32)
    rows8<32>(sa, ea, ld, sb, eb, d, acc);
  else
    rows8<8>(sa, ea, ld, sb, eb, d, acc);
}

struct Place {
  uint32_t col, lane;
};
Place place(const MmaOp& op, uint32_t m, uint32_t n) {
  uint32_t col = op.d_addr & 511;
  if (op.ctas == 2 && op.m == 128) return {col + n % (op.n / 2), m + (n >= op.n / 2 ? 64u : 0u)};
  return {col + n, d_lane(op, m)};
}

bool disabled(const MmaOp& op, uint32_t cta, uint32_t lane) {
  return op.any_disabled && (op.disable[cta * 4 + lane / 32] >> (lane % 32) & 1);
}

void scalar_rows(const MmaOp& op, uint32_t which, Cta& c, const Tile& a, const Tile& b, uint32_t m0,
                 uint32_t rows, uint32_t n, const Options& opt) {
  for (uint32_t m = m0; m < m0 + rows; ++m) {
    Place p = place(op, m, n);
    if (disabled(op, which, p.lane)) continue;
    uint32_t& w = c.tmem.col(p.col)[p.lane];
    double cv = !op.accumulate   ? 0
                : op.d_type == 1 ? (double)as_float(w)
                                 : decode((uint16_t)w, kF16);
    if (op.scale_shift) cv = std::ldexp(cv, -(int)op.scale_shift);
    bool fp64 = opt.mma == MmaMode::Fp64;
    double s = element_sum(a, b, m, n, op.k, cv, fp64);
    if (op.d_type == 0)
      w = encode(s, kF16, Round::RN, false);
    else
      w = s != s ? kNan32 : as_bits(fp64 ? (float)s : truncate_f32(s));
  }
}

void multiply(const MmaOp& op, uint32_t which, Cta& c, const Tile& a, const Tile& b, uint32_t rows,
              const Options& opt) {
  const bool fast =
      opt.mma == MmaMode::Model && op.d_type == 1 && !op.scale_shift && !op.any_disabled;
  for (uint32_t n = 0; n < op.n; ++n) {
    const float* sb = &b.sig[n * b.row_stride];
    const int32_t* eb = &b.exp[n * b.row_stride];
    for (uint32_t m = 0; m < rows; m += 8) {
      Place p = place(op, m, n);
      float* d = reinterpret_cast<float*>(c.tmem.col(p.col) + p.lane);
      bool ok = fast && !b.special[n];
      for (int i = 0; i < 8 && ok; ++i) ok = !a.special[m + i];
      if (ok && op.accumulate) {
        __m256i e =
            _mm256_and_si256(_mm256_loadu_si256((const __m256i*)d), _mm256_set1_epi32(0x7F800000));
        ok = !_mm256_movemask_epi8(_mm256_cmpeq_epi32(e, _mm256_set1_epi32(0x7F800000)));
      }
      if (ok)
        rows8_k(op.k, &a.sig[m], &a.exp[m], a.k_stride, sb, eb, d, op.accumulate);
      else
        scalar_rows(op, which, c, a, b, m, 8, n, opt);
    }
  }
}

void mark_d(const MmaOp& op, Cta& c, uint32_t rows) {
  uint32_t lanes[4] = {};
  for (uint32_t m = 0; m < rows; ++m) {
    Place p = place(op, m, 0);
    lanes[p.lane / 32] |= 1u << p.lane % 32;
  }
  bool split = op.ctas == 2 && op.m == 128;
  if (split) lanes[2] = lanes[0], lanes[3] = lanes[1];
  for (uint32_t n = 0; n < (split ? op.n / 2 : op.n); ++n)
    for (int q = 0; q < 4; ++q) c.tmem.written((op.d_addr & 511) + n)[q] |= lanes[q];
}

// Every lane partition multiplies with the scales that it holds itself. With 64 rows per CTA, lanes
// 64.. repeat the rows for the upper half of N: their copies serve other columns, so they only have
// to agree in pairs.
void apply_scales(const MmaOp& op, Cta& c, Tile* a, Tile* b, uint32_t rows, bool check) {
  const bool split = op.ctas == 2 && op.m == 128;
  for (uint32_t m = 0; m < rows; ++m)
    apply_scale(
        a, m, op.k,
        scale_byte(c, op.sfa, m, m / 32, op.sfa_id, check, split ? 5u << m / 32 : 15, "SFA"));
  for (uint32_t n = 0; n < op.n; ++n) {
    const uint32_t upper = split && n >= op.n / 2 ? 2 : 0;
    apply_scale(b, n, op.k,
                scale_byte(c, op.sfb, split ? n % (op.n / 2) : n, upper, op.sfb_id, check,
                           split ? 3u << upper : 15, "SFB"));
  }
}

// UE4M3: the sign bit means nothing; 0x7F is NaN.
Parts split_scale(uint8_t s) { return split(decode(s & 0x7Fu, kE4M3), -6); }

// Scales of kind mxf4 and mxf4nvf4: significand and exponent per row and 16 elements of K.
std::vector<Parts> group_scales(const MmaOp& op, Cta& c, bool a, bool check) {
  const bool split = op.ctas == 2 && op.m == 128;
  const uint32_t rows = a ? op.m / op.ctas : op.n;
  std::vector<Parts> out(rows * 4);
  for (uint32_t r = 0; r < rows; ++r) {
    const uint32_t upper = split && !a && r >= op.n / 2 ? 2 : 0;
    const uint32_t row = upper ? r - op.n / 2 : r, part = a ? r / 32 : upper;
    const uint32_t copies = !split ? 15 : a ? 5u << part : 3u << upper;
    for (uint32_t g = 0; g < 4; ++g) {
      const uint8_t s = scale_byte(c, a ? op.sfa : op.sfb, row, part,
                                   (a ? op.sfa_id : op.sfb_id) + g * op.scale_vec / 4, check,
                                   copies, a ? "SFA" : "SFB");
      out[r * 4 + g] = op.scale_e4m3 ? split_scale(s) : Parts{s == 0xFF ? NAN : 1.0f, (int)s - 127};
    }
  }
  return out;
}

// One sum per element of four groups of 16 products, each exact, times its two scales; terms are cut
// toward zero 35 fraction bits below the largest scale exponent, C's among them.
double fp4_sum(const double* dot, const Parts* sa, const Parts* sb, double c, bool fp64) {
  double term[4];
  Parts pc = split(c, -126);
  int e[4], emax = pc.exp;
  bool special = !(std::fabs(c) <= 3.5e38);
  for (int g = 0; g < 4; ++g) {
    term[g] = dot[g] * sa[g].sig * sb[g].sig;
    e[g] = sa[g].exp + sb[g].exp;
    special |= term[g] != term[g];
    emax = std::max(emax, e[g]);
  }
  double s = special || fp64 ? c : std::trunc(std::ldexp((double)pc.sig, pc.exp - emax + 35));
  for (int g = 0; g < 4; ++g)
    s += special || fp64 ? std::ldexp(term[g], e[g])
                         : std::trunc(std::ldexp(term[g], e[g] - emax + 35));
  return special || fp64 ? s : std::ldexp(s, emax - 35);
}

void multiply_fp4(const MmaOp& op, Cta& c, const Tile& a, const Tile& b, uint32_t rows,
                  const Options& opt) {
  const auto sa = group_scales(op, c, true, opt.checks.replicas),
             sb = group_scales(op, c, false, opt.checks.replicas);
  const bool fp64 = opt.mma == MmaMode::Fp64;
  auto twice = [&](const Tile& t, uint32_t row) {  // e2m1 values are multiples of a half
    std::array<int16_t, 64> v;
    for (uint32_t k = 0; k < 64; ++k) {
      const uint32_t i = row * t.row_stride + k * t.k_stride;
      v[k] = (int16_t)std::ldexp(t.sig[i], t.exp[i] + 1);
    }
    return v;
  };
  std::vector<std::array<int16_t, 64>> av;
  for (uint32_t m = 0; m < rows; ++m) av.push_back(twice(a, m));
  for (uint32_t n = 0; n < op.n; ++n) {
    const auto bv = twice(b, n);
    for (uint32_t m = 0; m < rows; ++m) {
      double dot[4];
      for (int g = 0; g < 4; ++g) {
        int s = 0;
        for (int k = 16 * g; k < 16 * g + 16; ++k) s += av[m][k] * bv[k];
        dot[g] = 0.25 * s;
      }
      const Place p = place(op, m, n);
      uint32_t& w = c.tmem.col(p.col)[p.lane];
      const double s =
          fp4_sum(dot, &sa[4 * m], &sb[4 * n], op.accumulate ? (double)as_float(w) : 0, fp64);
      w = s != s ? kNan32 : as_bits(fp64 ? (float)s : truncate_f32(s));
    }
  }
}

}  // namespace

void for_smem_chunks(const MmaOp& op, uint32_t which, const std::function<void(uint32_t)>& f) {
  (void)which;
  if (!op.a_tmem) matrix_chunks(op.a, op.a_mn, op.m / op.ctas, op, f);
  matrix_chunks(op.b, op.b_mn, op.n / op.ctas, op, f);
}

void run_mma(const MmaOp& op, Cta* const* cta, const Options& opt) {
  const uint32_t rows = op.m / op.ctas, cols = op.n / op.ctas;
  Tile b(op.n, op.k, op.k, 1);
  for (uint32_t c = 0; c < op.ctas; ++c)
    decode_smem(op, *cta[c], op.b, op.b_mn, op.b_type, op.b_neg, cols, c * cols, &b);
  const unsigned old = _mm_getcsr();
  for (uint32_t c = 0; c < op.ctas; ++c) {
    Tile a(rows, op.k, 1, rows);
    if (op.a_tmem)
      decode_tmem_a(op, *cta[c], rows, &a);
    else
      decode_smem(op, *cta[c], op.a, op.a_mn, op.a_type, op.a_neg, rows, 0, &a);
    if (op.kind == Kind::MXF4) {
      multiply_fp4(op, *cta[c], a, b, rows, opt);
      mark_d(op, *cta[c], rows);
      continue;
    }
    Tile bs = b;
    if (op.kind == Kind::MXF8) apply_scales(op, *cta[c], &a, &bs, rows, opt.checks.replicas);
    if (opt.mma == MmaMode::Model)
      _mm_setcsr(old | 0x6000);  // round toward zero: rows8 ends in one conversion to f32
    multiply(op, c, *cta[c], a, bs, rows, opt);
    _mm_setcsr(old);
    mark_d(op, *cta[c], rows);
  }
}

}  // namespace flash_attn_mx::emu
