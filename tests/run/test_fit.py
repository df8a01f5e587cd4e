"""Out of memory: the window is begun again in smaller micro-batches, and its gradient stays the same."""

import json

from accelerate import Accelerator
from common.args import CommonArgs
from common.collators import Window
from common.errors import UserError
from common.model import FlatModel
from common.run.metrics import Metrics
from common.run.retry import Retry
import numpy as np
import pytest
import torch

from tests.conftest import assert_same, events_of, losses, read_metrics
from tests.run.test_health import STAGES
from tests.tiny import tiny_lm

# With its usual epsilon AdamW turns the rounding of a gradient near 0 into a whole step, and the second
# gradient is another.
ONE = "--per_device_train_batch_size 8 --gradient_accumulation_steps 1 --max_steps 3".split()
ONE += "--adam_epsilon 1 --learning_rate 0.1 --warmup_steps 0 --lr_scheduler_type constant".split()


def limit_memory(monkeypatch, sequences, where="forward"):
    """Training calls on more sequences than this run out of memory. Returns the sizes of the calls that did
    not."""
    forward, fitted = FlatModel.forward, []

    def ran_out(gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    def limited(self, batch, *args, **kwargs):
        size = len(batch["lengths"])
        too_large = torch.is_grad_enabled() and size > sequences
        if too_large and where == "forward":
            ran_out(None)
        out = forward(self, batch, *args, **kwargs)
        if too_large:
            (out.logps if out.nll is None else out.nll).register_hook(ran_out)
        elif torch.is_grad_enabled():
            fitted.append(size)
        return out

    monkeypatch.setattr(FlatModel, "forward", limited)
    return fitted


@pytest.mark.parametrize("where", ["forward", pytest.param("backward", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "stage", [s if s == "sft" else pytest.param(s, marks=pytest.mark.slow) for s in STAGES]
)
def test_a_run_goes_on_with_the_same_gradients(stage, where, launch, monkeypatch, capsys):
    words = [*STAGES[stage], *ONE]
    whole = losses(launch(stage, *words, output="whole"))
    fitted = limit_memory(monkeypatch, 4, where)
    output = launch(stage, *words, output="parts")
    said = capsys.readouterr().out
    times = said.count("out of memory; again, and from here on, with micro-batches of")
    assert times == len(events_of(output, "memory"))
    assert 1 <= times <= 4
    assert fitted and max(fitted) <= 4 and len(fitted) <= 3 * 2**times  # calls in three steps
    assert_same(whole[:1], losses(output)[:1], tolerance=1e-6)
    assert_same(whole, losses(output))
    assert (
        json.loads((output / "checkpoint-2" / "trainer_state.json").read_text())["parts"]["retry"]["splits"]
        > 1
    )


def test_a_resumed_run_rounds_as_the_first_one_did(launch, monkeypatch):
    words = [*STAGES["sft"], *ONE]
    limit_memory(monkeypatch, 4)
    straight = read_metrics(launch("sft", *words, output="straight"))
    launch("sft", *words, "--max_steps", "2", output="again")
    monkeypatch.undo()
    again = read_metrics(launch("sft", *words, output="again"))
    assert [row for row in again if row["step"] == 3] == [row for row in straight if row["step"] == 3]


def test_what_cannot_be_split_ends_the_run_with_what_would_help(launch, monkeypatch):
    limit_memory(monkeypatch, 0)
    with pytest.raises(
        UserError, match=r"with micro-batches of 1 .* \(CUDA out of memory.*\); .*--max_length"
    ):
        launch("sft", *STAGES["sft"], *ONE)


# --- how a window is split ----------------------------------------------------------------------------------


def example(*lengths):
    return [{"input_ids": np.arange(n), "loss_mask": np.ones(n, np.uint8)} for n in lengths]


@pytest.fixture
def accelerator():
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    return Accelerator(cpu=True)


def two_micro_batches(accelerator):
    return Window(accelerator, [example(n) for n in (100, 10, 10, 10, 50, 20)], [[0, 1, 2, 3], [4, 5]])


def test_each_process_has_dropout_of_its_own(accelerator):
    """And the same random numbers in the script's loop; both by the step alone."""
    model = FlatModel(tiny_lm("gpt2"))

    def drawn(process, step=3):
        accelerator.state.process_index = process
        retry, within = Retry(CommonArgs(), accelerator, model, None), []

        def gradients(window):
            within.append(torch.rand(4).tolist())
            window.backward(0 * model.lm.get_input_embeddings().weight.sum())

        retry(gradients, step, two_micro_batches(accelerator))
        return within[0], torch.rand(4).tolist()

    try:
        (one, after), (two, after_two), again, later = drawn(0), drawn(1), drawn(0), drawn(0, 4)
    finally:
        accelerator.state.process_index = 0
    assert (
        one != two
        and after == after_two
        and again == (one, after)
        and later[0] not in (one, two)
        and later[1] != after
    )


def test_what_a_failed_attempt_has_measured_counts_nowhere(accelerator, tmp_path):
    model, fails = FlatModel(tiny_lm("gpt2")), iter([False, True])
    metrics = Metrics(accelerator, CommonArgs(output_dir=str(tmp_path)))

    def gradients(window):
        for batch in window:
            if next(fails, False):
                raise torch.OutOfMemoryError("CUDA out of memory.")
            window.backward(0 * model.lm.get_input_embeddings().weight.sum())
            metrics.add(first_length=float(batch["lengths"][0]))

    Retry(CommonArgs(), accelerator, model, metrics)(gradients, 0, two_micro_batches(accelerator))
    assert metrics.window_means()["first_length"] == (100 + 10 + 50 + 20) / 4


def test_an_attempt_after_one_that_failed_has_the_same_dropout(accelerator, tmp_path):
    model, drawn = FlatModel(tiny_lm("gpt2")), []
    metrics = Metrics(accelerator, CommonArgs(output_dir=str(tmp_path)))

    def gradients(window):
        drawn.append(torch.rand(4).tolist())
        if len(drawn) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        window.backward(0 * model.lm.get_input_embeddings().weight.sum())

    Retry(CommonArgs(), accelerator, model, metrics)(gradients, 0, two_micro_batches(accelerator))
    assert len(drawn) == 2 and drawn[0] == drawn[1]


def test_a_backward_pass_without_the_factor_of_the_window_is_refused(accelerator):
    model = FlatModel(tiny_lm("gpt2"))
    retry = Retry(CommonArgs(), accelerator, model, None)
    with pytest.raises(UserError, match="window.backward"):
        retry(
            lambda window: accelerator.backward(model.lm.get_input_embeddings().weight.sum()),
            0,
            two_micro_batches(accelerator),
        )


@pytest.mark.parametrize("parts, tokens, lengths", [
    (1, 1000, [[100, 10, 10, 10], [50, 20]]),
    (1, 66, [[100, 10, 10, 10], [50, 20]]),
    (1, 65, [[100], [10, 10, 10], [50, 20]]),
    (2, 1000, [[100], [10, 10, 10], [50], [20]]),
    (2, 70, [[100], [10, 10, 10], [50], [20]]),
    (1, 20, [[100], [10], [10, 10], [50], [20]]),
])  # fmt: skip
def test_a_window_is_split_into_parts_of_so_many_tokens(accelerator, parts, tokens, lengths):
    window = two_micro_batches(accelerator)
    assert [batch["lengths"] for batch in window.split(parts, tokens)] == lengths
    assert len(window) == accelerator.gradient_accumulation_steps == len(lengths) and window.most_parts == 4


def test_packs_are_split_between_sequences_and_pairs_stay_together(accelerator):
    pack = example(30, 20, 10, 40)
    assert [b["lengths"] for b in Window(accelerator, [pack], [[0]]).split(2)] == [[30, 20], [10, 40]]
    pairs = Window(accelerator, [pack], [[0]], indivisible=2)
    assert [b["lengths"] for b in pairs.split(4)] == [[30, 20], [10, 40]] and pairs.most_parts == 2


def test_a_filler_stays_a_filler(accelerator):
    batches = list(Window(accelerator, [example(30)], [[0], []]).split(2))
    assert [float(batch["loss_mask"].sum()) for batch in batches] == [29.0, 0.0]
