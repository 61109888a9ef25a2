"""Options with one spelling in every command, and wrong values that are declined before any work."""

import argparse
import contextlib
import json
import pathlib
import re
import shlex
import socket
import subprocess

import jax
import jsonschema
import pytest

import world
from vishwamai.cli import COMMANDS, address, command_parser, console, main, model, options
from vishwamai.cli.function import CommandError
from vishwamai.training.config_file import load_yaml, read_config, to_dict

HELP = {"bench", "check", "explain", "inspect", "matrix", "plan", "tune"}


@pytest.mark.parametrize("name", sorted(HELP))
def test_target_has_one_spelling_and_repeats(name):
    parser = argparse.ArgumentParser()
    options.add_target(parser, "a chip")
    assert parser.parse_args([]).target is None
    for words in (["--target", "v5e", "--target", "v6e"], ["--target=v5e,v6e"], ["--targets", "v5e, v6e"]):
        assert parser.parse_args(words).target == ["v5e", "v6e"]
    text = command_parser(name).format_help()
    assert "--target" in text and "--targets" not in text and "more than once" in re.sub(r"\s+", " ", text)


def test_json_takes_a_path_or_none_in_every_command(tmp_path, capsys):
    for name in ("bench", "generate", "inspect", "plan"):
        assert "--json [PATH]" in command_parser(name).format_help(), name
    parser = argparse.ArgumentParser()
    options.add_json(parser, "figures")
    assert parser.parse_args([]).json is None and parser.parse_args(["--json"]).json == options.STDOUT
    path = parser.parse_args(["--json", str(tmp_path / "a.json")]).json
    options.write_json({"a": 1}, path)
    assert json.loads(path.read_text()) == {"a": 1}
    options.write_json([2], options.STDOUT, indent=None)
    assert capsys.readouterr().out == "[2]\n"
    with pytest.raises(CommandError, match=r"steps=3 does not end in \.json; name such a file, or write the other"):
        parser.parse_args(["--json", "steps=3"])  # an argument of `plan`, which must not become a file


def test_explain_answers_for_each_target(capsys):
    words = ["explain", "vishwamai:rms_norm", "--args", "f32[8,128]", "--target", "v5e", "--target", "h100"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "On tpu (v5e)" in out and "On cuda (h100)" in out


def test_a_slice_is_declined_before_a_program_is_compiled(capsys, monkeypatch):
    monkeypatch.setattr("vishwamai.aot.inspect_many", lambda *_: pytest.fail("compiled"))
    words = ["inspect", "vishwamai:silu", "--args", "f32[8]", "--target", "v5e", "--target", "v5e:4x4"]
    assert main(words) == 2
    assert "'v5e:4x4' is a slice" in capsys.readouterr().err


def test_serve_tries_its_address_before_it_loads_a_model(capsys, monkeypatch):
    monkeypatch.setattr(model, "plan", lambda *_: pytest.fail("loaded"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for words, text in (
            (["--port", "99999"], "--port is 99999; pass 1 to 65535, or 0 for any port that is free"),
            (["--port", str(port)], f"--port {port}: another process listens there; pass another --port"),
            (["--host", "203.0.113.1"], "the host is not an address of this machine; pass 127.0.0.1"),
            (["--host", "no host"], "--host no host is not an address"),
        ):
            assert main(["serve", "anything", *words]) == 2
            assert text in capsys.readouterr().err
    address.check_address("127.0.0.1", port)  # free again, though a socket has just been there


@pytest.mark.parametrize("words", ["0", "-1", "nan", "inf", "much"])
def test_memory_is_a_number_of_gib(words, capsys):
    with pytest.raises(SystemExit):
        main(["generate", "anything", "--prompt", "a", "--memory", words])
    assert "is not a number of GiB above 0, such as 2 or 0.5" in capsys.readouterr().err


def test_memory_that_is_too_little_is_named_as_the_limit(capsys):
    path = world.tiny("qwen3")
    words = ["generate", str(path), "--token-ids", "1,2", "--memory", "0.001"]
    assert main([*words, "--quantize", "int8"]) == 2
    text = capsys.readouterr().err
    assert "planned of 1.0 MiB allowed" in text and "may be used (--memory)" in text
    assert "--quantize int4, or a larger --memory." in text


@pytest.mark.turns(6)
def test_the_second_start_reads_its_programs(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    words = ["generate", str(world.tiny("qwen3")), "--token-ids", "1,2", "--max-new-tokens", "2", "--max-length", "32"]
    words += ["--step-tokens", "8", "--temperature", "0", "--no-keep-packed"]
    try:
        texts = []
        for _ in range(2):
            assert main(words) == 0
            texts.append(capsys.readouterr().err)
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    assert all("compiling" not in text for text in texts)
    (count,) = re.findall(r"ready after .* s: (\d+) programs\n", texts[0])
    assert re.search(rf": {count} programs, {count} of them compiled earlier\n", texts[1])


def test_help_names_the_system_and_the_exit_status(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "generate, serve, train and plan language models" in text
    assert "130 stopped by Ctrl-C" in text and all(name in text for name in COMMANDS)


def test_a_shell_completes_commands_options_and_choices(tmp_path):
    script = tmp_path / "vishwamai.bash"
    with script.open("w") as file, contextlib.redirect_stdout(file):
        assert main(["completion", "bash"]) == 0

    def completed(*words):
        line = " ".join(map(shlex.quote, ("vishwamai", *words)))
        code = f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _vishwamai; echo ${{COMPREPLY[*]}}"
        return set(subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True).stdout.split())

    assert completed("") == set(COMMANDS) and completed("tr") == {"train"}
    assert {"--resume", "--output", "--push-to-hub"} <= completed("train", "--")
    assert completed("serve", "--dtype", "") == {"float32", "bfloat16", "float16"}
    assert completed("serve", "--quantize", "in") == {"int8", "int4"}
    assert completed("completion", "") >= {"bash", "zsh", "fish"}


def test_no_color_is_respected(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal
    console.console.cache_clear()
    try:
        assert console.console().no_color
    finally:
        console.console.cache_clear()


def test_the_schema_of_the_training_configuration(capsys):
    assert main(["train", "--print-schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    examples = pathlib.Path(__file__).parents[2] / "examples"
    for path in sorted(examples.glob("*.yaml")):
        assert validator.is_valid(load_yaml(path.read_text())), path
    wrong = [{"optimizer": {"learning_rat": 0.1}}, {"steps": "many"}, {"batch_size": 0}, {"data": {"packing": "none!"}}]
    assert not any(validator.is_valid(values) for values in wrong)
    assert schema["$defs"]["OptimizerSection"]["properties"]["learning_rate"]["description"]
    assert to_dict(read_config(None)).keys() == schema["properties"].keys()
