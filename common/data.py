"""Rows: read any source, recognise its format by its columns, and bring it to one form per stage.

A row is a `Row(where, columns)`: where it came from ("chats.jsonl:12") and its columns. The forms:
text -> str; chat -> messages, or prompt and completion strings; preference -> prompt, chosen, rejected;
prompt -> prompt and everything else for the rewards.
"""

import gzip
import hashlib
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError, say

Message = dict[str, Any]
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
SUFFIXES = (".jsonl", ".json", ".txt", ".csv", ".parquet")


class Row(NamedTuple):
    where: str
    columns: dict[str, Any]


class BadRow(Exception):
    """This one row cannot be used; the message is the reason under which it is counted."""


# --- sources --------------------------------------------------------------------------------------------------------


def load_rows(
    names: list[str] | str,
    split: str = "train",
    config: str | None = None,
    rename: list[str] | None = None,
    optional: bool = False,
) -> list[Row]:
    """All rows of a split of one or several sources, in order.

    names: a file (json, jsonl, txt, csv, parquet; also .gz for the first three), a folder (files named after the split,
    e.g. train.jsonl; else, for "train", all data files in it; or one written by save_to_disk), or a Hub name. A .txt file
    gives one row {"text"} per paragraph (blocks between blank lines). rename: "new=old" column names. optional: an absent
    split gives no rows instead of an error. Raises UserError for a missing or empty source, or what cannot be parsed.
    """
    names = [names] if isinstance(names, str) else names
    rows = [row for name in names for row in _load_source(name, split, config, optional)]
    for pair in rename or []:
        new, eq, old = pair.partition("=")
        if not (new and eq and old):
            raise UserError(f"--columns {pair}: expected new=old, for instance prompt=question")
        for row in rows:
            if old not in row.columns:
                raise UserError(f"--columns {pair}: {row.where} has no column {old}; it has {_names(row.columns)}")
            row.columns[new] = row.columns.pop(old)
    if not rows and not optional:
        raise UserError(f"--dataset_name {' '.join(names)}: no rows in split {split}")
    return rows


def hold_out(rows: list[Row], fraction: float) -> tuple[list[Row], list[Row]]:
    """(training, held-out) rows. The choice is a hash of the row, so it stays the same when rows are added."""
    if not 0.0 < fraction < 1.0:
        raise UserError(f"--eval_fraction is a share between 0 and 1, not {fraction}")
    train, held_out = [], []
    for row in rows:
        text = json.dumps(row.columns, sort_keys=True, ensure_ascii=False, default=str)
        draw = int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64
        (held_out if draw < fraction else train).append(row)
    return train, held_out


def _load_source(name: str, split: str, config: str | None, optional: bool) -> list[Row]:
    path = Path(name).expanduser()
    if path.is_file():
        return _read_file(path) if split == "train" or not optional else []
    if path.is_dir():
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            return _from_datasets(str(path), split, config, optional, saved=True)
        files = sorted(f for f in path.iterdir() if _suffix(f) in SUFFIXES)
        named = [f for f in files if f.name.split(".")[0].split("-")[0] == split]
        if not named and split == "train" and not any(f.name.startswith(("validation", "test", "dev")) for f in files):
            named = files
        if not named and not optional:
            found = ", ".join(f.name for f in files) or "no data file"
            raise UserError(
                f"--dataset_name {name}: no file for split {split} (looked for {split}.jsonl, ...; found {found})"
            )
        return [row for f in named for row in _read_file(f)]
    if _suffix(path) in SUFFIXES or name.startswith((".", "/", "~")):
        raise UserError(f"--dataset_name {name}: there is no such file")
    return _from_datasets(name, split, config, optional, saved=False)


def _suffix(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def _read_file(path: Path) -> list[Row]:
    kind = _suffix(path)
    if kind in (".csv", ".parquet"):
        return _from_datasets(str(path), "train", None, False, saved=False)
    if kind not in SUFFIXES:
        raise UserError(f"{path}: unknown kind of file; expected {', '.join(SUFFIXES)}")
    try:
        with (gzip.open if path.name.endswith(".gz") else open)(path, "rt", encoding="utf-8-sig") as file:
            text = file.read()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    if not text.strip():
        raise UserError(f"{path}: the file is empty")
    if kind == ".txt":
        return [Row(f"{path}:{line}", {"text": block}) for line, block in _paragraphs(text)]
    if kind == ".json" or text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            if text.lstrip().startswith("{") and "\n{" in text:
                return _json_lines(path, text)  # JSON lines under the wrong name
            raise UserError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from None
        if not isinstance(values, list):
            raise UserError(f"{path}: expected a list of rows, [{{...}}, ...], found {type(values).__name__}")
        rows = [Row(f"{path} row {i + 1}", value) for i, value in enumerate(values)]
    else:
        return _json_lines(path, text)
    return [_checked(row) for row in rows]


def _json_lines(path: Path, text: str) -> list[Row]:
    rows = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                rows.append(_checked(Row(f"{path}:{number}", json.loads(line))))
            except json.JSONDecodeError as error:
                raise UserError(f"{path}:{number}: not valid JSON: {error.msg}") from None
    return rows


def _checked(row: Row) -> Row:
    if not isinstance(row.columns, dict):
        raise UserError(f"{row.where}: expected an object {{column: value}}, found {type(row.columns).__name__}")
    return row


def _paragraphs(text: str) -> Iterable[tuple[int, str]]:
    """(line number, block) of the blocks between blank lines."""
    block, first = [], 1
    for number, line in enumerate([*text.split("\n"), ""], 1):
        if line.strip():
            if not block:
                first = number
            block.append(line)
        elif block:
            yield first, "\n".join(block)
            block = []


def _from_datasets(name: str, split: str, config: str | None, optional: bool, saved: bool) -> list[Row]:
    """csv, parquet, save_to_disk folders and the Hub, through the datasets library."""
    try:
        import datasets
    except ImportError:
        raise UserError(f"--dataset_name {name}: reading it needs the datasets library: pip install datasets") from None
    try:
        if saved:
            table = datasets.load_from_disk(name)
            if not isinstance(table, datasets.DatasetDict):
                table = datasets.DatasetDict({"train" if optional else split: table})
            if split not in table and not optional:
                raise ValueError(f"no split {split}; found {', '.join(table)}")
            table = table.get(split, [])
        elif Path(name).is_file():
            table = datasets.load_dataset(_suffix(Path(name))[1:], data_files=name, split="train")
        else:
            table = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the library raises many kinds, with texts of many lines
        reason = " ".join(str(error).split())[:300]
        if optional and "nknown split" in reason:
            return []
        hint = "" if Path(name).exists() else " (no such file or folder here; as a Hub name it cannot be loaded)"
        raise UserError(f"--dataset_name {name}{hint}: {reason}") from None
    return [Row(f"{name} row {i + 1}", dict(columns)) for i, columns in enumerate(table)]


# --- formats --------------------------------------------------------------------------------------------------------


def as_text(columns: dict[str, Any], field: str = "text") -> str:
    """The document of a pretraining row."""
    if field not in columns:
        raise UserError(f"no column {field}; found {_names(columns)} (map it: --columns {field}=...)")
    return _string(columns, field)


def as_chat(columns: dict[str, Any]) -> dict[str, Any]:
    """{"messages", "tools"}, or {"prompt", "completion"} strings, or {"text"}.

    Reads messages, ShareGPT conversations, Alpaca (instruction, input, output, system, history), prompt and completion
    (strings or messages), text. Raises UserError where no format fits, BadRow for a row that cannot be trained on.
    """
    tools = _tools(columns)
    _refuse_labels(columns)
    if "messages" in columns or "conversations" in columns:
        return {"messages": _answered(_conversation(columns)), "tools": tools}
    if "instruction" in columns and "output" in columns:
        answer = [{"role": "assistant", "content": _string(columns, "output")}]
        return {"messages": _alpaca_prompt(columns) + answer, "tools": tools}
    if "prompt" in columns and "completion" in columns:
        prompt, completion = columns["prompt"], columns["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return {"prompt": _string(columns, "prompt"), "completion": _string(columns, "completion")}
        prompt = _messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        return {"messages": prompt + _answered(_answer(completion)), "tools": tools, "prompt_turns": len(prompt)}
    if "text" in columns:
        return {"text": as_text(columns)}
    raise UserError(
        f"no chat format fits the columns {_names(columns)}; needed: messages, conversations, instruction + output, "
        "prompt + completion, or text (map columns with --columns new=old)"
    )


def as_preference(columns: dict[str, Any]) -> dict[str, Any]:
    """{"prompt", "chosen", "rejected"}: all strings (plain text) or all lists of messages; chosen and rejected are the
    answers only.

    Reads prompt + chosen + rejected (strings or messages); chosen + rejected as whole conversations, whose longest shared
    beginning is the prompt; HH-RLHF strings ("\\n\\nHuman: ...\\n\\nAssistant: ..."); LLaMA-Factory's conversations or
    instruction with chosen and rejected. Raises UserError where no format fits, BadRow for an unusable row.
    """
    if "chosen" not in columns or "rejected" not in columns:
        _refuse_labels(columns)
        raise UserError(f"no column chosen and rejected; found {_names(columns)} (map them: --columns chosen=...)")
    if _tools(columns):
        raise BadRow("a pair with tools (to train without them: --columns unused=tools)")
    chosen, rejected = columns["chosen"], columns["rejected"]
    if not chosen or not rejected:
        raise BadRow("empty answer")
    if all(isinstance(side, str) and "\n\nAssistant:" in side for side in (chosen, rejected)) and "prompt" not in columns:
        chosen, rejected = _hh_messages(chosen), _hh_messages(rejected)

    if "prompt" in columns:
        prompt = columns["prompt"]
        if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
            pair = {name: _string(columns, name) for name in ("prompt", "chosen", "rejected")}
        else:
            turns = _messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
            chosen, rejected = _answer(chosen), _answer(rejected)
            if len(chosen) > len(turns) and chosen[: len(turns)] == turns and rejected[: len(turns)] == turns:
                chosen, rejected = chosen[len(turns) :], rejected[len(turns) :]  # the prompt is repeated in the sides
            pair = {"prompt": turns, "chosen": chosen, "rejected": rejected}
    elif "conversations" in columns or "messages" in columns:
        pair = {"prompt": _conversation(columns), "chosen": _answer(chosen), "rejected": _answer(rejected)}
    elif "instruction" in columns:
        pair = {"prompt": _alpaca_prompt(columns), "chosen": _answer(chosen), "rejected": _answer(rejected)}
    elif isinstance(chosen, list) and isinstance(rejected, list):
        chosen, rejected = _messages(chosen), _messages(rejected)
        shared = 0
        while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
            shared += 1
        pair = {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}
    else:
        raise UserError(f"chosen and rejected need a prompt; found columns {_names(columns)}")
    if not pair["prompt"]:
        raise BadRow("no shared prompt")
    if pair["chosen"] == pair["rejected"]:
        raise BadRow("chosen equals rejected")
    for side in (pair["chosen"], pair["rejected"]):
        if not isinstance(side, str) and [m["role"] for m in _answered(side)][:1] != ["assistant"]:
            raise BadRow("an answer that does not start with the assistant")
    return pair


def as_prompt(columns: dict[str, Any]) -> dict[str, Any]:
    """The row with "prompt" (a string, or messages that end on a user turn); the other columns are kept for the rewards.

    Reads prompt; or messages, conversations, Alpaca, of which a last assistant turn is cut off. verl's
    reward_model.ground_truth becomes the column answer.
    """
    row = dict(columns)
    if isinstance(row.get("reward_model"), dict) and "ground_truth" in row["reward_model"]:
        row.setdefault("answer", row["reward_model"]["ground_truth"])
    if row.get("tools"):
        row["tools"] = _tools(row)
    if "prompt" in row:
        prompt = _string(row, "prompt") if isinstance(row["prompt"], str) else _messages(row["prompt"])
    elif "messages" in row or "conversations" in row:
        prompt = _conversation(row)
    elif "instruction" in row:
        prompt = _alpaca_prompt(row)
    else:
        raise UserError(f"no column prompt; found {_names(row)} (map it: --columns prompt=question)")
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        prompt = prompt[:-1]
    if not prompt:
        raise BadRow("empty prompt")
    return row | {"prompt": prompt}


def convert(rows: list[Row], function: Callable[[dict[str, Any]], Any], what: str) -> list[Any]:
    """`function` on the columns of each row; rows that it refuses (BadRow) are left out, counted, aloud.

    Raises UserError, with the row's place, where the function does, and where no row is left.
    """
    results, dropped, first = [], Counter(), {}
    for row in rows:
        try:
            result = function(row.columns)
        except UserError as error:
            raise UserError(f"{row.where}: {error}") from None
        except BadRow as reason:
            dropped[str(reason)] += 1
            first.setdefault(str(reason), row.where)
        else:
            results.append(result)
    for reason, count in dropped.most_common():
        say(f"data: {count} of {len(rows)} {what} left out: {reason} (first: {first[reason]})")
    if rows and not results:
        raise UserError(f"none of the {len(rows)} {what} can be used; the first: {', '.join(dropped)}")
    return results


def _names(columns: dict[str, Any]) -> str:
    return ", ".join(columns)


def _string(columns: dict[str, Any], name: str) -> str:
    value = columns[name]
    if not isinstance(value, str):
        raise BadRow(f"{name} is not a string but {type(value).__name__}")
    if not value.strip():
        raise BadRow(f"empty {name}")
    return _unicode(value)


def _unicode(text: str) -> str:
    """The text, checked: JSON can hold half of a surrogate pair, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRow("text that is not valid Unicode (half a surrogate pair)") from None
    return text


def _refuse_labels(columns: dict[str, Any]) -> None:
    """KTO's rows look like prompt and completion, but some of the completions are bad ones."""
    if "kto_tag" in columns or isinstance(columns.get("label"), bool):
        raise UserError(
            "rows with a label, good or bad, instead of a pair (KTO) are not read: DPO needs chosen and rejected; "
            "for SFT keep the good rows, without the column"
        )


def _tools(columns: dict[str, Any]) -> list[Any] | None:
    tools = columns.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except json.JSONDecodeError:
            raise BadRow("tools is not valid JSON") from None
    tools = [tools] if isinstance(tools, dict) else tools
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRow("tools is not a list of objects")
    return tools or None


def _conversation(columns: dict[str, Any]) -> list[Message]:
    """The messages or conversations column, with the system column before it."""
    messages = _messages(columns.get("messages") or columns.get("conversations"))
    system = columns.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": _unicode(system)}, *messages]
    return messages


def _answered(messages: list[Message]) -> list[Message]:
    """Messages, checked: each turn of the assistant says or calls something."""
    for message in messages:
        if message["role"] == "assistant" and not message["content"].strip() and "tool_calls" not in message:
            raise BadRow("empty answer")
    return messages


def _messages(value: Any) -> list[Message]:
    """OpenAI messages or ShareGPT turns as [{"role", "content", ...}], checked."""
    if not isinstance(value, list) or not value:
        raise BadRow("no messages")
    messages = []
    for turn in value:
        if not isinstance(turn, dict):
            raise BadRow("a message is not an object")
        # Parquet gives every turn the keys of all turns, None where it has none.
        name, content = (
            turn.get(key) if turn.get(key) is not None else turn.get(other)
            for key, other in (("role", "from"), ("content", "value"))
        )
        if not isinstance(name, str) or name not in ROLES:
            raise BadRow(f"unknown role {name!r}; known: {', '.join(ROLES)}")
        if isinstance(content, list):
            parts = [part.get("text") if isinstance(part, dict) else part for part in content]
            if not all(isinstance(part, str) for part in parts):
                raise BadRow("a message part that is not text")
            content = "".join(parts)
        if content is None and turn.get("tool_calls"):
            content = ""
        if not isinstance(content, str):
            raise BadRow("a message without text content")
        message = {"role": ROLES[name], "content": _unicode(content)}
        extras = ("reasoning_content", "name", "tool_call_id")
        message |= {key: turn[key] for key in extras if turn.get(key) is not None}
        if turn.get("tool_calls"):
            calls = turn["tool_calls"]
            message["tool_calls"] = [_tool_call(call) for call in (calls if isinstance(calls, list) else [calls])]
        messages.append(message)
    return messages


def _tool_call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object: OpenAI's are JSON text, chat templates make JSON text of them."""
    if not isinstance(call, dict):
        raise BadRow("a tool call is not an object")
    if call.get("function") is not None:
        return call | {"function": _tool_call(call["function"])}
    try:
        return call | {"arguments": json.loads(call["arguments"])}
    except (KeyError, TypeError, ValueError):  # none, an object already, or no JSON
        return call


def _answer(value: Any) -> list[Message]:
    """One side of a pair: a string, one turn, or a list of turns."""
    if isinstance(value, str):
        return _answered([{"role": "assistant", "content": _unicode(value)}])
    return _messages([value] if isinstance(value, dict) else value)


def _alpaca_prompt(columns: dict[str, Any]) -> list[Message]:
    """System, history and the instruction with its input, as messages."""
    messages = []
    if columns.get("system"):
        messages.append({"role": "system", "content": _string(columns, "system")})
    for pair in columns.get("history") or []:
        if not isinstance(pair, (list, tuple)) or not all(isinstance(text, str) for text in pair) or len(pair) != 2:
            raise BadRow("history is not a list of [question, answer]")
        messages += [{"role": r, "content": _unicode(t)} for r, t in zip(("user", "assistant"), pair, strict=True)]
    instruction = _string(columns, "instruction")
    extra = columns.get("input")
    text = f"{instruction}\n{_unicode(extra)}" if isinstance(extra, str) and extra.strip() else instruction
    return [*messages, {"role": "user", "content": text}]


def _hh_messages(text: str) -> list[Message]:
    """HH-RLHF's "\\n\\nHuman: ...\\n\\nAssistant: ..." as messages."""
    messages: list[Message] = []
    rest = _unicode(text)
    while rest:
        for mark, role in (("\n\nHuman:", "user"), ("\n\nAssistant:", "assistant")):
            if rest.startswith(mark):
                rest = rest[len(mark) :]
                ends = [at for at in (rest.find("\n\nHuman:"), rest.find("\n\nAssistant:")) if at >= 0]
                content, rest = (rest[: min(ends)], rest[min(ends) :]) if ends else (rest, "")
                messages.append({"role": role, "content": content.strip()})
                break
        else:
            raise BadRow("text before the first Human:/Assistant: turn")
    if not messages or messages[-1]["role"] != "assistant":
        raise BadRow("no answer by the assistant at the end")
    return messages
