"""Parse the body of a request into images: raw bytes, multipart/form-data, or JSON with base64.

Images are checked here by their first bytes, before they wait in the queue. The worker checks them again.
"""

import base64
import binascii
import json
import logging
import struct
from contextlib import suppress
from dataclasses import dataclass
from email.message import Message

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser

from vitral.data.headers import MAX_ASPECT, PEEKED_BYTES, BadImageError, check_start, claimed_size, find_format
from vitral.serving.refusals import RequestError, bad_image, invalid
from vitral.serving.settings import Limits

FORMATS = ("JPEG", "PNG", "WEBP")
"""The decoders that the internet reaches; the others have had the most security problems."""
MAX_CHUNKS = 10_000
"""Chunks of a PNG and segments of a JPEG. Decoders walk them one by one, so a file of empty ones costs seconds."""
MAX_SCANS = 100
"""Scans of a JPEG; encoders write about ten. Each takes the time of all pixels, however few bytes it has."""
MAX_FILE_NAME = 255
MAX_TOKENS = 512
"""Brackets, quotes, commas and colons in a JSON body. Base64 has none of them, so that a request needs few."""
logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it logs a warning for every malformed body


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """An image of a request. Its name is shown and never used as a path."""

    content: bytes
    name: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedBody:
    """The images of a request, and the fields that a JSON body sets."""

    images: list[Upload]
    fields: dict[str, object]


def parse_body(body: bytes, content_type: str, limits: Limits) -> ParsedBody:
    """Return the images in a body. Raise RequestError if it is malformed."""
    kind, boundary = parse_content_type(content_type)
    if kind == "multipart/form-data":
        return ParsedBody(images=parse_multipart(body, boundary, limits), fields={})
    if kind == "application/json" or kind.endswith("+json"):
        return parse_json(body, limits)
    return ParsedBody(images=[Upload(content=body)], fields={})  # any other type is judged by the bytes themselves


def parse_content_type(text: str) -> tuple[str, str | None]:
    """Return the media type in lower case, and the boundary of a multipart type."""
    if len(text) > 1024:
        raise invalid("bad_content_type", "The Content-Type header is too long.")
    message = Message()
    message["Content-Type"] = text.replace("\r", " ").replace("\n", " ")
    return message.get_content_type() if text else "", message.get_boundary()


def parse_multipart(body: bytes, boundary: str | None, limits: Limits) -> list[Upload]:
    """Return the files of a multipart body; every part is an image, whatever its field is called."""
    if not boundary or len(boundary) > limits.boundary or not boundary.isascii():
        raise invalid("bad_boundary", f"A multipart body needs a boundary of 1 to {limits.boundary} characters.")
    parts = _Parts(limits.images)
    parser = MultipartParser(boundary, parts.callbacks(), max_header_count=8, max_header_size=4096)  # type: ignore[arg-type]
    try:
        parser.write(body)
        parser.finalize()
    except (FormParserError, ValueError) as error:
        raise invalid("bad_multipart", "The multipart body is malformed.") from error
    if not parts.is_complete:
        raise invalid("bad_multipart", "The multipart body is incomplete.")
    if not parts.images:
        raise invalid("no_image", "The request contains no image.")
    return parts.images


class _Parts:
    """Collect the parts of a multipart body."""

    def __init__(self, limit: int):
        self.images: list[Upload] = []
        self.is_complete = False
        self._limit = limit
        self._content = bytearray()
        self._header = [bytearray(), bytearray()]
        self._disposition = ""

    def callbacks(self) -> dict[str, object]:
        return {
            "on_part_begin": self._begin,
            "on_header_field": lambda data, start, end: self._header[0].extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._header[1].extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_part_data": lambda data, start, end: self._content.extend(data[start:end]),
            "on_part_end": self._end,
            "on_end": self._finish,
        }

    def _begin(self) -> None:
        if len(self.images) >= self._limit:
            raise RequestError(400, "too_many_images", f"A request may contain at most {self._limit} images.")
        self._content, self._disposition = bytearray(), ""

    def _end_header(self) -> None:
        name, value = (part.decode("utf-8", "replace") for part in self._header)
        if name.strip().lower() == "content-disposition":
            self._disposition = value
        self._header = [bytearray(), bytearray()]

    def _end(self) -> None:
        message = Message()
        message["Content-Disposition"] = self._disposition.replace("\r", " ").replace("\n", " ")
        name = message.get_filename()
        shown = None if name is None else "".join(letter for letter in name if letter.isprintable())[:MAX_FILE_NAME]
        self.images.append(Upload(content=bytes(self._content), name=shown))

    def _finish(self) -> None:
        self.is_complete = True


def parse_json(body: bytes, limits: Limits) -> ParsedBody:
    """Return the images of {"image": base64} or {"images": [base64, ...]}, with the other fields of the object."""
    if not body:
        raise invalid("empty", "The body is empty.")
    content = _load_json(body)
    if not isinstance(content, dict):
        raise invalid("bad_json", "The JSON body must be an object.")
    for name in content:
        if name not in ("image", "images", "top_k"):
            raise invalid("unknown_field", "The JSON body has a field that is not image, images or top_k.")
    if ("image" in content) == ("images" in content):
        raise invalid("no_image", "The JSON body needs either image or images.")
    texts = content["images"] if "images" in content else [content["image"]]
    if not isinstance(texts, list) or not 1 <= len(texts) <= limits.images:
        raise invalid("bad_images", f"images must be a list of 1 to {limits.images} strings.")
    fields = {"top_k": content["top_k"]} if "top_k" in content else {}
    return ParsedBody(images=[Upload(content=_decode_base64(text)) for text in texts], fields=fields)


def _load_json(body: bytes) -> object:
    if sum(body.count(token) for token in (b"[", b"{", b'"', b",", b":")) > MAX_TOKENS:
        raise invalid("bad_json", "The JSON body has too many values or is nested too deeply.")
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise invalid("bad_json", "The body is not valid JSON.") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _decode_base64(text: object) -> bytes:
    if not isinstance(text, str):
        raise invalid("bad_base64", "Each image must be a string of base64.")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid("bad_base64", "An image is not valid base64.") from error


# ---- images ----


def check_image(content: bytes, limits: Limits) -> None:
    """Raise RequestError if the first bytes show that an image is unusable. Nothing is decoded."""
    try:
        name = find_format(content)
        if name not in FORMATS:
            raise BadImageError("unsupported")
        check_start(content[:PEEKED_BYTES])
        if _has_too_many_chunks(content, name) or (name == "JPEG" and _has_too_many_scans(content)):
            raise BadImageError("corrupt")
        with suppress(struct.error, IndexError):  # the worker judges damaged headers
            check_size(*claimed_size(content[:PEEKED_BYTES], name), limits)
    except BadImageError as error:
        raise bad_image(error.reason) from error


def check_size(height: int, width: int, limits: Limits) -> None:
    """Raise BadImageError if a size is above the limits of the server. A size of 0 x 0 is unknown."""
    if max(height, width) > 0 and min(height, width) > 0:
        if height * width > limits.pixels:
            raise BadImageError("too many pixels")
        if max(height, width) > limits.side or max(height, width) > MAX_ASPECT * min(height, width):
            raise BadImageError("bad dimensions")


def _has_too_many_chunks(content: bytes, name: str) -> bool:
    if name == "WEBP":
        return False
    at, steps = (8, 0) if name == "PNG" else (2, 0)
    while steps < MAX_CHUNKS and at + 8 <= len(content):
        steps += 1
        if name == "PNG":
            at += 12 + struct.unpack_from(">I", content, at)[0]
        elif content[at] != 0xFF or content[at + 1] == 0xDA:  # the pixels start
            return False
        elif content[at + 1] in (0x01, 0xFF) or 0xD0 <= content[at + 1] <= 0xD9:
            at += 1 if content[at + 1] == 0xFF else 2
        else:
            at += 2 + struct.unpack_from(">H", content, at + 2)[0]
    return steps >= MAX_CHUNKS


def _has_too_many_scans(content: bytes) -> bool:
    start = content.find(b"\xff\xda")
    end = content.find(b"\xff\xd9", start)  # between scans, 0xFF is followed by a marker or by zero
    return content.count(b"\xff\xda", max(0, start), end if end > 0 else len(content)) > MAX_SCANS
