"""mkdocs hook: takes the pages that live beside the code, such as an operation's README, into the site without copying them."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent


def pages() -> dict[str, Path]:
    """Address in the site -> file in the repository."""
    found = {name.lower() + ".md": ROOT / f"{name}.md" for name in ("ARCHITECTURE", "CONTRIBUTING", "CHANGELOG")}
    for readme in sorted(ROOT.glob("src/vishwamai/ops/*/README.md")):
        found[f"ops/{readme.parent.name}.md"] = readme
    found["capibara.md"] = ROOT / "src/capibara/README.md"
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for address, path in pages().items():
        files.append(File.generated(config, address, content=_relinked(address, path)))
    return files


def _relinked(address: str, path: Path) -> str:
    """The page, its relative links to other pages of the site rewritten and those to mere files of the repository turned into code."""
    site = {target: where for where, target in pages().items()}
    up = "../" * address.count("/")

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match["text"], match["target"], match["anchor"] or ""
        there = (path.parent / target).resolve()
        if there in site:
            return f"[{text}]({up}{site[there]}{anchor})"
        if there.is_relative_to(ROOT / "docs"):
            return f"[{text}]({up}{there.relative_to(ROOT / 'docs')}{anchor})"
        return text if text.startswith("`") else f"`{text}`"

    return re.sub(
        r"(?<!!)\[(?P<text>[^\]]+)\]\((?P<target>(?![a-z]+:)[^)#\s]+)(?P<anchor>#[^)]*)?\)", link, path.read_text()
    )
