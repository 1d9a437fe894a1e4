"""The stores that the contract holds for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sqlalchemy import MetaData, create_engine, text

from tuner.testing.store_contract import StoreContract


class TestSqlite(StoreContract):
    @pytest.fixture
    def database(self, tmp_path: Path) -> Path:
        return tmp_path / "results.db"


@pytest.mark.skipif(
    "TUNER_TEST_DATABASE" not in os.environ,
    reason="TUNER_TEST_DATABASE must be the URL of a PostgreSQL database that may be emptied",
)
class TestServer(StoreContract):
    @pytest.fixture
    def database(self) -> str:
        url = os.environ["TUNER_TEST_DATABASE"]
        engine = create_engine(url)
        tables = MetaData()
        with engine.begin() as connection:
            connection.execute(text("DROP VIEW IF EXISTS tuner_best"))
            tables.reflect(connection)
            tables.drop_all(connection)
        engine.dispose()
        return url
