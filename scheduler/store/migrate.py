"""Bringing a database to the form that this version of the program works with."""

from __future__ import annotations

import threading

from alembic import command
from alembic.config import Config

from scheduler.store.engine import open_engine
from scheduler.store.revision import MIGRATIONS, refuse_newer

# Alembic keeps the migration that runs in variables of its modules: two threads would use each other's connection.
_ONE_AT_A_TIME = threading.Lock()


def migrate(url: str) -> None:
    """Create or upgrade the database, in one transaction. Nothing happens to one that is up to date.

    Raises:
        StoreError: the URL is malformed, the database cannot be reached, or was made by a newer version.
    """
    engine = open_engine(url, writes_at_once=True)
    try:
        refuse_newer(engine)
        config = script_config()
        with _ONE_AT_A_TIME, engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    finally:
        engine.dispose()


def script_config() -> Config:
    """Alembic's settings: the scripts lie in this package, and no alembic.ini is needed."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("file_template", "r%%(rev)s_%%(slug)s")
    return config
