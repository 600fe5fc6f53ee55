// Barriers and the state that each side of one keeps. Phases are counted from 0; a fresh barrier is in phase 0.
#pragma once

#include "common/ptx.cuh"

namespace flash_attn_mx {

// Position in a ring of kStages buffers. The consumer waits for phase `parity` of full[stage]; the producer for the
// release of the buffer's previous use, phase `parity ^ 1` of empty[stage], which a fresh barrier passes at once.
template <int kStages>
struct RingState {
  uint32_t stage = 0;
  uint32_t parity = 0;

  FAMX_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Barriers lie one after another; 8 bytes each.
FAMX_DEVICE uint32_t barrier_at(uint32_t first, uint32_t index) { return first + 8 * index; }

}  // namespace flash_attn_mx
