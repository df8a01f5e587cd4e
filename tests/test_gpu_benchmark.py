"""The script that measures on a GPU, at toy sizes on the CPU, as on a machine that has no `datasets`."""

import json
import os
import subprocess
import sys

from tests.conftest import ROOT

import pytest

RUN = """
import runpy, sys
sys.modules["datasets"] = None  # importing it fails
sys.path.insert(0, "benchmarks")
sys.argv = ["gpu.py", "--device", "cpu", "--tiny"]
runpy.run_path("benchmarks/gpu.py", run_name="__main__")
"""


@pytest.mark.slow
def test_every_section_runs_and_both_sides_find_the_same_losses(tmp_path):
    env = os.environ | {"OUT": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", RUN], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert {row["section"] for row in rows} == {
        "pretrain", "SFT", "DPO", "GRPO sampling", "GRPO step", "loss head", "attention", "long row",
    }  # fmt: skip
    assert not [row for row in rows if "failed" in row]
    assert "not measured" not in done.stdout
    for section in ("SFT", "loss head", "DPO", "long row"):
        losses = {}
        for row in rows:
            if row["section"] == section:
                loss = row.get("first logp of a chosen answer", row.get("first loss", row.get("loss")))
                losses.setdefault(row.get("chats", row.get("pairs")), []).append(loss)
        for same in losses.values():
            assert same == pytest.approx([same[0]] * len(same), rel=1e-2), section  # bfloat16
