"""The archive: the same bytes for the same members, and nothing hostile taken out of it."""

import io
import json
import os
import tarfile

import pytest

from hf_axonn_eval.bundle.archive import FORMAT, is_name, pack, unpack


@pytest.fixture
def packed(tmp_path):
    (tmp_path / "in" / "runs" / "a").mkdir(parents=True)
    (tmp_path / "in" / "about.json").write_text("{}")
    (tmp_path / "in" / "runs" / "a" / "run.json").write_bytes(b"\x00\xff")
    pack(tmp_path / "in", tmp_path / "one.tar")
    return tmp_path / "one.tar"


def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def write(path, *members, manifest=None):
    """An archive by hand: names with content, or entries of tarfile."""
    told = {"format": FORMAT, "members": manifest or {}}
    with tarfile.open(path, "w") as archive:
        for name, content in (("manifest.json", json.dumps(told).encode()), *members):
            entry = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def test_the_same_members_make_the_same_bytes(packed, tmp_path):
    for file in (tmp_path / "in").rglob("*"):
        os.utime(file, (1, 1))
    (tmp_path / "in" / "about.json").chmod(0o777)
    pack(tmp_path / "in", tmp_path / "two.tar")
    assert packed.read_bytes() == (tmp_path / "two.tar").read_bytes()
    with tarfile.open(packed) as archive:
        assert archive.getnames() == ["manifest.json", "about.json", "runs/a/run.json"]
        assert {(entry.mtime, entry.uid, entry.uname, entry.mode) for entry in archive} == {(0, 0, "", 0o644)}


def test_what_went_in_comes_out(packed, tmp_path):
    members, wrong = unpack(packed, out(tmp_path))
    assert wrong == [] and set(members) == {"about.json", "runs/a/run.json"}
    assert (tmp_path / "out" / "runs" / "a" / "run.json").read_bytes() == b"\x00\xff"


def test_members_that_do_not_fit_the_manifest_are_named(tmp_path):
    path = write(tmp_path / "x.tar", ("about.json", b"{}"), ("more.json", b""), manifest={"about.json": {}, "b": {}})
    _, wrong = unpack(path, out(tmp_path))
    assert wrong == [
        "about.json has other bytes than the manifest says",
        "b is missing",
        "more.json is not in the manifest",
    ]


def test_nothing_is_written_outside_and_no_link_followed(tmp_path):
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    sparse = tarfile.TarInfo("sparse")
    sparse.type = tarfile.GNUTYPE_SPARSE
    large = tarfile.TarInfo("large")  # a file of no bytes that says that it has 2^40
    large.pax_headers = {"GNU.sparse.size": str(2**40), "GNU.sparse.map": "0,0", "GNU.sparse.numblocks": "1"}
    names = ["../escaped", "/tmp/absolute-escaped", "a/../../escaped", ".hidden", "a//b", "runs/a/b/c"]
    path = write(
        tmp_path / "x.tar",
        (link, b""),
        (sparse, b""),
        (large, b""),
        *((name, b"x") for name in names),
        ("twice", b"1"),
        ("twice", b"2"),
    )
    _, wrong = unpack(path, out(tmp_path))
    for name in ["link", "sparse", "large", *names]:
        assert f"{name!r} is not a plain file with a plain name" in wrong
    assert "twice is there twice" in wrong and (tmp_path / "out" / "twice").read_bytes() == b"1"
    assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == ["manifest.json", "twice"]
    assert not (tmp_path / "escaped").exists()


def test_what_is_no_bundle_is_refused(packed, tmp_path):
    (tmp_path / "text").write_text("not a tar")
    half = packed.read_bytes()[:700]
    (tmp_path / "half").write_bytes(half)
    with tarfile.open(tmp_path / "other", "w"):
        pass
    for name, words in {"text": "is not a bundle", "half": "is not a bundle", "other": "no manifest"}.items():
        (tmp_path / f"of {name}").mkdir()
        with pytest.raises(ValueError, match=words):
            unpack(tmp_path / name, tmp_path / f"of {name}")
    with pytest.raises(ValueError, match="absent is not a file"):
        unpack(tmp_path / "absent", out(tmp_path))


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        (b"[", "cannot be read"),
        (b'{"format": 1}', "cannot be read"),
        (b'{"format": "x", "members": [1]}', "cannot be read"),
        (b'{"format": "of tomorrow", "members": {}}', "is of format 'of tomorrow'"),
    ],
)
def test_a_manifest_that_is_none_is_refused(tmp_path, manifest, words):
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        entry = tarfile.TarInfo("manifest.json")
        entry.size = len(manifest)
        archive.addfile(entry, io.BytesIO(manifest))
    with pytest.raises(ValueError, match=words):
        unpack(tmp_path / "x.tar", out(tmp_path))


def test_names_of_runs():
    assert is_name("base") and is_name("run-1.5_b")
    assert not any(map(is_name, ["", "a/b", "..", ".a", "a b", "\u00e9", "a" * 65, "a\n"]))
