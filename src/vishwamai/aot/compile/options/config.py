"""A set of options that the installed JAX and libtpu have accepted, and the ways to use it."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import math
from collections.abc import Mapping
from typing import Any

import jax

from vishwamai.aot.compile import libtpu
from vishwamai.aot.compile.options.ask import ask
from vishwamai.aot.compile.options.table import TPU_OPTIONS
from vishwamai.core.arguments import checked, described
from vishwamai.core.errors import ConfigError, DeviceError
from vishwamai.core.jax_private import devices_are_taken

BEFORE_BACKEND = frozenset(
    {
        "jax_cpu_collectives_implementation",
        "jax_cpu_enable_async_dispatch",
        "jax_cross_host_transfer_socket_address",
        "jax_cross_host_transfer_timeout_seconds",
        "jax_cross_host_transfer_transfer_size",
        "jax_cross_host_transport_addresses",
        "jax_cuda_visible_devices",
        "jax_force_dcn_cross_host_transfers",
        "jax_mock_gpu_topology",
        "jax_num_cpu_devices",
        "jax_oneapi_visible_devices",
        "jax_pjrt_client_create_options",
        "jax_platform_name",
        "jax_platforms",
        "jax_rocm_visible_devices",
        "jax_sort_devices_by_process_index",
        "jax_xla_backend",
        "mock_num_gpu_processes",
    }
)
"""Options of JAX that it reads when it makes a backend, and not afterwards."""

_WORDS = {"bool": "True or False", "auto": 'True, False or "auto"', "int": "an integer", "float": "a number"}


@dataclasses.dataclass(frozen=True)
class RuntimeConfig:
    """Options of the TPU compiler and of JAX; `configure_runtime_options` makes and checks one.

    It is hashable, and equal sets are equal whatever the order of their options.

    Attributes:
        compiler: options of the compiler with their values as text, by name.
        settings: config options of JAX with their values, by name.
        of_xla: options of `compiler` that belong to XLA itself, and so to XLA_FLAGS.
        versions: version of each package that accepted the options, by name.
    """

    compiler: tuple[tuple[str, str], ...] = ()
    settings: tuple[tuple[str, bool | int | float | str], ...] = ()
    of_xla: frozenset[str] = frozenset()
    versions: tuple[tuple[str, str], ...] = ()

    @property
    def compiler_options(self) -> dict[str, str]:
        """For `jax.jit(fn, compiler_options=...)` on a TPU, and for `vishwamai.aot.compile_for`."""
        return dict(self.compiler)

    @property
    def jax_options(self) -> dict[str, bool | int | float | str]:
        """Options of `jax.config`, which `apply` sets."""
        return dict(self.settings)

    def environment(self, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
        """The variables that give a process these options: LIBTPU_INIT_ARGS, XLA_FLAGS and those of JAX.

        They are read when libtpu is loaded and JAX imported. `inherited` (such as `os.environ`) has flags to keep,
        which come first.
        """
        inherited = inherited or {}
        flags: dict[str, list[str]] = {}
        for name, value in self.compiler:
            variable = "XLA_FLAGS" if name in self.of_xla else "LIBTPU_INIT_ARGS"
            flags.setdefault(variable, [inherited.get(variable, "")]).append(f"--{name}={value}")
        variables = {variable: " ".join(parts).strip() for variable, parts in flags.items()}
        return variables | {name.upper(): option_text(value) for name, value in self.settings}

    def too_late(self) -> tuple[str, ...]:
        """What can no longer be set in this process, one sentence for each; empty before JAX has a backend."""
        if not devices_are_taken():
            return ()
        late = [
            f"{name}: JAX has read it for its backend; start a new process with environment()."
            for name, _ in self.settings
            if name in BEFORE_BACKEND
        ]
        if self.compiler:
            names = ", ".join(name for name, _ in self.compiler)
            late.append(
                f"{names}: the environment is no longer read; pass `compiler_options` to jax.jit or compile_for."
            )
        return tuple(late)

    def apply(self) -> None:
        """Sets the options of `jax_options` in `jax.config`, all or none.

        The compiler's are not global: pass `compiler_options` where a program is compiled.

        Raises:
            DeviceError: JAX has a backend, and has read one of them for it.
        """
        late = [name for name, _ in self.settings if name in BEFORE_BACKEND]
        if late and devices_are_taken():
            raise DeviceError(
                f"RuntimeConfig.apply: JAX has a backend and reads {', '.join(late)} no more; start a new process "
                "with environment()."
            )
        for name, value in self.settings:
            jax.config.update(name, value)

    def __str__(self) -> str:
        lines = [f"{name} = {option_text(value)}" for name, value in (*self.compiler, *self.settings)]
        return "\n".join(lines) or "no options"


def option_text(value: bool | int | float | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _refuse(name: str, value: object, words: str) -> ConfigError:
    return ConfigError(f"configure_runtime_options: `{name}` is {described(value)}; {words}")


def _check_type(name: str, value: object, kind: str, choices: tuple[str, ...] = (), least: int | None = None) -> None:
    """Raises ConfigError where a value is not of a kind."""
    if kind == "anything":
        raise _refuse(name, value, "it takes any text, which nothing can check, so set it in the environment yourself.")
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else None
    right = {
        "bool": isinstance(value, bool),
        "auto": isinstance(value, bool) or (isinstance(value, str) and value == "auto"),
        "int": isinstance(number, int) and -(2**63) <= number < 2**63,
        "float": number is not None and math.isfinite(number),
    }.get(kind, isinstance(value, str) and bool(value) and (not choices or value in choices))
    words = _WORDS.get(kind) or (f"one of {', '.join(map(repr, choices))}" if choices else "a text")
    if not right:
        raise _refuse(name, value, f"pass {words}.")
    if least is not None and number is not None and number < least:
        raise _refuse(name, value, f"pass {words} of {least} or more.")


def _check_plain(name: str, value: object) -> None:
    """What can be said of an option without asking: its name and, of one in the table, its type."""
    if not isinstance(name, str):
        raise ConfigError(f"configure_runtime_options: a name is {described(name)}; pass the names of options.")
    if not isinstance(value, bool | int | float | str) or (isinstance(value, float) and not math.isfinite(value)):
        raise _refuse(name, value, "pass True, False, a finite number or a text.")
    if "dump" in name:
        raise _refuse(name, value, "options that write files are not taken; set them in the environment yourself.")
    if not name.startswith("xla_") and name not in jax.config.values:
        raise _unknown(name)
    option = TPU_OPTIONS.get(name)
    if option is not None and option.kind != "choice":
        _check_type(name, value, option.kind, least=option.least)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise _refuse(name, value, "pass a number of 64 bits.")


def _unknown(name: str) -> ConfigError:
    versions = dict(_versions(name.startswith("xla_")))
    near = difflib.get_close_matches(name, (*TPU_OPTIONS, *jax.config.values), n=3, cutoff=0.6)
    prefixes = "options of the compiler begin with xla_, those of JAX with jax_"
    close = f"near: {', '.join(near)}" if near else prefixes
    installed = " and ".join(f"{package} {version}" for package, version in versions.items())
    return ConfigError(f"configure_runtime_options: {installed} has no option {name!r}; {close}.")


def _versions(of_compiler: bool) -> tuple[tuple[str, str], ...]:
    if not of_compiler:
        return (("jax", importlib.metadata.version("jax")),)
    versions = libtpu.versions()
    return tuple((name, versions[name]) for name in ("jax", "libtpu"))


@checked
def configure_runtime_options(tpu_config: Mapping[str, Any]) -> RuntimeConfig:
    """Checks options of the TPU compiler and of JAX against the installed versions.

    Names that begin with `xla_` go to libtpu's compiler, all others to `jax.config`. Types of the options in the table
    `vishwamai.aot.compile.options.table` are checked first. Then JAX and the compiler try every option with its value,
    one by one and together, on a small program for a v5e in a process of their own. Answers are kept on disk by
    version. An option outside the table is taken if the compiler knows it; the compiler's answers give its type.

    Args:
        tpu_config: values by name: True, False, a number, or a text.

    Returns:
        The options, in their three forms: `compiler_options`, `jax_options`, and `environment()`.

    Raises:
        ConfigError: the installed versions have no such option (with near names), or it does not take the value.
        DeviceError: options of the compiler, and libtpu is not installed.
        KernelError: the process that tries them fails.

    Example:
        >>> config = configure_runtime_options({"jax_default_matmul_precision": "highest"})
        >>> config.jax_options, config.environment()
        ({'jax_default_matmul_precision': 'highest'}, {'JAX_DEFAULT_MATMUL_PRECISION': 'highest'})
        >>> config = configure_runtime_options({"xla_tpu_scoped_vmem_limit_kib": 32768})  # doctest: +SKIP
        >>> config.environment()  # doctest: +SKIP
        {'LIBTPU_INIT_ARGS': '--xla_tpu_scoped_vmem_limit_kib=32768'}
    """
    options = tpu_config
    for name, value in options.items():
        _check_plain(name, value)
    names = sorted(options)
    of_compiler = [name for name in names if name.startswith("xla_")]
    texts = {name: option_text(options[name]) for name in of_compiler}
    questions: list[dict[str, object]] = [{"option": name, "value": texts[name]} for name in of_compiler]
    settings = [name for name in names if name not in texts]
    questions += [{"setting": name, "value": options[name]} for name in settings]
    if len(of_compiler) > 1:
        questions.append({"together": texts})
    replies = ask(questions)
    reply_of = dict(zip([*of_compiler, *settings], replies))
    for name in names:
        if reply_of[name].get("unknown"):
            raise _unknown(name)
        if "kind" in reply_of[name]:
            option = TPU_OPTIONS.get(name)
            least = option.least if option is not None else None
            _check_type(name, options[name], reply_of[name]["kind"], tuple(reply_of[name]["choices"]), least)
        refused = reply_of[name].get("refused")
        if refused is not None:
            raise _refuse(name, options[name], f"refused: {_first(refused)}")
    if len(of_compiler) > 1 and (refused := replies[-1].get("refused")) is not None:
        raise ConfigError(f"configure_runtime_options: the compiler refuses these options together: {_first(refused)}")
    return RuntimeConfig(
        compiler=tuple(texts.items()),
        settings=tuple((name, options[name]) for name in settings),
        of_xla=frozenset(name for name in of_compiler if reply_of[name]["owner"] == "xla"),
        versions=_versions(bool(of_compiler)) if names else (),
    )


def _first(text: str) -> str:
    return " ".join(text.split())[:500]


def compiler_options_of(function: str, options: Mapping[str, object] | RuntimeConfig | None) -> dict[str, str]:
    """What a public function hands to the compiler; a mapping is checked first.

    Raises:
        ConfigError: options of JAX among them; or as `configure_runtime_options`.
    """
    if options is None:
        return {}
    if not isinstance(options, RuntimeConfig):
        if not isinstance(options, Mapping):
            raise ConfigError(
                f"{function}: `compiler_options` is {described(options)}; pass a dict of options or a RuntimeConfig."
            )
        options = configure_runtime_options(options)
    if options.settings:
        raise ConfigError(
            f"{function}: `compiler_options` has options of JAX ({', '.join(options.jax_options)}), which are global; "
            "set them by RuntimeConfig.apply() and pass the others."
        )
    return options.compiler_options
