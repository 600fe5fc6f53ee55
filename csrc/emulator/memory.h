// Address spaces: bounds, alignment, written-byte and proxy tracking. Every access of every path
// comes through here.
#pragma once

#include "isa.h"

namespace flash_attn_mx::emu {

// Where an address landed. For shared memory `cta` owns it and `off` is its offset there.
struct Ref {
  uint8_t* p = nullptr;
  Cta* cta = nullptr;
  uint32_t off = 0;
};

enum class Access : uint8_t { Read, Write, Atomic };

std::string hex(uint64_t v);
Space space_of(const Decode& d);  // from the opcode's modifiers; Generic when there is none

// One lane's access of `bytes` at `addr`. Throws Fault for out-of-bounds, misaligned or
// never-written.
Ref resolve(Exec& x, Space space, uint64_t addr, uint32_t bytes, Access a, int lane,
            uint32_t align = 0);

// Global memory for async agents (no warp context).
uint8_t* global_at(Machine& m, uint64_t addr, uint64_t bytes, bool write);
void global_check_written(Machine& m, uint64_t addr, uint64_t bytes);

// A shared address (own rank included) to its CTA; throws if the rank or offset does not exist.
Ref shared_ref(Cluster& cl, uint32_t addr, uint32_t bytes, const char* what);

// Written-byte bitmap of shared memory.
void mark_written(Cta& c, uint32_t off, uint32_t bytes);
void check_written(const Cta& c, uint32_t off, uint32_t bytes, const char* what);

// What TMA store, MMA and cp read: written, ordered and fenced?
void check_async_read(Exec& x, Agent agent, Cta& c, uint32_t off, uint32_t bytes, const char* what);
// Faults if an async operation that nobody waited for still reads these bytes.
void check_no_pending_read(Cluster& cl, const Cta& c, uint32_t off, uint32_t bytes,
                           const char* what);

// Base addresses of a Mem operand: 32 lanes, displacement added.
void addresses(const Exec& x, const Operand& mem, uint64_t* out);
uint64_t address_of(const Exec& x, const Operand& mem, int lane);
// A shared-space operand of any width (generic addresses truncate to the shared address).
uint32_t shared_addr(const Exec& x, const Operand& mem, int lane);

}  // namespace flash_attn_mx::emu
