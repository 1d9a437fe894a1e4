"""Trials as Optuna sees them, in the same database, for `optuna-dashboard` and other tools of Optuna."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from sqlalchemy.exc import DBAPIError

from tuner.errors import StoreError
from tuner.store.database import connect_sqlite
from tuner.store.store import Store

if TYPE_CHECKING:
    from optuna.storages import RDBStorage
    from optuna.trial import FrozenTrial

TRIAL_ID = "tuner_trial_id"

_DELAYS = (0.05, 0.1, 0.2, 0.4, 0.8)  # seconds


def optuna_storage(store: Store) -> RDBStorage:
    """Optuna's storage on the database of `store`; its tables are made at the first call.

    Raises:
        ValueError: the store is open only to be read, which Optuna cannot do.
    """
    from optuna.exceptions import StorageInternalError
    from optuna.storages import RDBStorage

    if store._database.read_only:
        raise ValueError(f"{store._database.name} is open only to be read")
    url = store._database.url.render_as_string(hide_password=False)
    url = url.replace("{", "{{").replace("}", "}}")  # Optuna takes it for a format string
    path = store.path
    options = {"creator": lambda: connect_sqlite(path)} if path else None
    with _quiet():
        try:
            for delay in _DELAYS:
                try:
                    return RDBStorage(url, engine_kwargs=options)
                except (DBAPIError, StorageInternalError):
                    time.sleep(delay)  # another process may be making Optuna's tables at this moment
            return RDBStorage(url, engine_kwargs=options)
        except RuntimeError as error:
            raise StoreError(f"this Optuna cannot use the tables of another: {error}") from None


def mirror_trials(store: Store, study_name: str, trials: Sequence[FrozenTrial]) -> int:
    """Append to a study, to be minimized, the trials that it does not have; return their number.

    A trial is known by its user attribute `tuner_trial_id`, so calling this again adds nothing.
    """
    import optuna

    storage = optuna_storage(store)
    try:
        with _quiet():
            study = optuna.create_study(storage=storage, study_name=study_name, load_if_exists=True)
            known = {trial.user_attrs.get(TRIAL_ID) for trial in study.get_trials(deepcopy=False)}
            fresh = [trial for trial in trials if trial.user_attrs[TRIAL_ID] not in known]
            study.add_trials(fresh)
    finally:
        storage.remove_session()
        storage.engine.dispose()
    return len(fresh)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Optuna from announcing each study, and report its failures as ours."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    except (DBAPIError, optuna.exceptions.StorageInternalError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise StoreError(f"Optuna cannot write to the database ({reason}); mend it and run again") from None
    finally:
        optuna.logging.set_verbosity(before)
