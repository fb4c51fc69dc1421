"""A small server that speaks as much of the Hugging Face hub's API as downloads need, on loopback, in a thread."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

TOKEN = "hf_aTokenForTests"
"""The token that opens gated repositories."""


@dataclass
class Repository:
    """The files of one repository, at each of its revisions."""

    revisions: dict[str, Mapping[str, bytes]]
    """Branch, tag or commit -> the files there."""
    gated: bool = False

    def commit(self, revision: str) -> str | None:
        """The commit of a revision, which may be one itself."""
        for name, files in self.revisions.items():
            tree = sorted((file, _etag(data)) for file, data in files.items())
            commit = hashlib.sha1(repr(tree).encode()).hexdigest()
            if revision in (name, commit):
                return commit
        return None

    def files(self, revision: str) -> Mapping[str, bytes]:
        return next(files for name, files in self.revisions.items() if self.commit(name) == self.commit(revision))


@dataclass
class HubServer:
    """The server. `cuts` says how many of the next downloads of each file are broken off in the middle."""

    repositories: dict[str, Repository]
    """`models/owner/name` or `datasets/owner/name` -> the repository."""
    cuts: dict[str, int] = field(default_factory=dict)
    downloads: list[tuple[str, str]] = field(default_factory=list)
    """The file and the wanted range of every download."""
    tokens: set[str] = field(default_factory=set)
    """What requests had in their header `Authorization`."""
    url: str = ""

    def __enter__(self) -> HubServer:
        self._loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    def _serve(self, started: threading.Event) -> None:
        async def start() -> web.AppRunner:
            app = web.Application()
            app.router.add_get("/api/{kind}/{owner}/{name}/revision/{revision}", self._info)
            app.router.add_get("/api/{kind}/{owner}/{name}/tree/{revision}", self._tree)
            app.router.add_get("/{kind:datasets}/{owner}/{name}/resolve/{revision}/{file:.+}", self._file)
            app.router.add_get("/{owner}/{name}/resolve/{revision}/{file:.+}", self._file)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = site.name.replace("127.0.0.1:0", f"127.0.0.1:{runner.addresses[0][1]}")
            started.set()
            return runner

        runner = self._loop.run_until_complete(start())
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    def _find(self, request: web.Request) -> tuple[Repository, str, str]:
        """The repository, the commit, and its files' place; or the hub's answer to what is wrong."""
        kind, owner, name = (request.match_info.get(part, "models") for part in ("kind", "owner", "name"))
        self.tokens.add(request.headers.get("Authorization", ""))
        repository = self.repositories.get(f"{kind}/{owner}/{name}")
        if repository is None:
            raise _refusal(web.HTTPUnauthorized, "RepoNotFound")
        if repository.gated and request.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise _refusal(web.HTTPForbidden, "GatedRepo")
        commit = repository.commit(request.match_info["revision"])
        if commit is None:
            raise _refusal(web.HTTPNotFound, "RevisionNotFound")
        return repository, commit, f"{owner}/{name}"

    async def _info(self, request: web.Request) -> web.Response:
        repository, commit, id = self._find(request)
        siblings = [{"rfilename": file} for file in repository.files(commit)]
        return web.json_response(
            {"id": id, "_id": id, "sha": commit, "siblings": siblings, "tags": [], "private": False}
        )

    async def _tree(self, request: web.Request) -> web.Response:
        repository, commit, _ = self._find(request)
        entries: list[dict[str, Any]] = [
            {"type": "file", "path": file, "size": len(data), "oid": _etag(data)}
            for file, data in repository.files(commit).items()
        ]
        return web.json_response(entries)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        repository, commit, _ = self._find(request)
        file = request.match_info["file"]
        data = repository.files(commit).get(file)
        if data is None:
            raise _refusal(web.HTTPNotFound, "EntryNotFound")
        headers = {"ETag": f'"{_etag(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        wanted = request.headers.get("Range", "")
        begin = int(wanted.removeprefix("bytes=").partition("-")[0] or 0) if wanted else 0
        body = data[begin:]
        headers["Content-Length"] = str(len(body))
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
        response = web.StreamResponse(status=206 if begin else 200, headers=headers)
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        self.downloads.append((file, wanted))
        if self.cuts.get(file, 0) > 0:
            self.cuts[file] -= 1
            await response.write(body[: len(body) // 2])
            assert request.transport is not None
            request.transport.close()
            return response
        await response.write(body)
        await response.write_eof()
        return response


@functools.cache
def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def _refusal(kind: type[web.HTTPException], code: str) -> web.HTTPException:
    return kind(headers={"X-Error-Code": code, "X-Error-Message": f"{code} (the server's words)"})
