"""Text and chats as tokens: documents, templates, the spans that are trained, prompts, and the tokens that end a turn.

In a chat, which tokens are trained is decided on the rendered text, as spans of characters, and brought to tokens so that no token
crosses the border of a span. Trained is what the model will have to write: the assistant's words and the end of its turn;
not the header that introduces it.
"""

import sys
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
    text, spans = assistant_spans(messages, tokenizer, tools)
    if train_on == "everything":
        wanted = [(0, len(text))]
    else:
        wanted = [spans[i] for i in (turns[-1:] if train_on == "last_turn" else turns)]
    return tokenize_spans(text, wanted, tokenizer)


def tokenize_completion(prompt: str, completion: str, tokenizer: Any) -> Sequence:
    """Plain text: the prompt untrained, the completion and one end-of-text token trained.

    The seam: the ids of the prompt are those that it has alone, as in sampling; no token crosses.
    """
    before = tokenize_text(prompt, tokenizer)
    together = tokenize_text(prompt + completion, tokenizer)
    if together[: len(before)] == before:
        ids = together
    else:  # a merge across the seam: tokenise the completion by itself
        ids = before + tokenizer(completion, add_special_tokens=False).input_ids
    ids = ids + [tokenizer.eos_token_id]
    mask = np.ones(len(ids), np.uint8)
    mask[: len(before)] = 0
    return {"input_ids": np.array(ids), "loss_mask": mask}


def tokenize_documents(texts: list[str], tokenizer: Any) -> list[np.ndarray]:
    """Each document as ids that end on one end-of-text token."""
    documents = []
    for start in range(0, len(texts), 1000):
        for ids in tokenizer(texts[start : start + 1000], return_attention_mask=False).input_ids:
            ids = ids if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]
            documents.append(np.array(ids, np.int32))
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
    """Plain text as ids, with the beginning-of-text token if the tokenizer writes one, without an end."""
    ids = tokenizer(text, return_attention_mask=False).input_ids
    while ids and ids[-1] == tokenizer.eos_token_id:
        ids = ids[:-1]
    if len(ids) > 1 and tokenizer.bos_token_id is not None and ids[0] == ids[1] == tokenizer.bos_token_id:
        ids = ids[1:]
    return ids


def tokenize_prompt(prompt: str | list[Message], tokenizer: Any, tools: list[Any] | None = None) -> list[int]:
    """A prompt as the ids to sample from: plain text as it is, messages with the header of the answer."""
    if isinstance(prompt, str):
        return tokenize_text(prompt, tokenizer)
    return tokenizer(render(prompt, tokenizer, tools, add_generation_prompt=True), add_special_tokens=False).input_ids


def render(
    messages: list[Message], tokenizer: Any, tools: list[Any] | None = None, add_generation_prompt: bool = False
) -> str:
    """The chat template's text. Raises UserError without a template, BadRow where the template refuses the chat."""
    if not tokenizer.chat_template:
        raise UserError("the tokenizer has no chat template: pass --chat_template chatml, plain, or a .jinja file")
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except Exception as error:  # templates raise what they like (raise_exception, a missing key, a filter on None)
        raise BadRow(f"the chat template refuses it: {' '.join(str(error).split())}") from None


def assistant_spans(
    messages: list[Message], tokenizer: Any, tools: list[Any] | None = None
) -> tuple[str, dict[int, tuple[int, int]]]:
    """The rendered text, and for each assistant turn (by its index) the characters [start, end) that the model writes.

    Taken from the template's {% generation %} markers; without them, derived: a turn starts where the text rendered up
    to it, with the header of the answer, ends, and ends after the first special token that follows its content. Raises
    BadRow where this cannot be verified: the template rewrites earlier turns, or ends turns with no special token.
    """
    text = render(messages, tokenizer, tools)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if "{% generation" in tokenizer.chat_template or "{%- generation" in tokenizer.chat_template:
        _, found = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
        spans = [tuple(span) for span in found[0]]
        if len(spans) != len(turns):
            raise BadRow(f"the template marks {len(spans)} generations in {len(turns)} assistant turns")
        # A template may leave the end of the turn outside its markers; a model that never learns it never stops.
        return text, {
            i: (start, _after_special(text, end, tokenizer) or end) for i, (start, end) in zip(turns, spans, strict=True)
        }

    spans = {}
    for i in turns:
        before = render(messages[:i], tokenizer, tools, add_generation_prompt=True)
        if not text.startswith(before):
            raise BadRow("the chat template rewrites earlier turns (use --chat_template chatml, or single-turn chats)")
        start = len(before)
        content = messages[i]["content"].strip()
        at = text.find(content, start)
        after = -1 if at < 0 else at + len(content)
        if messages[i].get("tool_calls"):  # written by the template after the content: up to the next special token
            marks = [place for mark in _special_tokens(tokenizer) if (place := text.find(mark, max(after, start))) >= 0]
            after = min(marks) if marks else -1
        end = None if after < 0 else _after_special(text, after, tokenizer)
        if end is None:
            raise BadRow("the chat template changes the answer, or ends its turn with no special token")
        spans[i] = (start, end)
    return text, spans


def tokenize_spans(text: str, spans: list[tuple[int, int]], tokenizer: Any) -> Sequence:
    """Rendered text as ids with a mask that is 1 exactly on the given spans [start, end) of characters.

    The text is tokenised as a whole; where a token would cross the border of a span, piece by piece instead.
    """
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False)
    offsets = np.array(encoding["offset_mapping"]).reshape(-1, 2)
    mask = np.zeros(len(offsets), np.uint8)
    crosses = False
    for start, end in spans:
        inside = (offsets[:, 0] >= start) & (offsets[:, 1] <= end) & (offsets[:, 0] < end)
        touching = (offsets[:, 0] < end) & (offsets[:, 1] > start)
        crosses |= bool((touching & ~inside).any())
        mask[inside] = 1
    if not crosses:
        return {"input_ids": np.array(encoding["input_ids"], np.int64), "loss_mask": mask}
    ids: list[int] = []
    flags: list[int] = []
    at = 0
    for start, end in [*spans, (len(text), len(text))]:
        for piece, trained in ((text[at:start], 0), (text[start:end], 1)):
            new = tokenizer(piece, add_special_tokens=False).input_ids if piece else []
            ids += new
            flags += [trained] * len(new)
        at = end
    return {"input_ids": np.array(ids, np.int64), "loss_mask": np.array(flags, np.uint8)}


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


def _special_tokens(tokenizer: Any) -> list[str]:
    """Longest first, so that one that begins like another is not taken for it."""
    marks = {str(t.content) for t in tokenizer.added_tokens_decoder.values() if t.special} | set(
        tokenizer.all_special_tokens
    )
    return sorted(marks, key=len, reverse=True)


def _after_special(text: str, at: int, tokenizer: Any) -> int | None:
    """The end of the special token that follows position `at`, white space between allowed; None if there is none."""
    start = len(text) - len(text[at:].lstrip())
    return next((start + len(mark) for mark in _special_tokens(tokenizer) if text.startswith(mark, start)), None)
