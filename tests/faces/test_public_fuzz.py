"""Wrong calls of every public entry raise errors of ours, or are served: no error of Python, JAX or NumPy."""

import pytest

import public_fuzz
import rotation
from vishwamai.core.errors import VishwamaiError

ENTRIES = [pytest.param(entry, id=str(entry)) for entry in public_fuzz.entries()]
RESULTS = {  # classes that users are given, and do not make
    "Compiled", "CompilerProblem", "Cost", "Kernel", "KernelSchedule", "Memory", "Profile", "Report", "Schedule",
    "TPUKernel",
    "CodeTensor", "PackedQTensor", "PackedWeight", "QTensor", "Allocation", "MemorySettings", "MemoryStats",
    "Estimate", "Measurement", "DataParallelConfig", "KernelLayout", "MemoryLayout", "XlaReport",
    "ProfileResults", "RuntimeConfig", "FlagTrial", "FlagTuning",
    "AdaptiveSharding", "ArrayChoice", "PlacementChange",
    "ArrayPlace", "ExchangeEstimate", "OverlapEstimate", "Processes", "ShardingTable", "Span", "SplitAttentionEstimate",
    "Timeline",
}  # fmt: skip
RESULTS |= {
    "Change", "Diagnosis", "Level", "LiveArray", "PeakMemory", "Program", "ProgramMemory", "StepTime",
    "Answer", "Delta", "Embedder", "Load", "Plan", "Request", "Settings",
    "Detokenizer", "GenerationConfig", "LayerKind", "ModelConfig", "PagedBatch", "Rope", "SentenceEncoder", "Tokenizer",
}  # fmt: skip
RESULTS |= {"Decoder", "Attention", "LayerNorm", "Linear", "RMSNorm"}  # their constructors are Flax's
NOTHING_TO_PASS = {"current_config", "has_libtpu", "registered", "versions"}

SLOW = {"Engine", "plan_training"}  # many odd values are legal, and each of those compiles programs

LONG_ALONE = SLOW | {
    "FP8Optimizer",
    "MemoryPlanner",
    "apply_gradient_checkpointing",
    "optimize_batch_size",
    "explain_memory",
    "probe",
    "stage_times",
    "step_time",
    "trace",
    "verify",
    "tune_flags",
}  # examples of models, and of the TPU compiler


@pytest.fixture(autouse=True)
def directory_for_results(tmp_path, monkeypatch):
    """Some entries write to the file that an argument names."""
    monkeypatch.chdir(tmp_path)


def complaints(entry: public_fuzz.Entry, count: int | None, traced: bool) -> list[str]:
    found = []
    for name, call in public_fuzz.sample(entry, count, rotation.SEED):
        error = public_fuzz.outcome(entry.function, call, traced)
        if error is not None and not isinstance(error, VishwamaiError):
            found.append(f"{entry}({name}): {type(error).__name__}: {str(error)[:200]}")
    return found


@pytest.mark.parametrize(
    "entry", [pytest.param(*given.values, id=given.id, marks=rotation.one_in(3, i)) for i, given in enumerate(ENTRIES)]
)
def test_a_wrong_call_is_an_error_of_ours(entry):
    """A share of the wrong calls, chosen by the seed; each is traced only."""
    if entry.name in RESULTS | NOTHING_TO_PASS | LONG_ALONE:
        return
    assert public_fuzz.calls(entry), f"{entry} has no example, so nothing is known to be a right call of it"
    assert not complaints(entry, 25, traced=True)


@pytest.mark.long
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_wrong_call_is_an_error_of_ours(entry):
    """All wrong calls, run and not traced."""
    if entry.name not in RESULTS | SLOW:
        assert not complaints(entry, None, traced=False)


def test_the_fuzz_finds_what_is_raw():
    def raw(x: int = 0) -> int:
        return 1 // x if isinstance(x, int) else len(x)

    entry = public_fuzz.Entry(__name__, "RESULTS", raw)
    assert {text.partition(": ")[2].partition(":")[0] for text in complaints(entry, None, True)} >= {
        "TypeError",
        "ZeroDivisionError",
    }


def total(first: int, *rest: int, scale: float = 1.0) -> float:
    """
    >>> total(1, 2, 3)
    6.0
    """
    return scale * (first + sum(rest))


def test_options_behind_any_number_of_operands_are_made_wrong_too():
    wrong = public_fuzz.wrong_calls(public_fuzz.Entry(__name__, "total", total))
    assert {name.partition(" = ")[0] for name, _ in wrong} == {"first", "1", "2", "scale"}
