"""experiments/train_tools.py: episodes against float64 and the chat template, the contract of environments,
and their limits."""

import asyncio
import importlib
import json
import random
import sys
import time

from common.sampling import Sampled, sample
import pytest
import torch

from experiments.environments import Calculator, HigherOrLower
from experiments.tool_calls import Call, describe_tools
from tests.conftest import read_rows, write_rows
from tests.scripts.grpo_by_hand import CHATS
from tests.scripts.one_step import assert_gradient, gradient_of, token_scores, watched
from tests.scripts.texts import chat, prompt_ids, tokenizer
from tests.scripts.tool_forms import tokenizer_of

script = importlib.import_module("experiments.train_tools")
END = 2  # <|im_end|>
ENVIRONMENTS = '''
import json, random
from pathlib import Path


class Counter:
    """It counts how often it was called, and has a start that is drawn."""

    def reset(self, seed, prompt, kind, **columns):
        self.n = random.Random(seed).randint(0, 9)
        self.kind, self.said = kind, []
        return f" Start: {self.n}." if kind == "told" else None

    def count(self, word: str) -> str:
        """
        Count on.

        Args:
            word: anything
        """
        self.n += 1
        self.said.append(word)
        if self.n % 4 == 0:
            raise ValueError(f"{self.n} cannot be said")
        return f"now {self.n} <|im_end|>"

    def get_reward(self):
        return self.n / 10 + len("".join(self.said)) % 7


def rating(environments, completions, completion_ids, **columns):
    """Another reward, which keeps what it sees."""
    with open(Path(__file__).with_name("seen.jsonl"), "a") as file:
        for e, messages, ids in zip(environments, completions, completion_ids):
            file.write(json.dumps({"n": e.n, "said": e.said, "messages": messages, "ids": ids}) + "\\n")
    return [sum(ids) * 37 % 11 / 10 for ids in completion_ids]
'''


@pytest.fixture
def calling(monkeypatch):
    """A random model writes no call: here each turn that ends as turns do is one, or three of four are."""

    def read_turn(ids, before, tokenizer, tools):
        text = tokenizer.decode(ids)
        message = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
        return message, [Call("count", {"word": text[:3]})] if sum(text.encode()) % 4 else []

    monkeypatch.setattr(script, "read_turn", read_turn)


@pytest.fixture
def flags(tmp_path, monkeypatch):
    """Of a run over four chats with Counter: two of them are told where it starts."""
    (tmp_path / "environments.py").write_text(ENVIRONMENTS)
    rows = [{"prompt": chat(text), "kind": ("told", "any")[i % 2]} for i, text in enumerate(CHATS)]
    found = ["--dataset_name", write_rows(tmp_path / "prompts.jsonl", rows), "--num_generations", 4]
    found += ["--environment_factory", f"{tmp_path}/environments.py:Counter", "--max_completion_length", 64]
    found += ["--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 4]
    return [*found, "--learning_rate", "5e-4", "--max_tool_calling_iterations", 3]


@pytest.fixture
def completions(monkeypatch):
    """All completions that the runs of a test make windows of."""
    kept, make_windows = [], script.make_windows

    def keep(found, *args):
        kept.extend(found)
        return make_windows(found, *args)

    monkeypatch.setattr(script, "make_windows", keep)
    return kept


def turns_of(c):
    """The stretches of a completion's ids: (sampled?, ids)."""
    found = []
    for token, is_sampled in zip(c.ids, c.sampled, strict=True):
        if not found or found[-1][0] != is_sampled:
            found.append((is_sampled, []))
        found[-1][1].append(token)
    return found


def test_a_step_is_that_of_the_formula_over_the_sampled_tokens(
    launch, model, flags, calling, completions, tmp_path
):
    """In float64, one sequence at a time; tokens of tools, the framing that the template writes, and episodes
    that were cut are not trained."""
    rewards = [
        "--reward_funcs",
        f"{tmp_path}/environments.py:rating",
        "--reward_weights",
        "0.5",
        "--max_steps",
        1,
    ]
    run = watched(launch, "tools", model, *flags, *rewards, "--mask_truncated_completions")
    policy, seen = run.policy(0), read_rows(tmp_path / "seen.jsonl")
    assert len(completions) == len(seen) == 16 and sum(c.calls for c in completions) > 6
    assert {len(turns_of(c)) for c in completions} >= {1, 3, 5}
    assert {c.finished for c in completions} == {True, False}
    loss, count = 0.0, sum(sum(c.sampled) for c in completions if c.finished)
    for at, (c, s) in enumerate(zip(completions, seen, strict=True)):
        # The prompt, with what reset has added, which is the same for the completions of a prompt.
        assert c.prompt["prompt_ids"] == prompt_ids(c.prompt["prompt"])
        start = c.prompt["prompt"][0]["content"].partition(" Start: ")[2]
        assert bool(start) == (c.prompt["kind"] == "told")
        assert c.prompt["prompt"] == completions[at - at % 4].prompt["prompt"]
        # Between two turns stands what the template writes there, of the messages that the reward has seen.
        before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        stretches, said = turns_of(c), [m for m in s["messages"] if m["role"] == "tool"]
        assert s["ids"] == [token for is_sampled, ids in stretches if is_sampled for token in ids]
        assert [m["role"] for m in s["messages"]] == ["assistant", *["tool", "assistant"] * len(said)]
        for (_, ids), message in zip(stretches[1::2], said, strict=True):
            shown = message["content"].replace("<|im_end|>", "<X>")  # spelled out, it is no special token
            text = tokenizer().apply_chat_template(
                [*before, message | {"content": shown}], tokenize=False, add_generation_prompt=True
            )
            wanted = text.partition("b<|im_end|>")[2]
            assert tokenizer().decode(ids) == wanted.replace("<X>", "<|im_end|>")
            assert ids.count(END) == 1
        assert all(ids[-1] == END for is_sampled, ids in stretches[:-1:2])
        # What the environment has said and counted: an error is told, and counted as a failure.
        n = s["n"] - len(s["said"])
        for i, message in enumerate(said, start=n + 1):
            assert message["content"] == (
                f"error: {i} cannot be said" if i % 4 == 0 else f"now {i} <|im_end|>"
            )
        own, other = s["n"] / 10 + len("".join(s["said"])) % 7, sum(s["ids"]) * 37 % 11 / 10
        assert c.rewards == pytest.approx([other, own]) and c.reward == pytest.approx(0.5 * other + own)
        logps, mask = token_scores(policy, c.prompt["prompt_ids"] + c.ids)[0], torch.tensor(c.sampled)
        logps = logps[-len(c.ids) :] * mask
        torch.testing.assert_close(
            torch.tensor(c.logps, dtype=torch.float64), logps.detach(), atol=1e-4, rtol=0
        )
        loss = loss - c.finished * c.advantage * logps.sum() / count
    for first in range(0, 16, 4):
        group = torch.tensor([c.reward for c in completions[first : first + 4]], dtype=torch.float64)
        wanted = (group - group.mean()) / (group.std() + 1e-4)
        assert [c.advantage for c in completions[first : first + 4]] == pytest.approx(
            wanted.tolist(), abs=1e-6
        )
    assert_gradient(run.grads[0], gradient_of(policy, loss), scale=None)
    (row,) = run.rows
    assert row["tools/call_frequency"] == sum(c.calls for c in completions) / 16
    assert row["tools/failure_frequency"] == sum(c.failures for c in completions) / sum(
        c.calls for c in completions
    )
    assert row["completions/mean_length"] == sum(sum(c.sampled) for c in completions) / 16
    assert row["sampling/logp_difference"] < 1e-5


@pytest.mark.slow
def test_an_episode_ends_where_its_limits_are_and_does_not_depend_on_the_batch(
    launch, model, flags, calling, completions, monkeypatch
):
    words = [*flags, "--model_name_or_path", model, "--max_steps", 1, "--eval_steps", 0, "--save_steps", 0]
    keys = []
    with monkeypatch.context() as patch:
        kept = lambda model, prompts, k, **options: keys.extend(k) or sample(model, prompts, k, **options)  # noqa: E731
        patch.setattr("common.sampling.sampler.sample", kept)
        launch("tools", *words, "--max_steps", 2, output="whole")
    # no turn draws as another does
    assert keys[:16] == [(0, 0, i, 0) for i in range(16)] and len({*keys}) == len(keys) > 32
    whole = completions[:16]
    completions.clear()
    launch("tools", *words, "--generation_batch_size", 3, output="parts")
    assert [(c.ids, c.sampled, c.rewards) for c in completions] == [
        (c.ids, c.sampled, c.rewards) for c in whole
    ]
    cut = []
    for limit in (18, 24, 32):
        completions.clear()
        short = ["--max_tool_calling_iterations", 1, "--max_completion_length", limit]
        launch("tools", *words, *short, output=f"short{limit}")
        for c, free in zip(completions, whole, strict=True):
            assert c.ids == free.ids[: len(c.ids)] and len(c.ids) <= limit and c.calls <= 1
            assert c.finished == (len(c.ids) == len(free.ids) and free.finished)
            # no answer of a tool stands at the end
            assert c.sampled[-1] == 1 and c.messages[-1]["role"] == "assistant"
            cut.append((c.finished, c.calls, len(c.ids) == limit))
    assert {finished for finished, *_ in cut} == {True, False}
    assert any(calls and full for _, calls, full in cut)  # a later turn was cut


def test_held_out_episodes_have_a_temperature_of_their_own(launch, model, flags, calling, tmp_path):
    """That of training makes no difference to them; one that is not 0 does."""
    held_out = [
        "--eval_dataset_name",
        tmp_path / "prompts.jsonl",
        "--eval_steps",
        1,
        "--max_steps",
        1,
        "--learning_rate",
        0,
    ]
    said = {}
    for name, words in {"1": ["--temperature", 1.0], "2": ["--temperature", 2.0]}.items():
        output = launch(
            "tools",
            *flags,
            *held_out,
            *words,
            "--model_name_or_path",
            model,
            "--eval_temperatures",
            0,
            1.0,
            output=name,
        )
        rows = read_rows(output / "samples.jsonl")
        said[name] = {t: [row["completion"] for row in rows if row["temperature"] == t] for t in (0, 1)}
    assert said["1"] == said["2"] and said["1"][0] != said["1"][1] and len(said["1"][0]) == 2 * len(CHATS)


class Office:
    """Tools of every kind of behaviour. Those that meet go on only when all four are there."""

    def __init__(self, meeting):
        self.meeting = meeting

    async def meet(self, name: str) -> str:
        """
        Meet the others.

        Args:
            name: who comes
        """
        self.meeting.append(name)
        while len(self.meeting) < 4:
            await asyncio.sleep(0)
        return f"{name} has met {len(self.meeting)}"

    async def wait(self) -> str:
        """Wait for ever."""
        await asyncio.sleep(1e6)

    def sleep(self) -> str:
        """Sleep for long."""
        time.sleep(1e6)

    def leave(self) -> str:
        """End it all."""
        sys.exit()

    async def fail(self) -> str:
        """Raise an error."""
        raise ValueError("the wire is cut")


def test_tools_of_a_turn_run_at_the_same_time_and_a_failed_or_slow_one_is_an_answer():
    """Of two episodes; the answers are in the order of the calls."""
    chats = tokenizer_of("JSON")
    meeting = []
    offices = [Office(meeting), Office(meeting)]
    names = ["meet", "wait", "sleep", "leave", "fail"]
    tools = describe_tools([getattr(offices[0], name) for name in names], chats)
    args = script.Args(environment_factory="x.py:Y", tool_timeout=0.2, max_completion_length=4000)
    calls = [
        ("meet", "a"),
        ("wait", ""),
        ("sleep", ""),
        ("leave", ""),
        ("fail", ""),
        ("none", ""),
        ("meet", "b"),
    ]
    turns, completions = [], []
    for office in offices:
        text = ""
        for name, word in calls:
            arguments = {"name": word} if word else {}
            text += f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        ids = chats(text + "<|im_end|>").input_ids
        prompt = {"prompt_ids": chats("<|im_start|>assistant\n").input_ids}
        c = script.Completion(prompt, [], [], False, "", [], True, environment=office)
        completions.append(c)
        sampled = Sampled(ids, [0.0] * len(ids), finished=True)
        turns.append(script.end_turn(args, chats, tools, c, sampled, is_last=False))
    assert asyncio.run(script.end_turns(*turns)) == [True, True]
    slow = "error: it took more than 0.2 s"
    wanted = ["a has met 4", slow, slow, "error: SystemExit", "error: the wire is cut"]
    wanted += ["error: there is no tool none: meet, wait, sleep, leave, fail", "b has met 4"]
    for c in completions:
        assert [m["content"] for m in c.messages if m["role"] == "tool"] == wanted
        assert (c.calls, c.failures) == (7, 5)


def test_the_environments_of_the_demo():
    calculator = Calculator()
    assert [calculator.calculate(e) for e in ("12+30-7", "7", "1-9")] == ["35", "7", "-8"]
    for wrong in ("", "1+", "2*3", "1 + 2", "__import__('os')", "1" * 10):
        with pytest.raises(ValueError, match="whole numbers"):
            calculator.calculate(wrong)
    game = HigherOrLower()
    game.reset(seed=5)
    hidden = random.Random(5).randint(1, 20)
    assert game.guess(str(hidden - 1)) == "higher" and game.get_reward() == 0
    assert game.guess(str(hidden)) == "yes" and game.get_reward() == pytest.approx(5 / 6)
    with pytest.raises(ValueError, match="over"):
        game.guess("1")
