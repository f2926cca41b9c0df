"""Ranks: the mesh of process groups, collectives, agreement between ranks, the watchdog."""
