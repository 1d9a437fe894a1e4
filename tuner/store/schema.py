"""The tables of the results database.

Each change here comes with a script in `migrations/versions/` and a new `REVISION`; a test compares the
two. Times are nanoseconds of one launch, timestamps UTC, identities the content hashes of the values.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Dialect,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)

REVISION = "0001"
VERSION_TABLE = "tuner_version"  # Optuna, in the same database, owns `alembic_version`


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime, stored as UTC without its zone, which SQLite has no type for."""

    impl = DateTime
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        return None if value is None else value.astimezone(UTC).replace(tzinfo=None)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        return None if value is None else value.replace(tzinfo=UTC)


metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)


def _hash() -> Column[str]:
    return Column("id", String(16), primary_key=True)


def _reference(name: str, table: str) -> Column[Any]:
    return Column(name, ForeignKey(f"{table}.id"), nullable=False)


def _required(name: str, kind: Any) -> Column[Any]:
    return Column(name, kind, nullable=False)


device = Table(
    "tuner_device",
    metadata,
    _hash(),
    _required("kind", Text),
    _required("name", Text),
    _required("arch", Text),
    _required("compute_units", Integer),
    _required("driver", Text),
    _required("runtime", Text),
    _required("toolchain", Text),
)

problem = Table(
    "tuner_problem",
    metadata,
    _hash(),
    _required("name", Text),
    _required("type", Text),
    _required("m", BigInteger),
    _required("n", BigInteger),
    _required("k", BigInteger),
    _required("batch_count", BigInteger),
    _required("definition", JSON),
)

candidate = Table(
    "tuner_candidate",
    metadata,
    _hash(),
    _required("name", Text),
    _required("template", Text),
    _required("template_hash", Text),
    _required("params", JSON),
)

protocol = Table(
    "tuner_protocol",
    metadata,
    _hash(),
    _required("cold", Boolean),
    _required("precision", Double),
    _required("min_samples", Integer),
    _required("max_samples", Integer),
    _required("max_seconds", Double),
)

source = Table(
    "tuner_source",
    metadata,
    _hash(),
    _required("language", Text),
    _required("symbol", Text),
    _required("text", Text),
)

run = Table(
    "tuner_run",
    metadata,
    Column("id", Integer, primary_key=True),
    _required("spec_name", Text),
    _required("spec_text", Text),
    _reference("device_id", "tuner_device"),
    _reference("protocol_id", "tuner_protocol"),
    _required("strategy", Text),
    _required("seed", BigInteger),
    _required("version", Text),
    _required("status", Text),
    _required("started_at", UtcDateTime),
    Column("ended_at", UtcDateTime),
)

trial = Table(
    "tuner_trial",
    metadata,
    Column("id", Integer, primary_key=True),
    _reference("device_id", "tuner_device"),
    _reference("problem_id", "tuner_problem"),
    _reference("protocol_id", "tuner_protocol"),
    _reference("candidate_id", "tuner_candidate"),
    _reference("run_id", "tuner_run"),
    _required("origin", Text),
    Column("predicted_ns", Double),
    _required("attempts", Integer),
    _required("started_at", UtcDateTime),
    # What follows is written when the trial ends.
    Column("ended_at", UtcDateTime),
    Column("outcome", Text),
    Column("provenance", Text),
    Column("time_ns", Double),
    Column("ci_low_ns", Double),
    Column("ci_high_ns", Double),
    Column("samples_ns", LargeBinary),
    Column("raced", Boolean),
    Column("message", Text),
    Column("max_error", Double),
    Column("validate_seconds", Double),
    Column("benchmark_seconds", Double),
    Column("build_seconds", Double),
    Column("binary_sha256", String(64)),
    UniqueConstraint("device_id", "problem_id", "protocol_id", "candidate_id"),
    Index(None, "run_id"),
)

# The last row of a device, problem and protocol is the winner; those before it are its history.
winner = Table(
    "tuner_winner",
    metadata,
    Column("id", Integer, primary_key=True),
    _reference("device_id", "tuner_device"),
    _reference("problem_id", "tuner_problem"),
    _reference("protocol_id", "tuner_protocol"),
    _reference("candidate_id", "tuner_candidate"),
    _reference("run_id", "tuner_run"),
    _reference("trial_id", "tuner_trial"),
    _reference("source_id", "tuner_source"),
    _required("binary_sha256", String(64)),
    _required("time_ns", Double),
    _required("ci_low_ns", Double),
    _required("ci_high_ns", Double),
    Column("default_ns", Double),
    _required("decided_at", UtcDateTime),
    _required("ties", JSON),
    Index(None, "device_id", "problem_id", "protocol_id"),
)

final = Table(
    "tuner_final",
    metadata,
    Column("winner_id", ForeignKey("tuner_winner.id"), primary_key=True),
    Column("trial_id", ForeignKey("tuner_trial.id"), primary_key=True),
    _required("position", Integer),
    _required("median_ns", Double),
    _required("samples_ns", LargeBinary),
)

canary = Table(
    "tuner_canary",
    metadata,
    Column("id", Integer, primary_key=True),
    _reference("run_id", "tuner_run"),
    _reference("problem_id", "tuner_problem"),
    _reference("candidate_id", "tuner_candidate"),
    _required("time_ns", Double),
    _required("taken_at", UtcDateTime),
    Index(None, "run_id"),
)
