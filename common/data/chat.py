"""Chat templates: the rendered text, the spans that the assistant writes, and the tokens that end a turn.

This decides which tokens of a chat are trained, as character spans of the rendered text: whatever the model
will have to write, that is the assistant's words and the end of its turn, but not the header before it.
`tokens.py` tokenises it.

Chats are content: a special token spelled in a message stays plain characters, so that it cannot end or forge
a turn. In the rendered text a placeholder represents it until tokenisation.
"""

from collections.abc import Callable, Iterable
import contextlib
import functools
import json
from pathlib import Path
import re
from typing import TYPE_CHECKING, Any, TypeVar

from common.data.types import BadRow, Message, Tokenizer
from common.errors import UserError

if TYPE_CHECKING:
    from transformers import GenerationConfig

T = TypeVar("T")
TEMPLATES = Path(__file__).parent / "chat_templates"
# Represents a special token spelled in a message (see hidden_texts) while the template is applied.
PLACEHOLDER = re.compile("\ufdd0(\\d+)\ufdd1")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THINKING_HEADER = re.compile(r"<think>\s*(</think>\s*)?$")


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
    marks = {str(t.content) for t in tokenizer.added_tokens_decoder.values() if t.special} | set(
        tokenizer.all_special_tokens
    )
    return sorted(marks - {""}, key=lambda mark: (-len(mark), mark))


def hidden_texts(tokenizer: Tokenizer) -> list[str]:
    """The texts of the placeholders, by number: special tokens, and the two characters that placeholders are
    made of."""
    return [*special_tokens(tokenizer), "\ufdd0", "\ufdd1"]


def render(
    messages: list[Message],
    tokenizer: Tokenizer,
    tools: list[Any] | None = None,
    add_generation_prompt: bool = False,
) -> str:
    """The chat template's text. Raises UserError without a template, BadRow if the template rejects the chat.

    A special token spelled in a message becomes a placeholder, which only the functions here understand. The
    template does not see a message's "train" key.
    """
    messages, tools = _hide([_without_flags(messages), tools], hidden_texts(tokenizer))
    return _apply_template(messages, tokenizer, tools, add_generation_prompt)[0]


def assistant_spans(
    messages: list[Message],
    tokenizer: Tokenizer,
    tools: list[Any] | None = None,
    turns: Iterable[int] | None = None,
) -> tuple[str, dict[int, tuple[int, int]]]:
    """The text of `render`, and for each assistant turn (by its index; all, unless `turns` names them) the
    character span [start, end) that the model writes.

    Taken from the template's {% generation %} markers; otherwise derived: a turn starts at the end of the
    preceding chat rendered with the answer's header, and ends after the special token that ends turns. Raises
    BadRow if the text contradicts that or lacks a message, UserError for a template that ends turns without a
    special token.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    turns = set(answers if turns is None else turns)
    marks, given = special_tokens(tokenizer), (messages, tokenizer, tools)
    messages, tools = _hide([_without_flags(messages), tools], hidden_texts(tokenizer))
    text, marked = _apply_template(messages, tokenizer, tools)
    if marked is not None and len(marked) != len(answers):
        raise BadRow(f"the chat template marks {len(marked)} generations in {len(answers)} assistant turns")
    if missing := leaves_out(text, *given):
        without = "; without tools: --columns unused=tools" if missing == "tools" else ""
        raise BadRow(
            f"the chat template has no place for {missing} (one that has: --chat_template FILE.jinja{without})"
        )

    spans: dict[int, tuple[int, int]] = {}
    at = 0  # end of the messages found so far
    for i, message in enumerate(messages):
        if i in turns:
            if marked is not None:
                start, end = marked[answers.index(i)]
            else:
                start = end = _derive_start(text, messages[:i], tokenizer, tools)
            end = _turn_end(text, start, end, tokenizer, marks)
            spans[i] = start, end
            upto = (
                _apply_template(messages[: i + 1], tokenizer, tools)[0] if message.get("tool_calls") else text
            )
            # A call may have an end of its own: the one found is then that of the next turn.
            if (
                start < at
                or (text.startswith(upto) and end > len(upto))
                or not _holds(text[start:end], message, marks)
            ):
                raise BadRow(
                    "the chat template changes an answer or ends its turn in another way "
                    "(try --train_on last_turn, --chat_template chatml, or for reasoning_content a template that writes it)"
                )
            at = end
        elif message["role"] != "assistant" and (content := message["content"].strip()):
            if (place := text.find(content, at)) < 0:
                # some templates write tool output as JSON
                content = json.dumps(content, ensure_ascii=False)[1:-1]
                place = text.find(content, at)
            if place < 0:
                raise BadRow(
                    f"the chat template leaves out a {message['role']} message (try --chat_template chatml)"
                )
            at = place + len(content)
    return text, spans


def leaves_out(
    text: str,
    messages: list[Message],
    tokenizer: Tokenizer,
    tools: list[Any] | None,
    add_generation_prompt: bool = False,
) -> str:
    """What a chat has and its text has not: "tools" or "tool calls", without which it would be the same text;
    or nothing."""
    plain = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
    others = {"tools": (messages, None)} if tools else {}
    others |= {"tool calls": (plain, tools)} if plain != messages else {}
    for what, (less, with_tools) in others.items():
        # a template that refuses the chat without them does not leave them out
        with contextlib.suppress(BadRow):
            if render(less, tokenizer, with_tools, add_generation_prompt) == text:
                return what
    return ""


@per_tokenizer
def end_of_turn(tokenizer: Tokenizer) -> str | None:
    """The special token with which the chat template ends an assistant turn; None if there is no template or
    no such token."""
    if not tokenizer.chat_template:
        return None
    word = "plainloop"
    try:
        text = render([{"role": "user", "content": "a"}, {"role": "assistant", "content": word}], tokenizer)
    except BadRow:
        return None
    rest = text.partition(word)[2].lstrip()
    return next((mark for mark in special_tokens(tokenizer) if rest.startswith(mark)), None)


def stop_token_ids(tokenizer: Tokenizer, generation_config: "GenerationConfig") -> list[int]:
    """All tokens that end a completion: the generation config's, the tokenizer's, and the template's end of
    turn."""
    ids = generation_config.eos_token_id
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    stops = {*ids, tokenizer.eos_token_id}
    if (mark := end_of_turn(tokenizer)) is not None:
        stops.add(tokenizer.convert_tokens_to_ids(mark))
    return sorted(stops)


def _apply_template(
    messages: list[Message],
    tokenizer: Tokenizer,
    tools: list[Any] | None,
    add_generation_prompt: bool = False,
) -> tuple[str, list[tuple[int, int]] | None]:
    """The text, and the spans of the template's {% generation %} markers, or None without markers."""
    from transformers.utils.chat_template_utils import render_jinja_template

    if not tokenizer.chat_template:
        raise UserError(
            "the tokenizer has no chat template: pass --chat_template chatml, plain, or a .jinja file"
        )
    try:
        template = tokenizer.get_chat_template(tools=tools)
        has_markers = not add_generation_prompt and _GENERATION.search(template) is not None
        texts, marked = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=has_markers,
            add_generation_prompt=add_generation_prompt,
            **tokenizer.special_tokens_map,
        )
        return texts[0], marked[0] if has_markers else None
    # templates can raise anything (raise_exception, a missing key, a filter on None)
    except Exception as error:
        raise BadRow(f"the chat template refuses it: {' '.join(str(error).split())}") from None


def _derive_start(text: str, before: list[Message], tokenizer: Tokenizer, tools: list[Any] | None) -> int:
    """Where the answer to the chat `before` starts in the text of the longer chat."""
    if not before:
        raise BadRow("the chat starts with the assistant (--chat_template chatml allows that)")
    header = _apply_template(before, tokenizer, tools, add_generation_prompt=True)[0]
    if not text.startswith(header):
        # A header may already open or close the thinking; an answer with thinking starts before that.
        header = _THINKING_HEADER.sub("", header)
        if not text.startswith(header + "<think>"):
            raise BadRow(
                "the chat template rewrites earlier turns or leaves out <think> (try --chat_template chatml)"
            )
    return len(header)


def _turn_end(text: str, start: int, end: int, tokenizer: Tokenizer, marks: list[str]) -> int:
    """The end of the turn that starts at `start`, including the special token that ends it.

    end: the end of its markers, which may exclude that token; a model that never learns it would never stop.
    marks: all special tokens.
    """
    if end > start and text[start:end].rstrip().endswith(tuple(marks)):
        return end
    mark = end_of_turn(tokenizer)
    if mark is None:
        raise UserError(
            "the chat template ends answers with no special token, so a model would not learn to stop: "
            "pass --chat_template chatml, plain, or a .jinja file that writes eos_token"
        )
    # Content cannot contain it, as spelled ones are hidden. With markers, it follows them.
    place = text.find(mark, end)
    if place < 0 or (end > start and text[end:place].strip()):
        raise BadRow("the chat template ends this answer with no special token (try --chat_template chatml)")
    return place + len(mark)


def _holds(written: str, message: Message, marks: list[str]) -> bool:
    """Whether the text of a turn ends with the message's words, ignoring white space, or contains its words
    and calls."""
    written = written.rstrip()
    written = written.removesuffix(next((mark for mark in marks if written.endswith(mark)), ""))
    names = [
        str((call.get("function") or call).get("name") or "") for call in message.get("tool_calls") or []
    ]
    if not all(name and written.count(name) >= names.count(name) for name in names):
        return False
    parts = (message["content"], message.get("reasoning_content") or "", written)
    said, thought, written = ("".join(part.split()) for part in parts)
    if thought not in written:
        return False
    return said in written if names else written.endswith(said)


def _without_flags(messages: list[Message]) -> list[Message]:
    """The messages as the template sees them, without "train", which is no part of the chat."""
    return [{key: value for key, value in message.items() if key != "train"} for message in messages]


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


def read_chat_template(name: str) -> str:
    """A chat template by the name of one shipped here, or by the path of a .jinja file."""
    path = TEMPLATES / f"{name}.jinja" if "/" not in name and not name.endswith(".jinja") else Path(name)
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise UserError(f"--chat_template: neither chatml, nor plain, nor a .jinja file: {error}") from None
