"""The record of a run: every event with the commands it led to, and the replay that proves the record true."""
