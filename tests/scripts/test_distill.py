"""experiments/train_distill.py against float64: whose completions, how far from the teacher, and that logits
come in chunks."""

from common.errors import UserError
from common.model.fused_head import HEAD_CHUNK_ELEMENTS, HEAD_CHUNK_ROWS
import pytest
import torch

import experiments.train_distill as script
from tests.conftest import read_rows, write_rows
from tests.scripts.grpo_by_hand import CHATS, STOPS, chat_rows
from tests.scripts.one_step import assert_metrics, assert_step, exact, logits_of, make_model, watched
from tests.scripts.texts import END, chat, ids_of, prompt_ids, tokenizer

LONGEST = 6
ANSWERS = ["3+4=7. Answer: 7", "Hello! How are you?", "6", "13."]
CHUNK = 4  # rows


def rows():
    return [{"messages": chat(question, answer)} for question, answer in zip(CHATS, ANSWERS, strict=True)]


@pytest.fixture(scope="module")
def models(model, tmp_path_factory):
    """The student, and a teacher of another architecture, with the same tokens in a vocabulary that is padded
    to more."""
    return model, make_model(tmp_path_factory.mktemp("models") / "teacher", "qwen3", vocab_size=520)


@pytest.fixture
def distill(launch, models, tmp_path, monkeypatch):
    """distill(*flags): the run; run.rollouts: what each step trains on, run.chunks: the rows of all logits
    that were there."""

    def start(*flags, data=None, output="out", student=models[0]):
        made, measured, rollouts, chunks = script.make_window, script.generalized_jsd, [], []

        def make_window(completions, *args):
            rollouts.append([(c.prompt["prompt_ids"], c.ids, c.finished, c.sampled) for c in completions])
            return made(completions, *args)

        def jsd(logits, teacher_logits, beta):
            chunks.append(max(len(logits), len(teacher_logits)))
            return measured(logits, teacher_logits, beta)

        words = [
            "--dataset_name",
            write_rows(tmp_path / f"{output}.jsonl", data or rows()),
            "--learning_rate",
            "2e-3",
        ]
        words += ["--teacher_model_name_or_path", models[1], "--per_device_train_batch_size", 4]
        words += ["--gradient_accumulation_steps", 2, "--max_completion_length", LONGEST]
        with monkeypatch.context() as patch:
            patch.setitem(HEAD_CHUNK_ELEMENTS, "cpu", 1)
            patch.setitem(HEAD_CHUNK_ROWS, "cpu", CHUNK)
            patch.setattr(script, "make_window", make_window)
            patch.setattr(script, "generalized_jsd", jsd)
            run = watched(launch, "distill", student, *words, *flags, output=output)
        run.rollouts, run.chunks = rollouts, chunks
        return run

    return start


# --- the same by hand ---------------------------------------------------------------------------------------


def next_logps(lm, prompt, ids, temperature):
    """(n, V): what the model says before each token of a completion, of the tokens that there are."""
    return (logits_of(lm, prompt + ids)[len(prompt) - 1 : -1, :512] / temperature).log_softmax(-1)


def kl(p, q):
    return (p.exp() * (p - q)).sum(-1)


def window_loss(policy, teacher, rollout, beta, temperature, shown=None):
    """The loss (2306.13649), and its means over what was sampled and what is the data's. shown: of each
    prompt, what the teacher reads instead."""
    parts = {True: [], False: []}
    for prompt, ids, _, sampled in rollout:
        s = next_logps(policy, prompt, ids, temperature)
        with torch.no_grad():
            read = shown[tuple(prompt)] if shown else prompt
            t = next_logps(teacher, read, [min(token, 511) for token in ids], temperature)
        if beta in (0, 1):
            parts[sampled].append(kl(s, t) if beta else kl(t, s))
        else:
            m = (beta * t.exp() + (1 - beta) * s.exp()).log()
            parts[sampled].append(beta * kl(t, m) + (1 - beta) * kl(s, m))
    loss = torch.cat(parts[True] + parts[False]).mean()
    names = {True: "loss/sampled", False: "loss/data"}
    return loss, {names[kind]: torch.cat(found).mean().item() for kind, found in parts.items() if found}


SLOW = pytest.mark.slow
CASES = [(0.3, 0.35), pytest.param(1.0, 1.0, marks=SLOW), pytest.param(0.0, 0.0, marks=SLOW)]


@pytest.mark.parametrize(("beta", "lmbda"), CASES)
def test_a_step_is_that_of_the_paper(beta, lmbda, distill, models):
    """A share of sampled completions among those of the data, at a temperature; the logits are never all
    there."""
    run = distill("--beta", beta, "--lmbda", lmbda, "--temperature", 0.7, "--max_steps", 3)
    teacher, data = exact(models[1]), {}
    for question, answer in zip(CHATS, ANSWERS, strict=True):
        data[tuple(prompt_ids(chat(question)))] = ids_of(answer + END)
    lines, sampled = read_rows(run.output / "completions.jsonl"), 0
    for step, rollout in enumerate(run.rollouts):
        policy = run.policy(step)
        loss, logged = window_loss(policy, teacher, rollout, beta, 0.7)
        assert_step(run, step, policy, loss, {"loss": loss.item()} | logged, rel=3e-4)
        assert not {"loss/sampled", "loss/data"} & run.rows[step].keys() - logged.keys()
        for (prompt, ids, finished, is_sampled), line in zip(
            rollout, lines[step * 8 : step * 8 + 8], strict=True
        ):
            assert (line["finished"], line["sampled"]) == (finished, is_sampled)
            assert line["completion"] == tokenizer().decode(ids, skip_special_tokens=True)
            assert is_sampled or ids == data[tuple(prompt)][:LONGEST]
            assert finished == (ids[-1] in STOPS)
            sampled += is_sampled
    assert sampled == int(24 * lmbda + 1e-9)
    assert 1 < max(run.chunks) <= CHUNK


def test_a_teacher_need_not_know_the_padding_of_the_student_s_vocabulary(distill, models, tmp_path):
    """Qwen2.5's vocabulary has 151,936 tokens in small models and 152,064 in large ones, for one
    tokenizer."""
    padded = make_model(tmp_path / "padded", vocab_size=700)
    run = distill("--teacher_model_name_or_path", models[0], "--max_steps", 1, student=padded)
    assert max(token for _, ids, *_ in run.rollouts[0] for token in ids) >= 512
    loss, _ = window_loss(run.policy(0), exact(models[0]), run.rollouts[0], 1.0, 1.0)
    assert_metrics(run.rows[0], {"loss": loss.item()}, rel=3e-4)


def test_a_teacher_of_other_tokens_is_refused(distill, tmp_path):
    other = make_model(tmp_path / "other", "qwen3")
    longer = tokenizer().__class__.from_pretrained(other)
    longer.add_tokens(["zebra"])
    longer.save_pretrained(other)
    with pytest.raises(UserError, match="--teacher_model_name_or_path.*'zebra'"):
        distill("--teacher_model_name_or_path", other, "--max_steps", 1)


def test_each_completion_is_drawn_anew(distill):
    """One prompt and weights that stay: other completions at each place and in each rollout."""
    run = distill("--max_steps", 2, "--learning_rate", 0, data=chat_rows()[:1])
    drawn = [[tuple(ids) for _, ids, *_ in rollout] for rollout in run.rollouts]
    assert all(len({*rollout}) > 4 for rollout in drawn) and drawn[0] != drawn[1]
    assert sum(one == other for one, other in zip(*drawn, strict=True)) < 4


def test_prompts_alone_will_do_where_all_is_sampled(distill):
    run = distill("--max_steps", 1, data=chat_rows())
    assert all(sampled for *_, sampled in run.rollouts[0])


# --- self-distillation --------------------------------------------------------------------------------------


def test_the_teacher_of_self_distillation_has_seen_the_demonstration(launch, model, tmp_path, monkeypatch):
    """2601.19897: the model at the start, after question and answer, and the question again."""
    import experiments.train_self_distill as script

    made, rollouts = script.make_window, []

    def make_window(completions, *args):
        rollouts.append([(c.prompt["prompt_ids"], c.ids, c.finished, c.sampled) for c in completions])
        return made(completions, *args)

    monkeypatch.setattr(script, "make_window", make_window)
    no_question = [chat("q"), chat("q", "a") + chat("q", "b")[1:], chat("q" * 999, "a")]  # or a long one
    bad = [{"messages": found} for found in no_question] + [{"prompt": "q", "completion": chat("q", "a")[1:]}]
    longer = chat("Hi", "Hello!", "How much is 9-4-1?", "4")
    data = write_rows(tmp_path / "rows.jsonl", [*rows(), {"messages": longer}, *bad])
    words = ["--dataset_name", data, "--per_device_train_batch_size", 4, "--max_steps", 3]
    words += [
        "--gradient_accumulation_steps",
        2,
        "--max_completion_length",
        LONGEST,
        "--learning_rate",
        "2e-3",
    ]
    run = watched(launch, "self_distill", model, *words, "--lmbda", 0.5, "--beta", 0.4, "--temperature", 0.7)
    shown = {
        tuple(prompt_ids(chat(question))): prompt_ids(chat(question, answer, question))
        for question, answer in zip(CHATS, ANSWERS, strict=True)
    }
    shown[tuple(prompt_ids(longer[:-1]))] = prompt_ids([*longer, longer[-2]])
    # of the rows that have a question and its answer, and are not too long
    for step, rollout in enumerate(rollouts):
        policy = run.policy(step)
        loss, logged = window_loss(policy, exact(model), rollout, 0.4, 0.7, shown)
        assert len(logged) == 2
        assert_step(run, step, policy, loss, {"loss": loss.item()} | logged, rel=3e-4)
