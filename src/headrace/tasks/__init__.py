"""Prompts and environments: datasets, reasoning-gym, environments with tools, and the model's chat format."""
