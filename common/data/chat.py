"""Chats: the text before each answer as it is sampled, and what the model has to write there.

For the answer messages[i], both come from the chat template alone:

    context = template(messages[:i], add_generation_prompt=True)    the prompt that sampling would have
    written = template(messages[:i + 1])[len(context):]              up to and with the token that stops sampling

Many templates rewrite earlier turns: they drop old thoughts, or end the last turn with another token. Each
answer is therefore rendered on its own, as the last message. `tokens.py` makes token sequences of the results.

Chats are content: a special token spelled in a message stays plain characters, so that it cannot end or forge
a turn. In the rendered text a placeholder represents it until tokenisation.
"""

from collections.abc import Callable, Iterator
import functools
import hashlib
import itertools
import json
import os
from pathlib import Path
import re
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from common.data.types import REASONING, BadRow, Message, Tokenizer, notes
from common.errors import UserError

if TYPE_CHECKING:
    from transformers import GenerationConfig

T = TypeVar("T")
Tools = list[Any] | None
Switches = dict[str, Any]  # variables of a chat template, such as enable_thinking
TEMPLATES = Path(__file__).parent / "chat_templates"
# Represents a special token spelled in a message (see hidden_texts) while the template is applied.
PLACEHOLDER = re.compile("\ufdd0(\\d+)\ufdd1")
# Tried in this order, until the rendering of an answer continues its header.
SWITCHES: tuple[Switches, ...] = (
    {},
    {"enable_thinking": False},
    {"enable_thinking": True},
    {"thinking": False},
    {"thinking": True},
)
# A variable that --template_kwargs gave a default (see with_defaults).
_DEFAULT = "{{%- if {0} is not defined %}}{{%- set {0} = {1} %}}{{%- endif %}}"
_DEFAULTED = re.compile(r"\{%- if (\w+) is not defined %\}\{%- set \1 = ")
_THOUGHT = re.compile(r"\s*<think>(.*?)</think>\s*(.*)", re.DOTALL)
_CALL_ID = re.compile(r"[a-zA-Z0-9]{9}")


class NotContinued(BadRow):
    """The chat template does not write an answer after the header that it would be sampled after."""


class Answer(NamedTuple):
    """An answer of a chat, as text."""

    context: str  # what it is sampled after
    written: str  # what the model writes there
    rest: str  # what the template writes after that, at the end of a chat


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


# --- the text before an answer, and the answer --------------------------------------------------------------


def prompt_text(
    messages: list[Message],
    tokenizer: Tokenizer,
    tools: Tools = None,
    switches: Switches | None = None,
) -> str:
    """The text to sample an answer after: the chat and the header of the answer.

    Raises UserError without a template, BadRow if the template rejects the chat.
    """
    chat, tools = prepare(messages, tools, tokenizer)
    if missing := _without_place(chat, tools, tokenizer):
        notes.add(f"the chat template has no place for {missing}")
    return _apply_template(chat, tokenizer, tools, switches or {}, add_generation_prompt=True)


def answers(
    messages: list[Message],
    turns: list[int],
    tokenizer: Tokenizer,
    tools: Tools = None,
    switches: list[Switches] | None = None,
) -> list[Answer]:
    """The answers messages[i], for i of `turns`, each after the text that it is sampled after.

    switches: an answer uses the first ones under which the template continues its header and writes all of
    its words; by default those of `switches_to_try`. Raises UserError without a template, BadRow for an
    answer that the template cannot write after its header, and for anything else that it leaves out.
    """
    chat, tools = prepare(messages, tools, tokenizer)
    if missing := _without_place(chat, tools, tokenizer):
        without = " (another template: --chat_template FILE.jinja)"
        if missing == "tools":
            without = " (without them: --columns unused=tools)"
        raise BadRow(f"the chat template has no place for {missing}{without}")
    switches = switches or switches_to_try(tokenizer)
    found = []
    before: list[Message] = []  # the messages before the last answer that was found
    reasons: list[BadRow] = []  # of answers that are left out
    for turn in turns:
        try:
            found.append(_first_answer(chat[:turn], chat[turn], tokenizer, tools, switches))
            before = chat[:turn]
        except NotContinued as reason:
            reasons.append(reason)
    if reasons and not found:
        raise reasons[0]
    if reasons:
        notes.add(f"an answer of the chat is not trained: {reasons[0]}")
    if found:
        _check_messages(found[-1].context, before)
    return found


def _first_answer(
    before: list[Message],
    message: Message,
    tokenizer: Tokenizer,
    tools: Tools,
    switches: list[Switches],
) -> Answer:
    """The answer under the first switches with which the template can write it. Raises as `_answer` does."""
    reasons: list[BadRow] = []
    for one in switches:
        try:
            answer = _answer(before, message, tokenizer, tools, one)
        except BadRow as reason:
            reasons.append(reason)
            continue
        if one != switches[0]:
            flags = " ".join(f"{name}={json.dumps(value)}" for name, value in one.items())
            notes.add(f"answers follow the header of --template_kwargs {flags}: sample them with it")
        return answer
    raise reasons[0]


def switches_to_try(tokenizer: Tokenizer, given: Switches | None = None) -> list[Switches]:
    """Those of SWITCHES that the template reads, each with the given ones. What is given, or has a default of
    the run, stays as it is."""
    given = given or {}
    template = str(tokenizer.chat_template)
    fixed = {*given, *_DEFAULTED.findall(template)}
    tried = []
    for switches in SWITCHES:
        if all(name in template and name not in fixed for name in switches):
            tried.append(given | switches)
    return tried


def whole_text(
    messages: list[Message], tokenizer: Tokenizer, tools: Tools = None, switches: Switches | None = None
) -> str:
    """The text of a whole chat, without the header of a further answer. Raises as `answers` does."""
    chat, tools = prepare(messages, tools, tokenizer)
    text = _apply_template(chat, tokenizer, tools, switches or {})
    _check_messages(text, chat, answers_too=True)
    thoughts = [thought for message in chat if (thought := message.get("thinking"))]
    if thoughts and not any(thought.strip() in text for thought in thoughts):
        raise BadRow("the chat template leaves out reasoning_content (--columns unused=reasoning_content)")
    return text


def _answer(
    before: list[Message], message: Message, tokenizer: Tokenizer, tools: Tools, switches: Switches
) -> Answer:
    """The answer `message` to the chat `before`. Raises BadRow if the template does not write it there."""
    try:
        context = _apply_template(before, tokenizer, tools, switches, add_generation_prompt=True)
    except BadRow as reason:
        raise NotContinued(str(reason)) from None
    text = _apply_template([*before, message], tokenizer, tools, switches)
    if not text.startswith(context):
        raise NotContinued(_why_not_continued(context, message))
    written = text[len(context) :]
    end_of_words = 0
    for what, forms in _words_of(message):
        places = [(written.find(form, end_of_words), form) for form in forms]
        places += [(written.find(form), form) for form in forms]  # some templates write the calls first
        place, form = next((found for found in places if found[0] >= 0), (-1, ""))
        if place < 0:
            raise BadRow(
                f"the chat template leaves out or changes {what} (another one: --chat_template chatml)"
            )
        end_of_words = max(end_of_words, place + len(form))
    ending = endings(tokenizer)["call" if message.get("tool_calls") else "answer"]
    if ending is not None and ending.marks in written[:end_of_words]:
        raise BadRow(
            "the chat template ends this answer more than once, as after each of several calls: one a turn"
        )
    answer = _up_to_the_end(written, end_of_words, ending, tokenizer)
    return Answer(context, answer, written[len(answer) :])


def _why_not_continued(context: str, message: Message) -> str:
    """Why an answer's text does not begin with the text that it would be sampled after."""
    header = context[-30:]
    another = "another template: --chat_template chatml, with tools a .jinja file"
    if "think" not in header and "thought" not in header:
        return f"the chat template rewrites the text before an answer ({another})"
    if message.get("thinking"):
        return f"the chat template's header begins a thought, and leaves out those of answers ({another})"
    return (
        "the chat template's header begins a thought, and this answer is written without: give it one "
        f"(reasoning_content), or {another}"
    )


def _words_of(message: Message) -> Iterator[tuple[str, list[str]]]:
    """What an answer has to contain: (what it is, the forms in which a template may write it)."""
    if thought := (message.get("thinking") or "").strip():
        yield "reasoning_content", [thought]
    if content := _text_of(message).strip():
        yield "the text of an answer", [content]
    for call in message.get("tool_calls") or []:
        yield "a tool call", [call["function"]["name"]]
        arguments = call["function"]["arguments"]
        for value in _leaves(json.loads(arguments) if isinstance(arguments, str) else arguments):
            forms = [str(value), json.dumps(value, ensure_ascii=False), json.dumps(value)]
            yield "an argument of a tool call", [form.strip('"').strip() for form in forms]


def _leaves(value: Any) -> Iterator[Any]:
    """The numbers and texts in lists and objects."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _leaves(item)
    elif value is not None:
        yield value


def _text_of(message: Message) -> str:
    """The content of a prepared message."""
    content = message["content"]
    return content[0]["text"] if isinstance(content, list) else content or ""


def _check_messages(text: str, chat: list[Message], answers_too: bool = False) -> None:
    """Raises BadRow for a message, other than an answer, that is not in the text of its chat."""
    for message in chat:
        content = _text_of(message).strip()
        as_json = json.dumps(content, ensure_ascii=False)[1:-1]  # some templates write tool output so
        if message["role"] == "assistant" and not answers_too:
            continue
        if content not in text and as_json not in text:
            raise BadRow(
                f"the chat template leaves out a {message['role']} message (try --chat_template chatml)"
            )


def _without_place(chat: list[Message], tools: Tools, tokenizer: Tokenizer) -> str | None:
    """What a chat has and the template has no place for."""
    needs = needs_of(tokenizer)
    if tools and not needs.tools:
        return "tools"
    if not needs.calls and any(message.get("tool_calls") for message in chat):
        return "tool calls"
    return None


# --- the end of an answer -----------------------------------------------------------------------------------


class Ending(NamedTuple):
    """How a chat template ends answers of one kind."""

    marks: str  # one or several special tokens; sampling stops at the last one
    of_next_turn: bool  # whether it is the mark with which the next turn begins, as in GLM's templates


@per_tokenizer
def endings(tokenizer: Tokenizer) -> dict[str, Ending | None]:
    """The ends of an "answer" and of a "call"; None: no special token ends it."""
    return {
        "answer": _ending([QUESTION, ANSWER], QUESTION, tokenizer),
        "call": _ending([QUESTION, CALL], OUTPUT, tokenizer),
    }


def _ending(chat: list[Message], following: Message, tokenizer: Tokenizer) -> Ending | None:
    """The marks after WORD, with which the last message of the chat ends: those that are there whether or not
    another message follows; else those that are there at the end of a chat; else those of the next turn."""
    last = _text_after_word(chat, tokenizer)
    longer = _text_after_word([*chat, following], tokenizer)
    marks = _marks(tokenizer)
    always = marks.findall(os.path.commonprefix([last, longer])) if longer else []
    at_the_end, of_next_turn = marks.search(last), marks.search(longer)
    if always:
        return Ending(always[-1].rstrip(), of_next_turn=False)
    if at_the_end:
        return Ending(at_the_end[0].rstrip(), of_next_turn=False)
    if of_next_turn:
        return Ending(of_next_turn[0].rstrip(), of_next_turn=True)
    return None


def _text_after_word(chat: list[Message], tokenizer: Tokenizer) -> str:
    """What a chat's text has after WORD; nothing if the template refuses the chat, or leaves out the word."""
    try:
        text = _apply_template(prepare(chat, None, tokenizer)[0], tokenizer)
    except BadRow:
        return ""
    return text.rpartition(WORD)[2] if WORD in text else ""


@per_tokenizer
def _marks(tokenizer: Tokenizer) -> re.Pattern[str]:
    """Matches special tokens with nothing but white space between them."""
    mark = "|".join(map(re.escape, special_tokens(tokenizer)))
    return re.compile(rf"(?:(?:{mark})\s*)+")


def _up_to_the_end(written: str, end_of_words: int, ending: Ending | None, tokenizer: Tokenizer) -> str:
    """What is written, up to and with the token that stops sampling. Raises BadRow if there is none."""
    if ending is not None:
        place = written.find(ending.marks, end_of_words)
        if place >= 0:
            return written[: place + len(ending.marks)]
    body = written.rstrip()
    if len(body) > end_of_words and body.endswith(tuple(special_tokens(tokenizer))):
        return body
    if ending is not None and ending.of_next_turn:
        return body + ending.marks
    raise BadRow(
        "the chat template ends this answer with no special token, so a model would not learn to stop: "
        "--chat_template chatml, plain, or a .jinja file that writes eos_token"
    )


def ends_of_turns(tokenizer: Tokenizer) -> list[str]:
    """The special tokens with which the chat template ends answers and calls, where it does."""
    found = []
    for ending in endings(tokenizer).values() if tokenizer.chat_template else ():
        if ending is not None:
            found.append(next(mark for mark in special_tokens(tokenizer) if ending.marks.endswith(mark)))
    return found


def stop_token_ids(tokenizer: Tokenizer, generation_config: "GenerationConfig") -> list[int]:
    """All tokens that end a completion: the generation config's, the tokenizer's, and the template's ends."""
    ids = generation_config.eos_token_id or []
    stops = {tokenizer.eos_token_id, *(ids if isinstance(ids, list) else [ids])}
    return sorted(stops | {*tokenizer.convert_tokens_to_ids(ends_of_turns(tokenizer))})


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
    """Found by trying."""

    def writes(word: str, chat: list[Message], needs: Needs, tools: Tools = None) -> bool:
        try:
            text = _apply_template([_adapt(message, needs) for message in chat], tokenizer, tools)
        except BadRow:
            return False
        # an object as Python prints it, or text that was encoded twice, is no place for a call
        return word in text and "{'where'" not in text and '\\"where' not in text

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
            return message | {"content": None}
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
        return message | dict.fromkeys(REASONING, inside[1].strip("\n")) | {"content": inside[2]}
    if not has_place and thought:
        notes.add(
            "the chat template has no place for reasoning: it is written as <think> in the answer (without: "
            "--columns unused=reasoning_content)"
        )
        message = {key: value for key, value in message.items() if key not in REASONING}
        message["content"] = f"<think>\n{thought}\n</think>\n\n{content}"
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
        return {
            _hide(key, marks): item if key == "role" else _hide(item, marks) for key, item in value.items()
        }
    if not isinstance(value, str) or not any(mark in value for mark in marks):
        return value
    numbers = {mark: i for i, mark in enumerate(marks)}
    return re.sub("|".join(map(re.escape, marks)), lambda match: f"\ufdd0{numbers[match[0]]}\ufdd1", value)


# --- templates ----------------------------------------------------------------------------------------------


def _apply_template(
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
    except (
        Exception
    ) as error:  # templates can raise anything (raise_exception, a missing key, a filter on None)
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
