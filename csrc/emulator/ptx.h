// PTX text as data: what the parser produces and the decoder consumes. No execution state here.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace flash_attn_mx::emu {

// Any fault in PTX text: unknown form, bad syntax, undeclared name. `line` is 1-based in the text
// that was given.
struct ParseError : std::runtime_error {
  ParseError(int line, const std::string& what)
      : std::runtime_error("PTX line " + std::to_string(line) + ": " + what), line(line) {}
  int line;
};

enum class Space : uint8_t { Generic, Global, Shared, SharedCluster, Local, Param, Const };

struct Reg {
  std::string name;
  uint8_t width = 0;  // bytes per lane; 0 = predicate (one bit per lane)
  uint32_t off = 0;   // byte offset in a warp's register file
};

struct Symbol {
  std::string name;
  Space space = Space::Global;
  uint64_t size = 0;  // 0: unsized extern array
  uint32_t align = 1;
  uint64_t addr = 0;          // offset in its space once laid out; absolute for Global and Const
  std::vector<uint8_t> init;  // module-scope initialiser
  bool is_extern = false;
};

// One operand as written. Registers and symbols are resolved while parsing, because names are
// scoped.
struct RawOp {
  enum Kind : uint8_t {
    Register,
    Special,
    Int,
    F32,
    F64,
    Decimal,
    Sym,
    Label,
    Vec,
    Mem,
    Pair,
    Sink
  } kind = Sink;
  bool neg = false;  // '!' in front of a predicate
  int reg = -1;      // index into RawKernel::regs
  int64_t imm = 0;   // value, float bits, or the +offset of an address
  double dec = 0;    // Decimal
  std::string text;  // name of Special, Label
  Symbol* sym = nullptr;
  std::vector<RawOp>
      sub;  // Vec elements; Mem: base, then further bracketed operands; Pair: both halves
};

struct RawInsn {
  std::string op;
  int line = 0;
  int scope = 0;
  int guard = -1;  // predicate register, -1 = none
  bool guard_neg = false;
  bool linked = false;  // operands are the linker's (link.cpp)
  std::vector<RawOp> ops;
};

struct RawParam {
  std::string name;
  uint32_t size = 0, align = 1;
  uint32_t offset = 0;  // in the parameter block; of a function: in its local memory
  bool is_reg = false;
  std::string type;
};

struct RawKernel {
  std::string name;
  int line = 0;
  bool is_entry = true;
  std::vector<RawParam> params, rets;  // rets: of a function
  uint32_t param_bytes = 0;
  std::vector<Reg> regs;
  uint32_t reg_bytes = 0;
  uint32_t local_bytes = 0;                   // .local variables and call-site .param space
  std::vector<std::unique_ptr<Symbol>> syms;  // function scope: params, locals, static shared
  std::vector<RawInsn> insns;
  std::vector<int> scope_parent;
  std::vector<std::unordered_map<std::string, int>> labels;  // per scope: name -> instruction index
  int reqntid[3] = {0, 0, 0}, maxntid[3] = {0, 0, 0}, reqcluster[3] = {0, 0, 0};
  int minnctapersm = 0, maxnreg = 0;
};

struct RawModule {
  std::string version, target;
  std::vector<std::unique_ptr<Symbol>> syms;  // module scope
  std::vector<std::unique_ptr<RawKernel>> kernels;
};

// Throws ParseError. The text need not be NUL-free or valid; nothing else is thrown for malformed
// input.
std::unique_ptr<RawModule> parse_ptx(const std::string& text);

// Gives every entry the code of the functions that it calls. Throws ParseError at a call that cannot
// be run: of an unknown function, through a register, recursive, or with other arguments.
void link_calls(RawModule& m);

}  // namespace flash_attn_mx::emu
