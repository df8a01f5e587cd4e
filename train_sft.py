"""Supervised fine-tuning: conversations -> assistant.

Over the N trained tokens of a window (all micro-batches of all processes that make one optimizer step):

    loss = -1/N · Σ_t m_t · log p(token_t | token_<t)

m_t is 1 on the tokens of the assistant, including the one that ends its turn, in every turn (--train_on). All
sequences of a micro-batch form one row, end to end, and do not attend to each other. With --loss_type dft
each token's term is multiplied by p(token_t), taken as a constant (Wu et al. 2025, arXiv 2508.05629):
improbable tokens count least, not most.

    python train_sft.py                                            # the embedded demo, ~1 minute on a CPU
    python train_sft.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name chats.jsonl
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_sft.py --config my_run.yaml

Shapes: T tokens of the flat row, S sequences in it. `flat_batch` (common/collators.py) says what a batch
holds, `Output` (common/model/flat_model.py) what the model returns. A beginning that neighbours have in common
is in the row once: `split_row` gives each sequence in full.
"""

from dataclasses import dataclass
import math
from typing import Literal

from common.args import CommonArgs, arg
from common.collators import Window, Windows
from common.command_line import launch
from common.data import Row, Sequence, Tokenizer, as_chat, drop_turns, load_data, pack, tokenize_chat
from common.errors import UserError
from common.evaluate import complete_prompts, evaluate_nll, load_eval_prompts
from common.model import load_model, load_tokenizer, make_optimizer, schedule, set_lr
from common.run import Run


@dataclass
class Args(CommonArgs):
    output_dir: str = arg("outputs/sft", help="folder for everything that the run writes")
    per_device_train_batch_size: int = arg(
        8, help="conversations (with --packing: rows) per process and micro-batch"
    )
    max_length: int = arg(1024, help="tokens of a conversation; longer ones are truncated", within="[2, 1e8]")
    train_on: Literal["all_turns", "last_turn", "everything"] = arg(
        "all_turns", help="turns of the assistant, or all text"
    )
    loss_type: Literal["nll", "dft"] = arg("nll", help="dft: tokens weighted by their probability")
    turn_dropping: float = arg(
        0.0, help="probability, in each epoch, that a chat is cut short", within="[0, 1]"
    )
    packing: bool = arg(False, help="fill rows of max_length with several conversations (best fit)")
    max_tokens_per_batch: int = arg(
        0, help="tokens of a micro-batch, instead of a batch size; 0: off", within="[0, 1e9]"
    )

    def __post_init__(self) -> None:
        if self.turn_dropping and self.train_on != "all_turns":
            raise UserError("--turn_dropping trains answers in the middle of a chat: --train_on all_turns")


def encode(row: Row, tokenizer: Tokenizer, args: Args) -> list[Sequence]:
    """A row of the dataset as sequences that stay together, each {"input_ids": (n,), "loss_mask": (n,)} and any
    field of your own, n numbers or one, which is passed on to the batch (--turn_dropping truncates it like the
    tokens). A chat is one sequence, or several if the chat template rewrites earlier turns. A row that raises
    BadRow is left out, counted and reported."""
    return tokenize_chat(as_chat(row), tokenizer, train_on=args.train_on, max_length=args.max_length)


def main(args: Args) -> None:
    # processes, seed, output folder (with a copy of this file), checkpoint to resume from
    run = Run(args, __file__)
    accelerator = run.accelerator

    # --- data -----------------------------------------------------------------------------------------------
    tokenizer = load_tokenizer(args)
    train, held_out = load_data(args, accelerator, encode, tokenizer)
    # what evaluations complete: the prompts of a file, or held-out ones
    prompts = load_eval_prompts(args, accelerator, tokenizer, train, held_out, args.max_length)
    train = drop_turns(train, args.turn_dropping)
    if args.packing:
        train = pack(train, args.max_length)
    # windows[step]: window of an update
    windows = Windows(args, accelerator, train, max_tokens=args.max_tokens_per_batch)

    # --- model ----------------------------------------------------------------------------------------------
    # LoRA, recomputation, compilation as the flags say
    model = load_model(args, accelerator, tokenizer, run.resume_from)
    optimizer = make_optimizer(args, model)
    lr_at = schedule(args, len(windows))
    run.describe(model, tokenizer, windows, held_out, example_name="conversation")
    if args.dry_run:
        return
    model, optimizer = run.prepare(model, optimizer)  # Accelerate's prepare; then resumes the run

    # --- the gradient of a window ---------------------------------------------------------------------------
    def gradients(window: Window) -> None:
        """A function, so that a window can be repeated in smaller micro-batches when memory runs out."""
        N = window.total("loss_mask")  # over all processes
        for batch in window:  # micro-batches of this process
            with accelerator.accumulate(model):
                mask = batch["loss_mask"]  # (T,)
                weights = mask / N  # (T,)
                if args.loss_type == "nll":
                    out = model(batch, nll_weights=weights)
                    loss = out.nll  # the sum -Σ_t m_t/N · log p(token_t)   <- the algorithm
                else:
                    out = model(batch, entropy=True)
                    loss = -(weights * out.logps.detach().exp() * out.logps).sum()
                window.backward(loss + out.aux_loss)  # accelerator.backward of a sum over the window
            run.metrics.add(mask, loss=-out.logps, mean_token_accuracy=out.correct, entropy=out.entropy)

    # --- loop -----------------------------------------------------------------------------------------------
    # step: updates done so far; at the last one it only evaluates and ends
    for step in run.steps(last=len(windows)):
        if run.eval_due(step):
            values = evaluate_nll(args, accelerator, model, held_out)
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

    run.finish(try_next="python train_grpo.py")


if __name__ == "__main__":
    launch(main, Args, demo="data/configs/sft.yaml", default_model="outputs/pretrain")
