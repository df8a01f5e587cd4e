"""The model card: README.md of an output folder, with the front matter that the Hub reads.

It tells what a model was trained from, on what, how, and what came of it, from the files of the run. What is of this machine
is not in it: paths, the names of local files and models, user names, anything that looks like a secret.
"""

import dataclasses
import getpass
import json
import re
import shlex
from pathlib import Path
from typing import Any

from common.args import CommonArgs, first_definition
from common.errors import say
from common.run.output_dir import CARD, is_sealed, replace_text, seal

import yaml

SHIPPED = (
    "data/base_model",
    "data/pretrain",
    "data/sft",
    "data/dpo",
    "data/grpo",
    "data/grpo_zero",
    "data/prompts",
    "data/style.py",
)
STAGES = {"pretrain": "pretraining", "sft": "supervised fine-tuning", "dpo": "preference optimisation (DPO)"}
STAGES |= {"grpo": "reinforcement learning from rewards (GRPO)"}
# Of this machine, or of how a run was carried out, and not of the model.
NOT_SHOWN = re.compile(
    r"output_dir|overwrite_output_dir|accept_changes|resume_from_checkpoint|dataset_cache_dir|dataset_num_proc|dry_run|run_name"
    r"|report_to|push_to_hub|hub_.*|alert_.*|.*(webhook|token|secret|password).*"
)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
FILE_NAME = re.compile(r"\.(jsonl?|txt|csv|tsv|parquet|arrow|gz|bz2|xz|zst|py|ya?ml|jinja)(:\w+)?$", re.I)
LOCAL = re.compile(r"(^|[\s=:,'\"({\[])(~|\.{1,2}|[A-Za-z]:)?[/\\]{1,2}\S|://|\b(hf_|sk-|ghp_|xox)\w{8,}", re.I)


def public_names(args: CommonArgs) -> set[str]:
    """The words among the arguments that name something on the Hub, or something that ships with this project.

    Called at the start of a run: a file that is gone later would look like a name of the Hub.
    """
    found = set()
    for field in dataclasses.fields(args):
        if NOT_SHOWN.fullmatch(field.name) or not first_definition(type(args), field.name)[1].metadata.get("is_path"):
            continue
        value = getattr(args, field.name)
        for word in value if isinstance(value, list) else [value]:
            name = _path_of(word) if isinstance(word, str) else None
            if name and (is_shipped(name) or _is_hub_name(name)):
                found.add(name)
    return found


def is_shipped(name: str) -> bool:
    place = re.sub(r"\.py:\w+$", ".py", name)
    return any(place == known or place.startswith(f"{known}/") for known in SHIPPED) and ".." not in place


def _is_hub_name(name: str) -> bool:
    return bool(HUB_NAME.fullmatch(name)) and not FILE_NAME.search(name) and not Path(name).expanduser().exists()


def _path_of(word: str) -> str:
    """What a word of --dataset_name names: a source with settings is a mapping, as JSON."""
    if word.lstrip().startswith("{"):
        try:
            return str(json.loads(word)["path"])
        except (ValueError, KeyError, TypeError):
            return ""
    return word


def write_card(folder: str | Path, args: CommonArgs, script: str, public: set[str], best_step: int | None = None) -> None:
    """Write README.md of an output folder, unless one lies there that is not, or no longer, as a run has written it."""
    path = Path(folder, CARD)
    if path.exists() and not is_sealed(path):
        say(f"{path} is not of a run, or was edited: it stays as it is, and no model card is written")
        return
    replace_text(path, make_card(folder, args, script, public, best_step))


def make_card(
    folder: str | Path,
    args: CommonArgs,
    script: str,
    public: set[str],
    best_step: int | None = None,
    step: int | None = None,
) -> str:
    """The card as text, from dataset.json, metrics.jsonl and summary.json of a run.

    public: see public_names. best_step: that of the evaluation whose checkpoint is exported. step: of a run that goes on.
    """
    folder = Path(folder)
    facts, summary = _read(folder / "dataset.json"), {} if step is not None else _read(folder / "summary.json")
    name = Path(script).stem.removeprefix("train_")
    adapter = args.use_peft and not args.merge_lora
    base, words = _origin(args, public, adapter)
    datasets = [found for word in args.dataset_name or [] if (found := _path_of(word)) in public and not is_shipped(found)]
    head: dict[str, Any] = {"library_name": "peft" if adapter else "transformers", "pipeline_tag": "text-generation"}
    if base:
        head |= {"base_model": base, "base_model_relation": "adapter" if adapter else "finetune"}
    if datasets:
        head["datasets"] = sorted(set(datasets))
    head["tags"] = ["plainloop", name] + (["lora"] if args.use_peft else [])
    title = f"A language model, after {STAGES.get(name, name)}"
    parts = [f"---\n{yaml.safe_dump(head, sort_keys=False).strip()}\n---", f"# {title}"]
    if step is not None:
        parts.append(f"Training goes on: this is step {step}.")
    parts += [f"## What it is\n\n{_what(args, facts, words, adapter)}", f"## Data\n\n{_data(facts, public)}"]
    parts += [f"## Training\n\n{_training(args, facts, summary, folder, name)}"]
    parts += [f"## Results\n\n{_results(folder, facts, public, best_step)}"]
    parts += [f"## Use\n\n{_use(adapter, facts)}", f"## Limits\n\n{_limits(facts)}"]
    command = f"accelerate launch {Path(script).name} {' '.join(_flags(args, public))}".strip()
    parts.append(f"## The command\n\n```bash\n{command}\n```\n\nNames in capitals stand for local files or models.")
    if versions := summary.get("versions"):
        listed = ", ".join(f"{library} {version}" for library, version in versions.items())
        parts.append(f"Python {summary['python']}, {listed}; trained with Plainloop.")
    return seal(_without_places("\n\n".join(parts)))


# --- the parts ------------------------------------------------------------------------------------------------------


def _origin(args: CommonArgs, public: set[str], adapter: bool) -> tuple[str | None, str]:
    """(the name on the Hub of what the model was made of, the same in words). A local model is followed to its own start."""
    name = args.model_name_or_path
    if not name:
        return None, "a new model, from random weights"
    steps, revision = [], f" (revision {args.model_revision})" if args.model_revision else ""
    known = name in public
    for _ in range(8):
        if known and not is_shipped(name):
            after = f", after {', then '.join(reversed(steps))}" if steps else ""
            # An adapter belongs on the model that it was trained on, not on that one's base.
            return (None if adapter and steps else name), f"[{name}](https://huggingface.co/{name}){revision}{after}"
        if known or is_shipped(name):
            after = f", after {', then '.join(reversed(steps))}" if steps else ""
            return None, f"the small base model that ships with Plainloop{after}"
        before = _settings(Path(name, "args.yaml"))
        script = Path(str(before.get("output_dir") or "")).name
        origin = before.get("model_name_or_path")
        if "output_dir" not in before:
            break
        steps.append(f"an earlier stage ({script})" if script in STAGES else "an earlier stage")
        if not isinstance(origin, str):
            return None, f"a new model, after {', then '.join(reversed(steps))}"
        name, known = origin, _is_hub_name(origin)
    return None, "a local model"


def _what(args: CommonArgs, facts: dict[str, Any], origin: str, adapter: bool) -> str:
    model = facts.get("model", {})
    sizes = model.get("parameters", {})
    lines = [f"- Trained from: {origin}", f"- Architecture: {model.get('class', 'unknown')}"]
    if sizes:
        lines.append(f"- Parameters: {sizes['all']:,}, of which {sizes['trained']:,} were trained")
    if adapter:
        lines.append(f"- This is a LoRA adapter (rank {args.lora_r}, alpha {args.lora_alpha}): it needs its base")
    if kept := model.get("dtype", {}).get("export"):
        lines.append(f"- Weights: {kept}")
    if stops := model.get("stop_tokens"):
        lines.append(f"- An answer ends with {' or '.join(f'`{token}`' for token in stops)}")
    return "\n".join(lines)


def _data(facts: dict[str, Any], public: set[str]) -> str:
    lines = ["| dataset | format | rows | used | tokens | trained |", "|---|---|---|---|---|---|"]
    for found in facts.get("sources", []):
        path = found.get("path")
        name = "a local dataset"
        if path in public:
            name = (
                f"`{path}` (ships with Plainloop)"
                if is_shipped(path)
                else f"[{path}](https://huggingface.co/datasets/{path})"
            )
        tokens, trained = found.get("tokens", 0), found.get("trained_tokens")
        share = f"{trained / max(tokens, 1):.1%}" if trained is not None else "-"
        numbers = " | ".join(f"{found.get(key, 0):,}" for key in ("rows", "examples"))
        lines.append(f"| {name} | {found.get('format') or '-'} | {numbers} | {tokens:,} | {share} |")
    held_out = sum(found.get("examples", 0) for found in facts.get("eval_sources", []))
    return "\n".join(lines) + f"\n\nHeld out for evaluation: {held_out:,} examples."


def _training(args: CommonArgs, facts: dict[str, Any], summary: dict[str, Any], folder: Path, name: str) -> str:
    plan, last = facts.get("plan", {}), summary.get("final", {})
    lines = [f"- Method: {STAGES.get(name, name)}{', LoRA adapters' if args.use_peft else ', all weights'}"]
    done = (
        f"{int(last['step']):,} of {plan.get('steps', 0):,}" if last.get("step") is not None else f"{plan.get('steps', 0):,}"
    )
    lines.append(f"- Steps: {done}, each of {plan.get('examples_per_step', 0):g} {facts.get('batched_as', 'example')}s")
    if summary.get("num_tokens"):
        lines.append(f"- Tokens: {summary['num_tokens']:,}")
    warm = f"{args.warmup_steps:g}{' of the run' if args.warmup_steps < 1 else ' steps'}"
    lines.append(
        f"- Learning rate: {args.learning_rate:g}, {args.lr_scheduler_type}, warm-up {warm}; optimizer {args.optim}"
    )
    if longest := facts.get("lengths", {}).get("max"):
        lines.append(f"- Longest {facts.get('example', 'example')}: {longest:,} tokens")
    lines.append(f"- Seed: {args.seed}")
    if summary:
        count, kind = summary.get("processes", 1), str(summary.get("device", "cpu")).split(":")[0]
        lines.append(f"- On {count} process{'es' if count > 1 else ''} ({kind}), {summary.get('seconds', 0):,.0f} s")
        if summary.get("bad_steps"):
            lines.append(f"- Steps that were not taken, because a number was not finite: {len(summary['bad_steps'])}")
    return "\n".join(lines)


def _results(folder: Path, facts: dict[str, Any], public: set[str], best_step: int | None) -> str:
    rows = [row for row in _lines(folder / "metrics.jsonl") if any(key.startswith("eval_") for key in row)]
    if not rows:
        return "Nothing was evaluated."
    private = [f["source"] for f in facts.get("eval_sources", []) + facts.get("sources", []) if f.get("path") not in public]
    first, last = rows[0], next((row for row in rows if row["step"] == best_step), rows[-1])
    lines = [f"On held-out data, at step {first['step']} and at step {last['step']}, which is this model:", ""]
    lines = lines if last is not first else [f"On held-out data, at step {last['step']}:", ""]
    lines += ["| metric | before | after |", "|---|---|---|"]
    for key, value in last.items():
        number, before = _number(value), _number(first.get(key))
        named = any(key.startswith(f"eval_{label}_") or key.endswith(f"/{label}") for label in private)
        if key.startswith("eval_") and number and not named:
            lines.append(f"| {key.removeprefix('eval_')} | {before or '-'} | {number} |")
    return "\n".join(lines) + "\n\nThey were measured by the run itself; no public benchmark was run."


def _use(adapter: bool, facts: dict[str, Any]) -> str:
    cls, package = ("AutoPeftModelForCausalLM", "peft") if adapter else ("AutoModelForCausalLM", "transformers")
    chat = facts.get("model", {}).get("chat_template")
    lines = (
        [f"from {package} import {cls}", "from transformers import AutoTokenizer, GenerationConfig", ""] if adapter else []
    )
    lines = lines or [f"from {package} import {cls}, AutoTokenizer", ""]
    lines.append('name = "..."  # this repository, or the folder that this file lies in')
    stops = ", generation_config=GenerationConfig.from_pretrained(name)" if adapter else ""
    lines.append(f"model, tokenizer = {cls}.from_pretrained(name{stops}), AutoTokenizer.from_pretrained(name)")
    if chat:
        lines.append('chat = [{"role": "user", "content": "Hello"}]')
        how = 'tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)'
    else:
        how = 'tokenizer("Once upon a time", return_tensors="pt")'
    lines += [f"inputs = {how}", "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))"]
    return "```python\n" + "\n".join(lines) + "\n```"


def _limits(facts: dict[str, Any]) -> str:
    lines = ["- What is not in the table above was not measured: among that truthfulness, safety and bias."]
    lines.append(
        "- It says what its data makes probable, and has the faults of its data and of the model that it was made of."
    )
    if longest := facts.get("lengths", {}).get("max"):
        lines.append(f"- Nothing that it was trained on was longer than {longest:,} tokens.")
    lines.append("- The license follows from those of the data and of the model that it was made of: see there.")
    return "\n".join(lines)


# --- the command ----------------------------------------------------------------------------------------------------


def _flags(args: CommonArgs, public: set[str]) -> list[str]:
    """What was set to another value than its default, as on the command line; what is local is named in capitals."""
    words = []
    for field in dataclasses.fields(args):
        value = getattr(args, field.name)
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        if NOT_SHOWN.fullmatch(field.name) or value is None or value == default:
            continue
        if isinstance(value, bool):
            words.append(f"--{field.name}" if value else f"--{field.name} false")
            continue
        is_path = first_definition(type(args), field.name)[1].metadata.get("is_path")
        items = [_shown(field.name, item, public, is_path) for item in (value if isinstance(value, list) else [value])]
        words.append(" ".join([f"--{field.name}", *map(shlex.quote, items)]))
    return words


def _shown(flag: str, value: Any, public: set[str], is_path: bool) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    text, place = str(value), re.sub(r"_(name|name_or_path|or_path)$", "", flag).upper()
    if not isinstance(value, str):
        return text
    if is_path and not text.startswith(("regex:", "length:", "exact_number")):
        name = _path_of(text)
        if name in public:
            return text if name == text else json.dumps({k: v for k, v in json.loads(text).items() if k != "data_files"})
        return place
    return place if LOCAL.search(text) or Path(text[:200]).exists() or FILE_NAME.search(text) else text


def _without_places(text: str) -> str:
    """The last look: what must not leave this machine does not, wherever it has come from."""
    places = [str(Path.cwd()), str(Path.home())]
    text = re.sub(r"(?<![\w/.:])/(home|Users|root|mnt|data|scratch|tmp|work)/[^\s`'\"|)]*", "...", text)
    for place in places:
        text = text.replace(place, "...") if len(place) > 3 else text
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # nobody, or a system that does not say
        return text
    return re.sub(rf"(?<=[/\\]){re.escape(user)}(?=[/\\])", "...", text) if len(user) > 2 else text


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) and not isinstance(value, bool) else ""


def _settings(path: Path) -> dict[str, Any]:
    """args.yaml of a run; {} where there is none."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}


def _lines(path: Path) -> list[dict[str, Any]]:
    rows = []
    for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else []:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "step" in row:
            rows.append(row)
    return rows
