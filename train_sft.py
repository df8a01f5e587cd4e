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
from typing import Any

from common.arguments import CommonArgs, arg, run
from common.chat import stop_token_ids
from common.checkpoint import resume, save_checkpoint
from common.collators import Windows, pack, whole
from common.data import as_chat, convert, hold_out, load_rows
from common.errors import UserError, say
from common.evaluate import complete_prompts, evaluate_nll, first_prompts, load_prompts
from common.generate import why_not_sampled
from common.losses import nll
from common.model import (
    add_lora,
    base_lm,
    check_positions,
    choose_model,
    compile_layers,
    count_parameters,
    enable_gradient_checkpointing,
    flops_per_token,
    load_model,
    load_tokenizer,
    set_stop_tokens,
)
from common.monitor import Metrics, require_finite
from common.optimizer import adamw, schedule, set_lr
from common.rewards import load_rewards, scorer
from common.run import due, finish, progress, seed_step, start
from common.tokens import TRAIN_ON, show_trained, tokenize_chat, tokenize_completion, tokenize_documents, truncate

DEMO = "data/configs/sft.yaml"


@dataclass
class Args(CommonArgs):
    output_dir: str = arg("outputs/sft", help="folder of everything that the run leaves behind")

    # Data
    max_length: int = arg(1024, help="tokens of a conversation; longer ones keep their start")
    train_on: str = arg("all_turns", help="all_turns or last_turn of the assistant, or everything")
    packing: bool = arg(False, help="fill rows of max_length with several conversations (best fit)")


def make_unit(columns: dict[str, Any], tokenizer: Any, args: Args) -> list:
    """A dataset row as a unit of one sequence."""
    row = as_chat(columns)
    if "text" in row:
        sequence = whole(tokenize_documents([row["text"]], tokenizer)[0])
    elif "completion" in row:
        sequence = tokenize_completion(row["prompt"], row["completion"], tokenizer)
    else:
        sequence = tokenize_chat(
            row["messages"],
            tokenizer,
            tools=row["tools"],
            train_on=args.train_on,
            first_trained_turn=row.get("prompt_turns", 0),
        )
    return [truncate(sequence, args.max_length)]


def main(args: Args) -> None:
    # --- run -----------------------------------------------------------------------------------------------------
    args.model_name_or_path = choose_model(args.model_name_or_path, "outputs/pretrain")
    args.dataset_name = args.dataset_name or ["data/sft"]
    if args.train_on not in TRAIN_ON:
        raise UserError(f"--train_on {args.train_on}: one of {', '.join(TRAIN_ON)}")
    accelerator, checkpoint = start(args, __file__)

    # --- tokenizer and data ----------------------------------------------------------------------------------------
    tokenizer_name = args.tokenizer_name or args.model_name_or_path
    tokenizer = load_tokenizer(
        tokenizer_name,
        args.chat_template,
        revision=None if args.tokenizer_name else args.model_revision,
        trust=args.trust_remote_code,
    )
    train_rows = load_rows(args.dataset_name, args.dataset_train_split, args.dataset_config, args.columns)
    eval_names, optional = args.eval_dataset_name or args.dataset_name, args.eval_dataset_name is None
    eval_rows = load_rows(eval_names, args.dataset_eval_split, args.dataset_config, args.columns, optional)
    if args.eval_fraction:
        train_rows, eval_rows = hold_out(train_rows, args.eval_fraction)
    units, eval_units = (
        convert(rows[:most], lambda columns: make_unit(columns, tokenizer, args), "rows")
        for rows, most in ((train_rows, args.max_train_samples), (eval_rows, args.max_eval_samples))
    )
    say(f"one example, with what is trained marked:\n{show_trained(units[0][0], tokenizer)}")
    if args.packing:
        units = pack(units, args.max_length)
    prompts = first_prompts(eval_rows or train_rows, tokenizer, args.num_samples)
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
    check_positions(model, max(len(sequence["input_ids"]) for unit in units + eval_units for sequence in unit))
    if args.use_peft:
        model = add_lora(
            model, args.lora_r, args.lora_alpha, args.lora_dropout, args.lora_target_modules, checkpoint=checkpoint
        )
    if args.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    if args.torch_compile:
        compile_layers(model)
    stop_ids = stop_token_ids(tokenizer, base_lm(model.lm).generation_config)
    set_stop_tokens(model, stop_ids, tokenizer)

    if reason := why_not_sampled(model):
        say(f"no samples at the evaluations: {reason}")
        prompts = []

    # --- optimizer, prepare, resume ------------------------------------------------------------------------------
    batch_size, epochs = args.per_device_train_batch_size, args.num_train_epochs
    windows = Windows(units, accelerator, batch_size, seed=args.seed, num_epochs=epochs, max_steps=args.max_steps)
    last_step = len(windows)
    lr_at = schedule(
        args.lr_scheduler_type, args.learning_rate, last_step, args.warmup_steps, args.lr_decay_fraction, args.min_lr_ratio
    )
    betas = (args.adam_beta1, args.adam_beta2)
    optimizer = adamw(model, args.learning_rate, args.weight_decay, betas, args.adam_epsilon)
    flops = flops_per_token(model, args.max_length)
    trained, all_parameters = count_parameters(model)
    model, optimizer = accelerator.prepare(model.train(), optimizer)
    state = resume(accelerator, checkpoint, optimizer)
    first_step = state["step"]
    done = first_step if checkpoint else -1  # what was evaluated and saved up to here is not done again
    metrics = Metrics(accelerator, args.output_dir, args.run_name, vars(args))
    metrics.restore(state)
    unmean = accelerator.num_processes * accelerator.gradient_accumulation_steps  # undoes the means of DDP and Accelerate
    score = scorer(load_rewards(args.eval_reward_funcs, accelerator.device), tokenizer)
    say(
        f"{trained:,} of {all_parameters:,} parameters trained; {len(units):,} conversations, {len(eval_units):,} held out; "
        f"{last_step} steps of {windows.size}"
    )

    # --- loop ----------------------------------------------------------------------------------------------------
    for step in (bar := progress(first_step, last_step, "sft")):
        if due(step, args.eval_steps, done, last_step):
            values = evaluate_nll(accelerator, model, eval_units, args.per_device_eval_batch_size) if eval_units else {}
            means, samples = complete_prompts(
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
            metrics.log_eval(step, values | means, samples, show=args.num_samples)
        if due(step, args.save_steps, max(done, 0)):
            save_checkpoint(
                accelerator, model, optimizer, tokenizer, args.output_dir, step, metrics.state(), args.save_total_limit
            )
        if step == last_step:
            break

        window = windows[step]  # a pure function of the step: this process's micro-batches
        tokens = window.count("loss_mask")  # trained tokens of the window, over all processes
        seed_step(args.seed, step, accelerator.process_index)
        for batch in window:
            with accelerator.accumulate(model):
                logps, entropy, correct = model(batch, stats=True)  # (T,) each
                mask = batch["loss_mask"]
                loss = nll(logps, mask) / tokens  # <- the algorithm
                accelerator.backward(loss * unmean)
                if accelerator.sync_gradients:
                    grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
                    require_finite(accelerator, loss, grad_norm, step, args.output_dir)
                    set_lr(optimizer, lr_at(step))
                optimizer.step()
                optimizer.zero_grad()
            metrics.add(mask.sum(), loss=nll(logps, mask), mean_token_accuracy=(correct * mask).sum())
            metrics.add(mask.sum(), entropy=(entropy * mask).sum())
        metrics.num_tokens += window.num_tokens
        if due(step + 1, args.logging_steps, done, last_step):
            metrics.log(step + 1, bar, grad_norm=grad_norm, learning_rate=lr_at(step), flops_per_token=flops)

    # --- export --------------------------------------------------------------------------------------------------
    finish(accelerator, args, model, tokenizer, metrics, "accelerate launch train_grpo.py")


if __name__ == "__main__":
    run(main, Args, DEMO)
