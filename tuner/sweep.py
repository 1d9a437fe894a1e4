"""The loop that ties the stages together; the only module, beside the command line, that sees them all.

For each problem of a spec: enumerate the space, then ask the search for candidates, build, validate and
time them, and tell it what was found, until the budget is spent; then time the best ones in turn and
keep the winner. Each trial is in the database before the next one begins, so the same command
resumes wherever an earlier run was stopped, by whatever.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from tuner import __version__
from tuner.build import Binary, BuildCache, BuildFailure
from tuner.device import Device, open_device
from tuner.errors import TemplateError
from tuner.generate import Candidate, KernelSource, Rejection, Space, Template, find_templates, render
from tuner.identity import content_hash
from tuner.learn import Observation, Origin, Proposal, Quality, Search, SearchSpace
from tuner.measure import (
    Measurement,
    Outcome,
    Protocol,
    Supervisor,
    WorkerLost,
    median_interval,
    needed_bytes,
    paired_ratio_interval,
)
from tuner.problem import GemmProblem, Spec
from tuner.store import Finalist, Store, Trial, Winner, mirror_trials

DEFAULT_TRIALS = 100

_TRIAL_SECONDS = 0.35  # what a trial takes about; only to plan a search that is limited by time alone
_CANARY_EVERY = 25  # trials
_CANARY_ROUNDS = 5
_FINAL_MARGIN = 1.10  # a candidate this much slower than the best is no finalist
_FINAL_SECONDS = 2.0
_FINAL_ROUNDS = range(9, 41)
_MAX_ATTEMPTS = 2  # how often one trial may take the whole sweep down
_HISTORY = 8  # earlier problems that the model learns from


@dataclass(frozen=True)
class Settings:
    """How to tune. `trials` counts candidates per problem, over all runs; `minutes` is for this run.

    At least one of the two bounds is in force: without both, `trials` is 100.
    """

    device: str = "cpu"
    threads: int | None = None
    protocol: Protocol = field(default_factory=Protocol)
    strategy: str = "model"
    trials: int | None = None
    minutes: float | None = None
    finalists: int = 8
    seed: int = 0
    jobs: int | None = None
    templates: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProblemStarted:
    """`known` trials of earlier runs count towards `budget`, which is None where time alone bounds it."""

    index: int
    problem: GemmProblem
    candidates: int
    raw_size: int
    rejections: tuple[Rejection, ...]
    known: int
    budget: int | None


@dataclass(frozen=True)
class TrialEnded:
    """`overhead_seconds` is all that was spent on the trial but building, validating and timing."""

    problem: GemmProblem
    candidate: Candidate
    origin: Origin
    measurement: Measurement
    done: int
    best: Candidate | None
    best_ns: float | None
    overhead_seconds: float


@dataclass(frozen=True)
class CanaryTimed:
    """The default candidate, timed again; `drift` is its time over the first one of this problem."""

    problem: GemmProblem
    drift: float


@dataclass(frozen=True)
class ProblemEnded:
    """`winner` is None where no candidate was valid; `quality` is None where nothing was left to do.

    `mirror_seconds` is what writing the trials to the problem's Optuna study took.
    """

    problem: GemmProblem
    winner: Winner | None
    quality: Quality | None
    mirror_seconds: float


@dataclass(frozen=True)
class ProblemSkipped:
    problem: GemmProblem
    reason: str


Event = ProblemStarted | TrialEnded | CanaryTimed | ProblemEnded | ProblemSkipped


@dataclass(frozen=True)
class SweepResult:
    """`status` is `finished` or `interrupted`; `outcomes` counts this run's trials."""

    run_id: int
    status: str
    winners: tuple[Winner, ...]
    outcomes: Counter[Outcome]
    skipped: tuple[ProblemSkipped, ...]
    seconds: float


class Sweep:
    """One run over a spec. `stop` may be called from a signal handler or another thread."""

    def __init__(
        self,
        spec: Spec,
        spec_text: str,
        settings: Settings,
        store: Store,
        notify: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.spec, self.spec_text, self.settings, self.store = spec, spec_text, settings, store
        self._notify = notify
        self._stopping = threading.Event()
        self._outcomes: Counter[Outcome] = Counter()
        self._history: deque[tuple[SearchSpace, list[Observation]]] = deque(maxlen=_HISTORY)

    def stop(self) -> None:
        """End after the trial that is running, with the winners so far."""
        self._stopping.set()

    @property
    def stopping(self) -> bool:
        return self._stopping.is_set()

    def run(self) -> SweepResult:
        """Tune every problem of the spec.

        Raises:
            TunerError: the device, the toolchain or the database cannot be used; what was measured
                until then is kept.
        """
        settings = self.settings
        start = time.monotonic()
        deadline = start + 60 * settings.minutes if settings.minutes is not None else None
        device = open_device(settings.device, settings.threads)
        self._tools = _Tools(device, BuildCache(), settings)
        run_id = self.store.begin_run(
            spec_name=self.spec.name,
            spec_text=self.spec_text,
            fingerprint=device.fingerprint,
            protocol=settings.protocol,
            strategy=settings.strategy,
            seed=settings.seed,
            version=__version__,
        )
        winners: list[Winner] = []
        skipped: list[ProblemSkipped] = []
        status = "failed"
        try:
            with Supervisor(settings.device, settings.threads, settings.protocol) as supervisor:
                for index, problem in enumerate(self.spec.problems):
                    if self._stopping.is_set():
                        break
                    share = None
                    if deadline is not None:
                        share = (deadline - time.monotonic()) / (len(self.spec.problems) - index)
                    task = _Task(self, supervisor, run_id, index, problem)
                    try:
                        winner = task.run(share)
                    except _Unsuitable as reason:
                        skipped.append(ProblemSkipped(problem, str(reason)))
                        self._notify(skipped[-1])
                        continue
                    if winner is not None:
                        winners.append(winner)
            status = "interrupted" if self._stopping.is_set() else "finished"
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            self.store.end_run(run_id, status)
            device.close()
        seconds = time.monotonic() - start
        return SweepResult(run_id, status, tuple(winners), self._outcomes, tuple(skipped), seconds)


class _Unsuitable(Exception):
    """A problem that cannot be tuned here; the message says why."""


class _Tools:
    """What turns a candidate into a binary, and what there is to choose from."""

    def __init__(self, device: Device, cache: BuildCache, settings: Settings) -> None:
        self.device, self.target, self.toolchain = device, device.target, device.toolchain
        self.fingerprint = device.fingerprint
        self.jobs = settings.jobs or len(os.sched_getaffinity(0))
        self._cache = cache
        templates = find_templates(device.target.kind)
        if unknown := set(settings.templates) - {t.name for t in templates}:
            names = ", ".join(t.name for t in templates)
            raise TemplateError(
                f"there is no template {sorted(unknown)[0]} for {settings.device}; use {names}"
            )
        chosen = settings.templates or [t.name for t in templates]
        self.templates = {t.name: t for t in templates if t.name in chosen}

    def spaces(self, problem: GemmProblem) -> list[Space]:
        """The non-empty spaces of the templates that serve the problem."""
        fitting = [t for t in self.templates.values() if t.unsupported(problem.type, self.target) is None]
        spaces = [Space.enumerate(template, problem, self.target) for template in fitting]
        return [space for space in spaces if len(space)]

    def why_not(self, template: Template, problem: GemmProblem) -> str:
        reason = template.unsupported(problem.type, self.target)
        return f"{template.name}: {reason or 'no combination of its parameters is valid'}"

    def build(
        self, candidates: Sequence[Candidate], problem: GemmProblem
    ) -> list[tuple[KernelSource | None, Binary | BuildFailure | str]]:
        """Render and build; a candidate that does not render has no source, and the reason instead."""
        sources: list[KernelSource | str] = []
        for candidate in candidates:
            try:
                template = self.templates[candidate.template]
                sources.append(render(template, candidate, problem.type, self.target))
            except TemplateError as error:
                sources.append(str(error))
        good = [s for s in sources if isinstance(s, KernelSource)]
        built = iter(self._cache.build_many(good, self.target, self.toolchain, self.jobs))
        return [(s, next(built)) if isinstance(s, KernelSource) else (None, s) for s in sources]


class _Task:
    """The tuning of one problem."""

    def __init__(
        self, sweep: Sweep, supervisor: Supervisor, run_id: int, index: int, problem: GemmProblem
    ) -> None:
        self._sweep, self._supervisor, self._run_id = sweep, supervisor, run_id
        self._store, self._settings, self._tools = sweep.store, sweep.settings, sweep._tools
        self._index, self.problem = index, problem
        self._key = (self._tools.fingerprint.id, problem.id, self._settings.protocol.id)
        self._measured: dict[str, Trial] = {}
        self._best: Trial | None = None

    def run(self, share: float | None) -> Winner | None:
        """Spend the budget, or `share` seconds, and decide on a winner."""
        end = time.monotonic() + share if share is not None else None
        search, attempts = self._open(share)
        known = len(self._measured)
        limit = self._settings.trials if self._settings.minutes is not None else search.budget
        space = search.space
        self._sweep._notify(
            ProblemStarted(
                self._index,
                self.problem,
                len(space),
                sum(s.raw_size for s in space.spaces),
                tuple(r for s in space.spaces for r in s.rejections),
                known,
                limit,
            )
        )
        # The final round belongs to the share, too.
        end = end - min(2 * _FINAL_SECONDS, 0.2 * (share or 0.0)) if end is not None else None
        self._search(search, attempts, end)
        current = self._store.winner(self.problem.id, self._key[0], self._key[2])
        fresh = len(self._measured) > known
        if fresh or current is None or current.trial_id not in {t.id for t in self._measured.values()}:
            current = self._decide()
        start = time.perf_counter()
        if fresh:
            mirror_trials(self._store, self._study_name(), search.frozen_trials())
        mirror_seconds = time.perf_counter() - start
        quality = search.quality() if fresh else None
        self._sweep._notify(ProblemEnded(self.problem, current, quality, mirror_seconds))
        return current

    def _open(self, share: float | None) -> tuple[Search, dict[int, int]]:
        """Start the search with what earlier runs found.

        Returns it with the trials that began and never ended: their number of attempts by row.
        """
        device = self._tools.device
        needed, there = needed_bytes(self.problem), device.memory_bytes
        if needed > there:
            raise _Unsuitable(
                f"it needs about {needed / 2**30:.1f} GiB, but only {there / 2**30:.1f} GiB may be used"
            )
        spaces = self._tools.spaces(self.problem)
        if not spaces:
            reasons = [self._tools.why_not(t, self.problem) for t in self._tools.templates.values()]
            raise _Unsuitable("; ".join(reasons) or "there is no template for this device")
        space = SearchSpace(spaces)
        told: list[tuple[Observation, int]] = []
        attempts: dict[int, int] = {}
        for trial in self._store.trials(*self._key):
            row = space.row_of(trial.candidate)
            if row is None:
                continue  # of a template that has changed since
            if trial.measurement is None:
                attempts[row] = trial.attempts
            else:
                told.append((_observation(row, trial.measurement), trial.id))
                self._keep(trial)
        budget = self._settings.trials
        if budget is None and share is None:
            budget = DEFAULT_TRIALS
        elif budget is None:
            assert share is not None
            budget = len(told) + max(16, int(share / _TRIAL_SECONDS))
        search = Search(
            space,
            strategy=self._settings.strategy,
            budget=budget,
            seed=self._settings.seed,
            history=list(self._sweep._history),
        )
        for observation, trial_id in told:
            search.tell(observation, trial_id=trial_id)
        self._sweep._history.append((space, [o for o, _ in told]))
        return search, attempts

    def _search(self, search: Search, attempts: dict[int, int], end: float | None) -> None:
        batch = max(4, 2 * self._tools.jobs)
        canary = search.space.candidate(search.space.default_rows[0])
        since_canary, first_canary = 0, None
        while not self._over(end):
            start = time.perf_counter()
            proposals = search.ask(batch)
            if not proposals:
                return
            self._supervisor.prepare(self.problem)
            candidates = [search.space.candidate(p.row) for p in proposals]
            asked = time.perf_counter()
            built = self._tools.build(candidates, self.problem)
            shared = (asked - start) / len(proposals)
            for proposal, candidate, (_, binary) in zip(proposals, candidates, built, strict=True):
                if self._over(end):
                    return
                self._trial(search, proposal, candidate, binary, attempts.get(proposal.row, 0), shared)
            since_canary += len(proposals)
            if since_canary >= _CANARY_EVERY:
                since_canary = 0
                time_ns = self._time_canary(canary, first_canary)
                first_canary = first_canary or time_ns

    def _trial(
        self,
        search: Search,
        proposal: Proposal,
        candidate: Candidate,
        binary: Binary | BuildFailure | str,
        attempts: int,
        shared_seconds: float,
    ) -> None:
        start = time.perf_counter()
        trial_id = self._store.start_trial(
            self._run_id, self.problem, candidate, proposal.origin, proposal.predicted_ns
        )
        launched = time.perf_counter()
        incumbent = self._best.measurement.time_ns if self._best and self._best.measurement else None
        if isinstance(binary, str):
            measurement = Measurement(Outcome.ILLEGAL, message=binary)
        elif isinstance(binary, BuildFailure):
            measurement = Measurement(Outcome.BUILD_FAILED, message=binary.message)
        elif attempts >= _MAX_ATTEMPTS:
            message = f"ended the whole sweep, {attempts} times"
            measurement = Measurement(Outcome.CRASHED, message=message)
        else:
            measurement = self._supervisor.measure(binary, incumbent)
        measured = time.perf_counter()
        sha256 = binary.sha256 if isinstance(binary, Binary) else None
        build_seconds = 0.0 if isinstance(binary, str) else binary.seconds
        self._store.finish_trial(trial_id, measurement, sha256, build_seconds)
        search.tell(_observation(proposal.row, measurement), trial_id=trial_id)
        self._sweep._history[-1][1].append(_observation(proposal.row, measurement))
        self._keep(
            Trial(
                trial_id,
                self._run_id,
                self.problem.id,
                candidate,
                proposal.origin,
                datetime.now(UTC),
                proposal.predicted_ns,
                measurement,
                sha256,
                build_seconds,
            )
        )
        self._sweep._outcomes[measurement.outcome] += 1
        running = measurement.validate_seconds + measurement.benchmark_seconds
        within = max(0.0, measured - launched - running) if measurement.outcome is Outcome.OK else 0.0
        overhead = shared_seconds + (launched - start) + within + (time.perf_counter() - measured)
        best = self._best
        self._sweep._notify(
            TrialEnded(
                self.problem,
                candidate,
                proposal.origin,
                measurement,
                len(self._measured),
                best.candidate if best else None,
                best.measurement.time_ns if best and best.measurement else None,
                overhead,
            )
        )

    def _keep(self, trial: Trial) -> None:
        """Remember a finished trial, and whether it is the best so far."""
        self._measured[trial.candidate.id] = trial
        found = _time_of(trial)
        if found is not None and (self._best is None or found < (_time_of(self._best) or 0.0)):
            self._best = trial

    def _time_canary(self, canary: Candidate, first_ns: float | None) -> float | None:
        """Time the default candidate again; return its time (ns), None if it is not valid here."""
        trial = self._measured.get(canary.id)
        if trial is None or _time_of(trial) is None:
            return None
        ((_, binary),) = self._tools.build([canary], self.problem)
        if not isinstance(binary, Binary):
            return None
        try:
            (samples,) = self._supervisor.interleave([binary], _CANARY_ROUNDS, _time_of(trial) or 0.0)
        except WorkerLost:
            return None
        time_ns = median_interval(samples)[0]
        self._store.record_canary(self._run_id, self.problem.id, canary, time_ns)
        self._sweep._notify(CanaryTimed(self.problem, time_ns / (first_ns or time_ns)))
        return time_ns

    def _decide(self) -> Winner | None:
        """Time the best candidates and the default in turn, and record which of them wins."""
        valid = sorted((t for t in self._measured.values() if _time_of(t)), key=lambda t: _time_of(t) or 0.0)
        if not valid:
            return None
        best_ns = _time_of(valid[0]) or 0.0
        chosen = [t for t in valid if (_time_of(t) or 0.0) <= _FINAL_MARGIN * best_ns]
        chosen = chosen[: self._settings.finalists]
        default = next((t for t in valid if t.origin == Origin.DEFAULT), None)
        if default is not None and default not in chosen:
            chosen.append(default)
        built = self._tools.build([t.candidate for t in chosen], self.problem)
        contest = [
            (trial, source, binary)
            for trial, (source, binary) in zip(chosen, built, strict=True)
            if isinstance(binary, Binary) and source is not None
        ]
        self._supervisor.prepare(self.problem)
        samples = self._final_round(contest)
        if not samples:
            return None
        contest = [entry for entry in contest if entry[0].id in samples]
        winner, source, binary = min(contest, key=lambda entry: median_interval(samples[entry[0].id])[0])
        median, low, high = median_interval(samples[winner.id])
        ties = tuple(
            trial.candidate.name
            for trial, _, _ in contest
            if trial is not winner and paired_ratio_interval(samples[trial.id], samples[winner.id])[1] <= 1.0
        )
        decided = Winner(
            problem=self.problem,
            fingerprint=self._tools.fingerprint,
            protocol=self._settings.protocol,
            candidate=winner.candidate,
            source=source,
            binary_sha256=binary.sha256,
            trial_id=winner.id,
            time_ns=median,
            ci_low_ns=low,
            ci_high_ns=high,
            default_ns=median_interval(samples[default.id])[0] if default and default.id in samples else None,
            decided_at=datetime.now(UTC),
            ties=ties,
        )
        finalists = [
            Finalist(t.id, t.candidate, tuple(samples[t.id]), median_interval(samples[t.id])[0])
            for t, _, _ in contest
        ]
        self._store.set_winner(self._run_id, decided, finalists)
        return decided

    def _final_round(self, contest: list[tuple[Trial, KernelSource, Binary]]) -> dict[int, list[float]]:
        """Return the samples of each finalist by trial; one that fails now is left out."""
        total_ns = sum(_time_of(trial) or 0.0 for trial, _, _ in contest)
        slowest_ns = max((_time_of(trial) or 0.0 for trial, _, _ in contest), default=0.0)
        rounds = int(_FINAL_SECONDS * 1e9 / max(total_ns, 20_000.0 * len(contest)))
        rounds = min(max(rounds, _FINAL_ROUNDS.start), _FINAL_ROUNDS.stop - 1)
        try:
            samples = self._supervisor.interleave([b for _, _, b in contest], rounds, slowest_ns)
            return {trial.id: s for (trial, _, _), s in zip(contest, samples, strict=True)}
        except WorkerLost:
            sound = [e for e in contest if self._supervisor.measure(e[2]).outcome is Outcome.OK]
            # Each round takes at least one out, so this ends.
            return self._final_round(sound) if 0 < len(sound) < len(contest) else {}

    def _over(self, end: float | None) -> bool:
        return self._sweep._stopping.is_set() or (end is not None and time.monotonic() >= end)

    def _study_name(self) -> str:
        fingerprint = self._tools.fingerprint
        # A study fixes the choices of its parameters, so other templates begin another one.
        templates = content_hash(sorted(t.hash for t in self._tools.templates.values()))
        key = "-".join(part[:8] for part in (fingerprint.id, self._key[2], templates))
        return f"{self.problem.name} | {fingerprint.name} | {key}"


def _observation(row: int, measurement: Measurement) -> Observation:
    valid = measurement.outcome is Outcome.OK
    return Observation(row, measurement.time_ns if valid else None, lower_bound=measurement.raced)


def _time_of(trial: Trial) -> float | None:
    measurement = trial.measurement
    return measurement.time_ns if measurement and measurement.outcome is Outcome.OK else None
