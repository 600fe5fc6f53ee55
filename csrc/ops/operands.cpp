#include "operands.h"

#include <algorithm>
#include <iterator>

#include <torch/headeronly/core/ScalarType.h>

#include "driver.h"
#include "kernels/attn_fwd/launch.h"
#include "stream.h"

namespace flash_attn_mx::ops {
namespace {

using torch::headeronly::ScalarType;

bool aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % kAlignment == 0; }

void check_stride(const char* name, int64_t size, int64_t stride) {
  FAMX_CHECK(size <= 1 || (stride > 0 && stride % kAlignment == 0), name,
             "strides that are positive multiples of 16 bytes", stride);
}

}  // namespace

View::View(const char* name, const Tensor& x, bool packed) : tensor(x) {
  FAMX_CHECK(x.dim() == (packed ? 3 : 4), name, packed ? "(T, H, D)" : "(B, S, H, D)", x.dim(),
             " dimensions");
  const auto n = x.sizes();
  const auto s = x.strides();
  const int first = packed ? 0 : 1;
  batch = packed ? 1 : n[0];
  batch_stride = packed ? 0 : s[0];
  tokens = n[first], heads = n[first + 1], channels = n[first + 2];
  token_stride = s[first], head_stride = s[first + 1];
  FAMX_CHECK(channels == 1 || s[first + 2] == 1, name, "stride 1 along head_dim", s[first + 2]);
}

bool View::rows_aligned() const {
  const int64_t size = tensor.element_size();
  const auto whole = [&](int64_t stride) { return stride * size % kAlignment == 0; };
  return aligned(tensor.const_data_ptr()) && whole(batch_stride) && whole(token_stride) &&
         whole(head_stride);
}

Shape shape_of(const View& q, const View& k, const View& v, const View& out, const Tensor& lse,
               const std::optional<Tensor>& cu_q, int64_t max_q, int64_t max_k) {
  Shape s;
  s.packed = cu_q.has_value();
  s.batch = s.packed ? cu_q->numel() - 1 : q.batch;
  s.heads = q.heads, s.heads_k = k.heads, s.head_dim = q.channels;
  s.tokens_q = q.tokens, s.tokens_k = k.tokens;
  s.max_q = s.packed ? max_q : q.tokens;
  s.max_k = s.packed ? max_k : k.tokens;
  FAMX_CHECK(s.heads_k > 0 ? s.heads % s.heads_k == 0 : s.heads == 0, "q",
             "heads divisible by those of k", s.heads, " and ", s.heads_k);
  for (const View* x : {&k, &v})
    FAMX_CHECK(x->batch == q.batch && x->tokens == k.tokens && x->heads == k.heads &&
                   x->channels == s.head_dim,
               "k, v", "shapes that match q and each other", "others");
  FAMX_CHECK(out.same_sizes(q), "out", "the shape of q", "another");
  FAMX_CHECK(lse.scalar_type() == ScalarType::Float && lse.is_contiguous() &&
                 int64_t(lse.numel()) == q.batch * s.heads * s.tokens_q,
             "lse", "contiguous float32, one per query and head", "another");
  FAMX_CHECK(std::max({s.tokens_q, s.tokens_k, s.max_q, s.max_k}) < kMaxTokens &&
                 s.batch * s.heads * blocks(s.max_q, kTile) < kMaxTokens &&
                 s.batch * s.heads_k * blocks(s.max_k, kTile) < kMaxTokens,
             "q, k", "fewer than 2^30 tokens, and tiles of 128 tokens", "more");
  for (const Tensor* x : {&k.tensor, &v.tensor, &out.tensor, &lse})
    FAMX_CHECK(x->get_device_index() == q.tensor.get_device_index(), "q, k, v, out, lse",
               "one device", "several");
  return s;
}

void check_tile(int64_t tile_dim, const Shape& shape) {
  FAMX_CHECK(fwd::launch_tile(int(tile_dim)) == tile_dim && shape.head_dim <= tile_dim, "tile_dim",
             "64 or 128, at least head_dim", tile_dim);
}

TensorMapTiled tile_map(const char* name, size_t offset, const View& x, int64_t columns,
                        int64_t rows) {
  FAMX_CHECK(x.tensor.scalar_type() == ScalarType::Float8_e4m3fn, name, "float8_e4m3fn",
             "another dtype");
  FAMX_CHECK(aligned(x.tensor.const_data_ptr()), name, "an address that is a multiple of 16",
             "another");
  check_stride(name, x.tokens, x.token_stride);
  check_stride(name, x.heads, x.head_stride);
  check_stride(name, x.batch, x.batch_stride);
  // The stride of a dimension of size 1 means nothing to torch, but must be legal for TMA.
  const auto bytes = [](int64_t size, int64_t stride) -> uint64_t {
    return size <= 1 ? kAlignment : stride;
  };
  TensorMapTiled map = {};
  map.name = name;
  map.offset = offset;
  map.address = x.tensor.const_data_ptr();
  const uint64_t sizes[] = {uint64_t(x.channels), uint64_t(x.tokens), uint64_t(x.heads),
                            uint64_t(x.batch)};
  const uint64_t strides[] = {bytes(x.tokens, x.token_stride), bytes(x.heads, x.head_stride),
                              bytes(x.batch, x.batch_stride)};
  const uint32_t box[] = {uint32_t(columns), uint32_t(rows), 1, 1};
  std::copy(std::begin(sizes), std::end(sizes), map.sizes);
  std::copy(std::begin(strides), std::end(strides), map.strides_bytes);
  std::copy(std::begin(box), std::end(box), map.box);
  map.swizzle_bytes = uint32_t(columns);
  return map;
}

const uint8_t* scale_atoms(const char* name, const Tensor& scale, int64_t heads, int64_t atoms,
                           int device) {
  FAMX_CHECK(scale.element_size() == 1 && scale.is_contiguous(), name, "contiguous bytes",
             "another dtype or strides");
  FAMX_CHECK(int64_t(scale.numel()) == heads * atoms * kAtomBytes, name, heads * atoms * kAtomBytes,
             int64_t(scale.numel()), " bytes of swizzled128x4 atoms");
  FAMX_CHECK(scale.get_device_index() == device, name, "the device of q", "another");
  FAMX_CHECK(aligned(scale.const_data_ptr()), name, "an address that is a multiple of 16",
             "another");
  return static_cast<const uint8_t*>(scale.const_data_ptr());
}

const int32_t* offsets(const char* name, const std::optional<Tensor>& cu, int64_t batch,
                       int device) {
  if (!cu) return nullptr;
  FAMX_CHECK(cu->get_device_index() == device, name, "the device of q", "another");
  FAMX_CHECK(cu->scalar_type() == ScalarType::Int && cu->dim() == 1 && cu->is_contiguous(), name,
             "a contiguous 1-D int32 tensor", "another");
  FAMX_CHECK(cu->size(0) == batch + 1, name, "as many offsets as cu_seqlens_q", cu->size(0));
  return static_cast<const int32_t*>(cu->const_data_ptr());
}

View token_factors(const Tensor& scale, const View& v, bool packed) {
  View view("v_tok_scale", scale, packed);
  FAMX_CHECK(view.channels == 1 && scale.element_size() == 1, "v_tok_scale",
             "one byte per token and head", "another shape or dtype");
  FAMX_CHECK(scale.get_device_index() == v.tensor.get_device_index(), "v_tok_scale",
             "the device of v", "another");
  FAMX_CHECK(view.batch == v.batch && view.tokens == v.tokens && view.heads == v.heads,
             "v_tok_scale", "the tokens and heads of v", "others");
  return view;
}

int32_t window_side(int64_t side) { return int32_t(std::clamp<int64_t>(side, -1, kMaxTokens)); }

std::string execute(std::vector<LaunchRecord> records, const std::string& executor,
                    const std::vector<std::string>& images, int device) {
  if (executor == "record") return to_json(records);
  if (executor == "encode") {
    for (LaunchRecord& record : records) driver::encode_maps(record);
    return to_json(records);
  }
  FAMX_CHECK(executor == "driver", "executor", "driver, record or encode", executor);
  FAMX_CHECK(images.size() == records.size(), "images", records.size(), images.size());
  for (size_t i = 0; i < records.size(); ++i)
    driver::launch(records[i], images[i], device, current_stream(device));
  return "";
}

}  // namespace flash_attn_mx::ops
