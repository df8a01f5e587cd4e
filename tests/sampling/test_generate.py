"""Sampling: against transformers' own `generate`, against the trainer's log-probabilities, and against the
softmax."""

import contextlib
import copy
import functools
import sys
from types import SimpleNamespace

from accelerate import Accelerator
from common.collators import flat_batch, split_row
from common.errors import UserError
from common.evaluate import complete
from common.model.flat_model import body, disable_dropout
from common.model.load import enable_gradient_checkpointing
from common.model.wrap import wrap
import common.sampling.generate
from common.sampling.generate import FlatDecoder, Sampled, sample
import common.sampling.kv_cache
import numpy as np
import pytest
import torch
import transformers

from tests.tiny import FAMILIES, HYBRIDS, TINY, V, sequence, tiny_config, tiny_family, tiny_pair

LENGTHS = [5, 1, 9, 3, 9, 2, 14, 6]
PROMPTS = [np.random.default_rng(i).integers(2, V, n).tolist() for i, n in enumerate(LENGTHS)]
PROMPTS[4] = PROMPTS[2]  # one prompt twice
KEYS = [(7, i) for i in range(len(PROMPTS))]
NEW = 20


@pytest.fixture(scope="module", params=TINY)
def pair(request):
    model, lm = tiny_pair(request.param)
    assert model.config._attn_implementation == "flat" and not model.padded
    return model, lm


@pytest.fixture(scope="module")
def stop_ids(pair) -> list[int]:
    """Two tokens at which some of the greedy completions end, at different places."""
    _, lm = pair
    free = [theirs(lm, prompt, []) for prompt in PROMPTS]
    return [free[0][3], free[6][9]]


def theirs(lm, prompt: list[int], stop_ids: list[int]) -> list[int]:
    """The greedy completion of one prompt, alone, by transformers."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, "eos_token_id": stop_ids or None}
    lm.generation_config.eos_token_id = None
    return lm.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def ours(model, prompts=PROMPTS, keys=KEYS, *, stop_ids=(1,), **options) -> list[Sampled]:
    return sample(
        model, prompts, keys, stop_ids=stop_ids, max_new_tokens=options.pop("max_new_tokens", NEW), **options
    )


def trainer_logps(model, prompts, completions, temperature: float = 1.0) -> list[torch.Tensor]:
    """The log-probabilities of the completions by the model as it is trained, without dropout."""
    examples = [[sequence(prompt, c.ids)] for prompt, c in zip(prompts, completions, strict=True)]
    batch = flat_batch(examples, torch.device("cpu"))
    was_training = model.training
    with torch.no_grad():
        logps = model.eval()(batch, temperature=temperature).logps
    model.train(was_training)
    return [row[len(p) :] for row, p in zip(split_row(logps, batch), prompts, strict=True)]


def assert_as_trained(model, prompts, found, temperature=1.0, tolerance=1e-4):
    for c, logps in zip(found, trainer_logps(model, prompts, found, temperature), strict=True):
        torch.testing.assert_close(torch.tensor(c.logps), logps, atol=tolerance, rtol=0)


def assert_as_transformers(model, lm, prompts, stop_ids, tolerance=1e-4, **options):
    """Greedy completions token by token, with the log-probabilities of training."""
    wanted = [theirs(lm, prompt, stop_ids) for prompt in prompts]
    assert len({len(ids) for ids in wanted}) > 1, "a test in which all end together shows little"
    found = ours(
        model, prompts, [(i,) for i in range(len(prompts))], stop_ids=stop_ids, temperature=0, **options
    )
    assert [c.ids for c in found] == wanted
    assert [c.finished for c in found] == [ids[-1] in stop_ids for ids in wanted]
    assert_as_trained(model, prompts, found, tolerance=tolerance)


def assert_same_in_any_batch(model, prompts, keys, stop_ids):
    one, all_together = (ours(model, prompts, keys, stop_ids=stop_ids, batch_size=n) for n in (1, 128))
    assert [c.ids for c in one] == [c.ids for c in all_together]


# --- greedy -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [3, 128])
def test_greedy_sampling_is_transformers_generate(pair, stop_ids, batch_size):
    """Uneven prompts, two stop tokens, model in training mode (gpt2 with dropout)."""
    assert_as_transformers(*pair, PROMPTS, stop_ids, batch_size=batch_size)


def test_each_completion_has_a_limit_of_its_own(pair, stop_ids):
    """Cut there, and drawn as if all had the longest; one that stops with its last allowed token is
    finished."""
    model, _ = pair
    for temperature in (0, 1.3):
        whole = ours(model, stop_ids=stop_ids, temperature=temperature)
        limits = [1, 2, 3, NEW, 5, 1, len(whole[6].ids), 9]
        for limit, cut, free in zip(
            limits,
            ours(model, stop_ids=stop_ids, temperature=temperature, max_new_tokens=limits),
            whole,
            strict=True,
        ):
            assert cut.ids == free.ids[:limit] and cut.finished == (free.finished and len(free.ids) <= limit)
            assert cut.logps == pytest.approx(free.logps[:limit], abs=1e-5)


def test_a_stop_token_beyond_the_limit_does_not_count():
    """In a batch of 24, where a completion that has ended stays until others have, too."""
    model, _ = tiny_pair("llama")
    many = {"prompts": PROMPTS * 3, "keys": [(7, i) for i in range(24)]}
    free = ours(model, stop_ids=[], **many)
    assert free[0].ids[2] not in free[0].ids[:2]
    cut = ours(model, stop_ids=[free[0].ids[2]], max_new_tokens=[2] + [NEW] * 23, **many)
    assert cut[0].ids == free[0].ids[:2] and not cut[0].finished


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_completion_ends_at_the_last_position(kind):
    """A token drawn from the last one needs no position. A longer prompt is refused."""
    model, lm = tiny_pair(kind)
    model.config.max_position_embeddings = lm.config.max_position_embeddings = 12
    found = ours(model, PROMPTS[:5], KEYS[:5], stop_ids=[], temperature=0)
    assert [len(c.ids) for c in found] == [12 - len(prompt) + 1 for prompt in PROMPTS[:5]]
    assert not any(c.finished for c in found)
    with pytest.raises(UserError, match="14 tokens, the model has 12 positions"):
        ours(model)


def rows_per_call(model, **options) -> list[int]:
    """How many tokens each call of the language model had while PROMPTS were completed."""
    rows = []
    hook = lambda m, a, kw: rows.append(kw["input_ids"].numel())  # noqa: E731
    handle = body(model.lm).register_forward_pre_hook(hook, with_kwargs=True)
    try:
        ours(model, temperature=0, **options)
    finally:
        handle.remove()
    return rows


def test_no_work_for_ended_completions(pair, stop_ids):
    """The first call reads the prompts, each distinct one once, without padding. (Ten rows or more shrink in
    steps of a tenth.)"""
    model, _ = pair
    read = sum(LENGTHS) - LENGTHS[4]
    assert rows_per_call(model, stop_ids=[]) == [read] + [8] * (NEW - 1)
    assert rows_per_call(model, stop_ids=range(V)) == [read]
    lengths = [len(c.ids) for c in ours(model, stop_ids=stop_ids, temperature=0)]
    wanted = [sum(n > t for n in lengths) for t in range(1, max(lengths))]
    assert rows_per_call(model, stop_ids=stop_ids) == [read] + wanted


# --- sampled ------------------------------------------------------------------------------------------------


def test_a_completion_does_not_depend_on_others(pair, stop_ids):
    """Batch size, order, company: token by token, with log-probabilities to rounding."""
    model, _ = pair
    options = {"stop_ids": stop_ids, "temperature": 1.5, "top_k": 40, "top_p": 0.97}
    wanted = ours(model, **options, batch_size=1)
    assert len({len(c.ids) for c in wanted}) > 2, "rows leave the batch at different times"
    order = [3, 0, 7, 6, 1, 5, 2, 4]
    runs = {
        "three at a time": ours(model, **options, batch_size=3),
        "all at once": ours(model, **options, batch_size=128),
        "in another order": ours(model, [PROMPTS[i] for i in order], [KEYS[i] for i in order], **options),
        "with strangers": ours(model, PROMPTS + [[9] * 30, [4]], KEYS + [(1,), (2, 2, 2)], **options)[:8],
    }
    runs["in another order"] = [runs["in another order"][order.index(i)] for i in range(8)]
    for name, found in runs.items():
        assert [c.ids for c in found] == [c.ids for c in wanted], name
        assert [c.finished for c in found] == [c.finished for c in wanted], name
        for a, b in zip(found, wanted, strict=True):
            assert a.logps == pytest.approx(b.logps, abs=1e-4), name


def test_a_key_determines_its_completion(pair):
    model, _ = pair
    prompts, keys = [PROMPTS[0]] * 6, [(1, 2), (1, 2), (1, 3), (2, 1), (1, 2, 0, 5), (1, 2)]
    found = [tuple(c.ids) for c in ours(model, prompts, keys, stop_ids=[], temperature=2.0)]
    assert found[0] == found[1] == found[5]
    assert len({found[0], found[2], found[3], found[4]}) == 4


def test_equal_prompts_of_an_evaluation_are_drawn_apart(pair):
    tokenizer = SimpleNamespace(decode=lambda ids, **_: str(ids))
    found = complete(
        Accelerator(cpu=True), pair[0], tokenizer, [PROMPTS[0]] * 8, max_new_tokens=6, temperature=1.0
    )
    assert len({text for _, text, _ in found}) > 4


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_log_probabilities_are_those_in_float64(pair, temperature):
    """Those of the whole distribution, also where top_k and top_p restrict what is drawn."""
    model, lm = pair
    exact = copy.deepcopy(lm).double()
    for options in ({}, {"top_k": 5, "top_p": 0.8}):
        for prompt, c in zip(PROMPTS, ours(model, temperature=temperature, **options), strict=True):
            with torch.no_grad():
                logits = exact(torch.tensor([prompt + c.ids])).logits[0, len(prompt) - 1 : -1]
            wanted = (logits / temperature).log_softmax(-1)[torch.arange(len(c.ids)), torch.tensor(c.ids)]
            torch.testing.assert_close(torch.tensor(c.logps, dtype=torch.float64), wanted, atol=5e-5, rtol=0)


# --- the cache ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("lengths", [[1, 70, 2, 33, 33], [3, 3, 3], [90]])
def test_any_prompt_lengths_and_a_growing_cache(pair, monkeypatch, static, lengths):
    """Several completions to a prompt, which leave together, and one by one; static: as under a CUDA
    graph."""
    model, lm = pair
    monkeypatch.setattr(common.sampling.kv_cache, "FIRST_CAPACITY", 3)
    monkeypatch.setattr(
        common.sampling.generate, "FlatDecoder", functools.partial(FlatDecoder, static=static)
    )
    prompts = [np.random.default_rng(9 + i).integers(2, V, n).tolist() for i, n in enumerate(lengths)]
    stop_ids = [theirs(lm, prompts[-1], [])[5], 3]
    wanted = [theirs(lm, prompt, stop_ids) for prompt in prompts]
    prompts, keys = prompts * 3, [(i,) for i in range(3 * len(prompts))]
    found = ours(model, prompts, keys, stop_ids=stop_ids, temperature=0)
    assert [c.ids for c in found] == wanted * 3
    found = ours(model, prompts, keys, stop_ids=range(0, V, 8), temperature=2.0)
    assert len({len(c.ids) for c in found}) > 1
    assert_as_trained(model, prompts, found, 2.0)


@pytest.mark.parametrize(
    "kind",
    [
        "gemma2",
        "gpt-oss",
        "bloom",
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("falcon", "deepseek-v32")),
    ],
)
def test_unusual_attention_samples_as_transformers_does(kind):
    """Soft-capping and sinks over our cache; where attention cannot be replaced, over transformers' own."""
    if not hasattr(transformers, FAMILIES[kind][0]):
        pytest.skip("transformers does not have it")
    lm = tiny_family(kind, attn_implementation="eager")
    model = wrap(copy.deepcopy(lm))
    assert model.padded == (kind not in ("gemma2", "gpt-oss"))
    stop_ids = [theirs(lm, PROMPTS[0], [])[3]]
    assert_as_transformers(model, lm, PROMPTS, stop_ids)
    assert_same_in_any_batch(model, PROMPTS, KEYS, stop_ids)


FAST, OWN_CACHE = ("qwen3.5", "lfm2", "mamba"), ("minimax", "recurrent-gemma")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in HYBRIDS if n not in OWN_CACHE],
)
def test_hybrids_sample_as_transformers_does(name):
    """Prompts of one token, of unequal lengths, one of them twice; completions of unequal lengths."""
    lm = tiny_family(name)
    model = wrap(copy.deepcopy(lm)).train()
    prompts, keys = (PROMPTS[:5], KEYS[:5]) if name in FAST else (PROMPTS, KEYS)
    stop_ids = [theirs(lm, PROMPTS[0], [])[3]]
    assert_as_transformers(model, lm, prompts, stop_ids, tolerance=2e-4)
    assert model.training and model.config._attn_implementation == "flat" and not model.padded
    assert_same_in_any_batch(model, prompts, keys, stop_ids)


@pytest.mark.parametrize("name", [name for name in ("nemotron-h", "zamba2") if name in HYBRIDS])
def test_time_steps_are_limited_as_in_training(name):
    """transformers forgets it where a layer reads one token after its state: its cache is another model."""
    lm = tiny_family(name)
    for module in lm.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.7, 0.9)
    model = wrap(lm).train()
    assert_as_trained(model, PROMPTS, ours(model), tolerance=2e-4)
    step_after = sys.modules[type(lm).__module__].mamba2_selective_state_update
    assert "partial" not in type(step_after).__name__  # put back


@pytest.mark.parametrize("autocast", [False, True])
def test_in_bfloat16_log_probabilities_are_near(autocast):
    """bfloat16 weights, and float32 weights under autocast, where training goes on in the same context."""
    model, lm = tiny_pair("llama")
    if not autocast:
        model = wrap(lm.bfloat16())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = ours(model, temperature=1.5)
        theirs_ = trainer_logps(model, PROMPTS, found, 1.5)
        difference = torch.cat(
            [torch.tensor(c.logps) - logps for c, logps in zip(found, theirs_, strict=True)]
        ).abs()
        training_pass(model)
    assert difference.mean() < 0.05 and difference.max() < 0.5


def test_growing_rotary_tables_do_not_stop_training():
    """Dynamic NTK scaling makes new frequencies beyond the length that the model knows; sampling makes no
    gradients."""
    torch.manual_seed(0)
    config = tiny_config("llama")
    config.max_position_embeddings = 16
    config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = wrap(transformers.AutoModelForCausalLM.from_config(config)).train()
    ours(model, max_new_tokens=30, stop_ids=[])
    _, gradients = training_pass(model)
    assert all(gradient.isfinite().all() for gradient in gradients)


# --- the model afterwards -----------------------------------------------------------------------------------


def state_of(model) -> dict[str, bool]:
    assert model.config._attn_implementation == "flat" and torch.is_grad_enabled()
    return {name: module.training for name, module in model.named_modules()}


def training_pass(model) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probabilities and gradients as in training, dropout included."""
    torch.manual_seed(0)
    examples = [[{"input_ids": np.array(p), "loss_mask": np.ones(len(p))}] for p in PROMPTS if len(p) > 1]
    logps = model(flat_batch(examples, torch.device("cpu"))).logps
    gradients = torch.autograd.grad(logps.sum(), [p for p in model.parameters() if p.requires_grad])
    return logps.detach(), list(gradients)


@pytest.mark.parametrize(
    ("training", "fails", "recomputed", "dropout"),
    [(1, 0, 0, 1), (1, 1, 0, 1), (0, 0, 0, 1), (1, 0, 1, 1), (1, 0, 1, 0)],
)
def test_sampling_leaves_training_as_it_was(training, fails, recomputed, dropout):
    """Also where it is interrupted in the middle, or activations are recomputed in training, with dropout and
    without."""
    model, _ = tiny_pair("gpt2")
    if recomputed:
        enable_gradient_checkpointing(model)
    if not dropout:
        disable_dropout(model)
    model.train(bool(training))
    before, (logps, gradients), calls = state_of(model), training_pass(model), []

    def at_each_token(module, args, kwargs):
        calls.append((module.training, torch.is_grad_enabled()))
        if fails and len(calls) == 3:
            raise KeyboardInterrupt

    handle = body(model.lm).register_forward_pre_hook(at_each_token, with_kwargs=True)
    with handle, pytest.raises(KeyboardInterrupt) if fails else contextlib.nullcontext():
        ours(model, temperature=1.0, stop_ids=[])
    assert set(calls) == {(False, False)}  # eval mode and no gradients while sampling
    assert state_of(model) == before
    logps_after, gradients_after = training_pass(model)
    assert torch.equal(logps, logps_after) and all(map(torch.equal, gradients, gradients_after))


def test_fewer_at_a_time_where_memory_runs_out(monkeypatch, capsys):
    model, _ = tiny_pair("llama")
    prompts, keys = [[5, 6, 7], [8, 9]] * 5, [(0, i) for i in range(10)]
    whole = sample(model, prompts, keys, stop_ids=[1], max_new_tokens=12)
    read = FlatDecoder.read_prompts

    def limited(self):
        if len(self.owner) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return read(self)

    monkeypatch.setattr(FlatDecoder, "read_prompts", limited)
    parts = sample(model, prompts, keys, stop_ids=[1], max_new_tokens=12)
    assert [completion.ids for completion in parts] == [completion.ids for completion in whole]
    assert capsys.readouterr().out.count("out of memory; again with") == 2  # 5, then 2
