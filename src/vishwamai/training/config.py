"""What a training run is, as frozen values: one dataclass for each section of the YAML file, each key with its doc.

`vishwamai.training.config_file` reads and prints them. A key's type, default and doc are stated here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pydantic

from vishwamai.parallel.optimization import Optimization

Positive = Annotated[int, pydantic.Field(ge=1)]
Count = Annotated[int, pydantic.Field(ge=0)]
Share = Annotated[float, pydantic.Field(ge=0, lt=1)]
Factor = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
AboveZero = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
ComputeDtype = Literal["auto", "float32", "bfloat16", "float16"]

AUTO = "auto"
"""`compute_dtype.resolved` has the dtype that it stands for."""


def key(doc: str, default: Any = dataclasses.MISSING, factory: Callable[[], Any] | None = None) -> Any:
    """A field with its doc, and its default or what makes it."""
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata={"doc": doc})
    return dataclasses.field(default=default, metadata={"doc": doc})


class _Section:
    """Unknown keys are errors in every section."""

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid")


@dataclasses.dataclass(frozen=True)
class ModelSection(_Section):
    start_from: str | None = key(
        "directory of a Hugging Face checkpoint to start from, or ORG/NAME[@REVISION] of the Hub; null starts from "
        "nothing",
        None,
    )
    config: dict[str, Any] | None = key(
        "keys of a Hugging Face config.json (model_type, hidden_size, ...); vocab_size defaults to the tokenizer's",
        None,
    )
    compute_dtype: ComputeDtype = key(
        "dtype of activations and products: auto (bfloat16 where the chip multiplies it, else float32), float32, "
        "bfloat16, or float16, which is for GPUs and CPUs and scales the loss by optimizer.loss_scale",
        AUTO,
    )
    param_dtype: Literal["float32", "bfloat16"] = key("dtype of the parameters that the optimizer updates", "float32")
    param_rounding: Literal["nearest", "stochastic"] = key(
        "how a step is added to bfloat16 parameters: nearest loses steps below 1/512 of a parameter, stochastic is "
        "right in the mean",
        "nearest",
    )
    reduce_dtype: Literal["float32", "bfloat16"] = key(
        "dtype in which the devices of mesh.fsdp add up the gradients of what they gather; embeddings and routers stay "
        "in float32",
        "float32",
    )


@dataclasses.dataclass(frozen=True)
class TokenizerSection(_Section):
    path: str | None = key(
        "tokenizer.json, or a directory that holds one; null takes that of model.start_from, and trains a byte-level "
        "BPE for a new model",
        None,
    )
    vocab_size: Positive = key("vocab of the BPE that is trained", 4096)
    end_of_text: str | None = key(
        "token after each document, unless a chat template ends it; null: eos_token of tokenizer_config.json, else "
        "<|endoftext|>, which the BPE that is trained contains",
        None,
    )
    add_bos: bool | None = key(
        "begin documents with the BOS token; null: as the tokenizer does, and chats as their template does", None
    )
    sample_bytes: Positive = key("bytes of text that the BPE is trained on", 20_000_000)


@dataclasses.dataclass(frozen=True)
class SourceSection(_Section):
    paths: tuple[str, ...] = key(
        "files, directories or glob patterns: text, .json, .jsonl, .csv (also .gz), .parquet, or a directory that "
        "`datasets` saved; {stdlib} is the directory of Python's standard library",
        (),
    )
    dataset: str | None = key(
        "dataset of the Hub in place of paths: ORG/NAME[@REVISION], read through the library `datasets`", None
    )
    subset: str | None = key("configuration of dataset, where it has several", None)
    split: str = key("split of dataset", "train")
    streaming: bool = key("read the records of dataset while they arrive; false downloads all files first", True)
    max_records: Positive | None = key("records to read, unreadable ones among them; null: all", None)
    exclude: tuple[str, ...] = key("glob patterns of files to leave out", ())
    format: Literal["auto", "text", "json", "jsonl", "csv", "parquet", "datasets"] = key(
        "auto goes by the suffix", "auto"
    )
    column: str = key(
        "column that holds the text, or the list of chat messages; rows without a column `text` may have `messages`, "
        "`conversations`, `prompt` and `completion`, or `instruction`, `input` and `output`",
        "text",
    )
    tools: str = key("column of the tools that a row's chat may call: a list of JSON Schemas, or its JSON", "tools")
    weight: AboveZero = key("share of this source in the mixture, relative to the other sources", 1.0)
    max_record_mib: Positive = key(
        "MiB that a line of .jsonl, a record of .parquet or of `datasets`, or the content of a .gz file may take; a "
        "larger one is unreadable",
        64,
    )
    follow_links: bool = key("read links in a directory that lead to files outside of it; false names them", False)


@dataclasses.dataclass(frozen=True)
class DataSection(_Section):
    sources: tuple[SourceSection, ...] = key("where the documents come from, and in which shares", ())
    sequence_length: Annotated[int, pydantic.Field(ge=2)] = key("tokens in a row", 512)
    packing: Literal["concat", "best_fit"] = key(
        "concat: documents one after another, cut at row ends; best_fit: whole documents, the longest first, rows "
        "padded",
        "concat",
    )
    holdout: Share = key("share of the documents that is never trained on, for the evaluation loss", 0.0)
    chat_template: str | None = key(
        "Jinja file that turns a list of messages into text, of which only the assistant's turns count in the loss; "
        "null takes the tokenizer's own template",
        None,
    )
    max_bad_records: Count = key("unreadable records after which preparation stops; all are counted and named", 100)


@dataclasses.dataclass(frozen=True)
class GroupSection(_Section):
    pattern: str = key("regular expression that is searched in a parameter's path, such as layers/0/mlp/down/kernel")
    weight_decay: Factor | None = key("weight decay of this group; null keeps the optimizer's", None)
    learning_rate_scale: Factor = key("factor of the learning rate; 0 freezes the group", 1.0)


@dataclasses.dataclass(frozen=True)
class OptimizerSection(_Section):
    name: Literal["adamw", "lion", "muon", "adafactor", "sgd"] = key("update rule, from optax", "adamw")
    learning_rate: Factor = key("peak learning rate", 1e-3)
    schedule: Literal["cosine", "linear", "constant", "wsd"] = key(
        "after the warmup; wsd: constant, then linear over the last fifth", "cosine"
    )
    warmup_steps: Count = key("steps of linear warmup; the last of them has the peak, the first its share of it", 0)
    end_factor: Annotated[float, pydantic.Field(ge=0, le=1)] = key(
        "learning rate of the last step, relative to the peak", 0.1
    )
    b1: Share = key("decay of the first moment", 0.9)
    b2: Share = key("decay of the second moment", 0.95)
    eps: AboveZero = key("added to the root of the second moment", 1e-8)
    weight_decay: Factor = key("decoupled weight decay, of parameters with two or more axes", 0.1)
    groups: tuple[GroupSection, ...] = key("exceptions by path; the first group that matches holds", ())
    clip_norm: AboveZero | None = key("largest global norm of the gradients; null does not clip", 1.0)
    moment_dtype: Literal["float32", "bfloat16", "int8"] = key(
        "dtype of the first moment; int8 (adamw alone): both moments in 8 bits, with a scale for every 128 numbers",
        "float32",
    )
    loss_scale: AboveZero = key(
        "first factor of the loss with model.compute_dtype float16; halved where gradients overflow, doubled after "
        "2000 steps without",
        2.0**15,
    )
    ema_decay: Share | None = key(
        "decay of a moving average of the parameters, which is then evaluated and exported", None
    )


@dataclasses.dataclass(frozen=True)
class GuardSection(_Section):
    max_norm: AboveZero | None = key(
        "a step with a larger gradient norm is skipped; null skips non-finite ones only", None
    )
    max_skips: Positive = key("steps skipped in a row after which training stops with an error", 10)


@dataclasses.dataclass(frozen=True)
class LossSection(_Section):
    z_loss: Factor = key("weight of the squared logsumexp", 0.0)
    load_balance: Factor = key("weight of the experts' load-balancing loss, the mean over their layers", 0.0)
    router_z_loss: Factor = key("weight of the squared logsumexp of the routers, the mean over their layers", 0.0)
    bias_rate: Factor = key(
        "by how much a step moves the routers' correction towards underused experts (DeepSeek V3), without a loss", 0.0
    )


@dataclasses.dataclass(frozen=True)
class Fp8Section(_Section):
    scaling: Literal["delayed", "current", "block"] = key(
        "where scales come from: delayed (largest magnitudes of earlier steps), current (of the tensor itself), block "
        "(one for every 128 numbers)",
        "delayed",
    )
    margin: Share = key("room above the largest magnitude, as a share of it", 0.01)
    history: Positive = key("steps over which delayed scaling takes the largest magnitude", 16)
    dynamic_scale: bool = key("scales follow the magnitudes; false keeps those of the first step", True)


@dataclasses.dataclass(frozen=True)
class CheckpointSection(_Section):
    every: Positive = key("steps between checkpoints", 100)
    keep: Positive = key("checkpoints that are kept", 3)
    remote: str | None = key(
        "address such as gs://bucket/run or s3://bucket/run, where checkpoints and the model are copied to; --resume "
        "goes on from the newest checkpoint there where the directory of the run has none that is newer",
        None,
    )


@dataclasses.dataclass(frozen=True)
class EvaluationSection(_Section):
    every: Count = key("steps between evaluations on the held-out documents; the last step has one, too; 0: never", 0)
    batches: Positive = key("batches in an evaluation", 8)


@dataclasses.dataclass(frozen=True)
class SampleSection(_Section):
    prompt: str | None = key("text that the trained model continues at the end; null: none", None)
    tokens: Positive = key("tokens to generate", 64)


@dataclasses.dataclass(frozen=True)
class LoraSection(_Section):
    rank: Count = key("rank of the adapters; 0 trains all parameters", 0)
    alpha: AboveZero = key("the adapters' product is multiplied by alpha / rank", 16.0)
    targets: str = key(
        "regular expression that is searched in the paths of the layers' matrices",
        r"/(query|key|value|output|gate|up|down)$",
    )
    quantize: Literal["int8", "int4", "fp8", "keep"] | None = key(
        "format of the frozen weights; keep: the numbers of a checkpoint that is published quantized; null: plain ones",
        None,
    )


@dataclasses.dataclass(frozen=True)
class DpoSection(_Section):
    beta: AboveZero = key("how closely the model stays to the one that it started from; larger is closer", 0.1)
    prompt: str = key("column of the text before both answers; rows of chat messages need none", "prompt")
    chosen: str = key("column of the answer that was preferred: text, or a list of chat messages", "chosen")
    rejected: str = key("column of the other answer", "rejected")


@dataclasses.dataclass(frozen=True)
class PipelineSection(_Section):
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v"] = key(
        "in which order stages compute the microbatches (docs/parallel-pipelines.md)", "1f1b"
    )
    chunks: Positive = key("parts of the model on each stage, with interleaved_1f1b", 2)


@dataclasses.dataclass(frozen=True)
class MeshSection(_Section):
    pipeline: Positive = key("stages over which the layers are split; microbatches go from stage to stage", 1)
    data: Positive = key("devices over which the batch is split", 1)
    fsdp: Positive = key("devices over which batch, parameters and optimizer state are split", 1)
    expert: Positive = key("devices over which batch and experts are split; tokens travel to their experts", 1)
    sequence: Positive = key("devices over which each row is split; keys and values travel around a ring", 1)
    tensor: Positive = key("devices over which heads, feed-forward networks and the vocab are split", 1)


@dataclasses.dataclass(frozen=True)
class LogSection(_Section):
    every: Positive = key("steps between lines of metrics.jsonl", 1)
    tensorboard: bool = key("also write TensorBoard's events, into tensorboard/", False)
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = key(
        "where the numbers of each record go as well: tensorboard (into tensorboard/), wandb, trackio", ()
    )
    project: str = key("project of the run in wandb and trackio", "vishwamai")


@dataclasses.dataclass(frozen=True)
class TrainConfig(_Section):
    model: ModelSection = key("the model", factory=ModelSection)
    tokenizer: TokenizerSection = key("the tokenizer", factory=TokenizerSection)
    data: DataSection = key("documents, and how rows are made of them", factory=DataSection)
    optimizer: OptimizerSection = key("update rule, schedule and clipping", factory=OptimizerSection)
    precision: Literal["plain", "fp8"] = key(
        "products of the layers: plain (in model.compute_dtype), or fp8 (e4m3 forward, e5m2 gradients)", "plain"
    )
    fp8: Fp8Section = key("scales of 8-bit products, with precision: fp8", factory=Fp8Section)
    guard: GuardSection = key("what happens to non-finite and exploding gradients", factory=GuardSection)
    loss: LossSection = key("terms of the loss", factory=LossSection)
    lora: LoraSection = key("adapters in place of all parameters", factory=LoraSection)
    checkpoint: CheckpointSection = key("checkpoints", factory=CheckpointSection)
    evaluation: EvaluationSection = key("loss on held-out documents", factory=EvaluationSection)
    sample: SampleSection = key("a sample of the trained model", factory=SampleSection)
    mesh: MeshSection = key("devices", factory=MeshSection)
    pipeline: PipelineSection = key("the schedule of the stages, with mesh.pipeline", factory=PipelineSection)
    log: LogSection = key("what is written during training", factory=LogSection)
    objective: Literal["next_token", "dpo"] = key(
        "next_token, or dpo: the answer of a pair that people preferred becomes likelier than the other", "next_token"
    )
    dpo: DpoSection = key("preferences, with objective: dpo", factory=DpoSection)
    steps: Positive = key("updates of the parameters", 1000)
    batch_size: Positive = key("rows in a step, over all devices and microbatches", 8)
    microbatches: Positive = key("parts of a batch that are computed one after another", 1)
    remat: str = key(
        "what the backward pass keeps: none (recomputes nothing), dots, block_wise, full (recomputes all), offload, "
        "auto:<bytes> (the first of these four whose step fits, such as auto:12GiB), or names of activations with "
        "commas between them",
        "none",
    )
    optimization: Optimization = key(
        "the six keys that training, serving and planning share; null leaves a setting alone", factory=Optimization
    )
    compiler_options: dict[str, Any] | None = key(
        "options of the TPU compiler for the step, by name; null: collectives on the SparseCores where the chip has "
        "them; {}: none",
        None,
    )
    seed: Count = key("seed of parameters and data order", 0)

    def __post_init__(self) -> None:
        # What differs from its default was given; `config_file.from_dict` also knows of defaults that were written.
        settings = {name: getattr(self, name) for name in OPTIMIZED if getattr(self, name) != DEFAULTS[name]}
        for name, value in self.optimization.settings("training", settings).items():
            object.__setattr__(self, name, value)
        sizes = dataclasses.astuple(self.mesh)
        self.optimization.over(math.prod(sizes), math.prod(sizes), "the section mesh")


OPTIMIZED = ("precision", "remat")
"""Keys that the section `optimization` sets too."""

DEFAULTS = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
