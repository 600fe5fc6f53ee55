#include "tensormap.h"

#include <cstring>

namespace flash_attn_mx::emu {
namespace {
constexpr uint32_t kMagic = 0x584D4146;  // "FAMX"
// Codes in the descriptor's flags differ from the driver's enumeration for these.
const uint8_t kToHw[] = {0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 8, 11, 12, 13, 14, 15};
const uint8_t kFromHw[] = {0, 1, 2, 3, 4, 5, 6, 7, 10, 8, 9, 11, 12, 13, 14, 15};
}  // namespace

uint32_t TensorMap::elem_bits() const {
  static const uint8_t k[] = {8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 4, 6};
  return dtype < sizeof k ? k[dtype] : 8;
}

namespace {
// What the packed 4- and 6-bit types ask for beyond the rest; dimension 0 counts elements.
std::string validate_packed(const TensorMap& t) {
  auto s = [](uint64_t v) { return std::to_string(v); };
  for (uint32_t d = 0; d < t.rank; ++d)
    if (t.estride[d] != 1) return "packed types need element strides of 1";
  if (!t.padded())
    return t.dims[0] & 1 ? "dimension 0 = " + s(t.dims[0]) + " is odd, with 4-bit elements" : "";
  if (t.address & 31) return "global address is not a multiple of 32, as padded types need";
  if (t.dims[0] & 127)
    return "dimension 0 = " + s(t.dims[0]) + " is not a multiple of 128, as padded types need";
  if (t.box[0] != 128) return "box 0 = " + s(t.box[0]) + " is not 128, as padded types need";
  for (uint32_t d = 1; d < t.rank; ++d)
    if (t.strides[d] & 31)
      return "stride " + s(d) + " = " + s(t.strides[d]) +
             " is not a multiple of 32, as padded types need";
  if (t.swizzle && t.swizzle < 3) return "padded types need no swizzle or one of 128 bytes";
  return "";
}
}  // namespace

std::string validate(const TensorMap& t) {
  auto s = [](uint64_t v) { return std::to_string(v); };
  if (t.rank < 1 || t.rank > 5) return "rank " + s(t.rank) + " is not 1..5";
  if (t.dtype > 15) return "unknown data type " + s(t.dtype);
  if (t.interleave) return "interleaved layouts are not supported";
  if (t.swizzle > 6) return "unknown swizzle " + s(t.swizzle);
  if (t.swizzle == 5) return "swizzle 128B_ATOM_32B_FLIP_8B is not supported";
  if (t.oob > 1) return "unknown out-of-bounds fill " + s(t.oob);
  if (t.oob == 1 && !(t.dtype >= 6 && t.dtype <= 12)) return "NaN fill needs a floating-point type";
  if (t.address & 15) return "global address is not a multiple of 16";
  if (t.dtype > 12) {
    const std::string why = validate_packed(t);
    if (!why.empty()) return why;
  }
  for (uint32_t d = 0; d < t.rank; ++d) {
    if (t.dims[d] < 1 || t.dims[d] > 1ull << 32)
      return "dimension " + s(d) + " = " + s(t.dims[d]) + " is not 1..2^32";
    if (t.box[d] < 1 || t.box[d] > 256)
      return "box " + s(d) + " = " + s(t.box[d]) + " is not 1..256";
    if (t.estride[d] < 1 || t.estride[d] > 8)
      return "element stride " + s(d) + " = " + s(t.estride[d]) + " is not 1..8";
    if (d && (t.strides[d] & 15 || t.strides[d] >= 1ull << 40))
      return "stride " + s(d) + " = " + s(t.strides[d]) + " is not a multiple of 16 below 2^40";
  }
  if (t.box[0] * t.elem_bits() % 128)
    return "box 0 of " + s(t.box[0] * t.elem_bits()) + " bits is not a multiple of 16 bytes";
  static const uint32_t kSpan[] = {0, 32, 64, 128, 128, 128, 128};
  const uint32_t row = t.box[0] / t.chunk_elems() * 16;  // bytes of shared memory
  if (t.swizzle && row > kSpan[t.swizzle])
    return "box 0 of " + s(row) + " bytes exceeds the swizzle span of " + s(kSpan[t.swizzle]);
  return "";
}

void encode_map(const TensorMap& t, uint8_t out[128]) {
  std::memset(out, 0, 128);
  std::memcpy(out, &t.address, 8);
  uint32_t flags = (t.rank - 1) << 4 | (uint32_t)kToHw[t.dtype] << 7 | t.interleave << 11 |
                   (t.swizzle & 7) << 13 | t.oob << 16 | (t.swizzle ? 0x240000u : 0x40000u);
  std::memcpy(out + 8, &flags, 4);
  uint32_t high = 0;
  for (uint32_t d = 1; d < t.rank; ++d) {
    uint64_t s = t.strides[d] >> 4;
    uint32_t lo = (uint32_t)s;
    std::memcpy(out + 12 + 4 * (d - 1), &lo, 4);
    high |= (uint32_t)(s >> 32 & 15) << (4 * (d - 1));
  }
  std::memcpy(out + 28, &high, 4);
  uint32_t es = 0;
  for (uint32_t d = 0; d < 5; ++d) {
    uint32_t n = d < t.rank ? (uint32_t)(t.dims[d] - 1) : 0;
    std::memcpy(out + 32 + 4 * d, &n, 4);
    es |= (d < t.rank ? t.estride[d] - 1 : 0) << (3 * d);
    out[55 + d] = (uint8_t)(d < t.rank ? t.box[d] - 1 : 0);
  }
  std::memcpy(out + 52, &es, 2);
  std::memcpy(out + 64, &kMagic, 4);
  out[68] = (uint8_t)t.dtype, out[69] = (uint8_t)t.swizzle, out[70] = (uint8_t)t.interleave,
  out[71] = (uint8_t)t.oob, out[72] = (uint8_t)t.l2promo;
}

bool decode_map(const uint8_t in[128], TensorMap* t, std::string* why) {
  uint32_t flags, high, magic;
  uint16_t es;
  std::memcpy(&t->address, in, 8);
  std::memcpy(&flags, in + 8, 4);
  std::memcpy(&high, in + 28, 4);
  std::memcpy(&es, in + 52, 2);
  std::memcpy(&magic, in + 64, 4);
  t->rank = (flags >> 4 & 7) + 1;
  if (t->rank > 5) return *why = "rank field is " + std::to_string(t->rank), false;
  if (magic == kMagic) {
    t->dtype = in[68], t->swizzle = in[69], t->interleave = in[70], t->oob = in[71],
    t->l2promo = in[72];
  } else {
    uint32_t hw = flags >> 7 & 15;
    if (hw >= sizeof kFromHw) return *why = "element type code is " + std::to_string(hw), false;
    t->dtype = kFromHw[hw];
    t->interleave = flags >> 11 & 3;
    t->swizzle = flags >> 13 & 7;
    t->oob = flags >> 16 & 1;
  }
  t->strides[0] = t->elem_bytes();
  for (uint32_t d = 0; d < 5; ++d) {
    uint32_t n, s = 0;
    std::memcpy(&n, in + 32 + 4 * d, 4);
    t->dims[d] = d < t->rank ? (uint64_t)n + 1 : 1;
    t->box[d] = d < t->rank ? in[55 + d] + 1u : 1;
    t->estride[d] = d && d < t->rank ? (es >> (3 * d) & 7) + 1u : 1;
    if (d && d < t->rank) {
      std::memcpy(&s, in + 12 + 4 * (d - 1), 4);
      t->strides[d] = ((uint64_t)(high >> (4 * (d - 1)) & 15) << 32 | s) << 4;
    }
  }
  *why = validate(*t);
  return why->empty();
}

}  // namespace flash_attn_mx::emu
