"""Packs that hold every example once, chunks that hold every token, micro-batches that cost about the
same."""

from itertools import pairwise
import time

from common.data.examples import best_fit, chunk, pack
from common.data.order import Order, Shuffled
from common.data.token_budget import balance
from common.errors import UserError
from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from tests.data.rows import cost, flat, lognormal, make_examples

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


# --- packing ------------------------------------------------------------------------------------------------


def best_fit_naively(lengths, max_length):
    """The free room of each pack: the longest first, each into the fullest pack that has room."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        roomy = [p for p, room in enumerate(rooms) if room >= length]
        if roomy:
            rooms[min(roomy, key=lambda p: rooms[p])] -= length
        else:
            rooms.append(max_length - length)
    return rooms


@given(LENGTHS, st.integers(40, 100))
def test_packs_hold_each_example_once_and_fit(lengths, max_length):
    packs = best_fit(np.array(lengths), max_length)
    assert sorted(flat(packs)) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in chosen) <= max_length for chosen in packs)
    rooms = [max_length - sum(lengths[i] for i in chosen) for chosen in packs]
    assert sorted(rooms) == sorted(best_fit_naively(lengths, max_length))


def test_an_example_over_max_length_has_a_pack_of_its_own():
    assert best_fit(np.array([3, 11, 4]), 10) == [[1], [2, 0]]
    assert best_fit(np.array([10, 10]), 10) == [[0], [1]] and best_fit(np.array([], int), 10) == []


@given(st.lists(LENGTHS, min_size=1, max_size=3), st.sampled_from([1, 10]), st.randoms(use_true_random=False))
def test_sources_do_not_share_a_pack(sources, bands, random):
    counts = [len(source) for source in sources]
    difficulty = [random.randrange(20) for _ in flat(sources)] if bands > 1 else None
    packs = pack(make_examples(sources, difficulty), 50)
    firsts = np.cumsum([0, *counts])
    assert sum(packs.counts) == len(packs)
    at = 0
    for s, count in enumerate(packs.counts):
        inside = sorted(flat([m.tolist() for m in packs.members[at : at + count]]))
        assert inside == list(range(firsts[s], firsts[s + 1]))
        at += count


def test_examples_of_like_difficulty_share_a_pack():
    """And easy packs come first, in the first half of the first epoch."""
    difficulty = np.random.default_rng(0).permutation(1000)
    examples = make_examples([lognormal(1000, most=500)], difficulty)
    train = pack(Shuffled(examples, Order([1000], 0, difficulty=difficulty)), 500)
    packs = train.examples
    for chosen, mean in zip(packs.members, packs.difficulty, strict=True):
        assert len({difficulty[i] // 100 for i in chosen}) == 1
        assert mean == pytest.approx(sum(difficulty[i] for i in chosen) / len(chosen))
    first_half = [packs.difficulty[train.order[position]] for position in range(round(len(train) / 2))]
    for band, later in pairwise(np.array_split(first_half, 10)):
        assert band.max() < later.min()


def test_packs_give_the_sequences_of_their_examples():
    examples = make_examples([lognormal(50, most=60)], pairs=True)
    packs = pack(examples, 100)
    for i in range(len(packs)):
        wanted = [sequence for j in packs.members[i] for sequence in examples[j]]
        for found, sequence in zip(packs[i], wanted, strict=True):
            assert found["input_ids"].tolist() == sequence["input_ids"].tolist()
        assert packs.sizes[i] == sum(len(sequence["input_ids"]) for sequence in packs[i]) <= 100


# --- chunks -------------------------------------------------------------------------------------------------

DOCUMENTS = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=12), min_size=1, max_size=3)


@settings(deadline=None)
@given(DOCUMENTS, st.integers(1, 40), st.booleans(), st.booleans())
def test_cut_documents_are_those_of_a_loop(sources, max_length, across, difficulty):
    wanted, counts, begins = [], [], []
    for s, sizes in enumerate(sources):
        stream, count = list(range(sum(sizes))), 0
        of = [d for d, size in enumerate(sizes) for _ in range(size)]  # the document of each token
        texts = [stream] if across else [[t for t in stream if of[t] == d] for d in range(len(sizes))]
        for text in texts:
            for start in range(0, len(text), max_length):
                piece = text[start : start + max_length]
                if len(piece) > 1:  # one token has nothing to predict
                    wanted.append(piece)
                    begins.append(100 * s + of[piece[0]])
                    count += 1
        counts.append(count)
    documents = [100 * s + d for s, sizes in enumerate(sources) for d in range(len(sizes))]
    cut = chunk(make_examples(sources, documents if difficulty else None, by_place=True), max_length, across)
    assert [cut[i][0]["input_ids"].tolist() for i in range(len(cut))] == wanted and cut.counts == counts
    assert cut.sizes.tolist() == [len(piece) for piece in wanted]
    assert cut.longest == max(map(len, wanted), default=0)
    assert [100 * s + row for s, file in enumerate(cut.files) for row in file.rows.tolist()] == begins
    assert (cut.difficulty is None) == (not difficulty or not begins)
    if difficulty and begins:
        assert cut.difficulty.tolist() == begins


@pytest.mark.parametrize("weights", [None, [1.0, 3.0]])
@pytest.mark.parametrize(
    "total", [37, 61, 64]
)  # with a row of 5 tokens, one of 1, which is left out, and none
def test_every_pass_cuts_a_stream_at_other_places(total, weights):
    """Each row goes on where it begins, as long as in the first pass; each token is in one row of a pass,
    but one where a single one is left; and a position always has the same row."""
    totals, size, cuts = [total, 30], 4, []

    def make():
        documents = make_examples([[total - 10, 10], [30]], by_place=True)
        return chunk(Shuffled(documents, Order(documents.counts, 7, weights=weights)), size)

    train = make()
    for s, tokens in enumerate(totals):
        drawn = [train.order.example_and_pass(position) for position in range(40 * len(train))]
        mine = [
            p for p, (example, _) in enumerate(drawn) if (example >= train.examples.counts[0]) == (s == 1)
        ]
        rows = train.examples.counts[s]
        for number in range(5):
            positions = mine[number * rows : (number + 1) * rows]
            found = [train[position][0]["input_ids"].tolist() for position in positions]
            for position, row in zip(positions, found, strict=True):
                assert drawn[position][1] == number and len(row) == train.size(position)
                assert row == [(row[0] + i) % tokens for i in range(len(row))]
                document = 1 if s == 0 and row[0] >= total - 10 else 0  # in which the row begins
                assert train.where(position).endswith(f" row {document + 1}")
            seen = sorted(flat(found))
            assert len(seen) == len(set(seen)) == tokens - (tokens % size == 1)
            cuts.append(sorted(row[0] % size for row in found))
            if number == 0:
                assert sorted(found) == [
                    list(range(tokens))[at : at + size] for at in range(0, rows * size, size)
                ]
    assert len({tuple(cut) for cut in cuts}) > 4  # of two sources, in five passes each
    again = make()
    for position in (len(train) * 3, 1, len(train) * 2):
        assert again[position][0]["input_ids"].tolist() == train[position][0]["input_ids"].tolist()


# --- micro-batches ------------------------------------------------------------------------------------------


def balance_naively(sizes, parts, max_tokens):
    """As `balance`, by looking at every micro-batch for every example; None: no room."""
    dearest_first = sorted(range(len(sizes)), key=lambda i: -cost(sizes[i]))
    for order, price in ((dearest_first, cost), (range(len(sizes)), lambda n: n)):
        members, totals = [[] for _ in range(parts)], [0.0] * parts
        for i in order:
            limit = max(sizes[i], max_tokens)  # what is longer is alone
            roomy = [k for k in range(parts) if sum(sizes[j] for j in members[k]) + sizes[i] <= limit]
            if not roomy:
                break
            k = min(roomy, key=totals.__getitem__)
            members[k].append(i)
            totals[k] += price(sizes[i])
        else:
            return [sorted(members[k]) for k in sorted(range(parts), key=lambda k: -totals[k])]
    return None


@given(LENGTHS, st.integers(1, 12), st.integers(20, 100))
def test_examples_go_to_the_cheapest_micro_batch(sizes, parts, max_tokens):
    expected = balance_naively(sizes, parts, max_tokens)
    if expected is None:
        with pytest.raises(UserError, match="do not fit"):
            balance(sizes, parts, max_tokens)
    else:
        assert balance(sizes, parts, max_tokens) == expected


def test_a_window_of_1024_processes_is_dealt_quickly():
    """Every process deals out the window of all: looking through all micro-batches for each example took 1.5
    s."""
    sizes = lognormal(12_000).tolist()
    start = time.process_time()
    balance(sizes, 1024, 8192)
    assert time.process_time() - start < 0.5  # 0.02 s


def test_examples_may_fit_only_in_their_order():
    # Largest first: 3 + 2, 3 + 2, and no room for the last 2. In their order, each to the emptiest: 3 + 3, 2
    # + 2 + 2.
    assert sorted(balance([3, 2, 2, 3, 2], 2, 6)) == [[0, 3], [1, 2, 4]]
    # The emptiest is the one with the fewest tokens. By cost the fourth example would join the first and the
    # third, and the last one would have no room.
    sizes = [10_922, 16_384, 8_288, 8_192, 10_922, 8_192]
    assert sorted(balance(sizes, 2, 32_768)) == [[0, 2, 4], [1, 3, 5]]
    with pytest.raises(UserError, match="--max_tokens_per_batch 10: 21 tokens do not fit in 2 micro-batches"):
        balance([7, 7, 7], 2, 10)
