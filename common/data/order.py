"""The order of training: which example is at which position of a run.

A pure function of (seed, position), so that a run can resume at any step, with any number of processes.
Without weights, position i of a run has element i mod N of the permutation of epoch i div N.
"""

from collections.abc import Sequence as SequenceOf
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from common.data.types import Example
from common.errors import UserError
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from common.data.examples import Examples

CURRICULUM = 0.5  # of the first epoch is ordered from easy to hard; the rest is shuffled
BANDS = 10  # of a curriculum, from easy to hard, each shuffled


class Order:
    """`order[position]` is the index of an example; an epoch has len(order) positions."""

    def __init__(
        self,
        counts: SequenceOf[int],
        seed: int,
        *,
        weights: SequenceOf[float] | None = None,
        difficulty: np.ndarray | None = None,
    ):
        """counts: examples per source, one source after another.

        weights: the share of each source in an epoch, which keeps its sum(counts) positions: a source with
        too few examples is repeated; one with too many is continued in the next epoch. Any stretch of an
        epoch matches the shares to within about one example. None: each example once. difficulty (N,): the
        first part of epoch 0 is ordered by it, in shuffled bands. Raises UserError for a source without
        examples.
        """
        self.counts = list(map(int, counts))
        self.seed = seed
        self.weights = weights
        self.difficulty = difficulty
        if not sum(self.counts) or (weights is not None and 0 in self.counts):
            raise UserError(
                f"nothing to train on: examples of each source: {', '.join(map(str, self.counts))}"
            )
        # A window spans at most two epochs, unless it is larger than one.
        self._epoch = lru_cache(maxsize=2)(self._shuffle)

    @cached_property
    def quotas(self) -> list[int] | None:
        """Positions of each source in an epoch; None: each example once. Raises UserError for a source that
        would get none.

        Computed only when needed: a source may have too few documents for its share, but enough rows once the
        documents are cut.
        """
        return None if self.weights is None else shares(self.weights, len(self))

    def __len__(self) -> int:
        return sum(self.counts)

    def __getitem__(self, position: int) -> int:
        return self.example_and_pass(position)[0]

    def example_and_pass(self, position: int) -> tuple[int, int]:
        """The example at a position, and how many passes over its source were complete before."""
        epoch, place = divmod(position, len(self))
        passes, example = divmod(int(self._epoch(epoch)[place]), len(self))
        return example, passes

    def _shuffle(self, epoch: int) -> np.ndarray:
        """All positions of an epoch, (N,) int64: of each the example + N · (complete passes over its source before);
        both in one number, so that they are sorted together."""
        rng = np.random.default_rng((self.seed, epoch))
        if self.quotas is None:
            order = rng.permutation(len(self)) + epoch * len(self)  # every pass is an epoch
        else:
            # Example j of n of a source is placed at a random moment of the j-th of n equal parts of the
            # epoch.
            moments = []
            examples = []
            for s, n in enumerate(self.quotas):
                moments.append((np.arange(n) + rng.random(n)) / max(n, 1))
                examples.append(self._shuffle_source(s, epoch))
            order = np.concatenate(examples)[np.argsort(np.concatenate(moments))]
        if epoch == 0 and self.difficulty is not None:
            n = round(CURRICULUM * len(order))
            difficulty = self.difficulty[order[:n] % len(self)]
            ranked = order[:n][np.argsort(difficulty, kind="stable")]
            order[:n] = np.concatenate([rng.permutation(band) for band in np.array_split(ranked, BANDS)])
        return order

    def _shuffle_source(self, s: int, epoch: int) -> np.ndarray:
        """The examples of source s in an epoch, continuing its permutations where the previous epoch
        ended."""
        n = self.quotas[s]  # positions in an epoch
        N = self.counts[s]  # examples
        passes, places = np.divmod(np.arange(epoch * n, (epoch + 1) * n), N)
        order = passes * len(self) + sum(self.counts[:s])
        for number in np.unique(passes).tolist():
            permutation = np.random.default_rng((self.seed, s, number)).permutation(N)
            is_in_pass = passes == number
            order[is_in_pass] += permutation[places[is_in_pass]]
        return order


class Shuffled:
    """`shuffled[position]`: the example at a position of the run; len: the number of examples in an epoch."""

    def __init__(self, examples: "Examples", order: Order, data: "Examples | None" = None):
        """data: the examples before packing or cutting."""
        self.examples = examples
        self.order = order
        self.sources = examples.sources
        self.data = examples if data is None else data

    def digests(self) -> dict[str, str]:
        """{label: a hash of all data from that source}."""
        return self.data.digests()

    def apply(self, function: "Callable[[Examples], Examples]") -> "Shuffled":
        """The same with other examples, which the function makes from these by packing or cutting."""
        examples = function(self.examples)
        order = Order(
            examples.counts, self.order.seed, weights=self.order.weights, difficulty=examples.difficulty
        )
        return Shuffled(examples, order, self.data)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, position: int) -> Example:
        example, number = self.order.example_and_pass(position)
        return self.examples.in_pass(number, self.order.seed)[example]

    def where(self, position: int) -> str:
        """The source and row of the example at a position."""
        example, number = self.order.example_and_pass(position)
        return self.examples.in_pass(number, self.order.seed).where(example)

    def size(self, position: int) -> int:
        """Tokens of the example at a position (before turns are dropped)."""
        return int(self.examples.sizes[self.order[position]])


def drop_turns(train: Shuffled, probability: float) -> Shuffled:
    """The same training data, in which each chat ends after one of its earlier answers with this
    probability."""
    return ShortChats(train, probability) if probability else train


class ShortChats(Shuffled):
    """Training data in which each chat ends after one of its earlier answers with some probability. The
    choice is a function of (seed, epoch, example)."""

    def __init__(self, train: Shuffled, probability: float):
        """Raises UserError for a stream."""
        if not isinstance(train, Shuffled):
            raise UserError("--dataset_streaming: no --turn_dropping: it needs all rows at hand")
        super().__init__(train.examples, train.order, train.data)
        self.probability = probability

    def apply(self, function: "Callable[[Examples], Examples]") -> "ShortChats":
        return ShortChats(super().apply(function), self.probability)

    def __getitem__(self, position: int) -> Example:
        rng = np.random.default_rng((self.order.seed, position // len(self), self.order[position]))
        sequences = []
        for chat in self.examples.chats(self.order[position]):
            sequences += shorten(chat, self.probability, rng)
        return sequences


def shorten(chat: Example, probability: float, rng: np.random.Generator) -> Example:
    """With the given probability, end the chat (its sequences in order, see tokens.tokenize_messages) after a
    random trained turn other than its last."""
    luck, which = rng.random(2)
    turns = []  # of each trained turn: its sequence, and its end there
    for s, sequence in enumerate(chat):
        mask = np.append(sequence["loss_mask"].astype(np.int8), 0)
        for end in np.flatnonzero(np.diff(mask) < 0) + 1:
            turns.append((s, int(end)))
    if luck >= probability or len(turns) < 2:
        return chat
    s, end = turns[int(which * (len(turns) - 1))]
    last = {name: value[:end] if np.ndim(value) else value for name, value in chat[s].items()}
    return [*chat[:s], last]


def shares(weights: SequenceOf[float], total: int) -> list[int]:
    """Divide `total` in proportion to the weights, by largest remainders. Raises UserError if a share would
    be 0."""
    exact = np.array(weights, np.float64) / np.sum(weights) * total
    result = np.floor(exact).astype(np.int64)
    for s in np.argsort(result - exact, kind="stable")[: total - int(result.sum())]:
        result[s] += 1
    if (result == 0).any():
        raise UserError(
            f"--dataset_weights: of {total} examples, source {int((result == 0).argmax()) + 1} would give none"
        )
    return result.tolist()
