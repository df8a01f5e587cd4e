"""What one flag, or one kind of model, asks for. No module of the core imports one of these at its top.

The table is the whole list: module -> what asks for it.
"""

import importlib
from types import ModuleType

EXTRAS: dict[str, str] = {
    "experts": "a mixture of experts",
    "fused_layers": "norms and MLPs of Llama's form",
}


def extra(name: str) -> ModuleType:
    """The module common.extras.<name>, imported where the flag is read."""
    assert name in EXTRAS, name
    return importlib.import_module(f"common.extras.{name}")
