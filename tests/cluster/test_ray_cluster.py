"""A Ray cluster on three hosts: every host is a node, and a killed raylet comes back as a new node."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest
from hosts import Host, Hosts
from ray_cluster import RayCluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SECONDS = 240.0
# Places an actor on every node, and prints the host name that each sees, by node.
PLACE = """
import json, socket, sys
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

@ray.remote(num_cpus=1)
class Actor:
    def look(self):
        return socket.gethostname()

ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")
nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
actors = [Actor.options(scheduling_strategy=place).remote() for place in places]
print(json.dumps(dict(zip(nodes, ray.get([actor.look.remote() for actor in actors], timeout=120)))))
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with Hosts(3) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(hosts: list[Host]) -> Iterator[RayCluster]:
    with RayCluster(hosts) as made:
        made.ready(SECONDS)
        yield made


def place(cluster: RayCluster) -> dict[str, str]:
    """Place an actor on every node. Return the host of each node."""
    done = cluster.head.run([sys.executable, "-c", PLACE, cluster.address], timeout=SECONDS)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_every_host_is_a_node_that_takes_actors(cluster: RayCluster) -> None:
    assert sorted(place(cluster).values()) == ["host1", "host2", "host3"]


def test_a_killed_raylet_comes_back(cluster: RayCluster, hosts: list[Host]) -> None:
    before = place(cluster)
    cluster.kill_raylet(hosts[2])
    cluster.ready(SECONDS)
    after = place(cluster)
    assert sorted(after.values()) == ["host1", "host2", "host3"]
    assert {name for node, name in after.items() if node not in before} == {"host3"}


def test_nodes_are_stopped_restarted_and_started(cluster: RayCluster, hosts: list[Host]) -> None:
    cluster.stop_raylet(hosts[1])
    assert not hosts[1].processes()
    cluster.restart(hosts[2])
    cluster.ready(SECONDS)
    assert sorted(place(cluster).values()) == ["host1", "host3"]
    cluster.start_raylet(hosts[1])
    cluster.ready(SECONDS)
    assert sorted(place(cluster).values()) == ["host1", "host2", "host3"]
