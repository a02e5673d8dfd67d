"""Captioned shapes, drawn and checked exactly: the reward of the quickstart, in the manner of GenEval."""
