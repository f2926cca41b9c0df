"""What tensorboard would show of a folder."""

from __future__ import annotations

import struct
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every scalar in the event files directly in a folder, by its tag."""
    found: dict[str, list[tuple[int, float]]] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content = path.read_bytes()
        while content:  # records: length, its checksum, an event, its checksum
            (length,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found
