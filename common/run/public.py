"""What a run may reveal in public, as in a model card: names on the Hub and of files shipped with this project.

Private to this machine are paths, names of local files and models, user names, and anything that looks like a secret.
"""

import dataclasses
import getpass
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

from common.args import CommonArgs, first_definition

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ("data/base_model", "data/pretrain", "data/sft", "data/dpo", "data/grpo", "data/grpo_zero", "data/prompts")
SHIPPED += ("data/style.py", "data/regression.jsonl")
OF_THE_DEMO = re.compile(r"(\w+_)?(train|validation|test)\.(jsonl|txt)")  # others in these folders are the user's
# Settings of this machine, or of how a run was carried out, not of the model.
NOT_SHOWN = re.compile(
    r"output_dir|overwrite_output_dir|accept_changes|resume_from_checkpoint|dataset_cache_dir|dataset_num_proc|dry_run|run_name"
    r"|report_to|push_to_hub|hub_.*|alert_.*|.*(webhook|token|secret|password).*"
)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
FILE_NAME = re.compile(r"\.(jsonl?|txt|csv|tsv|parquet|arrow|gz|bz2|xz|zst|py|ya?ml|jinja)(:\w+)?$", re.I)
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|WEBHOOK")  # in the name of an environment variable
LOCAL = re.compile(
    r"(^|[\s=:,'\"({\[])(~|\.{1,2}|[A-Za-z]:)?[/\\]{1,2}\S|://|\b(hf_|sk-|gh[a-z]_|github_|glpat|xox|AKIA|AIza|eyJ)[\w-]{8,}",
    re.I,
)


def public_names(args: CommonArgs) -> set[str]:
    """Those words in the arguments that name something on the Hub, or something shipped with this project.

    Called at the start of a run: a file that is deleted later would look like a Hub name.
    """
    found = set()
    for field in dataclasses.fields(args):
        if NOT_SHOWN.fullmatch(field.name) or not first_definition(type(args), field.name)[1].metadata.get("is_path"):
            continue
        value = getattr(args, field.name)
        for word in value if isinstance(value, list) else [value]:
            name = path_of(word) if isinstance(word, str) else None
            if name and (is_shipped(name) or is_hub_name(name)):
                found.add(name)
    return found


def is_shipped(name: str) -> bool:
    """Whether it is part of this project: other projects may have a data/sft as well, and users may add files there."""
    place = re.sub(r"\.py:\w+$", ".py", name)
    folder, file = os.path.split(place)
    known = place.rstrip("/") in SHIPPED or (folder in SHIPPED and OF_THE_DEMO.fullmatch(file))
    return bool(known) and Path(place).resolve() == (ROOT / place).resolve()


def is_hub_name(name: str) -> bool:
    return bool(HUB_NAME.fullmatch(name)) and not FILE_NAME.search(name) and not Path(name).expanduser().exists()


def path_of(word: str) -> str:
    """The path in a word of --dataset_name: a source with settings is a mapping, as JSON."""
    if word.lstrip().startswith("{"):
        try:
            return str(json.loads(word)["path"])
        except (ValueError, KeyError, TypeError):
            return ""
    return word


def private_names(args: CommonArgs, facts: dict[str, Any], public: set[str]) -> set[str]:
    """Metrics named after local sources or local reward models, by the last part of a path."""
    sources = facts.get("eval_sources", []) + facts.get("sources", [])
    found = {f"{source['source']}_loss" for source in sources if source.get("path") not in public}
    for field in dataclasses.fields(args):
        if field.name.endswith("reward_funcs"):
            words = [word for word in getattr(args, field.name) or [] if word not in public and not _is_ready_made(word)]
            found |= {Path(word).name for word in words if not FILE_NAME.search(word)}
    return found


def names_one(metric: str, private: set[str]) -> bool:
    """Whether a metric (of evaluations; max:NAME) is one of them."""
    return any(re.fullmatch(rf"(\w+:)?eval_{re.escape(name)}(_t[\d.e+-]+)?", metric) for name in private)


def _is_ready_made(reward: str) -> bool:
    return reward.startswith(("regex:", "length:", "exact_number"))


def launched_as(script: str) -> str:
    """The script as it is launched: as a module if it is in a package of this project."""
    path = Path(script).resolve()
    is_module = path.parent.parent == ROOT and (path.parent / "__init__.py").exists()
    return f"-m {path.parent.name}.{path.stem}" if is_module else path.name


def flags_of(args: CommonArgs, public: set[str], private: set[str]) -> list[str]:
    """Flags set to other values than their defaults, as on the command line, with placeholders in capitals for local
    names."""
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
        items = [
            _shown(field.name, item, public, private, is_path) for item in (value if isinstance(value, list) else [value])
        ]
        words.append(" ".join([f"--{field.name}", *map(shlex.quote, items)]))
    return words


def _shown(flag: str, value: Any, public: set[str], private: set[str], is_path: bool) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    text, place = str(value), re.sub(r"_(name|name_or_path|or_path)$", "", flag).upper()
    if not isinstance(value, str):
        return text
    if is_path and not _is_ready_made(text):
        name = path_of(text)
        if name in public:
            return text if name == text else json.dumps({k: v for k, v in json.loads(text).items() if k != "data_files"})
        return place
    local = LOCAL.search(text) or Path(text[:200]).exists() or FILE_NAME.search(text)
    user = re.search(rf"\b{re.escape(_user())}\b", text, re.I) if len(_user()) > 2 else None
    return place if local or user or names_one(text, private) or any(secret in text for secret in _secrets()) else text


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # no such user, or the system does not say
        return ""


def _secrets() -> list[str]:
    """Secrets in the environment. Values of letters only are left out: they may be words of the card."""
    found = [value for name, value in os.environ.items() if SECRET.search(name.upper())]
    return [value for value in found if len(value) >= 8 and re.search(r"\d", value)]


def without_places(text: str) -> str:
    """Last check of a text: removes what is private to this machine, wherever it came from."""
    places = [str(Path.cwd()), str(Path.home())]
    text = re.sub(r"(?<![\w/.:])/(home|Users|root|mnt|data|scratch|tmp|work)/[^\s`'\"|)]*", "...", text)
    for place in places:
        text = text.replace(place, "...") if len(place) > 3 else text
    for secret in _secrets():
        text = text.replace(secret, "...")
    user = _user()
    return re.sub(rf"(?<=[/\\]){re.escape(user)}(?=[/\\])", "...", text) if len(user) > 2 else text
