"""The order of the samples: which unit stands at which position of a run.

A pure function of (seed, position), so that a run can be resumed at any step, on any number of processes. Without weights,
sample i of a run is element i mod N of the permutation of epoch i div N.
"""

from collections.abc import Sequence
from typing import Any

from common.errors import UserError

import numpy as np

BANDS = 10  # of a curriculum: from easy to hard, shuffled within each


class Order:
    """`order[position]` is the index of a unit; an epoch has len(order) positions."""

    def __init__(
        self,
        counts: Sequence[int],
        seed: int,
        *,
        weights: Sequence[float] | None = None,
        difficulty: np.ndarray | None = None,
        curriculum: float = 0.0,
    ):
        """counts: units of each source; they stand one source after the other.

        weights: the share of each source in an epoch, which keeps its sum(counts) positions: a source with too few units is
        repeated, one with too many is not used up, and the next epoch goes on in it. Any stretch of an epoch holds the
        shares to within about one unit. Unset: each unit once.
        difficulty (N,): the first `curriculum` (a share) of epoch 0 is ordered by it, in bands that are shuffled.
        """
        self.counts, self.seed = [int(count) for count in counts], seed
        if not sum(self.counts) or (weights is not None and 0 in self.counts):
            raise UserError(f"nothing to train on: units of each source: {', '.join(map(str, self.counts))}")
        self.difficulty, self.curriculum = difficulty, curriculum
        self.quotas = None if weights is None else shares(weights, sum(self.counts))
        self._epochs: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return sum(self.counts)

    def __getitem__(self, position: int) -> int:
        return int(self.epoch(position // len(self))[position % len(self)])

    def epoch(self, epoch: int) -> np.ndarray:
        """All positions of an epoch: (N,) int64."""
        if epoch not in self._epochs:
            while len(self._epochs) > 1:  # a window touches two epochs at most, or is larger than an epoch
                self._epochs.pop(next(iter(self._epochs)))
            self._epochs[epoch] = self._draw(epoch)
        return self._epochs[epoch]

    def _draw(self, epoch: int) -> np.ndarray:
        rng = np.random.default_rng((self.seed, epoch))
        if self.quotas is None:
            order = rng.permutation(len(self))
        else:
            # Unit j of n of a source comes at a random moment of the j-th of n equal parts of the epoch.
            moments = np.concatenate([(np.arange(n) + rng.random(n)) / max(n, 1) for n in self.quotas])
            order = np.concatenate([self._draw_source(s, epoch) for s in range(len(self.quotas))])[np.argsort(moments)]
        if epoch == 0 and self.difficulty is not None:
            n = round(self.curriculum * len(order))
            ranked = order[:n][np.argsort(self.difficulty[order[:n]], kind="stable")]
            order[:n] = np.concatenate([rng.permutation(band) for band in np.array_split(ranked, BANDS)])
        return order

    def _draw_source(self, s: int, epoch: int) -> np.ndarray:
        """The units of source s in an epoch: where the epoch before has ended, in permutations of the source."""
        n, N = self.quotas[s], self.counts[s]
        turns = np.arange(epoch * n, (epoch + 1) * n)
        passes = {k: np.random.default_rng((self.seed, s, k)).permutation(N) for k in np.unique(turns // N).tolist()}
        drawn = [passes[k][turns[turns // N == k] % N] for k in passes]
        return sum(self.counts[:s]) + np.concatenate(drawn) if drawn else np.zeros(0, np.int64)


class Shuffled:
    """`shuffled[position]`: the unit at a position of the run; len: the units of an epoch."""

    def __init__(self, units: Any, order: Order, data: Any = None, turn_dropping: float = 0.0):
        """units: units.Units, or collators.Packs of them. data: the same before they were packed or cut. turn_dropping:
        with this probability a chat ends after one of its earlier answers."""
        self.units, self.order, self.turn_dropping = units, order, turn_dropping
        self.data = units if data is None else data
        self.longest = self.data.longest

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, position: int) -> list[dict[str, Any]]:
        index = self.order[position]
        unit = self.units[index]
        if self.turn_dropping:
            rng = np.random.default_rng((self.order.seed, position // len(self), index))
            unit = [drop_turns(sequence, self.turn_dropping, rng) for sequence in unit]
        return unit

    def where(self, position: int) -> str:
        """The source and row of the unit at a position."""
        return self.units.where(self.order[position])

    def size(self, position: int) -> int:
        """Tokens of the unit at a position (before turns are dropped)."""
        return int(self.units.lengths[self.order[position]])


def drop_turns(sequence: dict[str, Any], probability: float, rng: np.random.Generator) -> dict[str, Any]:
    """With the given probability, the sequence up to the end of a random trained turn that is not its last."""
    wanted, which = rng.random(2)
    mask = sequence["loss_mask"].astype(np.int8)
    steps = np.diff(mask)
    ends, starts = np.flatnonzero(steps < 0) + 1, np.flatnonzero(steps > 0) + 1
    earlier = ends[ends <= starts[-1]] if len(starts) else ends[:0]
    if wanted >= probability or not len(earlier):
        return sequence
    end = earlier[int(which * len(earlier))]
    return {name: value[:end] if np.ndim(value) else value for name, value in sequence.items()}


def shares(weights: Sequence[float], total: int) -> list[int]:
    """`total` divided in proportion to the weights, by the largest remainders."""
    exact = np.array(weights, np.float64) / np.sum(weights) * total
    result = np.floor(exact).astype(np.int64)
    for s in np.argsort(result - exact, kind="stable")[: total - int(result.sum())]:
        result[s] += 1
    if (result == 0).any():
        raise UserError(f"--dataset_weights: of {total} units, source {int((result == 0).argmax()) + 1} would give none")
    return result.tolist()
