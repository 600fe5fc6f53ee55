// Integer, logic, comparison, selection and move.
#include "isa.h"

namespace flash_attn_mx::emu {
namespace {

template <class T>
struct Wider;
template <>
struct Wider<uint16_t> {
  using type = uint32_t;
};
template <>
struct Wider<int16_t> {
  using type = int32_t;
};
template <>
struct Wider<uint32_t> {
  using type = uint64_t;
};
template <>
struct Wider<int32_t> {
  using type = int64_t;
};
template <>
struct Wider<uint64_t> {
  using type = unsigned __int128;
};
template <>
struct Wider<int64_t> {
  using type = __int128;
};
template <class T>
using U = std::make_unsigned_t<T>;

struct Add {
  template <class T>
  static T f(T a, T b) {
    return (T)((U<T>)a + (U<T>)b);
  }
};
struct AddSat {
  template <class T>
  static T f(T a, T b) {
    T r;
    return __builtin_add_overflow(a, b, &r)
               ? (a < 0 ? std::numeric_limits<T>::min() : std::numeric_limits<T>::max())
               : r;
  }
};
struct SubSat {
  template <class T>
  static T f(T a, T b) {
    T r;
    return __builtin_sub_overflow(a, b, &r)
               ? (a < 0 ? std::numeric_limits<T>::min() : std::numeric_limits<T>::max())
               : r;
  }
};
struct Sub {
  template <class T>
  static T f(T a, T b) {
    return (T)((U<T>)a - (U<T>)b);
  }
};
struct MulLo {
  template <class T>
  static T f(T a, T b) {
    return (T)((typename Wider<U<T>>::type)(U<T>)a * (U<T>)b);
  }
};
struct MulHi {
  template <class T>
  static T f(T a, T b) {
    return (T)(((typename Wider<T>::type)a * b) >> (8 * sizeof(T)));
  }
};
struct Mul24 {
  template <class T>
  static T f(T a, T b) {
    return (T)((int64_t)((T)((U<T>)a << 8) >> 8) * (int64_t)((T)((U<T>)b << 8) >> 8));
  }
};
struct Div {
  template <class T>
  static T f(T a, T b) {
    return b == 0 ? (T) ~(T)0 : (std::is_signed_v<T> && b == (T)-1) ? (T)(0 - (U<T>)a) : (T)(a / b);
  }
};
struct Rem {
  template <class T>
  static T f(T a, T b) {
    return b == 0 ? a : (std::is_signed_v<T> && b == (T)-1) ? (T)0 : (T)(a % b);
  }
};
struct Min {
  template <class T>
  static T f(T a, T b) {
    return a < b ? a : b;
  }
};
struct Max {
  template <class T>
  static T f(T a, T b) {
    return a > b ? a : b;
  }
};
struct MinRelu {
  template <class T>
  static T f(T a, T b) {
    T r = a < b ? a : b;
    return r < 0 ? (T)0 : r;
  }
};
struct MaxRelu {
  template <class T>
  static T f(T a, T b) {
    T r = a > b ? a : b;
    return r < 0 ? (T)0 : r;
  }
};
struct And {
  template <class T>
  static T f(T a, T b) {
    return a & b;
  }
};
struct Or {
  template <class T>
  static T f(T a, T b) {
    return a | b;
  }
};
struct Xor {
  template <class T>
  static T f(T a, T b) {
    return a ^ b;
  }
};
struct Abs {
  template <class T>
  static T f(T a) {
    return a < 0 ? (T)(0 - (U<T>)a) : a;
  }
};
struct Neg {
  template <class T>
  static T f(T a) {
    return (T)(0 - (U<T>)a);
  }
};
struct Not {
  template <class T>
  static T f(T a) {
    return (T)~a;
  }
};
struct CNot {
  template <class T>
  static T f(T a) {
    return a == 0;
  }
};
struct Brev {
  template <class T>
  static T f(T a) {
    U<T> r = 0;
    for (unsigned i = 0; i < 8 * sizeof(T); ++i)
      r |= (U<T>)((U<T>)a >> i & 1) << (8 * sizeof(T) - 1 - i);
    return (T)r;
  }
};
struct MadLo {
  template <class T>
  static T f(T a, T b, T c) {
    return Add::f(MulLo::f(a, b), c);
  }
};
struct MadHi {
  template <class T>
  static T f(T a, T b, T c) {
    return Add::f(MulHi::f(a, b), c);
  }
};
struct Sad {
  template <class T>
  static T f(T a, T b, T c) {
    return Add::f(c, a > b ? Sub::f(a, b) : Sub::f(b, a));
  }
};

template <class Op, class T>
void un(Exec& x, const Instr& in, uint32_t mask) {
  T ta[32], out[32];
  const T* a = src(x, in.op[1], ta);
  for (int i = 0; i < 32; ++i) out[i] = Op::f(a[i]);
  put(x, in.op[0], out, mask);
}
template <class Op, class T>
void bin(Exec& x, const Instr& in, uint32_t mask) {
  T ta[32], tb[32], out[32];
  const T *a = src(x, in.op[1], ta), *b = src(x, in.op[2], tb);
  for (int i = 0; i < 32; ++i) out[i] = Op::f(a[i], b[i]);
  put(x, in.op[0], out, mask);
}
template <class Op, class T>
void ter(Exec& x, const Instr& in, uint32_t mask) {
  T ta[32], tb[32], tc[32], out[32];
  const T *a = src(x, in.op[1], ta), *b = src(x, in.op[2], tb), *c = src(x, in.op[3], tc);
  for (int i = 0; i < 32; ++i) out[i] = Op::f(a[i], b[i], c[i]);
  put(x, in.op[0], out, mask);
}

template <class Op>
ExecFn pick_un(Decode& d) {
#define F(T) &un<Op, T>
  PICK_INT(d.type(), F)
#undef F
}
template <class Op>
ExecFn pick_bin(Decode& d) {
#define F(T) &bin<Op, T>
  PICK_INT(d.type(), F)
#undef F
}
template <class Op>
ExecFn pick_ter(Decode& d) {
#define F(T) &ter<Op, T>
  PICK_INT(d.type(), F)
#undef F
}

template <class T, bool kMad>
void wide(Exec& x, const Instr& in, uint32_t mask) {
  using W = typename Wider<T>::type;
  T ta[32], tb[32];
  W tc[32], out[32];
  const T *a = src(x, in.op[1], ta), *b = src(x, in.op[2], tb);
  const W* c = kMad ? src(x, in.op[3], tc) : nullptr;
  for (int i = 0; i < 32; ++i) {
    W p = (W)a[i] * (W)b[i];
    if constexpr (kMad) p = (W)((U<W>)p + (U<W>)c[i]);
    out[i] = p;
  }
  put(x, in.op[0], out, mask);
}

template <class T>
void carry(Exec& x, const Instr& in, uint32_t mask) {  // aux: 0 subtract, 1 use carry, 2 set carry
  T ta[32], tb[32], out[32];
  const T *a = src(x, in.op[1], ta), *b = src(x, in.op[2], tb);
  uint32_t cc = 0;
  for (int i = 0; i < 32; ++i) {
    unsigned __int128 k = in.aux[1] ? (x.w->cc >> i & 1) : 0;
    unsigned __int128 r =
        in.aux[0] ? (unsigned __int128)a[i] - b[i] - k : (unsigned __int128)a[i] + b[i] + k;
    out[i] = (T)r;
    cc |= (uint32_t)(r >> (8 * sizeof(T)) & 1) << i;
  }
  put(x, in.op[0], out, mask);
  if (in.aux[2]) x.w->cc = (x.w->cc & ~mask) | (cc & mask);
}

template <class T, int K>  // 0 popc, 1 clz, 2 bfind, 3 bfind.shiftamt
void count(Exec& x, const Instr& in, uint32_t mask) {
  T ta[32];
  uint32_t out[32];
  const T* a = src(x, in.op[1], ta);
  constexpr int bits = 8 * sizeof(T);
  for (int i = 0; i < 32; ++i) {
    uint64_t v = (U<T>)(std::is_signed_v<T> && K >= 2 && a[i] < 0 ? ~a[i] : a[i]);
    int lz = v ? __builtin_clzll(v) - (64 - bits) : bits;
    out[i] = K == 0   ? __builtin_popcountll(v)
             : K == 1 ? lz
             : v == 0 ? ~0u
             : K == 2 ? bits - 1 - lz
                      : lz;
  }
  put(x, in.op[0], out, mask);
}
template <class T>
ExecFn pick_count(Decode& d) {
  if (d.mods[0] == "popc") return &count<T, 0>;
  if (d.mods[0] == "clz") return &count<T, 1>;
  return d.has("shiftamt") ? &count<T, 3> : &count<T, 2>;
}

template <class T>
void do_bfe(Exec& x, const Instr& in, uint32_t mask) {
  constexpr int bits = 8 * sizeof(T);
  T ta[32], out[32];
  uint32_t tp[32], tl[32];
  const T* a = src(x, in.op[1], ta);
  const uint32_t *pos = src(x, in.op[2], tp), *len = src(x, in.op[3], tl);
  for (int i = 0; i < 32; ++i) {
    int p = pos[i] & 255, n = len[i] & 255;
    bool sgn = std::is_signed_v<T> && n && ((U<T>)a[i] >> std::min(p + n - 1, bits - 1) & 1);
    U<T> v = p < bits ? (U<T>)a[i] >> p : 0;
    int have = std::min(n, std::max(bits - p, 0));  // bits that are really there
    U<T> m = have < bits ? ((U<T>)1 << have) - 1 : ~(U<T>)0;
    v = sgn ? v | ~m : v & m;
    out[i] = (T)v;
  }
  put(x, in.op[0], out, mask);
}

template <class T>
void do_bfi(Exec& x, const Instr& in, uint32_t mask) {
  constexpr int bits = 8 * sizeof(T);
  T ta[32], tb[32], out[32];
  uint32_t tp[32], tl[32];
  const T *a = src(x, in.op[1], ta), *b = src(x, in.op[2], tb);
  const uint32_t *pos = src(x, in.op[3], tp), *len = src(x, in.op[4], tl);
  for (int i = 0; i < 32; ++i) {
    int p = pos[i] & 255, n = len[i] & 255;
    T m = p >= bits || n == 0 ? 0 : (T)((n >= bits ? ~(T)0 : (((T)1 << n) - 1)) << p);
    out[i] = (b[i] & ~m) | ((p < bits ? (T)(a[i] << p) : 0) & m);
  }
  put(x, in.op[0], out, mask);
}

void do_dp4a(Exec& x, const Instr& in, uint32_t mask) {
  uint32_t ta[32], tb[32], tc[32], out[32];
  const uint32_t *a = src(x, in.op[1], ta), *b = src(x, in.op[2], tb), *c = src(x, in.op[3], tc);
  for (int i = 0; i < 32; ++i) {
    uint32_t s = c[i];
    for (int k = 0; k < 4; ++k) {
      int p = in.aux[0] ? (int8_t)(a[i] >> 8 * k) : (uint8_t)(a[i] >> 8 * k);
      int q = in.aux[1] ? (int8_t)(b[i] >> 8 * k) : (uint8_t)(b[i] >> 8 * k);
      s += (uint32_t)(p * q);
    }
    out[i] = s;
  }
  put(x, in.op[0], out, mask);
}

void do_pred_logic(Exec& x, const Instr& in, uint32_t mask) {
  uint32_t a = pred(x, in.op[1]), b = in.nops > 2 ? pred(x, in.op[2]) : 0;
  put_pred(x, in.op[0],
           in.aux[0] == 0   ? a & b
           : in.aux[0] == 1 ? a | b
           : in.aux[0] == 2 ? a ^ b
                            : ~a,
           mask);
}

void do_lop3(Exec& x, const Instr& in, uint32_t mask) {
  uint32_t ta[32], tb[32], tc[32], out[32];
  const uint32_t *a = src(x, in.op[1], ta), *b = src(x, in.op[2], tb), *c = src(x, in.op[3], tc);
  const uint32_t lut = in.aux[0];
  for (int i = 0; i < 32; ++i) {
    uint32_t r = 0;
    for (int k = 0; k < 8; ++k)
      if (lut >> k & 1)
        r |= (k & 4 ? a[i] : ~a[i]) & (k & 2 ? b[i] : ~b[i]) & (k & 1 ? c[i] : ~c[i]);
    out[i] = r;
  }
  put(x, in.op[0], out, mask);
}

template <bool kLeft, bool kClamp>
void do_shf(Exec& x, const Instr& in, uint32_t mask) {
  uint32_t ta[32], tb[32], tc[32], out[32];
  const uint32_t *a = src(x, in.op[1], ta), *b = src(x, in.op[2], tb), *c = src(x, in.op[3], tc);
  for (int i = 0; i < 32; ++i) {
    uint32_t n = kClamp ? std::min(c[i], 32u) : c[i] & 31;
    uint64_t v = (uint64_t)b[i] << 32 | a[i];
    out[i] = kLeft ? (uint32_t)((n == 32 ? v << 32 : v << n) >> 32) : (uint32_t)(v >> n);
  }
  put(x, in.op[0], out, mask);
}

template <class T, bool kLeft>
void do_shift(Exec& x, const Instr& in, uint32_t mask) {
  constexpr uint32_t bits = 8 * sizeof(T);
  T ta[32], out[32];
  uint32_t tb[32];
  const T* a = src(x, in.op[1], ta);
  const uint32_t* b = src(x, in.op[2], tb);
  for (int i = 0; i < 32; ++i) {
    uint32_t n = b[i];
    if (kLeft)
      out[i] = n >= bits ? 0 : (T)((U<T>)a[i] << n);
    else
      out[i] = (T)(a[i] >> (n >= bits ? (std::is_signed_v<T> ? bits - 1 : 0) : n));
    if (!kLeft && !std::is_signed_v<T> && n >= bits) out[i] = 0;
  }
  put(x, in.op[0], out, mask);
}

void do_prmt(Exec& x, const Instr& in, uint32_t mask) {
  uint32_t ta[32], tb[32], tc[32], out[32];
  const uint32_t *a = src(x, in.op[1], ta), *b = src(x, in.op[2], tb), *c = src(x, in.op[3], tc);
  for (int i = 0; i < 32; ++i) {
    uint64_t v = (uint64_t)b[i] << 32 | a[i];
    uint32_t r = 0, s = c[i] & 3, sel = c[i];
    switch (in.aux[0]) {
      case 1:
        sel = s | (s + 1) << 4 | (s + 2) << 8 | (s + 3) << 12;
        break;  // f4e
      case 2:
        sel = s | ((s - 1) & 7) << 4 | ((s - 2) & 7) << 8 | ((s - 3) & 7) << 12;
        break;  // b4e
      case 3:
        sel = s * 0x1111;
        break;  // rc8
      case 4:
        sel = std::max(s, 0u) | std::max(s, 1u) << 4 | std::max(s, 2u) << 8 | 3u << 12;
        break;  // ecl
      case 5:
        sel = 0 | std::min(s, 1u) << 4 | std::min(s, 2u) << 8 | std::min(s, 3u) << 12;
        break;  // ecr
      case 6:
        sel = (s & 1) ? 0x3232 : 0x1010;
        break;  // rc16
    }
    for (int k = 0; k < 4; ++k) {
      uint32_t n = sel >> (4 * k) & 15;
      uint8_t byte = (uint8_t)(v >> (8 * (n & 7)));
      if (n & 8) byte = byte & 0x80 ? 0xFF : 0;
      r |= (uint32_t)byte << (8 * k);
    }
    out[i] = r;
  }
  put(x, in.op[0], out, mask);
}

}  // namespace

ExecFn int_unary(Decode& d) {
  d.want(2, 2), d.dst(0), d.data(1);
  auto& o = d.mods[0];
  if (o == "abs") return pick_un<Abs>(d);
  if (o == "neg") return pick_un<Neg>(d);
  if (o == "not") return pick_un<Not>(d);
  if (o == "cnot") return pick_un<CNot>(d);
  return pick_un<Brev>(d);
}

ExecFn int_binary(Decode& d) {
  d.want(3, 3), d.dst(0), d.values(1, 3);
  auto& o = d.mods[0];
  if (d.has("sat")) {
    if (d.type() != Ty::S32) d.fail(".sat needs .s32");
    return o == "add" ? &bin<AddSat, int32_t> : &bin<SubSat, int32_t>;
  }
  if (d.has("relu")) return o == "min" ? &bin<MinRelu, int32_t> : &bin<MaxRelu, int32_t>;
  if (o == "add") return pick_bin<Add>(d);
  if (o == "sub") return pick_bin<Sub>(d);
  if (o == "mul") return d.has("lo") ? pick_bin<MulLo>(d) : pick_bin<MulHi>(d);
  if (o == "mul24") return pick_bin<Mul24>(d);
  if (o == "div") return pick_bin<Div>(d);
  if (o == "rem") return pick_bin<Rem>(d);
  if (o == "min") return pick_bin<Min>(d);
  if (o == "max") return pick_bin<Max>(d);
  if (o == "and") return pick_bin<And>(d);
  if (o == "or") return pick_bin<Or>(d);
  return pick_bin<Xor>(d);
}

ExecFn int_ternary(Decode& d) {
  d.want(4, 4), d.dst(0), d.values(1, 4);
  if (d.mods[0] == "sad") return pick_ter<Sad>(d);
  return d.has("lo") ? pick_ter<MadLo>(d) : pick_ter<MadHi>(d);
}

ExecFn int_wide(Decode& d) {
  bool mad = d.mods[0] == "mad";
  d.want(mad ? 4 : 3, mad ? 4 : 3), d.dst(0), d.values(1, mad ? 4 : 3);
  switch (d.type()) {
    case Ty::U16:
      return mad ? &wide<uint16_t, true> : &wide<uint16_t, false>;
    case Ty::S16:
      return mad ? &wide<int16_t, true> : &wide<int16_t, false>;
    case Ty::U32:
      return mad ? &wide<uint32_t, true> : &wide<uint32_t, false>;
    default:
      return mad ? &wide<int32_t, true> : &wide<int32_t, false>;
  }
}

ExecFn int_carry(Decode& d) {
  d.want(3, 3), d.dst(0), d.values(1, 3);
  auto& o = d.mods[0];
  d.in.aux[0] = o[0] == 's';
  d.in.aux[1] = o.back() == 'c';
  d.in.aux[2] = d.has("cc");
  return type_bytes(d.type()) == 8 ? &carry<uint64_t> : &carry<uint32_t>;
}

ExecFn int_count(Decode& d) {
  d.want(2, 2), d.dst(0), d.data(1);
#define F(T) pick_count<T>(d)
  PICK_INT(d.type(), F)
#undef F
}

ExecFn bit_extract(Decode& d) {
  d.want(4, 4), d.dst(0), d.values(1, 4);
  switch (d.type()) {
    case Ty::U32:
      return &do_bfe<uint32_t>;
    case Ty::S32:
      return &do_bfe<int32_t>;
    case Ty::U64:
      return &do_bfe<uint64_t>;
    default:
      return &do_bfe<int64_t>;
  }
}
ExecFn bit_insert(Decode& d) {
  d.want(5, 5), d.dst(0), d.values(1, 5);
  return d.type() == Ty::B32 ? &do_bfi<uint32_t> : &do_bfi<uint64_t>;
}
ExecFn dot_product(Decode& d) {
  d.want(4, 4), d.dst(0), d.values(1, 4);
  d.in.aux[0] = d.mods[1] == "s32";
  d.in.aux[1] = d.mods[2] == "s32";
  return &do_dp4a;
}
ExecFn pred_logic(Decode& d) {
  auto& o = d.mods[0];
  size_t n = o == "not" ? 2 : 3;
  d.want(n, n);
  for (size_t i = 0; i < n; ++i) d.pred_op(i);
  d.in.aux[0] = o == "and" ? 0 : o == "or" ? 1 : o == "xor" ? 2 : 3;
  return &do_pred_logic;
}
ExecFn lop3(Decode& d) {
  d.want(5, 5), d.dst(0), d.values(1, 5);
  if (d.ops[4].kind != Operand::Const) d.fail("the look-up table must be a constant");
  d.in.aux[0] = (uint32_t)d.ops[4].imm & 0xFF;
  return &do_lop3;
}
ExecFn funnel_shift(Decode& d) {
  d.want(4, 4), d.dst(0), d.values(1, 4);
  bool clamp = d.has("clamp");
  if (d.has("l")) return clamp ? &do_shf<true, true> : &do_shf<true, false>;
  return clamp ? &do_shf<false, true> : &do_shf<false, false>;
}
ExecFn shift(Decode& d) {
  d.want(3, 3), d.dst(0), d.values(1, 3);
  bool left = d.mods[0] == "shl";
#define F(T) (left ? &do_shift<T, true> : &do_shift<T, false>)
  PICK_INT(d.type(), F)
#undef F
}
ExecFn prmt(Decode& d) {
  d.want(4, 4), d.dst(0), d.values(1, 4);
  static const char* const kModes[] = {"", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"};
  for (uint32_t i = 1; i < 7; ++i)
    if (d.has(kModes[i])) d.in.aux[0] = i;
  return &do_prmt;
}
}  // namespace flash_attn_mx::emu
