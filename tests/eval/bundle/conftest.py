"""Two runs on the same samples, a bundle of them, and SSH keys."""

import getpass
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from hf_axonn_eval import Sampler, extract, load_model, write_bundle, write_samples
from hf_axonn_eval.bundle import pack, verify
from hf_axonn_eval.bundle.keys import make_key
from hf_axonn_eval.data.samples import SampleFile
from tests.helpers.eval_support import samples, tiny_llama, topics_tokenizer, trained_llama


ORIGIN = {"hf_axonn": "0.2.0", "numpy": "2", "scipy": "1", "commit": "ab" * 20, "modified": False}


@pytest.fixture(scope="session", autouse=True)
def one_version():
    """Bundles are made and verified by one version, also while files of the checkout change."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (pack, verify):
            patch.setattr(module, "origin", lambda: dict(ORIGIN))
        yield


@pytest.fixture(scope="session")
def made(tmp_path_factory) -> Path:
    """A directory with the models base and trained, samples.jsonl, runs/base and runs/trained."""
    place = tmp_path_factory.mktemp("made")
    write_samples(samples(), place / "samples.jsonl")
    for name, model in (("base", tiny_llama()), ("trained", trained_llama())):
        model.save_pretrained(place / name)
        topics_tokenizer().save_pretrained(place / name)
        loaded = load_model(place / name)
        extract(
            loaded.model,
            loaded.tokenizer,
            SampleFile(place / "samples.jsonl"),
            output=place / "runs" / name,
            model_record=loaded.record,
            membership=True,
            sampler=Sampler(top_k=40),
            progress=False,
        )
    return place


@pytest.fixture(scope="session")
def key(made):
    """The owner's key, in owner.key."""
    return make_key(made / "owner.key")


@pytest.fixture(scope="session")
def bundle(made, key) -> Path:
    """A bundle of both runs, not signed."""
    path = made / "both.tar"
    write_bundle({name: made / "runs" / name for name in ("base", "trained")}, made / "samples.jsonl", path, key=key)
    return path


@pytest.fixture
def run(made, tmp_path) -> Path:
    """A copy of the run of the trained model, to change."""
    return shutil.copytree(made / "runs" / "trained", tmp_path / "trained")


@pytest.fixture
def someone(monkeypatch):
    """This user and machine have names that are in no text."""
    monkeypatch.setattr(getpass, "getuser", lambda: "zaphodb")
    monkeypatch.setattr(socket, "gethostname", lambda: "goldheart42.magrathea.example")


@pytest.fixture(scope="session")
def ssh(tmp_path_factory) -> Path:
    """A directory with SSH keys of an owner and of another, and the allowed signers."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen (Debian: openssh-client)")
    place = tmp_path_factory.mktemp("ssh")
    for name in ("owner", "other"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(place / name)]
        subprocess.run(make, check=True)
    public = (place / "owner.pub").read_text()
    (place / "signers").write_text(f'owner@example.org namespaces="hf-axonn-eval" {public}')
    (place / "expired").write_text(f'owner@example.org valid-before="20200101" {public}')
    (place / "others").write_text(f"other@example.org {(place / 'other.pub').read_text()}")
    return place
