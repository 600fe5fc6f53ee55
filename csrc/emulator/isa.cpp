#include "isa.h"

#include <cstring>

namespace flash_attn_mx::emu {

const std::vector<Form>& isa_table() {
  static const std::vector<Form> t = {
#define INSN(pattern, handler, section, evidence, test) \
  {pattern, #handler, handler, section, Evidence::evidence, test},
#include "isa.def"
#undef INSN
  };
  return t;
}

namespace {
const char* group_end(const char* p) {
  char close = *p == '{' ? '}' : ')';
  while (*p && *p != close) ++p;
  return p;
}

bool match(const char* p, const char* s) {
  while (*p && *p != '{' && *p != '(') {
    if (*p++ != *s++) return false;
  }
  if (!*p) return !*s;
  const char* end = group_end(p);
  for (const char* a = p + 1; a <= end; ++a) {
    const char* b = a;
    while (b < end && *b != '|') ++b;
    size_t n = b - a;
    if (std::strncmp(a, s, n) == 0 && match(end + 1, s + n)) return true;
    a = b;
  }
  return *p == '{' && match(end + 1, s);
}
}  // namespace

bool match_pattern(const char* pattern, const std::string& op) {
  return match(pattern, op.c_str());
}

int find_form(const std::string& op) {
  auto& t = isa_table();
  for (size_t i = 0; i < t.size(); ++i)
    if (match_pattern(t[i].pattern, op)) return (int)i;
  return -1;
}

Ty parse_type(const std::string& s) {
  static const std::unordered_map<std::string, Ty> k = {
      {"pred", Ty::Pred},      {"b8", Ty::B8},         {"b16", Ty::B16},
      {"b32", Ty::B32},        {"b64", Ty::B64},       {"b128", Ty::B128},
      {"u8", Ty::U8},          {"u16", Ty::U16},       {"u32", Ty::U32},
      {"u64", Ty::U64},        {"s8", Ty::S8},         {"s16", Ty::S16},
      {"s32", Ty::S32},        {"s64", Ty::S64},       {"f16", Ty::F16},
      {"f16x2", Ty::F16x2},    {"bf16", Ty::BF16},     {"bf16x2", Ty::BF16x2},
      {"f32", Ty::F32},        {"f32x2", Ty::F32x2},   {"f64", Ty::F64},
      {"tf32", Ty::TF32},      {"e4m3x2", Ty::E4M3x2}, {"e5m2x2", Ty::E5M2x2},
      {"ue8m0x2", Ty::UE8M0x2}};
  auto it = k.find(s);
  return it == k.end() ? Ty::None : it->second;
}

unsigned type_bytes(Ty t) {
  switch (t) {
    case Ty::B8:
    case Ty::U8:
    case Ty::S8:
      return 1;
    case Ty::B16:
    case Ty::U16:
    case Ty::S16:
    case Ty::F16:
    case Ty::BF16:
    case Ty::E4M3x2:
    case Ty::E5M2x2:
    case Ty::UE8M0x2:
      return 2;
    case Ty::B32:
    case Ty::U32:
    case Ty::S32:
    case Ty::F32:
    case Ty::TF32:
    case Ty::F16x2:
    case Ty::BF16x2:
      return 4;
    case Ty::B64:
    case Ty::U64:
    case Ty::S64:
    case Ty::F64:
    case Ty::F32x2:
      return 8;
    case Ty::B128:
      return 16;
    default:
      return 0;
  }
}

}  // namespace flash_attn_mx::emu
