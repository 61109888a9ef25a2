"""Observers: what they are told of, in which thread, and until when."""

import threading

import jax
import jax.numpy as jnp
import pytest

import vishwamai
from vishwamai.core import observe


def test_a_jitted_function_is_explained_twice():
    """The second look does not find the trace of the first, in which the calls were reported already."""
    function = jax.jit(vishwamai.rms_norm)
    x = jax.ShapeDtypeStruct((8, 256), jnp.float32)
    for _ in range(2):
        assert len(vishwamai.explain(function, x).calls) == 1


def test_observers_nest():
    x = jnp.ones((4, 32))
    outer, inner = observe.PlanRecorder(), observe.PlanRecorder()
    with observe.watching(outer):
        vishwamai.rms_norm(x)
        with observe.watching(inner):
            vishwamai.rms_norm(x[:2])
        with observe.unobserved():
            vishwamai.rms_norm(x[:3])
    vishwamai.rms_norm(x)
    assert len(outer.plans) == 2 and len(inner.plans) == 1


def test_threads_do_not_mix():
    """Two threads that record at the same time each find their own calls; an observer of every thread finds all."""
    found, ready = {}, threading.Barrier(2)

    def record(rows):
        def function(x):
            ready.wait(timeout=60)
            return vishwamai.rms_norm(x)

        found[rows] = observe.record_plans(function, jax.ShapeDtypeStruct((rows, 32), jnp.float32))

    with observe.recording() as every:
        threads = [threading.Thread(target=record, args=(rows,)) for rows in (3, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [len(found[rows]) for rows in (3, 5)] == [1, 1] and len(every) == 2
    assert len({id(plan) for plans in found.values() for plan in plans}) == 2


def test_an_observer_is_forgotten_after_its_block():
    recorder = observe.PlanRecorder()
    with pytest.raises(ValueError, match="stop"), observe.watching(recorder) as token:
        assert observe.find(token) is recorder
        raise ValueError("stop")
    assert observe.find(token) is None and observe.interceptor() is None and not observe.dry_run()
