"""The whole road on one page: a hand-written spiking network, trained on digits, compiled, and compared.

The network is plain PyTorch and knows nothing of sparsecomp. The data are scikit-learn's 1,797 digits of 8x8 pixels, so
training takes seconds on a CPU.
"""

import copy
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.text import Text
from torch import Tensor, nn

from sparsecomp.compiler.explain import explain
from sparsecomp.errors import ExtraError, OptionError
from sparsecomp.report import Report, last_report, rendered

SEED = 0
TIME_STEPS = 4
CLASSES = 10
EPOCHS = 4
TEST_SHARE = 0.2
MIN_ACCURACY = 0.9
MAX_FLIPS = 0.01
"""Share of predictions that rounding may change: a membrane next to the threshold fires in one and not in the other."""

_WARM_UP, _LEAST_CALLS, _MOST_CALLS, _SECONDS = 3, 5, 50, 1.0


class Fire(torch.autograd.Function):
    """1 where the membrane reaches the threshold; backward, the derivative of an arc tangent."""

    @staticmethod
    def forward(ctx: Any, membrane: Tensor) -> Tensor:
        """Spikes, 0 or 1, of `membrane` minus threshold."""
        ctx.save_for_backward(membrane)
        return (membrane >= 0).to(membrane.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """The surrogate gradient."""
        (membrane,) = ctx.saved_tensors
        return grads[0] / (1 + (torch.pi * membrane).square())


class LIF(nn.Module):
    """Leaky integrate-and-fire neurons over all time steps: (T, …) currents to (T, …) spikes."""

    def __init__(self, decay: float = 0.5, threshold: float = 1.0) -> None:
        super().__init__()
        self.decay, self.threshold = decay, threshold

    def forward(self, current: Tensor) -> Tensor:
        """Integrate, fire, reset to zero where fired."""
        membrane = torch.zeros_like(current[0])
        spikes = []
        for step in current.unbind():
            membrane = self.decay * membrane + step
            spike = Fire.apply(membrane - self.threshold)
            membrane = membrane * (1 - spike)
            spikes.append(spike)
        return torch.stack(spikes)


class DigitsNet(nn.Module):
    """Two convolutions and a linear layer between neurons; 16 output neurons vote for each class.

    Widths are multiples of 16, as the tensor-core kernels want them.
    """

    def __init__(self, width: int = 32, votes: int = 16) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * width)
        self.pool = nn.MaxPool2d(2)
        self.linear = nn.Linear(2 * width * 16, CLASSES * votes)
        self.neuron1, self.neuron2, self.neuron3 = LIF(), LIF(), LIF()

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, 8, 8) pixels to (B, CLASSES) mean firing rates."""
        current = self.norm1(self.conv1(x))
        spikes = self.neuron1(current.expand(TIME_STEPS, *current.shape))
        current = self.norm2(self.conv2(spikes.flatten(0, 1))).unflatten(0, spikes.shape[:2])
        spikes = self.pool(self.neuron2(current).flatten(0, 1)).flatten(1)
        spikes = self.neuron3(self.linear(spikes).unflatten(0, current.shape[:2]))
        return spikes.mean(0).unflatten(1, (CLASSES, -1)).mean(2)


@dataclass(slots=True)
class Outcome:
    """What the demo measured.

    Attributes:
        device: the device's name.
        implementation: what was asked of the compiler.
        samples: test samples, run as one batch.
        accuracy_eager, accuracy_compiled: share of right predictions on the test set.
        flips: predictions in which the two differ.
        milliseconds_eager, milliseconds_stock, milliseconds_compiled: median time of one batch, as it is, under
            `torch.compile` alone, and under it with our backend: what the last gains over the second is ours.
        compile_seconds: time of the first compiled call.
        densities: measured share of spikes in the input of each layer, by module path.
        report: what the compiler did, and why.
        train_seconds: time of training, eager.
    """

    device: str
    implementation: str
    samples: int
    accuracy_eager: float
    accuracy_compiled: float
    flips: int
    milliseconds_eager: float
    milliseconds_stock: float
    milliseconds_compiled: float
    compile_seconds: float
    densities: dict[str, float]
    report: Report
    train_seconds: float = 0.0

    @property
    def failures(self) -> list[str]:
        """What is not as it should be; empty after a good run."""
        found = []
        if self.accuracy_eager < MIN_ACCURACY:
            found.append(f"the network learnt too little: accuracy {self.accuracy_eager:.1%}")
        if self.flips > MAX_FLIPS * self.samples:
            found.append(f"compiled and eager differ in {self.flips} of {self.samples} predictions")
        return found

    def to_json(self) -> str:
        """Everything as one JSON object."""
        values = {**asdict(self), "rewritten": len(self.report.rewritten), "failures": self.failures}
        for name in ("graph_before", "graph_after"):
            del values["report"][name]
        return json.dumps(values, indent=2)


def run(
    device: str = "auto",
    implementation: str = "auto",
    as_json: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> int:
    """Train, compile, compare and print; returns 0 if the results are as they should be, else 1.

    Args:
        device: "cpu", "cuda", or "auto" for CUDA where there is one.
        implementation: as in `Options`.
        as_json: print one JSON object instead of text.
        say: is told what is going on.

    Raises:
        OptionError: there is no such device.
        ExtraError: scikit-learn is not installed, or no C++ compiler where one is needed.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise OptionError("device='cuda' is not there: this machine has no CUDA device; use 'cpu' or 'auto'")
    place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    x_train, y_train, x_test, y_test = (tensor.to(place) for tensor in digits())
    say(f"training on {len(x_train)} digits")
    start = time.perf_counter()
    net = train(x_train, y_train)
    train_seconds = time.perf_counter() - start
    say("compiling and timing: eager, stock torch.compile, sparsecomp")
    try:
        outcome = compare(net, x_test, y_test, implementation)
    except Exception as error:
        if "C++ compiler" not in str(error):
            raise
        raise ExtraError("torch.compile found no C++ compiler, which a CPU needs: install g++, or set CXX") from error
    outcome.train_seconds = train_seconds
    if as_json:
        print(outcome.to_json())
    else:
        _show(outcome)
    return 1 if outcome.failures else 0


def compare(net: nn.Module, x: Tensor, y: Tensor, implementation: str = "auto") -> Outcome:
    """Compile a trained network and compare it with itself, on one batch `x` with labels `y`."""
    options: dict[str, Any] = {"implementation": implementation}
    stock = torch.compile(copy.deepcopy(net))
    compiled = torch.compile(copy.deepcopy(net), backend="sparsecomp", options=options)
    with torch.no_grad():
        eager_prediction = net(x).argmax(1)
        start = time.perf_counter()
        compiled_prediction = compiled(x).argmax(1)
        _wait(x.device)
        compile_seconds = time.perf_counter() - start
        report = last_report()
        measured = explain(net, x, options=options)
        return Outcome(
            device=torch.cuda.get_device_name(x.device) if x.device.type == "cuda" else "CPU",
            implementation=implementation,
            samples=len(y),
            accuracy_eager=_share(eager_prediction == y),
            accuracy_compiled=_share(compiled_prediction == y),
            flips=int((eager_prediction != compiled_prediction).sum()),
            milliseconds_eager=_milliseconds(lambda: net(x), x.device),
            milliseconds_stock=_milliseconds(lambda: stock(x), x.device),
            milliseconds_compiled=_milliseconds(lambda: compiled(x), x.device),
            compile_seconds=compile_seconds,
            densities={site.module: site.density for site in measured.sites if site.density is not None},
            report=report,
        )


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images (N, 1, 8, 8) in [0, 1] and their labels, always split the same way.

    Raises:
        ExtraError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ExtraError("the digits are scikit-learn's: pip install -e '.[demo]' in a clone") from None
    images, labels = load_digits(return_X_y=True)
    x = torch.as_tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.as_tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED))
    test, rest = order[: int(TEST_SHARE * len(x))], order[int(TEST_SHARE * len(x)) :]
    return x[rest], y[rest], x[test], y[test]


def train(x: Tensor, y: Tensor, epochs: int = EPOCHS, batch: int = 64) -> DigitsNet:
    """A trained network in evaluation mode, on the device of `x`; the global random stream is left as it was."""
    devices = [x.device] if x.device.type == "cuda" else []
    with torch.random.fork_rng(devices), _one_thread():
        torch.manual_seed(SEED)
        net = DigitsNet().to(x.device)
        optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
        for _ in range(epochs):
            for rows in torch.randperm(len(x)).to(x.device).split(batch):
                optimizer.zero_grad()
                # rates lie in [0, 1]: sharper, a softmax can tell them apart
                F.cross_entropy(10 * net(x[rows]), y[rows]).backward()
                optimizer.step()
    return net.eval()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Maps of 8x8 are too small to share out, and on a busy machine threads that wait for each other take minutes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _show(outcome: Outcome) -> None:
    shares = ", ".join(f"{module} {density:.1%}" for module, density in outcome.densities.items())
    lines = [
        f"trained in {outcome.train_seconds:.1f} s, compiled in {outcome.compile_seconds:.1f} s",
        str(outcome.report),
        f"measured non-zero share of inputs: {shares}",
        f"accuracy on {outcome.samples} digits: eager {outcome.accuracy_eager:.2%}, "
        f"compiled {outcome.accuracy_compiled:.2%}, {outcome.flips} predictions differ",
        f"one batch on {outcome.device}: eager {outcome.milliseconds_eager:.3f} ms, "
        f"stock torch.compile {outcome.milliseconds_stock:.3f} ms, sparsecomp {outcome.milliseconds_compiled:.3f} ms",
        *(f"FAILED: {failure}" for failure in outcome.failures),
    ]
    print(rendered(*map(Text, lines)))


def _milliseconds(call: Callable[[], Any], device: torch.device) -> float:
    """Median time of one call over about a second; a GPU has finished when the clock stops."""
    for _ in range(_WARM_UP):
        call()
    times: list[float] = []
    while len(times) < _LEAST_CALLS or (len(times) < _MOST_CALLS and sum(times) < _SECONDS):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _share(right: Tensor) -> float:
    return right.float().mean().item()
