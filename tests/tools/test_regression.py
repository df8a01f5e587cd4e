"""The gate: a model's suite against another model's, or against what was written of it earlier."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

from common.errors import UserError
from tests.conftest import ROOT, run_script
from tools import regression

import pytest

MODEL = "data/base_model"


def ask(i, **checks):
    return {"id": f"c{i}", "group": "words" if i < 6 else "ends", "prompt": f"Question: What is {i}+1?\n", **checks}


@pytest.fixture
def gate(tmp_path, capsys, monkeypatch):
    """gate(rows, *words): the exit code and what was printed. The model is loaded once."""
    loaded = {}
    real = regression.load_model

    def load_once(args, *rest):
        name = args.model_name_or_path
        loaded[name] = loaded[name] if name in loaded else real(args, *rest)
        return loaded[name]

    monkeypatch.setattr(regression, "load_model", load_once)

    def run(rows, *words, model=MODEL):
        path = tmp_path / "suite.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        code = regression.main([model, str(path), "--max_new_tokens", "8", *map(str, words)])
        return code, capsys.readouterr().out

    return run


def test_a_fall_is_exit_code_1_and_says_which_and_by_what_test(gate, tmp_path):
    """The base model passes everything; then its line is changed as if it had been the other way round."""
    rows = [ask(i, regex=".") for i in range(6)] + [ask(i, equals="-") for i in (6, 7)]
    save = tmp_path / "was.jsonl"
    code, out = gate(rows, "--save", save)
    assert code == 0 and "all       6/8" in out and "words     6/6      1.00  0.61 - 1.00" in out and "before" not in out
    line = json.loads(save.read_text())
    assert line["groups"]["ends"]["passed"] == 0 and line["failed"].keys() == {"c6", "c7"}
    assert gate(rows, "--baseline", save)[0] == gate(rows, "--baseline", MODEL)[0] == 0

    line["cases"]["c6"]["rate"] = 1.0
    save.write_text("{}\n" + json.dumps(line) + "\n")
    code, out = gate(rows, "--baseline", save)
    assert code == 0 and "fell: c6: equals: not '-'; " in out and "no group has fallen" in out
    code, out = gate(rows, "--baseline", save, "--strict")
    assert code == 1 and "FALLEN since" in out and "1 cases (--strict)" in out

    bad = [{**row, "regex": "^-"} if row["id"] != "c5" else row for row in rows]  # other cases: nothing to compare
    code, out = gate(bad, "--baseline", save)
    assert code == 0 and "not compared, new or edited since: c0, c1, c2, c3, c4" in out
    with pytest.raises(UserError, match="it has none of the cases of .*suite.jsonl as they are now"):  # a gate that is open
        gate([ask(9, regex=".")], "--baseline", save)
    gate(bad, "--save", tmp_path / "now.jsonl")
    now = json.loads((tmp_path / "now.jsonl").read_text())["cases"]
    save.write_text(json.dumps(line | {"cases": {name: case | {"rate": 1.0} for name, case in now.items()}}))
    code, out = gate(bad, "--baseline", save)
    assert code == 1 and out.splitlines()[-1] == (
        f"FALLEN since {save}: all (p = 0.0078), words (p = 0.031), by McNemar's exact test, one-sided"
    )
    assert gate(bad, "--baseline", save, "--alpha", "0.001")[0] == 0


def test_several_answers_are_drawn_and_compared_as_such(gate, tmp_path):
    drawn = ["--samples", "4", "--pass_at", "2", "--temperature", "1", "--save", tmp_path / "was.jsonl"]
    code, out = gate([ask(i, regex="[0-4]") for i in range(3)], *drawn)
    assert code == 0 and json.loads((tmp_path / "was.jsonl").read_text())["samples"] == 4
    assert gate([ask(i, regex="[0-4]") for i in range(3)], *drawn, "--baseline", tmp_path / "was.jsonl")[1].count("\n") == 4
    with pytest.raises(UserError, match=r"its answers were asked for otherwise: \{'samples': 4"):
        gate([ask(1, regex=".")], "--baseline", tmp_path / "was.jsonl")


def test_mistakes_are_one_line(gate, tmp_path):
    for words, said in [
        (["--baseline", tmp_path / "no.jsonl"], "--baseline .*no.jsonl: no regression.jsonl"),
        (["--samples", "3"], "--samples: answers of temperature 0 are all the same"),
        (["--samples", "0"], "at least 1"),
        (["--alpha", "1"], "--alpha is between 0 and 1"),
    ]:
        with pytest.raises(UserError, match=said):
            gate([ask(1, regex=".")], *words)
    with pytest.raises(UserError, match="cannot load the tokenizer"):
        gate([ask(1, regex=".")], model=str(tmp_path / "nothing"))


@pytest.mark.slow
def test_the_commands_of_the_page_run_as_written(tmp_path):
    """In a folder with the demo's data, where outputs/sft is the base model."""
    (tmp_path / "data").symlink_to(ROOT / "data")
    shutil.copytree(ROOT / MODEL, tmp_path / "outputs" / "sft")
    page = (ROOT / "docs" / "regression.md").read_text()
    blocks = "".join(re.findall(r"```bash\n(.*?)```", page, re.S))
    commands = [line.split("#")[0] for line in blocks.splitlines() if line.startswith("python -m tools.regression")]
    assert len(commands) == 3
    for command in commands:
        words = [sys.executable, *shlex.split(command)[1:]]
        done = subprocess.run(
            words, cwd=tmp_path, capture_output=True, text=True, timeout=200, env=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        assert done.returncode == 0 and "refusing     0/6" in done.stdout, (command, done.stderr[-2000:])
    rows = [json.loads(line) for line in re.search(r"```json\n(.*?)```", page, re.S)[1].splitlines()]
    shipped = [json.loads(line) for line in (ROOT / "data" / "regression.jsonl").read_text().splitlines()]
    assert all(row in shipped for row in rows)


@pytest.mark.slow
def test_as_a_command_its_exit_code_is_that_of_the_gate(tmp_path):
    command = [sys.executable, "-m", "tools.regression", MODEL, "data/regression.jsonl", "--max_new_tokens", "32"]
    first = run_script([*command, "--save", str(tmp_path / "was.jsonl")])
    assert first.returncode == 0 and "stopping" in first.stdout, first.stderr
    line = json.loads((tmp_path / "was.jsonl").read_text())
    line["cases"] = {name: case | {"rate": 1.0} for name, case in line["cases"].items()}
    (tmp_path / "was.jsonl").write_text(json.dumps(line))
    again = run_script([*command, "--baseline", str(tmp_path / "was.jsonl")])
    assert again.returncode == 1 and "FALLEN" in again.stdout and "Traceback" not in again.stderr
