// tcgen05.mma and tcgen05.cp operands: descriptors decoded from their bits, tiles decoded once, one
// fused sum per element.
#pragma once

#include "scheduler.h"

namespace flash_attn_mx::emu {

struct SmemDesc {
  uint32_t start = 0, lbo = 0, sbo = 0, layout = 0;
  uint32_t span() const { return layout == 0 ? 16 : layout == 6 ? 32 : layout == 4 ? 64 : 128; }
  // Address in the CTA's shared memory of the 16-byte chunk at row r, byte c (K-major) or k, mn
  // byte b (MN-major).
  uint32_t k_major(uint32_t r, uint32_t c) const;
  uint32_t mn_major(uint32_t b, uint32_t k) const;
};
// Throws Fault("descriptor") on illegal bits.
SmemDesc decode_smem_desc(uint64_t d, const char* which);

enum class Kind : uint8_t { F16, TF32, F8, MXF8, MXF4 };  // F8, MXF8: f8f6f4; MXF4: mxf4nvf4, too

struct MmaOp {
  Kind kind = Kind::F16;
  uint32_t ctas = 1, m = 0, n = 0, k = 0;
  uint32_t a_type = 0, b_type = 0, d_type = 1;
  bool a_neg = false, b_neg = false, a_mn = false, b_mn = false;
  bool a_tmem = false, accumulate = false;
  uint32_t a_addr = 0, d_addr = 0;  // TMEM addresses
  SmemDesc a, b;
  uint32_t sfa = 0, sfb = 0, sfa_id = 0, sfb_id = 0;
  uint32_t scale_vec = 0;    // scales per row of A, 0: not block scaled
  bool nvf4 = false;         // mxf4nvf4: allows UE4M3 scales
  bool scale_e4m3 = false;   // else UE8M0
  uint32_t scale_shift = 0;  // D * 2^-shift
  uint32_t disable[8] = {};
  bool any_disabled = false;
  int line = 0;
  // Of a container: 4- and 6-bit elements of f8f6f4 take a byte each, 16 packed ones and padding.
  uint32_t elem_bytes() const { return kind == Kind::F16 ? 2 : kind == Kind::TF32 ? 4 : 1; }
};

// Fills shapes, types and majorness from the instruction descriptor; throws Fault("idesc").
void decode_idesc(uint32_t idesc, MmaOp* op);
// Every 16-byte chunk of shared memory that the operation reads in CTA `which` of its group.
void for_smem_chunks(const MmaOp& op, uint32_t which, const std::function<void(uint32_t off)>& f);
// cta[0..ctas): the group's CTAs in rank order.
void run_mma(const MmaOp& op, Cta* const* cta, const Options& opt);

}  // namespace flash_attn_mx::emu
