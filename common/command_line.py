"""The command line of a script: flags > YAML (--config) > environment > defaults, and how `main` is called
with them.

All values go through the same conversion and checks; an unknown flag, key or variable is an error.
"""

import argparse
from collections.abc import Callable
import difflib
import functools
import json
import os
from pathlib import Path
import re
import sys
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from common.args import ARGUMENT_GROUPS, CommonArgs, declared, defaults, first_definition, is_within
from common.errors import UserError, last_words, quoted, say, show_and_exit
from common.memory import is_oom
from common.other_names import said_here, value_here
import yaml

Args = TypeVar("Args", bound=CommonArgs)
Values = dict[str, Any]  # by the names of arguments
types_of = functools.cache(get_type_hints)

PREFIX = "PLAINLOOP_"
# said by gloo and NCCL
GONE = ("Connection closed by peer", "Connection reset by peer", "remote process exited")


class Mistake(NamedTuple):
    """A setting that cannot be used, or what a value becomes that cannot be converted."""

    what: str  # the flag, key or variable
    why: str  # with what to do instead
    origin: str = ""  # the file or variable that it is in


def parse_args(
    args_class: type[Args], demo: str, default_model: str | None = None, argv: list[str] | None = None
) -> Args:
    """The arguments of a run. Raises UserError for unknown flags, keys or variables, and values of the wrong
    type: all of them at once.

    A variable is PLAINLOOP_ plus the name of a flag; PLAINLOOP_CONFIG is a --config. demo: the YAML file of
    the built-in demo. It applies, with a message, if neither a model nor a dataset is named, with the lowest
    priority. If only a model is named, only its dataset applies. default_model: the output folder of the
    previous stage, the default of --model_name_or_path; None: a new model.
    """
    flags, mistakes = _parse(sys.argv[1:] if argv is None else argv, args_class)
    config = flags.pop("config", None) or os.environ.get(f"{PREFIX}CONFIG")
    given, wrong_variables = _environment(args_class)
    in_file, wrong_keys = _file(config, args_class) if config else ({}, [])
    _refuse(mistakes + wrong_keys + wrong_variables, config if wrong_keys else None)
    if given:
        say(f"settings from the environment: {', '.join(PREFIX + name.upper() for name in given)}")
    given = given | in_file | flags
    demo_values: Values = {}
    if given.get("dataset_name") is None:
        if not Path(demo).exists():
            raise UserError(
                f"no --dataset_name, and the demo, {demo}, is not here: name one, or start where it lies"
            )
        demo_values, mistakes = _file(demo, args_class)
        _refuse(mistakes, demo)
        if given.get("model_name_or_path") is None:
            say(f"no --dataset_name and no --model_name_or_path: the embedded demo, {demo}", sys.stderr)
            for name in list(demo_values):
                goes_with = declared(args_class, name)["goes_with"]
                if goes_with is not None and goes_with in given:
                    del demo_values[name]
        else:
            say(f"no --dataset_name: that of the embedded demo, {demo}", sys.stderr)
            demo_values = {"dataset_name": demo_values["dataset_name"]}
    values = defaults(args_class) | demo_values | given
    if values["model_name_or_path"] is None and default_model is not None:
        values["model_name_or_path"] = _last_stage(default_model)
    for line in _without_effect(values, args_class):
        say(line)
    return args_class(**values)  # combinations are checked once all of it is known


def launch(
    main: Callable[[Args], None], args_class: type[Args], demo: str, default_model: str | None = None
) -> None:
    """Parse the arguments (see `parse_args`), call `main` with them, and end the process.

    A UserError becomes one line and exit code 1; so does running out of memory outside of the training steps.
    """
    for stream in (sys.stdout, sys.stderr):  # a character missing in the terminal's encoding ends no run
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    code = 0
    try:
        main(parse_args(args_class, demo, default_model))
    except UserError as error:
        show_and_exit(error)
    # while data and model are loaded; during training common/run/signals.py handles it
    except KeyboardInterrupt:
        say("stopped before the first step: there is nothing to save")
        code = 130
    except SystemExit as stop:
        if isinstance(stop.code, str):  # a script's own: Python prints it, and exits with 1
            raise
        code = stop.code or 0
    except Exception as error:
        if is_oom(error):
            remedy = "lower --per_device_eval_batch_size or --eval_max_new_tokens, or what the script samples at a time"
            show_and_exit(
                UserError(
                    f"out of memory outside of the training steps: {remedy} ({quoted(error, 160, str)})"
                )
            )
        if isinstance(error, RuntimeError) and any(words in str(error) for words in GONE):
            show_and_exit(
                UserError(f"another process has ended; if it printed why, that is the reason ({error})")
            )
        last_words(error)
        raise
    sys.stdout.flush()
    if code or os.environ.get("WORLD_SIZE", "1") != "1":  # see NEVER_FREED in common/run/launch.py
        os._exit(code)


def _last_stage(output_dir: str) -> str:
    """The default model of a stage: the previous stage's, if it has finished, else the one shipped here."""
    base = "data/base_model"
    if Path(output_dir, "summary.json").exists():
        say(f"model: {output_dir} (the finished run of the last stage)")
        return output_dir
    if not Path(base, "config.json").exists():
        raise UserError(f"no --model_name_or_path, and neither {output_dir} nor {base} is here: name a model")
    say(f"model: {base} (it ships here; there is no finished run in {output_dir})")
    return base


# --- where values come from ---------------------------------------------------------------------------------


def _environment(args_class: type[CommonArgs]) -> tuple[Values, list[Mistake]]:
    """What variables set, and their mistakes. An empty one counts as not set, as is usual in containers;
    several values have spaces between."""
    found: Values = {}
    mistakes: list[Mistake] = []
    for variable, value in sorted(os.environ.items()):
        name = variable.removeprefix(PREFIX).lower()
        if variable.startswith(PREFIX) and value and name != "config":
            several = kind_of(args_class, name)[1]
            read, wrong = checked({name: value.split() if several else value}, args_class, variable)
            found |= read
            mistakes += wrong
    return found, mistakes


def _file(path: str, args_class: type[CommonArgs]) -> tuple[Values, list[Mistake]]:
    """The values of a YAML file, and its mistakes."""
    origin = f"--config {path}"
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:  # without the line that it quotes: that may hold a secret
        raise UserError(f"{origin}: line {error.problem_mark.line + 1}: {error.problem}") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{origin}: {error}") from None
    if not isinstance(values, dict) or "config" in values:
        raise UserError(f"{origin}: expected `name: value` lines with the names of flags, without config")
    names = [name.value for name, _ in yaml.compose(text).value]
    for name in values:
        if names.count(name) > 1:
            raise UserError(f"{origin}: {name} is there twice")
    return checked(values, args_class, origin)


def checked(
    values: dict[Any, Any], args_class: type[CommonArgs], origin: str
) -> tuple[Values, list[Mistake]]:
    """Values of a file or a variable, converted and checked as on the command line, and what cannot be used.
    origin: where they are from, for messages."""

    def word(value: Any) -> str:
        return json.dumps(value, default=str) if isinstance(value, dict) else str(value)

    words, mistakes = [], []
    for name, value in values.items():
        kind, several = kind_of(args_class, name)
        if isinstance(value, list) and len(value) == 1 and kind and not several:
            value = value[0]
        if isinstance(value, list) and several:
            words += [f"--{name}", *map(word, value)]
        elif kind and not several and isinstance(value, (list, dict, bool) if kind is str else (list, dict)):
            mistakes.append(Mistake(name, "takes one value, in quotes if it is on, off, yes or no"))
        elif value is not None:
            words.append(f"--{name}={word(value)}")
    try:
        found, wrong = _parse(words, args_class)
    except UserError as error:
        raise UserError(f"{origin}: {error}") from None
    return found, [mistake._replace(origin=f"{origin}: ") for mistake in mistakes + wrong]


def _refuse(mistakes: list[Mistake], config: str | None) -> None:
    """Raise UserError if there are mistakes: one in a line, several in a table. config: the file that holds
    some of them."""
    if not mistakes:
        return
    if len(mistakes) == 1:
        what, why, origin = mistakes[0]
        raise UserError(f"{origin}{what}: {why}")
    how = f"python -m tools.translate {config}" if config else "python -m tools.translate before these words"
    message = f"{len(mistakes)} settings cannot be used; if they are another trainer's: {how}"
    origins = {mistake.origin for mistake in mistakes}
    if len(origins) == 1:
        message = origins.pop() + message
        raise UserError(message, [(what, why) for what, why, _ in mistakes])
    raise UserError(message, [(origin + what, why) for what, why, origin in mistakes])


def _without_effect(values: Values, args_class: type[CommonArgs]) -> list[str]:
    """A line for each argument that differs from its default but has no effect beside the others (see needs
    of `arg`)."""
    lines = []
    for name, default in defaults(args_class).items():
        needs = declared(args_class, name)["needs"]
        if not needs or values[name] == default:
            continue
        for need in needs.split(", "):
            is_negated = need.startswith("no ")
            other, _, wanted = need.removeprefix("no ").partition("=")
            value = values[other]
            items = value if isinstance(value, list) else [value]
            is_set = wanted in items if wanted else any(items)
            if is_set == is_negated:
                other = f"with --{other}" if is_set else f"without --{other} {wanted}".rstrip()
                lines.append(f"--{name} has no effect {other}")
                break
    return lines


# --- words to values ----------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UserError(f"{message} (--help lists the flags)")


def _parse(words: list[str], args_class: type[CommonArgs]) -> tuple[Values, list[Mistake]]:
    """The values that words like ["--seed", "1"] give, each checked by itself, --config among them; and what
    cannot be used."""
    usage = "%(prog)s [--config FILE] [--flag value ...]"
    parser = _Parser(allow_abbrev=False, usage=usage, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these arguments")
    # also -1e-3
    parser._negative_number_matcher = re.compile(r"^-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$|^-(inf|nan)$")
    groups = {args_class: parser.add_argument_group("This script")}
    groups |= {cls: parser.add_argument_group(cls.__doc__) for cls in ARGUMENT_GROUPS}
    for name, default in defaults(args_class).items():
        group = groups.get(first_definition(args_class, name)[0], groups[args_class])
        text = args_class.__dataclass_fields__[name].metadata.get("help", "")
        text += "" if default is None else f" (default: {default})"
        group.add_argument(f"--{name}", help=text.replace("%", "%%"), **_options(args_class, name))
    parsed, rest = parser.parse_known_args(words)
    values = vars(parsed)
    mistakes = []
    for name, value in values.items():
        within = declared(args_class, name)["within"] if name != "config" else None
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, Mistake):
                mistakes.append(part)
            elif type(part) in (int, float) and not is_within(part, within or "(-inf, inf)"):
                mistakes.append(Mistake(f"--{name} {part}", f"out of range, which is {within}"))
    flags = [word for word in rest if word.startswith("--")]  # the others are their values
    mistakes += [_unknown(word, args_class) for word in flags or rest[:1]]
    return values, mistakes


def _options(args_class: type[CommonArgs], name: str) -> dict[str, Any]:
    """How argparse converts an argument."""
    kind, several = kind_of(args_class, name)
    options: dict[str, Any] = {"type": functools.partial(_converted, name, kind)}
    if several:
        options["nargs"] = "+"
    if get_origin(kind) is Literal:
        options["metavar"] = "{" + ",".join(map(str, get_args(kind))) + "}"
    elif kind is bool:
        options = {"nargs": "?", "const": True, "metavar": "true/false"} | options
    elif kind in (str, int, float):
        options["metavar"] = kind.__name__.upper()
    else:
        raise TypeError(f"{args_class.__name__}.{name}: {kind} is none of the types in common/args.py")
    return options


def _converted(name: str, kind: Any, word: str) -> Any:
    """A word as a value of the argument's type; a Mistake if it is none, also by the names of other
    trainers."""
    if get_origin(kind) is Literal:
        expected = f"expected {', '.join(map(str, get_args(kind)))}"
        value = next((choice for choice in get_args(kind) if str(choice) == word), None)
    elif kind is bool:
        expected = "expected true or false"
        value = _true_or_false(word)
    else:
        expected = {int: "expected a whole number", float: "expected a number"}.get(kind)
        try:
            return kind(word)
        except ValueError:
            value = None
    if value is not None:
        return value
    here = value_here(name, word)
    if isinstance(here, dict) and name in here:
        return here[name]
    return Mistake(f"--{name} {word[:60]}", here if isinstance(here, str) else expected)


def kind_of(args_class: type[CommonArgs], name: str) -> tuple[Any, bool]:
    """X of an argument of type X or list[X], and whether it is a list; with or without | None. None if there
    is no such."""
    kind = types_of(args_class).get(name)
    if get_origin(kind) in (Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not NoneType)
    return (get_args(kind)[0], True) if get_origin(kind) is list else (kind, False)


def _true_or_false(word: str) -> bool | None:
    if word.lower() in ("true", "yes", "y", "t", "1"):
        return True
    if word.lower() in ("false", "no", "n", "f", "0"):
        return False
    return None


def _unknown(word: str, args_class: type[CommonArgs]) -> Mistake:
    word = re.sub(r"(https?://).*", r"\1...", word.split("=")[0])  # the rest may be a secret
    what, name = f"unknown flag {word}", word.removeprefix("--")
    known = defaults(args_class)
    if name.removeprefix("no_") in known:
        return Mistake(what, f"write --{name.removeprefix('no_')} false")
    if here := said_here(name):
        return Mistake(what, f"here {here}" if here.startswith("--") else here)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    return Mistake(what, f"did you mean --{near[0]}?" if near else "see --help")
