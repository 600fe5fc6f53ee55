#!/usr/bin/env python3
# ruff: noqa: E731, E741, B004
"""Compile peers' Blackwell attention kernels to sm_100a PTX on a machine without a GPU, and record how they are launched.

The kernels come from PyPI packages (flash-attn-4, nvidia-cudnn-frontend) written in CuTe DSL.  Nothing of theirs is
copied here: the script imports the packages, lets their own host code choose the configuration, and captures

  * the PTX that the DSL hands to ptxas (one file per compiled module), and
  * every kernel launch, as a JSON sidecar: entry name, grid, cluster, block, dynamic shared memory, and the bytes of
    every kernel parameter, with TMA descriptors decoded and pointers resolved to the tensors they address.

How the launches are captured without a GPU: the DSL compiles the host side to x86-64 too, and that code reaches CUDA only
through a handful of C symbols (_cudaLaunchKernelEx, _cudaLibraryLoadData, _cuTensorMapEncodeTiled, ...).  A small shared
library (peer_ptx_shim.c) defines those symbols and is put in front of the DSL's runtime library.  The peers' host code then
runs for real, on tensors that exist as shapes only (torch FakeTensorMode; each storage gets a made-up address), builds its
TMA descriptors and launch configurations, and "launches" into our recorder.

Usage (the interpreter must be the venv with the packages, see test-peers in the Makefile):

  python peer_ptx.py --list
  python peer_ptx.py --out peer_ptx_out                                # everything, default shape
  python peer_ptx.py --out peer_ptx_big --shape 2,8,8,4096,4096 fa4_fwd_bf16_d128 fa4_bwd_bf16_d128

Output: OUT/<item>/<k>.ptx (k-th compiled module; .cubin too with --cubin), OUT/<item>/launch<i>.json (one per launch, in
launch order), OUT/<item>/item.json (configuration, tensors, list of launches), OUT/opcodes.txt, OUT/summary.json.
"""
from __future__ import annotations

import argparse
import collections
import ctypes
import glob
import hashlib
import importlib.metadata
import importlib.util
import inspect
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import time
import traceback

ARCH = "sm_100a"
NUM_SMS = 148  # B200; some configurations and persistent grids depend on it
SMEM_OPTIN = 232448  # bytes of shared memory per block that a B200 offers
L2_BYTES = 126 << 20
ADDR_BASE = 0x2000_0000_0000  # made-up device addresses: ADDR_BASE + n * ADDR_STEP, n-th storage
ADDR_STEP = 1 << 40

# ------------------------------------------------------------------------------------------------------------------------
# The CUDA shim
# ------------------------------------------------------------------------------------------------------------------------


def build_shim(work: str) -> ctypes.CDLL:
    """Compile the shim, put it in front of the DSL's runtime library, load it."""
    # The runtime library: the package's start-up hook names it when there are several; else the newest CUDA version's.
    root = list(importlib.util.find_spec("nvidia_cutlass_dsl").submodule_search_locations)[0]
    found = sorted(glob.glob(root + "/cu*/lib/libcute_dsl_runtime.so"))
    named = [p for p in os.environ.get("CUTE_DSL_LIBS", "").split(os.pathsep) if p.endswith("libcute_dsl_runtime.so")]
    libdir = os.path.dirname((named or found)[-1])
    src, so = os.path.join(os.path.dirname(os.path.abspath(__file__)), "peer_ptx_shim.c"), os.path.join(work, "peer_shim.so")
    subprocess.check_call(
        ["gcc", "-O1", "-shared", "-fPIC", "-o", so, src, "-Wl,--no-as-needed", "-L" + libdir, "-lcute_dsl_runtime", "-Wl,-rpath," + libdir]
    )
    # Symbol lookup goes through this one handle: the shim first, the real runtime (its dependency) for the rest.
    os.environ["CUTE_DSL_LIBS"] = so
    return ctypes.CDLL(so, mode=ctypes.RTLD_GLOBAL)


# ------------------------------------------------------------------------------------------------------------------------
# TMA descriptors.  CuTe's host code writes the 128-byte CUtensorMap itself (only the first 64 bytes carry data; what
# follows is whatever was on the stack).  Layout, as observed and checked against the values the kernels ask for:
#   0  u64  global address          12..27 u32[4] stride of dim 1..4, in 16-byte units (low 32 bits)
#   8  u32  flags (below)           28     u32    bits 32..35 of those strides, 4 bits each
#   32..51 u32[5] dim sizes - 1     52..54 u24    element strides - 1, 3 bits each
#   55..59 u8[5]  box sizes - 1     60..63 zero
# flags: bits 4-6 rank-1, 7-10 element type (hardware numbering), 11-12 interleave, 13-15 swizzle, 16 NaN fill; others unknown
# ------------------------------------------------------------------------------------------------------------------------
HW_DTYPE = ["u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32_ftz", "f64", "bf16", "tf32", "tf32_ftz", "b4x16", "b4x16_p64", "b6x16_p32"]
API_DTYPE = ["u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32_ftz", "tf32", "tf32_ftz", "b4x16", "b4x16_p64", "b6x16_p32"]
DTYPE_BITS = dict(zip(HW_DTYPE, [8, 16, 32, 32, 64, 64, 16, 32, 32, 64, 16, 32, 32, 4, 4, 6]))
SWIZZLE = ["none", "32B", "64B", "128B", "128B_atom32B", "128B_atom32B_flip8B", "128B_atom64B", "?7"]
INTERLEAVE = ["none", "16B", "32B", "?3"]


def encode_descriptor(dtype, rank, addr, dims, strides_bytes, box, estr, inter, swz, oob) -> bytes:
    """The same 64-byte layout for descriptors that go through cuTensorMapEncodeTiled (unknown flag bits: CuTe's)."""
    flags = 0x2 | (rank - 1) << 4 | HW_DTYPE.index(API_DTYPE[dtype]) << 7 | inter << 11 | (swz & 7) << 13 | (1 if oob else 0) << 16
    units = [s >> 4 for s in strides_bytes] + [0] * (5 - rank)
    hi = sum(((u >> 32) & 0xF) << (4 * i) for i, u in enumerate(units))
    es = sum((e - 1 & 7) << (3 * i) for i, e in enumerate(estr))
    return struct.pack("<QI4II5I3s5B4x", addr, flags, *[u & 0xFFFFFFFF for u in units[:4]], hi,
                       *([d - 1 for d in dims] + [0] * (5 - rank)), es.to_bytes(3, "little"), *([b - 1 for b in box] + [0] * (5 - rank))).ljust(128, b"\0")


def decode_descriptor(raw: bytes) -> dict | None:
    addr, flags, s0, s1, s2, s3, hi = struct.unpack_from("<QI5I", raw, 0)
    dims, es, box = struct.unpack_from("<5I", raw, 32), int.from_bytes(raw[52:55], "little"), raw[55:60]
    rank = (flags >> 4 & 7) + 1
    if not flags & 2 or rank > 5 or raw[60:64] != b"\0\0\0\0":
        return None
    dt = HW_DTYPE[flags >> 7 & 15]
    return {
        "address": addr, "rank": rank, "element": dt, "element_bits": DTYPE_BITS[dt],
        "dims": [d + 1 for d in dims[:rank]],
        "strides_bytes": [(u | (hi >> 4 * i & 0xF) << 32) << 4 for i, u in enumerate((s0, s1, s2, s3)[: rank - 1])],
        "box": [b + 1 for b in box[:rank]], "element_strides": [(es >> 3 * i & 7) + 1 for i in range(rank)],
        "interleave": INTERLEAVE[flags >> 11 & 3], "swizzle": SWIZZLE[flags >> 13 & 7],
        "oob_fill": "nan" if flags >> 16 & 1 else "zero", "flags": hex(flags), "unknown_flag_bits": hex(flags & ~0x1FFF2),
    }


# ------------------------------------------------------------------------------------------------------------------------
# Recorder: tensors without storage, host calls, launches
# ------------------------------------------------------------------------------------------------------------------------
class _Dev(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _DType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", _Dev), ("ndim", ctypes.c_int), ("dtype", _DType),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)), ("offset", ctypes.c_uint64)]


class _DLManaged(ctypes.Structure):
    _fields_ = [("t", _DLTensor), ("ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


def _capsule(ptr, shape, strides, code_bits, keep):
    n = len(shape)
    sh, st = (ctypes.c_int64 * n)(*shape), (ctypes.c_int64 * n)(*strides)
    m = _DLManaged(_DLTensor(ptr, _Dev(2, 0), n, _DType(*code_bits, 1), sh, st, 0), None, None)
    keep.append((m, sh, st))
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(ctypes.addressof(m), b"dltensor", None)


class Recorder:
    def __init__(self, dump_dir: str):
        self.dump_dir = dump_dir
        self.keep, self.tensors, self.calls, self.launches, self.notes, self.errors = [], [], [], [], [], []
        self.by_storage: dict = {}
        self.kernel_meta: dict[str, dict] = {}
        self.api_maps: dict[bytes, dict] = {}
        self.modules: dict[str, set] = {}  # entry -> ptx paths
        self.active: dict[str, str] = {}  # the same of the compiled function that runs now
        self.collected = 0

    # -- tensors ----------------------------------------------------------------------------------------------------------
    def address(self, t) -> int:
        st = t.untyped_storage()
        rec = self.by_storage.get(st._cdata)
        if rec is None:
            rec = {"address": ADDR_BASE + len(self.by_storage) * ADDR_STEP, "bytes": st.nbytes(), "initial": "uninitialized", "views": []}
            self.by_storage[st._cdata] = rec
            self.tensors.append(rec)
            self.keep.append(t)
        return rec["address"] + t.storage_offset() * t.element_size()

    def name(self, t, name, initial=None, explicit=True):
        """Name a tensor's storage; names given by an item win over argument names of host functions (explicit=False)."""
        self.address(t)
        rec = self.by_storage[t.untyped_storage()._cdata]
        view = {"shape": list(t.shape), "strides": list(t.stride()), "dtype": str(t.dtype).split(".")[-1], "offset_elements": t.storage_offset()}
        names = rec.setdefault("names", [])
        if name not in names:
            names.insert(0 if explicit and not rec.get("explicit") else len(names), name)
        rec["explicit"] = rec.get("explicit") or explicit
        if view not in rec["views"]:
            rec["views"].append(view)
        if initial is not None:
            rec["initial"] = initial
        return t

    def locate(self, ptr: int):
        if ptr < ADDR_BASE:
            return None
        i = (ptr - ADDR_BASE) // ADDR_STEP
        if i >= len(self.tensors):
            return None
        r = self.tensors[i]
        off = ptr - r["address"]
        return {"tensor": f"@{i}", "offset_bytes": off} if off <= r["bytes"] else None  # @i: see final_names

    def final_names(self, x):
        """Replace the placeholders @i by names, which are known (and made unique) only at the end."""
        if "name" not in self.tensors[0]:
            used = collections.Counter()
            for i, r in enumerate(self.tensors):
                first, *more = r.pop("names", None) or [f"storage{i}"]
                r.pop("explicit", None)
                used[first] += 1
                r.update(name=first if used[first] == 1 else f"{first}#{used[first]}", aliases=more)
        if isinstance(x, dict):
            return {k: self.final_names(v) for k, v in x.items()}
        if isinstance(x, (list, tuple)):
            return [self.final_names(v) for v in x]
        return self.tensors[int(x[1:])]["name"] if isinstance(x, str) and re.fullmatch(r"@\d+", x) else x

    # -- callbacks --------------------------------------------------------------------------------------------------------
    def on_tmap(self, out, dtype, rank, addr, dims, strides, box, estr, inter, swz, l2, oob):
        try:
            v = dict(dtype=dtype, rank=rank, addr=addr or 0, dims=list(dims[:rank]), strides_bytes=list(strides[: rank - 1]), box=list(box[:rank]),
                     estr=list(estr[:rank]), inter=inter, swz=swz, oob=oob)
            raw = encode_descriptor(**v)
            d = decode_descriptor(raw)
            d.update(swizzle=SWIZZLE[swz], l2_promotion=["none", "64B", "128B", "256B"][l2], source="cuTensorMapEncodeTiled arguments")
            self.api_maps[raw[:64]] = d
            ctypes.memmove(out, raw, 128)
        except BaseException:
            self.errors.append(traceback.format_exc())
            return 1
        return 0

    def on_note(self, what, a, b, c):
        self.notes.append({"after_launch": len(self.launches) - 1, "what": what.decode(), "dst": self.locate(a) or hex(a), "value_or_src": b, "bytes": c})
        return 0

    def on_launch(self, name, cfg, args):
        try:
            self.launches.append(self._launch(name.decode(), cfg, args))
        except BaseException:
            self.errors.append(traceback.format_exc())
            return 1
        return 0

    def collect_modules(self):
        """Sets aside the PTX dumped since the last call: the DSL names files after kernels, and two modules may share one.

        Returns {entry: path} of these files; the compiled function that they belong to launches its kernels from there.
        """
        dest = os.path.join(self.dump_dir, f"module{self.collected}")
        self.collected += 1
        os.makedirs(dest)
        found = {}
        for path in sorted(glob.glob(glob.escape(self.dump_dir) + "/*.*")):
            moved = shutil.move(path, dest)
            if moved.endswith(".ptx"):
                with open(moved) as f:
                    for e in re.findall(r"^\.visible \.entry (\S+?)\(", f.read(), re.M):
                        found[e] = moved
        for e, path in found.items():
            self.modules.setdefault(e, set()).add(path)
        return found

    def find_ptx(self, kernel):
        if kernel in self.active:
            return self.active[kernel]
        self.collect_modules()
        paths = self.modules.get(kernel, set())
        if len(paths) != 1:
            raise RuntimeError(f"{len(paths)} modules have an entry {kernel}, and the caller is unknown")
        return next(iter(paths))

    def _launch(self, kernel, cfg, args):
        gx, gy, gz, bx, by, bz, smem, stream, attrs, nattrs = struct.unpack("<6IQQQI", ctypes.string_at(cfg, 52))
        out = {"entry": kernel, "grid": [gx, gy, gz], "block": [bx, by, bz], "cluster": [1, 1, 1], "dynamic_smem_bytes": smem, "attributes": {}}
        for i in range(nattrs):
            ident, = struct.unpack("<I", ctypes.string_at(attrs + 72 * i, 4))
            v = struct.unpack("<3I", ctypes.string_at(attrs + 72 * i + 8, 12))
            if ident == 4:
                out["cluster"] = list(v)
            else:
                known = {2: "cooperative", 6: "programmatic_stream_serialization", 11: "preferred_cluster", 14: "preferred_smem_carveout"}
                out["attributes"][known.get(ident, f"cudaLaunchAttribute{ident}")] = list(v) if ident == 11 else v[0]
        path = self.find_ptx(kernel)
        with open(path) as f:
            text = f.read()
        out["ptx_path"] = path
        out["static_shared"] = re.findall(r"^\.(?:extern \.)?shared .*$|^\.extern \.shared .*$", text, re.M)
        entry = text[text.index(".entry " + kernel + "("):]
        for key in ("reqntid", "maxntid", "minnctapersm", "maxnreg", "reqnctapercluster"):
            m = re.search(r"\n\." + key + r" ([^\n]*)", entry[: entry.index("\n{")])
            if m:
                out["ptx_" + key] = m.group(1)
        params, offset, sizes = [], 0, ptx_params(entry)
        meta = self.operands(kernel, len(sizes))
        for i, (ty, align, size) in enumerate(sizes):
            offset = -(-offset // align) * align
            p = {"index": i, "offset": offset, "size": size, "align": align, "ptx_type": ty}
            if meta:
                p.update(meta[i])
            p.update(self.describe(ctypes.string_at(args[i], size), ty, align, p.get("cute_type", "")))
            params.append(p)
            offset += size
        out["params"], out["param_bytes"] = params, offset
        if not meta and kernel in self.kernel_meta:
            out["operands_not_matched"] = self.kernel_meta[kernel]["operands"]
        return out

    def operands(self, kernel, count):
        """Names and CuTe types of the PTX parameters: operands of fully static type are dropped by the compiler."""
        m = self.kernel_meta.get(kernel)
        if not m:
            return None
        live = [o for o in m["operands"] if not (re.match(r"!cute\.(tiled_copy|composed_layout|layout|shape|stride|tile|swizzle|int_tuple|coord|coord_tensor)\b", o["cute_type"]) and "?" not in o["cute_type"])]
        return live if len(live) == count else None

    def describe(self, raw, ty, align, cute_type):
        if len(raw) == 128 and align >= 64:
            d = self.api_maps.get(raw[:64]) or decode_descriptor(raw)
            if d:
                d = dict(d)
                d["tensor"] = self.locate(d["address"])
                return {"kind": "tma_descriptor", "hex": raw[:64].hex() + "00" * 64, "descriptor": d}
        fields = dynamic_fields(cute_type)
        if fields and all(o + n <= len(raw) for _, o, n in fields):
            keep = bytearray(len(raw))  # what is not a field is padding (stack garbage): store zeros
            for _, o, n in fields:
                keep[o:o + n] = raw[o:o + n]
            raw = bytes(keep)
            if len(fields) > 1 or fields[0][0] != "pointer":
                out = {"kind": "tensor" if fields[0][0] == "pointer" else "coord_tensor", "hex": raw.hex(),
                       "fields": [{"at": o, "size": n, "is": what, "value": int.from_bytes(raw[o:o + n], "little", signed=True)} for what, o, n in fields]}
                if fields[0][0] == "pointer":
                    out["points_to"] = self.locate(out["fields"][0]["value"])
                return out
        r = {"hex": raw.hex()}
        if "fast_divmod" in cute_type and len(raw) == 12:
            div, mul, s1, s2 = struct.unpack("<IIBB", raw[:10])
            return {"kind": "fast_divmod", "hex": raw[:10].hex() + "0000", "divisor": div, "multiplier": mul, "shift1": s1, "shift2": s2,
                    "note": "n / divisor = (mulhi(n, multiplier) + ((n - mulhi) >> shift1)) >> shift2; bytes 10..11 are padding"}
        if ty == "f32":
            return {"kind": "scalar", "value": struct.unpack("<f", raw)[0], **r}
        ptrs = []
        for o in range(0, len(raw) - 7, 8):
            where = self.locate(struct.unpack_from("<Q", raw, o)[0])
            if where:
                ptrs.append({"at": o, **where})
        if len(raw) == 8 and "memref" in cute_type and not ptrs:
            return {"kind": "pointer", "tensor": None, "value": int.from_bytes(raw, "little"), **r}
        if len(raw) == 8 and ptrs:
            return {"kind": "pointer", **{k: v for k, v in ptrs[0].items() if k != "at"}, **r}
        if len(raw) in (1, 2, 4, 8) and ty != "b8":
            return {"kind": "scalar", "value": int.from_bytes(raw, "little", signed=ty[0] != "b" or len(raw) == 4), **r}
        out = {"kind": "struct", **r, "i32": list(struct.unpack(f"<{len(raw) // 4}i", raw[: len(raw) // 4 * 4]))}
        if ptrs:
            out["pointers"] = ptrs
        if not any(raw):
            out["note"] = "all zero"
        return out


def dynamic_fields(cute_type: str):
    """(meaning, offset, size) of the run-time fields of a memref / coord_tensor parameter, from its type: the pointer (memref
    only), then every '?' of the base coordinate, the shape and the strides, i32 unless marked i64, naturally aligned."""
    m = re.match(r'!cute\.(memref|coord_tensor)<(.*)>$', cute_type)
    if not m:
        return None
    out, offset = [], 0
    if m.group(1) == "memref":
        out, offset = [("pointer", 0, 8)], 8
    strings = re.findall(r'"([^"]*)"', m.group(2))
    parts = ([("base", strings[0])] if m.group(1) == "coord_tensor" else []) + list(zip(("shape", "stride"), strings[-1].split(":")))
    for what, text in parts:
        leaves = re.findall(r"\?(?:\{[^}]*\})?|[^(),:\s]+", text)
        sizes = [(i, 8 if "i64" in leaf else 4) for i, leaf in enumerate(leaves) if leaf.startswith("?")]
        if sizes:  # each of them is a struct of its own
            offset = -(-offset // max(n for _, n in sizes)) * max(n for _, n in sizes)
        for i, n in sizes:
            offset = -(-offset // n) * n
            out.append((f"{what}[{i}]", offset, n))
            offset += n
    return out


def ptx_params(entry: str):
    out = []
    head = entry[entry.index("(") + 1: entry.index("\n)")]
    for line in head.split("\n"):
        line = line.strip().rstrip(",")
        m = re.match(r"\.param (?:\.align (\d+) )?\.(\w+)(?: \.ptr(?: \.[a-z]\w*)?(?: \.align \d+)?)? (\S+?)(?:\[(\d+)\])?$", line)
        if line.startswith(".param") and not m:
            raise RuntimeError("cannot parse PTX parameter: " + line)
        if m:
            size = int(m.group(4)) if m.group(4) else int(m.group(2)[1:]) // 8
            out.append((m.group(2), int(m.group(1) or size), size))
    return out


# ------------------------------------------------------------------------------------------------------------------------
# Process set-up for one item
# ------------------------------------------------------------------------------------------------------------------------
def setup(work: str, cubin: bool) -> Recorder:
    dump = os.path.join(work, "dump")
    os.makedirs(dump, exist_ok=True)
    os.environ.update(
        FLASH_ATTENTION_NUM_SMS=str(NUM_SMS), FLASH_ATTENTION_ARCH=ARCH, CUTE_DSL_ARCH=ARCH, CUTE_DSL_KEEP="ptx,cubin" if cubin else "ptx",
        CUTE_DSL_DUMP_DIR=dump, CUTE_DSL_DISABLE_FILE_CACHING="1", CUDNN_FRONTEND_DISABLE_COMPILED_CACHE="1",
    )
    shim = build_shim(work)
    import warnings

    warnings.filterwarnings("ignore")
    rec = Recorder(dump)
    U32, U64, VP = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_void_p
    cbs = (
        ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, VP, ctypes.POINTER(VP))(rec.on_launch),
        ctypes.CFUNCTYPE(ctypes.c_int, VP, U32, U32, VP, ctypes.POINTER(U64), ctypes.POINTER(U64), ctypes.POINTER(U32), ctypes.POINTER(U32), U32, U32, U32, U32)(rec.on_tmap),
        ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, U64, U64, U64)(rec.on_note),
    )
    shim.peer_set_callbacks(*cbs)
    rec.keep.append(cbs)

    pretend_b200(rec)
    hook_operand_names(rec)
    hook_host_calls(rec)
    hook_zeros(rec)
    return rec


def pretend_b200(rec: Recorder):
    """What the packages ask about the device and about tensors' addresses, answered without one."""
    import cutlass.utils
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    class HardwareInfo:  # the DSL's occupancy queries, answered for a B200
        def __init__(self, *a, **k): pass
        def get_max_active_clusters(self, n, *a, **k): return NUM_SMS // n
        def get_device_multiprocessor_count(self, *a): return NUM_SMS
        def get_l2_cache_size_in_bytes(self): return L2_BYTES

    cutlass.utils.HardwareInfo = HardwareInfo
    FakeTensor.data_ptr = lambda t: rec.address(t)
    torch.cuda.current_device = lambda: 0


def hook_operand_names(rec: Recorder):
    """Operand names and types of each kernel, from the point where the DSL flattens a kernel's Python arguments."""
    from cutlass.base_dsl.dsl import BaseDSL

    known, operands = BaseDSL._generate_jit_func_args_for_known_types, BaseDSL.generate_kernel_operands_and_types
    trail: list = []

    def known_hook(self, func, arg, arg_name, *a, **k):
        r = known(self, func, arg, arg_name, *a, **k)
        if not k.get("is_host", True) and r[0] is not None:
            trail.append((arg_name, r[0]))  # the list is extended in place afterwards
        return r

    def operands_hook(self, kernel_func, kernel_name, *a, **k):
        trail.clear()
        r = operands(self, kernel_func, kernel_name, *a, **k)
        flat = []
        for arg_name, values in trail:
            for j, _ in enumerate(values):
                flat.append(arg_name if len(values) == 1 else f"{arg_name}[{j}]")
        types = [str(t) for t in r[1]]
        if len(flat) != len(types):
            flat = ["?"] * len(types)
        rec.kernel_meta[kernel_name] = {"operands": [{"name": n, "cute_type": t} for n, t in zip(flat, types)]}
        return r

    BaseDSL._generate_jit_func_args_for_known_types, BaseDSL.generate_kernel_operands_and_types = known_hook, operands_hook


def hook_host_calls(rec: Recorder):
    """Compiled host functions called with FakeTensors: hand them DLPack tensors at the made-up addresses, note the arguments."""
    import cutlass.cute as cute
    import torch
    import tvm_ffi
    from torch._subclasses.fake_tensor import FakeTensor

    codes = {torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.float32: (2, 32), torch.int32: (0, 32), torch.int64: (0, 64),
             torch.uint8: (1, 8), torch.int8: (0, 8), torch.float8_e4m3fn: (10, 8), torch.bool: (6, 8)}

    capsule = lambda t: _capsule(rec.address(t), t.shape, t.stride(), codes[t.dtype], rec.keep)
    FakeTensor.__dlpack__, FakeTensor.__dlpack_device__ = (lambda t, *a, **k: capsule(t)), (lambda t: (2, 0))

    class Shape:  # a DLPack producer that is not a torch tensor, so that no fast path reads its storage
        def __init__(self, t): self.t = t
        def __dlpack_device__(self): return (2, 0)
        def __dlpack__(self, **kw): return capsule(self.t)

    def convert(x):
        if isinstance(x, torch.Tensor):
            return tvm_ffi.from_dlpack(Shape(x))
        if isinstance(x, tuple):
            return type(x)(*map(convert, x)) if hasattr(x, "_fields") else tuple(map(convert, x))
        return x

    def brief(name, x):
        if isinstance(x, torch.Tensor):
            rec.name(x, name, explicit=False)
            return {"tensor": rec.locate(rec.address(x)), "shape": list(x.shape), "strides": list(x.stride()), "dtype": str(x.dtype).split(".")[-1]}
        if isinstance(x, tuple):
            return [brief(f"{name}.{f}", v) for f, v in zip(getattr(x, "_fields", range(len(x))), x)]
        return x if isinstance(x, (int, float, bool, str, type(None))) else repr(x)[:80]

    real = cute.compile

    class Compile:
        def __call__(self, fn, *a, **k):
            compiled = real(fn, *a, **k)
            modules = rec.collect_modules()
            target = fn if inspect.isroutine(fn) or not hasattr(type(fn), "__call__") else type(fn).__call__
            try:
                names = [n for n in inspect.signature(target).parameters if n != "self"]
            except (TypeError, ValueError):
                names = []
            label = type(fn).__name__ if not inspect.isroutine(fn) else fn.__name__

            def run(*args, **kw):
                first = len(rec.launches)
                host = [{"arg": (names[i] if i < len(names) else f"arg{i}"), "value": brief(names[i] if i < len(names) else f"arg{i}", x)} for i, x in enumerate(args)]
                rec.active = modules
                r = compiled(*[convert(x) for x in args], **kw)
                rec.active = {}
                if rec.errors:
                    raise RuntimeError(rec.errors[0])
                rec.calls.append({"host_function": label, "arguments": host, "launches": list(range(first, len(rec.launches)))})
                return r

            run.compiled = compiled
            if names:  # cudnn checks the wrapper's signature against its own host function
                run.__signature__ = inspect.signature(compiled._kwargs_wrapper) if getattr(compiled, "_kwargs_wrapper", None) else None
            return run

        def __getattr__(self, n): return getattr(real, n)

    rec.wrap_compile = lambda: setattr(cute, "compile", Compile())


def hook_zeros(rec: Recorder):
    """Which buffers start as zeros matters to whoever replays the launches."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    for fname in ("zeros", "zeros_like"):
        orig = getattr(torch, fname)

        def zeros(*a, _o=orig, **k):
            t = _o(*a, **k)
            if isinstance(t, FakeTensor):
                rec.address(t)
                rec.by_storage[t.untyped_storage()._cdata]["initial"] = "zero"
            return t

        setattr(torch, fname, zeros)


# ------------------------------------------------------------------------------------------------------------------------
# Items: FlashAttention-4
# ------------------------------------------------------------------------------------------------------------------------
def fa4(rec, shape, *, d, dv=None, dtype="bfloat16", causal=False, two_cta=True, backward=False, varlen=False, window=None, kv_heads=None, clc=False, deterministic=False):
    """flash_attn.cute.interface's own forward / backward entry, layout [B, S, H, D] (varlen: [T, H, D])."""
    B, H, HK, SQ, SK = shape
    HK = kv_heads or HK
    os.environ.update(FA_DISABLE_2CTA="0" if two_cta else "1", FA_CLC="1" if clc else "0")
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    rec.wrap_compile()
    from flash_attn.cute import interface as fi

    fi.is_fake_mode = lambda: False  # run the host functions; the tensors stay fake
    dt, dv = getattr(torch, dtype), dv or d
    with FakeTensorMode():
        E = lambda *s, t=dt: torch.empty(*s, dtype=t, device="cuda")
        kw = {}
        if varlen:
            lens_q, lens_k = [SQ - 64 * i for i in range(B)], [SK - 64 * i for i in range(B)]
            q, k, v = E(sum(lens_q), H, d), E(sum(lens_k), HK, d), E(sum(lens_k), HK, dv)
            kw = dict(cu_seqlens_q=E(B + 1, t=torch.int32), cu_seqlens_k=E(B + 1, t=torch.int32), max_seqlen_q=SQ, max_seqlen_k=SK)
            for n, l in (("cu_seqlens_q", lens_q), ("cu_seqlens_k", lens_k)):
                rec.name(kw[n], n, initial=[sum(l[:i]) for i in range(B + 1)])
        else:
            q, k, v = E(B, SQ, H, d), E(B, SK, HK, d), E(B, SK, HK, dv)
        if window:
            kw.update(window_size_left=window[0], window_size_right=window[1])
        for n, t in (("q", q), ("k", k), ("v", v)):
            rec.name(t, n, initial="input")
        if not backward:
            if dtype.startswith("float8"):
                for n in ("q_descale", "k_descale", "v_descale"):
                    kw[n] = rec.name(torch.empty(B, HK, dtype=torch.float32, device="cuda"), n, initial="input: scale of the FP8 tensor, one per (batch, kv head)")
            out, lse, *_ = fi._flash_attn_fwd(q, k, v, causal=causal, return_lse=True, **kw)
            rec.name(out, "out"), rec.name(lse, "lse")
        else:
            out, dout = E(*q.shape[:-1], dv), E(*q.shape[:-1], dv)
            lse = E(*((H, q.shape[0]) if varlen else (B, H, SQ)), t=torch.float32)
            for n, t in (("out", out), ("dout", dout), ("lse", lse)):
                rec.name(t, n, initial="input")
            dq, dk, dv_ = fi._flash_attn_bwd(q, k, v, out, dout, lse, causal=causal, deterministic=deterministic, **kw)
            rec.name(dq, "dq"), rec.name(dk, "dk"), rec.name(dv_, "dv")
    return dict(B=B, H=H, H_kv=HK, S_q=SQ, S_kv=SK, D=d, Dv=dv, dtype=dtype, causal=causal, window=window, varlen=varlen, two_cta_allowed=two_cta, clc=clc,
                softmax_scale=1 / math.sqrt(d), lse="natural log of sum exp(scale * s), shape [B, H, S]")


# ------------------------------------------------------------------------------------------------------------------------
# Items: cuDNN frontend (open-source DSL kernels)
# ------------------------------------------------------------------------------------------------------------------------
def cudnn_setup(rec):
    """A B200 that is not there: device facts for torch and cudnn; no CUDA call is made."""
    from types import SimpleNamespace

    import torch

    props = SimpleNamespace(multi_processor_count=NUM_SMS, major=10, minor=0, name="NVIDIA B200", L2_cache_size=L2_BYTES, shared_memory_per_block_optin=SMEM_OPTIN)
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_capability = lambda *a: (10, 0)
    torch.cuda.get_device_properties = lambda *a: props
    torch.cuda.current_device = lambda: 0
    rec.wrap_compile()
    import cudnn._device as dev
    import cudnn.frost.compiled_cache as cc
    import cudnn.frost.device as fd

    info = SimpleNamespace(compute_capability=(10, 0), sm_count=NUM_SMS, shared_memory_per_block_optin=SMEM_OPTIN,
                           oversized_shared_memory_per_block=SMEM_OPTIN, l2_cache_bytes=L2_BYTES, device_name="NVIDIA B200")
    dev.device_info = fd.device_info = lambda *a: info
    fd.ambient_device = fd.current_device = lambda: 0
    cc.positional_entry = lambda c, *a, **k: c  # ask the compiled object itself, not a native handle


def cudnn_fwd(rec, shape, *, d, kind="mxfp8", causal=False, cga=None, dv=None):
    """cudnn.sdpa.fwd.SdpaFwdDslSm100: logical [B, H, S, D] over [B, S, H, D] storage."""
    B, H, HK, SQ, SK = shape
    dv = dv or d
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    cudnn_setup(rec)
    from cudnn.sdpa.fwd import api_dsl, prepared

    prepared.positional_entry = lambda c, *a, **k: c
    dt = torch.bfloat16 if kind == "bf16" else torch.float8_e4m3fn
    with FakeTensorMode():
        E = lambda *s, t=dt: torch.empty(*s, dtype=t, device="cuda")
        bhsd = lambda b, s, h, dd, t=dt: E(b, s, h, dd, t=t).permute(0, 2, 1, 3)
        q, k, v, o = bhsd(B, SQ, H, d), bhsd(B, SK, HK, d), bhsd(B, SK, HK, dv), bhsd(B, SQ, H, dv, torch.bfloat16)
        lse = E(B, H, SQ, t=torch.float32)
        for n, t in (("q", q), ("k", k), ("v", v)):
            rec.name(t, n, initial="input")
        rec.name(o, "o"), rec.name(lse, "lse")
        kw = {}
        if kind != "bf16":
            kw = dict(dtype_o=torch.bfloat16, pertensor_fp8=kind == "fp8", has_amax_o=kind == "fp8")
        api = api_dsl.SdpaFwdDslSm100(q, k, v, o, sample_lse=lse, is_causal=causal, cga=cga, **kw)
        api.check_support()
        api.compile()
        spec = api._dense_spec
        facts = {n: prepared.facts_of_tensor(t) for n, t in dict(q=q, k=k, v=v, o=o, lse=lse).items()}
        frame = prepared.bind_dense(spec, facts, 0, 0)
        put = lambda n, x: frame.__setitem__(spec.index[n], x) if n in spec.index else None
        if kind == "mxfp8":
            # Scale factors: opaque bytes, tiles of 128 rows, one tile per (batch, head, 128-row block)
            sizes, tiles = spec.quant.sf_sizes, (-(-SQ // 128), -(-SK // 128), -(-SK // 128))
            for n, h, t, sz in zip(("sf_q", "sf_k", "sf_v"), (H, HK, HK), tiles, sizes):
                sf = rec.name(E(B, h, t, sz, t=torch.uint8), n, initial="input: UE8M0 scale bytes, F8_128x4 atoms, [B, H, tiles, bytes per tile]")
                put(n + "_ptr", sf.data_ptr())
            put("sf_tiles", tiles)
            put("amax_o_ptr", 0)
        elif kind == "fp8":
            for n in ("descale_q", "descale_k", "descale_v", "scale_o", "amax_o"):
                put(n + "_ptr", rec.name(E(1, t=torch.float32), n, initial="input: one f32" if n != "amax_o" else "zero").data_ptr())
        spec.fn(*frame)
    p = getattr(api._k_mod, "PARAMS", None)
    return dict(B=B, H=H, H_kv=HK, S_q=SQ, S_kv=SK, D=d, Dv=dv, kind=kind, causal=causal, cga=api.cga, template=api.kernel_template,
                template_params={k: v for k, v in vars(p).items() if v not in (None, False, 0)} if p else None,
                host_arguments=[{"arg": n, "value": x if not (isinstance(x, int) and rec.locate(x)) else rec.locate(x)} for n, x in zip(spec.order, frame)])


def cudnn_bwd_mxfp8(rec, shape, *, d=256, causal=False):
    """cudnn.sdpa.bwd.api_dsl_mxfp8_sm100: scale-factor repacks, dQ kernel, fused dK/dV kernel."""
    B, H, HK, SQ, SK = shape
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    cudnn_setup(rec)
    from cudnn.sdpa.bwd import api_dsl_mxfp8_sm100 as m
    from cudnn.sdpa.bwd import prepared
    from cudnn.sdpa.fwd.prepared import facts_of_tensor

    f8, bf = torch.float8_e4m3fn, torch.bfloat16
    with FakeTensorMode():
        E = lambda *s, t: torch.empty(*s, dtype=t, device="cuda")
        bhsd = lambda s, h, t: E(B, s, h, d, t=t).permute(0, 2, 1, 3)
        Q, K = (lambda t: bhsd(SQ, H, t)), (lambda t: bhsd(SK, HK, t))
        up = lambda x, n: -(-x // n) * n
        sf_bytes = dict(sf_q=H * up(SQ, 128) * up(d // 32, 4), sf_k=HK * up(SK, 128) * up(d // 32, 4), sf_v=HK * up(SK, 128) * up(d // 32, 4),
                        sf_do=H * up(SQ, 128) * up(d // 32, 4), sf_q_T=H * up(-(-SQ // 32), 4) * up(d, 128), sf_do_T=H * up(-(-SQ // 32), 4) * up(d, 128),
                        sf_k_T=HK * up(-(-SK // 32), 4) * up(d, 128))
        T = dict(q=Q(f8), k=K(f8), v=K(f8), o=Q(bf), do=Q(f8), stats=E(B, H, SQ, 1, t=torch.float32), dq=Q(bf), dk=K(bf), dv=K(bf),
                 q_T=Q(f8), k_T=K(f8), do_T=Q(f8), do_f16=Q(bf), **{n: E(B * sf_bytes[n], t=torch.uint8) for n in ("sf_q", "sf_q_T", "sf_k", "sf_k_T", "sf_v", "sf_do", "sf_do_T")})
        for n, t in T.items():
            rec.name(t, n, initial=None if n in ("dq", "dk", "dv") else "input")
        api = m.SdpaBwdDslSm100Mxfp8(*[T[n] for n in ("q", "k", "v", "o", "do", "stats", "dq", "dk", "dv")], is_causal=causal,
                                     **{"sample_" + n: T[n] for n in m._ROLES[9:]})
        api.check_support()
        api.compile()
        ws = rec.name(E(api.scratch_workspace_bytes(), t=torch.uint8), "workspace")
        prepared.execute(api._prepared, {n: facts_of_tensor(t) for n, t in T.items()}, ws.data_ptr(), 0)
    return dict(B=B, H=H, H_kv=HK, S_q=SQ, S_kv=SK, D=d, kind="mxfp8 backward", causal=causal, softmax_scale=1 / math.sqrt(d), workspace_bytes=ws.numel())


def _items():
    I: dict = {}
    for d in (128, 64):
        for c in (False, True):
            I[f"fa4_fwd_bf16_d{d}{'_causal' if c else ''}"] = (fa4, dict(d=d, causal=c))
            I[f"fa4_fwd_fp8_d{d}{'_causal' if c else ''}"] = (fa4, dict(d=d, causal=c, dtype="float8_e4m3fn"))
    I["fa4_fwd_bf16_d128_1cta"] = (fa4, dict(d=128, two_cta=False))
    I["fa4_fwd_fp8_d128_1cta"] = (fa4, dict(d=128, two_cta=False, dtype="float8_e4m3fn"))
    I["fa4_fwd_bf16_d128_causal_clc"] = (fa4, dict(d=128, causal=True, clc=True))
    I["fa4_fwd_bf16_d128_window"] = (fa4, dict(d=128, window=(128, 0)))
    I["fa4_fwd_bf16_d128_gqa"] = (fa4, dict(d=128, kv_heads=1))
    I["fa4_fwd_bf16_d128_varlen"] = (fa4, dict(d=128, varlen=True))
    I["fa4_fwd_bf16_d128_varlen_causal"] = (fa4, dict(d=128, varlen=True, causal=True))
    I["fa4_fwd_bf16_d192_dv128"] = (fa4, dict(d=192, dv=128))
    I["fa4_fwd_bf16_d256"] = (fa4, dict(d=256))
    for c in (False, True):
        s = "_causal" if c else ""
        I[f"fa4_bwd_bf16_d128{s}"] = (fa4, dict(d=128, causal=c, backward=True))
        I[f"fa4_bwd_bf16_d128{s}_1cta"] = (fa4, dict(d=128, causal=c, backward=True, two_cta=False))
    I["fa4_bwd_bf16_d64"] = (fa4, dict(d=64, backward=True))
    I["fa4_bwd_bf16_d128_gqa"] = (fa4, dict(d=128, backward=True, kv_heads=1))
    I["fa4_bwd_bf16_d128_deterministic"] = (fa4, dict(d=128, backward=True, deterministic=True))
    I["fa4_bwd_bf16_d128_varlen"] = (fa4, dict(d=128, backward=True, varlen=True))
    I["fa4_bwd_bf16_d256"] = (fa4, dict(d=256, backward=True))
    for kind in ("mxfp8", "fp8", "bf16"):
        for d in (128, 64):
            for c in (False, True):
                I[f"cudnn_fwd_{kind}_d{d}{'_causal' if c else ''}"] = (cudnn_fwd, dict(d=d, kind=kind, causal=c))
    I["cudnn_fwd_mxfp8_d128_cga1"] = (cudnn_fwd, dict(d=128, cga=1))
    I["cudnn_fwd_mxfp8_d128_cga2"] = (cudnn_fwd, dict(d=128, cga=2))
    I["cudnn_fwd_mxfp8_d256"] = (cudnn_fwd, dict(d=256))
    I["cudnn_fwd_mxfp8_d192_dv128"] = (cudnn_fwd, dict(d=192, dv=128))
    I["cudnn_bwd_mxfp8_d256"] = (cudnn_bwd_mxfp8, dict())
    I["cudnn_bwd_mxfp8_d256_causal"] = (cudnn_bwd_mxfp8, dict(causal=True))
    return I


ITEMS = _items()


# ------------------------------------------------------------------------------------------------------------------------
# Output
# ------------------------------------------------------------------------------------------------------------------------
def opcodes(ptx: str) -> collections.Counter:
    """Opcode with its modifiers, per instruction: '@%p mma.sync.x.y a, b;' counts as 'mma.sync.x.y'."""
    c: collections.Counter = collections.Counter()
    body = re.sub(r"/\*.*?\*/|//[^\n]*", "", ptx, flags=re.S)
    for stmt in re.split(r"[;{}\n]", body):
        m = re.match(r"\s*(?:\$?[\w$]+:\s*)?(?:@!?%?[\w$]+\s+)?([a-z][a-z0-9_]*(?:(?:\.|::)[A-Za-z0-9_]+)*)(?:\s|$)", stmt)
        if m and not stmt.strip().startswith("."):
            c[m.group(1)] += 1
    return c


def versions():
    v = {}
    for p in ("flash-attn-4", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi", "torch"):
        try:
            v[p] = importlib.metadata.version(p)
        except importlib.metadata.PackageNotFoundError:
            v[p] = None
    return v


def run_one(name: str, out: str, shape, cubin: bool):
    t0 = time.time()
    dest = os.path.join(out, name)
    shutil.rmtree(dest, ignore_errors=True)
    work = os.path.join(dest, "work")
    os.makedirs(work)
    fn, kw = ITEMS[name]
    rec = setup(work, cubin)
    config = fn(rec, shape, **kw)
    if rec.errors:
        raise RuntimeError(rec.errors[0])
    if not rec.launches:
        raise RuntimeError("nothing was launched")
    files: dict = {}
    for path in sorted({l["ptx_path"] for l in rec.launches}, key=[l["ptx_path"] for l in rec.launches].index):
        base = f"{len(files)}"
        shutil.copy(path, os.path.join(dest, base + ".ptx"))
        for c in glob.glob(glob.escape(path[: -len(".ptx")]) + ".cubin"):
            shutil.copy(c, os.path.join(dest, base + ".cubin"))
        files[path] = base + ".ptx"
    launches = []
    for i, l in enumerate(rec.launches):
        path = l.pop("ptx_path")
        with open(path, "rb") as f:
            digest = hashlib.sha256(f.read()).hexdigest()
        side = {"schema": "peer-ptx-launch/1", "item": name, "launch": i, "ptx": files[path], "ptx_sha256": digest, **l}
        with open(os.path.join(dest, f"launch{i}.json"), "w") as f:
            json.dump(rec.final_names(side), f, indent=1)
        launches.append({"json": f"launch{i}.json", "ptx": files[path], **{k: l[k] for k in ("entry", "grid", "cluster", "block", "dynamic_smem_bytes")}})
    with open(os.path.join(dest, "item.json"), "w") as f:
        json.dump(rec.final_names({"schema": "peer-ptx-item/1", "item": name, "versions": versions(), "config": config, "tensors": rec.tensors,
                                   "host_calls": rec.calls, "launches": launches, "notes": rec.notes, "seconds": round(time.time() - t0, 1)}), f, indent=1, default=str)
    shutil.rmtree(work)


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("names", nargs="*", help="items (default: all); a trailing * matches a prefix")
    ap.add_argument("--out", default="peer_ptx_out")
    ap.add_argument("--shape", default="2,2,2,512,512", help="B,H,H_kv,S_q,S_kv: changes grid, descriptors and scalars, and may change the configuration")
    ap.add_argument("--cubin", action="store_true", help="also keep the cubin that the DSL's own ptxas made")
    ap.add_argument("--list", action="store_true")
    ap.add_argument("--jobs", type=int, default=2)
    ap.add_argument("--one", help=argparse.SUPPRESS)
    a = ap.parse_args()
    shape = tuple(int(x) for x in a.shape.split(","))
    if a.list:
        print("\n".join(ITEMS))
        return
    if a.one:
        run_one(a.one, a.out, shape, a.cubin)
        return
    names = [n for n in ITEMS if not a.names or any(n == p or (p.endswith("*") and n.startswith(p[:-1])) for p in a.names)]
    os.makedirs(a.out, exist_ok=True)
    t0, running, summary, todo = time.time(), [], {}, list(names)
    while todo or running:
        while todo and len(running) < a.jobs:
            n = todo.pop(0)
            log = open(os.path.join(a.out, n + ".log"), "w")
            cmd = [sys.executable, os.path.abspath(__file__), "--one", n, "--out", a.out, "--shape", a.shape] + (["--cubin"] if a.cubin else [])
            running.append((n, time.time(), subprocess.Popen(cmd, stdout=log, stderr=subprocess.STDOUT)))
        time.sleep(0.1)
        for r in list(running):
            n, start, p = r
            if p.poll() is None:
                continue
            running.remove(r)
            ok = p.returncode == 0
            with open(os.path.join(a.out, n + ".log")) as f:
                tail = f.read().strip().split("\n")[-1]
            summary[n] = {"ok": ok, "seconds": round(time.time() - start, 1), **({} if ok else {"error": tail})}
            if ok:
                os.unlink(os.path.join(a.out, n + ".log"))
                with open(os.path.join(a.out, n, "item.json")) as f:
                    item = json.load(f)
                ptxs = sorted(glob.glob(os.path.join(a.out, n, "*.ptx")))
                summary[n].update(launches=len(item["launches"]), modules=len(ptxs), ptx_bytes=sum(os.path.getsize(x) for x in ptxs))
            print(f"{'ok  ' if ok else 'FAIL'} {n:36s} {summary[n]['seconds']:5.1f} s  " + (f"{summary[n]['launches']} launches, {summary[n]['ptx_bytes']} B PTX" if ok else tail[:200]), flush=True)
    total, where = collections.Counter(), collections.defaultdict(set)
    for path in glob.glob(os.path.join(a.out, "*", "*.ptx")):
        with open(path) as f:
            for op, k in opcodes(f.read()).items():
                total[op] += k
                where[op].add(os.path.basename(os.path.dirname(path)))
    with open(os.path.join(a.out, "opcodes.txt"), "w") as f:
        for op in sorted(total):
            f.write(f"{op}\t{total[op]}\t{len(where[op])}\n")
    with open(os.path.join(a.out, "summary.json"), "w") as f:
        json.dump({"versions": versions(), "shape": a.shape, "items": summary, "distinct_opcodes": len(total), "seconds": round(time.time() - t0, 1)}, f, indent=1)
    print(f"{sum(s['ok'] for s in summary.values())}/{len(summary)} items, {len(total)} distinct opcodes, {time.time() - t0:.0f} s")


if __name__ == "__main__":
    main()
