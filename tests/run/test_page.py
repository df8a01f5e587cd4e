"""report.html: what is kept of a long log, what is embedded and how, what a run notes, and what a comparison computes."""

import json
import math
import os
import random
import re
import signal

from common.args import CommonArgs
from common.run.curves import draw_curves, frame_of, frames_of, is_logarithmic
from common.run.folder import lock as take_lock
from common.run.metrics import Metrics, _main
from common.run.report import Report, embedded, page, write_report
from common.run.report.compare import mcnemar, two_proportions
from common.run.report.describe import command_of, defaults_of, describe_run
from common.run.report.read import Folder, Lines
from common.run.report.thin import Curve, Spread
from tests.conftest import ROOT, SFT, events_of, read_metrics

import numpy as np
import pytest
from accelerate import Accelerator

EVIL = (
    '</script><script>document.title="owned"</script><img src=x onerror="document.title=1"><!-- \u2028 \ud800 {{x}} @@data@@'
)


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def data_of(text):
    """The JSON of a page."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])


def a_run(folder, *, steps=40, name="run", evil="", better=0):
    """An output folder as a run leaves it; `evil` stands wherever text comes from the outside."""
    folder.mkdir(exist_ok=True)
    metrics = [{"step": 0, "eval_right": 0.0, "seconds": 0.1}, {"step": 0, "eval_loss": 5.0, "seconds": 0.1}]
    for step in range(1, steps + 1):
        metrics.append(
            {"step": step, "loss": 4 / step, f"odd{evil}": step % 3, "num_tokens": 100 * step, "seconds": 2.0 * step}
        )
    metrics.append({"step": steps, "eval_loss": 0.5, "eval_right": 0.5, "seconds": 2.0 * steps})
    write_lines(folder / "metrics.jsonl", metrics)
    samples = []
    for step in (0, steps):
        for i in range(20):
            right = float(step > 0 and i < 8 + better)
            text = f"answer {i} at {step if i % 2 else 0}{evil}"
            samples.append(
                {"step": step, "temperature": 0.0, "prompt": f"question {i}{evil}", "completion": text, "right": right}
            )
    write_lines(folder / "samples.jsonl", samples)
    events = [{"step": 0, "time": 1e9, "kind": "started", "text": f"from the beginning{evil}", "script": "train_sft.py"}]
    events += [{"step": steps // 2, "time": 1e9 + 60, "kind": "spike", "text": f"the loss jumps{evil}"}]
    write_lines(folder / "events.jsonl", [*events, {"step": steps, "time": 1e9 + 99, "kind": "finished", "text": ""}])
    (folder / "args.yaml").write_text(f"run_name: {json.dumps(name + evil)}\nlearning_rate: {0.1 + better}\nseed: 0\n")
    source = {
        "source": f"chats{evil}",
        "path": evil,
        "format": "messages",
        "rows": 3,
        "examples": 2,
        "tokens": 9,
        "share": 1.0,
    }
    source["dropped"] = {f"empty{evil}": {"count": 1, "first": [f"x:1{evil}"]}}
    facts = {"sources": [source], "example": "chat", "marked": [{"side": "", "parts": [[f"a{evil}", False], ["b", True]]}]}
    (folder / "dataset.json").write_text(json.dumps(facts))
    return folder


# --- thinning -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [3, 8, 9, 100, 1000])
def test_a_curve_keeps_the_least_and_the_greatest_of_each_bucket_and_the_mean_of_all(length):
    values = np.random.default_rng(length).normal(size=length)
    curve = Curve(8)
    for step, value in enumerate(values, 1):
        curve.add(step, float(value))
    table = curve.table()
    assert len(table["y"]) <= 8 and ("low" in table) == (length > 8)
    assert [bucket[3] for bucket in curve.buckets[:-1]] == [curve.size] * (len(curve.buckets) - 1)
    at = 0
    for first, last, total, count, least, greatest in curve.buckets:  # against numpy, stretch by stretch
        part = values[at : at + count]
        assert (first, last) == (at + 1, at + count) and (least, greatest) == (part.min(), part.max())
        assert total / count == pytest.approx(part.mean(), rel=1e-9, abs=1e-12)
        at += count
    assert at == length and curve.range() == (values.min(), values.max())


def test_what_is_no_finite_number_is_counted_and_bends_no_curve():
    curve = Curve(4)
    for step, value in enumerate([1.0, None, math.nan, 2.0, math.inf]):
        curve.add(step, value)
    assert curve.table() == {"x": [0, 3], "y": [1, 2], "missing": 3} and math.isnan(Curve(4).range()[0])


@pytest.mark.parametrize("count", [0, 1, 4, 5, 17, 100])
def test_a_spread_keeps_the_first_and_the_last_and_evenly_what_is_between(count):
    spread = Spread(4)
    for item in range(count):
        spread.add(item)
    items = spread.items()
    assert len(items) <= 5 and items[:1] == [0][:count] and items[-1:] == [count - 1][: len(items)]
    assert len(set(np.diff(items[:-1]))) <= 1


def test_a_log_of_100000_steps_gives_a_page_below_2_mb_with_its_peak(tmp_path):
    draw, file = random.Random(0), tmp_path / "metrics.jsonl"
    names = [f"metric_{k}" for k in range(25)]
    with file.open("w") as out:
        for step in range(20, 100_001, 20):  # as with logging_steps 20; the page does not grow with the lines
            row = {name: round(draw.random(), 6) for name in names} | {"loss": 1000.0 if step == 31_240 else 1.0 / step}
            out.write(json.dumps({"step": step, **row, "num_tokens": step * 10}) + "\n")
    folder = Folder(tmp_path)
    run = describe_run(folder)
    assert len(page([run]).encode()) < 2_000_000
    loss = next(curve for curve in run["curves"] if curve["name"] == "loss")
    assert max(loss["high"]) == 1000 and 400 <= len(loss["y"]) <= 800
    at = loss["high"].index(1000)
    assert abs(run["x"][loss["x"]][at] - 31_240) <= 20 * loss["size"]
    assert run["axis"]["step"][-1] == 100_000 and run["axis"]["tokens"][-1] == 1_000_000
    with file.open("a") as out:
        out.write('{"step": 100010, "loss": 2000.0}\n{"step": 100020, "lo')
    assert max(next(c for c in describe_run(folder)["curves"] if c["name"] == "loss")["high"]) == 2000, (
        "only new lines are read"
    )


@pytest.mark.slow
def test_many_metrics_and_heavy_characters_give_a_page_below_2_mb_with_every_peak(tmp_path):
    """Every curve is as fine as all of them allow; a text costs what it takes in the page."""
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in range(1, 1001):
            row = {f"metric_{k}": math.sin(step * k) * 1.2345678e-5 for k in range(1, 100)} | {"peak": float(step == 777)}
            file.write(json.dumps({"step": step} | row) + "\n")
    text = "<\0😀" * 1000
    rows = [
        {"step": s, "prompt": f"{i}{text}", "completion": f"{s} {i}{text}", "temperature": 0.0}
        for s in range(4)
        for i in range(99)
    ]
    write_lines(tmp_path / "samples.jsonl", rows)
    write_lines(tmp_path / "completions.jsonl", [row | {"prompt": row["prompt"][:1] + text, "reward": 1.0} for row in rows])
    write_report([tmp_path], tmp_path / "report.html")
    shown = data_of((tmp_path / "report.html").read_text())["runs"][0]
    assert (tmp_path / "report.html").stat().st_size < 2_000_000
    peak = next(curve for curve in shown["curves"] if curve["name"] == "peak")
    assert len(shown["curves"]) == 100 and max(peak["high"]) == 1 and len(peak["y"]) == 250
    assert shown["x"][0][peak["y"].index(max(peak["y"]))] == pytest.approx(777, abs=20) and peak["size"] == 4
    assert shown["samples"]["prompts"] and shown["completions"][-1]["step"] == 3


@pytest.mark.parametrize("length, most", [(9, 4), (64, 10), (801, 800), (1000, 7)])
def test_a_table_of_fewer_points_keeps_all_values_in_their_ranges(length, most):
    values = np.random.default_rng(length).normal(size=length)
    curve = Curve(2000)
    for step, value in enumerate(values):
        curve.add(step, value)
    table = curve.table(most)
    assert most / 2 <= len(table["y"]) <= most and 3 * len(table["y"]) == curve.numbers(most)
    bounds = range(0, length, table["size"])
    assert len(bounds) == len(table["y"])
    for k, start in enumerate(bounds):
        part = values[start : start + table["size"]]
        expected = (part.mean(), part.min(), part.max())
        assert (table["y"][k], table["low"][k], table["high"][k]) == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert len(curve.table()["y"]) == len(curve.buckets) > most, "the curve itself is as it was"


def test_lines_that_are_damaged_or_not_whole_are_passed_over(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_bytes(b'{"step": 1}\n{"ste\n[1]\n{"step": "x"}\n{"step": true}\n\xff\n{"step": 2}\n{"step": 3}')
    lines = Lines(file)
    assert [row["step"] for row in lines] == [1, 2]
    with file.open("a") as out:
        out.write("\n")
    assert [row["step"] for row in lines] == [3] and list(Lines(tmp_path / "none")) == []


# --- what a page holds ----------------------------------------------------------------------------------------------


def test_a_page_holds_the_run_and_nothing_of_it_can_end_the_element_it_stands_in(tmp_path):
    text = page([describe_run(Folder(a_run(tmp_path / "run", evil=EVIL)))])
    shown = data_of(text)["runs"][0]
    before, after = text.split('id="data">')[0], text.split('id="data">')[1].split("</script>", 1)[1]
    assert "owned" not in before + after and text.count("</script>") == 2 and "<" not in embedded(shown)
    assert shown["name"] == "run" + EVIL and shown["samples"]["prompts"][0]["texts"][0].endswith(EVIL)
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//|@import|url\(|fetch\(|XMLHttp""", text), "nothing is loaded"
    assert shown["before"] == {"eval_right": 0, "eval_loss": 5} and shown["after"] == {"eval_loss": 0.5, "eval_right": 0.5}
    assert shown["state"] == "finished" and shown["script"] == "train_sft.py"
    assert [event["kind"] for event in shown["events"]] == ["started", "spike", "finished"]


def test_a_text_that_stayed_the_same_stands_there_once(tmp_path):
    samples = describe_run(Folder(a_run(tmp_path / "run")))["samples"]
    assert samples["steps"] == [0, 40] and samples["of"] == len(samples["prompts"]) == 20
    assert samples["prompts"][0]["texts"] == ["answer 0 at 0", 0]
    assert samples["prompts"][1]["texts"] == ["answer 1 at 0", "answer 1 at 40"]
    assert samples["prompts"][1]["scores"] == {"right": [0, 1]}


def test_counts_that_are_none_are_left_out_of_a_comparison(tmp_path):
    good = {"passed": 1, "total": 2}
    for name, bad in (("one", {"passed": 5, "total": 2}), ("two", {"passed": 10**400, "total": 10**401})):
        worse = {"passed": -1, "total": -2}
        write_lines(
            a_run(tmp_path / name) / "regression.jsonl", [{"step": 1, "groups": {"good": good, "bad": bad, "worse": worse}}]
        )
    write_report([tmp_path / "one", tmp_path / "two"], tmp_path / "both.html")
    compared = data_of((tmp_path / "both.html").read_text())["compared"]
    assert [rate["name"] for rate in compared["rates"] if rate["name"].startswith("suite")] == ["suite: good"]


def test_a_run_that_was_killed_is_not_said_to_go_on(tmp_path):
    """While it lives its lock is held; after kill -9 nobody holds it, and nothing has been written of its end."""
    folder = a_run(tmp_path / "run")
    events = (folder / "events.jsonl").read_text().splitlines()
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in events if "finished" not in line))

    def state():
        write_report([folder], folder / "report.html")
        return data_of((folder / "report.html").read_text())["runs"][0]["state"]

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


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "\x00", "a: &a [*a]", '{"runs": NaN}'])
def test_files_of_any_content_make_a_page(text, tmp_path):
    for name in (
        "args.yaml",
        "dataset.json",
        "summary.json",
        "inputs.json",
        "metrics.jsonl",
        "samples.jsonl",
        "regression.jsonl",
    ):
        (tmp_path / name).write_text(text)
    write_report([tmp_path], tmp_path / "report.html")
    assert data_of((tmp_path / "report.html").read_text())["runs"][0]["curves"] == []


def test_what_cannot_be_written_costs_one_line_and_not_the_run(tmp_path, capsys):
    (tmp_path / "report.html").mkdir()
    metrics = Metrics(Accelerator(cpu=True), CommonArgs(output_dir=str(tmp_path)))
    metrics.report = Report(tmp_path)
    for step in (1, 2):
        metrics.log_eval(step, {"eval_loss": 1.0}, [], show=0)
    metrics.finish()
    assert (tmp_path / "summary.json").exists() and capsys.readouterr().err.count("report.html was not written") == 1


def test_between_evaluations_a_page_is_written_seldom_and_takes_a_small_share_of_the_time(tmp_path, monkeypatch):
    clock, written = [100.0], []
    monkeypatch.setattr("common.run.report.time.monotonic", lambda: clock[0])

    def write(path, text):
        written.append(clock[0])
        clock[0] += 2.0  # a slow disk

    monkeypatch.setattr("common.run.report.write_page", write)
    report = Report(tmp_path)
    for _ in range(1000):
        clock[0] += 1.0
        report.write_if_due()
    assert len(written) == 10 and written[0] == 120.0  # then every 100 s and what it took: 2 % of the time


def test_a_run_notes_what_happened_and_a_resumed_one_goes_on_with_it(launch, tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1?", "answer": "2"}\n')
    words = [*SFT, "--eval_prompts", tmp_path / "prompts.jsonl", "--eval_max_new_tokens", "2", "--eval_steps", "2"]
    words += ["--save_best", "eval_loss", "--save_steps", "2", "--max_train_samples", "40", "--logging_steps", "1"]
    launch("sft", *words, "--max_steps", "2")
    output = launch("sft", *words, "--max_steps", "4")
    events = [json.loads(line) for line in (output / "events.jsonl").read_text().splitlines()]
    kinds = [(event["kind"], event["step"]) for event in events if event["kind"] != "best"]
    assert kinds == [("started", 0), ("saved", 2), ("finished", 2), ("resumed", 2), ("saved", 4), ("finished", 4)]
    run = data_of((output / "report.html").read_text())["runs"][0]
    assert (
        run["state"] == "finished"
        and run["step"] == run["steps"] == 4
        and len((output / "report.html").read_bytes()) < 500_000
    )
    assert run["data"]["marked"][0]["parts"] and any(trained for _, trained in run["data"]["marked"][0]["parts"])
    assert run["frames"][0]["name"] == "loss" and run["frames"][1]["name"] == "mean_token_accuracy"
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert all(a["seconds"] <= b["seconds"] for a, b in zip(rows[:-1], rows[1:], strict=True)), "over both stretches"
    changed = {name for group in run["settings"] for name, _, unchanged in group["rows"] if not unchanged}
    assert {"max_steps", "save_best"} <= changed and not {"seed", "weight_decay", "train_on"} & changed
    assert run["command"].startswith("accelerate launch train_sft.py --config ")
    assert not {"eval_loss"} - read_metrics(output)[0].keys()


def test_the_settings_that_are_secret_are_on_no_page(tmp_path):
    a_run(tmp_path / "run")
    with (tmp_path / "run" / "args.yaml").open("a") as out:
        out.write("alert_webhook: https://hooks.example/SECRET\nhub_token: SECRET\n")
    assert "SECRET" not in page([describe_run(Folder(tmp_path / "run"))])


def test_defaults_are_read_from_a_script_that_is_not_executed(tmp_path):
    script = tmp_path / "train_mine.py"
    script.write_text(
        "raise SystemExit(3)\nclass Args:\n    a: float = arg(0.5, help='x')\n    b: int = arg(default=3)\n    c: str = f()\n"
    )
    assert {"a": 0.5, "b": 3, "c": None, "seed": 0}.items() <= defaults_of(script).items()
    found = defaults_of(ROOT / "train_grpo.py")
    assert found["num_generations"] == 8 and found["reward_funcs"] == ["exact_number"] and found["learning_rate"] == 1e-6


def test_the_command_that_repeats_a_run_says_how_it_was_launched(tmp_path):
    begun = {"processes": 2, "mixed_precision": "bf16"}
    words = command_of("experiments/train_kto.py", tmp_path, begun, {})
    start = "accelerate launch --num_processes 2 --mixed_precision bf16 -m experiments.train_kto --config"
    assert words == f"{start} {tmp_path}/args.yaml --output_dir {tmp_path}-again"


# --- frames ---------------------------------------------------------------------------------------------------------


def test_what_matters_most_comes_first():
    grpo = ["loss", "entropy", "grad_norm", "reward", "rewards/exact/mean", "rewards/exact/std", "memory_gib", "eval_reward"]
    assert [*frames_of([*grpo, "eval_exact", "step", "seconds"])][:2] == ["reward", "exact"]
    assert frames_of([*grpo, "eval_exact"])["exact"] == ["rewards/exact/mean", "eval_exact"]
    assert [*frames_of(grpo)][-1] == "memory_gib"
    dpo = ["logps/chosen", "loss", "rewards/accuracies", "rewards/margins", "eval_polite", "eval_polite_t0.7"]
    assert [*frames_of(dpo)][:4] == ["rewards/margins", "rewards/accuracies", "loss", "polite"]
    sft = ["entropy", "mean_token_accuracy", "eval_loss", "loss", "eval_exact", "learning_rate"]
    assert [*frames_of(sft)] == ["loss", "mean_token_accuracy", "exact", "entropy", "learning_rate"]
    assert frame_of("eval_exact_t0.7") == "exact" and frame_of("peak_memory_gib") == "memory_gib"
    assert is_logarithmic("loss", 0.1, 5) and not is_logarithmic("loss", -1, 5) and not is_logarithmic("exact", 0.1, 5)


def test_the_picture_has_a_name_axes_points_for_few_evaluations_and_nothing_that_never_changed(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *words, **options: drawn.append(figure))
    rows = [{"step": 0, "eval_reward": 0.1}, {"step": 40, "eval_reward": 0.9}]
    rows += [{"step": s, "loss": 0.01 * (-1) ** s, "reward": s / 40, "clip": 0.0} for s in range(1, 41)]
    write_lines(tmp_path / "metrics.jsonl", rows)
    draw_curves(tmp_path, "my $run\x1b")
    assert drawn[0].get_suptitle() == r"my \$run\x1b"
    axes = [axis for axis in drawn[0].axes if axis.get_title()]
    assert [axis.get_title() for axis in axes] == ["reward", "loss"] and {axis.get_xlabel() for axis in axes} == {"step"}
    styles = {line.get_label(): (line.get_linestyle(), line.get_marker()) for line in axes[0].get_lines()}
    assert styles == {"reward": ("-", "None"), "eval_reward": ("None", "o")}


def test_the_bar_shows_what_matters():
    assert _main({"loss": 0.5, "tokens_per_second": 1.0}) == "loss 0.5000"
    assert _main({"loss": 0.5, "rewards/margins": 2.0}) == "margin 2.0000"
    assert _main({"loss": 0.001, "reward": 0.25}) == "reward 0.2500"


def test_a_loss_that_jumps_is_noted(tmp_path):
    metrics = Metrics(Accelerator(cpu=True), CommonArgs(output_dir=str(tmp_path)))
    for step in range(1, 30):
        metrics.add(loss=9.0 if step == 25 else 1.0 + step % 3 / 10)
        metrics.close_window()
        metrics.log(step)
    assert [event["step"] for event in events_of(tmp_path, "spike")] == [25]


# --- comparing ------------------------------------------------------------------------------------------------------


def test_the_tests_of_a_difference_agree_with_hand_worked_numbers():
    assert two_proportions({"passed": 45, "of": 100}, {"passed": 60, "of": 100}) == pytest.approx(0.03367, abs=1e-5)
    assert two_proportions({"passed": 0, "of": 9}, {"passed": 0, "of": 7}) == 1.0
    assert two_proportions({"passed": 0, "of": 0}, {"passed": 1, "of": 7}) is None
    assert mcnemar(8, 1) == pytest.approx(2 * (1 + 9) / 2**9) and mcnemar(0, 0) == mcnemar(3, 3) == 1.0
    assert mcnemar(500, 499) == 1.0 and mcnemar(700, 400) == pytest.approx(1.0e-19, rel=0.3)


def test_runs_are_compared_by_settings_and_by_the_prompts_that_both_were_given(tmp_path):
    one, two = a_run(tmp_path / "one", name="one"), a_run(tmp_path / "two", name="two", better=6)
    write_report([one, two], tmp_path / "both.html")
    compared = data_of((tmp_path / "both.html").read_text())["compared"]
    assert compared["settings"] == [["learning_rate", ["0.1", "6.1"]]]
    (rate,) = compared["rates"]
    assert rate["name"] == "right" and [row["passed"] for row in rate["runs"]] == [8, 14]
    assert rate["runs"][1]["test"].startswith("McNemar") and rate["runs"][1]["p"] == pytest.approx(2 / 2**6)
    assert (rate["runs"][1]["gained"], rate["runs"][1]["lost"]) == (6, 0)


def test_suites_of_two_runs_are_compared_case_by_case(tmp_path):
    """7 of 9 that failed pass now, none fell: McNemar's exact p is 2 / 2^7. A case that was edited is not the same."""
    for name, right in (("one", 1), ("two", 8)):
        cases = {
            f"c{i}": {"rate": float(i < right), "digest": "x" if i else name, "group": "easy" if i else "edited"}
            for i in range(10)
        }
        cases["c9"]["group"] = "hard"
        groups = {
            group: {"passed": sum(c["rate"] for c in own), "total": len(own)}
            for group in ("easy", "hard", "edited")
            if (own := [case for case in cases.values() if case["group"] == group])
        }
        write_lines(a_run(tmp_path / name) / "regression.jsonl", [{"step": 1, "groups": groups, "cases": cases}])
    write_report([tmp_path / "one", tmp_path / "two"], tmp_path / "both.html")
    rates = data_of((tmp_path / "both.html").read_text())["compared"]["rates"]
    second = {rate["name"]: rate["runs"][1] for rate in rates}
    assert second["suite: easy"]["test"] == "McNemar, exact" and second["suite: easy"]["p"] == 2 / 2**7
    assert second["suite: hard"]["p"] == 1 and second["suite: edited"]["test"] == "two proportions"


def test_a_suite_that_was_tested_is_shown_and_compared(tmp_path):
    rows = [{"step": 0, "groups": {"sums": {"passed": 4, "total": 10}}, "turned": []}]
    rows += [{"step": 40, "groups": {"sums": {"passed": 9, "total": 10}, "odd": 3}}]
    rows[1] |= {"turned": {"since_last": {"step": 0, "fell": [], "rose": ["a", "b"]}, "since_base": None}}
    rows[1] |= {"failed": {"c": {"why": "not equal", "completion": "7"}}}
    runs = [a_run(tmp_path / name) for name in ("one", "two")]
    write_lines(runs[0] / "regression.jsonl", rows)
    write_lines(runs[1] / "regression.jsonl", rows[:1])
    write_report(runs, tmp_path / "both.html")
    shown = data_of((tmp_path / "both.html").read_text())
    assert shown["runs"][0]["regression"][-1] == {
        "step": 40,
        "groups": {"sums": {"passed": 9, "total": 10}},
        "turned": ["rose since step 0: a, b"],
        "failed": ["c: not equal · 7"],
    }
    suite = next(rate for rate in shown["compared"]["rates"] if rate["name"] == "suite: sums")
    assert suite["runs"][1]["test"] == "two proportions" and 0.01 < suite["runs"][1]["p"] < 0.05
