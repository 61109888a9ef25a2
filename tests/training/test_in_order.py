"""Programs for several processes of CPUs: their collectives need one another, and their numbers stay."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import rotation
import vishwamai.training.gather
from test_training import small
from vishwamai.core.hlo import Module, parse_module
from vishwamai.parallel.in_order import among_processes, in_order
from vishwamai.training.data import training_batches
from vishwamai.training.job import make_job
from vishwamai.training.run import train

TALKS = {"all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all"}


def free(compiled: Any) -> list[tuple[str, str]]:
    """Loops and conditionals with collectives inside, and what comes after and does not need them: a collective, or
    another of them. What begins with a collective itself ends before the runtime goes on.
    """
    module = parse_module(compiled.as_text())
    talking = functools.cache(lambda name: any(map(talks, module.computations[name])))

    def talks(one) -> bool:
        return one.opcode in TALKS or any(talking(name) for _, name in one.computations)

    found = []
    for body in module.computations.values():
        line = [one for one in body if talks(one)]
        for i, a in enumerate(line):
            if a.opcode not in TALKS:
                found += [(a.name, b.name) for b in line[i + 1 :] if not needs(module, b.name, a.name)]
    return found


def needs(module: Module, name: str, other: str) -> bool:
    seen, todo = set(), [name]
    while todo:
        one = todo.pop()
        if one == other:
            return True
        if one not in seen:
            seen.add(one)
            todo += module.by_name[one].operands
    return False


def branch_and_siblings(flag, x, weights):
    """What a pipeline with FSDP has: a gather in a branch, and others that do not need it."""
    x = jax.lax.cond(flag, lambda x: jax.lax.all_gather(x, "d", tiled=True)[: x.shape[0]] + 1, jnp.cos, x)

    def body(x, w):
        return jnp.tanh(x @ jax.lax.all_gather(w, "d", tiled=True)), jax.lax.psum(w[0], "d")

    x, sums = jax.lax.scan(body, x, weights)
    return x, sums, jax.lax.psum(weights[0] ** 2, "d"), jax.lax.pmax(jnp.sum(weights), "d")


def test_each_collective_needs_the_one_before():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    given = jnp.array(True), jnp.linspace(-1, 1, 16).reshape(4, 4), jnp.linspace(-1, 2, 48).reshape(3, 4, 4)
    places = {"mesh": mesh, "in_specs": (P(), P("d"), P(None, "d")), "out_specs": (P("d"), P(), P(), P())}
    plain, ordered = (
        jax.jit(jax.shard_map(f, **places, check_vma=False)).lower(*given).compile()
        for f in (branch_and_siblings, in_order(branch_and_siblings))
    )
    assert free(plain)
    assert not free(ordered)
    for one, other in zip(plain(*given), ordered(*given), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.turns(5)
@pytest.mark.parametrize(
    ("mesh", "remat"),
    rotation.in_turn(
        3,
        [
            ({"pipeline": 2, "fsdp": 2}, "none"),
            ({"pipeline": 2, "sequence": 2}, "full"),
            ({"fsdp": 2, "sequence": 2}, "full"),
        ],
    ),
    ids=str,
)
def test_training_steps(tmp_path, mesh, remat, monkeypatch):
    config = small(tmp_path, steps=2, batch_size=8, microbatches=2, mesh=mesh, remat=remat)
    plain = list(train(config, tmp_path / "plain"))
    monkeypatch.setattr(vishwamai.training.gather, "among_processes", in_order)
    ordered = list(train(config, tmp_path / "ordered"))
    assert [(r.loss, r.gradient_norm) for r in plain] == [(r.loss, r.gradient_norm) for r in ordered]
    (tmp_path / "job").mkdir()
    job, state = make_job(config, tmp_path / "job")
    batch = job.layout.put_batch(next(iter(training_batches(job.corpus, 0, 8, *job.layout.reader))))
    assert not free(job.jitted_step.lower(state, batch, job.frozen).compile())


def test_one_process_runs_what_was_written():
    assert among_processes(branch_and_siblings) is branch_and_siblings
