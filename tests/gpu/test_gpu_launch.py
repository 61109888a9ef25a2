"""How torch tensors reach a GPU, by Triton's own runtime with a driver that only notes what it is asked: the tensors'
device and its current stream, torch's memory, no word to the host; forward, and backward in autograd's thread. What
such a launch needs to be captured in a CUDA graph.
"""

import contextlib
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import contract  # noqa: E402
import vishwamai.torch as vt  # noqa: E402
from vishwamai.core import gpu  # noqa: E402
from vishwamai.core.errors import DeviceError  # noqa: E402
from vishwamai.torch import bridge, rope  # noqa: E402
from vishwamai.torch import launch as launching  # noqa: E402

pytestmark = [
    pytest.mark.skipif(contract.INTERPRETED, reason="a process with the interpreter launches nothing"),
    pytest.mark.skipif(gpu.why_not() is not None, reason=str(gpu.why_not())),
]
DEVICE = torch.device("cuda", 1)
STREAMS = {0: 1000, 1: 1001}  # torch's current stream of each device


class Machine:
    """A GPU machine as torch.cuda and Triton's driver show it, and what was asked of it.

    Attributes:
      present: that of the test at work; Triton keeps what launches a kernel for every test of the process.
    """

    present: "Machine"

    def __init__(self) -> None:
        self.current = threading.local()
        self.launches: list[tuple[str, int, int]] = []  # (kernel, device, stream)
        self.arguments: list[tuple[Any, ...]] = []  # of each launch, in the order of the kernel's parameters
        self.allocations: list[Any] = []
        self.scratch = 0
        self.copies = 0  # of the host's numbers

    def device(self) -> int:
        return getattr(self.current, "index", 0)

    @contextlib.contextmanager
    def on(self, device: Any) -> Any:
        before, self.current.index = self.device(), torch.device(device).index
        yield
        self.current.index = before


@pytest.fixture
def machine(monkeypatch):
    from triton_inside import IdleHopper, allocator, driver

    Machine.present = seen = Machine()

    class Launcher:
        def __init__(self, source: Any, metadata: Any):
            self.scratch = metadata.global_scratch_size

        def __call__(self, x: int, y: int, z: int, stream: int, function: str, *rest: Any) -> None:
            seen = Machine.present
            seen.launches.append((function, seen.device(), stream))
            seen.arguments.append(rest[4:])  # behind metadata and hooks
            if self.scratch:  # as triton.backends.nvidia.driver asks for it
                memory: Any = allocator()(x * y * z * self.scratch, 128, stream)
                seen.scratch += memory.numel()

    class Driver(IdleHopper):
        launcher_cls = Launcher

        def get_active_torch_device(self) -> Any:
            return torch.device("cuda", seen.device())

        def get_current_device(self) -> int:
            return seen.device()

        def get_current_stream(self, device: int) -> int:
            return STREAMS[device]

    def allocating(make: Any) -> Any:
        def allocate(*args: Any, device: Any = None, **kwargs: Any) -> Any:
            if device is None or torch.device(device).type != "cuda":
                return make(*args, device=device, **kwargs)
            seen.allocations.append(torch.device(device))
            return make(*args, **kwargs)

        return allocate

    def copying(make: Any) -> Any:
        def copy(*args: Any, device: Any = None, **kwargs: Any) -> Any:
            seen.copies += device is not None and torch.device(device).type == "cuda"
            return make(*args, **kwargs)

        return copy

    # Every tensor says that it is on the second GPU; its numbers, which nothing reads, are on the CPU.
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True), raising=False)
    monkeypatch.setattr(torch.Tensor, "device", property(lambda self: getattr(self, "place", DEVICE)), raising=False)
    monkeypatch.setattr(torch.cuda, "device", seen.on)
    monkeypatch.setattr(torch.cuda, "current_device", seen.device)
    monkeypatch.setattr(launching, "_READY", {})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100 80GB HBM3")
    torch._dynamo.trace_rules.lookup(torch.arange)  # Dynamo lists torch's functions once, and must see the real ones
    for name in ("empty", "zeros", "arange"):
        monkeypatch.setattr(torch, name, allocating(getattr(torch, name)))
    for name in ("tensor", "as_tensor"):
        monkeypatch.setattr(torch, name, copying(getattr(torch, name)))
    before = driver._active
    driver.set_active(Driver())
    yield seen
    driver._active = before
    rope._placed.cache_clear()  # they are on the CPU
    bridge._on_gpu.cache_clear()


class Asked(TorchDispatchMode):
    """What torch itself is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


WAITS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "unique", "masked_select", "_to_cpu"}
"""Operators for which the host waits for the device."""
X = (64, 256)
HEADS = (1, 2, 128, 64)
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 64}
MROPE = {"rope_type": "default", "mrope_section": [4, 6, 6]}
# name: (function, shapes)
CALLS: dict[str, tuple[Any, Any]] = {
    "norm": (lambda x, s: vt.rms_norm(x, s), (X, (256,))),
    "gemm": (lambda a, b: vt.gemm(a, b, activation="silu"), (X, (256, 128))),
    "softmax": (lambda x: vt.softmax(x), (X,)),
    "gelu": (lambda x: vt.fused_gelu_dropout(x, deterministic=True), (X,)),
    "rope": (lambda x: vt.apply_rope(x), (HEADS,)),
    "rope of positions": (
        lambda x: vt.apply_rope(x, torch.arange(128, device=x.device), scaling=DYNAMIC),
        ((1, 2, 128, 128),),
    ),
    "rope of three coordinates": (
        lambda x: vt.apply_rope(x, torch.arange(384, device=x.device).reshape(3, 1, 128), scaling=MROPE),
        ((1, 2, 128, 32),),
    ),
    "attention": (lambda q, k, v: vt.flash_attention(q, k, v, causal=True), (HEADS,) * 3),
    "attention with a bias": (
        lambda q, k, v, b: vt.flash_attention(q, k, v, b),
        (HEADS,) * 3 + ((1, 2, 128, 128),),
    ),
    "gated_linear_unit": (lambda x, w: vt.gated_linear_unit(x, w), (X, (2, 256, 128))),
}


def compiled_by_default(name):
    return name == "norm" or name.startswith("rope")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if compiled_by_default(n) else pytest.mark.long) for n in CALLS]
)
def test_a_launch_says_nothing_to_the_host(name, machine):
    function, shapes = CALLS[name]
    args = [torch.randn(s).bfloat16().requires_grad_() for s in shapes]
    with Asked() as asked:
        y = function(*args)
        forward = len(machine.launches)
        cotangent = torch.ones_like(y)
        # Of a thread whose current device is another, as autograd's may be.
        errors: list[BaseException] = []

        def backward() -> None:
            try:
                with Asked() as asked_there:
                    torch.autograd.grad(y, args, cotangent)
                asked.operators |= asked_there.operators
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
    assert not errors, errors
    assert 0 < forward < len(machine.launches)
    assert {(device, stream) for _, device, stream in machine.launches} == {(1, STREAMS[1])}
    assert set(machine.allocations) == {DEVICE} and machine.device() == 0
    assert not asked.operators & WAITS and asked.operators, asked.operators
    copies = machine.copies
    function(*args)
    assert machine.copies == copies  # constants are placed by the first call


def test_a_word_to_the_host_is_noticed():
    with Asked() as asked:
        torch.ones(1).item()
    assert asked.operators & WAITS


def flat(x, names):
    """The leaves of nested tuples: of tensors their names by place, else their shapes; other values as they are."""
    if isinstance(x, tuple):
        return [leaf for each in x for leaf in flat(each, names)]
    return [names.get(x.data_ptr(), x.shape) if isinstance(x, torch.Tensor) else x]


@pytest.mark.turns(5)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "attention" else pytest.mark.long) for n in CALLS])
def test_a_kernel_that_is_known_gets_what_triton_gave_it(name, machine):
    """The first launch goes through Triton's own way to the compiled kernel, later ones straight to it."""
    function, shapes = CALLS[name]
    args = [torch.randn(s).bfloat16() for s in shapes]
    calls = []
    for known in (False, True, True, True):
        if not known:
            launching._READY.clear()
        machine.arguments.clear()
        y = function(*args)
        names = {x.data_ptr(): f"operand {i}" for i, x in enumerate(args)} | {y.data_ptr(): "result"}
        calls.append([flat(launch, names) for launch in machine.arguments])
    assert launching._READY and "operand 0" in calls[0][0] and any("result" in launch for launch in calls[0]), calls[0]
    assert calls[1:] == calls[:1] * 3


def test_known_kernels_are_forgotten_when_there_are_many(machine, monkeypatch):
    monkeypatch.setattr(launching, "MOST", 2)
    for rows in range(1, 6):
        vt.softmax(torch.ones(rows, 256).bfloat16())
        assert len(launching._READY) <= 2
    assert len(machine.launches) == 5


@pytest.mark.turns(5)
def test_scratch_is_torchs_memory(machine):
    """Kernels that make tensor descriptors on the device need memory of their own for each launch; the allocator is set
    where the launch is, in any thread.
    """
    a, b = (torch.randn(s).bfloat16() for s in ((64, 256), (256, 128)))
    thread = threading.Thread(target=lambda: vt.gemm(a, b))
    thread.start()
    thread.join()
    assert [kernel for kernel, _, _ in machine.launches] == ["matmul"]
    assert machine.scratch > 0 and machine.allocations == [DEVICE] * 2  # the result, and the scratch


def test_tensors_of_two_devices_are_errors(machine):
    x, scale = torch.randn(X).bfloat16(), torch.ones(256).bfloat16()
    scale.place = torch.device("cpu")  # type: ignore[attr-defined]
    how = gpu.Launch(gpu.TritonKernel("vishwamai.ops.norm.gpu_kernels", "forward"), (1,), ())
    with pytest.raises(DeviceError, match=r"forward: `scale_ptr` is on cpu, but `x_ptr` is on cuda:1; move all"):
        launching.launch(how, {"x_ptr": x, "scale_ptr": scale}, {})
    assert not machine.launches


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", CALLS)
def test_capture_in_a_graph(name):
    """Forward and backward, captured once and replayed on new numbers, give what the eager calls give."""
    function, shapes = CALLS[name]
    args = [torch.randn(s, device="cuda").bfloat16().requires_grad_() for s in shapes]

    def step() -> tuple[Any, ...]:
        y = function(*args)
        return y, *torch.autograd.grad(y, args, torch.ones_like(y))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and places constants on the device
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for x in args:
        x.data.copy_(torch.randn_like(x))
    graph.replay()
    for ours, eager in zip(captured, step(), strict=True):
        assert torch.equal(ours, eager)
