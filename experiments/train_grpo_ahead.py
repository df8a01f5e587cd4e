"""GRPO with rollouts sampled in advance: prompts and rewards -> a model with higher rewards.

As train_grpo.py, with what helps where another model than the trained one sampled: rollouts are sampled in
advance (--rollout_ahead), completions too far from their sampler are left out (--importance_correction
sequence_mask), ratios have an upper bound (--delta), and only tokens of high entropy are trained
(--top_entropy_quantile).

For each prompt, G completions are sampled from the model; each is compared with its group (Shao et al. 2024,
arXiv 2402.03300). Over the tokens t of the completions i of a window (all micro-batches of all processes):

    A_i  = (r_i - mean of the group) / (std of the group + 1e-4)
    ρ_t  = π(token_t) / π_old(token_t)
    loss = Σ_i w_i · Σ_t [ -min(ρ_t A_i, clip(ρ_t, 1-ε, 1+ε_high) A_i) + β KL_t - entropy_coef · H_t ]

1. w_i is 1 / (tokens of a window, on average over the rollout) by default ("dapo"); see `grpo_token_weights`
   for grpo, bnpo and dr_grpo (whose paper also has --scale_rewards none). A completion that no function
   rewarded has A_i = 0; with --mask_truncated_completions the tokens of a truncated one count nowhere, but it
   still counts as a completion.
2. Training uses exactly the sampled tokens; text is never tokenised again. Log-probabilities include the
   sampling temperature, and are over the whole distribution even if top_p or top_k restrict the sampling.
3. KL is relative to the initial model, by the k3 estimator times ρ; with β = 0 (the default) no such model is
   loaded.
4. A completion without advantage (all rewards of its group are equal) has no gradient. It stays in the
   denominator, but is run through the model, and included in logged means, only for β, entropy_coef,
   top_entropy_quantile or sequence_mask.
5. One rollout gives steps_per_generation windows, each used num_iterations times; with both at 1 (the
   default) ρ = 1, and the value of the loss means little: watch the reward.
6. If the sampler differs from π_old (--rollout_server, --rollout_ahead), the clipped part is multiplied by
   min(π_old / π_sampler, importance_cap), or completions with too large a difference are left out.

    python -m experiments.train_grpo_ahead --rollout_ahead 1                # the embedded demo
    python -m experiments.train_grpo_ahead --model_name_or_path outputs/sft --dataset_name prompts.jsonl \
        --reward_funcs my.py:reward --rollout_server http://127.0.0.1:8000 --rollout_ahead 1

Shapes: C completions of a rollout, G of each prompt, F reward functions; T tokens of a row, as in `Output`,
in which the completions of a prompt share it (`split_row` of common/collators.py gives each in full).
"""

from dataclasses import dataclass
import math
from typing import Any, Literal

from common.args import CommonArgs, arg
from common.collators import Batch, Window
from common.command_line import launch
from common.data import Row, Tokenizer, as_prompt, load_prompts, tokenize_row
from common.errors import UserError, say
from common.evaluate import complete_prompts, load_eval_prompts
from common.losses import combine_rewards, group_advantages, grpo_loss, grpo_token_weights
from common.model import disable_dropout, load_model, load_tokenizer, make_optimizer, schedule, set_lr
from common.model.reference import load_reference
from common.processes import Accelerator, own_share
from common.run import Run
from common.sampling import Reward, load_rewards, load_sampler, score_shared
import numpy as np
import torch

from experiments.rollout_ahead import Begin, RolloutsAhead, at_once, far_from_sampler, keep_high_entropy

Prompt = dict[str, Any]  # "prompt" (text or messages), "prompt_ids", and the columns that the rewards read


@dataclass
class Args(CommonArgs):
    output_dir: str = arg("outputs/grpo", help="folder for everything that the run writes")
    learning_rate: float = arg(1e-6, help="peak learning rate of AdamW")
    lr_scheduler_type: Literal["cosine", "linear", "constant", "wsd"] = arg(
        "constant", help="wsd: flat, then linear"
    )
    per_device_train_batch_size: int = arg(8, help="completions per process and micro-batch")

    # Rewards
    reward_funcs: list[str] = arg(
        ["exact_number"],
        help="exact_number[:MARK], regex:PATTERN, length:N, file.py:function, package.function, reward model",
        is_path=True,
    )
    reward_weights: list[float] | None = arg(
        None, help="unset: 1 each", within="(-inf, inf)", goes_with="reward_funcs"
    )
    scale_rewards: Literal["group", "batch", "none"] = arg(
        "group", help="standard deviation that divides advantages"
    )
    advantage_estimator: Literal["grpo", "rloo", "reinforce_pp"] = arg(
        "grpo", help="baseline: mean of group, others, all"
    )

    # Sampling
    num_generations: int = arg(8, help="G, completions per prompt, which are compared", within="[2, 1e5]")
    system_prompt: str | None = arg(
        None, help="turn string prompts into chats with this system turn (empty: none)"
    )
    max_prompt_length: int = arg(512, help="tokens; longer prompts are left out", within="[1, 1e8]")
    max_completion_length: int = arg(256, help="tokens; longer completions are truncated", within="[1, 1e7]")
    temperature: float = arg(1.0, help="sampling temperature", within="(0, inf)")
    top_p: float = arg(
        1.0, help="sample from the most probable tokens with this total share", within="(0, 1]"
    )
    top_k: int = arg(0, help="sample from the k most probable tokens; 0: all", within="[0, 1e9]")
    generation_batch_size: int | None = arg(
        None, help="sampled at a time; unset: as many as fit", within="[1, 1e6]", may_change="execution"
    )
    mask_truncated_completions: bool = arg(False, help="do not train on truncated completions")
    rollout_server: list[str] | None = arg(
        None, help="http://host:port of vLLM servers", may_change="execution"
    )
    rollout_ahead: int = arg(
        0, help="rollouts sampled in advance, during training on another", within="[0, 8]"
    )

    # Algorithm
    beta: float = arg(
        0.0, help="weight of the KL to the model at the start; 0: no reference model", within="[0, inf)"
    )
    epsilon: float = arg(0.2, help="clip range of the ratio, below 1", within="[0, 1e9]")
    epsilon_high: float | None = arg(
        None, help="above 1; unset: epsilon; cispo: the largest ratio", within="[0, 1e9]"
    )
    delta: float | None = arg(
        None, help="largest ratio, for negative advantages, too; unset: none", within="(1, 1e9]"
    )
    entropy_coef: float = arg(0.0, help="weight of an entropy bonus", within="(-inf, inf)")
    loss_type: Literal["grpo", "bnpo", "dapo", "dr_grpo", "cispo"] = arg(
        "dapo", help="weight of a token; cispo: as dapo"
    )
    importance_sampling_level: Literal["token", "sequence"] = arg(
        "token", help="of the ratio; sequence: GSPO"
    )
    use_bias_correction_kl: bool = arg(
        True, help="multiply the KL by the ratio, for the gradient of the reverse KL", needs="beta"
    )
    importance_correction: Literal["auto", "token_truncate", "sequence_mask", "none"] = arg(
        "auto",
        help="if another model samples; auto: token_truncate with rollout_server or rollout_ahead, else none",
    )
    importance_cap: float = arg(
        2.0, help="largest weight of a token, or ratio of a completion", within="[1, 1e6]"
    )
    top_entropy_quantile: float = arg(
        1.0, help="train only this share of tokens, of highest entropy", within="(0, 1]"
    )
    num_iterations: int = arg(1, help="updates on each window of a rollout", within="[1, 1e6]")
    steps_per_generation: int = arg(1, help="windows of a rollout", within="[1, 1e6]")

    def __post_init__(self) -> None:
        if self.save_best and self.eval_steps % (self.steps_per_generation * self.num_iterations):
            raise UserError(
                "--save_best: eval_steps has to be a multiple of steps_per_generation x num_iterations"
            )
        if self.reward_weights is not None and len(self.reward_weights) != len(self.reward_funcs):
            raise UserError(
                f"--reward_weights: {len(self.reward_weights)} for {len(self.reward_funcs)} --reward_funcs"
            )
        if self.loss_type == "cispo" and ((self.epsilon_high or 0) < 1 or self.delta is not None):
            raise UserError(
                "--loss_type cispo: its largest ratio is --epsilon_high, for example 5; without --delta"
            )


@dataclass
class Completion:
    """A completion of one prompt."""

    prompt: Prompt
    ids: list[int]
    logps: list[float]  # of the tokens under the sampler, temperature included
    finished: bool  # ended with a stop token
    text: str
    rewards: list[float | None]  # one per function; None: it abstained
    counted: bool  # whether it is trained on
    reward: float = math.nan  # their weighted sum; NaN: all abstained
    advantage: float = 0.0


def encode(row: Row, tokenizer: Tokenizer, args: Args) -> Prompt:
    """A dataset row as a prompt to sample from. BadRow: left out, counted and reported."""
    return tokenize_row(as_prompt(row), tokenizer, args.max_prompt_length, args.system_prompt)


def roll_out(
    args: Args,
    accelerator: Accelerator,
    begin: Begin,
    tokenizer: Tokenizer,
    reward_funcs: list[Reward],
    rollouts: RolloutsAhead,
    rollout: int,
) -> list[Completion]:
    """Sample and score one completion for each of C prompts (each occurs G times). Each process samples a
    share and gets them all. A completion's random numbers are a function of (seed, rollout, its place),
    whichever process samples it."""
    prompts = rollouts.prompts(rollout)
    with accelerator.autocast():
        sampled = rollouts.sample(rollout, begin, args.seed)
    texts = [tokenizer.decode(s.ids, skip_special_tokens=True) for s in sampled]
    scores = score_shared(accelerator, reward_funcs, prompts, texts, [s.ids for s in sampled])
    completions = []
    for prompt, s, text, rewards in zip(prompts, sampled, texts, scores, strict=True):
        completions.append(
            Completion(
                prompt=prompt,
                ids=s.ids,
                logps=s.logps,
                finished=s.finished,
                text=text,
                rewards=rewards,
                counted=s.finished or not args.mask_truncated_completions,
            )
        )
    return completions


def add_advantages(completions: list[Completion], weights: list[float], args: Args) -> None:
    """Set each completion's reward, and its advantage over its group; 0 if no function gave a reward."""
    per_function = np.array([c.rewards for c in completions], np.float64)  # (C, F); None becomes NaN
    factors = torch.tensor(weights, dtype=torch.float64)
    rewards = combine_rewards(torch.from_numpy(per_function), factors)  # (C,)
    groups = rewards.view(-1, args.num_generations)
    advantages = group_advantages(groups, args.scale_rewards, args.advantage_estimator)  # A_i
    advantages = advantages.flatten().float()
    for i, completion in enumerate(completions):
        completion.reward = rewards[i].item()
        completion.advantage = advantages[i].item()


def make_windows(completions: list[Completion], args: Args, accelerator: Accelerator) -> list[Window]:
    """A rollout as steps_per_generation windows, each of gradient_accumulation_steps micro-batches on every
    process.

    A completion without advantage has no gradient if the loss has neither a KL nor an entropy term: it stays
    in the denominators, but is not run through the model, unless a threshold over all completions is needed.
    """
    size = len(completions) // args.steps_per_generation  # completions of a window, of all processes
    own = own_share(accelerator, size)
    thresholds = args.importance_correction == "sequence_mask" or args.top_entropy_quantile < 1
    run_all = args.beta > 0 or args.entropy_coef != 0 or thresholds
    windows = []
    for first in range(0, len(completions), size):
        examples, mine = [], []  # mine: those that this process runs
        for i, c in enumerate(completions[first : first + size]):
            prompt = c.prompt["prompt_ids"]
            on_completion = np.array([0] * len(prompt) + [1] * len(c.ids), np.float32)
            sequence = {
                "input_ids": np.array(prompt + c.ids),
                "loss_mask": on_completion,
                "sampled_logps": np.array([0.0] * len(prompt) + c.logps, np.float32),
                "advantage": on_completion * np.float32(c.advantage),
                "place": first + i,
            }
            examples.append([sequence])
            is_trained = c.counted and (run_all or sequence["advantage"].any())
            if is_trained and i in own:
                mine.append(i)
        micro_batches = np.array_split(mine, args.gradient_accumulation_steps)
        windows.append(Window(accelerator, examples, [part.tolist() for part in micro_batches]))
    return windows


def add_token_weights(windows: list[Window], completions: list[Completion], args: Args) -> None:
    """Give each token its weight in the loss of its window; 0 in a completion that is not trained on."""
    counted = torch.tensor([c.counted for c in completions])
    tokens = torch.tensor([float(len(c.ids)) for c in completions])
    size = len(completions) // len(windows)
    for w, window in enumerate(windows):
        inside = slice(w * size, (w + 1) * size)
        window_tokens = (tokens[inside] * counted[inside]).sum().item()
        if args.loss_type in ("dapo", "cispo"):  # of the rollout, averaged over its windows
            window_tokens = (tokens * counted).sum().item() / len(windows)
        weights = counted[inside] * grpo_token_weights(
            args.loss_type,
            tokens[inside],
            window_tokens=window_tokens,
            window_completions=size,
            max_completion_length=args.max_completion_length,
        )
        for [sequence] in window.examples:
            sequence["token_weight"] = sequence["loss_mask"] * np.float32(
                weights[sequence["place"] - w * size]
            )


def main(args: Args) -> None:
    # processes, seed, output folder (with a copy of this file), checkpoint to resume from
    run = Run(args, __file__)
    accelerator = run.accelerator

    # --- data -----------------------------------------------------------------------------------------------
    tokenizer = load_tokenizer(args)
    prompts, held_out = load_prompts(args, encode, tokenizer)
    reward_funcs = load_rewards(args.reward_funcs, accelerator.device)
    reward_weights = args.reward_weights or [1.0] * len(reward_funcs)
    eval_prompts = load_eval_prompts(
        args,
        accelerator,
        tokenizer,
        prompts,
        held_out,
        encode=encode,
        rewards=reward_funcs,
        weights=reward_weights,
    )
    rollouts = RolloutsAhead(  # rollouts.prompts(n): prompts of the n-th; len(rollouts): updates of the run
        args,
        accelerator,
        prompts,
        num_generations=args.num_generations,
        max_completion_length=args.max_completion_length,
        windows_per_rollout=args.steps_per_generation,
        updates_per_rollout=args.steps_per_generation * args.num_iterations,
        ahead=args.rollout_ahead,
    )

    # --- model and reference --------------------------------------------------------------------------------
    model = disable_dropout(load_model(args, accelerator, tokenizer, run.resume_from))
    optimizer = make_optimizer(args, model)
    lr_at = schedule(args, len(rollouts))
    run.describe(
        model,
        tokenizer,
        rollouts,
        held_out,
        example_name="prompt",
        reference=args.beta > 0 and not args.use_peft,
    )
    if args.dry_run:
        return
    model, optimizer = run.prepare(model, optimizer)  # Accelerate's prepare; then resumes the run
    unwrapped = accelerator.unwrap_model(model)
    sampler = load_sampler(  # the model itself, or vLLM servers that get its weights
        args,
        accelerator,
        model,
        args.rollout_server,
        longest=rollouts.longest,
        batch_size=args.generation_batch_size,
        max_new_tokens=args.max_completion_length,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
    )
    begin = sampler.begin if args.rollout_server else at_once(sampler.sample)
    # What the run began with, also on resume: loaded again, or with LoRA this model without (or with its
    # first) adapter.
    reference = load_reference(args, accelerator, model, tokenizer) if args.beta > 0 else None
    say(f"{rollouts.window_size} completions a step, {args.num_generations} for each prompt")

    # --- the gradient of a window ---------------------------------------------------------------------------
    another_samples = args.rollout_server or args.rollout_ahead
    correction = args.importance_correction
    truncates = correction == "token_truncate" or (correction == "auto" and another_samples)
    masks_sequences, top_entropy = correction == "sequence_mask", args.top_entropy_quantile < 1

    def before_update(batch: Batch) -> dict[str, torch.Tensor]:
        out = unwrapped(batch, temperature=args.temperature, entropy=top_entropy)
        return {"old_logps": out.logps} | ({"entropy": out.entropy} if top_entropy else {})

    def gradients(window: Window) -> None:
        """A function, so that a window can be repeated in smaller micro-batches when memory runs out."""
        for batch in window:  # micro-batches of this process
            with accelerator.accumulate(model):
                mask = batch["loss_mask"]  # (T,)
                out = model(
                    batch, temperature=args.temperature, entropy=True, entropy_grad=args.entropy_coef != 0
                )
                losses, stats = grpo_loss(  # PPO-clip, and its variants   <- the algorithm
                    logps=out.logps,
                    old_logps=batch.get("old_logps", out.logps.detach()),
                    ref_logps=batch.get("ref_logps"),
                    advantages=batch["advantage"],
                    loss_mask=mask,
                    cu_seqlens=batch["cu_seqlens"],
                    loss_type=args.loss_type,
                    epsilon=args.epsilon,
                    epsilon_high=args.epsilon_high,
                    delta=args.delta,
                    beta=args.beta,
                    importance_sampling_level=args.importance_sampling_level,
                    use_bias_correction_kl=args.use_bias_correction_kl,
                    sampled_logps=batch["sampled_logps"],
                    importance_cap=args.importance_cap if truncates else None,
                    policy_mask=batch.get("policy_mask"),
                )  # (T,)
                if args.entropy_coef:
                    losses = losses - args.entropy_coef * out.entropy * mask
                loss = (losses * batch["token_weight"]).sum()  # w_i of make_windows
                window.backward(loss + out.aux_loss)  # accelerator.backward of a sum over the window
            run.metrics.add_sum(loss=loss)
            run.metrics.add(mask, **stats, entropy=out.entropy)

    # --- loop -----------------------------------------------------------------------------------------------
    # step: updates done so far. Saves, and stops at a signal, between rollouts: a checkpoint need not hold completions.
    for step in run.steps(last=len(rollouts), save_every=rollouts.updates_per_rollout):
        if run.eval_due(step):
            run.log_eval(step, *complete_prompts(args, accelerator, model, tokenizer, eval_prompts))
        # saves if it is due; true after the last step or by early stopping; at a signal the run exits here
        if run.checkpoint(step):
            break

        if step % rollouts.updates_per_rollout == 0:  # sample -> score -> compare -> windows
            rollout = step // rollouts.updates_per_rollout
            sampler.sync(step)  # vLLM servers get these weights
            completions = roll_out(args, accelerator, begin, tokenizer, reward_funcs, rollouts, rollout)
            add_advantages(completions, reward_weights, args)
            windows = make_windows(completions, args, accelerator)
            for window in windows:
                if rollouts.updates_per_rollout > 1 or masks_sequences or top_entropy:  # before its update
                    window.add_fields(before_update)
                if reference:
                    window.add_fields(
                        lambda batch: {"ref_logps": reference(batch, temperature=args.temperature).logps}
                    )
                if top_entropy:
                    keep_high_entropy(window, accelerator, args.top_entropy_quantile)
            for place in (
                far_from_sampler(windows, accelerator, args.importance_cap) if masks_sequences else []
            ):
                completions[place].counted = False
            add_token_weights(windows, completions, args)
            run.log_rollout(step + 1, completions, reward_funcs, args.num_generations)

        window = windows[step % args.steps_per_generation]
        set_lr(optimizer, lr_at(step))
        # out of memory: from the start, in smaller micro-batches, on all processes
        run.retry_smaller(gradients, window)
        if args.rollout_server and not args.rollout_ahead:
            sampler.check(run.metrics)  # fails if servers sample with other weights
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        if run.is_finite(grad_norm, window):  # otherwise reported, counted, and its rows kept in bad_batches/
            optimizer.step()
        optimizer.zero_grad()
        run.log(step + 1, window, grad_norm=grad_norm, learning_rate=lr_at(step))

    run.finish(try_next=f"read {args.output_dir}/completions.jsonl, or write a reward of your own")


if __name__ == "__main__":
    launch(main, Args, demo="data/configs/grpo.yaml", default_model="outputs/sft")
