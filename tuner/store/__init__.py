"""Results: runs, trials and winners in SQL."""

from tuner.store.store import Store
from tuner.store.studies import mirror_trials, optuna_storage
from tuner.store.types import Canary, Finalist, Run, Trial, Winner

__all__ = [
    "Canary",
    "Finalist",
    "Run",
    "Store",
    "Trial",
    "Winner",
    "mirror_trials",
    "optuna_storage",
]
