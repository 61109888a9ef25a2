"""The options of libtpu that are documented, or known by name: type, meaning, source.

The table checks types without a compiler, and names what is near to a wrong name. It does not say that an option
exists: the installed compiler does (`vishwamai.aot.compile.options.ask`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal

Kind = Literal["bool", "auto", "int", "float", "choice", "text"]
"""Types of values; "auto" is True, False or "auto", "choice" one of a list of words, "text" the text form of a protocol
buffer.
"""

Area = Literal["fusion", "memory", "schedule", "collectives", "host", "check"]
"""What an option acts on. "collectives" is communication between devices, "host" copies to and from the host's memory,
"check" changes no speed on purpose.
"""

JAX = "https://github.com/jax-ml/jax/blob/main/docs/xla_flags.md"
MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext/blob/main/benchmarks/xla_flags_library.py"
NAME = "its name; no description is published"


@dataclasses.dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        name: libtpu's spelling. kind: the type of its values.
        does: its meaning in a line. source: where the meaning comes from.
        area: part of the compiler that it acts on.
        least: the least value of a number.
    """

    name: str
    kind: Kind
    does: str
    source: str
    area: Area
    least: int = 0


def _options() -> Iterator[Option]:
    fuse = "xla_tpu_enable_async_collective_fusion"
    offload = "xla_tpu_enable_sparse_core_collective_offload"
    # Memory
    limit = "KiB of VMEM per core that a fusion or a kernel may take without asking for more."
    yield Option("xla_tpu_scoped_vmem_limit_kib", "int", limit, MAXTEXT, "memory", 1)
    does = "MiB of HBM that the compiler may plan with, for less than the chip has."
    yield Option("xla_tpu_max_hbm_size_mib", "int", does, NAME, "memory", 1)
    does = "Bytes of HBM that the program leaves free."
    yield Option("xla_tpu_user_reserved_hbm_bytes", "int", does, NAME, "memory")
    does = "Percent of HBM up to which the scheduler lets memory grow."
    yield Option("xla_tpu_scheduler_percent_shared_memory_limit", "int", does, MAXTEXT, "memory", 1)
    does = "Percent of HBM above which values are computed again instead of kept."
    yield Option("xla_jf_rematerialization_percent_shared_memory_limit", "int", does, NAME, "memory", 1)
    does = "Whether memory spaces are searched for VMEM that kernels leave unused."
    yield Option("xla_tpu_vmem_scavenging_mode", "choice", does, NAME, "memory")
    does = "How much larger a value may be than its operands to be moved out of a loop."
    yield Option("xla_tpu_licm_size_inflation_ratio", "float", does, NAME, "memory")
    does = "Frees the VMEM of prefetches across programs before the program ends."
    yield Option("xla_vf_vmem_enable_cross_program_prefetch_freeing", "bool", does, NAME, "memory")
    # Schedule
    does = "Schedules asynchronous operations early and their ends late, with other work between."
    yield Option("xla_tpu_enable_latency_hiding_scheduler", "bool", does, NAME, "schedule")
    does = "Turns on the scheduler's experimental features, for offloading to the host."
    yield Option("xla_tpu_enable_all_experimental_scheduler_features", "bool", does, MAXTEXT, "schedule")
    does = "Lets the scheduler count the memory of what is alive."
    yield Option("xla_tpu_enable_scheduler_memory_pressure_tracking", "auto", does, MAXTEXT, "schedule")
    does = "Times that the scheduler runs again with less memory, if the program does not fit."
    yield Option("xla_latency_hiding_scheduler_rerun", "int", does, MAXTEXT, "schedule")
    does = "Prefers many asynchronous operations under way over fewer stalls."
    yield Option("xla_lhs_prioritize_async_depth_over_stall", "auto", does, MAXTEXT, "schedule")
    does = "Removes optimization barriers early."
    yield Option("xla_tpu_aggressive_opt_barrier_removal", "auto", does, MAXTEXT, "schedule")
    does = "Lets a pipelined chain of operations contain a parameter that varies in the loop."
    yield Option("xla_should_allow_loop_variant_parameter_in_chain", "auto", does, MAXTEXT, "schedule")
    does = "Lets a pipelined chain of operations contain one that is the same in every turn of the loop."
    yield Option("xla_should_add_loop_invariant_op_in_chain", "auto", does, MAXTEXT, "schedule")
    # Fusion
    does = "Uses the cost model that counts bundles to choose fusions."
    yield Option("xla_tpu_use_bundle_aware_cost_model_for_fusions", "auto", does, MAXTEXT, "fusion")
    for name, does in (
        ("xla_tpu_rwb_fusion", "Fuses operations by the pass of this name."),
        ("xla_tpu_dot_dot_fusion", "Fuses a product into another."),
        ("xla_tpu_nested_dot_fusion", "Fuses products inside products."),
        ("xla_jf_conv_input_fusion", "Fuses operations into the operands of products."),
        ("xla_jf_conv_output_fusion", "Fuses operations into the results of products."),
        ("xla_jf_conv_reshape_fusion", "Fuses changes of shape into products."),
        ("xla_jf_enable_multi_output_fusion", "Fuses operations that share an operand into one with several results."),
        ("xla_tpu_enable_multi_level_nested_loop_fusion", "Fuses loops over several levels."),
        ("xla_tpu_enable_copy_fusion", "Fuses copies."),
        ("xla_tpu_enable_dot_strength_reduction", "Replaces small products by sums."),
        ("xla_tpu_enable_experimental_fusion_cost_model", "Uses another cost model to choose fusions."),
        ("xla_tpu_order_dot_after_layout", "Orders the operands of products after layouts are chosen."),
    ):
        yield Option(name, "bool", does, NAME, "fusion")
    does = "Window of the vectors that a fusion loads at once."
    yield Option("xla_tpu_vector_load_fusion_window", "int", does, NAME, "fusion")
    does = "Window of the vectors that a fusion stores at once."
    yield Option("xla_tpu_vector_store_fusion_window", "int", does, NAME, "fusion")
    # Collectives
    does = "Makes {} asynchronous."
    yield Option("xla_enable_async_all_gather", "auto", does.format("all-gathers"), JAX, "collectives")
    yield Option("xla_enable_async_all_reduce", "auto", does.format("all-reduces"), MAXTEXT, "collectives")
    yield Option("xla_enable_async_collective_permute", "auto", does.format("permutations"), JAX, "collectives")
    yield Option("xla_tpu_enable_async_all_to_all", "bool", does.format("all-to-alls"), NAME, "collectives")
    does = "Fuses communication with the operations that are scheduled while it runs."
    yield Option(fuse, "bool", does, JAX, "collectives")
    yield Option(f"{fuse}_fuse_all_gather", "auto", "That fusion for all-gathers.", JAX, "collectives")
    yield Option(f"{fuse}_fuse_all_reduce", "bool", "That fusion for all-reduces.", MAXTEXT, "collectives")
    yield Option(f"{fuse}_fuse_reduce_scatter", "bool", "That fusion for reduce-scatters.", NAME, "collectives")
    yield Option(f"{fuse}_multiple_steps", "bool", "That fusion in several steps.", JAX, "collectives")
    does = "Overlaps computation and communication on one TensorCore."
    yield Option("xla_tpu_overlap_compute_collective_tc", "bool", does, JAX, "collectives")
    does = "Overlaps all-reduces of data parallelism between slices with more work."
    yield Option("xla_tpu_enable_data_parallel_all_reduce_opt", "bool", does, JAX, "collectives")
    does = "Pipelines them over turns of a loop also where sizes differ; takes more memory."
    yield Option("xla_tpu_data_parallel_opt_different_sized_ops", "bool", does, JAX, "collectives")
    does = "Fuses all-gathers with products and all-reduces."
    yield Option("xla_tpu_megacore_fusion_allow_ags", "bool", does, JAX, "collectives")
    does = "Pipelines all-gathers backwards through loops."
    yield Option("xla_tpu_enable_ag_backward_pipelining", "bool", does, JAX, "collectives")
    for short, words in (("gather", "all-gathers"), ("reduce", "all-reduces")):
        does = f"Runs {words} on the SparseCore."
        yield Option(f"{offload}_all_{short}", "auto", does, MAXTEXT, "collectives")
        does = f"Traces {words} that run on the SparseCore."
        yield Option(f"xla_tpu_enable_all_{short}_offload_tracing", "auto", does, MAXTEXT, "collectives")
    does = "Gives the SparseCore the TensorCore's shape of the slice, for its collectives."
    yield Option("xla_tpu_use_tc_device_shape_on_sc", "bool", does, MAXTEXT, "collectives")
    does = "Keeps SparseCore programs from being split over the two cores of a chip."
    yield Option("xla_sc_disable_megacore_partitioning", "bool", does, MAXTEXT, "collectives")
    does = "Fuses instructions of SparseCore programs."
    yield Option("xla_sc_enable_instruction_fusion", "bool", does, MAXTEXT, "collectives")
    does = "Splits a minor axis for inputs whose major axis is trivial, for reduce-scatters."
    yield Option("xla_tpu_use_minor_sharding_for_major_trivial_input", "bool", does, MAXTEXT, "collectives")
    does = "Size of a group from which reduce-scatters get another layout."
    yield Option("xla_tpu_relayout_group_size_threshold_for_reduce_scatter", "int", does, MAXTEXT, "collectives")
    does = "Chooses layouts for all-reduces that become reduce-scatters."
    yield Option("xla_tpu_assign_all_reduce_scatter_layout", "bool", does, MAXTEXT, "collectives")
    does = "Splits a product whose operand is gathered, to overlap the two."
    yield Option("xla_tpu_decompose_all_gather_einsum", "bool", does, NAME, "collectives")
    does = "Splits a product whose result is reduced and scattered, to overlap the two."
    yield Option("xla_tpu_decompose_einsum_reduce_scatter", "bool", does, NAME, "collectives")
    does = "MiB from which a product with communication is split into a ring."
    yield Option("xla_jf_spmd_threshold_for_windowed_einsum_mib", "int", does, NAME, "collectives")
    does = "Draws random bits in parts, which depend on the sharding."
    yield Option("xla_tpu_spmd_rng_bit_generator_unsafe", "bool", does, JAX, "collectives")
    # Host and checks
    does = "Copies to and from the host that may overlap."
    yield Option("xla_tpu_host_transfer_overlap_limit", "int", does, MAXTEXT, "host")
    does = "Sends to and receives from the host under way at once."
    yield Option("xla_max_concurrent_host_send_recv", "int", does, MAXTEXT, "host")
    does = "Repeats computations and compares, to find silent data corruption."
    yield Option("xla_tpu_enable_sdc_checker", "bool", does, MAXTEXT, "check")
    does = "Halts where that check finds a difference."
    yield Option("xla_tpu_sdc_check_halt_on_detection", "bool", does, MAXTEXT, "check")
    does = "Repeats the code of the check at the lowest level."
    yield Option("xla_tpu_sdc_replicate_llo", "bool", does, MAXTEXT, "check")
    does = "Repetitions of the check."
    yield Option("xla_tpu_sdc_check_repeat_count", "int", does, MAXTEXT, "check", 1)
    does = "Halts the program at a NaN."
    yield Option("xla_tpu_detect_nan", "bool", does, NAME, "check")
    does = "Halts the program at an infinity."
    yield Option("xla_tpu_detect_inf", "bool", does, NAME, "check")


TPU_OPTIONS = {option.name: option for option in _options()}
"""The options by name."""
