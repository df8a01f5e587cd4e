"""tools/reasoning_tasks.py, with a stand-in for reasoning-gym: questions that repeat, a scorer of its own."""

import subprocess
import sys

from common.sampling.rewards import load_rewards, score
import pytest

from tests.conftest import ROOT, read_rows

PACKAGE = """
class Doubles:
    def __init__(self, size, seed, largest=30):
        self.seed, self.largest = seed, largest

    def __getitem__(self, i):
        n = (self.seed + i) % self.largest
        return {"question": f"Double {n}.", "answer": str(2 * n), "metadata": {"n": {n}}}  # a set: no JSON

    def score_answer(self, answer, entry):
        (n,) = entry["metadata"]["n"]
        if answer == "a half":
            raise ValueError("no number")
        return 1.0 if answer == str(2 * n) else 0.25 if answer.isdigit() else 0.0


def create_dataset(name, **settings):
    if name != "doubles":
        raise ValueError(f"{name!r} not registered")
    return Doubles(**settings)
"""
UTILS = "def extract_answer(text):\n    return text.split('<answer>')[-1].split('</')[0] if '<answer>' in text else None\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Calls the tool, with these words, on a folder; returns the process."""
    (tmp_path / "reasoning_gym").mkdir()
    (tmp_path / "reasoning_gym/__init__.py").write_text(PACKAGE)
    (tmp_path / "reasoning_gym/utils.py").write_text(UTILS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")

    def call(task, *words):
        command = [sys.executable, "-m", "tools.reasoning_tasks", task, str(tmp_path / "rows"), *words]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    return call


def rows_of(folder, name):
    return read_rows(folder / "rows" / f"{name}.jsonl")


def test_no_question_is_held_out_and_trained(write, tmp_path):
    assert write("doubles", "--rows", "90", "--held_out", "10", "largest=40").returncode == 0
    train, held_out = (
        [row["prompt"][0]["content"] for row in rows_of(tmp_path, name)] for name in ("train", "validation")
    )
    assert len(set(train)) == len(train) == 30 and len(set(held_out)) == 10 and not set(train) & set(held_out)


def test_the_tasks_own_scorer_is_the_reward(write, tmp_path):
    assert write("doubles", "--rows", "20", "--held_out", "4").returncode == 0
    rows = rows_of(tmp_path, "train")[:4]
    right = [row["completion"][0]["content"] for row in rows]
    rewards = load_rewards([f"{ROOT}/tools/reasoning_tasks.py:{name}" for name in ("score", "solved")], "cpu")
    texts = [right[0], f"So: <answer>{right[1]}</answer>", "7", "a half"]  # of the last the scorer raises
    assert score(rewards, rows, texts, [[]] * 4) == [[1.0, 1.0, 0.25, 0.0], [1.0, 1.0, 0.0, 0.0]]
