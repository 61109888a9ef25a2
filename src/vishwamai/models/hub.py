"""Models by their names on the Hugging Face Hub: `ORG/NAME`, or `ORG/NAME@REVISION`.

`ORG/NAME:Q4_K_M` is the GGUF file of a repository in that format, and `ORG/NAME/FILE.gguf` one by its name.
Files come through `huggingface_hub`, so its cache, its token and its variables hold (`HF_HOME`, `HF_TOKEN`,
`HF_HUB_OFFLINE`, `HF_ENDPOINT`). Weights are read from safetensors only, which cannot hold code.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import os
import re
from pathlib import Path

from vishwamai.core.errors import DeviceError, ShapeError
from vishwamai.core.installing import install_line
from vishwamai.models.remote import address, fetched

TEXTS = ("*.json", "*.jinja")
WEIGHTS = ("*.safetensors",)
SKIPPED = ("original/*", "onnx/*", "openvino/*", "*/*.safetensors")
"""Folders of other programs, and weights in other forms."""

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}
_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(/(?P<file>[\w./-]+\.gguf))?(@(?P<revision>[\w.-][\w./-]*))?"
    r"(:(?P<format>(?i:(UD-)?(I?Q\d|TQ\d|BF16|F16|F32|MXFP4)\w*)))?"
)
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


@dataclasses.dataclass(frozen=True)
class HubModel:
    """A model of the Hub.

    >>> HubModel.parse("Qwen/Qwen3-0.6B@main").revision
    'main'
    >>> HubModel.parse("unsloth/gemma-3-270m-GGUF:Q4_K_M").format
    'Q4_K_M'
    >>> HubModel.parse("./Qwen/Qwen3-0.6B"), HubModel.parse("model.gguf")
    (None, None)

    Attributes:
      repo: the repository, "ORG/NAME".
      revision: a branch, tag or commit; None is the main branch.
      file: name of a GGUF file there. format: format in the name of the GGUF file; both None: safetensors files.
    """

    repo: str
    revision: str | None = None
    file: str | None = None
    format: str | None = None

    @classmethod
    def parse(cls, text: str | os.PathLike[str]) -> HubModel | None:
        """The model that a text names; None where it is a path that exists, or is not written as a name."""
        text = os.fspath(text)
        match = _NAME.fullmatch(text)
        if match is None or match["repo"].endswith((".gguf", ".yaml", ".yml", ".py")) or os.path.lexists(text):
            return None
        if match["file"] and match["format"]:
            return None
        return cls(match["repo"], match["revision"], match["file"], match["format"])

    @property
    def name(self) -> str:
        """The last part of the repository's name."""
        return self.repo.rpartition("/")[2]

    def __str__(self) -> str:
        file = "" if self.file is None else f"/{self.file}"
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{self.repo}{file}{revision}{'' if self.format is None else f':{self.format}'}"


def local_model(path: str | os.PathLike[str], weights: bool = True) -> Path:
    """The path itself, or the directory or GGUF file into which a model of the Hub was fetched.

    Args:
      path: a directory, a GGUF file, a name of the Hub, or an address such as gs://bucket/model.
      weights: fetch them too, not the configuration and the tokenizer alone.

    Raises:
      ShapeError: the Hub has no such model or revision, or it is not open to this user.
      DeviceError: the Hub cannot be reached, and its cache does not have the model.
    """
    place = address(path)
    if place is not None:
        return fetched(place)
    model = HubModel.parse(path)
    return Path(path) if model is None else _fetched(model, weights)


@functools.cache
def _fetched(model: HubModel, weights: bool) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub import errors
    except ImportError as error:
        raise DeviceError(f"{model}: the Hub needs huggingface-hub: {install_line('models')}.") from error
    patterns = [*TEXTS, *(WEIGHTS if weights else ())]
    if model.file is not None:
        patterns = [model.file]
    elif model.format is not None:
        patterns = [
            f"*{text}*.gguf" for text in dict.fromkeys((model.format, model.format.upper(), model.format.lower()))
        ]
    try:
        folder = huggingface_hub.snapshot_download(
            model.repo,
            revision=model.revision,
            allow_patterns=patterns,
            ignore_patterns=list(SKIPPED),
            library_name="vishwamai",
        )
    except errors.GatedRepoError as error:
        raise ShapeError(
            f"{model}: its authors let in who has asked; accept the terms on the model's page, then log in "
            "(`hf auth login`) or set HF_TOKEN."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ShapeError(
            f"{model}: there is no such path here, and the Hub has no such model, or shows it to its owner only "
            "(`hf auth login`, or HF_TOKEN). Check the name, or pass a directory."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ShapeError(f"{model}: the Hub has {model.repo}, but not the revision {model.revision!r}.") from error
    except Exception as error:  # its HTTP library, and so the class of a broken connection, differs between releases
        if isinstance(error, OSError) and error.errno in _DISK:
            raise
        raise DeviceError(_unreachable(model, error)) from error
    path = Path(folder)
    if model.file is not None or model.format is not None:
        return _gguf_file(model, path)
    if (weights and not any(path.glob("*.safetensors"))) or not any(path.iterdir()):
        names = _gguf_names(model)
        raise ShapeError(
            f"{model}: the repository has GGUF files; pass one of them, such as {model.repo}/{names[0]}, or its "
            f"format, such as {model.repo}:Q4_K_M. It has {', '.join(names)}."
            if names
            else f"{model}: the repository has no safetensors files next to its config.json; pass another revision, or "
            "a repository with converted weights."
        )
    return path


def _gguf_file(model: HubModel, folder: Path) -> Path:
    """The one GGUF file of a fetched snapshot that a model names."""
    files = sorted(path for path in folder.rglob("*.gguf") if not path.name.startswith("mmproj"))
    if model.file is not None:
        files = [path for path in files if path.relative_to(folder).as_posix() == model.file]
    else:
        format = re.compile(rf"(^|[-._/]){re.escape(str(model.format))}\.gguf$", re.IGNORECASE)
        files = [path for path in files if format.search(_PART.sub(".gguf", path.name))]
    if len(files) == 1 and not _PART.search(files[0].name):
        return files[0]
    if not files:
        names = _gguf_names(model)
        has = f"it has {', '.join(names)}" if names else "it has no GGUF files that can be listed"
        raise ShapeError(f"{model}: the repository has no such GGUF file; {has}.")
    names = ", ".join(path.relative_to(folder).as_posix() for path in files)
    raise ShapeError(
        f"{model}: a model is read from one GGUF file, but this is {len(files)}: {names}; pass the name of one that is "
        f"not a part, {model.repo}/FILE.gguf, or merge the parts with llama.cpp's gguf-split."
    )


def _gguf_names(model: HubModel) -> list[str]:
    """The GGUF files of a repository; none where the Hub cannot be reached."""
    import huggingface_hub

    try:
        names = huggingface_hub.HfApi(library_name="vishwamai").list_repo_files(model.repo, revision=model.revision)
    except Exception:  # this only adds to an error
        return []
    return [name for name in names if name.endswith(".gguf")]


class Upload:
    """A repository of the Hub for a model that is to be trained: made at once, so that what is wrong with its name or
    the token is an error before the training, and filled at the end.

    Args:
      repo: "ORG/NAME" or "NAME".
      private: who may see a repository that is new.

    Raises:
      ShapeError: the name is not one, there is no token, or it may not write there.
      DeviceError: the Hub cannot be reached.
    """

    def __init__(self, repo: str, private: bool = False):
        if not re.fullmatch(r"([\w.-]+/)?[\w.-]+", repo):
            raise ShapeError(f"{repo!r} is not the name of a repository; pass ORG/NAME.")
        try:
            import huggingface_hub
            from huggingface_hub import errors
        except ImportError as error:
            raise DeviceError(f"{repo}: the Hub needs huggingface-hub: {install_line('models')}.") from error
        if huggingface_hub.get_token() is None:
            raise ShapeError(f"{repo}: the Hub asks for a token; run `hf auth login`, or set HF_TOKEN.")
        self._api = huggingface_hub.HfApi(library_name="vishwamai")
        try:
            self.repo = self._api.create_repo(repo, private=private, exist_ok=True).repo_id
        except errors.HfHubHTTPError as error:
            raise ShapeError(
                f"{repo}: the Hub declines it ({_first_line(error)}); pass a name of your own, and a token that may "
                "write there."
            ) from error
        except Exception as error:
            raise DeviceError(f"{repo}: the Hub cannot be reached ({_first_line(error)}).") from error

    def send(self, folder: Path, card: str) -> str:
        """Uploads the files of a folder and the model card, README.md, as one commit; the address of the commit.

        Raises:
          DeviceError: the upload failed; the text has the command that repeats it.
        """
        (folder / "README.md").write_text(card, encoding="utf-8")
        try:
            return self._api.upload_folder(
                repo_id=self.repo, folder_path=folder, commit_message="Model trained with vishwamai"
            ).commit_url
        except Exception as error:
            raise DeviceError(
                f"{self.repo}: the upload failed ({_first_line(error)}); the model is in {folder}. Repeat it with "
                f"`hf upload {self.repo} {folder}`."
            ) from error


def _unreachable(model: HubModel, error: BaseException) -> str:
    """What to do where there is no network: the line to run elsewhere, and where its files go."""
    from huggingface_hub import constants

    revision = "" if model.revision is None else f" --revision {model.revision}"
    files = "" if model.file is None else f" {model.file}"
    files += "" if model.format is None else f" --include '*{model.format}*.gguf'"
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"the Hub cannot be reached ({_first_line(error)})"
    return (
        f"{model}: there is no such path here, {why}, and the cache in {constants.HF_HUB_CACHE} does not have the "
        f"model. On a machine with network, run `hf download {model.repo}{files}{revision} --local-dir {model.name}`; "
        f"copy the folder {model.name} to this machine, and pass its path in place of {model}."
    )


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")
