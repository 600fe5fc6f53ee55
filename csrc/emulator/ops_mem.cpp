// Loads, stores, atomics, matrix loads and address conversion: everything of the generic proxy that
// touches memory.
#include "mbarrier.h"
#include "numerics.h"
#include "scheduler.h"

namespace flash_attn_mx::emu {
namespace {

void write_lane(Exec& x, const Operand& o, int lane, const uint8_t* p, uint32_t bytes, bool sgn) {
  if (o.kind != Operand::Reg) return;
  uint8_t* q = x.w->regs.get() + o.off + lane * o.width;
  if (o.width == bytes) {
    std::memcpy(q, p, bytes);
    return;
  }
  uint64_t v = 0;
  std::memcpy(&v, p, bytes);
  if (sgn) v = (uint64_t)((int64_t)(v << (64 - 8 * bytes)) >> (64 - 8 * bytes));
  std::memset(q, 0, o.width);
  std::memcpy(q, &v, o.width < 8 ? o.width : 8);
}

// What names a flag: warps may reach one word through shared and through generic addresses.
uint64_t flag_address(Space s, uint64_t a) {
  const bool shared = s == Space::Shared || s == Space::SharedCluster ||
                      (s == Space::Generic && (a & kWinMask) == kWinShared);
  return shared ? (uint32_t)a | kWinShared : a;
}

void do_ld(Exec& x, const Instr& in,
           uint32_t mask) {  // aux: space, element bytes, elements, signed
  const uint32_t eb = in.aux[1], n = in.aux[2];
  const Operand& dst = in.op[0];
  const Operand* elems = dst.kind == Operand::Vec ? dst.sub : &dst;
  uint64_t a[32];
  addresses(x, in.op[1], a);
  const bool strong = x.cl->race && (in.flags & kStrong);
  uint8_t buf[32][64];
  for (uint32_t b = mask; b; b &= b - 1) {
    int l = first_lane(b);
    if (strong) x.cl->race->flag_read(*x.w, flag_address((Space)in.aux[0], a[l]));
    std::memcpy(buf[l], resolve(x, (Space)in.aux[0], a[l], eb * n, Access::Read, l).p, eb * n);
  }
  for (uint32_t b = mask; b; b &= b - 1) {
    int l = first_lane(b);
    for (uint32_t k = 0; k < n; ++k) write_lane(x, elems[k], l, buf[l] + k * eb, eb, in.aux[3]);
  }
  if ((Space)in.aux[0] == Space::Global)
    x.cl->stat_global_ld += (uint64_t)__builtin_popcount(mask) * eb * n;
}

void store_value(Exec& x, const Operand& o, int lane, uint8_t* p, uint32_t bytes) {
  if (o.kind == Operand::Reg && o.width == 16) {
    std::memcpy(p, x.w->regs.get() + o.off + lane * 16, bytes);
  } else if (o.kind == Operand::Sink) {
    std::memset(p, 0, bytes);
  } else {
    uint64_t v = src_lane(x, o, lane);
    std::memset(p, 0, bytes);
    std::memcpy(p, &v, bytes < 8 ? bytes : 8);
  }
}

void do_st(Exec& x, const Instr& in, uint32_t mask) {
  const uint32_t eb = in.aux[1], n = in.aux[2];
  const Operand& v = in.op[1];
  const Operand* elems = v.kind == Operand::Vec ? v.sub : &v;
  uint64_t a[32];
  addresses(x, in.op[0], a);
  ++x.cl->events;
  const bool strong = x.cl->race && (in.flags & kStrong);
  for (uint32_t b = mask; b; b &= b - 1) {
    int l = first_lane(b);
    Ref r = resolve(x, (Space)in.aux[0], a[l], eb * n, Access::Write, l);
    if (strong) x.cl->race->flag_released(*x.w, flag_address((Space)in.aux[0], a[l]));
    if (r.cta && x.cl->pending_reads) check_no_pending_read(*x.cl, *r.cta, r.off, eb * n, "store");
    uint8_t buf[64];
    for (uint32_t k = 0; k < n; ++k) store_value(x, elems[k], l, buf + k * eb, eb);
    std::memcpy(r.p, buf, eb * n);
  }
  if ((Space)in.aux[0] == Space::Global)
    x.cl->stat_global_st += (uint64_t)__builtin_popcount(mask) * eb * n;
}

enum AtomOp : uint32_t { kAnd, kOr, kXor, kExch, kAdd, kInc, kDec, kMin, kMax, kCas };

template <class T>
T int_atom(uint32_t op, T old, T b, T c) {
  using Un = std::make_unsigned_t<T>;
  switch (op) {
    case kAnd:
      return old & b;
    case kOr:
      return old | b;
    case kXor:
      return old ^ b;
    case kExch:
      return b;
    case kAdd:
      return (T)((Un)old + (Un)b);
    case kInc:
      return (Un)old >= (Un)b ? 0 : old + 1;
    case kDec:
      return old == 0 || (Un)old > (Un)b ? b : old - 1;
    case kMin:
      return old < b ? old : b;
    case kMax:
      return old > b ? old : b;
    default:
      return old == b ? c : old;
  }
}
double float_atom(uint32_t op, double old, double b) {
  if (op == kAdd) return add_round_odd(old, b);
  if (op == kMin || op == kMax) {
    if (old != old || b != b) return old != old ? b : old;
    if (old == b) return std::signbit(old) == (op == kMin) ? old : b;  // -0 < +0
    return (old < b) == (op == kMin) ? old : b;
  }
  return b;
}

uint64_t half_atom(uint32_t op, uint64_t old, uint64_t b, const FloatFormat& f, int n) {
  uint64_t r = 0;
  for (int h = 0; h < n; ++h)
    r |= (uint64_t)encode(float_atom(op, decode((uint16_t)(old >> 16 * h), f),
                                     decode((uint16_t)(b >> 16 * h), f)),
                          f, Round::RN, false)
         << 16 * h;
  return r;
}
}  // namespace

// One element of an atomic or reduction. Also what TMA reductions apply.
uint64_t atomic_value(uint32_t op, Ty t, uint64_t old, uint64_t b, uint64_t c) {
  switch (t) {
    case Ty::S32:
      return (uint32_t)int_atom<int32_t>(op, (int32_t)old, (int32_t)b, (int32_t)c);
    case Ty::S64:
      return (uint64_t)int_atom<int64_t>(op, (int64_t)old, (int64_t)b, (int64_t)c);
    case Ty::U64:
    case Ty::B64:
      return int_atom<uint64_t>(op, old, b, c);
    case Ty::F32:
      if (op == kAdd) {
        float y = as_float((uint32_t)old) + as_float((uint32_t)b);
        return y != y ? kNan32 : as_bits(y);
      }
      if (op == kExch) return (uint32_t)b;
      return as_bits((float)float_atom(op, as_float((uint32_t)old), as_float((uint32_t)b)));
    case Ty::F64:
      return op == kAdd ? as_bits(as_double(old) + as_double(b))
                        : as_bits(float_atom(op, as_double(old), as_double(b)));
    case Ty::F16:
      return half_atom(op, old, b, kF16, 1);
    case Ty::F16x2:
      return half_atom(op, old, b, kF16, 2);
    case Ty::BF16:
      return half_atom(op, old, b, kBF16, 1);
    case Ty::BF16x2:
      return half_atom(op, old, b, kBF16, 2);
    case Ty::B16:
      return (uint16_t)int_atom<uint16_t>(op, (uint16_t)old, (uint16_t)b, (uint16_t)c);
    default:
      return int_atom<uint32_t>(op, (uint32_t)old, (uint32_t)b, (uint32_t)c);
  }
}

uint32_t atomic_op(const Decode& d) {
  static const char* const k[] = {"and", "or",  "xor", "exch", "add",
                                  "inc", "dec", "min", "max",  "cas"};
  for (uint32_t i = 0; i < 10; ++i)
    if (d.has(k[i])) return i;
  d.fail("no operation");
}

namespace {
void do_atom(Exec& x, const Instr& in,
             uint32_t mask) {  // aux: space | red << 8, operation, type, elements
  const bool red = in.aux[0] >> 8;
  const Space sp = (Space)(in.aux[0] & 255);
  const Ty t = (Ty)in.aux[2];
  const uint32_t eb = type_bytes(t), n = in.aux[3];
  const Operand& mem = in.op[red ? 0 : 1];
  const Operand& vb = in.op[red ? 1 : 2];
  const Operand* elems = vb.kind == Operand::Vec ? vb.sub : &vb;
  uint64_t a[32];
  addresses(x, mem, a);
  ++x.cl->events;
  const bool flag = x.cl->race && !is_float(t);  // nobody counts arrivals in floats
  std::unique_lock<std::mutex> lock(x.m->atomics, std::defer_lock);
  if (sp == Space::Global || sp == Space::Generic) lock.lock();
  for (uint32_t b = mask; b; b &= b - 1) {
    int l = first_lane(b);
    Ref r = resolve(x, sp, a[l], eb * n, Access::Atomic, l);
    if (flag) {
      const uint64_t f = flag_address(sp, a[l]);
      if (!red) x.cl->race->flag_read(*x.w, f);
      x.cl->race->flag_released(*x.w, f);
    }
    for (uint32_t k = 0; k < n; ++k) {
      uint64_t old = 0, v = src_lane(x, elems[k], l),
               c = in.nops > 3 && in.aux[1] == kCas ? src_lane(x, in.op[3], l) : 0;
      std::memcpy(&old, r.p + k * eb, eb);
      if (eb < 8) v &= (1ull << 8 * eb) - 1;
      // add.f32 on global memory flushes subnormals; on shared memory, and in bulk copies, it does not
      const bool fz = t == Ty::F32 && in.aux[1] == kAdd && sp == Space::Global;
      auto flush = [fz](uint64_t u) { return fz && !(u & 0x7F800000) ? u & 0x80000000 : u; };
      uint64_t nv = flush(atomic_value(in.aux[1], t, flush(old), flush(v), c));
      std::memcpy(r.p + k * eb, &nv, eb);
      if (!red) write_lane(x, in.op[0], l, reinterpret_cast<uint8_t*>(&old), eb, is_signed(t));
    }
  }
}

void do_ldmatrix(Exec& x, const Instr& in, uint32_t mask) {  // aux: matrices, trans
  (void)mask;
  const uint32_t n = in.aux[0];
  const Operand& dst = in.op[0];
  const Operand* elems = dst.kind == Operand::Vec ? dst.sub : &dst;
  uint64_t a[32];
  addresses(x, in.op[1], a);
  uint16_t rows[4][8][8];
  for (uint32_t i = 0; i < 8 * n; ++i)
    std::memcpy(rows[i / 8][i % 8], resolve(x, Space::Shared, a[i], 16, Access::Read, (int)i).p,
                16);
  for (uint32_t k = 0; k < n; ++k) {
    uint32_t out[32];
    for (int t = 0; t < 32; ++t) {
      int r = t / 4, c = 2 * (t % 4);
      out[t] = in.aux[1] ? (uint32_t)rows[k][c + 1][r] << 16 | rows[k][c][r]
                         : (uint32_t)rows[k][r][c + 1] << 16 | rows[k][r][c];
    }
    put(x, elems[k], out, kFull);
  }
}

void do_stmatrix(Exec& x, const Instr& in, uint32_t mask) {
  (void)mask;
  const uint32_t n = in.aux[0];
  const Operand& v = in.op[1];
  const Operand* elems = v.kind == Operand::Vec ? v.sub : &v;
  uint64_t a[32];
  addresses(x, in.op[0], a);
  ++x.cl->events;
  for (uint32_t k = 0; k < n; ++k) {
    uint16_t rows[8][8];
    for (int t = 0; t < 32; ++t) {
      uint32_t w = (uint32_t)src_lane(x, elems[k], t);
      int r = t / 4, c = 2 * (t % 4);
      if (in.aux[1])
        rows[c][r] = (uint16_t)w, rows[c + 1][r] = (uint16_t)(w >> 16);
      else
        rows[r][c] = (uint16_t)w, rows[r][c + 1] = (uint16_t)(w >> 16);
    }
    for (uint32_t i = 0; i < 8; ++i) {
      Ref r = resolve(x, Space::Shared, a[8 * k + i], 16, Access::Write, (int)(8 * k + i));
      if (x.cl->pending_reads) check_no_pending_read(*x.cl, *r.cta, r.off, 16, "stmatrix");
      std::memcpy(r.p, rows[i], 16);
    }
  }
}

uint64_t window(Space s) {
  return s == Space::Shared || s == Space::SharedCluster ? kWinShared
         : s == Space::Local                             ? kWinLocal
         : s == Space::Param                             ? kWinParam
                                                         : 0;
}

void do_cvta(Exec& x, const Instr& in, uint32_t mask) {  // aux: space, to
  uint64_t ta[32], out[32];
  const uint64_t* a = src(x, in.op[1], ta);
  const uint64_t win = window((Space)in.aux[0]);
  for (int i = 0; i < 32; ++i)
    out[i] = !win ? a[i] : in.aux[1] ? (a[i] & 0xFFFFFFFFull) : ((a[i] & 0xFFFFFFFFull) | win);
  put(x, in.op[0], out, mask);
}

void do_isspacep(Exec& x, const Instr& in, uint32_t mask) {
  uint64_t ta[32];
  const uint64_t* a = src(x, in.op[1], ta);
  uint32_t r = 0;
  const Space s = (Space)in.aux[0];
  for (int i = 0; i < 32; ++i) {
    bool hit = (a[i] & kWinMask) == window(s);
    if (s == Space::Shared) hit &= ((uint32_t)a[i] >> 24) == x.cta->rank;
    if (s == Space::Const) hit = false;
    r |= (uint32_t)hit << i;
  }
  put_pred(x, in.op[0], r, mask);
}

void do_mapa(Exec& x, const Instr& in, uint32_t mask) {
  uint64_t ta[32], out[32];
  uint32_t tb[32];
  const uint64_t* a = src(x, in.op[1], ta);
  const uint32_t* b = src(x, in.op[2], tb);
  for (int i = 0; i < 32; ++i) {
    if (mask >> i & 1 && b[i] >= x.cl->ctas.size())
      throw Fault("bounds",
                  "mapa to CTA rank " + std::to_string(b[i]) + " of a cluster of " +
                      std::to_string(x.cl->ctas.size()),
                  i);
    out[i] = (a[i] & ~0xFF000000ull) | (uint64_t)b[i] << 24;
  }
  put(x, in.op[0], out, mask);
}

void do_getctarank(Exec& x, const Instr& in, uint32_t mask) {
  uint64_t ta[32];
  uint32_t out[32];
  const uint64_t* a = src(x, in.op[1], ta);
  for (int i = 0; i < 32; ++i) out[i] = (uint32_t)a[i] >> 24;
  put(x, in.op[0], out, mask);
}

void do_createpolicy(Exec& x, const Instr& in, uint32_t mask) {
  uint64_t out[32] = {};
  put(x, in.op[0], out, mask);
}

void do_st_async(Exec& x, const Instr& in, uint32_t mask) {  // aux: element bytes, elements
  const Operand& v = in.op[1];
  const Operand* elems = v.kind == Operand::Vec ? v.sub : &v;
  const uint32_t eb = in.aux[0], n = in.aux[1];
  for (uint32_t b = mask; b; b &= b - 1) {
    int l = first_lane(b);
    Ref dst = shared_ref(*x.cl, shared_addr(x, in.op[0], l), eb * n, "st.async");
    Ref bar = shared_ref(*x.cl, shared_addr(x, in.op[2], l), 8, "st.async mbarrier");
    std::vector<uint8_t> buf(eb * n);
    for (uint32_t k = 0; k < n; ++k) store_value(x, elems[k], l, buf.data() + k * eb, eb);
    AsyncOp op;
    op.origin = where(x);
    op.bytes = (uint32_t)buf.size();
    Snapshot from;
    if (Race* race = x.cl->race.get()) {
      race->shared(*dst.cta, dst.off, eb * n,
                   race->copy(*x.w, *bar.cta, bar.off, in.line, "st.async"), true);
      from = race->snapshot(*x.w, false);
    }
    op.run = [cl = x.cl, dst, bar, buf, from] {
      std::memcpy(dst.p, buf.data(), buf.size());
      mark_written(*dst.cta, dst.off, (uint32_t)buf.size());
      MbarChange c;
      c.complete_tx = (int64_t)buf.size();
      mbar_apply(*cl, bar, c, from.get());
    };
    submit(x, std::move(op));
  }
}

bool is_strong(const Decode& d) {
  return d.has("volatile") || d.has("relaxed") || d.has("acquire") || d.has("release");
}

uint32_t vector_len(const Decode& d) {
  return d.has("v2") ? 2 : d.has("v4") ? 4 : d.has("v8") ? 8 : 1;
}

}  // namespace

ExecFn ld(Decode& d) {
  d.want(2, 3), d.mem(1);
  uint32_t n = vector_len(d), eb = type_bytes(d.type());
  if (n > 1)
    d.vec(0, n, n);
  else
    d.dst(0);
  Space s = space_of(d);
  if (n * eb > 32 || (n * eb == 32 && s != Space::Global)) d.fail("vector too wide");
  if (d.ops[1].has_space && d.ops[1].space == Space::Local && s == Space::Param)
    s = Space::Local;  // call-site .param
  if (s == Space::Const) s = Space::Global;
  d.in.aux[0] = (uint32_t)s;
  d.in.aux[1] = eb;
  d.in.aux[2] = n;
  d.in.aux[3] = is_signed(d.type());
  if (is_strong(d)) d.in.flags |= kStrong;
  return &do_ld;
}
ExecFn st(Decode& d) {
  d.want(2, 3), d.mem(0);
  uint32_t n = vector_len(d), eb = type_bytes(d.type());
  if (n > 1)
    d.vec(1, n, n);
  else
    d.data(1);
  Space s = space_of(d);
  if (n * eb > 32 || (n * eb == 32 && s != Space::Global)) d.fail("vector too wide");
  if (s == Space::Param) s = Space::Local;
  d.in.aux[0] = (uint32_t)s;
  d.in.aux[1] = eb;
  d.in.aux[2] = n;
  if (is_strong(d)) d.in.flags |= kStrong;
  return &do_st;
}
ExecFn atom(Decode& d) {
  bool red = d.mods[0] == "red";
  d.want(red ? 2 : 3, 5), d.mem(red ? 0 : 1);
  if (!red) d.dst(0);
  uint32_t n = vector_len(d);
  if (n > 1)
    d.vec(red ? 1 : 2, n, n);
  else
    d.data(red ? 1 : 2);
  d.in.aux[0] = (uint32_t)space_of(d) | (red ? 256u : 0u);
  d.in.aux[1] = atomic_op(d);
  d.in.aux[2] = (uint32_t)d.type();
  d.in.aux[3] = n;
  if (d.in.aux[1] == kCas) d.data(3);
  return &do_atom;
}
ExecFn ldmatrix(Decode& d) {
  d.want(2, 2), d.mem(1);
  d.in.aux[0] = d.has("x1") ? 1 : d.has("x2") ? 2 : 4;
  d.in.aux[1] = d.has("trans");
  if (d.ops[0].kind == Operand::Vec || d.in.aux[0] > 1)
    d.vec(0, d.in.aux[0], d.in.aux[0]);
  else
    d.dst(0);
  return &do_ldmatrix;
}
ExecFn stmatrix(Decode& d) {
  d.want(2, 2), d.mem(0);
  d.in.aux[0] = d.has("x1") ? 1 : d.has("x2") ? 2 : 4;
  d.in.aux[1] = d.has("trans");
  if (d.ops[1].kind == Operand::Vec || d.in.aux[0] > 1)
    d.vec(1, d.in.aux[0], d.in.aux[0]);
  else
    d.data(1);
  return &do_stmatrix;
}
ExecFn cvta(Decode& d) {
  d.want(2, 2), d.dst(0), d.data(1);
  d.in.aux[0] = (uint32_t)space_of(d);
  d.in.aux[1] = d.has("to");
  return &do_cvta;
}
ExecFn isspacep(Decode& d) {
  d.want(2, 2), d.pred_op(0), d.data(1);
  d.in.aux[0] = (uint32_t)space_of(d);
  return &do_isspacep;
}
ExecFn mapa(Decode& d) {
  d.want(3, 3), d.dst(0), d.values(1, 3);
  return &do_mapa;
}
ExecFn getctarank(Decode& d) {
  d.want(2, 2), d.dst(0), d.data(1);
  return &do_getctarank;
}
ExecFn createpolicy(Decode& d) {
  d.want(1, 2), d.dst(0);
  return &do_createpolicy;
}
ExecFn st_async(Decode& d) {
  d.want(3, 3), d.mem(0), d.mem(2);
  uint32_t n = vector_len(d);
  if (n > 1)
    d.vec(1, n, n);
  else
    d.data(1);
  d.in.aux[0] = type_bytes(d.type());
  d.in.aux[1] = n;
  return &do_st_async;
}

}  // namespace flash_attn_mx::emu
