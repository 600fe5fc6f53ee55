// The launch record: all that running a kernel once takes, whoever runs it. No torch, no CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace flash_attn_mx::ops {

// Arguments of cuTensorMapEncodeTiled for a map of bytes, innermost dimension first, zero fill.
struct TensorMapTiled {
  static constexpr int kRank = 4;
  const char* name;
  size_t offset;  // where its 128 bytes stand in the parameters
  const void* address;
  uint64_t sizes[kRank];
  uint64_t strides_bytes[kRank - 1];  // of dimensions 1, 2, ...
  uint32_t box[kRank];
  uint32_t swizzle_bytes;  // 32, 64 or 128
};

struct LaunchRecord {
  std::string kernel;  // name of the instance, which is its symbol
  uint32_t grid = 0;   // CTAs, a multiple of the cluster; 0: there is nothing to do
  uint32_t cluster = 1;
  uint32_t block = 0;
  uint32_t smem_bytes = 0;           // dynamic
  std::vector<uint8_t> params;       // the kernel's one parameter; maps are blank until encoded
  std::vector<TensorMapTiled> maps;  // those of `params`
};

// The records as a JSON list: the fields above, params in hexadecimal. For the emulator, tests and people.
std::string to_json(const std::vector<LaunchRecord>& records);

}  // namespace flash_attn_mx::ops
