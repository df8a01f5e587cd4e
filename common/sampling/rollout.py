"""The rollouts of a run: the prompts of each, and the metrics of its completions."""

from collections.abc import Sequence
import math
from typing import Any

from accelerate import Accelerator
from common.args import CommonArgs
from common.data.load import Rows
from common.errors import UserError
from common.sampling.rewards import Reward
import torch


class RolloutSchedule:
    """The prompts of each rollout, and the number of steps trained on it."""

    def __init__(
        self,
        args: CommonArgs,
        accelerator: Accelerator,
        prompts: Rows,
        *,
        num_generations: int,
        max_completion_length: int,
        windows_per_rollout: int,
        updates_per_rollout: int,
    ):
        """num_generations: completions per prompt. updates_per_rollout: steps per rollout, a multiple of its
        windows. The run lasts max_steps steps, or num_train_epochs passes over the prompts. Raises UserError
        if num_generations does not divide the completions of a window."""
        self.train, self.updates_per_rollout = prompts, updates_per_rollout
        self.window_size = (
            args.per_device_train_batch_size * args.gradient_accumulation_steps * accelerator.num_processes
        )
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
        self._largest_micro_batch = [self.longest] * args.per_device_train_batch_size
        self._num_generations, self._max_completion_length = num_generations, max_completion_length
        self._accelerator = accelerator

    def __len__(self) -> int:
        return self._steps

    def prompts(self, rollout: int) -> list[dict[str, Any]]:
        """The prompts of a rollout, each repeated num_generations times in succession: new ones for each
        rollout."""
        positions = range(rollout * self.num_prompts, (rollout + 1) * self.num_prompts)
        return [
            prompt for position in positions for prompt in [self.train.at(position)] * self._num_generations
        ]

    def mine(self) -> range:
        """The indices of the completions of a rollout that this process samples."""
        share = self.num_prompts * self._num_generations // self._accelerator.num_processes
        return range(self._accelerator.process_index * share, (self._accelerator.process_index + 1) * share)

    def plan(self) -> dict[str, Any]:
        """Like Windows.plan, with prompts as examples."""
        return {
            "steps": len(self),
            "examples_per_step": self.num_prompts / self.updates_per_rollout,
            "tokens_per_step": round(
                self.window_size * (self.train.lengths.mean() + self._max_completion_length)
            ),
            "steps_per_epoch": math.ceil(len(self.train) / self.num_prompts) * self.updates_per_rollout,
            "largest_micro_batch": self._largest_micro_batch,
        }


def rollout_metrics(
    completions: Sequence[Any], rewards: list[Reward], group: int, lengths: list[int] | None = None
) -> dict[str, float]:
    """Metrics of rewards and completion lengths.

    completions: with `ids`, `finished`, `rewards` (one per function; None: it abstained), and `reward`, their
    weighted sum (NaN: all abstained). group: the number of neighbours compared with each other. lengths:
    number of sampled tokens, if not all of a completion's tokens were sampled.
    """
    reward = torch.tensor([completion.reward for completion in completions], dtype=torch.float64)
    known = [each[~each.isnan()] for each in reward.view(-1, group)]
    stds = torch.stack([each.std() if len(each) > 1 else each.new_tensor(math.nan) for each in known])  # (P,)
    counts = torch.tensor(lengths or [len(completion.ids) for completion in completions], dtype=torch.float64)
    finished = torch.tensor([completion.finished for completion in completions])
    logged = {
        "reward": reward.nanmean().item(),
        "reward_std": stds.nanmean().item(),
        "frac_reward_zero_std": (~(stds > 1e-12)).double().mean().item(),
        "completions/mean_length": counts.mean().item(),
        "completions/min_length": counts.min().item(),
        "completions/max_length": counts.max().item(),
        "completions/clipped_ratio": (~finished).double().mean().item(),
        "completions/mean_terminated_length": counts[finished].mean().item(),
    }
    if left_out := sum(not getattr(completion, "counted", True) for completion in completions):
        logged["completions/left_out_ratio"] = left_out / len(completions)
    for f, function in enumerate(rewards):
        values = torch.tensor(
            [c.rewards[f] for c in completions if c.rewards[f] is not None], dtype=torch.float64
        )
        if len(values):
            logged[f"rewards/{function.name}/mean"] = values.mean().item()
            logged[f"rewards/{function.name}/std"] = values.std(correction=0).item()
    # of none: no reward, none finished
    return {name: value for name, value in logged.items() if not math.isnan(value)}


def rollout_lines(step: int, completions: Sequence[Any], rewards: list[Reward]) -> list[dict[str, Any]]:
    """A line of completions.jsonl for each completion, which has its `prompt` (the row) and its `text`,
    too."""
    names = [reward.name for reward in rewards]
    lines = []
    for c in completions:
        line = {"step": step, "prompt": c.prompt["prompt"], "completion": c.text, "finished": c.finished}
        line |= {
            "rewards": dict(zip(names, c.rewards, strict=True)),
            "reward": None if math.isnan(c.reward) else c.reward,
        }
        if hasattr(c, "advantage"):
            line["advantage"] = c.advantage
        lines.append(line)
    return lines
