"""The files of a model, in a folder or on the Hub: read without noise, and one line for whatever is wrong with them."""

from collections.abc import Iterator
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from common.args import CommonArgs
from common.errors import UserError
from common.memory import is_oom
import torch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@contextlib.contextmanager
def hub_errors(kind: str, name: str) -> Iterator[None]:
    """Load without progress bars and reports, and turn any exception of a library into one line with the
    folder's name."""
    import transformers

    is_path = name.startswith(("/", ".", "~", "outputs/")) or name.count("/") > 1  # a Hub name is OWNER/NAME
    if is_path and not Path(name).exists():
        raise UserError(
            f"cannot load the {kind} {name}: no such folder; if an earlier stage writes it, run that first"
        )
    # "Loading weights: 100%" for every model, on every process
    transformers.utils.logging.disable_progress_bar()
    verbosity = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # a long report with raw tensor names
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # a folder may hold anything
        if is_oom(error):
            raise
        reason = f"{type(error).__name__}: {error}"[:400]
        hint = ""
        if not Path(name).exists():
            hint = " (not a local folder; is it a Hub name, and the Hub reachable?)"
        elif any(Path(name).glob("checkpoint-*")) and not Path(name, "config.json").exists():
            hint = (
                " (of a run that has not ended: the same command goes on with it; its checkpoints are models)"
            )
        raise UserError(f"cannot load the {kind} {name}{hint}: {reason}") from None
    finally:
        transformers.utils.logging.set_verbosity(verbosity)


def is_adapter(name: str | Path | None, revision: str | None) -> bool:
    """Whether a folder, or a repository on the Hub, holds an adapter rather than a model."""
    if name is None:
        return False
    if Path(name).exists():
        return Path(name, "adapter_config.json").exists()
    from transformers.utils import find_adapter_config_file

    try:
        return find_adapter_config_file(str(name), revision=revision) is not None
    except Exception:  # no such repository, or no network: reported on loading
        return False


def file_config(args: CommonArgs, name: str, revision: str | None) -> "PreTrainedConfig":
    """A model's config.json as in its files, for a loaded model that is only a part of it, or has another
    dtype."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=args.trust_remote_code)


def dtype_of(config: "PreTrainedConfig") -> str:
    """The dtype of a model's files; "float32" if its config does not say."""
    dtype = str(config.dtype or config.get_text_config().dtype).removeprefix("torch.")
    return dtype if dtype in ("bfloat16", "float16") else "float32"


def first_of(names: list[str]) -> str:
    return ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
