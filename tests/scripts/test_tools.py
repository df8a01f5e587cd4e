"""experiments/train_tools.py: episodes against float64 and the chat template, the contract of environments, and their limits."""

import asyncio
import importlib
import json
import random
import sys
import time
from types import SimpleNamespace

from common.errors import UserError
from common.sampling import Sampled, sample
from experiments.environments import Calculator, HigherOrLower
from experiments.tool_calls import describe_tools
from tests.conftest import read_metrics, run_script, train_metrics, words_of
from tests.run.test_resume import Stop, stop_after_save
from tests.scripts.one_step import (
    assert_gradient,
    gradient_of,
    ids_of,
    make_model,
    read_rows,
    token_scores,
    tokenizer,
    watched,
    write_rows,
)
from tests.scripts.test_equivalence import COMMON, assert_same, free_port, losses
from tests.scripts.test_tool_calls import HERMES

import numpy as np
import pytest
import torch

script = importlib.import_module("experiments.train_tools")
END = 2  # <|im_end|>
CHATS = ["What is 3+4?", "Hi", "Eva has 10 figs. She loses 4. How many figs now?", "Which number comes before 14?"]
ENVIRONMENTS = '''
import functools, json, random
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


class Lazy(Counter):
    def reset(self, **columns):
        return None

    get_reward = None


class Broken(Counter):
    def reset(self, **columns):
        raise RuntimeError("no server")


class Odd(Counter):
    table = {"a": "b"}

    @property
    def price(self):
        raise ValueError("no price yet")

    @staticmethod
    def add(one: str) -> str:
        """
        Add to it.

        Args:
            one: a number
        """
        return one + "+"

    @classmethod
    def name(cls, of: str) -> str:
        """
        Name it.

        Args:
            of: what
        """
        return cls.__name__ + of

    @functools.lru_cache
    def twice(self, word: str) -> str:
        """
        Say it twice.

        Args:
            word: what
        """
        return word * 2

    @staticmethod
    def _helper():
        pass


class Kept(dict, Counter):
    pass


class Bare(Counter):
    @staticmethod
    def helper(x):
        return x


class Idle:
    def nothing(self) -> str:
        """Nothing."""
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "llama", stops=5.0)


@pytest.fixture
def calling(monkeypatch):
    """A random model writes no call: here each turn that ends as turns do is one, or three of four are."""

    def read_calls(text, tools):
        return [{"name": "count", "arguments": {"word": text[:3]}}] if sum(text.encode()) % 4 else []

    monkeypatch.setattr(script, "read_calls", read_calls)


@pytest.fixture
def flags(tmp_path, monkeypatch):
    """Of a run over four chats with Counter: two of them are told where it starts."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # no curves.png: it takes longer than the run
    (tmp_path / "environments.py").write_text(ENVIRONMENTS)
    rows = [{"prompt": [{"role": "user", "content": text}], "kind": ("told", "any")[i % 2]} for i, text in enumerate(CHATS)]
    found = ["--dataset_name", write_rows(tmp_path / "prompts.jsonl", rows), "--num_generations", 4]
    found += ["--environment_factory", f"{tmp_path}/environments.py:Counter", "--max_completion_length", 64]
    return [*found, "--per_device_train_batch_size", 16, "--learning_rate", "5e-4", "--max_tool_calling_iterations", 3]


@pytest.fixture
def completions(monkeypatch):
    """All completions that the runs of a test make windows of."""
    kept, make_windows = [], script.make_windows

    def keep(found, *args):
        kept.extend(found)
        return make_windows(found, *args)

    monkeypatch.setattr(script, "make_windows", keep)
    return kept


def chat_ids(messages):
    return ids_of(tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def turns_of(c):
    """The stretches of a completion's ids: (sampled?, ids)."""
    found = []
    for token, is_sampled in zip(c.ids, c.sampled, strict=True):
        if not found or found[-1][0] != is_sampled:
            found.append((is_sampled, []))
        found[-1][1].append(token)
    return found


def test_a_step_is_that_of_the_formula_over_the_sampled_tokens(launch, model, flags, calling, completions, tmp_path):
    """In float64, one sequence at a time; tokens of tools, and the framing that the template writes, are not trained."""
    rewards = ["--reward_funcs", f"{tmp_path}/environments.py:rating", "--reward_weights", "0.5", "--max_steps", 1]
    run = watched(launch, "tools", model, *flags, *rewards)
    policy, seen = run.policy(0), read_rows(tmp_path / "seen.jsonl")
    assert len(completions) == len(seen) == 16 and sum(c.calls for c in completions) > 6
    assert {len(turns_of(c)) for c in completions} >= {1, 3, 5}
    loss, count = 0.0, sum(sum(c.sampled) for c in completions)
    for at, (c, s) in enumerate(zip(completions, seen, strict=True)):
        # The prompt, with what reset has added, which is the same for the completions of a prompt.
        assert c.prompt["prompt_ids"] == chat_ids(c.prompt["prompt"])
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
            assert message["content"] == (f"error: {i} cannot be said" if i % 4 == 0 else f"now {i} <|im_end|>")
        own, other = s["n"] / 10 + len("".join(s["said"])) % 7, sum(s["ids"]) * 37 % 11 / 10
        assert c.rewards == pytest.approx([other, own]) and c.reward == pytest.approx(0.5 * other + own)
        logps, mask = token_scores(policy, c.prompt["prompt_ids"] + c.ids)[0], torch.tensor(c.sampled)
        logps = logps[-len(c.ids) :] * mask
        torch.testing.assert_close(torch.tensor(c.logps, dtype=torch.float64), logps.detach(), atol=1e-4, rtol=0)
        loss = loss - c.advantage * logps.sum() / count
    for first in range(0, 16, 4):
        group = torch.tensor([c.reward for c in completions[first : first + 4]], dtype=torch.float64)
        wanted = (group - group.mean()) / (group.std() + 1e-4)
        assert [c.advantage for c in completions[first : first + 4]] == pytest.approx(wanted.tolist(), abs=1e-6)
    assert_gradient(run.grads[0], gradient_of(policy, loss), scale=None)
    (row,) = run.rows
    assert row["tools/call_frequency"] == sum(c.calls for c in completions) / 16
    assert row["tools/failure_frequency"] == sum(c.failures for c in completions) / sum(c.calls for c in completions)
    assert row["completions/mean_length"] == count / 16
    assert row["sampling/logp_difference"] < 1e-5


def test_an_episode_ends_where_its_limits_are_and_does_not_depend_on_the_batch(
    launch, model, flags, calling, completions, monkeypatch
):
    words = [*flags, "--model_name_or_path", model, "--max_steps", 1, "--eval_steps", 0, "--save_steps", 0]
    keys = []
    with monkeypatch.context() as patch:
        kept = lambda model, prompts, k, **options: keys.extend(k) or sample(model, prompts, k, **options)  # noqa: E731
        patch.setattr("common.sampling.sampler.sample", kept)
        launch("tools", *words, output="whole")
    assert keys[:16] == [(0, 0, i, 0) for i in range(16)] and len({*keys}) == len(keys) > 16  # no turn draws as another does
    whole = list(completions)
    completions.clear()
    launch("tools", *words, "--generation_batch_size", 3, output="parts")
    assert [(c.ids, c.sampled, c.rewards) for c in completions] == [(c.ids, c.sampled, c.rewards) for c in whole]
    completions.clear()
    launch("tools", *words, "--max_tool_calling_iterations", 1, "--max_completion_length", 24, output="short")
    for c, free in zip(completions, whole, strict=True):
        assert c.ids == free.ids[: len(c.ids)] and len(c.ids) <= 24 and c.calls <= 1 and sum(1 - s for s in c.sampled) < 24
        assert c.finished == (len(c.ids) == len(free.ids) and free.finished)
        assert c.sampled[-1] == 1 and c.messages[-1]["role"] == "assistant"  # no answer of a tool stands at the end
    assert any(c.finished for c in completions) and not all(c.finished for c in completions)
    assert any(c.calls and not c.finished for c in completions)


class Slow:
    def reset(self, **columns):
        return None

    def wait(self, seconds: str) -> str:
        """
        Wait.

        Args:
            seconds: how long
        """
        time.sleep(float(seconds))
        return "\ud800 done"

    async def later(self, word: str) -> str:
        """
        Say it later.

        Args:
            word: what
        """
        return word

    def leave(self, word: str) -> str:
        """
        Leave.

        Args:
            word: why
        """
        sys.exit(word)

    def repeat(self, timeout: str, function: str) -> str:
        """
        Repeat something often, and nothing not at all.

        Args:
            timeout: how often
            function: what
        """
        if not function:
            raise asyncio.CancelledError
        return function * int(timeout)


def test_what_goes_wrong_in_a_tool_is_told_to_the_model():
    slow = Slow()
    tools = describe_tools([slow.wait, slow.later, slow.leave, slow.repeat], tokenizer())
    c = script.Completion({}, [], [], False, "", [], True, environment=slow)
    args = SimpleNamespace(tool_timeout=0.2, max_completion_length=2)
    for name, arguments, said in (
        ("wait", {"seconds": "0"}, "? done"),
        ("wait", {"seconds": "9"}, "error: it took more than 0.2 s"),
        ("wait", {"seconds": "x"}, "error: could not convert string to float: 'x'"),
        ("wait", {"time": 1}, "error: Slow.wait() got an unexpected keyword argument 'time'"),
        ("later", {"word": "so"}, "so"),
        ("leave", {"word": "enough"}, "error: enough"),
        ("repeat", {"timeout": "2", "function": "so"}, "soso"),
        ("repeat", {"timeout": "10000", "function": "so"}, "so" * 256),  # more than two tokens: the rest is not encoded
        ("repeat", {"timeout": "2", "function": ""}, "error: CancelledError"),
        ("_reset", {}, "error: there is no tool _reset, but wait, later, leave, repeat"),
        ("reset", {}, "error: there is no tool reset, but wait, later, leave, repeat"),
    ):
        assert script.answer(args, tools, c, {"name": name, "arguments": arguments}) == said
    assert script.answer(args, tools, c, {"name": "wait", "arguments": {}, "error": "unreadable"}) == "error: unreadable"
    assert (c.calls, c.failures) == (12, 8)


def test_static_methods_methods_of_the_class_and_decorated_ones_are_tools_and_properties_are_not_read(flags, tmp_path):
    args = SimpleNamespace(tool_timeout=9, reward_timeout=9, reward_funcs=[])
    args.environment_factory, args.max_completion_length = f"{tmp_path}/environments.py:Odd", 9
    environment = script.load_environment(args, tokenizer())
    assert environment.tools.arguments == {"add": ["one"], "count": ["word"], "name": ["of"], "twice": ["word"]}
    c = SimpleNamespace(environment=environment.make(), calls=0, failures=0)
    calls = (("add", {"one": "1"}, "1+"), ("name", {"of": "x"}, "Oddx"), ("twice", {"word": "ab"}, "abab"))
    for name, arguments, said in calls:
        assert script.answer(args, environment.tools, c, {"name": name, "arguments": arguments}) == said
    assert (c.calls, c.failures) == (3, 0)
    args.environment_factory = f"{tmp_path}/environments.py:Kept"
    assert script.load_environment(args, tokenizer()).tools.arguments == {"count": ["word"]}  # and not dict.pop


def test_a_game_with_a_state_is_played_over_several_turns(launch, model, monkeypatch, tmp_path, completions):
    """By a player who halves what is left, in place of the model: the reward is that of the number of guesses."""

    def sample(model, prompts, keys, **options):
        turns = []
        for ids in prompts:
            low, high = 1, HigherOrLower.LARGEST
            text = tokenizer().decode(ids)
            for part in text.split("[guess ")[1:]:
                guess = int(part.partition("]")[0])
                low, high = (guess + 1, high) if "higher" in part else (low, guess - 1) if "lower" in part else (low, high)
            words = "It was that." if "yes" in text else f"[guess {(low + high) // 2}]"
            new = ids_of(words + "<|im_end|>")
            turns.append(Sampled(new, [-1.0] * len(new), True))
        return turns

    monkeypatch.setattr("common.sampling.sampler.sample", sample)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    rows = [{"prompt": [{"role": "user", "content": f"Guess my number, {name}."}]} for name in ("Tom", "Ann", "Eva", "Ben")]
    words = ["--model_name_or_path", model, "--dataset_name", write_rows(tmp_path / "rows.jsonl", rows)]
    words += ["--environment_factory", "experiments/environments.py:HigherOrLower", "--num_generations", 2, "--max_steps", 1]
    words += ["--max_prompt_length", 64, "--max_completion_length", 128]
    launch("tools", *words, "--per_device_train_batch_size", 8, "--eval_steps", 0, "--save_steps", 0)
    assert len(completions) == 8 and len({c.calls for c in completions}) > 1
    for group, (one, other) in enumerate(zip(completions[::2], completions[1::2], strict=True)):
        assert one.text == other.text  # the same number was hidden
        seed = int(np.random.default_rng((0, 0, group)).integers(2**31))
        low, high, guesses, hidden = 1, 20, 1, random.Random(seed).randint(1, 20)
        while (middle := (low + high) // 2) != hidden:
            low, high, guesses = (middle + 1, high, guesses + 1) if middle < hidden else (low, middle - 1, guesses + 1)
        assert one.calls == guesses and one.reward == pytest.approx(1 - (guesses - 1) / 6)
        assert " It is between 1 and 20." in one.prompt["prompt"][0]["content"]


def test_calls_in_json_where_the_template_asks_for_them(launch, flags, monkeypatch, tmp_path, completions):
    """A player who calls two tools at once, one of them wrongly, and then answers, in place of the model."""
    (tmp_path / "hermes.jinja").write_text(HERMES)
    calls = '<tool_call>{"name": "count", "arguments": {"word": "x"}}</tool_call><tool_call>{"name": "no"}</tool_call>'

    def sample(model, prompts, keys, **options):
        texts = ["So it is." if "now " in tokenizer().decode(ids) else calls for ids in prompts]
        turns = [ids_of(text + "<|im_end|>") for text in texts]
        return [Sampled(ids, [-1.0] * len(ids), True) for ids in turns]

    monkeypatch.setattr("common.sampling.sampler.sample", sample)
    model = make_model(tmp_path / "model", max_position_embeddings=1024)
    words = ["--model_name_or_path", model, "--max_prompt_length", 500, "--max_completion_length", 500, "--max_steps", 1]
    launch("tools", *flags, *words, "--chat_template", tmp_path / "hermes.jinja", "--eval_steps", 0, "--save_steps", 0)
    for c in completions:
        assert '{"type": "function", "function": {"name": "count"' in tokenizer().decode(c.prompt["prompt_ids"])
        assert [m["role"] for m in c.messages] == ["assistant", "tool", "tool", "assistant"]
        assert c.messages[2]["content"] == "error: there is no tool no, but count"
        told = "".join(f"<|im_start|>tool\n{m['content']}<|im_end|>\n" for m in c.messages[1:3])
        assert c.text == f"{calls}<|im_end|>\n{told}<|im_start|>assistant\nSo it is.<|im_end|>"
        assert (c.calls, c.finished) == (2, True) and 1 <= c.failures <= 2


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


def test_mistakes_are_one_line(launch, model, flags, tmp_path):
    text = write_rows(tmp_path / "texts.jsonl", [{"prompt": "What is 3+4?", "answer": "7"}])
    file = f"{tmp_path}/environments.py"
    for words, expected in (
        (["--environment_factory", ""], "name the class, file.py:Class"),
        (["--environment_factory", "missing.py:A"], "there is no file missing.py"),
        (["--environment_factory", file], f"name the class: {file}:Counter or {file}:Lazy"),
        (["--environment_factory", f"{file}:Bare"], "Bare.helper cannot be described to a model"),
        (["--eval_prompts", text], "prompts of --eval_prompts can be used: tools need chats"),
        (["--environment_factory", f"{file}:Missing"], "has no class Missing"),
        (["--environment_factory", f"{file}:Idle"], "needs a method reset"),
        (["--environment_factory", f"{file}:Lazy"], "get_reward() or else --reward_funcs"),
        (["--environment_factory", f"{file}:Broken"], "reset raised RuntimeError: no server"),
        (["--max_prompt_length", 20], "with what the environment's reset has added"),
        (["--dataset_name", text], "tools need chats"),
        (["--eval_reward_funcs", "length:9"], "played and scored as in training"),
    ):
        with pytest.raises(UserError) as error:
            launch(
                "tools", "--model_name_or_path", model, *flags, "--max_steps", 1, "--eval_steps", 0, *words, output="refused"
            )
        assert expected in str(error.value) and "\n" not in str(error.value), str(error.value)


@pytest.fixture(scope="module")
def asking(tmp_path_factory):
    """A model that asks the calculator now and then: the demo's."""
    output = tmp_path_factory.mktemp("asking") / "sft"
    words = [
        "--config",
        "experiments/configs/tools_sft.yaml",
        "--model_name_or_path",
        "data/base_model",
    ]
    run = run_script([sys.executable, "train_sft.py", *words, "--eval_steps", "0", "--output_dir", str(output)])
    assert run.returncode == 0, run.stderr[-3000:]
    return ["--config", "experiments/configs/tools.yaml", "--model_name_or_path", str(output)]


@pytest.mark.slow
def test_a_window_of_episodes_split_anyhow_gives_the_same_loss_and_gradient(asking, launch, tmp_path):
    words = [*asking, *COMMON, "--max_steps", "2", "--num_generations", "4", "--beta", "0.02", "--num_iterations", "2"]
    sizes = lambda batch, steps: ["--per_device_train_batch_size", batch, "--gradient_accumulation_steps", steps]  # noqa: E731
    one = launch("tools", *words, *sizes(32, 1), output="32x1")
    assert train_metrics(one)[0]["tools/call_frequency"] > 0.03
    whole = losses(one)
    for batch, steps in ((8, 4), (3, 11), (1, 32)):
        if batch * steps == 32:
            assert_same(whole, losses(launch("tools", *words, *sizes(batch, steps), output=f"{batch}x{steps}")))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    run = run_script([*command, *words_of("tools"), *words, *map(str, sizes(8, 2)), "--output_dir", str(tmp_path / "two")])
    assert run.returncode == 0, run.stderr[-6000:]
    assert_same(whole, losses(tmp_path / "two"))
    lines = [(folder / "completions.jsonl").read_text() for folder in (one, tmp_path / "two")]
    assert lines[0] == lines[1]


@pytest.mark.slow
def test_a_run_of_episodes_goes_on_bit_for_bit(asking, launch, monkeypatch):
    words = [
        *asking,
        "--max_steps",
        "6",
        "--save_steps",
        "3",
        "--eval_steps",
        "3",
        "--logging_steps",
        "1",
        "--max_eval_samples",
        "8",
    ]
    words += ["--per_device_train_batch_size", "32"]
    whole = launch("tools", *words, output="whole")
    with monkeypatch.context() as patch, pytest.raises(Stop):
        stop_after_save(patch, at=3)
        launch("tools", *words, output="stopped")
    resumed = launch("tools", *words, output="stopped")
    assert read_metrics(resumed) == read_metrics(whole)
    assert (resumed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert any("eval_tools/call_frequency" in row for row in read_metrics(whole))


@pytest.mark.slow
def test_calling_the_tool_is_learned(asking, launch):
    output = launch("tools", *asking, "--max_steps", "25", "--eval_steps", "25", "--max_eval_samples", "64")
    first, last = [row for row in read_metrics(output) if "eval_reward" in row]
    assert first["eval_reward"] < 0.2 and last["eval_reward"] > 0.5
    assert last["eval_tools/call_frequency_t1"] > 0.8 > first["eval_tools/call_frequency_t1"]
    shown = json.loads((output / "samples.jsonl").read_text().splitlines()[-1])
    assert "[calculate " in shown["completion"] and "<|im_start|>tool" in shown["completion"]
