"""An engine of one table in a process of its own: manifests come over a pipe, and each is answered with a proof."""

import base64
import json
from multiprocessing.connection import Connection

import msgspec
from bigram import make_weights, score

from headrace.channel.codec import decode
from headrace.delivery.base import Manifest, Proof
from headrace.delivery.receiver import Receiver
from headrace.delivery.transports import tcp
from headrace.errors import DeliveryError


def serve(line: Connection) -> None:
    """Until the other end is closed."""
    tcp.BUCKET_BYTES = 256  # several buckets, although the table is small
    live = make_weights(0)
    receiver = Receiver(live, "engine-1")
    while True:
        try:
            frames = json.loads(line.recv_bytes())
        except EOFError:
            break
        manifest = decode(Manifest, [base64.b64decode(frame) for frame in frames])
        try:
            proof = receiver.swap(receiver.stage(manifest), lambda ids: score(live, ids))
        except DeliveryError as error:
            proof = Proof(engine="engine-1", version=manifest.version, accepted=False, reason=str(error))
        line.send_bytes(msgspec.json.encode([proof, live["logits"].flatten().tolist()]))
    receiver.close()
