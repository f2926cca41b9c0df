"""The decision whether gradients of a model are averaged over the ranks that saw different samples, and by whom."""

from __future__ import annotations

from contextlib import AbstractContextManager

from hf_axonn.compat.replaced import replace_attributes


class GradientAveraging:
    """The decisions of one model's passes, as under DistributedDataParallel: a pass decides at its beginning whether
    its gradients are averaged, and a backward pass averages them at its end at most once.

        last pass began   backward is called by       `averages`   a backward pass
        in `no_sync`      anyone                      no           leaves them as each rank has them
        outside of it     a plain loop                yes          leaves them to `sync_gradients` or `syncing`
        outside of it     `Accelerator.backward` ...  yes          leaves them to the caller, who is inside `by_caller`
        outside of it     the user, of a model that   yes          at its first gradient `backward_begins` is True, at
                          Accelerate has prepared                  later ones False; `finish` is called at its end

    `force_sync` lets the last pass be averaged though it began in `no_sync` (`trigger_sync_in_backward`). `_under_way`
    is only True where `averages` and `_by_itself` were when the backward pass began; `_unsynced` concerns passes that
    are yet to begin.

    Attributes:
        averages: whether the gradients of the last pass are to be averaged.
    """

    def __init__(self) -> None:
        self.averages = True
        self._unsynced = False
        self._by_itself = False
        self._under_way = False

    def average_by_itself(self) -> None:
        """Let backward passes average gradients at their end from now on, whoever calls them."""
        self._by_itself = True

    def begin_pass(self) -> None:
        """Decide for a forward pass that begins now. A backward pass that failed never came to its end."""
        self.averages = not self._unsynced
        self._under_way = False

    def backward_begins(self) -> bool:
        """Return whether this backward pass is to average at its end, and has not been answered so before."""
        begins = self._by_itself and self.averages and not self._under_way
        self._under_way = self._under_way or begins
        return begins

    def finish(self) -> None:
        """Note the end of a backward pass that averages."""
        self._under_way = False

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave the gradients of passes that begin inside as each rank has them."""
        return replace_attributes({(self, "_unsynced"): True})

    def force_sync(self) -> AbstractContextManager[None]:
        """Average the gradients of the last pass, though it began in `no_sync`, in a backward pass inside."""
        return replace_attributes({(self, "averages"): True})

    def by_caller(self) -> AbstractContextManager[None]:
        """Leave it to the caller to average after the backward passes inside."""
        return replace_attributes({(self, "_by_itself"): False})
