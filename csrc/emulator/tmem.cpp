#include "tmem.h"

namespace flash_attn_mx::emu {

int Tmem::alloc(uint32_t n, int line) {
  uint32_t units = n / 32, bits = units == 32 ? ~0u : (1u << units) - 1;
  for (uint32_t u = 0; u + units <= kTmemCols / 32;
       u += units) {  // naturally aligned, lowest first
    if (used_ & (bits << u)) continue;
    used_ |= bits << u;
    blocks_.push_back({u * 32, n, line});
    words();
    for (uint32_t i = u * 32 * 4; i < (u * 32 + n) * 4; ++i) written_[i] = 0;
    return (int)u * 32;
  }
  return -1;
}

bool Tmem::dealloc(uint32_t start, uint32_t n) {
  for (size_t i = 0; i < blocks_.size(); ++i) {
    if (blocks_[i].start != start || blocks_[i].n != n) continue;
    for (uint32_t u = start / 32; u < (start + n) / 32; ++u) used_ &= ~(1u << u);
    blocks_.erase(blocks_.begin() + i);
    ++gen;
    return true;
  }
  return false;
}

bool Tmem::allocated(uint32_t c, uint32_t n) const {
  if (n == 0) return true;
  if (c + n > kTmemCols) return false;
  for (uint32_t u = c / 32; u <= (c + n - 1) / 32; ++u)
    if (!(used_ >> u & 1)) return false;
  return true;
}

std::string Tmem::leaks() const {
  std::string s;
  for (auto& b : blocks_)
    s += (s.empty() ? "" : ", ") +
         ("columns " + std::to_string(b.start) + ".." + std::to_string(b.start + b.n - 1)) +
         " (allocated at line " + std::to_string(b.line) + ")";
  return s;
}

}  // namespace flash_attn_mx::emu
