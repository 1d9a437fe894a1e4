"""What wavetune itself costs per candidate, and how quickly it enumerates a space.

    python benchmarks/overhead.py [--trials 60]

Overhead is everything that is spent on a trial but building, validating and timing it: choosing it,
rendering, talking to the worker process, the two commits to the database. The mirror of the trials in
Optuna's tables, written once per problem, is reported apart.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from tuner.device import open_device
from tuner.generate import Space, find_templates
from tuner.problem import load_spec
from tuner.store import Store
from tuner.sweep import Event, ProblemEnded, Settings, Sweep, TrialEnded

SPEC = Path(__file__).parents[1] / "problem_specs" / "quickstart.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=60)
    trials = parser.parse_args().trials
    device = open_device("cpu")
    fingerprint = device.fingerprint
    print(f"{fingerprint.name}, {fingerprint.compute_units} threads, {fingerprint.toolchain}")

    print("\nenumeration of the valid space")
    spec = load_spec(SPEC)
    for problem in spec.problems:
        for template in find_templates("cpu"):
            start = time.perf_counter()
            space = Space.enumerate(template, problem, device.target)
            seconds = time.perf_counter() - start
            print(
                f"  {template.name}, {problem.name}: {space.raw_size:,} raw, {len(space):,} valid: "
                f"{seconds:.3f} s, {seconds / space.raw_size * 1e6:.3f} s per 10^6 raw combinations"
            )

    overheads: list[float] = []
    ends: list[float] = []

    def notify(event: Event) -> None:
        if isinstance(event, TrialEnded):
            overheads.append(event.overhead_seconds * 1e3)
        elif isinstance(event, ProblemEnded):
            ends.append(event.mirror_seconds * 1e3)

    with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "r.db", create=True) as store:
        Sweep(spec, SPEC.read_text(), Settings(trials=trials), store, notify).run()
    ordered = sorted(overheads)
    print(f"\noverhead of {len(ordered)} candidates, ms")
    print(
        f"  median {statistics.median(ordered):.2f}, mean {statistics.fmean(ordered):.2f}, "
        f"90th percentile {ordered[int(0.9 * len(ordered))]:.2f}"
    )
    print(f"  mirror for Optuna: {sum(ends) / len(ordered):.2f} per candidate, once per problem")


if __name__ == "__main__":
    main()
