// The mbarrier object: 8 bytes of shared memory, changed by threads, TMA and tcgen05 alike.
#pragma once

#include "memory.h"

namespace flash_attn_mx::emu {

constexpr int64_t kMbarMax = (1 << 20) - 1;
constexpr uint64_t kMbarPhaseBit = 1ull << 63;  // what waiters poll

struct Mbar {
  uint32_t pending = 0, expected = 0;
  int32_t tx = 0;
  bool phase = false, valid = false;
  static Mbar load(const uint8_t* p) {
    uint64_t v;
    std::memcpy(&v, p, 8);
    Mbar m;
    m.pending = v & kMbarMax;
    m.expected = v >> 20 & kMbarMax;
    m.tx = (int32_t)((int64_t)(v << 3) >> 43);  // bits 40..60, signed
    m.valid = v >> 62 & 1;
    m.phase = v >> 63;
    return m;
  }
  uint64_t word() const {
    return (uint64_t)phase << 63 | (uint64_t)valid << 62 |
           ((uint64_t)(uint32_t)tx & 0x1FFFFF) << 40 | (uint64_t)expected << 20 | pending;
  }
  void store(uint8_t* p) const {
    uint64_t v = word();
    std::memcpy(p, &v, 8);
  }
};

struct MbarChange {
  uint32_t arrive = 0, drop = 0;
  int64_t expect_tx = 0, complete_tx = 0;
};

// Applies one change to the barrier at `ref`, which learns what `from` knows; flips the phase when both counts are done. Throws
// Fault on misuse. Returns the barrier's word before the change (the state token).
uint64_t mbar_apply(Cluster& cl, const Ref& ref, const MbarChange& c, const Known* from = nullptr);

}  // namespace flash_attn_mx::emu
