"""What the sharded layers share."""

import pytest

from hf_axonn.layers.base import replaced


def test_replaced_entries_come_back_and_new_ones_go():
    entries = {"kept": 1, "changed": 2}
    with pytest.raises(KeyError), replaced(entries, {"changed": 3, "new": 4}):
        assert entries == {"kept": 1, "changed": 3, "new": 4}
        raise KeyError
    assert entries == {"kept": 1, "changed": 2}
