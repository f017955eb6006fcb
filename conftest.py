"""An option that pytest knows too late from tests/conftest.py: it would take my_rac.py for a file with tests."""

from pathlib import Path


def pytest_addoption(parser):
    parser.addoption("--script", type=Path, help="a fork of one of the scripts, which is tested in their place")
