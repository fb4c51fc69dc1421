"""An engine behind a wire that has gone silent: its requests end when its death is known to all, to be resumed."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path

import numpy as np

from headrace.channel.hub import Hub
from headrace.delivery.base import Proof
from headrace.engines.base import Delta, Request, Sampling
from headrace.engines.pool import EnginePool
from headrace.engines.serving import RemoteEngine
from headrace.errors import PeerDied


async def test_a_request_to_a_silent_engine_is_aborted_not_failed() -> None:
    sockets = Path(tempfile.mkdtemp())
    hub = Hub(f"ipc://{sockets}/hub", lambda peer, message: None)
    engine = RemoteEngine(hub, "engine-0", load_deadline=5, token_deadline=5)
    pool = EnginePool([engine])
    pool.loaded(Proof(engine="engine-0", version=0, accepted=True))

    async def generate() -> list[Delta]:
        request = Request(id="a", token_ids=np.arange(4, dtype=np.int32), sampling=Sampling(max_tokens=2))
        return [delta async for delta in pool.generate(request)]

    try:
        death = PeerDied("engine-0", "silent for 20 s")
        hub.mark_dead(death)
        generating = asyncio.create_task(generate())
        await asyncio.sleep(0.05)
        assert not generating.done(), "the pool does not know yet that the engine is gone"
        await pool.abort(["another"])
        # The order in which supervision tells it.
        pool.lose("engine-0", death.reason)
        engine.lost(str(death))
        (last,) = await asyncio.wait_for(generating, 60)
        assert (last.finish, last.error) == ("aborted", "")
    finally:
        await engine.close()
        await hub.close()
        shutil.rmtree(sockets)
