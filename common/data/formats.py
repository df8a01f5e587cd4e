"""Formats: recognise the meaning of a row's columns, and convert every format to one form per stage.

The forms: text -> str; chat -> messages, or prompt and completion strings, or text; preference -> prompt, chosen, rejected;
prompt -> prompt and everything else for the rewards. A row that cannot be used raises `BadRow` with the reason; columns of
an unknown format raise `UserError`.
"""

import json
from collections.abc import Callable
from typing import Any

from common.data.types import BadRow, Message, Row, may_reject
from common.errors import UserError

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
# The formats of each form, with their columns. The first format whose columns are all present and not null is chosen.
CHAT = (
    ("messages", ("messages",)),
    ("sharegpt", ("conversations",)),
    ("alpaca", ("instruction", "output")),
    ("prompt_completion", ("prompt", "completion")),
    ("text", ("text",)),
)
PREFERENCE = (
    ("explicit_prompt", ("prompt", "chosen", "rejected")),
    ("sharegpt", ("conversations", "chosen", "rejected")),
    ("sharegpt", ("messages", "chosen", "rejected")),
    ("alpaca", ("instruction", "chosen", "rejected")),
    ("implicit_prompt", ("chosen", "rejected")),  # two lists of messages
    ("hh", ("chosen", "rejected")),  # two strings that contain turns
)
PROMPT = (
    ("verl", ("prompt", "reward_model")),
    ("prompt", ("prompt",)),
    ("messages", ("messages",)),
    ("sharegpt", ("conversations",)),
    ("alpaca", ("instruction",)),
)
Formats = tuple[tuple[str, tuple[str, ...]], ...]
Columns = Row | dict[str, Any]


# --- which format ---------------------------------------------------------------------------------------------------


def text_format(columns: Columns, field: str = "text") -> str:
    """Returns "text" for a row with that column, not null. Raises UserError otherwise."""
    if columns.get(field) is None:
        raise UserError(f"no column {field}; found {_names(columns)} (map it: --columns {field}=...)")
    return "text"


def chat_format(columns: Columns) -> str:
    """The name of a chat's format, by the columns that are not null. Raises UserError if none fits."""
    _refuse_labels(columns)
    if name := _fitting(CHAT, columns):
        return name
    if (chosen := columns.get("chosen")) and columns.get("rejected"):
        new = "completion" if "prompt" in columns else "text" if isinstance(chosen, str) else "messages"
        raise UserError(f"these are pairs, for train_dpo.py; to train on the better answers: --columns {new}=chosen")
    needed = "messages, conversations, instruction + output, prompt + completion, or text"
    raise UserError(f"no chat format fits the columns {_names(columns)}; needed: {needed} (map columns: --columns new=old)")


def preference_format(columns: Columns) -> str:
    """The name of a pair's format, by the columns that are not null. Raises UserError if none fits."""
    name = _fitting(PREFERENCE, columns)
    if name is None:
        _refuse_labels(columns)
        raise UserError(f"no column chosen and rejected; found {_names(columns)} (map them: --columns chosen=...)")
    if name == "implicit_prompt":  # same columns as hh: the contents decide
        texts = [side for side in (columns["chosen"], columns["rejected"]) if isinstance(side, str)]
        if any("\n\nAssistant:" in text for text in texts):
            return "hh"
        if texts:
            raise UserError(f"chosen and rejected need a prompt; found columns {_names(columns)}")
    return name


def prompt_format(columns: Columns) -> str:
    """The name of a prompt's format, by the columns that are not null. Raises UserError if none fits."""
    if (name := _fitting(PROMPT, columns)) is None:
        raise UserError(f"no column prompt; found {_names(columns)} (map it: --columns prompt=question)")
    return "prompt" if name == "verl" and not _is_verl(columns) else name


def _fitting(formats: Formats, columns: Columns) -> str | None:
    """The first format whose columns are present and not null."""
    return next((name for name, needed in formats if all(columns.get(column) is not None for column in needed)), None)


def _is_verl(columns: Columns) -> bool:
    return isinstance(columns.get("reward_model"), dict) and "ground_truth" in columns["reward_model"]


def _names(columns: Columns) -> str:
    shown = [name if name and name == name.strip() else repr(name) for name in columns]  # makes stray spaces visible
    nulls = ["" if value is not None else " (null)" for value in columns.values()]
    return ", ".join(map("".join, zip(shown, nulls, strict=True))) or "none"


def _refuse_labels(columns: Columns) -> None:
    """Refuse KTO's rows: they look like prompt and completion, but some of the completions are bad ones."""
    if columns.get("kto_tag") is not None or str(columns.get("label")).lower() in ("true", "false"):  # tables hold text
        raise UserError(
            "rows with a label, good or bad, instead of a pair are for KTO: DPO needs chosen and rejected; "
            "for SFT keep the good rows, without the column"
        )


# --- forms ----------------------------------------------------------------------------------------------------------


def _format_of(columns: Columns, formats: Formats, recognise: Callable[[Columns], str]) -> str:
    """The format of a row's source; for a dict, or a row of another form (a chat whose prompt is wanted), that of its own
    columns. Raises BadRow for a row that lacks what the format needs."""
    name = columns.format if isinstance(columns, Row) else None
    if name not in dict(formats):
        try:
            return recognise(columns)
        except UserError as error:
            if None in columns.values():  # of this row alone
                raise BadRow(str(error)) from None
            raise
    ways = [needed for known, needed in formats if known == name]
    if not any(all(columns.get(column) is not None for column in needed) for needed in ways):
        raise BadRow(f"no {' + '.join(ways[0])}")
    return name


@may_reject
def as_text(columns: Columns, field: str = "text") -> str:
    """The document of a pretraining row."""
    if field not in columns:
        text_format(columns, field)
    return _string(columns, field)


@may_reject
def as_chat(columns: Columns) -> dict[str, Any]:
    """{"messages", "tools"}, or {"prompt", "completion"} strings, or {"text"}.

    Reads messages, ShareGPT conversations, Alpaca (instruction, input, output, system, history), prompt and completion
    (strings or messages; the latter with "prompt_turns", the number of messages in the prompt), text. A message that is not
    to be trained on has "train": False. Raises UserError for columns of no known format, BadRow for an unusable row.
    """
    _refuse_labels(columns)
    format = _format_of(columns, CHAT, chat_format)
    tools = _tools(columns)
    if format == "messages":
        return {"messages": _answered(_conversation(columns, "messages")), "tools": tools}
    if format == "sharegpt":
        return {"messages": _answered(_conversation(columns, "conversations")), "tools": tools}
    if format == "alpaca":
        answer = [{"role": "assistant", "content": _string(columns, "output")}]
        return {"messages": _alpaca_prompt(columns) + answer, "tools": tools}
    if format == "prompt_completion":
        prompt, completion = columns["prompt"], columns["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return {"prompt": _string(columns, "prompt"), "completion": _string(columns, "completion")}
        prompt = _messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        return {"messages": prompt + _answered(_answer(completion)), "tools": tools, "prompt_turns": len(prompt)}
    return {"text": as_text(columns)}


@may_reject
def as_preference(columns: Columns) -> dict[str, Any]:
    """{"prompt", "chosen", "rejected"}: all strings (plain text) or all lists of messages; the latter two are answers only.

    Reads prompt + chosen + rejected (strings or messages); chosen + rejected as whole conversations, whose longest common
    prefix is the prompt; HH-RLHF strings ("\\n\\nHuman: ...\\n\\nAssistant: ..."); LLaMA-Factory's conversations or
    instruction with chosen and rejected. Raises UserError for columns of no known format, BadRow for an unusable row.
    """
    format = _format_of(columns, PREFERENCE, preference_format)
    if _tools(columns):
        raise BadRow("a pair with tools (to train without them: --columns unused=tools)")
    chosen, rejected = columns["chosen"], columns["rejected"]
    if not chosen or not rejected:
        raise BadRow("empty answer")

    if format == "explicit_prompt":
        prompt = columns["prompt"]
        if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
            pair = {name: _string(columns, name) for name in ("prompt", "chosen", "rejected")}
        else:
            turns = _messages([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
            chosen, rejected = _answer(chosen), _answer(rejected)
            if len(chosen) > len(turns) and chosen[: len(turns)] == turns and rejected[: len(turns)] == turns:
                chosen, rejected = chosen[len(turns) :], rejected[len(turns) :]  # both sides repeat the prompt
            pair = {"prompt": turns, "chosen": chosen, "rejected": rejected}
    elif format == "sharegpt":
        turns = _conversation(columns, "conversations", "messages")
        pair = {"prompt": turns, "chosen": _answer(chosen), "rejected": _answer(rejected)}
    elif format == "alpaca":
        pair = {"prompt": _alpaca_prompt(columns), "chosen": _answer(chosen), "rejected": _answer(rejected)}
    else:
        if format == "hh":
            chosen, rejected = _hh_messages(_string(columns, "chosen")), _hh_messages(_string(columns, "rejected"))
        else:
            chosen, rejected = _messages(chosen), _messages(rejected)
        shared = 0
        while shared < min(len(chosen), len(rejected)) - 1 and chosen[shared] == rejected[shared]:
            shared += 1
        pair = {"prompt": chosen[:shared], "chosen": chosen[shared:], "rejected": rejected[shared:]}
    if not pair["prompt"]:
        raise BadRow("no shared prompt")
    if pair["chosen"] == pair["rejected"]:
        raise BadRow("chosen equals rejected")
    for side in (pair["chosen"], pair["rejected"]):
        if not isinstance(side, str) and [m["role"] for m in _answered(side)][:1] != ["assistant"]:
            raise BadRow("an answer that does not start with the assistant")
    return pair


@may_reject
def as_prompt(columns: Columns) -> dict[str, Any]:
    """The row with "prompt" (a string, or messages ending with a user turn); the other columns are kept for the rewards.

    Reads prompt; or messages, conversations or Alpaca, without a final assistant turn. verl's reward_model.ground_truth
    becomes the column answer.
    """
    format = _format_of(columns, PROMPT, prompt_format)
    row = dict(columns)
    if _is_verl(row):
        row.setdefault("answer", row["reward_model"]["ground_truth"])
    elif format == "verl":
        raise BadRow("reward_model has no ground_truth")
    if row.get("tools"):
        row["tools"] = _tools(row)
    if format in ("prompt", "verl"):
        prompt = _string(row, "prompt") if isinstance(row["prompt"], str) else _messages(row["prompt"])
    elif format == "messages":
        prompt = _conversation(row, "messages")
    elif format == "sharegpt":
        prompt = _conversation(row, "conversations")
    else:
        prompt = _alpaca_prompt(row)
    if isinstance(prompt, list):
        prompt = prompt[:-1] if prompt[-1]["role"] == "assistant" else prompt
        prompt = [{key: value for key, value in turn.items() if key != "train"} for turn in prompt]
    if not prompt:
        raise BadRow("empty prompt")
    return row | {"prompt": prompt}


def _string(columns: Columns, name: str) -> str:
    value = columns[name]
    if not isinstance(value, str):
        raise BadRow(f"{name} is not a string but {type(value).__name__}")
    if not value.strip():
        raise BadRow(f"empty {name}")
    return _unicode(value)


def _unicode(text: str) -> str:
    """The text, if it is valid: JSON can hold half of a surrogate pair, which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRow("text that is not valid Unicode (half a surrogate pair)") from None
    return text


def _tools(columns: Columns) -> list[Any] | None:
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


def _conversation(columns: Columns, *names: str) -> list[Message]:
    """The messages of the first non-empty one of these columns, preceded by the system column."""
    messages = _messages(next((columns[name] for name in names if columns.get(name)), None))
    system = columns.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": _unicode(system)}, *messages]
    return messages


def _answered(messages: list[Message]) -> list[Message]:
    """The messages, after checking that each assistant turn has content or a call."""
    for message in messages:
        if message["role"] == "assistant" and not message["content"].strip() and "tool_calls" not in message:
            raise BadRow("empty answer")
    return messages


def _messages(value: Any) -> list[Message]:
    """OpenAI messages or ShareGPT turns as a checked list of {"role", "content", ...}."""
    if not isinstance(value, list) or not value:
        raise BadRow("no messages")
    messages = []
    for turn in value:
        if not isinstance(turn, dict):
            raise BadRow("a message is not an object")
        # Parquet gives every turn the keys of all turns, None where a turn lacks one.
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
        if not _is_trained(turn):
            message["train"] = False
        messages.append(message)
    return messages


def _is_trained(turn: dict[str, Any]) -> bool:
    """Whether a turn may be trained on, by its own train, loss_mask or weight (OpenAI's name)."""
    trained = True
    for name in ("train", "loss_mask", "weight"):
        value = turn.get(name)
        if value is not None and value not in (0, 1):
            raise BadRow(f"{name} of a message is {value!r}; known: true, false, 0, 1")
        trained = trained and value != 0
    return trained


def _tool_call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object: OpenAI's are JSON text, which chat templates would encode again."""
    if not isinstance(call, dict):
        raise BadRow("a tool call is not an object")
    if call.get("function") is not None:
        return call | {"function": _tool_call(call["function"])}
    try:
        return call | {"arguments": json.loads(call["arguments"])}
    except (KeyError, TypeError, ValueError):  # missing, an object already, or invalid JSON
        return call


def _answer(value: Any) -> list[Message]:
    """One side of a pair, given as a string, one turn, or a list of turns."""
    if isinstance(value, str):
        return _answered([{"role": "assistant", "content": _unicode(value)}])
    return _messages([value] if isinstance(value, dict) else value)


def _alpaca_prompt(columns: Columns) -> list[Message]:
    """The system turn, the history and the instruction with its input, as messages."""
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
