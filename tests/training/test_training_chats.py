"""A model that was fine-tuned on chats serves chats: its template, its special tokens and what ends an answer."""

import dataclasses
import json

import pytest
from tokenizers import Tokenizer as Encoder

from test_training import small
from vishwamai.core.errors import ConfigError
from vishwamai.models import read_generation_config
from vishwamai.models.tokenizer import read_tokenizer
from vishwamai.training.chat import TrainingTemplate
from vishwamai.training.data import prepare
from vishwamai.training.exported import files_next_to_weights
from vishwamai.training.run import train
from vishwamai.training.tokens import read_tokens

OF_START = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
OWN = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [{"role": "user", "content": "the quick"}, {"role": "assistant", "content": "brown fox"}]


def write_start(folder):
    """A model of one step with the files that a published chat model has."""
    list(train(small(folder, steps=1), folder / "first"))
    start = folder / "first" / "model"
    settings = json.loads((start / "tokenizer_config.json").read_text())
    settings |= {"bos_token": "the", "chat_template": OF_START, "model_max_length": 77}
    (start / "tokenizer_config.json").write_text(json.dumps(settings))
    (start / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 0], "temperature": 0.6}))
    return start


@pytest.mark.turns(6)
def test_a_model_fine_tuned_on_chats_keeps_what_serving_them_needs(tmp_path):
    start = write_start(tmp_path)
    (tmp_path / "own.jinja").write_text(OWN)
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": CHAT}) + "\n") * 30)
    config = small(tmp_path, steps=1, model={"start_from": str(start)}, tokenizer={"path": str(start)})
    encoder = Encoder.from_file(str(start / "tokenizer.json"))
    kept = files_next_to_weights(config, encoder, tmp_path)
    (tmp_path / "kept").mkdir()
    for name, text in kept.items():
        (tmp_path / "kept" / name).write_text(text)
    assert read_tokenizer(tmp_path / "kept").render_chat(CHAT) == "[user]the quick[assistant]brown fox"

    source = {"paths": [str(tmp_path / "chats.jsonl")], "column": "messages"}
    data = {"sources": [source], "sequence_length": 32, "chat_template": str(tmp_path / "own.jinja")}
    chats = dataclasses.replace(config, data=small(tmp_path, data=data).data)
    for _ in train(chats, tmp_path / "run"):
        (tmp_path / "own.jinja").unlink()  # the run has its copy
    model = tmp_path / "run" / "model"
    tokenizer = read_tokenizer(model)
    end = encoder.token_to_id("<|endoftext|>")
    assert tokenizer.render_chat(CHAT[:1]) == "the<user>the quick|<assistant>"
    assert tokenizer.chat(CHAT[:1]) == encoder.encode("the<user>the quick|<assistant>").ids
    found = read_generation_config(model)
    assert found.temperature == 0.6 and found.eos_token_ids == (end, 7) == (0, 7)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == 77 and "chat_template" not in settings
    # Without `data.chat_template`, chats have the form that the model at the start was trained on.
    of_start = dataclasses.replace(chats, data=dataclasses.replace(chats.data, chat_template=None))
    prepare(of_start, tmp_path / "of_start")
    found_tokens = read_tokens(tmp_path / "of_start" / "source-0")
    assert encoder.decode(found_tokens.tokens[:30].tolist()).startswith("[user]the quick[assistant]brown fox")
    assert found_tokens.targets is not None and not found_tokens.targets.all()
    # Trained as it is served: the special tokens are in the text of training, too.
    template = TrainingTemplate.read(model / "chat_template.jinja", tokenizer.special)
    text, (span,) = template.render(CHAT)
    assert text.startswith(tokenizer.render_chat(CHAT[:1])) and text[slice(*span)] == "brown fox<|endoftext|>|"
    trained = read_tokens(tmp_path / "run" / "data" / "source-0").tokens.tolist()
    assert text in encoder.decode(trained, skip_special_tokens=False)


def test_chats_without_any_template_are_an_error_before_the_tokenizer_is_trained(tmp_path):
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": CHAT}) + "\n") * 30)
    data = {"sources": [{"paths": [str(tmp_path / "chats.jsonl")], "column": "messages"}], "sequence_length": 32}
    with pytest.raises(ConfigError, match=r"has no chat template; set data\.chat_template to a Jinja file"):
        next(train(small(tmp_path, data=data), tmp_path / "run"))
    assert not (tmp_path / "run" / "data" / "tokenizer.json").exists()


def test_a_chat_template_that_is_missing_is_an_error_before_the_tokenizer_is_trained(tmp_path):
    data = {"sources": [{"paths": [str(tmp_path)]}], "chat_template": str(tmp_path / "none.jinja")}
    with pytest.raises(ConfigError, match=r"data\.chat_template is .*none\.jinja', which cannot be read"):
        next(train(small(tmp_path, data=data), tmp_path / "run"))
    assert not (tmp_path / "run" / "data" / "tokenizer.json").exists()
