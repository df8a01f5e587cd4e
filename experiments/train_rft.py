"""Rejection-sampling fine-tuning: prompts and rewards -> the model's own accepted answers -> SFT on these.

Before its first step the model answers each prompt num_generations times. The answers whose rewards add up to
reward_threshold or more are written to output_dir/accepted.jsonl, each once (Yuan et al. 2023, arXiv
2308.01825). The rest is SFT on this file. Over the N trained tokens of a window (all micro-batches of all
processes that make one optimizer step):

    loss = -1/N · Σ_t m_t · log p(token_t | token_<t)

m_t is 1 on the tokens of the assistant, including the one that ends its turn, in every turn (--train_on). All
sequences of a micro-batch form one row, end to end, and do not attend to each other. With --loss_type dft
each token's term is multiplied by p(token_t), taken as a constant (Wu et al. 2025, arXiv 2508.05629):
improbable tokens count least, not most.

    python -m experiments.train_rft                                # the embedded demo, ~1 minute on a CPU

Shapes: T tokens of the flat row, S sequences in it. `flat_batch` (common/collators.py) says what a batch
holds (neighbours may share a beginning: `split_row`), `Output` (common/model/flat_model.py) what the model
returns.
"""

from dataclasses import dataclass, replace
import json
import math
from pathlib import Path
import shutil
import tempfile
from typing import Any, Literal

from common.args import CommonArgs, arg
from common.collators import Window, Windows
from common.command_line import launch
from common.data import Row, Sequence, Tokenizer, as_chat, drop_turns, load_data, pack, tokenize_chat
from common.data.formats import as_prompt
from common.data.load import load_prompts
from common.data.tokens import tokenize_row
from common.errors import UserError, say
from common.evaluate import complete_prompts, evaluate_nll, load_eval_prompts
from common.files import replace_text
from common.model import FlatModel, load_model, load_tokenizer, make_optimizer, schedule, set_lr
from common.processes import Accelerator, gather_lists
from common.run import Run
from common.sampling import load_rewards, sample, score


@dataclass
class Args(CommonArgs):
    output_dir: str = arg("outputs/rft", help="folder for everything that the run writes")
    reward_funcs: list[str] = arg(
        ["exact_number"], help="as in train_grpo.py; their sum decides", is_path=True
    )
    reward_threshold: float = arg(
        1.0, help="minimum sum of an accepted answer's rewards", within="(-inf, inf)"
    )
    num_generations: int = arg(4, help="answers sampled for each prompt", within="[1, 1e5]")
    max_completion_length: int = arg(
        256, help="tokens of an answer; longer ones are rejected", within="[1, 1e7]"
    )
    temperature: float = arg(1.0, help="sampling temperature", within="[0, inf)")
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
        if self.eval_fraction:
            raise UserError(
                "--eval_fraction would hold out answers to prompts that are trained on: --eval_dataset_name, with chats"
            )


def encode(row: Row, tokenizer: Tokenizer, args: Args) -> list[Sequence]:
    """A row of the dataset as sequences that stay together, each {"input_ids": (n,), "loss_mask": (n,)} and any
    field of your own, n numbers or one, which is passed on to the batch (--turn_dropping truncates it like the
    tokens). A chat is one sequence, or several if the chat template rewrites earlier turns. A row that raises
    BadRow is left out, counted and reported."""
    return tokenize_chat(as_chat(row), tokenizer, train_on=args.train_on, max_length=args.max_length)


def encode_prompt(row: Row, tokenizer: Tokenizer, args: Args) -> dict[str, Any]:
    """A dataset row as a prompt to sample from, with the columns that the rewards read."""
    return tokenize_row(as_prompt(row), tokenizer, args.max_length)


def write_accepted(
    args: Args, accelerator: Accelerator, model: FlatModel, tokenizer: Tokenizer, file: Path
) -> None:
    """Answer the dataset's prompts, each process a share, and write the distinct answers that the rewards
    accept. The random numbers of an answer are a function of (seed, its place)."""
    prompts = load_prompts(args, encode_prompt, tokenizer)[0].rows
    rewards = load_rewards(args.reward_funcs, accelerator.device)
    mine = range(accelerator.process_index, len(prompts) * args.num_generations, accelerator.num_processes)
    rows = [prompts[i // args.num_generations] for i in mine]
    with accelerator.autocast():
        answers = sample(
            model,
            [row["prompt_ids"] for row in rows],
            [(args.seed, i) for i in mine],
            max_new_tokens=args.max_completion_length,
            temperature=args.temperature,
        )
    texts = [tokenizer.decode(answer.ids, skip_special_tokens=True) for answer in answers]
    scores = score(rewards, rows, texts, [answer.ids for answer in answers])  # [F][answer]
    found = []
    for k, i in enumerate(mine):
        values = [function[k] for function in scores if function[k] is not None]
        if answers[k].finished and values and sum(values) >= args.reward_threshold:
            found.append((i // args.num_generations, texts[k]))
    # (number of the prompt, text), each once
    accepted = dict.fromkeys(sorted(gather_lists(accelerator, found)))
    if not accepted:
        wanted = (
            f"at most {args.max_completion_length} tokens and a reward of {args.reward_threshold:g} or more"
        )
        raise UserError(
            f"no answer has {wanted}: nothing to train on (--max_completion_length, --reward_threshold)"
        )
    if accelerator.is_main_process or args.dry_run:  # in a dry run each process has its own folder
        rows = []
        for i, text in accepted:
            row = {name: prompts[i][name] for name in ("prompt", "tools") if name in prompts[i]}
            is_text = isinstance(row["prompt"], str)
            rows.append(row | {"completion": text if is_text else [{"role": "assistant", "content": text}]})
        replace_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    answered = len({i for i, _ in accepted})
    say(
        f"{len(accepted):,} distinct answers to {answered:,} of {len(prompts):,} prompts are accepted: {file}"
    )


def main(args: Args) -> None:
    # processes, seed, output folder (with a copy of this file), checkpoint to resume from
    run = Run(args, __file__)
    accelerator = run.accelerator

    # --- data -----------------------------------------------------------------------------------------------
    tokenizer = load_tokenizer(args)
    # LoRA, recomputation, compilation as the flags say
    model = load_model(args, accelerator, tokenizer, run.resume_from)
    file = Path(tempfile.mkdtemp() if args.dry_run else args.output_dir, "accepted.jsonl")
    if run.resume_from is None:  # else the file exists, with answers of the initial model
        write_accepted(args, accelerator, model, tokenizer, file)
    elif (
        accelerator.is_main_process
        and (other := run.resume_from.parent / file.name).exists()
        and not file.exists()
    ):
        shutil.copy(other, file)  # of the folder that it resumes from
    accelerator.wait_for_everyone()
    own = {
        "dataset_name": [str(file)],
        "dataset_train_split": "train",
        "max_train_samples": None,
        "columns": None,
    }
    own |= dict.fromkeys(("dataset_config", "dataset_weights"))
    train, held_out = load_data(replace(args, **own), accelerator, encode, tokenizer)
    # what evaluations complete: the prompts of a file, or held-out ones
    prompts = load_eval_prompts(args, accelerator, tokenizer, train, held_out, args.max_length)
    train = drop_turns(train, args.turn_dropping)
    if args.packing:
        train = pack(train, args.max_length)
    # windows[step]: window of an update
    windows = Windows(args, accelerator, train, max_tokens=args.max_tokens_per_batch)

    # --- model ----------------------------------------------------------------------------------------------
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
                if args.loss_type == "nll":
                    out = model(batch, nll_weights=mask / N)
                    loss = out.nll  # -Σ_t m_t/N · log p(token_t)   <- the algorithm
                else:
                    out = model(batch, entropy=True)
                    loss = -(mask / N * out.logps.detach().exp() * out.logps).sum()
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
    launch(main, Args, demo="experiments/configs/rft.yaml", default_model="outputs/sft")
