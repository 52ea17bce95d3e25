"""Messages between the server and its workers: a JSON object and some bytes, each with its length in front.

JSON and not pickle: a decoder that an image took over must not be able to run code in the server.
"""

import asyncio
import json
import struct
from typing import Any, BinaryIO

LENGTHS = struct.Struct(">II")
MAX_HEAD = 2**20
MAX_CONTENT = 2**28

Message = tuple[dict[str, Any], bytes]


def pack(head: dict[str, Any], content: bytes = b"") -> bytes:
    """Return a message as bytes."""
    text = json.dumps(head).encode()
    return b"".join((LENGTHS.pack(len(text), len(content)), text, content))


def read(stream: BinaryIO) -> Message | None:
    """Return the next message, or None at the end of the stream."""
    lengths = stream.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    size, rest = LENGTHS.unpack(lengths)
    text, content = stream.read(size), stream.read(rest)
    if len(text) < size or len(content) < rest:
        return None
    return json.loads(text), content


async def receive(stream: asyncio.StreamReader) -> Message:
    """Return the next message. Raise ValueError if it is malformed, EOFError at the end of the stream."""
    size, rest = LENGTHS.unpack(await stream.readexactly(LENGTHS.size))  # IncompleteReadError is an EOFError
    if size > MAX_HEAD or rest > MAX_CONTENT:
        raise ValueError(f"a message of {size} + {rest} bytes")
    return json.loads(await stream.readexactly(size)), await stream.readexactly(rest)
