// What the quantisers on the CPU and on a device see of x.
#pragma once

#include <cstdint>

#include <torch/csrc/stable/tensor.h>

namespace flash_attn_mx::ops {

// x seen as (batch, tokens, heads, channels); strides in elements, channel stride 1.
struct QuantizeView {
  int64_t batch, tokens, heads, channels;
  int64_t batch_stride, token_stride, head_stride;
};

inline QuantizeView view_of(const torch::stable::Tensor& x) {
  const auto n = x.sizes();
  const auto s = x.strides();
  if (x.dim() == 2) return {1, n[0], 1, n[1], 0, s[0], 0};
  if (x.dim() == 3) return {1, n[0], n[1], n[2], 0, s[0], s[1]};
  return {n[0], n[1], n[2], n[3], s[0], s[1], s[2]};
}

}  // namespace flash_attn_mx::ops
