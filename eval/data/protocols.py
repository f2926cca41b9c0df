"""Named protocols, each with its source, so that figures can be compared with published ones.

Each is a file, published/NAME.toml; contract.py says what its lines mean. A protocol says where documents are cut and
what `extract` should do with the samples. Every setting can be changed. What a run did otherwise than was published is
recorded with it, line by line: a setting that was changed, documents that were shorter, another dtype.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from importlib import resources
from typing import Any

from hf_axonn_eval.data.contract import Line, list_changes
from hf_axonn_eval.data.windows import FILTERS, KINDS, Sampling


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """A named protocol: cuts of documents, and options of `extract`.

    Args:
        name: what `protocol(name)` and `samples --protocol` know it by.
        source: where it was published.
        summary: what it does, in a line.
        sampling: where documents are cut.
        extract: arguments of `extract` it asks for, as JSON can say them: `generate`, and `sampler`, a mapping with
            temperature, top_k and top_p.
        changed: the settings that differ from the published ones.
        code: the authors' code, as repository@commit; empty where there is none.
        lines: all that was published, each line with its source.
        drop: ids of documents that the authors left out by name.
        cite: how to cite it.
        commands: how to run it, a command line each.
    """

    name: str
    source: str
    summary: str
    sampling: Sampling
    extract: Mapping[str, Any]
    changed: tuple[str, ...] = ()
    code: str = ""
    lines: tuple[Line, ...] = ()
    drop: tuple[str, ...] = ()
    cite: str = ""
    commands: tuple[str, ...] = ()

    def record(self, samples: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the record that is written beside the samples.

        Args:
            samples: facts about them (`Tally.facts` and `samples_facts`); None if not known.
        """
        return {
            "name": self.name,
            "source": self.source,
            "settings": self.sampling.settings(),
            "changed": list(self.changed),
        } | ({} if samples is None else {"samples": dict(samples)})

    def samples_facts(self, facts: Mapping[str, Any], dropped: Sequence[str], tokenizer) -> dict[str, Any]:
        """Return the facts about samples that the lines need.

        Args:
            facts: `Tally.facts`.
            dropped: ids of documents that were dropped.
            tokenizer: that cut them.
        """
        versions = dict.fromkeys((name.partition("/")[0] for name in self.drop), 0)
        for name in set(dropped) & set(self.drop):
            versions[name.partition("/")[0]] += 1
        bos = tokenizer.bos_token_id
        return {
            **facts,
            "has_bos": bos is not None,
            "tokenizer_adds_bos": bos is not None and tokenizer("a")["input_ids"][:1] == [bos],
            "known_dropped": versions,
        }


def check_protocol(record: Mapping[str, Any] | None, run: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the record of the protocol of a run's samples, with `lines`, each with its state.

    Args:
        record: as `Protocol.record` made it, maybe in an earlier version; None, or without a name: no protocol.
        run: facts about the run, by the names in contract.OF_A_RUN.
    Returns:
        The record unchanged, if it has no name or an unknown one.
    """
    if record is None or record.get("name") not in PROTOCOLS:
        return None if record is None else dict(record)
    published = PROTOCOLS[record["name"]]
    facts = {"settings": record.get("settings"), **(record.get("samples") or {}), **run}
    lines = [line.check(facts) for line in published.lines]
    lines += list_changes(record.get("settings") or {}, published.sampling.settings(), published.lines)
    return {**record, "lines": lines}


def protocol(name: str, **settings: Any) -> Protocol:
    """Return a protocol by its name, with some of its settings changed.

    Args:
        name: one of PROTOCOLS.
        settings: of its `Sampling`; `kind` cannot be changed.
    Raises:
        ValueError: no such protocol or setting, or a setting that its kind of cut does not look at.
    """
    if name not in PROTOCOLS:
        raise ValueError(f"there is no protocol {name!r}; there are {', '.join(PROTOCOLS)}.")
    published = PROTOCOLS[name]
    sampling = changed_sampling(published.sampling, settings, whose=f"protocol {name}")
    before, after = published.sampling.settings(), sampling.settings()
    return replace(published, sampling=sampling, changed=tuple(key for key in after if after[key] != before[key]))


def changed_sampling(sampling: Sampling, settings: Mapping[str, Any], *, whose: str) -> Sampling:
    """Return `sampling` with some settings changed, each of which must matter.

    A window that no longer slides over characters has no slice and no BOS of its own either.

    Raises:
        ValueError: a setting that its kind of cut does not look at, or there is none of that name.
    """
    looked_at = (*KINDS[sampling.kind], *FILTERS)
    known = {field.name for field in fields(Sampling)}
    for key in settings:
        if key not in looked_at:
            what = f"cuts by {sampling.kind!r}, which has no {key}" if key in known else f"knows no setting {key!r}"
            raise ValueError(f"{whose} {what}; it has {', '.join(looked_at)}.")
    if settings.get("stride_unit") == "tokens":
        bos = "tokenizer" if sampling.bos == "window" else sampling.bos
        settings = {"slice_characters": None, "bos": bos, **settings}
    return replace(sampling, **settings)


def read_protocol(text: str) -> Protocol:
    """Read a protocol from the text of its file.

    Raises:
        ValueError: not TOML, a field or setting that there is not, or two lines that set one thing.
    """
    content = tomllib.loads(text)
    lines = tuple(Line(**line) for line in content.pop("line"))
    settings: dict[str, Any] = {}
    extract: dict[str, Any] = {}
    for line in lines:
        for values, more in ((settings, line.sampling), (extract, line.extract)):
            twice = set(values) & set(more)
            if twice:
                raise ValueError(f"protocol {content['name']}: two lines say {', '.join(sorted(twice))}.")
            values |= more
    if "sampler" in extract:
        extract["sampler"] = {"temperature": 1.0, "top_k": None, "top_p": None} | dict(extract["sampler"])
    for several in ("drop", "commands"):
        content[several] = tuple(content.get(several, ()))
    return Protocol(sampling=Sampling(**settings), extract=extract, lines=lines, **content)


def _read_published() -> dict[str, Protocol]:
    folder = resources.files("hf_axonn_eval.data") / "published"
    files = [file for file in folder.iterdir() if file.name.endswith(".toml")]
    found = [read_protocol(file.read_text(encoding="utf-8")) for file in files]
    return {some.name: some for some in sorted(found, key=lambda some: some.name)}


PROTOCOLS = _read_published()
