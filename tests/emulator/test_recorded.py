"""The emulator against what an H200 left in the same probes (data/h200.json), bit for bit."""

import pathlib

import numpy as np
import pytest
from emulator import probes as P
from emulator import record_probes as R

from flash_attn_mx import emulator

RECORD = R.load(pathlib.Path(__file__).parent / "data" / "h200.json")

# Approximations: the largest difference in units of the last place; the specification bounds them, not their bits.
ULP = {"div_approx": 2, "div_full": 2, "rcp_approx": 1, "sqrt_approx": 1, "rsqrt_approx": 1, "ex2_approx": 1, "tanh_approx": 128}  # fmt: skip

# What still differs, and why.
KNOWN = {
    "p_lg2_approx": "error is absolute near 1 (2^-22), not relative",
    "p_sin_approx": "the hardware reduces the range roughly and has an absolute error",
    "p_cos_approx": "the hardware reduces the range roughly and has an absolute error",
    "p_div_approx": "overflowing quotients and divisors above 2^126 give other results by specification",
    "p_div_rm_ftz_f32": "results that directed rounding lifts to the smallest normal are flushed before it on hardware",
    **{
        f"p_tma_store_{i}_{t}_64B_{op}": "the hardware writes on to the next 16-byte boundary behind the end of dimension 0"
        for i, t in ((18, "float16"), (20, "bfloat16"), (72, "float16"), (73, "bfloat16"))
        for op in ("", "add", "max")
    },
    "p_rcp_approx_ftz_f64": "only the high word carries a result on hardware",
    "p_rsqrt_approx_ftz_f64": "only the high word carries a result on hardware",
}


def aligned(raw):
    y = np.zeros(len(raw) + 128, np.uint8)
    y = y[-y.ctypes.data % 128 :][: len(raw)]
    y[:] = np.frombuffer(raw, np.uint8)
    return y


def run(p):
    m = emulator.Module.from_ptx(P.module([p]))
    src, out = aligned(p.ins), aligned(bytes(p.out_bytes))
    maps = [emulator.TensorMap.tiled(emulator.address_of(out if t.get("out") else src), **{k: v for k, v in t.items() if k != "out"}) for t in p.maps]  # fmt: skip
    m.kernels[p.name].launch(p.grid, p.block, [src, out, *maps], (p.cluster, 1, 1), checks=("proxy", "async", "leaks"), timeout=20)  # fmt: skip
    return out


def ulp(got, want, t):
    """Largest distance in units of the last place; NaN and NaN are equal."""
    f, n = {"f32": (np.uint32, 32), "f64": (np.uint64, 64), "f16": (np.uint16, 16), "bf16": (np.uint16, 16)}[t]  # fmt: skip
    inf = {"f32": 0x7F800000, "f64": 0x7FF << 52, "f16": 0x7C00, "bf16": 0x7F80}[t]
    worst = 0
    for a, b in zip(got.view(f).tolist(), want.view(f).tolist()):
        s = 1 << (n - 1)
        a, b = (s - x if x >= s else x for x in (a, b))
        if not (abs(a) > inf and abs(b) > inf):
            worst = max(worst, abs(a - b))
    return worst


def difference(p):
    """None where the emulator agrees with the record, else what differs first."""
    crc, raw = RECORD["probes"][p.name]
    assert crc == R.source(p), f"{p.name} is not the probe that was recorded; record it again"
    want, got = np.frombuffer(raw, np.uint8), run(p)
    if (got == want).all():
        return None
    if p.approx:
        limit = next((v for k, v in ULP.items() if p.name.startswith("p_" + k)), 0)
        worst = ulp(got, want, p.approx)
        return None if worst <= limit else f"{worst} units in the last place, {limit} allowed"
    at = int(np.flatnonzero(got != want)[0])
    lo = at // 8 * 8
    return f"byte {at}: {got[lo : lo + 8].tobytes().hex()} here, {raw[lo : lo + 8].hex()} there"


def groups():
    """Probes by what their names begin with, so that a failure says where."""
    by = {}
    for name, p in P.PROBES.items():
        if name in RECORD["probes"]:
            by.setdefault(name.split("_")[1], []).append(p)
    return by


@pytest.mark.parametrize("group", groups())
def test_agrees_with_h200(group):
    wrong = {}
    for p in groups()[group]:
        d = difference(p)
        known = next((k for k in KNOWN if p.name.startswith(k)), None)
        if d and not known:
            wrong[p.name] = d
    assert not wrong, "\n".join(f"{k}: {v}" for k, v in wrong.items())


# What an H200 refuses with CUDA_ERROR_ILLEGAL_INSTRUCTION: a coordinate 0 that is no multiple of 16 bytes, a store at a
# negative coordinate. No compiler and no manual says so.
REFUSED = sorted(n for n, e in RECORD["failed"].items() if e.endswith(" 715"))


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_an_h200_refuses(name):
    with pytest.raises(
        emulator.EmulatorError, match=r"\[tma\] .*an H200 takes it for an illegal instruction"
    ):
        run(P.PROBES[name])


def test_every_probe_without_a_record_runs_here():
    assert set(RECORD["failed"]) == set(REFUSED), (
        "a probe failed for another reason than its coordinates"
    )
    for p in P.PROBES.values():
        if p.name not in RECORD["probes"] and p.name not in RECORD["failed"]:
            run(p)
