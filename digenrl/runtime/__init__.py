"""Where control meets data: executors carry the scheduler's commands to workers."""
