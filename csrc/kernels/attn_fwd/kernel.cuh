// attn_fwd: set-up, role dispatch, tear-down. config.cuh says what moves where and who signals whom.
#pragma once

#include "attn_fwd/config.cuh"
#include "attn_fwd/epilogue.cuh"
#include "attn_fwd/load.cuh"
#include "attn_fwd/mma.cuh"
#include "attn_fwd/softmax.cuh"

namespace flash_attn_mx::fwd {

using bf16 = __nv_bfloat16;
using fp16 = __half;
using fp32 = float;

template <class C>
FAMX_DEVICE void init_barriers(uint32_t smem) {
  const auto init = [&](uint32_t first, int count, int arrivals) {
    for (int i = 0; i < count; ++i) ptx::mbarrier_init(barrier_at(smem + first, i), arrivals);
  };
  constexpr int kLoadThread = 1, kCommit = 1;
  init(C::kQFull, C::kQStages, kLoadThread);
  init(C::kQEmpty, C::kQStages, kCommit);
  init(C::kKVFull, C::kKVStages, kLoadThread);
  init(C::kKVEmpty, C::kKVStages, kCommit);
  init(C::kSFull, kTiles, kCommit);
  init(C::kSLoaded, kTiles, kWarpsPerTile);
  init(C::kPFull, kTiles, kWarpsPerTile);
  init(C::kPVDone, kTiles, kCommit);
  ptx::fence_mbarrier_init();
}

template <class C, class Out>
FAMX_DEVICE void run(const AttnFwdParams& p) {
  extern __shared__ uint8_t smem_raw[];
  const uint32_t raw = ptx::smem_address(smem_raw);
  const uint32_t smem = (raw + 1023) / 1024 * 1024;
  // From a lane-0 broadcast, so that the compiler knows that it is the same in the whole warp.
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);

  if (warp == kMmaWarp) {
    ptx::tmem_allocate(smem + C::kTmemAddress, C::kTmemColumns);
    const uint32_t lane = threadIdx.x & 31;
    for (uint32_t at = 4 * lane; at < kScaleAtomBytes; at += 4 * 32)
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem + C::kOnes + at), "r"(kScaleOnes)
                   : "memory");
    ptx::fence_proxy_async();  // tcgen05.cp reads them
  } else if (warp == kLoadWarp && ptx::elect_one()) {
    init_barriers<C>(smem);
    ptx::fence_proxy_async();
    for (const TensorMapBytes* map : {&p.q, &p.k, &p.v, &p.v_tok}) ptx::prefetch_tensor_map(map);
  }
  ptx::tcgen05_fence_before();
  __syncthreads();  // barriers initialised, tensor memory allocated
  ptx::tcgen05_fence_after();
  uint32_t tmem;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(tmem) : "r"(smem + C::kTmemAddress) : "memory");

  if (warp < kMmaWarp) {
    ptx::raise_registers<kSoftmaxRegisters>();
    Softmax<C> softmax(p, smem, tmem, warp);
    const Epilogue<C, Out> epilogue{p};
    for (int item = blockIdx.x; item < work_items(p); item += gridDim.x) {
      softmax.run(item);
      epilogue.run(Work(p, ptx::opaque(item)), softmax.tile, softmax.row, softmax.state,
                   softmax.tmem + kTiles * kTile + softmax.tile * C::kHeadDim, softmax.live);
    }
  } else {
    ptx::lower_registers<kOtherRegisters>();
    if (warp == kMmaWarp) {
      Mma<C>{p, smem, tmem, ptx::elect_one()}.run();
    } else if (warp == kLoadWarp && ptx::elect_one()) {
      Loader<C>{p, smem}.run();
    }
  }
  ptx::tcgen05_fence_before();
  __syncthreads();  // nobody uses tensor memory any more
  ptx::tcgen05_fence_after();
  if (threadIdx.x / 32 == kMmaWarp) ptx::tmem_free(tmem, C::kTmemColumns);
}

}  // namespace flash_attn_mx::fwd

#define FAMX_DEFINE_KERNEL(name, head_dim, out_type)                            \
  extern "C" __global__ void __launch_bounds__(flash_attn_mx::fwd::kThreads, 1) \
      name(const __grid_constant__ flash_attn_mx::AttnFwdParams params) {       \
    using namespace flash_attn_mx::fwd;                                         \
    run<Config<head_dim>, out_type>(params);                                    \
  }
