"""--dataset_streaming: sources that are read during training, for data that fits neither on disk nor in
memory.

Rows are read in blocks. A block is a pure function of its starting cursor in each source: its rows are
tokenised, packed and shuffled among themselves. So `stream[position]` is a function of (seed, position) like
any other order, and a checkpoint needs only a block's cursors to resume without reading from the start.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from common.args import CommonArgs
from common.data.cache import digest, fingerprint
from common.data.encode import Account, Encoded, Job, Layout, agree, encode_all
from common.data.examples import Examples, TokenFile
from common.data.order import shares
from common.data.sources import Cursor, Source, identity, read_rows
from common.data.types import Example, Row
from common.errors import UserError, say
import numpy as np

BLOCK_ROWS = 10_000  # rows that are packed and shuffled together, over all sources
Cut = Callable[[Examples], Examples]  # packing or chunking of a block's examples


class Block(NamedTuple):
    number: int
    first: int  # position of its first example
    cursors: list[Cursor | None]  # where its rows start in each source; None: at the beginning
    after: list[Cursor | None]  # where they end
    data: Examples
    examples: Examples  # the data, packed or cut
    order: np.ndarray  # (examples,) int64


class Stream:
    """`stream[position]`: the example at a position of the run. Positions must be read in order, or nearly
    so."""

    def __init__(self, sources: list[Source], job: Job, seed: int, functions: tuple[Cut, ...] = ()):
        """job: how rows become examples. Each source has rows in a block in proportion to its weight; one
        that ends starts again. functions: pack or cut the examples of a block."""
        self.sources, self.job, self.seed, self.functions = sources, job, seed, functions
        self.quotas = shares([source.weight or 1.0 for source in sources], BLOCK_ROWS)
        self.accounts = [Account() for _ in sources]
        self._layout: Layout | None = None  # common to all examples
        self.restore({"number": 0, "first": 0, "cursors": [None for _ in sources]})

    def apply(self, function: Cut) -> "Stream":
        """The same stream, from its beginning, with one more function that packs or cuts the examples of each
        block."""
        return Stream(self.sources, self.job, self.seed, (*self.functions, function))

    def __getitem__(self, position: int) -> Example:
        block = self._block(position)
        return block.examples[int(block.order[position - block.first])]

    def where(self, position: int) -> str:
        """The source of the example at a position, and its row within the block."""
        block = self._block(position)
        return f"block {block.number}, {block.examples.where(int(block.order[position - block.first]))}"

    def size(self, position: int) -> int:
        """Tokens of the example at a position."""
        block = self._block(position)
        return int(block.examples.lengths[block.order[position - block.first]])

    @property
    def examples(self) -> Examples:
        """The examples that were read last, for inspection; initially those of the first block."""
        return (self.blocks or [self._block(self._next[1])])[-1].examples

    @property
    def data(self) -> Examples:
        """The same before packing or cutting."""
        return (self.blocks or [self._block(self._next[1])])[-1].data

    def digests(self) -> dict[str, str]:
        """{label: a hash of what is known of a source's rows before reading them}: sizes and times of its
        files."""
        tokens = fingerprint(self.job.tokenizer)
        return {source.label: digest([identity(source), tokens]) for source in self.sources}

    def state(self, position: int) -> dict[str, Any]:
        """The state to resume from at a position: the start of its block."""
        block = self._block(position)
        return {"number": block.number, "first": block.first, "cursors": block.cursors}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a `state`."""
        self.blocks: list[Block] = []  # the last two that were read
        self._readers: list[Iterator[tuple[Row, Cursor]] | None] = [None for _ in self.sources]
        self._next: tuple[int, int, list[Cursor | None]] = (state["number"], state["first"], state["cursors"])
        # where to go back to; the blocks whose rows are counted
        self._origin, self._counted = self._next, state["number"]

    def _block(self, position: int) -> Block:
        if self.blocks and position < self.blocks[0].first:  # back beyond the blocks in memory
            self.blocks, self._readers, self._next = [], [None for _ in self.sources], self._origin
        while position >= self._next[1]:
            block = self._read(*self._next)
            self.blocks = [*self.blocks[-1:], block]
            self._next = (block.number + 1, block.first + len(block.order), block.after)
        return next(block for block in reversed(self.blocks) if block.first <= position)

    def _read(self, number: int, first: int, cursors: list[Cursor | None]) -> Block:
        after, files = list(cursors), []
        for s, quota in enumerate(self.quotas):
            rows, after[s] = self._rows(s, quota, cursors[s])
            encoded = [
                part for _, part in encode_all(enumerate(rows), self.job, self.job.args.dataset_num_proc or 1)
            ]
            files.append(self._file(s, encoded, new=number == self._counted))
        self._counted = max(self._counted, number + 1)
        data = examples = Examples(files, self.sources)
        for function in self.functions:
            examples = function(examples)
        examples = examples.in_pass(number, self.seed)
        if not len(examples):
            raise UserError(f"--dataset_streaming: no row can be used among {sum(self.quotas)} in succession")
        order = np.random.default_rng((self.seed, number)).permutation(len(examples))
        return Block(number, first, cursors, after, data, examples, order)

    def _rows(self, s: int, quota: int, cursor: Cursor | None) -> tuple[list[Row], Cursor | None]:
        """The next rows of a source, which starts again at its end."""
        rows: list[Row] = []
        if self._readers[s] is None:
            self._readers[s] = read_rows(self.sources[s], cursor)
        while len(rows) < quota:
            found = next(self._readers[s], None)
            if found is None:
                cursor, self._readers[s] = None, read_rows(self.sources[s])
            else:
                rows.append(found[0])
                cursor = found[1]
        return rows, cursor

    def _file(self, s: int, encoded: list[Encoded], new: bool) -> TokenFile:
        """A source's part of a block; reports what is new about its rows. new: not read before."""
        account = self.accounts[s]
        known = {*account.dropped, *account.noted}
        if new:
            for part in encoded:
                account.merge(part.account)
        for reason, found in [*account.dropped.items(), *account.noted.items()]:
            if reason not in known:
                out = " left out" if reason in account.dropped else ""
                say(f"data: rows of {self.sources[s].label}{out}: {reason} (first: {found['first'][0]})")
        filled = [part for part in encoded if part.layout]
        for part in filled:
            self._layout = agree(self._layout, part.layout)
        layout = self._layout if filled else Layout({}, "")
        about = ("lengths", "counts", "sizes", "rows", "difficulty")
        lengths, counts, sizes, rows, difficulty = (
            np.concatenate([getattr(part, name) for part in encoded]) for name in about
        )
        fields = {name: np.concatenate([part.fields[name] for part in filled]) for name in layout.fields}
        trained = int(fields["loss_mask"].sum(dtype=np.int64)) if filled else 0
        facts = account.facts() | {"tokens": int(lengths.sum()), "trained_tokens": trained}
        ends = np.cumsum(lengths)
        return TokenFile(layout, ends - lengths, ends, counts, sizes, rows, difficulty, fields, facts)


def check_stream(args: CommonArgs) -> None:
    """Raises UserError for arguments that a stream cannot follow."""
    if args.max_steps <= 0:
        raise UserError(
            "--dataset_streaming: a stream has no known end: say how long to train with --max_steps"
        )
    if len(args.dataset_name) > 1 and args.dataset_weights is None:
        raise UserError(
            "--dataset_streaming: several sources of unknown size: their shares are --dataset_weights"
        )
    if args.curriculum_column:
        raise UserError("--dataset_streaming: no --curriculum_column: it needs all rows at hand")
