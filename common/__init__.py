"""The rooms under the four scripts: a calculator with a filing cabinet, never a framework.

The scripts import it before torch, because of the one thing that it does by itself: CPU threads that wait for each other
go to sleep early. Measured with the demo's pretraining on two cores, in tokens/s: OpenMP's default of spinning for long
30k on idle cores and 0.6k to 7k beside busy processes; sleeping at once 19k and 15k; this setting 26k and 12k.
"""

import os
import time

os.environ.setdefault("GOMP_SPINCOUNT", "2000")

START = time.time()  # of this process, but for the moment that Python takes: what --max_hours counts from
