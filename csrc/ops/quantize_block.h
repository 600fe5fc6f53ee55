// MXFP8 rounding of blocks, docs/numerics.md §1. Plain C++, no torch: pointers in, bytes out.
//
// FLOW   x (fp32/bf16/fp16) -> fp32 -> block maximum as integer -> scale byte
//        -> x * 2^(127-byte) -> payload byte
// Inner loops are branch-free integer code over contiguous values, which the compiler vectorises.
// On x86 each entry is built twice, for AVX2 and for the baseline, and chosen at run time.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(FAMX_BASELINE_ONLY)
#define FAMX_HAS_AVX2_BUILD 0
#elif (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
#define FAMX_HAS_AVX2_BUILD 1
#else
#define FAMX_HAS_AVX2_BUILD 0
#endif
#if defined(__GNUC__) || defined(__clang__)
#define FAMX_INLINE inline __attribute__((always_inline))
#define FAMX_RESTRICT __restrict__
#else
#define FAMX_INLINE inline
#define FAMX_RESTRICT
#endif

namespace flash_attn_mx::ops {

constexpr int kBlock = 32;  // values per scale
constexpr uint32_t kMagnitude = 0x7FFFFFFFu;
constexpr uint8_t kNanScale = 255;     // E8M0 NaN
constexpr uint8_t kNanPayload = 0x7F;  // NaN in E4M3 and E5M2
constexpr uint8_t kZeroBlockScale = 127;

// An FP8 format: mantissa bits, exponent of the largest value (1.75 * 2^kEmax), exponent bias.
struct E4M3 {
  static constexpr int kMantissa = 3, kEmax = 8, kBias = 7;
};
struct E5M2 {
  static constexpr int kMantissa = 2, kEmax = 15, kBias = 15;
};

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

FAMX_INLINE uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
FAMX_INLINE float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

// condition ? a : b. As a mask: a conditional around float arithmetic keeps GCC from vectorising.
FAMX_INLINE uint32_t select(bool condition, uint32_t a, uint32_t b) {
  const uint32_t mask = 0u - static_cast<uint32_t>(condition);
  return (a & mask) | (b & ~mask);
}

// fp32 bit pattern of an input value; exact, NaN stays NaN.
FAMX_INLINE uint32_t fp32_bits(float x) { return bits_of(x); }
FAMX_INLINE uint32_t fp32_bits(Bf16 x) { return static_cast<uint32_t>(x.bits) << 16; }
FAMX_INLINE uint32_t fp32_bits(Fp16 x) {
  const uint32_t magnitude = x.bits & 0x7FFFu;
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  // exponent bias 15 -> 127; Inf and NaN (field 31) go to field 255
  const uint32_t normal = (magnitude << 13) + (magnitude >= 0x7C00u ? 224u << 23 : 112u << 23);
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
  return sign | select(magnitude < 0x400u, bits_of(subnormal), normal);
}

// Scale byte of a block whose largest magnitude has the fp32 bit pattern amax.
template <class Format>
FAMX_INLINE uint32_t scale_byte(uint32_t amax, uint32_t round_up) {
  const int32_t exponent = static_cast<int32_t>(amax >> 23);
  const int32_t above = round_up & static_cast<uint32_t>((amax & 0x7FFFFFu) > 0x600000u);
  int32_t byte = exponent - Format::kEmax + above;
  byte = byte < 0 ? 0 : byte;
  byte = amax == 0 ? kZeroBlockScale : byte;
  return exponent == 255 ? kNanScale : byte;
}

// 2^(127 - byte) for byte < 254 (a finite block has byte <= 247); meaningless for kNanScale.
FAMX_INLINE float payload_factor(uint32_t byte) { return float_of((254u - byte) << 23); }

// FP8 byte of x: clamped to the largest finite value, rounded to nearest even. x is not NaN.
template <class Format>
FAMX_INLINE uint8_t payload(float x) {
  constexpr int kShift = 23 - Format::kMantissa;
  constexpr uint32_t kLargest = (static_cast<uint32_t>(127 + Format::kEmax) << 23) | 0x600000u;
  constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(128 - Format::kBias) << 23;
  constexpr uint32_t kRebias = static_cast<uint32_t>(127 - Format::kBias) << Format::kMantissa;
  // adding 2^(23 + exponent of the smallest subnormal) leaves a subnormal's payload in the low bits
  constexpr uint32_t kSubnormalShift =
      static_cast<uint32_t>(127 + 23 + 1 - Format::kBias - Format::kMantissa) << 23;
  const uint32_t bits = bits_of(x);
  uint32_t magnitude = bits & kMagnitude;
  magnitude = magnitude < kLargest ? magnitude : kLargest;
  const uint32_t odd = (magnitude >> kShift) & 1u;
  const uint32_t normal = ((magnitude + (1u << (kShift - 1)) - 1u + odd) >> kShift) - kRebias;
  const uint32_t subnormal =
      bits_of(float_of(magnitude) + float_of(kSubnormalShift)) - kSubnormalShift;
  const uint32_t rounded = select(magnitude < kSmallestNormal, subnormal, normal);
  return static_cast<uint8_t>(rounded | ((bits >> 24) & 0x80u));
}

// Scale bytes and payload of one row of `count` contiguous values in blocks of 32 (rowwise).
template <class In, class Format>
FAMX_INLINE void rowwise_row(const In* FAMX_RESTRICT x, int64_t count, uint32_t round_up,
                             uint8_t* FAMX_RESTRICT data, uint8_t* FAMX_RESTRICT scale) {
  float value[kBlock];
  uint8_t rounded[kBlock];
  for (int64_t first = 0; first < count; first += kBlock) {
    const bool whole = count - first >= kBlock;
    const int64_t used = whole ? kBlock : count - first;
    uint32_t amax = 0;
    if (whole) {
      for (int i = 0; i < kBlock; ++i) value[i] = float_of(fp32_bits(x[first + i]));
    } else {
      for (int i = 0; i < kBlock; ++i)
        value[i] = i < used ? float_of(fp32_bits(x[first + i])) : 0.0f;
    }
    for (int i = 0; i < kBlock; ++i) {
      const uint32_t magnitude = bits_of(value[i]) & kMagnitude;
      amax = amax > magnitude ? amax : magnitude;
    }
    const uint32_t byte = scale_byte<Format>(amax, round_up);
    scale[first / kBlock] = static_cast<uint8_t>(byte);
    if (byte == kNanScale) {
      std::memset(data + first, kNanPayload, used);
      continue;
    }
    const float factor = payload_factor(byte);
    for (int i = 0; i < kBlock; ++i) rounded[i] = payload<Format>(value[i] * factor);
    std::memcpy(data + first, rounded, whole ? kBlock : used);
  }
}

// Scale byte and payload of one row of `count` contiguous values that share one scale (tokenwise).
template <class In, class Format>
FAMX_INLINE void tokenwise_row(const In* FAMX_RESTRICT x, int64_t count, uint32_t round_up,
                               uint8_t* FAMX_RESTRICT data, uint8_t* FAMX_RESTRICT scale) {
  uint32_t amax = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t magnitude = fp32_bits(x[i]) & kMagnitude;
    amax = amax > magnitude ? amax : magnitude;
  }
  const uint32_t byte = scale_byte<Format>(amax, round_up);
  *scale = static_cast<uint8_t>(byte);
  if (byte == kNanScale) {
    std::memset(data, 0, count);  // finite: the scale carries the NaN
    return;
  }
  const float factor = payload_factor(byte);
  for (int64_t i = 0; i < count; ++i) data[i] = payload<Format>(float_of(fp32_bits(x[i])) * factor);
}

// Scale bytes and payload of `rows` <= 32 rows of `cols` values; a column is a block (colwise).
// Row r starts at x + r * x_stride and data + r * data_stride; scale has cols bytes.
template <class In, class Format>
FAMX_INLINE void colwise_block(const In* x, int64_t x_stride, int64_t rows, int64_t cols,
                               uint32_t round_up, uint8_t* data, int64_t data_stride,
                               uint8_t* scale) {
  constexpr int kChunk = 128;
  uint32_t amax[kChunk];
  float factor[kChunk];
  for (int64_t first = 0; first < cols; first += kChunk) {
    const int n = static_cast<int>(cols - first < kChunk ? cols - first : kChunk);
    for (int c = 0; c < n; ++c) amax[c] = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const In* FAMX_RESTRICT row = x + r * x_stride + first;
      for (int c = 0; c < n; ++c) {
        const uint32_t magnitude = fp32_bits(row[c]) & kMagnitude;
        amax[c] = amax[c] > magnitude ? amax[c] : magnitude;
      }
    }
    uint8_t* FAMX_RESTRICT bytes = scale + first;
    uint32_t largest = 0;
    for (int c = 0; c < n; ++c) {
      const uint32_t byte = scale_byte<Format>(amax[c], round_up);
      largest = largest > byte ? largest : byte;
      factor[c] = payload_factor(byte);
      bytes[c] = static_cast<uint8_t>(byte);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const In* FAMX_RESTRICT row = x + r * x_stride + first;
      uint8_t* FAMX_RESTRICT out = data + r * data_stride + first;
      for (int c = 0; c < n; ++c) out[c] = payload<Format>(float_of(fp32_bits(row[c])) * factor[c]);
      if (largest == kNanScale) {
        for (int c = 0; c < n; ++c) out[c] = bytes[c] == kNanScale ? kNanPayload : out[c];
      }
    }
  }
}

// The three entries for one input type and format, as function pointers.
template <class In>
struct BlockKernels {
  using RowFn = void (*)(const In*, int64_t, uint32_t, uint8_t*, uint8_t*);
  using ColumnFn = void (*)(const In*, int64_t, int64_t, int64_t, uint32_t, uint8_t*, int64_t,
                            uint8_t*);
  RowFn rowwise;
  RowFn tokenwise;
  ColumnFn colwise;
};

// One build of the entries; FAMX_TARGET is the target attribute of that build.
#define FAMX_DEFINE_KERNELS(name, FAMX_TARGET)                                                     \
  template <class In, class Format>                                                                \
  struct name {                                                                                    \
    FAMX_TARGET static void rowwise(const In* x, int64_t n, uint32_t up, uint8_t* d, uint8_t* s) { \
      rowwise_row<In, Format>(x, n, up, d, s);                                                     \
    }                                                                                              \
    FAMX_TARGET static void tokenwise(const In* x, int64_t n, uint32_t up, uint8_t* d,             \
                                      uint8_t* s) {                                                \
      tokenwise_row<In, Format>(x, n, up, d, s);                                                   \
    }                                                                                              \
    FAMX_TARGET static void colwise(const In* x, int64_t xs, int64_t rows, int64_t cols,           \
                                    uint32_t up, uint8_t* d, int64_t ds, uint8_t* s) {             \
      colwise_block<In, Format>(x, xs, rows, cols, up, d, ds, s);                                  \
    }                                                                                              \
  };

FAMX_DEFINE_KERNELS(BaselineKernels, )
#if FAMX_HAS_AVX2_BUILD
FAMX_DEFINE_KERNELS(Avx2Kernels, __attribute__((target("avx2"))))
#endif
#undef FAMX_DEFINE_KERNELS

template <class In, class Format>
BlockKernels<In> select_kernels() {
#if FAMX_HAS_AVX2_BUILD
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2) {
    using K = Avx2Kernels<In, Format>;
    return {K::rowwise, K::tokenwise, K::colwise};
  }
#endif
  using K = BaselineKernels<In, Format>;
  return {K::rowwise, K::tokenwise, K::colwise};
}

}  // namespace flash_attn_mx::ops
