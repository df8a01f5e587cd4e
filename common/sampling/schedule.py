"""When GRPO samples for which prompts."""

import math
from typing import Any

from common.args import CommonArgs
from common.data.load import Rows
from common.errors import UserError

from accelerate import Accelerator


class RolloutSchedule:
    """GRPO's schedule: which prompts each rollout samples for, and how many steps it serves."""

    def __init__(
        self,
        args: CommonArgs,
        accelerator: Accelerator,
        prompts: Rows,
        *,
        num_generations: int,
        windows_per_rollout: int,
        updates_per_rollout: int,
        max_completion_length: int,
    ):
        """num_generations: completions of a prompt. updates_per_rollout: steps that it serves, a multiple of its windows.
        The run is max_steps steps, or num_train_epochs passes over the prompts. Raises UserError where
        num_generations does not divide the completions of a window."""
        self.train, self.num_generations = prompts, num_generations
        self.updates_per_rollout = updates_per_rollout
        self.window_size = args.per_device_train_batch_size * args.gradient_accumulation_steps * accelerator.num_processes
        self.step_size = f"{self.window_size} completions"
        if self.window_size % num_generations:
            raise UserError(
                f"--num_generations {num_generations} does not divide the {self.window_size} completions of a step "
                f"(per_device_train_batch_size {args.per_device_train_batch_size} x gradient_accumulation_steps "
                f"{args.gradient_accumulation_steps} x {accelerator.num_processes} processes)"
            )
        self.num_prompts = self.window_size * windows_per_rollout // num_generations  # of a rollout
        epochs = math.ceil(args.num_train_epochs * len(prompts) / self.num_prompts) * updates_per_rollout
        self._steps = args.max_steps if args.max_steps > 0 else epochs
        self.longest = prompts.longest + max_completion_length  # tokens of a sequence
        self._batch_size = args.per_device_train_batch_size
        self._max_completion_length = max_completion_length

    def __len__(self) -> int:
        return self._steps

    def prompts(self, rollout: int) -> list[dict[str, Any]]:
        """The prompts of a rollout, each num_generations times in succession: fresh ones for each rollout."""
        positions = range(rollout * self.num_prompts, (rollout + 1) * self.num_prompts)
        return [prompt for position in positions for prompt in [self.train.at(position)] * self.num_generations]

    def plan(self) -> dict[str, Any]:
        """As Windows.plan; examples are prompts."""
        mean = self.train.lengths.mean() + self._max_completion_length
        return {
            "steps": len(self),
            "examples_per_step": self.num_prompts / self.updates_per_rollout,
            "tokens_per_step": round(self.window_size * mean),
            "steps_per_epoch": math.ceil(len(self.train) / self.num_prompts) * self.updates_per_rollout,
            "largest_micro_batch": [self.longest] * self._batch_size,
        }

    def largest(self) -> None:
        """What the longest completions will need is not known before they are sampled."""

    def state(self, step: int) -> dict[str, Any]:
        """Nothing: the order of the prompts is computed."""
        return {}

    def restore(self, step: int, state: dict[str, Any]) -> None:
        """See state."""
