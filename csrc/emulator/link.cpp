// Calls of functions of the same module. A function's code is laid behind the kernel's, once, with
// registers and local memory of its own: that is enough because recursion is refused. Each lane keeps
// its return address, so lanes of several call sites may be inside together.
#include <algorithm>
#include <set>

#include "ptx.h"

namespace flash_attn_mx::emu {
namespace {

constexpr size_t kMaxLinked = 1u << 21;        // instructions of all kernels with their functions
constexpr uint32_t kMaxLocalBytes = 1u << 24;  // of one kernel with its functions

bool is_call(const RawInsn& in) { return !in.linked && (in.op == "call" || in.op == "call.uni"); }

class Linker {
 public:
  Linker(const RawModule& m, RawKernel& k) : m_(m), k_(k) {}
  void run();

 private:
  struct Placed {
    uint32_t local = 0;  // offset of its frame
    int entry = 0, return_pc = 0;
  };
  // The function that an instruction calls; null for what the emulator itself provides.
  const RawKernel* callee(const RawInsn& in) const;
  bool calls_any(const RawKernel& k, std::vector<const RawKernel*>& path) const;
  const Placed& place(const RawKernel& f, int line);
  void move(RawOp& o, int regs, const std::unordered_map<const Symbol*, Symbol*>& syms) const;
  void resolve(size_t at);
  RawOp copies(const RawOp& args, const std::vector<RawParam>& params, uint32_t frame, bool in,
               int line, const std::string& name) const;
  RawOp new_reg(const std::string& name, uint8_t width);
  static RawOp number(int64_t v) {
    RawOp o;
    o.kind = RawOp::Int;
    o.imm = v;
    return o;
  }

  const RawModule& m_;
  RawKernel& k_;
  mutable std::set<const RawKernel*> seen_;  // functions whose calls are known to be fine
  std::unordered_map<const RawKernel*, Placed> placed_;
};

const RawKernel* Linker::callee(const RawInsn& in) const {
  const RawOp& name = in.ops[1];
  if (name.kind != RawOp::Label)
    throw ParseError(in.line, "call through a register or an address is not supported");
  if (name.text == "vprintf" || name.text == "__assertfail" || name.text == "__assert_fail")
    return nullptr;
  for (auto& k : m_.kernels)
    if (!k->is_entry && k->name == name.text) return k.get();
  throw ParseError(in.line, "call of " + name.text + ", which is no function of this module");
}

bool Linker::calls_any(const RawKernel& k, std::vector<const RawKernel*>& path) const {
  if (path.size() > 256) throw ParseError(k.line, "functions call each other more than 256 deep");
  path.push_back(&k);
  bool any = false;
  for (auto& in : k.insns) {
    if (!is_call(in)) continue;
    const RawKernel* f = callee(in);
    if (!f) continue;
    any = true;
    if (std::find(path.begin(), path.end(), f) != path.end())
      throw ParseError(in.line, "recursive call of " + f->name + " is not supported");
    if (!seen_.count(f)) calls_any(*f, path);
  }
  seen_.insert(&k);
  path.pop_back();
  return any;
}

RawOp Linker::new_reg(const std::string& name, uint8_t width) {
  Reg r;
  r.name = name;
  r.width = width;
  r.off = k_.reg_bytes;
  k_.reg_bytes += 32u * std::max<uint32_t>(width, 1);
  k_.regs.push_back(r);
  RawOp o;
  o.kind = RawOp::Register;
  o.reg = (int)k_.regs.size() - 1;
  return o;
}

void Linker::move(RawOp& o, int regs,
                  const std::unordered_map<const Symbol*, Symbol*>& syms) const {
  if (o.reg >= 0) o.reg += regs;
  auto s = syms.find(o.sym);
  if (s != syms.end()) o.sym = s->second;
  for (auto& sub : o.sub) move(sub, regs, syms);
}

const Linker::Placed& Linker::place(const RawKernel& f, int line) {
  auto it = placed_.find(&f);
  if (it != placed_.end()) return it->second;
  Placed p;
  p.local = (k_.local_bytes + 15) & ~15u;
  k_.local_bytes = p.local + f.local_bytes;
  if (k_.local_bytes > kMaxLocalBytes) throw ParseError(line, "too much local memory");
  std::unordered_map<const Symbol*, Symbol*> syms;
  for (auto& s : f.syms) {
    if (s->space != Space::Local) continue;
    k_.syms.push_back(std::make_unique<Symbol>(*s));
    k_.syms.back()->addr += p.local;
    syms[s.get()] = k_.syms.back().get();
  }
  const int regs = (int)k_.regs.size(), scopes = (int)k_.scope_parent.size();
  for (auto r : f.regs) {
    r.off += k_.reg_bytes;
    k_.regs.push_back(std::move(r));
  }
  k_.reg_bytes += f.reg_bytes;
  const RawOp back = new_reg("return address of " + f.name, 4);
  p.return_pc = back.reg;
  p.entry = (int)k_.insns.size();
  for (int s : f.scope_parent) k_.scope_parent.push_back(s < 0 ? s : s + scopes);
  for (auto& labels : f.labels) {
    k_.labels.push_back(labels);
    for (auto& l : k_.labels.back()) l.second += p.entry;
  }
  RawInsn ret;  // falling off the end returns
  ret.op = "ret", ret.line = f.insns.empty() ? f.line : f.insns.back().line, ret.scope = scopes;
  for (size_t i = 0; i <= f.insns.size(); ++i) {
    RawInsn in = i < f.insns.size() ? f.insns[i] : ret;
    if (i < f.insns.size()) in.scope += scopes;
    if (in.guard >= 0) in.guard += regs;
    for (auto& o : in.ops) move(o, regs, syms);
    if (in.op == "ret" || in.op == "ret.uni") {
      if (!in.ops.empty()) throw ParseError(in.line, "ret takes no operands");
      in.ops = {back};
      in.linked = true;
    }
    k_.insns.push_back(std::move(in));
  }
  return placed_[&f] = p;
}

// {from, to, bytes, …} between the caller's arguments and the function's parameters.
RawOp Linker::copies(const RawOp& args, const std::vector<RawParam>& params, uint32_t frame,
                     bool in, int line, const std::string& name) const {
  const char* what = in ? " arguments" : " results";
  if (args.sub.size() != params.size())
    throw ParseError(line, "call of " + name + " with " + std::to_string(args.sub.size()) + what +
                               ", it has " + std::to_string(params.size()));
  RawOp list;
  list.kind = RawOp::Vec;
  for (size_t i = 0; i < params.size(); ++i) {
    const RawOp& a = args.sub[i];
    const RawParam& p = params[i];
    if (p.is_reg || a.kind != RawOp::Sym || a.sym->space != Space::Local || a.imm)
      throw ParseError(line, "call of " + name + ":" + what + " must be .param variables");
    if (a.sym->size != p.size)
      throw ParseError(line, "call of " + name + ": " + a.sym->name + " has " +
                                 std::to_string(a.sym->size) + " bytes, " + p.name + " " +
                                 std::to_string(p.size));
    const int64_t outside = (int64_t)a.sym->addr, inside = frame + p.offset;
    list.sub.push_back(number(in ? outside : inside));
    list.sub.push_back(number(in ? inside : outside));
    list.sub.push_back(number(p.size));
  }
  return list;
}

void Linker::resolve(size_t at) {
  const RawKernel* f = callee(k_.insns[at]);
  if (!f) return;
  const int line = k_.insns[at].line;
  const Placed p = place(*f, line);  // may move insns
  RawInsn& in = k_.insns[at];
  RawOp entry = number(p.entry), back;
  back.kind = RawOp::Register, back.reg = p.return_pc;
  in.ops = {copies(in.ops[2], f->params, p.local, true, line, f->name),
            copies(in.ops[0], f->rets, p.local, false, line, f->name),
            new_reg("inside " + f->name, 0), back, entry};
  in.linked = true;
}

void Linker::run() {
  std::vector<const RawKernel*> path;
  if (!calls_any(k_, path)) return;
  RawInsn end;  // the kernel's code no longer ends where its instructions do
  end.op = "exit", end.line = k_.insns.back().line;
  k_.insns.push_back(end);
  for (size_t i = 0; i < k_.insns.size(); ++i)
    if (is_call(k_.insns[i])) resolve(i);
}

}  // namespace

void link_calls(RawModule& m) {
  size_t all = 0;
  for (auto& k : m.kernels) {
    if (!k->is_entry) continue;
    Linker(m, *k).run();
    all += k->insns.size();
    if (all > kMaxLinked)
      throw ParseError(k->line, "kernels and the functions that they call have more than " +
                                    std::to_string(kMaxLinked) + " instructions");
  }
}

}  // namespace flash_attn_mx::emu
