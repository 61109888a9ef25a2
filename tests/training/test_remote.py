"""Checkpoints and models at addresses, by etils and a file system of fsspec that is a local directory."""

import importlib.util
import shutil

import fsspec
import numpy as np
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

import world
from test_training import small, tensors
from vishwamai.cli import main
from vishwamai.core.errors import ConfigError, DeviceError
from vishwamai.models import from_pretrained, read_config, save_pretrained
from vishwamai.models.remote import why_not_local
from vishwamai.training.checkpoints import CHECKSUMS, fetch_newest
from vishwamai.training.run import train

etils = pytest.importorskip("etils")


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    """The directory behind s3://bucket."""
    root = tmp_path_factory.mktemp("cloud")
    (root / "bucket").mkdir(parents=True)

    class Local(DirFileSystem):
        protocol = "s3"
        cachable = False

        def __init__(self, **options):
            super().__init__(path=str(root), fs=LocalFileSystem(auto_mkdir=True))

        @classmethod
        def _strip_protocol(cls, path):
            return path.removeprefix("s3://") if isinstance(path, str) else [p.removeprefix("s3://") for p in path]

    fsspec.register_implementation("s3", Local, clobber=True)
    yield root / "bucket"
    fsspec.register_implementation("s3", "s3fs.S3FileSystem", clobber=True)


@pytest.mark.turns(4)
def test_a_run_goes_on_on_another_machine_from_its_copies(bucket, tmp_path):
    here, there, elsewhere = (tmp_path / name for name in ("here", "there", "elsewhere"))
    checkpoint = {"every": 3, "keep": 2, "remote": "s3://bucket/run"}
    config = small(tmp_path, steps=8, checkpoint=checkpoint)
    plain = list(train(small(tmp_path, steps=8), there))
    records = train(config, here)
    for record in records:
        if record.step == 5:
            records.close()
            break
    copies = bucket / "run" / "checkpoints"
    assert sorted(path.name for path in copies.iterdir()) == ["3", "5"]
    shutil.copytree(here, elsewhere, ignore=shutil.ignore_patterns("checkpoints"))
    rest = list(train(config, elsewhere, resume=True))
    assert [record.step for record in rest] == [6, 7, 8]
    assert [record.loss for record in rest] == [record.loss for record in plain[5:]]
    assert sorted(int(path.name) for path in copies.iterdir()) == [6, 8]
    for name, value in tensors(there).items():
        np.testing.assert_array_equal(value, tensors(elsewhere)[name])
    model = bucket / "run" / "model"
    assert (model / "model.safetensors").read_bytes() == (elsewhere / "model" / "model.safetensors").read_bytes()
    assert read_config("s3://bucket/run/model").hidden_size == read_config(model).hidden_size

    # A copy that is damaged or not complete is not taken.
    state = next(path for path in (copies / "8" / "state").rglob("*") if path.is_file() and path.stat().st_size > 100)
    content = state.read_bytes()
    state.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (copies / "9").mkdir()
    folder = tmp_path / "fetched" / "checkpoints"
    with pytest.warns(UserWarning, match="the copy of step 8 in s3://bucket/run is damaged"):
        fetch_newest("s3://bucket/run", folder)
    assert [path.name for path in folder.iterdir()] == ["6"] and (folder / "6" / CHECKSUMS).is_file()


def test_commands_read_models_at_addresses(bucket, capsys):
    shutil.copytree(world.tiny("qwen3"), bucket / "tiny")
    assert main(["generate", "s3://bucket/tiny", "--token-ids", "1,2", "--memory", "0.001"]) == 2
    text = capsys.readouterr().err
    assert "copying s3://bucket/tiny" in text and "qwen3, 1 layers, from " in text and "That does not fit" in text
    assert main(["generate", "s3://bucket/none", "--token-ids", "1,2"]) == 2
    assert "s3://bucket/none: there is no such directory; check the address" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("gcsfs") is not None, reason="gcsfs is installed")
def test_an_address_without_its_package_is_an_error_before_the_run(tmp_path):
    config = small(tmp_path, checkpoint={"every": 3, "remote": "gs://bucket/run"})
    with pytest.raises(DeviceError, match="gs://bucket/run"):
        list(train(config, tmp_path / "run"))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("place", ["gs://bucket/run", "https://host/run", "file:///run"])
def test_an_address_is_no_directory_to_write_into(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=f"train: {place} is an address"):
        list(train(small(tmp_path), place))
    with pytest.raises(ConfigError, match=f"save_pretrained: {place} is an address"):
        save_pretrained(from_pretrained(world.tiny("qwen3")), place)
    assert not {path.name for path in set(tmp_path.rglob("*")) - before} & {"gs:", "https:", "file:"}
    (tmp_path / "gs:").mkdir()  # a local directory by that name
    assert why_not_local("gs:/run") is None
