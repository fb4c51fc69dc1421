"""Makes every HTTP path of a vLLM server require the run's key (`--middleware headrace_vllm_plugin.guard.Guard`).

vLLM's own `--api-key` protects only the paths that generate. It leaves the paths open that pause the server, swap
weights and call workers. Only `/health` stays open here.
"""

import hashlib
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

KEY = "VLLM_API_KEY"
"""The environment variable with the key; vLLM reads the same one."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """ASGI middleware that checks the key. Without a key in the environment, only `/health` is answered."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._key = _hash(os.environ.get(KEY, ""))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on requests that carry the key, and requests to `/health`; answer 401 to all others."""
        if scope["type"] not in ("http", "websocket") or scope.get("path") == "/health" or self._knows(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": b'{"error": "Unauthorized"}'})

    def _knows(self, scope: Scope) -> bool:
        given = dict(scope.get("headers", ())).get(b"authorization", b"").decode("latin-1")
        scheme, _, key = given.partition(" ")
        return bool(key) and scheme.lower() == "bearer" and secrets.compare_digest(_hash(key), self._key)


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
