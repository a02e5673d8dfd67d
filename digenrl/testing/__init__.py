"""What users need to test components of their own: contracts, and tiny models that load in a blink, without a download."""

from digenrl.testing.algorithm_check import check_algorithm
from digenrl.testing.model_contract import check_model
from digenrl.testing.reward_contract import check_reward

__all__ = ["check_algorithm", "check_model", "check_reward"]
