"""Direct preference optimisation: pairs of answers -> a model that prefers the better one.

Over the P pairs of a window (all micro-batches of all processes), π the model, π_ref the model at the start
(Rafailov et al. 2023, arXiv 2305.18290, eq. 7):

    loss = -1/P · Σ log σ(β·[log π(chosen)/π_ref(chosen) - log π(rejected)/π_ref(rejected)])
           - sft_weight/N · Σ over the N tokens of the chosen answers of log π(token)

log π(answer) is a sum over its tokens, the end of the turn included; the prompt is not trained. Dropout is
off. The second term (RPO, 2404.19733) is off by default. --loss_type selects variants of the first one (simpo
and orpo need no π_ref); several are summed with --loss_weights (MPO, 2411.10442: sigmoid 0.8, bco_pair 0.2,
--sft_weight 1). Both answers of a pair are in the same row, after their prompt, which is stored once.

    python train_dpo.py                                            # the embedded demo, ~1 minute on a CPU
    python train_dpo.py --model_name_or_path outputs/sft --dataset_name pairs.jsonl
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_dpo.py --config my_run.yaml

Shapes: T tokens of the row, B pairs and S = 2B sequences in it: chosen, rejected, chosen, rejected, ...
`flat_batch` (common/collators.py) says what a batch holds (neighbours share a prompt: `split_row`), `Output`
(common/model/flat_model.py) what the model returns.
"""

from dataclasses import dataclass
import math
import shlex
from typing import Literal

from common.args import CommonArgs, arg
from common.collators import Batch, Window, Windows
from common.command_line import launch
from common.data import Row, Sequence, Tokenizer, as_preference, load_data, pack, tokenize_pair
from common.errors import UserError
from common.evaluate import complete_prompts, evaluate_means, load_eval_prompts
from common.losses import DPO_LOSS_TYPES, REFERENCE_FREE, SMOOTHED, dpo_loss, segment_sum
from common.model import Output, disable_dropout, load_model, load_tokenizer, make_optimizer, schedule, set_lr
from common.model.reference import load_reference
from common.run import Run
import torch


@dataclass
class Args(CommonArgs):
    output_dir: str = arg("outputs/dpo", help="folder for everything that the run writes")
    learning_rate: float = arg(1e-6, help="peak learning rate of AdamW")
    per_device_train_batch_size: int = arg(8, help="pairs (with --packing: rows) per process and micro-batch")
    max_length: int = arg(
        1024, help="tokens of prompt + answer; longer answers are truncated", within="[2, 1e8]"
    )
    packing: bool = arg(False, help="fill rows of 2 max_length with several pairs (best fit)")
    max_tokens_per_batch: int = arg(
        0, help="tokens of a micro-batch, instead of a batch size; 0: off", within="[0, 1e9]"
    )
    beta: float = arg(0.1, help="how strongly the model is kept close to the reference", within="(0, inf)")
    loss_type: list[Literal[DPO_LOSS_TYPES]] = arg(
        ["sigmoid"], help="one or several; simpo, orpo: without the reference"
    )
    loss_weights: list[float] | None = arg(
        None, help="weights of several loss types; unset: 1 each", within="(0, inf)"
    )
    label_smoothing: float = arg(
        0.0, help="assumed share of pairs whose labels are swapped", within="[0, 0.5)"
    )
    simpo_gamma: float = arg(0.5, help="the margin of simpo", within="[0, inf)", needs="loss_type=simpo")
    sft_weight: float | None = arg(
        None, help="weight of the chosen answers' NLL; unset: 0, with orpo 1", within="[0, inf)"
    )
    precompute_ref_log_probs: bool = arg(
        False,
        help="score all pairs with the reference before training, and free the model",
        may_change="execution",
    )

    def __post_init__(self) -> None:
        if self.loss_weights is not None and len(self.loss_weights) != len(self.loss_type):
            raise UserError(f"--loss_weights: {len(self.loss_weights)} for {len(self.loss_type)} --loss_type")
        if self.label_smoothing and not set(self.loss_type).issubset(SMOOTHED):
            raise UserError(
                f"--label_smoothing {self.label_smoothing}: for --loss_type {', '.join(SMOOTHED)} only"
            )
        if self.precompute_ref_log_probs and self.dataset_streaming:
            raise UserError(
                "--precompute_ref_log_probs needs all pairs in advance: without --dataset_streaming"
            )


def encode(row: Row, tokenizer: Tokenizer, args: Args) -> list[Sequence]:
    """A dataset row as two sequences that stay together, prompt + chosen and prompt + rejected, with any
    field of your own. A row that raises BadRow is left out, counted and reported."""
    return tokenize_pair(as_preference(row), tokenizer, args.max_length)


def main(args: Args) -> None:
    # processes, seed, output folder (with a copy of this file), checkpoint to resume from
    run = Run(args, __file__)
    accelerator = run.accelerator
    uses_reference = not set(args.loss_type).issubset(REFERENCE_FREE)
    sft_weight = args.sft_weight if args.sft_weight is not None else float("orpo" in args.loss_type)

    # --- data -----------------------------------------------------------------------------------------------
    tokenizer = load_tokenizer(args)
    train, held_out = load_data(args, accelerator, encode, tokenizer)
    prompts = load_eval_prompts(
        args, accelerator, tokenizer, train, held_out, args.max_length, prompt_of=as_preference
    )
    if args.packing:
        train = pack(train, 2 * args.max_length)
    # a pair stays together
    windows = Windows(args, accelerator, train, max_tokens=args.max_tokens_per_batch, indivisible=2)

    # --- model and reference --------------------------------------------------------------------------------
    model = disable_dropout(load_model(args, accelerator, tokenizer, run.resume_from))
    optimizer = make_optimizer(args, model)
    lr_at = schedule(args, len(windows))
    has_second_model = uses_reference and not (args.use_peft or args.precompute_ref_log_probs)
    run.describe(model, tokenizer, windows, held_out, example_name="pair", reference=has_second_model)
    if args.dry_run:
        return
    model, optimizer = run.prepare(model, optimizer)  # Accelerate's prepare; then resumes the run
    # What the run began with, also on resume: loaded again, or with LoRA this model without (or with its
    # first) adapter.
    reference = load_reference(args, accelerator, model, tokenizer) if uses_reference else None
    if uses_reference and args.precompute_ref_log_probs:
        reference.precompute(args, train, held_out)  # and the reference is freed

    # --- the gradient of a window ---------------------------------------------------------------------------
    def pair_losses(batch: Batch, out: Output) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of each pair, (B,), and the metrics logged with it, (B,) each."""
        logps = segment_sum(out.logps, batch["cu_seqlens"])  # (S,)
        ref_logps = reference.sums(batch) if uses_reference else torch.zeros_like(logps)
        lengths = segment_sum(batch["loss_mask"], batch["cu_seqlens"]).clamp(min=1)  # of the answers
        losses, chosen_rewards, rejected_rewards = dpo_loss(
            chosen_logps=logps[::2],
            rejected_logps=logps[1::2],
            ref_chosen_logps=ref_logps[::2],
            ref_rejected_logps=ref_logps[1::2],
            chosen_tokens=lengths[::2],
            rejected_tokens=lengths[1::2],
            beta=args.beta,
            loss_type=args.loss_type,
            loss_weights=args.loss_weights,
            label_smoothing=args.label_smoothing,
            simpo_gamma=args.simpo_gamma,
        )
        return losses, {
            "rewards/chosen": chosen_rewards,
            "rewards/rejected": rejected_rewards,
            "rewards/margins": chosen_rewards - rejected_rewards,
            "rewards/accuracies": (chosen_rewards > rejected_rewards).float(),
            "nll_loss": -logps[::2] / lengths[::2],
            "logps/chosen": logps[::2],
            "logps/rejected": logps[1::2],
        }

    def eval_losses(batch: Batch) -> dict[str, torch.Tensor]:
        """The same, with both terms in the loss; the second is a mean for each pair."""
        losses, logged = pair_losses(batch, model(batch))
        return {"loss": losses + sft_weight * logged["nll_loss"]} | logged

    def gradients(window: Window) -> None:
        """A function, so that a window can be repeated in smaller micro-batches when memory runs out."""
        P = window.num_sequences // 2  # pairs, over all processes
        chosen_tokens = window.total("loss_mask", sequences=slice(0, None, 2))  # of the first of each pair
        for batch in window:  # micro-batches of this process
            with accelerator.accumulate(model):
                pair_mask = batch["sequence_mask"][::2]  # (B,) 1; 0 if a process has no pair left
                out = model(batch)
                losses, logged = pair_losses(batch, out)
                sft_loss = -(logged["logps/chosen"] * pair_mask).sum() / chosen_tokens
                loss = (losses * pair_mask).sum() / P + sft_weight * sft_loss  # <- the algorithm
                window.backward(loss + out.aux_loss)  # accelerator.backward of a sum over the window
            run.metrics.add(pair_mask, **logged)
            run.metrics.add_sum(loss=loss)

    # --- loop -----------------------------------------------------------------------------------------------
    # step: updates done so far; at the last one it only evaluates and ends
    for step in run.steps(last=len(windows)):
        if run.eval_due(step):
            values = evaluate_means(args, accelerator, model, held_out, eval_losses)
            scores, samples = complete_prompts(args, accelerator, model, tokenizer, prompts)
            run.log_eval(step, values | scores, samples)
        # saves if it is due; true after the last step or by early stopping; at a signal the run exits here
        if run.checkpoint(step):
            break

        window = windows[step]
        set_lr(optimizer, lr_at(step))
        # out of memory: from the start, in smaller micro-batches, on all processes
        run.retry_smaller(gradients, window)
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        if run.is_finite(grad_norm, window):  # otherwise reported, counted, and its rows kept in bad_batches/
            optimizer.step()
        optimizer.zero_grad()
        run.log(step + 1, window, grad_norm=grad_norm, learning_rate=lr_at(step))

    run.finish(try_next=f"python train_grpo.py --model_name_or_path {shlex.quote(args.output_dir)}")


if __name__ == "__main__":
    launch(main, Args, demo="data/configs/dpo.yaml", default_model="outputs/sft")
