"""Parts of a run that listen to it: alerts, best, regression, report, trackers (their methods are in run.py). mfu and
hub hold functions that the run calls."""
