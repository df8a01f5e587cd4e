"""What the four scripts call: a calculator with a filing cabinet, never a framework.

The scripts import it before torch, because of what it does by itself: CPU threads that wait for each other go to sleep
early. Measured with the demo's pretraining on two cores, in tokens/s: OpenMP's default of spinning for long
30k on idle cores and 0.6k to 7k beside busy processes; sleeping at once 19k and 15k; this setting 26k and 12k.
"""

import gc
import os
import sys
import time

os.environ.setdefault("GOMP_SPINCOUNT", "2000")
for _stream in (0, 1, 2):  # closed (`>&- 2>&-`): the next file that is opened would take its place, and get what is printed
    try:
        os.fstat(_stream)
    except OSError:
        os.open(os.devnull, os.O_RDWR)
# The libraries make a million objects that stay, through which Python would look again and again while they are imported:
# 6.0 s of CPU time for the imports of a run, and with this 5.3 s. `Run.steps` goes back to what is usual.
gc.set_threshold(100_000, 20, 100)


def _leave_quietly(kind: type[BaseException], error: BaseException, traceback: object) -> None:
    """Ctrl-C while libraries are imported, or in a tool: nothing is lost, and a traceback would say nothing."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    is_tool = spec is not None and spec.name.startswith("tools.")
    print("stopped" if is_tool else "stopped before the first step: there is nothing to save", file=sys.stderr, flush=True)
    os._exit(130)


sys.excepthook = _leave_quietly

START = time.time()  # of this process, but for the moment that Python takes: what --max_hours counts from
