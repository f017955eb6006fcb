"""The tests of benchmark/ are left out where benchmark/requirements.txt is not installed."""

import importlib.util

if not importlib.util.find_spec("rliable"):
    collect_ignore_glob = ["test_*.py"]
