"""The experiments: what the gallery says of them is so, and each runs as a module and as a copy in the root."""

import re
import subprocess
import sys

import pytest

from tests.conftest import EXPERIMENTS, ROOT

FOLDER = ROOT / "experiments"
GALLERY = (FOLDER / "README.md").read_text()
# | [train_kto.py](train_kto.py) | ... | train_dpo.py | +71 −84 | ...
ENTRY = re.compile(r"^\| `train_(\w+)\.py` \|.*\| `((?:experiments/)?train_\w+)\.py` \| \+(\d+) −(\d+) \|", re.M)
ENTRIES = {name: (parent, int(added), int(removed)) for name, parent, added, removed in ENTRY.findall(GALLERY)}
LARGEST = {"train_grpo": 380}  # lines that an experiment may add and remove, by its parent; 185 of the others


def changed_lines(parent, experiment):
    """(added, removed): of `diff parent experiment`, the lines that begin with > and <."""
    run = subprocess.run(["diff", parent, experiment], capture_output=True, text=True, cwd=ROOT)
    return tuple(len(re.findall(rf"^{sign} ?", run.stdout, re.M)) for sign in "><")


def test_the_gallery_holds_every_experiment():
    assert sorted(ENTRIES) == EXPERIMENTS


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_size_of_the_difference_is_what_the_gallery_says(name):
    parent, added, removed = ENTRIES[name]
    found = changed_lines(f"{parent}.py", f"experiments/train_{name}.py")
    assert found == (added, removed), f"{name}: write +{found[0]} −{found[1]} into experiments/README.md"
    assert added + removed <= LARGEST.get(parent, 185)


def test_an_experiment_is_run_by_its_path_too(tmp_path):
    """From the root, and from elsewhere: Python looks beside the script for `common`, and finds the root's."""
    for folder, script in ((ROOT, "experiments/train_kto.py"), (tmp_path, FOLDER / "train_kto.py")):
        command = [sys.executable, str(script), "--undesirable_weight", "-1"]
        run = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=120)
        assert run.returncode == 1 and run.stderr.startswith("error: --undesirable_weight"), run.stderr


def test_the_demo_data_is_what_its_scripts_write(tmp_path):
    for script in (FOLDER / "data").glob("make_*.py"):
        subprocess.run([sys.executable, str(script), "--out", str(tmp_path)], check=True)
    for path in tmp_path.rglob("*.jsonl"):
        assert path.read_bytes() == (FOLDER / "data" / path.relative_to(tmp_path)).read_bytes()
