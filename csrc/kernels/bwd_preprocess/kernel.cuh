// bwd_preprocess: what attn_bwd needs per query row, and zeros where it will add.
//
// FLOW   dO payload, scales, O -LDG-> registers -> delta = rowsum(dO ∘ O) -> GMEM;  LSE -> bias;  0 -> dq_acc, dq_turn
// ROLES  8 warps, all the same: kLanes lanes share a row, 4 channels each.      GRID  (query tile, head, batch)
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attn_bwd/launch.h"
#include "common/mask.cuh"
#include "common/sf_layout.cuh"
#include "params.h"

namespace flash_attn_mx::bwd {

using bf16 = __nv_bfloat16;
using fp16 = __half;
using fp32 = float;

constexpr int kPreprocessThreads = kLaunchPassThreads;

// A 32-bit word of four E4M3 payloads -> floats.
FAMX_DEVICE void unpack_e4m3(uint32_t word, float (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(uint16_t(word >> (16 * i))));
    const float2 f = __half22float2(reinterpret_cast<const __half2&>(halves));
    x[2 * i] = f.x, x[2 * i + 1] = f.y;
  }
}

template <int kHeadDim, class Out>
struct Preprocess {
  static constexpr int kLanes = kHeadDim / 4;
  static constexpr int kRowsPerPass = kPreprocessThreads / kLanes;
  const BwdPreprocessParams& p;

  FAMX_DEVICE void run() const {
    const int tile = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
    int start = 0, seqlen = p.seqlen_q;
    int64_t row_tile = (int64_t(batch) * p.heads + head) * p.row_tiles + tile;
    if (p.cu_seqlens_q) {
      start = p.cu_seqlens_q[batch];
      seqlen = p.cu_seqlens_q[batch + 1] - start;
      row_tile = int64_t(head) * p.row_tiles + start / kTile + batch + tile;
    }
    if (tile * kTile >= seqlen) return;
    clear(row_tile);
    const int dense_batch = p.cu_seqlens_q ? 0 : batch;
    const uint8_t* dout = p.dout + dense_batch * p.dout_stride_batch + head * p.dout_stride_head;
    const Out* out = static_cast<const Out*>(p.out) + dense_batch * p.out_stride_batch +
                     head * p.out_stride_head;
    const float* lse = p.lse + dense_batch * p.lse_stride_batch + head * p.lse_stride_head;
    const uint8_t* scale = p.dout_scale + row_tile * 512;
    const int lane = threadIdx.x % kLanes;
    for (int row = threadIdx.x / kLanes; row < kTile; row += kRowsPerPass) {
      const bool exists = tile * kTile + row < seqlen;
      const int64_t token = start + int64_t(tile) * kTile + row;
      float sum = 0.0f;
      if (exists)
        sum = partial(dout + token * p.dout_stride_token, scale + scale_word_offset(row),
                      out + token * p.out_stride_token, 4 * lane);
#pragma unroll
      for (int step = 1; step < kLanes; step *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
      if (lane == 0) {
        p.minus_delta[row_tile * kTile + row] = -sum;
        const float l = exists ? lse[token] : -__builtin_huge_valf();
        p.bias[row_tile * kTile + row] = l == -__builtin_huge_valf() ? l : l * -1.4426950408889634f;
      }
    }
  }

  // The terms of channels [channel, channel + 4).
  FAMX_DEVICE float partial(const uint8_t* dout, const uint8_t* scale, const Out* out,
                            int channel) const {
    if (channel >= p.head_dim) return 0.0f;
    float x[4];
    unpack_e4m3(*reinterpret_cast<const uint32_t*>(dout + channel), x);
    const float factor = scale_factor(scale[channel / 32]);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (channel + i < p.head_dim) sum = __fmaf_rn(x[i] * factor, float(out[channel + i]), sum);
    return sum;
  }

  FAMX_DEVICE void clear(int64_t row_tile) const {
    if (p.dq_turn && threadIdx.x == 0) p.dq_turn[row_tile] = 0;
    if (!p.dq_acc) return;
    float4* acc = reinterpret_cast<float4*>(p.dq_acc + row_tile * kTile * kHeadDim);
    for (int i = threadIdx.x; i < kTile * kHeadDim / 4; i += kPreprocessThreads)
      acc[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
};

}  // namespace flash_attn_mx::bwd

#define FAMX_DEFINE_KERNEL(name, head_dim, out_type)                                   \
  extern "C" __global__ void __launch_bounds__(flash_attn_mx::bwd::kPreprocessThreads) \
      name(const __grid_constant__ flash_attn_mx::BwdPreprocessParams params) {        \
    using namespace flash_attn_mx::bwd;                                                \
    Preprocess<head_dim, out_type>{params}.run();                                      \
  }
