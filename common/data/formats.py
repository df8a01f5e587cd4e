"""Formats: recognise the meaning of a row's columns, and convert every format to one form per stage.

The forms: text -> str; chat -> messages, or prompt and completion strings, or text; preference -> prompt,
chosen, rejected; prompt -> prompt and everything else for the rewards. Each row is recognised by its own
columns. One that cannot be used raises `BadRow` with the reason.
"""

import json
import math
import re
from typing import Any

from common.data.types import REASONING, BadRow, Message, may_reject, valid_text, without_nulls
from common.errors import quoted

SPEAKERS = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "model", "function_call"),
    "tool": ("tool", "observation", "function", "function_response", "ipython"),
}
ROLES = {name: role for role, names in SPEAKERS.items() for name in names}
# The formats of each form, with their columns. A row has the first one whose columns are all present and not
# null.
CHAT = (
    ("messages", ("messages",)),
    ("sharegpt", ("conversations",)),
    ("alpaca", ("instruction", "output")),
    ("prompt_completion", ("prompt", "completion")),
    ("prompt_response", ("prompt", "response")),
    ("text", ("text",)),
)
PREFERENCE = (
    ("explicit_prompt", ("prompt", "chosen", "rejected")),
    ("sharegpt", ("conversations", "chosen", "rejected")),
    ("sharegpt", ("messages", "chosen", "rejected")),
    ("alpaca", ("instruction", "chosen", "rejected")),
    # both with the prompt: lists of messages, or HH-RLHF's strings
    ("implicit_prompt", ("chosen", "rejected")),
)
PROMPT = (
    ("verl", ("prompt", "reward_model")),
    ("prompt", ("prompt",)),
    ("messages", ("messages",)),
    ("sharegpt", ("conversations",)),
    ("alpaca", ("instruction",)),
)
# may hold messages
MESSAGE_COLUMNS = {"messages", "conversations", "prompt", "completion", "response", "chosen", "rejected"}
# Text that looks like messages: as JSON, or as Python prints them, which is a BadRow.
LOOKS_LIKE_MESSAGES = re.compile(r"""\s*\[\s*\{\s*["'](role|from|content|value)["']\s*:""")
Columns = dict[str, Any]
Pair = tuple[list[Message], ...]  # prompt, chosen, rejected


def format_of(columns: Columns, formats: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    """The name of the first format that a row has. In the row, messages that are JSON text are decoded, and
    numbers are their text, as a csv file has them.

    Raises BadRow, naming its columns, if it has none; and for media.
    """
    for name in ("image", "images", "video", "videos", "audio", "audios"):
        if columns.get(name):
            raise BadRow(
                f"a row with {name}: only text is trained (to train on its text alone: --columns unused={name})"
            )
    for name, needed in formats:
        if all(columns.get(column) is not None for column in needed):
            for column in columns.keys() & {*needed, "input"}:
                columns[column] = _decoded(column, columns[column])
            return name
    present = [f"{name!r} (null)" if columns[name] is None else repr(name) for name in columns]
    ways = ", or ".join(" + ".join(needed) for _, needed in formats)
    raise BadRow(
        f"found the columns {', '.join(present) or 'none'}; needed: {ways} (rename columns: --columns new=old)"
    )


# --- forms --------------------------------------------------------------------------------------------------


@may_reject
def as_text(columns: Columns, field: str = "text") -> str:
    """The document of a pretraining row."""
    format_of(columns, (("text", (field,)),))
    return _string(columns, field)


@may_reject
def as_chat(columns: Columns) -> dict[str, Any]:
    """{"messages"}, with "tools" and "chat_template_kwargs" where there are some; or {"prompt", "completion"}
    strings; or {"text"}.

    Reads messages, ShareGPT conversations, Alpaca (instruction, input, output, system, history), prompt and
    completion (strings or messages; the latter with "prompt_turns", the number of messages in the prompt),
    text. A message that is not to be trained on has "train": False. KTO's rows are refused: some of their
    answers are bad ones.
    """
    format = format_of(columns, CHAT)
    if format == "text":
        return {"text": _string(columns, "text")}
    label = str(columns.get("label")).lower()  # tables hold text
    if columns.get("kto_tag") is not None or label in ("true", "false", "1", "0"):
        raise BadRow(
            "an answer labelled good or bad, for KTO; for SFT keep the good rows (then --columns unused=label)"
        )
    if format == "alpaca":
        answer = {"role": "assistant", "content": _string(columns, "output")}
        return {"messages": [*_turns(columns, format), answer]} | _rendering(columns)
    if format.startswith("prompt_"):
        name = format.removeprefix("prompt_")
        if isinstance(columns["prompt"], str) and isinstance(columns[name], str) and not _system(columns):
            return {"prompt": _string(columns, "prompt"), "completion": _string(columns, name)}
        prompt = _turns(columns, format)
        messages = prompt + _answered(_answer(columns[name]))
        return {"messages": messages, "prompt_turns": len(prompt)} | _rendering(columns)
    return {"messages": _answered(_turns(columns, format))} | _rendering(columns)


@may_reject
def as_preference(columns: Columns) -> dict[str, Any]:
    """{"prompt", "chosen", "rejected"}: all strings (plain text) or all lists of messages; the latter two are
    answers only; and "tools" and "chat_template_kwargs".

    Reads prompt + chosen + rejected (strings or messages); chosen + rejected as whole conversations, whose
    longest common prefix is the prompt; HH-RLHF strings ("\\n\\nHuman: ...\\n\\nAssistant: ...");
    LLaMA-Factory's conversations or instruction with chosen and rejected.
    """
    format = format_of(columns, PREFERENCE)
    if not columns["chosen"] or not columns["rejected"]:
        raise BadRow("empty answer")
    names = ("prompt", "chosen", "rejected")
    is_text = format == "explicit_prompt" and all(isinstance(columns[name], str) for name in names)
    if format == "implicit_prompt" or (is_text and _is_hh(columns)):
        prompt, chosen, rejected = _whole_conversations(columns)
    elif is_text and not _system(columns):
        prompt, chosen, rejected = (_string(columns, name) for name in names)
    else:
        prompt, chosen, rejected = _prompt_and_answers(columns, format)
    if chosen == rejected:
        raise BadRow("chosen equals rejected")
    for side in (chosen, rejected):
        if isinstance(side, list):
            turns = _answered(side)  # which says what else is wrong with it
            if not _is_answer(turns):
                raise BadRow("an answer that does not start with the assistant")
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected} | _rendering(columns)


def _is_hh(columns: Columns) -> bool:
    """Whether the strings are HH-RLHF's, whose prompt has a column of its own, too."""
    prompt = columns["prompt"]
    is_repeated = columns["chosen"].startswith(prompt) and columns["rejected"].startswith(prompt)
    return is_repeated and prompt.startswith("\n\nHuman:")


def _whole_conversations(columns: Columns) -> Pair:
    """A pair whose sides are whole conversations, as messages or as HH-RLHF's strings."""
    read = _hh_messages if isinstance(columns["chosen"], str) else _messages
    prompt, chosen, rejected = _share_turns([], read(columns["chosen"]), read(columns["rejected"]))
    if not prompt:
        raise BadRow("no shared prompt")
    if prompt[0]["role"] != "system":
        prompt = _system(columns) + prompt
    return prompt, chosen, rejected


def _prompt_and_answers(columns: Columns, format: str) -> Pair:
    """A pair whose prompt has columns of its own. Both sides may repeat it, also without its
    system turn."""
    prompt = _turns(columns, format)
    chosen, rejected = _answer(columns["chosen"]), _answer(columns["rejected"])
    has_system = prompt[0]["role"] == "system"
    for repeated in (prompt, prompt[has_system:]):
        n = len(repeated)
        if len(chosen) > n and chosen[:n] == rejected[:n] == repeated:
            chosen, rejected = chosen[n:], rejected[n:]
    if _is_answer(chosen) and _is_answer(rejected):
        return _share_turns(prompt, chosen, rejected)
    return prompt, chosen, rejected


def _is_answer(messages: list[Message]) -> bool:
    return bool(messages) and messages[0]["role"] == "assistant"


def _share_turns(prompt: list[Message], chosen: list[Message], rejected: list[Message]) -> Pair:
    """The pair with the turns that both sides share in its prompt, up to the last at which the assistant
    answers in both."""
    start = 0
    for n, (one, other) in enumerate(zip(chosen, rejected, strict=False)):
        if one["role"] == other["role"] == "assistant":
            start = n
        if one != other:
            break
    return prompt + chosen[:start], chosen[start:], rejected[start:]


@may_reject
def as_prompt(columns: Columns) -> dict[str, Any]:
    """The row with "prompt" (a string, or messages without a final assistant turn); the other columns are
    kept for the rewards.

    Reads prompt; or messages, conversations or Alpaca, without a final assistant turn. verl's
    reward_model.ground_truth becomes the column answer.
    """
    format = format_of(columns, PROMPT)
    row = dict(columns)
    if format == "verl":
        row.setdefault("answer", row["reward_model"]["ground_truth"])
    row |= _rendering(row)
    if isinstance(row.get("prompt"), str) and format in ("prompt", "verl") and not _system(row):
        return row | {"prompt": _string(row, "prompt")}
    turns = _turns(row, format)
    if turns[-1]["role"] == "assistant":
        turns.pop()
    if not turns:
        raise BadRow("empty prompt")
    for turn in turns:
        turn.pop("train", None)
    return row | {"prompt": turns}


def _decoded(column: str, value: Any) -> Any:
    """A number becomes text, and messages given as JSON text are read. Anything else stays as it is, also text
    that is some other JSON."""
    if type(value) in (int, float) and math.isfinite(value):
        return str(value)
    if column in MESSAGE_COLUMNS and isinstance(value, str) and LOOKS_LIKE_MESSAGES.match(value):
        turns = json.loads(value)
        if all(isinstance(turn, dict) and turn.keys() & {"role", "from"} for turn in turns):
            return turns
    return value


def _string(columns: Columns, name: str) -> str:
    value = columns[name]
    if not isinstance(value, str):
        raise BadRow(f"{name} is not a string but {type(value).__name__}")
    if not value.strip():
        raise BadRow(f"empty {name}")
    return valid_text(value)


def _optional(columns: Columns, name: str) -> str:
    """A column that a row may lack; "" if it is absent or blank."""
    value = columns.get(name)
    return _string(columns, name) if value and str(value).strip() else ""


def _rendering(columns: Columns) -> dict[str, Any]:
    """What the chat template gets beside the messages, if a row has it: {"tools", "chat_template_kwargs"}."""
    variables = {}
    for name in ("tools", "chat_template_kwargs"):
        value = without_nulls(columns.get(name))
        if isinstance(value, str) and value.strip():
            value = json.loads(value)
        if value:
            variables[name] = value
    tools = variables.get("tools")
    if isinstance(tools, dict):
        tools = [tools]
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise BadRow("tools is not a list of objects")
    if tools:
        variables["tools"] = [_tool(tool) for tool in tools]
    if not isinstance(variables.get("chat_template_kwargs", {}), dict):
        raise BadRow('chat_template_kwargs is not an object, such as {"enable_thinking": false}')
    return variables


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in OpenAI's form, which wraps the function that some files have alone."""
    is_function = {"name", "parameters"} <= tool.keys()
    return {"type": "function", "function": tool} if is_function else tool


def _turns(columns: Columns, format: str) -> list[Message]:
    """The messages before the answer, or of the whole chat, after the system turn."""
    if format == "alpaca":
        return _alpaca_prompt(columns)
    if format in ("messages", "sharegpt"):
        turns = columns.get("messages") or columns.get("conversations")
    else:
        turns = columns["prompt"]
        if isinstance(turns, str):
            turns = [{"role": "user", "content": turns}]
    messages = _messages(turns)
    return messages if messages[0]["role"] == "system" else _system(columns) + messages


def _system(columns: Columns) -> list[Message]:
    """The column system, or system_prompt, as a turn, if it has one."""
    system = _optional(columns, "system") or _optional(columns, "system_prompt")
    return [{"role": "system", "content": system}] if system else []


def _answered(messages: list[Message]) -> list[Message]:
    """The messages, after checking that each assistant turn has content or a call."""
    for message in messages:
        is_empty = not message["content"].strip() and not message.keys() & {"tool_calls", "thinking"}
        if message["role"] == "assistant" and is_empty and message.get("train") is not False:
            raise BadRow("empty answer")
    return messages


def _messages(turns: Any) -> list[Message]:
    """OpenAI messages or ShareGPT turns as a checked list of {"role", "content", ...}."""
    if isinstance(turns, str):
        raise BadRow("messages as text that is not JSON")
    if not isinstance(turns, list) or not turns:
        raise BadRow("no messages")
    return [_message(turn) for turn in turns]


def _message(turn: Any) -> Message:
    # Parquet gives every turn the keys of all turns, None where a turn lacks one.
    name = turn.get("from") if turn.get("role") is None else turn["role"]
    content = turn.get("value") if turn.get("content") is None else turn["content"]
    if not isinstance(name, str) or name not in ROLES:
        raise BadRow(f"unknown role {name!r}; known: {', '.join(ROLES)}")
    is_trained = _is_trained(turn)
    if isinstance(content, list):
        is_trained = is_trained and _are_trained(content)
        content = "".join(map(_part, content))
    # function_call is the name that OpenAI had before tool_calls
    calls = without_nulls(turn.get("tool_calls") or turn.get("function_call"))
    if isinstance(calls, str):
        calls = json.loads(calls)
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise BadRow("a message without text content")
    if name == "function_call" and not calls:  # as JSON: the chat template writes them in its own way
        calls, content = json.loads(content), ""
    message = {"role": ROLES[name], "content": valid_text(content)}
    for key in REASONING:
        if turn.get(key):
            message |= dict.fromkeys(REASONING, turn[key])
            break
    for key in ("name", "tool_call_id"):
        if turn.get(key) is not None:
            message[key] = turn[key]
    if calls or name == "function_call":
        calls = calls if isinstance(calls, list) else [calls]
        message["tool_calls"] = [_tool_call(call) for call in calls]
    if not is_trained:
        message["train"] = False
    return message


def _part(part: Any) -> str:
    """The text of one part of a message: a string, or {"type": "text"} with text (OpenAI) or value
    (LLaMA-Factory)."""
    if isinstance(part, dict) and part.get("type") in (None, "text"):
        part = part.get("value") if part.get("text") is None else part["text"]
    if not isinstance(part, str):
        raise BadRow("a message part that is not text")
    return part


def _are_trained(parts: list[Any]) -> bool:
    """Whether the parts of a message may be trained on, by their own flags, which have to agree."""
    flags = {_is_trained(part) for part in parts if isinstance(part, dict)}
    if len(flags) > 1:
        raise BadRow(
            "parts of a message differ in train, loss_mask or weight: one flag for the whole message"
        )
    return flags != {False}


def _is_trained(turn: dict[str, Any]) -> bool:
    """Whether a turn, or a part of one, may be trained on, by its own train, loss_mask or weight (OpenAI's
    name)."""
    trained = True
    for name in ("train", "loss_mask", "weight"):
        value = turn.get(name)
        if value is not None and value not in (0, 1):
            raise BadRow(f"{name} of a message is {value!r}; known: true, false, 0, 1")
        trained = trained and value != 0
    return trained


def _tool_call(call: Any) -> dict[str, Any]:
    """A tool call in OpenAI's form, but with its arguments as an object: as JSON text, chat templates would
    encode them again."""
    function = dict(call.get("function") or call)
    if "arguments" not in function and "parameters" in function:  # as Llama 3 writes calls
        function["arguments"] = function.pop("parameters")
    unknown = function.keys() - {"name", "arguments", "id", "type", "index", "description", "strict"}
    if unknown and "arguments" not in function:
        raise BadRow(f"a tool call has {', '.join(sorted(unknown))} and no arguments")
    arguments = function.get("arguments")
    for _ in range(2):  # some files hold JSON text within JSON text
        if isinstance(arguments, str):
            arguments = json.loads(arguments.strip() or "{}")
    if not isinstance(arguments, dict | None):
        raise BadRow(f"the arguments of a tool call are {quoted(arguments, 60)}; expected an object")
    function["arguments"] = arguments or {}
    return (call if "function" in call else {"type": "function"}) | {"function": function}


def _answer(value: Any) -> list[Message]:
    """One side of a pair, given as a string, one turn, or a list of turns."""
    if isinstance(value, str):
        return _answered([{"role": "assistant", "content": valid_text(value)}])
    return _messages([value] if isinstance(value, dict) else value)


def _alpaca_prompt(columns: Columns) -> list[Message]:
    """The system turn, the history and the instruction with its input, as messages."""
    messages = _system(columns)
    for pair in columns.get("history") or []:
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise BadRow("history is not a list of [question, answer]")
        question, answer = pair
        messages.append({"role": "user", "content": valid_text(question)})
        messages.append({"role": "assistant", "content": valid_text(answer)})
    instruction = _string(columns, "instruction")
    details = _optional(columns, "input")
    messages.append({"role": "user", "content": f"{instruction}\n{details}" if details else instruction})
    return messages


def _hh_messages(text: str) -> list[Message]:
    """HH-RLHF's "\\n\\nHuman: ...\\n\\nAssistant: ..." as messages."""
    before, *parts = re.split("\n\n(Human|Assistant):", valid_text(text))
    if before:
        raise BadRow(
            "text before the first Human:/Assistant: turn (a prompt in another column: --columns prompt=NAME)"
        )
    messages = []
    for name, content in zip(parts[::2], parts[1::2], strict=True):
        messages.append({"role": ROLES[name.lower()], "content": content.strip()})
    if not messages or messages[-1]["role"] != "assistant":
        raise BadRow("no answer by the assistant at the end")
    return messages
