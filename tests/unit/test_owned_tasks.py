"""Every background task and thread has an owner, which learns of an error that ends it. None of them ends unseen.

A task of a task group is owned by that group: an error in it raises. All others are in `OWNERS`, with the answer to the
question what happens if the task or thread ends with an error.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
BEGIN = {"create_task", "ensure_future", "Thread", "ThreadPoolExecutor", "start_new_thread"}
GROUPS = {"guard", "loops", "tasks", "watchers", "self._tasks"}
"""What task groups are called. A task that one of them makes is owned by it."""
FUTURES = "Its work has futures, and whoever submits work asks for their results."
AWAITED = "The function that makes it awaits it."
VITAL = "An error in it ends the process (`vital_thread`), and supervision sees the death."

OWNERS = {
    "headrace/api.py:_follow": FUTURES,
    "headrace/bench/delivery.py:_decode": AWAITED,
    "headrace/bench/delivery.py:socket_seconds.pass_once": AWAITED,
    "headrace/bench/engine_rounds.py:run_with_swaps": FUTURES,
    "headrace/bench/loop.py:_watched_memory": "It measures memory. Without it, the figure is missing from the table.",
    "headrace/buffer/journal.py:Journal.__init__": "The next call of the journal raises its error.",
    "headrace/channel/hub.py:Hub.start": "`Hub.failed` raises its error, which ends the run.",
    "headrace/channel/vital.py:vital_thread": VITAL,
    "headrace/channel/worker_pool.py:WorkerPool._dismiss": "The next question to the pool raises its error.",
    "headrace/channel/worker_pool.py:WorkerPool._renew": "The next question to the pool raises its error.",
    "headrace/channel/worker_pool.py:_Worker.__init__": "The worker's questions fail, and the worker is replaced.",
    "headrace/cluster/launchers/holder.py:Holder.__init__": FUTURES,
    "headrace/cluster/launchers/local.py:hosts_of": FUTURES,
    "headrace/cluster/launchers/local.py:ForkedLauncher._connect": "`next_exit` raises its error, which ends the run.",
    "headrace/cluster/launchers/local.py:LocalLauncher.start": "`next_exit` raises its error, which ends the run.",
    "headrace/cluster/launchers/ray.py:RayLauncher._open": "`next_exit` raises its error, which ends the run.",
    "headrace/cluster/launchers/ray_driver.py:Driver._begin": "An error in it ends the driver, and all its workers.",
    "headrace/cluster/launchers/ray_link.py:DriverLink.__init__": AWAITED,
    "headrace/cluster/supervision.py:Fleet._dispatch": "`Hub.failed` raises its error, which ends the run.",
    "headrace/delivery/copying.py:share": FUTURES,
    "headrace/delivery/delta.py:_in_order": FUTURES,
    "headrace/delivery/digest.py:GrowingDigest.__init__": FUTURES,
    "headrace/delivery/publisher.py:Publisher.__init__": FUTURES,
    "headrace/delivery/transports/nccl.py:NcclSender.__init__": "Engines that ask get no bytes and refuse the version.",
    "headrace/delivery/transports/nccl_group.py:bounded": "The function waits for its outcome, with a deadline.",
    "headrace/delivery/transports/tcp_paths.py:_PlainServer._accept": "It serves one client, whose connection ends.",
    "headrace/engines/embedded/engine.py:EmbeddedEngine.__init__": "All open requests fail with the reason.",
    "headrace/engines/embedded/engine.py:EngineLoop.__init__": FUTURES,
    "headrace/engines/fake.py:FakeEngine._wake": "The next request starts it again. It serves tests only.",
    "headrace/engines/serving.py:EventLoopServer._spawn": "`run` raises its error, which ends the worker.",
    "headrace/engines/serving.py:EventLoopServer._until_stopped": AWAITED,
    "headrace/engines/serving.py:RemoteEngine._spawn": "`Hub.failed` raises its error, which ends the run.",
    "headrace/engines/vllm/client.py:Delivery.swap": "The proof names the failure; both tasks end with the call.",
    "headrace/engines/vllm/engine.py:VllmEngine._pump": "All open requests fail with the reason.",
    "headrace/engines/vllm/engine.py:VllmEngine._recall": "The next call of `_paused` raises it.",
    "headrace/engines/vllm/engine.py:VllmEngine._withdraw": "All open requests fail with the reason.",
    "headrace/gateway/agent_main.py:main": "Its question is answered with an error.",
    "headrace/gateway/completions.py:Completions": FUTURES,
    "headrace/gateway/completions.py:Completions._draw": AWAITED,
    "headrace/gateway/gateway.py:Gateway.listen": "`Gateway.watch` raises its error, which ends the process.",
    "headrace/observe/trackers/feed.py:_Feed.__init__": "The tracker is switched off, with a line.",
    "headrace/pipeline/episodes.py:Evaluations._evaluated": AWAITED,
    "headrace/rollouts/base.py:AnyEpisode.interruptible": AWAITED,
    "headrace/scoring/base.py:Stage._begin_lesson": "The rollout fails with its error, unless it has failed already.",
    "headrace/scoring/base.py:Stage._scores": AWAITED,
    "headrace/scoring/base.py:Stage.close": AWAITED,
    "headrace/scoring/judges.py:Judge._shared": "All rollouts that ask this question fail with its error.",
    "headrace/scoring/process_reward.py:ProcessRewardScorer._send": "The next `score` raises its error.",
    "headrace/scoring/rewards.py:ThreadScorer._ask": "The judgement fails, at the latest at its deadline.",
    "headrace/training/checkpoints/saving.py:Saver.__init__": FUTURES,
    "headrace/training/remote.py:RemoteTrainer._ask": AWAITED,
    "headrace_vllm_plugin/weights.py:WorkerStaging.begin": "The state of the fetch says so; the engine asks for it.",
}
"""Place -> who learns of an error there, and what follows."""


def begun(node: ast.AST, place: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the place of every task or thread that is begun outside of a task group, as `Class.function`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from begun(child, (*place, child.name))
            continue
        if isinstance(child, ast.Call):
            called, maker = child.func, ""
            if isinstance(called, ast.Attribute):
                maker = ast.unparse(called.value)
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in BEGIN and maker not in GROUPS:
                yield ".".join(place)
        yield from begun(child, place)


def test_every_background_task_has_an_owner() -> None:
    found: Counter[str] = Counter()
    for file in SOURCE.rglob("*.py"):
        for place in begun(ast.parse(file.read_text())):
            found[f"{file.relative_to(SOURCE).as_posix()}:{place}"] += 1
    unowned = sorted(set(found) - set(OWNERS))
    assert not unowned, f"nobody would see these end with an error; own them, then add them to OWNERS: {unowned}"
    assert not (gone := sorted(set(OWNERS) - set(found))), f"nothing is begun there any more: {gone}"


def test_the_names_of_task_groups_are_names_of_task_groups() -> None:
    """A name in `GROUPS` is never given to anything else that makes tasks."""
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "create_task":
                maker = ast.unparse(node.func.value)
                assert maker in GROUPS | {"asyncio"}, f"{file}, line {node.lineno}: is {maker!r} a task group?"
