"""A trainer of one table in a process of its own: publishes version 1, prints where it lies, and waits to be killed."""

import sys

from bigram import CANARY, make_weights, score

from headrace.delivery.publisher import Publisher
from headrace.delivery.transports.shm import ShmSender


def main() -> None:
    weights = make_weights(1)
    publisher = Publisher(ShmSender(sys.argv[1]), "float32", 1e-5, CANARY)
    print(publisher.publish(1, -1, 1, weights, lambda ids: score(weights, ids)).result(30).location, flush=True)
    sys.stdin.read()
    publisher.close()


main()
