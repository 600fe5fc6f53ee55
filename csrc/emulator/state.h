// All execution state: Machine (one launch) > Cluster > Cta > Warp > Group (lanes that share a
// program counter). Nothing here is global; clusters share only the Machine's read-only part,
// global memory and its atomics lock.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "ptx.h"
#include "race.h"
#include "tmem.h"

namespace flash_attn_mx::emu {

struct Exec;
struct Instr;
using ExecFn = void (*)(Exec&, const Instr&, uint32_t mask);

constexpr uint32_t kFull = 0xFFFFFFFFu;
constexpr uint32_t kSmemBase =
    1024;  // the system reserves the first 1 KiB of a CTA's shared memory
// Generic windows lie above any host address; low 32 bits are the address in the space, so
// truncation works as on hardware.
constexpr uint64_t kWinShared = 0x01ull << 56, kWinLocal = 0x02ull << 56, kWinParam = 0x03ull << 56,
                   kWinMask = 0xFFull << 56;

// A fault raised while executing; the run loop adds kernel, line, cluster/CTA/warp and operand
// values.
struct Fault : std::runtime_error {
  Fault(std::string check, const std::string& what, int lane = -1)
      : std::runtime_error(what), check(std::move(check)), lane(lane) {}
  std::string check;
  int lane;
};

// A constant operand, broadcast once so that reading it costs what reading a register does.
struct alignas(32) ConstLanes {
  uint64_t u64[32];
  uint32_t u32[32];
  uint16_t u16[32];
  uint8_t u8[32];
};

extern const ConstLanes kZeroLanes;  // what an operand without a value reads as

struct Operand {
  enum Kind : uint8_t { None, Reg, Const, Vec, Mem, Pair, Sink, Label, Func } kind = None;
  uint8_t width = 0;             // Reg: bytes per lane, 0 = predicate
  bool neg = false;              // '!'
  Space space = Space::Generic;  // Mem with a symbol base: where that symbol lives
  bool has_space = false;
  uint16_t count = 0;                 // Vec, Mem, Pair: sub operands
  uint32_t off = 0;                   // Reg: byte offset in the register file
  const Operand* sub = nullptr;       // Vec elements; Mem: base then the rest
  const ConstLanes* c = &kZeroLanes;  // Const
  int64_t imm = 0;                    // Const: value; Mem: displacement
  const char* name = "";              // register or symbol name, for messages
};

struct Instr {
  ExecFn fn = nullptr;
  const Operand* op = nullptr;
  uint8_t nops = 0;
  uint8_t flags = 0;
  uint16_t form = 0;  // row of isa.def
  bool guarded = false, guard_neg = false;
  uint32_t guard_off = 0;
  int32_t target = -1;
  int32_t line = 0;
  uint32_t aux[4] = {0, 0, 0, 0};  // meaning belongs to the decoder that set fn
  uint32_t ld_regs = 0;   // Program::ld_regs: registers of tcgen05.ld that it writes or uses
  const char* text = "";  // opcode as written
};
// Strong: atomic, volatile, relaxed …; TmemLd: tcgen05.ld.
enum InstrFlags : uint8_t { kReadsClock = 1, kLinked = 2, kStrong = 4, kTmemLd = 8 };

enum class Why : uint8_t {
  Run,
  Mbarrier,
  NamedBarrier,
  ClusterBarrier,
  Converge,
  BulkGroup,
  CpAsync,
  TmemAlloc,
  TmemPair,
  Yield,
  Registers
};

// Lanes of one warp with a common pc. Groups run lowest pc first, which reconverges PTX as its
// compiler laid it out.
struct Group {
  uint32_t pc = 0;
  uint32_t mask = 0;
  Why why = Why::Run;
  bool arrived = false;            // this instruction's arrival was counted; only the wait is left
  bool timed_out = false;          // the scheduler ended a try_wait: it must return false
  uint64_t key = 0, want = 0;      // for reports: barrier address or id, phase or count
  const uint64_t* poll = nullptr;  // still blocked while (*poll & poll_mask) == poll_val
  uint64_t poll_mask = 0, poll_val = 0;
  struct {  // for the trace: since when it is blocked (time + 1; 0: it is not), and on what
    uint64_t since = 0, key = 0, want = 0;
    Why why = Why::Run;
  } waits;
};

struct Warp;

struct AsyncOp {
  enum Kind : uint8_t { Tc, Dma, CpAsync, TmemSt } kind = Dma;  // all but Dma are in order per warp
  std::function<void()> run;
  std::string origin;  // "line 12 tcgen05.mma…", for reports
  struct Range {
    uint32_t cta, lo, hi;  // shared bytes that it still reads
  };
  std::vector<Range> reads;
  // Harmless if its CTA exits before it: a commit; a copy out of shared memory, which is finished
  // before another CTA gets that memory (measured on an H200: tests/emulator/probe_exit_stores.py).
  bool may_outlive = false;
  // For the trace; submit() fills in all but bytes.
  uint32_t bytes = 0;
  const Instr* in = nullptr;
  const Warp* warp = nullptr;
  uint64_t issued = 0;
};

// One bar of a trace. Times are warp instructions that the cluster has executed.
struct TraceEvent {
  enum Kind : uint8_t { Wait, Issue, Async } kind = Wait;
  Why why = Why::Run;                  // Wait
  AsyncOp::Kind agent = AsyncOp::Dma;  // Issue, Async
  uint16_t warp = 0;                   // that waits or issued it
  uint32_t cluster = 0, cta = 0, bytes = 0;
  const Instr* in = nullptr;
  uint64_t begin = 0, end = 0, key = 0, want = 0;  // key, want: as in Group
};

struct BulkGroups {  // per thread: bulk_group bookkeeping; values = operations not yet performed
  std::shared_ptr<int> open = std::make_shared<int>(0);
  bool any_open = false;
  std::deque<std::shared_ptr<int>> committed;
  // Of committed groups that no wait has covered (race.h); of the newest ones, whatever a kernel commits and never waits for.
  static constexpr size_t kMostStamps = 65536;
  std::deque<uint32_t> stamps;
  void stamp(uint32_t s) {
    stamps.push_back(s);
    if (stamps.size() > kMostStamps) stamps.pop_front();
  }
  uint32_t covered(size_t keep) {  // by a wait that leaves `keep` groups: the newest stamp
    uint32_t last = 0;
    for (; stamps.size() > keep; stamps.pop_front()) last = stamps.front();
    return last;
  }
};

struct Cta;
struct Cluster;
struct Machine;

struct Warp {
  Cta* cta = nullptr;
  int id = 0;
  uint32_t live = 0;  // lanes that have not exited
  std::unique_ptr<uint8_t, void (*)(void*)> regs{nullptr, std::free};
  std::vector<uint8_t> local;  // lane-major
  std::vector<Group> groups;
  size_t cur = 0;
  uint32_t split_slices = 0;    // slices in a row with more than one group
  std::deque<AsyncOp> tmem_st;  // tcgen05.st not yet waited for: in order
  std::unordered_map<int, BulkGroups> bulk,
      cpasync;  // by lane; cpasync uses lane 0 for the whole warp
  uint64_t executed = 0;
  uint32_t registers = 0;  // per lane, of the CTA's pool (setmaxnreg)
  uint64_t
      cluster_gen[32];  // barrier.cluster generation of each lane's arrival, ~0 = none outstanding
  uint64_t stuck_state = 0;  // a state that it was in, while nothing happened in its cluster
  bool came_back = false;    // to that
  uint32_t cc = 0;           // carry flag of add.cc and its like, bit per lane
};

struct NamedBarrier {
  uint64_t gen = 0;
  uint32_t arrived = 0, expected = 0;
  uint32_t whole = 0;  // warps of which all lanes have arrived, bit per warp
  uint32_t red_and = 1, red_or = 0, red_pop = 0;  // barrier.red of the running and last generation
  uint32_t out_and = 0, out_or = 0, out_pop = 0;
  Known acc, done;  // of those who arrived, and of the last generation
};

struct MbarInfo {
  int line = 0;
};

struct Cta {
  Cluster* cluster = nullptr;
  uint32_t rank = 0;
  uint32_t ctaid[3] = {0, 0, 0};
  uint32_t smem_bytes = 0;  // static + dynamic, from kSmemBase
  std::vector<uint8_t> smem;
  std::vector<uint64_t> written;  // bit per byte of smem; empty when the check is off
  Tmem tmem;
  NamedBarrier bars[16];
  std::vector<std::unique_ptr<Warp>> warps;
  std::unordered_map<uint32_t, MbarInfo> mbars;
  int live_warps = 0;
  uint32_t free_registers = 0;  // per lane of a warp, given back by setmaxnreg.dec
  uint64_t registers_gen = 0;   // changes when some are
  uint64_t exited_lanes = 0;
  std::vector<std::deque<AsyncOp>> tc;  // tcgen05 mma, cp and commit: in order per issuing warp
  std::vector<uint16_t> read_count;     // per 16 bytes: queued operations that still read them
};

struct Cluster {
  Machine* m = nullptr;
  uint32_t id = 0;
  uint32_t cid[3] = {0, 0, 0};
  std::vector<std::unique_ptr<Cta>> ctas;
  std::vector<AsyncOp> dma;                  // TMA and bulk copies: unordered
  std::vector<std::deque<AsyncOp>> cpasync;  // per warp (cta * warps + warp): in order
  uint64_t rng = 0;
  uint64_t events = 0;  // anything that could unblock somebody
  uint64_t barrier_gen = 0;
  uint32_t barrier_arrived = 0;     // lanes
  std::vector<uint64_t> executed;   // per instruction of the program
  std::vector<std::string> output;  // printf
  uint64_t output_bytes = 0, output_dropped = 0;
  bool tracing = false;
  std::vector<TraceEvent> trace;
  uint64_t trace_dropped = 0;
  uint64_t stat_mma = 0, stat_mma_flop = 0, stat_tma_load = 0, stat_tma_store = 0,
           stat_global_ld = 0, stat_global_st = 0, stat_waits = 0, stat_insn = 0;
  uint64_t stuck_rounds = 0;  // in which waits gave up and nothing else happened
  uint64_t idle_passes = 0;
  uint64_t phase_flips = 0;  // mbarrier phases that ended
  bool clc_failed = false;
  std::unique_ptr<Race> race;  // null: none of its checks is on

  uint64_t random() {  // splitmix64: deterministic per (seed, cluster)
    uint64_t z = (rng += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  size_t pending_reads = 0;  // queued AsyncOps that still read shared memory
  size_t pending() const;
};

struct Buffer {
  uint64_t base = 0, size = 0;
  bool readonly = false;
  std::string name;
  std::vector<uint64_t> written;  // bit per byte; empty = contents are defined
};

enum class Order : uint8_t { Eager, Delayed, Random };
enum class MmaMode : uint8_t { Model, Fp64 };

struct Checks {
  bool uninit = true, proxy = true, tmem = true, leaks = true, async_overlap = true, align = true,
       replicas = true, race = true, lap = true, ptx = false;
};

struct Program;

struct Options {
  uint32_t grid[3] = {1, 1, 1}, cluster[3] = {1, 1, 1}, block[3] = {1, 1, 1};
  uint32_t dynamic_smem = 0;
  Order order = Order::Eager;
  MmaMode mma = MmaMode::Model;
  uint64_t seed = 0;
  int threads = 1;
  double timeout_s = 600;
  uint64_t memory = 8ull << 30;       // bytes of all resident clusters
  uint64_t stack = 512u << 10;        // bytes of local memory per thread
  uint64_t trace_events = 0;          // of one cluster; 0: no trace
  uint64_t printf_bytes = 1u << 20;   // per cluster
  std::function<bool()> interrupted;  // asked now and then by the calling thread: stop?
  uint32_t registers = 0;             // per thread at launch: what setmaxnreg divides
  Checks checks;
};

struct Machine {
  const Program* prog = nullptr;
  Options opt;
  std::vector<uint8_t> params;
  std::vector<Buffer> buffers;  // sorted by base
  std::mutex atomics;
  std::atomic<bool> stop{false};
  std::atomic<uint32_t> next_cluster{0};
  uint32_t num_clusters = 1, resident = 1;  // resident: per worker
  std::mutex error_lock;
  std::string error;
  std::chrono::steady_clock::time_point deadline;
  std::thread::id caller;
};

struct Exec {
  Machine* m = nullptr;
  Cluster* cl = nullptr;
  Cta* cta = nullptr;
  Warp* w = nullptr;
  Group* g = nullptr;
  const Instr* in = nullptr;
  enum Ctl : uint8_t { Next, Block, Branch, Exit } ctl = Next;
  uint32_t taken = 0;  // Branch: lanes that go to the target
  // Branch of a call or ret: where to, and the other lanes execute the instruction again.
  bool stay = false;
  uint32_t to = 0;

  // Suspends the group at this instruction; it is executed again when *poll changes (or on every
  // pass, if null).
  void block(Why why, uint64_t key, uint64_t want, const uint64_t* poll = nullptr,
             uint64_t mask = ~0ull) {
    ctl = Block;
    g->why = why;
    g->key = key;
    g->want = want;
    g->poll = poll;
    g->poll_mask = mask;
    g->poll_val = poll ? *poll & mask : 0;
  }
};

// ---- operand access
// -------------------------------------------------------------------------------------------------
struct U128 {
  uint64_t lo, hi;
};

template <class T>
inline const T* const_lanes(const ConstLanes* c) {
  if constexpr (sizeof(T) == 8)
    return reinterpret_cast<const T*>(c->u64);
  else if constexpr (sizeof(T) == 4)
    return reinterpret_cast<const T*>(c->u32);
  else if constexpr (sizeof(T) == 2)
    return reinterpret_cast<const T*>(c->u16);
  else
    return reinterpret_cast<const T*>(c->u8);
}

inline uint64_t lane_bits(const uint8_t* p, uint8_t width, int lane) {
  switch (width) {
    case 1:
      return p[lane];
    case 2:
      return reinterpret_cast<const uint16_t*>(p)[lane];
    case 4:
      return reinterpret_cast<const uint32_t*>(p)[lane];
    case 8:
      return reinterpret_cast<const uint64_t*>(p)[lane];
    default:
      return reinterpret_cast<const U128*>(p)[lane].lo;
  }
}

// 32 lanes of an operand as T. A wider register gives its low bits, a narrower one is
// zero-extended.
template <class T>
inline const T* src(const Exec& x, const Operand& o, T* scratch) {
  if (o.kind == Operand::Reg) {
    const uint8_t* p = x.w->regs.get() + o.off;
    if (o.width == sizeof(T)) return reinterpret_cast<const T*>(p);
    for (int i = 0; i < 32; ++i) {
      uint64_t v = lane_bits(p, o.width, i);
      std::memcpy(&scratch[i], &v, sizeof(T) < 8 ? sizeof(T) : 8);
      if constexpr (sizeof(T) == 16) std::memset(reinterpret_cast<char*>(&scratch[i]) + 8, 0, 8);
    }
    return scratch;
  }
  if constexpr (sizeof(T) == 16) {
    for (int i = 0; i < 32; ++i)
      std::memset(&scratch[i], 0, 16), std::memcpy(&scratch[i], &o.c->u64[i], 8);
    return scratch;
  } else {
    return const_lanes<T>(o.c);
  }
}

inline uint64_t src_lane(const Exec& x, const Operand& o, int lane) {
  if (o.kind == Operand::Reg) return lane_bits(x.w->regs.get() + o.off, o.width, lane);
  return o.c->u64[lane];
}

inline uint32_t pred(const Exec& x, const Operand& o) {
  uint32_t v;
  if (o.kind == Operand::Reg)
    v = *reinterpret_cast<const uint32_t*>(x.w->regs.get() + o.off);
  else
    v = o.imm ? kFull : 0;
  return o.neg ? ~v : v;
}

inline void put_pred(const Exec& x, const Operand& o, uint32_t v, uint32_t mask) {
  if (o.kind != Operand::Reg) return;
  uint32_t* p = reinterpret_cast<uint32_t*>(x.w->regs.get() + o.off);
  *p = (*p & ~mask) | (v & mask);
}

template <class T>
inline void put(const Exec& x, const Operand& o, const T* v, uint32_t mask) {
  if (o.kind != Operand::Reg) return;
  uint8_t* p = x.w->regs.get() + o.off;
  if (o.width == sizeof(T)) {
    if (mask == kFull) {
      std::memcpy(p, v, 32 * sizeof(T));
    } else {
      for (uint32_t b = mask; b; b &= b - 1)
        reinterpret_cast<T*>(p)[__builtin_ctz(b)] = v[__builtin_ctz(b)];
    }
    return;
  }
  if constexpr (sizeof(T) <= 8) {
    for (uint32_t b = mask; b; b &= b - 1) {
      int i = __builtin_ctz(b);
      uint64_t e;
      if constexpr (std::is_floating_point_v<T>)
        e = 0, std::memcpy(&e, &v[i], sizeof(T));
      else if constexpr (std::is_signed_v<T>)
        e = (uint64_t)(int64_t)v[i];
      else
        e = (uint64_t)v[i];
      uint8_t* q = p + i * o.width;
      if (o.width == 16) std::memset(q, 0, 16);
      std::memcpy(q, &e, o.width < 8 ? o.width : 8);
    }
  }
}

// First set lane of a mask; the mask is never zero where an instruction executes.
inline int first_lane(uint32_t mask) { return __builtin_ctz(mask); }

}  // namespace flash_attn_mx::emu
