"""Batches: the flat row that every stage trains on, and the windows of a run.

A *sequence* is a dict with `input_ids` (n,), `loss_mask` (n,), and any other field that a script's `encode`
adds: arrays of n numbers become per-token fields of the batch, single numbers per-sequence fields. An
*example* is a list of sequences that stay together: one conversation, the chosen and rejected answers of a
pair, a pack. A *micro-batch* is one flat row of examples. A *window* is all micro-batches of all processes
that make one optimizer step.
"""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Listing  # here a Sequence is one of tokens
import itertools
import math
from typing import Any

from accelerate import Accelerator
from common.args import CommonArgs
from common.data.encode import DTYPES, check_sequence, layout_of
from common.data.order import Shuffled
from common.data.sharing import shared_starts
from common.data.token_budget import Budget
from common.data.types import Example, Sequence
from common.errors import UserError
from common.memory import SHARDED, empty_caches, is_oom, to_device
import numpy as np
import torch

Batch = dict[str, Any]  # see flat_batch


def flat_batch(examples: Listing[Example], device: torch.device, weight: float = 1.0) -> Batch:
    """One flat row of examples, T tokens for S sequences.

    Untrained tokens at the start of a sequence that the one before it begins with, too, are in the row once,
    with the first sequence that has them (data/sharing.py).

    Returns input_ids (1, T) and position_ids (1, T) int64; cu_seqlens (S+1,) int64, the boundaries of each
    sequence's own tokens; loss_mask (T,) float32, 0 on the first token of each sequence; targets (N,) int64,
    the positions whose log-probability is needed, and previous (N,) int64, those of the tokens before them;
    sequence_mask (S,) float32, 1; and every other field of the sequences, per token (T,) or per sequence
    (S,), int64, bool or float32. Not tensors: lengths, S ints, of the full sequences, and token_map (sum of
    lengths,) int64, the place in the row of each of their tokens, or None if nothing is shared.

    weight 0 makes it a filler, for a process that has no row left: loss_mask, sequence_mask and all other
    fields of the sequences are 0, and so is a FlatModel's output for it, so that it adds nothing to any sum.
    """
    sequences = sequences_of(examples)
    lengths = lengths_of(sequences)
    shared = shared_starts(sequences)
    # where each sequence's own tokens begin in the row, and where the last ones end
    starts = np.cumsum([0, *lengths]) - np.cumsum([0, *shared])
    T = int(starts[-1])
    before = np.arange(T) - 1  # the place of the token before each: its left neighbour
    token_map = None
    if any(shared):
        places = places_in_row(starts, shared)
        for s, k in enumerate(shared):
            if k:  # its first own token follows the last one that it shares
                before[starts[s]] = places[s][k - 1]
        token_map = np.concatenate(places)

    def row(fields: list[np.ndarray]) -> np.ndarray:
        """The sequences' own tokens, end to end."""
        return np.concatenate([values[k:] for values, k in zip(fields, shared, strict=True)])

    positions = row([np.arange(n) for n in lengths])
    loss_mask = row([sequence["loss_mask"] for sequence in sequences]).astype(np.float32)
    loss_mask[positions == 0] = 0.0  # the first token of a sequence has no predecessor
    targets = np.flatnonzero(loss_mask)
    if not len(targets):
        # one token is scored all the same, so that every parameter takes part in the backward pass
        targets = np.array([min(1, T - 1)])
    batch = {
        "input_ids": row([sequence["input_ids"] for sequence in sequences]).astype(np.int64)[None],
        "position_ids": positions[None],
        "cu_seqlens": starts,
        "loss_mask": loss_mask * np.float32(weight),
        "targets": targets,
        "previous": before[targets].clip(min=0),
        "sequence_mask": np.full(len(lengths), weight, np.float32),
    }
    for name in sequences[0]:
        if name in ("input_ids", "loss_mask"):
            continue
        values = [sequence[name] for sequence in sequences]
        is_per_token = np.ndim(values[0]) > 0
        values = row(values) if is_per_token else np.asarray(values)
        if not weight:
            values = np.zeros_like(values)
        batch[name] = values.astype(DTYPES[values.dtype.kind])
    for name, values in batch.items():
        batch[name] = to_device(values, device)
    return batch | {"lengths": lengths, "token_map": token_map}


def sequences_of(examples: Iterable[Example]) -> list[Sequence]:
    """The sequences of all examples, in their order."""
    return list(itertools.chain.from_iterable(examples))


def lengths_of(sequences: Listing[Sequence]) -> list[int]:
    return [len(sequence["input_ids"]) for sequence in sequences]


def places_in_row(starts: np.ndarray, shared: list[int]) -> list[np.ndarray]:
    """For each sequence the places of its tokens in the row: its first `shared` ones are where the sequence
    before it has them, its own ones lie between two `starts`."""
    places: list[np.ndarray] = []
    for start, end, k in zip(starts, starts[1:], shared, strict=False):
        own = np.arange(start, end)
        if k:
            own = np.concatenate([places[-1][:k], own])
        places.append(own)
    return places


def split_row(values: torch.Tensor, batch: Batch) -> list[torch.Tensor]:
    """Per-token results of a flat batch (T,), split by full sequence: S tensors (n,), each including a shared
    prefix."""
    if batch["token_map"] is not None:
        values = values[to_device(batch["token_map"], values.device)]
    return list(values.split(batch["lengths"]))


def sizes_in_row(units: list[Example]) -> list[int]:
    """How many tokens each of these neighbours adds to a row: those that it shares with the one before are
    there already."""
    shared = shared_starts(sequences_of(units))
    sizes = []
    first = 0
    for unit in units:
        end = first + len(unit)
        sizes.append(sum(lengths_of(unit)) - sum(shared[first:end]))
        first = end
    return sizes


def split_evenly(units: list[Example], sizes: list[int], num_parts: int) -> list[list[Example]]:
    """The units, in their order, as num_parts parts of about equal size, without the empty ones. A unit goes
    to the part in which its middle lies."""
    total = sum(sizes)
    parts: dict[int, list[Example]] = {}
    start = 0
    for unit, size in zip(units, sizes, strict=True):
        middle = start + size / 2
        part = int(middle * num_parts // total)
        parts.setdefault(part, []).append(unit)
        start += size
    return list(parts.values())


class Window:
    """The examples of one optimizer step: iterating yields this process's micro-batches."""

    def __init__(
        self,
        accelerator: Accelerator,
        examples: list[Example],
        mine: list[list[int]],
        *,
        indivisible: int = 1,
        origins: Callable[[], list[str]] | None = None,
    ):
        """examples: those of all processes. mine: for each micro-batch of this process, the indices of its
        examples; every process has the same number of micro-batches. indivisible: sequences of an example
        that stay together even if a micro-batch is split: 2 for pairs. origins(): the source and row of each
        example; None if the script has made them, which are then checked and converted like those of
        `encode`.

        Raises UserError for an example whose sequences cannot be divided in this way, and if the check fails.
        """
        if origins is None:
            for sequence in sequences_of(examples):
                sequence.update(check_sequence(sequence))
            layout_of(sequences_of(examples), "a window")
        for example in examples:
            if len(example) % indivisible:
                raise UserError(
                    f"encode gave an example of {len(example)} sequences: this script needs {indivisible} each"
                )
        self.examples = examples
        self.origins = origins
        self._accelerator = accelerator
        self._mine = mine
        self._indivisible = indivisible
        self.backward_calls = 0  # of this pass over the micro-batches
        self.split(1)

    def split(self, parts: int, tokens: float = math.inf) -> "Window":
        """From now on split each micro-batch into this many parts, and these into parts of at least about
        `tokens` tokens, as far as possible. The gradient of the window stays the same."""
        self._micro_batches: list[list[Example]] = []
        for members in self._mine:
            units = []
            for i in members:
                units += self._units_of(self.examples[i])
            if not units:
                # a process without a row at the end of the run still takes part: its peers wait for its gradients
                self._micro_batches.append([])
                continue
            sizes = sizes_in_row(units)
            tokens_of_part = sum(sizes) / parts
            further_parts = max(1, int(tokens_of_part / tokens))
            self._micro_batches += split_evenly(units, sizes, parts * further_parts)
        return self

    def _units_of(self, example: Example) -> list[Example]:
        """The parts of an example that are never split: pairs, or single sequences."""
        step = self._indivisible
        return [example[first : first + step] for first in range(0, len(example), step)]

    def __len__(self) -> int:
        return len(self._micro_batches)

    def __iter__(self) -> Iterator[Batch]:
        self._accelerator.gradient_accumulation_steps = len(self)
        # Accelerate's count of micro-batches: a window may have been abandoned half way
        self._accelerator.step = 0
        self.backward_calls = 0
        for units in self._micro_batches:
            if units:
                yield flat_batch(units, self._accelerator.device)
            else:
                yield flat_batch(self.examples[:1], self._accelerator.device, weight=0.0)

    def backward(self, loss: torch.Tensor) -> None:
        """Accelerate's backward pass, of a micro-batch's share of a sum over the window. Accelerate averages
        over the micro-batches of a process, and DDP over the processes: the factor undoes both.

        Raises UserError for more than one of a micro-batch on several processes, of which DDP would add up
        the first alone.
        """
        self.backward_calls += 1
        if self._accelerator.num_processes > 1 and self.backward_calls > len(self):
            raise UserError(
                "more than one window.backward(loss) of a micro-batch: with several processes add up its losses first"
            )
        self._accelerator.backward(loss * (len(self) * self._accelerator.num_processes))

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences of this process's micro-batches."""
        units = itertools.chain.from_iterable(self._micro_batches)
        return sequences_of(units)

    @property
    def num_sequences(self) -> int:
        """Sequences of all processes."""
        return len(sequences_of(self.examples))

    @property
    def num_tokens(self) -> int:
        """Tokens of all processes."""
        return sum(lengths_of(sequences_of(self.examples)))

    def total(self, *fields: str, sequences: slice = slice(None)) -> float:
        """Sum over the window, all processes, of a field, or of a product of fields, as they arrive in the
        batches: the denominator of a loss. (There, loss_mask is 0 on the first token of each sequence, which
        nothing predicts; a script's own field is as returned by `encode`, so that total("loss_mask",
        "weight") counts what reaches the loss.)

        sequences: those of each example that count, for instance slice(0, None, 2) for the first of each
        pair.
        """
        counted = sequences_of(example[sequences] for example in self.examples)
        total = 0.0
        for sequence in counted:
            product = np.float64(1.0)
            for field in fields:
                values = np.array(sequence[field], np.float64)
                if field == "loss_mask":
                    values[0] = 0.0
                product = product * values
            total += product.sum()
        return float(total)

    @torch.no_grad()
    def add_fields(self, values: Callable[[Batch], dict[str, torch.Tensor]]) -> None:
        """Add per-token fields to every sequence of this process: values(batch), (T,) by name, computed
        without gradients. A prepared model and a `Reference` follow autocast by themselves.

        If memory runs out a micro-batch is processed in two halves, unless processes call a sharded model
        together.
        """
        waiting = [units or self.examples[:1] for units in self._micro_batches]
        for units in waiting:  # grows during the loop
            batch = flat_batch(units, self._accelerator.device)
            try:
                fields = {name: field.cpu() for name, field in values(batch).items()}
            except (RuntimeError, MemoryError) as error:
                if not is_oom(error) or len(units) < 2 or self._accelerator.distributed_type in SHARDED:
                    raise
                fields = None
            if fields is None:  # by now the exception is gone, and with it the tensors of its frames
                empty_caches(self._accelerator.device)
                half = len(units) // 2
                waiting += [units[:half], units[half:]]
                continue
            sequences = sequences_of(units)
            for name, field in fields.items():
                for sequence, part in zip(sequences, split_row(field, batch), strict=True):
                    sequence[name] = part.numpy()

    @property
    def most_parts(self) -> int:
        """The largest number of parts into which any micro-batch can be split."""
        counts = []
        for members in self._mine:
            num_sequences = sum(len(self.examples[i]) for i in members)
            counts.append(num_sequences // self._indivisible)
        return max(counts)

    def largest_lengths(self) -> list[int]:
        """The lengths of the sequences of the micro-batch with the most tokens."""
        lengths = [lengths_of(sequences_of(units)) for units in self._micro_batches]
        return max(lengths, key=sum)


class Windows:
    """All windows of a run: `windows[step]` is a pure function of the step."""

    def __init__(
        self,
        args: CommonArgs,
        accelerator: Accelerator,
        train: Shuffled,
        *,
        max_tokens: int = 0,
        indivisible: int = 1,
    ):
        """train: the example at each position of the run (or a stream of them). indivisible: see Window.

        A window has gradient_accumulation_steps micro-batches on each process, each of
        per_device_train_batch_size examples; or, if max_tokens is positive, of up to max_tokens tokens,
        distributed so that all cost about the same. The run lasts max_steps windows, or, if that is not
        positive, num_train_epochs passes, of which the last window may be smaller.
        """
        self.train = train
        self.max_tokens = max_tokens
        self.max_steps = args.max_steps
        self.longest = train.examples.longest  # tokens of the longest sequence
        self._accelerator = accelerator
        self._batch_size = args.per_device_train_batch_size
        self._indivisible = indivisible
        # micro-batches per window
        self._parts = accelerator.gradient_accumulation_steps * accelerator.num_processes
        self.size = self._batch_size * self._parts  # examples per window
        # Compared when a run resumes: with another value the same number of steps has used other examples.
        self.step_size = f"{self._parts} micro-batches" if max_tokens else f"{self.size} samples"
        # the position at which the run ends; None: as many steps as asked for, whatever they hold
        if args.max_steps <= 0:
            self.end = max(1, round(args.num_train_epochs * len(train)))
        else:
            self.end = None if max_tokens else args.max_steps * self.size
        # A resumed stream goes on at the position it had. If a step had another size before, that is not step ·
        # size: this is the difference.
        self._shift = 0
        self._budget = Budget(train, self._parts, max_tokens, self.end) if max_tokens else None

    def __len__(self) -> int:
        if self.max_steps > 0:
            return self.max_steps
        return math.ceil(self.end / self.size) if self._budget is None else len(self._budget)

    def __getitem__(self, step: int) -> Window:
        positions = range(self.start(step), self.start(step + 1))
        examples = [self.train[position] for position in positions]
        micro_batches = self.dealt(step)
        mine = micro_batches[self._accelerator.process_index :: self._accelerator.num_processes]

        def origins() -> list[str]:
            return [self.train.where(position) for position in positions]

        return Window(self._accelerator, examples, mine, indivisible=self._indivisible, origins=origins)

    def dealt(self, step: int) -> list[list[int]]:
        """The examples of each of a window's micro-batches, over all processes: the first is process 0's, the
        second process 1's. Planned from lengths alone, the same on every process."""
        if self._budget is not None:
            return self._budget.dealt(step)
        num_examples = self.start(step + 1) - self.start(step)
        micro_batches = []
        for i in range(self._parts):
            first = min(i * self._batch_size, num_examples)  # the last window may be smaller
            end = min(first + self._batch_size, num_examples)
            micro_batches.append(list(range(first, end)))
        return micro_batches

    def start(self, step: int) -> int:
        """The position at which a window starts."""
        if self._budget is not None:
            return self._budget.start(step)
        return min(step * self.size, self.end) + self._shift

    def plan(self) -> dict[str, Any]:
        """The plan of the run: steps, examples and tokens per step, steps per epoch (None for a stream), and
        the sizes of the examples in the largest micro-batch, judging by the first windows."""
        steps = min(len(self), 50)
        num_examples = num_tokens = 0
        micro_batches = []
        for step in range(steps):  # in order: a stream does not go back
            sizes = [self.train.size(i) for i in range(self.start(step), self.start(step + 1))]
            num_examples += len(sizes)
            num_tokens += sum(sizes)
            for members in self.dealt(step):
                micro_batches.append([sizes[i] for i in members])
        per_step = num_examples / steps if self.max_tokens else self.size
        is_stream = not hasattr(self.train, "__len__")
        return {
            "steps": len(self),
            "examples_per_step": round(per_step, 1),
            "tokens_per_step": round(num_tokens / steps),
            "steps_per_epoch": None if is_stream else round(len(self.train) / per_step, 2),
            "largest_micro_batch": max(micro_batches, key=sum),
        }

    def state(self, step: int) -> dict[str, Any]:
        """State for a checkpoint, so that a resumed run need not read a stream from its start to find its
        place."""
        if not hasattr(self.train, "state"):
            return {}  # the order is recomputed
        return {"position": self.start(step), **self.train.state(self.start(step))}

    def restore(self, step: int, state: dict[str, Any]) -> None:
        """Resume at a step from the result of `state(step)`."""
        if state:
            self._shift = state["position"] - step * self.size
            if self._budget is not None:
                self._budget.restore(step, state["position"])
            self.train.restore(state)


def eval_batches(
    examples: Listing[Example], accelerator: Any, batch_size: int, indices: Listing[int] | None = None
) -> Iterator[Batch]:
    """This process's share of an evaluation set: each example exactly once over all processes, and on this one
    indices[process_index :: num_processes], in order. indices: of the examples; None: all.

    All processes get the same number of batches, including fillers (weight 0).
    """
    if indices is None:
        indices = range(len(examples))
    step = batch_size * accelerator.num_processes
    for start in range(0, len(indices), step):
        members = indices[start : start + step]
        mine = members[accelerator.process_index :: accelerator.num_processes]
        if mine:
            yield flat_batch([examples[i] for i in mine], accelerator.device)
        else:
            yield flat_batch([examples[members[0]]], accelerator.device, weight=0.0)
