"""What `vishwamai.patch.transformers` gains on this machine: a forward pass, a training step and their memory, before
and after, in turns. The weights are random, so nothing is downloaded.

python examples/patch_transformers.py --dtype bfloat16 --tokens 512
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import vishwamai.patch


def seconds(call: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak(call: Callable[[], object], device: str) -> str:
    """The most memory that a call takes, which torch counts on GPUs alone."""
    if device != "cuda":
        return "-"
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return f"{torch.cuda.max_memory_allocated() / 2**20:.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--turns", type=int, default=7)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # The layers of Qwen3-0.6B, fewer of them.
    config = Qwen3Config(
        vocab_size=32_000,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=arguments.layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(device=device, dtype=getattr(torch, arguments.dtype))
    ids = torch.randint(0, 32_000, (1, arguments.tokens), device=device)

    def forward() -> None:
        with torch.no_grad():
            model(ids)

    def step() -> None:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()

    print(f"{device}, {arguments.dtype}, {torch.get_num_threads()} threads, {arguments.tokens} tokens")
    for name, call, training in (("forward", forward, False), ("training step", step, True)):
        model.train(training)
        times: dict[bool, list[float]] = {False: [], True: []}
        memory = {}
        for _ in range(arguments.turns + 1):  # the first turn warms up
            for patched in (False, True):
                patch = vishwamai.patch.transformers(model, loss=True) if patched else None
                call()
                times[patched].append(seconds(call, device))
                memory[patched] = peak(call, device)
                if patch is not None:
                    patch.undo()
        before, after = (statistics.median(seconds[1:]) for seconds in times.values())
        print(
            f"{name}: {before * 1e3:.1f} ms before, {after * 1e3:.1f} ms after: {before / after:.2f} times as fast; "
            f"memory {memory[False]} before, {memory[True]} after"
        )
    print(vishwamai.patch.transformers(model, loss=True))


if __name__ == "__main__":
    main()
