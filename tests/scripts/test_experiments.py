"""The experiments: what the gallery says of them is so, and each runs by its path, as a module and as a
copy."""

import os
import re
import shutil
import subprocess
import sys

from common.errors import UserError
import pytest

from experiments import apply as applier
from tests.conftest import DIFFS, EXPERIMENTS, ROOT, demo, path_of, run_script, words_of
from tests.scripts.test_scripts import MORE

FOLDER = ROOT / "experiments"
GALLERY = (FOLDER / "README.md").read_text()
ENTRY = re.compile(
    r"^\| `(?:train_)?(\w+)\.(py|diff)` \|.*\| `((?:experiments/)?train_\w+\.py)` \| \+(\d+) −(\d+) \|", re.M
)
# lines that an experiment may add and remove, by its parent; 220 of the others
LARGEST = {"train_grpo.py": 460}


def changed_lines(name, parent):
    """[added, removed]."""
    if name in DIFFS:
        text = (FOLDER / f"{name}.diff").read_text().split("\n@@", 1)[1]
        signs = "+-"
    else:
        command = ["diff", parent, f"experiments/train_{name}.py"]
        text = subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout
        signs = "><"
    return [len(re.findall(f"^[{sign}]", text, re.M)) for sign in signs]


def test_the_gallery_says_how_much_each_experiment_changes():
    """| `train_kto.py` | ... | `train_dpo.py` | +71 −84 |: lines of `diff` from the parent, or of a diff that
    is kept."""
    entries = ENTRY.findall(GALLERY)
    assert sorted(name for name, *_ in entries) == EXPERIMENTS
    for name, form, parent, *numbers in entries:
        assert (form == "diff") == (name in DIFFS)
        changed = changed_lines(name, parent)
        assert changed == [int(number) for number in numbers], (name, changed)
        assert sum(changed) <= LARGEST.get(parent, 220), (name, changed)


# --- experiments that are kept as diffs ---------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A repository of one script and one diff, in which the applier works."""
    path_of("ema")  # all diffs are applied once, in the repository: below, the applier sees this folder alone
    (tmp_path / "experiments").mkdir()
    (tmp_path / "train_sft.py").write_text((ROOT / "train_sft.py").read_text())
    (tmp_path / "experiments" / "ema.diff").write_text((FOLDER / "ema.diff").read_text())
    monkeypatch.setattr(applier, "ROOT", tmp_path)
    monkeypatch.setattr(applier, "FOLDER", tmp_path / "experiments")
    return tmp_path


@pytest.mark.parametrize("name", DIFFS)
def test_a_diff_gives_the_same_script_as_git(name, tmp_path):
    """One that is formatted as all others."""
    parent, _ = applier.read_diff(name)
    shutil.copyfile(ROOT / parent, tmp_path / parent)
    (tmp_path / "experiments").mkdir()
    subprocess.run(["git", "apply", str(FOLDER / f"{name}.diff")], cwd=tmp_path, check=True)
    script = tmp_path / "experiments" / f"train_{name}.py"
    assert script.read_text() == applier.apply(name) == path_of(name).read_text()
    shutil.copyfile(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    for words in (["check"], ["format", "--check"]):
        subprocess.run([sys.executable, "-m", "ruff", *words, str(script)], check=True)


def test_a_diff_is_written_again_from_both_scripts(folder):
    """After a change to both, and above all of them."""
    applier.main(["ema"])
    script, copy, diff = (
        folder / name for name in ("train_sft.py", "experiments/train_ema.py", "experiments/ema.diff")
    )
    before = diff.read_text()
    applier.main(["--refresh", "ema"])
    assert diff.read_text() == before
    for path in (script, copy):
        text = path.read_text().replace(
            "            optimizer.step()\n", "            optimizer.step(None)\n"
        )
        path.write_text(text.replace("from typing", "import os\nfrom typing"))
    wanted = copy.read_text()
    applier.main(["--refresh", "ema"])
    copy.unlink()
    applier.main(["ema"])
    assert copy.read_text() == wanted and "step(None)" in wanted


def test_a_diff_finds_its_lines_where_they_have_moved_to(folder):
    script = folder / "train_sft.py"
    added = "    # a line of its own\n" * 9
    banner = "    # --- loop -"
    script.write_text(script.read_text().replace(banner, added + banner))
    applier.main(["ema"])
    written = (folder / "experiments" / "train_ema.py").read_text()
    assert added in written and written.replace(added, "") == path_of("ema").read_text()


def test_nothing_is_overwritten_or_put_in_the_wrong_place(folder):
    copy = folder / "experiments" / "train_ema.py"
    copy.write_text("# mine\n")
    with pytest.raises(UserError, match="train_ema.py exists"):
        applier.main(["ema"])
    copy.unlink()
    script = folder / "train_sft.py"
    text = script.read_text()
    for changed, places in ((text.replace("optimizer.step()", "step()"), 0), (text + text, 2)):
        script.write_text(changed)
        with pytest.raises(UserError, match=f"train_sft.py has {places} places.*--refresh ema"):
            applier.main(["ema"])
        assert not copy.exists()
    with pytest.raises(UserError, match="no experiments/emo.diff"):
        applier.main(["emo"])


# --- all of them --------------------------------------------------------------------------------------------


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
        *"-m accelerate.commands.launch --config_file accelerate_configs/cpu.yaml".split(),
    ]
    copy = tmp_path / f"train_{name}.py"
    copy.write_text(path_of(name).read_text())
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    for command in ([*launcher, *words_of(name)], [sys.executable, str(copy)]):
        run = run_script([*command, *words, "--dataset_cache_dir", str(tmp_path / "cache")])
        assert run.returncode == 0, run.stderr[-3000:]
        assert "parameters trained" in run.stdout
