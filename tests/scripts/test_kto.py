"""experiments/train_kto.py against float64: which answer is good, what the KL term is made of, and what the
reference is."""

from common.data.order import Order
from common.data.types import BadRow
import numpy as np
import pytest
import torch

from experiments import train_kto
from experiments.labelled import as_labelled, mismatched
from tests.conftest import write_rows
from tests.data.templates import CHAT, CHATML, OPENED, QWEN3, make_tokenizer, trained
from tests.scripts.one_step import assert_step, exact, make_model, token_scores, watched
from tests.scripts.texts import END, HELD_OUT_PAIRS, PAIRS, chat, ids_of, prompt_ids


def labelled(pairs):
    """(prompt, answer, whether it is good): in turn the chosen one of a pair and the rejected one of the
    next."""
    return [(turns, answers[i % 2], i % 2 == 0) for i, (turns, *answers) in enumerate(pairs)]


ROWS, HELD_OUT = labelled(PAIRS), labelled(HELD_OUT_PAIRS)


def as_rows(rows):
    return [{"prompt": chat(*p), "completion": chat("", a)[1:], "label": label} for p, a, label in rows]


def parts_of(rows):
    """(ids of the prompt, ids of the answer and its end of turn, label)."""
    return [(prompt_ids(chat(*p)), ids_of(a + END), label) for p, a, label in rows]


def answer_logp(lm, before, answer):
    return token_scores(lm, before + answer)[0][len(before) - 1 :].sum()


def window(policy, reference, parts, *, beta, weights=(1.0, 1.0), loss_type="kto"):
    """The loss of a step on these rows, in the order in which the run meets them, by 2402.01306; and what is
    logged."""
    mixed = [(parts[i][0], parts[(i + 1) % len(parts)][1]) for i in range(len(parts))]
    with torch.no_grad():
        ref = torch.stack([answer_logp(reference, before, answer) for before, answer, _ in parts])
        ratios = [answer_logp(policy, *pair) - answer_logp(reference, *pair) for pair in mixed]
        kl = torch.stack(ratios).mean().clamp(min=0) if loss_type == "kto" else torch.zeros(())
    rewards = beta * (torch.stack([answer_logp(policy, before, answer) for before, answer, _ in parts]) - ref)
    good = torch.tensor([label for *_, label in parts])
    value = torch.where(good, torch.sigmoid(rewards - beta * kl), torch.sigmoid(beta * kl - rewards))
    loss = (torch.where(good, *torch.tensor(weights).double()) * (1 - value)).mean()
    logged = {"loss": loss.item(), "kl": kl.item()}
    if (rewards - beta * kl).abs().min() > 1e-3:  # at the start all are 0, but for rounding
        logged["rewards/accuracies"] = ((rewards > beta * kl) == good).double().mean().item()
    return loss, logged | {
        "rewards/chosen": rewards[good].mean().item(),
        "rewards/rejected": rewards[~good].mean().item(),
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labelled")
    write_rows(folder / "rows.jsonl", as_rows(ROWS))
    write_rows(folder / "held_out.jsonl", as_rows(HELD_OUT))
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "gpt2", "gpt2")  # which has dropout


def kto(launch, data, model, *flags, output="out"):
    rows = ["--dataset_name", data / "rows.jsonl", "--learning_rate", "3e-3"]
    return watched(launch, "kto", model, *rows, *flags, output=output)


def order_of(rows, steps):
    """The rows of each step, as the order of the run gives them."""
    order = Order([len(rows)], 0)
    return [[rows[order[step * len(rows) + i]] for i in range(len(rows))] for step in range(steps)]


LOSSES = {
    "plain": ([], {"beta": 0.1}),
    "weights": (
        "--beta 0.5 --desirable_weight 1.5 --undesirable_weight 0.5".split(),
        {"beta": 0.5, "weights": (1.5, 0.5)},
    ),
    "less likely": (
        "--desirable_weight 0.2 --undesirable_weight 2".split(),
        {"beta": 0.1, "weights": (0.2, 2.0)},
    ),
    "apo": (
        "--loss_type apo_zero_unpaired --beta 0.3".split(),
        {"beta": 0.3, "loss_type": "apo_zero_unpaired"},
    ),
}


@pytest.mark.parametrize(
    "name",
    ["weights", "less likely", *(pytest.param(name, marks=pytest.mark.slow) for name in ("plain", "apo"))],
)
def test_a_loss_is_that_of_its_paper(name, launch, data, model):
    """At the start, where the KL is 0, and later, when the policy is far from the reference."""
    flags, settings = LOSSES[name]
    run = kto(launch, data, model, "--max_steps", 3, "--per_device_train_batch_size", 4, *flags)
    start, kls = exact(run.model), []
    for step, rows in enumerate(order_of(parts_of(ROWS), 3)):
        policy = start if step == 0 else run.policy(step)
        loss, logged = window(policy, start, rows, **settings)
        kls.append(logged["kl"])
        assert_step(run, step, policy, loss, logged, rel=2e-4, abs=3e-5)
    if name == "less likely":  # the mean is below 0, and counts as 0
        assert kls == [0.0] * 3
    assert name in ("apo", "less likely") or max(kls) > 0.01, "the KL term was never seen at work"


def test_an_evaluation_has_the_kl_of_the_held_out_rows(launch, data, model):
    flags = [
        "--eval_dataset_name",
        data / "held_out.jsonl",
        "--eval_steps",
        2,
        "--max_steps",
        3,
        "--beta",
        "0.4",
    ]
    run = kto(
        launch, data, model, "--per_device_train_batch_size", 4, "--per_device_eval_batch_size", 2, *flags
    )
    loss, logged = window(run.policy(2), exact(run.model), parts_of(HELD_OUT), beta=0.4)
    assert run.evals[0]["eval_loss"] == pytest.approx(0.5, abs=1e-5)
    assert run.evals[1]["eval_loss"] == pytest.approx(loss.item(), rel=2e-4)
    accuracy = logged["rewards/accuracies"]
    assert run.evals[1]["eval_rewards/accuracies"] == pytest.approx(accuracy)


def test_a_label_is_of_all_answers_of_its_row():
    """With every template: several sequences, or one answer without another, would be other items."""
    prompt, completion = [CHAT[0]], [CHAT[1], CHAT[2], CHAT[3]]
    row = {"prompt": prompt, "completion": completion, "label": True}
    args = train_kto.Args(max_length=512)
    (sequence,) = train_kto.encode(row, make_tokenizer(CHATML), args)
    assert sequence["label"] == 1 and len(trained(sequence, make_tokenizer(CHATML))) == 2
    with pytest.raises(BadRow, match="rewrites the earlier ones"):
        train_kto.encode(row, make_tokenizer(QWEN3), args)
    thinks = completion[2] | {"reasoning_content": "two and two"}
    with pytest.raises(BadRow, match="begins a thought"):  # one of its answers alone
        row["completion"] = [*completion[:2], thinks]
        train_kto.encode(row, make_tokenizer(OPENED.replace("enable_thinking is false", "false")), args)


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
    """Each prompt, the tokens before the first trained one, with the next answer; of a prompt too long for it
    nothing remains."""
    rows = [([1, 2, 3], [7, 8]), ([4], [9]), ([], [5, 6])]
    rows = [
        {"input_ids": np.array(p + a), "loss_mask": np.array([0] * len(p) + [1] * len(a)), "label": True}
        for p, a in rows
    ]
    found = mismatched(rows, 4)
    assert all(len(example) == 1 and {*example[0]} == {"input_ids", "loss_mask"} for example in found)
    assert [example[0]["input_ids"].tolist() for example in found] == [[7, 8], [1, 2, 3, 9], [4, 5, 6]]
    assert [example[0]["loss_mask"].tolist() for example in found] == [[1, 1], [0, 0, 0, 1], [0, 1, 1]]
    assert [example[0]["loss_mask"].tolist() for example in mismatched(rows, 3)] == [
        [1, 1],
        [0, 0, 0],
        [0, 1, 1],
    ]
