"""The notebook runs on the results that come with the repository, and says what is in them."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tuner.store import Store

ROOT = Path(__file__).parents[2]


# ipykernel and zmq leave sockets to the garbage collector.
@pytest.mark.filterwarnings("default")
def test_winners_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    notebook = nbformat.read(ROOT / "notebooks" / "winners.ipynb", as_version=4)
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(ROOT)}}).execute()
    with Store.open(ROOT / "results.db", read_only=True) as store:
        count = len(store.winners())
    assert count > 0
    printed = notebook.cells[1].outputs[0]["text"]
    assert printed.startswith(f"{count} winners, ")
