"""The values that leave the generator."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tuner.identity import content_hash
from tuner.problem import ProblemType

ParamValue = int | str | bool


@dataclass(frozen=True)
class Target:
    """What a kernel is generated and compiled for: the device as a compiler sees it.

    `kind` is `cpu`, `hip` or `cuda`; `arch` is what the toolchain is told (`x86_64-znver4`, `gfx942`,
    `sm_90a`); `facts` are the integers that expressions in templates may use, such as
    `vector_bytes`, `vector_registers`, `l1_bytes`, `lds_bytes`, `wave_size` or `compute_units`.
    """

    kind: str
    arch: str
    facts: tuple[tuple[str, int], ...] = ()

    def scope(self) -> dict[str, object]:
        return {"kind": self.kind, "arch": self.arch, **dict(self.facts)}


@dataclass(frozen=True)
class Candidate:
    """A template and a value for each of its parameters.

    `template_hash` covers every file that rendering reads, so a changed template makes new
    candidates and never reuses what was measured with the old one.
    """

    template: str
    template_hash: str
    params: tuple[tuple[str, ParamValue], ...]
    name: str

    @cached_property
    def id(self) -> str:
        return content_hash([self.template, self.template_hash, dict(self.params)])

    @property
    def values(self) -> dict[str, ParamValue]:
        return dict(self.params)

    def to_dict(self) -> dict[str, Any]:
        return {
            "template": self.template,
            "template_hash": self.template_hash,
            "params": dict(self.params),
            "name": self.name,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Candidate:
        return cls(**{**data, "params": tuple(data["params"].items())})


@dataclass(frozen=True)
class KernelSource:
    """A rendered kernel: self-contained source text and the symbol it defines."""

    candidate: Candidate
    type: ProblemType
    language: str
    symbol: str
    text: str

    @cached_property
    def id(self) -> str:
        return content_hash([self.language, self.symbol, self.text])
