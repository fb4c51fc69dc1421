"""Tasks supply prompts and environments: datasets, reasoning-gym, environments with tools.

The chat format is here too.
"""
