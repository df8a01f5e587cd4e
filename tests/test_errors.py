"""What a message may hold, who prints it, and what is called before a run ends by an error."""

import sys

from common.errors import printable, say
import pytest

from tests.conftest import run_script

LAUNCH = """
from common.args import CommonArgs
from common.command_line import launch
from common.errors import LAST_WORDS, UserError
def main(args):
    LAST_WORDS.append(lambda error: print("last words of", error))
    raise {error}
launch(main, CommonArgs, "no.yaml")
"""


def test_a_message_holds_no_control_character_and_no_secret(monkeypatch):
    for code in [*range(32), *range(127, 160), 0x200E, 0x2028, 0x202E, 0x2066, *map(ord, "é你🙂")]:
        assert (chr(code) in printable(f"a{chr(code)}b")) == (chr(code) in "\n\té你🙂")
    assert printable("\x1b[2J\u202e") == "\\x1b[2J\\u202e"
    monkeypatch.setattr("common.errors.SECRETS", ["https://h/T0K3N"])
    assert printable("posting to https://h/T0K3N failed") == "posting to (secret) failed"


def test_a_full_disk_takes_lines_and_no_run():
    full = open("/dev/full", "w")
    say("lost", file=full)
    with pytest.raises(OSError, match="No space left"):
        full.close()


def test_an_error_ends_the_process_after_its_last_words():
    for error, is_line in (('UserError("wrong")', True), ('ValueError("a fault")', False)):
        run = run_script([sys.executable, "-c", LAUNCH.format(error=error), "--dataset_name", "d"])
        assert run.returncode == 1 and run.stdout.startswith("last words of")
        assert (len(run.stderr.splitlines()) == 1 and run.stderr.startswith("error: ")) == is_line
