"""The scripts: fine-tuning, launch files, batch scripts for Slurm, a demo, and a study of memorization."""

import logging
import os


def is_first() -> bool:
    """Return whether this is the first process of the run."""
    return os.environ.get("RANK", "0") == "0"


# What libraries warn of when they are imported is the same on every rank: the first one says it.
if not is_first() and logging.lastResort is not None:
    logging.lastResort.setLevel(logging.ERROR)
