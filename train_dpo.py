"""Direct preference optimisation: pairs of answers -> a model that prefers the better one.

Objective, over the B pairs of a window (all micro-batches of all processes), π the model and π_ref where it started
(Rafailov et al. 2023, arXiv 2305.18290, eq. 7):

    loss = -1/B · sum log σ(β·[log π(chosen)/π_ref(chosen) - log π(rejected)/π_ref(rejected)])
           - sft_weight/N · sum over the N tokens of the chosen answers of log π(token)

1. log π(answer) is a sum over its tokens, the end of the turn included; the prompt is not trained.
2. A pair is never split: both answers lie in the same flat row, behind their prompt, which stands there once
   (with fewer than 8 tokens, twice).
3. The second term is not in the paper: it keeps the chosen answers likely (as in RPO, arXiv 2404.19733). Off by default.
4. Dropout is off: the two models are compared token by token.
5. `per_device_train_batch_size` counts pairs.

    accelerate launch train_dpo.py                                            # the embedded demo, ~1 minute on a CPU
    accelerate launch train_dpo.py --model_name_or_path outputs/sft --dataset_name pairs.jsonl
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_dpo.py --config my_run.yaml

Shapes: T tokens of the flat row, S = 2B sequences in it: chosen, rejected, chosen, rejected, ...
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

from common.args import CommonArgs, arg, command_line, run

DEMO = "data/configs/dpo.yaml"


@dataclass
class Args(CommonArgs):
    output_dir: str = arg("outputs/dpo", help="folder of everything that the run leaves behind")
    learning_rate: float = arg(1e-6, help="peak learning rate of AdamW")

    # Data
    max_length: int = arg(1024, help="tokens of prompt and answer, for each side; longer answers keep their start")
    max_tokens_per_batch: int = arg(0, help="tokens per process and micro-batch, in place of per_device_train_batch_size")
    packing: bool = arg(False, help="fill rows of 2 max_length with several pairs (best fit)")

    # Algorithm
    beta: float = arg(0.1, help="how strongly the model is held to the reference")
    loss_type: Literal["sigmoid", "hinge", "ipo", "robust", "apo_zero", "sppo_hard", "simpo", "orpo"] = arg(
        "sigmoid", help="simpo and orpo do without the reference"
    )
    label_smoothing: float = arg(0.0, help="share of pairs taken to be the wrong way round (sigmoid, robust, simpo)")
    simpo_gamma: float = arg(0.5, help="the margin of simpo")
    sft_weight: float | None = arg(None, help="weight of the NLL of the chosen answers; unset: 0, with orpo 1")
    precompute_ref_log_probs: bool = arg(
        False, help="score all pairs with the reference once, keep that on disk, and drop it"
    )


if __name__ == "__main__":
    ARGS = command_line(Args, DEMO)  # before the imports that take seconds: --help and a wrong flag answer at once

from common.collators import Packs, Window, Windows, eval_batches, pack
from common.data.chat import stop_token_ids
from common.data.examples import Units
from common.data.formats import as_preference, preference_format
from common.data.load import load_samples, load_units
from common.data.order import BANDS
from common.data.sources import find_sources
from common.data.tokens import tokenize_pair
from common.errors import UserError, say
from common.evaluate import complete_prompts, evaluating, first_prompts, load_prompts, mean_over_sources
from common.losses import REFERENCE_FREE, dpo_loss, segment_sum
from common.model.flat_model import base_lm, disable_dropout, flops_per_token
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
from common.model.reference import precompute, reference_of
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


def make_units(columns: dict[str, Any], tokenizer: Any, *, dataset_format: str, max_length: int) -> list:
    """A dataset row as a unit of two sequences: chosen, rejected."""
    row = as_preference(columns, dataset_format)
    return [list(tokenize_pair(row["prompt"], row["chosen"], row["rejected"], tokenizer, max_length))]


def arrange(pairs: Units, args: Args) -> Units | Packs:
    """Pairs as they are batched: as they are, or packed."""
    return pack(pairs, 2 * args.max_length, BANDS if args.curriculum_column else 1) if args.packing else pairs


def pair_losses(accelerator: Any, model: Any, reference: Any, batch: dict[str, Any], args: Args) -> tuple[Any, Any, dict]:
    """Preference losses (B,), log-probabilities of the chosen answers (B,), and what is logged, summed over the pairs."""
    sums = segment_sum(model(batch), batch["cu_seqlens"])  # (S,)
    if "ref_logps" in batch:
        ref_sums = batch["ref_logps"]
    elif reference is not None:
        with accelerator.autocast():
            ref_sums = segment_sum(reference(batch), batch["cu_seqlens"])
    else:
        ref_sums = torch.zeros_like(sums)
    tokens = segment_sum(batch["loss_mask"], batch["cu_seqlens"]).clamp(min=1)
    losses, chosen_rewards, rejected_rewards = dpo_loss(
        sums[::2],
        sums[1::2],
        ref_sums[::2],
        ref_sums[1::2],
        tokens[::2],
        tokens[1::2],
        beta=args.beta,
        loss_type=args.loss_type,
        label_smoothing=args.label_smoothing,
        simpo_gamma=args.simpo_gamma,
    )
    pairs = batch["sequence_mask"][::2]  # 1, and 0 for a filler
    logged = {
        "rewards/chosen": chosen_rewards,
        "rewards/rejected": rejected_rewards,
        "rewards/margins": chosen_rewards - rejected_rewards,
        "rewards/accuracies": (chosen_rewards > rejected_rewards).float(),
        "logps/chosen": sums[::2],
        "logps/rejected": sums[1::2],
    }
    return losses * pairs, sums[::2] * pairs, {name: (value.detach() * pairs).sum() for name, value in logged.items()}


def evaluate(accelerator: Any, model: Any, reference: Any, pairs: Units, args: Args) -> dict[str, float]:
    """The loss without its SFT term, and the rewards, on held-out pairs; with several sources the loss of each, too."""
    names, table = [], []
    with evaluating(model):
        for s in range(len(pairs.sources)):
            sums: dict[str, Any] = {}
            for batch in eval_batches(pairs.of_source(s), accelerator, args.per_device_eval_batch_size):
                losses, _, logged = pair_losses(accelerator, model, reference, batch, args)
                logged = {"loss": losses.sum()} | logged | {"pairs": batch["sequence_mask"][::2].sum()}
                sums = {name: sums.get(name, 0.0) + value for name, value in logged.items()}
            names = list(sums)[:-1]
            table.append(accelerator.reduce(torch.stack(list(sums.values())), "sum").tolist())
    means = mean_over_sources(pairs.sources, [row[:-1] for row in table], [row[-1] for row in table])
    values = {f"eval_{name}": value for name, value in zip(names, means, strict=True)}
    if len(table) > 1:
        values |= {f"eval_{source.label}_loss": row[0] / row[-1] for source, row in zip(pairs.sources, table, strict=True)}
    return values


def main(args: Args) -> None:
    # --- run -----------------------------------------------------------------------------------------------------
    args.model_name_or_path = choose_model(args.model_name_or_path, "outputs/sft")
    args.dataset_name = args.dataset_name or ["data/dpo"]
    if args.label_smoothing and (args.loss_type not in ("sigmoid", "robust", "simpo") or args.label_smoothing >= 0.5):
        raise UserError(f"--label_smoothing {args.label_smoothing}: below 0.5, for sigmoid, robust and simpo only")
    if args.precompute_ref_log_probs and args.dataset_streaming:
        raise UserError("--precompute_ref_log_probs needs all pairs at hand: without --dataset_streaming")
    sft_weight = args.sft_weight if args.sft_weight is not None else float(args.loss_type == "orpo")
    accelerator, checkpoint = start(args, __file__)

    # --- tokenizer and data ----------------------------------------------------------------------------------------
    tokenizer_name = args.tokenizer_name or args.model_name_or_path
    tokenizer = load_tokenizer(
        tokenizer_name,
        args.chat_template,
        revision=None if args.tokenizer_name else args.model_revision,
        trust=args.trust_remote_code,
    )
    sources, eval_sources = find_sources(args, preference_format)
    settings = {"max_length": args.max_length}
    samples = load_samples(accelerator, args, sources, make_units, arrange, tokenizer, settings)
    eval_data = load_units(accelerator, args, eval_sources, make_units, tokenizer, settings)
    prompts = first_prompts(eval_sources or sources, tokenizer, args.num_samples, as_preference)
    if args.eval_prompts:
        prompts = load_prompts(args.eval_prompts, tokenizer)

    # --- model ---------------------------------------------------------------------------------------------------
    load = functools.partial(
        load_model,
        dtype=args.dtype,
        revision=args.model_revision,
        trust=args.trust_remote_code,
        vocab_size=len(tokenizer),
    )
    # A checkpoint is a model like any other, but for LoRA's, which holds the adapter only.
    model = load(args.model_name_or_path if args.use_peft else str(checkpoint or args.model_name_or_path))
    check_positions(model, max(samples.longest, eval_data.longest))
    if args.use_peft:
        model = add_lora(
            model, args.lora_r, args.lora_alpha, args.lora_dropout, args.lora_target_modules, checkpoint=checkpoint
        )
    if args.gradient_checkpointing or args.activation_offloading:
        enable_gradient_checkpointing(model, args.activation_offloading)
    if args.torch_compile:
        compile_layers(model)
    disable_dropout(model)
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
        indivisible=2,  # the two answers of a pair
    )
    last_step = len(windows)
    lr_at = schedule(
        args.lr_scheduler_type, args.learning_rate, last_step, args.warmup_steps, args.lr_decay_fraction, args.min_lr_ratio
    )
    betas = (args.adam_beta1, args.adam_beta2)
    optimizer = adamw(model, args.learning_rate, args.weight_decay, betas, args.adam_epsilon)
    flops = flops_per_token(model, args.max_length)
    beside = args.loss_type not in REFERENCE_FREE and not (args.use_peft or args.precompute_ref_log_probs)
    if describe(accelerator, args, model, tokenizer, samples, eval_data, windows.plan(), unit="pair", reference=beside):
        return
    model, optimizer = accelerator.prepare(model.train(), optimizer)
    reference = None
    if args.loss_type not in REFERENCE_FREE:
        frozen = None if args.use_peft else load(args.model_name_or_path).to(accelerator.device).eval()
        reference = reference_of(accelerator.unwrap_model(model), frozen)
    if args.precompute_ref_log_probs and reference is not None:
        for pairs in (samples.data, eval_data):
            weights = frozen or accelerator.unwrap_model(model)
            precompute(accelerator, reference, weights, pairs, args.per_device_eval_batch_size, args.dataset_cache_dir)
        reference = frozen = None
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
        pairs = window.num_sequences // 2  # of the window, over all processes
        chosen_tokens = window.count("loss_mask", slice(0, None, 2))
        seed_step(args.seed, step, accelerator.process_index)
        for batch in window:
            with accelerator.accumulate(model):
                losses, chosen_logps, logged = pair_losses(accelerator, model, reference, batch, args)
                loss = losses.sum() / pairs - sft_weight * chosen_logps.sum() / chosen_tokens  # <- the algorithm
                accelerator.backward(loss * window.unmean)
            metrics.add(batch["sequence_mask"][::2].sum(), **logged)
            metrics.add_share(loss=loss)
        return loss.detach()

    if args.auto_micro_batch and not checkpoint:
        fit.try_largest(gradients, windows.largest(), optimizer)
    interrupt = Interruption(accelerator, args.max_hours, args.save_minutes)
    for step in (bar := progress(first_step, last_step, "dpo")):
        if due(step, args.eval_steps, done, last_step):
            values = evaluate(accelerator, model, reference, eval_data, args)
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
    finish(
        accelerator,
        args,
        model,
        tokenizer,
        metrics,
        best,
        f"accelerate launch train_grpo.py --model_name_or_path {args.output_dir}",
    )
    interrupt.close()


if __name__ == "__main__":
    run(main, ARGS)
