"""What a run tells: metrics.jsonl, the console, pictures, the reward curve."""
