"""What TRL, transformers, LLaMA-Factory, axolotl and unsloth call their settings: the table of other_names.yaml.

Read for the line about an unknown flag or value, and by tools/translate.py.
"""

import functools
from pathlib import Path
from typing import Any, NamedTuple

import yaml

Settings = dict[str, Any]  # of ours


class Table(NamedTuple):
    names: dict[str, str]  # {a name of theirs: what to write here}
    values: dict[
        str, dict[str, Settings | str]
    ]  # {a name: {a value there: settings of ours, or why there are none}}
    defaults: dict[str, Settings]  # {a trainer: its defaults, where ours differ}


@functools.cache
def table() -> Table:
    read = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    names = {}
    for here, theirs in read["names"].items():
        for name in theirs.split():
            names[name] = here
    values = {}
    for name, choices in read["values"].items():
        values[name] = {str(value).lower(): here for value, here in choices.items()}
    return Table(names, values, read["defaults"])


def said_here(name: str) -> str | None:
    """What to write instead of a setting of another trainer; None for a name that no trainer has."""
    return table().names.get(name)


def value_here(name: str, value: Any) -> Settings | str | None:
    """What another trainer's value of a setting is here: settings, or why there are none; None if the table
    says nothing of it."""
    choices = table().values.get(name, {})
    found = choices.get(str(value).lower(), choices.get("any"))
    if isinstance(found, dict):
        return {ours: _filled(setting, value) for ours, setting in found.items()}
    return found


def _filled(setting: Any, value: Any) -> Any:
    """A setting of the table with their value in place of VALUE."""
    if setting == "VALUE":
        return value
    if isinstance(setting, list):
        return [item.replace("VALUE", str(value)) for item in setting]
    return setting
