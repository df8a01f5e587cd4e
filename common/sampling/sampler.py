"""The two samplers: this process, with the model it trains, or servers."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from common.model.flat_model import FlatModel
from common.sampling.generate import Sampled, sample
from common.sampling.schedule import RolloutSchedule

from accelerate import Accelerator
from torch import nn


class Sampler(Protocol):
    """The interface through which a script samples: OwnSampler or RolloutServers."""

    has_logps: bool  # whether logps are those of the whole distribution, at the temperature

    def sync(self, step: int) -> None:
        """Use the weights of `step` from now on. Called on every process."""

    def begin(self, prompts: Sequence[Sequence[int]], keys: Sequence[tuple[int, ...]], **how: Any) -> Future[list[Sampled]]:
        """Start sampling one completion per prompt. how: options that differ this time (see `sample`)."""

    def check(self, metrics: Any) -> None:
        """Raise UserError if a rollout was not sampled from the model trained on it. Called on every process."""


class OwnSampler:
    """Samples from the trained model with its current weights."""

    has_logps = True

    def __init__(self, accelerator: Accelerator, model: nn.Module, **how: Any):
        """model: as prepared. how: see `sample`."""
        self.accelerator, self.model, self.how = accelerator, model, how

    def sync(self, step: int) -> None:
        """Does nothing: it already has the weights."""

    def check(self, metrics: Any) -> None:
        """Does nothing: it is the trained model."""

    def begin(self, prompts: Sequence[Sequence[int]], keys: Sequence[tuple[int, ...]], **how: Any) -> Future[list[Sampled]]:
        """Completed when this returns."""
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
    """servers: their addresses, if any. model: as prepared. how: see `sample`."""
    if not servers:
        return OwnSampler(accelerator, model, **how)
    from common.sampling.servers import RolloutServers

    return RolloutServers(
        servers,
        accelerator,
        model,
        folder=output_dir,
        longest=rollouts.longest,
        needs_logps=rollouts.ahead > 0,  # completions sampled ahead cannot be scored later: the weights are gone
        **how,
    )
