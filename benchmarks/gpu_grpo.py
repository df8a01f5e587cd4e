"""The sections of gpu.py that sample: GRPO's sampling beside generate() and continuous batching, and whole
steps."""

from collections.abc import Callable
from contextlib import nullcontext
import statistics
import time
from typing import Any

from gpu_bench import Bench, Row, optimizer_of, padded_logps, prompts_of, some_stops

from common.collators import flat_batch  # isort: skip
from common.data import Sequence
from common.losses import grpo_loss, segment_ids
from common.model import FlatModel
from common.model.wrap import wrap
from common.sampling import cuda_graph, sample
import numpy as np
import torch
import transformers


def samplers(bench: Bench, prompts: list[list[int]], stop_ids: list[int]) -> dict[str, Callable]:
    """side: (language model, number of the call) -> sampled tokens of each row, up to and with its stop
    token."""
    new, V = bench.sizes["new"], bench.sizes["chat"]["vocab_size"]
    # a token that does not exist: all get `new` tokens
    longest, stop_ids = max(map(len, prompts)), stop_ids or [V]
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
        return [
            row[: next((i + 1 for i, token in enumerate(row) if token in stops), len(row))] for row in rows
        ]

    @torch.no_grad()
    def generate(lm: Any, call: int) -> list[list[int]]:
        torch.manual_seed(call)
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=bench.device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=bench.device)
        return cut(lm.generate(ids, attention_mask=mask, generation_config=settings)[:, longest:].tolist())

    def generate_batch(lm: Any, call: int) -> list[list[int]]:
        torch.manual_seed(call)
        found = lm.generate_batch(
            inputs=prompts, generation_config=settings, progress_bar=False, persistent_manager=True
        )
        if errors := [output.error for output in found.values() if output.error]:
            raise RuntimeError(errors[0])
        return cut([output.generated_tokens for output in found.values()])

    return {"ours": ours, "generate()": generate, "generate_batch (continuous batching)": generate_batch}


def count_graphs() -> Row:
    """Counts from now on how often our sampler captures a CUDA graph, and replays one."""
    counts, capture = {"captures": 0, "replays": 0}, cuda_graph.capture

    def counted(*args: Any) -> Callable:
        replay = capture(*args)
        counts["captures"] += 1

        def replay_counted(tokens: torch.Tensor) -> torch.Tensor:
            counts["replays"] += 1
            return replay(tokens)

        return replay_counted

    cuda_graph.capture = counted
    return counts


def least_seconds(bench: Bench, lm: Any, prompts: list[list[int]], rows: list[list[int]]) -> float | None:
    """What reading weights, keys and values takes, at the bandwidth of the data sheet: once per step, each
    prompt once."""
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
    graphs = count_graphs()
    for groups in bench.sizes["groups"]:
        prompts = prompts_of(bench, groups)
        for lengths, stop_ids in (("equal lengths", []), ("uneven lengths", some_stops(bench))):
            for name, run in samplers(bench, prompts, stop_ids).items():
                batched = name.startswith("generate_batch")
                if batched and (not bench.cuda or stop_ids):
                    continue
                with bench.side("GRPO sampling", f"{len(prompts)} rows, {lengths}: {name}") as row:
                    row.update(
                        _sampling_rate(
                            bench, prompts, run, torch.bfloat16, graphs if name == "ours" else None
                        )
                    )
                # as train_grpo.py samples with bf16
                if name == "ours" and groups == bench.sizes["groups"][0]:
                    with bench.side(
                        "GRPO sampling", f"{len(prompts)} rows, {lengths}: ours, float32 weights, autocast"
                    ) as row:
                        row.update(_sampling_rate(bench, prompts, run, torch.float32, graphs))
    few = prompts_of(bench, 1)
    for dtype in (torch.bfloat16, torch.float32):
        with bench.side("GRPO sampling", f"profiled: 24 tokens for {len(few)} rows, {dtype}"):
            model = wrap(bench.chat_model(dtype).eval())
            keys = [(i,) for i in range(len(few))]
            with bench.autocast() if dtype == torch.float32 else nullcontext():
                bench.kernels(
                    f"sampling, {dtype}", lambda: sample(model, few, keys, stop_ids=[], max_new_tokens=24)
                )  # noqa: B023


def _sampling_rate(
    bench: Bench, prompts: list[list[int]], run: Callable, dtype: torch.dtype, graphs: Row | None
) -> Row:
    """graphs: how often our sampler has captured and replayed one; None for another sampler."""
    lm = bench.chat_model(dtype).eval()
    model = lm if graphs is None else wrap(lm)
    before, found = dict(graphs or {}), []
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
    row |= {name: count - before[name] for name, count in (graphs or {}).items()}
    return row | ({"of the bandwidth": f"{least / took:.1%}"} if least else {})


def grpo(bench: Bench) -> None:
    """Sampling and one update on the completions, float32 weights under autocast on both sides; rewards are
    random."""
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
