"""From rows of any source to examples: token sequences to train on, in the order of the run."""

from common.data.examples import chunk, pack
from common.data.formats import as_chat, as_preference, as_prompt, as_text
from common.data.load import load_data, load_prompts
from common.data.order import Shuffled, drop_turns
from common.data.tokens import (
    tokenize_chat,
    tokenize_completion,
    tokenize_messages,
    tokenize_pair,
    tokenize_row,
    truncate,
)
from common.data.types import BadRow, Example, Row, Sequence, Tokenizer, all_trained
