"""Reward model: pairs of answers -> a model that scores an answer with one number, higher for the better one.

Over the P pairs of a window (all micro-batches of all processes), r the score (Ouyang et al. 2022, arXiv
2203.02155, eq. 1):

    loss = 1/P · Σ -log σ(r(chosen) - r(rejected) - margin) + center_rewards_coefficient · (r(chosen) + r(rejected))²

--objective regression: for rows with a number in the column score, it is the mean of (r - score)². r is a
linear head on the state of the last token. Dropout is off. The result is an
AutoModelForSequenceClassification in output_dir/classifier. Both answers of a pair are in the same row, after
their prompt, which is stored once.

    python -m experiments.train_reward                             # the embedded demo, ~1 minute on a CPU
    python train_grpo.py --reward_funcs outputs/reward/classifier  # and then

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
from common.data.formats import as_chat
from common.data.tokens import tokenize_chat
from common.errors import UserError
from common.evaluate import evaluate_means
from common.model import Output, disable_dropout, load_model, load_tokenizer, make_optimizer, schedule, set_lr
from common.run import Run
import torch

from experiments.classifier import save_classifier, score_head
from experiments.scored import number_of, up_to_the_score


@dataclass
class Args(CommonArgs):
    output_dir: str = arg("outputs/reward", help="folder for everything that the run writes")
    learning_rate: float = arg(1e-5, help="peak learning rate of AdamW")
    per_device_train_batch_size: int = arg(8, help="pairs (with --packing: rows) per process and micro-batch")
    max_length: int = arg(1024, help="tokens of prompt + answer; longer ones are left out", within="[2, 1e8]")
    packing: bool = arg(False, help="fill rows of 2 max_length with several pairs (best fit)")
    max_tokens_per_batch: int = arg(
        0, help="tokens of a micro-batch, instead of a batch size; 0: off", within="[0, 1e9]"
    )
    objective: Literal["pairs", "regression"] = arg(
        "pairs", help="regression: on the number of each row, column score"
    )
    center_rewards_coefficient: float = arg(
        0.0, help="weight of the term that keeps scores near 0", within="[0, inf)"
    )

    def __post_init__(self) -> None:
        if self.use_peft and not self.merge_lora:
            raise UserError("--use_peft: the classifier that is saved is one model: add --merge_lora")


def encode(row: Row, tokenizer: Tokenizer, args: Args) -> list[Sequence]:
    """A dataset row as two sequences that stay together, prompt + chosen and prompt + rejected, with any
    field of your own. For a regression as one. A row that raises BadRow is left out, counted and reported."""
    if args.objective == "regression":
        chat, score = as_chat(row), {"score": number_of(row, "score")}
        (sequence,) = tokenize_chat(chat, tokenizer, train_on="last_turn")
        return [up_to_the_score(sequence, tokenizer, args.max_length, "messages" not in chat) | score]
    pair = as_preference(row)
    sides = tokenize_pair(pair, tokenizer, 10**9)
    is_text, margin = isinstance(pair["prompt"], str), {"margin": number_of(row, "margin", 0.0)}
    return [up_to_the_score(side, tokenizer, args.max_length, is_text) | margin for side in sides]


def bradley_terry_loss(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    margin: torch.Tensor | float = 0.0,
    center_rewards_coefficient: float = 0.0,
) -> torch.Tensor:
    """`-log σ(chosen - rejected - margin) + c (chosen + rejected)²` of the rewards of pairs: (B,), (B,) ->
    (B,).

    The first term is that of Bradley and Terry (Ouyang et al. 2022, arXiv 2203.02155, eq. 1), with a margin
    as in Llama 2 (2307.09288, eq. 2); the second one, off by default, keeps rewards near 0 (Eisenstein et al.
    2023, 2312.09244).
    """
    return (
        -torch.nn.functional.logsigmoid(chosen - rejected - margin)
        + center_rewards_coefficient * (chosen + rejected) ** 2
    )


def main(args: Args) -> None:
    # processes, seed, output folder (with a copy of this file), checkpoint to resume from
    run = Run(args, __file__)
    accelerator = run.accelerator
    pairs = args.objective == "pairs"

    # --- data -----------------------------------------------------------------------------------------------
    tokenizer = load_tokenizer(args)
    train, held_out = load_data(args, accelerator, encode, tokenizer)
    if args.packing:
        train = pack(train, 2 * args.max_length)
    windows = Windows(args, accelerator, train, max_tokens=args.max_tokens_per_batch, indivisible=1 + pairs)

    # --- model ----------------------------------------------------------------------------------------------
    model = disable_dropout(load_model(args, accelerator, tokenizer, run.resume_from))
    model.extra["score"] = score_head(model)  # (T, D) -> (T, 1)
    optimizer = make_optimizer(args, model)
    lr_at = schedule(args, len(windows))
    run.describe(model, tokenizer, windows, held_out, example_name="pair" if pairs else "answer")
    if args.dry_run:
        return
    model, optimizer = run.prepare(model, optimizer)  # Accelerate's prepare; then resumes the run

    # --- the gradient of a window ---------------------------------------------------------------------------
    def pair_losses(batch: Batch, out: Output) -> dict[str, torch.Tensor]:
        """The loss of each pair and the metrics logged with it, (B,) each; for a regression of each
        answer."""
        scores = out.extra["score"][batch["cu_seqlens"][1:] - 1, 0].float()  # (S,)
        if not pairs:
            return {"loss": (scores - batch["score"]) ** 2, "rewards": scores}
        chosen_rewards, rejected_rewards = scores[::2], scores[1::2]
        margin, centre = batch["margin"][::2], args.center_rewards_coefficient
        losses = bradley_terry_loss(chosen_rewards, rejected_rewards, margin, centre)
        return {
            "loss": losses,
            "rewards/chosen": chosen_rewards,
            "rewards/rejected": rejected_rewards,
            "rewards/margins": chosen_rewards - rejected_rewards,
            "rewards/accuracies": (chosen_rewards > rejected_rewards).float(),
            # if calibrated, the accuracy
            "rewards/confidences": (chosen_rewards - rejected_rewards).abs().sigmoid(),
        }

    def eval_losses(batch: Batch) -> dict[str, torch.Tensor]:
        return pair_losses(batch, model(batch, extra=["score"]))

    def gradients(window: Window) -> None:
        """A function, so that a window can be repeated in smaller micro-batches when memory runs out."""
        P = window.num_sequences // (1 + pairs)
        for batch in window:  # micro-batches of this process
            with accelerator.accumulate(model):
                pair_mask = batch["sequence_mask"][:: 1 + pairs]  # (B,) 1; 0 if a process has no pair left
                out = model(batch, extra=["score"])
                logged = pair_losses(batch, out)
                loss = (logged.pop("loss") * pair_mask).sum() / P  # <- the algorithm
                window.backward(loss + out.aux_loss)  # accelerator.backward of a sum over the window
            run.metrics.add(pair_mask, **logged)
            run.metrics.add_sum(loss=loss)

    # --- loop -----------------------------------------------------------------------------------------------
    # step: updates done so far; at the last one it only evaluates and ends
    for step in run.steps(last=len(windows)):
        if run.eval_due(step):
            values = evaluate_means(args, accelerator, model, held_out, eval_losses)
            run.log_eval(step, values, [])
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

    classifier = f"{args.output_dir}/classifier"
    run.finish(
        try_next=f"python train_grpo.py --reward_funcs {shlex.quote(str(classifier))}",
        also=lambda: save_classifier(args.output_dir, "score", classifier),
    )


if __name__ == "__main__":
    launch(main, Args, demo="experiments/configs/reward.yaml", default_model="outputs/sft")
