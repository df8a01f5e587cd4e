"""Text, chats and pairs as tokens: sequences of ids with a mask of what is trained, and prompts to sample from.

In documents, prompt and completion strings a spelled special token is that token: raw text is format. In chats it is not
(see chat.py, which says what of a chat is trained). No token crosses the border of what is trained.
"""

import sys
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

from common.data.chat import PLACEHOLDER, assistant_spans, per_tokenizer, read_chat_template, render, special_tokens
from common.data.sources import BadRow, Message
from common.errors import UserError

import numpy as np
import tokenizers
from transformers import PreTrainedTokenizerFast

TRAIN_ON = ("all_turns", "last_turn", "everything")
Sequence = dict[str, np.ndarray]


def tokenize_chat(
    messages: list[Message],
    tokenizer: Any,
    *,
    tools: list[Any] | None = None,
    train_on: str = "all_turns",
    first_trained_turn: int = 0,
) -> Sequence:
    """A conversation as input_ids (n,) int64 and loss_mask (n,) uint8.

    train_on: all_turns or last_turn of the assistant from first_trained_turn on, or everything. A turn of the assistant
    that says "train": False is not trained in any of them. Raises BadRow for a conversation without a turn to train, or
    that its template refuses.
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
        return tokenize_spans(text, spans.values(), tokenizer)
    left_out = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("train") is False]
    text, spans = assistant_spans(messages, tokenizer, tools, left_out)
    borders = [0, *chain.from_iterable(spans.values()), len(text)]  # what is trained stands between the spans
    return tokenize_spans(text, list(zip(borders[::2], borders[1::2], strict=True)), tokenizer)


def split_chat(
    messages: list[Message], tokenizer: Any, max_length: int, *, tools: list[Any] | None = None
) -> list[list[Message]]:
    """A conversation of more than max_length tokens as consecutive pieces of at most max_length, cut between exchanges.

    An exchange is what stands from the turn after an answer to the next answer that a user's turn follows; one that is too
    long is a piece by itself. Each piece begins with the system turns of the conversation, and ends on an answer: turns
    after the last answer are left out. A conversation that fits, or without an answer, comes back as it is.
    """
    text = render(messages, tokenizer, tools)
    ids, offsets = _encode(text, tokenizer)
    # A token that is split at the border of an answer becomes a few more: counted exactly where that could matter.
    far_below = len(ids) + 8 * len(messages) <= max_length
    if far_below or (len(ids) <= max_length and _count(messages, tokenizer, tools) <= max_length):
        return [messages]
    system, exchanges = _exchanges(messages)
    if not exchanges:
        return [messages]
    before = np.searchsorted(offsets[:, 0], _places(text, system, exchanges))  # tokens, about

    def piece(first: int, stop: int) -> list[Message]:
        return [*system, *chain.from_iterable(exchanges[first:stop])]

    def too_long(stop: int) -> bool:
        return _count(piece(start, stop), tokenizer, tools) > max_length

    pieces, start = [], 0
    while start < len(exchanges):
        # The whole conversation says about how many exchanges fit, at most: a few tokens of headers are counted or not.
        # So many are tried, and where they are too long, the most that fit are searched.
        room = max_length + 8 - before[0] + before[start]
        stop = max(start + 1, int(np.searchsorted(before, room, side="right")) - 1)
        if stop > start + 1 and too_long(stop):
            stop = start + 1 + bisect_left(range(start + 2, stop), True, key=too_long)
        pieces.append(piece(start, stop))
        start = stop
    return pieces


def tokenize_completion(prompt: str, completion: str, tokenizer: Any) -> Sequence:
    """Plain text: the prompt untrained, the completion and one end-of-text token trained.

    The seam: the ids of the prompt are those that it has alone, as in sampling; no token crosses.
    """
    before = tokenize_text(prompt, tokenizer)
    ids = tokenize_text(prompt + completion, tokenizer)
    if ids[: len(before)] != before:  # a merge across the seam: tokenise the completion by itself
        ids = before + _piece(completion, tokenizer, _traits(tokenizer), first=not prompt)[0]
    if len(ids) == len(before) or ids[-1] != tokenizer.eos_token_id:
        ids = [*ids, tokenizer.eos_token_id]
    mask = np.ones(len(ids), np.uint8)
    mask[: len(before)] = 0
    return {"input_ids": np.array(ids, np.int64), "loss_mask": mask}


def tokenize_documents(texts: list[str], tokenizer: Any) -> list[np.ndarray]:
    """Each document as int32 ids that end on one end of text, and begin on one beginning if the tokenizer writes it."""
    documents, eos, adds_bos = [], tokenizer.eos_token_id, _adds_bos(tokenizer)
    for start in range(0, len(texts), 1000):
        for ids in _ids(texts[start : start + 1000], tokenizer):
            ids = _with_bos(ids, tokenizer) if adds_bos else ids
            documents.append(np.array(ids if ids and ids[-1] == eos else [*ids, eos], np.int32))
    return documents


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer (Sennrich et al. 2016, arXiv 1508.07909) with single digits and the ChatML template.

    The texts are read once, and not kept.
    """
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

    def texts_and_roles() -> Iterator[str]:
        count = 0
        for text in texts:
            count += 1
            yield text
        # The words of the chat template stand before every turn: make sure that each becomes one token.
        yield from ["system\nuser\nassistant\n"] * (1 + count // 10)

    bpe.train_from_iterator(texts_and_roles(), trainer)
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
    return _with_bos(_ids([text], tokenizer)[0], tokenizer)


def tokenize_prompt(prompt: str | list[Message], tokenizer: Any, tools: list[Any] | None = None) -> list[int]:
    """A prompt as the ids to sample from: plain text as it is, messages with the header of the answer."""
    if isinstance(prompt, str):
        return tokenize_text(prompt, tokenizer)
    return _encode(render(prompt, tokenizer, tools, add_generation_prompt=True), tokenizer)[0]


def tokenize_row(
    row: dict[str, Any], tokenizer: Any, max_length: int | None = None, system_prompt: str | None = None
) -> dict[str, Any]:
    """A row of formats.as_prompt with its prompt_ids; BadRow for more than max_length tokens.

    system_prompt: makes a chat of a prompt that is a string, with this system turn (empty: none).
    """
    row = dict(row)
    if system_prompt is not None and isinstance(row["prompt"], str):
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        row["prompt"] = [*system, {"role": "user", "content": row["prompt"]}]
    ids = tokenize_prompt(row["prompt"], tokenizer, row.get("tools"))
    if max_length is not None and len(ids) > max_length:
        raise BadRow(f"a prompt of more than {max_length} tokens")
    return row | {"prompt_ids": ids}


def tokenize_spans(text: str, spans: Iterable[tuple[int, int]], tokenizer: Any) -> Sequence:
    """Text of `render` as ids with a mask that is 1 exactly on the given spans [start, end) of characters.

    The spans do not overlap. The text is tokenised as a whole; where a token would cross the border of a span, piece by
    piece instead.
    """
    spans = sorted(spans)
    ids, offsets = _encode(text, tokenizer)
    if (mask := _mask(offsets, spans)) is None:
        ids, offsets = _encode(text, tokenizer, cuts=[border for span in spans for border in span])
        mask = _mask(offsets, spans)
    if mask is None:
        raise BadRow("a token crosses the border of an answer")
    return {"input_ids": np.array(ids, np.int64), "loss_mask": mask}


def _exchanges(messages: list[Message]) -> tuple[list[Message], list[list[Message]]]:
    """The system turns at the start of a chat, and the rest as exchanges, each of which ends on an answer."""
    roles = [message["role"] for message in messages]
    begin = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
    end = len(roles) - roles[::-1].index("assistant") if "assistant" in roles else begin
    # Answers before the first question stay with it: a piece of those alone would answer nothing.
    asked = next((i for i in range(begin, end) if roles[i] != "assistant"), end)
    cuts = [i for i in range(asked + 1, end) if roles[i - 1] == "assistant" and roles[i] in ("user", "system")]
    return messages[:begin], [messages[a:b] for a, b in pairwise([begin, *cuts, end]) if a < b]


def _count(messages: list[Message], tokenizer: Any, tools: list[Any] | None) -> int:
    """The tokens of a chat with all its answers trained; of its text alone where that is refused."""
    try:
        text, spans = assistant_spans(messages, tokenizer, tools)
        return len(tokenize_spans(text, spans.values(), tokenizer)["input_ids"])
    except BadRow:
        return len(_encode(render(messages, tokenizer, tools), tokenizer)[0])


def _places(text: str, system: list[Message], exchanges: list[list[Message]]) -> list[int]:
    """About where in the text of a chat its first exchange begins, and where each of its exchanges ends."""
    spans, at = [], 0
    for message in chain(system, *exchanges):
        content = message["content"].strip()
        start = text.find(content, at)
        if start < 0:  # the template changed it: the next one is looked for from the same place
            start, content = at, ""
        at = start + len(content)
        spans.append((start, at))
    bounds = list(accumulate([len(system), *map(len, exchanges)]))  # the messages before each exchange
    return [spans[bounds[0]][0], *(spans[bound - 1][1] for bound in bounds[1:])]


def _mask(offsets: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray | None:
    """1 on the tokens inside the spans, which are sorted, 0 on others; None where a token is both."""
    if not spans:
        return np.zeros(len(offsets), np.uint8)
    starts, ends = offsets[:, 0], offsets[:, 1]
    opens, closes = np.array([*spans, (sys.maxsize, sys.maxsize)]).T
    next_span = np.searchsorted(closes, starts, side="right")  # of each token: the first span that ends after its start
    opens, closes = opens[next_span], closes[next_span]
    inside = (starts >= opens) & (ends <= closes)
    if ((ends > opens) & ~inside).any():
        return None
    return inside.astype(np.uint8)


class _Traits(NamedTuple):
    """What there is to know of a tokenizer before a text is encoded."""

    direct: bool  # its engine, called without what transformers puts around it, gives the same
    special: frozenset[int]
    line_break: list[int] | None  # the ids of a line break, where it writes a space before a text (▁ or Ġ), else None


@per_tokenizer
def _traits(tokenizer: Any) -> _Traits:
    sample = "Hello there,\n  it's 1+1=2."
    ids = tokenizer(sample, add_special_tokens=False).input_ids
    engine = getattr(tokenizer, "backend_tokenizer", None)
    direct = isinstance(engine, tokenizers.Tokenizer) and engine.encode(sample, add_special_tokens=False).ids == ids
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("x", add_special_tokens=False).input_ids)
    line_break = tokenizer("\n", add_special_tokens=False).input_ids if tokens and tokens[0][0] in "▁Ġ" else None
    return _Traits(direct, frozenset(tokenizer.convert_tokens_to_ids(special_tokens(tokenizer))), line_break)


def _engine(tokenizer: Any, literal: bool) -> tokenizers.Tokenizer:
    """The library's tokenizer, which does not cut or fill; literal: special tokens that a text spells stay characters."""
    engine = tokenizer.backend_tokenizer
    if engine.encode_special_tokens != literal:
        engine.encode_special_tokens = literal
    if engine.truncation is not None:
        engine.no_truncation()
    if engine.padding is not None:
        engine.no_padding()
    return engine


def _ids(texts: list[str], tokenizer: Any) -> list[list[int]]:
    """Texts as ids, without a beginning or an end."""
    if not _traits(tokenizer).direct:
        return tokenizer(texts, add_special_tokens=False, return_attention_mask=False).input_ids
    encodings = _engine(tokenizer, tokenizer.split_special_tokens).encode_batch_fast(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def _ids_and_characters(text: str, tokenizer: Any, literal: bool, direct: bool) -> tuple[list[int], list[tuple[int, int]]]:
    """A text as ids and the characters [start, end) of each. Raises UserError for a tokenizer that cannot say those."""
    if direct:
        encoding = _engine(tokenizer, literal).encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} does not say which characters a token stands for, which chats and seams need: "
            "it has to have a fast form (a tokenizer.json)"
        )
    encoding = tokenizer(
        text,
        add_special_tokens=False,
        split_special_tokens=literal,
        return_offsets_mapping=True,
        return_attention_mask=False,
    )
    return encoding["input_ids"], encoding["offset_mapping"]


def _encode(text: str, tokenizer: Any, cuts: Iterable[int] = ()) -> tuple[list[int], np.ndarray]:
    """Text of `render` as ids and their characters [start, end); no token crosses a cut. Placeholders become text."""
    traits = _traits(tokenizer)
    if not cuts and "\ufdd0" not in text:
        return _piece(text, tokenizer, traits, first=True)
    hidden = list(PLACEHOLDER.finditer(text))
    if text.count("\ufdd0") != len(hidden):
        raise BadRow("the chat template cuts a special token that the text contains")
    borders = sorted({0, len(text), *cuts, *(border for match in hidden for border in match.span())})
    marks = {match.span(): special_tokens(tokenizer)[int(match[1])] for match in hidden}
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


def _piece(text: str, tokenizer: Any, traits: _Traits, first: bool, literal: bool = False) -> tuple[list[int], np.ndarray]:
    """A piece of a longer text as ids and their characters; literal: special tokens that it spells stay characters."""
    # Some tokenizers write a space before a text. Inside a longer one there is none: read the piece after a line break.
    lead = None if first else traits.line_break
    if lead is not None:
        ids, characters = _ids_and_characters("\n" + text, tokenizer, literal, traits.direct)
        if ids[: len(lead)] != lead:
            raise BadRow("the tokenizer cannot split the text at the border of an answer")
        ids, characters = ids[len(lead) :], [(start - 1, end - 1) for start, end in characters[len(lead) :]]
    else:
        ids, characters = _ids_and_characters(text, tokenizer, literal, traits.direct)
    for i, token in enumerate(ids):
        if token in traits.special:
            if literal:
                raise BadRow(f"the text contains the special token {text}")
            # It may swallow white space around it, which belongs to no one: not part of its characters.
            start, end = characters[i]
            around = text[start:end]
            characters[i] = start + len(around) - len(around.lstrip()), end - len(around) + len(around.rstrip())
    # A list of pairs as an array: flat, which is three times as fast as np.array(characters).
    return ids, np.fromiter(chain.from_iterable(characters), np.int64, 2 * len(ids)).reshape(-1, 2)


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


@per_tokenizer
def _adds_bos(tokenizer: Any) -> bool:
    return tokenizer.bos_token_id is not None and tokenizer("x").input_ids[0] == tokenizer.bos_token_id


def _with_bos(ids: list[int], tokenizer: Any) -> list[int]:
    bos = tokenizer.bos_token_id
    return [bos, *ids] if _adds_bos(tokenizer) and ids[:1] != [bos] else ids
