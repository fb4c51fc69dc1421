"""Engines join and leave a live run here, by `headrace scale` or by the rule of `[engine] count = {least, most}`.

    ask, rule ─▶ wanted ─▶ a task per engine: join   start ─▶ ready ─▶ pool ─▶ proves the newest version ─▶ serves
                                              leave  no new requests ─▶ what it began is aborted ─▶ its process ends

An engine that joins goes the way of an engine that was restarted: it serves nothing before it has proved the newest
version. An engine that leaves goes the way of an engine that died: its requests end as aborted, and their episodes
continue from their prefix elsewhere. But it first hands out the tokens that it has drawn, it counts neither as a death
nor as a restart, and no delivery waits for it. An engine that fails to join is given up with a line: growing never ends
a run. Commands are answered at once, one after the other, and each begins from the number that the last one wanted.
"""

import asyncio
import contextlib
from collections.abc import Callable
from itertools import count

import msgspec

from headrace.config.schema import PROCESSES, EngineRange
from headrace.errors import UserError
from headrace.pipeline.elastic import Idle, Rule
from headrace.pipeline.parts import Parts
from headrace.pipeline.versions import Deliveries, Versions
from headrace.pipeline.waits import EngineWatch
from headrace.types import NO_VERSION

SAMPLE_SECONDS = 0.1
SAMPLES = 20
"""The fewest samples of an observation. If versions are short, one observation covers several of them."""
ABORT_SECONDS = 5.0
"""Seconds in which an engine that leaves must have handed out what it has drawn. What it has not is drawn again."""


class ScaleRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What `headrace scale` asks for: a number of engines, or a server that is to join or to leave."""

    engines: int | None = None
    add: str | None = None
    remove: str | None = None


class ScaleAnswer(msgspec.Struct):
    """The numbers of engines that the run wanted before a command, and wants from now on."""

    before: int = 0
    after: int = 0
    error: str = ""
    """Why nothing is changed; empty if the command is carried out."""


class Scaling:
    """The number of engines of one run. `run` must be running."""

    def __init__(
        self,
        parts: Parts,
        versions: Versions,
        deliveries: Deliveries,
        watch: EngineWatch,
        idle: Callable[[], Idle | None],
    ) -> None:
        """`idle` says who has nothing to do at this moment, or None if the moment should not be counted."""
        self._parts = parts
        self._crew = parts.crew
        self._pool = parts.pool
        self._recorder = parts.recorder
        self._versions = versions
        self._deliveries = deliveries
        self._watch = watch
        self._idle = idle
        self._wanted = set(parts.crew.ranks) if parts.crew is not None else set[int]()
        """The ranks of the engines that the run should have."""
        self._joining: set[int] = set()
        self._leaving: set[int] = set()
        self._samples: list[Idle] = []
        self._observed = NO_VERSION
        """The version at which the last observation ended."""
        configured = parts.config.engine.count
        self._bounds = configured if isinstance(configured, EngineRange) else None
        self._rule = Rule(self._bounds.least, self._bounds.most) if self._bounds is not None else None

    # ---- what is wanted

    def ask(self, request: ScaleRequest) -> ScaleAnswer:
        """Begin what a command asks for. Raises `UserError` if that is impossible."""
        if self._crew is None or self._parts.stopping.is_set():
            raise UserError("the run is ending, and the number of its engines stays as it is")
        before = len(self._wanted)
        if request.engines is not None:
            wanted = self._with_number(request.engines)
        elif request.add is not None:
            wanted = self._wanted | {self._added(request.add)}
        else:
            wanted = self._wanted - {self._removed(request.remove or "")}
        if self._rule is not None:
            self._rule.changed()
        if wanted != self._wanted:
            self._want(wanted, "`headrace scale`")
        return ScaleAnswer(before=before, after=len(wanted))

    def _with_number(self, number: int) -> set[int]:
        assert self._crew is not None
        if self._crew.urls:
            raise UserError("[engine] urls names the servers of this run: use --add URL or --remove URL")
        if self._bounds is not None and not self._bounds.least <= number <= self._bounds.most:
            raise UserError(f"--engines {number}: [engine] count allows {self._bounds.least} to {self._bounds.most}")
        if not 1 <= number <= PROCESSES:
            raise UserError(f"--engines {number}: a run has 1 to {PROCESSES} engines")
        ranks = sorted(self._wanted)[:number]
        free = (rank for rank in count() if rank not in self._wanted)
        for rank in (next(free) for _ in range(number - len(ranks))):
            self._crew.place(rank)
            ranks.append(rank)
        return set(ranks)

    def _added(self, url: str) -> int:
        assert self._crew is not None
        if not self._crew.urls:
            raise UserError("--add: this run starts its engines itself (it has no [engine] urls): use --engines N")
        if url in self._crew.urls and self._crew.urls.index(url) in self._wanted:
            raise UserError(f"--add {url}: it is one of the run's servers already")
        return self._crew.add_url(url)

    def _removed(self, url: str) -> int:
        assert self._crew is not None
        ranks = [rank for rank in self._wanted if rank < len(self._crew.urls) and self._crew.urls[rank] == url]
        if not ranks:
            raise UserError(f"--remove {url}: it is not one of the run's servers")
        if len(self._wanted) == 1:
            raise UserError(f"--remove {url}: a run needs at least one engine")
        return ranks[0]

    def _want(self, ranks: set[int], why: str) -> None:
        before, self._wanted = len(self._wanted), ranks
        self._recorder.resized(before, sorted(ranks), why)

    # ---- SCALE

    async def run(self) -> None:
        """Let engines join and leave until they are those that are wanted, and apply the rule, until cancelled."""
        if self._crew is None:
            return
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(SAMPLE_SECONDS)
                self._observe()
                for rank in self._missing:
                    self._joining.add(rank)
                    tasks.create_task(self._join(rank), name=f"join engine-{rank}")
                for rank in self._surplus:
                    self._leaving.add(rank)
                    tasks.create_task(self._leave(rank), name=f"leave engine-{rank}")

    @property
    def _present(self) -> set[int]:
        return {int(engine.name.rpartition("-")[2]) for engine in self._pool.engines}

    @property
    def _missing(self) -> set[int]:
        return self._wanted - self._present - self._joining - self._leaving

    @property
    def _surplus(self) -> set[int]:
        """The engines that should leave: none until at least one of the engines that are to stay serves."""
        serves = any(self._pool.proved(f"engine-{rank}") >= 0 for rank in self._wanted & self._present)
        return (self._present | self._joining) - self._wanted - self._leaving if serves else set()

    async def _join(self, rank: int) -> None:
        assert self._crew is not None
        try:
            engine = await self._crew.start(rank)
        except (UserError, OSError) as error:
            if rank not in self._leaving:
                await self._crew.end(rank)
                self._give_up(rank, str(error))
        else:
            if rank not in self._leaving:
                self._parts.remote[engine.name] = engine
                self._pool.add(engine)
                self._deliveries.begin(engine)
                self._recorder.note(f"{engine.name} has joined")
        self._joining.discard(rank)
        self._parts.waits.moved()

    def _give_up(self, rank: int, reason: str) -> None:
        """Do without an engine that did not become ready. If no other engine is wanted, those that are there stay."""
        self._recorder.note(f"engine-{rank} cannot join: {reason}")
        if rank in self._wanted:
            self._want(self._wanted - {rank} or self._present, f"engine-{rank} is given up")
        if self._rule is not None:
            self._rule.most = max(self._rule.least, len(self._wanted))

    async def _leave(self, rank: int) -> None:
        assert self._crew is not None
        name, served = f"engine-{rank}", rank in self._present
        if served:
            await self._hand_over(name)
        await self._crew.end(rank)
        if served:
            await self._deliveries.end(name)
            self._pool.remove(name)
            del self._parts.remote[name]
        self._recorder.left(name)
        self._recorder.note(f"{name} has left")
        self._leaving.discard(rank)
        self._parts.waits.moved()

    async def _hand_over(self, name: str) -> None:
        """Take the requests of an engine away. It first hands out the tokens that it has drawn for them."""
        engine = next(engine for engine in self._pool.engines if engine.name == name)
        # The pool must know first: from now on the engine gets no request, and no delivery waits for it.
        self._pool.retire(name, "it leaves the run")
        self._watch.forget(name)
        self._parts.waits.ring()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ABORT_SECONDS):
                await engine.abort()
                await self._parts.waits.until(
                    f"leave {name}", lambda: f"{name} to end its requests", lambda: not self._pool.requests(name)
                )
        self._parts.remote[name].lost(f"{name} leaves the run")

    # ---- the rule

    def _observe(self) -> None:
        """Take a sample of who is idle. If it is the last one of a version, record the shares and apply the rule."""
        if self._joining or self._leaving:
            self._samples.clear()  # An observation is of one number of engines.
            return
        if (moment := self._idle()) is not None:
            self._samples.append(moment)
        if len(self._samples) < SAMPLES or self._versions.proved == self._observed:
            return
        seen = Idle(*(sum(shares) / len(self._samples) for shares in zip(*self._samples, strict=True)))
        self._observed = self._versions.proved
        self._samples.clear()
        self._recorder.idle(self._observed, len(self._pool.engines), seen.trainer, seen.engines)
        change = self._rule.decide(len(self._wanted), seen) if self._rule is not None else 0
        shares = f"idle: trainer {seen.trainer:.0%}, engines {seen.engines:.0%}"
        if change < 0:
            self._want(self._wanted - {max(self._wanted)}, f"generation waits for training ({shares})")
        elif change > 0:
            more = self._with_number(len(self._wanted) + 1)
            self._want(more, f"training waits for generation ({shares})")
