"""The model card of a trained model: README.md of its repository on the Hub."""

from __future__ import annotations

from collections.abc import Sequence

import yaml

import vishwamai
from vishwamai.models.hub import HubModel
from vishwamai.training.compute_dtype import resolved
from vishwamai.training.config import TrainConfig
from vishwamai.training.records import Record

_TEXT = """---
{header}---

# {name}

{origin} by vishwamai {version}.

```sh
vishwamai generate {repo} --prompt "Once upon a time"
```

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{repo}")
model = AutoModelForCausalLM.from_pretrained("{repo}")
```

## Training

| | |
|---|---|
{rows}

The authors of the model have not stated its data, its licence and its limits here; add them.
"""


def model_card(config: TrainConfig, records: Sequence[Record], repo: str) -> str:
    """Markdown with the Hub's header. It has no path of this machine, and nothing of the data but their count.

    Args:
      config: configuration of the run.
      records: records of the run, at least one.
      repo: "ORG/NAME", where the model goes.
    """
    base = None if config.model.start_from is None else HubModel.parse(config.model.start_from)
    header = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["vishwamai", *(["lora"] if config.lora.rank else []), *(["dpo"] if config.objective == "dpo" else [])],
    }
    if base is not None:
        header["base_model"] = base.repo
    last = records[-1]
    evaluated = [record.evaluation_loss for record in records if record.evaluation_loss is not None]
    rows = {
        "steps": f"{last.step:,}",
        "tokens": f"{last.tokens:,}",
        "batch": f"{config.batch_size} rows of {config.data.sequence_length} tokens",
        "learning rate": f"{config.optimizer.learning_rate:g}",
        "compute dtype": resolved(config).model.compute_dtype,
        "sources": str(len(config.data.sources)),
        "last loss": f"{last.loss:.4f}",
        **({"held-out loss": f"{evaluated[-1]:.4f}"} if evaluated else {}),
    }
    origin = "Trained from nothing"
    if config.model.start_from is not None:
        origin = "Fine-tuned" if base is None else f"Fine-tuned from {base}"
    return _TEXT.format(
        header=yaml.safe_dump(header, sort_keys=False),
        name=repo.rpartition("/")[2],
        origin=origin,
        version=vishwamai.__version__,
        repo=repo,
        rows="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
    )
