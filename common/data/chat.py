"""Chats: the text before each answer as it is sampled, and what the model has to write there.

For the answer messages[i], both come from the chat template alone:

    context = template(messages[:i], add_generation_prompt=True)    the prompt that sampling would have
    written = template(messages[:i + 1])[len(context):]              up to and with the token that stops sampling

Many templates rewrite earlier turns: they drop old thoughts, or end the last turn with another token. Each
answer is therefore rendered on its own, as the last message. `tokens.py` makes token sequences of the results.
"""

from collections.abc import Iterator
import json
import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from common.data.chat_template import (
    ANSWER,
    CALL,
    OUTPUT,
    QUESTION,
    WORD,
    Switches,
    Tools,
    apply_template,
    defaults_of,
    needs_of,
    per_tokenizer,
    prepare,
    special_tokens,
    without_empty_thought,
    without_thought,
)
from common.data.types import BadRow, Message, Tokenizer, notes

if TYPE_CHECKING:
    from transformers import GenerationConfig

ANOTHER = "use another template: --chat_template chatml, or with tools a .jinja file"
WITHOUT_IT = f"leave a thought in a field out by --columns unused=reasoning_content, or {ANOTHER}"
# Tried in this order, until the rendering of an answer continues its header.
SWITCHES: tuple[Switches, ...] = (
    {},
    {"enable_thinking": False},
    {"enable_thinking": True},
    {"thinking": False},
    {"thinking": True},
)


class NotContinued(BadRow):
    """The chat template does not write an answer after the header that it would be sampled after."""


class Answer(NamedTuple):
    """An answer of a chat, as text."""

    context: str  # what it is sampled after
    written: str  # what the model writes there
    rest: str  # what the template writes after that, at the end of a chat


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
    return apply_template(chat, tokenizer, tools, switches or {}, add_generation_prompt=True)


def answers(
    messages: list[Message],
    turns: list[int],
    tokenizer: Tokenizer,
    tools: Tools = None,
    switches: list[Switches] | None = None,
    all_or_none: bool = False,
) -> list[Answer]:
    """The answers messages[i], for i of `turns`, each after the text that it is sampled after.

    switches: an answer uses the first ones under which the template continues its header and writes all of
    its words; by default those of `switches_to_try`. An answer that does not continue its header is left out,
    and noted. Raises BadRow if that is the only one, or with `all_or_none`, and for anything else that the
    template leaves out; UserError without a template.
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
    if reasons and (all_or_none or not found):
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
            notes.add(
                f"answers stand after the generation prompt of --template_kwargs {flags}: sample with it, too"
            )
        return answer
    raise reasons[0]


def switches_to_try(tokenizer: Tokenizer, given: Switches | None = None) -> list[Switches]:
    """Those of SWITCHES that the template reads, each with the given ones. What is given, or has a default of
    the run, stays as it is."""
    given = given or {}
    template = str(tokenizer.chat_template)
    fixed = defaults_of(tokenizer) | given.keys()
    tried = []
    for switches in SWITCHES:
        if all(name in template and name not in fixed for name in switches):
            tried.append(given | switches)
    return tried


def whole_text(messages: list[Message], tokenizer: Tokenizer, tools: Tools, switches: Switches) -> str:
    """The text of a whole chat, without the header of a further answer. Raises as `answers` does."""
    chat, tools = prepare(messages, tools, tokenizer)
    text = apply_template(chat, tokenizer, tools, switches)
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
        context = apply_template(before, tokenizer, tools, switches, add_generation_prompt=True)
    except BadRow as reason:
        raise NotContinued(str(reason)) from None
    text = apply_template([*before, message], tokenizer, tools, switches)
    if not text.startswith(context):
        # gpt-oss's and Kimi's templates drop the thoughts before earlier calls once there is a final answer. If
        # the chat without these thoughts has the same text, the answer is taken from there, after this context.
        shorter = [without_thought(turn) for turn in before]
        if shorter == before or apply_template([*shorter, message], tokenizer, tools, switches) != text:
            raise NotContinued(_why_not_continued(context, message))
        return _answer(shorter, message, tokenizer, tools, switches)._replace(context=context)
    written = text[len(context) :]
    end_of_words = 0
    for what, forms in _words_of(message):
        end = _end_of(forms, written, end_of_words)
        if end is None:  # some templates write the calls first
            end = _end_of(forms, written, 0)
        if end is None:
            raise BadRow(f"the chat template leaves out or changes {what} ({ANOTHER})")
        end_of_words = max(end_of_words, end)
    content = _text_of(message).strip()
    header = (context + written[: written.find(content)]).rstrip()
    if content.startswith("<think>") and header.endswith(("<think>", "</think>")):
        # The template has opened or closed a thought here, and the answer's text begins with one as well. Sampling
        # never writes two. An empty one may go: then the chat is rendered again without it.
        chat = [without_empty_thought(turn) for turn in [*before, message]]
        has_empty_thought = chat[-1] != message
        if not has_empty_thought or header.endswith("<think>"):
            raise NotContinued(
                f"the chat template writes a thought of its own before that of the answer ({WITHOUT_IT})"
            )
        return _answer(chat[:-1], chat[-1], tokenizer, tools, switches)
    ending = endings(tokenizer)["call" if message.get("tool_calls") else "answer"]
    if ending is not None and ending.marks in written[:end_of_words]:
        raise BadRow(
            "the chat template ends this answer more than once, as after each of several calls: put each into a turn of "
            "its own"
        )
    answer = _up_to_the_end(written, end_of_words, ending, tokenizer)
    return Answer(context, answer, written[len(answer) :])


def _end_of(forms: list[str], text: str, start: int) -> int | None:
    """Where the first of these forms that a text has from `start` on ends; None: it has none of them."""
    for form in forms:
        place = text.find(form, start)
        if place >= 0:
            return place + len(form)
    return None


def _why_not_continued(context: str, message: Message) -> str:
    """Why an answer's text does not begin with the text that it would be sampled after."""
    header = context[-30:]
    if "think" not in header and "thought" not in header:
        return f"the chat template rewrites the text before an answer ({ANOTHER})"
    # for some templates the thought has become a part of the content
    has_thought = message.get("thinking") or _text_of(message).lstrip().startswith("<think>")
    if has_thought and "/think" in header:
        return f"the generation prompt closes a thought, and this answer has one ({WITHOUT_IT})"
    if has_thought:
        return f"the generation prompt begins a thought, and the chat template leaves out those of answers ({ANOTHER})"
    return (
        "the generation prompt begins a thought, and this answer is written without: give it one "
        f"(reasoning_content), or {ANOTHER}"
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
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        for value in _leaves(arguments):
            forms = [str(value), json.dumps(value, ensure_ascii=False), json.dumps(value)]
            yield "an argument of a tool call", [form.strip('"').strip() for form in forms]


def _leaves(value: Any) -> Iterator[Any]:
    """The numbers and texts in lists and objects."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif value is not None:
        yield value


def _text_of(message: Message) -> str:
    """The content of a prepared message."""
    content = message["content"]
    if isinstance(content, list):
        return content[0]["text"]
    return content or ""


def _check_messages(text: str, chat: list[Message], answers_too: bool = False) -> None:
    """Note messages, other than answers, that are not in the text of their chat: the model is sampled so, too.
    answers_too: raises BadRow for an answer that is not there."""
    for message in chat:
        is_answer = message["role"] == "assistant"
        if is_answer and not answers_too:
            continue
        content = _text_of(message).strip()
        as_json = json.dumps(content, ensure_ascii=False)[1:-1]  # some templates write tool output so
        if content in text or as_json in text:
            continue
        if is_answer:
            raise BadRow(f"the chat template leaves out or changes an answer ({ANOTHER})")
        notes.add(f"the chat template leaves out or changes a {message['role']} message")


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
        text = apply_template(prepare(chat, None, tokenizer)[0], tokenizer)
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
    if not tokenizer.chat_template:
        return []
    ends = []
    for ending in endings(tokenizer).values():
        for mark in special_tokens(tokenizer):
            if ending is not None and ending.marks.endswith(mark):
                ends.append(mark)
                break
    return ends


def stop_token_ids(tokenizer: Tokenizer, generation_config: "GenerationConfig") -> list[int]:
    """All tokens that end a completion: the generation config's, the tokenizer's, and the template's ends."""
    ids = generation_config.eos_token_id
    if not isinstance(ids, list):
        ids = [] if ids is None else [ids]
    ends = tokenizer.convert_tokens_to_ids(ends_of_turns(tokenizer))
    return sorted({tokenizer.eos_token_id, *ids, *ends})
