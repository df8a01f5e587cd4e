"""Batches: the order of the samples, windows, packing, and the flat row that every stage trains on.

The words: a *sequence* is a dict with `input_ids` (n,) and `loss_mask` (n,) and, where a stage needs them, more fields:
arrays of n become per-token fields of the batch, numbers become per-sequence fields. A *unit* is a list of sequences that
stay together: one conversation, the chosen and rejected answer of a pair, a pack. A *micro-batch* is one flat row of
units. A *window* is all micro-batches of all processes that make one optimizer step.

The order of the samples is a pure function of (seed, position): sample i of a run is element i mod N of the permutation
of epoch i div N. So a run can be resumed at any window, on any number of processes.
"""

import bisect
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from common.errors import UserError

import numpy as np
import torch

Unit = list[dict[str, Any]]


def flat_batch(units: Sequence[Unit], device: torch.device, weight: float = 1.0) -> dict[str, Any]:
    """One flat row of units, T tokens in S sequences.

    Returns input_ids (1, T) and position_ids (1, T) int64; cu_seqlens (S+1,) int64, the borders; lengths, the same as S
    Python ints; loss_mask (T,) float32, 0 on the first token of each sequence; targets (N,) int64, the positions whose
    log-probability is wanted; sequence_mask (S,) float32, 1; and the stage's fields, per token (T,) or sequence (S,)
    float32. weight 0 makes it a filler: loss_mask and sequence_mask are 0 and it adds nothing to any sum.
    """
    sequences = [sequence for unit in units for sequence in unit]
    lengths = [len(sequence["input_ids"]) for sequence in sequences]
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    T = int(cu_seqlens[-1])
    loss_mask = np.concatenate([sequence["loss_mask"] for sequence in sequences]).astype(np.float32)
    loss_mask[cu_seqlens[:-1]] = 0.0  # the first token of a sequence has nothing before it
    # A row without a target still scores one token, so that every parameter takes part in the backward pass.
    targets = np.flatnonzero(loss_mask) if loss_mask.any() else np.array([min(1, T - 1)])
    batch = {
        "input_ids": np.concatenate([sequence["input_ids"] for sequence in sequences]).astype(np.int64)[None],
        "position_ids": (np.arange(T) - np.repeat(cu_seqlens[:-1], lengths))[None],
        "cu_seqlens": cu_seqlens,
        "loss_mask": loss_mask * np.float32(weight),
        "targets": targets,
        "sequence_mask": np.full(len(lengths), weight, np.float32),
    }
    for name, value in sequences[0].items():
        if name not in ("input_ids", "loss_mask"):
            parts = [sequence[name] for sequence in sequences]
            batch[name] = np.asarray(np.concatenate(parts) if np.ndim(value) else parts, np.float32)
    tensors = {name: torch.from_numpy(np.ascontiguousarray(value)) for name, value in batch.items()}
    return {name: t.to(device, non_blocking=True) for name, t in tensors.items()} | {"lengths": lengths}


class Window:
    """The units of one optimizer step: iterating gives this process's micro-batches, exactly `accumulation` of them."""

    def __init__(self, units: list[Unit], rank: int, world: int, batch_size: int, accumulation: int, device: torch.device):
        self.units = units  # of all processes
        self._place = (rank, world, batch_size, accumulation, device)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rank, world, batch_size, accumulation, device = self._place
        for i in range(accumulation):
            start = (i * world + rank) * batch_size
            mine = self.units[start : start + batch_size]
            # A process without a row at the end of the run takes part with weight 0: its peers wait for its gradients.
            yield flat_batch(mine, device) if mine else flat_batch(self.units[:1], device, weight=0.0)

    def count(self, field: str, which: slice = slice(None)) -> float:
        """Sum of a per-token field over the window, all processes: the denominator of its loss.

        which: the sequences of each unit that count, for instance slice(0, None, 2) for the first of each pair.
        """
        return float(sum(sequence[field][1:].sum() for unit in self.units for sequence in unit[which]))

    @property
    def num_sequences(self) -> int:
        return sum(len(unit) for unit in self.units)

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence["input_ids"]) for unit in self.units for sequence in unit)


class Windows:
    """All windows of a run: `windows[step]` is a pure function of the step."""

    def __init__(
        self,
        units: Sequence[Unit],
        accelerator: Any,
        batch_size: int,
        *,
        seed: int,
        num_epochs: float = 1.0,
        max_steps: int = -1,
    ):
        """units: the training set. The run is max_steps windows, or, where that is not positive, num_epochs passes, of
        which the last window may be short."""
        if not len(units):
            raise UserError("nothing to train on: no row is left")
        self.units, self.seed = units, seed
        accumulation = accelerator.gradient_accumulation_steps
        self._place = (
            accelerator.process_index,
            accelerator.num_processes,
            batch_size,
            accumulation,
            accelerator.device,
        )
        self.size = batch_size * accumulation * accelerator.num_processes
        self.samples = max_steps * self.size if max_steps > 0 else max(1, round(num_epochs * len(units)))

    def __len__(self) -> int:
        return math.ceil(self.samples / self.size)

    def __getitem__(self, step: int) -> Window:
        positions = range(step * self.size, min((step + 1) * self.size, self.samples))
        return Window([self.units[sample_index(i, len(self.units), self.seed)] for i in positions], *self._place)


def sample_index(position: int, N: int, seed: int) -> int:
    """The sample at a position of the run: element `position mod N` of the permutation of epoch `position div N`."""
    return int(_permutation(position // N, N, seed)[position % N])


@lru_cache(maxsize=4)
def _permutation(epoch: int, N: int, seed: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(N)


def eval_batches(units: Sequence[Unit], accelerator: Any, batch_size: int) -> Iterator[dict[str, Any]]:
    """This process's share of an evaluation set, in order: each unit exactly once over all processes.

    All processes get the same number of batches, fillers (weight 0) included.
    """
    step = batch_size * accelerator.num_processes
    for start in range(0, len(units), step):
        mine = [units[i] for i in range(start, min(start + step, len(units)))][
            accelerator.process_index :: accelerator.num_processes
        ]
        yield flat_batch(mine, accelerator.device) if mine else flat_batch([units[0]], accelerator.device, weight=0.0)


def concatenate(documents: Sequence[np.ndarray], max_length: int) -> list[Unit]:
    """All documents end to end, cut into rows of max_length tokens (the rest at the end is a shorter row)."""
    stream = np.concatenate(documents)
    rows = [stream[start : start + max_length] for start in range(0, len(stream), max_length)]
    return [[whole(row)] for row in rows if len(row) > 1]


def whole(ids: np.ndarray) -> dict[str, np.ndarray]:
    """A sequence of which every token is trained."""
    return {"input_ids": ids, "loss_mask": np.ones(len(ids), np.uint8)}


def pack(units: Sequence[Unit], max_length: int) -> list[Unit]:
    """Best-fit decreasing: put units together into packs of at most max_length tokens, none split, each exactly once.

    O(N log N). Raises UserError for a unit that is longer than max_length.
    """
    lengths = np.array([sum(len(sequence["input_ids"]) for sequence in unit) for unit in units])
    packs: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # free room -> packs that have it
    rooms: list[int] = []  # the keys of by_room, sorted
    for i in np.argsort(-lengths, kind="stable"):
        length = int(lengths[i])
        if length > max_length:
            raise UserError(f"--max_length {max_length}: a unit of {length} tokens does not fit in a pack")
        at = bisect.bisect_left(rooms, length)  # the least room in which it fits
        if at == len(rooms):
            packs.append([int(i)])
            chosen, room = len(packs) - 1, max_length - length
        else:
            room = rooms[at]
            chosen = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
            packs[chosen].append(int(i))
            room -= length
        if room not in by_room:
            by_room[room] = []
            bisect.insort(rooms, room)
        by_room[room].append(chosen)
    return [[sequence for i in members for sequence in units[i]] for members in packs]
