// The quantiser's kernel: tensors -> checks -> QuantizeParams -> launch record -> executor (docs/host.md). Allocates nothing:
// flash_attn_mx/device_quantize.py does.
#include <algorithm>
#include <optional>
#include <string>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "checks.h"
#include "kernels/quantize/launch.h"
#include "launch.h"
#include "operands.h"
#include "params.h"
#include "quantize_view.h"

namespace flash_attn_mx::ops {
namespace {

using torch::headeronly::ScalarType;

constexpr int64_t kBlock = 32;
static_assert(kTile == flash_attn_mx::quantize::kLaunchTile);
constexpr int64_t kLimit = int64_t{1} << 31;  // of tokens, heads, channels and CTAs

uint8_t* bytes_of(const char* name, const std::optional<Tensor>& out, int64_t count, int device) {
  if (!out) return nullptr;
  FAMX_CHECK(out->element_size() == 1 && out->is_contiguous(), name, "contiguous bytes",
             "another dtype or strides");
  FAMX_CHECK(int64_t(out->numel()) == count, name, count, int64_t(out->numel()), " bytes");
  FAMX_CHECK(out->get_device_index() == device, name, "the device of x", "another");
  Tensor tensor = *out;
  return static_cast<uint8_t*>(tensor.mutable_data_ptr());
}

int64_t rows_of(const QuantizeView& view) { return view.batch * view.tokens * view.heads; }

// Any four channels, from a multiple of four on, lie at a multiple of their size.
bool four_at_once(const Tensor& x, const QuantizeView& view) {
  const int64_t size = 4 * x.element_size();
  const auto fits = [](int64_t n, int64_t stride) { return n <= 1 || stride % 4 == 0; };
  return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % size == 0 &&
         fits(view.batch, view.batch_stride) && fits(view.tokens, view.token_stride) &&
         fits(view.heads, view.head_stride);
}

// x (B,S,H,D), (T,H,D) or (rows,cols) fp32/bf16/fp16 with unit stride along the channels -> the outputs that are given, written by the
// kernel: per axis the payload, x's shape, contiguous, in FP8 of one type, and its scale bytes. Scales of row and col
// are plain, or with `atoms` as params.h lays them out.   cu_seqlens: of a packed x.
// executor: "driver" launches the code in the file `image` and returns ""; "record" returns the launch record as JSON.
std::string quantize_device(const Tensor& x, std::string rounding, std::optional<Tensor> row,
                            std::optional<Tensor> row_scale, std::optional<Tensor> col,
                            std::optional<Tensor> col_scale, std::optional<Tensor> tok,
                            std::optional<Tensor> tok_scale, std::optional<Tensor> cu_seqlens,
                            bool atoms, std::string kernel, std::string executor,
                            std::string image) {
  FAMX_CHECK(x.dim() >= 2 && x.dim() <= 4, "x", "2, 3 or 4 dimensions", x.dim());
  const int64_t channel_stride = x.stride(x.dim() - 1);
  const QuantizeView view = view_of(x);
  FAMX_CHECK(view.channels <= 1 || channel_stride == 1, "x", "stride 1 along the channels",
             channel_stride);
  FAMX_CHECK(rounding == "rceil" || rounding == "floor", "rounding", "rceil or floor", rounding);
  FAMX_CHECK(view.channels % 4 == 0 && view.channels <= kTile, "x",
             "head_dim that is a multiple of 4, at most 128", view.channels);
  FAMX_CHECK(rows_of(view) * view.channels == 0 || four_at_once(x, view), "x",
             "an address and strides that are multiples of 4 elements", "others");
  const int device = x.get_device_index();
  const bool packed = cu_seqlens.has_value();
  const int64_t sequences = packed ? int64_t(cu_seqlens->numel()) - 1 : view.batch;
  const int64_t row_blocks = blocks(view.channels, kBlock);
  const int64_t tiles = packed ? view.tokens / kTile + sequences : blocks(view.tokens, kTile);
  const int64_t rows = rows_of(view);
  const int64_t outer = packed ? 1 : view.batch;
  const int64_t atom_bytes = outer * view.heads * tiles * kAtomBytes;
  const int64_t col_rows =
      packed ? view.tokens / kBlock + sequences : view.batch * blocks(view.tokens, kBlock);
  // Packed: one number more for the tokens behind the last sequence, which start a tile of their own.
  const int64_t slots = packed ? tiles + 1 : view.batch * tiles;
  FAMX_CHECK(std::max({view.tokens, view.heads, view.channels, slots * view.heads}) < kLimit, "x",
             "fewer than 2^31 tokens, and tiles of 128 tokens", "more");

  QuantizeParams p = {};
  p.x = x.const_data_ptr();
  p.row = bytes_of("row", row, rows * view.channels, device);
  p.col = bytes_of("col", col, rows * view.channels, device);
  p.tok = bytes_of("tok", tok, rows * view.channels, device);
  p.row_scale = bytes_of("row_scale", row_scale, atoms ? atom_bytes : rows * row_blocks, device);
  p.col_scale = bytes_of("col_scale", col_scale,
                         atoms ? atom_bytes : col_rows * view.heads * view.channels, device);
  p.tok_scale = bytes_of("tok_scale", tok_scale, rows, device);
  ScalarType type = ScalarType::Float8_e4m3fn;
  for (const auto* data : {&row, &col, &tok})
    if (*data) type = (*data)->scalar_type();
  for (const auto* data : {&row, &col, &tok})
    FAMX_CHECK(!*data || (*data)->scalar_type() == type, "row, col, tok", "one FP8 type",
               "several");
  FAMX_CHECK(type == ScalarType::Float8_e4m3fn || type == ScalarType::Float8_e5m2, "row, col, tok",
             "float8_e4m3fn or float8_e5m2", "another dtype");
  FAMX_CHECK(row.has_value() == row_scale.has_value() && col.has_value() == col_scale.has_value() &&
                 tok.has_value() == tok_scale.has_value(),
             "row, col, tok", "a scale for every payload", "one without the other");
  if (packed) {
    FAMX_CHECK(cu_seqlens->scalar_type() == ScalarType::Int && cu_seqlens->is_contiguous() &&
                   cu_seqlens->get_device_index() == device && x.dim() == 3 && sequences >= 0,
               "cu_seqlens", "contiguous int32 offsets of a (T,H,D) tensor, on its device",
               "others");
    p.cu_seqlens = static_cast<const int32_t*>(cu_seqlens->const_data_ptr());
  }
  p.x_stride_batch = view.batch_stride;
  p.x_stride_token = view.token_stride;
  p.x_stride_head = view.head_stride;
  p.sequences = int32_t(sequences), p.tokens = int32_t(view.tokens);
  p.heads = int32_t(view.heads), p.head_dim = int32_t(view.channels), p.tiles = int32_t(tiles);
  p.round_up = rounding == "rceil", p.e5m2 = type == ScalarType::Float8_e5m2, p.atoms = atoms;

  LaunchRecord record;
  record.kernel = kernel;
  record.grid = rows > 0 && view.channels > 0 ? uint32_t(slots * view.heads) : 0;
  namespace kernels = flash_attn_mx::quantize;
  record.block =
      kernels::launch_threads(kernels::launch_tile(int(view.channels)), int(x.element_size()));
  set_params(record, p);
  return execute({record}, executor, {image}, device);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn_mx, CompositeExplicitAutograd, m) {
  m.impl("quantize_device", TORCH_BOX(&quantize_device));
}

}  // namespace flash_attn_mx::ops
