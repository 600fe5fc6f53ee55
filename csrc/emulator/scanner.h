// Characters of a PTX text -> names, numbers and punctuation, with their line: what the parser stands
// on.
#pragma once
#include <cctype>

#include "ptx.h"

namespace flash_attn_mx::emu {

constexpr size_t kMaxText = 64u << 20;  // bytes

inline bool ident_start(char c) {
  return std::isalpha((unsigned char)c) || c == '_' || c == '$' || c == '%';
}
inline bool ident_char(char c) { return std::isalnum((unsigned char)c) || c == '_' || c == '$'; }

// eat, expect, ident, dotted and integer skip white space and comments first. What does not fit
// throws ParseError.
class Scanner {
 protected:
  explicit Scanner(const std::string& text);
  [[noreturn]] void fail(const std::string& what) { throw ParseError(line_, what); }
  char peek(int k = 0) const { return s_ + k < e_ ? s_[k] : '\0'; }
  void skip();
  bool eat(char c) {
    skip();
    if (peek() != c) return false;
    ++s_;
    return true;
  }
  void expect(char c) {
    if (!eat(c)) fail(std::string("expected '") + c + "', got " + shown());
  }
  std::string shown() {
    if (s_ >= e_) return "end of file";
    std::string t;
    for (int i = 0; i < 24 && s_ + i < e_ && s_[i] != '\n'; ++i)
      t += std::isprint((unsigned char)s_[i]) ? s_[i] : '?';
    return "'" + t + "'";
  }
  std::string ident();
  std::string dotted();  // after '.': name with '::' parts
  int64_t integer();
  uint64_t scan_digits(int base);
  RawOp number(bool neg);
  void skip_to(char c) {
    while (s_ < e_ && *s_ != c) {
      if (*s_ == '\n') ++line_;
      ++s_;
    }
  }

  const char *s_, *e_;  // the rest of the text
  int line_ = 1;
};

}  // namespace flash_attn_mx::emu
