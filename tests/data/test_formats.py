"""Formats: every format that users have is recognised and read as what it means, or refused in one clear
line."""

import json
import re

from common.data.formats import as_chat, as_preference, as_prompt, as_text
from common.data.types import BadRow
import pytest

from tests.data.rows import line

U, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
S = {"role": "system", "content": "s"}
B = {"role": "assistant", "content": "b"}
CHAT = {"messages": [U, A]}


def turn(name, text):
    return {"from": name, "value": text}


# --- chats --------------------------------------------------------------------------------------------------


H = [{"role": "user", "content": "u1"}, {"role": "assistant", "content": "a1"}]
# each template reads its own
THOUGHT = dict.fromkeys(("reasoning_content", "thinking", "reasoning", "tool_plan"), "because")
UNSAID = dict.fromkeys(THOUGHT, "")  # as tables fill it
LONG = {"role": "assistant", "content": "x y" * 20_000}
NAMES = "system human user prompter gpt chatgpt assistant model tool observation function function_response"
ROLES = ["system", *["user"] * 3, *["assistant"] * 4, *["tool"] * 4]
CALL = {"name": "f", "arguments": {"a": [1, None]}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}


@pytest.mark.parametrize(
    "row, messages",
    [
        ({"messages": [U, A]}, [U, A]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, A]}, [U, A]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "value": "q"}]}, A]}, [U, A]),
        ({"messages": json.dumps([U, A])}, [U, A]),
        (
            {
                "messages": [
                    U | {"tool_calls": None, "from": None},
                    {"role": None, "content": None} | turn("gpt", "a"),
                ]
            },
            [U, A],
        ),
        *(({"messages": [U, LONG | UNSAID | {name: "because"}]}, [U, LONG | THOUGHT]) for name in THOUGHT),
        *(
            (
                {
                    "messages": [
                        U,
                        {
                            "role": "assistant",
                            "content": said,
                            "function_call": {"name": "f", "arguments": text},
                        },
                    ]
                },
                chat,
            )
            for said, text, call in (
                (None, '{"a": [1, null]}', CALL),
                *(("I.", no, CALL | {"arguments": {}}) for no in ("", None)),
            )
            for chat in [
                [U, CALLS | {"content": said or "", "tool_calls": [{"type": "function", "function": call}]}]
            ]
        ),
        ({"conversations": [turn("human", "q"), turn("gpt", "a")]}, [U, A]),
        ({"conversations": [U, A], "messages": None}, [U, A]),
        ({"conversations": [U, A], "system": "s"}, [S, U, A]),
        ({"conversations": [S, U, A], "system": "other"}, [S, U, A]),
        (
            {"conversations": [turn(name, "x") for name in NAMES.split()]},
            [{"role": role, "content": "x"} for role in ROLES],
        ),
        ({"conversations": [turn("human", "q"), turn("function_call", json.dumps(CALL))]}, [U, CALLS]),
        ({"conversations": [turn("human", "q"), turn("function_call", json.dumps([CALL]))]}, [U, CALLS]),
        (
            {"conversations": [turn("human", "q"), turn("function_call", json.dumps(CALLS["tool_calls"]))]},
            [U, CALLS],
        ),
        ({"instruction": "q", "output": "a"}, [U, A]),
        ({"instruction": "q", "input": "", "output": "a", "system": "", "history": []}, [U, A]),
        (
            {"instruction": "q", "input": "x", "output": "a", "system": "s", "history": [["u1", "a1"]]},
            [S, *H, U | {"content": "q\nx"}, A],
        ),
        *(
            ({"messages": [U, A | flag]}, [U, A])
            for flag in ({"train": True}, {"loss_mask": 1}, {"weight": 1.0, "train": None})
        ),
    ],
)
def test_chats_are_read_from_every_format(row, messages):
    assert as_chat(row) == {"messages": messages}


def test_numbers_are_read_as_their_text():
    """As a csv file has them."""
    assert as_chat({"prompt": "q", "completion": 1}) == {"prompt": "q", "completion": "1"}
    assert as_chat({"instruction": "q", "input": 7, "output": 0.5})["messages"][0]["content"] == "q\n7"
    assert as_preference({"prompt": 3, "chosen": 0, "rejected": 1}) == {
        "prompt": "3",
        "chosen": "0",
        "rejected": "1",
    }
    assert as_prompt({"prompt": 12, "answer": 12}) == {"prompt": "12", "answer": 12}


def test_chats_may_be_json_text_in_any_column():
    """As tables hold them; and a system column beside whole chats, or beside a prompt that both sides
    repeat."""
    pair, text = {"prompt": [U], "chosen": [A], "rejected": [A | {"content": "b"}]}, json.dumps
    for given in (
        {name: text(value, indent=1) for name, value in pair.items()},
        {"chosen": text([U, *pair["chosen"]]), "rejected": text([U, *pair["rejected"]])},
    ):
        assert as_preference(dict(given)) == pair
        assert as_preference(given | {"system": S["content"]}) == pair | {"prompt": [S, U]}
    whole = {"chosen": [U, *pair["chosen"]], "rejected": [U, *pair["rejected"]], "prompt": U["content"]}
    assert as_preference(whole | {"system": S["content"]}) == pair | {"prompt": [S, U]}
    assert as_preference(whole | {"prompt": [S, U]}) == pair | {"prompt": [S, U]}
    assert as_prompt({"prompt": text([U])})["prompt"] == [U]
    assert as_chat({"prompt": text([U]), "completion": text([A])})["messages"] == [U, A]
    for prompt in ("[{1}]", '[{"a": 1}]'):  # text that looks like it, and text that is other JSON
        assert as_chat({"prompt": prompt, "completion": "a"}) == {"prompt": prompt, "completion": "a"}
    assert as_text({"text": text([U, A])}) == text([U, A])


def test_tool_calls_and_tools_may_be_json():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "content": "2", "tool_call_id": "1", "name": "f"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = as_chat({"messages": [U, answer, result, A], "tools": json.dumps(tools)})
    parsed = call | {"function": {"name": "f", "arguments": {"x": 1}}}
    assert chat["messages"] == [U, {"role": "assistant", "content": "", "tool_calls": [parsed]}, result, A]
    assert chat["tools"] == tools
    assert "tools" not in as_chat({"messages": [U, A], "tools": "[]"})


def test_prompts_of_completions_are_not_trained():
    assert as_chat({"prompt": "q", "completion": "a"}) == {"prompt": "q", "completion": "a"}
    for row in ({"prompt": [S, U], "completion": [A]}, {"prompt": [S, U], "completion": "a"}):
        assert as_chat(row) == {"messages": [S, U, A], "prompt_turns": 2}
    assert as_chat({"prompt": "q", "completion": [A]}) == CHAT | {"prompt_turns": 1}
    assert as_chat({"prompt": "q", "response": "a"}) == {"prompt": "q", "completion": "a"}
    assert as_chat({"prompt": "q", "completion": "a", "system_prompt": "s"})["messages"] == [S, U, A]
    assert as_chat({"text": "t"}) == {"text": "t"}
    assert (as_text({"text": " t\n"}), as_text({"body": "t"}, "body")) == (" t\n", "t")
    row = {"prompt": "q", "chosen": " a", "rejected": " b"}
    assert as_preference(row | {"score": 1}) == row


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"messages": []}, "no messages"),
        ({"messages": ["q", "a"]}, " "),
        (
            {"messages": [{"role": "narrator", "content": "q"}, A]},
            "unknown role 'narrator'; known: system, developer, user",
        ),
        ({"messages": [{"content": "q"}, A]}, "unknown role None"),
        ({"messages": [{"role": "user"}, A]}, "a message without text content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, A]},
            "a message part that is not text",
        ),
        ({"messages": [U, {"role": "assistant", "content": " "}]}, "empty answer"),
        ({"messages": [U, A | {"tool_calls": ["f"]}]}, " "),
        (
            {"messages": [U, A | {"tool_calls": [CALL | {"arguments": "{city: Paris}"}]}]},
            "Expecting property name",
        ),
        ({"messages": [U, A | {"tool_calls": [{"function": "f"}]}]}, " "),
        ({"messages": "[{"}, " "),
        ({"messages": [U, A], "images": ["x.png"]}, "its text alone: --columns unused=images)"),
        ({"messages": [U, A], "tools": "[{"}, "JSONDecodeError"),
        ({"messages": [U, A], "tools": ["f"]}, "tools is not a list of objects"),
        ({"messages": [U, {"role": "assistant", "content": "\ud83d"}]}, "surrogates not allowed"),
        ({"instruction": "q", "output": ""}, "empty output"),
        ({"instruction": "q", "output": "a", "history": ["x"]}, "history is not a list of"),
        ({"prompt": True, "completion": "a"}, "no messages"),
        ({"prompt": "q", "completion": float("nan")}, "no messages"),
        ({"instruction": "q", "input": {"a": 1}, "output": "a"}, "input is not a string but dict"),
        ({"messages": [U, A], "system": ["s"]}, "system is not a string but list"),
        (
            {"prompt": str([U]), "completion": "a"},
            "JSONDecodeError: Expecting property name enclosed in double quotes",
        ),
        ({"text": ""}, "empty text"),
        ({"messages": [U, A | {"train": "no"}]}, "train of a message is 'no'; known: true, false, 0, 1"),
        ({"messages": [U, A | {"loss_mask": [0, 1]}]}, "loss_mask of a message is [0, 1]"),
        ({"messages": [U, A | {"weight": 0.5}]}, "weight of a message is 0.5"),
        ({"messages": [U, A], "tools": '[{"n": ' + "1" * 5000 + "}]"}, " "),
        ({"messages": [U, A], "tools": "[" * 5000 + "]" * 5000}, " "),
        ({"messages": [{"role": ["user"], "content": "q"}, A]}, " "),
    ],
)
def test_an_unusable_chat_is_refused_with_the_reason(row, reason):
    with pytest.raises(BadRow, match=re.escape(reason)) as caught:
        as_chat(row)
    line(caught)


# --- what of a chat is trained ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flag", [{"train": False}, {"loss_mask": 0}, {"weight": 0}, {"weight": 0.0}, {"train": True, "weight": 0}]
)
def test_a_turn_says_that_it_is_not_trained(flag):
    assert as_chat({"messages": [U, A | flag, U, B]})["messages"] == [U, A | {"train": False}, U, B]
    turns = [turn("human", "q"), turn("gpt", "a") | flag]
    assert as_chat({"conversations": turns})["messages"] == [U, A | {"train": False}]
    assert as_prompt({"messages": [U, A | flag, U]})["prompt"] == [U, A, U]


# --- pairs --------------------------------------------------------------------------------------------------

HH = "\n\nHuman: q\n\nAssistant: first\n\nHuman: more\n\nAssistant: "
HH_PROMPT = [U, {"role": "assistant", "content": "first"}, {"role": "user", "content": "more"}]


@pytest.mark.parametrize(
    "row, prompt",
    [
        ({"prompt": [U], "chosen": [A], "rejected": [B]}, [U]),
        ({"prompt": [S, U], "chosen": "a", "rejected": "b"}, [S, U]),
        ({"system": "s", "prompt": "q", "chosen": "a", "rejected": "b"}, [S, U]),
        ({"system_prompt": "s", "prompt": [U], "chosen": [A], "rejected": [B]}, [S, U]),
        ({"prompt": "q", "chosen": [U, A], "rejected": [U, B]}, [U]),
        ({"chosen": [S, U, A], "rejected": [S, U, B]}, [S, U]),
        ({"chosen": HH + "a", "rejected": HH + "b"}, HH_PROMPT),
        ({"prompt": HH.rstrip(), "chosen": HH + "a", "rejected": HH + "b"}, HH_PROMPT),
        ({"prompt": "q", "chosen": [*HH_PROMPT, A], "rejected": [*HH_PROMPT, B]}, HH_PROMPT),
        (
            {"conversations": [turn("human", "q")], "chosen": turn("gpt", "a"), "rejected": turn("gpt", "b")},
            [U],
        ),
        ({"conversations": [U], "system": "s", "chosen": A, "rejected": B}, [S, U]),
        ({"instruction": "q", "input": "", "chosen": "a", "rejected": "b", "system": "s"}, [S, U]),
    ],
)
def test_the_same_pair_is_read_from_every_format(row, prompt):
    assert as_preference(row) == {"prompt": prompt, "chosen": [A], "rejected": [B]}


def test_answers_may_go_on_with_what_others_say():
    """A tool, to which each call of its own gives another result."""
    sides = [[A, {"role": "tool", "content": result}, answer] for result, answer in (("1", A), ("2", B))]
    found = as_preference({"prompt": "q", "chosen": sides[0], "rejected": sides[1]})
    assert found == {"prompt": [U], "chosen": sides[0], "rejected": sides[1]}


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen equals rejected"),
        ({"prompt": "q", "chosen": "a", "rejected": ""}, "empty answer"),
        ({"prompt": "q", "chosen": "a", "rejected": " \n"}, "empty rejected"),
        ({"prompt": [U], "chosen": [A], "rejected": [{"role": "assistant", "content": ""}]}, "empty answer"),
        ({"chosen": HH + "a", "rejected": HH}, "empty answer"),
        (
            {"chosen": "\n\nAssistant: a\n\nHuman: q", "rejected": HH + "b"},
            "no answer by the assistant at the end",
        ),
        (
            {"chosen": "Hi.\n\nAssistant: a", "rejected": HH + "b"},
            "text before the first Human:/Assistant: turn",
        ),
        ({"chosen": [U, A], "rejected": [A, B]}, "no shared prompt"),
        (
            {"prompt": "q", "chosen": [U | {"content": "q!"}, A], "rejected": [B]},
            "does not start with the assistant",
        ),
        ({"prompt": [U], "chosen": [U, A], "rejected": [U]}, "does not start with the assistant"),
        ({"prompt": "q", "chosen": [S, U, A], "rejected": [S, U, B]}, "does not start with the assistant"),
        (
            {"conversations": [U], "chosen": A, "rejected": B, "tools": '["f"]'},
            "tools is not a list of objects",
        ),
    ],
)
def test_an_unusable_pair_is_refused_with_the_reason(row, reason):
    with pytest.raises(BadRow, match=re.escape(reason)):
        as_preference(row)


# --- prompts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row, prompt",
    [
        ({"prompt": "q"}, "q"),
        ({"prompt": [S, U]}, [S, U]),
        ({"prompt": "q", "system": "s"}, [S, U]),
        ({"messages": [S, U, A]}, [S, U]),
        ({"conversations": [turn("human", "q"), turn("gpt", "a")]}, [U]),
        ({"instruction": "q", "input": "x", "output": "a"}, [{"role": "user", "content": "q\nx"}]),
    ],
)
def test_prompts_are_read_with_columns_for_rewards(row, prompt):
    found = as_prompt(row | {"answer": 7, "level": None})
    assert found == row | {"answer": 7, "level": None, "prompt": prompt}


VERL = {"prompt": [U], "data_source": "gsm8k", "extra_info": {"i": 1}, "reward_model": {"ground_truth": "7"}}


def test_a_verl_ground_truth_becomes_the_answer():
    assert as_prompt(dict(VERL)) == VERL | {"answer": "7"}
    assert as_prompt(VERL | {"answer": "8"})["answer"] == "8"
    for empty in (" ", [], [A]):
        with pytest.raises(BadRow, match="empty prompt|no messages"):
            as_prompt({"prompt": empty})


# --- which format -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function, row, named",
    [
        (as_text, {"body": "t"}, "'body'; needed: text (rename columns: --columns new=old)"),
        (as_text, {"text": None}, "'text' (null)"),
        (as_chat, {"question": "q", "text ": "a"}, "'question', 'text '; needed: messages, or conversations"),
        (
            as_chat,
            {"messages": None, "prompt": None, "other": 1},
            "'messages' (null), 'prompt' (null), 'other'",
        ),
        (as_chat, {"instruction": "q", "output": None}, "'instruction', 'output' (null)"),
        (as_chat, {"prompt": "q", "completion": "a", "label": 0}, "KTO"),
        (as_chat, {"prompt": "q", "completion": "a", "label": "True"}, "KTO"),  # of a table
        (as_preference, {"prompt": "q", "good": "a"}, "'prompt', 'good'; needed: prompt + chosen + rejected"),
        (as_preference, {"prompt": "q", "chosen": None, "rejected": "b"}, "'chosen' (null)"),
        (
            as_preference,
            {"prompt": None, "chosen": "a", "rejected": "b"},
            "text before the first Human:/Assistant: turn",
        ),
        (as_prompt, {"question": "q"}, "'question'"),
        (as_prompt, VERL | {"reward_model": {"style": "rule"}}, "'ground_truth'"),
        (as_prompt, VERL | {"reward_model": "mine"}, " "),
    ],
)
def test_a_row_without_format_names_its_columns(function, row, named):
    with pytest.raises(BadRow, match=re.escape(named)) as caught:
        function(row)
    line(caught)
