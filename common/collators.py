"""Batches: the flat row that every stage trains on, and the windows of a run.

A *sequence* is a dict with `input_ids` (n,), `loss_mask` (n,), and any other field that a script's `encode`
adds: arrays of n numbers become per-token fields of the batch, single numbers per-sequence fields. An
*example* is a list of sequences that stay together: one conversation, the chosen and rejected answers of a
pair, a pack. A *micro-batch* is one flat row of examples. A *window* is all micro-batches of all processes
that make one optimizer step.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Listing
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

    A sequence that begins like the one before it shares those tokens (`shared_start`): the row holds them
    once, with the first sequence that has them.

    Returns input_ids (1, T) and position_ids (1, T) int64; cu_seqlens (S+1,) int64, the boundaries of each
    sequence's own tokens; loss_mask (T,) float32, 0 on the first token of each sequence; targets (N,) int64,
    the positions whose log-probability is needed, and previous (N,) int64, those of the tokens before them;
    sequence_mask (S,) float32, 1; and every other field of the sequences, per token (T,) or per sequence
    (S,), int64, bool or float32. Not tensors: lengths, S ints, of the full sequences, and token_map (sum of
    lengths,) int64, the place in the row of each of their tokens, or None if nothing is shared.

    weight 0 makes it a filler, for a process that has no row left: loss_mask, sequence_mask and all other
    fields of the sequences are 0, and so is a FlatModel's output for it, so that it adds nothing to any sum.
    """
    sequences = [sequence for example in examples for sequence in example]
    lengths = [len(sequence["input_ids"]) for sequence in sequences]
    shared = shared_starts(sequences)
    starts = np.cumsum([0, *lengths])
    column = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    # which tokens of the sequences, end to end, are put into the row
    own = column >= np.repeat(shared, lengths)
    token_map = np.cumsum(own) - 1
    for s in np.flatnonzero(shared):
        token_map[starts[s] : starts[s] + shared[s]] = token_map[starts[s - 1] : starts[s - 1] + shared[s]]

    def row(name: str) -> np.ndarray:
        return np.concatenate([sequence[name] for sequence in sequences])[own]

    positions = column[own]
    T = len(positions)
    loss_mask = row("loss_mask").astype(np.float32)
    loss_mask[positions == 0] = 0.0  # the first token of a sequence has no predecessor
    # A row without a target still scores one token, so that every parameter takes part in the backward pass.
    targets = np.flatnonzero(loss_mask) if loss_mask.any() else np.array([min(1, T - 1)])
    batch = {
        "input_ids": row("input_ids").astype(np.int64)[None],
        "position_ids": positions[None],
        "cu_seqlens": np.cumsum([0, *lengths]) - np.cumsum([0, *shared]),
        "loss_mask": loss_mask * np.float32(weight),
        "targets": targets,
        "previous": token_map[np.flatnonzero(own)[targets] - 1],
        "sequence_mask": np.full(len(lengths), weight, np.float32),
    }
    for name, value in sequences[0].items():
        if name not in ("input_ids", "loss_mask"):
            values = np.asarray(row(name) if np.ndim(value) else [sequence[name] for sequence in sequences])
            batch[name] = (values * weight).astype(DTYPES[values.dtype.kind])
    tensors = {name: to_device(value, device) for name, value in batch.items()}
    return tensors | {"lengths": lengths, "token_map": token_map if any(shared) else None}


def split_row(values: torch.Tensor, batch: Batch) -> list[torch.Tensor]:
    """Per-token results of a flat batch (T,), split by full sequence: S tensors (n,), each including a shared
    prefix."""
    if batch["token_map"] is not None:
        values = values[to_device(batch["token_map"], values.device)]
    return list(values.split(batch["lengths"]))


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
        num_tokens: int | None = None,
    ):
        """examples: those of all processes. mine: for each micro-batch of this process, the indices of its
        examples; every process has the same number of micro-batches. indivisible: sequences of an example
        that stay together even if a micro-batch is split: 2 for pairs. origins(): the source and row of each
        example. num_tokens: over all processes, if `examples` does not contain all of them."""
        if num_tokens is not None:  # made by the script: checked as what `encode` returns
            layout_of([check_sequence(sequence) for example in examples for sequence in example], "a window")
        self.examples, self.origins, self._num_tokens = examples, origins, num_tokens
        self._accelerator, self._mine, self._indivisible = accelerator, mine, indivisible
        self._micro_batches = self._split(1, math.inf)
        self.backward_calls = 0  # of this pass over the micro-batches

    def split(self, parts: int, tokens: float = math.inf) -> "Window":
        """From now on split each micro-batch into this many parts, and these into parts of at least about
        `tokens` tokens, as far as possible. The gradient of the window stays the same."""
        self._micro_batches = self._split(parts, tokens)
        return self

    def _split(self, parts: int, tokens: float) -> list[list[Example]]:
        found = []
        for members in self._mine:
            step = self._indivisible
            atoms = [
                example[at : at + step]
                for i in members
                for example in [self.examples[i]]
                for at in range(0, len(example), step)
            ]
            # a process without a row at the end of the run still takes part: its peers wait for its gradients
            if not atoms:
                found.append([])
                continue
            sequences = [sequence for atom in atoms for sequence in atom]
            own = np.array([len(sequence["input_ids"]) for sequence in sequences]) - shared_starts(sequences)
            sizes = np.add.reduceat(own, np.cumsum([0, *map(len, atoms[:-1])]))
            here = parts * max(1, int(sizes.sum() / parts / tokens))
            part = (sizes.cumsum() - sizes / 2) * here // sizes.sum()  # about equal numbers of tokens
            part = np.minimum(part, here - 1)  # a last sequence may have no token of its own
            found += [[atoms[i] for i in np.flatnonzero(part == k)] for k in range(here) if (part == k).any()]
        return found

    def __len__(self) -> int:
        return len(self._micro_batches)

    def __iter__(self) -> Iterator[Batch]:
        self._accelerator.gradient_accumulation_steps = len(self)
        # Accelerate's count of micro-batches: a window may have been abandoned half way
        self._accelerator.step = 0
        self.backward_calls = 0
        for atoms in self._micro_batches:
            yield flat_batch(
                atoms or self.examples[:1], self._accelerator.device, weight=1.0 if atoms else 0.0
            )

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
        return [sequence for atoms in self._micro_batches for atom in atoms for sequence in atom]

    @property
    def num_sequences(self) -> int:
        """Sequences of all processes. Raises ValueError as `total` does."""
        self._require_all("num_sequences")
        return sum(len(example) for example in self.examples)

    def _require_all(self, what: str) -> None:
        if self._num_tokens is not None:
            raise ValueError(
                f"window.{what}: this process holds its own examples only: count where they are made"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of all processes."""
        if self._num_tokens is not None:
            return self._num_tokens
        return sum(len(sequence["input_ids"]) for example in self.examples for sequence in example)

    def total(self, *fields: str, sequences: slice = slice(None)) -> float:
        """Sum over the window, all processes, of a field, or of a product of fields, as they arrive in the
        batches: the denominator of a loss. (There, loss_mask is 0 on the first token of each sequence, which
        nothing predicts; a script's own field is as returned by `encode`, so that total("loss_mask",
        "weight") counts what reaches the loss.)

        sequences: those of each example that count, for instance slice(0, None, 2) for the first of each
        pair. Raises ValueError if this process does not know the examples of the others (GRPO).
        """
        self._require_all("total")
        found = [sequence for example in self.examples for sequence in example[sequences]]
        # in one step: a thousand processes have ten thousand sequences
        if found and fields == ("loss_mask",):
            return float(
                np.concatenate([sequence["loss_mask"][1:] for sequence in found]).sum(dtype=np.float64)
            )

        def product(sequence: Sequence) -> np.ndarray:
            arrived = [np.append(0.0, sequence[f][1:]) if f == "loss_mask" else sequence[f] for f in fields]
            return np.prod(np.broadcast_arrays(*arrived), axis=0, dtype=np.float64)

        return float(sum(product(sequence).sum() for sequence in found))

    @torch.no_grad()
    def add_fields(self, values: Callable[[Batch], dict[str, torch.Tensor]]) -> None:
        """Add per-token fields to every sequence of this process: values(batch), (T,) by name, computed
        without gradients. A prepared model and a `Reference` follow autocast by themselves.

        If memory runs out a micro-batch is processed in two halves, unless processes call a sharded model
        together.
        """
        waiting = [atoms or self.examples[:1] for atoms in self._micro_batches]
        for atoms in waiting:  # grows during the loop
            batch = flat_batch(atoms, self._accelerator.device)
            try:
                rows = {name: row.cpu() for name, row in values(batch).items()}
            except (RuntimeError, MemoryError) as error:
                if not is_oom(error) or len(atoms) < 2 or self._accelerator.distributed_type in SHARDED:
                    raise
                rows = None
            if rows is None:  # by now the exception is gone, and with it the tensors of its frames
                empty_caches(self._accelerator.device)
                waiting += [atoms[: len(atoms) // 2], atoms[len(atoms) // 2 :]]
                continue
            sequences = [sequence for atom in atoms for sequence in atom]
            for name, row in rows.items():
                for sequence, part in zip(sequences, split_row(row, batch), strict=True):
                    sequence[name] = part.numpy()

    @property
    def most_parts(self) -> int:
        """The largest number of parts into which any micro-batch can be split."""
        step = self._indivisible
        return max(sum(len(self.examples[i]) // step for i in members) for members in self._mine)

    def largest(self) -> list[int]:
        """The lengths of the sequences of the micro-batch with the most tokens."""
        lengths = [
            [len(sequence["input_ids"]) for atom in atoms for sequence in atom]
            for atoms in self._micro_batches
        ]
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
        self.train, self.max_tokens, self.max_steps = train, max_tokens, args.max_steps
        self.longest = train.examples.longest  # tokens of the longest sequence
        self._accelerator, self._batch_size = accelerator, args.per_device_train_batch_size
        self._indivisible = indivisible
        if (train.examples.sequence_counts % indivisible).any():
            raise UserError(
                f"encode gave examples that are not {indivisible} sequences each, as this script needs"
            )
        # micro-batches per window
        self._parts = accelerator.gradient_accumulation_steps * accelerator.num_processes
        self.size = self._batch_size * self._parts
        # In a checkpoint: with another one, other examples have been used after a number of steps.
        self.step_size = f"{self._parts} micro-batches" if max_tokens else f"{self.size} samples"
        if args.max_steps <= 0:
            self.end = max(1, round(args.num_train_epochs * len(train)))
        else:
            self.end = None if max_tokens else args.max_steps * self.size
        # for a stream resumed with another number of processes, which continues at its position
        self._shift = 0
        self._budget = Budget(train, self._parts, max_tokens, self.end) if max_tokens else None

    def __len__(self) -> int:
        if self.max_steps > 0:
            return self.max_steps
        return math.ceil(self.end / self.size) if self._budget is None else len(self._budget)

    def __getitem__(self, step: int) -> Window:
        positions = range(self.start(step), self.start(step + 1))
        examples = [self.train[position] for position in positions]
        parts = self.dealt(step)
        mine = parts[self._accelerator.process_index :: self._accelerator.num_processes]

        def origins() -> list[str]:
            return [self.train.where(position) for position in positions]

        return Window(self._accelerator, examples, mine, indivisible=self._indivisible, origins=origins)

    def dealt(self, step: int) -> list[list[int]]:
        """The examples of each of a window's micro-batches, over all processes: the first is process 0's, the
        second process 1's. Planned from lengths alone, the same on every process."""
        if self._budget is not None:
            return self._budget.dealt(step)
        B, n = self._batch_size, self.start(step + 1) - self.start(step)
        return [list(range(min(i * B, n), min((i + 1) * B, n))) for i in range(self._parts)]

    def start(self, step: int) -> int:
        """The position at which a window starts."""
        if self._budget is not None:
            return self._budget.start(step)
        return min(step * self.size, self.end) + self._shift

    def plan(self) -> dict[str, Any]:
        """The plan of the run: steps, examples and tokens per step, steps per epoch (None for a stream), and
        the sizes of the examples in the largest micro-batch, judging by the first windows."""
        some = range(min(len(self), 50))
        sizes, micro_batches = [], []
        for step in some:  # in order: a stream does not go back
            sizes.append([self.train.size(i) for i in range(self.start(step), self.start(step + 1))])
            micro_batches += [[sizes[-1][i] for i in part] for part in self.dealt(step)]
        per_step = sum(map(len, sizes)) / len(sizes) if self.max_tokens else self.size
        return {
            "steps": len(self),
            "examples_per_step": round(per_step, 1),
            "tokens_per_step": round(sum(map(sum, sizes)) / len(sizes)),
            "steps_per_epoch": round(len(self.train) / per_step, 2)
            if hasattr(self.train, "__len__")
            else None,
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


def eval_batches(examples: Listing[Example], accelerator: Any, batch_size: int) -> Iterator[dict[str, Any]]:
    """This process's share of an evaluation set, in order: each example exactly once over all processes.

    All processes get the same number of batches, including fillers (weight 0).
    """
    step = batch_size * accelerator.num_processes
    for start in range(0, len(examples), step):
        mine = [examples[i] for i in range(start, min(start + step, len(examples)))][
            accelerator.process_index :: accelerator.num_processes
        ]
        yield (
            flat_batch(mine, accelerator.device)
            if mine
            else flat_batch([examples[0]], accelerator.device, weight=0.0)
        )
