// Tensor memory of one CTA: 128 lanes x 512 columns x 32 bit, its allocator and its checks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace flash_attn_mx::emu {

constexpr uint32_t kTmemCols = 512, kTmemLanes = 128;
// CuTe keeps a sub-word element index in the top bits of an address; only these bits name a lane
// and a column.
constexpr uint32_t kTmemAddrMask = 0x007F01FFu;

class Tmem {
 public:
  // Column-major, so that a warp's 32 lanes of a column, and an accumulator's rows, are contiguous.
  // Allocated at first use.
  uint32_t* col(uint32_t c) { return &words()[c * kTmemLanes]; }
  uint32_t* written(uint32_t c) { return &written_[c * 4]; }  // bit per lane
  uint64_t gen = 0;  // changes whenever columns are freed: blocked allocations poll it

  // First column of n free columns (n a power of two >= 32), or -1.
  int alloc(uint32_t n, int line);
  // False if [start, start+n) is not exactly one allocation.
  bool dealloc(uint32_t start, uint32_t n);
  bool allocated(uint32_t c, uint32_t n) const;
  std::string leaks() const;  // empty if everything was freed
  bool relinquished = false;
  enum Step : uint8_t { Alloc, Dealloc, Relinquish };
  uint64_t steps[3] = {};  // with cta_group::2: how often a warp of this CTA has come to each
  uint32_t last_alloc = kTmemCols;

 private:
  std::vector<uint32_t>& words() {
    if (data_.empty()) data_.resize(kTmemCols * kTmemLanes), written_.resize(kTmemCols * 4);
    return data_;
  }
  struct Block {
    uint32_t start, n;
    int line;
  };
  std::vector<uint32_t> data_, written_;
  std::vector<Block> blocks_;
  uint32_t used_ = 0;  // bit per 32 columns
};

}  // namespace flash_attn_mx::emu
