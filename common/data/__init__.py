"""Rows of any source to examples: sequences of token ids that are trained on."""
