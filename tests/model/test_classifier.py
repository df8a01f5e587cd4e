"""Texts that get a number: which token is scored, and with what head. (What is saved: tests/scripts/test_reward.py.)"""

import math

from common.data import BadRow
from common.errors import UserError
from common.model import FlatModel
from common.model.classifier import score_head
from experiments.scored import number_of, up_to_the_score
from tests.tiny import tiny_hybrid, tiny_lm

import numpy as np
import pytest


def test_a_text_is_scored_at_its_last_token_that_is_no_padding():
    class Marks:
        pad_token_id, eos_token_id = 7, 9

    def scored(ids, plain_text=False, max_length=9):
        sequence = {"input_ids": np.array(ids), "loss_mask": np.ones(len(ids), np.int64), "x": 1}
        found = up_to_the_score(sequence, Marks, max_length, plain_text)
        assert found["loss_mask"].tolist() == [0] * (len(found["input_ids"]) - 1) + [1] and found["x"] == 1
        return found["input_ids"].tolist()

    assert scored([1, 2, 9]) == [1, 2, 9] and scored([1, 2, 9], plain_text=True) == [1, 2]
    assert scored([1, 7, 2, 7, 7]) == [1, 7, 2] and scored([7]) == [7]
    assert scored([1] * 9 + [7]) == [1] * 9
    with pytest.raises(BadRow, match="more than max_length 9 tokens"):
        scored([1] * 10)


@pytest.mark.parametrize("value", ["one", True, math.nan, math.inf, [1], 1e30, 10**400])
def test_a_number_of_a_row_is_a_number(value):
    assert number_of({"x": 2}, "x") == 2.0 and number_of({"x": None}, "x", 0.5) == 0.5
    with pytest.raises(BadRow, match="x is .*; expected a number"):
        number_of({"x": value}, "x", 0.5)


def test_a_model_that_transformers_has_no_classifier_of_is_refused():
    assert score_head(FlatModel(tiny_lm("llama"))).weight.shape == (1, 32)
    with pytest.raises(UserError, match="no AutoModelForSequenceClassification for a mamba"):
        score_head(FlatModel(tiny_hybrid("mamba")))
