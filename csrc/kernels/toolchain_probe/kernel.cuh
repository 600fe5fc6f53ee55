// toolchain_probe: proves that this build can make sm_100 code with CuTe. It serves no user call.
// FLOW   in[lane] -LDG-> register -tcgen05.st-> TMEM -tcgen05.ld-> register -STG-> out[lane]
// ROLES  one warp does everything.     TMEM  kCols columns are allocated, column 0 is used.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cstdint>
#include <cute/arch/copy_sm100.hpp>
#include <cute/arch/tmem_allocator_sm100.hpp>
#include <cute/tensor.hpp>

namespace flash_attn_mx::probe {

constexpr int kThreads = 32;

template <int kCols>
__device__ void run(const uint32_t* in, uint32_t* out) {
  static_assert(kCols >= 32 && kCols <= 512 && (kCols & (kCols - 1)) == 0,
                "tcgen05.alloc takes a power of two from 32 to 512 columns");
  __shared__ uint32_t tmem_base;
  cute::TMEM::Allocator1Sm allocator;
  allocator.allocate(kCols, &tmem_base);
  __syncwarp();  // the allocation wrote tmem_base for all lanes
  auto gIn = cute::make_tensor(cute::make_gmem_ptr(in), cute::Int<kThreads>{});    // (lane)
  auto gOut = cute::make_tensor(cute::make_gmem_ptr(out), cute::Int<kThreads>{});  // (lane)

  uint32_t value = gIn(threadIdx.x);
  cute::SM100_TMEM_STORE_32dp32b1x::copy(value, tmem_base);
  cutlass::arch::fence_view_async_tmem_store();  // the load below must see the store
  cute::SM100_TMEM_LOAD_32dp32b1x::copy(tmem_base, value);
  cutlass::arch::fence_view_async_tmem_load();  // value is valid from here on
  gOut(threadIdx.x) = value;

  allocator.release_allocation_lock();
  allocator.free(tmem_base, kCols);
}

}  // namespace flash_attn_mx::probe

#define FAMX_DEFINE_KERNEL(name, cols)                                         \
  extern "C" __global__ void __launch_bounds__(flash_attn_mx::probe::kThreads) \
      name(const uint32_t* in, uint32_t* out) {                                \
    flash_attn_mx::probe::run<cols>(in, out);                                  \
  }
