"""Prompts to completions, and what these are worth."""
