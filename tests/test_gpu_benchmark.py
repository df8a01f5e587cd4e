"""The command that measures on a GPU, at toy sizes on the CPU, as on a machine that has no `datasets` and no TRL."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

SECTIONS = {
    "pretrain", "SFT", "SFT at 8k", "DPO", "GRPO sampling", "GRPO step", "loss head", "attention", "long row", "fixed GRPO task",
    "SFT beside TRL itself",
}  # fmt: skip


def run(tmp_path, *words, first="", **environ):
    """gpu.py with something done at the start of each of its processes."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor name in ('datasets', 'trl'): sys.modules[name] = None\n" + first
    )
    env = os.environ | {"OUT": str(tmp_path), "PYTHONPATH": str(tmp_path)} | environ
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--tiny", "--minutes", "20", *words]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads((tmp_path / "gpu.json").read_text())


@pytest.mark.slow
def test_every_section_runs_and_both_sides_find_the_same_losses(tmp_path):
    out, found = run(tmp_path)
    rows = found["rows"]
    assert {row["section"] for row in rows} == SECTIONS
    assert [row["side"] for row in rows if "failed" in row] == ["TRL", "TRL"]  # it is not there
    assert not found["ended"] and found["now"] is None and "not whole" not in out
    heads = {row["side"].split(",")[0] for row in rows if row["section"] == "loss head"}
    assert len(heads) == 2  # two vocabularies
    for section in ("SFT", "SFT at 8k", "loss head", "DPO", "long row"):
        losses = {}
        for row in rows:
            if row["section"] == section:
                loss = row.get("first logp of a chosen answer", row.get("first loss", row.get("loss")))
                kind = row["side"].split(",")[0] if section == "loss head" else row.get("chats", row.get("pairs"))
                losses.setdefault(kind, []).append(loss)
        for same in losses.values():
            assert same == pytest.approx([same[0]] * len(same), rel=1e-2), section  # bfloat16
