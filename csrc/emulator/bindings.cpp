// Python entry: flash_attn_mx._emulator. Only plain data crosses: bytes, addresses and sizes; no
// torch, no numpy.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "isa.h"
#include "scheduler.h"
#include "tensormap.h"

namespace py = pybind11;
using namespace flash_attn_mx::emu;

namespace {

const char* evidence_name(Evidence e) {
  switch (e) {
    case Evidence::HW_SM90:
      return "hw:sm_90";
    case Evidence::SPEC:
      return "spec";
    case Evidence::CUTLASS:
      return "cutlass";
    default:
      return "peers";
  }
}

class PyModule {
 public:
  explicit PyModule(const std::string& text) : data_(load_module(text)) {
    std::unordered_map<std::string, bool> known;
    for (auto& k : data_->raw->kernels)
      for (auto& in : k->insns) {
        auto it = known.find(in.op);
        if (it == known.end()) it = known.emplace(in.op, find_form(in.op) >= 0).first;
        if (!it->second) throw ParseError(in.line, "unknown instruction form " + in.op);
      }
  }

  py::list kernels() const {
    py::list out;
    for (auto& k : data_->raw->kernels) {
      if (!k->is_entry) continue;
      py::dict d;
      d["name"] = k->name;
      d["line"] = k->line;
      py::list params;
      for (auto& p : k->params) {
        py::dict q;
        q["name"] = p.name, q["offset"] = p.offset, q["size"] = p.size, q["align"] = p.align,
        q["type"] = p.type;
        params.append(q);
      }
      d["params"] = params;
      d["param_bytes"] = k->param_bytes;
      d["registers"] = k->regs.size();
      d["local_bytes"] = k->local_bytes;
      d["instructions"] = k->insns.size();
      auto triple = [](const int* v) { return py::make_tuple(v[0], v[1], v[2]); };
      d["reqntid"] = triple(k->reqntid), d["maxntid"] = triple(k->maxntid),
      d["reqcluster"] = triple(k->reqcluster);
      std::unordered_map<std::string, int> ops;
      for (auto& in : k->insns) ++ops[in.op];
      d["opcodes"] = ops;
      out.append(d);
    }
    return out;
  }

  const Program& program(const std::string& name) {
    auto it = programs_.find(name);
    if (it != programs_.end()) return *it->second;
    for (auto& k : data_->raw->kernels)
      if (k->is_entry && k->name == name) return *(programs_[name] = compile_kernel(*data_, *k));
    throw py::key_error("no kernel " + name);
  }

  py::dict resources(const std::string& name) {
    const Program& p = program(name);
    py::dict d;
    d["static_smem"] = p.static_smem, d["static_map"] = p.static_map,
    d["register_bytes"] = p.reg_bytes, d["local_bytes"] = p.local_bytes;
    return d;
  }

  py::dict launch(
      const std::string& name, const std::string& params,
      const std::vector<std::tuple<uint64_t, uint64_t, bool, bool, std::string>>& buffers,
      const py::dict& o);

 private:
  std::unique_ptr<ModuleData> data_;
  std::unordered_map<std::string, std::unique_ptr<Program>> programs_;
};

void triple(const py::dict& o, const char* key, uint32_t* out) {
  auto v = o[key].cast<std::vector<int64_t>>();
  if (v.size() != 3) throw py::value_error(std::string(key) + " must have three elements");
  for (int i = 0; i < 3; ++i) {
    if (v[i] < 1 || v[i] > 0x7FFFFFFF)
      throw py::value_error(std::string(key) + " must be 1..2^31-1 in every dimension");
    out[i] = (uint32_t)v[i];
  }
}

void check_launch(const Program& p, const Options& o) {
  auto fail = [&](const std::string& w) { throw py::value_error(p.name + ": " + w); };
  uint64_t threads = 1, ctas = 1;
  for (int d = 0; d < 3; ++d) {
    threads *= o.block[d], ctas *= o.cluster[d];
    if (threads > 1024) fail("more than 1024 threads per CTA");
    if (ctas > 16) fail("more than 16 CTAs per cluster");
    if (o.grid[d] % o.cluster[d]) fail("the grid is not a multiple of the cluster");
    if (p.reqntid[0] && (uint32_t)std::max(1, p.reqntid[d]) != o.block[d])
      fail("block differs from .reqntid");
    if (p.reqcluster[0] && (uint32_t)std::max(1, p.reqcluster[d]) != o.cluster[d])
      fail("cluster differs from .reqnctapercluster");
  }
  uint64_t grid = 1;
  for (int d = 0; d < 3; ++d) {
    grid *= o.grid[d];
    if (grid > 1ull << 31) fail("more than 2^31 CTAs");
  }
  if (p.maxntid[0] &&
      threads > (uint64_t)p.maxntid[0] * std::max(1, p.maxntid[1]) * std::max(1, p.maxntid[2]))
    fail("block exceeds .maxntid");
  const uint64_t smem = (uint64_t)o.dynamic_smem + p.static_smem;
  if (smem > 232448) fail("shared memory of " + std::to_string(smem) + " bytes exceeds 232448");
  if (p.local_bytes > o.stack)
    fail("a thread needs " + std::to_string(p.local_bytes) +
         " bytes of local memory, stack= allows " + std::to_string(o.stack));
  if (cluster_bytes(p, o) > o.memory)
    fail("one cluster takes " + std::to_string(cluster_bytes(p, o)) +
         " bytes of the host's memory, memory= allows " + std::to_string(o.memory));
}

// Bytes of any kind as text: what a kernel prints need not be UTF-8.
py::str to_text(const std::string& s) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(s.data(), (Py_ssize_t)s.size(), "replace"));
}

// (kind, cluster, CTA, warp, reason or agent, line, opcode, begin, end, key, wanted, bytes)
py::list trace_rows(const RunResult& r) {
  static const char* const kind[] = {"wait", "issue", "async"};
  static const char* const why[] = {"",         "mbarrier",   "named barrier",  "cluster barrier",
                                    "lanes",    "bulk group", "cp.async group", "tensor memory",
                                    "peer CTA", "asleep",     "registers"};
  static const char* const agent[] = {"tcgen05", "copy", "cp.async", "tcgen05.st"};
  py::list rows;
  for (auto& e : r.trace)
    rows.append(py::make_tuple(kind[e.kind], e.cluster, e.cta, e.warp,
                               e.kind == TraceEvent::Wait ? why[(int)e.why] : agent[e.agent],
                               e.in->line, e.in->text, e.begin, e.end, e.key, e.want, e.bytes));
  return rows;
}

// Ctrl-C stops a launch. Asked by the thread that called launch; the GIL is taken ten times a second.
std::function<bool()> ask_python() {
  using clock = std::chrono::steady_clock;
  return [next = clock::now()]() mutable {
    if (clock::now() < next) return false;
    next = clock::now() + std::chrono::milliseconds(100);
    py::gil_scoped_acquire gil;
    return PyErr_CheckSignals() != 0;
  };
}

py::dict PyModule::launch(
    const std::string& name, const std::string& params,
    const std::vector<std::tuple<uint64_t, uint64_t, bool, bool, std::string>>& buffers,
    const py::dict& o) {
  Machine m;
  m.prog = &program(name);
  triple(o, "grid", m.opt.grid), triple(o, "cluster", m.opt.cluster),
      triple(o, "block", m.opt.block);
  m.opt.dynamic_smem = o["smem_bytes"].cast<uint32_t>();
  m.opt.order = (Order)o["order"].cast<int>();
  m.opt.mma = (MmaMode)o["mma"].cast<int>();
  m.opt.seed = o["seed"].cast<uint64_t>();
  m.opt.threads = o["threads"].cast<int>();
  m.opt.timeout_s = o["timeout"].cast<double>();
  m.opt.memory = o["memory"].cast<uint64_t>(), m.opt.stack = o["stack"].cast<uint64_t>(),
  m.opt.printf_bytes = o["printf_bytes"].cast<uint64_t>();
  m.opt.trace_events = o["trace_events"].cast<uint64_t>();
  m.opt.interrupted = ask_python();
  auto c = o["checks"].cast<std::vector<std::string>>();
  auto on = [&](const char* k) { return std::find(c.begin(), c.end(), k) != c.end(); };
  m.opt.checks.uninit = on("uninit"), m.opt.checks.proxy = on("proxy"),
  m.opt.checks.leaks = on("leaks");
  m.opt.checks.async_overlap = on("async"), m.opt.checks.replicas = on("replicas");
  m.opt.checks.race = on("race"), m.opt.checks.lap = on("lap"), m.opt.checks.ptx = on("ptx");
  m.opt.registers = o["registers"].cast<uint32_t>();
  check_launch(*m.prog, m.opt);
  if (params.size() != m.prog->param_bytes)
    throw py::value_error(name + ": " + std::to_string(params.size()) +
                          " bytes of parameters, the kernel takes " +
                          std::to_string(m.prog->param_bytes));
  m.params.assign(params.begin(), params.end());
  m.buffers = data_->buffers;
  for (auto& b : buffers) {
    Buffer n;
    n.base = std::get<0>(b), n.size = std::get<1>(b), n.readonly = std::get<2>(b),
    n.name = std::get<4>(b);
    if (std::get<3>(b) && m.opt.checks.uninit) n.written.resize(n.size / 64 + 1);
    if (n.size) m.buffers.push_back(std::move(n));
  }
  std::sort(m.buffers.begin(), m.buffers.end(),
            [](const Buffer& a, const Buffer& b) { return a.base < b.base; });
  for (size_t i = 1; i < m.buffers.size(); ++i)
    if (m.buffers[i - 1].base + m.buffers[i - 1].size > m.buffers[i].base)
      throw py::value_error("buffers " + m.buffers[i - 1].name + " and " + m.buffers[i].name +
                            " overlap");
  RunResult r;
  {
    py::gil_scoped_release release;
    r = run_machine(m);
  }
  if (PyErr_Occurred()) throw py::error_already_set();
  py::dict d;
  std::unordered_map<std::string, uint64_t> forms, opcodes;
  for (size_t i = 0; i < r.executed.size(); ++i) {
    if (!r.executed[i]) continue;
    const Instr& in = m.prog->code[i];
    forms[isa_table()[in.form].pattern] += r.executed[i], opcodes[in.text] += r.executed[i];
  }
  py::list output;
  for (auto& line : r.output) output.append(to_text(line));
  if (r.output_dropped)
    output.append("[" + std::to_string(r.output_dropped) + " further printf calls dropped: the " +
                  std::to_string(m.opt.printf_bytes) + " bytes of printf_bytes= are full]");
  d["error"] = to_text(r.error), d["forms"] = forms, d["opcodes"] = opcodes,
  d["warp_instructions"] = r.warp_insns;
  d["output"] = output;
  if (m.opt.trace_events) d["trace"] = trace_rows(r), d["trace_dropped"] = r.trace_dropped;
  d["instructions"] = r.insns, d["mma"] = r.mma, d["mma_flop"] = r.mma_flop,
  d["tma_load_bytes"] = r.tma_load, d["tma_store_bytes"] = r.tma_store;
  d["global_load_bytes"] = r.global_ld, d["global_store_bytes"] = r.global_st,
  d["barrier_waits"] = r.waits;
  return d;
}

py::bytes tensormap(uint32_t dtype, uint64_t address, const std::vector<uint64_t>& dims,
                    const std::vector<uint64_t>& strides, const std::vector<uint32_t>& box,
                    const std::vector<uint32_t>& estrides, uint32_t interleave, uint32_t swizzle,
                    uint32_t l2promo, uint32_t oob) {
  TensorMap t;
  t.rank = (uint32_t)dims.size();
  if (t.rank < 1 || t.rank > 5)
    throw py::value_error("rank " + std::to_string(t.rank) + " is not 1..5");
  if (strides.size() + 1 != dims.size() || box.size() != dims.size() ||
      estrides.size() != dims.size())
    throw py::value_error("dims, box and element_strides need rank entries, strides rank - 1");
  t.dtype = dtype, t.address = address, t.interleave = interleave, t.swizzle = swizzle,
  t.l2promo = l2promo, t.oob = oob;
  for (size_t d = 0; d < dims.size(); ++d)
    t.dims[d] = dims[d], t.box[d] = box[d], t.estride[d] = estrides[d],
    t.strides[d] = d ? strides[d - 1] : t.elem_bytes();
  std::string why = validate(t);
  if (!why.empty()) throw py::value_error(why);
  uint8_t out[128];
  encode_map(t, out);
  return py::bytes(reinterpret_cast<char*>(out), 128);
}

py::list table() {
  py::list out;
  for (auto& f : isa_table())
    out.append(py::make_tuple(f.pattern, f.handler, f.section, evidence_name(f.evidence), f.test));
  return out;
}

}  // namespace

PYBIND11_MODULE(_emulator, m) {
  m.doc() = "CPU emulator of sm_100a PTX; use flash_attn_mx.emulator.";
  py::register_exception<ParseError>(m, "PtxError", PyExc_ValueError);
  py::class_<PyModule>(m, "Module")
      .def(py::init<const std::string&>())
      .def("kernels", &PyModule::kernels)
      .def("resources", &PyModule::resources)
      .def("launch", &PyModule::launch);
  m.def("tensormap", &tensormap);
  m.def("isa_table", &table);
  m.def("match", [](const std::string& op) { return find_form(op); });
}
