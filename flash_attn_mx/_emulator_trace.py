"""Traces of emulated launches as Chrome trace events: `Kernel.launch(trace="out.json")`, shown by ui.perfetto.dev.

One process per CTA; in it one track per warp (what it waits for, what asynchronous work it issues) and tracks per
asynchronous agent (from issue to completion). A microsecond of the viewer is one warp instruction that the cluster has
executed: the order of things, not their duration on hardware.

Format: "Trace Event Format" (JSON object form): phases X (complete), i (instant) and M (metadata).
"""

import json

_AGENTS = ("tcgen05", "tcgen05.st", "copy", "cp.async")  # the order of their tracks
_TRACKS = 1000  # at most, of one agent
_GROUPS = 16  # tracks of one warp: its diverged lanes wait for different things at a time


def _role(opcodes):
    """What a warp is for, from what it issues."""
    roles = {
        "MMA": "tcgen05.mma",
        "load": ("cp.async.bulk.tensor", "cp.async.bulk.shared", "cp.async.c"),
        "scheduler": "clusterlaunchcontrol",
    }
    found = []
    for role, begins in roles.items():
        if any(op.startswith(begins) and ".global.shared::cta" not in op for op in opcodes):
            found.append(role)
    if any(".global.shared::cta" in op for op in opcodes):
        found.append("store")
    return "/".join(found)


def _wait(reason, key, want):
    if reason == "mbarrier":
        at = {"barrier": f"CTA {key >> 24} {key & 0xFFFFFF:#x}", "phase": want & 1}
        return f"mbarrier {key & 0xFFFFFF:#x} phase {want & 1}", at
    if reason == "named barrier":
        return f"barrier {key}", {"barrier": key, "threads": want}
    if reason == "lanes":
        return "other lanes", {"lanes": f"{key:#010x}", "here": f"{want:#010x}"}
    if reason == "tensor memory":
        return f"{key} columns of tensor memory", {"columns": key}
    return reason, {"key": key}


def events(kernel, rows, dropped, cluster, error=""):
    """Trace events of the native rows (kind, cluster, CTA, warp, reason or agent, line, opcode, begin, end, key, want, bytes).

    Args:
      kernel: its name.   dropped: events beyond the limit.   cluster: its three dimensions.   error: of the launch.
    Returns: list of dicts.
    """
    ctas = cluster[0] * cluster[1] * cluster[2]
    out, issued, spans, waits, last = [], {}, {}, {}, 0
    for kind, cl, cta, warp, what, line, op, begin, end, key, want, size in rows:
        pid = cl * ctas + cta + 1
        last = max(last, end)
        args = {"line": line, "instruction": op}
        at = {"pid": pid, "tid": _GROUPS * warp + 1, "ts": begin}
        issued.setdefault((pid, warp), set())
        if kind == "wait":
            name, more = _wait(what, key, want)
            waits.setdefault((pid, warp), []).append({"ph": "X", "cat": "wait", "name": name, **at, "dur": max(end - begin, 1), "args": args | more})  # fmt: skip
        elif kind == "issue":
            issued[pid, warp].add(op)
            if size:
                args["bytes"] = size
            out.append({"ph": "X", "cat": "issue", "name": op, **at, "dur": 1, "args": args})
        else:
            spans.setdefault((pid, what), []).append((begin, max(end, begin + 1), warp, op, args, size))  # fmt: skip
    for (pid, agent), rows_of in spans.items():
        free, base = [], 10_000 + _AGENTS.index(agent) * _TRACKS
        for begin, end, warp, op, args, size in sorted(rows_of, key=lambda r: r[:2]):
            tid = base + _track(free, begin, end, _TRACKS)
            more = {"issued by": f"warp {warp}", **({"bytes": size} if size else {})}
            name = f"{op} {size} B" if size else op
            out.append({"ph": "X", "cat": agent, "name": name, "pid": pid, "tid": tid, "ts": begin, "dur": end - begin, "args": args | more})  # fmt: skip
        for lane in range(len(free)):
            out += _named(pid, base + lane, f"{agent} {lane}" if len(free) > 1 else agent)
    for pid in sorted({p for p, _ in issued} | {p for p, _ in spans}):
        name = f"{kernel}: cluster {(pid - 1) // ctas} CTA {(pid - 1) % ctas}"
        out.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}})  # fmt: skip
    for (pid, warp), ops in issued.items():
        role = _role(ops)
        free = []
        for bar in sorted(waits.get((pid, warp), ()), key=lambda b: b["ts"]):
            bar["tid"] += _track(free, bar["ts"], bar["ts"] + bar["dur"], _GROUPS)
            out.append(bar)
        for group in range(max(1, len(free))):
            name = f"warp {warp}" + (f" ({role})" if role else "") + (f" group {group}" if group else "")  # fmt: skip
            out += _named(pid, _GROUPS * warp + 1 + group, name)
    for text in [error.splitlines()[0]] if error else []:
        out.append({"ph": "i", "cat": "error", "name": text, "pid": 1, "tid": 0, "ts": last, "s": "g", "args": {"text": error}})  # fmt: skip
    if dropped:
        out.append({"ph": "i", "cat": "error", "name": f"{dropped} later events are not shown", "pid": 1, "tid": 0, "ts": last, "s": "g", "args": {}})  # fmt: skip
    return out


def _track(free, begin, end, most):
    """The first track that is free at `begin`, taken until `end`: bars of one track must not overlap."""
    track = next((i for i, t in enumerate(free) if t <= begin), min(len(free), most - 1))
    free[track : track + 1] = [end]
    return track


def _named(pid, tid, name):
    return [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}},
        {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "ts": 0, "args": {"sort_index": tid}},
    ]  # fmt: skip


def write(path, kernel, rows, dropped, options, error):
    """Writes the events as one JSON object; the options of the launch go into otherData."""
    data = {
        "traceEvents": events(kernel, rows, dropped, options["cluster"], error),
        "displayTimeUnit": "ms",
        "otherData": {
            "unit": "1 us = 1 warp instruction executed by the cluster",
            **{k: str(options[k]) for k in ("grid", "cluster", "block", "order", "seed")},
        },
    }
    with open(path, "w", encoding="utf-8") as f:
        json.dump(data, f)
