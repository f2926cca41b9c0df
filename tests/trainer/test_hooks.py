"""hooks.py: the methods of Trainer are wrapped once, all or none."""

from __future__ import annotations

import pytest
from transformers import trainer_utils

from hf_axonn.trainer import hooks


def some_trainer(*missing: str) -> type:
    methods = {wrapper.__name__: lambda self: None for wrapper in hooks.WRAPPERS}
    return type("Trainer", (), {name: method for name, method in methods.items() if name not in missing})


@pytest.mark.parametrize("missing", [hooks.WRAPPERS[0].__name__, hooks.WRAPPERS[-1].__name__])
def test_a_release_without_one_of_the_methods_is_left_as_it_was(missing):
    trainer = some_trainer(missing)
    stock, find = dict(vars(trainer)), trainer_utils.get_last_checkpoint
    for _ in range(2):  # the second is as much an error as the first
        with pytest.raises(AttributeError, match=missing):
            hooks.install(trainer)
    assert dict(vars(trainer)) == stock
    assert trainer_utils.get_last_checkpoint is find


def test_every_wrapper_is_called_once_also_where_a_method_has_two(monkeypatch):
    """The wrappers here count themselves, and the outer one of `train` is the last of the list."""
    calls = []

    def counting(wrapper):
        def method(self, original):
            calls.append(wrapper)
            return original()

        method.__name__ = wrapper.__name__
        return method

    monkeypatch.setattr(hooks, "_install_functions", lambda: None)
    wrappers, trainer = hooks.WRAPPERS, some_trainer()
    monkeypatch.setattr(hooks, "WRAPPERS", [counting(wrapper) for wrapper in wrappers])
    hooks.install(trainer)
    hooks.install(trainer)
    for name in {wrapper.__name__ for wrapper in wrappers}:
        getattr(trainer(), name)()
        assert calls == [wrapper for wrapper in reversed(wrappers) if wrapper.__name__ == name]
        calls.clear()
