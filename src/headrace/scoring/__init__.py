"""Scoring gives scores to rollouts: a stage of scorers, which see tokens as they arrive.

Reward functions are one kind.
"""
