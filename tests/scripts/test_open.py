"""What an idea may need of `common` is open: any field, any module (any output: test_small_experiments.py).

Each test writes a script into a temporary folder, as a reader would: a copy of train_sft.py with a few lines
changed. It is run from there, is killed, goes on, and exports, without a line changed in `common/`.
"""

import json
import signal
import sys

import numpy as np
import pytest
from safetensors.torch import load_file
import torch

from tests.conftest import ROOT, read_metrics, run_script, train_metrics, write_rows
from tests.scripts.one_step import exact, token_scores
from tests.scripts.texts import BASE, ids_of, prompt_ids, tokenizer

COMMON = ["--model_name_or_path", str(BASE), *"--eval_steps 0 --logging_steps 1 --save_steps 0".split()]
COMMON += "--lr_scheduler_type constant --warmup_steps 0 --learning_rate 1e-3 --num_samples 0".split()
BLOCKS = "import common.data.stream\ncommon.data.stream.BLOCK_ROWS = {}\n"  # of a stream: all rows
KILL = """        if step == 3 and not os.path.exists(args.output_dir + "/killed"):
            open(args.output_dir + "/killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        if run.checkpoint(step):"""


def changed(**edits: tuple[str, str]) -> str:
    """train_sft.py with each edit (old, new) applied; its old text stands there exactly once."""
    source = (ROOT / "train_sft.py").read_text()
    edits["killed"] = ("        if run.checkpoint(step):", KILL)
    edits["imports"] = ("import math\n", "import math\nimport os\nimport signal\n")
    edits["libraries"] = (
        "from common.run import Run\n",
        "from common.run import Run\nimport numpy as np\nimport torch\n",
    )
    for name, (old, new) in edits.items():
        assert source.count(old) == 1, (
            f"{name}: the text to change stands {source.count(old)} times in train_sft.py"
        )
        source = source.replace(old, new)
    return source


@pytest.fixture
def train(tmp_path, monkeypatch):
    """train(source, *flags, output=..., killed=False): run a script; returns its output folder."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def launch(source, *flags, output="out", killed=False):
        script, folder = tmp_path / "train_mine.py", tmp_path / output
        script.write_text(source)
        folder.mkdir(exist_ok=True)
        if not killed:
            (folder / "killed").touch()
        words = [
            *COMMON,
            "--output_dir",
            str(folder),
            "--dataset_cache_dir",
            str(tmp_path / "cache"),
            *map(str, flags),
        ]
        run = run_script([sys.executable, str(script), *words])
        assert run.returncode == (-signal.SIGKILL if killed else 0), run.stderr[-4000:]
        return folder

    return launch


def write_chats(path, seed, count=12):
    """Chats with a number of their own and a weight, of uneven length."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        answer = " ".join(str(int(n)) for n in rng.integers(0, 99, int(rng.integers(1, 12))))
        messages = [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": answer}]
        rows.append(
            {
                "messages": messages,
                "weight": round(float(rng.random()) + 0.5, 3),
                "score": int(rng.integers(0, 2**30)),
            }
        )
    write_rows(path, rows)
    return rows


# --- any field ----------------------------------------------------------------------------------------------

FIELDS = {
    "encode": (
        "    return tokenize_chat(as_chat(row), tokenizer, train_on=args.train_on, max_length=args.max_length)\n",
        "    (sequence,) = tokenize_chat(as_chat(row), tokenizer, max_length=args.max_length)\n"
        "    n = len(sequence['input_ids'])\n"
        "    fades = np.linspace(1.0, 0.2, n) * row['weight']\n"
        "    return [sequence | {'token_weight': fades, 'score': row['score'], 'weight': row['weight']}]\n",
    ),
    "count": ('window.total("loss_mask")', 'window.total("loss_mask", "token_weight")'),
    "loss": ("weights = mask / N", 'weights = batch["token_weight"] * mask / N'),
    "logged": (
        "            run.metrics.add(mask, loss=-out.logps,",
        "            run.metrics.add_sum(weighted=loss)\n"
        '            run.metrics.add(batch["sequence_mask"], score=batch["score"].double(), weight=batch["weight"])\n'
        '            assert batch["score"].dtype == torch.int64\n'
        "            run.metrics.add(mask, loss=-out.logps,",
    ),
}


def by_hand(rows, max_length):
    """The weighted loss of all rows in one window, in float64, one sequence at a time."""
    lm, total, weights = exact(BASE), 0.0, 0.0
    for row in rows:
        ids = ids_of(tokenizer().apply_chat_template(row["messages"], tokenize=False))[:max_length]
        fades = np.linspace(1.0, 0.2, len(ids)) * row["weight"]
        # not trained
        start, last = len(prompt_ids(row["messages"][:1])), len(ids) - (ids[-1] == ids_of("\n")[0])
        with torch.no_grad():
            total -= sum(fades[start:last] * token_scores(lm, ids)[0].numpy()[start - 1 : last - 1])
        weights += sum(fades[start:last])
    return total / weights


WAYS = {  # flags, files of rows, sequences of a micro-batch (0: all)
    "plain": ("", 1, 0),
    "packed into one row": ("--packing --max_length 2000", 1, 1),
    "streamed": ("--dataset_streaming --max_length 512", 1, 0),
    "filled by tokens": ("--max_tokens_per_batch 4000 --max_steps -1", 1, 0),
    "cut": ("--max_length 14", 1, 0),
    "of two sources": ("", 2, 0),
}


@pytest.mark.parametrize(
    "way", ["plain", *(pytest.param(way, marks=pytest.mark.slow) for way in [*WAYS][1:])]
)
def test_any_field_of_encode_arrives_in_the_batch(way, train, tmp_path):
    """A weight for each token and a number for each sequence."""
    flags, files, batch = WAYS[way]
    names = [tmp_path / f"{i}.jsonl" for i in range(files)]
    rows = [row for i, name in enumerate(names) for row in write_chats(name, seed=i)]
    one_window = ["--max_steps", "1", "--per_device_train_batch_size", batch or len(rows)]
    source = changed(**FIELDS).replace("import torch\n", f"import torch\n{BLOCKS.format(len(rows))}")
    (row,) = train_metrics(train(source, "--dataset_name", *names, *one_window, *flags.split()))
    assert row["weighted"] == pytest.approx(by_hand(rows, 14 if way == "cut" else 1024), rel=1e-4)
    assert row["score"] == np.mean([r["score"] for r in rows])  # not rounded to float32
    assert row["weight"] == pytest.approx(np.mean([r["weight"] for r in rows]), rel=1e-6)


RATERS = FIELDS | {
    "encode": (
        FIELDS["encode"][0],
        "    (sequence,) = tokenize_chat(as_chat(row), tokenizer, max_length=args.max_length)\n"
        "    trained = sequence['loss_mask']\n"
        "    return [\n"
        "        sequence | {'token_weight': trained * weight, 'score': i, 'weight': weight}\n"
        "        for i, weight in enumerate(row['raters'])\n"
        "    ]\n",
    ),
}


@pytest.mark.slow
def test_an_answer_may_have_any_number_of_raters(train, tmp_path):
    """Each rating is a sequence of its own; their number differs from row to row."""
    rows = write_chats(tmp_path / "rows.jsonl", seed=0)
    for i, row in enumerate(rows):
        row["raters"] = [0.5 + n for n in range(i % 3 + 1)]
    write_rows(tmp_path / "rows.jsonl", rows)
    lm, total, weights = exact(BASE), 0.0, 0.0
    for row in rows:
        ids = ids_of(tokenizer().apply_chat_template(row["messages"], tokenize=False))
        start, last = len(prompt_ids(row["messages"][:1])), len(ids) - 1  # a line break, not trained
        with torch.no_grad():
            total -= sum(row["raters"]) * float(token_scores(lm, ids)[0][start - 1 : last - 1].sum())
        weights += sum(row["raters"]) * (last - start)
    source = changed(**RATERS).replace("import torch\n", f"import torch\n{BLOCKS.format(len(rows))}")
    flags = ["--dataset_name", tmp_path / "rows.jsonl", "--max_steps", "1"]
    (row,) = train_metrics(train(source, *flags, "--per_device_train_batch_size", len(rows)))
    assert row["weighted"] == pytest.approx(total / weights, rel=1e-4)


# --- any module ---------------------------------------------------------------------------------------------

HEAD = {
    "made": (
        "    optimizer = make_optimizer(args, model)\n",
        '    model.extra["value"] = torch.nn.Linear(model.config.hidden_size, 1)\n    optimizer = make_optimizer(args, model)\n',
    ),
    "loss": (
        "                    out = model(batch, nll_weights=weights)\n"
        "                    loss = out.nll  # the sum -Σ_t m_t/N · log p(token_t)   <- the algorithm\n",
        '                    out = model(batch, nll_weights=weights, extra=["value"])\n'
        '                    left = torch.tanh(0.1 * batch["position_ids"][0])\n'
        '                    error = (out.extra["value"][:, 0] - left) ** 2\n'
        "                    loss = out.nll + (error * mask).sum() / N\n",
    ),
    "logged": (
        "            run.metrics.add(mask, loss=-out.logps,",
        "            run.metrics.add(mask, value_error=error, loss=-out.logps,",
    ),
}


@pytest.fixture
def flags(tmp_path):
    write_chats(tmp_path / "rows.jsonl", seed=0, count=24)
    return ["--dataset_name", tmp_path / "rows.jsonl", *"--max_steps 6 --save_steps 2".split()]


@pytest.mark.slow
def test_a_value_head_is_trained_killed_resumed_and_exported_bit_for_bit(train, flags):
    whole = train(changed(**HEAD), *flags, output="whole")
    found = [row["value_error"] for row in train_metrics(whole)]
    assert found[-1] < 0.8 * found[0], "the head learns"
    train(changed(**HEAD), *flags, output="again", killed=True)
    again = train(changed(**HEAD), *flags, output="again")
    assert (again / "checkpoint-6" / "extra.safetensors").exists()
    assert read_metrics(again) == read_metrics(whole)
    for name in ("model", "extra"):
        one, other = (load_file(folder / f"{name}.safetensors") for folder in (whole, again))
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.slow
def test_the_head_that_is_exported_is_that_of_the_best_step_also_beside_a_merged_adapter(train, flags):
    pytest.importorskip("peft")
    flags += ["--eval_dataset_name", flags[1], *"--use_peft --merge_lora --save_steps 1".split()]
    flags += "--eval_steps 1 --save_total_limit 9 --max_steps 4 --save_best max:eval_loss".split()
    output = train(changed(**HEAD), *flags, "--learning_rate", "3e-3")
    best = json.loads((output / "summary.json").read_text())["best"]["step"]
    assert best < 4  # of a loss that falls the largest one
    exported, wanted, last = (
        load_file(f / "extra.safetensors")
        for f in (output, output / f"checkpoint-{best}", output / "checkpoint-4")
    )
    assert all(
        torch.equal(exported[name], wanted[name]) and not torch.equal(exported[name], last[name])
        for name in wanted
    )
