// cvt: between integers, between floats, and to and from packed 16-, 8-bit and scale formats.
#include "isa.h"
#include "numerics.h"

namespace flash_attn_mx::emu {
namespace {

Round round_of(const Decode& d) {
  for (auto& m : d.mods) {
    if (m == "rz" || m == "rzi") return Round::RZ;
    if (m == "rm" || m == "rmi") return Round::RM;
    if (m == "rp" || m == "rpi") return Round::RP;
    if (m == "rna") return Round::RNA;
  }
  return Round::RN;
}

int64_t sign_extend(uint64_t v, unsigned bytes) {
  unsigned s = 64 - 8 * bytes;
  return (int64_t)(v << s) >> s;
}
uint64_t truncate(uint64_t v, unsigned bytes) {
  return bytes == 8 ? v : v & ((1ull << 8 * bytes) - 1);
}

struct IntType {
  unsigned bytes;
  bool sgn;
};
IntType int_type(uint32_t t) { return {type_bytes((Ty)t), is_signed((Ty)t)}; }

// A value of integer type in a register that may be wider: sign- or zero-extended to the register's
// width.
void put_int(Exec& x, const Operand& o, const int64_t* v, IntType t, uint32_t mask) {
  if (t.sgn) {
    put<int64_t>(x, o, v, mask);
  } else {
    put<uint64_t>(x, o, reinterpret_cast<const uint64_t*>(v), mask);
  }
}

void do_int(Exec& x, const Instr& in, uint32_t mask) {  // aux: dst type, src type, sat
  IntType dt = int_type(in.aux[0]), st = int_type(in.aux[1]);
  int64_t out[32];
  for (int i = 0; i < 32; ++i) {
    uint64_t raw = src_lane(x, in.op[1], i);
    __int128 v = st.sgn ? (__int128)sign_extend(raw, st.bytes) : (__int128)truncate(raw, st.bytes);
    if (in.aux[2]) {
      __int128 lo = dt.sgn ? -((__int128)1 << (8 * dt.bytes - 1)) : 0,
               hi = ((__int128)1 << (8 * dt.bytes - (dt.sgn ? 1 : 0))) - 1;
      v = v < lo ? lo : v > hi ? hi : v;
    }
    out[i] = dt.sgn ? sign_extend((uint64_t)v, dt.bytes) : (int64_t)truncate((uint64_t)v, dt.bytes);
  }
  put_int(x, in.op[0], out, dt, mask);
}

double load_float(uint64_t raw, Ty t) {
  switch (t) {
    case Ty::F16:
      return decode((uint16_t)raw, kF16);
    case Ty::BF16:
      return as_float((uint32_t)raw << 16);
    case Ty::F32:
      return as_float((uint32_t)raw);
    default:
      return as_double(raw);
  }
}

double round_integral(double v, Round r) {
  switch (r) {
    case Round::RZ:
      return std::trunc(v);
    case Round::RM:
      return std::floor(v);
    case Round::RP:
      return std::ceil(v);
    default:
      return std::nearbyint(v);
  }
}

void do_f2i(Exec& x, const Instr& in,
            uint32_t mask) {  // aux: dst type, src type, rounding | ftz << 8
  IntType dt = int_type(in.aux[0]);
  int64_t out[32];
  for (int i = 0; i < 32; ++i) {
    double v = load_float(src_lane(x, in.op[1], i), (Ty)in.aux[1]);
    if ((in.aux[2] >> 8) && std::fabs(v) < 0x1p-126) v = 0;
    v = round_integral(v, (Round)(in.aux[2] & 255));
    int bits = 8 * dt.bytes;
    double lo = dt.sgn ? -std::ldexp(1.0, bits - 1) : 0,
           hi = std::ldexp(1.0, dt.sgn ? bits - 1 : bits);
    uint64_t r;
    if (v != v)
      r = in.aux[1] == (uint32_t)Ty::F64 || bits == 64
              ? 1ull << (bits - 1)
              : 0;  // sm_90: NaN gives 0, or only the top bit where 64 bits are involved
    else if (v < lo)
      r = dt.sgn ? (uint64_t)1 << (bits - 1) : 0;
    else if (v >= hi)
      r = dt.sgn ? ((uint64_t)1 << (bits - 1)) - 1 : bits == 64 ? ~0ull : ((uint64_t)1 << bits) - 1;
    else
      r = dt.sgn ? (uint64_t)(int64_t)v : (uint64_t)v;
    out[i] = dt.sgn ? sign_extend(r, dt.bytes) : (int64_t)truncate(r, dt.bytes);
  }
  put_int(x, in.op[0], out, dt, mask);
}

// Rounds an exact 64-bit integer once to a float format; long double holds it exactly.
uint64_t int_to_float(bool neg, uint64_t mag, Ty t, Round r) {
  const int p = t == Ty::F64 ? 53 : t == Ty::F32 ? 24 : t == Ty::F16 ? 11 : 8;
  int len = mag ? 64 - __builtin_clzll(mag) : 0, drop = len > p ? len - p : 0;
  if (drop) {
    uint64_t rest = mag & ((1ull << drop) - 1), half = 1ull << (drop - 1);
    mag >>= drop;
    bool up = r == Round::RN   ? rest > half || (rest == half && (mag & 1))
              : r == Round::RZ ? false
              : r == Round::RM ? neg && rest
                               : !neg && rest;
    mag += up;
  }
  double v = std::ldexp((double)mag, drop);
  if (neg) v = -v;
  if (t == Ty::F64) return as_bits(v);
  return encode(v, t == Ty::F32 ? kF32 : t == Ty::F16 ? kF16 : kBF16, r, false);
}

void put_float(Exec& x, const Operand& o, const uint64_t* bits, Ty t, uint32_t mask) {
  (void)t;
  put<uint64_t>(x, o, bits, mask);
}

void do_i2f(Exec& x, const Instr& in, uint32_t mask) {
  IntType st = int_type(in.aux[1]);
  uint64_t out[32];
  for (int i = 0; i < 32; ++i) {
    uint64_t raw = src_lane(x, in.op[1], i);
    int64_t s = sign_extend(raw, st.bytes);
    bool neg = st.sgn && s < 0;
    uint64_t mag = st.sgn ? (neg ? 0 - (uint64_t)s : (uint64_t)s) : truncate(raw, st.bytes);
    if (in.aux[3]) mag = neg ? 0 : mag != 0, neg = false;  // .sat: to [0, 1]
    out[i] = int_to_float(neg, mag, (Ty)in.aux[0], (Round)in.aux[2]);
  }
  put_float(x, in.op[0], out, (Ty)in.aux[0], mask);
}

enum F2F : uint32_t { kFtz = 1, kSat = 2, kRelu = 4, kSatFinite = 8, kIntegral = 16 };
// NaNs keep sign and leading payload bits where f64 is involved and from bf16 to f32 (sm_90).
bool nan_payload(uint64_t raw, Ty st, Ty dt, bool fz, uint64_t* out) {
  if (st == Ty::BF16 && dt == Ty::F32) return *out = raw << 16, true;
  if (st != Ty::F64 && dt != Ty::F64) return false;
  if (st == Ty::F32 && fz) raw = kNan32;
  auto bits = [](Ty t) { return t == Ty::F64 ? 64 : t == Ty::F32 ? 32 : 16; };
  auto mant = [](Ty t) { return t == Ty::F64 ? 52 : t == Ty::F32 ? 23 : t == Ty::F16 ? 10 : 7; };
  uint64_t payload = raw << (64 - mant(st)) >> 12 | 1ull << 51;  // as f64, quiet
  uint64_t sign = raw >> (bits(st) - 1) & 1;
  uint64_t exp = (1ull << (bits(dt) - 1)) - (1ull << mant(dt));
  return *out = sign << (bits(dt) - 1) | exp | payload >> (52 - mant(dt)), true;
}
void do_f2f(Exec& x, const Instr& in, uint32_t mask) {  // aux: dst type, src type, rounding, flags
  Ty dt = (Ty)in.aux[0], st = (Ty)in.aux[1];
  Round r = (Round)in.aux[2];
  uint64_t out[32];
  for (int i = 0; i < 32; ++i) {
    double v = load_float(src_lane(x, in.op[1], i), st);
    if (in.aux[3] & kFtz && (st == Ty::F32) && std::fabs(v) < 0x1p-126) v = std::copysign(0.0, v);
    if (in.aux[3] & kIntegral) v = round_integral(v, r);
    if (in.aux[3] & kRelu && v <= 0) v = 0;  // -0 too
    if (v != v && !(in.aux[3] & kSat) &&
        nan_payload(src_lane(x, in.op[1], i), st, dt, in.aux[3] & kFtz, &out[i]))
      continue;
    if (in.aux[3] & kSat) v = v > 0 ? (v < 1 ? v : 1) : 0;
    switch (dt) {
      case Ty::F64:
        out[i] = v != v ? 0x7FFFFFFFFFFFFFFFull : as_bits(v);
        break;
      case Ty::F32: {
        uint32_t b = encode(v, kF32, r, false);
        if (in.aux[3] & kFtz && !(b & 0x7F800000)) b &= 0x80000000;
        out[i] = b;
        break;
      }
      default:
        out[i] = encode(v, dt == Ty::F16 ? kF16 : kBF16, r, in.aux[3] & kSatFinite);
    }
  }
  put_float(x, in.op[0], out, dt, mask);
}

void do_tf32(Exec& x, const Instr& in, uint32_t mask) {
  uint32_t ta[32], out[32];
  const uint32_t* a = src(x, in.op[1], ta);
  for (int i = 0; i < 32; ++i) {
    double v = as_float(a[i]);
    if (in.aux[1] && v <= 0) v = 0;  // -0 too
    out[i] = v != v ? ((Round)in.aux[0] == Round::RNA ? a[i] : kNan32) & ~0x1FFFu
                    : encode(v, kTF32, (Round)in.aux[0], in.aux[2]) << 13;
  }
  put(x, in.op[0], out, mask);
}

void do_pack16(Exec& x, const Instr& in,
               uint32_t mask) {  // aux: bf16?, rounding, relu, satfinite. d = {a: high, b: low}
  float ta[32], tb[32];
  uint32_t out[32];
  const float *a = src(x, in.op[1], ta), *b = src(x, in.op[2], tb);
  const FloatFormat& f = in.aux[0] ? kBF16 : kF16;
  if (in.aux[0] && in.aux[1] == (uint32_t)Round::RN && !in.aux[2] && !in.aux[3]) {
    for (int i = 0; i < 32; ++i) out[i] = (uint32_t)bf16_rn(a[i]) << 16 | bf16_rn(b[i]);
  } else {
    for (int i = 0; i < 32; ++i) {
      float p = a[i], q = b[i];
      if (in.aux[2]) p = p <= 0 ? 0 : p, q = q <= 0 ? 0 : q;
      out[i] = encode(p, f, (Round)in.aux[1], in.aux[3]) << 16 |
               encode(q, f, (Round)in.aux[1], in.aux[3]);
    }
  }
  put(x, in.op[0], out, mask);
}

void do_to_fp8(Exec& x, const Instr& in, uint32_t mask) {  // aux: e5m2?, source is f16x2?, relu
  const FloatFormat& f = in.aux[0] ? kE5M2 : kE4M3;
  uint32_t ta[32], tb[32];
  uint16_t out[32];
  const uint32_t *a = src(x, in.op[1], ta), *b = in.aux[1] ? a : src(x, in.op[2], tb);
  for (int i = 0; i < 32; ++i) {
    double hi = in.aux[1] ? decode((uint16_t)(a[i] >> 16), kF16) : as_float(a[i]);
    double lo = in.aux[1] ? decode((uint16_t)a[i], kF16) : as_float(b[i]);
    if (in.aux[2]) hi = hi <= 0 ? 0 : hi, lo = lo <= 0 ? 0 : lo;
    out[i] = (uint16_t)(encode(hi, f, Round::RN, true) << 8 | encode(lo, f, Round::RN, true));
  }
  put(x, in.op[0], out, mask);
}

void do_from_fp8(Exec& x, const Instr& in, uint32_t mask) {
  const FloatFormat& f = in.aux[0] ? kE5M2 : kE4M3;
  uint16_t ta[32];
  uint32_t out[32];
  const uint16_t* a = src(x, in.op[1], ta);
  for (int i = 0; i < 32; ++i) {
    double hi = decode(a[i] >> 8, f), lo = decode(a[i] & 255, f);
    if (in.aux[1]) hi = hi <= 0 ? 0 : hi, lo = lo <= 0 ? 0 : lo;
    out[i] = encode(hi, kF16, Round::RN, false) << 16 | encode(lo, kF16, Round::RN, false);
  }
  put(x, in.op[0], out, mask);
}

void do_to_ue8m0(Exec& x, const Instr& in,
                 uint32_t mask) {  // aux: source is bf16x2?, up, satfinite
  uint32_t ta[32], tb[32];
  uint16_t out[32];
  const uint32_t *a = src(x, in.op[1], ta), *b = in.aux[0] ? a : src(x, in.op[2], tb);
  for (int i = 0; i < 32; ++i) {
    float hi = in.aux[0] ? as_float(a[i] & 0xFFFF0000) : as_float(a[i]);
    float lo = in.aux[0] ? as_float(a[i] << 16) : as_float(b[i]);
    out[i] = (uint16_t)(encode_ue8m0(hi, in.aux[1], in.aux[2]) << 8 |
                        encode_ue8m0(lo, in.aux[1], in.aux[2]));
  }
  put(x, in.op[0], out, mask);
}

void do_from_ue8m0(Exec& x, const Instr& in, uint32_t mask) {
  uint16_t ta[32];
  uint32_t out[32];
  const uint16_t* a = src(x, in.op[1], ta);
  for (int i = 0; i < 32; ++i)
    out[i] = encode(ue8m0_value(a[i] >> 8), kBF16, Round::RN, false) << 16 |
             encode(ue8m0_value(a[i] & 255), kBF16, Round::RN, false);
  put(x, in.op[0], out, mask);
}

void do_pack_sat(Exec& x, const Instr& in, uint32_t mask) {
  int32_t ta[32], tb[32];
  uint32_t out[32];
  const int32_t *a = src(x, in.op[1], ta), *b = src(x, in.op[2], tb);
  int lo = in.aux[0] ? -32768 : 0, hi = in.aux[0] ? 32767 : 65535;
  auto sat = [&](int v) { return (uint32_t)(v < lo ? lo : v > hi ? hi : v) & 0xFFFF; };
  for (int i = 0; i < 32; ++i) out[i] = sat(a[i]) << 16 | sat(b[i]);
  put(x, in.op[0], out, mask);
}

}  // namespace

ExecFn cvt_int(Decode& d) {
  d.want(2, 2), d.dst(0), d.data(1);
  d.in.aux[0] = (uint32_t)d.type(1);
  d.in.aux[1] = (uint32_t)d.type(0);
  d.in.aux[2] = d.has("sat");
  return &do_int;
}
ExecFn cvt_f2i(Decode& d) {
  d.want(2, 2), d.dst(0), d.data(1);
  d.in.aux[0] = (uint32_t)d.type(1);
  d.in.aux[1] = (uint32_t)d.type(0);
  d.in.aux[2] = (uint32_t)round_of(d) | (d.has("ftz") ? 256 : 0);
  return &do_f2i;
}
ExecFn cvt_i2f(Decode& d) {
  d.want(2, 2), d.dst(0), d.data(1);
  d.in.aux[3] = d.has("sat");
  d.in.aux[0] = (uint32_t)d.type(1);
  d.in.aux[1] = (uint32_t)d.type(0);
  d.in.aux[2] = (uint32_t)round_of(d);
  return &do_i2f;
}
ExecFn cvt_f2f(Decode& d) {
  d.want(2, 2), d.dst(0), d.data(1);
  d.in.aux[0] = (uint32_t)d.type(1);
  d.in.aux[1] = (uint32_t)d.type(0);
  d.in.aux[2] = (uint32_t)round_of(d);
  bool integral = d.has("rni") || d.has("rzi") || d.has("rmi") || d.has("rpi");
  d.in.aux[3] = (d.has("ftz") ? (uint32_t)kFtz : 0u) | (d.has("sat") ? (uint32_t)kSat : 0u) |
                (d.has("relu") ? (uint32_t)kRelu : 0u) |
                (d.has("satfinite") ? (uint32_t)kSatFinite : 0u) |
                (integral ? (uint32_t)kIntegral : 0u);
  return &do_f2f;
}
ExecFn cvt_tf32(Decode& d) {
  d.want(2, 2), d.dst(0), d.data(1);
  d.in.aux[0] = (uint32_t)round_of(d);
  d.in.aux[1] = d.has("relu");
  d.in.aux[2] = d.has("satfinite");
  return &do_tf32;
}
ExecFn cvt_pack16(Decode& d) {
  d.want(3, 3), d.dst(0), d.values(1, 3);
  d.in.aux[0] = d.has("bf16x2");
  d.in.aux[1] = (uint32_t)round_of(d);
  d.in.aux[2] = d.has("relu");
  d.in.aux[3] = d.has("satfinite");
  return &do_pack16;
}
ExecFn cvt_to_fp8(Decode& d) {
  bool half = d.type() == Ty::F16x2;
  d.want(half ? 2 : 3, half ? 2 : 3), d.dst(0), d.values(1, d.ops.size());
  d.in.aux[0] = d.has("e5m2x2");
  d.in.aux[1] = half;
  d.in.aux[2] = d.has("relu");
  return &do_to_fp8;
}
ExecFn cvt_from_fp8(Decode& d) {
  d.want(2, 2), d.dst(0), d.data(1);
  d.in.aux[0] = d.has("e5m2x2");
  d.in.aux[1] = d.has("relu");
  return &do_from_fp8;
}
ExecFn cvt_to_ue8m0(Decode& d) {
  bool half = d.type() == Ty::BF16x2;
  d.want(half ? 2 : 3, half ? 2 : 3), d.dst(0), d.values(1, d.ops.size());
  d.in.aux[0] = half;
  d.in.aux[1] = d.has("rp");
  d.in.aux[2] = d.has("satfinite");
  return &do_to_ue8m0;
}
ExecFn cvt_from_ue8m0(Decode& d) {
  d.want(2, 2), d.dst(0), d.data(1);
  return &do_from_ue8m0;
}
ExecFn cvt_pack_sat(Decode& d) {
  d.want(3, 3), d.dst(0), d.values(1, 3);
  d.in.aux[0] = d.has("s16");
  return &do_pack_sat;
}

}  // namespace flash_attn_mx::emu
