"""Runs peers' kernels (PTX and launch records made by tools/peer_ptx.py) in the emulator and compares them with PyTorch.

    python tests/emulator/peers.py OUT [item ...] [--order eager|delayed|random] [--seed N] [--no-checks] [--threads N]

OUT is the output folder of peer_ptx.py. Nothing of the peers' is stored in this repository.
"""

import argparse
import json
import math
import os
import struct
import sys
import time

import torch

from flash_attn_mx import emulator

F8 = torch.float8_e4m3fn


def load(path):
    with open(path) as f:
        return json.load(f)


class Item:
    """Tensors of one item in host memory, and its launches with every recorded address moved there."""

    def __init__(self, folder):
        self.folder = folder
        self.item = load(os.path.join(folder, "item.json"))
        self.config = self.item["config"]
        self.memory, self.tensors = [], {}
        self.scratch = torch.zeros(16, dtype=torch.float32)
        for t in self.item["tensors"]:
            n = t["bytes"]
            raw = torch.zeros(n + 1024, dtype=torch.uint8)
            skip = -raw.data_ptr() % 1024
            raw = raw[skip : skip + n]
            self.memory.append((t["address"], n, raw, t))
            for name in [t["name"], *t.get("aliases", [])]:
                self.tensors.setdefault(name, raw)
            t["raw"] = raw
            if isinstance(t["initial"], list):
                raw.view(torch.int32).copy_(torch.tensor(t["initial"], dtype=torch.int32))

    def view(self, name):
        """The first recorded view of a tensor."""
        t = next(t for t in self.item["tensors"] if name in (t["name"], *t.get("aliases", [])))
        v = t["views"][0]
        dtype = getattr(torch, v["dtype"].removeprefix("torch."))
        x = t["raw"].view(dtype)
        return x.as_strided(v["shape"], v["strides"], x.storage_offset() + v["offset_elements"])

    def relocate(self, param):
        """The parameter's bytes with addresses moved: a descriptor's first word, any word of other kinds."""
        out = bytearray.fromhex(param["hex"])
        if param["name"].startswith("amax") and not any(
            out
        ):  # the records leave this output out; the kernels write it
            struct.pack_into("<Q", out, 0, self.scratch.data_ptr())
            return bytes(out)
        for at in range(0, 8 if param["kind"] == "tma_descriptor" else len(out) - 7, 8):
            (word,) = struct.unpack_from("<Q", out, at)
            for base, n, raw, _ in self.memory:
                if base <= word < base + n:
                    struct.pack_into("<Q", out, at, raw.data_ptr() + word - base)
        return bytes(out)

    def run(self, **options):
        reports = []
        modules = {}
        undefined = (
            [m[2] for m in self.memory if str(m[3]["initial"]).startswith("uninit")]
            if options.pop("track_outputs", True)
            else []
        )
        for entry in self.item["launches"]:
            rec = load(os.path.join(self.folder, entry["json"]))
            path = os.path.join(self.folder, rec["ptx"])
            if path not in modules:
                modules[path] = emulator.Module.from_ptx(path)
            block = bytearray(rec["param_bytes"])
            for p in rec["params"]:
                block[p["offset"] : p["offset"] + p["size"]] = self.relocate(p)
            kernel = modules[path].kernels[rec["entry"]]
            reports.append(kernel.launch(rec["grid"], rec["block"], bytes(block), rec["cluster"], rec["dynamic_smem_bytes"],
                                         buffers=[self.scratch, *(m[2] for m in self.memory)], undefined=undefined, **options))  # fmt: skip
            undefined = []  # a later launch may read what an earlier one wrote
        return reports


def sf_atoms(scale):
    """(B, H, rows, blocks) scale bytes -> (B, H, row tiles, bytes): 512-byte 128x4 atoms, as tcgen05.cp wants them."""
    b, h, r, k = scale.shape
    scale = torch.nn.functional.pad(scale, (0, -k % 4, 0, -r % 128), value=127)
    r, k = scale.shape[2:]
    x = scale.reshape(b, h, r // 128, 4, 32, k // 4, 4)  # tile, i/32, i%32, kb/4, kb%4
    return x.permute(0, 1, 2, 5, 4, 3, 6).reshape(b, h, r // 128, -1)


def attention(q, k, v, scale, causal=False, window=None):
    """fp64 attention, [B, H, S, D] -> out, lse (natural log)."""
    g = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
    s = q.double() @ k.double().transpose(-1, -2) * scale
    sq, sk = s.shape[-2:]
    i, j = torch.arange(sq)[:, None] + sk - sq, torch.arange(sk)[None]
    keep = torch.ones(sq, sk, dtype=torch.bool)
    if causal:
        keep &= j <= i
    if window:
        keep &= (j >= i - window[0]) & (j <= i + window[1])
    s = s.masked_fill(~keep, -math.inf)
    return torch.softmax(s, -1) @ v.double(), torch.logsumexp(s, -1)


def sequences(item, x, side):
    """FA4's [B, S, H, D] or packed [T, H, D] -> a list of [b, H, s, D] views; lse [B, H, S] or [H, T] -> [b, H, s]."""
    if not item.config["varlen"]:
        return [x if side == "lse" else x.transpose(1, 2)]
    cu = item.view("cu_seqlens_k" if side == "k" else "cu_seqlens_q").tolist()
    parts = [x[..., a:b] if side == "lse" else x[a:b].transpose(0, 1) for a, b in zip(cu, cu[1:])]
    return [p[None] for p in parts]


def distance(got, want):
    """Relative error (Frobenius norm) over all sequences together."""
    d = sum(((g.double() - w) ** 2).sum() for g, w in zip(got, want))
    return (d / sum((w**2).sum() for w in want)).sqrt().item()


def store(item, name, x):
    """Puts x, rounded to the tensor's type, into a tensor; returns what is there now as fp64."""
    t = item.view(name)
    t.copy_(x.to(t.dtype)) if t.dtype != torch.uint8 else t.copy_(x.to(F8).view(torch.uint8))
    return t.view(F8).double() if t.dtype == torch.uint8 else t.double()


def random_scales(shape, spread, g):
    """Biased exponents of E8M0 around one, and the factors of their blocks along the last axis."""
    e = torch.randint(127 - spread, 128 + spread, shape, generator=g, dtype=torch.int32)
    return e.to(torch.uint8), torch.exp2(e.double() - 127).repeat_interleave(32, -1)


def quantised(x, axis):
    """x as the backward multiplies it: e4m3 with one power of two per 32 along axis, the smallest that does not overflow."""
    x = x.transpose(axis, -1)
    b = x.unflatten(-1, (-1, 32))
    f = torch.exp2(torch.ceil(torch.log2(b.abs().amax(-1, keepdim=True) / 448)))
    f = torch.where(f > 0, f, 1)
    return ((b / f).float().to(F8).double() * f).flatten(-2).transpose(axis, -1)


def column_atoms(sf):
    """Scales along the sequence, (B, H, D, blocks): atoms of 128 of D, whose halves are outermost when D > 128."""
    return torch.stack([sf_atoms(sf[:, :, r : r + 128]) for r in range(0, sf.shape[2], 128)])


def fill(item, seed=0, spread=2):
    """Random inputs for a forward item; returns q, k, v as fp64, a list of sequences [b, H, s, D] each."""
    g = torch.Generator().manual_seed(seed)
    c = item.config
    out = [store(item, n, torch.randn(item.view(n).shape, generator=g)) for n in "qkv"]
    if c.get("dtype"):
        out = [sequences(item, x, "q" if i == 0 else "k") for i, x in enumerate(out)]
    else:
        out = [[x] for x in out]
    for i, name in enumerate(("sf_q", "sf_k", "sf_v")):
        if name not in item.tensors:
            continue
        b, h, s, d = out[i][0].shape
        sf, f = random_scales((b, h, s, d // 32) if i < 2 else (b, h, d, s // 32), spread, g)
        out[i][0] = out[i][0] * (f if i < 2 else f.transpose(-1, -2))
        atoms = sf_atoms(sf) if i < 2 else column_atoms(sf)
        item.view(name).copy_(atoms.reshape(item.view(name).shape))
    for name in item.tensors:
        if "descale" in name or name in ("scale_o",):
            item.view(name).fill_(1.0)
    return out


def timed(item, options):
    t0 = time.time()
    reports = item.run(**options)
    return time.time() - t0, reports


def run_forward(folder, **options):
    """Returns (relative error of out, absolute error of lse, seconds, reports)."""
    item = Item(folder)
    c = item.config
    inputs = fill(item)
    dt, reports = timed(item, options)
    scale = c.get("softmax_scale", 1 / math.sqrt(c["D"]))
    want = [attention(q, k, v, scale, c.get("causal"), c.get("window")) for q, k, v in zip(*inputs)]
    got, lse = item.view("out" if "out" in item.tensors else "o"), item.view("lse")
    if c.get("dtype"):
        got, lse = sequences(item, got, "q"), sequences(item, lse, "lse")
    else:
        got, lse = [got], [lse]
    worst = max((x.double() - w[1]).abs().max().item() for x, w in zip(lse, want))
    return distance(got, [w[0] for w in want]), worst, dt, reports


def run_backward(folder, **options):
    """FA4 backward: returns (largest relative error of dq, dk, dv; 0; seconds; reports)."""
    item = Item(folder)
    c = item.config
    g = torch.Generator().manual_seed(0)
    x = {}
    for n in ("q", "k", "v", "dout"):
        parts = sequences(item, store(item, n, torch.randn(item.view(n).shape, generator=g)), "k" if n in "kv" else "q")  # fmt: skip
        x[n] = [p.clone().requires_grad_(n != "dout") for p in parts]
    saved = sequences(item, item.view("out"), "q"), sequences(item, item.view("lse"), "lse")
    for i, (q, k, v, dout) in enumerate(zip(*x.values())):
        out, lse = attention(q, k, v, c["softmax_scale"], c["causal"])
        out.backward(dout)
        saved[0][i].copy_(out.detach())
        saved[1][i].copy_(lse.detach())
    dt, reports = timed(item, options)
    errors = [
        distance(
            sequences(item, item.view("d" + n), n if n == "q" else "k"), [p.grad for p in x[n]]
        )
        for n in "qkv"
    ]
    return max(errors), 0.0, dt, reports


def run_backward_mxfp8(folder, **options):
    """cuDNN's MXFP8 backward: every operand has its own random values and scales, per direction of its blocks.

    P is compared as the kernel documents it, e4m3 of P * 2^8, and dS with a power of two per block of 32.
    """
    item = Item(folder)
    c = item.config
    g = torch.Generator().manual_seed(0)
    x = {}
    for n in ("q", "k", "v", "do", "q_T", "k_T", "do_T"):
        v = store(item, n, torch.randn(item.view(n).shape, generator=g))
        b, h, s, d = v.shape
        column = n.endswith("_T")
        sf, f = random_scales((b, h, d, s // 32) if column else (b, h, s, d // 32), 2, g)
        x[n] = v * (f.transpose(-1, -2) if column else f)
        item.view("sf_" + n).copy_((column_atoms(sf) if column else sf_atoms(sf)).reshape(-1))
    scale = c["softmax_scale"]
    out, lse = attention(x["q"], x["k"], x["v"], scale, c["causal"])
    o, do = store(item, "o", out), store(item, "do_f16", x["do"])
    item.view("stats").copy_(lse[..., None])
    s = x["q"] @ x["k"].mT * scale
    p = torch.exp(s - lse[..., None])
    if c["causal"]:
        p = p.tril()
    ds = p * (x["do"] @ x["v"].mT - (o * do).sum(-1, keepdim=True)) * scale
    p = (p * 256).float().to(F8).double() / 256
    want = dict(
        dq=quantised(ds, -1) @ x["k_T"], dk=quantised(ds, -2).mT @ x["q_T"], dv=p.mT @ x["do_T"]
    )
    dt, reports = timed(item, options)
    return max(distance([item.view(n)], [w]) for n, w in want.items()), 0.0, dt, reports


def runner(name):
    if "_bwd_" not in name:
        return run_forward
    return run_backward_mxfp8 if "mxfp8" in name else run_backward


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("out")
    ap.add_argument("items", nargs="*")
    ap.add_argument("--order", default="eager")
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--no-checks", action="store_true")
    ap.add_argument("--threads", type=int, default=2)
    a = ap.parse_args()
    names = a.items or sorted(n for n in os.listdir(a.out) if os.path.isdir(os.path.join(a.out, n)))
    bad = 0
    for n in names:
        try:
            err, lse, dt, reports = runner(n)(
                os.path.join(a.out, n),
                order=a.order,
                seed=a.seed,
                checks=not a.no_checks,
                threads=a.threads,
            )
            insns = sum(r.instructions for r in reports)
            print(
                f"{n:36s} out rel err {err:.2e}  lse abs err {lse:.2e}  {dt:6.2f} s  {insns} warp instructions, {insns / dt / 1e6:.2f} M/s",
                flush=True,
            )
        except (emulator.EmulatorError, ValueError, KeyError, RuntimeError) as e:
            bad += 1
            print(f"{n:36s} {type(e).__name__}: {str(e)[:3000]}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
