"""Rewards: built-in functions, user functions, and reward models; running user code.

A reward function has TRL's signature: `f(prompts, completions, **columns) -> list[float | None]`, one number
per completion; None abstains. `completions` are strings, or, if the prompts are chats, lists with one
assistant message. `columns` holds every other column of the dataset, and `completion_ids`.
"""

import asyncio
from collections.abc import Callable
import contextlib
import copy
import difflib
import functools
import importlib.util
import inspect
import itertools
import math
import os
from pathlib import Path
import re
import sys
import sysconfig
import traceback
from typing import Any, NamedTuple

from common.errors import OutsideError, UserError, quoted
from common.losses import combine_rewards
from common.processes import TimeLimitReached, time_limit
import numpy as np
import torch

RewardFunction = Callable[..., list[float | None]]
Completion = str | list[dict[str, Any]]  # as passed to reward functions
REWARD_SECONDS = 600.0  # allowed for the call of a reward function, and for the import of its file
LARGEST = 1e15  # largest reward: its square is finite in float32
# A minus belongs to the number unless it follows a digit, a letter or ")" (10-3, x-3, pages 3-5); commas only
# between groups of three digits.
NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z)])-)?(?:(?<!\d)\d{1,3}(?:,\d{3})+(?!,?\d)|\d+|(?<![\w.])(?=\.\d))(?:\.\d+)?"
)
DEBT = re.compile(r"(?<![^\W_]|[)])-\\?[$€£¥₹] ?")  # -$5
GROUPED = re.compile(r"(?<=\d)(\{,\}|\\,)(?=\d{3}(?!\d))")  # 1{,}000 in TeX
# as TRL's own script names them
OF_TRL = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
DOTTED = re.compile(r"[^\W\d]\w*([.][^\W\d]\w*)+")
MARKS = ("####", "Answer:", "\\boxed{")  # of the answer at the end of a text
FORMULA = re.compile(  # a power, root or π; 2x, 1e2; 1/2; x+2; 2*x
    r"[\\^√π²³]|\d[A-Za-z]|/\s*\d|\b[A-Za-z](\s?[+*/]\s?|-|\s-\s)\d|\d\s?[-+*/]\s?[A-Za-z]\b"
)
# Passed to every function, beside the columns of the rows.
ALWAYS_GIVEN = ("prompts", "completions", "completion_ids")
# Not allowed as a reward's name: evaluations have metrics of these names (eval_loss), samples these fields.
RESERVED = {
    "loss",
    "perplexity",
    "mean_token_accuracy",
    "entropy",
    "bits_per_byte",
    "step",
    "temperature",
    "prompt",
    "completion",
}


class Reward(NamedTuple):
    name: str  # as in the metric rewards/<name>/mean
    function: RewardFunction


def load_rewards(specs: list[str] | None, device: torch.device, flag: str = "--reward_funcs") -> list[Reward]:
    """Reward functions by name. flag: the one that named them, for messages.

    exact_number or exact_number:MARK; regex:PATTERN; length:N; path/to/file.py:function; a function of an
    installed package by its dotted path, or one of TRL's by its name; or a reward model (a folder or Hub name
    of an AutoModelForSequenceClassification with one label). Raises UserError if one cannot be loaded.
    """
    rewards = []
    for spec in specs or []:
        try:
            rewards.append(_load(spec, device))
        except UserError as error:
            raise UserError(f"{flag} {spec}: {error}") from None
    names = [reward.name for reward in rewards]
    for name in RESERVED.intersection(names):
        raise UserError(
            f"{flag}: a function called {name} would replace the {name} of evaluations: rename it"
        )
    if len(set(names)) < len(names):
        raise UserError(f"{flag}: two functions have the same name: {', '.join(names)}")
    return rewards


def _load(spec: str, device: torch.device) -> Reward:
    kind, _, argument = spec.partition(":")
    if kind == "exact_number":
        return Reward("exact_number", exact_number(argument))
    if kind == "regex":
        return Reward("regex", regex(argument))
    if kind == "length":
        return Reward("length", length(argument))
    if ".py:" in spec or spec.endswith(".py"):
        return Reward(spec.rpartition(":")[2], from_file(spec))
    if spec in OF_TRL:
        return Reward(spec, from_package(f"trl.rewards.{spec}"))
    if DOTTED.fullmatch(spec) and not os.path.exists(spec):
        return Reward(spec.rpartition(".")[2], from_package(spec))
    return Reward(Path(spec).name, load_reward_model(spec, device))


# --- user code ----------------------------------------------------------------------------------------------


def from_file(spec: str, timeout: float = REWARD_SECONDS) -> Any:
    """The function or class named by "path/to/file.py:name". timeout: seconds that the import may take; 0: no
    limit. Raises UserError if it cannot be loaded."""
    path = spec
    name = ""
    if ".py:" in spec:
        path, _, name = spec.rpartition(":")
    if not os.path.isfile(path):
        raise UserError(f"there is no file {path}")
    module_spec = importlib.util.spec_from_file_location(f"plainloop_file_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # dataclasses and pickle look up a class's module here
    load = functools.partial(module_spec.loader.exec_module, module)
    call_user_code("importing it", load, timeout)
    if not callable(getattr(module, name, None)):
        raise UserError(f"{path} has no function or class {name or 'named: expected file.py:name'}")
    return getattr(module, name)


def from_package(spec: str) -> Any:
    """The function named by "package.module.name". Raises UserError if it cannot be imported."""
    module_name, _, name = spec.rpartition(".")
    try:
        module = call_user_code("importing it", importlib.import_module, REWARD_SECONDS, name=module_name)
    except UserError as error:
        if "ModuleNotFoundError" not in str(error):  # it is there, and fails
            raise
        package = spec.partition(".")[0]
        raise UserError(f"{error}; pip install {package}, or name a file: file.py:{name}") from None
    if not callable(getattr(module, name, None)):
        raise UserError(f"{module_name} has no function {name}")
    return getattr(module, name)


def call_user_code(what: str, function: Callable[..., Any], timeout: float, /, **arguments: Any) -> Any:
    """function(**arguments), awaited if necessary; the working directory is restored if the function changes
    it. Raises UserError, which says what failed, how, and in which line, for whatever it raises, and after
    `timeout` seconds (0: no limit)."""
    try:
        with contextlib.chdir("."), time_limit(timeout):
            value = function(**arguments)
            return asyncio.run(value) if inspect.isawaitable(value) else value
    except UserError:
        raise
    except TimeLimitReached:
        raise UserError(f"{what} took more than {timeout:g} s") from None
    except BaseException as error:  # user code may raise anything, and call sys.exit
        raise UserError(
            f"{what} raised {type(error).__name__}: {quoted(error, 600, str)}{_line_of(error)}"
        ) from None


def _line_of(error: BaseException) -> str:
    """The line that raised it, the last one outside of libraries, in brackets."""
    libraries = ("site-packages", sysconfig.get_path("stdlib"), str(Path(__file__).parent), "<frozen ")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(place in frame.filename for place in libraries):
            return f" ({frame.filename}:{frame.lineno})"
    return ""


# --- ready-made ---------------------------------------------------------------------------------------------


def exact_number(mark: str = "") -> RewardFunction:
    """1 if the completion's number equals the answer's, else 0. The number of a text is the one after its
    last "####", "Answer:" or "\\boxed{", else its last one; 1,000 equals 1000.0. None if the answer, from its
    last mark on, is not one number: a fraction, a formula, a list.

    mark: in a completion only a number after it counts ("Answer:").
    """

    def reward(
        prompts: list, completions: list[Completion], answer: list, **columns: Any
    ) -> list[float | None]:
        scores = []
        for completion, truth in zip(completions, answer, strict=True):
            # What stands after the last mark of any kind is the shortest of these; without a mark, all of it.
            ends = [str(truth).rpartition(each)[2] for each in MARKS]
            end = _plain(min(ends, key=len))
            right = None
            if len(NUMBER.findall(end)) == 1 and not FORMULA.search(end):
                right = final_number(end)
            text = _plain(text_of(completion))
            number = number_after(text, mark) if mark else final_number(text)
            scores.append(None if right is None else float(number == right))
        return scores

    return reward


def _plain(text: str) -> str:
    """The text with its amounts in the form that NUMBER recognises."""
    text = re.sub("[−–]", "-", text)
    text = DEBT.sub("-", text)
    return GROUPED.sub("", text)


def regex(pattern: str) -> Callable[..., list[float]]:
    """1 if the pattern is found in the completion, else 0 (re.DOTALL; anchor it with ^ and $ to match the
    whole)."""
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(f"{error}") from None

    def regex(prompts: list, completions: list[Completion], **columns: Any) -> list[float]:
        return [float(compiled.search(text_of(completion)) is not None) for completion in completions]

    return regex


def length(limit: str) -> Callable[..., list[float]]:
    """0 up to the limit; above it, minus the excess as a share of the limit."""
    if not limit.isdigit() or int(limit) == 0:
        raise UserError("expected a number of tokens, for instance length:200")
    N = int(limit)

    def length(
        prompts: list, completions: list[Completion], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        return [min(0.0, (N - len(ids)) / N) for ids in completion_ids]

    return length


def final_number(text: str) -> float | None:
    """The final number of a text, or None."""
    for mark in sorted(MARKS, key=text.rfind, reverse=True):
        number = number_after(text, mark)
        if number is not None:
            return number
    numbers = NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def number_after(text: str, mark: str) -> float | None:
    """The first number after the last occurrence of the mark, or None."""
    _, found_mark, end = text.rpartition(mark)
    match = NUMBER.search(end)
    return float(match.group().replace(",", "")) if found_mark and match else None


def text_of(completion: Completion) -> str:
    """The text of a completion in either form: of several messages, that of the last one."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def column_names(rows: list[dict[str, Any]]) -> list[str]:
    """The columns of the rows beside the prompt, in the order of their first rows."""
    names = dict.fromkeys(itertools.chain.from_iterable(rows))
    return [name for name in names if name not in ("prompt", "prompt_ids")]


def check_columns(rewards: list[Reward], rows: list[dict[str, Any]]) -> None:
    """Raise UserError for rows with columns that would replace what each function gets, or that do not suit
    the signature of one: before anything is sampled."""
    if not rewards:
        return
    columns = column_names(rows)
    for name in ALWAYS_GIVEN:
        if name in columns:
            raise UserError(
                f"the rows have a column {name}, but every reward gets an argument of this name: --columns its_{name}={name}"
            )
    there = f"the rows have {', '.join(columns) or 'none'}"
    for reward in rewards:
        try:
            parameters = inspect.signature(reward.function).parameters.values()
        except (TypeError, ValueError):  # of a function written in C
            continue
        names = set()
        needed = set()
        not_taken = {*ALWAYS_GIVEN, *columns}
        for p in parameters:
            if p.kind == p.VAR_KEYWORD:
                not_taken = set()
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
                names.add(p.name)
                if p.default is p.empty:
                    needed.add(p.name)
        for name in sorted(needed.difference(ALWAYS_GIVEN, columns)):
            alike = difflib.get_close_matches(name, sorted(set(columns) - names), 1, 0.0)
            way = f": --columns {name}={alike[0]}" if alike else ""
            raise UserError(f"reward function {reward.name} needs a column {name}; {there}{way}")
        for name in sorted(not_taken - names):
            raise UserError(f"reward function {reward.name} does not take {name}; {there}: give it **columns")


# --- scoring ------------------------------------------------------------------------------------------------


def score(
    rewards: list[Reward],
    rows: list[dict[str, Any]],
    texts: list[Completion],
    ids: list[list[int]],
    objects: dict[str, list[Any]] | None = None,
) -> list[list[float | None]]:
    """Apply every function to every completion: [function][completion].

    rows: the dataset's row of each completion, with its "prompt". texts: for a completion of several turns
    its messages. objects: further columns, passed by reference, whereas the others are copied. Raises
    OutsideError, naming the function, if one raises or returns anything but one finite number (or None) per
    completion: called by `on_each_process`, what was trained until then is saved.
    """
    if not rows:
        return [[] for _ in rewards]
    prompts = [row["prompt"] for row in rows]
    completions = []
    for prompt, completion in zip(prompts, texts, strict=True):
        if isinstance(completion, str) and not isinstance(prompt, str):  # a chat
            completion = [{"role": "assistant", "content": completion}]
        completions.append(completion)
    given = {"prompts": prompts, "completions": completions, "completion_ids": ids}
    for name in column_names(rows):
        given[name] = [row.get(name) for row in rows]
    scores = []
    for reward in rewards:
        arguments = copy.deepcopy(given) | (objects or {})
        scores.append(_score(reward, prompts, arguments))
    return scores


def _score(reward: Reward, prompts: list[Any], given: dict[str, Any]) -> list[float | None]:
    """Apply one function to every completion. given: its arguments, copies, so that it cannot change what is
    trained on."""
    where = f"reward function {reward.name}"
    try:
        values = call_user_code(where, reward.function, REWARD_SECONDS, **given)
    except UserError as error:
        raise OutsideError(
            f"{error}; it was given {', '.join(given)}; first prompt: {quoted(prompts[0])}"
        ) from None
    if hasattr(values, "tolist"):  # of numpy, torch or pandas
        values = values.tolist()
    numbers = []
    if isinstance(values, list | tuple):
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            numbers = [None if value is None else float(value) for value in values]
    is_finite = all(number is None or abs(number) <= LARGEST for number in numbers)
    if len(numbers) != len(prompts) or not is_finite:
        raise OutsideError(
            f"{where} returned {quoted(values, 600)} for {len(prompts)} completions; expected a list with one finite number "
            f"(of at most {LARGEST:g} in size) or None for each"
        )
    return numbers


def score_by_name(
    rewards: list[Reward],
    rows: list[dict[str, Any]],
    texts: list[Completion],
    ids: list[list[int]],
    weights: list[float] | None = None,
) -> dict[str, list[float | None]]:
    """{name of the function: scores}, for an evaluation. weights: also score their weighted sum, as
    "reward"."""
    scores = score(rewards, rows, texts, ids)
    named = dict(zip([reward.name for reward in rewards], scores, strict=True))
    if rewards and weights is not None:
        table = np.array(scores, np.float32)  # None becomes NaN
        table = torch.from_numpy(table.T)  # (completions, functions)
        total = combine_rewards(table, torch.tensor(weights)).tolist()
        named["reward"] = [None if math.isnan(value) else value for value in total]
    return named


# --- reward models ----------------------------------------------------------------------------------------------


def load_reward_model(name: str, device: torch.device) -> Callable[..., list[float]]:
    """The reward function of a model. Raises UserError if it cannot be loaded.

    An AutoModelForSequenceClassification with one label scores the whole text, prompt and completion.
    """
    import transformers
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    transformers.utils.logging.disable_progress_bar()
    try:
        # False rather than unset: transformers would prompt for running the model's own code.
        load = AutoModelForSequenceClassification.from_pretrained
        model, info = load(name, num_labels=1, trust_remote_code=False, output_loading_info=True)
        # An adapter's missing keys say nothing of the head: it has to be its own, or its base's.
        outside = []
        for module_name, _ in model.named_modules():
            if not module_name.startswith(model.base_model_prefix):
                outside.append(module_name)
        has_own_head = "modules_to_save" in str(outside)
        base_has_head = "SequenceClassification" in str(model.config.architectures)
        is_adapter = hasattr(model, "peft_config")
        if info["missing_keys"] or (is_adapter and not has_own_head and not base_has_head):
            raise ValueError(
                "it has no head for scores (experiments/train_reward.py writes one to OUTPUT_DIR/classifier)"
            )
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error)[:200]
        known = "exact_number, regex:PATTERN, length:N, file.py:function, package.function, or a reward model"
        raise UserError(f"neither a known function nor a reward model ({known}): {reason}") from None

    model = model.to(device).eval()

    @torch.no_grad()
    def reward_model(prompts: list, completions: list[Completion], **columns: Any) -> list[float]:
        scores = []
        for prompt, completion in zip(prompts, completions, strict=True):
            if isinstance(prompt, str):
                ids = tokenizer(prompt + completion, return_tensors="pt").input_ids
            else:
                text = tokenizer.apply_chat_template(prompt + completion, tokenize=False)
                ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
            scores.append(model(input_ids=ids.to(device)).logits[0, 0].item())
        return scores

    return reward_model
