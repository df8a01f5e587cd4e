"""Read the settings in a Python script or a notebook, for tools/translate.py: those that are written down, once and in
all cases. What the script computes or decides is told apart."""

import ast
import json
from pathlib import Path
import re
from typing import Any

from common.errors import UserError

# Settings whose values are not shown.
SECRET = re.compile(r"(hub_|hf_|hf_hub_|push_to_hub_)?token|(wandb|swanlab)_(api_)?key|api_key|.*password")
# What LoraConfig of peft has where a script says nothing.
PEFT = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": "peft's choice"}
CONFIGS = ("Config", "Arguments")
CALLS = (*CONFIGS, "DictDefault", "get_peft_model", "FastLanguageModel.from_pretrained")
CALLS += ("Trainer", "EarlyStoppingCallback", "get_chat_template")
# Objects that a trainer is given; what is said in their own calls counts.
OBJECTS = ("model", "args", "train_dataset", "eval_dataset", "tokenizer", "processing_class", "callbacks")
OBJECTS += ("ref_model", "data_collator", "compute_metrics", "formatting_func", "peft_config", "optimizers")
OBJECTS += ("reward_funcs",)
# A script whose flags are the settings.
OF_FLAGS = re.compile("(Hf|H4)ArgumentParser|TrlParser")
# Cells of a notebook in another language, and lines that are commands.
OTHER_LANGUAGE = re.compile(
    r"\s*%%(bash|sh|script|cmd|html|javascript|js|latex|markdown|svg|sql|perl|ruby|(write)?file)\b"
)
COMMAND = re.compile(r"^([ \t]*)[%!]+[a-zA-Z{](.*\\\n)*.*$", re.MULTILINE)


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from None


def source_of(path: Path) -> str:
    """The text of a Python file, or of a notebook's cells, with `pass` for the shell's and IPython's commands."""
    text = text_of(path)
    if path.suffix == ".py":
        return text
    try:
        cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    except (ValueError, KeyError) as error:
        raise UserError(f"{path}: {error}") from None
    code = []
    for cell in map("".join, cells):
        if not OTHER_LANGUAGE.match(cell):
            code.append(COMMAND.sub(r"\1pass", cell))
    return "\n".join(code)


def read_script(text: str, given: dict[str, Any]) -> dict[str, Any]:
    """The keywords of the calls that configure a training, where their values are written down; {} without such a
    call. Of several calls the first one counts: scripts often end with a test of the model. given: the words of
    the command, for the script's own parser."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise UserError(f"the script cannot be read: line {error.lineno}: {error.msg}") from None
    tree = TakenBranches(constants_of(tree, given)).visit(tree)
    script = Script(tree, constants_of(tree, given))
    for call in script.calls:
        script.add_call(call)
    for target, values in assignments_of(tree).items():
        script.add_attribute(target, values)
    settings = script.settings
    if "tokenizer_name" in settings and settings["tokenizer_name"] == settings.get("model_name"):
        del settings["tokenizer_name"]
    if any(ast.unparse(call.func).endswith("LoraConfig") for call in script.calls):
        settings = {name: value for name, value in PEFT.items() if name not in script.computed} | settings
    if script.computed:
        settings["computed_values"] = script.computed
    if script.later:
        settings["later_values"] = script.later
    return settings


class Script:
    """What the calls of a script say."""

    def __init__(self, tree: ast.Module, constants: dict[str, Any]):
        self.constants = constants
        self.settings: dict[str, Any] = {}
        self.computed: dict[str, str] = {}  # {setting: its expression}
        self.later: list[str] = []  # values that come after the first one
        self.calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        self.calls.sort(key=lambda call: call.lineno)
        self.configs = [call for call in self.calls if is_config(call)]
        self.assigned = assigned_once(tree)
        data: dict[str, set[str]] = {"train_dataset": set(), "eval_dataset": set()}  # variables with it
        for node in ast.walk(tree):
            if isinstance(node, ast.keyword) and node.arg in data:
                data[node.arg].add(ast.unparse(node.value))
        evaluated = data["eval_dataset"] - data["train_dataset"]
        self.for_evaluation = [self.assigned.get(name) for name in evaluated]

    def keep(self, name: str, node: ast.expr) -> None:
        """A value, if it is the first one, and spelled out."""
        value = "(secret)" if SECRET.fullmatch(name) else literal(node, self.constants)
        if value is ... and name in ("bf16", "fp16"):  # whether the GPU can do it
            value = ast.unparse(node)
        if value is ... or "**" in name:
            self.computed.setdefault(name, ast.unparse(node))
        elif self.settings.setdefault(name, value) != value:
            self.later.append(f"{name}={value}")

    def text_in(self, node: ast.expr | None) -> str | None:
        """The text that an expression spells out, if it is one."""
        value = literal(node, self.constants) if node else None
        return value if isinstance(value, str) else None

    def add_call(self, call: ast.Call) -> None:
        called = ast.unparse(call.func)
        keywords = keywords_of(call, self.assigned, self.constants)
        first = call.args[0] if call.args else None
        if called.endswith(("get_peft_model", "LoraConfig")):
            self.settings["use_peft"] = True
        if called.endswith("train_on_responses_only"):
            self.settings["train_on_responses_only"] = True
        if called.endswith("Trainer"):
            self.add_trainer(keywords.pop("model", first), keywords)
        elif called.endswith("load_dataset"):
            self.add_data(call, keywords)
        elif re.search(r"Tokenizer\w*\.from_pretrained$", called):
            if name := self.text_in(first):
                self.settings.setdefault("tokenizer_name", name)
        elif called.endswith(CALLS) or re.search(r"Model\w*\.from_pretrained$", called):
            if self.text_in(first):
                self.keep("output_dir" if called.endswith(CONFIGS) else "model_name", first)
            for name, node in keywords.items():
                self.keep(name if is_config(call) else name.replace("**", f"{called}: **"), node)

    def add_trainer(self, model: ast.expr | None, keywords: dict[str, ast.expr]) -> None:
        if name := self.text_in(model):
            self.settings["model_name"] = name
        for name, node in keywords.items():
            if name not in OBJECTS:
                self.keep(name, node)
        rewards = keywords.get("reward_funcs", ast.Constant(None))
        if literal(rewards, self.constants) is not ...:
            self.keep("reward_funcs", rewards)
            return
        for reward in rewards.elts if isinstance(rewards, ast.List) else [rewards]:
            name = self.text_in(reward)
            if isinstance(reward, ast.Name) and name is None:  # a function
                name = reward.id
            if name:
                self.settings.setdefault("reward_funcs", []).append(name)
            else:
                self.computed["reward_funcs"] = ast.unparse(rewards)

    def add_data(self, call: ast.Call, keywords: dict[str, ast.expr]) -> None:
        keywords.pop("token", None)  # not to be shown
        found = dict(zip(("path", "name"), call.args, strict=False)) | keywords
        source = {}
        for name, node in found.items():
            value = literal(node, self.constants)
            if value is not ...:
                source[name] = value
            else:
                self.computed.setdefault(f"load_dataset: {name}", ast.unparse(node))
        kind = "eval_dataset" if call in self.for_evaluation else "datasets"
        if self.settings.setdefault(kind, [source]) != [source]:
            self.later.append(ast.unparse(call))

    def add_attribute(self, target: str, values: list[ast.expr]) -> None:
        """args.packing = True, after args = SFTConfig(...)."""
        variable, _, name = target.rpartition(".")
        config = self.assigned.get(variable)
        if not isinstance(config, ast.Call) or not ast.unparse(config.func).endswith(CONFIGS):
            return
        if config in self.configs[1:]:  # of another training
            self.later.append(f"{target} = {ast.unparse(values[0])}")
            return
        self.settings.pop(name, None)
        self.computed.pop(name, None)
        if target in self.assigned:
            self.keep(name, values[0])
        else:
            self.computed[name] = " or ".join(map(ast.unparse, values))


class TakenBranches(ast.NodeTransformer):
    """Leaves out the branches that a constant turns off: LoraConfig(...) if USE_LORA else None."""

    def __init__(self, constants: dict[str, Any]):
        self.constants = constants

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        test = literal(node.test, self.constants)
        if ast.unparse(node.test).startswith("__name__ =="):
            test = True
        if test is ...:
            return node
        return node.body if test else node.orelse

    visit_IfExp = visit_If


def is_config(call: ast.Call) -> bool:
    """Whether a call makes the settings of a trainer."""
    called = ast.unparse(call.func)
    return called.endswith(CONFIGS) and not called.endswith(("LoraConfig", "BitsAndBytesConfig"))


def assignments_of(tree: ast.Module) -> dict[str, list[ast.expr]]:
    """{a variable, or an attribute or entry of one: what it is assigned}."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            found.setdefault(ast.unparse(node.targets[0]), []).append(node.value)
    return found


def assigned_once(tree: ast.Module) -> dict[str, ast.expr]:
    """The variables and attributes that are assigned one value in all cases, with it."""
    changed = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.For | ast.While):
            parts = ast.Module([*node.body, *node.orelse], [])
            changed |= {target for target in assignments_of(parts) if "." in target}
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".update", ".pop", ".setdefault")):
            changed.add(ast.unparse(node.func).rpartition(".")[0])
    once = {}
    for target, values in assignments_of(tree).items():
        if "[" in target:
            changed.add(target.partition("[")[0])
        if len(values) == 1:
            once[target] = values[0]
    return {target: value for target, value in once.items() if target not in changed}


def keywords_of(
    call: ast.Call, assigned: dict[str, ast.expr], constants: dict[str, Any]
) -> dict[str, ast.expr]:
    """The keywords of a call, those of **dictionaries that are spelled out among them; others under their own
    name, with the stars."""
    return expanded([(keyword.arg, keyword.value) for keyword in call.keywords], assigned, constants)


def expanded(
    items: list[tuple[str | None, ast.expr]], assigned: dict[str, ast.expr], constants: dict[str, Any]
) -> dict[str, ast.expr]:
    """Names with values; None: a dictionary whose entries they are."""
    found = {}
    for name, value in items:
        if name is None:
            unknown = {f"**{ast.unparse(value)}": value}
            found |= entries_of(value, assigned, constants) or unknown
        else:
            found[name] = value
    return found


def entries_of(
    node: ast.expr | None, assigned: dict[str, ast.expr], constants: dict[str, Any]
) -> dict[str, ast.expr]:
    """The entries of a dictionary: {...}, dict(...), a variable with one, or one within another; {} if it has to be
    computed."""
    if isinstance(node, ast.Dict):
        items = []
        for key, value in zip(node.keys, node.values, strict=True):
            name = None if key is None else str(literal(key, constants))  # None: **another
            items.append((name, value))
        return expanded(items, assigned, constants)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict" and not node.args:
        return keywords_of(node, assigned, constants)
    if isinstance(node, ast.Subscript):
        inside = entries_of(node.value, assigned, constants)
        return entries_of(inside.get(str(literal(node.slice, constants))), assigned, constants)
    if isinstance(node, ast.Name) and node.id in assigned:
        others = dict(assigned)
        return entries_of(others.pop(node.id), others, constants)
    return {}


def constants_of(tree: ast.Module, given: dict[str, Any]) -> dict[str, Any]:
    """The variables that are assigned one value, which is written down, and the script's arguments: given, or their
    defaults."""
    constants: dict[str, Any] = {}

    def assign(name: str, value: Any) -> None:
        constants[name] = value if constants.get(name, value) == value else ...

    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            constants |= argument_of(node, constants)
        if isinstance(node, ast.ClassDef):
            for name, value in fields_of(node, constants).items():
                assign(name, value)
        if isinstance(node, ast.AugAssign | ast.For):
            assign(ast.unparse(node.target), ...)
        if isinstance(node, ast.arg):  # a parameter of a function
            assign(node.arg, ...)
        if not isinstance(node, ast.Assign):
            continue
        target = node.targets[0]
        if isinstance(target, ast.Name | ast.Attribute):
            assign(ast.unparse(target), literal(node.value, constants))
        elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            for name, value in zip(target.elts, node.value.elts, strict=False):
                assign(ast.unparse(name), literal(value, constants))
    for name, value in given.items():
        constants[f".{name}"] = value
        for known in constants:
            if known.endswith(f".{name}"):
                constants[known] = value
    return constants


def argument_of(call: ast.Call, constants: dict[str, Any]) -> dict[str, Any]:
    """{".beta": 0.1} of parser.add_argument("--beta", default=0.1)."""
    defaults = [literal(keyword.value, constants) for keyword in call.keywords if keyword.arg == "default"]
    if not ast.unparse(call.func).endswith(".add_argument") or not defaults or not call.args:
        return {}
    name = str(literal(call.args[-1], constants)).lstrip("-").replace("-", "_")
    return {f".{name}": defaults[0]}


def fields_of(node: ast.ClassDef, constants: dict[str, Any]) -> dict[str, Any]:
    """{".beta": 0.1} of a dataclass with `beta: float = 0.1`, or `= field(default=0.1)`."""
    fields = {}
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and part.value:
            value = part.value
            if isinstance(value, ast.Call):
                defaults = [keyword.value for keyword in value.keywords if keyword.arg == "default"]
                value = defaults[0] if defaults else value
            fields[f".{part.target.id}"] = literal(value, constants)
    return fields


def literal(node: ast.expr, constants: dict[str, Any]) -> Any:
    """The value that an expression spells out; ... if it has to be computed."""
    if isinstance(node, ast.Name):
        return constants.get(node.id, ...)
    if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):  # torch.bfloat16
        return node.attr
    if isinstance(node, ast.Attribute):  # args.beta
        return constants.get(ast.unparse(node), constants.get(f".{node.attr}", ...))
    if isinstance(node, ast.JoinedStr):  # f"{model}-sft"
        parts = []
        for part in node.values:
            value = literal(part.value if isinstance(part, ast.FormattedValue) else part, constants)
            parts.append(value)
        return ... if ... in parts else "".join(map(str, parts))
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ...
