"""What users need to test components of their own: tiny models that load in a blink, without a download."""

from digenrl.testing.algorithm_check import check_algorithm

__all__ = ["check_algorithm"]
