"""The order of training: computed from (seed, position) alone, with exact shares, from easy to hard where
asked."""

from collections import Counter

from common.data.order import BANDS, Order, Shuffled, drop_turns, shares, shorten
from common.data.types import all_trained
from common.errors import UserError
from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

COUNTS = st.lists(st.integers(1, 60), min_size=1, max_size=4)
WEIGHTS = st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.5]), min_size=4, max_size=4)


def source_of(index, counts):
    return next(s for s in range(len(counts)) if index < sum(counts[: s + 1]))


def epoch_of(order, epoch):
    return [order[position] for position in range(epoch * len(order), (epoch + 1) * len(order))]


def by_source(order, counts, epochs):
    """For each source, its examples in the order in which they come."""
    drawn = [[] for _ in counts]
    for epoch in range(epochs):
        for index in epoch_of(order, epoch):
            drawn[source_of(index, counts)].append(index)
    return drawn


def weighted(counts, weights, seed=0):
    """An order, or None where a source would get nothing."""
    try:
        order = Order(counts, seed, weights=weights[: len(counts)])
        return order if order.quotas else None
    except UserError:
        return None


# --- without weights ----------------------------------------------------------------------------------------


@given(COUNTS, st.integers(0, 99), st.integers(0, 3))
def test_each_epoch_is_a_permutation_of_all_examples(counts, seed, epoch):
    N, order = sum(counts), Order(counts, seed)
    found = [order[epoch * N + i] for i in range(N)]
    assert found == epoch_of(order, epoch) and sorted(found) == list(range(N)) and len(order) == N


def test_orders_are_those_recorded():
    """Each epoch and seed has its own; another order would change every run."""
    orders = [[epoch_of(Order([8], seed), epoch) for epoch in range(2)] for seed in range(2)]
    first = [[2, 4, 3, 6, 5, 0, 1, 7], [1, 3, 7, 6, 0, 4, 2, 5]]
    assert orders == [first, [[5, 0, 1, 4, 2, 6, 3, 7], [6, 1, 4, 0, 3, 2, 5, 7]]]


# --- with weights -------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(COUNTS, WEIGHTS, st.integers(0, 9))
def test_any_part_of_an_epoch_has_the_shares(counts, weights, seed):
    order, N, S = weighted(counts, weights, seed), sum(counts), len(counts)
    if order is None:
        return
    found = [0] * S
    for p, index in enumerate(epoch_of(order, 0), 1):
        found[source_of(index, counts)] += 1
        for s, quota in enumerate(order.quotas):
            assert abs(found[s] - p * quota / N) <= 1 + max(0, S - 2) * quota / N + 1e-9


@settings(max_examples=60, deadline=None)
@given(COUNTS, WEIGHTS, st.integers(1, 5))
def test_a_source_is_used_up_before_it_repeats(counts, weights, epochs):
    """Small sources repeat evenly, large ones go on where the last epoch ended."""
    order = weighted(counts, weights)
    if order is None:
        return
    for s, drawn in enumerate(by_source(order, counts, epochs)):
        first, N = sum(counts[:s]), counts[s]
        for start in range(0, len(drawn), N):
            part = drawn[start : start + N]
            assert len(set(part)) == len(part) and set(part) <= set(range(first, first + N))
        times = Counter(drawn)
        assert (
            max(times[i] for i in range(first, first + N)) - min(times[i] for i in range(first, first + N))
            <= 1
        )


def test_every_pass_and_epoch_is_drawn_anew():
    order = Order([100, 20], 0, weights=[1, 1])
    drawn = by_source(order, [100, 20], 2)
    assert len(drawn[0]) == len(drawn[1]) == 120
    assert len({tuple(drawn[1][i : i + 20]) for i in range(0, 120, 20)}) == 6
    where = [[source_of(i, [100, 20]) for i in epoch_of(order, epoch)] for epoch in (0, 1)]
    assert where[0] != where[1]
    alike = by_source(Order([20, 20], 0, weights=[1, 1]), [20, 20], 1)
    assert [i + 20 for i in alike[0]] != alike[1]


@settings(max_examples=40, deadline=None)
@given(COUNTS, WEIGHTS, st.booleans(), st.lists(st.integers(0, 500), min_size=1, max_size=30))
def test_a_position_always_gives_the_same_example(counts, weights, use_weights, positions):
    options = {"weights": weights[: len(counts)]} if use_weights else {}
    options |= {"difficulty": np.arange(sum(counts)) % 7}
    try:
        order = Order(counts, 5, **options)
        order[0]
    except UserError:
        return
    in_any_order = [order[p] for p in positions]
    assert in_any_order == [Order(counts, 5, **options)[p] for p in positions]
    assert all(isinstance(i, int) and 0 <= i < sum(counts) for i in in_any_order)


def test_shares_by_hand():
    assert shares([1, 1, 1], 10) == [4, 3, 3]
    assert shares([0.5, 0.3, 0.2], 10) == [5, 3, 2]
    assert shares([5, 3, 1], 4) == [2, 1, 1]  # 2.22, 1.33, 0.44
    assert sum(shares([0.1] * 7, 1000)) == 1000
    order = Order([5, 3, 8], 0, weights=[5, 3, 1])
    # 8.9, 5.3, 1.8
    assert Counter(source_of(i, [5, 3, 8]) for i in epoch_of(order, 1)) == {0: 9, 1: 5, 2: 2}


def test_a_source_without_a_share_is_refused():
    with pytest.raises(UserError, match="--dataset_weights: of 10 examples, source 2 would give none"):
        Order([5, 5], 0, weights=[100, 1])[0]


@pytest.mark.parametrize("counts, weights", [([], None), ([0, 0], None), ([0, 5], [1, 1])])
def test_no_examples_is_an_error(counts, weights):
    with pytest.raises(UserError, match=f"nothing to train on: .* source: *{', '.join(map(str, counts))}$"):
        Order(counts, 0, weights=weights)
    assert sorted(epoch_of(Order([0, 5], 0), 0)) == [0, 1, 2, 3, 4]


# --- curriculum ---------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(0, 9), st.integers(1, 50))
def test_a_curriculum_rises_band_by_band(N, seed, kinds):
    difficulty = np.random.default_rng(seed).integers(0, kinds, N).astype(float)
    order = Order([N], seed, difficulty=difficulty)
    assert sorted(epoch_of(order, 0)) == list(range(N))
    n = round(N / 2)
    bands = np.array_split(epoch_of(order, 0)[:n], BANDS)
    highest = -1.0
    for band in bands:
        if len(band):
            assert difficulty[band].min() >= highest
            highest = difficulty[band].max()
    plain = Order([N], seed)
    # a random part of the examples, not the easy ones
    assert set(epoch_of(order, 0)[:n]) == set(epoch_of(plain, 0)[:n])
    assert epoch_of(order, 0)[n:] == epoch_of(plain, 0)[n:] and epoch_of(order, 1) == epoch_of(plain, 1)
    if kinds == 1 and N > 100:
        assert all(sorted(band) != band.tolist() for band in bands)  # shuffled inside


def test_a_curriculum_keeps_the_weights():
    order = Order([90, 10], 0, weights=[1, 1], difficulty=np.arange(100.0))
    assert Counter(source_of(i, [90, 10]) for i in epoch_of(order, 0)) == {0: 50, 1: 50}


# --- training data ------------------------------------------------------------------------------------------


def chat(*trained):
    """A sequence of turns of 3 tokens, trained where told."""
    mask = np.repeat(np.array(trained, np.uint8), 3)
    return {"input_ids": np.arange(len(mask)), "loss_mask": mask, "weight": 2.0}


class Chats:
    def __init__(self, examples):
        self.examples, self.sources = examples, []
        self.sizes = np.array([sum(len(s["input_ids"]) for s in u) for u in examples])

    def __getitem__(self, i):
        return self.examples[i]

    def chats(self, i):
        return [self.examples[i]]

    def in_pass(self, number, seed):
        return self


def lengths(shuffled, positions):
    return [len(sequence["input_ids"]) for p in positions for sequence in shuffled[p]]


def test_training_data_are_the_examples_in_their_order():
    examples = [[all_trained(np.arange(i + 2))] for i in range(7)]
    shuffled = Shuffled(Chats(examples), Order([7], 3))
    assert [shuffled[p] for p in range(20)] == [examples[shuffled.order[p]] for p in range(20)]
    assert [shuffled.size(p) for p in range(20)] == lengths(shuffled, range(20)) and len(shuffled) == 7


def test_chats_end_early_with_the_given_probability():
    sequence = chat(0, 1, 0, 1, 1, 0, 1, 0)  # answers end at 6, 15, 21; something untrained follows
    ends = Counter()
    for i in range(4000):
        (found,) = shorten([sequence], 0.3, np.random.default_rng(i))
        n = len(found["input_ids"])
        ends[n] += 1
        assert (
            found["weight"] == 2.0
            and (found["input_ids"] == np.arange(n)).all()
            and len(found["loss_mask"]) == n
        )
        assert found["loss_mask"].tolist() == sequence["loss_mask"].tolist()[:n]
    assert set(ends) == {6, 15, 24}
    # Standard deviations: 29 chats are dropped more or less, 22 at each border.
    assert abs(ends[24] - 2800) < 150 and abs(ends[6] - 600) < 120 and abs(ends[15] - 600) < 120


def test_only_an_earlier_answer_may_be_the_last():
    for trained in ((1,), (0, 1), (0, 1, 0), (1, 0), (0, 0), (0, 1, 1)):  # one answer
        whole_chat = [chat(*trained)]
        assert all(shorten(whole_chat, 1.0, np.random.default_rng(i)) is whole_chat for i in range(20))
    for trained in ((1, 0, 1), (0, 1, 0, 1), (0, 1, 0, 0, 1, 0)):  # two
        first = 3 * trained.index(1) + 3
        assert {
            len(shorten([chat(*trained)], 1.0, np.random.default_rng(i))[0]["loss_mask"]) for i in range(20)
        } == {first}


def test_a_chat_of_several_contexts_ends_after_an_earlier_answer():
    """Two answers in the first sequence, one in each of two more: it ends after one of the first three."""
    contexts = [chat(0, 1, 0, 1), chat(0, 0, 0, 1), chat(0, 0, 0, 0, 0, 1)]
    found = Counter()
    for i in range(300):
        short = shorten(contexts, 1.0, np.random.default_rng(i))
        found[tuple(len(sequence["input_ids"]) for sequence in short)] += 1
    assert set(found) == {(6,), (12,), (12, 12)} and min(found.values()) > 60


def test_dropped_turns_depend_on_seed_epoch_example():
    def shuffled(seed=0):
        return drop_turns(
            Shuffled(Chats([[chat(0, 1, 0, 1, 0, 1)] for _ in range(60)]), Order([60], seed)), 0.5
        )

    def by_example(train, epoch):
        positions = range(60 * epoch, 60 * epoch + 60)
        return {train.order[p]: n for p, n in zip(positions, lengths(train, positions), strict=True)}

    once = shuffled()
    assert [by_example(once, epoch) for epoch in (2, 0, 1)] == [
        by_example(shuffled(), epoch) for epoch in (2, 0, 1)
    ]
    assert by_example(once, 0) != by_example(once, 1) and by_example(once, 0) != by_example(shuffled(1), 0)
    # before turns are dropped: what micro-batches are planned with
    assert {shuffled().size(p) for p in range(60)} == {18}
