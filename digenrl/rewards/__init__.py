"""Rewards: what a generated image is worth, one file or folder per reward."""
