// Block-scaled MXFP8 MMA (tcgen05.mma kind::mxf8f6f4; one CTA, or a pair of them) and what it needs: descriptors of its operands in
// shared memory and in tensor memory. CUTLASS has the form with both operands in shared memory; the form with A in
// tensor memory (P of P·V) is ours.
#pragma once

#include <cute/arch/mma_sm100_desc.hpp>
#include <cute/arch/mma_sm100_umma.hpp>

#include "common/ptx.cuh"

namespace flash_attn_mx {

constexpr int kMmaM =
    128;  // rows of D and A in a CTA; the only M that block scaling has with one CTA
constexpr int kMmaK = 32;  // bytes of a row that one instruction contracts: one scale block
constexpr int kScaleAtomBytes = 512;  // 128 rows x 4 blocks
constexpr int kScaleAtomColumns = 4;  // of tensor memory

// D[kM x kN] (+)= A · B^T in fp32. kM = 256 for a pair: each CTA has 128 rows of D and A and half of the rows of B, and
// scales of its own rows of A and of all of B. k_block selects the byte of the scale words: block 0..3 of a 128-element row.
// CuTe sets the same field through the top two bits of the scale address (cute/atom/mma_traits_sm100.hpp).
template <int kN, cute::UMMA::Major kMajorB, cute::UMMA::Major kMajorA = cute::UMMA::Major::K,
          int kM = kMmaM>
constexpr uint32_t mxf8_instruction(int k_block, bool negate_a = false) {
  static_assert(kN % (kM / 8) == 0 && kN <= 256, "PTX ISA 9.7.16.2, table 39");
  static_assert(kM == kMmaM || kM == 2 * kMmaM, "");
  cute::UMMA::InstrDescriptorBlockScaled d{};
  d.a_sf_id_ = k_block;
  d.b_sf_id_ = k_block;
  d.a_format_ = uint8_t(cute::UMMA::MXF8F6F4Format::E4M3);
  d.b_format_ = uint8_t(cute::UMMA::MXF8F6F4Format::E4M3);
  d.a_negate_ = negate_a;
  d.a_major_ = uint8_t(kMajorA);
  d.b_major_ = uint8_t(kMajorB);
  d.n_dim_ = kN >> 3;
  d.m_dim_ = kM >> 4;
  d.scale_format_ = 1;  // UE8M0
  return d.desc_;
}

// A tile whose rows are kRowBytes long and swizzled over that length, as TMA writes it: 8 rows make a pattern.
// Read K-major (contraction along the row) or MN-major (contraction along the rows); PTX ISA 9.7.16.5.
template <int kRowBytes>
struct SwizzledTile {
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes == 128, "");
  static constexpr uint32_t kPatternBytes = 8 * kRowBytes;

  // To be added to the descriptor per instruction, in units of 16 bytes.
  static constexpr uint32_t kStepAlongRow = kMmaK >> 4;               // K-major: the next 32 bytes
  static constexpr uint32_t kStepAlongRows = kMmaK * kRowBytes >> 4;  // MN-major: the next 32 rows

  // Where a byte lies.
  static FAMX_DEVICE uint32_t offset(uint32_t row, uint32_t column) {
    const uint32_t at = row * kRowBytes + column;
    return at ^ ((at >> 7 & (kRowBytes / 16 - 1)) << 4);
  }

  static FAMX_DEVICE uint64_t descriptor(uint32_t smem) {
    cute::UMMA::SmemDescriptor d{};
    d.version_ = 1;
    d.layout_type_ = uint8_t(kRowBytes == 128  ? cute::UMMA::LayoutType::SWIZZLE_128B
                             : kRowBytes == 64 ? cute::UMMA::LayoutType::SWIZZLE_64B
                                               : cute::UMMA::LayoutType::SWIZZLE_32B);
    d.start_address_ = uint16_t(smem >> 4);
    d.leading_byte_offset_ = 1;  // not used: a row is no longer than the swizzle
    d.stride_byte_offset_ = kPatternBytes >> 4;
    return d.desc_;
  }
};

// Rows of 32 bytes, K-major, no swizzle: 16 bytes here, the other 16 `to_second` bytes behind; rows 16 bytes apart.
FAMX_DEVICE uint64_t plain_tile_descriptor(uint32_t smem, uint32_t to_second) {
  cute::UMMA::SmemDescriptor d{};
  d.version_ = 1;
  d.start_address_ = uint16_t(smem >> 4);
  d.leading_byte_offset_ = uint16_t(to_second >> 4);
  d.stride_byte_offset_ = 8 * 16 >> 4;
  return d.desc_;
}

// An atom of scales (common/sf_layout.cuh) as the source of tcgen05.cp: 32 rows of 16 bytes, no swizzle.
FAMX_DEVICE uint64_t scale_atom_descriptor(uint32_t smem) {
  return plain_tile_descriptor(smem, 16);  // no second half: any distance does
}

// One instruction; one thread issues it. accumulate = false ignores what D holds.
struct MmaMxf8SS {
  template <int kCtas = 1>
  static FAMX_DEVICE void fma(uint32_t d, uint64_t a, uint64_t b, uint32_t instruction,
                              uint32_t scale_a, uint32_t scale_b, bool accumulate) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.b32 p, %6, 0;\n"
        " tcgen05.mma.cta_group::%7.kind::mxf8f6f4.block_scale [%0], %1, %2, %3, [%4], [%5], "
        "p;\n}\n" ::"r"(d),
        "l"(a), "l"(b), "r"(instruction), "r"(scale_a), "r"(scale_b), "r"(uint32_t(accumulate)),
        "n"(kCtas)
        : "memory");
  }
};

// A in tensor memory: lane = row, 4 elements per column, so that 32 elements take 8 columns.
struct MmaMxf8TS {
  static constexpr uint32_t kStepColumns = kMmaK / 4;

  template <int kCtas = 1>
  static FAMX_DEVICE void fma(uint32_t d, uint32_t a, uint64_t b, uint32_t instruction,
                              uint32_t scale_a, uint32_t scale_b, bool accumulate) {
    asm volatile(
        "{\n .reg .pred p;\n setp.ne.b32 p, %6, 0;\n"
        " tcgen05.mma.cta_group::%7.kind::mxf8f6f4.block_scale [%0], [%1], %2, %3, [%4], [%5], "
        "p;\n}\n" ::"r"(d),
        "r"(a), "l"(b), "r"(instruction), "r"(scale_a), "r"(scale_b), "r"(uint32_t(accumulate)),
        "n"(kCtas)
        : "memory");
  }
};

}  // namespace flash_attn_mx
