"""Out of memory: the window is begun again in smaller micro-batches, and its gradient stays the same."""

import json
import sys

from common import memory as memory_module
from common.args import CommonArgs
from common.collators import Window
from common.errors import UserError
from common.model import FlatModel
from common.run.retry import Retry
from tests.conftest import events_of, read_metrics, run_script, train_metrics
from tests.run.test_health import STAGES
from tests.scripts.test_equivalence import assert_same, free_port, losses
from tests.tiny import tiny_lm

import numpy as np
import pytest
import torch
from accelerate import Accelerator

# With its usual epsilon AdamW turns the rounding of a gradient near 0 into a whole step, and the second gradient is another.
ONE = ["--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "1", "--max_steps", "3"]
ONE += ["--adam_epsilon", "1", "--learning_rate", "0.1", "--warmup_steps", "0", "--lr_scheduler_type", "constant"]


def limit_memory(monkeypatch, sequences, where="forward"):
    """Training calls on more sequences than this run out of memory. Returns the sizes of the calls that did not."""
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
@pytest.mark.parametrize("stage", [s if s == "sft" else pytest.param(s, marks=pytest.mark.slow) for s in STAGES])
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
    assert json.loads((output / "checkpoint-2" / "trainer_state.json").read_text())["splits"] > 1


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
        UserError, match=r"out of memory with micro-batches of 1 sequence\(s\).*what helps: .*--max_length"
    ) as error:
        launch("sft", *STAGES["sft"], *ONE)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("stage", [s if s in ("sft", "dpo") else pytest.param(s, marks=pytest.mark.slow) for s in STAGES])
def test_before_the_first_step_the_largest_micro_batch_is_tried(stage, launch, monkeypatch, capsys):
    words = [*STAGES[stage], *ONE]
    whole = losses(launch(stage, *words, output="whole"))
    fitted = limit_memory(monkeypatch, 4)
    output = launch(stage, *words, "--auto_micro_batch", output="auto")
    said = capsys.readouterr().out
    assert "--auto_micro_batch: micro-batches of" in said and "step 2: out of memory" not in said
    assert_same(whole, losses(output))
    assert max(fitted) <= 4


@pytest.mark.slow
def test_only_one_of_two_processes_runs_out(launch, tmp_path):
    words = [*STAGES["sft"], "--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "1", "--max_steps", "3"]
    whole = losses(launch("sft", *words, "--per_device_train_batch_size", "8"))
    code = (
        "import os, sys, runpy; sys.path.insert(0, os.getcwd()); import torch; from common.model import FlatModel; forward = FlatModel.forward\n"
        "def limited(self, batch, *args, **kwargs):\n"
        "    if os.environ['RANK'] == '1' and torch.is_grad_enabled() and len(batch['lengths']) > 2: raise MemoryError\n"
        "    return forward(self, batch, *args, **kwargs)\n"
        "FlatModel.forward = limited; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    (tmp_path / "limited.py").write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    command += [str(tmp_path / "limited.py"), "train_sft.py", *words]
    run = run_script([*command, "--output_dir", str(tmp_path / "two"), "--auto_micro_batch"])
    assert run.returncode == 0, run.stderr[-6000:]
    assert "the gradient stays the same" in run.stdout
    assert_same(whole, losses(tmp_path / "two"))
    run = run_script([*command, "--output_dir", str(tmp_path / "without")], timeout=100)
    assert run.returncode != 0 and "--auto_micro_batch" in run.stderr


@pytest.mark.slow
def test_memory_that_really_runs_out(tmp_path):
    """A limit on the address space that a micro-batch of 64 does not fit in, and smaller ones do."""
    code = (
        "import sys, resource, train_sft; from common.command_line import parse_args\n"
        "import common.run.retry, common.run.run as room; common.run.retry.tokens_at_once = lambda *args: float('inf')\n"
        "class Limited(room.Signals):\n"
        "    def __init__(self, *args, **options):\n"
        "        now = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "        resource.setrlimit(resource.RLIMIT_AS, (now + 180 * 2**20, -1)); super().__init__(*args, **options)\n"
        "room.Signals = Limited\n"
        "train_sft.main(parse_args(train_sft.Args, 'data/configs/sft.yaml', None, sys.argv[1:]))\n"
    )
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": "one two three four five six " * 30 + str(i)}) + "\n" for i in range(192))
    )
    words = ["--dataset_name", str(tmp_path / "rows.jsonl"), "--model_name_or_path", "data/base_model", "--eval_steps", "0"]
    words += ["--per_device_train_batch_size", "64", "--output_dir", str(tmp_path / "out"), "--max_length", "256"]
    words += ["--logging_steps", "1", "--save_steps", "0", "--dataset_cache_dir", str(tmp_path / "cache")]
    run = run_script([sys.executable, "-c", code, *words])
    assert run.returncode == 0, run.stderr[-3000:]
    assert "out of memory; again, and from here on" in run.stdout, run.stdout
    assert [row["step"] for row in train_metrics(tmp_path / "out")] == [1, 2, 3]


def test_running_out_elsewhere_is_one_line(tmp_path):
    code = "from common.args import CommonArgs\nfrom common.command_line import launch\ndef main(args): raise MemoryError('Unable to allocate 8 TiB')\n"
    code += "launch(main, CommonArgs, 'nowhere.yaml')"
    run = run_script([sys.executable, "-c", code, "--dataset_name", "mine"])
    assert run.returncode == 1 and len(run.stderr.splitlines()) == 1
    assert "out of memory outside of the training steps" in run.stderr and "8 TiB" in run.stderr


# --- how a window is split --------------------------------------------------------------------------------------------


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
        retry(lambda window: within.append(torch.rand(4).tolist()), step, two_micro_batches(accelerator))
        return within[0], torch.rand(4).tolist()

    try:
        (one, after), (two, after_two), again, later = drawn(0), drawn(1), drawn(0), drawn(0, 4)
    finally:
        accelerator.state.process_index = 0
    assert one != two and after == after_two and again == (one, after) and later[0] not in (one, two) and later[1] != after


def test_parts_have_about_equal_tokens_and_all_sequences(accelerator):
    window = two_micro_batches(accelerator)
    assert [batch["lengths"] for batch in window] == [[100, 10, 10, 10], [50, 20]] and window.num_micro_batches == 2
    assert [batch["lengths"] for batch in window.split(2)] == [[100], [10, 10, 10], [50], [20]]
    assert window.num_micro_batches == 4
    assert accelerator.gradient_accumulation_steps == 4
    assert window.most_parts == 4
    assert sum(len(batch["lengths"]) for batch in window.split(8)) == 6


@pytest.mark.parametrize("parts, tokens, lengths", [
    (1, 1000, [[100, 10, 10, 10], [50, 20]]),
    (1, 66, [[100, 10, 10, 10], [50, 20]]),
    (1, 65, [[100], [10, 10, 10], [50, 20]]),
    (2, 70, [[100], [10, 10, 10], [50], [20]]),
    (1, 20, [[100], [10], [10, 10], [50], [20]]),
])  # fmt: skip
def test_a_window_is_split_into_parts_of_so_many_tokens(accelerator, parts, tokens, lengths):
    window = two_micro_batches(accelerator)
    assert [batch["lengths"] for batch in window.split(parts, tokens)] == lengths
    assert window.num_micro_batches == len(lengths)


def test_tokens_that_a_part_shares_with_its_neighbour_count_once(accelerator):
    """Four sequences of 40, 30 of them the same in all: 40 + 3 · 10 tokens of the row."""
    same = np.arange(30)
    masks = np.r_[np.zeros(30), np.ones(10)].astype(np.uint8)
    examples = [[{"input_ids": np.r_[same, np.full(10, 100 + i)], "loss_mask": masks}] for i in range(4)]
    assert len(Window(accelerator, examples, [[0, 1, 2, 3]]).split(1, 36)) == 1
    assert len(Window(accelerator, examples, [[0, 1, 2, 3]]).split(1, 35)) == 2


def test_on_a_cpu_a_micro_batch_is_computed_in_parts_that_fit_its_cache(launch, monkeypatch):
    """The same losses; and never more than about so many tokens in the model together."""
    words = [*STAGES["sft"], *ONE]
    whole = losses(launch("sft", *words, output="whole"))
    seen, forward = [], FlatModel.forward

    def watched(self, batch, *args, **named):
        seen.extend([batch["input_ids"].shape[1]] * torch.is_grad_enabled())
        return forward(self, batch, *args, **named)

    monkeypatch.setattr(FlatModel, "forward", watched)
    monkeypatch.setattr(memory_module, "CACHED_NUMBERS", 0)
    monkeypatch.setattr(memory_module, "LEAST_TOKENS", 100)
    parts = losses(launch("sft", *words, output="parts"))
    assert_same(whole, parts)
    assert max(seen) < 200


def test_packs_are_split_between_sequences_and_pairs_stay_together(accelerator):
    pack = example(30, 20, 10, 40)
    assert [b["lengths"] for b in Window(accelerator, [pack], [[0]]).split(2)] == [[30, 20], [10, 40]]
    pairs = Window(accelerator, [pack], [[0]], indivisible=2)
    assert [b["lengths"] for b in pairs.split(4)] == [[30, 20], [10, 40]] and pairs.most_parts == 2


def test_a_filler_stays_a_filler(accelerator):
    batches = list(Window(accelerator, [example(30)], [[0], []]).split(2))
    assert [float(batch["loss_mask"].sum()) for batch in batches] == [29.0, 0.0]
