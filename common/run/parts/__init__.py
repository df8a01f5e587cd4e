"""Parts of a run that listen to it (alerts, best, regression, report, trackers; their methods are in run.py),
and two modules that are none: mfu and hub."""
