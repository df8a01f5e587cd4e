"""Makes way for the root's `common`, which is not found where an experiment is run by its path: Python then looks here."""

import importlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
del sys.modules[__name__]  # this file, in whose place the package is imported
importlib.import_module("common")
