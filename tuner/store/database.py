"""Opening a database, its transactions, and what is said when they fail."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    NullPool,
    QueuePool,
    create_engine,
    event,
    inspect,
    make_url,
    text,
)
from sqlalchemy.exc import (
    ArgumentError,
    DataError,
    DBAPIError,
    IntegrityError,
    NoSuchModuleError,
    NotSupportedError,
    ProgrammingError,
)

from tuner.errors import StoreError
from tuner.store.schema import REVISION, VERSION_TABLE

BUSY_SECONDS = 20.0  # how long a process waits for another one's transaction

# What SQLite reports, by its primary result code: the rule and the next action.
_SQLITE_RULES = {
    "SQLITE_BUSY": "was locked by another process for {timeout:g} s; wait for it or end it, and run again",
    "SQLITE_CANTOPEN": "cannot be opened; check that you may read it, and write to its folder",
    "SQLITE_CORRUPT": "is damaged; restore a backup, or save what is left with `sqlite3 {name} .recover`",
    "SQLITE_FULL": "cannot grow, since its disk is full; free some space and run the same command again",
    "SQLITE_IOERR": "cannot be read or written ({reason}); check its disk",
    "SQLITE_NOTADB": "must be an SQLite database, but is another kind of file; name another file",
    "SQLITE_READONLY": "must be writable, and its folder too; change that or name another file",
}


class Database:
    """A database that is open, up to date, and read or written in short transactions.

    **Durability.** What `writing` wrote is on the disk when it returns.
    **Concurrency.** Any number of processes may read and write; each waits up to `BUSY_SECONDS`.
    **Errors.** A failure that is not a bug leaves `reading` and `writing` as a `StoreError`.
    """

    def __init__(self, url: URL, engine: Engine, read_only: bool) -> None:
        self.url, self.engine = url, engine
        self.path = Path(url.database or "") if url.get_backend_name() == "sqlite" else None
        self.name = url.render_as_string(hide_password=True) if self.path is None else str(self.path)
        self._reader = engine.execution_options(begin="BEGIN")
        self.read_only = read_only

    @classmethod
    def open(cls, url_or_path: str | Path, *, create: bool, read_only: bool) -> Database:
        """Open a database and bring its tables up to date, or only look at it if it is `read_only`."""
        url = _parse(url_or_path)
        if url.get_backend_name() == "sqlite":
            path = Path(url.database or "")
            _check_file(path, create=create and not read_only)
            engine = _sqlite_engine(url, path, read_only)
        else:
            engine = _server_engine(url)
        database = cls(url, engine, read_only)
        try:
            database._prepare()
        except BaseException:
            engine.dispose()
            raise
        return database

    def close(self) -> None:
        self.engine.dispose()

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that is committed at the end of the block, or rolled back by an exception."""
        with self._reported(), self.engine.begin() as connection:
            yield connection

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A consistent view. Fetch the rows inside the block."""
        before = _resting_state(self.path) if self.path and self.read_only else None
        try:
            with self._reported(), self._reader.connect() as connection:
                yield connection
        finally:
            if before is not None and self.path and _resting_state(self.path) != before:
                raise StoreError(f"{self.name} changed while it was read; run the same command again")

    def _prepare(self) -> None:
        with self.reading() as connection:
            found = _revision(connection)
        if found is not None and found > REVISION:
            raise StoreError(
                f"{self.name} must have revision {REVISION} or older of the tables, but has {found}, "
                "made by a newer wavetune; upgrade with `pip install -U wavetune`"
            )
        if found == REVISION:
            return
        if self.read_only:
            state = f"revision {found} of the tables" if found else "no results of wavetune"
            raise StoreError(
                f"{self.name} must have revision {REVISION} of the tables, but has {state}; "
                "run `tuner tune` on it once, or name another database"
            )
        with self.writing() as connection:
            if _revision(connection) != REVISION:  # another process may have been faster
                migrate(connection)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except (IntegrityError, ProgrammingError, DataError, NotSupportedError):
            raise  # a bug
        except DBAPIError as error:
            code = getattr(error.orig, "sqlite_errorname", "")
            rule = _SQLITE_RULES.get(
                "_".join(code.split("_")[:2]), "failed ({reason}); mend that and run again"
            )
            reason = " ".join(str(error.orig).split())
            rule = rule.format(timeout=BUSY_SECONDS, name=self.name, reason=reason)
            raise StoreError(f"{self.name} {rule}") from None


def migrate(connection: Connection, revision: str = "head") -> None:
    """Bring the tables to a revision, inside the transaction of `connection`."""
    from alembic import command  # needed once in the life of a database
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)


def connect_sqlite(path: Path) -> sqlite3.Connection:
    """Connect for reading and writing; the file is made if there is none. Each commit is synced to disk."""
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
    except BaseException:
        connection.close()
        raise
    return connection


def _connect_resting(path: Path) -> sqlite3.Connection:
    """Connect for reading, without writing even the files of the write-ahead log where it is empty."""
    mode = "mode=ro" if _resting_state(path) is None else "immutable=1"
    uri = f"{path.absolute().as_uri()}?{mode}"
    return sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, check_same_thread=False)


def _resting_state(path: Path) -> tuple[int, int] | None:
    """Identify the contents of a file that has no log with later ones beside it; None if it has."""
    for suffix in ("-wal", "-journal"):
        log = path.with_name(path.name + suffix)
        if log.exists() and log.stat().st_size > 0:
            return None
    state = path.stat()
    return state.st_mtime_ns, state.st_size


def _parse(url_or_path: str | Path) -> URL:
    if isinstance(url_or_path, Path) or "://" not in url_or_path:
        return URL.create("sqlite", database=str(Path(url_or_path).expanduser()))
    try:
        url = make_url(url_or_path)
    except (ArgumentError, ValueError):
        raise StoreError(
            f"a database must be a path or a URL such as postgresql://user@host/name, but is {url_or_path}; "
            "write one of the two"
        ) from None
    if url.get_backend_name() == "sqlite" and (url.database in (None, "", ":memory:") or url.query):
        raise StoreError(f"an SQLite URL must name a file and nothing else, but is {url}; give its path")
    return url


def _check_file(path: Path, *, create: bool) -> None:
    if path.is_dir():
        raise StoreError(f"a database must be a file, but {path} is a folder; name a file in it")
    if path.exists():
        return
    if not create:
        raise StoreError(f"there is no database {path}; make one with `tuner tune`, or name another")
    if not path.parent.is_dir():
        raise StoreError(f"there is no folder {path.parent} to put a database in; make it first")


def _sqlite_engine(url: URL, path: Path, read_only: bool) -> Engine:
    def connect() -> sqlite3.Connection:
        connection = _connect_resting(path) if read_only else connect_sqlite(path)
        connection.isolation_level = None  # `begin` says when a transaction begins, not the module
        return connection

    engine = create_engine(url, creator=connect, poolclass=NullPool if read_only else QueuePool)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # Taking the lock at once lets the busy timeout work; a reader's lock cannot be raised later.
        connection.exec_driver_sql(connection.get_execution_options().get("begin", "BEGIN IMMEDIATE"))

    return engine


def _server_engine(url: URL) -> Engine:
    shown = url.render_as_string(hide_password=True)
    try:
        return create_engine(url, pool_pre_ping=True)
    except NoSuchModuleError:
        raise StoreError(
            f"the database must be one that SQLAlchemy knows, but is {shown}; "
            "use a path, or a URL that begins with postgresql://"
        ) from None
    except ModuleNotFoundError as error:
        raise StoreError(
            f"{shown} needs the Python package {error.name}; install it with `pip install {error.name}`"
        ) from None


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    found: Any = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()
    return None if found is None else str(found)
