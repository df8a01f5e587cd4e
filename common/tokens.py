"""Text and chats as tokens: documents, templates, the spans that are trained, prompts, and the tokens that end a turn.

In a chat, which tokens are trained is decided on the rendered text, as spans of characters, and brought to tokens so
that no token crosses the border of a span. Trained is what the model will have to write: the assistant's words and the
end of its turn; not the header that introduces it.

Chats are content and raw text is format: a message that spells a special token keeps it as plain characters, so that
it cannot end or forge a turn; in documents, prompt and completion strings a spelled special token is that token.
"""

import functools
import json
import re
import sys
import weakref
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from common.data import BadRow, Message
from common.errors import UserError
from common.model import read_chat_template

import numpy as np
import tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

TRAIN_ON = ("all_turns", "last_turn", "everything")
Sequence = dict[str, np.ndarray]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_THINKING_HEADER = re.compile(r"<think>\s*(</think>\s*)?$")
# A special token that a message spells, by its number, while the template is applied. Real text has no noncharacters.
_PLACEHOLDER = re.compile("\ufdd0(\\d+)\ufdd1")


def tokenize_chat(
    messages: list[Message],
    tokenizer: Any,
    *,
    tools: list[Any] | None = None,
    train_on: str = "all_turns",
    first_trained_turn: int = 0,
) -> Sequence:
    """A conversation as input_ids (n,) int64 and loss_mask (n,) uint8.

    train_on: all_turns or last_turn of the assistant, or everything; turns before first_trained_turn are never trained.
    Raises BadRow for a conversation without a turn to train, or that its template refuses.
    """
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first_trained_turn]
    if not turns:
        raise BadRow("no assistant turn")
    turns = {"all_turns": turns, "last_turn": turns[-1:], "everything": []}[train_on]
    text, spans = assistant_spans(messages, tokenizer, tools, turns)
    return tokenize_spans(text, list(spans.values()) if turns else [(0, len(text))], tokenizer)


def tokenize_completion(prompt: str, completion: str, tokenizer: Any) -> Sequence:
    """Plain text: the prompt untrained, the completion and one end-of-text token trained.

    The seam: the ids of the prompt are those that it has alone, as in sampling; no token crosses.
    """
    before = tokenize_text(prompt, tokenizer)
    ids = tokenize_text(prompt + completion, tokenizer)
    if ids[: len(before)] != before:  # a merge across the seam: tokenise the completion by itself
        ids = before + _piece(completion, tokenizer, first=not prompt)[0]
    if len(ids) == len(before) or ids[-1] != tokenizer.eos_token_id:
        ids = [*ids, tokenizer.eos_token_id]
    mask = np.ones(len(ids), np.uint8)
    mask[: len(before)] = 0
    return {"input_ids": np.array(ids, np.int64), "loss_mask": mask}


def tokenize_documents(texts: list[str], tokenizer: Any) -> list[np.ndarray]:
    """Each document as ids that end on one end-of-text token, and begin on one beginning if the tokenizer writes it."""
    documents, eos = [], tokenizer.eos_token_id
    for start in range(0, len(texts), 1000):
        batch = tokenizer(texts[start : start + 1000], add_special_tokens=False, return_attention_mask=False)
        for ids in batch.input_ids:
            ids = _with_bos(ids, tokenizer)
            documents.append(np.array(ids if ids and ids[-1] == eos else [*ids, eos], np.int32))
    return documents


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer (Sennrich et al. 2016, arXiv 1508.07909) with single digits and the ChatML template."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    if vocab_size < 256 + len(specials):
        raise UserError(f"--vocab_size {vocab_size}: a byte-level tokenizer needs at least {256 + len(specials)}")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # The words of the chat template stand before every turn: make sure that each becomes one token.
    roles = ["system\nuser\nassistant\n"] * (1 + len(texts) // 10)
    bpe.train_from_iterator([*texts, *roles], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=specials[1:],
    )
    tokenizer.chat_template = read_chat_template("chatml")
    return tokenizer


def tokenize_pair(
    prompt: str | list[Message],
    chosen: str | list[Message],
    rejected: str | list[Message],
    tokenizer: Any,
    max_length: int,
) -> tuple[Sequence, Sequence]:
    """Prompt + chosen and prompt + rejected, the answers trained. Both sides have the same ids of the prompt.

    max_length limits each side. Raises BadRow where no token of one of the answers is left.
    """
    if isinstance(prompt, str):
        sides = [tokenize_completion(prompt, answer, tokenizer) for answer in (chosen, rejected)]
    else:
        sides = [tokenize_chat(prompt + answer, tokenizer, first_trained_turn=len(prompt)) for answer in (chosen, rejected)]
    starts = [int(side["loss_mask"].argmax()) for side in sides]
    if starts[0] != starts[1] or (sides[0]["input_ids"][: starts[0]] != sides[1]["input_ids"][: starts[0]]).any():
        raise BadRow("the prompt has other tokens before the chosen than before the rejected answer")
    return truncate(sides[0], max_length), truncate(sides[1], max_length)


def tokenize_text(text: str, tokenizer: Any) -> list[int]:
    """Plain text as ids, with one beginning-of-text token if the tokenizer writes it, without an end."""
    return _with_bos(tokenizer(text, add_special_tokens=False, return_attention_mask=False).input_ids, tokenizer)


def tokenize_prompt(prompt: str | list[Message], tokenizer: Any, tools: list[Any] | None = None) -> list[int]:
    """A prompt as the ids to sample from: plain text as it is, messages with the header of the answer."""
    if isinstance(prompt, str):
        return tokenize_text(prompt, tokenizer)
    return _encode(render(prompt, tokenizer, tools, add_generation_prompt=True), tokenizer)[0]


def render(
    messages: list[Message], tokenizer: Any, tools: list[Any] | None = None, add_generation_prompt: bool = False
) -> str:
    """The chat template's text. Raises UserError without a template, BadRow where the template refuses the chat.

    A special token that a message spells is a placeholder in it, which only the functions here read.
    """
    messages, tools = _hide([messages, tools], _special_tokens(tokenizer))
    return _apply_template(messages, tokenizer, tools, add_generation_prompt)[0]


def assistant_spans(
    messages: list[Message], tokenizer: Any, tools: list[Any] | None = None, turns: Iterable[int] | None = None
) -> tuple[str, dict[int, tuple[int, int]]]:
    """The text of `render`, and for each of the assistant's turns (by its index; all, unless `turns` names them) the
    characters [start, end) that the model writes.

    Taken from the template's {% generation %} markers; without them, derived: a turn starts where the chat before it,
    with the header of the answer, ends, and ends after the special token that ends turns. Raises BadRow where the text
    does not bear this out or lacks a message, UserError for a template that ends turns with no special token.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    turns = set(answers if turns is None else turns)
    messages, tools = _hide([messages, tools], _special_tokens(tokenizer))
    text, marked = _apply_template(messages, tokenizer, tools)
    if marked is not None and len(marked) != len(answers):
        raise BadRow(f"the chat template marks {len(marked)} generations in {len(answers)} assistant turns")
    for tool in tools or []:
        if isinstance(tool, dict) and str(tool.get("function", tool).get("name", "")) not in text:
            raise BadRow("the chat template leaves out the tools (to train without them: --columns unused=tools)")

    spans: dict[int, tuple[int, int]] = {}
    at = 0  # all messages so far stand before it
    for i, message in enumerate(messages):
        if i in turns:
            if marked is not None:
                start, end = marked[answers.index(i)]
            else:
                start = end = _derive_start(text, messages[:i], tokenizer, tools)
            end = _turn_end(text, start, end, tokenizer)
            spans[i] = start, end
            if start < at or not _holds(text[start:end], message, tokenizer):
                raise BadRow(
                    "the chat template changes an answer or ends its turn in another way "
                    "(try --train_on last_turn, or --chat_template chatml)"
                )
            at = end
        elif message["role"] != "assistant" and (content := message["content"].strip()):
            forms = (content, json.dumps(content, ensure_ascii=False)[1:-1])  # some templates write tool output as JSON
            found = next((place + len(form) for form in forms if (place := text.find(form, at)) >= 0), None)
            if found is None:
                raise BadRow(f"the chat template leaves out a {message['role']} message (try --chat_template chatml)")
            at = found
    return text, spans


def _apply_template(
    messages: list[Message], tokenizer: Any, tools: list[Any] | None, add_generation_prompt: bool = False
) -> tuple[str, list[tuple[int, int]] | None]:
    """The text, and the spans of the template's {% generation %} markers, None where it has none."""
    if not tokenizer.chat_template:
        raise UserError("the tokenizer has no chat template: pass --chat_template chatml, plain, or a .jinja file")
    try:
        template = tokenizer.get_chat_template(tools=tools)
        if add_generation_prompt or not _GENERATION.search(template):
            text = tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
            )
            return text, None
        texts, marked = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
        return texts[0], marked[0]
    except Exception as error:  # templates raise what they like (raise_exception, a missing key, a filter on None)
        raise BadRow(f"the chat template refuses it: {' '.join(str(error).split())}") from None


def _derive_start(text: str, before: list[Message], tokenizer: Any, tools: list[Any] | None) -> int:
    """Where the answer to the chat `before` starts in the text of the longer chat."""
    if not before:
        raise BadRow("the chat starts with the assistant (--chat_template chatml allows that)")
    header = _apply_template(before, tokenizer, tools, add_generation_prompt=True)[0]
    if not text.startswith(header):
        # A header that opens or closes the thinking in advance; an answer that thinks starts before that.
        header = _THINKING_HEADER.sub("", header)
        if not text.startswith(header + "<think>"):
            raise BadRow("the chat template rewrites earlier turns (try --chat_template chatml, or single-turn chats)")
    return len(header)


def _turn_end(text: str, start: int, end: int, tokenizer: Any) -> int:
    """The end of the turn that starts at `start`, the special token that ends it included.

    end: where its markers end, which may leave that token outside: a model that never learns it never stops.
    """
    if end > start and text[start:end].rstrip().endswith(tuple(_special_tokens(tokenizer))):
        return end
    mark = end_of_turn(tokenizer)
    if mark is None:
        raise UserError(
            "the chat template ends answers with no special token, so a model would not learn to stop: "
            "pass --chat_template chatml, plain, or a .jinja file that writes eos_token"
        )
    # Content cannot contain it: what a message spells is hidden. With markers, it follows them.
    place = text.find(mark, end)
    if place < 0 or (end > start and text[end:place].strip()):
        raise BadRow("the chat template ends this answer with no special token (try --chat_template chatml)")
    return place + len(mark)


def _holds(written: str, message: Message, tokenizer: Any) -> bool:
    """Whether the text of a turn ends with the words of the message, up to white space, or has its words and calls."""
    written = written.rstrip()
    written = written.removesuffix(next((m for m in _special_tokens(tokenizer) if written.endswith(m)), ""))
    calls = [call.get("function") or call for call in message.get("tool_calls") or []]
    if not all(str(call.get("name", "")) in written for call in calls):
        return False
    parts = (message["content"], message.get("reasoning_content") or "", written)
    said, thought, written = ("".join(part.split()) for part in parts)
    if thought not in written:
        return False
    return said in written if calls else written.endswith(said)


def tokenize_spans(text: str, spans: list[tuple[int, int]], tokenizer: Any) -> Sequence:
    """Text of `render` as ids with a mask that is 1 exactly on the given spans [start, end) of characters.

    The text is tokenised as a whole; where a token would cross the border of a span, piece by piece instead.
    """
    ids, offsets = _encode(text, tokenizer)
    if (mask := _mask(offsets, spans)) is None:
        ids, offsets = _encode(text, tokenizer, cuts=[border for span in spans for border in span])
        mask = _mask(offsets, spans)
    if mask is None:
        raise BadRow("a token crosses the border of an answer")
    return {"input_ids": np.array(ids, np.int64), "loss_mask": mask}


def _mask(offsets: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray | None:
    """1 on the tokens inside the spans, 0 on others; None where a token is both."""
    starts, ends = offsets[:, 0], offsets[:, 1]
    mask = np.zeros(len(offsets), np.uint8)
    for start, end in spans:
        inside = (starts >= start) & (ends <= end) & (starts < end)
        if ((starts < end) & (ends > start) & ~inside).any():
            return None
        mask[inside] = 1
    return mask


def _encode(text: str, tokenizer: Any, cuts: Iterable[int] = ()) -> tuple[list[int], np.ndarray]:
    """Text of `render` as ids and their characters [start, end); no token crosses a cut. Placeholders become text."""
    hidden = list(_PLACEHOLDER.finditer(text))
    if text.count("\ufdd0") != len(hidden):
        raise BadRow("the chat template cuts a special token that the text contains")
    borders = sorted({0, len(text), *cuts, *(border for match in hidden for border in match.span())})
    marks = {match.span(): _special_tokens(tokenizer)[int(match[1])] for match in hidden}
    ids, offsets = [], []
    for start, end in pairwise(borders):
        if (start, end) in marks:
            new = _piece(marks[start, end], tokenizer, first=start == 0, literal=True)[0]
            where = np.array([(start, end)] * len(new)).reshape(-1, 2)
        else:
            new, where = _piece(text[start:end], tokenizer, first=start == 0)
            where = where + start
        ids += new
        offsets.append(where)
    return ids, np.concatenate(offsets) if offsets else np.zeros((0, 2), np.int64)


def _piece(text: str, tokenizer: Any, first: bool, literal: bool = False) -> tuple[list[int], np.ndarray]:
    """A piece of a longer text as ids and their characters; literal: special tokens that it spells stay characters."""
    # Some tokenizers write a space before a text. Inside a longer one there is none: read the piece after a line break.
    before = "" if first or not _adds_space(tokenizer) else "\n"
    encoding = tokenizer(
        before + text,
        add_special_tokens=False,
        split_special_tokens=literal,
        return_offsets_mapping=True,
        return_attention_mask=False,
    )
    ids, offsets = encoding["input_ids"], np.array(encoding["offset_mapping"]).reshape(-1, 2)
    if before:
        lead = tokenizer(before, add_special_tokens=False).input_ids
        if ids[: len(lead)] != lead:
            raise BadRow("the tokenizer cannot split the text at the border of an answer")
        ids, offsets = ids[len(lead) :], offsets[len(lead) :] - len(before)
    special = _special_ids(tokenizer)
    for i, token in enumerate(ids):
        if token in special:
            if literal:
                raise BadRow(f"the text contains the special token {text}")
            # It may swallow white space around it, which belongs to no one: not part of its characters.
            around = text[offsets[i, 0] : offsets[i, 1]]
            offsets[i, 0] += len(around) - len(around.lstrip())
            offsets[i, 1] -= len(around) - len(around.rstrip())
    return ids, offsets


def show_trained(sequence: Sequence, tokenizer: Any) -> str:
    """A sequence as text with what is trained marked: in colour on a terminal, in [[brackets]] otherwise."""
    before, after = ("\033[30;42m", "\033[0m") if sys.stdout.isatty() else ("[[", "]]")
    ids, mask = sequence["input_ids"], sequence["loss_mask"]
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1), len(ids)]
    pieces = []
    for start, end in zip(borders[:-1], borders[1:], strict=True):
        text = tokenizer.decode(ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        pieces.append(f"{before}{text}{after}" if mask[start] else text)
    return "".join(pieces)


def truncate(sequence: Sequence, max_length: int) -> Sequence:
    """The first max_length tokens. Raises BadRow where none of them is trained."""
    cut = {name: values[:max_length] for name, values in sequence.items()}
    if not cut["loss_mask"][1:].any():
        raise BadRow(f"no trained token within max_length {max_length}")
    return cut


def _per_tokenizer(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Remembers function(tokenizer) while its special tokens and template stay the same: asking for them is slow."""
    known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

    @functools.wraps(function)
    def remembered(tokenizer: Any) -> Any:
        state = (len(tokenizer), tokenizer.all_special_tokens, tokenizer.chat_template)
        if tokenizer not in known or known[tokenizer][0] != state:
            known[tokenizer] = (state, function(tokenizer))
        return known[tokenizer][1]

    return remembered


@_per_tokenizer
def end_of_turn(tokenizer: Any) -> str | None:
    """The special token with which the chat template ends an assistant turn; None without a template or such a token."""
    if not tokenizer.chat_template:
        return None
    word = "plainloop"
    try:
        text = render([{"role": "user", "content": "a"}, {"role": "assistant", "content": word}], tokenizer)
    except BadRow:
        return None
    at = text.find(word)
    rest = text[at + len(word) :].lstrip() if at >= 0 else ""
    return next((mark for mark in _special_tokens(tokenizer) if rest.startswith(mark)), None)


def stop_token_ids(tokenizer: Any, generation_config: Any) -> list[int]:
    """All tokens that end a completion: those of the generation config, the tokenizer's, the template's end of turn."""
    ids = generation_config.eos_token_id
    stops = set([ids] if isinstance(ids, int) else ids or []) | {tokenizer.eos_token_id}
    if (mark := end_of_turn(tokenizer)) is not None:
        stops.add(tokenizer.convert_tokens_to_ids(mark))
    return sorted(stops)


@_per_tokenizer
def _special_tokens(tokenizer: Any) -> list[str]:
    """Longest first, so that one that begins like another is not taken for it."""
    marks = {str(t.content) for t in tokenizer.added_tokens_decoder.values() if t.special} | set(
        tokenizer.all_special_tokens
    )
    return sorted(marks, key=lambda mark: (-len(mark), mark))


@_per_tokenizer
def _special_ids(tokenizer: Any) -> frozenset[int]:
    return frozenset(tokenizer.convert_tokens_to_ids(_special_tokens(tokenizer)))


@_per_tokenizer
def _adds_space(tokenizer: Any) -> bool:
    """Whether it writes a space before a text (SentencePiece's ▁, byte-level's Ġ)."""
    ids = tokenizer("x", add_special_tokens=False).input_ids
    return tokenizer.convert_ids_to_tokens(ids)[0][0] in "▁Ġ"


@_per_tokenizer
def _adds_bos(tokenizer: Any) -> bool:
    return tokenizer.bos_token_id is not None and tokenizer("x").input_ids[0] == tokenizer.bos_token_id


def _with_bos(ids: list[int], tokenizer: Any) -> list[int]:
    bos = tokenizer.bos_token_id
    return [bos, *ids] if _adds_bos(tokenizer) and ids[:1] != [bos] else ids


def _hide(value: Any, marks: list[str]) -> Any:
    """The strings in a value with a placeholder for each of the special tokens `marks` that they spell."""
    if isinstance(value, list):
        return [_hide(item, marks) for item in value]
    if isinstance(value, dict):
        return {key: item if key == "role" else _hide(item, marks) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    if "\ufdd0" in value or "\ufdd1" in value:
        raise BadRow("the text contains a Unicode noncharacter")
    for i, mark in enumerate(marks):
        if mark in value:
            value = value.replace(mark, f"\ufdd0{i}\ufdd1")
    return value
