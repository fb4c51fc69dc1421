"""The real controller, window and rollouts under a virtual clock, which simulate hours in seconds."""
