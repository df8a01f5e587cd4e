"""What to write instead of other tools' flags: the table of other_names.yaml, for the line about an unknown
flag."""

from pathlib import Path

import yaml

# {here: names there}
HERE: dict[str, str] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def said_here(name: str) -> str | None:
    """What to write instead of another tool's flag; None for a name that no tool has."""
    return next((here for here, names in HERE.items() if name in names.split()), None)
