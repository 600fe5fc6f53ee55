// How should fp32 dQ reach its sums in global memory? Timed alone, and beside warps that read shared memory without pause:
//   red         red.global.add.v4.f32 from registers: 512 contiguous bytes per warp instruction
//   cta  B x S  registers -> shared memory -> cp.reduce.async.bulk.add.f32 of B bytes by all four warps, S buffers
//   warp B x S  the same by one warp on its own: no barrier between warps, S buffers each
// Needs sm_90 or newer:  nvcc -O3 -std=c++17 -arch=sm_90 benchmarks/bench_dq_reduction.cu -o bench && ./bench
// One CTA per SM walks query tiles of 64 KB (128 x 128 fp32); the CTAs of a head add to the same tiles, as key tiles do.
// "pace" is the time that a tile has: at 0 the way to the L2 is the limit.
#include <cuda_runtime.h>
#include <cstdint>
#include <cstdio>

constexpr int kTileFloats = 128 * 128;
constexpr int kTilesPerHead = 32;
constexpr int kReduceThreads = 128;
constexpr int kReaderThreads = 256;
constexpr int kStageBytes = 48 * 1024, kReadBytes = 16 * 1024;

__device__ __forceinline__ uint32_t address(const void* p) {
  return uint32_t(__cvta_generic_to_shared(p));
}

struct Red {
  static constexpr const char* kName = "red";
  __device__ void tile(float* sums, float4 v, char*) {
#pragma unroll 4
    for (int i = 0; i < 32; ++i)
      asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(
                       sums + i * 512 + 4 * threadIdx.x),
                   "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                   : "memory");
  }
  __device__ void finish() { __threadfence(); }
};

template <int kBytes, int kStages, bool kWarp>
struct Bulk {
  static constexpr int kThreads = kWarp ? 32 : kReduceThreads;
  static constexpr const char* kName = kWarp ? "warp" : "cta";
  int stage = 0;
  __device__ static void sync() {
    if (kWarp)
      __syncwarp();
    else
      asm volatile("bar.sync 1, 128;" ::: "memory");
  }
  __device__ void tile(float* sums, float4 v, char* smem) {
    const int group = kWarp ? threadIdx.x / 32 : 0, lane = threadIdx.x % kThreads;
    constexpr int kGroupBytes = kTileFloats * 4 / (kReduceThreads / kThreads);
    for (int at = 0; at < kGroupBytes; at += kBytes) {
      char* buffer = smem + (group * kStages + stage) * kBytes;
      if (lane == 0)
        asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kStages - 1) : "memory");
      sync();
#pragma unroll
      for (int i = 0; i < kBytes / 16 / kThreads; ++i)
        reinterpret_cast<float4*>(buffer)[i * kThreads + lane] = v;
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      sync();
      if (lane == 0) {
        asm volatile(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                sums + (group * kGroupBytes + at) / 4),
            "r"(address(buffer)), "r"(kBytes)
            : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      }
      stage = (stage + 1) % kStages;
    }
  }
  __device__ void finish() {
    if (threadIdx.x % kThreads == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
};

template <class Way>
__global__ void __launch_bounds__(kReduceThreads + kReaderThreads)
    walk(float* sums, int readers, int tiles, int pace, long long* cycles,
         unsigned long long* loads) {
  extern __shared__ __align__(128) char smem[];
  volatile int* done = reinterpret_cast<volatile int*>(smem + kStageBytes + kReadBytes);
  if (threadIdx.x == 0) *done = 0;
  __syncthreads();
  if (threadIdx.x < kReduceThreads) {
    const long long begin = clock64();
    Way way;
    for (int j = 0; j < tiles; ++j) {
      while (clock64() - begin < (long long)(pace)*j) {
      }
      way.tile(sums + (size_t(blockIdx.x / 8) * kTilesPerHead + j % kTilesPerHead) * kTileFloats,
               make_float4(threadIdx.x, 1, 2, 3), smem);
    }
    way.finish();
    asm volatile("bar.sync 1, 128;" ::: "memory");
    if (threadIdx.x == 0) *done = 1, cycles[blockIdx.x] = clock64() - begin;
  } else if (readers) {
    float sum = 0;
    unsigned long long n = 0;
    for (; !*done; n += 64)
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        float4 x;
        asm volatile(
            "ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
            : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
            : "r"(address(smem + kStageBytes + 16 * ((threadIdx.x + 16 * i) % (kReadBytes / 16)))));
        sum += x.x;
      }
    if (sum == 1.5f) sums[0] = sum;
    if (threadIdx.x % 32 == 0) atomicAdd(loads + blockIdx.x, n);
  }
}

int ctas;
float* sums;
long long* cycles;
unsigned long long* loads;

template <class Way>
void time_way(int bytes, int stages) {
  constexpr int kTiles = 256, kSmem = kStageBytes + kReadBytes + 128;
  cudaFuncSetAttribute(walk<Way>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem);
  printf("%-4s %5d x %d", Way::kName, bytes, stages);
  for (int readers = 0; readers < 2; ++readers)
    for (int pace : {0, 8000}) {
      double best = 1e30, rate = 0;
      for (int rep = 0; rep < 4; ++rep) {
        for (int i = 0; i < ctas; ++i) cycles[i] = 0, loads[i] = 0;
        walk<Way><<<ctas, kReduceThreads + kReaderThreads, kSmem>>>(sums, readers, kTiles, pace,
                                                                    cycles, loads);
        if (cudaDeviceSynchronize() != cudaSuccess)
          printf("failed: %s\n", cudaGetErrorString(cudaGetLastError()));
        double c = 0, n = 0;
        for (int i = 0; i < ctas; ++i) c += cycles[i], n += loads[i];
        if (c < best) best = c, rate = n * 512 / c;
      }
      best /= ctas * kTiles;
      if (!readers && !pace) printf("   alone: %5.0f cycles per tile", best);
      if (readers && !pace) printf("   beside readers: %5.0f", best);
      if (readers && pace)
        printf("   at %5.0f: takes %5.0f cycles of shared memory", best, best * (1 - rate / 127.8));
    }
  printf("\n");
}

int main() {
  cudaDeviceProp prop;
  cudaGetDeviceProperties(&prop, 0);
  ctas = prop.multiProcessorCount / 8 * 8;
  const size_t bytes = size_t(ctas / 8) * kTilesPerHead * kTileFloats * 4;
  cudaMalloc(&sums, bytes);
  cudaMemset(sums, 0, bytes);
  cudaMallocManaged(&cycles, ctas * 8);
  cudaMallocManaged(&loads, ctas * 8);
  printf("%s, %d CTAs, %zu MB of sums\n", prop.name, ctas, bytes >> 20);
  time_way<Red>(512, 1);
  time_way<Bulk<16384, 2, false>>(16384, 2);
  time_way<Bulk<16384, 1, false>>(16384, 1);
  time_way<Bulk<8192, 2, false>>(8192, 2);
  time_way<Bulk<8192, 3, false>>(8192, 3);
  time_way<Bulk<2048, 2, true>>(2048, 2);
  time_way<Bulk<2048, 3, true>>(2048, 3);
  time_way<Bulk<4096, 1, true>>(4096, 1);
  time_way<Bulk<4096, 2, true>>(4096, 2);
}
