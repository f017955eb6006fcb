"""In place of Weights & Biases: writes every call as a line of JSON to the file $WANDB_CALLS, and fails where it is told to.

$WANDB_FAILS: names of functions that fail, separated by commas; "online" is init() without mode="offline".
"""

import json
import os


class CommError(Exception):
    pass


class errors:
    CommError = CommError


class Settings(dict):
    pass


def note(call, /, **values):
    with open(os.environ["WANDB_CALLS"], "a") as file:
        file.write(json.dumps({"call": call, **values}, default=str) + "\n")
    if call in os.environ.get("WANDB_FAILS", "").split(","):
        raise CommError(f"{call} has failed")


class Run:
    url = None

    def define_metric(self, name, step_metric=None):
        note("define_metric", name=name, step_metric=step_metric)

    def log_code(self, root):
        note("log_code", files=sorted(os.listdir(root)))

    def log(self, row):
        note("log", row=row)

    def finish(self, exit_code=None):
        note("finish", exit_code=exit_code)


def login(prompt=True, verify=True):
    return "no key" not in os.environ.get("WANDB_FAILS", "")


def init(**options):
    note("init", **options)
    if options.get("mode") != "offline" and "online" in os.environ.get("WANDB_FAILS", "").split(","):
        raise CommError("no network")
    return Run()


def teardown():
    note("teardown")
