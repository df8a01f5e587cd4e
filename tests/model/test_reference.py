"""Scores of the reference are computed once, kept on disk, and found again only where nothing they depend on has changed."""

import shutil

from common.model.reference import fingerprint, precompute
from tests.conftest import train_metrics
from tests.run.test_health import STAGES
from tests.tiny import tiny_pair

import numpy as np
import pytest
import torch
from accelerate import Accelerator

WORDS = [*STAGES["dpo"], "--max_train_samples", "24", "--max_steps", "2", "--save_steps", "0", "--precompute_ref_log_probs"]


@pytest.fixture
def pairs():
    """Five pairs of tiny sequences as Units."""
    from common.data.examples import TokenFile, Units
    from common.data.sources import Source

    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 12, 10)
    ends = np.cumsum(lengths)
    ids = rng.integers(2, 60, ends[-1]).astype(np.uint16)
    mask = (rng.random(ends[-1]) < 0.6).astype(np.uint8)
    file = TokenFile(ids, mask, ends - lengths, ends, 2, np.arange(5), np.zeros(5), {})
    return Units([file], [Source.__new__(Source)])


@pytest.fixture
def accelerator():
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return Accelerator(cpu=True)


def test_scores_are_those_of_each_answer_alone(pairs, accelerator, tmp_path):
    model, lm = tiny_pair("llama")
    with torch.no_grad():
        precompute(accelerator, model.eval(), model, pairs, 2, str(tmp_path))
        lm = lm.double()
        for i in range(5):
            for sequence in pairs[i]:
                ids = torch.from_numpy(sequence["input_ids"].astype(np.int64))
                logps = lm(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
                alone = float((logps * torch.from_numpy(sequence["loss_mask"][1:])).sum())
                assert float(sequence["ref_logps"]) == pytest.approx(alone, abs=1e-4)


def test_they_are_found_again_by_content(pairs, accelerator, tmp_path):
    model, _ = tiny_pair("llama")
    with torch.no_grad():
        precompute(accelerator, model.eval(), model, pairs, 2, str(tmp_path))
    first = np.concatenate(pairs.fields.pop("ref_logps"))
    precompute(accelerator, lambda batch: pytest.fail("scored again"), model, pairs, 3, str(tmp_path))
    assert np.array_equal(first, np.concatenate(pairs.fields["ref_logps"]))
    known = fingerprint(model, pairs, "no")
    assert known == fingerprint(tiny_pair("llama")[0], pairs, "no")  # not where it is, but what it is
    assert known != fingerprint(model, pairs, "bf16")
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1e-3
    assert known != fingerprint(model, pairs, "no")
    model, _ = tiny_pair("llama")
    for name in ("ids", "mask", "starts", "ends"):
        array = getattr(pairs.files[0], name)
        array[3] ^= 1
        assert known != fingerprint(model, pairs, "no"), name
        array[3] ^= 1


def test_a_second_run_takes_them_from_the_disk_and_learns_the_same(launch, token_cache, capsys):
    first = train_metrics(launch("dpo", *WORDS, output="first"))
    assert "reference: scoring" in capsys.readouterr().out
    second = train_metrics(launch("dpo", *WORDS, output="second"))
    said = capsys.readouterr().out
    assert "reference: the scores of 24 pairs are in" in said and "scoring" not in said
    assert first == second
    for path in token_cache.glob("ref_logps-*"):
        shutil.os.remove(path)
    online = train_metrics(launch("dpo", *WORDS, "false", output="online"))
    for one, other in zip(first, online, strict=True):
        del one["rewards/accuracies"], other["rewards/accuracies"]  # at first both rewards are 0, up to rounding
        assert one == pytest.approx(other, rel=1e-5, abs=1e-5)
