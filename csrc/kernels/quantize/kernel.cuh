// quantize: x -> MXFP8 payloads and scale bytes along up to three axes, from one read (docs/numerics.md §1).
//
// FLOW   x -LDG-> registers (a block of 32 tokens x 32 channels per warp) -> largest magnitudes as integers, by shuffle and by
//        register -> scale bytes -> payloads -STG-> GMEM; scale atoms through SMEM
// ROLES  4 · kTileDim / 32 warps, all the same: warp w has block w % (kTileDim / 32) of the channels of tokens [32 b, 32 b + 32),
//        b = w / (kTileDim / 32), of a tile of 128. In it 8 lanes share a token, four neighbouring channels each; a thread has 8
//        tokens.   GRID  (tile, head), one item a CTA
// head_dim is a multiple of 4, at most kTileDim; four channels of x start at a multiple of their size.
// SMEM   sAtoms 1024: atoms of rowwise and colwise scales; sLargest 512: for tokenwise scales, [token][channel block]
//
// Tiles start where sequences start. Packed: tile t of sequence b has the number cu[b] / 128 + b + t, as its scale atom; a
// few numbers belong to no tile. Tokens behind the last sequence are one more sequence, whose colwise payload is 0.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/sf_layout.cuh"
#include "params.h"
#include "quantize/launch.h"

namespace flash_attn_mx::quantize {

using bf16 = __nv_bfloat16;
using fp16 = __half;
using fp32 = float;

constexpr int kTile = kLaunchTile;
constexpr int kBlock = 32;
constexpr uint32_t kNanPayload = 0x7F7F7F7Fu;  // NaN in E4M3 and E5M2
constexpr uint32_t kMagnitude = 0x7FFFFFFFu;

// Four neighbouring values as they lie in memory.
template <class T>
struct alignas(4 * sizeof(T)) Four {
  static constexpr int kWords = sizeof(T);
  uint32_t word[kWords];

  FAMX_DEVICE float operator[](int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(word[i]);
    } else {
      const uint16_t bits = word[i / 2] >> (16 * (i % 2));
      return float(reinterpret_cast<const T&>(bits));
    }
  }

  // The compiler must convert anew: floats that it keeps would spill.
  FAMX_DEVICE void forget() {
#pragma unroll
    for (int i = 0; i < kWords; ++i) asm volatile("" : "+r"(word[i]));
  }
};

// fp32 bits of a magnitude; NaN is the largest.
FAMX_DEVICE uint32_t magnitude(float x) { return __float_as_uint(x) & kMagnitude; }

// Over lanes whose numbers differ in the bits of [kFrom, kTo), powers of two.
template <int kFrom, int kTo>
FAMX_DEVICE uint32_t max_over_lanes(uint32_t x) {
#pragma unroll
  for (int step = kFrom; step < kTo; step *= 2) x = max(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
  return x;
}

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
  uint32_t largest[kTile][kTileDim / kBlock];
};

template <int kTileDim, class In, bool kE5M2>
struct Quantize {
  static constexpr int kLanes = kBlock / 4;         // that share a token
  static constexpr int kTogether = 32 / kLanes;     // tokens that a warp loads at once
  static constexpr int kRows = kBlock / kTogether;  // tokens of a thread
  static constexpr int kWarps = kTileDim / kBlock;  // that share tokens
  const QuantizeParams& p;
  Shared<kTileDim>& shared;
  const Item item;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int token_block = warp / kWarps, channel_block = warp % kWarps;
  const int64_t step = int64_t(kTogether) * p.heads * p.head_dim;  // between a thread's payloads

  const int channel = channel_block * kBlock + 4 * (lane % kLanes);  // first of this thread's four

  FAMX_DEVICE void run() {
    if (item.tokens <= 0) return;
    if (p.atoms) clear_atoms();
    Four<In> x[kRows];
    const In* from = address();
#pragma unroll
    for (int r = 0; r < kRows; ++r, from += kTogether * p.x_stride_token)
      x[r] = exists(r) ? *reinterpret_cast<const Four<In>*>(from) : Four<In>{};
    quantise(x);
    if (p.atoms && item.atom >= 0) store_atoms();
  }

  // The token of the tile that this thread has in its row r.
  FAMX_DEVICE int token_of(int r) const {
    return token_block * kBlock + r * kTogether + lane / kLanes;
  }

  FAMX_DEVICE bool exists(int r) const { return token_of(r) < item.tokens && channel < p.head_dim; }

  // One direction after the other: the registers of both would spill.
  FAMX_DEVICE void quantise(Four<In> (&x)[kRows]) {
    if (p.col) columns(x);
    if (!p.row && !p.tok) return;
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r].forget();
    uint32_t largest[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      largest[r] = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) largest[r] = max(largest[r], magnitude(x[r][i]));
      largest[r] = max_over_lanes<1, kLanes>(largest[r]);
      x[r].forget();
    }
    if (p.row) rows(x, largest);
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r].forget();
    if (p.tok) tokens(x, largest);
  }

  FAMX_DEVICE void rows(const Four<In> (&x)[kRows], const uint32_t (&largest)[kRows]) {
    uint8_t* to = p.row + first_payload();
    const int per_row = (p.head_dim + kBlock - 1) / kBlock;
#pragma unroll
    for (int r = 0; r < kRows; ++r, to += step) {
      const uint32_t byte = scale_byte(largest[r]), factor = payload_factor(byte);
      if (exists(r))
        store(to, byte == 255 ? kNanPayload : payload(x[r], factor, factor, factor, factor));
      if (lane % kLanes) continue;
      if (p.atoms) {
        atom_byte(0, token_of(r), channel_block) = byte;
      } else if (exists(r)) {
        p.row_scale[row_of(token_of(r)) * per_row + channel_block] = byte;
      }
    }
  }

  // Every thread of the CTA comes here, or none.
  FAMX_DEVICE void tokens(const Four<In> (&x)[kRows], const uint32_t (&largest)[kRows]) {
    if (lane % kLanes == 0) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) shared.largest[token_of(r)][channel_block] = largest[r];
    }
    __syncthreads();
    uint8_t* to = p.tok + first_payload();
#pragma unroll
    for (int r = 0; r < kRows; ++r, to += step) {
      uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < kWarps; ++i) most = max(most, shared.largest[token_of(r)][i]);
      const uint32_t byte = scale_byte(most), factor = payload_factor(byte);
      if (!exists(r)) continue;
      store(to, byte == 255 ? 0 : payload(x[r], factor, factor, factor, factor));
      if (channel == 0) p.tok_scale[row_of(token_of(r))] = byte;
    }
  }

  FAMX_DEVICE void columns(Four<In> (&x)[kRows]) {
    uint32_t byte[4], factor[4], poison = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t largest = 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) largest = max(largest, magnitude(x[r][i]));
      byte[i] = scale_byte(max_over_lanes<kLanes, 32>(largest));
      factor[i] = payload_factor(byte[i]);
      if (byte[i] == 255) poison |= 0xFFu << (8 * i);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r].forget();
    const bool behind = item.scale_row < 0;  // these tokens belong to no sequence
    uint8_t* to = p.col + first_payload();
#pragma unroll
    for (int r = 0; r < kRows; ++r, to += step) {
      if (!exists(r)) continue;
      const uint32_t word = payload(x[r], factor[0], factor[1], factor[2], factor[3]);
      store(to, behind ? 0 : (word & ~poison) | (kNanPayload & poison));
    }
    if (lane >= kLanes) return;
    if (p.atoms) {
#pragma unroll
      for (int i = 0; i < 4; ++i) atom_byte(1, channel + i, token_block) = byte[i];
    } else if (exists(0) && !behind) {
      const int64_t row = (item.scale_row + token_block) * p.heads + item.head;
      store(p.col_scale + row * p.head_dim + channel,
            byte[0] | byte[1] << 8 | byte[2] << 16 | byte[3] << 24);
    }
  }

  // --- scale atoms ------------------------------------------------------------------------------

  FAMX_DEVICE uint8_t& atom_byte(int atom, int row, int block) {
    return reinterpret_cast<uint8_t*>(shared.atoms[atom])[scale_word_offset(row) + block];
  }

  // Scales of channels and blocks that do not exist: 2^0.
  FAMX_DEVICE void clear_atoms() {
    if (threadIdx.x < 256) shared.atoms[threadIdx.x / 128][threadIdx.x % 128] = kScaleOnes;
    __syncthreads();
  }

  FAMX_DEVICE void store_atoms() {
    __syncthreads();
    const int which = threadIdx.x / 128, word = threadIdx.x % 128;
    uint8_t* to = which == 0 ? p.row_scale : which == 1 ? p.col_scale : nullptr;
    if (to) reinterpret_cast<uint32_t*>(to)[item.atom * 128 + word] = shared.atoms[which][word];
  }

  // --- memory -----------------------------------------------------------------------------------

  FAMX_DEVICE int64_t row_of(int token) const { return (item.token + token) * p.heads + item.head; }
  FAMX_DEVICE int64_t first_payload() const { return row_of(token_of(0)) * p.head_dim + channel; }

  // Of this thread's first token; it may not exist.
  FAMX_DEVICE const In* address() const {
    const int64_t batch = p.cu_seqlens ? 0 : item.batch;
    const int64_t token = item.token + token_of(0) - batch * p.tokens;
    return static_cast<const In*>(p.x) + batch * p.x_stride_batch + token * p.x_stride_token +
           item.head * p.x_stride_head + channel;
  }

  static FAMX_DEVICE void store(uint8_t* to, uint32_t word) {
    *reinterpret_cast<uint32_t*>(to) = word;
  }

  // --- rounding ---------------------------------------------------------------------------------

  FAMX_DEVICE uint32_t scale_byte(uint32_t amax) const {
    return flash_attn_mx::scale_byte<kE5M2 ? 15 : 8>(amax, p.round_up);
  }

  // Bits of 2^(127 - byte); a finite block has a byte <= 247.
  static FAMX_DEVICE uint32_t payload_factor(uint32_t byte) { return (254u - byte) << 23; }

  FAMX_DEVICE uint32_t payload(const Four<In>& x, uint32_t f0, uint32_t f1, uint32_t f2,
                               uint32_t f3) const {
    const float y0 = x[0] * __uint_as_float(f0);
    const float y1 = x[1] * __uint_as_float(f1);
    const float y2 = x[2] * __uint_as_float(f2);
    const float y3 = x[3] * __uint_as_float(f3);
    return kE5M2 ? ptx::pack_e5m2(y0, y1, y2, y3) : ptx::pack_e4m3(y0, y1, y2, y3);
  }
};

}  // namespace flash_attn_mx::quantize

// 1024 threads per SM keep as many bytes in flight as HBM needs.
#define FAMX_DEFINE_KERNEL(name, head_dim, in_type)                        \
  extern "C" __global__ void __launch_bounds__(                            \
      flash_attn_mx::quantize::launch_threads(head_dim),                   \
      1024 / flash_attn_mx::quantize::launch_threads(head_dim))            \
      name(const __grid_constant__ flash_attn_mx::QuantizeParams params) { \
    using namespace flash_attn_mx::quantize;                               \
    __shared__ Shared<head_dim> shared;                                    \
    const Item item(params);                                               \
    if (params.e5m2) {                                                     \
      Quantize<head_dim, in_type, true>{params, shared, item}.run();       \
    } else {                                                               \
      Quantize<head_dim, in_type, false>{params, shared, item}.run();      \
    }                                                                      \
  }
