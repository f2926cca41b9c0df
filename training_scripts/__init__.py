"""The scripts: fine-tuning, launch files, batch scripts for Slurm, a demo, and a study of memorization."""

import logging
import os


# What libraries warn of when they are imported is the same on every rank: the first one says it.
if os.environ.get("RANK", "0") != "0" and logging.lastResort is not None:
    logging.lastResort.setLevel(logging.ERROR)
