"""Log-probabilities under a frozen reference, computed before training."""

from common.args import CommonArgs
from common.collators import flat_batch
from common.data.examples import Examples
from common.errors import say
from common.model.reference import Reference
from common.processes import gather_lists
import numpy as np


def scores(args: CommonArgs, reference: Reference, examples: Examples) -> np.ndarray:
    """The log-probability of each sequence, summed over its trained tokens: (sequences,) float32. Each
    process scores a share."""
    say(f"reference: scoring {len(examples):,} pairs")
    accelerator = reference.accelerator
    mine = list(range(accelerator.process_index, len(examples), accelerator.num_processes))
    mine.sort(key=lambda i: int(examples.lengths[i]))  # batches of similar lengths
    found: list[tuple[int, list[float]]] = []
    for start in range(0, len(mine), args.per_device_eval_batch_size):
        members = mine[start : start + args.per_device_eval_batch_size]
        batch = flat_batch([examples[i] for i in members], accelerator.device)
        sums = reference.sums(batch)
        found += zip(members, sums.view(len(members), -1).tolist(), strict=True)
    return np.array([values for _, values in sorted(gather_lists(accelerator, found))], np.float32).flatten()
