// The forward kernel's host side: tensors -> checks -> AttnFwdParams -> launch record -> executor
// (docs/host.md). Allocates nothing and copies nothing: flash_attn_mx/sm100.py brings tensors into
// the form that is checked here.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <string>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "checks.h"
#include "driver.h"
#include "kernels/attn_fwd/launch.h"
#include "launch.h"
#include "params.h"
#include "stream.h"

namespace flash_attn_mx::ops {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kTile = 128;  // tokens of a box and of a scale atom
constexpr int64_t kAtomBytes = 512;
constexpr int64_t kAlignment = 16;  // of addresses and strides, for TMA and bulk copies
constexpr int64_t kMaxTokens = int64_t{1} << 30;  // token arithmetic in the kernel is 32-bit
constexpr double kLog2E = 1.4426950408889634;
constexpr float kMinScale = 0x1p-126f;
// What K and V of the heads in work may take of L2: half of a B200's 126 MB, whose two halves hold
// copies of their own. untuned
constexpr int64_t kL2Bytes = int64_t{63} << 20;

int64_t blocks(int64_t n, int64_t size) { return (n + size - 1) / size; }

bool aligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % kAlignment == 0; }

// A payload or an output seen as (batch, tokens, heads, channels); strides in elements.
// Packed: batch 1.
struct View {
  const Tensor& tensor;
  int64_t batch, tokens, heads, channels;
  int64_t batch_stride, token_stride, head_stride;

  View(const char* name, const Tensor& x, bool packed) : tensor(x) {
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

  bool same_sizes(const View& x) const {
    return batch == x.batch && tokens == x.tokens && heads == x.heads && channels == x.channels;
  }
  bool empty() const { return batch * tokens * heads * channels == 0; }
};

struct Shape {
  bool packed;
  int64_t batch;  // packed: sequences
  int64_t heads, heads_k, head_dim;
  int64_t tokens_q, tokens_k;  // packed: of all sequences
  int64_t max_q, max_k;

  // Scale atoms of one head.
  int64_t atoms(int64_t tokens) const {
    return packed ? tokens / kTile + batch : blocks(tokens, kTile);
  }
};

void check_stride(const char* name, int64_t size, int64_t stride) {
  FAMX_CHECK(size <= 1 || (stride > 0 && stride % kAlignment == 0), name,
             "strides that are positive multiples of 16 bytes", stride);
}

// The map of a payload: dimensions (channels, tokens, heads, batch), boxes of one tile.
TensorMapTiled tile_map(const char* name, size_t offset, const View& x, int64_t tile_dim) {
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
  const uint32_t box[] = {uint32_t(tile_dim), uint32_t(kTile), 1, 1};
  std::copy(std::begin(sizes), std::end(sizes), map.sizes);
  std::copy(std::begin(strides), std::end(strides), map.strides_bytes);
  std::copy(std::begin(box), std::end(box), map.box);
  map.swizzle_bytes = uint32_t(tile_dim);
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

// What the kernel relies on beyond the checks of the single tensors.
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

int32_t window_side(int64_t side) { return int32_t(std::clamp<int64_t>(side, -1, kMaxTokens)); }

// Query heads whose K and V fit L2 together, at least one.
int32_t heads_at_once(const Shape& s) {
  const int64_t key_head_bytes = std::max<int64_t>(1, 2 * s.max_k * s.head_dim);
  const int64_t per_key_head = s.heads_k ? s.heads / s.heads_k : 1;
  const int64_t fitting = std::max<int64_t>(1, kL2Bytes / key_head_bytes) * per_key_head;
  return int32_t(std::clamp<int64_t>(fitting, 1, std::max<int64_t>(1, s.batch * s.heads)));
}

void set_scalars(AttnFwdParams& p, const Shape& s, double softmax_scale, int64_t left,
                 int64_t right) {
  p.batch = int32_t(s.batch), p.heads = int32_t(s.heads), p.head_dim = int32_t(s.head_dim);
  p.heads_per_kv = int32_t(s.heads_k ? s.heads / s.heads_k : 1);
  p.seqlen_q = int32_t(s.max_q), p.seqlen_k = int32_t(s.max_k);
  p.q_scale_tiles = int32_t(s.atoms(s.tokens_q)), p.k_scale_tiles = int32_t(s.atoms(s.tokens_k));
  p.window_left = window_side(left), p.window_right = window_side(right);
  p.q_blocks = int32_t(blocks(s.max_q, fwd::kLaunchRows));
  p.scale_log2 = std::max(float(std::fabs(softmax_scale) * kLog2E), kMinScale);
  p.negate = softmax_scale < 0;
  p.heads_at_once = heads_at_once(s);
}

void set_output(AttnFwdParams& p, const Shape& s, const View& out, Tensor lse) {
  Tensor tensor = out.tensor;
  const int64_t size = tensor.element_size();
  p.out = tensor.mutable_data_ptr();
  p.out_stride_batch = out.batch_stride;
  p.out_stride_token = out.token_stride;
  p.out_stride_head = out.head_stride;
  const auto rows_aligned = [&](int64_t stride) { return stride * size % kAlignment == 0; };
  p.out_aligned = aligned(p.out) && rows_aligned(out.batch_stride) &&
                  rows_aligned(out.token_stride) && rows_aligned(out.head_stride);
  p.lse = static_cast<float*>(lse.mutable_data_ptr());
  p.lse_stride_head = s.tokens_q;
  p.lse_stride_batch = s.heads * s.tokens_q;
}

void set_token_factors(AttnFwdParams& p, const Tensor& scale, const View& v, bool packed) {
  View view("v_tok_scale", scale, packed);
  FAMX_CHECK(view.channels == 1 && scale.element_size() == 1, "v_tok_scale",
             "one byte per token and head", "another shape or dtype");
  FAMX_CHECK(scale.get_device_index() == v.tensor.get_device_index(), "v_tok_scale",
             "the device of v", "another");
  view.channels = v.channels;
  FAMX_CHECK(view.same_sizes(v), "v_tok_scale", "the tokens and heads of v", "others");
  p.v_tok_scale = static_cast<const uint8_t*>(scale.const_data_ptr());
  p.v_tok_scale_stride_batch = view.batch_stride;
  p.v_tok_scale_stride_token = view.token_stride;
  p.v_tok_scale_stride_head = view.head_stride;
}

LaunchRecord make_record(const std::string& kernel, int64_t tile_dim, int64_t ctas,
                         const AttnFwdParams& p) {
  LaunchRecord record;
  record.kernel = kernel;
  record.grid = uint32_t(std::min(fwd::launch_items(p.seqlen_q, p.heads, p.batch), ctas));
  record.block = fwd::kLaunchThreads;
  record.smem_bytes = fwd::launch_smem_bytes(int(tile_dim));
  const auto* bytes = reinterpret_cast<const uint8_t*>(&p);
  record.params.assign(bytes, bytes + sizeof(p));
  return record;
}

// What is to be done with the record.
std::string execute(LaunchRecord& record, const std::string& executor, const std::string& image,
                    int device) {
  if (executor == "record") return to_json(record);
  if (executor == "encode") {
    driver::encode_maps(record);
    return to_json(record);
  }
  FAMX_CHECK(executor == "driver", "executor", "driver, record or encode", executor);
  driver::launch(record, image, device, current_stream(device));
  return "";
}

// q, k, v (B,S,H,D) or packed (T,H,D) e4m3, strides and address as TMA wants; q_scale, k_scale,
// v_scale atoms as params.h lays them out; v_tok and its plain scale where a mask cuts tiles
// -> out and lse, written by the kernel.
// tile_dim: head_dim of the instance `kernel`.   ctas: the most to launch; 0: one per
// multiprocessor of q's device.   executor: "driver" launches the code in the file `image` and
// returns "". "record" returns the launch record as JSON and touches no device; "encode" likewise,
// with the maps encoded by the CUDA driver.
std::string attn_fwd(const Tensor& q_tensor, const Tensor& q_scale, const Tensor& k_tensor,
                     const Tensor& k_scale, const Tensor& v_tensor, const Tensor& v_scale,
                     std::optional<Tensor> v_tok, std::optional<Tensor> v_tok_scale,
                     const Tensor& out_tensor, const Tensor& lse,
                     std::optional<Tensor> cu_seqlens_q, std::optional<Tensor> cu_seqlens_k,
                     int64_t max_seqlen_q, int64_t max_seqlen_k, double softmax_scale,
                     int64_t window_left, int64_t window_right, std::string kernel,
                     int64_t tile_dim, int64_t ctas, std::string executor, std::string image) {
  const bool packed = cu_seqlens_q.has_value();
  const int device = q_tensor.get_device_index();
  const View q("q", q_tensor, packed), k("k", k_tensor, packed), v("v", v_tensor, packed);
  const View out("out", out_tensor, packed);
  const Shape shape = shape_of(q, k, v, out, lse, cu_seqlens_q, max_seqlen_q, max_seqlen_k);
  FAMX_CHECK(fwd::launch_tile(int(tile_dim)) == tile_dim && shape.head_dim <= tile_dim, "tile_dim",
             "64 or 128, at least head_dim", tile_dim);
  FAMX_CHECK(cu_seqlens_k.has_value() == packed, "cu_seqlens_k", "given as cu_seqlens_q", "not");
  FAMX_CHECK(!v_tok || (View("v_tok", *v_tok, packed).same_sizes(v) &&
                        v_tok->get_device_index() == device),
             "v_tok", "the shape and device of v", "another");
  FAMX_CHECK((window_left < 0 && window_right < 0) || (v_tok && v_tok_scale), "v_tok",
             "given where a window cuts tiles", "None");

  AttnFwdParams p = {};
  const int64_t outer = packed ? 1 : shape.batch;
  const int64_t q_atoms = shape.atoms(shape.tokens_q), k_atoms = shape.atoms(shape.tokens_k);
  p.q_scale = scale_atoms("q_scale", q_scale, outer * shape.heads, q_atoms, device);
  p.k_scale = scale_atoms("k_scale", k_scale, outer * shape.heads_k, k_atoms, device);
  p.v_scale = scale_atoms("v_scale", v_scale, outer * shape.heads_k, k_atoms, device);
  if (v_tok_scale) set_token_factors(p, *v_tok_scale, v, packed);
  p.cu_seqlens_q = offsets("cu_seqlens_q", cu_seqlens_q, shape.batch, device);
  p.cu_seqlens_k = offsets("cu_seqlens_k", cu_seqlens_k, shape.batch, device);
  set_scalars(p, shape, softmax_scale, window_left, window_right);
  set_output(p, shape, out, lse);

  LaunchRecord record =
      make_record(kernel, tile_dim, ctas > 0 ? ctas : driver::multiprocessors(device), p);
  if (record.grid == 0) return execute(record, executor, image, device);
  // A map must describe memory. Where there are no keys none is loaded, and q stands in.
  const View& token_view = v_tok ? View("v_tok", *v_tok, packed) : v;
  const auto add_map = [&](const char* name, size_t offset, const View& x) {
    record.maps.push_back(tile_map(name, offset, x.empty() ? q : x, tile_dim));
  };
  add_map("q", offsetof(AttnFwdParams, q), q);
  add_map("k", offsetof(AttnFwdParams, k), k);
  add_map("v", offsetof(AttnFwdParams, v), v);
  add_map("v_tok", offsetof(AttnFwdParams, v_tok), token_view);
  return execute(record, executor, image, device);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn_mx, CompositeExplicitAutograd, m) {
  m.impl("attn_fwd", TORCH_BOX(&attn_fwd));
}

}  // namespace flash_attn_mx::ops
