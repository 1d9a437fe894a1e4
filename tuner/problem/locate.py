"""YAML as plain values that remember where in the file each of them stands."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from tuner.errors import SpecError

Loc = tuple[str | int, ...]
"""Keys and indices that lead from the top of a document to a value: `("gemms", 0, "sizes")`."""

MAX_VALUES = 1_000_000  # after aliases are expanded, so that a few lines cannot fill the memory

_CORE = "tag:yaml.org,2002:"
_TEXT = {_CORE + name for name in ("str", "timestamp", "value", "merge")}
_SCALAR = {_CORE + name for name in ("int", "float", "bool", "null")}


@dataclass
class Document:
    """A YAML document: its plain `value`, where each part of it stands, and the errors found so far.

    Lines and columns count from 1. `at` has the position of each value, `keys` of each mapping's key.
    """

    file: str
    value: Any = None
    at: dict[Loc, tuple[int, int]] = field(default_factory=dict)
    keys: dict[Loc, tuple[int, int]] = field(default_factory=dict)
    errors: dict[Loc, tuple[tuple[int, int], str]] = field(default_factory=dict)

    def error(self, path: Loc, rule: str, *, on_key: bool = False) -> None:
        """Note that the value at `path`, or its key, breaks a rule. The first error of a path is kept.

        A path that is not in the document is located at the nearest mapping or list around it.
        """
        position = self.keys.get(path) if on_key else None
        around = path
        while position is None:
            position = self.at.get(around, (1, 1) if not around else None)
            around = around[:-1]
        self.errors.setdefault(path, (position, rule))

    def check(self) -> None:
        """Raise a SpecError with all errors, in the order of the file, if there are any."""
        if self.errors:
            found = sorted((*at, path_text(path), rule) for path, (at, rule) in self.errors.items())
            raise SpecError("\n".join(located(self.file, *parts) for parts in found))


def located(file: str, line: int, column: int, path: str, rule: str) -> str:
    """The one form of every error in a spec."""
    return f"{file}:{line}:{column}: {path}: {rule}"


def path_text(path: Loc) -> str:
    """`gemms[0].sizes[1].k`; `spec` for the document as a whole."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part if part.isidentifier() else repr(part)}"
    return text.removeprefix(".") or "spec"


def suggestion(word: object, known: Sequence[str], otherwise: str) -> str:
    """The question whether a known word was meant, or `otherwise` where none is close."""
    folded = {name.lower(): name for name in known}
    close = difflib.get_close_matches(str(word).lower(), folded, n=1, cutoff=0.55)
    return f"did you mean `{folded[close[0]]}`?" if close else otherwise


def show(value: object) -> str:
    """A value as an error message quotes it: short, and on one line."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= 10**20:
        return f"{'-' if value < 0 else ''}about 10^{int(abs(value).bit_length() * 0.30103)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def read_yaml(text: str, file: str) -> Document:
    """Parse YAML 1.2 text into plain dicts, lists, strings, numbers and booleans.

    Aliases are copied. Tags beyond the core schema, merge keys, duplicate keys, keys that are no strings,
    and empty values are noted as errors in the document.

    Raises:
        SpecError: the text is no YAML, or has more than one document.
    """
    yaml = YAML(typ="safe", pure=True)
    yaml.composer.warn_double_anchors = False  # YAML allows an anchor to be redefined
    try:
        root = yaml.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        context = " ".join(str(error.context or "").split())
        problem = " ".join(str(error.problem or "").split())
        what = f"{context}: {problem}" if context else problem
        message = f"{what}; check the indentation, colons, quotes and brackets around here"
        raise SpecError(located(file, mark.line + 1, mark.column + 1, "yaml", message)) from None
    except ReaderError as error:
        line, column = line_and_column(text[: error.position])
        message = f"the character U+{error.character:04X} is not allowed in YAML; remove it"
        raise SpecError(located(file, line, column, "yaml", message)) from None
    except RecursionError:
        message = "lists or mappings are nested too deeply; a spec has at most 8 levels"
        raise SpecError(located(file, 1, 1, "yaml", message)) from None
    except (ValueError, OverflowError):  # of chr(), the one thing that the scanner does not check
        escape = re.search(r"\\U(?!00(0.|10))", text)
        line, column = line_and_column(text[: escape.start() if escape else 0])
        message = "the escape names no character; characters end at \\U0010FFFF"
        raise SpecError(located(file, line, column, "yaml", message)) from None
    document = Document(file)
    if root is not None:
        document.value = _Reader(document, yaml).value(root, ())
    return document


def line_and_column(before: str) -> tuple[int, int]:
    """The position, counted from 1, of the character that follows the text `before`."""
    return before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1


class _Reader:
    """Turns the nodes of a document into values, and notes where they stand."""

    def __init__(self, document: Document, yaml: YAML) -> None:
        self.document = document
        self.constructor = yaml.constructor
        self.values = 0
        self.open: list[Node] = []

    def value(self, node: Node, path: Loc) -> Any:
        document = self.document
        self.values += 1
        document.at[path] = node.start_mark.line + 1, node.start_mark.column + 1
        if self.values > MAX_VALUES:
            rule = f"brings the file to more than {MAX_VALUES:,} values, aliases written out; use fewer"
            document.error(path[:1], rule)
            document.check()
        if any(node is parent for parent in self.open):
            document.error(path, "an alias cannot contain itself; write the values out")
            return None
        if isinstance(node, MappingNode) and node.tag == _CORE + "map":
            self.open.append(node)
            mapping = self.mapping(node, path)
            self.open.pop()
            return mapping
        if isinstance(node, SequenceNode) and node.tag == _CORE + "seq":
            self.open.append(node)
            sequence = [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
            self.open.pop()
            return sequence
        if isinstance(node, ScalarNode) and node.tag in _TEXT:
            return node.value
        if isinstance(node, ScalarNode) and node.tag in _SCALAR:
            return self.scalar(node, path)
        document.error(path, f"the tag {show(node.tag)} is not allowed; write a plain value")
        return None

    def mapping(self, node: MappingNode, path: Loc) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, item in node.value:
            name = key.value if isinstance(key, ScalarNode) else show(key.value)
            here = (*path, name)
            position = key.start_mark.line + 1, key.start_mark.column + 1
            if name in result:
                line = self.document.keys[here][0]
                self.document.keys[here] = position
                rule = f"duplicate key, first set on line {line}; keep one of the two"
                self.document.error(here, rule, on_key=True)
                continue
            self.document.keys[here] = position
            if key.tag == _CORE + "merge":
                rule = "merge keys are not part of YAML 1.2; repeat the keys, or put them in `defaults`"
                self.document.error(here, rule, on_key=True)
            elif key.tag != _CORE + "str":
                rule = f"a key must be a word, but is {show(key.value)}; write a key of the format"
                self.document.error(here, rule, on_key=True)
            else:
                result[name] = self.value(item, here)
        return result

    def scalar(self, node: ScalarNode, path: Loc) -> Any:
        try:
            value = self.constructor.construct_object(node)
        except (ValueError, LookupError):
            kind = str(node.tag).removeprefix(_CORE)
            self.document.error(path, f"{show(node.value)} is not a valid {kind}; correct it")
            return None
        if value is None:
            self.document.error(path, "has no value; write one, or remove the key")
        return value
