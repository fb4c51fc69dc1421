"""Small journals, written with the schema that the run itself uses."""

import json
import sqlite3
from pathlib import Path
from typing import Any

import headrace
from headrace.buffer import store

SCHEMA = Path(headrace.__file__).parent / "buffer" / "schema.sql"


class JournalMaker:
    """Inserts rows by column name; what is not given gets a harmless value."""

    DEFAULTS = {
        "versions": {"parent": -1, "step": 0, "digest": "0" * 16, "published": 0.0},
        "deliveries": {
            "engine": "engine-0",
            "accepted": 1,
            "quarantined": 0,
            "reason": "",
            "staged_digest": "a",
            "live_digest": "a",
            "canary_error": 1e-6,
            "stage_seconds": 0.01,
            "swap_seconds": 0.001,
            "time": 0.0,
        },
        "groups": {"prompt": "p", "version": 0, "admitted": 0.0},
        "rollouts": {"group_id": 1, "admitted": 0.0},
        "steps": {
            "version": 0,
            "objective": "policy",
            "groups": 1,
            "rollouts": 2,
            "tokens": 100,
            "trained_tokens": 10,
            "lag_histogram": "{}",
        },
        "evaluations": {
            "prompts": 10,
            "samples": 1,
            "pass_k": 0.5,
            "reward_mean": 0.5,
            "tokens_mean": 9.0,
            "started": 0.0,
            "ended": 0.0,
        },
        "samples": {"version": 0, "question": "q", "answer": "a"},
        "activity": {},
        "restarts": {},
    }

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.db = sqlite3.connect(run_dir / "journal.db", isolation_level=None)
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.executescript(SCHEMA.read_text())
        self.meta(schema=store.SCHEMA)

    def add(self, table: str, **values: Any) -> None:
        values = {**self.DEFAULTS[table], **values}
        marks = ", ".join("?" * len(values))
        self.db.execute(f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", list(values.values()))

    def meta(self, **values: Any) -> None:
        for key, value in values.items():
            self.db.execute("INSERT INTO meta (key, value) VALUES (?, ?)", (key, json.dumps(value)))
