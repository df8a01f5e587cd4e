"""What an author changes in a copy of train_sft.py: state of its own is kept, and what would go wrong in
silence is refused."""

import importlib.util
import stat
import sys

from accelerate import Accelerator
from common.args import CommonArgs
from common.errors import UserError
from common.run.metrics import Metrics
import pytest
import torch
import transformers

from tests.conftest import GRPO, ROOT, SFT, run_script, torchrun, train_metrics
from tests.data.rows import process
from tests.tiny import SIZE

OPTIMIZER = "    optimizer = make_optimizer(args, model)\n"
PREPARE = (
    "    model, optimizer = run.prepare(model, optimizer)  # Accelerate's prepare; then resumes the run\n"
)
LOOP = "    for step in run.steps(last=len(windows)):\n"
STEP = "            optimizer.step()\n"
IMPORT = "import math\n"
HEAD = '    model.extra["head"] = torch.nn.Linear(8, 8)\n'

DIRECT = ("        run.retry_smaller(gradients, window)", "        gradients(window)")


def edited(*edits):
    source = (ROOT / "train_sft.py").read_text()
    for old, new in [(IMPORT, f"{IMPORT}import torch\n"), *edits]:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


@pytest.fixture
def script(monkeypatch, tmp_path):
    """script(*edits): from now on train_sft.py is a copy with each (old, new) applied."""

    def use(*edits):
        path = tmp_path / "train_mine.py"
        path.write_text(edited(*edits))
        spec = importlib.util.spec_from_file_location("train_sft", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "train_sft", module)
        spec.loader.exec_module(module)

    return use


@pytest.mark.parametrize(
    ("kept", "problem"),
    [
        ("torch.optim.SGD([torch.ones(1)])", "kept.pt does not hold .*another"),
        ("Odd()", "the state of 'another' holds a builtins.set"),
    ],
    ids=["missing from the checkpoint", "could not be read again"],
)
def test_state_that_is_not_kept_ends_the_run(kept, problem, script, launch):
    words = [*SFT, "--max_steps", "2", "--save_steps", "1", "--accept_changes"]
    odd = "\n\nclass Odd:\n    def state_dict(self):\n        return {'seen': {1}}\n"
    launch("sft", *words, "--max_steps", "1")
    script(
        ("\n\n@dataclass\n", f"{odd}\n\n@dataclass\n"),
        (PREPARE, f'{PREPARE}    run.keep("another", {kept})\n'),
    )
    with pytest.raises(UserError, match=problem):
        launch("sft", *words)


def test_a_dict_is_kept_and_looked_at_in_each_save(script, launch):
    """What is put into it later could not be read again; a numpy number, for instance."""
    keep = (PREPARE, f'{PREPARE}    seen = run.keep("seen", {{}})\n')
    count = (
        '            seen["steps"] = seen.get("steps", 0) + 1\n            assert seen["steps"] == step + 1\n'
    )
    words = [*SFT, "--save_steps", "1", "--accept_changes"]
    script(keep, (STEP, STEP + count))
    launch("sft", *words, "--max_steps", "2")
    launch("sft", *words, "--max_steps", "4")  # goes on with the 2
    script(keep, (STEP, f"{STEP}            seen['norm'] = grad_norm.numpy()[()]\n"))
    with pytest.raises(UserError, match="the state of 'seen' holds a numpy.float32"):
        launch("sft", *words, "--max_steps", "6")


@pytest.mark.parametrize(
    ("place", "module", "named"),
    [
        (OPTIMIZER, HEAD, "model.extra.head.weight is not in the optimizer"),
        (PREPARE, HEAD.replace("model", "accelerator.unwrap_model(model)"), "extra.head.weight"),
        (OPTIMIZER, "    model.head = torch.nn.Linear(8, 8)\n", "model.head.weight would never be saved"),
    ],
    ids=["after make_optimizer", "after prepare", "beside model.extra"],
)
def test_modules_that_are_not_trained_or_saved_are_refused(place, module, named, script, launch, tmp_path):
    script((place, f"{place}{module}"))
    with pytest.raises(UserError, match=named):
        launch("sft", *SFT)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_experts_are_balanced_wherever_gradients_are_computed(script, launch, tmp_path):
    config = transformers.MixtralConfig(
        **SIZE | {"vocab_size": 512, "num_local_experts": 4, "max_position_embeddings": 256}
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "moe")
    transformers.AutoTokenizer.from_pretrained("data/base_model").save_pretrained(tmp_path / "moe")
    script(DIRECT)
    with pytest.raises(UserError, match="outside of run.retry_smaller"):
        launch("sft", *SFT, "--model_name_or_path", tmp_path / "moe")


def test_a_forgotten_zero_grad_is_refused(script, launch):
    script(("        optimizer.zero_grad()\n", "        optimizer.zero_grad(set_to_none=step < 1)\n"))
    launch("sft", *SFT, "--max_steps", "3")
    script(("        optimizer.zero_grad()\n", ""))
    with pytest.raises(UserError, match="optimizer.zero_grad"):
        launch("sft", *SFT, "--max_steps", "3", "--overwrite_output_dir")


def test_random_numbers_of_any_library_are_those_of_the_step(script, launch):
    """A run that goes on draws in its third step what a run in one piece does."""
    drawn = "            run.metrics.add(drawn=random.random() + np.random.rand() + torch.rand(()).item())\n"
    log = "            run.metrics.add(mask,"
    libraries = "import random\n\nimport numpy as np\n"
    script(("import math\nimport torch\n", f"import math\n{libraries}import torch\n"), (log, f"{drawn}{log}"))
    words = [*SFT, "--logging_steps", "1", "--save_steps", "2"]
    whole = launch("sft", *words, "--max_steps", "3", output="whole")
    for steps in ("2", "3"):
        parts = launch("sft", *words, "--max_steps", steps)
    one, other = ([row["drawn"] for row in train_metrics(folder)] for folder in (whole, parts))
    assert one == other and len(set(one)) == 3


def test_a_gradient_of_0_is_said(script, launch, capsys):
    """After five steps in a row; the run goes on, as in GRPO, where all rewards may be equal for a while."""
    script(("weights = mask / N", "weights = 0 * mask / N"))
    launch("sft", *SFT, "--max_steps", "7")
    assert capsys.readouterr().out.count("step 5: the gradient was exactly 0 in 5 steps in a row") == 1


@pytest.mark.parametrize("is_forgotten", [True, False])
def test_a_forgotten_temperature_is_said(is_forgotten, launch, capsys, monkeypatch, tmp_path):
    """The log-probabilities of a first update are those of the sampler."""
    source = (ROOT / "train_grpo.py").read_text()
    call = "batch, temperature=args.temperature, entropy=True"
    assert source.count(call) == 1
    (tmp_path / "train_mine.py").write_text(
        source.replace(call, "batch, entropy=True") if is_forgotten else source
    )
    spec = importlib.util.spec_from_file_location("train_grpo", tmp_path / "train_mine.py")
    copy = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "train_grpo", copy)
    spec.loader.exec_module(copy)
    launch(
        "grpo",
        *GRPO,
        "--temperature",
        "2.0",
        "--max_steps",
        "1",
        "--reward_funcs",
        "regex:[aeo]",
        "exact_number",
    )
    assert capsys.readouterr().out.count("is the temperature missing in a call of the model?") == is_forgotten


def test_weights_of_another_shape_name_their_metric(tmp_path):
    metrics = Metrics(Accelerator(cpu=True), CommonArgs(output_dir=str(tmp_path)))
    with pytest.raises(ValueError, match=r"my_loss is \(3, 1\), and its weights are \(3,\)"):
        metrics.add(torch.ones(3), my_loss=torch.ones(3, 1))
    metrics.add(torch.ones(3), of_all=torch.tensor(2.0))
    assert metrics.window_means()["of_all"] == 2.0


@pytest.mark.parametrize("name", ["step", "grad_norm", "learning_rate", "cpu_seconds"])
def test_a_metric_does_not_take_the_place_of_a_lines_own(name, tmp_path):
    metrics = Metrics(Accelerator(cpu=True), CommonArgs(output_dir=str(tmp_path)))
    for add in (metrics.add, metrics.add_sum):
        with pytest.raises(UserError, match=f"a metric is called {name}"):
            add(**{name: 1.0})


def test_a_maximum_is_of_what_counts(tmp_path):
    """Not of prompts, nor of a filler, which has none."""
    metrics = Metrics(Accelerator(cpu=True), CommonArgs(output_dir=str(tmp_path)))
    metrics.add(torch.zeros(2), far_max=torch.tensor([7.0, 8.0]), none_max=torch.tensor([1.0, 2.0]))
    metrics.add(torch.tensor([0.0, 0.5, 1.0]), far_max=torch.tensor([9.0, -3.0, -4.0]))
    metrics.add(far_max=-5.0)
    metrics.close_window()
    found = metrics.reduce()
    assert found["far_max"] == [-3.0, 1.0] and found["none_max"][1] == 0


def test_the_rate_of_a_group_is_that_of_the_script(script, launch):
    """Also after a resume: a checkpoint does not bring back the old one."""
    for rate, steps in ((3.0, "2"), (5.0, "4")):
        check = f"            assert optimizer.param_groups[-1]['lr'] == {rate} * lr_at(step)\n"
        own = HEAD + OPTIMIZER.replace("model)", f"model, extra_lr_multiplier={rate})")
        script((OPTIMIZER, own), (STEP, f"{check}{STEP}"))
        launch("sft", *SFT, "--max_steps", steps, "--save_steps", "2", "--accept_changes")


def test_what_a_run_leaves_is_readable_as_the_umask_says(launch):
    output = launch("sft", *SFT, "--max_steps", "2", "--save_steps", "1")
    files = [path for path in output.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"model.safetensors", "optimizer.pt"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {
        stat.S_IMODE((output / "args.yaml").stat().st_mode)
    }


def test_a_run_whose_settings_are_deleted_keeps_its_weights(script, launch):
    """args.yaml is written at the start; later saves do not need it."""
    delete = "            pathlib.Path(args.output_dir, 'args.yaml').unlink(missing_ok=True)\n"
    script((STEP, "            import pathlib\n" + delete + STEP))
    output = launch("sft", *SFT, "--max_steps", "2", "--save_steps", "1")
    assert not (output / "args.yaml").exists()
    assert (output / "model.safetensors").exists()
    assert (output / "checkpoint-2" / "args.yaml").exists()


# --- two processes ------------------------------------------------------------------------------------------


def run_two(tmp_path, token_cache, *edits):
    (tmp_path / "train_mine.py").write_text(edited(*edits))
    words = [str(tmp_path / "train_mine.py"), *SFT, "--max_steps", "2", "--output_dir", str(tmp_path / "out")]
    return run_script([*torchrun(), *words, "--dataset_cache_dir", str(token_cache)], PYTHONPATH=str(ROOT))


FAILURES = {
    "gradients that nobody adds up": (
        [(OPTIMIZER, HEAD + OPTIMIZER), DIRECT],
        "outside of run.retry_smaller",
    ),
    "a state of its own on each": (
        [(PREPARE, f'{PREPARE}    run.keep("rank", {{"is": accelerator.process_index}})\n')],
        "the state of 'rank' differs between the processes",
    ),
    "one process alone": (
        [
            (
                LOOP,
                f"{LOOP}        if step and accelerator.process_index == 1:\n            raise UserError('mine')\n",
            )
        ],
        "[rank 1] error: mine",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", FAILURES)
def test_one_line_from_two_processes(what, tmp_path, token_cache):
    edits, line = FAILURES[what]
    run = run_two(tmp_path, token_cache, *edits)
    assert run.returncode != 0 and not (tmp_path / "out" / "model.safetensors").exists()
    said = run.stderr.split("ChildFailedError")[0]
    assert said.count(line) == 1, run.stderr
    assert 'train_mine.py", line' not in said, run.stderr


def test_a_reward_per_token_trains_where_the_completions_own_is_none(tmp_path):
    """What is run through the model is decided by the field that a copy of train_grpo.py writes."""
    old, new = "np.float32(c.advantage)", "np.array([0.0] * len(prompt) + c.ids, np.float32)"
    source = (ROOT / "train_grpo.py").read_text()
    assert source.count(old) == 1
    path = tmp_path / "train_mine.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("train_mine", path)
    copy = sys.modules["train_mine"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    completions = []
    for ids in ([5, 0], [0, 0], [0, 7], [0, 0]):
        completions.append(copy.Completion({"prompt_ids": [1]}, ids, [-1.0, -1.0], True, "", [0.0], True))
    [window] = copy.make_windows(completions, copy.Args(dataset_name=["x"]), process())
    assert [sequence["input_ids"].tolist() for sequence in window.sequences] == [[1, 5, 0], [1, 0, 7]]
    assert window.sequences[0]["advantage"].tolist() == [0, 5, 0]
