"""benchmarks/weak_scaling.py: its table by formulas against sums by hand, and what it declines."""

import pytest

from benchmark_files import loaded
from vishwamai import aot
from vishwamai.core.figures import Estimate
from vishwamai.core.hardware import TPUS
from vishwamai.core.links import estimate_collective
from vishwamai.planning.mesh_links import links_of

LENGTH = 512


@pytest.fixture(scope="module")
def script():
    with loaded("weak_scaling") as module:
        yield module


def parameters(model: dict) -> int:
    width, inner, layers = model["hidden_size"], model["intermediate_size"], model["num_hidden_layers"]
    kv = width * model["num_key_value_heads"] // model["num_attention_heads"]
    return 2 * model["vocab_size"] * width + layers * (2 * width * width + 2 * width * kv + 3 * width * inner)


@pytest.mark.turns(4)
def test_a_row_by_hand(script):
    """On a square of v5e, and on two slices whose sides are rings: each chip has two links, then four.

    On four chips the embedding is in parts of whole lanes, so rows of its result are exchanged instead.
    """
    model, chip = script.SMALL, TPUS["v5e"]
    table = script.scaling(model, "v5e", (4, 512), 1, LENGTH, "full", True)
    numbers = parameters(model)
    for row, chips, links in zip(table.rows, (4, 256), (2, 4), strict=True):
        apart = model["vocab_size"] * model["hidden_size"] if chips == 4 else 0
        once = (numbers - apart) * (chips - 1) / chips / (links * chip.ici_bandwidth)  # a byte of each number
        # Weights in bfloat16, forward and backward; gradients in float32, to every chip and back.
        around = links_of(row.config.mesh, row.place.target, "fsdp")
        rows = estimate_collective("all_to_all", 4 * LENGTH * model["hidden_size"] * 2, around) if apart else 0.0
        assert row.step.gathers == pytest.approx(2 * 2 * once + 2 * rows, rel=0.01)
        assert row.step.sums == pytest.approx(2 * 4 * once, rel=0.01)
    alone, both = table.rows[0].step, table.rows[1].step
    assert alone.between == 0.0
    # Half of a chip's part of the gradients goes to the other slice, and half of the sums comes back.
    assert both.between == pytest.approx(4 * numbers / 256 / chip.dcn_bandwidth, rel=0.01)
    assert both.compute == alone.compute and both.compute.level == "analytic"
    assert table.rows[1].chips == 512 and str(table.rows[1].place) == "2 x v5e:16x16"


def test_what_is_hidden(script):
    def step(compute, bare=0.25):
        return script.Step(Estimate(compute, "verified", "s"), 2.0, 3.0, 4.0, bare)

    long = step(100.0)  # a quarter of one gather and of the sums has no work next to it
    assert long.in_turn.value == 109.0 and long.overlapped.value == 102.0 and long.hidden == 7.0
    short = step(5.0)  # all of the work hides as much
    assert short.in_turn.value == 14.0 and short.overlapped.value == 9.0
    assert long.overlapped.level == "analytic"  # links are formulas


@pytest.mark.parametrize(
    ("chip", "chips", "written"),
    [
        ("v5p", 16, "v5p:2x2x4"),
        ("v5p", 4096, "v5p:16x16x16"),
        ("v6e", 256, "v6e:16x16"),
        ("v6e", 4096, "16 x v6e:16x16"),
    ],
)
def test_slices(script, chip, chips, written):
    assert str(script.place_of(chip, chips)) == written


def test_a_step_that_does_not_fit_is_named(script):
    table = script.scaling(script.SMALL, "v5e", (4, 16), 1 << 20, LENGTH, "full", True)
    assert all(row.step is None for row in table.rows)
    assert "declined: a device needs" in str(table) and "and has 15.8 GiB" in str(table)


def test_the_quick_table(script, capsys):
    script.main(["--quick", "--analytic"])
    text = capsys.readouterr().out
    assert "Estimates, not measurements." in text and "The compiled program" not in text
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert [row[0] for row in rows[2:]] == ["4", "16", "512"] and rows[2][-1] == "1.00 / 1.00"
    for row in rows[2:]:
        compute, collectives, slow, fast = (float(x) for x in (row[4], row[5], *row[7].split(" / ")))
        assert slow == pytest.approx(compute + collectives, rel=0.02) and compute <= fast <= slow


@pytest.mark.long
@pytest.mark.skipif(not aot.has_libtpu(), reason="libtpu is not installed")
def test_the_compute_of_a_compiled_program(script):
    model = script.SMALL | {"num_hidden_layers": 1}
    table = script.scaling(model, "v5e", (4, 512), 1, LENGTH, "full", False)
    formulas = script.scaling(model, "v5e", (4,), 1, LENGTH, "full", True)
    parts = table.program.parts
    expected = sum(parts[name].value for name in ("kernels", "fusions", "copies"))
    assert [row.step.compute.value for row in table.rows] == pytest.approx([expected] * 2)
    assert expected > formulas.rows[0].step.compute.value  # a lower bound
    # The compiler's collectives are those of the formulas, except that it scatters these small sums, where those of a
    # large model are all-reduces, which take twice as long.
    step = table.rows[0].step
    counted = sum(row.seconds for row in table.program.rows if row.part == "collectives")
    assert counted == pytest.approx(step.sums / 2 + step.gathers, rel=0.1)
    kinds = dict(kind.split(maxsplit=1) for kind in script.kinds_of(table.program).split(", "))
    assert set(kinds) == {"all-gather", "all-reduce", "all-to-all", "reduce-scatter"}
