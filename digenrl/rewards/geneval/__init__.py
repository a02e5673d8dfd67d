"""The reward ``geneval``: a detector and a namer of colours check what a prompt asks for, by the rules of GenEval."""
