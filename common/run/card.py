"""The model card: README.md of an output folder, with the front matter that the Hub reads.

It is built from the files of the run and describes the base model, the data, the settings and the results. It leaves out
what is private to this machine: paths, names of local files and models, user names, anything that looks like a secret.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from common.args import CommonArgs
from common.errors import say
from common.files import replace_text
from common.model.save import EXTRA
from common.run.folder import CARD, CLASSIFIER
from common.run.public import (
    ROOT,
    flags_of,
    is_hub_name,
    is_shipped,
    launched_as,
    names_one,
    path_of,
    private_names,
    without_places,
)

import yaml

SEAL = "<!-- written by a run of Plainloop; one that was edited stays as it is: {} -->\n"
STAGES = {"pretrain": "pretraining", "sft": "supervised fine-tuning", "dpo": "preference optimisation (DPO)"}
STAGES |= {"grpo": "reinforcement learning from rewards (GRPO)"}


def write_card(
    folder: str | Path,
    args: CommonArgs,
    script: str,
    public: set[str],
    best_step: int | None = None,
    summary: dict[str, Any] | None = None,
) -> None:
    """Write README.md of an output folder, unless it holds one that a run did not write, or that was edited since."""
    path = Path(folder, CARD)
    if path.exists() and not is_sealed(path):
        say(f"{path} is not of a run, or was edited: it stays as it is, and no model card is written")
        return
    replace_text(path, make_card(folder, args, script, public, best_step, summary=summary))


def make_card(
    folder: str | Path,
    args: CommonArgs,
    script: str,
    public: set[str],
    best_step: int | None = None,
    step: int | None = None,
    summary: dict[str, Any] | None = None,
) -> str:
    """The card as text, from dataset.json and metrics.jsonl of a run.

    public: see public_names. best_step: the step of the evaluation whose checkpoint is exported. step: current step of an
    unfinished run. summary: the contents of summary.json, which is written last.
    """
    folder, summary = Path(folder), summary or {}
    facts, name = _read(folder / "dataset.json"), Path(script).stem.removeprefix("train_")
    adapter = args.use_peft and not args.merge_lora
    is_reward = (folder / CLASSIFIER).is_dir() and (folder / EXTRA).exists()
    private = private_names(args, facts, public)
    start = args.model_name_or_path
    base, words = _origin(start, start in public, args.model_revision, adapter)
    datasets = [found for word in args.dataset_name or [] if (found := path_of(word)) in public and not is_shipped(found)]
    head: dict[str, Any] = {"library_name": "peft" if adapter else "transformers"}
    head["pipeline_tag"] = "text-classification" if is_reward else "text-generation"
    if base:
        head |= {"base_model": base, "base_model_relation": "adapter" if adapter else "finetune"}
    if datasets:
        head["datasets"] = sorted(set(datasets))
    head["tags"] = ["plainloop", name] + (["lora"] if args.use_peft else [])
    title = "A reward model" if is_reward else f"A language model, after {STAGES.get(name, name)}"
    parts = [_front(head), f"# {title}"]
    if step is not None:
        parts.append(f"Training goes on: this is step {step}.")
    parts += [f"## What it is\n\n{_what(args, facts, words, adapter)}", f"## Data\n\n{_data(facts, public)}"]
    parts += [f"## Training\n\n{_training(args, facts, summary, name)}"]
    parts += [f"## Results\n\n{_results(folder, private, best_step)}"]
    chat = bool(facts.get("model", {}).get("chat_template"))
    parts.append(f"## Use\n\n{_use_reward() if is_reward else _use(adapter, chat)}")
    parts.append(f"## Limits\n\n{_limits(args, facts)}")
    command = f"accelerate launch {launched_as(script)} {' '.join(flags_of(args, public, private))}".strip()
    parts.append(f"## The command\n\n```bash\n{command}\n```\n\nNames in capitals stand for local files or models.")
    if versions := summary.get("versions"):
        listed = ", ".join(f"{library} {version}" for library, version in versions.items())
        parts.append(f"Python {summary['python']}, {listed}; trained with Plainloop.")
    return seal(without_places("\n\n".join(parts)))


def merged_card(adapter: str | Path, folder: str | Path, base: str | None, dtype: str) -> str:
    """The card of a model that an adapter was merged into. base: as the user named it; dtype: of the merged weights. The
    sections on the adapter's training come from its own card, if that is unedited."""
    config, own = _read(Path(adapter, "adapter_config.json")), {}
    if is_sealed(Path(adapter, CARD)):
        own = _sections(Path(adapter, CARD))
    start = base or str(config.get("base_model_name_or_path") or "")
    revision = None if base else config.get("revision")
    origin, words = _origin(start, is_hub_name(start), revision, adapter=False)
    words = words if base else own.get("from") or words  # including the stages between
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if origin:
        head |= {"base_model": origin, "base_model_relation": "finetune"}
    if datasets := own.get("head", {}).get("datasets"):
        head["datasets"] = datasets
    head["tags"] = own.get("head", {}).get("tags") or ["plainloop", "lora"]
    rank = f"rank {config.get('r')}, alpha {config.get('lora_alpha')}"
    lines = [f"- Trained from: {words}, by a LoRA adapter ({rank}) that was merged into it"]
    lines.append(f"- How merged: W + {_scale(config)} · B A for each adapted matrix, summed in float32, kept in {dtype}")
    lines += [
        line for line in own.get("What it is", "").split("\n") if line.startswith(("- Architecture", "- An answer ends"))
    ]
    parts = [_front(head), "# A language model, with its adapter merged", "## What it is\n\n" + "\n".join(lines)]
    for title in ("Data", "Training", "Results"):
        told = own.get(title) or "Not told by the adapter's folder."
        if title == "Results" and own:
            told = told.replace(", which is this model:", ":") + " The adapter was not merged then: rounding differs."
        parts.append(f"## {title}\n\n{told}")
    chat = Path(folder, "chat_template.jinja").exists()
    parts.append(f"## Use\n\n{_use(False, chat)}")
    parts += [f"## {title}\n\n{own[title]}" for title in ("Limits", "The command") if title in own]
    return seal(without_places("\n\n".join(parts)))


def _scale(config: dict[str, Any]) -> str:
    over = "√r" if config.get("use_rslora") else "r"
    return f"alpha / {over}" + (" (DoRA: and its rows' lengths)" if config.get("use_dora") else "")


# --- the parts ------------------------------------------------------------------------------------------------------


def _origin(name: str | None, known: bool, revision: str | None, adapter: bool) -> tuple[str | None, str]:
    """(the Hub name of the base model, the same in words). A local model is traced back to its own base.

    known: whether the card may give the name.
    """
    if not name:
        return None, "a new model, from random weights"
    steps = []
    revised = f" (revision {revision})" if revision else ""
    for _ in range(8):
        after = f", after {', then '.join(reversed(steps))}" if steps else ""
        if Path(name).resolve() == ROOT / "data" / "base_model":
            return None, f"the small base model that ships with Plainloop{after}"
        if known:
            # An adapter belongs on the model that it was trained on, not on that model's base.
            return (None if adapter and steps else name), f"[{name}](https://huggingface.co/{name}){revised}{after}"
        before, inputs = _settings(Path(name, "args.yaml")), _read(Path(name, "inputs.json"))
        if "output_dir" not in before:
            if is_sealed(Path(name, CARD)) and (told := _sections(Path(name, CARD))["from"]):  # written by tools.merge_lora
                base = _sections(Path(name, CARD))["head"].get("base_model")
                return (None if adapter else base), told + after
            break
        script = Path(str(before["output_dir"] or "")).name
        origin, revised = before.get("model_name_or_path"), ""
        steps.append(f"an earlier stage ({script})" if script in STAGES else "an earlier stage")
        if not isinstance(origin, str):
            return None, f"a new model, after {', then '.join(reversed(steps))}"
        # A folder that has since been deleted would look like a Hub name; inputs.json has the hash of its files.
        name, known = origin, is_hub_name(origin) and str(Path(origin)) not in inputs.get("files", {origin: ""})
    return None, f"a local model{after}"


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


def _training(args: CommonArgs, facts: dict[str, Any], summary: dict[str, Any], name: str) -> str:
    plan, last = facts.get("plan", {}), summary.get("final", {})
    how = "LoRA adapters" if args.use_peft else "all weights"
    how += " on a base of 4 bits" if args.load_in_4bit else " on a base of 8 bits" if args.load_in_8bit else ""
    lines = [f"- Method: {STAGES.get(name, name)}, {how}"]
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


def _results(folder: Path, private: set[str], best_step: int | None) -> str:
    rows: dict[int, dict[str, Any]] = {}  # an evaluation and a regression suite write separate lines for one step
    for row in _lines(folder / "metrics.jsonl"):
        if found := {key: value for key, value in row.items() if key.startswith("eval_")}:
            rows.setdefault(row["step"], {}).update(found)
    if not rows:
        return "Nothing was evaluated."
    first, last = min(rows), best_step if best_step in rows else max(rows)
    lines = [f"On held-out data, at step {first} and at step {last}, which is this model:", ""]
    lines = lines if last != first else [f"On held-out data, at step {last}:", ""]
    lines += ["| metric | before | after |", "|---|---|---|"]
    for key, value in rows[last].items():
        number, before = _number(value), _number(rows[first].get(key))
        if number and not names_one(key, private):
            lines.append(f"| {key.removeprefix('eval_')} | {before or '-'} | {number} |")
    return "\n".join(lines) + "\n\nThey were measured by the run itself; no public benchmark was run."


def _use(adapter: bool, chat: bool) -> str:
    cls, package = ("AutoPeftModelForCausalLM", "peft") if adapter else ("AutoModelForCausalLM", "transformers")
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


def _use_reward() -> str:
    cls = "AutoModelForSequenceClassification"
    lines = [f"from transformers import {cls}, AutoTokenizer", ""]
    lines.append('name = "..."  # this repository, or the folder that this file lies in')
    lines.append(f'model = {cls}.from_pretrained(name, subfolder="{CLASSIFIER}")')
    lines.append(f'tokenizer = AutoTokenizer.from_pretrained(name, subfolder="{CLASSIFIER}")')
    lines.append('chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]')
    lines.append('inputs = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)')
    lines.append("print(model(**inputs).logits)  # one number: higher is better")
    return "```python\n" + "\n".join(lines) + "\n```"


def _limits(args: CommonArgs, facts: dict[str, Any]) -> str:
    lines = ["- What is not in the table above was not measured: among that truthfulness, safety and bias."]
    lines.append(
        "- It says what its data makes probable, and has the faults of its data and of the model that it was made of."
    )
    longest, example = facts.get("lengths", {}).get("max"), facts.get("example", "example")
    if longest and not args.dataset_streaming:  # of a stream only the first block is known
        lines.append(f"- No {example} that it was trained on was longer than {longest:,} tokens.")
    lines.append("- The license follows from those of the data and of the model that it was made of: see there.")
    return "\n".join(lines)


def _front(head: dict[str, Any]) -> str:
    return f"---\n{yaml.safe_dump(head, sort_keys=False).strip()}\n---"


def _sections(card: Path) -> dict[str, Any]:
    """The parts of a card that a run wrote: "head", what the model was trained "from", and each section by its title."""
    text = card.read_text(encoding="utf-8")
    told = re.search(r"^- Trained from: (.+)$", text, re.M)
    found = dict(re.findall(r"^## ([^\n]+)\n\n(.*?)\s*(?=^## |^<!-- )", text, re.S | re.M))
    return found | {"head": yaml.safe_load(text.split("---")[1]), "from": told[1] if told else ""}


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


def seal(text: str) -> str:
    """A text with a mark appended by which `is_sealed` recognises it."""
    text = text.rstrip() + "\n\n"
    return text + SEAL.format(hashlib.sha256(text.encode()).hexdigest()[:16])


def is_sealed(path: Path) -> bool:
    """Whether a file is unchanged since a run wrote it: not the user's own, and not edited."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False
    body = text[: text.rfind("<!-- ")]
    return bool(body) and text == seal(body)
