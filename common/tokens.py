"""Text, chats and pairs as tokens: sequences of ids with a mask of what is trained, and prompts to sample from.

In documents, prompt and completion strings a spelled special token is that token: raw text is format. In chats it is not
(see chat.py, which says what of a chat is trained). No token crosses the border of what is trained.
"""

import sys
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from common.chat import PLACEHOLDER, assistant_spans, per_tokenizer, render, special_tokens
from common.data import BadRow, Message, as_prompt
from common.errors import UserError
from common.model import read_chat_template

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


def tokenize_row(
    columns: dict[str, Any], tokenizer: Any, max_length: int | None = None, system_prompt: str | None = None
) -> dict[str, Any]:
    """A dataset row as {"prompt", "prompt_ids"} with its other columns; BadRow for more than max_length tokens.

    system_prompt: makes a chat of a prompt that is a string, with this system turn (empty: none).
    """
    row = as_prompt(columns)
    if system_prompt is not None and isinstance(row["prompt"], str):
        system = [{"role": "system", "content": system_prompt}] if system_prompt else []
        row["prompt"] = [*system, {"role": "user", "content": row["prompt"]}]
    ids = tokenize_prompt(row["prompt"], tokenizer, row.get("tools"))
    if max_length is not None and len(ids) > max_length:
        raise BadRow(f"a prompt of more than {max_length} tokens")
    return row | {"prompt_ids": ids}


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
    hidden = list(PLACEHOLDER.finditer(text))
    if text.count("\ufdd0") != len(hidden):
        raise BadRow("the chat template cuts a special token that the text contains")
    borders = sorted({0, len(text), *cuts, *(border for match in hidden for border in match.span())})
    marks = {match.span(): special_tokens(tokenizer)[int(match[1])] for match in hidden}
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


@per_tokenizer
def _special_ids(tokenizer: Any) -> frozenset[int]:
    return frozenset(tokenizer.convert_tokens_to_ids(special_tokens(tokenizer)))


@per_tokenizer
def _adds_space(tokenizer: Any) -> bool:
    """Whether it writes a space before a text (SentencePiece's ▁, byte-level's Ġ)."""
    ids = tokenizer("x", add_special_tokens=False).input_ids
    return tokenizer.convert_ids_to_tokens(ids)[0][0] in "▁Ġ"


@per_tokenizer
def _adds_bos(tokenizer: Any) -> bool:
    return tokenizer.bos_token_id is not None and tokenizer("x").input_ids[0] == tokenizer.bos_token_id


def _with_bos(ids: list[int], tokenizer: Any) -> list[int]:
    bos = tokenizer.bos_token_id
    return [bos, *ids] if _adds_bos(tokenizer) and ids[:1] != [bos] else ids
