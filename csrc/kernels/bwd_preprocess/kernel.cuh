// bwd_preprocess: what attn_bwd needs per query row, and zeros where it will add.
//
// FLOW   dO payload, scales, O -LDG-> registers -> delta = rowsum(dO ∘ O) -> an operand of the MMA (attn_bwd/delta.cuh) -> GMEM
//        LSE -> bias;  0 -> dq_acc, dq_turn
// ROLES  8 warps, all the same: kLanes lanes share a row, 4 channels each.      GRID  row tiles, see RowTile
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attn_bwd/delta.cuh"
#include "common/row_tile.cuh"
#include "common/sf_layout.cuh"
#include "params.h"

namespace flash_attn_mx::bwd {

using bf16 = __nv_bfloat16;
using fp16 = __half;
using fp32 = float;

constexpr int kPreprocessThreads = kLaunchPassThreads;

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
        store_delta(tile.index, row, -sum);
        const float l = exists ? lse[token] : -__builtin_huge_valf();
        p.bias[tile.index * kTile + row] =
            l == -__builtin_huge_valf() ? l : l * -1.4426950408889634f;
      }
    }
  }

  FAMX_DEVICE void store_delta(int64_t row_tile, int row, float minus_delta) const {
    uint32_t words[2];
    const uint32_t byte = delta_pieces(minus_delta, words);
    uint8_t* tile = p.delta + row_tile * kLaunchDeltaBytes;
    *reinterpret_cast<uint4*>(tile + row * kDeltaRowBytes) = make_uint4(words[0], words[1], 0, 0);
    // The atom's other blocks are not multiplied.
    *reinterpret_cast<uint32_t*>(tile + kTile * kDeltaRowBytes + scale_word_offset(row)) = byte;
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
    const uint32_t word = payload_word(dout + channel, p.head_dim - channel);
    const float2 low = ptx::unpack_e4m3(word), high = ptx::unpack_e4m3(word >> 16);
    const float x[4] = {low.x, low.y, high.x, high.y};
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
