// What sharing 256 keys between two CTAs asks of shared memory (docs/backward.md). Two questions:
//   loads      How many cycles of an SM does ld.shared.v4 take if all lanes read the same 16 bytes (bias, delta), and how many
//              does it take from warps that read 512 different bytes?
//   exchange   How long does a CTA of a pair take to send 16 KB + 512 bytes of dS to the other's shared memory by bulk copies,
//              both at once; beside warps that read shared memory without pause; and how much do those lose?
// Needs sm_90 or newer:  nvcc -O3 -std=c++17 -arch=sm_90 benchmarks/bench_pair_exchange.cu -o bench && ./bench
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>

constexpr int kWarps = 8, kReadBytes = 16 * 1024, kCopyBytes = 16 * 1024, kScaleBytes = 512;
constexpr int kRounds = 256;

__device__ __forceinline__ uint32_t address(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}

// 64 loads; step: bytes between lanes, 0 for one address.
__device__ __forceinline__ float loads64(uint32_t smem, uint32_t step) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    float4 x;
    asm volatile("ld.volatile.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "r"(smem + step * (threadIdx.x % 32) + 16 * i));
    sum += x.x;
  }
  return sum;
}

// The first `broadcasting` warps read one address per instruction, the others 512 bytes. cycles, count: per warp.
__global__ void read(int broadcasting, long long* cycles, int* count, float* sink) {
  extern __shared__ __align__(1024) char smem[];
  const int warp = threadIdx.x / 32;
  const uint32_t step = warp < broadcasting ? 0 : 16;
  __syncthreads();
  const long long begin = clock64();
  float sum = 0;
  int n = 0;
  for (; clock64() - begin < 200000; n += 64) sum += loads64(address(smem), step);
  if (threadIdx.x % 32 == 0) cycles[warp] = clock64() - begin, count[warp] = n;
  if (sum == 1.5f) *sink = sum;
}

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n .reg .pred done;\nWAIT:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      " @done bra DONE;\n bra WAIT;\nDONE:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__global__ void __cluster_dims__(2, 1, 1)
    exchange(int readers, int pace, long long* cycles, int* count, float* sink) {
  extern __shared__ __align__(1024) char smem[];
  __shared__ alignas(8) uint64_t full[2];  // in turn: the peer may be a round ahead
  __shared__ volatile int done;
  const uint32_t in = address(smem), out = in + kCopyBytes + kScaleBytes;
  const uint32_t scratch = out + kCopyBytes + kScaleBytes, barrier = address(full);
  if (threadIdx.x == 0) {
    done = 0;
    for (int i = 0; i < 2; ++i)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier + 8 * i) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  const int warp = threadIdx.x / 32;
  if (warp == 0) {
    if (threadIdx.x == 0) {
      uint32_t there_in, there_barrier;
      const uint32_t peer = (blockIdx.x & 1) ^ 1;
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there_in) : "r"(in), "r"(peer));
      asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there_barrier) : "r"(barrier), "r"(peer));
      const auto copy = [&](uint32_t offset, uint32_t bytes, uint32_t turn) {
        asm volatile(
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], "
            "%2, [%3];" ::"r"(there_in + offset),
            "r"(out + offset), "r"(bytes), "r"(there_barrier + 8 * turn)
            : "memory");
      };
      const long long begin = clock64();
      long long busy = 0;
      for (int i = 0; i < kRounds; ++i) {
        while (clock64() - begin < (long long)(pace)*i) {
        }
        const long long start = clock64();
        const uint32_t turn = i & 1;
        asm volatile(
            "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier + 8 * turn),
            "r"(kCopyBytes + kScaleBytes)
            : "memory");
        copy(0, kCopyBytes, turn);
        copy(kCopyBytes, kScaleBytes, turn);
        wait(barrier + 8 * turn, i >> 1 & 1);
        busy += clock64() - start;
      }
      cycles[blockIdx.x] = busy;
      done = 1;
    }
  } else if (readers) {
    float sum = 0;
    const long long begin = clock64();
    int n = 0;
    for (; !done; n += 64) sum += loads64(scratch, 16);
    if (sum == 1.5f) *sink = sum;
    if (threadIdx.x % 32 == 0) {
      // Bytes read per cycle, times 1000.
      atomicAdd(count + blockIdx.x, int(512000.0 * n / double(clock64() - begin)));
    }
  }
  __syncthreads();
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

int main() {
  cudaDeviceProp prop;
  cudaGetDeviceProperties(&prop, 0);
  const int ctas = prop.multiProcessorCount / 2 * 2;
  long long* cycles;
  int* count;
  float* sink;
  cudaMallocManaged(&cycles, ctas * 8);
  cudaMallocManaged(&count, ctas * 4);
  cudaMalloc(&sink, 4);
  printf("%s\n", prop.name);
  const auto check = [] {
    if (cudaDeviceSynchronize() != cudaSuccess)
      printf("failed: %s\n", cudaGetErrorString(cudaGetLastError()));
  };
  for (int broadcasting : {0, 4, 8}) {
    read<<<1, 32 * kWarps, kReadBytes>>>(broadcasting, cycles, count, sink);
    check();
    double same = 0, other = 0;
    for (int w = 0; w < kWarps; ++w)
      (w < broadcasting ? same : other) += double(count[w]) / double(cycles[w]);
    printf(
        "loads: %d of 8 warps read one address: %.3f such loads and %.3f of 512 bytes per cycle\n",
        broadcasting, same, other);
  }
  const int smem = 2 * (kCopyBytes + kScaleBytes) + kReadBytes;
  cudaFuncSetAttribute(exchange, cudaFuncAttributeMaxDynamicSharedMemorySize, smem);
  for (int readers = 0; readers < 2; ++readers)
    for (int pace : {0, 4000, 8000}) {
      for (int i = 0; i < ctas; ++i) count[i] = 0;
      exchange<<<ctas, 32 * (1 + kWarps), smem>>>(readers, pace, cycles, count, sink);
      check();
      double busy = 0, rate = 0;
      for (int i = 0; i < ctas; ++i) busy += double(cycles[i]), rate += count[i] / 1000.0;
      printf(
          "exchange: every %4d cycles, readers %s: %5.0f cycles per copy; readers get %.1f bytes "
          "per cycle\n",
          pace, readers ? "on " : "off", busy / ctas / kRounds, rate / ctas);
    }
}
