"""mkdocs hook: takes the pages next to the code, such as an operation's README, into the site without copying them, and
lists them in the navigation. Formulas become MathML, which browsers draw without a script.
"""

import html
import os
import re
import unittest.mock
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from project_links import RELATIVE, in_prose

from vishwamai.cli import COMMANDS, command_parser
from vishwamai.training.config_file import describe, read_config

ROOT = Path(__file__).parent.parent


def pages() -> dict[str, Path]:
    """Address in the site -> file in the repository."""
    sources = {name.lower() + ".md": ROOT / f"{name}.md" for name in ("ARCHITECTURE", "CONTRIBUTING", "CHANGELOG")}
    for readme in sorted(ROOT.glob("src/vishwamai/ops/*/README.md")):
        sources[f"ops/{readme.parent.name}.md"] = readme
    sources["capibara.md"] = ROOT / "capibara/README.md"
    sources["index.md"] = ROOT / "README.md"
    return sources


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fills the sections "Operations" and "Notes" of mkdocs.yml's navigation, so that a new page is listed by
    itself.
    """
    operations = [{_title(path): address} for address, path in pages().items() if address.startswith("ops/")]
    notes = [f"notes/{path.name}" for path in sorted((ROOT / "docs/notes").glob("*.md")) if path.stem != "index"]
    config.nav = _filled(config.nav or [], {"Operations": operations, "Notes": notes})
    return config


def _filled(nav: list, sections: dict[str, list]) -> list:
    return [
        {
            title: [*entries, *sections.get(title, ())]
            if all(isinstance(e, str) for e in entries)
            else _filled(entries, sections)
        }
        if isinstance(item, dict)
        and isinstance(entries := next(iter(item.values())), list)
        and (title := next(iter(item)))
        else item
        for item in nav
    ]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for address, path in pages().items():
        files.append(File.generated(config, address, content=_relinked(path.parent, address, path.read_text())))
    files.append(File.generated(config, "command-line.md", content=command_line()))
    files.append(File.generated(config, "training-keys.md", content=training_keys()))
    return files


def command_line() -> str:
    """The page of the command line: what `--help` prints of every command."""
    sections = ["# Command line\n\nEvery command prints this with `--help`."]
    with unittest.mock.patch.dict(os.environ, COLUMNS="90"):
        for name in COMMANDS:
            sections.append(f"## vishwamai {name}\n\n```text\n{command_parser(name).format_help()}```")
    return "\n\n".join(sections) + "\n"


def training_keys() -> str:
    """The page of the training configuration: every key with its default and its doc."""
    text = describe(read_config(None))
    return f"# Training configuration\n\n`vishwamai train --print-config` prints this.\n\n```yaml\n{text}```\n"


def on_page_markdown(markdown: str, page, config: MkDocsConfig, files: Files) -> str:
    """Links of docs/ to pages next to the code work on GitHub, and here lead to where the page is in the site."""
    if page.file.generated_by:
        return markdown
    return _relinked((ROOT / "docs" / page.file.src_uri).parent, page.file.src_uri, markdown)


def on_page_content(content: str, page, config: MkDocsConfig, files: Files) -> str:
    """Formulas as MathML; arithmatex has marked them."""
    return re.sub(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', _math, content, flags=re.DOTALL)


def _math(match: re.Match[str]) -> str:
    mathml = convert(html.unescape(match[3]), display="inline" if match[2] == "(" else "block")
    unknown = re.search(r"\\[a-zA-Z]+", html.unescape(mathml))
    if unknown:
        raise ValueError(f"a formula has {unknown[0]}, which latex2mathml does not know: {match[3]}")
    return mathml


def _title(path: Path) -> str:
    return path.read_text().split("\n", 1)[0].removeprefix("# ").split(":")[0]


def _relinked(folder: Path, address: str, text: str) -> str:
    """`text`, its relative links to other pages of the site rewritten and those to mere files of the repository turned
    into code.
    """
    site = {target: where for where, target in pages().items()}
    up = "../" * address.count("/")

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match["text"], match["target"], match["anchor"] or ""
        destination = (folder / target).resolve()
        if destination in site:
            return f"[{text}]({up}{site[destination]}{anchor})"
        if destination.is_relative_to(ROOT / "docs"):
            return f"{match['image']}[{text}]({up}{destination.relative_to(ROOT / 'docs')}{anchor})"
        return text if text.startswith("`") else f"`{text}`"

    return in_prose(text, lambda part: RELATIVE.sub(link, part))
