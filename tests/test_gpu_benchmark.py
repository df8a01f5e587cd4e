"""The command that measures on a GPU, at toy sizes on the CPU, as on a machine that has no `datasets` and no TRL."""

import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT, read_rows

sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu  # noqa: E402


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("call", list(gpu.CALLS))
def test_every_section_runs_to_its_end(call, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nfor name in ('datasets', 'trl'): sys.modules[name] = None\n")
    env = os.environ | {"OUT": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "benchmarks/gpu.py", call, "--device", "cpu", "--tiny"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = read_rows(tmp_path / f"gpu_{call}.jsonl")
    assert [row["ended"] for row in rows if row["section"] == "sections"] == ["done"] * len(gpu.CALLS[call])
    assert [row["side"] for row in rows if "failed" in row] == (["TRL", "TRL"] if call == "c" else [])  # it is not there
    assert "TOO FAR" not in str(rows)
