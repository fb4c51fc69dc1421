"""Recipes: files that start a run on the nodes of Slurm, of Kubernetes or of a cloud. `job.py` says what they hold."""
