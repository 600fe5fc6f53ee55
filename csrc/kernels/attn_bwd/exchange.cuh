// The exchange role: one thread. dQ of the queries of slot t is made by CTA t and needs dS of all 256 keys: the other CTA
// sends its part, 128 keys x 128 queries and the scales by query, to where it lies in the first one's own view.
#pragma once

#include "attn_bwd/config.cuh"

namespace flash_attn_mx::bwd {

template <class C>
struct Exchange {
  const AttnBwdParams& p;
  const Work& work;
  uint32_t smem;
  uint32_t sent = 0, received = 0;

  FAMX_DEVICE void run() {
    if (!p.dq_acc) return;
    const int steps = work.steps();
    Step now = work.first();
    uint32_t buffer = 0;
    for (int j = 0; j < steps; ++j, now = work.next(now)) {
      if (const int slot = work.slot(now.tile); slot == work.rank) {
        receive(slot);
      } else {
        send(slot, buffer);
      }
      if (work.closes(now.tile)) buffer ^= 1;
    }
  }

  // out_full -> in_full of the other CTA. Its buffer is free: dP of this step, which came before dS, was committed after
  // the dQ that last read it. So is ds_out when the next dS comes: its dP is issued after `exchanged`.
  FAMX_DEVICE void send(int slot, uint32_t buffer) {
    ptx::mbarrier_wait(smem + C::kOutFull, sent++ & 1);
    const uint32_t there = ptx::of_cta(smem, slot);
    ptx::bulk_copy_to_cta(there + C::ds(buffer, work.rank), smem + C::kDsOut, C::kDsBytes,
                          there + C::kInFull);
    ptx::bulk_copy_to_cta(there + C::ds_scale(buffer, work.rank), smem + C::kDsScaleOut,
                          kScaleAtomBytes, there + C::kInFull);
  }

  // in_full -> exchanged[slot] of CTA 0
  FAMX_DEVICE void receive(int slot) {
    ptx::mbarrier_arrive_expect_tx(smem + C::kInFull, C::kDsBytes + kScaleAtomBytes);
    ptx::mbarrier_wait(smem + C::kInFull, received++ & 1);
    ptx::mbarrier_arrive_cluster(ptx::of_cta(barrier_at(smem + C::kExchanged, slot), 0));
  }
};

}  // namespace flash_attn_mx::bwd
