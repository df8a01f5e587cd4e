"""Training a new byte-level BPE tokenizer on the documents of a run."""

from collections.abc import Iterable, Iterator
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from common.args import CommonArgs
from common.data.cache import build_once, digest, versions
from common.data.chat_template import read_chat_template
from common.data.formats import as_text
from common.data.sources import identity, read_rows, training_sources
from common.data.types import BadRow
from common.errors import UserError, say

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedTokenizerFast


def train_tokenizer(
    args: CommonArgs, accelerator: "Accelerator", vocab_size: int, field: str
) -> "PreTrainedTokenizerFast":
    """A tokenizer trained on the column `field` of the training sources (see train_bpe), cached for later
    runs.

    Called on every process.
    """
    from transformers import PreTrainedTokenizerFast

    say(f"tokenizer: none named; training a byte-level BPE of {vocab_size} tokens on the documents")
    sources = training_sources(args)

    def texts() -> Iterator[str]:
        for source in sources:
            for row, _ in read_rows(source):
                with contextlib.suppress(BadRow):  # said when the rows are tokenised
                    yield as_text(row, field)

    parts = [[identity(source) for source in sources], vocab_size, field, *versions()]
    folder = build_once(
        accelerator,
        Path(args.dataset_cache_dir, f"tokenizer-{digest(parts)}"),
        lambda into: train_bpe(texts(), vocab_size).save_pretrained(into),
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    for name in ("is_local", "local_files_only"):  # loading options that would be saved with it
        tokenizer.init_kwargs.pop(name, None)
    return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """A byte-level BPE tokenizer (Sennrich et al. 2016, arXiv 1508.07909) with single digits and the ChatML
    template.

    The texts are read once, and not kept. Raises UserError if the vocabulary has no room for all bytes.
    """
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    if vocab_size < 256 + len(specials):
        raise UserError(
            f"--vocab_size {vocab_size}: a byte-level tokenizer needs at least {256 + len(specials)}"
        )
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
        # The words of the chat template come before every turn: make sure that each becomes one token.
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
