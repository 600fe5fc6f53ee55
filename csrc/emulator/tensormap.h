// The 128-byte tensor map. The first 64 bytes follow what CuTe DSL builds on the host (read off
// captured descriptors: rank, dims, strides, box, swizzle and common types are confirmed, the rest
// is ours); bytes 64.. keep the encoder's arguments.
#pragma once

#include <cstdint>
#include <string>

namespace flash_attn_mx::emu {

struct TensorMap {
  uint64_t address = 0;
  uint32_t rank = 1;
  uint32_t dtype = 0;  // CUtensorMapDataType
  uint64_t dims[5] = {1, 1, 1, 1, 1};
  uint64_t strides[5] = {0, 0, 0, 0, 0};  // bytes; [0] is the element size
  uint32_t box[5] = {1, 1, 1, 1, 1};
  uint32_t estride[5] = {1, 1, 1, 1, 1};
  uint32_t interleave = 0, swizzle = 0, l2promo = 0, oob = 0;
  uint32_t elem_bits() const;
  uint32_t elem_bytes() const { return elem_bits() / 8; }  // 0 for the packed types
  bool padded() const { return dtype == 14 || dtype == 15; }
  // Elements in 16 bytes of shared memory, and the bytes that they take in global memory: in the
  // padded types 16 elements of 4 or 6 bits lie at the start of each 16 bytes.
  uint32_t chunk_elems() const { return padded() ? 16 : 128 / elem_bits(); }
  uint64_t global_bytes(uint64_t elems) const { return elems * elem_bits() / 8; }
  uint32_t box_elems(int d) const { return (box[d] + estride[d] - 1) / estride[d]; }
  uint64_t box_count() const {
    uint64_t n = 1;
    for (uint32_t d = 0; d < rank; ++d) n *= box_elems((int)d);
    return n;
  }
  uint64_t box_bytes() const { return box_count() / chunk_elems() * 16; }  // of shared memory
  // What a load adds to its mbarrier: without padding, as CUTLASS and DeepGEMM expect it.
  uint64_t tx_bytes() const { return global_bytes(box_count()); }
};

// The error rules of cuTensorMapEncodeTiled; empty when the arguments are legal.
std::string validate(const TensorMap& t);
void encode_map(const TensorMap& t, uint8_t out[128]);
// False (with a reason) if the bytes are no tensor map.
bool decode_map(const uint8_t in[128], TensorMap* t, std::string* why);

// Byte address after swizzling; applies to absolute shared addresses.
inline uint32_t swizzle_address(uint32_t a, uint32_t mode) {
  switch (mode) {
    case 1:
      return a ^ ((a >> 7 & 1) << 4);
    case 2:
      return a ^ ((a >> 7 & 3) << 4);
    case 3:
      return a ^ ((a >> 7 & 7) << 4);
    case 4:
    case 5:
      return a ^ ((a >> 7 & 3) << 5);
    case 6:
      return a ^ ((a >> 7 & 1) << 6);
    default:
      return a;
  }
}

}  // namespace flash_attn_mx::emu
