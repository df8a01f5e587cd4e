"""Fit windows into memory: when memory runs out, repeat in smaller micro-batches with an unchanged gradient.

A loss is a sum over the items of a window, divided by their number; so a window restarted with each
micro-batch split in two has the same gradient. All later windows are split the same way. On a CPU,
micro-batches are split from the start if that costs no time (`tokens_at_once`).

Several processes have to agree on it. One that runs out of memory during a backward pass leaves the others
waiting in an all-reduce, so with --auto_micro_batch (and with modules in `model.extra`, which a window may
not use) DistributedDataParallel is not used: each process computes its own gradients, all agree whether
memory sufficed, and one reduction of all gradients follows. The price is that communication no longer
overlaps computation.
"""

from collections.abc import Callable
import math
import random
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from common.args import CommonArgs
from common.collators import Window
from common.errors import UserError, say
from common.memory import SHARDED, empty_caches, is_oom, tokens_at_once
from common.processes import anywhere
from common.run.launch import NEVER_FREED
from common.run.metrics import Metrics
import numpy as np
import torch
from torch import nn

Gradients = Callable[[Window], None]
WHAT_HELPS = "what helps: --gradient_checkpointing, --use_peft, a smaller --max_length; "
WHAT_HELPS += "several processes: --auto_micro_batch"


class Retry:
    """`retry(gradients, step, window)`: calls gradients(window), and again in smaller micro-batches if memory
    runs out."""

    def __init__(self, args: CommonArgs, accelerator: Accelerator, model: nn.Module, metrics: Metrics):
        """model: as Accelerate prepared it. From now on call `retry.model` instead.

        Raises UserError for --auto_micro_batch with sharded weights: there every forward pass waits for all
        processes.
        """
        if args.auto_micro_batch and accelerator.distributed_type in SHARDED:
            raise UserError(
                "--auto_micro_batch: with sharded weights a process that runs out of memory leaves the others waiting; "
                "choose per_device_train_batch_size by hand (--dry_run estimates what is needed)"
            )
        self.args = args
        self.accelerator = accelerator
        self.model = model
        self.metrics = metrics
        self.splits = 1  # parts into which each micro-batch is split
        wrapper = accelerator.unwrap_model(model)
        self.experts = wrapper.experts
        # DeepSpeed's engine divides by the number of micro-batches it was given, and keeps what it has
        # accumulated: its windows are neither split nor restarted.
        engine = accelerator.distributed_type == DistributedType.DEEPSPEED
        self.tokens_at_once = math.inf if engine else tokens_at_once(accelerator, wrapper)
        # DistributedDataParallel would wait for gradients of a script's own module that a window does not
        # use.
        own = len(wrapper.extra) > 0 and accelerator.distributed_type not in SHARDED
        self._sums_gradients = (args.auto_micro_batch or own) and accelerator.num_processes > 1
        self._recovers = not engine and (args.auto_micro_batch or accelerator.num_processes == 1)
        self._in_gradients = False
        if self._sums_gradients:
            NEVER_FREED.append(model)
            self.model = wrapper
        if self._sums_gradients or self.experts:
            wrapper.register_forward_pre_hook(self._refuse_outside)

    def __call__(self, gradients: Gradients, step: int, window: Window) -> None:
        """Afterwards the model holds the gradients of the whole window, over all processes.

        Raises UserError if even the smallest micro-batches are too large, or if the last window's gradients
        are still there.
        """
        if any(p.grad is not None and bool(p.grad.any()) for p in self.model.parameters()):
            raise UserError(
                "the gradients of the step before are still there: call optimizer.zero_grad() after each step"
            )
        while True:
            reason = None
            _seed_all(self._seed(step) + self.accelerator.process_index)  # of dropout
            window.split(self.splits, self.tokens_at_once)
            try:
                if self.experts:
                    self.experts.begin(self.accelerator, self.model, window)
                self._in_gradients = True
                gradients(window)
                if not window.backward_calls:
                    raise UserError(
                        "gradients(window) never calls window.backward(loss), which scales the loss of a micro-batch"
                    )
            except Exception as error:
                if not is_oom(error):
                    raise
                reason = str(error)[:160] or type(error).__name__
            finally:
                self._in_gradients = False
            # The exception is gone by now, and with it the frames that held the failed attempt's tensors.
            failed = reason is not None
            if failed and self.experts:
                self.experts.give_up()
            if self._sums_gradients:  # all processes start again, or none does
                failed = anywhere(self.accelerator, failed)
            if not failed:
                break
            self._start_again(step, window, reason)
        if self._sums_gradients:
            self._sum_gradients()
        if self.experts:
            self.metrics.add(**self.experts.finish())
        # the same on every process, for random numbers in the script's loop
        _seed_all(self._seed(step))

    def state(self, step: int) -> dict[str, Any]:
        """The state to store in a checkpoint, so that a resumed run rounds as the first one did."""
        return {"splits": self.splits}

    def restore(self, step: int, state: dict[str, Any]) -> None:
        self.splits = state.get("splits", 1)

    def _seed(self, step: int) -> int:
        """Random numbers of a window are a pure function of its place in the run."""
        return (self.args.seed * 1_000_003 + step) * 10_007

    def _start_again(self, step: int, window: Window, reason: str | None) -> None:
        """Discard the current window's gradients, and split the micro-batches once more."""
        self.model.zero_grad(set_to_none=True)
        self.metrics.window = {}
        empty_caches(self.accelerator.device)
        if reason and (not self._recovers or self.splits >= window.most_parts):
            raise UserError(f"step {step + 1}: out of memory with {_shape(window)} ({reason}); {WHAT_HELPS}")
        self.splits *= 2
        shape = _shape(window.split(self.splits, self.tokens_at_once))
        say(
            f"step {step + 1}: out of memory; again, and from here on, with {shape}; the gradient stays the same"
        )
        self.metrics.event("memory", step + 1, f"out of memory; from here on {shape}")

    def _refuse_outside(self, model: nn.Module, _: Any) -> None:
        if torch.is_grad_enabled() and model.training and not self._in_gradients:
            raise UserError(
                "the model is called with gradients outside of run.retry_smaller(gradients, window), which balances "
                "experts, and adds up the gradients of all processes: call that"
            )

    def _sum_gradients(self) -> None:
        """Do DistributedDataParallel's job: replace each gradient by its mean over the processes.

        A weight that no process has used keeps no gradient, so that the optimizer skips it, as with one
        process.
        """
        trained = [p for p in self.model.parameters() if p.requires_grad]
        used = torch.tensor([float(p.grad is not None) for p in trained], device=self.accelerator.device)
        torch.distributed.all_reduce(used)
        trained = [p for p, times in zip(trained, used.tolist(), strict=True) if times]
        for p in trained:
            # an expert that no token on this process chose
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        for work in [torch.distributed.all_reduce(p.grad, async_op=True) for p in trained]:
            work.wait()
        for p in trained:
            p.grad /= self.accelerator.num_processes


def _seed_all(seed: int) -> None:
    """Of torch, and of numpy and `random`, which a script may use: a resumed run draws the same."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _shape(window: Window) -> str:
    lengths = window.largest_lengths()
    return f"micro-batches of {len(lengths)} sequence(s), {sum(lengths):,} tokens"
