"""Let the tests use a new SQLite file, and no broker."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

folder = tempfile.mkdtemp(prefix="delaytasks-example-")
atexit.register(shutil.rmtree, folder)
os.environ["DELAYTASKS_DATABASE_URL"] = f"sqlite:///{folder}/example.sqlite3"
os.environ["CELERY_BROKER_URL"] = "memory://"
