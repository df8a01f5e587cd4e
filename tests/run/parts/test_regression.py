"""Regression suites: rows, checks, counts, a run with one, and the gate of tools.regression."""

import itertools
import json

from accelerate import Accelerator
from common.args import CommonArgs
from common.errors import UserError
from common.evaluate import Completed
from common.run.folder import lock
from common.run.metrics import Metrics
from common.run.parts import regression as suites
from common.run.parts.regression import ALL, CHECKS, Case, Regression, Suite, compare, outcome
import pytest
from safetensors.torch import load_file
import torch

from tests.conftest import demo, events_of, read_metrics, read_rows, write_rows
from tests.run.test_resume import Stop, stop_after_save
from tests.scripts.test_equivalence import two_processes
from tools import regression as gate

CPU, MODEL = torch.device("cpu"), "data/base_model"
GOOD = {"id": "a", "group": "g", "prompt": "x", "contains": "y"}


def lines(folder):
    return read_rows(folder / "regression.jsonl")


# --- the maths ----------------------------------------------------------------------------------------------


def test_wilson_in_published_numbers():
    """Newcombe 1998, table I, method 3: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    published = {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }
    for count, expected in published.items():
        assert suites.wilson(*count) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("fell, rose", [(0, 0), (1, 0), (5, 0), (0, 5), (6, 1), (3, 3), (9, 2)])
def test_the_p_value_is_that_of_coin_tosses(fell, rose):
    tosses = list(itertools.product([0, 1], repeat=fell + rose))
    share = sum(sum(toss) >= fell for toss in tosses) / len(tosses)
    assert suites.fall_p_value(fell, rose) == pytest.approx(share, abs=1e-15)
    assert 0 < suites.fall_p_value(1500, 1000) < 1e-20


# --- rows and checks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed, field",
    [
        ({"group": "all"}, "a column:"),
        ({"prompt": None, "messages": [{"role": "clown", "content": "x"}]}, "unknown role 'clown';"),
        ({"contains": None}, "a column:"),
        (
            {"weather": "x"},
            r"weather: expected id, group \(not all\), prompt or messages, and checks: equals, contains, "
            "not_contains, regex, number, max_tokens, reward; found id, group, prompt, contains, weather",
        ),
        ({"reward": "nowhere.py:f"}, "reward:"),
        ({"id": "a"}, "id: another row has 'a', too"),
        ({"regex": "("}, r"regex: missing \)"),
        *(
            ({name: wrong}, f"{name}:")
            for name, wrong in (("contains", []), ("max_tokens", "9"), ("reward", 5))
        ),
    ],
)
def test_a_bad_row_is_named_in_one_line(tmp_path, changed, field):
    path = write_rows(tmp_path / "suite.jsonl", [GOOD, {**GOOD, "id": "b", **changed}])
    with pytest.raises(UserError, match=f"suite.jsonl:2: {field}") as error:
        Suite(path, CPU)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name, right, wrong",
    [
        ("equals", ["Tom has 1,000 cats. ", "-"], "Tom has 1,000 cats"),
        ("contains", ["Tom", "cats"], ["Tom", "dogs"]),
        ("not_contains", "dogs", ["dogs", "cats"]),
        ("regex", r"^Tom.*\.$", "^cats"),
        ("number", 1000.0, 1),
    ],
)
def test_a_check_means_what_its_name_says(name, right, wrong):
    answer = Completed([5], " Tom has 1,000 cats.", True)
    answer = answer._replace(text=answer.text.strip() if name == "regex" else answer.text)
    assert CHECKS[name](right, answer) and not CHECKS[name](wrong, answer)


def test_answers_are_judged_by_all_checks(tmp_path):
    """A limit of its own, a reward with columns of its own."""
    own = tmp_path / "own.py"
    own.write_text("def half(prompts, completions, given, **columns):\n    return given\n")
    rows = [
        {"contains": "a", "max_tokens": 3},
        {"reward": f"{own}:half", "given": 0.5},
        {"reward": f"{own}:half", "given": 0},
    ]
    rows = [{"id": str(i), "group": "g", "prompt": "x", **row} for i, row in enumerate(rows)]
    path = write_rows(tmp_path / "s.jsonl", rows)
    suite = Suite(path, CPU)
    answers = [Completed([5], "a", finished) for finished in (True, False)]
    assert [suite._judge(suite.cases[0], answer) for answer in answers] == ["", "max_tokens: 3"]
    assert [bool(suite._judge(case, answers[0])) for case in suite.cases] == [False, False, True]


# --- counting -----------------------------------------------------------------------------------------------


def outcome_of(passes):
    cases = [
        Case(f"c{i}", "first" if i < 6 else "last", {}, {}, "s.jsonl:1", f"d{i}") for i in range(len(passes))
    ]
    return outcome(
        [(case, "" if good else "equals: 'x'", "text") for case, good in zip(cases, passes, strict=True)]
    )


def test_turned_cases_are_those_that_stayed_the_same():
    then, now = outcome_of([True] * 8)["cases"], outcome_of([False] * 6 + [True, False])
    every = now["groups"][ALL]
    assert (every["passed"], every["total"], every["rate"]) == (1, 8, 0.125) and now["failed"].keys() == set(
        "c0 c1 c2 c3 c4 c5 c7".split()
    )
    changes = compare(then, now["cases"])
    assert changes[ALL].fell == [*now["failed"]] and changes[ALL].rose == [] and changes[ALL].same == ["c6"]
    assert {group: change.p for group, change in changes.items()} == {
        "all": 1 / 2**7,
        "first": 1 / 2**6,
        "last": 1 / 2,
    }
    assert compare(now["cases"], then)[ALL].rose == [*now["failed"]]
    then["c0"]["digest"] = "edited"
    assert compare(then, now["cases"])["first"].p == 1 / 2**5


def test_a_fall_is_told_once(tmp_path, capsys):
    """Eight cases pass, then fail twice, pass, and fail; each time by a part that knows a checkpoint
    alone."""
    args = CommonArgs(output_dir=str(tmp_path), regression_suite=write_rows(tmp_path / "suite.jsonl", [GOOD]))
    accelerator, state = Accelerator(cpu=True), {}
    lock(tmp_path)
    for step, good in ((0, True), (2, False), (4, False), (6, True), (8, False)):
        part = Regression(args, accelerator)
        part.restore(0, state)
        part.tokenizer, part.suite.run = None, lambda *_, good=good: outcome_of([good] * 8)
        found = part.run(None, step, Metrics(accelerator, args))
        assert found == {f"eval_regression/{name}": float(good) for name in ("all", "first", "last")}
        state = json.loads(json.dumps(part.state(0)))
    told = [(event["step"], event["text"]) for event in events_of(tmp_path, "regression")]
    fall = (
        "all has fallen since step 0, to 0 of 8 (p = 0.0039)",
        "first has fallen since step 0, to 0 of 6 (p = 0.016)",
    )
    assert told == [(step, text) for step in (2, 8) for text in fall]
    assert f"regression: step 8: {fall[1]}\n" in capsys.readouterr().out
    rows = lines(tmp_path)
    turned = [row["turned"] for row in rows[1:]]
    assert [len(since["since_last"]["fell"]) for since in turned] == [8, 0, 0, 8]
    assert [len(since["since_base"]["fell"]) for since in turned] == [8, 8, 0, 8]
    assert [len(since["since_last"]["rose"]) for since in turned] == [0, 0, 8, 0]
    assert [len(row["failed"]) for row in rows] == [0, 8, 8, 0, 8]


# --- in a run -----------------------------------------------------------------------------------------------

TINY = "--max_steps 6 --max_train_samples 16 --per_device_train_batch_size 2 --logging_steps 1".split()
TINY += [
    "--model_name_or_path",
    MODEL,
    *"--max_eval_samples 2 --eval_steps 4 --eval_max_new_tokens 4".split(),
]
ROWS = [
    {
        "id": "short",
        "group": "ends",
        "messages": [{"role": "user", "content": "Is 4 even or odd?"}],
        "max_tokens": 3,
    },
    {"id": "text", "group": "words", "prompt": "Tom has 3 nuts. He", "regex": "[a-z]"},
    {"id": "sum", "group": "words", "messages": [{"role": "user", "content": "What is 2+2?"}], "number": 4},
    {
        "id": "none",
        "group": "words",
        "prompt": "Question: What is 7-3?\n",
        "not_contains": ["Working", "Answer"],
    },
]


@pytest.fixture
def words(tmp_path):
    """words(stage, *more): the command line of a short run with a suite."""
    suite = write_rows(tmp_path / "suite.jsonl", ROWS)
    few = write_rows(
        tmp_path / "few.jsonl", [{"prompt": ROWS[2]["messages"], "answer": "4", "kind": "sym", "steps": 1}]
    )

    def of(stage, *more):
        return ["--config", demo(stage), *TINY, "--eval_prompts", few, *more, "--regression_suite", suite]

    return of


def test_training_does_not_notice_the_suite(launch, words, capsys):
    plain = launch("sft", *words("sft")[:-2], output="plain")
    with_suite = launch("sft", *words("sft", "--regression_steps", "4"), output="with")
    assert "regression suite: 4 cases in 2 groups (ends, words)\n" in capsys.readouterr().out
    rows = read_metrics(with_suite)
    assert [row for row in rows if "eval_regression/all" not in row] == read_metrics(plain)
    a, b = (load_file(folder / "model.safetensors") for folder in (plain, with_suite))
    assert all(torch.equal(a[name], b[name]) for name in a)
    found = lines(with_suite)
    assert [line["step"] for line in found] == [0, 4, 6]
    before = json.loads((with_suite / "summary.json").read_text())["before"]
    assert before.keys() == {k for row in rows if row["step"] == 0 for k in row} - {"step"}
    for line, row in zip(found, [row for row in rows if "eval_regression/all" in row], strict=True):
        assert row == {"step": line["step"]} | {
            f"eval_regression/{k}": v["rate"] for k, v in line["groups"].items()
        }
        assert {name: group["total"] for name, group in line["groups"].items()} == {
            "all": 4,
            "ends": 1,
            "words": 3,
        }
        assert (
            line["cases"].keys() == {row["id"] for row in ROWS}
            and line["failed"].keys() <= line["cases"].keys()
        )
    assert [line["turned"]["since_last"] and line["turned"]["since_last"]["step"] for line in found] == [
        None,
        0,
        4,
    ]


def test_a_resumed_run_has_the_same_lines(launch, words, monkeypatch):
    more = (
        "--regression_steps 2 --save_steps 3 --save_best eval_regression/words --save_total_limit 0".split()
    )
    whole = launch("sft", *words("sft", *more, "--eval_steps", "0"), output="whole")
    with monkeypatch.context() as patch:
        stop_after_save(patch, 3)
        with pytest.raises(Stop):
            launch("sft", *words("sft", *more, "--eval_steps", "0"), output="stopped")
    stopped = launch("sft", *words("sft", *more, "--eval_steps", "0"), output="stopped")
    assert lines(stopped) == lines(whole) and read_metrics(stopped) == read_metrics(whole)
    best = json.loads((stopped / "summary.json").read_text())["best"]
    rates = {line["step"]: line["groups"]["words"]["rate"] for line in lines(whole)[1:]}
    assert best["step"] == max(rates, key=rates.get) and best["value"] == rates[best["step"]]


def test_answers_that_do_not_fit_are_refused(launch, words, tmp_path):
    for row, limit in (ROWS[0], 100_000), (ROWS[0] | {"max_tokens": 100_000}, 4):
        write_rows(tmp_path / "suite.jsonl", [row, *ROWS[1:]])
        with pytest.raises(UserError, match="lower max_tokens or the prompts of the suite"):
            launch("sft", *words("sft", "--eval_max_new_tokens", limit, "--dry_run"))


@pytest.mark.slow
def test_two_processes_answer_as_one(launch, words, tmp_path):
    """Also where the second one has no case."""
    more = words(
        "sft", "--eval_steps", "0", "--regression_steps", "2", "--save_steps", "2", "--max_steps", "4"
    )
    write_rows(tmp_path / "suite.jsonl", ROWS[:1])
    one = lines(launch("sft", *more, "--per_device_train_batch_size", "4", output="one"))
    assert lines(two_processes("sft", tmp_path / "two", *more)) == one


# --- the gate -----------------------------------------------------------------------------------------------


def ask(i, **checks):
    return {
        "id": f"c{i}",
        "group": "words" if i < 6 else "ends",
        "prompt": f"Question: What is {i}+1?\n",
        **checks,
    }


@pytest.fixture
def run_gate(tmp_path, capsys):
    """run_gate(rows, *words): the exit code and what was printed."""

    def run(rows, *more, model=MODEL):
        path = write_rows(tmp_path / "suite.jsonl", rows)
        code = gate.main([model, path, "--max_new_tokens", "4", *map(str, more)])
        return code, capsys.readouterr().out

    return run


def test_a_fall_is_exit_code_1_and_named(run_gate, tmp_path):
    """The base model passes six of eight; the line it leaves is then changed as if it had been better."""
    rows, save = (
        [ask(i, regex=".") for i in range(6)] + [ask(i, equals="-") for i in (6, 7)],
        tmp_path / "was.jsonl",
    )
    code, out = run_gate(rows, "--save", save)
    assert (
        code == 0
        and "all       6/8" in out
        and "words     6/6      1.00  0.61 - 1.00" in out
        and "before" not in out
    )
    line = json.loads(save.read_text())
    assert line["groups"]["ends"]["passed"] == 0 and line["failed"].keys() == {"c6", "c7"}
    assert run_gate(rows, "--baseline", MODEL)[0] == 0

    line["cases"]["c6"]["rate"] = 1.0
    save.write_text("{}\n" + json.dumps(line) + "\n")
    code, out = run_gate(rows, "--baseline", save)
    assert code == 0 and out.endswith(
        "group     passed   rate  95 % interval  before  fell  rose      p\n"
        "all       6/8      0.75  0.41 - 0.93      0.88     1     0  0.500\n"
        "words     6/6      1.00  0.61 - 1.00      1.00     0     0  1.000\n"
        "ends      0/2      0.00  0.00 - 0.66      0.50     1     0  0.500\n"
        f"fell: c6: equals: '-'; {line['failed']['c6']['completion']!r}\n"
        f"no group has fallen since {save} by more than chance (p < 0.05)\n"
    )
    code, out = run_gate(rows, "--baseline", save, "--strict")
    assert code == 1 and f"\nFALLEN since {save}: 1 cases (--strict)\n" in out

    # other cases: nothing to compare
    bad = [{**row, "regex": "^-"} if row["id"] != "c5" else row for row in rows]
    code, out = run_gate(bad, "--baseline", save)
    assert code == 0 and "not compared, new or edited since: c0, c1, c2, c3, c4" in out
    with pytest.raises(UserError, match="none of the cases of .*suite.jsonl"):  # a gate that is open
        run_gate([ask(9, regex=".")], "--baseline", save)
    run_gate(bad, "--save", tmp_path / "now.jsonl")
    now = json.loads((tmp_path / "now.jsonl").read_text())["cases"]
    save.write_text(json.dumps(line | {"cases": {name: case | {"rate": 1.0} for name, case in now.items()}}))
    code, out = run_gate(bad, "--baseline", save)
    fallen = "all (p = 0.0078), words (p = 0.031), by McNemar's exact test, one-sided"
    assert code == 1 and out.splitlines()[-1] == f"FALLEN since {save}: {fallen}"
    assert run_gate(bad, "--baseline", save, "--alpha", "0.001")[0] == 0
    with pytest.raises(UserError, match="was.jsonl: its answers had --max_new_tokens 4, here 9"):
        run_gate(bad, "--baseline", save, "--max_new_tokens", "9")
