"""Scoring gives scores to rollouts. Its scorers see tokens as they arrive; reward functions are one kind of scorer."""
