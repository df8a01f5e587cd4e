"""The reference is the model as it was, and its scores are those of each answer alone."""

from types import SimpleNamespace

from common.args import CommonArgs
from common.collators import flat_batch
from common.data.examples import Examples
from common.data.sources import Source
from common.model.load import load_pretrained
from common.model.lora import add_lora
from common.model.reference import Reference, load_reference, score
import numpy as np
import pytest
import torch

from tests.data.rows import alone, token_file
from tests.tiny import tiny_pair


@pytest.fixture
def pairs():
    """Five pairs of tiny sequences."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 12, 10)
    ids = rng.integers(2, 60, sum(lengths)).astype(np.uint16)
    mask = (rng.random(sum(lengths)) < 0.6).astype(np.uint8)
    file = token_file(lengths, {"input_ids": ids, "loss_mask": mask}, each=2)
    return Examples([file], [Source("pairs")])


@pytest.fixture
def accelerator():
    return alone()


def test_scores_are_those_of_each_answer_alone(pairs, accelerator):
    model, lm = tiny_pair("llama")
    Reference(accelerator, model.eval()).precompute(CommonArgs(per_device_eval_batch_size=2), pairs)
    lm = lm.double()
    for sequence in [s for i in range(5) for s in pairs[i]]:
        ids = torch.from_numpy(sequence["input_ids"].astype(np.int64))
        with torch.no_grad():
            logps = lm(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        assert sequence["ref_logps"] == pytest.approx(
            float((logps * torch.from_numpy(sequence["loss_mask"][1:])).sum()), abs=1e-4
        )


def test_examples_may_differ_in_their_sequences(accelerator):
    """Each sequence gets its own score, also where a script's `encode` gives one, two or three of them."""
    lengths = [5, 9, 4, 7, 6, 8]
    fields = {"input_ids": np.arange(39, dtype=np.uint16) % 50 + 2, "loss_mask": np.ones(39, np.uint8)}
    examples = Examples([token_file(lengths, fields, each=2)], [Source("pairs")])
    file = examples.files[0]
    examples = Examples([file._replace(counts=np.array([1, 3, 2]))], [Source("mixed")])
    model, _ = tiny_pair("llama")
    reference = Reference(accelerator, model.eval())
    found = score(CommonArgs(per_device_eval_batch_size=1), reference, examples)
    alone_sums = []
    for i in range(3):
        for sequence in examples[i]:
            batch = flat_batch([[sequence]], accelerator.device)
            alone_sums.append(reference.sums(batch).item())
    assert found.tolist() == pytest.approx(alone_sums, abs=1e-4)


def test_a_reference_drops_its_model(pairs, accelerator):
    model, _ = tiny_pair("llama")
    reference = Reference(accelerator, model.eval())
    batch = flat_batch([pairs[i] for i in range(5)], accelerator.device)
    sums = reference.sums(batch)
    reference.precompute(CommonArgs(), SimpleNamespace(data=pairs))
    assert reference.model is None
    torch.testing.assert_close(
        reference.sums(flat_batch([pairs[i] for i in range(5)], accelerator.device)), sums
    )


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
