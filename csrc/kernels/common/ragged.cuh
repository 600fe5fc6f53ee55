// What lies behind the end of a sequence in a tile that the MMA contracts along its rows: it meets zeros of P or dS,
// and 0 * NaN must not reach the tensor core.
#pragma once

#include "common/mma_mxf8.cuh"
#include "common/sf_layout.cuh"

namespace flash_attn_mx {

// One warp: rows [rows, 128) of the payload become 0, scale bytes of blocks of rows that do not exist 127. Rows are
// whole swizzle spans, so that the swizzle does not matter. A fence closes the hazard with tcgen05.mma and cp.
template <int kRowBytes>
FAMX_DEVICE void clear_rows_behind(uint32_t tile, uint32_t scale_atom, int rows) {
  const uint32_t lane = threadIdx.x & 31;
  for (uint32_t at = rows * kRowBytes + 16 * lane; at < 128u * kRowBytes; at += 16 * 32)
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(tile + at), "r"(0) : "memory");
  const uint32_t blocks = (rows + kMmaK - 1) / kMmaK;
  if (blocks < 4) {
    const uint32_t keep = (1u << (8 * blocks)) - 1;
    for (uint32_t at = 4 * lane; at < kScaleAtomBytes; at += 4 * 32) {
      uint32_t word;
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(scale_atom + at) : "memory");
      word = (word & keep) | (kScaleOnes & ~keep);
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(scale_atom + at), "r"(word) : "memory");
    }
  }
  ptx::fence_proxy_async();  // the zeros, before tcgen05.mma and cp read them
  __syncwarp();
}

}  // namespace flash_attn_mx
