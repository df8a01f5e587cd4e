"""Everything that the four scripts call: a library of functions, never a framework."""

import gc
import os
import sys
import time

# OpenMP's threads wait for each other spinning, by default for 3 ms: beside other busy processes most of the
# time is lost. Read when torch is loaded; scripts import common before it. Figures: benchmarks/LOG.md.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
# Row lengths vary from step to step: without this, CUDA's memory falls to pieces that fit none of them.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
# Compile in this process: the workers of torch before 2.13 may hang for five minutes at its end
# (pytorch#162199), and starting them takes longer than they save.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
if not sys.stderr.isatty():
    # No bars of any library in a file or a notebook, where each update is a line; common/run/progress.py writes
    # lines. Read when tqdm is imported.
    os.environ.setdefault("TQDM_DISABLE", "1")
# importing the libraries takes 0.7 s less; `Run.steps` restores the default
gc.set_threshold(100_000, 20, 100)
START = time.monotonic()  # of this process, except for Python's own startup: --max_hours counts from here
