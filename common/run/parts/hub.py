"""The model card (README.md of an output folder), and pushing a model and its card to the Hub.

A card holds numbers, names of the Hub, and the script's name without "train_". It holds no other text of the
user's: no paths, prompts, or names of functions or groups.
"""

import json
import os
from pathlib import Path
import re

from common.args import CommonArgs
from common.errors import UserError, quoted, say
from common.files import replace_text
from common.model.save import CARD
from common.run.folder import CLASSIFIER, MODEL, WEIGHTS, matching, read_object
from common.run.parts.report import points_of

# Metrics whose names hold no name of the user's: of a file, a function, a group of a suite.
METRICS = re.compile(
    r"eval_(loss|nll_loss|perplexity|bits_per_byte|mean_token_accuracy|entropy|reward|exact_number|regression/all"
    r"|rewards(/(chosen|rejected|margins|accuracies|confidences))?|logps/(chosen|rejected))(_t[\d.]+)?"
)
ADAPTER = "adapter_config.json"
TIMEOUT = 300  # seconds without an answer from the Hub
MARK = "<!-- written by Plainloop; without this line the card stays as it is -->"
TEXT = """# A language model, after {stage}

Trained from {base}. Only what is listed here was measured: truthfulness, safety and bias were not. The license depends on
those of the training data and of the base model.

## Results

{results}

{mark}
"""


# --- the card -----------------------------------------------------------------------------------------------


def write_card(args: CommonArgs, stage: str, best_step: int | None) -> None:
    """Write README.md of the output folder, unless it holds one without the mark of a run.

    stage: the script's name without "train_". best_step: the step of the checkpoint that is exported, if it is not the
    last one.
    """
    from huggingface_hub import ModelCardData

    folder = Path(args.output_dir)
    card = folder / CARD
    if card.exists() and MARK not in card.read_text(encoding="utf-8", errors="replace"):
        say(f"{card} is your own: it stays as it is, and no model card is written")
        return
    base = None
    link = "a local model, or from random weights"
    if is_on_hub(str(args.model_name_or_path), "model"):
        base = args.model_name_or_path
        link = f"[{base}](https://huggingface.co/{base})"
    datasets = set()
    for source in read_object(folder / "dataset.json").get("sources", []):
        if is_on_hub(source["path"], "dataset"):
            datasets.add(source["path"])
    tags = ["plainloop", stage]
    if args.use_peft:
        tags.append("lora")
    facts = ModelCardData(
        library_name="peft" if (folder / ADAPTER).exists() else "transformers",
        pipeline_tag="text-classification" if (folder / CLASSIFIER).is_dir() else "text-generation",
        base_model=base,
        datasets=sorted(datasets) or None,
        tags=tags,
    )
    text = TEXT.format(stage=stage, base=link, results=results_of(folder, best_step), mark=MARK)
    replace_text(card, f"---\n{facts.to_yaml()}\n---\n\n{text}")


def is_on_hub(name: str, kind: str) -> bool:
    """Whether a name was loaded from the Hub: it is in the Hub's cache, and nothing on this disk has that
    name."""
    from huggingface_hub import constants

    cached = os.path.join(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}")
    return os.path.isdir(cached) and not os.path.exists(name)


def results_of(folder: Path, best_step: int | None) -> str:
    """The first evaluation, and that of the model that is exported, as a table."""
    rows = []
    for name, points in points_of(folder).items():
        values = dict(points.tolist())
        exported = values.get(best_step or max(values))
        if METRICS.fullmatch(name) and exported is not None:
            rows.append(f"| {name.removeprefix('eval_')} | {points[0, 1]:.4g} | {exported:.4g} |")
    head = ["| held out, by the run itself | at first | this model |", "|---|---|---|"]
    return "\n".join(head + rows) if rows else "Nothing was evaluated."


# --- the Hub ------------------------------------------------------------------------------------------------


def check_repo(name: str | None) -> None:
    """Raise UserError before training if a push to this repository cannot work."""
    from huggingface_hub import constants, get_token

    if str(name).count("/") != 1:
        raise UserError(f"--hub_model_id {name}: expected OWNER/NAME")
    if constants.HF_HUB_OFFLINE or not get_token():
        raise UserError(
            "--push_to_hub needs a token (hf auth login, or HF_TOKEN), and no HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE"
        )


def push(folder: Path, repo: str) -> str:
    """Push the model and the card of a folder; returns its address. Weights there in another format are
    deleted, as from_pretrained might prefer them. Raises UserError with the reason and the command that
    repeats it."""
    from huggingface_hub import HfApi, get_session

    if not matching(folder, WEIGHTS):
        raise UserError(f"{folder} holds no model: neither model.safetensors nor an adapter")
    try:
        get_session().timeout = TIMEOUT  # otherwise a hanging request never ends
        api = HfApi()
        message = folder.resolve().name
        api.create_repo(repo, exist_ok=True)
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            allow_patterns=patterns_to_send(folder),
            ignore_patterns=["checkpoint-*", ADAPTER],
            delete_patterns=[*WEIGHTS],
            commit_message=message,
        )
        adapter = read_object(folder / ADAPTER)
        if adapter:
            base = Path(str(adapter.get("base_model_name_or_path")))
            if base.exists() or len(base.parts) != 2:  # a local path: do not publish it
                adapter["base_model_name_or_path"] = base.name
            text = json.dumps(adapter, indent=2).encode()
            api.upload_file(path_or_fileobj=text, path_in_repo=ADAPTER, repo_id=repo, commit_message=message)
    except (Exception, KeyboardInterrupt) as error:  # the network, the Hub or the disk
        cause = error.__cause__ or error  # "Error while uploading" alone explains nothing
        # A signed address has its secret after the question mark.
        reason = quoted(re.sub(r"\?\S+", "?...", str(cause)), 250, str)
        again = f"python -m tools.push {folder} --hub_model_id {repo}"
        raise UserError(f"the upload to {repo} failed ({type(cause).__name__}: {reason}): {again}") from None
    return f"https://huggingface.co/{repo}"


def patterns_to_send(folder: Path) -> list[str]:
    """The files that are sent: the model with its code, a classifier, the card."""
    auto_map = json.dumps(read_object(folder / "config.json").get("auto_map", {}))
    modules = re.findall(r'"(?:[^"]*--)?(\w+)\.\w+"', auto_map)
    return [*WEIGHTS, *MODEL, CARD, f"{CLASSIFIER}/*", *(f"{name}.py" for name in modules)]


def push_at_end(args: CommonArgs) -> None:
    """--push_to_hub: a failure is only printed, so that it does not cost a finished run."""
    say(f"sending {args.output_dir} to the Hub as {args.hub_model_id}")
    try:
        say(f"it is at {push(Path(args.output_dir), args.hub_model_id)}")
    except UserError as error:
        say(str(error))
