"""Batches: windows that deal them out to any number of processes, flat rows."""

import itertools
import math

from common.args import CommonArgs
from common.collators import Window, Windows, eval_batches, flat_batch, sizes_in_row, split_evenly, split_row
from common.data import sharing
from common.data.encode import check_sequence
from common.data.order import Order, Shuffled
from common.data.types import all_trained
from common.errors import UserError
from common.losses import segment_sum
from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
import torch

from tests.data.rows import flat, lognormal, make_examples, process

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)
FEW = st.integers(1, 4)


def settings_of(batch_size=1, num_epochs=1.0, max_steps=-1):
    return CommonArgs(
        per_device_train_batch_size=batch_size, num_train_epochs=num_epochs, max_steps=max_steps
    )


def windows(lengths, rank=0, world=1, accumulation=1, batch_size=1, seed=0, max_tokens=0, **length):
    train = Shuffled(make_examples([lengths]), Order([len(lengths)], seed))
    args = settings_of(batch_size, **length)
    return Windows(args, process(rank, world, accumulation), train, max_tokens=max_tokens)


def members(batch):
    """The examples of a micro-batch, none for a filler."""
    if not batch["sequence_mask"].any():
        assert not batch["loss_mask"].any() and not batch["sequence_mask"].any()
        return []
    assert batch["sequence_mask"].all()
    return [int(part[0]) for part in batch["input_ids"][0].split(batch["lengths"])]


def of_all_processes(step, lengths, world, accumulation, **options):
    """micro-batches[process][i]: the examples in it."""
    everyone = [windows(lengths, rank, world, accumulation, **options)[step] for rank in range(world)]
    return [[members(batch) for batch in window] for window in everyone]


def numbers(window):
    return [int(example[0]["input_ids"][0]) for example in window.examples]


# --- windows of examples ------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), FEW, FEW, FEW, st.sampled_from([0.5, 1.0, 2.3]))
def test_each_example_comes_once_on_any_processes(N, world, accumulation, batch_size, epochs):
    lengths, found = [3] * N, []
    options = {"batch_size": batch_size, "num_epochs": epochs}
    steps = len(windows(lengths, 0, world, accumulation, **options))
    assert steps == math.ceil(max(1, round(epochs * N)) / (world * accumulation * batch_size))
    for step in range(steps):
        parts = of_all_processes(step, lengths, world, accumulation, **options)
        assert all(len(mine) == accumulation and len(batch) <= batch_size for mine in parts for batch in mine)
        # micro-batch i of process r has the examples after those of the processes before it
        found += flat([[mine[i] for mine in parts] for i in range(accumulation)])
    order = Order([N], 0)
    assert found == [order[p] for p in range(max(1, round(epochs * N)))]


def test_a_field_of_whole_numbers_arrives_as_it_is():
    """A row's id of 63 bits is no float64."""
    number = 2**53 + 1
    example = [all_trained(np.arange(3)) | {"row": np.int64(number)}]
    assert flat_batch([example], torch.device("cpu"))["row"].tolist() == [number]
    filler = flat_batch([example], torch.device("cpu"), weight=0.0)
    assert filler["row"].tolist() == [0] and filler["loss_mask"].tolist() == [0, 0, 0]


def test_denominators_are_those_of_all_processes():
    examples = make_examples([[4, 6, 3, 5, 9]], pairs=True)  # as 2 + 2, 3 + 3, 1 + 2, 2 + 3, 4 + 5
    train = Shuffled(examples, Order([5], 0))
    for rank in range(2):
        window = Windows(settings_of(), process(rank, 2, 3), train)[0]
        assert window.num_sequences == 10 and window.num_tokens == 27
        assert window.total("loss_mask") == 17  # the first token of a sequence is no target
        assert window.total("loss_mask", sequences=slice(0, None, 2)) == 7
        assert [members(batch) for batch in window][2] == ([[train.order[4]] * 2, []][rank])


@pytest.mark.parametrize("most", [pytest.param(1, marks=pytest.mark.slow), 2, 5])
def test_fields_out_of_memory_are_computed_in_parts(most):
    examples = [[all_trained(np.arange(n) + 100 * n)] for n in (4, 6, 3, 9, 5)]
    accelerator = process()
    accelerator.distributed_type = None
    window, sizes = Window(accelerator, examples, [[0, 1, 2], [3, 4]]), []

    def twice(batch):
        if len(batch["lengths"]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        sizes.append(len(batch["lengths"]))
        return 2.0 * batch["input_ids"][0]

    window.add_fields(lambda batch: {"twice": twice(batch)})
    assert max(sizes) <= most and sum(sizes) == 5
    window.add_fields(lambda batch: {"again": twice(batch), "half": batch["input_ids"][0] / 2})
    assert sum(sizes) == 10  # both in one pass
    for [sequence] in examples:
        assert (sequence["twice"] == 2 * sequence["input_ids"]).all()
        assert (sequence["again"] == sequence["twice"]).all() and (
            4 * sequence["half"] == sequence["twice"]
        ).all()
    with pytest.raises(torch.OutOfMemoryError):
        most = 0
        window.add_fields(lambda batch: {"again": twice(batch) if most else twice({"lengths": [1] * 9})})


# --- windows of tokens --------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(10, 150), FEW, FEW, st.sampled_from([1.0, 1.7]))
def test_token_windows_hold_each_example_within_budget(lengths, budget, world, accumulation, epochs):
    options = {"max_tokens": budget, "num_epochs": epochs}
    once, order, found = windows(lengths, 0, world, accumulation, **options), Order([len(lengths)], 0), []
    for step in range(len(once)):
        parts = of_all_processes(step, lengths, world, accumulation, **options)
        assert all(len(mine) == accumulation for mine in parts)
        for batch in itertools.chain.from_iterable(parts):  # what is longer than the budget is alone
            assert sum(lengths[i] for i in batch) <= budget or len(batch) == 1
        assert sorted(flat(parts)) == sorted(numbers(once[step]))
        found += numbers(once[step])
    assert found == [order[p] for p in range(round(epochs * len(lengths)))]


@pytest.mark.parametrize("world, accumulation", [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_token_windows_do_not_depend_on_processes(world, accumulation):
    lengths = lognormal(400)
    wanted, found = (windows(lengths, 0, w, a, max_tokens=8000) for w, a in ((1, 8), (world, accumulation)))
    assert len(found) == len(wanted) > 2
    assert [numbers(found[s]) for s in range(len(found))] == [numbers(wanted[s]) for s in range(len(found))]


def test_a_budget_is_used_up_and_not_exceeded():
    assert len(windows([5, 5], max_tokens=10)) == 1 and len(windows([6, 5], max_tokens=10)) == 2
    lengths = [3, 11, 4, 25, 2]
    run = windows(lengths, max_tokens=10)
    batches = []  # the lengths in each: a chat in several contexts may exceed the budget, and is alone then
    for step in range(len(run)):
        ((batch,),) = of_all_processes(step, lengths, 1, 1, max_tokens=10)
        batches.append([lengths[i] for i in batch])
    assert [11] in batches and [25] in batches and sorted(flat(batches)) == sorted(lengths)
    assert run.plan()["largest_micro_batch"] == [25]


# --- windows of both kinds ----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"batch_size": 3}, {"max_tokens": 2000}])
@pytest.mark.parametrize("run", [{"num_epochs": 2.5}, {"max_steps": 17}])
def test_a_window_is_a_function_of_its_step(options, run):
    lengths = lognormal(60, most=1500)
    once = windows(lengths, 1, 2, 2, **options, **run)
    assert len(once) == run.get("max_steps", len(once))
    one_after_the_other = [[members(batch) for batch in once[step]] for step in range(len(once))]
    for step in np.random.default_rng(0).permutation(len(once)).tolist():
        fresh = windows(lengths, 1, 2, 2, **options, **run)
        assert [members(batch) for batch in fresh[step]] == [members(batch) for batch in once[step]]
        assert [members(batch) for batch in fresh[step]] == one_after_the_other[step]
    assert once.state(3) == {}  # nothing to remember: the order is computed


def test_the_plan_of_a_run():
    found = windows([2, 3, 4, 5, 6, 7, 8], 0, 2, 1, batch_size=2, num_epochs=2)
    order = [found.train.size(p) for p in range(14)]
    plan = {"steps": 4, "examples_per_step": 4, "tokens_per_step": round(70 / 4), "steps_per_epoch": 1.75}
    assert found.plan() == plan | {
        "largest_micro_batch": max((order[i : i + 2] for i in range(0, 14, 2)), key=sum)
    }
    assert windows([3] * 120, batch_size=2).plan()["tokens_per_step"] == 6  # judging by the first of 60 steps
    lengths = lognormal(300)
    found = windows(lengths, 0, 2, 2, max_tokens=8000, num_epochs=1)
    plan, steps = found.plan(), len(found)
    batches = [batch for step in range(steps) for batch in flat_parts(step, lengths)]
    assert plan["steps"] == steps and plan["examples_per_step"] == round(300 / steps, 1)
    assert plan["steps_per_epoch"] == pytest.approx(steps, abs=0.01)
    assert plan["tokens_per_step"] == round(lengths.sum() / steps)
    assert sum(plan["largest_micro_batch"]) == max(sum(lengths[i] for i in batch) for batch in batches)


def flat_parts(step, lengths):
    return [b for mine in of_all_processes(step, lengths, 2, 2, max_tokens=8000, num_epochs=1) for b in mine]


# --- evaluation ---------------------------------------------------------------------------------------------


@given(st.integers(0, 30), FEW, FEW)
def test_evaluation_sees_each_example_once(N, world, batch_size):
    examples = [[all_trained(np.full(3, i))] for i in range(N)]
    parts = [
        [members(batch) for batch in eval_batches(examples, process(rank, world), batch_size)]
        for rank in range(world)
    ]
    assert sorted(flat(parts)) == list(range(N)) and len({len(mine) for mine in parts}) == 1
    assert all(len(batch) <= batch_size for mine in parts for batch in mine)


# --- flat rows ----------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=200)
@given(st.randoms(use_true_random=False))
def test_a_flat_row_is_that_of_a_loop(random):
    """Over sequences and their tokens; a start that neighbours share stands in it once, if it is long
    enough."""
    least = random.choice([1, 2, 4, 99])
    sequences = []
    for _ in range(random.randrange(1, 8)):
        n = random.randrange(1, 12)
        ids = [random.randrange(2) for _ in range(n)] if random.random() < 0.3 else [7] * n
        mask = [int(t >= n * random.random() * 1.5) for t in range(n)]
        field = [random.choice([0.0, 0.0, 0.0, 1.0, random.random()]) for _ in range(n)]
        sequences.append(
            {
                "input_ids": np.array(ids),
                "loss_mask": np.array(mask),
                "field": np.array(field),
                "number": n / 7,
            }
        )
    row, maps, borders = [], [], [0]  # a token of the row: sequence, position in it
    for s, one in enumerate(sequences):
        before, shared = sequences[s - 1], 0
        while (
            s > 0
            and shared < min(len(before["input_ids"]), len(one["input_ids"]))
            and before["input_ids"][shared] == one["input_ids"][shared]
            and before["field"][shared] == one["field"][shared] == 0
            and not one["loss_mask"][shared]
            and any(one["loss_mask"])
        ):
            shared += 1
        shared = shared if shared >= least else 0
        maps.append(
            [
                *(maps[-1][:shared] if shared else []),
                *range(len(row), len(row) + len(one["input_ids"]) - shared),
            ]
        )
        row += [(s, t) for t in range(shared, len(one["input_ids"]))]
        borders.append(len(row))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "LEAST_SHARED", least)
        batch = flat_batch([sequences[i : i + 2] for i in range(0, len(sequences), 2)], CPU)
    assert batch["input_ids"][0].tolist() == [sequences[s]["input_ids"][t] for s, t in row]
    assert batch["position_ids"][0].tolist() == [t for _, t in row]
    assert batch["loss_mask"].tolist() == [float(t > 0 and sequences[s]["loss_mask"][t]) for s, t in row]
    assert batch["field"].tolist() == [np.float32(sequences[s]["field"][t]) for s, t in row]
    assert batch["number"].tolist() == [np.float32(one["number"]) for one in sequences]
    assert all(
        batch[name].dtype == torch.int64 for name in ("input_ids", "position_ids", "cu_seqlens", "targets")
    )
    assert batch["cu_seqlens"].tolist() == borders and batch["lengths"] == [
        len(one["input_ids"]) for one in sequences
    ]
    token_map = [token for of_sequence in maps for token in of_sequence]
    assert (batch["token_map"] is None) == (len(row) == len(token_map))
    assert batch["token_map"] is None or batch["token_map"].tolist() == token_map
    for values, of_sequence in zip(split_row(torch.arange(len(row)), batch), maps, strict=True):
        assert values.tolist() == of_sequence
    trained = [at for at, (s, t) in enumerate(row) if t > 0 and sequences[s]["loss_mask"][t]]
    assert batch["targets"].tolist() == (trained or [min(1, len(row) - 1)])
    if trained:
        assert batch["previous"].tolist() == [maps[row[at][0]][row[at][1] - 1] for at in trained]
    # Nothing that is trained is lost, and each sequence counts its own.
    counts = segment_sum(batch["loss_mask"], batch["cu_seqlens"]).tolist()
    assert counts == [one["loss_mask"][1:].sum() for one in sequences]


def test_a_unit_adds_what_it_does_not_share():
    """Of ten untrained tokens; the second unit is a pair."""
    one = {"input_ids": np.arange(12), "loss_mask": np.arange(12) >= 10}
    assert sizes_in_row([[one], [one, one], [one]]) == [12, 4, 2]


@pytest.mark.parametrize(
    "sizes, num_parts, wanted",
    [
        ([5, 5, 5, 5], 2, ["ab", "cd"]),
        ([1, 1, 1, 9], 2, ["abc", "d"]),
        ([9, 1, 1, 1], 2, ["a", "bcd"]),
        ([9, 9], 5, ["a", "b"]),  # no part is empty
        ([4], 3, ["a"]),
    ],
)
def test_units_are_split_evenly_and_in_order(sizes, num_parts, wanted):
    units = ["a", "b", "c", "d"][: len(sizes)]
    parts = split_evenly(units, sizes, num_parts)
    assert ["".join(part) for part in parts] == wanted


@given(st.randoms(use_true_random=False))
def test_fields_sum_to_totals_however_windows_split(random):
    """Over micro-batches of any size, with starts that neighbours share: nothing is counted twice, or not at
    all."""
    start = [random.randrange(9) for _ in range(random.randrange(20))]
    examples = []
    for _ in range(random.randrange(1, 7)):
        own = [random.randrange(9) for _ in range(random.randrange(1, 5))]
        n, ids = len(start) + len(own), np.array(start + own)
        mask = np.array([0] * len(start) + [random.randrange(2) for _ in own], np.uint8)
        everywhere = np.array(
            [random.choice([0.0, 1.0]) * (random.random() < 0.8) for _ in range(n)], np.float32
        )
        examples.append(
            [{"input_ids": ids, "loss_mask": mask, "every": everywhere, "trained": mask * 0.5, "number": n}]
        )
    for size in (1, 2, len(examples)):
        members = [list(range(i, min(i + size, len(examples)))) for i in range(0, len(examples), size)]
        window = Window(process(), examples, members)
        for field in ("loss_mask", "every", "trained", "number"):
            arrived = sum(float(batch[field].sum()) for batch in window)
            assert arrived == pytest.approx(window.total(field)), field
        weighted = sum(float((batch["loss_mask"] * batch["every"]).sum()) for batch in window)
        assert weighted == pytest.approx(window.total("loss_mask", "every"))


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_booleans_stay_booleans(weight):
    """`mask * ~batch["skip"]` and `logps[batch["trained"]]` mean what they say; a filler has none."""
    sequence = all_trained(np.arange(3)) | {"skip": np.array([False, True, True]), "is_code": True}
    batch = flat_batch([[check_sequence(sequence)]], CPU, weight)
    assert batch["skip"].dtype == batch["is_code"].dtype == torch.bool
    assert batch["skip"].tolist() == [False, weight == 1, weight == 1]
    assert batch["is_code"].tolist() == [weight == 1]


def test_a_micro_batch_has_one_backward_pass_on_several_processes():
    """DistributedDataParallel adds up the gradients of the first. A window that starts again counts anew."""
    for world, is_refused in ((1, False), (2, True)):
        accelerator = process(0, world)
        accelerator.backward = lambda loss: None
        window = Window(accelerator, [[all_trained(np.arange(4))], [all_trained(np.arange(3))]], [[0], [1]])
        for _ in range(2):
            for _ in window:
                window.backward(torch.tensor(1.0))
        if is_refused:
            with pytest.raises(UserError, match="more than one window.backward"):
                window.backward(torch.tensor(1.0))
        else:
            window.backward(torch.tensor(1.0))
