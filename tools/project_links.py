"""The repository's address in the metadata of a distribution: a provider of dynamic metadata for scikit-build-core.

The sources do not say where they are published. The address comes from `VISHWAMAI_REPOSITORY`, where that is set; else
from `origin` of the clone that is built, if that is on a forge that `FORGES` has; else from the PKG-INFO of a source
archive. With an address the metadata have project URLs, and README's relative links lead there. Without one there are
no URLs, and each link becomes the path of its file, which the source archive has.
"""

from __future__ import annotations

import email
import os
import posixpath
import re
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

FORGES = {"github.com": ("blob/HEAD", "raw/HEAD"), "gitlab.com": ("-/blob/HEAD", "-/raw/HEAD")}
"""What stands between the address of a repository and the path of a file, of one to read and of an image."""

PAGES = {"Documentation": "docs/getting-started.md", "Changelog": "CHANGELOG.md"}
"""Further project URLs."""

RELATIVE = re.compile(
    r"(?P<image>!?)\[(?P<text>[^\]]+)\]\((?P<target>(?![a-z]+:)[^)#\s]+)(?P<anchor>#[^)]*)?\)", re.IGNORECASE
)
"""A link of Markdown to a file next to its page."""


class ProjectLinks:
    """The provider. `folder` of its settings says where in the repository the distribution is."""

    def dynamic_metadata(self, settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
        folder = settings["folder"]
        address = repository(Path.cwd(), folder)
        text = absolute(Path("README.md").read_text(encoding="utf-8"), address, folder)
        return {"urls": urls(address), "readme": {"content-type": "text/markdown", "text": text}}

    def dynamic_wheel(self, settings: Mapping[str, Any]) -> dict[str, bool]:
        return {"urls": True, "readme": True}  # an archive may be built where the variable says another address


def repository(project: Path, folder: str) -> str | None:
    """The address of the repository that holds a project in its `folder`; None where nothing says it.

    Raises:
      ValueError: VISHWAMAI_REPOSITORY is not an address.
    """
    named = os.environ.get("VISHWAMAI_REPOSITORY")
    if named is not None:
        address = address_of(named) if named else None
        if named and address is None:
            raise ValueError(
                f"VISHWAMAI_REPOSITORY is {named!r}; set it to the repository's address, such as "
                "https://github.com/OWNER/NAME, or to nothing for metadata without an address."
            )
        return address
    origin = address_of(_origin(project, folder))
    if origin is not None:
        return origin if urlsplit(origin).hostname in FORGES else None
    about = project / "PKG-INFO"
    if not about.is_file():
        return None
    urls = email.message_from_string(about.read_text(encoding="utf-8")).get_all("Project-URL", ())
    return dict(url.split(", ", 1) for url in urls).get("Source")


def _origin(project: Path, folder: str) -> str:
    """The remote of the clone whose root holds the project in `folder`; empty where there is none, or no git."""
    root = Path(os.path.normpath(project / os.path.relpath(".", folder)))
    if not (root / ".git").exists():  # an unpacked archive may lie in a clone of something else
        return ""
    words = ["git", "-C", str(root), "config", "--get", "remote.origin.url"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def address_of(remote: str) -> str | None:
    """The page of a repository by the address that git has of it, without any user and password; None where it is not
    one of https or ssh.

    >>> address_of("git@github.com:owner/name.git"), address_of("https://user:secret@gitlab.com/group/part/name")
    ('https://github.com/owner/name', 'https://gitlab.com/group/part/name')
    >>> address_of("/srv/name.git"), address_of("file:///srv/name")
    (None, None)
    """
    short = re.fullmatch(r"(?:[\w.-]+@)?([\w-]+(?:\.[\w-]+)+):(?!/)(.+)", remote)
    parts = urlsplit(f"ssh://{short[1]}/{short[2]}" if short else remote)
    path = parts.path.strip("/").removesuffix(".git")
    if parts.scheme not in ("https", "ssh") or not parts.hostname or "/" not in path or re.search(r"\s", path):
        return None
    port = f":{parts.port}" if parts.scheme == "https" and parts.port else ""
    return f"https://{parts.hostname}{port}/{path}"


def urls(address: str | None) -> dict[str, str]:
    """Project URLs: the repository, and pages in it where the forge's form of their addresses is known.

    >>> urls("https://github.com/owner/name")["Changelog"]
    'https://github.com/owner/name/blob/HEAD/CHANGELOG.md'
    """
    if address is None:
        return {}
    return {"Source": address} | {name: where for name, path in PAGES.items() if (where := _file(address, path))}


def _file(address: str | None, path: str, image: bool = False) -> str | None:
    forge = FORGES.get(urlsplit(address).hostname or "") if address else None
    return f"{address}/{forge[image]}/{path}" if forge else None


def absolute(text: str, address: str | None, folder: str = ".") -> str:
    """A page of the repository's `folder` for readers elsewhere: its relative links lead to the repository. Where the
    address of a file is not known, a link becomes its text with the path of the file, and an image is left out.

    >>> absolute("See [serving](docs/serving.md).", "https://github.com/owner/name")
    'See [serving](https://github.com/owner/name/blob/HEAD/docs/serving.md).'
    >>> absolute("See [serving](docs/serving.md).", None)
    'See serving (`docs/serving.md`).'
    """

    def link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, match["target"]))
        where = _file(address, path, bool(match["image"]))
        if where is not None:
            return f"{match['image']}[{match['text']}]({where}{match['anchor'] or ''})"
        if match["image"]:
            return ""
        return f"`{path}`" if match["text"].strip("`") == path else f"{match['text']} (`{path}`)"

    return in_prose(text, lambda part: RELATIVE.sub(link, part))


def in_prose(text: str, change: Callable[[str], str]) -> str:
    """Changes what is not code in a page of Markdown."""
    return "".join(
        part if part.startswith("```") else change(part)
        for part in re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    )
