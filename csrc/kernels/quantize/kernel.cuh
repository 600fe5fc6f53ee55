// quantize: x -> MXFP8 payloads and scale bytes along up to three axes, from one read (docs/numerics.md §1).
//
// FLOW   x -LDG-> registers (32 tokens of 8 lanes x 16 bytes per warp) -> largest magnitudes, by shuffle and by register ->
//        scale bytes -> payloads -STG-> GMEM; scale atoms through SMEM
// ROLES  all warps the same. 8 lanes share a token, 16 bytes of neighbouring channels each (4 of fp32, 8 of bf16 and fp16); a
//        thread has 8 tokens. So a warp has 32 or 64 channels, kWarps warps side by side have a token, and the CTA's tile of
//        128 tokens has four such rows of warps.   GRID  (tile, head), one item a CTA
// Instructions are what this kernel runs out of first (docs/notes/quantize.md): 16-bit values stay in pairs until they are scaled.
// head_dim is a multiple of 4, at most kTileDim; four channels of x start at a multiple of their size, and eight of a
// 16-bit type too if eight_at_once: else a lane reads and writes its eight as two halves.
// SMEM   atoms 1024: of rowwise and colwise scales; largest 16 · kTileDim: for tokenwise scales, [token][channel block]
//
// Tiles start where sequences start. Packed: tile t of sequence b has the number cu[b] / 128 + b + t, as its scale atom; a
// few numbers belong to no tile. Tokens behind the last sequence are one more sequence, whose colwise payload is 0.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "common/sf_layout.cuh"
#include "params.h"
#include "quantize/launch.h"

namespace flash_attn_mx::quantize {

using bf16 = __nv_bfloat16;
using fp16 = __half;
using fp32 = float;

constexpr int kTile = kLaunchTile;
constexpr int kBlock = 32;

template <int kTileDim, class In>
constexpr int kThreads = launch_threads(kTileDim, sizeof(In));

// 16 bytes of neighbouring values as they lie in memory: four words of one or two.
template <class T>
struct alignas(16) Vector {
  static constexpr int kWords = 4, kPerWord = 4 / sizeof(T), kValues = kWords * kPerWord;
  uint32_t word[kWords];

  // Value i of a word.
  static FAMX_DEVICE float value(uint32_t word, int i) {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(word);
    } else if constexpr (std::is_same_v<T, bf16>) {
      return __uint_as_float(i == 0 ? word << 16 : word & 0xFFFF0000u);
    } else {
      const uint16_t bits = word >> (16 * i);
      return __half2float(reinterpret_cast<const __half&>(bits));
    }
  }

  FAMX_DEVICE float operator[](int i) const { return value(word[i / kPerWord], i % kPerWord); }

  // The larger magnitude of two words, value by value; NaN is the largest. Signs of the result mean nothing.
  static FAMX_DEVICE uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t d;
    if constexpr (std::is_same_v<T, bf16>) {
      asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    } else if constexpr (std::is_same_v<T, fp16>) {
      asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    } else {
      asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    }
    return d;
  }

  // Over lanes whose numbers differ in the bits of [kFrom, kTo), powers of two.
  template <int kFrom, int kTo>
  static FAMX_DEVICE uint32_t largest_of_lanes(uint32_t x) {
#pragma unroll
    for (int step = kFrom; step < kTo; step *= 2)
      x = larger(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
    return x;
  }

  // The compiler must convert anew: floats that it keeps would spill.
  FAMX_DEVICE void forget() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) asm volatile("" : "+r"(word[i]));
  }
};

// Which tokens a CTA has.
struct Item {
  int head, batch;    // batch: sequence, or the number of sequences for the tokens behind them
  int64_t token;      // first one of the tile, counted through all batches
  int tokens;         // of the sequence from there on, at most kTile; <= 0: nothing to do
  int64_t atom;       // of this tile and head; -1: none
  int64_t scale_row;  // first row of the plain colwise scale; -1: none

  FAMX_DEVICE explicit Item(const QuantizeParams& p) {
    const int item = blockIdx.x;
    head = item % p.heads;
    const int slot = item / p.heads;
    if (!p.cu_seqlens) {
      batch = slot / p.tiles;
      const int tile = slot % p.tiles;
      token = int64_t(batch) * p.tokens + int64_t(tile) * kTile;
      tokens = min(p.tokens - tile * kTile, kTile);
      atom = (int64_t(batch) * p.heads + head) * p.tiles + tile;
      scale_row = int64_t(batch) * ((p.tokens + kBlock - 1) / kBlock) + tile * (kTile / kBlock);
      return;
    }
    batch = find(p, slot);
    const int start = p.cu_seqlens[batch];
    const bool behind = batch == p.sequences;
    const int end = behind ? p.tokens : p.cu_seqlens[batch + 1];
    const int tile = slot - (start / kTile + batch);
    token = int64_t(start) + int64_t(tile) * kTile;
    tokens = min(end - int(token), kTile);
    atom = behind ? -1 : int64_t(head) * p.tiles + slot;
    scale_row = behind ? -1 : int64_t(start / kBlock + batch) + tile * (kTile / kBlock);
  }

  // The last sequence whose first tile has at most this number.
  static FAMX_DEVICE int find(const QuantizeParams& p, int slot) {
    int low = 0, high = p.sequences;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (p.cu_seqlens[middle] / kTile + middle <= slot) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

template <int kTileDim>
struct Shared {
  uint32_t atoms[2][128];  // rowwise, colwise
  alignas(16) uint32_t largest[kTile][kTileDim / kBlock];
};

template <int kTileDim, class In, bool kE5M2, bool kWhole>
struct Quantize {
  using X = Vector<In>;
  static constexpr int kLanes = kLaunchLanes;              // that share a token
  static constexpr int kTogether = 32 / kLanes;            // tokens that a warp loads at once
  static constexpr int kRows = kBlock / kTogether;         // tokens of a thread
  static constexpr int kWarpDim = kLanes * X::kValues;     // channels of a warp
  static constexpr int kWarps = kTileDim / kWarpDim;       // that share tokens
  static constexpr int kBlockLanes = kBlock / X::kValues;  // that share a block of a token
  static constexpr int kBlocks = kTileDim / kBlock;        // of a token
  static constexpr int kOut = X::kValues / 4;              // words of four payloads
  const QuantizeParams& p;
  Shared<kTileDim>& shared;
  const Item item;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int token_block = warp / kWarps;
  const int channel = warp % kWarps * kWarpDim + X::kValues * (lane % kLanes);  // first one
  const int channel_block = channel / kBlock;
  const int first_token = token_block * kBlock + lane / kLanes;           // of the tile
  const int rest = channel < p.head_dim ? item.tokens - first_token : 0;  // tokens from there on
  const int64_t step = int64_t(kTogether) * p.heads * p.head_dim;  // between a thread's payloads

  FAMX_DEVICE void run() {
    if (item.tokens <= 0) return;
    X x[kRows];
    const In* from = address();
#pragma unroll
    for (int r = 0; r < kRows; ++r, from += kTogether * p.x_stride_token)
      x[r] = r * kTogether < rest ? load(from) : X{};
    if (p.atoms) clear_atoms();  // while the loads are under way
    quantise(x);
    if (p.atoms && item.atom >= 0) store_atoms();
  }

  // One direction after the other: the registers of two would spill.
  FAMX_DEVICE void quantise(X (&x)[kRows]) {
    if (p.col) columns(x);
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r].forget();
    if (p.row) rows(x);
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r].forget();
    if (p.tok) tokens(x);
  }

  // fp32 bits of the largest magnitude of this lane's block of a token.
  static FAMX_DEVICE uint32_t largest_of_block(const X& x) {
    const auto& w = x.word;
    uint32_t most = X::larger(X::larger(w[0], w[1]), X::larger(w[2], w[3]));
    most = X::template largest_of_lanes<1, kBlockLanes>(most);
    if (X::kPerWord == 2) most = X::larger(most, __funnelshift_l(most, most, 16));
    return bits_of(most, 0);
  }

  FAMX_DEVICE void rows(const X (&x)[kRows]) {
    const int here = ptx::opaque(rest);
    const int leader = lane % kBlockLanes == 0 ? here : 0;  // tokens whose scales it writes
    const int per_row = (p.head_dim + kBlock - 1) / kBlock;
    uint8_t* to = p.row + first_payload();
    // In SMEM or GMEM. Neighbouring tokens of a block are 16 bytes apart in an atom.
    uint8_t* scale_to = p.atoms ? atom_byte(0, first_token, channel_block)
                                : p.row_scale + first_row() * per_row + channel_block;
    const int64_t scale_step = p.atoms ? 16 * kTogether : int64_t(kTogether) * p.heads * per_row;
#pragma unroll
    for (int r = 0; r < kRows; ++r, to += step, scale_to += scale_step) {
      const float factor = factor_of(largest_of_block(x[r]));
      store_payloads(r * kTogether < here, to, x[r], [&](int) { return factor; });
      if (r * kTogether < leader) *scale_to = byte_of(factor);
    }
  }

  // Every thread of the CTA comes here, or none.
  FAMX_DEVICE void tokens(const X (&x)[kRows]) {
    auto* mine = shared.largest[first_token];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const uint32_t largest = largest_of_block(x[r]);
      if (lane % kBlockLanes == 0) mine[r * kTogether * kBlocks + channel_block] = largest;
    }
    __syncthreads();
    const int here = ptx::opaque(rest);
    const int leader = channel == 0 ? here : 0;
    uint8_t* to = p.tok + first_payload();
    uint8_t* scale_to = p.tok_scale + first_row();
#pragma unroll
    for (int r = 0; r < kRows; ++r, to += step, scale_to += int64_t(kTogether) * p.heads) {
      uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) most = max(most, mine[r * kTogether * kBlocks + i]);
      const float factor = factor_of(most);
      const uint32_t kept = isnan(factor) ? 0 : ~0u;  // tokens with NaN or Inf: zeros
      store_payloads(r * kTogether < here, to, x[r], [&](int) { return factor; }, kept);
      if (r * kTogether < leader) *scale_to = byte_of(factor);
    }
  }

  FAMX_DEVICE void columns(const X (&x)[kRows]) {
    const int here = ptx::opaque(rest);
    uint8_t* to = p.col + first_payload();
    if (item.scale_row < 0) {  // these tokens belong to no sequence
#pragma unroll
      for (int r = 0; r < kRows; ++r, to += step)
        if (r * kTogether < here) store(to, {});
      return;
    }
    float factor[X::kValues];
#pragma unroll
    for (int w = 0; w < X::kWords; ++w) {
      uint32_t most = x[0].word[w];
#pragma unroll
      for (int r = 1; r < kRows; ++r) most = X::larger(most, x[r].word[w]);
      most = X::template largest_of_lanes<kLanes, 32>(most);
#pragma unroll
      for (int i = 0; i < X::kPerWord; ++i)
        factor[w * X::kPerWord + i] = factor_of(bits_of(most, i));
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r, to += step)
      store_payloads(r * kTogether < here, to, x[r], [&](int i) { return factor[i]; });
    if (lane < kLanes) store_scales(here > 0, factor);
  }

  // Of this thread's channels.
  FAMX_DEVICE void store_scales(bool exist, const float (&factor)[X::kValues]) {
    if (p.atoms) {
      uint8_t* to = atom_byte(1, channel, token_block);
#pragma unroll
      for (int i = 0; i < X::kValues; ++i) to[16 * i] = byte_of(factor[i]);
    } else if (exist) {
      const int64_t row = (item.scale_row + token_block) * p.heads + item.head;
      uint32_t words[kOut] = {};
#pragma unroll
      for (int i = 0; i < X::kValues; ++i) words[i / 4] |= byte_of(factor[i]) << (8 * (i % 4));
      store(p.col_scale + row * p.head_dim + channel, words);
    }
  }

  // --- scale atoms ------------------------------------------------------------------------------

  FAMX_DEVICE uint8_t* atom_byte(int atom, int row, int block) {
    return reinterpret_cast<uint8_t*>(shared.atoms[atom]) + scale_word_offset(row) + block;
  }

  // For each word of the atoms that this thread has.
  template <class F>
  static FAMX_DEVICE void for_atom_words(F f) {
#pragma unroll
    for (int first = 0; first < 256; first += kThreads<kTileDim, In>) {
      const int i = first + threadIdx.x;
      if (i < 256) f(i / 128, i % 128);
    }
  }

  // Scales of channels, tokens and blocks that do not exist: 2^0.
  FAMX_DEVICE void clear_atoms() {
    for_atom_words([&](int atom, int word) { shared.atoms[atom][word] = kScaleOnes; });
    __syncthreads();
  }

  FAMX_DEVICE void store_atoms() {
    __syncthreads();
    for_atom_words([&](int atom, int word) {
      auto* to = reinterpret_cast<uint32_t*>(atom == 0 ? p.row_scale : p.col_scale);
      if (to) to[item.atom * 128 + word] = shared.atoms[atom][word];
    });
  }

  // --- memory -----------------------------------------------------------------------------------

  // Of this thread's first token: its row of (token, head), its first payload.
  FAMX_DEVICE int64_t first_row() const { return (item.token + first_token) * p.heads + item.head; }
  FAMX_DEVICE int64_t first_payload() const { return first_row() * p.head_dim + channel; }

  // Of this thread's first token; it may not exist.
  FAMX_DEVICE const In* address() const {
    const int64_t batch = p.cu_seqlens ? 0 : item.batch;
    const int64_t token = item.token + first_token - batch * p.tokens;
    return static_cast<const In*>(p.x) + batch * p.x_stride_batch + token * p.x_stride_token +
           item.head * p.x_stride_head + channel;
  }

  // Whether there are channels for the second half of a vector.
  FAMX_DEVICE bool second() const { return channel + X::kValues / 2 < p.head_dim; }

  FAMX_DEVICE X load(const In* from) const {
    if constexpr (kWhole) return *reinterpret_cast<const X*>(from);
    const auto* half = reinterpret_cast<const uint2*>(from);
    const uint2 low = half[0], high = second() ? half[1] : uint2{};
    return {{low.x, low.y, high.x, high.y}};
  }

  FAMX_DEVICE void store(uint8_t* to, const uint32_t (&words)[kOut]) const {
    auto* out = reinterpret_cast<uint32_t*>(to);
    if constexpr (kOut == 1) {
      out[0] = words[0];
    } else if constexpr (kWhole) {
      *reinterpret_cast<uint2*>(to) = {words[0], words[1]};
    } else {
      out[0] = words[0];
      if (second()) out[1] = words[1];
    }
  }

  // Rounded first, so that only the store depends on `exists`.   factor: of value i; kept: a mask of four payloads
  template <class F>
  FAMX_DEVICE void store_payloads(bool exists, uint8_t* to, const X& x, F factor,
                                  uint32_t kept = ~0u) const {
    uint32_t words[kOut];
#pragma unroll
    for (int i = 0; i < kOut; ++i) {
      float y[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) y[j] = x[4 * i + j] * factor(4 * i + j);
      words[i] = kept & (kE5M2 ? ptx::pack_e5m2(y[0], y[1], y[2], y[3])
                               : ptx::pack_e4m3(y[0], y[1], y[2], y[3]));
    }
    if (exists) store(to, words);
  }

  // --- rounding ---------------------------------------------------------------------------------

  // fp32 bits of the magnitude of value i of a word.
  static FAMX_DEVICE uint32_t bits_of(uint32_t word, int i) {
    return __float_as_uint(X::value(word, i)) & 0x7FFFFFFFu;
  }

  // What a block's values are multiplied by before they are rounded: 2^(127 - byte), a finite block has a byte <= 247.
  // NaN for 255: NaN times anything is rounded to the payload that means NaN.
  FAMX_DEVICE float factor_of(uint32_t largest) const {
    const uint32_t byte = scale_byte<kE5M2 ? 15 : 8>(largest, p.round_up);
    return __uint_as_float(largest >> 23 == 255 ? 0x7FC00000u : (254u - byte) << 23);
  }

  // The scale byte again: fewer registers than to keep both.
  static FAMX_DEVICE uint32_t byte_of(float factor) {
    return (254u - (__float_as_uint(factor) >> 23)) & 0xFF;
  }
};

// Whether any eight channels, from a multiple of eight on, can be read and their payloads written at once.
FAMX_DEVICE bool eight_at_once(const QuantizeParams& p) {
  const auto address = [](const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); };
  const uintptr_t outputs = address(p.row) | address(p.col) | address(p.tok) | address(p.col_scale);
  const int64_t strides = p.x_stride_batch | p.x_stride_token | p.x_stride_head | p.head_dim;
  return address(p.x) % 16 == 0 && (outputs | strides) % 8 == 0;
}

template <int kTileDim, class In, bool kE5M2>
FAMX_DEVICE void run(const QuantizeParams& p, Shared<kTileDim>& shared) {
  const Item item(p);
  if (sizeof(In) == 4 || eight_at_once(p)) {
    Quantize<kTileDim, In, kE5M2, true>{p, shared, item}.run();
  } else {
    Quantize<kTileDim, In, kE5M2, false>{p, shared, item}.run();
  }
}

}  // namespace flash_attn_mx::quantize

// resident: threads of an SM
#define FAMX_DEFINE_QUANTIZE(name, head_dim, in_type, resident)                                 \
  extern "C" __global__ void __launch_bounds__(                                                 \
      flash_attn_mx::quantize::kThreads<head_dim, flash_attn_mx::quantize::in_type>,            \
      resident / flash_attn_mx::quantize::kThreads<head_dim, flash_attn_mx::quantize::in_type>) \
      name(const __grid_constant__ flash_attn_mx::QuantizeParams params) {                      \
    using namespace flash_attn_mx::quantize;                                                    \
    __shared__ Shared<head_dim> shared;                                                         \
    if (params.e5m2) {                                                                          \
      run<head_dim, in_type, true>(params, shared);                                             \
    } else {                                                                                    \
      run<head_dim, in_type, false>(params, shared);                                            \
    }                                                                                           \
  }

// 1024 threads, 128 bytes of x each, keep more of it in flight than HBM needs.
#define FAMX_DEFINE_KERNEL(name, head_dim, in_type) \
  FAMX_DEFINE_QUANTIZE(name, head_dim, in_type, 1024)
