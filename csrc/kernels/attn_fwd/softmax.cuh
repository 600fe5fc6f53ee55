// The softmax role: 128 threads per query tile, one row each. Per key tile: S -> registers, row maximum, tile exponent n,
// P = 2^(x - r - n), payload -> TMEM, scale bytes -> SMEM. O is touched only when a row's reference r moves (slow path).
#pragma once

#include "attn_fwd/config.cuh"
#include "common/softmax.cuh"

namespace flash_attn_mx::fwd {

enum class TileKind {
  kUnseen,  // no row sees a key: the query tile only takes part in the barriers
  kFull,    // every row sees all keys that exist
  kCut,     // some row does not see some key: V tokenwise, a scale byte per 32 keys
};

template <class C>
struct Softmax {
  const AttnFwdParams& p;
  const uint32_t smem;
  const uint32_t tmem;  // of the warp's lanes
  const int tile;       // 0, 1
  const int row;        // of the tile
  uint32_t step = 0;    // of all items: gives the parities of the per-step barriers
  RowState state{};
  bool started = false;  // a step of this item is behind us
  bool live = false;     // O holds a product of this item

  FAMX_DEVICE Softmax(const AttnFwdParams& params, uint32_t smem, uint32_t tmem, int warp)
      : p(params),
        smem(smem),
        tmem(tmem + ((warp % kWarpsPerTile) * 32 << 16)),
        tile(warp / kWarpsPerTile),
        row(threadIdx.x % kRowThreads) {}

  // All steps of one item. At the end O and the sums of the row are complete.
  FAMX_DEVICE void run(int item) {
    state = RowState{};
    live = false;
    started = false;
    // Registers are short while a row of S is in them: what is needed rarely is derived anew from the item's number.
    Span span = Work(p, item).span();
    const int first = span.first;
    int run_first = span.end;  // of the run of key tiles of one kind; none yet
    TileKind kind = TileKind::kUnseen;
    bool tail = false;  // the sequence ends in this key tile
    for (int key_tile = span.end - 1; key_tile >= first; --key_tile, ++step) {
      if (key_tile < run_first) {
        const Work work(p, ptx::opaque(item));
        const TileRange range = work.range(tile);
        kind = range.full(key_tile)     ? TileKind::kFull
               : range.active(key_tile) ? TileKind::kCut
                                        : TileKind::kUnseen;
        tail = work.keys(key_tile) < kTile;
        run_first = tail ? key_tile : range.run_first(key_tile);
      }
      const bool last = key_tile == first;
      ptx::mbarrier_wait(barrier_at(smem + C::kSFull, tile), step & 1);
      if (kind == TileKind::kFull) {
        visit_full(item, key_tile, tail, last);
        live = true;
      } else if (kind == TileKind::kCut) {
        visit_cut(item, key_tile, last);
        live = true;
      } else {
        arrive(C::kSLoaded);
        wait_pv();
        arrive(C::kPFull);
      }
      started = true;
    }
    wait_pv();
  }

  // One lane speaks for the warp, whose lanes have all done what it reports.
  FAMX_DEVICE void arrive(uint32_t barriers) {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) ptx::mbarrier_arrive(barrier_at(smem + barriers, tile));
  }

  // PV of the step before: O_i holds it, its scales in p_scale and its P have been read.
  FAMX_DEVICE void wait_pv() {
    if (started) ptx::mbarrier_wait(barrier_at(smem + C::kPVDone, tile), (step - 1) & 1);
  }

  FAMX_DEVICE void visit_full(int item, int key_tile, bool tail, bool last) {
    uint32_t s[4][32], payload[32];
    load_s(s);
    if (tail) {
      const int keys = Work(p, ptx::opaque(item)).keys(key_tile);
#pragma unroll
      for (int k = 0; k < kTile; ++k)
        if (k >= keys) s[k / 32][k % 32] = __float_as_uint(-kInfinity);
    }
    const uint32_t scales = full_tile(s, payload);
    store_p(payload, scales, last);
  }

  FAMX_DEVICE void visit_cut(int item, int key_tile, bool last) {
    uint32_t s[4][32], payload[32];
    load_s(s);
    // Derived anew: carried along, it would cost registers in the other tiles.
    const Work work(p, ptx::opaque(item));
    const int opaque_row = ptx::opaque(row);
    stage_factors(work, key_tile, opaque_row);
    // Keys [begin, begin + seen) of the tile are visible.
    const int query = work.row + tile * kTile + opaque_row;
    const int begin = max(work.window.first(query) - key_tile * kTile, 0);
    const int end = min(work.window.end(query) - key_tile * kTile, kTile);
    const uint32_t scales = cut_tile(s, payload, begin, max(end - begin, 0));
    store_p(payload, scales, last);
  }

  // S_i -> registers -> s_loaded[i]
  FAMX_DEVICE void load_s(uint32_t (&s)[4][32]) {
    ptx::tcgen05_fence_after();  // S was written by the mma
#pragma unroll
    for (int k = 0; k < 4; ++k)
      ptx::tmem_load_32(s[k], tmem + C::s_column(0) + tile * kTile + 32 * k);
    ptx::tmem_wait_load();
#pragma unroll
    for (int k = 0; k < 4; ++k) ptx::pin(s[k]);
    ptx::tcgen05_fence_before();  // the columns of S may be overwritten after this arrival
    arrive(C::kSLoaded);
  }

  // P, SFP -> p_full[i], once the other tile's S is out of the columns that P goes to.
  FAMX_DEVICE void store_p(const uint32_t (&payload)[32], uint32_t scales, bool last) {
    wait_pv();
    // P0(n) lies in S1(n), P1(n) in S0(n+1). S0(n) was read before QK1(n) was issued.
    if (tile == 0)
      ptx::mbarrier_wait(barrier_at(smem + C::kSLoaded, 1), step & 1);
    else if (!last)
      ptx::mbarrier_wait(barrier_at(smem + C::kSLoaded, 0), (step + 1) & 1);
    ptx::tcgen05_fence_after();
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem + C::kPScale + tile * kScaleAtomBytes +
                                                 scale_word_offset(row)),
                 "r"(scales)
                 : "memory");
    ptx::fence_proxy_async();  // tcgen05.cp reads the scales
    ptx::tmem_store_32(tmem + (1 - tile) * kTile + C::kP, payload);
    ptx::tmem_wait_store();
    ptx::tcgen05_fence_before();  // the mma reads P after this arrival
    arrive(C::kPFull);
  }

  // Where m lies more than 60 above r, r moves up to m (for the first visible key too, where r is -inf).
  FAMX_DEVICE static bool must_move(float m, float reference) {
    return m - reference > kMaxTileExponent;
  }

  FAMX_DEVICE void move_reference(float m) {
    const bool move = must_move(m, state.reference);
    const float moved = move ? m : state.reference;
    const float factor = move ? ptx::exp2_approx(state.reference - moved) : 1.0f;
    const bool rescale = move && state.reference > -kInfinity;
    state.reference = moved;
    state.rescale(factor);
    if (live && __any_sync(0xFFFFFFFFu, rescale)) rescale_o(factor);
  }

  // The slow path: O_i *= factor. The products issued so far must be in it, and no other is issued before p_full.
  FAMX_DEVICE void rescale_o(float factor) {
    wait_pv();
    ptx::tcgen05_fence_after();
    const uint32_t o = tmem + kTiles * kTile + tile * C::kHeadDim;
#pragma unroll 1
    for (int column = 0; column < C::kHeadDim; column += 16) {
      uint32_t r[16];
      ptx::tmem_load_16(r, o + column);
      ptx::tmem_wait_load();
      ptx::pin(r);
#pragma unroll
      for (int j = 0; j < 16; ++j) r[j] = __float_as_uint(__uint_as_float(r[j]) * factor);
      ptx::tmem_store_16(o + column, r);
    }
    ptx::tmem_wait_store();
  }

  // The S whose x, unrounded, is the rounded x of s minus shift.
  FAMX_DEVICE float from_shifted(float s, float shift) const {
    return __fdividef(__fmul_rn(s, p.scale_log2) - shift, p.scale_log2);
  }

  // Returns the scale word: one byte for all 128 keys. payload = e4m3(256 p).
  FAMX_DEVICE uint32_t full_tile(uint32_t (&s)[4][32], uint32_t (&payload)[32]) {
    using namespace ptx;
    float largest = row_max(s);
    const float m = largest * p.scale_log2;
    // Three rare things share one vote: a row's first key, a reference that moves, logits that one fma does not resolve.
    const bool far = fabsf(m) > kFarLogit;
    float reference = state.reference, anchor = reference;
    if (__any_sync(0xFFFFFFFFu, far || must_move(m, reference))) {
      move_reference(m);
      reference = anchor = state.reference == -kInfinity ? 0.0f : state.reference;
      if (__any_sync(0xFFFFFFFFu, far)) {
        const float shift = m == -kInfinity ? 0.0f : m;
        anchor -= shift;
        largest = from_shifted(largest, shift);
#pragma unroll
        for (int k = 0; k < kTile; ++k)
          s[k / 32][k % 32] =
              __float_as_uint(from_shifted(__uint_as_float(s[k / 32][k % 32]), shift));
      }
    }
    const TileExponent n(m - reference);
    const float bias = (8.0f - n.value) - anchor;
    const Exp2 exp2(p.scale_log2, bias);
    Float2 sum[2] = {pack(0.0f, 0.0f), pack(0.0f, 0.0f)};
#pragma unroll
    for (int g = 0; g < kTile / 4; ++g) {
      Float2 e[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at = 4 * g + 2 * h;
        const float s0 = __uint_as_float(s[at / 32][at % 32]),
                    s1 = __uint_as_float(s[at / 32][at % 32 + 1]);
        e[h] = on_fma_pipe(at / 2, kPolynomialPairs) ? exp2.polynomial(s0, s1) : exp2.mufu(s0, s1);
        sum[h] = add(sum[h], e[h]);
      }
      payload[g] = pack_e4m3(low(e[0]), high(e[0]), low(e[1]), high(e[1]));
    }
    sum[0] = add(sum[0], sum[1]);
    const float weight = n.weight_256();
    state.sum = __fmaf_rn(weight, low(sum[0]) + high(sum[0]), state.sum);
    state.sum_quantised = __fmaf_rn(
        weight, rounding_of_largest<256>(exp2_approx(__fmaf_rn(largest, p.scale_log2, bias))),
        state.sum_quantised);
    return n.bytes();
  }

  // Token scales of V as floats, NaN for poisoned tokens, 1 behind the end of the sequence.
  FAMX_DEVICE void stage_factors(const Work& work, int key_tile, int row) {
    const int key = key_tile * kTile + row;
    uint32_t byte = 127;
    if (key < work.seqlen_k)
      byte = p.v_tok_scale[(p.cu_seqlens_k ? 0 : work.batch) * p.v_tok_scale_stride_batch +
                           (work.k_start + int64_t(key)) * p.v_tok_scale_stride_token +
                           (work.head / p.heads_per_kv) * p.v_tok_scale_stride_head];
    ptx::named_barrier(1 + tile, kRowThreads);  // the factors of the tile before have been read
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(smem + C::kFactors +
                                                 (tile * kTile + row) * uint32_t(sizeof(float))),
                 "f"(scale_factor(byte))
                 : "memory");
    ptx::named_barrier(1 + tile, kRowThreads);
  }

  // Returns the scale word: a byte per 32 keys. payload = e4m3(p * factor * 2^(127 - byte)), 0 for keys not seen.
  FAMX_DEVICE uint32_t cut_tile(uint32_t (&s)[4][32], uint32_t (&payload)[32], int begin,
                                int seen) {
    using namespace ptx;
    const auto visible = [&](int key) { return uint32_t(key - begin) < uint32_t(seen); };
#pragma unroll
    for (int k = 0; k < kTile; ++k) {
      const float x = __uint_as_float(s[k / 32][k % 32]) * p.scale_log2;
      s[k / 32][k % 32] = __float_as_uint(visible(k) ? x : -kInfinity);
    }
    const float m = row_max(s);
    if (__any_sync(0xFFFFFFFFu, must_move(m, state.reference))) move_reference(m);
    const float reference = state.reference == -kInfinity ? 0.0f : state.reference;
    const TileExponent n(m - reference);
    const int tile_exponent = int(n.byte & 255) + kMinTileExponent;
    const float bias = -reference - n.value;
    const uint32_t factors = smem + C::kFactors + tile * kTile * sizeof(float);
    // Else the compiler keeps 128 predicates of the first pass, in memory.
    asm volatile("" : "+r"(begin));
    float sum = 0.0f;
    uint32_t scales = 0;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      float amax = 0.0f;
#pragma unroll
      for (int k = 0; k < 32; k += 4) {
        const float4 f4 = load_shared(factors + (32 * b + k) * sizeof(float));
        const float f[4] = {f4.x, f4.y, f4.z, f4.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float e = exp2_approx(__uint_as_float(s[b][k + j]) + bias);
          sum += e;
          const float scaled = visible(32 * b + k + j) ? e * f[j] : 0.0f;
          amax = max_nan(amax, scaled);
          s[b][k + j] = __float_as_uint(scaled);
        }
      }
      const int byte = rceil_byte(amax);
      const int kept = min(max(byte, max(0, -tile_exponent)), min(254, 254 - tile_exponent));
      const float up = scale_factor(254 - kept);
#pragma unroll
      for (int k = 0; k < 32; k += 4)
        payload[(32 * b + k) / 4] =
            pack_e4m3(__uint_as_float(s[b][k]) * up, __uint_as_float(s[b][k + 1]) * up,
                      __uint_as_float(s[b][k + 2]) * up, __uint_as_float(s[b][k + 3]) * up);
      scales |= uint32_t(byte == 255 ? 255 : kept + tile_exponent) << (8 * b);
    }
    const float weight = exp2_approx(n.value);
    state.sum = __fmaf_rn(weight, sum, state.sum);
    state.sum_quantised =
        __fmaf_rn(weight, rounding_of_largest<1>(exp2_approx(m + bias)), state.sum_quantised);
    return scales;
  }
};

}  // namespace flash_attn_mx::fwd
