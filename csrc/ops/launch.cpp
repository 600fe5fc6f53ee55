#include "launch.h"

#include <sstream>

namespace flash_attn_mx::ops {
namespace {

template <class T, size_t N>
void put_list(std::ostream& out, const char* name, const T (&values)[N]) {
  out << ", \"" << name << "\": [";
  for (size_t i = 0; i < N; ++i) out << (i ? ", " : "") << values[i];
  out << "]";
}

void put_map(std::ostream& out, const TensorMapTiled& map) {
  out << "{\"name\": \"" << map.name << "\", \"offset\": " << map.offset
      << ", \"address\": " << reinterpret_cast<uintptr_t>(map.address);
  put_list(out, "sizes", map.sizes);
  put_list(out, "strides_bytes", map.strides_bytes);
  put_list(out, "box", map.box);
  out << ", \"swizzle_bytes\": " << map.swizzle_bytes << "}";
}

void put_record(std::ostream& out, const LaunchRecord& record) {
  static constexpr char kHex[] = "0123456789abcdef";
  out << "{\"kernel\": \"" << record.kernel << "\", \"grid\": " << record.grid
      << ", \"cluster\": " << record.cluster << ", \"block\": " << record.block
      << ", \"smem_bytes\": " << record.smem_bytes << ", \"maps\": [";
  for (size_t i = 0; i < record.maps.size(); ++i) {
    if (i) out << ", ";
    put_map(out, record.maps[i]);
  }
  out << "], \"params\": \"";
  for (const uint8_t byte : record.params) out << kHex[byte >> 4] << kHex[byte & 15];
  out << "\"}";
}

}  // namespace

std::string to_json(const std::vector<LaunchRecord>& records) {
  std::ostringstream out;
  out << "[";
  for (size_t i = 0; i < records.size(); ++i) {
    if (i) out << ", ";
    put_record(out, records[i]);
  }
  out << "]";
  return out.str();
}

}  // namespace flash_attn_mx::ops
