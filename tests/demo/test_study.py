"""python -m flash_attn_mx study, and the simulation of our contract that it varies."""

import json

import pytest
import torch

from flash_attn_mx import study
from flash_attn_mx.demo import accuracy, dense_attention

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("case", ["normal", "sink", "outlier_token"])
def test_contract_simulation_follows_the_public_function(case):
    """The study varies what the library computes: the simulation differs from it by rounding noise only."""
    inputs = accuracy.CASES[case].make(torch.Generator().manual_seed(0), True)
    simulated = accuracy.simulate(accuracy.CONTRACT, *inputs)
    for a, b in zip(simulated, accuracy.through_api(dense_attention, *inputs)):
        assert accuracy.errors(a, b.double())["whole"] < 1e-3


def test_scales_of_every_rounding():
    """Largest value 500: the scale is 2, 1, 1 or 500/448, and only what clips is clipped."""
    x = torch.zeros(1, 1, 32)
    x[..., 0], x[..., 1] = 500.0, 1.0
    largest = {r: accuracy.mx(-1, rounding=r)(x)[0, 0, 0].item() for r in accuracy.SCALES}
    assert largest == {"rceil": 512.0, "floor": 448.0, "nearest": 448.0, "fp32": pytest.approx(500)}
    x[..., 0] = 512.0
    assert accuracy.mx(-1, rounding="floor")(x)[0, 0, 0] == 512.0
    blocks = torch.cat([x, x * 2**-20], -1)
    assert accuracy.mx(-1, 64)(blocks)[0, 0, 33] == 0.0 != accuracy.mx(-1, 32)(blocks)[0, 0, 33]
    squares = accuracy.square(2)(torch.tensor([[[448.0, 1], [1, 1], [2**-20, 0]]]))
    assert squares[0, 2, 0] == 2**-20  # its own block, past the end in one direction


def test_treatments_change_nothing_but_rounding():
    """With exact products, smoothing and rotation give the same output and gradients."""

    def same(x):
        return x

    exact = accuracy.Scheme(*(same,) * 3, 0.0, *(same,) * 8, delta_do=same)
    inputs = [torch.randn(2, n, 64) for n in (96, 160, 160, 96)]
    wanted = accuracy.exact(*inputs)
    for smooth, qk, v in ((True, False, False), (False, True, False), (True, True, True)):
        variant = study.Variant("", exact, study.Treatment(smooth, qk, v))
        for a, b in zip(study.treated(variant, *inputs), wanted):
            assert accuracy.errors(a, b)["whole"] < 1e-5
    turn = study.hadamard(32)
    torch.testing.assert_close(turn @ turn.T, torch.eye(32))
    with pytest.raises(ValueError, match="power of two for a Hadamard rotation, got 96"):
        study.hadamard(96)


def test_smoothing_helps_where_k_has_an_offset():
    """The study can see a difference: an offset of K is what smoothing removes."""
    q, k, v, dout = (torch.randn(1, 128, 64) for _ in range(4))
    k = k + 20.0 * torch.randn(64)
    wanted = accuracy.exact(q, k, v, dout)
    columns = study.STUDIES["outliers"][1]
    plain, smooth = (
        accuracy.errors(study.treated(columns[name], q, k, v, dout)[1], wanted[1])["whole"]
        for name in (study.BASE, "smooth K")
    )
    assert smooth < 0.5 * plain


def test_study_writes_tables_and_plots(tmp_path, capsys):
    """Every file is there, and every study has a row for each input."""
    arguments = [
        "--quick",
        "--no-minilm",
        "--only",
        "roundings",
        "outliers",
        "--out",
        str(tmp_path),
    ]
    assert study.main(arguments) == 0
    body = json.loads((tmp_path / "study.json").read_text())
    assert list(body["errors"]) == ["roundings", "outliers"] and body["simulated"] is True
    table = (tmp_path / "study.md").read_text()
    for name, by_variant in body["errors"].items():
        assert list(by_variant) == list(study.STUDIES[name][1])
        assert all(
            list(e) == [c.title for c in accuracy.CASES.values()] for e in by_variant.values()
        )
        assert (tmp_path / f"{name}.png").stat().st_size > 20_000
        assert study.STUDIES[name][0] in table
    text = capsys.readouterr().out
    assert "not run on sm_100" in text and "floor (OCP MX 1.0)" in text
    assert study.mean_ratio(body["errors"]["roundings"], "nearest", "O") > 1.1
    assert study.mean_ratio(body["errors"]["roundings"], study.BASE, "O") == 1.0


def test_study_names_what_is_missing(monkeypatch, capsys):
    """Without transformers it says what to install, and the way around."""
    monkeypatch.setattr(
        study.importlib.util, "find_spec", lambda name: None if name == "transformers" else 1
    )
    assert study.main(["--quick"]) == 2
    assert (
        "pip install 'flash_attn_mx[demo]', or leave the encoder out with --no-minilm"
        in capsys.readouterr().err
    )
