"""The sections of gpu.py: each measures ours beside what stands for TRL, on the same random weights and tokens.

What stands for TRL are its own settings, written out with transformers: right-padded batches, the prompt in both answers
of a pair, the loss over full logits, `generate()` on a left-padded batch. Ours are the calls that train_*.py make.
"""

import math
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from gpu_bench import GIB, LLAMA, SMALL, Bench, Row, optimizer_of, update

from common.model.attention import flat_attention, plan_flat_row  # isort: skip
from common.collators import flat_batch
from common.data import Example, Sequence, whole
from common.losses import dpo_loss, grpo_loss, segment_ids, segment_sum
from common.memory import empty_caches, is_oom
from common.model import FlatModel
from common.model.flat_model import flops_per_token
from common.model.lm_head import log_probs, weighted_nll
from common.model.load import compile_layers, enable_gradient_checkpointing
from common.model.wrap import wrap
from common.sampling import sample

import numpy as np
import torch
import torch.nn.functional as F
import transformers


def lognormal(count: int, shortest: int, longest: int, seed: int) -> list[int]:
    """Lengths as chats have them, with a long tail: the median is an eighth of the longest."""
    lengths = np.random.default_rng(seed).lognormal(math.log(longest / 8), 0.8, count)
    return np.clip(lengths, shortest, longest).astype(int).tolist()


# --- pretrain -------------------------------------------------------------------------------------------------------


def pretrain(bench: Bench) -> None:
    T = bench.sizes["sequence"]
    for dtype, compiled in ((torch.float32, False), (torch.float32, True), (torch.bfloat16, True), (torch.bfloat16, False)):
        for name, (kind, options, most) in bench.sizes["pretrain"].items():
            weights = "bf16 weights" if dtype == torch.bfloat16 else "bf16 autocast"
            with bench.side("pretrain", f"{name}, {weights}, {'compiled' if compiled else 'eager'}") as row:
                rows = most
                while True:
                    try:
                        row.update(_pretrain_step(bench, kind(**options), dtype, compiled, rows, T))
                        break
                    except Exception as error:
                        if not is_oom(error) or rows == 1:
                            raise
                    rows //= 2  # here the exception is gone, and what it held
                    empty_caches(bench.device)


def _pretrain_step(bench: Bench, config: Any, dtype: torch.dtype, compiled: bool, rows: int, T: int) -> Row:
    model = wrap(bench.language_model(config, dtype)).train()
    flops = flops_per_token(model, T)
    if compiled:
        compile_layers(model)
    optimizer = optimizer_of(model)
    ids = np.random.default_rng(0).integers(2, config.vocab_size, (rows, T))

    def step() -> torch.Tensor:
        batch = flat_batch([[whole(row)] for row in ids], bench.device)
        with bench.autocast() if dtype == torch.float32 else nullcontext():
            loss = model(batch, nll_weights=batch["loss_mask"] / (rows * (T - 1))).nll
        return update(model, optimizer, loss)

    began = time.perf_counter()
    first = step().item()
    compiling = time.perf_counter() - began
    rate = rows * T / bench.seconds(step)
    found = {"rows": rows, "tokens/s": round(rate), "TFLOP/s": round(rate * flops / 1e12, 2), "first loss": round(first, 4)}
    if bench.peak_flops:
        found["MFU"] = f"{rate * flops / bench.peak_flops:.1%}"
    return found | {"first step s": round(compiling, 1), "padded": model.padded}


# --- SFT ------------------------------------------------------------------------------------------------------------


def chats(bench: Bench, count: int, seed: int = 0) -> list[Sequence]:
    """Of which the second half is trained."""
    draw, V = np.random.default_rng(seed), bench.sizes["chat"]["vocab_size"]
    found = [whole(draw.integers(2, V, n)) for n in lognormal(count, 20, bench.sizes["longest"], seed)]
    for chat in found:
        chat["loss_mask"][: len(chat["loss_mask"]) // 2] = 0
    return found


def pad(bench: Bench, rows: list[Any], filler: int) -> torch.Tensor:
    tensors = [torch.as_tensor(np.asarray(row), dtype=torch.long) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=filler).to(bench.device)


def labels_of(chat: Sequence) -> np.ndarray:
    labels = np.where(chat["loss_mask"] == 1, chat["input_ids"], -100)
    labels[0] = -100
    return labels


def sft_sides(bench: Bench) -> dict[str, tuple[int, bool, Callable]]:
    """side: chats of a micro-batch, compiled, and (model, chats) -> loss."""

    def flat(model: FlatModel, some: list[Sequence]) -> torch.Tensor:
        batch = flat_batch([[chat] for chat in some], bench.device)
        return model(batch, nll_weights=batch["loss_mask"] / batch["loss_mask"].sum()).nll

    def padded(lm: Any, some: list[Sequence]) -> torch.Tensor:
        ids, labels = pad(bench, [c["input_ids"] for c in some], 0), pad(bench, [labels_of(c) for c in some], -100)
        mask = pad(bench, [np.ones(len(c["input_ids"])) for c in some], 0)
        return lm(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss

    def dense(lm: Any, some: list[Sequence]) -> torch.Tensor:
        lengths = torch.tensor([len(c["input_ids"]) for c in some])
        of = torch.repeat_interleave(torch.arange(len(some)), lengths).to(bench.device)
        mask = ((of[:, None] == of[None]) & torch.ones(len(of), len(of), dtype=torch.bool, device=bench.device).tril())[
            None, None
        ]
        positions = torch.cat([torch.arange(n) for n in lengths.tolist()])[None].to(bench.device)
        ids = torch.from_numpy(np.concatenate([c["input_ids"] for c in some]))[None].to(bench.device)
        labels = torch.from_numpy(np.concatenate([labels_of(c) for c in some]))[None].to(bench.device)
        return lm(input_ids=ids, attention_mask=mask, position_ids=positions, labels=labels, use_cache=False).loss

    few = bench.sizes["rows"]
    return {
        "ours": (few, False, flat),
        "padded, HF loss (as TRL by default)": (few, False, padded),
        "packed, dense block mask, HF loss": (few, False, dense),
        "ours, 4 times the chats": (4 * few, False, flat),
        "padded, 4 times the chats": (4 * few, False, padded),
        "ours, compiled": (few, True, flat),
    }


def sft(bench: Bench) -> None:
    first: dict[int, float] = {}
    for name, (count, compiled, loss_of) in sft_sides(bench).items():
        with bench.side("SFT", name) as row:
            found = _sft_step(bench, name, count, compiled, loss_of)
            ours = first.setdefault(count, found["first loss"])
            row.update(found | {"from ours' loss": f"{abs(found['first loss'] - ours):.1e}"})


def _sft_step(bench: Bench, name: str, count: int, compiled: bool, loss_of: Callable) -> Row:
    batches = [chats(bench, count, seed) for seed in range(8)]
    lm = bench.chat_model().train()
    model = wrap(lm).train() if name.startswith("ours") else lm
    if compiled:
        compile_layers(model)
    optimizer, turn = optimizer_of(model), iter(range(10**9))

    def step() -> torch.Tensor:
        with bench.autocast():
            loss = loss_of(model, batches[next(turn) % len(batches)])
        return update(model, optimizer, loss)

    loss = step().item()
    took = bench.seconds(step, warm_up=len(batches) - 1, cycle=len(batches))
    lengths = [[len(chat["input_ids"]) for chat in some] for some in batches]
    useful = sum(map(sum, lengths))
    row = {"chats": count, "useful tokens/s": round(useful / len(batches) / took), "first loss": round(loss, 5)}
    if name.startswith("padded"):
        row["useful"] = f"{useful / sum(len(some) * max(some) for some in lengths):.0%}"
    return row


# --- DPO ------------------------------------------------------------------------------------------------------------


def pairs(bench: Bench, count: int, seed: int) -> list[Example]:
    draw, V = np.random.default_rng(seed), bench.sizes["chat"]["vocab_size"]
    longest = bench.sizes["longest"] // 2
    found = []
    for prompt, *answers in zip(*(lognormal(count, 10, longest, 3 * seed + i) for i in range(3)), strict=True):
        start = draw.integers(2, V, prompt)
        ids = [np.concatenate([start, draw.integers(2, V, n)]) for n in answers]
        found.append([{"input_ids": i, "loss_mask": (np.arange(len(i)) >= prompt).astype(np.uint8)} for i in ids])
    return found


def selected(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """(B, L, V), (B, L) -> (B, L): log-probabilities, row by row so that no second (B, L, V) is made."""
    rows = [row.log_softmax(-1).gather(-1, t[:, None])[:, 0] for row, t in zip(logits, tokens, strict=True)]
    return torch.stack(rows)


def padded_logps(bench: Bench, lm: Any, sequences: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, L - 1) log-probabilities of the next tokens from full logits, and the mask of those that are trained."""
    ids, trained = (pad(bench, [s[name] for s in sequences], 0) for name in ("input_ids", "loss_mask"))
    mask = pad(bench, [np.ones(len(s["input_ids"])) for s in sequences], 0)
    logits = lm(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    return selected(logits, ids[:, 1:]).float(), trained[:, 1:].float()


def dpo_sides(bench: Bench) -> dict[str, tuple[int, Callable]]:
    """side: pairs of a micro-batch, and (model, pairs) -> sums of the log-probabilities of all answers, two to a pair."""

    def ours(model: FlatModel, some: list[Example]) -> torch.Tensor:
        batch = flat_batch(some, bench.device)
        return segment_sum(model(batch).logps, batch["cu_seqlens"])

    def padded(lm: Any, some: list[Example]) -> torch.Tensor:
        order = [pair[0] for pair in some] + [pair[1] for pair in some]  # chosen, then rejected, in one batch
        logps, trained = padded_logps(bench, lm, order)
        return (logps * trained).sum(-1).view(2, -1).T.flatten()

    few = bench.sizes["pairs"]
    peer = "padded, prompt twice, full logits (as TRL by default)"
    return {"ours": (few, ours), peer: (few, padded), "ours, 4 times the pairs": (4 * few, ours)}


def dpo(bench: Bench) -> None:
    for name, (count, sums_of) in dpo_sides(bench).items():
        with bench.side("DPO", name) as row:
            row.update(_dpo_step(bench, name, count, sums_of))


def _dpo_step(bench: Bench, name: str, count: int, sums_of: Callable) -> Row:
    batches = [pairs(bench, count, seed) for seed in range(8)]
    model, frozen = bench.chat_model(), bench.chat_model().requires_grad_(False)
    if name.startswith("ours"):
        model, frozen = wrap(model), wrap(frozen)
    optimizer, turn = optimizer_of(model.train()), iter(range(10**9))
    first: list[torch.Tensor] = []

    def step() -> torch.Tensor:
        some = batches[next(turn) % len(batches)]
        with bench.autocast():
            sums = sums_of(model, some)
            with torch.no_grad():
                reference = sums_of(frozen, some)
        first[1:] = []
        first.append(sums.detach())
        ones = torch.ones(len(some), device=bench.device)
        of = (sums[::2], sums[1::2], reference[::2], reference[1::2], ones, ones)
        return update(model, optimizer, dpo_loss(*of, beta=0.1)[0].mean())

    loss = step().item()
    took = bench.seconds(step, warm_up=len(batches) - 1, cycle=len(batches))
    row = {"pairs": count, "pairs/s": round(count / took, 2), "first loss": round(loss, 4)}
    return row | {"first logp of a chosen answer": round(first[0][0].item(), 1)}


# --- GRPO -----------------------------------------------------------------------------------------------------------


def prompts_of(bench: Bench, groups: int) -> list[list[int]]:
    draw, G = np.random.default_rng(0), bench.sizes["G"]
    V = bench.sizes["chat"]["vocab_size"]
    return [row for n in draw.integers(*bench.sizes["prompt"], groups) for row in [draw.integers(2, V, n).tolist()] * G]


def some_stops(bench: Bench) -> list[int]:
    """Stop tokens that end a completion of random weights after about half of the most tokens, on average."""
    V, new = bench.sizes["chat"]["vocab_size"], bench.sizes["new"]
    return list(range(2, 2 + max(1, 2 * V // new)))


def samplers(bench: Bench, prompts: list[list[int]], stop_ids: list[int]) -> dict[str, Callable]:
    """side: (language model, number of the call) -> sampled tokens of each row, up to and with its stop token."""
    new, V = bench.sizes["new"], bench.sizes["chat"]["vocab_size"]
    longest, stop_ids = max(map(len, prompts)), stop_ids or [V]  # a token that does not exist: all get `new` tokens
    settings = transformers.GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new,
        pad_token_id=0,
        eos_token_id=stop_ids,
    )

    def ours(model: FlatModel, call: int) -> list[list[int]]:
        keys = [(call, i) for i in range(len(prompts))]
        options = {"stop_ids": stop_ids, "max_new_tokens": new, "batch_size": len(prompts)}
        return [completion.ids for completion in sample(model, prompts, keys, **options)]

    def cut(rows: list[list[int]]) -> list[list[int]]:
        stops = set(stop_ids)
        return [row[: next((i + 1 for i, token in enumerate(row) if token in stops), len(row))] for row in rows]

    @torch.no_grad()
    def generate(lm: Any, call: int) -> list[list[int]]:
        torch.manual_seed(call)
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=bench.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=bench.device)
        return cut(lm.generate(ids, attention_mask=mask, generation_config=settings)[:, longest:].tolist())

    def generate_batch(lm: Any, call: int) -> list[list[int]]:
        torch.manual_seed(call)
        found = lm.generate_batch(inputs=prompts, generation_config=settings, progress_bar=False, persistent_manager=True)
        if errors := [output.error for output in found.values() if output.error]:
            raise RuntimeError(errors[0])
        return cut([output.generated_tokens for output in found.values()])

    return {"ours": ours, "generate()": generate, "generate_batch (continuous batching)": generate_batch}


def least_seconds(bench: Bench, lm: Any, prompts: list[list[int]], rows: list[list[int]]) -> float | None:
    """What reading weights, keys and values takes, at the bandwidth of the data sheet: once per step, each prompt once."""
    if bench.bandwidth is None:
        return None
    config = bench.sizes["chat"]
    token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"] * 2
    weights = sum(p.numel() for p in lm.parameters()) * 2  # the embedding is the head, which is read whole
    steps = max(map(len, rows))
    distinct = sum(map(len, {tuple(p) for p in prompts}))
    own = sum(n * (n + 1) // 2 for n in map(len, rows))
    return (steps * (weights + token * distinct) + token * own) / bench.bandwidth


def sampling(bench: Bench) -> None:
    for groups in bench.sizes["groups"]:
        prompts = prompts_of(bench, groups)
        for lengths, stop_ids in (("equal lengths", []), ("uneven lengths", some_stops(bench))):
            for name, run in samplers(bench, prompts, stop_ids).items():
                batched = name.startswith("generate_batch")
                if batched and (not bench.cuda or stop_ids):
                    continue
                with bench.side("GRPO sampling", f"{len(prompts)} rows, {lengths}: {name}") as row:
                    row.update(_sampling_rate(bench, prompts, run, torch.bfloat16, ours=name == "ours"))
                if name == "ours" and groups == bench.sizes["groups"][0]:  # as train_grpo.py samples with bf16
                    with bench.side(
                        "GRPO sampling", f"{len(prompts)} rows, {lengths}: ours, float32 weights, autocast"
                    ) as row:
                        row.update(_sampling_rate(bench, prompts, run, torch.float32, ours=True))


def _sampling_rate(bench: Bench, prompts: list[list[int]], run: Callable, dtype: torch.dtype, ours: bool) -> Row:
    lm = bench.chat_model(dtype).eval()
    model = wrap(lm) if ours else lm
    found = []
    try:
        with bench.autocast() if dtype == torch.float32 else nullcontext():
            run(model, 0)  # the warm-up
            while not found or (len(found) < 3 and sum(took for took, _ in found) < bench.sizes["seconds"]):
                bench.wait()
                began = time.perf_counter()
                rows = run(model, len(found) + 1)
                bench.wait()
                found.append((time.perf_counter() - began, rows))
    finally:
        if hasattr(lm, "destroy_cached_continuous_batching_manager"):
            lm.destroy_cached_continuous_batching_manager()  # else its cache stays
    rate = statistics.median(sum(map(len, rows)) / took for took, rows in found)
    took, rows = found[-1]
    least = least_seconds(bench, lm, prompts, rows)
    row = {"tokens/s": round(rate), "ms a step": round(1000 * took / max(map(len, rows)), 2)}
    return row | ({"of the bandwidth": f"{least / took:.1%}"} if least else {})


def grpo_step(bench: Bench) -> None:
    """Sampling and one update on the completions, float32 weights under autocast on both sides; rewards are random."""
    prompts = prompts_of(bench, bench.sizes["groups"][0])
    sides = samplers(bench, prompts, some_stops(bench))

    def sequences(rows: list[list[int]], advantages: np.ndarray) -> list[Sequence]:
        return [
            {
                "input_ids": np.array(p + r),
                "loss_mask": np.array([0] * len(p) + [1] * len(r), np.uint8),
                "advantage": float(a),
            }
            for p, r, a in zip(prompts, rows, advantages, strict=True)
        ]

    def ours(model: FlatModel, some: list[Sequence]) -> torch.Tensor:
        batch = flat_batch([[s] for s in some], bench.device)
        logps, mask, borders = model(batch, entropy=True).logps, batch["loss_mask"], batch["cu_seqlens"]
        advantages = batch["advantage"][segment_ids(borders, len(logps))]
        return grpo_loss(logps, logps.detach(), None, advantages, mask, borders)[0].sum() / mask.sum()

    def padded(lm: Any, some: list[Sequence]) -> torch.Tensor:
        logps, mask = padded_logps(bench, lm, some)
        advantages = torch.tensor([s["advantage"] for s in some], device=bench.device)[:, None]
        return -((logps - logps.detach()).exp() * advantages * mask).sum() / mask.sum()

    def run(sampler: Callable, loss_of: Callable, is_ours: bool) -> Row:
        lm = bench.chat_model()
        model = wrap(lm) if is_ours else lm
        optimizer = optimizer_of(model)
        times: list[tuple[float, float]] = []
        parts = 1 if is_ours or bench.tiny else 8  # full logits of all rows do not fit at once
        for call in range(3):
            bench.wait()
            began = time.perf_counter()
            with bench.autocast():
                rows = sampler(model.eval(), call)
            bench.wait()
            sampled = time.perf_counter()
            some = sequences(rows, np.random.default_rng(call).normal(size=len(rows)))
            model.train()
            for part in np.array_split(np.arange(len(some)), parts):
                with bench.autocast():
                    loss = loss_of(model, [some[i] for i in part]) / parts
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            bench.wait()
            times.append((sampled - began, time.perf_counter() - sampled))
        sampling_s, update_s = (statistics.median(t[i] for t in times[1:]) for i in (0, 1))
        found = {"rows": len(rows), "steps/s": round(1 / (sampling_s + update_s), 3)}
        return found | {"sampling s": round(sampling_s, 3), "update s": round(update_s, 3)}

    with bench.side("GRPO step", "ours") as row:
        row.update(run(sides["ours"], ours, is_ours=True))
    with bench.side("GRPO step", "generate(), padded update, full logits") as row:
        row.update(run(sides["generate()"], padded, is_ours=False))


# --- parts ----------------------------------------------------------------------------------------------------------


def head(bench: Bench) -> None:
    N, D, V = bench.sizes["head"]
    options = SMALL | {
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "head_dim": D // 4,
    }
    inner = bench.language_model(transformers.LlamaConfig(**LLAMA | options), torch.bfloat16)
    weight = inner.get_output_embeddings().weight
    torch.manual_seed(1)
    hidden = torch.randn(N, D, device=bench.device, dtype=torch.bfloat16, requires_grad=True)
    tokens, weights = torch.randint(V, (N,), device=bench.device), torch.full((N,), 1 / N, device=bench.device)
    sides = {
        "ours, pretrain and SFT": lambda: weighted_nll(inner, hidden, tokens, weights)[0],
        "ours, DPO and GRPO": lambda: -(weights * log_probs(inner, hidden, tokens)[0]).sum(),
        "full logits": lambda: F.cross_entropy((hidden @ weight.T).float(), tokens),
    }
    if hasattr(F, "linear_cross_entropy"):
        sides["torch linear_cross_entropy"] = lambda: F.linear_cross_entropy(hidden, weight, tokens)
    for name, loss_of in sides.items():
        with bench.side("loss head", f"V = {V:,}, N = {N:,}, D = {D:,}: {name}") as row:
            before = torch.cuda.memory_allocated(bench.device) if bench.cuda else 0

            def step(loss_of=loss_of) -> torch.Tensor:
                hidden.grad = weight.grad = None
                loss = loss_of()
                loss.backward()
                return loss.detach()

            row.update({"loss": round(step().item(), 4), "ms": round(1000 * bench.seconds(step), 2)})
            row["TFLOP/s"] = round(6 * N * D * V / row["ms"] / 1e9, 1)
            if bench.cuda:
                row["temporary GiB"] = round((torch.cuda.max_memory_allocated(bench.device) - before) / GIB, 2)
            hidden.grad = weight.grad = None


def attention(bench: Bench) -> None:
    total, H, Hkv, Dh = bench.sizes["attention"], 16, 8, 128
    lengths = lognormal(10**4, 20, bench.sizes["longest"], 0)
    lengths = lengths[: max(1, int(np.searchsorted(np.cumsum(lengths), total)))]
    T = sum(lengths)
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(1, h, T, Dh, device=bench.device, dtype=torch.bfloat16, requires_grad=True) for h in (H, Hkv, Hkv)
    )
    plan = plan_flat_row(lengths, bench.device)
    ragged, plan.ragged = plan.ragged, None
    module = torch.nn.Module()

    def dense() -> torch.Tensor:
        of = torch.repeat_interleave(
            torch.arange(len(lengths), device=bench.device), torch.tensor(lengths, device=bench.device)
        )
        mask = (of[:, None] == of[None]) & (
            torch.arange(T, device=bench.device)[:, None] >= torch.arange(T, device=bench.device)
        )
        keys, values = (x.repeat_interleave(H // Hkv, 1) for x in (k, v))  # as transformers does: no kernel shares them
        return F.scaled_dot_product_attention(q, keys, values, mask[None, None]).transpose(1, 2)

    def flat(way: Any) -> torch.Tensor:
        plan.ragged = way
        return flat_attention(module, q, k, v, None, flat_row=plan)[0]

    sides = {"buckets through SDPA": lambda: flat(None), "dense block mask through SDPA": dense}
    if ragged is not None:
        sides = {"varlen kernel": lambda: flat(ragged)} | sides
    else:
        print(f"    no varlen kernel: it needs PyTorch 2.10 and a CUDA GPU of capability 8.0, this is {bench.device}")
    flops = 3.5 * sum(2 * n * n * H * Dh for n in lengths)  # forward 2 products of n²/2, backward 2.5 times that
    first = None
    for name, run in sides.items():
        with bench.side("attention", f"{len(lengths)} sequences, {T:,} tokens: {name}") as row:

            def step(run=run) -> torch.Tensor:
                q.grad = k.grad = v.grad = None
                out = run()
                out.backward(torch.ones_like(out))
                return out.detach()

            out, gradient = step().float(), k.grad.float()
            first = first if first is not None else (out, gradient)
            row["ms"] = round(1000 * bench.seconds(step), 2)
            row["useful TFLOP/s"] = round(flops / row["ms"] / 1e9, 2)
            differences = [float((a - b).abs().max() / b.abs().max()) for a, b in zip((out, gradient), first, strict=True)]
            row["differs from the first by"] = f"{differences[0]:.0e}, keys' gradient {differences[1]:.0e}"


# --- what recomputing and offloading cost, and what they give back ------------------------------------------------------


def long_row(bench: Bench) -> None:
    T = bench.sizes["long row"]
    sides = {"activations kept": None, "recomputed": False, "recomputed, inputs of the blocks on the host": True}
    for name, offload in sides.items():
        with bench.side("long row", name) as row:
            model = wrap(bench.chat_model()).train()
            if offload is not None:
                enable_gradient_checkpointing(model, offload)
            row.update(_long_row(bench, model, T))


def _long_row(bench: Bench, model: FlatModel, T: int) -> Row:
    ids = np.random.default_rng(0).integers(2, bench.sizes["chat"]["vocab_size"], T)

    def step() -> torch.Tensor:
        batch = flat_batch([[whole(ids)]], bench.device)
        with bench.autocast():
            loss = model(batch, nll_weights=batch["loss_mask"] / (T - 1)).nll
        loss.backward()
        model.zero_grad()
        return loss.detach()

    loss = step().item()
    return {"tokens": T, "tokens/s": round(T / bench.seconds(step, warm_up=1)), "first loss": round(loss, 4)}
