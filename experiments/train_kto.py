"""KTO: single answers labelled good or bad -> a model that writes good ones.

Over the S answers of a window (all micro-batches of all processes), π the model, π_ref the model at the start
(Ethayarajh et al. 2024, arXiv 2402.01306), w the weight of the label:

    loss = 1/S · Σ w · [1 - σ(±(β·log π(answer)/π_ref(answer) - β·KL))],    + for a good answer, - for a bad one

log π(answer) is a sum over its tokens, the end of the turn included; the prompt is not trained. Dropout is
off. KL is the mean of log π/π_ref over the window's mismatched pairs (each prompt with the next row's
answer), at least 0, without gradient. --loss_type apo_zero_unpaired omits it.

    python -m experiments.train_kto                                # the embedded demo, ~1 minute on a CPU
    python -m experiments.train_kto --model_name_or_path outputs/sft --dataset_name labelled.jsonl

Shapes: T tokens of the row, S sequences in it, a prompt with its answer each; label (S,), 1: a good answer.
`flat_batch` (common/collators.py) says what a batch holds (neighbours share a prompt: `split_row`), `Output`
(common/model/flat_model.py) what the model returns.
"""

from dataclasses import dataclass
import math
import shlex
from typing import Literal

from common.args import CommonArgs, arg
from common.collators import Batch, Window, Windows, eval_batches
from common.command_line import launch
from common.data import Row, Sequence, Tokenizer, load_data, pack, tokenize_chat
from common.errors import UserError
from common.evaluate import complete_prompts, evaluate_means, load_eval_prompts
from common.losses import segment_sum
from common.model import Output, disable_dropout, load_model, load_tokenizer, make_optimizer, schedule, set_lr
from common.model.reference import load_reference
from common.run import Run
import torch

from experiments.labelled import as_labelled, mismatched

LOSS_TYPES = ("kto", "apo_zero_unpaired")


@dataclass
class Args(CommonArgs):
    output_dir: str = arg("outputs/kto", help="folder for everything that the run writes")
    learning_rate: float = arg(1e-6, help="peak learning rate of AdamW")
    per_device_train_batch_size: int = arg(
        8, help="answers (with --packing: rows) per process and micro-batch"
    )
    max_length: int = arg(
        1024, help="tokens of prompt + answer; longer answers are truncated", within="[2, 1e8]"
    )
    packing: bool = arg(False, help="fill rows of max_length with several answers (best fit)")
    max_tokens_per_batch: int = arg(
        0, help="tokens of a micro-batch, instead of a batch size; 0: off", within="[0, 1e9]"
    )
    beta: float = arg(0.1, help="how strongly the model is kept close to the reference", within="(0, inf)")
    loss_type: Literal[LOSS_TYPES] = arg("kto", help="apo_zero_unpaired has no KL term")
    desirable_weight: float = arg(
        1.0, help="weight of good answers; higher if they are fewer", within="[0, inf)"
    )
    undesirable_weight: float = arg(1.0, help="weight of bad answers", within="[0, inf)")


def encode(row: Row, tokenizer: Tokenizer, args: Args) -> list[Sequence]:
    """A dataset row as one sequence, prompt + answer, with its label and any field of your own.
    A row that raises BadRow is left out, counted and reported."""
    chat = as_labelled(row)
    (sequence,) = tokenize_chat(chat, tokenizer, max_length=args.max_length, all_or_none=True)
    return [sequence | {"label": int(chat["label"])}]


def kto_loss(
    logps: torch.Tensor,
    ref_logps: torch.Tensor,
    labels: torch.Tensor,
    kl: torch.Tensor | float = 0.0,
    *,
    beta: float,
    loss_type: str = "kto",
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One loss per answer with a label, and its implicit reward.

    logps, ref_logps (B,): summed over the answer; labels (B,): 1 for a good answer, 0 for a bad one; kl ():
    the policy's KL divergence from the reference, without gradient. Returns losses (B,), weighted by label,
    and rewards (B,): `r = β (logps
    - ref)`.

    - kto: `1 - σ(r - β kl)` for a good answer, `1 - σ(β kl - r)` for a bad one (Ethayarajh et al. 2024, arXiv
      2402.01306).
    - apo_zero_unpaired: `1 - σ(r)` and `σ(r)`, without kl (D'Oosterlinck et al. 2024, 2408.06266).

    Raises ValueError for an unknown type.
    """
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type {loss_type!r} is unknown; one of {', '.join(LOSS_TYPES)}")
    good = labels.bool()
    rewards = beta * (logps - ref_logps)
    gain = rewards - beta * kl if loss_type == "kto" else rewards
    losses = torch.where(good, -gain, gain).sigmoid()  # 1 - σ(x) = σ(-x)
    return torch.where(good, desirable_weight * losses, undesirable_weight * losses), rewards


def main(args: Args) -> None:
    # processes, seed, output folder (with a copy of this file), checkpoint to resume from
    run = Run(args, __file__)
    accelerator = run.accelerator

    # --- data -----------------------------------------------------------------------------------------------
    tokenizer = load_tokenizer(args)
    train, held_out = load_data(args, accelerator, encode, tokenizer)
    prompts = load_eval_prompts(args, accelerator, tokenizer, train, held_out, args.max_length)
    if args.packing:
        train = pack(train, args.max_length)
    windows = Windows(args, accelerator, train, max_tokens=args.max_tokens_per_batch)
    rows = {row["input_ids"].tobytes() for example in windows[0].examples for row in example}
    if args.loss_type == "kto" and len(rows) < 2:
        raise UserError(
            "--loss_type kto: its KL term needs two rows in a step (--per_device_train_batch_size, more rows)"
        )

    # --- model and reference --------------------------------------------------------------------------------
    model = disable_dropout(load_model(args, accelerator, tokenizer, run.resume_from))
    optimizer = make_optimizer(args, model)
    lr_at = schedule(args, len(windows))
    run.describe(model, tokenizer, windows, held_out, example_name="answer", reference=not args.use_peft)
    if args.dry_run:
        return
    model, optimizer = run.prepare(model, optimizer)  # Accelerate's prepare; then resumes the run
    # What the run began with, also on resume: loaded again, or with LoRA this model without (or with its
    # first) adapter.
    reference = load_reference(args, accelerator, model, tokenizer)

    # --- the gradient of a window ---------------------------------------------------------------------------
    @torch.no_grad()
    def kl_of(rows: list[Sequence]) -> torch.Tensor:
        """The KL term of these rows, which all processes have and share the work for: ()."""
        total = torch.zeros((), device=accelerator.device)
        if args.loss_type == "kto" and len(rows) > 1:  # a single row has no mismatched pair
            for batch in eval_batches(
                mismatched(rows, args.max_length), accelerator, args.per_device_eval_batch_size
            ):
                total += (model(batch).logps - reference(batch).logps).sum()
        return (accelerator.reduce(total, "sum") / len(rows)).clamp(min=0)

    def answer_losses(batch: Batch, out: Output, kl: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss of each answer and the metrics logged with it, (S,) each."""
        logps = segment_sum(out.logps, batch["cu_seqlens"])  # (S,)
        ref_logps = reference.sums(batch)
        losses, rewards = kto_loss(
            *(logps, ref_logps, batch["label"], kl),
            beta=args.beta,
            loss_type=args.loss_type,
            desirable_weight=args.desirable_weight,
            undesirable_weight=args.undesirable_weight,
        )
        is_right = (rewards > args.beta * kl) == batch["label"].bool()
        return {"loss": losses, "rewards": rewards, "rewards/accuracies": is_right.float()}

    def evaluate() -> dict[str, float]:
        """Evaluate, with the KL term of the held-out rows."""
        kl = kl_of([row for i in range(len(held_out)) for row in held_out[i]])
        return evaluate_means(
            args, accelerator, model, held_out, lambda batch: answer_losses(batch, model(batch), kl)
        )

    def gradients(window: Window) -> None:
        """A function, so that a window can be repeated in smaller micro-batches when memory runs out."""
        kl = kl_of([row for example in window.examples for row in example])  # of the whole window
        run.metrics.add(kl=kl)
        for batch in window:  # micro-batches of this process
            with accelerator.accumulate(model):
                mask = batch["sequence_mask"]  # (S,) 1; 0 if a process has no answer left
                out = model(batch)
                logged = answer_losses(batch, out, kl)
                loss = (logged.pop("loss") * mask).sum() / window.num_sequences  # <- the algorithm
                window.backward(loss + out.aux_loss)  # accelerator.backward of a sum over the window
            run.metrics.add(mask * batch["label"], **{"rewards/chosen": logged["rewards"]})
            run.metrics.add(mask * (1 - batch["label"]), **{"rewards/rejected": logged.pop("rewards")})
            run.metrics.add(mask, **logged)
            run.metrics.add_sum(loss=loss)

    # --- loop -----------------------------------------------------------------------------------------------
    # step: updates done so far; at the last one it only evaluates and ends
    for step in run.steps(last=len(windows)):
        if run.eval_due(step):
            values = evaluate()
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
    launch(main, Args, demo="experiments/configs/kto.yaml", default_model="outputs/sft")
