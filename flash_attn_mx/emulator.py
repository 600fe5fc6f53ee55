"""Runs sm_100a PTX on a CPU.

    from flash_attn_mx import emulator
    m = emulator.Module.from_ptx("kernel.ptx")
    report = m.kernels["my_kernel"].launch(grid=(4,), block=(128,), args=[x, y, 1.0, 128])

Tensors (torch CPU tensors, numpy arrays) are used in place; every access is checked against them. See docs/emulator.md.
`python -m flash_attn_mx.emulator inspect FILE.ptx` prints kernels, resources and coverage.
"""

import os
import struct
import sys
from dataclasses import dataclass, field

CHECKS = ("uninit", "proxy", "async", "leaks", "replicas", "race", "lap")
STRICT = ("ptx",)  # what the PTX ISA asks for and much code that works does not keep
_ORDERS = {"eager": 0, "delayed": 1, "random": 2}
_MMA = {"model": 0, "fp64": 1}
_DTYPES = {"uint8": 0, "uint16": 1, "uint32": 2, "int32": 3, "uint64": 4, "int64": 5, "float16": 6, "float32": 7,
           "float64": 8, "bfloat16": 9, "float32_ftz": 10, "tf32": 11, "tf32_ftz": 12,
           "u4x16": 13, "u4x16_p64": 14, "u6x16_p32": 15}  # fmt: skip
_SWIZZLES = {
    "none": 0,
    "32B": 1,
    "64B": 2,
    "128B": 3,
    "128B_ATOM_32B": 4,
    "128B_ATOM_32B_FLIP_8B": 5,
    "128B_ATOM_64B": 6,
}
_FILLS = {"zero": 0, "nan": 1}
_TRACE_EVENTS = 1_000_000  # of one cluster


class EmulatorError(RuntimeError):
    """A kernel did something wrong: the message says which check, where, and with which values."""


def _native():
    try:
        from flash_attn_mx import _emulator
    except ImportError as e:
        raise ImportError("flash_attn_mx was built without its emulator (csrc/emulator)") from e
    return _emulator


def __getattr__(name):
    if name == "PtxError":  # subclass of ValueError, raised for malformed or unsupported PTX
        return _native().PtxError
    raise AttributeError(name)


def _dims(v, what):
    v = (v,) if isinstance(v, int) else tuple(v)
    if not 1 <= len(v) <= 3 or not all(isinstance(x, int) and 0 < x < 2**31 for x in v):
        raise ValueError(f"{what} must be one to three ints of 1..2^31-1, got {v}")
    return v + (1,) * (3 - len(v))


def _whole(v, what, low, high):
    if isinstance(v, bool) or not isinstance(v, int):
        raise TypeError(f"{what} must be an int, got {type(v).__name__}")
    if not low <= v <= high:
        raise ValueError(f"{what} must be {low}..{high}, got {v}")
    return v


def _is_array(x):
    return hasattr(x, "data_ptr") or hasattr(x, "__array_interface__")


def _span(x):
    """(address, bytes, read_only) of the memory that a tensor or array covers."""
    if hasattr(x, "data_ptr"):
        if x.device.type != "cpu":
            raise TypeError(f"the emulator needs CPU tensors, got one on {x.device}")
        if x.numel() == 0:
            return x.data_ptr(), 0, False
        last = sum((n - 1) * s for n, s in zip(x.shape, x.stride()))
        return x.data_ptr(), (last + 1) * x.element_size(), False
    i = x.__array_interface__
    if x.dtype.hasobject:
        raise TypeError("arrays of Python objects have no memory that a kernel could use")
    if x.size == 0:
        return i["data"][0], 0, False
    if any(s < 0 for s in x.strides):
        raise ValueError("arrays with negative strides are not supported")
    last = sum((n - 1) * s for n, s in zip(x.shape, x.strides))
    return i["data"][0], last + x.itemsize, bool(i["data"][1])


def address_of(x):
    """Device address of a tensor or array: what a kernel gets as pointer."""
    return _span(x)[0]


@dataclass
class TensorMap:
    """A CUtensorMap; make it with `tiled`. `encoded` is its 128 bytes."""

    encoded: bytes
    tensor: object = None

    @staticmethod
    def tiled(tensor, box, *, dims=None, strides=None, dtype=None, offset=0, element_strides=None, swizzle="none",
              interleave=0, l2_promotion=0, oob_fill="zero"):  # fmt: skip
        """The arguments of cuTensorMapEncodeTiled, innermost dimension first.

        Args:
          tensor: torch tensor, numpy array, or an int address (then dims, strides and dtype are needed).
          box: elements per dimension.   dims: extents; default: the tensor's, reversed.
          strides: bytes, for dimensions 1..rank-1; default: the tensor's.
          dtype: "uint8", "bfloat16", … (8-bit floats travel as uint8); "u4x16", "u4x16_p64", "u6x16_p32" for packed 4- and 6-bit
            elements, with dims and box in elements (of an int address or a uint8 tensor).   offset: bytes added to the address.
          swizzle: none, 32B, 64B, 128B, 128B_ATOM_32B, 128B_ATOM_64B.   oob_fill: zero or nan.
        Raises: ValueError where the driver returns CUDA_ERROR_INVALID_VALUE.
        """
        if isinstance(tensor, int):
            address, owner = tensor, None
        else:
            address, owner = _span(tensor)[0], tensor
            size = tensor.element_size() if hasattr(tensor, "element_size") else tensor.itemsize
            if dims is None:
                dims = tuple(reversed(tensor.shape))
            if strides is None:
                st = (
                    tensor.stride()
                    if hasattr(tensor, "data_ptr")
                    else [s // size for s in tensor.strides]
                )
                strides = tuple(s * size for s in reversed(st[:-1]))
            if dtype is None:
                dtype = str(tensor.dtype).removeprefix("torch.")
                dtype = "uint8" if dtype.startswith(("float8", "int8")) else dtype
        for name, table, value in (
            ("dtype", _DTYPES, dtype),
            ("swizzle", _SWIZZLES, swizzle),
            ("oob_fill", _FILLS, oob_fill),
        ):
            if value not in table:
                raise ValueError(f"{name} must be one of {', '.join(table)}, got {value!r}")
        es = tuple(element_strides) if element_strides else (1,) * len(tuple(dims))
        data = _native().tensormap(_DTYPES[dtype], address + offset, list(dims), list(strides), list(box), list(es), interleave,
                                   _SWIZZLES[swizzle], l2_promotion, _FILLS[oob_fill])  # fmt: skip
        return TensorMap(data, owner)


@dataclass
class Report:
    """What a launch did."""

    instructions: int  # warp instructions executed
    forms: dict  # isa.def form -> count
    opcodes: dict  # instruction as written -> count
    warp_instructions: list  # of cluster 0, CTA by CTA
    mma: int
    mma_flop: int
    tma_load_bytes: int
    tma_store_bytes: int
    global_load_bytes: int
    global_store_bytes: int
    barrier_waits: int
    output: list = field(default_factory=list)  # printf


class Kernel:
    """One entry of a module."""

    def __init__(self, module, info):
        self._module = module
        self.name = info["name"]
        self.params = info["params"]
        self.param_bytes = info["param_bytes"]
        self.info = info

    def __repr__(self):
        return f"<Kernel {self.name}: {len(self.params)} parameters, {self.info['instructions']} instructions>"

    def _pack(self, args, buffers):
        if isinstance(args, (bytes, bytearray)):
            return bytes(args)
        if len(args) != len(self.params):
            raise TypeError(f"{self.name} takes {len(self.params)} arguments, got {len(args)}")
        block = bytearray(self.param_bytes)
        for i, (a, p) in enumerate(zip(args, self.params)):
            n = p["size"]
            if isinstance(a, TensorMap):
                raw = a.encoded
                if a.tensor is not None:
                    buffers.append(a.tensor)
            elif _is_array(a):
                buffers.append(a)
                raw = struct.pack("<Q", _span(a)[0])
            elif isinstance(a, (bytes, bytearray)):
                raw = bytes(a)
            elif isinstance(a, (bool, int)):
                if not -(1 << 8 * n - 1) <= a < 1 << 8 * n:
                    raise ValueError(
                        f"argument {i} ({p['name']}): {a} does not fit a parameter of {n} bytes"
                    )
                raw = (int(a) & ((1 << 8 * n) - 1)).to_bytes(n, "little")
            elif isinstance(a, float):
                if n not in (4, 8):
                    raise TypeError(
                        f"argument {i} ({p['name']}): a float needs a 4- or 8-byte parameter, not {n}"
                    )
                raw = struct.pack("<f" if n == 4 else "<d", a)
            else:
                raise TypeError(f"argument {i} ({p['name']}): cannot pass {type(a).__name__}")
            if len(raw) != n:
                raise ValueError(
                    f"argument {i} ({p['name']}): {len(raw)} bytes for a parameter of {n}"
                )
            block[p["offset"] : p["offset"] + n] = raw
        return bytes(block)

    def launch(self, grid, block, args, cluster=(1, 1, 1), smem_bytes=0, *, order="eager", seed=0, checks=True, threads=1,
               mma="model", buffers=(), undefined=(), timeout=600.0, memory=8 << 30, stack=512 << 10, printf_bytes=1 << 20,
               trace=None, registers=0):  # fmt: skip
        """Runs the kernel to completion.

        Args:
          grid, cluster, block: up to three ints each.   smem_bytes: dynamic shared memory.
          args: one per parameter: int, float, bytes, TensorMap, tensor or array (passed by address); or the whole
            parameter block as bytes.
          order: when asynchronous work happens: "eager" at issue, "delayed" only when no warp can go on, "random" any time.
          seed: of the warp and asynchronous order; the same seed gives the same run (with cluster launch control: on one thread).
          checks: True (CHECKS), "all" (CHECKS and STRICT), False, or names out of both. Bounds, alignment, barrier and descriptor errors are always raised.
          mma: "model" (25-bit truncating bit model) or "fp64".
          buffers: tensors that the kernel reaches through addresses inside bytes.   undefined: those of its tensors
            whose contents are not defined yet: reading them before a write is an error.
          timeout: seconds of wall time.   memory: host bytes that the clusters which are resident together may take;
            fewer are resident if they need more, and a launch whose one cluster needs more is refused.
          stack: bytes of local memory per thread, frames of called functions included.
          printf_bytes: what printf may leave; later lines are dropped, and the last line of Report.output counts them.
          trace: path of a trace to write (Chrome's trace-event format; open it at ui.perfetto.dev), also when the kernel
            fails. The first million events of a cluster.
          registers: per thread at launch, which setmaxnreg divides; 0: .maxnreg, or all that the launch bounds leave.
        Returns: Report.
        Raises: EmulatorError for anything the kernel does wrong, the time limit included; ValueError/TypeError for wrong
          arguments and for what exceeds memory= or stack=; KeyboardInterrupt.
        """
        if order not in _ORDERS:
            raise ValueError(f"order must be one of {', '.join(_ORDERS)}, got {order!r}")
        if mma not in _MMA:
            raise ValueError(f"mma must be one of {', '.join(_MMA)}, got {mma!r}")
        known = CHECKS + STRICT
        names = {True: CHECKS, False: (), "all": known}.get(checks) if isinstance(checks, (bool, str)) else tuple(checks)  # fmt: skip
        for c in names if names is not None else (checks,):
            if c not in known:
                raise ValueError(f"unknown check {c!r}; there are {', '.join(known)}")
        _whole(smem_bytes, "smem_bytes", 0, 232448)
        _whole(seed, "seed", -(2**63), 2**64 - 1)
        _whole(threads, "threads", 1, 256)
        for what, v in (("memory", memory), ("stack", stack), ("printf_bytes", printf_bytes)):
            _whole(v, what, 0, 2**48)
        _whole(registers, "registers", 0, 255)
        if not 0 < timeout <= 1e9:
            raise ValueError(f"timeout must be a number of seconds above 0, got {timeout}")
        used = list(buffers)
        block_bytes = self._pack(args, used)
        options = dict(grid=_dims(grid, "grid"), cluster=_dims(cluster, "cluster"), block=_dims(block, "block"), smem_bytes=smem_bytes, order=_ORDERS[order],
                       seed=seed & (2**64 - 1), threads=threads, mma=_MMA[mma], timeout=float(timeout), memory=memory, stack=stack, printf_bytes=printf_bytes, trace_events=_TRACE_EVENTS if trace else 0, checks=list(names), registers=registers)  # fmt: skip
        out = self._module._native.launch(
            self.name, block_bytes, _regions(used, undefined), options
        )
        error = out.pop("error")
        if trace:
            from flash_attn_mx import _emulator_trace

            rows, dropped = out.pop("trace"), out.pop("trace_dropped")
            _emulator_trace.write(trace, self.name, rows, dropped, options, error)
        if error:
            raise EmulatorError(error)
        return Report(**out)


def _regions(used, undefined):
    """Disjoint (address, bytes, read_only, undefined, name) rows; views of one memory are merged."""
    fresh = {_span(x)[0] for x in undefined}
    rows = []
    for i, x in enumerate([*used, *undefined]):
        a, n, ro = _span(x)
        if n:
            shape = "x".join(str(s) for s in x.shape)
            rows.append(
                [a, n, ro, a in fresh, f"#{i} {str(x.dtype).removeprefix('torch.')}[{shape}]"]
            )
    rows.sort(key=lambda r: r[0])
    merged = []
    for r in rows:
        if merged and r[0] < merged[-1][0] + merged[-1][1]:
            m = merged[-1]
            m[1] = max(m[1], r[0] + r[1] - m[0])
            m[2] &= r[2]
            m[3] &= r[3]
        else:
            merged.append(r)
    return [tuple(r) for r in merged]


class Module:
    """A loaded PTX module."""

    def __init__(self, text):
        if isinstance(text, str):
            text = text.encode("utf-8", "replace")
        self._native = _native().Module(bytes(text))
        self.kernels = {k["name"]: Kernel(self, k) for k in self._native.kernels()}

    @staticmethod
    def from_ptx(path_or_text):
        """Parses PTX, given as text (str or bytes) or as a path. A str without a line break or `.version` is a path.

        Raises: PtxError (a ValueError) with the line for what it cannot run; OSError.
        """
        text = path_or_text
        if isinstance(text, os.PathLike) or (
            isinstance(text, str) and "\n" not in text and ".version" not in text
        ):
            with open(text, "rb") as f:
                text = f.read()
        if not isinstance(text, (str, bytes, bytearray)):
            raise TypeError(f"PTX must be a path, str or bytes, got {type(text).__name__}")
        return Module(text)

    def inspect(self):
        """Text: kernels, their resources, and which instruction forms they use."""
        n = _native()
        table = n.isa_table()
        lines = []
        for k in self.kernels.values():
            i = k.info
            r = self._native.resources(k.name)
            lines.append(f"{k.name}")
            lines.append(f"  {i['instructions']} instructions, {i['registers']} virtual registers, {i['param_bytes']} B parameters, {r['static_smem']} B static shared, {i['local_bytes']} B local; "
                         f"reqntid {i['reqntid']}, cluster {i['reqcluster']}")  # fmt: skip
            for op, count in sorted(i["opcodes"].items()):
                row = table[n.match(op)]
                how = "ignored" if row[1] == "ignored" else row[3]
                lines.append(f"  {count:7d}  {op}  [{how}]")
        return "\n".join(lines)


def isa_table():
    """Rows of isa.def: (form, decoder, PTX ISA section, evidence, test)."""
    return _native().isa_table()


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if len(argv) != 2 or argv[0] != "inspect":
        print("usage: python -m flash_attn_mx.emulator inspect FILE.ptx", file=sys.stderr)
        return 2
    try:
        print(Module.from_ptx(argv[1]).inspect())
    except (ValueError, OSError) as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
