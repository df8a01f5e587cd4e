"""From the arguments to the data of a run: found, tokenised and cached (or streamed), mixed, and ordered."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from common.args import CommonArgs
from common.data.cache import digest, make_job, tokenize
from common.data.encode import Encode, convert, number_in
from common.data.examples import Examples
from common.data.order import Order, Shuffled
from common.data.sources import Source, find_sources, read_rows
from common.data.stream import Stream, check_stream
from common.data.types import Row, Tokenizer
from common.errors import UserError
import numpy as np

if TYPE_CHECKING:
    from accelerate import Accelerator

EncodePrompt = Callable[[Row, Tokenizer, CommonArgs], dict[str, Any]]


def load_data(
    args: CommonArgs, accelerator: "Accelerator", encode: Encode, tokenizer: Tokenizer
) -> tuple[Shuffled, Examples]:
    """The training data, with the example at each position of the run, and the held-out examples (or none).

    encode(row, tokenizer, args): the sequences of a row, which stay together, or its text, which becomes a
    document; may raise BadRow. Any field that it adds to a sequence reaches the batch. Called on every
    process. With dataset_streaming the training data is a Stream (stream.py): like Shuffled, but without a length
    and an order, and with a state that checkpoints keep.
    """
    if args.dataset_streaming:
        check_stream(args)
    sources, held_out_sources = find_sources(args)
    job = make_job(accelerator, encode, tokenizer, args)
    if args.dataset_streaming:
        train = Stream(sources, job, args.seed)
    else:
        data = tokenize(accelerator, sources, job._replace(column=args.curriculum_column))
        train = Shuffled(data, make_order(args, sources, data))
    return train, tokenize(accelerator, held_out_sources, job)


class Rows:
    """Rows of several sources, converted by a function and kept in memory, one source after another. Each has
    the columns of all, None where it lacks one."""

    def __init__(
        self,
        sources: list[Source],
        function: Callable[[Row], dict[str, Any]],
        curriculum_column: str | None = None,
        beside: list[dict[str, Any]] | None = None,
    ):
        """function(row): a dict with token ids under prompt_ids; may raise BadRow. beside: other rows, whose
        columns these get as well."""
        self.sources = sources
        self.rows = []
        self.counts = []
        self._facts = []
        column = None if curriculum_column == "length" else curriculum_column
        difficulty = []  # of each row

        def encode(row: Row) -> tuple[dict[str, Any], float]:
            encoded = function(row)
            return encoded, number_in(row, column) if column else len(encoded["prompt_ids"])

        for source in sources:
            results, facts = convert((row for row, _ in read_rows(source)), encode, "prompts")
            tokens = 0
            for row, number in results:
                self.rows.append(row)
                difficulty.append(number)
                tokens += len(row["prompt_ids"])
            self.counts.append(len(results))
            self._facts.append(source.facts() | facts | {"tokens": tokens})
        # A reward gets the same columns whatever rows it is called with, and so on any number of processes.
        nothing = {}
        for row in [*(beside or []), *self.rows]:
            nothing |= dict.fromkeys(row)
        self.rows = [nothing | row for row in self.rows]
        self.sizes = np.array([len(row["prompt_ids"]) for row in self.rows], np.int64)  # (rows,) tokens
        self.longest = max(self.sizes.tolist(), default=0)
        self.difficulty = np.array(difficulty) if curriculum_column else None  # (rows,)
        self.order: Order | None = None  # of the run

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.rows[i]

    def at(self, position: int) -> dict[str, Any]:
        """The row at a position of the run."""
        return self.rows[self.order[position]]

    def digests(self) -> dict[str, str]:
        """{label: a hash of all data from that source}."""
        digests = {}
        first = 0
        for source, count in zip(self.sources, self.counts, strict=True):
            digests[source.label] = digest(self.rows[first : first + count])
            first += count
        return digests

    def facts(self) -> list[dict[str, Any]]:
        """For each source: its description, rows, examples, tokens, and what was left out and why."""
        return self._facts


def load_prompts(args: CommonArgs, encode: EncodePrompt, tokenizer: Tokenizer) -> tuple[Rows, Rows]:
    """The prompts to train on, `prompts.at(position)`, and the held-out ones (or none), in memory.

    encode(row, tokenizer, args): a dict with "prompt_ids" (and what the rewards need); may raise BadRow.
    Raises UserError for --dataset_streaming.
    """
    if args.dataset_streaming:
        raise UserError(
            "--dataset_streaming: this script has all prompts in memory; leave it out (--max_train_samples takes the first)"
        )
    sources, held_out_sources = find_sources(args)

    def encoded(row: Row) -> dict[str, Any]:
        return encode(row, tokenizer, args)

    prompts = Rows(sources, encoded, args.curriculum_column)
    prompts.order = make_order(args, sources, prompts)
    return prompts, Rows(held_out_sources, encoded, beside=prompts.rows)


def make_order(args: CommonArgs, sources: list[Source], examples: Examples | Rows) -> Order:
    """The order of examples that the arguments ask for."""
    weights = None if sources[0].weight is None else [source.weight for source in sources]
    return Order(examples.counts, args.seed, weights=weights, difficulty=examples.difficulty)
