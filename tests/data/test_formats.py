"""Formats: every format that users have is recognised and read as what it means, or refused in one clear line."""

import json
import re

from common.data.dropped import MOST, Dropped, convert
from common.data.formats import (
    as_chat,
    as_preference,
    as_prompt,
    as_text,
    chat_format,
    preference_format,
    prompt_format,
    text_format,
)
from common.data.types import BadRow, Row
from common.errors import UserError
from experiments.labelled import as_labelled, labelled_format, mismatched
from experiments.scored import number_of

import numpy as np
import pytest

U, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
S = {"role": "system", "content": "s"}
B = {"role": "assistant", "content": "b"}
CHAT = {"messages": [U, A], "tools": None}


def turn(name, text):
    return {"from": name, "value": text}


def line(caught) -> str:
    """The error, which is one line."""
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- chats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [U, A]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, A]},
        {"messages": [U | {"tool_calls": None, "from": None}, {"role": None, "content": None} | turn("gpt", "a")]},
        {"conversations": [turn("human", "q"), turn("gpt", "a")]},
        {"conversations": [U, A], "messages": None},
        {"instruction": "q", "output": "a"},
        {"instruction": "q", "input": "", "output": "a", "system": "", "history": []},
        {"instruction": "q", "input": None, "output": "a", "system": None, "history": None},
    ],
)
def test_the_same_chat_is_read_from_every_format(row):
    assert as_chat(row) == CHAT


def test_all_role_names_of_sharegpt_and_openai_are_known():
    names = "system human user prompter gpt chatgpt assistant model function_call tool observation function_response"
    chat = as_chat({"conversations": [turn(name, "x") for name in names.split()]})
    assert [m["role"] for m in chat["messages"]] == ["system", *["user"] * 3, *["assistant"] * 5, *["tool"] * 3]


def test_an_alpaca_row_is_system_history_and_the_instruction_with_its_input():
    row = {"instruction": "q", "input": "x", "output": "a", "system": "s", "history": [["u1", "a1"]]}
    history = [{"role": "user", "content": "u1"}, {"role": "assistant", "content": "a1"}]
    assert as_chat(row)["messages"] == [S, *history, {"role": "user", "content": "q\nx"}, A]


def test_a_system_column_comes_before_the_chat_unless_the_chat_has_one():
    assert as_chat({"conversations": [U, A], "system": "s"})["messages"] == [S, U, A]
    assert as_chat({"conversations": [S, U, A], "system": "other"})["messages"] == [S, U, A]


def test_tool_calls_are_kept_with_their_arguments_as_objects_and_tools_may_be_json_text():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "content": "2", "tool_call_id": "1", "name": "f"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = as_chat({"messages": [U, answer, result, A], "tools": json.dumps(tools)})
    parsed = call | {"function": {"name": "f", "arguments": {"x": 1}}}
    assert chat["messages"] == [U, {"role": "assistant", "content": "", "tool_calls": [parsed]}, result, A]
    assert chat["tools"] == tools
    assert as_chat({"messages": [U, A], "tools": "[]"})["tools"] is None


def test_reasoning_is_kept():
    answer = A | {"reasoning_content": "because"}
    assert as_chat({"messages": [U, answer]})["messages"] == [U, answer]


def test_prompt_and_completion_are_read_as_strings_or_as_messages_of_which_the_prompt_is_not_trained():
    assert as_chat({"prompt": "q", "completion": "a"}) == {"prompt": "q", "completion": "a"}
    for row in ({"prompt": [S, U], "completion": [A]}, {"prompt": [S, U], "completion": "a"}):
        assert as_chat(row) == {"messages": [S, U, A], "tools": None, "prompt_turns": 2}
    assert as_chat({"prompt": "q", "completion": [A]}) == CHAT | {"prompt_turns": 1}


def test_text_is_a_document():
    assert as_chat({"text": "t"}) == {"text": "t"}
    assert as_text({"text": " t\n"}) == " t\n"
    assert as_text({"body": "t"}, "body") == "t"


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"messages": []}, "no messages"),
        ({"messages": None}, "no messages"),
        ({"messages": ["q", "a"]}, "a message is not an object"),
        ({"messages": [{"role": "narrator", "content": "q"}, A]}, "unknown role 'narrator'; known: system, user"),
        ({"messages": [{"content": "q"}, A]}, "unknown role None"),
        ({"messages": [{"role": "user"}, A]}, "a message without text content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, A]},
            "a message part that is not text",
        ),
        ({"messages": [U, {"role": "assistant", "content": " "}]}, "empty answer"),
        ({"messages": [U, A | {"tool_calls": ["f"]}]}, "a tool call is not an object"),
        ({"messages": [U, A | {"tool_calls": [{"function": "f"}]}]}, "a tool call is not an object"),
        ({"messages": [U, A], "tools": "[{"}, "tools is not valid JSON"),
        ({"messages": [U, A], "tools": ["f"]}, "tools is not a list of objects"),
        ({"messages": [U, {"role": "assistant", "content": "\ud83d"}]}, "not valid Unicode"),
        ({"instruction": "q", "output": ""}, "empty output"),
        ({"instruction": None, "output": "a"}, "instruction is not a string but NoneType"),
        ({"instruction": "q", "output": "a", "history": ["x"]}, "history is not a list of"),
        ({"prompt": "q", "completion": None}, "no messages"),
        ({"prompt": 3, "completion": "a"}, "no messages"),
        ({"text": ""}, "empty text"),
        ({"text": None}, "text is not a string"),
    ],
)
def test_a_chat_row_that_cannot_be_trained_on_is_refused_with_the_reason(row, reason):
    with pytest.raises(BadRow, match=re.escape(reason)) as caught:
        as_chat(row)
    line(caught)


# --- what of a chat is trained --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flag", [{"train": False}, {"loss_mask": 0}, {"weight": 0}, {"weight": 0.0}, {"train": True, "weight": 0}]
)
def test_a_turn_says_that_it_is_not_trained(flag):
    assert as_chat({"messages": [U, A | flag, U, B]})["messages"] == [U, A | {"train": False}, U, B]
    turns = [turn("human", "q"), turn("gpt", "a") | flag]
    assert as_chat({"conversations": turns})["messages"] == [U, A | {"train": False}]


@pytest.mark.parametrize("flag", [{"train": True}, {"loss_mask": 1}, {"weight": 1.0}, {"weight": None, "train": None}])
def test_a_turn_that_is_trained_says_nothing(flag):
    assert as_chat({"messages": [U, A | flag]}) == CHAT


@pytest.mark.parametrize("flag", [{"train": "no"}, {"loss_mask": [0, 1]}, {"weight": 0.5}])
def test_a_flag_of_a_turn_that_is_neither_true_nor_false_is_refused(flag):
    name, value = next(iter(flag.items()))
    with pytest.raises(BadRow, match=re.escape(f"{name} of a message is {value!r}; known: true, false, 0, 1")):
        as_chat({"messages": [U, A | flag]})


def test_a_turn_of_60_000_characters_is_kept_whole():
    long = {"role": "assistant", "content": "x y" * 20_000}
    assert as_chat({"messages": [U, long]})["messages"] == [U, long]


# --- pairs ----------------------------------------------------------------------------------------------------------

HH = "\n\nHuman: q\n\nAssistant: first\n\nHuman: more\n\nAssistant: "
HH_PROMPT = [U, {"role": "assistant", "content": "first"}, {"role": "user", "content": "more"}]


@pytest.mark.parametrize(
    "row, prompt",
    [
        ({"prompt": [U], "chosen": [A], "rejected": [B]}, [U]),
        ({"prompt": "q", "chosen": [A], "rejected": [B]}, [U]),
        ({"prompt": [S, U], "chosen": "a", "rejected": "b"}, [S, U]),
        ({"prompt": "q", "chosen": [U, A], "rejected": [U, B]}, [U]),
        ({"chosen": [S, U, A], "rejected": [S, U, B]}, [S, U]),
        ({"chosen": HH + "a", "rejected": HH + "b"}, HH_PROMPT),
        ({"conversations": [turn("human", "q")], "chosen": turn("gpt", "a"), "rejected": turn("gpt", "b")}, [U]),
        ({"conversations": [U], "system": "s", "chosen": A, "rejected": B}, [S, U]),
        ({"conversations": [U], "chosen": "a", "rejected": "b"}, [U]),
        ({"instruction": "q", "input": "", "chosen": "a", "rejected": "b", "system": "s"}, [S, U]),
    ],
)
def test_the_same_pair_is_read_from_every_format(row, prompt):
    assert as_preference(row) == {"prompt": prompt, "chosen": [A], "rejected": [B]}


def test_a_pair_of_plain_strings_stays_plain():
    row = {"prompt": "q", "chosen": " a", "rejected": " b", "score": 1}
    assert as_preference(row) == {"prompt": "q", "chosen": " a", "rejected": " b"}


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen equals rejected"),
        ({"prompt": "q", "chosen": "a", "rejected": ""}, "empty answer"),
        ({"prompt": "q", "chosen": None, "rejected": "b"}, "empty answer"),
        ({"prompt": "q", "chosen": "a", "rejected": " \n"}, "empty rejected"),
        ({"prompt": [U], "chosen": [A], "rejected": [{"role": "assistant", "content": ""}]}, "empty answer"),
        ({"chosen": HH + "a", "rejected": HH}, "empty answer"),
        ({"chosen": "\n\nAssistant: a\n\nHuman: q", "rejected": HH + "b"}, "no answer by the assistant at the end"),
        ({"chosen": "Hi.\n\nAssistant: a", "rejected": HH + "b"}, "text before the first Human:/Assistant: turn"),
        ({"chosen": [U, A], "rejected": [A, B]}, "no shared prompt"),
        ({"prompt": "q", "chosen": [U | {"content": "q!"}, A], "rejected": [B]}, "does not start with the assistant"),
        ({"prompt": [U], "chosen": [U, A], "rejected": [U]}, "does not start with the assistant"),
        ({"conversations": [U], "chosen": A, "rejected": B, "tools": '[{"name": "f"}]'}, "--columns unused=tools"),
    ],
)
def test_a_pair_that_cannot_be_trained_on_is_refused_with_the_reason(row, reason):
    with pytest.raises(BadRow, match=re.escape(reason)):
        as_preference(row)


# --- prompts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row, prompt",
    [
        ({"prompt": "q"}, "q"),
        ({"prompt": [S, U]}, [S, U]),
        ({"messages": [S, U, A]}, [S, U]),
        ({"conversations": [turn("human", "q"), turn("gpt", "a")]}, [U]),
        ({"instruction": "q", "input": "x", "output": "a"}, [{"role": "user", "content": "q\nx"}]),
    ],
)
def test_a_prompt_is_read_from_every_format_and_the_other_columns_are_kept_for_the_rewards(row, prompt):
    found = as_prompt(row | {"answer": 7, "level": None})
    assert found == row | {"answer": 7, "level": None, "prompt": prompt}


def test_the_ground_truth_of_a_verl_row_becomes_the_answer():
    row = {
        "data_source": "gsm8k",
        "prompt": [U],
        "reward_model": {"style": "rule", "ground_truth": "7"},
        "extra_info": {},
    }
    assert as_prompt(row) == row | {"answer": "7"}
    assert as_prompt(row | {"answer": "8"})["answer"] == "8"


@pytest.mark.parametrize("row", [{"prompt": " "}, {"prompt": []}, {"prompt": None}, {"prompt": [A]}])
def test_an_empty_prompt_is_refused(row):
    with pytest.raises(BadRow, match="empty prompt|no messages"):
        as_prompt(row)


# --- chats with a label ---------------------------------------------------------------------------------------------


def test_a_chat_with_a_label_is_that_chat_and_the_label():
    found = as_labelled({"prompt": "q", "completion": "a", "label": True})
    assert found == {"prompt": "q", "completion": "a", "label": True}
    row = Row({"prompt": [U], "completion": [A], "label": 0, "kto_tag": None}, "rows.jsonl:1", "prompt_completion")
    assert as_labelled(row) == as_chat({"prompt": [U], "completion": [A]}) | {"label": False}
    found = as_labelled({"conversations": [U, A, U, B], "system": "s", "kto_tag": False})
    assert found["label"] is False and found["messages"][found["prompt_turns"] :] == [B]


@pytest.mark.parametrize("label, good", [("True", True), ("false", False), (" 1", True), ("0", False), (1.0, True)])
def test_a_label_may_be_written_as_text_as_tables_have_it(label, good):
    assert as_labelled({"prompt": "q", "completion": "a", "label": label})["label"] is good


@pytest.mark.parametrize("label", ["good", "", "10", 2, -1.0, None])
def test_a_label_that_is_neither_true_nor_false_leaves_the_row_out(label):
    with pytest.raises(BadRow, match="expected true or false"):
        as_labelled(Row({"prompt": "q", "completion": "a", "label": label}, "rows.jsonl:1", "prompt_completion"))


def test_answers_after_the_prompts_of_others():
    """Each prompt, the tokens before the first trained one, with the next answer; of a prompt too long for it nothing remains."""
    rows = [([1, 2, 3], [7, 8]), ([4], [9]), ([], [5, 6])]
    rows = [
        {"input_ids": np.array(p + a), "loss_mask": np.array([0] * len(p) + [1] * len(a)), "label": True} for p, a in rows
    ]
    found = mismatched(rows, 4)
    assert all(len(example) == 1 and {*example[0]} == {"input_ids", "loss_mask"} for example in found)
    assert [example[0]["input_ids"].tolist() for example in found] == [[7, 8], [1, 2, 3, 9], [4, 5, 6]]
    assert [example[0]["loss_mask"].tolist() for example in found] == [[1, 1], [0, 0, 0, 1], [0, 1, 1]]
    assert [example[0]["loss_mask"].tolist() for example in mismatched(rows, 3)] == [[1, 1], [0, 0, 0], [0, 1, 1]]


# --- numbers --------------------------------------------------------------------------------------------------------


def test_a_number_may_be_written_as_text_as_tables_have_it():
    for value, found in ((3, 3.0), (-0.5, -0.5), ("3", 3.0), (" -.5", -0.5), ("+1e3", 1000.0), ("2.", 2.0), (0, 0.0)):
        assert number_of({"score": value}, "score") == found
    assert (
        number_of({"score": ""}, "score", 7.0)
        == number_of({"score": None}, "score", 7.0)
        == number_of({}, "score", 7.0)
        == 7
    )
    for value in ("x", "1_000", "nan", "inf", "1e16", "1 2", "٣", True, [1], float("nan"), 10**40):
        with pytest.raises(BadRow, match="score is .*; expected a number"):
            number_of({"score": value}, "score", 7.0)
    for columns in ({}, {"score": None}, {"score": ""}):
        with pytest.raises(BadRow, match="no number in the column score"):
            number_of(columns, "score")


def test_reasons_that_name_a_value_each_are_told_apart_up_to_a_number(capsys):
    rows = [Row({"score": f"x{i}"}, f"rows.jsonl:{i}") for i in range(1, 501)] + [Row({"score": 1}, "rows.jsonl:501")]
    found, facts = convert(rows, lambda row: number_of(row, "score"), "rows")
    reasons = facts["dropped"]
    assert found == [1.0] and len(reasons) == MOST + 1 and reasons["other reasons"]["count"] == 500 - MOST
    assert reasons["other reasons"]["first"][0] == f"rows.jsonl:{MOST + 1}"
    assert len(capsys.readouterr().out.splitlines()) == MOST + 1
    both = Dropped(reasons)
    both.merge(Dropped({"one more": {"count": 3, "first": ["a"]}, "other reasons": {"count": 1, "first": ["b"]}}))
    assert len(both.reasons) == MOST + 1 and both.reasons["other reasons"]["count"] == 500 - MOST + 4


# --- wrong columns --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function, row, expected",
    [
        (as_text, {"body": "t"}, "no column text; found body (map it: --columns text=...)"),
        (as_chat, {"question": "q", "answer": "a"}, "question, answer; needed: messages, conversations"),
        (as_preference, {"prompt": "q", "good": "a"}, "no column chosen and rejected; found prompt, good"),
        (as_preference, {"chosen": "a", "rejected": "b"}, "need a prompt; found columns chosen, rejected"),
        (as_prompt, {"question": "q"}, "no column prompt; found question (map it: --columns prompt=question)"),
        (as_preference, {"prompt": "q", "completion": "a", "label": True}, "are for KTO"),
        (as_preference, {"messages": [U, A], "kto_tag": False}, "are for KTO"),
        (as_chat, {"prompt": "q", "completion": "a", "label": False}, "are for KTO"),
        (as_chat, {"prompt": "q", "completion": "a", "label": "True"}, "are for KTO"),  # of a table
    ],
)
def test_rows_of_another_kind_are_an_error_that_names_the_columns_found_and_needed(function, row, expected):
    with pytest.raises(UserError) as caught:
        convert([Row(row, "rows.jsonl:1")], function, "rows")
    assert line(caught).startswith("rows.jsonl:1: ") and expected in line(caught)


# --- which format ---------------------------------------------------------------------------------------------------

HH_PAIR = {"chosen": HH + "a", "rejected": HH + "b"}
VERL = {"prompt": [U], "data_source": "gsm8k", "extra_info": {"i": 1}, "reward_model": {"ground_truth": "7"}}


@pytest.mark.parametrize(
    "recognise, row, name",
    [
        (chat_format, {"messages": [U, A]}, "messages"),
        (chat_format, {"conversations": [U, A], "system": "s"}, "sharegpt"),
        (chat_format, {"instruction": "q", "input": "", "output": "a"}, "alpaca"),
        (chat_format, {"prompt": "q", "completion": "a"}, "prompt_completion"),
        (chat_format, {"text": "t"}, "text"),
        (chat_format, {"messages": [U, A], "prompt": "q", "completion": "a", "text": "t"}, "messages"),
        (chat_format, {"messages": None, "conversations": None, "instruction": "q", "output": "a"}, "alpaca"),
        (labelled_format, {"prompt": "q", "completion": "a", "label": True}, "prompt_completion"),
        (labelled_format, {"messages": [U, A], "label": 0}, "messages"),
        (labelled_format, {"conversations": [U, A], "kto_tag": False}, "sharegpt"),
        (labelled_format, {"instruction": "q", "output": "a", "label": None, "kto_tag": True}, "alpaca"),
        (preference_format, {"prompt": "q", "chosen": "a", "rejected": "b"}, "explicit_prompt"),
        (preference_format, {"prompt": None, "chosen": [U, A], "rejected": [U, B]}, "implicit_prompt"),
        (preference_format, HH_PAIR, "hh"),
        (preference_format, {"conversations": [U], "chosen": A, "rejected": B}, "sharegpt"),
        (preference_format, {"messages": [U], "chosen": A, "rejected": B}, "sharegpt"),
        (preference_format, {"instruction": "q", "chosen": "a", "rejected": "b"}, "alpaca"),
        (prompt_format, {"prompt": "q", "answer": 7}, "prompt"),
        (prompt_format, {"prompt": None, "messages": [U]}, "messages"),
        (prompt_format, {"conversations": [U]}, "sharegpt"),
        (prompt_format, {"instruction": "q", "output": "a"}, "alpaca"),
        (prompt_format, VERL, "verl"),
        (prompt_format, VERL | {"reward_model": {"style": "rule"}}, "prompt"),
        (text_format, {"text": "t"}, "text"),
    ],
)
def test_a_format_is_recognised_by_the_columns_that_are_not_null(recognise, row, name):
    assert recognise(row) == name
    assert recognise(row, name) == name


@pytest.mark.parametrize(
    "recognise, row, wanted, expected",
    [
        (chat_format, {"question": "q", "text": None}, None, "fits the columns question, text (null); needed: messages"),
        (chat_format, {}, None, "fits the columns none; needed: messages"),
        (
            chat_format,
            {"text": "t"},
            "openai",
            "--dataset_format openai: known here are messages, sharegpt, alpaca, prompt_c",
        ),
        (chat_format, {"text": "t"}, "alpaca", "the format alpaca needs instruction + output; found text (map columns"),
        (chat_format, {"messages": None, "text": "t"}, "messages", "needs messages; found messages (null), text"),
        (chat_format, {"messages": [U, A], "label": True}, "messages", "are for KTO"),
        (
            labelled_format,
            {"prompt": "q", "chosen": "a", "rejected": "b"},
            None,
            "pairs are for DPO; here a row is one answer",
        ),
        (labelled_format, {"prompt": "q", "completion": "a"}, None, "no column label (true: a good answer, false"),
        (
            labelled_format,
            {"text": "t", "label": True},
            None,
            "needs prompt + completion, or a chat; found columns text, label",
        ),
        (
            labelled_format,
            {"messages": [U, A], "label": True},
            "alpaca",
            "the format alpaca needs instruction + output; found",
        ),
        (preference_format, {"chosen": "a", "rejected": "b"}, None, "need a prompt; found columns chosen, rejected"),
        (preference_format, {"prompt": "q", "chosen": None, "rejected": "b"}, None, "found prompt, chosen (null), rejected"),
        (preference_format, {"prompt": "q", "completion": "a", "label": False}, None, "are for KTO"),
        (labelled_format, {"prompt": "q", "chosen": "a", "rejected": "b", "label": True}, None, "pairs are for DPO"),
        (
            preference_format,
            {"chosen": [U, A], "rejected": [U, B]},
            "sharegpt",
            "needs conversations + chosen + rejected or messages + chosen + rejected; found chosen, rejected",
        ),
        (preference_format, HH_PAIR, "kto", "known here are explicit_prompt, sharegpt, alpaca, implicit_prompt, hh"),
        (prompt_format, {"question": "q"}, None, "no column prompt; found question (map it: --columns prompt=question)"),
        (prompt_format, {"prompt": "q"}, "verl", "the format verl needs prompt + reward_model; found prompt"),
        (text_format, {"text": None}, None, "no column text; found text (null)"),
        (text_format, {"text": "t"}, "messages", "--dataset_format messages: known here are text"),
    ],
)
def test_columns_that_fit_no_format_or_not_the_wanted_one_are_an_error(recognise, row, wanted, expected):
    with pytest.raises(UserError, match=re.escape(expected)) as caught:
        recognise(row, wanted)
    line(caught)


def test_a_text_column_may_have_another_name():
    assert text_format({"body": "t"}, field="body") == "text"


@pytest.mark.parametrize(
    "form, row, format, result",
    [
        (as_chat, {"messages": [U, B], "instruction": "q", "output": "a"}, "alpaca", CHAT),
        (as_chat, {"messages": [U, B], "conversations": [U, A]}, "sharegpt", CHAT),
        (as_chat, {"messages": [U, A], "text": "t"}, "text", {"text": "t"}),
        (
            as_preference,
            {"prompt": "other", "chosen": [U, A], "rejected": [U, B]},
            "implicit_prompt",
            {"prompt": [U], "chosen": [A], "rejected": [B]},
        ),
        (as_preference, {"prompt": "p"} | HH_PAIR, "hh", {"prompt": HH_PROMPT, "chosen": [A], "rejected": [B]}),
        (as_prompt, {"prompt": "p", "messages": [U, A]}, "messages", {"prompt": [U], "messages": [U, A]}),
        (as_prompt, VERL, "verl", VERL | {"answer": "7"}),
    ],
)
def test_the_format_that_is_insisted_on_is_read_where_another_would_be_recognised(form, row, format, result):
    assert form(row, format) == result


@pytest.mark.parametrize(
    "form, row, format, reason",
    [
        (as_chat, {"messages": None, "text": "t"}, "messages", "no messages"),
        (as_chat, {"instruction": "q", "output": None}, "alpaca", "output is not a string but NoneType"),
        (as_chat, {"messages": None, "prompt": None, "other": 1}, None, "no messages"),
        (as_preference, {"prompt": None, "chosen": "a", "rejected": "b"}, "explicit_prompt", "no messages"),
        (as_preference, {"chosen": [U, A], "rejected": None}, "implicit_prompt", "empty answer"),
        (as_preference, {"chosen": [U, A], "rejected": [U, B]}, "hh", "chosen is not a string but list"),
        (as_preference, {"chosen": "a", "rejected": "b"}, "implicit_prompt", "no messages"),
        (as_prompt, VERL | {"reward_model": {"style": "rule"}}, "verl", "reward_model has no ground_truth"),
        (as_prompt, VERL | {"reward_model": None}, "verl", "reward_model has no ground_truth"),
    ],
)
def test_a_row_with_a_null_where_its_format_needs_a_value_is_left_out_and_not_a_mistake(form, row, format, reason):
    with pytest.raises(BadRow, match=re.escape(reason)):
        form(row, format)


@pytest.mark.parametrize("form", [as_chat, as_preference, as_prompt])
def test_a_row_without_the_columns_of_its_format_is_a_mistake(form):
    with pytest.raises(UserError, match="the format sharegpt needs conversations"):
        form({"text": "t"}, "sharegpt")
