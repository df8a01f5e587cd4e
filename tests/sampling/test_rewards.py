"""Rewards: the ready-made ones, a user's own file, reward models, and what is said where one misbehaves."""

import contextlib
import copy
import math
import os
import signal
import sys
import textwrap
import time
from types import SimpleNamespace

from common.args import CommonArgs
from common.errors import UserError
from common.evaluate import EvalPrompts, complete_prompts, summarise
import common.run.signals  # noqa: F401  its import sets what children do at signals
from common.sampling.generate import Sampled
from common.sampling.rewards import Reward, check_columns, from_file, load_rewards, score, score_by_name
from common.sampling.rollout import rollout_metrics
from common.sampling.sampler import sample_shared, score_shared
import pytest
import torch
import transformers

from tests.data.rows import alone, base_tokenizer, line, process
from tests.data.templates import LLAMA3, make_tokenizer
from tests.tiny import SIZE

CPU = torch.device("cpu")


def run(spec: str, completions: list[str], prompt="q", ids: list[list[int]] | None = None, **columns) -> list:
    """The scores of one function on completions of one prompt, a string or a chat."""
    rows = [{"prompt": prompt, **{k: v[i] for k, v in columns.items()}} for i in range(len(completions))]
    (scores,) = score(load_rewards([spec], CPU), rows, completions, ids or [[5]] * len(completions))
    return scores


def user_file(tmp_path, source: str, function: str = "my_reward") -> str:
    path = tmp_path / "my_rewards.py"
    path.write_text(textwrap.dedent(source))
    return f"{path}:{function}"


CHAT = [{"role": "user", "content": "q"}]


# --- exact_number -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer", "wanted"),
    [
        ("72", "72", 1),
        ("First 24, then 48, in all 72", "72", 1),  # several: the last
        ("#### 5, no: #### 72 after 10 steps", "72", 1),  # the last mark, before the last number
        ("**Answer:** 72 (of 100)", "72", 1),
        (r"So \boxed{72} of 100", "72", 1),
        (r"Answer: \boxed{72}", "72", 1),
        ("#### 1,000,", "1000", 1),
        ("", "72", 0),
        ("Answer: I do not know, 72?", "72", 1),
        ("10-3", "3", 1),
        ("it is .5", "0.5", 1),
        ("the numbers 1,2,3", "3", 1),
        ("72 Answer: none", "72", 1),  # a mark without a number after it is no mark
        ("The answer is −5", "5", 0),
        ("The answer is −5", "−5", 1),
        ("#### 5", "3 + 2. #### 5", 1),
        *(
            ("2", truth, None)
            for truth in (
                "1/2",
                r"\frac{1}{2}",
                r"\boxed{\sqrt{2}}",
                "2^3",
                "x/2",
                "2:30",
                "1e2",
                "2x",
                "1 or 2",
            )
            + ("x + 2", "2*x", "2π", "2²")
        ),
        ("#### Step 2: so\nit is \\boxed{7}", "7", 1),  # the last mark, of whatever kind
        ("Answer: 3+4=7, so \\boxed{7}", "7", 1),
        ("5", "-$5", 0),
        ("-$5", "The answer is -5", 1),
        *(
            (minus, "5", 0)
            for minus in (r"Answer: -\$5", r"\boxed{-\$5}", "a loss of -£5", "#### –5", "_-$5_")
        ),
        *((dash, "5", 1) for dash in ("- $5", "Left – $5", "---\n$5", "$3 - $5")),
        *((minus, "-€5", 1) for minus in ("-5", "–5", "−€5")),
        ("-.5", "0.5", 0),
        ("-.5", "-0.5", 1),
        ("from 5-$10", "10", 1),
        *((r"\boxed{1{,}234}", truth, 1) for truth in ("1234", r"1{,}234", r"1\,234")),
    ],
)
def test_exact_number_compares_the_final_number(completion, answer, wanted):
    assert run("exact_number", [completion], answer=[answer]) == [wanted]
    assert run("exact_number", [completion], CHAT, answer=[answer]) == [wanted]


def test_exact_number_reads_gsm8k_and_plain_answers():
    answers = {
        "Natalia sold 48/2 = 24 clips in May.\n#### 72": "72",
        72: "72",
        72.5: "72.5",
        -0.5: "-0.5",
        "1,000": "1000",
    }
    for answer, number in answers.items():
        assert run("exact_number", [f"#### {number}", "#### 7"], answer=[answer] * 2) == [1, 0]
        assert run("exact_number", ["72", number], answer=["unknown", answer]) == [None, 1]


def test_exact_number_reads_after_its_mark():
    completions = ["Answer: 7", "It is 7.", "7. Answer: 8", "Answer: 8. No. Answer: 7"]
    assert run("exact_number:Answer:", completions, answer=["7"] * 4) == [1, 0, 0, 1]
    # a column of that name is a column
    assert run("exact_number:Answer:", completions[:1], answer=["7"], mark=[90]) == [1]


# --- regex and length ---------------------------------------------------------------------------------------


def test_regex_is_1_where_the_pattern_is_found():
    completions = ["<think>a\nb</think> 7", "<think>a", "7"]
    assert run(r"regex:<think>.*</think>", completions) == [1, 0, 0]  # the dot takes line ends too
    assert run(r"regex:^\d$", completions, CHAT) == [0, 0, 1]
    assert run("regex:a:b", ["a:b", "ab"]) == [1, 0]  # a pattern may hold a colon


def test_length_falls_beyond_its_limit():
    ids = [[1] * n for n in (0, 3, 4, 5, 8, 12)]
    assert run("length:4", ["x"] * 6, ids=ids) == [0, 0, 0, -0.25, -1, -2]


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        *(
            ([spec], f"--reward_funcs {spec}")
            for spec in ("length:", "length:0", "length:2.5", "length:many")
        ),
        (["regex:("], "--reward_funcs regex:(: missing )"),
        (["regex:a", "regex:b"], "--reward_funcs: two functions have the same name: regex, regex"),
        (["nowhere.py:my_reward"], "no file"),
        (["tests"], "file.py:function"),  # a folder without a model
        (["no_such_package.rewards.right"], "pip install no_such_package"),
        (["json.no_such_function"], "json has no function no_such_function"),
        (["accuracy_reward"], "pip install trl"),
    ],
)
def test_a_senseless_reward_is_refused(specs, says, monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)  # as if it were not installed
    with pytest.raises(UserError) as error:
        load_rewards(specs, CPU)
    assert says in line(error)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("my_reward = 3", "no function or class my_reward"),
        ("def my_reward(:", "SyntaxError"),
        ("import no_such_package", "no_such_package"),
        ("1 / 0", "ZeroDivisionError"),
        ("def my_reward(**columns):\n\tif 1:\n        return 1\n", "line 3"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_one_line(tmp_path, source, says):
    with pytest.raises(UserError) as error:
        load_rewards([user_file(tmp_path, source)], CPU)
    assert "my_rewards.py" in line(error) and says in line(error)


def test_a_function_of_a_package_is_found_by_its_dotted_path_and_one_of_trl_by_its_name(
    tmp_path, monkeypatch
):
    for package in ("my_package", "trl"):
        (tmp_path / package).mkdir()
        source = (
            "def think_format_reward(completions, **_):\n    return [len(text) for text in completions]\n"
        )
        (tmp_path / package / "rewards.py").write_text(source)
        for module in (package, f"{package}.rewards"):  # forgets what is installed, until the end of the test
            monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    for spec in ("my_package.rewards.think_format_reward", "think_format_reward"):
        assert load_rewards([spec], CPU)[0].name == "think_format_reward"
        assert run(spec, ["a", "bcd"]) == [1, 3]
    (tmp_path / "my_package" / "broken.py").write_text("1 / 0")  # there, and so nothing to install
    with pytest.raises(UserError, match=r"importing it raised ZeroDivisionError: .*broken.py:1\)$"):
        load_rewards(["my_package.broken.score"], CPU)
    for module in ("trl", "trl.rewards"):
        monkeypatch.delitem(sys.modules, module, raising=False)


def test_an_import_without_end_is_ended(tmp_path):
    with pytest.raises(UserError, match="importing it took more than 0.2 s"):
        from_file(user_file(tmp_path, "import time; time.sleep(60)"), 0.2)


def test_rewards_are_named_and_come_in_order():
    specs = ["length:4", "exact_number", "regex:a"]
    rewards = load_rewards(specs, CPU)
    assert [reward.name for reward in rewards] == ["length", "exact_number", "regex"]
    rows = [{"prompt": "q", "answer": "1"}, {"prompt": "q", "answer": "2"}]
    assert score(rewards, rows, ["1 a", "1"], [[1] * 8, [1]]) == [[-1, 0], [1, 0], [1, 0]]
    assert load_rewards(None, CPU) == []


# --- a user's own -------------------------------------------------------------------------------------------


def test_a_function_gets_ids_and_every_column():
    rows, seen = [{"prompt": "p", "level": 1, "source": "x"}, {"prompt": "q", "level": 3, "source": None}], {}
    reward = Reward("mine", lambda **given: seen.update(given) or [0.5, None])
    assert score([reward], rows, ["a", "b"], [[1], [2, 3]]) == [[0.5, None]]
    texts = {"prompts": ["p", "q"], "completions": ["a", "b"], "completion_ids": [[1], [2, 3]]}
    assert seen == texts | {"level": [1, 3], "source": ["x", None]}


def test_where_prompts_are_chats_completions_are_messages(tmp_path):
    """By a function that is awaited."""
    source = """
    import asyncio

    async def judge(prompt, messages):
        await asyncio.sleep(0)
        return float(prompt == [{"role": "user", "content": "q"}]) * len(messages[0]["content"])

    async def my_reward(prompts, completions, **columns):
        return await asyncio.gather(*map(judge, prompts, completions))
    """
    assert run(user_file(tmp_path, source), ["four", "4"], CHAT) == [4, 1]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return [1.0]", "returned [1.0] for 2 completions"),
        ("return '10'", "returned '10'"),
        ("return [1.0, float('nan')]", "nan"),
        ("return [1e308, 1.0]", "returned [1e+308"),
        ("return [10**5000, 1.0]", "returned <list>"),
        ("return ['y' * 10**7, 1.0]", "returned ['yyyy"),
        ("import json; json.loads('{')", "my_rewards.py:2)"),  # one's own line, though a library raised it
        ("raise ValueError('x' * 10**7)", "raised ValueError: xxx"),
        ("class E(Exception):\n        def __str__(self): 1/0\n    raise E", "raised E: <E> ("),
        ("import sys; sys.exit(3)", "raised SystemExit: 3 ("),
    ],
)
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_misbehaving_function_is_one_line(tmp_path, kind, body, says):
    spec = user_file(tmp_path, f"{kind} my_reward(prompts, completions, **columns):\n    {body}")
    with pytest.raises(UserError) as error:
        run(spec, ["a", "b"], CHAT)
    assert "my_reward" in line(error) and says in line(error) and len(line(error)) <= 2003
    with pytest.raises(UserError, match="mine.*answer"):  # a signature that does not fit
        run(user_file(tmp_path, f"{kind} mine(completions):\n    return [1.0]", "mine"), ["a"], answer=["1"])


@pytest.mark.parametrize(
    "body",
    [
        "import re; return [float(bool(re.match('(a+)+$', 'a' * 40 + 'b'))) for _ in completions]",
        "\n    try:\n        while True: pass\n    except BaseException: pass\n    while True: pass",
    ],
    ids=["regex", "that catches an exception"],
)
def test_a_function_without_end_is_ended(tmp_path, body, monkeypatch):
    source = f"def my_reward(completions, **columns): {body}"
    (reward,) = load_rewards([user_file(tmp_path, source)], CPU)
    monkeypatch.setattr("common.sampling.rewards.REWARD_SECONDS", 0.3)
    with pytest.raises(UserError, match="my_reward took more than 0.3 s.*What is 1"):
        score([reward], [{"prompt": "What is 1+1?"}] * 2, ["a", "b"], [[1], [2]])


def test_a_users_file_may_define_dataclasses(tmp_path):
    source = """
    from __future__ import annotations
    from dataclasses import dataclass
    @dataclass
    class Verdict:
        value: float
    def my_reward(completions, **columns): return [Verdict(1.0).value for _ in completions]
    """
    assert run(user_file(tmp_path, source), ["a"]) == [1]


# --- on several processes -----------------------------------------------------------------------------------


def test_processes_sample_and_score_each_its_share(monkeypatch):
    """With the key, the limit and the row of each prompt: together they have what one process has."""
    monkeypatch.setattr("common.processes.gather_object", list)  # here a process gathers its own alone
    limits = list(range(7))
    prompts, keys, rows = [], [], []
    for i in limits:
        prompts.append([i])
        keys.append((9, i))
        rows.append({"prompt": str(i)})

    def together(prompts, keys, max_new_tokens):
        return list(zip(prompts, keys, max_new_tokens, strict=True))

    def own(prompts, completions, completion_ids):
        return [int(a + b) + c for a, b, [c] in zip(prompts, completions, completion_ids, strict=True)]

    sampled, scores = [], []
    for rank in range(3):
        accelerator = process(rank, 3)
        accelerator.autocast = contextlib.nullcontext
        sampled += sample_shared(accelerator, SimpleNamespace(sample=together), prompts, keys, limits)
        scores += score_shared(accelerator, [Reward("own", own)], rows, list("0123456"), prompts)
    assert sampled == together(prompts, keys, limits)
    assert scores == [[12 * i] for i in limits]


# --- scoring an evaluation ----------------------------------------------------------------------------------


def test_evaluations_have_scores_by_name_and_sum():
    """No sum where all functions abstained."""
    rewards = [
        Reward(
            "count",
            lambda completion_ids, **_: [len(ids) if len(ids) > 1 else None for ids in completion_ids],
        ),
        Reward("has_b", lambda completions, **_: [1.0 if "b" in text else None for text in completions]),
    ]
    given = rewards, [{"prompt": "p"}] * 3, ["ab", "ac", "a"], [[1, 2, 0], [1, 0], [1]]
    assert score_by_name(*given) == {"count": [3, 2, None], "has_b": [1, None, None]}
    assert score_by_name(*given, [0.5, 10.0])["reward"] == [11.5, 1.0, None]
    assert score_by_name([], *given[1:], [1.0]) == {}


# --- reward models ------------------------------------------------------------------------------------------


def test_a_reward_model_scores_the_whole_text(tmp_path):
    """A chat by the model's own template, which writes the token before all text as the tokenizer does."""
    folder, tokenizer = tmp_path / "my_judge", make_tokenizer(LLAMA3, adds_bos=True)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZE | {"vocab_size": len(tokenizer)}, num_labels=1)
    model = transformers.LlamaForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    assert load_rewards([str(folder)], CPU)[0].name == "my_judge"
    start, end = "<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"
    chat = f"<|bos|>{start.format('user')}the sum is{end}{start.format('assistant')}"
    for prompt, before, after in (
        ("the sum is", "<|bos|>the sum is", ""),
        ([{"role": "user", "content": "the sum is"}], chat, end),
    ):
        completions, wanted = [" seven", " eight", " is is is seven"], []
        for text in completions:
            ids = tokenizer(
                before + (text.strip() if after else text) + after,
                add_special_tokens=False,
                return_tensors="pt",
            )
            with torch.no_grad():
                wanted.append((model.model(**ids).last_hidden_state[0, -1] @ model.score.weight[0]).item())
        found = run(str(folder), completions, prompt)
        assert found == pytest.approx(wanted, abs=1e-5) and len(set(found)) == 3
    transformers.LlamaForCausalLM(config).save_pretrained(folder)  # its scores would be random
    peft, causal = pytest.importorskip("peft"), transformers.LlamaForCausalLM.from_pretrained(folder)
    # another module than the head
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    peft.get_peft_model(causal, config).save_pretrained(tmp_path / "adapter")
    for name in ("my_judge", "adapter"):
        with pytest.raises(UserError, match="no head for scores"):
            load_rewards([str(tmp_path / name)], CPU)


def test_of_several_turns_the_last_is_read():
    """A number that a tool has said is no answer of the model's; the functions get all messages, and objects
    themselves."""
    turns = [{"role": "assistant", "content": "[add 1 2]"}, {"role": "tool", "content": "3"}]
    said = [[*turns, {"role": "assistant", "content": text}] for text in ("I do not know.", "It is 3.")]
    rows, state = [{"prompt": [{"role": "user", "content": "1+2?"}], "answer": "3"}] * 2, [object(), object()]

    def seen(prompts, completions, states, **columns):
        return [
            float(c == wanted and s is o)
            for c, wanted, s, o in zip(completions, said, states, state, strict=True)
        ]

    rewards = [*load_rewards(["exact_number", "regex:3"], CPU), Reward("seen", seen)]
    assert score(rewards, rows, said, [[1], [2]], {"states": state}) == [[0, 1], [0, 1], [1, 1]]


def test_numbers_of_numpy_and_torch_are_numbers(tmp_path):
    for value, wanted in (
        ("[numpy.float32(1), numpy.int64(2)]", [1, 2]),
        ("torch.tensor([1.0, 2.0])", [1, 2]),
        ("(None, True)", [None, 1]),
    ):
        code = f"import numpy, torch\ndef mine(prompts, completions, **columns):\n    return {value}"
        assert run(user_file(tmp_path, code, "mine"), ["a", "b"], "q") == wanted


def test_a_function_cannot_change_what_is_trained_on_or_what_the_next_one_gets(tmp_path):
    code = "def mine(prompts, completions, completion_ids, **columns):\n"
    code += (
        "    for given in (prompts, completions, completion_ids, *columns.values()):\n        given.clear()\n"
    )
    code += "    return [1.0]\n"
    rows, ids = [{"prompt": list(CHAT), "answer": ["x"]}], [[1, 2]]
    before = copy.deepcopy((rows, ids))
    rewards = load_rewards([user_file(tmp_path, code, "mine"), "length:3"], CPU)
    assert score(rewards, rows, ["a"], ids) == [[1.0], [0.0]]
    assert (rows, ids) == before


def test_children_end_when_told_even_at_birth():
    """Python forgets a signal that reaches a child before its first line; a pool would wait for it
    forever."""
    # as a run does
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for _ in range(20):
            if (child := os.fork()) == 0:
                time.sleep(5)
                os._exit(0)
            os.kill(child, signal.SIGTERM)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        if (child := os.fork()) == 0:
            # as a terminal sends it to all: the run decides what is finished first
            os.kill(os.getpid(), signal.SIGINT)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_abstentions_count_in_no_mean():
    args, rows = CommonArgs(), [{"prompt": "q"}] * 3
    assert summarise(args, 0.0, rows, ["a"] * 3, {"f": [None, 1.0, 0.5], "g": [None] * 3})[0] == {
        "eval_f": 0.75
    }
    of = lambda r: SimpleNamespace(ids=[1], finished=True, rewards=[r], reward=math.nan if r is None else r)  # noqa: E731
    scored = [of(reward) for reward in (1, 1, None, None)]
    found = rollout_metrics(scored, [SimpleNamespace(name="f")], 2)
    assert (found["reward"], found["rewards/f/mean"], found["frac_reward_zero_std"]) == (1, 1, 1)
    scored = [of(reward) for reward in (1, 0, None, None, None, 1)]  # one group with two rewards
    assert rollout_metrics(scored, [SimpleNamespace(name="f")], 2)["reward_std"] == pytest.approx(0.5**0.5)


def test_an_evaluation_draws_by_the_seed_and_the_place(monkeypatch):
    asked = []

    def draw(accelerator, sampler, prompts, keys, limits):
        asked.append((sampler.settings["temperature"], keys, limits))
        return [Sampled([0], [0.0], True)] * len(prompts)

    monkeypatch.setattr("common.evaluate.sample_shared", draw)
    args = CommonArgs(seed=7, eval_temperatures=[0.0, 0.8], eval_max_new_tokens=5)
    rows = [{"prompt": text, "prompt_ids": [1]} for text in ("a", "b")]
    _, samples = complete_prompts(
        args, alone(), torch.nn.Module(), base_tokenizer(), EvalPrompts(rows, [], None)
    )
    assert asked == [(temperature, [(7, 0), (7, 1)], [5, 5]) for temperature in (0.0, 0.8)]
    assert [(line["temperature"], line["prompt"]) for line in samples] == [
        (0, "a"),
        (0, "b"),
        (0.8, "a"),
        (0.8, "b"),
    ]


@pytest.mark.parametrize("ends", ["return [1.0]", "1 / 0"])
def test_the_working_directory_is_put_back(ends, tmp_path, monkeypatch):
    """The paths of a run are relative to it."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    source = f"import os\ndef my_reward(**_):\n    os.chdir('elsewhere')\n    {ends}"
    with contextlib.suppress(UserError):
        run(user_file(tmp_path, source), ["a"])
    assert os.getcwd() == str(tmp_path)


# --- columns ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signature", "columns", "says"),
    [
        (
            "prompts, completions, answer, **columns",
            {"solution": 1, "id": 2},
            "needs a column answer; .*--columns answer=solution",
        ),
        ("completions, answer, **columns", {}, "needs a column answer; the rows have none$"),
        (
            "prompts, completions, answer",
            {"answer": 1},
            "my_reward does not take completion_ids; the rows have answer: give it \\*\\*columns",
        ),
        (
            "completions, **columns",
            {"completions": 1},
            "have a column completions, .*--columns its_completions=completions",
        ),
        ("prompts, completions, extra=1, **columns", {"answer": 1}, None),
        ("**everything", {}, None),
    ],
)
def test_columns_suit_the_signature_before_anything_is_sampled(tmp_path, signature, columns, says):
    rewards = load_rewards([user_file(tmp_path, f"def my_reward({signature}): return []")], CPU)
    rows = [{"prompt": "q", "prompt_ids": [1], **columns}]
    if says is None:
        return check_columns(rewards, rows)
    with pytest.raises(UserError, match=says):
        check_columns(rewards, rows)


@pytest.mark.parametrize("name", ["loss", "step", "prompt"])
def test_a_reward_has_no_name_of_an_evaluations_own(name, tmp_path):
    spec = user_file(tmp_path, f"def {name}(completions, **columns): return [1.0 for _ in completions]", name)
    with pytest.raises(
        UserError, match=f"--eval_reward_funcs: a function called {name} would replace the {name} of eval"
    ):
        load_rewards([spec], CPU, "--eval_reward_funcs")
