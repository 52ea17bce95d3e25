"""The parts of the OpenAPI document that FastAPI cannot derive from the code: bodies, responses and errors."""

from typing import Any

from vitral.serving.settings import METHODS, Limits

BINARY = {"schema": {"type": "string", "format": "binary"}}
NUMBER, TEXT, INTEGER = {"type": "number"}, {"type": "string"}, {"type": "integer"}
PROBABILITY = {"type": "number", "minimum": 0, "maximum": 1}


def _object(properties: dict[str, Any], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


ERROR = _object({"error": _object({"code": TEXT, "message": TEXT})})
FILE = {"type": ["string", "null"], "description": "The name of the file in a multipart body."}
BAD_ROW = _object({"file": FILE, "error": ERROR["properties"]["error"]})
PREDICTION = _object(
    {
        "file": FILE,
        "width": INTEGER,
        "height": INTEGER,
        "label": TEXT,
        "probability": PROBABILITY,
        "top": _list(_object({"label": TEXT, "probability": PROBABILITY})),
        "unusual": PROBABILITY | {"description": "The fraction of ordinary images that are less unusual."},
        "rejected": {"type": "boolean", "description": "Whether the image is too unusual for any of the labels."},
    },
    optional=("unusual", "rejected"),
)
FEATURES = _object({"file": FILE, "width": INTEGER, "height": INTEGER, "features": _list(NUMBER)})
MAP = _list(_list(NUMBER))
ATTENTION = _object(
    {
        "model": TEXT,
        "file": FILE,
        "width": INTEGER,
        "height": INTEGER,
        "box": _object(dict.fromkeys(("left", "top", "width", "height"), NUMBER)),
        "method": {"enum": list(METHODS)},
        "rows": INTEGER,
        "columns": INTEGER,
        "layers": _list(_object({"layer": INTEGER, "heads": _list(MAP)})),
        "map": MAP,
    },
    optional=("layers", "map"),
)


def rows_of(name: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a response with a row per image."""
    return _object({"model": TEXT, name: _list({"oneOf": [row, BAD_ROW]})})


ERRORS = {
    400: "The request is malformed: an empty body, an unknown field, a parameter out of range.",
    401: "The token is missing or wrong.",
    403: "The Host or Origin header names another site.",
    404: "There is no such model.",
    408: "The headers or the body took too long to arrive.",
    413: "The body or the image is too large.",
    414: "The URL is too long.",
    415: "The file is not a JPEG, PNG or WebP image.",
    422: "The image is truncated, damaged or has sides outside the limits.",
    429: "This client has too many images in the queue. Wait as long as Retry-After says.",
    431: "The headers are too large.",
    500: "The server failed.",
    501: "The model or this version does not support it.",
    503: "The server is full, loading the model or stopping. Wait as long as Retry-After says.",
}


def responses(schema: dict[str, Any], *codes: int) -> dict[int | str, dict[str, Any]]:
    """Return the responses of a route: the schema for 200, and errors."""
    errors = {
        code: {"description": ERRORS[code], "content": {"application/json": {"schema": ERROR}}}
        for code in (400, 401, 403, 414, 431, 500, *codes)
    }
    return {200: {"description": "OK", "content": {"application/json": {"schema": schema}}}, **errors}


def image_body(limits: Limits) -> dict[str, Any]:
    """Return the request body of the routes that take images."""
    image = {"type": "string", "format": "byte", "contentEncoding": "base64"}
    images = {"type": "array", "items": image, "minItems": 1, "maxItems": limits.images}
    top_k = {"type": "integer", "minimum": 1, "maximum": limits.top_k}
    options = [
        {**_object({"image": image, "top_k": top_k}, optional=("top_k",))},
        {**_object({"images": images, "top_k": top_k}, optional=("top_k",))},
    ]
    files = {"type": "array", "items": {"type": "string", "format": "binary"}, "minItems": 1}
    form = {"schema": {"type": "object", "properties": {"images": files}, "required": ["images"]}}
    kinds = dict.fromkeys(("image/jpeg", "image/png", "image/webp", "application/octet-stream"), BINARY)
    content = {**kinds, "multipart/form-data": form, "application/json": {"schema": {"oneOf": options}}}
    description = f"One image, or up to {limits.images} as multipart or JSON with base64; {limits.body} bytes at most."
    return {"requestBody": {"required": True, "description": description, "content": content}}
