"""Who samples: this process, with the model that it trains, or servers."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from common.model.flat_model import FlatModel
from common.sampling.generate import Sampled, sample
from common.sampling.schedule import RolloutSchedule

from accelerate import Accelerator
from torch import nn


class Sampler(Protocol):
    """What a script asks for completions: OwnSampler or RolloutServers."""

    has_logps: bool  # a completion's are those of the whole distribution, at the temperature

    def sync(self, step: int) -> None:
        """From now on the weights are those of `step`. All processes together."""

    def begin(self, prompts: Sequence[Sequence[int]], keys: Sequence[tuple[int, ...]], **how: Any) -> Future[list[Sampled]]:
        """Begin to sample a completion for each prompt. how: what is otherwise this time (see `sample`)."""

    def check(self, metrics: Any) -> None:
        """Raise UserError where what sampled a rollout is not what is trained on it. All processes together."""


class OwnSampler:
    """Completions from the model that is trained, as it is when they are asked for."""

    has_logps = True

    def __init__(self, accelerator: Accelerator, model: nn.Module, **how: Any):
        """model: as prepared. how: see `sample`."""
        self.accelerator, self.model, self.how = accelerator, model, how

    def sync(self, step: int) -> None:
        """Nothing: it has the weights."""

    def check(self, metrics: Any) -> None:
        """Nothing: it is the model that is trained."""

    def begin(self, prompts: Sequence[Sequence[int]], keys: Sequence[tuple[int, ...]], **how: Any) -> Future[list[Sampled]]:
        """It is done when this returns."""
        done: Future[list[Sampled]] = Future()
        with self.accelerator.autocast():
            model: FlatModel = self.accelerator.unwrap_model(self.model)
            done.set_result(sample(model, prompts, keys, **self.how | how))
        return done


def make_sampler(
    servers: list[str] | None,
    accelerator: Accelerator,
    model: nn.Module,
    output_dir: str,
    rollouts: RolloutSchedule,
    **how: Any,
) -> Sampler:
    """servers: their addresses, if it is to be servers. model: as prepared. how: see `sample`."""
    if not servers:
        return OwnSampler(accelerator, model, **how)
    from common.sampling.servers import RolloutServers

    return RolloutServers(
        servers,
        accelerator,
        model,
        folder=output_dir,
        longest=rollouts.longest,
        needs_logps=rollouts.ahead > 0,  # what is sampled ahead cannot be scored again: the weights are gone
        **how,
    )
