"""peft_hooks.py: PEFT may be imported before or after a model is sharded."""

from __future__ import annotations

import subprocess
import sys

import pytest


LATE = """
import sys
from hf_axonn.adapters.peft_hooks import inject_adapter, watch_peft
assert "peft.peft_model" not in sys.modules
watch_peft()
import peft
from peft.tuners.tuners_utils import BaseTuner
for method in (BaseTuner.inject_adapter, peft.PeftModel.add_adapter, peft.PeftModel.save_pretrained):
    assert method.__code__.co_filename.endswith("peft_hooks.py"), method
"""


def test_peft_may_be_imported_after_a_model_was_sharded():
    pytest.importorskip("peft", reason="adapters need peft, of the extra `peft`")
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
