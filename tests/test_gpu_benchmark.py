"""The command that measures on a GPU, at toy sizes on the CPU, as on a machine that has no `datasets` and no TRL."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

from tests.conftest import ROOT

import pytest
import yaml

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


def test_the_fixed_task_is_written_out_for_both_sides(tmp_path):
    """TRL's settings are those of the file, by its names; nothing is left to a default that differs."""
    import grpo_task

    settings = yaml.safe_load((ROOT / "benchmarks" / "grpo_task.yaml").read_text())
    words, _, _ = grpo_task.ours(tmp_path, 3, "no", 60)
    assert str(grpo_task.TASK) in words and words[words.index("--seed") + 1] == "3"
    grpo_task.trl(tmp_path, 3, "bf16", 60)
    spec = json.loads((tmp_path / "spec.json").read_text())
    options = spec["options"]
    same = "num_generations max_completion_length temperature top_p learning_rate warmup_steps weight_decay adam_beta2 beta epsilon"
    assert all(options[name] == settings[name] for name in [*same.split(), "loss_type", "scale_rewards", "max_grad_norm"])
    assert (spec["batch"], spec["steps"], options["seed"], options["bf16"]) == (128, 60, 3, True)
    from rewards import right_and_in_form

    texts = ["it is 4. Answer: 5", "4", [{"role": "assistant", "content": "Answer: 5"}]]
    assert right_and_in_form([], texts, ["5"] * 3) == [1.1, 0.0, 1.1]
    assert re.search("60 steps", grpo_task.__doc__) and SimpleNamespace(**settings).max_steps == 60
