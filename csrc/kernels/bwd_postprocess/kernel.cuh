// bwd_postprocess: sums of dQ -> dQ in its type and layout.
//
// FLOW   dq_acc -LDG-> registers · softmax_scale -> dQ -STG-> GMEM
// ROLES  8 warps, all the same. A thread takes 4 channels of a row; a warp 16 lots of channels of 2 rows, so that it reads
//        whole 32-byte sectors and writes runs of 64 channels.                   GRID  row tiles, see RowTile
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attn_bwd/launch.h"
#include "common/row_tile.cuh"
#include "params.h"

namespace flash_attn_mx::bwd {

using bf16 = __nv_bfloat16;
using fp16 = __half;
using fp32 = float;

constexpr int kPostprocessThreads = kLaunchPassThreads;

template <int kHeadDim, class Grad>
struct Postprocess {
  const BwdPostprocessParams& p;

  FAMX_DEVICE void run() const {
    const RowTile tile(p, blockIdx.x);
    const int rows = tile.rows();
    const float4* acc = reinterpret_cast<const float4*>(p.dq_acc + tile.index * kTile * kHeadDim);
    Grad* dq = static_cast<Grad*>(p.dq) + tile.batch * p.dq_stride_batch +
               tile.head * p.dq_stride_head +
               (int64_t(tile.start) + tile.first) * p.dq_stride_token;
    constexpr int kGroups = kHeadDim / 64;  // of 16 lots of 4 channels
    for (int i = threadIdx.x; i < kTile * kHeadDim / 4; i += kPostprocessThreads) {
      const int row = (i / 32 / kGroups) * 2 + i % 2;
      const int lot = i / 2 % 16 + 16 * (i / 32 % kGroups);
      if (row < rows && 4 * lot < p.head_dim)
        store(dq + row * p.dq_stride_token, 4 * lot,
              acc[(row / 32 * (kHeadDim / 4) + lot) * 32 + row % 32]);
    }
  }

  FAMX_DEVICE void store(Grad* row, int channel, float4 sum) const {
    const float x[4] = {sum.x, sum.y, sum.z, sum.w};
    struct alignas(4 * sizeof(Grad)) Four {
      Grad element[4];
    } v;
#pragma unroll
    for (int k = 0; k < 4; ++k) v.element[k] = Grad(x[k] * p.softmax_scale);
    if (channel + 4 <= p.head_dim && reinterpret_cast<uintptr_t>(row) % sizeof(Four) == 0) {
      *reinterpret_cast<Four*>(row + channel) = v;
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k)
        if (channel + k < p.head_dim) row[channel + k] = v.element[k];
    }
  }
};

}  // namespace flash_attn_mx::bwd

#define FAMX_DEFINE_KERNEL(name, head_dim, grad_type)                                   \
  extern "C" __global__ void __launch_bounds__(flash_attn_mx::bwd::kPostprocessThreads) \
      name(const __grid_constant__ flash_attn_mx::BwdPostprocessParams params) {        \
    using namespace flash_attn_mx::bwd;                                                 \
    Postprocess<head_dim, grad_type>{params}.run();                                     \
  }
