"""Stable content hashes, the identity of everything that moves between stages."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path


def content_hash(value: object) -> str:
    """Return 16 hex digits of the SHA-256 of `value` as canonical JSON.

    Equal values hash equally in every process and on every machine; dictionaries are compared
    without regard to the order of their keys.
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hex digits."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
