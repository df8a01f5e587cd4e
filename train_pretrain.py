"""Pretraining: text -> base model.

Objective, over the T tokens of a window (all micro-batches of all processes):

    loss = -1/T · sum_t log p(token_t | token_<t)

1. Documents are tokenised once, each ends on the end-of-text token, and become rows of `max_length` tokens: cut from one
   long stream ("wrapped", a row may begin in the middle of a document), or packed whole ("bfd", best fit; a document
   never sees its neighbours).
2. `per_device_train_batch_size` counts rows.

    accelerate launch train_pretrain.py                                       # the embedded demo, ~2 minutes on a CPU
    accelerate launch train_pretrain.py --dataset_name corpus.txt --tokenizer_name gpt2 --hidden_size 768 --num_layers 12
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_pretrain.py --config my_run.yaml

Shapes: T tokens of the flat row, N of them scored.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from common.args import CommonArgs, arg, command_line, run

DEMO = "data/configs/pretrain.yaml"


@dataclass
class Args(CommonArgs):
    output_dir: str = arg("outputs/pretrain", help="folder of everything that the run leaves behind")
    learning_rate: float = arg(6e-4, help="peak learning rate of AdamW")
    weight_decay: float = arg(0.1, help="on matrices only, not on norms and biases")
    adam_beta2: float = arg(0.95, help="AdamW")

    # Data
    dataset_text_field: str = arg("text", help="column of the documents")
    max_length: int = arg(1024, help="tokens per row")
    max_tokens_per_batch: int = arg(0, help="tokens per process and micro-batch, in place of per_device_train_batch_size")
    packing_strategy: Literal["wrapped", "bfd"] = arg(
        "wrapped", help="wrapped: one stream, cut into rows; bfd: whole documents, packed"
    )
    vocab_size: int = arg(8192, help="of the byte-level BPE tokenizer that is trained where no tokenizer is named")

    # Model: --model_name_or_path goes on with one; else a new one, from --config_name or from these sizes (Llama type)
    config_name: str | None = arg(None, help="Hub name or folder with a config.json")
    hidden_size: int = arg(512, help="D")
    num_layers: int = arg(8, help="transformer blocks")
    num_heads: int = arg(8, help="attention heads")
    num_kv_heads: int | None = arg(None, help="key/value heads; unset: as many as heads")
    intermediate_size: int | None = arg(None, help="width of the MLP; unset: 8/3 of hidden_size")
    initializer_range: float = arg(0.02, help="standard deviation of the initial weights")
    tie_word_embeddings: bool = arg(True, help="one matrix for the input embedding and the LM head")


if __name__ == "__main__":
    ARGS = command_line(Args, DEMO)  # before the imports that take seconds: --help and a wrong flag answer at once

from common.collators import Packs, Window, Windows, pack
from common.data.cache import train_tokenizer_on
from common.data.chat import stop_token_ids
from common.data.examples import Units
from common.data.formats import as_text, text_format
from common.data.load import load_samples, load_units
from common.data.order import BANDS
from common.data.sources import find_sources
from common.errors import UserError, say
from common.evaluate import complete_prompts, evaluate_nll, first_prompts, load_prompts
from common.losses import nll
from common.model.flat_model import base_lm, flops_per_token
from common.model.load import (
    add_lora,
    check_positions,
    compile_layers,
    create_model,
    enable_gradient_checkpointing,
    llama_config,
    load_config,
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

import numpy as np
import torch


def make_units(columns: dict[str, Any], tokenizer: Any, *, dataset_format: str, dataset_text_field: str) -> str:
    """The document of a dataset row."""
    return as_text(columns, dataset_text_field)


def arrange(documents: Units, args: Args) -> Units | Packs:
    """Documents as rows of at most max_length tokens."""
    if args.packing_strategy == "wrapped":
        return documents.cut(args.max_length, across=True)
    return pack(documents.cut(args.max_length, across=False), args.max_length, BANDS if args.curriculum_column else 1)


def beginning(columns: dict[str, Any], args: Args) -> dict[str, str]:
    """The first eight words of a document, as a prompt."""
    return {"prompt": " ".join(as_text(columns, args.dataset_text_field).split()[:8])}


def unigram_perplexity(train: Units | Packs, held_out: Units | Packs, V: int) -> float:
    """What a model that knows only how frequent each token is would reach on what is scored: the line to beat."""

    def count(units: Units | Packs) -> np.ndarray:  # the first token of a sequence is not a target
        counts = np.zeros(V, np.int64)
        for at in range(0, len(units), 1000):
            some = [units[i] for i in range(at, min(at + 1000, len(units)))]
            counts += np.bincount(np.concatenate([s["input_ids"][1:] for unit in some for s in unit]), minlength=V)
        return counts

    smoothed, scored = count(train) + 1, count(held_out)
    return math.exp(-(np.log(smoothed / smoothed.sum()) * scored).sum() / scored.sum())


def main(args: Args) -> None:
    # --- run -----------------------------------------------------------------------------------------------------
    args.dataset_name = args.dataset_name or ["data/pretrain"]
    accelerator, checkpoint = start(args, __file__)

    # --- tokenizer and data ----------------------------------------------------------------------------------------
    sources, eval_sources = find_sources(args, lambda columns, wanted: text_format(columns, wanted, args.dataset_text_field))
    tokenizer_name = str(checkpoint or args.tokenizer_name or args.model_name_or_path or args.config_name or "")
    if tokenizer_name:
        tokenizer = load_tokenizer(
            tokenizer_name,
            args.chat_template,
            revision=None if args.tokenizer_name else args.model_revision,
            trust=args.trust_remote_code,
        )
    else:
        say(f"tokenizer: none named; training a byte-level BPE of {args.vocab_size} tokens on the documents")
        tokenizer = train_tokenizer_on(
            accelerator, sources, args.vocab_size, args.dataset_cache_dir, args.dataset_text_field
        )
    settings = {"dataset_text_field": args.dataset_text_field}
    samples = load_samples(accelerator, args, sources, make_units, arrange, tokenizer, settings)
    eval_data = arrange(load_units(accelerator, args, eval_sources, make_units, tokenizer, settings), args)
    baseline = unigram_perplexity(samples.units, eval_data, len(tokenizer)) if len(eval_data) else None
    prompts = first_prompts(eval_sources or sources, tokenizer, args.num_samples, lambda columns: beginning(columns, args))
    if args.eval_prompts:
        prompts = load_prompts(args.eval_prompts, tokenizer)

    # --- model ---------------------------------------------------------------------------------------------------
    if args.use_peft and not args.model_name_or_path:
        raise UserError("--use_peft adapts a model that is there: name it with --model_name_or_path")
    if checkpoint or args.model_name_or_path:
        model = load_model(  # a checkpoint is a model like any other, but for LoRA's, which holds the adapter only
            args.model_name_or_path if args.use_peft else str(checkpoint or args.model_name_or_path),
            dtype=args.dtype,
            revision=args.model_revision,
            trust=args.trust_remote_code,
            vocab_size=len(tokenizer),
        )
    elif args.config_name:
        model = create_model(load_config(args.config_name, tokenizer), dtype=args.dtype, seed=args.seed)
    else:
        config = llama_config(
            tokenizer,
            hidden_size=args.hidden_size,
            num_layers=args.num_layers,
            num_heads=args.num_heads,
            num_kv_heads=args.num_kv_heads,
            intermediate_size=args.intermediate_size,
            max_position_embeddings=max(args.max_length, 512),
            initializer_range=args.initializer_range,
            tie_word_embeddings=args.tie_word_embeddings,
        )
        model = create_model(config, dtype=args.dtype, seed=args.seed)
    check_positions(model, args.max_length)
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
    if describe(accelerator, args, model, tokenizer, samples, eval_data, windows.plan(), unit="document"):
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
    for step in (bar := progress(first_step, last_step, "pretrain")):
        if due(step, args.eval_steps, done, last_step):
            values = evaluate_nll(accelerator, model, eval_data, args.per_device_eval_batch_size)
            if baseline:
                values["eval_times_below_unigram"] = baseline / values["eval_perplexity"]
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
    finish(accelerator, args, model, tokenizer, metrics, best, "accelerate launch train_sft.py")
    interrupt.close()


if __name__ == "__main__":
    run(main, ARGS)
