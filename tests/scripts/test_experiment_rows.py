"""Rows that only experiments read: answers with a label, texts with a score."""

from common.data.types import BadRow
import numpy as np
import pytest

from experiments.labelled import as_labelled, mismatched
from experiments.scored import number_of


def test_a_label_may_be_written_as_text_as_tables_have_it():
    for label, good in (("True", True), ("false", False), (" 1", True), ("0", False), (1.0, True)):
        assert as_labelled({"prompt": "q", "completion": "a", "label": label})["label"] is good
    for label in ("good", "", "10", 2, -1.0):
        with pytest.raises(BadRow, match="label"):
            as_labelled({"prompt": "q", "completion": "a", "label": label})
    for columns in ({"prompt": "q", "completion": "a"}, {"text": "t", "label": True}):
        with pytest.raises(BadRow, match=", ".join(columns)):
            as_labelled(columns)


def test_answers_after_the_prompts_of_others():
    """Each prompt, the tokens before the first trained one, with the next answer; of a prompt too long for it nothing remains."""
    rows = [([1, 2, 3], [7, 8]), ([4], [9]), ([], [5, 6])]
    rows = [
        {"input_ids": np.array(p + a), "loss_mask": np.array([0] * len(p) + [1] * len(a)), "label": True} for p, a in rows
    ]
    found = mismatched(rows, 4)
    assert all(len(example) == 1 and {*example[0]} == {"input_ids", "loss_mask"} for example in found)
    assert [example[0]["input_ids"].tolist() for example in found] == [[7, 8], [1, 2, 3, 9], [4, 5, 6]]
    assert [example[0]["loss_mask"].tolist() for example in found] == [[1, 1], [0, 0, 0, 1], [0, 1, 1]]
    assert [example[0]["loss_mask"].tolist() for example in mismatched(rows, 3)] == [[1, 1], [0, 0, 0], [0, 1, 1]]


def test_a_number_may_be_written_as_text_as_tables_have_it():
    for value, found in ((3, 3.0), (-0.5, -0.5), ("3", 3.0), (" -.5", -0.5), ("+1e3", 1000.0), ("2.", 2.0), (0, 0.0)):
        assert number_of({"score": value}, "score") == found
    for columns in ({"score": ""}, {"score": None}, {}):
        assert number_of(columns, "score", 7.0) == 7
    for value in ("x", "1_000", "nan", "inf", "1e16", "1 2", "٣", True, [1], float("nan"), 10**40):
        with pytest.raises(BadRow, match="score is .*; expected a number"):
            number_of({"score": value}, "score", 7.0)
    for columns in ({}, {"score": None}, {"score": ""}):
        with pytest.raises(BadRow, match="no number in the column score"):
            number_of(columns, "score")
