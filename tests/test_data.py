"""Rows: every format that users have is read as what it means, from every source, or refused in one clear line."""

import gzip
import json
import re

from common.data import BadRow, Row, as_chat, as_preference, as_prompt, as_text, convert, hold_out, load_rows
from common.errors import UserError

import pytest

U, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
S = {"role": "system", "content": "s"}
B = {"role": "assistant", "content": "b"}
CHAT = {"messages": [U, A], "tools": None}


def turn(name, text):
    return {"from": name, "value": text}


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


def columns(rows):
    return [row.columns for row in rows]


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


# --- wrong columns --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "function, row, expected",
    [
        (as_text, {"body": "t"}, "no column text; found body (map it: --columns text=...)"),
        (as_chat, {"question": "q", "answer": "a"}, "question, answer; needed: messages, conversations"),
        (as_preference, {"prompt": "q", "good": "a"}, "no column chosen and rejected; found prompt, good"),
        (as_preference, {"chosen": "a", "rejected": "b"}, "need a prompt; found columns chosen, rejected"),
        (as_prompt, {"question": "q"}, "no column prompt; found question (map it: --columns prompt=question)"),
        (as_preference, {"prompt": "q", "completion": "a", "label": True}, "(KTO) are not read"),
        (as_preference, {"messages": [U, A], "kto_tag": False}, "(KTO) are not read"),
        (as_chat, {"prompt": "q", "completion": "a", "label": False}, "(KTO) are not read"),
    ],
)
def test_rows_of_another_kind_are_an_error_that_names_the_columns_found_and_needed(function, row, expected):
    with pytest.raises(UserError) as caught:
        convert([Row("rows.jsonl:1", row)], function, "rows")
    assert line(caught).startswith("rows.jsonl:1: ") and expected in line(caught)


def test_rows_left_out_are_counted_aloud_with_their_place(capsys):
    rows = [Row(f"rows.jsonl:{i}", {"messages": m}) for i, m in enumerate([[U, A], [], [U, A], []])]
    assert convert(rows, as_chat, "rows") == [CHAT, CHAT]
    assert capsys.readouterr().out == "data: 2 of 4 rows left out: no messages (first: rows.jsonl:1)\n"
    with pytest.raises(UserError, match="none of the 2 rows can be used; the first: no messages"):
        convert([rows[1], rows[3]], as_chat, "rows")


# --- sources --------------------------------------------------------------------------------------------------------

ROWS = [{"text": "one\nline"}, {"text": "你好 é 🙂"}, {"text": "three"}]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


@pytest.mark.parametrize(
    "name, text",
    [
        ("rows.jsonl", LINES),
        ("rows.jsonl", "\n" + LINES.replace("\n", "\r\n\r\n")),
        ("rows.jsonl", "\ufeff" + LINES),
        ("rows.jsonl", json.dumps(ROWS)),
        ("rows.json", json.dumps(ROWS)),
        ("rows.json", json.dumps(ROWS, indent=1)),
        ("rows.json", LINES),
        ("rows.txt", "\n\none\nline\n\n你好 é 🙂\n \nthree"),
        ("rows.csv", 'text\n"one\nline"\n你好 é 🙂\nthree\n'),
    ],
)
def test_a_file_is_read_by_its_suffix(tmp_path, name, text):
    assert columns(load_rows(write(tmp_path / name, text))) == ROWS


@pytest.mark.parametrize("name, text", [("a.jsonl.gz", LINES), ("a.json.gz", json.dumps(ROWS)), ("a.txt.gz", "one\nline\n")])
def test_a_file_may_be_gzipped(tmp_path, name, text):
    (tmp_path / name).write_bytes(gzip.compress(text.encode()))
    assert columns(load_rows(str(tmp_path / name)))[0] == ROWS[0]


def test_parquet_and_folders_of_save_to_disk_are_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([{"messages": [U, A], "n": i} for i in range(3)])
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(tmp_path / "splits")
    for name in ("rows.parquet", "saved", "splits"):
        rows = load_rows(str(tmp_path / name))
        assert columns(rows) == list(table) and as_chat(rows[0].columns) == CHAT
    assert columns(load_rows(str(tmp_path / "splits"), "test")) == [{"messages": [U, A], "n": 1}]
    assert load_rows(str(tmp_path / "splits"), "validation", optional=True) == []
    assert load_rows(str(tmp_path / "saved"), "validation", optional=True) == []
    with pytest.raises(UserError, match="no split validation; found train, test"):
        load_rows(str(tmp_path / "splits"), "validation")


def test_a_folder_gives_the_files_named_after_the_split_in_order(tmp_path):
    for name in ("train-00001.jsonl", "train-00000.jsonl", "validation.jsonl", "README.md"):
        write(tmp_path / name, json.dumps({"text": name}) + "\n")
    assert columns(load_rows(str(tmp_path))) == [{"text": "train-00000.jsonl"}, {"text": "train-00001.jsonl"}]
    assert columns(load_rows(str(tmp_path), "validation")) == [{"text": "validation.jsonl"}]
    assert load_rows(str(tmp_path), "test", optional=True) == []
    with pytest.raises(UserError) as caught:
        load_rows(str(tmp_path), "test")
    assert "no file for split test" in line(caught) and "found train-00000.jsonl" in line(caught)


def test_a_folder_without_names_of_splits_is_all_training(tmp_path):
    for name in ("b.txt", "a.jsonl"):
        write(tmp_path / name, '{"text": "x"}')
    assert len(load_rows(str(tmp_path))) == 2
    assert load_rows(str(tmp_path), "validation", optional=True) == []


def test_several_sources_follow_one_another_and_rows_know_their_place(tmp_path):
    names = [write(tmp_path / "a.jsonl", LINES), write(tmp_path / "b.txt", "x\n\n\ny")]
    rows = load_rows(names)
    assert columns(rows) == [*ROWS, {"text": "x"}, {"text": "y"}]
    assert [rows[i].where for i in (1, 4)] == [f"{names[0]}:2", f"{names[1]}:4"]


def test_a_single_file_has_no_other_splits_but_is_read_whole_where_a_split_is_demanded(tmp_path):
    name = write(tmp_path / "a.jsonl", LINES)
    assert load_rows(name, "validation", optional=True) == []
    assert columns(load_rows(name, "validation")) == ROWS


def test_columns_are_renamed(tmp_path):
    name = write(tmp_path / "a.jsonl", '{"question": "q", "answer": "a"}\n')
    assert columns(load_rows(name, rename=["prompt=question"])) == [{"answer": "a", "prompt": "q"}]
    with pytest.raises(UserError, match="--columns prompt: expected new=old, for instance prompt=question"):
        load_rows(name, rename=["prompt"])
    with pytest.raises(UserError, match=r"--columns x=y: .*a.jsonl:1 has no column y; it has question, answer"):
        load_rows(name, rename=["x=y"])


@pytest.mark.parametrize(
    "name, content, expected",
    [
        ("a.jsonl", b"", "a.jsonl: the file is empty"),
        ("a.txt", b" \n\n", "a.txt: the file is empty"),
        ("a.json", b"", "a.json: the file is empty"),
        ("a.json", b"[]", "no rows in split train"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl:2: not valid JSON: Expecting value"),
        ("a.json", b'[\n{"text": "x"},\n{"text": }\n]', "a.json:3: not valid JSON: Expecting value"),
        ("a.json", b'{"data": [1]}', "a.json: expected a list of rows, [{...}, ...], found dict"),
        ("a.json", b'["x"]', "a.json row 1: expected an object {column: value}, found str"),
        ("a.jsonl", b'{"text": "x"}\n3\n', "a.jsonl:2: expected an object {column: value}, found int"),
        ("a.jsonl", b'{"text": "\xff"}\n', "a.jsonl: cannot be read as UTF-8 text"),
        ("a.jsonl.gz", b"not gzip", "a.jsonl.gz: cannot be read as UTF-8 text"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}' * 99)[:20], "a.jsonl.gz: cannot be read as UTF-8 text"),
        ("a.csv", b"", "a.csv"),
        ("a.csv", b'text\n"\xff"\n', "a.csv"),
        ("a.parquet", b"not parquet", "a.parquet"),
        ("a.docx", b"x", "a.docx: unknown kind of file; expected .jsonl, .json, .txt, .csv, .parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_of_one_line_with_its_place(tmp_path, name, content, expected):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_rows(str(tmp_path / name))
    assert expected in line(caught)


@pytest.mark.parametrize("name", ["missing.jsonl", "./missing", "~/missing-folder", "no-such/dataset-on-the-hub"])
def test_a_missing_source_is_an_error_of_one_line(name):
    with pytest.raises(UserError) as caught:
        load_rows(name)
    assert line(caught).startswith(f"--dataset_name {name}") and "no such file" in line(caught)


def test_an_empty_folder_is_an_error(tmp_path):
    with pytest.raises(UserError, match="no file for split train .*found no data file"):
        load_rows(str(tmp_path))


# --- held-out rows --------------------------------------------------------------------------------------------------


def test_held_out_rows_stay_held_out_when_rows_are_added_or_moved():
    rows = [Row(f"a:{i}", {"text": f"row {i} \ud83d"}) for i in range(1000)]
    train, held_out = hold_out(rows, 0.1)
    assert len(train) + len(held_out) == 1000 and 60 < len(held_out) < 140
    added = [Row("b", {"text": f"new {i}"}) for i in range(1000)]
    again = hold_out(added + [Row("c", row.columns) for row in reversed(rows)], 0.1)[1]
    assert {row.columns["text"] for row in held_out} <= {row.columns["text"] for row in again}
    assert not {row.columns["text"] for row in train} & {row.columns["text"] for row in again}


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, 10])
def test_the_held_out_share_is_between_0_and_1(fraction):
    with pytest.raises(UserError, match="--eval_fraction is a share between 0 and 1"):
        hold_out([], fraction)
