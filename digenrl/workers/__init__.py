"""What a worker can do, as plain classes: generate, score, evaluate. Executors decide where they live."""
