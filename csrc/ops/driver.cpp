#include "driver.h"

#include <dlfcn.h>

#include <array>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <tuple>

#include <torch/headeronly/util/Exception.h>

namespace flash_attn_mx::ops::driver {
namespace {

// --- the little of cuda.h that is used here; its ABI is stable ---

using CUresult = int;
using CUdevice = int;
struct CUctx;
struct CUlib;
struct CUkern;
constexpr CUresult kSuccess = 0;
constexpr int kFuncMaxDynamicSmem = 8;
constexpr int kDeviceMultiprocessors = 16, kDeviceMajor = 75, kDeviceMinor = 76;
constexpr int kCaptureRelaxed = 2;
constexpr unsigned kAttributeCluster = 4;
constexpr int kMapUint8 = 0, kMapInterleaveNone = 0, kMapPromoteL2_256B = 3, kMapFillZero = 0;
constexpr int kMapSwizzle32B = 1, kMapSwizzle64B = 2, kMapSwizzle128B = 3;

struct CUlaunchAttribute {
  unsigned id;
  char pad[4];
  union {
    char bytes[64];
    struct {
      unsigned x, y, z;
    } cluster;
  } value;
};

struct CUlaunchConfig {
  unsigned grid[3], block[3], smem_bytes;
  void* stream;
  CUlaunchAttribute* attributes;
  unsigned attribute_count;
};

struct alignas(128) CUtensorMap {
  uint8_t bytes[128];
};

// --- finding it ---

struct Api {
  CUresult (*Init)(unsigned);
  CUresult (*GetErrorName)(CUresult, const char**);
  CUresult (*GetErrorString)(CUresult, const char**);
  CUresult (*DeviceGet)(CUdevice*, int);
  CUresult (*DeviceGetAttribute)(int*, int, CUdevice);
  CUresult (*DevicePrimaryCtxRetain)(CUctx**, CUdevice);
  CUresult (*CtxPushCurrent)(CUctx*);
  CUresult (*CtxPopCurrent)(CUctx**);
  CUresult (*ThreadExchangeStreamCaptureMode)(int*);
  CUresult (*LibraryLoadData)(CUlib**, const void*, int*, void**, unsigned, int*, void**, unsigned);
  CUresult (*LibraryGetKernel)(CUkern**, CUlib*, const char*);
  CUresult (*KernelSetAttribute)(int, int, CUkern*, CUdevice);
  CUresult (*LaunchKernelEx)(const CUlaunchConfig*, CUkern*, void**, void**);
  CUresult (*TensorMapEncodeTiled)(CUtensorMap*, int, uint32_t, const void*, const uint64_t*,
                                   const uint64_t*, const uint32_t*, const uint32_t*, int, int, int,
                                   int);
};

template <class Function>
void find(void* library, const char* symbol, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, symbol));
  STD_TORCH_CHECK(function, "flash_attn_mx: the CUDA driver has no ", symbol,
                  "; a driver for CUDA 12.8 or later is needed");
}

Api load_api() {
  void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  const char* reason = library ? nullptr : dlerror();
  STD_TORCH_CHECK(library, "flash_attn_mx: no CUDA driver: ", reason ? reason : "libcuda.so.1");
  Api api;
  find(library, "cuInit", api.Init);
  find(library, "cuGetErrorName", api.GetErrorName);
  find(library, "cuGetErrorString", api.GetErrorString);
  find(library, "cuDeviceGet", api.DeviceGet);
  find(library, "cuDeviceGetAttribute", api.DeviceGetAttribute);
  find(library, "cuDevicePrimaryCtxRetain", api.DevicePrimaryCtxRetain);
  find(library, "cuCtxPushCurrent_v2", api.CtxPushCurrent);
  find(library, "cuCtxPopCurrent_v2", api.CtxPopCurrent);
  find(library, "cuThreadExchangeStreamCaptureMode", api.ThreadExchangeStreamCaptureMode);
  find(library, "cuLibraryLoadData", api.LibraryLoadData);
  find(library, "cuLibraryGetKernel", api.LibraryGetKernel);
  find(library, "cuKernelSetAttribute", api.KernelSetAttribute);
  find(library, "cuLaunchKernelEx", api.LaunchKernelEx);
  find(library, "cuTensorMapEncodeTiled", api.TensorMapEncodeTiled);
  return api;
}

const Api& api() {
  static const Api found = load_api();  // tried again by the next call if it throws
  return found;
}

void check(CUresult result, const char* call, const std::string& detail) {
  if (result == kSuccess) return;
  const char *name = nullptr, *text = nullptr;
  api().GetErrorName(result, &name);
  api().GetErrorString(result, &text);
  STD_TORCH_CHECK(false, "flash_attn_mx: ", call, " (", detail, "): ", name ? name : "CUDA error",
                  " = ", result, ", ", text ? text : "unknown");
}

// --- devices ---

struct Device {
  CUdevice handle;
  CUctx* context;  // the primary one, which is torch's; kept for the life of the process
  int multiprocessors, major, minor;
};

Device open_device(int index) {
  const std::string name = "device " + std::to_string(index);
  Device d;
  check(api().Init(0), "cuInit", name);
  check(api().DeviceGet(&d.handle, index), "cuDeviceGet", name);
  const auto attribute = [&](int* value, int which) {
    check(api().DeviceGetAttribute(value, which, d.handle), "cuDeviceGetAttribute", name);
  };
  attribute(&d.multiprocessors, kDeviceMultiprocessors);
  attribute(&d.major, kDeviceMajor);
  attribute(&d.minor, kDeviceMinor);
  check(api().DevicePrimaryCtxRetain(&d.context, d.handle), "cuDevicePrimaryCtxRetain", name);
  return d;
}

const Device& device_at(int index) {
  static std::mutex mutex;
  static std::map<int, Device> devices;  // a node never moves
  const std::lock_guard<std::mutex> lock(mutex);
  const auto known = devices.find(index);
  return known != devices.end() ? known->second
                                : devices.emplace(index, open_device(index)).first->second;
}

// The primary context is current in this scope: a thread that has not used CUDA yet has none.
class CurrentContext {
 public:
  explicit CurrentContext(const Device& device) {
    check(api().CtxPushCurrent(device.context), "cuCtxPushCurrent", "the primary context");
  }
  ~CurrentContext() {
    CUctx* popped;
    api().CtxPopCurrent(&popped);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
};

// Loading code is forbidden while a stream of this thread is captured, unless the mode is relaxed.
class RelaxedCapture {
 public:
  RelaxedCapture() { exchange(); }
  ~RelaxedCapture() { api().ThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  void exchange() {
    check(api().ThreadExchangeStreamCaptureMode(&mode_), "cuThreadExchangeStreamCaptureMode",
          "relaxed");
  }
  int mode_ = kCaptureRelaxed;
};

// --- code ---

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  STD_TORCH_CHECK(file, "flash_attn_mx: cannot read the device code ", path);
  return {std::istreambuf_iterator<char>(file), {}};
}

// As check; says too what the kernel needs and what the device is, the usual reason of a failure.
void check_kernel(CUresult result, const char* call, const std::string& kernel,
                  const Device& device) {
  if (result == kSuccess) return;
  check(result, call,
        kernel + ", built for capability 10.x, on a device of capability " +
            std::to_string(device.major) + "." + std::to_string(device.minor));
}

CUkern* load_kernel(const LaunchRecord& record, const std::string& image, const Device& device) {
  const std::string code = read_file(image);
  CUlib* library;
  check_kernel(
      api().LibraryLoadData(&library, code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
      "cuLibraryLoadData", record.kernel, device);
  CUkern* kernel;
  check_kernel(api().LibraryGetKernel(&kernel, library, record.kernel.c_str()),
               "cuLibraryGetKernel", record.kernel, device);
  return kernel;
}

// The kernel, loaded once per process and ready on the device for the record's shared memory.
CUkern* kernel_for(const LaunchRecord& record, const std::string& image, const Device& device) {
  static std::mutex mutex;
  static std::map<std::pair<std::string, std::string>, CUkern*> kernels;
  static std::set<std::tuple<CUkern*, CUdevice, uint32_t>> ready;
  const std::lock_guard<std::mutex> lock(mutex);
  CUkern*& kernel = kernels[{image, record.kernel}];
  if (kernel && ready.count({kernel, device.handle, record.smem_bytes})) return kernel;
  const RelaxedCapture relaxed;
  if (!kernel) kernel = load_kernel(record, image, device);
  const int bytes = static_cast<int>(record.smem_bytes);
  check_kernel(api().KernelSetAttribute(kFuncMaxDynamicSmem, bytes, kernel, device.handle),
               "cuKernelSetAttribute", record.kernel, device);
  ready.emplace(kernel, device.handle, record.smem_bytes);
  return kernel;
}

}  // namespace

int multiprocessors(int device) { return device_at(device).multiprocessors; }

void encode_maps(LaunchRecord& record) {
  constexpr uint32_t kRank = TensorMapTiled::kRank;
  const uint32_t ones[kRank] = {1, 1, 1, 1};
  for (const TensorMapTiled& map : record.maps) {
    CUtensorMap encoded;
    const int swizzle = map.swizzle_bytes == 32   ? kMapSwizzle32B
                        : map.swizzle_bytes == 64 ? kMapSwizzle64B
                                                  : kMapSwizzle128B;
    check(api().TensorMapEncodeTiled(&encoded, kMapUint8, kRank, map.address, map.sizes,
                                     map.strides_bytes, map.box, ones, kMapInterleaveNone, swizzle,
                                     kMapPromoteL2_256B, kMapFillZero),
          "cuTensorMapEncodeTiled", record.kernel + ", " + map.name);
    std::memcpy(record.params.data() + map.offset, encoded.bytes, sizeof(encoded.bytes));
  }
}

void launch(LaunchRecord& record, const std::string& image, int device_index, void* stream) {
  if (record.grid == 0) return;
  const Device& device = device_at(device_index);
  const CurrentContext current(device);
  CUkern* kernel = kernel_for(record, image, device);
  encode_maps(record);
  CUlaunchAttribute cluster = {};
  cluster.id = kAttributeCluster;
  cluster.value.cluster = {record.cluster, 1, 1};
  const CUlaunchConfig config = {
      {record.grid, 1, 1}, {record.block, 1, 1}, record.smem_bytes, stream, &cluster, 1};
  void* arguments[] = {record.params.data()};
  check_kernel(api().LaunchKernelEx(&config, kernel, arguments, nullptr), "cuLaunchKernelEx",
               record.kernel, device);
}

}  // namespace flash_attn_mx::ops::driver
