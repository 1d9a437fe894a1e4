"""Tuned libraries: winners in, a folder out that C programs link and `tuner.load` opens."""

from tuner.export.library import Library, load
from tuner.export.manifest import Manifest, read_manifest, verify
from tuner.export.table import Choice
from tuner.export.write import Export, export_library

__all__ = [
    "Choice",
    "Export",
    "Library",
    "Manifest",
    "export_library",
    "load",
    "read_manifest",
    "verify",
]
