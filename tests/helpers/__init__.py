"""What tests share: ranks, models, launches, references."""

from pathlib import Path


ROOT = Path(__file__).resolve().parents[2]  # of the repository
