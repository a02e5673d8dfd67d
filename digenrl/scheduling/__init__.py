"""The schedule as a pure state machine: events in, commands out. No torch, no Ray, no clock, no files."""
