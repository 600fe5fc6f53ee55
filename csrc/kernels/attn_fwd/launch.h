// What the host must know of attn_fwd besides AttnFwdParams. Plain C++: config.cuh, which decides
// these numbers, refuses to compile where they differ.
#pragma once

#include <cstdint>

namespace flash_attn_mx::fwd {

constexpr int kItemRows = 256;  // query rows of a work item
constexpr int kBlockThreads = 384;

// Dynamic shared memory of the instance with tiles of this head_dim; 0: there is no such instance.
constexpr uint32_t smem_bytes(int head_dim) {
  return head_dim == 64 ? 178032 : head_dim == 128 ? 223488 : 0;
}

}  // namespace flash_attn_mx::fwd
