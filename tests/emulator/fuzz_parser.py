"""Fuzzes loading: PTX text in any state gives a module or a PtxError. `python tests/emulator/fuzz_parser.py --seconds 300`."""

import sys
from types import SimpleNamespace

import fuzzing


def make(rng, item, other):
    text = fuzzing.mutate(rng, item, other)
    if rng.random() < 0.02:  # bytes, UTF-8 or not
        raw = bytearray(text.encode("utf-8", "replace")) or bytearray(b".")
        for _ in range(rng.randrange(1, 9)):
            raw[rng.randrange(len(raw) or 1) : rng.randrange(len(raw) or 1)] = bytes([rng.randrange(256)])  # fmt: skip
        return bytes(raw[:200_000]).decode("latin-1")
    return text[:400_000]


def run(emulator, text):
    """Loads the text and decodes every kernel. Only the documented errors may come, with a line."""
    try:
        m = emulator.Module.from_ptx(text.encode("latin-1", "replace"))
        m.inspect()
        return "loads"
    except emulator.PtxError as e:
        assert str(e).startswith("PTX line "), str(e)
        return str(e).split(": ", 1)[1][:24]


def seeds():
    probes, small, big = fuzzing.corpus()
    return [*probes, *small, *(p.read_text()[:150_000] + "\nret;\n}\n" for p in big[:1])]


CASE = SimpleNamespace(make=make, run=run)

if __name__ == "__main__":
    if "--child-replay" in sys.argv:
        sys.exit(fuzzing.replay(CASE, sys.argv[-1]))
    sys.exit(1 if fuzzing.main(CASE, seeds) else 0)
