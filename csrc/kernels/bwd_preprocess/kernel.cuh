// bwd_preprocess: what attn_bwd needs per query row, and zeros where it will add.
//
// FLOW   dO payload, scales, O -LDG-> registers -> delta = rowsum(dO ∘ O) -> GMEM;  LSE -> bias;  0 -> dq_acc, dq_turn
// ROLES  8 warps, all the same: kLanes lanes share a row, 4 channels each.      GRID  row tiles, see RowTile
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attn_bwd/launch.h"
#include "common/row_tile.cuh"
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
    const RowTile tile(p, blockIdx.x);
    if (tile.rows() <= 0) return;  // packed: the sequence is shorter than the longest one
    clear(tile.index);
    const uint8_t* dout =
        p.dout + tile.batch * p.dout_stride_batch + tile.head * p.dout_stride_head;
    const Out* out = static_cast<const Out*>(p.out) + tile.batch * p.out_stride_batch +
                     tile.head * p.out_stride_head;
    const float* lse = p.lse + tile.batch * p.lse_stride_batch + tile.head * p.lse_stride_head;
    const uint8_t* scale = p.dout_scale + tile.index * 512;
    const int lane = threadIdx.x % kLanes;
    for (int row = threadIdx.x / kLanes; row < kTile; row += kRowsPerPass) {
      const bool exists = row < tile.rows();
      const int64_t token = int64_t(tile.start) + tile.first + row;
      float sum = 0.0f;
      if (exists)
        sum = partial(dout + token * p.dout_stride_token, scale + scale_word_offset(row),
                      out + token * p.out_stride_token, 4 * lane);
#pragma unroll
      for (int step = 1; step < kLanes; step *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
      if (lane == 0) {
        p.minus_delta[tile.index * kTile + row] = -sum;
        const float l = exists ? lse[token] : -__builtin_huge_valf();
        p.bias[tile.index * kTile + row] =
            l == -__builtin_huge_valf() ? l : l * -1.4426950408889634f;
      }
    }
  }

  // The payloads of four channels, zeros for those behind the last: their bytes may not even be mapped.
  FAMX_DEVICE static uint32_t payload_word(const uint8_t* dout, int channels) {
    if (channels >= 4) return *reinterpret_cast<const uint32_t*>(dout);
    uint32_t word = 0;
    for (int i = 0; i < channels; ++i) word |= uint32_t(dout[i]) << (8 * i);
    return word;
  }

  // The terms of channels [channel, channel + 4).
  FAMX_DEVICE float partial(const uint8_t* dout, const uint8_t* scale, const Out* out,
                            int channel) const {
    if (channel >= p.head_dim) return 0.0f;
    float x[4];
    unpack_e4m3(payload_word(dout + channel, p.head_dim - channel), x);
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
