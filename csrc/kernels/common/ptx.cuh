// Thin names for the sm_100 instructions that the kernels use. One function, one instruction (or its wait loop).
// Section numbers are of the PTX ISA manual 9.x.
#pragma once

#include <cstdint>

namespace flash_attn_mx::ptx {

#define FAMX_DEVICE __device__ __forceinline__

FAMX_DEVICE uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// --- threads ------------------------------------------------------------------------------------

// One lane of a converged warp; the same lane every time (9.7.13.15).
FAMX_DEVICE bool elect_one() {
  uint32_t elected;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}\n"
               : "=r"(elected));
  return elected != 0;
}

template <int kRegisters>
FAMX_DEVICE void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
FAMX_DEVICE void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

FAMX_DEVICE void named_barrier(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// --- mbarrier (9.7.13.15) -----------------------------------------------------------------------

FAMX_DEVICE void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

FAMX_DEVICE void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

FAMX_DEVICE void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

FAMX_DEVICE void mbarrier_arrive_expect_tx(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// The same place in the shared memory of another CTA of the cluster.
FAMX_DEVICE uint32_t of_cta(uint32_t smem, uint32_t rank) {
  uint32_t d;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(d) : "r"(smem), "r"(rank));
  return d;
}

// At a barrier of any CTA of the cluster. As in CUTLASS without .release.cluster, which would wait for all stores to
// global memory each time: it carries no data of other CTAs, only that this one has read or written its own.
FAMX_DEVICE void mbarrier_arrive_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// All threads of the cluster.
FAMX_DEVICE void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n barrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
}

// Returns when the phase of this parity has completed.
FAMX_DEVICE void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n .reg .pred done;\n"
      "WAIT:\n mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      " @done bra DONE;\n bra WAIT;\n"
      "DONE:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Generic writes to shared memory become visible to TMA, tcgen05.mma and tcgen05.cp.
FAMX_DEVICE void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same value, which the compiler knows nothing about.
FAMX_DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Largest of the warp's values, in every lane. Bits of non-negative floats are ordered as the floats are, NaN on top.
FAMX_DEVICE uint32_t warp_max(uint32_t x) {
  uint32_t d;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(d) : "r"(x));
  return d;
}

// --- device-scope order between CTAs --------------------------------------------------------------

FAMX_DEVICE int load_acquire(const int* global) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(global) : "memory");
  return v;
}

// Release of what this thread did, and of what it has seen others do through a CTA barrier.
FAMX_DEVICE void add_release(int* global, int x) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(global), "r"(x) : "memory");
}

// Volatile, so that it stays where it is written.
FAMX_DEVICE float4 load_shared(uint32_t smem) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(smem));
  return v;
}

// --- copies global -> shared (9.7.9.27) ---------------------------------------------------------

FAMX_DEVICE void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

FAMX_DEVICE void tma_load_4d(uint32_t smem, const void* map, uint32_t barrier, int c0, int c1,
                             int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

FAMX_DEVICE void bulk_load(uint32_t smem, const void* global, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

// Shared memory of this CTA -> of another one, whose barrier counts the bytes.
FAMX_DEVICE void bulk_copy_to_cta(uint32_t there, uint32_t smem, uint32_t bytes,
                                  uint32_t barrier_there) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(there),
      "r"(smem), "r"(bytes), "r"(barrier_there)
      : "memory");
}

// fp32 sums: global += shared, in the L2, no order among elements. The copy belongs to the thread's open group.
FAMX_DEVICE void bulk_add_f32(void* global, uint32_t smem, uint32_t bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
      "r"(smem), "r"(bytes)
      : "memory");
}
FAMX_DEVICE void bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// At most kPending of this thread's groups still read shared memory.
template <int kPending>
FAMX_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// All groups of this thread have written.
FAMX_DEVICE void bulk_wait_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// --- tensor memory (9.7.16) ---------------------------------------------------------------------
// kCtas = 2: a pair of CTAs together. One warp of each allocates and frees; copies and products are issued by one thread
// of the CTA of even rank and run in both. A kernel uses one kCtas throughout.

template <int kCtas = 1>
FAMX_DEVICE void tmem_allocate(uint32_t smem_result, uint32_t columns) {
  asm volatile(
      "tcgen05.alloc.cta_group::%2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(smem_result),
      "r"(columns), "n"(kCtas)
      : "memory");
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::%0.sync.aligned;" ::"n"(kCtas));
}

template <int kCtas = 1>
FAMX_DEVICE void tmem_free(uint32_t address, uint32_t columns) {
  asm volatile("tcgen05.dealloc.cta_group::%2.sync.aligned.b32 %0, %1;" ::"r"(address),
               "r"(columns), "n"(kCtas));
}

FAMX_DEVICE void tcgen05_fence_before() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
FAMX_DEVICE void tcgen05_fence_after() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// The barrier gets one arrival when every mma and cp that this thread issued before has completed.
FAMX_DEVICE void tcgen05_commit(uint32_t barrier) {
  asm volatile(
      "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier)
      : "memory");
}
// The same for a pair: the barrier at this place in both CTAs.
FAMX_DEVICE void tcgen05_commit_pair(uint32_t barrier) {
  asm volatile(
      "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 "
      "[%0], %1;" ::"r"(barrier),
      "h"(uint16_t(3))
      : "memory");
}

// 512 bytes of shared memory (32 rows of 16 bytes) -> 4 columns, the same in all four lane quarters.
template <int kCtas = 1>
FAMX_DEVICE void tcgen05_cp_scales(uint32_t tmem, uint64_t smem_descriptor) {
  asm volatile("tcgen05.cp.cta_group::%2.32x128b.warpx4 [%0], %1;" ::"r"(tmem),
               "l"(smem_descriptor), "n"(kCtas)
               : "memory");
}

FAMX_DEVICE void tmem_wait_store() { asm volatile("tcgen05.wait::st.sync.aligned;" ::: "memory"); }

#define FAMX_R4(r, i) "=r"(r[i]), "=r"(r[i + 1]), "=r"(r[i + 2]), "=r"(r[i + 3])
#define FAMX_R16(r, i) FAMX_R4(r, i), FAMX_R4(r, i + 4), FAMX_R4(r, i + 8), FAMX_R4(r, i + 12)
#define FAMX_U4(r, i) "+r"(r[i]), "+r"(r[i + 1]), "+r"(r[i + 2]), "+r"(r[i + 3])
#define FAMX_U16(r, i) FAMX_U4(r, i), FAMX_U4(r, i + 4), FAMX_U4(r, i + 8), FAMX_U4(r, i + 12)
#define FAMX_V4(r, i) "r"(r[i]), "r"(r[i + 1]), "r"(r[i + 2]), "r"(r[i + 3])
#define FAMX_V16(r, i) FAMX_V4(r, i), FAMX_V4(r, i + 4), FAMX_V4(r, i + 8), FAMX_V4(r, i + 12)

// 32 columns of the warp's 32 lanes: thread t gets lane t, register j column j. Valid after tmem_wait_load.
FAMX_DEVICE void tmem_load_32(uint32_t (&r)[32], uint32_t tmem) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x32.b32 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, [%32];"
      : FAMX_R16(r, 0), FAMX_R16(r, 16)
      : "r"(tmem));
}

FAMX_DEVICE void tmem_load_16(uint32_t (&r)[16], uint32_t tmem) {
  asm volatile(
      "tcgen05.ld.sync.aligned.32x32b.x16.b32 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, [%16];"
      : FAMX_R16(r, 0)
      : "r"(tmem));
}

FAMX_DEVICE void tmem_wait_load() { asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory"); }

// Ties values to the wait before them: no use of r moves above it.
FAMX_DEVICE void pin(uint32_t (&r)[32]) { asm volatile("" : FAMX_U16(r, 0), FAMX_U16(r, 16)); }
FAMX_DEVICE void pin(uint32_t (&r)[16]) { asm volatile("" : FAMX_U16(r, 0)); }

FAMX_DEVICE void tmem_store_32(uint32_t tmem, const uint32_t (&r)[32]) {
  asm volatile(
      "tcgen05.st.sync.aligned.32x32b.x32.b32 [%32], "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31};" ::FAMX_V16(r, 0),
      FAMX_V16(r, 16), "r"(tmem)
      : "memory");
}

FAMX_DEVICE void tmem_store_16(uint32_t tmem, const uint32_t (&r)[16]) {
  asm volatile(
      "tcgen05.st.sync.aligned.32x32b.x16.b32 [%16], "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15};" ::FAMX_V16(r, 0),
      "r"(tmem)
      : "memory");
}

// --- arithmetic ---------------------------------------------------------------------------------

// Two floats in one register pair; element 0 in the low word.
struct alignas(8) Float2 {
  uint64_t bits;
};

FAMX_DEVICE Float2 pack(float low, float high) {
  Float2 v;
  asm("mov.b64 %0, {%1, %2};" : "=l"(v.bits) : "f"(low), "f"(high));
  return v;
}
FAMX_DEVICE float low(Float2 v) {
  float x;
  asm("{\n .reg .b32 other;\n mov.b64 {%0, other}, %1;\n}\n" : "=f"(x) : "l"(v.bits));
  return x;
}
FAMX_DEVICE float high(Float2 v) {
  float x;
  asm("{\n .reg .b32 other;\n mov.b64 {other, %0}, %1;\n}\n" : "=f"(x) : "l"(v.bits));
  return x;
}

FAMX_DEVICE Float2 add(Float2 a, Float2 b) {
  Float2 d;
  asm("add.rn.f32x2 %0, %1, %2;" : "=l"(d.bits) : "l"(a.bits), "l"(b.bits));
  return d;
}
// Products that are not added to anything: ptxas 13.0 makes one fused operation of mul.rn.f32x2 and add.rn.f32x2,
// whatever -fmad says (of the scalar forms it does not).
FAMX_DEVICE Float2 mul(Float2 a, Float2 b) {
  Float2 d;
  asm("mul.rn.f32x2 %0, %1, %2;" : "=l"(d.bits) : "l"(a.bits), "l"(b.bits));
  return d;
}
// A product that is rounded before something is added; subnormal results become 0. (.ftz keeps ptxas from fusing.)
FAMX_DEVICE Float2 mul_rounded(Float2 a, Float2 b) {
  Float2 d;
  asm("mul.rn.ftz.f32x2 %0, %1, %2;" : "=l"(d.bits) : "l"(a.bits), "l"(b.bits));
  return d;
}
FAMX_DEVICE Float2 fma(Float2 a, Float2 b, Float2 c) {
  Float2 d;
  asm("fma.rn.f32x2 %0, %1, %2, %3;" : "=l"(d.bits) : "l"(a.bits), "l"(b.bits), "l"(c.bits));
  return d;
}
FAMX_DEVICE Float2 fma_down(Float2 a, Float2 b, Float2 c) {
  Float2 d;
  asm("fma.rm.f32x2 %0, %1, %2, %3;" : "=l"(d.bits) : "l"(a.bits), "l"(b.bits), "l"(c.bits));
  return d;
}

// Clamped to [0, 1]; NaN becomes 0.
FAMX_DEVICE float fma_saturate(float a, float b, float c) {
  float d;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}
FAMX_DEVICE float add_up(float a, float b) {
  float d;
  asm("add.rp.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
// 2^x, at most 2 ulp off; results below 2^-126 are 0, -inf gives 0.
FAMX_DEVICE float exp2_approx(float x) {
  float d;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
  return d;
}
FAMX_DEVICE float log2_approx(float x) {
  float d;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
  return d;
}

// Maxima that keep NaN.
FAMX_DEVICE float max_nan(float a, float b) {
  float d;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}
FAMX_DEVICE float max_nan(float a, float b, float c) {
  float d;
  asm("max.NaN.f32 %0, %1, %2, %3;" : "=f"(d) : "f"(a), "f"(b), "f"(c));
  return d;
}

FAMX_DEVICE float min_nan(float a, float b) {
  float d;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
  return d;
}

// Four floats -> four E4M3 bytes, x0 in the lowest; nearest even, beyond 448 -> 448, NaN -> NaN.
FAMX_DEVICE uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
  uint32_t d;
  asm("{\n .reg .b16 low, high;\n"
      " cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      " cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      " mov.b32 %0, {low, high};\n}\n"
      : "=r"(d)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return d;
}

// Two of them -> floats.
FAMX_DEVICE float2 unpack_e4m3(uint32_t pair) {
  float2 x;
  asm("{\n .reg .b32 halves;\n .reg .b16 low, high;\n"
      " cvt.rn.f16x2.e4m3x2 halves, %2;\n"
      " mov.b32 {low, high}, halves;\n"
      " cvt.f32.f16 %0, low;\n"
      " cvt.f32.f16 %1, high;\n}\n"
      : "=f"(x.x), "=f"(x.y)
      : "h"(uint16_t(pair)));
  return x;
}

// The same for E5M2: beyond 57344 -> 57344.
FAMX_DEVICE uint32_t pack_e5m2(float x0, float x1, float x2, float x3) {
  uint32_t d;
  asm("{\n .reg .b16 low, high;\n"
      " cvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n"
      " cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
      " mov.b32 %0, {low, high};\n}\n"
      : "=r"(d)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return d;
}

}  // namespace flash_attn_mx::ptx
