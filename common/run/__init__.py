"""What a run needs around its loop: folder, checkpoints, metrics, signals, memory."""
