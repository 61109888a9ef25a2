"""What pages say of options, errors, hardware and examples, compared with the code; and the search of the site."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from vishwamai.cli import COMMANDS, command_parser
from vishwamai.training.config_file import read_config

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_hardware_is_the_file_s():
    table = tool("hardware_table")
    assert table.PAGE.read_text() == table.page(), "write it again: python tools/hardware_table.py"
    for target in re.findall(r"\[more\]\((.*?)\)", table.page()):
        assert (DOCS / target).is_file(), target


def test_texts_of_errors_are_those_of_the_code():
    """Each text of the page, between its ellipses, is in a source file."""
    strings = re.compile(r'"\s*\n\s*f?"')  # a text that is broken between lines
    sources = "\n".join(strings.sub("", path.read_text()) for path in (ROOT / "src").rglob("*.py"))
    sources = re.sub(r"\{[^{}\n]*\}", "...", sources)
    sources = re.sub(r"[ \n]+", " ", sources)
    rows = re.findall(r"^\| (`.*?) \|", (DOCS / "troubleshooting.md").read_text(), re.M)
    texts = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    assert len(texts) > 20
    foreign = {"Host", "can't apply forward-mode autodiff (jvp)", "explain"}  # a header, JAX's own words, a command
    parts = {part.strip(" .;,") for text in set(texts) - foreign for part in text.split("...")}
    missing = [part for part in parts if part and part not in sources]
    assert not missing


def test_options_of_pages_exist():
    """Of the command lines of pages for users, and of the page for who comes from another project."""
    options = {name: set(command_parser(name)._option_string_actions) for name in COMMANDS}
    every = set().union(*options.values())
    seen = 0
    for path in [ROOT / "README.md", *DOCS.glob("*.md")]:
        for command, rest in re.findall(r"vishwamai (\w+)((?: [^`\n|#]*)?)", path.read_text()):
            for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", rest) if command in options else ():
                seen += 1
                assert option in options[command], f"{path.name}: vishwamai {command} {option}"
    page = (DOCS / "howto-migrate.md").read_text()
    for row in re.findall(r"^\|.*\| (.*) \|$", page, re.M):
        assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", row)) <= every, row
    assert seen > 60


def test_keys_of_pages_exist():
    for name in ("howto-migrate", "howto-long-context", "howto-nan", "training-fine-tuning", "training-devices"):
        for section, key in re.findall(
            r"`(data|model|mesh|lora|dpo|optimizer|log|guard)\.(\w+)[`=:]", (DOCS / f"{name}.md").read_text()
        ):
            values = getattr(read_config(None), section)
            assert hasattr(values, key) or section == "data", f"{name}: {section}.{key}"


@pytest.mark.parametrize("name", ["finetune_lora", "finetune_full", "preferences_dpo", "train_stdlib"])
def test_example_configurations_are_read(name):
    config = read_config(str(ROOT / "examples" / f"{name}.yaml"))
    assert (config.lora.rank > 0) == (name in ("finetune_lora", "preferences_dpo"))
    assert config.objective == ("dpo" if name == "preferences_dpo" else "next_token")
    assert config.optimizer.warmup_steps < config.steps


@pytest.mark.long
def test_search_shows_the_right_page_first(tmp_path):
    """By lunr on the index of the built site, with the weights of fields that mkdocs-material sets."""
    lunr = pytest.importorskip("lunr")
    pytest.importorskip("mkdocs")
    build = [sys.executable, "-m", "mkdocs", "build", "-q", "-d", str(tmp_path / "site")]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    entries = json.loads((tmp_path / "site/search/search_index.json").read_text())["docs"]
    fields = ({"field_name": "title", "boost": 1000}, {"field_name": "text"})
    index = lunr.lunr(ref="location", fields=fields, documents=entries)
    for words, page in (
        ("lora", "training-fine-tuning/"),
        ("dpo", "training-fine-tuning/"),
        ("Engine", "api/"),
        ("docker", "deploy/"),
        ("quantize", "howto-quantize/"),
        ("vllm", "howto-migrate/"),
        ("nan", "howto-nan/"),
    ):
        found = [result["ref"] for result in index.search(words)]
        assert found and found[0].startswith(page), (words, found[:5])
