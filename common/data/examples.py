"""Examples in memory-mapped files: the form of a tokenised source. Packed into rows, or cut into rows."""

import bisect
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from common.data.encode import Layout, agree
from common.data.order import BANDS
from common.data.sources import Source
from common.data.types import Example, Sequence
from common.errors import UserError
import numpy as np

Data = TypeVar("Data")  # Examples, or training data with them: Shuffled, or a stream


class TokenFile(NamedTuple):
    """A tokenised source: S sequences of T tokens in total, end to end; memory-mapped if it comes from the
    cache."""

    layout: Layout
    starts: np.ndarray  # (S,) int64: offset of each sequence in the T tokens
    ends: np.ndarray  # (S,) int64
    counts: np.ndarray  # (examples,) int64: sequences of each example
    sizes: np.ndarray  # (examples,) int64: tokens of each example in a row, where shared prefixes are once
    rows: np.ndarray  # (examples,) int64: the row of each example
    difficulty: np.ndarray  # (examples,) float64, NaN without a curriculum column
    fields: dict[str, np.ndarray]  # (T,) or (S,) by the layout, see Encoded
    facts: dict[str, Any]

    def sequence(self, i: int) -> Sequence:
        start = self.starts[i]
        end = self.ends[i]
        tokens = slice(start, end)
        total = len(self.fields["input_ids"])
        if end > total:  # a row cut from joined documents may go on at their beginning, see `chunk`
            tokens = np.arange(start, end) % total
        sequence = {}
        for name, (per, _) in self.layout.fields.items():
            values = self.fields[name]
            sequence[name] = values[tokens] if per == "token" else values[i].item()
        return sequence


class Examples:
    """The examples of several sources, one source after another. Indexing reads from the memory-mapped
    files."""

    max_length = 0  # tokens that a pack may have; 0: these are not packs

    def __init__(self, files: list[TokenFile], sources: list[Source]):
        """Raises UserError if the sources have different fields."""
        self.files = files
        self.sources = sources
        self.counts = []  # examples of each source
        self._first_sequence = []  # of each source: the number of the first sequence of each example
        self.longest = 0  # tokens of the longest sequence
        nothing = np.zeros(0, np.int64)
        lengths, difficulty = [nothing], [nothing]
        layout = None
        for file in files:
            self.counts.append(len(file.rows))
            self._first_sequence.append(np.concatenate([[0], np.cumsum(file.counts)]))
            lengths.append(file.sizes)
            difficulty.append(file.difficulty)
            if len(file.rows):
                self.longest = max(self.longest, int((file.ends - file.starts).max()))
                layout = agree(layout, file.layout)
        self._first_example = [0, *np.cumsum(self.counts).tolist()]
        self.sizes = np.concatenate(lengths)  # (examples,) tokens
        self.difficulty = np.concatenate(difficulty)  # (examples,), for a curriculum
        if np.isnan(self.difficulty).all():
            self.difficulty = None

    def __len__(self) -> int:
        return self._first_example[-1]

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):
            raise IndexError(index)
        s, index = self._place(index)
        first, end = self._first_sequence[s][index : index + 2].tolist()
        return [self.files[s].sequence(i) for i in range(first, end)]

    def _place(self, index: int) -> tuple[int, int]:
        """The source of an example, and its index there."""
        s = bisect.bisect_right(self._first_example, index) - 1
        return s, index - self._first_example[s]

    def chats(self, index: int) -> list[Example]:
        """The examples that an example is made of: of a pack several."""
        return [self[index]]

    def where(self, index: int) -> str:
        """The source and row of an example."""
        s, index = self._place(index)
        return f"{self.sources[s].path} row {int(self.files[s].rows[index]) + 1}"

    def add_field(self, name: str, values: np.ndarray) -> None:
        """Add a number for every sequence, (sequences,) over all sources, as the per-sequence field
        `name`."""
        first = 0
        for s, file in enumerate(self.files):
            part = values[first : first + len(file.starts)]
            layout = file.layout._replace(fields=file.layout.fields | {name: ("sequence", str(values.dtype))})
            self.files[s] = file._replace(layout=layout, fields=file.fields | {name: part})
            first += len(part)

    def in_pass(self, number: int, seed: int) -> "Examples":
        """The examples for a later pass over their source: the same ones, except in Wrapped."""
        return self

    def digests(self) -> dict[str, str]:
        """{label: a hash of all data from that source}."""
        digests = {}
        for source, file in zip(self.sources, self.files, strict=True):
            digests[source.label] = file.facts["digest"]
        return digests

    def facts(self) -> list[dict[str, Any]]:
        """For each source: its description, rows, examples, tokens, and what was left out and why."""
        names = ("columns", "rows", "examples", "tokens", "trained_tokens", "dropped", "noted")
        facts = []
        for source, file in zip(self.sources, self.files, strict=True):
            facts.append(source.facts() | {name: file.facts[name] for name in names})
        return facts


class Wrapped(Examples):
    """Rows cut from the joined documents of each source, in every pass at other places."""

    def __init__(self, files: list[TokenFile], documents: Examples, max_length: int):
        """documents: what was cut."""
        super().__init__(files, documents.sources)
        self._documents = documents
        self._length = max_length
        # Sources with weights are in different passes, and a window may span two of each.
        self._later_pass = lru_cache(maxsize=2 * len(files))(self._cut_again)

    def in_pass(self, number: int, seed: int) -> Examples:
        return self._later_pass(number, seed) if number else self

    def _cut_again(self, number: int, seed: int) -> Examples:
        return chunk(self._documents, self._length, start=(seed, number))


class Packs(Examples):
    """Packed Examples: `packs[i]` holds the sequences of several examples."""

    def __init__(self, examples: Examples, members: list[np.ndarray], counts: list[int], max_length: int):
        """members: the examples in each pack. counts: packs per source. max_length: the tokens that a pack
        may have."""
        super().__init__(examples.files, examples.sources)
        self.examples = examples
        self.members = members
        self.counts = counts
        self.max_length = max_length
        self.sizes = np.array([examples.sizes[pack].sum() for pack in members], np.int64)  # (packs,)
        if examples.difficulty is not None:
            self.difficulty = np.array([examples.difficulty[pack].mean() for pack in members])

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, i: int) -> Example:
        sequences = []
        for chat in self.chats(i):
            sequences += chat
        return sequences

    def chats(self, i: int) -> list[Example]:
        """The examples in a pack."""
        return [self.examples[int(j)] for j in self.members[i]]

    def where(self, i: int) -> str:
        """The source and row of each example in a pack."""
        return ", ".join(self.examples.where(int(j)) for j in self.members[i])


def pack(data: Data, max_length: int) -> Data:
    """The same kind of data, with each example made of several of the original ones: at most max_length
    tokens together, unless one alone has more.

    No example is split, each is in exactly one pack, and each pack is from one source. In a curriculum only
    examples of similar difficulty share a pack. A stream is packed block by block.
    """
    if not isinstance(data, Examples):
        return data.apply(lambda examples: pack(examples, max_length))
    bands = 1 if data.difficulty is None else BANDS
    members = []  # the examples of each pack
    counts = []  # packs of each source
    first = 0
    for count in data.counts:
        examples = np.arange(first, first + count)
        if data.difficulty is not None:
            examples = examples[np.argsort(data.difficulty[examples], kind="stable")]
        before = len(members)
        for band in np.array_split(examples, bands):
            for chosen in best_fit(data.sizes[band], max_length):
                members.append(band[chosen])
        counts.append(len(members) - before)
        first += count
    return Packs(data, members, counts, max_length)


def chunk(data: Data, max_length: int, across: bool = True, start: tuple[int, int] | None = None) -> Data:
    """The same kind of data, with documents cut into rows: examples of one sequence of at most max_length
    tokens.

    across: cut each source's documents as if they were joined to one; otherwise cut each document
    separately. A remainder of one token, which has nothing to predict, is left out. A piece has the
    difficulty of the document in which it starts, and, of one document, its per-sequence fields.

    Joined documents are cut from their first token on; in later passes (`in_pass`) from a token that depends on
    the seed and the pass, `start`, and around the end to that token. So rows have the same lengths in every
    pass, and each token is in one row, but for a remainder that is left out.

    Raises UserError for examples of several sequences, and for per-sequence fields in joined documents, whose rows
    hold several of them.
    """
    if not isinstance(data, Examples):
        return data.apply(lambda examples: chunk(examples, max_length, across))
    files = []
    for s, (source, file) in enumerate(zip(data.sources, data.files, strict=True)):
        if (file.counts > 1).any():
            raise UserError(f"{source.path}: examples of several sequences are not cut into chunks")
        per_sequence = [name for name, (per, _) in file.layout.fields.items() if per == "sequence"]
        if across and per_sequence:
            raise UserError(
                f"{source.path}: a row holds several documents, so one number for each ({', '.join(per_sequence)}) has no "
                "place: let encode give as many numbers as tokens, or use --packing_strategy bfd"
            )
        starts, ends = _cut(file, max_length, across)
        if start is not None and len(starts):
            total = len(file.fields["input_ids"])
            shift = np.random.default_rng((*start, s)).integers(total)
            lengths = ends - starts
            starts = (starts + shift) % total
            ends = starts + lengths
        document = np.searchsorted(file.ends, starts, side="right")  # in which each piece starts
        fields = dict(file.fields)
        for name in per_sequence:
            fields[name] = fields[name][document]
        files.append(
            file._replace(
                starts=starts,
                ends=ends,
                counts=np.ones(len(starts), np.int64),
                sizes=ends - starts,
                rows=file.rows[document],
                difficulty=file.difficulty[document],
                fields=fields,
            )
        )
    return Wrapped(files, data, max_length) if across else Examples(files, data.sources)


def _cut(file: TokenFile, max_length: int, across: bool) -> tuple[np.ndarray, np.ndarray]:
    """The starts and ends, (pieces,) each, of pieces of at most max_length tokens and more than one."""
    starts = file.starts
    ends = file.ends
    if across:  # joined documents are cut as if they were one
        starts = starts[:1]
        ends = ends[-1:]
    counts = -(-(ends - starts) // max_length)  # pieces of each document
    firsts = np.cumsum(counts) - counts  # the number of its first piece
    within = np.arange(counts.sum()) - np.repeat(firsts, counts)  # the number of each piece in its document
    piece_starts = np.repeat(starts, counts) + within * max_length
    piece_ends = np.minimum(piece_starts + max_length, np.repeat(ends, counts))
    is_kept = piece_ends - piece_starts > 1
    return piece_starts[is_kept], piece_ends[is_kept]


def best_fit(lengths: np.ndarray, max_length: int) -> list[list[int]]:
    """Best-fit decreasing bin packing: the indices of the examples in each pack. O(N log N).

    lengths: (N,) tokens. An example of more than max_length tokens (a chat in several contexts, each of which
    has fewer) has a pack of its own.
    """
    packs = []
    by_room = {}  # free room -> packs with that much
    rooms = []  # the keys of by_room, sorted
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        if length > max_length:
            packs.append([i])
            continue
        at = bisect.bisect_left(rooms, length)  # the smallest room in which it fits
        if at == len(rooms):
            packs.append([i])
            chosen, room = len(packs) - 1, max_length - length
        else:
            room = rooms[at]
            chosen = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
            packs[chosen].append(i)
            room -= length
        if room not in by_room:
            by_room[room] = []
            bisect.insort(rooms, room)
        by_room[room].append(chosen)
    return packs
