"""The files of deploy/: what they name exists, and what they pass to `vishwamai serve` is what it takes.

An image is built where a builder and its base image are at hand; here the Containerfile is parsed.
"""

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from vishwamai.cli import command_parser
from vishwamai.inference import Settings, make_app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
INSTRUCTIONS = {
    *("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "RUN", "STOPSIGNAL", "USER"),
    "VOLUME",
}


def instructions(text):
    """(instruction, its words) of a Containerfile, continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def problems(text):
    """What is wrong with a Containerfile: unknown instructions, files that are absent, arguments without an ARG, extras
    that do not exist, words that are not JSON.
    """
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found, stages, declared, shared = [], [], set(), set()
    if instructions(text)[0][0] not in ("FROM", "ARG"):
        found.append("begins with neither FROM nor ARG")
    seen = set()
    for name, rest in instructions(text):
        seen.add(name)
        if name not in INSTRUCTIONS:
            found.append(f"unknown instruction {name}")
        elif name == "ARG":
            (declared if "FROM" in seen else shared).add(rest.partition("=")[0])
            if rest.startswith("EXTRAS="):
                found += [f"unknown extra {extra}" for extra in rest[7:].split(",") if extra not in extras]
        elif name == "FROM":
            stages += re.findall(r" AS (\w+)$", rest)
            found += [f"{word} is not declared" for word in re.findall(r"\$\{(\w+)\}", rest) if word not in shared]
            declared = set()  # a stage sees its own arguments only
        elif name == "COPY":
            origin = re.match(r"--from=(\w+) ", rest)
            if origin and origin[1] not in stages:
                found.append(f"no stage {origin[1]}")
            if not origin:
                found += [f"{path} is absent" for path in rest.split()[:-1] if not (ROOT / path).exists()]
        elif name == "RUN":
            checked = subprocess.run(["sh", "-n", "-c", rest], capture_output=True, text=True)
            found += [checked.stderr] if checked.returncode else []
            found += [f"{w} is not declared" for w in re.findall(r"\$\{(\w+)\}", rest) if w not in declared]
        elif rest.startswith("[") or name == "ENTRYPOINT":
            json.loads(rest)
    return found


def test_the_containerfile_is_one():
    text = (DEPLOY / "Containerfile").read_text()
    assert problems(text) == []
    (health,) = [rest for name, rest in instructions(text) if name == "HEALTHCHECK"]
    compile(json.loads(health[health.index("CMD ") + 4 :])[2], "health", "exec")
    builds = re.findall(r"--build-arg EXTRAS=([\w,]+)", text)
    for extras in builds:
        assert problems(text.replace("ARG EXTRAS=serve", f"ARG EXTRAS={extras}")) == []
    for old, new, reason in (
        ("ARG EXTRAS=serve", "ARG EXTRAS=none", "unknown extra none"),
        ("--from=build", "--from=other", "no stage other"),
        ("COPY . /source", "COPY nothing /source", "nothing is absent"),
        ("ARG COMPILER=yes\n", "", "COMPILER is not declared"),
        ("fi\n", "\n", "syntax error"),
        ("USER", "USR", "unknown instruction USR"),
    ):
        assert any(reason.lower() in str(one).lower() for one in problems(text.replace(old, new, 1))), reason


def serve_arguments(words):
    return command_parser("serve").parse_args([word for word in words if word != "serve"])


def test_kubernetes_asks_what_the_server_answers():
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    given = serve_arguments(container["args"])
    assert given.host == "0.0.0.0" and given.port == container["ports"][0]["containerPort"]
    assert pod["spec"]["terminationGracePeriodSeconds"] > given.drain
    probes = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert probes == {"startup": "/health", "readiness": "/ready", "liveness": "/health"}
    routes = {getattr(route, "path", None) for route in make_app(None, Settings("tiny")).routes}
    assert routes >= {*probes.values()}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert str(given.api_key_file).startswith(mounts["keys"])
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    user = str(pod["spec"]["securityContext"]["runAsUser"])
    assert f"USER {user}" in (DEPLOY / "Containerfile").read_text()


def test_the_unit_starts_the_server():
    text = (DEPLOY / "vishwamai.service").read_text()
    pairs = [line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#")]
    values = dict(pairs)
    words = shlex.split(values["ExecStart"])
    assert words[0].endswith("/bin/vishwamai") and words[1] == "serve"
    assert int(values["TimeoutStopSec"]) > serve_arguments(words[1:]).drain
    assert values["CacheDirectory"] in values["Environment"] and values["Restart"] == "on-failure"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit(tmp_path):
    unit = tmp_path / "vishwamai.service"
    text = (
        (DEPLOY / "vishwamai.service").read_text().replace("/opt/vishwamai/bin/vishwamai", shutil.which("true") or "")
    )
    unit.write_text(text)
    check = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True)
    said = [line for line in (check.stdout + check.stderr).splitlines() if "vishwamai.service" in line]
    assert said == [], said


def test_the_pool_of_a_gateway_has_the_pods_of_the_deployment():
    """The fields that the schema of InferencePool (inference.networking.k8s.io/v1) asks for."""
    deployment = next(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    pool, route = yaml.safe_load_all((DEPLOY / "inference-pool.yaml").read_text())
    assert (pool["apiVersion"], pool["kind"]) == ("inference.networking.k8s.io/v1", "InferencePool")
    template = deployment["spec"]["template"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    ports = [port["containerPort"] for port in container["ports"]]
    assert [port["number"] for port in pool["spec"]["targetPorts"]] == ports
    picker = pool["spec"]["endpointPickerRef"]
    assert picker["name"] and picker["port"]["number"] and picker["failureMode"] in ("FailOpen", "FailClose")
    (rule,) = route["spec"]["rules"]
    group, _ = pool["apiVersion"].split("/")
    assert rule["backendRefs"] == [{"group": group, "kind": pool["kind"], "name": pool["metadata"]["name"]}]
