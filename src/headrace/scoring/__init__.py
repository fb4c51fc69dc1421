"""Rollouts become scores: a stage of scorers, which see tokens as they arrive; reward functions are the first kind."""
