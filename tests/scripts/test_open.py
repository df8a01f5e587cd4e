"""What an idea may need of `common` is open: any field, any output, any module.

Each test writes a script into a temporary folder, as a reader would: a copy of train_sft.py with a few lines changed. It is
run from there, is killed, goes on, and exports, without a line changed in `common/`.
"""

import json
import os
import signal
import sys

import numpy as np
import pytest
from safetensors.torch import load_file
import torch

from tests.conftest import ROOT, free_port, read_metrics, run_script, torchrun, train_metrics
from tests.scripts.one_step import BASE, exact, gradient_of, ids_of, logits_of, norm, token_scores, tokenizer

COMMON = ["--model_name_or_path", str(BASE), "--eval_steps", "0", "--logging_steps", "1", "--save_steps", "0"]
COMMON += ["--lr_scheduler_type", "constant", "--warmup_steps", "0", "--learning_rate", "1e-3", "--num_samples", "0"]
BLOCKS = "import common.extras.stream\ncommon.extras.stream.BLOCK_ROWS = {}\n"  # of a stream: all rows
KILL = """        if step == 3 and not os.path.exists(args.output_dir + "/killed"):
            open(args.output_dir + "/killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if run.checkpoint(step):"""


def changed(**edits: tuple[str, str]) -> str:
    """train_sft.py with each edit (old, new) applied; its old text stands there exactly once."""
    source = (ROOT / "train_sft.py").read_text()
    edits["killed"] = ("        if run.checkpoint(step):", KILL)
    edits["imports"] = ("import math\n", "import math\nimport os\nimport signal\n")
    edits["libraries"] = ("from common.run import Run\n", "from common.run import Run\nimport numpy as np\nimport torch\n")
    for name, (old, new) in edits.items():
        assert source.count(old) == 1, f"{name}: the text to change stands {source.count(old)} times in train_sft.py"
        source = source.replace(old, new)
    return source


@pytest.fixture
def train(tmp_path, monkeypatch):
    """train(source, *flags, output=..., processes=1, fsdp=False, killed=False): run a script; returns its output folder."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def launch(source, *flags, output="out", processes=1, fsdp=False, killed=False):
        script, folder = tmp_path / "train_mine.py", tmp_path / output
        script.write_text(source)
        folder.mkdir(exist_ok=True)
        if not killed:
            (folder / "killed").touch()
        command = [sys.executable]
        if processes > 1:
            command += ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/cpu_ddp.yaml"]
            command += ["--main_process_port", str(free_port())]
        if fsdp:
            from tests.run.fsdp import LAUNCHER

            launcher = tmp_path / "launcher.py"
            launcher.write_text(LAUNCHER.replace('f"train_{stage}"', '"train_mine"'))
            command = torchrun()
            command += [str(launcher)]
        words = ["sft", "no"] if fsdp else [str(script)]
        words += [*COMMON, "--output_dir", str(folder), "--dataset_cache_dir", str(tmp_path / "cache"), *map(str, flags)]
        run = run_script([*command, *words])
        assert run.returncode == (-signal.SIGKILL if killed else 0), run.stderr[-4000:]
        return folder

    return launch


def write_rows(path, seed, count=12):
    """Chats with a number of their own and a weight, of uneven length."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        answer = " ".join(str(int(n)) for n in rng.integers(0, 99, int(rng.integers(1, 12))))
        messages = [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": answer}]
        rows.append(
            {"messages": messages, "weight": round(float(rng.random()) + 0.5, 3), "score": int(rng.integers(0, 2**30))}
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


# --- any field ------------------------------------------------------------------------------------------------------

FIELDS = {
    "encode": (
        "    return [tokenize_chat(as_chat(row), tokenizer, train_on=args.train_on, max_length=args.max_length)]\n",
        "    sequence = tokenize_chat(as_chat(row), tokenizer, train_on=args.train_on, max_length=args.max_length)\n"
        "    n = len(sequence['input_ids'])\n"
        "    fades = np.linspace(1.0, 0.2, n) * row['weight']\n"
        "    return [sequence | {'token_weight': fades, 'score': row['score'], 'weight': row['weight']}]\n",
    ),
    "count": ('window.total("loss_mask")', 'window.total("loss_mask", "token_weight")'),
    "loss": ("nll_weights=mask / N)", 'nll_weights=batch["token_weight"] * mask / N)'),
    "logged": (
        "            run.metrics.add(mask, loss=-out.logps,",
        "            run.metrics.add_sum(weighted=loss)\n"
        '            run.metrics.add(batch["sequence_mask"], score=batch["score"].double(), weight=batch["weight"])\n'
        '            assert batch["score"].dtype == torch.int64\n'
        "            run.metrics.add(mask, loss=-out.logps,",
    ),
}


def sequences(rows, max_length=1024):
    """(ids, the first that is trained) of each row."""
    for row in rows:
        ids = ids_of(tokenizer().apply_chat_template(row["messages"], tokenize=False))[:max_length]
        prompt = tokenizer().apply_chat_template(row["messages"][:1], tokenize=False, add_generation_prompt=True)
        yield ids, len(ids_of(prompt))


def by_hand(rows, max_length=1024):
    """The weighted loss of all rows in one window, in float64, one sequence at a time."""
    lm, total, weights = exact(BASE), 0.0, 0.0
    for row, (ids, start) in zip(rows, sequences(rows, max_length), strict=True):
        fades = np.linspace(1.0, 0.2, len(ids)) * row["weight"]
        last = len(ids) - (ids[-1] == ids_of("\n")[0])  # the line break after the answer is not trained
        with torch.no_grad():
            total -= sum(fades[start:last] * token_scores(lm, ids)[0].numpy()[start - 1 : last - 1])
        weights += sum(fades[start:last])
    return total / weights


@pytest.mark.parametrize(
    "flags",
    [
        [],
        pytest.param(["--packing"], marks=pytest.mark.slow),
        pytest.param(["--dataset_streaming"], marks=pytest.mark.slow),
        pytest.param(["--max_tokens_per_batch", "4000", "--max_steps", "-1"], marks=pytest.mark.slow),
        pytest.param(["--max_length", "14"], marks=pytest.mark.slow),
        pytest.param(["--packing", "false"], marks=pytest.mark.slow),
    ],
    ids=["plain", "packing", "streaming", "max tokens", "truncated", "two sources"],
)
def test_any_field_of_encode_arrives_in_the_batch(flags, train, tmp_path):
    """A weight for each token and a number for each sequence: through the cache, streaming, packs, truncation, sources."""
    rows = write_rows(tmp_path / "rows.jsonl", seed=0)
    data = [tmp_path / "rows.jsonl"]
    if flags == ["--packing", "false"]:
        rows += write_rows(tmp_path / "more.jsonl", seed=1)
        data.append(tmp_path / "more.jsonl")
    one_window = ["--max_steps", "1", "--per_device_train_batch_size", "1" if flags == ["--packing"] else len(rows)]
    if flags == ["--packing"]:  # one pack holds them all
        one_window += ["--max_length", "2000"]
    if flags == ["--dataset_streaming"]:
        one_window += ["--max_length", "512"]
    source = changed(**FIELDS).replace("import torch\n", f"import torch\n{BLOCKS.format(len(rows))}")
    (row,) = train_metrics(train(source, "--dataset_name", *data, *one_window, *flags))
    expected = by_hand(rows, 14 if "14" in flags else 1024)
    assert row["weighted"] == pytest.approx(expected, rel=1e-4)
    assert row["score"] == np.mean([r["score"] for r in rows])  # not rounded to float32
    assert row["weight"] == pytest.approx(np.mean([r["weight"] for r in rows]), rel=1e-6)


# --- any output -----------------------------------------------------------------------------------------------------

SMOOTHED = {
    "loss": (
        "                    out = model(batch, nll_weights=mask / N)\n"
        "                    loss = out.nll  # -Σ_t m_t/N · log p(token_t)   <- the algorithm\n",
        "                    smooth = lambda logits, rows: logits.log_softmax(-1).mean(-1)\n"
        "                    out = model(batch, entropy=True, hidden=True, map_logits=smooth)\n"
        '                    mean_logp = torch.zeros_like(mask).index_put((batch["targets"],), out.mapped)\n'
        "                    loss = -((0.9 * out.logps + 0.1 * mean_logp) * mask).sum() / N\n"
        "                    assert out.hidden.shape[0] == len(mask)\n",
    ),
    "logged": (
        "            run.metrics.add(mask, loss=-out.logps,",
        "            run.metrics.add_sum(smoothed=loss)\n            run.metrics.add(mask, loss=-out.logps,",
    ),
}


def test_logits_are_open_label_smoothing(train, tmp_path):
    """Label smoothing needs all logits of a token: the loss and the gradient are those of torch's cross_entropy."""
    rows = write_rows(tmp_path / "rows.jsonl", seed=0)
    flags = ["--dataset_name", tmp_path / "rows.jsonl", "--max_steps", "1", "--per_device_train_batch_size", len(rows)]
    (found,) = train_metrics(train(changed(**SMOOTHED), *flags, "--max_grad_norm", "0"))
    lm, total, count = exact(BASE), 0.0, 0
    for ids, start in sequences(rows):
        logits, answer = logits_of(lm, ids)[start - 1 : -2], torch.tensor(ids[start:-1])
        total += torch.nn.functional.cross_entropy(logits, answer, label_smoothing=0.1, reduction="sum")
        count += len(answer)
    loss = total / count
    size = norm(gradient_of(lm, loss))
    assert found["smoothed"] == pytest.approx(loss.item(), rel=1e-5)
    assert found["grad_norm"] == pytest.approx(size, rel=1e-4)


# --- any module -----------------------------------------------------------------------------------------------------

HEAD = {
    "made": (
        "    optimizer = make_optimizer(args, model)\n",
        '    model.extra["value"] = torch.nn.Linear(model.config.hidden_size, 1)\n    optimizer = make_optimizer(args, model)\n',
    ),
    "loss": (
        "                    out = model(batch, nll_weights=mask / N)\n"
        "                    loss = out.nll  # -Σ_t m_t/N · log p(token_t)   <- the algorithm\n",
        '                    out = model(batch, nll_weights=mask / N, extra=["value"])\n'
        '                    left = torch.tanh(0.1 * batch["position_ids"][0])\n'
        '                    error = (out.extra["value"][:, 0] - left) ** 2\n'
        "                    loss = out.nll + (error * mask).sum() / N\n",
    ),
    "logged": (
        "            run.metrics.add(mask, loss=-out.logps,",
        "            run.metrics.add(mask, value_error=error, loss=-out.logps,",
    ),
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    write_rows(path, seed=0, count=24)
    return ["--dataset_name", path, "--max_steps", "6", "--save_steps", "2", "--max_grad_norm", "1"]


def tensors(folder):
    return {name: load_file(folder / f"{name}.safetensors") for name in ("model", "extra")}


@pytest.fixture(scope="module")
def whole(rows, tmp_path_factory):
    """The uninterrupted run on one process, of 8 conversations a step: its folder."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "train_mine.py").write_text(changed(**HEAD))
    (folder / "killed").touch()
    words = [*COMMON, "--output_dir", str(folder), "--dataset_cache_dir", str(folder / "cache"), *map(str, rows)]
    env = {"PYTHONPATH": str(ROOT)}
    os.environ |= env
    run = run_script([sys.executable, str(folder / "train_mine.py"), *words])
    assert run.returncode == 0, run.stderr[-4000:]
    return folder


def test_a_value_head_is_trained_killed_resumed_and_exported_bit_for_bit(whole, train, rows):
    found = [row["value_error"] for row in train_metrics(whole)]
    assert found[-1] < 0.8 * found[0], "the head learns"
    train(changed(**HEAD), *rows, output="again", killed=True)
    again = train(changed(**HEAD), *rows, output="again")
    assert (again / "checkpoint-6" / "extra.safetensors").exists()
    assert read_metrics(again) == read_metrics(whole)
    for name, expected in tensors(whole).items():
        for key, value in tensors(again)[name].items():
            assert torch.equal(value, expected[key]), (name, key)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True], ids=["DDP", "FSDP2"])
def test_a_value_head_on_two_processes(fsdp, whole, train, rows):
    """Killed and resumed, too. Sharded weights and the head are whole again in checkpoints and in the output folder."""
    rows = [*rows, "--per_device_train_batch_size", "4"]
    if not fsdp:  # the launcher does not hand on the signal as an exit code
        with pytest.raises(AssertionError):
            train(changed(**HEAD), *rows, output="two", processes=2, killed=True)
    two = train(changed(**HEAD), *rows, output="two", processes=1 if fsdp else 2, fsdp=fsdp)
    one, other = train_metrics(whole), train_metrics(two)
    assert [row["step"] for row in other] == list(range(1, 7))
    for a, b in zip(one, other, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
        assert b["value_error"] == pytest.approx(a["value_error"], rel=1e-3)
    for name, expected in tensors(whole).items():
        for key, value in tensors(two)[name].items():
            assert torch.allclose(value, expected[key], atol=1e-4), (name, key)


@pytest.mark.slow
def test_the_head_that_is_exported_is_that_of_the_best_step_also_beside_a_merged_adapter(train, rows):
    pytest.importorskip("peft")
    flags = [*rows, "--eval_dataset_name", rows[1], "--use_peft", "--merge_lora", "--save_steps", "1"]
    flags += ["--eval_steps", "1", "--save_total_limit", "9", "--max_steps", "4", "--save_best", "max:eval_loss"]
    output = train(changed(**HEAD), *flags, "--learning_rate", "3e-3")
    best = json.loads((output / "summary.json").read_text())["best"]["step"]
    assert best < 4  # of a loss that falls the largest one
    exported, wanted, last = (
        load_file(f / "extra.safetensors") for f in (output, output / f"checkpoint-{best}", output / "checkpoint-4")
    )
    assert all(torch.equal(exported[name], wanted[name]) and not torch.equal(exported[name], last[name]) for name in wanted)
