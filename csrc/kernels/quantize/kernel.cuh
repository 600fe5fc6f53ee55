// quantize: x -> MXFP8 payloads and scale bytes along up to three axes, from one read (docs/numerics.md §1).
//
// FLOW   x -LDG-> registers (32 tokens per warp) -> largest magnitudes as integers: by shuffle along the channels, by
//        register along the tokens -> scale bytes -> payloads -STG-> GMEM; scale atoms through SMEM
// ROLES  4 warps, all the same: warp w has tokens [32 w, 32 w + 32) of a tile of 128. kLanes lanes share a token, four
//        neighbouring channels each; head_dim beyond kTileDim takes further passes.   GRID  (tile, head), one item a CTA
// SMEM   rowAtom, colAtom: 512 bytes each
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

template <class T>
struct alignas(4 * sizeof(T)) Four {
  T element[4];
};

// fp32 bits of a magnitude; NaN is the largest.
FAMX_DEVICE uint32_t magnitude(float x) { return __float_as_uint(x) & kMagnitude; }

template <int kLanes>
FAMX_DEVICE uint32_t max_over_lanes(uint32_t x, int first_step = 1) {
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2)
    if (step >= first_step) x = max(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
  return x;
}

// Which tokens a CTA has.
struct Item {
  int head, batch, tile;  // batch: sequence, or the number of sequences for the tokens behind them
  int64_t token;          // first one of the tile, counted through all batches
  int tokens;             // of the sequence from there on, at most kTile; <= 0: nothing to do
  int64_t atom;           // of this tile and head; -1: none
  int64_t scale_row;      // first row of the plain colwise scale; -1: none

  FAMX_DEVICE explicit Item(const QuantizeParams& p) {
    const int item = blockIdx.x;
    head = item % p.heads;
    const int slot = item / p.heads;
    if (!p.cu_seqlens) {
      batch = slot / p.tiles, tile = slot % p.tiles;
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
    tile = slot - (start / kTile + batch);
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

template <int kTileDim, class In>
struct Quantize {
  static constexpr int kLanes = kTileDim / 4;
  static constexpr int kTogether = 32 / kLanes;     // tokens that a warp loads at once
  static constexpr int kRows = kBlock / kTogether;  // tokens of a thread
  static constexpr int kBlockLanes = kBlock / 4;    // lanes that share a rowwise block
  const QuantizeParams& p;
  uint8_t (&sAtoms)[2][512];  // rowwise, colwise
  const Item item;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  FAMX_DEVICE void run() {
    if (item.tokens <= 0) return;
    if (p.atoms) clear_atoms();
    for (int first = 0; first < p.head_dim; first += kTileDim) pass(first + 4 * (lane % kLanes));
    if (p.atoms && item.atom >= 0) store_atoms();
  }

  // The token of this warp's 32 that this thread has in its row r.
  FAMX_DEVICE int token_of(int r) const { return warp * kBlock + r * kTogether + lane / kLanes; }

  // Four channels of every token of the warp.
  FAMX_DEVICE void pass(int channel) {
    Four<In> x[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) x[r] = load(token_of(r), channel);
    uint32_t column[4] = {0, 0, 0, 0};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t m = magnitude(float(x[r].element[i]));
        column[i] = max(column[i], m), largest = max(largest, m);
      }
      if (p.row || p.tok) rows(x[r], token_of(r), channel, largest);
    }
    if (p.col) columns(x, channel, column);
  }

  // Rowwise and tokenwise outputs of one token. Every lane takes part in the shuffles.
  FAMX_DEVICE void rows(const Four<In>& x, int token, int channel, uint32_t largest) {
    const bool exists = token < item.tokens && channel < p.head_dim;
    largest = max_over_lanes<kBlockLanes>(largest);
    if (p.row) {
      const uint32_t byte = scale_byte(largest);
      const uint32_t factor = payload_factor(byte);
      if (exists)
        store(p.row, token, channel,
              byte == 255 ? kNanPayload : payload(x, factor, factor, factor, factor));
      if (channel % kBlock == 0) {
        if (p.atoms) {
          if (channel < kTile) sAtoms[0][scale_word_offset(token) + channel / kBlock] = byte;
        } else if (exists) {
          const int per_row = (p.head_dim + kBlock - 1) / kBlock;
          p.row_scale[row_of(token) * per_row + channel / kBlock] = byte;
        }
      }
    }
    if (p.tok) {
      largest = max_over_lanes<kLanes>(largest, kBlockLanes);
      if (p.head_dim > kTileDim) largest = max_of_token(token);
      const uint32_t byte = scale_byte(largest);
      const uint32_t factor = payload_factor(byte);
      if (exists)
        store(p.tok, token, channel, byte == 255 ? 0 : payload(x, factor, factor, factor, factor));
      if (exists && channel == 0) p.tok_scale[row_of(token)] = byte;
    }
  }

  FAMX_DEVICE void columns(const Four<In> (&x)[kRows], int channel, uint32_t (&largest)[4]) {
    uint32_t byte[4], factor[4], poison = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int step = kLanes; step < 32; step *= 2)  // lanes with the same channels
        largest[i] = max(largest[i], __shfl_xor_sync(0xFFFFFFFFu, largest[i], step));
      byte[i] = scale_byte(largest[i]);
      factor[i] = payload_factor(byte[i]);
      if (byte[i] == 255) poison |= 0xFFu << (8 * i);
    }
    const bool behind = item.scale_row < 0;  // these tokens belong to no sequence
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (token_of(r) >= item.tokens || channel >= p.head_dim) continue;
      const uint32_t word = payload(x[r], factor[0], factor[1], factor[2], factor[3]);
      store(p.col, token_of(r), channel, behind ? 0 : (word & ~poison) | (kNanPayload & poison));
    }
    if (lane >= kLanes) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (p.atoms) {
        if (channel + i < kTile) sAtoms[1][scale_word_offset(channel + i) + warp] = byte[i];
      } else if (channel + i < p.head_dim && warp * kBlock < item.tokens && !behind) {
        const int64_t row = (item.scale_row + warp) * p.heads + item.head;
        p.col_scale[row * p.head_dim + channel + i] = byte[i];
      }
    }
  }

  // Scales of channels and blocks that do not exist: 2^0.
  FAMX_DEVICE void clear_atoms() {
    auto* words = reinterpret_cast<uint32_t*>(sAtoms);
    words[threadIdx.x] = words[128 + threadIdx.x] = kScaleOnes;
    __syncthreads();
  }

  FAMX_DEVICE void store_atoms() {
    __syncthreads();
    const auto* words = reinterpret_cast<const uint32_t*>(sAtoms);
    const int64_t at = item.atom * 128 + threadIdx.x;
    if (p.row) reinterpret_cast<uint32_t*>(p.row_scale)[at] = words[threadIdx.x];
    if (p.col) reinterpret_cast<uint32_t*>(p.col_scale)[at] = words[128 + threadIdx.x];
  }

  // --- one token --------------------------------------------------------------------------------

  FAMX_DEVICE int64_t row_of(int token) const { return (item.token + token) * p.heads + item.head; }

  FAMX_DEVICE const In* address(int token) const {
    const int64_t t = item.token + token;
    const int64_t batch = p.cu_seqlens ? 0 : item.batch;
    return static_cast<const In*>(p.x) + batch * p.x_stride_batch +
           (t - batch * p.tokens) * p.x_stride_token + item.head * p.x_stride_head;
  }

  // Zeros where there is nothing.
  FAMX_DEVICE Four<In> load(int token, int channel) const {
    Four<In> v = {};
    if (token >= item.tokens) return v;
    const In* from = address(token) + channel;
    if (p.x_vector && channel + 4 <= p.head_dim) return *reinterpret_cast<const Four<In>*>(from);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (channel + i < p.head_dim) v.element[i] = from[i];
    return v;
  }

  FAMX_DEVICE void store(uint8_t* data, int token, int channel, uint32_t word) const {
    uint8_t* to = data + row_of(token) * p.head_dim + channel;
    if (p.head_dim % 4 == 0) {
      *reinterpret_cast<uint32_t*>(to) = word;
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (channel + i < p.head_dim) to[i] = word >> (8 * i);
  }

  // Over all passes; what other passes loaded comes from the L1 cache.
  FAMX_DEVICE uint32_t max_of_token(int token) const {
    uint32_t largest = 0;
    for (int channel = 4 * (lane % kLanes); channel < p.head_dim; channel += kTileDim) {
      const Four<In> x = load(token, channel);
#pragma unroll
      for (int i = 0; i < 4; ++i) largest = max(largest, magnitude(float(x.element[i])));
    }
    return max_over_lanes<kLanes>(largest);
  }

  // --- rounding ---------------------------------------------------------------------------------

  FAMX_DEVICE uint32_t scale_byte(uint32_t amax) const {
    const int exponent = amax >> 23;
    const int above = p.round_up && (amax & 0x7FFFFFu) > 0x600000u;
    int byte = max(exponent - (p.e5m2 ? 15 : 8) + above, 0);
    byte = amax == 0 ? 127 : byte;
    return exponent == 255 ? 255 : byte;
  }

  // Bits of 2^(127 - byte); a finite block has a byte <= 247.
  static FAMX_DEVICE uint32_t payload_factor(uint32_t byte) { return (254u - byte) << 23; }

  FAMX_DEVICE uint32_t payload(const Four<In>& x, uint32_t f0, uint32_t f1, uint32_t f2,
                               uint32_t f3) const {
    const float y0 = float(x.element[0]) * __uint_as_float(f0);
    const float y1 = float(x.element[1]) * __uint_as_float(f1);
    const float y2 = float(x.element[2]) * __uint_as_float(f2);
    const float y3 = float(x.element[3]) * __uint_as_float(f3);
    return p.e5m2 ? ptx::pack_e5m2(y0, y1, y2, y3) : ptx::pack_e4m3(y0, y1, y2, y3);
  }
};

}  // namespace flash_attn_mx::quantize

#define FAMX_DEFINE_KERNEL(name, head_dim, in_type)                                     \
  extern "C" __global__ void __launch_bounds__(flash_attn_mx::quantize::kLaunchThreads) \
      name(const __grid_constant__ flash_attn_mx::QuantizeParams params) {              \
    using namespace flash_attn_mx::quantize;                                            \
    __shared__ alignas(4) uint8_t sAtoms[2][512];                                       \
    Quantize<head_dim, in_type>{params, sAtoms, Item(params)}.run();                    \
  }
