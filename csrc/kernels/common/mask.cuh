// Which keys a row sees, and which key tiles a query tile visits (docs/numerics.md section 2 and 3;
// flash_attn_mx/portable.py, key_spans, is the same in Python).
#pragma once

#include "common/ptx.cuh"

namespace flash_attn_mx {

constexpr int kTile =
    128;  // rows of a query tile and keys of a key tile; part of the numerics contract

// Row i sees the keys of [first(i), end(i)). A negative side is unlimited.
struct Window {
  int left, right;
  int offset;  // seqlen_k - seqlen_q: aligned bottom-right
  int seqlen_k;

  FAMX_DEVICE int first(int row) const { return left < 0 ? 0 : max(0, row + offset - left); }
  FAMX_DEVICE int end(int row) const {
    return right < 0 ? seqlen_k : max(0, min(seqlen_k, row + offset + right + 1));
  }
};

// The key tiles [first, end) of one query tile, visited last to first. Those in [full_first, full_end) are full:
// every row sees every key that exists. The others are cut.
struct TileRange {
  int first, end;
  int full_first, full_end;

  FAMX_DEVICE bool empty() const { return end == 0; }
  FAMX_DEVICE bool active(int tile) const { return first <= tile && tile < end; }
  FAMX_DEVICE bool full(int tile) const { return full_first <= tile && tile < full_end; }
  FAMX_DEVICE bool cut(int tile) const { return active(tile) && !full(tile); }

  // The first of the tiles up to this one that are of the same kind (full, cut, or neither).
  FAMX_DEVICE int run_first(int tile) const {
    return tile >= end          ? end
           : tile >= full_end   ? max(full_end, first)
           : tile >= full_first ? full_first
           : tile >= first      ? first
                                : 0;
  }

  // Rows [row, row_end) of the sequence, row_end > row.
  static FAMX_DEVICE TileRange of(const Window& window, int row, int row_end) {
    int first_key = window.first(row), end_key = window.end(row_end - 1);
    if (row >= row_end || first_key >= end_key) return {0, 0, 0, 0};
    TileRange r;
    r.first = first_key / kTile;
    r.end = (end_key + kTile - 1) / kTile;
    int right_limit = window.end(row);
    r.full_end = right_limit == window.seqlen_k ? r.end : right_limit / kTile;
    r.full_first = (window.first(row_end - 1) + kTile - 1) / kTile;
    r.full_first = min(max(r.full_first, r.first), r.end);
    r.full_end = max(r.full_end, r.full_first);
    return r;
  }
};

// The same seen from the keys: key k is seen by the queries of [first_query(k), end_query(k)).
struct QueryWindow {
  Window window;
  int seqlen_q;

  FAMX_DEVICE int first_query(int key) const {
    return window.right < 0 ? 0 : max(0, key - window.offset - window.right);
  }
  FAMX_DEVICE int end_query(int key) const {
    if (key >= window.seqlen_k) return 0;
    return window.left < 0 ? seqlen_q
                           : max(0, min(seqlen_q, key - window.offset + window.left + 1));
  }

  // Query tiles in which a row sees a key of the tile: those whose TileRange is active there. They are neighbours.
  FAMX_DEVICE int first_tile(int key_tile) const {
    const int first = first_query(key_tile * kTile);
    return first >= seqlen_q ? tiles() : first / kTile;
  }
  FAMX_DEVICE int end_tile(int key_tile) const {
    const int key = min((key_tile + 1) * kTile, window.seqlen_k) - 1;
    return key < key_tile * kTile ? 0 : (end_query(key) + kTile - 1) / kTile;
  }
  FAMX_DEVICE int tiles() const { return (seqlen_q + kTile - 1) / kTile; }

  // Query tiles [full_first_tile, full_end_tile): every pair exists and is visible.
  FAMX_DEVICE int full_first_tile(int key_tile) const {
    return (first_query((key_tile + 1) * kTile - 1) + kTile - 1) / kTile;
  }
  FAMX_DEVICE int full_end_tile(int key_tile) const {
    return (key_tile + 1) * kTile <= window.seqlen_k ? end_query(key_tile * kTile) / kTile : 0;
  }
};

}  // namespace flash_attn_mx
