"""The errors of the API: a status, a code for programs and a message for people, never a path or a traceback."""

BAD_IMAGES: dict[str, tuple[int, str]] = {
    "empty": (400, "empty"),
    "unsupported": (415, "unsupported"),
    "truncated": (422, "truncated"),
    "corrupt": (422, "corrupt"),
    "bad dimensions": (422, "bad_dimensions"),
    "wrong channels": (422, "wrong_channels"),
    "too large": (413, "too_large"),
    "too many pixels": (413, "too_many_pixels"),
}
"""Status and code for each reason why an image is unusable."""
MESSAGES = {
    "empty": "The image is empty.",
    "unsupported": "The file is not a JPEG, PNG or WebP image.",
    "truncated": "The image is incomplete: the end of the file is missing.",
    "corrupt": "The image is damaged.",
    "bad_dimensions": "The sides or the aspect ratio of the image are outside the limits.",
    "wrong_channels": "The image has another number of channels than the model expects.",
    "too_large": "The image has too many bytes.",
    "too_many_pixels": "The image has too many pixels.",
}
"""Messages by code. Those of the decoders are not passed on, because they may quote anything from the file."""


class RequestError(Exception):
    """A request that gets an error response."""

    def __init__(self, status: int, code: str, message: str, *, retry_after: int | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.retry_after = retry_after

    @property
    def content(self) -> dict[str, dict[str, str]]:
        """Return the body of the response."""
        return {"error": {"code": self.code, "message": self.message}}

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers that belong to the status."""
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.code in ("draining", "too_many_connections"):  # the client looks for another server
            headers["Connection"] = "close"
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def bad_image(reason: str) -> RequestError:
    """Return the error for an unusable image, from the reason in `BadImageError`."""
    status, code = BAD_IMAGES.get(reason, (422, "corrupt"))
    return RequestError(status, code, MESSAGES[code])


def invalid(code: str, message: str) -> RequestError:
    """Return the error for a request that the client has to change."""
    return RequestError(400, code, message)


def draining() -> RequestError:
    """Return the error for a request that a stopping server does not compute."""
    return busy("draining", "The server is stopping.", 5)


def busy(code: str, message: str, seconds: float) -> RequestError:
    """Return the error for a request that succeeds later, with the time to wait."""
    return RequestError(503, code, message, retry_after=max(1, min(60, round(seconds))))
