"""An engine of a few tensors on the GPU, in a process of its own: a line of JSON in, a line of JSON out.

    transport_engine.py SHAPES

SHAPES is a JSON object of names and shapes. A line in is the frames of a manifest in base64; a line out is the proof
and a sum over the live weights taken by plain torch.
"""

import base64
import json
import sys

import msgspec
import numpy as np
import torch

from headrace.channel.codec import decode
from headrace.delivery.base import Manifest, Proof
from headrace.delivery.receiver import Receiver
from headrace.errors import DeliveryError


def plain_sum(weights: dict[str, torch.Tensor]) -> int:
    """Independent of the digest: every 16-bit word times its place, over all tensors in the order of their names."""
    total = 0
    for name in sorted(weights):
        words = weights[name].detach().reshape(-1).view(torch.int16).to(torch.int64)
        total += int((words * torch.arange(1, len(words) + 1, device=words.device)).sum())
    return total % (1 << 64)


def main() -> None:
    shapes = json.loads(sys.argv[1])
    live = {name: torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for name, shape in shapes.items()}
    receiver = Receiver(live, "engine")
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        manifest = decode(Manifest, [base64.b64decode(frame) for frame in json.loads(line)])
        scored = np.asarray(manifest.canary.logprobs)
        try:
            staged = receiver.stage(manifest)
            proof = receiver.prove(receiver.install(staged), scored)
        except DeliveryError as error:
            proof = Proof(engine="engine", version=manifest.version, accepted=False, reason=str(error))
        print(json.dumps([json.loads(msgspec.json.encode(proof)), plain_sum(live)]), flush=True)
    receiver.close()


if __name__ == "__main__":
    main()
