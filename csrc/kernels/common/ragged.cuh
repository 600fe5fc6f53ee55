// What must not meet zeros of P or dS in a tile that the MMA contracts along its rows, as 0 * NaN is NaN: rows behind the
// end of a sequence, and poisoned blocks of rows that nobody in a CTA sees.
#pragma once

#include "common/mma_mxf8.cuh"
#include "common/sf_layout.cuh"

namespace flash_attn_mx {

// One warp: rows [rows, 128) of the payload become 0. Rows are whole swizzle spans, so that the swizzle does not matter.
template <int kRowBytes>
FAMX_DEVICE void clear_payload_behind(uint32_t tile, int rows) {
  const uint32_t lane = threadIdx.x & 31;
  for (uint32_t at = rows * kRowBytes + 16 * lane; at < 128u * kRowBytes; at += 16 * 32)
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile + at), "r"(0) : "memory");
}

// One warp: scale bytes of blocks of rows that do not exist become 127.
FAMX_DEVICE void clear_scales_behind(uint32_t scale_atom, int rows) {
  const uint32_t lane = threadIdx.x & 31;
  const uint32_t blocks = (rows + kMmaK - 1) / kMmaK;
  if (blocks == 4) return;
  const uint32_t keep = (1u << (8 * blocks)) - 1;
  for (uint32_t at = 4 * lane; at < kScaleAtomBytes; at += 4 * 32) {
    uint32_t word;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(scale_atom + at) : "memory");
    word = (word & keep) | (kScaleOnes & ~keep);
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(scale_atom + at), "r"(word) : "memory");
  }
}

// Both. A fence closes the hazard with tcgen05.mma and cp.
template <int kRowBytes>
FAMX_DEVICE void clear_rows_behind(uint32_t tile, uint32_t scale_atom, int rows) {
  clear_payload_behind<kRowBytes>(tile, rows);
  clear_scales_behind(scale_atom, rows);
  ptx::fence_proxy_async();  // the zeros, before tcgen05.mma and cp read them
  __syncwarp();
}

// One warp: blocks of 32 rows whose scale byte is NaN become zeros times 1. The tile's columns are the channels from `first`
// on, the atom's rows all 128. Returns whether there were any (the same in all lanes); bit c % 32 of poison[c / 32]: in
// channel c. A fence closes the hazard with tcgen05.mma and cp.
template <int kRowBytes>
FAMX_DEVICE bool take_poison(uint32_t tile, uint32_t scale_atom, int first, int head_dim,
                             uint32_t (&poison)[4]) {
  const int lane = threadIdx.x & 31;
  uint32_t word[4], bad[4];
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(scale_atom + 16 * lane)
               : "memory");
  uint32_t any = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    bad[i] = lane + 32 * i < head_dim ? __vcmpeq4(word[i], 0xFFFFFFFFu) : 0;
    poison[i] = __ballot_sync(0xFFFFFFFFu, bad[i] != 0);
    any |= poison[i];
  }
  if (any == 0) return false;
  for (int i = 0; i < 4; ++i) {
    const int column = lane + 32 * i - first;
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(scale_atom + 16 * lane + 4 * i),
                 "r"((word[i] & ~bad[i]) | (kScaleOnes & bad[i]))
                 : "memory");
    for (int row = 0; row < 128 && uint32_t(column) < uint32_t(kRowBytes); ++row)
      if (bad[i] >> (row / 32 * 8) & 1)
        asm volatile(
            "st.shared.b8 [%0], %1;" ::"r"(tile + SwizzledTile<kRowBytes>::offset(row, column)),
            "r"(0)
            : "memory");
  }
  ptx::fence_proxy_async();
  __syncwarp();
  return true;
}

}  // namespace flash_attn_mx
