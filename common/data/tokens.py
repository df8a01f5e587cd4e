"""Text, chats and pairs as tokens: sequences of ids with a mask of trained tokens, and prompts to sample from.

The tokens before an answer are exactly those of the prompt from which it would be sampled; no token spans the
boundary. In documents, prompt and completion strings, a special token that is spelled out becomes that token:
raw text may carry its own formatting. In chats it does not (see chat_template.py).
"""

import functools
from itertools import pairwise
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from common.data.chat import Answer, answers, prompt_text, switches_to_try, whole_text
from common.data.chat_template import (
    PLACEHOLDER,
    Switches,
    Tools,
    hidden_texts,
    per_tokenizer,
    special_tokens,
)
from common.data.types import BadRow, Message, Sequence, Tokenizer, all_trained, may_reject, notes
from common.errors import UserError
import numpy as np

if TYPE_CHECKING:
    import tokenizers

NOT_FAST = "a fast tokenizer is needed, whose tokenizer.json alone gives the same token ids"


@may_reject
def tokenize_chat(
    chat: dict[str, Any],
    tokenizer: Tokenizer,
    *,
    train_on: str = "all_turns",
    max_length: int | None = None,
    all_or_none: bool = False,
) -> list[Sequence]:
    """The result of formats.as_chat (messages, prompt and completion, or text) as sequences of input_ids (n,)
    and loss_mask (n,) int64.

    train_on, all_or_none: see tokenize_messages; of prompt and completion the completion is trained (everything: both), of
    a text all of it. max_length: longer sequences are truncated at the end, and left out if nothing of them
    is trained then. Raises BadRow if nothing is left to train on.
    """
    if "text" in chat:
        sequences = [all_trained(tokenize_documents([chat["text"]], tokenizer)[0])]
    elif "completion" in chat:
        sequences = [tokenize_completion(chat["prompt"], chat["completion"], tokenizer)]
        if train_on == "everything":
            sequences = [all_trained(sequences[0]["input_ids"])]
    else:
        sequences = tokenize_messages(
            chat["messages"],
            tokenizer,
            tools=chat.get("tools"),
            train_on=train_on,
            first_trained_turn=chat.get("prompt_turns", 0),
            switches=switches_to_try(tokenizer, chat.get("chat_template_kwargs")),
            all_or_none=all_or_none,
        )
    for sequence in sequences:
        sequence["loss_mask"][0] = 0  # nothing predicts the first token
    if max_length is None:
        return sequences
    trained = [sequence for sequence in sequences if sequence["loss_mask"][:max_length].any()]
    # If nothing is trained within max_length, truncate says so.
    if trained and len(trained) < len(sequences):
        notes.add(f"cut at max_length {max_length}")
    return [truncate(sequence, max_length) for sequence in trained or sequences]


@may_reject
def tokenize_messages(
    messages: list[Message],
    tokenizer: Tokenizer,
    *,
    tools: Tools = None,
    train_on: str = "all_turns",
    first_trained_turn: int = 0,
    switches: list[Switches] | None = None,
    all_or_none: bool = False,
) -> list[Sequence]:
    """A conversation as sequences of input_ids (n,) int64 and loss_mask (n,) int64: one, unless the chat
    template rewrites the text before an answer; then a further one, for that answer and those after it.

    train_on: all_turns or last_turn of the assistant, from first_trained_turn on, or everything. An assistant
    turn with "train": False is never trained. switches: see chat.answers. Raises BadRow for a conversation without a
    turn to train, or that its template rejects; all_or_none: also unless all answers stand in one sequence.
    """
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i >= first_trained_turn]
    if not turns:
        raise BadRow("no assistant turn")
    if train_on == "last_turn":
        turns = turns[-1:]
    trained = [i for i in turns if messages[i].get("train") is not False]
    if not trained:
        raise BadRow("no assistant turn that is trained")
    if train_on == "everything":
        return [_whole_chat(messages, tokenizer, tools, (switches or [{}])[0])]
    written: list[_Written] = []
    for answer in answers(messages, trained, tokenizer, tools, switches, all_or_none):
        before = written[-1] if written else None
        this = _write(answer, before, tokenizer)
        # If the context begins with the sequence before, both answers stand in one sequence.
        if before and this.context_ids[: len(before.ids)] == before.ids:
            this.mask[: len(before.ids)] = before.mask
            written.pop()
        written.append(this)
    if all_or_none and len(written) > 1:
        raise BadRow("an answer of several turns, of which the chat template rewrites the earlier ones")
    # what the template writes after the last answer
    rest = encode_text(answer.rest, tokenizer, after=answer.written)
    written[-1].ids.extend(rest)
    written[-1].mask.extend([0] * len(rest))
    sequences = []
    for one in written:
        ids = np.array(one.ids, np.int64)
        sequences.append({"input_ids": ids, "loss_mask": np.array(one.mask, np.int64)})
    return sequences


class _Written(NamedTuple):
    """An answer after its context, as tokens."""

    text: str
    context_ids: list[int]
    ids: list[int]  # of context and answer
    mask: list[int]
    is_whole: bool  # the ids are those of the text; otherwise a token would span the start of the answer


def _write(answer: Answer, before: _Written | None, tokenizer: Tokenizer) -> _Written:
    """before: the sequence that was written last. If the context begins with it, only the new text is
    encoded."""
    context = answer.context
    text_before = ""
    ids_before = []
    if before and before.is_whole and context.startswith(before.text):
        context = context[len(before.text) :]
        text_before = before.text
        ids_before = before.ids
    prompt = encode_text(context, tokenizer, after=text_before)
    ids = encode_text(context + answer.written, tokenizer, after=text_before)
    is_whole = ids[: len(prompt)] == prompt and len(ids) > len(prompt)
    if not is_whole:
        ids = prompt + _pieces(answer.written, tokenizer)
    mask = [0] * len(ids_before + prompt) + [1] * (len(ids) - len(prompt))
    text = answer.context + answer.written
    return _Written(text, ids_before + prompt, ids_before + ids, mask, is_whole)


def _whole_chat(messages: list[Message], tokenizer: Tokenizer, tools: Tools, switches: Switches) -> Sequence:
    """A chat in which everything is trained, except for assistant turns with "train": False."""
    ids = encode_text(whole_text(messages, tokenizer, tools, switches), tokenizer)
    mask = np.ones(len(ids), np.int64)
    if any(m["role"] != "assistant" and m.get("train") is False for m in messages):
        raise BadRow(
            "a turn of the user or the system that is not to be trained, which --train_on everything trains: use all_turns"
        )
    left_out = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("train") is False]
    for answer in answers(messages, left_out, tokenizer, tools, [switches], all_or_none=True):
        this = _write(answer, None, tokenizer)
        if ids[: len(this.ids)] != this.ids:  # rewritten, or with a token that spans its start
            raise BadRow(
                "an answer that is not trained has other tokens in the whole chat than on its own: use --train_on all_turns"
            )
        mask[len(this.context_ids) : len(this.ids)] = 0
    return {"input_ids": np.array(ids, np.int64), "loss_mask": mask}


@may_reject
def tokenize_completion(prompt: str, completion: str, tokenizer: Tokenizer) -> Sequence:
    """Plain text: the prompt untrained, the completion and one end-of-text token trained.

    The prompt has the same ids as on its own, as in sampling: no token spans the boundary.
    """
    if tokenizer.chat_template:
        notes.add(
            "plain text goes without the chat template (as chats: columns called instruction and output, by --columns)"
        )
    before = tokenize_text(prompt, tokenizer)
    ids = tokenize_text(prompt + completion, tokenizer)
    if ids[: len(before)] != before:  # a merge across the boundary: tokenise the completion separately
        ids = before + _piece(completion, tokenizer, first=not prompt)
    if len(ids) == len(before) or ids[-1] != tokenizer.eos_token_id:
        ids = [*ids, tokenizer.eos_token_id]
    mask = np.ones(len(ids), np.int64)
    mask[: len(before)] = 0
    return {"input_ids": np.array(ids, np.int64), "loss_mask": mask}


def tokenize_documents(texts: list[str], tokenizer: Tokenizer) -> list[np.ndarray]:
    """Each document as int64 ids with one end-of-text token, and one beginning-of-text token if the tokenizer
    adds it."""
    documents = []
    for ids in _ids(texts, tokenizer):
        ids = _with_bos(ids, tokenizer)
        if not ids or ids[-1] != tokenizer.eos_token_id:
            ids = [*ids, tokenizer.eos_token_id]
        documents.append(np.array(ids, np.int64))
    return documents


def tokenize_pair(pair: dict[str, Any], tokenizer: Tokenizer, max_length: int) -> list[Sequence]:
    """The result of formats.as_preference as two sequences, prompt + chosen and prompt + rejected, with the
    answers trained. Both sides have the same prompt ids.

    max_length limits each side. Raises BadRow if no token of one of the answers is left, or no difference.
    """
    if isinstance(pair["prompt"], str):
        chosen = tokenize_completion(pair["prompt"], pair["chosen"], tokenizer)
        rejected = tokenize_completion(pair["prompt"], pair["rejected"], tokenizer)
    else:
        chosen, rejected = _sides(pair, tokenizer)
    if not np.array_equal(_prompt_of(chosen), _prompt_of(rejected)):
        raise BadRow("the prompt has other tokens before the chosen than before the rejected answer")
    shorter, longer = sorted((chosen, rejected), key=_end_of)
    # If the longer answer is cut before its end token, the other one's is not trained: one alone would make
    # ending good or bad.
    if _end_of(shorter) < max_length <= _end_of(longer):
        shorter["loss_mask"][_end_of(shorter)] = 0
    chosen = truncate(chosen, max_length)
    rejected = truncate(rejected, max_length)
    if np.array_equal(chosen["input_ids"], rejected["input_ids"]):
        raise BadRow("chosen and rejected are the same tokens, within max_length")
    return [chosen, rejected]


def _prompt_of(side: Sequence) -> np.ndarray:
    return side["input_ids"][: side["loss_mask"].argmax()]


def _end_of(side: Sequence) -> int:
    """The place of the last trained token."""
    return int(np.flatnonzero(side["loss_mask"])[-1])


def _sides(pair: dict[str, Any], tokenizer: Tokenizer) -> list[Sequence]:
    """Both sides of a pair of chats, under the first switches of the template that can write both."""
    reasons = []
    for switches in switches_to_try(tokenizer, pair.get("chat_template_kwargs")):
        sides = []
        try:
            for side in ("chosen", "rejected"):
                sides += tokenize_messages(
                    pair["prompt"] + pair[side],
                    tokenizer,
                    tools=pair.get("tools"),
                    first_trained_turn=len(pair["prompt"]),
                    switches=[switches],
                    all_or_none=True,
                )
        except BadRow as reason:
            reasons.append(reason)
            continue
        return sides
    raise reasons[0]


def tokenize_text(text: str, tokenizer: Tokenizer) -> list[int]:
    """Plain text as ids, with one beginning-of-text token if the tokenizer adds it, and no end-of-text
    token."""
    return _with_bos(_ids([text], tokenizer)[0], tokenizer)


@may_reject
def tokenize_prompt(
    prompt: str | list[Message],
    tokenizer: Tokenizer,
    tools: Tools = None,
    chat_template_kwargs: Switches | None = None,
) -> list[int]:
    """A prompt as ids to sample from: plain text unchanged, messages followed by the answer's header."""
    if isinstance(prompt, str):
        if tokenizer.chat_template:
            notes.add(
                "plain text goes without the chat template (in GRPO --system_prompt, empty or not, makes chats of prompts)"
            )
        return tokenize_text(prompt, tokenizer)
    return encode_text(prompt_text(prompt, tokenizer, tools, chat_template_kwargs), tokenizer)


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
    elif system_prompt is not None:
        notes.add("--system_prompt is for prompts that are strings: this one is a chat, and stays as it is")
    ids = tokenize_prompt(row["prompt"], tokenizer, row.get("tools"), row.get("chat_template_kwargs"))
    if max_length is not None and len(ids) > max_length:
        raise BadRow(f"a prompt of more than {max_length} tokens")
    return row | {"prompt_ids": ids}


# --- rendered text as ids -----------------------------------------------------------------------------------


class _Traits(NamedTuple):
    """Properties of a tokenizer that matter for encoding a text."""

    special: frozenset[int]
    marks: re.Pattern[str]  # matches a special token
    line_break: list[int] | None  # ids of a line break, if it adds a space before a text (▁ or Ġ), else None


@per_tokenizer
def _traits(tokenizer: Tokenizer) -> _Traits:
    sample = "Hello there,\n  it's 1+1=2."
    ids = tokenizer(sample, add_special_tokens=False).input_ids
    # Its engine is called directly from here on.
    if engine_of(tokenizer).encode(sample, add_special_tokens=False).ids != ids:
        raise UserError(f"{type(tokenizer).__name__}: {NOT_FAST}")
    marks = special_tokens(tokenizer)
    special = frozenset(tokenizer.convert_tokens_to_ids(marks))
    pattern = re.compile("(" + "|".join(map(re.escape, marks)) + ")")
    line_break = None
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("x", add_special_tokens=False).input_ids)
    if tokens and tokens[0][0] in "▁Ġ":
        line_break = tokenizer("\n", add_special_tokens=False).input_ids
    return _Traits(special, pattern, line_break)


def engine_of(tokenizer: Tokenizer, literal: bool = False) -> "tokenizers.Tokenizer":
    """The backend tokenizer without truncation or padding; literal: spelled special tokens stay characters. It is
    one object for all of its callers, which this changes: called anew before each use.

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
    _traits(tokenizer)  # raises for a tokenizer that cannot be called in this way
    engine = engine_of(tokenizer, tokenizer.split_special_tokens)
    return [encoding.ids for encoding in engine.encode_batch_fast(texts, add_special_tokens=False)]


def encode_text(text: str, tokenizer: Tokenizer, after: str = "") -> list[int]:
    """Rendered text of a chat as ids. Placeholders become text. after: a text that ends with a special token, which
    this one continues."""
    # No token spans a special one. The text between two of them is often the same: it is encoded once, if that is
    # not long ago (texts of 100 kB each would fill the memory).
    parts = _traits(tokenizer).marks.split(text)  # text, mark, text, mark, ..., text
    parts.append("")  # no mark after the last text
    ids = []
    mark = next((mark for mark in special_tokens(tokenizer) if after.endswith(mark)), "")
    for i in range(0, len(parts), 2):
        ids += _between(tokenizer, mark, parts[i], parts[i + 1])
        mark = parts[i + 1]
    return ids


@functools.lru_cache(maxsize=256)
def _between(tokenizer: Tokenizer, mark: str, text: str, following: str) -> list[int]:
    """The ids of a text after one special token and up to and with another one, as within a longer text."""
    if "\ufdd0" in text:
        return _pieces(text, tokenizer, mark, following)
    ids = engine_of(tokenizer).encode(mark + text + following, add_special_tokens=False).ids
    return ids[1:] if mark else ids


def _pieces(text: str, tokenizer: Tokenizer, mark: str | None = None, following: str = "") -> list[int]:
    """A text as ids, with cuts at its placeholders. mark: the special token before it, "" at the start of a
    text, None after other text. following: the special token after it, whose id is the last one."""
    ids = []
    parts = PLACEHOLDER.split(text)  # text, number, text, number, ..., text
    if "\ufdd0" in "".join(parts[::2]):
        raise BadRow("the chat template cuts a special token that the text contains")
    for i, part in enumerate(parts):
        is_placeholder = i % 2 == 1
        if is_placeholder:
            part = hidden_texts(tokenizer)[int(part)]
        if part:
            ids += _piece(part, tokenizer, first=mark == "" and not ids, literal=is_placeholder)
    if following:
        ids.append(tokenizer.convert_tokens_to_ids(following))
    return ids


def _piece(text: str, tokenizer: Tokenizer, first: bool, literal: bool = False) -> list[int]:
    """A piece of a longer text as ids; literal: spelled special tokens stay characters."""
    traits = _traits(tokenizer)
    engine = engine_of(tokenizer, literal)
    if first or traits.line_break is None:
        ids = engine.encode(text, add_special_tokens=False).ids
    else:
        # The tokenizer adds a space before a text, but there is none within a longer one: encode the piece
        # after a line break.
        ids = engine.encode("\n" + text, add_special_tokens=False).ids
        n = len(traits.line_break)
        if ids[:n] != traits.line_break:
            raise BadRow("the tokenizer cannot split the text at the border of an answer")
        ids = ids[n:]
    if literal and not traits.special.isdisjoint(ids):
        raise BadRow(f"the text contains the special token {text}")
    return ids


# --- display, truncation ------------------------------------------------------------------------------------


def show_trained(sequence: Sequence, tokenizer: Tokenizer) -> str:
    """A sequence as text with the trained parts in [[brackets]]."""
    return "".join(f"[[{text}]]" if trained else text for text, trained in trained_parts(sequence, tokenizer))


def trained_parts(sequence: Sequence, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    """A sequence as stretches of text, each with whether it is trained."""
    ids = sequence["input_ids"]
    mask = sequence["loss_mask"]
    borders = [0, *(np.flatnonzero(np.diff(mask)) + 1), len(ids)]
    parts = []
    for start, end in pairwise(borders):
        part = ids[start:end]
        text = tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        parts.append((text, bool(mask[start])))
    return parts


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
