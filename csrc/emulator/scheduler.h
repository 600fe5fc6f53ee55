// Runs clusters: which warp goes next, when asynchronous work happens, when nothing can happen any
// more.
#pragma once

#include "async.h"

namespace flash_attn_mx::emu {

std::string where(const Exec& x);  // "line N opcode (CTA c warp w)"

struct RunResult {
  std::string error;                 // empty = ran to completion
  std::vector<uint64_t> executed;    // per instruction of the program
  std::vector<uint64_t> warp_insns;  // of cluster 0: per CTA and warp
  std::vector<std::string> output;
  uint64_t output_bytes = 0, output_dropped = 0;
  std::vector<TraceEvent> trace;
  uint64_t trace_dropped = 0;
  uint64_t insns = 0, mma = 0, mma_flop = 0, tma_load = 0, tma_store = 0, global_ld = 0,
           global_st = 0, waits = 0;
};

// Bytes that one cluster takes: shared, tensor and local memory, registers, and what shadows them.
uint64_t cluster_bytes(const Program& p, const Options& o);
RunResult run_machine(Machine& m);

}  // namespace flash_attn_mx::emu
