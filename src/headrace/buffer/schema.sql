-- journal.db: the state of a run, open to any SQL client (SQLite, WAL). Times are seconds since 1970.
-- A state is one of in_flight, trained, dropped, failed; every group and rollout ends in exactly one of the last three.
-- A checksum covers the other columns of its row, as `checksums.py` says; NULL in rows of older journals.
-- A policy is a name in [policies]. Version ids and step numbers are a policy's own; group ids are unique in the run.

CREATE TABLE IF NOT EXISTS meta (           -- schema, name, started, ended, train_started, train_ended, lag_bound,
    key TEXT PRIMARY KEY,                   -- heldout_before, heldout_after, outcome, ... as JSON values
    value TEXT NOT NULL,
    checksum INTEGER
);

CREATE TABLE IF NOT EXISTS versions (       -- published weights; ids are never reused
    id INTEGER NOT NULL,
    parent INTEGER NOT NULL,
    step INTEGER NOT NULL,                  -- optimizer steps behind these weights
    digest TEXT NOT NULL,                   -- 16 hex digits
    published REAL NOT NULL,
    policy TEXT NOT NULL DEFAULT 'policy',
    checksum INTEGER,
    PRIMARY KEY (policy, id)
);

CREATE TABLE IF NOT EXISTS deliveries (     -- one engine's proof of one version
    version INTEGER NOT NULL,
    engine TEXT NOT NULL,
    accepted INTEGER NOT NULL,
    quarantined INTEGER NOT NULL,
    reason TEXT NOT NULL,
    staged_digest TEXT NOT NULL,
    live_digest TEXT NOT NULL,
    canary_error REAL NOT NULL,
    stage_seconds REAL NOT NULL,
    swap_seconds REAL NOT NULL,
    time REAL NOT NULL,
    policy TEXT NOT NULL DEFAULT 'policy'
);

CREATE TABLE IF NOT EXISTS groups (         -- the ledger of group attempts
    id INTEGER PRIMARY KEY,
    prompt TEXT NOT NULL,                   -- with several tasks (meta 'tasks'): <name of the task>/<id>
    version INTEGER NOT NULL,               -- proved on the engines at admission
    state TEXT NOT NULL CHECK (state IN ('in_flight', 'trained', 'dropped', 'failed')),
    reason TEXT NOT NULL DEFAULT '',
    step INTEGER,                           -- the optimizer step that trained it
    admitted REAL NOT NULL,
    ended REAL,
    policy TEXT NOT NULL DEFAULT 'policy',  -- the one that it trains
    checksum INTEGER
);

CREATE TABLE IF NOT EXISTS rollouts (       -- the ledger of rollouts
    id TEXT PRIMARY KEY,                    -- <group id>/<index>
    group_id INTEGER NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('in_flight', 'trained', 'dropped', 'failed')),
    reason TEXT NOT NULL DEFAULT '',
    ending TEXT,
    reward REAL,
    tokens INTEGER NOT NULL DEFAULT 0,      -- of all traces, prompts included
    sampled_tokens INTEGER NOT NULL DEFAULT 0,
    oldest_version INTEGER,
    newest_version INTEGER,
    step INTEGER,
    admitted REAL NOT NULL,
    ended REAL,
    segment TEXT,                           -- where its tokens are: segments/<segment>, from byte `offset`
    offset INTEGER,
    length INTEGER,
    checksum INTEGER
);

CREATE TABLE IF NOT EXISTS steps (          -- optimizer steps
    step INTEGER NOT NULL,
    version INTEGER NOT NULL,               -- the version being trained
    objective TEXT NOT NULL,                -- policy, imitation
    groups INTEGER NOT NULL,
    rollouts INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    trained_tokens INTEGER NOT NULL,
    lag_histogram TEXT NOT NULL,            -- JSON: {"lag": tokens}
    reward_mean REAL,
    loss REAL,
    grad_norm REAL,
    learning_rate REAL,
    seconds REAL,
    ended REAL,
    metrics TEXT NOT NULL DEFAULT '{}',
    policy TEXT NOT NULL DEFAULT 'policy',
    checksum INTEGER,
    PRIMARY KEY (policy, step)
);

CREATE TABLE IF NOT EXISTS evaluations (    -- held-out prompts; they never enter the buffer
    version INTEGER NOT NULL,
    moment TEXT NOT NULL CHECK (moment IN ('before', 'during', 'after')),
    prompts INTEGER NOT NULL,
    samples INTEGER NOT NULL,
    pass_1 REAL NOT NULL,                   -- mean over prompts of the fraction of right answers (reward >= 1)
    pass_k REAL NOT NULL,                   -- fraction of prompts with a right answer among `samples`
    reward_mean REAL NOT NULL,
    tokens_mean REAL NOT NULL,
    started REAL NOT NULL,
    ended REAL NOT NULL,
    policy TEXT NOT NULL DEFAULT 'policy',
    versions TEXT NOT NULL DEFAULT '{}',    -- JSON: {"version": sampled tokens}, with one entry
    tasks TEXT NOT NULL DEFAULT '{}',       -- JSON: {"task": {"pass_1": ..., ...}} if the run has several tasks
    passes TEXT NOT NULL DEFAULT '{}',      -- JSON: {"pass_at_4": ..., "majority_at_4": ...}, as [evaluate] asks for
    sets TEXT NOT NULL DEFAULT '{}'         -- JSON: {"set": {"pass_1": ..., ...}} of [evaluate.sets.NAME]
);

CREATE TABLE IF NOT EXISTS samples (        -- a few held-out answers to read, per evaluation
    version INTEGER NOT NULL,
    moment TEXT NOT NULL,
    prompt TEXT NOT NULL,
    question TEXT NOT NULL,
    answer TEXT NOT NULL,
    reward REAL,
    policy TEXT NOT NULL DEFAULT 'policy'
);

CREATE TABLE IF NOT EXISTS activity (       -- how busy each process was, interval by interval
    process TEXT NOT NULL,
    started REAL NOT NULL,
    ended REAL NOT NULL,
    busy_seconds REAL NOT NULL,
    generated_tokens INTEGER NOT NULL DEFAULT 0
);

CREATE TABLE IF NOT EXISTS partials (       -- the tokens so far of rollouts that are being sampled, part by part
    rollout TEXT NOT NULL,
    trace INTEGER NOT NULL DEFAULT 0,       -- which of its traces, and which of the traces in the record
    part INTEGER NOT NULL,                  -- a trace's parts in this order, joined, are the trace; gone when it has ended
    tokens INTEGER NOT NULL,                -- of this part, context included
    segment TEXT NOT NULL,
    offset INTEGER NOT NULL,
    length INTEGER NOT NULL,
    PRIMARY KEY (rollout, trace, part)
);

CREATE TABLE IF NOT EXISTS restarts (       -- a process that died, or a run that was resumed
    process TEXT NOT NULL,                  -- engine-0, trainer-0, controller
    reason TEXT NOT NULL,
    from_step INTEGER,                      -- trainer and controller: the steps from_step < step <= to_step were trained
    to_step INTEGER,                        -- again, from the journal
    regenerated_tokens INTEGER NOT NULL,    -- sampled before, and to be sampled again
    time REAL NOT NULL
);

CREATE TABLE IF NOT EXISTS schedule (       -- only with [pipeline] record: what happened, in this order
    id INTEGER PRIMARY KEY,
    event TEXT NOT NULL CHECK (event IN ('admit', 'complete', 'consume', 'swap')),
    group_id INTEGER,                       -- admit, complete, consume
    step INTEGER,                           -- consume: the optimizer step that took the group
    version INTEGER,                        -- admit: proved then; consume: in training; swap: proved now
    engine TEXT,                            -- swap
    time REAL NOT NULL,
    policy TEXT NOT NULL DEFAULT 'policy'
);

CREATE INDEX IF NOT EXISTS rollouts_by_group ON rollouts (group_id);
CREATE INDEX IF NOT EXISTS activity_by_process ON activity (process, started);
CREATE INDEX IF NOT EXISTS groups_by_step ON groups (step);
CREATE INDEX IF NOT EXISTS groups_in_flight ON groups (id) WHERE state = 'in_flight';
