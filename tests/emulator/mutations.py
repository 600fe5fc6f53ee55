"""Defects planted in the PTX of the sm_100 attention kernels, which pass: the emulator has to notice every one.

    python tests/emulator/mutations.py [name ...]     # the table: defect, and what each order says about it

An edit finds its place by role and by the order of the source (csrc/kernels/attn_fwd, attn_bwd), not by register or line
number; one that finds nothing is an error.
"""

import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import torch
from kernels import attn_bwd
from kernels.attn_fwd import expected, quantise, run

from flash_attn_mx import _native, emulator

PTX = _native.DEVICE / "attn_fwd_d64_bf16.sm_100f.ptx"
BACKWARD_PTX = _native.DEVICE / "attn_bwd_d64_fp32.sm_100f.ptx"
PROBLEMS = ("plain", "causal", "long", "square", "backward")
ORDERS = [("eager", 0), *((order, seed) for order in ("delayed", "random") for seed in range(4))]

WAIT = r"mbarrier\.try_wait"
ARRIVE = r"mbarrier\.arrive\.shared"
EXPECT = r"mbarrier\.arrive\.expect_tx"
INIT = r"mbarrier\.init"
COMMIT = r"tcgen05\.commit"
CP = r"tcgen05\.cp"
MMA = r"tcgen05\.mma"
MMA_SS = r"tcgen05\.mma\S* \[%r\d+\], %rd"
MMA_TS = r"tcgen05\.mma\S* \[%r\d+\], \["
PROXY = r"fence\.proxy\.async"
TMA = r"cp\.async\.bulk\.tensor"
BULK = r"cp\.async\.bulk\.shared"


class Text:
    """PTX as lines; roles of the forward kernel are delimited by its own marks, the backward kernel is all one."""

    def __init__(self, text):
        self.lines = text.split("\n")
        self.roles = {"all": (0, len(self.lines))}
        if ".entry attn_bwd" in text:
            return
        dec = self.find(r"setmaxnreg\.dec", 0, len(self.lines))[0]
        inc = self.find(r"setmaxnreg\.inc", 0, len(self.lines))[0]
        elect = [i for i in self.find(r"elect\.sync", 0, len(self.lines)) if i > dec]
        assert len(elect) == 2, "mma and load elect one lane each"
        end = self.find(r"bar\.sync", 0, len(self.lines))[-1]
        self.roles |= {
            "start": (0, inc),
            "softmax": (inc, dec),
            "mma": (elect[0], elect[1]),
            "load": (elect[1], end - 3),
            "end": (end - 3, len(self.lines)),
        }

    def find(self, pattern, first, last):
        rx = re.compile(pattern)
        return [i for i in range(first, last) if rx.search(self.lines[i])]

    def edit(self, role, pattern, which, change):
        """Changes the matching lines with these indices (None: all of them)."""
        at = self.find(pattern, *self.roles[role])
        at = at if which is None else [at[w] for w in which]
        assert at, f"no {pattern} in {role}"
        for i in at:
            new = change(self.lines[i])
            assert new != self.lines[i], self.lines[i]
            self.lines[i] = new  # line numbers stay: several statements go on one line

    def __str__(self):
        return "\n".join(self.lines)


# --- changes of one line ---------------------------------------------------------------------------------------------


def drop(line):
    """A dropped wait succeeds at once; anything else disappears."""
    return " setp.eq.u32 done, 0, 0;" if "try_wait" in line else ""


def sub(pattern, new):
    return lambda line: re.sub(pattern, new, line, count=1)


def flip_parity(line):
    return re.sub(
        r"^(.*), (%r\d+);", r" .reg .b32 flipped; xor.b32 flipped, \2, 1; \1, flipped;", line
    )


def operand(index, bits, size):
    """XORs bits into the index-th register of the instruction, through a scratch register of the scope."""

    def change(line):
        regs = re.findall(r"%r[ds]?\d+", line)
        reg = regs[index]
        head, tail = line.split(reg, 1) if regs.count(reg) == 1 else line.rsplit(reg, 1)
        return f"{{ .reg .b{size} mutant; xor.b{size} mutant, {reg}, {bits}; {head}mutant{tail} }}"

    return change


def columns(n):
    """Moves the first address in tensor memory by n columns."""
    return sub(r"\[(%r\d+)\]", rf"[\1+{n}]")


# --- defects ---------------------------------------------------------------------------------------------------------


@dataclass
class Mutation:
    kind: str
    name: str
    edit: Callable  # of a Text
    caught: str  # an order that catches it, of ORDERS: "eager", "delayed", "random/1"
    problem: str = "plain"


def at(role, pattern, which, change):
    which = (which,) if isinstance(which, int) else which
    return lambda t: t.edit(role, pattern, which, change)


def move_before(role, pattern, which, before, n):
    """Moves a line, with what computes its address."""

    def edit(t):
        (a,) = [t.find(pattern, *t.roles[role])[which]]
        b = t.find(before, *t.roles[role])[n]
        assert b < a
        moved, first = [t.lines[a].strip()], a
        for _ in range(2):
            reg = re.findall(r"%r\d+", moved[0])[-1]
            defs = [i for i in t.find(rf"^\s+[a-z]\S+\s+{reg},", t.roles[role][0], first)]
            if not defs or defs[-1] < b:
                break
            first = defs[-1]
            moved.insert(0, t.lines[first].strip())
        t.lines[b] = " ".join(moved) + " " + t.lines[b].strip()
        t.lines[a] = ""

    return edit


def move_behind(role, pattern, which, behind, label=r"^\$L__"):
    """Moves lines that name no register behind the next line that matches `behind`, and behind the label after that."""

    def edit(t):
        found = t.find(pattern, *t.roles[role])
        for a in (found[w] for w in which):
            b = t.find(behind, a, t.roles[role][1])[0]
            b = t.find(label, b, t.roles[role][1])[0]
            assert "%r" not in t.lines[a]
            t.lines[b] += " " + t.lines[a].strip()
            t.lines[a] = ""

    return edit


# Waits of the mma role in source order: q_full, kv_full (K), s_loaded[1], kv_full (V), kv_full (V_tok), p_full[0],
# s_loaded[0], p_full[1]. Of softmax: s_full first, pv_done at the end of the item last. Of load: q_empty, kv_empty ...
# Commits: s_full[0], pv_done[0], s_full[1], kv_empty (K), q_empty, pv_done[1], kv_empty (V), kv_empty (V_tok).
MUTATIONS = [
    Mutation("drop a wait", "q_full", at("mma", WAIT, 0, drop), "eager"),
    Mutation("drop a wait", "kv_full of K", at("mma", WAIT, 1, drop), "eager"),
    Mutation("drop a wait", "kv_full of V", at("mma", WAIT, 3, drop), "eager"),
    Mutation("drop a wait", "p_full", at("mma", WAIT, 5, drop), "eager"),
    Mutation("drop a wait", "s_full", at("softmax", WAIT, 0, drop), "eager"),
    Mutation("drop a wait", "pv_done at the end", at("softmax", WAIT, -1, drop), "eager"),
    Mutation("drop a wait", "s_loaded before QK", at("mma", WAIT, (2, 6), drop), "eager"),
    Mutation("drop a wait", "q_empty", at("load", WAIT, 0, drop), "eager"),
    Mutation("overwrite a stage early", "kv_empty not waited for", at("load", WAIT, None, drop), "eager", "long"),
    Mutation("overwrite a stage early", "kv_empty committed before QK1", move_before("mma", COMMIT, 3, MMA_SS, 2), "eager", "long"),
    Mutation("flip a parity", "s_full", at("softmax", WAIT, 0, flip_parity), "eager"),
    Mutation("flip a parity", "kv_full of K", at("mma", WAIT, 1, flip_parity), "eager"),
    Mutation("flip a parity", "q_empty", at("load", WAIT, 0, flip_parity), "eager"),
    Mutation("flip a parity", "pv_done at the end", at("softmax", WAIT, -1, flip_parity), "eager"),
    Mutation("drop a proxy fence", "scales of P", at("softmax", PROXY, None, drop), "eager"),
    Mutation("drop a proxy fence", "cleared keys of V", at("mma", PROXY, 0, drop), "eager"),
    Mutation("shift a TMEM column", "store of P", at("softmax", r"tcgen05\.st\S*x32", None, columns(1)), "eager"),
    Mutation("shift a TMEM column", "load of S", at("softmax", r"tcgen05\.ld\S*x32", (0, 4), columns(1)), "eager"),
    Mutation("shift a TMEM column", "scales of Q", at("mma", CP, 0, columns(4)), "eager"),
    Mutation("shift a TMEM column", "P in the second K step", at("mma", MMA_TS, 1, sub(r"\], \[(%r\d+)\]", r"], [\1+1]")), "eager"),
    Mutation("wrong TMEM lanes", "load of S", at("softmax", r"tcgen05\.ld\S*x32", None, columns(32 << 16)), "eager"),
    Mutation("swap scale ids", "A of the second K step of QK", at("mma", MMA_SS, 1, operand(3, 1 << 29, 32)), "eager"),
    Mutation("swap scale ids", "B of the second K step of QK", at("mma", MMA_SS, 1, operand(3, 1 << 4, 32)), "eager"),
    Mutation("swap scale ids", "A of the third K step of PV", at("mma", MMA_TS, 2, operand(3, 1 << 29, 32)), "eager", "causal"),
    Mutation("wrong instruction descriptor", "K step of QK reads B as MN-major", at("mma", MMA_SS, 0, operand(3, 1 << 16, 32)), "eager"),
    Mutation("wrong instruction descriptor", "A is E5M2", at("mma", MMA_SS, 0, operand(3, 1 << 7, 32)), "eager"),
    Mutation("wrong instruction descriptor", "A is negated", at("mma", MMA_SS, 0, operand(3, 1 << 13, 32)), "eager"),
    Mutation("wrong swizzle", "128 B for K of QK", at("mma", MMA_SS, 0, operand(2, 6 << 61, 64)), "eager"),
    Mutation("wrong swizzle", "none for V of PV", at("mma", MMA_TS, 0, operand(2, 4 << 61, 64)), "eager"),
    Mutation("wrong descriptor", "stride of 8-row groups of Q", at("mma", MMA_SS, 0, operand(1, 1 << 33, 64)), "eager"),
    Mutation("wrong descriptor", "K step of Q", at("mma", MMA_SS, 1, operand(1, 2, 64)), "eager"),
    Mutation("wrong descriptor", "reserved bit", at("mma", MMA_SS, 1, operand(1, 1 << 46, 64)), "eager"),
    Mutation("wrong tx bytes", "16 more for Q", at("load", EXPECT, 0, operand(-1, 16, 32)), "eager"),
    Mutation("wrong tx bytes", "512 fewer for K", at("load", EXPECT, 1, operand(-1, 512, 32)), "eager"),
    Mutation("read P before its store", "no wait::st", at("softmax", r"tcgen05\.wait::st", None, drop), "eager"),
    Mutation("drop a commit", "s_full", at("mma", COMMIT, 0, drop), "eager"),
    Mutation("drop a commit", "q_empty", at("mma", COMMIT, 4, drop), "eager"),
    Mutation("drop an arrival", "p_full", at("softmax", ARRIVE, None, drop), "eager"),
    Mutation("wrong arrive count", "one more for s_loaded", at("start", r"mov\.b32\s+%r\d+, 4;", 0, sub("4;", "5;")), "eager"),
    Mutation("wrong arrive count", "one fewer for s_loaded and p_full", at("start", r"mov\.b32\s+%r\d+, 4;", 0, sub("4;", "3;")), "eager"),
    Mutation("drop an initialisation", "last barrier", at("start", INIT, -1, drop), "eager"),
    Mutation("drop an initialisation", "constant scales", at("start", r"st\.shared", 0, drop), "eager", "causal"),
    Mutation("wrong barrier", "QK0 commits to s_full[1]", at("mma", COMMIT, 0, columns(8)), "eager"),
    Mutation("wrong barrier", "K completes on the next stage's", at("load", TMA, 2, sub(r"\[(%r\d+)\];", r"[\1+8];")), "eager"),
    Mutation("drop a CTA barrier", "after the set-up", at("start", r"bar\.sync", 0, drop), "eager"),
    Mutation("drop a CTA barrier", "before dealloc", at("end", r"bar\.sync", 0, drop), "eager"),
    Mutation("wrong count of a named barrier", "softmax", at("softmax", r"mov\.b32\s+%r\d+, 128;", None, sub("128;", "160;")), "eager", "causal"),
    Mutation("unfreed TMEM", "no dealloc", at("end", r"tcgen05\.dealloc", 0, drop), "eager"),
    Mutation("unfreed TMEM", "half of it", at("end", r"mov\.b32\s+%r\d+, 512;", 0, sub("512;", "256;")), "eager"),
    Mutation("too little TMEM", "256 columns", at("start", r"mov\.b32\s+%r\d+, 512;", 0, sub("512;", "256;")), "eager"),
    Mutation("dealloc before use", "before the last barrier", move_before("end", r"tcgen05\.dealloc", 0, r"bar\.sync", 0), "eager"),
    Mutation("wrong scale-atom address", "Q, the other tile", at("mma", CP, 0, operand(-1, 32, 64)), "eager"),
    Mutation("wrong scale-atom address", "K, the next stage", at("mma", CP, 1, operand(-1, 32, 64)), "eager"),
    Mutation("wrong accumulation", "first K step of QK adds", at("mma", MMA_SS, 0, sub(r", p;", r", 1;")), "eager"),
    Mutation("wrong accumulation", "second K step of PV does not add", at("mma", MMA_TS, 1, sub(r", p;", r", 0;")), "eager"),
    Mutation("wrong copy", "scales of Q go over those of K", at("load", BULK, 0, sub(r"\[(%r\d+)\]", r"[\1+2048]")), "eager"),
    Mutation("wrong copy", "source behind the tensor", at("load", BULK, 0, sub(r"\[(%rd\d+)\]", r"[\1+1048576]")), "eager"),
    Mutation("wrong copy", "misaligned destination", at("load", BULK, 0, sub(r"\[(%r\d+)\]", r"[\1+8]")), "eager"),
    Mutation("wrong copy", "K at the tile before", at("load", TMA, 2, sub(r"\[(%r\d+)\]", r"[\1+128]")), "eager"),
    Mutation("wrong register count", "setmaxnreg of one role", at("softmax", r"setmaxnreg\.inc", 0, sub("224", "228")), "eager"),
    Mutation("wrong register count", "more than the launch gave", at("softmax", r"setmaxnreg\.inc", 0, sub("224", "232")), "eager"),
    Mutation("drop a proxy fence", "constant scales", at("start", PROXY, 0, drop), "eager", "square"),
    Mutation("drop a tensor fence", "all of the mma role", at("mma", r"tcgen05\.fence", None, drop), "eager"),
    Mutation("drop a tensor fence", "all of the softmax role", at("softmax", r"tcgen05\.fence", None, drop), "eager"),
    Mutation("drop wait::ld", "load of S", at("softmax", r"tcgen05\.wait::ld", None, drop), "eager"),
    Mutation("arrive early", "s_loaded before wait::ld", move_behind("softmax", r"tcgen05\.wait::ld", (0, 2), ARRIVE), "eager"),
    Mutation("drop a named barrier", "before the token factors are read", at("softmax", r"barrier\.sync", 1, drop), "eager", "causal"),
    Mutation("drop a named barrier", "before the token factors are written", at("softmax", r"barrier\.sync", 0, drop), "eager", "causal"),
    Mutation("arrive early", "backward: p_full before wait::st", move_behind("all", r"tcgen05\.wait::st", (0, 2), ARRIVE), "eager", "backward"),
    Mutation("arrive early", "backward: ds_full before wait::st", move_behind("all", r"tcgen05\.wait::st", (1, 3), ARRIVE), "eager", "backward"),
    Mutation("reuse a buffer early", "backward: dQ before its copy has read it", at("all", r"bulk\.wait_group\.read", None, drop), "eager", "backward"),
]  # fmt: skip


# --- running ---------------------------------------------------------------------------------------------------------


class Problem:
    """Query heads 3 on one CTA: three items, two stages of Q. Ragged lengths, so that V is cleared behind the end."""

    _cache = {}

    def __init__(self, seqlen_q, seqlen_k, heads, window):
        g = torch.Generator().manual_seed(0)
        q, k, v = (
            torch.randn(1, s, heads, 64, generator=g) for s in (seqlen_q, seqlen_k, seqlen_k)
        )
        # magnitudes that differ from block to block, so that every scale counts
        for x in (q, k, v):
            x *= torch.exp2(
                torch.randint(-1, 2, (1, x.shape[1], heads, 2), generator=g).float()
            ).repeat_interleave(32, -1)
        self.ops = quantise(q, k, v)
        self.window = window
        self.out, self.lse = expected(self.ops, window=window, out_dtype=torch.bfloat16)

    @classmethod
    def get(cls, name):
        if name not in cls._cache:
            args = {
                "plain": (160, 300, 3, (-1, -1)),
                "causal": (160, 300, 3, (-1, 0)),
                "long": (160, 1430, 1, (-1, -1)),
                "square": (256, 256, 1, (-1, 0)),
                "backward": None,
            }[name]
            cls._cache[name] = cls(*args) if args else Backward()
        return cls._cache[name]

    ptx = PTX
    checks = "all"

    def right(self, folder, **options):
        out, lse, _ = run(folder, self.ops, window=self.window, out_dtype=torch.bfloat16, **options)
        want = self.out.double()
        error = (out.double() - want).norm() / want.norm()
        return error < 5e-3 and (lse - self.lse).abs().max() < 1e-4

    def verdict(self, ptx, order, seed):
        """ "", the name of the check that stopped the kernel, or "wrong"."""
        try:
            with (
                tempfile.TemporaryDirectory() as folder
            ):  # another for every text: loaded kernels are kept by path
                (Path(folder) / self.ptx.name).write_text(ptx)
                right = self.right(
                    Path(folder), order=order, seed=seed, timeout=30, checks=self.checks
                )
            return "" if right else "wrong"
        except emulator.PtxError:
            return "load"
        except emulator.EmulatorError as e:
            m = re.search(r"\[([a-z-]+)\]", str(e))
            return m.group(1) if m else str(e)[:60]


class Backward(Problem):
    """Four query tiles, two key tiles, one head."""

    ptx = BACKWARD_PTX

    def __init__(self):
        g = torch.Generator().manual_seed(0)
        q, k, v, dout = (torch.randn(1, s, 1, 64, generator=g) for s in (500, 200, 200, 500))
        self.ops = attn_bwd.prepare(q, k, v, dout)
        self.want = attn_bwd.expected(self.ops)

    def right(self, folder, **options):
        *got, _ = attn_bwd.run(folder, self.ops, **options)
        return all((a - b).norm() < 1e-2 * b.norm() for a, b in zip(got, self.want, strict=True))


def verdict(m, order, seed):
    problem = Problem.get(m.problem)
    t = Text(problem.ptx.read_text())
    if m.edit:
        m.edit(t)
    return problem.verdict(str(t), order, seed)


def main(names):
    chosen = [m for m in MUTATIONS if not names or any(n in f"{m.kind}: {m.name}" for n in names)]  # fmt: skip
    t0 = time.time()
    rows = [[Mutation("none", p, None, "", p)] for p in PROBLEMS]
    for (m,) in rows + [[m] for m in chosen]:
        said = [verdict(m, o, s) for o, s in ORDERS]
        groups = {}
        for (order, _), x in zip(ORDERS, said, strict=True):
            groups.setdefault(order, []).append(x or "-")
        print(
            f"| {m.kind} | {m.name} |",
            " | ".join(" ".join(x) for x in groups.values()),
            "|",
            flush=True,
        )
    print(f"{time.time() - t0:.0f} s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
