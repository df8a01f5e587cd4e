"""Tools as chat templates describe them to a model, and parsing the calls that a model writes."""

from collections.abc import Callable
import json
import re
from typing import Any, NamedTuple

from common.data.chat import end_of_turn, hidden_texts, render
from common.data.tokens import encode_text
from common.data.types import BadRow, Message, Tokenizer
from common.errors import UserError

JSON_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
SHORT_CALL = re.compile(r"\[(\w+) ([^\[\]]*)\]")


class Tools(NamedTuple):
    schemas: list[dict[str, Any]]  # as passed to chat templates
    as_json: bool  # a call is <tool_call>{"name": ..., "arguments": {...}}</tool_call>; else [name argument]

    @property
    def arguments(self) -> dict[str, list[str]]:
        """The argument names of each tool."""
        functions = [schema["function"] for schema in self.schemas]
        return {function["name"]: list(function["parameters"]["properties"]) for function in functions}


def describe_tools(functions: list[Callable[..., Any]], tokenizer: Tokenizer) -> Tools:
    """Functions or methods as tools: by their names, types and docstrings (with "Args:").

    Calls are JSON in <tool_call> tags if the chat template asks for that (Qwen's, Hermes'); if it does not
    mention tools, they have the short form. Raises UserError for a function with too little documentation, a
    template that asks for calls in another form, and one that does not render tool output.
    """
    from transformers.utils import get_json_schema

    schemas = []
    for function in functions:
        try:
            schemas.append(get_json_schema(function))
        except Exception as error:  # no docstring, an undocumented argument, a type that JSON does not have
            raise UserError(f"{function.__qualname__} cannot be described to a model: {error}") from None
    try:
        text = render([{"role": "user", "content": "a"}], tokenizer, schemas, add_generation_prompt=True)
    except BadRow as error:
        raise UserError(str(error)) from None
    described = any(schema["function"]["name"] in text for schema in schemas)
    if described and ("<tool_call>" not in text or "<function=" in text):
        raise UserError(
            "the chat template asks for tool calls in a form that is not known here (JSON in <tool_call> is)"
        )
    for name in [schema["function"]["name"] for schema in schemas[:1]]:
        call = {"type": "function", "function": {"name": name, "arguments": {}}}
        tokenize_reply([{"role": "tool", "name": name, "content": "7"}], tokenizer, [call])
    return Tools(schemas, as_json=described)


def read_calls(text: str, tools: Tools) -> list[dict[str, Any]]:
    """The calls in a model's text: {"name", "arguments"}, and "error" for one that cannot be parsed.

    Calls inside its thinking are ignored. In the short form, as brackets may mean anything, only those with
    the name of a tool count.
    """
    text = text.rpartition("</think>")[2]
    if not tools.as_json:
        known = [(name, argument) for name, argument in SHORT_CALL.findall(text) if name in tools.arguments]
        return [
            {"name": name, "arguments": {k: argument for k in tools.arguments[name][:1]}}
            for name, argument in known
        ]
    calls = []
    for written in JSON_CALL.findall(text):
        try:
            call = json.loads(written)
            calls.append({"name": str(call["name"]), "arguments": dict(call.get("arguments") or {})})
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            problem = 'a call is {"name": ..., "arguments": {...}} in JSON'
            calls.append({"name": "unknown", "arguments": {}, "error": problem})
    return calls


def tokenize_reply(
    messages: list[Message], tokenizer: Tokenizer, calls: list[dict[str, Any]] | None = None
) -> list[int]:
    """The ids between the end-of-turn token of one assistant turn and the next one: the tool or user messages
    that answer it, in the template's own framing, and the header of the next turn.

    They continue a chat after sampled tokens, without encoding those again. calls: the tool calls of the
    answered turn, which some templates look up. Raises UserError if the template rejects a message or leaves
    it out.
    """
    word, mark = "plainloop", end_of_turn(tokenizer)
    turn = {"role": "assistant", "content": word} | ({"tool_calls": calls} if calls else {})
    try:
        text = render(
            [{"role": "user", "content": "a"}, turn, *messages], tokenizer, add_generation_prompt=True
        )
    except BadRow as error:
        raise UserError(str(error)) from None
    if mark is None or (end := text.find(mark, text.find(word))) < 0:
        raise UserError("the chat template ends answers with no special token (try --chat_template chatml)")
    at, literal = end + len(mark), hidden_texts(tokenizer)
    for said in (message["content"].strip() for message in messages):
        as_json = json.dumps(said, ensure_ascii=False)[1:-1]  # some templates write tool output like this
        if not (said in text[at:] or as_json in text[at:] or any(hidden in said for hidden in literal)):
            raise UserError(
                f"the chat template leaves out a {messages[0]['role']} message (try --chat_template chatml)"
            )
    ids, characters = encode_text(text, tokenizer, cuts=[at])
    return [token for token, (start, _) in zip(ids, characters.tolist(), strict=True) if start >= at]
