"""The compiler's answers about memory: probed, verified, kept, and from a process that may die."""

import os
import pathlib
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vishwamai import aot, planning
from vishwamai.aot.compile import answers, child
from vishwamai.aot.compile.traced import read_sharding, write_sharding
from vishwamai.core.errors import DeviceError, KernelError
from vishwamai.core.figures import Estimate, Measurement

needs_libtpu = pytest.mark.skipif(not aot.has_libtpu(), reason="libtpu is not installed")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def fresh_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("VISHWAMAI_AOT_CACHE", str(tmp_path))
    return tmp_path


def test_a_figure_keeps_how_it_was_made():
    total = Estimate(1.0, "verified") + Estimate(2.0, "probe")
    assert total == Estimate(3.0, "probe")
    assert 3 * Estimate(2.0, "analytic", "s") == Estimate(6.0, "analytic", "s")
    assert Estimate(1.0, "probe") != Measurement(1.0, "cpu")
    with pytest.raises(TypeError):
        _ = Estimate(1.0, "probe") + Measurement(1.0, "cpu")  # type: ignore[operator]
    with pytest.raises(TypeError):
        _ = Estimate(1.0, "probe") + Estimate(1.0, "probe", "s")
    with pytest.raises(TypeError):
        _ = Estimate(1.0, "probe") * True


def update(params, x):
    def loss(params):
        hidden, _ = jax.lax.scan(lambda h, w: (jax.nn.gelu(h @ w), None), x["rows"], params)
        return jnp.sum(hidden.astype(jnp.float32) ** 2)

    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


def update_arguments(mesh=None):
    def shape(size, *spec):
        place = None if mesh is None else NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=place)

    return shape((4, 2048, 2048), None, None, "fsdp"), {"rows": shape((2048, 2048), "fsdp")}


@needs_libtpu
def test_what_a_traced_program_remembers():
    program = planning.trace(jax.jit(update, donate_argnums=0), *update_arguments(), target="v5e")
    assert [(a.path, a.nbytes, a.donated) for a in program.arguments] == [
        ("[0]", 32 * MIB, True),
        ("[1]['rows']", 8 * MIB, False),
    ]
    assert (
        program.fingerprint
        == planning.trace(jax.jit(update, donate_argnums=0), *update_arguments(), target="v5e").fingerprint
    )
    others = (
        planning.trace(update, *update_arguments(), target="v5e"),
        planning.trace(jax.jit(update, donate_argnums=0), *update_arguments(), target="v6e"),
    )
    assert len({program.fingerprint, *(other.fingerprint for other in others)}) == 3


@needs_libtpu
def test_shardings_are_traced_for_the_slice_and_cross_the_process():
    mesh = Mesh(aot.mesh_for("v5e:2x2", {"fsdp": 4}).devices, ("fsdp",))
    program = planning.trace(update, *update_arguments(mesh), target="v5e:2x2")
    assert [a.nbytes for a in program.arguments] == [8 * MIB, 2 * MIB]
    for spec in (P(None, "fsdp"), P(), P(("fsdp",), None)):
        sharding = NamedSharding(mesh, spec)
        found = read_sharding(write_sharding(sharding), tuple(mesh.devices.flat))
        assert found.is_equivalent_to(sharding, 2) and found.mesh == mesh


@needs_libtpu
@pytest.mark.long
def test_a_probe_is_near_the_verified_total_and_both_are_kept(fresh_cache, monkeypatch):
    program = planning.trace(jax.jit(update, donate_argnums=0), *update_arguments(), target="v5e")
    with planning.Compiler() as asked:
        probed, verified = asked.probe(program), asked.verify(program)
    assert (probed.total.level, verified.total.level) == ("probe", "verified")
    assert probed.total.value == pytest.approx(verified.total.value, rel=0.1)
    assert verified.parts["arguments"].value >= 40 * MIB and verified.parts["aliased"].value >= 32 * MIB
    assert probed.fits and verified.fits and "fits" in str(verified)

    monkeypatch.setattr(planning.Compiler, "_answer", lambda *_: pytest.fail("asked again"))
    with planning.Compiler() as again:
        assert again.probe(program) == probed and again.verify(program) == verified


@needs_libtpu
@pytest.mark.long
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_a_program_over_a_slice(kind):
    mesh = aot.mesh_for("v5e:2x2", {"fsdp": 4})
    if kind == "auto":
        mesh = Mesh(mesh.devices, mesh.axis_names)

    def gathered(params, x):
        whole = NamedSharding(jax.typeof(params).sharding.mesh, P()) if kind == "explicit" else None
        return update(params if whole is None else jax.sharding.reshard(params, whole), x)

    found = planning.verify(gathered, *update_arguments(mesh), target="v5e:2x2")
    assert found.parts["arguments"].value == pytest.approx(10 * MIB, rel=0.01)


@pytest.mark.turns(3)
@needs_libtpu
def test_what_fits_and_what_does_not():
    x = jax.ShapeDtypeStruct((70_000, 70_000), jnp.float32)
    small = planning.trace(update, *update_arguments(), target="v5e")
    with planning.Compiler() as asked:
        probed = asked.probe(small)
        found = asked.verify(planning.trace(lambda a: a @ a, x, target="v5e"))
    assert probed.fits and probed.total.level == "probe" and 80 * MIB < probed.total.value < 400 * MIB
    assert not found.fits and found.total.value >= 2 * 70_000**2 * 4 and "does not fit" in str(found)


def fake(target="v5e"):
    return planning.Program("fake", target, b"not a program", (), "f" * 32)


def test_a_process_that_dies_is_an_error_with_its_words(monkeypatch, tmp_path):
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, sys; input(); sys.stderr.write('F0000 Check failed: sides\\n'); sys.stderr.flush(); "
        "os.kill(os.getpid(), 6)"
    )
    monkeypatch.setattr(child, "COMMAND", (str(script),))
    with planning.Compiler() as asked:
        for _ in range(2):  # the next question starts a new process
            with pytest.raises(KernelError, match=r"'fake' for v5e.*signal 6.*Check failed: sides"):
                asked.probe(fake())


def test_a_process_that_hangs_is_stopped(monkeypatch, tmp_path):
    script = tmp_path / "hangs.py"
    script.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(child, "COMMAND", (str(script),))
    with planning.Compiler(timeout=0.2) as asked:
        with pytest.raises(KernelError, match="longer than 0.2 s"):
            asked.probe(fake())
        assert not asked._child.running


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"memory": {"arguments": "many"}}', b'{"needed": 3}', b"\xff\xfe"]
)
def test_a_damaged_answer_is_asked_for_again(monkeypatch, fresh_cache, content):
    good = {"needed": 5 * MIB, "allocations": []}
    monkeypatch.setattr(planning.Compiler, "_answer", lambda *_: good)
    key = f"{'f' * 32}-1"
    (fresh_cache / "plans").mkdir()
    (fresh_cache / "plans" / f"{key}.json").write_bytes(content)
    assert planning.Compiler().probe(fake()).total == Estimate(5 * MIB, "probe")
    assert answers.read("plans", key) == good


@pytest.mark.parametrize(
    "first, second, said",
    [
        (9.16, 10.63, 10.63),  # the mixture over mesh.expert=4 of docs/planning.md: 10.86 GiB as compiled
        (15.7, 16.2, 15.75),  # what can be made to fit the device does
        (17.0, 16.4, 16.4),  # the second answer is about the device's own memory
    ],
)
def test_a_probe_asks_again_with_almost_what_is_needed(monkeypatch, first, second, said):
    asked = []

    def answer(self, program, hbm_mib, *_):
        asked.append(hbm_mib)
        return {"needed": int((first if hbm_mib == 1 else second) * 2**30), "allocations": []}

    monkeypatch.setattr(planning.Compiler, "_answer", answer)
    found = planning.Compiler().probe(fake())
    assert found.total.value == pytest.approx(said * 2**30) and found.total.level == "probe"
    assert asked == [1, min(int(0.99 * first * 1024), fake().limit >> 20)]
    assert found.fits == (first <= 15.75)


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("VISHWAMAI_AOT_CACHE", str(blocked))
    monkeypatch.setattr(planning.Compiler, "_answer", lambda *_: {"needed": 7, "allocations": []})
    assert planning.Compiler().probe(fake()).total.value == 7
    assert not answers.write("plans", "key", {}) and answers.read("plans", "key") is None


def test_a_full_disk_is_an_error_that_says_where_and_the_cache_stays(monkeypatch, fresh_cache):
    good = {"needed": 5 * MIB, "allocations": []}
    assert answers.write("plans", f"{'f' * 32}-1", good) and answers.write("plans", f"{'f' * 32}-4", good)
    before = {path: path.read_bytes() for path in fresh_cache.rglob("*") if path.is_file()}

    def full(path, data):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    with planning.Compiler() as asked:
        with pytest.raises(DeviceError, match=r"'fake' for v5e: .*No space left on device.*vishwamai-plan-.*TMPDIR"):
            asked.verify(fake())
        assert asked.probe(fake()).total == Estimate(5 * MIB, "probe")  # what was known still is
    assert {path: path.read_bytes() for path in fresh_cache.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("kind, error", [("mosaic", "UnsupportedError"), ("compiler", "KernelError")])
def test_a_rejected_program_is_the_error_of_compile_for(monkeypatch, kind, error):
    monkeypatch.setattr(planning.Compiler, "_answer", lambda *_: {"rejected": "words", "problem": {"kind": kind}})
    with pytest.raises(KernelError, match="words") as raised:
        planning.Compiler().verify(fake())
    assert type(raised.value).__name__ == error


def test_targets_are_checked_first():
    with pytest.raises(DeviceError, match="GPU"):
        planning.probe(jnp.sin, jax.ShapeDtypeStruct((8,), jnp.float32), target="h100")
    with pytest.raises(DeviceError, match="v5e has no slice of 3x5"):
        planning.verify(jnp.sin, jax.ShapeDtypeStruct((8,), jnp.float32), target="v5e:3x5")


KILLED = """
import sys
from vishwamai.aot.compile import answers
for turn in range(10**9):
    answers.write("plans", str(turn % 8), {"needed": turn, "allocations": ["x" * 100_000]})
    print(turn, flush=True)
"""


@pytest.mark.long
def test_a_killed_planner_leaves_whole_answers(fresh_cache):
    process = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(100):
        assert process.stdout.readline()
    process.kill()
    process.communicate(timeout=60)
    found = [answers.read("plans", str(turn)) for turn in range(8)]
    assert all(one is not None and one["needed"] % 8 == turn for turn, one in enumerate(found))


@needs_libtpu
@pytest.mark.long
def test_a_compiler_ends_with_a_planner_that_is_killed():
    """libtpu's process sees that nobody asks any more."""
    script = "import time; from vishwamai import planning; c = planning.Compiler(); "
    script += "print(c._child.started().pid, flush=True)"
    process = subprocess.Popen([sys.executable, "-c", f"{script}; time.sleep(600)"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    os.kill(worker, 0)
    process.kill()
    process.communicate(timeout=60)
    for _ in range(600):
        if not pathlib.Path(f"/proc/{worker}").exists() or _is_zombie(worker):
            return
        time.sleep(0.1)
    pytest.fail("the compiler's process still runs")


def _is_zombie(pid):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
