// The executor for GPUs: runs launch records through the CUDA driver, which is found at run time
// (libcuda.so.1), so that this library builds and loads where there is none. Every failure is a
// RuntimeError that names the call.
#pragma once

#include <string>

#include "launch.h"

namespace flash_attn_mx::ops::driver {

// Multiprocessors of a device (torch's index).
int multiprocessors(int device);

// Fills in the record's tensor maps.
void encode_maps(LaunchRecord& record);

// Launches on a stream (a CUstream) of the device, from the fat binary at `image`, which is read
// once per process. Never waits for the device; may be captured into a graph.
void launch(LaunchRecord& record, const std::string& image, int device, void* stream);

}  // namespace flash_attn_mx::ops::driver
