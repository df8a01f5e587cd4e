"""Checks of model folders: loading errors in one line, unusable weights and settings refused."""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import UserError, say
from common.memory import is_oom

import torch

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

TOKENIZER = ("tokenizer.json", "vocab.*", "*.model")  # files that a tokenizer can be read from; one of them suffices


@contextlib.contextmanager
def hub_errors(kind: str, name: str) -> Iterator[None]:
    """Load without progress bars and reports, and turn exceptions of transformers (often ten lines) into one line."""
    import transformers

    transformers.utils.logging.disable_progress_bar()  # "Loading weights: 100%" for every model, on every process
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # a long report with raw tensor names
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a folder may hold anything
        if is_oom(error):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if kind == "tokenizer" and Path(name, "config.json").exists():  # a tokenizer reads the configuration, too
            try:
                transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
            except Exception:
                kind = "config"
        reason = _damage(name, kind) or reason
        hint = "" if Path(name).exists() else " (not a local folder; is it a Hub name, and the Hub reachable?)"
        if hint and name.startswith("outputs/"):  # the Hub's own message would mislead
            hint, reason = "", "no run has left a model there yet"
        if address := re.match(r"https?://(?:huggingface\.co|hf\.co)/([^/]+/[^/?#]+)", name):
            hint, reason = "", f"that is an address; the Hub's name is {address[1]}"
        raise UserError(f"cannot load the {kind} {name}{hint}: {reason}") from None
    finally:
        transformers.utils.logging.set_verbosity(verbosity)


def check_weights(name: str, lm: "PreTrainedModel", found: dict[str, Any]) -> None:
    """Raise UserError for tensors that are missing in the files or have another size, and would be random; for unexpected
    ones within a layer, which would be dropped; and for a NaN or an infinity. Whole unused parts (a vision tower, a head for
    another task) are left out with a message."""
    for tensor, in_file, wanted in sorted(found.get("mismatched_keys") or []):
        raise UserError(
            f"cannot load the model {name}: {tensor} is {tuple(in_file)} in its files and {tuple(wanted)} by its config.json"
        )
    if missing := sorted(found["missing_keys"]):
        shown = ", ".join(missing[:3]) + f" and {len(missing) - 3} more" * (len(missing) > 3)
        raise UserError(f"cannot load the model {name}: its files lack {shown}")
    unexpected = sorted(found["unexpected_keys"])
    if cut := [tensor for tensor in unexpected if _within_a_part(lm, tensor)]:
        shown = ", ".join(cut[:3]) + f" and {len(cut) - 3} more" * (len(cut) > 3)
        raise UserError(f"cannot load the model {name}: its files hold {shown}, for which its config.json has no place")
    if unexpected:
        shown = ", ".join(unexpected[:3]) + f" and {len(unexpected) - 3} more" * (len(unexpected) > 3)
        say(f"model: {type(lm).__name__} has no place for {shown} of {name}: left out")
    for tensor, parameter in lm.named_parameters():
        if parameter.is_floating_point() and not torch.isfinite(parameter.detach().sum(dtype=torch.float32)):
            if not torch.isfinite(parameter.detach()).all():
                raise UserError(f"cannot load the model {name}: {tensor} holds a NaN or an infinity")


def _within_a_part(lm: "PreTrainedModel", tensor: str) -> bool:
    """Whether an unexpected tensor belongs inside the model: one more layer, a bias missing from config.json.

    Layers for multi-token prediction (num_nextn_predict_layers: DeepSeek, GLM) follow the last layer and do not count.
    """
    config, layer = lm.config.get_text_config(), re.search(r"layers\.(\d+)\.", tensor)
    further = getattr(config, "num_nextn_predict_layers", None) or 0
    if layer and further and 0 <= int(layer[1]) - config.num_hidden_layers < further:
        return False
    part: torch.nn.Module = lm
    for name in tensor.split(".")[:-1]:
        inner = getattr(part, name, None)
        if not isinstance(inner, torch.nn.Module):
            break
        part = inner
    return part is not lm and part is not lm.base_model and part is not lm.get_decoder()


def check_numbers(name: str, lm: torch.nn.Module) -> None:
    """Raise UserError for a dropout that is no probability, and for non-finite rotary frequencies: the first would fail at
    the first step, the second would hardly ever be noticed."""
    for key, value in lm.config.get_text_config().to_dict().items():
        if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, int | float) and not 0 <= value <= 1:
            raise UserError(f"cannot load the model {name}: {key} {value} of its config.json is no probability")
    for key, buffer in lm.named_buffers():
        if key.endswith("inv_freq") and not buffer.is_meta and not buffer.isfinite().all():
            raise UserError(f"cannot load the model {name}: {key} is not finite: look at rope_theta in its config.json")


def _damage(name: str, kind: str) -> str | None:
    """Which file of a model folder is unreadable, and why; else None. kind: "tokenizer", or what else was being loaded."""
    from safetensors import safe_open

    if Path(name).is_file():
        return "it is a file; expected the folder that holds config.json, weights and tokenizer"
    for file in sorted(Path(name).glob("*config.json")):
        try:
            if not isinstance(json.loads(file.read_text(encoding="utf-8")), dict):
                return f"{file} holds no JSON object"
        except (OSError, ValueError, RecursionError) as error:
            return f"{file} is not valid JSON ({error})"
    adapter = Path(name, "adapter_config.json")
    if adapter.exists():
        base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
        if not isinstance(base, str) or Path(base).resolve() == Path(name).resolve():
            return f"{adapter} names no other model as its base (base_model_name_or_path {base})"
        if (base.startswith(".") or Path(base).is_absolute()) and not Path(base).exists():
            return f"{adapter} names the base {base}, which is not there"
    for file in sorted(found for pattern in ("*.safetensors", *TOKENIZER) for found in Path(name).glob(pattern)):
        with open(file, "rb") as opened:
            if opened.read(40).startswith(b"version https://git-lfs"):
                return f"{file} only points to what Git LFS keeps: git lfs pull, in that folder"
    for file in sorted(Path(name).glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except Exception as error:  # SafetensorError, OSError
            return f"{file} is no whole safetensors file ({error})"
    if Path(name).is_dir() and not any(Path(name).glob("*config.json")):
        inside = [p for p in Path(name).glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdecimal()]
        if inside:
            newest = max(inside, key=lambda p: int(p.name.removeprefix("checkpoint-")))
            return f"its run has not come to its end, and left no final model there; its newest checkpoint is {newest}"
        return "there is no config.json in it: it is not the folder of a model"
    if Path(name).is_dir() and kind == "tokenizer" and not any(map(any, map(Path(name).glob, TOKENIZER))):
        return "there is no tokenizer in it (tokenizer.json): copy it there, or name another with --tokenizer_name"
    if Path(name).is_dir() and not any(Path(name, file).exists() for file in ("config.json", "adapter_config.json")):
        return "there is no config.json in it: it is not the folder of a model"
    return None


def make_savable(config: "GenerationConfig") -> None:
    """Change settings that transformers would refuse to save at the first checkpoint: sampling settings without sampling,
    beam settings without beams. Prints what was dropped."""

    def refused() -> bool:
        try:
            config.validate(strict=True)
        except ValueError:
            return True
        return False

    if not refused():
        return
    asked, config.do_sample = config.do_sample, True
    if not refused():  # sampling settings were the cause
        return
    config.do_sample = asked
    usual, dropped = type(config)(), []
    for name, value in sorted(config.to_diff_dict().items()):
        if name.endswith("token_id") or name in ("transformers_version", "do_sample") or not hasattr(usual, name):
            continue
        setattr(config, name, getattr(usual, name))
        dropped.append(f"{name} {value}")
        if not refused():
            break
    say(f"generation_config.json: transformers would not save {', '.join(dropped)}: left out")
