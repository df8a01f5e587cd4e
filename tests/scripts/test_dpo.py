"""train_dpo.py against float64: which answer is which, what each loss type is, and what the reference is."""

import json
import math

import pytest
import torch

from tests.conftest import write_rows
from tests.scripts.one_step import (
    DROPOUT,
    assert_metrics,
    assert_step,
    exact,
    make_model,
    token_scores,
    watched,
)
from tests.scripts.texts import END, HELD_OUT_PAIRS, PAIRS, chat, ids_of, pair_rows, prompt_ids, tokenizer

TEXTS = [
    ("Question: What is 8-5?\n", "Answer: 3", "I do not know, and nobody does."),
    ("Today is Monday. ", "Tomorrow is Tuesday. Then comes Wednesday.", "Mia."),
]


def chat_pairs(chats):
    """Each pair as two times (ids, tokens of the prompt, tokens that are trained): answer and end of turn;
    the line break that the template writes after it is read by no one."""
    found = [
        (prompt_ids(chat(*turns)), [ids_of(answer + END) for answer in answers]) for turns, *answers in chats
    ]
    return [[(before + answer, len(before), len(answer)) for answer in answers] for before, answers in found]


def text_pairs():
    """The same of plain text, in which the end-of-text token ends an answer."""
    ends = [tokenizer().eos_token_id]
    found = [(ids_of(prompt), [ids_of(answer) + ends for answer in answers]) for prompt, *answers in TEXTS]
    return [[(before + answer, len(before), len(answer)) for answer in answers] for before, answers in found]


LAID_OUT = chat_pairs(PAIRS)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    write_rows(folder / "chats.jsonl", pair_rows(PAIRS))
    write_rows(folder / "held_out.jsonl", pair_rows(HELD_OUT_PAIRS))
    write_rows(
        folder / "texts.jsonl",
        [dict(zip(("prompt", "chosen", "rejected"), row, strict=True)) for row in TEXTS],
    )
    return folder


def dpo(launch, data, model, *flags, batch=4, output="out"):
    names = [
        "--dataset_name",
        data / "chats.jsonl",
        "--per_device_train_batch_size",
        batch,
        "--learning_rate",
        "3e-3",
    ]
    return watched(launch, "dpo", model, *names, *flags, output=output)


def log_sigmoid(x):
    return -torch.log1p(torch.exp(-x))


def answer_logps(lm, pairs):
    """log π of chosen and of rejected, sums over the answers' tokens: (B, 2)."""
    sums = [
        token_scores(lm, ids)[0][start - 1 : start - 1 + n].sum() for pair in pairs for ids, start, n in pair
    ]
    return torch.stack(sums).view(-1, 2)


def preference_losses(loss_type, sums, ref, tokens, *, beta=0.1, label_smoothing=0.0, simpo_gamma=0.5):
    """Losses (B,) and the implicit rewards (B, 2), by the papers (all others: tests/test_losses.py)."""
    ratio, mean = sums - ref, sums / tokens
    if loss_type == "ipo":  # 2310.12036, eq. 17, of means over tokens
        return (
            (ratio / tokens).mv(torch.tensor([1.0, -1.0]).double()) - 1 / (2 * beta)
        ) ** 2, beta * ratio.detach()
    if loss_type == "bco_pair":  # 2404.04656, without its shift
        return -log_sigmoid(beta * ratio[:, 0]) - log_sigmoid(-beta * ratio[:, 1]), beta * ratio.detach()
    if loss_type == "orpo":  # 2403.07691, eq. 7, with λ = beta
        odds = mean.exp() / (1 - mean.exp())
        return -beta * log_sigmoid(torch.log(odds[:, 0] / odds[:, 1])), beta * mean.detach()
    # 2305.18290, eq. 7, cDPO; 2405.14734, eq. 6, of means over tokens and with a margin
    rewards, gamma = (
        beta * (mean if loss_type == "simpo" else ratio),
        simpo_gamma if loss_type == "simpo" else 0.0,
    )
    x = rewards[:, 0] - rewards[:, 1] - gamma
    return -(1 - label_smoothing) * log_sigmoid(x) - label_smoothing * log_sigmoid(-x), rewards.detach()


def window(policy, reference, pairs, loss_type="sigmoid", sft_weight=0.0, **settings):
    """The loss of a step on all these pairs, with its gradient; what is logged of it; and its losses without
    the SFT term."""
    tokens = torch.tensor([[n for *_, n in pair] for pair in pairs]).double()
    sums = answer_logps(policy, pairs)
    with torch.no_grad():
        ref = answer_logps(reference, pairs)
    losses, rewards = preference_losses(loss_type, sums, ref, tokens, **settings)
    loss = losses.mean() - sft_weight * sums[:, 0].sum() / tokens[:, 0].sum()
    (chosen, rejected), (logps_chosen, logps_rejected) = rewards.mean(0).tolist(), sums.mean(0).tolist()
    logged = {
        "loss": loss.item(),
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "logps/chosen": logps_chosen,
        "logps/rejected": logps_rejected,
    }
    if (rewards[:, 0] - rewards[:, 1]).abs().min() > 1e-3:  # at the start all are 0, but for rounding
        logged["rewards/accuracies"] = (rewards[:, 0] > rewards[:, 1]).double().mean().item()
    return loss, logged, losses.mean().item()


def check(run, pairs, *, steps=(0, 2), **settings):
    """Loss, metrics and gradient of these steps. The reference is the model at the start."""
    start = exact(run.model)
    for step in steps:
        policy = start if step == 0 else run.policy(step)
        loss, logged, _ = window(policy, start, pairs, **settings)
        assert_step(run, step, policy, loss, logged, rel=2e-4, abs=3e-5)


LOSSES = {
    "sigmoid": {},
    "sigmoid, all settings": {"beta": 0.7, "label_smoothing": 0.2, "sft_weight": 0.5},
    "ipo": {"beta": 0.5},
    "simpo": {"beta": 2.0},
    "simpo, with a margin": {"beta": 2.0, "simpo_gamma": 1.3, "label_smoothing": 0.1},
    "orpo": {"beta": 0.5, "sft_weight": 1.0},
    "orpo, without its SFT term": {"beta": 0.5, "sft_weight": 0.0},
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_its_paper(name, launch, data, model):
    """At the start, and two large updates later, when the policy is far from the reference; orpo brings its
    SFT term."""
    loss_type, settings = name.split(",")[0], LOSSES[name]
    given = {k: v for k, v in settings.items() if name != "orpo" or k != "sft_weight"}
    flags = [word for key, value in given.items() for word in (f"--{key}", value)]
    run = dpo(launch, data, model, "--loss_type", loss_type, *flags, "--max_steps", 3)
    check(run, LAID_OUT, loss_type=loss_type, **settings)


def test_several_losses_are_added_up_by_their_weights(launch, data, model):
    """MPO, with one that does without the reference; the rewards that are logged are those of the first."""
    weights = {"sigmoid": 0.8, "bco_pair": 0.2, "simpo": 1.5}
    words = ["--loss_type", *weights, "--loss_weights", *weights.values(), "--sft_weight", 0.7, "--beta", 0.3]
    run = dpo(launch, data, model, *words, "--max_steps", 3)
    start = exact(run.model)
    for step in (0, 2):
        policy = start if step == 0 else run.policy(step)
        terms = [window(policy, start, LAID_OUT, loss_type=name, beta=0.3) for name in weights]
        loss = sum(weight * term[0] for weight, term in zip(weights.values(), terms, strict=True))
        loss = loss + 0.7 * (
            window(policy, start, LAID_OUT, sft_weight=1.0)[0] - window(policy, start, LAID_OUT)[0]
        )
        assert_step(run, step, policy, loss, terms[0][1] | {"loss": loss.item()}, rel=2e-4, abs=3e-5)


@pytest.mark.parametrize("way", ["accumulated", "packed", "precomputed"])
def test_a_step_is_the_same_however_its_pairs_are_laid_out(way, launch, data, model):
    """Four micro-batches, packed rows, or reference log-probabilities kept on disk: the same loss, metrics
    and gradient."""
    flags, batch, steps = {
        "accumulated": (["--gradient_accumulation_steps", 4, "--max_steps", 3], 1, (0, 2)),
        "packed": (["--packing", "--max_length", 64, "--num_train_epochs", 1], 50, (0,)),
        "precomputed": (["--precompute_ref_log_probs", "--max_steps", 3], 4, (0, 2)),
    }[way]
    run = dpo(launch, data, model, *flags, "--sft_weight", 0.5, "--beta", 0.4, batch=batch)
    assert len(run.rows) == steps[-1] + 1
    if way == "packed":  # a pair is two sequences
        facts = json.loads((run.output / "dataset.json").read_text())
        assert facts["packing"]["max_length"] == 2 * 64
    check(run, LAID_OUT, steps=steps, sft_weight=0.5, beta=0.4)


def test_plain_text_ends_on_the_end_of_text(launch, data, model):
    """Pairs of strings have no template: the answer follows the prompt, and the end-of-text token is
    trained."""
    run = dpo(launch, data, model, "--dataset_name", data / "texts.jsonl", "--max_steps", 3, batch=2)
    check(run, text_pairs())


def test_an_answer_that_is_too_long_keeps_its_start(launch, data, model):
    """max_length counts the tokens of prompt and answer, and what is cut off is neither trained nor counted;
    nor is the end of an answer, the last of its n tokens, if the other one has lost its own."""
    longest, pairs = 40, []
    for pair in LAID_OUT:
        ends = all(start + n <= longest for _, start, n in pair)
        pairs.append([(ids[:longest], start, min(n - (not ends), longest - start)) for ids, start, n in pair])
    assert all(n > 0 for pair in pairs for *_, n in pair) and pairs != LAID_OUT
    run = dpo(launch, data, model, "--loss_type", "ipo", "--max_length", longest, "--max_steps", 3)
    check(run, pairs, loss_type="ipo")


@pytest.mark.parametrize("size", [2, 5])
def test_the_evaluation_is_the_mean_over_all_held_out_pairs(size, launch, data, model):
    """Loss (of the SFT term the mean over pairs), rewards, log-probabilities, in batches of any size, before
    and after steps."""
    flags = [
        "--eval_dataset_name",
        data / "held_out.jsonl",
        "--per_device_eval_batch_size",
        size,
        "--eval_steps",
        1,
    ]
    run = dpo(
        launch,
        data,
        model,
        *flags,
        "--max_steps",
        3,
        "--beta",
        0.5,
        "--sft_weight",
        0.3,
        "--label_smoothing",
        0.1,
    )
    pairs, start = chat_pairs(HELD_OUT_PAIRS), exact(model)
    for row, policy in zip(run.evals, (start, run.policy(1), run.policy(2)), strict=False):
        with torch.no_grad():
            _, logged, loss = window(policy, start, pairs, beta=0.5, label_smoothing=0.1)
            nll = (
                (-answer_logps(policy, pairs)[:, 0] / torch.tensor([n for (*_, n), _ in pairs])).mean().item()
            )
        wanted = logged | {"nll_loss": nll, "loss": loss + 0.3 * nll}
        assert_metrics(row, {f"eval_{name}": value for name, value in wanted.items()}, abs=3e-5)


@pytest.mark.parametrize("kind", DROPOUT)
@pytest.mark.parametrize("precompute", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_dropout_is_off(precompute, kind, launch, data, tmp_path):
    """At a rate of 0 policy and reference are the same at every step: the loss is ln 2, and the gradient is
    exact."""
    model = make_model(tmp_path / "model", kind)
    flags = [
        "--eval_dataset_name",
        data / "held_out.jsonl",
        "--eval_steps",
        1,
        "--precompute_ref_log_probs",
        precompute,
    ]
    run = dpo(launch, data, model, *flags, "--max_steps", 3, "--learning_rate", 0)
    assert [row["loss"] for row in run.rows] == pytest.approx([math.log(2)] * 3, abs=1e-5)
    assert all(
        row["rewards/accuracies"] == row["rewards/margins"] == 0 for row in run.rows
    )  # a tie is no win
    assert [row["eval_loss"] for row in run.evals] == pytest.approx([math.log(2)] * 4, abs=1e-5)
    check(run, LAID_OUT)
