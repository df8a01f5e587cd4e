"""What train_grpo_ahead.py has beside train_grpo.py: rollouts sampled in advance, and which completions and
tokens count."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
import math
from typing import Any

from common.args import CommonArgs
from common.collators import Window
from common.data.load import Rows
from common.processes import Accelerator, gather_lists, on_each_process, own_share
from common.sampling import RolloutSchedule, Sampled
import numpy as np

# Starts to sample a completion of each prompt (token ids): begin(prompts, keys).
Begin = Callable[[Sequence[Sequence[int]], Sequence[tuple[int, ...]]], Future[list[Sampled]]]


def at_once(draw: Callable[..., list[Sampled]]) -> Begin:
    """A sampler that is done when it returns, as a `Begin`."""

    def begin(prompts: Sequence[Sequence[int]], keys: Sequence[tuple[int, ...]]) -> Future[list[Sampled]]:
        done: Future[list[Sampled]] = Future()
        done.set_result(draw(prompts, keys))
        return done

    return begin


class RolloutsAhead(RolloutSchedule):
    """The schedule of GRPO's rollouts, of which some are sampled in advance, with the weights of that
    time."""

    def __init__(
        self, args: CommonArgs, accelerator: Accelerator, prompts: Rows, *, ahead: int, **sizes: int
    ):
        """ahead: how many rollouts are sampled in advance. The others: see RolloutSchedule."""
        super().__init__(args, accelerator, prompts, **sizes)
        self._accelerator = accelerator
        self.ahead = ahead
        self._begun: dict[int, Future[list[Sampled]]] = {}  # sampled or in progress, and not yet requested

    def sample(self, rollout: int, begin: Begin, seed: int) -> list[Sampled]:
        """The completions of a rollout, sampled now unless that was done ahead. Starts sampling the following
        ones that are due ahead, with the current weights; also beyond the last one, in case the run is
        extended. Each process samples a share and gets them all."""
        for n in range(rollout, rollout + self.ahead + 1):
            if n not in self._begun:
                prompts = self.prompts(n)
                mine = own_share(self._accelerator, len(prompts))
                keys = [(seed, n, i) for i in mine]
                self._begun[n] = begin([prompts[i]["prompt_ids"] for i in mine], keys)
        own = on_each_process(self._accelerator, self._begun.pop(rollout).result)
        return gather_lists(self._accelerator, own)

    def state(self, step: int) -> dict[str, Any]:
        """The completions sampled ahead, whose weights are gone."""
        begun = {}
        for n, future in sorted(self._begun.items()):
            failed = future.exception() is not None  # it is raised when this rollout's turn comes
            if not any(gather_lists(self._accelerator, [failed])):
                begun[n] = gather_lists(self._accelerator, future.result())
        return {"sampled_ahead": begun} if begun else {}

    def restore(self, step: int, state: dict[str, Any]) -> None:
        """Resume from the result of `state(step)`. With another number of completions per step they are
        sampled again."""
        for n, everyones in state.get("sampled_ahead", {}).items():
            if len(everyones) == len(self.prompts(int(n))):
                mine = own_share(self._accelerator, len(everyones))
                self._begun[int(n)] = Future()
                self._begun[int(n)].set_result([Sampled(*everyones[i]) for i in mine])


def far_from_sampler(windows: list[Window], accelerator: Accelerator, cap: float) -> list[int]:
    """The places (in the rollout, over all processes) of completions that the model before its update would
    have written more than `cap` times as often as the model that sampled them.

    The windows' sequences have old_logps, sampled_logps and `place`. As in TRL's sequence_mask, the ratio is
    that of the whole completion, so that long ones reach the bound sooner. Unlike there, kept completions are
    not weighted by their ratios, and dropped ones contribute neither to the KL term nor to any denominator.
    """
    far = []
    for sequence in (sequence for window in windows for sequence in window.sequences):
        ratio = (sequence["old_logps"] - sequence["sampled_logps"]) * sequence["loss_mask"]
        if ratio.sum(dtype=np.float64) > math.log(cap):
            far.append(int(sequence["place"]))
    return gather_lists(accelerator, far)


def keep_high_entropy(window: Window, accelerator: Accelerator, share: float) -> None:
    """Add `policy_mask` to the sequences: 1 on that share of the window's tokens (over all processes) with
    the highest entropy (Wang et al. 2025, arXiv 2506.01939). The sequences have `entropy`."""
    mine = [sequence["entropy"][sequence["loss_mask"] > 0] for sequence in window.sequences]
    all_tokens = np.concatenate([np.zeros(0, np.float32), *gather_lists(accelerator, mine)])
    threshold = np.quantile(all_tokens.astype(np.float64), 1 - share) if len(all_tokens) else 0.0
    for [sequence] in window.examples:
        if "entropy" in sequence:  # it is run on this process
            sequence["policy_mask"] = (sequence["entropy"] >= threshold).astype(np.float32)
