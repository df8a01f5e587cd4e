"""GRPO with tools: prompts, an environment and rewards -> a model that calls tools when that is rewarded.

A completion is an episode of several turns, in its own environment: an object of the user's class, whose
public methods the model may call. Their output is appended to the turn, and the model continues; a turn
without a call is the last. As in train_grpo.py, over the tokens t that the model itself wrote in the
completions i of a window:

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
   denominator, but is run through the model, and included in logged means, only for β or entropy_coef.
5. One rollout gives steps_per_generation windows, each used num_iterations times; with both at 1 (the
   default) ρ = 1, and the value of the loss means little: watch the reward.
6. If vLLM servers sample (--rollout_server), their π differs a little from π_old: the clipped part is
   multiplied by min(π_old / π_server, importance_cap).
7. --environment_factory file.py:Class, as in TRL: `reset(**columns)` starts an episode, and may return text
   to append to the prompt; `get_reward()`, if there is one, is a reward in addition to --reward_funcs, which
   get the objects as `environments`; any other public method is a tool. Errors of a tool are reported to the
   model, in words. Tools that are `async` run at the same time, all those of a turn; others one by one.
8. Calls are read as the chat template writes them, by the tokenizer's response_template or as JSON or XML in
   <tool_call> tags. If the template has no place for tools, a call is [name argument].
9. An episode goes on after the tokens that were sampled, as they were sampled; a tool's output is the text
   that the template writes after such a call. What a template would rewrite of earlier turns stays as it was.
10. max_completion_length counts all tokens after the prompt. An episode that needs more, or more turns with
    calls than max_tool_calling_iterations, is truncated.
11. An episode is a function of (seed, rollout, its place). `reset` gets a seed, the same for all completions
    of a prompt.

    python train_sft.py --config experiments/configs/tools_sft.yaml  # has seen a calculator used now and then
    python -m experiments.train_tools                                # the demo: uses it, ~1 minute on a CPU
    python -m experiments.train_tools --model_name_or_path Qwen/Qwen3-0.6B --dataset_name prompts.jsonl \
        --environment_factory my.py:MyEnvironment --max_completion_length 1024

Shapes: T tokens of the row, P prompts of a rollout, G completions of each, C = P·G, F reward functions.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
import inspect
import math
from typing import Any, Literal, NamedTuple

from common.args import CommonArgs, arg
from common.collators import Window
from common.command_line import launch
from common.data import BadRow, Row, Tokenizer, as_prompt, load_prompts, tokenize_row
from common.errors import UserError, quoted, say
from common.evaluate import load_eval_prompts, summarise
from common.losses import combine_rewards, group_advantages, grpo_loss, grpo_token_weights
from common.model import disable_dropout, load_model, load_tokenizer, make_optimizer, schedule, set_lr
from common.model.reference import load_reference
from common.processes import (
    Accelerator,
    TimeLimitReached,
    gather_lists,
    on_each_process,
    own_share,
    time_limit,
)
from common.run import Run
from common.sampling import Reward, RolloutSchedule, Sampled, Sampler, load_rewards, load_sampler, score
from common.sampling.rewards import call_user_code, from_file
import numpy as np
import torch

from experiments.tool_calls import Call, Tools, describe_tools, read_turn, tokenize_reply

Prompt = dict[str, Any]  # "prompt" (messages), "prompt_ids", "tools", and the columns that the rewards read


@dataclass
class Args(CommonArgs):
    output_dir: str = arg("outputs/tools", help="folder for everything that the run writes")
    learning_rate: float = arg(1e-6, help="peak learning rate of AdamW")
    lr_scheduler_type: Literal["cosine", "linear", "constant", "wsd"] = arg(
        "constant", help="wsd: flat, then linear"
    )
    per_device_train_batch_size: int = arg(8, help="completions per process and micro-batch")

    # Environment
    environment_factory: str = arg("", help="file.py:Class, whose public methods are the tools", is_path=True)
    max_tool_calling_iterations: int = arg(
        8, help="maximum turns with tool calls in an episode", within="[0, 1e6]"
    )
    tool_timeout: float = arg(
        10.0, help="time limit for a call of the environment, in seconds; 0: none", within="[0, 1e9]"
    )

    # Rewards
    reward_funcs: list[str] = arg(
        [], help="as in train_grpo.py; unset: the environment's get_reward() alone", is_path=True
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
    max_completion_length: int = arg(
        256, help="tokens, including those of tools; longer ones are cut", within="[1, 1e7]"
    )
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
    beta: float = arg(
        0.0, help="weight of the KL to the model at the start; 0: no reference model", within="[0, inf)"
    )
    epsilon: float = arg(0.2, help="clip range of the ratio, below 1", within="[0, 1e9]")
    epsilon_high: float | None = arg(
        None, help="above 1; unset: epsilon; cispo: the largest ratio", within="[0, 1e9]"
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
    importance_cap: float = arg(
        2.0, help="largest weight of a token that a server sampled", within="[1, 1e6]", needs="rollout_server"
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
        if self.loss_type == "cispo" and (self.epsilon_high or 0) < 1:
            raise UserError("--loss_type cispo: its largest ratio is --epsilon_high, for example 5")
        if not self.environment_factory:
            raise UserError(
                "--environment_factory: name the class, file.py:Class (experiments/environments.py has two)"
            )
        if self.eval_reward_funcs:
            raise UserError("--eval_reward_funcs: held-out prompts are played and scored as in training")


class Environment(NamedTuple):
    """The user's class: a function that makes an episode's object, its tools, and its own reward, if any."""

    make: Callable[[], Any]
    tools: Tools
    rewards: list[Reward]


@dataclass
class Completion:
    """An episode: everything sampled for one prompt, turn by turn, and the tools' output."""

    prompt: Prompt
    ids: list[int]
    logps: list[float]  # of the tokens under the sampler, temperature included
    finished: bool  # ended with a stop token
    text: str
    rewards: list[float | None]  # one per function; None: it abstained
    counted: bool  # whether it is trained on
    reward: float = math.nan  # their weighted sum; NaN: all abstained
    advantage: float = 0.0
    environment: Any = None
    # 1: the model wrote the token; 0: a tool, or the framing
    sampled: list[int] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    calls: int = 0
    failures: int = 0

    def write(self, ids: list[int], logps: list[float] | None = None) -> None:
        """Append tokens. logps: their log-probabilities if the model sampled them; None: it did not, and they
        are 0."""
        self.ids, self.logps = self.ids + ids, self.logps + (logps or [0.0] * len(ids))
        self.sampled = self.sampled + [int(logps is not None)] * len(ids)


def load_environment(args: Args, tokenizer: Tokenizer) -> Environment:
    """The class named by --environment_factory. One object is created to inspect its methods."""
    where = f"--environment_factory {args.environment_factory}"
    try:
        make = from_file(args.environment_factory, args.tool_timeout)
        made = call_user_code("making one", make, args.tool_timeout)
        # Including static and class methods, but not those inherited from a built-in base.
        members = inspect.getmembers(type(made), callable)
        methods = [
            name for name, m in members if inspect.isfunction(inspect.unwrap(m)) or inspect.ismethod(m)
        ]
        names = [name for name in methods if not name.startswith("_") and name not in ("reset", "get_reward")]
        tools = describe_tools([getattr(made, name) for name in names], tokenizer)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if "reset" not in methods or not (args.reward_funcs or "get_reward" in methods):
        raise UserError(f"{where} needs a method reset(**columns), and get_reward() or else --reward_funcs")
    if tools.form is None:
        say(f"the chat template has no place for tools: calls are [{names[0] if names else 'tool'} argument]")

    def get_reward(environments: list[Any], **columns: Any) -> list[float | None]:
        return [environment.get_reward() for environment in environments]

    own = Reward(getattr(make, "__name__", "environment"), get_reward)
    return Environment(make, tools, [own] if "get_reward" in methods else [])


def encode(row: Row, tokenizer: Tokenizer, args: Args, tools: Tools) -> Prompt:
    """A dataset row as a prompt to sample from. BadRow: left out, counted and reported."""
    row = as_prompt(row) | ({"tools": tools.schemas} if tools.schemas else {})
    prompt = tokenize_row(row, tokenizer, args.max_prompt_length, args.system_prompt)
    if isinstance(prompt["prompt"], str):
        raise BadRow('tools need chats, and this prompt is a string (--system_prompt "" makes a chat of it)')
    return prompt


def begin(
    args: Args, tokenizer: Tokenizer, environment: Environment, prompt: Prompt, key: tuple[int, ...]
) -> Completion:
    """An episode before its first turn. key: the seed of its environment's randomness."""
    made = call_user_code("--environment_factory: making one", environment.make, args.tool_timeout)
    columns = {name: value for name, value in prompt.items() if name not in ("prompt_ids", "tools")}
    columns = {"seed": int(np.random.default_rng(key).integers(2**31))} | columns
    observation = call_user_code("the environment's reset", made.reset, args.tool_timeout, **columns)
    if observation is not None:
        *before, last = prompt["prompt"]
        longer = prompt | {"prompt": [*before, last | {"content": last["content"] + str(observation)}]}
        try:
            prompt = tokenize_row(longer, tokenizer, args.max_prompt_length)
        except BadRow as error:
            raise UserError(
                f"with what the environment's reset has added: {error} (--max_prompt_length)"
            ) from None
    return Completion(
        prompt, ids=[], logps=[], finished=False, text="", rewards=[], counted=True, environment=made
    )


async def answer(args: Args, c: Completion, wanted: Call) -> str:
    """A tool's response to a call. Errors are reported to the model, too."""
    c.calls += 1
    try:
        if wanted.error:
            raise ValueError(wanted.error)
        with time_limit(args.tool_timeout):
            value = getattr(c.environment, wanted.name)(**wanted.arguments)
        if inspect.isawaitable(value):
            value = await asyncio.wait_for(value, args.tool_timeout or None)
        said = str(value)
    except BaseException as error:  # user code may raise anything, and call sys.exit
        c.failures += 1
        reason = quoted(error, 500, str) or type(error).__name__
        if isinstance(error, TimeLimitReached | TimeoutError) and not error.args:
            reason = f"it took more than {args.tool_timeout:g} s"
        said = f"error: {reason}"
    # no token has so many characters: the rest would not fit anyway
    said = said[: 256 * args.max_completion_length]
    return said.encode(errors="replace").decode()  # lone surrogates are not valid text


async def end_turn(
    args: Args, tokenizer: Tokenizer, tools: Tools, c: Completion, turn: Sampled, is_last: bool
) -> bool:
    """Add a sampled turn, followed by the tools' responses to its calls. Returns whether the episode
    continues."""
    message, calls = read_turn(turn.ids, c.prompt["prompt_ids"] + c.ids, tokenizer, tools)
    if turn.ids[-1] != tokenizer.convert_tokens_to_ids(tools.end):
        calls = []
    c.write(turn.ids, turn.logps)
    c.messages.append(message)
    c.finished = turn.finished and not calls
    if is_last or not calls:
        return False
    responses = await asyncio.gather(*[answer(args, c, wanted) for wanted in calls])
    ids = tokenize_reply(calls, responses, tokenizer, tools, c.prompt.get("chat_template_kwargs"))
    if len(c.ids) + len(ids) >= args.max_completion_length:
        return False
    c.write(ids)
    for wanted, said in zip(calls, responses, strict=True):
        c.messages.append({"role": "tool", "name": wanted.name, "content": said})
    return True


async def end_turns(*turns: Coroutine[Any, Any, bool]) -> list[bool]:
    """`end_turn` of several episodes, so that tools that wait do so at the same time."""
    return await asyncio.gather(*turns)


def roll_out(
    args: Args,
    accelerator: Accelerator,
    sampler: Sampler,
    tokenizer: Tokenizer,
    reward_funcs: list[Reward],
    environment: Environment,
    prompts: list[Prompt],
    key: tuple[int, ...],
    group: int,
    temperature: float,
) -> list[Completion]:
    """Run and score one episode for each of C prompts (each occurs `group` times). Each process runs a share
    and gets them all. An episode's random numbers are a function of (key, its place, turn), whichever process
    runs it."""
    mine = own_share(accelerator, len(prompts))
    completions = [begin(args, tokenizer, environment, prompts[i], (*key, i // group)) for i in mine]
    playing = dict(zip(mine, completions, strict=True))
    for turn in range(args.max_tool_calling_iterations + 1):
        with accelerator.autocast():
            sampled = sampler.sample(
                [c.prompt["prompt_ids"] + c.ids for c in playing.values()],
                [(*key, i, turn) for i in playing],
                max_new_tokens=[args.max_completion_length - len(c.ids) for c in playing.values()],
                temperature=temperature,
            )
        is_last = turn == args.max_tool_calling_iterations
        turns = zip(playing.values(), sampled, strict=True)
        ending = [end_turn(args, tokenizer, environment.tools, c, s, is_last) for c, s in turns]
        goes_on = asyncio.run(end_turns(*ending))
        playing = {i: c for (i, c), goes in zip(playing.items(), goes_on, strict=True) if goes}
        # all processes sample equally often: weights may be sharded
        if not any(gather_lists(accelerator, [len(playing)])):
            break
    written = [
        [token for token, is_sampled in zip(c.ids, c.sampled, strict=True) if is_sampled] for c in completions
    ]
    objects = {"environments": [c.environment for c in completions]}
    prompts, messages = [c.prompt for c in completions], [c.messages for c in completions]
    scores = on_each_process(accelerator, partial(score, reward_funcs, prompts, messages, written, objects))
    each_reward = [[function[k] for function in scores] for k in range(len(mine))]  # scores: [F][completion]
    for c, each in zip(completions, each_reward, strict=True):
        c.environment, c.text, c.rewards = None, tokenizer.decode(c.ids), each
        c.counted = c.finished or not args.mask_truncated_completions
    return gather_lists(accelerator, completions)


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
    """A rollout as steps_per_generation windows, of this process's sequences, in gradient_accumulation_steps
    micro-batches.

    A completion without advantage has no gradient if the loss has neither a KL nor an entropy term: it stays
    in the denominators, but is not run through the model.
    """
    num_windows = args.steps_per_generation
    size = len(completions) // num_windows  # completions of a window, of all processes
    own = own_share(accelerator, size)
    counted = torch.tensor([c.counted for c in completions])
    tokens = torch.tensor([float(sum(c.sampled)) for c in completions])
    counted_tokens = tokens * counted
    run_all = args.beta > 0 or args.entropy_coef != 0
    windows = []
    for first in range(0, len(completions), size):
        inside = slice(first, first + size)
        if args.loss_type in ("dapo", "cispo"):  # of a window, on average over the rollout
            window_tokens = counted_tokens.sum().item() / num_windows
        else:
            window_tokens = counted_tokens[inside].sum().item()
        weights = counted[inside] * grpo_token_weights(
            args.loss_type,
            tokens[inside],
            window_tokens=window_tokens,
            window_completions=size,
            max_completion_length=args.max_completion_length,
        )
        examples, mine = [], []  # mine: those that this process runs
        for i, c in enumerate(completions[inside]):
            prompt = c.prompt["prompt_ids"]
            on_completion = np.array([0] * len(prompt) + c.sampled, np.float32)
            sequence = {
                "input_ids": np.array(prompt + c.ids),
                "loss_mask": on_completion,
                "sampled_logps": np.array([0.0] * len(prompt) + c.logps, np.float32),
                "advantage": on_completion * np.float32(c.advantage),
                "token_weight": on_completion * np.float32(weights[i]),
            }
            examples.append([sequence])
            is_trained = c.counted and (run_all or sequence["advantage"].any())
            if is_trained and i in own:
                mine.append(i)
        micro_batches = np.array_split(mine, args.gradient_accumulation_steps)
        windows.append(Window(accelerator, examples, [part.tolist() for part in micro_batches]))
    return windows


def log_rollout(
    run: Run, step: int, completions: list[Completion], rewards: list[Reward], group: int
) -> None:
    """Like Run.log_rollout, plus the number of tool calls per episode, and the share of calls that fail."""
    calls, failures = (
        sum(getattr(completion, name) for completion in completions) for name in ("calls", "failures")
    )
    tools = {
        "tools/call_frequency": calls / len(completions),
        "tools/failure_frequency": failures / max(calls, 1),
    }
    run.log_rollout(step, completions, rewards, group, lengths=[sum(c.sampled) for c in completions], **tools)


def main(args: Args) -> None:
    # processes, seed, output folder (with a copy of this file), checkpoint to resume from
    run = Run(args, __file__)
    accelerator = run.accelerator

    # --- data -----------------------------------------------------------------------------------------------
    tokenizer = load_tokenizer(args)
    environment = load_environment(args, tokenizer)
    to_prompt = partial(encode, tools=environment.tools)
    prompts, held_out = load_prompts(args, to_prompt, tokenizer)
    reward_funcs = load_rewards(args.reward_funcs, accelerator.device) + environment.rewards
    reward_weights = (args.reward_weights or [1.0] * len(args.reward_funcs)) + [1.0] * len(
        environment.rewards
    )
    eval_prompts = load_eval_prompts(args, accelerator, tokenizer, prompts, held_out, encode=to_prompt).rows
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
    # What the run began with, also on resume: loaded again, or with LoRA this model without (or with its
    # first) adapter.
    reference = load_reference(args, accelerator, model, tokenizer) if args.beta > 0 else None
    say(f"{rollouts.window_size} completions a step, {args.num_generations} for each prompt")

    play = partial(roll_out, args, accelerator, sampler, tokenizer, reward_funcs, environment)

    def evaluate() -> tuple[dict[str, float], list[dict[str, Any]]]:
        """Run the held-out prompts at each of eval_temperatures: means, and the episodes."""
        means, samples = {}, []
        sampler.sync(run.step)  # vLLM servers get these weights
        for temperature in args.eval_temperatures if eval_prompts else ():
            completions = play(eval_prompts, (args.seed,), group=1, temperature=temperature)
            scores = {
                reward.name: [c.rewards[f] for c in completions] for f, reward in enumerate(reward_funcs)
            }
            table = np.array([c.rewards for c in completions], np.float64)  # (C, F); None becomes NaN
            factors = torch.tensor(reward_weights, dtype=torch.float64)
            total = combine_rewards(torch.from_numpy(table), factors)
            scores["reward"] = [None if math.isnan(value) else value for value in total.tolist()]
            scores["tools/call_frequency"] = [c.calls for c in completions]
            found = summarise(
                args, temperature, [c.prompt for c in completions], [c.text for c in completions], scores
            )
            means, samples = means | found[0], samples + found[1]
        return means, samples

    # --- the gradient of a window ---------------------------------------------------------------------------
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
                    beta=args.beta,
                    importance_sampling_level=args.importance_sampling_level,
                    use_bias_correction_kl=args.use_bias_correction_kl,
                    sampled_logps=batch["sampled_logps"],
                    importance_cap=args.importance_cap if args.rollout_server else None,
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
            run.log_eval(step, *evaluate())
        # saves if it is due; true after the last step or by early stopping; at a signal the run exits here
        if run.checkpoint(step):
            break

        if step % rollouts.updates_per_rollout == 0:  # sample -> score -> compare -> windows
            rollout = step // rollouts.updates_per_rollout
            sampler.sync(step)  # vLLM servers get these weights
            completions = play(
                rollouts.prompts(rollout), (args.seed, rollout), args.num_generations, args.temperature
            )
            add_advantages(completions, reward_weights, args)
            windows = make_windows(completions, args, accelerator)
            for window in windows:
                # otherwise the model of the update is the one that sampled
                if rollouts.updates_per_rollout > 1:
                    window.add_fields(
                        lambda batch: {"old_logps": unwrapped(batch, temperature=args.temperature).logps}
                    )
                if reference:
                    window.add_fields(
                        lambda batch: {"ref_logps": reference(batch, temperature=args.temperature).logps}
                    )
            log_rollout(run, step + 1, completions, reward_funcs, args.num_generations)

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
    launch(main, Args, demo="experiments/configs/tools.yaml", default_model="outputs/sft")
