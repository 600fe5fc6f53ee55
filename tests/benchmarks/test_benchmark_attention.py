"""benchmarks/benchmark_attention.py and the model of sm_100 that it can show."""

import json
import sys
from pathlib import Path

import pytest
import torch

from flash_attn_mx import portable
from flash_attn_mx.demo import accuracy

FOLDER = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, FOLDER)
try:
    import benchmark_attention as bench
    import model
finally:
    sys.path.remove(FOLDER)

MASKS = [
    {},
    {"causal": True},
    {"window": (100, 30)},
    {"causal": True, "window": (200, -1)},
]


def seen(problem, sequence):
    """(queries, keys) bool, from the definition."""
    queries, keys = problem.seqlens[sequence]
    row = torch.arange(queries)[:, None] + keys - queries
    key = torch.arange(keys)
    left, right = problem.sides
    visible = torch.ones(queries, keys, dtype=torch.bool)
    visible &= key >= row - left if left >= 0 else visible
    return visible & (key <= row + right if right >= 0 else visible)


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_model_counts_pairs_and_tiles(mask):
    """Pairs and tiles are those of the mask itself; cut tiles those that the portable path treats as cut."""
    problem = model.Problem(((300, 450), (513, 513)), 4, 2, 64, **mask)
    visible = [seen(problem, i) for i in (0, 1)]
    assert problem.pairs() == sum(int(v.sum()) for v in visible)
    for sequence, (queries, keys) in enumerate(problem.seqlens):
        window = portable.Window(*problem.sides, offset=keys - queries)
        for row in range(0, queries, 128):
            rows = range(row, min(row + 128, queries))
            spans = list(portable.key_spans(window, rows, keys, -(-keys // 128) * 128, 128))
            first, end, cut = model._tiles(problem, sequence, row)
            touched = visible[sequence][row : row + 128].any(0).nonzero()
            assert (first, end) == (int(touched[0]) // 128, int(touched[-1]) // 128 + 1)
            assert (end - first, cut) == (len(spans), sum(span.cut for span in spans))


def test_model_counts_steps_of_items():
    """Forward: half the tiles of a causal square and one cut tile a row; backward: the same by pairs of key tiles."""
    full = model.Problem(((1024, 1024),), 2, 1, 128)
    assert model.forward_items(full, 100.0) == [16 * 100.0 + model.ITEM] * 8
    assert model.backward_items(full, 100.0) == [8 * 2 * 100.0 + model.ITEM + model.PROLOGUE] * 8
    causal = model.Problem(((1024, 1024),), 2, 1, 128, causal=True)
    items = [cycles - model.ITEM for cycles in model.forward_items(causal, 100.0)]
    assert items == sorted(items, reverse=True)  # long ones first
    two, alone = (
        7 + (model.CUT - 1),
        1.0,
    )  # tiles that both halves of the last block see, and one more
    assert items[0] == pytest.approx(100.0 * (2 * two + model.LONE * alone))
    backward = model.backward_items(causal, 1.0)
    work = sum(backward) - len(backward) * (model.ITEM + model.PROLOGUE)
    # Two CTAs and two heads; 2 (1 + 2 + 3 + 4) steps of pairs of key tiles, 8 of them cut.
    assert work == pytest.approx(4 * (20 + 8 * (model.CUT - 1)))


def test_model_makespan_is_that_of_the_schedule():
    """A persistent grid deals items out in turn; another one gives each to the SM that is free first."""
    items = [5.0] + [1.0] * 151
    assert model.makespan(items, persistent=False) == 5.0
    assert model.makespan(items, persistent=True) == model.PROLOGUE + 6.0
    assert model.makespan([2.0] * 149, persistent=False) == 4.0  # a tail of one item


def test_model_reproduces_published_kernels():
    """Every known kernel within the errors that the text states; kernels that were not fitted included."""
    rows = model.calibration()
    errors = {row["kernel"]: abs(row["error"]) for row in rows}
    forward = [k for k in model.FORWARD_KNOWN if k.fitted]
    assert len(forward) == 4 and all(errors[k.name] < 0.06 for k in forward)
    assert all(errors[k.name] < 0.17 for k in model.BACKWARD_KNOWN)
    checked = [k.name for k in model.FORWARD_KNOWN if not k.fitted]
    assert len(checked) == 5 and all(errors[name] < 0.13 for name in checked)
    assert all(abs(r["error"]) < 0.05 for r in model.launch_calibration() if r["seqlen"] >= 8192)


def test_model_reads_the_kernels_report(tmp_path):
    """The instruction counts are those of the committed tables; a report without them is an error."""
    counts = model.read_counts()
    for kernel in ("attn_fwd_d128_bf16", "attn_bwd_d64_bf16"):
        assert counts[kernel]["all"] > counts[kernel]["MUFU.EX2"] > 50
    (tmp_path / "r.md").write_text(
        "| kernel | **all** | MUFU.EX2 |\n|---|---|---|\n| attn_x | **7** | 3 |\n"
    )
    assert model.read_counts(tmp_path / "r.md") == {"attn_x": {"all": 7, "MUFU.EX2": 3}}


def test_model_prediction_follows_its_bounds():
    """No modelled tile is faster than its largest bound; D = 64 does half the work in about the same time."""
    speeds = {}
    for dim in (64, 128):
        for backward in (False, True):
            r = model.predict(model.Problem(((8192, 8192),) * 2, 64, 8, dim), backward)
            assert r["cycles_per_tile"] >= max(r["bounds"].values())
            assert r["bounds"][r["largest_bound"]] == max(r["bounds"].values())
            assert r["label"] == "modelled, not run on sm_100"
            assert r["tflops"]["low"] < r["tflops"]["base"] < r["tflops"]["high"]
            assert r["tflops"]["base"] < r["bound_tflops"]
            speeds[dim, backward] = r["tflops"]["base"]
    assert 1.8 < speeds[128, False] / speeds[64, False] < 2.2
    with pytest.raises(ValueError, match="head_dim: expected at most 128, as built, got 192"):
        model.predict(model.Problem(((64, 64),), 1, 1, 192))


@pytest.mark.parametrize("mask", MASKS[:2], ids=str)
def test_benchmark_exact_is_float64_attention(mask):
    """The blockwise float64 sample against the plain formulas of the demo."""
    q, k, v, dout = (torch.randn(n, 150, 32, dtype=torch.float64) for n in (2, 1, 1, 2))
    problem = model.Problem(((150, 150),), 2, 1, 32, **mask)
    got = bench.exact(problem, *(x.transpose(0, 1) for x in (q, k, v, dout)), rows=64)
    wanted = accuracy.exact(q, k.expand(2, -1, -1), v.expand(2, -1, -1), dout, **mask)
    sums = (wanted[0], wanted[1], wanted[2].sum(0, True), wanted[3].sum(0, True))
    for a, b in zip(got, sums):
        torch.testing.assert_close(a.transpose(0, 1), b, rtol=1e-10, atol=1e-10)


def run(tmp_path, *arguments):
    status = bench.main([*arguments, "--json", str(tmp_path / "rows.json")])
    return status, json.loads((tmp_path / "rows.json").read_text())["rows"]


@pytest.mark.parametrize("extra", [["--causal"], ["--varlen", "--window", "40", "0"]], ids=str)
def test_benchmark_measures_and_compares(tmp_path, extra):
    """Rows for every dtype and pass; errors grow with the format, speed-ups are against bf16 SDPA."""
    status, rows = run(
        tmp_path, "--dtype", "fp32", "bf16", "mxfp8", "--seqlen", "96", "--num-heads", "4", "--num-kv-heads", "2",
        "--batch-size", "2", "--head-dim", "32", "--backward", "--warmup", "1", "--iters", "2", "--device", "cpu", *extra,
    )  # fmt: skip
    assert status == 0 and [r["pass"] for r in rows] == ["fwd", "bwd"] * 3
    for i, keys in enumerate((("O",), ("dQ", "dK", "dV"))):
        fp32, bf16, mxfp8 = (rows[2 * j + i] for j in range(3))
        for key in keys:
            assert fp32["errors"][key] < 1e-5 < bf16["errors"][key] < 0.01
            assert 0.02 < mxfp8["errors"][key] < 0.09
        assert bf16["speedup_over_bf16_sdpa"] == 1.0
        assert mxfp8["backend"] == "portable"
        median = mxfp8["seconds"]["median"]
        ratio = bf16["seconds"]["median"] / median
        assert mxfp8["speedup_over_bf16_sdpa"] == pytest.approx(ratio)
        pairs = model.Problem(((72, 72), (96, 96)), 1, 1, 1, window=(40, 0)).pairs()
        pairs = pairs if "--varlen" in extra else 2 * 96 * 97 // 2
        flops = 4 * pairs * 4 * 32 * (2.5 if i else 1)
        assert mxfp8["tflops"] == pytest.approx(flops / median / 1e12)


def test_benchmark_model_is_labelled_and_never_timed(tmp_path, capsys):
    """Modelled figures say so, carry no wall time, and name what was too long to emulate."""
    status, rows = run(
        tmp_path,
        "--backend",
        "emulator",
        "--model",
        "--seqlen",
        "4096",
        "--backward",
        "--device",
        "cpu",
    )
    text = capsys.readouterr().out
    assert status == 0 and text.count("MODELLED") == 4 and "not run on sm_100" in text
    assert all("seconds" not in r and r["model"]["cycles"] > 0 for r in rows)
    assert all("too long to emulate" in r["backend"] for r in rows)


def test_benchmark_fp8_is_simulated_without_time(tmp_path):
    """Per-head E4M3 gives errors only."""
    status, rows = run(
        tmp_path, "--dtype", "fp8", "--seqlen", "128", "--backward", "--device", "cpu"
    )
    assert status == 0 and all("seconds" not in r and r["backend"] == "simulated" for r in rows)
    assert 0.02 < rows[1]["errors"]["dQ"] < 0.09


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--num-heads", "4", "--num-kv-heads", "3"], "divisor of --num-heads 4, got 3"),
        (["--model"], "expected with --backend emulator"),
        (["--dtype", "fp8", "--window", "4", "0"], "expected no --window"),
        (["--backend", "sm100", "--device", "cpu"], "backend 'sm100'"),
    ],
    ids=str,
)
def test_benchmark_bad_options_are_told(arguments, message, capsys):
    """Exit status 2 and what to change, no traceback."""
    assert bench.main([*arguments, "--seqlen", "32"]) == 2
    assert message in capsys.readouterr().err
