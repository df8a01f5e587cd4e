"""tools.trial: its statistics against textbooks, scipy and simulated trials, and what it does with runs, most
of which a tiny script pretends."""

import itertools
import json
import math
import os
from pathlib import Path
import signal
import subprocess
import sys
import time

from common.errors import UserError
import numpy as np
import pytest

from benchmarks.trials import simulate
from tests.conftest import ROOT, read_rows
from tests.run.parts.test_browser import CHROMIUM, drawn
from tools import trial, trial_page, trial_verdict
from tools.trial_statistics import (
    holm,
    interval,
    over_prompts,
    over_seeds,
    over_seeds_and_prompts,
    p_value,
    seeds_needed,
    sign_p_value,
    t_quantile,
    t_tails,
)
from tools.trial_verdict import TrialRun

# --- Student's t --------------------------------------------------------------------------------------------


def test_t_where_it_has_a_closed_form():
    for t in (0.0, 0.1, 1.0, 3.0, 40.0, 1e4):
        assert t_tails(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(t), rel=1e-9, abs=1e-12)
        assert t_tails(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-6, abs=1e-12)


def test_t_of_the_tables():
    for tails, df, t in (
        (0.05, 1, 12.706),
        (0.05, 2, 4.303),
        (0.05, 9, 2.262),
        (0.01, 4, 4.604),
        (0.4, 9, 0.883),
    ):
        assert t_quantile(tails, df) == pytest.approx(t, abs=5e-4)


def test_t_is_that_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    for df, t in itertools.product((1, 2, 3.7, 9, 199, 1e4), (0.0, 1e-3, 0.5, 2.0, 12.7, 50.0)):
        assert t_tails(t, df) == pytest.approx(2 * stats.t.sf(t, df), rel=1e-7, abs=1e-300)
        if t and stats.t.sf(t, df) > 1e-100:
            assert t_quantile(2 * stats.t.sf(t, df), df) == pytest.approx(t, rel=1e-6)
    random = np.random.default_rng(0)
    pairs = random.normal(size=(2, 7))
    expected = stats.ttest_rel(pairs[1], pairs[0])
    estimate = over_seeds(pairs[1] - pairs[0])
    assert p_value(estimate) == pytest.approx(expected.pvalue, rel=1e-9)
    assert interval(estimate) == pytest.approx(tuple(expected.confidence_interval()), rel=1e-9)
    assert sign_p_value(8, 1) == pytest.approx(stats.binomtest(8, 9).pvalue)


# --- estimates ----------------------------------------------------------------------------------------------


def test_a_difference_of_three_seeds_by_hand():
    estimate = over_seeds(np.array([1.0, 2.0, 3.0]))  # mean 2, deviation 1
    assert estimate.mean == 2 and estimate.error == pytest.approx(1 / math.sqrt(3)) and estimate.df == 2
    assert p_value(estimate) == pytest.approx(1 - math.sqrt(12) / math.sqrt(2 + 12))
    assert interval(estimate) == pytest.approx(
        (2 - 4.30265 / math.sqrt(3), 2 + 4.30265 / math.sqrt(3)), rel=1e-5
    )
    assert p_value(over_seeds(np.array([0.5, 0.5, 0.5]))) is None  # no spread to measure it by
    rounded = np.array([0.2, 0.3, 0.4]) - np.array([0.1, 0.2, 0.3])  # not quite equal
    assert rounded.std() > 0 and p_value(over_seeds(rounded)) is None


def test_seeds_and_prompts_by_hand():
    """2 prompts, 3 seeds, no rest: the mean squares are 2 of the seeds and 6 of the prompts, so that the variance is 1
    between seeds and 2 between prompts."""
    estimate = over_seeds_and_prompts(np.array([[2.0, 0.0], [3.0, 1.0], [4.0, 2.0]]))
    assert estimate.mean == 2 and estimate.error == pytest.approx(math.sqrt(1 / 3 + 2 / 2))
    assert estimate.df == pytest.approx((2 + 6) ** 2 / (2**2 / 2 + 6**2 / 1))
    assert (estimate.of_seeds, estimate.of_prompts) == pytest.approx((1.0, 1.0))


def test_scores_that_only_seeds_move_are_judged_by_seeds():
    """If all prompts of a seed move alike, 200 prompts are no more than one."""
    moved = np.repeat([[0.1], [0.3], [0.2], [0.25]], 200, axis=1)
    both, seeds = over_seeds_and_prompts(moved), over_seeds(moved[:, 0])
    assert both.error == pytest.approx(seeds.error) and both.df == pytest.approx(seeds.df)
    assert seeds_needed(both) == seeds_needed(seeds)


def test_one_seed_is_judged_by_prompts():
    estimate = over_prompts(np.array([1.0] * 8 + [-1.0] + [0.0] * 11))
    assert estimate.mean == pytest.approx(7 / 20) and estimate.seeds == 1 and seeds_needed(estimate) is None
    assert sign_p_value(8, 1) == pytest.approx(2 * (9 + 1) / 2**9) and sign_p_value(0, 0) == 1


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_the_seeds_that_a_difference_needs():
    """A difference of one standard deviation takes 10 pairs for 80 % (Cohen 1988, table 2.4.1); more where it
    is one of several that are tested."""
    spread = np.array([0.0, 2.0]) * math.sqrt(0.5)  # of deviation 1
    estimate = over_seeds(spread - spread.mean() + 1)
    assert seeds_needed(estimate) == 10
    rows = [{"p": 0.5, "estimate": estimate, "difference": 1.0, "sign": 1} for _ in range(3)]
    trial_verdict.judge(rows, 0.05)
    assert {row["needs"] for row in rows} == {seeds_needed(estimate, 0.05 / 3)} != {10}
    assert seeds_needed(over_seeds(spread - spread.mean() + 1e-6)) is None
    of_prompts = np.array([[1.0, -1.0, 0.5]] * 2) + np.array([[0.01], [-0.01]])
    assert seeds_needed(over_seeds_and_prompts(of_prompts)) is None


# --- how often it errs, and what it finds -------------------------------------------------------------------


def share_called_better(random, trials, seeds, **how):
    better = 0
    for _ in range(trials):
        estimate = over_seeds_and_prompts(simulate(random, seeds, **how))
        p = p_value(estimate)
        better += p is not None and p < 0.05 and estimate.mean > 0
    return better / trials


@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
@pytest.mark.parametrize("rate, spread", [(0.55, 0.0), (0.55, 0.04), (0.55, 0.15), (0.97, 0.01)])
def test_better_is_not_said_of_nothing(seeds, rate, spread):
    assert share_called_better(np.random.default_rng(seeds), 500, seeds, rate=rate, spread=spread) <= 0.05


def test_what_it_finds():
    """The README's edit, 40 points, with three seeds; 15 with five, 10 with ten."""
    random = np.random.default_rng(0)
    for seeds, effect in ((3, 0.4), (5, 0.15), (10, 0.1)):
        assert share_called_better(random, 200, seeds, effect=effect) >= 0.8


def test_better_is_not_said_of_any_metric_of_any_side():
    """Three copies that change nothing, with a score, four losses and a speed: no word `better` in 95 % of the trials."""
    random = np.random.default_rng(1)
    names = ["eval_loss", "eval_a_loss", "eval_b_loss", "eval_c_loss", "tokens_per_second"]
    wrong = 0
    for _ in range(300):
        sides = []
        for _ in range(4):
            runs = []
            for _ in range(3):
                solved = {k: float(random.random() < 0.5) for k in range(30)}
                values = {"eval_right": float(np.mean(list(solved.values())))}
                values |= {name: float(random.normal(5, 1)) for name in names}
                runs.append(TrialRun(Path("run"), values, {"eval_right": solved}, [], {}, {}, {}))
            sides.append(runs)
        copies = dict(zip("abc", sides[1:], strict=True))
        table = trial_verdict.verdicts(sides[0], copies, "eval_right", 1, 0.05)
        wrong += any(row["word"] == "better" for rows in table.values() for row in rows)
    assert wrong <= 0.05 * 300
    # The verdicts themselves are corrected for the number of sides alone.
    bare = []
    for runs in sides:
        bare.append([run._replace(values={"eval_right": run.values["eval_right"]}) for run in runs])
    alone = trial_verdict.verdicts(bare[0], dict(zip("abc", bare[1:], strict=True)), "eval_right", 1, 0.05)
    assert [rows[0] for rows in alone.values()] == [rows[0] for rows in table.values()]


# --- runs that a tiny script pretends -----------------------------------------------------------------------

FAKE = """
import argparse, ast, json, pathlib, sys, time
parser = argparse.ArgumentParser()
for name in ("seed", "max_steps", "eval_steps", "save_steps", "logging_steps"):
    parser.add_argument("--" + name, type=int, default=10)
for name in ("output_dir", "effect", "prompts", "data", "fail", "tokens", "wait", "evals", "values", "settings", "inputs"):
    parser.add_argument("--" + name, default="")
args = parser.parse_args()
folder = pathlib.Path(args.output_dir)
folder.mkdir(parents=True, exist_ok=True)
with open(folder.parent.parent / "started", "a") as file:
    file.write(f"{folder}\\n")
time.sleep(float(args.wait or 0))
EDIT = 0.0
effect = float(args.effect or 0) + EDIT
metrics = [{"step": step, "loss": 1 / step, "num_tokens": int(args.tokens or 100) * step, "seconds": 2.0 * step,
            "cpu_seconds": 3.0 * step, "tokens_per_second": 50.0, "peak_memory_gib": 1.0}
           for step in range(1, args.max_steps + 1)]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in metrics))
if args.fail and args.seed == int(args.fail):
    print("working")
    sys.exit("error: no rows in chats.jsonl")
samples = []
for k in range(100):
    right = float((k * 37 + args.seed * 11) % 100 < 100 * (0.4 + effect))
    samples.append({"step": args.max_steps, "temperature": 0.0, "prompt": f"question {k}{args.prompts}".replace("SEED", str(args.seed)),
                    "completion": f"answer {right} <u>", "right": right})
if args.evals != "none":
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in samples))
right = sum(row["right"] for row in samples) / 100
final = {} if args.evals == "none" else {"eval_right": right, "eval_entropy": 1.0, "eval_loss": 1 - effect + args.seed / 100}
final |= json.loads(args.values or "{}")
(folder / "summary.json").write_text(json.dumps({"final": {"step": args.max_steps, **final}}))
settings = {"seed": args.seed, "output_dir": str(folder), "lr": 0.1} | json.loads(args.settings or "{}")
(folder / "args.yaml").write_text(json.dumps(settings))
script = pathlib.Path(sys.argv[0])
(folder / script.name).write_text(script.read_text())
inputs = {"the script": ast.dump(ast.parse(script.read_text()))} | json.loads(args.inputs or "{}")
(folder / "inputs.json").write_text(json.dumps(inputs))
(folder / "dataset.json").write_text(json.dumps({"sources": [{"path": f"chats{args.data}.jsonl", "rows": 7}]}))
event = {"step": 0, "time": 1.0, "kind": "started", "text": "", "script": str(script)}
(folder / "events.jsonl").write_text(json.dumps(event) + "\\n")
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """fake(*words): a trial of train_fake.py and copies of it in an empty folder; its exit code, and trial.json."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trial, "POLL", 0.01)
    Path("train_fake.py").write_text(FAKE)
    Path("train_mine.py").write_text(FAKE.replace("EDIT = 0.0", "EDIT = 0.3"))

    def run(*words):
        code = trial.main([*words])
        return code, json.loads(Path("outputs/trial/trial.json").read_text())

    return run


def started():
    return Path("outputs/trial/started").read_text().splitlines()


def test_better_worse_and_not_told_apart(fake, capsys):
    code, found = fake("train_fake.py", "train_mine.py")
    [side] = found["sides"]
    row = side["metrics"][0]
    assert (code, side["verdict"], found["metric"], row["prompts"]) == (0, "better", "eval_right", 100)
    assert row["difference"] == pytest.approx(0.3) and row["interval"][0] > 0 and row["p"] < 0.05
    words = {row["metric"]: row["word"] for row in side["metrics"]}
    assert words["tokens_per_second"] == "not told apart" and "num_tokens" not in words
    said = capsys.readouterr().out
    assert "fake, seed0 (1 of 6)\nmine, seed0 (2 of 6)\n" in said and "\nmine: better\n" in said
    assert "\neval_right, higher is better, against fake: 3 seeds, 100 prompts\n" in said
    assert said.endswith("\noutputs/trial/trial.html: open it in a browser\n")
    page = Path("outputs/trial/trial.html")
    assert "mine against fake: better" in page.read_text()
    assert page.with_name("mine").joinpath("seed0.log").exists()
    assert fake("train_mine.py", "train_fake.py")[0] == 4
    code, found = fake("train_fake.py", "train_fake.py --effect 0.001")
    assert (code, found["sides"][0]["verdict"]) == (3, "not told apart")
    assert len(started()) == 9  # of each side once


def test_the_best_of_several_sides_counts(fake, capsys):
    words = [f"train_fake.py --effect {effect}" for effect in (-0.3, 0.001, 0.35)]
    code, found = fake("train_fake.py", *words, "--", "--effect", "0")  # a side's own words count
    assert code == 0
    assert [side["verdict"] for side in found["sides"]] == ["worse", "not told apart", "better"]
    assert "p corrected for 3 sides" in capsys.readouterr().out
    told = "3 sides against fake: 1 worse, 1 not told apart, 1 better"
    assert told in Path("outputs/trial/trial.html").read_text()


def test_an_edit_that_does_nothing_is_said(fake, capsys):
    assert fake("train_fake.py", "train_fake.py --wait 0")[0] == 3
    assert "every evaluation is the same" in capsys.readouterr().out


def test_all_wrong_against_all_right(fake):
    code, found = fake("train_fake.py --effect -1", "train_fake.py --effect 1")
    row = found["sides"][0]["metrics"][0]
    assert (code, row["difference"], row["interval"]) == (0, 1, [1, 1])


def test_a_side_without_the_metric_stops_no_other(fake):
    """A loss that is not finite is null in a run's summary; a script of one's own may write NaN."""
    sides = [f"train_fake.py --values '{{\"eval_loss\": {value}}}'" for value in ("null", "NaN")]
    code, found = fake(
        "train_fake.py", *sides, "train_mine.py --effect 0.01", "--metric", "loss", "--seeds", "0", "1"
    )
    *failed, mine = found["sides"]
    assert all("not every run has a finite eval_loss" in side["failed"] for side in failed)
    assert code == 3 and "spread" in trial_page.because(mine)


def test_one_seed_is_never_better(fake, capsys):
    code, found = fake("train_fake.py", "train_mine.py", "--seeds", "5")
    assert code == 3 and found["sides"][0]["metrics"][0]["p"] < 1e-6
    assert "one seed, which says nothing about seeds" in capsys.readouterr().out


def test_other_metrics(fake):
    assert fake("train_fake.py", "train_mine.py", "--metric", "loss")[1]["metric"] == "eval_loss"
    code, found = fake("train_fake.py", "train_mine.py", "--metric", "max:eval_loss")
    assert (found["higher_is_better"], found["sides"][0]["metrics"][0]["difference"]) == (
        True,
        pytest.approx(-0.3),
    )


def test_again_gives_the_noise(fake, capsys):
    code, found = fake("train_fake.py", "--again")
    assert code == 3 and [Path(path).name for path in started()] == [f"seed{k}" for k in (0, 3, 1, 4, 2, 5)]
    assert "fake again, seed3 (2 of 6)\n" in capsys.readouterr().out
    noise = {row["metric"]: row for row in found["noise"]}["eval_loss"]
    spread = np.std([0.0, 0.01, 0.02, 0.03, 0.04, 0.05], ddof=1)
    assert noise["spread"] == pytest.approx(spread) and noise["mean"] == pytest.approx(1.025)
    assert noise["of_runs"] == pytest.approx(
        2.5706 * spread * math.sqrt(2), rel=1e-4
    )  # t of 5 degrees of freedom
    assert noise["of_means"] == pytest.approx(noise["of_runs"] / math.sqrt(3))


def test_complete_runs_are_taken_and_more_seeds_added(fake):
    fake("train_fake.py", "train_mine.py", "--seeds", "0", "1")
    fake("train_fake.py", "train_mine.py", "--seeds", "0", "1", "2", "--jobs", "3")
    assert sorted(started()) == sorted(
        {f"outputs/trial/{name}/seed{k}" for name in ("fake", "mine") for k in range(3)}
    )


@pytest.mark.slow
def test_budgets_are_equal(fake):
    """A step takes 100 tokens, 2 s and 3 CPU s here, on the other side 400 tokens."""
    sides = ["train_fake.py", "train_fake.py --tokens 400"]
    assert fake(*sides, "--tokens", "4000")[0] == 3
    tokens = [
        read_rows(Path("outputs/trial", name, "seed0", "metrics.jsonl"))[-1]
        for name in ("fake", "fake_--tokens_400")
    ]
    assert [row["num_tokens"] for row in tokens] == [4000, 4000]
    assert [row["step"] for row in tokens] == [40, 10]
    for budget, steps in (("--minutes", 30), ("--cpu_seconds", 20)):
        amount = "1" if budget == "--minutes" else "60"
        fake(*sides, budget, amount, "--output_dir", f"outputs/{steps}")
        rows = read_rows(Path(f"outputs/{steps}/fake/seed0/metrics.jsonl"))
        assert rows[-1]["step"] == steps


def test_a_side_that_fails_is_shown_and_stops_no_other(fake, capsys):
    code, found = fake("train_fake.py", "train_fake.py --fail 1", "train_mine.py")
    failed, mine = found["sides"]
    assert failed["failed"] == "seed1: error: no rows in chats.jsonl" and failed["verdict"] == "failed"
    assert (code, mine["verdict"]) == (0, "better")
    said = capsys.readouterr().out
    assert "\nfake --fail 1 failed: seed1: error: no rows in chats.jsonl\n" in said
    assert "\nfake --fail 1: failed (seed1: error: no rows in chats.jsonl)\n" in said
    assert not Path("outputs/trial/fake_--fail_1/seed2").exists()
    assert fake("train_fake.py", "train_fake.py --fail 1")[0] == 1
    with pytest.raises(UserError, match="fake --fail 0 failed: seed0: error: no rows in chats.jsonl"):
        fake("train_fake.py --fail 0", "train_mine.py")


def test_a_copy_with_a_mistake_stops_no_other(fake):
    Path("train_typo.py").write_text("def f(:")
    code, found = fake("train_fake.py", "train_typo.py", "train_mine.py")
    assert code == 0 and "SyntaxError" in found["sides"][0]["failed"]


def test_long_words_in_any_script_and_a_name_with_a_space(fake):
    Path("a copy.py").write_text(FAKE)
    sides = [f"train_fake.py --evals {'问' * 300}{k}" for k in range(2)]
    assert fake("a copy.py", *sides, "--seeds", "0")[0] == 3
    names = {Path(path).parent.name for path in started()}
    assert len(names) == 3 and max(len(name.encode()) for name in names) < 256
    assert all(name.startswith(("a_copy", "fake_--evals_问")) for name in names)


def test_what_the_disk_or_the_system_refuses_is_one_line(fake):
    command = [sys.executable, "-m", "tools.trial", "train_fake.py", "train_mine.py", "--launcher", "lanch"]
    ended = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert ended.returncode == 1 and ended.stderr == "error: [Errno 2] No such file or directory: 'lanch'\n"


def test_a_large_file_is_read_once(fake, monkeypatch):
    read = []
    monkeypatch.setattr(trial, "file_hash", lambda path: read.append(path) or "")
    Path("chats.jsonl").write_text("{}")
    fake("train_fake.py", "train_mine.py", "--", "--evals", "chats.jsonl")
    assert read == [Path("chats.jsonl")]


def test_an_edited_config_is_noticed(fake):
    Path("a.yaml").write_text("lr: 0.1")
    words = ["train_fake.py", "train_mine.py", "--seeds", "0", "--", "--wait=0", "--data=a.yaml"]
    fake(*words)
    Path("a.yaml").write_text("lr: 0.2")
    with pytest.raises(UserError, match="a.yaml was edited since"):
        fake(*words)


@pytest.mark.parametrize(
    "words, line",
    [
        (["train_fake.py", "train_fake.py --prompts !"], "was evaluated on other prompts"),
        (
            ["train_fake.py", "train_fake.py --data 2"],
            r"trained on 7 rows of chats2.jsonl, and .* --other_data",
        ),
        (["train_fake.py --evals none", "train_mine.py --evals none"], "was not evaluated: --eval_steps"),
        ("train_fake.py train_mine.py --metric wrong".split(), "these runs have eval_right, eval_entropy"),
        ("train_fake.py train_mine.py --metric entropy".split(), "is lower or higher better"),
        (["train_fake.py"], "two scripts or more, or one with --again"),
        (["train_fake.py", "train_fake.py"], "two sides are the same"),
        (["train_fake.py", "train_theirs.py"], "train_theirs.py: no such file"),
        (["train_fake.py", "train_mine.py --seed 3"], "--seed: the trial sets that itself"),
        (
            "train_fake.py train_mine.py -- --output_dir=x".split(),
            "--output_dir=x: the trial sets that itself",
        ),
        ("train_fake.py train_mine.py --seeds 1 1".split(), "--seeds 1 1: each one once"),
        ("train_fake.py train_mine.py --tokens 0".split(), "--tokens 0: expected a number above 0"),
        (
            ["train_fake.py", "train_mine.py --wait '0"],
            "side `train_mine.py --wait '0`: No closing quotation",
        ),
        (["train_fake.py", ""], "expected a script"),
        (
            ["train_fake.py", "train_mine.py", "--config", "a.yaml"],
            "unknown: --config a.yaml; words for the scripts stand after --",
        ),
        (
            ["train_fake.py --prompts SEED", "train_mine.py --prompts SEED"],
            "seed1 was evaluated on other prompts",
        ),
        (
            ["train_fake.py", 'train_mine.py --settings \'{"reward_funcs": ["b.py:score"]}\''],
            "another --reward_funcs .* the same --eval_reward_funcs",
        ),
        (
            [
                "train_fake.py --inputs '{\"outputs/sft\": 1}'",
                "train_mine.py --inputs '{\"outputs/sft\": 2}'",
            ],
            "outputs/sft was changed between",
        ),
    ],
)
def test_bad_input_is_one_line(fake, words, line):
    with pytest.raises(UserError, match=line):
        fake(*words)


def test_other_data_on_purpose(fake):
    assert fake("train_fake.py", "train_mine.py --data 2", "--other_data")[0] == 0


def test_an_edited_script_is_noticed(fake):
    fake("train_fake.py", "train_mine.py", "--seeds", "0")
    mine = Path("train_mine.py")
    mine.write_text(mine.read_text() + "\n# a comment is no edit\n")
    fake("train_fake.py", "train_mine.py", "--seeds", "0", "1")
    mine.write_text(mine.read_text() + "\nEDITED = True\n")
    with pytest.raises(
        UserError, match="train_mine.py was edited since outputs/trial/mine/seed0 was run: delete"
    ):
        fake("train_fake.py", "train_mine.py", "--seeds", "0", "1", "2")
    assert len(started()) == 4


def test_a_script_that_is_edited_between_two_seeds_of_a_trial_is_noticed(fake):
    """It edits itself, as its author would while the trial goes on."""
    edits_itself = FAKE + "\nscript.write_text(script.read_text() + '\\nEDITED = True\\n')\n"
    Path("train_mine.py").write_text(edits_itself)
    with pytest.raises(UserError, match="train_mine.py was edited since outputs/trial/mine/seed0 was run"):
        fake("train_fake.py", "train_mine.py")
    assert len(started()) == 2


def test_other_words_and_a_changed_setting_are_noticed(fake):
    fake("train_fake.py", "train_mine.py", "--seeds", "0")
    expected = (
        "^outputs/trial/fake/seed0 was run as `train_fake.py --seed 0`: delete outputs/trial/fake to run all its "
        "seeds anew, or choose another --output_dir$"
    )
    with pytest.raises(UserError, match=expected):
        fake("train_fake.py", "train_mine.py", "--seeds", "0", "--", "--max_steps", "20")
    settings = Path("outputs/trial/mine/seed0/args.yaml")
    settings.write_text(settings.read_text().replace("0.1", "0.2"))
    with pytest.raises(
        UserError, match=r"seed1 is not outputs/trial/mine/seed0 with another seed \(lr changed"
    ):
        fake("train_fake.py", "train_mine.py", "--seeds", "0", "1")


def test_a_trial_that_is_stopped_stops_its_runs(tmp_path):
    (tmp_path / "train_fake.py").write_text(FAKE)
    command = [
        sys.executable,
        "-m",
        "tools.trial",
        "train_fake.py",
        "train_fake.py --wait 600",
        "--seeds",
        "0",
    ]
    command += "-- --wait 60".split()
    process = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    log = tmp_path / "outputs/trial/started"
    while not log.exists():
        time.sleep(0.05)
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 130 and time.monotonic() - begun < 30


def test_held_out_rows_that_differ_leave_out_their_losses():
    """An edit of `encode` that trains other tokens evaluates other tokens; completions stay comparable."""
    data = [{"eval_sources": [{"path": "x", "rows": 3, "trained_tokens": count}]} for count in (30, 20)]
    runs = [
        [TrialRun(Path("a"), {"eval_right": k / 2, "eval_loss": 1.0}, {"eval_right": {0: k / 2}}, [], {}, facts, {})
         for k in range(2)]
        for facts in data
    ]  # fmt: skip
    table = trial_verdict.verdicts(runs[0], {"mine": runs[1]}, "eval_right", 1, 0.05)
    assert [row["metric"] for row in table["mine"]] == ["eval_right"]
    assert trial_verdict.verdicts(runs[0], {"mine": runs[1]}, "eval_loss", -1, 0.05) == {}


def test_sums_of_other_rewards_are_left_out():
    values = {"reward": 1.0, "eval_reward": 1.0, "eval_reward_t0.7": 1.0, "eval_rewards/margins": 1.0}
    runs = [
        TrialRun(Path("a"), values, {}, [], {"reward_weights": weights}, {}, {}) for weights in (None, [1, 2])
    ]
    assert trial_verdict.metrics_of_all(runs) == ["eval_rewards/margins"]
    assert trial_verdict.metrics_of_all(runs[:1] * 2) == list(values)


def test_with_save_best_the_exported_model_counts(tmp_path):
    rows = [
        {"step": step, "temperature": 0.0, "prompt": "?", "completion": "!", "right": step / 10}
        for step in (0, 5, 9)
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "summary.json").write_text(json.dumps({"final": {"eval_right": 0.5}, "best": {"step": 5}}))
    outcome = trial_verdict.read_outcome(tmp_path)
    assert list(outcome.scores["eval_right"].values()) == [0.5] and outcome.values == {"eval_right": 0.5}


# --- the page -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
def test_the_page_draws_verdicts_diffs_curves_and_prompts(fake, tmp_path):
    fake("train_fake.py", "train_mine.py", "train_fake.py --effect 0.001", "train_fake.py --fail 1")
    markup = drawn((tmp_path / "outputs/trial/trial.html").as_uri(), tmp_path)
    assert (
        'data-drawn="yes"' in markup and 'class="word better"' in markup and 'class="word failed"' in markup
    )
    for text in (
        "Verdict on eval_right",
        "EDIT = 0.3",
        "question 0",
        "error: no rows in chats.jsonl",
        "such a difference takes about",
    ):
        assert text in markup, text
    assert markup.count('class="seed"') >= 6 and "<u>" not in markup


# --- real runs ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_trial_of_real_runs(tmp_path):
    copy = ROOT / "train_sft.py"
    mine = tmp_path / "train_mine.py"
    mine.write_text(copy.read_text().replace("weights = mask / N", "weights = 0 * mask / N"))
    words = "--config data/configs/sft.yaml --model_name_or_path data/base_model --max_train_samples 20 --max_steps 3".split()
    words += "--eval_max_new_tokens 4 --max_eval_samples 8 --num_samples 0 --save_steps 0".split()
    command = [
        sys.executable,
        "-m",
        "tools.trial",
        "train_sft.py",
        str(mine),
        "--output_dir",
        str(tmp_path / "out"),
    ]
    command += [*"--metric loss --seeds 0 1 --".split(), *words]
    first = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert first.returncode in (3, 4) and not first.stderr, first.stderr
    found = json.loads((tmp_path / "out/trial.json").read_text())
    row = found["sides"][0]["metrics"][0]
    assert found["metric"] == "eval_loss" and row["side"][0] == row["side"][1] > max(
        row["parent"]
    )  # nothing is learned
    assert {"cpu_seconds", "tokens_per_second"} <= {row["metric"] for row in found["sides"][0]["metrics"]}
    assert (tmp_path / "out/trial.html").stat().st_size > 50_000
    again = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (
        again.returncode == first.returncode
        and "seed0 (1 of 4)" in first.stdout
        and "of 4)" not in again.stdout
    )
