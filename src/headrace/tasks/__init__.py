"""Tasks supply prompts and environments. The chat format of a model is here too."""
