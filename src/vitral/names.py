"""Names that come from elsewhere, as text that can be written anywhere."""


def as_text(name: str) -> str:
    """Bytes of a file's name that are no UTF-8 come out as escapes, and so does half a letter, as JSON can have it."""
    try:
        return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:
        return name.encode("utf-8", "backslashreplace").decode("utf-8")
