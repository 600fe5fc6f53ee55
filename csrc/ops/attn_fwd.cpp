// The forward kernel's host side: tensors -> checks -> AttnFwdParams -> launch record -> executor
// (docs/host.md). Allocates nothing and copies nothing: flash_attn_mx/sm100.py brings tensors into
// the form that is checked here.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include "driver.h"
#include "kernels/attn_fwd/launch.h"
#include "operands.h"
#include "params.h"

namespace flash_attn_mx::ops {
namespace {

constexpr float kMinScale = 0x1p-126f;
// What K and V of the heads in work may take of L2: half of a B200's 126 MB, whose two halves hold
// copies of their own. untuned
constexpr int64_t kL2Bytes = int64_t{63} << 20;

// Query heads whose K and V fit L2 together, at least one.
int32_t heads_at_once(const Shape& s) {
  const int64_t key_head_bytes = std::max<int64_t>(1, 2 * s.max_k * s.head_dim);
  const int64_t fitting = std::max<int64_t>(1, kL2Bytes / key_head_bytes) * s.heads_per_kv();
  return int32_t(std::clamp<int64_t>(fitting, 1, std::max<int64_t>(1, s.batch * s.heads)));
}

void set_scalars(AttnFwdParams& p, const Shape& s, double softmax_scale, int64_t left,
                 int64_t right) {
  p.batch = int32_t(s.batch), p.heads = int32_t(s.heads), p.head_dim = int32_t(s.head_dim);
  p.heads_per_kv = int32_t(s.heads_per_kv());
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
  p.out = tensor.mutable_data_ptr();
  p.out_stride_batch = out.batch_stride;
  p.out_stride_token = out.token_stride;
  p.out_stride_head = out.head_stride;
  p.out_aligned = out.rows_aligned();
  p.lse = static_cast<float*>(lse.mutable_data_ptr());
  p.lse_stride_head = s.tokens_q;
  p.lse_stride_batch = s.heads * s.tokens_q;
}

LaunchRecord make_record(const std::string& kernel, int64_t tile_dim, int64_t ctas,
                         const AttnFwdParams& p) {
  LaunchRecord record;
  record.kernel = kernel;
  record.grid = uint32_t(std::min(fwd::launch_items(p.seqlen_q, p.heads, p.batch), ctas));
  record.block = fwd::kLaunchThreads;
  record.smem_bytes = fwd::launch_smem_bytes(int(tile_dim));
  set_params(record, p);
  return record;
}

// q, k, v (B,S,H,D) or packed (T,H,D) e4m3, strides and address as TMA wants; q_scale, k_scale,
// v_scale atoms as params.h lays them out; v_tok and its plain scale where a mask cuts tiles
// -> out and lse, written by the kernel.
// tile_dim: head_dim of the instance `kernel`.   ctas: the most to launch; 0: one per
// multiprocessor of q's device.   executor, image: see execute().
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
  check_tile(tile_dim, shape);
  FAMX_CHECK(cu_seqlens_k.has_value() == packed, "cu_seqlens_k", "given as cu_seqlens_q", "not");
  FAMX_CHECK(!v_tok || (View("v_tok", *v_tok, packed).same_sizes(v) &&
                        v_tok->get_device_index() == device),
             "v_tok", "the shape and device of v", "another");
  FAMX_CHECK((window_left < 0 && window_right < 0) || (v_tok && v_tok_scale), "v_tok",
             "given where a window cuts tiles", "None");

  AttnFwdParams p = {};
  const int64_t q_atoms = shape.atoms(shape.tokens_q), k_atoms = shape.atoms(shape.tokens_k);
  const int64_t q_heads = shape.outer() * shape.heads, k_heads = shape.outer() * shape.heads_k;
  p.q_scale = scale_atoms("q_scale", q_scale, q_heads, q_atoms, device);
  p.k_scale = scale_atoms("k_scale", k_scale, k_heads, k_atoms, device);
  p.v_scale = scale_atoms("v_scale", v_scale, k_heads, k_atoms, device);
  if (v_tok_scale) set_token_factors(p, token_factors(*v_tok_scale, v, packed));
  p.cu_seqlens_q = offsets("cu_seqlens_q", cu_seqlens_q, shape.batch, device);
  p.cu_seqlens_k = offsets("cu_seqlens_k", cu_seqlens_k, shape.batch, device);
  set_scalars(p, shape, softmax_scale, window_left, window_right);
  set_output(p, shape, out, lse);

  LaunchRecord record =
      make_record(kernel, tile_dim, ctas > 0 ? ctas : driver::multiprocessors(device), p);
  if (record.grid == 0) return execute({record}, executor, {image}, device);
  // A map must describe memory. Where there are no keys none is loaded, and q stands in.
  const View& token_view = v_tok ? View("v_tok", *v_tok, packed) : v;
  const auto add_map = [&](const char* name, size_t offset, const View& x) {
    record.maps.push_back(tile_map(name, offset, x.empty() ? q : x, tile_dim, kTile));
  };
  add_map("q", offsetof(AttnFwdParams, q), q);
  add_map("k", offsetof(AttnFwdParams, k), k);
  add_map("v", offsetof(AttnFwdParams, v), v);
  add_map("v_tok", offsetof(AttnFwdParams, v_tok), token_view);
  return execute({record}, executor, {image}, device);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn_mx, CompositeExplicitAutograd, m) {
  m.impl("attn_fwd", TORCH_BOX(&attn_fwd));
}

}  // namespace flash_attn_mx::ops
