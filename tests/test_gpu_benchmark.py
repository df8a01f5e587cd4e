"""The command that measures on a GPU, at toy sizes on the CPU, as on a machine that has no `datasets` and no
TRL."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu  # noqa: E402
from gpu_bench import FULL, LLAMA  # noqa: E402


def run(tmp_path, call):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor name in ('datasets', 'trl'): sys.modules[name] = None\n"
    )
    env = os.environ | {"OUT": str(tmp_path), "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "benchmarks/gpu.py", call, "--device", "cpu", "--tiny"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (tmp_path / f"gpu_{call}.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("call", list(gpu.CALLS))
def test_every_section_runs_and_all_sides_agree(call, tmp_path):
    rows = run(tmp_path, call)
    assert [row["ended"] for row in rows if row["section"] == "sections"] == ["done"] * len(gpu.CALLS[call])
    # it is not there
    assert [row["side"] for row in rows if "failed" in row] == (["TRL", "TRL"] if call == "c" else [])
    assert "TOO FAR" not in str(rows)
    losses = {}
    for row in rows:
        loss = row.get("first logp of a chosen answer", row.get("first loss", row.get("loss")))
        if row["section"] in ("SFT", "SFT at 8k", "loss head", "DPO", "long row"):
            kind = (
                row["side"].split(",")[0]
                if row["section"] == "loss head"
                else row.get("chats", row.get("pairs"))
            )
            losses.setdefault((row["section"], kind), []).append(loss)
    for same in losses.values():
        assert same == pytest.approx([same[0]] * len(same), rel=1e-2)  # bfloat16


def test_the_plan_fits_three_times_ten_minutes():
    for call, sections in gpu.CALLS.items():
        assert sum(most for _, most, _ in sections.values()) < 590
        assert all(f"        {name}" in gpu.plan() for name in sections) and f"gpu.py {call}" in gpu.plan()
    assert max(FULL["sequence"], FULL["pack"][0], FULL["long row"]) <= LLAMA["max_position_embeddings"]
