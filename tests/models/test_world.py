"""What `make world` fetches is what the tests take it for."""

import pytest
import tokenizers

import world


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", world.PUBLISHED)
def test_a_published_vocab_has_ids_without_a_token(name: str) -> None:
    """So a model draws ids that decode to nothing: tests with this vocab see that case."""
    encoder = tokenizers.Tokenizer.from_file(str(world.tokenizer(name) / "tokenizer.json"))
    published = world.PUBLISHED[name]
    assert max(encoder.get_vocab(with_added_tokens=True).values()) < published.vocab
    ends = published.end if isinstance(published.end, list) else [published.end]
    assert all(encoder.id_to_token(i) for i in ends)


def test_a_tiny_model_has_the_published_vocab() -> None:
    import safetensors

    directory = world.tiny("qwen3")
    assert world.tiny("qwen3") == directory
    with safetensors.safe_open(directory / "model.safetensors", "np") as file:
        assert file.get_slice("model.embed_tokens.weight").get_shape() == [151936, 32]


def test_the_world_has_the_files_that_its_index_names() -> None:
    index = world.folder("INDEX.tsv").read_text(encoding="utf-8").splitlines()[1:]
    assert len(index) > 700
    assert all((world.WORLD / line.split("\t")[0]).exists() for line in index)
