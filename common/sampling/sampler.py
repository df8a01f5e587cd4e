"""Completions of rollouts, and their rewards: what samples them (the trained model itself, or vLLM servers
with its weights), and how the processes share the work.
"""

from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator
from common.args import CommonArgs
from common.model.flat_model import FlatModel
from common.processes import gather_lists, on_each_process, own_share
from common.sampling.generate import Sampled, sample
from common.sampling.rewards import Reward, score
from common.sampling.vllm import RolloutServers
from torch import nn


class ModelSampler:
    """The trained model itself. The methods are those of `RolloutServers`; all processes call them."""

    def __init__(self, model: FlatModel, **settings: Any):
        """settings: those of `sample`, for every completion."""
        self.model = model
        self.settings = settings

    def sample(
        self, prompts: Sequence[Sequence[int]], keys: Sequence[tuple[int, ...]], **changes: Any
    ) -> list[Sampled]:
        """A completion for each prompt (token ids), a function of its key and the weights; see
        `common.sampling.sample`. changes: settings that differ this time."""
        settings = self.settings | changes
        return sample(self.model, prompts, keys, **settings)

    def sync(self, step: int) -> None:
        """Nothing to do: the weights are always those of the step."""

    def check(self, metrics: Any) -> None:
        """Nothing to check: no other model samples."""


Sampler = ModelSampler | RolloutServers


def load_sampler(
    args: CommonArgs,
    accelerator: Accelerator,
    model: nn.Module,
    servers: list[str] | None,
    *,
    longest: int,
    batch_size: int | None,
    **settings: Any,
) -> Sampler:
    """`servers` (addresses), if there are any, or else the model itself.

    model: as prepared. longest: tokens of a sequence, prompt and completion. batch_size: completions sampled
    at a time by the model itself. settings: temperature, top_k, top_p and max_new_tokens. Raises UserError if
    a server does not fit.
    """
    if servers:
        return RolloutServers(servers, accelerator, model, args.output_dir, longest, **settings)
    return ModelSampler(accelerator.unwrap_model(model), batch_size=batch_size, **settings)


def sample_shared(
    accelerator: Accelerator,
    sampler: Sampler,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[tuple[int, ...]],
    max_new_tokens: Sequence[int] | None = None,
) -> list[Sampled]:
    """A completion for each prompt (token ids), on every process: each samples a share. A completion is a
    function of its key and the weights, whichever process samples it. max_new_tokens: a limit for each
    prompt, if they differ."""
    mine = own_share(accelerator, len(prompts))
    own_prompts = [prompts[i] for i in mine]
    own_keys = [keys[i] for i in mine]
    changes = {}
    if max_new_tokens is not None:
        changes["max_new_tokens"] = [max_new_tokens[i] for i in mine]
    with accelerator.autocast():  # also on a process without a prompt: all of them gather sharded weights
        sampled = sampler.sample(own_prompts, own_keys, **changes)
    return gather_lists(accelerator, sampled)


def score_shared(
    accelerator: Accelerator,
    rewards: list[Reward],
    rows: list[dict[str, Any]],
    texts: list[str],
    ids: list[list[int]],
) -> list[list[float | None]]:
    """The rewards of each completion, one per function, on every process: each scores a share. rows: the
    prompts with their columns. None: a function abstained."""
    mine = own_share(accelerator, len(rows))
    own_rows = [rows[i] for i in mine]
    own_texts = [texts[i] for i in mine]
    own_ids = [ids[i] for i in mine]
    scores = on_each_process(accelerator, lambda: score(rewards, own_rows, own_texts, own_ids))  # [F][share]
    of_each = [list(values) for values in zip(*scores, strict=True)]
    return gather_lists(accelerator, of_each)
