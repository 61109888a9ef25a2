"""A Hugging Face Hub on this machine: the few routes that downloads and uploads of models take.

`serving_hub(models)` runs one in a thread, and `HF_ENDPOINT` names it to a process.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlparse

TOKEN = "hf_token_of_the_test"


class Hub(ThreadingHTTPServer):
    """Repositories by name ("datasets/ORG/NAME" for data), each a directory; `private` ones ask for
    `TOKEN`. `requests`: (method, path) as they come; `uploads`: files by repository.
    """

    def __init__(self, models: Mapping[str, Path], private: frozenset[str] = frozenset()):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models, self.private = dict(models), private
        self.requests: list[tuple[str, str]] = []
        self.uploads: dict[str, dict[str, bytes]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def commit(self, repo: str) -> str:
        return hashlib.sha1(repo.encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any, status: int = 200) -> None:
        self._answer(status, json.dumps(value).encode(), Content_Type="application/json")

    def _missing(self, code: str, status: int = 404) -> None:
        self._answer(status, b"{}", X_Error_Code=code)

    def _authorized(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path)
        self.server.requests.append((self.command, path))
        parts = path.strip("/").split("/")
        if parts[0] == "api":
            kind, repo, rest = parts[1], "/".join(parts[2:4]), parts[4:]
        elif parts[0] == "datasets":
            kind, repo, rest = parts[0], "/".join(parts[1:3]), parts[3:]
        else:
            kind, repo, rest = "models", "/".join(parts[:2]), parts[2:]
        repo = f"datasets/{repo}" if kind == "datasets" else repo
        folder = self.server.models.get(repo)
        if folder is None or (repo in self.server.private and not self._authorized()):
            return self._missing("RepoNotFound", 401)
        sha = self.server.commit(repo)
        if len(rest) > 1 and rest[1] not in ("main", sha):
            return self._missing("RevisionNotFound")
        files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
        if rest[:1] == ["resolve"]:
            name = "/".join(rest[2:])
            if name not in files:
                return self._missing("EntryNotFound")
            content = (folder / name).read_bytes()
            return self._answer(200, content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=sha)
        if rest[:1] == ["tree"]:
            root = folder.joinpath(*rest[2:])
            recursive = parse_qs(urlparse(self.path).query).get("recursive", ["False"])[0].lower() == "true"
            paths = root.rglob("*") if recursive else root.iterdir() if root.is_dir() else ()
            return self._json([self._entry(folder, p.relative_to(folder).as_posix()) for p in sorted(paths)])
        siblings = [{"rfilename": name} for name in files]
        return self._json({"id": repo, "modelId": repo, "sha": sha, "siblings": siblings, "private": False, "tags": []})

    def _entry(self, folder: Path, name: str) -> dict[str, Any]:
        if (folder / name).is_dir():
            return {"type": "directory", "path": name, "size": 0, "oid": "0" * 40}
        content = (folder / name).read_bytes()
        return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def do_POST(self) -> None:
        path = urlparse(self.path).path
        self.server.requests.append((self.command, path))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if path.startswith("/api/datasets/") and "paths-info" in path:
            folder = self.server.models["datasets/" + "/".join(path.split("/")[3:5])]
            names = [unquote(name) for name in parse_qs(body.decode())["paths"]]
            return self._json([self._entry(folder, name) for name in names if (folder / name).exists()])
        if not self._authorized():
            return self._missing("RepoNotFound", 401)
        parts = path.strip("/").split("/")
        if path == "/api/repos/create":
            values = json.loads(body)
            repo = "/".join(filter(None, (values.get("organization") or "me", values["name"])))
            self.server.uploads[repo] = {}
            return self._json({"url": f"{self.server.url}/{repo}", "private": values.get("private"), "name": repo})
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        repo = "/".join(parts[2:4])
        if parts[4] == "preupload":
            files = json.loads(body)["files"]
            return self._json(
                {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
            )
        lines = [json.loads(line) for line in body.splitlines() if line]
        for line in lines:
            if line["key"] == "file":
                value = line["value"]
                self.server.uploads[repo][value["path"]] = base64.b64decode(value["content"])
        oid = "0" * 40
        return self._json({"commitUrl": f"{self.server.url}/{repo}/commit/{oid}", "commitOid": oid})


@contextlib.contextmanager
def serving_hub(models: Mapping[str, Path], private: frozenset[str] = frozenset()) -> Iterator[Hub]:
    """A Hub that answers until the block ends."""
    hub = Hub(models, private)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join(10)
