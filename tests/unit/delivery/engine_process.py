"""An engine of one table in a process of its own: a manifest on each line of stdin, a proof on each line of stdout."""

import base64
import json
import sys

import msgspec
from bigram import make_weights, score

from headrace.channel.codec import decode
from headrace.delivery.base import Manifest, Proof
from headrace.delivery.receiver import Receiver
from headrace.delivery.transports import tcp_source
from headrace.errors import DeliveryError

tcp_source.BUCKET_BYTES = 256  # several buckets, although the table is small


def main() -> None:
    live = make_weights(0)
    receiver = Receiver(live, "engine-1")
    for line in sys.stdin:
        manifest = decode(Manifest, [base64.b64decode(frame) for frame in json.loads(line)])
        try:
            proof = receiver.swap(receiver.stage(manifest), lambda ids: score(live, ids))
        except DeliveryError as error:
            proof = Proof(engine="engine-1", version=manifest.version, accepted=False, reason=str(error))
        print(msgspec.json.encode([proof, live["logits"].flatten().tolist()]).decode(), flush=True)
    receiver.close()


main()
