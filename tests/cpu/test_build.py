"""The build cache, and the choice of a host compiler."""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from tuner.build import Binary, BuildCache, BuildFailure, HostToolchain, Toolchain, cache_root, host_toolchain
from tuner.device import open_device
from tuner.errors import ToolchainError
from tuner.generate import Candidate, KernelSource, Target
from tuner.identity import file_sha256
from tuner.problem import ProblemType

CANDIDATE = Candidate("plain", "5eed", (("tile", 1),), "plain_tile1")
SOURCE = KernelSource(CANDIDATE, ProblemType(), "c", "answer", "int answer(void) { return 42; }\n")
BROKEN = replace(SOURCE, text="int answer(void) { return nothing; }\n")
BASELINE = Target("cpu", "x86_64-v2")


class Copier:
    """A toolchain that copies the source, counts, and fails where the source has `fail`."""

    id = "copier 1.0"

    def __init__(self, *flags: str) -> None:
        self.given = flags
        self.compiled = 0

    def flags(self, target: Target) -> tuple[str, ...]:
        return self.given

    def compile(self, source: KernelSource, target: Target, folder: Path) -> str | None:
        self.compiled += 1
        if "fail" in source.text:
            return "error: it fails"
        (folder / "kernel.bin").write_text(source.text)
        return None


@pytest.fixture
def cache(tmp_path: Path) -> BuildCache:
    return BuildCache(tmp_path)


def built(cache: BuildCache, source: KernelSource, toolchain: Toolchain, target: Target = BASELINE) -> Binary:
    binary = cache.build(source, target, toolchain)
    assert isinstance(binary, Binary)
    return binary


def test_a_source_is_compiled_once(cache: BuildCache) -> None:
    toolchain = Copier()
    first = built(cache, SOURCE, toolchain)
    again = built(BuildCache(cache.root.parent), SOURCE, toolchain)
    assert toolchain.compiled == 1
    assert again == replace(first, seconds=0.0)
    assert first.path.read_text() == SOURCE.text
    assert (first.sha256, first.symbol) == (file_sha256(first.path), "answer")
    assert first.resources == {"code_bytes": len(SOURCE.text)}


def test_a_failure_is_kept_too(cache: BuildCache) -> None:
    toolchain = Copier()
    for _ in range(2):
        failure = cache.build(replace(SOURCE, text="fail"), BASELINE, toolchain)
        assert isinstance(failure, BuildFailure)
        assert (failure.message, failure.toolchain) == ("error: it fails", "copier 1.0")
    assert toolchain.compiled == 1


def test_whatever_changes_the_binary_is_built_anew(cache: BuildCache) -> None:
    other = Copier()
    other.id = "copier 1.1"
    builds = [
        built(cache, SOURCE, Copier()),
        built(cache, replace(SOURCE, text=SOURCE.text + " "), Copier()),
        built(cache, replace(SOURCE, symbol="other"), Copier()),
        built(cache, SOURCE, Copier("-O1")),
        built(cache, SOURCE, Copier(), Target("cpu", "x86_64-v3")),
        built(cache, SOURCE, other),
    ]
    assert len({binary.path for binary in builds}) == len(builds)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:3])


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: _truncate(entry / "kernel.bin"),
        lambda entry: (entry / "kernel.bin").write_text("another"),
        lambda entry: (entry / "kernel.bin").unlink(),
        lambda entry: _truncate(entry / "build.json"),
        lambda entry: (entry / "build.json").write_bytes(b""),
        lambda entry: (entry / "build.json").write_bytes(b"\xff\xff"),
        lambda entry: (entry / "build.json").write_text("{}"),
        lambda entry: (entry / "build.json").write_text("[1]"),
        lambda entry: (entry / "build.json").unlink(),
    ],
)
def test_a_damaged_entry_is_rebuilt(cache: BuildCache, damage: Callable[[Path], object]) -> None:
    toolchain = Copier()
    first = built(cache, SOURCE, toolchain)
    damage(first.path.parent)
    again = built(cache, SOURCE, toolchain)
    assert toolchain.compiled == 2
    assert again.path.read_text() == SOURCE.text
    assert json.loads((again.path.parent / "build.json").read_text())["sha256"] == first.sha256


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(
        ToolchainError, match=r"must be writable, but .*file/build is not \(Not a directory\); set"
    ):
        BuildCache(tmp_path / "file")
    cache = BuildCache(tmp_path)
    shutil.rmtree(cache.root)
    cache.root.write_text("in the way")
    with pytest.raises(
        ToolchainError, match=r"cannot write to the build cache .*; free some space or set TUNER_CACHE"
    ):
        cache.build(SOURCE, BASELINE, Copier())


class _Full(Copier):
    """Writes to a disk without space."""

    def compile(self, source: KernelSource, target: Target, folder: Path) -> str | None:
        (folder / "kernel.bin").symlink_to("/dev/full")
        return super().compile(source, target, folder)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_told_and_leaves_nothing_behind(cache: BuildCache) -> None:
    with pytest.raises(ToolchainError, match=r"No space left on device; free some space or set TUNER_CACHE"):
        cache.build(SOURCE, BASELINE, _Full())
    assert list(cache.root.glob("*/*")) == []
    assert built(cache, SOURCE, Copier()).path.read_text() == SOURCE.text


def test_many_builds_keep_their_order(cache: BuildCache) -> None:
    sources = [replace(SOURCE, text=f"{'fail' if i % 3 == 0 else 'good'} {i}") for i in range(20)]
    results = cache.build_many(sources, BASELINE, Copier(), jobs=4)
    assert [isinstance(result, BuildFailure) for result in results] == [i % 3 == 0 for i in range(20)]
    assert [result.source_id for result in results] == [source.id for source in sources]


class _Together(Copier):
    """Ends each compilation only when all processes have come that far."""

    def __init__(self, barrier: Barrier) -> None:
        super().__init__()
        self.barrier = barrier

    def compile(self, source: KernelSource, target: Target, folder: Path) -> str | None:
        message = super().compile(source, target, folder)
        self.barrier.wait(60)
        return message


def _build_together(root: Path, barrier: Barrier) -> None:
    binary = BuildCache(root).build(SOURCE, BASELINE, _Together(barrier))
    assert isinstance(binary, Binary)
    assert file_sha256(binary.path) == binary.sha256


def test_processes_may_race_for_one_entry(cache: BuildCache) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    racers = [context.Process(target=_build_together, args=(cache.root.parent, barrier)) for _ in range(3)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0, 0, 0]
    (entry,) = (path for path in cache.root.glob("*/*"))
    assert sorted(path.name for path in entry.iterdir()) == ["build.json", "kernel.bin"]


# Compilers


@pytest.fixture
def compilers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Let PATH have nothing but the given compilers, each of which only tells its name."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for variable in ("TUNER_CC", "CC"):
        monkeypatch.delenv(variable, raising=False)

    def compilers(*names: str) -> None:
        for name in names:
            (folder / name).write_text(f"#!/bin/sh\necho '{name} 1.0'\n")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))
        host_toolchain.cache_clear()

    yield compilers
    host_toolchain.cache_clear()


def test_the_first_compiler_of_the_system_is_taken(compilers: Callable[..., None]) -> None:
    for name in ("cc", "gcc", "clang"):  # each is preferred to those before it
        compilers(name)
        assert host_toolchain().id == f"{name} 1.0"


def test_the_user_may_choose(compilers: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    compilers("clang", "mine", "ours")
    monkeypatch.setenv("CC", "ours")
    assert host_toolchain().id == "ours 1.0"
    monkeypatch.setenv("TUNER_CC", "mine -m64")
    host_toolchain.cache_clear()
    assert host_toolchain().command == ("mine", "-m64")


def test_a_chosen_compiler_that_does_not_work_is_told(
    compilers: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    compilers("clang")
    monkeypatch.setenv("CC", "nonesuch")
    with pytest.raises(
        ToolchainError, match=r"^`nonesuch --version` does not work; set CC to a working C compiler"
    ):
        host_toolchain()


def test_zig_is_what_is_left_and_may_be_asked_for(
    compilers: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ziglang", reason="needs the extra `toolchain`")
    compilers()
    assert host_toolchain().is_zig
    compilers("clang", "gcc")
    monkeypatch.setenv("TUNER_CC", "zig")
    assert host_toolchain().is_zig


def test_a_compiler_that_does_not_work_is_passed_over(compilers: Callable[..., None], tmp_path: Path) -> None:
    compilers("gcc")
    (tmp_path / "bin" / "clang").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "clang").chmod(0o755)
    assert host_toolchain().id == "gcc 1.0"


@pytest.mark.parametrize(
    ("command", "is_zig"), [("zig cc", True), ("ccache zig cc", True), ("ccache cc", False)]
)
def test_zig_is_known_by_its_name(
    compilers: Callable[..., None], monkeypatch: pytest.MonkeyPatch, command: str, is_zig: bool
) -> None:
    compilers("zig", "ccache")
    monkeypatch.setenv("TUNER_CC", command)
    toolchain = host_toolchain()
    assert toolchain.is_zig is is_zig
    assert ("-fno-sanitize=undefined" in toolchain.extra_flags) is is_zig


def test_without_a_compiler_the_extra_is_named(
    compilers: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    compilers()
    monkeypatch.setitem(sys.modules, "ziglang", None)  # as if it were not installed
    with pytest.raises(ToolchainError) as error:
        host_toolchain()
    assert str(error.value) == (
        "a C compiler is needed for the cpu device, but there is none; "
        "install one by pip: pip install 'wavetune[toolchain]'"
    )


def _host_toolchains() -> list[HostToolchain]:
    """The compiler that users get here, and zig where it is another."""
    with pytest.MonkeyPatch.context() as patch:
        host_toolchain.cache_clear()
        found = [host_toolchain()]
        patch.setenv("TUNER_CC", "zig")
        host_toolchain.cache_clear()
        with contextlib.suppress(ToolchainError):
            found.append(host_toolchain())
        host_toolchain.cache_clear()
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("toolchain", _host_toolchains(), ids=lambda t: t.id.split()[0])
def test_a_real_compiler_makes_libraries_and_explains_failures(
    toolchain: HostToolchain, cache: BuildCache
) -> None:
    target = open_device("cpu").target
    binary = built(cache, SOURCE, toolchain, target)
    assert ctypes.CDLL(str(binary.path)).answer() == 42
    failure = cache.build(BROKEN, target, toolchain)
    assert isinstance(failure, BuildFailure)
    assert failure.message.startswith("kernel.c:1:")
    assert "nothing" in failure.message


SLOW_COMPILER = """\
import os, pathlib, sys, time
pathlib.Path("{folder}/compiling").write_text(str(os.getpid()))
time.sleep({seconds})
pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_text("done")
"""


def slow_compiler(folder: Path, seconds: float) -> HostToolchain:
    """A driver that leaves the work to another process, as gcc does."""
    (folder / "proper.py").write_text(SLOW_COMPILER.format(folder=folder, seconds=seconds))
    driver = folder / "driver"
    driver.write_text(f'#!/bin/sh\n{sys.executable} -IS {folder}/proper.py "$@"\nexit $?\n')
    driver.chmod(0o755)
    return HostToolchain((str(driver),), "slow 1.0")


def _build_slowly(folder: Path) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, lambda *_: (folder / "interrupted").touch())
    built(BuildCache(folder), SOURCE, slow_compiler(folder, 1.0))


def test_an_interrupt_of_the_sweep_is_no_failed_build(tmp_path: Path) -> None:
    builder = multiprocessing.get_context("spawn").Process(target=_build_slowly, args=(tmp_path,))
    builder.start()
    while not (tmp_path / "compiling").exists():
        assert builder.is_alive()
        time.sleep(0.01)
    assert builder.pid is not None
    os.killpg(builder.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
    builder.join(60)
    assert (tmp_path / "interrupted").exists()
    assert builder.exitcode == 0


def test_a_compiler_that_does_not_end_is_ended_with_all_its_processes(
    cache: BuildCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuner.build.host._TIMEOUT_SECONDS", 2)
    failure = cache.build(SOURCE, BASELINE, slow_compiler(tmp_path, 60.0))
    assert isinstance(failure, BuildFailure)
    assert failure.message == "the compiler did not end within 2 s"
    compiling = int((tmp_path / "compiling").read_text())
    for _ in range(500):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{compiling}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)
                continue
        break
    else:
        pytest.fail("the compiler's process is still there")


@pytest.mark.parametrize(
    "ending", ["kill -9 $$", "echo 'fatal error: Killed signal terminated program cc1' >&2; exit 1"]
)
def test_a_compiler_that_was_stopped_is_asked_again(cache: BuildCache, tmp_path: Path, ending: str) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{ending}\n")
    compiler.chmod(0o755)
    toolchain = HostToolchain((str(compiler),), "compiler 1.0")
    failure = cache.build(SOURCE, BASELINE, toolchain)
    assert isinstance(failure, BuildFailure)
    assert failure.message.startswith("the compiler was stopped: ")
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; echo built > "$2"\n')
    assert built(cache, SOURCE, toolchain).path.read_text() == "built\n"


def test_the_cache_is_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("TUNER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == Path("/home/someone/.cache/wavetune")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert cache_root() == Path("/var/cache/wavetune")
    monkeypatch.setenv("TUNER_CACHE", "~/kernels")
    assert cache_root() == Path("/home/someone/kernels")
