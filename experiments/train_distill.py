"""On-policy distillation: prompts and a teacher -> a model that writes what the teacher would have written.

Completions are sampled from the model, and at each of their tokens its distribution is pulled towards the
teacher's (GKD: Agarwal et al. 2024, arXiv 2306.13649). Over the N completion tokens t of a window (all
micro-batches of all processes):

    loss = 1/N Σ_t D(π(· | tokens before t), π_teacher(· | tokens before t))

1. D is the reverse KL(π || π_teacher) with --beta 1 (the default), the forward KL(π_teacher || π) with 0,
   between them the generalised Jensen-Shannon divergence, as in TRL. It covers the whole vocabulary; sampling
   has no gradient.
2. The share --lmbda of the completions is sampled, by default all; the others come from the data.
3. Both distributions use the sampling temperature. Their logits exist for only one chunk of tokens at a time.
4. The teacher uses the student's tokens. Tokens that only one vocabulary is padded with are left out; the
   teacher reads a substitute for a token that it lacks.

    python -m experiments.train_distill                            # the embedded demo, after train_grpo.py
    python -m experiments.train_distill --model_name_or_path outputs/sft --teacher_model_name_or_path outputs/grpo

Shapes: T tokens of the row, N of them targets, n of these in a chunk, V tokens of the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
import math
from typing import Any, Literal

from common.args import CommonArgs, arg
from common.collators import Batch, Window
from common.command_line import launch
from common.data import BadRow, Row, Tokenizer, as_chat, as_prompt, load_prompts, tokenize_chat, tokenize_row
from common.errors import UserError, say
from common.evaluate import complete_prompts, load_eval_prompts
from common.model import disable_dropout, load_model, load_tokenizer, make_optimizer, schedule, set_lr
from common.model.lm_head import logits_of
from common.model.reference import Reference, load_frozen
from common.processes import Accelerator, own_share
from common.run import Run
from common.sampling import RolloutSchedule, Sampler, load_sampler, sample_shared
import numpy as np
import torch

# "prompt" (text or messages), "prompt_ids", with --lmbda below 1 also "completion_ids"
Prompt = dict[str, Any]


@dataclass
class Args(CommonArgs):
    output_dir: str = arg("outputs/distill", help="folder for everything that the run writes")
    learning_rate: float = arg(1e-6, help="peak learning rate of AdamW")
    lr_scheduler_type: Literal["cosine", "linear", "constant", "wsd"] = arg(
        "constant", help="wsd: flat, then linear"
    )
    per_device_train_batch_size: int = arg(8, help="completions per process and micro-batch")

    # Algorithm
    teacher_model_name_or_path: str | None = arg(None, help="Hub name or folder of the teacher", is_path=True)
    beta: float = arg(
        1.0, help="1: reverse KL, 0: forward KL, between them the generalised JSD", within="[0, 1]"
    )
    lmbda: float = arg(
        1.0, help="share of completions that are sampled; the others are the data's", within="[0, 1]"
    )

    # Sampling
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
    rollout_server: list[str] | None = arg(
        None, help="http://host:port of vLLM servers", may_change="execution"
    )

    def __post_init__(self) -> None:
        if self.teacher_model_name_or_path is None:
            raise UserError("--teacher_model_name_or_path: name the model to learn from")
        if self.lmbda < 1 and self.system_prompt is not None:
            raise UserError(
                "--system_prompt: with --lmbda below 1 the data's completions follow prompts as the data has them"
            )


@dataclass
class Completion:
    """The text after a prompt."""

    prompt: Prompt
    ids: list[int]
    finished: bool  # ended with a stop token
    sampled: bool  # by the model; otherwise from the data


def encode_prompt(row: Row, tokenizer: Tokenizer, args: Args) -> Prompt:
    """A dataset row as a prompt to sample from. BadRow: left out, counted and reported."""
    return tokenize_row(as_prompt(row), tokenizer, args.max_prompt_length, args.system_prompt)


def encode(row: Row, tokenizer: Tokenizer, args: Args) -> Prompt:
    """The result of `encode_prompt`, plus the row's completion if --lmbda uses some of the data's."""
    prompt = encode_prompt(row, tokenizer, args)
    if args.lmbda == 1:
        return prompt
    (chat,) = tokenize_chat(as_chat(row), tokenizer, train_on="last_turn")
    answer = np.flatnonzero(chat["loss_mask"])
    if chat["input_ids"][: answer[0]].tolist() != prompt["prompt_ids"]:
        raise BadRow("no completion of the prompt")
    return prompt | {"completion_ids": chat["input_ids"][answer].tolist()}


def check_vocabulary(args: Args, tokenizer: Tokenizer) -> None:
    """Raise UserError if a token of the student means another one for the teacher."""
    name = args.teacher_model_name_or_path
    ours, theirs = tokenizer.get_vocab(), load_tokenizer(args, name).get_vocab()
    if other := sorted(
        token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)
    ):
        raise UserError(
            f"--teacher_model_name_or_path {name}: its tokenizer is another one, {len(other)} tokens differ ({other[0]!r} "
            "for one): student and teacher need the same vocabulary"
        )


def generalized_jsd(logits: torch.Tensor, teacher_logits: torch.Tensor, beta: float) -> torch.Tensor:
    """Divergence of two distributions over a vocabulary: (n, V), (n, V) -> (n,). Agarwal et al. 2024, arXiv
    2306.13649.

    With student s and teacher t: beta 0 is the forward `KL(t || s)`, 1 the reverse `KL(s || t)`, values
    between `β KL(t || m) + (1-β) KL(s || m)` with `m = (1-β) s + β t`, which tends to 0 at both ends.
    """
    s, t = logits.log_softmax(-1), teacher_logits.log_softmax(-1)
    if beta == 0:
        return (t.exp() * (t - s)).sum(-1)
    if beta == 1:
        return (s.exp() * (s - t)).sum(-1)
    m = torch.logaddexp(s + math.log(1 - beta), t + math.log(beta))
    return (beta * t.exp() * (t - m) + (1 - beta) * s.exp() * (s - m)).sum(-1)


@torch.no_grad()
def logits_at(teacher: Reference, batch: Batch, temperature: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """f(rows (n,)) -> (n, V) float32: the teacher's logits for targets of the batch, divided by the
    temperature.

    rows: as map_logits passes them to its function. The body runs in this call, the LM head in f, so that the
    full logits never exist.
    """
    with teacher.accelerator.autocast():
        predicting = teacher.model.predicting(batch)  # (N, D)

    @torch.no_grad()
    def at(rows: torch.Tensor) -> torch.Tensor:
        with teacher.accelerator.autocast():
            states = predicting[torch.searchsorted(batch["targets"], rows)]
            return logits_of(teacher.model.lm, states) / temperature

    return at


def divergence(
    logits: torch.Tensor,
    rows: torch.Tensor,
    *,
    teacher_logits: Callable[[torch.Tensor], torch.Tensor],
    beta: float,
) -> torch.Tensor:
    """The divergence for a chunk of targets: (n, V), (n,) -> (n,). teacher_logits: (n,) -> (n, V)."""
    theirs = teacher_logits(rows)
    V = min(logits.shape[1], theirs.shape[1])  # one of them may be padded
    return generalized_jsd(logits[:, :V], theirs[:, :V], beta)


def roll_out(
    args: Args,
    accelerator: Accelerator,
    sampler: Sampler,
    prompts: list[Prompt],
    rollout: int,
) -> list[Completion]:
    """A completion of each prompt: the share args.lmbda of them sampled, spread evenly among those of the
    data. Each process samples a share and gets them all. Random numbers are a function of (seed, rollout,
    place), whichever process samples."""
    places = range(rollout * len(prompts), (rollout + 1) * len(prompts))
    is_sampled = [int((place + 1) * args.lmbda) > int(place * args.lmbda) for place in places]
    asked = [i for i in range(len(prompts)) if is_sampled[i]]
    keys = [(args.seed, rollout, i) for i in asked]
    sampled = sample_shared(accelerator, sampler, [prompts[i]["prompt_ids"] for i in asked], keys)
    found = dict(zip(asked, sampled, strict=True))
    completions = []
    for i, prompt in enumerate(prompts):
        if i in found:
            completions.append(Completion(prompt, ids=found[i].ids, finished=found[i].finished, sampled=True))
        else:
            ids = prompt["completion_ids"][: args.max_completion_length]
            completions.append(
                Completion(prompt, ids=ids, finished=ids == prompt["completion_ids"], sampled=False)
            )
    return completions


def make_window(completions: list[Completion], args: Args, accelerator: Accelerator) -> Window:
    """A rollout as a window, of gradient_accumulation_steps micro-batches on every process."""
    N = sum(len(c.ids) for c in completions)
    examples = []
    for c in completions:
        prompt = c.prompt["prompt_ids"]
        on_completion = np.array([0] * len(prompt) + [1] * len(c.ids), np.float32)
        sequence = {
            "input_ids": np.array(prompt + c.ids),
            "loss_mask": on_completion,
            "token_weight": on_completion / np.float32(N),
            "sampled": on_completion * c.sampled,
        }
        examples.append([sequence])
    mine = own_share(accelerator, len(examples))
    micro_batches = np.array_split(mine, args.gradient_accumulation_steps)
    return Window(accelerator, examples, [part.tolist() for part in micro_batches])


def log_rollout(run: Run, step: int, completions: list[Completion], tokenizer: Tokenizer) -> None:
    """Log the rollout used from `step` on: lengths of sampled completions, and a line for each in
    completions.jsonl."""
    sampled = [c for c in completions if c.sampled]
    if sampled:
        lengths = [len(c.ids) for c in sampled]
        logged = {"mean": np.mean(lengths), "min": min(lengths), "max": max(lengths)}
        run.metrics.add(**{f"completions/{name}_length": float(length) for name, length in logged.items()})
        run.metrics.add(**{"completions/clipped_ratio": float(np.mean([not c.finished for c in sampled]))})
    run.metrics.close_window()  # they count even if the step is skipped
    texts = [tokenizer.decode(c.ids, skip_special_tokens=True) for c in completions]
    lines = [
        {
            "step": step,
            "prompt": c.prompt["prompt"],
            "completion": text,
            "finished": c.finished,
            "sampled": c.sampled,
        }
        for c, text in zip(completions, texts, strict=True)
    ]
    run.metrics.append("completions.jsonl", lines)


def main(args: Args) -> None:
    # processes, seed, output folder (with a copy of this file), checkpoint to resume from
    run = Run(args, __file__)
    accelerator = run.accelerator

    # --- data -----------------------------------------------------------------------------------------------
    tokenizer = load_tokenizer(args)
    check_vocabulary(args, tokenizer)
    prompts, held_out = load_prompts(args, encode, tokenizer)
    eval_prompts = load_eval_prompts(args, accelerator, tokenizer, prompts, held_out, encode=encode_prompt)
    rollouts = RolloutSchedule(  # rollouts.prompts(n): prompts of the n-th; len(rollouts): updates of the run
        args,
        accelerator,
        prompts,
        num_generations=1,
        max_completion_length=args.max_completion_length,
        windows_per_rollout=1,
        updates_per_rollout=1,
    )

    # --- model and reference --------------------------------------------------------------------------------
    model = disable_dropout(load_model(args, accelerator, tokenizer, run.resume_from))
    optimizer = make_optimizer(args, model)
    lr_at = schedule(args, len(rollouts))
    run.describe(model, tokenizer, rollouts, held_out, example_name="prompt", reference=True)
    if args.dry_run:
        return
    model, optimizer = run.prepare(model, optimizer)  # Accelerate's prepare; then resumes the run
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
    teacher = load_frozen(args, accelerator, tokenizer, args.teacher_model_name_or_path)
    teacher_tokens = teacher.model.lm.get_input_embeddings().num_embeddings
    say(f"{rollouts.window_size} completions a step")

    # --- the gradient of a window ---------------------------------------------------------------------------
    def gradients(window: Window) -> None:
        """A function, so that a window can be repeated in smaller micro-batches when memory runs out."""
        for batch in window:  # micro-batches of this process
            with accelerator.accumulate(model):
                mask = batch["loss_mask"]  # (T,)
                known = batch | {"input_ids": batch["input_ids"].clamp(max=teacher_tokens - 1)}
                to_teacher = partial(
                    divergence, teacher_logits=logits_at(teacher, known, args.temperature), beta=args.beta
                )
                out = model(batch, temperature=args.temperature, entropy=True, map_logits=to_teacher)
                losses = torch.zeros_like(mask).index_put((batch["targets"],), out.mapped)  # (T,)
                loss = (losses * batch["token_weight"]).sum()  # <- the algorithm
                window.backward(loss + out.aux_loss)  # accelerator.backward of a sum over the window
            run.metrics.add_sum(loss=loss)
            run.metrics.add(mask, entropy=out.entropy)
            run.metrics.add(batch["sampled"], **{"loss/sampled": losses})
            run.metrics.add(mask - batch["sampled"], **{"loss/data": losses})

    # --- loop -----------------------------------------------------------------------------------------------
    # step: updates done so far; at the last one it only evaluates and ends
    for step in run.steps(last=len(rollouts)):
        if run.eval_due(step):
            run.log_eval(step, *complete_prompts(args, accelerator, model, tokenizer, eval_prompts))
        # saves if it is due; true after the last step or by early stopping; at a signal the run exits here
        if run.checkpoint(step):
            break

        sampler.sync(step)  # vLLM servers get these weights
        completions = roll_out(args, accelerator, sampler, rollouts.prompts(step), step)
        log_rollout(run, step + 1, completions, tokenizer)
        window = make_window(completions, args, accelerator)
        set_lr(optimizer, lr_at(step))
        # out of memory: from the start, in smaller micro-batches, on all processes
        run.retry_smaller(gradients, window)
        grad_norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
        if run.is_finite(grad_norm, window):  # otherwise reported, counted, and its rows kept in bad_batches/
            optimizer.step()
        optimizer.zero_grad()
        run.log(step + 1, window, grad_norm=grad_norm, learning_rate=lr_at(step))

    run.finish(try_next=f"read {args.output_dir}/completions.jsonl")


if __name__ == "__main__":
    launch(main, Args, demo="experiments/configs/distill.yaml", default_model="outputs/sft")
