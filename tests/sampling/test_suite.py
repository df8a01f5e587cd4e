"""Suites of prompts: what a row may be, what its checks mean, and what the counts say."""

import itertools
import json
import math
from fractions import Fraction

from common.errors import UserError
from common.sampling import counts as maths
from common.sampling.suite import counts, falls, known, load_suite, run_suite, turned
from tests.tiny import V, tiny_pair

import pytest
import torch
from accelerate import Accelerator

CPU = torch.device("cpu")
USER = [{"role": "user", "content": "hi"}]


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# --- the maths ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, c, k", [(1, 0, 1), (1, 1, 1), (5, 2, 1), (5, 2, 3), (6, 1, 6), (7, 0, 4), (7, 7, 2)])
def test_pass_at_k_is_the_share_of_the_choices_of_k_answers_with_a_right_one(n, c, k):
    choices = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert maths.pass_at_k(n, c, k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


def test_pass_at_k_is_unbiased():
    """Over all outcomes of n = 6 draws that are right with p = 1/3: its mean is 1 - (1 - p)^k, exactly."""
    p, n = Fraction(1, 3), 6
    for k in (1, 2, 5):
        mean = sum(math.comb(n, c) * p**c * (1 - p) ** (n - c) * Fraction(maths.pass_at_k(n, c, k)) for c in range(n + 1))
        assert float(mean) == pytest.approx(float(1 - (1 - p) ** k), abs=1e-12)
    for wrong in [(3, 4, 1), (3, 1, 4), (3, 1, 0)]:
        with pytest.raises(ValueError, match="pass@"):
            maths.pass_at_k(*wrong)


@pytest.mark.parametrize("passed, total", [(0, 1), (0, 6), (6, 6), (5, 12), (7, 40), (25, 40), (500, 1000)])
def test_the_ends_of_wilsons_interval_are_where_the_normal_test_would_just_reject(passed, total):
    """The definition: |p̂ - p| = z sqrt(p (1 - p) / n) at both ends, where the end is not that of [0, 1]."""
    low, high = maths.wilson(passed, total)
    for end in (low, high):
        distance = abs(passed / total - end)
        assert end in (0.0, 1.0) or distance == pytest.approx(maths.Z * math.sqrt(end * (1 - end) / total), abs=1e-12)
    assert 0 <= low <= passed / total <= high <= 1 and low < high


def test_wilsons_interval_in_numbers():
    """Newcombe 1998, table I, method 3: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    for count, expected in {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605), (0, 20): (0, 0.1611)}.items():
        assert maths.wilson(*count) == pytest.approx(expected, abs=5e-5)
    assert maths.wilson(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5) and maths.wilson(0, 0) == (0, 1)


@pytest.mark.parametrize("fell, rose", [(0, 0), (1, 0), (5, 0), (0, 5), (6, 1), (3, 3), (9, 2)])
def test_the_p_value_is_the_share_of_coin_tosses_with_so_many_falls(fell, rose):
    tosses = list(itertools.product([0, 1], repeat=fell + rose))
    share = sum(sum(toss) >= fell for toss in tosses) / len(tosses)
    assert maths.fall_p_value(fell, rose) == pytest.approx(share, abs=1e-15)


def test_the_p_value_of_many_cases_is_a_number():
    assert 0 < maths.fall_p_value(1500, 1000) < 1e-20


# --- rows -----------------------------------------------------------------------------------------------------------

GOOD = {"id": "a", "group": "g", "prompt": "x", "contains": "y"}


@pytest.mark.parametrize(
    "changed, field, said",
    [
        ({"id": None}, "id", "missing"),
        ({"id": 1.5}, "id", "expected a name"),
        ({"group": " "}, "group", "expected a name"),
        ({"group": "a@b"}, "group", "what trackers take"),
        ({"group": "all"}, "group", "name of all cases"),
        ({"prompt": None}, "prompt", "prompt .text. or messages"),
        ({"messages": USER}, "prompt", "one of them"),
        ({"prompt": ""}, "prompt", "empty prompt"),
        ({"prompt": None, "messages": "hi"}, "messages", "no messages"),
        ({"prompt": None, "messages": [{"role": "clown", "content": "x"}]}, "messages", "unknown role"),
        ({"prompt": None, "messages": [*USER, {"role": "assistant", "content": "x"}]}, "messages", "leave it out"),
        ({"contains": None}, "checks", "none; expected one or more of equals"),
        ({"contain": "x"}, "contain", "did you mean contains"),
        ({"weather": "x"}, "weather", "known: id, group"),
        ({"contains": ""}, "contains", "none of them empty"),
        ({"contains": [1]}, "contains", "expected text"),
        ({"not_contains": []}, "not_contains", "expected text"),
        ({"regex": "("}, "regex", "unterminated|missing"),
        ({"regex": 3}, "regex", "expected text"),
        ({"number": "8"}, "number", "expected a number, found '8'"),
        ({"number": True}, "number", "expected a number"),
        ({"number": 10**400}, "number", "expected a number of at most 1e.300 in size"),
        ({"max_tokens": 0}, "max_tokens", "expected a whole number"),
        ({"max_tokens": 2.5}, "max_tokens", "expected a whole number"),
        ({"reward": "nowhere.py:f"}, "reward", "there is no file nowhere.py"),
        ({"reward": "exact_numbre"}, "reward", "did you mean exact_number"),
    ],
)
def test_a_bad_row_is_one_line_with_its_place_and_field(tmp_path, changed, field, said):
    path = write(tmp_path / "suite.jsonl", GOOD, {**GOOD, "id": "b", **changed})
    with pytest.raises(UserError, match=f"suite.jsonl:2: {field}: .*({said})") as error:
        load_suite(path, CPU)
    assert "\n" not in str(error.value)


def test_a_name_stands_there_once_and_settings_fit(tmp_path):
    path = write(tmp_path / "s.jsonl", GOOD, GOOD)
    with pytest.raises(UserError, match=r"s.jsonl:2: id: 'a' is that of .*s.jsonl:1, too"):
        load_suite(path, CPU)
    path = write(tmp_path / "s.jsonl", GOOD)
    with pytest.raises(UserError, match="--regression_samples: .*--regression_temperature 1"):
        load_suite(path, CPU, samples=4)
    with pytest.raises(UserError, match="--pass_at 5: there are only 4 answers"):
        load_suite(path, CPU, samples=4, pass_at=5, temperature=1.0, flag="--")
    with pytest.raises(UserError, match="there is no such file"):
        load_suite(str(tmp_path / "t.jsonl"), CPU)


# --- answers --------------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer of V letters; what a tiny model writes is text that can be judged."""

    chat_template, eos_token_id = None, 1

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(48 + i) for i in ids if i > 1 or not skip_special_tokens)


def suite_of(tmp_path, *rows, **settings):
    """A suite whose prompts are given as tokens."""
    path = write(tmp_path / "suite.jsonl", *({"id": str(i), "group": "g", "prompt": "x", **r} for i, r in enumerate(rows)))
    suite = load_suite(path, CPU, **settings)
    for i, case in enumerate(suite.cases):
        case.row["prompt_ids"] = [2 + i % 7, 3, 4 + i % 5]
    return suite


@pytest.fixture(scope="module")
def model():
    flat, _ = tiny_pair("llama")
    flat.stop_ids = list(range(1, 12))  # some of its answers end
    return flat


def answers_of(model, suite, batch=None, processes=1, monkeypatch=None):
    return run_suite(suite, model, Letters(), Accelerator(cpu=True), seed=3)


def test_each_check_means_what_its_name_says(tmp_path, model):
    """What the model writes is taken from a first pass; a second suite asks for it, and for something else."""
    first = answers_of(model, suite_of(tmp_path, *[{"equals": "-"}] * 6, max_new_tokens=8))
    texts = [r.completion for r in first]
    assert all(r.rate == 0 and r.why.startswith("equals: not '-'") for r in first) and len(set(texts)) > 3
    text = max(texts, key=len)
    at = texts.index(text)
    (tmp_path / "own.py").write_text(
        "def half(prompts, completions, **columns):\n    return [columns['given'][i] for i in range(len(completions))]\n"
    )
    own = f"{tmp_path}/own.py:half"
    for right, wrong, said in [
        ({"equals": [text + " ", "-"]}, {"equals": text[:-1]}, "equals: not"),
        ({"contains": [text[0], text[-2:]]}, {"contains": [text[0], "-"]}, "contains: without '-'"),
        ({"not_contains": "-"}, {"not_contains": ["-", text[1]]}, f"not_contains: has {text[1]!r}"),
        ({"regex": "^.{3,}$"}, {"regex": "^-"}, "regex: '^-' does not match"),
        ({"reward": own, "given": 0.5}, {"reward": own, "given": 0.4}, "reward: 0.4"),
        ({"contains": text[0], "regex": "."}, {"contains": text[0], "equals": "-"}, "equals: not '-'"),
        ({"equals": text}, {"reward": own, "given": None}, "reward: none"),
    ]:
        rows = [{"equals": "-"}] * 6
        for check, why in ((right, ""), (wrong, said)):
            rows[at] = check
            found = answers_of(model, suite_of(tmp_path, *rows, max_new_tokens=8))[at]
            assert found.completion == text and (found.why[: len(said)], found.rate) == (why, float(not why)), check


def test_numbers_and_ends_are_judged(tmp_path, model, monkeypatch):
    from common.sampling import suite as module
    from common.sampling.generate import Sampled

    monkeypatch.setattr(
        Letters, "decode", lambda self, ids, skip_special_tokens=True: {5: "Answer: 1,000.0", 6: "none"}[ids[0]]
    )
    written = {0: Sampled([5], [0.0], True), 1: Sampled([6], [0.0], False)}
    monkeypatch.setattr(module, "sample", lambda model, prompts, keys, **_: [written[p[0] - 2] for p in prompts])
    rows = [{"number": 1000, "max_tokens": 3}, {"number": 7}]
    assert [r.why for r in answers_of(model, suite_of(tmp_path, *rows))] == ["", "number: none, not 7"]
    rows = [{"number": 1000.5}, {"max_tokens": 3}]
    assert [r.why for r in answers_of(model, suite_of(tmp_path, *rows))] == [
        "number: 1000, not 1000.5",
        "max_tokens: goes on after 3",
    ]


def test_an_answer_depends_on_its_case_alone(tmp_path, model):
    """Not on the cases before it or beside it, nor on the longest answer that these may give."""
    rows = [{"equals": "-"} for _ in range(9)]
    settings = {"samples": 4, "pass_at": 2, "temperature": 1.0, "max_new_tokens": 6}
    whole = suite_of(tmp_path, *rows, **settings)
    found = {r.case.id: r.completion for r in answers_of(model, whole)}
    rows[1]["max_tokens"] = 20
    part = suite_of(tmp_path, *rows, **settings)
    part.cases = [part.cases[i] for i in (7, 1, 2)]
    again = {r.case.id: r.completion for r in answers_of(model, part)}
    assert again["7"] == found["7"] and again["2"] == found["2"] and again["1"].startswith(found["1"])
    assert len(set(found.values())) > 5


def test_several_answers_give_pass_at_k(tmp_path, model):
    settings = {"samples": 6, "temperature": 1.0, "max_new_tokens": 4}
    texts = [r.completion for r in answers_of(model, suite_of(tmp_path, {"equals": "-"}, samples=1, max_new_tokens=4))]
    rows = [{"contains": texts[0][0]}, {"regex": "[5-Z]"}, {"regex": "^"}, {"equals": "-"}]
    one, three = (answers_of(model, suite_of(tmp_path, *rows, pass_at=k, **settings)) for k in (1, 3))
    for first, third in zip(one, three, strict=True):
        right = round(first.rate * 6)
        assert first.rate == pytest.approx(right / 6) and third.rate == pytest.approx(maths.pass_at_k(6, right, 3))
    assert one[2].rate == 1 and one[3].rate == 0 and 0 < one[0].rate + one[1].rate < 2


def test_what_turned_is_told_for_cases_that_are_what_they_were(tmp_path, model):
    rows = [{"regex": "^"}] * 6 + [{"equals": "-"}] * 2
    results = answers_of(model, suite_of(tmp_path, *rows))
    assert counts(results)["all"] == counts(results)["g"] and counts(results)["g"]["passed"] == 6
    before = known(results)
    assert turned(before, results) == {"fell": [], "rose": []} and falls(before, results) == {"all": 1.0, "g": 1.0}
    for i in range(6):  # five pass where all failed; the sixth was another case
        before[str(i)] = {"rate": 0.0, "digest": results[i].case.digest if i < 5 else "other"}
    before["7"]["rate"] = 1.0
    assert turned(before, results) == {"fell": ["7"], "rose": ["0", "1", "2", "3", "4"]}
    assert falls(before, results)["g"] == pytest.approx(1 - 1 / 2**6)
    assert turned({}, results) == {"fell": [], "rose": []}


def test_a_pattern_that_takes_for_ever_is_named(tmp_path, model):
    suite = suite_of(tmp_path, {"regex": "^"}, timeout=0.2)
    suite.cases[0].checks["regex"] = __import__("re").compile(r"(?:.?.?.?)*-$")
    with pytest.raises(UserError, match=r"suite.jsonl:1: regex: takes more than 0.2 s"):
        run_suite(suite, model, type("Long", (Letters,), {"decode": lambda *_, **__: "a" * 60})(), Accelerator(cpu=True), 0)


def test_the_vocabulary_has_a_letter_for_each_token():
    assert len({Letters().decode([i]) for i in range(2, V)}) == V - 2
