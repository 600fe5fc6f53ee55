// What the host sides of the attention kernels share: how a tensor is seen, checked, and turned into
// the tensor maps, pointers and scalars of csrc/params.h. Allocates nothing and copies nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/stable/tensor.h>

#include "checks.h"
#include "launch.h"

namespace flash_attn_mx::ops {

using torch::stable::Tensor;

constexpr int64_t kTile = 128;  // tokens of a scale atom
constexpr int64_t kAtomBytes = 512;
constexpr int64_t kAlignment = 16;  // of addresses and strides, for TMA and bulk copies
constexpr int64_t kMaxTokens = int64_t{1} << 30;  // token arithmetic in the kernels is 32-bit
constexpr double kLog2E = 1.4426950408889634;

constexpr int64_t blocks(int64_t n, int64_t size) { return (n + size - 1) / size; }

// A payload, an output or a gradient seen as (batch, tokens, heads, channels); strides in elements.
// Packed: batch 1.
struct View {
  const Tensor& tensor;
  int64_t batch, tokens, heads, channels;
  int64_t batch_stride, token_stride, head_stride;

  View(const char* name, const Tensor& x, bool packed);

  bool same_sizes(const View& x) const {
    return batch == x.batch && tokens == x.tokens && heads == x.heads && channels == x.channels;
  }
  bool empty() const { return batch * tokens * heads * channels == 0; }
  // Whether every row starts at a multiple of 16 bytes.
  bool rows_aligned() const;
};

struct Shape {
  bool packed;
  int64_t batch;  // packed: sequences
  int64_t heads, heads_k, head_dim;
  int64_t tokens_q, tokens_k;  // packed: of all sequences
  int64_t max_q, max_k;

  // What stands before the heads in memory: packed sequences lie along the tokens.
  int64_t outer() const { return packed ? 1 : batch; }
  // Scale atoms of one head.
  int64_t atoms(int64_t tokens) const {
    return packed ? tokens / kTile + batch : blocks(tokens, kTile);
  }
  int64_t heads_per_kv() const { return heads_k ? heads / heads_k : 1; }
};

// Checks what the kernels rely on beyond the checks of the single tensors. v: any copy of it.
Shape shape_of(const View& q, const View& k, const View& v, const View& out, const Tensor& lse,
               const std::optional<Tensor>& cu_q, int64_t max_q, int64_t max_k);

// tile_dim is an instance's head_dim for which the kernels have tiles, and holds this head_dim.
void check_tile(int64_t tile_dim, const Shape& shape);

// The map of a payload: dimensions (channels, tokens, heads, batch), boxes of columns x rows, the swizzle over the columns.
TensorMapTiled tile_map(const char* name, size_t offset, const View& x, int64_t columns,
                        int64_t rows);

// Addresses of scales in atoms (csrc/params.h), of offsets (null where there are none).
const uint8_t* scale_atoms(const char* name, const Tensor& scale, int64_t heads, int64_t atoms,
                           int device);
const int32_t* offsets(const char* name, const std::optional<Tensor>& cu, int64_t batch,
                       int device);

// The tokenwise scale of V as a view of one channel, checked against V.
View token_factors(const Tensor& scale, const View& v, bool packed);

int32_t window_side(int64_t side);

template <class Params>
void set_token_factors(Params& p, const View& factors) {
  p.v_tok_scale = static_cast<const uint8_t*>(factors.tensor.const_data_ptr());
  p.v_tok_scale_stride_batch = factors.batch_stride;
  p.v_tok_scale_stride_token = factors.token_stride;
  p.v_tok_scale_stride_head = factors.head_stride;
}

template <class Params>
void set_params(LaunchRecord& record, const Params& p) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(&p);
  record.params.assign(bytes, bytes + sizeof(p));
}

// What is to be done with the records, in this order on one stream. executor: "driver" launches each
// with the code in its file of `images` and returns "". "record" returns the records as JSON and
// touches no device; "encode" likewise, with the maps encoded by the CUDA driver.
std::string execute(std::vector<LaunchRecord> records, const std::string& executor,
                    const std::vector<std::string>& images, int device);

}  // namespace flash_attn_mx::ops
