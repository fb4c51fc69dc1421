"""Engines on vLLM servers.

`engine` is the `Engine`: it decides what runs on the server, and `client` speaks to the server. `server` starts and
watches a server. `building` makes the engine of a worker process and examines its server. vLLM itself is never imported
here: it has its own environment, in which `headrace_vllm_plugin` is installed too.
"""
