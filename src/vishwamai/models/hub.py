"""Models by their names on the Hugging Face Hub: `ORG/NAME`, or `ORG/NAME@REVISION`.

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

TEXTS = ("*.json", "*.jinja")
WEIGHTS = ("*.safetensors",)
SKIPPED = ("original/*", "onnx/*", "openvino/*", "*/*.safetensors")
"""Folders of other programs, and weights in other forms."""

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES}
_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w.-][\w./-]*))?")


@dataclasses.dataclass(frozen=True)
class HubModel:
    """A model of the Hub: its repository, "ORG/NAME", and a branch, tag or commit; None is the main branch.

    >>> HubModel.parse("Qwen/Qwen3-0.6B@main")
    HubModel(repo='Qwen/Qwen3-0.6B', revision='main')
    >>> HubModel.parse("./Qwen/Qwen3-0.6B"), HubModel.parse("model.gguf")
    (None, None)
    """

    repo: str
    revision: str | None = None

    @classmethod
    def parse(cls, text: str | os.PathLike[str]) -> HubModel | None:
        """The model that a text names; None where it is a path that exists, or is not written as a name."""
        text = os.fspath(text)
        match = _NAME.fullmatch(text)
        if match is None or text.endswith((".gguf", ".yaml", ".yml")) or os.path.lexists(text):
            return None
        return cls(match["repo"], match["revision"])

    @property
    def name(self) -> str:
        """The last part of the repository's name."""
        return self.repo.rpartition("/")[2]

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def local_model(path: str | os.PathLike[str], weights: bool = True) -> Path:
    """The path itself, or the directory into which a model of the Hub was fetched.

    Args:
      path: a directory, a GGUF file, or a name of the Hub.
      weights: fetch them too, not the configuration and the tokenizer alone.

    Raises:
      ShapeError: the Hub has no such model or revision, or it is not open to this user.
      DeviceError: the Hub cannot be reached, and its cache does not have the model.
    """
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
    if weights and not any(path.glob("*.safetensors")):
        raise ShapeError(
            f"{model}: the repository has no safetensors files next to its config.json; pass another revision, or a "
            "repository with converted weights."
        )
    return path


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
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"the Hub cannot be reached ({_first_line(error)})"
    return (
        f"{model}: there is no such path here, {why}, and the cache in {constants.HF_HUB_CACHE} does not have the "
        f"model. On a machine with network, run `hf download {model.repo}{revision} --local-dir {model.name}`; copy "
        f"the folder {model.name} to this machine, and pass its path in place of {model}."
    )


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")
