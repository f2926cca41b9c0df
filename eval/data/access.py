"""Levels of access to a model, from least to most: what a run saw of it, and what an attacker with the same sees.

text            continuations alone
top-k logits    the log-probabilities of the likeliest tokens of each place, as a server gives them
logits          the log-probability of every token
weights         everything; only here is the model known by a fingerprint
"""

from collections.abc import Mapping
from typing import Any


TEXT, TOP_K_LOGITS, LOGITS, WEIGHTS = LEVELS = ("text", "top-k logits", "logits", "weights")


def access_of(record: Mapping[str, Any]) -> str:
    """Return the level of access of a run by its run.json; earlier versions wrote other words for a server."""
    access = record.get("access")
    if access in LEVELS:
        return str(access)
    return TOP_K_LOGITS if access or record["identity"].get("served") else WEIGHTS


def access_of_server(alternatives: int, vocabulary: int) -> str:
    """Return the level of a server that shows so many tokens of each place."""
    return LOGITS if alternatives >= vocabulary else TOP_K_LOGITS
