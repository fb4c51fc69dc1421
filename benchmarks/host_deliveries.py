"""Measures deliveries of weights between hosts: by `tcp`, whole and as deltas, and by gloo.

    python benchmarks/host_deliveries.py                                 # as root, on a machine that is otherwise idle
    python benchmarks/host_deliveries.py --decode 1 --versions 3 --json figures.json

Three hosts are made of network namespaces on this machine, with `tests/cluster/hosts.py`. A real publisher on the first
host delivers versions to a real engine on each of the two others. All hosts share the cores of this machine, and no
link has a limit, so the bytes mean more than the seconds. Then a third engine joins late. At last the link of the third
host is cut while a version is on its way, and healed when its engine has given up.
"""

import argparse
import contextlib
import json
import statistics
import sys
import textwrap
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests/cluster"))

from delivery_ends import Cut, Delivered, Deliveries, Engine, Way, give_keys
from hosts import Host, Hosts

from headrace.bench.delivery_sides import Ready
from headrace.bench.options import DeliveryBench
from headrace.observe.summary import aligned

WAYS = (Way("tcp", "full"), Way("tcp", "delta"), Way("nccl", "full"))
WARM_UP = 2
HEADER = ("by", "proved", "left host 1", "copies", "to the last proof", "preparation", "pause")


def measure(hosts: list[Host], way: Way, options: DeliveryBench) -> dict[str, Any]:
    """Deliver by one way, then make the two scenes. Return all figures."""
    with contextlib.ExitStack() as ends:
        engines = [Engine(host, f"engine on {host.name}", options) for host in hosts[1:]]
        for engine in engines:
            ends.callback(engine.close)
        between = ends.enter_context(Deliveries(hosts, way, options, engines))
        for engine in engines:
            engine.answer(Ready)
        for _ in range(WARM_UP):
            between.deliver()
        delivered = [between.deliver() for _ in range(options.versions)]
        seconds = [one.seconds for one in delivered]
        left = statistics.median(one.left_bytes for one in delivered)
        found = {
            "transport": way.transport,
            "send": way.send,
            "versions": options.versions,
            "proved": sum(one.proved for one in delivered),
            "sent": sorted({one.published.manifest.kind for one in delivered}),
            "bytes_of_weights": between.weights_bytes,
            "left_bytes": left,
            "left_copies": left / between.weights_bytes,
            "seconds": {"median": statistics.median(seconds), "least": min(seconds), "most": max(seconds)},
            "preparation_seconds": statistics.median(one.stage_seconds for one in delivered),
            "pause_seconds": statistics.median(one.swap_seconds for one in delivered),
        }
        late = Engine(hosts[1], "late engine", options)
        ends.callback(late.close)
        late.answer(Ready)
        found["late_joiner"] = _offered(between.join_late(late), between.weights_bytes)
        found["cut"] = _cut(between.cut_in_the_middle(hosts[2]), between.weights_bytes)
    return found


def _offered(delivered: Delivered, weights: int) -> dict[str, Any]:
    return {
        "version": delivered.published.manifest.version,
        "proved": delivered.proved,
        "seconds": delivered.seconds,
        "left_copies": delivered.left_bytes / weights,
        "refusals": [taken.refused for answers in delivered.offers for taken in answers[:-1]],
    }


def _cut(cut: Cut, weights: int) -> dict[str, Any]:
    return {
        "gave_up_seconds": cut.gave_up_seconds,
        "reason": cut.gave_up.refused,
        "live_weights_unchanged": cut.gave_up.live_digest == cut.before,
        "others": _offered(cut.others, weights),
        "after": _offered(cut.after, weights),
    }


def row(found: dict[str, Any]) -> tuple[str, ...]:
    """Return the figures of one way as a line of the table."""
    seconds = found["seconds"]
    return (
        str(Way(found["transport"], found["send"])),
        f"{found['proved']} of {found['versions']}",
        f"{found['left_bytes'] / 1e6:.1f} MB",
        f"{found['left_copies']:.3f}",
        f"{seconds['median']:.2f} s ({seconds['least']:.2f} to {seconds['most']:.2f})",
        f"{found['preparation_seconds']:.2f} s",
        f"{1000 * found['pause_seconds']:.0f} ms",
    )


def scenes(found: dict[str, Any]) -> list[str]:
    """Return one line about the late joiner, and one about the cut link."""
    way, late, cut = Way(found["transport"], found["send"]), found["late_joiner"], found["cut"]
    unchanged = "its live weights are unchanged" if cut["live_weights_unchanged"] else "ITS LIVE WEIGHTS HAVE CHANGED"
    return [
        f"{way}: a late joiner {_proved(late)}; {late['left_copies']:.2f} copies left host 1",
        f"{way}: host 3 cut off: host 2 {_proved(cut['others'])}; host 3 gave up {cut['gave_up_seconds']:.1f} s after"
        f" the cut, {unchanged} ({_short(cut['reason'])}); healed, all {_proved(cut['after'])}",
    ]


def _proved(offered: dict[str, Any]) -> str:
    if not offered["proved"]:
        return f"DID NOT PROVE version {offered['version']}"
    again = f", after a refusal ({_short(offered['refusals'][0])})" if offered["refusals"] else ""
    return f"proved version {offered['version']} in {offered['seconds']:.2f} s{again}"


def _short(reason: str) -> str:
    return textwrap.shorten(reason, 80, placeholder=" ...")


def main() -> None:
    """Measure all ways, and print a table and the scenes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-shape", default="smollm2-135m", help="a shape of `headrace bench delivery`")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="many CPUs are slow in 16 bits"
    )
    parser.add_argument("--versions", type=int, default=5, help="measured after two others")
    parser.add_argument("--changed", type=float, default=0.01, help="share of words that a delta changes")
    parser.add_argument("--decode", type=int, default=0, help="sequences that every engine decodes meanwhile")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    given = parser.parse_args()
    options = DeliveryBench(
        model=given.model_shape,
        dtype=given.dtype,
        device="cpu",
        versions=given.versions,
        changed=given.changed,
        decode=given.decode,
    )
    with Hosts(3) as hosts:
        give_keys(hosts)
        measured = [measure(hosts, way, options) for way in WAYS]
    print(f"{given.model_shape} in {given.dtype}, {measured[0]['bytes_of_weights'] / 1e6:.1f} MB")
    print("\n".join(aligned([HEADER, *map(row, measured)])))
    print("\n".join(line for found in measured for line in scenes(found)))
    if given.json:
        given.json.write_text(json.dumps(measured, indent=2) + "\n")


if __name__ == "__main__":
    main()
