"""`vishwamai inspect` and `vishwamai tune`."""

import json

import pytest

from vishwamai import aot
from vishwamai.aot.tuning import tables, tuner
from vishwamai.cli import main

pytest.importorskip("rich")
needs_libtpu = pytest.mark.skipif(not aot.has_libtpu(), reason="needs libtpu: pip install '.[aot]'")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VISHWAMAI_AOT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("VISHWAMAI_TUNING_DIR", str(tmp_path / "tables"))


@pytest.mark.turns(4)
@needs_libtpu
def test_inspect_prints_the_table_and_writes_what_was_asked(capsys, tmp_path):
    pytest.importorskip("jinja2")
    page, figures = tmp_path / "page.html", tmp_path / "figures.json"
    words = ["inspect", "jax.numpy:matmul", "--args", "bf16[256,256], bf16[256,256]", "--flops", "33554432"]
    assert main([*words, "--report", str(page), "--json", str(figures)]) == 0
    said = capsys.readouterr().out
    assert "matmul on v5e (estimate" in said
    rows = [line for line in said.splitlines() if line.startswith(("  program ", "  TLP "))]
    assert len(rows) == 4 and max(map(len, rows)) <= 80  # times, then units
    assert "matmul on v5e" in page.read_text()
    (found,) = json.loads(figures.read_text())
    assert found["roofline"]["flops"] == 33554432
    assert found["estimate_seconds"] > found["roofline"]["seconds"] > 0


@pytest.mark.turns(3)
@needs_libtpu
def test_inspect_of_what_does_not_fit_says_why_and_fails(capsys):
    assert main(["inspect", "jax.numpy:matmul", "--args", "f32[400000,400000], f32[400000,400000]"]) == 1
    assert "of HBM" in capsys.readouterr().out


@needs_libtpu
def test_tune_quick(capsys, tmp_path, monkeypatch):
    seen = []

    def evaluate(search, configs, backward):
        seen.append((search.case.op, search.target, search.budget))
        search.compilations += len(configs)
        return [tuner._Trial(config, 1e-3, 0.5) for config in configs]

    monkeypatch.setattr(tuner.Search, "evaluate", evaluate)
    assert main(["tune", "--quick", "--ops", "norm"]) == 0
    assert set(seen) == {("norm", "v5e", 3)}
    assert "1 searched, 0 better than the heuristic" in capsys.readouterr().out
    assert (tmp_path / "tables" / "v5e" / "norm.json").exists()


@needs_libtpu
@pytest.mark.parametrize(
    ("slower", "code", "said"), [(1.0, 0, "1 entries, 0 stale."), (1.2, 1, "1 entries, 1 stale; search")]
)
def test_tune_check_estimates_the_tables_again(capsys, monkeypatch, slower, code, said):
    (entry,) = (e for e in tables.entries(tables.shipped()) if (e.op, e.target) == ("norm", "v5e") and "BERT" in str(e))

    def evaluate(search, configs, backward):
        return [tuner._Trial(config, slower * entry.evidence["estimate_us"] * 1e-6, 0.5) for config in configs]

    monkeypatch.setattr(tuner.Search, "evaluate", evaluate)
    assert main(["tune", "--check", "--ops", "norm", "--target", "v5e", "--cases", "BERT"]) == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--ops", "norms"], "no operation 'norms'; choose from activation, attention, "),
        (["--targets", "v9"], "v4, v5e, v5p, v6e, tpu7x"),
        (["--ops", "norm", "--cases", "nothing like it"], "no case of norm has 'nothing like it'"),
    ],
)
def test_tune_says_what_it_does_not_know(capsys, words, expected):
    assert main(["tune", *words]) == 2
    assert expected in capsys.readouterr().err
