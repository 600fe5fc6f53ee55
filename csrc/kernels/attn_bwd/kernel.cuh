// attn_bwd: set-up, role dispatch, tear-down. config.cuh says what moves where and who signals whom.
#pragma once

#include "attn_bwd/compute.cuh"
#include "attn_bwd/config.cuh"
#include "attn_bwd/epilogue.cuh"
#include "attn_bwd/exchange.cuh"
#include "attn_bwd/load.cuh"
#include "attn_bwd/mma.cuh"
#include "attn_bwd/reduce.cuh"

namespace flash_attn_mx::bwd {

using bf16 = __nv_bfloat16;
using fp16 = __half;
using fp32 = float;

template <class C>
FAMX_DEVICE void init_barriers(uint32_t smem, int rank) {
  const auto init = [&](uint32_t first, int count, int arrivals) {
    for (int i = 0; i < count; ++i) ptx::mbarrier_init(barrier_at(smem + first, i), arrivals);
  };
  constexpr int kLoadThread = 1, kCommit = 1, kExchangeThread = 1, kMmaThread = 1;
  const int peer = rank == 0 ? 1 : 0;  // CTA 1 tells CTA 0 of its loads
  init(C::kKeysFull, 1, kLoadThread + peer);
  init(C::kRingFull, C::kRingStages, kLoadThread + peer);
  init(C::kRingEmpty, C::kRingStages, kCommit);
  init(C::kStatsFull, C::kStatsStages, kLoadThread);
  init(C::kStatsEmpty, C::kStatsStages, kComputeWarps);
  init(C::kSFull, 1, kCommit);
  init(C::kSLoaded, 1, kPair * kComputeWarps);
  init(C::kPFull, 1, kPair * kComputeWarps);
  init(C::kDPFull, 1, kCommit);
  init(C::kDPLoaded, 1, kPair * kComputeWarps);
  init(C::kDSFull, 1, kPair * kComputeWarps);
  init(C::kDQFull, 1, kCommit);
  init(C::kDQLoaded, 1, kPair * kReduceWarps);
  init(C::kOutFull, 1, kComputeWarps);
  init(C::kInFull, 1, kExchangeThread);
  init(C::kExchanged, kPair, kExchangeThread);
  init(C::kSumsFull, 1, kCommit + kMmaThread);
  ptx::fence_mbarrier_init();
}

FAMX_DEVICE void store_shared_16(uint32_t address, uint32_t word0, uint32_t word1) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %3};" ::"r"(address), "r"(word0), "r"(word1),
               "r"(0)
               : "memory");
}

// A dQ of one step has only slot 0. Slot 1's rows are computed from what lies there, and not used; nothing lies there before
// the first dQ of two steps.
template <class C>
FAMX_DEVICE void clear_ds(const AttnBwdParams& p, uint32_t smem) {
  if (blockIdx.x % kPair != 1 || !p.dq_acc) return;
  const auto clear = [&](uint32_t first, uint32_t bytes) {
    for (uint32_t at = 16 * threadIdx.x; at < bytes; at += 16 * kThreads)
      store_shared_16(smem + first + at, 0, 0);
  };
  clear(C::kDs, C::kDsBuffers * kPair * C::kDsBytes);
  clear(C::kDsScaleByQuery, C::kDsBuffers * kPair * kScaleAtomBytes);
  ptx::fence_proxy_async();  // the mma reads them
}

template <class C, class Grad>
FAMX_DEVICE void run(const AttnBwdParams& p) {
  extern __shared__ uint8_t smem_raw[];
  if (Work(p, blockIdx.x).keys(0) == 0)
    return;  // packed: the sequence is shorter than the longest one; both CTAs agree
  const uint32_t smem = uniform((ptx::smem_address(smem_raw) + 1023) / 1024 * 1024);

  if (const int warp = warp_index(); warp == kMmaWarp) {
    ptx::tmem_allocate<kPair>(smem + C::kTmemAddress, C::kTmemColumns);
    const uint32_t lane = threadIdx.x & 31;
    for (uint32_t at = 4 * lane; at < kScaleAtomBytes; at += 4 * 32)
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem + C::kOnes + at), "r"(kScaleOnes)
                   : "memory");
    if (lane < 2 * kTile / 32)
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem + C::kPoison + 4 * lane), "r"(0)
                   : "memory");
    for (uint32_t at = 16 * lane; at < kTile * kDeltaRowBytes; at += 16 * 32) {
      store_shared_16(smem + C::kWeights + at, kDeltaWeights0, kDeltaWeights4);
      store_shared_16(smem + C::kZeros + at, 0, 0);
    }
    ptx::fence_proxy_async();  // tcgen05.cp reads the ones, the mma the weights
  } else if (warp == kLoadWarp && ptx::elect_one()) {
    init_barriers<C>(smem, blockIdx.x % kPair);
    ptx::fence_proxy_async();
    for (const TensorMapBytes* map :
         {&p.q, &p.q_col, &p.dout, &p.dout_col, &p.k, &p.k_col, &p.v_tok})
      ptx::prefetch_tensor_map(map);
  }
  clear_ds<C>(p, smem);
  ptx::tcgen05_fence_before();
  ptx::cluster_sync();  // barriers initialised, tensor memory allocated, in both CTAs
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
    Epilogue<C, Grad>{p, work, smem}.run(compute.tmem, compute.half, compute.key);
  } else {
    ptx::lower_registers<kOtherRegisters>();
    const Work work(p, ptx::opaque(blockIdx.x));
    if (const int warp = warp_index(); warp < kMmaWarp) {
      Reduce<C>{p, work, smem, tmem_address() + lanes_of_warp(), warp - kReduceWarp}.run();
    } else if (warp == kMmaWarp) {
      Mma<C>(p, work, smem, tmem_address()).run();
    } else if (warp == kLoadWarp && ptx::elect_one()) {
      Loader<C>{p, work, smem}.run();
    } else if (warp == kExchangeWarp && ptx::elect_one()) {
      Exchange<C>{p, work, smem}.run();
    }
  }
  ptx::tcgen05_fence_before();
  ptx::cluster_sync();  // nobody uses tensor memory, or the other CTA's shared memory, any more
  ptx::tcgen05_fence_after();
  if (warp_index() == kMmaWarp) ptx::tmem_free<kPair>(tmem_address(), C::kTmemColumns);
}

}  // namespace flash_attn_mx::bwd

#define FAMX_DEFINE_KERNEL(name, head_dim, grad_type)                          \
  extern "C" __global__ void __cluster_dims__(flash_attn_mx::bwd::kPair, 1, 1) \
      __launch_bounds__(flash_attn_mx::bwd::kThreads, 1)                       \
          name(const __grid_constant__ flash_attn_mx::AttnBwdParams params) {  \
    using namespace flash_attn_mx::bwd;                                        \
    run<Config<head_dim>, grad_type>(params);                                  \
  }
