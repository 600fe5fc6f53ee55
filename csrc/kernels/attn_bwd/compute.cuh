// The compute role: 256 threads; a thread has one key and the queries of one half of the tile. Per step:
// S^T -> P^T -> TMEM, dP^T -> dS^T -> TMEM and SMEM, scale bytes -> SMEM. docs/numerics.md section 4 is the specification.
#pragma once

#include "attn_bwd/config.cuh"

namespace flash_attn_mx::bwd {

FAMX_DEVICE ptx::Float2 pair(const uint32_t (&x)[32], int i) {
  return ptx::pack(__uint_as_float(x[i]), __uint_as_float(x[i + 1]));
}
FAMX_DEVICE void put(uint32_t (&x)[32], int i, float low, float high) {
  x[i] = __float_as_uint(low), x[i + 1] = __float_as_uint(high);
}

// 32 values and their scale byte -> 8 words of payload.
FAMX_DEVICE void quantise(const uint32_t (&x)[32], int byte, uint32_t* payload) {
  const float factor = scale_factor(max(254 - byte, 0));
  const ptx::Float2 up = ptx::pack(factor, factor);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const ptx::Float2 a = ptx::mul(pair(x, 4 * i), up), b = ptx::mul(pair(x, 4 * i + 2), up);
    payload[i] = ptx::pack_e4m3(ptx::low(a), ptx::high(a), ptx::low(b), ptx::high(b));
  }
}

// Where dS of a step goes in shared memory: payload and scales by query; to the other CTA from there.
struct DsBuffer {
  uint32_t tile, scales;
  bool goes_out;
};

template <class C>
struct Compute {
  const AttnBwdParams& p;
  const uint32_t smem;
  const uint32_t smem0;  // of CTA 0, which issues for both
  const uint32_t tmem;   // of the warp's lanes
  const int half;        // of the queries: 0, 1
  const int key;         // of the tile
  RingState<C::kStatsStages> stats{};

  FAMX_DEVICE Compute(const AttnBwdParams& params, const Work& work, uint32_t smem, uint32_t tmem)
      : p(params),
        smem(smem),
        smem0(ptx::of_cta(smem, 0)),
        tmem(tmem + lanes_of_warp()),
        half(warp_index() / 4),
        key(threadIdx.x % kTile) {
    if (half == 0) store_v_scale(work);
  }

  // V's token scale is the scale of every block of its row -> s_loaded, the first
  FAMX_DEVICE void store_v_scale(const Work& work) {
    uint32_t word = kScaleOnes;
    if (key < work.keys()) {
      const int64_t token = work.k_start + int64_t(work.key_tile) * kTile + key;
      const uint8_t* scales =
          p.v_tok_scale + (p.cu_seqlens_k ? 0 : work.batch) * p.v_tok_scale_stride_batch;
      word = 0x01010101u *
             scales[token * p.v_tok_scale_stride_token + work.key_head * p.v_tok_scale_stride_head];
    }
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem + C::kVScale + scale_word_offset(key)),
                 "r"(word)
                 : "memory");
    ptx::fence_proxy_async();  // tcgen05.cp reads it
  }

  FAMX_DEVICE void run(const Work& work) {
    // Registers are short: what the cut tiles need beyond this is derived anew there.
    const int steps = work.steps(), first = work.first_tile, end = work.end_tile();
    const int full_first = work.window.full_first_tile(work.key_tile);
    const int full_end = work.window.full_end_tile(work.key_tile);
    int tile = first, run_end = work.run_end(first);
    uint32_t slot = 0, buffer = 0;  // as Work::slot and closes say, step by step
    const uint32_t rank = work.rank, out = smem + C::kDsOut, out_scale = smem + C::kDsScaleOut;
    const uint32_t own = smem + C::ds(0, rank), own_scale = smem + C::ds_scale(0, rank);
    for (int j = 0; j < steps; ++j) {
      const bool goes_out = slot != rank;
      const DsBuffer to = {goes_out ? out : own + buffer * kPair * C::kDsBytes,
                           goes_out ? out_scale : own_scale + buffer * kPair * kScaleAtomBytes,
                           goes_out};
      if (full_first <= tile && tile < full_end) {
        step<false>(j & 1, to, 0);
      } else {
        step<true>(j & 1, to, tile);
      }
      slot ^= 1;
      if (++tile == run_end) {
        if (tile == end) tile = first;
        run_end = work.run_end(tile);
        slot = 0;
      }
      buffer ^= slot ^ 1;
    }
    if (steps > 0) ptx::mbarrier_wait(smem + C::kSumsFull, 0);
  }

  // One lane speaks for the warp, whose lanes have all done what it reports.
  FAMX_DEVICE void arrive(uint32_t barrier) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) ptx::mbarrier_arrive(smem + barrier);
  }
  // The same at CTA 0's barrier.
  FAMX_DEVICE void report(uint32_t barrier) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) ptx::mbarrier_arrive_cluster(smem0 + barrier);
  }

  // The half's columns of S^T or dP^T -> registers -> s_loaded or dp_loaded
  FAMX_DEVICE void load(uint32_t (&x)[kHalfBlocks][32], uint32_t column, uint32_t loaded) {
    ptx::tcgen05_fence_after();  // written by the mma
#pragma unroll
    for (int b = 0; b < kHalfBlocks; ++b)
      ptx::tmem_load_32(x[b], tmem + column + half * kHalfQueries + b * kBlock);
    ptx::tmem_wait_load();
#pragma unroll
    for (int b = 0; b < kHalfBlocks; ++b) ptx::pin(x[b]);
    ptx::tcgen05_fence_before();  // the columns may be overwritten after this arrival
    report(loaded);
  }

  template <bool kMasked>
  FAMX_DEVICE void step(uint32_t parity, DsBuffer to, int tile) {
    using namespace ptx;
    // Bit i of word b: query 32 b + i of the half sees the key. (As comparisons, ptxas would keep those of the first
    // pass for the second, in memory.)
    uint32_t mask[kHalfBlocks] = {};
    if constexpr (kMasked) visible_queries(mask, tile);
    const auto visible = [&](int query) {
      return !kMasked || (mask[query / kBlock] >> query % kBlock & 1) != 0;
    };
    const uint32_t stat = smem + C::kStats + stats.stage * C::kStatBytes +
                          half * kHalfQueries * uint32_t(sizeof(float));
    ptx::mbarrier_wait(barrier_at(smem + C::kStatsFull, stats.stage), stats.parity);
    ptx::mbarrier_wait(smem + C::kSFull, parity);
    uint32_t prob[kHalfBlocks][32];
    load(prob, C::kS, C::kSLoaded);
    uint32_t payload[kHalfBlocks * 8];
    uint32_t bytes = 0;
    const Float2 scale = pack(p.scale_log2, p.scale_log2);
#pragma unroll
    for (int b = 0; b < kHalfBlocks; ++b) {
      float amax = 0.0f;
#pragma unroll
      for (int i = 0; i < kBlock; i += 4) {
        const float4 bias = load_shared(stat + (b * kBlock + i) * sizeof(float));
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          const int at = i + e;
          // x is rounded before LSE is subtracted, as in the forward: both may be large and all but equal.
          const Float2 x = add(mul_rounded(pair(prob[b], at), scale),
                               e ? pack(bias.z, bias.w) : pack(bias.x, bias.y));
          float p0 = exp2_approx(min_nan(low(x), 0.0f)), p1 = exp2_approx(min_nan(high(x), 0.0f));
          if (!visible(b * kBlock + at)) p0 = 0.0f;
          if (!visible(b * kBlock + at + 1)) p1 = 0.0f;
          amax = max_nan(amax, p0, p1);
          put(prob[b], at, p0, p1);
        }
      }
      const int byte = rceil_byte(amax);
      quantise(prob[b], byte, payload + 8 * b);
      bytes |= uint32_t(byte) << (8 * b);
    }
    arrive(C::kStatsEmpty + 8 * stats.stage);
    stats.advance();
    store_scales(C::kPScale, bytes);
    store_payload(C::kS, payload);
    ptx::fence_proxy_async();  // tcgen05.cp reads the scales
    ptx::tmem_wait_store();
    ptx::tcgen05_fence_before();  // the mma reads P^T after this arrival
    report(C::kPFull);

    ptx::mbarrier_wait(smem + C::kDPFull, parity);
    uint32_t ds[kHalfBlocks][32];
    load(ds, C::kDP, C::kDPLoaded);
    bytes = 0;
#pragma unroll
    for (int b = 0; b < kHalfBlocks; ++b) {
      float amax = 0.0f;
#pragma unroll
      for (int i = 0; i < kBlock; i += 2) {
        const Float2 y = mul(pair(ds[b], i), pair(prob[b], i));
        const float y0 = visible(b * kBlock + i) ? low(y) : 0.0f;
        const float y1 = visible(b * kBlock + i + 1) ? high(y) : 0.0f;
        amax = max_nan(amax, fabsf(y0), fabsf(y1));
        put(ds[b], i, y0, y1);
      }
      // The warp's 32 keys and these 32 queries share the scale.
      const int byte = rceil_byte(__uint_as_float(warp_max(__float_as_uint(amax) & 0x7FFFFFFFu)));
      quantise(ds[b], byte, payload + 8 * b);
      bytes |= uint32_t(byte) << (8 * b);
    }
    store_scales(C::kDsScaleByKey, bytes);
    store_ds(payload, bytes, to);
    store_payload(C::kDP, payload);
    ptx::fence_proxy_async();  // tcgen05.cp and tcgen05.mma read ds and the scales
    ptx::tmem_wait_store();
    ptx::tcgen05_fence_before();  // the mma reads dS^T after this arrival
    report(C::kDSFull);
    if (to.goes_out) arrive(C::kOutFull);
  }

  FAMX_DEVICE void visible_queries(uint32_t (&mask)[kHalfBlocks], int tile) const {
    const Work work(p, ptx::opaque(blockIdx.x));
    const int k = work.key_tile * kTile + key;
    const int first = work.window.first_query(k), end = work.window.end_query(k);
#pragma unroll
    for (int b = 0; b < kHalfBlocks; ++b) {
      const int base = tile * kTile + half * kHalfQueries + b * kBlock;
      mask[b] = below(end - base) & ~below(first - base);
    }
  }
  // Bits 0 .. n - 1.
  static FAMX_DEVICE uint32_t below(int n) { return n <= 0 ? 0 : n >= 32 ? ~0u : (1u << n) - 1; }

  // Two scale bytes of the key's row.
  FAMX_DEVICE void store_scales(uint32_t atom, uint32_t bytes) {
    asm volatile(
        "st.shared.b16 [%0], %1;" ::"r"(smem + atom + scale_word_offset(key) + half * kHalfBlocks),
        "h"(uint16_t(bytes))
        : "memory");
  }

  FAMX_DEVICE void store_payload(uint32_t column, const uint32_t (&payload)[kHalfBlocks * 8]) {
    static_assert(kHalfBlocks * 8 == 16, "one tcgen05.st");
    ptx::tmem_store_16(tmem + column + C::payload_column(half * kHalfBlocks), payload);
  }

  // 64 queries of the key's row of dS, and the scales by query: a row of the atom per query, byte = block of keys.
  FAMX_DEVICE void store_ds(const uint32_t (&payload)[kHalfBlocks * 8], uint32_t bytes,
                            DsBuffer to) {
    constexpr int kChunks = kHalfQueries / 16;
    // The 128-byte swizzle: chunk c of row r lies at c ^ r % 8.
    const uint32_t first = to.tile + key * kTile + 16 * (half * kChunks ^ (key & 7));
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(first ^ 16 * i),
                   "r"(payload[4 * i]), "r"(payload[4 * i + 1]), "r"(payload[4 * i + 2]),
                   "r"(payload[4 * i + 3])
                   : "memory");
    }
    // A lane takes a query of one of the two blocks and then another, so that two lanes, not four, share a bank.
    static_assert(kHalfBlocks == 2, "bit 0 of the lane chooses the block");
    const int lane = key & 31, block = lane & 1;
    const int query = (half * kHalfBlocks + block) * kBlock + lane / 2;
#pragma unroll
    for (int i = 0; i < kBlock; i += kBlock / 2) {
      asm volatile(
          "st.shared.b8 [%0], %1;" ::"r"(to.scales + scale_word_offset(query + i) + key / kBlock),
          "r"(bytes >> (8 * block))
          : "memory");
    }
  }
};

}  // namespace flash_attn_mx::bwd
