// A CUDA runtime that has no GPU: kernels run in the emulator, device memory is host memory. It
// lets a compiled CUDA program (CUTLASS examples) run and check itself unmodified. Only what such
// programs call is here.
#include <driver_types.h>  // types only: cudaDeviceProp

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "../../csrc/emulator/isa.h"
#include "../../csrc/emulator/scheduler.h"
#include "../../csrc/emulator/tensormap.h"

using namespace flash_attn_mx::emu;

namespace {

struct Dim3 {
  unsigned x, y, z;
};
struct Function {
  int image;
  std::string name;
};
std::vector<std::unique_ptr<ModuleData>> images;
std::map<const void*, Function> functions;
std::map<std::string, std::unique_ptr<Program>> programs;
struct Allocation {
  uint64_t size, number;
};
std::map<uint64_t, Allocation> allocations;
uint64_t allocated = 0;

[[noreturn]] void die(const std::string& w) {
  std::fprintf(stderr, "cudart_shim: %s\n", w.c_str());
  std::exit(3);
}

// Options come by environment: SHIM_ORDER (eager, delayed, random), SHIM_SEED, SHIM_OFF=NAME,NAME (checks that do not run; "all": each
// that can be off), SHIM_DUMP=DIR (device memory after each launch, one file per live allocation, named by its number).
std::string option(const char* name, const char* otherwise) {
  const char* v = std::getenv(name);
  return v ? v : otherwise;
}

void switch_off(Checks& c, std::string names) {
  const std::pair<const char*, bool Checks::*> known[] = {{"uninit", &Checks::uninit},
                                                          {"proxy", &Checks::proxy},
                                                          {"leaks", &Checks::leaks},
                                                          {"async", &Checks::async_overlap},
                                                          {"replicas", &Checks::replicas},
                                                          {"race", &Checks::race},
                                                          {"lap", &Checks::lap}};
  for (size_t end; !names.empty(); names.erase(0, end + 1)) {
    end = std::min(names.find(','), names.size() - 1);
    const std::string name = names.substr(0, names.find(','));
    bool found = false;
    for (auto& [n, field] : known)
      if (name == n || name == "all") c.*field = false, found = true;
    if (!found) die("SHIM_OFF: no check " + name);
  }
}

// SHIM_EDIT changes the PTX to show what a finding in it amounts to (docs/notes/emulator.md). "wait_st": a tcgen05.wait::st after
// every tcgen05.st. "no_dealloc": no tcgen05.dealloc.
std::string edited(const std::string& ptx) {
  const std::string edit = option("SHIM_EDIT", "");
  if (edit.empty()) return ptx;
  const bool wait = edit == "wait_st";
  if (!wait && edit != "no_dealloc") die("unknown SHIM_EDIT " + edit);
  const std::string at = wait ? "tcgen05.st." : "tcgen05.dealloc.";
  std::string out;
  for (size_t from = 0;;) {
    const size_t begin = ptx.find(at, from), end = ptx.find(';', begin);
    if (begin == std::string::npos || end == std::string::npos) return out + ptx.substr(from);
    out += wait ? ptx.substr(from, end + 1 - from) + "tcgen05.wait::st.sync.aligned;"
                : ptx.substr(from, begin - from);
    from = end + 1;
  }
}

// The PTX inside a fat binary: a header (magic, version, header size, size), then entries; kind 1
// is PTX text.
std::string ptx_of(const void* wrapper) {
  const uint8_t* p;
  std::memcpy(&p, static_cast<const uint8_t*>(wrapper) + 8, 8);
  uint16_t header;
  uint64_t size;
  std::memcpy(&header, p + 6, 2);
  std::memcpy(&size, p + 8, 8);
  const uint8_t* end = p + header + size;
  for (const uint8_t* e = p + header; e < end;) {
    uint16_t kind;
    uint32_t eh;
    uint64_t n;
    std::memcpy(&kind, e, 2);
    std::memcpy(&eh, e + 4, 4);
    std::memcpy(&n, e + 8, 8);
    if (kind == 1)
      return std::string(reinterpret_cast<const char*>(e + eh),
                         strnlen(reinterpret_cast<const char*>(e + eh), n));
    e += eh + n;
  }
  die("no PTX in the fat binary (compile with code=compute_100a and --no-compress)");
}

void dump(const std::string& dir) {
  for (auto& [address, a] : allocations) {
    const std::string path = dir + "/" + std::to_string(a.number);
    std::FILE* out = std::fopen(path.c_str(), "wb");
    if (!out || std::fwrite(reinterpret_cast<void*>(address), 1, a.size, out) != a.size)
      die("cannot write " + path);
    std::fclose(out);
  }
}

int launch(const void* f, const uint32_t* grid, const uint32_t* block, const uint32_t* cluster,
           void** args, size_t smem) {
  auto it = functions.find(f);
  if (it == functions.end()) die("launch of an unknown kernel");
  ModuleData& mod = *images[it->second.image];
  auto& prog = programs[it->second.name];
  try {
    if (!prog)
      for (auto& k : mod.raw->kernels)
        if (k->is_entry && k->name == it->second.name) prog = compile_kernel(mod, *k);
    if (!prog) die("no kernel " + it->second.name);
    Machine m;
    m.prog = prog.get();
    for (int d = 0; d < 3; ++d)
      m.opt.grid[d] = grid[d], m.opt.block[d] = block[d],
      m.opt.cluster[d] = cluster[d] ? cluster[d] : 1;
    m.opt.dynamic_smem = (uint32_t)smem;
    m.opt.threads = 2;
    const std::string order = option("SHIM_ORDER", "eager");
    m.opt.order = order == "random"    ? Order::Random
                  : order == "delayed" ? Order::Delayed
                                       : Order::Eager;
    m.opt.seed = std::stoull(option("SHIM_SEED", "0"));
    switch_off(m.opt.checks, option("SHIM_OFF", ""));
    if (option("SHIM_EDIT", "") == "no_dealloc") m.opt.checks.leaks = false;
    m.params.resize(prog->param_bytes);
    for (size_t i = 0; i < prog->params.size(); ++i)
      std::memcpy(m.params.data() + prog->params[i].offset, args[i], prog->params[i].size);
    m.buffers = mod.buffers;
    for (auto& a : allocations) {
      Buffer b;
      b.base = a.first, b.size = a.second.size, b.name = "cudaMalloc";
      m.buffers.push_back(b);
    }
    std::sort(m.buffers.begin(), m.buffers.end(),
              [](const Buffer& a, const Buffer& b) { return a.base < b.base; });
    const auto start = std::chrono::steady_clock::now();
    RunResult r = run_machine(m);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    for (auto& o : r.output) std::fputs(o.c_str(), stdout);
    if (!r.error.empty()) die(r.error);
    std::fprintf(stderr, "cudart_shim: %.100s: %llu warp instructions, %llu MMAs, %.3f s\n",
                 prog->name.c_str(), (unsigned long long)r.insns, (unsigned long long)r.mma,
                 seconds.count());
    const std::string dir = option("SHIM_DUMP", "");
    if (!dir.empty()) dump(dir);
  } catch (const std::exception& e) {
    die(e.what());
  }
  return 0;
}

struct Config {
  Dim3 grid, block;
  size_t smem;
  void* stream;
};
std::vector<Config> configs;

// CUresult cuTensorMapEncodeTiled(...)
int encode_tiled(void* map, int dtype, unsigned rank, void* address, const uint64_t* dims,
                 const uint64_t* strides, const uint32_t* box, const uint32_t* es, int interleave,
                 int swizzle, int l2, int oob) {
  TensorMap t;
  t.rank = rank, t.dtype = (uint32_t)dtype, t.address = reinterpret_cast<uint64_t>(address);
  t.interleave = (uint32_t)interleave, t.swizzle = (uint32_t)swizzle, t.l2promo = (uint32_t)l2,
  t.oob = (uint32_t)oob;
  if (rank < 1 || rank > 5) return 1;
  for (unsigned d = 0; d < rank; ++d)
    t.dims[d] = dims[d], t.box[d] = box[d], t.estride[d] = es[d],
    t.strides[d] = d ? strides[d - 1] : t.elem_bytes();
  std::string why = validate(t);
  if (!why.empty()) {
    std::fprintf(stderr, "cudart_shim: cuTensorMapEncodeTiled: %s\n", why.c_str());
    return 1;
  }
  encode_map(t, static_cast<uint8_t*>(map));
  return 0;
}

struct LaunchConfig {  // cudaLaunchConfig_t
  Dim3 grid, block;
  size_t smem;
  void* stream;
  struct Attr {
    int id;
    char pad[4];
    unsigned value[16];
  }* attrs;
  unsigned n;
};

}  // namespace

#define API extern "C" __attribute__((visibility("default")))
API void** __cudaRegisterFatBinary(void* w) {
  try {
    images.push_back(load_module(edited(ptx_of(w))));
  } catch (const std::exception& e) {
    die(e.what());
  }
  return reinterpret_cast<void**>(images.size());
}
API void __cudaRegisterFatBinaryEnd(void**) {}
API void __cudaUnregisterFatBinary(void**) {}
API void __cudaRegisterFunction(void** h, const char* host, char*, const char* name, int, void*,
                                void*, void*, void*, int*) {
  functions[host] = {(int)(reinterpret_cast<uint64_t>(h) - 1), name};
}
API void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
API unsigned __cudaPushCallConfiguration(Dim3 g, Dim3 b, size_t smem, void* s) {
  return configs.push_back({g, b, smem, s}), 0;
}
API int __cudaPopCallConfiguration(Dim3* g, Dim3* b, size_t* smem, void* s) {
  Config c = configs.back();
  configs.pop_back();
  *g = c.grid, *b = c.block, *smem = c.smem;
  std::memcpy(s, &c.stream, 8);
  return 0;
}
API int __cudaGetKernel(const void** k, const void* f) { return *k = f, 0; }
API int __cudaLaunchKernel(const void* f, Dim3 g, Dim3 b, void** args, size_t smem, void*) {
  uint32_t one[3] = {1, 1, 1};
  return launch(f, &g.x, &b.x, one, args, smem);
}
API int cudaLaunchKernel(const void* f, Dim3 g, Dim3 b, void** args, size_t smem, void* s) {
  return __cudaLaunchKernel(f, g, b, args, smem, s);
}
API int cudaLaunchKernelExC(const LaunchConfig* c, const void* f, void** args) {
  uint32_t cluster[3] = {1, 1, 1};
  for (unsigned i = 0; i < c->n; ++i)
    if (c->attrs[i].id == 4)
      std::memcpy(cluster, c->attrs[i].value, 12);  // cudaLaunchAttributeClusterDimension
  return launch(f, &c->grid.x, &c->block.x, cluster, args, c->smem);
}
API int cudaMalloc(void** p, size_t n) {
  *p = std::aligned_alloc(1024, (n + 1023) & ~(size_t)1023);
  std::memset(*p, 0xCB, n);
  allocations[reinterpret_cast<uint64_t>(*p)] = {n, allocated++};
  return 0;
}
API int cudaFree(void* p) {
  allocations.erase(reinterpret_cast<uint64_t>(p));
  std::free(p);
  return 0;
}
API int cudaMemcpyAsync(void* d, const void* s, size_t n, int, void*) {
  return std::memmove(d, s, n), 0;
}
API int cudaMemcpy(void* d, const void* s, size_t n, int) { return std::memmove(d, s, n), 0; }
API int cudaMemset(void* d, int v, size_t n) { return std::memset(d, v, n), 0; }
API int cudaMemsetAsync(void* d, int v, size_t n, void*) { return std::memset(d, v, n), 0; }
API int cudaDeviceSynchronize() { return 0; }
API int cudaEventCreate(void** e) { return *e = nullptr, 0; }
API int cudaEventDestroy(void*) { return 0; }
API int cudaEventRecord(void*, void*) { return 0; }
API int cudaEventSynchronize(void*) { return 0; }
API int cudaEventElapsedTime(float* ms, void*, void*) { return *ms = 1, 0; }
API int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* n, const void*, int, size_t,
                                                               unsigned) {
  return *n = 1, 0;
}
API int cudaStreamSynchronize(void*) { return 0; }
API int cudaFuncSetAttribute(const void*, int, int) { return 0; }
API int cudaFuncGetAttributes(
    void* a,
    const void*) {  // ptxVersion and binaryVersion follow sizes and counts; thrust reads both
  std::memset(a, 0, 64);
  int v[4] = {1024, 64, 100, 100};
  std::memcpy(static_cast<char*>(a) + 24, v, sizeof v);
  return 0;
}
API int cudaGetDevice(int* d) { return *d = 0, 0; }
API int cudaSetDevice(int) { return 0; }
API int cudaGetDeviceCount(int* n) { return *n = 1, 0; }
API int cudaGetLastError() { return 0; }
API int cudaPeekAtLastError() { return 0; }
API const char* cudaGetErrorString(int) { return "cudart_shim"; }
API const char* cudaGetErrorName(int) { return "cudart_shim"; }
extern "C" __attribute__((visibility("default"))) cudaError_t
cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  std::memset(p, 0, sizeof *p);
  std::strcpy(p->name, "sm_100a emulator");
  p->major = 10, p->multiProcessorCount = 148, p->warpSize = 32, p->sharedMemPerBlockOptin = 232448,
  p->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
API int cudaDeviceGetAttribute(int* v, int a, int) {
  *v = a == 16 ? 148 : a == 75 ? 10 : a == 76 ? 0 : a == 97 ? 232448 : a == 10 ? 32 : 1;
  return 0;
}
API int cudaGetDriverEntryPointByVersion(const char* name, void** f, unsigned, unsigned long long,
                                         int* status) {
  if (std::strcmp(name, "cuTensorMapEncodeTiled")) die(std::string("driver function ") + name);
  *f = reinterpret_cast<void*>(&encode_tiled);
  if (status) *status = 0;
  return 0;
}
