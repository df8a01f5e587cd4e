"""Read another trainer's settings for tools/translate.py: a YAML or JSON file, a shell script, or a command line;
a Python script or a notebook by translate_script.py."""

from pathlib import Path
import re
import shlex
from string import Template
from typing import Any, NamedTuple

from common.errors import UserError
from common.other_names import said_here
import yaml

from tools.translate_script import CALLS, OF_FLAGS, SECRET, read_script, source_of, text_of

LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "python", "python3")
PROGRAMS = ("trl", "llamafactory-cli", "axolotl")
# Within quotes the shell's operators are text: other characters stand for them until the line is split into words.
QUOTED = str.maketrans("|;&<>", "\ue000\ue001\ue002\ue003\ue004")
UNQUOTED = str.maketrans("\ue000\ue001\ue002\ue003\ue004", "|;&<>")


class Theirs(NamedTuple):
    trainer: str  # whose defaults apply
    settings: dict[str, Any]
    launcher: list[str]  # words of accelerate launch
    hints: str  # words, among which may be the name of the stage


def read(words: list[str]) -> Theirs:
    """The settings that a file or a command line holds. Raises UserError."""
    if words[0].endswith(".sh"):
        words = command_in(Path(words[0])) + words[1:]
    launcher, hints, rest = split_command(words)
    given, computed, files = settings_in(rest)
    script = Path(hints)
    is_own = False  # whether it is a script of one's own, not one whose flags are the settings
    if script.suffix == ".py" and script.is_file() and not files:
        is_own = not OF_FLAGS.search(source_of(script))
    settings: dict[str, Any] = {}
    text = ""
    for path in [script] if is_own else files:
        hints += f" {path}"
        if path.suffix not in (".py", ".ipynb"):
            settings |= read_file(path)
            continue
        text = source_of(path)
        found = read_script(text, given)
        if not found and not is_own:
            raise UserError(f"no call in it configures a training ({', '.join(CALLS)}, from_pretrained)")
        settings |= found
    settings |= given  # the words count, wherever they stand
    if computed:
        settings["computed_values"] = settings.get("computed_values", {}) | computed
    for name, value in settings.items():
        if isinstance(value, str) and SECRET.fullmatch(name):
            settings[name] = "(secret)"
    if text:
        hints += " " + " ".join(re.findall(r"\b(SFT|DPO|ORPO|GRPO|KTO|Reward)(?=Config|Trainer)", text))
    return Theirs(trainer_of(settings, text, hints), settings, launcher, hints)


def settings_in(words: list[str]) -> tuple[dict[str, Any], dict[str, str], list[Path]]:
    """The settings that the words of a command give, those that the shell would compute, and files with more."""
    given: dict[str, Any] = {}
    computed: dict[str, str] = {}
    files: list[Path] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--"):
            name = name.replace("-", "_")
        if equals:
            values = [value]
        elif word.startswith("--"):
            values = []
            while rest and not rest[0].startswith("--"):
                values.append(rest.pop(0))
        else:
            name = "config"
            values = [word]
        spelled_out = [value for value in values if "$" not in value]
        unset = [value for value in values if "$" in value]  # variables that a shell script does not set
        if unset:
            computed[name] = " ".join(unset)
        if values and not spelled_out:
            continue
        if name == "config":
            files += map(Path, spelled_out)
        elif len(spelled_out) > 1:
            given[name] = [plain(value) for value in spelled_out]
        elif spelled_out:
            given[name] = plain(spelled_out[0])
        elif name.startswith("no_") and said_here(name) is None:
            given[name.removeprefix("no_")] = False
        else:
            given[name] = True
    return given, computed, files


def split_command(words: list[str]) -> tuple[list[str], str, list[str]]:
    """The launcher's own words, those that name the stage, and the words with settings."""
    while len(words) > 1 and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", words[0]):  # variables of the environment
        words = words[1:]
    if words[0] in PROGRAMS:
        return [], " ".join(words[:2]), words[2:]
    scripts = []
    for i, word in enumerate(words):
        if word.endswith(".py") or (i and words[i - 1] == "-m"):
            scripts.append(i)
    if words[0] not in LAUNCHERS or not scripts:
        return [], "", list(words)
    before, script, rest = words[: scripts[0]], words[scripts[0]], words[scripts[0] + 1 :]
    if before[:2] == ["accelerate", "launch"]:
        return [word for word in before[2:] if word != "-m"], script, rest
    launched = " ".join(before)
    if processes := re.search(r"--(?:nproc[_-]per[_-]node|num_gpus)[ =](\d+)", launched):
        rest = [*rest, f"--num_processes={processes[1]}"]
    if devices := re.search(r"--include[ =]\S+?:([\d,]+)", launched):
        rest = [*rest, f"--num_processes={len(devices[1].split(','))}"]
    return [], script, rest


def command_in(path: Path) -> list[str]:
    """The longest command of a shell script that starts a training, with the variables that the script sets to
    texts; of what it computes the $ is left."""
    text = text_of(path).replace("\\\n", "")
    variables: dict[str, str] = {}
    commands: list[list[str]] = []
    for line in text.splitlines():
        before = ""
        while line != before:  # from the innermost braces on
            before = line
            line = re.sub(r"\$\([^()]*\)|`[^`]*`", "$computed", line)
            line = re.sub(r"\$\{(\w+):?-([^{}]*)\}", lambda found: variables.get(found[1], found[2]), line)
            line = Template(line).safe_substitute(variables)
        line = re.sub(r"'[^']*'|\"[^\"]*\"", lambda text: text[0].translate(QUOTED), line)
        line = re.sub(r"&(?=\s|$)", " & ", line)  # 'wandb'& is two words
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a text of several lines
            continue
        if words and words[0] == "export":
            words = words[1:]
        if len(words) == 1 and re.match(r"\w+=", words[0]):
            name, _, value = words[0].partition("=")
            variables[name] = value
        command: list[str] = []
        for word in words:
            if command and re.match(r"[|;&<]|\d?>", word):  # another command, or a file
                break
            if command or word in (*LAUNCHERS, *PROGRAMS):
                command.append(word.translate(UNQUOTED))
        commands.append(command)
    longest = max(commands, key=len, default=[])
    if len(longest) < 3:
        raise UserError(f"{path}: no command in it starts a training ({', '.join(LAUNCHERS + PROGRAMS)})")
    return longest


def plain(word: str) -> Any:
    """A word of a command line as a value."""
    try:
        return yaml.safe_load(word)
    except yaml.YAMLError:
        return word


def read_file(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(text_of(path))
    except (ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected `name: value` lines")
    return found


def trainer_of(settings: dict[str, Any], text: str, hints: str) -> str:
    """Whose settings these are."""
    if re.search(r"^\s*(from|import) unsloth\b", text, re.MULTILINE):
        return "unsloth"
    if "base_model" in settings or "axolotl" in hints:
        return "axolotl"
    if {"stage", "finetuning_type", "cutoff_len"} & settings.keys() or "llamafactory" in hints:
        return "LLaMA-Factory"
    if "run_clm" in hints or ("TrainingArguments" in text and "trl" not in text):
        return "transformers"
    return "TRL"
