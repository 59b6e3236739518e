"""All benchmarks, in the order of the page."""

from collections.abc import Sequence

from tests.benchmarks.calls import Calls
from tests.benchmarks.frame import Benchmark
from tests.benchmarks.gil import Gil
from tests.benchmarks.io import Io
from tests.benchmarks.policy import Policy
from tests.benchmarks.scale import Scale
from tests.benchmarks.start import Start
from tests.benchmarks.training import Training

BENCHMARKS: Sequence[Benchmark] = (Io(), Calls(), Training(), Gil(), Scale(), Policy(), Start())
