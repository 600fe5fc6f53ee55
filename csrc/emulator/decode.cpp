// RawKernel -> Program: operands become pointers into pools, opcodes become functions; nothing is
// looked up at run time.
#include <cstring>
#include <set>

#include "isa.h"

namespace flash_attn_mx::emu {

const ConstLanes kZeroLanes = {};

namespace {

class Compiler {
 public:
  Compiler(const RawKernel& raw, Program& p) : raw_(raw), p_(p) {}
  void run();

 private:
  void layout_shared();
  void collect(const RawOp& o, std::vector<Symbol*>& out, std::set<Symbol*>& seen);
  void find_loaded_registers();
  Operand operand(const RawOp& o, const RawInsn& in);
  Operand symbol(const RawOp& o);
  Operand constant(uint64_t v);
  Operand special(const std::string& name, int line);
  const Operand* pool(std::vector<Operand> v) {
    p_.pool.push_back(std::move(v));
    return p_.pool.back().data();
  }
  const char* name(const std::string& s) {
    p_.names.push_back(s);
    return p_.names.back().c_str();
  }
  int label(const RawInsn& in, const std::string& n) {
    for (int s = in.scope; s >= 0; s = raw_.scope_parent[s]) {
      auto it = raw_.labels[s].find(n);
      if (it != raw_.labels[s].end()) return it->second;
    }
    return -1;
  }

  const RawKernel& raw_;
  Program& p_;
  std::unordered_map<const Symbol*, uint32_t> shared_;
  std::unordered_map<std::string, Operand> special_index_;
};

void Compiler::collect(const RawOp& o, std::vector<Symbol*>& out, std::set<Symbol*>& seen) {
  if (o.kind == RawOp::Sym && o.sym->space == Space::Shared && seen.insert(o.sym).second)
    out.push_back(o.sym);
  for (auto& s : o.sub) collect(s, out, seen);
}

// Static variables first, in order of use, then the dynamic part that every unsized extern array
// names.
void Compiler::layout_shared() {
  std::vector<Symbol*> used;
  std::set<Symbol*> seen;
  for (auto& in : raw_.insns)
    for (auto& o : in.ops) collect(o, used, seen);
  uint64_t off = kSmemBase;
  for (auto* s : used) {
    if (s->size == 0) continue;
    off = (off + s->align - 1) / s->align * s->align;
    shared_[s] = (uint32_t)off;
    p_.static_map +=
        s->name + " at " + std::to_string(off) + ", " + std::to_string(s->size) + " bytes\n";
    off += s->size;
    if (off > (1u << 20))
      throw ParseError(raw_.line, "static shared memory of " + raw_.name + " exceeds 1 MiB");
  }
  uint32_t align = 16;
  for (auto* s : used)
    if (s->size == 0) align = std::max(align, s->align);
  off = (off + align - 1) / align * align;
  for (auto* s : used)
    if (s->size == 0) shared_[s] = (uint32_t)off;
  p_.static_smem = (uint32_t)(off - kSmemBase);
}

Operand Compiler::constant(uint64_t v) {
  Operand o;
  o.kind = Operand::Const;
  o.imm = (int64_t)v;
  auto& slot = p_.const_index[v];
  if (!slot) {
    p_.consts.emplace_back();
    auto& c = p_.consts.back();
    for (int i = 0; i < 32; ++i)
      c.u64[i] = v, c.u32[i] = (uint32_t)v, c.u16[i] = (uint16_t)v, c.u8[i] = (uint8_t)v;
    slot = &c;
  }
  o.c = slot;
  return o;
}

Operand Compiler::special(const std::string& n, int line) {
  static const std::unordered_map<std::string, int> kWidth = {{"%tid.x", 4},
                                                              {"%tid.y", 4},
                                                              {"%tid.z", 4},
                                                              {"%ntid.x", 4},
                                                              {"%ntid.y", 4},
                                                              {"%ntid.z", 4},
                                                              {"%ctaid.x", 4},
                                                              {"%ctaid.y", 4},
                                                              {"%ctaid.z", 4},
                                                              {"%nctaid.x", 4},
                                                              {"%nctaid.y", 4},
                                                              {"%nctaid.z", 4},
                                                              {"%laneid", 4},
                                                              {"%warpid", 4},
                                                              {"%nwarpid", 4},
                                                              {"%lanemask_eq", 4},
                                                              {"%lanemask_le", 4},
                                                              {"%lanemask_lt", 4},
                                                              {"%lanemask_ge", 4},
                                                              {"%lanemask_gt", 4},
                                                              {"%cluster_ctaid.x", 4},
                                                              {"%cluster_ctaid.y", 4},
                                                              {"%cluster_ctaid.z", 4},
                                                              {"%cluster_nctaid.x", 4},
                                                              {"%cluster_nctaid.y", 4},
                                                              {"%cluster_nctaid.z", 4},
                                                              {"%cluster_ctarank", 4},
                                                              {"%cluster_nctarank", 4},
                                                              {"%clusterid.x", 4},
                                                              {"%clusterid.y", 4},
                                                              {"%clusterid.z", 4},
                                                              {"%nclusterid.x", 4},
                                                              {"%nclusterid.y", 4},
                                                              {"%nclusterid.z", 4},
                                                              {"%smid", 4},
                                                              {"%nsmid", 4},
                                                              {"%gridid", 8},
                                                              {"%dynamic_smem_size", 4},
                                                              {"%total_smem_size", 4},
                                                              {"%clock", 4},
                                                              {"%clock_hi", 4},
                                                              {"%clock64", 8},
                                                              {"%globaltimer", 8},
                                                              {"%globaltimer_lo", 4},
                                                              {"%globaltimer_hi", 4},
                                                              {"%is_explicit_cluster", 0}};
  auto f = special_index_.find(n);
  if (f != special_index_.end()) return f->second;
  int width = 4;
  if (n[0] == '%') {
    auto it = kWidth.find(n);
    if (it == kWidth.end())
      throw ParseError(line, "undeclared register or unknown special register " + n);
    width = it->second;
  }
  Operand o;
  o.kind = Operand::Reg;
  o.width = (uint8_t)width;
  o.off = p_.reg_bytes;
  o.name = name(n);
  p_.reg_bytes += width ? 32 * width : 32;
  special_index_[n] = o;
  p_.specials.emplace_back(n, o);
  return o;
}

Operand Compiler::symbol(const RawOp& o) {
  Operand r;
  if (o.sym->space == Space::Shared) {  // the address holds the CTA's rank: a per-CTA register
    uint32_t off = shared_.at(o.sym) + (uint32_t)o.imm;
    r = special("shared+" + std::to_string(off), 0);
  } else {
    r = constant(o.sym->addr + o.imm);
  }
  r.space = o.sym->space;
  r.has_space = true;
  r.name = name(o.sym->name);
  return r;
}

Operand Compiler::operand(const RawOp& o, const RawInsn& in) {
  Operand r;
  auto subs = [&](Operand::Kind k) {
    std::vector<Operand> v;
    for (auto& s : o.sub) v.push_back(operand(s, in));
    r.kind = k;
    r.count = (uint16_t)v.size();
    r.sub = pool(std::move(v));
  };
  switch (o.kind) {
    case RawOp::Register:
      r.kind = Operand::Reg;
      r.width = raw_.regs[o.reg].width;
      r.off = raw_.regs[o.reg].off;
      r.name = raw_.regs[o.reg].name.c_str();
      break;
    case RawOp::Special:
      r = special(o.text, in.line);
      break;
    case RawOp::Int:
    case RawOp::F32:
    case RawOp::F64:
      r = constant((uint64_t)o.imm);
      break;
    case RawOp::Decimal: {
      uint64_t v = 0;
      float f = (float)o.dec;
      if (in.op.find(".f64") != std::string::npos)
        std::memcpy(&v, &o.dec, 8);
      else
        std::memcpy(&v, &f, 4);
      r = constant(v);
      break;
    }
    case RawOp::Sym:
      r = symbol(o);
      break;
    case RawOp::Label:
      if (o.text == "WARP_SZ") {
        r = constant(32);
      } else {
        r.kind = Operand::Label;
        r.imm = label(in, o.text);
        r.name = name(o.text);
        bool names_code = in.op.rfind("bra", 0) == 0 || in.op.rfind("call", 0) == 0;
        if (!names_code) throw ParseError(in.line, in.op + ": undeclared name " + o.text);
      }
      break;
    case RawOp::Vec:
      subs(Operand::Vec);
      break;
    case RawOp::Pair:
      subs(Operand::Pair);
      break;
    case RawOp::Mem:
      subs(Operand::Mem);
      r.imm = o.imm;
      if (o.sub[0].kind == RawOp::Int) r.imm = 0;  // the base constant holds it
      r.space = r.sub[0].space;
      r.has_space = r.sub[0].has_space;
      break;
    case RawOp::Sink:
      r.kind = Operand::Sink;
      break;
  }
  r.neg = o.neg;
  return r;
}

void Compiler::run() {
  p_.name = raw_.name;
  p_.params = raw_.params;
  p_.param_bytes = raw_.param_bytes;
  p_.reg_bytes = raw_.reg_bytes;
  p_.local_bytes = (raw_.local_bytes + 15) & ~15u;
  std::memcpy(p_.reqntid, raw_.reqntid, sizeof p_.reqntid);
  std::memcpy(p_.maxntid, raw_.maxntid, sizeof p_.maxntid);
  std::memcpy(p_.reqcluster, raw_.reqcluster, sizeof p_.reqcluster);
  p_.minnctapersm = raw_.minnctapersm;
  p_.maxnreg = raw_.maxnreg;
  layout_shared();
  std::unordered_map<std::string, int> forms;
  p_.code.resize(raw_.insns.size() + 1);
  for (size_t i = 0; i < raw_.insns.size(); ++i) {
    const RawInsn& ri = raw_.insns[i];
    auto f = forms.find(ri.op);
    if (f == forms.end()) f = forms.emplace(ri.op, find_form(ri.op)).first;
    if (f->second < 0) throw ParseError(ri.line, "unknown instruction form " + ri.op);
    Instr& in = p_.code[i];
    in.line = ri.line;
    in.form = (uint16_t)f->second;
    in.text = ri.op.c_str();
    if (ri.linked) in.flags |= kLinked;
    if (ri.guard >= 0)
      in.guarded = true, in.guard_neg = ri.guard_neg, in.guard_off = raw_.regs[ri.guard].off;
    std::vector<Operand> ops;
    for (auto& o : ri.ops) {
      ops.push_back(operand(o, ri));
      if (o.kind == RawOp::Special &&
          (o.text.rfind("%clock", 0) == 0 || o.text.rfind("%globaltimer", 0) == 0))
        in.flags |= kReadsClock;
    }
    if (ops.size() > 255) throw ParseError(ri.line, "too many operands");
    Decode d{{}, in, ops};
    for (size_t b = 0; b <= ri.op.size();) {
      size_t e = ri.op.find('.', b);
      if (e == std::string::npos) e = ri.op.size();
      d.mods.push_back(ri.op.substr(b, e - b));
      b = e + 1;
    }
    in.fn = isa_table()[f->second].decode(d);
    p_.uses_tmem |= ri.op.rfind("tcgen05", 0) == 0;
    in.nops = (uint8_t)ops.size();
    in.op = pool(std::move(ops));
  }
  // Falling off the end is an exit.
  Instr& end = p_.code.back();
  std::vector<Operand> none;
  Decode d{{"exit"}, end, none};
  end.text = "exit";
  end.line = raw_.insns.empty() ? raw_.line : raw_.insns.back().line;
  end.form = (uint16_t)find_form("exit");
  end.fn = exit_(d);
  find_loaded_registers();
}

void for_registers(const Operand& o, const std::function<void(uint32_t off)>& f) {
  if (o.kind == Operand::Reg) f(o.off);
  for (uint32_t i = 0; i < o.count; ++i) for_registers(o.sub[i], f);
}

// Which registers some tcgen05.ld writes, and which instructions name them (race.h).
void Compiler::find_loaded_registers() {
  std::unordered_map<uint32_t, uint32_t> slot;
  auto loads = [&](const Instr& in) { return std::strncmp(in.text, "tcgen05.ld.", 11) == 0; };
  for (auto& in : p_.code)
    if (loads(in))
      for_registers(in.op[0], [&](uint32_t off) { slot.emplace(off, (uint32_t)slot.size()); });
  if (slot.empty()) return;
  for (auto& in : p_.code) {
    std::vector<uint32_t> used;
    auto note = [&](uint32_t off) {
      auto it = slot.find(off);
      if (it != slot.end()) used.push_back(it->second);
    };
    if (loads(in)) in.flags |= kTmemLd;
    for (uint8_t i = 0; i < (loads(in) ? 1 : in.nops); ++i) for_registers(in.op[i], note);
    if (used.empty()) continue;
    in.ld_regs = (uint32_t)p_.ld_regs.size();
    p_.ld_regs.push_back(std::move(used));
  }
}

}  // namespace

std::unique_ptr<ModuleData> load_module(const std::string& text) {
  auto m = std::make_unique<ModuleData>();
  m->raw = parse_ptx(text);
  link_calls(*m->raw);
  for (auto& s : m->raw->syms) {
    if (s->space != Space::Global && s->space != Space::Const) continue;
    size_t n = std::max<uint64_t>(s->size, 1);
    auto mem = std::make_unique<uint8_t[]>(n + 256);
    uint64_t a = (reinterpret_cast<uint64_t>(mem.get()) + 255) & ~255ull;
    if (!s->init.empty())
      std::memcpy(reinterpret_cast<void*>(a), s->init.data(), std::min<size_t>(s->init.size(), n));
    s->addr = a;
    Buffer b;
    b.base = a;
    b.size = n;
    b.readonly = s->space == Space::Const;
    b.name = s->name;
    m->buffers.push_back(b);
    m->storage.push_back(std::move(mem));
  }
  return m;
}

std::unique_ptr<Program> compile_kernel(ModuleData& mod, const RawKernel& raw) {
  (void)mod;
  auto p = std::make_unique<Program>();
  Compiler(raw, *p).run();
  return p;
}

ExecFn ignored(Decode&) { return nullptr; }

}  // namespace flash_attn_mx::emu
