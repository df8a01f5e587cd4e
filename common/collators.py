"""Batches: windows, packing, and the flat row that every stage trains on.

The words: a *sequence* is a dict with `input_ids` (n,) and `loss_mask` (n,) and, where a stage needs them, more fields:
arrays of n become per-token fields of the batch, numbers become per-sequence fields. A *unit* is a list of sequences that
stay together: one conversation, the chosen and rejected answer of a pair, a pack. A *micro-batch* is one flat row of
units. A *window* is all micro-batches of all processes that make one optimizer step. Which unit comes when is the
business of `order.py`.
"""

import bisect
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from common.errors import UserError
from common.memory import to_device

import numpy as np
import torch

Unit = list[dict[str, Any]]
LEAST_SHARED = 8  # tokens: a start shorter than this costs about what it saves


def flat_batch(units: Sequence[Unit], device: torch.device, weight: float = 1.0) -> dict[str, Any]:
    """One flat row of units, T tokens for S sequences.

    A sequence that begins as the one before it shares those tokens (`shared_start`): the row holds them once, with the
    first sequence that has them.

    Returns input_ids (1, T) and position_ids (1, T) int64; cu_seqlens (S+1,) int64, the borders of what each sequence has
    for itself; loss_mask (T,) float32, 0 on the first token of each sequence; targets (N,) int64, the positions whose
    log-probability is wanted, and previous (N,) int64, those of the tokens before them; sequence_mask (S,) float32, 1; and
    the stage's fields, per token (T,) or sequence (S,) float32. Not tensors: lengths, S ints, of the sequences in full,
    and places (sum of lengths,) int64, the token of the row that each of their tokens is, or None where nothing is shared.
    weight 0 makes it a filler: loss_mask and sequence_mask are 0 and it adds nothing to any sum.
    """
    sequences = [sequence for unit in units for sequence in unit]
    lengths = [len(sequence["input_ids"]) for sequence in sequences]
    shared = shared_starts(sequences)
    starts = np.cumsum([0, *lengths])
    column = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    own = column >= np.repeat(shared, lengths)  # of all tokens of the sequences, end to end, those that enter the row
    places = np.cumsum(own) - 1
    for s in np.flatnonzero(shared):
        places[starts[s] : starts[s] + shared[s]] = places[starts[s - 1] : starts[s - 1] + shared[s]]

    def row(name: str) -> np.ndarray:
        return np.concatenate([sequence[name] for sequence in sequences])[own]

    positions = column[own]
    T = len(positions)
    loss_mask = row("loss_mask").astype(np.float32)
    loss_mask[positions == 0] = 0.0  # the first token of a sequence has nothing before it
    # A row without a target still scores one token, so that every parameter takes part in the backward pass.
    targets = np.flatnonzero(loss_mask) if loss_mask.any() else np.array([min(1, T - 1)])
    batch = {
        "input_ids": row("input_ids").astype(np.int64)[None],
        "position_ids": positions[None],
        "cu_seqlens": np.cumsum([0, *lengths]) - np.cumsum([0, *shared]),
        "loss_mask": loss_mask * np.float32(weight),
        "targets": targets,
        "previous": places[np.flatnonzero(own)[targets] - 1],
        "sequence_mask": np.full(len(lengths), weight, np.float32),
    }
    for name, value in sequences[0].items():
        if name not in ("input_ids", "loss_mask"):
            values = row(name) if np.ndim(value) else [sequence[name] for sequence in sequences]
            batch[name] = np.asarray(values, np.float32)
    tensors = {name: to_device(value, device) for name, value in batch.items()}
    return tensors | {"lengths": lengths, "places": places if any(shared) else None}


def shared_starts(sequences: Sequence[dict[str, Any]]) -> list[int]:
    """How many tokens each sequence of a row shares with the one before it."""
    return [0, *(shared_start(*neighbours) for neighbours in itertools.pairwise(sequences))]


def shared_start(one: dict[str, Any], other: dict[str, Any]) -> int:
    """With how many tokens of its neighbour the other sequence begins, none of which it trains; 0 for less than pays."""
    a, b, mask = one["input_ids"], other["input_ids"], other["loss_mask"]
    n = min(len(a), len(b))
    if n < LEAST_SHARED or a[LEAST_SHARED - 1] != b[LEAST_SHARED - 1]:
        return 0
    differs = (a[:n] != b[:n]) | (mask[:n] != 0)
    n = int(differs.argmax()) if differs.any() else n
    return n if n >= LEAST_SHARED else 0


def split_row(values: torch.Tensor, batch: dict[str, Any]) -> list[torch.Tensor]:
    """Per-token results of a flat batch (T,) for each sequence in full: S tensors (n,), a shared start in each of them."""
    if batch["places"] is not None:
        values = values[to_device(batch["places"], values.device)]
    return list(values.split(batch["lengths"]))


class Window:
    """The units of one optimizer step: iterating gives this process's micro-batches."""

    def __init__(
        self, units: list[Unit], mine: list[list[int]], accelerator: Any, *, indivisible: int = 1, places: Any = None
    ):
        """units: of all processes. mine: for each micro-batch of this process, which of them; as many micro-batches as on
        any other process. indivisible: how many sequences of a unit stay together even where it is cut: 2 for pairs.
        places(): where the units come from, as a source and a row for each."""
        self.units, self.places = units, places
        self._accelerator, self._mine, self._indivisible = accelerator, mine, indivisible
        self._micro_batches = self._cut(1, math.inf)

    def cut(self, parts: int, tokens: float = math.inf) -> "Window":
        """From now on each micro-batch is cut into so many parts, these into parts of about so many tokens or some more,
        as far as it can be."""
        self._micro_batches = self._cut(parts, tokens)
        return self

    def _cut(self, parts: int, tokens: float) -> list[list[Unit]]:
        found = []
        for members in self._mine:
            step = self._indivisible
            atoms = [unit[at : at + step] for i in members for unit in [self.units[i]] for at in range(0, len(unit), step)]
            if not atoms:  # a process without a row at the end of the run takes part: its peers wait for its gradients
                found.append([])
                continue
            sequences = [sequence for atom in atoms for sequence in atom]
            own = np.array([len(sequence["input_ids"]) for sequence in sequences]) - shared_starts(sequences)
            sizes = np.add.reduceat(own, np.cumsum([0, *map(len, atoms[:-1])]))
            here = parts * max(1, int(sizes.sum() / parts / tokens))
            part = (sizes.cumsum() - sizes / 2) * here // sizes.sum()  # about equal numbers of tokens
            found += [[atoms[i] for i in np.flatnonzero(part == k)] for k in range(here) if (part == k).any()]
        return found

    def __len__(self) -> int:
        return len(self._micro_batches)

    @property
    def unmean(self) -> int:
        """Undoes the mean over micro-batches, which Accelerate takes, and the mean over processes, which DDP takes."""
        return len(self) * self._accelerator.num_processes

    def micro_batches(self) -> list[list[Unit]]:
        """The units of each; of a process without a row, one of another process."""
        return [atoms or self.units[:1] for atoms in self._micro_batches]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._accelerator.gradient_accumulation_steps = len(self)
        self._accelerator.step = 0  # of Accelerate's count of micro-batches: a window may have been given up in the middle
        for atoms in self._micro_batches:
            yield flat_batch(atoms or self.units[:1], self._accelerator.device, weight=1.0 if atoms else 0.0)

    @property
    def most_parts(self) -> int:
        """Into how many parts the micro-batch that can be cut most can be cut."""
        step = self._indivisible
        return max(sum(len(self.units[i]) // step for i in members) for members in self._mine)

    def largest(self) -> list[int]:
        """The lengths of the sequences of the micro-batch with the most tokens."""
        lengths = [[len(sequence["input_ids"]) for atom in atoms for sequence in atom] for atoms in self._micro_batches]
        return max(lengths, key=sum)

    def count(self, field: str, which: slice = slice(None)) -> float:
        """Sum of a per-token field over the window, all processes: the denominator of its loss.

        which: the sequences of each unit that count, for instance slice(0, None, 2) for the first of each pair.
        """
        return float(sum(sequence[field][1:].sum() for unit in self.units for sequence in unit[which]))

    def trained_share(self) -> float:
        """The share of the tokens that are trained."""
        return self.count("loss_mask") / max(1, self.num_tokens)

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
        samples: Any,
        accelerator: Any,
        batch_size: int,
        *,
        num_epochs: float = 1.0,
        max_steps: int = -1,
        max_tokens: int = 0,
        indivisible: int = 1,
    ):
        """samples: the unit at each position of the run, order.Shuffled or stream.Stream. indivisible: see Window.

        A window has gradient_accumulation_steps micro-batches on each process, each of batch_size units; or, where
        max_tokens is positive, of up to max_tokens tokens, dealt out so that all cost about the same. The run is max_steps
        windows, or, where that is not positive, num_epochs passes, of which the last window may be short.
        """
        self.samples, self.max_tokens, self.max_steps = samples, max_tokens, max_steps
        self._accelerator, self._batch_size, self._indivisible = accelerator, batch_size, indivisible
        self._parts = accelerator.gradient_accumulation_steps * accelerator.num_processes  # micro-batches of a window
        self.size = batch_size * self._parts
        if max_steps <= 0:
            self.end = max(1, round(num_epochs * len(samples)))
        else:
            self.end = None if max_tokens else max_steps * self.size
        self._shift = 0  # of a stream that is resumed on another number of processes, and goes on where it was
        self._borders = {0: 0}  # with max_tokens: step -> position, as far as it is known

    def __len__(self) -> int:
        if self.max_steps > 0:
            return self.max_steps
        if not self.max_tokens:
            return math.ceil(self.end / self.size)
        last = max(self._borders)
        while self.start(last) < self.end:
            last += 1
        return last

    def __getitem__(self, step: int) -> Window:
        positions = range(self.start(step), self.start(step + 1))
        units = [self.samples[position] for position in positions]
        if self.max_tokens:
            sizes = [self.samples.size(position) for position in positions]
            parts = balance(sizes, self._parts, self.max_tokens)
        else:
            B = self._batch_size
            parts = [list(range(i * B, min((i + 1) * B, len(units)))) for i in range(self._parts)]
        mine = parts[self._accelerator.process_index :: self._accelerator.num_processes]
        return self._window(units, mine, lambda: [self.samples.where(i) for i in positions])

    def largest(self) -> Window:
        """A window of one micro-batch, or of two where a step has more: the longest units that the run can meet together."""
        units = self.samples.units  # of a stream: of its first block
        longest = np.argsort(-units.lengths, kind="stable").tolist()
        if self.max_tokens:
            fits = np.cumsum(units.lengths[longest]) <= self.max_tokens
            chosen = longest[: max(1, int(fits.sum()))]
        else:
            chosen = longest[: self._batch_size]
        several = self._parts > self._accelerator.num_processes
        members = list(range(len(chosen)))
        return self._window([units[i] for i in chosen], [members] * (1 + several))

    def _window(self, units: list[Unit], mine: list[list[int]], places: Any = None) -> Window:
        return Window(units, mine, self._accelerator, indivisible=self._indivisible, places=places)

    def start(self, step: int) -> int:
        """The position at which a window starts."""
        if not self.max_tokens:
            return min(step * self.size, self.end) + self._shift
        known = step
        while known not in self._borders:
            known -= 1
        for at in range(known, step):
            self._borders[at + 1] = self._fill(self._borders[at])
        return self._borders[step]

    def _fill(self, position: int) -> int:
        """Where the window ends that starts at a position: the emptiest micro-batch has no room for the next unit."""
        loads = [0] * self._parts  # a heap
        while self.end is None or position < self.end:
            size = self.samples.size(position)
            if size > self.max_tokens:
                raise UserError(f"--max_tokens_per_batch {self.max_tokens}: one unit alone has {size} tokens")
            if loads[0] + size > self.max_tokens:
                break
            heapq.heapreplace(loads, loads[0] + size)
            position += 1
        return position

    def plan(self) -> dict[str, Any]:
        """What the run will be: steps, units and tokens of a step, steps of an epoch (None for a stream), and the sizes of
        the units in the largest micro-batch, as far as the first windows tell."""
        some = range(min(len(self), 50))
        sizes = [[self.samples.size(i) for i in range(self.start(step), self.start(step + 1))] for step in some]
        if self.max_tokens:
            micro_batches = [[s[i] for i in part] for s in sizes for part in balance(s, self._parts, self.max_tokens)]
        else:
            B = self._batch_size
            micro_batches = [s[i : i + B] for s in sizes for i in range(0, len(s), B)]
        units = sum(map(len, sizes)) / len(sizes) if self.max_tokens else self.size
        plan = {
            "steps": len(self),
            "units_per_step": round(units, 1),
            "tokens_per_step": round(sum(map(sum, sizes)) / len(sizes)),
            "steps_per_epoch": round(len(self.samples) / units, 2) if hasattr(self.samples, "__len__") else None,
            "largest_micro_batch": max(micro_batches, key=sum),
        }
        if self.max_tokens:
            plan["utilisation"] = plan["tokens_per_step"] / (self._parts * self.max_tokens)
        return plan

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps, so that a resumed run need not read a stream from its start to find its place."""
        if not hasattr(self.samples, "state"):
            return {}  # the order is computed
        return {"position": self.start(step), **self.samples.state(self.start(step))}

    def restore(self, step: int, state: dict[str, Any]) -> None:
        """Go on at a step with what `state(step)` gave."""
        if state:
            self._borders[step] = state["position"]
            self._shift = state["position"] - step * self.size
            self.samples.restore(state)


def balance(sizes: Sequence[int], parts: int, max_tokens: int) -> list[list[int]]:
    """Units of these many tokens dealt out to micro-batches of at most max_tokens, so that all cost about the same.

    The largest first, each to the cheapest micro-batch that has room. Micro-batches of similar cost follow one another, so
    that processes work side by side on equal ones.
    """
    # Attention inside a sequence of n tokens against all else that is done to them: n / 12 D, here for D = 1024.
    costs = [size + size * size / 12288 for size in sizes]
    dearest_first = sorted(range(len(sizes)), key=lambda i: -costs[i])
    # Where that finds no room: one after the other, each to the emptiest, as `Windows` has found room for them.
    for order, by in ((dearest_first, costs), (range(len(sizes)), sizes)):
        members: list[list[int]] = [[] for _ in range(parts)]
        totals, loads = [0.0] * parts, [0] * parts
        for i in order:
            roomy = [k for k in range(parts) if loads[k] + sizes[i] <= max_tokens]
            if not roomy:
                break
            k = min(roomy, key=lambda k: totals[k])
            members[k].append(i)
            totals[k] += by[i]
            loads[k] += sizes[i]
        else:
            return [sorted(members[k]) for k in sorted(range(parts), key=lambda k: -totals[k])]
    raise UserError(f"--max_tokens_per_batch {max_tokens}: {sum(sizes)} tokens do not fit in {parts} micro-batches")


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


def whole(ids: np.ndarray) -> dict[str, np.ndarray]:
    """A sequence of which every token is trained."""
    return {"input_ids": ids, "loss_mask": np.ones(len(ids), np.uint8)}


class Packs:
    """Packs of the units of a set (see units.Units): `packs[i]` holds the sequences of several of them."""

    def __init__(self, units: Any, members: list[np.ndarray], counts: list[int], max_length: int):
        """members: for each pack, which units. counts: packs of each source."""
        self.units, self.members, self.counts, self.max_length = units, members, counts, max_length
        self.sources = units.sources
        self.lengths = np.array([units.lengths[pack].sum() for pack in members], np.int64)
        self.difficulty = units.difficulty
        if self.difficulty is not None:
            self.difficulty = np.array([units.difficulty[pack].mean() for pack in members])

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, i: int) -> Unit:
        return [sequence for j in self.members[i] for sequence in self.units[int(j)]]

    def where(self, i: int) -> str:
        return ", ".join(self.units.where(int(j)) for j in self.members[i])

    def of_source(self, s: int) -> "Packs":
        first = sum(self.counts[:s])
        return Packs(self.units, self.members[first : first + self.counts[s]], [self.counts[s]], self.max_length)

    def facts(self) -> list[dict[str, Any]]:
        return self.units.facts()

    @property
    def utilisation(self) -> float:
        """The share of the packs that is filled."""
        return float(self.lengths.sum() / max(1, len(self) * self.max_length))


def pack(units: Any, max_length: int, bands: int = 1) -> Packs:
    """The units of each source (see units.Units) in packs of at most max_length tokens, none split, each exactly once.

    bands: for a curriculum, only units of similar difficulty share a pack.
    """
    members, counts, first = [], [], 0
    for count in units.counts:
        these = np.arange(first, first + count)
        if bands > 1 and units.difficulty is not None:
            these = these[np.argsort(units.difficulty[these], kind="stable")]
        before = len(members)
        for part in np.array_split(these, bands):
            members += [part[chosen] for chosen in best_fit(units.lengths[part], max_length)]
        counts.append(len(members) - before)
        first += count
    return Packs(units, members, counts, max_length)


def best_fit(lengths: np.ndarray, max_length: int) -> list[list[int]]:
    """Best-fit decreasing bin packing: for each pack, which of the units are in it. O(N log N).

    Raises UserError for a unit that is longer than max_length.
    """
    packs: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # free room -> packs that have it
    rooms: list[int] = []  # the keys of by_room, sorted
    for i in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[i])
        if length > max_length:
            raise UserError(f"--max_length {max_length}: a unit of {length} tokens does not fit in a pack")
        at = bisect.bisect_left(rooms, length)  # the least room in which it fits
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
