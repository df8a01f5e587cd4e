"""Scores of the reference are computed once, kept on disk, and found again only where nothing they depend on has changed."""

from types import SimpleNamespace

from common.args import CommonArgs
from common.collators import flat_batch
from common.data.encode import Layout
from common.data.examples import Examples, TokenFile
from common.data.sources import Source
from common.extras.lora import add_lora
from common.extras.precomputed import fingerprint
from common.model.load import load_pretrained
from common.model.reference import Reference, load_reference
import numpy as np
import pytest
import torch

from tests.data.rows import alone
from tests.tiny import tiny_pair


@pytest.fixture
def pairs():
    """Five pairs of tiny sequences."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 12, 10)
    ends = np.cumsum(lengths)
    ids = rng.integers(2, 60, ends[-1]).astype(np.uint16)
    mask = (rng.random(ends[-1]) < 0.6).astype(np.uint8)
    fields = {"input_ids": ids, "loss_mask": mask}
    layout = Layout(2, {name: ("token", str(values.dtype)) for name, values in fields.items()}, "")
    file = TokenFile(layout, ends - lengths, ends, np.arange(5), np.full(5, np.nan), fields, {})
    return Examples([file], [Source("pairs")])


def scored(pairs, accelerator, folder, batch_size=2, model=None):
    """The scores of a tiny model, given to the pairs and returned, (10,)."""
    model = model or tiny_pair("llama")[0].eval()
    args = CommonArgs(per_device_eval_batch_size=batch_size, dataset_cache_dir=str(folder))
    Reference(accelerator, model).precompute(args, pairs)
    return np.array([sequence["ref_logps"] for i in range(len(pairs)) for sequence in pairs[i]])


@pytest.fixture
def accelerator():
    return alone()


def test_scores_are_those_of_each_answer_alone(pairs, accelerator, tmp_path):
    found = scored(pairs, accelerator, tmp_path)
    _, lm = tiny_pair("llama")
    lm = lm.double()
    for sequence, score in zip([s for i in range(5) for s in pairs[i]], found, strict=True):
        ids = torch.from_numpy(sequence["input_ids"].astype(np.int64))
        with torch.no_grad():
            logps = lm(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        assert score == pytest.approx(float((logps * torch.from_numpy(sequence["loss_mask"][1:])).sum()), abs=1e-4)


def test_they_are_found_again_by_content(pairs, accelerator, tmp_path, monkeypatch, capsys):
    first = scored(pairs, accelerator, tmp_path)
    assert "reference: scoring" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(Reference, "__call__", lambda *args: pytest.fail("scored again"))
        assert np.array_equal(first, scored(pairs, accelerator, tmp_path, batch_size=3))
        assert "reference: the scores of 5 pairs are in" in capsys.readouterr().out

    def key(change=lambda model: None, precision="no", kind=Reference):
        model, _ = tiny_pair("llama")
        return fingerprint(kind(accelerator, change(model) or model), pairs, precision)

    class Half(Reference):
        def __call__(self, batch, **options):
            out = super().__call__(batch, **options)
            return out._replace(logps=out.logps / 2)

    def other_positions(model):
        model.config.rope_parameters = model.config.rope_parameters | {"rope_theta": 500_000.0}

    def other_weights(model):
        with torch.no_grad():
            next(model.parameters()).view(-1)[0] += 1e-3

    def own_module(model):
        model.extra["value"] = torch.nn.Linear(3, 1)  # a script's own, of which the reference has none

    known = key()
    assert known == key() == key(own_module)  # not where it is, but what it is
    others = [key(precision="bf16"), key(kind=Half), key(other_positions), key(other_weights)]
    others.append(key(lambda model: torch.nn.ModuleList([model, model])))
    file = pairs.files[0]
    for array in (file.fields["input_ids"], file.fields["loss_mask"], file.starts, file.ends):
        array[3] ^= 1
        others.append(key())
        array[3] ^= 1
    assert known not in others


def test_a_reference_drops_its_model(pairs, accelerator, tmp_path):
    model, _ = tiny_pair("llama")
    reference = Reference(accelerator, model.eval())
    batch = flat_batch([pairs[i] for i in range(5)], accelerator.device)
    sums = reference.sums(batch)
    reference.precompute(CommonArgs(dataset_cache_dir=str(tmp_path)), SimpleNamespace(data=pairs))
    assert reference.model is None
    torch.testing.assert_close(reference.sums(flat_batch([pairs[i] for i in range(5)], accelerator.device)), sums)


def test_a_reference_stays_as_it_was(accelerator, tmp_path):
    pytest.importorskip("peft")
    tiny_pair("llama")[1].save_pretrained(tmp_path)
    batch = flat_batch([[{"input_ids": np.arange(2, 12), "loss_mask": np.ones(10)}]], accelerator.device)
    tokenizer = range(61)  # of which only the length is asked
    for use_peft in (False, True):
        args = CommonArgs(model_name_or_path=str(tmp_path), use_peft=use_peft, lora_r=2)
        model = load_pretrained(args, tmp_path)
        if use_peft:
            model = add_lora(args, model)
        reference = load_reference(args, accelerator, model, tokenizer)
        before = model(batch).logps.detach()
        with torch.no_grad():
            for p in model.parameters():
                if p.requires_grad:
                    p.add_(0.1)
        out = reference(batch, temperature=1.0, entropy=True)
        assert torch.equal(out.logps, before) and not out.logps.requires_grad and out.entropy is not None
        assert not torch.equal(model(batch).logps, before)
        assert (reference.model is model) == use_peft
