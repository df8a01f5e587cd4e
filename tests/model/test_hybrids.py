"""Flat rows of models whose layers carry a state along a sequence: the numbers of each sequence alone."""

import copy

from common.args import CommonArgs
from common.collators import flat_batch, split_row
from common.model.flat_model import base_lm
from common.model.lm_head import logits_of
from common.model.load import enable_gradient_checkpointing
from common.model.lora import add_lora
from common.model.wrap import wrap
import pytest
import torch

from tests.tiny import HYBRIDS, V, sequence, tiny_family, tokens

CPU = torch.device("cpu")
FAST = ("qwen3.5", "lfm2")
FAMILIES = [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in HYBRIDS]


# Answers to one prompt, whose tokens the row has once, between sequences of other lengths.
ROW = [
    *([sequence(tokens(12, 0), [2 + i, *tokens(n, i)])] for i, n in enumerate([5, 0, 9, 3])),
    [sequence(tokens(30, 7), tokens(40, 8))],
    [sequence(tokens(2, 9), tokens(1, 9))],
    [sequence(tokens(30, 10), tokens(12, 8))],
]
OTHER_ROW = [[sequence(tokens(20, 11), tokens(9, 12))], [sequence(tokens(3, 13), tokens(7, 14))]]


def alone(lm, weights):
    """Logits of every sequence by itself, by the untouched model, and the gradients of their sum with these
    weights."""
    sequences = [torch.as_tensor(s["input_ids"])[None] for example in ROW for s in example]
    logits = torch.cat([lm(input_ids=ids, use_cache=False).logits[0] for ids in sequences])
    return logits, gradients(lm, logits, weights)


def gradients(lm, logits, weights):
    return torch.autograd.grad((logits * weights).sum(), list(lm.parameters()), allow_unused=True)


def flat_logits(model, batch):
    return torch.cat(split_row(logits_of(base_lm(model.lm), model.hidden(batch)), batch))


def assert_near(found, wanted, tolerance):
    """Of numbers that are sums of others: relative to the largest."""
    found, wanted = ([x if x is None else x.detach() for x in numbers] for numbers in (found, wanted))
    largest = max(float(w.abs().max()) for w in wanted if w is not None)
    for f, w in zip(found, wanted, strict=True):
        if w is not None:
            assert f is None or (f - w).abs().max() <= tolerance * max(float(w.abs().max()), 1e-2 * largest)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_flat_row_equals_each_sequence_alone(name):
    lm = tiny_family(name)
    model = wrap(copy.deepcopy(lm))
    assert not model.padded and model.hybrid.mixers
    batch = flat_batch(ROW, CPU)
    assert batch["token_map"] is not None
    weights = torch.randn(sum(batch["lengths"]), V, generator=torch.Generator().manual_seed(1))
    wanted, wanted_gradients = alone(lm, weights)
    logits = flat_logits(model, batch)
    # float32, in sums of other orders: a delta rule multiplies what is rounded by up to 64 matrices
    assert_near([logits], [wanted], 1e-4)
    assert_near(gradients(model.lm, logits, weights), wanted_gradients, 2e-3)


@pytest.mark.parametrize("name", [name for name in ("qwen3.5", "mamba") if name in HYBRIDS])
def test_what_is_recomputed_belongs_to_its_own_row(name):
    """Between the two passes the model is called on another row, as a reference or another micro-batch
    does."""
    found = []
    for recomputed in (False, True):
        model = wrap(tiny_family(name)).train()
        if recomputed:
            enable_gradient_checkpointing(model)
        loss = model(flat_batch(ROW, CPU)).logps.sum()
        with torch.no_grad():
            model(flat_batch(OTHER_ROW, CPU))
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert_near(*found, 1e-4)


def test_adapters_see_the_same_batches():
    pytest.importorskip("peft")
    batch = flat_batch(ROW, CPU)
    model = wrap(tiny_family("lfm2")).train()
    wanted = model(batch).logps.detach()
    model = add_lora(CommonArgs(lora_r=2), model)
    torch.testing.assert_close(model(batch).logps.detach(), wanted, atol=1e-4, rtol=1e-4)


def test_sharded_mixers_are_called_once(monkeypatch):
    """ZeRO-3 gathers weights call by call."""
    model = wrap(tiny_family("lfm2"))
    mixer, sizes = model.hybrid.mixers[0], []
    mixer.in_proj.register_forward_pre_hook(lambda module, args: sizes.append(tuple(args[0].shape[:2])))
    batch = flat_batch(ROW, CPU)
    with torch.no_grad():
        several = model.hidden(batch)
        assert len(sizes) > 2 and sizes[0] == (1, 70)
        sizes.clear()
        mixer.in_proj.weight.ds_id = 0
        torch.testing.assert_close(model.hidden(batch), several, atol=1e-4, rtol=1e-4)
    assert sizes == [(7, 70)]
