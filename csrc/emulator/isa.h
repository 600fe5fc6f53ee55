// The table of instruction forms (isa.def) and what a row's decoder sees.
#pragma once

#include <string>
#include <vector>

#include "state.h"

namespace flash_attn_mx::emu {

enum class Ty : uint8_t {
  None,
  Pred,
  B8,
  B16,
  B32,
  B64,
  B128,
  U8,
  U16,
  U32,
  U64,
  S8,
  S16,
  S32,
  S64,
  F16,
  F16x2,
  BF16,
  BF16x2,
  F32,
  F32x2,
  F64,
  TF32,
  E4M3x2,
  E5M2x2,
  E4M3x4,
  E5M2x4,
  UE8M0x2
};
Ty parse_type(const std::string& s);
inline bool is_signed(Ty t) { return t >= Ty::S8 && t <= Ty::S64; }
inline bool is_float(Ty t) { return t >= Ty::F16 && t <= Ty::TF32; }
unsigned type_bytes(Ty t);

struct Decode;
using DecodeFn = ExecFn (*)(Decode&);  // nullptr: accepted and ignored

enum class Evidence : uint8_t { HW_SM90, SPEC, CUTLASS, PEERS };

struct Form {
  const char* pattern;
  const char* handler;
  DecodeFn decode;
  const char* section;
  Evidence evidence;
  const char* test;
};

const std::vector<Form>& isa_table();
// True if `op` is spelled as the pattern allows. `{.a|.b}` is an optional choice, `(.a|.b)` a
// mandatory one.
bool match_pattern(const char* pattern, const std::string& op);
int find_form(const std::string& op);  // index, or -1

// What a decoder gets: the opcode's parts and the resolved operands. It checks them and returns the
// function to run.
struct Decode {
  std::vector<std::string> mods;  // split at '.', "::" kept
  Instr& in;
  std::vector<Operand>& ops;
  bool has(const char* m) const {
    for (auto& s : mods)
      if (s == m) return true;
    return false;
  }
  bool has_prefix(const char* m) const {
    for (auto& s : mods)
      if (s.rfind(m, 0) == 0) return true;
    return false;
  }
  Ty type(size_t from_end = 0) const {
    return from_end < mods.size() ? parse_type(mods[mods.size() - 1 - from_end]) : Ty::None;
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw ParseError(in.line, std::string(in.text) + ": " + what);
  }
  void want(size_t lo, size_t hi) const {
    if (ops.size() < lo || ops.size() > hi)
      fail("takes " + std::to_string(lo) + (lo == hi ? "" : ".." + std::to_string(hi)) +
           " operands, got " + std::to_string(ops.size()));
  }
  void value(size_t i) const {  // register or constant
    if (i >= ops.size() || (ops[i].kind != Operand::Reg && ops[i].kind != Operand::Const))
      fail("operand " + std::to_string(i + 1) + " must be a register or a constant");
  }
  void values(size_t from, size_t to) const {
    for (size_t i = from; i < to; ++i) data(i);
  }
  void data(size_t i) const {  // value that is not a predicate
    value(i);
    if (ops[i].kind == Operand::Reg && ops[i].width == 0)
      fail("operand " + std::to_string(i + 1) + " must not be a predicate");
  }
  void dst(size_t i) const {
    if (i >= ops.size() ||
        (ops[i].kind != Operand::Sink && !(ops[i].kind == Operand::Reg && ops[i].width)))
      fail("operand " + std::to_string(i + 1) + " must be a data register");
  }
  void pred_op(size_t i) const {
    if (i >= ops.size() || !(ops[i].kind == Operand::Const || ops[i].kind == Operand::Sink ||
                             (ops[i].kind == Operand::Reg && ops[i].width == 0)))
      fail("operand " + std::to_string(i + 1) + " must be a predicate");
  }
  void mem(size_t i, size_t subs = 1) const {
    if (i >= ops.size() || ops[i].kind != Operand::Mem || ops[i].count < subs)
      fail("operand " + std::to_string(i + 1) + " must be an address");
    base(ops[i].sub[0]);
  }
  void base(const Operand& b) const {
    if (!(b.kind == Operand::Const || (b.kind == Operand::Reg && b.width >= 4)))
      fail("address base must be a 32- or 64-bit register or a symbol");
  }
  const Operand* vec(size_t i, size_t lo, size_t hi) const {
    if (i >= ops.size() || ops[i].kind != Operand::Vec || ops[i].count < lo || ops[i].count > hi)
      fail("operand " + std::to_string(i + 1) + " must be a vector of " + std::to_string(lo) +
           (lo == hi ? "" : ".." + std::to_string(hi)));
    for (size_t j = 0; j < ops[i].count; ++j)
      if (ops[i].sub[j].kind != Operand::Reg && ops[i].sub[j].kind != Operand::Const &&
          ops[i].sub[j].kind != Operand::Sink)
        fail("vector elements must be registers or constants");
    for (size_t j = 0; j < ops[i].count; ++j)
      if (ops[i].sub[j].kind == Operand::Reg && !ops[i].sub[j].width)
        fail("vector elements must not be predicates");
    return ops[i].sub;
  }
};

// One compiled kernel: decoded instructions and the pools that its operands point into.
struct Program {
  std::string name;
  std::vector<RawParam> params;
  uint32_t param_bytes = 0, reg_bytes = 0, local_bytes = 0, static_smem = 0, dyn_align = 16;
  int reqntid[3] = {0, 0, 0}, maxntid[3] = {0, 0, 0}, reqcluster[3] = {0, 0, 0};
  int minnctapersm = 0, maxnreg = 0;
  std::vector<Instr> code;
  // By Instr::ld_regs: slots of registers that some tcgen05.ld writes. [0] is empty.
  std::vector<std::vector<uint32_t>> ld_regs{{}};
  std::deque<std::vector<Operand>> pool;
  std::deque<ConstLanes> consts;
  std::unordered_map<uint64_t, const ConstLanes*> const_index;
  std::deque<std::string> names;
  std::vector<std::pair<std::string, Operand>>
      specials;  // %tid.x … -> register slot, filled when a warp starts
  bool uses_tmem = false;
  std::string static_map;  // shared symbols and offsets, for inspect
};

// Returns F(T) for the C++ type of an integer form's type; fails at load for any other. Wants `Decode& d` in scope.
#define PICK_INT(t, F)            \
  switch (t) {                    \
    case Ty::U16:                 \
    case Ty::B16:                 \
      return F(uint16_t);         \
    case Ty::S16:                 \
      return F(int16_t);          \
    case Ty::U32:                 \
    case Ty::B32:                 \
      return F(uint32_t);         \
    case Ty::S32:                 \
      return F(int32_t);          \
    case Ty::U64:                 \
    case Ty::B64:                 \
      return F(uint64_t);         \
    case Ty::S64:                 \
      return F(int64_t);          \
    default:                      \
      d.fail("unsupported type"); \
  }

// setp: shared by the integer and float forms (ops_alu.cpp).
void put_setp(Exec& x, const Instr& in, uint32_t p, uint32_t q, uint32_t mask);
void decode_setp(Decode& d);

struct ModuleData {  // owns module-scope variables
  std::unique_ptr<RawModule> raw;
  std::vector<std::unique_ptr<uint8_t[]>> storage;
  std::vector<Buffer> buffers;
};

std::unique_ptr<ModuleData> load_module(const std::string& text);
std::unique_ptr<Program> compile_kernel(ModuleData& mod, const RawKernel& raw);

#define INSN(pattern, handler, section, evidence, test) ExecFn handler(Decode&);
#include "isa.def"
#undef INSN

}  // namespace flash_attn_mx::emu
