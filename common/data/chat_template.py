"""Chat templates: the form in which each reads messages, its variables, and what it writes.

Templates differ in how they read a chat: content as a text or as parts, arguments of calls as an object or as
JSON text, a thought in a field of its own or nowhere. `needs_of` finds that out by trying.

Chats are content: a special token spelled in a message stays plain characters, so that it cannot end or forge
a turn. In the rendered text a placeholder represents it until tokenisation.
"""

from collections.abc import Callable
import functools
import hashlib
import itertools
import json
from pathlib import Path
import re
from typing import Any, NamedTuple, TypeVar

from common.data.types import REASONING, BadRow, Message, Tokenizer, notes
from common.errors import UserError

T = TypeVar("T")
Tools = list[Any] | None
Switches = dict[str, Any]  # variables of a chat template, such as enable_thinking
TEMPLATES = Path(__file__).parent / "chat_templates"
# Represents a special token spelled in a message (see hidden_texts) while the template is applied.
PLACEHOLDER = re.compile("\ufdd0(\\d+)\ufdd1")
# A variable that --template_kwargs gave a default (see set_defaults).
_DEFAULT = "{{%- if {0} is not defined %}}{{%- set {0} = {1} %}}{{%- endif %}}"
_DEFAULTED = re.compile(r"\{%- if (\w+) is not defined %\}\{%- set \1 = ")
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*(.*)", re.DOTALL)
_CALL_ID = re.compile(r"[a-zA-Z0-9]{9}")


def per_tokenizer(function: Callable[[Tokenizer], T]) -> Callable[[Tokenizer], T]:
    """Cache function(tokenizer) while its special tokens and template stay the same: reading them is slow."""
    cached = functools.lru_cache(lambda tokenizer, *state: function(tokenizer))

    @functools.wraps(function)
    def remembered(tokenizer: Tokenizer) -> T:
        return cached(tokenizer, len(tokenizer), *tokenizer.all_special_tokens, str(tokenizer.chat_template))

    return remembered


@per_tokenizer
def special_tokens(tokenizer: Tokenizer) -> list[str]:
    """Longest first, so that a token is not mistaken for another one that is its prefix."""
    marks = set(tokenizer.all_special_tokens)
    for token in tokenizer.added_tokens_decoder.values():
        if token.special:
            marks.add(str(token.content))
    return sorted(marks - {""}, key=lambda mark: (-len(mark), mark))


def hidden_texts(tokenizer: Tokenizer) -> list[str]:
    """The texts of the placeholders, by number: special tokens, and the two characters that placeholders are
    made of."""
    return [*special_tokens(tokenizer), "\ufdd0", "\ufdd1"]


# --- templates ----------------------------------------------------------------------------------------------


def apply_template(
    chat: list[Message],
    tokenizer: Tokenizer,
    tools: Tools = None,
    switches: Switches | None = None,
    add_generation_prompt: bool = False,
) -> str:
    """The text of prepared messages. Raises UserError without a template, BadRow if it rejects the chat."""
    from transformers.utils.chat_template_utils import render_jinja_template

    if not tokenizer.chat_template:
        raise UserError(
            "the tokenizer has no chat template: pass --chat_template chatml, plain, or a .jinja file"
        )
    try:
        texts, _ = render_jinja_template(
            conversations=[chat],
            tools=tools,
            chat_template=tokenizer.get_chat_template(tools=tools),
            add_generation_prompt=add_generation_prompt,
            **tokenizer.special_tokens_map | (switches or {}),
        )
    # templates can raise anything (raise_exception, a missing key, a filter on None)
    except Exception as error:
        raise BadRow(f"the chat template refuses it: {' '.join(str(error).split())}") from None
    if "\\ufdd0" in texts[0]:  # as Python prints the character of a placeholder within a list
        raise BadRow("the chat template rewrites a special token that the text contains")
    return texts[0]


def read_chat_template(name: str) -> str:
    """A chat template by the name of one shipped here, or by the path of a .jinja file."""
    if "{%" in name or "{{" in name:
        raise UserError("--chat_template is a template itself: write it to a .jinja file, and name that")
    path = TEMPLATES / f"{name}.jinja" if "/" not in name and not name.endswith(".jinja") else Path(name)
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise UserError(f"--chat_template: neither chatml, nor plain, nor a .jinja file: {error}") from None


def set_defaults(tokenizer: Tokenizer, settings: list[str]) -> None:
    """Give variables of the chat template defaults, "name=value" each. They are part of the template, so that
    it writes the same wherever the model is sampled. Raises UserError for another form."""
    template = tokenizer.chat_template
    if not isinstance(template, str):
        raise UserError("--template_kwargs: the tokenizer has no chat template, or several (--chat_template)")
    for setting in settings:
        name, _, value = setting.partition("=")
        if not name.isidentifier() or not value:
            raise UserError(f"--template_kwargs {setting}: expected name=value, as in enable_thinking=false")
        if name not in template:
            raise UserError(f"--template_kwargs {setting}: the chat template does not read {name}")
        lower = value.lower()
        is_number = value.removeprefix("-").replace(".", "", 1).isdecimal()
        literal = lower if lower in ("true", "false", "none") or is_number else json.dumps(value)
        template = _DEFAULT.format(name, literal) + template
    tokenizer.chat_template = template


def defaults_of(tokenizer: Tokenizer) -> set[str]:
    """The names of the variables to which set_defaults gave a default."""
    return set(_DEFAULTED.findall(str(tokenizer.chat_template)))


# --- messages as a template reads them ----------------------------------------------------------------------

# Chats with which `needs_of` and `endings` try what a template writes
WORD = "plainloop"
QUESTION = {"role": "user", "content": "question"}
ANSWER = {"role": "assistant", "content": WORD}
THOUGHT = {"role": "assistant", "content": "x"} | dict.fromkeys(REASONING, WORD)
FUNCTION = {"name": "find", "arguments": {"where": WORD}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call_1", "type": "function", "function": FUNCTION}],
}
OUTPUT = {"role": "tool", "tool_call_id": "call_1", "name": "find", "content": "found"}
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": WORD,
        "parameters": {"type": "object", "properties": {"where": {"type": "string", "description": WORD}}},
    },
}


class Needs(NamedTuple):
    """What a chat template has a place for, and in which form it reads messages."""

    tools: bool = False
    calls: bool = False
    thoughts: bool = False  # of answers; without a place they are written as <think> in the content
    call_thoughts: bool = False  # of messages with calls
    parts: bool = False  # content as a list of {"type": "text", "text"}
    no_content: bool = False  # of a message with calls and no text: null, not ""
    text_arguments: bool = False  # of a call: JSON text, not an object
    short_ids: bool = False  # of calls: nine letters and digits, as for Mistral's


@per_tokenizer
def needs_of(tokenizer: Tokenizer) -> Needs:
    """The needs of a tokenizer's chat template, found by rendering small chats."""

    def writes(word: str, chat: list[Message], needs: Needs, tools: Tools = None) -> bool:
        try:
            text = apply_template([_adapt(message, needs) for message in chat], tokenizer, tools)
        except BadRow:
            return False
        # an object as Python prints it, or text that was encoded twice, is no place for a call
        is_misread = tools is None and ("{'where'" in text or '\\"where' in text)
        return word in text and not is_misread

    needs = Needs()
    if not writes("question", [QUESTION], needs) and writes("question", [QUESTION], Needs(parts=True)):
        needs = Needs(parts=True)
    needs = needs._replace(tools=writes(WORD, [QUESTION], needs, [TOOL]))
    needs = needs._replace(thoughts=writes(WORD, [QUESTION, THOUGHT], needs._replace(thoughts=True)))
    for short_ids, no_content, text_arguments in itertools.product((False, True), repeat=3):
        found = needs._replace(
            calls=True, short_ids=short_ids, no_content=no_content, text_arguments=text_arguments
        )
        if writes(WORD, [QUESTION, CALL], found):
            thinks = CALL | dict.fromkeys(REASONING, "plainthought")
            has_place = writes("plainthought", [QUESTION, thinks], found._replace(call_thoughts=True))
            return found._replace(call_thoughts=has_place)
    return needs


def prepare(messages: list[Message], tools: Tools, tokenizer: Tokenizer) -> tuple[list[Message], Tools]:
    """Messages and tools in the form in which the template reads them, with placeholders for special tokens
    that are spelled."""
    needs, marks = needs_of(tokenizer), hidden_texts(tokenizer)
    return [_hide(_adapt(message, needs), marks) for message in messages], _hide(tools, marks)


def _adapt(message: Message, needs: Needs) -> Message:
    """A message of formats.py as a template with these needs reads it; without its "train", which is no part
    of the chat."""
    message = {key: value for key, value in message.items() if key != "train"}
    if message["role"] == "assistant":
        message = _with_thought(message, needs)
    if "tool_calls" in message:
        message["tool_calls"] = [_adapt_call(call, needs) for call in message["tool_calls"]]
        if needs.no_content and not message["content"].strip():
            return message | {"content": None}  # which is no list of parts
    if needs.short_ids and "tool_call_id" in message:
        message["tool_call_id"] = _short_id(message["tool_call_id"])
    if needs.parts:
        message["content"] = [{"type": "text", "text": message["content"]}]
    return message


def _with_thought(message: Message, needs: Needs) -> Message:
    """An answer with its thought where the template reads it: in a field of its own, or in the content."""
    thought, content = message.get("thinking"), message["content"]
    has_place = needs.call_thoughts if "tool_calls" in message else needs.thoughts
    if has_place and not thought and (inside := _THOUGHT.fullmatch(content)):
        message = message | {"content": inside[2]}
        if inside[1].strip():  # an empty field is an empty thought for gpt-oss's template
            message |= dict.fromkeys(REASONING, inside[1].strip("\n"))
        return message
    if not has_place and thought:
        notes.add(
            "the chat template has no place for reasoning: it is written as <think> in the answer (without: "
            "--columns unused=reasoning_content)"
        )
        message = {key: value for key, value in message.items() if key not in REASONING}
        message["content"] = f"<think>\n{thought}\n</think>\n\n{content}"
    return message


def without_thought(message: Message) -> Message:
    """A message without what some templates drop once a later answer is there: its thought, or the text beside its
    calls."""
    kept = {key: value for key, value in message.items() if key not in REASONING}
    if "tool_calls" in message and isinstance(message["content"], str):
        kept["content"] = ""
    return kept


def without_empty_thought(message: Message) -> Message:
    """An answer without a leading <think></think>."""
    content = message["content"]
    if message["role"] == "assistant" and isinstance(content, str):
        inside = _THOUGHT.fullmatch(content)
        if inside and not inside[1].strip():
            return message | {"content": inside[2]}
    return message


def _adapt_call(call: dict[str, Any], needs: Needs) -> dict[str, Any]:
    """A call of formats.py with its arguments and its id in the template's form."""
    function = call["function"]
    if needs.text_arguments:
        function = function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    if needs.short_ids:
        call = call | {"id": _short_id(call.get("id") or function["name"])}
    return call | {"function": function}


def _short_id(name: str) -> str:
    """An id of nine letters and digits; the same one for the same name."""
    return name if _CALL_ID.fullmatch(name) else hashlib.sha256(name.encode()).hexdigest()[:9]


def _hide(value: Any, marks: list[str]) -> Any:
    """A value with each of `marks` spelled in its strings, keys included, replaced by a placeholder."""
    if isinstance(value, list):
        return [_hide(item, marks) for item in value]
    if isinstance(value, dict):
        hidden = {}
        for key, item in value.items():
            hidden[_hide(key, marks)] = item if key == "role" else _hide(item, marks)
        return hidden
    if not isinstance(value, str) or not any(mark in value for mark in marks):
        return value
    spelled = "|".join(map(re.escape, marks))
    return re.sub(spelled, lambda match: f"\ufdd0{marks.index(match[0])}\ufdd1", value)
