"""Writes docs/kernels-report.md: what ptxas and the SASS say of every built attention kernel.

    python tools/kernels_report.py [--check]      needs ptxas (CUDA wheels) and nvdisasm (nvidia-cuda-nvdisasm)

The softmax loop is counted on the path of a full tile: the shortest way in the control-flow graph from the wait for S
through the exponentials, the waits for the last product and for the other tile's S, the arrival of P, and back; of the
backward's compute loop, from the wait for S through the arrivals of P and of dS, and back.
"""

import argparse
import collections
import heapq
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEVICE = ROOT / "flash_attn_mx" / "_device"
REPORT = ROOT / "docs" / "kernels-report.md"
SMEM_LIMIT = 227 * 1024

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([^;]+?)\s*;")
TARGET = re.compile(r"`\((\.L_x_\d+)\)")
# Softmax arithmetic, for the table; what is left is control, barriers and row scalars.
PIPES = {
    "MUFU": "MUFU.EX2", "FFMA2": "FFMA2", "FADD2": "FADD2", "F2FP": "F2FP", "FMNMX3": "FMNMX3", "FMNMX": "FMNMX",
    "FFMA": "FFMA", "FADD": "FADD", "FMUL": "FMUL", "LDTM": "LDTM", "STTM": "STTM", "SYNCS": "SYNCS",
}  # fmt: skip


def find_tool(name):
    import nvidia

    for folder in nvidia.__path__:
        for path in sorted(Path(folder).glob(f"cu1*/bin/{name}"), reverse=True):
            return str(path)
    path = shutil.which(name)
    if not path:
        sys.exit(f"{name} not found; pip install 'cuda-toolkit[nvcc]' nvidia-cuda-nvdisasm")
    return path


class Block:
    def __init__(self, name):
        self.name, self.ops, self.next = name, [], []

    def count(self, opcode):
        return sum(op.split(".")[0].split()[0] == opcode for _, op in self.ops)


def parse(sass):
    """SASS text -> list of basic blocks with their successors (indices)."""
    blocks, labels, current = [], {}, None
    ends = {}
    for line in sass.splitlines():
        label = re.match(r"^(\.L_x_\d+):", line)
        if label:
            current = Block(label.group(1))
            labels[label.group(1)] = len(blocks)
            blocks.append(current)
            continue
        match = INSTRUCTION.match(line)
        if not match:
            continue
        if current is None:
            current = Block("entry" if not blocks else "")
            blocks.append(current)
        op = match.group(3)
        current.ops.append((match.group(2), op))
        if re.match(r"(BRA|BRX|EXIT|RET)\b", op.split(".")[0]):
            _, _, listed = line.partition("BRANCH_TARGETS")
            table = re.findall(r"\.L_x_\d+", listed)
            conditional = match.group(2) or re.match(r"BRA\S* !?U?P\d", op)
            ends[len(blocks) - 1] = (TARGET.findall(op) + table, not conditional)
            current = None
    for i, block in enumerate(blocks):
        targets, always = ends.get(i, ([], False))
        block.next = [labels[t] for t in targets if t in labels]
        if not always and i + 1 < len(blocks):
            block.next.append(i + 1)
    return blocks


def shortest(blocks, start, goals):
    """Instructions of the shortest path start -> one of goals, as (blocks after start); None if there is none."""
    queue, seen = [(0, n, [n]) for n in set(blocks[start].next)], set()
    queue = [(len(blocks[n].ops), n, path) for _, n, path in queue]
    heapq.heapify(queue)
    while queue:
        cost, at, path = heapq.heappop(queue)
        if at in goals:
            return path
        if at in seen:
            continue
        seen.add(at)
        for n in set(blocks[at].next):
            heapq.heappush(queue, (cost + len(blocks[n].ops), n, [*path, n]))
    return None


def waits_for(blocks, offset):
    found = re.compile(rf"SYNCS\.PHASECHK\S* P\d, \[\w+(\+URZ)?\+?{offset:#x}\]")
    return {i for i, b in enumerate(blocks) if any(found.search(op) for _, op in b.ops)}


def arrives_at(blocks, offset):
    found = re.compile(rf"SYNCS\.ARRIVE\S* \w+, \[\w+(\+URZ)?\+?{offset:#x}\]")
    return {i for i, b in enumerate(blocks) if any(found.search(op) for _, op in b.ops)}


def softmax_loop(blocks, head_dim):
    """Opcode counts of one full tile of the softmax loop."""
    q_stages, kv_stages = 2, 9 if head_dim == 128 else 16
    barriers = (2 * q_stages + kv_stages) * (128 * head_dim + 512) + 2 * 512 + 512 + 2 * 128 * 4
    s_full = barriers + 8 * (2 * q_stages + 2 * kv_stages)
    s_loaded, p_full, pv_done = s_full + 16, s_full + 32, s_full + 48
    heads = waits_for(blocks, s_full)
    head = min(heads)
    exps = {i for i, b in enumerate(blocks) if b.count("FFMA2") > 100}
    pv, other = waits_for(blocks, pv_done), waits_for(blocks, s_loaded)
    path, at = [], head
    for goals in (exps, pv, other, arrives_at(blocks, p_full), {head}):
        part = shortest(blocks, at, goals)
        if part is None:
            raise SystemExit("the softmax loop was not recognised")
        path += part
        at = part[-1]
    return collections.Counter(op.split(".")[0].split()[0] for i in path for _, op in blocks[i].ops)


def compute_loop(blocks, head_dim):
    """Instructions of one full half tile of the backward's compute loop."""
    ring = 6 if head_dim == 128 else 16
    delta = (ring + 3) // 4 * (64 * 16 + 512) + 2 * 128 * 16
    barriers = (3 * 128 + ring * 64) * head_dim + 5 * 128 * 128 + (3 + ring + 9) * 512
    barriers += delta + 2 * 128 * 4 + 2 * 128 * 32 * 4
    s_full = barriers + 8 * (1 + 2 * ring + 2 * 2)
    p_full, dp_full, ds_full = s_full + 16, s_full + 24, s_full + 40
    loops = []
    for head in waits_for(blocks, s_full):  # one in the code of full tiles, one in that of cut ones
        path, at = [], head
        for goals in (
            arrives_at(blocks, p_full),
            waits_for(blocks, dp_full),
            arrives_at(blocks, ds_full),
            {head},
        ):
            part = shortest(blocks, at, goals) if at not in goals or goals == {head} else []
            if part is None:
                break
            path += part
            at = path[-1] if path else at
        else:
            loops.append(path)
    if not loops:
        raise SystemExit("the compute loop was not recognised")
    path = min(loops, key=lambda path: sum(len(blocks[i].ops) for i in path))
    return [op.split()[0] for i in path for _, op in blocks[i].ops]


def backward_shared_memory(ops, head_dim):
    """Bytes of shared memory that each role of attn_bwd moves per 128x128 tile in one CTA, 128 a cycle.

    ops: the compute loop's opcodes. What the products and copies move follows from csrc/kernels/attn_bwd/config.cuh.
    """
    half, ds, atom, warps = 64 * head_dim, 128 * 128, 512, 8
    loads = sum(
        op.startswith("LDS.128") for op in ops
    )  # one address: a cycle each, measured on an H200
    stores = {
        width: sum(op.startswith(f"STS{width}") for op in ops) for width in (".128", ".U16", ".U8")
    }
    assert loads == sum(op.startswith("LDS") for op in ops)
    assert sum(stores.values()) == sum(op.startswith("STS") for op in ops)
    return {
        "mma: S, dP": 2 * (2 * half + half) + (128 + 64) * 32,  # delta: one more block of dP
        "mma: dV, dK": 2 * half,
        "mma: dQ": ds + half,  # of two steps: 128 queries x 256 keys and 256 keys x D / 2
        "mma: scale copies": (5 * 2 + 2) * atom,
        "load: fill": 4 * (half + atom) + 512 + 64 * 16 + atom,  # bias and delta
        "compute: bias": 2 * 128 * warps * loads,
        "compute: dS": 512 * warps * stores[".128"],
        # By key 16 bytes apart: four lanes to a bank. By query two.
        "compute: scales": 128 * warps * (4 * stores[".U16"] + 2 * stores[".U8"]),
        "exchange": ds + atom,  # sent and received in every second step
        "reduce: dQ": 4 * 2 * half,  # stored and read in every second step
    }


def report(ptx):
    """One kernel -> dict of figures."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        out = subprocess.run(
            [find_tool("ptxas"), "-v", "-arch=sm_100f", str(ptx), "-o", str(cubin)],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        sass = subprocess.run(
            [find_tool("nvdisasm"), "-c", str(cubin)], capture_output=True, text=True, check=True
        ).stdout
    log = out.stdout + out.stderr
    frame = r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
    stack, stores, loads = map(int, re.search(frame, log).groups())
    blocks = parse(sass)
    everything = collections.Counter(op.split(".")[0].split()[0] for b in blocks for _, op in b.ops)
    name = ptx.name.split(".")[0]
    head_dim = int(re.search(r"_d(\d+)_", name).group(1))
    smem = {}
    if name.startswith("attn_fwd"):
        loop = softmax_loop(blocks, head_dim)
    else:
        ops = compute_loop(blocks, head_dim)
        loop = collections.Counter(op.split(".")[0] for op in ops)
        smem = backward_shared_memory(ops, head_dim)
    raised = [int(n, 16) for n in re.findall(r"USETMAXREG\.TRY_ALLOC\S* UP\d, (0x[0-9a-f]+)", sass)]
    lowered = [int(n, 16) for n in re.findall(r"USETMAXREG\.DEALLOC\S* (0x[0-9a-f]+)", sass)]
    return {
        "name": name, "launch": int(re.search(r"Used (\d+) registers", log).group(1)), "softmax": max(raised),
        "others": max(lowered), "stack": stack, "spills": stores + loads, "local": everything["LDL"] + everything["STL"],
        "umma": everything["UTCQMMA"], "other_mma": sum(everything[n] for n in ("HMMA", "QMMA", "IMMA", "UTCHMMA")),
        "instructions": sum(everything.values()), "loop": loop, "smem": smem,
    }  # fmt: skip


def render(rows):
    lines = [
        "# Kernels report", "",
        "Written by `tools/kernels_report.py` from ptxas and nvdisasm for sm_100f. Static counts: nothing here was timed.", "",
        "| kernel | registers softmax or compute / others (at launch) | stack, spills, local memory | UTCQMMA | other MMA | instructions |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in rows:
        lines.append(
            f"| {r['name']} | {r['softmax']} / {r['others']} ({r['launch']}) | {r['stack']} B, {r['spills']} B, {r['local']} | "
            f"{r['umma']} | {r['other_mma']} | {r['instructions']} |"
        )
    titles = {
        "attn_fwd": "Issue slots of a softmax warp per full 128x128 tile",
        "attn_bwd": "Issue slots of a compute warp per full tile, of which it has 32 keys and 64 queries (two such warps per sub-partition)",
    }  # fmt: skip
    for prefix, title in titles.items():
        chosen = [r for r in rows if r["name"].startswith(prefix)]
        if chosen:
            lines += ["", f"{title}:", "", *loop_table(chosen)]
    moving = [r for r in rows if r["smem"]]
    if moving:
        title = "Bytes of shared memory per 128x128 tile and CTA, by role (the cycles are at 128 bytes each)"
        lines += ["", f"{title}:", "", *smem_table(moving)]
    return "\n".join(lines) + "\n"


def loop_table(rows):
    names = list(PIPES.values())
    lines = [f"| kernel | **all** | {' | '.join(names)} | rest |", "|---" * (len(names) + 3) + "|"]
    for r in rows:
        counts = [r["loop"].get(op, 0) for op in PIPES]
        total = sum(r["loop"].values())
        lines.append(
            f"| {r['name']} | **{total}** | {' | '.join(map(str, counts))} | {total - sum(counts)} |"
        )
    return lines


def smem_table(rows):
    names = list(rows[0]["smem"])
    lines = [
        f"| kernel | **all** | cycles | {' | '.join(names)} |",
        "|---" * (len(names) + 3) + "|",
    ]
    for r in rows:
        total = sum(r["smem"].values())
        values = " | ".join(str(r["smem"][name]) for name in names)
        lines.append(f"| {r['name']} | **{total}** | {total / 128:.0f} | {values} |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="fail where the committed report differs"
    )
    args = parser.parse_args()
    text = render([report(ptx) for ptx in sorted(DEVICE.glob("attn_*.sm_100f.ptx"))])
    if args.check:
        sys.exit(
            REPORT.read_text() != text and f"{REPORT} is out of date: run {Path(__file__).name}"
        )
    REPORT.write_text(text)


if __name__ == "__main__":
    main()
