"""What all tests share: descriptions of machines are kept in a folder of the session, not in the user's."""

import atexit
import os
import shutil
import tempfile

CACHE = tempfile.mkdtemp(prefix="hpctrain-cache-")
os.environ["HPCTRAIN_CACHE"] = CACHE
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
