"""Rows of any source to examples: sequences of tokens that are trained on, in the order of the run."""

from common.data.chat import end_of_turn, stop_token_ids
from common.data.dropped import convert
from common.data.examples import Examples
from common.data.formats import (
    as_chat,
    as_preference,
    as_prompt,
    as_text,
    chat_format,
    preference_format,
    prompt_format,
    text_format,
)
from common.data.load import Rows, load_data, load_prompts
from common.data.order import Shuffled, drop_turns
from common.data.packing import Packs, chunk, pack
from common.data.sources import Source, find_sources, load_rows, read_rows
from common.data.stream import Stream
from common.data.tokens import (
    show_trained,
    tokenize_chat,
    tokenize_completion,
    tokenize_documents,
    tokenize_messages,
    tokenize_pair,
    tokenize_prompt,
    tokenize_row,
    tokenize_text,
    truncate,
)
from common.data.train_tokenizer import train_tokenizer
from common.data.types import BadRow, Example, Message, Row, Sequence, Tokenizer, whole

__all__ = [
    "BadRow",
    "Example",
    "Examples",
    "Message",
    "Packs",
    "Row",
    "Rows",
    "Sequence",
    "Shuffled",
    "Source",
    "Stream",
    "Tokenizer",
    "as_chat",
    "as_preference",
    "as_prompt",
    "as_text",
    "chat_format",
    "chunk",
    "convert",
    "drop_turns",
    "end_of_turn",
    "find_sources",
    "load_data",
    "load_prompts",
    "load_rows",
    "pack",
    "preference_format",
    "prompt_format",
    "read_rows",
    "show_trained",
    "stop_token_ids",
    "text_format",
    "tokenize_chat",
    "tokenize_completion",
    "tokenize_documents",
    "tokenize_messages",
    "tokenize_pair",
    "tokenize_prompt",
    "tokenize_row",
    "tokenize_text",
    "train_tokenizer",
    "truncate",
    "whole",
]
