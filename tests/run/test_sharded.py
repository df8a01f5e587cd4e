"""Sharded checkpoints: the same guarantees as the others have, on one process here, on two and four in the slow tests."""

import copy
import os
import pickle
import re
import shutil
import sys
from types import SimpleNamespace

from common.args import CommonArgs
from common.errors import UserError
from common.files import find_damage
from common.model.load import load_model, load_tokenizer
from common.model.shards import FOLDER, read_metadata
from common.run.best import Best
from common.run.checkpoint import export, load_extra, resume, save_checkpoint
from common.run.consolidate import consolidate
from common.run.folder import checkpoints, newest_intact
from common.run.sharded import _read, check_sharded, check_shared
from tests.conftest import read_metrics, run_script
from tests.run.kills import killed_at
from tests.run.test_fsdp import LAUNCHER
from tests.run.test_fsdp import words as words  # a fixture
from tests.scripts.test_equivalence import free_port
from tests.scripts.test_experts import upcycled as upcycled  # a fixture
from tests.tiny import SIZE, tiny_pair
from tools import chat
from tools import consolidate as tool

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

# --- one process ---------------------------------------------------------------------------------------------------------

MODELS = {
    "tied": lambda n: transformers.Qwen3Config(**SIZE | {"vocab_size": n}, head_dim=12, tie_word_embeddings=True),
    "untied": lambda n: transformers.LlamaConfig(**SIZE | {"vocab_size": n}, tie_word_embeddings=False),
    "experts": lambda n: transformers.MixtralConfig(**SIZE | {"vocab_size": n}, num_local_experts=3),
}


def stepped(model, optimizer, seed=1):
    """The model after one step of the optimizer with random gradients."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()
    return model


@pytest.fixture(scope="module", params=MODELS)
def tiny(request):
    return make_tiny(request.param)


@pytest.fixture(scope="module")
def llama():
    return make_tiny("untied")


def make_tiny(kind):
    """A tiny model with a module of a script's own, an optimizer that has taken a step, and a tokenizer."""
    from common.model.wrap import wrap

    tokenizer = load_tokenizer(CommonArgs(), "data/base_model")
    torch.manual_seed(0)
    model = wrap(AutoModelForCausalLM.from_config(MODELS[kind](len(tokenizer)))).train()
    model.extra["critic"] = torch.nn.Linear(32, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stepped(model, optimizer)
    return SimpleNamespace(model=model, optimizer=optimizer, tokenizer=tokenizer, accelerator=Accelerator(cpu=True))


def save(tiny, output, step, limit=2, best=None, sharded=True):
    args = CommonArgs(output_dir=str(output), save_total_limit=limit, sharded_checkpoints=sharded)
    return save_checkpoint(args, tiny.accelerator, tiny.model, tiny.optimizer, tiny.tokenizer, step, {}, best or Best(args))


def again(tiny, checkpoint):
    """The model and the optimizer, as a run that goes on has them."""
    model = load_model(CommonArgs(), tiny.accelerator, tiny.tokenizer, checkpoint)
    model.extra["critic"] = torch.nn.Linear(32, 1)
    load_extra(model, checkpoint)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    resume(tiny.accelerator, checkpoint, optimizer, model.train())
    return model, optimizer


@pytest.mark.parametrize("sharded", [True, False])
def test_what_goes_on_from_it_is_what_was_saved(sharded, tiny, tmp_path):
    """Weights, moments, the modules of a script; and the next step, bit for bit. The other kind likewise."""
    save(tiny, tmp_path, 1, sharded=sharded)
    assert (tmp_path / "checkpoint-1" / FOLDER).is_dir() == sharded
    model, optimizer = again(tiny, tmp_path / "checkpoint-1")
    ours = SimpleNamespace(model=copy.deepcopy(tiny.model))
    ours.optimizer = torch.optim.AdamW(ours.model.parameters(), lr=1e-3)
    ours.optimizer.load_state_dict(tiny.optimizer.state_dict())
    for one, other in ((ours.model, model), (stepped(ours.model, ours.optimizer), stepped(model, optimizer))):
        a, b = one.state_dict(), other.state_dict()
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    replaced = [{name for name, m in lm.named_modules() if "plain_forward" in vars(m)} for lm in (ours.model.lm, model.lm)]
    assert replaced[0] == replaced[1] and replaced[0]
    ids = torch.arange(8)
    batch = {"input_ids": ids[None], "position_ids": ids[None], "lengths": [8], "loss_mask": torch.ones(8)}
    batch |= {"targets": ids[1:], "previous": ids[:-1]}
    assert torch.equal(ours.model(batch).logps, model(batch).logps) and model.padded == ours.model.padded


@pytest.mark.slow
def test_an_optimizer_with_numbers_beside_its_tensors(tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    tiny = make_tiny("untied")
    make = lambda model: bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-3)  # noqa: E731
    tiny.optimizer = make(tiny.model)
    stepped(tiny.model, tiny.optimizer)
    save(tiny, tmp_path, 1)
    model, _ = again(tiny, tmp_path / "checkpoint-1")  # another optimizer's groups are no obstacle
    optimizer = make(model)
    resume(tiny.accelerator, tmp_path / "checkpoint-1", optimizer, model)
    for p, q in zip(tiny.model.parameters(), model.parameters(), strict=True):
        one, other = tiny.optimizer.state[p], optimizer.state[q]
        assert one.keys() == other.keys() and type(one["step"]) is type(other["step"]) and one["step"] == other["step"] > 0
        assert all(torch.equal(one[k], other[k]) for k in one if isinstance(one[k], torch.Tensor))


def test_a_model_folder_is_made_of_it_that_is_the_one_saved_otherwise(tiny, tmp_path, capsys):
    for sharded in (True, False):
        save(tiny, tmp_path / str(sharded), 1, sharded=sharded)
    shards, plain = (tmp_path / str(sharded) / "checkpoint-1" for sharded in (True, False))
    with pytest.raises(UserError, match=r"is a sharded checkpoint: python -m tools.consolidate \S+ OUT makes"):
        chat.load(str(shards))
    with pytest.raises(UserError, match="is a sharded checkpoint: python -m tools.consolidate"):
        load_model(CommonArgs(model_name_or_path=str(shards)), tiny.accelerator, tiny.tokenizer)
    out = tmp_path / "out"
    tool.main([str(shards), str(out)])
    assert capsys.readouterr().out.splitlines() == [f"{shards} as a model: {out}"]
    for file in ("model.safetensors", "extra.safetensors"):
        a, b = load_file(out / file), load_file(plain / file)
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a), file
    beside = {"optimizer.pt", "trainer_state.json", "manifest.json"}
    assert {path.name for path in out.iterdir()} == {path.name for path in plain.iterdir()} - beside
    for file in ("config.json", "generation_config.json"):
        assert (out / file).read_text() == (plain / file).read_text()
    with pytest.raises(UserError, match="is there already"):
        tool.main([str(shards), str(out)])
    with pytest.raises(UserError, match="is no sharded checkpoint: its model can be loaded as it is"):
        tool.main([str(plain), str(tmp_path / "other")])


def test_a_large_model_is_written_in_parts(monkeypatch, tmp_path):
    """Experts, which transformers takes apart when it saves them: a layer at a time."""
    tiny = make_tiny("experts")
    save(tiny, tmp_path, 1)
    save(tiny, tmp_path / "plain", 1, sharded=False)
    monkeypatch.setattr("common.run.consolidate.FILE_SIZE", 40_000)
    monkeypatch.setattr("common.run.sharded.AT_ONCE", 5_000)
    out = tmp_path / "out"
    tool.main([str(tmp_path / "checkpoint-1"), str(out)])
    assert len(files := sorted(out.glob("model-*.safetensors"))) > 2 and not (out / "part").exists()
    assert [file.name for file in files][-1].endswith(f"-of-{len(files):05}.safetensors")
    whole = load_file(tmp_path / "plain" / "checkpoint-1" / "model.safetensors")
    apart = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert whole.keys() == apart.keys() and all(torch.equal(whole[name], apart[name]) for name in whole)
    one, other = (AutoModelForCausalLM.from_pretrained(f).state_dict() for f in (out, tmp_path / "plain" / "checkpoint-1"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_best_of_them_is_exported(llama, tmp_path):
    args = CommonArgs(output_dir=str(tmp_path), sharded_checkpoints=True)
    save(llama, tmp_path, 1)
    kept = {name: tensor.clone() for name, tensor in llama.model.state_dict().items()}
    stepped(llama.model, llama.optimizer, seed=2)
    export(args, llama.accelerator, llama.model, llama.tokenizer, tmp_path / "checkpoint-1")
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], kept[f"lm.{name}"]) for name in found)
    assert not torch.equal(llama.model.lm.lm_head.weight, found["lm_head.weight"])
    assert not {path.name for path in tmp_path.iterdir()} & {"sharded.json", "shards", "trainer_state.json"}


def test_a_missing_or_damaged_shard_is_named_and_passed_over(llama, tmp_path, capsys):
    save(llama, tmp_path, 1)
    save(llama, tmp_path, 2)
    newest = tmp_path / "checkpoint-2"
    shard = newest / FOLDER / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert newest_intact(tmp_path).name == "checkpoint-1"
    assert capsys.readouterr().out == f"{newest} is passed over: shards/__0_0.distcp is damaged\n"
    with pytest.raises(UserError, match=r"checkpoint-2: shards/__0_0.distcp is damaged"):
        tool.main([str(newest), str(tmp_path / "out")])
    shard.unlink()
    assert find_damage(newest) == "shards/__0_0.distcp is missing"
    with pytest.raises(UserError, match=r"checkpoint-2/shards cannot be read: FileNotFoundError.*__0_0.distcp") as refused:
        again(llama, newest)  # it went after it was looked at
    assert "\n" not in str(refused.value)


class Evil:
    def __reduce__(self):
        return os.system, (f"touch {os.environ['TRACE']}",)


def test_nothing_in_the_index_is_executed(llama, tmp_path, monkeypatch):
    trace = tmp_path / "trace"
    monkeypatch.setenv("TRACE", str(trace))
    save(llama, tmp_path, 1)
    index = tmp_path / "checkpoint-1" / FOLDER / ".metadata"
    for data in (pickle.dumps(Evil()), b"ctorch.distributed.checkpoint.metadata\nos\n.", b"", pickle.dumps([1])):
        index.write_bytes(data)
        with pytest.raises(UserError, match=r"shards/.metadata is no index of shards") as refused:
            again(llama, tmp_path / "checkpoint-1")
        assert not trace.exists() and "\n" not in str(refused.value)


def test_another_model_is_refused(llama, tmp_path):
    save(llama, tmp_path, 1)
    model, _ = tiny_pair("llama")
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UserError, match=r"of another model: model\.\S+ is .* and would be .* in this one"):
        resume(llama.accelerator, tmp_path / "checkpoint-1", optimizer, model)


def test_a_kill_at_any_file_operation_leaves_a_whole_checkpoint(llama, tmp_path, monkeypatch):
    """Each call that touches the disk is the last one, in turn, before or after it has done its work."""
    output = tmp_path / "out"
    output.mkdir()
    (output / "args.yaml").write_text("seed: 0")
    save(llama, output, 3)
    save(llama, output, 6)
    shutil.copytree(output, tmp_path / "before")
    ended, at, seen = False, 0, []
    while not ended:
        shutil.rmtree(output)
        shutil.copytree(tmp_path / "before", output)
        with killed_at(monkeypatch, at) as was_killed:
            try:
                save(llama, output, 9, limit=1)
                ended = not was_killed()  # else somebody has caught the kill
            except BaseException as error:  # torch hands on what its writer was killed by
                assert "Kill" in repr(error), error
                seen.append(newest_intact(output).name)
        at += 11
    assert at > 40 and {"checkpoint-6", "checkpoint-9"} == set(seen) and seen == sorted(seen)
    save(llama, output, 12, limit=1)
    assert sorted(path.name for path in output.iterdir()) == ["args.yaml", "checkpoint-12"]


FULL = {
    "shards": ("torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data", OSError(28, "No space left")),
    "by torch": (
        "torch.distributed.checkpoint.filesystem.FileSystemWriter.write_data",
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),
    ),
    "index": ("torch.distributed.checkpoint.filesystem.FileSystemWriter.finish", OSError(28, "No space left")),
    "hashes": ("common.run.sharded.file_hash", OSError(5, "Input/output error")),
}


@pytest.mark.parametrize("place", FULL)
def test_a_full_disk_leaves_the_last_checkpoint_and_the_run_alive(place, llama, tmp_path, monkeypatch, capsys):
    assert save(llama, tmp_path, 3)
    name, error = FULL[place]

    def full(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(name, full)
        assert not save(llama, tmp_path, 6, limit=1)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 and "checkpoint-6 could not be written" in said[0] and "the next save tries again" in said[0]
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-3"] and not list(tmp_path.glob(".*"))
    assert save(llama, tmp_path, 9, limit=1)


def test_what_cannot_be_had_is_refused(tmp_path):
    args = CommonArgs(output_dir=str(tmp_path), sharded_checkpoints=True)
    run = SimpleNamespace(num_processes=2, distributed_type=DistributedType.DEEPSPEED)
    with pytest.raises(UserError, match="--sharded_checkpoints: not with DeepSpeed"):
        check_sharded(args, run)
    args.push_to_hub, args.hub_strategy, run.distributed_type = True, "every_save", DistributedType.FSDP
    with pytest.raises(UserError, match="--hub_strategy every_save"):
        check_sharded(args, run)


def test_a_disk_that_is_not_shared_is_refused(tmp_path, monkeypatch):
    """The second process, of another machine, looks into a folder of its own."""
    monkeypatch.setattr("common.run.sharded.broadcast_object_list", lambda values: values)
    monkeypatch.setattr("common.run.sharded.gather_lists", lambda accelerator, values: values)
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    one = SimpleNamespace(is_main_process=True, wait_for_everyone=lambda: None, process_index=0)
    check_shared(one, tmp_path / "one", "why")
    assert not list((tmp_path / "one").iterdir())
    other = SimpleNamespace(is_main_process=False, wait_for_everyone=lambda: None, process_index=8)
    with pytest.raises(UserError, match=r"why, and process 8 on \S+ does not see in \S+two what the main process writes"):
        check_shared(other, tmp_path / "two", "why")


# --- several processes ---------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, token_cache):
    """run(processes, stage, *arguments): train_<stage>.py under FSDP2, or by one process alone; returns its output folder.
    first: code that is run before; it may kill, and then `died` is to be True."""

    def launch(processes, stage, *argv, output="out", first="", died=False, **environ):
        launcher = tmp_path / "launcher.py"
        launcher.write_text(LAUNCHER)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
        command += ["--master_port", str(free_port()), str(launcher), stage, "no"]
        if processes == 1:
            (tmp_path / "alone.py").write_text(ALONE)
            command = [sys.executable, str(tmp_path / "alone.py"), stage]
        size = 8 // max(2, processes) // 2
        command += [*argv, "--output_dir", str(tmp_path / output), "--dataset_cache_dir", str(token_cache)]
        command += ["--per_device_train_batch_size", str(size), "--gradient_accumulation_steps", "2"]
        found = run_script(command, timeout=240, FIRST=first, **environ)
        assert (found.returncode != 0) == died, found.stderr[-6000:]
        return tmp_path / output

    return launch


ALONE = """
import importlib, os, sys
sys.path.insert(0, os.getcwd())
from common.command_line import launch
script = importlib.import_module(f"train_{sys.argv[1]}")
stage = sys.argv.pop(1)
exec(os.environ.get("FIRST", ""))
launch(script.main, script.Args, f"data/configs/{stage}.yaml")
"""
SHARDED = "--sharded_checkpoints"


def rewound(whole, again, keep):
    """A copy of the folder of a run, as it was after the checkpoint of the step `keep`."""
    shutil.copytree(whole, again)
    for name in ("summary.json", "model.safetensors", "adapter_model.safetensors", "extra.safetensors"):
        (again / name).unlink(missing_ok=True)
    for folder in checkpoints(again):
        if folder.name != f"checkpoint-{keep}":
            shutil.rmtree(folder)
    return again


def assert_same_run(one, other):
    """Metrics and final model, bit for bit."""
    assert read_metrics(one) == read_metrics(other)
    files = [path.name for path in one.glob("*.safetensors")]
    assert files
    for file in files:
        a, b = load_file(one / file), load_file(other / file)
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a), file


def tensors(checkpoint):
    """All that its shards hold, read by one process."""
    known = read_metadata(checkpoint).state_dict_metadata
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in known.items()}
    _read(checkpoint, state)
    return state


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "dpo", "ppo"])
def test_a_run_that_was_stopped_goes_on_from_its_shards(stage, run, words, tmp_path):
    """dpo: with fsdp_cpu_ram_efficient_loading; ppo: with a critic in model.extra. The final model is the one that a run
    with the other checkpoints leaves."""
    plain = run(2, stage, *words(stage), output="plain")
    whole = run(2, stage, *words(stage), SHARDED, output="whole")
    assert_same_run(plain, whole)
    assert not (whole / "checkpoint-2" / "model.safetensors").exists()
    again = rewound(whole, tmp_path / "again", 2)
    assert_same_run(whole, run(2, stage, *words(stage), SHARDED, output=again.name))
    folder = tmp_path / "model"
    folder.mkdir()
    consolidate(whole / "checkpoint-2", folder)
    for file in folder.glob("*.safetensors"):
        a, b = load_file(file), load_file(plain / "checkpoint-2" / file.name)
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a), file


@pytest.mark.slow
def test_both_kinds_are_gone_on_from(run, words, tmp_path):
    """With the flag from a checkpoint without, and the other way round."""
    plain = run(2, "sft", *words("sft"), output="plain")
    again = rewound(plain, tmp_path / "again", 2)
    assert_same_run(plain, run(2, "sft", *words("sft"), SHARDED, output=again.name))
    assert (again / "checkpoint-3" / FOLDER).is_dir() or not (again / "checkpoint-3").exists()
    whole = run(2, "sft", *words("sft"), SHARDED, output="whole")
    back = rewound(whole, tmp_path / "back", 2)
    assert_same_run(plain, run(2, "sft", *words("sft"), output=back.name))


RESAVE = """
import copy
from common.run.checkpoint import save_checkpoint
from common.run.run import Run
def steps(self, last_step, save_every=1):
    args = copy.copy(self.args)
    args.output_dir = os.environ["AGAIN"]
    optimizer = self.optimizer
    assert save_checkpoint(args, self.accelerator, self.model, optimizer, self.tokenizer, self.first_step, {}, self.best)
    self.accelerator.wait_for_everyone()
    os._exit(0)
Run.steps = steps
"""


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_two_four_one_and_two_processes_hold_the_same(optim, run, words, tmp_path):
    """What was saved by 2 is read and saved by 4, that by one, that by 2: the same weights and moments, bit for bit."""
    argv = [*words("sft"), SHARDED, "--optim", optim]
    saved = run(2, "sft", *argv, output="saved") / "checkpoint-2"
    first = tensors(saved)
    kinds = {"exp_avg", "exp_avg_sq", "step"} | ({"momentum_buffer"} if optim == "muon" else set())
    assert {name.split(".")[1] for name in first if name.startswith("optimizer.")} == kinds
    assert all(bool(tensor.any()) for name, tensor in first.items() if ".exp_avg" in name and "embed" not in name)
    for processes, files in ((4, 4), (1, 1), (2, 2)):
        again = tmp_path / f"by{processes}"
        run(processes, "sft", *argv, "--resume_from_checkpoint", str(saved), output="x", first=RESAVE, AGAIN=str(again))
        shutil.rmtree(tmp_path / "x")
        saved = again / "checkpoint-2"
        assert find_damage(saved) is None and len(list(saved.glob(f"{FOLDER}/*.distcp"))) == files
        now = tensors(saved)
        assert first.keys() == now.keys() and all(torch.equal(first[name], now[name]) for name in first)


KILLS = {  # the process, and where it dies
    "shards": (1, "filesystem.FileSystemWriter", "write_data", "after"),
    "index": (0, "filesystem.FileSystemWriter", "finish", "before"),
    "manifest": (0, "common.run.checkpoint", "write_manifest", "before"),
    "rename": (0, "os", "rename", "before"),
    "renamed": (0, "os", "rename", "after"),
    "prune": (0, "common.run.checkpoint", "prune", "before"),
}
DYING = """
import importlib, signal
import torch.distributed.checkpoint.filesystem as filesystem
rank, place, name, when = os.environ["DIE"].split()
if os.environ["RANK"] == rank:
    owner = filesystem.FileSystemWriter if place.startswith("filesystem") else importlib.import_module(place)
    function = getattr(owner, name)
    def dying(*args, **kwargs):
        if place == "os" and not os.path.basename(args[0]).startswith(".checkpoint-"):
            return function(*args, **kwargs)
        if when == "after":
            function(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(owner, name, dying)
"""


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_saves_ends_as_if_nothing_had_been(run, words):
    argv = [*words("sft"), SHARDED, "--save_steps", "1"]
    whole = run(2, "sft", *argv, output="whole")
    seen = []
    for rank, *place in KILLS.values():
        out = run(2, "sft", *argv, output="killed", first=DYING, died=True, DIE=" ".join([str(rank), *place]))
        newest = newest_intact(out)
        seen.append(newest.name if newest else None)
    # The first four die at the first save; the fifth leaves it, and the last one the second.
    assert seen == [None] * 4 + ["checkpoint-1", "checkpoint-2"]
    assert_same_run(whole, run(2, "sft", *argv, output="killed"))


@pytest.mark.slow
def test_a_full_disk_at_the_end_is_an_error(run, words, tmp_path):
    full = """
import common.run.sharded as sharded
def full(*args):
    next(args[2])
    raise OSError(28, "No space left on device")
sharded._write_file = full
"""
    out = run(2, "sft", *words("sft"), SHARDED, first=full, died=True)
    assert not list(out.glob(".export*")) and not (out / "model.safetensors").exists()
    assert_same_run(run(2, "sft", *words("sft"), SHARDED, output="whole"), run(2, "sft", *words("sft"), SHARDED))


@pytest.mark.slow
@pytest.mark.parametrize("merge", [False, True])
def test_adapters(merge, run, words, tmp_path):
    """Beside the shards of the optimizer the adapter lies as from_pretrained reads it. The best one is exported."""
    lora = ["--use_peft", "--lora_r", "4", "--save_best", "max:eval_loss", "--merge_lora", str(merge)]
    plain = run(2, "sft", *words("sft"), *lora, output="plain")
    whole = run(2, "sft", *words("sft"), *lora, SHARDED, output="whole")
    assert_same_run(plain, whole)
    a, b = (load_file(output / "checkpoint-2" / "adapter_model.safetensors") for output in (plain, whole))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert all(name.startswith("optimizer.") for name in tensors(whole / "checkpoint-2"))
    again = rewound(whole, tmp_path / "again", 2)
    shutil.copytree(whole / "checkpoint-1", again / "checkpoint-1")  # the best
    assert_same_run(whole, run(2, "sft", *words("sft"), *lora, SHARDED, output=again.name))


@pytest.mark.slow
def test_the_best_one_is_exported_from_its_shards(run, words, tmp_path):
    best = ["--save_best", "max:eval_loss"]
    plain = run(2, "sft", *words("sft"), *best, output="plain")
    whole = run(2, "sft", *words("sft"), *best, SHARDED, output="whole")
    assert_same_run(plain, whole)
    assert (whole / "checkpoint-1" / FOLDER).is_dir()


@pytest.mark.slow
def test_experts(run, words, upcycled, tmp_path):
    argv = [*words("sft"), *upcycled, "--router_aux_loss_coef", "0.1"]
    plain, whole = (run(2, "sft", *argv, *more, output=name) for name, *more in (("plain",), ("whole", SHARDED)))
    assert_same_run(plain, whole)
    again = rewound(whole, tmp_path / "again", 2)
    assert_same_run(whole, run(2, "sft", *argv, SHARDED, output=again.name))
    out = tmp_path / "model"
    tool.main([str(whole / "checkpoint-2"), str(out)])
    a, b = load_file(out / "model.safetensors"), load_file(plain / "checkpoint-2" / "model.safetensors")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_no_process_holds_the_whole_model():
    """W MiB of weights: while a process saves, or the final model is written, it needs little; when it goes on, its half of
    W and of the two moments, and little more. The other kind of checkpoint is measured beside it, to see that it shows."""
    words = ["--hidden_size", "512", "--layers", "6", "--rounds", "1"]
    found = run_script([sys.executable, "benchmarks/checkpoints.py", *words], timeout=500)
    assert found.returncode == 0, found.stderr[-3000:]
    W = int(re.search(r": (\d+) MiB of weights", found.stdout)[1])
    rows = re.findall(r"^\| (save|go on|final model).*?\| (\w+) \| [\d.]+ \| ([\d,]+), ([\d,]+) \|$", found.stdout, re.M)
    most = {(what, kind): max(int(main.replace(",", "")), int(other.replace(",", ""))) for what, kind, main, other in rows}
    assert W > 70 and len(most) == 6, found.stdout
    assert most["save", "shards"] < 0.3 * W < 0.9 * W < most["save", "folder"]
    assert most["final model", "shards"] < 0.3 * W < 0.8 * W < most["final model", "folder"]
    assert most["go on", "shards"] < 1.85 * W < 2.05 * W < most["go on", "folder"]
