"""The gateway turns agents into rollouts: an OpenAI-compatible server over the run's engines, and its agents."""
