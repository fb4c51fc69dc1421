"""The life of a version: published, sent, proved; orphaned, stranded, void."""

from __future__ import annotations

from headrace.engines.fake_policy import FakePolicy
from headrace.pipeline.versions import Versions
from headrace.types import NO_VERSION

POLICY = FakePolicy(8)


def with_published(*ids: int) -> Versions:
    versions = Versions()
    for version in ids:
        versions.published(POLICY.manifest(version, parent=version - 1))
    return versions


def test_published_versions_are_sent_in_their_order_and_engines_fetch_the_newest() -> None:
    versions = with_published(1, 2)
    assert versions.announced == 2 and versions.fetchable() == NO_VERSION
    assert versions.next().version == 1 and versions.fetchable() == 1
    assert not versions.superseded(1)
    assert versions.next().version == 2 and versions.fetchable() == 2
    assert versions.superseded(1) and not versions.waiting


def test_bytes_are_kept_while_an_engine_fetches_them_or_will() -> None:
    versions = with_published(1, 2)
    versions.next()
    assert versions.release(NO_VERSION, still_wanted=False) == [], "it is not declared"
    versions.declare(1)
    assert versions.release(1, still_wanted=True) == [], "a present engine will fetch it"
    with versions.fetched_by("engine-0", 1):
        assert versions.release(1, still_wanted=False) == []
        versions.next()
        versions.declare(2)
        assert versions.release(2, still_wanted=False) == [1, 2], "nobody needs what is older than the declared version"
    assert versions.release(2, still_wanted=False) == [], "bytes are released once"


def test_what_a_dead_trainer_published_can_be_fetched_but_not_sent_again() -> None:
    versions = with_published(1, 2)
    versions.next()
    versions.orphan()
    assert versions.orphaned(1) and versions.orphaned(2) and not versions.orphaned(3)
    assert versions.fetchable() == 1
    versions.mark_stranded(1)
    assert versions.fetchable() == NO_VERSION, "engines wait for the next one"
    versions.next()
    assert versions.fetchable() == 2


def test_what_a_trainer_came_back_without_is_void_and_never_sent() -> None:
    versions = with_published(1, 2)
    versions.next()
    versions.void_before(3)
    assert versions.void(2) and not versions.void(3)
    assert versions.fetchable() == NO_VERSION and not versions.waiting
    assert versions.release(NO_VERSION, still_wanted=False) == [], "there are no bytes to release"
    versions.published(POLICY.manifest(3, parent=1))
    assert versions.next().version == 3 and versions.fetchable() == 3
