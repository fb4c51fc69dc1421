"""Rollouts become rewards: reward functions in worker processes (or threads), while other answers are generated."""
