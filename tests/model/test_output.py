"""What a FlatModel gives beside log-probabilities: each field of its Output, against the full logits of each
sequence."""

import copy

from common.collators import flat_batch
from common.model import Output
from common.model.flat_model import base_lm
from common.model.fused_head import HEAD_CHUNK_ELEMENTS, HEAD_CHUNK_ROWS
from common.model.load import enable_gradient_checkpointing
from common.model.wrap import wrap
import numpy as np
import pytest
import torch
from torch import nn

from tests.model.test_model import alone_in_float64, examples
from tests.tiny import tiny_family

CPU = torch.device("cpu")
IN_FLOAT32 = ("mixtral",)  # grouped matrix products know no float64


@pytest.fixture(params=["several chunks", "one chunk"])
def chunks(request, monkeypatch):
    monkeypatch.setitem(HEAD_CHUNK_ELEMENTS, "cpu", 1 if request.param == "several chunks" else 2**30)
    monkeypatch.setitem(HEAD_CHUNK_ROWS, "cpu", 32)
    return request.param


def logits_alone(lm, temperature=1.0):
    """The logits (T, V) that predict each token of the row, from each sequence by itself; those of a first
    token: zeros."""
    found = []
    for example in examples():
        ids = torch.as_tensor(example[0]["input_ids"])[None]
        logits = lm(input_ids=ids, use_cache=False).logits[0, :-1] / temperature
        found.append(torch.cat([torch.zeros(1, logits.shape[1], dtype=logits.dtype), logits]))
    return torch.cat(found)


def assert_same_gradients(one: nn.Module, other: nn.Module, tolerance: float):
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        if q.grad is not None:
            assert (p.grad - q.grad).abs().max() <= tolerance * q.grad.abs().max().clamp(min=1e-5), name


# --- weights in the mask ------------------------------------------------------------------------------------


def test_weights_in_the_mask_count_once():
    """Where a script multiplies loss_mask by weights, they reach the loss and its gradient as they are."""
    lm, rows = tiny_family("llama"), examples()
    model, batch = wrap(copy.deepcopy(lm)), flat_batch(rows, CPU)
    weights = batch["loss_mask"] * torch.rand(174, generator=torch.Generator().manual_seed(0))
    batch["loss_mask"] = weights
    logps = torch.cat([alone_in_float64(lm, example) for example in rows])
    wanted = -(logps * weights).sum()
    wanted.backward()
    for options in ({"nll_weights": weights}, {}):
        model.zero_grad()
        out = model(batch, **options)
        loss = -(out.logps * weights).sum() if out.nll is None else out.nll
        loss.backward()
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
        assert_same_gradients(model.lm, lm, 1e-4)


# --- what is not asked for is None --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({}, set()),
        ({"entropy": True}, {"entropy", "correct"}),
        ({"entropy_grad": True}, {"entropy", "correct"}),
        ({"nll_weights": torch.ones(174)}, {"nll", "entropy", "correct"}),
        ({"nll_weights": torch.ones(174), "entropy_grad": True}, {"nll", "entropy", "correct"}),
        ({"hidden": True}, {"hidden"}),
        ({"map_logits": lambda logits, rows: logits}, {"mapped"}),
        ({"extra": ("value",)}, {"extra"}),
    ],
)
def test_only_what_is_asked_for_is_there(options, given):
    model, batch = wrap(tiny_family("llama")), flat_batch(examples(), CPU)
    model.extra["value"] = nn.Linear(32, 1)
    out = model(batch, **options)
    assert isinstance(out, Output)
    assert {name for name, value in out._asdict().items() if value is not None} == {
        "logps",
        "aux_loss",
    } | given
    assert out.aux_loss == 0.0  # a loss can be added without asking whether there are experts
    assert torch.allclose(out.logps, model(batch).logps, atol=1e-5)
    assert out.logps.shape == (174,)
    assert has_gradient(out.logps) == ("nll_weights" not in options)
    if out.entropy is not None:
        assert (
            has_gradient(out.entropy) == (options == {"entropy_grad": True}) and not out.correct.requires_grad
        )


def has_gradient(values):
    """A backward pass either gives one or is an error, and never goes by in silence."""
    try:
        values.sum().backward(retain_graph=True)
    except RuntimeError as error:
        assert str(error).startswith(
            ("logps: it has a gradient without nll_weights", "entropy: it has a gradient with entropy_grad")
        )
        return False
    return True


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_a_filler_adds_nothing(name):
    """Also fields of one's own, and what the model says: a script need not think of it."""
    rows = [
        [sequence | {"weight": np.ones(len(sequence["input_ids"]), np.float32), "label": 3}]
        for [sequence] in examples()
    ]
    filler = flat_batch(rows, CPU, weight=0.0)
    for field in ("loss_mask", "sequence_mask", "weight", "label"):
        assert not filler[field].any(), field
    model = wrap(tiny_family(name))
    out = model(filler, entropy=True, entropy_grad=True, map_logits=lambda logits, rows: logits.logsumexp(-1))
    for values in (
        out.logps,
        out.entropy,
        out.correct,
        out.mapped,
        model(filler, nll_weights=torch.ones(174)).nll,
    ):
        assert not values.any()
    (out.logps.sum() + out.entropy.sum() + out.mapped.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.lm.parameters())


def test_what_is_not_there_is_refused():
    for options, said in (
        ({"nll_weights": torch.ones(174, requires_grad=True)}, "nll_weights and temperature get no gradient"),
        ({"nll_weights": torch.ones(173)}, r"nll_weights \(173,\): one for each of 174 tokens"),
        ({"nll_weights": torch.ones(1, 174)}, "one for each of 174 tokens"),
        (
            {"temperature": torch.tensor(0.7, requires_grad=True)},
            "nll_weights and temperature get no gradient",
        ),
    ):
        with pytest.raises(ValueError, match=said):
            wrap(tiny_family("llama"))(flat_batch(examples(), CPU), **options)


# --- the logits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "granite", "gemma2", "mixtral", "bloom"])
@pytest.mark.usefixtures("chunks")
def test_mapped_logits_are_the_full_logits(name):
    """Beside a weighted loss; the rows that the function is given are the targets."""
    model, lm, seen = wrap(tiny_family(name)).train(), tiny_family(name), []
    batch = flat_batch(examples(), CPU)
    targets, tokens = batch["targets"], batch["input_ids"][0]
    weights = torch.rand(174, generator=torch.Generator().manual_seed(1))

    def keep(logits, rows):
        seen.append(rows)
        return logits

    full = logits_alone(lm if name in IN_FLOAT32 else lm.double(), temperature=0.7)[targets]
    out = model(batch, temperature=0.7, nll_weights=weights, map_logits=keep)
    mapped, logps = out.mapped, full.log_softmax(-1)
    assert torch.equal(torch.cat(seen), targets)
    torch.testing.assert_close(
        out.entropy[targets].double(), -(logps.exp() * logps).sum(-1).double(), atol=1e-3, rtol=1e-3
    )
    assert torch.equal(out.correct[targets].bool(), logps.argmax(-1) == tokens[targets])
    assert mapped.dtype == torch.float32 and mapped.shape == (len(targets), model.config.vocab_size)
    torch.testing.assert_close(mapped.double(), full.double(), atol=2e-4, rtol=1e-4)
    nll = -(logps.gather(1, tokens[targets, None])[:, 0] * weights[targets]).sum()
    assert out.nll.item() == pytest.approx(nll.item(), rel=1e-5)
    random = torch.randn(full.shape, generator=torch.Generator().manual_seed(1))
    ((mapped * random).sum() + 2 * out.nll).backward()
    ((full * random).sum() + 2 * nll).backward()
    assert_same_gradients(model.lm, lm, 2e-3 if name in IN_FLOAT32 else 5e-4)


# --- a script's own modules ---------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_an_extra_module_is_trained_with_the_model(name, checkpointing):
    model, lm = wrap(tiny_family(name)).train(), tiny_family(name).train()
    torch.manual_seed(3)
    model.extra["value"], value = nn.Linear(32, 1), nn.Linear(32, 1)
    value.load_state_dict(model.extra["value"].state_dict())
    if checkpointing:
        enable_gradient_checkpointing(model)
    out = model(flat_batch(examples(), CPU), extra=("value",))
    ids = [torch.as_tensor(example[0]["input_ids"])[None] for example in examples()]
    alone = torch.cat([value(lm.base_model(input_ids=i, use_cache=False).last_hidden_state[0]) for i in ids])
    torch.testing.assert_close(out.extra["value"], alone, atol=1e-4, rtol=1e-4)
    weights = torch.randn(alone.shape, generator=torch.Generator().manual_seed(1))
    (out.extra["value"] * weights).sum().backward()
    (alone * weights).sum().backward()
    assert_same_gradients(base_lm(model.lm).base_model, lm.base_model, 1e-3)
    assert_same_gradients(model.extra["value"], value, 1e-3)
    assert {"extra.value.weight", "extra.value.bias"} < set(model.state_dict())


@pytest.mark.usefixtures("chunks")
def test_map_logits_draws_the_same_again():
    """A parameter t times noise: the sum and its derivative at t = 1 are the same number."""
    model, batch = wrap(tiny_family("llama")), flat_batch(examples(), CPU)
    t = torch.ones((), requires_grad=True)
    out = model(batch, map_logits=lambda logits, rows: (t * logits * torch.rand_like(logits)).sum(-1))
    total = out.mapped.sum()
    assert torch.autograd.grad(total, t)[0].item() == pytest.approx(total.item(), rel=1e-4)


@pytest.mark.usefixtures("chunks")
def test_map_logits_may_give_any_shape_with_a_row_each():
    model, batch = wrap(tiny_family("llama")), flat_batch(examples(), CPU)
    out = model(batch, map_logits=lambda logits, rows: logits.topk(3)[0][:, None])
    assert out.mapped.shape == (len(batch["targets"]), 1, 3)
    for wrong in (lambda x, r: (x, x), lambda x, r: x.sum(), lambda x, r: x.sum(-1)[None], lambda x, r: None):
        with pytest.raises(
            ValueError, match=r"gave .* for (\d+) rows of logits; expected a tensor \(\1, ...\)"
        ):
            model(batch, map_logits=wrong)
