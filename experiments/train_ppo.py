"""Proximal policy optimisation: prompts and rewards -> a model with higher rewards, trained with a critic.

A completion is sampled for each prompt; a critic, a small head on the model's own states, predicts the return
before each of its tokens, and what turned out better becomes more probable (Schulman et al. 2017, arXiv
1707.06347; for language models Ouyang et al. 2022, 2203.02155). Over the tokens t of the completions of a
window (all micro-batches of all processes), N of them:

    r_t  = the reward, on the last token of a completion,  - β · log(π_old(token_t) / π_ref(token_t))
    A_t  = Σ_l (γλ)^l · (r_{t+l} + γ V_old_{t+l+1} - V_old_{t+l}),   R_t = A_t + V_old_t;   then A has mean 0 and std 1
    ρ_t  = π(token_t) / π_old(token_t),   V' = clip(V, V_old - c, V_old + c)
    loss = 1/N Σ_t [-min(ρ_t A_t, clip(ρ_t, 1-ε, 1+ε_high) A_t) + vf_coef/2 max((V_t-R_t)², (V'_t-R_t)²) - entropy_coef H_t]

1. V_t is read at the token before t: it depends on the prompt and the text so far, not on token t. It starts
   at 0.
2. Training uses exactly the sampled tokens; text is never tokenised again. Log-probabilities include the
   sampling temperature, and are over the whole distribution even if top_p or top_k restrict the sampling.
3. KL is relative to the initial model. --use_kl_in_reward false puts it into the loss, as in GRPO, by the k3
   estimator; with β = 0 no such model is loaded.
4. A completion that no function rewarded, or with --mask_truncated_completions a truncated one, counts
   nowhere.
5. One rollout gives steps_per_generation windows (minibatches), each used num_iterations times (epochs).
   Values and advantages stay as they were when it was sampled; each minibatch is whitened separately.

    python -m experiments.train_ppo                                # the embedded demo, ~2 minutes on a CPU
    python -m experiments.train_ppo --model_name_or_path outputs/sft --dataset_name prompts.jsonl

Shapes: T tokens of the row, C completions of a rollout, F reward functions.
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
from common.losses import combine_rewards, grpo_loss
from common.model import Output, disable_dropout, load_model, load_tokenizer, make_optimizer, schedule, set_lr
from common.model.reference import load_reference
from common.processes import Accelerator, gather_lists, own_share
from common.run import Run
from common.sampling import (
    Reward,
    RolloutSchedule,
    Sampler,
    load_rewards,
    load_sampler,
    sample_shared,
    score_shared,
)
import numpy as np
import torch
from torch import nn

Prompt = dict[str, Any]  # "prompt" (text or messages), "prompt_ids", and the columns that the rewards read


@dataclass
class Args(CommonArgs):
    output_dir: str = arg("outputs/ppo", help="folder for everything that the run writes")
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

    # Sampling
    num_generations: int = arg(1, help="completions of a prompt in a rollout", within="[1, 1e5]")
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

    # Algorithm
    gamma: float = arg(1.0, help="discount factor per token", within="[0, 1]")
    lam: float = arg(0.95, help="GAE's λ; 1: return minus value, 0: one token ahead", within="[0, 1]")
    vf_coef: float = arg(0.1, help="weight of the critic's loss", within="[0, inf)")
    vf_lr_multiplier: float = arg(
        10.0, help="the critic head's learning rate, relative to the model's", within="(0, 1e6]"
    )
    cliprange_value: float = arg(0.2, help="clip range of a value around the rollout's", within="(0, inf)")
    beta: float = arg(
        0.05, help="weight of the KL to the model at the start; 0: no reference model", within="[0, inf)"
    )
    use_kl_in_reward: bool = arg(
        True, help="subtract the KL from each token's reward; false: add it to the loss"
    )
    epsilon: float = arg(0.2, help="clip range of the ratio, below 1", within="[0, 1e9]")
    epsilon_high: float | None = arg(None, help="above 1; unset: epsilon", within="[0, 1e9]")
    entropy_coef: float = arg(0.0, help="weight of an entropy bonus", within="(-inf, inf)")
    importance_cap: float = arg(
        2.0, help="largest weight of a token that a server sampled", within="[1, 1e6]", needs="rollout_server"
    )
    num_iterations: int = arg(4, help="updates on each window of a rollout: epochs", within="[1, 1e6]")
    steps_per_generation: int = arg(1, help="windows of a rollout: minibatches", within="[1, 1e6]")

    def __post_init__(self) -> None:
        if self.save_best and self.eval_steps % (self.steps_per_generation * self.num_iterations):
            raise UserError(
                "--save_best: eval_steps has to be a multiple of steps_per_generation x num_iterations"
            )
        if self.reward_weights is not None and len(self.reward_weights) != len(self.reward_funcs):
            raise UserError(
                f"--reward_weights: {len(self.reward_weights)} for {len(self.reward_funcs)} --reward_funcs"
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


def encode(row: Row, tokenizer: Tokenizer, args: Args) -> Prompt:
    """A dataset row as a prompt to sample from. BadRow: left out, counted and reported."""
    return tokenize_row(as_prompt(row), tokenizer, args.max_prompt_length, args.system_prompt)


def roll_out(
    args: Args,
    accelerator: Accelerator,
    sampler: Sampler,
    tokenizer: Tokenizer,
    reward_funcs: list[Reward],
    rollouts: RolloutSchedule,
    rollout: int,
) -> list[Completion]:
    """Sample and score one completion for each of C prompts (each occurs num_generations times). Each process
    samples a share and gets them all. A completion's random numbers are a function of (seed, rollout, its
    place), whichever process samples it."""
    prompts = rollouts.prompts(rollout)
    keys = [(args.seed, rollout, i) for i in range(len(prompts))]
    sampled = sample_shared(accelerator, sampler, [prompt["prompt_ids"] for prompt in prompts], keys)
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


def add_rewards(completions: list[Completion], weights: list[float]) -> None:
    """Set each completion's reward; NaN if no function gave one."""
    per_function = np.array([c.rewards for c in completions], np.float64)  # (C, F); None becomes NaN
    factors = torch.tensor(weights, dtype=torch.float64)
    reward = combine_rewards(torch.from_numpy(per_function), factors)  # (C,)
    for completion, r in zip(completions, reward.tolist(), strict=True):
        completion.reward, completion.counted = r, completion.counted and not math.isnan(r)


def make_windows(completions: list[Completion], args: Args, accelerator: Accelerator) -> list[Window]:
    """A rollout as steps_per_generation windows, each of gradient_accumulation_steps micro-batches on every
    process.

    The reward of a completion is on its last token.
    """
    size = len(completions) // args.steps_per_generation  # completions of a window, of all processes
    mine = own_share(accelerator, size)
    micro_batches = [part.tolist() for part in np.array_split(mine, args.gradient_accumulation_steps)]
    windows = []
    for first in range(0, len(completions), size):
        inside = completions[first : first + size]
        N = sum(len(c.ids) * c.counted for c in inside)  # of the window
        examples = []
        for c in inside:
            prompt = c.prompt["prompt_ids"]
            on_completion = np.array([0] * len(prompt) + [c.counted] * len(c.ids), np.float32)
            sequence = {
                "input_ids": np.array(prompt + c.ids),
                "loss_mask": on_completion,
                "sampled_logps": np.array([0.0] * len(prompt) + c.logps, np.float32),
                "reward": np.array(
                    [0.0] * (len(prompt) + len(c.ids) - 1) + [c.reward if c.counted else 0.0], np.float32
                ),
                "token_weight": on_completion / np.float32(max(N, 1)),
            }
            examples.append([sequence])
        windows.append(Window(accelerator, examples, micro_batches))
    return windows


def value_head(D: int) -> nn.Module:
    """The critic: (T, D) -> (T, 1), initially 0 everywhere."""
    last = nn.Linear(4 * D, 1)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(nn.Linear(D, 4 * D), nn.SiLU(), last)


def values_of(out: Output, batch: Batch) -> torch.Tensor:
    """The critic's value before each target: (T,), 0 elsewhere."""
    values = out.extra["value"][batch["previous"], 0].float()  # (N,)
    return torch.zeros_like(out.logps).index_put((batch["targets"],), values)


def add_advantages(window: Window, args: Args, accelerator: Accelerator) -> dict[str, float]:
    """Add returns to this process's completions, and advantages, whitened over all processes. Returns the
    explained variance of the critic."""
    pairs = []
    for sequence in window.sequences:
        on, rewards, values = sequence["loss_mask"] > 0, sequence["reward"], sequence["old_values"]
        if args.beta > 0 and args.use_kl_in_reward:
            rewards = rewards - args.beta * (sequence["old_logps"] - sequence["ref_logps"])
        sequence["advantage"], sequence["return"] = np.zeros_like(values), np.zeros_like(values)
        sequence["advantage"][on] = gae(
            *(torch.tensor(x[on]) for x in (rewards, values)), gamma=args.gamma, lam=args.lam
        )
        sequence["return"][on] = sequence["advantage"][on] + values[on]
        pairs += zip(sequence["advantage"][on].tolist(), sequence["return"][on].tolist(), strict=True)
    # all tokens that count
    advantages, returns = np.array(gather_lists(accelerator, pairs) or [(0.0, 0.0)]).T
    for sequence in window.sequences:
        whitened = (sequence["advantage"] - advantages.mean()) / (advantages.std() + 1e-8)
        sequence["advantage"] = (whitened * (sequence["loss_mask"] > 0)).astype(np.float32)
    return {"explained_variance": 1 - advantages.var() / returns.var()} if returns.var() > 0 else {}


def gae(
    rewards: torch.Tensor, values: torch.Tensor, *, gamma: float = 1.0, lam: float = 0.95
) -> torch.Tensor:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16) of a completion:
    (n,), (n,) -> (n,).

    `A_t = δ_t + γλ A_{t+1}` with `δ_t = rewards[t] + γ values[t+1] - values[t]`; after the last token both
    are 0. values[t] is the critic's value of the text before token t. `A_t + values[t]` is the return that it
    should have predicted.
    """
    advantages, advantage, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards.tolist()), reversed(values.tolist()), strict=True):
        advantage = reward + gamma * next_value - value + gamma * lam * advantage
        advantages.append(advantage)
        next_value = value
    return values.new_tensor(advantages[::-1])


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, cliprange_value: float = 0.2
) -> tuple[torch.Tensor, torch.Tensor]:
    """`½ max((V - R)², (clip(V, V_old - c, V_old + c) - R)²)`, and whether the clip takes effect, (T,) each,
    of (T,) each.

    The critic's loss of PPO as in OpenAI's code (2005.12729, section 3): a value that has moved more than c
    towards the return since the rollout gets no gradient.
    """
    clipped = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    plain, limited = (values - returns) ** 2, (clipped - returns) ** 2
    return 0.5 * torch.max(plain, limited), (limited > plain).float().detach()


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
    rollouts = RolloutSchedule(  # rollouts.prompts(n): prompts of the n-th; len(rollouts): updates of the run
        args,
        accelerator,
        prompts,
        num_generations=args.num_generations,
        max_completion_length=args.max_completion_length,
        windows_per_rollout=args.steps_per_generation,
        updates_per_rollout=args.steps_per_generation * args.num_iterations,
    )

    # --- model and reference --------------------------------------------------------------------------------
    model = disable_dropout(load_model(args, accelerator, tokenizer, run.resume_from))
    model.extra["value"] = value_head(model.config.get_text_config().hidden_size)
    optimizer = make_optimizer(args, model, extra_lr_multiplier=args.vf_lr_multiplier)
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
    # What the run began with, also on resume: loaded again, or with LoRA this model without (or with its
    # first) adapter.
    reference = load_reference(args, accelerator, model, tokenizer) if args.beta > 0 else None
    say(f"{rollouts.window_size} completions a step, {args.num_generations} for each prompt")

    def at_rollout(batch: Batch) -> dict[str, torch.Tensor]:
        """The model's outputs for a batch before its first update on the rollout."""
        out = unwrapped(batch, temperature=args.temperature, extra=["value"])
        return {"old_logps": out.logps, "old_values": values_of(out, batch)}

    # --- the gradient of a window ---------------------------------------------------------------------------
    def gradients(window: Window) -> None:
        """A function, so that a window can be repeated in smaller micro-batches when memory runs out."""
        for batch in window:  # micro-batches of this process
            with accelerator.accumulate(model):
                mask = batch["loss_mask"]  # (T,)
                out = model(
                    batch,
                    temperature=args.temperature,
                    entropy=True,
                    entropy_grad=args.entropy_coef != 0,
                    extra=["value"],
                )
                losses, stats = grpo_loss(  # PPO-clip, and its variants   <- the algorithm
                    logps=out.logps,
                    old_logps=batch["old_logps"],
                    ref_logps=batch.get("ref_logps"),
                    advantages=batch["advantage"],
                    loss_mask=mask,
                    cu_seqlens=batch["cu_seqlens"],
                    epsilon=args.epsilon,
                    epsilon_high=args.epsilon_high,
                    beta=0.0 if args.use_kl_in_reward else args.beta,
                    sampled_logps=batch["sampled_logps"],
                    importance_cap=args.importance_cap if args.rollout_server else None,
                )  # (T,)
                stats["value_loss"], stats["value_clip_ratio"] = value_loss(
                    values_of(out, batch),
                    batch["old_values"],
                    batch["return"],
                    cliprange_value=args.cliprange_value,
                )
                losses = losses + args.vf_coef * stats["value_loss"]
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

        if step % rollouts.updates_per_rollout == 0:  # sample -> score -> windows -> compare
            rollout = step // rollouts.updates_per_rollout
            sampler.sync(step)  # vLLM servers get these weights
            completions = roll_out(args, accelerator, sampler, tokenizer, reward_funcs, rollouts, rollout)
            add_rewards(completions, reward_weights)
            windows = make_windows(completions, args, accelerator)
            for window in windows:
                window.add_fields(at_rollout)
                if reference:
                    window.add_fields(
                        lambda batch: {"ref_logps": reference(batch, temperature=args.temperature).logps}
                    )
                run.metrics.add(**add_advantages(window, args, accelerator))
            run.log_rollout(step + 1, completions, reward_funcs, len(completions))

        window = windows[step % args.steps_per_generation]
        set_lr(optimizer, lr_at(step))
        # out of memory: from the start, in smaller micro-batches, on all processes
        run.retry_smaller(gradients, window)
        sampler.check(run.metrics)  # fails if servers sample with other weights
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        if run.is_finite(grad_norm, window):  # otherwise reported, counted, and its rows kept in bad_batches/
            optimizer.step()
        optimizer.zero_grad()
        run.log(step + 1, window, grad_norm=grad_norm, learning_rate=lr_at(step))

    run.finish(try_next=f"read {args.output_dir}/completions.jsonl, or write a reward of your own")


if __name__ == "__main__":
    launch(main, Args, demo="experiments/configs/ppo.yaml", default_model="outputs/sft")
