"""The reference of DPO and GRPO: the model as it was at the start."""

from typing import Any

from accelerate import Accelerator
from common.args import CommonArgs
from common.collators import Batch, eval_batches
from common.data.examples import Examples
from common.data.order import Shuffled
from common.data.types import Tokenizer
from common.errors import say
from common.losses import segment_sum
from common.model.flat_model import FlatModel, Output
from common.model.load import align, load_pretrained
from common.model.lora import at_start
from common.processes import gather_lists
import numpy as np
import torch
from torch import Tensor


class Reference:
    """A frozen model, such as the policy as it was at the start. Called like a FlatModel, without gradients
    and under the run's autocast."""

    def __init__(self, accelerator: Accelerator, model: FlatModel, *, without_adapter: bool = False):
        """model: a frozen one; with without_adapter, the trained model, used here with its LoRA adapter off,
        or with the adapter that the run started from."""
        self.accelerator = accelerator
        self.model = model
        self.without_adapter = without_adapter

    @torch.no_grad()
    def __call__(self, batch: Batch, **options: Any) -> Output:
        with self.accelerator.autocast():
            if not self.without_adapter:
                return self.model(batch, **options)
            with at_start(self.model.lm):
                return self.model(batch, **options)

    def sums(self, batch: Batch) -> Tensor:
        """The log-probability of each sequence, summed over its trained tokens: (S,), without gradient."""
        if self.model is None:
            return batch["ref_logps"]
        return segment_sum(self(batch).logps, batch["cu_seqlens"])

    def precompute(self, args: CommonArgs, *data: Shuffled | Examples) -> None:
        """Give each sequence its log-probability under the reference, as the field ref_logps. Then drop the
        model: only `sums` can be used afterwards.

        data: Examples, or the training data made from them (its `data`). Called on every process; each scores
        a share.
        """
        for examples in data:
            examples = getattr(examples, "data", examples)
            if len(examples):
                examples.add_field("ref_logps", score(args, self, examples))
        self.model = None


def score(args: CommonArgs, reference: Reference, examples: Examples) -> np.ndarray:
    """The log-probability of each sequence, summed over its trained tokens: (sequences,) float32. Each
    process scores a share."""
    say(f"reference: scoring {len(examples):,} pairs")
    accelerator = reference.accelerator
    order = np.argsort(examples.sizes, kind="stable").tolist()  # batches of similar lengths
    sums = []  # of the sequences of this process, in their order; a filler is the last
    for batch in eval_batches(examples, accelerator, args.per_device_eval_batch_size, order):
        sums += reference.sums(batch).tolist()
    scored = []  # (index, log-probabilities of its sequences) of each example
    first = 0
    for i in order[accelerator.process_index :: accelerator.num_processes]:
        end = first + len(examples[i])
        scored.append((i, sums[first:end]))
        first = end
    scored = sorted(gather_lists(accelerator, scored))
    return np.concatenate([values for _, values in scored]).astype(np.float32)


def load_reference(
    args: CommonArgs, accelerator: Accelerator, model: torch.nn.Module, tokenizer: Tokenizer
) -> Reference:
    """A second model with the weights of args.model_name_or_path; with LoRA none, but the trained model
    without its adapter, or with the one it started from.

    model: the trained one, as `run.prepare` returned it.
    """
    if args.use_peft:
        return Reference(accelerator, accelerator.unwrap_model(model), without_adapter=True)
    return load_frozen(args, accelerator, tokenizer, args.model_name_or_path)


def load_frozen(args: CommonArgs, accelerator: Accelerator, tokenizer: Tokenizer, name: str) -> Reference:
    """A second, frozen model beside the trained one, by its name or folder: another reference, or a
    teacher."""
    frozen = load_pretrained(args, name, len(tokenizer), device=accelerator.device).to(accelerator.device)
    align(frozen)
    return Reference(accelerator, frozen.eval())
