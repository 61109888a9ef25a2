"""`vishwamai doctor --serve`: what it reads and measures, and the options that it recommends."""

import dataclasses
import json
from pathlib import Path

import pytest

import world
from vishwamai.cli import doctor_serve, main
from vishwamai.cli.doctor_serve import Form, Host, command, recommend
from vishwamai.core.hardware import host_limits
from vishwamai.measure import host as host_rates

HOST = Host(
    processors=tuple(range(8)),
    cores=8,
    nodes={0: "0-7"},
    copy_one=20e9,
    copy_all=100e9,
    copy_nodes={},
    all_cores=0.9,
    slow=0.01,
    huge_pages="madvise",
    quota=None,
    memory=64 << 30,
    governors=("performance",),
    others=0.0,
)


def _forms(scale=1.0):
    """A model of 8 billion weights, and its parts."""
    sizes = {"bfloat16": 16 * 10**9, "int8": 9 * 10**9, "int4": 5 * 10**9}
    return [Form(name, int(scale * size), int(scale * size), 1 << 29, 1 << 28) for name, size in sizes.items()]


def _advice(host=HOST, forms=()):
    return {item.option: item for item in recommend(host, list(forms))}


def test_options_follow_the_figures():
    assert command(recommend(HOST, _forms(0.5)), None) == "vishwamai serve MODEL"  # 12.5 tokens/s in bfloat16
    changed = dataclasses.replace
    for host, forms, option, value, words in (
        (changed(HOST, quota=2.5), (), "--threads", "2", "time for 2.5 processors"),
        (changed(HOST, quota=0.5), (), "--threads", "1", "time for 0.5"),
        (changed(HOST, quota=16.0), (), "--threads", None, "no quota is below that"),
        (changed(HOST, cores=4), (), "--threads", "4", "8 processors are 4 cores"),
        (changed(HOST, copy_nodes={0: 60e9, 1: 55e9}), (), "--numa", None, "1.67 times as fast as node 0"),
        (changed(HOST, copy_nodes={0: 85e9, 1: 90e9}), (), "--numa", "1", "1.11 times as fast as node 1"),
        (HOST, _forms(), "--quantize", "int8", "bfloat16 decodes at most 6.2 tokens/s, below 10; `vishwamai evaluate"),
        (HOST, _forms(0.5), "--quantize", None, "may decode 12.5 tokens/s"),
        (changed(HOST, memory=16 << 30), _forms(), "--quantize", "int8", "bfloat16 does not fit into 16.0 GiB"),
        (changed(HOST, memory=8 << 30), _forms(), "--quantize", "int4", "int8 does not fit into 8.0 GiB"),
        (changed(HOST, memory=2 << 30), _forms(), "--quantize", "int4", "no form fits into the memory"),
        (changed(HOST, memory=None), _forms(), "--max-sequences", None, "not known"),
        (HOST, _forms(), "--max-sequences", None, "the default is 32"),
        (changed(HOST, memory=16 << 30), _forms(), "--max-sequences", "8", "11 sequences of 4096 tokens fit"),
        (changed(HOST, huge_pages="never"), (), "huge pages", "echo madvise > ", "they are off"),
        (changed(HOST, governors=("performance", "powersave")), (), "governor", "cpupower", "powersave"),
    ):
        item = _advice(host, forms)[option]
        assert words in item.reason, item
        assert item.value is None if value is None else str(item.value).startswith(value), item
    assert {"huge pages", "governor"}.isdisjoint(_advice())
    assert (
        command(recommend(changed(HOST, quota=2.0), _forms()), Path("DIR"))
        == "vishwamai serve DIR --threads 2 --quantize int8"
    )


def _write(root, **files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_limits_of_control_groups_are_the_least_up_to_the_root(tmp_path):
    second, first, none = tmp_path / "v2", tmp_path / "v1", tmp_path / "none"
    group = "sys/fs/cgroup"
    _write(
        second,
        **{
            "proc/self/cgroup": "0::/slice/unit\n",
            f"{group}/slice/unit/cpu.max": "max 100000\n",
            f"{group}/slice/cpu.max": "150000 100000\n",
            f"{group}/slice/unit/memory.max": "max\n",
            f"{group}/slice/memory.max": "4294967296\n",
            f"{group}/memory.max": "8589934592\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
            "sys/devices/system/cpu/cpu1/cpufreq/scaling_governor": "powersave\n",
            "proc/meminfo": "MemTotal: 10 kB\nMemAvailable:     2048 kB\n",
        },
    )
    assert host_limits.cpu_quota(str(second)) == 1.5 and host_limits.memory_limit(str(second)) == 4 << 30
    assert host_limits.huge_pages(str(second)) == "never" and host_limits.governors(str(second)) == ("powersave",)
    assert host_limits.available_memory(str(second)) == 2 << 20
    _write(
        first,
        **{
            "proc/self/cgroup": "4:memory:/docker/a\n3:cpu,cpuacct:/docker/a\n0::/\n",
            f"{group}/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",  # a container sees its own group as the root
            f"{group}/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            f"{group}/memory/docker/a/memory.limit_in_bytes": "9223372036854771712\n",
            f"{group}/memory/memory.limit_in_bytes": "1073741824\n",
        },
    )
    assert host_limits.cpu_quota(str(first)) == 2.5 and host_limits.memory_limit(str(first)) == 1 << 30
    for read in (host_limits.cpu_quota, host_limits.memory_limit, host_limits.huge_pages, host_limits.available_memory):
        assert read(str(none)) is None
    assert host_limits.governors(str(none)) == ()


def test_rates_are_measured_on_every_processor():
    processors = doctor_serve.binding.choose(None, None).processors
    assert host_rates.copy_rate(processors, 0.02, 1 << 20) > 1e7
    steady = host_rates.clocks(processors, 0.04)
    assert 0 < steady.all_cores <= 1 and 0 <= steady.slow < 1


def test_the_command_prints_and_writes_its_figures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(doctor_serve, "measure", lambda: dataclasses.replace(HOST, others=3.0))
    model = world.tiny("llama2")
    path = tmp_path / "doctor.json"
    assert main(["doctor", "--serve", str(model), "--json", str(path)]) == 0
    shown = capsys.readouterr()
    for words in (
        "100.0 GB/s",
        "8 cores",
        "Other processes use this machine",
        "  int4 ",
        "leave it out: it fits and may",
    ):
        assert words in shown.out, words
    assert "... measuring copies and clocks" in shown.err
    record = json.loads(path.read_text())
    forms = {form["name"]: form for form in record["forms"]}
    assert list(forms) == ["bfloat16", "int8", "int4"]
    sizes = json.loads((model / "config.json").read_text())
    rows = sizes["vocab_size"] * sizes["hidden_size"]
    keys = 2 * 2 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["hidden_size"]
    keys //= sizes["num_attention_heads"]
    plain = forms["bfloat16"]
    tables = 1 if sizes["tie_word_embeddings"] else 2
    assert 2 * tables * rows < plain["weights"] < 2.2 * tables * rows  # nearly all are the vocab's
    assert plain["token"] == pytest.approx(plain["weights"] - 2 * (tables - 1) * rows + 512 * keys, abs=1)
    assert plain["most_tokens_per_s"] == pytest.approx(100e9 / plain["token"])
    assert record["command"] == f"vishwamai serve {model}" and record["host"]["copy_all"] == 100e9
    assert main(["doctor", "--serve", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["forms"] == [] and [item["option"] for item in record["advice"]] == ["--threads", "--numa"]
    assert main(["doctor", "--json"]) == 2 and "pass --serve too" in capsys.readouterr().err


def test_experts_that_a_token_does_not_reach_are_not_read(tmp_path):
    from vishwamai.models import ModelConfig

    sizes = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    config = ModelConfig.from_dict({"model_type": "mixtral", **sizes, **heads, **experts})
    others = 8 * 64 + 64 * (64 + 2 * 32) + 64 * 64 + 64 * 8 + 2 * 64
    of_experts = 8 * 3 * 64 * 128
    expected = (others + of_experts / 4) / (others + of_experts)
    assert doctor_serve._share_read(config) == pytest.approx(expected, rel=1e-6)
    dense = ModelConfig.from_dict({"model_type": "llama", **sizes, **heads})
    assert doctor_serve._share_read(dense) == 1.0
