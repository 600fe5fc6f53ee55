"""Runs the probes on an sm_90 GPU through the CUDA driver and writes what they left: `python record_probes.py --out h200.json`.

Needs numpy and libcuda.so.1, nothing else. Every probe that faults costs its process, so children run them. With `--only PREFIX`
the results are put into the record that is already there.
"""

import argparse
import base64
import ctypes
import datetime
import json
import lzma
import os
import pathlib
import pickle
import sys
import zlib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import probes as P  # noqa: E402

DTYPES = {"uint8": 0, "uint16": 1, "uint32": 2, "int32": 3, "uint64": 4, "int64": 5, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}  # fmt: skip
SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
CHUNK = 64  # probes per module


class Driver:
    def __init__(self):
        self.cu = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)
        dev = ctypes.c_int()
        self("cuDeviceGet", ctypes.byref(dev), 0)
        self.dev = dev
        name = ctypes.create_string_buffer(100)
        self("cuDeviceGetName", name, 100, dev)
        self.name = name.value.decode()
        self.open()

    def __call__(self, f, *args):
        rc = getattr(self.cu, f)(*args)
        if rc:
            raise RuntimeError(f"{f} returned {rc}")

    def open(self):
        ctx = ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(ctx), self.dev)
        self("cuCtxSetCurrent", ctx)

    def load(self, text):
        log = ctypes.create_string_buffer(20000)
        keys = (ctypes.c_int * 2)(5, 6)  # error log buffer, its size
        values = (ctypes.c_void_p * 2)(ctypes.cast(log, ctypes.c_void_p), 20000)
        mod = ctypes.c_void_p()
        rc = self.cu.cuModuleLoadDataEx(ctypes.byref(mod), text.encode() + b"\0", 2, keys, values)
        if rc:
            raise RuntimeError(f"cuModuleLoadDataEx returned {rc}: {log.value.decode()}")
        return mod

    def tensor_map(self, address, m):
        r = len(m["dims"])
        raw = ctypes.create_string_buffer(256)
        at = (ctypes.addressof(raw) + 63) // 64 * 64
        u64, u32 = ctypes.c_uint64, ctypes.c_uint32
        self("cuTensorMapEncodeTiled", ctypes.c_void_p(at), DTYPES[m["dtype"]], u32(r), ctypes.c_void_p(address), (u64 * r)(*m["dims"]),
             (u64 * max(r - 1, 1))(*m["strides"]), (u32 * r)(*m["box"]), (u32 * r)(*(m["element_strides"] or (1,) * r)), 0,
             SWIZZLES[m["swizzle"]], 0, int(m["oob_fill"] == "nan"))  # fmt: skip
        return (ctypes.c_char * 128).from_buffer(raw, at - ctypes.addressof(raw))

    def run(self, module, p):
        fn = ctypes.c_void_p()
        self("cuModuleGetFunction", ctypes.byref(fn), module, p.name.encode())
        src, dst = ctypes.c_uint64(), ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(src), ctypes.c_size_t(len(p.ins)))
        self("cuMemAlloc_v2", ctypes.byref(dst), ctypes.c_size_t(p.out_bytes))
        self("cuMemcpyHtoD_v2", src, p.ins, ctypes.c_size_t(len(p.ins)))
        self("cuMemsetD8_v2", dst, 0, ctypes.c_size_t(p.out_bytes))
        args = [src, dst]
        for m in p.maps:
            args.append(self.tensor_map((dst if m.get("out") else src).value, m))
        params = (ctypes.c_void_p * len(args))(*[ctypes.addressof(x) for x in args])
        self("cuLaunchKernel", fn, p.grid, 1, 1, p.block, 1, 1, 0, None, params, None)
        self("cuCtxSynchronize")
        out = ctypes.create_string_buffer(p.out_bytes)
        self("cuMemcpyDtoH_v2", out, dst, ctypes.c_size_t(p.out_bytes))
        self("cuMemFree_v2", src)
        self("cuMemFree_v2", dst)
        return out.raw


def driver_version():
    try:
        text = pathlib.Path("/proc/driver/nvidia/version").read_text()
        return next(w for w in text.split() if w[:1].isdigit() and w.count(".") >= 1)
    except (OSError, StopIteration):
        import subprocess

        return subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True).stdout.strip()  # fmt: skip


def source(p):
    """Checksum of a probe's text and inputs: a record is of these and no others."""
    return zlib.crc32(p.entry().encode() + p.ins)


def save(path, record):
    """One compressed stream: the outputs repeat each other."""
    got = sorted(record["probes"].items())
    data = lzma.compress(b"".join(raw for _, (_, raw) in got), preset=9 | lzma.PRESET_EXTREME)
    head = {k: record[k] for k in ("gpu", "driver", "date", "failed")}
    head["probes"] = {name: [crc, len(raw)] for name, (crc, raw) in got}
    head["data"] = base64.b64encode(data).decode()
    pathlib.Path(path).write_text(json.dumps(head, separators=(",", ":")) + "\n")


def load(path):
    """The record; its probes map a name to (checksum of the source, output bytes)."""
    record = json.loads(pathlib.Path(path).read_text())
    data, at = lzma.decompress(base64.b64decode(record.pop("data"))), 0
    for name, (crc, n) in sorted(record["probes"].items()):
        record["probes"][name] = (crc, data[at : at + n])
        at += n
    return record


def child(todo, pipe):
    """Runs probes until one fails; sends one tuple (name, output or None, error) each."""
    with os.fdopen(pipe, "wb") as out:
        d = Driver()
        pickle.dump((d.name, None, ""), out)
        mods = {}
        for i, p in enumerate(todo):
            try:
                if i % CHUNK == 0:
                    mods = d.load(P.module(todo[i : i + CHUNK]))
                pickle.dump((p.name, d.run(mods, p), ""), out)
            except RuntimeError as e:
                pickle.dump((p.name, None, str(e)), out)
                break
            out.flush()


def main():
    a = argparse.ArgumentParser()
    a.add_argument("--out", required=True)
    a.add_argument("--only", default="", help="names that begin so")
    a.add_argument("--new", action="store_true", help="only probes that the record at --out lacks")
    a = a.parse_args()
    record = {"failed": {}, "probes": {}}
    if (a.only or a.new) and os.path.exists(a.out):
        record = load(a.out)
    known = {*record["probes"], *record["failed"]} if a.new else ()
    todo = [p for p in P.PROBES.values() if p.name.startswith(a.only) and p.name not in known]
    for p in todo:
        record["failed"].pop(p.name, None)
    record["driver"], record["date"] = driver_version(), datetime.date.today().isoformat()
    while todo:
        r, w = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(r)
            child(todo, w)
            os._exit(0)
        os.close(w)
        done = 0
        with os.fdopen(r, "rb") as got:
            record["gpu"] = pickle.load(got)[0]
            for p in todo:
                try:
                    name, raw, error = pickle.load(got)
                except EOFError:
                    name, raw, error = p.name, None, "the process died"
                done += 1
                if raw is None:
                    record["failed"][name] = error
                    record["probes"].pop(name, None)
                    break
                record["probes"][name] = (source(p), raw)
        os.waitpid(pid, 0)
        todo = todo[done:]
    save(a.out, record)
    print(record["gpu"], record["driver"], len(record["probes"]), "probes", record["failed"])


if __name__ == "__main__":
    main()
