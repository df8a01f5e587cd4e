"""A causal language model called on flat rows: loaded, and everything that makes it fast."""
