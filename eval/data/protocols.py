"""Ways of asking that have a name, each with its source, so that figures can be put beside published ones.

A protocol says where documents are cut and what `extract` should do with the samples. Every setting can be changed;
which ones were is recorded with the samples.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from hf_axonn_eval.data.windows import FILTERS, KINDS, Sampling


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """A named way of asking.

    Args:
        name: what `protocol(name)` and `samples --protocol` know it by.
        source: where it was published.
        summary: what it does, in a line.
        sampling: where documents are cut.
        extract: arguments of `extract` it asks for, as JSON can say them: `generate`, and `sampler`, a mapping with
            temperature, top_k and top_p.
        changed: the settings that differ from the published ones.
    """

    name: str
    source: str
    summary: str
    sampling: Sampling
    extract: Mapping[str, Any]
    changed: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """What is written beside the samples."""
        return {
            "name": self.name,
            "source": self.source,
            "settings": self.sampling.settings(),
            "changed": list(self.changed),
        }


SC24 = Protocol(
    name="sc24",
    source="Singh et al. 2024, Democratizing AI (SC24), arXiv 2502.08145",
    summary="the last 50 of a document's first 2048 tokens, given all before them",
    sampling=Sampling(kind="first", max_tokens=2048, suffix_length=50, add_special_tokens=True),
    extract={"generate": True},
)
PROTOCOLS = {
    some.name: some
    for some in (
        SC24,
        replace(
            SC24,
            name="goldfish",
            source="Hans et al. 2024, Be like a Goldfish, arXiv 2406.10209, eval/data_extraction.py of its code",
            summary="as sc24, of the first 500 documents of each bucket",
            sampling=replace(SC24.sampling, max_documents=500),
        ),
        Protocol(
            name="carlini50",
            source="Carlini et al. 2022, Quantifying Memorization, arXiv 2202.07646",
            summary="one suffix of 50 tokens, given the 50, 100, ... 450 tokens before it",
            sampling=Sampling(
                prefix_length=range(50, 451, 50), suffix_length=50, shared_suffix=True, min_document_tokens=500
            ),
            extract={"generate": False},
        ),
        Protocol(
            name="cooper100",
            source="Cooper et al. 2025, Extracting memorized pieces of books, arXiv 2505.12546, and its code",
            summary="50 + 50 tokens from every 10th character on, their probability under top-40 sampling",
            sampling=Sampling(
                kind="sliding",
                prefix_length=50,
                suffix_length=50,
                stride=10,
                stride_unit="characters",
                add_special_tokens=True,
                deduplicate=True,
            ),
            extract={"generate": False, "sampler": {"temperature": 1.0, "top_k": 40, "top_p": None}},
        ),
        Protocol(
            name="apertus",
            source="Apertus v1 technical report 2025, arXiv 2509.14233, and its code swiss-ai/apertus_memorization",
            summary="500 + 500 tokens from the beginning, and from there other prefix lengths and other offsets",
            sampling=Sampling(
                prefix_length=(500, 50, 100, 250, 1000, 2000, 3000, 4000, 5000),
                suffix_length=500,
                offset=(0, 1, 2, 4, 16, 32, 64, 128, 256, 512, 1024, 2048),
                combine="axes",
            ),
            extract={"generate": True, "sampler": {"temperature": 1.0, "top_k": None, "top_p": 0.9}},
        ),
    )
}


def protocol(name: str, **settings: Any) -> Protocol:
    """A protocol by its name, with some of its settings changed.

    Args:
        name: one of PROTOCOLS.
        settings: of its `Sampling`; `kind` cannot be changed.
    Raises:
        ValueError: no such protocol or setting, or a setting that its kind of cut does not look at.
    """
    if name not in PROTOCOLS:
        raise ValueError(f"there is no protocol {name!r}; there are {', '.join(PROTOCOLS)}.")
    published = PROTOCOLS[name]
    changed = changed_sampling(published.sampling, settings, whose=f"protocol {name}")
    before, after = published.sampling.settings(), changed.settings()
    return replace(published, sampling=changed, changed=tuple(key for key in after if after[key] != before[key]))


def changed_sampling(sampling: Sampling, settings: Mapping[str, Any], *, whose: str) -> Sampling:
    """`sampling` with some settings changed, each of which must matter.

    Raises:
        ValueError: a setting that its kind of cut does not look at, or there is none of that name.
    """
    looked_at = (*KINDS[sampling.kind], *FILTERS)
    known = {field.name for field in fields(Sampling)}
    for key in settings:
        if key not in looked_at:
            what = f"cuts by {sampling.kind!r}, which has no {key}" if key in known else f"knows no setting {key!r}"
            raise ValueError(f"{whose} {what}; it has {', '.join(looked_at)}.")
    return replace(sampling, **settings)
