"""Methods that replace those of other classes, and get these."""

from __future__ import annotations

import inspect

from hf_axonn.certificate.patching import Patches, patch
from hf_axonn.compat.replaced import replace_attributes


class Base:
    def inherited(self, value: int) -> int:
        return value


class Theirs(Base):
    def __init__(self, value: int) -> None:
        self.value = value

    @classmethod
    def make(cls, value: int) -> Theirs:
        return cls(value)


class Other:
    def inherited(self, value: int) -> int:
        return -value


class Doubled(Patches):
    """Doubles what it is given."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @patch(Theirs, name="__init__")
    def init(self, stock, theirs, value: int) -> None:
        self.calls.append("init")
        stock(theirs, 2 * value)

    @patch(Theirs)
    def make(self, stock, kind, value: int) -> Theirs:
        self.calls.append(kind.__name__)
        return stock(kind, 2 * value)

    @patch(Theirs, Other)
    def inherited(self, stock, theirs, value: int) -> int:
        return 2 * stock(theirs, value)


def test_methods_are_replaced_for_a_while():
    patches = Doubled()
    with replace_attributes(patches.replacements()):
        assert Theirs.make(3).value == 12 and patches.calls == ["Theirs", "init"]
        assert Theirs(1).inherited(5) == 10 and Other().inherited(5) == -10
        assert Base().inherited(5) == 5
        assert list(inspect.signature(Theirs.__init__).parameters) == ["self", "value"]
    assert Theirs.make(3).value == 3 and Theirs(1).inherited(5) == 5 and Other().inherited(5) == -5
    assert "inherited" not in vars(Theirs)
