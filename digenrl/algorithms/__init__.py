"""RL algorithms: which steps are trained, advantages, objectives. An algorithm file knows no model."""
