"""peft_hooks.py: PEFT may be imported before or after a model is sharded; its methods are wrapped all or none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.launching import forked


def run(folder: Path, code: str) -> None:
    """In a fork that has not imported PEFT, nor what of ours waits for it."""
    forgetting = 'from tests.helpers.launching import forget\nforget("peft", "hf_axonn.parallel.adapters")\n'
    (folder / "code.py").write_text(forgetting + code)
    ended = forked(folder, None, "code.py", timeout=120)
    assert ended.code == 0, ended.output


LATE = """
import sys
from hf_axonn.parallel.adapters.peft_hooks import inject_adapter, watch_peft
assert "peft.peft_model" not in sys.modules
watch_peft()
import peft
from peft.tuners.tuners_utils import BaseTuner
for method in (BaseTuner.inject_adapter, peft.PeftModel.add_adapter, peft.PeftModel.save_pretrained):
    assert method.__code__.co_filename.endswith("replaced.py"), method
"""

UNKNOWN = """
import peft
from hf_axonn.parallel.adapters.peft_hooks import watch_peft
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import save_and_load
owners = {BaseTuner: "inject_adapter", peft.PeftModel: "add_adapter"}
owners[save_and_load] = "_reshard_dtensor_values_for_load"
assert all(map(hasattr, owners, owners.values()))
stock = [dict(vars(owner)) for owner in owners]
for owner, name in owners.items():
    missing = getattr(owner, name)
    delattr(owner, name)
    for _ in range(2):
        try:
            watch_peft()
        except AttributeError as problem:
            assert name in str(problem), problem
        else:
            raise SystemExit(f"without {name} nothing was raised")
    setattr(owner, name, missing)
    assert [dict(vars(owner)) for owner in owners] == stock, f"without {name} the others are wrapped"
watch_peft()
assert peft.PeftModel.save_pretrained.__code__.co_filename.endswith("replaced.py")
"""


def test_peft_may_be_imported_after_a_model_was_sharded(tmp_path):
    pytest.importorskip("peft", reason="adapters need peft, of the extra `peft`")
    run(tmp_path, LATE)


def test_a_release_without_one_of_the_methods_is_left_as_it_was(tmp_path):
    pytest.importorskip("peft", reason="adapters need peft, of the extra `peft`")
    run(tmp_path, UNKNOWN)
