"""What the pages say of the scripts is so: quoted code, metrics, errors, lengths, the Chinese front page, the notebook."""

import json
import re
import textwrap
from pathlib import Path

from common.errors import UserError
from tests.conftest import ROOT, demo

import pytest

DOCS = ROOT / "docs"
STAGES = ("pretrain", "sft", "dpo", "grpo")
TINY = "--max_steps 2 --max_train_samples 40 --max_eval_samples 4 --eval_max_new_tokens 4 --logging_steps 1 --save_steps 0".split()
SMALL = {
    "pretrain": [*TINY, *"--vocab_size 300 --hidden_size 32 --num_layers 1 --per_device_train_batch_size 2".split()],
    "sft": [*TINY, "--per_device_train_batch_size", "2", "--model_name_or_path", "data/base_model"],
    "dpo": [*TINY, "--per_device_train_batch_size", "2", "--model_name_or_path", "data/base_model"],
    "grpo": [*TINY, "--model_name_or_path", "data/base_model", "--per_device_train_batch_size", "8"]
    + ["--max_completion_length", "8", "--num_generations", "4"],
}


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", text, re.S | re.M)


# --- how the loop works -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_the_code_that_a_page_quotes_is_in_the_script(stage):
    script = page(f"train_{stage}.py")
    quoted = blocks(page(f"docs/loop_{stage}.md"), "python")
    assert len(quoted) >= 3
    for block in quoted:
        assert block in script, block
    formula = re.search(r"^    loss = .*(?:\n {10,}.*)*", page(f"docs/loop_{stage}.md"), re.M)[0]
    assert textwrap.dedent(formula).splitlines()[0].split("  ")[0] in script


def test_the_pages_of_the_stages_name_flags_and_metrics_that_exist():
    words = set(re.findall(r"`--(\w+)", "".join(page(f"docs/loop_{stage}.md") for stage in STAGES)))
    known = {name for stage in STAGES for name in __import__(f"train_{stage}").Args.__dataclass_fields__}
    assert words <= known, words - known


# --- metrics ------------------------------------------------------------------------------------------------------------


def explained() -> set[str]:
    """The names of docs/metrics.md, of which some stand for several: rewards/<function>/mean."""
    return set(re.findall(r"`([\w/<>]+)`", page("docs/metrics.md")))


@pytest.mark.slow
def test_every_metric_that_a_script_writes_is_explained(launch, tmp_path):
    runs = {"grpo_several": ["--beta", "0.1", "--num_iterations", "2", "--eval_temperatures", "0", "0.7"]}
    runs |= {"pretrain_moe": ["--num_experts", "4", "--hidden_size", "64"], "sft_two": []}
    patterns = [re.escape(name).replace("<function>", r"[\w.]+").replace("<source>", r"[\w.-]+") for name in explained()]
    patterns = [re.sub(r"<T>", r"[\\d.]+", pattern) for pattern in patterns]
    for name in (*STAGES, *runs):
        stage = name.split("_")[0]
        words = ["--config", demo(stage), *SMALL[stage], *runs.get(name, [])]
        if name == "sft_two":
            words += ["--dataset_name", "data/sft/train.jsonl", "data/sft/validation.jsonl", "--eval_fraction", "0.2"]
        output = launch(stage, *words, output=name)
        keys = {key for line in (output / "metrics.jsonl").read_text().splitlines() for key in json.loads(line)}
        keys -= {"step"}
        assert len(keys) > 5
        for key in keys:
            plain = key.removeprefix("eval_")
            assert any(re.fullmatch(p, key) or re.fullmatch(p, plain) for p in patterns), (name, key)


def test_the_names_of_metrics_in_the_page_are_in_the_code():
    code = "".join(path.read_text() for path in [*ROOT.glob("common/**/*.py"), *(ROOT / f"train_{s}.py" for s in STAGES)])
    for name in explained():
        plain = name.removeprefix("eval_")
        for part in re.split(r"<\w+>", plain):
            part = part.strip("/_").removesuffix("_t")
            assert part in code or part in ("exact_number", "regex"), name
