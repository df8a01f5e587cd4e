"""Tools as chat templates describe them to a model, the calls that a model writes, and the tools' outputs as
tokens."""

from collections.abc import Callable
import re
from typing import Any, NamedTuple

from common.data.chat import Answer, answers, prompt_text
from common.data.chat_template import (
    ANSWER,
    CALL,
    FUNCTION,
    OUTPUT,
    QUESTION,
    TOOL,
    WORD,
    Switches,
    needs_of,
    special_tokens,
)
from common.data.tokens import encode_text
from common.data.types import BadRow, Message, Tokenizer
from common.errors import UserError, quoted

SHORT_CALL = re.compile(r"\[(\w+) ([^\[\]]*)\]")
JSON_CALL = {  # of Qwen2.5, Qwen3 and Hermes
    "open_pattern": r"\s*<tool_call>",
    "close": "</tool_call>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
XML_CALL = {  # of Qwen3.5 and Nemotron 3
    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
    "close": "</tool_call>",
    "repeats": True,
    "content": "xml-inline",
    "content_args": {
        "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>(?:(?!<parameter=).)*?)\n?</parameter>"
    },
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}


class Tools(NamedTuple):
    schemas: list[dict[str, Any]] | None  # as passed to chat templates; None: the template has no place
    arguments: dict[str, list[str]]  # the argument names of each tool
    form: dict[str, Any] | None  # how calls are written, a response template; None: [name argument]
    end: str  # the token that ends a turn with calls


class Call(NamedTuple):
    """A call that a model has written."""

    name: str
    arguments: dict[str, Any]
    error: str = ""  # why there is no such call


def describe_tools(functions: list[Callable[..., Any]], tokenizer: Tokenizer) -> Tools:
    """Functions or methods as tools: by their names, types and docstrings (with "Args:").

    Calls are read by the tokenizer's response_template; without one, as JSON or XML in <tool_call> tags,
    whichever the chat template writes. If the chat template has no place for tools, they have the short form.
    Raises UserError for a function with too little documentation, a template that writes calls in another
    form, and one that leaves out a tool's output.
    """
    from transformers.utils import get_json_schema

    schemas, arguments = [], {}
    for function in functions:
        try:
            schema = get_json_schema(function)
        except Exception as error:  # no docstring, an undocumented argument, a type that JSON does not have
            raise UserError(f"{function.__qualname__} cannot be described to a model: {error}") from None
        schemas.append(schema)
        arguments[schema["function"]["name"]] = list(schema["function"]["parameters"]["properties"])
    has_place = needs_of(tokenizer).tools
    turn, example = (CALL, [TOOL]) if has_place else (ANSWER, None)
    try:
        (written,) = answers([QUESTION, turn], [1], tokenizer, example)
        after_output = prompt_text([QUESTION, turn, OUTPUT], tokenizer, example)
    except BadRow as error:
        raise UserError(str(error)) from None
    end = next(mark for mark in special_tokens(tokenizer) if written.written.endswith(mark))
    form = form_of_calls(written, after_output, tokenizer, end) if has_place else None
    tools = Tools(schemas if has_place else None, arguments, form, end)
    ids = tokenize_reply([Call(**FUNCTION)], [OUTPUT["content"]], tokenizer, tools)
    if OUTPUT["content"] not in tokenizer.decode(ids):
        raise UserError("the chat template leaves out a tool message (try --chat_template chatml)")
    return tools


def form_of_calls(written: Answer, after_output: str, tokenizer: Tokenizer, end: str) -> dict[str, Any]:
    """The first response template by which CALL is read as it is written, and not again after its output."""
    for form in forms_to_try(tokenizer, end):
        tools = Tools([TOOL], {FUNCTION["name"]: ["where"]}, form, end)
        ids = encode_text(written.written, tokenizer)
        _, calls = read_turn(ids, encode_text(written.context, tokenizer), tokenizer, tools)
        _, read_again = read_turn([], encode_text(after_output, tokenizer), tokenizer, tools)
        if calls == [Call(**FUNCTION)] and not read_again:
            return form
    raise UserError(
        "the chat template writes tool calls in a form that is not known here: its tokenizer_config.json "
        'needs a "response_template" (see transformers\' parse_response)'
    )


def forms_to_try(tokenizer: Tokenizer, end: str) -> list[dict[str, Any]]:
    """Response templates by which calls may be read. end: the token that ends a turn."""
    if getattr(tokenizer, "response_template", None):
        return [tokenizer.response_template]
    forms = []
    for call in (JSON_CALL, XML_CALL):
        fields = {
            "reasoning_content": {"open": "<think>", "close": "</think>"},
            "tool_calls": call,
            "content": {"close": [end, tokenizer.eos_token]},
        }
        forms.append({"start_anchor_pattern": r"assistant\s*", "fields": fields})
    return forms


def read_turn(
    ids: list[int], before: list[int], tokenizer: Tokenizer, tools: Tools
) -> tuple[Message, list[Call]]:
    """A turn that a model has written after the ids `before`, as a message, and its calls.

    Calls inside its thinking are ignored. In the short form, as brackets may mean anything, only those with
    the name of a tool count. If one cannot be read, it is the only one.
    """
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    message = {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
    calls = []
    if tools.form is None:
        for name, argument in SHORT_CALL.findall(text.rpartition("</think>")[2]):
            if name in tools.arguments:
                calls.append(Call(name, dict.fromkeys(tools.arguments[name][:1], argument)))
        return message, calls
    prefix = tokenizer.decode(before, clean_up_tokenization_spaces=False)
    try:
        parsed = tokenizer.parse_response(text, tools.form, prefix=prefix, tools=tools.schemas)
        for call in parsed.get("tool_calls", []):
            function = call["function"]
            name, arguments = function["name"], dict(function.get("arguments") or {})
            if name in tools.arguments:
                calls.append(Call(name, arguments))
            else:
                calls.append(Call("unknown", {}, f"there is no tool {name}: {', '.join(tools.arguments)}"))
    except Exception as error:  # no JSON, no name, arguments that are no object
        return message, [Call("unknown", {}, f"{type(error).__name__}: {quoted(error, 300, str)}")]
    return message | {"content": ""} | parsed, calls


def tokenize_reply(
    calls: list[Call],
    outputs: list[str],
    tokenizer: Tokenizer,
    tools: Tools,
    switches: Switches | None = None,
) -> list[int]:
    """The ids between the end of a turn with calls and the next turn: the tools' outputs, as the chat
    template writes them after such calls, and the header of the next turn.

    They continue a chat after sampled tokens, without encoding those again. Raises UserError if the template
    rejects them.
    """
    turn, replies = CALL | {"tool_calls": []}, []
    for number, (call, output) in enumerate(zip(calls, outputs, strict=True)):
        one = {"id": f"call_{number}", "type": "function", "function": FUNCTION | {"name": call.name}}
        turn["tool_calls"].append(one)
        replies.append({"role": "tool", "tool_call_id": one["id"], "name": call.name, "content": output})
    try:
        text = prompt_text([QUESTION, turn if tools.form else ANSWER, *replies], tokenizer, None, switches)
    except BadRow as error:
        raise UserError(str(error)) from None
    # WORD is in the turn, which ends at the first mark after it.
    _, _, after_word = text.partition(WORD)
    _, _, reply = after_word.partition(tools.end)
    return encode_text(reply, tokenizer, after=tools.end)
