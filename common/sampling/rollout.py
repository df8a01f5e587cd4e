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
        batch_size = args.per_device_train_batch_size
        accumulation = args.gradient_accumulation_steps
        num_processes = accelerator.num_processes
        self.window_size = batch_size * accumulation * num_processes
        self.step_size = f"{self.window_size} completions"
        if self.window_size % num_generations:
            raise UserError(
                f"--num_generations {num_generations} does not divide the {self.window_size} completions of a step "
                f"(per_device_train_batch_size {batch_size} x gradient_accumulation_steps "
                f"{accumulation} x {num_processes} processes)"
            )
        self.train = prompts
        self.num_prompts = self.window_size * windows_per_rollout // num_generations  # per rollout
        self.updates_per_rollout = updates_per_rollout
        if args.max_steps > 0:
            self._steps = args.max_steps
        else:
            num_rollouts = math.ceil(args.num_train_epochs * len(prompts) / self.num_prompts)
            self._steps = num_rollouts * updates_per_rollout
        self.longest = prompts.longest + max_completion_length  # tokens of a sequence
        self._largest_micro_batch = [self.longest] * batch_size
        self._num_generations = num_generations
        self._max_completion_length = max_completion_length

    def __len__(self) -> int:
        return self._steps

    def prompts(self, rollout: int) -> list[dict[str, Any]]:
        """The prompts of a rollout, each repeated num_generations times in succession: new ones for each
        rollout."""
        prompts = []
        for position in range(rollout * self.num_prompts, (rollout + 1) * self.num_prompts):
            prompts += [self.train.at(position)] * self._num_generations
        return prompts

    def plan(self) -> dict[str, Any]:
        """Like Windows.plan, with prompts as examples."""
        tokens_of_a_completion = self.train.sizes.mean() + self._max_completion_length
        return {
            "steps": len(self),
            "examples_per_step": self.num_prompts / self.updates_per_rollout,
            "tokens_per_step": round(self.window_size * tokens_of_a_completion),
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
    reward = as_float64([completion.reward for completion in completions])
    stds = []
    for rewards_of_group in reward.view(-1, group):
        present = rewards_of_group[~rewards_of_group.isnan()]
        stds.append(present.std().item() if len(present) > 1 else math.nan)
    std = as_float64(stds)
    tokens = as_float64(lengths or [len(completion.ids) for completion in completions])
    finished = torch.tensor([completion.finished for completion in completions])
    metrics = {
        "reward": reward.nanmean(),
        "reward_std": std.nanmean(),
        "frac_reward_zero_std": (~(std > 1e-12)).double().mean(),
        "completions/mean_length": tokens.mean(),
        "completions/min_length": tokens.min(),
        "completions/max_length": tokens.max(),
        "completions/clipped_ratio": (~finished).double().mean(),
        "completions/mean_terminated_length": tokens[finished].mean(),
    }
    counted = torch.tensor([getattr(completion, "counted", True) for completion in completions])
    if not counted.all():
        metrics["completions/left_out_ratio"] = (~counted).double().mean()
    for f, function in enumerate(rewards):
        values = []
        for completion in completions:
            if completion.rewards[f] is not None:
                values.append(completion.rewards[f])
        if values:
            values = as_float64(values)
            metrics[f"rewards/{function.name}/mean"] = values.mean()
            metrics[f"rewards/{function.name}/std"] = values.std(correction=0)
    # NaN is the mean of none: no reward, none finished
    return {name: value.item() for name, value in metrics.items() if not value.isnan()}


def as_float64(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def rollout_lines(step: int, completions: Sequence[Any], rewards: list[Reward]) -> list[dict[str, Any]]:
    """A line of completions.jsonl for each completion, which has its `prompt` (the row) and its `text`,
    too."""
    names = [reward.name for reward in rewards]
    lines = []
    for c in completions:
        line = {
            "step": step,
            "prompt": c.prompt["prompt"],
            "completion": c.text,
            "finished": c.finished,
            "rewards": dict(zip(names, c.rewards, strict=True)),
            "reward": None if math.isnan(c.reward) else c.reward,
        }
        if hasattr(c, "advantage"):
            line["advantage"] = c.advantage
        lines.append(line)
    return lines
