"""A tour of a running server with OpenAI's client. Each cell runs by itself in an editor that knows `# %%`.

vishwamai serve DIR --port 8000
OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=none python examples/openai_client.py
"""

# %% Which model is served?
import json
import os

import httpx
import openai

client = openai.OpenAI()  # address and key from OPENAI_BASE_URL and OPENAI_API_KEY
model = client.models.list().data[0].id
print("model:", model)

# %% A text, piece by piece.
options = {"model": model, "prompt": "def mean(values):\n", "max_tokens": 24, "temperature": 0.7}
usage = {"include_usage": True}
for part in client.completions.create(**options, seed=1, stream=True, stream_options=usage):
    if part.choices:
        print(part.choices[0].text, end="", flush=True)
    else:
        print(f"\n{part.usage.completion_tokens} tokens; {part.usage.prompt_tokens} of the prompt")

# %% The same seed gives the same answer, whatever else is served. Two seeds are two answers.
first, again, second = (client.completions.create(**options, seed=seed).choices[0].text for seed in (1, 1, 2))
assert first == again
print("seed 1:", repr(first))
print("seed 2:", repr(second))

# %% An answer in the form of a JSON schema.
schema = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green", "blue"]}, "warm": {"type": "boolean"}},
    "required": ["colour", "warm"],
    "additionalProperties": False,
}
form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": schema}}
answer = client.completions.create(**options | {"max_tokens": 100}, extra_body={"response_format": form})
print("as JSON:", json.loads(answer.choices[0].text))

# %% A chat, where the model has a chat template.
question = [{"role": "user", "content": "Name a colour."}]
try:
    answer = client.chat.completions.create(model=model, messages=question, max_tokens=24, response_format=form)
    print("chat:", answer.choices[0].message.content)
except openai.BadRequestError as error:
    print("no chat:", error.body["message"])

# %% The most likely next tokens.
answer = client.completions.create(model=model, prompt="The colour of the sky is", max_tokens=1, logprobs=3)
for token, logprob in answer.choices[0].logprobs.top_logprobs[0].items():
    print(f"{logprob:8.3f}  {token!r}")

# %% A wrong option is an error that names it.
try:
    client.completions.create(model=model, prompt="a", temperature=-1)
except openai.BadRequestError as error:
    print("declined:", error.body["message"])

# %% How busy the server is.
address = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
for line in httpx.get(f"{address}/metrics").text.splitlines():
    if line.startswith("vishwamai_") and "_total" in line:
        print(line)
