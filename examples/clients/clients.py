"""Client libraries against a running server: each asks, and parses the answer itself.

python examples/clients/clients.py --url http://127.0.0.1:8000/v1 --environments build/clients --install
python examples/clients/clients.py --serve DIR --environments build/clients --only litellm lm_eval

Every library has an environment of its own, because their dependencies contradict one another. `--install` makes them.
A client whose package is not installed is skipped by name. The exit status is 1 where a client fails. `make clients`
does all of this with a server for SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

Names = Literal["red", "green", "blue"]
FOLDER = Path(__file__).parent
URL = os.environ.get("OPENAI_BASE_URL", "")
MODEL = os.environ.get("CLIENTS_MODEL", "")
QUESTION: Any = [{"role": "user", "content": "Name a colour."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def with_openai() -> str:
    import openai
    from pydantic import BaseModel

    class Colour(BaseModel):
        name: Names
        warm: bool

    client = openai.OpenAI()
    ask: dict[str, Any] = {"model": MODEL, "messages": QUESTION}
    with client.chat.completions.stream(**ask, max_tokens=16) as stream:
        assert any(event.type == "content.delta" and event.delta for event in stream)
    call = client.chat.completions.create(**ask, tools=[WEATHER], tool_choice="required").choices[0].message.tool_calls
    assert json.loads(call[0].function.arguments)["city"] in ("Paris", "Rome")
    result = {"role": "tool", "tool_call_id": call[0].id, "content": "21 degrees"}
    turns = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call[0].model_dump()]}, result]
    assert client.chat.completions.create(model=MODEL, messages=turns, tools=[WEATHER], max_tokens=16).choices
    vectors = client.embeddings.create(model=MODEL, input=["a", "b"]).data  # asked for in base64
    assert len(vectors) == 2 and len(vectors[0].embedding) > 1
    colour = client.chat.completions.parse(**ask, response_format=Colour, max_tokens=200).choices[0].message.parsed
    return f"{colour}"


def with_litellm() -> str:
    import litellm

    ask: dict[str, Any] = {"model": f"openai/{MODEL}", "messages": QUESTION, "max_tokens": 16, "api_base": URL}
    answer = litellm.completion(**ask).choices[0].message.content
    parts = [part.choices[0].delta.content or "" for part in litellm.completion(**ask, stream=True)]
    assert answer and "".join(parts)
    call = litellm.completion(**ask | {"max_tokens": 100}, tools=[WEATHER], tool_choice="required")
    assert call.choices[0].message.tool_calls[0].function.name == "weather"
    return answer


def with_instructor() -> str:
    import instructor
    import openai
    from pydantic import BaseModel

    class Colour(BaseModel):
        name: Names
        warm: bool

    colours = []
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(), mode=mode)
        colours.append(client.chat.completions.create(model=MODEL, response_model=Colour, messages=QUESTION))
    return f"{colours}"


def with_langchain() -> str:
    from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
    from pydantic import BaseModel

    class Colour(BaseModel):
        """A colour."""

        name: Names
        warm: bool

    chat = ChatOpenAI(model=MODEL, max_tokens=200)
    assert "".join(part.text for part in chat.stream("Name a colour."))
    assert OpenAI(model=MODEL, max_tokens=8).invoke("The sky is")
    assert len(OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False).embed_query("a")) > 1
    colours = [chat.with_structured_output(Colour, method=method).invoke("Name a colour.") for method in
               ("json_schema", "function_calling")]  # fmt: skip
    return f"{colours}"


def with_llama_index() -> str:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    options: dict[str, Any] = {"model": MODEL, "api_base": URL, "api_key": "none", "max_tokens": 16}
    chat = OpenAILike(**options, is_chat_model=True)
    assert "".join(part.delta or "" for part in chat.stream_chat([ChatMessage(role="user", content="Hello")]))
    assert OpenAILike(**options, is_chat_model=False).complete("The sky is").text
    return str(chat.chat([ChatMessage(role="user", content="Name a colour.")]).message.content)


def with_pydantic_ai() -> str:
    from pydantic import BaseModel
    from pydantic_ai import Agent, ModelSettings, NativeOutput, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Colour(BaseModel):
        name: Names
        warm: bool

    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key="none"))
    settings = ModelSettings(max_tokens=200)
    outputs = [
        Agent(model, output_type=form, model_settings=settings).run_sync("Name a colour.").output
        for form in (NativeOutput(Colour), ToolOutput(Colour))
    ]
    return f"{outputs}"


def with_openai_agents() -> str:
    import agents
    import openai
    from pydantic import BaseModel

    class Colour(BaseModel):
        name: Names
        warm: bool

    agents.set_tracing_disabled(True)
    model = agents.OpenAIChatCompletionsModel(MODEL, openai.AsyncOpenAI())
    settings = agents.ModelSettings(max_tokens=200)
    agent = agents.Agent("painter", instructions="Be brief.", model=model, model_settings=settings, output_type=Colour)
    return str(agents.Runner.run_sync(agent, "Name a colour.").final_output)


def with_smolagents() -> str:
    import smolagents

    @smolagents.tool
    def weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name.
        """
        return f"21 degrees in {city}"

    model = smolagents.OpenAIModel(MODEL, api_base=URL, api_key="none", max_tokens=64)
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is the weather in Paris?"}]}]
    message = model(messages, tools_to_call_from=[weather], tool_choice="required")
    assert message.tool_calls[0].function.name in ("weather", "final_answer")
    return f"{message.tool_calls[0].function}"


def with_lm_eval() -> str:
    import lm_eval
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    options = {"base_url": f"{URL}/completions", "tokenizer": os.environ["CLIENTS_TOKENIZER"], "batch_size": 4}
    model = LocalCompletionsAPI(model=MODEL, num_concurrent=1, **options)
    choices = [" Paris", " London", " banana"]
    requests = [
        Instance("loglikelihood", {}, ("The capital of France is", choice), i) for i, choice in enumerate(choices)
    ]
    scores = model.loglikelihood(requests)
    assert len(scores) == 3 and all(score < 0 for score, _ in scores)
    rolling = model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("The sky is blue.",), 0)])
    best = max(range(3), key=lambda i: scores[i][0])
    return f"lm-eval {lm_eval.__version__}: the likeliest is{choices[best]}; rolling {float(rolling[0]):.2f}"


def with_guidellm() -> str:
    program = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
    program += ["--backend", f"kind=openai_http,target={URL.removesuffix('/v1')},model={MODEL}"]
    program += ["--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3"]
    program += ["--tokenizer", f"kind=huggingface_auto,model={os.environ['CLIENTS_TOKENIZER']}"]
    program += ["--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        subprocess.run([*program, "--output", f"kind=json,path={report}"], check=True, stdout=subprocess.DEVNULL)
        totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert totals["successful"] == 3 and totals["errored"] == 0, totals
    return f"{totals}"


PACKAGES = {
    "openai": ["openai", "pydantic"],
    "litellm": ["litellm"],
    "instructor": ["instructor"],
    "langchain": ["langchain-openai"],
    "llama_index": ["llama-index-llms-openai-like"],
    "pydantic_ai": ["pydantic-ai-slim[openai]"],
    "openai_agents": ["openai-agents"],
    "smolagents": ["smolagents[openai]"],
    "lm_eval": ["lm-eval[api]", "transformers"],
    "guidellm": ["guidellm"],
    "ai_sdk": ["ai", "@ai-sdk/openai-compatible", "zod"],  # of npm
}


def install(name: str, folder: Path) -> None:
    """Makes the environment of one client, unless it exists; what the registry lacks leaves it without."""
    if name == "ai_sdk":
        if shutil.which("npm") and not (folder / "node_modules").exists():
            folder.mkdir(parents=True, exist_ok=True)
            subprocess.run(["npm", "install", "--silent", *PACKAGES[name]], cwd=folder, check=False)
    elif not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
        subprocess.run(
            [folder / "bin" / "pip", "install", "-q", "--disable-pip-version-check", *PACKAGES[name]], check=False
        )


def command(name: str, folder: Path) -> list[str] | None:
    """What runs one client; None where it is not installed."""
    if name == "ai_sdk":
        node = shutil.which("node")
        return [node, str(FOLDER / "ai_sdk.mjs")] if node and (folder / "node_modules" / "ai").exists() else None
    python = folder / "bin" / "python"
    package = {
        "langchain": "langchain_openai",
        "llama_index": "llama_index.llms.openai_like",
        "openai_agents": "agents",
    }
    probe = [str(python), "-c", f"import {package.get(name, name)}"]
    present = python.exists() and subprocess.run(probe, capture_output=True, check=False).returncode == 0
    return [str(python), str(Path(__file__).resolve()), "--run", name] if present else None


@contextlib.contextmanager
def served(directory: Path) -> Iterator[str]:
    """The address of a server of a model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = [sys.executable, "-m", "vishwamai.cli", "serve", str(directory), "--port", str(port)]
    options = ["--pooling", "mean", "--compile", "lazy", "--max-length", "4096", "--max-sequences", "8"]
    server = subprocess.Popen([*program, *options, "--log-level", "warning"])
    try:
        while server.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/ready"):
                break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait()


def visit(url: str, tokenizer: Path | None, names: Sequence[str], environments: Path, makes: bool) -> int:
    """Runs clients against a server and prints a line for each; how many failed."""
    with urllib.request.urlopen(f"{url}/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    shared = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": "none", "CLIENTS_MODEL": model}
    shared["CLIENTS_TOKENIZER"] = "" if tokenizer is None else str(tokenizer.resolve())
    failures = 0
    for name in names:
        folder = (environments / name).resolve()
        if makes:
            install(name, folder)
        program = command(name, folder)
        if program is None:
            print(f"{name:14} skipped: not installed", flush=True)
            continue
        started = time.monotonic()
        result = subprocess.run(program, env=shared, cwd=folder, capture_output=True, text=True, check=False)
        line = (result.stdout.strip().splitlines() or [""])[-1][:120]
        seconds = time.monotonic() - started
        print(f"{name:14} {'failed' if result.returncode else 'ok':7} {seconds:5.1f} s  {line}", flush=True)
        if result.returncode:
            failures += 1
            print(result.stderr[-2000:], flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a running server, with /v1")
    parser.add_argument("--serve", type=Path, metavar="DIR", help="a model to serve in place of --url")
    parser.add_argument("--environments", type=Path, default=Path("build/clients"), metavar="DIR")
    parser.add_argument("--install", action="store_true", help="make the environments that are missing")
    parser.add_argument("--only", nargs="+", choices=sorted(PACKAGES), metavar="NAME", help="these clients")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="of the model, for lm-eval and guidellm")
    parser.add_argument("--run", choices=sorted(PACKAGES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        print(globals()[f"with_{arguments.run}"]())
        return 0
    if (arguments.url is None) == (arguments.serve is None):
        parser.error("pass --url of a running server, or --serve DIR")
    tokenizer = arguments.tokenizer or arguments.serve
    names = arguments.only or list(PACKAGES)
    with contextlib.nullcontext(arguments.url) if arguments.serve is None else served(arguments.serve) as url:
        return 1 if visit(url, tokenizer, names, arguments.environments, arguments.install) else 0


if __name__ == "__main__":
    sys.exit(main())
