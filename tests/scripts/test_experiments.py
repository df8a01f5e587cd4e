"""The experiments: what the gallery says of them is so, and each runs by its path, as a module and as a
copy."""

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import EXPERIMENTS, ROOT, demo, run_script, words_of
from tests.scripts.test_scripts import MORE

FOLDER = ROOT / "experiments"
GALLERY = (FOLDER / "README.md").read_text()
ENTRY = re.compile(
    r"^\| `train_(\w+)\.py` \|.*\| `((?:experiments/)?train_\w+\.py)` \| \+(\d+) −(\d+) \|", re.M
)
# lines that an experiment may add and remove, by its parent; 215 of the others
LARGEST = {"train_grpo.py": 445}


def test_the_gallery_says_how_much_each_experiment_changes():
    """| `train_kto.py` | ... | `train_dpo.py` | +71 −84 |: lines of `diff` from the parent."""
    entries = ENTRY.findall(GALLERY)
    assert sorted(name for name, *_ in entries) == EXPERIMENTS
    for name, parent, *said in entries:
        diff = subprocess.run(
            ["diff", parent, f"experiments/train_{name}.py"], capture_output=True, text=True, cwd=ROOT
        )
        changed = [len(re.findall(f"^{sign}", diff.stdout, re.M)) for sign in "><"]
        assert changed == [int(number) for number in said] and sum(changed) <= LARGEST.get(parent, 215), (
            name,
            changed,
        )


@pytest.mark.slow
def test_an_experiment_is_run_by_its_path_too(tmp_path):
    """From the root, and from elsewhere: Python looks beside the script for `common`, and finds the
    root's."""
    for folder, script in ((ROOT, "experiments/train_kto.py"), (tmp_path, FOLDER / "train_kto.py")):
        command = [sys.executable, str(script), "--undesirable_weight", "-1"]
        run = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=120)
        assert run.returncode == 1 and run.stderr.startswith("error: --undesirable_weight"), run.stderr


def test_the_demo_data_is_what_its_scripts_write(tmp_path):
    for script in (FOLDER / "data").glob("make_*.py"):
        subprocess.run([sys.executable, str(script), "--out", str(tmp_path)], check=True)
    for path in tmp_path.rglob("*.jsonl"):
        assert path.read_bytes() == (FOLDER / "data" / path.relative_to(tmp_path)).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_runs_as_a_module_and_as_a_copy(name, tmp_path, monkeypatch):
    """Copied to another place with the root on the path, which is what a copy in the root has."""
    words = f"--config {demo(name)} --model_name_or_path data/base_model --dry_run --output_dir {tmp_path}/out".split()
    words += MORE.get(name, "").split()
    launcher = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        "accelerate_configs/cpu.yaml",
    ]
    copy = tmp_path / f"train_{name}.py"
    copy.write_text((FOLDER / copy.name).read_text())
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    for command in ([*launcher, *words_of(name)], [sys.executable, str(copy)]):
        run = run_script([*command, *words, "--dataset_cache_dir", str(tmp_path / "cache")])
        assert run.returncode == 0, run.stderr[-3000:]
        assert "parameters trained" in run.stdout
