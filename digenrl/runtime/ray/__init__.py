"""Real workers on a Ray cluster: placement, actors, the executor that sends them commands and survives their deaths."""
