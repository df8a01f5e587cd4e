"""train_grpo.py against float64: what is sampled, what it is compared with, and what each of its tokens
weighs."""

from functools import partial
import statistics

import pytest
import torch

from tests.conftest import read_rows, write_rows
from tests.data.rows import process
from tests.sampling.fake_vllm import FakeVLLM
from tests.scripts.grpo_by_hand import (
    LONGEST,
    REWARDS,
    STOPS,
    Settings,
    chat_rows,
    check,
    check_rollouts,
    combined,
    is_trained,
    moved,
    run_grpo,
    text_rows,
)
from tests.scripts.one_step import DROPOUT, assert_metrics, exact, logits_of, make_model, norm, watched
from tests.scripts.texts import chat, prompt_ids
import train_grpo


@pytest.fixture
def grpo(launch, tmp_path):
    return partial(run_grpo, launch, tmp_path, "grpo")


# --- the loss -----------------------------------------------------------------------------------------------

TWICE = {"steps_per_generation": 2, "num_iterations": 2, "temperature": 0.7}
LOSSES = {
    "dapo": TWICE | {"epsilon_high": 0.28},
    "bnpo": TWICE | {"loss_type": "bnpo"},
    "grpo": TWICE | {"loss_type": "grpo", "epsilon": 0.1},
    "dr_grpo": TWICE | {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dr_grpo, nothing cut": {"loss_type": "dr_grpo", "scale_rewards": "none", "max_completion_length": 64},
    "cispo": TWICE | {"loss_type": "cispo", "epsilon_high": 1.05, "entropy_coef": 0.01},
    "leave one out": TWICE | {"advantage_estimator": "rloo", "scale_rewards": "none"},
    "all of the rollout": TWICE | {"advantage_estimator": "reinforce_pp", "scale_rewards": "batch"},
    "batch": TWICE
    | {"scale_rewards": "batch", "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4},
    "kl": TWICE | {"beta": 0.3},
    "kl without correction": {"num_iterations": 2, "beta": 0.3, "use_bias_correction_kl": False},
    "entropy and kl": {
        "num_iterations": 2,
        "entropy_coef": -0.2,
        "beta": 0.1,
        "loss_type": "grpo",
        "temperature": 1.5,
    },
    "sequence": TWICE
    | {"importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.06, "learning_rate": 1e-4},
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_is_that_of_the_formula(name, grpo, model):
    """Loss, gradient and metrics of every update on a rollout, and on the next; one group of prompts has
    equal rewards.

    Each completion is trained num_iterations times, and after the first update with a ratio that is not 1.
    """
    flags, settings = Settings.flags(**LOSSES[name])
    # all of a rollout, and each window of the next one
    steps = settings.cycle + settings.steps_per_generation
    run = grpo(model, *flags, "--max_steps", steps, rows=chat_rows(("any", "flat", "any", "any")))
    check_rollouts(run, settings, 2, steps)
    if name == "dr_grpo, nothing cut":
        assert max(len(c.ids) for rollout in run.rollouts for c in rollout) < 64


def test_what_servers_sample_is_corrected(grpo, model):
    """Log-probabilities that are a little off, as a server's in half precision are. Its dtype bounds how
    far."""
    settings = Settings(
        off=0.15, importance_correction="token_truncate", importance_cap=1.05, num_iterations=2
    )

    class Off(FakeVLLM):
        def _logps(self, prompt, ids, drawing):
            return (torch.tensor(super()._logps(prompt, ids, drawing)) + moved(ids, settings.off)).tolist()

    with Off(model, dtype="float64") as server:
        flags = [
            "--rollout_server",
            server.url,
            "--importance_cap",
            1.05,
            "--num_iterations",
            2,
            "--max_steps",
            3,
        ]
        run = grpo(model, *flags)
    check_rollouts(run, settings, 2, 3)
    assert all(row["sampling/importance_clipped"] > 0 for row in run.rows)


@pytest.mark.parametrize("beta", [0.0, 0.2])
@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "grpo", "dr_grpo"])
def test_what_was_cut_or_not_rewarded_weighs_as_in_trl(loss_type, beta, grpo, model):
    """Completions that were cut, where they are masked, have neither loss nor KL, and their tokens are in no
    denominator; those that no function rewarded have no advantage, and are there in all else. Both are among
    the completions."""
    names = {
        "loss_type": loss_type,
        "beta": beta,
        "mask_truncated_completions": True,
        "steps_per_generation": 2,
    }
    flags, settings = Settings.flags(**names, num_generations=8, per_device_train_batch_size=16)
    rows = chat_rows(("any", "dumb", "any", "any"))
    run = grpo(model, *flags, "--max_steps", 2, rows=rows, rewards=("picky",))
    rollout = run.rollouts[0]
    for window in (rollout[:16], rollout[16:]):
        assert 0 < sum(is_trained(c, settings) for c in window) < 16
    assert run.rows[0]["completions/left_out_ratio"] == sum(not is_trained(c, settings) for c in rollout) / 32
    assert any(c.rewards == [None] and c.finished for c in rollout)
    assert any(c.rewards != [None] and not c.finished for c in rollout)
    check(run, settings)


def test_a_rollout_that_no_function_judges_has_no_gradient(grpo, model):
    flags, _ = Settings.flags(per_device_train_batch_size=4)
    run = grpo(
        model, *flags, "--max_steps", 4, rows=chat_rows(("dumb", "any", "dumb", "any")), rewards=("picky",)
    )
    for row, rollout, gradient in zip(run.rows, run.rollouts, run.grads, strict=True):
        judged = any(c.rewards != [None] for c in rollout)
        assert ("reward" in row) == judged and row["frac_idle_rollouts"] == (norm(gradient) == 0) == (
            not judged
        )
    assert sorted("reward" in row for row in run.rows) == [False, False, True, True]


def test_functions_count_by_their_weights(grpo, model):
    """reward is their weighted sum, without those that gave nothing; each has its own mean in the metrics."""
    flags, settings = Settings.flags(reward_weights=(1.0, -0.25), mask_truncated_completions=False)
    run = grpo(model, *flags, "--max_steps", 2, rewards=("picky", "second"))
    check(run, settings)
    for row, rollout in zip(run.rows, run.rollouts, strict=True):
        assert any(None in c.rewards and c.rewards != [None, None] for c in rollout)
        table = [combined(c.rewards, settings.reward_weights) for c in rollout]
        named = [[c.rewards[f] for c in rollout if c.rewards[f] is not None] for f in range(2)]
        logged = {"reward": statistics.mean(v for v in table if v is not None)}
        logged |= {
            f"rewards/{name}/mean": statistics.mean(v)
            for name, v in zip(("picky", "second"), named, strict=True)
        }
        logged |= {
            f"rewards/{name}/std": statistics.pstdev(v)
            for name, v in zip(("picky", "second"), named, strict=True)
        }
        assert_metrics(row, logged)


def test_the_metrics_of_a_rollout(grpo, model):
    """Lengths, what was cut, rewards and their spread."""
    run = grpo(model, "--max_steps", 2, rows=chat_rows(("any", "flat", "flat", "any")))
    for row, rollout in zip(run.rows, run.rollouts, strict=True):
        lengths = [len(c.ids) for c in rollout]
        groups = [[c.rewards[0] for c in rollout[at : at + 4]] for at in (0, 4)]
        logged = {
            "reward": statistics.mean(value for group in groups for value in group),
            "reward_std": statistics.mean(statistics.stdev(group) for group in groups),
            "frac_reward_zero_std": sum(len(set(group)) == 1 for group in groups) / 2,
            "completions/mean_length": statistics.mean(lengths),
            "completions/min_length": min(lengths),
            "completions/max_length": max(lengths),
            "completions/clipped_ratio": sum(not c.finished for c in rollout) / 8,
            "completions/mean_terminated_length": statistics.mean(len(c.ids) for c in rollout if c.finished),
        }
        assert_metrics(row, logged)


# --- the rollouts -------------------------------------------------------------------------------------------


def test_each_process_has_the_weights_of_its_own_completions():
    """Of the loss type in which they differ: the tokens of a completion weigh 1 / completions together."""
    lengths, found = [3, 5, 2, 9, 4, 1, 7, 6], []
    completions = []
    for n in lengths:
        given = {"prompt_ids": [7, 7]}, list(range(n)), [0.0] * n, True, "", [1.0], True, 1.0, 1.0
        completions.append(train_grpo.Completion(*given))
    args = train_grpo.Args(loss_type="grpo", steps_per_generation=2)
    for rank in range(2):
        for window in train_grpo.make_windows(completions, args, process(rank, 2, 2)):
            for sequence in window.sequences:
                found.append(int(sequence["loss_mask"].sum()))
                assert sequence["token_weight"].sum() == pytest.approx(1 / 4)
    assert sorted(found) == sorted(lengths)


def test_rollouts_follow_the_data(grpo, model):
    """G completions of a prompt stand together; rollouts do not overlap, and each prompt comes once in an
    epoch, which is what num_train_epochs counts."""
    flags = ["--per_device_train_batch_size", 4, "--steps_per_generation", 2, "--learning_rate", 0]
    run = grpo(model, *flags, "--num_train_epochs", 2.6)  # the last rollout begins within it
    assert len(run.rows) == 12 and len(run.rollouts) == 6 and run.starts == [0, 2, 4, 6, 8, 10]
    orders = []
    for rollout in run.rollouts:
        prompts = [tuple(c.prompt_ids) for c in rollout]
        assert prompts == [prompt for prompt in prompts[::4] for _ in range(4)]
        assert len({tuple(c.ids) for c in rollout[:4]}) > 1  # which are not the same completion
        orders += prompts[::4]
    everything = sorted(tuple(prompt_ids(row["prompt"])) for row in chat_rows())
    epochs = [orders[at : at + 4] for at in (0, 4, 8)]
    assert all(sorted(epoch) == everything for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1  # not always in the same order


def test_each_rollout_is_drawn_anew(grpo, model):
    """The same prompts and weights give other completions in each rollout and with another seed, and the same
    ones again."""
    flags = ["--per_device_train_batch_size", 4, "--learning_rate", 0, "--max_steps", 3]
    rows = chat_rows()[:1]
    run = grpo(model, *flags, rows=rows)
    again = grpo(model, *flags, rows=rows, output="again")
    other = grpo(model, *flags, "--seed", 1, rows=rows, output="other")
    drawn, same, seeded = ([[c.ids for c in rollout] for rollout in r.rollouts] for r in (run, again, other))
    assert drawn == same
    assert len({str(rollout) for rollout in drawn + seeded}) == 6
    everything = [str(ids) for rollout in drawn for ids in rollout]
    assert len(set(everything)) > 8  # no few completions that come again at other places


def test_top_k_and_top_p_restrict_the_sampling_alone(grpo, model):
    """Every sampled token is among the k most probable, or in the nucleus at the sampling temperature;
    log-probabilities in the loss are those of the whole distribution."""
    lm = exact(model)
    for name, value in (("top_k", 3), ("top_p", 0.4)):
        flags, settings = Settings.flags(temperature=0.7, num_iterations=2)
        run = grpo(model, *flags, f"--{name}", value, "--max_steps", 2, output=name)
        check(run, settings)
        for completion in run.rollouts[0]:
            with torch.no_grad():
                logits = logits_of(lm, completion.prompt_ids + completion.ids)[
                    len(completion.prompt_ids) - 1 : -1
                ]
            probs = (logits / 0.7).softmax(-1)
            own = probs.gather(-1, torch.tensor(completion.ids)[:, None])
            # what is more probable than the token that was sampled
            above = torch.where(probs > own, probs, 0.0)
            assert ((above > 0).sum(-1) < 3).all() if name == "top_k" else (above.sum(-1) < 0.4 + 1e-5).all()


def test_prompts_are_what_the_template_makes_of_them(grpo, model):
    """A system prompt makes a chat of a prompt that is a string; one that is too long is left out."""
    system = "Be short."
    longest = sorted(len(prompt_ids(chat(row["prompt"], system=system))) for row in text_rows())
    flags = [
        "--system_prompt",
        system,
        "--max_prompt_length",
        longest[2],
        "--per_device_train_batch_size",
        12,
    ]
    run = grpo(model, *flags, "--max_steps", 1, rows=text_rows())
    chats = [chat(row["prompt"], system=system) for row in text_rows()]
    wanted = sorted(prompt_ids(chat) for chat in chats if len(prompt_ids(chat)) <= longest[2])
    assert len(wanted) == 3 and sorted(c.prompt_ids for c in run.rollouts[0][::4]) == wanted
    check(run, Settings(per_device_train_batch_size=12))


def test_evaluation_completes_held_out_prompts(launch, model, tmp_path):
    """Greedily, with the weights of the rewards, where no file of prompts and no other functions are
    named."""
    (tmp_path / "rewards.py").write_text(REWARDS)
    names = ["--dataset_name", write_rows(tmp_path / "train.jsonl", chat_rows())]
    names += [
        "--eval_dataset_name",
        write_rows(tmp_path / "held_out.jsonl", text_rows()),
        "--eval_prompts",
        "",
    ]
    names += ["--reward_funcs", f"{tmp_path / 'rewards.py'}:count", f"{tmp_path / 'rewards.py'}:rest"]
    names += [
        "--reward_weights",
        1,
        -0.25,
        "--eval_temperatures",
        0,
        "--eval_max_new_tokens",
        LONGEST,
        "--eval_steps",
        1,
    ]
    names += ["--num_generations", 2, "--max_completion_length", 2, "--max_steps", 1, "--learning_rate", 0]
    run = watched(launch, "grpo", model, *names)
    lm, answers = exact(model), []
    for row in text_rows():
        ids = prompt_ids(row["prompt"])
        answer = []
        while len(answer) < LONGEST and not set(answer) & set(STOPS):
            with torch.no_grad():
                answer.append(logits_of(lm, ids + answer)[-1].argmax().item())
        answers.append(answer)
    count, rest = (statistics.mean(map(f, answers)) for f in (len, lambda ids: sum(ids) % 7))
    assert len(run.evals) == 2
    for row in run.evals:
        assert_metrics(row, {"eval_count": count, "eval_rest": rest, "eval_reward": count - 0.25 * rest})


@pytest.mark.parametrize(
    "stage", ["grpo", *(pytest.param(stage, marks=pytest.mark.slow) for stage in ("ppo", "distill"))]
)
def test_prompts_of_a_file_are_made_as_those_of_training(stage, launch, model, tmp_path):
    """Of --eval_prompts, with the system prompt, and within the length. Functions of their own have no sum:
    the weights are those of training's."""
    rows = [{"question": "Hi"}, {"prompt": chat("Hi", system="Sing.")}, {"prompt": "word " * 99}]
    words = ["--dataset_name", write_rows(tmp_path / "train.jsonl", text_rows()), "--max_prompt_length", 60]
    words += ["--eval_prompts", write_rows(tmp_path / "prompts.jsonl", rows), "--system_prompt", "Be short."]
    words += ["--columns", "prompt=question", "--eval_reward_funcs", "length:2"]
    words += ["--reward_funcs", "length:4"] if stage != "distill" else ["--teacher_model_name_or_path", model]
    words += ["--num_generations", 2] if stage == "grpo" else []
    words += ["--max_completion_length", 2, "--max_steps", 1, "--eval_max_new_tokens", 2, "--eval_steps", 1]
    run = watched(launch, stage, model, *words, extra=4 * (stage == "ppo"))
    assert [name for name in run.evals[0] if "length" in name or "reward" in name] == ["eval_length"]
    seen = [row["prompt"] for row in read_rows(run.output / "samples.jsonl")]
    assert (
        len(seen) % 2 == 0
        and seen[:2] == [chat("Hi", system="Be short."), chat("Hi", system="Sing.")]
        and "word" not in str(seen)
    )


# --- the rest -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DROPOUT)
def test_dropout_is_off(kind, grpo, tmp_path):
    """Of a model with dropout, sampled, old, reference and trained log-probabilities are all exact: at a rate
    of 0 no KL."""
    model = make_model(tmp_path / "model", kind, stops=5.0)
    flags, settings = Settings.flags(beta=0.5, num_iterations=2, temperature=0.7)
    run = grpo(model, *flags, "--max_steps", 2, "--learning_rate", 0)
    assert check(run, settings) == pytest.approx([0, 0], abs=1e-6)
    for row in run.rows:
        assert row["kl"] == pytest.approx(0, abs=1e-6) and row["clip_ratio/region_mean"] == 0
