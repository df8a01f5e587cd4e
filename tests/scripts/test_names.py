"""Functions, methods, classes, files and flags that a page quotes exist: a name that was changed in the code
alone is found here.

What stands between backticks is looked up in the text of the sources. Commands in blocks are run by
test_pages.py.
"""

import ast
import functools
from pathlib import Path
import re

import pytest

from tests.conftest import DIFFS, ROOT, path_of

FOLDERS = ("docs", "experiments", "benchmarks")
PAGES = [*ROOT.glob("[A-Z]*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))]
PAGES = [path for path in PAGES if path.name not in ("CHANGELOG.md", "LOG.md")]  # they tell of what is gone
CODE = ("common", "experiments", "tools", "benchmarks", "accelerate_configs", "data")
COMMAND = re.compile(r"(python|accelerate|pip|git|cp|diff|vllm|ollama|hf|sbatch|scontrol|ruff|pytest|exec) ")
CLASS_OF = {"model": "FlatModel", "out": "Output"}  # of an object in the pages, if the name is another one
# Names of libraries, of other programs, and of what a reader has.
LIBRARIES = """
torch.optim.Muon datasets.map from_pretrained AutoModelForCausalLM AutoModelForSequenceClassification PeftModel
generate resize_token_embeddings save_to_disk state_dict load_state_dict mean len flock pytorch_model_fsdp_0
o_a_proj out_proj x_proj dt_proj num_mini_batches num_ppo_epochs kl_coef log_metric
END_OF_TURN_TOKEN END_RESPONSE end_of_utterance eot_id tool_response MALLOC_MMAP_THRESHOLD_
""".split()
FLAGS = """
config help limit model cpu num_machines num_processes machine_rank mixed_precision config_file main_process_ip
main_process_port include_path apply_chat_template output_path index-url private time
host port api-key max-model-len max-lora-rank enable-lora lora-modules generation-config logprobs-mode dtype
enforce-eager no-enable-chunked-prefill kv-cache-memory-bytes gpu-memory-utilization tensor-parallel-size modelfile
""".split()
FILES = """
my.py my_run.yaml my_rewards.py file.py train_mine.py train_weighted.py train_length.py train_z.py chats.jsonl
train_2.jsonl val.jsonl input.txt config_smollm1_135M.yaml theirs.yaml
""".split()


@functools.cache
def sources() -> dict[Path, str]:
    """The text of all code and settings, but for the tests."""
    paths = [*ROOT.glob("*.py"), *(path for folder in CODE for path in (ROOT / folder).rglob("*"))]
    paths += [path_of(name) for name in DIFFS]
    return {path: path.read_text() for path in paths if path.suffix in (".py", ".yaml", ".sh", ".js")}


@functools.cache
def words() -> set[str]:
    return {word for text in sources().values() for word in re.findall(r"\w+", text)}


@functools.cache
def members() -> dict[str, set[str]]:
    """{class: its methods and attributes}."""
    found: dict[str, set[str]] = {}
    for path, text in sources().items():
        tree = ast.parse(text if path.suffix == ".py" else "")
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                code = "\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno])
                names = found.setdefault(node.name, set())
                for pattern in (r"^ +def (\w+)", r"\bself\.(\w+)", r"^    (\w+): "):
                    names.update(re.findall(pattern, code, re.M))
    return found


@functools.cache
def functions() -> set[str]:
    pattern = re.compile(r"^ *(?:def|class) (\w+)", re.M)
    return {
        name for path, text in sources().items() if path.suffix == ".py" for name in pattern.findall(text)
    }


@functools.cache
def flags() -> set[str]:
    """Of all scripts and commands: fields of their arguments, and what argparse is told."""
    text = "\n".join(sources().values())
    patterns = (r'"--([\w-]+)"', r"^    (\w+): .*= arg\(", r"^ +(\w+)=\{\"")
    return {name for pattern in patterns for name in re.findall(pattern, text, re.M)}


@functools.cache
def files() -> list[str]:
    """All of the repository, with / in front."""
    folders = [path for path in ROOT.iterdir() if path.name not in (".git", ".venv", "outputs")]
    paths = [*folders, *(path for folder in folders for path in folder.rglob("*"))]
    return [f"/{path.relative_to(ROOT)}" for path in paths]


def quoted(page: Path) -> list[str]:
    """What stands between backticks, outside of blocks."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    return re.findall(r"`([^`\n]+)`", text)


def missing_files(span: str) -> list[str]:
    """A file of the sources has to be in the repository, by its path or the end of it; one that a run writes
    has to occur in the code."""
    found = []
    for path in re.findall(
        r"(?<![\w<>/.-])[\w*./-]*\w\.(?:py|md|yaml|sh|diff|txt|ipynb|jsonl?|html|safetensors)\b", span
    ):
        name = path.rpartition("/")[2]
        pattern = re.compile("/" + re.escape(path.lstrip("./")).replace(r"\*", r"\w*") + "$")
        is_written = path.endswith((".json", ".jsonl", ".html", ".safetensors", ".md", "args.yaml"))
        in_code = is_written and any(name in text for text in sources().values())
        if name not in FILES and not in_code and not any(pattern.search(file) for file in files()):
            found.append(path)
    return found


def missing_flags(span: str) -> list[str]:
    return [name for name in re.findall(r"(?<!\S)--([A-Za-z][\w-]*)", span) if name not in flags() | {*FLAGS}]


def missing_names(span: str) -> list[str]:
    """Names with a dot, an underline, a capital inside, or in front of a bracket."""
    found = []
    for chain, call in re.findall(r"(?<![\w/.\\-])([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(\(?)", span):
        *owners, name = chain.split(".")
        owner = CLASS_OF.get(owners[-1], owners[-1]) if owners else ""
        cls = next((cls for cls in members() if cls.lower() == owner.lower()), None)
        if chain in LIBRARIES or name in LIBRARIES or chain in CLASS_OF:
            is_there = True
        elif cls:
            is_there = name in members()[cls]
        elif call:
            is_there = name in functions()
        elif name.startswith("PLAINLOOP_"):  # and a flag
            is_there = name.removeprefix("PLAINLOOP_").lower() in {"", *flags(), *FLAGS}
        elif owners or "_" in name or re.search(r"[a-z][A-Z]", name):
            is_there = name in words() or name.removeprefix("eval_") in words()  # of a metric
        else:
            is_there = True
        if not is_there:
            found.append(chain)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_page_quotes_exists(page):
    missing = []
    for span in quoted(page):
        is_command = COMMAND.match(span) or span.startswith("--")
        is_commit = re.fullmatch("[0-9a-f]{7}", span)
        missing += missing_files(span)
        missing += missing_flags(span)
        if not is_command and not is_commit and page.name != "from_trl.md":  # which names what others have
            missing += missing_names(
                re.sub(r"\S*\.(py|md|yaml|sh|diff|txt|ipynb|jsonl?|html|safetensors)\b", "", span)
            )
    assert not missing, f"{page.name} quotes what is not there: {sorted(set(missing))}"


def test_a_name_that_is_not_there_is_found():
    assert missing_names("run.metrics.forget_window()") == ["run.metrics.forget_window"]
    assert (
        missing_names("window.totals(...)") == ["window.totals"] and missing_names("window.total(...)") == []
    )
    assert missing_names("flat_batches") == ["flat_batches"] and missing_names("flat_batch") == []
    assert missing_flags("--output_dirs x --output_dir y") == ["output_dirs"]
    assert missing_files("common/loss.py") == ["common/loss.py"] and missing_files("losses.py") == []
