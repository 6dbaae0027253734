"""Let the tests use two new SQLite files, and no broker."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

folder = tempfile.mkdtemp(prefix="delaytasks-example-")
atexit.register(shutil.rmtree, folder)
urls = [f"sqlite:///{folder}/{number}.sqlite3" for number in range(2)]
os.environ["TENANTS_DATABASES"] = " ".join(urls)
os.environ["CELERY_BROKER_URL"] = "memory://"
