"""A tiny model of random weights that writes bytes, and a server for it on a real port."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import tokenizers
import uvicorn

from models_peer import Peer
from vishwamai.inference import Engine, plan_load
from vishwamai.inference.server.app import make_app
from vishwamai.inference.server.connections import LimitedProtocol
from vishwamai.inference.server.service import Settings

TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)


def write_model(path: Path, template: str = TEMPLATE, marks: Sequence[str] = ()) -> None:
    """A checkpoint whose tokens are the 256 bytes and three special ones; `marks` are special, too, with ids from
    259.
    """
    Peer("Llama", {"vocab_size": 262, "num_hidden_layers": 1, "hidden_size": 32, "max_position_embeddings": 512}).save(
        path
    )
    write_tokenizer(path, template, marks)


def small_engine(path: Path) -> Engine:
    """An engine of `write_model` in an empty directory, for two sequences."""
    write_model(path)
    planned = plan_load(path, dtype="float32", max_sequences=2, max_tokens=32, max_length=256, page_size=8)
    return planned.engine(compile="lazy")


def write_tokenizer(path: Path, template: str = TEMPLATE, marks: Sequence[str] = ()) -> None:
    """The tokenizer of `write_model` alone."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<s>", "</s>"]
    encoder = tokenizers.Tokenizer(
        tokenizers.models.BPE({token: i for i, token in enumerate([*special, *alphabet])}, [])
    )
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = tokenizers.decoders.ByteLevel()
    encoder.add_special_tokens([*special, *marks])
    encoder.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def write_encoder(path: Path) -> None:
    """A BERT of random weights over three words, in the form of sentence-transformers; texts of at most 40 tokens."""
    sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 2, "max_position_embeddings": 64, "type_vocab_size": 2}
    (path / "config.json").write_text(json.dumps({"model_type": "bert", "layer_norm_eps": 1e-12, **sizes}))
    draw = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"embeddings.word_embeddings.weight": (8, 16)}
    shapes["embeddings.position_embeddings.weight"] = (64, 16)
    shapes["embeddings.token_type_embeddings.weight"] = (2, 16)
    products = {f"attention.self.{name}": (16, 16) for name in ("query", "key", "value")}
    products |= {"attention.output.dense": (16, 16), "intermediate.dense": (24, 16), "output.dense": (16, 24)}
    norms = ["embeddings.LayerNorm"]
    for i in range(2):
        for name, shape in products.items():
            shapes[f"encoder.layer.{i}.{name}.weight"] = shape
            shapes[f"encoder.layer.{i}.{name}.bias"] = shape[:1]
        norms += [f"encoder.layer.{i}.{name}.LayerNorm" for name in ("attention.output", "output")]
    shapes |= {f"{name}.{part}": (16,) for name in norms for part in ("weight", "bias")}
    arrays = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    safetensors.numpy.save_file(arrays, path / "model.safetensors")
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "a": 4, "b": 5, "c": 6}
    encoder = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    encoder.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    encoder.save(str(path / "tokenizer.json"))
    modules = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    listed = [{"path": name, "type": f"sentence_transformers.models.{kind}"} for name, kind in modules.items()]
    (path / "modules.json").write_text(json.dumps(listed))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def serving(engine: Any, settings: Settings, embed: Any = None, **options: Any) -> Iterator[str]:
    """The address of a server in this process, by `vishwamai serve`'s protocol; `options` are uvicorn's."""
    port = free_port()
    options = {"log_level": "warning", "timeout_graceful_shutdown": 5, "http": LimitedProtocol, **options}
    server = uvicorn.Server(uvicorn.Config(make_app(engine, settings, embed), port=port, **options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
