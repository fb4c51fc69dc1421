"""Agents become rollouts: an OpenAI-compatible server over the run's engines, and the agents that talk to it."""
