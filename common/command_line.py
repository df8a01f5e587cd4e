"""The command line of a script: flags > YAML (--config) > environment > defaults, and how `main` is called with them.

All values go through the same conversion and checks; an unknown flag, key or variable is an error.
"""

import argparse
import dataclasses
import difflib
import json
import os
import re
import shlex
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from common.args import CommonArgs, first_definition, is_within
from common.errors import UserError, keep_talking, last_words, say, show_and_exit
from common.flags import ELSEWHERE, other_name, without_effect
from common.memory import is_oom

import yaml

Args = TypeVar("Args", bound=CommonArgs)


def parse_args(args_class: type[Args], demo: str, default_model: str | None = None, argv: list[str] | None = None) -> Args:
    """The arguments of a run. Raises UserError for an unknown flag, key or variable, or a value of the wrong type.

    A variable is PLAINLOOP_ plus the name of a flag; PLAINLOOP_CONFIG is a --config. demo: the YAML file of the built-in
    demo. It applies, with a message, if neither a model nor a dataset is named, with the lowest priority. If only a model is
    named, only its dataset applies. default_model: the output folder of the previous stage, the default of
    --model_name_or_path; None: a new model. With --dry_run, prints each value that is not a default and where it comes from.
    """
    variables = _environment(args_class)
    flags = [_spelled(word) for word in (sys.argv[1:] if argv is None else argv)]
    config, flags = _split_config(flags)
    config = config or os.environ.get(f"{PREFIX}CONFIG")
    layers = {f"{PREFIX}{name.upper()}": words for name, words in variables.items()}
    layers |= {f"--config {config}": _yaml_as_flags(config, args_class) if config else [], "command line": flags}
    words = sum(layers.values(), [])
    values = _parse(words, args_class)
    if values["dataset_name"] is None and not Path(demo).exists():
        raise UserError(f"no --dataset_name, and the embedded demo, {demo}, is not here: name one, or start where it lies")
    if values["dataset_name"] is None and values["model_name_or_path"] is None:
        say(f"no --dataset_name and no --model_name_or_path: the embedded demo, {demo}", sys.stderr)
        layers = {f"the demo, {demo}": _yaml_as_flags(demo, args_class, beneath=words)} | layers
        values = _parse(sum(layers.values(), []), args_class)
    if values["dataset_name"] is None:
        values["dataset_name"] = _parse(_yaml_as_flags(demo, args_class), args_class)["dataset_name"]
    if values["model_name_or_path"] is None and default_model is not None:
        values["model_name_or_path"] = _last_stage(default_model)
    if values["dry_run"]:
        _say_origins(values, layers, args_class)
    for line in without_effect(values, args_class):
        say(line)
    return args_class(**values)  # combinations are checked once all of it is known


def launch(main: Callable[[Args], None], args_class: type[Args], demo: str, default_model: str | None = None) -> None:
    """Parse the arguments (see `parse_args`), call `main` with them, and end the process.

    A UserError becomes one line and exit code 1; so does running out of memory outside of the training steps.
    """
    keep_talking()
    if not sys.warnoptions:  # libraries' warnings about each other, which no user can act on
        warnings.simplefilter("ignore", FutureWarning)
    code: str | int | None = 0
    try:
        main(parse_args(args_class, demo, default_model))
    except UserError as error:
        show_and_exit(error)
    except (RuntimeError, MemoryError) as error:
        if not is_oom(error):
            last_words(error)
            raise
        reason = " ".join(str(error).split())[:160] or "MemoryError"
        where = (
            "outside of the training steps: lower --per_device_eval_batch_size or --eval_max_new_tokens, "
            "or what the script samples at a time"
        )
        show_and_exit(
            UserError(f"out of memory {where} ({reason}); what was saved is kept, the same command goes on from it")
        )
    except KeyboardInterrupt:  # while data and model are loaded; during training common/run/signals.py handles it
        say("stopped before the first step: there is nothing to save")
        code = 130
    except SystemExit as stop:
        code = stop.code or 0
    except Exception as error:
        last_words(error)
        raise
    sys.stdout.flush()
    sys.stderr.flush()
    if code or os.environ.get("WORLD_SIZE", "1") != "1":  # without destroying anything: see KEPT in common/run/launch.py
        os._exit(int(code))
    if main.__module__ == "__main__" and not hasattr(sys, "ps1"):  # a script that ends here, not a notebook
        _leave_within(60)


def _leave_within(seconds: float) -> None:
    """Limit Python's wait for threads at exit: one of a reward function may never end."""

    def leave() -> None:
        say(f"a thread of this process still runs after {seconds:g} s: it is not waited for")
        os._exit(0)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()


def _last_stage(output_dir: str) -> str:
    """The default model of a stage: the previous stage's, if it has finished, else the one shipped here."""
    base = "data/base_model"
    if Path(output_dir, "summary.json").exists():
        say(f"model: {output_dir} (the finished run of the last stage)")
        return output_dir
    if not Path(base, "config.json").exists():
        raise UserError(f"no --model_name_or_path, and neither {output_dir} nor {base} is here: name a model")
    script = f"train_{Path(output_dir).name}.py"
    say(f"model: {base} (it ships here; there is no finished run in {output_dir}, which {script} would make)")
    return base


# --- the environment ------------------------------------------------------------------------------------------------

PREFIX = "PLAINLOOP_"
OF_THE_TESTS = (f"{PREFIX}DATA", f"{PREFIX}CHAOS")


def _environment(args_class: type[CommonArgs]) -> dict[str, list[str]]:
    """{argument: its words} of the variables that are set. An empty one counts as not set, as is usual in containers.

    Several values are separated as in a shell, or are a JSON list. Raises UserError for a variable that matches no flag.
    """
    types, found = get_type_hints(args_class), {}
    for variable, value in sorted(os.environ.items()):
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or not value or variable in OF_THE_TESTS or name == "config":
            continue
        if name not in types or variable != variable.upper():
            near = difflib.get_close_matches(name, types, n=1)
            raise UserError(
                f"unknown variable {variable} in the environment: "
                + (f"did you mean {PREFIX}{near[0].upper()}?" if near else "it is no flag of this script (--help): unset it")
            )
        if get_origin(_without_none(types[name])) is list:
            found[name] = [f"--{name}", *_several(variable, value)]
        else:
            found[name] = [f"--{name}={value}"]
        try:
            _parse(found[name], args_class)
        except UserError as error:
            raise UserError(f"{variable}: {error}") from None
    return found


def _several(variable: str, value: str) -> list[str]:
    """The values of a variable for an argument that takes several."""
    if value.lstrip().startswith("{"):  # a source with settings
        return [value]
    try:
        if not value.lstrip().startswith("["):
            return shlex.split(value)
        return [item if isinstance(item, str) else json.dumps(item) for item in json.loads(value)]
    except ValueError as error:
        raise UserError(f"{variable}: {error}; expected values with spaces between them, or a JSON list") from None


def _say_origins(values: dict[str, Any], layers: dict[str, list[str]], args_class: type[CommonArgs]) -> None:
    """Print each value that is not a default, with the highest layer that sets it."""
    origins: dict[str, str] = {}
    for origin, words in layers.items():
        names = [word.removeprefix("--").split("=")[0] for word in words if word.startswith("--")]
        for name in names:
            known = name in values or not name.startswith("no_")
            origins[name if known else name.removeprefix("no_")] = origin
    say("settings that are not the default, and where they come from")
    for f in dataclasses.fields(args_class):
        value, default = values[f.name], f.default_factory() if f.default is dataclasses.MISSING else f.default
        if value != default:
            is_secret = first_definition(args_class, f.name)[1].metadata.get("secret")
            shown = "(secret)" if is_secret else value
            shown = " ".join(map(str, shown)) if isinstance(shown, list) else str(shown)
            origin = origins.get(f.name) or ("the demo" if f.name == "dataset_name" else "this script")
            say(f"    {f.name:28} {shown if len(shown) <= 60 else shown[:59] + '…':28} {origin}")
    say("")


# --- flags and YAML -------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UserError(f"{message} (--help lists the flags)")


def _parse(words: list[str], args_class: type[CommonArgs]) -> dict[str, Any]:
    """The values of all arguments, each checked individually."""
    parser = _Parser(allow_abbrev=False, usage="%(prog)s [--config FILE] [--flag value ...]")
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these arguments")  # removed before parsing
    parser._negative_number_matcher = re.compile(r"^-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$|^-(inf|nan)$")  # also -1e-3
    own = parser.add_argument_group("This script")
    groups = {args_class: own} | {cls: parser.add_argument_group(cls.__doc__) for cls in reversed(CommonArgs.__mro__[1:-1])}
    types = get_type_hints(args_class)
    for f in dataclasses.fields(args_class):
        kind, options = types[f.name], {}
        group = groups.get(first_definition(args_class, f.name)[0], own)
        kind = _without_none(kind)
        if several := get_origin(kind) is list:
            kind, options = get_args(kind)[0], {"nargs": "+"}
        if get_origin(kind) is Literal and isinstance(get_args(kind)[0], bool):
            kind = bool
        if get_origin(kind) is Literal:
            options |= {"choices": get_args(kind), "type": type(get_args(kind)[0])}
        elif kind in (str, int, float, bool):
            options |= {"metavar": kind.__name__.upper(), "type": kind}
        else:
            raise TypeError(f"{args_class.__name__}.{f.name}: {types[f.name]}; expected one of the types in common/args.py")
        default = f.default_factory() if f.default is dataclasses.MISSING else f.default
        if kind is bool:
            options |= {"metavar": "true/false", "type": _true_or_false}
        shown = f.metadata.get("help", "").replace("%%", "%") + ("" if default is None else f" (default: {default})")
        try:
            if kind is bool and not several:
                options |= {"nargs": "?", "const": True}
                no = {"dest": f.name, "action": "store_false", "default": default}
                group.add_argument(f"--no_{f.name}", help=argparse.SUPPRESS, **no)
            group.add_argument(f"--{f.name}", default=default, help=shown.replace("%", "%%"), **options)
        except argparse.ArgumentError:
            raise TypeError(f"{args_class.__name__}.{f.name}: this name is taken by another flag") from None
    parsed, unknown = parser.parse_known_args(words)
    if unknown:
        raise UserError(_unknown("flag", unknown[0], args_class, prefix="--"))
    values = vars(parsed)
    del values["config"]
    for name, value in values.items():
        declared = first_definition(args_class, name)[1].metadata
        _check_range(name, value, declared.get("within") or "(-inf, inf)")
        if any(
            "\ud800" <= letter <= "\udfff"
            for word in (value if isinstance(value, list) else [value])
            for letter in str(word)
        ):
            raise UserError(f"--{name} {value} is no UTF-8 text: rename what is called so, or start with PYTHONUTF8=1 set")
        if declared.get("is_path"):
            _check_path(name, value)
    return values


def _check_range(name: str, value: Any, within: str) -> None:
    """Raise UserError for a number, alone or in a list, outside the argument's range (see `arg`)."""
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, int | float) and not isinstance(number, bool) and not is_within(number, within):
            raise UserError(f"--{name} {number} is out of range, which is {within}")


def _check_path(name: str, value: Any) -> None:
    """Raise UserError for an impossible file name: otherwise the system would, wherever it is first used."""
    for word in value if isinstance(value, list) else [value]:
        if word is None or word.startswith(("{", "regex:")):  # a source with settings; a pattern
            continue
        sizes = [len(part.encode("utf-8", "surrogateescape")) for part in (word, *word.split("/"))]
        if "\0" in word or sizes[0] >= 4096 or max(sizes[1:]) > 255:
            raise UserError(f"--{name} {word[:60]}… cannot be the name of a file or a folder: it has {len(word)} characters")


def _without_none(kind: Any) -> Any:
    """X of X | None."""
    if get_origin(kind) in (Union, UnionType):
        return next(part for part in get_args(kind) if part is not NoneType)
    return kind


class _NoKeyTwice(yaml.SafeLoader):
    """Refuses duplicate keys, of which YAML would silently keep the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and keys.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} stands there twice", key.start_mark)
        return super().construct_mapping(node, deep)


def _true_or_false(word: str) -> bool:
    if word.lower() in ("true", "yes", "y", "t", "1"):
        return True
    if word.lower() in ("false", "no", "n", "f", "0"):
        return False
    raise argparse.ArgumentTypeError(f"true or false, not {word}")


def _spelled(word: str) -> str:
    """--learning-rate as --learning_rate."""
    flag, *value = word.split("=", 1)
    return "=".join([flag[:2] + flag[2:].replace("-", "_"), *value]) if word.startswith("--") else word


def _split_config(argv: list[str]) -> tuple[str | None, list[str]]:
    """(the file after --config, the other arguments)."""
    for i, word in enumerate(argv):
        if word == "--config":
            if i + 1 == len(argv):
                raise UserError("--config needs a YAML file")
            return argv[i + 1], argv[:i] + argv[i + 2 :]
        if word.startswith("--config="):
            return word.removeprefix("--config="), argv[:i] + argv[i + 1 :]
    return None, argv


def _yaml_as_flags(path: str, args_class: type[CommonArgs], beneath: list[str] | None = None) -> list[str]:
    """A YAML mapping as command-line words, so that both go through the same conversion and checks.

    beneath: words of higher priority; values that depend on an argument given there are left out (see goes_with of `arg`).
    """
    _check_path("config", path)
    given = {word.removeprefix("--").split("=")[0] for word in beneath or []}
    try:
        values = _NoKeyTwice(Path(path).read_text(encoding="utf-8")).get_single_data()
    except FileNotFoundError:
        raise UserError(f"--config {path}: there is no such file") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: not UTF-8, or 5,000 digits
        for mark in ("context_mark", "problem_mark"):  # they would quote lines, which may contain a secret
            if getattr(error, mark, None) is not None:
                getattr(error, mark).buffer = None
        raise UserError(f"--config {path}: cannot be read as YAML: {error}") from None
    if not isinstance(values, dict):
        raise UserError(f"--config {path}: expected `name: value` lines")
    types = get_type_hints(args_class)
    words = []
    for name, value in values.items():
        if name not in types:
            raise UserError(f"--config {path}: {_unknown('key', str(name), args_class)}")
        if isinstance(value, dict):
            raise UserError(f"--config {path}: {name} takes a value or a list, not a mapping")
        if isinstance(value, list) and get_origin(_without_none(types[name])) is not list:
            raise UserError(f"--config {path}: {name} takes one value, not a list")
        if beneath and first_definition(args_class, name)[1].metadata.get("goes_with") in given:
            continue
        if isinstance(value, list):  # a mapping in a list is a source with settings
            words += (
                [f"--{name}", *(json.dumps(v, default=str) if isinstance(v, dict) else str(v) for v in value)]
                if value
                else []
            )
        elif value is not None:
            words.append(f"--{name}={value}")
    return words


def _unknown(kind: str, word: str, args_class: type, prefix: str = "") -> str:
    word = re.sub(r"(https?://).*", r"\1…", word.split("=")[0])  # the rest may be a secret
    name = word.removeprefix("--").replace("-", "_")
    if name in ELSEWHERE:
        return f"unknown {kind} {word}: {ELSEWHERE[name]}"
    other = other_name(name, args_class)
    near = [other] if other else difflib.get_close_matches(name, [f.name for f in dataclasses.fields(args_class)], n=1)
    return f"unknown {kind} {word}" + (f": did you mean {prefix}{near[0]}?" if near else " (--help lists the flags)")
