"""The first tables, and the view `tuner_best` of the current winners for people who read with SQL."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "tuner_candidate",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("template", sa.Text(), nullable=False),
        sa.Column("template_hash", sa.Text(), nullable=False),
        sa.Column("params", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tuner_candidate"),
    )
    op.create_table(
        "tuner_device",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("arch", sa.Text(), nullable=False),
        sa.Column("compute_units", sa.Integer(), nullable=False),
        sa.Column("driver", sa.Text(), nullable=False),
        sa.Column("runtime", sa.Text(), nullable=False),
        sa.Column("toolchain", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tuner_device"),
    )
    op.create_table(
        "tuner_problem",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column("m", sa.BigInteger(), nullable=False),
        sa.Column("n", sa.BigInteger(), nullable=False),
        sa.Column("k", sa.BigInteger(), nullable=False),
        sa.Column("batch_count", sa.BigInteger(), nullable=False),
        sa.Column("definition", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tuner_problem"),
    )
    op.create_table(
        "tuner_protocol",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("cold", sa.Boolean(), nullable=False),
        sa.Column("precision", sa.Double(), nullable=False),
        sa.Column("min_samples", sa.Integer(), nullable=False),
        sa.Column("max_samples", sa.Integer(), nullable=False),
        sa.Column("max_seconds", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tuner_protocol"),
    )
    op.create_table(
        "tuner_source",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("language", sa.Text(), nullable=False),
        sa.Column("symbol", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_tuner_source"),
    )
    op.create_table(
        "tuner_run",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("spec_name", sa.Text(), nullable=False),
        sa.Column("spec_text", sa.Text(), nullable=False),
        sa.Column("device_id", sa.String(length=16), nullable=False),
        sa.Column("protocol_id", sa.String(length=16), nullable=False),
        sa.Column("strategy", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("started_at", sa.DateTime(), nullable=False),
        sa.Column("ended_at", sa.DateTime(), nullable=True),
        sa.ForeignKeyConstraint(["device_id"], ["tuner_device.id"], name="fk_tuner_run_device_id"),
        sa.ForeignKeyConstraint(["protocol_id"], ["tuner_protocol.id"], name="fk_tuner_run_protocol_id"),
        sa.PrimaryKeyConstraint("id", name="pk_tuner_run"),
    )
    op.create_table(
        "tuner_canary",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("problem_id", sa.String(length=16), nullable=False),
        sa.Column("candidate_id", sa.String(length=16), nullable=False),
        sa.Column("time_ns", sa.Double(), nullable=False),
        sa.Column("taken_at", sa.DateTime(), nullable=False),
        sa.ForeignKeyConstraint(
            ["candidate_id"], ["tuner_candidate.id"], name="fk_tuner_canary_candidate_id"
        ),
        sa.ForeignKeyConstraint(["problem_id"], ["tuner_problem.id"], name="fk_tuner_canary_problem_id"),
        sa.ForeignKeyConstraint(["run_id"], ["tuner_run.id"], name="fk_tuner_canary_run_id"),
        sa.PrimaryKeyConstraint("id", name="pk_tuner_canary"),
    )
    op.create_index("ix_tuner_canary_run_id", "tuner_canary", ["run_id"], unique=False)
    op.create_table(
        "tuner_trial",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("device_id", sa.String(length=16), nullable=False),
        sa.Column("problem_id", sa.String(length=16), nullable=False),
        sa.Column("protocol_id", sa.String(length=16), nullable=False),
        sa.Column("candidate_id", sa.String(length=16), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("origin", sa.Text(), nullable=False),
        sa.Column("predicted_ns", sa.Double(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.DateTime(), nullable=False),
        sa.Column("ended_at", sa.DateTime(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("provenance", sa.Text(), nullable=True),
        sa.Column("time_ns", sa.Double(), nullable=True),
        sa.Column("ci_low_ns", sa.Double(), nullable=True),
        sa.Column("ci_high_ns", sa.Double(), nullable=True),
        sa.Column("samples_ns", sa.LargeBinary(), nullable=True),
        sa.Column("raced", sa.Boolean(), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("max_error", sa.Double(), nullable=True),
        sa.Column("validate_seconds", sa.Double(), nullable=True),
        sa.Column("benchmark_seconds", sa.Double(), nullable=True),
        sa.Column("build_seconds", sa.Double(), nullable=True),
        sa.Column("binary_sha256", sa.String(length=64), nullable=True),
        sa.ForeignKeyConstraint(["candidate_id"], ["tuner_candidate.id"], name="fk_tuner_trial_candidate_id"),
        sa.ForeignKeyConstraint(["device_id"], ["tuner_device.id"], name="fk_tuner_trial_device_id"),
        sa.ForeignKeyConstraint(["problem_id"], ["tuner_problem.id"], name="fk_tuner_trial_problem_id"),
        sa.ForeignKeyConstraint(["protocol_id"], ["tuner_protocol.id"], name="fk_tuner_trial_protocol_id"),
        sa.ForeignKeyConstraint(["run_id"], ["tuner_run.id"], name="fk_tuner_trial_run_id"),
        sa.PrimaryKeyConstraint("id", name="pk_tuner_trial"),
        sa.UniqueConstraint("device_id", "problem_id", "protocol_id", "candidate_id", name="uq_tuner_trial"),
    )
    op.create_index("ix_tuner_trial_run_id", "tuner_trial", ["run_id"], unique=False)
    op.create_table(
        "tuner_winner",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("device_id", sa.String(length=16), nullable=False),
        sa.Column("problem_id", sa.String(length=16), nullable=False),
        sa.Column("protocol_id", sa.String(length=16), nullable=False),
        sa.Column("candidate_id", sa.String(length=16), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("trial_id", sa.Integer(), nullable=False),
        sa.Column("source_id", sa.String(length=16), nullable=False),
        sa.Column("binary_sha256", sa.String(length=64), nullable=False),
        sa.Column("time_ns", sa.Double(), nullable=False),
        sa.Column("ci_low_ns", sa.Double(), nullable=False),
        sa.Column("ci_high_ns", sa.Double(), nullable=False),
        sa.Column("default_ns", sa.Double(), nullable=True),
        sa.Column("decided_at", sa.DateTime(), nullable=False),
        sa.Column("ties", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["candidate_id"], ["tuner_candidate.id"], name="fk_tuner_winner_candidate_id"
        ),
        sa.ForeignKeyConstraint(["device_id"], ["tuner_device.id"], name="fk_tuner_winner_device_id"),
        sa.ForeignKeyConstraint(["problem_id"], ["tuner_problem.id"], name="fk_tuner_winner_problem_id"),
        sa.ForeignKeyConstraint(["protocol_id"], ["tuner_protocol.id"], name="fk_tuner_winner_protocol_id"),
        sa.ForeignKeyConstraint(["run_id"], ["tuner_run.id"], name="fk_tuner_winner_run_id"),
        sa.ForeignKeyConstraint(["source_id"], ["tuner_source.id"], name="fk_tuner_winner_source_id"),
        sa.ForeignKeyConstraint(["trial_id"], ["tuner_trial.id"], name="fk_tuner_winner_trial_id"),
        sa.PrimaryKeyConstraint("id", name="pk_tuner_winner"),
    )
    op.create_index(
        "ix_tuner_winner_device_id_problem_id_protocol_id",
        "tuner_winner",
        ["device_id", "problem_id", "protocol_id"],
        unique=False,
    )
    op.create_table(
        "tuner_final",
        sa.Column("winner_id", sa.Integer(), nullable=False),
        sa.Column("trial_id", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("median_ns", sa.Double(), nullable=False),
        sa.Column("samples_ns", sa.LargeBinary(), nullable=False),
        sa.ForeignKeyConstraint(["trial_id"], ["tuner_trial.id"], name="fk_tuner_final_trial_id"),
        sa.ForeignKeyConstraint(["winner_id"], ["tuner_winner.id"], name="fk_tuner_final_winner_id"),
        sa.PrimaryKeyConstraint("winner_id", "trial_id", name="pk_tuner_final"),
    )
    op.execute(
        """
        CREATE VIEW tuner_best AS
        SELECT d.name AS device, d.arch, p.name AS problem, p.type, p.m, p.n, p.k, p.batch_count,
            c.name AS candidate, c.template, w.time_ns, w.ci_low_ns, w.ci_high_ns, w.default_ns,
            2.0 * p.m * p.n * p.k * p.batch_count / w.time_ns AS gflops,
            w.decided_at, w.id AS winner_id, w.device_id, w.problem_id, w.protocol_id, w.candidate_id
        FROM tuner_winner AS w
        JOIN tuner_device AS d ON d.id = w.device_id
        JOIN tuner_problem AS p ON p.id = w.problem_id
        JOIN tuner_candidate AS c ON c.id = w.candidate_id
        WHERE w.id IN (
            SELECT max(id) FROM tuner_winner GROUP BY device_id, problem_id, protocol_id
        )
        """
    )
