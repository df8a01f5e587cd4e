"""Everything that the four scripts call: a library of functions, never a framework.

The scripts import it before torch for its side effect: CPU threads that wait for each other go to sleep early. Measured with
the demo's pretraining on two cores, in tokens/s: OpenMP's default of spinning for long 30k on idle cores and 0.6k to 7k
beside busy processes; sleeping at once 19k and 15k; this setting 26k and 12k.
"""

import gc
import os
import sys
import time

os.environ.setdefault("GOMP_SPINCOUNT", "2000")
for _stream in (0, 1, 2):  # if closed (`>&- 2>&-`), the next opened file would get its number, and all output
    try:
        os.fstat(_stream)
    except OSError:
        os.open(os.devnull, os.O_RDWR)
# The libraries create a million permanent objects, which the garbage collector would scan again and again during imports:
# 6.0 s of CPU time for the imports of a run, and 5.3 s with this. `Run.steps` restores the default.
gc.set_threshold(100_000, 20, 100)


def _leave_quietly(kind: type[BaseException], error: BaseException, traceback: object) -> None:
    """On Ctrl-C during imports, or in a tool, exit without a traceback: nothing is lost."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    is_tool = spec is not None and spec.name.startswith("tools.")
    print("stopped" if is_tool else "stopped before the first step: there is nothing to save", file=sys.stderr, flush=True)
    os._exit(130)


sys.excepthook = _leave_quietly

START = time.time()  # start of this process, except for Python's own startup: --max_hours counts from here
