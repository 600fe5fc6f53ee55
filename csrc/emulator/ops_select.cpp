// Comparison, selection and moves: setp, set, selp, mov.
#include <algorithm>

#include "isa.h"

namespace flash_attn_mx::emu {
namespace {

enum Cmp { Eq, Ne, Lt, Le, Gt, Ge };
template <class T, int C>
uint32_t compare(const T* a, const T* b) {
  uint32_t m = 0;
  for (int i = 0; i < 32; ++i) {
    bool r = C == Eq   ? a[i] == b[i]
             : C == Ne ? a[i] != b[i]
             : C == Lt ? a[i] < b[i]
             : C == Le ? a[i] <= b[i]
             : C == Gt ? a[i] > b[i]
                       : a[i] >= b[i];
    m |= (uint32_t)r << i;
  }
  return m;
}

template <class T, int C>
void do_setp(Exec& x, const Instr& in, uint32_t mask) {
  T ta[32], tb[32];
  uint32_t r = compare<T, C>(src(x, in.op[1], ta), src(x, in.op[2], tb));
  put_setp(x, in, r, r ^ kFull, mask);
}
template <class T>
ExecFn pick_setp(const std::string& c) {
  if (c == "eq") return &do_setp<T, Eq>;
  if (c == "ne") return &do_setp<T, Ne>;
  if (c == "lt" || c == "lo") return &do_setp<T, Lt>;
  if (c == "le" || c == "ls") return &do_setp<T, Le>;
  if (c == "gt" || c == "hi") return &do_setp<T, Gt>;
  return &do_setp<T, Ge>;
}

void do_set(Exec& x, const Instr& in, uint32_t mask) {
  int64_t a[32], b[32];
  uint32_t out[32];
  for (int i = 0; i < 32; ++i) {
    uint32_t p = (uint32_t)src_lane(x, in.op[1], i), q = (uint32_t)src_lane(x, in.op[2], i);
    a[i] = in.aux[1] ? (int64_t)(int32_t)p : p;
    b[i] = in.aux[1] ? (int64_t)(int32_t)q : q;
    bool r = false;
    switch (in.aux[0]) {
      case Eq:
        r = a[i] == b[i];
        break;
      case Ne:
        r = a[i] != b[i];
        break;
      case Lt:
        r = a[i] < b[i];
        break;
      case Le:
        r = a[i] <= b[i];
        break;
      case Gt:
        r = a[i] > b[i];
        break;
      case Ge:
        r = a[i] >= b[i];
        break;
    }
    out[i] = r ? ~0u : 0;
  }
  put(x, in.op[0], out, mask);
}

template <class T>
void do_selp(Exec& x, const Instr& in, uint32_t mask) {
  T ta[32], tb[32], out[32];
  const T *a = src(x, in.op[1], ta), *b = src(x, in.op[2], tb);
  uint32_t p = pred(x, in.op[3]);
  for (int i = 0; i < 32; ++i) out[i] = p >> i & 1 ? a[i] : b[i];
  put(x, in.op[0], out, mask);
}

template <class T>
void do_mov(Exec& x, const Instr& in, uint32_t mask) {
  T ta[32];
  put(x, in.op[0], src(x, in.op[1], ta), mask);
}
void do_mov_pred(Exec& x, const Instr& in, uint32_t mask) {
  put_pred(x, in.op[0], pred(x, in.op[1]), mask);
}

// {a, b, …} -> d: element 0 is least significant.
void do_pack(Exec& x, const Instr& in, uint32_t mask) {
  const uint32_t n = in.op[1].count, w = in.aux[0];
  U128 out[32] = {};
  for (uint32_t k = 0; k < n; ++k) {
    for (int i = 0; i < 32; ++i) {
      uint64_t v = src_lane(x, in.op[1].sub[k], i);
      std::memcpy(reinterpret_cast<uint8_t*>(&out[i]) + k * w, &v, w);
    }
  }
  if (w * n == 16) return put(x, in.op[0], out, mask);
  if (w * n == 8) {
    uint64_t o[32];
    for (int i = 0; i < 32; ++i) o[i] = out[i].lo;
    return put(x, in.op[0], o, mask);
  }
  uint32_t o[32];
  for (int i = 0; i < 32; ++i) o[i] = (uint32_t)out[i].lo;
  w* n == 4 ? put(x, in.op[0], o, mask) : put(x, in.op[0], reinterpret_cast<uint32_t*>(o), mask);
}

void do_unpack(Exec& x, const Instr& in, uint32_t mask) {
  const uint32_t n = in.op[0].count, w = in.aux[0];
  U128 ta[32];
  const U128* a = src(x, in.op[1], ta);
  U128 copy[32];
  std::memcpy(copy, a, sizeof copy);  // the source may be overwritten by an element
  for (uint32_t k = 0; k < n; ++k) {
    uint64_t o[32];
    for (int i = 0; i < 32; ++i) {
      o[i] = 0;
      std::memcpy(&o[i], reinterpret_cast<const uint8_t*>(&copy[i]) + k * w, w);
    }
    const Operand& dst = in.op[0].sub[k];
    if (dst.kind != Operand::Reg) continue;
    uint8_t* p = x.w->regs.get() + dst.off;
    for (uint32_t b = mask; b; b &= b - 1)
      std::memcpy(p + first_lane(b) * dst.width, &o[first_lane(b)],
                  std::min<uint32_t>(dst.width, 8));
  }
}

// The common case, two 32-bit halves of a 64-bit register.
void do_pack_2x32(Exec& x, const Instr& in, uint32_t mask) {
  uint32_t ta[32], tb[32];
  uint64_t out[32];
  const uint32_t *a = src(x, in.op[1].sub[0], ta), *b = src(x, in.op[1].sub[1], tb);
  for (int i = 0; i < 32; ++i) out[i] = (uint64_t)b[i] << 32 | a[i];
  put(x, in.op[0], out, mask);
}
void do_unpack_2x32(Exec& x, const Instr& in, uint32_t mask) {
  uint64_t ta[32];
  uint32_t lo[32], hi[32];
  const uint64_t* a = src(x, in.op[1], ta);
  for (int i = 0; i < 32; ++i) lo[i] = (uint32_t)a[i], hi[i] = (uint32_t)(a[i] >> 32);
  put(x, in.op[0].sub[0], lo, mask);
  put(x, in.op[0].sub[1], hi, mask);
}

}  // namespace

// setp's two results and its optional combination with a third predicate; used by the float forms
// as well.
void put_setp(Exec& x, const Instr& in, uint32_t p, uint32_t q, uint32_t mask) {
  if (in.nops > 3) {
    uint32_t c = pred(x, in.op[3]);
    if (in.aux[3] == 1) p &= c, q &= c;
    if (in.aux[3] == 2) p |= c, q |= c;
    if (in.aux[3] == 3) p ^= c, q ^= c;
  }
  const Operand& d = in.op[0];
  if (d.kind == Operand::Pair) {
    put_pred(x, d.sub[0], p, mask);
    put_pred(x, d.sub[1], q, mask);
  } else {
    put_pred(x, d, p, mask);
  }
}

void decode_setp(Decode& d) {
  d.want(3, 4);
  if (d.ops[0].kind == Operand::Pair) {
    for (int i = 0; i < 2; ++i)
      if (d.ops[0].sub[i].kind == Operand::Reg && d.ops[0].sub[i].width)
        d.fail("destinations must be predicates");
  } else {
    d.pred_op(0);
  }
  d.values(1, 3);
  d.in.aux[3] = d.has("and") ? 1 : d.has("or") ? 2 : d.has("xor") ? 3 : 0;
  if ((d.in.aux[3] != 0) != (d.ops.size() == 4))
    d.fail("a combining operator and a fourth operand go together");
  if (d.ops.size() == 4) d.pred_op(3);
}

ExecFn setp_int(Decode& d) {
  decode_setp(d);
#define F(T) pick_setp<T>(d.mods[1])
  Ty t = d.type();
  bool unsigned_cmp =
      d.mods[1] == "lo" || d.mods[1] == "ls" || d.mods[1] == "hi" || d.mods[1] == "hs";
  if (unsigned_cmp && is_signed(t)) d.fail("lo/ls/hi/hs need an unsigned type");
  PICK_INT(t, F)
#undef F
}
ExecFn set_int(Decode& d) {
  d.want(3, 3), d.dst(0), d.values(1, 3);
  auto& c = d.mods[1];
  d.in.aux[0] = c == "eq"   ? Eq
                : c == "ne" ? Ne
                : c == "lt" ? Lt
                : c == "le" ? Le
                : c == "gt" ? Gt
                            : Ge;
  d.in.aux[1] = d.type() == Ty::S32;
  return &do_set;
}
ExecFn selp(Decode& d) {
  d.want(4, 4), d.dst(0), d.values(1, 3), d.pred_op(3);
  switch (type_bytes(d.type())) {
    case 2:
      return &do_selp<uint16_t>;
    case 4:
      return &do_selp<uint32_t>;
    default:
      return &do_selp<uint64_t>;
  }
}
ExecFn mov(Decode& d) {
  d.want(2, 2);
  if (d.type() == Ty::Pred) {
    d.pred_op(0), d.pred_op(1);
    return &do_mov_pred;
  }
  uint32_t bytes = type_bytes(d.type());
  if (d.ops[1].kind == Operand::Vec || d.ops[0].kind == Operand::Vec) {
    bool pack = d.ops[1].kind == Operand::Vec;
    size_t v = pack ? 1 : 0;
    d.vec(v, 2, 16);
    uint32_t n = d.ops[v].count;
    if (bytes % n) d.fail("vector does not divide the type");
    d.in.aux[0] = bytes / n;
    for (uint32_t k = 0; k < n; ++k) {
      auto& e = d.ops[v].sub[k];
      if (e.kind == Operand::Reg && e.width != bytes / n)
        d.fail("vector element width does not match");
      if (!pack && e.kind == Operand::Const) d.fail("vector elements must be registers");
    }
    pack ? d.dst(0) : d.data(1);
    if (n == 2 && bytes == 8) return pack ? &do_pack_2x32 : &do_unpack_2x32;
    return pack ? &do_pack : &do_unpack;
  }
  d.dst(0), d.data(1);
  switch (bytes) {
    case 2:
      return &do_mov<uint16_t>;
    case 4:
      return &do_mov<uint32_t>;
    case 8:
      return &do_mov<uint64_t>;
    default:
      return &do_mov<U128>;
  }
}

}  // namespace flash_attn_mx::emu
