"""Judges in real runs: a model of their own, or a server; killed, stopped, slow and talking nonsense."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from judge_model import TEMPLATE, says, write_judge
from runs import QUICKSTART, small_settings, start, worker_pids

from headrace import Run
from headrace.review.summary import read_ledgers
from headrace.tasks.chat import ChatFormat
from headrace.types import Rollout

STEPS = "SELECT count(*) FROM steps WHERE objective = 'policy'"
FAILED = "SELECT count(*) FROM rollouts WHERE ending = 'failed'"
CHAT = ChatFormat.load(QUICKSTART.parent / "model")


def settings(directory: Path, scorer: dict[str, object], *more: str) -> list[str]:
    given = [f"scorers.letters.{key}={json.dumps(value)}" for key, value in scorer.items()]
    return [part for each in small_settings(directory, *given, *more) for part in ("--set", each)]


def completion(rollout: Rollout) -> str:
    (trace,) = rollout.traces
    return CHAT.decode(trace.token_ids[trace.trained])


def check_scores(run_dir: Path) -> int:
    """Every score of the judge is what it says about that answer. Returns how many there are."""
    checked = 0
    for rollout in Run(run_dir).rollouts():
        scores = {score.scorer: score for score in rollout.scores}
        if rollout.ending in ("finished", "truncated"):
            assert scores["letters"].value == says(completion(rollout))
            assert rollout.reward == scores["reward"].value + 0.5 * scores["letters"].value
            assert len(scores["letters"].version) == 12
            checked += 1
    return checked


def reasons(run_dir: Path) -> set[str]:
    """Why rollouts failed."""
    with sqlite3.connect(run_dir / "journal.db") as db:
        found = {reason for (reason,) in db.execute("SELECT reason FROM rollouts WHERE ending = 'failed'")}
    return {reason for reason in found if reason}


def number_failed(run_dir: Path) -> int:
    """How many answers failed. Their groups train without them."""
    with sqlite3.connect(run_dir / "journal.db") as db:
        return int(db.execute(FAILED).fetchone()[0])


def wait_for(run_dir: Path, query: str, number: int, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (run_dir / "journal.db").is_file():
            with sqlite3.connect(run_dir / "journal.db") as db:
                try:
                    if db.execute(query).fetchone()[0] >= number:
                        return
                except sqlite3.OperationalError:
                    pass
        time.sleep(0.05)
    raise TimeoutError(query)


@pytest.mark.slow
def test_a_judge_on_an_engine_of_ours_is_killed_and_the_run_goes_on(tmp_path: Path) -> None:
    judge = {"kind": "judge", "model": str(write_judge(tmp_path / "judge")), "template": TEMPLATE, "weight": 0.5,
             "max_tokens": 1, "retries": 0, "timeout": 20.0, "cache": 0}  # fmt: skip
    run_dir = tmp_path / "run"
    run = start("train", str(QUICKSTART), *settings(tmp_path, judge, "run.versions=500", "observe.display=plain"))
    try:
        wait_for(run_dir, STEPS, 2)
        victim = worker_pids(run_dir)["scorer-0"]
        os.kill(victim, signal.SIGSTOP)
        time.sleep(1.0)  # Questions wait for it now.
        os.kill(victim, signal.SIGKILL)
        wait_for(run_dir, FAILED, 1)
        with sqlite3.connect(run_dir / "journal.db") as db:
            (now,) = db.execute(STEPS).fetchone()
        wait_for(run_dir, STEPS, now + 3)
        assert worker_pids(run_dir)["scorer-0"] != victim
        run.send_signal(signal.SIGINT)
        stdout, stderr = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode in (0, 130), stderr
    assert "scorer-0 is back" in stdout + stderr
    assert reasons(run_dir) == {"scorer-0 died: killed by signal 9"}
    assert read_ledgers(run_dir)["balanced"]
    assert check_scores(run_dir) + number_failed(run_dir) >= 5 * 16
    assert worker_pids(run_dir) == {}


class Server:
    """An OpenAI-compatible server that does as it is told."""

    def __init__(self) -> None:
        self.trouble: tuple[float, int, str] | None = None
        """What it does about one in three questions: how long it takes, its status, and what it says."""
        self.seen: list[dict] = []
        self.keys: set[str | None] = set()

    @contextmanager
    def listening(self, port: int = 0) -> Iterator[int]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.seen.append(body)
                server.keys.add(self.headers["Authorization"])
                question = body["messages"][-1]["content"]
                status, content = 200, f"Score: {says(question.removeprefix('n')):g}"
                if server.trouble is not None and len(server.seen) % 3 == 0:
                    seconds, status, content = server.trouble
                    time.sleep(seconds)
                answer = json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # The judge has given up.
                    self.wfile.write(answer)

            def log_message(self, *arguments: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", port), Handler) as listener:
            thread = threading.Thread(target=listener.serve_forever, daemon=True)
            thread.start()
            try:
                yield listener.server_address[1]
            finally:
                listener.shutdown()
                thread.join()


@pytest.mark.slow
def test_a_judge_behind_a_url_is_slow_wrong_and_gone_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret-of-the-judge")
    server, run_dir = Server(), tmp_path / "run"
    with server.listening() as port:
        judge = {"kind": "judge", "url": f"http://127.0.0.1:{port}/v1", "served_model": "letters", "template": TEMPLATE,
                 "api_key": "JUDGE_KEY", "weight": 0.5, "retries": 0, "timeout": 1.0, "cache": 0, "patience": 1.0,
                 "pattern": "score: (\\d)"}  # fmt: skip
        more = ["run.versions=500", "evaluate.prompts=0", "pipeline.launcher=forked"]
        run = start("train", str(QUICKSTART), *settings(tmp_path, judge, *more))
        try:
            wait_for(run_dir, STEPS, 1)
            for trouble, line in [
                ((0.0, 200, "It is a good answer."), "gave no number: ''It is a good answer.''"),
                ((0.0, 500, "no memory"), "answered 500"),
                ((1.5, 200, "Score: 1"), "no answer within 1 s"),
            ]:
                server.trouble = trouble
                wait_for(run_dir, f"{FAILED} AND reason LIKE '%{line}%'", 1)
            server.trouble = None
        except BaseException:
            run.kill()
            raise
    try:
        wait_for(run_dir, f"{FAILED} AND reason LIKE '%cannot be reached%'", 1)
        with sqlite3.connect(run_dir / "journal.db") as db:
            (now,) = db.execute(STEPS).fetchone()
        with server.listening(port):
            wait_for(run_dir, STEPS, now + 2)
            run.send_signal(signal.SIGINT)
            _, stderr = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode in (0, 130), stderr
    assert server.keys == {"Bearer secret-of-the-judge"}
    assert "secret-of-the-judge" not in (run_dir / "config.toml").read_text()
    assert read_ledgers(run_dir)["balanced"]
    assert check_scores(run_dir) + number_failed(run_dir) >= 3 * 16
