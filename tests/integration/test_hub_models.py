"""Models by name: from a server that speaks the hub's API, from a cache without network, and what can go wrong."""

from __future__ import annotations

import socket
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_commands import command, refused, settings
from hub_server import TOKEN, HubServer, Repository
from runs import QUICKSTART, ROOT

from headrace.buffer.reader import open_readonly
from headrace.models.loading import load_model

MODEL = ROOT / "examples/quickstart/model"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The quickstart's model, with weights."""
    path = tmp_path_factory.mktemp("model")
    load_model(MODEL, weights="random").save_pretrained(path)
    return {file.name: file.read_bytes() for folder in (path, MODEL) for file in folder.iterdir()}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[HubServer]:
    older = {**files, "README.md": b"an older one"}
    extra = {"README.md": b"# tiny", "pytorch_model.bin": b"pickled", "original/model.safetensors": b"the same again"}
    repositories = {
        "models/acme/tiny": Repository({"main": {**files, **extra}, "v1": older}),
        "models/acme/closed": Repository({"main": files}, gated=True),
    }
    with HubServer(repositories) as server:
        yield server


def check(home: Path, model: str, *more: str, **variables: str) -> subprocess.CompletedProcess[str]:
    chosen = ["model.weights=load", f"model.path={model}", *more]
    return command(home, "check", str(QUICKSTART), *settings(home, *chosen), **variables)


def commit_of(hub: HubServer, revision: str = "main") -> str:
    found = hub.repositories["models/acme/tiny"].commit(revision)
    assert found is not None
    return found


def test_a_run_takes_its_model_by_name_and_resumes_with_the_same_commit(tmp_path: Path, hub: HubServer) -> None:
    chosen = settings(tmp_path, "model.weights=load", "model.path=acme/tiny", "run.versions=2")
    done = command(tmp_path, "train", str(QUICKSTART), *chosen, HF_ENDPOINT=hub.url)
    assert done.returncode == 0, done.stderr
    fetched = {file for file, _ in hub.downloads}
    assert fetched == {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS}
    run_dir, commit = tmp_path / "run", commit_of(hub)
    saved = tomllib.loads((run_dir / "config.toml").read_text())
    assert (saved["model"]["path"], saved["model"]["revision"]) == ("acme/tiny", commit)
    with open_readonly(run_dir / "journal.db") as journal:
        recorded = journal.meta()["hub"]
    assert recorded == {"[model] path": f"acme/tiny, revision main, commit {commit}"}
    # The branch moves on, and then the network goes. The run still has its commit.
    hub.repositories["models/acme/tiny"].revisions["main"] = {"config.json": b"{}"}
    for variables in ({"HF_ENDPOINT": hub.url}, {"HF_HUB_OFFLINE": "1"}):
        versions = 3 if "HF_ENDPOINT" in variables else 4
        again = command(tmp_path, "resume", str(run_dir), "--set", f"run.versions={versions}", **variables)
        assert again.returncode == 0, again.stderr
    assert tomllib.loads((run_dir / "config.toml").read_text())["model"]["revision"] == commit
    assert command(tmp_path, "rollouts", str(run_dir), "--text", HF_HUB_OFFLINE="1").returncode == 0


def test_a_prepared_cache_needs_no_network(tmp_path: Path, hub: HubServer) -> None:
    assert check(tmp_path, "acme/tiny", HF_ENDPOINT=hub.url).returncode == 0
    count = len(hub.downloads)
    offline = check(tmp_path, "acme/tiny", HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert len(hub.downloads) == count
    line = refused(check(tmp_path, "acme/tiny@v1", HF_HUB_OFFLINE="1"))
    assert line == (
        "headrace: [model] path: acme/tiny, revision 'v1', is not whole in the cache, and HF_HUB_OFFLINE is set "
        "(fetch it once without)"
    )
    elsewhere = check(tmp_path / "other", "acme/tiny", HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE="1")
    assert elsewhere.returncode == 0, elsewhere.stderr


def test_without_network_a_name_is_found_in_the_cache_or_one_line(tmp_path: Path, hub: HubServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # Bound and not listening: every connection is refused.
        nowhere = f"http://127.0.0.1:{taken.getsockname()[1]}"
        line = refused(check(tmp_path, "acme/tiny", HF_ENDPOINT=nowhere))
        assert line.startswith(f"headrace: [model] path: there is no directory acme/tiny, and {nowhere} cannot be")
        assert check(tmp_path, "acme/tiny", HF_ENDPOINT=hub.url).returncode == 0
        again = check(tmp_path, "acme/tiny", HF_ENDPOINT=nowhere)
        assert again.returncode == 0, again.stderr


def test_a_download_that_breaks_off_goes_on_where_it_was(tmp_path: Path, hub: HubServer) -> None:
    files = hub.repositories["models/acme/tiny"].revisions
    # huggingface_hub keeps what has arrived in pieces of 10 MiB.
    files["large"] = {**files["main"], "words.json": b"[" + b" " * (30 << 20) + b"]"}
    hub.cuts["words.json"] = 1
    done = check(tmp_path, "acme/tiny@large", HF_ENDPOINT=hub.url)
    assert done.returncode == 0, done.stderr
    wanted = [wanted for file, wanted in hub.downloads if file == "words.json"]
    assert wanted == ["", f"bytes={10 << 20}-"]
    [fetched] = tmp_path.glob("hub/models--acme--tiny/snapshots/*/words.json")
    assert fetched.stat().st_size == (30 << 20) + 2


def test_a_download_that_keeps_breaking_off_is_one_line_and_can_be_repeated(tmp_path: Path, hub: HubServer) -> None:
    hub.cuts[WEIGHTS] = 1000
    line = refused(check(tmp_path, "acme/tiny", HF_ENDPOINT=hub.url))
    assert line.startswith(f"headrace: [model] path: acme/tiny could not be fetched from {hub.url}: ")
    assert line.endswith("; run the same command again to go on with the download")
    assert "is not whole in the cache" in refused(check(tmp_path, "acme/tiny", HF_HUB_OFFLINE="1"))
    hub.cuts.clear()
    done = check(tmp_path, "acme/tiny", HF_ENDPOINT=hub.url)
    assert done.returncode == 0, done.stderr


def test_names_that_lead_nowhere_are_one_line(tmp_path: Path, hub: HubServer) -> None:
    wrong = {
        "acme/tiny@v9": f"acme/tiny at {hub.url} has no revision 'v9'",
        "acme/missing": f"there is no directory acme/missing, and no such model at {hub.url} (if it is private, set "
        "HF_TOKEN)",
        "acme/closed": f"{hub.url} gives acme/closed only to those who accepted its terms (accept them there, and set "
        "HF_TOKEN)",
        "./acme/tiny": f"{ROOT}/acme/tiny is not a directory",
    }
    for model, expected in wrong.items():
        assert refused(check(tmp_path, model, HF_ENDPOINT=hub.url)) == f"headrace: [model] path: {expected}"
    line = refused(check(tmp_path, str(MODEL), "model.revision=v1", HF_ENDPOINT=hub.url))
    assert (
        line == f"headrace: [model] path: revision is for names on the hub, and {MODEL} is a directory (leave it out)"
    )
    assert not hub.downloads


def test_the_token_comes_from_the_environment_and_is_written_nowhere(tmp_path: Path, hub: HubServer) -> None:
    chosen = settings(tmp_path, "model.weights=load", "model.path=acme/closed", "run.versions=1")
    done = command(tmp_path / "home", "train", str(QUICKSTART), *chosen, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
    assert done.returncode == 0, done.stderr
    assert f"Bearer {TOKEN}" in hub.tokens
    assert TOKEN not in done.stdout + done.stderr
    written = [file for file in tmp_path.rglob("*") if file.is_file() and TOKEN.encode() in file.read_bytes()]
    assert not written


def test_generate_takes_a_model_by_name(tmp_path: Path, hub: HubServer) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "abc", "max_tokens": 3}\n')
    files = ("--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl"))
    done = command(tmp_path, "generate", "acme/tiny@v1", *files, HF_ENDPOINT=hub.url)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 1
    assert (tmp_path / f"hub/models--acme--tiny/snapshots/{commit_of(hub, 'v1')}").is_dir()
