// PTX text -> RawModule. Scopes matter: inline asm opens `{ ... }` blocks that redeclare registers
// and labels.
#include <cctype>
#include <cstring>

#include "ptx.h"
#include "scanner.h"

namespace flash_attn_mx::emu {
namespace {

// Limits on one module, some ten times what the largest kernel we know needs: text that exceeds one
// is an error with a line, and never takes the machine's memory.
constexpr int kMaxDepth = 64;                  // nesting of scopes and initialisers
constexpr uint64_t kMaxBytes = 256u << 20;     // all module-scope variables together
constexpr int kMaxRegs = 1 << 20;              // of one function
constexpr int kMaxScopes = 1 << 18;            // of one function
constexpr size_t kMaxInsns = 1u << 20;         // of the module
constexpr size_t kMaxOperands = 1u << 21;      // of the module
constexpr uint64_t kMaxLocalBytes = 1u << 24;  // .local and call arguments of one function

struct TypeInfo {
  uint32_t bytes;
  bool pred;
};

bool type_info(const std::string& t, TypeInfo* out) {
  static const std::unordered_map<std::string, uint32_t> kTypes = {
      {"b8", 1},     {"u8", 1},  {"s8", 1},  {"b16", 2}, {"u16", 2},  {"s16", 2}, {"f16", 2},
      {"bf16", 2},   {"b32", 4}, {"u32", 4}, {"s32", 4}, {"f32", 4},  {"b64", 8}, {"f16x2", 4},
      {"bf16x2", 4}, {"u64", 8}, {"s64", 8}, {"f64", 8}, {"b128", 16}};
  if (t == "pred") return *out = {0, true}, true;
  auto it = kTypes.find(t);
  if (it == kTypes.end()) return false;
  *out = {it->second, false};
  return true;
}

class Parser : Scanner {
 public:
  explicit Parser(const std::string& text) : Scanner(text) {}
  std::unique_ptr<RawModule> run();

 private:
  struct Scope {
    std::unordered_map<std::string, int> regs;
    std::unordered_map<std::string, Symbol*> syms;
    struct Range {
      int first, count;
    };
    std::unordered_map<std::string, std::vector<Range>> ranges;  // .reg .b32 %r<100>, by prefix
    int id = 0;
  };

  RawOp operand(int depth);
  RawOp name_operand();
  RawOp mem(int depth);
  void statement();
  void directive();
  void module_directive(const std::string& d);
  void body_directive(const std::string& d);
  void entry(bool is_entry);
  void param_list(RawKernel* k);
  void variable(Space space, bool is_extern);
  void initialiser(Symbol* sym, uint32_t elem, const std::string& type);
  void reg_decl();
  void instruction();
  void call(RawInsn* in);
  void dims(int* out);
  int new_reg(const std::string& name, uint8_t width);
  void push_scope();
  void pop_scope();

  std::unique_ptr<RawModule> m_;
  RawKernel* k_ = nullptr;  // function being parsed
  std::vector<Scope> scopes_;
  std::unordered_map<std::string, Symbol*> globals_;
  std::string linkage_;
  size_t operands_ = 0, insns_ = 0;
  uint64_t module_bytes_ = 0;
};

RawOp Parser::name_operand() {
  RawOp o;
  std::string n = ident();
  if (n == "_") return o;
  for (size_t i = scopes_.size(); i-- > 0;) {
    auto& sc = scopes_[i];
    auto it = sc.regs.find(n);
    if (it != sc.regs.end()) {
      o.kind = RawOp::Register;
      o.reg = it->second;
      return o;
    }
    auto sy = sc.syms.find(n);
    if (sy != sc.syms.end()) return o.kind = RawOp::Sym, o.sym = sy->second, o;
    // %r12 is element 12 of %r<…>, or element 2 of %r1<…>
    for (size_t p = n.size(); p-- > 1 && n.size() - p <= 8 && std::isdigit((unsigned char)n[p]);) {
      auto range = sc.ranges.find(n.substr(0, p));
      if (range == sc.ranges.end()) continue;
      int idx = std::atoi(n.c_str() + p);
      for (auto& r : range->second) {
        if (idx >= r.count) continue;
        o.kind = RawOp::Register;
        o.reg = r.first + idx;
        return o;
      }
    }
  }
  auto g = globals_.find(n);
  if (g != globals_.end()) return o.kind = RawOp::Sym, o.sym = g->second, o;
  if (n[0] == '%') {
    if (peek() == '.') {
      ++s_;
      n += "." + ident();
    }
    o.kind = RawOp::Special;
    o.text = n;
    return o;
  }
  o.kind = RawOp::Label;
  o.text = n;
  return o;
}

RawOp Parser::mem(int depth) {
  RawOp o;
  o.kind = RawOp::Mem;
  RawOp base = operand(depth + 1);
  if (base.kind == RawOp::Int) {
    o.imm = base.imm;
  }
  skip();
  while (peek() == '+' || peek() == '-') {
    bool neg = *s_++ == '-';
    int64_t v = integer();
    o.imm += neg ? -v : v;
    skip();
  }
  o.sub.push_back(base);
  while (eat(',')) o.sub.push_back(operand(depth + 1));
  expect(']');
  return o;
}

RawOp Parser::operand(int depth) {
  if (depth > 4) fail("operand nesting too deep");
  if (++operands_ > kMaxOperands) fail("more than " + std::to_string(kMaxOperands) + " operands");
  skip();
  char c = peek();
  if (c == '[') {
    ++s_;
    return mem(depth);
  }
  RawOp o;
  if (c == '{') {
    ++s_;
    o.kind = RawOp::Vec;
    skip();
    while (peek() != '}') {
      o.sub.push_back(operand(depth + 1));
      if (!eat(',')) break;
      skip();
      if (o.sub.size() > 256) fail("vector operand too long");
    }
    expect('}');
  } else if (c == '!') {
    ++s_;
    o = operand(depth + 1);
    o.neg = !o.neg;
    return o;
  } else if (c == '-' || std::isdigit((unsigned char)c)) {
    bool neg = eat('-');
    skip();
    if (!std::isdigit((unsigned char)peek())) fail("expected a number, got " + shown());
    o = number(neg);
  } else {
    o = name_operand();
    skip();
    if (peek() == '+' && o.kind == RawOp::Sym && depth == 0) {
      ++s_;
      o.imm += integer();
    }
  }
  skip();
  if (peek() == '|' && depth == 0) {
    ++s_;
    RawOp p;
    p.kind = RawOp::Pair;
    p.sub.push_back(o);
    p.sub.push_back(operand(depth + 1));
    return p;
  }
  return o;
}

int Parser::new_reg(const std::string& name, uint8_t width) {
  if ((int)k_->regs.size() >= kMaxRegs) fail("too many registers");
  Reg r;
  r.name = name;
  r.width = width;
  r.off = k_->reg_bytes;
  k_->reg_bytes += width == 0 ? 4 : 32u * width;
  k_->reg_bytes = (k_->reg_bytes + 31) & ~31u;
  k_->regs.push_back(std::move(r));
  return (int)k_->regs.size() - 1;
}

void Parser::reg_decl() {
  expect('.');
  std::string t = dotted();
  TypeInfo ti;
  if (!type_info(t, &ti)) fail("unknown register type ." + t);
  do {
    std::string n = ident();
    auto& sc = scopes_.back();
    skip();
    if (peek() == '<') {
      ++s_;
      int64_t count = integer();
      expect('>');
      if (count < 0 || count > kMaxRegs) fail("bad register count");
      sc.ranges[n].push_back({(int)k_->regs.size(), (int)count});
      for (int i = 0; i < count; ++i) new_reg(n + std::to_string(i), ti.bytes);
    } else {
      sc.regs[n] = new_reg(n, ti.bytes);
    }
  } while (eat(','));
  expect(';');
}

void Parser::initialiser(Symbol* sym, uint32_t elem, const std::string& type) {
  auto one = [&] {
    skip();
    if (ident_start(peek())) fail("symbol addresses in initialisers are not supported");
    bool neg = eat('-');
    skip();
    RawOp o = number(neg);
    int64_t v = o.imm;
    if (o.kind == RawOp::Decimal) {
      float f = (float)o.dec;
      v = 0;
      type == "f64" ? std::memcpy(&v, &o.dec, 8) : std::memcpy(&v, &f, 4);
    }
    for (uint32_t i = 0; i < elem; ++i) sym->init.push_back(i < 8 ? (uint8_t)(v >> (8 * i)) : 0);
    if (sym->init.size() > kMaxBytes) fail("initialiser too long");
  };
  skip();
  if (!eat('{')) return one();
  int depth = 1;
  while (depth) {
    skip();
    if (eat('{')) {
      if (++depth > kMaxDepth) fail("initialiser nesting too deep");
    } else if (eat('}')) {
      --depth;
    } else if (!eat(',')) {
      one();
    }
  }
}

void Parser::variable(Space space, bool is_extern) {
  uint32_t align = 0, elem = 0;
  std::string type;
  for (;;) {
    skip();
    if (!eat('.')) break;
    std::string t = dotted();
    TypeInfo ti;
    if (t == "align") {
      align = (uint32_t)integer();
      if (align == 0 || (align & (align - 1)) || align > 65536) fail("bad .align");
    } else if (t == "v2" || t == "v4") {
      elem = t == "v2" ? 2 : 4;
    } else if (type_info(t, &ti) && !ti.pred) {
      elem = (elem ? elem : 1) * ti.bytes;
      type = t;
    } else {
      fail("unexpected ." + t + " in a variable declaration");
    }
  }
  if (!elem) fail("variable without a type");
  do {
    auto sym = std::make_unique<Symbol>();
    sym->name = ident();
    sym->space = space;
    sym->align = align ? align : elem;
    sym->is_extern = is_extern;
    uint64_t n = 1;
    skip();
    bool unsized = false;
    while (eat('[')) {
      skip();
      if (peek() == ']')
        unsized = true;
      else {
        int64_t d = integer();
        if (d < 0 || (uint64_t)d > kMaxBytes || n * d > kMaxBytes)
          fail("array size " + std::to_string(d) + " is not 0.." + std::to_string(kMaxBytes));
        n *= d;
      }
      expect(']');
    }
    if (n * elem > kMaxBytes) fail("a variable of " + std::to_string(n * elem) + " bytes");
    sym->size = unsized ? 0 : n * elem;
    if (eat('=')) initialiser(sym.get(), elem, type);
    if (unsized && !sym->init.empty()) sym->size = sym->init.size();
    if (sym->size && sym->init.size() > sym->size) fail("initialiser longer than its variable");
    Symbol* p = sym.get();
    if (k_) {
      if (space == Space::Local) {
        p->addr = (k_->local_bytes + p->align - 1) / p->align * p->align;
        if (p->addr + p->size > kMaxLocalBytes) fail("too much local memory");
        k_->local_bytes = (uint32_t)(p->addr + p->size);
      }
      scopes_.back().syms[p->name] = p;
      k_->syms.push_back(std::move(sym));
    } else {
      if (space != Space::Shared) module_bytes_ += p->size + p->align;
      if (module_bytes_ > kMaxBytes)
        fail("module-scope variables take more than " + std::to_string(kMaxBytes) + " bytes");
      globals_[p->name] = p;
      m_->syms.push_back(std::move(sym));
    }
  } while (eat(','));
  expect(';');
}

void Parser::dims(int* out) {
  for (int i = 0; i < 3; ++i) out[i] = 1;
  for (int i = 0; i < 3; ++i) {
    int64_t v = integer();
    if (v < 1 || v > 0x7FFFFFFF) fail("dimension " + std::to_string(v) + " is not 1..2^31-1");
    out[i] = (int)v;
    if (!eat(',')) break;
  }
}

void Parser::param_list(RawKernel* k) {
  expect('(');
  skip();
  while (peek() != ')') {
    RawParam p;
    expect('.');
    std::string d = dotted();
    if (d != "param" && d != "reg") fail("expected .param");
    p.is_reg = d == "reg";
    uint32_t elem = 0, align = 0;
    for (;;) {
      skip();
      if (!eat('.')) break;
      std::string t = dotted();
      TypeInfo ti;
      if (t == "align")
        align = (uint32_t)integer();
      else if (t == "ptr")
        continue;
      else if (t == "global" || t == "shared" || t == "const" || t == "local")
        continue;
      else if (type_info(t, &ti))
        elem = ti.bytes, p.type = t;
      else
        fail("unexpected ." + t + " in a parameter");
    }
    if (!elem) fail("parameter without a type");
    p.name = ident();
    p.size = elem;
    if (eat('[')) {
      skip();
      if (peek() != ']') {
        int64_t n = integer();
        if (n < 0 || n > 65536) fail("bad parameter size");
        p.size = (uint32_t)(elem * n);
      }
      expect(']');
    }
    // `.param .u64 .ptr .align 1 p`: that align is the pointee's, only arrays carry their own
    p.align = p.size == elem ? elem : std::max(align, elem);
    if (p.align == 0 || (p.align & (p.align - 1)) || p.align > 256) fail("bad parameter alignment");
    p.offset = (k->param_bytes + p.align - 1) / p.align * p.align;
    k->param_bytes = p.offset + p.size;
    if (k->param_bytes > 65536) fail("too many parameters");
    k->params.push_back(p);
    if (!eat(',')) break;
    skip();
  }
  expect(')');
}

void Parser::push_scope() {
  if (scopes_.size() > kMaxDepth) fail("scopes nested too deep");
  if (k_->scope_parent.size() >= kMaxScopes) fail("too many scopes in " + k_->name);
  Scope sc;
  sc.id = (int)k_->scope_parent.size();
  k_->scope_parent.push_back(scopes_.empty() ? -1 : scopes_.back().id);
  k_->labels.emplace_back();
  scopes_.push_back(std::move(sc));
}

void Parser::pop_scope() {
  scopes_.pop_back();
  if (scopes_.empty()) k_ = nullptr;
}

void Parser::entry(bool is_entry) {
  auto k = std::make_unique<RawKernel>();
  k->line = line_;
  k->is_entry = is_entry;
  skip();
  if (!is_entry && peek() == '(') {
    RawKernel ret;
    param_list(&ret);
    k->rets = std::move(ret.params);
  }
  k->name = ident();
  skip();
  if (peek() == '(') param_list(k.get());
  for (;;) {
    skip();
    if (peek() == ';') {  // prototype
      ++s_;
      return;
    }
    if (peek() == '{') break;
    if (!eat('.')) fail("expected a performance directive or '{', got " + shown());
    std::string d = dotted();
    if (d == "reqntid")
      dims(k->reqntid);
    else if (d == "maxntid")
      dims(k->maxntid);
    else if (d == "reqnctapercluster")
      dims(k->reqcluster);
    else if (d == "minnctapersm")
      k->minnctapersm = (int)integer();
    else if (d == "maxnreg")
      k->maxnreg = (int)integer();
    else if (d == "maxclusterrank")
      integer();
    else if (d == "pragma")
      skip_to(';'), ++s_;
    else if (d == "explicitcluster" || d == "blocksareclusters" || d == "noreturn" ||
             d == "unified")
      continue;
    else
      fail("unknown directive ." + d);
  }
  ++s_;
  k_ = k.get();
  m_->kernels.push_back(std::move(k));
  push_scope();
  auto declare = [&](RawParam& p) {
    auto sym = std::make_unique<Symbol>();
    sym->name = p.name;
    sym->space = is_entry ? Space::Param : Space::Local;
    sym->size = p.size;
    if (!is_entry) {  // a function's parameters are thread-local, as call arguments are
      p.offset = (k_->local_bytes + p.align - 1) / p.align * p.align;
      k_->local_bytes = p.offset + p.size;
    }
    sym->addr = p.offset;
    scopes_.back().syms[p.name] = sym.get();
    k_->syms.push_back(std::move(sym));
  };
  for (auto& p : k_->params) declare(p);
  for (auto& p : k_->rets) declare(p);
}

void Parser::call(RawInsn* in) {
  // call{.uni} (rets), name, (args){, prototype};
  auto group = [&] {
    RawOp v;
    v.kind = RawOp::Vec;
    expect('(');
    skip();
    while (peek() != ')') {
      v.sub.push_back(operand(1));
      if (v.sub.size() > 256) fail("more than 256 arguments");
      if (!eat(',')) break;
      skip();
    }
    expect(')');
    return v;
  };
  RawOp none;
  none.kind = RawOp::Vec;
  skip();
  RawOp rets = none, args = none;
  if (peek() == '(') {
    rets = group();
    expect(',');
  }
  RawOp name = operand(1);
  if (eat(',')) {
    skip();
    if (peek() == '(') {
      args = group();
      if (eat(',')) operand(1);
    } else {
      operand(1);
    }
  }
  in->ops = {rets, name, args};
}

void Parser::instruction() {
  RawInsn in;
  in.line = line_;
  if (eat('@')) {
    bool neg = eat('!');
    RawOp g = name_operand();
    if (g.kind != RawOp::Register || k_->regs[g.reg].width != 0)
      fail("a guard must be a predicate register");
    in.guard = g.reg;
    in.guard_neg = neg;
    skip();
  }
  in.line = line_;
  const char* b = s_;
  while (s_ < e_ && (ident_char(*s_) || *s_ == '.' || (*s_ == ':' && peek(1) == ':')))
    s_ += *s_ == ':' ? 2 : 1;
  in.op.assign(b, s_);
  if (in.op.empty()) fail("expected an instruction, got " + shown());
  in.scope = scopes_.back().id;
  skip();
  if (in.op == "call" || in.op == "call.uni") {
    call(&in);
  } else if (peek() != ';') {
    do {
      in.ops.push_back(operand(0));
      if (in.ops.size() > 16) fail("too many operands");
    } while (eat(','));
  }
  skip();
  if (!eat(';')) fail("expected ';' after " + in.op + ", got " + shown());
  if (++insns_ > kMaxInsns) fail("more than " + std::to_string(kMaxInsns) + " instructions");
  k_->insns.push_back(std::move(in));
}

void Parser::body_directive(const std::string& d) {
  if (d == "reg") return reg_decl();
  if (d == "local") return variable(Space::Local, false);
  if (d == "param")
    return variable(Space::Local, false);  // call arguments live in thread-local storage
  if (d == "shared") return variable(Space::Shared, false);
  if (d == "global") return variable(Space::Global, false);
  if (d == "const") return variable(Space::Const, false);
  if (d == "loc" || d == "file") {
    while (s_ < e_ && *s_ != '\n') ++s_;
    return;
  }
  if (d == "pragma" || d == "branchtargets" || d == "callprototype" || d == "calltargets" ||
      d == "alias") {
    skip_to(';');
    if (s_ < e_) ++s_;
    return;
  }
  fail("unknown directive ." + d);
}

void Parser::module_directive(const std::string& d) {
  if (d == "version") {
    skip();
    const char* b = s_;
    while (s_ < e_ && (std::isdigit((unsigned char)*s_) || *s_ == '.')) ++s_;
    m_->version.assign(b, s_);
  } else if (d == "target") {
    m_->target = ident();
    while (eat(',')) ident();
  } else if (d == "address_size") {
    if (integer() != 64) fail("only 64-bit addresses are supported");
  } else if (d == "visible" || d == "weak" || d == "common") {
    linkage_ = d;
  } else if (d == "extern") {
    linkage_ = d;
  } else if (d == "entry" || d == "func") {
    linkage_.clear();
    entry(d == "entry");
  } else if (d == "global" || d == "const" || d == "shared") {
    bool ext = linkage_ == "extern";
    linkage_.clear();
    variable(d == "global" ? Space::Global : d == "const" ? Space::Const : Space::Shared, ext);
  } else if (d == "section") {
    skip_to('{');
    skip_to('}');
    if (s_ < e_) ++s_;
  } else if (d == "reg" || d == "local" || d == "param") {
    fail("." + d + " outside of a function");
  } else {
    body_directive(d);
  }
}

void Parser::statement() {
  skip();
  if (s_ >= e_) return;
  char c = peek();
  if (!k_) {
    if (c != '.') fail("expected a directive, got " + shown());
    ++s_;
    return module_directive(dotted());
  }
  if (c == '{') return ++s_, push_scope();
  if (c == '}') return ++s_, pop_scope();
  if (c == ';') return void(++s_);
  if (c == '.') return ++s_, body_directive(dotted());
  if (ident_start(c)) {  // label?
    const char* p = s_;
    while (p < e_ && (ident_char(*p) || *p == '%')) ++p;
    const char* q = p;
    while (q < e_ && (*q == ' ' || *q == '\t')) ++q;
    if (q < e_ && *q == ':' && !(q + 1 < e_ && q[1] == ':')) {
      std::string n(s_, p);
      if (!k_->labels[scopes_.back().id].emplace(n, (int)k_->insns.size()).second)
        fail("label " + n + " defined twice in its scope");
      s_ = q + 1;
      skip();
      if (peek() == '.') {  // `lbl: .branchtargets ...;` and `.callprototype`
        ++s_;
        body_directive(dotted());
      }
      return;
    }
  }
  instruction();
}

std::unique_ptr<RawModule> Parser::run() {
  m_ = std::make_unique<RawModule>();
  for (;;) {
    skip();
    if (s_ >= e_) break;
    if (*s_ == '\0') {  // CUDA hands out NUL-terminated images
      while (s_ < e_ && *s_ == '\0') ++s_;
      if (s_ < e_) fail("NUL byte in the text");
      break;
    }
    statement();
  }
  if (k_) fail("end of file inside " + k_->name);
  if (m_->version.empty()) fail("no .version directive");
  return std::move(m_);
}

}  // namespace

std::unique_ptr<RawModule> parse_ptx(const std::string& text) { return Parser(text).run(); }

}  // namespace flash_attn_mx::emu
