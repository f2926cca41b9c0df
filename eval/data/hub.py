"""Documents from a data set on the Hugging Face Hub: `hub:OWNER/NAME/CONFIG@REVISION`, CONFIG and REVISION if needed.

Rows are streamed, so neither memory nor disk grows with the data set. A branch may get new commits, so its commit is
looked up first, and all is read from that one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple


PREFIX = "hub:"
_FORM = re.compile(r"hub:(?P<name>[\w.-]+/[\w.-]+)(?:/(?P<config>[^/@\s]+))?(?:@(?P<revision>[^@\s]+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


class HubDataset(NamedTuple):
    """A data set on the Hub: its name with the owner's, and a configuration and revision if they were named."""

    name: str
    config: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubDataset:
        """Make it from a text such as hub:owner/name/config@main.

        Raises:
            ValueError: it does not look like this.
        """
        found = _FORM.fullmatch(text)
        if found is None:
            raise ValueError(f"{text} is not like hub:OWNER/NAME, hub:OWNER/NAME/CONFIG or hub:OWNER/NAME@REVISION.")
        return cls(**found.groupdict())

    def __str__(self) -> str:
        config = f"/{self.config}" if self.config is not None else ""
        revision = f"@{self.revision}" if self.revision is not None else ""
        return f"{PREFIX}{self.name}{config}{revision}"

    def pin(self) -> HubDataset:
        """Return the same data set at the commit that its revision, or else its main branch, is now.

        Raises:
            ValueError: there is no such data set or revision, or the Hub cannot be reached.
        """
        if self.revision is not None and _COMMIT.fullmatch(self.revision):
            return self
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

        try:
            commit = HfApi().dataset_info(self.name, revision=self.revision).sha
        except RevisionNotFoundError:
            raise ValueError(f"the data set {self.name} on the Hub has no revision {self.revision!r}.") from None
        except RepositoryNotFoundError:
            raise ValueError(
                f"there is no data set {self.name} on the Hub, or it is private: log in with `hf auth login`."
            ) from None
        except (HfHubHTTPError, OSError) as error:
            raise ValueError(
                f"the Hub does not say which commit {self} is ({error}). Name one, of 40 hexadecimal digits, or a "
                "copy on this machine."
            ) from error
        if commit is None:
            raise ValueError(f"the Hub does not say which commit {self} is: name one, of 40 hexadecimal digits.")
        return self._replace(revision=commit)


def pin(path: str) -> str:
    """Return a path as it is, or with `hub:` the same data set at its commit of now.

    Raises:
        ValueError: see `HubDataset.pin`.
    """
    return str(HubDataset.parse(path).pin()) if path.startswith(PREFIX) else path


def hub_rows(text: str, fields: Sequence[str], split: str | None) -> Iterator[tuple[str, str, Any]]:
    """Yield the rows of a data set: an id made of the place, the place in words, and a mapping (documents.py).

    Args:
        text: hub:OWNER/NAME/CONFIG@REVISION.
        fields: columns that are wanted; others are not read where the format allows it.
        split: which one; None: the only one.
    Raises:
        ValueError: no such data set, configuration or split, or a damaged one.
    """
    try:
        import datasets
    except ImportError as error:
        raise ValueError(f"{text} needs the package datasets: pip install 'hf_axonn[data]'.") from error
    source = HubDataset.parse(text).pin()
    given = {"revision": source.revision}
    try:
        splits = datasets.get_dataset_split_names(source.name, source.config, **given)
        if split is None and len(splits) == 1:
            split = splits[0]
        if split is None or split not in splits:
            remedy = "name one of its splits" if split is None else f"there is no split {split!r}"
            raise ValueError(f"{remedy} with split=... (--split): {', '.join(splits)}.")
        rows = datasets.load_dataset(source.name, source.config, split=split, streaming=True, **given)
        if rows.features is not None:
            columns = [column for column in dict.fromkeys(fields) if column in rows.features]
            rows = rows.select_columns(columns) if columns else rows
        for number, row in enumerate(rows, start=1):
            yield f"{source.name}/{split}:{number}", f"{source}, row {number}", row
    except GeneratorExit:
        raise
    except Exception as error:  # those of datasets, of pyarrow and of the way to the Hub have nothing in common
        raise ValueError(f"{source}: {error}") from error
