#include "scanner.h"

#include <cstdlib>
#include <cstring>

namespace flash_attn_mx::emu {

Scanner::Scanner(const std::string& text) : s_(text.data()), e_(text.data() + text.size()) {
  if (text.size() > kMaxText)
    fail("the text has " + std::to_string(text.size()) + " bytes, more than " +
         std::to_string(kMaxText));
}

void Scanner::skip() {
  for (;;) {
    while (s_ < e_ && std::isspace((unsigned char)*s_)) {
      if (*s_ == '\n') ++line_;
      ++s_;
    }
    if (peek() == '/' && peek(1) == '/') {
      while (s_ < e_ && *s_ != '\n') ++s_;
    } else if (peek() == '/' && peek(1) == '*') {
      s_ += 2;
      while (s_ < e_ && !(peek() == '*' && peek(1) == '/')) {
        if (*s_ == '\n') ++line_;
        ++s_;
      }
      if (s_ >= e_) fail("unterminated comment");
      s_ += 2;
    } else {
      return;
    }
  }
}

std::string Scanner::ident() {
  skip();
  if (!ident_start(peek())) fail("expected a name, got " + shown());
  const char* b = s_++;
  while (s_ < e_ && ident_char(*s_)) ++s_;
  return {b, s_};
}

std::string Scanner::dotted() {
  skip();
  const char* b = s_;
  while (s_ < e_ && (ident_char(*s_) || (*s_ == ':' && peek(1) == ':'))) s_ += *s_ == ':' ? 2 : 1;
  if (b == s_) fail("expected a directive or modifier, got " + shown());
  return {b, s_};
}

uint64_t Scanner::scan_digits(int base) {
  uint64_t v = 0;
  const char* b = s_;
  for (; s_ < e_; ++s_) {
    int d = std::isdigit((unsigned char)*s_)   ? *s_ - '0'
            : std::isalpha((unsigned char)*s_) ? std::tolower(*s_) - 'a' + 10
                                               : 99;
    if (d >= base) break;
    if (v > (UINT64_MAX - d) / base) fail("number exceeds 64 bits");
    v = v * base + d;
  }
  if (b == s_) fail("malformed number");
  return v;
}

RawOp Scanner::number(bool neg) {
  RawOp o;
  o.kind = RawOp::Int;
  if (peek() == '0' && (peek(1) == 'x' || peek(1) == 'X')) {
    s_ += 2;
    o.imm = scan_digits(16);
  } else if (peek() == '0' && (peek(1) == 'b' || peek(1) == 'B')) {
    s_ += 2;
    o.imm = scan_digits(2);
  } else if (peek() == '0' && std::strchr("fFdD", peek(1)) && peek(1)) {
    bool d = std::tolower(peek(1)) == 'd';
    s_ += 2;
    const char* b = s_;
    o.imm = scan_digits(16);
    if (s_ - b != (d ? 16 : 8)) fail("malformed float constant");
    o.kind = d ? RawOp::F64 : RawOp::F32;
    if (neg) o.imm ^= d ? (1ll << 63) : (1ll << 31);
    return o;
  } else {
    const char* b = s_;
    o.imm = scan_digits(10);
    if (peek() == '.' || peek() == 'e' || peek() == 'E') {
      while (s_ < e_ && (std::isalnum((unsigned char)*s_) || *s_ == '.' ||
                         ((*s_ == '-' || *s_ == '+') && std::tolower(s_[-1]) == 'e')))
        ++s_;
      std::string t(b, s_);
      char* end;
      o.kind = RawOp::Decimal;
      o.dec = std::strtod(t.c_str(), &end);
      if (*end) fail("malformed number '" + t + "'");
      if (neg) o.dec = -o.dec;
      return o;
    }
    if (s_ - b > 1 && *b == '0') {  // C octal
      const char* save = s_;
      s_ = b + 1;
      o.imm = scan_digits(8);
      if (s_ != save) fail("malformed octal number");
    }
  }
  if (peek() == 'U' || peek() == 'u') ++s_;
  if (neg) o.imm = (int64_t)(0 - (uint64_t)o.imm);
  return o;
}

int64_t Scanner::integer() {
  skip();
  bool neg = eat('-');
  skip();
  if (!std::isdigit((unsigned char)peek())) fail("expected a number, got " + shown());
  RawOp o = number(neg);
  if (o.kind != RawOp::Int) fail("expected an integer");
  return o.imm;
}

}  // namespace flash_attn_mx::emu
