"""Group-relative policy optimisation: prompts and rewards -> a model that is better at what is rewarded.

For each prompt, G completions are sampled from the model; each is compared with its group (Shao et al. 2024, arXiv
2402.03300). Over the tokens t of the completions i of a window (all micro-batches of all processes):

    A_i  = (r_i - mean of the group) / (std of the group + 1e-4)
    ρ_t  = π(token_t) / π_old(token_t)
    loss = sum_i w_i · sum_t [ -min(ρ_t A_i, clip(ρ_t, 1-ε, 1+ε_high) A_i) + β KL_t - entropy_coef · H_t ]

1. w_i is 1 / (tokens of the window) by default ("dapo"); see `grpo_token_weights` for grpo, bnpo and dr_grpo.
2. What was sampled is what is trained on, token by token; text is never tokenised again. Log-probabilities have the
   temperature of the sampling in them.
3. KL is to the model at the start, by the k3 estimator times ρ; with β = 0 (the default) there is no such model in memory.
4. Groups in which all rewards are equal teach nothing; where β and entropy_coef are 0 they are left out of the forward
   pass, and stay in the denominator.
5. `per_device_train_batch_size` counts completions. One rollout serves steps_per_generation windows, num_iterations times
   each; both are 1 by default, and then ρ = 1 and the value of the loss says little: look at the reward.

    accelerate launch train_grpo.py                                           # the embedded demo, ~1 minute on a CPU
    accelerate launch train_grpo.py --model_name_or_path outputs/sft --dataset_name prompts.jsonl --reward_funcs my.py:reward
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_grpo.py --config my_run.yaml

Shapes: T tokens of the flat row, S sequences in it, P prompts, G completions of each, C = P·G, F reward functions.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

from common.args import CommonArgs, arg, command_line, run

DEMO = "data/configs/grpo.yaml"


@dataclass
class Args(CommonArgs):
    output_dir: str = arg("outputs/grpo", help="folder of everything that the run leaves behind")
    learning_rate: float = arg(1e-6, help="peak learning rate of AdamW")
    lr_scheduler_type: Literal["cosine", "linear", "constant", "wsd"] = arg("constant", help="wsd: flat, then linear")

    # Rewards
    reward_funcs: list[str] = arg(
        ["exact_number"], help="exact_number[:MARK], regex:PATTERN, length:N, file.py:function, or a reward model"
    )
    reward_weights: list[float] | None = arg(None, help="one for each function; unset: 1")
    scale_rewards: Literal["group", "batch", "none"] = arg("group", help="whose standard deviation divides advantages")

    # Sampling
    num_generations: int = arg(8, help="G, completions per prompt")
    system_prompt: str | None = arg(None, help="makes chats of string prompts, with this system turn (empty: none)")
    max_prompt_length: int = arg(512, help="tokens; longer prompts are left out")
    max_completion_length: int = arg(256, help="tokens; longer completions are cut")
    temperature: float = arg(1.0, help="of the sampling")
    top_p: float = arg(1.0, help="sample from the most probable tokens that together have this share; 1: all")
    top_k: int = arg(0, help="sample from the k most probable tokens; 0: all")
    generation_batch_size: int = arg(128, help="completions sampled at a time on a process; bounds the memory only")
    mask_truncated_completions: bool = arg(False, help="do not train on completions that were cut")

    # Algorithm
    beta: float = arg(0.0, help="weight of the KL to the model at the start; 0: no reference model")
    epsilon: float = arg(0.2, help="clip range of the ratio, below 1")
    epsilon_high: float | None = arg(None, help="above 1; unset: as epsilon (DAPO: 0.28)")
    entropy_coef: float = arg(0.0, help="weight of an entropy bonus")
    loss_type: Literal["grpo", "bnpo", "dapo", "dr_grpo"] = arg("dapo", help="what a token weighs")
    importance_sampling_level: Literal["token", "sequence"] = arg("token", help="of the ratio; sequence: GSPO")
    use_bias_correction_kl: bool = arg(True, help="multiply the KL by the ratio, for the gradient of the reverse KL")
    num_iterations: int = arg(1, help="updates on each rollout")
    steps_per_generation: int = arg(1, help="windows that one rollout serves")


if __name__ == "__main__":
    ARGS = command_line(Args, DEMO)  # before the imports that take seconds: --help and a wrong flag answer at once

from common.collators import Window, flat_batch, split_row
from common.data.chat import stop_token_ids
from common.data.formats import as_prompt, prompt_format
from common.data.load import Items, make_order
from common.data.sources import find_sources
from common.data.tokens import tokenize_row
from common.errors import UserError, say
from common.evaluate import complete_prompts, gather_lists, load_prompts
from common.losses import (
    combine_rewards,
    group_advantages,
    grpo_loss,
    grpo_token_weights,
    segment_ids,
)
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
from common.model.reference import reference_of
from common.run.best import Best
from common.run.checkpoint import resume, save_checkpoint
from common.run.describe import describe
from common.run.metrics import Metrics
from common.run.nonfinite import Health
from common.run.retry import Fit
from common.run.run import due, finish, progress, seed_step, start
from common.run.signals import Interruption
from common.sampling.generate import sample
from common.sampling.rewards import load_rewards, score, scorer

import numpy as np
import torch


def check(args: Args, world: int) -> None:
    """Settings that cannot work, before anything is loaded."""
    window = args.per_device_train_batch_size * args.gradient_accumulation_steps * world
    if args.num_generations < 2:
        raise UserError(f"--num_generations {args.num_generations}: a group needs at least 2 completions to compare")
    if window % args.num_generations:
        raise UserError(
            f"--num_generations {args.num_generations} does not divide the {window} completions of a step "
            f"(per_device_train_batch_size {args.per_device_train_batch_size} x gradient_accumulation_steps "
            f"{args.gradient_accumulation_steps} x {world} processes)"
        )
    if args.save_best and args.eval_steps % (args.steps_per_generation * args.num_iterations):
        raise UserError("--save_best: eval_steps has to be a multiple of steps_per_generation x num_iterations")
    if args.reward_weights is not None and len(args.reward_weights) != len(args.reward_funcs):
        raise UserError(f"--reward_weights: {len(args.reward_weights)} weights for {len(args.reward_funcs)} functions")
    if not 0 < args.top_p <= 1 or args.top_k < 0:
        raise UserError(f"--top_p is a share in (0, 1] and --top_k at least 0, not {args.top_p} and {args.top_k}")
    if args.temperature <= 0:
        raise UserError("--temperature must be above 0: greedy completions of a prompt are all the same")


def roll_out(
    accelerator: Any, model: Any, tokenizer: Any, rows: list[dict], rewards: list, key: tuple[int, int], sampling: dict
) -> list[dict[str, Any]]:
    """Sample and score one completion for each of the C rows (a prompt stands G times in succession), over all processes.

    Each process samples a contiguous share, and gets everything: {"ids", "logps", "finished", "text", "rewards" (F)}. The
    randomness of a completion is a function of key and its place, whoever samples it.
    """
    share = -(-len(rows) // accelerator.num_processes)
    mine = range(accelerator.process_index * share, min((accelerator.process_index + 1) * share, len(rows)))
    with accelerator.autocast():
        completions = sample(
            accelerator.unwrap_model(model),
            [rows[i]["prompt_ids"] for i in mine],
            [(*key, i) for i in mine],
            **sampling,
        )
    texts = [tokenizer.decode(completion.ids, skip_special_tokens=True) for completion in completions]
    scores = score(
        rewards, [rows[i] for i in mine], texts, [completion.ids for completion in completions]
    )  # [F][completion]
    results = [
        completion._asdict() | {"text": text, "rewards": [function[k] for function in scores]}
        for k, (completion, text) in enumerate(zip(completions, texts, strict=True))
    ]
    return gather_lists(accelerator, results)


def judge(
    completions: list[dict], G: int, weights: list[float], names: list[str], scale_rewards: str
) -> tuple[torch.Tensor, dict[str, float]]:
    """Advantages (C,) of a rollout, 0 where no function gave a reward, and what is logged of it."""
    table = [[math.nan if value is None else value for value in completion["rewards"]] for completion in completions]
    per_function = torch.tensor(table, dtype=torch.float64)  # (C, F)
    reward = combine_rewards(per_function, torch.tensor(weights, dtype=torch.float64))  # (C,)
    if bool(reward.isnan().all()):
        raise UserError("no reward function gave a number for any completion of this step (all returned None)")
    groups = reward.view(-1, G)  # (P, G)
    advantages = group_advantages(groups, scale_rewards)
    stds = torch.stack([group[~group.isnan()].std() for group in groups])  # NaN where fewer than two are known
    lengths = torch.tensor([len(completion["ids"]) for completion in completions], dtype=torch.float64)
    finished = torch.tensor([completion["finished"] for completion in completions])
    logged = {
        "reward": reward.nanmean().item(),
        "reward_std": stds.nanmean().item(),
        "frac_idle_rollouts": float(not advantages.any()),
        "frac_reward_zero_std": (~(stds > 1e-12)).double().mean().item(),
        "completions/mean_length": lengths.mean().item(),
        "completions/min_length": lengths.min().item(),
        "completions/max_length": lengths.max().item(),
        "completions/clipped_ratio": (~finished).double().mean().item(),
    }
    if finished.any():
        logged["completions/mean_terminated_length"] = lengths[finished].mean().item()
    for f, name in enumerate(names):
        values = per_function[:, f][~per_function[:, f].isnan()]
        if len(values):
            logged |= {f"rewards/{name}/mean": values.mean().item(), f"rewards/{name}/std": values.std(correction=0).item()}
    return advantages.flatten().float(), logged


def make_windows(
    rows: list[dict], completions: list[dict], advantages: torch.Tensor, accelerator: Any, args: Args
) -> list[Window]:
    """A rollout as steps_per_generation windows, of this process's sequences, in gradient_accumulation_steps micro-batches.

    A completion without advantage has no gradient where there is neither KL nor entropy in the loss: it stays in the
    denominators, and is not run through the model.
    """
    trained = torch.tensor([c["finished"] or not args.mask_truncated_completions for c in completions])
    trained &= torch.tensor([any(value is not None for value in c["rewards"]) for c in completions])
    tokens = torch.tensor([float(len(c["ids"])) for c in completions])
    size = len(completions) // args.steps_per_generation
    share, parts = size // accelerator.num_processes, args.gradient_accumulation_steps
    windows = []
    for first in range(0, len(completions), size):
        inside = slice(first, first + size)
        of_window, of_rollout = ((tokens[s] * trained[s]).sum().item() for s in (inside, slice(None)))
        weights = grpo_token_weights(
            args.loss_type,
            tokens[inside],
            window_tokens=of_rollout / args.steps_per_generation if args.loss_type == "dapo" else of_window,
            window_completions=trained[inside].sum().item(),
            max_completion_length=args.max_completion_length,
        )
        mine = range(first + accelerator.process_index * share, first + (accelerator.process_index + 1) * share)
        always = args.beta > 0 or args.entropy_coef > 0
        kept = [i for i in mine if trained[i] and (always or advantages[i] != 0)]
        units = []
        for i in kept or [mine[0]]:
            prompt, answer = rows[i]["prompt_ids"], completions[i]["ids"]
            sequence = {
                "input_ids": np.array(prompt + answer),
                "loss_mask": np.array([0] * len(prompt) + [1] * len(answer), np.uint8),
                "sampled_logps": np.array([0.0] * len(prompt) + completions[i]["logps"], np.float32),
                "advantage": float(advantages[i]),
                "token_weight": float(weights[i - first]),
            }
            units.append([sequence])
        split = [part.tolist() for part in np.array_split(np.arange(len(units)), parts)] if kept else [[]] * parts
        windows.append(Window(units, split, accelerator))
    return windows


def write_completions(metrics: Metrics, step: int, rows: list, completions: list, advantages: Any, names: list[str]) -> None:
    """The rollout that serves `step`, a line per completion, in completions.jsonl."""
    lines = [
        {"step": step, "prompt": row["prompt"], "completion": completion["text"], "finished": completion["finished"]}
        | {"rewards": dict(zip(names, completion["rewards"], strict=True)), "advantage": advantage}
        for row, completion, advantage in zip(rows, completions, advantages.tolist(), strict=True)
    ]
    metrics.append("completions.jsonl", lines)


@torch.no_grad()
def add_logps(accelerator: Any, function: Any, windows: list, name: str, temperature: float) -> None:
    """Give every sequence of a rollout its token log-probabilities under `function`, as the field `name`."""
    for window in windows:
        for units in window.micro_batches():
            batch = flat_batch(units, accelerator.device)
            with accelerator.autocast():
                logps = function(batch, temperature).cpu()
            for unit, values in zip(units, split_row(logps, batch), strict=True):
                unit[0][name] = values.numpy()


def main(args: Args) -> None:
    # --- run -----------------------------------------------------------------------------------------------------
    args.model_name_or_path = choose_model(args.model_name_or_path, "outputs/sft")
    args.dataset_name = args.dataset_name or ["data/grpo"]
    if args.dataset_streaming:
        raise UserError("--dataset_streaming: GRPO keeps its prompts in memory; they are few beside what is sampled")
    accelerator, checkpoint = start(args, __file__)
    check(args, accelerator.num_processes)

    # --- tokenizer and data ----------------------------------------------------------------------------------------
    tokenizer_name = args.tokenizer_name or args.model_name_or_path
    tokenizer = load_tokenizer(
        tokenizer_name,
        args.chat_template,
        revision=None if args.tokenizer_name else args.model_revision,
        trust=args.trust_remote_code,
    )
    sources, eval_sources = find_sources(args, prompt_format)

    def prompt_of(columns: dict[str, Any], format: str) -> dict[str, Any]:
        return tokenize_row(as_prompt(columns, format), tokenizer, args.max_prompt_length, args.system_prompt)

    prompts = Items(sources, prompt_of, "prompts", args.strict_data, args.curriculum_column)
    order = make_order(args, sources, prompts)
    eval_prompts = Items(eval_sources, prompt_of, "prompts", args.strict_data)
    if args.eval_prompts:
        eval_prompts = load_prompts(args.eval_prompts, tokenizer)
    rewards = load_rewards(args.reward_funcs, accelerator.device, args.reward_timeout)
    weights = args.reward_weights or [1.0] * len(rewards)
    eval_rewards = load_rewards(args.eval_reward_funcs, accelerator.device, args.reward_timeout) or rewards

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
    longest = prompts.longest + args.max_completion_length
    check_positions(model, longest)
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

    # --- optimizer, prepare, resume ------------------------------------------------------------------------------
    G, world = args.num_generations, accelerator.num_processes
    size = args.per_device_train_batch_size * args.gradient_accumulation_steps * world  # completions of a window
    P = size * args.steps_per_generation // G  # prompts of a rollout
    cycle = args.steps_per_generation * args.num_iterations  # steps that it serves
    last_step = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * len(prompts) / P) * cycle
    sampling = {
        "stop_ids": stop_ids,
        "max_new_tokens": args.max_completion_length,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "batch_size": args.generation_batch_size,
    }
    lr_at = schedule(
        args.lr_scheduler_type, args.learning_rate, last_step, args.warmup_steps, args.lr_decay_fraction, args.min_lr_ratio
    )
    betas = (args.adam_beta1, args.adam_beta2)
    optimizer = adamw(model, args.learning_rate, args.weight_decay, betas, args.adam_epsilon)
    flops = flops_per_token(model, args.max_prompt_length + args.max_completion_length)
    plan = {
        "steps": last_step,
        "units_per_step": size / G / args.num_iterations,
        "tokens_per_step": round(size * (prompts.lengths.mean() + args.max_completion_length)),
        "steps_per_epoch": math.ceil(len(prompts) / P) * cycle,
        "largest_micro_batch": [longest] * args.per_device_train_batch_size,
    }
    if describe(
        accelerator, args, model, tokenizer, prompts, eval_prompts, plan, "prompt", args.beta > 0 and not args.use_peft
    ):
        return
    model, optimizer = accelerator.prepare(model.train(), optimizer)
    reference = None
    if args.beta > 0:
        frozen = None if args.use_peft else load(args.model_name_or_path).to(accelerator.device).eval()
        reference = reference_of(accelerator.unwrap_model(model), frozen)

    state = resume(accelerator, checkpoint, optimizer)
    first_step = state["step"]
    done = first_step if checkpoint else -1  # what was evaluated and saved up to here is not done again
    metrics = Metrics(accelerator, args.output_dir, args.run_name, vars(args))
    metrics.restore(state)
    best = Best(args.save_best, args.early_stopping_patience, args.early_stopping_delta, args.eval_steps)
    best.restore(state)
    health = Health(metrics, tokenizer, optimizer, args.max_bad_steps)
    fit = Fit(accelerator, model, metrics, args.auto_micro_batch)
    fit.restore(state)
    model = fit.model
    eval_score = scorer(eval_rewards, tokenizer, weights if eval_rewards is rewards else None)
    say(f"{size} completions a step, {G} for each prompt; they stop at {tokenizer.convert_ids_to_tokens(stop_ids)}")

    # --- loop ----------------------------------------------------------------------------------------------------
    def gradients(step: int, window: Window) -> torch.Tensor:
        """Add up the gradients of a window's micro-batches; returns the loss of the last one."""
        seed_step(args.seed, step, accelerator.process_index)
        for batch in window:
            with accelerator.accumulate(model):
                bonus = args.entropy_coef != 0
                logps, entropy, _ = model(batch, args.temperature, stats=True, entropy_grad=bonus)  # (T,) each
                mask, sequence = batch["loss_mask"], segment_ids(batch["cu_seqlens"], len(logps))
                token_losses, stats = grpo_loss(
                    logps,
                    batch.get("old_logps", logps.detach()),
                    batch.get("ref_logps"),
                    batch["advantage"][sequence],
                    mask,
                    batch["cu_seqlens"],
                    epsilon=args.epsilon,
                    epsilon_high=args.epsilon_high,
                    beta=args.beta,
                    importance_sampling_level=args.importance_sampling_level,
                    use_bias_correction_kl=args.use_bias_correction_kl,
                )
                token_losses = token_losses - args.entropy_coef * entropy * mask
                loss = (token_losses * batch["token_weight"][sequence]).sum()  # <- the algorithm
                accelerator.backward(loss * window.unmean)
            metrics.add_share(loss=loss)
            per_token = {
                "entropy": entropy,
                "clip_ratio/low_mean": stats["clip_low"],
                "clip_ratio/high_mean": stats["clip_high"],
                "clip_ratio/region_mean": stats["clip_low"] + stats["clip_high"],
            }
            if reference is not None:
                per_token["kl"] = stats["kl"]
            if step % cycle == 0:  # the model is still the one that sampled: how far sampler and trainer disagree
                per_token["sampling/logp_difference"] = (logps - batch["sampled_logps"]).abs()
            metrics.add(mask.sum(), **{name: (values.detach() * mask).sum() for name, values in per_token.items()})
        return loss.detach()

    if args.auto_micro_batch and not checkpoint:
        row = prompts[int(prompts.lengths.argmax())]
        answer = {"ids": stop_ids[:1] * args.max_completion_length, "logps": [0.0] * args.max_completion_length}
        rollout = [answer | {"finished": True, "rewards": [0.0]}] * (P * G)
        fit.try_largest(
            gradients, make_windows([row] * (P * G), rollout, torch.ones(P * G), accelerator, args)[0], optimizer
        )
    interrupt = Interruption(accelerator, args.max_hours, args.save_minutes, late=False)  # a rollout waits for the GPU, too
    save_wanted = idle = False
    for step in (bar := progress(first_step, last_step, "grpo")):
        if due(step, args.eval_steps, done, last_step):
            means, samples = complete_prompts(
                accelerator,
                model,
                tokenizer,
                eval_prompts,
                eval_score,
                stop_ids=stop_ids,
                temperatures=args.eval_temperatures,
                max_new_tokens=args.eval_max_new_tokens,
                seed=args.seed,
            )
            metrics.log_eval(step, means, samples, show=args.num_samples)
            if step % cycle == 0:  # where it can be saved
                best.update(step, means)
        save_wanted |= due(step, args.save_steps, max(done, 0)) or best.step == step > done
        wish = interrupt.wish(possible=step % cycle == 0 and step < last_step)  # "", or to save or stop
        if wish or (save_wanted and step % cycle == 0):  # between rollouts, so that a checkpoint needs none
            state = metrics.state() | fit.state()
            save_checkpoint(
                accelerator, model, optimizer, tokenizer, args.output_dir, step, state, args.save_total_limit, best
            )
            interrupt.saved()
            save_wanted = False
        if wish == "stop":
            interrupt.leave(args.output_dir, step)
        if step == last_step or best.stops(step):
            break

        if step % cycle == 0:  # a rollout: sample -> score -> compare
            generation = step // cycle
            rows = [prompts[order[i]] for i in range(generation * P, (generation + 1) * P) for _ in range(G)]
            completions = roll_out(accelerator, model, tokenizer, rows, rewards, (args.seed, generation), sampling)
            advantages, logged = judge(completions, G, weights, [reward.name for reward in rewards], args.scale_rewards)
            if logged["frac_idle_rollouts"] and not idle:
                say(f"step {step + 1}: in every group all rewards are equal; there is nothing to learn from in this rollout")
            idle = bool(logged["frac_idle_rollouts"])
            windows = make_windows(rows, completions, advantages, accelerator, args)
            if cycle > 1:
                add_logps(accelerator, accelerator.unwrap_model(model), windows, "old_logps", args.temperature)
            if reference is not None:
                add_logps(accelerator, reference, windows, "ref_logps", args.temperature)
            rollout_tokens = sum(len(r["prompt_ids"]) + len(c["ids"]) for r, c in zip(rows, completions, strict=True))
            metrics.add(**logged)
            metrics.close_window()
            write_completions(metrics, step + 1, rows, completions, advantages, [reward.name for reward in rewards])

        window = windows[step % cycle % args.steps_per_generation]
        set_lr(optimizer, lr_at(step))
        loss = fit(gradients, step, window)
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        health.check(loss, grad_norm, step, window.units)
        optimizer.step()
        optimizer.zero_grad()
        metrics.close_window(rollout_tokens // args.steps_per_generation)
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
        f"read {args.output_dir}/completions.jsonl, or reward what you like",
    )
    interrupt.close()


if __name__ == "__main__":
    run(main, ARGS)
