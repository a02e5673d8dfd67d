"""DigenRL: online reinforcement learning for image and video generators, on a generator pool and a trainer pool."""

__version__ = "0.1.0"
