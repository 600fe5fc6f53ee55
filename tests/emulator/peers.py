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
        if param["name"].startswith("amax") and not any(out):  # the records leave this output out; the kernels write it
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
        undefined = [m[2] for m in self.memory if str(m[3]["initial"]).startswith("uninit")] if options.pop("track_outputs", True) else []
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


def fill(item, seed=0, spread=2):
    """Random inputs for a forward item; returns q, k, v as fp64 [B, H, S, D]."""
    g = torch.Generator().manual_seed(seed)
    c = item.config
    out = []
    for name in "qkv":
        t = item.view(name)
        x = torch.randn(t.shape, generator=g)
        t.copy_(x.to(t.dtype)) if t.dtype != torch.uint8 else t.copy_(x.to(F8).view(torch.uint8))
        val = t.view(F8).double() if t.dtype == torch.uint8 else t.double()
        out.append(val)
    if c.get("dtype"):  # FA4: [B, S, H, D]
        out = [x.transpose(1, 2) for x in out]
    for i, name in enumerate(("sf_q", "sf_k", "sf_v")):
        if name not in item.tensors:
            continue
        b, h, s, d = out[i].shape
        rows, cols = (s, d // 32) if i < 2 else (d, s // 32)
        e = torch.randint(127 - spread, 128 + spread, (b, h, rows, cols), generator=g, dtype=torch.int32)
        f = torch.exp2(e.double() - 127).repeat_interleave(32, -1)
        out[i] = out[i] * (f if i < 2 else f.transpose(-1, -2))
        sf = e.to(torch.uint8)
        if i < 2:
            atoms = sf_atoms(sf)
        else:  # V: rows are D, one atom per 128 of them and 128 keys; D > 128 has its halves outermost
            parts = [sf[:, :, r : r + 128] for r in range(0, d, 128)]
            atoms = torch.stack([torch.cat([sf_atoms(x[..., 4 * t : 4 * t + 4]).reshape(b, h, 1, -1) for t in range(s // 128)], 2) for x in parts])
        item.view(name).copy_(atoms.reshape(item.view(name).shape))
    for name in item.tensors:
        if "descale" in name or name in ("scale_o",):
            item.view(name).fill_(1.0)
    return out


def run_forward(folder, **options):
    """Returns (max relative error of out, of lse, seconds, reports)."""
    item = Item(folder)
    c = item.config
    q, k, v = fill(item)
    t0 = time.time()
    reports = item.run(**options)
    dt = time.time() - t0
    want, lse = attention(q, k, v, c.get("softmax_scale", 1 / math.sqrt(c["D"])), c.get("causal"), c.get("window"))
    name = "out" if "out" in item.tensors else "o"
    got = item.view(name).double()
    if c.get("dtype"):
        got = got.transpose(1, 2)
    err = (got - want).norm() / want.norm()
    err_lse = (item.view("lse").double() - lse).abs().max()
    return err.item(), err_lse.item(), dt, reports


def run_backward(folder, **options):
    """FA4 backward (dense): returns (largest relative error of dq, dk, dv; 0; seconds; reports)."""
    item = Item(folder)
    c = item.config
    g = torch.Generator().manual_seed(0)
    x = {}
    for n in ("q", "k", "v", "dout"):
        t = item.view(n)
        t.copy_(torch.randn(t.shape, generator=g).to(t.dtype))
        x[n] = t.double().transpose(1, 2).clone().requires_grad_(n != "dout")
    out, lse = attention(x["q"], x["k"], x["v"], c["softmax_scale"], c["causal"])
    out.backward(x["dout"])
    item.view("out").copy_(out.detach().transpose(1, 2).to(torch.bfloat16))
    item.view("lse").copy_(lse.detach())
    t0 = time.time()
    reports = item.run(**options)
    dt = time.time() - t0
    errs = [((item.view("d" + n).double().transpose(1, 2) - x[n].grad).norm() / x[n].grad.norm()).item() for n in "qkv"]
    return max(errs), 0.0, dt, reports


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("out")
    ap.add_argument("items", nargs="*")
    ap.add_argument("--order", default="eager")
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--no-checks", action="store_true")
    ap.add_argument("--threads", type=int, default=2)
    a = ap.parse_args()
    names = a.items or sorted(n for n in os.listdir(a.out) if "varlen" not in n and "cudnn_bwd" not in n and os.path.isdir(os.path.join(a.out, n)))
    bad = 0
    for n in names:
        try:
            run = run_backward if "_bwd_" in n else run_forward
            err, lse, dt, reports = run(os.path.join(a.out, n), order=a.order, seed=a.seed, checks=not a.no_checks, threads=a.threads)
            insns = sum(r.instructions for r in reports)
            print(f"{n:36s} out rel err {err:.2e}  lse abs err {lse:.2e}  {dt:6.2f} s  {insns} warp instructions, {insns / dt / 1e6:.2f} M/s", flush=True)
        except (emulator.EmulatorError, ValueError, KeyError, RuntimeError) as e:
            bad += 1
            print(f"{n:36s} {type(e).__name__}: {str(e)[:3000]}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
