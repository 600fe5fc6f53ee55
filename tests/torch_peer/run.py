"""PyTorch's own attention tests with MXFP8 active: make test-torch TORCH_SOURCE=/path/to/pytorch

TORCH_SOURCE: a checkout of PyTorch at the version that is installed, or one test file; its test/test_transformers.py runs twice,
without and with MXFP8, and the outcomes are compared. A test that fails only with MXFP8 is a failure. The rest of the command
line goes to pytest, such as -k "TestSDPA and cpu". Without a source there is the rebuilt grid: tests/api/test_torch_sdpa_grid.py.
"""

import argparse
import collections
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILE = Path("test") / "test_transformers.py"


def find(source):
    path = Path(source)
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise SystemExit(f"--source: expected a PyTorch checkout or a test file, got {source}")
    return path.resolve()


def run(path, options, with_mxfp8):
    """{test: (outcome, detail)}; outcome passed, served, widened, skipped or failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
        ]
        command += ["-c", os.devnull, "--rootdir", str(path.parent)]
        command += ["-p", "famx_torch_peer"] if with_mxfp8 else []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(HERE)))}
        done = subprocess.run(
            [*command, *options, str(path)], env=environment, cwd=path.parent,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if not report.is_file() or done.returncode not in (0, 1):
            raise SystemExit(f"pytest could not run {path}:\n{done.stdout[-4000:]}")
        return dict(map(outcome, ElementTree.parse(report).getroot().iter("testcase")))


def outcome(case):
    name = f"{case.get('classname')}::{case.get('name')}"
    for kind in ("failure", "error"):
        if case.find(kind) is not None:
            return name, ("failed", case.find(kind).get("message", "").splitlines()[0:1])
    if case.find("skipped") is not None:
        return name, ("skipped", case.find("skipped").get("message", ""))
    marks = {p.get("name"): p.get("value") for p in case.iter("property")}
    return name, (marks.get("mxfp8", "passed"), "")


def compare(plain, active):
    """Prints the counts, each reason of a skip, and each failure; returns how many tests fail with MXFP8 only."""
    counts = collections.Counter(kind for kind, _ in active.values())
    print(f"{len(active)} tests with MXFP8 active")
    print(f"  {counts['passed']:6} passed; no call was MXFP8's to serve, or all were handed on")
    print(f"  {counts['served']:6} passed on MXFP8 within torch's own tolerances")
    print(f"  {counts['widened']:6} passed on MXFP8 within MXFP8's accuracy")
    print(f"  {counts['skipped']:6} skipped:")
    reasons = collections.Counter(detail for kind, detail in active.values() if kind == "skipped")
    for reason, number in reasons.most_common():
        print(f"  {'':6}   {number:6} {reason}")
    failed = [name for name, (kind, _) in active.items() if kind == "failed"]
    ours = [name for name in failed if plain.get(name, ("missing",))[0] != "failed"]
    print(f"  {len(failed) - len(ours):6} fail without MXFP8 too")
    print(f"  {len(ours):6} fail with MXFP8 only")
    for name in ours:
        print(f"         {name}: {active[name][1]}")
    return len(ours)


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--source", required=True, help="PyTorch checkout, or a test file of it")
    arguments, options = parser.parse_known_args(argv)
    path = find(arguments.source)
    return 1 if compare(run(path, options, False), run(path, options, True)) else 0


if __name__ == "__main__":
    sys.exit(main())
