"""Drawing a token from logits: top_k and top_p, shares of [0, 1) to the last token, and nothing of
probability zero."""

import math
from unittest import mock

import common.sampling.generate
from common.sampling.generate import draw
from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import torch

LOGITS = torch.tensor([0.3, -1.2, 2.0, 0.0, -4.0, 1.1, 0.31, -0.5, 1.9, -2.2])


def naive_support(logits: list[float], temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """What may be drawn, with its probability: the k largest, of those the fewest that together reach
    top_p."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    weight = {i: math.exp((logits[i] - logits[order[0]]) / temperature) for i in order}
    kept = order[:top_k] if top_k else order
    total, reached, support = sum(weight[i] for i in kept), 0.0, {}
    for i in kept:
        if reached >= top_p:
            break
        support[i] = weight[i]
        reached += weight[i] / total
    total = sum(support.values())
    return {i: w / total for i, w in support.items()}


def grid(n: int) -> torch.Tensor:
    """n numbers that fill [0, 1) evenly."""
    return (torch.arange(n) + 0.5) / n


@pytest.fixture(params=["at once", "in two levels"])
def levels(request, monkeypatch):
    """How the vocabulary is gone through, whatever its size."""
    monkeypatch.setattr(common.sampling.generate, "DRAW_AT_ONCE", 10**9 if request.param == "at once" else 0)


@pytest.mark.usefixtures("levels")
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 3, 9, 10, 50])
@pytest.mark.parametrize("top_p", [0.05, 0.3, 0.77, 0.9, 0.995, 1.0])
def test_top_k_and_top_p_against_a_naive_loop(temperature, top_k, top_p):
    n = 10000
    tokens, logps = draw(LOGITS.expand(n, -1), grid(n), temperature, top_k, top_p)
    share = torch.bincount(tokens, minlength=10) / n
    wanted = naive_support(LOGITS.tolist(), temperature, top_k, top_p)
    assert {i for i in range(10) if share[i] > 0} == {i for i, p in wanted.items() if p > 1 / n}
    for i in range(10):
        assert share[i].item() == pytest.approx(wanted.get(i, 0.0), abs=2 / n)
    whole = (LOGITS / temperature).log_softmax(-1)
    torch.testing.assert_close(logps, whole[tokens], atol=1e-5, rtol=0)


EDGES = [0.0, 2**-24, 0.5, 1 - 1e-7, 1 - 2**-24]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([-math.inf, -200.0, -20.0, 0.0, 1.0, 30.0]), min_size=2, max_size=9).filter(
        lambda logits: max(logits) > -math.inf
    ),
    st.sampled_from([0.3, 1.0, 3.0]),
    st.sampled_from([0, 1, 2, 5]),
    st.sampled_from([0.1, 0.9, 1.0]),
)
def test_a_token_of_probability_zero_is_never_drawn(logits, temperature, top_k, top_p):
    largest = max(logits)
    for at_once in (0, 10**9):
        with mock.patch.object(common.sampling.generate, "DRAW_AT_ONCE", at_once):
            tokens, logps = draw(torch.tensor([logits] * 5), torch.tensor(EDGES), temperature, top_k, top_p)
        for token, logp in zip(tokens.tolist(), logps.tolist(), strict=True):
            assert (logits[token] - largest) / temperature > -104  # below that the float32 probability is 0
            assert math.isfinite(logp)


@pytest.mark.usefixtures("levels")
@pytest.mark.parametrize("size", [1, 127, 128, 129, 1000, 150_000])
def test_each_token_is_drawn_at_its_share(size):
    """Each token at the middle of its share of [0, 1), in float64: probabilities of 1e-5 are not lost in
    float32 sums."""
    picked = np.random.default_rng(0).integers(0, size, 60)
    logits = torch.from_numpy(np.random.default_rng(1).uniform(-0.3, 0.3, size)).float()
    p = logits.double().softmax(-1)
    middle = (p.cumsum(-1) - p / 2)[picked]
    tokens, _ = draw(logits.expand(60, -1), middle, 1.0)
    assert tokens.tolist() == picked.tolist()


def test_temperature_0_takes_the_most_probable_token():
    """And so does a top_p of nothing."""
    tokens, logps = draw(torch.stack([LOGITS, -LOGITS]), torch.tensor([0.0, 0.999]), 0)
    assert tokens.tolist() == [2, 4]
    total = [sum(math.exp(s * x) for x in LOGITS.tolist()) for s in (1, -1)]
    assert logps.tolist() == pytest.approx([2.0 - math.log(total[0]), 4.0 - math.log(total[1])], abs=1e-5)
    for top_p in (1e-9, 0.0):
        assert draw(LOGITS.expand(9, -1), grid(9), 1.0, top_p=top_p)[0].tolist() == [2] * 9
