// The end, by the compute threads: dV (half 0) and dK · softmax_scale (half 1) -> GMEM. One thread writes one row.
#pragma once

#include "attn_bwd/config.cuh"
#include "common/output.cuh"

namespace flash_attn_mx::bwd {

template <class C, class Grad>
struct Epilogue {
  const AttnBwdParams& p;
  const Work& work;
  uint32_t smem;

  FAMX_DEVICE void run(uint32_t tmem, int half, int key) const {
    void* base = half == 0 ? p.dv : p.dk;
    if (!base) return;
    const int64_t batch = p.cu_seqlens_k ? 0 : work.batch;
    const int64_t token = work.k_start + int64_t(work.key_tile) * kTile + key;
    const int64_t at = half == 0 ? batch * p.dv_stride_batch + token * p.dv_stride_token +
                                       work.key_head * p.dv_stride_head
                                 : batch * p.dk_stride_batch + token * p.dk_stride_token +
                                       work.key_head * p.dk_stride_head;
    const float scale = half == 0 ? 1.0f : p.softmax_scale;
    const bool live = work.steps() > 0, exists = key < work.keys();
    ptx::tcgen05_fence_after();  // written by the mma
#pragma unroll 1
    for (int column = 0; column < C::kHeadDim; column += 32) {
      uint32_t x[32], poison = 0;
      if (live) {
        asm volatile("ld.shared.b32 %0, [%1];"
                     : "=r"(poison)
                     : "r"(smem + C::kPoison + (half * kTile + column) / 8));
        ptx::tmem_load_32(x, tmem + (half == 0 ? C::kDV : C::kDK) + column);
        ptx::tmem_wait_load();
        ptx::pin(x);
      }
#pragma unroll
      for (int j = 0; j < 32; j += RowVector<Grad>::kSize) {
        RowVector<Grad> v;
#pragma unroll
        for (int k = 0; k < RowVector<Grad>::kSize; ++k) {
          const uint32_t bits = poison >> (j + k) & 1 ? 0x7FC00000u : x[j + k];
          v.element[k] = Grad(live ? __uint_as_float(bits) * scale : 0.0f);
        }
        if (exists) v.store(static_cast<Grad*>(base) + at, column + j, p.head_dim, p.grads_aligned);
      }
    }
  }
};

}  // namespace flash_attn_mx::bwd
