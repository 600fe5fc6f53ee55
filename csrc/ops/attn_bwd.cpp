// The backward kernels' host side: tensors -> checks -> parameters of bwd_preprocess, attn_bwd and
// bwd_postprocess -> their launch records -> executor (docs/host.md). Allocates nothing and copies
// nothing: flash_attn_mx/sm100.py brings tensors into the form that is checked here.
#include <cstddef>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "kernels/attn_bwd/launch.h"
#include "operands.h"
#include "params.h"

namespace flash_attn_mx::ops {
namespace {

using torch::headeronly::ScalarType;

// A quantised operand: payload as TMA wants it, scales in atoms.
struct Operand {
  View payload;
  const uint8_t* scale;
};

// What the kernels keep between them: row tiles of kLaunchRows each.
struct Scratch {
  int64_t row_tiles;  // per head
  float* bias;
  uint8_t* delta;
  float* dq_acc;
  int32_t* dq_turn;
};

struct Problem {
  Shape shape;
  int device;
  int64_t tile_dim;
  float softmax_scale;
  int32_t window_left, window_right;
  const int32_t *cu_seqlens_q, *cu_seqlens_k;

  bool empty() const {
    return shape.outer() * shape.heads * shape.head_dim * shape.tokens_q * shape.tokens_k == 0;
  }
};

// The address of scratch with this many elements; null where it is not given.
template <class T>
T* scratch(const char* name, std::optional<Tensor> x, ScalarType type, int64_t size, int device) {
  if (!x) return nullptr;
  FAMX_CHECK(x->scalar_type() == type && x->is_contiguous(), name,
             "contiguous float32, int32 or uint8", "another dtype or strides");
  FAMX_CHECK(int64_t(x->numel()) == size, name, size, int64_t(x->numel()), " elements");
  FAMX_CHECK(x->get_device_index() == device, name, "the device of q", "another");
  return static_cast<T*>(x->mutable_data_ptr());
}

// The gradient of x as a view; its pointer and strides, null and 0 where it is not wanted.
struct Gradient {
  void* address = nullptr;
  int64_t batch_stride = 0, token_stride = 0, head_stride = 0;
  bool aligned = true;

  Gradient(const char* name, std::optional<Tensor> grad, const View& x, bool packed) {
    if (!grad) return;
    const View view(name, *grad, packed);
    FAMX_CHECK(view.same_sizes(x), name, "the shape of its input", "another");
    FAMX_CHECK(grad->get_device_index() == x.tensor.get_device_index(), name, "the device of q",
               "another");
    address = grad->mutable_data_ptr();
    batch_stride = view.batch_stride, token_stride = view.token_stride;
    head_stride = view.head_stride, aligned = view.rows_aligned();
  }
};

template <class Params>
void set_rows(Params& p, const Problem& x, int64_t row_tiles) {
  p.batch = int32_t(x.shape.batch), p.head_dim = int32_t(x.shape.head_dim);
  p.seqlen_q = int32_t(x.shape.max_q), p.row_tiles = int32_t(row_tiles);
  p.cu_seqlens_q = x.cu_seqlens_q;
}

LaunchRecord pass_record(const std::string& kernel, const Problem& x) {
  LaunchRecord record;
  record.kernel = kernel;
  if (x.empty()) return record;
  record.grid = uint32_t(bwd::launch_pass_items(x.shape.max_q, x.shape.heads, x.shape.batch));
  record.block = bwd::kLaunchPassThreads;
  return record;
}

LaunchRecord preprocess(const std::string& kernel, const Problem& x, const Operand& dout,
                        const View& out, const Tensor& lse, const Scratch& s) {
  BwdPreprocessParams p = {};
  set_rows(p, x, s.row_tiles);
  p.heads = int32_t(x.shape.heads);
  p.dout = static_cast<const uint8_t*>(dout.payload.tensor.const_data_ptr());
  p.dout_scale = dout.scale;
  p.dout_stride_batch = dout.payload.batch_stride;
  p.dout_stride_token = dout.payload.token_stride;
  p.dout_stride_head = dout.payload.head_stride;
  p.out = out.tensor.const_data_ptr();
  p.out_stride_batch = out.batch_stride;
  p.out_stride_token = out.token_stride;
  p.out_stride_head = out.head_stride;
  p.lse = static_cast<const float*>(lse.const_data_ptr());
  p.lse_stride_head = x.shape.tokens_q;
  p.lse_stride_batch = x.shape.heads * x.shape.tokens_q;
  p.bias = s.bias, p.delta = s.delta, p.dq_acc = s.dq_acc, p.dq_turn = s.dq_turn;
  LaunchRecord record = pass_record(kernel, x);
  set_params(record, p);
  return record;
}

// operands: dout, dout_col, q, q_col, k, k_col.
LaunchRecord main_pass(const std::string& kernel, const Problem& x,
                       const std::vector<Operand>& operands, const View& v, const View& factors,
                       const Gradient& dk, const Gradient& dv, const Scratch& s) {
  AttnBwdParams p = {};
  set_rows(p, x, s.row_tiles);
  p.heads_k = int32_t(x.shape.heads_k), p.heads_per_kv = int32_t(x.shape.heads_per_kv());
  p.seqlen_k = int32_t(x.shape.max_k);
  p.k_scale_tiles = int32_t(x.shape.atoms(x.shape.tokens_k));
  p.window_left = x.window_left, p.window_right = x.window_right;
  p.softmax_scale = x.softmax_scale, p.scale_log2 = float(x.softmax_scale * kLog2E);
  p.cu_seqlens_k = x.cu_seqlens_k;
  set_token_factors(p, factors);
  p.bias = s.bias, p.delta = s.delta, p.dq_acc = s.dq_acc, p.dq_turn = s.dq_turn;
  p.dk = dk.address, p.dv = dv.address;
  p.dk_stride_batch = dk.batch_stride, p.dk_stride_token = dk.token_stride;
  p.dk_stride_head = dk.head_stride;
  p.dv_stride_batch = dv.batch_stride, p.dv_stride_token = dv.token_stride;
  p.dv_stride_head = dv.head_stride;
  p.grads_aligned = dk.aligned && dv.aligned;
  const uint8_t** scales[] = {&p.dout_scale,  &p.dout_col_scale, &p.q_scale,
                              &p.q_col_scale, &p.k_scale,        &p.k_col_scale};
  for (size_t i = 0; i < std::size(scales); ++i) *scales[i] = operands[i].scale;

  LaunchRecord record;
  record.kernel = kernel;
  set_params(record, p);
  if (x.empty()) return record;
  record.grid = uint32_t(bwd::launch_items(x.shape.max_k, x.shape.heads_k, x.shape.batch));
  record.cluster = bwd::kLaunchCluster;
  record.block = bwd::kLaunchThreads;
  record.smem_bytes = bwd::launch_smem_bytes(int(x.tile_dim));
  const int tile = int(x.tile_dim);
  const bwd::LaunchBox row = bwd::launch_row_box(tile), col = bwd::launch_col_box(tile),
                       key = bwd::launch_key_box(tile);
  const auto map = [&](const char* name, size_t offset, const View& payload, bwd::LaunchBox box) {
    record.maps.push_back(tile_map(name, offset, payload, box.columns, box.rows));
  };
  map("dout", offsetof(AttnBwdParams, dout), operands[0].payload, row);
  map("dout_col", offsetof(AttnBwdParams, dout_col), operands[1].payload, col);
  map("q", offsetof(AttnBwdParams, q), operands[2].payload, row);
  map("q_col", offsetof(AttnBwdParams, q_col), operands[3].payload, col);
  map("k", offsetof(AttnBwdParams, k), operands[4].payload, key);
  map("k_col", offsetof(AttnBwdParams, k_col), operands[5].payload, col);
  map("v_tok", offsetof(AttnBwdParams, v_tok), v, key);
  return record;
}

LaunchRecord postprocess(const std::string& kernel, const Problem& x, const Gradient& dq,
                         const Scratch& s) {
  BwdPostprocessParams p = {};
  set_rows(p, x, s.row_tiles);
  p.heads = int32_t(x.shape.heads);
  p.dq_acc = s.dq_acc, p.dq = dq.address, p.softmax_scale = x.softmax_scale;
  p.dq_stride_batch = dq.batch_stride, p.dq_stride_token = dq.token_stride;
  p.dq_stride_head = dq.head_stride;
  LaunchRecord record = pass_record(kernel, x);
  set_params(record, p);
  return record;
}

// dout, q, k (B,S,H,D) or packed (T,H,D) e4m3 with their scales, rowwise and (*_col) colwise; v_tok
// and its plain scale; out and lse of the forward -> dq, dk, dv, of which any may be missing.
// bias, delta, dq_acc, dq_turn: scratch, see params.h; dq_acc if and only if dq; dq_turn if
// and only if the sums of dQ are to be made in a fixed order.
// kernels: instances of bwd_preprocess, attn_bwd and bwd_postprocess with this tile_dim; the last is
// launched if dq is wanted. executor, images: see execute().
std::string attn_bwd(const Tensor& dout_tensor, const Tensor& dout_scale, const Tensor& dout_col,
                     const Tensor& dout_col_scale, const Tensor& q_tensor, const Tensor& q_scale,
                     const Tensor& q_col, const Tensor& q_col_scale, const Tensor& k_tensor,
                     const Tensor& k_scale, const Tensor& k_col, const Tensor& k_col_scale,
                     const Tensor& v_tok, const Tensor& v_tok_scale, const Tensor& out_tensor,
                     const Tensor& lse, const Tensor& bias, const Tensor& delta,
                     std::optional<Tensor> dq_acc, std::optional<Tensor> dq_turn,
                     std::optional<Tensor> dq_tensor, std::optional<Tensor> dk_tensor,
                     std::optional<Tensor> dv_tensor, std::optional<Tensor> cu_seqlens_q,
                     std::optional<Tensor> cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
                     double softmax_scale, int64_t window_left, int64_t window_right,
                     std::vector<std::string> kernels, int64_t tile_dim, std::string executor,
                     std::vector<std::string> images) {
  const bool packed = cu_seqlens_q.has_value();
  const View q("q", q_tensor, packed), k("k", k_tensor, packed), v("v_tok", v_tok, packed);
  const View out("out", out_tensor, packed);
  Problem x = {shape_of(q, k, v, out, lse, cu_seqlens_q, max_seqlen_q, max_seqlen_k),
               q_tensor.get_device_index(),
               tile_dim,
               float(softmax_scale),
               window_side(window_left),
               window_side(window_right),
               nullptr,
               nullptr};
  const Shape& shape = x.shape;
  check_tile(tile_dim, shape);
  FAMX_CHECK(cu_seqlens_k.has_value() == packed, "cu_seqlens_k", "given as cu_seqlens_q", "not");
  x.cu_seqlens_q = offsets("cu_seqlens_q", cu_seqlens_q, shape.batch, x.device);
  x.cu_seqlens_k = offsets("cu_seqlens_k", cu_seqlens_k, shape.batch, x.device);
  FAMX_CHECK(kernels.size() == 3, "kernels", "three names", int64_t(kernels.size()));

  const auto operand = [&](const char* name, const Tensor& payload, const char* scale_name,
                           const Tensor& scale, const View& like) -> Operand {
    const View view(name, payload, packed);
    FAMX_CHECK(view.same_sizes(like) && payload.get_device_index() == x.device, name,
               "the shape and device of q or k", "another");
    return {view, scale_atoms(scale_name, scale, shape.outer() * view.heads,
                              shape.atoms(view.tokens), x.device)};
  };
  const std::vector<Operand> operands = {
      operand("dout", dout_tensor, "dout_scale", dout_scale, q),
      operand("dout_col", dout_col, "dout_col_scale", dout_col_scale, q),
      operand("q", q_tensor, "q_scale", q_scale, q),
      operand("q_col", q_col, "q_col_scale", q_col_scale, q),
      operand("k", k_tensor, "k_scale", k_scale, k),
      operand("k_col", k_col, "k_col_scale", k_col_scale, k)};
  const View factors = token_factors(v_tok_scale, v, packed);

  Scratch s;
  s.row_tiles = shape.atoms(shape.tokens_q);
  const int64_t rows = bwd::launch_rows(s.row_tiles, shape.heads, shape.outer());
  const auto floats = [&](const char* name, std::optional<Tensor> t, int64_t size) {
    return scratch<float>(name, std::move(t), ScalarType::Float, size, x.device);
  };
  s.bias = floats("bias", bias, rows);
  s.delta = scratch<uint8_t>("delta", delta, ScalarType::Byte,
                             rows / bwd::kLaunchRows * bwd::kLaunchDeltaBytes, x.device);
  s.dq_acc = floats("dq_acc", dq_acc, rows * tile_dim);
  s.dq_turn =
      scratch<int32_t>("dq_turn", dq_turn, ScalarType::Int, rows / bwd::kLaunchRows, x.device);
  FAMX_CHECK(dq_acc.has_value() == dq_tensor.has_value(), "dq_acc", "given as dq", "not");
  const Gradient dq("dq", dq_tensor, q, packed);
  const Gradient dk("dk", dk_tensor, k, packed), dv("dv", dv_tensor, k, packed);

  std::vector<LaunchRecord> records = {preprocess(kernels[0], x, operands[0], out, lse, s),
                                       main_pass(kernels[1], x, operands, v, factors, dk, dv, s)};
  if (dq_tensor) records.push_back(postprocess(kernels[2], x, dq, s));
  if (images.size() > records.size()) images.resize(records.size());
  return execute(std::move(records), executor, images, x.device);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(flash_attn_mx, CompositeExplicitAutograd, m) {
  m.impl("attn_bwd", TORCH_BOX(&attn_bwd));
}

}  // namespace flash_attn_mx::ops
