// Happens-before: who knows that an access is over, by vector clocks over warps and their
// asynchronous agents. Knowledge travels with barriers, commits, waits and flags, never with time,
// so that a missing wait shows in every order. One Race per cluster.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace flash_attn_mx::emu {

struct Cluster;
struct Cta;
struct Warp;

// Components of a clock, per warp. Copies into shared memory have one component per mbarrier
// instead, which counts its phases.
enum class Agent : uint8_t {
  Generic,   // the warp's own loads and stores
  Tensor,    // tcgen05.mma, cp and commit: in order
  TmemSt,    // until wait::st
  TmemLd,    // until wait::ld, or a use of the registers
  BulkRead,  // shared memory that bulk stores read: until wait_group
  CpAsync
};
constexpr uint32_t kAgents = 6;

using Clocks = std::vector<uint32_t>;

// What somebody knows to have happened, per component.
struct Known {
  Clocks seen;
  Clocks fenced;   // generic writes that their warp fenced for the async proxy
  Clocks ordered;  // tcgen05 operations before a tcgen05.fence::before_thread_sync or in a commit
  void join(const Known& o);
  void clear() { seen.clear(), fenced.clear(), ordered.clear(); }
};
using Snapshot = std::shared_ptr<const Known>;

struct WarpKnows {
  Known k;
  Clocks self_fenced;  // what this warp knew at its own last fence.proxy.async
  Clocks after;        // what was ordered at its last tcgen05.fence::after_thread_sync
  uint32_t own[kAgents] = {1, 1, 1, 1, 1, 1};  // stamps of what it does next
  std::vector<uint32_t> ld_stamp;  // by register slot: the tcgen05.ld that wrote it last
};

// The last accesses of a piece of memory: 16 bytes of shared memory, or 16 lanes of a column.
struct Mark {
  uint32_t clock = 0;
  uint16_t comp = 0, mask = 0;  // bytes; 0 = nobody
  int32_t line = 0;
  bool strong = false;
};
struct Cell {
  Mark w, r;
  uint32_t more = 0;  // index into Race::more_, 0 = none
};

class Race {
 public:
  struct Rules {
    bool race, proxy, lap, ptx;
  };
  Race(Cluster& cl, Rules rules, uint32_t warps_per_cta);

  // An access about to happen: which component it belongs to, and what its issuer knows.
  struct Who {
    const WarpKnows* knows = nullptr;
    uint32_t clock = 0;
    uint16_t comp = 0;
    bool in_order = true;  // after what its own component did before
    bool strong = false;   // atomic or volatile: two of them do not race
    bool async = false;    // reads through the async proxy
    int line = 0;
    const char* what = "";
  };
  Who who(const Warp& w, Agent a, int line, const char* what) const;
  Who copy(const Warp& w, const Cta& bar_cta, uint32_t bar, int line, const char* what);

  void shared(Cta& c, uint32_t off, uint32_t bytes, const Who& who, bool write);
  // Columns [col, col + n), of the 16-lane groups whose bits are set in halves.
  void tensor(Cta& c, uint32_t col, uint32_t n, uint32_t halves, const Who& who, bool write);
  void tensor_freed(Cta& c, uint32_t col, uint32_t n);

  // Edges.
  Snapshot snapshot(const Warp& w, bool tensor);  // tensor: with what its tcgen05 queue did
  void release(Warp& w, Known& to);
  void acquire(Warp& w, const Known& from);
  void complete(Warp& w, Agent a, uint32_t clock);  // the warp waited for its own agent
  void know(Known& k, Warp& w, Agent a);            // k: all that the agent did so far
  void tick(Warp& w, Agent a);
  void fence_proxy(Warp& w);
  void fence_before(Warp& w);
  void fence_after(Warp& w);
  void flag_released(Warp& w, uint64_t address);
  void flag_read(Warp& w, uint64_t address);

  void mbar_init(Warp& w, Cta& c, uint32_t off, int line);
  void mbar_arrive(const Cta& c, uint32_t off, const Known& from);
  void mbar_phase(const Cta& c, uint32_t off);
  void mbar_used(Warp& w, Cta& c, uint32_t off, int line);  // initialised before?
  void mbar_observed(Warp& w, Cta& c, uint32_t off, int line);

  // Registers that tcgen05.ld writes, by slot. Hardware stalls their first use until the load is
  // over, which real code relies on; `ptx` insists on wait::ld.
  void registers_used(Warp& w, const std::vector<uint32_t>& slots);
  void tmem_loaded(Warp& w, const std::vector<uint32_t>& slots);

  // Accesses of a warp to another CTA's shared memory, which must be over when that CTA exits.
  void remote(const Warp& w, const Cta& c, int line);
  void check_exit(const Cta& c) const;
  // Asynchronous work on shared or tensor memory that no warp waited for; empty if there is none.
  std::string unfinished() const;

  uint32_t& own(const Warp& w, Agent a);
  WarpKnows& of(const Warp& w);
  Known cluster_acc, cluster_done;  // barrier.cluster

 private:
  struct Stamp {
    uint16_t comp;
    uint32_t clock;
    int line;
  };
  static void put(std::vector<Stamp>& list, Stamp s);  // one per component
  struct Mbar {
    Known acc, done;
    uint16_t comp = 0;
    uint32_t phases = 0;
    std::vector<Stamp> observers;  // of the last phase
  };
  struct More {
    std::vector<Mark> w, r;
  };
  Mbar& mbar(const Cta& c, uint32_t off);
  uint16_t comp(const Warp& w, Agent a) const;
  bool knows(const Who& who, const Mark& m) const;
  void check(const Who& who, const Mark& m, uint16_t mask, bool m_writes, bool writes, bool tmem,
             const Cta& c, uint32_t at) const;
  void touch(Cell& cell, const Who& who, uint16_t mask, bool write, bool tmem, const Cta& c,
             uint32_t at);
  void touch_more(Cell& cell, const Who& who, uint16_t mask, bool write, bool tmem, const Cta& c,
                  uint32_t at);
  std::string name(uint16_t comp) const;
  std::string place(bool tmem, const Cta& c, uint32_t at) const;

  Cluster& cl_;
  Rules rules_;
  uint32_t per_cta_, warps_;
  std::vector<WarpKnows> warp_;
  std::vector<std::vector<Cell>> smem_, tmem_;  // by CTA
  std::vector<std::vector<Stamp>> remote_;      // by CTA
  std::unordered_map<uint32_t, Mbar> mbars_;    // CTA rank << 24 | offset
  std::vector<uint32_t> mbar_at_;               // component - warps * kAgents -> key
  std::unordered_map<uint64_t, Known> flags_;
  Known many_flags_;
  std::deque<More> more_;
  std::vector<uint32_t> free_more_;
};

}  // namespace flash_attn_mx::emu
