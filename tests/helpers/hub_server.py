"""A server on this machine that speaks as much of the Hugging Face Hub's API as loading a model or a data set needs.

Programs use it that are started with HF_ENDPOINT set to its address: the libraries read it when they are imported.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote

from tests.helpers.local_server import QuietHandler, serving


@dataclass
class Repository:
    """Files by commit (40 hexadecimal digits), and the commits of branches and tags."""

    commits: Mapping[str, Mapping[str, bytes]]
    refs: Mapping[str, str]

    def commit(self, revision: str) -> str | None:
        """What a branch, a tag or a commit is; None: there is none."""
        revision = self.refs.get(revision, revision)
        return revision if revision in self.commits else None


@dataclass
class Hub:
    """Repositories by kind ("models", "datasets") and name; `log` has the method and path of every request."""

    repositories: Mapping[tuple[str, str], Repository]
    url: str = ""
    log: list[str] = field(default_factory=list)


@contextmanager
def hub_server(hub: Hub) -> Iterator[Hub]:
    """The server in threads of this process, at `hub.url`."""
    with serving(_Handler, hub=hub) as url:
        hub.url = url
        yield hub


class _Handler(QuietHandler):
    hub: Hub

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(self.path.partition("?")[0])
        self.hub.log.append(f"{self.command} {path}")
        if found := re.fullmatch(r"/api/(models|datasets)/([\w-]+/[\w-]+)(/.*)?", path):
            self._api(found[1], found[2], found[3] or "", body)
        elif found := re.fullmatch(r"/(datasets/)?([\w-]+/[\w-]+)/resolve/([^/]+)/(.+)", path):
            self._file("datasets" if found[1] else "models", *found.groups()[1:])
        else:
            self._missing("EntryNotFound")

    do_POST = do_HEAD = do_GET

    def _api(self, kind: str, name: str, rest: str, body: bytes) -> None:
        repository = self.hub.repositories.get((kind, name))
        if repository is None:
            self._missing("RepoNotFound")
            return
        words = rest.split("/")
        commit = repository.commit(words[2] if len(words) > 2 else "main")
        if commit is None:
            self._missing("RevisionNotFound")
            return
        files = repository.commits[commit]
        tree = [
            {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for path, content in files.items()
        ]
        if words[1:2] == ["tree"]:
            self._answer(200, tree)
        elif words[1:2] == ["paths-info"]:
            asked = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode())["paths"]
            self._answer(200, [entry for entry in tree if entry["path"] in asked])
        elif words[1:2] in ([], ["revision"]):
            siblings = [{"rfilename": path} for path in files]
            info = {"id": name, "_id": "1", "sha": commit, "siblings": siblings, "tags": [], "private": False}
            info |= {"downloads": 0, "likes": 0, "disabled": False, "gated": False}
            self._answer(200, info)
        else:
            self._missing("EntryNotFound")

    def _file(self, kind: str, name: str, revision: str, path: str) -> None:
        repository = self.hub.repositories.get((kind, name))
        commit = repository.commit(revision) if repository is not None else None
        if repository is None or commit is None:
            self._missing("RepoNotFound" if repository is None else "RevisionNotFound")
            return
        if path not in repository.commits[commit]:
            self._missing("EntryNotFound", {"X-Repo-Commit": commit})
            return
        content = repository.commits[commit][path]
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        status = 200
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(found[1]), min(int(found[2] or len(content)), len(content) - 1)
            status, headers["Content-Range"] = 206, f"bytes {first}-{last}/{len(content)}"
            content = content[first : last + 1]
        self._answer(status, content, headers)

    def _missing(self, code: str, headers: Mapping[str, str] | None = None) -> None:
        self._answer(404, {"error": code}, {"X-Error-Code": code, **(headers or {})})

    def _answer(self, status: int, answer: Any, headers: Mapping[str, str] | None = None) -> None:
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
