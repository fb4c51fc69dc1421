"""vLLM servers as engines: `engine` (the face), `core` (what runs where), `client` and `http` (the wire), `server`
(started by us), `checks` (what a server must be able to do), `building` (how a worker process makes one).

vLLM itself is never imported here: it lives in an environment of its own, with `headrace_vllm_plugin` inside.
"""
