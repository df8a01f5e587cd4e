"""The schedule of GRPO's rollouts."""

import math
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from common.args import CommonArgs
from common.data.load import Rows
from common.errors import UserError
from common.processes import gather_lists, on_each_process
from common.sampling.generate import Sampled

from accelerate import Accelerator

if TYPE_CHECKING:
    from common.sampling.sampler import Sampler


class RolloutSchedule:
    """GRPO's schedule: the prompts of each rollout, and the number of steps trained on it."""

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
        rollout_ahead: int = 0,
    ):
        """num_generations: completions per prompt. updates_per_rollout: steps per rollout, a multiple of its windows.
        rollout_ahead: how many rollouts are sampled in advance, with the weights at that time. The run lasts max_steps
        steps, or num_train_epochs passes over the prompts. Raises UserError if num_generations does not divide the
        completions of a window."""
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
        self.num_prompts = self.window_size * windows_per_rollout // num_generations  # per rollout
        epochs = math.ceil(args.num_train_epochs * len(prompts) / self.num_prompts) * updates_per_rollout
        self._steps = args.max_steps if args.max_steps > 0 else epochs
        self.longest = prompts.longest + max_completion_length  # tokens of a sequence
        self._batch_size = args.per_device_train_batch_size
        self._max_completion_length = max_completion_length
        self._accelerator, self.ahead = accelerator, rollout_ahead
        self._begun: dict[int, Future[list[Sampled]]] = {}  # rollouts sampled or in progress that were not yet requested

    def __len__(self) -> int:
        return self._steps

    def prompts(self, rollout: int) -> list[dict[str, Any]]:
        """The prompts of a rollout, each repeated num_generations times in succession: new ones for each rollout."""
        positions = range(rollout * self.num_prompts, (rollout + 1) * self.num_prompts)
        return [prompt for position in positions for prompt in [self.train.at(position)] * self.num_generations]

    def mine(self) -> range:
        """The indices of the completions of a rollout that this process samples."""
        number = self.num_prompts * self.num_generations
        share = -(-number // self._accelerator.num_processes)
        return range(number)[self._accelerator.process_index * share : (self._accelerator.process_index + 1) * share]

    def sample(self, rollout: int, sampler: "Sampler", seed: int) -> list[Sampled]:
        """This process's completions of a rollout, sampled now unless that was done ahead. Starts sampling the following
        ones that are due ahead, with the current weights; also beyond the last one, in case the run is extended."""
        for n in range(rollout, rollout + self.ahead + 1):
            if n not in self._begun:
                prompts = self.prompts(n)
                ids, keys = [prompts[i]["prompt_ids"] for i in self.mine()], [(seed, n, i) for i in self.mine()]
                self._begun[n] = sampler.begin(ids, keys)
        return on_each_process(self._accelerator, self._begun.pop(rollout).result)

    def plan(self) -> dict[str, Any]:
        """Like Windows.plan, with prompts as examples."""
        mean = self.train.lengths.mean() + self._max_completion_length
        return {
            "steps": len(self),
            "examples_per_step": self.num_prompts / self.updates_per_rollout,
            "tokens_per_step": round(self.window_size * mean),
            "steps_per_epoch": math.ceil(len(self.train) / self.num_prompts) * self.updates_per_rollout,
            "largest_micro_batch": [self.longest] * self._batch_size,
        }

    def largest(self) -> None:
        """None: the memory for the longest completions is unknown before they are sampled."""

    def state(self, step: int) -> dict[str, Any]:
        """The completions sampled ahead, whose weights are gone; the order of the prompts is recomputed."""
        begun = {}
        for n, future in sorted(self._begun.items()):
            failed = future.exception() is not None  # it is raised when this rollout's turn comes
            if not any(gather_lists(self._accelerator, [failed])):
                begun[n] = gather_lists(self._accelerator, future.result())
        return {"sampled_ahead": begun} if begun else {}

    def restore(self, step: int, state: dict[str, Any]) -> None:
        """Resume from the result of `state(step)`. With another number of completions per step they are sampled again."""
        for n, everyones in state.get("sampled_ahead", {}).items():
            if len(everyones) == self.num_prompts * self.num_generations:
                self._begun[int(n)] = Future()
                self._begun[int(n)].set_result([Sampled(*everyones[i]) for i in self.mine()])
