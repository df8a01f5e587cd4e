"""Supervised fine-tuning: conversations -> assistant.

Objective, over the trained tokens of a window (all micro-batches of all processes):

    loss = -1/N · sum_t m_t · log p(token_t | token_<t),    N = sum_t m_t

1. m_t is 1 on what the assistant writes: its words and the token that ends its turn, in every turn (--train_on).
2. All sequences of a micro-batch lie end to end in one row, without padding, and do not see each other.
3. `per_device_train_batch_size` counts conversations; with --packing, rows of up to `max_length` tokens.

    accelerate launch train_sft.py                                            # the embedded demo, ~1 minute on a CPU
    accelerate launch train_sft.py --model_name_or_path Qwen/Qwen3-0.6B --dataset_name chats.jsonl
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_sft.py --config my_run.yaml

Shapes: T tokens of the flat row.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from common.args import CommonArgs, arg, command_line, run

DEMO = "data/configs/sft.yaml"


@dataclass
class Args(CommonArgs):
    output_dir: str = arg("outputs/sft", help="folder of everything that the run leaves behind")

    # Data
    max_length: int = arg(1024, help="tokens of a conversation; longer ones keep their start")
    split_long_chats: bool = arg(False, help="cut longer conversations into several at the borders of turns instead")
    train_on: Literal["all_turns", "last_turn", "everything"] = arg("all_turns", help="turns of the assistant, or all text")
    turn_dropping: float = arg(0.0, help="with this probability a conversation ends after one of its earlier answers")
    packing: bool = arg(False, help="fill rows of max_length with several conversations (best fit)")
    max_tokens_per_batch: int = arg(0, help="tokens per process and micro-batch, in place of per_device_train_batch_size")


if __name__ == "__main__":
    ARGS = command_line(Args, DEMO)  # before the imports that take seconds: --help and a wrong flag answer at once

from common.collators import Packs, Window, Windows, pack, whole
from common.data.chat import stop_token_ids
from common.data.examples import Units
from common.data.formats import as_chat, chat_format
from common.data.load import load_samples, load_units
from common.data.order import BANDS
from common.data.sources import BadRow, find_sources
from common.data.tokens import split_chat, tokenize_chat, tokenize_completion, tokenize_documents, truncate
from common.errors import UserError, say
from common.evaluate import complete_prompts, evaluate_nll, first_prompts, load_prompts
from common.losses import nll
from common.model.flat_model import base_lm, flops_per_token
from common.model.load import (
    add_lora,
    check_positions,
    choose_model,
    compile_layers,
    enable_gradient_checkpointing,
    load_model,
    load_tokenizer,
    set_stop_tokens,
)
from common.model.optimizer import adamw, schedule, set_lr
from common.run.best import Best
from common.run.checkpoint import resume, save_checkpoint
from common.run.describe import describe
from common.run.metrics import Metrics
from common.run.nonfinite import Health
from common.run.retry import Fit
from common.run.run import due, finish, progress, seed_step, start
from common.run.signals import Interruption
from common.sampling.generate import why_not_sampled
from common.sampling.rewards import load_rewards, scorer

import torch


def make_units(
    columns: dict[str, Any], tokenizer: Any, *, dataset_format: str, max_length: int, train_on: str, split_long_chats: bool
) -> list:
    """A dataset row as units of one sequence each; BadRow in the place of a piece of a chat that cannot be used."""
    row = as_chat(columns, dataset_format)
    if "text" in row:
        return [[truncate(whole(tokenize_documents([row["text"]], tokenizer)[0]), max_length)]]
    if "completion" in row:
        return [[truncate(tokenize_completion(row["prompt"], row["completion"], tokenizer), max_length)]]
    chats, first = [row["messages"]], row.get("prompt_turns", 0)
    if split_long_chats and not first:
        chats = split_chat(row["messages"], tokenizer, max_length, tools=row["tools"])
    units = []
    for messages in chats:
        try:
            sequence = tokenize_chat(messages, tokenizer, tools=row["tools"], train_on=train_on, first_trained_turn=first)
            units.append([truncate(sequence, max_length)])
        except BadRow as reason:
            units.append(reason)
    return units


def arrange(units: Units, args: Args) -> Units | Packs:
    """Units as they are batched: as they are, or packed."""
    return pack(units, args.max_length, BANDS if args.curriculum_column else 1) if args.packing else units


def main(args: Args) -> None:
    # --- run -----------------------------------------------------------------------------------------------------
    args.model_name_or_path = choose_model(args.model_name_or_path, "outputs/pretrain")
    args.dataset_name = args.dataset_name or ["data/sft"]
    if args.train_on != "all_turns" and (args.split_long_chats or args.turn_dropping):
        raise UserError("--split_long_chats and --turn_dropping train answers in the middle of a chat: --train_on all_turns")
    accelerator, checkpoint = start(args, __file__)

    # --- tokenizer and data ----------------------------------------------------------------------------------------
    tokenizer_name = args.tokenizer_name or args.model_name_or_path
    tokenizer = load_tokenizer(
        tokenizer_name,
        args.chat_template,
        revision=None if args.tokenizer_name else args.model_revision,
        trust=args.trust_remote_code,
    )
    sources, eval_sources = find_sources(args, chat_format)
    settings = {"max_length": args.max_length, "train_on": args.train_on, "split_long_chats": args.split_long_chats}
    samples = load_samples(accelerator, args, sources, make_units, arrange, tokenizer, settings, args.turn_dropping)
    eval_data = load_units(accelerator, args, eval_sources, make_units, tokenizer, settings)
    prompts = first_prompts(eval_sources or sources, tokenizer, args.num_samples)
    if args.eval_prompts:
        prompts = load_prompts(args.eval_prompts, tokenizer)

    # --- model ---------------------------------------------------------------------------------------------------
    model = load_model(  # a checkpoint is a model like any other, but for LoRA's, which holds the adapter only
        args.model_name_or_path if args.use_peft else str(checkpoint or args.model_name_or_path),
        dtype=args.dtype,
        revision=args.model_revision,
        trust=args.trust_remote_code,
        vocab_size=len(tokenizer),
    )
    check_positions(model, max(samples.longest, eval_data.longest))
    if args.use_peft:
        model = add_lora(
            model, args.lora_r, args.lora_alpha, args.lora_dropout, args.lora_target_modules, checkpoint=checkpoint
        )
    if args.gradient_checkpointing or args.activation_offloading:
        enable_gradient_checkpointing(model, args.activation_offloading)
    if args.torch_compile:
        compile_layers(model)
    stop_ids = stop_token_ids(tokenizer, base_lm(model.lm).generation_config)
    set_stop_tokens(model, stop_ids, tokenizer)

    if reason := why_not_sampled(model):
        say(f"no samples at the evaluations: {reason}")
        prompts = []

    # --- optimizer, prepare, resume ------------------------------------------------------------------------------
    batch_size, epochs = args.per_device_train_batch_size, args.num_train_epochs
    windows = Windows(
        samples,
        accelerator,
        batch_size,
        num_epochs=epochs,
        max_steps=args.max_steps,
        max_tokens=args.max_tokens_per_batch,
    )
    last_step = len(windows)
    lr_at = schedule(
        args.lr_scheduler_type, args.learning_rate, last_step, args.warmup_steps, args.lr_decay_fraction, args.min_lr_ratio
    )
    betas = (args.adam_beta1, args.adam_beta2)
    optimizer = adamw(model, args.learning_rate, args.weight_decay, betas, args.adam_epsilon)
    flops = flops_per_token(model, args.max_length)
    if describe(accelerator, args, model, tokenizer, samples, eval_data, windows.plan(), unit="conversation"):
        return
    model, optimizer = accelerator.prepare(model.train(), optimizer)
    state = resume(accelerator, checkpoint, optimizer)
    first_step = state["step"]
    done = first_step if checkpoint else -1  # what was evaluated and saved up to here is not done again
    metrics = Metrics(accelerator, args.output_dir, args.run_name, vars(args))
    metrics.restore(state)
    health = Health(metrics, tokenizer, optimizer, args.max_bad_steps)
    fit = Fit(accelerator, model, metrics, args.auto_micro_batch)
    fit.restore(state)
    model = fit.model
    windows.restore(first_step, state.get("windows", {}))
    best = Best(args.save_best, args.early_stopping_patience, args.early_stopping_delta, args.eval_steps)
    best.restore(state)
    score = scorer(load_rewards(args.eval_reward_funcs, accelerator.device, args.reward_timeout), tokenizer)

    # --- loop ----------------------------------------------------------------------------------------------------
    def gradients(step: int, window: Window) -> torch.Tensor:
        """Add up the gradients of a window's micro-batches; returns the loss of the last one."""
        tokens = window.count("loss_mask")  # trained tokens of the window, over all processes
        seed_step(args.seed, step, accelerator.process_index)
        for batch in window:
            with accelerator.accumulate(model):
                mask = batch["loss_mask"]  # (T,), as all below
                loss, (logps, entropy, correct) = model(batch, nll_weights=mask / tokens)  # <- the algorithm
                accelerator.backward(loss * window.unmean)
            metrics.add(mask.sum(), loss=nll(logps, mask), mean_token_accuracy=(correct * mask).sum())
            metrics.add(mask.sum(), entropy=(entropy * mask).sum())
        return loss.detach()

    if args.auto_micro_batch and not checkpoint:
        fit.try_largest(gradients, windows.largest(), optimizer)
    interrupt = Interruption(accelerator, args.max_hours, args.save_minutes)
    for step in (bar := progress(first_step, last_step, "sft")):
        if due(step, args.eval_steps, done, last_step):
            values = evaluate_nll(accelerator, model, eval_data, args.per_device_eval_batch_size)
            means, completed = complete_prompts(
                accelerator,
                model,
                tokenizer,
                prompts,
                score,
                stop_ids=stop_ids,
                temperatures=args.eval_temperatures,
                max_new_tokens=args.eval_max_new_tokens,
                seed=args.seed,
            )
            metrics.log_eval(step, values | means, completed, show=args.num_samples)
            best.update(step, values | means)
        wish = interrupt.wish(possible=step < last_step)  # "", or to save or stop: signals, and the clock
        if wish or due(step, args.save_steps, max(done, 0)) or best.step == step > done:
            state = metrics.state() | fit.state() | {"windows": windows.state(step)}
            save_checkpoint(
                accelerator, model, optimizer, tokenizer, args.output_dir, step, state, args.save_total_limit, best
            )
            interrupt.saved()
        if wish == "stop":
            interrupt.leave(args.output_dir, step)
        if step == last_step or best.stops(step):
            break

        window = windows[step]  # a pure function of the step: this process's micro-batches
        set_lr(optimizer, lr_at(step))
        loss = fit(gradients, step, window)
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        health.check(loss, grad_norm, step, window.units, window.places)
        optimizer.step()
        optimizer.zero_grad()
        metrics.close_window(window.num_tokens)
        if due(step + 1, args.logging_steps, done, last_step):
            metrics.log(step + 1, bar, grad_norm=grad_norm, learning_rate=lr_at(step), flops_per_token=flops)

    # --- export --------------------------------------------------------------------------------------------------
    finish(accelerator, args, model, tokenizer, metrics, best, "accelerate launch train_grpo.py")
    interrupt.close()


if __name__ == "__main__":
    run(main, ARGS)
