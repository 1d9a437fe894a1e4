"""The store on SQLite: files, failures, processes that die, and versions of the tables."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
import threading
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Table, create_engine, inspect

import tuner.store.database as database_module
from tuner.errors import StoreError
from tuner.store import Store, mirror_trials, optuna_storage
from tuner.store.database import connect_sqlite, migrate
from tuner.store.schema import REVISION, VERSION_TABLE, metadata
from tuner.testing.store_contract import (
    PROBLEM,
    add_trial,
    begin_run,
    make_winner,
)

MIGRATIONS = Path(database_module.__file__).parent / "migrations"

PREAMBLE = """
import os, random, resource, signal, sqlite3, sys, time
from pathlib import Path
from tuner.errors import StoreError
from tuner.store import Store
from tuner.testing.store_contract import *
path = Path(sys.argv[1])
"""


def script(body: str, path: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", PREAMBLE + body, path], stdout=subprocess.PIPE, text=True)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "results.db"


@pytest.fixture
def filled(path: Path) -> Path:
    """A database with a winner, that nobody has open."""
    with Store.open(path, create=True) as store:
        run_id = begin_run(store)
        store.set_winner(run_id, make_winner(add_trial(store, run_id)), [])
        store.end_run(run_id, "finished")
    return path


def state(folder: Path) -> dict[str, str]:
    return {p.name: sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def intact(path: Path) -> bool:
    connection = sqlite3.connect(path)
    try:
        return bool(connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)])
    finally:
        connection.close()


# Opening


@pytest.mark.parametrize("name", ["results.db", "a folder%20?#é{x}/r%s.db"])
def test_any_path_will_do(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    with Store.open(str(path), create=True) as store:
        assert store.path == path
        add_trial(store, begin_run(store))
        assert mirror_trials(store, "none", []) == 0
    with Store.open(path, read_only=True) as store:
        assert len(list(store.all_trials())) == 1
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_url_names_the_same_file(filled: Path) -> None:
    with Store.open(f"sqlite:///{filled}") as store:
        assert (store.path, store.url) == (filled, f"sqlite:///{filled}")
        assert len(store.winners()) == 1


def test_each_commit_is_synced_to_the_log(filled: Path) -> None:
    connection = connect_sqlite(filled)
    names = ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
    assert [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names] == ["wal", 2, 1, 20000]
    connection.close()


def test_reading_only_writes_nothing(filled: Path) -> None:
    before = state(filled.parent)
    with Store.open(filled, read_only=True) as store:
        assert len(store.winners()) == len(store.runs()) == len(list(store.all_trials())) == 1
        assert state(filled.parent) == before
        with pytest.raises(StoreError, match="must be writable"):
            begin_run(store)
        with pytest.raises(ValueError, match="only to be read"):
            optuna_storage(store)
    assert state(filled.parent) == before


def test_reading_only_works_without_permission_to_write(filled: Path) -> None:
    body = """
with Store.open(path, read_only=True) as store:  # loads what nobody may not be able to read
    print(len(store.winners()))
if os.getuid() == 0:  # whom permissions do not stop
    os.setuid(65534)
with Store.open(path, read_only=True) as store:
    print(len(store.winners()))
try:
    with Store.open(path) as store:
        begin_run(store)
except StoreError as error:
    print(error)
"""
    with TemporaryDirectory() as folder:  # unlike tmp_path, one that everybody can reach
        path = Path(folder, filled.name)
        path.write_bytes(filled.read_bytes())
        path.chmod(0o444)
        path.parent.chmod(0o555)
        output, _ = script(body, path).communicate()
        path.parent.chmod(0o755)
    rule = "must be writable, and its folder too; change that or name another file"
    assert output.splitlines() == ["1", "1", f"{path} {rule}"]


def test_a_reader_sees_what_a_writer_has_just_written(filled: Path) -> None:
    with Store.open(filled) as writer, Store.open(filled, read_only=True) as reader:
        run_id = begin_run(writer)
        for number in range(1, 4):
            add_trial(writer, run_id, number)
            assert len(list(reader.all_trials())) == 1 + number
    with Store.open(filled, read_only=True) as reader:
        assert len(list(reader.all_trials())) == 4


def test_a_reader_notices_a_file_that_changes_under_it(filled: Path) -> None:
    with (
        Store.open(filled, read_only=True) as reader,
        pytest.raises(StoreError, match="changed while it was read"),
        reader._database.reading(),
        Store.open(filled) as writer,
    ):
        begin_run(writer)


# Failures, each one line that says what to do


def one_line(error: pytest.ExceptionInfo[StoreError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert ";" in text
    return text


def test_a_missing_file_is_made_only_on_request(path: Path) -> None:
    for read_only in (False, True):
        with pytest.raises(StoreError, match="there is no database") as error:
            Store.open(path, read_only=read_only)
        assert str(path) in one_line(error)
    with pytest.raises(StoreError, match="there is no database"):
        Store.open(path, create=True, read_only=True)
    assert not path.exists()
    with pytest.raises(StoreError, match="there is no folder") as error:
        Store.open(path / "results.db", create=True)
    one_line(error)


def test_a_folder_is_no_database(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="must be a file, but") as error:
        Store.open(tmp_path, create=True)
    one_line(error)


@pytest.mark.parametrize("read_only", [False, True])
def test_another_kind_of_file_is_refused_and_left_alone(path: Path, read_only: bool) -> None:
    path.write_text("defaults: {dtype: f32}\n" * 100)
    before = state(path.parent)
    with pytest.raises(StoreError, match="must be an SQLite database") as error:
        Store.open(path, read_only=read_only)
    one_line(error)
    assert state(path.parent) == before


def test_reading_a_database_of_something_else(path: Path) -> None:
    sqlite3.connect(path).execute("CREATE TABLE songs (title)").connection.close()
    with pytest.raises(StoreError, match="has no results of wavetune") as error:
        Store.open(path, read_only=True)
    one_line(error)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_newer_database_is_refused_and_left_alone(filled: Path, read_only: bool) -> None:
    connection = sqlite3.connect(filled)
    connection.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    connection.commit()
    connection.close()
    before = state(filled.parent)
    with pytest.raises(StoreError, match=f"revision {REVISION} or older.*has 9999, made by a newer") as error:
        Store.open(filled, read_only=read_only)
    one_line(error)
    assert state(filled.parent) == before


def test_a_damaged_page_is_reported(filled: Path) -> None:
    with Store.open(filled) as store:
        run_id = begin_run(store)
        for number in range(1, 60):
            add_trial(store, run_id, number)
    connection = sqlite3.connect(filled)
    query = "SELECT rootpage FROM sqlite_schema WHERE name = 'tuner_trial'"
    ((page,),) = connection.execute(query).fetchall()
    ((size,),) = connection.execute("PRAGMA page_size").fetchall()
    connection.close()
    with filled.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    for read_only in (False, True):
        with Store.open(filled, read_only=read_only) as store:
            with pytest.raises(StoreError, match="is damaged; restore a backup") as error:
                list(store.all_trials())
            one_line(error)


def test_a_long_lock_is_reported_and_a_short_one_waited_for(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = connect_sqlite(filled)
    holder.isolation_level = None
    monkeypatch.setattr(database_module, "BUSY_SECONDS", 0.05)
    with Store.open(filled) as store:
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match=r"was locked by another process for 0.05 s; wait") as error:
            begin_run(store)
        one_line(error)
        assert len(store.winners()) == 1  # readers do not wait
    monkeypatch.setattr(database_module, "BUSY_SECONDS", 20.0)
    with Store.open(filled) as store:
        release = threading.Timer(0.2, lambda: holder.execute("COMMIT"))
        release.start()
        begin_run(store)
        release.join()
    holder.close()


def test_a_full_disk_costs_the_trial_in_flight_only(filled: Path) -> None:
    with Store.open(filled) as store:
        run_id = begin_run(store)
        with store._database.reading() as connection:
            (pages,) = connection.exec_driver_sql("PRAGMA page_count").one()
            connection.exec_driver_sql(f"PRAGMA max_page_count = {pages + 8}")
        done: list[int] = []
        with pytest.raises(StoreError, match="disk is full; free some space") as error:
            done.extend(add_trial(store, run_id, number) for number in range(1, 1000))
        one_line(error)
        finished = [t.id for t in store.all_trials(run_id=run_id) if t.measurement is not None]
        assert finished == done
    assert intact(filled)


def test_a_disk_that_fails_is_reported(filled: Path) -> None:
    body = """
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
with Store.open(path) as store:
    try:
        run_id = begin_run(store)
        for number in range(1, 1000):
            add_trial(store, run_id, number)
    except StoreError as error:
        print(error)
    os._exit(0)
"""
    process = script(body, filled)
    output, _ = process.communicate()
    assert output.strip().endswith("cannot be read or written (disk I/O error); check its disk")
    assert intact(filled)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("://", "must be a path or a URL"),
        ("postgresql://host:port/name", "must be a path or a URL"),
        ("sqlite://", "must name a file"),
        ("sqlite:///results.db?mode=ro", "must name a file"),
        ("nosuchdb://host/name", "must be one that SQLAlchemy knows"),
    ],
)
def test_a_url_that_leads_nowhere(url: str, said: str) -> None:
    with pytest.raises(StoreError, match=said) as error:
        Store.open(url, create=True)
    one_line(error)


def test_a_missing_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StoreError, match="install it with `pip install psycopg`") as error:
        Store.open("postgresql+psycopg://me:secret@nowhere.invalid/results")
    assert "secret" not in one_line(error)


# Processes


def test_what_was_committed_survives_a_kill(path: Path) -> None:
    """20 processes tune until they are killed, the first ones while they make the tables."""
    body = """
reported = set()
for kill in range(20):
    (readable, writable), child = os.pipe(), os.fork()
    if child == 0:
        with Store.open(path, create=True) as store:
            known = {t.candidate.id for t in store.all_trials() if t.measurement}
            run_id = begin_run(store)
            for number in range(100_000):
                if make_candidate(number).id not in known:
                    os.write(writable, b"%d " % add_trial(store, run_id, number))
    time.sleep(random.uniform(0.0, 0.03 * (kill + 1)))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(writable)
    with open(readable) as stream:
        reported |= {int(trial_id) for trial_id in stream.read().split()}
    with Store.open(path, create=True) as store:
        assert reported <= {t.id for t in store.all_trials() if t.measurement}
    ((state,),) = sqlite3.connect(path).execute("PRAGMA integrity_check").fetchall()
    assert state == "ok"
print(len(reported))
"""
    output, _ = script(body, path).communicate()
    assert int(output) > 100


def test_processes_write_one_database_at_once(path: Path) -> None:
    """Also while it is made: all of them open a file that is not there yet."""
    body = """
with Store.open(path, create=True) as store:
    run_id = begin_run(store, fingerprint=replace(FINGERPRINT, driver=str(os.getpid())))
    for number in range(25):
        add_trial(store, run_id, number)
    mirror_trials(store, "study", [create_trial(value=1.0, user_attrs={"tuner_trial_id": os.getpid()})])
"""
    processes = [script(body, path) for _ in range(4)]
    for process in processes:
        process.communicate()
    assert [p.returncode for p in processes] == [0] * 4
    with Store.open(path, read_only=True) as store:
        assert [sum(run.outcomes.values()) for run in store.runs()] == [25] * 4
        assert len(store.devices()) == 4
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT count(*) FROM trials").fetchone() == (4,)
    connection.close()
    assert intact(path)


# Versions of the tables


@pytest.fixture
def scripts() -> ScriptDirectory:
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    return ScriptDirectory.from_config(config)


def test_the_migrations_make_the_tables_of_the_schema(path: Path, scripts: ScriptDirectory) -> None:
    assert scripts.get_heads() == [REVISION]
    Store.open(path, create=True).close()
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        assert compare_metadata(context, metadata) == []
        assert "tuner_best" in inspect(connection).get_view_names()
    engine.dispose()


REVISIONS = sorted(p.name[1:5] for p in (MIGRATIONS / "versions").glob("r*.py"))


@pytest.mark.parametrize("revision", REVISIONS)
def test_an_older_database_is_brought_up_to_date(path: Path, revision: str) -> None:
    """`tests/unit/stores/<revision>.sql` is what a database of that revision holds."""
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        migrate(connection, revision)
    engine.dispose()
    connection = sqlite3.connect(path)
    connection.executescript((Path(__file__).parent / "stores" / f"{revision}.sql").read_text())
    connection.close()
    if revision != REVISION:
        with pytest.raises(StoreError, match=f"has revision {revision} of the tables; run"):
            Store.open(path, read_only=True)
    Store.open(path).close()
    with Store.open(path, read_only=True) as store:
        (trial, begun) = store.all_trials()
        assert trial.candidate.values == {"tile_m": 8, "order": "mnk", "prefetch": True}
        assert begun.measurement is None
        assert trial.measurement is not None
        assert trial.measurement.samples_ns[1] == trial.measurement.time_ns == 1000.5
        (winner,) = store.winners()
        assert (winner.trial_id, winner.time_ns, winner.problem.name) == (trial.id, 999.9, "f32_nn_64x48x32")
        assert winner.source.text.startswith("int x")
        assert [f.samples_ns for f in store.finalists(winner)] == [(1.5, 2.5)]
        assert [c.time_ns for c in store.canaries(trial.run_id)] == [1234.5]
        assert [r.status for r in store.runs()] == ["interrupted"]
    assert intact(path)


# docs/results.md

DOCS = (Path(__file__).parents[2] / "docs" / "results.md").read_text()


@pytest.mark.parametrize("table", metadata.sorted_tables, ids=lambda table: table.name)
def test_the_documentation_names_every_column(table: Table) -> None:
    _, _, entry = DOCS.partition(f"**`{table.name}`**: ")
    entry = entry.partition("\n\n")[0]
    assert [c.name for c in table.c if f"`{c.name}`" not in entry] == []


@pytest.mark.parametrize("query", re.findall(r"```sql\n(.*?)```", DOCS, re.DOTALL))
def test_the_documented_queries_run(filled: Path, query: str) -> None:
    connection = sqlite3.connect(filled)
    connection.execute("UPDATE tuner_winner SET default_ns = 2 * time_ns")
    assert len(connection.execute(query).fetchall()) == 1
    connection.close()


def test_the_view_of_the_winners(filled: Path) -> None:
    connection = sqlite3.connect(filled)
    connection.row_factory = sqlite3.Row
    (row,) = connection.execute("SELECT * FROM tuner_best").fetchall()
    connection.close()
    assert (row["problem"], row["candidate"], row["time_ns"]) == ("f32_nn_64x48x32", "gemm_cpu_0", 999.9)
    assert row["gflops"] == pytest.approx(PROBLEM.flops / 999.9)
    documented = DOCS.partition("| column |")[2].partition("\n\n")[0]
    assert [name for name in row.keys() if f"`{name}`" not in documented] == []  # noqa: SIM118
