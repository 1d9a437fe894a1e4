"""Kill a sweep with SIGKILL at random moments, and see that nothing committed is lost.

    python benchmarks/kill.py [--kills 20] [--seed 1]

A run without kills says which trials there should be. Then the same command is killed again and again
and at last left to end: each trial that was committed must still be there after each kill, the database
must pass `PRAGMA integrity_check`, and the trials done in the end must be those of the undisturbed run.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SPEC = """
gemms:
  - {dtype: f32, sizes: [[96, 96, 96], [8, 200, 300]]}
  - {dtype: bf16, trans: TN, sizes: [[65, 33, 129]]}
"""
DONE = """
select problem_id, candidate_id from tuner_trial where outcome is not null
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    moments = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "spec.yaml").write_text(SPEC)

        def start(database: Path) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "tuner", "tune", str(folder / "spec.yaml")]
            command += ["--db", str(database), "--strategy", "random", "--trials", str(options.trials)]
            return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        assert start(folder / "calm.db").wait() == 0
        expected = done(folder / "calm.db")
        print(f"undisturbed: {len(expected)} trials")
        database = folder / "killed.db"
        for kill in range(options.kills):
            process = start(database)
            seconds = moments.uniform(0.2, 6.0)
            time.sleep(seconds)
            before = done(database)
            alive = process.poll() is None
            process.kill()
            process.wait()
            after = done(database)
            lost = before - after
            sound = not database.exists() or integrity(database)
            state = "killed" if alive else "had ended"
            print(f"kill {kill + 1} after {seconds:.1f} s ({state}): {len(after)} trials, {len(lost)} lost, "
                  f"integrity {'ok' if sound else 'BROKEN'}")  # fmt: skip
            if lost or not sound:
                sys.exit(1)
        assert start(database).wait() == 0
        final = done(database)
        print(f"resumed to the end: {len(final)} trials, the same set: {final == expected}")
        sys.exit(0 if final == expected and integrity(database) else 1)


def done(database: Path) -> set[tuple[str, str]]:
    if not database.exists():
        return set()
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        try:
            return set(connection.execute(DONE))
        except sqlite3.OperationalError:
            return set()  # killed before the tables were made


def integrity(database: Path) -> bool:
    with sqlite3.connect(database) as connection:
        return connection.execute("pragma integrity_check").fetchall() == [("ok",)]


if __name__ == "__main__":
    main()
