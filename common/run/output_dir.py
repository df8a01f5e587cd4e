"""Names that moved to common/files.py and common/run/folder.py, until all imports have followed."""

from common.files import file_hash, find_damage, flush, replace_text, write_manifest  # noqa: F401
from common.run.folder import *  # noqa: F403
