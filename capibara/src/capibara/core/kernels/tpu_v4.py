"""`TPUv4Kernels`. Every docstring stands in English and in Spanish. Cada docstring está en inglés y en español."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.core

from capibara.core.kernels import benchmark, operations
from capibara.core.kernels.measured import Runner, memory_in_use
from vishwamai.core import callers
from vishwamai.core.arguments import checked
from vishwamai.kernels import FallbackWarning, KernelConfig, KernelError

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float

_PRECISIONS: dict[str, dict[str, Any]] = {
    "bfloat16": {"use_bfloat16": True},
    "float16": {"use_fp16": True},
    "float32": {"precision": "highest"},
    "high": {"precision": "high"},
    "highest": {"precision": "highest"},
    "default": {},
}
_LEVELS = {"aggressive": True, "conservative": False}
_ALGORITHMS = {"tpu_optimized": None, "auto": None}


@checked
class TPUv4Kernels:
    """Transformer kernels as methods of one object; every call waits for its result and is measured.

    It runs on any machine: where there is no TPU, on what is there, and a `FallbackWarning` says so once an object.
    Inside `jax.jit` or `jax.grad` the methods are traced like any function, and not measured.

    Args:
      precision: mode of float32 products: "bfloat16" (operands rounded, sums float32), "float16" (no TPU has it),
        "float32", "high" (three bfloat16 products), "highest", or "default" (the ambient one).
      optimization_level: "aggressive" reads the tuned tiles, "conservative" takes the heuristic ones.
      enable_xla_fusion: each call is one jitted program, in which XLA fuses what surrounds a kernel. False runs JAX's
        operations one by one.
      memory_layout_optimization: the compiler chooses the memory layout of results instead of row-major order; one
        layout exists on the CPU, so there it changes nothing.
      seed: integer seed of the dropout keys, where a call gives none.

    Raises:
      KernelError: an option has no such value.

    Español:
      Núcleos de transformadores como métodos de un objeto; cada llamada espera su resultado y se mide. Funciona en
      cualquier máquina: donde no hay TPU usa lo que haya, y un `FallbackWarning` lo dice una vez por objeto. Dentro de
      `jax.jit` o `jax.grad` los métodos se trazan como cualquier función y no se miden.

      precision: de los productos float32: "bfloat16" (operandos redondeados, sumas en float32), "float16" (ninguna TPU
        lo tiene), "float32", "high"
      (tres productos bfloat16), "highest" o "default". optimization_level: "aggressive" lee las teselas ajustadas,
      "conservative" toma las heurísticas.
      enable_xla_fusion: cada llamada es un solo programa compilado; False ejecuta las operaciones de JAX una a una.
        memory_layout_optimization: el
      compilador elige la disposición en memoria de los resultados; en la CPU solo hay una. seed: semilla de las claves
      de dropout.

    >>> import jax.numpy as jnp
    >>> kernels = TPUv4Kernels(precision="bfloat16")
    >>> kernels.optimized_matmul(jnp.ones((64, 32)), jnp.ones((16, 32)), transpose_b=True).shape
    (64, 16)
    >>> kernels.get_tflops() > 0
    True
    """

    def __init__(
        self,
        precision: str = "bfloat16",
        optimization_level: str = "aggressive",
        enable_xla_fusion: bool = True,
        memory_layout_optimization: bool = True,
        *,
        seed: int = 0,
    ):
        tuned = _one_of("optimization_level", optimization_level, _LEVELS)
        config = KernelConfig(auto_optimize=tuned, **_one_of("precision", precision, _PRECISIONS))
        self._run = Runner(config, enable_xla_fusion, memory_layout_optimization)
        self._key = jax.random.key(seed)
        self._draws = 0
        platform = jax.devices()[0].platform
        if platform != "tpu":
            callers.warn(f"TPUv4Kernels: there is no TPU here, so it runs on {platform}", FallbackWarning)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the compiled programs and the figures, which belong to this process."""
        run = self._run
        key = jax.random.key_data(self._key), jax.random.key_impl(self._key)
        return {"run": (run.config, run.fuse, run.automatic_layouts), "key": key, "draws": self._draws}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._run = Runner(*state["run"])
        data, kind = state["key"]
        self._key = jax.random.wrap_key_data(data, impl=kind)
        self._draws = state["draws"]

    @property
    def device(self) -> str:
        """What it runs on. Dónde se ejecuta."""
        return jax.devices()[0].device_kind

    def flash_attention(
        self,
        query: Float[Array, "batch heads q_len head_dim"],
        key: Float[Array, "batch kv_heads kv_len head_dim"],
        value: Float[Array, "batch kv_heads kv_len v_dim"],
        attention_mask: Bool[Array, "#batch #heads #q_len #kv_len"] | None = None,
        dropout_rate: float = 0.0,
        causal: bool = False,
        sequence_parallel: bool = False,
        *,
        dropout_key: Any = None,
    ) -> Float[Array, "batch heads q_len v_dim"]:
        """Exact attention in linear memory; `vishwamai.flash_attention`.

        Args:
          query: `[batch, heads, q_len, head_dim]`; key and value `[batch, kv_heads, kv_len, ...]`, `heads` a multiple
            of `kv_heads`.
          attention_mask: bool, or integers of which nonzero means attend; broadcasts to
            `[batch, heads, q_len, kv_len]`.
          dropout_rate: share of the probabilities to drop.
          causal: query i sees no key after it.
          sequence_parallel: split the sequence over all devices, around which keys and values travel
            (`vishwamai.parallel.ring_attention`); on one device it changes nothing. Where the devices do not divide the
            keys, or `causal` has another number of queries than of keys, all keys are on every device, and dropout
            draws other bits than on one device.
          dropout_key: a random key; None takes the next one of the object's own, which is an error inside `jax.jit`.

        Returns:
          `[batch, heads, q_len, v_dim]` in the query's dtype.

        Raises:
          ShapeError: arguments do not fit one another; a floating mask; rows that do not divide over the devices.

        Español:
          Atención exacta con memoria lineal. attention_mask: bool o enteros (distinto de cero = atender). dropout_rate:
          proporción de probabilidades que se descartan. causal: la consulta i no ve claves posteriores.
          sequence_parallel: reparte la secuencia entre todos los dispositivos, y las claves y los valores circulan en
          anillo; con uno solo no cambia nada. Si las claves no se reparten por igual, cada dispositivo las tiene todas.
          dropout_key: clave aleatoria; None toma la siguiente del objeto.
        """
        parallel = sequence_parallel and jax.device_count() > 1
        function = operations.sequence_parallel_attention if parallel else operations.attention
        drop = self._next_key("flash_attention") if dropout_rate and dropout_key is None else dropout_key
        return self._run(
            "flash_attention",
            function,
            query,
            key,
            value,
            attention_mask,
            drop,
            dropout_rate=dropout_rate,
            causal=causal,
        )

    def optimized_matmul(
        self,
        a: Float[Array, "*batch M K"],
        b: Float[Array, "*batch K N"],
        transpose_a: bool = False,
        transpose_b: bool = False,
        precision: str | None = None,
        algorithm: str = "tpu_optimized",
    ) -> Float[Array, "*batch M N"]:
        """Matrix product; `vishwamai.gemm`.

        Args:
          a: `[..., M, K]`, or `[..., K, M]` with `transpose_a`; b: `[..., K, N]`, or `[..., N, K]` with `transpose_b`.
          precision: mode of this call's products; None takes the object's.
          algorithm: "tpu_optimized" or "auto" lets the library choose the kernel; any other text names an
            implementation ("xla", "pallas_tpu").

        Español:
          Producto de matrices. precision: como la del objeto, para esta llamada. algorithm: "tpu_optimized" o "auto"
          deja elegir a la biblioteca; cualquier otro texto nombra una implementación ("xla", "pallas_tpu").
        """
        return self._run(
            "optimized_matmul",
            operations.matmul,
            a,
            b,
            overrides=_overrides(precision),
            transpose_a=transpose_a,
            transpose_b=transpose_b,
            implementation=_ALGORITHMS.get(algorithm, algorithm),
        )

    def einsum_optimize(
        self, equation: str, operands: Sequence[Array], optimize: str = "optimal", memory_efficient: bool = False
    ) -> Array:
        """A sum of products; `vishwamai.einsum`.

        Args:
          equation: such as "bhnd,bhkd->bhnk".
          operands: the arrays.
          optimize: how opt_einsum finds the order of contraction: "optimal", "auto", "greedy".
          memory_efficient: an order in which no intermediate result is larger than the largest operand, even if it
            takes more operations. Of two operands there is one order only.

        Raises:
          ShapeError: the equation cannot be read, or does not fit the operands.

        Español:
          Suma de productos. optimize: cómo busca opt_einsum el orden: "optimal", "auto", "greedy". memory_efficient: un
          orden en el que ningún resultado intermedio es mayor que el mayor operando, aunque cueste más operaciones; con
          dos operandos hay un solo orden.
        """
        more = memory_efficient and len(operands) > 2
        path = operations.frugal_path(equation, operands, optimize) if more else optimize
        return self._run("einsum_optimize", operations.einsum, *operands, equation=equation, optimize=path)

    def batch_operations(
        self, operation_type: str, inputs: Sequence[Any], parameters: Any = None, parallel_execution: bool = True
    ) -> list[Any]:
        """One operation on many inputs.

        Args:
          operation_type: "layer_norm", "rms_norm", "matmul", "flash_attention", "gelu" or "softmax".
          inputs: arrays, or tuples of arrays where the operation takes several.
          parameters: keywords of every call (`{"weight": ..., "bias": ...}`), or a list with those of each.
          parallel_execution: one program for all, in which inputs of one shape are stacked and run as one call. False
            runs a program for each.

        Returns:
          The results, in the order of the inputs.

        Español:
          Una operación sobre muchas entradas. inputs: matrices, o tuplas de ellas. parameters: argumentos de todas las
          llamadas (dict) o de cada una (lista). parallel_execution: un solo programa para todas, que apila las entradas
          de igual forma; False ejecuta un programa por entrada.
        """
        _one_of("operation_type", operation_type, operations.BATCHED)
        if parallel_execution:
            return self._run(
                "batch_operations", operations.batch, list(inputs), parameters or {}, operation_type=operation_type
            )
        keywords = operations.parameters_of(parameters, len(inputs))
        return [
            self._run("batch_operations", operations.batch, [x], options, operation_type=operation_type)[0]
            for x, options in zip(inputs, keywords)
        ]

    def moe_routing_kernel(
        self,
        tokens: Float[Array, "*tokens d"],
        num_experts: int,
        top_k: int = 2,
        load_balancing: bool = True,
        precision: str | None = None,
        *,
        router_weights: Float[Array, "d experts"] | None = None,
    ) -> Any:
        """The experts of every token; `vishwamai.moe_routing`.

        Args:
          tokens: `[..., d]`; or, without `router_weights`, the router's logits `[..., num_experts]` themselves.
            Tokens of another width are then routed by a random router of seed 0, and a warning says so.
          num_experts: how many experts there are.
          top_k: experts for each token.
          load_balancing: give the load-balance loss and the z-loss too; without it they are None, and not computed.
          precision: dtype that the tokens are rounded to before they are scored ("bfloat16"); None leaves them. Scores
            are float32 either way.
          router_weights: `[d, num_experts]`.

        Returns:
          A `vishwamai.ops.moe.Routing`: weights and experts `[T, top_k]`, the losses, the tokens of each expert.

        Español:
          Los expertos de cada token. tokens: `[..., d]` o, sin `router_weights`, los logits del enrutador
          `[..., num_experts]`; con otro ancho decide un enrutador aleatorio de semilla 0, y un aviso lo dice.
          load_balancing: también las pérdidas de equilibrio y z; sin él son None y no se calculan. precision: tipo al
          que se redondean los tokens ("bfloat16").
        """
        return self._run(
            "moe_routing_kernel",
            operations.routing,
            tokens,
            router_weights,
            num_experts=num_experts,
            top_k=top_k,
            load_balancing=load_balancing,
            dtype=precision,
        )

    def fast_layer_norm(
        self,
        input_tensor: Float[Array, "*rows features"],
        weight: Float[Array, " features"] | None = None,
        bias: Float[Array, " features"] | None = None,
        eps: float = operations.LAYER_NORM_EPS,
        memory_efficient: bool = True,
    ) -> Float[Array, "*rows features"]:
        """Layer normalization over the last axis; `vishwamai.layer_norm`.

        Args:
          input_tensor: `[..., features]`; weight and bias `[features]`.
          eps: added to the variance.
          memory_efficient: the kernel that reads memory once and, under `jax.grad`, keeps its input alone. False leaves
            the operation to XLA.

        Español:
          Normalización de capa sobre el último eje. memory_efficient: el núcleo que lee la memoria una vez y, bajo
          `jax.grad`, guarda solo su entrada; False deja la operación a XLA.
        """
        chosen = None if memory_efficient else "xla"
        return self._run(
            "fast_layer_norm", operations.layer_norm, input_tensor, weight, bias, eps=eps, implementation=chosen
        )

    def fused_gelu_dropout(
        self,
        input_tensor: Float[Array, "*axes"],
        dropout_rate: float = 0.1,
        training: bool = True,
        inplace: bool = False,
        *,
        dropout_key: Any = None,
    ) -> Float[Array, "*axes"]:
        """GELU and dropout in one pass; `vishwamai.fused_gelu_dropout`.

        Args:
          input_tensor: any shape.
          dropout_rate: share of the elements to drop.
          training: False drops nothing.
          inplace: give the input's memory to the result (buffer donation): the input cannot be used afterwards. Needs
            `enable_xla_fusion`; while being traced it is an error, since the outer program donates.
          dropout_key: a random key; None takes the next one of the object's own, which is an error inside `jax.jit`.

        Español:
          GELU y dropout en una pasada. training: False no descarta nada. inplace: cede la memoria de la entrada al
          resultado (donación): después no se puede usar la entrada; requiere `enable_xla_fusion`, y durante el trazado
          es un error. dropout_key: clave aleatoria.
        """
        if inplace and not self._run.fuse:
            raise KernelError(
                "fused_gelu_dropout: `inplace` needs one program to donate to; pass enable_xla_fusion=True."
            )
        if inplace and isinstance(input_tensor, jax.core.Tracer):
            raise KernelError(
                "fused_gelu_dropout: `inplace` is set on a traced array; donate in the outer program: jax.jit(..., "
                "donate_argnums=...)."
            )
        implicit = training and dropout_rate and dropout_key is None
        drop = self._next_key("fused_gelu_dropout") if implicit else dropout_key
        return self._run(
            "fused_gelu_dropout",
            operations.gelu_dropout,
            input_tensor,
            drop,
            donate=inplace,
            rate=dropout_rate,
            training=training,
        )

    def get_memory_usage(self) -> float:
        """Gigabytes (10^9) in use now: of the devices, where they tell (TPU, GPU); on the CPU the resident memory of
        this process.

        Español: Gigabytes en uso ahora: de los dispositivos si lo dicen (TPU, GPU); en la CPU, la memoria residente de
        este proceso.
        """
        return memory_in_use() / 1e9

    def get_tflops(self) -> float:
        """TFLOP/s of the last measured call: its floating-point operations over the time from the call to the finished
        result, without compilation.

        The first call of a shape includes whatever a first run costs; `benchmark_kernels` takes medians.

        Raises:
          KernelError: nothing was measured yet, the call counts no operations, or the figure is above the chip's
            published peak.

        Español: TFLOP/s de la última llamada medida, sin compilación; nunca un número inventado. Es un error si aún no
        se midió nada o si la cifra supera el máximo publicado del chip.
        """
        if self._run.last is None:
            raise KernelError("get_tflops: no call was measured yet; call a method outside of jax.jit first.")
        return self._run.last.tflops

    def benchmark_kernels(self, kernels: Sequence[str] | None = None, repeats: int = 10) -> dict[str, dict[str, Any]]:
        """Measures methods on inputs of their own; model-sized on a TPU, small ones elsewhere
        (`capibara.core.kernels.benchmark` lists them).

        Args:
          kernels: names of methods; None for all that can be measured.
          repeats: how many runs the medians are of, after one that is not counted.

        Returns:
          For each name: `throughput`, TFLOP/s at the median time; `latency_ms`, the median time of one call, waited
          for; `memory_efficiency`, the bytes of operands and results as a share of all that the program holds (1.0 = no
          temporaries; scratch that a native CPU kernel takes by itself is not seen); `device`, what it ran on.

        Raises:
          KernelError: there is no such kernel, or a figure is above the chip's published peak.

        Español:
          Mide métodos con entradas propias. Para cada nombre: `throughput`, TFLOP/s con el tiempo mediano;
          `latency_ms`, tiempo mediano de una llamada; `memory_efficiency`, bytes de operandos y resultados como parte
          de todo lo que ocupa el programa (1.0 = sin temporales); `device`, dónde se ejecutó.
        """
        return benchmark.run(self, self._run, kernels, repeats)

    def _next_key(self, name: str) -> Any:
        """The next key of the object's own.

        Raises:
          KernelError: a program is being traced, which would hold this one key for all its calls.
        """
        self._draws += 1
        key = jax.random.fold_in(self._key, self._draws)
        if isinstance(key, jax.core.Tracer):
            raise KernelError(
                f"{name}: `dropout_key` is None inside a traced function (jax.jit, jax.lax.scan), where every call "
                "would drop the same elements; pass a key that is an argument of that function."
            )
        return key


def _one_of(name: str, value: Any, legal: dict[str, Any]) -> Any:
    if value not in legal:
        raise KernelError(f"TPUv4Kernels: `{name}` is {value!r}; pass one of {', '.join(legal)}.")
    return legal[value]


def _overrides(precision: str | None) -> dict[str, Any]:
    """The fields that a call's own precision replaces; those that the object's set are put back."""
    if precision is None:
        return {}
    return {
        "use_bfloat16": False,
        "use_fp16": False,
        "precision": "default",
        **_one_of("precision", precision, _PRECISIONS),
    }
