"""ICC profiles for the tests: the color spaces of phones, written byte by byte from their published primaries."""

import struct

# Red, green and blue as XYZ under D50, as ICC profiles store them.
DISPLAY_P3 = ((0.51512, 0.24120, -0.00105), (0.29198, 0.69225, 0.04189), (0.15710, 0.06657, 0.78407))
SRGB = ((0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.71410))
_BANDS = (b"r", b"g", b"b")
_CURVE = (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)  # of sRGB, which Display P3 shares


def _fixed(*values: float) -> bytes:
    return struct.pack(f">{len(values)}i", *(round(value * 65536) for value in values))


def rgb_profile(primaries: tuple[tuple[float, float, float], ...]) -> bytes:
    """Return a profile (version 4) of these primaries with the curve of sRGB."""
    text = "a color space of the tests".encode("utf-16-be")
    words = b"mluc" + bytes(4) + struct.pack(">II2s2sII", 1, 12, b"en", b"US", len(text), 28) + text
    curve = b"para" + bytes(4) + struct.pack(">HH", 3, 0) + _fixed(*_CURVE)
    tags = {b"desc": words, b"cprt": words, b"wtpt": b"XYZ " + bytes(4) + _fixed(0.9642, 1.0, 0.8249)}
    tags |= {name + b"XYZ": b"XYZ " + bytes(4) + _fixed(*xyz) for name, xyz in zip(_BANDS, primaries, strict=True)}
    tags |= {name + b"TRC": curve for name in _BANDS}
    return _profile(b"RGB ", tags)


def gray_profile(gamma: float) -> bytes:
    """Return a profile of gray levels with this gamma."""
    curve = b"curv" + bytes(4) + struct.pack(">IH", 1, round(gamma * 256)) + bytes(2)
    return _profile(b"GRAY", {b"wtpt": b"XYZ " + bytes(4) + _fixed(0.9642, 1.0, 0.8249), b"kTRC": curve})


def _profile(space: bytes, tags: dict[bytes, bytes]) -> bytes:
    table, body, start = struct.pack(">I", len(tags)), b"", 132 + 12 * len(tags)
    for name, content in tags.items():
        table += name + struct.pack(">II", start + len(body), len(content))
        body += content + bytes(-len(content) % 4)
    head = struct.pack(">I4xI4s4s4s12x4s28x", start + len(body), 0x04000000, b"mntr", space, b"XYZ ", b"acsp")
    head = head[:68] + _fixed(0.9642, 1.0, 0.8249)
    return head.ljust(128, b"\0") + table + body
