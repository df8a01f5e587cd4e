"""The rooms under the four scripts: a calculator with a filing cabinet, never a framework.

The scripts import it before torch, because of the one thing that it does by itself: CPU threads that wait for each other
sleep instead of spinning. On idle cores that costs some percent; on cores that something else uses too, spinning was
measured to make these small models 5 to 50 times slower.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
