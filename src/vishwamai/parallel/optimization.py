"""The `optimization` dict: six keys that training, serving and planning read alike, each stated once.

A key sets one setting of each command, or has no effect there and says why. `explain_optimization` shows both.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, Literal, get_args

from vishwamai.core.arguments import described
from vishwamai.core.config import check_block_size, kernel_config
from vishwamai.core.errors import ConfigError, KernelError, UnsupportedError

Purpose = Literal["training", "serving", "function"]
"""What reads the dict: `train`, or `generate` and `serve`, or a function of the user's."""

_GRADIENTS = "no effect: only training takes gradients"


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a key sets.

    Attributes:
      name: the setting's name, as its command writes it.
      on: its value where the key is true. off: its value where the key is false.
      words: effect of that value.
      exclusive: a false key allows `off` alone; otherwise every value except `on`.
    """

    name: str
    on: Any
    off: Any
    words: str
    exclusive: bool = False

    @property
    def separate(self) -> bool:
        """Whether other means than a setting's value apply it: `Optimization.kernels`, `Optimization.over`."""
        return self.name == "mesh" or self.name.startswith("KernelConfig")

    def of(self, value: object) -> Any:
        """The setting for a value of the key; what is neither true nor false is the setting's own value."""
        return (self.on if value else self.off) if isinstance(value, bool) else value

    def agrees(self, value: object, setting: object) -> bool:
        """Whether a setting that the user gave agrees with a value of the key."""
        if value is False and not self.exclusive:
            return setting != self.on
        return setting == self.of(value)


def _key(doc: str, **purposes: Setting | str) -> Any:
    """A key with what it sets for each purpose, or why it has no effect there."""
    assert set(purposes) == set(get_args(Purpose)), purposes
    return dataclasses.field(default=None, metadata={"doc": doc, **purposes})


def _kernels(name: str, on: bool | None, off: bool | None, words: str) -> dict[str, Setting]:
    return dict.fromkeys(get_args(Purpose), Setting(f"KernelConfig.{name}", on, off, words))


def _pages(pages: str) -> dict[str, str]:
    return dict.fromkeys(("training", "function"), f"no effect: {pages}")


@dataclasses.dataclass(frozen=True)
class Optimization:
    """What is optimized, in training, serving and planning alike. A key that is None leaves its setting alone.

    Attributes:
      use_fp8: 8-bit products: `precision: fp8` in training, weights in fp8 in serving. False: none.
      gradient_checkpointing: True recomputes each block in the backward pass (`remat: block_wise`); a text is a policy
        of `remat`, such as "full"; False recomputes nothing.
      attention_memory_efficient: True: blocked attention, the default. False: the plain XLA implementation, which holds
        the score matrix.
      kv_cache_fp8: keys and values in fp8 while serving. False: not in fp8.
      block_size: edge of the kernels' tiles, in elements.
      use_pjit: True: one program over a mesh of all devices. False: one device.

    Raises:
      ConfigError: a value has another type than its key.

    >>> Optimization(use_fp8=True, gradient_checkpointing="full").settings("training")
    {'precision': 'fp8', 'remat': 'full'}
    >>> Optimization.of({"use_fp9": True})
    Traceback (most recent call last):
    ...
    vishwamai.core.errors.ConfigError: optimization: unknown key 'use_fp9'; did you mean use_fp8? The keys are ...
    """

    __pydantic_config__ = {"extra": "forbid"}

    use_fp8: bool | None = _key(
        "8-bit products (precision: fp8)",
        training=Setting("precision", "fp8", "plain", "products of the layers in e4m3, their gradients in e5m2"),
        serving=Setting("quantize", "fp8", None, "weights of the layers' products in e4m3, with a scale for a column"),
        function="no effect: the dtypes of a function are its own",
    )
    gradient_checkpointing: bool | str | None = _key(
        "true recomputes each block in the backward pass (remat: block_wise); or a policy of remat, such as full",
        training=Setting("remat", "block_wise", "none", "what the backward pass keeps; it recomputes the rest", True),
        serving=_GRADIENTS,
        function="no effect: wrap the function in jax.checkpoint",
    )
    attention_memory_efficient: bool | None = _key(
        "true: blocked attention, the default; false: the plain implementation, which holds the score matrix",
        **_kernels("use_flash", True, False, "True: blocked attention; False: plain XLA, which holds the score matrix"),
    )
    kv_cache_fp8: bool | None = _key(
        "keys and values in fp8; serving alone stores them",
        serving=Setting("kv_dtype", "fp8", None, "stored keys and values in e4m3, with a scale for a layer and head"),
        **_pages("only serving stores keys and values"),
    )
    block_size: int | None = _key(
        "edge of the kernels' tiles, in elements; null: tuned or by rule",
        **_kernels("block_size", None, None, "edge of the tiles, rounded to what each kernel can tile"),
    )
    use_pjit: bool | None = _key(
        "true: one program over a mesh of all devices (mesh.fsdp, unless mesh names them all); false: one device",
        training=Setting("mesh", "all devices", "one device", "over mesh.fsdp, unless the mesh names all of them"),
        serving=Setting("mesh", "all devices", "one device", "over the axis tensor, unless the mesh names all of them"),
        function="no effect: give the function's arguments shardings",
    )

    def __post_init__(self) -> None:
        for name in ("use_fp8", "attention_memory_efficient", "kv_cache_fp8", "use_pjit"):
            if not isinstance(value := getattr(self, name), bool | None):
                raise ConfigError(f"optimization: {name} is {described(value)}; pass true or false.")
        policy = self.gradient_checkpointing
        if not isinstance(policy, bool | str | None) or policy == "":
            raise ConfigError(
                f"optimization: gradient_checkpointing is {described(policy)}; pass true, false or a policy such as "
                '"full".'
            )
        if self.block_size is not None:
            try:
                object.__setattr__(self, "block_size", check_block_size("optimization: block_size", self.block_size))
            except KernelError as error:
                raise ConfigError(str(error)) from None

    @classmethod
    def of(cls, keys: Optimization | Mapping[str, Any] | None) -> Optimization:
        """The keys of a dict, or of the section "optimization" that is all of it; None has none.

        Raises:
          ConfigError: a key is unknown (the text names the nearest), or a value has another type than its key.
        """
        if keys is None or isinstance(keys, Optimization):
            return keys or cls()
        if not isinstance(keys, Mapping):
            raise ConfigError(f'optimization: expected a dict such as {{"use_fp8": True}}, not {described(keys)}.')
        if list(keys) == ["optimization"]:
            return cls.of(keys["optimization"])
        names = [field.name for field in dataclasses.fields(cls)]
        for name in keys:
            if name not in names:
                near = difflib.get_close_matches(str(name), names, n=1)
                hint = f"did you mean {near[0]}? " if near else ""
                raise ConfigError(f"optimization: unknown key {name!r}; {hint}The keys are {', '.join(names)}.")
        return cls(**keys)

    @classmethod
    def of_loaded(cls, name: str, keys: Optimization | Mapping[str, Any] | None) -> Optimization:
        """`of`, for what takes a model that is loaded already.

        Raises:
          UnsupportedError: a key takes effect while a model is loaded. `name`: of the caller, for the text.
        """
        optimization = cls.of(keys)
        for key in ("use_fp8", "use_pjit"):
            if getattr(optimization, key) is not None:
                raise UnsupportedError(f"{name}: {key} takes effect while a model is loaded; pass it to plan_load.")
        return optimization

    @property
    def explicit(self) -> dict[str, Any]:
        """The keys that are set, with their values."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def settings(self, purpose: Purpose, explicit: Mapping[str, object] | None = None) -> dict[str, Any]:
        """What the keys set, by setting; the kernels' configuration and the mesh apart.

        Args:
          purpose: the program's purpose.
          explicit: settings that the user gave, which must agree with the keys; None for none.

        Raises:
          ConfigError: a setting that was given contradicts a key; the text names both.

        >>> Optimization(use_fp8=True).settings("serving", {"quantize": "int8"})
        Traceback (most recent call last):
        ...
        vishwamai.core.errors.ConfigError: optimization: use_fp8=true asks for quantize=fp8, but quantize=int8 was ...
        """
        values = {}
        for field in dataclasses.fields(self):
            value, setting = getattr(self, field.name), field.metadata[purpose]
            if value is None or isinstance(setting, str) or setting.separate:
                continue
            if explicit is None or explicit.get(setting.name) is None:
                values[setting.name] = setting.of(value)
            elif not setting.agrees(value, explicit[setting.name]):
                raise ConfigError(
                    f"optimization: {field.name}={_formatted(value)} asks for {setting.name}="
                    f"{_formatted(setting.of(value))}, but {setting.name}={_formatted(explicit[setting.name])} was "
                    "given; leave one of them out."
                )
        return values

    def over(self, devices: int, mesh: int, name: str) -> bool:
        """Whether the mesh becomes one of all devices.

        Args:
          devices: how many there are.
          mesh: devices of the mesh that the user gave; 1 for none.
          name: text of the error for that mesh.

        Raises:
          ConfigError: the mesh contradicts `use_pjit`; the text names both.

        >>> Optimization(use_pjit=True).over(8, 1, "mesh"), Optimization(use_pjit=True).over(8, 8, "mesh")
        (True, False)
        """
        if self.use_pjit is False and mesh > 1:
            raise ConfigError(
                f"optimization: use_pjit=false asks for one device, but {name} has {mesh}; leave one of them out."
            )
        if self.use_pjit and mesh not in (1, devices):
            raise ConfigError(
                f"optimization: use_pjit=true asks for a mesh of all {devices} devices, but {name} has {mesh}; leave "
                "one of them out."
            )
        return bool(self.use_pjit) and mesh == 1 < devices

    @property
    def of_kernels(self) -> Optimization:
        """The keys of kernels alone, where the settings of the others are in place."""
        return Optimization(attention_memory_efficient=self.attention_memory_efficient, block_size=self.block_size)

    def kernels(self) -> contextlib.AbstractContextManager[Any]:
        """Puts the keys of kernels in force while a program is traced; other fields of the ambient configuration stay.

        >>> from vishwamai.core.config import current_config
        >>> with Optimization(block_size=256, attention_memory_efficient=False).kernels():
        ...     print(current_config().block_size, current_config().use_flash)
        256 False
        """
        fields = {"block_size": self.block_size, "use_flash": self.attention_memory_efficient}
        return kernel_config(**{name: value for name, value in fields.items() if value is not None})


@dataclasses.dataclass(frozen=True)
class OptimizationEffect:
    """What one key does.

    Attributes:
      key: its name. value: None where it is not set.
      sets: the setting, such as "precision=fp8"; None where the key has no effect or is not set.
      words: meaning of that value, or the reason why it has no effect.
    """

    key: str
    value: Any
    sets: str | None
    words: str


@dataclasses.dataclass(frozen=True)
class OptimizationReport:
    """What every key of the `optimization` dict does for a purpose. Printing it gives the table."""

    purpose: Purpose
    effects: tuple[OptimizationEffect, ...]

    def __str__(self) -> str:
        lines = [f"optimization, {'a ' if self.purpose == 'function' else ''}{self.purpose}:"]
        for effect in self.effects:
            name = effect.key if effect.value is None else f"{effect.key}={_formatted(effect.value)}"
            lines.append(f"  {name:32} {effect.words if effect.sets is None else f'{effect.sets}: {effect.words}'}")
        return "\n".join(lines)


def explain_optimization(
    optimization: Optimization | Mapping[str, object] | None, purpose: Purpose = "training", devices: int | None = None
) -> OptimizationReport:
    """What each key of an `optimization` dict does; `vishwamai train`, `serve`, `generate`, `plan` and `explain` print
    it.

    Args:
      optimization: the dict, or an `Optimization`.
      purpose: "training", "serving" or "function".
      devices: how many there are, for `use_pjit`; None: not known.

    Raises:
      ConfigError: a key is unknown, a value has another type than its key, or the purpose is not one of the three.

    >>> print(explain_optimization({"use_fp8": True, "kv_cache_fp8": True}, "training"))
    optimization, training:
      use_fp8=true                     precision=fp8: products of the layers in e4m3, their gradients in e5m2
      gradient_checkpointing           not set
      attention_memory_efficient       not set
      kv_cache_fp8=true                no effect: only serving stores keys and values
      block_size                       not set
      use_pjit                         not set
    """
    keys = Optimization.of(optimization)
    if not isinstance(purpose, str) or purpose not in get_args(Purpose):
        raise ConfigError(f"explain_optimization: purpose is {described(purpose)}; pass one of {get_args(Purpose)}.")
    if devices is not None and (isinstance(devices, bool) or not isinstance(devices, int) or devices < 1):
        raise ConfigError(f"explain_optimization: devices is {described(devices)}; pass their number, or None.")

    def effect(field: dataclasses.Field[object]) -> OptimizationEffect:
        value, setting = getattr(keys, field.name), field.metadata[purpose]
        if value is None:
            return OptimizationEffect(field.name, None, None, "not set")
        if isinstance(setting, str):
            return OptimizationEffect(field.name, value, None, setting)
        words = setting.words
        if setting.name == "mesh":
            words = "nothing is split" if value is False else words
            words = "this is the only one, so nothing is split" if value and devices == 1 else words
        elif value is False and not setting.exclusive and not setting.separate:
            words = f"a contradicting {setting.name}={_formatted(setting.on)} is an error"
        count = f" ({devices})" if setting.name == "mesh" and value and devices is not None else ""
        return OptimizationEffect(field.name, value, f"{setting.name}={_formatted(setting.of(value))}{count}", words)

    return OptimizationReport(purpose, tuple(map(effect, dataclasses.fields(keys))))


def _formatted(value: object) -> str:
    """A value as YAML and the command line write it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)
