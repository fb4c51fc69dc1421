"""The real controller, window and rollouts under a virtual clock: hours of a run in seconds. Start at `clock`."""
