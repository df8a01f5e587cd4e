"""report.html: what is kept of a long log, what is embedded and how, and what a comparison computes."""

from hashlib import sha256
import json
import os
from pathlib import Path
import random
import re
import shlex
import signal

from common.run.folder import lock as take_lock
from common.run.parts.report import command_of, describe_run, embedded, page, thinned
import numpy as np
import pytest

from tests.conftest import SFT, read_rows, write_rows
from tools import report
from tools.report import write_report

EVIL = '</script><script>document.title="owned"</script><img src=x onerror="document.title=1"><!-- \u2028 \ud800 {{x}} @@data@@'


def data_of(text):
    """The JSON of a page."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


def shown_of(folder):
    """The first run of the page in a folder."""
    return data_of((folder / "report.html").read_text())["runs"][0]


def a_run(folder, *, steps=40, name="run", evil="", better=0):
    """An output folder as a run leaves it; `evil` stands wherever text comes from the outside."""
    folder.mkdir(exist_ok=True, parents=True)
    metrics = [{"step": 0, "eval_right": 0.0, "seconds": 0.1}, {"step": 0, "eval_loss": 5.0, "seconds": 0.1}]
    for step in range(1, steps + 1):
        more = {"num_tokens": 100 * step, "seconds": 2.0 * step}
        metrics.append({"step": step, "loss": 4 / step, f"odd{evil}": step % 3} | more)
    metrics.append({"step": steps, "eval_loss": 0.5, "eval_right": 0.5, "seconds": 2.0 * steps})
    write_rows(folder / "metrics.jsonl", metrics)
    samples = []
    for step in (0, steps):
        for i in range(20):
            text = f"answer {i} at {step if i % 2 else 0}{evil}"
            row = {"step": step, "temperature": 0.0, "prompt": f"question {i}{evil}", "completion": text}
            samples.append(row | {"right": float(step > 0 and i < 8 + better)})
    write_rows(folder / "samples.jsonl", samples)
    events = [
        {
            "step": 0,
            "time": 1e9,
            "kind": "started",
            "text": f"from the beginning{evil}",
            "script": "train_sft.py",
        }
    ]
    events += [{"step": steps // 2, "time": 1e9 + 60, "kind": "spike", "text": f"the loss jumps{evil}"}]
    write_rows(
        folder / "events.jsonl", [*events, {"step": steps, "time": 1e9 + 99, "kind": "finished", "text": ""}]
    )
    rollout = [
        {
            "step": step,
            "prompt": f"question {k // 4}{evil}",
            "completion": f"try {k} at {step}{evil}",
            "finished": k != 3,
        }
        | {"rewards": {"exact": float(k % 2)}, "reward": float(k % 2), "advantage": k % 2 - 0.5}
        for step in (1, 2, 3)
        for k in range(16)
    ]
    write_rows(folder / "completions.jsonl", rollout)
    (folder / "args.yaml").write_text(
        f"run_name: {json.dumps(name + evil)}\nlearning_rate: {0.1 + better}\nseed: 0\n"
    )
    source = {
        "source": f"chats{evil}",
        "path": evil,
        "columns": ["messages"],
        "rows": 3,
        "examples": 2,
        "tokens": 9,
    }
    source |= {"share": 1.0, "dropped": {f"empty{evil}": {"count": 1, "first": [f"x:1{evil}"]}}}
    facts = {
        "sources": [source],
        "example": "chat",
        "marked": [{"side": "", "parts": [[f"a{evil}", False], ["b", True]]}],
    }
    (folder / "dataset.json").write_text(json.dumps(facts))
    return folder


# --- thinning -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length, most", [(3, 8), (9, 8), (1000, 8), (801, 800), (1000, 7)])
def test_a_thinned_curve_keeps_every_peak(length, most):
    values = np.random.default_rng(length).normal(size=length)
    table = thinned(np.stack([np.arange(length), values], axis=1), most)
    assert len(table["x"]) == len(table["y"]) == min(length, most) and ("low" in table) == (length > most)
    assert max(table.get("high", table["y"])) == pytest.approx(values.max(), rel=1e-4)
    assert min(table.get("low", table["y"])) == pytest.approx(values.min(), rel=1e-4)
    shares = [-(-(length - k) // len(table["x"])) for k in range(len(table["x"]))]  # values of each group
    assert np.average(table["y"], weights=shares) == pytest.approx(values.mean(), rel=1e-3, abs=1e-5)


def test_a_long_log_gives_a_small_page(tmp_path):
    """100,000 steps of 25 metrics, one of them with a peak."""
    draw = random.Random(0)
    rows = []
    for step in range(20, 100_001, 20):
        row = {f"metric_{k}": round(draw.random(), 6) for k in range(25)} | {
            "loss": 1000.0 if step == 31_240 else 1 / step
        }
        row["flat"] = 3.0
        rows.append({"step": step, **row, "num_tokens": step * 10})
    write_rows(tmp_path / "metrics.jsonl", rows)
    with (tmp_path / "metrics.jsonl").open("a") as out:
        out.write('{"step": 100010, "loss": null}\n{"step": 100020, "lo')
    run = describe_run(tmp_path)
    assert len(page([run]).encode()) < 2_000_000
    assert run["constant"] == {"flat": 3.0}
    loss = next(curve for curve in run["curves"] if curve["name"] == "loss")
    assert max(loss["high"]) == 1000 and len(loss["y"]) == 800
    assert abs(loss["x"][loss["high"].index(1000)] - 31_240) <= 20 * 7
    assert run["axis"]["num_tokens"][-1] == [100_000, 1_000_000]


# --- what a page holds --------------------------------------------------------------------------------------


def test_nothing_of_a_run_can_leave_its_element(tmp_path):
    text = page([describe_run(a_run(tmp_path / "run", evil=EVIL))])
    shown = data_of(text)["runs"][0]
    before, after = text.split('id="data">')[0], text.split('id="data">')[1].split("</script>", 1)[1]
    assert (
        "<script>document" not in before + after
        and text.count("</script>") == 2
        and "<" not in embedded(shown)
    )
    assert shown["name"] == "run" + EVIL and shown["samples"]["prompts"][0]["texts"][0].endswith(EVIL)
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//|@import|url\(|fetch\(|XMLHttp""", text), (
        "nothing is loaded"
    )
    assert shown["before"] == {"eval_right": 0, "eval_loss": 5} and shown["after"] == {
        "eval_loss": 0.5,
        "eval_right": 0.5,
    }
    assert shown["state"] == "finished" and shown["script"] == "train_sft.py"
    assert [event["kind"] for event in shown["events"]] == ["started", "spike", "finished"]


def test_memory_is_the_peak_of_all_processes_of_a_run(tmp_path):
    """One that resumes counts from its own start."""
    folder = a_run(tmp_path / "run")
    used = [10.0, 12.0, 7.0, 8.0]
    rows = [{"step": step, "loss": 1.0, "peak_memory_gib": peak} for step, peak in enumerate(used, 1)]
    write_rows(folder / "metrics.jsonl", rows)
    assert describe_run(folder)["memory"]["peak"] == 12


def test_a_killed_run_is_shown_as_killed(tmp_path):
    """While it lives its lock is held; after kill -9 nobody holds it, and nothing has been written of its
    end."""
    folder = a_run(tmp_path / "run")
    events = (folder / "events.jsonl").read_text().splitlines()
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in events if "finished" not in line))

    def state():
        write_report([folder], folder / "report.html")
        return shown_of(folder)["state"]

    assert state() == "running", "who knows: it left no lock"
    told, tells = os.pipe()
    if not (child := os.fork()):
        os.write(tells, str(take_lock(folder)).encode())
        signal.pause()
    assert os.read(told, 99) == b"None" and state() == "running"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert state() == "killed"
    lock = folder / ".lock"
    lock.write_text(lock.read_text().replace(" on ", " on another-"))
    assert state() == "running", "a machine whose locks may not be seen here"


@pytest.mark.parametrize("text", [b"", b"{", b"\x00", b'{"step": 1, "lo', b'{"text": "\xe4\xbd'])
def test_what_is_half_written_is_passed_over(text, tmp_path):
    for name in (
        "args.yaml",
        "dataset.json",
        "summary.json",
        "samples.jsonl",
        "events.jsonl",
        "regression.jsonl",
    ):
        (tmp_path / name).write_bytes(text)
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 2.0}\n' + text)
    write_report([tmp_path, tmp_path], tmp_path / "report.html")
    assert shown_of(tmp_path)["curves"][0]["y"] == [2.0]


def test_a_resumed_run_has_one_history(launch, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    words = [
        *SFT,
        "--eval_prompts",
        tmp_path / "prompts.jsonl",
        *"--eval_max_new_tokens 2 --eval_steps 2".split(),
    ]
    words += "--save_best eval_loss --save_steps 2 --max_train_samples 40 --logging_steps 1".split()
    launch("sft", *words, "--max_steps", "2")
    output = launch("sft", *words, "--max_steps", "4")
    kinds = [
        (row["kind"], row["step"]) for row in read_rows(output / "events.jsonl") if row["kind"] != "best"
    ]
    assert kinds == [
        ("started", 0),
        ("saved", 2),
        ("finished", 2),
        ("resumed", 2),
        ("saved", 4),
        ("finished", 4),
    ]
    run = shown_of(output)
    assert (
        run["state"] == "finished"
        and run["step"] == run["steps"] == 4
        and run["best"]["metric"] == "eval_loss"
    )
    assert run["data"]["marked"][0]["parts"] and any(
        trained for _, trained in run["data"]["marked"][0]["parts"]
    )
    assert run["frames"][0]["name"] == "loss" and run["frames"][1]["name"] == "mean_token_accuracy"
    for name in ("seconds", "cpu_seconds"):
        times = [row[name] for row in read_rows(output / "metrics.jsonl")]
        assert times == sorted(times) and times[0] > 0, "over both stretches"
    changed = {name for group in run["settings"] for name, _, unchanged in group["rows"] if not unchanged}
    assert {"max_steps", "save_best"} <= changed and not {"seed", "weight_decay", "train_on"} & changed
    assert run["command"].startswith("python train_sft.py --config ")
    launched = command_of("train_sft.py", Path("out"), {"processes": 2, "mixed_precision": "bf16"})
    assert launched.startswith("accelerate launch -q --num_processes 2 --mixed_precision bf16 train_sft.py ")
    launched = command_of("train_sft.py", Path("out"), {"processes": 2, "distributed": "MULTI_CPU"})
    assert launched.startswith(
        "accelerate launch -q --config_file accelerate_configs/cpu_ddp.yaml --num_processes 2 tr"
    )
    launched = command_of("train_sft.py", Path("out"), {"processes": 1, "distributed": "DEEPSPEED"})
    assert launched.startswith("accelerate launch -q --config_file CONFIG train_sft.py ")
    words = shlex.split(command_of("my sft.py", Path("r 4"), {}))
    assert words == ["python", "my sft.py", "--config", "r 4/args.yaml", "--output_dir", "r 4-again"]


# --- comparing ----------------------------------------------------------------------------------------------


def test_runs_are_compared_by_settings_and_prompts(tmp_path):
    one, two = a_run(tmp_path / "one", name="one"), a_run(tmp_path / "two", name="two", better=6)
    for folder in (one, two):  # a question may be asked more than once
        rows = read_rows(folder / "samples.jsonl")
        write_rows(folder / "samples.jsonl", [row | {"prompt": row["prompt"][:10]} for row in rows])
    write_report([one, two], tmp_path / "both.html")
    compared = data_of((tmp_path / "both.html").read_text())["compared"]
    assert compared["settings"] == [["learning_rate", ["0.1", "6.1"]]]
    (rate,) = compared["rates"]  # of 20 prompts six are won, none is lost: by coin tosses 2 / 2^6
    assert rate["name"] == "right" and [row["passed"] for row in rate["runs"]] == [8, 14]
    assert rate["runs"][1]["test"].startswith("McNemar") and rate["runs"][1]["p"] == pytest.approx(2 / 2**6)
    assert (rate["runs"][1]["gained"], rate["runs"][1]["lost"]) == (6, 0) and "p" not in rate["runs"][0]


def test_suites_are_compared_case_by_case(tmp_path):
    """7 of 9 that failed pass now, none fell: McNemar's exact p is 2 / 2^7. A case that was edited is not the
    same."""
    for name, right in (("one", 1), ("two", 8)):
        cases = {f"c{i}": {"rate": float(i < right), "digest": "x", "group": "easy"} for i in range(9)}
        cases["c0"] = {"rate": 0.0, "digest": name, "group": "edited"}
        cases["c9"] = {"rate": 0.0, "digest": "x", "group": "hard"}
        row = {"step": 40, "groups": {"easy": {"passed": right, "total": 9}}, "cases": cases}
        write_rows(a_run(tmp_path / name) / "regression.jsonl", [row | {"step": 0}, row])
    write_report([tmp_path / "one", tmp_path / "two"], tmp_path / "both.html")
    shown = data_of((tmp_path / "both.html").read_text())
    second = {rate["name"]: rate["runs"][1] for rate in shown["compared"]["rates"]}
    assert (
        second["regression/easy"]["test"] == "McNemar, exact" and second["regression/easy"]["p"] == 2 / 2**7
    )
    assert second["regression/hard"]["p"] == 1 and "p" not in second["regression/edited"]


def test_a_table_of_all_runs_of_a_folder(tmp_path, capsys):
    """Three seeds share a line; another rate has its own, as has another script; a checkpoint is no run."""
    for name, seed, rate, last in [
        ("a", 0, 0.1, 0.4),
        ("b", 1, 0.1, 0.5),
        ("c/d", 2, 0.1, 0.6),
        ("e", 3, 0.2, 0.3),
    ]:
        folder = a_run(tmp_path / name, steps=100)
        (folder / "args.yaml").write_text(f"learning_rate: {rate}\nseed: {seed}\nrun_name: {name}\n")
        write_rows(
            folder / "metrics.jsonl",
            [{"step": 0, "eval_loss": 5.0}, {"step": 100, "loss": 1.0, "eval_loss": last}],
        )
        (folder / "checkpoint-5").mkdir(exist_ok=True)
    (tmp_path / "e" / "train_sft.py").write_text("edited = True")
    other = a_run(tmp_path / "other")
    write_rows(
        other / "events.jsonl", [{"step": 0, "time": 1e9, "kind": "started", "script": "train_dpo.py"}]
    )
    report.main([str(tmp_path)])
    told = capsys.readouterr().out.splitlines()
    first, second = (re.split(" {2,}", line) for line in told if line[:2] in ("a ", "e "))
    assert first == ["a and 2 more", "100", "5 -> 0.5 ± 0.1", "learning_rate 0.1"]
    assert second == [
        "e",
        "100",
        "5 -> 0.3",
        f"learning_rate 0.2, code {sha256(b'edited = True').hexdigest()[:6]}",
    ]
    assert "train_sft.py: 4" in told and "train_dpo.py: 1" in told and len(told) == 8
    assert any(line.startswith("other (running)  40 ") for line in told)


# --- python -m tools.report ---------------------------------------------------------------------------------
