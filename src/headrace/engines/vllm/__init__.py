"""Engines on vLLM servers.

`engine` is the `Engine`: it decides what runs on the server. `sequence` is one request, and `client` speaks to the
server. `server` starts and watches a server, and `checks` examines it. `delivery` loads weights into it. `building`
makes the engine of a worker process. vLLM itself is never imported here: it has its own environment, in which
`headrace_vllm_plugin` is installed too.
"""
