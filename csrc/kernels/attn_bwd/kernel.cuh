// attn_bwd: set-up, role dispatch, tear-down. config.cuh says what moves where and who signals whom.
#pragma once

#include "attn_bwd/compute.cuh"
#include "attn_bwd/config.cuh"
#include "attn_bwd/epilogue.cuh"
#include "attn_bwd/load.cuh"
#include "attn_bwd/mma.cuh"
#include "attn_bwd/reduce.cuh"

namespace flash_attn_mx::bwd {

using bf16 = __nv_bfloat16;
using fp16 = __half;
using fp32 = float;

template <class C>
FAMX_DEVICE void init_barriers(uint32_t smem) {
  const auto init = [&](uint32_t first, int count, int arrivals) {
    for (int i = 0; i < count; ++i) ptx::mbarrier_init(barrier_at(smem + first, i), arrivals);
  };
  constexpr int kLoadThread = 1, kCommit = 1;
  init(C::kKeysFull, 1, kLoadThread);
  init(C::kRingFull, C::kRingStages, kLoadThread);
  init(C::kRingEmpty, C::kRingStages, kCommit);
  init(C::kStatsFull, C::kStatsStages, kLoadThread);
  init(C::kStatsEmpty, C::kStatsStages, kComputeWarps);
  init(C::kSFull, 1, kCommit);
  init(C::kSLoaded, 1, kComputeWarps);
  init(C::kPFull, 1, kComputeWarps);
  init(C::kDPFull, 1, kCommit);
  init(C::kDPLoaded, 1, kComputeWarps);
  init(C::kDSFull, 1, kComputeWarps);
  init(C::kDQFull, 1, kCommit);
  init(C::kDQLoaded, 1, kReduceWarps);
  init(C::kSumsFull, 1, kCommit);
  ptx::fence_mbarrier_init();
}

template <class C, class Grad>
FAMX_DEVICE void run(const AttnBwdParams& p) {
  extern __shared__ uint8_t smem_raw[];
  if (Work(p, blockIdx.x).keys() <= 0)
    return;  // packed: the sequence is shorter than the longest one
  const uint32_t smem = uniform((ptx::smem_address(smem_raw) + 1023) / 1024 * 1024);

  if (const int warp = warp_index(); warp == kMmaWarp) {
    ptx::tmem_allocate(smem + C::kTmemAddress, C::kTmemColumns);
    const uint32_t lane = threadIdx.x & 31;
    for (uint32_t at = 4 * lane; at < kScaleAtomBytes; at += 4 * 32)
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem + C::kOnes + at), "r"(kScaleOnes)
                   : "memory");
    ptx::fence_proxy_async();  // tcgen05.cp reads them
  } else if (warp == kLoadWarp && ptx::elect_one()) {
    init_barriers<C>(smem);
    ptx::fence_proxy_async();
    for (const TensorMapBytes* map :
         {&p.q, &p.q_col, &p.dout, &p.dout_col, &p.k, &p.k_col, &p.v_tok})
      ptx::prefetch_tensor_map(map);
  }
  ptx::tcgen05_fence_before();
  __syncthreads();  // barriers initialised, tensor memory allocated
  ptx::tcgen05_fence_after();
  const auto tmem_address = [&] {
    uint32_t tmem;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(tmem) : "r"(smem + C::kTmemAddress) : "memory");
    return tmem;
  };

  if (warp_index() < kReduceWarp) {
    ptx::raise_registers<kComputeRegisters>();
    const Work work(p, ptx::opaque(blockIdx.x));
    Compute<C> compute(p, work, smem, tmem_address());
    compute.run(work);
    Epilogue<C, Grad>{p, work}.run(compute.tmem, compute.half, compute.key);
  } else {
    ptx::lower_registers<kOtherRegisters>();
    const Work work(p, ptx::opaque(blockIdx.x));
    if (const int warp = warp_index(); warp < kMmaWarp) {
      Reduce<C>{p, work, smem, tmem_address() + lanes_of_warp(), warp - kReduceWarp}.run();
    } else if (warp == kMmaWarp) {
      Mma<C>{p, work, smem, tmem_address(), ptx::elect_one()}.run();
    } else if (warp == kLoadWarp && ptx::elect_one()) {
      Loader<C>{p, work, smem}.run();
    }
  }
  ptx::tcgen05_fence_before();
  __syncthreads();  // nobody uses tensor memory any more
  ptx::tcgen05_fence_after();
  if (warp_index() == kMmaWarp) ptx::tmem_free(tmem_address(), C::kTmemColumns);
}

}  // namespace flash_attn_mx::bwd

#define FAMX_DEFINE_KERNEL(name, head_dim, grad_type)                           \
  extern "C" __global__ void __launch_bounds__(flash_attn_mx::bwd::kThreads, 1) \
      name(const __grid_constant__ flash_attn_mx::AttnBwdParams params) {       \
    using namespace flash_attn_mx::bwd;                                         \
    run<Config<head_dim>, grad_type>(params);                                   \
  }
