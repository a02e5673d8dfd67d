"""Prompts: files and the pure function from (seed, step) to the prompts of a step. No torch."""
