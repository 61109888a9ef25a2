"""Direct preference optimization: pairs from files, the reference, and the same steps in transformers and torch."""

import dataclasses
import json
import re

import numpy as np
import pytest

from test_training import LLAMA, MIXTRAL, small, tensors
from vishwamai.core.errors import ConfigError
from vishwamai.training.config import DpoSection, MeshSection, SourceSection
from vishwamai.training.packing import IGNORED
from vishwamai.training.run import train
from vishwamai.training.sources import Bad, Chat, Pair, pairs


def preferences(folder, start=LLAMA, **changes):
    """A run on pairs from a model that two steps have trained."""
    model = {"config": start | {"vocab_size": 300}}  # more than the tokenizer has, so that two devices divide it
    list(train(small(folder, steps=2, model=model), folder / "start"))
    good, bad = " jumps over the lazy dog.", " lazy dog lazy dog lazy fox."
    lines = [{"prompt": f"the quick brown fox{'!' * (n % 3)}", "chosen": good, "rejected": bad} for n in range(12)]
    lines.append({"prompt": "the", "chosen": good * 9, "rejected": bad})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    start = str(folder / "start" / "model")
    values = {
        "model": {"start_from": start},
        "tokenizer": {"path": start},
        "data": {"sources": [{"paths": [str(folder / "pairs.jsonl")]}], "sequence_length": 64},
        "optimizer": {"learning_rate": 0.003},
        "objective": "dpo",
        "steps": 6,
    }
    return small(folder, **values | changes)


def torch_losses(config, batches):
    import torch
    import transformers

    start, section = config.model.start_from, config.optimizer
    model, reference = (transformers.AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32) for _ in range(2))

    def answers(model, batch):
        """Each answer alone in its row, so that torch needs no segments."""
        found = []
        for row in range(len(batch["tokens"])):
            for segment in (1, 2):
                here = batch["segment_ids"][row] == segment
                tokens, labels = (torch.from_numpy(batch[n][row][here]).long()[None] for n in ("tokens", "labels"))
                logits = model(tokens, attention_mask=torch.ones_like(tokens)).logits
                found.append(
                    -torch.nn.functional.cross_entropy(logits[0], labels[0], ignore_index=IGNORED, reduction="sum")
                )
        return torch.stack(found).reshape(-1, 2)

    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": section.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    update = torch.optim.AdamW(groups, section.learning_rate, (section.b1, section.b2), section.eps)
    losses = []
    for step in range(config.steps):
        cosine = 0.5 * (1 + np.cos(np.pi * step / (config.steps - 1)))
        for group in update.param_groups:
            group["lr"] = section.learning_rate * ((1 - section.end_factor) * cosine + section.end_factor)
        batch = next(batches)
        with torch.no_grad():
            before = answers(reference, batch)
        gained = answers(model, batch) - before
        loss = -torch.nn.functional.logsigmoid(config.dpo.beta * (gained[:, 0] - gained[:, 1])).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), section.clip_norm)
        update.step()
        update.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.turns(6)
def test_preferences_are_learned_with_the_losses_of_torch(tmp_path):
    from vishwamai.training.data import prepare, training_batches

    config = preferences(tmp_path, optimizer={"learning_rate": 0.003, "eps": 1e-5})
    corpus = prepare(config, tmp_path / "run" / "data")
    assert len(corpus.training[0]) == 12
    assert re.search(r":13: the pair has 65 tokens, more than data.sequence_length=64$", corpus.bad[0])
    batches = iter(training_batches(corpus, config.seed, config.batch_size))
    expected = torch_losses(config, batches)
    records = list(train(config, tmp_path / "run"))
    assert records[0].loss == pytest.approx(np.log(2), abs=1e-5)
    np.testing.assert_allclose([r.loss for r in records], expected, atol=1e-4)
    assert records[-1].accuracy == 1 and (records[-1].margin or 0) > 0.1


@pytest.mark.long
@pytest.mark.parametrize(
    "changes", [{"mesh": {"data": 2, "fsdp": 2}}, {"microbatches": 2}, {"lora": {"rank": 4}, "remat": "full"}]
)
def test_devices_microbatches_and_adapters(tmp_path, changes):
    config = preferences(tmp_path, **changes, optimizer={"learning_rate": 0.01, "eps": 1e-4})
    records = list(train(config, tmp_path / "run"))
    assert records[0].loss == pytest.approx(np.log(2), abs=1e-5) and records[-1].accuracy == 1
    assert tensors(tmp_path / "run").keys() == tensors(tmp_path / "start").keys()


@pytest.mark.turns(6)
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ({"pipeline": 2, "fsdp": 2}, {}),
        *(
            pytest.param(mesh, changes, marks=pytest.mark.long)
            for mesh, changes in [
                ({"sequence": 2}, {}),
                ({"fsdp": 2, "sequence": 2, "tensor": 2}, {}),
                ({"pipeline": 2, "sequence": 2}, {"pipeline": {"schedule": "zb_h1"}}),
                ({"pipeline": 2, "tensor": 2}, {"lora": {"rank": 4, "quantize": "int8"}, "remat": "full"}),
                ({"pipeline": 2, "expert": 2}, {"start": MIXTRAL}),
            ]
        ),
    ],
)
def test_devices_change_no_preferences(tmp_path, mesh, changes):
    common = {"optimizer": {"learning_rate": 0.003, "eps": 1e-4}, "evaluation": {"every": 2}, "steps": 2}
    config = preferences(tmp_path, **common | changes, microbatches=2)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, holdout=0.4))
    alone = list(train(config, tmp_path / "one"))
    spread = list(train(dataclasses.replace(config, mesh=MeshSection(**mesh)), tmp_path / "all"))
    for name in ("loss", "gradient_norm", "margin"):
        one, other = ([getattr(r, name) for r in records] for records in (alone, spread))
        np.testing.assert_allclose(other, one, atol=2e-5, rtol=1e-4, err_msg=name)
    # Before the first update the margins are 0 up to rounding.
    assert [r.accuracy for r in spread[1:]] == [r.accuracy for r in alone[1:]]
    assert spread[1].evaluation_loss == pytest.approx(alone[1].evaluation_loss, abs=2e-5)
    one, other = tensors(tmp_path / "one"), tensors(tmp_path / "all")
    for name in one:
        np.testing.assert_allclose(other[name], one[name], atol=2e-5, err_msg=name)


def test_pairs_that_cannot_be_read_are_named(tmp_path):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    lines = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"chosen": chat, "rejected": chat},
        {"prompt": "a", "chosen": "b"},
        {"chosen": "b", "rejected": "c"},
        {"chosen": chat, "rejected": "c"},
        {"chosen": chat, "rejected": chat[:1]},
    ]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "y.txt").write_text("plain")
    found = list(pairs(SourceSection(paths=(str(tmp_path),)), DpoSection()))
    assert found[:2] == [Pair("a", "b", "c"), Pair("", Chat(chat), Chat(chat))]
    bad = [str(b) for b in found[2:] if isinstance(b, Bad)]
    for text in (":3: no column 'rejected'", ":4: no text in column 'prompt'", ":5: columns", ":6: the last message"):
        assert any(text in b for b in bad), text
    assert "plain text has no columns" in bad[-1]


def test_preferences_need_a_model_to_start_from(tmp_path):
    with pytest.raises(ConfigError, match=r"set model\.start_from"):
        next(train(small(tmp_path, objective="dpo"), tmp_path / "run"))
