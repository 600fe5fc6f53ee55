// Rows of bf16, fp16 or fp32 in global memory, 16 bytes at a time where their alignment allows it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/ptx.cuh"

namespace flash_attn_mx {

// 16 bytes of a row.
template <class T>
union RowVector {
  static constexpr int kSize = 16 / sizeof(T);
  T element[kSize];
  uint4 bits;
  __device__ RowVector() {}

  // Columns from head_dim on do not exist. aligned: rows start at 16-byte boundaries.
  FAMX_DEVICE void store(T* row, int column, int head_dim, bool aligned) const {
    if (aligned && column + kSize <= head_dim) {
      *reinterpret_cast<uint4*>(row + column) = bits;
    } else {
#pragma unroll
      for (int k = 0; k < kSize; ++k)
        if (column + k < head_dim) row[column + k] = element[k];
    }
  }
};

}  // namespace flash_attn_mx
