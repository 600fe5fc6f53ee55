// The current stream of a CUDA device, from a library that also loads where torch has no CUDA.
#pragma once

#include <dlfcn.h>

#include <cstdint>

#include <torch/headeronly/util/Exception.h>

namespace flash_attn_mx::ops {

// torch's current CUstream of a device. The function that gives it lies in libtorch_cuda, to which
// this library cannot link; it is in every torch since 2.9 (libtorch_cpu has another way, but only
// since 2.13).
inline void* current_stream(int device) {
  using Getter = int32_t(int32_t, void**);
  static Getter* const getter = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return reinterpret_cast<Getter*>(library ? dlsym(library, "aoti_torch_get_current_cuda_stream")
                                             : nullptr);
  }();
  STD_TORCH_CHECK(getter, "flash_attn_mx: this torch has no CUDA");
  void* stream = nullptr;
  STD_TORCH_CHECK(getter(device, &stream) == 0, "flash_attn_mx: torch has no current stream of ",
                  "device ", device);
  return stream;
}

}  // namespace flash_attn_mx::ops
