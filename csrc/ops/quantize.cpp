// flash_attn_mx::quantize on CPU: tensors -> checks -> rows or blocks in parallel -> bytes.
// Gives the bytes of quantize_pytorch (flash_attn_mx/quantize.py); arithmetic in quantize_block.h.
#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "checks.h"
#include "quantize_block.h"
#include "quantize_view.h"

namespace flash_attn_mx::ops {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kGrainValues =
    32768;  // values per thread below which parallelism does not pay; untuned

enum class Axis { kRowwise, kColwise, kTokenwise };

// Up to 32 consecutive tokens of one sequence.
struct TokenBlock {
  int64_t batch, first_token, count, scale_row;
};

Axis parse_axis(const std::string& axis) {
  if (axis == "rowwise") return Axis::kRowwise;
  if (axis == "colwise") return Axis::kColwise;
  FAMX_CHECK(axis == "tokenwise", "axis", "rowwise, colwise or tokenwise", axis);
  return Axis::kTokenwise;
}

// Appends the blocks of the tokens [first, end) of one sequence; returns the number of blocks.
int64_t append_blocks(std::vector<TokenBlock>& blocks, int64_t batch, int64_t first, int64_t end,
                      int64_t scale_row) {
  const int64_t before = blocks.size();
  for (; first < end; first += kBlock, ++scale_row)
    blocks.push_back({batch, first, std::min<int64_t>(kBlock, end - first), scale_row});
  return blocks.size() - before;
}

// cu_seqlens: 0 = cu[0] <= cu[1] <= ... <= tokens.
std::vector<int64_t> read_cu_seqlens(const Tensor& cu_tensor, int64_t tokens) {
  FAMX_CHECK(
      cu_tensor.scalar_type() == ScalarType::Int && cu_tensor.dim() == 1 && cu_tensor.is_cpu(),
      "cu_seqlens", "a 1-D int32 CPU tensor", cu_tensor.dim(),
      " dimensions or another dtype or device");
  FAMX_CHECK(cu_tensor.size(0) >= 1, "cu_seqlens", "shape (nseq+1,)", "(0,)");
  const Tensor dense = torch::stable::contiguous(cu_tensor);
  const auto* values = static_cast<const int32_t*>(dense.const_data_ptr());
  const std::vector<int64_t> cu(values, values + dense.size(0));
  const bool rising = std::is_sorted(cu.begin(), cu.end());
  FAMX_CHECK(cu.front() == 0 && rising && cu.back() <= tokens, "cu_seqlens",
             "values rising from 0 to at most T", cu.front(), "..", cu.back(), " for T = ", tokens);
  return cu;
}

std::vector<TokenBlock> token_blocks(const QuantizeView& view, const std::vector<int64_t>& cu) {
  std::vector<TokenBlock> blocks;
  if (!cu.empty()) {
    for (size_t b = 0; b + 1 < cu.size(); ++b)
      append_blocks(blocks, 0, cu[b], cu[b + 1], cu[b] / kBlock + static_cast<int64_t>(b));
    return blocks;
  }
  int64_t scale_row = 0;
  for (int64_t b = 0; b < view.batch; ++b)
    scale_row += append_blocks(blocks, b, 0, view.tokens, scale_row);
  return blocks;
}

template <class In>
void run_rows(const In* x, const QuantizeView& v, typename BlockKernels<In>::RowFn row,
              uint32_t round_up, int64_t scales_per_row, uint8_t* data, uint8_t* scale) {
  const int64_t rows = v.batch * v.tokens * v.heads;
  const int64_t grain = std::max<int64_t>(1, kGrainValues / std::max<int64_t>(1, v.channels));
  torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t head = i % v.heads, token = i / v.heads % v.tokens, b = i / v.heads / v.tokens;
      row(x + b * v.batch_stride + token * v.token_stride + head * v.head_stride, v.channels,
          round_up, data + i * v.channels, scale + i * scales_per_row);
    }
  });
}

template <class In>
void run_columns(const In* x, const QuantizeView& v, typename BlockKernels<In>::ColumnFn column,
                 uint32_t round_up, const std::vector<TokenBlock>& blocks, uint8_t* data,
                 uint8_t* scale) {
  const int64_t token_size = v.heads * v.channels;  // elements of one token in data and scale
  const int64_t items = static_cast<int64_t>(blocks.size()) * v.heads;
  const int64_t grain =
      std::max<int64_t>(1, kGrainValues / std::max<int64_t>(1, kBlock * v.channels));
  torch::stable::parallel_for(0, items, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const TokenBlock& block = blocks[i / v.heads];
      const int64_t head = i % v.heads;
      const In* first = x + block.batch * v.batch_stride + block.first_token * v.token_stride +
                        head * v.head_stride;
      const int64_t token = block.batch * v.tokens + block.first_token;
      column(first, v.token_stride, block.count, v.channels, round_up,
             data + token * token_size + head * v.channels, token_size,
             scale + block.scale_row * token_size + head * v.channels);
    }
  });
}

template <class In, class Format>
void run(const Tensor& x, const QuantizeView& view, Axis axis, uint32_t round_up,
         const std::vector<int64_t>& cu, Tensor& data, Tensor& scale) {
  const BlockKernels<In> kernels = select_kernels<In, Format>();
  const In* in = static_cast<const In*>(x.const_data_ptr());
  auto* data_bytes = static_cast<uint8_t*>(data.mutable_data_ptr());
  auto* scale_bytes = static_cast<uint8_t*>(scale.mutable_data_ptr());
  if (axis == Axis::kColwise) {
    if (!cu.empty()) {  // rows without a block, tokens without a sequence
      std::memset(scale_bytes, kZeroBlockScale, scale.numel());
      const int64_t used = cu.back() * view.heads * view.channels;
      std::memset(data_bytes + used, 0, data.numel() - used);
    }
    run_columns<In>(in, view, kernels.colwise, round_up, token_blocks(view, cu), data_bytes,
                    scale_bytes);
    return;
  }
  const bool tokenwise = axis == Axis::kTokenwise;
  const int64_t scales_per_row = tokenwise ? 1 : (view.channels + kBlock - 1) / kBlock;
  run_rows<In>(in, view, tokenwise ? kernels.tokenwise : kernels.rowwise, round_up, scales_per_row,
               data_bytes, scale_bytes);
}

template <class Format>
void run_dtype(const Tensor& x, const QuantizeView& view, Axis axis, uint32_t round_up,
               const std::vector<int64_t>& cu, Tensor& data, Tensor& scale) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return run<float, Format>(x, view, axis, round_up, cu, data, scale);
    case ScalarType::BFloat16:
      return run<Bf16, Format>(x, view, axis, round_up, cu, data, scale);
    default:
      return run<Fp16, Format>(x, view, axis, round_up, cu, data, scale);
  }
}

std::vector<int64_t> scale_sizes(const Tensor& x, const QuantizeView& view, Axis axis,
                                 const std::vector<int64_t>& cu) {
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  if (axis == Axis::kRowwise) {
    sizes.back() = (view.channels + kBlock - 1) / kBlock;
  } else if (axis == Axis::kTokenwise) {
    sizes.back() = 1;
  } else if (!cu.empty()) {
    sizes[0] = view.tokens / kBlock + static_cast<int64_t>(cu.size()) - 1;
  } else {
    sizes[x.dim() == 4 ? 1 : 0] = (view.tokens + kBlock - 1) / kBlock;
  }
  return sizes;
}

// x (B,S,H,D), (T,H,D) or (rows,cols) fp32/bf16/fp16, read in place when its last stride is 1
// -> payload of x's shape, contiguous; e8m0 scale, plain, contiguous (shapes: docs/numerics.md §1).
std::tuple<Tensor, Tensor> quantize(const Tensor& input, std::string axis_name,
                                    std::string rounding, ScalarType dtype,
                                    std::optional<Tensor> cu_seqlens) {
  const ScalarType type = input.scalar_type();
  FAMX_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half,
             "x", "fp32, bf16 or fp16", "another dtype");
  FAMX_CHECK(dtype == ScalarType::Float8_e4m3fn || dtype == ScalarType::Float8_e5m2, "dtype",
             "float8_e4m3fn or float8_e5m2", "another dtype");
  FAMX_CHECK(input.dim() >= 2 && input.dim() <= 4, "x", "2, 3 or 4 dimensions", input.dim());
  FAMX_CHECK(rounding == "rceil" || rounding == "floor", "rounding", "rceil or floor", rounding);
  FAMX_CHECK(!cu_seqlens || input.dim() == 3, "cu_seqlens", "None unless x is (T,H,D)", input.dim(),
             " dimensions");
  const Axis axis = parse_axis(axis_name);
  const bool in_place = input.size(input.dim() - 1) <= 1 || input.stride(input.dim() - 1) == 1;
  const Tensor x = in_place ? input : torch::stable::contiguous(input);
  const QuantizeView view = view_of(x);
  std::vector<int64_t> cu;
  if (cu_seqlens && axis == Axis::kColwise) cu = read_cu_seqlens(*cu_seqlens, view.tokens);

  Tensor data = torch::stable::new_empty(x, x.sizes(), dtype);
  Tensor scale =
      torch::stable::new_empty(x, scale_sizes(x, view, axis, cu), ScalarType::Float8_e8m0fnu);
  const uint32_t round_up = rounding == "rceil" ? 1 : 0;
  if (scale.numel() == 0 && data.numel() == 0) return {data, scale};
  if (dtype == ScalarType::Float8_e4m3fn) {
    run_dtype<E4M3>(x, view, axis, round_up, cu, data, scale);
  } else {
    run_dtype<E5M2>(x, view, axis, round_up, cu, data, scale);
  }
  return {data, scale};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn_mx, CPU, m) { m.impl("quantize", TORCH_BOX(&quantize)); }

}  // namespace flash_attn_mx::ops
