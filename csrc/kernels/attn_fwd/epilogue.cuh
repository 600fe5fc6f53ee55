// End of an item, by the softmax threads: O / l -> GMEM, LSE -> GMEM. One thread writes one row.
#pragma once

#include "attn_fwd/config.cuh"
#include "common/output.cuh"
#include "common/softmax.cuh"

namespace flash_attn_mx::fwd {

template <class C, class Out>
struct Epilogue {
  const AttnFwdParams& p;

  // tmem: O of the warp's lanes. live: O holds a product; else no row of the tile saw a key.
  FAMX_DEVICE void run(const Work& work, int tile, int row, const RowState& state, uint32_t tmem,
                       bool live) const {
    const int query = work.row + tile * kTile + row;
    const bool exists = query < work.seqlen_q;
    const bool empty = state.sum == 0.0f;
    const float inverse = empty ? 0.0f : 1.0f / (state.sum + state.sum_quantised);
    const int64_t batch = p.cu_seqlens_q ? 0 : work.batch;
    const int64_t token = work.q_start + int64_t(query);
    Out* out = static_cast<Out*>(p.out) + batch * p.out_stride_batch + token * p.out_stride_token +
               work.head * p.out_stride_head;
    ptx::tcgen05_fence_after();  // O was written by the mma
#pragma unroll 1
    for (int column = 0; column < C::kHeadDim; column += 32) {
      uint32_t o[32];
      if (live) {  // the same in all threads of the tile
        ptx::tmem_load_32(o, tmem + column);
        ptx::tmem_wait_load();
        ptx::pin(o);
      }
#pragma unroll
      for (int j = 0; j < 32; j += RowVector<Out>::kSize) {
        RowVector<Out> v;
#pragma unroll
        for (int k = 0; k < RowVector<Out>::kSize; ++k) {
          const float x = live ? __uint_as_float(o[j + k]) : 0.0f;
          v.element[k] = Out(empty ? 0.0f : x * inverse);
        }
        if (exists) v.store(out, column + j, p.head_dim, p.out_aligned);
      }
    }
    ptx::tcgen05_fence_before();  // the next item's PV overwrites O after this thread's next p_full
    if (exists) {
      const float lse = (ptx::log2_approx(state.sum) + state.reference) * 0.693147180559945f;
      p.lse[batch * p.lse_stride_batch + work.head * p.lse_stride_head + token] =
          empty ? -kInfinity : lse;
    }
  }
};

}  // namespace flash_attn_mx::fwd
