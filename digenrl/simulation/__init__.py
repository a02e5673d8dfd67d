"""The schedule on a virtual clock: the same scheduler and driver as a real run, workers that only take time."""
