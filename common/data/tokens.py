"""Text, chats and pairs as tokens: sequences of ids with a mask of trained tokens, and prompts to sample
from.

In documents, prompt and completion strings, a special token that is spelled out becomes that token: raw text
may carry its own formatting. In chats it does not (see chat.py, which also decides what is trained). No token
spans the boundary between trained and untrained text.
"""

from collections.abc import Iterable
from itertools import chain, pairwise
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from common.data.chat import (
    PLACEHOLDER,
    assistant_spans,
    hidden_texts,
    leaves_out,
    per_tokenizer,
    render,
    special_tokens,
)
from common.data.types import BadRow, Message, Sequence, Tokenizer, may_reject, whole
from common.errors import UserError
import numpy as np

if TYPE_CHECKING:
    import tokenizers

NOT_FAST = "a tokenizer is needed whose tokenizer.json does all that it does"
# what is to be known of the row that is tokenised: encode.py counts them, and empties the set
notes: set[str] = set()


@may_reject
def tokenize_chat(
    chat: dict[str, Any], tokenizer: Tokenizer, *, train_on: str = "all_turns", max_length: int | None = None
) -> Sequence:
    """The result of formats.as_chat (messages, prompt and completion, or text) as input_ids (n,) and
    loss_mask (n,) int64.

    train_on: for messages, see tokenize_messages; of prompt and completion only the completion is trained, of
    a text all of it. max_length: longer ones are truncated at the end. Raises BadRow if nothing is left to
    train on.
    """
    if "text" in chat:
        sequence = whole(tokenize_documents([chat["text"]], tokenizer)[0])
    elif "completion" in chat:
        sequence = tokenize_completion(chat["prompt"], chat["completion"], tokenizer)
    else:
        first = chat.get("prompt_turns", 0)
        sequence = tokenize_messages(
            chat["messages"], tokenizer, tools=chat.get("tools"), train_on=train_on, first_trained_turn=first
        )
    sequence["loss_mask"][0] = 0  # nothing predicts the first token
    return sequence if max_length is None else truncate(sequence, max_length)


@may_reject
def tokenize_messages(
    messages: list[Message],
    tokenizer: Tokenizer,
    *,
    tools: list[Any] | None = None,
    train_on: str = "all_turns",
    first_trained_turn: int = 0,
) -> Sequence:
    """A conversation as input_ids (n,) int64 and loss_mask (n,) int64.

    train_on: all_turns or last_turn of the assistant, from first_trained_turn on, or everything. An assistant
    turn with "train": False is never trained. Raises BadRow for a conversation without a turn to train, or
    that its template rejects.
    """
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first_trained_turn]
    if not turns:
        raise BadRow("no assistant turn")
    if train_on == "last_turn":
        turns = turns[-1:]
    if not (trained := [i for i in turns if messages[i].get("train") is not False]):
        raise BadRow("no assistant turn that is trained")
    if train_on != "everything":
        text, spans = assistant_spans(messages, tokenizer, tools, trained)
        starts = [start for start, _ in spans.values()]
        others = [
            m["content"] for i, m in enumerate(messages) if m["role"] == "assistant" and i not in trained
        ]
        if others and (seams(text, starts) or any(answer[:1].isspace() for answer in others)):
            starts += answer_starts(text, messages, tokenizer, tools)
        return tokenize_spans(text, spans.values(), tokenizer, starts)
    left_out = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("train") is False]
    text, spans = assistant_spans(messages, tokenizer, tools, left_out)
    shown = PLACEHOLDER.sub(lambda found: hidden_texts(tokenizer)[int(found[1])], text)
    thoughts = [thought for i in trained if (thought := messages[i].get("reasoning_content"))]
    if thoughts and not any(thought.strip() in shown for thought in thoughts):
        raise BadRow(
            "the chat template leaves out reasoning_content (another one: --chat_template FILE.jinja)"
        )
    borders = [0, *chain.from_iterable(spans.values()), len(text)]  # everything outside the spans is trained
    return tokenize_spans(text, list(zip(borders[::2], borders[1::2], strict=True)), tokenizer)


@may_reject
def tokenize_completion(prompt: str, completion: str, tokenizer: Tokenizer) -> Sequence:
    """Plain text: the prompt untrained, the completion and one end-of-text token trained.

    The prompt has the same ids as on its own, as in sampling: no token spans the boundary.
    """
    if tokenizer.chat_template:
        notes.add(
            "plain text goes without the chat template (as chats: --columns instruction=prompt output=completion)"
        )
    before = tokenize_text(prompt, tokenizer)
    ids = tokenize_text(prompt + completion, tokenizer)
    if ids[: len(before)] != before:  # a merge across the boundary: tokenise the completion separately
        ids = before + _piece(completion, tokenizer, _traits(tokenizer), first=not prompt)[0]
    if len(ids) == len(before) or ids[-1] != tokenizer.eos_token_id:
        ids = [*ids, tokenizer.eos_token_id]
    mask = np.ones(len(ids), np.int64)
    mask[: len(before)] = 0
    return {"input_ids": np.array(ids, np.int64), "loss_mask": mask}


def tokenize_documents(texts: list[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Each document as int64 ids with one end-of-text token, and one beginning-of-text token if the tokenizer
    adds it."""
    documents, eos = [], tokenizer.eos_token_id
    for ids in _ids(texts, tokenizer):
        ids = _with_bos(ids, tokenizer)
        documents.append(np.array(ids if ids and ids[-1] == eos else [*ids, eos], np.int64))
    return documents


def tokenize_pair(
    prompt: str | list[Message],
    chosen: str | list[Message],
    rejected: str | list[Message],
    tokenizer: Tokenizer,
    max_length: int,
) -> list[Sequence]:
    """Prompt + chosen and prompt + rejected, with the answers trained. Both sides have the same prompt ids.

    max_length limits each side. Raises BadRow if no token of one of the answers is left.
    """
    if isinstance(prompt, str):
        sides = [tokenize_completion(prompt, answer, tokenizer) for answer in (chosen, rejected)]
    else:
        first = len(prompt)
        sides = [
            tokenize_messages(prompt + side, tokenizer, first_trained_turn=first)
            for side in (chosen, rejected)
        ]
    starts = [int(side["loss_mask"].argmax()) for side in sides]
    if (
        starts[0] != starts[1]
        or (sides[0]["input_ids"][: starts[0]] != sides[1]["input_ids"][: starts[0]]).any()
    ):
        raise BadRow("the prompt has other tokens before the chosen than before the rejected answer")
    ends = [int(np.flatnonzero(side["loss_mask"])[-1]) for side in sides]
    # one answer loses its end token: trained in the other alone, it would make
    if min(ends) < max_length <= max(ends):
        side = sides[ends.index(min(ends))]  # ending good or bad
        side["loss_mask"][min(ends)] = 0
    return [truncate(side, max_length) for side in sides]


def tokenize_text(text: str, tokenizer: Tokenizer) -> list[int]:
    """Plain text as ids, with one beginning-of-text token if the tokenizer adds it, and no end-of-text
    token."""
    return _with_bos(_ids([text], tokenizer)[0], tokenizer)


@may_reject
def tokenize_prompt(
    prompt: str | list[Message], tokenizer: Tokenizer, tools: list[Any] | None = None
) -> list[int]:
    """A prompt as ids to sample from: plain text unchanged, messages followed by the answer's header."""
    if isinstance(prompt, str):
        if tokenizer.chat_template:
            notes.add(
                "plain text goes without the chat template (in GRPO --system_prompt, empty or not, makes chats of prompts)"
            )
        return tokenize_text(prompt, tokenizer)
    text = render(prompt, tokenizer, tools, add_generation_prompt=True)
    if missing := leaves_out(text, prompt, tokenizer, tools, add_generation_prompt=True):
        notes.add(f"the chat template has no place for {missing}")
    answers = [message["content"] for message in prompt if message["role"] == "assistant"]
    seam = seams(text, [len(text)]) or any(answer[:1].isspace() for answer in answers)
    starts = answer_starts(text, prompt, tokenizer, tools) if answers and seam else []
    return encode_text(text, tokenizer, cuts=seams(text, starts))[0]


def answer_starts(
    text: str, messages: list[Message], tokenizer: Tokenizer, tools: list[Any] | None
) -> list[int]:
    """The starts of the assistant's turns in the text of a chat, or of a longer one; none if the template
    hides them."""
    try:
        whole_text, spans = assistant_spans(messages, tokenizer, tools)
    except BadRow:
        return []
    return [start for start, _ in spans.values() if text[:start] == whole_text[:start]]


def seams(text: str, starts: Iterable[int]) -> list[int]:
    """Those starts of answers where white space meets white space, or that follow a space: some tokenizers
    merge across them, and the answer would then be trained after other tokens than it is sampled after."""
    return [
        at
        for at in starts
        if text[at - 1 : at].isspace()
        and (text[at - 2 : at].isspace() or text[at - 1] == " " or text[at : at + 1].isspace())
    ]


def tokenize_row(
    row: dict[str, Any], tokenizer: Tokenizer, max_length: int | None = None, system_prompt: str | None = None
) -> dict[str, Any]:
    """A row of formats.as_prompt with its prompt_ids; raises BadRow for more than max_length tokens.

    system_prompt: turns a string prompt into a chat with this system turn (empty: without one).
    """
    row = dict(row)
    if system_prompt is not None and isinstance(row["prompt"], str):
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        row["prompt"] = [*system, {"role": "user", "content": row["prompt"]}]
    ids = tokenize_prompt(row["prompt"], tokenizer, row.get("tools"))
    if max_length is not None and len(ids) > max_length:
        raise BadRow(f"a prompt of more than {max_length} tokens")
    return row | {"prompt_ids": ids}


def tokenize_spans(
    text: str, spans: Iterable[tuple[int, int]], tokenizer: Tokenizer, starts: Iterable[int] = ()
) -> Sequence:
    """Text of `render` as ids with a mask that is 1 exactly on the given character spans [start, end).

    The spans do not overlap. The text is tokenised as a whole, except for cuts at the seams before answers;
    if a token would cross the boundary of a span, it is tokenised piece by piece instead.
    """
    spans = sorted(spans)
    ids, offsets = encode_text(text, tokenizer, cuts=seams(text, starts))
    if (mask := _mask(offsets, spans)) is None:
        ids, offsets = encode_text(text, tokenizer, cuts=[border for span in spans for border in span])
        mask = _mask(offsets, spans)
    if mask is None:
        raise BadRow("a token crosses the border of an answer")
    return {"input_ids": np.array(ids, np.int64), "loss_mask": mask}


def _mask(offsets: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray | None:
    """1 on the tokens inside the sorted spans, 0 on others; None if a token is in both."""
    if not spans:
        return np.zeros(len(offsets), np.int64)
    starts, ends = offsets[:, 0], offsets[:, 1]
    opens, closes = np.array([*spans, (sys.maxsize, sys.maxsize)]).T
    # for each token, the first span that ends after its start
    next_span = np.searchsorted(closes, starts, side="right")
    opens, closes = opens[next_span], closes[next_span]
    inside = (starts >= opens) & (ends <= closes)
    if ((ends > opens) & ~inside).any():
        return None
    return inside.astype(np.int64)


class _Traits(NamedTuple):
    """Properties of a tokenizer that matter for encoding a text."""

    special: frozenset[int]
    line_break: list[int] | None  # ids of a line break, if it adds a space before a text (▁ or Ġ), else None


@per_tokenizer
def _traits(tokenizer: Tokenizer) -> _Traits:
    sample = "Hello there,\n  it's 1+1=2."
    ids = tokenizer(sample, add_special_tokens=False).input_ids
    # called directly from here on
    if engine_of(tokenizer).encode(sample, add_special_tokens=False).ids != ids:
        raise UserError(f"{type(tokenizer).__name__}: {NOT_FAST}")
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("x", add_special_tokens=False).input_ids)
    line_break = (
        tokenizer("\n", add_special_tokens=False).input_ids if tokens and tokens[0][0] in "▁Ġ" else None
    )
    return _Traits(frozenset(tokenizer.convert_tokens_to_ids(special_tokens(tokenizer))), line_break)


def engine_of(tokenizer: Tokenizer, literal: bool = False) -> "tokenizers.Tokenizer":
    """The backend tokenizer without truncation or padding; literal: spelled special tokens stay characters.

    Raises UserError for a tokenizer that has none.
    """
    engine = getattr(tokenizer, "backend_tokenizer", None)
    if engine is None:
        raise UserError(f"{type(tokenizer).__name__}: {NOT_FAST}")
    engine.encode_special_tokens = literal
    engine.no_truncation()
    engine.no_padding()
    return engine


def _ids(texts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Texts as ids, without beginning- or end-of-text tokens."""
    _traits(tokenizer)  # raises for a tokenizer that is not to be called in this way
    encodings = engine_of(tokenizer, tokenizer.split_special_tokens).encode_batch_fast(
        texts, add_special_tokens=False
    )
    return [encoding.ids for encoding in encodings]


def encode_text(text: str, tokenizer: Tokenizer, cuts: Iterable[int] = ()) -> tuple[list[int], np.ndarray]:
    """Text of `render` as ids and their characters [start, end); no token crosses a cut. Placeholders become
    text."""
    traits = _traits(tokenizer)
    hidden = list(PLACEHOLDER.finditer(text))
    if text.count("\ufdd0") != len(hidden):
        raise BadRow("the chat template cuts a special token that the text contains")
    borders = sorted({0, len(text), *cuts, *(border for match in hidden for border in match.span())})
    marks = {match.span(): hidden_texts(tokenizer)[int(match[1])] for match in hidden}
    ids, offsets = [], []
    for start, end in pairwise(borders):
        if (start, end) in marks:
            new = _piece(marks[start, end], tokenizer, traits, first=start == 0, literal=True)[0]
            where = np.array([(start, end)] * len(new)).reshape(-1, 2)
        else:
            new, where = _piece(text[start:end], tokenizer, traits, first=start == 0)
            where = where + start
        ids += new
        offsets.append(where)
    return ids, np.concatenate(offsets) if offsets else np.zeros((0, 2), np.int64)


def _piece(
    text: str, tokenizer: Tokenizer, traits: _Traits, first: bool, literal: bool = False
) -> tuple[list[int], np.ndarray]:
    """A piece of a longer text as ids and their characters; literal: spelled special tokens stay
    characters."""
    # Some tokenizers add a space before a text. Within a longer one there is none: encode the piece after a
    # line break.
    lead = None if first else traits.line_break
    encoding = engine_of(tokenizer, literal).encode(
        text if lead is None else "\n" + text, add_special_tokens=False
    )
    ids, characters = encoding.ids, encoding.offsets
    if lead is not None:
        if ids[: len(lead)] != lead:
            raise BadRow("the tokenizer cannot split the text at the border of an answer")
        ids, characters = ids[len(lead) :], [(start - 1, end - 1) for start, end in characters[len(lead) :]]
    for i, token in enumerate(ids):
        if token in traits.special:
            if literal:
                raise BadRow(f"the text contains the special token {text}")
            # A token may include white space around it; that is not counted as its characters.
            start, end = characters[i]
            around = text[start:end]
            characters[i] = (
                start + len(around) - len(around.lstrip()),
                end - len(around) + len(around.rstrip()),
            )
    # A list of pairs as an array: flattening is three times as fast as np.array(characters).
    return ids, np.fromiter(chain.from_iterable(characters), np.int64, 2 * len(ids)).reshape(-1, 2)


def show_trained(sequence: Sequence, tokenizer: Tokenizer) -> str:
    """A sequence as text with the trained parts in [[brackets]]."""
    return "".join(f"[[{text}]]" if trained else text for text, trained in trained_parts(sequence, tokenizer))


def trained_parts(sequence: Sequence, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """A sequence as stretches of text, each with whether it is trained."""
    ids, mask = sequence["input_ids"], sequence["loss_mask"]
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1), len(ids)]
    return [
        (
            tokenizer.decode(ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False),
            bool(mask[start]),
        )
        for start, end in zip(borders[:-1], borders[1:], strict=True)
    ]


def truncate(sequence: Sequence, max_length: int) -> Sequence:
    """The first max_length tokens, in all per-token fields. Raises BadRow if none of them is trained."""
    short = {name: value[:max_length] if np.ndim(value) else value for name, value in sequence.items()}
    if not short["loss_mask"][1:].any():
        raise BadRow(f"no trained token within max_length {max_length}")
    if len(sequence["input_ids"]) > max_length:
        notes.add(f"cut at max_length {max_length}")
    return short


@per_tokenizer
def _adds_bos(tokenizer: Tokenizer) -> bool:
    return tokenizer.bos_token_id is not None and tokenizer("x").input_ids[0] == tokenizer.bos_token_id


def _with_bos(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    bos = tokenizer.bos_token_id
    return [bos, *ids] if _adds_bos(tokenizer) and ids[:1] != [bos] else ids
