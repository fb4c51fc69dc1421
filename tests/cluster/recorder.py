"""Records what another host sends to this one, as someone on the network between them could: `recorder.py ADDRESS`.

When its input ends, the recorder prints the first bytes of every TCP connection as JSON: [port, bytes as hex].
"""

from __future__ import annotations

import json
import select
import socket
import sys
from collections import defaultdict

ETHERNET, IPV4 = 14, 0x0800
FIRST_FREE_PORT = 20_000
"""Ports below this one are Ray's."""
KEPT = 1 << 16
"""As many bytes of each connection are kept."""
SYN, ACK = 0x02, 0x10


def record(sender: str) -> list[tuple[int, str]]:
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(IPV4))
    begins: dict[tuple[int, int], int] = {}
    parts: defaultdict[tuple[int, int], dict[int, bytes]] = defaultdict(dict)
    print("recording", flush=True)
    while True:
        ready, _, _ = select.select([wire, sys.stdin], [], [])
        if sys.stdin in ready:
            break
        packet = wire.recv(1 << 17)[ETHERNET:]
        if packet[9] != socket.IPPROTO_TCP or socket.inet_ntoa(packet[12:16]) != sender:
            continue
        segment = packet[4 * (packet[0] & 15) : int.from_bytes(packet[2:4]) or None]
        ports = int.from_bytes(segment[:2]), int.from_bytes(segment[2:4])
        sequence = int.from_bytes(segment[4:8])
        if segment[13] & (SYN | ACK) == SYN and ports[1] >= FIRST_FREE_PORT:
            begins[ports] = sequence + 1
        elif ports in begins and (at := (sequence - begins[ports]) % (1 << 32)) < KEPT:
            parts[ports][at] = segment[4 * (segment[12] >> 4) :]
    found = []
    for (_, port), known in parts.items():
        stream = b""
        for at, part in sorted(known.items()):
            # A part that is missing ends what is known; one that was sent again is there twice.
            if at <= len(stream):
                stream += part[len(stream) - at :]
        found.append((port, stream.hex()))
    return found


if __name__ == "__main__":
    print(json.dumps(record(sys.argv[1])), flush=True)
