"""--dataset_streaming: sources that are read during training, for data that fits neither on disk nor in
memory.

Rows are read in blocks. A block is a pure function of its starting cursor in each source: its rows are
tokenised, packed and shuffled among themselves. So `stream[position]` is a function of (seed, position) like
any other order, and a checkpoint needs only a block's cursors to resume without reading from the start.

The end of a single source ends its block, so that each of its rows comes once before any comes again. Several
sources keep their shares of a block: one that ends within it repeats there.
"""

from collections.abc import Callable
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

BLOCK_ROWS = 10_000  # rows that are packed and shuffled together, over all sources, at most
Cut = Callable[[Examples], Examples]  # packing or chunking of a block's examples


class Block(NamedTuple):
    number: int
    first: int  # position of its first example
    cursors: list[Cursor | None]  # where its rows start in each source; None: at the beginning
    after: list[Cursor | None]  # where they end
    rows: int  # how many they are
    data: Examples
    examples: Examples  # the data, packed or cut
    order: np.ndarray  # (examples,) int64


class Place(NamedTuple):
    """Where a block begins."""

    number: int
    first: int
    cursors: list[Cursor | None]


class Stream:
    """`stream[position]`: the example at a position of the run. Positions must be read in order, or nearly
    so."""

    def __init__(self, sources: list[Source], job: Job, seed: int, functions: tuple[Cut, ...] = ()):
        """job: how rows become examples. Each source has rows in a block in proportion to its weight; one
        that ends starts again, in the next block if it is the only one. functions: pack or cut the examples
        of a block."""
        self.sources = sources
        self.job = job
        self.seed = seed
        self.functions = functions
        self.quotas = shares([source.weight or 1.0 for source in sources], BLOCK_ROWS)
        self.accounts = [Account() for _ in sources]
        self._layout = None  # common to all examples
        self.restore({"number": 0, "first": 0, "cursors": [None] * len(sources)})

    def apply(self, function: Cut) -> "Stream":
        """The same stream, from its beginning, with one more function that packs or cuts the examples of each
        block."""
        return Stream(self.sources, self.job, self.seed, (*self.functions, function))

    def __getitem__(self, position: int) -> Example:
        examples, index = self._place(position)
        return examples[index]

    def _place(self, position: int) -> tuple[Examples, int]:
        """The examples of a position's block, and the index in them."""
        block = self._block(position)
        return block.examples, int(block.order[position - block.first])

    def where(self, position: int) -> str:
        """The source of the example at a position, and its row within the block."""
        examples, index = self._place(position)
        return f"block {self._block(position).number}, {examples.where(index)}"

    def size(self, position: int) -> int:
        """Tokens of the example at a position."""
        examples, index = self._place(position)
        return int(examples.sizes[index])

    @property
    def examples(self) -> Examples:
        """The examples that were read last, for inspection; initially those of the first block."""
        return self._last_block().examples

    @property
    def data(self) -> Examples:
        """The same before packing or cutting."""
        return self._last_block().data

    def _last_block(self) -> Block:
        return self.blocks[-1] if self.blocks else self._block(self._next.first)

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
        self._origin = Place(state["number"], state["first"], state["cursors"])  # from which to read
        self._counted = state["number"]  # the blocks whose rows are counted
        self._forget()

    def _forget(self) -> None:
        """Read again from the origin on."""
        self._next = self._origin  # of the next block
        self.blocks = []  # the last that were read: two, or more if they are small
        self._readers = [None] * len(self.sources)  # iterators over the rows of each source

    def _block(self, position: int) -> Block:
        if self.blocks and position < self.blocks[0].first:  # back beyond the blocks in memory
            self._forget()
        while position >= self._next.first:
            block = self._read(*self._next)
            self.blocks.append(block)
            # A window may reach over several blocks: the first two stay, and those after them while they are small.
            while sum(later.rows for later in self.blocks[2:]) >= BLOCK_ROWS:
                del self.blocks[0]
            self._next = Place(block.number + 1, block.first + len(block.order), block.after)
        return next(block for block in reversed(self.blocks) if block.first <= position)

    def _read(self, number: int, first: int, cursors: list[Cursor | None]) -> Block:
        after, files, num_rows = [], [], 0
        for s, cursor in enumerate(cursors):
            rows, cursor = self._rows(s, cursor)
            num_rows += len(rows)
            chunks = encode_all(enumerate(rows), self.job, self.job.args.dataset_num_proc or 1)
            files.append(self._file(s, [encoded for _, encoded in chunks], number >= self._counted))
            after.append(cursor)
        self._counted = max(self._counted, number + 1)
        data = examples = Examples(files, self.sources)
        for function in self.functions:
            examples = function(examples)
        # joined documents: every block is cut at another place, as every pass is without streaming
        examples = examples.in_pass(number, self.seed)
        is_rest = num_rows < BLOCK_ROWS and cursors[0] is not None  # of a source with blocks before
        if not len(examples) and not is_rest:
            raise UserError(f"--dataset_streaming: no row can be used among {num_rows} in succession")
        order = np.random.default_rng((self.seed, number)).permutation(len(examples))
        return Block(number, first, cursors, after, num_rows, data, examples, order)

    def _rows(self, s: int, cursor: Cursor | None) -> tuple[list[Row], Cursor | None]:
        """A source's rows of a block, and the cursor after them. At its end a source starts again; if it is the
        only one, with the next block."""
        rows = []
        if self._readers[s] is None:
            self._readers[s] = read_rows(self.sources[s], cursor)
        while len(rows) < self.quotas[s]:
            try:
                row, cursor = next(self._readers[s])
                rows.append(row)
            except StopIteration:
                cursor, self._readers[s] = None, read_rows(self.sources[s])
                if rows and len(self.sources) == 1:
                    break
        return rows, cursor

    def _file(self, s: int, encoded: list[Encoded], new: bool) -> TokenFile:
        """A source's part of a block; reports what is new about its rows. new: not read before."""
        account = self.accounts[s]
        said = {*account.dropped, *account.noted}
        layout = Layout({}, "")
        filled = []
        for part in encoded:
            if new:
                account.merge(part.account)
            if part.layout:
                self._layout = layout = agree(self._layout, part.layout)
                filled.append(part)
        for reasons, what in ((account.dropped, " left out"), (account.noted, "")):
            for reason, tally in reasons.items():
                if reason not in said:
                    say(f"data: rows of {self.sources[s].label}{what}: {reason} (first: {tally['first'][0]})")
        arrays = []
        for name in ("lengths", "counts", "sizes", "rows", "difficulty"):
            arrays.append(np.concatenate([getattr(part, name) for part in encoded]))
        fields = {}
        for name in layout.fields:
            fields[name] = np.concatenate([part.fields[name] for part in filled])
        trained = int(fields["loss_mask"].sum(dtype=np.int64)) if filled else 0
        lengths = arrays[0]
        ends = np.cumsum(arrays[0])
        facts = account.facts() | {"tokens": int(lengths.sum()), "trained_tokens": trained}
        return TokenFile(layout, ends - lengths, ends, *arrays[1:], fields, facts)


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
