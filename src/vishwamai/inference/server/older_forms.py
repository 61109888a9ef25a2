"""Messages of OpenAI's interface in the form that chat templates read."""

from __future__ import annotations


def current(message: dict[str, object]) -> dict[str, object]:
    """A message in today's form: OpenAI's older one has `function_call`, and results of role "function"."""
    call = message.pop("function_call", None)
    if call is not None and not message.get("tool_calls"):
        message["tool_calls"] = [{"type": "function", "id": "call_0", "function": call}]
    if message["role"] == "function":
        message |= {"role": "tool", "tool_call_id": "call_0"}
    content = message.get("content")
    if message["role"] == "assistant" and isinstance(content, list):
        message["content"] = [_as_text(part) for part in content]
    return message


def _as_text(part: object) -> object:
    """A part of an assistant's message; OpenAI has refusals as parts of their own."""
    refusal = part.get("refusal") if isinstance(part, dict) and part.get("type") == "refusal" else None
    return {"type": "text", "text": refusal} if isinstance(refusal, str) else part
