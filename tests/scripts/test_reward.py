"""experiments/train_reward.py against float64, and its classifier against transformers and as a reward of
GRPO."""

import copy

from common.data import BadRow
from common.errors import UserError
from common.model import FlatModel
from common.sampling import load_rewards
import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from experiments.classifier import score_head
from experiments.scored import number_of, up_to_the_score
from experiments.train_reward import Args, encode
from tests.conftest import read_metrics, train_metrics, write_rows
from tests.scripts.one_step import PLAIN, exact, make_model
from tests.scripts.texts import HELD_OUT_PAIRS, PAIRS, pair_rows, tokenizer
from tests.tiny import tiny_family, tiny_lm

ROWS = [row | {"margin": m} for row, m in zip(pair_rows(PAIRS), (0.5, None, 2, 0.0), strict=True)]
HELD_OUT = [row | {"margin": m} for row, m in zip(pair_rows(HELD_OUT_PAIRS), (1.0, None, 0.5), strict=True)]
FLAGS = [
    "--per_device_train_batch_size",
    4,
    *"--learning_rate 1e-2 --center_rewards_coefficient 0.05".split(),
]


def text_ids(messages):
    return tokenizer()(
        tokenizer().apply_chat_template(messages, tokenize=False), add_special_tokens=False
    ).input_ids


def ids_of_pairs(rows):
    return [[text_ids(row["prompt"] + row[side]) for side in ("chosen", "rejected")] for row in rows]


def loss_of(scores, rows, centre=0.05):
    """2203.02155, eq. 1, with Llama 2's margin and the centring term: scores (B, 2)."""
    margin = torch.tensor([row["margin"] or 0.0 for row in rows]).double()
    losses = torch.log1p(torch.exp(margin - scores[:, 0] + scores[:, 1])) + centre * scores.sum(1) ** 2
    return losses.mean()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """With dropout, which is to be off, and without a padding token, which a classifier needs."""
    return make_model(
        tmp_path_factory.mktemp("model") / "qwen3", "qwen3", attention_dropout=0.3, pad_token_id=None
    )


def reward(launch, model, folder, *flags, output="out"):
    rows = write_rows(folder / "rows.jsonl", ROWS)
    held_out = write_rows(folder / "held_out.jsonl", HELD_OUT)
    words = ["--model_name_or_path", model, "--dataset_name", rows, "--eval_dataset_name", held_out, *FLAGS]
    return launch("reward", *words, *PLAIN, "--eval_steps", 4, *flags, output=output)


def evals_of(output):
    return [row for row in read_metrics(output) if "eval_loss" in row]


def test_the_first_step_and_the_classifier_at_the_end(launch, model, tmp_path):
    output = reward(launch, model, tmp_path, "--max_steps", 4)
    # At the start the head is 0: all scores are, and only the head has a gradient.
    body = exact(model).model
    with torch.no_grad():
        states = [
            [body(input_ids=torch.tensor([ids])).last_hidden_state[0, -1] for ids in pair]
            for pair in ids_of_pairs(ROWS)
        ]
    head = torch.zeros(states[0][0].shape, dtype=torch.float64, requires_grad=True)
    loss = loss_of(torch.stack([torch.stack([state @ head for state in pair]) for pair in states]), ROWS)
    loss.backward()
    first = train_metrics(output)[0]
    assert first["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert first["grad_norm"] == pytest.approx(head.grad.norm().item(), rel=1e-4)
    # At the end the classifier that was saved gives the scores of the last evaluation, with padding on either
    # side.
    classifier = AutoModelForSequenceClassification.from_pretrained(
        output / "classifier", dtype=torch.float64
    ).eval()
    saved = AutoTokenizer.from_pretrained(output / "classifier")
    pairs = ids_of_pairs(HELD_OUT)
    with torch.no_grad():
        scores = torch.stack(
            [torch.stack([classifier(torch.tensor([ids])).logits[0, 0] for ids in pair]) for pair in pairs]
        )
        for side in ("left", "right"):
            saved.padding_side = side
            batch = saved.pad({"input_ids": [ids for pair in pairs for ids in pair]}, return_tensors="pt")
            torch.testing.assert_close(classifier(**batch).logits.view(-1, 2), scores, rtol=1e-6, atol=1e-6)
    last = evals_of(output)[-1]
    assert last["eval_loss"] == pytest.approx(loss_of(scores, HELD_OUT).item(), rel=1e-4)
    margins = scores[:, 0] - scores[:, 1]
    wanted = {
        "accuracies": (margins > 0).double(),
        "margins": margins,
        "confidences": torch.sigmoid(margins.abs()),
    }
    for name, values in wanted.items():
        assert last[f"eval_rewards/{name}"] == pytest.approx(values.mean().item(), rel=1e-4, abs=1e-5)
    assert margins.abs().min() > 0.01, "it has learned nothing"
    # And so does the reward function that GRPO makes of it.
    (function,) = load_rewards([str(output / "classifier")], torch.device("cpu"))
    rows = HELD_OUT
    found = function.function(
        prompts=[row["prompt"] for row in rows], completions=[row["chosen"] for row in rows]
    )
    assert found == pytest.approx(scores[:, 0].tolist(), rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_a_regression_on_a_number_also_of_plain_text(launch, model, tmp_path):
    rows = [{"prompt": f"{i}+1=", "completion": f"{i + 1}." * i, "score": i / 2} for i in range(1, 6)]
    words = ["--model_name_or_path", model, "--dataset_name", write_rows(tmp_path / "rows.jsonl", rows)]
    words += [
        "--eval_dataset_name",
        tmp_path / "rows.jsonl",
        *"--objective regression --learning_rate 1e-2".split(),
    ]
    words += "--max_steps 6 --eval_steps 6 --save_steps 0".split()
    output = launch("reward", *words)
    first, last = evals_of(output)
    assert first["eval_loss"] == pytest.approx(np.mean([row["score"] ** 2 for row in rows]), rel=1e-5)
    (function,) = load_rewards([str(output / "classifier")], torch.device("cpu"))
    columns = {f"{name}s": [row[name] for row in rows] for name in ("prompt", "completion")}
    errors = [
        (score - row["score"]) ** 2 for score, row in zip(function.function(**columns), rows, strict=True)
    ]
    assert (
        last["eval_loss"] == pytest.approx(np.mean(errors), rel=1e-4)
        and last["eval_loss"] < first["eval_loss"]
    )


def test_the_last_token_without_padding_is_scored():
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
    padded = copy.deepcopy(tokenizer())
    padded.pad_token = "7"
    pair = encode({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, padded, Args())
    assert [padded.decode(side["input_ids"]) for side in pair] == ["1+1=2", "1+1=3"]  # and no end of a text


def test_a_model_without_classifier_is_refused():
    assert score_head(FlatModel(tiny_lm("llama"))).weight.shape == (1, 32)
    with pytest.raises(UserError, match="no AutoModelForSequenceClassification for a mamba"):
        score_head(FlatModel(tiny_family("mamba")))


def test_a_number_may_be_written_as_text_as_tables_have_it():
    for value, found in (
        (3, 3.0),
        (-0.5, -0.5),
        ("3", 3.0),
        (" -.5", -0.5),
        ("+1e3", 1000.0),
        ("2.", 2.0),
        (0, 0.0),
    ):
        assert number_of({"score": value}, "score") == found
    for columns in ({"score": ""}, {"score": None}, {}):
        assert number_of(columns, "score", 7.0) == 7
    for value in ("x", "1_000", "nan", "inf", "1e16", "1 2", "٣", True, [1], float("nan"), 10**40):
        with pytest.raises(BadRow, match="score is .*; expected a number"):
            number_of({"score": value}, "score", 7.0)
    for columns in ({}, {"score": None}, {"score": ""}):
        with pytest.raises(BadRow, match="no number in the column score"):
            number_of(columns, "score")
