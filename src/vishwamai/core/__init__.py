"""The base: what an operation is, how its implementation is chosen and run. It imports no other package of ours.

Choice and calls: `op` and `plan` (Op, Implementation, CallPlan), `execute` and `gradients` (what happens to a plan),
`explain` (which implementation runs, and why the others do not), `observe` (each call reports its plan).

What is computed: `spec`, `config` (the ambient *how*), `precision`, `dims` and `signature` (the dims of an op's arrays,
stated once), `shape_checks`, `arguments` (types of public calls), `arrays`, `promotion`, `callers`, `errors`.

Places: `target` (platform, chip and framework by name), `hardware` (figures of chips, each with its source), `sharding`
and `automatic_axes` (the factor rule), `links` (estimates of collectives), `tuning` (measured configs), `tiles`.

Kernels: `pallas`, `tpu_dequantize`; `gpu`, `triton_launch`, `triton_call`, `gpu_kernels`; `ffi` and `cpp`;
`activations`, `dropout`.

Quantized weights: `qtensor`, the folder `quantized` (formats that are data, and weights packed for the CPU), `weight`
(weights that multiply by a rule of their own). Figures that say where they come from: `figures`; long work: `progress`.

Suites: `cases` and `draws`. Files: `caches`, `environment`, `installing`, `jax_cache`, `host_memory`. Programs: `hlo`.
Private names of other libraries: `jax_private`, `triton_private`, `jax_errors`.
"""
