"""Engines on vLLM servers.

`engine` is the `Engine`, and `core` decides what runs on the server. `client` and `http` speak to the server. `server`
starts a server, `health` watches it, and `checks` examines it. `delivery` loads weights into it. `building` makes the
engine of a worker process. vLLM itself is never imported here: it has its own environment, in which
`headrace_vllm_plugin` is installed too.
"""
