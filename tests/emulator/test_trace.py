"""launch(trace=...): a trace that the viewers accept, whose bars are what happened."""

import json

import numpy as np
import pytest
import torch
from emulator import mutations
from emulator.harness import kernel, launch

from flash_attn_mx import emulator

COPY = kernel(
    """mov.u32 %t, %tid.x; mov.u32 %s, buf; mov.u32 %b, bar; setp.ne.u32 %q, %t, 0; @%q bra W;
    mbarrier.init.shared.b64 [%b], 1; mbarrier.arrive.expect_tx.shared.b64 _, [%b], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%p0], 256, [%b];
    W: bar.sync 0; V: mbarrier.try_wait.parity.shared.b64 %q, [%b], 0; @!%q bra V;
    setp.ne.u32 %q, %t, 0; @%q bra E;
    cp.async.bulk.global.shared::cta.bulk_group [%p1], [%s], 256; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
    E:""",
    2,
    ".shared .align 128 .b8 buf[256]; .shared .align 8 .b64 bar; .reg .b32 %t, %s, %b; .reg .pred %q;",
)


def check_format(data):
    """The Trace Event Format: what every event needs, by its phase. Bars of one track nest or are apart."""
    assert isinstance(data["traceEvents"], list) and data["displayTimeUnit"] in ("ms", "ns")
    tracks, named = {}, set()
    for e in data["traceEvents"]:
        assert e["ph"] in "XMi" and isinstance(e["name"], str) and e["name"]
        for key in ("pid", "tid", "ts"):
            assert isinstance(e[key], int) and e[key] >= 0, (key, e)
        assert isinstance(e["args"], dict)
        if e["ph"] == "X":
            assert isinstance(e["dur"], int) and e["dur"] > 0 and isinstance(e["cat"], str)
            tracks.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
        elif e["ph"] == "M":
            key = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}
            assert set(e["args"]) == {key[e["name"]]}
            named.add((e["pid"], e["tid"], e["name"]))
        else:
            assert e["s"] in ("g", "p", "t")
    for (pid, tid), bars in tracks.items():
        assert (pid, tid, "thread_name") in named and (pid, 0, "process_name") in named
        for (a0, a1), (b0, b1) in zip(sorted(bars, key=lambda b: (b[0], -b[1])), sorted(bars, key=lambda b: (b[0], -b[1]))[1:]):  # fmt: skip
            assert b0 >= a1 or b1 <= a1, f"track {tid}: {(a0, a1)} and {(b0, b1)} overlap"


def traced(tmp_path, text, args, fails=False, **options):
    path = tmp_path / "trace.json"
    if fails:
        with pytest.raises(emulator.EmulatorError):
            launch(text, args, trace=path, **options)
    else:
        launch(text, args, trace=str(path), **options)
    data = json.loads(path.read_text())
    check_format(data)
    return data


def bars(data, cat):
    return [e for e in data["traceEvents"] if e["ph"] == "X" and e["cat"] == cat]


def test_copy_from_issue_to_completion(tmp_path):
    x, y = np.arange(64, dtype=np.uint32), np.zeros(64, np.uint32)
    data = traced(tmp_path, COPY, [x, y], block=64, order="delayed", grid=2)
    assert (y == x).all()
    copies = bars(data, "copy")
    assert [e["args"]["bytes"] for e in copies] == [
        256
    ] * 4  # a load and a store in each of two clusters
    load = next(e for e in copies if ".mbarrier" in e["name"] and e["pid"] == 1)
    issue = next(e for e in bars(data, "issue") if e["name"].startswith("cp.async.bulk.shared") and e["pid"] == 1)  # fmt: skip
    assert load["ts"] == issue["ts"] and load["dur"] > 1 and load["args"]["issued by"] == "warp 0"
    waits = [e for e in bars(data, "wait") if e["pid"] == 1 and e["name"].startswith("mbarrier")]
    assert {e["tid"] for e in waits} == {1, 17}, "both warps wait for the copy"
    for e in waits:  # delayed: the copy completes when both can do nothing else
        assert e["args"]["phase"] == 0 and e["ts"] <= load["ts"] + load["dur"] <= e["ts"] + e["dur"]
        assert e["args"]["instruction"] == "mbarrier.try_wait.parity.shared.b64"
    assert any(e["name"] == "barrier 0" for e in bars(data, "wait"))
    names = {e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"}
    assert "warp 0 (load/store)" in names and "warp 1" in names
    assert {e["args"]["name"] for e in data["traceEvents"] if e["name"] == "process_name"} == {"k: cluster 0 CTA 0", "k: cluster 1 CTA 0"}  # fmt: skip


def test_trace_of_a_failed_launch_says_why(tmp_path):
    text = COPY.replace("mbarrier.arrive.expect_tx.shared.b64 _, [%b], 256;", "mbarrier.arrive.expect_tx.shared.b64 _, [%b], 512;")  # fmt: skip
    data = traced(tmp_path, text, [np.zeros(64, np.uint32)] * 2, fails=True, block=64)
    (error,) = (e for e in data["traceEvents"] if e["ph"] == "i")
    assert "[deadlock]" in error["name"] and "tx 256" in error["args"]["text"]


def test_events_beyond_the_limit_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(emulator, "_TRACE_EVENTS", 3)
    data = traced(tmp_path, COPY, [np.zeros(64, np.uint32)] * 2, block=64)
    assert len([e for e in data["traceEvents"] if e["ph"] == "X"]) == 3
    assert any(e["name"].endswith("later events are not shown") for e in data["traceEvents"])


@pytest.mark.skipif(not mutations.PTX.is_file(), reason=f"{mutations.PTX.name} is not built")
@pytest.mark.parametrize("order", ["eager", "delayed"])
def test_trace_of_the_forward_kernel(tmp_path, order):
    """Every MMA, copy and wait of a real kernel is there, and its warps are named by what they do."""
    path = tmp_path / "fwd.json"
    p = mutations.Problem.get("plain")
    _, _, report = mutations.run(mutations.PTX, p.ops, window=p.window, out_dtype=torch.bfloat16, order=order, trace=path)  # fmt: skip
    data = json.loads(path.read_text())
    check_format(data)
    assert len([e for e in bars(data, "tcgen05") if e["name"].startswith("tcgen05.mma")]) == report.mma  # fmt: skip
    assert sum(e["args"]["bytes"] for e in bars(data, "copy") if ".mbarrier" in e["name"]) == report.tma_load_bytes  # fmt: skip
    roles = {e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"}
    assert any(r.endswith("(MMA)") for r in roles) and any("load" in r for r in roles)
