"""Kits: the wheels that a machine without a network needs beside what it has."""
